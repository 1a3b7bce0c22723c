//! A place for one test: a folder for the socket and the configuration, one on disk for images.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use tempfile::TempDir;
use usurp_reactor::cpu;

use super::{ID_EXT, IOC_GUID, bins};

/// A test's folders; gone with it.
pub struct Site {
    /// Short, as the path of a socket must be.
    near: TempDir,
    /// Below cargo's output folder, where O_DIRECT works more often than in a tmpfs.
    disk: TempDir,
}

impl Site {
    /// Empty folders.
    pub fn new() -> Site {
        let make = |builder: &tempfile::Builder<'_, '_>, at: &Path| builder.tempdir_in(at);
        let mut builder = tempfile::Builder::new();
        builder.prefix("usurp-e2e-");
        let near = make(&builder, &std::env::temp_dir()).expect("the temporary folder is writable");
        let disk = make(&builder, &bins::output()).expect("cargo's output folder is writable");
        Site { near, disk }
    }

    /// Where the target listens.
    pub fn socket(&self) -> PathBuf {
        self.near.path().join("s")
    }

    /// A path in the near folder.
    pub fn near(&self, name: &str) -> PathBuf {
        self.near.path().join(name)
    }

    /// A path on disk.
    pub fn disk(&self, name: &str) -> PathBuf {
        self.disk.path().join(name)
    }

    /// An image of zeros on disk.
    pub fn image(&self, name: &str, bytes: u64) -> PathBuf {
        let path = self.disk(name);
        let file = std::fs::File::create(&path).expect("an image can be made");
        file.set_len(bytes).expect("an image can be sized");
        path
    }

    /// A file on disk with bytes that do not repeat.
    pub fn noise(&self, name: &str, bytes: usize, seed: u64) -> PathBuf {
        let path = self.disk(name);
        std::fs::write(&path, noise(bytes, seed)).expect("a file can be written");
        path
    }
}

/// Bytes that do not repeat (splitmix64).
pub fn noise(bytes: usize, seed: u64) -> Vec<u8> {
    let mut random = Random(seed);
    let mut out: Vec<u8> =
        (0..bytes.div_ceil(8)).flat_map(|_| random.next().to_le_bytes()).collect();
    out.truncate(bytes);
    out
}

/// A small generator of random numbers (splitmix64), the same on every run.
pub struct Random(pub u64);

impl Random {
    /// The next number.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

/// The cores that this process may use.
pub fn cores() -> Vec<usize> {
    let auto = cpu::parse_cores("auto").expect("a core list");
    cpu::resolve(&auto).expect("this process has cores")
}

/// What a target's configuration says; lists of lines in YAML's flow style.
#[derive(Clone)]
pub struct Setup {
    /// `reactors.cores`.
    pub cores: String,
    /// Entries of `bdevs`.
    pub bdevs: Vec<String>,
    /// Further keys of `target`.
    pub target: Vec<String>,
    /// Entries of `hosts`.
    pub hosts: Vec<String>,
}

impl Setup {
    /// One reactor, on another core in every test; `bdevs`, and any initiator sees `luns`.
    pub fn new(bdevs: &[&str], luns: &str) -> Setup {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let cores = cores();
        let core = cores[NEXT.fetch_add(1, Ordering::Relaxed) % cores.len()];
        Setup {
            cores: core.to_string(),
            bdevs: bdevs.iter().map(|line| (*line).to_owned()).collect(),
            target: vec!["channels_max: { nexus: 8, all: 16 }".into()],
            hosts: vec![format!("{{ initiator: any, luns: {luns} }}")],
        }
    }

    /// LUN 0 and LUN 1: RAM, 16 MiB each.
    pub fn ram() -> Setup {
        let ram0 = "{ name: ram0, malloc: { size: 16MiB } }";
        let ram1 = "{ name: ram1, malloc: { size: 16MiB } }";
        Setup::new(&[ram0, ram1], "{ 0: ram0, 1: ram1 }")
    }

    /// LUN 0: RAM; LUN 1: RAM; LUN 2: RAM that takes `ms` milliseconds for everything.
    pub fn slow(ms: u32) -> Setup {
        let mut setup = Setup::ram();
        setup.bdevs.push("{ name: ram2, malloc: { size: 16MiB } }".into());
        let us = ms * 1000;
        setup.bdevs.push(format!(
            "{{ name: slow, delay: {{ base: ram2, read_us: {us}, write_us: {us} }} }}"
        ));
        setup.hosts = vec!["{ initiator: any, luns: { 0: ram0, 1: ram1, 2: slow } }".into()];
        setup
    }

    /// The file.
    pub fn yaml(&self, socket: &Path) -> String {
        let list = |lines: &[String], indent: &str| {
            lines.iter().map(|line| format!("{indent}- {line}\n")).collect::<String>()
        };
        let target: String = self.target.iter().map(|line| format!("  {line}\n")).collect();
        format!(
            "reactors: {{ cores: \"{cores}\", idle: adaptive }}\n\
             memory: {{ hugepages: never, data: 8MiB, max_transfer: 1MiB }}\n\
             bdevs:\n{bdevs}target:\n  id_ext: \"{ID_EXT:#018x}\"\n  \
             ioc_guid: \"{IOC_GUID:#018x}\"\n\
             {target}  listen:\n    - {{ shm: {socket} }}\n  hosts:\n{hosts}",
            cores = self.cores,
            bdevs = list(&self.bdevs, "  "),
            socket = socket.display(),
            hosts = list(&self.hosts, "    "),
        )
    }
}
