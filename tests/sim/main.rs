//! Runs the simulation over many seeds.
//!
//! ```text
//!   cargo sim                 USURP_SEEDS (1,000) seeds from USURP_FIRST (1)
//!   cargo sim 12345           one seed; USURP_TRACE=1 prints its events
//!   USURP_SEED=12345 cargo test -p usurp-tests --test sim      the same
//! ```
//! A failure prints the seed and the command that replays it. Every 50th seed runs twice, and both
//! runs must have the same events at the same times.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::Instant;

use usurp_tests::world::{self, Summary};

/// Seeds of a usual run.
const SEEDS: u64 = 1_000;
/// One in so many runs twice.
const TWICE: u64 = 50;
/// Failures after which no more are looked for.
const FAILURES_MAX: usize = 3;

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
}

/// Runs one seed. None: it failed, and the panic message is on standard error.
fn one(seed: u64) -> Option<Summary> {
    catch_unwind(AssertUnwindSafe(|| world::run(seed))).ok()
}

fn replay(seed: u64) {
    eprintln!("\nseed {seed} failed. To replay it:");
    eprintln!("    USURP_SEED={seed} USURP_TRACE=1 cargo test -p usurp-tests --test sim\n");
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if args.iter().any(|a| a == "--list") {
        println!("simulation: test");
        return ExitCode::SUCCESS;
    }
    let named = args.iter().find_map(|a| a.parse().ok());
    if let Some(seed) = named.or_else(|| number("USURP_SEED")) {
        let Some(summary) = one(seed) else {
            replay(seed);
            return ExitCode::FAILURE;
        };
        println!("seed {seed}: {summary:?}");
        return ExitCode::SUCCESS;
    }
    let first = number("USURP_FIRST").unwrap_or(1);
    let count = number("USURP_SEEDS").unwrap_or(SEEDS);
    many(first, count)
}

fn many(first: u64, count: u64) -> ExitCode {
    let start = Instant::now();
    let mut failed = Vec::new();
    let mut all = Summary::default();
    for seed in first..first + count {
        let Some(summary) = one(seed) else {
            replay(seed);
            failed.push(seed);
            if failed.len() >= FAILURES_MAX {
                break;
            }
            continue;
        };
        if seed % TWICE == 0 && one(seed) != Some(summary) {
            eprintln!("\nseed {seed} is not repeatable: its second run differs from its first");
            replay(seed);
            failed.push(seed);
        }
        all.events += summary.events;
        all.answered += summary.answered;
        all.logins.0 += summary.logins.0;
        all.logins.1 += summary.logins.1;
        all.end_ns += summary.end_ns;
    }
    let seconds = start.elapsed().as_secs_f64();
    println!(
        "simulation: seeds {first}..{} in {seconds:.1} s: {} commands answered, {} logins ({} \
         rejected), {} events, {:.1} s of virtual time; failed: {failed:?}",
        first + count,
        all.answered,
        all.logins.0,
        all.logins.1,
        all.events,
        all.end_ns as f64 / 1e9,
    );
    if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
