//! Cores and time: core lists, pinning, and a clock that costs a few nanoseconds.
//!
//! Owns the mask this process started with, and the calibration of the tsc: both read once. Never
//! pins a thread other than the caller's; reads nothing from the kernel on the I/O path.
//!
//! ```text
//!   "auto" | "numa:0" | "0-3,8" --parse_cores--> CoreSpec --resolve--> [0, 1, 2, 3, 8]
//!                                                  checked against the start mask
//!   now() = base_ns + ((rdtsc - base_tsc) * mult) >> SHIFT     (invariant tsc, else the vDSO)
//! ```

use std::fmt;
use std::io;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::thread::CpuSet;
use rustix::time::{ClockId, Timespec, clock_gettime};

use crate::Nanos;

/// `core_affinity` panics at ids from here on (the size of `cpu_set_t`).
pub const CORES_MAX: usize = CpuSet::MAX_CPU;

/// Which cores the reactors run on.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub enum CoreSpec {
    /// Every core this process may use (its cpuset when it started) but the first, if there are
    /// several: that one is left to the kernel and to the threads that no reactor is.
    #[default]
    Auto,
    /// These, in ascending order.
    List(Vec<usize>),
    /// Those of a NUMA node that this process may use.
    Numa(usize),
}

impl fmt::Display for CoreSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CoreSpec::Auto => write!(f, "auto"),
            CoreSpec::List(cores) => write!(f, "{}", List(cores)),
            CoreSpec::Numa(node) => write!(f, "numa:{node}"),
        }
    }
}

/// Why a core list can't be used, or a thread can't be pinned.
#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    /// The text is no core list.
    #[error("core list \"{text}\": {why}; right would be: auto, 0-3,8 or numa:0")]
    Syntax {
        /// What was given.
        text: String,
        /// What is wrong with it.
        why: String,
    },
    /// A list of no cores.
    #[error("no core is named")]
    Empty,
    /// A core this process may not use, or that does not exist.
    #[error("core {} can't be used by this process; available: {}", List(missing), List(available))]
    Missing {
        /// The cores named in vain.
        missing: Vec<usize>,
        /// What the process may use.
        available: Vec<usize>,
    },
    /// A core id beyond what an affinity mask holds.
    #[error("core {core} is beyond the largest possible id, {}", CORES_MAX - 1)]
    TooLarge {
        /// The id.
        core: usize,
    },
    /// The NUMA node does not exist, or has no core for us.
    #[error("NUMA node {node}: {why}")]
    Node {
        /// The node's number.
        node: usize,
        /// What is wrong.
        why: String,
    },
    /// The kernel refused the pin.
    #[error("could not pin to core {core}: {source}")]
    Pin {
        /// The core.
        core: usize,
        /// What the kernel said.
        source: io::Error,
    },
    /// The pin call succeeded but the thread's mask is another.
    #[error("pinned to core {core}, but the thread may run on {}", List(got))]
    NotPinned {
        /// The core.
        core: usize,
        /// The mask read back.
        got: Vec<usize>,
    },
    /// The affinity mask can't be read or set.
    #[error("affinity mask: {0}")]
    Mask(io::Error),
}

/// Writes cores as `0-3,8`.
struct List<'a>(&'a [usize]);

impl fmt::Display for List<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut at = 0;
        while at < self.0.len() {
            let first = self.0[at];
            let run = self.0[at..].iter().enumerate().take_while(|(i, c)| **c == first + i).count();
            let comma = if at == 0 { "" } else { "," };
            match run {
                1 => write!(f, "{comma}{first}")?,
                _ => write!(f, "{comma}{first}-{}", first + run - 1)?,
            }
            at += run;
        }
        if self.0.is_empty() { write!(f, "none") } else { Ok(()) }
    }
}

/// Reads `auto`, `numa:N` or `0-3,8` (also in brackets: `[0, 1]`).
pub fn parse_cores(text: &str) -> Result<CoreSpec, CpuError> {
    let plain = text.trim();
    if plain == "auto" {
        return Ok(CoreSpec::Auto);
    }
    let wrong = |why: String| CpuError::Syntax { text: text.to_string(), why };
    if let Some(node) = plain.strip_prefix("numa:") {
        let number = node.trim().parse();
        let number = number.map_err(|_| wrong(format!("\"{node}\" is no NUMA node number")))?;
        return Ok(CoreSpec::Numa(number));
    }
    let inner = plain.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    Ok(CoreSpec::List(parse_list(inner.unwrap_or(plain)).map_err(wrong)?))
}

/// Reads `0-3,8` into ascending ids.
fn parse_list(text: &str) -> Result<Vec<usize>, String> {
    let mut cores = Vec::new();
    for part in text.split(',').map(str::trim) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let number = |word: &str| -> Result<usize, String> {
            let id: usize =
                word.trim().parse().map_err(|_| format!("\"{part}\" is no core or range"))?;
            if id < CORES_MAX { Ok(id) } else { Err(format!("core {id} is too large")) }
        };
        let (first, last) = (number(first)?, number(last)?);
        if first > last {
            return Err(format!("range \"{part}\" runs backwards"));
        }
        cores.extend(first..=last);
    }
    cores.sort_unstable();
    if let Some(pair) = cores.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(format!("core {} is named twice", pair[0]));
    }
    Ok(cores)
}

/// The cores meant by `spec`, ascending, each checked to be usable by this process.
pub fn resolve(spec: &CoreSpec) -> Result<Vec<usize>, CpuError> {
    let available = start_cores()?;
    match spec {
        CoreSpec::Auto => Ok(spare_one(available)),
        CoreSpec::List(cores) => check_list(cores, available),
        CoreSpec::Numa(node) => {
            let path = format!("/sys/devices/system/node/node{node}/cpulist");
            let text = std::fs::read_to_string(path).map_err(|error| CpuError::Node {
                node: *node,
                why: format!("not on this machine ({error})"),
            })?;
            numa_cores(*node, text.trim(), &available)
        }
    }
}

/// All but the first, unless that is the only one.
fn spare_one(mut available: Vec<usize>) -> Vec<usize> {
    if available.len() > 1 {
        available.remove(0);
    }
    available
}

fn check_list(cores: &[usize], available: Vec<usize>) -> Result<Vec<usize>, CpuError> {
    if cores.is_empty() {
        return Err(CpuError::Empty);
    }
    let mut sorted = cores.to_vec();
    sorted.sort_unstable();
    if let Some(pair) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        let why = format!("core {} is named twice", pair[0]);
        return Err(CpuError::Syntax { text: List(&sorted).to_string(), why });
    }
    let missing: Vec<usize> = sorted.iter().filter(|c| !available.contains(c)).copied().collect();
    if missing.is_empty() { Ok(sorted) } else { Err(CpuError::Missing { missing, available }) }
}

fn numa_cores(node: usize, cpulist: &str, available: &[usize]) -> Result<Vec<usize>, CpuError> {
    // A node with memory only has an empty list.
    let all = if cpulist.is_empty() { Ok(Vec::new()) } else { parse_list(cpulist) };
    let all = all.map_err(|why| CpuError::Node { node, why })?;
    let ours: Vec<usize> = all.iter().filter(|c| available.contains(c)).copied().collect();
    if ours.is_empty() {
        let (all, available) = (List(&all), List(available));
        let why = format!("has cores {all}, this process may use {available}");
        return Err(CpuError::Node { node, why });
    }
    Ok(ours)
}

/// The mask of the main thread when first asked, ascending: what this process was given. Pinning
/// asks first, so a pin never narrows it.
pub fn start_cores() -> Result<Vec<usize>, CpuError> {
    static START: OnceLock<Vec<usize>> = OnceLock::new();
    if let Some(cores) = START.get() {
        return Ok(cores.clone());
    }
    // The main thread's, whichever thread asks.
    let cores = mask_of(Some(rustix::process::getpid()))?;
    Ok(START.get_or_init(|| cores).clone())
}

fn mask_of(thread: Option<rustix::process::Pid>) -> Result<Vec<usize>, CpuError> {
    let set = rustix::thread::sched_getaffinity(thread).map_err(|e| CpuError::Mask(e.into()))?;
    Ok((0..CORES_MAX).filter(|&core| set.is_set(core)).collect())
}

/// Pins the calling thread to `core` and verifies it by reading the affinity back.
pub fn pin_current(core: usize) -> Result<(), CpuError> {
    if core >= CORES_MAX {
        return Err(CpuError::TooLarge { core });
    }
    check_list(&[core], start_cores()?)?;
    if !core_affinity::set_for_current(core_affinity::CoreId { id: core }) {
        // The crate returns a bool only; errno is still that of its sched_setaffinity.
        return Err(CpuError::Pin { core, source: io::Error::last_os_error() });
    }
    let got = mask_of(None)?;
    if got == [core] { Ok(()) } else { Err(CpuError::NotPinned { core, got }) }
}

/// For helper threads: the caller may run on every core of the start mask but the reactors'. When
/// nothing would be left (as many reactors as cores) it keeps the whole start mask.
pub fn unpin_current_from(reactor_cores: &[usize]) -> Result<(), CpuError> {
    let start = start_cores()?;
    let left: Vec<usize> =
        start.iter().filter(|core| !reactor_cores.contains(core)).copied().collect();
    let mut set = CpuSet::new();
    let cores = if left.is_empty() { &start } else { &left };
    cores.iter().for_each(|&core| set.set(core));
    rustix::thread::sched_setaffinity(None, &set).map_err(|e| CpuError::Mask(e.into()))
}

/// CPU time that the calling thread has used. A syscall: for benches and statistics, not for turns.
pub fn thread_cpu_ns() -> u64 {
    nanos(clock_gettime(ClockId::ThreadCPUTime))
}

fn monotonic() -> Nanos {
    nanos(clock_gettime(ClockId::Monotonic))
}

fn nanos(time: Timespec) -> u64 {
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Fraction bits of the tsc's nanoseconds per tick.
const SHIFT: u32 = 32;

/// How long calibration takes, once per process. The two readings err by some 50 ns: 10 ppm.
const CALIBRATE: Duration = Duration::from_millis(5);

/// tsc ticks to nanoseconds.
#[derive(Clone, Copy, Debug)]
struct Tsc {
    /// The tick at `base_ns`.
    base_tsc: u64,
    /// CLOCK_MONOTONIC at `base_tsc`.
    base_ns: Nanos,
    /// Nanoseconds per tick, times 2^SHIFT.
    mult: u64,
}

/// Monotonic time, on the scale of `CLOCK_MONOTONIC`. A copy of the process's one calibration, so
/// that clocks of different reactors agree.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    /// The calibration; `None` when the tsc is not invariant: then each reading is a vDSO call.
    tsc: Option<Tsc>,
}

impl Clock {
    /// The first call in a process takes some milliseconds (calibration), later ones nothing.
    pub fn new() -> Clock {
        static TSC: OnceLock<Option<Tsc>> = OnceLock::new();
        Clock { tsc: *TSC.get_or_init(calibrate) }
    }

    /// The time now. Never goes back on one thread.
    #[inline]
    pub fn now(&self) -> Nanos {
        match self.tsc {
            Some(tsc) => tsc.nanos(arch::ticks()),
            None => monotonic(),
        }
    }

    /// True when reading costs one instruction, false when it costs a vDSO call.
    pub fn is_tsc(&self) -> bool {
        self.tsc.is_some()
    }
}

impl Default for Clock {
    fn default() -> Clock {
        Clock::new()
    }
}

impl Tsc {
    #[inline]
    fn nanos(&self, ticks: u64) -> Nanos {
        // Saturating: another core's tsc may lag by some ticks right after calibration.
        let ticks = ticks.saturating_sub(self.base_tsc);
        self.base_ns + ((ticks as u128 * self.mult as u128) >> SHIFT) as u64
    }
}

fn calibrate() -> Option<Tsc> {
    if !arch::has_invariant_tsc() {
        return None;
    }
    let (tsc_0, ns_0) = read_both();
    let start = Instant::now();
    while start.elapsed() < CALIBRATE {
        std::hint::spin_loop();
    }
    let (tsc_1, ns_1) = read_both();
    let (ticks, ns) = (tsc_1.checked_sub(tsc_0)?, ns_1.checked_sub(ns_0)?);
    if ticks == 0 || ns == 0 {
        return None;
    }
    let mult = u64::try_from(((ns as u128) << SHIFT) / ticks as u128).ok()?;
    Some(Tsc { base_tsc: tsc_1, base_ns: ns_1, mult })
}

/// Both clocks at (nearly) one instant: the closest of some tries, since one may be preempted.
fn read_both() -> (u64, Nanos) {
    let tries = (0..16).map(|_| {
        let before = arch::ticks();
        let ns = monotonic();
        let after = arch::ticks();
        (after.saturating_sub(before), before + after.saturating_sub(before) / 2, ns)
    });
    let best = tries.min_by_key(|(width, ..)| *width).expect("there were 16 tries");
    (best.1, best.2)
}

#[cfg(target_arch = "x86_64")]
mod arch {
    use std::arch::x86_64::{__cpuid, _rdtsc, CpuidResult};

    #[inline]
    pub fn ticks() -> u64 {
        // SAFETY: rdtsc is part of every x86_64; it touches no memory.
        unsafe { _rdtsc() }
    }

    /// CPUID 8000_0007h EDX bit 8: the tsc runs at one rate in all P-, C- and T-states.
    pub fn has_invariant_tsc() -> bool {
        cpuid(0x8000_0000).eax >= 0x8000_0007 && cpuid(0x8000_0007).edx & (1 << 8) != 0
    }

    #[allow(unused_unsafe, reason = "a safe function in newer compilers")]
    fn cpuid(leaf: u32) -> CpuidResult {
        // SAFETY: every x86_64 has cpuid; it touches no memory.
        unsafe { __cpuid(leaf) }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod arch {
    pub fn ticks() -> u64 {
        0
    }

    pub fn has_invariant_tsc() -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(text: &str) -> Vec<usize> {
        match parse_cores(text).unwrap() {
            CoreSpec::List(cores) => cores,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn core_lists_are_read() {
        assert_eq!(parse_cores(" auto ").unwrap(), CoreSpec::Auto);
        assert_eq!(parse_cores("numa:1").unwrap(), CoreSpec::Numa(1));
        assert_eq!(list("0-3,8"), [0, 1, 2, 3, 8]);
        assert_eq!(list("[1, 0]"), [0, 1]);
        assert_eq!(list("7"), [7]);
    }

    #[test]
    fn wrong_core_lists_are_refused_with_the_reason() {
        for (text, why) in [
            ("", "no core or range"),
            ("a", "no core or range"),
            ("0,", "no core or range"),
            ("3-1", "runs backwards"),
            ("0-3,2", "core 2 is named twice"),
            ("1024", "too large"),
            ("numa:x", "no NUMA node number"),
            ("-1", "no core or range"),
        ] {
            let error = parse_cores(text).unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn lists_are_written_as_ranges() {
        assert_eq!(List(&[0, 1, 2, 3, 8]).to_string(), "0-3,8");
        assert_eq!(List(&[5, 7]).to_string(), "5,7");
        assert_eq!(List(&[]).to_string(), "none");
        assert_eq!(CoreSpec::List(vec![1, 2]).to_string(), "1-2");
    }

    #[test]
    fn auto_is_the_cpuset_but_one_core() {
        assert_eq!(resolve(&CoreSpec::Auto).unwrap(), spare_one(start_cores().unwrap()));
        assert_eq!(spare_one(vec![2, 3, 9]), [3, 9]);
        assert_eq!(spare_one(vec![4]), [4]);
    }

    #[test]
    fn a_core_outside_is_named_with_those_available() {
        let all = start_cores().unwrap();
        let error = resolve(&CoreSpec::List(vec![all[0], 1023])).unwrap_err();
        let CpuError::Missing { missing, available } = &error else { panic!("{error}") };
        assert_eq!((missing, available), (&vec![1023], &all));
        assert!(error.to_string().contains("core 1023 can't be used"), "{error}");
        assert!(error.to_string().contains(&List(&all).to_string()), "{error}");
        assert!(matches!(resolve(&CoreSpec::List(vec![])), Err(CpuError::Empty)));
        let twice = CoreSpec::List(vec![all[0], all[0]]);
        assert!(resolve(&twice).unwrap_err().to_string().contains("named twice"));
    }

    #[test]
    fn numa_is_cut_to_the_cpuset() {
        assert_eq!(numa_cores(0, "0-3", &[1, 2, 9]).unwrap(), [1, 2]);
        let error = numa_cores(1, "4-7", &[0, 1]).unwrap_err().to_string();
        assert!(error.contains("NUMA node 1: has cores 4-7, this process may use 0-1"), "{error}");
        assert!(numa_cores(1, "", &[0]).is_err());
        assert!(matches!(resolve(&CoreSpec::Numa(999)), Err(CpuError::Node { node: 999, .. })));
    }

    #[test]
    fn pinning_is_verified_and_refusals_leave_the_mask_alone() {
        let pinned = std::thread::spawn(|| {
            let core = *start_cores().unwrap().last().unwrap();
            assert!(matches!(pin_current(5000), Err(CpuError::TooLarge { core: 5000 })));
            assert!(matches!(pin_current(1023), Err(CpuError::Missing { .. })));
            assert_eq!(mask_of(None).unwrap(), start_cores().unwrap());
            pin_current(core).unwrap();
            assert_eq!(mask_of(None).unwrap(), [core]);
            assert_eq!(start_cores().unwrap().last(), Some(&core));
            // Helpers: away from the reactors, or everywhere when nothing is left.
            unpin_current_from(&start_cores().unwrap()).unwrap();
            assert_eq!(mask_of(None).unwrap(), start_cores().unwrap());
            if start_cores().unwrap().len() > 1 {
                unpin_current_from(&[core]).unwrap();
                assert!(!mask_of(None).unwrap().contains(&core));
            }
        });
        pinned.join().unwrap();
    }

    #[test]
    fn the_clock_never_goes_back_and_follows_clock_monotonic() {
        let clock = Clock::new();
        let mut last = clock.now();
        for _ in 0..100_000 {
            let now = clock.now();
            assert!(now >= last);
            last = now;
        }
        std::thread::sleep(Duration::from_millis(50));
        // Reads the pair again when it was torn apart by preemption.
        let apart = (0..50).map(|_| clock.now().abs_diff(monotonic())).min().unwrap();
        assert!(apart < 1_000_000, "{apart} ns from CLOCK_MONOTONIC");
        println!("tsc: {}, {apart} ns from CLOCK_MONOTONIC", clock.is_tsc());
    }

    #[test]
    fn without_a_tsc_the_clock_is_clock_monotonic() {
        let clock = Clock { tsc: None };
        assert!(clock.now() <= monotonic() && !clock.is_tsc());
    }

    #[test]
    fn thread_cpu_time_grows_with_work() {
        let before = thread_cpu_ns();
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(5) {
            std::hint::spin_loop();
        }
        assert!(thread_cpu_ns() > before);
    }
}
