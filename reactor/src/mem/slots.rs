//! `count` equal slots in an arena: the receive ring and the send ring.
//!
//! Owns the range (claimed) and which slots are lent to the fabric. Never reads a lent slot: the
//! device or the peer may be writing it.
//!
//! ```text
//!            lend -> addr            device writes or reads            take_back
//!   ours -----------------> lent --------------------------------> ours : bytes(), bytes_mut()
//! ```
//! With `lead` > 0 each slot starts `lead` bytes before an aligned boundary, so that immediate data
//! at that offset of an IU lies aligned (4096 for slots of a page or more, else 512) and a bdev
//! with O_DIRECT can take it without a copy:
//!
//! ```text
//!   boundary k          boundary k+1
//!   |......[ IU header ][ immediate data ...      ]
//!          ^ slot, lead bytes before the boundary
//! ```

use std::sync::Arc;

use super::{Arena, CLAIM, PAGE, round_up};

/// Equal slots, each ours or lent.
pub struct Slots {
    /// The memory; kept mapped by this.
    arena: Arc<Arena>,
    /// Where the claimed range starts in the arena.
    offset: usize,
    /// Bytes claimed.
    claimed: usize,
    /// Where slot 0 starts in the arena.
    first: usize,
    /// Bytes from one slot to the next.
    stride: usize,
    /// Usable bytes of a slot.
    slot_bytes: usize,
    /// How many slots there are.
    count: u32,
    /// How many are lent.
    lent: u32,
    /// One bit per slot, set while it is lent.
    bits: Box<[u64]>,
}

/// Alignment that `lead` aims at.
const fn boundary(slot_bytes: usize) -> usize {
    if slot_bytes >= PAGE { PAGE } else { 512 }
}

impl Slots {
    /// Slots from `offset` (a multiple of 64; of 4096 for `lead` to mean page boundaries) on.
    pub fn new(
        arena: Arc<Arena>,
        offset: usize,
        slot_bytes: usize,
        count: u32,
        lead: usize,
    ) -> Slots {
        assert!(slot_bytes > 0 && count > 0, "slots of {slot_bytes} bytes, {count} of them");
        let align = if lead == 0 { CLAIM } else { boundary(slot_bytes) };
        let stride = round_up(slot_bytes, align);
        let base = arena.addr() as usize;
        let first = round_up(base + offset + lead, align) - lead - base;
        let claimed = first - offset + stride * (count as usize - 1) + slot_bytes;
        assert!(claimed <= Slots::bytes_needed(slot_bytes, count));
        assert!(lead == 0 || (base + first + lead).is_multiple_of(align));
        arena.claim(offset, claimed);
        let bits = vec![0; (count as usize).div_ceil(64)].into();
        Slots { arena, offset, claimed, first, stride, slot_bytes, count, lent: 0, bits }
    }

    /// Bytes of arena that enough for such slots at any `lead`; a multiple of the page, so that
    /// offsets added up from it stay aligned.
    pub fn bytes_needed(slot_bytes: usize, count: u32) -> usize {
        let align = boundary(slot_bytes);
        let slots = round_up(slot_bytes, align).checked_mul(count as usize);
        round_up(slots.expect("size of the slots overflows") + align, PAGE)
    }

    /// How many slots there are.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Usable bytes of a slot.
    pub fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// The arena the slots lie in.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// Address of slot `i`.
    pub fn addr(&self, i: u32) -> u64 {
        self.arena.addr() + self.start(i) as u64
    }

    /// Hands slot `i` to the fabric: its address. Panics when it already is lent.
    pub fn lend(&mut self, i: u32) -> u64 {
        assert!(!self.is_lent(i), "slot {i} is lent twice");
        self.bits[i as usize / 64] |= 1 << (i % 64);
        self.lent += 1;
        assert!(self.lent <= self.count);
        self.addr(i)
    }

    /// The fabric is done with slot `i`. Panics when it was not lent.
    pub fn take_back(&mut self, i: u32) {
        assert!(self.is_lent(i), "slot {i} is taken back but was not lent");
        self.bits[i as usize / 64] &= !(1 << (i % 64));
        self.lent -= 1;
    }

    /// True while the fabric has slot `i`.
    pub fn is_lent(&self, i: u32) -> bool {
        assert!(i < self.count, "slot {i} of {}", self.count);
        self.bits[i as usize / 64] & (1 << (i % 64)) != 0
    }

    /// How many slots the fabric has.
    pub fn lent(&self) -> u32 {
        self.lent
    }

    /// The bytes of slot `i`; panics while it is lent.
    pub fn bytes(&self, i: u32) -> &[u8] {
        assert!(!self.is_lent(i), "slot {i} is read while it is lent");
        let base = self.arena.at(self.start(i), self.slot_bytes);
        // SAFETY: the range is this `Slots`' own (Arena::claim), in the arena it keeps mapped, and
        // not lent: nobody else touches it. `at` checked the bounds.
        unsafe { std::slice::from_raw_parts(base, self.slot_bytes) }
    }

    /// The bytes of slot `i`, to be written; panics while it is lent.
    pub fn bytes_mut(&mut self, i: u32) -> &mut [u8] {
        assert!(!self.is_lent(i), "slot {i} is written while it is lent");
        let base = self.arena.at(self.start(i), self.slot_bytes);
        // SAFETY: as in `bytes`; `&mut self` makes this the only reference.
        unsafe { std::slice::from_raw_parts_mut(base, self.slot_bytes) }
    }

    fn start(&self, i: u32) -> usize {
        assert!(i < self.count, "slot {i} of {}", self.count);
        self.first + i as usize * self.stride
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        if self.lent == 0 {
            self.arena.unclaim(self.offset, self.claimed);
        } else {
            // The fabric may still write a lent slot: the memory stays mapped and claimed for ever.
            std::mem::forget(Arc::clone(&self.arena));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::HugePolicy;

    fn slots(slot_bytes: usize, count: u32, lead: usize) -> Slots {
        let bytes = Slots::bytes_needed(slot_bytes, count);
        let arena = Arena::new("slots-test", bytes, HugePolicy::Never).unwrap();
        Slots::new(arena, 0, slot_bytes, count, lead)
    }

    #[test]
    fn slots_are_apart_and_keep_their_bytes() {
        let mut slots = slots(100, 70, 0);
        for i in 0..70 {
            slots.bytes_mut(i).fill(i as u8);
        }
        assert!((0..70).all(|i| slots.bytes(i).iter().all(|&byte| byte == i as u8)));
        assert_eq!(slots.bytes(69).len(), 100);
    }

    #[test]
    fn lead_puts_immediate_data_on_a_boundary() {
        for (slot_bytes, lead, align) in [(8260, 68, 4096), (1000, 68, 512), (4096, 4096, 4096)] {
            let slots = slots(slot_bytes, 5, lead);
            assert!((0..5).all(|i| (slots.addr(i) + lead as u64).is_multiple_of(align)));
            assert!(slots.addr(1) - slots.addr(0) >= slot_bytes as u64);
        }
    }

    #[test]
    fn lent_slots_are_counted_and_come_back() {
        let mut slots = slots(64, 3, 0);
        assert_eq!(slots.lend(2), slots.addr(2));
        assert_eq!((slots.lent(), slots.is_lent(2), slots.is_lent(1)), (1, true, false));
        slots.take_back(2);
        assert_eq!(slots.lent(), 0);
    }

    #[test]
    #[should_panic(expected = "read while it is lent")]
    fn a_lent_slot_is_not_read() {
        let mut slots = slots(64, 3, 0);
        slots.lend(0);
        let _ = slots.bytes(0);
    }

    #[test]
    #[should_panic(expected = "lent twice")]
    fn a_slot_is_not_lent_twice() {
        let mut slots = slots(64, 3, 0);
        slots.lend(0);
        slots.lend(0);
    }

    #[test]
    #[should_panic(expected = "was not lent")]
    fn a_slot_that_is_ours_is_not_taken_back() {
        slots(64, 3, 0).take_back(1);
    }

    #[test]
    #[should_panic(expected = "slot 3 of 3")]
    fn a_slot_beyond_the_last_panics() {
        slots(64, 3, 0).addr(3);
    }
}
