//! What a block device promises: addresses, geometry, capabilities, and the two traits.
//!
//! Owns: the types that modules and callers share. Never does: I/O. All byte arithmetic on block
//! addresses lives here ([`Geometry::bytes`], [`Geometry::contains`]), checked against overflow.

use std::fmt;
use std::sync::Arc;

use usurp_reactor::Nanos;
use usurp_reactor::mem::Arena;

use crate::io::{Completions, Io};

/// The smallest block size, in bytes.
pub const BLOCK_SIZE_MIN: u32 = 512;
/// The largest block size, in bytes.
pub const BLOCK_SIZE_MAX: u32 = 64 * 1024;

/// A logical block address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lba(pub u64);

/// A count of logical blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Blocks(pub u64);

impl fmt::Display for Lba {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LBA {}", self.0)
    }
}

impl fmt::Display for Blocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} blocks", self.0)
    }
}

/// Size and shape of a block device. Fixed for its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes in a logical block: a power of two, `BLOCK_SIZE_MIN..=BLOCK_SIZE_MAX`.
    pub block_size: u32,
    /// Logical blocks in the device; at least one, and `blocks * block_size` fits a `u64`.
    pub blocks: u64,
    /// Logical blocks in a physical block, as a power of two (READ CAPACITY(16)).
    pub physical_block_exp: u8,
    /// The preferred transfer, in logical blocks; 0 = none stated (Block Limits VPD page).
    pub optimal_io_blocks: u32,
    /// Whether the medium turns.
    pub rotational: bool,
    /// The unit in which an unmap frees space, in logical blocks; 0 = none stated.
    pub unmap_granularity_blocks: u32,
}

impl Geometry {
    /// A plain geometry: `blocks` of `block_size`, solid state, nothing preferred.
    pub const fn new(block_size: u32, blocks: u64) -> Geometry {
        Geometry {
            block_size,
            blocks,
            physical_block_exp: 0,
            optimal_io_blocks: 0,
            rotational: false,
            unmap_granularity_blocks: 0,
        }
    }

    /// Whether `[lba, lba + blocks)` lies inside the device, with no overflow. An empty range may
    /// start at the end (SBC-4 5.16: READ with length 0).
    pub const fn contains(&self, lba: Lba, blocks: u64) -> bool {
        lba.0 <= self.blocks && blocks <= self.blocks - lba.0
    }

    /// The bytes in `blocks`; `None` if that does not fit.
    pub const fn bytes(&self, blocks: u64) -> Option<u64> {
        blocks.checked_mul(self.block_size as u64)
    }

    /// The byte at which `lba` starts. `lba` is inside the device (see [`Geometry::contains`]).
    pub fn offset(&self, lba: Lba) -> u64 {
        assert!(lba.0 <= self.blocks, "an LBA that was not range checked");
        self.bytes(lba.0).expect("is_sane: the whole device fits a u64")
    }

    /// The device's size in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.bytes(self.blocks).expect("is_sane: the whole device fits a u64")
    }

    /// Whether the bounds that the fields state hold. Asserted of every bdev when it is opened.
    pub fn is_sane(&self) -> bool {
        self.block_size.is_power_of_two()
            && (BLOCK_SIZE_MIN..=BLOCK_SIZE_MAX).contains(&self.block_size)
            && self.blocks > 0
            && self.bytes(self.blocks).is_some_and(|bytes| bytes <= i64::MAX as u64)
            && self.physical_block_exp < 16
    }
}

/// What a module does itself. [`crate::emulate`] supplies the rest, so a module that states nothing
/// need only read and write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Caps {
    /// It has a volatile write cache (SCSI WCE), so `Op::Flush` does something.
    pub flush: bool,
    /// It honours `fua` in every writing operation that it does itself.
    pub fua: bool,
    /// It does `Op::Unmap`.
    pub unmap: bool,
    /// Every block of an unmapped range reads as zeros. Implies `unmap`.
    pub unmap_zeroes: bool,
    /// It does `Op::WriteZeroes`.
    pub write_zeroes: bool,
    /// It does `Op::WriteSame`.
    pub write_same: bool,
    /// It does `Op::CompareAndWrite`, atomically against all other I/O from all queues.
    pub compare_and_write: bool,
    /// Writing is refused.
    pub read_only: bool,
}

/// What a reactor brings when it asks for its queue.
#[derive(Clone)]
pub struct QueueSetup {
    /// The most I/Os that may be in flight; at least one.
    pub depth: u32,
    /// The reactor's data arena, whence most buffers come: register it as fixed buffers.
    pub data: Option<Arc<Arena>>,
    /// The reactor's core.
    pub core: usize,
}

/// A block device: the control plane's handle. Shared by all reactors.
pub trait Bdev: Send + Sync {
    /// The name given in the configuration; unique.
    fn name(&self) -> &str;
    /// The module's name, as in the configuration.
    fn module(&self) -> &'static str;
    /// Size and shape; never changes.
    fn geometry(&self) -> Geometry;
    /// What the module does itself; never changes.
    fn caps(&self) -> Caps;
    /// The arena whose memory [`Queue::lend`] lends, for registration with an RDMA device.
    fn lendable(&self) -> Option<&Arc<Arena>> {
        None
    }
    /// A queue for the calling thread, which alone will use it. Called once per reactor, on that
    /// reactor, before it serves; may block and allocate. Callers want
    /// [`crate::emulate::open`], which calls this.
    fn queue(&self, setup: &QueueSetup) -> Result<Box<dyn Queue>, BdevError>;
}

/// One reactor's handle of a block device. Never blocks, never allocates.
///
/// A module's queue is called by the front queue of [`crate::emulate`] only. So it may rely on: the
/// range lies inside the device; `blocks > 0` for all but `Flush` and `Reset`; `buf` holds what the
/// operation needs; no operation, and no `fua`, that its [`Caps`] do not claim (`Flush` only with
/// `caps.flush`; `Reset` always comes); no writing operation if it is read-only.
pub trait Queue {
    /// Takes an I/O. `Err` gives it back untouched: full right now, try again after a completion.
    /// Completes nothing by itself.
    fn submit(&mut self, io: Io) -> Result<(), Io>;
    /// Moves the work on and appends finished I/Os to `done` while there is room.
    fn poll(&mut self, now: Nanos, done: &mut Completions);
    /// The earliest time at which `poll` has something to do of its own accord.
    fn next_timer(&self) -> Option<Nanos> {
        None
    }
    /// I/Os submitted and not yet returned by `poll`. Must be 0 when the queue is dropped.
    fn in_flight(&self) -> u32;
    /// Memory that holds `[lba, lba + blocks)`, to be read (or written, if `for_write`) by RDMA in
    /// place. `None` = use a buffer and submit. The range is already checked.
    fn lend(&mut self, _lba: Lba, _blocks: u64, _for_write: bool) -> Option<Lent> {
        None
    }
}

/// Memory lent by [`Queue::lend`]; lies inside the [`Bdev::lendable`] arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lent {
    /// Address of the first byte.
    pub addr: u64,
    /// Bytes lent.
    pub len: u32,
}

/// Why a bdev could not be opened: enough for the configuration to point at the place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}{message}{}", prefix(.key), suffix(.hint))]
pub struct BdevError {
    /// Path of the key at fault below the bdev's entry, such as `uring.path`; empty = the entry.
    pub key: String,
    /// What is wrong.
    pub message: String,
    /// What would be right; may be empty.
    pub hint: String,
    /// Nothing is wrong with the entry: another process has what it names.
    pub busy: bool,
}

impl BdevError {
    /// An error at `key`.
    pub fn new(
        key: impl Into<String>,
        message: impl Into<String>,
        hint: impl Into<String>,
    ) -> BdevError {
        BdevError { key: key.into(), message: message.into(), hint: hint.into(), busy: false }
    }

    /// The same, because another process has it.
    #[must_use]
    pub fn busy(mut self) -> BdevError {
        self.busy = true;
        self
    }
}

fn prefix(key: &str) -> String {
    if key.is_empty() { String::new() } else { format!("{key}: ") }
}

fn suffix(hint: &str) -> String {
    if hint.is_empty() { String::new() } else { format!(" ({hint})") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_checked_without_overflow() {
        let g = Geometry::new(512, 100);
        assert!(g.contains(Lba(0), 100));
        assert!(g.contains(Lba(99), 1));
        assert!(g.contains(Lba(100), 0));
        assert!(!g.contains(Lba(101), 0));
        assert!(!g.contains(Lba(99), 2));
        assert!(!g.contains(Lba(1), u64::MAX));
        assert!(!g.contains(Lba(u64::MAX), 2));
        assert!(!g.contains(Lba(u64::MAX), u64::MAX));
    }

    #[test]
    fn bytes_that_do_not_fit_are_none() {
        let g = Geometry::new(4096, 1);
        assert_eq!(g.bytes(2), Some(8192));
        assert_eq!(g.bytes(u64::MAX / 4096 + 1), None);
    }

    #[test]
    fn insane_geometries_are_known() {
        assert!(Geometry::new(512, 1).is_sane());
        assert!(!Geometry::new(512, 0).is_sane());
        assert!(!Geometry::new(520, 8).is_sane());
        assert!(!Geometry::new(256, 8).is_sane());
        assert!(!Geometry::new(4096, u64::MAX / 4096).is_sane());
    }

    #[test]
    fn an_error_reads_as_key_message_hint() {
        let e = BdevError::new("uring.path", "no such file", "truncate -s 1G x");
        assert_eq!(e.to_string(), "uring.path: no such file (truncate -s 1G x)");
        assert_eq!(BdevError::new("", "bad", "").to_string(), "bad");
    }
}
