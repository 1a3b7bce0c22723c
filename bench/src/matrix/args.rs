//! The command line of `usurp-matrix`, and what it comes to on this machine.

use std::path::PathBuf;

use clap::Parser;
use usurp_reactor::cpu::{self, CoreSpec};

use super::MatrixError;
use super::jobs::{self, Job};

/// Rounds, and seconds a run.
pub const FULL: (u32, f64) = (5, 3.0);
/// The same with `--quick`.
pub const QUICK: (u32, f64) = (2, 1.5);

const AFTER: &str = "\
Writes latest.json and latest.md to --dir. docs/performance.md says how to read them.
Exit codes: 0 measured; 1 it did not work here, or the target did not end well; 2 usage.";

/// Measures the whole path: a target and an initiator, pinned apart, over shared memory.
#[derive(Parser, Debug, Clone)]
#[command(name = "usurp-matrix", version, about, after_help = AFTER)]
pub struct Args {
    /// Two short rounds: whether it works, not figures to quote
    #[arg(long)]
    pub quick: bool,
    /// Runs of each job [default: 5; with --quick 2]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: Option<u32>,
    /// Length of a run [default: 3; with --quick 1.5]
    #[arg(long, value_name = "S", value_parser = seconds)]
    pub seconds: Option<f64>,
    /// The target's core and the initiator's [default: the first two that this process may use]
    #[arg(long, value_name = "A,B", value_parser = core_pair)]
    pub cores: Option<(usize, usize)>,
    /// Only jobs whose name contains TEXT; several with commas
    #[arg(long, value_name = "TEXT", value_delimiter = ',')]
    pub only: Vec<String>,
    /// List the jobs and end
    #[arg(long)]
    pub list: bool,
    /// Folder of the results, the socket and the disk image
    #[arg(long, value_name = "DIR", default_value = "build/bench")]
    pub dir: PathBuf,
    /// Folder of `usurp` and `usurp-perf` [default: where this program is]
    #[arg(long, value_name = "DIR")]
    pub bin_dir: Option<PathBuf>,
}

/// What to do, all defaults filled in.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Runs of each job.
    pub rounds: u32,
    /// Length of a run.
    pub seconds: f64,
    /// The target's core.
    pub target_core: usize,
    /// The initiator's.
    pub initiator_core: usize,
    /// What to measure, at least one.
    pub jobs: Vec<Job>,
    /// Folder of all that is written.
    pub dir: PathBuf,
    /// The target.
    pub usurp: PathBuf,
    /// The load generator.
    pub usurp_perf: PathBuf,
    /// `--quick`, for the report.
    pub is_quick: bool,
}

impl Args {
    /// The plan, or why there can be none.
    pub fn plan(&self) -> Result<Plan, MatrixError> {
        let jobs = jobs::select(&self.only);
        if jobs.is_empty() {
            let why = format!("no job's name contains {}; see --list", self.only.join(" or "));
            return Err(MatrixError::Usage(why));
        }
        let (target_core, initiator_core) = self.two_cores()?;
        let bin_dir = self.find_bin_dir()?;
        let program = |name: &str| {
            let path = bin_dir.join(name);
            let build = "cargo build --release -p usurp-target -p usurp-bench";
            let missing = || MatrixError::Usage(format!("{}: not built: {build}", path.display()));
            if path.is_file() { Ok(path) } else { Err(missing()) }
        };
        let (rounds, seconds) = if self.quick { QUICK } else { FULL };
        Ok(Plan {
            rounds: self.rounds.unwrap_or(rounds),
            seconds: self.seconds.unwrap_or(seconds),
            target_core,
            initiator_core,
            jobs,
            dir: self.dir.clone(),
            usurp: program("usurp")?,
            usurp_perf: program("usurp-perf")?,
            is_quick: self.quick,
        })
    }

    fn two_cores(&self) -> Result<(usize, usize), MatrixError> {
        let Some((a, b)) = self.cores else {
            let all = cpu::resolve(&CoreSpec::Auto);
            let all = all.map_err(|e| MatrixError::Machine(e.to_string()))?;
            let [a, b, ..] = all[..] else {
                let why = "two cores are needed, one each for target and initiator";
                return Err(MatrixError::Machine(why.into()));
            };
            return Ok((a, b));
        };
        let given = cpu::resolve(&CoreSpec::List(vec![a, b]));
        given.map_err(|e| MatrixError::Usage(format!("--cores: {e}")))?;
        Ok((a, b))
    }

    fn find_bin_dir(&self) -> Result<PathBuf, MatrixError> {
        if let Some(dir) = &self.bin_dir {
            return Ok(dir.clone());
        }
        let own = std::env::current_exe();
        let own = own.map_err(|e| MatrixError::Machine(format!("own path: {e}")))?;
        Ok(own.parent().expect("a program lies in a folder").to_path_buf())
    }
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(n) if (0.1..=3600.0).contains(&n) => Ok(n),
        _ => Err("a number of seconds from 0.1 to 3600".into()),
    }
}

fn core_pair(text: &str) -> Result<(usize, usize), String> {
    let pair = text.split_once(',').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
    match pair {
        Some((a, b)) if a != b => Ok((a, b)),
        _ => Err("two different cores, the target's first, as in 0,1".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Args, String> {
        let words = std::iter::once("usurp-matrix").chain(line.split_ascii_whitespace());
        Args::try_parse_from(words).map_err(|e| e.to_string())
    }

    /// A folder in which both programs seem to be.
    fn bin_dir() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for name in ["usurp", "usurp-perf"] {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        dir
    }

    fn plan(line: &str) -> Result<Plan, MatrixError> {
        let dir = bin_dir();
        parse(&format!("{line} --bin-dir {}", dir.path().display())).unwrap().plan()
    }

    #[test]
    fn the_command_line_is_well_formed() {
        <Args as clap::CommandFactory>::command().debug_assert();
    }

    #[test]
    fn defaults_and_quick_differ_in_rounds_and_length() {
        if cpu::resolve(&CoreSpec::Auto).unwrap().len() < 2 {
            println!("skipped: a single core");
            return;
        }
        let full = plan("").unwrap();
        assert_eq!((full.rounds, full.seconds), FULL);
        assert_ne!(full.target_core, full.initiator_core);
        let quick = plan("--quick").unwrap();
        assert_eq!((quick.rounds, quick.seconds), QUICK);
        let own = plan("--quick --rounds 7 --only uring").unwrap();
        assert_eq!((own.rounds, own.seconds, own.jobs.len()), (7, 1.5, 2));
    }

    #[test]
    fn what_cannot_be_meant_is_refused() {
        for (line, why) in [
            ("--cores 0", "two different cores"),
            ("--cores 1,1", "two different cores"),
            ("--cores a,b", "two different cores"),
            ("--rounds 0", "1..=100"),
            ("--seconds 0", "0.1 to 3600"),
            ("--seconds nan", "0.1 to 3600"),
            ("extra", "unexpected argument"),
        ] {
            let text = parse(line).expect_err(line);
            assert!(text.contains(why), "{line}: {text}");
        }
    }

    #[test]
    fn a_plan_that_cannot_be_is_refused_with_the_reason() {
        let refused = |error: MatrixError, why: &str| {
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains(why), "{error}");
        };
        refused(plan("--only nvme").unwrap_err(), "no job's name contains nvme");
        refused(plan("--cores 0,1023").unwrap_err(), "core 1023 can't be used");
        let nowhere = parse("--bin-dir /nowhere").unwrap().plan();
        if cpu::resolve(&CoreSpec::Auto).unwrap().len() > 1 {
            refused(nowhere.unwrap_err(), "/nowhere/usurp: not built");
        }
    }
}
