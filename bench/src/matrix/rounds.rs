//! The bench itself: rounds of starts, jobs and copies, each run between two probes.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::Path;
use std::time::Instant;

use rustix::fs::{FlockOperation, flock};
use usurp_reactor::mem::Backing;

use super::args::Plan;
use super::copies::{Copies, CopyBench};
use super::disturb::Snapshot;
use super::drive::{self, Order};
use super::jobs::{Job, Lun};
use super::machine::Machine;
use super::probe::{self, Filing};
use super::record::{BARE, BENCH, CopySpreads, Record, Run, SCHEMA, Settings, Start};
use super::server::{Files, Server};
use super::{MatrixError, format, guard, rows};

/// By how many jobs the order of a round is shifted against the one before, so that no job always
/// follows the same one.
const SHIFT: usize = 3;
/// How many jobs of a round are run once more because the cores changed places: bounds the time.
const REPEATS_MAX: usize = 4;
/// What a run takes beside its length: start, probes, end. Only for the estimate.
const OVERHEAD_S: f64 = 0.3;

/// What came together so far.
struct Bench<'a> {
    /// What to do.
    plan: &'a Plan,
    /// The target's files.
    files: Files,
    /// The machine's copy; None where there is no memory for it.
    copy_bench: Option<CopyBench>,
    /// Of each round.
    copies: Vec<Copies>,
    /// Of each target.
    starts: Vec<Start>,
    /// Of each job in each round.
    runs: Vec<Run>,
}

/// Measures everything. Progress goes to standard error.
pub fn measure(plan: &Plan) -> Result<Record, MatrixError> {
    let begun = Instant::now();
    let machine = Machine::read();
    fs::create_dir_all(&plan.dir).map_err(MatrixError::file(&plan.dir))?;
    let _lock = lock(&plan.dir)?;
    let files = Files::in_dir(&plan.dir);
    fs::write(&files.log, "").map_err(MatrixError::file(&files.log))?;
    guard::watch()?;
    say_what_comes(plan, &machine);
    let copy_bench = CopyBench::new();
    if let Err(error) = &copy_bench {
        eprintln!("usurp-matrix: {error}; going on without");
    }
    let mut bench = Bench {
        plan,
        files,
        copy_bench: copy_bench.ok(),
        copies: vec![],
        starts: vec![],
        runs: vec![],
    };
    for round in 1..=plan.rounds {
        bench.round(round)?;
    }
    Ok(bench.record(machine, begun))
}

/// One bench at a time in a folder: held as long as the file is open.
fn lock(dir: &Path) -> Result<File, MatrixError> {
    let path = dir.join("lock");
    let file = File::create(&path).map_err(MatrixError::file(&path))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => {
            let why = format!("another bench is running in {}", dir.display());
            Err(MatrixError::Machine(why))
        }
        Err(error) => Err(MatrixError::file(&path)(error.into())),
    }
}

fn say_what_comes(plan: &Plan, machine: &Machine) {
    let seconds = f64::from(plan.rounds) * plan.jobs.len() as f64 * (plan.seconds + OVERHEAD_S);
    eprintln!(
        "usurp-matrix: {}\nusurp-matrix: {} jobs x {} rounds x {} s, about {:.1} minutes; \
         target on core {}, initiator on core {}",
        machine.line(),
        plan.jobs.len(),
        plan.rounds,
        plan.seconds,
        seconds / 60.0,
        plan.target_core,
        plan.initiator_core,
    );
}

impl Bench<'_> {
    fn round(&mut self, round: u32) -> Result<(), MatrixError> {
        let (bare, start) = self.start(BARE, &[Lun::Null], round)?;
        bare.stop()?;
        self.starts.push(start);
        let (server, mut start) = self.start(BENCH, &luns(&self.plan.jobs), round)?;
        let mut again = self.runs(&server, &in_turn(&self.plan.jobs, round), round)?;
        again.truncate(REPEATS_MAX);
        self.runs(&server, &again, round)?;
        if let Some(bench) = &mut self.copy_bench {
            self.copies.push(bench.measure(self.plan.initiator_core)?);
        }
        start.resident_without_arenas_after_kib = Some(server.memory()?.other_kib());
        self.starts.push(start);
        server.stop()
    }

    fn start(
        &self,
        kind: &'static str,
        luns: &[Lun],
        round: u32,
    ) -> Result<(Server, Start), MatrixError> {
        let server = Server::start(self.plan, &self.files, luns)?;
        let memory = server.memory()?;
        let start = Start {
            kind,
            round,
            ready_ms: server.start.as_secs_f64() * 1e3,
            resident_kib: memory.resident_kib,
            resident_without_arenas_kib: memory.other_kib(),
            resident_without_arenas_after_kib: None,
        };
        Ok((server, start))
    }

    /// Runs jobs one after the other; those whose run counts nowhere.
    fn runs(&mut self, server: &Server, jobs: &[Job], round: u32) -> Result<Vec<Job>, MatrixError> {
        let mut lost = Vec::new();
        for job in jobs {
            let run = self.run(server, job, round)?;
            self.tell(job, &run);
            if run.filing.placement().is_none() {
                lost.push(*job);
            }
            self.runs.push(run);
        }
        Ok(lost)
    }

    /// One run with the state of the machine around it.
    fn run(&self, server: &Server, job: &Job, round: u32) -> Result<Run, MatrixError> {
        let plan = self.plan;
        let probe = || probe::round_trip_ns(plan.target_core, plan.initiator_core);
        let cores = [plan.target_core, plan.initiator_core];
        let order = Order {
            usurp_perf: &plan.usurp_perf,
            socket: &self.files.socket,
            target_pid: server.pid(),
            core: plan.initiator_core,
            seconds: plan.seconds,
            seed: u64::from(round),
        };
        let before = probe()?;
        let snapshot = Snapshot::take(cores, server.pid())?;
        let answer = drive::run(&order, job)?;
        let disturbance = Snapshot::take(cores, server.pid())?.since(&snapshot, answer.on_cpu());
        let after = probe()?;
        let mut run = Run::new(job.id(), round, &answer.figures());
        run.retries = answer.retries;
        run.credit_waits = answer.credit_waits;
        run.round_trip_ns_before = before;
        run.round_trip_ns_after = after;
        run.filing = Filing::of(before, after);
        run.disturbance = disturbance;
        Ok(run)
    }

    /// A line of progress.
    fn tell(&self, job: &Job, run: &Run) {
        let ns = |probed: Option<f64>| probed.map_or("?".into(), |ns| format!("{ns:.0}"));
        let disturbed = match run.disturbance.is_disturbed() {
            true => format!("; disturbed: {}", run.disturbance.reasons.join(", ")),
            false => String::new(),
        };
        eprintln!(
            "round {}/{} {:<24} {:>8} IOPS, p50 {} us, {} ({}/{} ns){disturbed}",
            run.round,
            self.plan.rounds,
            job.id(),
            format::rate(run.iops),
            format::figure(run.p50_us),
            run.filing.word(),
            ns(run.round_trip_ns_before),
            ns(run.round_trip_ns_after),
        );
    }

    fn record(self, machine: Machine, begun: Instant) -> Record {
        let plan = self.plan;
        let memory = self.copy_bench.as_ref().map(|bench| backing(bench.backing()));
        let log = fs::read_to_string(&self.files.log).unwrap_or_default();
        Record {
            schema: SCHEMA,
            version: env!("CARGO_PKG_VERSION"),
            machine,
            settings: Settings {
                quick: plan.is_quick,
                rounds: plan.rounds,
                seconds: plan.seconds,
                target_core: plan.target_core,
                initiator_core: plan.initiator_core,
            },
            elapsed_s: begun.elapsed().as_secs_f64(),
            copies: CopySpreads::of(&self.copies, memory.unwrap_or_default()),
            rows: rows::rows(&plan.jobs, &self.runs),
            starts: self.starts,
            runs: self.runs,
            target_warnings: warnings(&log),
        }
    }
}

/// The LUNs that the jobs use, each once, in the order of their numbers.
fn luns(jobs: &[Job]) -> Vec<Lun> {
    let mut luns: Vec<Lun> = jobs.iter().map(|job| job.lun).collect();
    luns.sort_by_key(|lun| lun.number());
    luns.dedup();
    luns
}

/// The jobs in the order of a round.
fn in_turn(jobs: &[Job], round: u32) -> Vec<Job> {
    let mut jobs = jobs.to_vec();
    let by = (round as usize - 1) * SHIFT % jobs.len();
    jobs.rotate_left(by);
    jobs
}

fn backing(backing: &Backing) -> String {
    match backing {
        Backing::Huge { page } => format!("huge pages of {}", format::bytes(*page as u64)),
        Backing::Ordinary { .. } => "ordinary pages, transparent huge ones if there are any".into(),
    }
}

/// The target's lines, each once, without their time stamps.
fn warnings(log: &str) -> Vec<String> {
    let stamped = |line: &str| line.starts_with(|c: char| c.is_ascii_digit());
    let text = |line: &str| match line.split_once(' ') {
        Some((_, rest)) if stamped(line) => rest.trim().to_string(),
        _ => line.trim().to_string(),
    };
    let lines: BTreeSet<String> = log.lines().map(text).filter(|line| !line.is_empty()).collect();
    lines.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::matrix::{args, jobs};

    #[test]
    fn every_round_has_every_job_in_another_order() {
        let orders: Vec<Vec<String>> =
            (1..=5).map(|round| in_turn(jobs::PATH, round).iter().map(Job::id).collect()).collect();
        let sorted = |order: &Vec<String>| {
            let mut order = order.clone();
            order.sort();
            order
        };
        assert!(orders.iter().all(|order| sorted(order) == sorted(&orders[0])));
        let firsts: BTreeSet<&String> = orders.iter().map(|order| &order[0]).collect();
        assert_eq!(firsts.len(), 5);
        assert_eq!(in_turn(&jobs::PATH[..1], 7).len(), 1);
    }

    #[test]
    fn both_lengths_stay_within_their_minutes() {
        let longest = |(rounds, seconds): (u32, f64)| {
            // A start takes 2 s on a busy machine, and there are two a round.
            f64::from(rounds)
                * ((jobs::PATH.len() + REPEATS_MAX) as f64 * (seconds + OVERHEAD_S) + 4.0)
        };
        assert!(longest(args::FULL) < 300.0 && longest(args::QUICK) < 80.0);
    }

    #[test]
    fn two_benches_do_not_share_a_folder() {
        let dir = tempfile::tempdir().unwrap();
        let first = lock(dir.path()).unwrap();
        let error = lock(dir.path()).unwrap_err().to_string();
        assert!(error.contains("another bench is running"), "{error}");
        drop(first);
        lock(dir.path()).unwrap();
    }

    #[test]
    fn only_luns_that_are_used_are_served() {
        assert_eq!(luns(jobs::PATH), [Lun::Null, Lun::Malloc, Lun::Uring]);
        assert_eq!(luns(&jobs::select(&["128k".into()])), [Lun::Malloc]);
    }

    #[test]
    fn a_warning_of_every_start_is_told_once() {
        let log = "2026-11-29T21:33:24.7Z  WARN usurp_bdev: no direct I/O\n\n\
                   2026-11-29T21:33:29.1Z  WARN usurp_bdev: no direct I/O\nplain words\n";
        assert_eq!(warnings(log), ["WARN usurp_bdev: no direct I/O", "plain words"]);
    }
}
