//! The life of a channel on its reactor: adopted, served, brought down, released.
//!
//! Part of the path: what it does at login and at the end, and never for a command. A channel that
//! is to end takes no more IUs; with grace, its commands are answered first. Then its queue pair
//! goes into the error state, everything of it is taken down, and when nothing is with the fabric
//! or a bdev any more its memory goes back to the control thread.
//!
//! ```text
//!   adopt ─> served ─ close(grace) ─> answers what it began ─ error ─> flushes ─ quiet ─> release
//!               └──── close / fail ───────────────────────────┘
//! ```

use std::sync::Arc;

use usurp_fabric::{Completion, ConnId, Fabric, FabricError, Lkey, WcStatus};
use usurp_reactor::Nanos;
use usurp_reactor::mem::Arena;
use usurp_srp::target::ChannelState;

use crate::command::Ctx;
use crate::conn::{Closing, Conn};
use crate::mail::ToControl;
use crate::path::Path;

impl<F: Fabric> Path<F> {
    pub(crate) fn position(&self, conn: ConnId) -> Option<usize> {
        self.conns.iter().position(|c| c.as_ref().is_some_and(|c| c.conn == conn))
    }

    /// Registration of the arena that the channels' rings lie in; all of a reactor's channels share
    /// one.
    pub(crate) fn iu_lkey(&mut self, arena: &Arc<Arena>) -> Result<Lkey, FabricError> {
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
    pub(crate) fn adopt(&mut self, conn: ConnId, endpoint: F::Endpoint, mut channel: Box<Conn>) {
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
        match posted {
            Ok(()) => self.tell_control(ToControl::Adopted { conn }),
            Err(why) => self.fail(at, why, 0),
        }
    }

    /// Something went wrong with a channel: its peer is cut off.
    pub(crate) fn fail(&mut self, at: usize, why: &'static str, now: Nanos) {
        let Some(conn) = self.conns[at].as_mut() else { return };
        if conn.closing.is_none() {
            let mail = ToControl::Disconnect { conn: conn.conn, why };
            self.tell_control(mail);
        }
        self.close(at, false, now);
    }

    /// Begins to bring a channel down, or hastens it.
    pub(crate) fn close(&mut self, at: usize, grace: bool, now: Nanos) {
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
    pub(crate) fn error(&mut self, at: usize) {
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
    pub(crate) fn flush_unposted(&mut self, at: usize) {
        let Some(conn) = self.conns[at].as_mut() else { return };
        for wr in conn.repost.drain(..) {
            conn.recv.take_back(u32::from(crate::wrid::WrId::unpack(wr.wr_id).slot));
        }
        let mut unposted = std::mem::take(&mut conn.sends);
        for wr in unposted.drain(..).filter(|wr| wr.signaled) {
            self.conns[at].as_mut().expect("nothing releases it here").lost.push(wr.wr_id);
        }
        if let Some(conn) = self.conns[at].as_mut() {
            assert!(conn.sends.is_empty(), "a channel in error posts nothing");
            conn.sends = unposted;
        }
    }

    /// Brings closing channels further: grace over, quiet, gone.
    pub(crate) fn step_closing(&mut self, now: Nanos) {
        for at in 0..self.conns.len() {
            let Some(conn) = self.conns[at].as_mut() else { continue };
            let Some(closing) = conn.closing else { continue };
            if !closing.errored && (conn.srp.in_use() == 0 || now >= closing.deadline) {
                self.error(at);
                self.flush_channel(at, now);
            }
            let conn = self.conns[at].as_mut().expect("nothing releases it here");
            let errored = conn.closing.is_some_and(|c| c.errored);
            if errored && conn.is_quiet() && self.fabric.is_drained(conn.qp()) {
                self.release(at);
            }
        }
    }

    /// A channel is quiet: its memory goes back to the control thread.
    pub(crate) fn release(&mut self, at: usize) {
        let qp = self.conns[at].as_ref().expect("a closing channel is there").qp();
        let endpoint = self.fabric.release(qp);
        let lost = std::mem::take(&mut self.conns[at].as_mut().expect("it is there").lost);
        for wr_id in &lost {
            let done = Completion { qp, wr_id: *wr_id, status: WcStatus::Flushed, byte_len: 0 };
            self.on_completion(done, 0);
        }
        let mut channel = self.conns[at].take().expect("a closing channel is there");
        self.closing -= 1;
        channel.srp.advance(ChannelState::Disconnected);
        assert!(channel.srp.is_whole(), "a channel ends with an ioctx in use");
        assert!(channel.sq_free == channel.sq_rdma, "send-queue slots are missing at the end");
        channel.qp = None;
        self.sh.leave_nexus(channel.nexus_at);
        self.tell_control(ToControl::Closed { conn: channel.conn, endpoint, channel });
    }

    /// The error state, unless the channel is in it already.
    pub(crate) fn error_now(&mut self, at: usize) {
        let conn = self.conns[at].as_ref().expect("the channel is there");
        if !conn.closing.is_some_and(|c| c.errored) {
            self.error(at);
        }
    }
}
