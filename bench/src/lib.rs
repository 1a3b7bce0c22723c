//! `usurp-bench`: the SRP initiator of this workspace, and the load generator built on it.
//!
//! Owns: the initiator driver ([`client`], [`sync`], [`connect`]), the engines of the commands of
//! `usurp-perf` ([`load`], [`copy`], [`list`], [`run`]), and what they share: command line
//! ([`args`]), CDBs and sense ([`cdb`], [`sense`]), addresses ([`pattern`]), verification
//! ([`verify`]), reports ([`report`], [`cpu`]); and `make bench` ([`matrix`]), which runs both
//! programs and has threads only to probe the machine. Never: target code, unsafe code.
//!
//! ```text
//!   usurp-perf --> connect (login) --> Client <-- sync (one command at a time) <-- list, tests
//!                                        ^  ^---- copy (ring of 32 transfers)
//!                                        '------- load (hot loop) <-- run (plan, report)
//! ```

#![forbid(unsafe_code)]

pub mod args;
pub mod cdb;
pub mod client;
pub mod connect;
pub mod copy;
pub mod cpu;
pub mod error;
#[cfg(test)]
mod ideal;
pub mod list;
pub mod load;
pub mod matrix;
pub mod pattern;
pub mod report;
pub mod run;
pub mod sense;
pub mod sync;
pub mod verify;
