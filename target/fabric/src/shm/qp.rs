//! A queue pair of the shm fabric: its queues, its state, and the execution of requests.
//!
//! ```text
//!   post_send --> executed at once ------------------> sent queue (completions) --> poll
//!             \-> ring full: SQ, retried by poll --/
//!   post_recv --> RQ -- a record arrives: copied out of the ring ----------------> poll
//!
//!   state:  Ready -- first error, set_error, peer gone --> Error: all that waits or comes is
//!                                                          Flushed
//! ```
//!
//! All queues are allocated with the endpoint, by the control thread. A request that failed, and
//! everything after it, completes with an error; the queue pair never leaves `Error`. Invariants:
//! `used` <= capacity of the send queue, and `used` = waiting + completed unpolled (with the
//! unsignaled ones before them) + `run`.

use super::copy;
use super::mem::{PeerMap, RingMem, Role};
use super::ring::{Front, Rx, Sent, Tx, largest_message};
use super::sigbus;
use crate::{Completion, CompletionBatch, Lkey, PostCause, PostError, QpLimits, QpNum};
use crate::{RecvWr, Remote, SendOp, SendWr, Sge, WcStatus};
use rustix::net::{RecvFlags, SendFlags};
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

/// Largest `sge.len` (reliable connections: 2^31).
const SGE_MAX: u32 = 1 << 31;

/// One arena as the fabric knows it.
#[derive(Copy, Clone)]
pub(crate) struct Local {
    /// Key; the index in the low byte.
    pub(crate) key: Lkey,
    /// First address.
    pub(crate) base: u64,
    /// Bytes.
    pub(crate) len: u64,
}

/// The local memory of a request, if its key, address and length fit a registered arena.
#[inline(always)]
fn local(locals: &[Local], sge: &Sge) -> Option<*mut u8> {
    let arena = locals.get((sge.lkey.0 & 0xff) as usize)?;
    let offset = sge.addr.wrapping_sub(arena.base);
    let fits = offset <= arena.len && u64::from(sge.len) <= arena.len - offset;
    if arena.key != sge.lkey || !fits {
        return None;
    }
    Some(std::ptr::with_exposed_provenance_mut(sge.addr as usize))
}

/// A region of the peer as the data path needs it.
#[derive(Copy, Clone)]
struct Region {
    /// Key; the index in the low byte.
    rkey: u32,
    /// Access rights.
    access: u32,
    /// First address as the peer names it.
    va: u64,
    /// Bytes.
    len: u64,
    /// First byte here.
    base: *mut u8,
}

/// A posted receive.
#[derive(Copy, Clone)]
struct Recv {
    /// The caller's.
    wr_id: u64,
    /// Where the message goes; null = its lkey was bad.
    dst: *mut u8,
    /// Bytes there.
    cap: u32,
}

/// A finished send request, not polled yet.
#[derive(Copy, Clone)]
struct Done {
    /// The caller's.
    wr_id: u64,
    /// Places in the send queue that polling it frees: itself and the unsignaled ones before.
    frees: u32,
    /// How it ended.
    status: WcStatus,
}

/// A FIFO of fixed capacity. No heap after `new`.
struct Fifo<T> {
    /// Storage, a power of two long.
    items: Box<[T]>,
    /// Next to take; counts up for ever.
    head: u32,
    /// Next free.
    tail: u32,
}

impl<T: Copy> Fifo<T> {
    fn new(capacity: u32, fill: T) -> Self {
        let items = vec![fill; capacity.next_power_of_two() as usize].into_boxed_slice();
        Fifo { items, head: 0, tail: 0 }
    }
    #[inline(always)]
    fn len(&self) -> u32 {
        self.tail.wrapping_sub(self.head)
    }
    #[inline(always)]
    fn is_empty(&self) -> bool {
        self.head == self.tail
    }
    #[inline(always)]
    fn slot(&self, at: u32) -> usize {
        at as usize & (self.items.len() - 1)
    }
    #[inline(always)]
    fn push(&mut self, item: T) {
        assert!((self.len() as usize) < self.items.len());
        let slot = self.slot(self.tail);
        self.items[slot] = item;
        self.tail = self.tail.wrapping_add(1);
    }
    #[inline(always)]
    fn pop(&mut self) -> Option<T> {
        let item = self.front()?;
        self.head = self.head.wrapping_add(1);
        Some(item)
    }
    #[inline(always)]
    fn front(&self) -> Option<T> {
        if self.is_empty() { None } else { Some(self.items[self.slot(self.head)]) }
    }
}

/// Depths of a queue pair.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub struct QpConfig {
    /// Places of the send queue; 1..=65536.
    pub max_send_wr: u32,
    /// Places of the receive queue; 1..=65536.
    pub max_recv_wr: u32,
}

impl Default for QpConfig {
    fn default() -> Self {
        QpConfig { max_send_wr: 2048, max_recv_wr: 512 }
    }
}

/// Whether requests are executed.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
enum State {
    Ready,
    Error,
}

/// What became of a request.
enum Executed {
    Done,
    /// The ring is full.
    Wait,
    Failed(WcStatus),
}

/// A queue pair. The first line is all that polling an idle one touches, beside the ring's.
#[repr(C, align(64))]
pub(crate) struct Qp {
    /// Records from the peer.
    rx: Rx,
    /// Poll has to look at the send side, or to flush. Set whenever `done` or `sq` is not empty, or
    /// the state is Error and `rq` is not empty.
    attention: bool,
    /// Execute or flush.
    state: State,
    /// Which end we are.
    pub(crate) role: Role,
    /// Own name in the fabric; set by adopt.
    pub(crate) num: QpNum,
    /// Records that a poll takes at most (0 counts as 1). It starts at 0 whenever the ring was
    /// found empty and grows while it is not, so that a ping-pong never looks for a second record:
    /// that look would fetch the line that the peer is about to write, a miss on the way to the
    /// answer.
    burst: u32,
    /// Records to the peer.
    tx: Tx,
    /// Largest message of the rings.
    message_max: u32,
    /// Places taken in the send queue: see header.
    used: u32,
    /// Capacity of the send queue.
    send_max: u32,
    /// Executed unsignaled requests since the last completion.
    run: u32,
    /// Capacity of the receive queue.
    recv_max: u32,
    /// `sigbus::faults()` when the regions were last known whole.
    faults: u32,
    /// Regions of the peer; the low byte of the rkey is the index.
    regions: Box<[Region]>,
    /// Posted receives.
    rq: Fifo<Recv>,
    /// Requests that wait for room in the ring, in order.
    sq: Fifo<SendWr>,
    /// Finished requests.
    done: Fifo<Done>,
    /// The peer closed its queue pair or is dead; never taken back.
    gone: bool,
    /// The connection's socket (initiator): its end tells that the target is gone.
    lifeline: Option<OwnedFd>,
    /// Keeps the regions mapped.
    maps: Vec<PeerMap>,
    /// Keeps the rings mapped; `rx` and `tx` point into it.
    rings: RingMem,
}

// SAFETY: the raw pointers of `rx`, `tx` and `regions` point into `rings` and `maps`, which move
// along and stay mapped at the same address; those of `rq` into arenas that the fabric keeps alive
// while the queue pair is adopted, and they are dropped unread by `retire`.
unsafe impl Send for Qp {}

impl std::fmt::Debug for Qp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Qp").field("num", &self.num).field("state", &self.state).finish()
    }
}

impl Qp {
    /// A queue pair over mapped memory; control thread.
    pub(crate) fn new(
        role: Role,
        rings: RingMem,
        maps: Vec<PeerMap>,
        lifeline: Option<OwnedFd>,
        config: QpConfig,
    ) -> Box<Qp> {
        let (tx, rx) = rings.ends(role);
        let region = |map: &PeerMap| Region {
            rkey: map.desc.rkey,
            access: map.desc.access,
            va: map.desc.va,
            len: map.desc.len,
            base: map.base(),
        };
        let idle = SendWr {
            wr_id: 0,
            op: SendOp::Send,
            sge: Sge { addr: 0, len: 0, lkey: Lkey(0) },
            signaled: false,
            fence: false,
        };
        let (sends, receives) = (config.max_send_wr, config.max_recv_wr);
        assert!((1..=65536).contains(&sends) && (1..=65536).contains(&receives));
        Box::new(Qp {
            rx,
            attention: false,
            state: State::Ready,
            role,
            num: QpNum(0),
            burst: 0,
            tx,
            message_max: largest_message(rings.ring_bytes()) as u32,
            used: 0,
            send_max: sends,
            run: 0,
            recv_max: receives,
            faults: sigbus::faults(),
            regions: maps.iter().map(region).collect(),
            rq: Fifo::new(receives, Recv { wr_id: 0, dst: std::ptr::null_mut(), cap: 0 }),
            sq: Fifo::new(sends, idle),
            done: Fifo::new(sends, Done { wr_id: 0, frees: 0, status: WcStatus::Flushed }),
            gone: false,
            lifeline,
            maps,
            rings,
        })
    }

    pub(crate) fn limits(&self) -> QpLimits {
        QpLimits {
            max_send_wr: self.send_max,
            max_recv_wr: self.recv_max,
            max_inline: self.message_max,
            max_rd_atomic: self.send_max,
            max_sge_rd: 1,
        }
    }

    #[inline]
    pub(crate) fn post_recv(&mut self, locals: &[Local], list: &[RecvWr]) -> Result<(), PostError> {
        for (index, wr) in list.iter().enumerate() {
            if self.rq.len() == self.recv_max {
                return Err(PostError { index, cause: PostCause::QueueFull });
            }
            if wr.sge.len > SGE_MAX {
                return Err(PostError { index, cause: PostCause::BadSge });
            }
            let dst = local(locals, &wr.sge).or_else(|| empty(wr.sge.len as usize));
            let dst = dst.unwrap_or(std::ptr::null_mut());
            self.rq.push(Recv { wr_id: wr.wr_id, dst, cap: wr.sge.len });
        }
        self.attention |= self.state == State::Error;
        Ok(())
    }

    #[inline]
    pub(crate) fn post_send(&mut self, locals: &[Local], list: &[SendWr]) -> Result<(), PostError> {
        for (index, wr) in list.iter().enumerate() {
            if self.used == self.send_max {
                return Err(PostError { index, cause: PostCause::QueueFull });
            }
            if wr.sge.len > SGE_MAX {
                return Err(PostError { index, cause: PostCause::BadSge });
            }
            self.used += 1;
            if let Some(next) = list.get(index + 1) {
                fetch_ahead(&next.sge);
            }
            if self.state == State::Error {
                self.complete(wr.wr_id, WcStatus::Flushed);
            } else if !self.sq.is_empty() || !self.run_one(locals, wr) {
                self.sq.push(*wr);
                self.attention = true;
            }
        }
        Ok(())
    }

    /// Executes a request and accounts for it; false = it has to wait.
    #[inline(always)]
    fn run_one(&mut self, locals: &[Local], wr: &SendWr) -> bool {
        match self.execute(locals, wr) {
            Executed::Done if wr.signaled => self.complete(wr.wr_id, WcStatus::Success),
            Executed::Done => self.run += 1,
            Executed::Wait => return false,
            Executed::Failed(status) => {
                self.complete(wr.wr_id, status);
                self.fail();
            }
        }
        true
    }

    /// Queues the completion of a send request.
    #[inline(always)]
    fn complete(&mut self, wr_id: u64, status: WcStatus) {
        self.done.push(Done { wr_id, frees: self.run + 1, status });
        self.run = 0;
        self.attention = true;
    }

    #[inline(always)]
    fn execute(&mut self, locals: &[Local], wr: &SendWr) -> Executed {
        let len = wr.sge.len as usize;
        let Some(here) = local(locals, &wr.sge).or_else(|| empty(len)) else {
            return Executed::Failed(WcStatus::LocalProtection);
        };
        let (remote, access) = match wr.op {
            SendOp::Send if wr.sge.len > self.message_max => {
                return Executed::Failed(WcStatus::LocalLength);
            }
            // SAFETY: `here` spans `len` bytes of an arena (`local`), which is not the ring.
            SendOp::Send => match unsafe { self.tx.send(here, len) } {
                Sent::Yes => return Executed::Done,
                Sent::Full => return Executed::Wait,
                Sent::Corrupt => return Executed::Failed(WcStatus::Fatal),
            },
            SendOp::Write { remote } => (remote, super::mem::ACCESS_REMOTE_WRITE),
            SendOp::Read { remote } => (remote, super::mem::ACCESS_REMOTE_READ),
        };
        if len == 0 {
            return Executed::Done;
        }
        let Some(there) = self.remote(&remote, wr.sge.len, access) else {
            return Executed::Failed(WcStatus::RemoteAccess);
        };
        let reading = matches!(wr.op, SendOp::Read { .. });
        let (dst, src) = if reading { (here, there) } else { (there, here) };
        // SAFETY: both ranges span `len` mapped bytes (`local`, `remote`), of different mappings.
        unsafe { copy::any(dst, src, len) };
        if sigbus::faults() != self.faults && !self.is_whole() {
            return Executed::Failed(WcStatus::RemoteAccess);
        }
        Executed::Done
    }

    /// The peer's memory of a request, if its key, range and access fit a region.
    #[inline(always)]
    fn remote(&self, remote: &Remote, len: u32, access: u32) -> Option<*mut u8> {
        let region = self.regions.get((remote.rkey & 0xff) as usize)?;
        let offset = remote.va.wrapping_sub(region.va);
        let fits = offset <= region.len && u64::from(len) <= region.len - offset;
        if region.rkey != remote.rkey || !fits || region.access & access == 0 {
            return None;
        }
        // SAFETY: offset <= region.len, the length of the mapping at `base`.
        Some(unsafe { region.base.add(offset as usize) })
    }

    /// No page of our regions was lost so far.
    #[cold]
    fn is_whole(&self) -> bool {
        self.maps.iter().all(|map| !map.watch.is_poisoned())
    }

    /// A page was lost somewhere in the process: ours?
    #[cold]
    pub(crate) fn check_memory(&mut self) {
        let seen = sigbus::faults();
        if self.is_whole() {
            self.faults = seen;
        } else {
            self.fail();
        }
    }

    /// Into the error state: waiting sends are flushed now, receives by the next polls.
    #[cold]
    pub(crate) fn fail(&mut self) {
        if self.state == State::Error {
            return;
        }
        self.state = State::Error;
        self.attention = true;
        self.rings.closed(self.role).0.store(1, Ordering::Release);
        while let Some(wr) = self.sq.pop() {
            self.complete(wr.wr_id, WcStatus::Flushed);
        }
    }

    /// Appends at most `limit` completions.
    #[inline(always)]
    pub(crate) fn poll(&mut self, locals: &[Local], limit: usize, out: &mut CompletionBatch) {
        let mut left = limit;
        if self.attention {
            left -= self.serve(locals, left, out);
        }
        if left == 0 {
            return;
        }
        if self.rx.is_idle() {
            if self.burst != 0 {
                self.burst = 0;
            }
        } else if self.state == State::Ready {
            self.receive_some(left, out);
        }
    }

    /// Takes records while there are any, at most `limit` and at most the burst.
    #[inline(always)]
    fn receive_some(&mut self, limit: usize, out: &mut CompletionBatch) {
        let burst = (self.burst as usize).clamp(1, limit);
        let mut taken = 0;
        while taken < burst && self.receive(out) {
            taken += 1;
            if burst > 1 {
                self.rx.prefetch(2);
            }
        }
        self.rx.publish();
        if taken < burst {
            self.burst = 0;
        } else {
            self.burst = if self.burst == 0 { 1 } else { (self.burst * 4).min(32) };
        }
    }

    /// Takes one record into the next posted receive; false = none of either, or the queue pair
    /// failed.
    #[inline(always)]
    fn receive(&mut self, out: &mut CompletionBatch) -> bool {
        let Some(recv) = self.rq.front() else { return false };
        let header = match self.rx.front() {
            Front::Record(header) => header,
            Front::Empty => return false,
            Front::Corrupt => return self.refuse(&recv, WcStatus::Fatal, out),
        };
        if recv.dst.is_null() {
            return self.refuse(&recv, WcStatus::LocalProtection, out);
        }
        // SAFETY: `dst` spans `cap` bytes of a registered arena (`local` at post time), not the
        // ring.
        match unsafe { self.rx.take(header, recv.dst, recv.cap as usize) } {
            Ok(len) => {
                self.rq.head = self.rq.head.wrapping_add(1);
                out.push(Completion {
                    qp: self.num,
                    wr_id: recv.wr_id,
                    status: WcStatus::Success,
                    byte_len: len as u32,
                });
                true
            }
            Err(true) => self.refuse(&recv, WcStatus::LocalLength, out),
            Err(false) => self.refuse(&recv, WcStatus::Fatal, out),
        }
    }

    /// The receive at the front fails, and the queue pair with it.
    #[cold]
    fn refuse(&mut self, recv: &Recv, status: WcStatus, out: &mut CompletionBatch) -> bool {
        self.rq.pop();
        out.push(Completion { qp: self.num, wr_id: recv.wr_id, status, byte_len: 0 });
        self.fail();
        false
    }

    /// The send side: retries what waits, reports what is done; in error, flushes receives.
    fn serve(&mut self, locals: &[Local], limit: usize, out: &mut CompletionBatch) -> usize {
        while let Some(wr) = self.sq.front() {
            // A failure flushes the queue, so the request is taken out first and is put back to
            // wait.
            self.sq.head = self.sq.head.wrapping_add(1);
            if !self.run_one(locals, &wr) {
                self.sq.head = self.sq.head.wrapping_sub(1);
                break;
            }
        }
        let mut count = 0;
        while count < limit {
            let Some(done) = self.done.pop() else { break };
            assert!(self.used >= done.frees);
            self.used -= done.frees;
            let (wr_id, status) = (done.wr_id, done.status);
            out.push(Completion { qp: self.num, wr_id, status, byte_len: 0 });
            count += 1;
        }
        while count < limit && self.state == State::Error {
            let Some(recv) = self.rq.pop() else { break };
            let (wr_id, status) = (recv.wr_id, WcStatus::Flushed);
            out.push(Completion { qp: self.num, wr_id, status, byte_len: 0 });
            count += 1;
        }
        let flushing = self.state == State::Error && !self.rq.is_empty();
        self.attention = !self.done.is_empty() || !self.sq.is_empty() || flushing;
        count
    }

    /// Now and then: has the peer closed its queue pair, or gone away? False = the queue pair is in
    /// error.
    #[cold]
    pub(crate) fn check_peer(&mut self) -> bool {
        if self.state == State::Error {
            return false;
        }
        let closed = self.rings.closed(self.role).1.load(Ordering::Acquire) != 0;
        self.gone = self.gone || closed || self.is_cut();
        // What arrived before the end is still received, as far as receives are posted.
        if self.gone && (self.rx.is_idle() || self.rq.is_empty()) {
            self.fail();
        }
        !self.gone
    }

    /// The socket ended, or the target asked to disconnect.
    fn is_cut(&self) -> bool {
        let Some(socket) = &self.lifeline else { return false };
        let mut message = [0u8; 64];
        match rustix::net::recv(socket, &mut message[..], RecvFlags::DONTWAIT) {
            Ok((0, _)) => true,
            Ok((n, _)) => {
                let disconnect = super::wire::kind_of(&message[..n]) == Some(super::wire::DREQ);
                if disconnect {
                    self.tell(super::wire::DREP);
                }
                disconnect
            }
            Err(e) => !matches!(e, rustix::io::Errno::AGAIN | rustix::io::Errno::INTR),
        }
    }

    /// Sends a message without content down the lifeline; failure means that the peer knows
    /// already.
    pub(crate) fn tell(&self, kind: u8) {
        if let Some(socket) = &self.lifeline {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            let _ = rustix::net::send(socket, &super::wire::plain(kind), flags);
        }
    }

    /// Released: no completion of it may come any more, no pointer into an arena may stay.
    pub(crate) fn retire(&mut self) {
        self.fail();
        self.rq.head = self.rq.tail;
        self.done.head = self.done.tail;
        self.attention = false;
    }
}

/// A place for requests without bytes, whose sge is not looked at.
#[inline(always)]
fn empty(len: usize) -> Option<*mut u8> {
    if len == 0 { Some(std::ptr::dangling_mut()) } else { None }
}

/// Asks for the start of a long transfer's local memory while the one before it is copied.
#[inline(always)]
fn fetch_ahead(sge: &Sge) {
    if sge.len >= 1024 {
        for line in 0..16 {
            let at = sge.addr.wrapping_add(64 * line) as usize;
            copy::prefetch(std::ptr::without_provenance(at));
        }
    }
}
