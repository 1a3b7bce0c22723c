//! The command line: `usurp run`, `usurp check`, `usurp login-info`, `usurp doctor`.
//!
//! Owns: what is printed where (reports and the banner on standard output, errors and the log on
//! standard error) and the exit codes. Never: decides anything about the target.
//!
//! | exit code | meaning |
//! |---|---|
//! | 0 | all went well |
//! | 1 | it did not work on this machine, or did not end well; `doctor`: it cannot work |
//! | 2 | the command line was wrong |
//! | 3 | the configuration was refused; nothing was started |
//! | 4 | a socket or an image is in use by another process |

use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use usurp_bdev::registry::Registry;

use crate::config::{Config, ConfigErrors};
use crate::doctor;
use crate::login_info;
use crate::serve::{self, RunOptions};

/// The configuration was refused.
const CONFIG: u8 = 3;
/// Something is in use.
const BUSY: u8 = 4;

const EXIT_CODES: &str = "Exit codes: 0 all went well; 1 it did not work on this machine; \
    2 wrong command line; 3 the configuration was refused; 4 a socket or an image is in use.";

/// A user-space SRP target: serves block devices to SCSI initiators over RDMA or shared memory.
#[derive(Debug, Parser)]
#[command(name = "usurp", version, about, after_help = EXIT_CODES)]
struct Args {
    /// What to do.
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve until SIGTERM or SIGINT
    Run {
        /// The YAML file; configs/reference.yaml explains every key
        config: PathBuf,
        /// Write the line `ready` to this file or FIFO once logins are accepted
        #[arg(long, value_name = "FILE")]
        ready_file: Option<PathBuf>,
        /// Print no banner
        #[arg(long, short)]
        quiet: bool,
    },
    /// Read and check a configuration; start nothing
    Check {
        /// The YAML file
        config: PathBuf,
        /// Also open the block devices, then close them again
        #[arg(long)]
        open: bool,
    },
    /// Print what a Linux initiator writes to `add_target`, for each RDMA port that is served
    ///
    /// One string a line; lines that begin with # say by which device. It may run beside
    /// the target.
    LoginInfo {
        /// The YAML file
        config: PathBuf,
    },
    /// Say what this machine lacks, and the command that mends it
    Doctor,
}

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    let args = Args::parse(); // ends the process with 2 if there is no sense in it
    // What `check` and `doctor` do on the way is no news; their report is.
    log_to_stderr(if matches!(args.command, Command::Run { .. }) { "info" } else { "warn" });
    let code = match args.command {
        Command::Run { config, ready_file, quiet } => {
            run(&config, &RunOptions { ready_file, quiet })
        }
        Command::Check { config, open } => check(&config, open),
        Command::LoginInfo { config } => login_info(&config),
        Command::Doctor => examine(),
    };
    ExitCode::from(code)
}

/// `USURP_LOG` is a filter such as `debug` or `usurp_target=trace`.
fn log_to_stderr(default: &str) {
    let filter = tracing_subscriber::EnvFilter::try_from_env("USURP_LOG");
    let filter = filter.unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(default));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr)
        .init();
}

fn run(path: &Path, options: &RunOptions) -> u8 {
    let config = match Config::load(path) {
        Ok(config) => config,
        Err(errors) => return refuse(&errors),
    };
    match serve::run(&config, options) {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("{error}");
            error.exit_code()
        }
    }
}

fn refuse(errors: &ConfigErrors) -> u8 {
    eprintln!("{errors}");
    CONFIG
}

fn check(path: &Path, open: bool) -> u8 {
    let config = match Config::load(path) {
        Ok(config) => config,
        Err(errors) => return refuse(&errors),
    };
    for warning in &config.warnings {
        println!("warning: {warning}\n");
    }
    if open && let Err(code) = open_bdevs(&config) {
        return code;
    }
    let target = &config.target;
    let luns: usize = target.hosts.iter().map(|host| host.luns.len()).sum();
    println!(
        "{}: accepted: {}, {}, {}, {}",
        path.display(),
        count(config.bdevs.len(), "bdev"),
        count(target.listen.len(), "listener"),
        count(target.hosts.len(), "host"),
        count(luns, "LUN"),
    );
    0
}

fn login_info(path: &Path) -> u8 {
    let config = match Config::load(path) {
        Ok(config) => config,
        Err(errors) => return refuse(&errors),
    };
    match login_info::of_this_machine(&config) {
        Ok(text) => {
            print!("{text}");
            0
        }
        Err(why) => {
            eprintln!("{why}");
            1
        }
    }
}

fn count(number: usize, thing: &str) -> String {
    if number == 1 { format!("1 {thing}") } else { format!("{number} {thing}s") }
}

/// Opens every bdev and says what it is; they close again when this returns.
fn open_bdevs(config: &Config) -> Result<(), u8> {
    let mut registry = Registry::new();
    if let Err(errors) = registry.open_all(&config.bdev_specs()) {
        let is_busy = errors.iter().all(|(_, error)| error.busy);
        eprintln!("{}", config.bdev_problems(errors));
        return Err(if is_busy { BUSY } else { CONFIG });
    }
    for bdev in registry.bdevs() {
        let geometry = bdev.geometry();
        println!(
            "bdev {}: {}, {} blocks of {} bytes",
            bdev.name(),
            bdev.module(),
            geometry.blocks,
            geometry.block_size,
        );
    }
    Ok(())
}

fn examine() -> u8 {
    let findings = doctor::examine();
    for finding in &findings {
        println!("{finding}");
    }
    let able = doctor::is_able(&findings);
    println!("{}", if able { "usurp can run here" } else { "usurp cannot run here" });
    u8::from(!able)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Args::command().debug_assert();
    }

    #[test]
    fn things_are_counted_in_english() {
        assert_eq!(count(1, "LUN"), "1 LUN");
        assert_eq!(count(0, "LUN"), "0 LUNs");
        assert_eq!(count(2, "bdev"), "2 bdevs");
    }
}
