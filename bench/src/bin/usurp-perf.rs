//! `usurp-perf`: lists, copies and loads the logical units of an SRP target. Reads the command
//! line, connects, calls the library, prints; every decision is in the library.

#![forbid(unsafe_code)]

use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use usurp_bench::args::{Cli, Command, DescFormat, RunArgs};
use usurp_bench::client::Shape;
use usurp_bench::connect::{self, ShmClient};
use usurp_bench::copy::{self, COPY_CHUNK, COPY_DEPTH};
use usurp_bench::error::Error;
use usurp_bench::report::Report;
use usurp_bench::{list, run};

/// Bytes of a command's buffer where no `--bs` asks for more.
const BUFFER_MIN: u32 = 8192;
/// Commands at a time where no `--iodepth` asks for more.
const DEPTH_MIN: u32 = 2;

fn main() -> ExitCode {
    let cli = Cli::parse();
    match perform(&cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("usurp-perf: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}

fn perform(cli: &Cli) -> Result<(), Error> {
    if let Command::Run(args) = &cli.command {
        run::check_early(args)?;
    }
    let mut client = open(cli)?;
    match &cli.command {
        Command::Luns => print!("{}", list::luns(&mut client)?),
        Command::Inq { lun } => print!("{}", list::inq(&mut client, *lun)?),
        Command::Cp(args) => {
            let done = copy::copy(&mut client, args)?;
            let mib = done.bytes as f64 / f64::from(1 << 20);
            let rate = mib / done.seconds.max(1e-9);
            println!("{} bytes in {:.3} s, {rate:.1} MiB/s", done.bytes, done.seconds);
            if let Some(digits) = done.sha256 {
                println!("sha256 {digits}");
            }
        }
        Command::Run(args) => {
            let report = run::run(&mut client, args, cli.address()?.to_string())?;
            print(args, &report)?;
        }
    }
    client.close();
    Ok(())
}

fn open(cli: &Cli) -> Result<ShmClient, Error> {
    let shape = |depth: u32, buffer: u32, desc| Shape {
        slots: depth.max(DEPTH_MIN),
        buffer_bytes: buffer.max(BUFFER_MIN),
        desc,
        timeout_ns: cli.link.timeout * 1_000_000_000,
    };
    let (shape, channels) = match &cli.command {
        Command::Luns | Command::Inq { .. } => {
            (shape(DEPTH_MIN, BUFFER_MIN, DescFormat::Direct), 1)
        }
        Command::Cp(_) => (shape(COPY_DEPTH, COPY_CHUNK, DescFormat::Direct), 1),
        // `check_early` bounded --bs far below 32 bits.
        Command::Run(args) => {
            (shape(args.iodepth, args.bs as u32, args.desc), usize::from(args.channels))
        }
    };
    connect::open(cli.address()?, &cli.link, shape, channels)
}

/// The table on stdout and the JSON where it was asked for; `--json -` replaces the table.
fn print(args: &RunArgs, report: &Report) -> Result<(), Error> {
    match args.json.as_deref() {
        Some(path) if path == Path::new("-") => print!("{}", report.json()),
        Some(path) => {
            print!("{}", report.table());
            let written = std::fs::write(path, report.json());
            written.map_err(|source| Error::File { path: path.to_path_buf(), source })?;
        }
        None => print!("{}", report.table()),
    }
    Ok(())
}
