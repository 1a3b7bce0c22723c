//! The shm fabric: reliable-connected queue pairs between two processes of one machine.
//!
//! ```text
//!   initiator process                                            target process
//!   +------------------+   Unix socket (login, lifeline)   +------------------------+
//!   | connect()        |<--------------------------------->| Listener (Cm)          | control
//!   +------------------+                                   +------------------------+
//!   | ShmFabric        |   ring file, made by the target   | ShmFabric              |  reactor
//!   |   Tx ============|=========> initiator->target ======|==> Rx -> posted receive|
//!   |   Rx <===========|========== target->initiator <=====|=== Tx <- SEND          |
//!   |                  |                                   |                        |
//!   | shared arenas    |<-- memory files, by SCM_RIGHTS -->| mapped regions         |
//!   |  (Regions)       |    WRITE and READ are a memcpy by the target               |
//!   +------------------+                                   +------------------------+
//! ```
//!
//! * The target checks every key, address, length and access right, and copies each message out of
//!   shared memory before anyone parses it: the peer may change shared memory at any time.
//! * A peer can hurt its own connection only. A corrupt ring, a lost page or a vanished process
//!   puts the queue pair into error, in the way an RDMA device would.
//! * SEND to a peer without a posted receive waits in the ring (RNR with infinite retry). A message
//!   longer than the posted receive fails the receiver (`LocalLength`); the sender sees its queue
//!   pair flushed soon after, not that one SEND failing with `RemoteInvalid` as on the wire.
//! * A successful SEND completion means that the message is in the ring, not that the peer took it.
//!
//! Files: `ring` records; `qp` queues and execution; `fabric` the reactor's interface; `mem`
//! mappings; `sigbus` lost pages; `wire` socket messages; `listen`, `cm`, `connect` connection
//! management.

mod cm;
mod connect;
#[allow(unsafe_code)]
mod copy;
mod fabric;
mod listen;
#[allow(unsafe_code)]
mod mem;
#[allow(unsafe_code)]
mod qp;
#[allow(unsafe_code)]
mod ring;
#[allow(unsafe_code)]
mod sigbus;
mod wire;

#[cfg(test)]
mod cm_tests;
#[cfg(test)]
mod tests;

pub use cm::{Listener, ListenerParams, Waker};
pub use connect::{ConnectError, ConnectParams, Connected, connect};
pub use fabric::{Endpoint, FabricConfig, ShmFabric};
pub use mem::{ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE, REGIONS_MAX, Regions};
pub use qp::QpConfig;
