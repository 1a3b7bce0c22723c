//! The limits of a logical unit: one source for what is checked and what VPD page B0 says.
//!
//! Owns: the numbers. Never does: check; the commands do, against these.
//!
//! Invariant: the bytes of `transfer_blocks` fit a `u32`, and so does every `IoReq::len`.

use usurp_bdev::{Caps, Geometry};

/// Descriptors of one UNMAP. 255, so that the whole list fits a buffer of one page.
const UNMAP_DESCRIPTORS: u32 = 255;

/// Bytes of the longest UNMAP parameter list that is fetched.
pub const UNMAP_LIST_BYTES_MAX: u32 = 8 + 16 * UNMAP_DESCRIPTORS;

const _: () = assert!(UNMAP_LIST_BYTES_MAX <= 4096, "one page");

/// Bytes that one VERIFY reads at a time, or one block if that is more. Bounded well below a
/// transfer, because a VERIFY with data holds a second buffer meanwhile.
pub const VERIFY_PIECE_BYTES: u32 = 64 * 1024;

/// The most that one WRITE SAME covers. It runs as one bdev I/O: where the bdev has to be written
/// block by block, a longer one would outlast the initiator's 30 s timeout.
const WRITE_SAME_BYTES_NATIVE: u64 = 1 << 30;
const WRITE_SAME_BYTES_EMULATED: u64 = 64 << 20;

/// Limits of one logical unit; constant for its life.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// MAXIMUM TRANSFER LENGTH, blocks.
    pub transfer_blocks: u32,
    /// OPTIMAL TRANSFER LENGTH, blocks; 0 = none stated.
    pub optimal_blocks: u32,
    /// OPTIMAL TRANSFER LENGTH GRANULARITY, blocks: the physical block.
    pub granularity_blocks: u16,
    /// MAXIMUM UNMAP LBA COUNT; FFFFFFFFh = no limit, 0 = no UNMAP.
    pub unmap_blocks: u32,
    /// MAXIMUM UNMAP BLOCK DESCRIPTOR COUNT; 0 = no UNMAP.
    pub unmap_descriptors: u32,
    /// OPTIMAL UNMAP GRANULARITY, blocks; 0 = none stated.
    pub unmap_granularity_blocks: u32,
    /// MAXIMUM WRITE SAME LENGTH, blocks.
    pub write_same_blocks: u64,
    /// Blocks that one VERIFY reads at a time.
    pub verify_piece_blocks: u32,
}

impl Limits {
    pub(crate) fn new(geometry: &Geometry, caps: &Caps, transfer_blocks: u32) -> Limits {
        assert!(transfer_blocks > 0, "LuConfig::check: at least one block");
        let bytes = u64::from(transfer_blocks) * u64::from(geometry.block_size);
        assert!(bytes <= u64::from(u32::MAX), "LuConfig::check: a transfer's bytes fit a u32");
        let block_size = u64::from(geometry.block_size);
        let native = caps.write_zeroes || caps.unmap_zeroes;
        let write_same =
            if native { WRITE_SAME_BYTES_NATIVE } else { WRITE_SAME_BYTES_EMULATED } / block_size;
        Limits {
            transfer_blocks,
            optimal_blocks: geometry.optimal_io_blocks.min(transfer_blocks),
            granularity_blocks: 1u16.checked_shl(geometry.physical_block_exp.into()).unwrap_or(0),
            unmap_blocks: if caps.unmap { u32::MAX } else { 0 },
            unmap_descriptors: if caps.unmap { UNMAP_DESCRIPTORS } else { 0 },
            unmap_granularity_blocks: if caps.unmap {
                geometry.unmap_granularity_blocks
            } else {
                0
            },
            write_same_blocks: write_same.max(1),
            verify_piece_blocks: (VERIFY_PIECE_BYTES / geometry.block_size)
                .clamp(1, transfer_blocks),
        }
    }
}
