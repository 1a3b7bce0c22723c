//! CPU time of both sides of a run. Ours comes from the thread clock. The target's comes from
//! `/proc/PID/task/*`: the threads that are called `usurp-r` and a number are its reactors.
//!
//! A side that busy-polls uses one CPU whole whatever it does, so "CPU time per I/O" of a spinning
//! thread is wall time per I/O. [`PeerBusy`] is where a busy part measured by the target itself
//! (its reactors count busy, idle and stalled time) enters the report once it can be asked for.

use std::path::Path;

/// Name prefix of the target's reactor threads.
const REACTOR_PREFIX: &str = "usurp-r";

/// CPU time used so far by the reactor threads of a target process.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerCpu {
    /// Nanoseconds on a CPU, summed over the threads.
    pub cpu_ns: u64,
    /// Number of reactor threads found.
    pub threads: u32,
}

/// The busy part of the target's CPU time, when something can tell it.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct PeerBusy {
    /// Nanoseconds spent in turns that found something to do.
    pub busy_ns: u64,
}

impl PeerCpu {
    /// Reads `/proc/PID/task`; an error text when there is no such process or it has no reactors.
    pub fn read(pid: u32) -> Result<PeerCpu, String> {
        PeerCpu::read_from(Path::new(&format!("/proc/{pid}/task")))
            .map_err(|why| format!("target process {pid}: {why}"))
    }

    fn read_from(tasks: &Path) -> Result<PeerCpu, String> {
        let list = std::fs::read_dir(tasks).map_err(|e| e.to_string())?;
        let mut sum = PeerCpu::default();
        for task in list.flatten() {
            let dir = task.path();
            let name = std::fs::read_to_string(dir.join("comm")).unwrap_or_default();
            // A digit follows, so that a program called usurp-rc is no reactor.
            let rest = name.strip_prefix(REACTOR_PREFIX);
            if !rest.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit())) {
                continue;
            }
            let text = std::fs::read_to_string(dir.join("schedstat")).unwrap_or_default();
            // "ns-on-cpu ns-waiting slices"; a thread that just ended counts as 0.
            let cpu_ns = text.split_ascii_whitespace().next().and_then(|n| n.parse().ok());
            sum.cpu_ns += cpu_ns.unwrap_or(0);
            sum.threads += 1;
        }
        match sum.threads {
            0 => Err(format!("no thread named {REACTOR_PREFIX}*")),
            _ => Ok(sum),
        }
    }

    /// CPU time since `before`.
    pub fn since(self, before: PeerCpu) -> u64 {
        self.cpu_ns.saturating_sub(before.cpu_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(root: &Path, id: &str, name: &str, stat: &str) {
        let dir = root.join(id);
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("comm"), name).unwrap();
        std::fs::write(dir.join("schedstat"), stat).unwrap();
    }

    #[test]
    fn only_reactor_threads_count() {
        let root = std::env::temp_dir().join(format!("usurp-bench-cpu-{}", std::process::id()));
        task(&root, "1", "usurp\n", "5000 1 1\n");
        task(&root, "2", "usurp-r0\n", "100 7 3\n");
        task(&root, "3", "usurp-r1\n", "40 7 3\n");
        task(&root, "4", "usurp-rc\n", "9000 7 3\n");
        let sum = PeerCpu::read_from(&root);
        std::fs::remove_dir_all(&root).unwrap();
        assert_eq!(sum, Ok(PeerCpu { cpu_ns: 140, threads: 2 }));
        assert_eq!(sum.unwrap().since(PeerCpu { cpu_ns: 40, threads: 2 }), 100);
    }

    #[test]
    fn no_process_and_no_reactor_are_said_in_words() {
        assert!(PeerCpu::read(u32::MAX).unwrap_err().contains("4294967295"));
        let own = PeerCpu::read(std::process::id()).unwrap_err();
        assert!(own.contains("no thread named usurp-r"), "{own}");
    }
}
