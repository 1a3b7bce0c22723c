//! One channel of the initiator: its queue pair, its IU memory, the state of its command slots, and
//! the work requests gathered since the last flush.
//!
//! ```text
//!   send IUs:   0 .. slots-1 one per command slot | slots: task management | then ANSWERS
//!               lent from start to answer                          lent until sent
//!   receives:   lent (posted) -> completion: read, lent again -> posted RECV_BATCH at a time
//! ```
//! A command's IU is free again when its answer is here: the target answers only what it has.
//! Sends are signalled one in `signal_every`, so that the send queue's places come back without a
//! completion per command.
//! Invariants: `sq_used` <= `sq_max`; every receive is either posted or gathered in `recvs`.

use std::sync::Arc;

use usurp_fabric::{Fabric, Lkey, PostCause, PostError, QpNum, RecvWr, SendOp, SendWr, Sge};
use usurp_reactor::Nanos;
use usurp_reactor::mem::{Arena, HugePolicy, IndexPool, Slots};
use usurp_srp::Tag;
use usurp_srp::initiator::{
    Channel, Config, Done, Event, Granted, InBuf, OutBuf, StartError, Table,
};
use usurp_srp::wire::desc::{DESC_LEN, MemDesc};
use usurp_srp::wire::rsp::RspCode;
use usurp_srp::wire::tsk_mgmt::TmFunc;

use super::types::{Data, DataArea, Outcome, Request, Shape, SlotId, Started};
use super::types::{PIECES, SENSE_BYTES};
use crate::args::DescFormat;
use crate::cdb::{self, Cdb};
use crate::connect::{IMM_BYTES_MAX, RECV_BATCH, it_iu_len, recv_count};
use crate::error::Error;

/// Send IUs for answers to the target: it may have one request unanswered, and the send completion
/// of the answer before may still be on its way.
const ANSWERS: u32 = 4;
/// Sends per signalled send, if the send queue allows.
const SIGNAL_EVERY: u32 = 32;
/// Largest IU that a target may announce to send.
const TI_IU_LEN_MAX: u32 = 64 << 10;
/// The slot of a send that has none.
const NO_SLOT: u32 = 0xffff;

/// What a work request is; travels in its id.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A receive; `slot` = receive slot.
    Recv,
    /// A command or task management IU.
    Send,
    /// An answer to the target; `slot` = send IU.
    Answer,
}

/// A work request id, taken apart: kind, channel, slot, and how many sends it retires.
#[derive(Copy, Clone, Debug)]
pub(super) struct Wr {
    pub kind: Kind,
    pub channel: usize,
    pub slot: u32,
    pub count: u32,
}

impl Wr {
    #[inline]
    fn pack(self) -> u64 {
        let kind = match self.kind {
            Kind::Recv => 0,
            Kind::Send => 1,
            Kind::Answer => 2,
        };
        kind << 48
            | (self.channel as u64) << 32
            | u64::from(self.slot) << 16
            | u64::from(self.count)
    }

    #[inline]
    pub(super) fn unpack(id: u64) -> Wr {
        let kind = match id >> 48 {
            0 => Kind::Recv,
            1 => Kind::Send,
            _ => Kind::Answer,
        };
        let part = |shift: u32| (id >> shift) as u32 & 0xffff;
        Wr { kind, channel: part(32) as usize, slot: part(16), count: part(0) }
    }
}

/// The command of a slot.
#[derive(Copy, Clone)]
struct Command {
    /// Started and not answered.
    live: bool,
    /// The LU.
    lun: u16,
    /// Its CDB, for messages.
    cdb: Cdb,
    /// Its tag, to abort it by.
    tag: Tag,
    /// The caller's word.
    user: u64,
    /// When it was started.
    posted: Nanos,
}

impl Command {
    const IDLE: Command =
        Command { live: false, lun: 0, cdb: [0; 16], tag: Tag([0; 8]), user: 0, posted: 0 };
}

/// See the module's header.
pub(super) struct Chan {
    /// Position in the client.
    at: usize,
    /// The queue pair.
    qp: QpNum,
    /// Protocol state: tags, credit.
    srp: Channel,
    /// Receive IUs.
    recv: Slots,
    /// Send IUs.
    send: Slots,
    /// The fabric's key to both.
    lkey: Lkey,
    /// Commands by slot.
    commands: Box<[Command]>,
    /// Sense data by slot.
    sense: Box<[[u8; SENSE_BYTES]]>,
    /// Slots nobody holds.
    free: IndexPool,
    /// Receives to post; capacity fixed.
    recvs: Vec<RecvWr>,
    /// Sends to post; capacity fixed.
    sends: Vec<SendWr>,
    /// Places of the send queue in use.
    sq_used: u32,
    /// Places of the send queue.
    sq_max: u32,
    /// Sends since the last signalled one.
    unsignaled: u32,
    /// See `SIGNAL_EVERY`.
    signal_every: u32,
    /// How data is described.
    desc: DescFormat,
    /// Immediate data was granted.
    imm: bool,
    /// Bounce for immediate data.
    imm_data: Box<[u8]>,
    /// A task management function is outstanding, with its IU.
    tm_live: bool,
    /// Its answer.
    tm_code: Option<RspCode>,
}

fn fabric_error(what: &'static str) -> impl Fn(&dyn std::fmt::Display) -> Error {
    move |why| Error::Fabric { what, why: why.to_string() }
}

impl Chan {
    /// Takes the memory of a channel, adopts its connection, posts all receives.
    pub(super) fn open<F: Fabric>(
        fabric: &mut F,
        ep: F::Endpoint,
        granted: &Granted,
        shape: &Shape,
        at: usize,
    ) -> Result<Chan, Error> {
        let ti_iu_len = granted.max_ti_iu_len();
        if ti_iu_len > TI_IU_LEN_MAX {
            let why = format!("it announces IUs of {ti_iu_len} bytes");
            return Err(Error::Protocol(why));
        }
        // One credit stays in reserve for task management.
        let slots = shape.slots.min(granted.credits() - 1);
        let recvs = recv_count(slots);
        let sends = slots + 1 + ANSWERS;
        let iu_len = it_iu_len(shape.desc) as usize;
        let recv_bytes = Slots::bytes_needed(ti_iu_len as usize, recvs);
        let bytes = recv_bytes + Slots::bytes_needed(iu_len, sends);
        let arena = Arena::new("initiator IUs", bytes, HugePolicy::Prefer)
            .map_err(|why| fabric_error("allocate IU memory")(&why))?;
        let lkey =
            fabric.register(&arena).map_err(|why| fabric_error("register IU memory")(&why))?;
        let qp = fabric.adopt(ep).map_err(|(why, _)| fabric_error("make a queue pair")(&why))?;
        let limits = fabric.limits(qp);
        if limits.max_recv_wr < recvs || limits.max_send_wr < 2 {
            let why = format!("{} receives and {} sends", limits.max_recv_wr, limits.max_send_wr);
            return Err(fabric_error("make a queue pair large enough")(&why));
        }
        let send_at = recv_bytes;
        let mut chan = Chan {
            at,
            qp,
            srp: Channel::new(granted, Config { slots: slots as u16 + 1 }),
            recv: Slots::new(Arc::clone(&arena), 0, ti_iu_len as usize, recvs, 0),
            send: Slots::new(arena, send_at, iu_len, sends, 0),
            lkey,
            commands: vec![Command::IDLE; slots as usize].into(),
            sense: vec![[0; SENSE_BYTES]; slots as usize].into(),
            free: IndexPool::new("command slots", slots),
            recvs: Vec::with_capacity(recvs as usize),
            sends: Vec::with_capacity(sends as usize),
            sq_used: 0,
            sq_max: limits.max_send_wr,
            unsignaled: 0,
            signal_every: SIGNAL_EVERY.min(limits.max_send_wr / 2),
            desc: shape.desc,
            imm: granted.imm_offset().is_some(),
            imm_data: vec![0; IMM_BYTES_MAX as usize].into(),
            tm_live: false,
            tm_code: None,
        };
        (0..recvs).for_each(|slot| chan.gather_recv(slot));
        chan.flush(fabric)?;
        Ok(chan)
    }

    pub(super) fn slots(&self) -> u32 {
        self.commands.len() as u32
    }

    pub(super) fn qp(&self) -> QpNum {
        self.qp
    }

    pub(super) fn req_lim(&self) -> u32 {
        self.srp.req_lim()
    }

    pub(super) fn reserve(&mut self) -> Option<u32> {
        self.free.get()
    }

    pub(super) fn release(&mut self, slot: u32) {
        assert!(!self.commands[slot as usize].live, "a slot is given back idle");
        self.free.put(slot);
    }

    pub(super) fn is_idle(&self, slot: u32) -> bool {
        !self.commands[slot as usize].live
    }

    /// Builds the command's IU in its slot and gathers it.
    #[inline]
    pub(super) fn start(
        &mut self,
        slot: u32,
        request: &Request,
        now: Nanos,
        data: &DataArea,
        (buffer, table): (usize, usize),
    ) -> Result<Started, Error> {
        assert!(self.free.is_out(slot), "a started slot is reserved");
        assert!(!self.commands[slot as usize].live, "a started slot is idle");
        if self.sq_used == self.sq_max {
            return Ok(Started::NoRoom);
        }
        let lun = u64::from_be_bytes(cdb::lun_field(request.lun));
        let whole = MemDesc {
            va: data.arena.addr() + buffer as u64,
            key: data.rkey,
            len: request.data.len(),
        };
        let started = match (self.desc, request.data) {
            (_, Data::None) => self.build(slot, request, lun, OutBuf::None, InBuf::None),
            (DescFormat::Direct | DescFormat::Imm, Data::In(_)) => {
                self.build(slot, request, lun, OutBuf::None, InBuf::Direct(whole))
            }
            (DescFormat::Imm, Data::Out(len)) if self.imm && len <= IMM_BYTES_MAX => {
                let mut bytes = std::mem::take(&mut self.imm_data);
                data.arena.copy_out(buffer, &mut bytes[..len as usize]);
                let out = OutBuf::Immediate(&bytes[..len as usize]);
                let started = self.build(slot, request, lun, out, InBuf::None);
                self.imm_data = bytes;
                started
            }
            (DescFormat::Direct | DescFormat::Imm, Data::Out(_)) => {
                self.build(slot, request, lun, OutBuf::Direct(whole), InBuf::None)
            }
            (DescFormat::Indirect | DescFormat::Partial, direction) => {
                let (descs, count) = pieces(whole);
                put_table(data, table, &descs[..count]);
                let partial = self.desc == DescFormat::Partial;
                let va = data.arena.addr() + table as u64;
                let in_iu = if partial { count / 2 } else { count };
                let table = Table { va, key: data.rkey, descs: &descs[..count], in_iu };
                let (out, inn) = match direction {
                    Data::Out(_) => (OutBuf::Table(table), InBuf::None),
                    _ => (OutBuf::None, InBuf::Table(table)),
                };
                self.build(slot, request, lun, out, inn)
            }
        };
        match started {
            Ok((tag, len)) => {
                let Request { lun, cdb, user, .. } = *request;
                let live = true;
                self.commands[slot as usize] = Command { live, lun, cdb, tag, user, posted: now };
                self.gather_send(slot, len, Kind::Send);
                Ok(Started::Yes)
            }
            Err(StartError::NoCredit) => Ok(Started::NoRoom),
            Err(why) => Err(Error::usage(format!("{}: {why:?}", cdb::name(&request.cdb)))),
        }
    }

    #[inline]
    fn build(
        &mut self,
        slot: u32,
        request: &Request,
        lun: u64,
        out: OutBuf<'_>,
        inn: InBuf<'_>,
    ) -> Result<(Tag, usize), StartError> {
        let iu = self.send.bytes_mut(slot);
        self.srp.start_cmd(&request.cdb, lun, out, inn, u64::from(slot), iu)
    }

    /// Gathers the SEND of a send IU.
    #[inline]
    fn gather_send(&mut self, slot: u32, len: usize, kind: Kind) {
        assert!(self.sq_used < self.sq_max, "a place in the send queue");
        self.sq_used += 1;
        self.unsignaled += 1;
        let signaled = kind == Kind::Answer || self.unsignaled >= self.signal_every;
        let wr = Wr {
            kind,
            channel: self.at,
            slot: if kind == Kind::Answer { slot } else { NO_SLOT },
            count: if signaled { std::mem::take(&mut self.unsignaled) } else { 0 },
        };
        let sge = Sge { addr: self.send.lend(slot), len: len as u32, lkey: self.lkey };
        self.sends.push(SendWr { wr_id: wr.pack(), op: SendOp::Send, sge, signaled, fence: false });
    }

    #[inline]
    fn gather_recv(&mut self, slot: u32) {
        let wr = Wr { kind: Kind::Recv, channel: self.at, slot, count: 0 };
        let len = self.recv.slot_bytes() as u32;
        let sge = Sge { addr: self.recv.lend(slot), len, lkey: self.lkey };
        self.recvs.push(RecvWr { wr_id: wr.pack(), sge });
    }

    /// Posts the receives, once there are enough of them, then the sends. `recv_count` sees to it
    /// that those still gathered are not missing.
    #[inline]
    pub(super) fn flush<F: Fabric>(&mut self, fabric: &mut F) -> Result<(), Error> {
        if self.recvs.len() >= RECV_BATCH as usize {
            let posted = fabric.post_recv(self.qp, &self.recvs);
            self.recvs.clear();
            posted.map_err(|why| self.post_error(why))?;
        }
        if !self.sends.is_empty() {
            let posted = fabric.post_send(self.qp, &self.sends);
            self.sends.clear();
            posted.map_err(|why| self.post_error(why))?;
        }
        Ok(())
    }

    #[cold]
    fn post_error(&self, why: PostError) -> Error {
        match why.cause {
            PostCause::BadState => Error::PeerGone(format!("channel {} is closed", self.at)),
            _ => fabric_error("take a request")(&why),
        }
    }

    /// A received IU: the answer to a command, or None for everything else. `urgent` is set when
    /// something was gathered that must not wait for the caller's next flush.
    #[inline]
    pub(super) fn on_recv(
        &mut self,
        slot: u32,
        len: usize,
        urgent: &mut bool,
    ) -> Result<Answer, Error> {
        self.recv.take_back(slot);
        let Some(iu) = self.recv.bytes(slot).get(..len) else {
            return Err(Error::Protocol(format!("an IU of {len} bytes")));
        };
        let answer = match self.srp.on_iu(iu) {
            Event::Done(done) => {
                let outcome = on_done(self.at, &done, &mut self.commands, &mut self.sense);
                self.send.take_back(outcome.slot.index());
                Answer::Outcome(outcome)
            }
            Event::TmDone { code, aborted, .. } => {
                self.send.take_back(self.commands.len() as u32);
                self.tm_live = false;
                // As Linux takes it: no response data means that the function failed.
                self.tm_code = Some(code.unwrap_or(RspCode::FAILED));
                match aborted {
                    Some(task) => {
                        self.commands[task as usize].live = false;
                        self.send.take_back(task as u32);
                        Answer::Aborted
                    }
                    None => Answer::Nothing,
                }
            }
            Event::CredReq { answer, .. } => {
                self.answer(&answer)?;
                *urgent = true;
                Answer::Nothing
            }
            Event::Aer { answer, .. } => {
                self.answer(&answer)?;
                *urgent = true;
                Answer::Nothing
            }
            Event::Logout { reason } => {
                return Err(Error::PeerGone(format!("it logged out, reason {reason:?}")));
            }
            Event::Bogus(why) => return Err(Error::Protocol(format!("{why:?}"))),
        };
        self.gather_recv(slot);
        Ok(answer)
    }

    /// Gathers the answer to a request of the target.
    #[cold]
    fn answer(&mut self, iu: &[u8]) -> Result<(), Error> {
        let first = self.slots() + 1;
        let free = (first..first + ANSWERS).find(|&slot| !self.send.is_lent(slot));
        let Some(slot) = free.filter(|_| self.sq_used < self.sq_max) else {
            let why = "it sends requests faster than they can be answered";
            return Err(Error::Protocol(why.into()));
        };
        self.send.bytes_mut(slot)[..iu.len()].copy_from_slice(iu);
        self.gather_send(slot, iu.len(), Kind::Answer);
        Ok(())
    }

    /// A signalled send is done: places of the send queue come back.
    #[inline]
    pub(super) fn on_sent(&mut self, wr: Wr) {
        assert!(wr.count <= self.sq_used, "no more sends end than were begun");
        self.sq_used -= wr.count;
        if wr.kind == Kind::Answer {
            self.send.take_back(wr.slot);
        }
    }

    pub(super) fn sense(&self, slot: u32, len: u8) -> &[u8] {
        &self.sense[slot as usize][..usize::from(len)]
    }

    pub(super) fn command(&self, slot: u32) -> (u16, Cdb) {
        let command = &self.commands[slot as usize];
        (command.lun, command.cdb)
    }

    /// A command that has waited longer than `limit`.
    pub(super) fn overdue(&self, now: Nanos, limit: Nanos) -> Option<(u16, Cdb)> {
        let late = |c: &&Command| c.live && now.saturating_sub(c.posted) > limit;
        self.commands.iter().find(late).map(|c| (c.lun, c.cdb))
    }

    pub(super) fn start_tm(
        &mut self,
        func: TmFunc,
        lun: u16,
        task: Option<u32>,
    ) -> Result<(), Error> {
        if self.tm_live || self.sq_used == self.sq_max {
            return Err(Error::usage("one task management function at a time per channel"));
        }
        let iu_at = self.slots();
        let lun = u64::from_be_bytes(cdb::lun_field(lun));
        let iu = self.send.bytes_mut(iu_at);
        let started = match task.map(|task| &self.commands[task as usize]) {
            Some(task) if task.live => self.srp.abort_task(task.tag, u64::MAX, iu),
            Some(_) => Err(StartError::NoSuchTask),
            None => self.srp.start_tm(func, lun, u64::MAX, iu),
        };
        let (_, len) = started.map_err(|why| Error::usage(format!("task management: {why:?}")))?;
        self.tm_live = true;
        self.tm_code = None;
        self.gather_send(iu_at, len, Kind::Send);
        Ok(())
    }

    pub(super) fn take_tm(&mut self) -> Option<RspCode> {
        self.tm_code.take()
    }

    /// Ends a command that will not be answered; false when it is idle already.
    pub(super) fn forget(&mut self, slot: u32) -> bool {
        let command = &mut self.commands[slot as usize];
        if !command.live {
            return false;
        }
        command.live = false;
        let user = self.srp.forget(command.tag);
        assert!(user == Some(u64::from(slot)), "a live command is outstanding");
        self.send.take_back(slot);
        true
    }

    /// While closing: a request came back, done or flushed.
    pub(super) fn on_flushed(&mut self, wr: Wr) {
        if wr.kind == Kind::Recv {
            self.recv.take_back(wr.slot);
        }
    }

    /// While closing: no receive is posted any more.
    pub(super) fn is_quiet(&self) -> bool {
        self.recv.lent() == self.recvs.len() as u32
    }

    /// The queue pair is gone: whatever is lent comes back.
    pub(super) fn take_all_back(&mut self) {
        for slots in [&mut self.recv, &mut self.send] {
            for slot in 0..slots.count() {
                if slots.is_lent(slot) {
                    slots.take_back(slot);
                }
            }
        }
    }
}

/// What a received IU means for the client.
pub(super) enum Answer {
    /// A command was answered.
    Outcome(Outcome),
    /// A command was aborted, and will not be answered.
    Aborted,
    /// Neither.
    Nothing,
}

/// Takes the answer to a command into its slot.
#[inline]
fn on_done(
    channel: usize,
    done: &Done<'_>,
    commands: &mut [Command],
    sense: &mut [[u8; SENSE_BYTES]],
) -> Outcome {
    let slot = done.user as usize;
    let command = &mut commands[slot];
    assert!(command.live, "an answered command was started");
    command.live = false;
    let len = done.sense.len().min(SENSE_BYTES);
    if len > 0 {
        sense[slot][..len].copy_from_slice(&done.sense[..len]);
    }
    Outcome {
        slot: SlotId::new(channel, slot as u32),
        status: done.status,
        sense_len: len as u8,
        data_in: done.data_in,
        data_out: done.data_out,
        user: command.user,
        posted: command.posted,
    }
}

/// Cuts a buffer into [`PIECES`] of whole 512-byte sectors, or fewer; the last takes the rest.
fn pieces(whole: MemDesc) -> ([MemDesc; PIECES as usize], usize) {
    let piece = (whole.len / PIECES) & !511;
    let count = if piece == 0 { 1 } else { PIECES as usize };
    let mut descs = [MemDesc::default(); PIECES as usize];
    let mut at = 0;
    for desc in &mut descs[..count - 1] {
        *desc = MemDesc { va: whole.va + u64::from(at), key: whole.key, len: piece };
        at += piece;
    }
    descs[count - 1] =
        MemDesc { va: whole.va + u64::from(at), key: whole.key, len: whole.len - at };
    (descs, count)
}

/// Writes a descriptor table where the target can read it.
fn put_table(data: &DataArea, at: usize, descs: &[MemDesc]) {
    for (i, desc) in descs.iter().enumerate() {
        let mut bytes = [0; DESC_LEN];
        desc.emit(&mut bytes);
        data.arena.copy_in(at + i * DESC_LEN, &bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_work_request_id_comes_apart_as_it_was_put_together() {
        for kind in [Kind::Recv, Kind::Send, Kind::Answer] {
            let id = Wr { kind, channel: 0x7fff, slot: 0xffff, count: 0xfffe }.pack();
            let wr = Wr::unpack(id);
            assert_eq!((wr.kind, wr.channel, wr.slot, wr.count), (kind, 0x7fff, 0xffff, 0xfffe));
        }
    }

    #[test]
    fn a_buffer_is_cut_into_whole_sectors_without_a_gap() {
        for len in [1, 512, 2047, 2048, 4096, 5000, 16384] {
            let (descs, count) = pieces(MemDesc { va: 1 << 40, key: 5, len });
            let mut at = 1 << 40;
            for desc in &descs[..count] {
                assert_eq!((desc.va, desc.key), (at, 5));
                at += u64::from(desc.len);
            }
            assert_eq!(at, (1 << 40) + u64::from(len));
            assert_eq!(count, if len < 2048 { 1 } else { 4 });
        }
    }
}
