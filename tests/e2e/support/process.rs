//! A child process that is waited for with a time limit, and whose output is kept line by line.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ExitStatus};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

/// Lines of a stream, in order; the stream never blocks its writer.
pub struct Lines {
    /// From the thread that reads the stream.
    incoming: Receiver<String>,
    /// Everything so far.
    seen: Vec<String>,
    /// Lines before this one were looked at by `wait_for`.
    cursor: usize,
}

impl Lines {
    /// Starts to read.
    pub fn of(stream: impl Read + Send + 'static) -> Lines {
        let (sender, incoming) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stream).split(b'\n').map_while(Result::ok) {
                // The test may have ended; the writer must still find a reader.
                let _ = sender.send(String::from_utf8_lossy(&line).into_owned());
            }
        });
        Lines { incoming, seen: Vec::new(), cursor: 0 }
    }

    /// The next line with `text` in it; each line is found once. Panics when it does not come.
    pub fn wait_for(&mut self, text: &str, patience: Duration) -> String {
        let until = Instant::now() + patience;
        loop {
            while let Some(line) = self.seen.get(self.cursor) {
                self.cursor += 1;
                if line.contains(text) {
                    return line.clone();
                }
            }
            match self.incoming.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(line) => self.seen.push(line),
                Err(RecvTimeoutError::Timeout) => {
                    panic!("no {text:?} in {patience:?}:\n{}", self.text())
                }
                Err(RecvTimeoutError::Disconnected) => {
                    panic!("ended without {text:?}:\n{}", self.text())
                }
            }
        }
    }

    /// Everything up to the end of the stream; the writer has ended.
    pub fn all(&mut self) -> String {
        while let Ok(line) = self.incoming.recv() {
            self.seen.push(line);
        }
        self.text()
    }

    fn text(&self) -> String {
        self.seen.join("\n")
    }

    /// What has come so far.
    pub fn so_far(&mut self) -> String {
        while let Ok(line) = self.incoming.try_recv() {
            self.seen.push(line);
        }
        self.text()
    }
}

fn pid(child: &Child) -> Pid {
    Pid::from_child(child)
}

/// Sends SIGTERM.
pub fn terminate(child: &Child) {
    kill_process(pid(child), Signal::TERM).expect("our child is there");
}

/// Waits for the end; None = not in time.
pub fn wait(child: &mut Child, patience: Duration) -> Option<ExitStatus> {
    let pidfd = pidfd_open(pid(child), PidfdFlags::empty()).expect("our child is there");
    let until = Instant::now() + patience;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if wait_readable(&pidfd, left) || left.is_zero() {
            break;
        }
    }
    child.try_wait().expect("our child can be waited for")
}

/// Waits until something can be read; false = the time is up, or a signal came.
pub fn wait_readable(fd: &impl std::os::fd::AsFd, patience: Duration) -> bool {
    let timeout =
        Timespec { tv_sec: patience.as_secs() as i64, tv_nsec: patience.subsec_nanos().into() };
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    matches!(poll(&mut fds, Some(&timeout)), Ok(1..))
}

/// Resident memory in KiB.
pub fn rss_kib(child: &Child) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id()));
    let status = status.expect("our child is there");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("VmRSS");
    line.trim().trim_end_matches(" kB").trim().parse().expect("a number of KiB")
}

/// Open file descriptors.
pub fn fd_count(child: &Child) -> usize {
    let fds = std::fs::read_dir(format!("/proc/{}/fd", child.id()));
    fds.expect("our child is there").count()
}
