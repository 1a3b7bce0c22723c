//! The simulated RDMA network: one object that every part of a simulation shares, in one thread,
//! on virtual time.
//!
//! Owns: links (one per connection: its target-side queue pair, what is on the wire both ways, and
//! where its set-up stands), the initiators' memory with its keys, and the chances of faults.
//!
//! Fault model. Allowed: any delay; any order between links; loss of a connection at any moment,
//! noticed by either side early, late or never; a post that fails in the middle of its list; READs
//! that a later SEND overtakes; receives that the initiator posts late (RNR). Not allowed, because
//! reliable connections exclude it: a lost, repeated, changed or reordered message on one link.
//!
//! What is checked of the target (each a panic, since the target is at fault):
//! memory of a posted request is not changed nor used for another one before its completion; no
//! RDMA with a key of a command that has ended, over the wrong link, in the wrong direction or out
//! of bounds; no message without a receive posted for it by the rules of credit; no list longer
//! than its queue; nothing posted to a queue pair that is gone.
//!
//! ```text
//!  initiator --send--> [wire, in order] --deliver--> receive posted? copy, completion
//!  target    --post--> [send queue] --execute--> --land--> --done--> completion
//!                        in order      READs land later than they execute
//! ```

mod cm;
mod fabric;
mod link;
mod memory;
mod queue;

use std::rc::Rc;
use std::sync::Arc;

use usurp_reactor::Nanos;
use usurp_reactor::mem::Arena;

pub use cm::SimCm;
pub use fabric::{SimEndpoint, SimFabric};
pub use link::{InitEvent, Link};
pub use memory::{Access, HostMemory, Key};
pub use queue::Qp;

use crate::rng::{Rng, Trace};

/// The shared network. RefCell, though the product bans it: here one thread plays all parts, and
/// each borrows the network for the length of one call only.
#[allow(clippy::disallowed_types)]
pub type Shared = Rc<std::cell::RefCell<Net>>;

/// How the network behaves.
#[derive(Clone, Debug)]
pub struct NetConfig {
    /// Shortest and longest time of each leg of a message.
    pub leg_ns: (Nanos, Nanos),
    /// How much longer the slow ones take.
    pub slow_factor: u64,
    /// How many legs are slow, per million.
    pub slow_ppm: u64,
    /// Posts that fail in the middle of their list, per million.
    pub post_fails_ppm: u64,
    /// Messages to initiators that find no receive and wait, per million.
    pub rnr_ppm: u64,
    /// `endpoint`, `adopt` and `accept` that fail, per million.
    pub setup_fails_ppm: u64,
    /// How long a sender tries to reach a peer that is gone.
    pub retry_ns: Nanos,
}

/// A registered arena of one fabric.
pub(crate) struct Region {
    /// The memory.
    pub arena: Arc<Arena>,
    /// Rings and buffers of the target's own: nobody else may touch what is posted. False for
    /// memory that a bdev lends, which several commands may use at a time.
    pub exclusive: bool,
}

/// See the module's header.
pub struct Net {
    /// Virtual time.
    pub now: Nanos,
    /// Chance.
    pub rng: Rng,
    /// What happened.
    pub trace: Trace,
    /// Behaviour.
    pub config: NetConfig,
    /// All links there ever were, by [`usurp_fabric::ConnId`].
    pub links: Vec<Link>,
    /// Links that may still have something to do.
    pub(crate) live: Vec<usize>,
    /// Memory of the initiators, by host.
    pub memory: Vec<HostMemory>,
    /// Registered arenas, by fabric and key.
    pub(crate) regions: Vec<Vec<Region>>,
    /// Where each fabric's next poll begins, so that it is fair.
    pub(crate) turns: Vec<usize>,
    /// Next queue pair number of each fabric.
    pub(crate) next_qp: Vec<u32>,
    /// Faults are over: the run is coming to its end.
    pub calm: bool,
}

impl Net {
    /// A network without links.
    #[allow(clippy::disallowed_types)] // see `Shared`
    pub fn new(rng: Rng, config: NetConfig) -> Shared {
        Rc::new(std::cell::RefCell::new(Net {
            now: 1_000,
            rng,
            trace: Trace::new(),
            config,
            links: Vec::new(),
            live: Vec::new(),
            memory: Vec::new(),
            regions: Vec::new(),
            turns: Vec::new(),
            next_qp: Vec::new(),
            calm: false,
        }))
    }

    /// Adds to the trace.
    pub fn note(&mut self, what: &'static str, a: u64, b: u64) {
        self.trace.note(self.now, what, a, b);
    }

    /// A time for one leg of a message.
    pub(crate) fn leg(&mut self) -> Nanos {
        let (lo, hi) = self.config.leg_ns;
        let leg = self.rng.range(lo, hi);
        if self.rng.chance(self.config.slow_ppm) { leg * self.config.slow_factor } else { leg }
    }

    /// Whether a fault of that likelihood happens now.
    pub(crate) fn fault(&mut self, per_million: u64) -> bool {
        !self.calm && self.rng.chance(per_million)
    }

    /// Does everything that is due.
    pub fn advance(&mut self) {
        let mut i = 0;
        while i < self.live.len() {
            let at = self.live[i];
            if self.links[at].next <= self.now {
                self.step_link(at);
            }
            if self.links[at].is_over() {
                self.live.swap_remove(i);
            } else {
                i += 1;
            }
        }
    }

    /// The earliest time at which something happens by itself.
    pub fn next_event(&self) -> Option<Nanos> {
        let wakes = self.live.iter().map(|at| self.links[*at].wakes());
        wakes.filter(|t| *t != Nanos::MAX).min()
    }

    /// Everything that the network holds of a link is gone.
    pub fn is_quiet(&self) -> bool {
        self.links.iter().all(|l| l.qp.is_none() && l.destroyed)
    }
}
