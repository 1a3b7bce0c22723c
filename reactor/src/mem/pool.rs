//! Buddy allocator over a range of an arena: contiguous power-of-two pieces `min..=max`.
//!
//! Owns the range (claimed from the arena) and who has which piece. Never grows, never uses the
//! heap after `new`, takes and gives in O(log(max/min)).
//!
//! ```text
//!   order 2 |       free        |        split        |
//!   order 1 |                   |   out   |   split   |      take: smallest free order that fits,
//!   order 0 |                   |         | out | free|            halved down to the order wanted
//!    leaf   0    1    2    3    4    5    6     7            give: joined with its free buddy
//!                                                                  (leaf ^ 1 << order) upwards
//! ```
//! Invariants: every leaf belongs to exactly one block; a block's first leaf holds its state and
//! order; two free buddies never stay apart below the top order (but for kept ones).
//! Pieces are aligned to their size relative to the start of the range. One exception to joining:
//! of each order the piece given back last is kept whole, so that one command after another costs
//! no splitting and joining (100 ns against 17); the kept ones are joined when a take would fail.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::{Arena, Buf, CLAIM};

/// End of a list.
const NIL: u32 = u32::MAX;

/// State of a leaf: the first of a free block (plus its order) ...
const FREE: u8 = 0x40;
/// ... the first of a block that is out (plus its order) ...
const OUT: u8 = 0x80;
/// ... the first of a free block that is kept whole (plus its order) ...
const KEPT: u8 = 0xC0;
/// ... or inside a block.
const INNER: u8 = 0;

/// Numbers pools through the process, so that a pool refuses another's buffer. Start-up only.
static NEXT_ID: AtomicU32 = AtomicU32::new(1);

/// Fixed pool of data buffers.
pub struct BufPool {
    /// The memory; kept mapped by this.
    arena: Arc<Arena>,
    /// Where the range starts in the arena.
    offset: usize,
    /// Bytes of the range that pieces are cut from: a multiple of `min`.
    bytes: usize,
    /// log2 of the smallest piece.
    min_shift: u32,
    /// Order of the largest piece: its size is `min << top`.
    top: u32,
    /// This pool's number; never 0.
    id: u32,
    /// First free block of each order, as a leaf index.
    heads: [u32; 32],
    /// One bit per order: set while its list is not empty.
    orders: u32,
    /// Per leaf: the next free block of the same order; valid for the first leaf of a free block.
    next: Box<[u32]>,
    /// Per leaf: the previous one.
    prev: Box<[u32]>,
    /// The block of each order that is kept whole, as a leaf index, or NIL.
    kept: [u32; 32],
    /// Per leaf: FREE | order, OUT | order, KEPT | order or INNER.
    state: Box<[u8]>,
    /// Bytes free now.
    free: usize,
    /// The least `free` ever was.
    low: usize,
}

impl BufPool {
    /// A whole pool over `bytes` of the arena from `offset`. `min` and `max` are powers of two,
    /// `min >= 64`. A rest that no piece of `min` fits in stays unused; a range that is no
    /// multiple of `max` is fine.
    pub fn new(arena: Arc<Arena>, offset: usize, bytes: usize, min: usize, max: usize) -> BufPool {
        assert!(min.is_power_of_two() && max.is_power_of_two(), "pieces are powers of two");
        assert!((CLAIM..=max).contains(&min), "smallest piece {min} of {CLAIM}..={max}");
        assert!(max <= 1 << 31, "largest piece {max} does not fit Buf's length");
        let leaves = bytes / min;
        assert!(leaves > 0, "pool of {bytes} bytes holds no piece of {min}");
        assert!(leaves < NIL as usize, "too many pieces of {min} in {bytes} bytes");
        let bytes = leaves * min;
        arena.claim(offset, bytes);
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        assert!(id != 0, "2^32 pools were made");
        let mut pool = BufPool {
            arena,
            offset,
            bytes,
            min_shift: min.trailing_zeros(),
            top: (max / min).trailing_zeros(),
            id,
            heads: [NIL; 32],
            orders: 0,
            kept: [NIL; 32],
            next: vec![NIL; leaves].into(),
            prev: vec![NIL; leaves].into(),
            state: vec![INNER; leaves].into(),
            free: bytes,
            low: bytes,
        };
        pool.carve(leaves as u32);
        pool
    }

    /// Cuts the range into the largest aligned blocks; the first ends up at its list's head.
    fn carve(&mut self, leaves: u32) {
        let mut end = leaves;
        while end > 0 {
            // The largest block that ends at `end`, is aligned, and is no larger than the top.
            let order = end.trailing_zeros().min(self.top);
            end -= 1 << order;
            self.push(end, order);
        }
    }

    /// A piece of at least `len` bytes (the next power of two), or `None`: wait and try again.
    /// Panics when `len` exceeds [`BufPool::max_len`]: no waiting would help.
    pub fn take(&mut self, len: usize) -> Option<Buf> {
        assert!(len <= self.max_len(), "{len} bytes asked, largest piece is {}", self.max_len());
        let leaves = len.max(1).next_power_of_two() >> self.min_shift;
        let order = leaves.max(1).trailing_zeros();
        let leaf = match self.unkeep(order) {
            Some(leaf) => leaf,
            None => self.cut(order).or_else(|| {
                self.join_kept();
                self.cut(order)
            })?,
        };
        assert_eq!(self.state[leaf as usize], INNER);
        self.state[leaf as usize] = OUT | order as u8;
        let bytes = 1usize << (order + self.min_shift);
        self.free -= bytes;
        self.low = self.low.min(self.free);
        let at = self.offset + ((leaf as usize) << self.min_shift);
        Some(Buf::new(self.arena.at(at, bytes), bytes as u32, self.id))
    }

    /// Takes a piece back. Panics when it is none, another pool's, or not out.
    pub fn give(&mut self, buf: Buf) {
        assert!(!buf.is_none(), "no buffer given");
        assert_eq!(buf.pool(), self.id, "{buf:?} belongs to another pool");
        let offset = (buf.addr() - self.arena.addr()) as usize - self.offset;
        assert!(offset < self.bytes);
        let bytes = buf.len();
        let leaf = (offset >> self.min_shift) as u32;
        let order = bytes.trailing_zeros() - self.min_shift;
        assert_eq!(self.state[leaf as usize], OUT | order as u8, "{buf:?} is not out");
        buf.forget();
        self.free += bytes;
        assert!(self.free <= self.bytes);
        if self.kept[order as usize] == NIL {
            self.kept[order as usize] = leaf;
            self.state[leaf as usize] = KEPT | order as u8;
        } else {
            self.state[leaf as usize] = INNER;
            self.join(leaf, order);
        }
    }

    /// True when no piece is out.
    pub fn is_whole(&self) -> bool {
        self.free == self.bytes
    }

    /// Size of the largest piece that can ever be had (less than `max` when the range is small).
    pub fn max_len(&self) -> usize {
        let largest = self.state.len().ilog2().min(self.top);
        1 << (largest + self.min_shift)
    }

    /// The arena the pieces lie in.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// Bytes in the pool, free or out.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Bytes free now; not necessarily in one piece.
    pub fn free_bytes(&self) -> usize {
        self.free
    }

    /// The least that was ever free, for the statistics.
    pub fn low_water(&self) -> usize {
        self.low
    }

    /// The kept block of an order, if there is one.
    fn unkeep(&mut self, order: u32) -> Option<u32> {
        let leaf = std::mem::replace(&mut self.kept[order as usize], NIL);
        if leaf == NIL {
            return None;
        }
        assert_eq!(self.state[leaf as usize], KEPT | order as u8);
        self.state[leaf as usize] = INNER;
        Some(leaf)
    }

    /// Gives the kept blocks up, so that they join with their buddies.
    fn join_kept(&mut self) {
        for order in 0..=self.top {
            if let Some(leaf) = self.unkeep(order) {
                self.join(leaf, order);
            }
        }
    }

    /// Takes a block of `order` out of the smallest free one that holds it.
    fn cut(&mut self, order: u32) -> Option<u32> {
        let fitting = self.orders & (u32::MAX << order);
        if fitting == 0 {
            return None;
        }
        let mut from = fitting.trailing_zeros();
        let leaf = self.heads[from as usize];
        self.unlink(leaf, from);
        while from > order {
            from -= 1;
            self.push(leaf + (1 << from), from);
        }
        Some(leaf)
    }

    /// Frees a block, joined with its buddy as long as that is free.
    fn join(&mut self, mut leaf: u32, mut order: u32) {
        while order < self.top {
            let buddy = leaf ^ (1 << order);
            if self.state.get(buddy as usize) != Some(&(FREE | order as u8)) {
                break;
            }
            self.unlink(buddy, order);
            leaf = leaf.min(buddy);
            order += 1;
        }
        self.push(leaf, order);
    }

    /// Puts a free block at the head of its list.
    fn push(&mut self, leaf: u32, order: u32) {
        let (at, head) = (leaf as usize, self.heads[order as usize]);
        assert_eq!(self.state[at], INNER);
        self.state[at] = FREE | order as u8;
        self.next[at] = head;
        self.prev[at] = NIL;
        if head != NIL {
            self.prev[head as usize] = leaf;
        }
        self.heads[order as usize] = leaf;
        self.orders |= 1 << order;
    }

    /// Takes a free block out of its list, wherever it stands.
    fn unlink(&mut self, leaf: u32, order: u32) {
        let at = leaf as usize;
        assert_eq!(self.state[at], FREE | order as u8);
        self.state[at] = INNER;
        let (next, prev) = (self.next[at], self.prev[at]);
        if next != NIL {
            self.prev[next as usize] = prev;
        }
        if prev != NIL {
            self.next[prev as usize] = next;
            return;
        }
        self.heads[order as usize] = next;
        if next == NIL {
            self.orders &= !(1 << order);
        }
    }
}

impl Drop for BufPool {
    fn drop(&mut self) {
        if self.is_whole() {
            self.arena.unclaim(self.offset, self.bytes);
        } else {
            // A piece is out: its owner's slices must stay valid, so the memory is never unmapped
            // and the range never claimed again.
            std::mem::forget(Arc::clone(&self.arena));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::HugePolicy;

    fn pool(bytes: usize, min: usize, max: usize) -> BufPool {
        let arena = Arena::new("pool-test", bytes, HugePolicy::Never).unwrap();
        BufPool::new(arena, 0, bytes, min, max)
    }

    #[test]
    fn a_piece_is_the_next_power_of_two_and_at_least_the_smallest() {
        let mut pool = pool(1 << 16, 512, 1 << 14);
        for (len, got) in [(0, 512), (1, 512), (513, 1024), (4096, 4096), (9000, 16384)] {
            let buf = pool.take(len).unwrap();
            assert_eq!(buf.len(), got, "asked {len}");
            pool.give(buf);
        }
        assert!(pool.is_whole());
        assert_eq!(pool.low_water(), (1 << 16) - (1 << 14));
    }

    #[test]
    fn an_exhausted_pool_says_none_and_recovers() {
        let mut pool = pool(4096, 1024, 4096);
        let mut held: Vec<Buf> = (0..4).map(|_| pool.take(1024).unwrap()).collect();
        assert!(pool.take(1).is_none());
        assert_eq!((pool.free_bytes(), pool.low_water()), (0, 0));
        pool.give(held.remove(1));
        assert!(pool.take(2048).is_none(), "the free 1024 is no 2048");
        held.drain(..).for_each(|buf| pool.give(buf));
        let all = pool.take(4096).expect("buddies joined again");
        pool.give(all);
        assert!(pool.is_whole());
    }

    #[test]
    fn kept_pieces_join_when_the_space_is_wanted() {
        let mut pool = pool(8192, 512, 8192);
        let mut held: Vec<Buf> =
            [512, 512, 1024, 2048, 4096].map(|len| pool.take(len).unwrap()).into();
        held.drain(..).for_each(|buf| pool.give(buf));
        assert!(pool.is_whole() && pool.kept.iter().any(|&leaf| leaf != NIL));
        let warm = pool.take(2048).unwrap();
        let addr = warm.addr();
        pool.give(warm);
        let again = pool.take(2000).unwrap();
        assert_eq!(again.addr(), addr, "the warmest piece comes back");
        pool.give(again);
        let all = pool.take(8192).expect("kept pieces were joined");
        pool.give(all);
    }

    #[test]
    fn a_range_that_is_no_multiple_of_the_largest_piece_is_used_whole() {
        let mut pool = pool(4096 * 7, 4096, 16384);
        let sizes: Vec<Buf> =
            [16384, 8192, 4096].into_iter().map(|len| pool.take(len).unwrap()).collect();
        assert!(pool.take(1).is_none());
        sizes.into_iter().for_each(|buf| pool.give(buf));
        assert!(pool.is_whole());
        assert_eq!(pool.max_len(), 16384);
    }

    #[test]
    #[should_panic(expected = "belongs to another pool")]
    fn a_foreign_buffer_panics() {
        let (mut one, mut two) = (pool(4096, 512, 4096), pool(4096, 512, 4096));
        two.give(one.take(512).unwrap());
    }

    #[test]
    #[should_panic(expected = "is not out")]
    fn a_double_give_panics() {
        let mut pool = pool(4096, 512, 4096);
        let buf = pool.take(512).unwrap();
        // No safe code can copy a Buf; this forges one as a bug in this module would.
        let twin = Buf::new(buf.addr() as *mut u8, 512, buf.pool());
        pool.give(buf);
        pool.give(twin);
    }

    #[test]
    #[should_panic(expected = "no buffer given")]
    fn giving_none_panics() {
        pool(4096, 512, 4096).give(Buf::none());
    }

    #[test]
    #[should_panic(expected = "largest piece is 4096")]
    fn asking_more_than_the_largest_piece_panics() {
        let _ = pool(8192, 512, 4096).take(4097);
    }

    #[test]
    #[should_panic(expected = "two pools claim one range")]
    fn two_pools_may_not_overlap() {
        let arena = Arena::new("pool-test", 8192, HugePolicy::Never).unwrap();
        let _one = BufPool::new(Arc::clone(&arena), 0, 4096, 512, 4096);
        let _two = BufPool::new(arena, 3584, 4096, 512, 4096);
    }

    #[test]
    fn a_dropped_whole_pool_frees_its_range_for_another() {
        let arena = Arena::new("pool-test", 8192, HugePolicy::Never).unwrap();
        drop(BufPool::new(Arc::clone(&arena), 0, 8192, 512, 4096));
        assert!(BufPool::new(arena, 4096, 4096, 512, 4096).is_whole());
    }

    /// Random takes and gives: pieces never overlap, contents stay, the pool is whole at the end.
    #[test]
    fn random_traffic_never_overlaps_and_ends_whole() {
        let mut seed = 0x1234_5678_9abc_def1u64;
        let mut random = move |below: usize| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 33) as usize % below
        };
        let bytes = 100 * 1024 + 512;
        let mut pool = pool(bytes, 512, 16384);
        let total = pool.bytes();
        let mut held: Vec<(Buf, u8)> = Vec::new();
        for round in 0..20_000u32 {
            let mark = (round % 251) as u8;
            if random(5) < 3 {
                let most = 16384 >> random(6);
                if let Some(mut buf) = pool.take(1 + random(most)) {
                    buf.as_mut_slice().fill(mark);
                    held.push((buf, mark));
                }
            } else if !held.is_empty() {
                let (buf, mark) = held.swap_remove(random(held.len()));
                assert!(buf.as_slice().iter().all(|&byte| byte == mark), "content changed");
                pool.give(buf);
            }
            let out: usize = held.iter().map(|(buf, _)| buf.len()).sum();
            assert_eq!(pool.free_bytes(), total - out);
            if round % 64 == 0 {
                let mut spans: Vec<_> = held.iter().map(|(b, _)| (b.addr(), b.len())).collect();
                spans.sort_unstable();
                assert!(spans.windows(2).all(|w| w[0].0 + w[0].1 as u64 <= w[1].0), "overlap");
            }
        }
        held.drain(..).for_each(|(buf, _)| pool.give(buf));
        assert!(pool.is_whole());
        // All joined: the largest pieces can be had again.
        let big: Vec<Buf> = std::iter::from_fn(|| pool.take(16384)).collect();
        assert_eq!(big.len(), total / 16384);
        big.into_iter().for_each(|buf| pool.give(buf));
    }
}
