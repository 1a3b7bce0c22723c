//! # Usurp's SCSI device server
//!
//! Owns: what a CDB means. [`Lu`] is one logical unit as one reactor sees it; [`Task`] is one
//! command in it; [`NexusLu`] holds the unit attentions of one I_T nexus on it.
//! Never does: I/O, allocation per command, clocks, SRP. Input is a method call, output a [`Step`].
//!
//! ```text
//!                  Lu::start(nexus, cdb, D_out, D_in, task, scratch)
//!                       |
//!        +--------------+-----------------+------------------------+
//!        v              v                 v                        |
//!    FetchData       Io(IoReq)         Respond(Reply)              |
//!        |              |                 ^                        |
//!        | Lu::on_data  | Lu::on_io       |  (more I/O of the      |
//!        +------------->+-----------------+   same task: Io again) |
//!                       ^---------------------------------------- -+
//! ```
//!
//! Invariants: an [`IoReq`] always lies inside the geometry; nothing touches the medium before
//! every check of the CDB, of the parameter list and of the buffer lengths has passed; a command
//! that ends in CHECK CONDITION claims no data (`wants_in` = `wants_out` = 0), so its residual is
//! the whole buffer. A peer's nonsense is sense data; an `assert!` here means that our caller broke
//! the order of calls above.
//!
//! Not here yet, with their places: reservations (`reservation.rs`, asked in `Lu::access`), ALUA
//! (`alua.rs`, asked in `Lu::access`, pages in `inquiry.rs`), MODE SELECT (`mode.rs`), COMPARE AND
//! WRITE (`compare.rs`), VPD page 86 and the copy commands. Until then they answer 20/00 or 24/00.
#![forbid(unsafe_code)]

mod capacity;
mod cdb;
mod inquiry;
mod limits;
mod lu;
mod luns;
mod mode;
mod opcodes;
mod report;
mod rw;
mod sense;
mod start_stop;
mod step;
mod sync;
mod task;
#[cfg(test)]
mod testing;
mod ua;
mod unmap;
mod verify;
mod write_same;

pub use cdb::{CDB_BYTES, Cdb};
pub use inquiry::SERIAL_BYTES_MAX;
pub use limits::{UNMAP_LIST_BYTES_MAX, VERIFY_PIECE_BYTES};
pub use lu::{Lu, LuConfig};
pub use luns::{LUNS_MAX, LunList, absent_lun, emit_lun, parse_lun, report_luns};
pub use report::TASK_MANAGEMENT_FUNCTIONS;
pub use sense::{Key, SENSE_BYTES_MAX, Sense};
pub use step::{Dir, IoReq, Reply, SCRATCH_BYTES, Step, status};
pub use task::Task;
pub use ua::{NexusLu, UA_MAX, Ua};
