//! WRITE SAME (10), (16) (SBC-3).
//!
//! Owns: the choice of the bdev's operation. Never does: ANCHOR, PBDATA, LBDATA; the table of
//! opcodes refuses those bits.
//!
//! ```text
//!   NDOB ------------------------------------------------> WriteZeroes{unmap: UNMAP}
//!   block fetched:  all zeros ---------------------------> WriteZeroes{unmap: UNMAP}
//!                   anything else (UNMAP or not) --------> WriteSame, with the block held
//! ```
//!
//! Invariants: S of data-out is one block, whatever the range (reference 8.4). Blocks with other
//! contents than zeros are never unmapped: they would not read back (SBC-3, WRITE SAME and
//! unmap operations).

use usurp_bdev::{Lba, Op};

use crate::cdb::Range;
use crate::lu::{Call, Lu};
use crate::sense::Sense;
use crate::step::{Dir, IoReq, Step};
use crate::task::{Plan, Task};

const UNMAP: u8 = 0x08;
const NDOB: u8 = 0x01;

pub(crate) fn write_same_10(lu: &mut Lu, call: &mut Call<'_>) -> Step {
    let range = call.cdb.range_10();
    write_same(lu, call, range, false)
}

pub(crate) fn write_same_16(lu: &mut Lu, call: &mut Call<'_>) -> Step {
    let range = call.cdb.range_16();
    let no_data = call.cdb.byte(1) & NDOB != 0;
    write_same(lu, call, range, no_data)
}

fn write_same(lu: &Lu, call: &mut Call<'_>, range: Range, no_data: bool) -> Step {
    let task = &mut *call.task;
    let unmap = call.cdb.byte(1) & UNMAP != 0;
    let needed = if no_data { 0 } else { lu.geometry.block_size };
    if let Err(sense) = check(lu, task, range, unmap, needed) {
        return task.check(sense);
    }
    task.wants_out = u64::from(needed);
    task.writes = true;
    task.lba = range.lba;
    task.blocks = range.blocks;
    task.mode = u8::from(unmap);
    if no_data {
        return write_zeroes(task);
    }
    task.plan = Plan::FetchBlock;
    Step::FetchData { len: needed }
}

fn check(lu: &Lu, task: &Task, range: Range, unmap: bool, needed: u32) -> Result<(), Sense> {
    if unmap && !lu.caps.unmap {
        return Err(Sense::cdb_field(1).at_bit(3));
    }
    lu.check_range(range)?;
    // WSNZ in page B0: 0 blocks would mean all the rest of the medium.
    if range.blocks == 0 || range.blocks > lu.limits.write_same_blocks {
        return Err(Sense::cdb_field(range.length_at));
    }
    lu.check_writable()?;
    Lu::check_data_out(task, needed)
}

fn write_zeroes(task: &mut Task) -> Step {
    let unmap = task.mode != 0;
    task.plan = Plan::Single;
    Step::Io(IoReq::bare(Op::WriteZeroes { unmap, fua: false }, task.lba, task.blocks))
}

/// The block has arrived.
pub(crate) fn on_data(lu: &Lu, task: &mut Task, data: &[u8]) -> Step {
    let len = lu.geometry.block_size;
    assert!(data.len() >= len as usize, "the caller brings what FetchData asked for");
    if data[..len as usize].iter().all(|byte| *byte == 0) {
        return write_zeroes(task);
    }
    task.plan = Plan::Single;
    let (lba, blocks) = (Lba(task.lba), task.blocks);
    Step::Io(IoReq { op: Op::WriteSame { fua: false }, lba, blocks, dir: Dir::None, len })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::step::Reply;
    use crate::testing::{Bench, lu, plain};

    fn ten(flags: u8, lba: u16, blocks: u16) -> [u8; 10] {
        let ([a, b], [c, d]) = (lba.to_be_bytes(), blocks.to_be_bytes());
        [0x41, flags, 0, 0, a, b, 0, c, d, 0]
    }

    fn sixteen(flags: u8, lba: u16, blocks: u32) -> [u8; 16] {
        let mut cdb = [0; 16];
        cdb[..2].copy_from_slice(&[0x93, flags]);
        cdb[8..10].copy_from_slice(&lba.to_be_bytes());
        cdb[10..14].copy_from_slice(&blocks.to_be_bytes());
        cdb
    }

    fn zeroes(unmap: bool, lba: u64, blocks: u64) -> Step {
        Step::Io(IoReq::bare(Op::WriteZeroes { unmap, fua: false }, lba, blocks))
    }

    fn thin() -> Bench {
        Bench::new(lu(|config| config.caps.unmap = true))
    }

    #[test]
    fn a_pattern_is_written_from_the_held_block() {
        let mut bench = Bench::new(plain());
        assert_eq!(bench.start(&ten(0, 3, 100), 512, 0), Step::FetchData { len: 512 });
        let mut block = [0; 512];
        block[511] = 1;
        let (lba, op) = (Lba(3), Op::WriteSame { fua: false });
        let request = IoReq { op, lba, blocks: 100, dir: Dir::None, len: 512 };
        assert!(request.uses_held());
        assert_eq!(bench.lu.on_data(&mut bench.task, &block), Step::Io(request));
        assert_eq!(bench.io_ok(&[], &block), Step::Respond(Reply::good(0, 512)));
    }

    #[test]
    fn zeros_become_write_zeroes_and_unmap_only_if_asked() {
        let mut bench = thin();
        for (flags, unmap) in [(0, false), (8, true)] {
            assert_eq!(bench.start(&ten(flags, 3, 9), 1024, 0), Step::FetchData { len: 512 });
            assert_eq!(bench.lu.on_data(&mut bench.task, &[0; 512]), zeroes(unmap, 3, 9));
            assert_eq!(bench.io_ok(&[], &[]), Step::Respond(Reply::good(0, 512)));
        }
    }

    #[test]
    fn a_pattern_is_never_unmapped() {
        let mut bench = thin();
        assert_eq!(bench.start(&sixteen(8, 3, 9), 512, 0), Step::FetchData { len: 512 });
        let step = bench.lu.on_data(&mut bench.task, &[1; 512]);
        let Step::Io(request) = step else { panic!("{step:?}") };
        assert_eq!(request.op, Op::WriteSame { fua: false });
    }

    #[test]
    fn ndob_needs_no_data() {
        let mut bench = thin();
        assert_eq!(bench.start(&sixteen(0x09, 3, 9), 0, 0), zeroes(true, 3, 9));
        assert_eq!(bench.io_ok(&[], &[]), Step::Respond(Reply::good(0, 0)));
        assert_eq!(bench.start(&sixteen(0x01, 3, 9), 0, 0), zeroes(false, 3, 9));
        assert_eq!(bench.io_ok(&[], &[]), Step::Respond(Reply::good(0, 0)));
        // NDOB is a bit of (16) only.
        assert_eq!(bench.sense(&ten(0x01, 3, 9), 0, 0), Sense::cdb_field(1).at_bit(0));
    }

    #[test]
    fn lengths_are_limited_as_page_b0_says() {
        let mut bench = Bench::new(lu(|config| config.geometry.blocks = 1 << 24));
        assert_eq!(bench.sense(&ten(0, 0, 0), 512, 0), Sense::cdb_field(7));
        assert_eq!(bench.sense(&sixteen(0, 0, 0), 512, 0), Sense::cdb_field(10));
        assert_eq!(bench.sense(&sixteen(1, 0, 131_073), 512, 0), Sense::cdb_field(10));
        assert_eq!(bench.start(&sixteen(1, 0, 131_072), 0, 0), zeroes(false, 0, 131_072));
    }

    #[test]
    fn bits_ranges_protection_and_buffers_are_refused() {
        let mut bench = Bench::new(plain());
        assert_eq!(bench.sense(&ten(0x10, 0, 1), 512, 0), Sense::cdb_field(1).at_bit(4));
        assert_eq!(bench.sense(&ten(0x08, 0, 1), 512, 0), Sense::cdb_field(1).at_bit(3));
        assert_eq!(bench.sense(&ten(0x06, 0, 1), 512, 0), Sense::cdb_field(1).at_bit(2));
        assert_eq!(bench.sense(&ten(0x20, 0, 1), 512, 0), Sense::cdb_field(1).at_bit(5));
        assert_eq!(bench.sense(&ten(0, 9999, 2), 512, 0), Sense::LBA_OUT_OF_RANGE);
        assert_eq!(bench.sense(&ten(0, 0, 1), 511, 0), Sense::INVALID_IU);
        let mut protected = Bench::new(lu(|config| config.read_only = true));
        assert_eq!(protected.sense(&ten(0, 0, 1), 512, 0), Sense::WRITE_PROTECTED);
    }
}
