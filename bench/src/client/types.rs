//! What goes in and out of a [`Client`](super::Client): sizes, slots, commands, answers, data
//! memory. Plain values; nothing here talks to a fabric.

use std::sync::Arc;

use usurp_reactor::Nanos;
use usurp_reactor::mem::{Arena, HugePolicy};
use usurp_srp::Residual;

use crate::args::DescFormat;
use crate::cdb::Cdb;
use crate::error::Error;

/// Bytes of a descriptor table; one per slot, behind its data buffer.
pub(super) const TABLE_BYTES: usize = 64;
/// Descriptors that a buffer is cut into with `--desc indirect` and `partial`.
pub(super) const PIECES: u32 = 4;
/// Sense bytes kept per slot.
pub(super) const SENSE_BYTES: usize = 96;
/// Answers that one poll can bring.
pub const OUTCOMES: usize = usurp_fabric::BATCH;

/// The size of a client.
#[derive(Copy, Clone, Debug)]
pub struct Shape {
    /// Commands outstanding per channel, unless the target grants fewer credits.
    pub slots: u32,
    /// Bytes of a slot's data buffer.
    pub buffer_bytes: u32,
    /// How data buffers are described to the target.
    pub desc: DescFormat,
    /// Time allowed for the answer to a command.
    pub timeout_ns: Nanos,
}

/// Names a command slot: channel and position.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct SlotId(u32);

impl SlotId {
    pub(super) fn new(channel: usize, index: u32) -> SlotId {
        SlotId((channel as u32) << 16 | index)
    }

    /// The channel it belongs to.
    #[inline]
    pub fn channel(self) -> usize {
        (self.0 >> 16) as usize
    }

    /// Its position in the channel.
    #[inline]
    pub(crate) fn index(self) -> u32 {
        self.0 & 0xffff
    }
}

/// Which way the data of a command goes, and how many bytes of the slot's buffer take part.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Data {
    /// No data.
    None,
    /// From the target.
    In(u32),
    /// To the target.
    Out(u32),
}

impl Data {
    pub(crate) fn len(self) -> u32 {
        match self {
            Data::None => 0,
            Data::In(len) | Data::Out(len) => len,
        }
    }
}

/// A command to start.
#[derive(Copy, Clone, Debug)]
pub struct Request {
    /// The LU.
    pub lun: u16,
    /// The CDB.
    pub cdb: Cdb,
    /// Its data.
    pub data: Data,
    /// Comes back in the [`Outcome`].
    pub user: u64,
}

/// Whether a command was started.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Started {
    /// It is gathered, and goes out with the next flush.
    Yes,
    /// No credit or no place in the send queue; try again after a poll.
    NoRoom,
}

/// The answer to one command.
#[derive(Copy, Clone, Debug)]
pub struct Outcome {
    /// The slot, which is idle again but still the caller's.
    pub slot: SlotId,
    /// SAM status.
    pub status: u8,
    /// Bytes of sense data, see [`Client::sense`].
    pub(crate) sense_len: u8,
    /// Residual of data-in.
    pub data_in: Residual,
    /// Residual of data-out.
    pub data_out: Residual,
    /// As in the request.
    pub user: u64,
    /// The time given to `start`.
    pub posted: Nanos,
}

impl Outcome {
    const NOTHING: Outcome = Outcome {
        slot: SlotId(0),
        status: 0,
        sense_len: 0,
        data_in: Residual::None,
        data_out: Residual::None,
        user: 0,
        posted: 0,
    };

    /// Status GOOD and every byte moved.
    #[inline]
    pub fn is_good(&self) -> bool {
        self.status == 0 && self.data_in == Residual::None && self.data_out == Residual::None
    }
}

/// A fixed list of answers; dereferences to a slice.
#[derive(Debug)]
pub struct Outcomes {
    /// The first `len` are valid.
    items: [Outcome; OUTCOMES],
    /// At most [`OUTCOMES`].
    len: usize,
}

impl Default for Outcomes {
    fn default() -> Self {
        Outcomes { items: [Outcome::NOTHING; OUTCOMES], len: 0 }
    }
}

impl Outcomes {
    #[inline]
    pub(super) fn clear(&mut self) {
        self.len = 0;
    }

    #[inline]
    pub(super) fn is_full(&self) -> bool {
        self.len == OUTCOMES
    }

    #[inline]
    pub(super) fn push(&mut self, outcome: Outcome) {
        assert!(self.len < OUTCOMES, "a poll brings at most {OUTCOMES} answers");
        self.items[self.len] = outcome;
        self.len += 1;
    }
}

impl std::ops::Deref for Outcomes {
    type Target = [Outcome];
    #[inline]
    fn deref(&self) -> &[Outcome] {
        &self.items[..self.len]
    }
}

/// The memory that the target may read and write: data buffers and descriptor tables.
#[derive(Clone, Debug)]
pub struct DataArea {
    /// Shared with the target.
    pub arena: Arc<Arena>,
    /// The target's key to it.
    pub rkey: u32,
}

impl DataArea {
    /// Bytes that the slots of `channels` channels need.
    pub fn bytes(shape: &Shape, channels: usize) -> usize {
        let slots = shape.slots as usize * channels;
        slots * (DataArea::stride(shape) + TABLE_BYTES)
    }

    /// Memory for `channels` channels; to be registered with the fabric before connecting.
    pub fn arena(shape: &Shape, channels: usize) -> Result<Arc<Arena>, Error> {
        let bytes = DataArea::bytes(shape, channels);
        let arena = Arena::shared("initiator data", bytes, HugePolicy::Prefer);
        let what = "allocate data buffers";
        arena.map_err(|why| Error::Fabric { what, why: why.to_string() })
    }

    /// From one buffer to the next: whole pages, as O_DIRECT and a real HCA like them.
    pub(super) fn stride(shape: &Shape) -> usize {
        (shape.buffer_bytes as usize).next_multiple_of(4096)
    }
}
