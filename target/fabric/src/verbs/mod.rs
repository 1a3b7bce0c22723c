//! The verbs fabric: RDMA devices by libibverbs, connections by librdmacm.
//!
//! ```text
//!   control thread                                    reactor
//!   +--------------------------------+                +----------------------------------------+
//!   | Listener (Cm)                  |   Endpoint     | VerbsFabric, per device:               |
//!   |   event channel, identifiers --+--------------->|   PD, MR of each arena                 |
//!   |   REQ -> attributes for the QP |  (plain data)  |   CQ, polled, never armed              |
//!   |   REP, REJ, DREQ, DREP         |<---------------|   QPs: INIT, RTR, RTS at adoption      |
//!   |   asynchronous events          |   QP to destroy|                                        |
//!   +--------------------------------+                +----------------------------------------+
//!                     Link: QP number, "a message has come" (then: rdma_notify)
//! ```
//!
//! * Queue pairs are not librdmacm's: the listener asks the kernel for the attributes of each state
//!   before it answers, so a reactor touches no identifier, and an identifier can be destroyed
//!   before its queue pair (which keeps the number from being used again too early).
//! * Adoption makes system calls on the reactor (create and three changes of state): a login may
//!   take that long. Nothing is destroyed there, but a queue pair whose device has stopped
//!   completing (see [`VerbsFabric`]).
//! * One gather entry per request; RDMA READs into memory that on iWARP is registered with remote
//!   write, and nowhere else.
//! * Not here: shared receive queues, listening by AF_IB, thread domains (providers' locks are
//!   taken, uncontended).
//!
//! Files: `ffi` librdmacm's structs; `rdmacm`, `device` owners of the C objects; `wr` requests and
//! what is outstanding; `fabric` data plane; `cm` connection management; `linger` what is left
//! of it; `listen` addresses; `devices` for the doctor.

mod cm;
#[allow(unsafe_code)]
mod device;
mod devices;
mod fabric;
#[allow(unsafe_code)]
mod ffi;
mod linger;
mod listen;
#[allow(unsafe_code)]
mod rdmacm;
mod wr;

pub use crate::shm::QpConfig;
pub(crate) use cm::is_ours;
pub use cm::{Listener, ListenerParams};
pub use devices::{DeviceInfo, GidInfo, PortInfo, VerbsError, devices};
pub use fabric::{Endpoint, FabricConfig, QP_NUM_BIT, VerbsFabric};
pub use listen::{RdmaAddress, addresses_at};

use crate::Lkey;
use crate::shm::Waker;
use std::sync::atomic::{AtomicBool, AtomicU32};

/// High half of every local key; the low half counts arenas. The same as in the shm fabric, so that
/// one key can name an arena in both.
const LKEY_BASE: u32 = 0x4c4b_0000;

/// The arena that a key names.
#[inline]
fn arena_index(lkey: Lkey) -> Option<usize> {
    (lkey.0 & 0xffff_0000 == LKEY_BASE).then_some((lkey.0 & 0xffff) as usize)
}

/// What a connection's two owners tell each other.
#[derive(Debug)]
struct Link {
    /// The device's number of the queue pair, written by the reactor before its "adopted" mail.
    qp_num: AtomicU32,
    /// A message has arrived, so the peer has our REP; written once by the reactor.
    arrived: AtomicBool,
    /// Wakes the listener after that.
    waker: Waker,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_name_arenas() {
        assert_eq!(arena_index(Lkey(LKEY_BASE)), Some(0));
        assert_eq!(arena_index(Lkey(LKEY_BASE | 300)), Some(300));
        assert_eq!(arena_index(Lkey(0)), None);
        assert_eq!(arena_index(Lkey(u32::MAX)), None);
    }
}
