//! One I/O and its completion.
//!
//! Owns: [`Io`], which must be completed; [`Done`]; the fixed list of completions.
//! Never does: anything to the buffer but carry it.
//!
//! ```text
//!  Io::new --> submit --> (module) --> Io::complete --> Done --> Completions::pop
//!                 \--Err(io): full, same Io back            drop of an Io = a lost I/O = panic
//! ```

use std::fmt;
use std::mem;
use std::thread;

use usurp_reactor::mem::Buf;

use crate::contract::Lba;

/// What is to be done to the blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Blocks into the buffer.
    Read,
    /// The buffer onto the blocks.
    Write {
        /// Forced unit access: on stable storage before it completes.
        fua: bool,
    },
    /// All writes that completed before this was submitted, from any queue, onto stable storage.
    Flush,
    /// The blocks are no longer wanted.
    Unmap,
    /// Zeros onto the blocks.
    WriteZeroes {
        /// The space may be freed, so long as the blocks then read as zeros.
        unmap: bool,
        /// As in `Write`.
        fua: bool,
    },
    /// The buffer's first block onto every block.
    WriteSame {
        /// As in `Write`.
        fua: bool,
    },
    /// If the blocks equal the buffer's first half, its second half onto the blocks.
    CompareAndWrite {
        /// As in `Write`.
        fua: bool,
    },
    /// Completes after all I/O submitted before it on this queue. That I/O is hurried on, or
    /// completes with `Aborted` if it has not begun.
    Reset,
}

impl Op {
    /// Whether the medium may change.
    pub const fn is_write(self) -> bool {
        match self {
            Op::Write { .. }
            | Op::Unmap
            | Op::WriteZeroes { .. }
            | Op::WriteSame { .. }
            | Op::CompareAndWrite { .. } => true,
            Op::Read | Op::Flush | Op::Reset => false,
        }
    }

    /// Whether it addresses blocks.
    pub const fn has_range(self) -> bool {
        !matches!(self, Op::Flush | Op::Reset)
    }

    /// Whether it must be on stable storage when it completes.
    pub const fn fua(self) -> bool {
        match self {
            Op::Write { fua }
            | Op::WriteZeroes { fua, .. }
            | Op::WriteSame { fua }
            | Op::CompareAndWrite { fua } => fua,
            Op::Read | Op::Flush | Op::Unmap | Op::Reset => false,
        }
    }

    /// The same operation without `fua`.
    pub const fn without_fua(self) -> Op {
        match self {
            Op::Write { .. } => Op::Write { fua: false },
            Op::WriteZeroes { unmap, .. } => Op::WriteZeroes { unmap, fua: false },
            Op::WriteSame { .. } => Op::WriteSame { fua: false },
            Op::CompareAndWrite { .. } => Op::CompareAndWrite { fua: false },
            other => other,
        }
    }

    /// Bytes that the buffer must hold for `blocks` of `block_size`. `None` = does not fit.
    pub fn buffer_bytes(self, blocks: u64, block_size: u32) -> Option<u64> {
        let size = u64::from(block_size);
        match self {
            Op::Read | Op::Write { .. } => blocks.checked_mul(size),
            Op::WriteSame { .. } => Some(size),
            Op::CompareAndWrite { .. } => blocks.checked_mul(size)?.checked_mul(2),
            Op::Flush | Op::Unmap | Op::WriteZeroes { .. } | Op::Reset => Some(0),
        }
    }
}

/// How an I/O ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Done.
    Ok,
    /// The medium failed.
    Medium,
    /// The range is not inside the device; nothing was changed.
    OutOfRange,
    /// A thinly provisioned device is full.
    NoSpace,
    /// The module can't do this.
    NotSupported,
    /// COMPARE AND WRITE found a difference; nothing was written.
    Miscompare {
        /// The first byte that differs, counted from the start of the compared data.
        offset: u32,
    },
    /// The device is read-only; nothing was changed.
    ReadOnly,
    /// The transport or the operating system failed.
    Io,
    /// Given up because of a reset.
    Aborted,
    /// Out of some resource; may work later.
    Busy,
}

/// An I/O in flight. It moves into `submit` and comes back as [`Done`]. Dropping one panics in all
/// builds, unless the thread is panicking already: it would be a command without an answer.
#[must_use = "an Io has to be submitted or completed"]
pub struct Io {
    /// What to do.
    pub op: Op,
    /// First block; ignored by `Flush` and `Reset`.
    pub lba: Lba,
    /// Number of blocks; ignored by `Flush` and `Reset`.
    pub blocks: u64,
    /// The data; may be longer than needed. See [`Op::buffer_bytes`].
    pub buf: Buf,
    /// The caller's; comes back in `Done` as it is.
    pub token: u64,
}

impl Io {
    /// An I/O that has to be completed from now on.
    pub fn new(op: Op, lba: Lba, blocks: u64, buf: Buf, token: u64) -> Io {
        Io { op, lba, blocks, buf, token }
    }

    /// The only way to end an I/O.
    pub fn complete(mut self, status: Status) -> Done {
        let done = Done { token: self.token, status, buf: self.buf.take() };
        // Not a leak: the buffer, the only field that owns anything, was just taken.
        mem::forget(self);
        done
    }
}

impl Drop for Io {
    fn drop(&mut self) {
        if !thread::panicking() {
            panic!("lost I/O: {self:?} was dropped without a completion");
        }
    }
}

impl fmt::Debug for Io {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} at {} +{} token {:#x}", self.op, self.lba, self.blocks, self.token)
    }
}

/// A finished I/O. The buffer moves back to its owner.
#[must_use = "a Done carries the buffer back"]
pub struct Done {
    /// The token of the `Io`.
    pub token: u64,
    /// How it ended.
    pub status: Status,
    /// The buffer of the `Io`.
    pub buf: Buf,
}

impl fmt::Debug for Done {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "token {:#x}: {:?}", self.token, self.status)
    }
}

/// The most completions that one `poll` may append: bounds the work of a turn.
pub const COMPLETIONS_MAX: usize = 32;

/// A list of completions of fixed capacity, first in first out.
pub struct Completions {
    /// A ring; `Some` exactly in the `len` places from `head`.
    ring: [Option<Done>; COMPLETIONS_MAX],
    /// Place of the oldest; below `COMPLETIONS_MAX`.
    head: usize,
    /// Completions held; at most `COMPLETIONS_MAX`.
    len: usize,
}

impl Completions {
    /// An empty list.
    pub fn new() -> Completions {
        Completions { ring: [const { None }; COMPLETIONS_MAX], head: 0, len: 0 }
    }

    /// Appends a completion. The list must not be full.
    pub fn push(&mut self, done: Done) {
        assert!(self.len < COMPLETIONS_MAX, "completion list overrun");
        let at = (self.head + self.len) % COMPLETIONS_MAX;
        let old = self.ring[at].replace(done);
        assert!(old.is_none(), "a completion was overwritten");
        self.len += 1;
    }

    /// Takes the oldest completion.
    pub fn pop(&mut self) -> Option<Done> {
        let done = self.ring[self.head].take()?;
        assert!(self.len > 0, "a completion beyond the list's end");
        self.head = (self.head + 1) % COMPLETIONS_MAX;
        self.len -= 1;
        Some(done)
    }

    /// Whether no more fits.
    pub fn is_full(&self) -> bool {
        self.len == COMPLETIONS_MAX
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Completions held.
    pub fn len(&self) -> usize {
        self.len
    }

    /// How many more fit.
    pub fn room(&self) -> usize {
        COMPLETIONS_MAX - self.len
    }
}

impl Default for Completions {
    fn default() -> Completions {
        Completions::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn io(token: u64) -> Io {
        Io::new(Op::Flush, Lba(0), 0, Buf::none(), token)
    }

    #[test]
    #[should_panic(expected = "lost I/O")]
    fn a_dropped_io_panics() {
        drop(io(7));
    }

    #[test]
    fn a_completed_io_does_not_panic() {
        let done = io(7).complete(Status::Medium);
        assert_eq!((done.token, done.status), (7, Status::Medium));
    }

    #[test]
    fn completions_are_first_in_first_out_round_the_ring() {
        let mut list = Completions::new();
        let (mut pushed, mut popped) = (0u64, 0u64);
        for round in 0..50 {
            for _ in 0..(round % COMPLETIONS_MAX) {
                list.push(io(pushed).complete(Status::Ok));
                pushed += 1;
            }
            while let Some(done) = list.pop() {
                assert_eq!(done.token, popped);
                popped += 1;
            }
        }
        assert_eq!(pushed, popped);
        assert!(list.is_empty());
    }

    #[test]
    #[should_panic(expected = "overrun")]
    fn a_full_list_refuses_by_panic() {
        let mut list = Completions::new();
        for n in 0..=COMPLETIONS_MAX {
            list.push(io(n as u64).complete(Status::Ok));
        }
    }

    #[test]
    fn buffer_bytes_per_operation() {
        assert_eq!(Op::Read.buffer_bytes(3, 512), Some(1536));
        assert_eq!(Op::WriteSame { fua: false }.buffer_bytes(3, 512), Some(512));
        assert_eq!(Op::CompareAndWrite { fua: true }.buffer_bytes(3, 512), Some(3072));
        assert_eq!(Op::Unmap.buffer_bytes(u64::MAX, 512), Some(0));
        assert_eq!(Op::Read.buffer_bytes(u64::MAX, 512), None);
    }
}
