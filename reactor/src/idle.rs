//! What a reactor does when a turn found nothing: spin on, or step down gently. No interrupts.
//!
//! ```text
//!            N empty turns      M turns         K turns
//!   adaptive: spin ----------> PAUSE ------> sched_yield ------> sleep 1 us, 2, 4 ... max_sleep_us
//!               ^                                                  (never past the next timer)
//!               `-------------- any event -----------------------------'
//! ```
//! Owns the count of empty turns. `Idler` decides and computes nothing else, so the steps are
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
    /// Empty turns that spin as if nothing were (N).
    pub spin_turns: u32,
    /// Empty turns after them that do a PAUSE each (M).
    pub pause_turns: u32,
    /// Empty turns after them that do a `sched_yield` each (K).
    pub yield_turns: u32,
    /// Longest sleep. The kernel adds a few microseconds of its own.
    pub max_sleep_us: u32,
}

impl Default for AdaptiveConfig {
    /// Some 100 us of spinning and pausing, a few yields, then sleeps of up to 50 us.
    fn default() -> AdaptiveConfig {
        AdaptiveConfig { spin_turns: 1000, pause_turns: 1000, yield_turns: 16, max_sleep_us: 50 }
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

/// Counts empty turns and says which step comes.
#[derive(Debug)]
pub struct Idler {
    /// The configuration.
    idle: Idle,
    /// Empty turns since the last event; stays at the largest value.
    empty: u32,
    /// The next sleep; doubles up to the configured longest.
    sleep_ns: Nanos,
}

/// The first sleep after an event.
const FIRST_SLEEP_NS: Nanos = 1_000;

impl Idler {
    /// As after an event.
    pub fn new(idle: Idle) -> Idler {
        Idler { idle, empty: 0, sleep_ns: FIRST_SLEEP_NS }
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
        self.empty = 0;
        self.sleep_ns = FIRST_SLEEP_NS;
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
        self.empty = self.empty.saturating_add(1);
        let pause_from = config.spin_turns;
        let yield_from = pause_from.saturating_add(config.pause_turns);
        let sleep_from = yield_from.saturating_add(config.yield_turns);
        if self.empty <= pause_from {
            return Step::Spin;
        }
        if self.empty <= yield_from {
            return Step::Pause;
        }
        if self.empty <= sleep_from || config.max_sleep_us == 0 {
            return Step::Yield;
        }
        let longest = config.max_sleep_us as Nanos * 1_000;
        let ns = self.sleep_ns.min(longest);
        self.sleep_ns = (self.sleep_ns * 2).min(longest);
        match next.map_or(ns, |at| ns.min(at.saturating_sub(now))) {
            0 => Step::Spin,
            ns => Step::Sleep(ns),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: AdaptiveConfig =
        AdaptiveConfig { spin_turns: 2, pause_turns: 1, yield_turns: 1, max_sleep_us: 3 };

    #[test]
    fn spinning_never_rests() {
        let mut idler = Idler::new(Idle::Spin);
        assert!((0..10_000).all(|now| idler.on_empty(now, None) == Step::Spin));
        assert!(!Step::Spin.perform() && !Step::Pause.perform());
    }

    #[test]
    fn adaptive_idling_steps_down_and_any_event_resets_it() {
        let mut idler = Idler::new(Idle::Adaptive(CONFIG));
        for _ in 0..2 {
            let steps: Vec<Step> = (0..8).map(|_| idler.on_empty(0, None)).collect();
            let sleeps = [1000, 2000, 3000, 3000].map(Step::Sleep);
            assert_eq!(steps[..4], [Step::Spin, Step::Spin, Step::Pause, Step::Yield]);
            assert_eq!(steps[4..], sleeps);
            idler.on_event();
        }
    }

    #[test]
    fn no_sleep_runs_past_the_next_timer() {
        let mut idler = Idler::new(Idle::Adaptive(CONFIG));
        assert_eq!((0..4).map(|_| idler.on_empty(0, None)).last(), Some(Step::Yield));
        assert_eq!(idler.on_empty(100, Some(350)), Step::Sleep(250));
        assert_eq!(idler.on_empty(100, Some(100)), Step::Spin);
        assert_eq!(idler.on_empty(100, Some(50)), Step::Spin);
        assert_eq!(idler.on_empty(100, Some(1 << 40)), Step::Sleep(3000));
    }

    #[test]
    fn no_sleep_allowed_means_yielding() {
        let mut idler = Idler::new(Idle::Adaptive(AdaptiveConfig { max_sleep_us: 0, ..CONFIG }));
        assert_eq!((0..9).map(|_| idler.on_empty(0, None)).last(), Some(Step::Yield));
    }

    #[test]
    fn a_sleep_really_sleeps() {
        let start = std::time::Instant::now();
        assert!(Step::Sleep(2_000_000).perform() && Step::Yield.perform());
        assert!(start.elapsed() >= std::time::Duration::from_millis(2));
    }
}
