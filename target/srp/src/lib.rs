//! SRP (SCSI RDMA Protocol, r16a plus the immediate data of SRP2): wire formats and both roles'
//! state machines.
//!
//! Owns: the layout of every IU, the login checks, the credit sums, the life of a send ioctx. Never
//! does: I/O, clocks, threads, verbs, or memory allocation after `Channel::new`. Input is a method
//! call, output goes to the caller's buffer.
//!
//! ```text
//!   private data --> login::check --> LoginAccepted --> target::Channel --on_iu--> Received
//!                                                             ^   `--rsp/tsk_rsp/cred_req--> bytes
//!   initiator::login_req --> initiator::Channel --start_cmd/start_tm--> bytes, on_iu --> Event
//! ```
//!
//! A peer's fault is a value (`LoginRejected`, `Received::Malformed`, `Received::Cut`,
//! `Event::Bogus`), never a panic. A fault of the code that uses this crate is an `assert!`.
#![forbid(unsafe_code)]

pub mod initiator;
pub mod login;
pub mod target;
pub mod wire;

mod ids;
mod residual;

pub use ids::{PortId, Tag};
pub use residual::Residual;
