//! The I/O path: one turn of one reactor.
//!
//! Owns the reactor's channels, their queue pairs and completion queue, and its queue of each bdev.
//! Never blocks, never allocates, never takes a lock; meets other threads only by mail.
//!
//! ```text
//!   fabric.poll ─> receive:  channel.on_iu ─> command begins ─┐
//!               ─> data-out: command goes on                  ├─> bdev queue
//!               ─> sent:     ioctx and buffers are free       │
//!   bdev polls  ─> response and data-in are built  <──────────┘
//!   flush       ─> per channel: receives in one list, then sends in one list
//! ```
//!
//! Invariants: a channel is flushed before the turn ends; receives before sends, so that no
//! response grants a credit whose receive is not posted; every slot, buffer and ioctx is back when
//! the reactor ends.

use std::collections::VecDeque;
use std::sync::Arc;

use usurp_bdev::Completions;
use usurp_fabric::{Completion, CompletionBatch, Fabric, Lkey, WcStatus};
use usurp_reactor::Nanos;
use usurp_reactor::mem::Arena;
use usurp_reactor::turn::{Mailbox, Work};
use usurp_srp::target::{ChannelState, CutReason, Received};
use usurp_srp::wire::Opcode;

use crate::abort::Tmfs;
use crate::command::{Ctx, token_parts};
use crate::conn::Conn;
use crate::control::ControlSender;
use crate::mail::{ReactorId, ToControl, ToReactor};
use crate::shared::Shared;
use crate::wrid::{Kind, WrId};

/// What a path is made of, beside its fabric and its share of the memory.
pub struct PathConfig<E> {
    /// This reactor.
    pub id: ReactorId,
    /// Mailboxes of all reactors, this one's included, by [`ReactorId`].
    pub reactors: Vec<Mailbox<ToReactor<E>>>,
    /// To the control thread.
    pub control: ControlSender<E>,
    /// Channels this reactor has memory for.
    pub channels_max: u16,
    /// Ioctxs of one channel; bounds every list.
    pub ioctxs_per_channel: u32,
    /// How long commands already begun may go on once their channel is to be closed.
    pub grace_ns: Nanos,
}

/// See the module's header.
pub struct Path<F: Fabric> {
    /// This reactor.
    pub(crate) id: ReactorId,
    /// Queue pairs and their completion queue.
    pub(crate) fabric: F,
    /// Arena of the channels' rings and its registration, from the first channel on.
    pub(crate) iu_arena: Option<(Arc<Arena>, Lkey)>,
    /// Channels by position.
    pub(crate) conns: Vec<Option<Box<Conn>>>,
    /// What channels share.
    pub(crate) sh: Shared,
    /// Channels with something to flush, by position.
    pub(crate) dirty: Vec<u16>,
    /// Channels that are being brought down.
    pub(crate) closing: u32,
    /// Task management functions under way.
    pub(crate) tmfs: Tmfs,
    /// Completions of the fabric, re-used each turn.
    pub(crate) batch: CompletionBatch,
    /// Completions of a bdev queue, re-used each turn.
    pub(crate) done: Completions,
    /// See [`PathConfig`].
    pub(crate) reactors: Vec<Mailbox<ToReactor<F::Endpoint>>>,
    /// See [`PathConfig`].
    pub(crate) control: ControlSender<F::Endpoint>,
    /// Mail for the control thread whose queue was full; bounded by two for each channel.
    pub(crate) outbox: VecDeque<ToControl<F::Endpoint>>,
    /// See [`PathConfig`].
    pub(crate) grace_ns: Nanos,
    /// The control thread wants the loop to end.
    pub(crate) shutdown: bool,
}

impl<F: Fabric> Path<F> {
    /// A path without channels.
    pub fn new(config: PathConfig<F::Endpoint>, fabric: F, mut sh: Shared) -> Path<F> {
        let channels = usize::from(config.channels_max);
        let commands = channels * config.ioctxs_per_channel as usize;
        sh.waiting.reserve(commands);
        sh.nexuses.reserve(channels);
        for lu in &mut sh.lus {
            lu.stalled.reserve(commands);
        }
        Path {
            id: config.id,
            fabric,
            iu_arena: None,
            conns: (0..channels).map(|_| None).collect(),
            sh,
            dirty: Vec::with_capacity(channels),
            closing: 0,
            tmfs: Tmfs::new(config.reactors.len()),
            batch: CompletionBatch::new(),
            done: Completions::new(),
            reactors: config.reactors,
            control: config.control,
            outbox: VecDeque::with_capacity(2 * channels + 1),
            grace_ns: config.grace_ns,
            shutdown: false,
        }
    }

    /// Ends the loop at its next turn: the reactor could not be set up.
    pub fn end(&mut self) {
        assert!(self.conns.iter().all(Option::is_none), "a path ends after its channels");
        self.shutdown = true;
    }

    /// Whether everything this reactor handed out is back.
    pub fn is_whole(&self) -> bool {
        self.conns.iter().all(Option::is_none) && self.sh.is_whole() && self.tmfs.is_idle()
    }

    /// The fabric, for what a test or simulation must do to it.
    pub fn fabric_mut(&mut self) -> &mut F {
        &mut self.fabric
    }

    /// What the channels share, for checks from outside.
    pub fn shared(&self) -> &Shared {
        &self.sh
    }

    pub(crate) fn tell_control(&mut self, mail: ToControl<F::Endpoint>) {
        if !self.outbox.is_empty() {
            return self.outbox.push_back(mail);
        }
        if let Err(mail) = self.control.try_send(mail) {
            self.outbox.push_back(mail);
        }
    }

    fn retry_outbox(&mut self) {
        while let Some(mail) = self.outbox.pop_front() {
            if let Err(mail) = self.control.try_send(mail) {
                return self.outbox.push_front(mail);
            }
        }
    }

    #[inline]
    pub(crate) fn mark_dirty(&mut self, at: usize) {
        let conn = self.conns[at].as_mut().expect("the channel is there");
        if !conn.dirty {
            conn.dirty = true;
            self.dirty.push(at as u16);
        }
    }

    /// One completion of the fabric.
    #[inline]
    pub(crate) fn on_completion(&mut self, c: Completion, now: Nanos) {
        let wr = WrId::unpack(c.wr_id);
        let at = usize::from(wr.channel);
        let conn = self.conns[at].as_mut().expect("a released channel has no completions");
        assert!(conn.generation == wr.generation, "a completion of an earlier channel");
        if !conn.dirty {
            conn.dirty = true;
            self.dirty.push(wr.channel);
        }
        let ok = c.status == WcStatus::Success;
        match wr.kind {
            Kind::Recv => {
                conn.recv.take_back(u32::from(wr.slot));
                if ok {
                    self.on_recv(at, wr.slot, c.byte_len, now);
                }
            }
            Kind::Rsp => {
                conn.sends_out -= 1;
                let mut ctx = Ctx { conn, sh: &mut self.sh };
                ctx.on_rsp_sent(wr.slot);
                ctx.retry_sq();
                self.offer_held(at, now);
            }
            Kind::Read | Kind::Write | Kind::Table => {
                conn.sends_out -= 1;
                self.on_transfer(at, wr, ok);
            }
            Kind::Cred => {
                conn.sends_out -= 1;
                conn.send.take_back(u32::from(wr.slot));
                conn.srp.on_cred_req_sent();
            }
            Kind::Silent => assert!(!ok, "an unsignalled request completed"),
        }
        if !ok && c.status != WcStatus::Flushed {
            self.fail(at, "a work request failed", now);
        }
    }

    /// A round of RDMA has completed.
    fn on_transfer(&mut self, at: usize, wr: WrId, ok: bool) {
        let conn = self.conns[at].as_mut().expect("the channel is there");
        let over = !ok || conn.closing.is_some_and(|c| c.errored);
        let mut ctx = Ctx { conn, sh: &mut self.sh };
        ctx.on_round(wr.slot);
        let io = &ctx.conn.ioctxs[usize::from(wr.slot)];
        if io.aborted || over {
            ctx.finish_aborted(wr.slot);
        } else {
            match wr.kind {
                Kind::Table => {
                    if !ctx.on_table(wr.slot) {
                        ctx.refuse_table(wr.slot);
                    }
                }
                Kind::Write => ctx.post_writes(wr.slot),
                _ if io.cursor.left > 0 => ctx.post_reads(wr.slot),
                _ => {
                    if let Some(step) = ctx.arrived(wr.slot) {
                        ctx.run(wr.slot, step);
                    }
                }
            }
        }
        ctx.retry_sq();
    }

    /// An IU has arrived.
    #[inline]
    fn on_recv(&mut self, at: usize, slot: u16, len: u32, now: Nanos) {
        let conn = self.conns[at].as_mut().expect("the channel is there");
        if conn.closing.is_some() {
            return;
        }
        if !conn.held.is_empty() {
            conn.held.push_back((slot, len));
            return;
        }
        if !self.on_iu(at, slot, len, now) {
            let conn = self.conns[at].as_mut().expect("the channel is there");
            conn.held.push_back((slot, len));
        }
    }

    /// IUs that had to wait are offered again, in order.
    #[inline]
    pub(crate) fn offer_held(&mut self, at: usize, now: Nanos) {
        while let Some(conn) = self.conns[at].as_mut() {
            let Some((slot, len)) = conn.held.pop_front() else { return };
            if !self.on_iu(at, slot, len, now) {
                let conn = self.conns[at].as_mut().expect("the channel is there");
                return conn.held.push_front((slot, len));
            }
        }
    }

    /// Serves one IU. False = it must wait, and nothing has changed.
    #[inline]
    fn on_iu(&mut self, at: usize, slot: u16, len: u32, now: Nanos) -> bool {
        let room = self.tmfs.has_room();
        let conn = self.conns[at].as_mut().expect("the channel is there");
        let iu = &conn.recv.bytes(u32::from(slot))[..len as usize];
        if !room && iu.first() == Some(&Opcode::TSK_MGMT.0) {
            self.tmfs.refused = true;
            return false;
        }
        let received = conn.srp.on_iu(iu);
        let mut ctx = Ctx { conn, sh: &mut self.sh };
        match received {
            Received::Command(cmd) => ctx.begin(cmd, slot),
            Received::Wait => return false,
            Received::Malformed { ioctx } => ctx.malformed(ioctx.0, slot),
            Received::Consumed => ctx.conn.release_recv(slot),
            Received::TaskMgmt { ioctx, lun, func, task_tag } => {
                ctx.conn.release_recv(slot);
                let lu = ctx.lu_of(lun);
                self.task_mgmt(at, ioctx, lu, func, task_tag);
            }
            Received::Logout => self.fail(at, "the initiator logged out", now),
            Received::Cut(why) => self.fail(at, cut_text(why), now),
        }
        true
    }

    /// Polls the bdev queues that have work.
    #[inline]
    fn poll_bdevs(&mut self, now: Nanos) -> usize {
        let mut events = 0;
        for at in 0..self.sh.lus.len() {
            let lu = &mut self.sh.lus[at];
            if lu.in_flight == 0 && lu.stalled.is_empty() {
                continue;
            }
            lu.queue.poll(now, &mut self.done);
            while let Some(done) = self.done.pop() {
                events += 1;
                self.sh.lus[at].in_flight -= 1;
                let (channel, ioctx) = token_parts(done.token);
                let conn = self.conns[usize::from(channel)].as_mut();
                let conn = conn.expect("a channel outlives its I/O");
                Ctx { conn, sh: &mut self.sh }.on_done(ioctx, done);
                self.mark_dirty(usize::from(channel));
            }
            if !self.sh.lus[at].stalled.is_empty() {
                self.sh.lus[at].unstall();
            }
        }
        events
    }

    /// Commands that wait for a data buffer, in order, as far as the buffers go.
    fn retry_waiting(&mut self) {
        self.sh.freed = false;
        while let Some((channel, ioctx)) = self.sh.waiting.pop_front() {
            let conn = self.conns[usize::from(channel)].as_mut();
            let conn = conn.expect("a channel takes its commands out of the line");
            let moved = Ctx { conn, sh: &mut self.sh }.retry(ioctx);
            self.mark_dirty(usize::from(channel));
            if !moved {
                return;
            }
        }
    }

    /// Posts what the turn has collected.
    #[inline]
    fn flush(&mut self, now: Nanos) {
        while let Some(at) = self.dirty.pop() {
            self.flush_channel(usize::from(at), now);
        }
    }

    pub(crate) fn flush_channel(&mut self, at: usize, now: Nanos) {
        let Some(conn) = self.conns[at].as_mut() else { return };
        conn.dirty = false;
        if !conn.held.is_empty() {
            // An ioctx may have become free without a response, or a slot for task management.
            self.offer_held(at, now);
        }
        let Some(conn) = self.conns[at].as_mut() else { return };
        conn.push_cred_req();
        if let Err(why) = conn.flush(&mut self.fabric) {
            self.fail(at, why, now);
            self.error_now(at);
            self.flush_unposted(at);
        }
    }
}

/// Why the peer is cut off, for the log.
fn cut_text(why: CutReason) -> &'static str {
    match why {
        CutReason::Empty => "an IU without a byte",
        CutReason::Short { .. } => "an IU shorter than its fixed part",
        CutReason::CreditOverrun => "more requests than it has credit for",
    }
}

impl<F: Fabric> Work for Path<F>
where
    F::Endpoint: 'static,
{
    type Mail = ToReactor<F::Endpoint>;

    fn on_mail(&mut self, mail: Self::Mail, now: Nanos) {
        match mail {
            ToReactor::Adopt { conn, endpoint, channel } => self.adopt(conn, endpoint, channel),
            ToReactor::Established { conn } => {
                if let Some(at) = self.position(conn) {
                    let conn = self.conns[at].as_mut().expect("position found it");
                    if conn.closing.is_none() && conn.srp.advance(ChannelState::Live) {
                        self.mark_dirty(at);
                        self.offer_held(at, now);
                    }
                }
            }
            ToReactor::Close { conn, grace } => {
                if let Some(at) = self.position(conn) {
                    self.close(at, grace, now);
                }
            }
            ToReactor::Abort { tmf, lu, scope } => {
                self.abort_scope(lu, scope);
                self.tmfs.begin_foreign(tmf, lu);
            }
            ToReactor::AbortDone { tmf, from } => self.tmfs.heard(tmf, from),
            ToReactor::Stopped { lu, stopped } => {
                let lu = &mut self.sh.lus[usize::from(lu)];
                lu.scsi.set_stopped(stopped);
                lu.stopped_told = stopped;
            }
            ToReactor::Shutdown => self.shutdown = true,
        }
    }

    #[inline]
    fn poll(&mut self, now: Nanos) -> usize {
        self.batch.clear();
        let mut events = self.fabric.poll(now, &mut self.batch);
        for at in 0..events {
            self.on_completion(self.batch[at], now);
        }
        events += self.poll_bdevs(now);
        if self.sh.freed && !self.sh.waiting.is_empty() {
            self.retry_waiting();
        }
        if !self.tmfs.is_idle() || self.tmfs.refused {
            self.step_tmfs();
        }
        if self.sh.stop_changed {
            self.tell_stops();
        }
        self.flush(now);
        if self.closing > 0 {
            self.step_closing(now);
        }
        if !self.outbox.is_empty() {
            self.retry_outbox();
        }
        events
    }

    fn next_timer(&self) -> Option<Nanos> {
        self.sh
            .lus
            .iter()
            .filter(|lu| lu.in_flight > 0)
            .filter_map(|lu| lu.queue.next_timer())
            .min()
    }

    fn is_finished(&self) -> bool {
        self.shutdown && self.conns.iter().all(Option::is_none) && self.outbox.is_empty()
    }
}
