//! Work requests: ours into the library's, in one preallocated list; and what is posted, by
//! position.
//!
//! The library's `wr_id` is ours, not the caller's: it says queue, queue pair, generation and the
//! position in a [`Ring`], where the caller's `wr_id` waits.
//!
//! ```text
//!   wr_id:  | receive? 1 | slot 15 | generation 16 | position 32 |
//!
//!   Ring:   head ......... hw_tail ......... tail
//!           | at the device | posted in error |        positions count up for ever
//! ```
//! Completions of one queue may overtake each other: siw completes a SEND when it is sent, and an
//! earlier READ when its data has come. One stands for the unsignalled requests right before it
//! only.
//!
//! A completion thus finds its queue pair without a search, one of an earlier queue pair is known
//! by its generation even when the device has re-used the number, and what the device never
//! completes can be completed by us once the device can no longer touch its memory.

use crate::{RecvWr, SendOp, SendWr, WcStatus};
use ibverbs_sys::{
    ibv_recv_wr, ibv_send_flags, ibv_send_wr, ibv_sge, ibv_wc_status, ibv_wr_opcode,
};

/// Requests that go to the device in one call; longer lists take another.
pub(super) const SCRATCH: usize = 256;
/// The caller's `wr_id` of the drain marker. The path's own never have all bits set.
pub(super) const MARKER: u64 = u64::MAX;
/// Longest message of a reliable connection.
const MESSAGE_MAX: u32 = 1 << 31;

/// Which queue of which queue pair.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub(super) struct Tag {
    /// The receive queue.
    pub(super) recv: bool,
    /// Index of the queue pair's slot, below 2^15.
    pub(super) slot: u16,
    /// Of the slot.
    pub(super) generation: u16,
}

impl Tag {
    #[inline]
    pub(super) fn at(self, position: u32) -> u64 {
        u64::from(self.recv) << 63
            | u64::from(self.slot) << 48
            | u64::from(self.generation) << 32
            | u64::from(position)
    }

    #[inline]
    pub(super) fn of(wr_id: u64) -> (Tag, u32) {
        let recv = wr_id >> 63 == 1;
        let slot = (wr_id >> 48) as u16 & 0x7fff;
        (Tag { recv, slot, generation: (wr_id >> 32) as u16 }, wr_id as u32)
    }
}

/// To complete on success too.
const SIGNALED: u8 = 1;
/// Has completed, but something before it has not.
const DONE: u8 = 2;

/// What is posted to one queue, oldest first. See the module's header.
#[derive(Debug)]
pub(super) struct Ring {
    /// The callers' `wr_id`s; a power of two of them.
    ids: Box<[u64]>,
    /// Of each: `SIGNALED`, `DONE`.
    flags: Box<[u8]>,
    /// Most that may be posted.
    depth: u32,
    /// Oldest that has not completed.
    head: u32,
    /// First that the device does not have.
    hw_tail: u32,
    /// First free.
    tail: u32,
}

impl Ring {
    pub(super) fn new(depth: u32) -> Ring {
        let size = depth.next_power_of_two() as usize;
        let ids = vec![0; size].into_boxed_slice();
        let flags = vec![0; size].into_boxed_slice();
        Ring { ids, flags, depth, head: 0, hw_tail: 0, tail: 0 }
    }

    #[inline]
    fn index(&self, position: u32) -> usize {
        position as usize & (self.ids.len() - 1)
    }

    #[inline]
    pub(super) fn room(&self) -> u32 {
        self.depth - self.tail.wrapping_sub(self.head)
    }

    /// Never more than the queue was created with.
    pub(super) fn limit(&mut self, depth: u32) {
        assert!(self.tail == self.head, "a ring in use changes its depth");
        self.depth = self.depth.min(depth);
    }

    /// Everything has completed.
    pub(super) fn is_empty(&self) -> bool {
        self.head == self.tail
    }

    /// The device has completed everything that it got.
    pub(super) fn is_drained(&self) -> bool {
        self.head == self.hw_tail
    }

    /// The position that the next request takes.
    #[inline]
    pub(super) fn next(&self) -> u32 {
        self.tail
    }

    /// Notes a request; the caller has looked for room.
    #[inline]
    pub(super) fn push(&mut self, id: u64, signaled: bool) {
        assert!(
            self.tail.wrapping_sub(self.head) < self.depth,
            "a queue holds more than its depth"
        );
        let at = self.index(self.tail);
        self.ids[at] = id;
        self.flags[at] = if signaled { SIGNALED } else { 0 };
        self.tail = self.tail.wrapping_add(1);
    }

    /// The device has what was pushed, but for the last `refused`, which are forgotten.
    #[inline]
    pub(super) fn posted(&mut self, refused: u32) {
        self.tail = self.tail.wrapping_sub(refused);
        self.hw_tail = self.tail;
    }

    /// A completion at `position`: the caller's `wr_id`. The unsignalled requests right before it
    /// are done too. None = nothing is outstanding there.
    #[inline]
    pub(super) fn complete(&mut self, position: u32) -> Option<u64> {
        let ahead = position.wrapping_sub(self.head);
        let at = self.index(position);
        if ahead >= self.hw_tail.wrapping_sub(self.head) || self.flags[at] & DONE != 0 {
            return None;
        }
        self.flags[at] |= DONE;
        for back in 1..=ahead {
            let before = self.index(position.wrapping_sub(back));
            if self.flags[before] != 0 {
                break;
            }
            self.flags[before] = DONE;
        }
        while self.head != self.hw_tail && self.flags[self.index(self.head)] & DONE != 0 {
            self.head = self.head.wrapping_add(1);
        }
        Some(self.ids[at])
    }

    /// Takes out the oldest that has not completed: its `wr_id`, and whether it is to complete on
    /// success too.
    pub(super) fn pop(&mut self) -> Option<(u64, bool)> {
        while !self.is_empty() {
            let at = self.index(self.head);
            let device_has_none = self.is_drained();
            self.head = self.head.wrapping_add(1);
            if device_has_none {
                self.hw_tail = self.head;
            }
            if self.flags[at] & DONE == 0 {
                return Some((self.ids[at], self.flags[at] & SIGNALED != 0));
            }
        }
        None
    }
}

/// Lists for the device; made once, used by every post. Its pointers are written anew each time.
pub(super) struct Scratch {
    /// Linked in order; each points at the gather entry of the same index.
    sends: Box<[ibv_send_wr]>,
    /// As `sends`.
    recvs: Box<[ibv_recv_wr]>,
    /// One for each request.
    sges: Box<[ibv_sge]>,
}

impl Scratch {
    pub(super) fn new() -> Scratch {
        Scratch {
            sends: vec![ibv_send_wr::default(); SCRATCH].into_boxed_slice(),
            recvs: vec![ibv_recv_wr::default(); SCRATCH].into_boxed_slice(),
            sges: vec![ibv_sge::default(); SCRATCH].into_boxed_slice(),
        }
    }

    /// Makes the device's list of at most [`SCRATCH`] sends, as far as they are well formed.
    /// `start` is the position of the first.
    #[inline]
    pub(super) fn sends(
        &mut self,
        list: &[SendWr],
        (tag, start): (Tag, u32),
        lkeys: &[u32],
        inline_max: u32,
    ) -> &mut [ibv_send_wr] {
        let base = self.sends.as_mut_ptr();
        let sges = self.sges.as_mut_ptr();
        let mut count = 0;
        for wr in list {
            let Some(lkey) = local_key(&wr.sge, lkeys) else { break };
            self.sges[count] = ibv_sge { addr: wr.sge.addr, length: wr.sge.len, lkey };
            let to = &mut self.sends[count];
            to.wr_id = tag.at(start.wrapping_add(count as u32));
            to.sg_list = sges.wrapping_add(count);
            to.num_sge = i32::from(wr.sge.len > 0);
            let mut flags = 0;
            if wr.signaled {
                flags |= ibv_send_flags::IBV_SEND_SIGNALED.0;
            }
            if wr.fence {
                flags |= ibv_send_flags::IBV_SEND_FENCE.0;
            }
            to.opcode = match wr.op {
                SendOp::Send => {
                    if wr.sge.len <= inline_max {
                        flags |= ibv_send_flags::IBV_SEND_INLINE.0;
                    }
                    ibv_wr_opcode::IBV_WR_SEND
                }
                SendOp::Write { remote } => {
                    to.wr.rdma.remote_addr = remote.va;
                    to.wr.rdma.rkey = remote.rkey;
                    ibv_wr_opcode::IBV_WR_RDMA_WRITE
                }
                SendOp::Read { remote } => {
                    to.wr.rdma.remote_addr = remote.va;
                    to.wr.rdma.rkey = remote.rkey;
                    ibv_wr_opcode::IBV_WR_RDMA_READ
                }
            };
            to.send_flags = flags;
            to.next = base.wrapping_add(count + 1);
            count += 1;
        }
        if count > 0 {
            self.sends[count - 1].next = std::ptr::null_mut();
        }
        &mut self.sends[..count]
    }

    /// As `sends`, for receives.
    #[inline]
    pub(super) fn recvs(
        &mut self,
        list: &[RecvWr],
        (tag, start): (Tag, u32),
        lkeys: &[u32],
    ) -> &mut [ibv_recv_wr] {
        let base = self.recvs.as_mut_ptr();
        let sges = self.sges.as_mut_ptr();
        let mut count = 0;
        for wr in list {
            let Some(lkey) = local_key(&wr.sge, lkeys) else { break };
            self.sges[count] = ibv_sge { addr: wr.sge.addr, length: wr.sge.len, lkey };
            self.recvs[count] = ibv_recv_wr {
                wr_id: tag.at(start.wrapping_add(count as u32)),
                next: base.wrapping_add(count + 1),
                sg_list: sges.wrapping_add(count),
                num_sge: i32::from(wr.sge.len > 0),
            };
            count += 1;
        }
        if count > 0 {
            self.recvs[count - 1].next = std::ptr::null_mut();
        }
        &mut self.recvs[..count]
    }
}

/// The device's key for a piece of memory; none if our key names nothing or the piece is too long.
#[inline]
fn local_key(sge: &crate::Sge, lkeys: &[u32]) -> Option<u32> {
    if sge.len == 0 {
        return Some(0);
    }
    if sge.len > MESSAGE_MAX {
        return None;
    }
    lkeys.get(super::arena_index(sge.lkey)?).copied()
}

/// The device's status in our words.
pub(super) fn status(wc: ibv_wc_status::Type) -> WcStatus {
    match wc {
        ibv_wc_status::IBV_WC_SUCCESS => WcStatus::Success,
        ibv_wc_status::IBV_WC_LOC_LEN_ERR => WcStatus::LocalLength,
        ibv_wc_status::IBV_WC_LOC_PROT_ERR => WcStatus::LocalProtection,
        ibv_wc_status::IBV_WC_WR_FLUSH_ERR => WcStatus::Flushed,
        ibv_wc_status::IBV_WC_REM_ACCESS_ERR => WcStatus::RemoteAccess,
        ibv_wc_status::IBV_WC_REM_INV_REQ_ERR | ibv_wc_status::IBV_WC_REM_OP_ERR => {
            WcStatus::RemoteInvalid
        }
        ibv_wc_status::IBV_WC_RETRY_EXC_ERR | ibv_wc_status::IBV_WC_RNR_RETRY_EXC_ERR => {
            WcStatus::RetryExceeded
        }
        _ => WcStatus::Fatal,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Lkey, Remote, Sge};

    const TAG: Tag = Tag { recv: false, slot: 1, generation: 2 };
    const KEY: Lkey = Lkey(super::super::LKEY_BASE | 1);

    fn sge(len: u32) -> Sge {
        Sge { addr: 0x1000, len, lkey: KEY }
    }

    fn send(op: SendOp, len: u32) -> SendWr {
        SendWr { wr_id: 5, op, sge: sge(len), signaled: false, fence: false }
    }

    #[test]
    fn tags_survive_packing() {
        for (recv, slot, generation, at) in
            [(false, 0, 1, 0), (true, 0x7fff, 0xffff, u32::MAX), (true, 3, 2, 77)]
        {
            let tag = Tag { recv, slot, generation };
            assert_eq!(Tag::of(tag.at(at)), (tag, at));
        }
    }

    #[test]
    fn sends_become_one_linked_list() {
        let remote = Remote { va: 0xabc, rkey: 9 };
        let write = send(SendOp::Write { remote }, 4096);
        let mut answer = send(SendOp::Send, 36);
        answer.signaled = true;
        answer.fence = true;
        let list = [write, send(SendOp::Read { remote }, 512), answer];
        let mut scratch = Scratch::new();
        let made = scratch.sends(&list, (TAG, u32::MAX), &[7, 8], 64);
        assert_eq!(made.len(), 3);
        let ops: Vec<_> = made.iter().map(|w| w.opcode).collect();
        let want = [
            ibv_wr_opcode::IBV_WR_RDMA_WRITE,
            ibv_wr_opcode::IBV_WR_RDMA_READ,
            ibv_wr_opcode::IBV_WR_SEND,
        ];
        assert_eq!(ops, want);
        let ids: Vec<_> = made.iter().map(|w| w.wr_id).collect();
        assert_eq!(ids, [TAG.at(u32::MAX), TAG.at(0), TAG.at(1)], "positions wrap within the list");
        let flags = ibv_send_flags::IBV_SEND_SIGNALED.0
            | ibv_send_flags::IBV_SEND_FENCE.0
            | ibv_send_flags::IBV_SEND_INLINE.0;
        assert_eq!((made[0].send_flags, made[2].send_flags), (0, flags));
        let first = made.as_mut_ptr();
        assert_eq!(made[0].next, first.wrapping_add(1));
        assert_eq!(made[1].next, first.wrapping_add(2));
        assert!(made[2].next.is_null());
        let first_sge = made[0].sg_list;
        assert_eq!(made[1].sg_list, first_sge.wrapping_add(1));
        assert_eq!((scratch.sges[0].addr, scratch.sges[0].length), (0x1000, 4096));
        assert_eq!(scratch.sges[0].lkey, 8);
    }

    #[test]
    fn a_send_longer_than_the_device_takes_inline_is_not_inline() {
        let mut scratch = Scratch::new();
        let made = scratch.sends(&[send(SendOp::Send, 65)], (TAG, 0), &[7, 8], 64);
        assert_eq!(made[0].send_flags, 0);
    }

    #[test]
    fn nothing_to_transfer_has_no_gather_entry() {
        let mut scratch = Scratch::new();
        let remote = Remote { va: 0, rkey: 0 };
        let mut wr = send(SendOp::Write { remote }, 0);
        wr.sge.lkey = Lkey(0);
        let made = scratch.sends(&[wr], (TAG, 0), &[], 64);
        assert_eq!((made.len(), made[0].num_sge), (1, 0));
    }

    #[test]
    fn a_list_ends_before_a_request_that_is_malformed() {
        let mut scratch = Scratch::new();
        let good = RecvWr { wr_id: 1, sge: sge(64) };
        let unknown = RecvWr { wr_id: 2, sge: Sge { lkey: Lkey(0xffff), ..sge(64) } };
        let long = RecvWr { wr_id: 3, sge: sge((1 << 31) + 1) };
        let absent = RecvWr { wr_id: 4, sge: Sge { lkey: Lkey(KEY.0 + 1), ..sge(1) } };
        for bad in [unknown, long, absent] {
            let made = scratch.recvs(&[good, bad, good], (TAG, 0), &[7, 8]);
            assert_eq!(made.len(), 1);
            assert!(made[0].next.is_null());
        }
    }

    #[test]
    fn a_completion_stands_for_the_unsignalled_before_it() {
        let mut ring = Ring::new(3);
        ring.push(10, false);
        ring.push(11, false);
        ring.push(12, true);
        ring.posted(0);
        assert_eq!(ring.room(), 0);
        assert_eq!(ring.complete(2), Some(12));
        assert_eq!(ring.complete(2), None, "once only");
        assert!(ring.is_empty() && ring.room() == 3);
    }

    #[test]
    fn completions_may_overtake_each_other() {
        let mut ring = Ring::new(4);
        for (id, signaled) in [(10, true), (11, false), (12, true), (13, true)] {
            ring.push(id, signaled);
        }
        ring.posted(0);
        assert_eq!(ring.complete(2), Some(12), "with 11");
        assert_eq!(ring.room(), 0, "10 holds its place, and theirs");
        assert_eq!(ring.complete(1), None);
        assert_eq!(ring.complete(2), None);
        assert_eq!(ring.complete(0), Some(10));
        assert_eq!(ring.room(), 3);
        assert_eq!(ring.complete(3), Some(13));
        assert!(ring.is_empty());
    }

    #[test]
    fn what_has_completed_is_not_completed_again() {
        let mut ring = Ring::new(4);
        (0..3).for_each(|id| ring.push(id, true));
        ring.posted(0);
        assert_eq!(ring.complete(1), Some(1));
        let rest: Vec<_> = std::iter::from_fn(|| ring.pop()).collect();
        assert_eq!(rest, [(0, true), (2, true)]);
    }

    #[test]
    fn refused_requests_are_forgotten() {
        let mut ring = Ring::new(4);
        (0..4).for_each(|id| ring.push(id, true));
        ring.posted(3);
        assert_eq!((ring.room(), ring.next()), (3, 1));
        assert_eq!(ring.complete(1), None, "never posted");
        assert_eq!(ring.complete(0), Some(0));
    }

    #[test]
    fn positions_wrap() {
        let mut ring = Ring::new(2);
        (ring.head, ring.hw_tail, ring.tail) = (u32::MAX, u32::MAX, u32::MAX);
        ring.push(1, true);
        ring.push(2, true);
        ring.posted(0);
        assert_eq!(ring.complete(u32::MAX), Some(1));
        assert_eq!(ring.complete(0), Some(2));
        assert!(ring.is_empty() && ring.is_drained());
    }

    #[test]
    fn what_was_posted_in_error_stays_behind_what_the_device_has() {
        let mut ring = Ring::new(4);
        ring.push(1, true);
        ring.posted(0);
        ring.push(2, true);
        assert!(!ring.is_drained());
        assert_eq!(ring.complete(0), Some(1));
        assert!(ring.is_drained() && !ring.is_empty());
        assert_eq!(ring.pop(), Some((2, true)));
        assert_eq!(ring.pop(), None);
        assert!(ring.is_drained());
    }

    #[test]
    fn statuses_keep_their_meaning() {
        assert_eq!(status(ibv_wc_status::IBV_WC_SUCCESS), WcStatus::Success);
        assert_eq!(status(ibv_wc_status::IBV_WC_WR_FLUSH_ERR), WcStatus::Flushed);
        assert_eq!(status(ibv_wc_status::IBV_WC_REM_ACCESS_ERR), WcStatus::RemoteAccess);
        assert_eq!(status(ibv_wc_status::IBV_WC_RNR_RETRY_EXC_ERR), WcStatus::RetryExceeded);
        assert_eq!(status(ibv_wc_status::IBV_WC_GENERAL_ERR), WcStatus::Fatal);
    }
}
