//! What the tests share. Nothing here decides what is right; waiting always has an end.

pub mod bins;
pub mod bystander;
pub mod iu;
pub mod perf;
pub mod plug;
pub mod process;
pub mod raw;
pub mod site;
pub mod target;

use std::time::Duration;

/// The longest that anything may take. Generous: machines that test are often loaded.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// First half of the target port identifier; the default of `usurp-perf`.
pub const ID_EXT: u64 = 0x0002_c903_000e_8acd;
/// Second half of it.
pub const IOC_GUID: u64 = 0x0002_c903_000e_8acc;
