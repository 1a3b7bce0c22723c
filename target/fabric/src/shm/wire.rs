//! Messages of the connection socket, one per SOCK_SEQPACKET datagram, little-endian.
//!
//! ```text
//!    0 magic u32 | 4 version u16 | 6 kind u8 | 7 login format u8
//!    8 private data length u16 | 10 regions u16 | 12 ring bytes u32
//!   16 private data ... | regions: { rkey u32, access u32, va u64, len u64 } each
//!
//!   initiator                               target
//!     REQ  login request, regions, memfds  -->
//!                                          <--  REP login response, ring bytes, ring memfd
//!                                               REJ login reject      (SRP said no)
//!                                               REFUSED text          (the fabric said no)
//!     RTU                                  -->
//!     DREQ                                <-->  DREP                  either side may ask
//! ```
//!
//! A datagram must have exactly the length that its header says; anything else is refused.

use super::mem::REGIONS_MAX;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

const MAGIC: u32 = 0x4d48_5355;
const VERSION: u16 = 1;
const HEAD: usize = 16;
const REGION: usize = 24;
/// Private data of a REQ, REP and REJ at most (those of IB/CM), and of a REFUSED.
pub(crate) const REQ_DATA_MAX: usize = 92;
pub(crate) const REP_DATA_MAX: usize = 196;
pub(crate) const REJ_DATA_MAX: usize = 148;
const DATA_MAX: usize = 240;
/// Longest datagram.
pub(crate) const MESSAGE_MAX: usize = HEAD + DATA_MAX + REGIONS_MAX * REGION;

pub(crate) const REQ: u8 = 1;
pub(crate) const REP: u8 = 2;
pub(crate) const REJ: u8 = 3;
pub(crate) const REFUSED: u8 = 4;
pub(crate) const RTU: u8 = 5;
pub(crate) const DREQ: u8 = 6;
pub(crate) const DREP: u8 = 7;

/// A region as its owner describes it.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub(crate) struct RegionDesc {
    /// Key; the low byte is its index.
    pub(crate) rkey: u32,
    /// `ACCESS_*` bits.
    pub(crate) access: u32,
    /// First address in the owner's process.
    pub(crate) va: u64,
    /// Bytes.
    pub(crate) len: u64,
}

/// A message.
#[derive(Clone, Eq, PartialEq, Debug, Default)]
pub(crate) struct Message {
    /// REQ ... DREP.
    pub(crate) kind: u8,
    /// REQ: 0 = 64-byte login, 1 = 56-byte login.
    pub(crate) format: u8,
    /// REP: bytes of each ring.
    pub(crate) ring_bytes: u32,
    /// Private data, or the text of a REFUSED.
    pub(crate) data: Vec<u8>,
    /// REQ: the lent regions.
    pub(crate) regions: Vec<RegionDesc>,
}

impl Message {
    pub(crate) fn new(kind: u8, data: &[u8]) -> Message {
        Message { kind, data: data.to_vec(), ..Message::default() }
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        assert!(self.data.len() <= DATA_MAX && self.regions.len() <= REGIONS_MAX);
        let mut out = Vec::with_capacity(MESSAGE_MAX);
        out.extend_from_slice(&MAGIC.to_le_bytes());
        out.extend_from_slice(&VERSION.to_le_bytes());
        out.extend_from_slice(&[self.kind, self.format]);
        out.extend_from_slice(&(self.data.len() as u16).to_le_bytes());
        out.extend_from_slice(&(self.regions.len() as u16).to_le_bytes());
        out.extend_from_slice(&self.ring_bytes.to_le_bytes());
        out.extend_from_slice(&self.data);
        for region in &self.regions {
            out.extend_from_slice(&region.rkey.to_le_bytes());
            out.extend_from_slice(&region.access.to_le_bytes());
            out.extend_from_slice(&region.va.to_le_bytes());
            out.extend_from_slice(&region.len.to_le_bytes());
        }
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Message, &'static str> {
        let kind = kind_of(bytes).ok_or("not a message of this fabric and version")?;
        let data_len = usize::from(u16_at(bytes, 8));
        let count = usize::from(u16_at(bytes, 10));
        if data_len > DATA_MAX {
            return Err("private data too long");
        }
        if count > REGIONS_MAX {
            return Err("too many regions");
        }
        let regions_at = HEAD + data_len;
        if bytes.len() != regions_at + count * REGION {
            return Err("length does not fit the header");
        }
        let region = |i: usize| {
            let at = regions_at + i * REGION;
            RegionDesc {
                rkey: u32_at(bytes, at),
                access: u32_at(bytes, at + 4),
                va: u64_at(bytes, at + 8),
                len: u64_at(bytes, at + 16),
            }
        };
        Ok(Message {
            kind,
            format: bytes[7],
            ring_bytes: u32_at(bytes, 12),
            data: bytes[HEAD..regions_at].to_vec(),
            regions: (0..count).map(region).collect(),
        })
    }
}

/// The kind of a datagram, if it is one of ours.
pub(crate) fn kind_of(bytes: &[u8]) -> Option<u8> {
    let ours = bytes.len() >= HEAD && u32_at(bytes, 0) == MAGIC && u16_at(bytes, 4) == VERSION;
    if ours { Some(bytes[6]) } else { None }
}

/// A message without content.
pub(crate) fn plain(kind: u8) -> [u8; HEAD] {
    let mut out = [0; HEAD];
    out[..4].copy_from_slice(&MAGIC.to_le_bytes());
    out[4..6].copy_from_slice(&VERSION.to_le_bytes());
    out[6] = kind;
    out
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes[at..at + 2].try_into().expect("two bytes"))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// Sends a message and descriptors; never waits.
pub(crate) fn send(
    socket: BorrowedFd<'_>,
    message: &Message,
    fds: &[BorrowedFd<'_>],
) -> Result<(), Errno> {
    assert!(fds.len() <= REGIONS_MAX);
    let bytes = message.encode();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(REGIONS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)), "the space was sized for it");
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    rustix::net::sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, flags)?;
    Ok(())
}

/// What a socket had to say.
#[derive(Debug)]
pub(crate) enum Received {
    /// Nothing now.
    Nothing,
    /// The other end is gone.
    End,
    /// A message and the descriptors that came along.
    Message(Message, Vec<OwnedFd>),
    /// Something else; why.
    Garbage(&'static str),
}

/// Reads one datagram; never waits. Descriptors that we do not keep are closed here.
pub(crate) fn receive(socket: BorrowedFd<'_>) -> Received {
    let mut bytes = [0u8; MESSAGE_MAX + 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(REGIONS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let mut iov = [IoSliceMut::new(&mut bytes)];
    let got = match rustix::net::recvmsg(socket, &mut iov, &mut control, flags) {
        Ok(got) => got,
        Err(Errno::AGAIN | Errno::INTR) => return Received::Nothing,
        Err(_) => return Received::End,
    };
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if got.bytes == 0 {
        return Received::End;
    }
    if got.flags.intersects(ReturnFlags::CTRUNC) {
        return Received::Garbage("too many descriptors");
    }
    if got.flags.intersects(ReturnFlags::TRUNC) || got.bytes > MESSAGE_MAX {
        return Received::Garbage("message too long");
    }
    match Message::decode(&bytes[..got.bytes]) {
        Ok(message) => Received::Message(message, fds),
        Err(why) => Received::Garbage(why),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Message {
        let region = RegionDesc { rkey: 0xabcd_0000, access: 3, va: 0x7f00_0000_0000, len: 4096 };
        Message {
            kind: REQ,
            format: 1,
            ring_bytes: 65536,
            data: (0..92).collect(),
            regions: vec![region, RegionDesc { rkey: 1, ..region }],
        }
    }

    #[test]
    fn comes_back_as_it_was() {
        assert_eq!(Message::decode(&sample().encode()), Ok(sample()));
        assert_eq!(Message::decode(&plain(DREQ)), Ok(Message::new(DREQ, &[])));
    }

    #[test]
    fn each_truncation_is_refused() {
        let bytes = sample().encode();
        for len in 0..bytes.len() {
            assert!(Message::decode(&bytes[..len]).is_err(), "{len}");
        }
        let mut longer = bytes.clone();
        longer.push(0);
        assert!(Message::decode(&longer).is_err());
    }

    #[test]
    fn no_changed_byte_panics() {
        let bytes = sample().encode();
        for at in 0..HEAD {
            for value in 0..=255 {
                let mut changed = bytes.clone();
                changed[at] = value;
                let _ = Message::decode(&changed);
            }
        }
    }
}
