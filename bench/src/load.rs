//! The load generator's engine: keeps every slot of every channel busy with I/Os of a pattern,
//! checks each answer, and measures.
//!
//! ```text
//!   one turn:  poll (<= 32 answers) --> clock --> check, record, refill the same slots --> flush
//!                 |  none                                                   one doorbell a channel
//!                 +--> every 64th time: clock, deadlines, progress
//! ```
//! An I/O keeps its slot (tag, IU, data buffer) from the first launch of a phase to its end, so a
//! turn touches no pool. The clock is read once in a turn that found something; latency runs from
//! the stamp taken before posting to the stamp taken after reaping. Nothing here allocates after
//! [`Load::new`], but for error values, which end the run.
//!
//! Phases of a verified run: sweep-write the range (preload), the pattern itself, sweep-read it
//! back.

use usurp_fabric::Fabric;
use usurp_reactor::Nanos;
use usurp_reactor::cpu::Clock;

use crate::cdb::{self, Capacity};
use crate::client::{Client, Data, Outcome, Outcomes, Request, SlotId, Started};
use crate::error::Error;
use crate::pattern::{Mode, Pattern, Step};
use crate::report::Meter;
use crate::verify::Verifier;

/// Empty turns between two looks at the clock.
const IDLE_TURNS: u32 = 64;
/// Idle for so long, the thread offers its core to others between looks at the clock: on a machine
/// with fewer free cores than spinning threads the target might be waiting for just this one.
const YIELD_AFTER: Nanos = 20_000;
/// Time between two looks for commands without an answer.
const OVERDUE_EVERY: Nanos = 100_000_000;
/// How often a command is sent again after UNIT ATTENTION, BUSY or TASK SET FULL.
const RETRIES_MAX: u8 = 16;

/// What to do, checked against the LUs by the caller.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The pattern.
    pub mode: Mode,
    /// Percentage of reads in a mix.
    pub read_percent: u8,
    /// Bytes per I/O; a multiple of every LU's block size.
    pub io_bytes: u32,
    /// Outstanding I/Os per channel.
    pub depth: u32,
    /// Bytes of each LU that are used; a multiple of `io_bytes`.
    pub range_bytes: u64,
    /// End after this time.
    pub runtime_ns: Option<Nanos>,
    /// End after this many bytes.
    pub total_bytes: Option<u64>,
    /// Seed of addresses and data.
    pub seed: u64,
    /// Stamp and check.
    pub verify: bool,
    /// Never offer the core to others.
    pub spin: bool,
}

/// One LU under load.
struct Target {
    /// Its number.
    lun: u16,
    /// Blocks per I/O.
    unit_blocks: u32,
    /// The sequence of its I/Os.
    pattern: Pattern,
    /// Expected contents, with `verify`.
    verifier: Option<Verifier>,
    /// Next unit of a sweep; units are swept once.
    sweep: u64,
}

/// What a slot is doing.
#[derive(Copy, Clone)]
struct Op {
    /// The slot.
    slot: SlotId,
    /// Index into `targets`.
    target: u16,
    /// Times this I/O was sent again.
    retries: u8,
    /// Direction and unit.
    step: Step,
}

/// What the engine is working through.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Write every unit of the range once.
    Preload,
    /// The pattern; the only phase that is measured.
    Measure,
    /// Read every unit with known contents once.
    ReadBack,
}

/// Rates for a progress display.
#[derive(Copy, Clone, Debug)]
pub struct Progress {
    /// The phase.
    pub phase: Phase,
    /// Time since its start.
    pub elapsed_ns: Nanos,
    /// I/Os completed in it.
    pub ios: u64,
    /// Bytes moved in it.
    pub bytes: u64,
}

/// What the measured phase brought.
#[derive(Debug, Default)]
pub struct Measured {
    /// Reads and writes.
    pub meters: [Meter; 2],
    /// From the first post to the last answer.
    pub elapsed_ns: Nanos,
    /// The part of it in turns that found something to do.
    pub busy_ns: Nanos,
    /// Commands sent again.
    pub retries: u64,
    /// Turns in which an I/O waited for a credit.
    pub credit_waits: u64,
    /// Blocks read and found right, in all phases.
    pub blocks_verified: u64,
}

/// Numbers of the phase that is running.
#[derive(Default)]
struct Run {
    /// I/Os begun and not yet ended, those waiting for a credit included.
    outstanding: u32,
    /// Bytes of I/Os begun.
    begun_bytes: u64,
    /// I/Os ended.
    ios: u64,
    /// No new I/Os.
    stopping: bool,
    /// Next LU in turn.
    next_target: usize,
    /// When an answer last came; bounds the wait for a credit.
    last_answer: Nanos,
}

/// The engine. See the module's header.
pub struct Load<'a, F: Fabric> {
    /// The connection.
    client: &'a mut Client<F>,
    /// Time.
    clock: Clock,
    /// What to do.
    plan: Plan,
    /// The LUs.
    targets: Vec<Target>,
    /// One per slot in use; `Request::user` is the index here.
    ops: Vec<Op>,
    /// Indices of ops that wait for a credit.
    stalled: Vec<u32>,
    /// The same, while they are tried again.
    retrying: Vec<u32>,
    /// Answers of a turn.
    outcomes: Outcomes,
    /// Bounce for stamping and checking: one unit.
    scratch: Vec<u8>,
    /// The current phase's numbers.
    run: Run,
    /// Results.
    measured: Measured,
}

impl<'a, F: Fabric> Load<'a, F> {
    /// Takes `depth` slots of every channel. `luns` are LUN and capacity.
    pub fn new(client: &'a mut Client<F>, plan: Plan, luns: &[(u16, Capacity)]) -> Self {
        let units = plan.range_bytes / u64::from(plan.io_bytes);
        let target = |(i, &(lun, capacity)): (usize, &(u16, Capacity))| {
            let unit_blocks = plan.io_bytes / capacity.block_size;
            assert!(unit_blocks > 0 && units > 0, "the plan fits the LU");
            let seed = plan.seed.wrapping_add(i as u64);
            let blocks = u64::from(unit_blocks);
            let verifier = || Verifier::new(lun, capacity.block_size, blocks, units, plan.seed);
            Target {
                lun,
                unit_blocks,
                pattern: Pattern::new(plan.mode, units, plan.read_percent, seed),
                verifier: plan.verify.then(verifier),
                sweep: 0,
            }
        };
        let targets: Vec<Target> = luns.iter().enumerate().map(target).collect();
        assert!(!targets.is_empty(), "at least one LUN");
        let ops = reserve_ops(client, plan.depth);
        fill_buffers(client, &ops, &plan);
        Load {
            clock: Clock::new(),
            stalled: Vec::with_capacity(ops.len()),
            retrying: Vec::with_capacity(ops.len()),
            outcomes: Outcomes::default(),
            scratch: vec![0; if plan.verify { plan.io_bytes as usize } else { 0 }],
            run: Run::default(),
            measured: Measured::default(),
            client,
            plan,
            targets,
            ops,
        }
    }

    /// The results so far.
    pub fn measured(&self) -> &Measured {
        &self.measured
    }

    /// Works through one phase. `progress` is called about once a second.
    pub fn phase(&mut self, phase: Phase, progress: &mut dyn FnMut(Progress)) -> Result<(), Error> {
        self.run = Run::default();
        self.targets.iter_mut().for_each(|t| t.sweep = 0);
        let start = self.clock.now();
        self.run.last_answer = start;
        let end = self.plan.runtime_ns.filter(|_| phase == Phase::Measure);
        let end = end.map_or(Nanos::MAX, |ns| start + ns);
        for index in 0..self.ops.len() as u32 {
            self.begin(phase, index, start)?;
        }
        self.client.flush()?;
        let last = self.turns(phase, start, end, progress)?;
        assert!(self.stalled.is_empty(), "no I/O is left waiting");
        if phase == Phase::Measure {
            self.measured.elapsed_ns = last - start;
        }
        Ok(())
    }

    /// Turns until every I/O has ended; the time of the last answer.
    fn turns(
        &mut self,
        phase: Phase,
        start: Nanos,
        end: Nanos,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Nanos, Error> {
        let mut now = start;
        let mut busy_since = Some(start);
        let mut idle_turns = 0;
        let mut next_look = start + OVERDUE_EVERY;
        let mut next_progress = start + 1_000_000_000;
        while self.run.outstanding > 0 {
            let count = self.client.poll(now, &mut self.outcomes)?;
            if count > 0 {
                now = self.clock.now();
                busy_since.get_or_insert(now);
                self.handle(phase, now)?;
                idle_turns = 0;
            } else {
                idle_turns += 1;
                // The first empty turn ends a busy stretch; it is read while the target works.
                let Some(since) = busy_since.take() else {
                    if idle_turns % IDLE_TURNS != 0 {
                        continue;
                    }
                    now = self.clock.now();
                    self.look(now, end, &mut next_look)?;
                    if !self.plan.spin && now - self.run.last_answer > YIELD_AFTER {
                        std::thread::yield_now();
                    }
                    continue;
                };
                now = self.clock.now();
                self.measured.busy_ns += (now - since) * u64::from(phase == Phase::Measure);
            }
            self.run.stopping |= now >= end;
            if now >= next_look {
                self.look(now, end, &mut next_look)?;
            }
            if now >= next_progress {
                next_progress = now + 1_000_000_000;
                progress(self.progress(phase, now - start));
            }
        }
        let since = busy_since.unwrap_or(now);
        self.measured.busy_ns += (now - since) * u64::from(phase == Phase::Measure);
        Ok(now)
    }

    fn progress(&self, phase: Phase, elapsed_ns: Nanos) -> Progress {
        let bytes = self.run.ios * u64::from(self.plan.io_bytes);
        Progress { phase, elapsed_ns, ios: self.run.ios, bytes }
    }

    /// Rare checks: the end of the run, and commands without an answer.
    #[cold]
    fn look(&mut self, now: Nanos, end: Nanos, next: &mut Nanos) -> Result<(), Error> {
        self.run.stopping |= now >= end;
        if now >= *next {
            *next = now + OVERDUE_EVERY;
            self.client.check_overdue(now)?;
        }
        if !self.stalled.is_empty() {
            // A CRED_REQ brings credits without an answer, so look here too.
            self.client.check_credit_wait(now - self.run.last_answer)?;
            self.retry_stalled(now)?;
            self.client.flush()?;
        }
        Ok(())
    }

    /// The answers of one turn: each ends its I/O and begins the next one in the same slot.
    fn handle(&mut self, phase: Phase, now: Nanos) -> Result<(), Error> {
        self.run.last_answer = now;
        if !self.stalled.is_empty() {
            self.retry_stalled(now)?;
        }
        for i in 0..self.outcomes.len() {
            let outcome = self.outcomes[i];
            if !outcome.is_good() {
                self.on_bad(&outcome, now)?;
                continue;
            }
            self.on_good(phase, &outcome, now)?;
            self.begin(phase, outcome.user as u32, now)?;
        }
        self.client.flush()
    }

    fn on_good(&mut self, phase: Phase, outcome: &Outcome, now: Nanos) -> Result<(), Error> {
        let op = self.ops[outcome.user as usize];
        assert!(op.slot == outcome.slot, "an answer belongs to its slot");
        self.run.outstanding -= 1;
        self.run.ios += 1;
        if phase == Phase::Measure {
            let meter = &mut self.measured.meters[usize::from(op.step.write)];
            meter.record(now - outcome.posted, u64::from(self.plan.io_bytes));
        }
        let target = &mut self.targets[usize::from(op.target)];
        let Some(verifier) = &mut target.verifier else { return Ok(()) };
        if op.step.write {
            verifier.on_written(op.step.unit);
        } else if verifier.is_known(op.step.unit) {
            self.client.data_read(op.slot, 0, &mut self.scratch);
            verifier.check(op.step.unit, &self.scratch).map_err(Error::Verify)?;
            self.measured.blocks_verified += u64::from(target.unit_blocks);
        }
        verifier.release(op.step.unit);
        Ok(())
    }

    /// Not GOOD: sent again if the target only asked for patience, else the end of the run.
    #[cold]
    fn on_bad(&mut self, outcome: &Outcome, now: Nanos) -> Result<(), Error> {
        let op = &mut self.ops[outcome.user as usize];
        if !self.client.is_transient(outcome) || op.retries == RETRIES_MAX {
            return Err(self.client.error_of(outcome));
        }
        op.retries += 1;
        self.measured.retries += 1;
        self.launch(outcome.user as u32, now)
    }

    /// Chooses the next I/O of a slot and sends it, unless the phase is over.
    #[inline]
    fn begin(&mut self, phase: Phase, index: u32, now: Nanos) -> Result<(), Error> {
        let io_bytes = u64::from(self.plan.io_bytes);
        let limit = self.plan.total_bytes.filter(|_| phase == Phase::Measure);
        if limit.is_some_and(|max| self.run.begun_bytes + io_bytes > max) {
            self.run.stopping = true;
        }
        if self.run.stopping {
            return Ok(());
        }
        let Some((target, step)) = self.choose(phase) else {
            self.run.stopping = true;
            return Ok(());
        };
        let op = &mut self.ops[index as usize];
        *op = Op { slot: op.slot, target, retries: 0, step };
        let slot = op.slot;
        if let Some(verifier) = &self.targets[usize::from(target)].verifier
            && step.write
        {
            verifier.stamp(step.unit, &mut self.scratch);
            self.client.data_write(slot, 0, &self.scratch);
        }
        self.run.begun_bytes += io_bytes;
        self.run.outstanding += 1;
        self.launch(index, now)
    }

    /// The next I/O of the phase, its unit claimed; None when a sweep is through.
    #[inline]
    fn choose(&mut self, phase: Phase) -> Option<(u16, Step)> {
        let count = self.targets.len();
        for _ in 0..count {
            let at = self.run.next_target;
            self.run.next_target = if at + 1 == count { 0 } else { at + 1 };
            let step = match phase {
                Phase::Measure => Some(self.targets[at].next_free()),
                Phase::Preload => self.targets[at].sweep_next(true),
                Phase::ReadBack => self.targets[at].sweep_next(false),
            };
            if let Some(step) = step {
                return Some((at as u16, step));
            }
        }
        None
    }

    /// Sends the I/O that `ops[index]` describes, or parks it until a credit comes.
    #[inline]
    fn launch(&mut self, index: u32, now: Nanos) -> Result<(), Error> {
        let op = &self.ops[index as usize];
        let target = &self.targets[usize::from(op.target)];
        let lba = op.step.unit * u64::from(target.unit_blocks);
        let bytes = self.plan.io_bytes;
        let request = Request {
            lun: target.lun,
            cdb: cdb::read_write(op.step.write, lba, target.unit_blocks),
            data: if op.step.write { Data::Out(bytes) } else { Data::In(bytes) },
            user: u64::from(index),
        };
        match self.client.start(op.slot, &request, now)? {
            Started::Yes => {}
            Started::NoRoom => {
                self.stalled.push(index);
                self.measured.credit_waits += 1;
            }
        }
        Ok(())
    }

    #[cold]
    fn retry_stalled(&mut self, now: Nanos) -> Result<(), Error> {
        std::mem::swap(&mut self.stalled, &mut self.retrying);
        for i in 0..self.retrying.len() {
            self.launch(self.retrying[i], now)?;
        }
        self.retrying.clear();
        Ok(())
    }

    /// Gives the slots back to the client; asserts that every unit was released.
    pub fn finish(self) -> Measured {
        for op in &self.ops {
            self.client.release(op.slot);
        }
        let verifiers = self.targets.iter().filter_map(|t| t.verifier.as_ref());
        assert!(verifiers.into_iter().all(Verifier::is_whole), "every unit is released");
        self.measured
    }
}

impl Target {
    /// The next I/O of the pattern whose unit is free. There always is one: the caller made sure
    /// that the range has more units than there are slots.
    #[inline]
    fn next_free(&mut self) -> Step {
        let mut step = self.pattern.step();
        let Some(verifier) = &mut self.verifier else { return step };
        let units = verifier.units();
        for _ in 0..units {
            if verifier.claim(step.unit) {
                return step;
            }
            step.unit = self.pattern.after(step.unit);
        }
        unreachable!("more slots than units; the plan forbids it")
    }

    /// The next unit of a sweep. A reading sweep passes over units without known contents.
    fn sweep_next(&mut self, write: bool) -> Option<Step> {
        let verifier = self.verifier.as_mut()?;
        while self.sweep < verifier.units() {
            let unit = self.sweep;
            self.sweep += 1;
            if write || verifier.is_known(unit) {
                let free = verifier.claim(unit);
                assert!(free, "a sweep visits every unit once");
                return Some(Step { write, unit });
            }
        }
        None
    }
}

fn reserve_ops<F: Fabric>(client: &mut Client<F>, depth: u32) -> Vec<Op> {
    let step = Step { write: false, unit: 0 };
    let mut ops = Vec::with_capacity(client.channels() * depth as usize);
    // Slot by slot over the channels, so that a short run uses them evenly.
    for _ in 0..depth {
        for channel in 0..client.channels() {
            let slot = client.reserve(channel).expect("the plan's depth is within the slots");
            ops.push(Op { slot, target: 0, retries: 0, step });
        }
    }
    ops
}

/// Gives every buffer contents that neither compress nor repeat; written as they are without
/// verify.
fn fill_buffers<F: Fabric>(client: &mut Client<F>, ops: &[Op], plan: &Plan) {
    let mut rng = crate::pattern::Rng::new(plan.seed ^ 0x5555);
    let mut data = vec![0u8; plan.io_bytes as usize];
    for op in ops {
        data.as_chunks_mut::<8>().0.iter_mut().for_each(|w| *w = rng.bits().to_le_bytes());
        client.data_write(op.slot, 0, &data);
    }
}
