//! Owners of verbs objects: device contexts, protection domains, memory regions, completion queues
//! and queue pairs.
//!
//! ```text
//!   Ctx (librdmacm keeps it open for ever)
//!    └─ Domain (PD) <─ Mr (keeps its arena)
//!                   <─ Cq <─ Qp            an arrow keeps its target alive, so drops are in order
//! ```
//!
//! One thread posts to a queue pair and polls a completion queue at a time (that is the fabric's,
//! by `&mut`); the objects may be dropped by another one. What cannot be destroyed is logged and
//! leaked: the kernel frees it with the process.

use ibverbs_sys as v;
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use usurp_reactor::mem::Arena;

/// A device that librdmacm has opened.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub(super) struct Ctx(NonNull<v::ibv_context>);

// SAFETY: a context may be used by any thread (ibv_open_device(3): the library is thread safe), and
// `rdmacm::hold_devices` keeps it open as long as the process lives.
unsafe impl Send for Ctx {}
// SAFETY: as above.
unsafe impl Sync for Ctx {}

/// What a device can do, as far as we ask.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub(super) struct DeviceLimits {
    /// Work requests of one queue.
    pub(super) qp_wr_max: u32,
    /// Entries of one completion queue.
    pub(super) cqe_max: u32,
    /// RDMA READs that a queue pair may have in flight as their requester.
    pub(super) rd_atomic_out: u8,
    /// RDMA READs that a queue pair may have in flight as their responder.
    pub(super) rd_atomic_in: u8,
}

/// What `ibv_get_async_event` told.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub(super) struct AsyncEvent {
    /// `IBV_EVENT_*`.
    pub(super) kind: u32,
    /// The queue pair's `qp_context`, for events of a queue pair.
    pub(super) qp_context: Option<u64>,
}

impl Ctx {
    pub(super) fn new(raw: *mut v::ibv_context) -> Option<Ctx> {
        NonNull::new(raw).map(Ctx)
    }

    fn device(self) -> NonNull<v::ibv_device> {
        // SAFETY: the context is open, see the type.
        let device = unsafe { (*self.0.as_ptr()).device };
        NonNull::new(device).expect("an open context has its device")
    }

    /// Kernel name, such as `mlx5_0`.
    pub(super) fn name(self) -> String {
        // SAFETY: the device of an open context stays in the library's list (`Ctx`).
        let name = unsafe { (*self.device().as_ptr()).name };
        let bytes: Vec<u8> = name.iter().map(|c| *c as u8).take_while(|b| *b != 0).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Whether it speaks iWARP: the sink of an RDMA READ then needs remote-write permission.
    pub(super) fn is_iwarp(self) -> bool {
        // SAFETY: as in `name`.
        let transport = unsafe { (*self.device().as_ptr()).transport_type };
        transport == v::IBV_TRANSPORT_IWARP
    }

    pub(super) fn limits(self) -> io::Result<DeviceLimits> {
        let mut attr = v::ibv_device_attr::default();
        // SAFETY: the context is open (`Ctx`), and `attr` outlives the call.
        let rc = unsafe { v::ibv_query_device(self.0.as_ptr(), &mut attr) };
        if rc != 0 {
            return Err(io::Error::from_raw_os_error(rc));
        }
        Ok(DeviceLimits {
            qp_wr_max: attr.max_qp_wr.max(0) as u32,
            cqe_max: attr.max_cqe.max(0) as u32,
            rd_atomic_out: attr.max_qp_init_rd_atom.clamp(0, 255) as u8,
            rd_atomic_in: attr.max_qp_rd_atom.clamp(0, 255) as u8,
        })
    }

    /// Whether a port's link is InfiniBand, rather than Ethernet.
    pub(super) fn is_infiniband(self, port: u8) -> bool {
        let mut attr = v::ibv_port_attr::default();
        // SAFETY: the context is open (`Ctx`); `attr` is longer than the struct that this function
        // of the library's first ABI fills, and zeroed beyond (ibv_query_port in verbs.h).
        let rc = unsafe { v::ibv_query_port(self.0.as_ptr(), port, (&raw mut attr).cast()) };
        rc == 0 && u32::from(attr.link_layer) == v::IBV_LINK_LAYER_INFINIBAND
    }

    /// Where asynchronous events arrive.
    pub(super) fn async_fd(self) -> BorrowedFd<'static> {
        // SAFETY: the context is open (`Ctx`).
        let fd = unsafe { (*self.0.as_ptr()).async_fd };
        // SAFETY: open as long as the context, that is as long as the process (`Ctx`).
        unsafe { BorrowedFd::borrow_raw(fd) }
    }

    /// The next asynchronous event, acknowledged; the descriptor must be non-blocking.
    pub(super) fn next_async(self) -> Option<AsyncEvent> {
        // SAFETY: all-zero is a valid event: a union of pointers and a number.
        let mut event: v::ibv_async_event = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open (`Ctx`), and `event` outlives the call.
        if unsafe { v::ibv_get_async_event(self.0.as_ptr(), &mut event) } != 0 {
            return None;
        }
        let kind = event.event_type;
        let of_qp = matches!(
            kind,
            v::IBV_EVENT_QP_FATAL
                | v::IBV_EVENT_QP_REQ_ERR
                | v::IBV_EVENT_QP_ACCESS_ERR
                | v::IBV_EVENT_COMM_EST
                | v::IBV_EVENT_SQ_DRAINED
                | v::IBV_EVENT_PATH_MIG
                | v::IBV_EVENT_PATH_MIG_ERR
                | v::IBV_EVENT_QP_LAST_WQE_REACHED
        );
        let qp_context = of_qp.then(|| {
            // SAFETY: for these kinds the library fills `element.qp` (ibv_get_async_event(3)).
            let qp = unsafe { event.element.qp };
            // SAFETY: ibv_destroy_qp waits for the acknowledgement below, so the queue pair lives.
            unsafe { (*qp).qp_context as u64 }
        });
        // SAFETY: got above, acknowledged once.
        unsafe { v::ibv_ack_async_event(&mut event) };
        Some(AsyncEvent { kind, qp_context })
    }
}

/// The name of an asynchronous event, for logs.
pub(super) fn async_name(kind: u32) -> String {
    // SAFETY: returns a static string for every number (ibv_event_type_str(3)).
    let text = unsafe { v::ibv_event_type_str(kind) };
    if text.is_null() {
        return format!("event {kind}");
    }
    // SAFETY: not null, and a static string as above.
    unsafe { std::ffi::CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// A protection domain.
#[derive(Debug)]
pub(super) struct Domain {
    /// Its device.
    ctx: Ctx,
    /// Freed on drop; regions, completion queues and queue pairs keep us alive.
    pd: NonNull<v::ibv_pd>,
}

// SAFETY: protection domains may be used by any thread (the library is thread safe).
unsafe impl Send for Domain {}
// SAFETY: as above.
unsafe impl Sync for Domain {}

impl Domain {
    pub(super) fn new(ctx: Ctx) -> io::Result<Arc<Domain>> {
        // SAFETY: the context is open (`Ctx`).
        let pd = unsafe { v::ibv_alloc_pd(ctx.0.as_ptr()) };
        let pd = NonNull::new(pd).ok_or_else(io::Error::last_os_error)?;
        Ok(Arc::new(Domain { ctx, pd }))
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`, freed once; whatever lies in it keeps an Arc to us.
        let rc = unsafe { v::ibv_dealloc_pd(self.pd.as_ptr()) };
        complain("protection domain", rc);
    }
}

fn complain(what: &str, rc: i32) {
    if rc != 0 {
        let error = io::Error::from_raw_os_error(rc);
        tracing::warn!(%error, "a {what} could not be freed");
    }
}

/// A registered arena.
#[derive(Debug)]
pub(super) struct Mr {
    /// Freed on drop.
    mr: NonNull<v::ibv_mr>,
    /// Its protection domain.
    _domain: Arc<Domain>,
    /// The memory; must stay mapped while registered, so it is dropped after `drop`.
    _arena: Arc<Arena>,
}

// SAFETY: regions may be freed by any thread (the library is thread safe).
unsafe impl Send for Mr {}

impl Mr {
    /// Registers a whole arena: local write, and remote write where iWARP demands it of the sinks
    /// of RDMA READs.
    pub(super) fn new(domain: &Arc<Domain>, arena: &Arc<Arena>) -> io::Result<Mr> {
        let mut access = v::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0;
        if domain.ctx.is_iwarp() {
            access |= v::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0;
        }
        let addr = arena.addr() as *mut libc::c_void;
        // SAFETY: the arena's whole mapping, kept alive by the Arc below until after
        // deregistration.
        let mr =
            unsafe { v::ibv_reg_mr(domain.pd.as_ptr(), addr, arena.len(), access as libc::c_int) };
        let mr = NonNull::new(mr).ok_or_else(io::Error::last_os_error)?;
        Ok(Mr { mr, _domain: domain.clone(), _arena: arena.clone() })
    }

    pub(super) fn lkey(&self) -> u32 {
        // SAFETY: registered in `new`, alive until `drop`.
        unsafe { (*self.mr.as_ptr()).lkey }
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // SAFETY: registered in `new`, freed once.
        let rc = unsafe { v::ibv_dereg_mr(self.mr.as_ptr()) };
        complain("memory region", rc);
    }
}

/// A completion queue; never armed.
#[derive(Debug)]
pub(super) struct Cq {
    /// Freed on drop.
    cq: NonNull<v::ibv_cq>,
    /// Its device's function, looked up once.
    poll: unsafe extern "C" fn(*mut v::ibv_cq, libc::c_int, *mut v::ibv_wc) -> libc::c_int,
    /// Outlives the queue.
    domain: Arc<Domain>,
}

// SAFETY: completion queues may be used by any thread (the library is thread safe).
unsafe impl Send for Cq {}
// SAFETY: as above.
unsafe impl Sync for Cq {}

impl Cq {
    pub(super) fn new(domain: &Arc<Domain>, entries: u32) -> io::Result<Arc<Cq>> {
        let ctx = domain.ctx.0.as_ptr();
        let none = std::ptr::null_mut();
        // SAFETY: the context is open (`Ctx`); no event channel; completion vector 0 always exists.
        let cq =
            unsafe { v::ibv_create_cq(ctx, entries as libc::c_int, none, std::ptr::null_mut(), 0) };
        let cq = NonNull::new(cq).ok_or_else(io::Error::last_os_error)?;
        // SAFETY: the context is open (`Ctx`).
        let poll = unsafe { (*ctx).ops.poll_cq }.expect("every provider can poll");
        Ok(Arc::new(Cq { cq, poll, domain: domain.clone() }))
    }

    /// Takes at most `into.len()` completions; an error means that the queue is broken.
    #[inline]
    pub(super) fn poll(&self, into: &mut [v::ibv_wc]) -> Result<usize, i32> {
        let room = into.len() as libc::c_int;
        // SAFETY: the queue lives, and `into` has room for as many as we say.
        let count = unsafe { (self.poll)(self.cq.as_ptr(), room, into.as_mut_ptr()) };
        if count < 0 { Err(count) } else { Ok(count as usize) }
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        // SAFETY: created in `new`, freed once; queue pairs that use it keep an Arc to us.
        let rc = unsafe { v::ibv_destroy_cq(self.cq.as_ptr()) };
        complain("completion queue", rc);
    }
}

type PostSend =
    unsafe extern "C" fn(*mut v::ibv_qp, *mut v::ibv_send_wr, *mut *mut v::ibv_send_wr) -> i32;
type PostRecv =
    unsafe extern "C" fn(*mut v::ibv_qp, *mut v::ibv_recv_wr, *mut *mut v::ibv_recv_wr) -> i32;

/// A reliable-connected queue pair.
#[derive(Debug)]
pub(super) struct Qp {
    /// Freed on drop.
    qp: NonNull<v::ibv_qp>,
    /// Its device's functions, looked up once.
    send: PostSend,
    /// As `send`.
    recv: PostRecv,
    /// Outlives the queue pair; has the protection domain.
    _cq: Arc<Cq>,
}

// SAFETY: queue pairs may be used by any thread (the library is thread safe).
unsafe impl Send for Qp {}

/// Depths of a queue pair, as asked for or as they are.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub(super) struct QpCaps {
    /// Places of the send queue.
    pub(super) send_wr: u32,
    /// Places of the receive queue.
    pub(super) recv_wr: u32,
    /// Bytes that a SEND may carry inline.
    pub(super) inline: u32,
}

impl Qp {
    /// Creates one in RESET; `context` comes back in asynchronous events. Returns what it can do.
    pub(super) fn new(cq: &Arc<Cq>, want: QpCaps, context: u64) -> io::Result<(Qp, QpCaps)> {
        let mut attr = v::ibv_qp_init_attr {
            qp_context: context as *mut libc::c_void,
            send_cq: cq.cq.as_ptr(),
            recv_cq: cq.cq.as_ptr(),
            srq: std::ptr::null_mut(),
            cap: v::ibv_qp_cap {
                max_send_wr: want.send_wr,
                max_recv_wr: want.recv_wr,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: want.inline,
            },
            qp_type: v::ibv_qp_type::IBV_QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: domain and completion queue live, kept by the Arc below; `attr` is initialised.
        let qp = unsafe { v::ibv_create_qp(cq.domain.pd.as_ptr(), &mut attr) };
        let qp = NonNull::new(qp).ok_or_else(io::Error::last_os_error)?;
        // SAFETY: the context is open (`Ctx`).
        let ops = unsafe { &(*cq.domain.ctx.0.as_ptr()).ops };
        let send = ops.post_send.expect("every provider can send");
        let recv = ops.post_recv.expect("every provider can receive");
        let caps = QpCaps {
            send_wr: attr.cap.max_send_wr,
            recv_wr: attr.cap.max_recv_wr,
            inline: attr.cap.max_inline_data,
        };
        Ok((Qp { qp, send, recv, _cq: cq.clone() }, caps))
    }

    pub(super) fn number(&self) -> u32 {
        // SAFETY: created in `new`, alive until `drop`.
        unsafe { (*self.qp.as_ptr()).qp_num }
    }

    /// Changes attributes, among them the state.
    pub(super) fn modify(&self, mut attr: v::ibv_qp_attr, mask: i32) -> io::Result<()> {
        // SAFETY: the queue pair lives, and `attr` outlives the call.
        let rc = unsafe { v::ibv_modify_qp(self.qp.as_ptr(), &mut attr, mask) };
        if rc == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(rc)) }
    }

    /// Into the error state: everything outstanding is flushed.
    pub(super) fn error(&self) -> io::Result<()> {
        let qp_state = v::ibv_qp_state::IBV_QPS_ERR;
        let attr = v::ibv_qp_attr { qp_state, ..Default::default() };
        self.modify(attr, v::ibv_qp_attr_mask::IBV_QP_STATE.0 as i32)
    }

    /// Posts a list that is linked through, in one call. On an error: how many were posted.
    #[inline]
    pub(super) fn post_send(&self, list: &mut [v::ibv_send_wr]) -> Result<(), (usize, i32)> {
        let first = list.as_mut_ptr();
        let mut bad = std::ptr::null_mut();
        // SAFETY: the queue pair lives; `list` is linked within itself (`wr::Scratch`) and ends
        // with null, and its gather entries lie in the same scratch.
        let rc = unsafe { (self.send)(self.qp.as_ptr(), first, &mut bad) };
        if rc == 0 { Ok(()) } else { Err((position(first, bad, list.len()), rc)) }
    }

    /// As `post_send`, for receives.
    #[inline]
    pub(super) fn post_recv(&self, list: &mut [v::ibv_recv_wr]) -> Result<(), (usize, i32)> {
        let first = list.as_mut_ptr();
        let mut bad = std::ptr::null_mut();
        // SAFETY: as in `post_send`.
        let rc = unsafe { (self.recv)(self.qp.as_ptr(), first, &mut bad) };
        if rc == 0 { Ok(()) } else { Err((position(first, bad, list.len()), rc)) }
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        // SAFETY: created in `new`, freed once; its events are acknowledged as they are read.
        let rc = unsafe { v::ibv_destroy_qp(self.qp.as_ptr()) };
        complain("queue pair", rc);
    }
}

/// Which element of a list `bad_wr` points at. A provider that leaves it unset has posted nothing.
fn position<T>(first: *const T, bad: *const T, len: usize) -> usize {
    let bytes = (bad as usize).wrapping_sub(first as usize);
    let at = bytes / size_of::<T>();
    if bad.is_null() || at >= len { 0 } else { at }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_wr_becomes_an_index() {
        let list = [0u64; 4];
        let first = list.as_ptr();
        for (at, item) in list.iter().enumerate() {
            assert_eq!(position(first, &raw const *item, 4), at);
        }
        assert_eq!(position(first, std::ptr::null(), 4), 0);
        assert_eq!(position(first, first.wrapping_add(4), 4), 0);
        assert_eq!(position(first, first.wrapping_sub(1), 4), 0);
    }
}
