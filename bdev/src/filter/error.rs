//! # error: a failing disk
//!
//! Fails every n-th I/O of a kind with a status of choice; the base never sees those.
//!
//! ```yaml
//! - { name: ram0, malloc: { size: 1GiB } }
//! - { name: bad0, error: { base: ram0, on: read, every: 10, count: 3, status: medium } }
//! ```
//!
//! | key | default | meaning |
//! |---|---|---|
//! | `base` | required | the bdev to spoil; nobody else may use it |
//! | `on` | any | `read`, `write` (all that writes but unmap), `flush`, `unmap`, `any` |
//! | `every` | 1 | fail each n-th I/O of that kind |
//! | `count` | no end | fail so many, then no more |
//! | `status` | medium | or `io`, `no_space`, `busy`, `not_supported`, `aborted`, `read_only` |
//!
//! Limits: `every` and `count` are counted per queue, so per reactor: nothing is shared between
//! cores. A reset is never failed. A failed write changes nothing.

use std::collections::VecDeque;
use std::sync::Arc;

use serde::Deserialize;
use serde_yaml::Value;
use usurp_reactor::Nanos;

use super::Filter;
use crate::contract::{Bdev, BdevError, Caps, Geometry, Queue, QueueSetup};
use crate::io::{Completions, Done, Io, Op, Status};
use crate::options;
use crate::registry::{Module, OpenContext};

/// This module's line in the table of modules.
pub const MODULE: Module = Module { name: "error", example: EXAMPLE, check, open };

const EXAMPLE: &str = "error: { base: ram0, on: read, every: 10, status: medium }";

/// The YAML keys.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Options {
    base: String,
    #[serde(default)]
    on: Kind,
    #[serde(default = "every_default")]
    every: u64,
    #[serde(default = "count_default")]
    count: u64,
    #[serde(default)]
    status: Injected,
}

fn every_default() -> u64 {
    1
}

fn count_default() -> u64 {
    u64::MAX
}

/// Which I/Os are meant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    #[default]
    Any,
    Read,
    Write,
    Flush,
    Unmap,
}

impl Kind {
    fn takes(self, op: Op) -> bool {
        match op {
            Op::Reset => false,
            Op::Read => matches!(self, Kind::Any | Kind::Read),
            Op::Flush => matches!(self, Kind::Any | Kind::Flush),
            Op::Unmap => matches!(self, Kind::Any | Kind::Unmap),
            _ => matches!(self, Kind::Any | Kind::Write),
        }
    }
}

/// The YAML form of the statuses that can be injected.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Injected {
    #[default]
    Medium,
    Io,
    NoSpace,
    Busy,
    NotSupported,
    Aborted,
    ReadOnly,
}

impl Injected {
    fn status(self) -> Status {
        match self {
            Injected::Medium => Status::Medium,
            Injected::Io => Status::Io,
            Injected::NoSpace => Status::NoSpace,
            Injected::Busy => Status::Busy,
            Injected::NotSupported => Status::NotSupported,
            Injected::Aborted => Status::Aborted,
            Injected::ReadOnly => Status::ReadOnly,
        }
    }
}

fn read(options: &Value) -> Result<Options, BdevError> {
    let options: Options = options::parse("error", options, EXAMPLE)?;
    if options.every == 0 {
        return Err(BdevError::new("error.every", "every 0th I/O makes no sense", "1 or more"));
    }
    Ok(options)
}

fn check(options: &Value) -> Result<Option<String>, BdevError> {
    read(options).map(|options| Some(options.base))
}

fn open(
    name: &str,
    options: &Value,
    context: &mut OpenContext<'_>,
) -> Result<Arc<dyn Bdev>, BdevError> {
    let options = read(options)?;
    let filter = Filter::claim(name, "error.base", &options.base, context)?;
    Ok(Arc::new(ErrorBdev { filter, options }))
}

/// The control plane's handle.
struct ErrorBdev {
    /// Name and base.
    filter: Filter,
    /// What is to fail, and how.
    options: Options,
}

impl Bdev for ErrorBdev {
    fn name(&self) -> &str {
        self.filter.name()
    }

    fn module(&self) -> &'static str {
        "error"
    }

    fn geometry(&self) -> Geometry {
        self.filter.geometry()
    }

    fn caps(&self) -> Caps {
        self.filter.caps()
    }

    fn queue(&self, setup: &QueueSetup) -> Result<Box<dyn Queue>, BdevError> {
        Ok(Box::new(ErrorQueue {
            base: self.filter.queue(setup)?,
            depth: setup.depth as usize,
            on: self.options.on,
            every: self.options.every,
            left: self.options.count,
            seen: 0,
            status: self.options.status.status(),
            failed: VecDeque::with_capacity(setup.depth as usize),
        }))
    }
}

/// One reactor's handle.
struct ErrorQueue {
    /// The base's queue.
    base: Box<dyn Queue>,
    /// The most I/Os in flight, with the base and in `failed`.
    depth: usize,
    /// Which I/Os count.
    on: Kind,
    /// Each so-manieth of them fails; at least 1.
    every: u64,
    /// How many may still be failed.
    left: u64,
    /// Those that count since the last one failed; below `every`.
    seen: u64,
    /// What they fail with.
    status: Status,
    /// Failed and not returned yet, oldest first. Its capacity is `depth`.
    failed: VecDeque<Done>,
}

impl Queue for ErrorQueue {
    fn submit(&mut self, io: Io) -> Result<(), Io> {
        if self.in_flight() as usize == self.depth {
            return Err(io);
        }
        if self.left == 0 || !self.on.takes(io.op) {
            return self.base.submit(io);
        }
        if self.seen + 1 < self.every {
            self.base.submit(io)?;
            self.seen += 1;
            return Ok(());
        }
        self.seen = 0;
        self.left -= 1;
        self.failed.push_back(io.complete(self.status));
        Ok(())
    }

    fn poll(&mut self, now: Nanos, done: &mut Completions) {
        while !done.is_full() {
            let Some(failed) = self.failed.pop_front() else { break };
            done.push(failed);
        }
        self.base.poll(now, done);
    }

    fn next_timer(&self) -> Option<Nanos> {
        self.base.next_timer()
    }

    fn in_flight(&self) -> u32 {
        self.base.in_flight() + self.failed.len() as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::Lba;
    use crate::registry::open_one;
    use usurp_reactor::mem::Buf;

    /// The statuses of `ops`, submitted one after another.
    fn statuses(options: &str, ops: &[Op]) -> Vec<Status> {
        let yaml =
            format!("[{{ name: a, null: }}, {{ name: e, error: {{ base: a, {options} }} }}]");
        let bdev = open_one(&yaml).unwrap();
        let mut queue = bdev.queue(&QueueSetup { depth: 2, data: None, core: 0 }).unwrap();
        let mut done = Completions::new();
        let one = |(n, op): (usize, &Op)| {
            queue.submit(Io::new(*op, Lba(0), 1, Buf::none(), n as u64)).unwrap();
            assert_eq!(queue.in_flight(), 1);
            queue.poll(0, &mut done);
            let finished = done.pop().unwrap();
            assert_eq!((finished.token, queue.in_flight()), (n as u64, 0));
            finished.status
        };
        ops.iter().enumerate().map(one).collect()
    }

    const WRITE: Op = Op::Write { fua: false };

    #[test]
    fn every_nth_fails_a_number_of_times() {
        let got = statuses("every: 3, count: 2, status: no_space", &[WRITE; 12]);
        let failed: Vec<usize> = (0..12).filter(|n| got[*n] == Status::NoSpace).collect();
        assert_eq!(failed, [2, 5]);
        assert_eq!(got.iter().filter(|s| **s == Status::Ok).count(), 10);
    }

    #[test]
    fn only_the_kind_asked_for_fails() {
        let got = statuses("on: unmap, status: io", &[WRITE, Op::Unmap, Op::Reset, Op::Unmap]);
        assert_eq!(got, [Status::Ok, Status::Io, Status::Ok, Status::Io]);
        let got = statuses("on: any", &[WRITE, Op::Unmap, Op::Reset]);
        assert_eq!(got, [Status::Medium, Status::Medium, Status::Ok]);
        let zeroes = Op::WriteZeroes { unmap: false, fua: false };
        let got = statuses("on: write, status: busy", &[zeroes, Op::Unmap]);
        assert_eq!(got, [Status::Busy, Status::Ok]);
    }

    #[test]
    fn options_are_refused_by_key() {
        let open = |options: &str| {
            let yaml = format!("[{{ name: a, null: }}, {{ name: e, error: {options} }}]");
            open_one(&yaml).err().unwrap()
        };
        assert_eq!(open("{ base: a, every: 0 }").key, "error.every");
        assert_eq!(open("{ base: a, on: reads }").key, "error.on");
        assert_eq!(open("{ base: b }").key, "error.base");
        let error = open("{ base: a, status: broken }");
        assert_eq!(error.key, "error.status");
        assert!(error.message.contains("medium"), "{error}");
    }

    #[cfg(feature = "test-utils")]
    #[test]
    fn conformance() {
        crate::conformance::run(
            open_one(
                "[{ name: a, malloc: { size: 4MiB, hugepages: never } },
                  { name: e, error: { base: a, count: 0 } }]",
            )
            .unwrap(),
        );
    }
}
