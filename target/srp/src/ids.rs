//! The two opaque identifiers of SRP. Both are byte strings: they are copied and compared bytewise,
//! never swapped (reference section 0; SRP r16a 4.7, 4.3).

use core::fmt;

/// The tag of an outstanding request of one channel: an initiator's cookie, echoed byte for byte.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tag(pub [u8; 8]);

/// An initiator or target port identifier (16 bytes; identifier extension, then GUID).
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PortId(pub [u8; 16]);

impl PortId {
    /// Joins identifier extension and GUID in the r16a order (reference 1.14).
    pub const fn from_halves(ext: u64, guid: u64) -> PortId {
        PortId((((ext as u128) << 64) | guid as u128).to_be_bytes())
    }

    /// The first half: the identifier extension.
    pub const fn ext(&self) -> u64 {
        (u128::from_be_bytes(self.0) >> 64) as u64
    }

    /// The second half: the GUID.
    pub const fn guid(&self) -> u64 {
        u128::from_be_bytes(self.0) as u64
    }
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", u64::from_be_bytes(self.0))
    }
}

impl fmt::Debug for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tag({self})")
    }
}

impl fmt::Display for PortId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "0x{:032x}", u128::from_be_bytes(self.0))
    }
}

impl fmt::Debug for PortId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PortId({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_make_a_port_id_and_come_back() {
        let id = PortId::from_halves(0x0002_c903_00a1_b2c4, 0x5054_00ff_fe4a_0b7b);
        assert_eq!(id.0[..2], [0x00, 0x02]);
        assert_eq!((id.ext(), id.guid()), (0x0002_c903_00a1_b2c4, 0x5054_00ff_fe4a_0b7b));
        assert_eq!(id.to_string(), "0x0002c90300a1b2c4505400fffe4a0b7b");
    }

    #[test]
    fn a_tag_prints_its_raw_bytes() {
        assert_eq!(Tag([5, 0, 1, 0, 0, 0, 0, 0]).to_string(), "0500010000000000");
    }
}
