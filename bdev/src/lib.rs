//! # Usurp's block devices
//!
//! Owns: the contract between the target and a block device ([`Bdev`], [`Queue`], [`Io`]), the
//! registry of modules, the modules, and [`emulate`], which supplies what a module lacks.
//! Never does: SCSI, RDMA, or anything that blocks a reactor.
//!
//! ```text
//!  control thread                        one reactor
//!  registry --open--> Arc<dyn Bdev> --queue()--> Box<dyn Queue>     (the module)
//!                                                      |
//!                                            emulate::open / complete
//!                                                      |
//!  caller --submit(Io)--> front queue: range, read-only, emulation --submit--> module queue
//!         <--poll---- Done (token, status, buf)                    <--poll----
//! ```
//!
//! Invariants: an [`Io`] moves into `submit` and comes back exactly once as a [`Done`] from `poll`,
//! or at once as the `Err` of `submit`; a lost one panics. Nothing allocates after `queue()`.
//!
//! To write a module, copy `null.rs` and read `docs/bdev.md`.
#![deny(unsafe_code)]

#[cfg(feature = "test-utils")]
pub mod conformance;
mod contract;
pub mod emulate;
pub mod filter;
mod io;
pub mod malloc;
pub mod null;
pub mod options;
pub mod registry;
mod size;
pub mod tokens;
#[allow(unsafe_code)]
pub mod uring;

pub use contract::{
    BLOCK_SIZE_MAX, BLOCK_SIZE_MIN, Bdev, BdevError, Blocks, Caps, Geometry, Lba, Lent, Queue,
    QueueSetup,
};
pub use io::{COMPLETIONS_MAX, Completions, Done, Io, Op, Status};
pub use size::ByteSize;
