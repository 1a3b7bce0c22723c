//! Refuses to build into this folder.
//!
//! `target/` is source here, yet also the name of cargo's default output folder.
//! `.cargo/config.toml` sends the output to `build/`, but cargo reads that file only when it runs
//! inside the checkout. Run from elsewhere with `--manifest-path`, it would litter the sources, and
//! `cargo clean` would delete them.

use std::path::Path;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let out = std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR for build scripts");
    let here = std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR");
    let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let (out, here) = (real(Path::new(&out)), real(Path::new(&here)));
    if out.starts_with(&here) {
        println!("cargo::error=cargo's output would go to {}, which is source.", here.display());
        println!("cargo::error=`cargo clean` would delete it. Run cargo inside the checkout:");
        let checkout = here.parent().unwrap_or(&here);
        println!("cargo::error=    cd {} && cargo build", checkout.display());
        println!("cargo::error=(and delete {0}/debug or {0}/release)", here.display());
        std::process::exit(1);
    }
}
