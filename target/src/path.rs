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
use usurp_fabric::{Completion, CompletionBatch, ConnId, Fabric, FabricError, Lkey, WcStatus};
use usurp_reactor::Nanos;
use usurp_reactor::mem::Arena;
use usurp_reactor::turn::{Mailbox, Work};
use usurp_srp::target::{ChannelState, CutReason, IoctxId, Received, RspCode, TmFunc};
use usurp_srp::wire::Opcode;

use crate::abort::{self, Plan, Tmf, Tmfs, Waits};
use crate::command::{Ctx, token_parts};
use crate::conn::{Closing, Conn};
use crate::control::ControlSender;
use crate::ioctx::{NO_LU, Stage};
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
    id: ReactorId,
    /// Queue pairs and their completion queue.
    fabric: F,
    /// Arena of the channels' rings and its registration, from the first channel on.
    iu_arena: Option<(Arc<Arena>, Lkey)>,
    /// Channels by position.
    conns: Vec<Option<Box<Conn>>>,
    /// What channels share.
    sh: Shared,
    /// Channels with something to flush, by position.
    dirty: Vec<u16>,
    /// Channels that are being brought down.
    closing: u32,
    /// Task management functions under way.
    tmfs: Tmfs,
    /// Completions of the fabric, re-used each turn.
    batch: CompletionBatch,
    /// Completions of a bdev queue, re-used each turn.
    done: Completions,
    /// See [`PathConfig`].
    reactors: Vec<Mailbox<ToReactor<F::Endpoint>>>,
    /// See [`PathConfig`].
    control: ControlSender<F::Endpoint>,
    /// Mail for the control thread whose queue was full; bounded by two for each channel.
    outbox: VecDeque<ToControl<F::Endpoint>>,
    /// See [`PathConfig`].
    grace_ns: Nanos,
    /// The control thread wants the loop to end.
    shutdown: bool,
    /// Commands answered, for the statistics.
    commands: u64,
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
            commands: 0,
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

    /// Commands answered so far.
    pub fn commands(&self) -> u64 {
        self.commands
    }

    /// The fabric, for what a test or simulation must do to it.
    pub fn fabric_mut(&mut self) -> &mut F {
        &mut self.fabric
    }

    /// What the channels share, for checks from outside.
    pub fn shared(&self) -> &Shared {
        &self.sh
    }

    fn tell_control(&mut self, mail: ToControl<F::Endpoint>) {
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

    fn position(&self, conn: ConnId) -> Option<usize> {
        self.conns.iter().position(|c| c.as_ref().is_some_and(|c| c.conn == conn))
    }

    /// Registration of the arena that the channels' rings lie in; all of a reactor's channels share
    /// one.
    fn iu_lkey(&mut self, arena: &Arc<Arena>) -> Result<Lkey, FabricError> {
        if let Some((known, lkey)) = &self.iu_arena
            && Arc::ptr_eq(known, arena)
        {
            return Ok(*lkey);
        }
        let lkey = self.fabric.register(arena)?;
        self.iu_arena = Some((arena.clone(), lkey));
        Ok(lkey)
    }

    /// Takes over a channel: queue pair, registration, receives.
    fn adopt(&mut self, conn: ConnId, endpoint: F::Endpoint, mut channel: Box<Conn>) {
        assert!(channel.conn == conn, "the channel is another connection's");
        let at = usize::from(channel.index);
        assert!(self.conns[at].is_none(), "two channels at one position");
        let refuse = |endpoint, channel, why| ToControl::Refused { conn, endpoint, channel, why };
        let lkey = match self.iu_lkey(&channel.iu_arena) {
            Ok(lkey) => lkey,
            Err(e) => return self.tell_control(refuse(Some(endpoint), channel, e.to_string())),
        };
        let qp = match self.fabric.adopt(endpoint) {
            Ok(qp) => qp,
            Err((e, endpoint)) => {
                return self.tell_control(refuse(Some(endpoint), channel, e.to_string()));
            }
        };
        channel.qp = Some(qp);
        channel.iu_lkey = lkey;
        let limits = self.fabric.limits(qp);
        let sends = channel.send.count();
        if limits.max_send_wr <= sends || limits.max_recv_wr < channel.recv.count() {
            let endpoint = self.fabric.release(qp);
            let why = format!(
                "queues of {} sends and {} receives are too short for {sends} and {}",
                limits.max_send_wr,
                limits.max_recv_wr,
                channel.recv.count()
            );
            return self.tell_control(refuse(Some(endpoint), channel, why));
        }
        let room = channel.sends.capacity() as u32 - sends;
        channel.sq_rdma = (limits.max_send_wr - sends).min(room);
        channel.sq_free = channel.sq_rdma;
        channel.nexus_at = self.sh.join_nexus(&channel.nexus);
        for slot in 0..channel.recv.count() {
            channel.release_recv(slot as u16);
        }
        let posted = channel.flush(&mut self.fabric);
        self.conns[at] = Some(channel);
        self.tell_control(ToControl::Adopted { conn });
        if let Err(why) = posted {
            self.fail(at, why, 0);
        }
    }

    /// Something went wrong with a channel: its peer is cut off.
    fn fail(&mut self, at: usize, why: &'static str, now: Nanos) {
        let Some(conn) = self.conns[at].as_mut() else { return };
        if conn.closing.is_none() {
            let mail = ToControl::Disconnect { conn: conn.conn, why };
            self.tell_control(mail);
        }
        self.close(at, false, now);
    }

    /// Begins to bring a channel down, or hastens it.
    fn close(&mut self, at: usize, grace: bool, now: Nanos) {
        let Some(conn) = self.conns[at].as_mut() else { return };
        let deadline = if grace { now + self.grace_ns } else { 0 };
        match &mut conn.closing {
            Some(closing) => closing.deadline = closing.deadline.min(deadline),
            None => {
                self.closing += 1;
                conn.closing = Some(Closing { deadline, errored: false });
                conn.srp.advance(ChannelState::Disconnecting);
                conn.held.clear();
            }
        }
    }

    /// Puts a channel's queue pair into the error state and takes its commands down.
    fn error(&mut self, at: usize) {
        let conn = self.conns[at].as_mut().expect("a closing channel is there");
        conn.closing.as_mut().expect("it is closing").errored = true;
        conn.srp.advance(ChannelState::Draining);
        self.fabric.set_error(conn.qp());
        let mut ctx = Ctx { conn, sh: &mut self.sh };
        self.tmfs.forget_channel(at as u16, |id| ctx.finish_aborted(id));
        ctx.abort_all();
        self.mark_dirty(at);
    }

    /// What the fabric refused to post will never complete: it counts as flushed.
    fn flush_unposted(&mut self, at: usize) {
        let Some(conn) = self.conns[at].as_mut() else { return };
        conn.repost.clear();
        let mut unposted = std::mem::take(&mut conn.sends);
        for wr in unposted.drain(..).filter(|wr| wr.signaled) {
            let conn = self.conns[at].as_mut().expect("nothing releases it here");
            let done = Completion {
                qp: conn.qp(),
                wr_id: wr.wr_id,
                status: WcStatus::Flushed,
                byte_len: 0,
            };
            self.on_completion(done, 0);
        }
        if let Some(conn) = self.conns[at].as_mut() {
            assert!(conn.sends.is_empty(), "a channel in error posts nothing");
            conn.sends = unposted;
        }
    }

    /// Brings closing channels further: grace over, quiet, gone.
    fn step_closing(&mut self, now: Nanos) {
        for at in 0..self.conns.len() {
            let Some(conn) = self.conns[at].as_mut() else { continue };
            let Some(closing) = conn.closing else { continue };
            if !closing.errored && (conn.srp.in_use() == 0 || now >= closing.deadline) {
                self.error(at);
                self.flush_channel(at, now);
            }
            let conn = self.conns[at].as_mut().expect("nothing releases it here");
            if conn.closing.is_some_and(|c| c.errored) && conn.is_quiet() {
                self.release(at);
            }
        }
    }

    /// A channel is quiet: its memory goes back to the control thread.
    fn release(&mut self, at: usize) {
        let mut channel = self.conns[at].take().expect("a closing channel is there");
        self.closing -= 1;
        channel.srp.advance(ChannelState::Disconnected);
        assert!(channel.srp.is_whole(), "a channel ends with an ioctx in use");
        assert!(channel.sq_free == channel.sq_rdma, "send-queue slots are missing at the end");
        let endpoint = self.fabric.release(channel.qp());
        channel.qp = None;
        self.sh.leave_nexus(channel.nexus_at);
        self.tell_control(ToControl::Closed { conn: channel.conn, endpoint, channel });
    }

    #[inline]
    fn mark_dirty(&mut self, at: usize) {
        let conn = self.conns[at].as_mut().expect("the channel is there");
        if !conn.dirty {
            conn.dirty = true;
            self.dirty.push(at as u16);
        }
    }

    /// One completion of the fabric.
    #[inline]
    fn on_completion(&mut self, c: Completion, now: Nanos) {
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
                Ctx { conn, sh: &mut self.sh }.on_rsp_sent(wr.slot);
                self.commands += 1;
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
    fn offer_held(&mut self, at: usize, now: Nanos) {
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

    /// A task management function begins.
    fn task_mgmt(
        &mut self,
        at: usize,
        ioctx: IoctxId,
        lu: Option<u16>,
        func: TmFunc,
        task_tag: usurp_srp::Tag,
    ) {
        let conn = self.conns[at].as_mut().expect("the channel is there");
        let io = &mut conn.ioctxs[usize::from(ioctx.0)];
        io.go(Stage::Mgmt);
        io.lu = NO_LU;
        io.serial = io.serial.wrapping_add(1);
        let mut tmf = Tmf {
            channel: at as u16,
            ioctx: ioctx.0,
            waits: Waits::Nothing,
            scope: None,
            untold: 0,
            unheard: 0,
            serial: 0,
        };
        match abort::plan(conn, func, lu) {
            Plan::Answer(code) => return self.answer_tmf(at, ioctx.0, code),
            Plan::Task => {
                tmf.waits = Ctx { conn, sh: &mut self.sh }.abort_task(task_tag, lu);
            }
            Plan::Scope(scope) => {
                let lu = lu.expect("a scope has its logical unit");
                self.abort_scope(lu, scope);
                let all = (1u64 << self.reactors.len()) - 1;
                let others = all & !(1 << self.id.0);
                tmf.waits = Waits::Lu(lu);
                tmf.scope = Some(scope);
                tmf.untold = others;
                tmf.unheard = others;
            }
        }
        self.tmfs.begin(tmf);
        self.step_tmfs();
    }

    /// Takes down what a scope covers on this reactor.
    fn abort_scope(&mut self, lu: u16, scope: crate::mail::Scope) {
        for at in 0..self.conns.len() {
            let Some(conn) = self.conns[at].as_mut() else { continue };
            if abort::applies(scope, conn) {
                Ctx { conn, sh: &mut self.sh }.abort_lu(lu);
                self.mark_dirty(at);
            }
        }
        abort::side_effects(&mut self.sh, lu, scope);
    }

    /// Task management functions that wait: tell reactors, answer those that are complete.
    fn step_tmfs(&mut self) {
        for slot in 0..abort::TMF_SLOTS {
            let Some(tmf) = self.tmfs.at(slot) else { continue };
            let reactors = &self.reactors;
            let me = TmfRefOf { reactor: self.id, slot: slot as u16 };
            tell_reactors(tmf, reactors, me);
            let tmf = *tmf;
            if tmf.unheard == 0 && self.is_gone(&tmf) {
                self.tmfs.end(slot);
                self.answer_tmf(usize::from(tmf.channel), tmf.ioctx, RspCode::COMPLETE);
            }
        }
        self.answer_foreign();
    }

    /// Whether everything a function waits for on this reactor is gone.
    fn is_gone(&self, tmf: &Tmf) -> bool {
        match tmf.waits {
            Waits::Nothing => true,
            Waits::Lu(lu) => self.sh.lus[usize::from(lu)].aborting == 0,
            Waits::Command(id, serial) => {
                let conn = self.conns[usize::from(tmf.channel)].as_ref();
                let io = &conn.expect("its channel is there").ioctxs[usize::from(id)];
                io.serial != serial || io.stage() == Stage::Free
            }
        }
    }

    /// Answers other reactors whose scope is clear here.
    fn answer_foreign(&mut self) {
        let mut i = 0;
        while i < self.tmfs.foreign.len() {
            let foreign = self.tmfs.foreign[i];
            let clear = self.sh.lus[usize::from(foreign.lu)].aborting == 0;
            let to = &self.reactors[usize::from(foreign.tmf.reactor.0)];
            let from = self.id;
            if clear && to.try_send(ToReactor::AbortDone { tmf: foreign.tmf, from }).is_ok() {
                self.tmfs.foreign.swap_remove(i);
            } else {
                i += 1;
            }
        }
    }

    /// Posts the answer to a task management function.
    fn answer_tmf(&mut self, at: usize, id: u16, code: RspCode) {
        let conn = self.conns[at].as_mut().expect("its channel is there");
        conn.ioctxs[usize::from(id)].go(Stage::Rsp);
        let buf = conn.send.bytes_mut(u32::from(id));
        let len = conn.srp.tsk_rsp(IoctxId(id), code, buf);
        conn.push_rsp(id, len as u32);
        self.mark_dirty(at);
    }

    /// Tells other reactors which logical units were stopped or started here.
    fn tell_stops(&mut self) {
        self.sh.stop_changed = false;
        for (at, lu) in self.sh.lus.iter_mut().enumerate().filter(|(_, lu)| lu.untold != 0) {
            for (to, mailbox) in self.reactors.iter().enumerate() {
                let mail = ToReactor::Stopped { lu: at as u16, stopped: lu.stopped_told };
                let told = to == usize::from(self.id.0) || mailbox.try_send(mail).is_ok();
                lu.untold &= !(u64::from(told) << to);
            }
            lu.untold &= (1 << self.reactors.len()) - 1;
            self.sh.stop_changed |= lu.untold != 0;
        }
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

    fn flush_channel(&mut self, at: usize, now: Nanos) {
        let Some(conn) = self.conns[at].as_mut() else { return };
        conn.dirty = false;
        conn.push_cred_req();
        if let Err(why) = conn.flush(&mut self.fabric) {
            self.fail(at, why, now);
            self.error_now(at);
            self.flush_unposted(at);
        }
    }

    /// The error state, unless the channel is in it already.
    fn error_now(&mut self, at: usize) {
        let conn = self.conns[at].as_ref().expect("the channel is there");
        if !conn.closing.is_some_and(|c| c.errored) {
            self.error(at);
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

struct TmfRefOf {
    reactor: ReactorId,
    slot: u16,
}

/// Sends a function's request to the reactors that have not had it.
fn tell_reactors<E>(tmf: &mut Tmf, reactors: &[Mailbox<ToReactor<E>>], me: TmfRefOf) {
    let (Some(scope), Waits::Lu(lu)) = (tmf.scope, tmf.waits) else { return };
    let name = crate::mail::TmfRef { reactor: me.reactor, slot: me.slot, serial: tmf.serial };
    for (at, mailbox) in reactors.iter().enumerate() {
        let bit = 1u64 << at;
        if tmf.untold & bit != 0 {
            let mail = ToReactor::Abort { tmf: name, lu, scope };
            if mailbox.try_send(mail).is_ok() {
                tmf.untold &= !bit;
            }
        }
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
                self.tmfs.foreign.push(abort::Foreign { tmf, lu });
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
        let mut batch = std::mem::take(&mut self.batch);
        let mut events = self.fabric.poll(now, &mut batch);
        for c in batch.iter() {
            self.on_completion(*c, now);
        }
        batch.clear();
        self.batch = batch;
        events += self.poll_bdevs(now);
        if self.sh.freed && !self.sh.waiting.is_empty() {
            self.retry_waiting();
        }
        if !self.tmfs.is_idle() {
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
