//! One connection: moving messages and requests on, and the ways in which it ends.
//!
//! Owns: the order of things on one link. All times within one direction only rise.

use std::collections::VecDeque;

use usurp_fabric::{LoginFormat, Remote, SendOp, WcStatus};
use usurp_reactor::Nanos;

use super::Net;
use super::memory::Access;
use super::queue::{Phase, Qp, Ready, Sent, checksum};

/// What the initiator learns of its connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InitEvent {
    /// The login was answered with this private data.
    Accepted(Vec<u8>),
    /// The login was refused with this private data.
    Rejected(Vec<u8>),
    /// The connection is gone.
    Lost,
}

/// What the target's connection manager will learn.
pub(crate) enum CmWhat {
    /// A login.
    Request(LoginFormat, Vec<u8>),
    /// The initiator has our answer.
    Established,
    /// It is gone.
    Disconnected(&'static str),
}

/// See the module's header.
pub struct Link {
    /// The initiator's host.
    pub host: usize,
    /// It plays by the rules, so that breaches are the target's.
    pub honest: bool,
    /// The target's queue pair, from adoption to release.
    pub qp: Option<Qp>,
    /// On the way to the target.
    pub(crate) to_target: VecDeque<(Nanos, Vec<u8>)>,
    /// On the way to the initiator, or with it and not yet looked at.
    pub(crate) to_init: VecDeque<(Nanos, Vec<u8>)>,
    /// Receives that the initiator has posted.
    pub(crate) init_recvs: u32,
    /// For the initiator.
    pub(crate) init_events: VecDeque<(Nanos, InitEvent)>,
    /// For the target's control thread.
    pub(crate) cm_events: VecDeque<(Nanos, CmWhat)>,
    /// When `step_link` has something to do; `MAX` = not by itself.
    pub(crate) next: Nanos,
    /// What the target sends arrives.
    pub peer_up: bool,
    /// The initiator knows or will know that it is lost.
    pub(crate) init_lost: bool,
    /// The target had, or will have, its Disconnected.
    pub(crate) cm_lost: bool,
    /// The endpoint is with the target.
    pub(crate) endpoint_out: bool,
    /// The login was answered, with yes or no.
    pub(crate) answered: bool,
    /// The target has forgotten the connection.
    pub destroyed: bool,
    /// IUs that the target's receives have taken.
    pub delivered: u64,
}

impl Link {
    pub(crate) fn new(host: usize, honest: bool) -> Link {
        Link {
            host,
            honest,
            qp: None,
            to_target: VecDeque::new(),
            to_init: VecDeque::new(),
            init_recvs: 0,
            init_events: VecDeque::new(),
            cm_events: VecDeque::new(),
            next: Nanos::MAX,
            peer_up: true,
            init_lost: false,
            cm_lost: false,
            endpoint_out: false,
            answered: false,
            destroyed: false,
            delivered: 0,
        }
    }

    /// Nothing will ever happen to it again.
    pub(crate) fn is_over(&self) -> bool {
        self.destroyed && self.qp.is_none() && self.init_events.is_empty() && !self.peer_up
    }

    /// The earliest time of anything that others wait for.
    pub(crate) fn wakes(&self) -> Nanos {
        let own = self.next;
        let init = self.to_init.front().map_or(Nanos::MAX, |(t, _)| *t);
        let event = self.init_events.front().map_or(Nanos::MAX, |(t, _)| *t);
        let cm = self.cm_events.front().map_or(Nanos::MAX, |(t, _)| *t);
        let done = self.qp.as_ref().and_then(|qp| qp.cq.front()).map_or(Nanos::MAX, |r| r.at);
        own.min(init).min(event).min(cm).min(done)
    }
}

impl Net {
    /// Moves one link on to the present.
    pub(crate) fn step_link(&mut self, at: usize) {
        self.deliver(at);
        self.execute(at);
        self.land(at);
        self.retire(at);
        let link = &mut self.links[at];
        let mut next = link.to_target.front().map_or(Nanos::MAX, |(t, _)| *t);
        if let Some(qp) = &link.qp {
            for sent in &qp.sq {
                let own = if sent.phase == Phase::Landed { sent.done_at } else { sent.at };
                next = next.min(own);
                if sent.phase == Phase::Posted {
                    break;
                }
            }
        }
        link.next = next.max(self.now + 1);
        if next == Nanos::MAX {
            link.next = Nanos::MAX;
        }
    }

    /// Messages of the initiator into the target's receives.
    fn deliver(&mut self, at: usize) {
        let now = self.now;
        loop {
            let link = &mut self.links[at];
            let Some((due, _)) = link.to_target.front() else { return };
            if *due > now {
                return;
            }
            let Some(qp) = link.qp.as_mut().filter(|qp| !qp.error) else {
                link.to_target.pop_front();
                continue;
            };
            let Some(wr) = qp.recv.pop_front() else {
                assert!(!link.honest, "link {at}: an IU within its credit finds no receive posted");
                link.to_target[0].0 = now + 20_000;
                return;
            };
            let (_, iu) = link.to_target.pop_front().expect("it was looked at");
            let (fabric, late) = (qp.fabric, iu.len() > wr.sge.len as usize);
            let status = if late { WcStatus::LocalLength } else { WcStatus::Success };
            let done = qp.completion(wr.wr_id, status, iu.len() as u32);
            qp.recv_unpolled += 1;
            let ready = Ready { at: 0, completion: Some(done), frees: 0, read: None };
            qp.ready(now + 1, ready);
            link.delivered += 1;
            if late {
                self.qp_error(at);
                return;
            }
            let region = &self.regions[fabric][wr.sge.lkey.0 as usize];
            let offset = (wr.sge.addr - region.arena.addr()) as usize;
            region.arena.copy_in(offset, &iu);
            let rest = wr.sge.len as usize - iu.len();
            region.arena.fill(offset + iu.len(), rest, 0xEE);
            self.note("deliver", at as u64, checksum(&iu[..iu.len().min(16)]));
        }
    }

    /// Requests of the target reach the initiator.
    fn execute(&mut self, at: usize) {
        loop {
            let now = self.now;
            let link = &mut self.links[at];
            let Some(qp) = link.qp.as_mut().filter(|qp| !qp.error) else { return };
            let Some(i) = qp.sq.iter().position(|s| s.phase == Phase::Posted) else { return };
            let unlanded = qp.sq.iter().take(i).any(|s| s.phase == Phase::Executed);
            let sent = &mut qp.sq[i];
            if sent.at > now || (sent.wr.fence && unlanded) {
                return;
            }
            if !link.peer_up {
                sent.phase = Phase::Landed;
                sent.status = WcStatus::RetryExceeded;
                sent.done_at = now;
                return self.qp_error(at);
            }
            if matches!(sent.wr.op, SendOp::Send) && link.init_recvs == 0 {
                sent.at = now + 5_000;
                return;
            }
            if !self.execute_one(at, i) {
                return self.qp_error(at);
            }
        }
    }

    /// Executes request `i`. False: it failed.
    fn execute_one(&mut self, at: usize, i: usize) -> bool {
        let leg = self.leg();
        let now = self.now;
        let qp = self.links[at].qp.as_ref().expect("the caller saw it");
        let (fabric, wr) = (qp.fabric, qp.sq[i].wr);
        self.show(at, "execute", &wr);
        let data = match wr.op {
            SendOp::Read { remote } => match self.remote(at, Access::Read, remote, wr.sge.len) {
                Ok(from) => {
                    let host = self.links[at].host;
                    self.memory[host].bytes[from..from + wr.sge.len as usize].to_vec()
                }
                Err(()) => return self.remote_failed(at, i),
            },
            SendOp::Send | SendOp::Write { .. } => {
                let bytes = self.local(fabric, &wr.sge);
                let sent = &self.links[at].qp.as_ref().expect("it is there").sq[i];
                let kept = !sent.exclusive || checksum(&bytes) == sent.sum;
                assert!(kept, "link {at}: memory of {wr:?} changed between post and completion");
                bytes
            }
        };
        let mut phase = Phase::Landed;
        let mut done = now + leg;
        let qp = self.links[at].qp.as_ref().expect("it is there");
        let before = qp.sq.iter().take(i).map(|s| s.at).max().unwrap_or(0);
        match wr.op {
            SendOp::Read { .. } => phase = Phase::Executed,
            SendOp::Write { remote } => {
                let Ok(to) = self.remote(at, Access::Write, remote, wr.sge.len) else {
                    return self.remote_failed(at, i);
                };
                let host = self.links[at].host;
                self.memory[host].bytes[to..to + data.len()].copy_from_slice(&data);
            }
            SendOp::Send => {
                self.note("send", at as u64, checksum(&data));
                let link = &mut self.links[at];
                link.init_recvs -= 1;
                let after = link.to_init.back().map_or(0, |(t, _)| *t);
                done = done.max(after);
                link.to_init.push_back((done, data.clone()));
            }
        }
        let sent = &mut self.links[at].qp.as_mut().expect("it is there").sq[i];
        sent.phase = phase;
        sent.at = (now + leg).max(before);
        sent.done_at = done + leg / 2;
        if phase == Phase::Executed {
            sent.data = data;
        }
        true
    }

    /// Prints a request, when events are printed: addresses may not go into the trace itself.
    pub(crate) fn show(&self, at: usize, what: &str, wr: &usurp_fabric::SendWr) {
        if self.trace.prints() {
            eprintln!("{:>12} link {at} {what} {wr:x?}", self.now);
        }
    }

    fn remote_failed(&mut self, at: usize, i: usize) -> bool {
        let now = self.now;
        let sent = &mut self.links[at].qp.as_mut().expect("the caller saw it").sq[i];
        sent.phase = Phase::Landed;
        sent.status = WcStatus::RemoteAccess;
        sent.done_at = now;
        false
    }

    /// Checks an access to the initiator's memory; panics when an honest one's is misused.
    fn remote(&mut self, at: usize, access: Access, r: Remote, len: u32) -> Result<usize, ()> {
        let host = self.links[at].host;
        if len == 0 {
            return Ok(0);
        }
        let memory = &mut self.memory[host];
        let honest = memory.honest;
        memory.check(at, access, r.rkey, r.va, len).map_err(|why| {
            assert!(!honest, "link {at}: {why}");
        })
    }

    /// Bytes of the target's memory.
    pub(crate) fn local(&self, fabric: usize, sge: &usurp_fabric::Sge) -> Vec<u8> {
        let mut bytes = vec![0; sge.len as usize];
        if sge.len > 0 {
            let arena = &self.regions[fabric][sge.lkey.0 as usize].arena;
            arena.copy_out((sge.addr - arena.addr()) as usize, &mut bytes);
        }
        bytes
    }

    /// Data of READs arrive.
    fn land(&mut self, at: usize) {
        let now = self.now;
        let Some(qp) = self.links[at].qp.as_mut() else { return };
        for sent in &mut qp.sq {
            if sent.phase == Phase::Posted {
                return;
            }
            if sent.phase == Phase::Landed || sent.at > now {
                continue;
            }
            let mut data = std::mem::take(&mut sent.data);
            if sent.status != WcStatus::Success {
                // Cut off on the way: some part of it may have come.
                data.truncate(self.rng.index(data.len() + 1) & !7);
            }
            let arena = &self.regions[qp.fabric][sent.wr.sge.lkey.0 as usize].arena;
            arena.copy_in((sent.wr.sge.addr - arena.addr()) as usize, &data);
            sent.sum = checksum(&data);
            sent.phase = Phase::Landed;
            sent.done_at = sent.done_at.max(now + 1);
        }
    }

    /// Requests complete, in order.
    fn retire(&mut self, at: usize) {
        let now = self.now;
        let Some(qp) = self.links[at].qp.as_mut() else { return };
        while let Some(sent) = qp.sq.front() {
            if sent.phase != Phase::Landed || sent.done_at > now {
                return;
            }
            let sent = qp.sq.pop_front().expect("it was looked at");
            qp.sq_silent += 1;
            let is_read = matches!(sent.wr.op, SendOp::Read { .. });
            let whole = sent.status == WcStatus::Success && sent.exclusive && sent.wr.sge.len > 0;
            let read = (is_read && whole).then_some((sent.wr.sge.addr, sent.wr.sge.len, sent.sum));
            let tells = sent.wr.signaled || sent.status != WcStatus::Success;
            let completion = tells.then(|| qp.completion(sent.wr.wr_id, sent.status, 0));
            if tells || read.is_some() {
                let frees = if tells { std::mem::take(&mut qp.sq_silent) } else { 0 };
                qp.ready(now, Ready { at: 0, completion, frees, read });
            }
        }
    }

    /// The target's queue pair goes into the error state.
    pub(crate) fn qp_error(&mut self, at: usize) {
        let leg = self.leg();
        let now = self.now;
        let link = &mut self.links[at];
        let Some(qp) = link.qp.as_mut().filter(|qp| !qp.error) else { return };
        qp.error = true;
        while let Some(wr) = qp.recv.pop_front() {
            let done = qp.completion(wr.wr_id, WcStatus::Flushed, 0);
            qp.recv_unpolled += 1;
            qp.ready(now + leg, Ready { at: 0, completion: Some(done), frees: 0, read: None });
        }
        // Answers come in order: behind a request that has none, all others have none either.
        let mut cut = false;
        for sent in &mut qp.sq {
            cut |= sent.phase != Phase::Landed || sent.status != WcStatus::Success;
            if cut {
                flush_sent(sent, now, leg);
            }
        }
        link.next = now;
        self.note("qp-error", at as u64, 0);
        self.lose_init(at, leg);
    }

    /// The initiator learns, `after` some time, that its connection is gone.
    pub(crate) fn lose_init(&mut self, at: usize, after: Nanos) {
        let link = &mut self.links[at];
        if !link.init_lost {
            link.init_lost = true;
            let last = link.init_events.back().map_or(0, |(t, _)| *t);
            link.init_events.push_back(((self.now + after).max(last), InitEvent::Lost));
        }
    }

    /// The target learns, `after` some time, that the connection is gone.
    pub(crate) fn lose_cm(&mut self, at: usize, after: Nanos, why: &'static str) {
        let link = &mut self.links[at];
        if !link.cm_lost && !link.destroyed {
            link.cm_lost = true;
            let last = link.cm_events.back().map_or(0, |(t, _)| *t);
            let due = (self.now + after).max(last);
            link.cm_events.push_back((due, CmWhat::Disconnected(why)));
        }
    }
}

/// A request of a queue pair in error: what had not begun never will, what is under way may end in
/// any manner.
pub(crate) fn flush_sent(sent: &mut Sent, now: Nanos, leg: Nanos) {
    match sent.phase {
        Phase::Posted => {
            sent.status = WcStatus::Flushed;
            sent.phase = Phase::Landed;
            sent.done_at = now + leg;
        }
        Phase::Executed => sent.status = WcStatus::Flushed,
        Phase::Landed if sent.status == WcStatus::Success => {
            sent.status = WcStatus::Flushed;
            sent.done_at = now + leg;
        }
        Phase::Landed => {}
    }
}
