//! One run: `usurp-perf` as a child process, the program that a person would start, and its JSON.

use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, Stdio};

use serde::Deserialize;

use super::MatrixError;
use super::disturb::OnCpu;
use super::jobs::Job;

/// What a run is told beside its job.
#[derive(Copy, Clone, Debug)]
pub struct Order<'a> {
    /// The program.
    pub usurp_perf: &'a Path,
    /// Where the target listens.
    pub socket: &'a Path,
    /// The target, whose CPU time is read.
    pub target_pid: u32,
    /// The core of the initiator's thread.
    pub core: usize,
    /// Length of the run.
    pub seconds: f64,
    /// Seed of the addresses: the same in every bench, another in every round.
    pub seed: u64,
}

/// What is used of the JSON of `usurp-perf run`; see `report.rs` for the meanings.
#[derive(Clone, Debug, Deserialize)]
pub struct Answer {
    setup: Setup,
    seconds: f64,
    read: Option<Direction>,
    write: Option<Direction>,
    /// I/Os per second.
    pub iops: f64,
    cpu: Cpu,
    /// Commands sent again.
    pub retries: u64,
    /// Turns in which an I/O waited for a credit.
    pub credit_waits: u64,
}

#[derive(Clone, Debug, Deserialize)]
struct Setup {
    iodepth: u32,
}

#[derive(Clone, Debug, Deserialize)]
struct Direction {
    ios: u64,
    mib_per_s: f64,
    p50_us: f64,
    p99_us: f64,
}

#[derive(Clone, Debug, Deserialize)]
struct Cpu {
    initiator_ns_per_io: f64,
    initiator_busy_ns_per_io: f64,
    target_ns_per_io: Option<f64>,
    target_busy_ns_per_io: Option<f64>,
}

/// The figures of one run.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Figures {
    /// I/Os per second.
    pub iops: f64,
    /// MiB per second.
    pub mib_per_s: f64,
    /// Median latency.
    pub p50_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
    /// CPU time of the target's reactor per command; it spins, so all of its core's time.
    pub target_ns: f64,
    /// The busy part of it, if the target tells.
    pub target_busy_ns: Option<f64>,
    /// The initiator's time in turns that found something, per command.
    pub initiator_busy_ns: f64,
}

impl Answer {
    /// Reads and checks the output of `usurp-perf run --json -`.
    pub fn parse(text: &str, job: &Job) -> Result<Answer, String> {
        let answer: Answer = serde_json::from_str(text).map_err(|e| format!("said: {e}"))?;
        if answer.setup.iodepth != job.depth {
            let (got, want) = (answer.setup.iodepth, job.depth);
            return Err(format!("ran at depth {got} instead of {want}: too few credits"));
        }
        answer.direction()?;
        if answer.cpu.target_ns_per_io.is_none() {
            return Err("did not report the target's CPU time".into());
        }
        Ok(answer)
    }

    fn direction(&self) -> Result<&Direction, String> {
        match (&self.read, &self.write) {
            (Some(one), None) | (None, Some(one)) if one.ios > 0 => Ok(one),
            _ => Err("completed no I/O, or both reads and writes".into()),
        }
    }

    /// The figures.
    pub fn figures(&self) -> Figures {
        let direction = self.direction().expect("checked by parse");
        Figures {
            iops: self.iops,
            mib_per_s: direction.mib_per_s,
            p50_us: direction.p50_us,
            p99_us: direction.p99_us,
            target_ns: self.cpu.target_ns_per_io.expect("checked by parse"),
            target_busy_ns: self.cpu.target_busy_ns_per_io,
            initiator_busy_ns: self.cpu.initiator_busy_ns_per_io,
        }
    }

    /// How much of the run both threads were on their cores.
    pub fn on_cpu(&self) -> OnCpu {
        let direction = self.direction().expect("checked by parse");
        let share = |ns_per_io: f64| ns_per_io * direction.ios as f64 / (self.seconds * 1e9);
        OnCpu {
            target: share(self.cpu.target_ns_per_io.expect("checked by parse")),
            initiator: share(self.cpu.initiator_ns_per_io),
        }
    }
}

/// The arguments of a run, as a person would type them.
pub fn arguments(order: &Order, job: &Job) -> Vec<OsString> {
    let mut connect = OsString::from("shm:");
    connect.push(order.socket);
    let rest = format!(
        "run --lun {} --rw {} --bs {} --iodepth {} --runtime {} --core {} --spin --seed {} \
         --target-pid {} --json -",
        job.lun.number(),
        job.rw.word(),
        job.io_bytes,
        job.depth,
        order.seconds,
        order.core,
        order.seed,
        order.target_pid,
    );
    let rest = rest.split_ascii_whitespace().map(OsString::from);
    [OsString::from("--connect"), connect].into_iter().chain(rest).collect()
}

/// Runs a job to its end.
pub fn run(order: &Order, job: &Job) -> Result<Answer, MatrixError> {
    let failed = |why: String| MatrixError::Load { job: job.id(), why };
    let mut command = Command::new(order.usurp_perf);
    command.args(arguments(order, job)).stdin(Stdio::null());
    let output = command.output().map_err(MatrixError::file(order.usurp_perf))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(failed(format!("ended with {}: {}", output.status, said.trim())));
    }
    Answer::parse(&String::from_utf8_lossy(&output.stdout), job).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command as PerfCommand};
    use crate::matrix::jobs;
    use clap::Parser;

    const JOB: Job = jobs::PATH[1];

    fn json(depth: u32, direction: &str, cpu: &str) -> String {
        format!(
            r#"{{ "setup": {{ "iodepth": {depth}, "bs": 4096 }}, "seconds": 2.0,
                "{direction}": {{ "ios": 1000000, "bytes": 4096000000, "iops": 500000.0,
                    "mib_per_s": 1953.1, "mean_us": 61.0, "p50_us": 60.5, "p99_us": 80.25 }},
                "iops": 500000.0, "retries": 0, "credit_waits": 3,
                "cpu": {{ "initiator_ns_per_io": 1980.0, "initiator_busy_ns_per_io": 900.0 {cpu} }}
            }}"#
        )
    }

    #[test]
    fn an_answer_becomes_figures() {
        let text = json(32, "write", r#", "target_ns_per_io": 1900.0"#);
        let answer = Answer::parse(&text, &JOB).unwrap();
        let figures = answer.figures();
        assert_eq!((figures.iops, figures.p50_us, figures.p99_us), (500e3, 60.5, 80.25));
        assert_eq!((figures.target_ns, figures.target_busy_ns), (1900.0, None));
        let OnCpu { target, initiator } = answer.on_cpu();
        assert!((target - 0.95).abs() < 1e-9 && (initiator - 0.99).abs() < 1e-9);
    }

    #[test]
    fn a_busy_time_is_taken_when_the_target_tells_it() {
        let cpu = r#", "target_ns_per_io": 1900.0, "target_busy_ns_per_io": 700.0"#;
        let answer = Answer::parse(&json(32, "read", cpu), &JOB).unwrap();
        assert_eq!(answer.figures().target_busy_ns, Some(700.0));
    }

    #[test]
    fn what_cannot_be_used_is_refused_with_the_reason() {
        let refused = |text: &str, why: &str| {
            let error = Answer::parse(text, &JOB).unwrap_err();
            assert!(error.contains(why), "{error}");
        };
        let cpu = r#", "target_ns_per_io": 1900.0"#;
        refused(&json(31, "read", cpu), "depth 31 instead of 32: too few credits");
        refused(&json(32, "read", ""), "target's CPU time");
        refused(&json(32, "other", cpu), "completed no I/O");
        refused("", "EOF");
        refused("{}", "missing field");
    }

    #[test]
    fn usurp_perf_understands_every_job() {
        let order = Order {
            usurp_perf: Path::new("usurp-perf"),
            socket: Path::new("/a b/srp.sock"),
            target_pid: 7,
            core: 1,
            seconds: 1.5,
            seed: 3,
        };
        for job in jobs::PATH {
            let words = arguments(&order, job);
            let cli = Cli::try_parse_from([OsString::from("usurp-perf")].into_iter().chain(words));
            let PerfCommand::Run(args) = cli.unwrap().command else { panic!("not run") };
            assert_eq!((args.bs, args.iodepth), (u64::from(job.io_bytes), job.depth));
            assert_eq!((args.lun, args.core), (vec![job.lun.number()], Some(1)));
            assert_eq!((args.runtime, args.spin), (Some(1.5), true));
        }
    }

    #[test]
    fn what_usurp_perf_reports_is_what_is_read() {
        use crate::report::{Meter, Report, Setup};
        let mut read = Meter::default();
        read.record(1500, 4096);
        let setup = Setup {
            version: "0",
            target: "shm:/x".into(),
            luns: vec![0],
            rw: crate::pattern::Mode::RandRead,
            rwmixread: None,
            bs: 4096,
            iodepth: 32,
            channels: 1,
            range: 1 << 20,
            desc: "direct".into(),
            seed: 1,
            verify: false,
        };
        let mut report = Report::new(setup, 1.0, [&read, &Meter::default()], false);
        report.cpu.target_ns_per_io = Some(250.0);
        assert_eq!(Answer::parse(&report.json(), &JOB).unwrap().figures().target_ns, 250.0);
    }
}
