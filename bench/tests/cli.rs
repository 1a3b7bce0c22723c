//! `usurp-perf` as a person meets it without a target: exit codes and what is said on stderr.

#![forbid(unsafe_code)]

use std::process::{Command, Output};

fn perf(line: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_usurp-perf"));
    command.args(line.split_ascii_whitespace()).output().expect("usurp-perf runs")
}

fn fails(line: &str, code: i32, why: &str) {
    let output = perf(line);
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{line}: {text}");
    assert!(text.contains(why), "{line}: {text}");
    assert!(output.stdout.is_empty(), "{line}: nothing on stdout");
}

#[test]
fn help_names_the_exit_codes() {
    let output = perf("--help");
    assert_eq!(output.status.code(), Some(0));
    let text = String::from_utf8_lossy(&output.stdout);
    for part in ["Exit codes: 0", "luns", "inq", "cp", "run", "--connect"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn a_wrong_command_line_exits_with_2() {
    fails("luns", 2, "--connect shm:PATH is missing");
    fails("--connect rdma:host:5555 luns", 2, "not in this version");
    fails("--connect shm:/nowhere run --bs 1000", 2, "not a multiple of 512");
    fails("--connect shm:/nowhere run --lun 2,2", 2, "twice");
    fails("--connect shm:/nowhere frobnicate", 2, "unrecognized subcommand");
    fails("", 2, "Usage");
}

#[test]
fn nobody_at_the_address_exits_with_3() {
    fails("--connect shm:/nowhere/at/all.sock luns", 3, "nobody serves at /nowhere/at/all.sock");
    fails("--connect shm:/nowhere/at/all.sock run", 3, "cannot connect to shm:");
}
