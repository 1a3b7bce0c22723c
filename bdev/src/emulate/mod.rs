//! The front queue: what callers use. It checks every I/O and supplies what a module lacks.
//!
//! Owns: **the range check** (lba + blocks against the geometry, without overflow), the read-only
//! check, the buffer check, the depth; and WRITE SAME, WRITE ZEROES, UNMAP, COMPARE AND WRITE and
//! FUA by other means where [`Caps`] lack them. Modules rely on these checks (see [`Queue`]).
//! Never does: allocate after [`complete`], or complete anything in `submit`.
//!
//! ```text
//!             +--> refused, or nothing to do --> ready ---------------------------+
//!  submit ----+--> the module does it itself --> module queue --> poll -----------+--> Done
//!             +--> emulated: a Work per I/O, one module I/O after another         |
//!                   runnable <--------> with the module ------- last step --------+
//! ```
//!
//! | operation | claimed | else |
//! |---|---|---|
//! | FUA | passed on | the write, then a flush; nothing to do without a write cache |
//! | FLUSH | passed on | Ok at once: no write cache |
//! | UNMAP | passed on | Ok at once and no effect, which SBC allows |
//! | WRITE ZEROES | passed on | unmap, if asked for and if that zeroes; else zeros are written |
//! | WRITE SAME | passed on | copies of the block are written |
//! | COMPARE AND WRITE | passed on | [`Sharing::Sole`]: read, compared, written; else refused |
//!
//! A module that claims UNMAP or WRITE ZEROES and then says `NotSupported` (a file system may) is
//! not asked again by this queue; the right-hand column is done instead.
//!
//! Emulated COMPARE AND WRITE waits until all else on its queue is done and holds new I/O up
//! meanwhile. That makes it atomic only if this queue is the only way to the data: one reactor, and
//! no memory lent. A compare that differs is reported with the first differing byte.

mod work;

use std::collections::VecDeque;

use usurp_reactor::Nanos;
use usurp_reactor::mem::{Arena, BufPool, HugePolicy};

use crate::contract::{Bdev, BdevError, Caps, Geometry, Lba, Lent, Queue, QueueSetup};
use crate::io::{Completions, Done, Io, Op, Status};
use crate::tokens::TokenMap;
use work::Work;

/// How many queues the bdev has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// This queue is the only one of the bdev: COMPARE AND WRITE can be emulated.
    Sole,
    /// There may be others.
    Shared,
}

/// Bytes in a piece of scratch memory: the unit in which emulated data is written.
const SCRATCH_PIECE: usize = 128 << 10;
/// Pieces per queue: so many emulated I/Os move at a time, the others wait for a piece.
const SCRATCH_PIECES: usize = 2;
/// The longest compare that is emulated, in bytes (255 blocks of 512: all that SBC can ask for).
/// A longer one is `NotSupported`.
pub const COMPARE_BYTES_MAX: u64 = SCRATCH_PIECE as u64;

/// Opens a queue of `bdev` for the calling thread, fit for any [`Op`].
pub fn open(
    bdev: &dyn Bdev,
    setup: &QueueSetup,
    sharing: Sharing,
) -> Result<Box<dyn Queue>, BdevError> {
    assert!(setup.depth > 0, "{}: a queue of depth 0", bdev.name());
    complete(bdev, bdev.queue(setup)?, setup.depth, sharing)
}

/// Puts the front queue before `queue`, a queue of `bdev` that takes `depth` I/Os.
pub fn complete(
    bdev: &dyn Bdev,
    queue: Box<dyn Queue>,
    depth: u32,
    sharing: Sharing,
) -> Result<Box<dyn Queue>, BdevError> {
    let own = bdev.caps();
    let compares = !own.compare_and_write && can_compare(bdev, sharing);
    let fills = !(own.write_same && own.write_zeroes);
    let scratch = if !own.read_only && (fills || compares) {
        let bytes = SCRATCH_PIECE * SCRATCH_PIECES;
        let arena = Arena::new(bdev.name(), bytes, HugePolicy::Never)
            .map_err(|e| BdevError::new("", e.to_string(), ""))?;
        Some(BufPool::new(arena, 0, bytes, SCRATCH_PIECE, SCRATCH_PIECE))
    } else {
        None
    };
    Ok(Box::new(Front {
        module: queue,
        geometry: bdev.geometry(),
        caps: own,
        compares,
        depth,
        flights: TokenMap::new("front", depth),
        works: (0..depth).map(|_| None).collect(),
        ready: VecDeque::with_capacity(depth as usize),
        runnable: VecDeque::with_capacity(depth as usize),
        from_module: Completions::new(),
        scratch,
        gate: Gate::Open,
    }))
}

/// What a queue from [`open`] does, emulation included: what the device may be said to support.
pub fn caps(bdev: &dyn Bdev, sharing: Sharing) -> Caps {
    let own = bdev.caps();
    Caps {
        flush: own.flush,
        fua: true,
        unmap: own.unmap && !own.read_only,
        unmap_zeroes: own.unmap_zeroes && !own.read_only,
        write_zeroes: !own.read_only,
        write_same: !own.read_only,
        compare_and_write: !own.read_only && can_compare(bdev, sharing),
        read_only: own.read_only,
    }
}

/// Whether COMPARE AND WRITE can be had.
fn can_compare(bdev: &dyn Bdev, sharing: Sharing) -> bool {
    // Memory that is lent may be written by RDMA between compare and write.
    bdev.caps().compare_and_write || (sharing == Sharing::Sole && bdev.lendable().is_none())
}

/// One I/O that was accepted and did not complete at once. Small, for most are `Passed`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flight {
    /// The module does it; only the token is remembered.
    Passed,
    /// A reset: passed, but comes back after all that went before it.
    Reset,
    /// It is done here, step by step; see `Front::works`.
    Emulated,
}

/// Who may submit, for the sake of COMPARE AND WRITE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gate {
    /// Anybody.
    Open,
    /// The I/O at this index waits until it is alone; resets only.
    Draining(u64),
    /// The I/O at this index is alone; resets only.
    Alone(u64),
}

/// The front queue. All of it belongs to one reactor.
struct Front {
    /// The module's queue.
    module: Box<dyn Queue>,
    /// The bdev's, for the range check.
    geometry: Geometry,
    /// What the module does itself. `unmap` and `write_zeroes` go out when it says `NotSupported`
    /// after all; `unmap_zeroes` without `unmap` then means that zeros were promised.
    caps: Caps,
    /// Whether COMPARE AND WRITE is emulated.
    compares: bool,
    /// The most I/Os in flight.
    depth: u32,
    /// I/Os with the module or emulated; the module's token is the index in here.
    flights: TokenMap<Flight>,
    /// The work of the emulated I/O at the same index of `flights`; none elsewhere.
    works: Vec<Option<Work>>,
    /// Completed and not returned. With `flights` at most `depth`, its capacity.
    ready: VecDeque<Done>,
    /// Indices of emulated I/Os whose next step can be tried. At most `depth`, its capacity.
    runnable: VecDeque<u64>,
    /// What the module completed and is not handled yet.
    from_module: Completions,
    /// Memory for emulated data; whole when nothing is emulated.
    scratch: Option<BufPool>,
    /// See [`Gate`].
    gate: Gate,
}

/// What becomes of an I/O on submission.
enum Plan {
    /// It completes at the next poll.
    Ready(Status),
    /// The module does it, as this operation.
    Pass(Op),
    /// It is emulated.
    Emulate,
    /// It is emulated, and nothing else happens meanwhile.
    Alone,
}

impl Front {
    /// Decides. No side effects.
    fn plan(&self, io: &Io) -> Plan {
        if io.op == Op::Reset {
            return Plan::Pass(Op::Reset);
        }
        if io.op == Op::Flush {
            return if self.caps.flush { Plan::Pass(Op::Flush) } else { Plan::Ready(Status::Ok) };
        }
        if !self.geometry.contains(io.lba, io.blocks) {
            return Plan::Ready(Status::OutOfRange);
        }
        if io.op.is_write() && self.caps.read_only {
            return Plan::Ready(Status::ReadOnly);
        }
        let need = io.op.buffer_bytes(io.blocks, self.geometry.block_size);
        assert!(need.is_some_and(|need| need <= io.buf.len() as u64), "{io:?}: short buffer");
        if io.blocks == 0 {
            return Plan::Ready(Status::Ok);
        }
        match io.op {
            Op::Write { fua: true } if self.flushes_for(io.op) => Plan::Emulate,
            Op::Read | Op::Write { .. } => Plan::Pass(self.native(io.op)),
            Op::Unmap if !self.caps.unmap && !self.caps.unmap_zeroes => Plan::Ready(Status::Ok),
            Op::CompareAndWrite { .. } if !self.caps.compare_and_write => {
                let fits = self.geometry.bytes(io.blocks).is_some_and(|b| b <= COMPARE_BYTES_MAX);
                let able = self.compares && fits;
                if able { Plan::Alone } else { Plan::Ready(Status::NotSupported) }
            }
            _ => Plan::Emulate,
        }
    }

    /// Whether `op` wants FUA, there is a cache, and the module does not do FUA itself.
    fn flushes_for(&self, op: Op) -> bool {
        op.fua() && self.caps.flush && !self.caps.fua
    }

    /// `op` as the module knows it.
    fn native(&self, op: Op) -> Op {
        if self.caps.fua { op } else { op.without_fua() }
    }

    /// Adds an emulated I/O.
    fn emulate(&mut self, io: Io, alone: bool) {
        let flush_after = self.flushes_for(io.op);
        let (token, work) = (io.token, Work::new(io, &self.caps, flush_after));
        let index = self.flights.enter(token, Flight::Emulated).expect("submit saw room");
        let old = self.works[index as usize].replace(work);
        assert!(old.is_none(), "a work at a free index");
        if alone {
            self.gate = Gate::Draining(index);
        } else {
            self.runnable.push_back(index);
        }
    }

    /// Sends an I/O on.
    fn pass(&mut self, mut io: Io, op: Op) -> Result<(), Io> {
        let (caller_op, token) = (io.op, io.token);
        let kind = if op == Op::Reset { Flight::Reset } else { Flight::Passed };
        let index = self.flights.enter(token, kind).expect("submit saw room");
        io.op = op;
        io.token = index;
        if let Err(mut io) = self.module.submit(io) {
            self.flights.leave(index);
            (io.op, io.token) = (caller_op, token);
            return Err(io);
        }
        if op == Op::Reset {
            self.works.iter_mut().flatten().for_each(Work::abort);
        }
        Ok(())
    }

    /// Tries the next step of each emulated I/O that waits for its turn, once.
    fn run_works(&mut self) {
        if let Gate::Draining(index) = self.gate
            && (self.flights.len() == 1 || self.is_aborted(index))
        {
            self.gate = Gate::Alone(index);
            self.runnable.push_back(index);
        }
        for _ in 0..self.runnable.len() {
            let index = self.runnable.pop_front().expect("as many as counted");
            self.step(index);
        }
    }

    fn is_aborted(&self, index: u64) -> bool {
        self.works[index as usize].as_ref().is_some_and(Work::is_aborted)
    }

    /// The next step of the emulated I/O at `index`.
    fn step(&mut self, index: u64) {
        let work = self.works[index as usize].as_mut().expect("what is runnable is emulated");
        match work.step(index, &self.geometry, &self.caps, &mut self.scratch, &mut *self.module) {
            work::Next::Submitted => {}
            work::Next::Wait => self.runnable.push_back(index),
            work::Next::Finished(status) => self.finish(index, status),
        }
    }

    /// Ends the emulated I/O at `index`.
    fn finish(&mut self, index: u64, status: Status) {
        let work = self.works[index as usize].take().expect("what is finished was emulated");
        self.flights.leave(index);
        if self.gate == Gate::Alone(index) {
            self.gate = Gate::Open;
        }
        assert!((self.ready.len() as u32) < self.depth, "more ready than the depth");
        self.ready.push_back(work.end(status, &mut self.scratch));
    }

    /// Handles a completion from the module. `Some` = the caller's.
    fn on_module_done(&mut self, mut finished: Done) -> Option<Done> {
        let index = finished.token;
        if self.flights.get(index) == Some(&Flight::Emulated) {
            let work = self.works[index as usize].as_mut().expect("an emulated I/O has a work");
            let has_scratch = self.scratch.is_some();
            match work.on_done(finished, &self.geometry, &mut self.caps, has_scratch) {
                work::Next::Finished(status) => self.finish(index, status),
                _ => self.runnable.push_back(index),
            }
            return None;
        }
        let (token, flight) = self.flights.leave(index);
        finished.token = token;
        if flight == Flight::Reset {
            // The module is done with all that came before, so the emulated I/Os it held up are
            // runnable and aborted: they end now, and the reset after them.
            self.run_works();
            self.ready.push_back(finished);
            return None;
        }
        Some(finished)
    }

    fn return_ready(&mut self, done: &mut Completions) {
        while !done.is_full() {
            let Some(ready) = self.ready.pop_front() else { return };
            done.push(ready);
        }
    }
}

impl Queue for Front {
    fn submit(&mut self, io: Io) -> Result<(), Io> {
        if self.in_flight() == self.depth {
            return Err(io);
        }
        if self.gate != Gate::Open && io.op != Op::Reset {
            return Err(io);
        }
        match self.plan(&io) {
            Plan::Pass(op) => return self.pass(io, op),
            Plan::Ready(status) => self.ready.push_back(io.complete(status)),
            Plan::Emulate => self.emulate(io, false),
            Plan::Alone => self.emulate(io, true),
        }
        Ok(())
    }

    fn poll(&mut self, now: Nanos, done: &mut Completions) {
        self.run_works();
        self.return_ready(done);
        if self.from_module.is_empty() {
            self.module.poll(now, &mut self.from_module);
        }
        while !done.is_full() {
            let Some(finished) = self.from_module.pop() else { break };
            if let Some(own) = self.on_module_done(finished) {
                done.push(own);
            }
        }
        self.run_works();
        self.return_ready(done);
    }

    fn next_timer(&self) -> Option<Nanos> {
        if !(self.ready.is_empty() && self.runnable.is_empty() && self.from_module.is_empty()) {
            return Some(0);
        }
        self.module.next_timer()
    }

    fn in_flight(&self) -> u32 {
        self.flights.len() + self.ready.len() as u32
    }

    fn lend(&mut self, lba: Lba, blocks: u64, for_write: bool) -> Option<Lent> {
        assert!(self.geometry.contains(lba, blocks), "lend: {lba} +{blocks} is out of range");
        if blocks == 0 || (for_write && self.caps.read_only) {
            return None;
        }
        self.module.lend(lba, blocks, for_write)
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert!(self.in_flight() == 0, "a queue was dropped with I/O in flight");
            assert!(self.scratch.as_ref().is_none_or(BufPool::is_whole), "scratch memory is lost");
        }
    }
}

#[cfg(test)]
mod tests;
