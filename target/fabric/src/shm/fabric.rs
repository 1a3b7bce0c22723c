//! [`ShmFabric`]: the data plane of one thread; either role.
//!
//! Owns the queue pairs that were adopted and the table of registered arenas. Never maps, unmaps or
//! allocates after a queue pair was adopted; never makes a system call, but for the look at an
//! initiator's socket once in a millisecond.
//!
//! ```text
//!   QpNum = generation << 16 | index        slots[index] = { generation, queue pair }
//!   active = indices of the occupied slots; poll walks them round robin from `cursor`
//! ```

use super::qp::{Local, Qp};
use super::sigbus;
use crate::{CompletionBatch, Fabric, FabricError, Lkey, PostCause, PostError, QpLimits, QpNum};
use crate::{RecvWr, SendWr};
use std::sync::Arc;
use usurp_reactor::Nanos;
use usurp_reactor::mem::Arena;

/// Arenas of one fabric.
const ARENAS_MAX: usize = 256;
/// Completions that one queue pair may take of a poll when there are others.
const SHARE: usize = 8;
/// Between two looks at whether a peer is still there.
const CHECK_NS: Nanos = 1_000_000;
/// The same in empty polls, for callers whose clock stands still.
const CHECK_POLLS: u32 = 4096;

/// Size of a fabric.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub struct FabricConfig {
    /// Queue pairs at a time; at most 65535.
    pub max_qps: usize,
}

impl Default for FabricConfig {
    fn default() -> Self {
        FabricConfig { max_qps: 256 }
    }
}

/// A connection's memory and queues. Made by the control thread, adopted by a fabric, released, and
/// dropped by the control thread again (dropping unmaps, and frees the queues).
#[derive(Debug)]
pub struct Endpoint {
    /// Everything, allocated beforehand.
    pub(crate) qp: Box<Qp>,
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        // An initiator leaves in good order: the target logs "disconnected", not "died".
        self.qp.retire();
        self.qp.tell(super::wire::DREQ);
    }
}

/// A place for a queue pair.
struct Slot {
    /// High half of the number of the next or present occupant.
    generation: u16,
    /// Its queue pair, if occupied.
    endpoint: Option<Endpoint>,
}

/// The shm fabric's data plane. Owned by one thread.
pub struct ShmFabric {
    /// Registered arenas, by the low byte of the key.
    locals: Vec<Local>,
    /// Keeps them alive.
    arenas: Vec<Arc<Arena>>,
    /// Queue pairs by index; fixed length.
    slots: Vec<Slot>,
    /// Free indices, oldest first; capacity fixed.
    free: std::collections::VecDeque<u16>,
    /// Occupied indices; capacity fixed.
    active: Vec<u16>,
    /// Where in `active` the next poll starts.
    cursor: usize,
    /// Where in `active` the next liveness check looks.
    suspect: usize,
    /// `sigbus::faults()` when all queue pairs were last checked.
    faults: u32,
    /// Polls without a completion since the last liveness check.
    empty_polls: u32,
    /// When the last liveness check was.
    checked_at: Nanos,
}

impl ShmFabric {
    /// An empty fabric; takes all its memory now.
    pub fn new(config: FabricConfig) -> ShmFabric {
        assert!((1..=65535).contains(&config.max_qps));
        let n = config.max_qps as u16;
        ShmFabric {
            locals: Vec::with_capacity(ARENAS_MAX),
            arenas: Vec::with_capacity(ARENAS_MAX),
            slots: (0..n).map(|_| Slot { generation: 1, endpoint: None }).collect(),
            free: (0..n).collect(),
            active: Vec::with_capacity(config.max_qps),
            cursor: 0,
            suspect: 0,
            faults: sigbus::faults(),
            empty_polls: 0,
            checked_at: 0,
        }
    }

    /// Queue pairs adopted.
    pub fn qp_count(&self) -> usize {
        self.active.len()
    }

    /// Looks whether the peer is still there, without waiting; if not, the queue pair goes into
    /// error. False for a stale number too.
    pub fn check_peer(&mut self, qp: QpNum) -> bool {
        match find(&mut self.slots, qp) {
            Some(qp) => qp.check_peer(),
            None => false,
        }
    }

    /// A page of some peer's memory was lost: which queue pairs are hit?
    #[cold]
    fn check_memory(&mut self) {
        self.faults = sigbus::faults();
        for index in &self.active {
            if let Some(endpoint) = &mut self.slots[*index as usize].endpoint {
                endpoint.qp.check_memory();
            }
        }
    }

    /// Looks after one peer.
    #[cold]
    fn check_next(&mut self, now: Nanos) {
        self.checked_at = now;
        self.empty_polls = 0;
        self.suspect = if self.suspect + 1 < self.active.len() { self.suspect + 1 } else { 0 };
        let Some(index) = self.active.get(self.suspect) else { return };
        if let Some(endpoint) = &mut self.slots[*index as usize].endpoint {
            endpoint.qp.check_peer();
        }
    }
}

/// The queue pair of this number.
#[inline(always)]
fn find(slots: &mut [Slot], qp: QpNum) -> Option<&mut Qp> {
    let slot = slots.get_mut((qp.0 & 0xffff) as usize)?;
    if u32::from(slot.generation) != qp.0 >> 16 {
        return None;
    }
    slot.endpoint.as_mut().map(|endpoint| &mut *endpoint.qp)
}

impl Fabric for ShmFabric {
    type Endpoint = Endpoint;

    fn register(&mut self, arena: &Arc<Arena>) -> Result<Lkey, FabricError> {
        let index = self.locals.len();
        if index == ARENAS_MAX {
            return Err(FabricError::Exhausted { what: "arena", limit: ARENAS_MAX });
        }
        let key = Lkey(0x4c4b_0000 | index as u32);
        self.locals.push(Local { key, base: arena.addr(), len: arena.len() as u64 });
        self.arenas.push(arena.clone());
        Ok(key)
    }

    fn adopt(&mut self, mut ep: Endpoint) -> Result<QpNum, (FabricError, Endpoint)> {
        let Some(index) = self.free.pop_front() else {
            let limit = self.slots.len();
            return Err((FabricError::Exhausted { what: "queue pair", limit }, ep));
        };
        let slot = &mut self.slots[index as usize];
        assert!(slot.endpoint.is_none());
        let qp = QpNum(u32::from(slot.generation) << 16 | u32::from(index));
        ep.qp.num = qp;
        slot.endpoint = Some(ep);
        self.active.push(index);
        Ok(qp)
    }

    #[inline]
    fn post_recv(&mut self, qp: QpNum, list: &[RecvWr]) -> Result<(), PostError> {
        match find(&mut self.slots, qp) {
            Some(qp) => qp.post_recv(&self.locals, list),
            None => Err(PostError { index: 0, cause: PostCause::BadState }),
        }
    }

    #[inline]
    fn post_send(&mut self, qp: QpNum, list: &[SendWr]) -> Result<(), PostError> {
        match find(&mut self.slots, qp) {
            Some(qp) => qp.post_send(&self.locals, list),
            None => Err(PostError { index: 0, cause: PostCause::BadState }),
        }
    }

    #[inline]
    fn poll(&mut self, now: Nanos, out: &mut CompletionBatch) -> usize {
        if sigbus::faults() != self.faults {
            self.check_memory();
        }
        let before = out.len();
        let count = self.active.len();
        let share = if count > 1 { SHARE } else { crate::BATCH };
        for _ in 0..count {
            let limit = out.room().min(share);
            if limit == 0 {
                break;
            }
            let index = self.active[self.cursor] as usize;
            self.cursor = if self.cursor + 1 < count { self.cursor + 1 } else { 0 };
            if let Some(endpoint) = &mut self.slots[index].endpoint {
                endpoint.qp.poll(&self.locals, limit, out);
            }
        }
        let got = out.len() - before;
        self.empty_polls = if got == 0 { self.empty_polls + 1 } else { 0 };
        if now.wrapping_sub(self.checked_at) >= CHECK_NS || self.empty_polls >= CHECK_POLLS {
            self.check_next(now);
        }
        got
    }

    fn set_error(&mut self, qp: QpNum) {
        if let Some(qp) = find(&mut self.slots, qp) {
            qp.fail();
        }
    }

    fn release(&mut self, qp: QpNum) -> Endpoint {
        assert!(find(&mut self.slots, qp).is_some(), "release of a stale queue pair");
        let index = (qp.0 & 0xffff) as u16;
        let slot = &mut self.slots[index as usize];
        let mut endpoint = slot.endpoint.take().expect("found above");
        slot.generation = slot.generation.wrapping_add(1).max(1);
        endpoint.qp.retire();
        let at = self.active.iter().position(|i| *i == index).expect("occupied slots are active");
        self.active.swap_remove(at);
        self.cursor = 0;
        self.free.push_back(index);
        endpoint
    }

    fn limits(&self, qp: QpNum) -> QpLimits {
        let slot = &self.slots[(qp.0 & 0xffff) as usize];
        assert!(u32::from(slot.generation) == qp.0 >> 16, "limits of a stale queue pair");
        slot.endpoint.as_ref().expect("generation fits, so it is occupied").qp.limits()
    }
}
