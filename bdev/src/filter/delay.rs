//! # delay: a slow disk
//!
//! Holds each completion of its base back for a time that depends on the kind of I/O.
//!
//! ```yaml
//! - { name: ram0, malloc: { size: 1GiB } }
//! - { name: slow0, delay: { base: ram0, read_us: 100, write_us: 300 } }
//! ```
//!
//! | key | default | meaning |
//! |---|---|---|
//! | `base` | required | the bdev to slow down; nobody else may use it |
//! | `read_us` | 0 | microseconds added to a read |
//! | `write_us` | 0 | ... to a write, write-same, write-zeroes, compare-and-write |
//! | `flush_us` | 0 | ... to a flush |
//! | `unmap_us` | 0 | ... to an unmap |
//!
//! Limits: the time runs from the poll that brings the base's completion. A held I/O counts against
//! the queue's depth, as it would in a slow disk. A reset lets all held I/Os go at once.
//! Time is `poll`'s argument, so it works on virtual time.
//!
//! ```text
//!  submit -> base -> (status known) -> held, a heap by due time -> Done
//! ```

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::sync::Arc;

use serde::Deserialize;
use serde_yaml::Value;
use usurp_reactor::Nanos;

use super::Filter;
use crate::contract::{Bdev, BdevError, Caps, Geometry, Queue, QueueSetup};
use crate::io::{Completions, Done, Io, Op};
use crate::options;
use crate::registry::{Module, OpenContext};
use crate::tokens::TokenMap;

/// This module's line in the table of modules.
pub const MODULE: Module = Module { name: "delay", example: EXAMPLE, check, open };

const EXAMPLE: &str = "delay: { base: ram0, read_us: 100 }";

/// The longest delay: an hour, in microseconds. More is a slip of the pen.
const DELAY_US_MAX: u64 = 3_600_000_000;

/// The YAML keys.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Options {
    base: String,
    #[serde(default)]
    read_us: u64,
    #[serde(default)]
    write_us: u64,
    #[serde(default)]
    flush_us: u64,
    #[serde(default)]
    unmap_us: u64,
}

/// Delay per kind of I/O.
#[derive(Clone, Copy)]
struct Delays {
    /// Of a read.
    read: Nanos,
    /// Of anything that writes but an unmap.
    write: Nanos,
    /// Of a flush.
    flush: Nanos,
    /// Of an unmap.
    unmap: Nanos,
}

impl Delays {
    fn of(&self, op: Op) -> Nanos {
        match op {
            Op::Read => self.read,
            Op::Flush => self.flush,
            Op::Unmap => self.unmap,
            Op::Reset => 0,
            _ => self.write,
        }
    }
}

fn read(options: &Value) -> Result<(Options, Delays), BdevError> {
    let options: Options = options::parse("delay", options, EXAMPLE)?;
    let nanos = |key: &str, us: u64| {
        if us <= DELAY_US_MAX {
            return Ok(us * 1000);
        }
        let message = format!("a delay of {us} microseconds is more than an hour");
        Err(BdevError::new(format!("delay.{key}"), message, "at most 3600000000"))
    };
    let delays = Delays {
        read: nanos("read_us", options.read_us)?,
        write: nanos("write_us", options.write_us)?,
        flush: nanos("flush_us", options.flush_us)?,
        unmap: nanos("unmap_us", options.unmap_us)?,
    };
    Ok((options, delays))
}

fn check(options: &Value) -> Result<Option<String>, BdevError> {
    read(options).map(|(options, _)| Some(options.base))
}

fn open(
    name: &str,
    options: &Value,
    context: &mut OpenContext<'_>,
) -> Result<Arc<dyn Bdev>, BdevError> {
    let (options, delays) = read(options)?;
    let filter = Filter::claim(name, "delay.base", &options.base, context)?;
    Ok(Arc::new(Delay { filter, delays }))
}

/// The control plane's handle.
struct Delay {
    /// Name and base.
    filter: Filter,
    /// The configured delays.
    delays: Delays,
}

impl Bdev for Delay {
    fn name(&self) -> &str {
        self.filter.name()
    }

    fn module(&self) -> &'static str {
        "delay"
    }

    fn geometry(&self) -> Geometry {
        self.filter.geometry()
    }

    fn caps(&self) -> Caps {
        self.filter.caps()
    }

    fn queue(&self, setup: &QueueSetup) -> Result<Box<dyn Queue>, BdevError> {
        Ok(Box::new(DelayQueue {
            base: self.filter.queue(setup)?,
            depth: setup.depth as usize,
            delays: self.delays,
            tokens: TokenMap::new("delay", setup.depth),
            from_base: Completions::new(),
            held: BinaryHeap::with_capacity(setup.depth as usize),
            held_seq: 0,
        }))
    }
}

/// A completion that is held back.
struct Held {
    /// When it may go.
    due: Nanos,
    /// Order of arrival, for those due at the same time.
    seq: u64,
    /// The completion, with the caller's token.
    done: Done,
}

impl PartialEq for Held {
    fn eq(&self, other: &Held) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Held {}

impl PartialOrd for Held {
    fn partial_cmp(&self, other: &Held) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Held {
    fn cmp(&self, other: &Held) -> Ordering {
        (self.due, self.seq).cmp(&(other.due, other.seq))
    }
}

/// One reactor's handle.
struct DelayQueue {
    /// The base's queue.
    base: Box<dyn Queue>,
    /// The most I/Os in flight, with the base and held.
    depth: usize,
    /// The bdev's.
    delays: Delays,
    /// I/Os that are with the base, each with its kind.
    tokens: TokenMap<Op>,
    /// What the base completed and is not held yet.
    from_base: Completions,
    /// Completions held back, the earliest due on top. With `tokens` at most the depth, which is
    /// its capacity: it never grows.
    held: BinaryHeap<Reverse<Held>>,
    /// The next `Held::seq`.
    held_seq: u64,
}

impl DelayQueue {
    fn hold(&mut self, now: Nanos, mut done: Done) {
        let (token, op) = self.tokens.leave(done.token);
        done.token = token;
        if op == Op::Reset {
            // All before it goes first, in its order; nothing is due earlier than 0.
            let held = std::mem::take(&mut self.held);
            self.held = release_all(held);
        }
        let due = if op == Op::Reset { 0 } else { now.saturating_add(self.delays.of(op)) };
        assert!(self.held.len() < self.depth, "more held than the depth");
        self.held.push(Reverse(Held { due, seq: self.held_seq, done }));
        self.held_seq += 1;
    }
}

/// Makes everything due at once. Works in place: a heap turns into its vector and back.
fn release_all(held: BinaryHeap<Reverse<Held>>) -> BinaryHeap<Reverse<Held>> {
    let mut list = held.into_vec();
    list.iter_mut().for_each(|Reverse(held)| held.due = 0);
    BinaryHeap::from(list)
}

impl Queue for DelayQueue {
    fn submit(&mut self, mut io: Io) -> Result<(), Io> {
        if self.in_flight() as usize == self.depth {
            return Err(io);
        }
        let token = io.token;
        let Some(index) = self.tokens.enter(token, io.op) else { return Err(io) };
        io.token = index;
        self.base.submit(io).map_err(|mut io| {
            io.token = self.tokens.leave(index).0;
            io
        })
    }

    fn poll(&mut self, now: Nanos, done: &mut Completions) {
        self.base.poll(now, &mut self.from_base);
        while let Some(finished) = self.from_base.pop() {
            self.hold(now, finished);
        }
        while !done.is_full() && self.held.peek().is_some_and(|Reverse(held)| held.due <= now) {
            let Reverse(held) = self.held.pop().expect("peek saw one");
            done.push(held.done);
        }
    }

    fn next_timer(&self) -> Option<Nanos> {
        let own = self.held.peek().map(|Reverse(held)| held.due);
        match (own, self.base.next_timer()) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    fn in_flight(&self) -> u32 {
        self.tokens.len() + self.held.len() as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::Lba;
    use crate::io::Status;
    use crate::registry::open_one;
    use usurp_reactor::mem::Buf;

    fn queue(options: &str, depth: u32) -> Box<dyn Queue> {
        let yaml =
            format!("[{{ name: a, null: }}, {{ name: d, delay: {{ base: a, {options} }} }}]");
        open_one(&yaml).unwrap().queue(&QueueSetup { depth, data: None, core: 0 }).unwrap()
    }

    fn io(op: Op, token: u64) -> Io {
        Io::new(op, Lba(0), 1, Buf::none(), token)
    }

    fn tokens_at(queue: &mut Box<dyn Queue>, now: Nanos) -> Vec<u64> {
        let mut done = Completions::new();
        queue.poll(now, &mut done);
        std::iter::from_fn(|| done.pop())
            .map(|d| {
                assert_eq!(d.status, Status::Ok);
                d.token
            })
            .collect()
    }

    #[test]
    fn each_kind_waits_its_own_time() {
        let mut queue = queue("write_us: 3, unmap_us: 1", 4);
        queue.submit(io(Op::Write { fua: false }, u64::MAX)).unwrap();
        queue.submit(io(Op::Unmap, 2)).unwrap();
        assert_eq!(queue.next_timer(), None);
        assert_eq!(tokens_at(&mut queue, 10_000), []);
        assert_eq!(queue.next_timer(), Some(11_000));
        assert_eq!(tokens_at(&mut queue, 10_999), []);
        assert_eq!(tokens_at(&mut queue, 11_000), [2]);
        assert_eq!(tokens_at(&mut queue, 12_999), []);
        assert_eq!(queue.in_flight(), 1);
        assert_eq!(tokens_at(&mut queue, 13_000), [u64::MAX]);
        assert_eq!((queue.in_flight(), queue.next_timer()), (0, None));
    }

    #[test]
    fn equal_delays_keep_the_order() {
        let mut queue = queue("write_us: 1", 16);
        (0..16).for_each(|n| queue.submit(io(Op::Write { fua: false }, n)).unwrap());
        assert_eq!(tokens_at(&mut queue, 0), []);
        assert_eq!(tokens_at(&mut queue, 1000), (0..16).collect::<Vec<u64>>());
    }

    #[test]
    fn held_ios_count_against_the_depth() {
        let mut queue = queue("write_us: 1", 1);
        queue.submit(io(Op::Write { fua: false }, 1)).unwrap();
        assert_eq!(tokens_at(&mut queue, 0), []);
        let back = queue.submit(io(Op::Write { fua: false }, 77)).unwrap_err();
        assert_eq!(back.token, 77);
        let _ = back.complete(Status::Aborted);
        assert_eq!(tokens_at(&mut queue, 1000), [1]);
    }

    #[test]
    fn a_reset_lets_all_go_before_it() {
        let mut queue = queue("write_us: 1000000", 4);
        queue.submit(io(Op::Write { fua: false }, 1)).unwrap();
        assert_eq!(tokens_at(&mut queue, 0), []);
        queue.submit(io(Op::Write { fua: false }, 2)).unwrap();
        queue.submit(io(Op::Reset, 3)).unwrap();
        assert_eq!(tokens_at(&mut queue, 5), [1, 2, 3]);
    }

    #[test]
    fn options_are_refused_by_key() {
        let open = |options: &str| {
            let yaml = format!("[{{ name: a, null: }}, {{ name: d, delay: {options} }}]");
            open_one(&yaml).err().unwrap().key
        };
        assert_eq!(open("{ read_us: 1 }"), "delay");
        assert_eq!(open("{ base: a, read_us: -1 }"), "delay.read_us");
        assert_eq!(open("{ base: a, flush_us: 3600000001 }"), "delay.flush_us");
        assert_eq!(open("{ base: nobody }"), "delay.base");
        assert_eq!(open("{ base: d }"), "delay.base");
    }

    #[cfg(feature = "test-utils")]
    #[test]
    fn conformance() {
        crate::conformance::run(
            open_one(
                "[{ name: a, malloc: { size: 4MiB, hugepages: never } },
                  { name: d, delay: { base: a, read_us: 50, write_us: 200, flush_us: 7 } }]",
            )
            .unwrap(),
        );
    }
}
