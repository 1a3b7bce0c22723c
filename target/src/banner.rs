//! What a starting target says: what is served where, from which memory, and what an initiator
//! types to log in. On standard output, and "ready" in the ready file.

use std::fmt::Write as _;
use std::io::Write as _;

use usurp_bdev::registry::Registry;
use usurp_fabric::any::AnyCm;
use usurp_reactor::mem::{Arena, Backing};

use crate::config::Config;
use crate::login_info::listener_lines;
use crate::serve::{RunOptions, ServeError};

/// Says what is served where, on standard output and in the ready file.
pub(crate) fn announce(
    config: &Config,
    options: &RunOptions,
    bdevs: &Registry,
    cores: &[usize],
    memory: &str,
    cm: &AnyCm,
) -> Result<(), ServeError> {
    let text = banner(config, bdevs, cores, memory) + &how_to_log_in(config, cm);
    if !options.quiet {
        let mut out = std::io::stdout().lock();
        // A closed standard output is no reason not to serve.
        let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    }
    if let Some(path) = &options.ready_file {
        std::fs::write(path, "ready\n")
            .map_err(|e| ServeError::Start(format!("--ready-file {}: {e}", path.display())))?;
    }
    Ok(())
}

fn banner(config: &Config, bdevs: &Registry, cores: &[usize], memory: &str) -> String {
    let mut text = format!("usurp {} serves\n", env!("CARGO_PKG_VERSION"));
    let mut line = |s: String| {
        text.push_str(&s);
        text.push('\n');
    };
    for host in &config.target.hosts {
        line(format!("  host     {}", host.initiator));
        for lun in &host.luns {
            let bdev = bdevs.get(&config.bdevs[lun.bdev].name).expect("it was opened");
            let g = bdev.geometry();
            let gib = g.size_bytes() as f64 / f64::from(1 << 30);
            let mode = if lun.read_only || bdev.caps().read_only { ", read-only" } else { "" };
            line(format!(
                "    LUN {:<4} {} ({}, {gib:.3} GiB, {}-byte blocks{mode})",
                lun.lun,
                bdev.name(),
                bdev.module(),
                g.block_size
            ));
        }
    }
    let list: Vec<String> = cores.iter().map(usize::to_string).collect();
    line(format!("  reactors cores {}", list.join(", ")));
    text.push_str(memory);
    text
}

/// The line to type at an initiator, for each listener and address.
fn how_to_log_in(config: &Config, cm: &AnyCm) -> String {
    let of = |(index, listen)| listener_lines(&config.target, listen, &cm.rdma_addresses(index));
    config.target.listen.iter().enumerate().map(of).collect()
}

/// Adds a line on an arena.
pub(crate) fn describe(text: &mut String, arena: &Arena) {
    let mib = arena.len() as f64 / f64::from(1 << 20);
    let how = match arena.backing() {
        Backing::Huge { page } => format!("huge pages of {} KiB", page >> 10),
        Backing::Ordinary { locked, why } => {
            let locked = if *locked { "locked" } else { "not locked" };
            format!("ordinary pages, {locked} ({why})")
        }
    };
    writeln!(text, "  memory   {:<10} {mib:.1} MiB, {how}", arena.name()).expect("to a string");
}
