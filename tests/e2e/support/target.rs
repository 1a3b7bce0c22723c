//! `usurp run` as a process.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat, open};

use super::process::{self, Lines};
use super::site::{Setup, Site};
use super::{PATIENCE, bins};

/// A target that serves; killed when it is dropped.
pub struct Target {
    /// Its process.
    pub child: Child,
    /// Its standard error.
    pub log: Lines,
    /// Where it listens.
    pub socket: PathBuf,
}

/// A target that ended before it served.
#[derive(Debug)]
pub struct Refused {
    /// Its exit code; none = killed by a signal.
    pub code: Option<i32>,
    /// Its standard error.
    pub text: String,
}

impl Target {
    /// Starts one and waits until it serves.
    pub fn start(site: &Site, setup: &Setup) -> Target {
        match Target::try_start(site, &setup.yaml(&site.socket())) {
            Ok(target) => target,
            Err(refused) => panic!("the target does not start: {refused:?}"),
        }
    }

    /// Starts one with this configuration and waits until it serves or has ended.
    pub fn try_start(site: &Site, yaml: &str) -> Result<Target, Refused> {
        let config = site.near("target.yaml");
        std::fs::write(&config, yaml).expect("a configuration can be written");
        let (fifo, ready) = make_fifo(site);
        let mut command = Command::new(bins::program("usurp"));
        command.arg("run").arg(&config).arg("--quiet").arg("--ready-file").arg(&fifo);
        command.env("NO_COLOR", "1").env("USURP_LOG", "info");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("usurp starts");
        let mut log = Lines::of(child.stderr.take().expect("it is a pipe"));
        let until = Instant::now() + PATIENCE;
        while !process::wait_readable(&ready, Duration::from_millis(50)) {
            if let Some(status) = child.try_wait().expect("our child can be waited for") {
                return Err(Refused { code: status.code(), text: log.all() });
            }
            assert!(Instant::now() < until, "it neither serves nor ends:\n{}", log.so_far());
        }
        Ok(Target { child, log, socket: site.socket() })
    }

    /// As `usurp-perf` wants it.
    pub fn address(&self) -> String {
        format!("shm:{}", self.socket.display())
    }

    /// Waits for a line of the log; each is found once.
    pub fn wait_log(&mut self, text: &str) -> String {
        self.log.wait_for(text, PATIENCE)
    }

    /// Sends SIGTERM and does not wait.
    pub fn terminate(&self) {
        process::terminate(&self.child);
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        self.child.kill().expect("our child is there");
        self.child.wait().expect("our child can be waited for");
    }

    /// Waits for the end after a SIGTERM: how it ended, how long that took, and its log.
    pub fn ended(mut self, patience: Duration) -> (ExitStatus, Duration, String) {
        let start = Instant::now();
        match process::wait(&mut self.child, patience) {
            Some(status) => (status, start.elapsed(), self.log.all()),
            None => panic!("it does not end in {patience:?}:\n{}", self.log.so_far()),
        }
    }

    /// Ends it in good order: exit code 0, and everything it handed out is back.
    pub fn end_whole(self) {
        self.terminate();
        self.expect_whole();
    }

    /// As [`Target::end_whole`], after the signal.
    pub fn expect_whole(self) -> Duration {
        let (status, took, log) = self.ended(PATIENCE);
        assert_eq!(status.code(), Some(0), "exit code:\n{log}");
        assert!(log.contains("every pool is whole"), "the last line:\n{log}");
        assert!(!log.contains("panicked"), "{log}");
        took
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("the target's log:\n{}", self.log.all());
        }
    }
}

/// A FIFO for `--ready-file`, and its reading end.
fn make_fifo(site: &Site) -> (PathBuf, OwnedFd) {
    let path = site.near("ready");
    let _ = std::fs::remove_file(&path);
    mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("a FIFO can be made");
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let end = open(&path, flags, Mode::empty()).expect("a FIFO can be opened");
    (path, end)
}

/// Runs `usurp` to its end: exit code, standard output, standard error.
pub fn usurp(args: &[&str], folder: &Path) -> (i32, String, String) {
    let mut command = Command::new(bins::program("usurp"));
    command.args(args).current_dir(folder).env("NO_COLOR", "1").stdin(Stdio::null());
    let output = command.output().expect("usurp starts");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("it prints UTF-8");
    (output.status.code().expect("it ends by itself"), text(output.stdout), text(output.stderr))
}
