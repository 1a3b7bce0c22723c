//! The configuration: a YAML file, read, checked as a whole, and turned into types.
//!
//! Owns: the shape of the file, its defaults, and every refusal with file, line, column and caret.
//! Never: opens a device, binds a socket or starts anything. serde_yaml stays behind this module,
//! but for the options of a bdev, which go to its module as a `serde_yaml::Value`.
//!
//! ```text
//!  file --tree--> nodes --check (section, values)--> Config      all errors at once: ConfigErrors
//!                                    modules: each bdev module checks its own options
//! ```
//!
//! Invariants of a `Config`: names, LUNs, listeners and initiators are unique; every LUN's bdev
//! exists; `transfer_bytes_max` is a power of two and `data_bytes` a multiple of it.

mod check;
pub(crate) mod modules;
mod report;
mod section;
#[cfg(test)]
mod tests;
mod tree;
mod values;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

pub use report::{ConfigErrors, Problem};
use usurp_bdev::BdevError;
pub use usurp_bdev::ByteSize;
use usurp_bdev::registry::Spec;
pub use usurp_reactor::cpu::CoreSpec;
pub use usurp_reactor::mem::HugePolicy;
pub use values::{Idle, Initiator};

/// A checked configuration. Immutable.
#[derive(Clone, Debug)]
pub struct Config {
    /// Which cores, and how they wait.
    pub reactors: Reactors,
    /// Where buffers come from and how large they are.
    pub memory: Memory,
    /// The block devices, in the order of the file; a filter may name those before it.
    pub bdevs: Vec<BdevConfig>,
    /// The SRP target.
    pub target: Target,
    /// What is allowed but looks wrong; `run` logs these, `check` prints them.
    pub warnings: Vec<Problem>,
    /// The text and its tree, to place later findings.
    origin: check::Origin,
}

/// The `reactors` section.
#[derive(Clone, Debug)]
pub struct Reactors {
    /// Cores to run reactors on, not yet resolved against this machine; default `auto`.
    pub cores: CoreSpec,
    /// What a reactor does in empty turns; default `spin`.
    pub idle: Idle,
}

/// The `memory` section.
#[derive(Clone, Debug)]
pub struct Memory {
    /// Whether arenas must, may or must not lie in huge pages; default `prefer`.
    pub hugepages: HugePolicy,
    /// Bytes of data buffers of each reactor; a multiple of `transfer_bytes_max`; default 64 MiB.
    pub data_bytes: usize,
    /// The longest transfer of one command, in bytes; a power of two; default 4 MiB.
    pub transfer_bytes_max: usize,
}

/// One entry of `bdevs`.
#[derive(Clone, Debug)]
pub struct BdevConfig {
    /// Its name, unique; 1 to 64 characters of `A-Z a-z 0-9 . _ -`.
    pub name: String,
    /// The module that makes it: `malloc`, `uring`, ...
    pub module: String,
    /// The module's own options.
    pub options: serde_yaml::Value,
}

/// The `target` section.
#[derive(Clone, Debug)]
pub struct Target {
    /// First half of the target port identifier.
    pub id_ext: u64,
    /// Second half of it; never 0.
    pub ioc_guid: u64,
    /// Requests outstanding on one channel at most (`req_lim`); 4..=1024, default 128.
    pub credits: u16,
    /// Whether initiators may send write data inside the command IU; default true.
    pub immediate_data: bool,
    /// Channels of one nexus at most, if the file says so.
    pub nexus_channels_max: Option<u32>,
    /// Channels in all at most, if the file says so.
    pub channels_max: Option<u32>,
    /// Where initiators connect; at least one, no two alike.
    pub listen: Vec<Listen>,
    /// Who may log in and what they see; at least one, no two for the same initiator.
    pub hosts: Vec<Host>,
}

/// One entry of `listen`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listen {
    /// A Unix socket of the shm fabric; relative to the process's current folder.
    Shm(PathBuf),
    /// An RDMA/CM address. Checked, but not served in this version.
    RdmaCm(SocketAddr),
}

/// One entry of `hosts`.
#[derive(Clone, Debug)]
pub struct Host {
    /// Whom it is for.
    pub initiator: Initiator,
    /// What they see, ascending by LUN; at least one.
    pub luns: Vec<Lun>,
}

/// One logical unit as one host sees it.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Lun {
    /// Its number, 0..=16383.
    pub lun: u16,
    /// Index into [`Config::bdevs`].
    pub bdev: usize,
    /// Whether writes are refused here, whatever the bdev can do.
    pub read_only: bool,
}

impl Config {
    /// Reads and checks a file, also against the cores and the memory of this machine.
    pub fn load(path: &Path) -> Result<Config, ConfigErrors> {
        let file = path.display().to_string();
        match std::fs::read(path).map(String::from_utf8) {
            Ok(Ok(text)) => check::check(&file, &text, &check::Machine::this()),
            Ok(Err(error)) => {
                let at = error.utf8_error().valid_up_to();
                let line = error.as_bytes()[..at].iter().filter(|byte| **byte == b'\n').count() + 1;
                Err(whole(file, format!("line {line} is not UTF-8"), "save the file as UTF-8"))
            }
            Err(error) => Err(whole(file, format!("cannot be read: {error}"), "")),
        }
    }

    /// Checks a text; `file` is for messages only. Asks nothing of this machine.
    pub fn parse(file: &str, text: &str) -> Result<Config, ConfigErrors> {
        check::check(file, text, &check::Machine::any())
    }

    /// Points a finding that came up later (a bdev that does not open) at its place in the file.
    /// `key` is a path below the entry, such as `uring.path`, or empty for the entry itself.
    pub fn bdev_problem(&self, bdev: usize, key: &str, message: &str, hint: &str) -> ConfigErrors {
        let error = BdevError::new(key, message, hint);
        self.bdev_problems([(bdev, error)])
    }

    /// The same for all that the registry found, each with its index into `bdevs`; not none.
    pub fn bdev_problems(
        &self,
        errors: impl IntoIterator<Item = (usize, BdevError)>,
    ) -> ConfigErrors {
        let place = |(bdev, error): (usize, BdevError)| {
            let message = format!("bdev `{}`: {}", self.bdevs[bdev].name, error.message);
            self.origin.bdev_problem(bdev, &error.key, message, error.hint)
        };
        ConfigErrors::new(errors.into_iter().map(place).collect())
    }

    /// The bdevs as the registry wants them.
    pub fn bdev_specs(&self) -> Vec<Spec> {
        self.bdevs.iter().map(modules::spec).collect()
    }
}

impl Target {
    /// The target port identifier: `id_ext`, then `ioc_guid` (SRP r16a; srp-reference 1.14).
    pub fn port_id(&self) -> [u8; 16] {
        let mut id = [0; 16];
        id[..8].copy_from_slice(&self.id_ext.to_be_bytes());
        id[8..].copy_from_slice(&self.ioc_guid.to_be_bytes());
        id
    }

    /// The index of the entry that is for an initiator port: its port identifier comes before its
    /// GUID, and that before `any`. None: this initiator may not log in.
    pub fn host_for(&self, initiator: &[u8; 16]) -> Option<usize> {
        let rank = |host: &Host| match host.initiator {
            Initiator::Port(_) => 0,
            Initiator::Guid(_) => 1,
            Initiator::Any => 2,
        };
        let matching = self.hosts.iter().enumerate();
        let matching = matching.filter(|(_, host)| host.initiator.matches(initiator));
        matching.min_by_key(|(_, host)| rank(host)).map(|(at, _)| at)
    }
}

/// A refusal of the file as a whole.
fn whole(file: String, message: String, hint: &str) -> ConfigErrors {
    let (line, hint) = (String::new(), hint.to_owned());
    ConfigErrors::new(vec![Problem { file, place: None, line, width: 1, message, hint }])
}
