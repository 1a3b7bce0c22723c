//! [`Listener`]: connection management of the target by librdmacm. One control thread owns it.
//!
//! ```text
//!              endpoint + accept (REP)        RTU, or a message came (rdma_notify)
//!  Requested ------------------------> Accepted ------------------------------> Live
//!     | reject (REJ)                      |  REJ, no RTU                          | DREQ, DREP,
//!     v                                   v                                       v device gone
//!  (forgotten)                          Gone <------------------------------------+
//!                                         | destroy
//!                                         v
//!                  lingering: see `linger`
//! ```
//!
//! `Disconnected` is delivered exactly once for each connection that was requested, unless it was
//! destroyed before. Identifiers are destroyed here only, and before their queue pair: the kernel's
//! CM still knows the connection until then, and a queue-pair number that is used again in that
//! time would be refused by the peer as stale. Events are acknowledged as they are read, so that no
//! destruction waits for one.

use super::device::{AsyncEvent, Ctx, DeviceLimits, async_name};
use super::fabric::{Endpoint, Inner, Step};
use super::linger::Lingering;
use super::listen::{LISTENING, Listening, RdmaAddress, no_rdma_cm};
use super::rdmacm::{self, Channel, Event, Id, Request};
use super::wr::Ring;
use super::{Link, QpConfig, ffi};
use crate::shm::Waker;
use crate::{Cm, CmEvent, ConnId, FabricError, LoginFormat};
use ibverbs_sys as v;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Connections are numbered from 1 up to here; the shm fabric's numbers are greater.
const CONN_MAX: u64 = (1 << 32) - 1;
/// READs in flight on one queue pair: what Linux's initiator promises, and LIO's value.
const RD_ATOMIC_MAX: u8 = 4;
/// RNR timer code: a peer that finds no receive posted tries again after 0.64 ms, not 655 ms.
const MIN_RNR_TIMER: u8 = 12;
/// Token of the event channel in epoll.
const TOKEN_CHANNEL: u64 = 0;
/// Token of the waker.
const TOKEN_WAKER: u64 = 1;
/// Token of the first device.
const TOKEN_DEVICE: u64 = 2;
/// Events of one source per wait.
const ROUND: usize = 32;

/// Bits of an attribute mask that some kernels set although they mean nothing for a queue pair on
/// InfiniBand (they belong to Ethernet addresses); librdmacm takes them out as well.
const MASK_NOT_INFINIBAND: i32 = 0x00e0_0000;

/// What the listener grants.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub struct ListenerParams {
    /// Queue depths of each connection.
    pub qp: QpConfig,
    /// Connections in all.
    pub connections_max: usize,
    /// Connect requests that wait in the kernel for us.
    pub backlog: i32,
}

/// See the diagram.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
enum State {
    Requested,
    Accepted,
    Live,
    Gone,
}

/// One connection.
struct Conn {
    /// The identifier.
    id: Id,
    /// "192.0.2.1:41234".
    peer: String,
    /// See the diagram.
    state: State,
    /// Shared with the endpoint.
    link: Arc<Link>,
    /// What the peer and its device allow.
    grant: Request,
    /// The endpoint was handed out.
    has_endpoint: bool,
    /// DREQ or DREP was sent.
    disconnecting: bool,
    /// The device went away: nothing lingers.
    device_gone: bool,
}

/// A device whose asynchronous events we read.
struct Device {
    ctx: Ctx,
    limits: DeviceLimits,
}

/// Connection management of the verbs fabric; any number of listening addresses.
pub struct Listener {
    params: ListenerParams,
    /// Everything we wait for.
    epoll: OwnedFd,
    /// Ends waits.
    waker: Waker,
    /// By listener index; none = failed.
    listening: Vec<Option<Listening>>,
    /// By connection number.
    conns: BTreeMap<u64, Conn>,
    /// What is left of destroyed connections.
    lingering: Lingering<Id, Endpoint>,
    /// Number of the next connection.
    next_conn: u64,
    /// Events not delivered yet.
    events: VecDeque<CmEvent>,
    /// Devices known.
    devices: Vec<Device>,
    /// Dropped after all identifiers.
    channel: Rc<Channel>,
}

/// Whether a connection's number is one of this fabric.
pub(crate) fn is_ours(conn: ConnId) -> bool {
    conn.0 <= CONN_MAX
}

impl Listener {
    /// Without any address; see `listen`. Fails if the kernel has no RDMA connection manager.
    pub fn new(params: ListenerParams) -> Result<Listener, FabricError> {
        let channel = Channel::new().map_err(no_rdma_cm)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC);
        let epoll = epoll.map_err(|e| FabricError::os("epoll", e))?;
        let waker = Waker::new()?;
        for (fd, token) in [(channel.as_fd(), TOKEN_CHANNEL), (waker.as_fd(), TOKEN_WAKER)] {
            epoll::add(&epoll, fd, EventData::new_u64(token), EventFlags::IN)
                .map_err(|e| FabricError::os("epoll", e))?;
        }
        let mut listener = Listener {
            params,
            epoll,
            waker,
            listening: Vec::new(),
            conns: BTreeMap::new(),
            lingering: Lingering::new(),
            next_conn: 1,
            events: VecDeque::new(),
            devices: Vec::new(),
            channel,
        };
        let devices = rdmacm::hold_devices();
        if devices.is_empty() {
            tracing::warn!("there is no RDMA device yet; soft RoCE: see `usurp doctor`");
        }
        for ctx in devices {
            if let Err(error) = listener.device(ctx) {
                tracing::warn!(%error, "an RDMA device is not watched");
            }
        }
        Ok(listener)
    }

    /// Listens at an address; `[::]` takes IPv4 too. Returns the listener's index.
    pub fn listen(&mut self, addr: SocketAddr) -> Result<usize, FabricError> {
        let index = self.listening.len();
        let listening = Listening::new(&self.channel, addr, index, self.params.backlog)?;
        self.listening.push(Some(listening));
        Ok(index)
    }

    /// Where initiators can connect to by a listener: the addresses of this machine's RDMA ports
    /// that it listens at.
    pub fn addresses(&self, index: usize) -> Vec<RdmaAddress> {
        let Some(Some(listening)) = self.listening.get(index) else { return Vec::new() };
        listening.addresses(&self.channel)
    }

    /// A handle that ends a wait in `next_event`.
    pub fn waker(&self) -> Waker {
        self.waker.clone()
    }

    /// When the first of what lingers is to go; `next_event` must be called by then.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.lingering.next_deadline()
    }

    /// Connections known.
    pub fn connection_count(&self) -> usize {
        self.conns.len()
    }

    /// A device that a connection came by; its asynchronous events are read from now on.
    fn device(&mut self, ctx: Ctx) -> Result<DeviceLimits, FabricError> {
        if let Some(device) = self.devices.iter().find(|d| d.ctx == ctx) {
            return Ok(device.limits);
        }
        let name = ctx.name();
        let os = |e: io::Error| FabricError::os(format!("{name}: asynchronous events"), e);
        let limits = ctx.limits().map_err(os)?;
        watch(&self.epoll, ctx, TOKEN_DEVICE + self.devices.len() as u64).map_err(os)?;
        // librdmacm may have opened it just now: a reference of ours keeps it open.
        rdmacm::hold_devices();
        self.devices.push(Device { ctx, limits });
        Ok(limits)
    }

    /// Everything that the event channel has.
    fn on_channel(&mut self) -> Result<(), FabricError> {
        for _ in 0..ROUND {
            match rdmacm::next_event(&self.channel) {
                Ok(Some(event)) => self.on_cm_event(event),
                Ok(None) => return Ok(()),
                Err(e) => return Err(FabricError::os("rdma_get_cm_event", e)),
            }
        }
        Ok(())
    }

    fn on_cm_event(&mut self, mut event: Event) {
        if let Some(id) = event.id.take() {
            return self.on_request(id, event);
        }
        if event.context & LISTENING != 0 {
            return self.on_listener_event((event.context & !LISTENING) as usize, event.kind);
        }
        let conn = event.context;
        let status = event.status;
        let ends = [
            ffi::event::DISCONNECTED,
            ffi::event::REJECTED,
            ffi::event::UNREACHABLE,
            ffi::event::CONNECT_ERROR,
            ffi::event::TIMEWAIT_EXIT,
        ];
        if ends.contains(&event.kind) && self.lingering.on_answer(conn, Instant::now()) {
            return;
        }
        match event.kind {
            ffi::event::ESTABLISHED => {
                if let Some(c) = self.conns.get_mut(&conn).filter(|c| c.state == State::Accepted) {
                    c.state = State::Live;
                    self.events.push_back(CmEvent::Established { conn: ConnId(conn) });
                }
            }
            ffi::event::DISCONNECTED => {
                self.disconnect(ConnId(conn));
                self.gone(conn, "disconnected".to_owned());
            }
            ffi::event::REJECTED => {
                self.gone(conn, format!("the initiator rejected our answer (reason {status})"));
            }
            ffi::event::UNREACHABLE | ffi::event::CONNECT_ERROR => {
                self.gone(conn, format!("the initiator did not confirm (status {status})"));
            }
            ffi::event::TIMEWAIT_EXIT => self.gone(conn, "the connection timed out".to_owned()),
            ffi::event::DEVICE_REMOVAL => {
                if let Some(c) = self.conns.get_mut(&conn) {
                    c.device_gone = true;
                }
                self.gone(conn, "the RDMA device was removed".to_owned());
                self.lingering.forget(conn);
            }
            ffi::event::ADDR_CHANGE => {
                tracing::info!(conn, "the network address behind a connection has changed");
            }
            kind => tracing::debug!(conn, kind, status, "connection event"),
        }
    }

    fn on_request(&mut self, mut id: Id, event: Event) {
        let listener = (event.context & !LISTENING) as usize;
        if self.conns.len() >= self.params.connections_max {
            tracing::warn!("too many connections: a connect request is refused");
            // Whether or not the peer hears it, the identifier goes.
            let _ = id.reject(&[]);
            return;
        }
        let conn = self.next_conn;
        assert!(conn <= CONN_MAX, "connection numbers are used up");
        self.next_conn += 1;
        id.set_context(conn);
        let peer = id.peer().map_or_else(|| "unknown address".to_owned(), |a| a.to_string());
        let link = Link {
            qp_num: AtomicU32::new(0),
            arrived: AtomicBool::new(false),
            waker: self.waker.clone(),
        };
        self.events.push_back(CmEvent::ConnectRequest {
            conn: ConnId(conn),
            listener,
            peer: peer.clone(),
            format: LoginFormat::RdmaCm56,
            private_data: event.private_data,
        });
        self.conns.insert(
            conn,
            Conn {
                id,
                peer,
                state: State::Requested,
                link: Arc::new(link),
                grant: event.request,
                has_endpoint: false,
                disconnecting: false,
                device_gone: false,
            },
        );
    }

    fn on_listener_event(&mut self, index: usize, kind: u32) {
        if kind != ffi::event::DEVICE_REMOVAL {
            return tracing::debug!(index, kind, "event of a listener");
        }
        if let Some(Some(listening)) = self.listening.get_mut(index).map(Option::take) {
            let why = format!("the RDMA device of {} was removed", listening.addr);
            self.events.push_back(CmEvent::ListenerGone { listener: index, why });
        }
    }

    /// The connection ends; tells so once.
    fn gone(&mut self, conn: u64, why: String) {
        let Some(c) = self.conns.get_mut(&conn) else { return };
        if c.state != State::Gone {
            c.state = State::Gone;
            self.events.push_back(CmEvent::Disconnected { conn: ConnId(conn), why });
        }
    }

    /// Everything that a device has to say.
    fn on_device(&mut self, index: usize) {
        let Some(Device { ctx, .. }) = self.devices.get(index) else { return };
        let ctx = *ctx;
        for _ in 0..ROUND {
            let Some(event) = ctx.next_async() else { return };
            self.on_async(ctx, event);
        }
    }

    fn on_async(&mut self, ctx: Ctx, event: AsyncEvent) {
        let (device, name) = (ctx.name(), async_name(event.kind));
        match event.kind {
            v::IBV_EVENT_COMM_EST => {
                if let Some(conn) = event.qp_context.and_then(|c| self.conns.get(&c)) {
                    notify(conn);
                }
            }
            v::IBV_EVENT_QP_FATAL | v::IBV_EVENT_QP_REQ_ERR | v::IBV_EVENT_QP_ACCESS_ERR => {
                tracing::warn!(device, name, conn = event.qp_context, "a queue pair failed");
                if let Some(conn) = event.qp_context {
                    self.disconnect(ConnId(conn));
                    self.gone(conn, name);
                }
            }
            v::IBV_EVENT_DEVICE_FATAL | v::IBV_EVENT_CQ_ERR => {
                tracing::error!(device, name, "an RDMA device failed: its channels end");
                let of = |(n, c): (&u64, &Conn)| (c.id.ctx() == Some(ctx)).then_some(*n);
                let hit: Vec<u64> = self.conns.iter().filter_map(of).collect();
                hit.into_iter().for_each(|conn| self.gone(conn, name.clone()));
            }
            v::IBV_EVENT_PORT_ERR | v::IBV_EVENT_PORT_ACTIVE => {
                tracing::info!(device, name, "an RDMA port has changed");
            }
            _ => tracing::debug!(device, name, "asynchronous event"),
        }
    }

    /// Peers that have sent something have our REP, even if their RTU is lost or late.
    fn notify_arrived(&self) {
        let waiting = self.conns.values().filter(|c| c.state == State::Accepted);
        waiting.filter(|c| c.link.arrived.load(Ordering::Acquire)).for_each(notify);
    }

    /// Waits once, at most until `until`; true = somebody woke us.
    fn wait(&mut self, until: Option<Instant>) -> Result<bool, FabricError> {
        let earliest = self.next_deadline().into_iter().chain(until).min();
        let timeout = earliest.map(|at| at.saturating_duration_since(Instant::now()));
        let timeout = timeout.map(|d| rustix::time::Timespec {
            tv_sec: d.as_secs().min(1 << 20) as i64,
            tv_nsec: d.subsec_nanos().into(),
        });
        let blank = epoll::Event { flags: EventFlags::empty(), data: EventData::new_u64(0) };
        let mut ready = [blank; ROUND];
        let count = match epoll::wait(&self.epoll, &mut ready[..], timeout.as_ref()) {
            Ok(count) => count,
            Err(Errno::INTR) => 0,
            Err(e) => return Err(FabricError::os("epoll_wait", e)),
        };
        let mut woken = false;
        for event in &ready[..count] {
            let data = event.data;
            match data.u64() {
                TOKEN_CHANNEL => self.on_channel()?,
                TOKEN_WAKER => {
                    self.waker.clear();
                    self.notify_arrived();
                    woken = true;
                }
                token => self.on_device((token - TOKEN_DEVICE) as usize),
            }
        }
        Ok(woken)
    }

    /// The endpoint of a requested connection: everything that its queue pair is made by.
    fn make_endpoint(&mut self, conn: u64) -> Result<Endpoint, FabricError> {
        let c = &self.conns[&conn];
        let Some(ctx) = c.id.ctx() else {
            let why = "it is not bound to a device";
            return Err(FabricError::BadConnection { conn: ConnId(conn), why });
        };
        let limits = self.device(ctx)?;
        let c = self.conns.get_mut(&conn).expect("the caller looked");
        let out = c.grant.initiator_depth.min(RD_ATOMIC_MAX).min(limits.rd_atomic_out);
        c.grant = Request {
            initiator_depth: out,
            responder_resources: c
                .grant
                .responder_resources
                .min(RD_ATOMIC_MAX)
                .min(limits.rd_atomic_in),
        };
        if out == 0 {
            let why = "the initiator allows no RDMA READ";
            return Err(FabricError::BadConnection { conn: ConnId(conn), why });
        }
        let steps = steps(&c.id, ctx, c.grant).map_err(|e| {
            FabricError::os(format!("{}: attributes of the queue pair", ctx.name()), e)
        })?;
        let want = Endpoint::wanted(self.params.qp);
        let inner = Inner {
            qp: None,
            ctx,
            steps,
            link: c.link.clone(),
            conn,
            rd_atomic: out,
            sq: Ring::new(want.send_wr),
            rq: Ring::new(want.recv_wr),
            want,
            have: want,
        };
        c.has_endpoint = true;
        Ok(Endpoint { inner: Box::new(inner) })
    }
}

/// Attributes for INIT, RTR and RTS, before the request is answered.
fn steps(id: &Id, ctx: Ctx, grant: Request) -> io::Result<[Step; 3]> {
    let mut init = id.qp_attr(v::ibv_qp_state::IBV_QPS_INIT)?;
    let mut rtr = id.qp_attr(v::ibv_qp_state::IBV_QPS_RTR)?;
    let mut rts = id.qp_attr(v::ibv_qp_state::IBV_QPS_RTS)?;
    if !ctx.is_iwarp() {
        // The initiator has no business in our memory. (On iWARP it writes into the sinks of our
        // READs; the regions say which.)
        init.0.qp_access_flags = v::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0;
    }
    if ctx.is_infiniband(id.port()) {
        rtr.1 &= !MASK_NOT_INFINIBAND;
    }
    rtr.0.max_dest_rd_atomic = grant.responder_resources;
    rtr.0.min_rnr_timer = MIN_RNR_TIMER;
    rts.0.max_rd_atomic = grant.initiator_depth;
    Ok([init, rtr, rts])
}

/// ESTABLISHED need not wait for an RTU. Fails if that has arrived meanwhile.
fn notify(conn: &Conn) {
    if conn.state == State::Accepted {
        let result = conn.id.notify_established();
        tracing::debug!(peer = conn.peer, ?result, "a message came before the RTU");
    }
}

fn watch(epoll: &OwnedFd, ctx: Ctx, token: u64) -> io::Result<()> {
    let fd = ctx.async_fd();
    let flags = rustix::fs::fcntl_getfl(fd)?;
    rustix::fs::fcntl_setfl(fd, flags | rustix::fs::OFlags::NONBLOCK)?;
    epoll::add(epoll, fd, EventData::new_u64(token), EventFlags::IN)?;
    Ok(())
}

impl AsFd for Listener {
    /// Readable when `next_event` has something to do.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

impl Cm for Listener {
    type Endpoint = Endpoint;

    fn next_event(&mut self, timeout: Option<Duration>) -> Result<Option<CmEvent>, FabricError> {
        let until = timeout.map(|t| Instant::now() + t);
        loop {
            if let Some(event) = self.events.pop_front() {
                return Ok(Some(event));
            }
            let woken = self.wait(until)?;
            let now = Instant::now();
            self.lingering.expire(now);
            let late = until.is_some_and(|at| at <= now);
            if self.events.is_empty() && (woken || late) {
                return Ok(None);
            }
        }
    }

    fn endpoint(&mut self, conn: ConnId) -> Result<Endpoint, FabricError> {
        let ready = |c: &&Conn| c.state == State::Requested && !c.has_endpoint && !c.disconnecting;
        if self.conns.get(&conn.0).filter(ready).is_none() {
            return Err(FabricError::BadConnection { conn, why: "no endpoint in this state" });
        }
        self.make_endpoint(conn.0)
    }

    fn accept(&mut self, conn: ConnId, private_data: &[u8]) -> Result<(), FabricError> {
        if private_data.len() > rdmacm::REP_DATA_MAX {
            return Err(FabricError::Invalid("private data too long for an accept".to_owned()));
        }
        let ready = |c: &&mut Conn| c.state == State::Requested && c.has_endpoint;
        let Some(c) = self.conns.get_mut(&conn.0).filter(ready) else {
            let why = "not to be accepted in this state";
            return Err(FabricError::BadConnection { conn, why });
        };
        let qp_num = c.link.qp_num.load(Ordering::Acquire);
        // Before the call: a message may come, and be told of, while it runs.
        c.state = State::Accepted;
        if let Err(e) = c.id.accept(qp_num, c.grant, private_data) {
            self.gone(conn.0, format!("the answer could not be sent: {e}"));
        }
        Ok(())
    }

    fn reject(&mut self, conn: ConnId, private_data: &[u8]) {
        if let Some(c) = self.conns.remove(&conn.0)
            && let Err(error) = c.id.reject(private_data)
        {
            tracing::debug!(peer = c.peer, %error, "a reject was not sent");
        }
        let of = |e: &CmEvent| matches!(e, CmEvent::Disconnected { conn: c, .. } if *c == conn);
        self.events.retain(|event| !of(event));
    }

    fn disconnect(&mut self, conn: ConnId) {
        let Some(c) = self.conns.get_mut(&conn.0) else { return };
        if c.state == State::Gone || std::mem::replace(&mut c.disconnecting, true) {
            return;
        }
        if let Err(e) = c.id.disconnect() {
            self.gone(conn.0, format!("the disconnect request could not be sent: {e}"));
        }
    }

    fn destroy(&mut self, conn: ConnId, ep: Option<Endpoint>) {
        self.disconnect(conn);
        let of = |e: &CmEvent| match e {
            CmEvent::Established { conn: c } | CmEvent::Disconnected { conn: c, .. } => *c == conn,
            _ => false,
        };
        self.events.retain(|event| !of(event));
        let c = self.conns.remove(&conn.0);
        let device_gone = c.as_ref().is_some_and(|c| c.device_gone);
        // A connection that has ended waits for nothing; nor does one that never was.
        let keep = |c: &Conn| matches!(c.state, State::Accepted | State::Live);
        let id = c.and_then(|c| keep(&c).then_some(c.id));
        let ep = ep.filter(|ep| ep.inner.qp.is_some());
        if !device_gone {
            self.lingering.add(conn.0, id, ep, Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_rdma_gets_a_clear_answer() {
        let qp = QpConfig { max_send_wr: 16, max_recv_wr: 16 };
        let params = ListenerParams { qp, connections_max: 4, backlog: 4 };
        match Listener::new(params) {
            Ok(listener) => assert_eq!(listener.connection_count(), 0),
            Err(e) => assert!(e.to_string().contains("/dev/infiniband/rdma_cm"), "{e}"),
        }
    }
}
