//! SRP_CMD, 48 bytes + additional CDB + descriptors + immediate data (reference 1.6, SRP r16a 6.7).
//!
//! ```text
//!   0 opcode  1 sol_not  5 buf_fmt (out nibble high, in nibble low)  6 data_out_desc_cnt
//!   7 data_in_desc_cnt  8 tag 8  20 LUN 8  29 task_attr  31 add_cdb_len  32 CDB 16 |
//!  48 additional CDB A | data-out descriptor | data-in descriptor | immediate data
//! ```
//! This view is of the fixed 48 bytes; what follows depends on lengths that the role checks
//! (`target/parse.rs`).

use core::borrow::{Borrow, BorrowMut};

use super::{Opcode, WireError, be64, bytes_at, head, put_at};
use crate::Tag;

mod at {
    pub const OPCODE: usize = 0;
    pub const SOL_NOT: usize = 1;
    pub const BUF_FMT: usize = 5;
    pub const DATA_OUT_DESC_CNT: usize = 6;
    pub const DATA_IN_DESC_CNT: usize = 7;
    pub const TAG: usize = 8;
    pub const LUN: usize = 20;
    pub const TASK_ATTR: usize = 29;
    pub const ADD_CDB_LEN: usize = 31;
    pub const CDB: usize = 32;
}

/// Bytes of the fixed part.
pub const LEN: usize = 48;
/// Bytes of the immediate-data descriptor: a length.
pub const IMM_DESC_LEN: usize = 4;
/// Smallest offset at which immediate data can begin: right behind a CMD with only its descriptor.
pub const IMM_OFFSET_MIN: usize = LEN + IMM_DESC_LEN;

const _: () = assert!(at::CDB + 16 == LEN);
const _: () = assert!(at::LUN + 8 == 28);

/// What one nibble of `buf_fmt` says of a direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DescFormat {
    /// No data.
    None,
    /// One descriptor of 16 bytes.
    Direct,
    /// 20 bytes and a list.
    Indirect,
    /// 4 bytes; the data is in the IU (SRP2, data-out only).
    Immediate,
    /// 4 to 15.
    Reserved(u8),
}

impl DescFormat {
    /// Reads a nibble (bits 3:0 of `nibble`).
    #[inline]
    pub const fn parse(nibble: u8) -> DescFormat {
        match nibble & 0x0F {
            0 => DescFormat::None,
            1 => DescFormat::Direct,
            2 => DescFormat::Indirect,
            3 => DescFormat::Immediate,
            n => DescFormat::Reserved(n),
        }
    }

    /// The nibble.
    #[inline]
    pub const fn nibble(self) -> u8 {
        match self {
            DescFormat::None => 0,
            DescFormat::Direct => 1,
            DescFormat::Indirect => 2,
            DescFormat::Immediate => 3,
            DescFormat::Reserved(n) => n & 0x0F,
        }
    }
}

/// Task attribute. Values we don't know count as ORDERED, as with all known targets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TaskAttr {
    /// May be reordered.
    #[default]
    Simple,
    /// Goes first.
    HeadOfQueue,
    /// Waits for all older ones.
    Ordered,
    /// Auto contingent allegiance.
    Aca,
}

impl TaskAttr {
    /// Reads byte 29, of which the low 3 bits count.
    #[inline]
    pub const fn parse(byte: u8) -> TaskAttr {
        match byte & 0x07 {
            0 => TaskAttr::Simple,
            1 => TaskAttr::HeadOfQueue,
            4 => TaskAttr::Aca,
            _ => TaskAttr::Ordered,
        }
    }

    /// The wire value.
    #[inline]
    pub const fn bits(self) -> u8 {
        match self {
            TaskAttr::Simple => 0,
            TaskAttr::HeadOfQueue => 1,
            TaskAttr::Ordered => 2,
            TaskAttr::Aca => 4,
        }
    }
}

/// A view of the fixed part.
#[derive(Clone, Copy, Debug)]
pub struct Cmd<B>(B);

impl<'a> Cmd<&'a [u8; LEN]> {
    /// Proves the length of the fixed part.
    #[inline]
    pub fn new_checked(iu: &'a [u8]) -> Result<Self, WireError> {
        head(iu).map(Cmd)
    }
}

impl<B: Borrow<[u8; LEN]>> Cmd<B> {
    /// The opcode.
    #[inline]
    pub fn opcode(&self) -> Opcode {
        Opcode(self.0.borrow()[at::OPCODE])
    }
    /// Solicited notification wishes.
    #[inline]
    pub fn sol_not(&self) -> u8 {
        self.0.borrow()[at::SOL_NOT]
    }
    /// Format of the data-out descriptor.
    #[inline]
    pub fn out_format(&self) -> DescFormat {
        DescFormat::parse(self.0.borrow()[at::BUF_FMT] >> 4)
    }
    /// Format of the data-in descriptor.
    #[inline]
    pub fn in_format(&self) -> DescFormat {
        DescFormat::parse(self.0.borrow()[at::BUF_FMT])
    }
    /// Data-out descriptors in this IU's table.
    #[inline]
    pub fn data_out_desc_cnt(&self) -> u8 {
        self.0.borrow()[at::DATA_OUT_DESC_CNT]
    }
    /// Data-in descriptors in this IU's table.
    #[inline]
    pub fn data_in_desc_cnt(&self) -> u8 {
        self.0.borrow()[at::DATA_IN_DESC_CNT]
    }
    /// The tag.
    #[inline]
    pub fn tag(&self) -> Tag {
        Tag(bytes_at::<{ at::TAG }, 8, LEN>(self.0.borrow()))
    }
    /// The 8-byte LUN as a big-endian number.
    #[inline]
    pub fn lun(&self) -> u64 {
        be64::<{ at::LUN }, LEN>(self.0.borrow())
    }
    /// Task attribute.
    #[inline]
    pub fn task_attr(&self) -> TaskAttr {
        TaskAttr::parse(self.0.borrow()[at::TASK_ATTR])
    }
    /// Bytes of the additional CDB: a multiple of 4, at most 252. The low two bits are reserved;
    /// nothing is shifted.
    #[inline]
    pub fn add_cdb_bytes(&self) -> usize {
        usize::from(self.0.borrow()[at::ADD_CDB_LEN] & 0xFC)
    }
    /// The first 16 bytes of the CDB.
    #[inline]
    pub fn cdb(&self) -> [u8; 16] {
        bytes_at::<{ at::CDB }, 16, LEN>(self.0.borrow())
    }
}

impl<B: BorrowMut<[u8; LEN]>> Cmd<B> {
    /// Zeroes the fixed part and writes the opcode.
    #[inline]
    pub fn init(mut bytes: B) -> Self {
        *bytes.borrow_mut() = [0; LEN];
        bytes.borrow_mut()[at::OPCODE] = Opcode::CMD.0;
        Cmd(bytes)
    }
    /// Writes the notification wishes.
    #[inline]
    pub fn set_sol_not(&mut self, v: u8) {
        self.0.borrow_mut()[at::SOL_NOT] = v;
    }
    /// Writes both formats.
    #[inline]
    pub fn set_formats(&mut self, out: DescFormat, inn: DescFormat) {
        self.0.borrow_mut()[at::BUF_FMT] = (out.nibble() << 4) | inn.nibble();
    }
    /// Writes both descriptor counts.
    #[inline]
    pub fn set_desc_cnts(&mut self, out: u8, inn: u8) {
        self.0.borrow_mut()[at::DATA_OUT_DESC_CNT] = out;
        self.0.borrow_mut()[at::DATA_IN_DESC_CNT] = inn;
    }
    /// Writes the tag.
    #[inline]
    pub fn set_tag(&mut self, tag: Tag) {
        put_at::<{ at::TAG }, 8, LEN>(self.0.borrow_mut(), tag.0);
    }
    /// Writes the LUN.
    #[inline]
    pub fn set_lun(&mut self, lun: u64) {
        put_at::<{ at::LUN }, 8, LEN>(self.0.borrow_mut(), lun.to_be_bytes());
    }
    /// Writes the task attribute.
    #[inline]
    pub fn set_task_attr(&mut self, attr: TaskAttr) {
        self.0.borrow_mut()[at::TASK_ATTR] = attr.bits();
    }
    /// Writes the length of the additional CDB in bytes; ours, so a multiple of 4 and at most 252.
    #[inline]
    pub fn set_add_cdb_bytes(&mut self, bytes: usize) {
        assert!(bytes.is_multiple_of(4));
        assert!(bytes <= 252);
        self.0.borrow_mut()[at::ADD_CDB_LEN] = bytes as u8;
    }
    /// Writes the first 16 bytes of the CDB; a shorter one is padded with 0.
    #[inline]
    pub fn set_cdb(&mut self, cdb: &[u8]) {
        let n = cdb.len().min(16);
        self.0.borrow_mut()[at::CDB..at::CDB + n].copy_from_slice(&cdb[..n]);
    }
}

#[cfg(test)]
mod tests {
    use super::super::golden::{READ10, WRITE10_INDIRECT, hex, write10_imm};
    use super::*;

    #[test]
    fn golden_read_is_taken_apart() {
        let iu = hex(READ10);
        let v = Cmd::new_checked(&iu).unwrap();
        assert_eq!((v.opcode(), v.tag()), (Opcode::CMD, Tag([5, 0, 1, 0, 0, 0, 0, 0])));
        assert_eq!((v.out_format(), v.in_format()), (DescFormat::None, DescFormat::Direct));
        assert_eq!((v.lun(), v.task_attr()), (0x0001_0000_0000_0000, TaskAttr::Simple));
        assert_eq!((v.add_cdb_bytes(), v.sol_not()), (0, 0));
        assert_eq!(v.cdb()[..9], [0x28, 0, 0, 0, 0x10, 0, 0, 0, 8]);
    }

    #[test]
    fn golden_write_is_taken_apart() {
        let iu = hex(WRITE10_INDIRECT);
        let v = Cmd::new_checked(&iu).unwrap();
        assert_eq!((v.out_format(), v.in_format()), (DescFormat::Indirect, DescFormat::None));
        assert_eq!((v.data_out_desc_cnt(), v.data_in_desc_cnt()), (2, 0));
    }

    #[test]
    fn golden_immediate_is_taken_apart() {
        let iu = write10_imm();
        let v = Cmd::new_checked(&iu).unwrap();
        assert_eq!((v.out_format(), iu.len()), (DescFormat::Immediate, 580));
    }

    #[test]
    fn golden_read_is_built() {
        let mut v = Cmd::init([0xA5; LEN]);
        v.set_formats(DescFormat::None, DescFormat::Direct);
        v.set_desc_cnts(0, 0);
        v.set_tag(Tag([5, 0, 1, 0, 0, 0, 0, 0]));
        v.set_lun(0x0001_0000_0000_0000);
        v.set_task_attr(TaskAttr::Simple);
        v.set_add_cdb_bytes(0);
        v.set_sol_not(0);
        v.set_cdb(&[0x28, 0, 0, 0, 0x10, 0, 0, 0, 8, 0]);
        assert_eq!(v.0, hex(READ10)[..48]);
    }

    #[test]
    fn a_short_command_is_not_parsed() {
        let need = WireError::Truncated { need: 48, got: 47 };
        assert_eq!(Cmd::new_checked(&hex(READ10)[..47]).unwrap_err(), need);
    }

    #[test]
    fn reserved_bits_of_add_cdb_len_do_not_count() {
        let mut iu = hex(READ10);
        iu[31] = 0x13;
        assert_eq!(Cmd::new_checked(&iu).unwrap().add_cdb_bytes(), 16);
    }

    #[test]
    fn formats_and_attributes_survive_a_round_trip() {
        for n in 0..16 {
            assert_eq!(DescFormat::parse(n).nibble(), n);
        }
        for byte in 0..=255_u8 {
            let attr = TaskAttr::parse(byte);
            assert_eq!(TaskAttr::parse(attr.bits()), attr);
        }
        assert_eq!(TaskAttr::parse(0x0B), TaskAttr::Ordered);
    }
}
