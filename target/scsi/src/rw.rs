//! READ and WRITE (6), (10), (12), (16) (SBC-3, commands of these names).
//!
//! Owns: the hot commands. Never does: move data; the path does, as `IoReq` says.
//!
//! ```text
//!   D < S   read: min(S, D) moves, DIOVER        write: 05/0E/03, the medium is not touched
//!   D > S   read: S moves, DIUNDER               write: S is written, DOUNDER
//! ```
//!
//! Invariant: `IoReq::len` is at most the buffer of its direction.

use usurp_bdev::{Lba, Op};

use crate::cdb::Range;
use crate::lu::{Call, Lu};
use crate::step::{Dir, IoReq, Step};
use crate::task::{Plan, Task};

pub(crate) fn read_6(lu: &mut Lu, call: &mut Call<'_>) -> Step {
    read(lu, call.task, call.cdb.range_6(), false)
}

pub(crate) fn read_10(lu: &mut Lu, call: &mut Call<'_>) -> Step {
    read(lu, call.task, call.cdb.range_10(), call.cdb.fua())
}

pub(crate) fn read_12(lu: &mut Lu, call: &mut Call<'_>) -> Step {
    read(lu, call.task, call.cdb.range_12(), call.cdb.fua())
}

pub(crate) fn read_16(lu: &mut Lu, call: &mut Call<'_>) -> Step {
    read(lu, call.task, call.cdb.range_16(), call.cdb.fua())
}

pub(crate) fn write_6(lu: &mut Lu, call: &mut Call<'_>) -> Step {
    write(lu, call.task, call.cdb.range_6(), false)
}

pub(crate) fn write_10(lu: &mut Lu, call: &mut Call<'_>) -> Step {
    write(lu, call.task, call.cdb.range_10(), call.cdb.fua())
}

pub(crate) fn write_12(lu: &mut Lu, call: &mut Call<'_>) -> Step {
    write(lu, call.task, call.cdb.range_12(), call.cdb.fua())
}

pub(crate) fn write_16(lu: &mut Lu, call: &mut Call<'_>) -> Step {
    write(lu, call.task, call.cdb.range_16(), call.cdb.fua())
}

#[inline]
pub(crate) fn read(lu: &Lu, task: &mut Task, range: Range, fua: bool) -> Step {
    let bytes = match lu.check_transfer(range) {
        Ok(bytes) => bytes,
        Err(sense) => return task.check(sense),
    };
    task.wants_in = u64::from(bytes);
    let len = bytes.min(task.data_in_len);
    if len == 0 {
        return task.good();
    }
    // Only the blocks that the buffer takes part of.
    let blocks = u64::from(len).div_ceil(u64::from(lu.geometry.block_size));
    let blocks = if len == bytes { range.blocks } else { blocks };
    if fua && lu.caps.flush {
        // FUA of a read: what is cached but not yet written goes to the medium first (SBC-3
        // READ(10)).
        return flush_first(task, range.lba, blocks, len);
    }
    task.plan = Plan::Single;
    Step::Io(IoReq { op: Op::Read, lba: Lba(range.lba), blocks, dir: Dir::In, len })
}

#[cold]
fn flush_first(task: &mut Task, lba: u64, blocks: u64, len: u32) -> Step {
    task.lba = lba;
    task.blocks = blocks;
    task.len = len;
    task.writes = true;
    task.plan = Plan::FlushThenRead;
    Step::Io(IoReq::bare(Op::Flush, 0, 0))
}

pub(crate) fn read_after_flush(task: &mut Task) -> Step {
    assert!(task.plan == Plan::FlushThenRead, "only after its flush");
    task.writes = false;
    task.plan = Plan::Single;
    let (lba, blocks, len) = (Lba(task.lba), task.blocks, task.len);
    Step::Io(IoReq { op: Op::Read, lba, blocks, dir: Dir::In, len })
}

#[inline]
pub(crate) fn write(lu: &Lu, task: &mut Task, range: Range, fua: bool) -> Step {
    let bytes = match check_write(lu, task, range) {
        Ok(bytes) => bytes,
        Err(sense) => return task.check(sense),
    };
    task.wants_out = u64::from(bytes);
    if bytes == 0 {
        return task.good();
    }
    task.writes = true;
    task.plan = Plan::Single;
    let (lba, blocks, len) = (Lba(range.lba), range.blocks, bytes);
    Step::Io(IoReq { op: Op::Write { fua }, lba, blocks, dir: Dir::Out, len })
}

#[inline]
fn check_write(lu: &Lu, task: &Task, range: Range) -> Result<u32, crate::sense::Sense> {
    let bytes = lu.check_transfer(range)?;
    lu.check_writable()?;
    Lu::check_data_out(task, bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sense::Sense;
    use crate::step::Reply;
    use crate::testing::{Bench, lu, plain};

    fn request(op: Op, lba: u64, blocks: u64, dir: Dir, len: u32) -> Step {
        Step::Io(IoReq { op, lba: Lba(lba), blocks, dir, len })
    }

    fn good(wants_in: u64, wants_out: u64) -> Step {
        Step::Respond(Reply::good(wants_in, wants_out))
    }

    /// The four forms of a command: LBA 0x0102, 2 blocks.
    fn forms(opcodes: [u8; 4], flags: u8) -> [Vec<u8>; 4] {
        [
            vec![opcodes[0], 0, 1, 2, 2, 0],
            vec![opcodes[1], flags, 0, 0, 1, 2, 0, 0, 2, 0],
            vec![opcodes[2], flags, 0, 0, 1, 2, 0, 0, 0, 2, 0, 0],
            vec![opcodes[3], flags, 0, 0, 0, 0, 0, 0, 1, 2, 0, 0, 0, 2, 0, 0],
        ]
    }

    const READS: [u8; 4] = [0x08, 0x28, 0xA8, 0x88];
    const WRITES: [u8; 4] = [0x0A, 0x2A, 0xAA, 0x8A];

    #[test]
    fn every_read_reads() {
        let mut bench = Bench::new(plain());
        for cdb in forms(READS, 0x10) {
            let want = request(Op::Read, 0x102, 2, Dir::In, 1024);
            assert_eq!(bench.start(&cdb, 0, 1024), want, "{cdb:x?}");
            assert_eq!(bench.io_ok(&[], &[]), good(1024, 0));
        }
    }

    #[test]
    fn every_write_writes_and_fua_is_passed_on() {
        let mut bench = Bench::new(plain());
        for (at, cdb) in forms(WRITES, 0x08).into_iter().enumerate() {
            let fua = at != 0;
            let want = request(Op::Write { fua }, 0x102, 2, Dir::Out, 1024);
            assert_eq!(bench.start(&cdb, 1024, 0), want, "{cdb:x?}");
            assert_eq!(bench.io_ok(&[], &[]), good(0, 1024));
        }
        for cdb in forms(WRITES, 0x12) {
            let want = request(Op::Write { fua: false }, 0x102, 2, Dir::Out, 1024);
            assert_eq!(bench.start(&cdb, 1024, 0), want, "DPO and FUA_NV change nothing");
            assert_eq!(bench.io_ok(&[], &[]), good(0, 1024));
        }
    }

    #[test]
    fn a_fua_read_flushes_a_volatile_cache_first() {
        let mut bench = Bench::new(plain());
        let cdb = [0x28, 0x08, 0, 0, 0, 5, 0, 0, 3, 0];
        assert_eq!(bench.start(&cdb, 0, 1030), Step::Io(IoReq::bare(Op::Flush, 0, 0)));
        assert_eq!(bench.io_ok(&[], &[]), request(Op::Read, 5, 3, Dir::In, 1030));
        assert_eq!(bench.io_ok(&[], &[]), good(1536, 0));
        let mut stable = Bench::new(lu(|config| config.caps.flush = false));
        assert_eq!(stable.start(&cdb, 0, 1536), request(Op::Read, 5, 3, Dir::In, 1536));
    }

    #[test]
    fn length_zero_is_256_blocks_in_six_and_nothing_elsewhere() {
        let mut bench = Bench::new(plain());
        let want = request(Op::Read, 0, 256, Dir::In, 131_072);
        assert_eq!(bench.start(&[0x08, 0, 0, 0, 0, 0], 0, 131_072), want);
        bench.task.abandon();
        for cdb in [[0x28, 0, 0, 0, 0x27, 0x10, 0, 0, 0, 0], [0x2A, 0, 0, 0, 0, 0, 0, 0, 0, 0]] {
            assert_eq!(bench.start(&cdb, 512, 512), good(0, 0));
        }
        // One past the end is too far even for nothing.
        let past = [0x28, 0, 0, 0, 0x27, 0x11, 0, 0, 0, 0];
        assert_eq!(bench.sense(&past, 0, 0), Sense::LBA_OUT_OF_RANGE);
    }

    #[test]
    fn a_read_moves_the_shorter_of_command_and_buffer() {
        let mut bench = Bench::new(plain());
        let cdb = [0x28, 0, 0, 0, 0, 5, 0, 0, 3, 0];
        for (buffer, blocks, len) in
            [(1536, 3, 1536), (9999, 3, 1536), (1025, 3, 1025), (512, 1, 512)]
        {
            let want = request(Op::Read, 5, blocks, Dir::In, len);
            assert_eq!(bench.start(&cdb, 77, buffer), want);
            assert_eq!(bench.io_ok(&[], &[]), good(1536, 0), "S is the command's");
        }
        assert_eq!(bench.start(&cdb, 0, 0), good(1536, 0));
    }

    #[test]
    fn a_write_takes_nothing_from_a_short_buffer() {
        let mut bench = Bench::new(plain());
        let cdb = [0x2A, 0, 0, 0, 0, 5, 0, 0, 3, 0];
        assert_eq!(bench.sense(&cdb, 1535, 9999), Sense::INVALID_IU);
        assert_eq!(bench.sense(&cdb, 0, 0), Sense::INVALID_IU);
        let want = request(Op::Write { fua: false }, 5, 3, Dir::Out, 1536);
        assert_eq!(bench.start(&cdb, 9999, 9999), want);
        assert_eq!(bench.io_ok(&[], &[]), good(0, 1536));
    }

    #[test]
    fn checks_come_in_the_order_of_the_reference() {
        let mut bench = Bench::new(lu(|config| config.read_only = true));
        // Reserved and protection bits before the range, the range before the length, ...
        let far = [0x2A, 0x20, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0xFF, 0xFF, 0];
        assert_eq!(bench.sense(&far, 0, 0), Sense::cdb_field(1).at_bit(5));
        let far = [0x2A, 0, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0xFF, 0xFF, 0];
        assert_eq!(bench.sense(&far, 0, 0), Sense::LBA_OUT_OF_RANGE);
        let long = [0x2A, 0, 0, 0, 0, 0, 0, 0x08, 0x01, 0];
        assert_eq!(bench.sense(&long, 0, 0), Sense::cdb_field(7));
        let legal = [0x2A, 0, 0, 0, 0, 0, 0, 0x08, 0, 0];
        assert_eq!(bench.sense(&legal, 0, 0), Sense::WRITE_PROTECTED);
        assert!(matches!(bench.start(&[0x28, 0, 0, 0, 0, 0, 0, 0x08, 0, 0], 0, 512), Step::Io(_)));
    }

    #[test]
    fn an_lba_that_wraps_is_out_of_range() {
        let mut bench = Bench::new(plain());
        let mut cdb = [0xFF; 16];
        cdb[..2].copy_from_slice(&[0x88, 0]);
        cdb[10..].copy_from_slice(&[0, 0, 0, 1, 0, 0]);
        assert_eq!(bench.sense(&cdb, 0, 512), Sense::LBA_OUT_OF_RANGE);
    }

    #[test]
    fn naca_and_reserved_bits_are_refused_on_the_fast_way_too() {
        let mut bench = Bench::new(plain());
        let naca = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0x04];
        assert_eq!(bench.sense(&naca, 0, 512), Sense::cdb_field(9).at_bit(2));
        let rarc = [0x28, 0x04, 0, 0, 0, 0, 0, 0, 1, 0];
        assert_eq!(bench.sense(&rarc, 0, 512), Sense::cdb_field(1).at_bit(2));
        let group = [0x28, 0, 0, 0, 0, 0, 0x1F, 0, 1, 0xC0];
        assert!(matches!(bench.start(&group, 0, 512), Step::Io(_)));
    }
}
