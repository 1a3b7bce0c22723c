//! [`VerbsFabric`]: the data plane of one reactor over RDMA devices.
//!
//! Owns a protection domain, a completion queue and the registrations on each device, and the queue
//! pairs that were adopted. Allocates nothing and makes no system call but the provider's own on
//! posts and polls; adoption and `set_error` do.
//!
//! ```text
//!   QpNum = generation << 16 | QP_NUM_BIT | index      slots[index] = { generation, queue pair }
//!
//!   adopted ──set_error──> marker posted, QP in ERR ──device has completed all──> the rest is
//!                              └── DRAIN_NS passed: QP destroyed here ──────────> completed by us
//! ```
//! The drain marker (a signalled zero-length WRITE, posted last) makes unsignalled requests at the
//! end of the send queue complete too. What is posted in error never goes to the device: providers
//! differ in whether they would flush it.

use super::device::{Cq, Ctx, DeviceLimits, Domain, Mr, Qp, QpCaps};
use super::wr::{self, MARKER, Ring, SCRATCH, Scratch, Tag};
use super::{LKEY_BASE, Link, QpConfig, rdmacm};
use crate::{
    BATCH, Completion, CompletionBatch, Fabric, FabricError, Lkey, PostCause, PostError, QpLimits,
    QpNum, RecvWr, Remote, SendOp, SendWr, Sge, WcStatus,
};
use ibverbs_sys::{ibv_qp_attr, ibv_wc};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use usurp_reactor::Nanos;
use usurp_reactor::mem::Arena;

/// Set in every number of ours, and in none of the shm fabric's with at most 2^15 queue pairs.
pub const QP_NUM_BIT: u32 = 0x8000;
/// Arenas of one fabric, as in the shm fabric.
const ARENAS_MAX: usize = 256;
/// Inline bytes asked for: a response with sense data.
const INLINE_WANTED: u32 = 64;
/// A send queue shorter than this is not tried.
const SEND_WR_MIN: u32 = 16;
/// How long a device may take to flush a queue pair. Flushing is local and takes microseconds; a
/// soft device on a starved machine has been seen to take seconds.
const DRAIN_NS: Nanos = 5_000_000_000;

/// Size of a fabric.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub struct FabricConfig {
    /// Queue pairs at a time; at most 32768.
    pub max_qps: usize,
    /// Queue depths of each.
    pub qp: QpConfig,
}

/// Attributes for one change of state, and their mask.
pub(super) type Step = (ibv_qp_attr, i32);

/// A connection's queue pair, or what it takes to make one. Made by the control thread, adopted by
/// a fabric, released, and dropped by the control thread again.
pub struct Endpoint {
    /// Boxed: it travels in mails.
    pub(super) inner: Box<Inner>,
}

/// See [`Endpoint`].
pub(super) struct Inner {
    /// While adopted, and until dropped.
    pub(super) qp: Option<Qp>,
    /// The device of the connection.
    pub(super) ctx: Ctx,
    /// Attributes for INIT, RTR and RTS.
    pub(super) steps: [Step; 3],
    /// Shared with the listener.
    pub(super) link: Arc<Link>,
    /// Comes back in asynchronous events.
    pub(super) conn: u64,
    /// READs in flight that the peer allows.
    pub(super) rd_atomic: u8,
    /// Sends posted; one place more than the caller may use, for the marker.
    pub(super) sq: Ring,
    /// Receives posted.
    pub(super) rq: Ring,
    /// Depths asked for, marker included.
    pub(super) want: QpCaps,
    /// Depths and inline size that the device gave.
    pub(super) have: QpCaps,
}

impl Endpoint {
    /// The depths to ask for.
    pub(super) fn wanted(qp: QpConfig) -> QpCaps {
        QpCaps { send_wr: qp.max_send_wr + 1, recv_wr: qp.max_recv_wr, inline: INLINE_WANTED }
    }
}

/// One device as this reactor uses it.
struct Device {
    ctx: Ctx,
    limits: DeviceLimits,
    /// By arena; the device's key of each, for the posts.
    lkeys: Vec<u32>,
    /// By arena; capacity fixed.
    mrs: Vec<Mr>,
    /// Shared by all queue pairs of the device on this reactor.
    cq: Arc<Cq>,
    /// Entries that no queue pair has claim to.
    cqe_free: u32,
    /// Polling failed: nothing completes any more.
    broken: bool,
    domain: Arc<Domain>,
}

/// A place for a queue pair.
struct Slot {
    /// High half of the number of the next or present occupant.
    generation: u16,
    /// Index of its device.
    device: u16,
    /// Its queue pair, if occupied.
    inner: Option<Box<Inner>>,
    /// In error: nothing more goes to the device.
    errored: bool,
    /// In error for good: the device has completed everything, or the queue pair is destroyed.
    over: bool,
    /// The device did not take the change into error.
    stuck: bool,
    /// When a queue pair in error is given up; none until the first poll after `set_error`.
    deadline: Option<Nanos>,
    /// No message has come yet.
    silent: bool,
}

/// The verbs fabric's data plane. Owned by one thread.
pub struct VerbsFabric {
    config: FabricConfig,
    /// Queue pairs by index; fixed length.
    slots: Vec<Slot>,
    /// Free indices, oldest first; capacity fixed.
    free: VecDeque<u16>,
    /// Indices of queue pairs in error; capacity fixed.
    errored: Vec<u16>,
    /// Devices known; grows when a login comes by a new one.
    devices: Vec<Device>,
    /// Registered arenas, in the order of their keys.
    arenas: Vec<Arc<Arena>>,
    /// Device that the next poll looks at first.
    cursor: usize,
    /// Lists for the device.
    scratch: Scratch,
    /// Completions as the device gives them.
    wcs: Box<[ibv_wc; BATCH]>,
}

impl VerbsFabric {
    /// Opens the machine's RDMA devices; those that come later are opened by their first login.
    pub fn new(config: FabricConfig) -> VerbsFabric {
        assert!((1..=QP_NUM_BIT as usize).contains(&config.max_qps), "queue pairs of one fabric");
        let n = config.max_qps as u16;
        let slot = |_| Slot {
            generation: 1,
            device: 0,
            inner: None,
            errored: false,
            over: false,
            stuck: false,
            deadline: None,
            silent: false,
        };
        let mut fabric = VerbsFabric {
            config,
            slots: (0..n).map(slot).collect(),
            free: (0..n).collect(),
            errored: Vec::with_capacity(config.max_qps),
            devices: Vec::new(),
            arenas: Vec::with_capacity(ARENAS_MAX),
            cursor: 0,
            scratch: Scratch::new(),
            wcs: Box::new([ibv_wc::default(); BATCH]),
        };
        for ctx in rdmacm::hold_devices() {
            if let Err(error) = fabric.device(ctx) {
                tracing::warn!(%error, "an RDMA device is not used");
            }
        }
        fabric
    }

    /// The device of a context, set up if it is new.
    fn device(&mut self, ctx: Ctx) -> Result<usize, FabricError> {
        if let Some(at) = self.devices.iter().position(|d| d.ctx == ctx) {
            return Ok(at);
        }
        let name = ctx.name();
        let os = |what: &str, e: io::Error| FabricError::os(format!("{name}: {what}"), e);
        let limits = ctx.limits().map_err(|e| os("querying the device", e))?;
        let domain = Domain::new(ctx).map_err(|e| os("protection domain", e))?;
        let of_qp = (self.config.qp.max_send_wr + 1).saturating_add(self.config.qp.max_recv_wr);
        let wanted = of_qp.saturating_mul(self.config.max_qps as u32);
        let entries = wanted.min(limits.cqe_max);
        let cq = Cq::new(&domain, entries)
            .map_err(|e| os(&format!("completion queue of {entries} entries"), e))?;
        let mut mrs = Vec::with_capacity(ARENAS_MAX);
        let mut lkeys = Vec::with_capacity(ARENAS_MAX);
        for arena in &self.arenas {
            let mr = region(&domain, ctx, arena)?;
            lkeys.push(mr.lkey());
            mrs.push(mr);
        }
        let cqe_free = entries;
        self.devices.push(Device { ctx, limits, lkeys, mrs, cq, cqe_free, broken: false, domain });
        Ok(self.devices.len() - 1)
    }

    /// Posts the marker behind everything.
    fn post_marker(&mut self, index: u16) {
        let slot = &mut self.slots[usize::from(index)];
        let tag = Tag { recv: false, slot: index, generation: slot.generation };
        let Some(inner) = &mut slot.inner else { return };
        let Some(qp) = &inner.qp else { return };
        if inner.sq.room() == 0 {
            return;
        }
        let marker = SendWr {
            wr_id: MARKER,
            op: SendOp::Write { remote: Remote { va: 0, rkey: 0 } },
            sge: Sge { addr: 0, len: 0, lkey: Lkey(0) },
            signaled: true,
            fence: false,
        };
        let list = self.scratch.sends(&[marker], (tag, inner.sq.next()), &[], 0);
        inner.sq.push(MARKER, true);
        let refused = qp.post_send(list).is_err();
        inner.sq.posted(u32::from(refused));
    }

    /// One completion of a device.
    #[inline]
    fn on_wc(&mut self, wc: &ibv_wc, out: &mut CompletionBatch) {
        let (tag, position) = Tag::of(wc.wr_id());
        let Some(slot) = self.slots.get_mut(usize::from(tag.slot)) else { return };
        if slot.generation != tag.generation {
            return;
        }
        let Some(inner) = &mut slot.inner else { return };
        let ring = if tag.recv { &mut inner.rq } else { &mut inner.sq };
        let Some(wr_id) = ring.complete(position) else { return };
        if !tag.recv && wr_id == MARKER {
            return;
        }
        let status = wc.error().map_or(WcStatus::Success, |(s, _)| wr::status(s));
        if tag.recv && slot.silent && status == WcStatus::Success {
            slot.silent = false;
            inner.link.arrived.store(true, Ordering::Release);
            inner.link.waker.wake();
        }
        let qp = number(tag.generation, tag.slot);
        out.push(Completion { qp, wr_id, status, byte_len: wc.len() as u32 });
    }

    /// Queue pairs in error: gives up those that the device does not flush, and completes what the
    /// device never had.
    #[cold]
    fn step_errored(&mut self, now: Nanos, out: &mut CompletionBatch) {
        for at in 0..self.errored.len() {
            let index = self.errored[at];
            let slot = &mut self.slots[usize::from(index)];
            let broken = self.devices[usize::from(slot.device)].broken;
            let inner = slot.inner.as_mut().expect("a queue pair in error is adopted");
            let deadline = *slot.deadline.get_or_insert(now + DRAIN_NS);
            let drained = inner.rq.is_drained() && inner.sq.is_drained();
            if !slot.over && !drained {
                if !slot.stuck && !broken && now < deadline {
                    continue;
                }
                tracing::warn!(conn = inner.conn, "the device does not flush a queue pair");
                // Only now is it certain that the device leaves the queue pair's memory alone.
                inner.qp = None;
            }
            slot.over = true;
            let qp = number(slot.generation, index);
            let flushed = |wr_id| Completion { qp, wr_id, status: WcStatus::Flushed, byte_len: 0 };
            while !out.is_full() {
                let next = inner.rq.pop().or_else(|| inner.sq.pop());
                match next {
                    None => break,
                    Some((wr_id, signaled)) if signaled && wr_id != MARKER => {
                        out.push(flushed(wr_id));
                    }
                    Some(_) => {}
                }
            }
        }
    }
}

fn number(generation: u16, index: u16) -> QpNum {
    QpNum(u32::from(generation) << 16 | QP_NUM_BIT | u32::from(index))
}

/// Index of the slot that a number names, if it is one of ours and not stale.
#[inline]
fn find(slots: &[Slot], qp: QpNum) -> Option<u16> {
    let index = (qp.0 & (QP_NUM_BIT - 1)) as u16;
    let slot = slots.get(usize::from(index))?;
    (qp.0 & QP_NUM_BIT != 0 && u32::from(slot.generation) == qp.0 >> 16 && slot.inner.is_some())
        .then_some(index)
}

/// Registers an arena on a device.
fn region(domain: &Arc<Domain>, ctx: Ctx, arena: &Arc<Arena>) -> Result<Mr, FabricError> {
    Mr::new(domain, arena).map_err(|e| {
        let mib = arena.len() >> 20;
        let hint = match e.raw_os_error() {
            Some(libc::ENOMEM | libc::EPERM) => " (see `ulimit -l`)",
            _ => "",
        };
        FabricError::os(format!("{}: registering {mib} MiB{hint}", ctx.name()), e)
    })
}

/// Creates a queue pair, with a shorter send queue if the device has no room for the wanted one.
fn create(inner: &Inner, device: &Device) -> io::Result<(Qp, QpCaps)> {
    let most = device.limits.qp_wr_max;
    let mut want = inner.want;
    want.send_wr = want.send_wr.min(most);
    want.recv_wr = want.recv_wr.min(most);
    loop {
        match Qp::new(&device.cq, want, inner.conn) {
            Ok((qp, have)) => {
                let send_wr = have.send_wr.min(inner.want.send_wr);
                let recv_wr = have.recv_wr.min(inner.want.recv_wr);
                return Ok((qp, QpCaps { send_wr, recv_wr, inline: have.inline }));
            }
            Err(_) if want.inline > 0 => want.inline = 0,
            Err(_) if want.send_wr / 2 >= SEND_WR_MIN => {
                want.send_wr /= 2;
                want.inline = inner.want.inline;
            }
            Err(e) => return Err(e),
        }
    }
}

/// Creates the queue pair of an endpoint and brings it to RTS.
fn establish(inner: &mut Inner, device: &Device) -> Result<(), FabricError> {
    let name = inner.ctx.name();
    let (qp, have) = create(inner, device).map_err(|e| {
        let QpCaps { send_wr, recv_wr, .. } = inner.want;
        let what = format!("{name}: queue pair for {send_wr} sends and {recv_wr} receives");
        FabricError::os(what, e)
    })?;
    for ((attr, mask), state) in inner.steps.iter().zip(["INIT", "RTR", "RTS"]) {
        qp.modify(*attr, *mask)
            .map_err(|e| FabricError::os(format!("{name}: queue pair to {state}"), e))?;
    }
    inner.sq.limit(have.send_wr);
    inner.rq.limit(have.recv_wr);
    inner.link.qp_num.store(qp.number(), Ordering::Release);
    inner.have = have;
    inner.qp = Some(qp);
    Ok(())
}

fn cause(errno: i32) -> PostCause {
    if errno == libc::ENOMEM { PostCause::QueueFull } else { PostCause::BadState }
}

/// Why not all of a chunk was posted: `made` of `chunk` requests were well formed and had room.
fn short(base: usize, made: usize, room: usize) -> PostError {
    let cause = if made == room { PostCause::QueueFull } else { PostCause::BadSge };
    PostError { index: base + made, cause }
}

impl Fabric for VerbsFabric {
    type Endpoint = Endpoint;

    fn register(&mut self, arena: &Arc<Arena>) -> Result<Lkey, FabricError> {
        let known = self.arenas.iter().position(|a| Arc::ptr_eq(a, arena));
        let index = match known {
            Some(index) => index,
            None if self.arenas.len() == ARENAS_MAX => {
                return Err(FabricError::Exhausted { what: "arena", limit: ARENAS_MAX });
            }
            None => {
                let made: Result<Vec<Mr>, _> =
                    self.devices.iter().map(|d| region(&d.domain, d.ctx, arena)).collect();
                for (device, mr) in self.devices.iter_mut().zip(made?) {
                    device.lkeys.push(mr.lkey());
                    device.mrs.push(mr);
                }
                self.arenas.push(arena.clone());
                self.arenas.len() - 1
            }
        };
        Ok(Lkey(LKEY_BASE | index as u32))
    }

    /// Makes system calls: create, INIT, RTR, RTS, and on a device's first login its set-up.
    fn adopt(&mut self, mut ep: Endpoint) -> Result<QpNum, (FabricError, Endpoint)> {
        let at = match self.device(ep.inner.ctx) {
            Ok(at) => at,
            Err(e) => return Err((e, ep)),
        };
        let entries = ep.inner.want.send_wr + ep.inner.want.recv_wr;
        let device = &mut self.devices[at];
        if device.cqe_free < entries {
            let limit = device.limits.cqe_max as usize;
            return Err((FabricError::Exhausted { what: "completion queue entry", limit }, ep));
        }
        let Some(&index) = self.free.front() else {
            let limit = self.slots.len();
            return Err((FabricError::Exhausted { what: "queue pair", limit }, ep));
        };
        if let Err(e) = establish(&mut ep.inner, device) {
            return Err((e, ep));
        }
        self.free.pop_front();
        device.cqe_free -= entries;
        let slot = &mut self.slots[usize::from(index)];
        assert!(slot.inner.is_none(), "a free slot is occupied");
        slot.device = at as u16;
        slot.inner = Some(ep.inner);
        slot.silent = true;
        slot.over = false;
        Ok(number(slot.generation, index))
    }

    #[inline]
    fn post_recv(&mut self, qp: QpNum, list: &[RecvWr]) -> Result<(), PostError> {
        let Some(index) = find(&self.slots, qp) else {
            return Err(PostError { index: 0, cause: PostCause::BadState });
        };
        let slot = &mut self.slots[usize::from(index)];
        let tag = Tag { recv: true, slot: index, generation: slot.generation };
        let inner = slot.inner.as_mut().expect("found above");
        let mut base = 0;
        for chunk in list.chunks(SCRATCH) {
            let room = (inner.rq.room() as usize).min(chunk.len());
            let start = inner.rq.next();
            if slot.errored {
                chunk[..room].iter().for_each(|wr| inner.rq.push(wr.wr_id, true));
                if room < chunk.len() {
                    return Err(short(base, room, room));
                }
            } else {
                let lkeys = &self.devices[usize::from(slot.device)].lkeys;
                let made = self.scratch.recvs(&chunk[..room], (tag, start), lkeys);
                chunk[..made.len()].iter().for_each(|wr| inner.rq.push(wr.wr_id, true));
                let qp = inner.qp.as_ref().expect("a queue pair that is not in error");
                if !made.is_empty() {
                    if let Err((at, errno)) = qp.post_recv(made) {
                        inner.rq.posted((made.len() - at) as u32);
                        return Err(PostError { index: base + at, cause: cause(errno) });
                    }
                    inner.rq.posted(0);
                }
                if made.len() < chunk.len() {
                    return Err(short(base, made.len(), room));
                }
            }
            base += chunk.len();
        }
        Ok(())
    }

    #[inline]
    fn post_send(&mut self, qp: QpNum, list: &[SendWr]) -> Result<(), PostError> {
        let Some(index) = find(&self.slots, qp) else {
            return Err(PostError { index: 0, cause: PostCause::BadState });
        };
        let slot = &mut self.slots[usize::from(index)];
        let tag = Tag { recv: false, slot: index, generation: slot.generation };
        let inner = slot.inner.as_mut().expect("found above");
        let mut base = 0;
        for chunk in list.chunks(SCRATCH) {
            // The last place is the marker's.
            let room = (inner.sq.room().saturating_sub(1) as usize).min(chunk.len());
            let start = inner.sq.next();
            if slot.errored {
                chunk[..room].iter().for_each(|wr| inner.sq.push(wr.wr_id, wr.signaled));
                if room < chunk.len() {
                    return Err(short(base, room, room));
                }
            } else {
                let lkeys = &self.devices[usize::from(slot.device)].lkeys;
                let inline = inner.have.inline;
                let made = self.scratch.sends(&chunk[..room], (tag, start), lkeys, inline);
                for wr in &chunk[..made.len()] {
                    inner.sq.push(wr.wr_id, wr.signaled);
                }
                let qp = inner.qp.as_ref().expect("a queue pair that is not in error");
                if !made.is_empty() {
                    if let Err((at, errno)) = qp.post_send(made) {
                        inner.sq.posted((made.len() - at) as u32);
                        return Err(PostError { index: base + at, cause: cause(errno) });
                    }
                    inner.sq.posted(0);
                }
                if made.len() < chunk.len() {
                    return Err(short(base, made.len(), room));
                }
            }
            base += chunk.len();
        }
        Ok(())
    }

    #[inline]
    fn poll(&mut self, now: Nanos, out: &mut CompletionBatch) -> usize {
        let before = out.len();
        let count = self.devices.len();
        for _ in 0..count {
            let room = out.room();
            if room == 0 {
                break;
            }
            let at = self.cursor;
            self.cursor = if at + 1 < count { at + 1 } else { 0 };
            match self.devices[at].cq.poll(&mut self.wcs[..room]) {
                Ok(got) => {
                    for k in 0..got {
                        let wc = self.wcs[k];
                        self.on_wc(&wc, out);
                    }
                }
                Err(_) => self.devices[at].broken = true,
            }
        }
        if !self.errored.is_empty() {
            self.step_errored(now, out);
        }
        out.len() - before
    }

    fn set_error(&mut self, qp: QpNum) {
        let Some(index) = find(&self.slots, qp) else { return };
        if self.slots[usize::from(index)].errored {
            return;
        }
        self.post_marker(index);
        let slot = &mut self.slots[usize::from(index)];
        slot.errored = true;
        slot.deadline = None;
        slot.over = false;
        let inner = slot.inner.as_ref().expect("found above");
        let qp = inner.qp.as_ref().expect("a queue pair that is not in error");
        slot.stuck = qp.error().is_err();
        self.errored.push(index);
    }

    /// The marker has completed, and with it every unsignalled request; or the queue pair is gone.
    fn is_drained(&self, qp: QpNum) -> bool {
        let Some(index) = find(&self.slots, qp) else { return true };
        let slot = &self.slots[usize::from(index)];
        let inner = slot.inner.as_ref().expect("found above");
        slot.over || (inner.rq.is_drained() && inner.sq.is_drained())
    }

    fn release(&mut self, qp: QpNum) -> Endpoint {
        let index = find(&self.slots, qp).expect("release of a stale queue pair");
        let slot = &mut self.slots[usize::from(index)];
        let inner = slot.inner.take().expect("found above");
        slot.generation = slot.generation.wrapping_add(1).max(1);
        if std::mem::take(&mut slot.errored) {
            self.errored.retain(|i| *i != index);
        }
        self.devices[usize::from(slot.device)].cqe_free += inner.want.send_wr + inner.want.recv_wr;
        self.free.push_back(index);
        Endpoint { inner }
    }

    fn limits(&self, qp: QpNum) -> QpLimits {
        let index = find(&self.slots, qp).expect("limits of a stale queue pair");
        let inner = self.slots[usize::from(index)].inner.as_ref().expect("found above");
        QpLimits {
            max_send_wr: inner.have.send_wr.saturating_sub(1),
            max_recv_wr: inner.have.recv_wr,
            max_inline: inner.have.inline,
            max_rd_atomic: u32::from(inner.rd_atomic),
            max_sge_rd: 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errnos_become_causes() {
        assert_eq!(cause(libc::ENOMEM), PostCause::QueueFull);
        assert_eq!(cause(libc::EINVAL), PostCause::BadState);
    }

    #[test]
    fn a_short_list_says_why_and_where() {
        let full = PostError { index: 300, cause: PostCause::QueueFull };
        assert_eq!(short(256, 44, 44), full);
        let bad = PostError { index: 7, cause: PostCause::BadSge };
        assert_eq!(short(0, 7, 9), bad);
    }

    #[test]
    fn stale_numbers_are_known_without_a_device() {
        let qp = QpConfig { max_send_wr: 4, max_recv_wr: 4 };
        let mut fabric = VerbsFabric::new(FabricConfig { max_qps: 2, qp });
        let stale = number(1, 0);
        assert_eq!(stale.0 & QP_NUM_BIT, QP_NUM_BIT);
        let refused = PostError { index: 0, cause: PostCause::BadState };
        assert_eq!(fabric.post_recv(stale, &[]), Err(refused));
        assert_eq!(fabric.post_send(QpNum(1 << 16), &[]), Err(refused));
        fabric.set_error(stale);
        let mut out = CompletionBatch::new();
        assert_eq!(fabric.poll(0, &mut out), 0);
    }

    #[test]
    fn an_arena_is_registered_once() {
        let qp = QpConfig { max_send_wr: 4, max_recv_wr: 4 };
        let mut fabric = VerbsFabric::new(FabricConfig { max_qps: 2, qp });
        let policy = usurp_reactor::mem::HugePolicy::Never;
        let arena = |name| Arena::new(name, 4096, policy).unwrap();
        let (a, b) = (arena("a"), arena("b"));
        let keys: Vec<u32> =
            [&a, &b, &a].iter().map(|arena| fabric.register(arena).unwrap().0).collect();
        assert_eq!(keys, [LKEY_BASE, LKEY_BASE | 1, LKEY_BASE]);
    }
}
