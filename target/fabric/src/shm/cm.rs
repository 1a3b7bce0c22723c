//! [`Listener`]: connection management of the target over Unix sockets. One control thread owns it.
//!
//! ```text
//!            REQ           endpoint+accept (REP)        RTU
//!  AwaitReq ----> Requested ----------------> RepSent -----> Live
//!     |              | reject (REJ)              |            | disconnect (DREQ)
//!     | garbage,     v                           |            v
//!     | timeout    (forgotten)                   |         Closing - DREP, timeout -+
//!     v                                          v            v                     v
//!  (forgotten)        socket ended, DREQ, timeout, protocol error ------------> Gone -- destroy
//! ```
//!
//! `Disconnected` is delivered exactly once, on entering `Gone`. The socket is the lifeline: it
//! ends when the peer's process ends, however it ends. Peers that connect and say nothing are
//! bounded in number and time. Regions are mapped here, and unmapped here when an endpoint is
//! dropped; a reactor never does either.

use super::fabric::Endpoint;
use super::listen::ListenSocket;
use super::mem::{ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE, PeerMap, RingMem, Role};
use super::qp::{Qp, QpConfig};
use super::ring::UNIT;
use super::wire::{self, Message, Received};
use crate::{Cm, CmEvent, ConnId, FabricError, LoginFormat};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::SocketFlags;
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Token of the waker in epoll; listeners follow, connections start at `FIRST_CONN`.
const WAKER: u64 = 0;
const FIRST_CONN: u64 = 1 << 32;
/// How long a peer may take to answer our DREQ.
const DREP_TIMEOUT: Duration = Duration::from_secs(1);
/// Connections accepted, and events handled, per call of the kernel.
const ROUND: usize = 32;

/// What the listener grants.
#[derive(Clone, Debug)]
pub struct ListenerParams {
    /// Bytes of each ring; a power of two, at least 4 KiB. Holds at least twice the largest
    /// message.
    pub ring_bytes: usize,
    /// Queue depths of the target's side.
    pub qp: QpConfig,
    /// Time from connecting to REQ, and from REP to RTU.
    pub login_timeout: Duration,
    /// Peers that connected and have sent no REQ yet.
    pub half_open_max: usize,
    /// Connections in all.
    pub connections_max: usize,
    /// Bytes that one connection may register.
    pub region_bytes_max: u64,
    /// Accept memory that may shrink; tests only (they truncate it).
    #[doc(hidden)]
    pub allow_unsealed: bool,
}

impl Default for ListenerParams {
    fn default() -> Self {
        ListenerParams {
            ring_bytes: 64 * 1024,
            qp: QpConfig::default(),
            login_timeout: Duration::from_secs(5),
            half_open_max: 64,
            connections_max: 1024,
            region_bytes_max: 4 << 30,
            allow_unsealed: false,
        }
    }
}

/// See the diagram.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
enum State {
    AwaitReq,
    Requested,
    RepSent,
    Live,
    Closing,
    Gone,
}

/// One connection.
#[derive(Debug)]
struct Conn {
    /// The socket; none once the connection is gone.
    socket: Option<OwnedFd>,
    /// Index of the listener it came by.
    listener: usize,
    /// "pid 123 uid 0".
    peer: String,
    /// See the diagram.
    state: State,
    /// When the state ends by itself.
    deadline: Option<Instant>,
    /// Mapped regions, until `endpoint` takes them.
    maps: Vec<PeerMap>,
    /// The ring file, from `endpoint` until `accept` has sent it.
    ring_file: Option<OwnedFd>,
}

/// Wakes the thread in `next_event`, from any thread.
#[derive(Clone, Debug)]
pub struct Waker {
    /// An eventfd.
    fd: Arc<OwnedFd>,
}

impl Waker {
    /// One of its own, for another wait than a [`Listener`]'s.
    pub(crate) fn new() -> Result<Waker, FabricError> {
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        let fd = rustix::event::eventfd(0, flags).map_err(|e| FabricError::os("eventfd", e))?;
        Ok(Waker { fd: Arc::new(fd) })
    }

    /// Forgets wake-ups that were asked for.
    pub(crate) fn clear(&self) {
        let mut counter = [0u8; 8];
        // Nothing to forget is fine.
        let _ = rustix::io::read(&*self.fd, &mut counter[..]);
    }

    /// `next_event` returns `None` soon, now or at its next call.
    pub fn wake(&self) {
        // A full counter means that a wake-up is pending already.
        let _ = rustix::io::write(&*self.fd, &1u64.to_ne_bytes());
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Connection management of the shm fabric's target side; any number of listening sockets.
#[derive(Debug)]
pub struct Listener {
    /// Limits.
    params: ListenerParams,
    /// Everything we wait for.
    epoll: OwnedFd,
    /// Ends waits.
    waker: Waker,
    /// By listener index; none = failed.
    sockets: Vec<Option<ListenSocket>>,
    /// By connection number.
    conns: BTreeMap<u64, Conn>,
    /// Number of the next connection.
    next_conn: u64,
    /// Events not delivered yet.
    events: VecDeque<CmEvent>,
}

impl Listener {
    /// Without any socket; see `listen`.
    pub fn new(params: ListenerParams) -> Result<Listener, FabricError> {
        let size = params.ring_bytes;
        if !size.is_power_of_two() || !(64 * UNIT..=1 << 30).contains(&size) {
            return Err(FabricError::Invalid(format!(
                "ring of {size} bytes: must be a power of two from 4 KiB to 1 GiB"
            )));
        }
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC);
        let epoll = epoll.map_err(|e| FabricError::os("epoll", e))?;
        let waker = Waker::new()?;
        epoll::add(&epoll, &waker, EventData::new_u64(WAKER), EventFlags::IN)
            .map_err(|e| FabricError::os("epoll", e))?;
        Ok(Listener {
            params,
            epoll,
            waker,
            sockets: Vec::new(),
            conns: BTreeMap::new(),
            next_conn: FIRST_CONN,
            events: VecDeque::new(),
        })
    }

    /// Listens at `path` with file mode `mode` (0o600: the same user only); returns the listener's
    /// index.
    pub fn listen(&mut self, path: &Path, mode: u32) -> Result<usize, FabricError> {
        let index = self.sockets.len();
        let socket = ListenSocket::bind(path, mode)?;
        let token = EventData::new_u64(1 + index as u64);
        epoll::add(&self.epoll, &socket.fd, token, EventFlags::IN)
            .map_err(|e| FabricError::os("epoll", e))?;
        self.sockets.push(Some(socket));
        Ok(index)
    }

    /// A handle that ends a wait in `next_event`.
    pub fn waker(&self) -> Waker {
        self.waker.clone()
    }

    /// Largest message that the rings carry; max_it_iu_len and max_ti_iu_len must not exceed it.
    pub fn message_max(&self) -> usize {
        super::ring::largest_message(self.params.ring_bytes)
    }

    /// When the first deadline of a connection is; `next_event` must be called by then.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.conns.values().filter_map(|c| c.deadline).min()
    }

    /// Stops listening; connections live on. Removes the socket files.
    pub fn close_listeners(&mut self) {
        self.sockets.iter_mut().for_each(|socket| *socket = None);
    }

    /// Name of a connection's peer.
    pub fn peer(&self, conn: ConnId) -> Option<&str> {
        self.conns.get(&conn.0).map(|c| c.peer.as_str())
    }

    /// Connections known, half-open ones included.
    pub fn connection_count(&self) -> usize {
        self.conns.len()
    }

    /// Accepts what waits at a listener.
    fn on_listener(&mut self, index: usize) {
        for _ in 0..ROUND {
            let Some(Some(socket)) = self.sockets.get(index) else { return };
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            match rustix::net::accept_with(&socket.fd, flags) {
                Ok(fd) => self.on_accepted(index, fd),
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(e @ (Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS)) => {
                    // Level-triggered: without a pause we would spin until somebody closes
                    // something.
                    tracing::warn!(error = %e, "accept: out of resources");
                    std::thread::sleep(Duration::from_millis(10));
                    return;
                }
                Err(e) => {
                    self.sockets[index] = None;
                    let why = format!("accept: {e}");
                    self.events.push_back(CmEvent::ListenerGone { listener: index, why });
                    return;
                }
            }
        }
    }

    fn on_accepted(&mut self, listener: usize, socket: OwnedFd) {
        let half_open = self.conns.values().filter(|c| c.state == State::AwaitReq).count();
        if half_open >= self.params.half_open_max {
            return refuse(&socket, "too many connections without a login");
        }
        if self.conns.len() >= self.params.connections_max {
            return refuse(&socket, "too many connections");
        }
        let peer = match rustix::net::sockopt::socket_peercred(&socket) {
            Ok(c) => format!("pid {} uid {}", c.pid.as_raw_nonzero(), c.uid.as_raw()),
            Err(_) => "unknown process".to_owned(),
        };
        let token = EventData::new_u64(self.next_conn);
        if epoll::add(&self.epoll, &socket, token, EventFlags::IN).is_err() {
            return;
        }
        let deadline = Some(Instant::now() + self.params.login_timeout);
        let conn = Conn {
            socket: Some(socket),
            listener,
            peer,
            state: State::AwaitReq,
            deadline,
            maps: Vec::new(),
            ring_file: None,
        };
        self.conns.insert(self.next_conn, conn);
        self.next_conn += 1;
    }

    /// A connection's socket has something.
    fn on_conn(&mut self, id: u64) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let Some(socket) = &conn.socket else { return };
        match (conn.state, wire::receive(socket.as_fd())) {
            (_, Received::Nothing) => {}
            (State::AwaitReq, Received::Message(m, fds)) if m.kind == wire::REQ => {
                self.on_req(id, m, fds);
            }
            (State::AwaitReq, got) => {
                if let Received::Garbage(why) = got {
                    tracing::warn!(peer = conn.peer, why, "no login request");
                }
                self.conns.remove(&id);
            }
            (_, Received::End) => self.gone(id, "the initiator's end of the connection closed"),
            (State::RepSent, Received::Message(m, _)) if m.kind == wire::RTU => {
                conn.state = State::Live;
                conn.deadline = None;
                self.events.push_back(CmEvent::Established { conn: ConnId(id) });
            }
            (_, Received::Message(m, _)) if m.kind == wire::DREQ => {
                let _ = wire::send(socket.as_fd(), &Message::new(wire::DREP, &[]), &[]);
                self.gone(id, "the initiator disconnected");
            }
            // It crossed our disconnect request.
            (State::Closing, Received::Message(m, _)) if m.kind == wire::RTU => {}
            (State::Closing, Received::Message(m, _)) if m.kind == wire::DREP => {
                self.gone(id, "disconnected by the target");
            }
            (_, Received::Message(..)) => self.gone(id, "message out of order on the socket"),
            (_, Received::Garbage(why)) => self.gone(id, why),
        }
    }

    /// A connect request: maps the regions, or says why not.
    fn on_req(&mut self, id: u64, message: Message, fds: Vec<OwnedFd>) {
        let params = self.params.clone();
        let Some(conn) = self.conns.get_mut(&id) else { return };
        match map_regions(&params, &message, fds) {
            Ok(maps) => conn.maps = maps,
            Err(why) => {
                tracing::warn!(peer = conn.peer, why, "connect request refused");
                if let Some(socket) = &conn.socket {
                    refuse(socket, &why);
                }
                self.conns.remove(&id);
                return;
            }
        }
        conn.state = State::Requested;
        conn.deadline = None;
        let is_cm56 = message.format == 1;
        self.events.push_back(CmEvent::ConnectRequest {
            conn: ConnId(id),
            listener: conn.listener,
            peer: conn.peer.clone(),
            format: if is_cm56 { LoginFormat::RdmaCm56 } else { LoginFormat::IbCm64 },
            private_data: message.data,
        });
    }

    /// The connection ends; tells so once.
    fn gone(&mut self, id: u64, why: &str) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        if conn.state == State::Gone {
            return;
        }
        conn.state = State::Gone;
        conn.deadline = None;
        conn.socket = None;
        self.events.push_back(CmEvent::Disconnected { conn: ConnId(id), why: why.to_owned() });
    }

    /// Deadlines that have passed.
    fn expire(&mut self, now: Instant) {
        let due = |c: &Conn| c.deadline.is_some_and(|at| at <= now);
        let late: Vec<u64> = self.conns.iter().filter(|(_, c)| due(c)).map(|(id, _)| *id).collect();
        for id in late {
            match self.conns[&id].state {
                State::AwaitReq => {
                    self.conns.remove(&id);
                }
                State::RepSent => self.gone(id, "the initiator did not confirm the connection"),
                _ => self.gone(id, "the initiator did not answer the disconnect request"),
            }
        }
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
                WAKER => {
                    self.waker.clear();
                    woken = true;
                }
                id if id >= FIRST_CONN => self.on_conn(id),
                index => self.on_listener(index as usize - 1),
            }
        }
        Ok(woken)
    }

    fn bad(&self, conn: ConnId, why: &'static str) -> FabricError {
        FabricError::BadConnection { conn, why }
    }
}

/// Says why not; the caller closes the socket.
fn refuse(socket: &OwnedFd, why: &str) {
    let text = &why.as_bytes()[..why.len().min(200)];
    let _ = wire::send(socket.as_fd(), &Message::new(wire::REFUSED, text), &[]);
}

/// Checks and maps what a connect request lends.
fn map_regions(
    params: &ListenerParams,
    message: &Message,
    fds: Vec<OwnedFd>,
) -> Result<Vec<PeerMap>, String> {
    if message.data.len() > wire::REQ_DATA_MAX || message.format > 1 {
        return Err("malformed connect request".to_owned());
    }
    if fds.len() != message.regions.len() {
        let count = message.regions.len();
        return Err(format!("{count} regions, but {} descriptors", fds.len()));
    }
    let total = message.regions.iter().try_fold(0u64, |sum, r| sum.checked_add(r.len));
    if total.is_none_or(|sum| sum > params.region_bytes_max) {
        return Err(format!("regions exceed {} bytes in all", params.region_bytes_max));
    }
    let mut maps = Vec::with_capacity(fds.len());
    for (index, (desc, fd)) in message.regions.iter().zip(&fds).enumerate() {
        if (desc.rkey & 0xff) as usize != index {
            return Err(format!("region {index}: rkey {:#x} does not end in its index", desc.rkey));
        }
        if desc.access & !(ACCESS_REMOTE_READ | ACCESS_REMOTE_WRITE) != 0 {
            return Err(format!("region {index}: unknown access bits {:#x}", desc.access));
        }
        maps.push(PeerMap::new(*desc, fd, !params.allow_unsealed)?);
    }
    Ok(maps)
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
            self.expire(now);
            let late = until.is_some_and(|at| at <= now);
            if self.events.is_empty() && (woken || late) {
                return Ok(None);
            }
        }
    }

    fn endpoint(&mut self, conn: ConnId) -> Result<Endpoint, FabricError> {
        let ready = self
            .conns
            .get(&conn.0)
            .is_some_and(|c| c.state == State::Requested && c.ring_file.is_none());
        if !ready {
            return Err(self.bad(conn, "no endpoint in this state"));
        }
        let (rings, file) = RingMem::create(self.params.ring_bytes)?;
        let config = self.params.qp;
        let found = self.conns.get_mut(&conn.0).expect("checked above");
        found.ring_file = Some(file);
        let maps = std::mem::take(&mut found.maps);
        Ok(Endpoint { qp: Qp::new(Role::Target, rings, maps, None, config) })
    }

    fn accept(&mut self, conn: ConnId, private_data: &[u8]) -> Result<(), FabricError> {
        if private_data.len() > wire::REP_DATA_MAX {
            return Err(FabricError::Invalid("private data too long for an accept".to_owned()));
        }
        let bad = self.bad(conn, "not to be accepted in this state");
        let ring_bytes = self.params.ring_bytes as u32;
        let deadline = Instant::now() + self.params.login_timeout;
        let Some(found) = self.conns.get_mut(&conn.0) else { return Err(bad) };
        let (State::Requested, Some(file)) = (found.state, found.ring_file.take()) else {
            return Err(bad);
        };
        let Some(socket) = &found.socket else { return Err(bad) };
        let reply = Message { ring_bytes, ..Message::new(wire::REP, private_data) };
        match wire::send(socket.as_fd(), &reply, &[file.as_fd()]) {
            Ok(()) => {
                found.state = State::RepSent;
                found.deadline = Some(deadline);
            }
            Err(e) => self.gone(conn.0, &format!("the reply could not be sent: {e}")),
        }
        Ok(())
    }

    fn reject(&mut self, conn: ConnId, private_data: &[u8]) {
        let data = &private_data[..private_data.len().min(wire::REJ_DATA_MAX)];
        if let Some(Conn { socket: Some(socket), .. }) = self.conns.get(&conn.0) {
            let _ = wire::send(socket.as_fd(), &Message::new(wire::REJ, data), &[]);
        }
        self.conns.remove(&conn.0);
        let stale = |e: &CmEvent| matches!(e, CmEvent::Disconnected { conn: c, .. } if *c == conn);
        self.events.retain(|event| !stale(event));
    }

    fn disconnect(&mut self, conn: ConnId) {
        let Some(found) = self.conns.get_mut(&conn.0) else { return };
        let Some(socket) = &found.socket else { return };
        if found.state == State::Closing {
            return;
        }
        match wire::send(socket.as_fd(), &Message::new(wire::DREQ, &[]), &[]) {
            Ok(()) => {
                found.state = State::Closing;
                found.deadline = Some(Instant::now() + DREP_TIMEOUT);
            }
            Err(_) => self.gone(conn.0, "the disconnect request could not be sent"),
        }
    }

    fn destroy(&mut self, conn: ConnId, ep: Option<Endpoint>) {
        drop(ep);
        self.conns.remove(&conn.0);
        let of = |e: &CmEvent| match e {
            CmEvent::Established { conn: c } | CmEvent::Disconnected { conn: c, .. } => *c == conn,
            _ => false,
        };
        self.events.retain(|event| !of(event));
    }
}
