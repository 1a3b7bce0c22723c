//! The machine's own copy: what a RAM disk can reach at the most, on the initiator's core.
//!
//! ```text
//!   hot   one block of the source to one of the destination, over and over
//!   cold  random blocks of 256 MiB to random blocks of another 256 MiB (both far beyond any cache)
//! ```
//! The memory is an arena, as the target's is: the same pages, huge or not. What cold copies cost
//! is nearly all memory; a target that copies from cold into an initiator's warm buffer may beat
//! them.

use std::sync::Arc;

use serde::Serialize;
use usurp_reactor::cpu::{Clock, pin_current};
use usurp_reactor::mem::{Arena, Backing, Buf, BufPool, HugePolicy};

use super::MatrixError;
use super::stats::Spread;
use crate::pattern::Rng;

/// Bytes of each side.
const SIDE: usize = 256 << 20;
/// Bytes of a piece, and of a large copy.
const PIECE: usize = 128 << 10;
/// Bytes of a small copy.
const BLOCK: usize = 4096;
/// Timed batches of one kind; the figure is their median.
const BATCHES: usize = 400;

/// Nanoseconds a copy.
#[derive(Copy, Clone, Debug, PartialEq, Serialize)]
pub struct Copies {
    /// 4 KiB, both in the cache.
    pub hot_4k_ns: f64,
    /// 4 KiB, neither in a cache.
    pub cold_4k_ns: f64,
    /// 128 KiB, neither in a cache.
    pub cold_128k_ns: f64,
}

/// The two memories; given back when it is dropped.
pub struct CopyBench {
    /// Where pieces go back to.
    pool: BufPool,
    /// Read from.
    from: Vec<Buf>,
    /// Written to.
    to: Vec<Buf>,
    /// Which block is next.
    rng: Rng,
}

impl CopyBench {
    /// Takes and touches the memory.
    pub fn new() -> Result<CopyBench, MatrixError> {
        let arena = Arena::new("memcpy", 2 * SIDE, HugePolicy::Prefer);
        let arena = arena.map_err(|e| MatrixError::Machine(format!("memory for memcpy: {e}")))?;
        Ok(CopyBench::over(arena))
    }

    fn over(arena: Arc<Arena>) -> CopyBench {
        let bytes = arena.len();
        let mut pool = BufPool::new(arena, 0, bytes, PIECE, PIECE);
        let mut from: Vec<Buf> = std::iter::from_fn(|| pool.take(PIECE)).collect();
        // Zeros may share a page; data does not.
        for buf in &mut from {
            buf.as_mut_slice().fill(0x5a);
        }
        let to = from.split_off(from.len() / 2);
        CopyBench { pool, from, to, rng: Rng::new(1) }
    }

    /// What the memory is made of.
    pub fn backing(&self) -> &Backing {
        self.pool.arena().backing()
    }

    /// Measures on `core`, in a thread of its own: about 100 ms.
    pub fn measure(&mut self, core: usize) -> Result<Copies, MatrixError> {
        let measured = std::thread::scope(|threads| {
            let run = || pin_current(core).map(|()| self.copies());
            threads.spawn(run).join().expect("copying does not panic")
        });
        measured.map_err(|e| MatrixError::Machine(e.to_string()))
    }

    fn copies(&mut self) -> Copies {
        self.touch();
        Copies {
            hot_4k_ns: self.hot(64),
            cold_4k_ns: self.cold(BLOCK, 16),
            cold_128k_ns: self.cold(PIECE, 1),
        }
    }

    /// Once over all of it. What lay idle for a while costs extra at the first touch in a virtual
    /// machine (measured here: up to ten times), and that is not what a copy costs.
    fn touch(&mut self) {
        for (from, to) in self.from.iter().zip(&mut self.to) {
            to.as_mut_slice().copy_from_slice(from.as_slice());
        }
    }

    fn hot(&mut self, batch: usize) -> f64 {
        let (from, to) = (&self.from[0].as_slice()[..BLOCK], &mut self.to[0]);
        batches(batch, || {
            let to = std::hint::black_box(&mut to.as_mut_slice()[..BLOCK]);
            to.copy_from_slice(std::hint::black_box(from));
        })
    }

    fn cold(&mut self, bytes: usize, batch: usize) -> f64 {
        let CopyBench { from, to, rng, .. } = self;
        let blocks = from.len().min(to.len()) * PIECE / bytes;
        let mut place = || {
            let byte = rng.below(blocks as u64) as usize * bytes;
            (byte / PIECE, byte % PIECE)
        };
        batches(batch, || {
            let ((piece, at), (piece_to, at_to)) = (place(), place());
            let from = &from[piece].as_slice()[at..at + bytes];
            let to = &mut to[piece_to].as_mut_slice()[at_to..at_to + bytes];
            std::hint::black_box(to).copy_from_slice(std::hint::black_box(from));
        })
    }
}

impl Drop for CopyBench {
    fn drop(&mut self) {
        for buf in self.from.drain(..).chain(self.to.drain(..)) {
            self.pool.give(buf);
        }
    }
}

/// Median over batches of the mean time of one call.
fn batches(batch: usize, mut call: impl FnMut()) -> f64 {
    let clock = Clock::new();
    let times = (0..BATCHES).map(|_| {
        let begun = clock.now();
        for _ in 0..batch {
            call();
        }
        (clock.now() - begun) as f64 / batch as f64
    });
    Spread::of(times).expect("there are batches").median
}

#[cfg(test)]
mod tests {
    use super::*;
    use usurp_reactor::cpu::{CoreSpec, resolve};

    #[test]
    fn copies_take_time_and_the_memory_goes_back() {
        let core = resolve(&CoreSpec::Auto).unwrap()[0];
        let arena = Arena::new("memcpy", 4 << 20, HugePolicy::Never).unwrap();
        let mut bench = CopyBench::over(arena);
        assert_eq!((bench.from.len(), bench.to.len()), (16, 16));
        let copies = bench.measure(core).unwrap();
        assert!(copies.hot_4k_ns > 1.0 && copies.cold_4k_ns > 1.0, "{copies:?}");
        assert!(copies.cold_128k_ns > copies.hot_4k_ns, "{copies:?}");
        assert!(bench.measure(1023).is_err());
    }
}
