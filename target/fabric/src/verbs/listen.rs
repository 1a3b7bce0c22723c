//! Listening by RDMA/CM: addresses, which of this machine's belong to RDMA ports, and why one is
//! refused.
//!
//! `[::]` means `0.0.0.0` too, by an identifier of its own: on iWARP one for both families gets
//! IPv4 peers with mapped addresses, which the kernel's rdma_cm cannot place. A wildcard listener
//! serves every device, those that come later too.

use super::rdmacm::{self, Channel, Id};
use crate::FabricError;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::rc::Rc;

/// Set in the context of a listening identifier, beside its index; the context of another one is
/// its connection's number.
pub(super) const LISTENING: u64 = 1 << 63;

/// An address of this machine that belongs to an RDMA port.
#[derive(Clone, Eq, PartialEq, Debug)]
pub struct RdmaAddress {
    /// Where an initiator connects to.
    pub addr: SocketAddr,
    /// The device, such as `mlx5_0`.
    pub device: String,
}

/// A listener: its identifiers have the same index in their contexts.
pub(super) struct Listening {
    /// Two for `[::]`. Destroyed on drop, which ends the listening.
    _ids: Vec<Id>,
    /// Where it listens.
    pub(super) addr: SocketAddr,
}

impl Listening {
    /// Listens; events carry `index`.
    pub(super) fn new(
        channel: &Rc<Channel>,
        addr: SocketAddr,
        index: usize,
        backlog: i32,
    ) -> Result<Listening, FabricError> {
        let bind = |addr: SocketAddr| {
            let id = Id::new(channel, LISTENING | index as u64)?;
            if addr.is_ipv6() {
                id.ipv6_only()?;
            }
            id.bind(addr)?;
            id.listen(backlog)?;
            Ok(id)
        };
        if !(addr.is_ipv6() && addr.ip().is_unspecified()) {
            let id = bind(addr).map_err(|e| refused(addr, e))?;
            return Ok(Listening { _ids: vec![id], addr });
        }
        let v4 = SocketAddr::from((Ipv4Addr::UNSPECIFIED, addr.port()));
        let mut ids = vec![bind(v4).map_err(|e| refused(v4, e))?];
        match bind(addr) {
            Ok(id) => ids.push(id),
            Err(e) if no_ipv6(&e) => return Ok(Listening { _ids: ids, addr: v4 }),
            Err(e) => return Err(refused(addr, e)),
        }
        Ok(Listening { _ids: ids, addr })
    }

    /// Where initiators can connect to.
    pub(super) fn addresses(&self, channel: &Rc<Channel>) -> Vec<RdmaAddress> {
        reached(self.addr, channel)
    }
}

/// Addresses of this machine's RDMA ports that a listener at `at` would serve; listens at nothing.
pub fn addresses_at(at: SocketAddr) -> Result<Vec<RdmaAddress>, FabricError> {
    Ok(reached(at, &Channel::new().map_err(no_rdma_cm)?))
}

/// The addresses of this machine's RDMA ports among those that `at` stands for.
fn reached(at: SocketAddr, channel: &Rc<Channel>) -> Vec<RdmaAddress> {
    let both = at.is_ipv6() && at.ip().is_unspecified();
    let mut found = Vec::new();
    for mut addr in rdmacm::local_addresses() {
        let fits = match at.ip() {
            ip if ip.is_unspecified() => both || addr.is_ipv4(),
            ip => ip == addr.ip(),
        };
        if !fits || addr.ip().is_loopback() || is_link_local(addr.ip()) {
            continue;
        }
        addr.set_port(0);
        // An address that no RDMA port has cannot be bound.
        let Ok(id) = Id::new(channel, LISTENING) else { continue };
        if id.bind(addr).is_err() {
            continue;
        }
        if let Some(ctx) = id.ctx() {
            addr.set_port(at.port());
            found.push(RdmaAddress { addr, device: ctx.name() });
        }
    }
    found
}

fn is_link_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.segments()[0] & 0xffc0 == 0xfe80,
    }
}

fn no_ipv6(e: &io::Error) -> bool {
    let no = [libc::EADDRNOTAVAIL, libc::EAFNOSUPPORT, libc::EPROTONOSUPPORT];
    e.raw_os_error().is_some_and(|errno| no.contains(&errno))
}

/// Why an address cannot be listened at.
fn refused(addr: SocketAddr, e: io::Error) -> FabricError {
    match e.raw_os_error() {
        Some(libc::EADDRINUSE) => FabricError::InUse(format!("rdma_cm {addr}")),
        Some(libc::ENODEV | libc::EADDRNOTAVAIL) => FabricError::Invalid(format!(
            "rdma_cm {addr}: no RDMA port has this address (`rdma link` shows the ports, \
             `usurp doctor` what is missing)"
        )),
        _ => FabricError::os(format!("rdma_cm {addr}: listening"), e),
    }
}

/// Why there is no event channel.
pub(super) fn no_rdma_cm(e: io::Error) -> FabricError {
    let soft = "`sudo modprobe rdma_rxe` and `sudo rdma link add rxe0 type rxe netdev eth0` \
                make a soft RoCE one";
    if !std::path::Path::new("/dev/infiniband/rdma_cm").exists() {
        return FabricError::Invalid(format!(
            "rdma_cm listeners need /dev/infiniband/rdma_cm, which is not there: type \
             `sudo modprobe rdma_ucm`; and they need an RDMA device: {soft}"
        ));
    }
    match e.raw_os_error() {
        Some(libc::ENODEV) => FabricError::Invalid(format!(
            "rdma_cm listeners need an RDMA device, and this machine has none that works: load \
             its driver; {soft}"
        )),
        _ => FabricError::os("/dev/infiniband/rdma_cm", e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn link_local_addresses_are_known() {
        for text in ["fe80::1", "169.254.3.4", "febf::9"] {
            assert!(is_link_local(text.parse().unwrap()), "{text}");
        }
        for text in ["fd00::1", "192.0.2.1", "2001:db8::1", "fec0::1"] {
            assert!(!is_link_local(text.parse().unwrap()), "{text}");
        }
    }

    #[test]
    fn refusals_say_what_to_do() {
        let addr: SocketAddr = "192.0.2.1:5555".parse().unwrap();
        let text = |errno| refused(addr, io::Error::from_raw_os_error(errno)).to_string();
        assert!(text(libc::EADDRINUSE).contains("another target is serving at rdma_cm 192.0.2.1"));
        assert!(text(libc::ENODEV).contains("rdma link"));
        let without = no_rdma_cm(io::Error::from_raw_os_error(libc::ENOENT)).to_string();
        assert!(without.contains("modprobe rdma_ucm") || without.contains("/dev/infiniband"));
    }
}
