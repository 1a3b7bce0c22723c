//! What a peer measured at the same work: SPDK 26.05 (nvmf vfio-user as target, spdk_nvme_perf as
//! initiator, two processes over shared memory, one core each). Medians of 3 to 5 runs on a quiet
//! machine; single-core figures spread by 10 to 25 %, those of null by 30 %.
//!
//! They were measured at another time, so a ratio to them says where we stand and not more; on
//! another CPU ([`MACHINE`]) it says little. A job without a line here was not measured there.

use super::probe::Placement;

/// The machine the figures come from.
pub const MACHINE: &str = "AMD EPYC Zen 3, 2.45 GHz, 2 virtual CPUs";

/// Who measured what.
pub const PEER: &str = "SPDK 26.05";

/// Milliseconds from the start of nvmf_tgt until its RPC answers, on a busy machine.
pub const START_MS: f64 = 236.0;
/// Its resident memory without huge pages, MB of 10^6 bytes as it was written down.
pub const RESIDENT_MB: f64 = 15.5;

/// A peer's figures of one job.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Reference {
    /// The job's id.
    pub job: &'static str,
    /// I/Os per second, cores near.
    pub near: f64,
    /// The same, cores far.
    pub far: f64,
    /// Median latency in microseconds.
    pub p50_us: Option<f64>,
    /// What is not alike, or not known.
    pub note: Option<&'static str>,
}

impl Reference {
    /// I/Os per second in this placement.
    pub fn iops(&self, placement: Placement) -> f64 {
        match placement {
            Placement::Near => self.near,
            Placement::Far => self.far,
        }
    }
}

const UNPLACED: Option<&str> = Some("near and far not told apart");
const BDEV_ONLY: Option<&str> =
    Some("bdevperf: the block device alone, without target and fabric; other load not filtered");

const fn both(
    job: &'static str,
    iops: f64,
    p50: Option<f64>,
    note: Option<&'static str>,
) -> Reference {
    Reference { job, near: iops, far: iops, p50_us: p50, note }
}

/// The figures.
pub const SPDK: &[Reference] = &[
    both("null-4k-randread-1", 789e3, Some(1.29), UNPLACED),
    Reference { job: "null-4k-randread-32", near: 3.64e6, far: 2.79e6, p50_us: None, note: None },
    Reference { job: "null-4k-randread-128", near: 4.59e6, far: 3.16e6, p50_us: None, note: None },
    Reference {
        job: "malloc-4k-randread-1",
        near: 522e3,
        far: 393e3,
        p50_us: Some(2.15),
        note: Some("far: far and mixed runs; p50 2.0-2.3"),
    },
    both("malloc-4k-randread-32", 733e3, None, UNPLACED),
    both("malloc-4k-randread-128", 713e3, None, UNPLACED),
    both("malloc-4k-randwrite-32", 748e3, None, UNPLACED),
    both("malloc-128k-randread-1", 68e3, Some(15.0), UNPLACED),
    both("malloc-128k-randread-32", 64e3, None, UNPLACED),
    both("uring-4k-randread-1", 18e3, None, BDEV_ONLY),
    both("uring-4k-randread-32", 68e3, None, BDEV_ONLY),
];

/// The peer's figures of a job.
pub fn of(job: &str) -> Option<&'static Reference> {
    SPDK.iter().find(|reference| reference.job == job)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::matrix::jobs;

    #[test]
    fn every_reference_belongs_to_a_job() {
        let ids: Vec<String> = jobs::PATH.iter().map(|job| job.id()).collect();
        for reference in SPDK {
            assert!(ids.iter().any(|id| id == reference.job), "{}", reference.job);
        }
    }

    #[test]
    fn placements_are_looked_up_apart() {
        let reference = of("null-4k-randread-128").unwrap();
        assert_eq!(reference.iops(Placement::Near), 4.59e6);
        assert_eq!(reference.iops(Placement::Far), 3.16e6);
        assert_eq!(of("null-4k-randread-7"), None);
    }
}
