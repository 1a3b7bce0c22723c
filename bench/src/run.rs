//! `usurp-perf run`: turns the options into a plan that fits the LUs, or refuses them with the
//! reason; then works through the phases and puts the report together.

use std::io::IsTerminal;

use usurp_fabric::Fabric;
use usurp_reactor::cpu;

use crate::args::RunArgs;
use crate::cdb::Capacity;
use crate::client::Client;
use crate::cpu::PeerCpu;
use crate::error::Error;
use crate::list::human_size;
use crate::load::{Load, Phase, Plan, Progress};
use crate::report::{Cpu, Report, Setup};

/// Bytes of a LUN that `--verify` uses unless `--range` says otherwise: its table takes 4 bytes a
/// block.
const VERIFY_RANGE: u64 = 1 << 30;
/// The largest `--bs`.
const BS_MAX: u64 = 16 << 20;
/// The most memory for data buffers.
const BUFFERS_MAX: u64 = 8 << 30;
/// Seconds of a run that neither `--runtime` nor `--size` ends.
const RUNTIME_DEFAULT: f64 = 10.0;

/// An LU as far as a plan cares.
#[derive(Copy, Clone, Debug)]
pub struct Lu {
    /// Its number.
    pub lun: u16,
    /// Its size.
    pub capacity: Capacity,
    /// Largest transfer in blocks, 0 = no limit reported.
    pub max_transfer_blocks: u32,
}

/// Checks what can be checked before connecting.
pub fn check_early(args: &RunArgs) -> Result<(), Error> {
    if args.bs == 0 || !args.bs.is_multiple_of(512) || args.bs > BS_MAX {
        let most = human_size(BS_MAX);
        let why = format!("--bs {} is not a multiple of 512 from 512 to {most}", args.bs);
        return Err(Error::Usage(why));
    }
    let buffers = u64::from(args.iodepth) * u64::from(args.channels) * args.bs;
    if buffers > BUFFERS_MAX {
        let (want, most) = (human_size(buffers), human_size(BUFFERS_MAX));
        let why = format!("--iodepth x --channels x --bs is {want} of buffers; at most {most}");
        return Err(Error::Usage(why));
    }
    if args.size.is_some_and(|s| s < args.bs) {
        return Err(Error::usage("--size is less than one I/O of --bs"));
    }
    let mut luns = args.lun.clone();
    luns.sort_unstable();
    if luns.windows(2).any(|w| w[0] == w[1]) {
        return Err(Error::usage("--lun names a LUN twice"));
    }
    Ok(())
}

/// The plan, or why there can be none. `depth` is what the channels allow, `slots` the sum of them.
pub fn plan(args: &RunArgs, lus: &[Lu], depth: u32, slots: u64) -> Result<Plan, Error> {
    check_early(args)?;
    for lu in lus {
        let (lun, block) = (lu.lun, u64::from(lu.capacity.block_size));
        if !args.bs.is_multiple_of(block) {
            let why = format!("--bs {} is no multiple of LUN {lun}'s block size {block}", args.bs);
            return Err(Error::Usage(why));
        }
        let most = u64::from(lu.max_transfer_blocks) * block;
        if most != 0 && args.bs > most {
            let why = format!("--bs {} is more than LUN {lun} takes at once: {most}", args.bs);
            return Err(Error::Usage(why));
        }
        if let Some(range) = args.range.filter(|&r| r > lu.capacity.bytes()) {
            let have = lu.capacity.bytes();
            let why = format!("--range {range} is more than LUN {lun} has: {have} bytes");
            return Err(Error::Usage(why));
        }
    }
    let smallest = lus.iter().map(|lu| lu.capacity.bytes()).min().unwrap_or(0);
    let most = if args.verify { VERIFY_RANGE } else { u64::MAX };
    let range = args.range.unwrap_or(most.min(smallest));
    let units = range / args.bs;
    if units == 0 {
        return Err(Error::usage(format!(
            "a range of {range} bytes has no room for --bs {}",
            args.bs
        )));
    }
    if args.verify && units < slots {
        return Err(Error::Usage(format!(
            "--verify keeps I/Os on distinct blocks: {units} I/Os fit the range, {slots} are \
             wanted at once; take a larger --range or a smaller --iodepth"
        )));
    }
    let endless = args.runtime.is_none() && args.size.is_none();
    let runtime = args.runtime.or(endless.then_some(RUNTIME_DEFAULT));
    Ok(Plan {
        mode: args.rw,
        read_percent: args.rwmixread,
        io_bytes: args.bs as u32,
        depth,
        range_bytes: units * args.bs,
        runtime_ns: runtime.map(|s| (s * 1e9) as u64),
        total_bytes: args.size,
        seed: args.seed.unwrap_or_else(crate::connect::random_u64),
        verify: args.verify,
        spin: args.spin,
    })
}

/// Runs the load on a connected client. `target` is its address, for the report.
pub fn run<F: Fabric>(
    client: &mut Client<F>,
    args: &RunArgs,
    target: String,
) -> Result<Report, Error> {
    let mut lus = Vec::new();
    for &lun in &args.lun {
        client.wait_ready(lun)?;
        let capacity = client.read_capacity16(lun)?;
        let max_transfer_blocks = client.block_limits(lun)?.max_transfer_blocks;
        lus.push(Lu { lun, capacity, max_transfer_blocks });
    }
    let depth = args.iodepth.min(client.slots_per_channel());
    if depth < args.iodepth {
        let why = "the target's credits (req_lim) allow no more";
        eprintln!("usurp-perf: depth {depth} instead of {}: {why}", args.iodepth);
    }
    let slots = u64::from(depth) * client.channels() as u64;
    let plan = plan(args, &lus, depth, slots)?;
    let preload = plan.verify && !args.no_preload && plan.mode.reads();
    if plan.mode.writes() || preload {
        for lu in &lus {
            let (lun, range) = (lu.lun, human_size(plan.range_bytes));
            eprintln!("usurp-perf: overwriting LUN {lun} of {target}: its first {range}");
        }
    }
    if let Some(core) = args.core {
        let pinned = cpu::pin_current(core);
        pinned.map_err(|why| Error::usage(format!("--core {core}: {why}")))?;
    }
    let setup = setup(args, &plan, target, client.channels());
    let luns: Vec<(u16, Capacity)> = lus.iter().map(|lu| (lu.lun, lu.capacity)).collect();
    let mut load = Load::new(client, plan.clone(), &luns);
    let shown = args.progress || std::io::stderr().is_terminal();
    let mut progress = |p: Progress| {
        if shown {
            eprintln!("{}", progress_line(&p));
        }
    };
    if preload {
        load.phase(Phase::Preload, &mut progress)?;
    }
    let peer = args.target_pid.map(PeerCpu::read).transpose().map_err(Error::Usage)?;
    let own = cpu::thread_cpu_ns();
    load.phase(Phase::Measure, &mut progress)?;
    let own = cpu::thread_cpu_ns() - own;
    let peer_after = args.target_pid.map(PeerCpu::read).transpose().map_err(Error::PeerGone)?;
    if plan.verify {
        load.phase(Phase::ReadBack, &mut progress)?;
    }
    let measured = load.finish();
    let [read, write] = &measured.meters;
    let ios = (read.ios() + write.ios()).max(1) as f64;
    let seconds = measured.elapsed_ns as f64 / 1e9;
    let mut report = Report::new(setup, seconds, [read, write], args.percentiles);
    report.cpu = Cpu {
        initiator_ns_per_io: own as f64 / ios,
        initiator_busy_ns_per_io: measured.busy_ns as f64 / ios,
        target_ns_per_io: peer.zip(peer_after).map(|(a, b)| b.since(a) as f64 / ios),
        target_threads: peer_after.map(|p| p.threads),
        target_busy_ns_per_io: None,
    };
    report.retries = measured.retries;
    report.credit_waits = measured.credit_waits;
    report.blocks_verified = plan.verify.then_some(measured.blocks_verified);
    Ok(report)
}

fn setup(args: &RunArgs, plan: &Plan, target: String, channels: usize) -> Setup {
    Setup {
        version: env!("CARGO_PKG_VERSION"),
        target,
        luns: args.lun.clone(),
        rw: plan.mode,
        rwmixread: (plan.mode == crate::pattern::Mode::RandRw).then_some(plan.read_percent),
        bs: u64::from(plan.io_bytes),
        iodepth: plan.depth,
        channels,
        range: plan.range_bytes,
        desc: args.desc.word().into(),
        seed: plan.seed,
        verify: plan.verify,
    }
}

/// One line of progress: average rates of the phase so far.
fn progress_line(p: &Progress) -> String {
    let seconds = p.elapsed_ns as f64 / 1e9;
    let name = match p.phase {
        Phase::Preload => "preload",
        Phase::Measure => "run",
        Phase::ReadBack => "read back",
    };
    let mib = p.bytes as f64 / seconds / f64::from(1 << 20);
    format!("{name} {seconds:.0} s: {:.0} IOPS, {mib:.1} MiB/s", p.ios as f64 / seconds)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use clap::Parser;

    fn args(line: &str) -> RunArgs {
        let words = ["usurp-perf", "run"].into_iter().chain(line.split_ascii_whitespace());
        match Cli::try_parse_from(words).unwrap().command {
            Command::Run(args) => args,
            other => panic!("{other:?}"),
        }
    }

    fn lu(block_size: u32, blocks: u64) -> Lu {
        let capacity = Capacity { blocks, block_size, thin: false };
        Lu { lun: 0, capacity, max_transfer_blocks: 2048 }
    }

    fn refused(line: &str, lus: &[Lu], why: &str) {
        let error = plan(&args(line), lus, 32, 32).expect_err(line);
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains(why), "{line}: {error}");
    }

    #[test]
    fn a_plan_covers_the_whole_lu_and_stops_after_ten_seconds() {
        let p = plan(&args(""), &[lu(512, 1000)], 32, 32).unwrap();
        assert_eq!(p.range_bytes, 1000 / 8 * 4096);
        assert_eq!(p.runtime_ns, Some(10_000_000_000));
        let p = plan(&args("--size 1m"), &[lu(512, 1000)], 32, 32).unwrap();
        assert_eq!((p.runtime_ns, p.total_bytes), (None, Some(1 << 20)));
    }

    #[test]
    fn verify_bounds_the_range_unless_told_otherwise() {
        let big = [lu(4096, 1 << 20)];
        assert_eq!(plan(&args("--verify"), &big, 32, 32).unwrap().range_bytes, 1 << 30);
        let wide = plan(&args("--verify --range 2g"), &big, 32, 32).unwrap();
        assert_eq!(wide.range_bytes, 2 << 30);
    }

    #[test]
    fn the_smallest_lu_bounds_the_range_of_all() {
        let lus = [lu(512, 4096), lu(512, 1024)];
        assert_eq!(plan(&args(""), &lus, 32, 32).unwrap().range_bytes, 1024 * 512);
    }

    #[test]
    fn what_does_not_fit_the_lu_is_refused_with_the_reason() {
        refused("--bs 512", &[lu(4096, 100)], "no multiple of LUN 0's block size 4096");
        refused("--bs 1000", &[lu(512, 100)], "not a multiple of 512");
        refused("--bs 0", &[lu(512, 100)], "not a multiple of 512");
        refused("--bs 32m", &[lu(512, 100)], "16MiB");
        refused("--bs 2m", &[lu(512, 1 << 20)], "takes at once: 1048576");
        refused("--range 1g", &[lu(512, 100)], "has: 51200 bytes");
        refused("--bs 64k", &[lu(512, 100)], "no room");
        refused("--size 1k", &[lu(512, 100)], "less than one I/O");
        refused("--bs 16m --iodepth 4096 --channels 64", &[lu(512, 100)], "at most 8GiB");
        refused("--lun 1,1", &[lu(512, 100)], "twice");
        refused("--verify --range 64k", &[lu(512, 1000)], "16 I/Os fit the range, 32 are wanted");
    }

    #[test]
    fn a_progress_line_has_both_rates() {
        let p =
            Progress { phase: Phase::Measure, elapsed_ns: 2_000_000_000, ios: 100, bytes: 4 << 20 };
        assert_eq!(progress_line(&p), "run 2 s: 50 IOPS, 2.0 MiB/s");
    }
}
