//! `usurp doctor`: what this machine lacks, and the command that mends it.
//!
//! Owns nothing. Tries the real thing where that is harmless (takes an arena, opens a bdev on a
//! scratch file) and reads `/proc`, `/sys` and `/dev` for the rest. Never: changes the machine.
//!
//! A `FAIL` means that `usurp run` cannot work here at all; a `WARN`, that something is slower or
//! one part of Usurp is missing.

use std::fmt;
use std::path::Path;

use usurp_bdev::QueueSetup;
use usurp_bdev::registry::{Registry, Spec};
use usurp_reactor::cpu;
use usurp_reactor::mem::{Arena, HugePages, HugePolicy, huge_pages};

/// Locked memory that a small target needs: its arenas, registered with io_uring and devices.
const MEMLOCK_BYTES: u64 = 256 << 20;
/// Huge memory that a reactor with default settings takes: the rings of 64 channels, and 64 MiB of
/// data buffers.
const HUGE_BYTES: usize = 176 << 20;

/// How bad a finding is.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Level {
    /// As it should be.
    Ok,
    /// Slower, or one part is missing.
    Warn,
    /// `usurp run` cannot work.
    Fail,
}

/// One line of the report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// How bad it is.
    pub level: Level,
    /// What was looked at.
    pub topic: &'static str,
    /// What was found.
    pub found: String,
    /// The command or setting that mends it; empty if there is nothing to mend.
    pub remedy: String,
}

impl Finding {
    fn ok(topic: &'static str, found: impl Into<String>) -> Finding {
        Finding { level: Level::Ok, topic, found: found.into(), remedy: String::new() }
    }

    fn warn(topic: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Finding {
        Finding { level: Level::Warn, topic, found: found.into(), remedy: remedy.into() }
    }

    fn fail(topic: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Finding {
        Finding { level: Level::Fail, topic, found: found.into(), remedy: remedy.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let level = match self.level {
            Level::Ok => "OK  ",
            Level::Warn => "WARN",
            Level::Fail => "FAIL",
        };
        write!(f, "{level}  {:<14}  {}", self.topic, self.found)?;
        if self.remedy.is_empty() {
            Ok(())
        } else {
            write!(f, "\n      {:<14}  -> {}", "", self.remedy)
        }
    }
}

/// Looks at everything. Takes a fraction of a second.
pub fn examine() -> Vec<Finding> {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let mut findings = vec![
        cores(cpu::start_cores().map_err(|error| error.to_string())),
        clock(cpu::Clock::new().is_tsc()),
        shared_memory(),
        pages(&huge_pages()),
    ];
    if huge_pages().free > 0 {
        findings.push(huge_memfd());
    }
    findings.push(memlock(rustix::process::getrlimit(rustix::process::Resource::Memlock).current));
    findings.push(uring(&read("/proc/sys/kernel/io_uring_disabled"), try_uring()));
    findings.push(rdma_devices());
    findings.push(device_nodes(Path::new("/dev/infiniband")));
    findings.push(run_folder(Path::new("/run/usurp")));
    findings
}

/// Whether `usurp run` can work, given what was found.
pub fn is_able(findings: &[Finding]) -> bool {
    findings.iter().all(|finding| finding.level != Level::Fail)
}

fn cores(usable: Result<Vec<usize>, String>) -> Finding {
    match usable {
        Err(error) => Finding::fail("cores", error, "run with a CPU mask that can be read"),
        Ok(cores) if cores.is_empty() => {
            Finding::fail("cores", "none may be used", "widen the cpuset: taskset -c 0- usurp ...")
        }
        Ok(cores) if cores.len() == 1 => Finding::warn(
            "cores",
            format!("only core {} may be used; a reactor shares it with everything", cores[0]),
            "set `reactors: { idle: adaptive }`, or widen the cpuset",
        ),
        Ok(cores) => Finding::ok("cores", format!("{} may be used: {cores:?}", cores.len())),
    }
}

fn clock(is_tsc: bool) -> Finding {
    if is_tsc {
        return Finding::ok("clock", "the time stamp counter is invariant");
    }
    let found = "no invariant time stamp counter: each turn reads the clock through the kernel";
    Finding::warn("clock", found, "in a virtual machine: qemu -cpu host,+invtsc")
}

fn shared_memory() -> Finding {
    match Arena::shared("doctor", 1 << 20, HugePolicy::Never) {
        Ok(_) => Finding::ok("shared memory", "memfd_create works: shm listeners can serve"),
        Err(error) => {
            let remedy = "allow memfd_create in the container's seccomp profile";
            Finding::fail("shared memory", error.to_string(), remedy)
        }
    }
}

fn pages(huge: &HugePages) -> Finding {
    let (needed, topic) = (huge.needed(HUGE_BYTES), "huge pages");
    if huge.page == 0 {
        let found = "this kernel has none; ordinary pages are used unless `hugepages: require`";
        return Finding::warn(topic, found, "build the kernel with CONFIG_HUGETLBFS");
    }
    if huge.free >= needed {
        return Finding::ok(topic, format!("{} of {} are free", huge.free, huge.total));
    }
    let found = format!("{} free; a reactor with default settings wants {needed}", huge.free);
    let want = huge.total + needed - huge.free;
    Finding::warn(topic, found, format!("echo {want} | sudo tee /proc/sys/vm/nr_hugepages"))
}

fn huge_memfd() -> Finding {
    match Arena::shared("doctor", huge_pages().page, HugePolicy::Require) {
        Ok(_) => Finding::ok("huge memfd", "memory shared with initiators can be huge"),
        Err(error) => Finding::warn("huge memfd", error.to_string(), "needs Linux 4.14 or later"),
    }
}

/// `None` is no limit. The superuser is not limited either way.
fn memlock(limit: Option<u64>) -> Finding {
    let topic = "locked memory";
    match limit {
        None => Finding::ok(topic, "no limit"),
        Some(_) if rustix::process::geteuid().is_root() => Finding::ok(topic, "no limit for root"),
        Some(bytes) if bytes >= MEMLOCK_BYTES => {
            Finding::ok(topic, format!("up to {} MiB", bytes >> 20))
        }
        Some(bytes) => Finding::warn(
            topic,
            format!("at most {} KiB; buffers may be swapped out", bytes >> 10),
            "ulimit -l unlimited, or LimitMEMLOCK=infinity in the systemd unit",
        ),
    }
}

/// Opens a real `uring` bdev on a scratch file.
fn try_uring() -> Result<(), String> {
    let path = std::env::temp_dir().join(format!("usurp-doctor-{}", std::process::id()));
    let made = std::fs::File::create_new(&path).and_then(|file| file.set_len(1 << 20));
    made.map_err(|error| format!("no scratch file {}: {error}", path.display()))?;
    let options = serde_yaml::Mapping::from_iter([
        ("path".into(), path.display().to_string().into()),
        ("direct".into(), false.into()),
    ]);
    let spec = Spec { name: "doctor".into(), module: "uring".into(), options: options.into() };
    let opened = Registry::new()
        .open(&spec)
        .and_then(|bdev| bdev.queue(&QueueSetup { depth: 2, data: None, core: 0 }).map(drop));
    let _ = std::fs::remove_file(&path);
    opened.map_err(|error| error.to_string())
}

fn uring(disabled: &str, tried: Result<(), String>) -> Finding {
    let topic = "io_uring";
    let Err(error) = tried else {
        return Finding::ok(topic, "works: files and block devices can be served");
    };
    let found = format!("uring bdevs do not work: {error}");
    match disabled.trim() {
        "1" | "2" => Finding::warn(topic, found, "sudo sysctl kernel.io_uring_disabled=0"),
        "0" => Finding::warn(topic, found, "allow io_uring in the container's seccomp profile"),
        _ => Finding::warn(topic, found, "needs Linux 5.15 or later with CONFIG_IO_URING"),
    }
}

#[cfg(feature = "verbs")]
fn rdma_devices() -> Finding {
    let topic = "RDMA devices";
    match usurp_fabric::verbs::devices() {
        Ok(devices) if !devices.is_empty() => {
            let names: Vec<String> = devices.iter().map(show_device).collect();
            Finding::ok(topic, names.join(", "))
        }
        Ok(_) => Finding::warn(
            topic,
            "none; shm listeners work without",
            "soft-RoCE for trying: sudo rdma link add rxe0 type rxe netdev eth0",
        ),
        Err(error) => Finding::warn(topic, error.to_string(), "sudo modprobe ib_uverbs"),
    }
}

/// `rxe0 (port active, 2 GIDs)`.
#[cfg(feature = "verbs")]
fn show_device(device: &usurp_fabric::verbs::DeviceInfo) -> String {
    use usurp_fabric::verbs::PortInfo;
    match &device.ports {
        PortInfo::Active { gids } => format!("{} (port active, {} GIDs)", device.name, gids.len()),
        PortInfo::Unusable(why) => format!("{} (not usable: {why})", device.name),
    }
}

#[cfg(not(feature = "verbs"))]
fn rdma_devices() -> Finding {
    let found = "this binary was built without the feature `verbs`: only shm listeners";
    Finding::warn("RDMA devices", found, "make setup, then cargo build --release")
}

fn device_nodes(folder: &Path) -> Finding {
    let topic = "RDMA nodes";
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let names: Vec<String> =
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    let has_verbs = names.iter().any(|name| name.starts_with("uverbs"));
    let has_cm = names.iter().any(|name| name == "rdma_cm");
    match (has_verbs, has_cm) {
        (true, true) => Finding::ok(topic, "uverbs and rdma_cm are there"),
        (false, _) => {
            let found = format!("{} has no uverbs device", folder.display());
            Finding::warn(topic, found, "sudo modprobe ib_uverbs; containers: --device")
        }
        (true, false) => {
            let found = format!("{} has no rdma_cm", folder.display());
            Finding::warn(topic, found, "sudo modprobe rdma_ucm")
        }
    }
}

/// The folder that the examples put sockets into: there and writable, or can be made.
fn run_folder(folder: &Path) -> Finding {
    let topic = "socket folder";
    let writable = |path: &Path| {
        rustix::fs::access(path, rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK).is_ok()
    };
    let shown = folder.display();
    if writable(folder) {
        return Finding::ok(topic, format!("{shown} is writable"));
    }
    let remedy = format!("sudo install -d -o \"$USER\" {shown}, or listen elsewhere");
    if folder.exists() {
        return Finding::warn(topic, format!("{shown} is not writable"), remedy);
    }
    Finding::warn(topic, format!("{shown} does not exist"), remedy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_fail_only_when_there_are_none() {
        assert_eq!(cores(Ok(vec![0, 1])).level, Level::Ok);
        assert_eq!(cores(Ok(vec![3])).level, Level::Warn);
        assert_eq!(cores(Ok(vec![])).level, Level::Fail);
        assert_eq!(cores(Err("no mask".into())).level, Level::Fail);
    }

    #[test]
    fn the_remedy_for_huge_pages_adds_what_is_missing() {
        let huge = HugePages { page: 2 << 20, total: 10, free: 4 };
        let finding = pages(&huge);
        assert_eq!(finding.level, Level::Warn);
        assert_eq!(finding.remedy, "echo 94 | sudo tee /proc/sys/vm/nr_hugepages");
        assert_eq!(pages(&HugePages { page: 2 << 20, total: 88, free: 88 }).level, Level::Ok);
        assert_eq!(pages(&HugePages { page: 0, total: 0, free: 0 }).level, Level::Warn);
    }

    #[test]
    fn io_uring_names_the_switch_that_is_off() {
        assert_eq!(uring("0\n", Ok(())).level, Level::Ok);
        assert!(uring("2\n", Err("no".into())).remedy.contains("io_uring_disabled=0"));
        assert!(uring("0\n", Err("no".into())).remedy.contains("seccomp"));
        assert!(uring("", Err("no".into())).remedy.contains("Linux"));
    }

    #[test]
    fn a_folder_without_device_nodes_is_a_warning_with_a_remedy() {
        let finding = device_nodes(Path::new("/does/not/exist"));
        assert_eq!(finding.level, Level::Warn);
        assert!(finding.remedy.contains("modprobe ib_uverbs"));
        assert_eq!(run_folder(Path::new("/does/not/exist")).level, Level::Warn);
    }

    #[test]
    fn a_line_shows_level_topic_and_remedy() {
        let text = Finding::warn("clock", "slow", "mend it").to_string();
        assert_eq!(text, "WARN  clock           slow\n                      -> mend it");
        assert_eq!(Finding::ok("clock", "fine").to_string(), "OK    clock           fine");
    }

    #[test]
    fn this_machine_can_be_examined() {
        let findings = examine();
        assert!(findings.len() >= 9, "{findings:?}");
        assert!(findings.iter().all(|f| f.level == Level::Ok || !f.remedy.is_empty()));
    }
}
