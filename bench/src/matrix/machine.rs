//! What the figures were taken on: a file of figures has to explain itself.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

/// CPU family and models of the machine that the references come from: AMD's Zen 3 servers.
const REFERENCE_FAMILY: u32 = 25;
const REFERENCE_MODELS: std::ops::RangeInclusive<u32> = 0..=15;
/// Its clock, MHz.
const REFERENCE_MHZ: std::ops::RangeInclusive<f64> = 2400.0..=2500.0;

/// The machine, the system and the sources.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Machine {
    /// Model name of the first CPU.
    pub cpu: String,
    /// Its family and model, which say more than the name in a virtual machine.
    pub cpu_family: u32,
    /// See `cpu_family`.
    pub cpu_model: u32,
    /// Its clock as the kernel has it.
    pub cpu_mhz: f64,
    /// CPUs that are on line.
    pub cpus: usize,
    /// Kernel release.
    pub kernel: String,
    /// Huge pages of the default size that are free.
    pub huge_pages_free: u64,
    /// When the bench began, seconds since 1970.
    pub unix_time: u64,
    /// The commit of the sources, `-dirty` with changes; None outside of a checkout.
    pub commit: Option<String>,
}

impl Machine {
    /// Reads it.
    pub fn read() -> Machine {
        let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let unix_time = SystemTime::now().duration_since(UNIX_EPOCH);
        Machine {
            kernel: text("/proc/sys/kernel/osrelease").trim().to_string(),
            huge_pages_free: field(&text("/proc/meminfo"), "HugePages_Free").parse().unwrap_or(0),
            unix_time: unix_time.map_or(0, |t| t.as_secs()),
            commit: commit(),
            ..Machine::of_cpuinfo(&text("/proc/cpuinfo"))
        }
    }

    fn of_cpuinfo(cpuinfo: &str) -> Machine {
        let cpus = cpuinfo.lines().filter(|line| line.starts_with("processor")).count();
        Machine {
            cpu: field(cpuinfo, "model name").to_string(),
            cpu_family: field(cpuinfo, "cpu family").parse().unwrap_or(0),
            cpu_model: field(cpuinfo, "model").parse().unwrap_or(0),
            cpu_mhz: field(cpuinfo, "cpu MHz").parse().unwrap_or(0.0),
            cpus,
            ..Machine::default()
        }
    }

    /// Whether it is the kind of machine that the references were measured on.
    pub fn is_reference(&self) -> bool {
        self.cpu.contains("AMD")
            && self.cpu_family == REFERENCE_FAMILY
            && REFERENCE_MODELS.contains(&self.cpu_model)
            && REFERENCE_MHZ.contains(&self.cpu_mhz)
    }

    /// One line for reports.
    pub fn line(&self) -> String {
        format!(
            "{} (family {} model {}, {:.0} MHz), {} CPUs, Linux {}",
            self.cpu, self.cpu_family, self.cpu_model, self.cpu_mhz, self.cpus, self.kernel
        )
    }
}

/// The value of the first line `name : value`.
fn field<'a>(text: &'a str, name: &str) -> &'a str {
    let pairs = text.lines().filter_map(|line| line.split_once(':'));
    let mut found = pairs.filter(|(key, _)| key.trim() == name);
    found.next().map_or("", |(_, value)| value.trim())
}

/// The commit of the checkout in which we run.
fn commit() -> Option<String> {
    if !Path::new(".git").exists() {
        return None;
    }
    let git = |words: &[&str]| {
        let output = Command::new("git").args(words).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        output.status.success().then(|| text.trim().to_string())
    };
    let commit = git(&["rev-parse", "--short=12", "HEAD"])?;
    let is_clean = git(&["status", "--porcelain", "--untracked-files=no"])?.is_empty();
    Some(if is_clean { commit } else { commit + "-dirty" })
}

#[cfg(test)]
mod tests {
    use super::*;

    const CPUINFO: &str = "\
processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 1
model name\t: AMD EPYC
cpu MHz\t\t: 2449.998
processor\t: 1
cpu family\t: 25
model name\t: AMD EPYC
";

    #[test]
    fn a_cpu_is_read_and_told_from_that_of_the_references() {
        let machine = Machine::of_cpuinfo(CPUINFO);
        assert_eq!((machine.cpu.as_str(), machine.cpus), ("AMD EPYC", 2));
        assert_eq!((machine.cpu_family, machine.cpu_model), (25, 1));
        assert!(machine.is_reference());
        let newer = CPUINFO.replace("model\t\t: 1", "model\t\t: 17");
        assert!(!Machine::of_cpuinfo(&newer).is_reference());
        let faster = CPUINFO.replace("2449.998", "2596.128");
        assert!(!Machine::of_cpuinfo(&faster).is_reference());
        assert!(!Machine::of_cpuinfo("").is_reference());
    }

    #[test]
    fn this_machine_has_a_kernel_and_cpus() {
        let machine = Machine::read();
        assert!(!machine.kernel.is_empty() && machine.cpus > 0, "{machine:?}");
        assert!(machine.line().contains("Linux "), "{}", machine.line());
    }
}
