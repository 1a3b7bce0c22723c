//! The table of what is measured. A line here is a job; nothing else has to change for a new one,
//! unless it needs another LUN ([`Lun`]) or a peer's figure (`reference.rs`).

use super::format::bytes;

/// Requests that the target takes on one channel. The initiator keeps one for task management, so
/// that 128 I/Os are possible with 129.
pub const CREDITS: u32 = 129;

/// The LUNs of the bench target; the discriminant is the LUN's number.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Lun {
    /// Takes everything, keeps nothing: the path alone.
    Null = 0,
    /// RAM disk, [`MALLOC_MIB`]: the path and a copy from cold memory.
    Malloc = 1,
    /// Image file by io_uring, O_DIRECT, [`IMAGE_MIB`](super::image::IMAGE_MIB).
    Uring = 2,
}

/// Size of the RAM disk: far beyond any cache, and what the peers were measured with.
pub const MALLOC_MIB: u64 = 512;

impl Lun {
    /// The bdev module.
    pub fn word(self) -> &'static str {
        match self {
            Lun::Null => "null",
            Lun::Malloc => "malloc",
            Lun::Uring => "uring",
        }
    }

    /// Its number.
    pub fn number(self) -> u16 {
        self as u16
    }
}

/// `--rw` of a job; reports show the directions apart, and a job has one.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Rw {
    /// Random reads.
    RandRead,
    /// Random writes.
    RandWrite,
}

impl Rw {
    /// As `usurp-perf --rw` has it.
    pub fn word(self) -> &'static str {
        match self {
            Rw::RandRead => "randread",
            Rw::RandWrite => "randwrite",
        }
    }
}

/// One line of the matrix.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// The LUN.
    pub lun: Lun,
    /// The pattern.
    pub rw: Rw,
    /// Bytes per I/O.
    pub io_bytes: u32,
    /// I/Os outstanding, on one channel.
    pub depth: u32,
}

impl Job {
    /// Names it everywhere: `malloc-4k-randread-32`.
    pub fn id(&self) -> String {
        let (lun, rw) = (self.lun.word(), self.rw.word());
        format!("{lun}-{}k-{rw}-{}", self.io_bytes >> 10, self.depth)
    }

    /// For people: `malloc, 4 KiB randread, depth 32`.
    pub fn title(&self) -> String {
        let (lun, rw) = (self.lun.word(), self.rw.word());
        format!("{lun}, {} {rw}, depth {}", bytes(u64::from(self.io_bytes)), self.depth)
    }
}

const fn job(lun: Lun, rw: Rw, kib: u32, depth: u32) -> Job {
    Job { lun, rw, io_bytes: kib << 10, depth }
}

/// The whole path: target and initiator on a core each, one channel.
pub const PATH: &[Job] = &[
    job(Lun::Null, Rw::RandRead, 4, 1),
    job(Lun::Null, Rw::RandRead, 4, 32),
    job(Lun::Null, Rw::RandRead, 4, 128),
    job(Lun::Malloc, Rw::RandRead, 4, 1),
    job(Lun::Malloc, Rw::RandRead, 4, 32),
    job(Lun::Malloc, Rw::RandRead, 4, 128),
    job(Lun::Malloc, Rw::RandWrite, 4, 32),
    job(Lun::Malloc, Rw::RandRead, 128, 1),
    job(Lun::Malloc, Rw::RandRead, 128, 32),
    job(Lun::Uring, Rw::RandRead, 4, 1),
    job(Lun::Uring, Rw::RandRead, 4, 32),
];

/// The jobs whose id contains one of `only`; all of them if `only` is empty.
pub fn select(only: &[String]) -> Vec<Job> {
    let wanted = |job: &&Job| only.is_empty() || only.iter().any(|text| job.id().contains(text));
    PATH.iter().filter(wanted).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_job_has_a_name_of_its_own() {
        let ids: std::collections::BTreeSet<String> = PATH.iter().map(Job::id).collect();
        assert_eq!(ids.len(), PATH.len());
        assert!(ids.contains("malloc-128k-randread-32"), "{ids:?}");
        assert_eq!(PATH[0].title(), "null, 4 KiB randread, depth 1");
    }

    #[test]
    fn the_credits_are_enough_for_every_depth() {
        assert!(PATH.iter().all(|job| job.depth < CREDITS));
    }

    #[test]
    fn jobs_are_chosen_by_parts_of_their_names() {
        let ids = |only: &[&str]| {
            let only: Vec<String> = only.iter().map(|s| s.to_string()).collect();
            select(&only).iter().map(Job::id).collect::<Vec<_>>()
        };
        assert_eq!(ids(&[]).len(), PATH.len());
        assert_eq!(ids(&["uring"]), ["uring-4k-randread-1", "uring-4k-randread-32"]);
        assert_eq!(ids(&["null-4k-randread-128", "write"]).len(), 2);
        assert!(ids(&["nvme"]).is_empty());
    }
}
