//! What a reactor needs of an RDMA device, behind one interface: reliable-connected queue pairs
//! with posted
//! receives, sends, RDMA READ and RDMA WRITE on the data side ([`Fabric`]), and connection
//! management with
//! private data on the control side ([`Cm`]).
//!
//! ```text
//!   control thread                          reactor (one thread, one core)
//!   +-----------+   ConnectRequest  +-----------------------------------------------+
//!   |    Cm     | ----------------> |  Fabric                                       |
//!   | listeners |     Endpoint      |   QP -- RQ  <- post_recv(list)                |
//!   | sockets   | ----------------> |      -- SQ  <- post_send(list)                |
//!   |           | <---------------- |   CQ (one, shared by all QPs) -> poll(batch)  |
//!   +-----------+     release()     +-----------------------------------------------+
//! ```
//!
//! * [`shm`]: two processes of one machine over shared memory. The embedded default, and fast.
//! * [`verbs`] (feature `verbs`): RDMA devices, by libibverbs and librdmacm.
//! * [`any`]: both behind one, for a target that listens by both.
//!
//! What the interface never does: it knows nothing of SRP, allocates nothing per request, and
//! takes no lock.
//! A failed request is a completion (the peer's or the caller's addresses), a full queue is a
//! [`PostError`].
//! The semantics are those of `ibv_post_recv(3)` and `ibv_post_send(3)`, see [`PostError`].

#![deny(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;
use usurp_reactor::Nanos;
use usurp_reactor::mem::Arena;

pub mod any;
pub mod shm;
#[cfg(feature = "verbs")]
pub mod verbs;

/// Names a queue pair of one [`Fabric`]: index in the low, generation in the high 16 bits. A
/// number is not
/// used again soon after `release`, so a stale one is noticed instead of hitting the wrong queue
/// pair.
#[derive(Copy, Clone, Eq, PartialEq, Debug, Hash)]
pub struct QpNum(pub u32);

/// Local key of a registered arena; valid in the [`Fabric`] that gave it out.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub struct Lkey(pub u32);

/// One contiguous piece of registered local memory.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub struct Sge {
    /// Address in this process; inside the arena that `lkey` names.
    pub addr: u64,
    /// Bytes.
    pub len: u32,
    /// Key of the arena.
    pub lkey: Lkey,
}

/// A receive request: one incoming SEND fills at most `sge.len` bytes at `sge.addr`. Bytes of the
/// buffer
/// beyond the received length are undefined afterwards.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub struct RecvWr {
    /// Comes back in the completion.
    pub wr_id: u64,
    /// Where the message goes.
    pub sge: Sge,
}

/// Memory of the peer.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub struct Remote {
    /// Virtual address as the peer named it.
    pub va: u64,
    /// The peer's key.
    pub rkey: u32,
}

/// What a send request does.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub enum SendOp {
    /// The message goes into a receive that the peer posted; waits while it has posted none.
    Send,
    /// RDMA WRITE: local memory to the peer's. Length 0 is legal and checks no key.
    Write {
        /// Destination.
        remote: Remote,
    },
    /// RDMA READ: the peer's memory to local memory. Length 0 is legal and checks no key.
    Read {
        /// Source.
        remote: Remote,
    },
}

/// A send request.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub struct SendWr {
    /// Comes back in the completion. Encode the operation here: completions do not carry it.
    pub wr_id: u64,
    /// Operation.
    pub op: SendOp,
    /// Local side.
    pub sge: Sge,
    /// Complete even on success. Errors always complete. An unsignaled request holds its place in
    /// the send
    /// queue until a later signaled one completes.
    pub signaled: bool,
    /// Wait for earlier READs of this queue pair first.
    pub fence: bool,
}

/// How a request ended.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
#[repr(u8)]
pub enum WcStatus {
    /// Done.
    Success,
    /// The message did not fit the posted receive, or exceeds what the fabric can send.
    LocalLength,
    /// `sge` lies outside of the arena that its lkey names.
    LocalProtection,
    /// Unknown rkey, range outside of the region, or access that the region does not grant.
    RemoteAccess,
    /// The peer found the request malformed.
    RemoteInvalid,
    /// The peer did not answer.
    RetryExceeded,
    /// The queue pair was in error before this request was executed.
    Flushed,
    /// The queue pair failed: protocol of the fabric violated, or device error.
    Fatal,
}

/// One completion. There is no opcode on purpose: on errors real devices do not report it reliably.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub struct Completion {
    /// The queue pair.
    pub qp: QpNum,
    /// The request's `wr_id`.
    pub wr_id: u64,
    /// How it ended. Anything but `Success` means that the queue pair is in error.
    pub status: WcStatus,
    /// Bytes received; only valid for successful receives.
    pub byte_len: u32,
}

/// Why a request could not be posted.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub enum PostCause {
    /// The send or receive queue has no free place.
    QueueFull,
    /// No such queue pair (released, or never was).
    BadState,
    /// `sge.len` exceeds 2^31, the largest message of a reliable connection.
    BadSge,
}

/// A list was posted only in part. As with `bad_wr` of `ibv_post_recv(3)`: requests before `index`
/// are posted
/// and will complete; the one at `index` and all after it are not posted and never will complete.
#[derive(Copy, Clone, Eq, PartialEq, Debug, thiserror::Error)]
#[error("request {index} of the list was not posted: {cause:?}")]
pub struct PostError {
    /// First request that was not posted.
    pub index: usize,
    /// Why.
    pub cause: PostCause,
}

/// Completions that one call of [`Fabric::poll`] can bring.
pub const BATCH: usize = 32;

/// A fixed list of at most [`BATCH`] completions; dereferences to a slice.
#[derive(Debug)]
pub struct CompletionBatch {
    /// The first `len` are valid.
    items: [Completion; BATCH],
    /// Valid items, at most `BATCH`.
    len: usize,
}

impl CompletionBatch {
    /// An empty list.
    pub const fn new() -> Self {
        let none = Completion { qp: QpNum(0), wr_id: 0, status: WcStatus::Flushed, byte_len: 0 };
        CompletionBatch { items: [none; BATCH], len: 0 }
    }

    /// Forgets all.
    #[inline]
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// No room for another.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.len == BATCH
    }

    /// Places left.
    #[inline]
    pub fn room(&self) -> usize {
        BATCH - self.len
    }

    /// Appends; asserts that there is room.
    #[inline]
    pub fn push(&mut self, item: Completion) {
        assert!(self.len < BATCH);
        self.items[self.len] = item;
        self.len += 1;
    }

    /// The completions.
    #[inline]
    pub fn as_slice(&self) -> &[Completion] {
        &self.items[..self.len]
    }
}

impl Default for CompletionBatch {
    fn default() -> Self {
        Self::new()
    }
}

impl std::ops::Deref for CompletionBatch {
    type Target = [Completion];
    #[inline]
    fn deref(&self) -> &[Completion] {
        self.as_slice()
    }
}

/// What a queue pair can do.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub struct QpLimits {
    /// Places of the send queue.
    pub max_send_wr: u32,
    /// Places of the receive queue.
    pub max_recv_wr: u32,
    /// Largest SEND whose buffer may be reused when `post_send` returns; 0 = none.
    pub max_inline: u32,
    /// RDMA READs in flight on the wire; more may be posted.
    pub max_rd_atomic: u32,
    /// Local pieces of one READ.
    pub max_sge_rd: u32,
}

/// What went wrong outside of the data path.
#[derive(Debug, thiserror::Error)]
pub enum FabricError {
    /// A fixed table is full.
    #[error("no room for another {what} (limit {limit})")]
    Exhausted {
        /// What there is no room for.
        what: &'static str,
        /// The limit.
        limit: usize,
    },
    /// Another process serves this address.
    #[error("another target is serving at {0}")]
    InUse(String),
    /// The connection is unknown, or not in the state for this call.
    #[error("connection {conn:?}: {why}")]
    BadConnection {
        /// Which.
        conn: ConnId,
        /// Why not.
        why: &'static str,
    },
    /// The caller's arguments do not fit.
    #[error("{0}")]
    Invalid(String),
    /// The operating system refused.
    #[error("{what}: {source}")]
    Os {
        /// What was tried.
        what: String,
        /// Its answer.
        source: std::io::Error,
    },
}

impl FabricError {
    /// An operating-system error with what was tried.
    pub fn os(what: impl Into<String>, source: impl Into<std::io::Error>) -> Self {
        FabricError::Os { what: what.into(), source: source.into() }
    }
}

/// Data plane of one reactor: protection domain, one completion queue and its queue pairs. Owned
/// by one thread.
pub trait Fabric {
    /// What the CM side makes of an accepted connection.
    type Endpoint: Send;

    /// Makes an arena usable in requests. The fabric keeps the arena alive.
    fn register(&mut self, arena: &Arc<Arena>) -> Result<Lkey, FabricError>;

    /// Creates the queue pair of a connection; receives may be posted from now on.
    fn adopt(&mut self, ep: Self::Endpoint) -> Result<QpNum, (FabricError, Self::Endpoint)>;

    /// Posts receives in order, with one doorbell.
    fn post_recv(&mut self, qp: QpNum, list: &[RecvWr]) -> Result<(), PostError>;

    /// Posts sends in order, with one doorbell.
    fn post_send(&mut self, qp: QpNum, list: &[SendWr]) -> Result<(), PostError>;

    /// Appends completions to `out` as far as it has room, fair over the queue pairs. Returns how
    /// many.
    fn poll(&mut self, now: Nanos, out: &mut CompletionBatch) -> usize;

    /// Queue pair into error: everything outstanding completes with `Flushed`. Idempotent; a stale
    /// number is
    /// ignored.
    fn set_error(&mut self, qp: QpNum);

    /// Of a queue pair in error: no request of it is being executed, nor will be, so the memory
    /// of unsignaled ones whose completion never comes is free too. Ask this before `release`.
    fn is_drained(&self, _qp: QpNum) -> bool {
        true
    }

    /// Destroys the queue pair. Its completions never come again, polled or not. The endpoint is
    /// to be dropped
    /// by the control thread. Panics on a stale number (our bug).
    fn release(&mut self, qp: QpNum) -> Self::Endpoint;

    /// What the queue pair can do. Panics on a stale number (our bug).
    fn limits(&self, qp: QpNum) -> QpLimits;
}

/// Names a connection of one [`Cm`]; never reused.
#[derive(Copy, Clone, Eq, PartialEq, Debug, Hash, PartialOrd, Ord)]
pub struct ConnId(pub u64);

/// Which layout of SRP_LOGIN_REQ the private data has (reference 1.2, 1.3).
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub enum LoginFormat {
    /// 64 bytes, by IB/CM.
    IbCm64,
    /// 56 bytes, by RDMA/CM.
    RdmaCm56,
}

/// What happened to a connection or listener.
#[derive(Debug)]
pub enum CmEvent {
    /// A peer wants to connect: answer with `endpoint` + `accept`, or with `reject`.
    ConnectRequest {
        /// The connection.
        conn: ConnId,
        /// Index of the listener, in order of creation.
        listener: usize,
        /// Name of the peer, for logs.
        peer: String,
        /// Layout of the private data.
        format: LoginFormat,
        /// SRP_LOGIN_REQ.
        private_data: Vec<u8>,
    },
    /// The peer got our answer.
    Established {
        /// The connection.
        conn: ConnId,
    },
    /// The connection is gone; comes exactly once for each connection that was not rejected.
    /// Answer with
    /// `destroy`.
    Disconnected {
        /// The connection.
        conn: ConnId,
        /// Reason, for logs.
        why: String,
    },
    /// A listener failed and accepts no more.
    ListenerGone {
        /// Its index.
        listener: usize,
        /// Reason.
        why: String,
    },
}

/// Connection management; used by the control thread only, may block.
pub trait Cm {
    /// What `Fabric::adopt` takes.
    type Endpoint;

    /// Waits for the next event; `None` = the time is up, or somebody woke us.
    fn next_event(&mut self, timeout: Option<Duration>) -> Result<Option<CmEvent>, FabricError>;

    /// The endpoint of a requested connection, for `Fabric::adopt`; before `accept`, once.
    fn endpoint(&mut self, conn: ConnId) -> Result<Self::Endpoint, FabricError>;

    /// Answers a ConnectRequest with yes. Post receives before.
    fn accept(&mut self, conn: ConnId, private_data: &[u8]) -> Result<(), FabricError>;

    /// Answers a ConnectRequest with no, and forgets the connection.
    fn reject(&mut self, conn: ConnId, private_data: &[u8]);

    /// Asks the peer to disconnect; `Disconnected` follows.
    fn disconnect(&mut self, conn: ConnId);

    /// Forgets the connection and frees the endpoint.
    fn destroy(&mut self, conn: ConnId, ep: Option<Self::Endpoint>);
}

const _: () = assert!(std::mem::size_of::<Completion>() == 24);
const _: () = assert!(std::mem::size_of::<RecvWr>() == 24);
