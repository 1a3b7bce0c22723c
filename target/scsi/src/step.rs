//! What the device server asks of its caller, and how a command ends.
//!
//! Owns: [`Step`], [`IoReq`], [`Reply`], and the building of data-in parameter data.
//! Never does: look at CDBs.
//!
//! ```text
//!   op           dir    buffer of the I/O
//!   Read         In     media data, `len` bytes of it then go to the initiator
//!   Read         None   a fresh buffer of `len` bytes; its contents come back to `Lu::on_io`
//!   Write        Out    `len` bytes fetched from the initiator
//!   WriteSame    None   the buffer held since FetchData (`uses_held`); `len` = one block
//!   Unmap, WriteZeroes, Flush   None   no buffer; `len` = 0
//! ```

use usurp_bdev::{Lba, Op};

use crate::sense::Sense;

/// SCSI status codes (SAM-5).
pub mod status {
    /// GOOD.
    pub const GOOD: u8 = 0x00;
    /// CHECK CONDITION: sense data follow.
    pub const CHECK_CONDITION: u8 = 0x02;
    /// BUSY.
    pub const BUSY: u8 = 0x08;
    /// RESERVATION CONFLICT.
    pub const RESERVATION_CONFLICT: u8 = 0x18;
    /// TASK SET FULL.
    pub const TASK_SET_FULL: u8 = 0x28;
    /// TASK ABORTED.
    pub const TASK_ABORTED: u8 = 0x40;
}

/// Bytes of scratch that hold the longest data-in parameter data we build (REPORT LUNS of
/// [`crate::LUNS_MAX`]). With less, the data are cut and the residual says so.
pub const SCRATCH_BYTES: usize = 4096;

/// Where media data go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dir {
    /// Nowhere: between bdev and target only.
    None,
    /// To the initiator's data-in buffer.
    In,
    /// From the initiator's data-out buffer.
    Out,
}

/// One I/O for the bdev. Its range lies inside the geometry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoReq {
    /// What to do.
    pub op: Op,
    /// First block; 0 for an operation without a range.
    pub lba: Lba,
    /// Blocks; 0 for an operation without a range.
    pub blocks: u64,
    /// Whether media data move to or from the initiator.
    pub dir: Dir,
    /// Bytes of the buffer that count. A `Read` in direction `In` may have fewer than
    /// `blocks * block_size`: the initiator's buffer was shorter.
    pub len: u32,
}

impl IoReq {
    /// Whether the I/O takes the buffer that the data of `FetchData` lie in (WRITE SAME).
    pub fn uses_held(&self) -> bool {
        matches!(self.op, Op::WriteSame { .. })
    }

    /// An operation without a buffer.
    pub(crate) fn bare(op: Op, lba: u64, blocks: u64) -> IoReq {
        IoReq { op, lba: Lba(lba), blocks, dir: Dir::None, len: 0 }
    }
}

/// How a command ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// SCSI status.
    pub status: u8,
    /// Sense data; only with CHECK CONDITION. Render with `Lu::d_sense()`.
    pub sense: Option<Sense>,
    /// Bytes built in scratch for the data-in buffer; never more than that buffer has.
    pub data_in_len: u32,
    /// S of the data-in direction: what the command transfers when the buffer is long enough.
    pub wants_in: u64,
    /// S of the data-out direction.
    pub wants_out: u64,
}

impl Reply {
    /// GOOD, with S of both directions.
    #[inline]
    pub const fn good(wants_in: u64, wants_out: u64) -> Reply {
        Reply { status: status::GOOD, sense: None, data_in_len: 0, wants_in, wants_out }
    }

    /// CHECK CONDITION. Claims no data, so the residual is the whole buffer (reference 4.9).
    pub const fn check(sense: Sense) -> Reply {
        Reply {
            status: status::CHECK_CONDITION,
            sense: Some(sense),
            data_in_len: 0,
            wants_in: 0,
            wants_out: 0,
        }
    }

    /// A status without sense data, and without data.
    pub const fn bare(status: u8) -> Reply {
        Reply { status, sense: None, data_in_len: 0, wants_in: 0, wants_out: 0 }
    }
}

/// What to do next for a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a command whose step is dropped never ends"]
pub enum Step {
    /// Do this I/O, then call `Lu::on_io`.
    Io(IoReq),
    /// Fetch the first `len` bytes of the data-out buffer (it has them), then call `Lu::on_data`.
    /// Keep them: `Lu::on_io` wants them as `held`.
    FetchData {
        /// Bytes to fetch; at least 1.
        len: u32,
    },
    /// The command has ended.
    Respond(Reply),
}

const _: () = assert!(size_of::<Step>() <= 48, "returned by value on the I/O path");

impl Step {
    /// CHECK CONDITION.
    #[cold]
    pub(crate) fn check(sense: Sense) -> Step {
        Step::Respond(Reply::check(sense))
    }
}

/// Builds parameter data in a window that may be too short: what does not fit is counted but not
/// kept, so that length fields always tell the full length (SPC-4, ALLOCATION LENGTH).
pub(crate) struct Builder<'a> {
    window: &'a mut [u8],
    /// Bytes appended so far, kept or not.
    len: usize,
}

impl Builder<'_> {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn push(&mut self, bytes: &[u8]) {
        let at = self.len;
        self.len += bytes.len();
        self.set(at, bytes);
    }

    pub(crate) fn zeros(&mut self, count: usize) {
        for _ in 0..count {
            self.push(&[0]);
        }
    }

    /// Overwrites bytes that were appended before.
    pub(crate) fn set(&mut self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len, "only what was appended can be overwritten");
        if let Some(room) = self.window.get_mut(at..) {
            let kept = room.len().min(bytes.len());
            room[..kept].copy_from_slice(&bytes[..kept]);
        }
    }
}

/// Answers with parameter data: S is the shorter of `allocation` and what `build` appends.
pub(crate) fn data_in(
    scratch: &mut [u8],
    data_in_len: u32,
    allocation: u32,
    build: impl FnOnce(&mut Builder<'_>),
) -> Reply {
    let room = allocation.min(data_in_len) as usize;
    let kept = room.min(scratch.len());
    let mut builder = Builder { window: &mut scratch[..kept], len: 0 };
    build(&mut builder);
    let full = builder.len as u64;
    let built = full.min(kept as u64);
    let wants_in = full.min(u64::from(allocation));
    // Scratch was too short: say what really arrives rather than let stale bytes be believed.
    let cut = built < wants_in.min(room as u64);
    Reply {
        status: status::GOOD,
        sense: None,
        data_in_len: built as u32,
        wants_in: if cut { built } else { wants_in },
        wants_out: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn build(b: &mut Builder<'_>) {
        b.push(&[0, 0]);
        b.push(&[1, 2, 3, 4, 5, 6]);
        let full = b.len() as u16;
        b.set(0, &full.to_be_bytes());
    }

    #[test]
    fn parameter_data_are_cut_by_allocation_and_buffer_but_tell_their_full_length() {
        let mut scratch = [0xA5; 16];
        let reply = data_in(&mut scratch, 100, 100, build);
        assert_eq!((reply.data_in_len, reply.wants_in), (8, 8));
        assert_eq!(scratch[..9], [0, 8, 1, 2, 3, 4, 5, 6, 0xA5]);

        let mut scratch = [0xA5; 16];
        let reply = data_in(&mut scratch, 100, 3, build);
        assert_eq!((reply.data_in_len, reply.wants_in), (3, 3));
        assert_eq!(scratch[..4], [0, 8, 1, 0xA5]);

        let reply = data_in(&mut scratch, 5, 7, build);
        assert_eq!((reply.data_in_len, reply.wants_in), (5, 7));
        let reply = data_in(&mut scratch, 0, 7, build);
        assert_eq!((reply.data_in_len, reply.wants_in), (0, 7));
        let reply = data_in(&mut scratch, 7, 0, build);
        assert_eq!((reply.data_in_len, reply.wants_in), (0, 0));
    }

    #[test]
    fn a_short_scratch_is_an_underflow_not_stale_bytes() {
        let mut scratch = [0xA5; 4];
        let reply = data_in(&mut scratch, 100, 100, build);
        assert_eq!((reply.data_in_len, reply.wants_in), (4, 4));
    }
}
