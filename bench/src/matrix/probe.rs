//! How far the two cores are from each other: the cache-line round trip between them, and what
//! becomes of a run by it.
//!
//! ```text
//!   asker (core B)  -- asked: n -->  echo (core A)    two lines, one each way
//!                   <- answer: n --
//! ```
//! A virtual machine's CPUs may change places on the host within minutes: the round trip then takes
//! a few hundred nanoseconds instead of some hundred, and everything that two cores do together
//! changes with it, up to four times. Only runs of the same placement can be compared, so it is
//! probed before and after each run. A flip and back within one run stays unseen.
//!
//! The target goes on spinning on its core meanwhile and shares it with the echo. The median over
//! short batches does not see that: a batch during which either side lost its core is an outlier.
//! Where most are (a busy machine), or where the cores change places during the probe, there is no
//! answer rather than a wrong one.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::scope;

use serde::Serialize;
use usurp_reactor::Nanos;
use usurp_reactor::cpu::{Clock, pin_current};

use super::MatrixError;

/// Round trips between two looks at the clock.
const BATCH: u64 = 16;
/// Batches of a probe: 2 ms near, 8 ms far.
const BATCHES: usize = 1000;
/// Fewer batches are no probe.
const BATCHES_MIN: usize = 100;
/// Longest probe, on a machine that is so busy that the two threads seldom run together.
const PROBE_NS_MAX: Nanos = 400_000_000;
/// Turns of a wait between two looks at the clock.
const SPINS: u32 = 4096;
/// Round trips shorter than this are near.
pub const NEAR_NS: f64 = 250.0;

/// Where the two cores are.
#[derive(Copy, Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Placement {
    /// Round trips below [`NEAR_NS`]: they share a cache.
    Near,
    /// Others.
    Far,
}

impl Placement {
    /// Both, in the order of reports.
    pub const ALL: [Placement; 2] = [Placement::Near, Placement::Far];

    /// Of a round trip.
    pub fn of(round_trip_ns: f64) -> Placement {
        if round_trip_ns < NEAR_NS { Placement::Near } else { Placement::Far }
    }

    /// As in reports.
    pub fn word(self) -> &'static str {
        match self {
            Placement::Near => "near",
            Placement::Far => "far",
        }
    }
}

/// What the probes around a run say about it.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Filing {
    /// Both probes agree.
    Near,
    /// Both probes agree.
    Far,
    /// The cores changed places meanwhile: the run counts nowhere.
    Flipped,
    /// A probe failed, the machine is too busy: the run counts nowhere.
    Unknown,
}

impl Filing {
    /// From the probes before and after.
    pub fn of(before: Option<f64>, after: Option<f64>) -> Filing {
        match (before.map(Placement::of), after.map(Placement::of)) {
            (Some(Placement::Near), Some(Placement::Near)) => Filing::Near,
            (Some(Placement::Far), Some(Placement::Far)) => Filing::Far,
            (Some(_), Some(_)) => Filing::Flipped,
            _ => Filing::Unknown,
        }
    }

    /// Where the run counts.
    pub fn placement(self) -> Option<Placement> {
        match self {
            Filing::Near => Some(Placement::Near),
            Filing::Far => Some(Placement::Far),
            Filing::Flipped | Filing::Unknown => None,
        }
    }

    /// As in progress lines.
    pub fn word(self) -> &'static str {
        match self {
            Filing::Near => "near",
            Filing::Far => "far",
            Filing::Flipped => "flipped",
            Filing::Unknown => "unknown",
        }
    }
}

/// A cache line of its own, and its neighbour, which is prefetched with it.
#[repr(align(128))]
struct Line<T>(T);

/// What the two threads share.
struct Table {
    /// Number of the last question; the asker's.
    asked: Line<AtomicU64>,
    /// Number of the last answer; the echo's.
    answer: Line<AtomicU64>,
    /// The echo may go home; the asker's.
    is_over: Line<AtomicBool>,
}

/// Median round trip in nanoseconds between two cores; None on a machine too busy to tell.
pub fn round_trip_ns(echo_core: usize, ask_core: usize) -> Result<Option<f64>, MatrixError> {
    let table = Table {
        asked: Line(AtomicU64::new(0)),
        answer: Line(AtomicU64::new(0)),
        is_over: Line(AtomicBool::new(false)),
    };
    let pin = |core| pin_current(core).map_err(|e| MatrixError::Machine(e.to_string()));
    scope(|threads| {
        let echo = threads.spawn(|| pin(echo_core).map(|()| echo(&table)));
        let ask = threads.spawn(|| {
            let asked = pin(ask_core).map(|()| ask(&table));
            table.is_over.0.store(true, Ordering::Release);
            asked
        });
        let asked = ask.join().expect("the asker does not panic");
        echo.join().expect("the echo does not panic")?;
        Ok(typical(asked?))
    })
}

/// The median; None when there are too few batches, or when a quarter of them says otherwise.
fn typical(mut times: Vec<f64>) -> Option<f64> {
    if times.len() < BATCHES_MIN {
        return None;
    }
    times.sort_by(f64::total_cmp);
    let (quarter, median) = (times[times.len() / 4], times[times.len() / 2]);
    (Placement::of(quarter) == Placement::of(median)).then_some(median)
}

/// Answers until told to stop.
fn echo(table: &Table) {
    let mut next = 1;
    loop {
        if table.asked.0.load(Ordering::Acquire) == next {
            table.answer.0.store(next, Ordering::Release);
            next += 1;
        } else if table.is_over.0.load(Ordering::Acquire) {
            return;
        }
    }
}

/// Mean round trip of each batch.
fn ask(table: &Table) -> Vec<f64> {
    let clock = Clock::new();
    let mut times = Vec::with_capacity(BATCHES);
    let mut begun = clock.now();
    let deadline = begun + PROBE_NS_MAX;
    let mut number = 0;
    while times.len() < BATCHES {
        for _ in 0..BATCH {
            number += 1;
            table.asked.0.store(number, Ordering::Release);
            let mut spins = 0;
            while table.answer.0.load(Ordering::Acquire) != number {
                spins += 1;
                if spins % SPINS == 0 && clock.now() > deadline {
                    return times;
                }
            }
        }
        let now = clock.now();
        times.push((now - begun) as f64 / BATCH as f64);
        begun = now;
    }
    times
}

#[cfg(test)]
mod tests {
    use super::*;
    use usurp_reactor::cpu::{CoreSpec, resolve};

    #[test]
    fn the_border_between_near_and_far_is_250_ns() {
        assert_eq!(Placement::of(130.0), Placement::Near);
        assert_eq!(Placement::of(249.9), Placement::Near);
        assert_eq!(Placement::of(250.0), Placement::Far);
        assert_eq!(Placement::of(550.0), Placement::Far);
    }

    #[test]
    fn a_run_is_filed_only_where_both_probes_agree() {
        assert_eq!(Filing::of(Some(140.0), Some(150.0)), Filing::Near);
        assert_eq!(Filing::of(Some(540.0), Some(530.0)), Filing::Far);
        assert_eq!(Filing::of(Some(140.0), Some(530.0)), Filing::Flipped);
        assert_eq!(Filing::of(Some(530.0), Some(140.0)), Filing::Flipped);
        assert_eq!(Filing::of(None, Some(140.0)), Filing::Unknown);
        assert_eq!(Filing::of(Some(140.0), None), Filing::Unknown);
        assert_eq!(Filing::Flipped.placement(), None);
        assert_eq!(Filing::Far.placement(), Some(Placement::Far));
    }

    #[test]
    fn few_or_mixed_batches_give_no_answer() {
        let times = |near: usize, far: usize| [vec![120.0; near], vec![500.0; far]].concat();
        assert_eq!(typical(times(100, 0)), Some(120.0));
        assert_eq!(typical(times(90, 10)), Some(120.0), "outliers do not count");
        assert_eq!(typical(times(0, 100)), Some(500.0));
        assert_eq!(typical(times(40, 60)), None, "the cores changed places");
        assert_eq!(typical(times(BATCHES_MIN - 1, 0)), None);
    }

    #[test]
    fn two_cores_have_a_round_trip() {
        let cores = resolve(&CoreSpec::Auto).unwrap();
        let [a, b, ..] = cores[..] else {
            println!("skipped: a single core");
            return;
        };
        // On a busy machine there may be none; but it ends, and what it says can be.
        let Some(ns) = round_trip_ns(a, b).unwrap() else { return };
        assert!(ns > 5.0, "{ns} ns");
    }

    #[test]
    fn a_core_that_is_not_there_is_an_error_and_no_hang() {
        let core = resolve(&CoreSpec::Auto).unwrap()[0];
        assert!(round_trip_ns(1023, core).is_err());
        assert!(round_trip_ns(core, 1023).is_err());
    }
}
