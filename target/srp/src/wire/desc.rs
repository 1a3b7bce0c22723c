//! Memory descriptors of SRP_CMD: direct (16 bytes), the head of an indirect one (20 bytes), and
//! descriptor tables (reference 1.6, SRP r16a 6.7.2).
//!
//! ```text
//!   direct      0 va 8   8 key 4   12 len 4
//!   indirect    0 table va 8   8 table key 4   12 table len 4   16 total data len 4   20 list ...
//! ```

use super::{be32, be64, put_at};

mod at {
    pub const VA: usize = 0;
    pub const KEY: usize = 8;
    pub const LEN: usize = 12;
    pub const TOTAL: usize = 16;
}

/// Bytes of one memory descriptor.
pub const DESC_LEN: usize = 16;
/// Bytes of an indirect descriptor before its list.
pub const INDIRECT_LEN: usize = 20;

const _: () = assert!(at::LEN + 4 == DESC_LEN);
const _: () = assert!(at::TOTAL + 4 == INDIRECT_LEN);

/// One piece of initiator memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemDesc {
    /// Remote virtual address.
    pub va: u64,
    /// R_Key.
    pub key: u32,
    /// Bytes.
    pub len: u32,
}

const _: () = assert!(size_of::<MemDesc>() == DESC_LEN);

impl MemDesc {
    /// Reads the 16 bytes of a descriptor.
    #[inline]
    pub fn parse(b: &[u8; DESC_LEN]) -> MemDesc {
        MemDesc {
            va: be64::<{ at::VA }, DESC_LEN>(b),
            key: be32::<{ at::KEY }, DESC_LEN>(b),
            len: be32::<{ at::LEN }, DESC_LEN>(b),
        }
    }

    /// Writes all 16 bytes.
    #[inline]
    pub fn emit(&self, b: &mut [u8; DESC_LEN]) {
        put_at::<{ at::VA }, 8, DESC_LEN>(b, self.va.to_be_bytes());
        put_at::<{ at::KEY }, 4, DESC_LEN>(b, self.key.to_be_bytes());
        put_at::<{ at::LEN }, 4, DESC_LEN>(b, self.len.to_be_bytes());
    }

    /// True when va + len leaves the 64-bit address space: no such memory can exist (reference
    /// 4.8).
    #[inline]
    pub fn wraps(&self) -> bool {
        self.va.checked_add(u64::from(self.len)).is_none()
    }
}

/// The fixed head of an indirect descriptor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Indirect {
    /// Where the *full* table lies in initiator memory; `len` is its length in bytes.
    pub table: MemDesc,
    /// Bytes of data that all descriptors describe together.
    pub total: u32,
}

impl Indirect {
    /// Reads the 20 bytes before the list.
    #[inline]
    pub fn parse(b: &[u8; INDIRECT_LEN]) -> Indirect {
        Indirect {
            table: MemDesc {
                va: be64::<{ at::VA }, INDIRECT_LEN>(b),
                key: be32::<{ at::KEY }, INDIRECT_LEN>(b),
                len: be32::<{ at::LEN }, INDIRECT_LEN>(b),
            },
            total: be32::<{ at::TOTAL }, INDIRECT_LEN>(b),
        }
    }

    /// Writes the 20 bytes before the list.
    #[inline]
    pub fn emit(&self, b: &mut [u8; INDIRECT_LEN]) {
        put_at::<{ at::VA }, 8, INDIRECT_LEN>(b, self.table.va.to_be_bytes());
        put_at::<{ at::KEY }, 4, INDIRECT_LEN>(b, self.table.key.to_be_bytes());
        put_at::<{ at::LEN }, 4, INDIRECT_LEN>(b, self.table.len.to_be_bytes());
        put_at::<{ at::TOTAL }, 4, INDIRECT_LEN>(b, self.total.to_be_bytes());
    }
}

/// The descriptors of a table, in order, skipping those of length zero: nobody may post an RDMA
/// operation for them (reference 4.5). Bytes after the last whole descriptor are ignored.
#[derive(Clone, Debug)]
pub struct Descs<'a> {
    /// A direct descriptor that comes first.
    one: Option<MemDesc>,
    /// What is left of the table.
    rest: &'a [u8],
}

impl<'a> Descs<'a> {
    /// Over the bytes of a table.
    #[inline]
    pub fn of_table(table: &'a [u8]) -> Descs<'a> {
        Descs { one: None, rest: table }
    }

    /// Over a single descriptor.
    #[inline]
    pub fn of_one(desc: MemDesc) -> Descs<'static> {
        Descs { one: Some(desc).filter(|d| d.len > 0), rest: &[] }
    }

    /// Over nothing.
    #[inline]
    pub fn none() -> Descs<'static> {
        Descs { one: None, rest: &[] }
    }
}

impl Iterator for Descs<'_> {
    type Item = MemDesc;

    #[inline]
    fn next(&mut self) -> Option<MemDesc> {
        if let Some(desc) = self.one.take() {
            return Some(desc);
        }
        while let Some((first, rest)) = self.rest.split_first_chunk::<DESC_LEN>() {
            self.rest = rest;
            let desc = MemDesc::parse(first);
            if desc.len > 0 {
                return Some(desc);
            }
        }
        None
    }
}

/// The sum of the lengths in a table in 64 bits, or `None` when a descriptor wraps.
#[inline]
pub fn table_sum(table: &[u8]) -> Option<u64> {
    let (descs, _) = table.as_chunks::<DESC_LEN>();
    let mut sum = 0_u64; // no overflow: a slice has far fewer than 2^32 descriptors
    for chunk in descs {
        let desc = MemDesc::parse(chunk);
        if desc.wraps() {
            return None;
        }
        sum += u64::from(desc.len);
    }
    Some(sum)
}

#[cfg(test)]
mod tests {
    use super::super::golden::{READ10, WRITE10_INDIRECT, hex};
    use super::*;

    const DIRECT: MemDesc = MemDesc { va: 0x7f12_3456_0000, key: 0xa1b2, len: 4096 };

    #[test]
    fn golden_direct_descriptor_is_taken_apart() {
        let iu = hex(READ10);
        assert_eq!(MemDesc::parse(iu[48..].first_chunk().unwrap()), DIRECT);
    }

    #[test]
    fn golden_direct_descriptor_is_emitted() {
        let mut b = [0xA5; DESC_LEN];
        DIRECT.emit(&mut b);
        assert_eq!(b, hex(READ10)[48..]);
    }

    #[test]
    fn golden_indirect_descriptor_is_taken_apart() {
        let iu = hex(WRITE10_INDIRECT);
        let head = Indirect::parse(iu[48..].first_chunk().unwrap());
        assert_eq!(head.table, MemDesc { va: 0x1122_3344_5566_0000, key: 0xbeef, len: 32 });
        assert_eq!(head.total, 8192);
        let descs: Vec<_> = Descs::of_table(&iu[68..]).collect();
        assert_eq!(descs.len(), 2);
        assert_eq!(descs[1], MemDesc { va: 0x7f00_0000_9000, key: 0xa1b2, len: 4096 });
        assert_eq!(table_sum(&iu[68..]), Some(8192));
    }

    #[test]
    fn golden_indirect_descriptor_is_emitted() {
        let iu = hex(WRITE10_INDIRECT);
        let mut b = [0xA5; INDIRECT_LEN];
        Indirect::parse(iu[48..].first_chunk().unwrap()).emit(&mut b);
        assert_eq!(b, iu[48..68]);
    }

    #[test]
    fn zero_length_descriptors_are_skipped() {
        let mut table = [0; 48];
        DIRECT.emit(table[16..].first_chunk_mut().unwrap());
        assert_eq!(Descs::of_table(&table).collect::<Vec<_>>(), [DIRECT]);
        assert_eq!(Descs::of_one(MemDesc::default()).count(), 0);
    }

    #[test]
    fn a_wrapping_descriptor_spoils_the_sum() {
        let mut table = [0; 16];
        MemDesc { va: u64::MAX - 510, key: 0, len: 512 }.emit(&mut table);
        assert_eq!(table_sum(&table), None);
    }
}
