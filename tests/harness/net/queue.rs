//! A simulated queue pair of the target: what is posted, and what has completed.
//!
//! ```text
//!  post_send -> sq: Posted --execute--> Executed --land (READ)--> Landed --done--> cq -> poll
//!                      `--- queue pair in error ----> Flushed ----------------------^
//! ```
//! Owns the queues only; `link.rs` moves them on.

use std::collections::VecDeque;

use usurp_fabric::{Completion, QpNum, RecvWr, SendWr, WcStatus};
use usurp_reactor::Nanos;

/// How far a send request is.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Waits for its turn.
    Posted,
    /// At the peer; the data of a READ are on their way back.
    Executed,
    /// Only its completion is outstanding.
    Landed,
}

/// A send request.
pub(crate) struct Sent {
    /// As posted.
    pub wr: SendWr,
    /// How far it is.
    pub phase: Phase,
    /// When the current phase ends.
    pub at: Nanos,
    /// When it completes at the earliest, once landed.
    pub done_at: Nanos,
    /// How it ends.
    pub status: WcStatus,
    /// Checksum of the local bytes when it was posted (SEND, WRITE) or landed (READ).
    pub sum: u64,
    /// Data of a READ on their way.
    pub data: Vec<u8>,
    /// The local memory is the target's own.
    pub exclusive: bool,
}

/// A completion that waits to be polled.
pub(crate) struct Ready {
    /// When it may be polled.
    pub at: Nanos,
    /// The completion; none for one that only frees places in the send queue.
    pub completion: Option<Completion>,
    /// Places in the send queue that it frees.
    pub frees: u32,
    /// Local memory of a READ and its checksum: it must be unchanged.
    pub read: Option<(u64, u32, u64)>,
}

/// See the module's header.
pub struct Qp {
    /// Its fabric.
    pub fabric: usize,
    /// Its number there.
    pub num: QpNum,
    /// Posted receives.
    pub(crate) recv: VecDeque<RecvWr>,
    /// Receives that completed but were not polled.
    pub(crate) recv_unpolled: u32,
    /// Sends that are not done.
    pub(crate) sq: VecDeque<Sent>,
    /// Places of the send queue in use, freed when a signalled completion is polled.
    pub(crate) sq_used: u32,
    /// Unsignalled sends that are done: their places are freed with the next completion.
    pub(crate) sq_silent: u32,
    /// Completions, oldest first.
    pub(crate) cq: VecDeque<Ready>,
    /// In the error state.
    pub(crate) error: bool,
    /// Places of the send queue.
    pub max_send_wr: u32,
    /// Places of the receive queue.
    pub max_recv_wr: u32,
}

impl Qp {
    /// An empty queue pair.
    pub(crate) fn new(fabric: usize, num: QpNum, max_send_wr: u32, max_recv_wr: u32) -> Qp {
        Qp {
            fabric,
            num,
            recv: VecDeque::new(),
            recv_unpolled: 0,
            sq: VecDeque::new(),
            sq_used: 0,
            sq_silent: 0,
            cq: VecDeque::new(),
            error: false,
            max_send_wr,
            max_recv_wr,
        }
    }

    /// Adds a completion behind the others.
    pub(crate) fn ready(&mut self, at: Nanos, mut item: Ready) {
        let last = self.cq.back().map_or(0, |r| r.at);
        item.at = at.max(last);
        self.cq.push_back(item);
    }

    /// The completion of a request.
    pub(crate) fn completion(&self, wr_id: u64, status: WcStatus, byte_len: u32) -> Completion {
        Completion { qp: self.num, wr_id, status, byte_len }
    }
}

/// Checksum of local memory.
pub(crate) fn checksum(bytes: &[u8]) -> u64 {
    let words = bytes.chunks(8).map(|c| {
        let mut word = [0; 8];
        word[..c.len()].copy_from_slice(c);
        u64::from_le_bytes(word)
    });
    words.fold(bytes.len() as u64, |sum, w| {
        (sum ^ w).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29)
    })
}
