//! # malloc: a RAM disk
//!
//! One arena holds the data; all queues work on it. It lends its memory, so the target reads and
//! writes it by RDMA in place. Contents start as zeros and are lost with the process.
//!
//! ```yaml
//! - { name: ram0, malloc: { size: 1GiB, block_size: 512, hugepages: prefer } }
//! ```
//!
//! | key | default | meaning |
//! |---|---|---|
//! | `size` | required | bytes; a multiple of `block_size` |
//! | `block_size` | 512 | bytes in a logical block, a power of two from 512 to 65536 |
//! | `hugepages` | prefer | `require`, `prefer` (fall back to ordinary pages) or `never` |
//!
//! Limits: unmapping zeroes the blocks but gives no memory back. COMPARE AND WRITE is not claimed:
//! nothing orders it against another reactor's write, or an RDMA write in place.
//!
//! ```text
//!  fifo: [ head | ... ]  poll works on the head only, for POLL_BYTES_MAX in all; what is left of
//!           ^ at          a long fill goes on in the next poll
//! ```

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

/// This module's line in the table of modules.
pub const MODULE: Module = Module { name: "malloc", example: EXAMPLE, check, open };

const EXAMPLE: &str = "malloc: { size: 1GiB, block_size: 512 }";

/// Bytes that one poll may touch, so that a long fill does not stall the reactor.
const POLL_BYTES_MAX: u64 = 2 << 20;

/// The YAML keys.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Options {
    size: ByteSize,
    #[serde(default = "block_size_default")]
    block_size: u32,
    #[serde(default)]
    hugepages: Hugepages,
}

fn block_size_default() -> u32 {
    512
}

/// The YAML form of [`HugePolicy`].
#[derive(Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Hugepages {
    Require,
    #[default]
    Prefer,
    Never,
}

fn read(options: &Value) -> Result<(Options, Geometry), BdevError> {
    let options: Options = options::parse("malloc", options, EXAMPLE)?;
    options::check_block_size("malloc.block_size", options.block_size)?;
    let blocks = options::blocks_of("malloc.size", options.size.0, options.block_size)?;
    let geometry = Geometry::new(options.block_size, blocks);
    Ok((options, geometry))
}

fn check(options: &Value) -> Result<Option<String>, BdevError> {
    read(options).map(|_| None)
}

fn open(
    name: &str,
    options: &Value,
    _context: &mut OpenContext<'_>,
) -> Result<Arc<dyn Bdev>, BdevError> {
    let (options, geometry) = read(options)?;
    let policy = match options.hugepages {
        Hugepages::Require => HugePolicy::Require,
        Hugepages::Prefer => HugePolicy::Prefer,
        Hugepages::Never => HugePolicy::Never,
    };
    let bytes = options
        .size
        .to_usize()
        .ok_or_else(|| BdevError::new("malloc.size", "more than this machine can address", ""))?;
    let memory = Arena::new(name, bytes, policy)
        .map_err(|e| BdevError::new("malloc.size", e.to_string(), ""))?;
    tracing::info!(bdev = name, size = %options.size, backing = ?memory.backing(), "malloc opened");
    Ok(Arc::new(Malloc { name: name.to_string(), geometry, memory }))
}

/// The control plane's handle.
struct Malloc {
    /// The configured name.
    name: String,
    /// The configured size.
    geometry: Geometry,
    /// The data; byte x of the device is byte x of the arena.
    memory: Arc<Arena>,
}

impl Bdev for Malloc {
    fn name(&self) -> &str {
        &self.name
    }

    fn module(&self) -> &'static str {
        "malloc"
    }

    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn caps(&self) -> Caps {
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
        Ok(Box::new(MallocQueue {
            depth: setup.depth as usize,
            geometry: self.geometry,
            memory: self.memory.clone(),
            fifo: VecDeque::with_capacity(setup.depth as usize),
            at: 0,
        }))
    }
}

/// One reactor's handle.
struct MallocQueue {
    /// The most I/Os in `fifo`.
    depth: usize,
    /// The bdev's.
    geometry: Geometry,
    /// The bdev's; shared by all queues, whose overlapping writes may mix, as SBC allows.
    memory: Arc<Arena>,
    /// I/Os in order of submission. Its capacity is `depth`: it never grows.
    fifo: VecDeque<Io>,
    /// Blocks of the head that are done; 0 when a new head comes up.
    at: u64,
}

impl MallocQueue {
    /// Works on the head for at most `budget` bytes. Gives the bytes left of the budget.
    fn advance(&mut self, budget: u64) -> u64 {
        let io = self.fifo.front_mut().expect("poll saw a head");
        let block_size = u64::from(self.geometry.block_size);
        // At least a block, or a small budget would never end.
        let most = (budget / block_size).max(1);
        let start = self.geometry.offset(Lba(io.lba.0 + self.at)) as usize;
        let blocks = match io.op {
            // These are as long as a buffer at most, which bounds them.
            Op::Read | Op::Write { .. } => io.blocks,
            Op::Flush | Op::Reset => 0,
            _ => (io.blocks - self.at).min(most),
        };
        let len = (blocks * block_size) as usize;
        match io.op {
            Op::Read => self.memory.copy_out(start, &mut io.buf.as_mut_slice()[..len]),
            Op::Write { .. } => self.memory.copy_in(start, &io.buf.as_slice()[..len]),
            Op::Unmap | Op::WriteZeroes { .. } => self.memory.fill(start, len, 0),
            Op::WriteSame { .. } => {
                let block = &io.buf.as_slice()[..block_size as usize];
                for offset in (0..len).step_by(block_size as usize) {
                    self.memory.copy_in(start + offset, block);
                }
            }
            Op::Flush | Op::Reset => {}
            Op::CompareAndWrite { .. } => unreachable!("not claimed in caps"),
        }
        self.at += blocks;
        budget.saturating_sub(len as u64)
    }

    /// Whether the head is done.
    fn is_head_done(&self) -> bool {
        self.fifo.front().is_some_and(|io| !io.op.has_range() || self.at == io.blocks)
    }
}

impl Queue for MallocQueue {
    fn submit(&mut self, io: Io) -> Result<(), Io> {
        if self.fifo.len() == self.depth {
            return Err(io);
        }
        self.fifo.push_back(io);
        Ok(())
    }

    fn poll(&mut self, _now: Nanos, done: &mut Completions) {
        let mut budget = POLL_BYTES_MAX;
        while budget > 0 && !self.fifo.is_empty() && !done.is_full() {
            budget = self.advance(budget);
            if !self.is_head_done() {
                continue;
            }
            let io = self.fifo.pop_front().expect("the head is done");
            self.at = 0;
            done.push(io.complete(Status::Ok));
        }
    }

    fn in_flight(&self) -> u32 {
        self.fifo.len() as u32
    }

    fn lend(&mut self, lba: Lba, blocks: u64, _for_write: bool) -> Option<Lent> {
        let len = u32::try_from(self.geometry.bytes(blocks)?).ok()?;
        Some(Lent { addr: self.memory.addr() + self.geometry.offset(lba), len })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::open_one;
    use usurp_reactor::mem::Buf;

    #[test]
    fn options_are_refused_by_key() {
        for (entry, key) in [
            ("{ name: m, malloc: }", "malloc"),
            ("{ name: m, malloc: { size: 1000 } }", "malloc.size"),
            ("{ name: m, malloc: { size: 0 } }", "malloc.size"),
            ("{ name: m, malloc: { size: 1MB } }", "malloc.size"),
            ("{ name: m, malloc: { size: 1MiB, block_size: 1000 } }", "malloc.block_size"),
            ("{ name: m, malloc: { size: 1MiB, hugepages: some } }", "malloc.hugepages"),
            ("{ name: m, malloc: { size: 1MiB, sizes: 1 } }", "malloc.sizes"),
        ] {
            assert_eq!(open_one(entry).err().unwrap().key, key, "{entry}");
        }
    }

    #[test]
    fn a_long_fill_takes_several_polls() {
        let bdev = open_one("{ name: m, malloc: { size: 16MiB, hugepages: never } }").unwrap();
        let mut queue = bdev.queue(&QueueSetup { depth: 2, data: None, core: 0 }).unwrap();
        let op = Op::WriteZeroes { unmap: false, fua: false };
        queue.submit(Io::new(op, Lba(0), 32768, Buf::none(), 1)).unwrap();
        let mut done = Completions::new();
        for _ in 0..7 {
            queue.poll(0, &mut done);
            assert!(done.is_empty());
        }
        queue.poll(0, &mut done);
        assert_eq!(done.pop().unwrap().status, Status::Ok);
    }

    #[test]
    fn lent_memory_is_the_data() {
        let bdev = open_one("{ name: m, malloc: { size: 1MiB, block_size: 4096 } }").unwrap();
        let mut queue = bdev.queue(&QueueSetup { depth: 2, data: None, core: 0 }).unwrap();
        let lent = queue.lend(Lba(3), 2, true).unwrap();
        assert_eq!(lent, Lent { addr: bdev.lendable().unwrap().addr() + 12288, len: 8192 });
    }

    #[cfg(feature = "test-utils")]
    #[test]
    fn conformance() {
        use crate::conformance::run;
        run(open_one("{ name: m, malloc: { size: 4MiB, hugepages: never } }").unwrap());
        let entry = "{ name: m, malloc: { size: 4MiB, block_size: 4096, hugepages: never } }";
        run(open_one(entry).unwrap());
    }
}
