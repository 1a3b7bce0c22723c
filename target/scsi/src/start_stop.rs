//! TEST UNIT READY and START STOP UNIT (SPC-4; SBC-3).
//!
//! Owns: whether the unit is started. Never does: eject (LOEJ) or power conditions; the table of
//! opcodes refuses those bits.
//!
//! ```text
//!   started --START=0--> (stopped, flush in flight) --ok--> stopped: medium commands 02 04/02
//!      ^                          | failed                      |
//!      +--------------------------+-------START=1 or reset------+
//! ```
//!
//! Invariant: once stopped, nothing new reaches the medium, so what the flush leaves clean stays
//! so.

use usurp_bdev::Op;

use crate::lu::{Call, Lu};
use crate::step::{IoReq, Step};
use crate::task::{Plan, Task};

/// The table has it as a command that needs a started unit: there is nothing else to test.
pub(crate) fn test_unit_ready(_lu: &mut Lu, call: &mut Call<'_>) -> Step {
    call.task.good()
}

/// IMMED is accepted, but we wait: see `sync.rs`.
pub(crate) fn start_stop(lu: &mut Lu, call: &mut Call<'_>) -> Step {
    if call.cdb.byte(4) & 0x01 != 0 {
        lu.stopped = false;
        return call.task.good();
    }
    // Also when it is stopped already: the flush of the stop before may be in flight still.
    lu.stopped = true;
    call.task.writes = true;
    call.task.plan = Plan::Stop;
    Step::Io(IoReq::bare(Op::Flush, 0, 0))
}

pub(crate) fn on_stopped(task: &mut Task) -> Step {
    assert!(task.plan == Plan::Stop, "only after its flush");
    task.good()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sense::Sense;
    use crate::step::Reply;
    use crate::testing::{Bench, plain};

    const TUR: [u8; 6] = [0; 6];
    const STOP: [u8; 6] = [0x1B, 0, 0, 0, 0, 0];
    const START: [u8; 6] = [0x1B, 1, 0, 0, 1, 0];
    const READ: [u8; 10] = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];

    #[test]
    fn a_stopped_unit_refuses_the_medium_until_it_is_started() {
        let mut bench = Bench::new(plain());
        assert_eq!(bench.reply(&TUR, 0, 0), Reply::good(0, 0));
        assert_eq!(bench.start(&STOP, 0, 0), Step::Io(IoReq::bare(Op::Flush, 0, 0)));
        assert!(bench.lu.is_stopped(), "at once: nothing may follow the flush");
        assert_eq!(bench.io_ok(&[], &[]), Step::Respond(Reply::good(0, 0)));
        assert_eq!(bench.sense(&TUR, 0, 0), Sense::STOPPED);
        assert_eq!(bench.sense(&READ, 0, 512), Sense::STOPPED);
        assert_eq!(bench.data(&[0x12, 0, 0, 0, 36, 0], 36).len(), 36);
        assert_eq!(bench.data(&[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0], 8).len(), 8);
        assert_eq!(bench.reply(&START, 0, 0), Reply::good(0, 0));
        assert_eq!(bench.reply(&TUR, 0, 0), Reply::good(0, 0));
        assert!(matches!(bench.start(&READ, 0, 512), Step::Io(_)));
    }

    #[test]
    fn a_stop_whose_flush_fails_leaves_the_unit_started() {
        let mut bench = Bench::new(plain());
        assert!(matches!(bench.start(&STOP, 0, 0), Step::Io(_)));
        let step = bench.io(usurp_bdev::Status::Io, &[], &[]);
        assert_eq!(step, Step::check(Sense::INTERNAL));
        assert_eq!(bench.reply(&TUR, 0, 0), Reply::good(0, 0));
    }

    #[test]
    fn a_reset_starts_the_unit() {
        let mut bench = Bench::new(plain());
        bench.lu.set_stopped(true);
        bench.lu.on_reset();
        assert_eq!(bench.reply(&TUR, 0, 0), Reply::good(0, 0));
    }

    #[test]
    fn eject_and_power_conditions_are_refused() {
        let mut bench = Bench::new(plain());
        let eject = bench.sense(&[0x1B, 0, 0, 0, 0x02, 0], 0, 0);
        assert_eq!(eject, Sense::cdb_field(4).at_bit(1));
        let idle = bench.sense(&[0x1B, 0, 0, 0, 0x20, 0], 0, 0);
        assert_eq!(idle, Sense::cdb_field(4).at_bit(5));
    }
}
