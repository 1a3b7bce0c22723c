//! The table of commands: dispatch, reserved bits and REPORT SUPPORTED OPERATION CODES all read it.
//!
//! Owns: which commands exist, their CDB lengths, which CDB bits they evaluate. Never does: run
//! one.
//!
//! ```text
//!   CDB --find()--> Command { usage, allowed, traits, run } <--all()-- REPORT SUPPORTED OP. CODES
//! ```
//!
//! Invariants: entries of one opcode stand together, ascending; an opcode has either service
//! actions or one entry without. A bit that is neither evaluated (`usage`) nor knowingly ignored
//! (`allowed`) is reserved and answered with 24/00: so RDPROTECT, WRPROTECT (no protection
//! information), ANCHOR, LOEJ, PBDATA, LBDATA, CMDDT and NACA need no code of their own.

use crate::cdb::{CDB_BYTES, Cdb};
use crate::lu::{Call, Lu};
use crate::sense::Sense;
use crate::step::Step;
use crate::{
    capacity, inquiry, luns, mode, report, rw, start_stop, sync, unmap, verify, write_same,
};

/// What runs a command whose LU access and reserved bits have been checked.
type Run = fn(&mut Lu, &mut Call<'_>) -> Step;

/// INQUIRY, REPORT LUNS and REQUEST SENSE run despite unit attentions (SAM-5, unit attention
/// conditions).
const EXEMPT: u8 = 0x01;
/// The command needs a unit that is started (medium access, and TEST UNIT READY).
const MEDIUM: u8 = 0x02;
/// The command exists only on a bdev that can unmap.
const UNMAPS: u8 = 0x04;

/// CONTROL: everything but NACA is ignored (reference 8.1); ACA is not supported (NORMACA = 0).
const CONTROL_IGNORED: u8 = 0xFB;

/// One command.
pub(crate) struct Command {
    /// OPERATION CODE.
    pub opcode: u8,
    /// SERVICE ACTION, of opcodes that have them.
    pub action: Option<u8>,
    /// Bytes of the CDB.
    pub cdb_len: u8,
    /// EXEMPT, MEDIUM, UNMAPS.
    traits: u8,
    /// CDB USAGE DATA (SPC-4 REPORT SUPPORTED OPERATION CODES): bits that are evaluated.
    pub usage: [u8; CDB_BYTES],
    /// Bits that may be set: `usage`, what is ignored, and all bytes after the CDB.
    allowed: u128,
    /// What runs it.
    pub run: Run,
}

impl Command {
    /// From the usage data (its length is the CDB's) and the (byte, bits) that are ignored.
    const fn new(usage: &[u8], ignored: &[(usize, u8)], traits: u8, run: Run) -> Command {
        let mut full = [0; CDB_BYTES];
        let mut allowed = [0xFF; CDB_BYTES];
        let mut at = 0;
        while at < usage.len() {
            full[at] = usage[at];
            allowed[at] = usage[at];
            at += 1;
        }
        let mut next = 0;
        while next < ignored.len() {
            allowed[ignored[next].0] |= ignored[next].1;
            next += 1;
        }
        allowed[0] = 0xFF;
        allowed[usage.len() - 1] = CONTROL_IGNORED;
        Command {
            opcode: usage[0],
            action: None,
            cdb_len: usage.len() as u8,
            traits,
            usage: full,
            allowed: u128::from_ne_bytes(allowed),
            run,
        }
    }

    /// The same with a service action, which stands in byte 1.
    const fn action(mut self, action: u8) -> Command {
        assert!(self.usage[1] == action, "usage data of byte 1 is the service action");
        let mut allowed = self.allowed.to_ne_bytes();
        allowed[1] |= 0x1F;
        self.allowed = u128::from_ne_bytes(allowed);
        self.action = Some(action);
        self
    }

    /// Whether no reserved bit is set.
    #[inline]
    pub(crate) fn fits(&self, cdb: Cdb<'_>) -> bool {
        u128::from_ne_bytes(*cdb.0) & !self.allowed == 0
    }

    /// INVALID FIELD IN CDB, pointing at the first reserved bit that is set.
    #[cold]
    pub(crate) fn misfit(&self, cdb: Cdb<'_>) -> Sense {
        let wrong = (u128::from_ne_bytes(*cdb.0) & !self.allowed).to_ne_bytes();
        let at = wrong.iter().position(|byte| *byte != 0).expect("asked only when !fits()");
        Sense::cdb_field(at as u16).at_bit(7 - wrong[at].leading_zeros() as u8)
    }

    pub(crate) fn is_exempt(&self) -> bool {
        self.traits & EXEMPT != 0
    }

    pub(crate) fn needs_medium(&self) -> bool {
        self.traits & MEDIUM != 0
    }

    /// Whether this logical unit has the command.
    pub(crate) fn is_offered(&self, lu: &Lu) -> bool {
        self.traits & UNMAPS == 0 || lu.caps.unmap
    }
}

/// DPO and FUA are evaluated (DPO has no effect); FUA_NV is ignored (reference 8.4).
const RW_IGNORED_10: &[(usize, u8)] = &[(1, 0x02), (6, 0x3F)];
const RW_IGNORED_12: &[(usize, u8)] = &[(1, 0x02), (10, 0x3F)];
const RW_IGNORED_16: &[(usize, u8)] = &[(1, 0x02), (14, 0x3F)];
/// GROUP NUMBER alone: there is no grouping function.
const GROUP_10: &[(usize, u8)] = &[(6, 0x3F)];
const GROUP_12: &[(usize, u8)] = &[(10, 0x3F)];
const GROUP_16: &[(usize, u8)] = &[(14, 0x3F)];
/// SYNC_NV besides.
const SYNC_IGNORED_10: &[(usize, u8)] = &[(1, 0x04), (6, 0x3F)];
const SYNC_IGNORED_16: &[(usize, u8)] = &[(1, 0x04), (14, 0x3F)];

const ALL: u8 = 0xFF;

pub(crate) const READ_10: Command = Command::new(
    &[0x28, 0x18, ALL, ALL, ALL, ALL, 0, ALL, ALL, 0],
    RW_IGNORED_10,
    MEDIUM,
    rw::read_10,
);
pub(crate) const WRITE_10: Command = Command::new(
    &[0x2A, 0x18, ALL, ALL, ALL, ALL, 0, ALL, ALL, 0],
    RW_IGNORED_10,
    MEDIUM,
    rw::write_10,
);
pub(crate) const READ_16: Command = Command::new(
    &[0x88, 0x18, ALL, ALL, ALL, ALL, ALL, ALL, ALL, ALL, ALL, ALL, ALL, ALL, 0, 0],
    RW_IGNORED_16,
    MEDIUM,
    rw::read_16,
);
pub(crate) const WRITE_16: Command = Command::new(
    &[0x8A, 0x18, ALL, ALL, ALL, ALL, ALL, ALL, ALL, ALL, ALL, ALL, ALL, ALL, 0, 0],
    RW_IGNORED_16,
    MEDIUM,
    rw::write_16,
);

static TABLE: [Command; 27] = [
    Command::new(&[0x00, 0, 0, 0, 0, 0], &[], MEDIUM, start_stop::test_unit_ready),
    Command::new(&[0x03, 0x01, 0, 0, ALL, 0], &[], EXEMPT, report::request_sense),
    Command::new(&[0x08, 0x1F, ALL, ALL, ALL, 0], &[], MEDIUM, rw::read_6),
    Command::new(&[0x0A, 0x1F, ALL, ALL, ALL, 0], &[], MEDIUM, rw::write_6),
    Command::new(&[0x12, 0x01, ALL, ALL, ALL, 0], &[], EXEMPT, inquiry::inquiry),
    Command::new(&[0x1A, 0x08, ALL, ALL, ALL, 0], &[], 0, mode::sense_6),
    // NO_FLUSH is ignored: flushing all the same can do no harm.
    Command::new(&[0x1B, 0x01, 0, 0, 0x01, 0], &[(4, 0x04)], 0, start_stop::start_stop),
    Command::new(&[0x25, 0, ALL, ALL, ALL, ALL, 0, 0, 0x01, 0], &[], 0, capacity::read_capacity_10),
    READ_10,
    WRITE_10,
    Command::new(
        &[0x2F, 0x16, ALL, ALL, ALL, ALL, 0, ALL, ALL, 0],
        GROUP_10,
        MEDIUM,
        verify::verify_10,
    ),
    Command::new(
        &[0x35, 0x02, ALL, ALL, ALL, ALL, 0, ALL, ALL, 0],
        SYNC_IGNORED_10,
        MEDIUM,
        sync::synchronize_10,
    ),
    Command::new(
        &[0x41, 0x08, ALL, ALL, ALL, ALL, 0, ALL, ALL, 0],
        GROUP_10,
        MEDIUM,
        write_same::write_same_10,
    ),
    Command::new(&[0x42, 0, 0, 0, 0, 0, 0, ALL, ALL, 0], GROUP_10, MEDIUM | UNMAPS, unmap::unmap),
    Command::new(&[0x5A, 0x18, ALL, ALL, 0, 0, 0, ALL, ALL, 0], &[], 0, mode::sense_10),
    READ_16,
    WRITE_16,
    Command::new(
        &[0x8F, 0x16, ALL, ALL, ALL, ALL, ALL, ALL, ALL, ALL, ALL, ALL, ALL, ALL, 0, 0],
        GROUP_16,
        MEDIUM,
        verify::verify_16,
    ),
    Command::new(
        &[0x91, 0x02, ALL, ALL, ALL, ALL, ALL, ALL, ALL, ALL, ALL, ALL, ALL, ALL, 0, 0],
        SYNC_IGNORED_16,
        MEDIUM,
        sync::synchronize_16,
    ),
    Command::new(
        &[0x93, 0x09, ALL, ALL, ALL, ALL, ALL, ALL, ALL, ALL, ALL, ALL, ALL, ALL, 0, 0],
        GROUP_16,
        MEDIUM,
        write_same::write_same_16,
    ),
    Command::new(
        &[0x9E, 0x10, ALL, ALL, ALL, ALL, ALL, ALL, ALL, ALL, ALL, ALL, ALL, ALL, 0x01, 0],
        &[],
        0,
        capacity::read_capacity_16,
    )
    .action(0x10),
    Command::new(
        &[0xA0, 0, ALL, 0, 0, 0, ALL, ALL, ALL, ALL, 0, 0],
        &[],
        EXEMPT,
        luns::report_luns_of_lu,
    ),
    Command::new(
        &[0xA3, 0x0C, 0x87, ALL, ALL, ALL, ALL, ALL, ALL, ALL, 0, 0],
        &[],
        0,
        report::supported_operation_codes,
    )
    .action(0x0C),
    Command::new(
        &[0xA3, 0x0D, 0x80, 0, 0, 0, ALL, ALL, ALL, ALL, 0, 0],
        &[],
        0,
        report::supported_task_management,
    )
    .action(0x0D),
    Command::new(
        &[0xA8, 0x18, ALL, ALL, ALL, ALL, ALL, ALL, ALL, ALL, 0, 0],
        RW_IGNORED_12,
        MEDIUM,
        rw::read_12,
    ),
    Command::new(
        &[0xAA, 0x18, ALL, ALL, ALL, ALL, ALL, ALL, ALL, ALL, 0, 0],
        RW_IGNORED_12,
        MEDIUM,
        rw::write_12,
    ),
    Command::new(
        &[0xAF, 0x16, ALL, ALL, ALL, ALL, ALL, ALL, ALL, ALL, 0, 0],
        GROUP_12,
        MEDIUM,
        verify::verify_12,
    ),
];

/// For each opcode the position of its first entry, or `NOWHERE`.
static FIRST: [u8; 256] = first_entries();
const NOWHERE: u8 = 0xFF;

const fn first_entries() -> [u8; 256] {
    let mut first = [NOWHERE; 256];
    let mut at = TABLE.len();
    while at > 0 {
        at -= 1;
        first[TABLE[at].opcode as usize] = at as u8;
    }
    first
}

/// All entries, ascending.
pub(crate) fn all() -> &'static [Command] {
    &TABLE
}

/// The entries of one opcode: none, one without a service action, or some with.
pub(crate) fn of_opcode(opcode: u8) -> &'static [Command] {
    let first = usize::from(FIRST[usize::from(opcode)]);
    if first >= TABLE.len() {
        return &[];
    }
    let count = TABLE[first..].iter().take_while(|command| command.opcode == opcode).count();
    &TABLE[first..first + count]
}

/// The command of a CDB. An unknown opcode is 20/00; an unknown service action of a known opcode is
/// INVALID FIELD IN CDB pointing at byte 1 (SPC-4, service actions).
pub(crate) fn find(lu: &Lu, cdb: Cdb<'_>) -> Result<&'static Command, Sense> {
    let entries = of_opcode(cdb.opcode());
    let mut offered = entries.iter().filter(|command| command.is_offered(lu)).peekable();
    if offered.peek().is_none() {
        return Err(Sense::INVALID_OPCODE);
    }
    offered
        .find(|command| command.action.is_none_or(|action| action == cdb.service_action()))
        .ok_or(Sense::cdb_field(1).at_bit(4))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_ascends_and_opcodes_stand_together() {
        for pair in TABLE.windows(2) {
            let before = (pair[0].opcode, pair[0].action);
            let after = (pair[1].opcode, pair[1].action);
            assert!(before < after, "{before:x?} before {after:x?}");
            assert!(pair[0].opcode != pair[1].opcode || pair[0].action.is_some());
        }
    }

    #[test]
    fn cdb_lengths_follow_the_group_code() {
        for command in all() {
            let want = match command.opcode >> 5 {
                0 => 6,
                1 | 2 => 10,
                4 => 16,
                5 => 12,
                _ => panic!("opcode {:#x} of an unused group", command.opcode),
            };
            assert_eq!(command.cdb_len, want, "opcode {:#x}", command.opcode);
            assert_eq!(
                command.usage[usize::from(command.cdb_len) - 1],
                0,
                "CONTROL is not evaluated"
            );
        }
    }

    #[test]
    fn bytes_after_the_cdb_and_control_but_naca_are_ignored() {
        let mut bytes = [0xFF; 16];
        bytes[..6].copy_from_slice(&[0, 0, 0, 0, 0, 0xFB]);
        assert!(TABLE[0].fits(Cdb(&bytes)));
        bytes[5] = 0x04;
        assert!(!TABLE[0].fits(Cdb(&bytes)));
        assert_eq!(TABLE[0].misfit(Cdb(&bytes)), Sense::cdb_field(5).at_bit(2));
    }
}
