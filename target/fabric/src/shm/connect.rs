//! The initiator's side of connecting: one request, one answer.
//!
//! Blocks at most for the given time. What the target sends is checked like anything from outside:
//! message lengths, and that the ring file is sealed and large enough.

use super::fabric::Endpoint;
use super::listen::seqpacket;
use super::mem::{Regions, RingMem, Role};
use super::qp::{Qp, QpConfig};
use super::wire::{self, Message, Received};
use crate::LoginFormat;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{SocketAddrUnix, SocketFlags};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

/// How to connect.
#[derive(Clone, Debug)]
pub struct ConnectParams {
    /// For everything.
    pub timeout: Duration,
    /// Queue depths of our side.
    pub qp: QpConfig,
    /// Layout of the login request.
    pub format: LoginFormat,
}

impl Default for ConnectParams {
    fn default() -> Self {
        ConnectParams {
            timeout: Duration::from_secs(10),
            qp: QpConfig::default(),
            format: LoginFormat::IbCm64,
        }
    }
}

/// A connection.
#[derive(Debug)]
pub struct Connected {
    /// For `ShmFabric::adopt`.
    pub endpoint: Endpoint,
    /// SRP_LOGIN_RSP.
    pub rsp_private_data: Vec<u8>,
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The target answered no; SRP_LOGIN_REJ.
    #[error("the target rejected the login")]
    Rejected(Vec<u8>),
    /// The fabric of the target refused, before SRP saw the request; its reason.
    #[error("the target refused the connection: {0}")]
    Refused(String),
    /// Nobody serves at the path.
    #[error("nobody serves at {0}")]
    NoTarget(String),
    /// No answer in time.
    #[error("no answer from the target in time")]
    TimedOut,
    /// The target broke the protocol.
    #[error("the target's answer: {0}")]
    Protocol(String),
    /// Arguments that cannot be sent.
    #[error("{0}")]
    Invalid(String),
    /// The operating system refused.
    #[error("{what}: {source}")]
    Os {
        /// What was tried.
        what: &'static str,
        /// Its answer.
        source: std::io::Error,
    },
}

fn os(what: &'static str) -> impl Fn(Errno) -> ConnectError {
    move |e| ConnectError::Os { what, source: e.into() }
}

/// Connects to the target at `path`, lending it `regions`.
pub fn connect(
    path: impl AsRef<Path>,
    private_data: &[u8],
    regions: &Regions,
    params: ConnectParams,
) -> Result<Connected, ConnectError> {
    if private_data.len() > wire::REQ_DATA_MAX {
        return Err(ConnectError::Invalid("login request longer than 92 bytes".to_owned()));
    }
    let until = Instant::now() + params.timeout;
    let socket = dial(path.as_ref(), until)?;
    let mut request = Message::new(wire::REQ, private_data);
    request.format = u8::from(params.format == LoginFormat::RdmaCm56);
    request.regions = regions.list.iter().map(|(_, desc)| *desc).collect();
    let fds: Vec<BorrowedFd<'_>> = regions.list.iter().filter_map(|(a, _)| a.fd()).collect();
    assert!(fds.len() == request.regions.len(), "Regions::add takes shared arenas only");
    wire::send(socket.as_fd(), &request, &fds).map_err(os("sending the login request"))?;
    let (reply, mut fds) = answer(&socket, until)?;
    match reply.kind {
        wire::REP => {}
        wire::REJ => return Err(ConnectError::Rejected(reply.data)),
        wire::REFUSED => {
            return Err(ConnectError::Refused(String::from_utf8_lossy(&reply.data).into_owned()));
        }
        kind => return Err(ConnectError::Protocol(format!("unexpected message {kind}"))),
    }
    let (Some(file), true) = (fds.pop(), fds.is_empty()) else {
        return Err(ConnectError::Protocol("it does not carry one ring file".to_owned()));
    };
    let rings = RingMem::open(&file, reply.ring_bytes as usize)
        .map_err(|e| ConnectError::Protocol(e.to_string()))?;
    wire::send(socket.as_fd(), &Message::new(wire::RTU, &[]), &[])
        .map_err(os("confirming the connection"))?;
    let qp = Qp::new(Role::Initiator, rings, Vec::new(), Some(socket), params.qp);
    Ok(Connected { endpoint: Endpoint { qp }, rsp_private_data: reply.data })
}

/// A connected, non-blocking socket.
fn dial(path: &Path, until: Instant) -> Result<OwnedFd, ConnectError> {
    let addr = SocketAddrUnix::new(path).map_err(os("socket path"))?;
    let socket = seqpacket(SocketFlags::NONBLOCK).map_err(os("socket"))?;
    loop {
        match rustix::net::connect(&socket, &addr) {
            Ok(()) => return Ok(socket),
            // The target's backlog is full.
            Err(Errno::AGAIN | Errno::INTR) if Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(Errno::AGAIN | Errno::INTR) => return Err(ConnectError::TimedOut),
            Err(Errno::NOENT | Errno::CONNREFUSED) => {
                return Err(ConnectError::NoTarget(path.display().to_string()));
            }
            Err(e) => return Err(os("connect")(e)),
        }
    }
}

/// Waits for the target's answer.
fn answer(socket: &OwnedFd, until: Instant) -> Result<(Message, Vec<OwnedFd>), ConnectError> {
    loop {
        match wire::receive(socket.as_fd()) {
            Received::Message(message, fds) => return Ok((message, fds)),
            Received::Garbage(why) => return Err(ConnectError::Protocol(why.to_owned())),
            Received::End => {
                return Err(ConnectError::Refused("it closed the connection".to_owned()));
            }
            Received::Nothing => {}
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ConnectError::TimedOut);
        }
        let timeout = rustix::time::Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: left.subsec_nanos().into(),
        };
        let mut fds = [PollFd::new(socket, PollFlags::IN)];
        match rustix::event::poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(os("poll")(e)),
        }
    }
}
