//! A view of a CDB: offsets of the fields that several commands share.
//!
//! Owns: where LBA, length and flags stand in 6, 10, 12 and 16 byte CDBs (SPC-4, CDB formats).
//! Never does: check a value; that is the commands' business.
//!
//! Invariant: 16 bytes are there, so no accessor can fail. SRP_CMD always carries 16 (SRP r16a
//! 6.9).

/// Bytes of the longest CDB this device server knows. 32-byte CDBs (7Fh) are not supported: they
/// are for protection type 2 only (reference 8.1).
pub const CDB_BYTES: usize = 16;

/// A CDB of [`CDB_BYTES`]; a shorter one is padded with anything.
#[derive(Clone, Copy, Debug)]
pub struct Cdb<'a>(pub &'a [u8; CDB_BYTES]);

/// The blocks that a CDB addresses; nothing is checked yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    /// First block.
    pub lba: u64,
    /// Number of blocks.
    pub blocks: u64,
    /// Where the CDB has the number, for the field pointer.
    pub length_at: u16,
}

impl Cdb<'_> {
    /// OPERATION CODE.
    #[inline]
    pub fn opcode(self) -> u8 {
        self.0[0]
    }

    /// SERVICE ACTION, as it stands in byte 1 of every command we have that has one.
    #[inline]
    pub fn service_action(self) -> u8 {
        self.0[1] & 0x1F
    }

    #[inline]
    pub(crate) fn byte(self, at: usize) -> u8 {
        self.0[at]
    }

    #[inline]
    pub(crate) fn be16(self, at: usize) -> u16 {
        u16::from_be_bytes([self.0[at], self.0[at + 1]])
    }

    #[inline]
    pub(crate) fn be32(self, at: usize) -> u32 {
        u32::from_be_bytes([self.0[at], self.0[at + 1], self.0[at + 2], self.0[at + 3]])
    }

    #[inline]
    pub(crate) fn be64(self, at: usize) -> u64 {
        u64::from(self.be32(at)) << 32 | u64::from(self.be32(at + 4))
    }

    /// FUA of READ and WRITE (10, 12, 16).
    #[inline]
    pub(crate) fn fua(self) -> bool {
        self.0[1] & 0x08 != 0
    }

    /// 21 bit LBA and 8 bit length, where 0 means 256 (SBC-3 READ(6)).
    pub(crate) fn range_6(self) -> Range {
        let lba = self.be32(0) & 0x001F_FFFF;
        let blocks = if self.0[4] == 0 { 256 } else { u64::from(self.0[4]) };
        Range { lba: u64::from(lba), blocks, length_at: 4 }
    }

    #[inline]
    pub(crate) fn range_10(self) -> Range {
        let blocks = u64::from(self.be16(7));
        Range { lba: u64::from(self.be32(2)), blocks, length_at: 7 }
    }

    pub(crate) fn range_12(self) -> Range {
        let blocks = u64::from(self.be32(6));
        Range { lba: u64::from(self.be32(2)), blocks, length_at: 6 }
    }

    #[inline]
    pub(crate) fn range_16(self) -> Range {
        Range { lba: self.be64(2), blocks: u64::from(self.be32(10)), length_at: 10 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: [u8; 16] =
        [0x88, 0xFB, 1, 2, 3, 4, 5, 6, 7, 8, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16];

    fn of(range: Range) -> (u64, u64, u16) {
        (range.lba, range.blocks, range.length_at)
    }

    #[test]
    fn ranges_stand_where_the_standard_says() {
        let cdb = Cdb(&BYTES);
        assert_eq!(of(cdb.range_6()), (0x1B_0102, 3, 4));
        assert_eq!(of(cdb.range_10()), (0x0102_0304, 0x0607, 7));
        assert_eq!(of(cdb.range_12()), (0x0102_0304, 0x0506_0708, 6));
        assert_eq!(of(cdb.range_16()), (0x0102_0304_0506_0708, 0x1112_1314, 10));
        assert!(cdb.fua());
        assert_eq!(cdb.service_action(), 0x1B);
    }

    #[test]
    fn length_zero_of_a_six_byte_cdb_is_256() {
        let mut bytes = [0; 16];
        bytes[0] = 0x08;
        assert_eq!(of(Cdb(&bytes).range_6()), (0, 256, 4));
    }
}
