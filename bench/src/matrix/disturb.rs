//! Whether something else ran on the two cores during a run. Three witnesses:
//!
//! - the two processes' own clocks: both spin, so what is missing from the wall time of a run was
//!   taken from them (interrupts apart, which `/proc/stat` counts by core);
//! - steal in `/proc/stat`: the hypervisor gave the core to another machine;
//! - foreign load: what `/proc/stat` has for the two cores beyond what target, initiator and this
//!   program used. Interrupts are nobody's: those of a disk job are part of the work.
//!
//! Ticks are 10 ms: a run of a second tells shares to about one percent.

use std::path::Path;

use serde::Serialize;

use super::MatrixError;
use super::format::percent;

/// Steal on one of the two cores, of its time.
const STEAL_MAX: f64 = 0.01;
/// Foreign load, in cores.
const FOREIGN_MAX: f64 = 0.05;
/// What a spinning thread may miss of its core.
const LOST_MAX: f64 = 0.02;

/// One core's ticks since boot.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct CoreTicks {
    /// user, nice, system.
    work: u64,
    /// Interrupts, hard and soft.
    irq: u64,
    /// Given to other machines.
    steal: u64,
    /// All of it, idle and waiting included.
    total: u64,
}

/// What was used until now.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// The target's core and the initiator's.
    cores: [CoreTicks; 2],
    /// Ticks of our own processes, wherever they ran.
    own: u64,
}

/// Parts of the wall time of a run for which the two spinning threads were on their cores.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct OnCpu {
    /// The target's reactor, 0 to 1.
    pub target: f64,
    /// The initiator's thread, 0 to 1.
    pub initiator: f64,
}

/// The verdict on a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Disturbance {
    /// Steal on the core that had more of it, as a share of its time.
    pub steal: f64,
    /// CPU time of other processes on the two cores, in cores (0 to 2).
    pub foreign_cores: f64,
    /// What the target's reactor missed of its core.
    pub target_lost: f64,
    /// What the initiator missed of its core.
    pub initiator_lost: f64,
    /// What is beyond its limit, in words; empty for a run that was left alone.
    pub reasons: Vec<String>,
}

impl Snapshot {
    /// Reads `/proc` for the two cores, the target process, and this one with its ended children.
    pub fn take(cores: [usize; 2], target_pid: u32) -> Result<Snapshot, MatrixError> {
        let read =
            |path: &str| std::fs::read_to_string(path).map_err(MatrixError::file(Path::new(path)));
        let garbled = |path: &str| MatrixError::Machine(format!("{path}: not as expected"));
        let stat = read("/proc/stat")?;
        let core = |at: usize| core_ticks(&stat, at).ok_or_else(|| garbled("/proc/stat"));
        let [a, b] = cores;
        let target = format!("/proc/{target_pid}/stat");
        let used = process_ticks(&read(&target)?).ok_or_else(|| garbled(&target))?;
        let own = process_ticks(&read("/proc/self/stat")?);
        let own = own.ok_or_else(|| garbled("/proc/self/stat"))?;
        Ok(Snapshot { cores: [core(a)?, core(b)?], own: used + own })
    }

    /// What happened from `before` to `self`.
    pub fn since(&self, before: &Snapshot, on_cpu: OnCpu) -> Disturbance {
        let [a, b] = [0, 1].map(|at| self.cores[at].since(before.cores[at]));
        let work = (a.work + b.work).saturating_sub(self.own.saturating_sub(before.own));
        let wall = ((a.total + b.total) as f64 / 2.0).max(1.0);
        let lost =
            |on_cpu: f64, core: CoreTicks| (1.0 - on_cpu - share(core.irq, core)).clamp(0.0, 1.0);
        let mut found = Disturbance {
            steal: share(a.steal, a).max(share(b.steal, b)),
            foreign_cores: work as f64 / wall,
            target_lost: lost(on_cpu.target, a),
            initiator_lost: lost(on_cpu.initiator, b),
            reasons: vec![],
        };
        found.judge();
        found
    }
}

impl Disturbance {
    /// Whether the run stands apart.
    pub fn is_disturbed(&self) -> bool {
        !self.reasons.is_empty()
    }

    fn judge(&mut self) {
        let limits = [
            ("steal", self.steal, STEAL_MAX),
            ("foreign load", self.foreign_cores, FOREIGN_MAX),
            ("target off its core", self.target_lost, LOST_MAX),
            ("initiator off its core", self.initiator_lost, LOST_MAX),
        ];
        let over = limits.iter().filter(|(_, share, max)| share > max);
        self.reasons = over.map(|(what, share, _)| format!("{what} {}", percent(*share))).collect();
    }
}

impl CoreTicks {
    fn since(self, before: CoreTicks) -> CoreTicks {
        CoreTicks {
            work: self.work.saturating_sub(before.work),
            irq: self.irq.saturating_sub(before.irq),
            steal: self.steal.saturating_sub(before.steal),
            total: self.total.saturating_sub(before.total),
        }
    }
}

fn share(part: u64, core: CoreTicks) -> f64 {
    part as f64 / core.total.max(1) as f64
}

/// A core's line of `/proc/stat`: user, nice, system, idle, iowait, irq, softirq, steal (and two
/// that user and nice contain).
fn core_ticks(stat: &str, core: usize) -> Option<CoreTicks> {
    let name = format!("cpu{core}");
    let mut words = stat.lines().map(str::split_ascii_whitespace);
    let words = words.find_map(|mut words| (words.next()? == name).then_some(words))?;
    let ticks: Vec<u64> = words.take(8).map_while(|word| word.parse().ok()).collect();
    let [user, nice, system, _, _, irq, softirq, steal] = ticks[..] else { return None };
    Some(CoreTicks {
        work: user + nice + system,
        irq: irq + softirq,
        steal,
        total: ticks.iter().sum(),
    })
}

/// `/proc/PID/stat`: user and system time of the process and of its children that were waited for.
/// The name, in parentheses, may contain anything, so it is looked for from the end.
fn process_ticks(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(") ")?;
    // The state is the first word of the rest and field 3 of proc(5); utime is field 14.
    let times = rest.split_ascii_whitespace().skip(11).take(4).map(|word| word.parse::<u64>().ok());
    let times: Vec<u64> = times.collect::<Option<_>>()?;
    (times.len() == 4).then(|| times.iter().sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAT: &str = "\
cpu  333174 69203 61793 362974 1693 0 446 625 0 0
cpu0 100 20 30 400 5 6 7 8 0 0
cpu1 200 0 100 300 0 0 10 0 90 0
cpu10 1 2 3 4 5 6 7 8 9 10
intr 3322633 0 0 0
";

    fn core(work: u64, irq: u64, steal: u64, total: u64) -> CoreTicks {
        CoreTicks { work, irq, steal, total }
    }

    const SPIN: OnCpu = OnCpu { target: 1.0, initiator: 1.0 };

    #[test]
    fn a_core_s_line_is_found_and_summed() {
        assert_eq!(core_ticks(STAT, 0), Some(core(150, 13, 8, 576)));
        assert_eq!(core_ticks(STAT, 1), Some(core(300, 10, 0, 610)));
        assert_eq!(core_ticks(STAT, 2), None);
        assert_eq!(core_ticks("cpu0 1 2 x", 0), None);
        assert_eq!(core_ticks("", 0), None);
    }

    #[test]
    fn a_process_s_times_are_found_behind_any_name() {
        let rest = "S 1 2 3 4 -1 5 6 7 8 9 1000 200 30 4 20 0 1 0 415841";
        assert_eq!(process_ticks(&format!("77 (usurp) {rest}")), Some(1234));
        assert_eq!(process_ticks(&format!("77 (a) b) (c) {rest}")), Some(1234));
        assert_eq!(process_ticks("77 (usurp) S 1 2"), None);
        assert_eq!(process_ticks(""), None);
    }

    #[test]
    fn a_run_that_was_left_alone_has_no_reasons() {
        let before = Snapshot { cores: [core(10, 0, 0, 100); 2], own: 20 };
        let after = Snapshot { cores: [core(310, 0, 0, 400); 2], own: 620 };
        let found = after.since(&before, SPIN);
        assert_eq!((found.steal, found.foreign_cores), (0.0, 0.0));
        assert!(!found.is_disturbed());
    }

    #[test]
    fn what_others_used_is_foreign_load() {
        let before = Snapshot::default();
        // Of 600 ticks on two cores, 450 were ours.
        let after = Snapshot { cores: [core(300, 0, 0, 300); 2], own: 450 };
        let found = after.since(&before, SPIN);
        assert_eq!(found.foreign_cores, 0.5);
        assert_eq!(found.reasons, ["foreign load 50.0 %"]);
    }

    #[test]
    fn own_time_on_a_third_core_is_no_negative_load() {
        let after = Snapshot { cores: [core(300, 0, 0, 300); 2], own: 700 };
        assert_eq!(after.since(&Snapshot::default(), SPIN).foreign_cores, 0.0);
    }

    #[test]
    fn steal_counts_on_the_core_that_has_more_of_it() {
        let cores = [core(297, 0, 0, 300), core(285, 0, 15, 300)];
        let after = Snapshot { cores, own: 582 };
        let found = after.since(&Snapshot::default(), SPIN);
        assert_eq!(found.steal, 0.05);
        assert_eq!(found.reasons, ["steal 5.0 %"]);
    }

    #[test]
    fn a_thread_off_its_core_is_a_disturbance_but_interrupts_are_not() {
        let cores = [core(200, 100, 0, 300), core(300, 0, 0, 300)];
        let after = Snapshot { cores, own: 500 };
        let on_cpu = OnCpu { target: 0.67, initiator: 0.9 };
        let found = after.since(&Snapshot::default(), on_cpu);
        assert!(found.target_lost < 0.01, "{found:?}");
        assert_eq!(found.reasons, ["initiator off its core 10.0 %"]);
    }

    #[test]
    fn this_machine_s_proc_can_be_read() {
        let core = usurp_reactor::cpu::resolve(&usurp_reactor::cpu::CoreSpec::Auto).unwrap()[0];
        let own = std::process::id();
        let before = Snapshot::take([core, core], own).unwrap();
        let after = Snapshot::take([core, core], own).unwrap();
        assert!(after.own >= before.own);
        assert!(Snapshot::take([core, 4095], own).is_err());
        assert!(Snapshot::take([core, core], u32::MAX).is_err());
    }
}
