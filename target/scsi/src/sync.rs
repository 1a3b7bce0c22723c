//! SYNCHRONIZE CACHE (10), (16) (SBC-3).
//!
//! Owns: the range check. Never does: answer before the flush is done. IMMED permits that, but an
//! initiator that asks for it could not be told of a failure but by deferred sense, which we have
//! not.
//!
//! Invariant: the whole bdev is flushed, whatever the range: bdevs flush nothing less.

use usurp_bdev::Op;

use crate::cdb::Range;
use crate::lu::{Call, Lu};
use crate::step::{IoReq, Step};
use crate::task::{Plan, Task};

pub(crate) fn synchronize_10(lu: &mut Lu, call: &mut Call<'_>) -> Step {
    synchronize(lu, call.task, call.cdb.range_10())
}

pub(crate) fn synchronize_16(lu: &mut Lu, call: &mut Call<'_>) -> Step {
    synchronize(lu, call.task, call.cdb.range_16())
}

/// 0 blocks means up to the end of the medium; the flush covers that anyway.
fn synchronize(lu: &Lu, task: &mut Task, range: Range) -> Step {
    if let Err(sense) = lu.check_range(range) {
        return task.check(sense);
    }
    task.writes = true;
    task.plan = Plan::Single;
    Step::Io(IoReq::bare(Op::Flush, 0, 0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sense::Sense;
    use crate::step::Reply;
    use crate::testing::{Bench, plain};

    #[test]
    fn both_forms_flush_and_immed_waits_all_the_same() {
        let mut bench = Bench::new(plain());
        let ten = [0x35, 0x02, 0, 0, 0, 0, 0, 0, 0, 0];
        let sixteen = [0x91, 0x06, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 9, 0, 0];
        for cdb in [&ten[..], &sixteen[..]] {
            assert_eq!(bench.start(cdb, 0, 0), Step::Io(IoReq::bare(Op::Flush, 0, 0)));
            assert_eq!(bench.io_ok(&[], &[]), Step::Respond(Reply::good(0, 0)));
        }
    }

    #[test]
    fn ranges_beyond_the_end_are_refused_and_failures_are_write_errors() {
        let mut bench = Bench::new(plain());
        let far = [0x35, 0, 0, 0, 0x27, 0x0F, 0, 0, 2, 0];
        assert_eq!(bench.sense(&far, 0, 0), Sense::LBA_OUT_OF_RANGE);
        let ten = [0x35, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        assert!(matches!(bench.start(&ten, 0, 0), Step::Io(_)));
        let step = bench.io(usurp_bdev::Status::Medium, &[], &[]);
        assert_eq!(step, Step::check(Sense::WRITE_ERROR));
    }
}
