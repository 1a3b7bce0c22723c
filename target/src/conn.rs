//! One channel as its reactor keeps it: protocol state, ioctxs, receive and send rings, and the
//! lists that are posted once per turn.
//!
//! Owned by one reactor at a time; allocated and freed by the control thread. Work requests are
//! collected during a turn and handed to the fabric in two lists: first the receives, then the
//! sends, because a response may only grant a credit whose receive is posted already.
//!
//! ```text
//!   receive slots:  posted ──completion──> in use ──release──> repost list ──flush──> posted
//!                                            └─(CONNECTING, no ioctx)─> held, in order ─┘
//! ```

use std::collections::VecDeque;
use std::sync::Arc;

use usurp_fabric::{ConnId, Fabric, Lkey, QpNum, RecvWr, SendOp, SendWr, Sge};
use usurp_reactor::Nanos;
use usurp_reactor::mem::{Arena, Slots};
use usurp_srp::login::LoginAccepted;
use usurp_srp::target::{Channel, ChannelConfig};

use crate::ioctx::Ioctx;
use crate::mail::NexusInfo;
use crate::wrid::{Kind, WrId};

/// Sizes that every channel of this process shares.
#[derive(Copy, Clone, Debug)]
pub struct ChannelShape {
    /// Requests an initiator may have outstanding: the initial req_lim.
    pub credits: u32,
    /// Largest IU taken from an initiator, bytes.
    pub it_iu_max: u32,
    /// Largest IU sent to an initiator, bytes. Never changed: initiators keep buffers of this size
    /// over relogins.
    pub ti_iu_max: u32,
    /// Largest media transfer of one command, bytes.
    pub transfer_max: u32,
    /// Descriptors of one command at the most.
    pub descs_max: u32,
}

impl ChannelShape {
    /// Receives beyond the credits: one answer to a CRED_REQ and one to an AER_REQ, which cost no
    /// credit.
    const RECV_SPARE: u32 = 2;
    /// Send buffer of CRED_REQ.
    const SEND_CRED: u32 = 1;

    /// Receive slots: every credit, and the spare ones.
    pub fn recvs(&self) -> u32 {
        self.credits + Self::RECV_SPARE
    }

    /// Ioctxs: a response may be with the initiator, and its credit spent again, before its send
    /// completion is reaped.
    pub fn ioctxs(&self) -> u32 {
        self.credits * 2
    }

    /// Send slots: one per ioctx, and CRED_REQ's.
    pub fn sends(&self) -> u32 {
        self.ioctxs() + Self::SEND_CRED
    }

    /// Bytes of receive memory a channel takes.
    pub fn recv_bytes(&self) -> usize {
        Slots::bytes_needed(self.it_iu_max as usize, self.recvs())
    }

    /// Bytes of send memory a channel takes.
    pub fn send_bytes(&self) -> usize {
        Slots::bytes_needed(self.ti_iu_max as usize, self.sends())
    }

    /// Bytes of IU memory a channel takes, receive ring first.
    pub fn bytes(&self) -> usize {
        self.recv_bytes() + self.send_bytes()
    }

    /// Send-queue slots for RDMA that a channel asks for beside its responses.
    pub fn rdma_wrs(&self) -> u32 {
        self.credits * 2
    }

    /// Depth of the send queue that a channel asks for.
    pub fn send_queue(&self) -> u32 {
        self.sends() + self.rdma_wrs()
    }
}

/// A channel that is being brought down.
#[derive(Copy, Clone, Debug)]
pub struct Closing {
    /// Until then, commands already begun may still be answered; 0 = not any more.
    pub deadline: Nanos,
    /// The queue pair was put into the error state.
    pub errored: bool,
}

/// See the module's header.
pub struct Conn {
    /// The connection, as the connection manager knows it.
    pub conn: ConnId,
    /// Position in the reactor's channel table; part of each wr_id.
    pub index: u16,
    /// Distinguishes successive channels at one position; part of each wr_id.
    pub generation: u16,
    /// The queue pair; none before adoption.
    pub qp: Option<QpNum>,
    /// The nexus this channel belongs to.
    pub nexus: NexusInfo,
    /// Position of the nexus in the reactor's nexus table.
    pub nexus_at: u16,
    /// Protocol state.
    pub srp: Channel,
    /// Command state, same index as in `srp`.
    pub ioctxs: Box<[Ioctx]>,
    /// Receive ring.
    pub recv: Slots,
    /// Send ring: a slot per ioctx, then CRED_REQ's.
    pub send: Slots,
    /// Registration of both rings.
    pub iu_lkey: Lkey,
    /// Receive slots with IUs that cannot be served yet, in order of arrival, with their lengths.
    pub held: VecDeque<(u16, u32)>,
    /// Receives to post at the end of the turn.
    pub repost: Vec<RecvWr>,
    /// Sends to post at the end of the turn.
    pub sends: Vec<SendWr>,
    /// Ioctxs whose transfer waits for send-queue room, in order.
    pub sq_wait: VecDeque<u16>,
    /// Send-queue slots free for RDMA; those of responses are set aside.
    pub sq_free: u32,
    /// Send-queue slots for RDMA in all.
    pub sq_rdma: u32,
    /// Signalled sends whose completion is outstanding.
    pub sends_out: u32,
    /// Commands of this channel inside a bdev queue.
    pub in_bdev: u32,
    /// Already in the reactor's list of channels to flush.
    pub dirty: bool,
    /// Being brought down.
    pub closing: Option<Closing>,
    /// Signalled requests that the fabric did not take: they count as flushed once the queue pair
    /// is gone.
    pub lost: Vec<u64>,
    /// Arena of the rings, kept for registration.
    pub iu_arena: Arc<Arena>,
}

impl Conn {
    /// Allocates everything a channel needs. `offset` is where its rings begin in `iu_arena`.
    pub fn new(
        conn: ConnId,
        index: u16,
        generation: u16,
        login: &LoginAccepted,
        nexus: NexusInfo,
        shape: &ChannelShape,
        iu: (Arc<Arena>, usize),
    ) -> Box<Conn> {
        let (iu_arena, offset) = iu;
        let lead = login.imm_offset().unwrap_or(0) as usize;
        let recv =
            Slots::new(iu_arena.clone(), offset, shape.it_iu_max as usize, shape.recvs(), lead);
        let send = Slots::new(
            iu_arena.clone(),
            offset + shape.recv_bytes(),
            shape.ti_iu_max as usize,
            shape.sends(),
            0,
        );
        let srp = Channel::new(
            login,
            ChannelConfig {
                credits: shape.credits,
                ioctxs: shape.ioctxs(),
                max_ti_iu_len: shape.ti_iu_max,
                max_transfer: shape.transfer_max,
                max_descs: shape.descs_max,
            },
        );
        let ioctxs = shape.ioctxs() as usize;
        Box::new(Conn {
            conn,
            index,
            generation,
            qp: None,
            nexus,
            nexus_at: 0,
            srp,
            ioctxs: (0..ioctxs).map(|_| Ioctx::new()).collect(),
            recv,
            send,
            iu_lkey: Lkey(0),
            held: VecDeque::with_capacity(shape.recvs() as usize),
            repost: Vec::with_capacity(shape.recvs() as usize),
            sends: Vec::with_capacity(shape.send_queue() as usize),
            sq_wait: VecDeque::with_capacity(ioctxs),
            sq_free: 0,
            sq_rdma: 0,
            sends_out: 0,
            in_bdev: 0,
            dirty: false,
            closing: None,
            lost: Vec::with_capacity(shape.send_queue() as usize),
            iu_arena,
        })
    }

    /// The queue pair of an adopted channel.
    #[inline]
    pub fn qp(&self) -> QpNum {
        self.qp.expect("an adopted channel has a queue pair")
    }

    /// The wr_id for a work request of this channel.
    #[inline]
    pub fn wr_id(&self, kind: Kind, slot: u16) -> u64 {
        WrId { kind, slot, channel: self.index, generation: self.generation }.pack()
    }

    /// Gives a receive slot back: it is posted with the others at the end of the turn.
    #[inline]
    pub fn release_recv(&mut self, slot: u16) {
        let addr = self.recv.lend(u32::from(slot));
        let len = self.recv.slot_bytes() as u32;
        let sge = Sge { addr, len, lkey: self.iu_lkey };
        assert!(self.repost.len() < self.recv.count() as usize, "a receive slot is released twice");
        self.repost.push(RecvWr { wr_id: self.wr_id(Kind::Recv, slot), sge });
    }

    /// Adds the response in an ioctx's send slot to the list of sends.
    pub fn push_rsp(&mut self, id: u16, len: u32) {
        self.push_send(Kind::Rsp, id, len);
    }

    /// Adds the IU of `len` bytes in send slot `slot` to the list of sends, signalled.
    pub fn push_send(&mut self, kind: Kind, slot: u16, len: u32) {
        assert!(len as usize <= self.send.slot_bytes(), "IU is longer than its slot");
        let addr = self.send.lend(u32::from(slot));
        let sge = Sge { addr, len, lkey: self.iu_lkey };
        let wr_id = self.wr_id(kind, slot);
        self.push_wr(SendWr { wr_id, op: SendOp::Send, sge, signaled: true, fence: false });
    }

    /// Adds one work request to the list of sends.
    #[inline]
    pub fn push_wr(&mut self, wr: SendWr) {
        assert!(
            self.sends.len() < self.sends.capacity(),
            "send list is longer than the send queue"
        );
        self.sends_out += u32::from(wr.signaled);
        self.sends.push(wr);
    }

    /// Adds an SRP_CRED_REQ when one is due and its send slot is free.
    #[inline]
    pub fn push_cred_req(&mut self) {
        let slot = self.send.count() - 1;
        if !self.srp.cred_req_due() || self.closing.is_some() || self.send.is_lent(slot) {
            return;
        }
        if let Some(len) = self.srp.cred_req(self.send.bytes_mut(slot)) {
            self.push_send(Kind::Cred, slot as u16, len as u32);
        }
    }

    /// Posts both lists. Returns what the fabric refused; the channel cannot go on then.
    pub fn flush<F: Fabric>(&mut self, fabric: &mut F) -> Result<(), &'static str> {
        let qp = self.qp();
        if !self.repost.is_empty() {
            let posted = fabric.post_recv(qp, &self.repost);
            let done = posted.as_ref().map_or_else(|e| e.index, |()| self.repost.len());
            self.repost.drain(..done);
            posted.map_err(|_| "the fabric refused a receive")?;
        }
        if !self.sends.is_empty() {
            let posted = fabric.post_send(qp, &self.sends);
            let done = posted.as_ref().map_or_else(|e| e.index, |()| self.sends.len());
            self.sends.drain(..done);
            posted.map_err(|_| "the fabric refused a send")?;
        }
        Ok(())
    }

    /// Whether nothing of the channel is with the fabric or a bdev any more, so that it may be
    /// released.
    pub fn is_quiet(&self) -> bool {
        self.sends_out == self.lost.len() as u32
            && self.in_bdev == 0
            && self.recv.lent() == self.repost.len() as u32
    }
}
