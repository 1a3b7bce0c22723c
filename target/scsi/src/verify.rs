//! VERIFY (10), (12), (16) (SBC-3).
//!
//! Owns: the comparison. Never does: skip the read, as both kernel targets' BYTCHK = 0 does.
//!
//! ```text
//!   BYTCHK 0  start ---------------------> Io(Read piece) --> on_io --+--> GOOD
//!          1  start --FetchData(S)------>       ^                     |    or MISCOMPARE
//!          3  start --FetchData(block)-->       +------(next piece)---+
//! ```
//!
//! Invariants: one piece is in flight; the pieces cover the range in order. INFORMATION of a
//! miscompare is the byte offset of the first difference from the start of the verified range.

use usurp_bdev::{Lba, Op};

use crate::cdb::Range;
use crate::lu::{Call, Lu};
use crate::sense::Sense;
use crate::step::{Dir, IoReq, Step};
use crate::task::{Plan, Task};

const BYTCHK_NONE: u8 = 0;
const BYTCHK_ALL: u8 = 1;
const BYTCHK_ONE_BLOCK: u8 = 3;

pub(crate) fn verify_10(lu: &mut Lu, call: &mut Call<'_>) -> Step {
    let range = call.cdb.range_10();
    verify(lu, call, range)
}

pub(crate) fn verify_12(lu: &mut Lu, call: &mut Call<'_>) -> Step {
    let range = call.cdb.range_12();
    verify(lu, call, range)
}

pub(crate) fn verify_16(lu: &mut Lu, call: &mut Call<'_>) -> Step {
    let range = call.cdb.range_16();
    verify(lu, call, range)
}

fn verify(lu: &Lu, call: &mut Call<'_>, range: Range) -> Step {
    let task = &mut *call.task;
    let mode = call.cdb.byte(1) >> 1 & 0x03;
    let needed = match check(lu, task, mode, range) {
        Ok(needed) => needed,
        Err(sense) => return task.check(sense),
    };
    task.wants_out = u64::from(needed);
    if range.blocks == 0 {
        return task.good();
    }
    task.mode = mode;
    task.lba = range.lba;
    task.blocks = range.blocks;
    task.at = 0;
    if mode == BYTCHK_NONE {
        return next(lu, task);
    }
    task.plan = Plan::FetchCompare;
    Step::FetchData { len: needed }
}

/// Bytes of data-out that the command compares with.
fn check(lu: &Lu, task: &Task, mode: u8, range: Range) -> Result<u32, Sense> {
    if mode == 2 {
        return Err(Sense::cdb_field(1).at_bit(2));
    }
    let bytes = lu.check_transfer(range)?;
    let needed = match mode {
        BYTCHK_ALL => bytes,
        BYTCHK_ONE_BLOCK => bytes.min(lu.geometry.block_size),
        _ => 0,
    };
    Lu::check_data_out(task, needed)?;
    Ok(needed)
}

pub(crate) fn on_data(lu: &Lu, task: &mut Task) -> Step {
    next(lu, task)
}

/// Reads the next piece, or ends.
fn next(lu: &Lu, task: &mut Task) -> Step {
    let left = task.blocks - task.at;
    if left == 0 {
        return task.good();
    }
    task.plan = Plan::Verify;
    task.part = left.min(u64::from(lu.limits.verify_piece_blocks));
    let len = (task.part << lu.block_shift) as u32;
    let lba = Lba(task.lba + task.at);
    Step::Io(IoReq { op: Op::Read, lba, blocks: task.part, dir: Dir::None, len })
}

pub(crate) fn on_io(lu: &Lu, task: &mut Task, read: &[u8], held: &[u8]) -> Step {
    assert!(task.plan == Plan::Verify, "only between its I/Os");
    let start = (task.at << lu.block_shift) as usize;
    let bytes = (task.part << lu.block_shift) as usize;
    let block = lu.geometry.block_size as usize;
    let different = match task.mode {
        BYTCHK_NONE => None,
        BYTCHK_ALL => difference(&read[..bytes], &held[start..start + bytes]),
        _ => {
            let blocks = read[..bytes].chunks_exact(block).enumerate();
            blocks
                .filter_map(|(at, data)| Some(at * block + difference(data, &held[..block])?))
                .next()
        }
    };
    if let Some(offset) = different {
        return task.check(Sense::MISCOMPARE.with_information((start + offset) as u64));
    }
    task.at += task.part;
    next(lu, task)
}

/// Where two slices of one length differ first.
fn difference(a: &[u8], b: &[u8]) -> Option<usize> {
    assert!(a.len() == b.len(), "one piece against its counterpart");
    if a == b { None } else { a.iter().zip(b).position(|(a, b)| a != b) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::step::Reply;
    use crate::testing::{Bench, plain};

    fn cdb(flags: u8, lba: u16, blocks: u16) -> [u8; 10] {
        let ([a, b], [c, d]) = (lba.to_be_bytes(), blocks.to_be_bytes());
        [0x2F, flags, 0, 0, a, b, 0, c, d, 0]
    }

    fn piece(lba: u64, blocks: u64) -> Step {
        let len = blocks as u32 * 512;
        Step::Io(IoReq { op: Op::Read, lba: Lba(lba), blocks, dir: Dir::None, len })
    }

    #[test]
    fn without_bytchk_everything_is_read_in_pieces() {
        let mut bench = Bench::new(plain());
        assert_eq!(bench.start(&cdb(0, 100, 300), 4096, 4096), piece(100, 128));
        let data = vec![0; 65536];
        assert_eq!(bench.io_ok(&data, &[]), piece(228, 128));
        assert_eq!(bench.io_ok(&data, &[]), piece(356, 44));
        assert_eq!(bench.io_ok(&data, &[]), Step::Respond(Reply::good(0, 0)));
    }

    #[test]
    fn twelve_and_sixteen_read_too() {
        let mut bench = Bench::new(plain());
        let twelve = [0xAF, 0, 0, 0, 0, 7, 0, 0, 0, 2, 0, 0];
        assert_eq!(bench.start(&twelve, 0, 0), piece(7, 2));
        assert_eq!(bench.io_ok(&[0; 1024], &[]), Step::Respond(Reply::good(0, 0)));
        let sixteen = [0x8F, 0, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 2, 0, 0];
        assert_eq!(bench.start(&sixteen, 0, 0), piece(7, 2));
    }

    #[test]
    fn a_read_error_is_reported() {
        let mut bench = Bench::new(plain());
        assert_eq!(bench.start(&cdb(0, 1, 1), 0, 0), piece(1, 1));
        assert_eq!(bench.io(usurp_bdev::Status::Medium, &[], &[]), Step::check(Sense::READ_ERROR));
    }

    #[test]
    fn with_bytchk_one_all_data_are_compared_across_pieces() {
        let mut bench = Bench::new(plain());
        let bytes = 130 * 512;
        let held: Vec<u8> = (0..bytes).map(|at| (at / 512) as u8).collect();
        let fetch = Step::FetchData { len: bytes as u32 };
        assert_eq!(bench.start(&cdb(2, 0, 130), bytes as u32 + 512, 0), fetch);
        assert_eq!(bench.lu.on_data(&mut bench.task, &held), piece(0, 128));
        assert_eq!(bench.io_ok(&held[..65536], &held), piece(128, 2));
        let mut other = held[65536..].to_vec();
        let good = Step::Respond(Reply::good(0, bytes as u64));
        assert_eq!(bench.clone().io_ok(&other, &held), good);
        other[513] ^= 1;
        let sense = Sense::MISCOMPARE.with_information(65536 + 513);
        assert_eq!(bench.io_ok(&other, &held), Step::check(sense));
    }

    #[test]
    fn with_bytchk_three_one_block_is_compared_with_each() {
        let mut bench = Bench::new(plain());
        let held = [7; 512];
        assert_eq!(bench.start(&cdb(6, 0, 130), 512, 0), Step::FetchData { len: 512 });
        assert_eq!(bench.lu.on_data(&mut bench.task, &held), piece(0, 128));
        assert_eq!(bench.io_ok(&[7; 65536], &held), piece(128, 2));
        let mut other = [7; 1024];
        assert_eq!(bench.clone().io_ok(&other, &held), Step::Respond(Reply::good(0, 512)));
        other[1023] = 8;
        let sense = Sense::MISCOMPARE.with_information(65536 + 1023);
        assert_eq!(bench.io_ok(&other, &held), Step::check(sense));
    }

    #[test]
    fn zero_blocks_need_no_data_whatever_bytchk_says() {
        let mut bench = Bench::new(plain());
        for flags in [0, 2, 6] {
            assert_eq!(bench.reply(&cdb(flags, 0, 0), 0, 0), Reply::good(0, 0));
        }
    }

    #[test]
    fn bad_bytchk_ranges_lengths_and_buffers_are_refused() {
        let mut bench = Bench::new(plain());
        assert_eq!(bench.sense(&cdb(4, 0, 1), 512, 0), Sense::cdb_field(1).at_bit(2));
        assert_eq!(bench.sense(&cdb(0, 9999, 2), 0, 0), Sense::LBA_OUT_OF_RANGE);
        assert_eq!(bench.sense(&cdb(0, 0, 2049), 0, 0), Sense::cdb_field(7));
        assert_eq!(bench.sense(&cdb(2, 0, 2), 1023, 0), Sense::INVALID_IU);
        assert_eq!(bench.sense(&cdb(6, 0, 2), 511, 0), Sense::INVALID_IU);
        assert_eq!(bench.sense(&cdb(0x20, 0, 1), 0, 0), Sense::cdb_field(1).at_bit(5));
    }
}
