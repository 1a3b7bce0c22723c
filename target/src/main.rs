//! The binary `usurp`; all of it is in the library, see [`usurp_target::cli`].
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    usurp_target::cli::main()
}
