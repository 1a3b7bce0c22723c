//! What a run measured: latency histograms and counters while it runs, then a table for people and
//! JSON for programs. Recording allocates nothing: the histograms' range is fixed at the start
//! (1 ns to 60 s, three digits) and longer latencies are counted as 60 s.

use std::fmt::Write as _;

use hdrhistogram::Histogram;
use serde::Serialize;

use crate::cpu::PeerBusy;

/// The longest latency told apart, in nanoseconds.
const LATENCY_NS_MAX: u64 = 60_000_000_000;
/// The percentiles of `--percentiles`.
const PERCENTILES: [f64; 12] =
    [1.0, 5.0, 10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0, 99.5, 99.9, 99.99];

/// Counters and latencies of one direction.
#[derive(Debug)]
pub struct Meter {
    /// Latency in nanoseconds of every counted I/O.
    latency: Histogram<u64>,
    /// I/Os completed with GOOD status and no residual.
    ios: u64,
    /// Their bytes.
    bytes: u64,
}

impl Default for Meter {
    fn default() -> Meter {
        let latency = Histogram::new_with_bounds(1, LATENCY_NS_MAX, 3).expect("constant bounds");
        Meter { latency, ios: 0, bytes: 0 }
    }
}

impl Meter {
    /// Counts one I/O.
    #[inline]
    pub fn record(&mut self, latency_ns: u64, bytes: u64) {
        self.latency.saturating_record(latency_ns.max(1));
        self.ios += 1;
        self.bytes += bytes;
    }

    /// I/Os so far.
    pub fn ios(&self) -> u64 {
        self.ios
    }

    /// Bytes so far.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    fn summary(&self, seconds: f64, percentiles: bool) -> Option<Direction> {
        if self.ios == 0 {
            return None;
        }
        let us = |ns: u64| ns as f64 / 1000.0;
        let at = |p: f64| us(self.latency.value_at_percentile(p));
        let list = PERCENTILES.iter().filter(|_| percentiles);
        Some(Direction {
            ios: self.ios,
            bytes: self.bytes,
            iops: self.ios as f64 / seconds,
            mib_per_s: self.bytes as f64 / seconds / f64::from(1 << 20),
            mean_us: self.latency.mean() / 1000.0,
            p50_us: at(50.0),
            p99_us: at(99.0),
            p999_us: at(99.9),
            min_us: us(self.latency.min()),
            max_us: us(self.latency.max()),
            percentiles_us: list.map(|&p| Percentile { percent: p, us: at(p) }).collect(),
        })
    }
}

/// One point of the latency distribution.
#[derive(Clone, Debug, Serialize)]
pub struct Percentile {
    /// Percent of I/Os at or below `us`.
    pub percent: f64,
    /// Microseconds.
    pub us: f64,
}

/// The result of one direction.
#[derive(Clone, Debug, Serialize)]
pub struct Direction {
    /// I/Os completed.
    pub ios: u64,
    /// Bytes moved.
    pub bytes: u64,
    /// I/Os per second.
    pub iops: f64,
    /// MiB per second.
    pub mib_per_s: f64,
    /// Mean latency, microseconds (all latencies are from post to reaping).
    pub mean_us: f64,
    /// Median latency.
    pub p50_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
    /// 99.9th percentile.
    pub p999_us: f64,
    /// Shortest.
    pub min_us: f64,
    /// Longest.
    pub max_us: f64,
    /// The whole distribution, with `--percentiles`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub percentiles_us: Vec<Percentile>,
}

/// CPU time of both sides.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Cpu {
    /// Our thread's CPU time per I/O, nanoseconds: wall time per I/O, because the thread spins.
    pub initiator_ns_per_io: f64,
    /// The part of it spent in turns that found something to do.
    pub initiator_busy_ns_per_io: f64,
    /// CPU time of the target's reactor threads per I/O; spinning reactors: wall time per I/O.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_ns_per_io: Option<f64>,
    /// Number of the target's reactor threads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_threads: Option<u32>,
    /// The busy part of the target's time per I/O, when the target told it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_busy_ns_per_io: Option<f64>,
}

impl Cpu {
    /// Puts a busy time told by the target into the report.
    pub fn with_peer_busy(mut self, busy: Option<PeerBusy>, ios: u64) -> Cpu {
        self.target_busy_ns_per_io = busy.map(|b| b.busy_ns as f64 / ios.max(1) as f64);
        self
    }
}

/// How the run was set up; repeated in the JSON so that a file explains itself.
#[derive(Clone, Debug, Serialize)]
pub struct Setup {
    /// Version of this program.
    pub version: &'static str,
    /// The target's address.
    pub target: String,
    /// The LUs.
    pub luns: Vec<u16>,
    /// `--rw`.
    pub rw: crate::pattern::Mode,
    /// Percentage of reads in a mix.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rwmixread: Option<u8>,
    /// Bytes per I/O.
    pub bs: u64,
    /// Outstanding I/Os per channel, after the target's credit limit.
    pub iodepth: u32,
    /// RDMA channels.
    pub channels: usize,
    /// Bytes at the start of each LU that were used.
    pub range: u64,
    /// Data-buffer descriptor format.
    pub desc: String,
    /// Seed of addresses and data.
    pub seed: u64,
    /// `--verify`.
    pub verify: bool,
}

/// The report of one run.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// How it was set up.
    pub setup: Setup,
    /// Wall time of the measured part.
    pub seconds: f64,
    /// Reads, if there were any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read: Option<Direction>,
    /// Writes, if there were any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write: Option<Direction>,
    /// I/Os per second of both directions.
    pub iops: f64,
    /// CPU time per I/O.
    pub cpu: Cpu,
    /// Commands sent again after UNIT ATTENTION, BUSY or TASK SET FULL.
    pub retries: u64,
    /// Turns in which an I/O waited for a credit of the target.
    pub credit_waits: u64,
    /// Blocks read and found right, with `--verify`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub blocks_verified: Option<u64>,
}

impl Report {
    /// Puts the figures together.
    pub fn new(setup: Setup, seconds: f64, meters: [&Meter; 2], percentiles: bool) -> Report {
        let [read, write] = meters;
        let seconds = seconds.max(1e-9);
        Report {
            setup,
            seconds,
            read: read.summary(seconds, percentiles),
            write: write.summary(seconds, percentiles),
            iops: (read.ios + write.ios) as f64 / seconds,
            cpu: Cpu::default(),
            retries: 0,
            credit_waits: 0,
            blocks_verified: None,
        }
    }

    /// The table for people.
    pub fn table(&self) -> String {
        let mut out = String::new();
        let s = &self.setup;
        // Writing to a String cannot fail.
        let _ = writeln!(
            out,
            "{:?} bs {} depth {} x {} channel(s), LUN {:?}, {:.2} s, seed {}",
            s.rw, s.bs, s.iodepth, s.channels, s.luns, self.seconds, s.seed
        );
        let _ = writeln!(
            out,
            "{:6} {:>12} {:>10} {:>9} {:>9} {:>9} {:>9} {:>9}",
            "", "IOPS", "MiB/s", "mean us", "p50", "p99", "p99.9", "max"
        );
        for (name, d) in [("read", &self.read), ("write", &self.write)] {
            let Some(d) = d else { continue };
            let _ = writeln!(
                out,
                "{name:6} {:>12.0} {:>10.1} {:>9.2} {:>9.2} {:>9.2} {:>9.2} {:>9.2}",
                d.iops, d.mib_per_s, d.mean_us, d.p50_us, d.p99_us, d.p999_us, d.max_us
            );
            for p in &d.percentiles_us {
                let _ = writeln!(out, "       {:>6.2} % <= {:>10.2} us", p.percent, p.us);
            }
        }
        self.table_cpu(&mut out);
        if let Some(blocks) = self.blocks_verified {
            let _ = writeln!(out, "verified: {blocks} blocks read and found right");
        }
        if self.retries + self.credit_waits > 0 {
            let _ = writeln!(
                out,
                "retries: {}; turns without credit: {}",
                self.retries, self.credit_waits
            );
        }
        out
    }

    fn table_cpu(&self, out: &mut String) {
        let c = &self.cpu;
        let _ = write!(
            out,
            "CPU per I/O: initiator {:.0} ns (busy {:.0} ns)",
            c.initiator_ns_per_io, c.initiator_busy_ns_per_io
        );
        if let (Some(ns), Some(threads)) = (c.target_ns_per_io, c.target_threads) {
            let _ = write!(out, "; target {ns:.0} ns in {threads} reactor(s)");
        }
        if let Some(ns) = c.target_busy_ns_per_io {
            let _ = write!(out, " (busy {ns:.0} ns)");
        }
        out.push('\n');
    }

    /// The same as JSON, one object, ending in a newline.
    pub fn json(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).expect("plain data");
        text.push('\n');
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pattern::Mode;

    fn setup() -> Setup {
        Setup {
            version: "0",
            target: "shm:/x".into(),
            luns: vec![0],
            rw: Mode::RandRw,
            rwmixread: Some(70),
            bs: 4096,
            iodepth: 32,
            channels: 1,
            range: 1 << 20,
            desc: "direct".into(),
            seed: 1,
            verify: false,
        }
    }

    fn report(percentiles: bool) -> Report {
        let (mut read, write) = (Meter::default(), Meter::default());
        for i in 1..=1000u64 {
            read.record(i * 1000, 4096);
        }
        Report::new(setup(), 2.0, [&read, &write], percentiles)
    }

    #[test]
    fn rates_and_percentiles_come_out_right() {
        let d = report(false).read.unwrap();
        assert_eq!((d.ios, d.bytes), (1000, 4096 * 1000));
        assert!((d.iops - 500.0).abs() < 1e-6);
        assert!((d.mib_per_s - 1.953125).abs() < 1e-6);
        assert!((d.p50_us - 500.0).abs() < 1.0, "{}", d.p50_us);
        assert!((d.p99_us - 990.0).abs() < 1.0, "{}", d.p99_us);
        assert!((d.max_us - 1000.0).abs() < 1.0);
        assert!(d.percentiles_us.is_empty());
    }

    #[test]
    fn a_direction_without_io_is_left_out_everywhere() {
        let r = report(true);
        assert!(r.write.is_none());
        let json: serde_json::Value = serde_json::from_str(&r.json()).unwrap();
        assert!(json.get("write").is_none());
        assert_eq!(json["read"]["ios"], 1000);
        assert_eq!(json["read"]["percentiles_us"].as_array().unwrap().len(), PERCENTILES.len());
        assert_eq!(json["setup"]["rw"], "randrw");
        assert!(!r.table().contains("\nwrite"));
    }

    #[test]
    fn recording_never_resizes_and_clamps_at_the_longest() {
        let mut m = Meter::default();
        m.record(0, 1);
        m.record(u64::MAX, 1);
        let d = m.summary(1.0, false).unwrap();
        assert_eq!(d.ios, 2);
        assert!((59e6..61e6).contains(&d.max_us), "{}", d.max_us);
    }

    #[test]
    fn the_target_s_cpu_is_shown_only_when_known() {
        let mut r = report(false);
        assert!(!r.table().contains("target"));
        r.cpu.target_ns_per_io = Some(250.0);
        r.cpu.target_threads = Some(2);
        r.cpu = r.cpu.clone().with_peer_busy(Some(PeerBusy { busy_ns: 100_000 }), 1000);
        assert!(r.table().contains("target 250 ns in 2 reactor(s) (busy 100 ns)"), "{}", r.table());
    }
}
