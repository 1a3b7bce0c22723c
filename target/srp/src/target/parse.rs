//! What an SRP_CMD says of its data: both descriptors, checked (reference 1.6 and table 4.8;
//! known-bugs A1-A13).
//!
//! Never trusts: a count, a length, an offset, an address. All sums are in 64 bits. `None` from
//! here means the command is malformed: CHECK CONDITION 05/0E/03, not BUSY, or the initiator tries
//! for ever.
//!
//! ```text
//!   0            48        48+A              48+A+O           E         offset          offset+len
//!   | fixed part | add CDB | data-out desc O | data-in desc I | garbage | immediate data | ignored
//! ```
//! Invariant: every `at` and `count` of a `DataDesc` lies inside the IU it was parsed from.

use super::Command;
use crate::wire::cmd::{Cmd, DescFormat, IMM_DESC_LEN, LEN};
use crate::wire::desc::{DESC_LEN, Descs, INDIRECT_LEN, Indirect, MemDesc, table_sum};

/// One direction's data buffer, as the initiator described it. Lengths and sums are checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DataDesc {
    /// No data, or a buffer of length 0.
    #[default]
    None,
    /// One piece of initiator memory.
    Direct(MemDesc),
    /// A table of pieces.
    Indirect {
        /// Bytes of all pieces together.
        total: u32,
        /// The full table in initiator memory.
        table: MemDesc,
        /// Offset in the IU of the descriptors that it carries.
        at: u16,
        /// Descriptors in the IU: the table's first ones.
        count: u16,
        /// Descriptors of the full table; `count < all` means that the table must be fetched.
        all: u32,
    },
    /// The data is in the IU (data-out only).
    Immediate {
        /// Offset in the IU.
        at: u16,
        /// Bytes.
        len: u32,
    },
}

const _: () = assert!(size_of::<DataDesc>() == 32);

impl DataDesc {
    /// Bytes of the buffer: the D of reference 4.9.
    #[inline]
    pub fn len(&self) -> u32 {
        match *self {
            DataDesc::None => 0,
            DataDesc::Direct(desc) => desc.len,
            DataDesc::Indirect { total, .. } => total,
            DataDesc::Immediate { len, .. } => len,
        }
    }

    /// True when there is no buffer.
    #[inline]
    pub fn is_empty(&self) -> bool {
        matches!(self, DataDesc::None)
    }

    /// True when the IU holds only the head of the table: it must be fetched by RDMA READ before
    /// data can move.
    #[inline]
    pub fn is_partial(&self) -> bool {
        matches!(*self, DataDesc::Indirect { count, all, .. } if u32::from(count) < all)
    }

    /// The immediate data, from the IU that this was parsed from.
    #[inline]
    pub fn immediate<'a>(&self, iu: &'a [u8]) -> Option<&'a [u8]> {
        match *self {
            DataDesc::Immediate { at, len } => iu.get(usize::from(at)..)?.get(..len as usize),
            _ => None,
        }
    }
}

/// The pieces of initiator memory that the IU itself names, without those of length 0. For a
/// partial table these are only the first ones; fetch the table and use [`table_descs`]. Nothing
/// for immediate data.
#[inline]
pub fn descs<'a>(desc: &DataDesc, iu: &'a [u8]) -> Descs<'a> {
    match *desc {
        DataDesc::Direct(one) => Descs::of_one(one),
        DataDesc::Indirect { at, count, .. } => {
            let at = usize::from(at);
            let table = iu.get(at..at + usize::from(count) * DESC_LEN);
            Descs::of_table(table.unwrap_or_default())
        }
        DataDesc::None | DataDesc::Immediate { .. } => Descs::none(),
    }
}

/// The pieces of a fetched table, without those of length 0.
#[inline]
pub fn table_descs(table: &[u8]) -> Descs<'_> {
    Descs::of_table(table)
}

/// A fetched table isn't what its command announced; answer 05/0E/03.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadTable;

/// Checks the full table, fetched by RDMA READ, against its command: length, sum, addresses. The
/// initiator may have changed the table since it sent the IU, so the descriptors in the IU count
/// for nothing any more.
pub fn check_table(desc: &DataDesc, table: &[u8]) -> Result<(), BadTable> {
    let DataDesc::Indirect { total, all, .. } = *desc else { return Err(BadTable) };
    let whole = table.len() as u64 == u64::from(all) * DESC_LEN as u64;
    if whole && table_sum(table) == Some(u64::from(total)) { Ok(()) } else { Err(BadTable) }
}

/// What a channel allows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Where immediate data begins, when it was negotiated.
    pub imm_offset: Option<u32>,
    /// Descriptors of a table, in the IU or not.
    pub max_descs: u32,
}

/// Sets both descriptors of `to`, in place: moving them around costs more than parsing them.
/// `None`: malformed.
#[inline]
pub(super) fn data_descs(
    cmd: Cmd<&[u8; LEN]>,
    iu: &[u8],
    limits: &Limits,
    to: &mut Command,
) -> Option<()> {
    let at = LEN + cmd.add_cdb_bytes();
    if at > iu.len() {
        return None;
    }
    // Most commands have one direct descriptor.
    match (cmd.out_format(), cmd.in_format()) {
        (DescFormat::None, DescFormat::None) => {}
        (DescFormat::None, DescFormat::Direct) => to.data_in = direct(at, iu)?,
        (DescFormat::Direct, DescFormat::None) => to.data_out = direct(at, iu)?,
        _ => (to.data_out, to.data_in) = general(cmd, at, iu, limits)?,
    }
    Some(())
}

/// Any two formats, (data-out, data-in); the first descriptor is at `at`.
#[inline(never)]
fn general(
    cmd: Cmd<&[u8; LEN]>,
    at: usize,
    iu: &[u8],
    limits: &Limits,
) -> Option<(DataDesc, DataDesc)> {
    let (out_format, in_format) = (cmd.out_format(), cmd.in_format());
    let mut counts = (u16::from(cmd.data_out_desc_cnt()), u16::from(cmd.data_in_desc_cnt()));
    if out_format == DescFormat::None || in_format == DescFormat::None {
        // Some OFED initiators put the count into the other direction's field (reference 1.6).
        let sum = counts.0 + counts.1;
        counts = (sum, sum);
    }
    if in_format == DescFormat::Immediate {
        return None;
    }
    let (out, at) = one(out_format, counts.0, at, iu, limits)?;
    let (inn, at) = one(in_format, counts.1, at, iu, limits)?;
    if let DataDesc::Immediate { at: data, len } = out {
        let end = u64::from(data) + u64::from(len);
        if at > usize::from(data) || end > iu.len() as u64 {
            return None;
        }
        if len == 0 {
            return Some((DataDesc::None, inn));
        }
    }
    Some((out, inn))
}

/// A direct descriptor at `at`.
#[inline]
fn direct(at: usize, iu: &[u8]) -> Option<DataDesc> {
    let desc = MemDesc::parse(iu.get(at..)?.first_chunk()?);
    if desc.wraps() {
        return None;
    }
    Some(if desc.len == 0 { DataDesc::None } else { DataDesc::Direct(desc) })
}

/// One descriptor at `at`, and the offset behind it.
fn one(
    format: DescFormat,
    count: u16,
    at: usize,
    iu: &[u8],
    limits: &Limits,
) -> Option<(DataDesc, usize)> {
    match format {
        DescFormat::None => Some((DataDesc::None, at)),
        DescFormat::Direct => Some((direct(at, iu)?, at + DESC_LEN)),
        DescFormat::Indirect => indirect(count, at, iu, limits),
        DescFormat::Immediate => {
            let len = u32::from_be_bytes(*iu.get(at..)?.first_chunk()?);
            let data = u16::try_from(limits.imm_offset?).ok()?;
            Some((DataDesc::Immediate { at: data, len }, at + IMM_DESC_LEN))
        }
        DescFormat::Reserved(_) => None,
    }
}

/// An indirect descriptor with `count` list entries in the IU.
fn indirect(count: u16, at: usize, iu: &[u8], limits: &Limits) -> Option<(DataDesc, usize)> {
    let head = Indirect::parse(iu.get(at..)?.first_chunk()?);
    let list_at = at + INDIRECT_LEN;
    let end = list_at + usize::from(count) * DESC_LEN;
    let list = iu.get(list_at..end)?;
    if !head.table.len.is_multiple_of(DESC_LEN as u32) {
        return None;
    }
    let all = head.table.len / DESC_LEN as u32;
    if u32::from(count) > all || all > limits.max_descs {
        return None;
    }
    let sum = table_sum(list)?;
    let (total, partial) = (u64::from(head.total), u32::from(count) < all);
    let fits = if partial { sum <= total && !head.table.wraps() } else { sum == total };
    if !fits {
        return None;
    }
    if total == 0 {
        return Some((DataDesc::None, end));
    }
    let list_at = u16::try_from(list_at).expect("48 + 252 + 20 + 510 * 16 + 20 < 2^16");
    let data = DataDesc::Indirect { total: head.total, table: head.table, at: list_at, count, all };
    Some((data, end))
}

#[cfg(test)]
mod tests {
    use super::super::{CDB_MAX, IoctxId, TaskAttr};
    use super::*;
    use crate::Tag;
    use crate::wire::golden::{READ10, WRITE10_INDIRECT, hex, write10_imm};

    const LIMITS: Limits = Limits { imm_offset: Some(68), max_descs: 2048 };

    fn with(iu: &[u8], limits: &Limits) -> Option<(DataDesc, DataDesc)> {
        let mut to = Command {
            ioctx: IoctxId(0),
            attr: TaskAttr::Simple,
            too_long: false,
            cdb_len: 16,
            tag: Tag::default(),
            lun: 0,
            cdb: [0; CDB_MAX],
            data_out: DataDesc::None,
            data_in: DataDesc::None,
        };
        data_descs(Cmd::new_checked(iu).unwrap(), iu, limits, &mut to)?;
        Some((to.data_out, to.data_in))
    }

    fn parse(iu: &[u8]) -> Option<(DataDesc, DataDesc)> {
        with(iu, &LIMITS)
    }

    fn patch(iu: &mut [u8], at: usize, bytes: &[u8]) {
        iu[at..at + bytes.len()].copy_from_slice(bytes);
    }

    #[test]
    fn golden_direct_read() {
        let direct = MemDesc { va: 0x7f12_3456_0000, key: 0xa1b2, len: 4096 };
        let iu = hex(READ10);
        let (out, inn) = parse(&iu).unwrap();
        assert_eq!((out, inn), (DataDesc::None, DataDesc::Direct(direct)));
        assert_eq!(descs(&inn, &iu).collect::<Vec<_>>(), [direct]);
        assert_eq!(inn.len(), 4096);
    }

    #[test]
    fn golden_indirect_write() {
        let iu = hex(WRITE10_INDIRECT);
        let (out, inn) = parse(&iu).unwrap();
        let table = MemDesc { va: 0x1122_3344_5566_0000, key: 0xbeef, len: 32 };
        let want = DataDesc::Indirect { total: 8192, table, at: 68, count: 2, all: 2 };
        assert_eq!((out, inn), (want, DataDesc::None));
        assert!(!out.is_partial());
        let lens: u32 = descs(&out, &iu).map(|d| d.len).sum();
        assert_eq!(lens, 8192);
    }

    #[test]
    fn golden_immediate_write() {
        let iu = write10_imm();
        let (out, _) = parse(&iu).unwrap();
        assert_eq!(out, DataDesc::Immediate { at: 68, len: 512 });
        assert_eq!(out.immediate(&iu), Some(&[0xAA; 512][..]));
        assert_eq!(descs(&out, &iu).count(), 0);
    }

    #[test]
    fn every_truncation_is_malformed() {
        for iu in [hex(READ10), hex(WRITE10_INDIRECT), write10_imm()] {
            for n in 48..iu.len() {
                assert_eq!(parse(&iu[..n]), None, "{n}");
            }
        }
    }

    #[test]
    fn bytes_behind_the_descriptors_are_ignored() {
        let mut iu = hex(READ10);
        iu.resize(200, 0xFF);
        assert_eq!(parse(&iu), parse(&hex(READ10)));
    }

    #[test]
    fn formats_4_to_15_and_immediate_in_are_malformed() {
        let mut iu = write10_imm();
        for n in 4..16 {
            iu[5] = n;
            assert_eq!(parse(&iu), None);
            iu[5] = n << 4;
            assert_eq!(parse(&iu), None);
        }
        for fmt in [0x03, 0x13, 0x33] {
            iu[5] = fmt;
            assert_eq!(parse(&iu), None);
        }
    }

    #[test]
    fn immediate_lengths_at_the_edges() {
        let iu = write10_imm();
        let len = |v: u32| {
            let mut iu = iu.clone();
            patch(&mut iu, 48, &v.to_be_bytes());
            parse(&iu)
        };
        let m = iu.len() as u32;
        assert_eq!(len(0).unwrap().0, DataDesc::None);
        assert_eq!(len(1).unwrap().0.len(), 1);
        assert_eq!(len(m - 68).unwrap().0.len(), m - 68);
        for bad in [m - 67, 0x7FFF_FFFF, 0xFFFF_FFBB, 0xFFFF_FFBC, u32::MAX] {
            assert_eq!(len(bad), None, "{bad:#x}");
        }
    }

    #[test]
    fn immediate_data_must_be_negotiated_and_not_overlap() {
        let iu = write10_imm();
        let limits = |imm_offset| Limits { imm_offset, ..LIMITS };
        assert_eq!(with(&iu, &limits(None)), None);
        assert!(with(&iu, &limits(Some(52))).is_some());
        assert_eq!(with(&iu, &limits(Some(48))), None);
        let mut long_cdb = iu.clone();
        long_cdb[31] = 16; // 48 + 16 + 4 = 68: just fits
        patch(&mut long_cdb, 64, &[0, 0, 0, 8]);
        assert_eq!(parse(&long_cdb).unwrap().0.len(), 8);
        long_cdb[31] = 20;
        patch(&mut long_cdb, 68, &[0, 0, 0, 8]);
        assert_eq!(parse(&long_cdb), None);
        let mut bidi = iu;
        bidi[5] = 0x31; // a data-in descriptor from 52 to 68 just fits
        assert_eq!(parse(&bidi).map(|(out, _)| out.len()), Some(512));
        bidi[31] = 4;
        assert_eq!(parse(&bidi), None);
    }

    #[test]
    fn empty_buffers_are_no_data() {
        let mut iu = hex(READ10);
        patch(&mut iu, 60, &[0; 4]);
        assert_eq!(parse(&iu), Some((DataDesc::None, DataDesc::None)));
        let mut iu = hex(WRITE10_INDIRECT);
        iu[6] = 0;
        patch(&mut iu, 60, &[0; 8]); // table of 0 bytes, 0 bytes of data
        assert_eq!(parse(&iu), Some((DataDesc::None, DataDesc::None)));
    }

    #[test]
    fn a_table_without_descriptors_but_with_data_is_malformed() {
        for len in [0_u32, 8, 15] {
            for count in [0, 1, 2] {
                let mut iu = hex(WRITE10_INDIRECT);
                iu[6] = count;
                patch(&mut iu, 60, &len.to_be_bytes());
                assert_eq!(parse(&iu), None, "{len} {count}");
            }
        }
    }

    #[test]
    fn table_length_must_be_whole_descriptors() {
        for len in [17_u32, 31, 33, 0x8001] {
            let mut iu = hex(WRITE10_INDIRECT);
            patch(&mut iu, 60, &len.to_be_bytes());
            assert_eq!(parse(&iu), None, "{len}");
        }
    }

    #[test]
    fn more_descriptors_in_the_iu_than_in_the_table_is_malformed() {
        let mut iu = hex(WRITE10_INDIRECT);
        patch(&mut iu, 60, &16_u32.to_be_bytes());
        assert_eq!(parse(&iu), None);
    }

    #[test]
    fn the_sum_must_be_the_total() {
        for total in [0_u32, 8191, 8193, u32::MAX] {
            let mut iu = hex(WRITE10_INDIRECT);
            patch(&mut iu, 64, &total.to_be_bytes());
            assert_eq!(parse(&iu), None, "{total}");
        }
        // The sum is 2^32 + 8192, which a 32-bit sum would take for 8192.
        let mut iu = hex(WRITE10_INDIRECT);
        patch(&mut iu, 80, &0x8000_0000_u32.to_be_bytes());
        patch(&mut iu, 96, &0x8000_2000_u32.to_be_bytes());
        assert_eq!(parse(&iu), None);
    }

    #[test]
    fn wrapping_addresses_are_malformed() {
        let mut iu = hex(READ10);
        patch(&mut iu, 48, &(u64::MAX - 4095).to_be_bytes());
        assert_eq!(parse(&iu), None);
        patch(&mut iu, 48, &(u64::MAX - 4096).to_be_bytes());
        assert!(parse(&iu).is_some());
        let mut iu = hex(WRITE10_INDIRECT);
        patch(&mut iu, 84, &[0xFF; 8]);
        assert_eq!(parse(&iu), None);
    }

    #[test]
    fn zero_length_entries_in_a_table_are_allowed() {
        let mut iu = hex(WRITE10_INDIRECT);
        patch(&mut iu, 80, &[0; 4]);
        patch(&mut iu, 64, &4096_u32.to_be_bytes());
        let (out, _) = parse(&iu).unwrap();
        assert_eq!((out.len(), descs(&out, &iu).count()), (4096, 1));
    }

    /// The golden write as a partial table: `count` descriptors here of `all`.
    fn partial(count: u8, all: u32, total: u32) -> Vec<u8> {
        let mut iu = hex(WRITE10_INDIRECT);
        iu.truncate(68 + 16 * usize::from(count));
        iu[6] = count;
        patch(&mut iu, 60, &(all * 16).to_be_bytes());
        patch(&mut iu, 64, &total.to_be_bytes());
        iu
    }

    #[test]
    fn a_partial_table_is_told_apart() {
        for count in 0..=2 {
            let iu = partial(count, 3, 12288);
            let (out, _) = parse(&iu).unwrap();
            assert!(out.is_partial());
            assert_eq!((out.len(), descs(&out, &iu).count()), (12288, usize::from(count)));
        }
        assert!(parse(&partial(2, 2048, 8192)).is_some());
        assert_eq!(parse(&partial(2, 2049, 8192)), None, "more than max_descs");
        assert_eq!(parse(&partial(2, 0x0FFF_FFFF, 8192)), None);
        assert_eq!(parse(&partial(2, 3, 8191)), None, "the IU's share is more than all");
        let mut iu = partial(1, 3, 12288);
        patch(&mut iu, 48, &(u64::MAX - 16).to_be_bytes());
        assert_eq!(parse(&iu), None, "the table wraps");
    }

    #[test]
    fn a_fetched_table_must_match() {
        let whole = hex(WRITE10_INDIRECT);
        let (desc, _) = parse(&partial(1, 2, 8192)).unwrap();
        assert_eq!(check_table(&desc, &whole[68..]), Ok(()));
        assert_eq!(table_descs(&whole[68..]).count(), 2);
        assert_eq!(check_table(&desc, &whole[68..84]), Err(BadTable));
        let mut changed = whole[68..].to_vec();
        changed[31] ^= 1;
        assert_eq!(check_table(&desc, &changed), Err(BadTable));
        let mut wraps = whole[68..].to_vec();
        wraps[..8].fill(0xFF);
        assert_eq!(check_table(&desc, &wraps), Err(BadTable));
        assert_eq!(check_table(&DataDesc::None, &[]), Err(BadTable));
    }

    #[test]
    fn a_count_in_the_wrong_directions_field_is_accepted_for_one_direction() {
        let mut iu = hex(WRITE10_INDIRECT);
        (iu[6], iu[7]) = (0, 2);
        assert_eq!(parse(&iu), parse(&hex(WRITE10_INDIRECT)));
        (iu[6], iu[7]) = (1, 1);
        assert_eq!(parse(&iu), parse(&hex(WRITE10_INDIRECT)));
        iu[5] = 0x02; // data-in
        let (out, inn) = parse(&iu).unwrap();
        assert_eq!((out.len(), inn.len()), (0, 8192));
    }

    #[test]
    fn two_directions_are_parsed_independently() {
        let golden = hex(WRITE10_INDIRECT);
        let mut iu = golden[..48].to_vec();
        iu[5] = 0x22;
        (iu[6], iu[7]) = (2, 1);
        iu.extend_from_slice(&golden[48..]);
        iu.extend_from_slice(&golden[48..84]);
        patch(&mut iu, 112, &[0, 0, 0, 16]); // the second table's length ...
        patch(&mut iu, 116, &[0, 0, 0x10, 0]); // ... and total
        let (out, inn) = parse(&iu).unwrap();
        assert_eq!((out.len(), inn.len()), (8192, 4096));
        assert!(matches!(inn, DataDesc::Indirect { at: 120, count: 1, all: 1, .. }));
        (iu[6], iu[7]) = (0, 3); // no quirk with two directions: 0 of 2 is a partial table
        assert!(parse(&iu).is_none_or(|(out, _)| out.is_partial()));
    }

    #[test]
    fn maximum_counts_in_a_minimal_iu_are_malformed() {
        let mut iu = hex(WRITE10_INDIRECT);
        (iu[6], iu[7], iu[31]) = (255, 255, 252);
        for fmt in [0x20, 0x02, 0x22, 0x12, 0x21] {
            iu[5] = fmt;
            assert_eq!(parse(&iu), None);
        }
        iu[5] = 0;
        assert_eq!(parse(&iu), None, "the additional CDB alone is longer than the IU");
    }

    #[test]
    fn maximum_counts_that_fit_are_parsed() {
        let mut iu = hex(WRITE10_INDIRECT);
        iu.truncate(48);
        iu.resize(48 + 252 + 20 + 510 * 16, 0);
        (iu[5], iu[6], iu[7], iu[31]) = (0x20, 255, 255, 0xFF);
        patch(&mut iu, 300 + 12, &(510_u32 * 16).to_be_bytes());
        patch(&mut iu, 300 + 16, &510_u32.to_be_bytes());
        for i in 0..510 {
            iu[320 + i * 16 + 15] = 1;
        }
        let (out, _) = parse(&iu).unwrap();
        assert_eq!((out.len(), descs(&out, &iu).count()), (510, 510));
    }
}
