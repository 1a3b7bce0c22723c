//! One command in the device server, between `start` and `Respond`.
//!
//! Owns: how far a command has got. Lives in the path's send ioctx, is reused for ever, has no
//! heap.
//! Never does: I/O; the modules of the commands move it on.
//!
//! ```text
//!            start                      on_data            on_io
//!  Idle --+---------> Single ------------------------------> Idle        READ, WRITE, SYNC CACHE
//!         +---------> FlushThenRead ----------------> Single            READ with FUA
//!         +---------> Stop -------------------------------> Idle        START STOP UNIT
//!         +---------> Verify <--------+----(next piece)--+-> Idle       VERIFY, BYTCHK 0
//!         +---------> FetchCompare ---+                                 VERIFY, BYTCHK 1 and 3
//!         +---------> FetchBlock -----------> Single                    WRITE SAME
//!         +---------> FetchList ------------> Unmap -(next)-> Idle      UNMAP
//! ```
//!
//! Invariant: `plan` is `Idle` exactly while no step other than `Respond` is outstanding.

use usurp_bdev::Status;

use crate::sense::Sense;
use crate::step::{Reply, Step, status};

/// What a task waits for and does then.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Plan {
    /// No command.
    #[default]
    Idle,
    /// The command's only, or last, I/O.
    Single,
    /// A flush, after which the read of `Task::lba`, `blocks`, `len` follows.
    FlushThenRead,
    /// The flush of a stop.
    Stop,
    /// Data to compare with the medium; BYTCHK as in the CDB.
    FetchCompare,
    /// A piece of a VERIFY.
    Verify,
    /// The block of a WRITE SAME.
    FetchBlock,
    /// The parameter list of an UNMAP.
    FetchList,
    /// One descriptor of an UNMAP.
    Unmap,
}

/// State of one command. One per send ioctx.
#[derive(Clone, Debug, Default)]
pub struct Task {
    /// What it waits for.
    pub(crate) plan: Plan,
    /// Whether the I/O in flight writes: chooses the sense of a medium error.
    pub(crate) writes: bool,
    /// VERIFY: BYTCHK. WRITE SAME: whether UNMAP is set.
    pub(crate) mode: u8,
    /// D of the data-out direction, in bytes.
    pub(crate) data_out_len: u32,
    /// D of the data-in direction, in bytes.
    pub(crate) data_in_len: u32,
    /// Bytes of media data of the read after a flush.
    pub(crate) len: u32,
    /// S of the data-in direction, for the reply.
    pub(crate) wants_in: u64,
    /// S of the data-out direction, for the reply.
    pub(crate) wants_out: u64,
    /// First block of the command.
    pub(crate) lba: u64,
    /// Blocks of the command.
    pub(crate) blocks: u64,
    /// VERIFY: blocks done. UNMAP: descriptors done.
    pub(crate) at: u64,
    /// VERIFY: blocks in flight. UNMAP: descriptors in the list.
    pub(crate) part: u64,
}

impl Task {
    /// A task without a command.
    pub fn new() -> Task {
        Task::default()
    }

    /// Whether no command is in it.
    pub fn is_idle(&self) -> bool {
        self.plan == Plan::Idle
    }

    /// Gives the command up, whatever it waited for: it was aborted and gets no reply. An I/O of it
    /// that is in flight must not be reported to `Lu::on_io` any more.
    pub fn abandon(&mut self) {
        self.plan = Plan::Idle;
    }

    /// Takes a new command.
    #[inline]
    pub(crate) fn begin(&mut self, data_out_len: u32, data_in_len: u32) {
        assert!(self.plan == Plan::Idle, "the task still has a command");
        self.data_out_len = data_out_len;
        self.data_in_len = data_in_len;
        self.writes = false;
        self.wants_in = 0;
        self.wants_out = 0;
    }

    /// Ends the command with GOOD and the S it has noted.
    #[inline]
    pub(crate) fn good(&mut self) -> Step {
        self.plan = Plan::Idle;
        Step::Respond(Reply::good(self.wants_in, self.wants_out))
    }

    /// Ends the command with sense data.
    #[cold]
    pub(crate) fn check(&mut self, sense: Sense) -> Step {
        self.plan = Plan::Idle;
        Step::check(sense)
    }

    /// Ends the command as the bdev's status demands (reference 8.10).
    #[cold]
    pub(crate) fn failed(&mut self, status: Status) -> Step {
        let sense = match status {
            Status::Ok => unreachable!("asked only about failures"),
            Status::Medium if self.writes => Sense::WRITE_ERROR,
            Status::Medium => Sense::READ_ERROR,
            Status::OutOfRange => Sense::LBA_OUT_OF_RANGE,
            Status::NoSpace => Sense::NO_SPACE,
            Status::NotSupported => Sense::INVALID_OPCODE,
            Status::Miscompare { offset } => Sense::MISCOMPARE.with_information(u64::from(offset)),
            Status::ReadOnly => Sense::WRITE_PROTECTED,
            // Reference 8.10, internal target failure. LIO's 2/08/00 would claim a unit that is not
            // ready, which TEST UNIT READY then denies.
            Status::Io => Sense::INTERNAL,
            // TAS is 0 in our control page, so TASK ABORTED status would be wrong (SAM-5, TAS);
            // ABORTED COMMAND is what Linux retries.
            Status::Aborted => Sense::ABORTED,
            // Linux lowers the queue depth on TASK SET FULL, not on BUSY (reference 8.9).
            Status::Busy => {
                self.plan = Plan::Idle;
                return Step::Respond(Reply::bare(status::TASK_SET_FULL));
            }
        };
        self.check(sense)
    }
}
