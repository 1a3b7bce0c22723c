//! What a bench leaves behind: every run with the state of the machine around it, and the summary.
//! `latest.json` is this, with [`SCHEMA`] to tell a reader by which rules.

use serde::Serialize;

use super::copies::Copies;
use super::disturb::Disturbance;
use super::drive::Figures;
#[cfg(test)]
use super::jobs::Job;
use super::machine::Machine;
use super::probe::Filing;
use super::rows::Row;
use super::stats::Spread;

/// Version of the JSON: grows when a field changes its meaning, not when one is added.
pub const SCHEMA: u32 = 1;

/// One run.
#[derive(Clone, Debug, Serialize)]
pub struct Run {
    /// What it belongs to: `path` is target and initiator together.
    pub group: &'static str,
    /// The job's id.
    pub job: String,
    /// From 1.
    pub round: u32,
    /// I/Os per second.
    pub iops: f64,
    /// MiB per second.
    pub mib_per_s: f64,
    /// Median latency.
    pub p50_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
    /// CPU time of the target's reactor per command; all of its core's time, as it spins.
    pub target_ns_per_cmd: f64,
    /// The busy part of it, if the target tells.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_busy_ns_per_cmd: Option<f64>,
    /// The initiator's time in turns that found something, per command.
    pub initiator_busy_ns_per_cmd: f64,
    /// Commands sent again.
    pub retries: u64,
    /// Turns in which an I/O waited for a credit.
    pub credit_waits: u64,
    /// Cache-line round trip before the run, nanoseconds.
    pub round_trip_ns_before: Option<f64>,
    /// And after.
    pub round_trip_ns_after: Option<f64>,
    /// Where the run counts.
    pub filing: Filing,
    /// Whether it was left alone.
    pub disturbance: Disturbance,
}

impl Run {
    /// From the figures of a run; the state of the machine is for the caller to fill in.
    pub fn new(job: String, round: u32, figures: &Figures) -> Run {
        Run {
            group: "path",
            job,
            round,
            iops: figures.iops,
            mib_per_s: figures.mib_per_s,
            p50_us: figures.p50_us,
            p99_us: figures.p99_us,
            target_ns_per_cmd: figures.target_ns,
            target_busy_ns_per_cmd: figures.target_busy_ns,
            initiator_busy_ns_per_cmd: figures.initiator_busy_ns,
            retries: 0,
            credit_waits: 0,
            round_trip_ns_before: None,
            round_trip_ns_after: None,
            filing: Filing::Unknown,
            disturbance: Disturbance::default(),
        }
    }

    /// A run as it might have been.
    #[cfg(test)]
    pub fn sample(job: &Job, iops: f64, filing: Filing, is_disturbed: bool) -> Run {
        let figures = Figures {
            iops,
            mib_per_s: iops / 256.0,
            p50_us: 1e6 / iops,
            p99_us: 2e6 / iops,
            target_ns: 1e9 / iops,
            target_busy_ns: None,
            initiator_busy_ns: 100.0,
        };
        let mut run = Run::new(job.id(), 1, &figures);
        run.filing = filing;
        if is_disturbed {
            run.disturbance.reasons.push("steal 5.0 %".into());
        }
        run
    }
}

/// A start with one null LUN and otherwise defaults: for the time and the memory that it takes.
pub const BARE: &str = "bare";
/// A start with the LUNs of the jobs.
pub const BENCH: &str = "bench";

/// One start of a target.
#[derive(Clone, Debug, Serialize)]
pub struct Start {
    /// [`BARE`] or [`BENCH`].
    pub kind: &'static str,
    /// From 1.
    pub round: u32,
    /// From the start of the process until logins are accepted.
    pub ready_ms: f64,
    /// Resident memory at that moment.
    pub resident_kib: u64,
    /// The same without arenas.
    pub resident_without_arenas_kib: u64,
    /// Without arenas, after the jobs of the round; not for `bare`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resident_without_arenas_after_kib: Option<u64>,
}

/// The machine's copy, over the rounds.
#[derive(Clone, Debug, Serialize)]
pub struct CopySpreads {
    /// 4 KiB, hot.
    pub hot_4k_ns: Spread,
    /// 4 KiB, cold.
    pub cold_4k_ns: Spread,
    /// 128 KiB, cold.
    pub cold_128k_ns: Spread,
    /// What the memory is made of.
    pub memory: String,
}

impl CopySpreads {
    /// None of no rounds.
    pub fn of(rounds: &[Copies], memory: String) -> Option<CopySpreads> {
        Some(CopySpreads {
            hot_4k_ns: Spread::of(rounds.iter().map(|c| c.hot_4k_ns))?,
            cold_4k_ns: Spread::of(rounds.iter().map(|c| c.cold_4k_ns))?,
            cold_128k_ns: Spread::of(rounds.iter().map(|c| c.cold_128k_ns))?,
            memory,
        })
    }
}

/// How the bench was set up.
#[derive(Clone, Debug, Serialize)]
pub struct Settings {
    /// `--quick`.
    pub quick: bool,
    /// Runs of each job.
    pub rounds: u32,
    /// Length of a run.
    pub seconds: f64,
    /// The target's core.
    pub target_core: usize,
    /// The initiator's.
    pub initiator_core: usize,
}

/// All of it.
#[derive(Clone, Debug, Serialize)]
pub struct Record {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Version of this program.
    pub version: &'static str,
    /// What it ran on.
    pub machine: Machine,
    /// How.
    pub settings: Settings,
    /// How long it took.
    pub elapsed_s: f64,
    /// The machine's copy.
    pub copies: Option<CopySpreads>,
    /// The summary, as in the table.
    pub rows: Vec<Row>,
    /// Every start.
    pub starts: Vec<Start>,
    /// Every run.
    pub runs: Vec<Run>,
    /// Warnings of the target, each once.
    pub target_warnings: Vec<String>,
}

impl Record {
    /// As JSON, ending in a newline.
    pub fn json(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).expect("plain data");
        text.push('\n');
        text
    }

    /// Runs during which something else used the cores.
    pub fn disturbed(&self) -> usize {
        self.runs.iter().filter(|run| run.disturbance.is_disturbed()).count()
    }

    /// Runs that were filed so.
    pub fn count(&self, filing: Filing) -> usize {
        self.runs.iter().filter(|run| run.filing == filing).count()
    }
}
