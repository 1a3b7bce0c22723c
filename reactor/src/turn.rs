//! The loop of one pinned core.
//!
//! ```text
//!   +--> mailbox (<= 32 mails) -> work.poll -> work's timer -> busy pollers -> timed pollers --+
//!   |                                                                                          |
//!   +-- nothing handled: Idle (spin | pause, yield, sleep) <-- read the clock, once a turn <---+
//! ```
//! Owns the work, its inbox, the extra pollers and the counters; nobody else touches them. Never
//! blocks but in adaptive idling, never allocates once it runs, never logs. A turn's time is known
//! when the next one begins, and is then booked as busy or idle and, when longer than `stall_ns`,
//! as a stall. Time is an argument of [`Reactor::turn_once`], so a simulation drives reactors on
//! virtual time; [`Reactor::run`] feeds it the real clock.

use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use crate::Nanos;
use crate::cpu::{Clock, CpuError, pin_current};
use crate::idle::Idler;
use crate::stats::{Counters, ROWS_MAX, ReactorStats, RowCounters};
use crate::timer::TimerHeap;

pub use crate::idle::{AdaptiveConfig, Idle};
pub use crate::mailbox::{Full, Inbox, Mailbox, mailbox};

/// What a reactor runs. Generic: the I/O path costs no dynamic call per turn.
pub trait Work {
    /// What other threads send it.
    type Mail: Send + 'static;

    /// One mail; at most [`MAILS_MAX`] a turn.
    fn on_mail(&mut self, mail: Self::Mail, now: Nanos);

    /// One bounded round of polling: how many events it handled; 0 = idle.
    fn poll(&mut self, now: Nanos) -> usize;

    /// The earliest timer wanted; asked every turn, so it must be cheap.
    fn next_timer(&self) -> Option<Nanos> {
        None
    }

    /// `next_timer()` has passed: handles all timers due at `now`. Once a turn.
    fn on_timer(&mut self, _now: Nanos) {}

    /// The loop ends when this is true. Mails that come later are dropped.
    fn is_finished(&self) -> bool;

    /// Called whenever the counters were published, to publish the work's own beside them.
    fn stats(&mut self, _stats: &ReactorStats) {}
}

/// Something extra that a reactor calls: every turn, or once in a period.
pub trait Poller {
    /// For the statistics.
    fn name(&self) -> &str;

    /// One bounded round: how many events it handled.
    fn poll(&mut self, now: Nanos) -> usize;

    /// `None`: every turn. Asked once, when the poller is added.
    fn period(&self) -> Option<Nanos> {
        None
    }
}

/// Extra pollers, in the order they are called.
pub type Pollers = Vec<Box<dyn Poller>>;

/// Most mails handled in one turn.
pub const MAILS_MAX: usize = 32;

/// Counters are published when this many turns passed ...
const PUBLISH_TURNS: u64 = 1024;
/// ... or this much time.
const PUBLISH_NS: Nanos = 1_000_000;

/// Rows of the statistics that every reactor has.
const ROW_MAIL: usize = 0;
const ROW_WORK: usize = 1;
/// The first extra poller's row.
const ROW_EXTRA: usize = 2;

/// How one reactor runs.
#[derive(Clone, Debug)]
pub struct ReactorConfig {
    /// The core it is pinned to (by `spawn`).
    pub core: usize,
    /// What it does in empty turns.
    pub idle: Idle,
    /// Most mails that wait.
    pub mailbox: usize,
    /// Name of the thread and in statistics; the kernel shows 15 bytes.
    pub name: String,
    /// A longer turn counts as a stall.
    pub stall_ns: Nanos,
}

impl ReactorConfig {
    /// Reactor number `index` on `core`: spins, 1024 mails, a stall is a turn of more than 1 ms.
    pub fn new(index: usize, core: usize) -> ReactorConfig {
        let name = format!("usurp-r{index}");
        ReactorConfig { core, idle: Idle::Spin, mailbox: 1024, name, stall_ns: 1_000_000 }
    }
}

/// One reactor: drive it by `run`, or by hand with `turn_once`.
pub struct Reactor<W: Work> {
    /// What it runs.
    work: W,
    /// Mails from other threads.
    inbox: Inbox<W::Mail>,
    /// Extra pollers; row `ROW_EXTRA + i` is poller `i`'s.
    pollers: Pollers,
    /// Those called every turn, as places in `pollers`.
    every_turn: Vec<usize>,
    /// When each timed poller is due; the token is its place in `pollers`.
    timed: TimerHeap,
    /// Period of each poller; 0 for those called every turn.
    periods: Vec<Nanos>,
    /// What it does in empty turns.
    idler: Idler,
    /// A longer turn is a stall.
    stall_ns: Nanos,
    /// When the turn under way began; `None` before the first.
    began: Option<Nanos>,
    /// Time rested since then, which is no part of the turn.
    rested: Nanos,
    /// Events of the turn under way.
    handled: usize,
    /// The same by row.
    by_row: [usize; ROWS_MAX],
    /// Own counters; published as copies.
    counters: Counters,
    /// Own counters by row.
    rows: [RowCounters; ROWS_MAX],
    /// When to publish even without many turns.
    publish_at: Nanos,
    /// What others read.
    stats: Arc<ReactorStats>,
}

impl<W: Work> Reactor<W> {
    /// A reactor with a mailbox of its own ([`Reactor::mailbox`]), not yet running.
    pub fn new(config: &ReactorConfig, work: W) -> Reactor<W> {
        let (_, inbox) = mailbox(config.mailbox);
        Reactor::with(config, inbox, Arc::default(), work, Vec::new())
    }

    /// The same from parts that others hold already: the inbox of a mailbox made before (so that
    /// reactors can know each other's), the statistics, and extra pollers.
    pub fn with(
        config: &ReactorConfig,
        inbox: Inbox<W::Mail>,
        stats: Arc<ReactorStats>,
        work: W,
        pollers: Pollers,
    ) -> Reactor<W> {
        assert!(ROW_EXTRA + pollers.len() <= ROWS_MAX, "too many pollers: {}", pollers.len());
        stats.name_row(ROW_MAIL, "mailbox");
        stats.name_row(ROW_WORK, "work");
        for (place, poller) in pollers.iter().enumerate() {
            stats.name_row(ROW_EXTRA + place, poller.name());
        }
        let periods: Vec<Nanos> = pollers
            .iter()
            .map(|poller| poller.period().map_or(0, |period| period.max(1)))
            .collect();
        let every_turn = (0..periods.len()).filter(|&place| periods[place] == 0).collect();
        Reactor {
            work,
            inbox,
            every_turn,
            timed: TimerHeap::new(pollers.len()),
            pollers,
            periods,
            idler: Idler::new(config.idle),
            stall_ns: config.stall_ns,
            began: None,
            rested: 0,
            handled: 0,
            by_row: [0; ROWS_MAX],
            counters: Counters::default(),
            rows: [RowCounters::default(); ROWS_MAX],
            publish_at: 0,
            stats,
        }
    }

    /// A sender to it.
    pub fn mailbox(&self) -> Mailbox<W::Mail> {
        self.inbox.mailbox()
    }

    /// Its published counters.
    pub fn stats(&self) -> Arc<ReactorStats> {
        Arc::clone(&self.stats)
    }

    /// What it runs; for those who drive it by hand.
    pub fn work(&self) -> &W {
        &self.work
    }

    /// The same, to be changed.
    pub fn work_mut(&mut self) -> &mut W {
        &mut self.work
    }

    /// True when the work says that the loop is to end.
    pub fn is_finished(&self) -> bool {
        self.work.is_finished()
    }

    /// The earliest timer that anything here waits for: the work's or a timed poller's.
    pub fn next_timer(&self) -> Option<Nanos> {
        match (self.work.next_timer(), self.timed.next()) {
            (Some(one), Some(two)) => Some(one.min(two)),
            (one, two) => one.or(two),
        }
    }

    /// One turn that begins at `now` (and ends the one before): how many events it handled.
    pub fn turn_once(&mut self, now: Nanos) -> usize {
        // A reactor that runs unpinned may change to a core whose tsc lags by some ticks.
        let now = self.began.map_or(now, |began| now.max(began));
        self.begin(now);
        if !self.inbox.is_empty() {
            let mails = self.take_mails(now);
            self.counters.mails += mails as u64;
            self.count(ROW_MAIL, mails);
        }
        let mut events = self.work.poll(now);
        if self.work.next_timer().is_some_and(|at| at <= now) {
            self.work.on_timer(now);
            events += 1;
        }
        self.count(ROW_WORK, events);
        if !self.pollers.is_empty() {
            self.call_pollers(now);
        }
        self.handled
    }

    /// Runs on the calling thread, which it does not pin, until the work is finished; then gives
    /// the work back. Mails not taken by then are dropped.
    pub fn run(mut self) -> W {
        let clock = Clock::new();
        self.idler.prepare_thread();
        let mut now = clock.now();
        while !self.work.is_finished() {
            let handled = self.turn_once(now);
            now = clock.now();
            if handled > 0 {
                self.idler.on_event();
            } else if self.idler.on_empty(now, self.next_timer()).perform() {
                let after = clock.now();
                self.on_rested(after.saturating_sub(now));
                now = after;
            }
        }
        self.finish(now)
    }

    /// Ends the last turn at `now`, publishes, gives the work back.
    pub fn finish(mut self, now: Nanos) -> W {
        self.book(now);
        self.publish(now);
        self.work
    }

    /// Books time that the thread gave away since the turn's end.
    fn on_rested(&mut self, ns: Nanos) {
        self.rested += ns;
        self.counters.rested_ns += ns;
        self.counters.rests += 1;
    }

    fn begin(&mut self, now: Nanos) {
        self.book(now);
        self.began = Some(now);
        self.rested = 0;
        self.handled = 0;
        self.by_row = [0; ROWS_MAX];
        if self.counters.turns.is_multiple_of(PUBLISH_TURNS) || now >= self.publish_at {
            self.publish(now);
        }
        self.counters.turns += 1;
    }

    /// Books the turn that ends at `now`, if there was one.
    fn book(&mut self, now: Nanos) {
        let Some(began) = self.began else { return };
        let ns = now.saturating_sub(began).saturating_sub(self.rested);
        let stalled = ns > self.stall_ns;
        self.counters.longest_ns = self.counters.longest_ns.max(ns);
        self.counters.stalls += u64::from(stalled);
        if self.handled == 0 {
            self.counters.idle_ns += ns;
            return;
        }
        self.counters.busy_turns += 1;
        self.counters.busy_ns += ns;
        self.counters.events += self.handled as u64;
        let rows = ROW_EXTRA + self.pollers.len();
        for (row, &events) in self.rows[..rows].iter_mut().zip(&self.by_row) {
            if events > 0 {
                row.busy_turns += 1;
                row.events += events as u64;
                row.busy_ns += share(ns, events, self.handled);
                row.stalls += u64::from(stalled);
                row.longest_ns = row.longest_ns.max(ns);
            }
        }
    }

    fn publish(&mut self, now: Nanos) {
        self.publish_at = now + PUBLISH_NS;
        self.stats.publish(&self.counters, &self.rows[..ROW_EXTRA + self.pollers.len()]);
        self.work.stats(&self.stats);
    }

    fn count(&mut self, row: usize, events: usize) {
        self.by_row[row] += events;
        self.handled += events;
    }

    fn take_mails(&mut self, now: Nanos) -> usize {
        let mut mails = 0;
        while mails < MAILS_MAX {
            let Some(mail) = self.inbox.try_take() else { break };
            self.work.on_mail(mail, now);
            mails += 1;
        }
        mails
    }

    fn call_pollers(&mut self, now: Nanos) {
        for at in 0..self.every_turn.len() {
            self.call_poller(self.every_turn[at], now);
        }
        if self.timed.is_empty() && self.every_turn.len() < self.pollers.len() {
            self.arm_all(now);
        }
        // Each is armed again beyond `now`, so this ends after one round at most.
        while let Some(place) = self.timed.pop_due(now) {
            self.call_poller(place as usize, now);
            self.arm(place as usize, now);
        }
    }

    fn call_poller(&mut self, place: usize, now: Nanos) {
        let events = self.pollers[place].poll(now);
        self.count(ROW_EXTRA + place, events);
    }

    /// In the first turn: every timed poller is due a period from now.
    fn arm_all(&mut self, now: Nanos) {
        for place in 0..self.pollers.len() {
            if self.periods[place] > 0 {
                self.arm(place, now);
            }
        }
    }

    /// A period from now, not from when it was due: periods missed in a stall are not made up for.
    fn arm(&mut self, place: usize, now: Nanos) {
        let armed = self.timed.arm(now.saturating_add(self.periods[place]), place as u64);
        assert!(armed.is_some(), "the heap has room for every poller");
    }
}

/// `ns` times `events / all`; no division in the common case that one poller did it all.
fn share(ns: Nanos, events: usize, all: usize) -> Nanos {
    assert!(events <= all);
    if events == all { ns } else { (ns as u128 * events as u128 / all as u128) as Nanos }
}

/// Why a reactor did not start.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// Its thread could not be pinned.
    #[error("reactor {name}: {source}")]
    Pin {
        /// The reactor's name.
        name: String,
        /// Why.
        source: CpuError,
    },
    /// There was no thread to be had.
    #[error("reactor {name}: no thread: {source}")]
    Thread {
        /// The reactor's name.
        name: String,
        /// Why.
        source: io::Error,
    },
}

/// A running reactor, seen from outside. Dropping it lets the reactor run on, unwatched.
pub struct Handle<W: Work, R = W> {
    /// The reactor's name.
    name: String,
    /// The core it is pinned to.
    core: usize,
    /// A sender to it.
    mailbox: Mailbox<W::Mail>,
    /// Its published counters.
    stats: Arc<ReactorStats>,
    /// Its thread; gives `None` only when the pin was refused, and then there is no handle.
    thread: JoinHandle<Option<R>>,
}

impl<W: Work, R> Handle<W, R> {
    /// A sender to it.
    pub fn mailbox(&self) -> Mailbox<W::Mail> {
        self.mailbox.clone()
    }

    /// Its published counters.
    pub fn stats(&self) -> Arc<ReactorStats> {
        Arc::clone(&self.stats)
    }

    /// The reactor's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The core it is pinned to.
    pub fn core(&self) -> usize {
        self.core
    }

    /// True once the thread ended, by itself or by a panic.
    pub fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }

    /// Waits until the work is finished. A panic of the reactor goes on here.
    pub fn join(self) -> R {
        self.try_join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    /// Waits likewise; a panic of the reactor is an `Err` with its payload.
    pub fn try_join(self) -> thread::Result<R> {
        let ended = self.thread.join();
        ended.map(|result| result.expect("a pinned reactor gives its result"))
    }
}

/// Starts a reactor: a thread named `config.name`, pinned to `config.core`, on which `make` makes
/// the work. Returns once the thread is pinned; a refused pin is an error and `make` never runs.
pub fn spawn<W, F>(config: ReactorConfig, make: F) -> Result<Handle<W>, SpawnError>
where
    W: Work + Send + 'static,
    F: FnOnce() -> W + Send + 'static,
{
    let inbox = mailbox(config.mailbox).1;
    spawn_with(config, inbox, || (make(), Vec::new()), |work| work)
}

/// The same for work that can't leave its thread (`finish` makes of it what `join` gives), with an
/// inbox made before and extra pollers.
pub fn spawn_with<W, R, F, E>(
    config: ReactorConfig,
    inbox: Inbox<W::Mail>,
    make: F,
    finish: E,
) -> Result<Handle<W, R>, SpawnError>
where
    W: Work + 'static,
    R: Send + 'static,
    F: FnOnce() -> (W, Pollers) + Send + 'static,
    E: FnOnce(W) -> R + Send + 'static,
{
    let (name, core, mailbox) = (config.name.clone(), config.core, inbox.mailbox());
    let stats = Arc::new(ReactorStats::default());
    let shown = Arc::clone(&stats);
    let (report, reported) = crossbeam_channel::bounded(1);
    let body = move || {
        let pinned = pin_current(config.core);
        let failed = pinned.is_err();
        // The caller waits for exactly this one message, so the send can't fail.
        report.send(pinned).expect("the caller waits");
        if failed {
            return None;
        }
        let (work, pollers) = make();
        let reactor = Reactor::with(&config, inbox, shown, work, pollers);
        Some(finish(reactor.run()))
    };
    let thread = thread::Builder::new().name(name.clone()).spawn(body);
    let thread = thread.map_err(|source| SpawnError::Thread { name: name.clone(), source })?;
    match reported.recv().expect("the thread reports before it can end") {
        Ok(()) => Ok(Handle { name, core, mailbox, stats, thread }),
        Err(source) => {
            let _ = thread.join();
            Err(SpawnError::Pin { name, source })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::start_cores;
    use std::time::{Duration, Instant};

    /// Handles what it is told to; finished by mail 0.
    #[derive(Default)]
    struct Toy {
        mails: Vec<(u32, Nanos)>,
        events: usize,
        timer: Option<Nanos>,
        fired: Vec<Nanos>,
        published: usize,
        finished: bool,
        panics: bool,
    }

    impl Work for Toy {
        type Mail = u32;
        fn on_mail(&mut self, mail: u32, now: Nanos) {
            assert!(!self.panics, "told to panic");
            self.mails.push((mail, now));
            self.finished |= mail == 0;
        }
        fn poll(&mut self, _now: Nanos) -> usize {
            std::mem::take(&mut self.events)
        }
        fn next_timer(&self) -> Option<Nanos> {
            self.timer
        }
        fn on_timer(&mut self, now: Nanos) {
            self.timer = None;
            self.fired.push(now);
        }
        fn is_finished(&self) -> bool {
            self.finished
        }
        fn stats(&mut self, _stats: &ReactorStats) {
            self.published += 1;
        }
    }

    /// Counts its calls; each handles `events`.
    struct Extra {
        name: &'static str,
        period: Option<Nanos>,
        events: usize,
    }

    impl Poller for Extra {
        fn name(&self) -> &str {
            self.name
        }
        fn poll(&mut self, _now: Nanos) -> usize {
            self.events
        }
        fn period(&self) -> Option<Nanos> {
            self.period
        }
    }

    fn config() -> ReactorConfig {
        ReactorConfig { stall_ns: 1000, ..ReactorConfig::new(0, start_cores().unwrap()[0]) }
    }

    fn toy() -> Reactor<Toy> {
        Reactor::new(&config(), Toy::default())
    }

    fn with_pollers(pollers: Pollers) -> Reactor<Toy> {
        let inbox = mailbox(4).1;
        Reactor::with(&config(), inbox, Arc::default(), Toy::default(), pollers)
    }

    fn row(stats: &ReactorStats, name: &str) -> RowCounters {
        stats.rows().find(|row| row.0 == name).unwrap().1
    }

    #[test]
    fn turns_are_booked_on_virtual_time_when_the_next_one_begins() {
        let mut reactor = toy();
        let stats = reactor.stats();
        assert_eq!(reactor.turn_once(100), 0);
        reactor.work_mut().events = 3;
        assert_eq!(reactor.turn_once(150), 3);
        assert_eq!(reactor.turn_once(450), 0);
        reactor.finish(460);
        let all = stats.read();
        assert_eq!((all.turns, all.busy_turns, all.events), (3, 1, 3));
        assert_eq!((all.busy_ns, all.idle_ns, all.longest_ns, all.stalls), (300, 60, 300, 0));
        assert_eq!(row(&stats, "work").busy_ns, 300);
        assert_eq!(row(&stats, "mailbox"), RowCounters::default());
    }

    #[test]
    fn at_most_32_mails_a_turn_and_none_is_lost() {
        let mut reactor = toy();
        let mailbox = reactor.mailbox();
        (1..=40).for_each(|mail| mailbox.try_send(mail).unwrap());
        assert_eq!((reactor.turn_once(1), mailbox.len()), (32, 8));
        assert_eq!((reactor.turn_once(2), reactor.turn_once(3)), (8, 0));
        let stats = reactor.stats();
        let work = reactor.finish(4);
        assert_eq!(work.mails[31..33], [(32, 1), (33, 2)]);
        assert_eq!(stats.read().mails, 40);
        assert_eq!(row(&stats, "mailbox").events, 40);
        assert!(mailbox.is_gone() && mailbox.try_send(1).is_err());
    }

    #[test]
    fn a_full_mailbox_refuses_until_a_turn_took_mails() {
        let config = ReactorConfig { mailbox: 1, ..config() };
        let mut reactor = Reactor::new(&config, Toy::default());
        let mailbox = reactor.mailbox();
        mailbox.try_send(1).unwrap();
        assert_eq!(mailbox.try_send(2).unwrap_err().0, 2);
        reactor.turn_once(0);
        mailbox.try_send(2).unwrap();
    }

    #[test]
    fn the_works_timer_fires_once_it_is_due() {
        let mut reactor = toy();
        reactor.work_mut().timer = Some(200);
        assert_eq!(reactor.next_timer(), Some(200));
        assert_eq!(
            (reactor.turn_once(199), reactor.turn_once(205), reactor.turn_once(206)),
            (0, 1, 0)
        );
        assert_eq!(reactor.work().fired, [205]);
    }

    #[test]
    fn a_stall_is_counted_for_the_reactor_and_for_who_was_busy() {
        let mut reactor = toy();
        reactor.work_mut().events = 1;
        reactor.turn_once(0);
        reactor.turn_once(1000);
        reactor.turn_once(2001);
        let stats = reactor.stats();
        reactor.finish(2002);
        let (all, work) = (stats.read(), row(&stats, "work"));
        assert_eq!((all.stalls, all.longest_ns), (1, 1001), "1000 is no stall, 1001 is");
        assert_eq!((work.stalls, work.longest_ns), (0, 1000), "the stalled turn was empty");
    }

    #[test]
    fn resting_is_neither_idle_time_nor_a_stall() {
        let mut reactor = toy();
        reactor.turn_once(0);
        reactor.on_rested(50_000);
        reactor.turn_once(50_010);
        let stats = reactor.stats();
        reactor.finish(50_010);
        let all = stats.read();
        assert_eq!((all.idle_ns, all.rested_ns, all.rests, all.stalls), (10, 50_000, 1, 0));
    }

    #[test]
    fn busy_time_is_shared_by_events() {
        let busy = |name, events| Box::new(Extra { name, period: None, events }) as Box<dyn Poller>;
        let mut reactor = with_pollers(vec![busy("one", 1), busy("none", 0), busy("three", 3)]);
        assert_eq!(reactor.turn_once(0), 4);
        let stats = reactor.stats();
        reactor.finish(400);
        let times = ["work", "one", "none", "three"].map(|name| row(&stats, name).busy_ns);
        assert_eq!(times, [0, 100, 0, 300]);
        assert_eq!(stats.read().busy_ns, 400);
    }

    #[test]
    fn timed_pollers_are_called_once_a_period_and_do_not_catch_up() {
        let timed = Extra { name: "timed", period: Some(100), events: 1 };
        let mut reactor = with_pollers(vec![Box::new(timed)]);
        let turns = [0, 99, 100, 150, 200, 1000, 1001, 1099, 1100];
        let called = turns.map(|now| reactor.turn_once(now));
        assert_eq!(called, [0, 0, 1, 0, 1, 1, 0, 0, 1]);
        assert_eq!(reactor.next_timer(), Some(1200));
        reactor.work_mut().timer = Some(1150);
        assert_eq!(reactor.next_timer(), Some(1150));
    }

    #[test]
    fn counters_are_published_every_1024_turns_and_each_millisecond() {
        let mut reactor = toy();
        let stats = reactor.stats();
        assert_eq!((0..1025).map(|now| reactor.turn_once(now)).sum::<usize>(), 0);
        assert_eq!((stats.read().turns, reactor.work().published), (1024, 2));
        reactor.turn_once(1030);
        assert_eq!(stats.read().turns, 1024);
        reactor.turn_once(1024 + PUBLISH_NS);
        assert_eq!((stats.read().turns, reactor.work().published), (1026, 3));
    }

    #[test]
    fn time_that_seems_to_go_back_is_held() {
        let mut reactor = toy();
        reactor.turn_once(100);
        reactor.turn_once(90);
        let stats = reactor.stats();
        reactor.finish(110);
        assert_eq!(stats.read().idle_ns, 10);
    }

    #[test]
    #[should_panic(expected = "too many pollers")]
    fn too_many_pollers_panic() {
        let one = || Box::new(Extra { name: "x", period: None, events: 0 }) as Box<dyn Poller>;
        with_pollers((0..15).map(|_| one()).collect());
    }

    #[test]
    fn a_spawned_reactor_is_named_pinned_and_gives_its_work_back() {
        let core = *start_cores().unwrap().last().unwrap();
        let make = move || {
            assert_eq!(thread::current().name(), Some("usurp-r7"));
            let set = rustix::thread::sched_getaffinity(None).unwrap();
            assert!(set.count() == 1 && set.is_set(core));
            Toy::default()
        };
        let handle = spawn(ReactorConfig::new(7, core), make).unwrap();
        assert_eq!((handle.core(), handle.name()), (core, "usurp-r7"));
        let (mailbox, stats) = (handle.mailbox(), handle.stats());
        mailbox.send_blocking(5).unwrap();
        mailbox.send_blocking(0).unwrap();
        let work = handle.join();
        assert_eq!((work.mails[0].0, work.mails[1].0), (5, 0));
        assert!(mailbox.is_gone() && stats.read().turns > 0);
    }

    #[test]
    fn a_refused_pin_is_an_error_and_nothing_runs() {
        let config = ReactorConfig::new(0, 1023);
        let refused = spawn(config, || -> Toy { panic!("must not run") });
        let Err(error) = refused else { panic!("core 1023 was pinned") };
        assert!(matches!(error, SpawnError::Pin { source: CpuError::Missing { .. }, .. }));
        let text = error.to_string();
        assert!(text.contains("reactor usurp-r0: core 1023 can't be used"), "{text}");
    }

    #[test]
    fn a_panic_of_the_reactor_reaches_join() {
        let make = || Toy { panics: true, ..Toy::default() };
        let handle = spawn(config(), make).unwrap();
        handle.mailbox().send_blocking(1).unwrap();
        let panic = handle.try_join().err().expect("it panicked");
        assert_eq!(panic.downcast_ref(), Some(&"told to panic"));
        let handle = spawn(config(), make).unwrap();
        let mailbox = handle.mailbox();
        mailbox.send_blocking(1).unwrap();
        let joined = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| handle.join()));
        assert!(joined.is_err() && mailbox.is_gone());
    }

    #[test]
    fn work_that_can_not_leave_its_thread_is_finished_there() {
        struct Local(std::rc::Rc<u32>, bool);
        impl Work for Local {
            type Mail = ();
            fn on_mail(&mut self, _mail: (), _now: Nanos) {
                self.1 = true;
            }
            fn poll(&mut self, _now: Nanos) -> usize {
                0
            }
            fn is_finished(&self) -> bool {
                self.1
            }
        }
        let (mailbox, inbox) = mailbox(1);
        mailbox.try_send(()).unwrap();
        let make = || (Local(std::rc::Rc::new(42), false), Vec::new());
        let handle = spawn_with(config(), inbox, make, |work| *work.0).unwrap();
        assert_eq!(handle.join(), 42);
    }

    #[test]
    fn an_adaptive_reactor_sleeps_and_wakes_for_mail_and_timer() {
        let idle = AdaptiveConfig { spin_us: 10, yield_us: 20, max_sleep_us: 50 };
        let config = ReactorConfig { idle: Idle::Adaptive(idle), ..config() };
        let start = Clock::new().now();
        let due = start + 20_000_000;
        let make = move || Toy { timer: Some(due), ..Toy::default() };
        let handle = spawn(config, make).unwrap();
        let (stats, began) = (handle.stats(), Instant::now());
        while stats.read().rests < 100 && began.elapsed() < Duration::from_secs(10) {
            thread::sleep(Duration::from_millis(1));
        }
        thread::sleep(Duration::from_millis(25));
        handle.mailbox().send_blocking(0).unwrap();
        let work = handle.join();
        let all = stats.read();
        assert!(all.rests >= 100 && all.rested_ns > all.idle_ns, "{all:?}");
        assert!(work.fired.len() == 1 && work.fired[0] >= due, "{:?}", work.fired);
        assert_eq!(work.mails.len(), 1);
    }
}
