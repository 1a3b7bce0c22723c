//! Where an initiator's data lie: slots of its memory, cut into pieces as the upper layers of a
//! real one would hand them down.
//!
//! ```text
//!   slot: | gap | piece | gap | piece | ... | descriptor table (at the end) |
//! ```

use usurp_srp::wire::desc::MemDesc;

use crate::net::{Access, HostMemory};
use crate::rng::Rng;

/// Bytes of a descriptor.
pub const DESC: usize = 16;
/// Pieces of a command at the most.
pub const PIECES_MAX: usize = 8;
/// Longest gap between pieces.
const GAP: u64 = 40;
/// What untouched memory holds.
pub const UNTOUCHED: u8 = 0xEE;

/// Slots of one host.
pub struct Slots {
    /// Bytes of a slot.
    size: usize,
    /// Free ones, by their first byte.
    free: Vec<usize>,
}

impl Slots {
    /// `count` slots for data of up to `data_max` bytes.
    pub fn new(count: usize, data_max: usize) -> Slots {
        let size = data_max + PIECES_MAX * (GAP as usize + DESC) + 64;
        Slots { size, free: (0..count).rev().map(|i| i * size).collect() }
    }

    /// Memory that `count` slots take.
    pub fn bytes(count: usize, data_max: usize) -> usize {
        count * Slots::new(0, data_max).size
    }

    /// A free slot.
    pub fn take(&mut self) -> Option<usize> {
        self.free.pop()
    }

    /// It is free again.
    pub fn give(&mut self, slot: usize) {
        assert!(!self.free.contains(&slot), "the harness frees a slot twice");
        self.free.push(slot);
    }

    fn table_at(&self, slot: usize) -> usize {
        slot + self.size - PIECES_MAX * DESC
    }
}

/// One command's data in memory.
#[derive(Clone, Debug, Default)]
pub struct Placed {
    /// The slot.
    pub slot: usize,
    /// Registrations, to be revoked.
    pub keys: Vec<u32>,
    /// Pieces: offset and length.
    pub pieces: Vec<(usize, usize)>,
    /// The same as descriptors.
    pub descs: Vec<MemDesc>,
    /// The table itself, if there is one in memory.
    pub table: Option<(u64, u32)>,
}

/// Whose and for what.
pub struct Purpose {
    /// The link that may use it.
    pub link: usize,
    /// The command.
    pub user: u64,
    /// What the target may do.
    pub access: Access,
}

impl Slots {
    /// Lays `len` bytes out in `slot`, in `cut.0` pieces, cut at multiples of `cut.1`.
    pub fn place(
        &self,
        slot: usize,
        len: usize,
        cut: (usize, usize),
        purpose: &Purpose,
        memory: &mut HostMemory,
        rng: &mut Rng,
    ) -> Placed {
        let (count, unit) = cut;
        assert!(count <= PIECES_MAX);
        let cut = |rng: &mut Rng| rng.index(len / unit + 1) * unit;
        let mut cuts: Vec<usize> = (1..count).map(|_| cut(rng)).collect();
        cuts.extend([0, len]);
        cuts.sort_unstable();
        let mut placed = Placed { slot, ..Placed::default() };
        let mut at = slot;
        for pair in cuts.windows(2) {
            at += rng.below(GAP) as usize;
            let len = pair[1] - pair[0];
            let key = memory.register(at, len, purpose.access, purpose.link, purpose.user);
            placed.keys.push(key);
            placed.pieces.push((at, len));
            placed.descs.push(MemDesc { va: memory.va(at), key, len: len as u32 });
            at += len;
        }
        placed
    }

    /// Puts the descriptor table into memory, where the target may read it.
    pub fn place_table(&self, placed: &mut Placed, purpose: &Purpose, memory: &mut HostMemory) {
        let at = self.table_at(placed.slot);
        for (i, desc) in placed.descs.iter().enumerate() {
            let to = &mut memory.bytes[at + i * DESC..at + (i + 1) * DESC];
            to[0..8].copy_from_slice(&desc.va.to_be_bytes());
            to[8..12].copy_from_slice(&desc.key.to_be_bytes());
            to[12..16].copy_from_slice(&desc.len.to_be_bytes());
        }
        let len = placed.descs.len() * DESC;
        let key = memory.register(at, len, Access::Read, purpose.link, purpose.user);
        placed.keys.push(key);
        placed.table = Some((memory.va(at), key));
    }
}

impl Placed {
    /// Writes `data` into the pieces.
    pub fn put(&self, memory: &mut HostMemory, mut data: &[u8]) {
        for (at, len) in &self.pieces {
            let (head, rest) = data.split_at(*len);
            memory.bytes[*at..at + len].copy_from_slice(head);
            data = rest;
        }
        assert!(data.is_empty());
    }

    /// Fills the pieces.
    pub fn wipe(&self, memory: &mut HostMemory) {
        for (at, len) in &self.pieces {
            memory.bytes[*at..at + len].fill(UNTOUCHED);
        }
    }

    /// What the pieces hold.
    pub fn get(&self, memory: &HostMemory) -> Vec<u8> {
        let pieces = self.pieces.iter();
        pieces.flat_map(|(at, len)| memory.bytes[*at..at + len].iter().copied()).collect()
    }
}
