//! End-to-end tests: the programs `usurp` and `usurp-perf` as processes, over the shm fabric, and
//! hostile initiators made by hand in here.
//!
//! Owns: what only whole processes can show (exit codes, sudden death, signals, sockets, memory
//! over time) and the exact answer to each malformed IU of reference table 4.8. Never: looks into
//! the target; it sees bytes, log lines, `/proc` and exit codes.
//!
//! ```text
//!   Site (folder, config) ─> Target (usurp run) <── Raw        hand-made IUs through the fabric
//!                                 ^      ^───────── Plug       hand-made datagrams on the socket
//!                                 └── Bystander, usurp-perf    well-behaved, must never notice
//! ```
//! Every test starts a target of its own and, where it can, ends it with SIGTERM and wants exit
//! code 0 and the log line "every pool is whole".

#![forbid(unsafe_code)]

mod config;
mod copying;
mod credits;
mod death;
mod descriptors;
mod exclusive;
mod ius;
mod load;
mod login;
mod memory;
mod relogin;
mod shutdown;
mod socket;
mod support;
mod task_mgmt;
mod verify;
