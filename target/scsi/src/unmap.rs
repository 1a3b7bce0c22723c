//! UNMAP (SBC-3).
//!
//! Owns: the parameter list. Never does: trust a length in it.
//!
//! ```text
//!   0  UNMAP DATA LENGTH (2)   2  BLOCK DESCRIPTOR DATA LENGTH (2)   4  reserved (4)
//!   8  descriptors of 16:  LBA (8)  NUMBER (4)  reserved (4)
//!
//!   start --FetchData--> on_data: every descriptor checked --Io--> on_io --Io--> ... --> GOOD
//! ```
//!
//! Invariants: nothing is unmapped before all descriptors have been checked; the list in the
//! caller's buffer does not change meanwhile (the target copies it out of the initiator's memory).

use usurp_bdev::Op;

use crate::cdb::Range;
use crate::limits::UNMAP_LIST_BYTES_MAX;
use crate::lu::{Call, Lu};
use crate::sense::Sense;
use crate::step::{IoReq, Step};
use crate::task::{Plan, Task};

const HEADER_BYTES: usize = 8;
const DESCRIPTOR_BYTES: usize = 16;

pub(crate) fn unmap(lu: &mut Lu, call: &mut Call<'_>) -> Step {
    let task = &mut *call.task;
    let list_len = u32::from(call.cdb.be16(7));
    if list_len == 0 {
        return task.good();
    }
    if let Err(sense) = check(lu, task, list_len) {
        return task.check(sense);
    }
    task.wants_out = u64::from(list_len);
    task.writes = true;
    task.plan = Plan::FetchList;
    // More than the longest legal list is not looked at, so not fetched either.
    Step::FetchData { len: list_len.min(UNMAP_LIST_BYTES_MAX) }
}

fn check(lu: &Lu, task: &Task, list_len: u32) -> Result<(), Sense> {
    lu.check_writable()?;
    if (list_len as usize) < HEADER_BYTES {
        return Err(Sense::LIST_LENGTH.in_cdb(7));
    }
    Lu::check_data_out(task, list_len)
}

/// The list has arrived: checks all of it, then begins.
pub(crate) fn on_data(lu: &Lu, task: &mut Task, data: &[u8]) -> Step {
    let fetched = task.wants_out.min(u64::from(UNMAP_LIST_BYTES_MAX)) as usize;
    assert!(data.len() >= fetched, "the caller brings what FetchData asked for");
    match count_descriptors(lu, task.wants_out as usize, &data[..fetched]) {
        Ok(count) => {
            task.part = count as u64;
            task.at = 0;
            task.plan = Plan::Unmap;
            next(task, data)
        }
        Err(sense) => task.check(sense),
    }
}

/// How many descriptors the list has, all of them in range. A partial one at the end is ignored, as
/// SBC-3 UNMAP says; so is what a lying length claims beyond the list.
fn count_descriptors(lu: &Lu, list_len: usize, list: &[u8]) -> Result<usize, Sense> {
    let claimed = usize::from(u16::from_be_bytes([list[2], list[3]]));
    let count = claimed.min(list_len - HEADER_BYTES) / DESCRIPTOR_BYTES;
    if count > lu.limits.unmap_descriptors as usize {
        return Err(Sense::list_field(2));
    }
    for at in 0..count {
        lu.check_range(descriptor(list, at))?;
    }
    Ok(count)
}

fn descriptor(list: &[u8], at: usize) -> Range {
    let start = HEADER_BYTES + at * DESCRIPTOR_BYTES;
    let (lba, rest) = list[start..].split_first_chunk().expect("counted: it is there");
    let blocks = rest.first_chunk().expect("counted: it is there");
    Range {
        lba: u64::from_be_bytes(*lba),
        blocks: u64::from(u32::from_be_bytes(*blocks)),
        length_at: 0,
    }
}

/// Unmaps the next descriptor that has blocks, or ends.
fn next(task: &mut Task, list: &[u8]) -> Step {
    while task.at < task.part {
        let range = descriptor(list, task.at as usize);
        task.at += 1;
        if range.blocks > 0 {
            return Step::Io(IoReq::bare(Op::Unmap, range.lba, range.blocks));
        }
    }
    task.good()
}

pub(crate) fn on_io(task: &mut Task, held: &[u8]) -> Step {
    assert!(task.plan == Plan::Unmap, "only between its I/Os");
    next(task, held)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::step::Reply;
    use crate::testing::{Bench, lu, plain};

    fn thin() -> Bench {
        Bench::new(lu(|config| config.caps.unmap = true))
    }

    fn cdb(len: u16) -> [u8; 10] {
        let [high, low] = len.to_be_bytes();
        [0x42, 0, 0, 0, 0, 0, 0, high, low, 0]
    }

    fn list(claimed: u16, ranges: &[(u64, u32)]) -> Vec<u8> {
        let mut bytes = vec![0, 0];
        bytes.extend(claimed.to_be_bytes());
        bytes.extend([0; 4]);
        for (lba, blocks) in ranges {
            bytes.extend(lba.to_be_bytes());
            bytes.extend(blocks.to_be_bytes());
            bytes.extend([0; 4]);
        }
        bytes
    }

    /// Starts an UNMAP with this list and gives what follows its arrival.
    fn send(bench: &mut Bench, list: &[u8]) -> Step {
        let len = list.len() as u16;
        let step = bench.start(&cdb(len), u32::from(len), 0);
        let cut = u32::from(len).min(UNMAP_LIST_BYTES_MAX);
        assert_eq!(step, Step::FetchData { len: cut });
        bench.lu.on_data(&mut bench.task, list)
    }

    #[test]
    fn descriptors_are_unmapped_one_by_one_and_empty_ones_skipped() {
        let mut bench = thin();
        let list = list(64, &[(1, 2), (5, 0), (9999, 1), (0, 10_000)]);
        let mut step = send(&mut bench, &list);
        for (lba, blocks) in [(1, 2), (9999, 1), (0, 10_000)] {
            assert_eq!(step, Step::Io(IoReq::bare(Op::Unmap, lba, blocks)));
            step = bench.io_ok(&[], &list);
        }
        assert_eq!(step, Step::Respond(Reply::good(0, list.len() as u64)));
    }

    #[test]
    fn an_empty_list_and_an_empty_descriptor_area_are_no_errors() {
        let mut bench = thin();
        assert_eq!(bench.reply(&cdb(0), 0, 0), Reply::good(0, 0));
        assert_eq!(send(&mut bench, &list(0, &[(1, 1)])), Step::Respond(Reply::good(0, 24)));
        assert_eq!(send(&mut bench, &list(0, &[])), Step::Respond(Reply::good(0, 8)));
    }

    #[test]
    fn lying_lengths_are_cut_to_what_is_there() {
        let mut bench = thin();
        let lie = list(65535, &[(7, 1)]);
        assert_eq!(send(&mut bench, &lie), Step::Io(IoReq::bare(Op::Unmap, 7, 1)));
        assert_eq!(bench.io_ok(&[], &lie), Step::Respond(Reply::good(0, 24)));
        // A partial descriptor is ignored.
        let partial = &list(16, &[(7, 1)])[..23];
        assert_eq!(send(&mut bench, partial), Step::Respond(Reply::good(0, 23)));
        assert_eq!(bench.sense(&cdb(7), 7, 0), Sense::LIST_LENGTH.in_cdb(7));
        // More list than data.
        assert_eq!(bench.sense(&cdb(24), 23, 0), Sense::INVALID_IU);
    }

    #[test]
    fn ranges_that_wrap_or_overrun_touch_nothing() {
        for bad in [(u64::MAX, u32::MAX), (10_000, 1), (9_999, 2), (u64::MAX, 1), (10_001, 0)] {
            let mut bench = thin();
            let step = send(&mut bench, &list(32, &[(0, 1), bad]));
            assert_eq!(step, Step::check(Sense::LBA_OUT_OF_RANGE), "{bad:?}");
        }
    }

    #[test]
    fn the_descriptor_limit_of_page_b0_holds_exactly() {
        let mut bench = thin();
        let most = vec![(0, 0); 255];
        let step = send(&mut bench, &list(255 * 16, &most));
        assert_eq!(step, Step::Respond(Reply::good(0, 4088)));
        let more = vec![(0, 0); 256];
        let step = send(&mut bench, &list(256 * 16, &more));
        assert_eq!(step, Step::check(Sense::list_field(2)));
        // A long list with few descriptors is legal.
        let step = send(&mut bench, &list(16, &more));
        assert_eq!(step, Step::Respond(Reply::good(0, 8 + 4096)));
    }

    #[test]
    fn anchor_fat_units_and_write_protection_are_refused() {
        let mut bench = thin();
        let mut anchor = cdb(24);
        anchor[1] = 0x01;
        assert_eq!(bench.sense(&anchor, 24, 0), Sense::cdb_field(1).at_bit(0));
        let mut fat = Bench::new(plain());
        assert_eq!(fat.sense(&cdb(24), 24, 0), Sense::INVALID_OPCODE);
        let mut protected = Bench::new(lu(|config| {
            config.caps.unmap = true;
            config.read_only = true;
        }));
        assert_eq!(protected.sense(&cdb(24), 24, 0), Sense::WRITE_PROTECTED);
    }

    #[test]
    fn a_failure_ends_the_command() {
        let mut bench = thin();
        let list = list(32, &[(1, 2), (5, 1)]);
        assert!(matches!(send(&mut bench, &list), Step::Io(_)));
        let step = bench.io(usurp_bdev::Status::Medium, &[], &list);
        assert_eq!(step, Step::check(Sense::WRITE_ERROR));
        assert!(bench.task.is_idle());
    }
}
