//! What all channels of one reactor share: logical units, data buffers, nexuses, and the line of
//! commands that wait.
//!
//! Owned by that reactor alone.

use std::collections::VecDeque;
use std::sync::Arc;

use usurp_bdev::{Io, Queue};
use usurp_fabric::Lkey;
use usurp_reactor::mem::{Arena, Buf, BufPool};
use usurp_scsi::{Lu, NexusLu, SCRATCH_BYTES};

use crate::mail::{NexusId, NexusInfo};

/// One logical unit on this reactor.
pub struct LuSlot {
    /// The device server.
    pub scsi: Lu,
    /// This reactor's queue of the bdev behind it.
    pub queue: Box<dyn Queue>,
    /// Arena whose memory the bdev lends, and its registration.
    pub lends: Option<(Arc<Arena>, Lkey)>,
    /// I/Os inside `queue`.
    pub in_flight: u32,
    /// I/Os that `queue` had no room for, in order.
    pub stalled: VecDeque<Io>,
    /// Aborted commands that are not gone yet.
    pub aborting: u32,
    /// Whether other reactors take it for stopped.
    pub stopped_told: bool,
    /// Reactors that have not been told so yet, a bit each.
    pub untold: u64,
}

/// A nexus that has channels on this reactor.
pub struct NexusState {
    /// Which.
    pub info: NexusInfo,
    /// Its channels here.
    pub channels: u32,
    /// Its state on each logical unit it sees, in the order of its LUN map.
    pub lus: Box<[NexusLu]>,
}

/// See the module's header.
pub struct Shared {
    /// Logical units; the same indices on every reactor.
    pub lus: Vec<LuSlot>,
    /// Buffers for data that no bdev lends.
    pub data: BufPool,
    /// Their registration.
    pub data_lkey: Lkey,
    /// Nexuses by position; a channel holds its position.
    pub nexuses: Vec<Option<NexusState>>,
    /// Where the device server builds data-in.
    pub scratch: Box<[u8]>,
    /// Commands that hold nothing and wait for a data buffer: channel, ioctx; in order.
    pub waiting: VecDeque<(u16, u16)>,
    /// A data buffer came back: `waiting` may move.
    pub freed: bool,
    /// Some logical unit was stopped or started here, and other reactors do not know it yet.
    pub stop_changed: bool,
}

impl Shared {
    /// With nothing handed out.
    pub fn new(lus: Vec<LuSlot>, data: BufPool, data_lkey: Lkey) -> Shared {
        Shared {
            lus,
            data,
            data_lkey,
            nexuses: Vec::new(),
            scratch: vec![0; SCRATCH_BYTES].into_boxed_slice(),
            waiting: VecDeque::new(),
            freed: false,
            stop_changed: false,
        }
    }

    /// A START STOP UNIT was answered: if it changed something, the other reactors' copies must
    /// follow.
    pub fn note_stop(&mut self, lu: u16) {
        let lu = &mut self.lus[usize::from(lu)];
        if lu.scsi.is_stopped() != lu.stopped_told {
            lu.stopped_told = lu.scsi.is_stopped();
            lu.untold = u64::MAX;
            self.stop_changed = true;
        }
    }

    /// Gives a data buffer back.
    #[inline]
    pub fn give(&mut self, buf: Buf) {
        if !buf.is_none() {
            self.data.give(buf);
            self.freed = true;
        }
    }

    /// Whether the next command can be sure of a buffer for a short reply.
    #[inline]
    pub fn can_start(&self) -> bool {
        self.waiting.is_empty() && self.data.free_bytes() >= SCRATCH_BYTES
    }

    /// Position of a nexus, which is entered when it has no channel here yet.
    pub fn join_nexus(&mut self, info: &NexusInfo) -> u16 {
        let known = |n: &Option<NexusState>| n.as_ref().is_some_and(|n| n.info.id == info.id);
        if let Some(at) = self.nexuses.iter().position(known) {
            let nexus = self.nexuses[at].as_mut().expect("position found it");
            nexus.channels += 1;
            return at as u16;
        }
        let lus = info.luns.entries().iter();
        let lus = lus.map(|_| if info.home { NexusLu::new() } else { quiet() }).collect();
        let state = NexusState { info: info.clone(), channels: 1, lus };
        let at = self.nexuses.iter().position(Option::is_none).unwrap_or_else(|| {
            self.nexuses.push(None);
            self.nexuses.len() - 1
        });
        self.nexuses[at] = Some(state);
        at as u16
    }

    /// One channel of the nexus at that position is gone.
    pub fn leave_nexus(&mut self, at: u16) {
        let slot = &mut self.nexuses[usize::from(at)];
        let nexus = slot.as_mut().expect("a channel's nexus is entered");
        nexus.channels -= 1;
        if nexus.channels == 0 {
            *slot = None;
        }
    }

    /// Calls `f` for the state of every nexus but `except` on a logical unit, where this reactor is
    /// the nexus's home.
    pub fn for_other_nexuses(&mut self, lu: u16, except: NexusId, mut f: impl FnMut(&mut NexusLu)) {
        for nexus in self.nexuses.iter_mut().flatten() {
            if nexus.info.id == except || !nexus.info.home {
                continue;
            }
            let entries = nexus.info.luns.entries().iter();
            for (_, state) in entries.zip(nexus.lus.iter_mut()).filter(|(e, _)| e.lu == lu) {
                f(state);
            }
        }
    }

    /// Whether everything that was handed out is back: asserted at shutdown.
    pub fn is_whole(&self) -> bool {
        self.data.is_whole()
            && self.waiting.is_empty()
            && self.nexuses.iter().all(Option::is_none)
            && self
                .lus
                .iter()
                .all(|lu| lu.in_flight == 0 && lu.stalled.is_empty() && lu.aborting == 0)
    }
}

/// State of a nexus on a logical unit where another reactor keeps the unit attentions.
fn quiet() -> NexusLu {
    let mut state = NexusLu::new();
    while state.report().is_some() {}
    state
}

impl LuSlot {
    /// With nothing in flight.
    pub fn new(scsi: Lu, queue: Box<dyn Queue>, lends: Option<(Arc<Arena>, Lkey)>) -> LuSlot {
        LuSlot {
            scsi,
            queue,
            lends,
            in_flight: 0,
            stalled: VecDeque::new(),
            aborting: 0,
            stopped_told: false,
            untold: 0,
        }
    }

    /// Hands an I/O to the queue; one that it has no room for waits its turn.
    #[inline]
    pub fn submit(&mut self, io: Io) {
        if !self.stalled.is_empty() {
            self.stalled.push_back(io);
            return;
        }
        match self.queue.submit(io) {
            Ok(()) => self.in_flight += 1,
            Err(io) => self.stalled.push_back(io),
        }
    }

    /// Offers the queue what waits before it.
    pub fn unstall(&mut self) {
        while let Some(io) = self.stalled.pop_front() {
            if let Err(io) = self.queue.submit(io) {
                self.stalled.push_front(io);
                return;
            }
            self.in_flight += 1;
        }
    }

    /// Takes an I/O out of the line before the queue.
    pub fn pull(&mut self, token: u64) -> Option<Io> {
        let at = self.stalled.iter().position(|io| io.token == token)?;
        self.stalled.remove(at)
    }
}
