//! The target's data plane on the simulated network: one per reactor.

use std::sync::Arc;

use usurp_fabric::{
    CompletionBatch, Fabric, FabricError, Lkey, PostCause, PostError, QpLimits, QpNum, RecvWr,
    SendOp, SendWr, Sge, WcStatus,
};
use usurp_reactor::Nanos;
use usurp_reactor::mem::Arena;

use super::link::flush_sent;
use super::queue::{Phase, Qp, Ready, Sent, checksum};
use super::{Net, Region, Shared};

/// A connection on its way between control thread and reactor.
#[derive(Debug)]
pub struct SimEndpoint {
    /// The link.
    pub(crate) link: usize,
}

/// See the module's header.
pub struct SimFabric {
    /// The network.
    net: Shared,
    /// Which fabric this is.
    index: usize,
    /// Queue pairs: number and link.
    qps: Vec<(QpNum, usize)>,
    /// Depths of the queue pairs it makes.
    depths: (u32, u32),
    /// Arenas that bdevs lend: several commands may use them at a time.
    lent: Vec<u64>,
}

impl SimFabric {
    /// Another fabric of that network. `lent`: addresses of arenas that bdevs lend.
    pub fn new(net: Shared, send_wr: u32, recv_wr: u32, lent: Vec<u64>) -> SimFabric {
        let index = {
            let net = &mut *net.borrow_mut();
            net.regions.push(Vec::new());
            net.turns.push(0);
            net.next_qp.push(1);
            net.regions.len() - 1
        };
        SimFabric { net, index, qps: Vec::new(), depths: (send_wr, recv_wr), lent }
    }

    fn link(&self, qp: QpNum) -> Option<usize> {
        self.qps.iter().find(|(n, _)| *n == qp).map(|(_, link)| *link)
    }

    fn known(&self, qp: QpNum) -> usize {
        self.link(qp).expect("the queue pair exists")
    }
}

impl Fabric for SimFabric {
    type Endpoint = SimEndpoint;

    fn register(&mut self, arena: &Arc<Arena>) -> Result<Lkey, FabricError> {
        let regions = &mut self.net.borrow_mut().regions[self.index];
        if let Some(at) = regions.iter().position(|r| r.arena.addr() == arena.addr()) {
            return Ok(Lkey(at as u32));
        }
        let exclusive = !self.lent.contains(&arena.addr());
        regions.push(Region { arena: arena.clone(), exclusive });
        Ok(Lkey(regions.len() as u32 - 1))
    }

    fn adopt(&mut self, ep: SimEndpoint) -> Result<QpNum, (FabricError, SimEndpoint)> {
        let net = &mut *self.net.borrow_mut();
        let fails = net.config.setup_fails_ppm;
        if net.fault(fails) {
            return Err((FabricError::Exhausted { what: "queue pair", limit: 0 }, ep));
        }
        let num = QpNum(net.next_qp[self.index]);
        net.next_qp[self.index] += 1;
        let link = &mut net.links[ep.link];
        assert!(link.qp.is_none() && link.endpoint_out, "a connection is adopted twice");
        link.qp = Some(Qp::new(self.index, num, self.depths.0, self.depths.1));
        self.qps.push((num, ep.link));
        net.note("adopt", ep.link as u64, self.index as u64);
        Ok(num)
    }

    fn post_recv(&mut self, qp: QpNum, list: &[RecvWr]) -> Result<(), PostError> {
        let at = self.known(qp);
        let net = &mut *self.net.borrow_mut();
        let fails = net.config.post_fails_ppm;
        let stop = if net.fault(fails) { net.rng.index(list.len()) } else { list.len() };
        for (index, wr) in list.iter().enumerate() {
            if index == stop {
                net.note("post-fails", at as u64, index as u64);
                return Err(PostError { index, cause: PostCause::QueueFull });
            }
            net.check_free(self.index, &wr.sge, true);
            let now = net.now;
            let qp = net.links[at].qp.as_mut().expect("a known queue pair has its link");
            let used = qp.recv.len() as u32 + qp.recv_unpolled;
            assert!(used < qp.max_recv_wr, "link {at}: more receives than the queue holds");
            if qp.error {
                let done = qp.completion(wr.wr_id, WcStatus::Flushed, 0);
                qp.recv_unpolled += 1;
                qp.ready(now, Ready { at: 0, completion: Some(done), frees: 0, read: None });
            } else {
                qp.recv.push_back(*wr);
            }
        }
        let link = &mut net.links[at];
        link.next = link.next.min(net.now);
        Ok(())
    }

    fn post_send(&mut self, qp: QpNum, list: &[SendWr]) -> Result<(), PostError> {
        let at = self.known(qp);
        let net = &mut *self.net.borrow_mut();
        let fails = net.config.post_fails_ppm;
        let stop = if net.fault(fails) { net.rng.index(list.len()) } else { list.len() };
        for (index, wr) in list.iter().enumerate() {
            if index == stop {
                net.note("post-fails", at as u64, index as u64);
                return Err(PostError { index, cause: PostCause::QueueFull });
            }
            net.post_one(self.index, at, wr);
        }
        Ok(())
    }

    fn poll(&mut self, _now: Nanos, out: &mut CompletionBatch) -> usize {
        let net = &mut *self.net.borrow_mut();
        net.advance();
        if self.qps.is_empty() {
            return 0;
        }
        let room = out.room().min(net.rng.range(1, 32) as usize);
        net.turns[self.index] += 1;
        let start = net.turns[self.index];
        let mut count = 0;
        for i in 0..self.qps.len() {
            let (_, at) = self.qps[(start + i) % self.qps.len()];
            while count < room && net.poll_one(at, out) {
                count += 1;
            }
        }
        count
    }

    fn set_error(&mut self, qp: QpNum) {
        if let Some(at) = self.link(qp) {
            self.net.borrow_mut().qp_error(at);
        }
    }

    fn is_drained(&self, qp: QpNum) -> bool {
        let at = self.known(qp);
        self.net.borrow().links[at].qp.as_ref().is_some_and(|qp| qp.sq.is_empty())
    }

    fn release(&mut self, qp: QpNum) -> SimEndpoint {
        let at = self.known(qp);
        self.qps.retain(|(n, _)| *n != qp);
        let net = &mut *self.net.borrow_mut();
        let qp = net.links[at].qp.take().expect("a known queue pair has its link");
        assert!(qp.sq.is_empty(), "link {at}: released with sends in flight");
        assert!(qp.recv.is_empty(), "link {at}: released with receives posted");
        net.note("release", at as u64, qp.cq.len() as u64);
        let leg = net.leg();
        net.lose_init(at, leg);
        SimEndpoint { link: at }
    }

    fn limits(&self, qp: QpNum) -> QpLimits {
        self.known(qp);
        QpLimits {
            max_send_wr: self.depths.0,
            max_recv_wr: self.depths.1,
            max_inline: 0,
            max_rd_atomic: 4,
            max_sge_rd: 1,
        }
    }
}

impl Net {
    /// Posts one send.
    fn post_one(&mut self, fabric: usize, at: usize, wr: &SendWr) {
        let is_read = matches!(wr.op, SendOp::Read { .. });
        self.check_free(fabric, &wr.sge, is_read);
        let region = &self.regions[fabric][wr.sge.lkey.0 as usize];
        let exclusive = region.exclusive;
        let inside = region.arena.contains(wr.sge.addr, wr.sge.len as usize);
        assert!(inside, "link {at}: {wr:?} lies outside of its arena");
        let sum = if is_read || !exclusive { 0 } else { checksum(&self.local(fabric, &wr.sge)) };
        let leg = self.leg();
        let now = self.now;
        let slow = if self.links[at].peer_up { 0 } else { self.config.retry_ns };
        let link = &mut self.links[at];
        let qp = link.qp.as_mut().expect("a known queue pair has its link");
        assert!(qp.sq_used < qp.max_send_wr, "link {at}: more sends than the queue holds");
        qp.sq_used += 1;
        let mut sent = Sent {
            wr: *wr,
            phase: Phase::Posted,
            at: now + leg + slow,
            done_at: 0,
            status: WcStatus::Success,
            sum,
            data: Vec::new(),
            exclusive,
        };
        if qp.error {
            flush_sent(&mut sent, now, leg);
        }
        qp.sq.push_back(sent);
        link.next = link.next.min(now);
    }

    /// No posted request may use the same memory, if one of the two writes to it.
    fn check_free(&self, fabric: usize, sge: &Sge, writes: bool) {
        let exclusive = self.regions[fabric][sge.lkey.0 as usize].exclusive;
        if !exclusive || sge.len == 0 {
            return;
        }
        let meets = |other: &Sge| {
            other.len > 0
                && other.lkey == sge.lkey
                && sge.addr < other.addr + u64::from(other.len)
                && other.addr < sge.addr + u64::from(sge.len)
        };
        for at in &self.live {
            let Some(qp) = self.links[*at].qp.as_ref().filter(|qp| qp.fabric == fabric) else {
                continue;
            };
            let recv = qp.recv.iter().any(|wr| meets(&wr.sge));
            assert!(!recv, "link {at}: {sge:?} is a posted receive already");
            let sent = qp.sq.iter().find(|s| {
                let also_writes = matches!(s.wr.op, SendOp::Read { .. });
                (writes || also_writes) && meets(&s.wr.sge)
            });
            if let Some(sent) = sent {
                panic!("link {at}: {sge:?} is in use by {:?}", sent.wr);
            }
        }
    }

    /// Polls one completion of a link. False: there is none.
    fn poll_one(&mut self, at: usize, out: &mut CompletionBatch) -> bool {
        let now = self.now;
        loop {
            let Some(qp) = self.links[at].qp.as_mut() else { return false };
            if qp.cq.front().is_none_or(|r| r.at > now) {
                return false;
            }
            let ready = qp.cq.pop_front().expect("it was looked at");
            qp.sq_used -= ready.frees;
            let fabric = qp.fabric;
            if let Some((addr, len, sum)) = ready.read {
                let regions = &self.regions[fabric];
                let home = regions.iter().position(|r| r.arena.contains(addr, len as usize));
                let lkey = Lkey(home.expect("it was registered") as u32);
                let bytes = self.local(fabric, &Sge { addr, len, lkey });
                let kept = checksum(&bytes) == sum;
                assert!(kept, "link {at}: the sink of a READ changed before its completion");
            }
            let Some(completion) = ready.completion else { continue };
            if ready.frees == 0 {
                let qp = self.links[at].qp.as_mut().expect("it was there");
                qp.recv_unpolled -= 1;
            }
            out.push(completion);
            let status = completion.status as u64;
            self.note("completion", completion.wr_id, status);
            return true;
        }
    }
}
