//! LUN addressing (SAM-5, reference 8.5), REPORT LUNS (SPC-4), and LUNs without a logical unit.
//!
//! Owns: the 8-byte form of LUNs. Never does: know which LUNs a nexus may see; the caller passes
//! them.
//!
//! ```text
//!   byte 0   00pppppp  peripheral device addressing: LUN = byte 1 (bus = 0)
//!            00hhhhhh  the same with bus != 0: Linux's LUN 256 ... 16383; taken as flat
//!            01hhhhhh  flat space addressing: LUN = hhhhhh, byte 1
//!            10, 11    logical unit (needs a hierarchy), extended (well-known LUs): none here
//!   bytes 2-7 = 0: one level
//! ```
//!
//! Invariant: what `emit_lun` makes, `parse_lun` takes back.

use crate::cdb::{CDB_BYTES, Cdb};
use crate::lu::{Call, Lu};
use crate::opcodes;
use crate::sense::Sense;
use crate::step::{Reply, SCRATCH_BYTES, Step, data_in};
use crate::{inquiry, report};

/// LUNs that one nexus can see: as many as REPORT LUNS fits into scratch.
pub const LUNS_MAX: usize = (SCRATCH_BYTES - 8) / 8;

const FLAT: u64 = 0x4000;
/// 14 bits of LUN.
const LUN_MASK: u64 = 0x3FFF;

/// The LUN that an SRP_CMD addresses; `raw` is its 8 bytes, big endian. `None` = no form we have.
#[inline]
pub fn parse_lun(raw: u64) -> Option<u16> {
    let (first, rest) = (raw >> 48, raw << 16);
    // Method 00 or 01. C1 01, the REPORT LUNS well-known LU, is optional, and no SRP initiator
    // needs it.
    if rest != 0 || first >> 14 > 1 {
        return None;
    }
    Some((first & LUN_MASK) as u16)
}

/// The 8-byte form of a LUN below 16384: peripheral below 256, flat above.
pub fn emit_lun(lun: u16) -> [u8; 8] {
    let lun = u64::from(lun);
    assert!(lun <= LUN_MASK, "a LUN has 14 bits");
    let first = if lun < 256 { lun } else { FLAT | lun };
    (first << 48).to_be_bytes()
}

/// The LUNs that a nexus sees, ascending without duplicates.
#[derive(Clone, Copy, Debug)]
pub struct LunList<'a>(&'a [u16]);

impl<'a> LunList<'a> {
    /// `luns` ascend, are below 16384, and number at most [`LUNS_MAX`]: the configuration's affair.
    pub fn new(luns: &'a [u16]) -> LunList<'a> {
        assert!(luns.len() <= LUNS_MAX, "at most {LUNS_MAX} LUNs a nexus");
        assert!(luns.is_sorted_by(|a, b| a < b), "LUNs ascend");
        assert!(luns.last().is_none_or(|lun| u64::from(*lun) <= LUN_MASK), "LUNs have 14 bits");
        LunList(luns)
    }
}

/// REPORT LUNS, which no logical unit can answer alone. The caller sends every CDB with opcode A0h
/// here, for present and absent LUNs alike; unit attentions do not matter to it. Data go to
/// `scratch`.
pub fn report_luns(cdb: &[u8], luns: &LunList<'_>, scratch: &mut [u8]) -> Step {
    let padded = pad(cdb);
    let reserved = match opcodes::of_opcode(0xA0).first() {
        Some(command) if cdb.len() < usize::from(command.cdb_len) => Some(Sense::INVALID_IU),
        Some(command) if !command.fits(Cdb(&padded)) => Some(command.misfit(Cdb(&padded))),
        Some(_) => None,
        None => unreachable!("the table has REPORT LUNS"),
    };
    let result = reserved.map_or_else(|| list(Cdb(&padded), luns, u32::MAX, scratch), Err);
    Step::Respond(result.unwrap_or_else(Reply::check))
}

fn pad(cdb: &[u8]) -> [u8; CDB_BYTES] {
    let mut padded = [0; CDB_BYTES];
    let given = cdb.len().min(CDB_BYTES);
    padded[..given].copy_from_slice(&cdb[..given]);
    padded
}

fn list(
    cdb: Cdb<'_>,
    luns: &LunList<'_>,
    data_in_len: u32,
    scratch: &mut [u8],
) -> Result<Reply, Sense> {
    let allocation = cdb.be32(6);
    // SELECT REPORT 1 asks for well-known logical units; there are none.
    let shown = match cdb.byte(2) {
        0 | 2 => luns.0,
        1 => &[],
        _ => return Err(Sense::cdb_field(2)),
    };
    if allocation < 16 {
        return Err(Sense::cdb_field(6));
    }
    Ok(data_in(scratch, data_in_len, allocation, |out| {
        let bytes = (shown.len() * 8) as u32;
        out.push(&bytes.to_be_bytes());
        out.push(&[0; 4]);
        for lun in shown {
            out.push(&emit_lun(*lun));
        }
    }))
}

/// REPORT LUNS in the table: supported, but by `report_luns`. A caller that hands it to a logical
/// unit forgot that; the initiator gets an answer all the same.
pub(crate) fn report_luns_of_lu(_lu: &mut Lu, call: &mut Call<'_>) -> Step {
    call.task.check(Sense::INVALID_OPCODE)
}

/// Answers any command to a LUN without a logical unit (SPC-4 INQUIRY,
/// REPORT LUNS, REQUEST SENSE).
pub fn absent_lun(cdb: &[u8], data_in_len: u32, scratch: &mut [u8], luns: &[u16]) -> Reply {
    let padded = pad(cdb);
    let cdb_view = Cdb(&padded);
    let command = opcodes::of_opcode(cdb_view.opcode()).first();
    match command {
        Some(command) if !command.is_exempt() => return Reply::check(Sense::LU_NOT_SUPPORTED),
        Some(command) if cdb.len() < usize::from(command.cdb_len) => {
            return Reply::check(Sense::INVALID_IU);
        }
        Some(command) if !command.fits(cdb_view) => return Reply::check(command.misfit(cdb_view)),
        Some(_) => {}
        None => return Reply::check(Sense::LU_NOT_SUPPORTED),
    }
    match cdb_view.opcode() {
        0x12 if cdb_view.byte(1) & 0x01 != 0 => Reply::check(Sense::LU_NOT_SUPPORTED),
        0x12 if cdb_view.byte(2) != 0 => Reply::check(Sense::cdb_field(2)),
        0x12 => inquiry::absent(scratch, data_in_len, u32::from(cdb_view.be16(3))),
        0xA0 => {
            let result = list(cdb_view, &LunList::new(luns), data_in_len, scratch);
            result.unwrap_or_else(Reply::check)
        }
        0x03 => report::sense_data(cdb_view, data_in_len, scratch, Sense::LU_NOT_SUPPORTED),
        opcode => unreachable!("opcode {opcode:#x} is exempt but unknown here"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::step::status;

    fn raw(bytes: [u8; 8]) -> u64 {
        u64::from_be_bytes(bytes)
    }

    #[test]
    fn luns_are_taken_in_every_form_that_initiators_use() {
        assert_eq!(parse_lun(raw([0, 5, 0, 0, 0, 0, 0, 0])), Some(5));
        assert_eq!(parse_lun(raw([0x01, 0x00, 0, 0, 0, 0, 0, 0])), Some(256));
        assert_eq!(parse_lun(raw([0x40, 0x01, 0, 0, 0, 0, 0, 0])), Some(1));
        assert_eq!(parse_lun(raw([0x7F, 0xFF, 0, 0, 0, 0, 0, 0])), Some(0x3FFF));
        for bytes in [
            [0xC1, 0x01, 0, 0, 0, 0, 0, 0],
            [0x80, 0x01, 0, 0, 0, 0, 0, 0],
            [0xD2, 0, 0, 1, 0, 0, 0, 0],
            [0, 1, 0, 0, 0, 0, 0, 1],
            [0, 1, 1, 0, 0, 0, 0, 0],
        ] {
            assert_eq!(parse_lun(raw(bytes)), None, "{bytes:x?}");
        }
    }

    #[test]
    fn every_lun_comes_back_as_it_went() {
        assert_eq!(emit_lun(255), [0, 255, 0, 0, 0, 0, 0, 0]);
        assert_eq!(emit_lun(256), [0x41, 0, 0, 0, 0, 0, 0, 0]);
        for lun in 0..0x4000 {
            assert_eq!(parse_lun(raw(emit_lun(lun))), Some(lun));
        }
    }

    fn luns_cdb(select: u8, allocation: u8) -> [u8; 16] {
        [0xA0, 0, select, 0, 0, 0, 0, 0, 0, allocation, 0, 0, 0, 0, 0, 0]
    }

    fn reply(cdb: &[u8], luns: &[u16], scratch: &mut [u8]) -> Reply {
        match report_luns(cdb, &LunList::new(luns), scratch) {
            Step::Respond(reply) => reply,
            step => panic!("{step:?}"),
        }
    }

    #[test]
    fn report_luns_lists_ascending_and_tells_the_full_length() {
        let mut scratch = [0xA5; 64];
        let answer = reply(&luns_cdb(0, 64), &[0, 3, 300], &mut scratch);
        assert_eq!((answer.status, answer.data_in_len, answer.wants_in), (0, 32, 32));
        let mut want = vec![0, 0, 0, 24, 0, 0, 0, 0];
        want.extend([0; 8]);
        want.extend([0, 3, 0, 0, 0, 0, 0, 0, 0x41, 0x2C, 0, 0, 0, 0, 0, 0, 0xA5]);
        assert_eq!(scratch[..33], want);

        let answer = reply(&luns_cdb(2, 16), &[0, 3, 300], &mut scratch);
        assert_eq!((answer.data_in_len, answer.wants_in), (16, 16));
        assert_eq!(scratch[3], 24);
        let answer = reply(&luns_cdb(1, 16), &[0, 3, 300], &mut scratch);
        assert_eq!((answer.data_in_len, scratch[3]), (8, 0));
    }

    #[test]
    fn report_luns_refuses_short_allocations_and_unknown_selections() {
        let mut scratch = [0; 64];
        let sense = |cdb: &[u8], scratch: &mut [u8]| reply(cdb, &[0], scratch).sense;
        assert_eq!(sense(&luns_cdb(0, 15), &mut scratch), Some(Sense::cdb_field(6)));
        assert_eq!(sense(&luns_cdb(3, 16), &mut scratch), Some(Sense::cdb_field(2)));
        let mut naca = luns_cdb(0, 16);
        naca[11] = 0x04;
        assert_eq!(sense(&naca, &mut scratch), Some(Sense::cdb_field(11).at_bit(2)));
        assert_eq!(sense(&naca[..11], &mut scratch), Some(Sense::INVALID_IU));
        assert_eq!(sense(&[], &mut scratch), Some(Sense::INVALID_IU));
    }

    #[test]
    fn inquiry_to_an_absent_lun_says_that_nothing_is_there() {
        let mut scratch = [0xA5; 64];
        let answer = absent_lun(&[0x12, 0, 0, 0, 255, 0], 255, &mut scratch, &[1]);
        assert_eq!((answer.status, answer.data_in_len, answer.wants_in), (0, 36, 36));
        let mut want = vec![0x7F, 0, 0x06, 0x12, 31, 0, 0, 2];
        want.extend([b' '; 28]);
        assert_eq!(scratch[..36], want);
        let answer = absent_lun(&[0x12, 1, 0x83, 0, 255, 0], 255, &mut scratch, &[1]);
        assert_eq!(answer, Reply::check(Sense::LU_NOT_SUPPORTED));
    }

    #[test]
    fn an_absent_lun_reports_luns_and_its_own_sense() {
        let mut scratch = [0xA5; 64];
        let answer = absent_lun(&luns_cdb(0, 16), 12, &mut scratch, &[1]);
        assert_eq!((answer.data_in_len, answer.wants_in), (12, 16));
        assert_eq!(scratch[..12], [0, 0, 0, 8, 0, 0, 0, 0, 0, 1, 0, 0]);

        let answer = absent_lun(&[3, 0, 0, 0, 252, 0], 252, &mut scratch, &[1]);
        assert_eq!((answer.status, answer.data_in_len), (status::GOOD, 18));
        assert_eq!(scratch[..3], [0x70, 0, 5]);
        assert_eq!(scratch[12..14], [0x25, 0]);
        let answer = absent_lun(&[3, 1, 0, 0, 252, 0], 252, &mut scratch, &[1]);
        assert_eq!(answer.data_in_len, 8);
        assert_eq!(scratch[..4], [0x72, 5, 0x25, 0]);
    }

    #[test]
    fn anything_else_to_an_absent_lun_is_refused() {
        let mut scratch = [0; 64];
        for opcode in [0x00, 0x28, 0xFF, 0xA3] {
            let answer = absent_lun(&[opcode; 16], 512, &mut scratch, &[]);
            assert_eq!(answer, Reply::check(Sense::LU_NOT_SUPPORTED));
        }
        assert_eq!(absent_lun(&[], 0, &mut scratch, &[]).sense, Some(Sense::LU_NOT_SUPPORTED));
    }
}
