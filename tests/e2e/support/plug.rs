//! The target's Unix socket, by hand: datagrams as bytes and any file descriptors, after the layout
//! in the fabric's `wire.rs`. Shares no code with it.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Instant;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use super::{PATIENCE, process};

/// Kinds of datagrams.
pub const REQ: u8 = 1;
/// The login is accepted.
pub const REP: u8 = 2;
/// SRP says no.
pub const REJ: u8 = 3;
/// Confirms an acceptance.
pub const RTU: u8 = 5;
/// Asks to disconnect.
pub const DREQ: u8 = 6;
/// The fabric says no.
pub const REFUSED: u8 = 4;

/// A connected socket.
pub struct Plug(OwnedFd);

/// A lent region as the request describes it.
#[derive(Copy, Clone, Debug)]
pub struct Region {
    /// Key; the low byte must be its index.
    pub rkey: u32,
    /// 1 = may be written, 2 = may be read.
    pub access: u32,
    /// First address.
    pub va: u64,
    /// Bytes.
    pub len: u64,
}

impl Region {
    /// One that is right, `index`th of its request.
    pub fn of(index: u32, len: u64) -> Region {
        Region { rkey: 0xabcd_ef00 | index, access: 3, va: 0x7f00_0000_0000, len }
    }
}

/// The target's answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// A datagram: its kind and its private data.
    Datagram(u8, Vec<u8>),
    /// It hung up.
    End,
}

impl Answer {
    /// The text of a refusal.
    pub fn refused(self) -> String {
        match self {
            Answer::Datagram(REFUSED, text) => String::from_utf8(text).expect("text"),
            other => panic!("not a refusal: {other:?}"),
        }
    }
}

/// A datagram of this kind.
pub fn datagram(kind: u8, data: &[u8], regions: &[Region]) -> Vec<u8> {
    let mut out = 0x4d48_5355u32.to_le_bytes().to_vec();
    out.extend(1u16.to_le_bytes());
    out.extend([kind, 0]);
    out.extend((data.len() as u16).to_le_bytes());
    out.extend((regions.len() as u16).to_le_bytes());
    out.extend([0; 4]);
    out.extend(data);
    for region in regions {
        out.extend(region.rkey.to_le_bytes());
        out.extend(region.access.to_le_bytes());
        out.extend(region.va.to_le_bytes());
        out.extend(region.len.to_le_bytes());
    }
    out
}

/// A memory file of this size, with these seals.
pub fn memfd(bytes: u64, seals: SealFlags) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("e2e", flags).expect("a memory file can be made");
    rustix::fs::ftruncate(&fd, bytes).expect("a memory file can be sized");
    rustix::fs::fcntl_add_seals(&fd, seals).expect("a memory file can be sealed");
    fd
}

impl Plug {
    /// Connects.
    pub fn connect(socket: &Path) -> Plug {
        let flags = SocketFlags::CLOEXEC;
        let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        let fd = fd.expect("a socket can be made");
        let address = SocketAddrUnix::new(socket).expect("a short path");
        rustix::net::connect(&fd, &address).expect("the target listens");
        Plug(fd)
    }

    /// Sends a datagram with descriptors. False: the target has hung up.
    pub fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)), "at most 253 descriptors");
        }
        let flags = SendFlags::NOSIGNAL;
        match rustix::net::sendmsg(&self.0, &[IoSlice::new(bytes)], &mut control, flags) {
            Ok(_) => true,
            Err(Errno::PIPE | Errno::CONNRESET) => false,
            Err(why) => panic!("sendmsg: {why}"),
        }
    }

    /// The target's next datagram, or its hanging up.
    pub fn answer(&self) -> Answer {
        let until = Instant::now() + PATIENCE;
        while !process::wait_readable(&self.0, until.saturating_duration_since(Instant::now())) {
            assert!(Instant::now() < until, "the target neither answers nor hangs up");
        }
        let mut bytes = [0u8; 1024];
        match rustix::net::recv(&self.0, &mut bytes[..], RecvFlags::DONTWAIT) {
            Ok((0, _)) | Err(Errno::CONNRESET) => Answer::End,
            Ok((n, _)) => {
                assert!(n >= 16, "a datagram has a header");
                let len = usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
                Answer::Datagram(bytes[6], bytes[16..16 + len].to_vec())
            }
            Err(why) => panic!("recv: {why}"),
        }
    }

    /// Waits for the acceptance of a login; gives the file of both rings.
    pub fn accepted(&self) -> OwnedFd {
        assert!(process::wait_readable(&self.0, PATIENCE), "the target does not answer");
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut bytes = [0u8; 1024];
        let mut into = [IoSliceMut::new(&mut bytes)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let got = rustix::net::recvmsg(&self.0, &mut into, &mut control, flags);
        assert!(got.expect("a datagram").bytes > 16, "a datagram has a header");
        assert_eq!(bytes[6], REP, "not an acceptance");
        let rights = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        });
        rights.expect("an acceptance carries a file")
    }

    /// Sends one datagram and gives the answer.
    pub fn ask(socket: &Path, bytes: &[u8], fds: &[OwnedFd]) -> Answer {
        let plug = Plug::connect(socket);
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        plug.send(bytes, &fds);
        plug.answer()
    }
}
