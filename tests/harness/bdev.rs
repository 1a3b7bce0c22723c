//! A simulated disk: memory behind latency, errors, reordering and a queue that is full at times.
//!
//! Owns its medium, which all its queues share. Time and chance come from outside: `poll`'s `now`
//! and a seed. Never lends memory.
//!
//! ```text
//!  submit -> pending: waits -> applied (all of it, at one moment) -> waits -> Done
//! ```
//! An error that is injected applies a part of a write: whole blocks from its start.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use usurp_bdev::{Bdev, BdevError, Caps, Completions, Geometry, Io, Op, Queue, QueueSetup, Status};
use usurp_reactor::Nanos;
use usurp_reactor::mem::{Arena, HugePolicy};

use crate::rng::Rng;

/// How a disk behaves.
#[derive(Clone, Debug)]
pub struct DiskConfig {
    /// Block size in bytes and number of blocks.
    pub geometry: Geometry,
    /// What it claims to do.
    pub caps: Caps,
    /// Shortest and longest time of an I/O.
    pub latency_ns: (Nanos, Nanos),
    /// I/Os that take fifty times as long, per million.
    pub slow_ppm: u64,
    /// I/Os that fail, per million.
    pub errors_ppm: u64,
    /// Submits that find the queue full for no reason, per million.
    pub full_ppm: u64,
}

/// See the module's header.
pub struct Disk {
    name: String,
    config: DiskConfig,
    /// The medium.
    medium: Arc<Arena>,
    /// Seed of the next queue.
    seed: AtomicU64,
    /// Virtual time, set by the simulation.
    clock: Arc<AtomicU64>,
}

impl Disk {
    /// A disk of zeros.
    pub fn new(name: &str, config: DiskConfig, seed: u64, clock: Arc<AtomicU64>) -> Arc<Disk> {
        let bytes = config.geometry.size_bytes() as usize;
        let medium = Arena::new(name, bytes, HugePolicy::Never).expect("a small arena");
        let seed = AtomicU64::new(seed);
        Arc::new(Disk { name: name.into(), config, medium, seed, clock })
    }

    /// What is on it.
    pub fn medium(&self) -> &Arc<Arena> {
        &self.medium
    }
}

impl Bdev for Disk {
    fn name(&self) -> &str {
        &self.name
    }

    fn module(&self) -> &'static str {
        "sim"
    }

    fn geometry(&self) -> Geometry {
        self.config.geometry
    }

    fn caps(&self) -> Caps {
        self.config.caps
    }

    fn queue(&self, setup: &QueueSetup) -> Result<Box<dyn Queue>, BdevError> {
        let seed = self.seed.fetch_add(0x1234_5678_9ABC, Ordering::Relaxed);
        Ok(Box::new(DiskQueue {
            medium: self.medium.clone(),
            config: self.config.clone(),
            rng: Rng::new(seed),
            depth: setup.depth as usize,
            pending: Vec::with_capacity(setup.depth as usize),
            clock: self.clock.clone(),
            print: std::env::var_os("USURP_TRACE").is_some_and(|v| v != "0"),
        }))
    }
}

/// An I/O in flight.
struct Pending {
    io: Io,
    /// When it takes effect; none once it has.
    apply_at: Option<Nanos>,
    /// When it completes.
    done_at: Nanos,
    /// How it ends.
    status: Status,
}

/// One reactor's queue.
struct DiskQueue {
    medium: Arc<Arena>,
    config: DiskConfig,
    rng: Rng,
    depth: usize,
    /// In flight, in order of submission but for removals.
    pending: Vec<Pending>,
    /// Virtual time.
    clock: Arc<AtomicU64>,
    /// Print what happens.
    print: bool,
}

impl DiskQueue {
    fn show(&self, what: &str, io: &Io, status: Status) {
        if self.print {
            let at = if io.buf.is_none() { 0 } else { io.buf.addr() };
            eprintln!("    disk {what} {io:?} {status:?} buffer {at:x}");
        }
    }

    fn apply(&mut self, at: usize) {
        self.show("apply", &self.pending[at].io, self.pending[at].status);
        let p = &mut self.pending[at];
        p.apply_at = None;
        let size = self.config.geometry.block_size as usize;
        let failed = p.status != Status::Ok;
        let blocks = if failed { self.rng.below(p.io.blocks + 1) } else { p.io.blocks } as usize;
        let offset = p.io.lba.0 as usize * size;
        match p.io.op {
            Op::Read => {
                // A failed read leaves rubbish, so that nobody takes it for data.
                let bytes = blocks * size;
                let buf = &mut p.io.buf.as_mut_slice()[..bytes];
                self.medium.copy_out(offset, buf);
                if failed {
                    buf.fill(0xBD);
                }
            }
            Op::Write { .. } => {
                self.medium.copy_in(offset, &p.io.buf.as_slice()[..blocks * size]);
            }
            Op::Unmap | Op::WriteZeroes { .. } => self.medium.fill(offset, blocks * size, 0),
            Op::WriteSame { .. } => {
                for block in 0..blocks {
                    let same = &p.io.buf.as_slice()[..size];
                    self.medium.copy_in(offset + block * size, same);
                }
            }
            Op::Flush | Op::Reset => {}
            Op::CompareAndWrite { .. } => panic!("the simulated disk does not claim it"),
        }
    }
}

impl Queue for DiskQueue {
    fn submit(&mut self, io: Io) -> Result<(), Io> {
        if self.pending.len() >= self.depth || self.rng.chance(self.config.full_ppm) {
            return Err(io);
        }
        let (lo, hi) = self.config.latency_ns;
        let now = self.clock.load(Ordering::Relaxed);
        let slow = if self.rng.chance(self.config.slow_ppm) { 50 } else { 1 };
        let latency = self.rng.range(lo, hi) * slow;
        let fails = io.op != Op::Reset && self.rng.chance(self.config.errors_ppm);
        let status = if fails { self.rng.pick(&[Status::Medium, Status::Io]) } else { Status::Ok };
        self.show("submit", &io, status);
        let apply_at = Some(now + self.rng.range(0, latency));
        self.pending.push(Pending { io, apply_at, done_at: now + latency, status });
        Ok(())
    }

    fn poll(&mut self, now: Nanos, done: &mut Completions) {
        for at in 0..self.pending.len() {
            if self.pending[at].apply_at.is_some_and(|t| t <= now) {
                self.apply(at);
            }
        }
        let mut at = 0;
        while at < self.pending.len() && !done.is_full() {
            let p = &self.pending[at];
            let first = p.io.op != Op::Reset || at == 0;
            if p.apply_at.is_none() && p.done_at <= now && first {
                let p = self.pending.remove(at);
                self.show("done", &p.io, p.status);
                done.push(p.io.complete(p.status));
            } else {
                at += 1;
            }
        }
    }

    fn next_timer(&self) -> Option<Nanos> {
        self.pending.iter().map(|p| p.apply_at.unwrap_or(p.done_at)).min()
    }

    fn in_flight(&self) -> u32 {
        self.pending.len() as u32
    }
}
