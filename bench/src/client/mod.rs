//! The SRP initiator: commands in, answers out, over any [`Fabric`].
//!
//! Owns the fabric, the channels of one nexus, and for each channel a fixed number of command
//! *slots*. A slot is a send IU, a data buffer that the target may read and write, and the state of
//! one command; its holder uses it again and again, so nothing is allocated after
//! [`Client::add_channel`].
//!
//! ```text
//!   reserve -> SlotId --data_write--> start --.         .--> Outcome --data_read--> start|release
//!                                             v         |
//!     gathered: [sends of channel 0][sends of channel 1]|
//!                     flush: receives first, then sends, one doorbell each
//!                                    ... target ...     |
//!                     poll: <= 32 completions ----------'
//! ```
//! Never: reads a clock (time is an argument; [`Client::now`] serves set-up code), blocks, or
//! trusts what the target sends beyond its checked length. A broken connection is an error value
//! from `poll`, `start` or `flush`; after one the client is only good for dropping.
//!
//! Invariants: a slot is started only while idle; an Outcome comes once per started command;
//! receives are posted before the sends whose answers need them.

mod chan;
#[cfg(test)]
mod tests;
mod types;

use std::collections::VecDeque;

use usurp_fabric::{CompletionBatch, Fabric, Lkey, WcStatus};
use usurp_reactor::Nanos;
use usurp_reactor::cpu::Clock;
use usurp_srp::initiator::Granted;
use usurp_srp::wire::rsp::RspCode;
use usurp_srp::wire::tsk_mgmt::TmFunc;

use crate::cdb;
use crate::error::Error;
use crate::sense::{SenseCode, SenseText};
pub use types::{Data, DataArea, OUTCOMES, Outcome, Outcomes, Request, Shape, SlotId, Started};

use chan::{Answer, Chan, Kind, Wr};
use types::TABLE_BYTES;

/// An initiator on one thread. See the module's header.
pub struct Client<F: Fabric> {
    /// The data plane.
    fabric: F,
    /// The channels of the nexus, in order of login.
    channels: Vec<Chan>,
    /// Sizes.
    shape: Shape,
    /// Data buffers of all slots, then descriptor tables of all slots.
    data: DataArea,
    /// The fabric's own key to `data` is kept alive by this.
    _data_lkey: Lkey,
    /// Channels that `data` has room for.
    channels_max: usize,
    /// Completions of a turn.
    batch: CompletionBatch,
    /// Answers that came while something else was waited for.
    aside: VecDeque<Outcome>,
    /// Bounce for `poll_aside`.
    spare: Outcomes,
    /// Commands started and not answered.
    in_flight: u32,
    /// Tells the time to code that may wait.
    time: Box<dyn FnMut() -> Nanos>,
}

impl<F: Fabric> Client<F> {
    /// A client without channels. `data` has room for `channels_max` of them.
    pub fn new(
        mut fabric: F,
        shape: Shape,
        data: DataArea,
        channels_max: usize,
    ) -> Result<Client<F>, Error> {
        assert!((1..=4096).contains(&shape.slots) && channels_max < 1 << 15, "sizes of a client");
        assert!(data.arena.len() >= DataArea::bytes(&shape, channels_max), "room for all slots");
        let lkey = fabric.register(&data.arena);
        let what = "register the data buffers";
        let lkey = lkey.map_err(|why| Error::Fabric { what, why: why.to_string() })?;
        let clock = Clock::new();
        Ok(Client {
            fabric,
            channels: Vec::with_capacity(channels_max),
            shape,
            data,
            _data_lkey: lkey,
            channels_max,
            batch: CompletionBatch::new(),
            aside: VecDeque::with_capacity(shape.slots as usize * channels_max),
            spare: Outcomes::default(),
            in_flight: 0,
            time: Box::new(move || clock.now()),
        })
    }

    /// Adds a channel whose login the target accepted.
    pub fn add_channel(&mut self, ep: F::Endpoint, granted: &Granted) -> Result<(), Error> {
        let at = self.channels.len();
        assert!(
            at < self.channels_max,
            "the data area has room for {} channels",
            self.channels_max
        );
        let chan = Chan::open(&mut self.fabric, ep, granted, &self.shape, at)?;
        self.channels.push(chan);
        Ok(())
    }

    /// Replaces the clock of the waiting calls: a test that runs the target in the same thread lets
    /// it work a little in here, and returns the (virtual) time.
    pub fn set_time(&mut self, time: Box<dyn FnMut() -> Nanos>) {
        self.time = time;
    }

    /// The time, for code outside of the hot loop.
    pub fn now(&mut self) -> Nanos {
        (self.time)()
    }

    /// Number of channels.
    pub fn channels(&self) -> usize {
        self.channels.len()
    }

    /// Commands that every channel can have outstanding.
    pub fn slots_per_channel(&self) -> u32 {
        self.channels.iter().map(Chan::slots).min().unwrap_or(0)
    }

    /// Bytes of a slot's buffer.
    pub fn buffer_bytes(&self) -> usize {
        self.shape.buffer_bytes as usize
    }

    /// Time allowed for an answer.
    pub fn timeout_ns(&self) -> Nanos {
        self.shape.timeout_ns
    }

    /// Commands started and not answered.
    pub fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// The fabric, for tests that break connections.
    pub fn fabric_mut(&mut self) -> &mut F {
        &mut self.fabric
    }

    /// Takes a slot of a channel; None when all are taken.
    pub fn reserve(&mut self, channel: usize) -> Option<SlotId> {
        let index = self.channels[channel].reserve()?;
        Some(SlotId::new(channel, index))
    }

    /// Gives a slot back; it must be idle.
    pub fn release(&mut self, slot: SlotId) {
        self.channels[slot.channel()].release(slot.index());
    }

    /// Copies into the slot's buffer.
    #[inline]
    pub fn data_write(&mut self, slot: SlotId, offset: usize, data: &[u8]) {
        let at = self.buffer_at(slot, offset, data.len());
        self.data.arena.copy_in(at, data);
    }

    /// Copies out of the slot's buffer.
    #[inline]
    pub fn data_read(&self, slot: SlotId, offset: usize, data: &mut [u8]) {
        let at = self.buffer_at(slot, offset, data.len());
        self.data.arena.copy_out(at, data);
    }

    /// Fills the first `len` bytes of the slot's buffer.
    pub fn data_fill(&mut self, slot: SlotId, len: usize, byte: u8) {
        let at = self.buffer_at(slot, 0, len);
        self.data.arena.fill(at, len, byte);
    }

    #[inline]
    fn buffer_at(&self, slot: SlotId, offset: usize, len: usize) -> usize {
        assert!(offset + len <= self.shape.buffer_bytes as usize, "inside of the slot's buffer");
        self.serial(slot) * DataArea::stride(&self.shape) + offset
    }

    /// Position of a slot among those of all channels.
    #[inline]
    fn serial(&self, slot: SlotId) -> usize {
        slot.channel() * self.shape.slots as usize + slot.index() as usize
    }

    /// Where the slot's descriptor table lies in the data arena.
    fn table_at(&self, slot: SlotId) -> usize {
        let tables = DataArea::stride(&self.shape) * self.shape.slots as usize * self.channels_max;
        tables + self.serial(slot) * TABLE_BYTES
    }

    /// Gathers one command; it goes out with the next [`Client::flush`].
    #[inline]
    pub fn start(&mut self, slot: SlotId, request: &Request, now: Nanos) -> Result<Started, Error> {
        assert!(request.data.len() <= self.shape.buffer_bytes, "data fits the slot's buffer");
        let buffer = self.buffer_at(slot, 0, 0);
        let table = self.table_at(slot);
        let chan = &mut self.channels[slot.channel()];
        let started = chan.start(slot.index(), request, now, &self.data, (buffer, table))?;
        self.in_flight += u32::from(started == Started::Yes);
        Ok(started)
    }

    /// Posts what was gathered: at most one list of receives and one of sends per channel.
    #[inline]
    pub fn flush(&mut self) -> Result<(), Error> {
        for chan in &mut self.channels {
            chan.flush(&mut self.fabric)?;
        }
        Ok(())
    }

    /// Brings at most 32 answers. Also answers the target's own requests.
    #[inline]
    pub fn poll(&mut self, now: Nanos, out: &mut Outcomes) -> Result<usize, Error> {
        out.clear();
        if !self.aside.is_empty() {
            while !out.is_full()
                && let Some(outcome) = self.aside.pop_front()
            {
                out.push(outcome);
            }
            return Ok(out.len());
        }
        self.poll_fabric(now, out)
    }

    #[inline]
    fn poll_fabric(&mut self, now: Nanos, out: &mut Outcomes) -> Result<usize, Error> {
        self.batch.clear();
        if self.fabric.poll(now, &mut self.batch) == 0 {
            return Ok(0);
        }
        let mut urgent = false;
        for completion in self.batch.as_slice() {
            let wr = Wr::unpack(completion.wr_id);
            if completion.status != WcStatus::Success {
                return Err(broken(wr.channel, completion.status));
            }
            let chan = &mut self.channels[wr.channel];
            match wr.kind {
                Kind::Recv => {
                    let len = completion.byte_len as usize;
                    match chan.on_recv(wr.slot, len, &mut urgent)? {
                        Answer::Outcome(outcome) => {
                            self.in_flight -= 1;
                            out.push(outcome);
                        }
                        Answer::Aborted => self.in_flight -= 1,
                        Answer::Nothing => {}
                    }
                }
                Kind::Send | Kind::Answer => chan.on_sent(wr),
            }
        }
        if urgent {
            self.flush()?;
        }
        Ok(out.len())
    }

    /// Polls, keeps the answers for later, posts what that gathered, and tells the time.
    pub(crate) fn poll_aside(&mut self) -> Result<Nanos, Error> {
        let now = self.now();
        let mut spare = std::mem::take(&mut self.spare);
        spare.clear();
        let result = self.poll_fabric(now, &mut spare);
        self.aside.extend(spare.iter().copied());
        self.spare = spare;
        if result? > 0 {
            self.flush()?;
        }
        Ok(now)
    }

    /// The answer of a slot among those kept for later.
    pub(crate) fn take_aside(&mut self, slot: SlotId) -> Option<Outcome> {
        let at = self.aside.iter().position(|o| o.slot == slot)?;
        self.aside.remove(at)
    }

    /// The sense data of an answer; valid until its slot is started again.
    pub fn sense(&self, outcome: &Outcome) -> &[u8] {
        let chan = &self.channels[outcome.slot.channel()];
        chan.sense(outcome.slot.index(), outcome.sense_len)
    }

    /// True when sending the same command again is right: BUSY, TASK SET FULL, unit attention.
    pub fn is_transient(&self, outcome: &Outcome) -> bool {
        match outcome.status {
            0x08 | 0x28 => true,
            0x02 => SenseCode::parse(self.sense(outcome)).is_some_and(SenseCode::is_unit_attention),
            _ => false,
        }
    }

    /// Why an answer is not good, with the command it belongs to.
    #[cold]
    pub fn error_of(&self, outcome: &Outcome) -> Error {
        let (lun, cdb) = self.channels[outcome.slot.channel()].command(outcome.slot.index());
        if outcome.status != 0 {
            let sense = SenseText::new(self.sense(outcome));
            return Error::Scsi { what: cdb::name(&cdb), lun, status: outcome.status, sense };
        }
        let residuals = [outcome.data_in, outcome.data_out];
        let bad = residuals.into_iter().find_map(|r| crate::sync::no_residual(lun, &cdb, r).err());
        bad.unwrap_or_else(|| Error::Protocol("a good answer was taken for a bad one".into()))
    }

    /// An error if a command has waited longer for its answer than it may.
    #[cold]
    pub fn check_overdue(&mut self, now: Nanos) -> Result<(), Error> {
        let limit = self.shape.timeout_ns;
        let overdue = self.channels.iter().find_map(|chan| chan.overdue(now, limit));
        match overdue {
            None => Ok(()),
            Some((lun, cdb)) => {
                let what = cdb::name(&cdb);
                Err(Error::Timeout { what, lun, seconds: limit / 1_000_000_000 })
            }
        }
    }

    /// An error if a command has waited too long for a credit.
    pub fn check_credit_wait(&self, waited: Nanos) -> Result<(), Error> {
        if waited <= self.shape.timeout_ns {
            return Ok(());
        }
        let seconds = self.shape.timeout_ns / 1_000_000_000;
        Err(Error::Protocol(format!("no credit to send a command for {seconds} s")))
    }

    /// Sends a task management function; [`Client::take_tm`] has the answer.
    pub fn start_tm(
        &mut self,
        channel: usize,
        func: TmFunc,
        lun: u16,
        task: Option<SlotId>,
    ) -> Result<(), Error> {
        let task = task.map(SlotId::index);
        self.channels[channel].start_tm(func, lun, task)?;
        self.flush()
    }

    /// The answer to the channel's task management function, once.
    pub fn take_tm(&mut self, channel: usize) -> Option<RspCode> {
        self.channels[channel].take_tm()
    }

    /// Ends a command that will not be answered, because its LU was reset: its slot is idle again.
    /// False if there is no such command: its answer came all the same, or its abort did.
    pub fn forget(&mut self, slot: SlotId) -> bool {
        if self.take_aside(slot).is_some() {
            return false;
        }
        let was_live = self.channels[slot.channel()].forget(slot.index());
        self.in_flight -= u32::from(was_live);
        was_live
    }

    /// True when the slot's command was answered or aborted, or there is none.
    pub fn is_idle(&self, slot: SlotId) -> bool {
        self.channels[slot.channel()].is_idle(slot.index())
    }

    /// Credits that a channel holds now.
    pub fn req_lim(&self, channel: usize) -> u32 {
        self.channels[channel].req_lim()
    }

    /// Disconnects in good order: no command may be outstanding. The queue pairs are flushed, so
    /// that no memory is still lent when it is freed.
    pub fn close(mut self) {
        for chan in &self.channels {
            self.fabric.set_error(chan.qp());
        }
        // Bounded: every posted request completes once, 32 of them a poll.
        for _ in 0..100_000 {
            if self.channels.iter().all(Chan::is_quiet) {
                break;
            }
            self.batch.clear();
            self.fabric.poll(0, &mut self.batch);
            for completion in self.batch.as_slice() {
                let wr = Wr::unpack(completion.wr_id);
                self.channels[wr.channel].on_flushed(wr);
            }
        }
        for chan in &mut self.channels {
            drop(self.fabric.release(chan.qp()));
            chan.take_all_back();
        }
    }
}

/// What a failed completion means to a person.
#[cold]
fn broken(channel: usize, status: WcStatus) -> Error {
    let why = match status {
        WcStatus::Flushed => "it closed the connection or died",
        WcStatus::RetryExceeded => "it does not answer any more",
        WcStatus::RemoteAccess | WcStatus::RemoteInvalid => "it refused a transfer",
        WcStatus::LocalLength => "it sent more than a receive buffer holds",
        _ => "the connection failed",
    };
    Error::PeerGone(format!("{why} (channel {channel}: {status:?})"))
}
