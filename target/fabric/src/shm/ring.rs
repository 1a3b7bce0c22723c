//! One direction of a connection: a single-producer, single-consumer ring of variable-length
//! records in memory that the peer can write to at any time.
//!
//! ```text
//!  unit (64 bytes, one cache line), position p counts units since the start and never wraps
//!
//!  plain record   0        16          20    24                 64
//!  of n units     | payload | word u32 | len | payload ...       | payload ... (units 2..n)
//!  one-unit       | payload | word u32 |       payload           | payload[16..20] = 0, len = 64
//!  pad            |         | word u32 |  ?                      |   skip to the start of the ring
//!
//!  word = (p mod 2^30) << 2 | kind        kind: 1 plain, 2 one-unit, 3 pad; so a word is never 0
//!
//!            tail            head     clear                 tail + units
//!  ----------|===============|00000000|---------------------|
//!             records unread  words 0  stale bytes of the lap before
//! ```
//!
//! * The producer keeps the words of [head, clear) zero and clear > head whenever a record is
//!   published (Release store of word and len in one u64). So the consumer finds at `tail` either 0
//!   (nothing yet) or the one word that belongs to this position; anything else proves a corrupt
//!   producer. Clearing a few units ahead after publishing also fetches the lines that the next
//!   records go to, off the critical path.
//! * The consumer copies a record out before anyone looks at it, and reads nothing twice. It
//!   publishes its position in its own cache line once per poll; the producer reads that only when
//!   it believes the ring full, and believes it only between its own last known tail and head.
//! * Neither end ever waits, and neither trusts the other: every violation is a value, never a
//!   panic.

use super::copy;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of a unit.
pub(crate) const UNIT: usize = 64;
/// Where the header lies in a record's first unit.
const HEADER: usize = 16;
/// Payload bytes of a plain record's first unit.
const FIRST: usize = UNIT - 8;

const PLAIN: u32 = 1;
const ONE_UNIT: u32 = 2;
const PAD: u32 = 3;

/// Units that the producer keeps cleared ahead of the head, beyond the one it must.
const AHEAD: u64 = 4;

/// The header word of a record of this kind at this position.
#[inline(always)]
fn word(position: u64, kind: u32) -> u32 {
    ((position as u32) << 2) | kind
}

/// Units of a plain record.
#[inline(always)]
fn units_of(len: usize) -> u64 {
    if len <= FIRST { 1 } else { (len + 8).div_ceil(UNIT) as u64 }
}

/// Largest message of a ring: a record and the pad before it fit in together, with one unit to
/// spare.
pub(crate) fn largest_message(ring_bytes: usize) -> usize {
    ring_bytes / 2 - UNIT - 8
}

/// What became of a message.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub(crate) enum Sent {
    /// It is in the ring.
    Yes,
    /// No room now.
    Full,
    /// The peer's consumed position is impossible.
    Corrupt,
}

/// Producer's end. Holds raw pointers into the connection's ring memory, which outlives it (see
/// `qp::Qp`).
pub(crate) struct Tx {
    /// First unit.
    base: *mut u8,
    /// The peer's consumed position, in the peer's cache line.
    consumed: *const AtomicU64,
    /// Units of the ring, a power of two.
    units: u64,
    /// Position of the next record.
    head: u64,
    /// Words of [head, clear) are zero; at most `seen + units`.
    clear: u64,
    /// Consumed position as last read; at most `head`.
    seen: u64,
}

impl Tx {
    /// # Safety `base` is the start of `bytes` (a power of two, >= 4 units) of zeroed memory,
    /// 64-byte aligned, and `consumed` points to 8 aligned bytes; both mapped while this lives.
    pub(crate) unsafe fn new(base: *mut u8, bytes: usize, consumed: *const AtomicU64) -> Tx {
        let units = (bytes / UNIT) as u64;
        assert!(units.is_power_of_two() && units >= 4);
        Tx { base, consumed, units, head: 0, clear: 1, seen: 0 }
    }

    /// First byte of the unit at this position.
    #[inline(always)]
    fn unit(&self, position: u64) -> *mut u8 {
        let offset = (position & (self.units - 1)) as usize * UNIT;
        // SAFETY: offset < units * UNIT, the size of the ring at `base`.
        unsafe { self.base.add(offset) }
    }

    /// The header of the unit at this position, as an atomic.
    #[inline(always)]
    fn header(&self, position: u64) -> &AtomicU64 {
        // SAFETY: HEADER + 8 <= UNIT.
        let at = unsafe { self.unit(position).add(HEADER) };
        // SAFETY: inside the ring, 8-aligned (64-byte units), only accessed atomically or by raw
        // copy.
        unsafe { AtomicU64::from_ptr(at.cast()) }
    }

    /// There is room for `need` units; rereads the peer's position when there seems to be none.
    #[inline(always)]
    fn room(&mut self, need: u64) -> Sent {
        if self.head + need - self.seen <= self.units { Sent::Yes } else { self.reread(need) }
    }

    #[cold]
    fn reread(&mut self, need: u64) -> Sent {
        // SAFETY: `consumed` is mapped and aligned while self lives (contract of `new`).
        let consumed = unsafe { &*self.consumed };
        let now = consumed.load(Ordering::Acquire);
        if now < self.seen || now > self.head {
            return Sent::Corrupt;
        }
        self.seen = now;
        if self.head + need - self.seen <= self.units { Sent::Yes } else { Sent::Full }
    }

    /// Puts one message of at most `largest_message` bytes into the ring.
    ///
    /// # Safety
    /// `src` is readable for `len` bytes and does not overlap the ring.
    #[inline(always)]
    pub(crate) unsafe fn send(&mut self, src: *const u8, len: usize) -> Sent {
        // SAFETY: bytes 16..20 exist when len is 64.
        let one = len == UNIT && unsafe { src.add(HEADER).cast::<u32>().read_unaligned() } == 0;
        let n = if one { 1 } else { units_of(len) };
        let to_end = self.units - (self.head & (self.units - 1));
        let pad = if n > to_end { to_end } else { 0 };
        match self.room(pad + n + 1) {
            Sent::Yes => {}
            other => return other,
        }
        let at = self.head + pad;
        self.clear = self.clear.max(at + n);
        if self.clear == at + n {
            self.clear_next();
        }
        // SAFETY: [at, at + n) is free (`room`) and contiguous (`pad`); `src` by contract.
        unsafe { self.write(at, src, len, one) };
        if pad > 0 {
            let header = u64::from(word(self.head, PAD));
            self.header(self.head).store(header, Ordering::Release);
        }
        self.head = at + n;
        self.clear_ahead();
        Sent::Yes
    }

    /// Writes a record at `at` and publishes it.
    ///
    /// # Safety
    /// The record's units are free and contiguous; `src` is readable for `len` bytes.
    #[inline(always)]
    unsafe fn write(&self, at: u64, src: *const u8, len: usize, one: bool) {
        let unit = self.unit(at);
        if one {
            // SAFETY: 64 bytes at `src` by contract; bytes 20..24 are among them.
            let upper = unsafe { src.add(HEADER + 4).cast::<u32>().read_unaligned() };
            // SAFETY: 16 bytes of both.
            unsafe { copy::copy16(unit, src) };
            // SAFETY: 24 + 40 = 64 bytes of both.
            unsafe { copy::small(unit.add(24), src.add(24), 40) };
            let header = u64::from(word(at, ONE_UNIT)) | (u64::from(upper) << 32);
            self.header(at).store(header, Ordering::Release);
            return;
        }
        if len <= HEADER {
            // SAFETY: `len` bytes of both.
            unsafe { copy::small(unit, src, len) };
        } else {
            // SAFETY: 16 bytes of both.
            unsafe { copy::copy16(unit, src) };
            // SAFETY: the record spans units_of(len) units, which hold len + 8 bytes.
            unsafe { copy::any(unit.add(24), src.add(HEADER), len - HEADER) };
        }
        let header = u64::from(word(at, PLAIN)) | ((len as u64) << 32);
        self.header(at).store(header, Ordering::Release);
    }

    /// Clears the word at `clear`; the caller knows that this unit is free.
    #[inline(always)]
    fn clear_next(&mut self) {
        self.header(self.clear).store(0, Ordering::Relaxed);
        self.clear += 1;
    }

    /// Clears a few words beyond the head, as far as the consumer is known to be done with them.
    #[inline(always)]
    fn clear_ahead(&mut self) {
        let limit = (self.head + AHEAD).min(self.seen + self.units);
        while self.clear < limit {
            self.clear_next();
        }
    }
}

/// What lies at the tail.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub(crate) enum Front {
    /// Nothing yet.
    Empty,
    /// A record; its header, read once.
    Record(u64),
    /// The producer broke the protocol.
    Corrupt,
}

/// Consumer's end. Same contract as [`Tx`].
pub(crate) struct Rx {
    /// First unit.
    base: *mut u8,
    /// Our consumed position, in our cache line.
    consumed: *const AtomicU64,
    /// Units of the ring, a power of two.
    units: u64,
    /// Position of the next record to read.
    tail: u64,
    /// What `consumed` says.
    published: u64,
}

impl Rx {
    /// # Safety
    /// As `Tx::new`.
    pub(crate) unsafe fn new(base: *mut u8, bytes: usize, consumed: *const AtomicU64) -> Rx {
        let units = (bytes / UNIT) as u64;
        assert!(units.is_power_of_two() && units >= 4);
        Rx { base, consumed, units, tail: 0, published: 0 }
    }

    #[inline(always)]
    fn unit(&self, position: u64) -> *mut u8 {
        let offset = (position & (self.units - 1)) as usize * UNIT;
        // SAFETY: offset < units * UNIT, the size of the ring at `base`.
        unsafe { self.base.add(offset) }
    }

    #[inline(always)]
    fn header(&self, position: u64) -> u64 {
        // SAFETY: HEADER + 8 <= UNIT.
        let at = unsafe { self.unit(position).add(HEADER) };
        // SAFETY: inside the ring, 8-aligned (64-byte units).
        unsafe { AtomicU64::from_ptr(at.cast()) }.load(Ordering::Acquire)
    }

    /// Nothing at the tail; touches one line.
    #[inline(always)]
    pub(crate) fn is_idle(&self) -> bool {
        self.header(self.tail) as u32 == 0
    }

    /// Asks for the line `distance` units behind the tail.
    #[inline(always)]
    pub(crate) fn prefetch(&self, distance: u64) {
        copy::prefetch(self.unit(self.tail + distance));
    }

    /// Looks at the tail, and steps over a pad.
    #[inline(always)]
    pub(crate) fn front(&mut self) -> Front {
        let header = self.header(self.tail);
        let got = header as u32;
        if got == 0 {
            return Front::Empty;
        }
        if got == word(self.tail, PLAIN) || got == word(self.tail, ONE_UNIT) {
            return Front::Record(header);
        }
        self.front_after_pad(got)
    }

    /// A pad leads to the start of the ring, where the record that needed it lies already.
    #[cold]
    fn front_after_pad(&mut self, got: u32) -> Front {
        let offset = self.tail & (self.units - 1);
        // A producer never pads at the start: its records are shorter than half a ring.
        if got != word(self.tail, PAD) || offset == 0 {
            return Front::Corrupt;
        }
        self.tail += self.units - offset;
        let header = self.header(self.tail);
        if header as u32 == word(self.tail, PLAIN) || header as u32 == word(self.tail, ONE_UNIT) {
            return Front::Record(header);
        }
        Front::Corrupt
    }

    /// Copies the record with this header to `dst` and consumes it. `Ok` = its length; `Err(true)`
    /// = it is longer than `cap`; `Err(false)` = it cannot be a record of this ring.
    ///
    /// # Safety `dst` is writable for `cap` bytes and does not overlap the ring; `header` comes
    /// from `front`.
    #[inline(always)]
    pub(crate) unsafe fn take(
        &mut self,
        header: u64,
        dst: *mut u8,
        cap: usize,
    ) -> Result<usize, bool> {
        let unit = self.unit(self.tail);
        if header as u32 & 3 == ONE_UNIT {
            if cap < UNIT {
                return Err(true);
            }
            // SAFETY: 16 bytes of the unit, 64 of `dst`.
            unsafe { copy::copy16(dst, unit) };
            // SAFETY: 8 bytes at offset 16 of `dst`.
            unsafe { dst.add(HEADER).cast::<u64>().write_unaligned(header & !0xffff_ffff) };
            // SAFETY: 24 + 40 = 64 bytes of both.
            unsafe { copy::small(dst.add(24), unit.add(24), 40) };
            self.tail += 1;
            return Ok(UNIT);
        }
        let len = (header >> 32) as usize;
        let n = units_of(len);
        if len > largest_message(self.units as usize * UNIT)
            || n > self.units - (self.tail & (self.units - 1))
        {
            return Err(false);
        }
        if len > cap {
            return Err(true);
        }
        // SAFETY: len <= cap, and the record lies inside the ring (checked above).
        unsafe { self.copy_plain(unit, dst, len, cap) };
        self.tail += n;
        Ok(len)
    }

    /// Copies a plain record's payload.
    ///
    /// # Safety The record of `len` bytes at `unit` lies inside the ring; `dst` is writable for
    /// `cap >= len` bytes.
    #[inline(always)]
    unsafe fn copy_plain(&self, unit: *const u8, dst: *mut u8, len: usize, cap: usize) {
        if len <= FIRST && cap >= UNIT {
            // The whole unit without a branch on the length; bytes beyond it are undefined by
            // contract. SAFETY: 16 bytes of both.
            unsafe { copy::copy16(dst, unit) };
            // SAFETY: 24 + 40 = 64 bytes of the unit, 16 + 40 < 64 of `dst`.
            unsafe { copy::small(dst.add(HEADER), unit.add(24), 40) };
        } else if len <= HEADER {
            // SAFETY: `len` bytes of both.
            unsafe { copy::small(dst, unit, len) };
        } else {
            // SAFETY: 16 bytes of both.
            unsafe { copy::copy16(dst, unit) };
            // SAFETY: the record holds len + 8 bytes; `dst` len.
            unsafe { copy::any(dst.add(HEADER), unit.add(24), len - HEADER) };
        }
    }

    /// Tells the producer how far we are.
    #[inline(always)]
    pub(crate) fn publish(&mut self) {
        if self.published != self.tail {
            self.published = self.tail;
            // SAFETY: `consumed` is mapped and aligned while self lives (contract of `new`).
            let consumed = unsafe { &*self.consumed };
            consumed.store(self.tail, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A ring in ordinary memory with both ends.
    struct Pair {
        memory: Vec<[u64; 8]>,
        consumed: Box<AtomicU64>,
        tx: Tx,
        rx: Rx,
    }

    fn pair(bytes: usize) -> Pair {
        // One unit more, so that the start can be aligned to a unit.
        let mut memory = vec![[0u64; 8]; bytes / UNIT + 1];
        let consumed = Box::new(AtomicU64::new(0));
        let raw = memory.as_mut_ptr().cast::<u8>();
        // SAFETY: the vector has a unit to spare.
        let base = unsafe { raw.add(raw.align_offset(UNIT)) };
        // SAFETY: zeroed, aligned, `bytes` long; moves along with the ends, at a fixed heap
        // address.
        let (tx, rx) =
            unsafe { (Tx::new(base, bytes, &*consumed), Rx::new(base, bytes, &*consumed)) };
        Pair { memory, consumed, tx, rx }
    }

    impl Pair {
        fn send(&mut self, message: &[u8]) -> Sent {
            // SAFETY: a slice is readable for its length.
            unsafe { self.tx.send(message.as_ptr(), message.len()) }
        }
        fn take(&mut self) -> Option<Vec<u8>> {
            let Front::Record(header) = self.rx.front() else { return None };
            let mut out = vec![0xa5; 65536];
            // SAFETY: a vector is writable for its length.
            let len = unsafe { self.rx.take(header, out.as_mut_ptr(), out.len()) }.unwrap();
            self.rx.publish();
            out.truncate(len);
            Some(out)
        }
    }

    fn next(seed: &mut u64) -> u64 {
        *seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        *seed >> 24
    }

    #[test]
    fn every_size_at_every_phase_comes_back() {
        let bytes = 4096;
        let mut p = pair(bytes);
        let mut seed = 1;
        for round in 0..40 {
            for len in 0..=largest_message(bytes) {
                let mut message: Vec<u8> = (0..len).map(|_| next(&mut seed) as u8).collect();
                if len == 64 && round % 2 == 0 {
                    message[16..20].fill(0);
                }
                assert_eq!(p.send(&message), Sent::Yes, "length {len}");
                assert_eq!(p.take().as_deref(), Some(&message[..]), "length {len}");
                assert_eq!(p.rx.front(), Front::Empty);
            }
        }
    }

    #[test]
    fn random_batches_keep_order_and_content() {
        let mut p = pair(4096);
        let mut seed = 7;
        let mut waiting: VecDeque<Vec<u8>> = VecDeque::new();
        for _ in 0..200_000 {
            if next(&mut seed).is_multiple_of(2) {
                let len = if next(&mut seed).is_multiple_of(8) { 1900 } else { 130 };
                let len = (next(&mut seed) % len) as usize;
                let message: Vec<u8> = (0..len).map(|i| (i as u64 ^ seed) as u8).collect();
                match p.send(&message) {
                    Sent::Yes => waiting.push_back(message),
                    Sent::Full => assert!(!waiting.is_empty(), "an empty ring takes any message"),
                    Sent::Corrupt => panic!("nobody corrupted it"),
                }
            } else {
                assert_eq!(p.take(), waiting.pop_front());
            }
        }
    }

    /// Payloads that look like headers of later laps must not be taken for records.
    #[test]
    fn stale_bytes_are_never_headers() {
        let mut p = pair(4096);
        let mut seed = 3;
        for _ in 0..20_000 {
            let len = 24 + (next(&mut seed) % 900) as usize;
            // The unit at offset `o` of this record will hold position head + o + one lap.
            let message: Vec<u8> = (0..len / 8 + 1)
                .flat_map(|i| {
                    let position = p.tx.head + (i as u64 + 1) / 8 + 64;
                    (u64::from(word(position, PLAIN)) | 40 << 32).to_le_bytes()
                })
                .take(len)
                .collect();
            assert_eq!(p.send(&message), Sent::Yes);
            assert_eq!(p.take(), Some(message));
            assert_eq!(p.rx.front(), Front::Empty);
        }
    }

    #[test]
    fn an_impossible_consumed_position_is_corruption() {
        let mut p = pair(4096);
        while p.send(&[1; 500]) == Sent::Yes {}
        let head = p.tx.head;
        p.consumed.store(head + 1, Ordering::Relaxed);
        assert_eq!(p.send(&[1; 500]), Sent::Corrupt);
        p.consumed.store(head, Ordering::Relaxed);
        while p.send(&[1; 500]) == Sent::Yes {}
        p.consumed.store(head - 1, Ordering::Relaxed);
        assert_eq!(p.send(&[1; 500]), Sent::Corrupt);
    }

    #[test]
    fn random_ring_contents_are_refused_or_stay_inside() {
        let mut seed = 11;
        for round in 0..20_000 {
            let mut p = pair(4096);
            let raw = p.memory.as_mut_ptr().cast::<u8>();
            let skip = raw.align_offset(UNIT);
            for offset in (0..4096).step_by(8) {
                // SAFETY: offset + 8 <= 4096 <= the vector's bytes behind `skip`.
                unsafe { raw.add(skip + offset).cast::<u64>().write(next(&mut seed) << 20) };
            }
            let kind = [PLAIN, ONE_UNIT, PAD][round % 3];
            let header = u64::from(word(0, kind)) | next(&mut seed) << (32 + seed % 24);
            // SAFETY: inside the first unit.
            unsafe { raw.add(skip + HEADER).cast::<u64>().write(header) };
            let mut out = vec![0u8; 2048];
            for _ in 0..64 {
                let Front::Record(header) = p.rx.front() else { break };
                // SAFETY: a vector is writable for its length.
                if unsafe { p.rx.take(header, out.as_mut_ptr(), out.len()) }.is_err() {
                    break;
                }
            }
        }
    }

    use std::collections::VecDeque;
}
