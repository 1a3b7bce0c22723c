//! `usurp-reactor`: what the rest of Usurp runs on.
//!
//! Owns: hugepage arenas and the fixed pools cut from them ([`mem`]), core lists, pinning and the
//! clock ([`cpu`]), bounded mailboxes ([`mailbox`]), timers ([`timer`]), the loop of one pinned
//! core ([`turn`]) and its counters ([`stats`]).
//!
//! Never does: I/O, SCSI, SRP, RDMA, logging on the I/O path. After start-up nothing here
//! allocates, locks or makes a syscall, but for adaptive idling (which yields and sleeps when there
//! is nothing to do).
#![deny(unsafe_code)]

#[allow(unsafe_code)]
pub mod cpu;
pub mod idle;
pub mod mailbox;
#[allow(unsafe_code)]
pub mod mem;
pub mod stats;
pub mod timer;
pub mod turn;

/// Monotonic nanoseconds. Real: `CLOCK_MONOTONIC` as [`cpu::Clock`] reads it; in a simulation:
/// virtual time.
pub type Nanos = u64;
