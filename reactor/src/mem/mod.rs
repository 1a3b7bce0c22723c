//! Memory: one big mapping per purpose, taken whole at start, and fixed pools cut from it.
//!
//! ```text
//!   Arena  (hugepages, or ordinary pages and the reason why)
//!   |------------------------------------------------------------------|
//!   | Slots: receive ring | Slots: send ring |  BufPool: data buffers   |
//!   |------------------------------------------------------------------|
//!      lend/take_back                          take -> Buf -> give
//! ```
//! Owns every `unsafe` that turns raw memory into slices. Never grows, never allocates from the
//! heap after `new`. Invariant that makes the safe API sound: a byte of an arena belongs to at most
//! one pool (claims, asserted), and inside a pool to at most one `Buf` or slot. A range that other
//! parties write (RDMA, a peer process) must not be read as a slice meanwhile; `Slots` refuses that
//! by its lent bits.

mod arena;
mod buf;
mod huge;
mod index_pool;
mod pool;
mod slots;

pub use arena::{Arena, Backing, HugePolicy, MemError};
pub use buf::Buf;
pub use huge::{HugePages, huge_pages};
pub use index_pool::IndexPool;
pub use pool::BufPool;
pub use slots::Slots;

/// Size of an ordinary page; every arena is at least this much aligned.
pub const PAGE: usize = 4096;

/// Ranges of an arena are claimed by pools in pieces of this many bytes (one cache line).
pub const CLAIM: usize = 64;

/// `value` rounded up to a multiple of `to`, a power of two.
pub(crate) const fn round_up(value: usize, to: usize) -> usize {
    assert!(to.is_power_of_two());
    match value.checked_add(to - 1) {
        Some(sum) => sum & !(to - 1),
        None => panic!("size overflows"),
    }
}
