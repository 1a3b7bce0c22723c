//! Owners of librdmacm objects: event channels and identifiers; events as plain values.
//!
//! An identifier is used and destroyed by the control thread only. Events are copied and
//! acknowledged at once: `rdma_destroy_id` waits for unacknowledged ones, and private data is
//! invalid afterwards.

use super::device::Ctx;
use super::ffi::{self, rdma_cm_event, rdma_cm_id, rdma_conn_param, rdma_event_channel};
use ibverbs_sys::{ibv_qp_attr, ibv_qp_state};
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::rc::Rc;

/// Private data that a REP carries to the peer over every transport we serve.
pub(super) const REP_DATA_MAX: usize = 196;
/// Private data that a REJ carries.
pub(super) const REJ_DATA_MAX: usize = 148;

/// Where connection events arrive; non-blocking.
#[derive(Debug)]
pub(super) struct Channel(NonNull<rdma_event_channel>);

impl Channel {
    pub(super) fn new() -> io::Result<Rc<Channel>> {
        // SAFETY: no precondition.
        let raw = unsafe { ffi::rdma_create_event_channel() };
        let channel = Channel(NonNull::new(raw).ok_or_else(io::Error::last_os_error)?);
        let flags = rustix::fs::fcntl_getfl(channel.as_fd())?;
        rustix::fs::fcntl_setfl(channel.as_fd(), flags | rustix::fs::OFlags::NONBLOCK)?;
        Ok(Rc::new(channel))
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: created in `new`, alive until `drop`.
        let fd = unsafe { (*self.0.as_ptr()).fd };
        // SAFETY: the channel keeps the descriptor open, and the borrow keeps the channel.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: created in `new`, freed once; identifiers keep an Rc to us, so all are gone.
        unsafe { ffi::rdma_destroy_event_channel(self.0.as_ptr()) };
    }
}

/// Which attributes a peer asked for.
#[derive(Copy, Clone, Eq, PartialEq, Debug, Default)]
pub(super) struct Request {
    /// RDMA READs of the peer that we would answer at a time.
    pub(super) responder_resources: u8,
    /// RDMA READs that the peer answers at a time.
    pub(super) initiator_depth: u8,
}

/// A connection event.
#[derive(Debug)]
pub(super) struct Event {
    /// One of `ffi::event`.
    pub(super) kind: u32,
    /// Negative errno or the transport's reason.
    pub(super) status: i32,
    /// Context of the identifier; of the listening one for a connect request.
    pub(super) context: u64,
    /// The new identifier of a connect request.
    pub(super) id: Option<Id>,
    /// Of a connect request.
    pub(super) request: Request,
    /// The user's part of the private data.
    pub(super) private_data: Vec<u8>,
}

/// The next event, without waiting.
pub(super) fn next_event(channel: &Rc<Channel>) -> io::Result<Option<Event>> {
    let mut raw: *mut rdma_cm_event = std::ptr::null_mut();
    // SAFETY: the channel lives; `raw` receives the event.
    if unsafe { ffi::rdma_get_cm_event(channel.0.as_ptr(), &mut raw) } != 0 {
        let error = io::Error::last_os_error();
        return match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
            _ => Err(error),
        };
    }
    // SAFETY: filled by the successful call above, ours until it is acknowledged below.
    let event = unsafe { &*raw };
    let requested = event.event == ffi::event::CONNECT_REQUEST;
    let of = if requested { event.listen_id } else { event.id };
    // SAFETY: the event holds its identifiers until it is acknowledged.
    let context = unsafe { (*of).context } as u64;
    let (data, len) = (event.conn.private_data, event.conn.private_data_len);
    let private_data = if !requested || data.is_null() {
        Vec::new()
    } else {
        // SAFETY: a connect request has as much private data as it says, until acknowledged.
        unsafe { std::slice::from_raw_parts(data.cast::<u8>(), usize::from(len)) }.to_vec()
    };
    let id = NonNull::new(event.id).filter(|_| requested);
    let got = Event {
        kind: event.event,
        status: event.status,
        context,
        id: id.map(|raw| Id { raw, _channel: channel.clone() }),
        request: Request {
            responder_resources: event.conn.responder_resources,
            initiator_depth: event.conn.initiator_depth,
        },
        private_data,
    };
    // SAFETY: got above, acknowledged once.
    unsafe { ffi::rdma_ack_cm_event(raw) };
    Ok(Some(got))
}

/// A communication identifier.
#[derive(Debug)]
pub(super) struct Id {
    /// Destroyed on drop.
    raw: NonNull<rdma_cm_id>,
    /// Outlives it: fields are dropped after `drop`.
    _channel: Rc<Channel>,
}

fn done(rc: i32) -> io::Result<()> {
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

impl Id {
    pub(super) fn new(channel: &Rc<Channel>, context: u64) -> io::Result<Id> {
        let mut raw = std::ptr::null_mut();
        let context = context as *mut libc::c_void;
        // SAFETY: the channel lives (the Rc below keeps it); `raw` receives the identifier.
        let rc =
            unsafe { ffi::rdma_create_id(channel.0.as_ptr(), &mut raw, context, ffi::RDMA_PS_TCP) };
        done(rc)?;
        let raw = NonNull::new(raw).expect("a created identifier");
        Ok(Id { raw, _channel: channel.clone() })
    }

    /// The number that its events carry.
    pub(super) fn set_context(&mut self, context: u64) {
        // SAFETY: alive until `drop`; the library only passes this field on.
        unsafe { (*self.raw.as_ptr()).context = context as *mut libc::c_void };
    }

    pub(super) fn bind(&self, addr: SocketAddr) -> io::Result<()> {
        match addr {
            SocketAddr::V4(a) => self.bind_raw(&mut to_v4(&a)),
            SocketAddr::V6(a) => self.bind_raw(&mut to_v6(&a)),
        }
    }

    fn bind_raw<T>(&self, addr: &mut T) -> io::Result<()> {
        let addr: *mut T = addr;
        // SAFETY: the identifier lives; `addr` is a whole sockaddr_in or sockaddr_in6 (`bind`), and
        // the library takes the length from its family.
        done(unsafe { ffi::rdma_bind_addr(self.raw.as_ptr(), addr.cast()) })
    }

    /// An IPv6 address will not take IPv4. Before `bind`.
    pub(super) fn ipv6_only(&self) -> io::Result<()> {
        let mut yes: libc::c_int = 1;
        let (level, name) = (ffi::OPTION_ID, ffi::OPTION_ID_AFONLY);
        let value = (&raw mut yes).cast();
        // SAFETY: the identifier lives; the option is an int, which outlives the call.
        let rc = unsafe {
            ffi::rdma_set_option(self.raw.as_ptr(), level, name, value, size_of::<libc::c_int>())
        };
        done(rc)
    }

    pub(super) fn listen(&self, backlog: i32) -> io::Result<()> {
        // SAFETY: the identifier lives.
        done(unsafe { ffi::rdma_listen(self.raw.as_ptr(), backlog) })
    }

    /// The device it is bound to.
    pub(super) fn ctx(&self) -> Option<Ctx> {
        // SAFETY: alive until `drop`.
        Ctx::new(unsafe { (*self.raw.as_ptr()).verbs })
    }

    /// The device's port.
    pub(super) fn port(&self) -> u8 {
        // SAFETY: alive until `drop`.
        unsafe { (*self.raw.as_ptr()).port_num }
    }

    /// The peer's address.
    pub(super) fn peer(&self) -> Option<SocketAddr> {
        // SAFETY: alive until `drop`; the field is plain data.
        from_storage(unsafe { &(*self.raw.as_ptr()).route.addr.dst })
    }

    /// Attributes for bringing a queue pair into `state`, and their mask.
    pub(super) fn qp_attr(&self, state: ibv_qp_state::Type) -> io::Result<(ibv_qp_attr, i32)> {
        let mut attr = ibv_qp_attr { qp_state: state, ..Default::default() };
        let mut mask = 0;
        // SAFETY: the identifier lives; both out parameters outlive the call.
        done(unsafe { ffi::rdma_init_qp_attr(self.raw.as_ptr(), &mut attr, &mut mask) })?;
        Ok((attr, mask))
    }

    /// Sends the REP for a queue pair that is ready to send.
    pub(super) fn accept(&self, qp_num: u32, grant: Request, data: &[u8]) -> io::Result<()> {
        let mut param = rdma_conn_param {
            private_data: data.as_ptr().cast(),
            private_data_len: clip(data, REP_DATA_MAX).len() as u8,
            responder_resources: grant.responder_resources,
            initiator_depth: grant.initiator_depth,
            flow_control: 1,
            retry_count: 7,
            rnr_retry_count: 7,
            srq: 0,
            qp_num,
        };
        // SAFETY: the identifier lives; `param` and its data outlive the call.
        done(unsafe { ffi::rdma_accept(self.raw.as_ptr(), &mut param) })
    }

    /// Sends a REJ, reason "consumer defined".
    pub(super) fn reject(&self, data: &[u8]) -> io::Result<()> {
        let data = clip(data, REJ_DATA_MAX);
        let (addr, len) = (data.as_ptr().cast(), data.len() as u8);
        // SAFETY: the identifier lives; the data outlives the call.
        done(unsafe { ffi::rdma_reject(self.raw.as_ptr(), addr, len) })
    }

    /// Sends a DREQ, or the DREP to one that has arrived.
    pub(super) fn disconnect(&self) -> io::Result<()> {
        // SAFETY: the identifier lives.
        done(unsafe { ffi::rdma_disconnect(self.raw.as_ptr()) })
    }

    /// The peer evidently has our REP: ESTABLISHED need not wait for its RTU.
    pub(super) fn notify_established(&self) -> io::Result<()> {
        let event = ibverbs_sys::IBV_EVENT_COMM_EST as i32;
        // SAFETY: the identifier lives.
        done(unsafe { ffi::rdma_notify(self.raw.as_ptr(), event) })
    }
}

impl Drop for Id {
    fn drop(&mut self) {
        // SAFETY: created by the library for us, destroyed once; its events are acknowledged.
        let rc = unsafe { ffi::rdma_destroy_id(self.raw.as_ptr()) };
        if let Err(error) = done(rc) {
            tracing::warn!(%error, "a connection identifier could not be destroyed");
        }
    }
}

/// Opens every device that librdmacm sees, and keeps them open for the life of the process: each
/// call takes another reference that is never given back.
pub(super) fn hold_devices() -> Vec<Ctx> {
    let mut count = 0;
    // SAFETY: `count` outlives the call.
    let list = unsafe { ffi::rdma_get_devices(&mut count) };
    if list.is_null() {
        return Vec::new();
    }
    // SAFETY: the library's list has `count` elements and is never freed (that is the point).
    let list = unsafe { std::slice::from_raw_parts(list, count.max(0) as usize) };
    list.iter().filter_map(|raw| Ctx::new(*raw)).collect()
}

/// What fits of private data.
fn clip(data: &[u8], max: usize) -> &[u8] {
    &data[..data.len().min(max)]
}

fn to_v4(a: &SocketAddrV4) -> libc::sockaddr_in {
    libc::sockaddr_in {
        sin_family: libc::AF_INET as u16,
        sin_port: a.port().to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(a.ip().octets()) },
        sin_zero: [0; 8],
    }
}

fn to_v6(a: &SocketAddrV6) -> libc::sockaddr_in6 {
    libc::sockaddr_in6 {
        sin6_family: libc::AF_INET6 as u16,
        sin6_port: a.port().to_be(),
        sin6_flowinfo: a.flowinfo().to_be(),
        sin6_addr: libc::in6_addr { s6_addr: a.ip().octets() },
        sin6_scope_id: a.scope_id(),
    }
}

fn from_storage(storage: &libc::sockaddr_storage) -> Option<SocketAddr> {
    let at: *const libc::sockaddr_storage = storage;
    match i32::from(storage.ss_family) {
        libc::AF_INET => {
            // SAFETY: the family says sockaddr_in, which is no longer and no more aligned.
            let a = unsafe { &*at.cast::<libc::sockaddr_in>() };
            let ip = Ipv4Addr::from(a.sin_addr.s_addr.to_ne_bytes());
            Some(SocketAddr::from((ip, u16::from_be(a.sin_port))))
        }
        libc::AF_INET6 => {
            // SAFETY: the family says sockaddr_in6, which is no longer and no more aligned.
            let a = unsafe { &*at.cast::<libc::sockaddr_in6>() };
            let ip = Ipv6Addr::from(a.sin6_addr.s6_addr);
            let port = u16::from_be(a.sin6_port);
            let flow = u32::from_be(a.sin6_flowinfo);
            Some(SocketAddrV6::new(ip, port, flow, a.sin6_scope_id).into())
        }
        _ => None,
    }
}

/// Addresses of this machine's network interfaces.
pub(super) fn local_addresses() -> Vec<SocketAddr> {
    let mut list = std::ptr::null_mut();
    // SAFETY: `list` receives the head.
    if unsafe { libc::getifaddrs(&mut list) } != 0 {
        return Vec::new();
    }
    let mut found = Vec::new();
    let mut at = list;
    while !at.is_null() {
        // SAFETY: an element of the list, freed only below.
        let entry = unsafe { &*at };
        at = entry.ifa_next;
        if entry.ifa_addr.is_null() {
            continue;
        }
        // SAFETY: not null; every socket address begins with its family.
        let family = unsafe { (*entry.ifa_addr).sa_family };
        let len = match i32::from(family) {
            libc::AF_INET => size_of::<libc::sockaddr_in>(),
            libc::AF_INET6 => size_of::<libc::sockaddr_in6>(),
            _ => continue,
        };
        // SAFETY: all-zero is a valid sockaddr_storage.
        let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
        let to = (&raw mut storage).cast::<u8>();
        // SAFETY: an address of that family has `len` bytes; the storage is longer.
        unsafe { std::ptr::copy_nonoverlapping(entry.ifa_addr.cast::<u8>(), to, len) };
        found.extend(from_storage(&storage));
    }
    // SAFETY: got above, freed once.
    unsafe { libc::freeifaddrs(list) };
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_data_is_clipped_to_what_the_message_carries() {
        let data = [7u8; 300];
        assert_eq!(clip(&data, REP_DATA_MAX).len(), 196);
        assert_eq!(clip(&data, REJ_DATA_MAX).len(), 148);
        assert_eq!(clip(&data[..52], REP_DATA_MAX).len(), 52);
        assert_eq!(clip(&data[..32], REJ_DATA_MAX).len(), 32);
    }

    fn there_and_back<T>(raw: &T) -> Option<SocketAddr> {
        // SAFETY: all-zero is a valid sockaddr_storage.
        let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
        let to = (&raw mut storage).cast::<u8>();
        let from: *const T = raw;
        // SAFETY: the storage is longer than either socket address.
        unsafe { std::ptr::copy_nonoverlapping(from.cast::<u8>(), to, size_of::<T>()) };
        from_storage(&storage)
    }

    #[test]
    fn addresses_survive_conversion() {
        let v4: SocketAddrV4 = "192.0.2.1:5555".parse().unwrap();
        assert_eq!(there_and_back(&to_v4(&v4)), Some(v4.into()));
        let v6 = SocketAddrV6::new("fe80::5054:ff:fe4a:b7b".parse().unwrap(), 5555, 0, 3);
        assert_eq!(there_and_back(&to_v6(&v6)), Some(v6.into()));
    }

    #[test]
    fn loopback_is_among_the_local_addresses() {
        assert!(local_addresses().iter().any(|a| a.ip().is_loopback()));
    }
}
