//! A fabric without faults, delays or allocations: the initiator's memory is an arena of this
//! process, and every request is carried out when it is posted.
//!
//! Owns: one queue pair per channel, all of one reactor. For `tests/no_alloc`; the simulation has
//! its own.
//!
//! ```text
//!   send_to_target -> inbox (IU slots) --poll--> posted receive, completion
//!   post_send: READ, WRITE: copied at once; SEND -> outbox (IU slots) -> take_from_target
//! ```

use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use usurp_fabric::{
    Cm, CmEvent, Completion, CompletionBatch, ConnId, Fabric, FabricError, Lkey, LoginFormat,
    PostError, QpLimits, QpNum, RecvWr, Remote, SendOp, SendWr, Sge, WcStatus,
};
use usurp_reactor::Nanos;
use usurp_reactor::mem::Arena;

/// Longest IU.
const IU_MAX: usize = 8320;
/// Bytes copied at a time.
const BOUNCE: usize = 64 << 10;

/// Fixed IU slots, first in first out.
struct IuRing {
    slots: Box<[([u8; IU_MAX], usize)]>,
    head: usize,
    len: usize,
}

impl IuRing {
    fn new(count: usize) -> IuRing {
        IuRing { slots: vec![([0; IU_MAX], 0); count].into(), head: 0, len: 0 }
    }

    fn push(&mut self, iu: &[u8]) {
        assert!(self.len < self.slots.len(), "more IUs than credit allows");
        let at = (self.head + self.len) % self.slots.len();
        self.slots[at].0[..iu.len()].copy_from_slice(iu);
        self.slots[at].1 = iu.len();
        self.len += 1;
    }

    fn pop(&mut self, out: &mut [u8]) -> Option<usize> {
        if self.len == 0 {
            return None;
        }
        let (bytes, len) = &self.slots[self.head];
        out[..*len].copy_from_slice(&bytes[..*len]);
        let len = *len;
        self.head = (self.head + 1) % self.slots.len();
        self.len -= 1;
        Some(len)
    }
}

struct Link {
    num: QpNum,
    recv: VecDeque<RecvWr>,
    inbox: IuRing,
    outbox: IuRing,
    cq: VecDeque<Completion>,
    error: bool,
    /// What `accept` or `reject` answered.
    answer: Option<Vec<u8>>,
}

/// What fabric, connection manager and initiator share.
pub struct Loop {
    links: Vec<Link>,
    events: VecDeque<CmEvent>,
    arenas: Vec<Arc<Arena>>,
    /// The initiators' memory, all of it under one key.
    memory: Arc<Arena>,
    bounce: Box<[u8]>,
    depths: (u32, u32),
}

/// One thread plays all parts; each borrows it for the length of one call.
#[allow(clippy::disallowed_types)]
pub type SharedLoop = Rc<std::cell::RefCell<Loop>>;

/// The key of the initiators' memory.
pub const RKEY: u32 = 0x0BAD_CAFE;

impl Loop {
    /// Without connections. `depths`: of send and receive queues.
    #[allow(clippy::disallowed_types)] // see `SharedLoop`
    pub fn new(memory: Arc<Arena>, depths: (u32, u32)) -> SharedLoop {
        Rc::new(std::cell::RefCell::new(Loop {
            links: Vec::new(),
            events: VecDeque::new(),
            arenas: Vec::new(),
            memory,
            bounce: vec![0; BOUNCE].into(),
            depths,
        }))
    }

    /// Asks for a connection. Its number.
    pub fn connect(&mut self, private_data: &[u8]) -> usize {
        let at = self.links.len();
        let (send, recv) = (self.depths.0 as usize, self.depths.1 as usize);
        self.links.push(Link {
            num: QpNum(at as u32),
            recv: VecDeque::with_capacity(recv),
            inbox: IuRing::new(recv),
            outbox: IuRing::new(recv + 1),
            cq: VecDeque::with_capacity(send + recv),
            error: false,
            answer: None,
        });
        self.events.push_back(CmEvent::ConnectRequest {
            conn: ConnId(at as u64),
            listener: 0,
            peer: "loopback".into(),
            format: LoginFormat::IbCm64,
            private_data: private_data.to_vec(),
        });
        at
    }

    /// The answer to the login, once.
    pub fn answer(&mut self, link: usize) -> Option<Vec<u8>> {
        self.links[link].answer.take()
    }

    /// The initiator sends an IU.
    pub fn send_to_target(&mut self, link: usize, iu: &[u8]) {
        self.links[link].inbox.push(iu);
    }

    /// The initiator takes an IU. Its length.
    pub fn take_from_target(&mut self, link: usize, out: &mut [u8]) -> Option<usize> {
        self.links[link].outbox.pop(out)
    }

    fn rdma(&mut self, sge: &Sge, remote: Remote, read: bool) -> WcStatus {
        let len = sge.len as usize;
        if len == 0 {
            return WcStatus::Success;
        }
        if remote.rkey != RKEY || !self.memory.contains(remote.va, len) {
            return WcStatus::RemoteAccess;
        }
        let local = &self.arenas[sge.lkey.0 as usize];
        assert!(local.contains(sge.addr, len), "{sge:?} lies outside of its arena");
        let near = (sge.addr - local.addr()) as usize;
        let far = (remote.va - self.memory.addr()) as usize;
        let mut at = 0;
        while at < len {
            let piece = (len - at).min(BOUNCE);
            let bounce = &mut self.bounce[..piece];
            if read {
                self.memory.copy_out(far + at, bounce);
                local.copy_in(near + at, bounce);
            } else {
                local.copy_out(near + at, bounce);
                self.memory.copy_in(far + at, bounce);
            }
            at += piece;
        }
        WcStatus::Success
    }

    fn post(&mut self, at: usize, wr: &SendWr) {
        let status = match wr.op {
            _ if self.links[at].error => WcStatus::Flushed,
            SendOp::Read { remote } => self.rdma(&wr.sge, remote, true),
            SendOp::Write { remote } => self.rdma(&wr.sge, remote, false),
            SendOp::Send => {
                let arena = &self.arenas[wr.sge.lkey.0 as usize];
                let iu = &mut self.bounce[..wr.sge.len as usize];
                arena.copy_out((wr.sge.addr - arena.addr()) as usize, iu);
                self.links[at].outbox.push(iu);
                WcStatus::Success
            }
        };
        let link = &mut self.links[at];
        if wr.signaled || status != WcStatus::Success {
            let done = Completion { qp: link.num, wr_id: wr.wr_id, status, byte_len: 0 };
            link.cq.push_back(done);
        }
    }

    /// Brings what the initiator sent into posted receives.
    fn deliver(&mut self, at: usize) {
        let link = &mut self.links[at];
        while !link.error && link.inbox.len > 0 {
            let Some(wr) = link.recv.pop_front() else { return };
            let arena = &self.arenas[wr.sge.lkey.0 as usize];
            let len = link.inbox.pop(&mut self.bounce).expect("it was counted");
            arena.copy_in((wr.sge.addr - arena.addr()) as usize, &self.bounce[..len]);
            let (wr_id, byte_len) = (wr.wr_id, len as u32);
            let status = WcStatus::Success;
            link.cq.push_back(Completion { qp: link.num, wr_id, status, byte_len });
        }
    }
}

/// The data plane of the one reactor.
pub struct LoopFabric(pub SharedLoop);

/// A connection.
pub struct LoopEndpoint(usize);

impl Fabric for LoopFabric {
    type Endpoint = LoopEndpoint;

    fn register(&mut self, arena: &Arc<Arena>) -> Result<Lkey, FabricError> {
        let arenas = &mut self.0.borrow_mut().arenas;
        let known = arenas.iter().position(|a| a.addr() == arena.addr());
        let at = known.unwrap_or_else(|| {
            arenas.push(arena.clone());
            arenas.len() - 1
        });
        Ok(Lkey(at as u32))
    }

    fn adopt(&mut self, ep: LoopEndpoint) -> Result<QpNum, (FabricError, LoopEndpoint)> {
        Ok(QpNum(ep.0 as u32))
    }

    fn post_recv(&mut self, qp: QpNum, list: &[RecvWr]) -> Result<(), PostError> {
        let link = &mut self.0.borrow_mut().links[qp.0 as usize];
        for wr in list {
            if link.error {
                let (wr_id, status) = (wr.wr_id, WcStatus::Flushed);
                link.cq.push_back(Completion { qp, wr_id, status, byte_len: 0 });
            } else {
                link.recv.push_back(*wr);
            }
        }
        Ok(())
    }

    fn post_send(&mut self, qp: QpNum, list: &[SendWr]) -> Result<(), PostError> {
        let shared = &mut *self.0.borrow_mut();
        for wr in list {
            shared.post(qp.0 as usize, wr);
        }
        Ok(())
    }

    fn poll(&mut self, _now: Nanos, out: &mut CompletionBatch) -> usize {
        let shared = &mut *self.0.borrow_mut();
        let mut count = 0;
        for at in 0..shared.links.len() {
            shared.deliver(at);
            while !out.is_full() {
                let Some(done) = shared.links[at].cq.pop_front() else { break };
                out.push(done);
                count += 1;
            }
        }
        count
    }

    fn set_error(&mut self, qp: QpNum) {
        let link = &mut self.0.borrow_mut().links[qp.0 as usize];
        link.error = true;
        while let Some(wr) = link.recv.pop_front() {
            let (wr_id, status) = (wr.wr_id, WcStatus::Flushed);
            link.cq.push_back(Completion { qp, wr_id, status, byte_len: 0 });
        }
    }

    fn release(&mut self, qp: QpNum) -> LoopEndpoint {
        self.0.borrow_mut().links[qp.0 as usize].cq.clear();
        LoopEndpoint(qp.0 as usize)
    }

    fn limits(&self, _qp: QpNum) -> QpLimits {
        let depths = self.0.borrow().depths;
        QpLimits {
            max_send_wr: depths.0,
            max_recv_wr: depths.1,
            max_inline: 0,
            max_rd_atomic: 4,
            max_sge_rd: 1,
        }
    }
}

/// The connection manager.
pub struct LoopCm(pub SharedLoop);

impl Cm for LoopCm {
    type Endpoint = LoopEndpoint;

    fn next_event(&mut self, _timeout: Option<Duration>) -> Result<Option<CmEvent>, FabricError> {
        Ok(self.0.borrow_mut().events.pop_front())
    }

    fn endpoint(&mut self, conn: ConnId) -> Result<LoopEndpoint, FabricError> {
        Ok(LoopEndpoint(conn.0 as usize))
    }

    fn accept(&mut self, conn: ConnId, private_data: &[u8]) -> Result<(), FabricError> {
        let shared = &mut *self.0.borrow_mut();
        shared.links[conn.0 as usize].answer = Some(private_data.to_vec());
        shared.events.push_back(CmEvent::Established { conn });
        Ok(())
    }

    fn reject(&mut self, conn: ConnId, private_data: &[u8]) {
        self.0.borrow_mut().links[conn.0 as usize].answer = Some(private_data.to_vec());
    }

    fn disconnect(&mut self, conn: ConnId) {
        let why = "disconnected".into();
        self.0.borrow_mut().events.push_back(CmEvent::Disconnected { conn, why });
    }

    fn destroy(&mut self, _conn: ConnId, _ep: Option<LoopEndpoint>) {}
}
