//! `usurp-matrix` as a person meets it before anything is measured: its list, and its refusals.

#![forbid(unsafe_code)]

use std::process::{Command, Output};

fn matrix(line: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_usurp-matrix"));
    command.args(line.split_ascii_whitespace()).output().expect("usurp-matrix runs")
}

fn fails(line: &str, code: i32, why: &str) {
    let output = matrix(line);
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{line}: {text}");
    assert!(text.contains(why), "{line}: {text}");
    assert!(output.stdout.is_empty(), "{line}: nothing on stdout");
}

#[test]
fn the_jobs_can_be_listed() {
    let output = matrix("--list --only malloc");
    assert_eq!(output.status.code(), Some(0));
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("malloc-128k-randread-32"), "{text}");
    assert!(!text.contains("uring"), "{text}");
}

#[test]
fn a_wrong_command_line_exits_with_2() {
    fails("--cores 1,1", 2, "two different cores");
    fails("--only nothing-like-it", 2, "see --list");
    fails("--bin-dir /nowhere --cores 0,4000", 2, "--cores");
    fails("frobnicate", 2, "Usage");
}
