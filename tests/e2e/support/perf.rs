//! `usurp-perf` as a process.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::process::{self, Lines};
use super::target::Target;
use super::{PATIENCE, bins};

/// A running `usurp-perf`; killed when it is dropped.
pub struct Perf {
    /// Its process.
    pub child: Child,
    /// Its standard output.
    pub out: Lines,
    /// Its standard error.
    pub err: Lines,
}

/// How a `usurp-perf` ended.
#[derive(Debug)]
pub struct Ended {
    /// Its exit code.
    pub code: Option<i32>,
    /// Its standard output.
    pub out: String,
    /// Its standard error.
    pub err: String,
}

impl Perf {
    /// Starts it; `words` are split at blanks.
    pub fn start(target: &Target, words: &str) -> Perf {
        let args: Vec<&str> = words.split_ascii_whitespace().collect();
        Perf::start_args(&target.address(), &args)
    }

    fn start_args(address: &str, args: &[&str]) -> Perf {
        let mut command = Command::new(bins::program("usurp-perf"));
        command.args(["--connect", address]).args(args);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("usurp-perf starts");
        let out = Lines::of(child.stdout.take().expect("it is a pipe"));
        let err = Lines::of(child.stderr.take().expect("it is a pipe"));
        Perf { child, out, err }
    }

    /// Starts a load on LUN 0 and returns when it runs.
    pub fn load(target: &Target, words: &str) -> Perf {
        let mut perf = Perf::start(target, &format!("run --progress {words}"));
        // The first line of progress comes after a second of load.
        perf.err.wait_for(" IOPS", PATIENCE);
        perf
    }

    /// Waits for its end.
    pub fn ended(mut self, patience: Duration) -> Ended {
        let Some(status) = process::wait(&mut self.child, patience) else {
            panic!("usurp-perf does not end in {patience:?}:\n{}", self.err.so_far());
        };
        Ended { code: status.code(), out: self.out.all(), err: self.err.all() }
    }
}

impl Drop for Perf {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs it to its end.
pub fn perf(target: &Target, words: &str) -> Ended {
    Perf::start(target, words).ended(PATIENCE)
}

/// Runs it to its end, and wants exit code 0; gives its standard output.
pub fn perf_ok(target: &Target, words: &str) -> String {
    let ended = perf(target, words);
    assert_eq!(ended.code, Some(0), "{words}: {ended:?}");
    ended.out
}
