//! From runs to rows: one row per job and placement, with medians, and the peer's figure beside it.
//!
//! ```text
//!   run --> flipped or unknown?  left out
//!       --> filed near or far --> left alone? --> counts
//!                             \-> disturbed   --> counts only if no run of the row was left alone
//! ```
//! Which runs count is decided by what the machine did, never by the figures themselves.

use serde::Serialize;

use super::jobs::Job;
use super::probe::Placement;
use super::record::Run;
use super::reference;
use super::stats::Spread;

/// A line of the table.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// As in [`Run::group`].
    pub group: &'static str,
    /// The job's id.
    pub job: String,
    /// The job for people.
    pub title: String,
    /// Where the cores were.
    pub placement: Placement,
    /// Runs that were filed here.
    pub filed: usize,
    /// Of them, those that count.
    pub counted: usize,
    /// True when even those that count were disturbed.
    pub is_disturbed: bool,
    /// I/Os per second.
    pub iops: Spread,
    /// Median latencies.
    pub p50_us: Spread,
    /// 99th percentiles.
    pub p99_us: Spread,
    /// CPU time of the target's core per command.
    pub target_ns_per_cmd: Spread,
    /// The busy part of it, if the target told it in every run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_busy_ns_per_cmd: Option<Spread>,
    /// The peer's figure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reference: Option<Beside>,
}

/// A peer's figure and how we compare.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Beside {
    /// Who.
    pub peer: &'static str,
    /// Its I/Os per second in this placement.
    pub iops: f64,
    /// Its median latency, if known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p50_us: Option<f64>,
    /// Our median by its.
    pub ratio: f64,
    /// What is not alike.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<&'static str>,
}

/// The rows of all jobs, in their order, near before far.
pub fn rows(jobs: &[Job], runs: &[Run]) -> Vec<Row> {
    let pairs = jobs.iter().flat_map(|job| Placement::ALL.map(|placement| (job, placement)));
    pairs.filter_map(|(job, placement)| row(job, placement, runs)).collect()
}

/// None when no run was filed here.
fn row(job: &Job, placement: Placement, runs: &[Run]) -> Option<Row> {
    let id = job.id();
    let here = |run: &&Run| run.job == id && run.filing.placement() == Some(placement);
    let filed: Vec<&Run> = runs.iter().filter(here).collect();
    let quiet = filed.iter().filter(|run| !run.disturbance.is_disturbed());
    let quiet: Vec<&Run> = quiet.copied().collect();
    let is_disturbed = quiet.is_empty();
    let counted = if is_disturbed { &filed } else { &quiet };
    let spread = |value: fn(&Run) -> f64| Spread::of(counted.iter().map(|run| value(run)));
    let iops = spread(|run| run.iops)?;
    let busy: Option<Vec<f64>> = counted.iter().map(|run| run.target_busy_ns_per_cmd).collect();
    let reference = reference::of(&id).map(|found| Beside {
        peer: reference::PEER,
        iops: found.iops(placement),
        p50_us: found.p50_us,
        ratio: iops.median / found.iops(placement),
        note: found.note,
    });
    Some(Row {
        group: counted[0].group,
        title: job.title(),
        placement,
        filed: filed.len(),
        counted: counted.len(),
        is_disturbed,
        iops,
        p50_us: spread(|run| run.p50_us)?,
        p99_us: spread(|run| run.p99_us)?,
        target_ns_per_cmd: spread(|run| run.target_ns_per_cmd)?,
        target_busy_ns_per_cmd: busy.and_then(Spread::of),
        reference,
        job: id,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::matrix::jobs;
    use crate::matrix::probe::Filing;

    const JOB: Job = jobs::PATH[1];

    #[test]
    fn placements_get_rows_of_their_own_and_flipped_runs_none() {
        let runs = [
            Run::sample(&JOB, 4.0e6, Filing::Near, false),
            Run::sample(&JOB, 4.2e6, Filing::Near, false),
            Run::sample(&JOB, 3.0e6, Filing::Far, false),
            Run::sample(&JOB, 1.0, Filing::Flipped, false),
            Run::sample(&JOB, 1.0, Filing::Unknown, false),
        ];
        let [near, far] = &rows(&[JOB], &runs)[..] else { panic!("two rows") };
        assert_eq!((near.placement, near.filed, near.iops.median), (Placement::Near, 2, 4.1e6));
        assert_eq!((far.placement, far.filed, far.iops.median), (Placement::Far, 1, 3.0e6));
        let beside = |row: &Row| row.reference.clone().unwrap();
        assert_eq!((beside(near).iops, beside(far).iops), (3.64e6, 2.79e6));
        assert!((beside(near).ratio - 4.1 / 3.64).abs() < 1e-9);
    }

    #[test]
    fn disturbed_runs_count_only_where_there_are_no_others() {
        let mixed = [
            Run::sample(&JOB, 4.0e6, Filing::Near, false),
            Run::sample(&JOB, 2.0e6, Filing::Near, true),
            Run::sample(&JOB, 1.9e6, Filing::Far, true),
        ];
        let rows = rows(&[JOB], &mixed);
        assert_eq!((rows[0].filed, rows[0].counted, rows[0].is_disturbed), (2, 1, false));
        assert_eq!(rows[0].iops.min, 4.0e6);
        assert_eq!((rows[1].filed, rows[1].counted, rows[1].is_disturbed), (1, 1, true));
    }

    #[test]
    fn jobs_are_not_mixed_and_one_without_runs_has_no_row() {
        let other = jobs::PATH[2];
        let runs = [Run::sample(&other, 4.0e6, Filing::Near, false)];
        let rows = rows(&[JOB, other], &runs);
        assert_eq!(rows.len(), 1);
        assert_eq!(rows[0].job, other.id());
    }

    #[test]
    fn a_busy_time_is_shown_only_when_every_run_has_it() {
        let mut one = Run::sample(&JOB, 4.0e6, Filing::Near, false);
        one.target_busy_ns_per_cmd = Some(90.0);
        let two = Run::sample(&JOB, 4.0e6, Filing::Near, false);
        let busy = |runs: &[Run]| rows(&[JOB], runs)[0].target_busy_ns_per_cmd;
        assert_eq!(busy(&[one.clone(), two]), None);
        assert_eq!(busy(&[one]).unwrap().median, 90.0);
    }
}
