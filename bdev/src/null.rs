//! # null: takes everything, keeps nothing
//!
//! Reads give zeros, writes are dropped, every I/O completes at the next poll. For measuring all
//! that is not the block device, and **as the file to copy for a new module**: see `docs/bdev.md`.
//!
//! ```yaml
//! - { name: null0, null: { size: 1TiB, block_size: 512 } }
//! ```
//!
//! | key | default | meaning |
//! |---|---|---|
//! | `size` | 1TiB | the size it pretends to have; a multiple of `block_size` |
//! | `block_size` | 512 | bytes in a logical block, a power of two from 512 to 65536 |
//!
//! Limits: COMPARE AND WRITE is left to the core. It lends memory for transfers up to 8 MiB, from
//! one arena of 16 MiB: zeros to read from, then scratch to write to, the same for every LBA.

use std::collections::VecDeque;
use std::sync::Arc;

use serde::Deserialize;
use serde_yaml::Value;
use usurp_reactor::Nanos;
use usurp_reactor::mem::{Arena, HugePolicy};

use crate::contract::{Bdev, BdevError, Caps, Geometry, Lba, Lent, Queue, QueueSetup};
use crate::io::{Completions, Io, Op, Status};
use crate::options;
use crate::registry::{Module, OpenContext};
use crate::size::ByteSize;

/// This module's line in the table of modules (`registry.rs`).
pub const MODULE: Module = Module { name: "null", example: EXAMPLE, check, open };

const EXAMPLE: &str = "null: { size: 1TiB, block_size: 512 }";

/// The longest transfer that is lent, in bytes.
const LEND_BYTES_MAX: usize = 8 << 20;

/// The YAML keys. serde refuses any other.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Options {
    size: ByteSize,
    block_size: u32,
}

impl Default for Options {
    fn default() -> Options {
        Options { size: ByteSize(1 << 40), block_size: 512 }
    }
}

/// Reads the options and says what they make, without making it (`usurp check`).
fn geometry(options: &Value) -> Result<Geometry, BdevError> {
    let options: Options = options::parse("null", options, EXAMPLE)?;
    options::check_block_size("null.block_size", options.block_size)?;
    let blocks = options::blocks_of("null.size", options.size.0, options.block_size)?;
    Ok(Geometry::new(options.block_size, blocks))
}

/// Checks the options; a filter would give the name of its base.
fn check(options: &Value) -> Result<Option<String>, BdevError> {
    geometry(options).map(|_| None)
}

/// Opens the bdev. May block and allocate.
fn open(
    name: &str,
    options: &Value,
    _context: &mut OpenContext<'_>,
) -> Result<Arc<dyn Bdev>, BdevError> {
    let geometry = geometry(options)?;
    let memory = Arena::new(name, 2 * LEND_BYTES_MAX, HugePolicy::Never)
        .map_err(|e| BdevError::new("null", e.to_string(), ""))?;
    Ok(Arc::new(Null { name: name.to_string(), geometry, memory }))
}

/// The control plane's handle.
struct Null {
    /// The configured name.
    name: String,
    /// The configured size.
    geometry: Geometry,
    /// What is lent: `LEND_BYTES_MAX` of zeros, never written, then as much scratch, never read.
    memory: Arc<Arena>,
}

impl Bdev for Null {
    fn name(&self) -> &str {
        &self.name
    }

    fn module(&self) -> &'static str {
        "null"
    }

    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn caps(&self) -> Caps {
        // Whatever is not claimed here never reaches the queue: the core does it by other means.
        Caps {
            flush: false,
            fua: true,
            unmap: true,
            unmap_zeroes: true,
            write_zeroes: true,
            write_same: true,
            compare_and_write: false,
            read_only: false,
        }
    }

    fn lendable(&self) -> Option<&Arc<Arena>> {
        Some(&self.memory)
    }

    fn queue(&self, setup: &QueueSetup) -> Result<Box<dyn Queue>, BdevError> {
        let depth = setup.depth as usize;
        Ok(Box::new(NullQueue {
            depth,
            block_size: self.geometry.block_size as usize,
            memory: self.memory.clone(),
            pending: VecDeque::with_capacity(depth),
        }))
    }
}

/// One reactor's handle. All of it belongs to that reactor.
struct NullQueue {
    /// The most I/Os in `pending`.
    depth: usize,
    /// Bytes in a block.
    block_size: usize,
    /// The bdev's memory, for lending.
    memory: Arc<Arena>,
    /// I/Os taken and not completed, oldest first. Its capacity is `depth`: it never grows.
    pending: VecDeque<Io>,
}

impl Queue for NullQueue {
    fn submit(&mut self, io: Io) -> Result<(), Io> {
        if self.pending.len() == self.depth {
            return Err(io);
        }
        self.pending.push_back(io);
        Ok(())
    }

    fn poll(&mut self, _now: Nanos, done: &mut Completions) {
        while !done.is_full() {
            let Some(mut io) = self.pending.pop_front() else { return };
            if io.op == Op::Read {
                // The range was checked by the core, which also made sure that the buffer is
                // long enough; it may be longer.
                let bytes = io.blocks as usize * self.block_size;
                io.buf.as_mut_slice()[..bytes].fill(0);
            }
            done.push(io.complete(Status::Ok));
        }
    }

    fn in_flight(&self) -> u32 {
        self.pending.len() as u32
    }

    fn lend(&mut self, _lba: Lba, blocks: u64, for_write: bool) -> Option<Lent> {
        let limit = (LEND_BYTES_MAX / self.block_size) as u64;
        if blocks > limit {
            return None;
        }
        let scratch = if for_write { LEND_BYTES_MAX as u64 } else { 0 };
        let len = blocks as u32 * self.block_size as u32;
        Some(Lent { addr: self.memory.addr() + scratch, len })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::open_one;

    #[test]
    fn memory_is_lent_up_to_the_limit_and_reads_apart_from_writes() {
        let bdev = open_one("{ name: n, null: { size: 1GiB } }").unwrap();
        let setup = QueueSetup { depth: 4, data: None, core: 0 };
        let mut queue = bdev.queue(&setup).unwrap();
        let arena = bdev.lendable().unwrap();
        let read = queue.lend(Lba(5), 16384, false).unwrap();
        let write = queue.lend(Lba(5), 16384, true).unwrap();
        assert_eq!((read.addr, read.len), (arena.addr(), 8 << 20));
        assert_eq!((write.addr, write.len), (arena.addr() + (8 << 20), 8 << 20));
        assert_eq!(write.addr + u64::from(write.len), arena.addr() + arena.len() as u64);
        assert_eq!(queue.lend(Lba(0), 16385, false), None);
        assert_eq!(queue.lend(Lba(0), u64::MAX, true), None);
    }

    #[test]
    fn options_are_refused_by_key() {
        for (entry, key) in [
            ("{ name: n, null: { size: 1000 } }", "null.size"),
            ("{ name: n, null: { block_size: 520 } }", "null.block_size"),
            ("{ name: n, null: { blocksize: 512 } }", "null.blocksize"),
        ] {
            assert_eq!(open_one(entry).err().unwrap().key, key);
        }
    }

    #[cfg(feature = "test-utils")]
    #[test]
    fn conformance() {
        use crate::conformance::{Expect, run_with};
        let bdev = open_one("{ name: n, null: }").unwrap();
        run_with(bdev, Expect { keeps_data: false });
    }
}
