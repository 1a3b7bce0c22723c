//! The state of one command between its IU and the send completion of its response.
//!
//! `usurp-srp` keeps the protocol half of an ioctx (tag, credit, whether a response is posted);
//! this is the other half: which buffers it holds and what it waits for. Both halves have the same
//! index.
//!
//! ```text
//!   Free ─> Resources ─> [Table] ─> Params ──> Bdev ─> [Table] ─> DataIn ─> Rsp ─> Free
//!     │   (wait for a     (READ)    DataOut                       (WRITE)    ^
//!     │     buffer)                 (READ)                                   │
//!     └─> Mgmt (task management) ────────────────────────────────────────────┘
//! ```
//! Every stage may be skipped. Each may also end in `Free` once nothing of it is in flight: the
//! command was aborted.

use usurp_fabric::Lkey;
use usurp_reactor::mem::Buf;
use usurp_scsi::{IoReq, Reply, Task};
use usurp_srp::Tag;
use usurp_srp::target::{CDB_MAX, Command, DataDesc, IoctxId, TaskAttr};

use crate::shared::Shared;

/// What a command waits for.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Stage {
    /// Not in use.
    Free,
    /// Nothing is held; waits for a data buffer.
    Resources,
    /// The RDMA READ of a descriptor table is posted, or waits for send-queue room.
    Table,
    /// RDMA READs of a parameter list are posted, or wait for send-queue room.
    Params,
    /// RDMA READs of media data, likewise.
    DataOut,
    /// The bdev works on it, or its queue was full.
    Bdev,
    /// RDMA WRITEs are posted, or wait for send-queue room; the response comes after them.
    DataIn,
    /// The response is posted.
    Rsp,
    /// A task management function is at work.
    Mgmt,
}

const STAGES: usize = 9;

/// `ALLOWED[from]` is the set of stages that may follow, one bit each.
const ALLOWED: [u16; STAGES] = {
    const fn set(of: &[Stage]) -> u16 {
        let mut bits = 0;
        let mut i = 0;
        while i < of.len() {
            bits |= 1 << of[i] as u16;
            i += 1;
        }
        bits
    }
    use Stage::*;
    let mut t = [0; STAGES];
    t[Free as usize] = set(&[Resources, Table, Params, DataOut, Bdev, DataIn, Rsp, Mgmt]);
    t[Resources as usize] = set(&[Table, Params, DataOut, Bdev, DataIn, Rsp, Free]);
    t[Table as usize] = set(&[Params, DataOut, DataIn, Rsp, Free]);
    t[Params as usize] = set(&[Table, DataOut, Bdev, DataIn, Rsp, Free]);
    t[DataOut as usize] = set(&[Bdev, Rsp, Free]);
    t[Bdev as usize] = set(&[Bdev, Resources, Table, DataIn, Rsp, Free]);
    t[DataIn as usize] = set(&[Rsp, Free]);
    t[Rsp as usize] = set(&[Free]);
    t[Mgmt as usize] = set(&[Rsp, Free]);
    t
};

/// What a command does once it gets the buffer that it waits for.
#[derive(Copy, Clone, Debug)]
pub enum Resume {
    /// Hand the CDB to the device server.
    Start,
    /// Carry out this transfer.
    Io(IoReq),
    /// Fetch a parameter list of that many bytes.
    Fetch(u32),
}

/// A place in memory that this process may give to the fabric.
#[derive(Copy, Clone, Debug)]
pub struct Local {
    /// First byte.
    pub addr: u64,
    /// Bytes.
    pub len: u32,
    /// Registration.
    pub lkey: Lkey,
}

/// Where an RDMA transfer between a local place and a list of remote descriptors stands.
#[derive(Copy, Clone, Debug)]
pub struct Cursor {
    /// Bytes still to move.
    pub left: u32,
    /// Next local byte.
    pub local: u64,
    /// Its registration.
    pub lkey: Lkey,
    /// Descriptor in use.
    pub desc: u32,
    /// Bytes of it used up.
    pub offset: u32,
    /// Work requests of the round that is posted; their send-queue slots come back with its
    /// completion.
    pub posted: u32,
}

/// See the module's header.
pub struct Ioctx {
    /// What it waits for.
    stage: Stage,
    /// Its command is to end without a response as soon as nothing of it is in flight.
    pub aborted: bool,
    /// Incremented at each use; tells a TMF that the command it waits for is gone.
    pub serial: u32,
    /// The command as it came.
    pub cmd: Command,
    /// The device server's state of it.
    pub task: Task,
    /// Logical unit, index into the path's table; or [`NO_LU`].
    pub lu: u16,
    /// Receive slot that still holds descriptors or immediate data, or [`NO_SLOT`].
    pub recv_slot: u16,
    /// Media data.
    pub buf: Buf,
    /// Parameter list or compare data.
    pub held: Buf,
    /// Bytes of `held` that the initiator sent.
    pub held_len: u32,
    /// Descriptor table fetched from the initiator; none while it is not needed or not there yet.
    pub table: Buf,
    /// The stage that waits for the table.
    pub after_table: Stage,
    /// Where data of the transfer lies: in `buf`, in `held`, or lent by the bdev.
    pub local: Option<Local>,
    /// The transfer that is under way.
    pub cursor: Cursor,
    /// The transfer that waits for the table.
    pub saved: Cursor,
    /// What to do with the buffer waited for, or with the data that has arrived.
    pub resume: Resume,
    /// The device server's answer, while its data is on the way to the initiator.
    pub reply: Reply,
    /// Send-queue slots for RDMA that the completion of the response gives back.
    pub rsp_wrs: u32,
}

/// What an ioctx holds before its first command.
pub fn no_command() -> Command {
    Command {
        ioctx: IoctxId(0),
        attr: TaskAttr::Simple,
        too_long: false,
        cdb_len: 16,
        tag: Tag([0; 8]),
        lun: 0,
        cdb: [0; CDB_MAX],
        data_out: DataDesc::None,
        data_in: DataDesc::None,
    }
}

/// The command's LUN has no logical unit.
pub const NO_LU: u16 = u16::MAX;
/// No receive slot is held.
pub const NO_SLOT: u16 = u16::MAX;

impl Ioctx {
    /// An unused ioctx.
    pub fn new() -> Ioctx {
        Ioctx {
            stage: Stage::Free,
            aborted: false,
            serial: 0,
            cmd: no_command(),
            task: Task::default(),
            lu: NO_LU,
            recv_slot: NO_SLOT,
            buf: Buf::none(),
            held: Buf::none(),
            held_len: 0,
            table: Buf::none(),
            after_table: Stage::Free,
            local: None,
            cursor: Cursor::default(),
            saved: Cursor::default(),
            resume: Resume::Start,
            reply: Reply::bare(0),
            rsp_wrs: 0,
        }
    }

    /// Copies data-in that the device server built into a buffer. False = no buffer is free.
    pub fn place_reply(&mut self, sh: &mut Shared, len: u32) -> bool {
        let Some(mut buf) = sh.data.take(len as usize) else { return false };
        buf.as_mut_slice()[..len as usize].copy_from_slice(&sh.scratch[..len as usize]);
        self.local = Some(Local { addr: buf.addr(), len, lkey: sh.data_lkey });
        assert!(self.buf.is_none(), "a reply is built for a command that moves media data");
        self.buf = buf;
        true
    }

    /// What it waits for.
    #[inline]
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// Moves on. Asserts that the table of transitions allows it.
    #[inline]
    pub fn go(&mut self, to: Stage) {
        let allowed = ALLOWED[self.stage as usize] & (1 << to as u16) != 0;
        assert!(allowed, "ioctx went from {:?} to {to:?}", self.stage);
        self.stage = to;
    }
}

impl Default for Cursor {
    fn default() -> Self {
        Cursor { left: 0, local: 0, lkey: Lkey(0), desc: 0, offset: 0, posted: 0 }
    }
}

impl Default for Ioctx {
    fn default() -> Self {
        Ioctx::new()
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use super::*;

    const ALL: [Stage; STAGES] = [
        Stage::Free,
        Stage::Resources,
        Stage::Table,
        Stage::Params,
        Stage::DataOut,
        Stage::Bdev,
        Stage::DataIn,
        Stage::Rsp,
        Stage::Mgmt,
    ];

    fn at(stage: Stage) -> Ioctx {
        let mut io = Ioctx::new();
        io.stage = stage;
        io
    }

    fn is_allowed(from: Stage, to: Stage) -> bool {
        ALLOWED[from as usize] & (1 << to as u16) != 0
    }

    #[test]
    fn the_picture_beside_this_file_shows_the_table() {
        let mut dot =
            String::from("// Printed from the table in ioctx.rs; a test compares them.\n");
        dot.push_str("digraph stage {\n");
        for from in ALL {
            for to in ALL.into_iter().filter(|to| is_allowed(from, *to)) {
                writeln!(dot, "    {from:?} -> {to:?};").unwrap();
            }
        }
        dot.push_str("}\n");
        assert_eq!(dot, include_str!("stage.dot"), "the table has changed; the picture is above");
    }

    #[test]
    fn allowed_steps_are_taken_and_all_others_assert() {
        for from in ALL {
            for to in ALL {
                let step = std::panic::catch_unwind(|| {
                    let mut io = at(from);
                    io.go(to);
                    io.stage()
                });
                match is_allowed(from, to) {
                    true => assert_eq!(step.unwrap(), to),
                    false => assert!(step.is_err(), "{from:?} to {to:?} went through"),
                }
            }
        }
    }

    #[test]
    fn every_stage_can_end_and_only_free_begins() {
        for stage in ALL.into_iter().filter(|s| *s != Stage::Free) {
            assert!(is_allowed(stage, Stage::Free), "{stage:?} cannot end");
        }
        assert!(ALL.into_iter().all(|s| !is_allowed(s, Stage::Mgmt) || s == Stage::Free));
    }
}
