//! The counters of one reactor, as others may read them.
//!
//! The reactor counts in plain integers of its own and copies them here every 1024 turns or each
//! millisecond, by relaxed atomic stores: no read-modify-write, nothing shared on the I/O path. A
//! reader sees each counter as it was at some recent copy, not all of one moment.
//!
//! ```text
//!   Counters, RowCounters (reactor's own) --publish--> ReactorStats (Arc) --read()--> anyone
//! ```

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::Nanos;

/// Most rows: the mailbox, the work, and the extra pollers.
pub const ROWS_MAX: usize = 16;

/// What a reactor counts over its life. Times are of whole turns: busy + idle + rested = lifetime.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Counters {
    /// Turns begun.
    pub turns: u64,
    /// Turns that handled something.
    pub busy_turns: u64,
    /// Time in those.
    pub busy_ns: Nanos,
    /// Time in empty turns, spinning and pausing included.
    pub idle_ns: Nanos,
    /// Time given away by adaptive idling: yields and sleeps.
    pub rested_ns: Nanos,
    /// How often adaptive idling yielded or slept.
    pub rests: u64,
    /// Turns longer than `stall_ns`, resting not counted.
    pub stalls: u64,
    /// The longest turn, resting not counted.
    pub longest_ns: Nanos,
    /// Mails handled.
    pub mails: u64,
    /// Events handled, mails and timers included.
    pub events: u64,
}

/// What is counted per poller (the mailbox and the work count as one each).
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct RowCounters {
    /// Turns in which it handled something.
    pub busy_turns: u64,
    /// Its share of the time of those turns, by events: the clock is read once a turn only.
    pub busy_ns: Nanos,
    /// Events it handled.
    pub events: u64,
    /// Turns longer than `stall_ns` in which it handled something.
    pub stalls: u64,
    /// The longest turn in which it handled something.
    pub longest_ns: Nanos,
}

/// One reactor's counters, published. Written by the reactor only.
#[derive(Debug, Default)]
pub struct ReactorStats {
    /// [`Counters`], in the order of its fields.
    all: [AtomicU64; 10],
    /// One per poller.
    rows: [Row; ROWS_MAX],
}

/// One poller's counters, published.
#[derive(Debug, Default)]
struct Row {
    /// Its name; set once, before the reactor runs.
    name: OnceLock<String>,
    /// [`RowCounters`], in the order of its fields.
    values: [AtomicU64; 5],
}

impl ReactorStats {
    /// All counters of the reactor, as last published.
    pub fn read(&self) -> Counters {
        let [
            turns,
            busy_turns,
            busy_ns,
            idle_ns,
            rested_ns,
            rests,
            stalls,
            longest_ns,
            mails,
            events,
        ] = self.all.each_ref().map(|value| value.load(Relaxed));
        Counters {
            turns,
            busy_turns,
            busy_ns,
            idle_ns,
            rested_ns,
            rests,
            stalls,
            longest_ns,
            mails,
            events,
        }
    }

    /// Name and counters of each poller: the mailbox, the work, then the extra ones.
    pub fn rows(&self) -> impl Iterator<Item = (&str, RowCounters)> {
        self.rows.iter().map_while(|row| {
            let name = row.name.get()?.as_str();
            let [busy_turns, busy_ns, events, stalls, longest_ns] =
                row.values.each_ref().map(|value| value.load(Relaxed));
            Some((name, RowCounters { busy_turns, busy_ns, events, stalls, longest_ns }))
        })
    }

    /// Names row `at`; at start-up, by the reactor.
    pub(crate) fn name_row(&self, at: usize, name: &str) {
        assert!(at < ROWS_MAX, "at most {ROWS_MAX} pollers, mailbox and work included");
        let named = self.rows[at].name.set(name.to_string());
        assert!(named.is_ok(), "row {at} has a name already");
    }

    /// Copies the reactor's own counters here.
    pub(crate) fn publish(&self, counters: &Counters, rows: &[RowCounters]) {
        let c = counters;
        let all = [
            c.turns,
            c.busy_turns,
            c.busy_ns,
            c.idle_ns,
            c.rested_ns,
            c.rests,
            c.stalls,
            c.longest_ns,
            c.mails,
            c.events,
        ];
        self.all.iter().zip(all).for_each(|(to, value)| to.store(value, Relaxed));
        for (to, row) in self.rows.iter().zip(rows) {
            let values = [row.busy_turns, row.busy_ns, row.events, row.stalls, row.longest_ns];
            to.values.iter().zip(values).for_each(|(to, value)| to.store(value, Relaxed));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_published_is_read_back_field_by_field() {
        let stats = ReactorStats::default();
        assert_eq!((stats.read(), stats.rows().count()), (Counters::default(), 0));
        stats.name_row(0, "mailbox");
        stats.name_row(1, "work");
        let counters = Counters {
            turns: 1,
            busy_turns: 2,
            busy_ns: 3,
            idle_ns: 4,
            rested_ns: 5,
            rests: 6,
            stalls: 7,
            longest_ns: 8,
            mails: 9,
            events: 10,
        };
        let row = RowCounters { busy_turns: 1, busy_ns: 2, events: 3, stalls: 4, longest_ns: 5 };
        stats.publish(&counters, &[RowCounters::default(), row]);
        assert_eq!(stats.read(), counters);
        let rows: Vec<_> = stats.rows().collect();
        assert_eq!(rows, [("mailbox", RowCounters::default()), ("work", row)]);
    }

    #[test]
    #[should_panic(expected = "at most 16 pollers")]
    fn too_many_rows_panic() {
        ReactorStats::default().name_row(ROWS_MAX, "one too many");
    }
}
