//! The target under test: its configuration, its start until it accepts logins, the memory that it
//! takes, and its end, which must be a good one (every pool whole, exit code 0).

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::args::Plan;
use super::image::IMAGE_MIB;
use super::jobs::{CREDITS, Lun, MALLOC_MIB};
use super::{MatrixError, guard, image};

/// Longest start: half a gigabyte is touched on a machine that may be busy.
const START_MAX: Duration = Duration::from_secs(60);
/// Longest end: commands in flight get 2 s, channels 10.
const STOP_MAX: Duration = Duration::from_secs(20);
/// Between two looks for the ready file: the resolution of the time to start.
const LOOK_EVERY: Duration = Duration::from_micros(200);
/// Size of the null bdev: that of the RAM disk.
const NULL_MIB: u64 = MALLOC_MIB;

/// The files of a target.
#[derive(Clone, Debug)]
pub struct Files {
    /// Configuration, written anew for each start.
    pub config: PathBuf,
    /// Socket.
    pub socket: PathBuf,
    /// Written by the target once it accepts logins.
    ready: PathBuf,
    /// Its standard error.
    pub log: PathBuf,
    /// Image of [`Lun::Uring`].
    pub image: PathBuf,
}

impl Files {
    /// All in one folder.
    pub fn in_dir(dir: &Path) -> Files {
        let file = |name: &str| dir.join(name);
        Files {
            config: file("target.yaml"),
            socket: file("srp.sock"),
            ready: file("ready"),
            log: file("target.log"),
            image: file("disk.img"),
        }
    }
}

/// Resident memory of a process, KiB.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// All of it.
    pub resident_kib: u64,
    /// Of it in arenas: huge pages, and memory for which huge pages were asked.
    pub arenas_kib: u64,
}

impl Memory {
    /// Without the arenas, which the configuration sizes.
    pub fn other_kib(self) -> u64 {
        self.resident_kib - self.arenas_kib
    }
}

/// A running target.
pub struct Server {
    /// The process; None once it was waited for.
    child: Option<Child>,
    /// Its number.
    pid: u32,
    /// From just before it was started until it accepted logins.
    pub start: Duration,
    /// Where its standard error goes.
    log: PathBuf,
}

impl Server {
    /// Starts a target with these LUNs and waits until it accepts logins.
    pub fn start(plan: &Plan, files: &Files, luns: &[Lun]) -> Result<Server, MatrixError> {
        if luns.contains(&Lun::Uring) {
            image::ensure(&files.image, IMAGE_MIB)?;
        }
        let text = config_text(files, luns, plan.target_core);
        fs::write(&files.config, text).map_err(MatrixError::file(&files.config))?;
        // Left over from an earlier start.
        let _ = fs::remove_file(&files.ready);
        let log = File::options().create(true).append(true).open(&files.log);
        let log = log.map_err(MatrixError::file(&files.log))?;
        let begun = Instant::now();
        let child = Command::new(&plan.usurp)
            .args(["run", "--quiet", "--ready-file"])
            .args([&files.ready, &files.config])
            .env("USURP_LOG", "warn")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .map_err(MatrixError::file(&plan.usurp))?;
        let pid = child.id();
        guard::set_target(pid);
        let log = files.log.clone();
        let mut server = Server { child: Some(child), pid, start: Duration::ZERO, log };
        server.wait_ready(&files.ready, begun)?;
        Ok(server)
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    fn wait_ready(&mut self, ready: &Path, begun: Instant) -> Result<(), MatrixError> {
        let child = self.child.as_mut().expect("it was just started");
        loop {
            if fs::read(ready).is_ok_and(|text| text == b"ready\n") {
                self.start = begun.elapsed();
                return Ok(());
            }
            let ended = child.try_wait().map_err(MatrixError::file(Path::new("usurp")))?;
            if let Some(status) = ended {
                guard::clear_target();
                self.child = None;
                return Err(self.failed(&format!("did not start: {status}")));
            }
            if begun.elapsed() > START_MAX {
                let why = format!("was not ready after {} s", START_MAX.as_secs());
                return Err(self.failed(&why));
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Resident memory now.
    pub fn memory(&self) -> Result<Memory, MatrixError> {
        let path = PathBuf::from(format!("/proc/{}/smaps", self.pid));
        let text = fs::read_to_string(&path).map_err(MatrixError::file(&path))?;
        Ok(memory_of(&text))
    }

    /// Ends it; an end that is not clean is an error.
    pub fn stop(mut self) -> Result<(), MatrixError> {
        let mut child = self.child.take().expect("stopped only here");
        guard::terminate(self.pid as i32);
        guard::clear_target();
        let begun = Instant::now();
        while begun.elapsed() < STOP_MAX {
            match child.try_wait().map_err(MatrixError::file(Path::new("usurp")))? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => return Err(self.failed(&format!("did not end well: {status}"))),
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        }
        self.child = Some(child);
        Err(self.failed(&format!("did not end within {} s", STOP_MAX.as_secs())))
    }

    /// What happened, and where the target's own words are.
    fn failed(&self, what: &str) -> MatrixError {
        MatrixError::Target(format!("{what}; it said ({}):\n{}", self.log.display(), self.said()))
    }

    /// The last lines of its standard error.
    fn said(&self) -> String {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }
}

impl Drop for Server {
    /// Only after an error: the target has to go, cleanly or not.
    fn drop(&mut self) {
        let Some(mut child) = self.child.take() else { return };
        guard::clear_target();
        let _ = child.kill();
        let _ = child.wait();
    }
}

/// The configuration; what is not in it has its default. Strings of JSON are strings of YAML.
fn config_text(files: &Files, luns: &[Lun], core: usize) -> String {
    let quoted = |path: &Path| {
        serde_json::to_string(&path.to_string_lossy()).expect("a string is plain data")
    };
    let bdev = |lun: &Lun| {
        let name = lun.word();
        let options = match lun {
            Lun::Null => format!("size: {NULL_MIB}MiB"),
            Lun::Malloc => format!("size: {MALLOC_MIB}MiB"),
            Lun::Uring => format!("path: {}", quoted(&files.image)),
        };
        format!("  - {{ name: {name}0, \"{name}\": {{ {options} }} }}\n")
    };
    let bdevs: String = luns.iter().map(bdev).collect();
    let luns = luns.iter().map(|lun| format!("{}: {}0", lun.number(), lun.word()));
    format!(
        "# Written by usurp-matrix.\n\
         reactors: {{ cores: [{core}], idle: spin }}\n\
         bdevs:\n{bdevs}\
         target:\n  \
           id_ext: \"0x0002c903000e8acd\"\n  \
           ioc_guid: \"0x0002c903000e8acc\"\n  \
           credits: {CREDITS}\n  \
           channels_max: {{ nexus: 8, all: 16 }}\n  \
           listen:\n    - {{ shm: {} }}\n  \
           hosts:\n    - {{ initiator: any, luns: {{ {} }} }}\n",
        quoted(&files.socket),
        luns.collect::<Vec<_>>().join(", "),
    )
}

/// Sums `/proc/PID/smaps`. An arena has huge pages (`ht`) or was advised to (`hg`); nothing else of
/// the target has either.
fn memory_of(smaps: &str) -> Memory {
    let mut memory = Memory::default();
    let mut resident = 0;
    for line in smaps.lines() {
        let mut words = line.split_ascii_whitespace();
        match words.next() {
            // Pages of hugetlbfs are not in Rss.
            Some("Rss:" | "Private_Hugetlb:" | "Shared_Hugetlb:") => {
                resident += words.next().and_then(|kib| kib.parse().ok()).unwrap_or(0);
            }
            // The last line of each mapping.
            Some("VmFlags:") => {
                memory.resident_kib += resident;
                if words.any(|flag| flag == "hg" || flag == "ht") {
                    memory.arenas_kib += resident;
                }
                resident = 0;
            }
            _ => {}
        }
    }
    memory
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
556998fdc000-556999185000 r-xp 00053000 fe:00 10665992     /tmp/usurp
Size:               1700 kB
Rss:                1508 kB
Private_Hugetlb:       0 kB
VmFlags: rd ex mr mw me
7ff05b200000-7ff05f200000 rw-p 00000000 00:00 0
Rss:               65536 kB
VmFlags: rd wr mr mw me lo ac hg
7ff060000000-7ff070000000 rw-p 00000000 00:00 0
Rss:                   0 kB
Private_Hugetlb:  262144 kB
VmFlags: rd wr mr mw me de ht
7ff080000000-7ff080001000 rw-p 00000000 00:00 0
Rss:                 492 kB
VmFlags: rd wr mr mw me ac
";

    #[test]
    fn arenas_are_told_from_the_rest() {
        let memory = memory_of(SMAPS);
        assert_eq!(memory.arenas_kib, 65536 + 262144);
        assert_eq!(memory.other_kib(), 2000);
        assert_eq!(memory_of(""), Memory::default());
    }

    #[test]
    fn a_configuration_has_the_luns_that_are_wanted() {
        let dir = tempfile::tempdir().unwrap();
        let files = Files::in_dir(dir.path());
        let bare = config_text(&files, &[Lun::Null], 3);
        assert!(bare.contains("cores: [3], idle: spin") && bare.contains("luns: { 0: null0 }"));
        assert!(!bare.contains("malloc"));
        let bench = config_text(&files, &[Lun::Null, Lun::Malloc, Lun::Uring], 0);
        assert!(bench.contains("luns: { 0: null0, 1: malloc0, 2: uring0 }"), "{bench}");
        assert!(bench.contains("credits: 129") && bench.contains("disk.img\" } }"), "{bench}");
    }

    #[test]
    fn a_target_that_ends_at_once_is_an_error_with_its_words() {
        let dir = tempfile::tempdir().unwrap();
        let files = Files::in_dir(dir.path());
        fs::write(&files.log, "cannot do that\n").unwrap();
        let plan = Plan {
            rounds: 1,
            seconds: 1.0,
            target_core: 0,
            initiator_core: 1,
            jobs: vec![],
            dir: dir.path().into(),
            usurp: "/bin/false".into(),
            usurp_perf: "/bin/false".into(),
            is_quick: true,
        };
        let Err(error) = Server::start(&plan, &files, &[Lun::Null]) else { panic!("it started") };
        let text = error.to_string();
        assert!(text.contains("did not start") && text.contains("cannot do that"), "{text}");
    }
}
