//! Builds SRP_CMD IUs, whatever form the data descriptors take (reference 1.6).
//!
//! Owns: nothing; writes into the caller's buffer. Nothing is written beyond the length that is
//! returned.

use crate::Tag;
use crate::wire::cmd::{Cmd, DescFormat, IMM_DESC_LEN, LEN, TaskAttr};
use crate::wire::desc::{DESC_LEN, INDIRECT_LEN, Indirect, MemDesc};

/// A descriptor table of ours.
#[derive(Clone, Copy, Debug)]
pub struct Table<'a> {
    /// Address of the full table in our registered memory.
    pub va: u64,
    /// R_Key of the full table.
    pub key: u32,
    /// All descriptors.
    pub descs: &'a [MemDesc],
    /// How many of them go into the IU; fewer than all make a partial table, which the target must
    /// fetch.
    pub in_iu: usize,
}

/// Data for the target.
#[derive(Clone, Copy, Debug, Default)]
pub enum OutBuf<'a> {
    /// None.
    #[default]
    None,
    /// One registered piece.
    Direct(MemDesc),
    /// Several.
    Table(Table<'a>),
    /// In the IU itself; only if negotiated.
    Immediate(&'a [u8]),
}

/// Room for data from the target.
#[derive(Clone, Copy, Debug, Default)]
pub enum InBuf<'a> {
    /// None.
    #[default]
    None,
    /// One registered piece.
    Direct(MemDesc),
    /// Several.
    Table(Table<'a>),
}

/// Why a request can't be started. Nothing changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StartError {
    /// Too little credit: wait for a response.
    NoCredit,
    /// All slots are in use: wait for a response.
    NoSlot,
    /// The IU would be longer than negotiated or than the buffer, or the transfer than 32 bits.
    TooLong,
    /// Immediate data was not negotiated.
    NoImmediate,
    /// A CDB of 0 or more than 268 bytes.
    BadCdb,
    /// The command to abort is not outstanding.
    NoSuchTask,
}

/// The parts of a command.
pub(super) struct Parts<'a> {
    pub tag: Tag,
    pub attr: TaskAttr,
    pub lun: u64,
    pub cdb: &'a [u8],
    pub data_out: OutBuf<'a>,
    pub data_in: InBuf<'a>,
}

/// A direction as it goes on the wire.
enum Desc<'a> {
    None,
    Direct(MemDesc),
    Table(Table<'a>),
    Immediate(u32),
}

impl Desc<'_> {
    fn format(&self) -> DescFormat {
        match self {
            Desc::None => DescFormat::None,
            Desc::Direct(_) => DescFormat::Direct,
            Desc::Table(_) => DescFormat::Indirect,
            Desc::Immediate(_) => DescFormat::Immediate,
        }
    }

    /// The count of this direction in the fixed part.
    fn count(&self) -> Result<u8, StartError> {
        match self {
            Desc::Table(t) => u8::try_from(t.in_iu).map_err(|_| StartError::TooLong),
            _ => Ok(0),
        }
    }
}

/// Writes the command into `iu`, of which at most `iu_max` bytes are used, and returns its length.
#[inline]
pub(super) fn cmd(
    p: &Parts<'_>,
    imm_offset: Option<u16>,
    iu_max: usize,
    iu: &mut [u8],
) -> Result<usize, StartError> {
    let room = iu.len().min(iu_max);
    let iu = &mut iu[..room];
    let (fixed, _) = iu.split_first_chunk_mut::<LEN>().ok_or(StartError::TooLong)?;
    let add_cdb = add_cdb_bytes(p.cdb)?;
    let out = match p.data_out {
        OutBuf::None => Desc::None,
        OutBuf::Direct(d) => Desc::Direct(d),
        OutBuf::Table(t) => Desc::Table(t),
        OutBuf::Immediate(data) => {
            Desc::Immediate(u32::try_from(data.len()).map_err(|_| StartError::TooLong)?)
        }
    };
    let inn = match p.data_in {
        InBuf::None => Desc::None,
        InBuf::Direct(d) => Desc::Direct(d),
        InBuf::Table(t) => Desc::Table(t),
    };
    let mut v = Cmd::init(fixed);
    v.set_formats(out.format(), inn.format());
    v.set_desc_cnts(out.count()?, inn.count()?);
    v.set_tag(p.tag);
    v.set_lun(p.lun);
    v.set_task_attr(p.attr);
    v.set_add_cdb_bytes(add_cdb);
    v.set_cdb(p.cdb);
    if add_cdb > 0 {
        let rest = iu.get_mut(LEN..LEN + add_cdb).ok_or(StartError::TooLong)?;
        rest.fill(0);
        rest[..p.cdb.len() - 16].copy_from_slice(&p.cdb[16..]);
    }
    let end = put(&out, LEN + add_cdb, iu)?;
    let end = put(&inn, end, iu)?;
    match p.data_out {
        OutBuf::Immediate(data) => {
            let at = usize::from(imm_offset.ok_or(StartError::NoImmediate)?);
            let room = iu.get_mut(at..).and_then(|rest| rest.get_mut(..data.len()));
            let room = room.filter(|_| end <= at).ok_or(StartError::TooLong)?;
            room.copy_from_slice(data);
            // The gap is ours too: no stale bytes leave the machine.
            iu[end..at].fill(0);
            Ok(at + data.len())
        }
        _ => Ok(end),
    }
}

/// Additional CDB bytes: what goes beyond 16, rounded up to 4.
#[inline]
fn add_cdb_bytes(cdb: &[u8]) -> Result<usize, StartError> {
    let extra = cdb.len().saturating_sub(16).next_multiple_of(4);
    if cdb.is_empty() || extra > 252 { Err(StartError::BadCdb) } else { Ok(extra) }
}

/// Writes one descriptor at `at` and returns the offset behind it.
#[inline]
fn put(desc: &Desc<'_>, at: usize, iu: &mut [u8]) -> Result<usize, StartError> {
    match desc {
        Desc::None => Ok(at),
        Desc::Direct(d) => {
            d.emit(chunk(iu, at)?);
            Ok(at + DESC_LEN)
        }
        Desc::Table(t) => put_table(t, at, iu),
        Desc::Immediate(len) => {
            *chunk(iu, at)? = len.to_be_bytes();
            Ok(at + IMM_DESC_LEN)
        }
    }
}

fn put_table(t: &Table<'_>, at: usize, iu: &mut [u8]) -> Result<usize, StartError> {
    let in_iu = t.descs.get(..t.in_iu).ok_or(StartError::TooLong)?;
    let sum: u64 = t.descs.iter().map(|d| u64::from(d.len)).sum();
    let total = u32::try_from(sum).map_err(|_| StartError::TooLong)?;
    let table_len = u32::try_from(t.descs.len() * DESC_LEN).map_err(|_| StartError::TooLong)?;
    let head = Indirect { table: MemDesc { va: t.va, key: t.key, len: table_len }, total };
    head.emit(chunk(iu, at)?);
    let mut end = at + INDIRECT_LEN;
    for d in in_iu {
        d.emit(chunk(iu, end)?);
        end += DESC_LEN;
    }
    Ok(end)
}

#[inline]
fn chunk<const N: usize>(iu: &mut [u8], at: usize) -> Result<&mut [u8; N], StartError> {
    iu.get_mut(at..).and_then(|rest| rest.first_chunk_mut()).ok_or(StartError::TooLong)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::golden::{READ10, WRITE10_INDIRECT, hex, write10_imm};

    const LUN: u64 = 0x0001_0000_0000_0000;

    fn parts<'a>(cdb: &'a [u8], data_out: OutBuf<'a>, data_in: InBuf<'a>) -> Parts<'a> {
        let tag = Tag([5, 0, 1, 0, 0, 0, 0, 0]);
        Parts { tag, attr: TaskAttr::Simple, lun: LUN, cdb, data_out, data_in }
    }

    fn build(p: &Parts<'_>) -> Result<Vec<u8>, StartError> {
        let mut iu = [0xA5; 8260];
        let n = cmd(p, Some(68), 8260, &mut iu)?;
        assert!(iu[n..].iter().all(|&b| b == 0xA5));
        Ok(iu[..n].to_vec())
    }

    #[test]
    fn golden_read_is_emitted() {
        let d = MemDesc { va: 0x7f12_3456_0000, key: 0xa1b2, len: 4096 };
        let cdb = [0x28, 0, 0, 0, 0x10, 0, 0, 0, 8, 0];
        assert_eq!(build(&parts(&cdb, OutBuf::None, InBuf::Direct(d))).unwrap(), hex(READ10));
    }

    #[test]
    fn golden_indirect_write_is_emitted() {
        let d = |va| MemDesc { va, key: 0xa1b2, len: 4096 };
        let descs = [d(0x2000_0000_7f00), d(0x2000_0000_7f00)];
        let golden = hex(WRITE10_INDIRECT);
        let real = [MemDesc::parse(golden[68..].first_chunk().unwrap()), descs[0]];
        let second = MemDesc::parse(golden[84..].first_chunk().unwrap());
        let descs = [real[0], second];
        let t = Table { va: 0x1122_3344_5566_0000, key: 0xbeef, descs: &descs, in_iu: 2 };
        let cdb = [0x2a, 0, 0, 0, 0x10, 0, 0, 0, 16, 0];
        assert_eq!(build(&parts(&cdb, OutBuf::Table(t), InBuf::None)).unwrap(), golden);
    }

    #[test]
    fn golden_immediate_write_is_emitted_with_a_clean_gap() {
        let cdb = [0x2a, 0, 0, 0, 0x10, 0, 0, 0, 1, 0];
        let mut golden = write10_imm();
        golden[52..68].fill(0);
        let iu = build(&parts(&cdb, OutBuf::Immediate(&[0xAA; 512]), InBuf::None)).unwrap();
        assert_eq!(iu, golden);
    }

    #[test]
    fn a_long_cdb_goes_into_the_additional_part() {
        let cdb: Vec<u8> = (0..30).collect();
        let iu = build(&parts(&cdb, OutBuf::None, InBuf::None)).unwrap();
        assert_eq!((iu.len(), iu[31]), (64, 16));
        assert_eq!(iu[32..62], cdb[..]);
        assert_eq!(iu[62..], [0, 0]);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let cdb = [0; 16];
        let d = MemDesc { va: 0, key: 0, len: u32::MAX };
        let many = [d; 600];
        let table = |descs, in_iu| OutBuf::Table(Table { va: 0, key: 0, descs, in_iu });
        let refused = |out| build(&parts(&cdb, out, InBuf::None)).unwrap_err();
        assert_eq!(refused(table(&many[..2], 2)), StartError::TooLong); // sum
        assert_eq!(refused(table(&many[..1], 2)), StartError::TooLong); // more than there are
        assert_eq!(refused(OutBuf::Immediate(&[0; 8193])), StartError::TooLong);
        let small = [MemDesc { len: 1, ..d }; 300];
        assert_eq!(refused(table(&small, 256)), StartError::TooLong);
        assert!(build(&parts(&cdb, table(&small, 255), InBuf::None)).is_ok());
        assert!(build(&parts(&cdb, table(&small, 0), InBuf::None)).is_ok());
        assert!(build(&parts(&cdb, OutBuf::Immediate(&[0; 8192]), InBuf::None)).is_ok());
        assert_eq!(build(&parts(&[], OutBuf::None, InBuf::None)), Err(StartError::BadCdb));
        assert_eq!(build(&parts(&[0; 269], OutBuf::None, InBuf::None)), Err(StartError::BadCdb));
    }

    #[test]
    fn every_short_buffer_is_refused_without_a_panic() {
        let d = MemDesc { va: 1, key: 2, len: 3 };
        let descs = [d; 3];
        let t = Table { va: 0, key: 0, descs: &descs, in_iu: 3 };
        let p = parts(&[0; 32], OutBuf::Table(t), InBuf::Direct(d));
        let whole = build(&p).unwrap().len();
        for n in 0..whole {
            let mut iu = vec![0; n];
            assert_eq!(cmd(&p, None, 8260, &mut iu), Err(StartError::TooLong));
        }
    }
}
