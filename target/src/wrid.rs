//! What a work request id says: which kind of work, of which channel, for which slot.
//!
//! The operation is in the id because a completion with an error carries nothing else that can be
//! trusted. The generation tells a channel from an earlier one at the same position.
//!
//! ```text
//!   63      56 55      48 47        32 31        16 15         0
//!   │ (zero)  │  kind    │ generation │  channel   │   slot     │
//! ```

/// Kind of work request.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// A receive; slot = receive slot.
    Recv = 1,
    /// The SEND of an SRP_RSP; slot = ioctx.
    Rsp = 2,
    /// The last RDMA READ of a round; slot = ioctx.
    Read = 3,
    /// The last RDMA WRITE of a round that is not followed by the response; slot = ioctx.
    Write = 4,
    /// The RDMA READ of a descriptor table; slot = ioctx.
    Table = 5,
    /// The SEND of an SRP_CRED_REQ; slot = its send slot.
    Cred = 6,
    /// An unsignalled RDMA operation: completes only when it fails; slot = ioctx.
    Silent = 7,
}

/// A work request id, taken apart.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct WrId {
    /// Kind of work request.
    pub kind: Kind,
    /// Receive slot, ioctx or send slot.
    pub slot: u16,
    /// Position of the channel in its reactor's table.
    pub channel: u16,
    /// Which channel at that position.
    pub generation: u16,
}

impl WrId {
    /// As the fabric carries it.
    #[inline]
    pub const fn pack(self) -> u64 {
        (self.kind as u64) << 48
            | (self.generation as u64) << 32
            | (self.channel as u64) << 16
            | self.slot as u64
    }

    /// Takes apart what [`WrId::pack`] made.
    ///
    /// # Panics
    /// On any other value: ids come back unchanged from the fabric.
    #[inline]
    pub fn unpack(id: u64) -> WrId {
        let kind = match (id >> 48) as u16 {
            1 => Kind::Recv,
            2 => Kind::Rsp,
            3 => Kind::Read,
            4 => Kind::Write,
            5 => Kind::Table,
            6 => Kind::Cred,
            7 => Kind::Silent,
            other => panic!("wr_id {id:#x} has the unknown kind {other}"),
        };
        WrId { kind, slot: id as u16, channel: (id >> 16) as u16, generation: (id >> 32) as u16 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_survives_packing() {
        use Kind::*;
        for kind in [Recv, Rsp, Read, Write, Table, Cred, Silent] {
            let id = WrId { kind, slot: 0xFFFE, channel: 0x1234, generation: 0xABCD };
            assert_eq!(WrId::unpack(id.pack()), id);
        }
    }

    #[test]
    #[should_panic(expected = "unknown kind")]
    fn a_foreign_id_is_refused() {
        WrId::unpack(0);
    }
}
