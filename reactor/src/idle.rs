//! What a reactor does when a turn found nothing: spin on, or step down gently. No interrupts.
//!
//! ```text
//!   time since the last event:   spin_us        yield_us
//!   adaptive:           PAUSE ----------> sched_yield -----> sleep 1/16 of that time,
//!                         ^                                  at most max_sleep_us
//!                         |                                  (never past the next timer)
//!                         `---------------- any event ----------------'
//! ```
//! A sleep is a fixed part of the time that has passed without an event: what it adds to a wait is
//! that part of the wait at most, and a reactor with nothing to do soon costs next to nothing.
//! The steps go by time and not by turns: a turn of an emulated or loaded machine is long, and
//! whoever serves the reactor (a soft RDMA device's kernel threads, the initiator itself) may wait
//! for its core.
//!
//! Owns the time since the last event. `Idler` decides and computes nothing else, so the steps are
//! tested without a clock; `Step::perform` does them.

use std::num::NonZeroU64;

use rustix::thread::{nanosleep, sched_yield, set_current_timer_slack};
use rustix::time::Timespec;

use crate::Nanos;

/// What to do in empty turns.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Idle {
    /// Poll on at once: the least latency, a whole core.
    #[default]
    Spin,
    /// Step down: for a core that others need too.
    Adaptive(AdaptiveConfig),
}

/// When adaptive idling takes which step.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct AdaptiveConfig {
    /// How long after the last event an empty turn is followed by a PAUSE.
    pub spin_us: u32,
    /// How long after the last event, if `spin_us` have passed, by a `sched_yield`.
    pub yield_us: u32,
    /// Longest sleep after that. The kernel adds a few microseconds of its own.
    pub max_sleep_us: u32,
}

impl Default for AdaptiveConfig {
    fn default() -> AdaptiveConfig {
        AdaptiveConfig { spin_us: 20, yield_us: 1_000, max_sleep_us: 500 }
    }
}

/// What to do after one empty turn.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Step {
    /// Nothing.
    Spin,
    /// The PAUSE instruction.
    Pause,
    /// Let others run.
    Yield,
    /// Sleep so many nanoseconds.
    Sleep(Nanos),
}

impl Step {
    /// Does it. True when the thread may have been off its core.
    #[inline]
    pub fn perform(self) -> bool {
        match self {
            Step::Spin => return false,
            Step::Pause => {
                std::hint::spin_loop();
                return false;
            }
            Step::Yield => sched_yield(),
            Step::Sleep(ns) => {
                let (sec, nsec) = (ns / 1_000_000_000, ns % 1_000_000_000);
                // A signal may cut it short: then the next turn comes early, no harm.
                let _ = nanosleep(&Timespec { tv_sec: sec as _, tv_nsec: nsec as _ });
            }
        }
        true
    }
}

/// Says after each empty turn which step comes.
#[derive(Debug)]
pub struct Idler {
    /// The configuration.
    idle: Idle,
    /// End of the first empty turn after the last event; none while there are events.
    since: Option<Nanos>,
}

/// A sleep lasts this part of the time since the last event.
const SLEEP_PART: Nanos = 16;
/// The shortest sleep worth its system call.
const SLEEP_MIN_NS: Nanos = 1_000;

impl Idler {
    /// As after an event.
    pub fn new(idle: Idle) -> Idler {
        Idler { idle, since: None }
    }

    /// Makes short sleeps short: by default the kernel may lengthen each by 50 us. For the thread
    /// that will sleep; a refusal only makes idling coarser.
    pub fn prepare_thread(&self) {
        if matches!(self.idle, Idle::Adaptive(_)) {
            let _ = set_current_timer_slack(NonZeroU64::new(1));
        }
    }

    /// Something was handled.
    #[inline]
    pub fn on_event(&mut self) {
        self.since = None;
    }

    /// An empty turn ended at `now`; `next_timer` is the earliest timer that anything waits for.
    #[inline]
    pub fn on_empty(&mut self, now: Nanos, next_timer: Option<Nanos>) -> Step {
        match self.idle {
            Idle::Spin => Step::Spin,
            Idle::Adaptive(config) => self.adapt(&config, now, next_timer),
        }
    }

    fn adapt(&mut self, config: &AdaptiveConfig, now: Nanos, next: Option<Nanos>) -> Step {
        let us = |us: u32| Nanos::from(us) * 1_000;
        let idle = now.saturating_sub(*self.since.get_or_insert(now));
        if idle < us(config.spin_us) {
            return Step::Pause;
        }
        if idle < us(config.yield_us) || config.max_sleep_us == 0 {
            return Step::Yield;
        }
        let ns = (idle / SLEEP_PART).max(SLEEP_MIN_NS).min(us(config.max_sleep_us));
        match next.map_or(ns, |at| ns.min(at.saturating_sub(now))) {
            0 => Step::Spin,
            ns => Step::Sleep(ns),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: AdaptiveConfig = AdaptiveConfig { spin_us: 2, yield_us: 3, max_sleep_us: 3 };

    #[test]
    fn spinning_never_rests() {
        let mut idler = Idler::new(Idle::Spin);
        assert!((0..10_000).all(|now| idler.on_empty(now, None) == Step::Spin));
        assert!(!Step::Spin.perform() && !Step::Pause.perform());
    }

    #[test]
    fn adaptive_idling_steps_down_with_time_and_any_event_resets_it() {
        let mut idler = Idler::new(Idle::Adaptive(CONFIG));
        for start in [0, 1_000_000] {
            let at = [0, 1_999, 2_000, 2_999, 3_000, 32_000, 47_000, 99_000];
            let steps = at.map(|ns| idler.on_empty(start + ns, None));
            let sleeps = [1000, 2000, 2937, 3000].map(Step::Sleep);
            assert_eq!(steps[..4], [Step::Pause, Step::Pause, Step::Yield, Step::Yield]);
            assert_eq!(steps[4..], sleeps);
            idler.on_event();
        }
    }

    #[test]
    fn one_long_turn_does_not_count_as_idle() {
        let mut idler = Idler::new(Idle::Adaptive(CONFIG));
        assert_eq!(idler.on_empty(1 << 40, None), Step::Pause);
        assert_eq!(idler.on_empty((1 << 40) + 2_000, None), Step::Yield);
    }

    #[test]
    fn no_sleep_runs_past_the_next_timer() {
        let mut idler = Idler::new(Idle::Adaptive(CONFIG));
        idler.on_empty(0, None);
        assert_eq!(idler.on_empty(10_000, Some(10_250)), Step::Sleep(250));
        assert_eq!(idler.on_empty(10_000, Some(10_000)), Step::Spin);
        assert_eq!(idler.on_empty(10_000, Some(50)), Step::Spin);
        assert_eq!(idler.on_empty(90_000, Some(1 << 40)), Step::Sleep(3000));
    }

    #[test]
    fn no_sleep_allowed_means_yielding() {
        let mut idler = Idler::new(Idle::Adaptive(AdaptiveConfig { max_sleep_us: 0, ..CONFIG }));
        assert_eq!((0..9_000).map(|now| idler.on_empty(now, None)).last(), Some(Step::Yield));
    }

    #[test]
    fn a_sleep_really_sleeps() {
        let start = std::time::Instant::now();
        assert!(Step::Sleep(2_000_000).perform() && Step::Yield.perform());
        assert!(start.elapsed() >= std::time::Duration::from_millis(2));
    }
}
