//! Where the programs are: beside this test, in cargo's output folder of the same profile.
//! `USURP_E2E_BINS` names another folder. Cargo builds another package's programs for a test only
//! if the whole workspace is built (as `make test` does), so they are built here once if they are
//! missing or older than their sources; without the verbs fabric, which no test here uses.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::SystemTime;

/// Folders whose sources go into each program.
const SOURCES: [(&str, &[&str]); 2] = [
    (
        "usurp",
        &[
            "reactor/src",
            "bdev/src",
            "target/src",
            "target/srp/src",
            "target/scsi/src",
            "target/fabric/src",
        ],
    ),
    ("usurp-perf", &["reactor/src", "bench/src", "target/srp/src", "target/fabric/src"]),
];

/// The checkout.
pub fn checkout() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Cargo's output folder of this profile; on a real disk more often than the temporary folder is.
pub fn output() -> PathBuf {
    let exe = std::env::current_exe().expect("a program knows its path");
    exe.ancestors().nth(2).expect("tests lie in PROFILE/deps").to_owned()
}

/// The path of `usurp` or `usurp-perf`.
pub fn program(name: &str) -> PathBuf {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(folder).join(name)
}

fn folder() -> PathBuf {
    if let Some(folder) = std::env::var_os("USURP_E2E_BINS") {
        return folder.into();
    }
    let folder = output();
    let stale = SOURCES.iter().any(|(name, sources)| {
        let newest = sources.iter().map(|s| newest(&checkout().join(s))).max().flatten();
        modified(&folder.join(name)) < newest
    });
    if stale {
        build(&folder);
    }
    folder
}

fn build(folder: &Path) {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
    cargo.current_dir(checkout()).args(["build", "--no-default-features"]);
    cargo.args(["-p", "usurp-target", "-p", "usurp-bench", "--bins", "--target-dir"]);
    cargo.arg(folder.parent().expect("PROFILE lies in cargo's output folder"));
    if folder.ends_with("release") {
        cargo.arg("--release");
    }
    let status = cargo.status().expect("cargo starts");
    assert!(status.success(), "the programs do not build");
}

/// None before anything else: what is missing is stale.
fn modified(path: &Path) -> Option<SystemTime> {
    std::fs::metadata(path).and_then(|meta| meta.modified()).ok()
}

/// The newest file in a folder and those below it.
fn newest(folder: &Path) -> Option<SystemTime> {
    let entries = std::fs::read_dir(folder).expect("the checkout has its source folders");
    let times = entries.map(|entry| {
        let path = entry.expect("a source folder can be listed").path();
        if path.is_dir() { newest(&path) } else { modified(&path) }
    });
    times.max().flatten()
}
