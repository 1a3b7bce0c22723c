//! `usurp-matrix`: what `make bench` runs. Reads the command line, measures, prints and files the
//! report; every decision is in the library.

#![forbid(unsafe_code)]

use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use usurp_bench::matrix::args::{Args, Plan};
use usurp_bench::matrix::{MatrixError, jobs, rounds, table};

fn main() -> ExitCode {
    let args = Args::parse();
    if args.list {
        jobs::select(&args.only)
            .iter()
            .for_each(|job| println!("{:<24} {}", job.id(), job.title()));
        return ExitCode::SUCCESS;
    }
    match args.plan().and_then(|plan| perform(&plan)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("usurp-matrix: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}

fn perform(plan: &Plan) -> Result<(), MatrixError> {
    let record = rounds::measure(plan)?;
    let text = table::report(&record);
    println!("{text}");
    write(&plan.dir.join("latest.md"), &text)?;
    let json = plan.dir.join("latest.json");
    write(&json, &record.json())?;
    eprintln!("usurp-matrix: every run is in {}", json.display());
    Ok(())
}

fn write(path: &Path, text: &str) -> Result<(), MatrixError> {
    std::fs::write(path, text).map_err(MatrixError::file(path))
}
