//! REQUEST SENSE, REPORT SUPPORTED OPERATION CODES, REPORT SUPPORTED TASK
//! MANAGEMENT FUNCTIONS (SPC-4, commands of these names).
//!
//! Owns: how the device server speaks of itself. Never does: keep a list of its own; the table in
//! `opcodes.rs` is what dispatch uses too.
//!
//! ```text
//!   options 0  all: length, (opcode 0 SA SA 0 CTDP|SERVACTV len len [timeouts])*
//!           1  opcode without service actions     2  opcode with      3  either
//!              one: 0 CTDP|SUPPORT len len usage* [timeouts]
//! ```
//!
//! Invariant: SUPPORT is 3 exactly for the commands that `opcodes::find` finds.

use crate::cdb::Cdb;
use crate::lu::{Call, Lu, respond};
use crate::opcodes::{self, Command};
use crate::sense::Sense;
use crate::step::{Builder, Reply, Step, data_in};

/// Byte 0 of REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS: ATS, ATSS, CTSS, LURS. The target has to
/// carry these out (reference 4.12); CLEAR ACA and the resets of the target it refuses.
pub const TASK_MANAGEMENT_FUNCTIONS: u8 = 0xD8;

const RCTD: u8 = 0x80;
const NOT_SUPPORTED: u8 = 0x01;
const SUPPORTED: u8 = 0x03;
/// CTDP in the one-command format.
const ONE_CTDP: u8 = 0x80;
/// CTDP and SERVACTV in the descriptors of all commands.
const ALL_CTDP: u8 = 0x02;
const SERVACTV: u8 = 0x01;
/// Command timeouts descriptor: its length, and no timeouts stated.
const TIMEOUTS: [u8; 12] = [0x00, 0x0A, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// A pending unit attention is reported here and is gone then.
pub(crate) fn request_sense(lu: &mut Lu, call: &mut Call<'_>) -> Step {
    let wanted = call.cdb.byte(4) != 0;
    let idle = if lu.stopped { Sense::STOPPED } else { Sense::NONE };
    let pending = if wanted { call.nexus.report() } else { None };
    let sense = pending.map_or(idle, |ua| ua.sense());
    let reply = sense_data(call.cdb, call.task.data_in_len, call.scratch, sense);
    respond(call.task, Ok(reply))
}

/// Sense data as parameter data, in the format that DESC asks for.
pub(crate) fn sense_data(
    cdb: Cdb<'_>,
    data_in_len: u32,
    scratch: &mut [u8],
    sense: Sense,
) -> Reply {
    let (bytes, len) = sense.bytes(cdb.byte(1) & 0x01 != 0);
    data_in(scratch, data_in_len, u32::from(cdb.byte(4)), |out| out.push(&bytes[..len]))
}

pub(crate) fn supported_operation_codes(lu: &mut Lu, call: &mut Call<'_>) -> Step {
    let timeouts = call.cdb.byte(2) & RCTD != 0;
    let allocation = call.cdb.be32(6);
    let data_in_len = call.task.data_in_len;
    let result = if call.cdb.byte(2) & 0x07 == 0 {
        Ok(data_in(call.scratch, data_in_len, allocation, |out| all_commands(lu, timeouts, out)))
    } else {
        requested(lu, call.cdb).map(|command| {
            data_in(call.scratch, data_in_len, allocation, |out| one(command, timeouts, out))
        })
    };
    respond(call.task, result)
}

/// The command that options 1 to 3 ask for; `Ok(None)` = not supported.
fn requested(lu: &Lu, cdb: Cdb<'_>) -> Result<Option<&'static Command>, Sense> {
    let (opcode, action) = (cdb.byte(3), cdb.be16(4));
    let entries = opcodes::of_opcode(opcode);
    let has_actions = entries.first().is_some_and(|command| command.action.is_some());
    let known = !entries.is_empty();
    match cdb.byte(2) & 0x07 {
        1 if has_actions => return Err(Sense::cdb_field(2).at_bit(2)),
        2 if known && !has_actions => return Err(Sense::cdb_field(2).at_bit(2)),
        1..=3 => {}
        _ => return Err(Sense::cdb_field(2).at_bit(2)),
    }
    // Option 1 ignores the service action; an opcode without any has only action 0 for option 3.
    let ignored = cdb.byte(2) & 0x07 == 1;
    let wanted = |command: &&Command| match command.action {
        Some(has) => u16::from(has) == action,
        None => ignored || action == 0,
    };
    Ok(entries.iter().filter(|command| command.is_offered(lu)).find(wanted))
}

fn one(command: Option<&Command>, timeouts: bool, out: &mut Builder<'_>) {
    let Some(command) = command else {
        out.push(&[0, NOT_SUPPORTED, 0, 0]);
        return;
    };
    let support = if timeouts { SUPPORTED | ONE_CTDP } else { SUPPORTED };
    out.push(&[0, support, 0, command.cdb_len]);
    out.push(&command.usage[..usize::from(command.cdb_len)]);
    if timeouts {
        out.push(&TIMEOUTS);
    }
}

fn all_commands(lu: &Lu, timeouts: bool, out: &mut Builder<'_>) {
    out.push(&[0; 4]);
    for command in opcodes::all().iter().filter(|command| command.is_offered(lu)) {
        let mut flags = if timeouts { ALL_CTDP } else { 0 };
        flags |= if command.action.is_some() { SERVACTV } else { 0 };
        let action = command.action.unwrap_or(0);
        out.push(&[command.opcode, 0, 0, action, 0, flags, 0, command.cdb_len]);
        if timeouts {
            out.push(&TIMEOUTS);
        }
    }
    let length = (out.len() - 4) as u32;
    out.set(0, &length.to_be_bytes());
}

pub(crate) fn supported_task_management(_lu: &mut Lu, call: &mut Call<'_>) -> Step {
    let extended = call.cdb.byte(2) & 0x80 != 0;
    let allocation = call.cdb.be32(6);
    if allocation < 4 {
        return call.task.check(Sense::cdb_field(6));
    }
    let reply = data_in(call.scratch, call.task.data_in_len, allocation, |out| {
        let additional = if extended { 12 } else { 0 };
        out.push(&[TASK_MANAGEMENT_FUNCTIONS, 0, 0, additional]);
        // Timeouts of the functions: none stated (TMFTMOV and all valid bits are 0).
        out.zeros(usize::from(additional));
    });
    respond(call.task, Ok(reply))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Bench, lu, plain};
    use crate::ua::Ua;

    fn rsoc(options: u8, opcode: u8, action: u16) -> [u8; 12] {
        let [high, low] = action.to_be_bytes();
        [0xA3, 0x0C, options, opcode, high, low, 0, 0, 0x10, 0, 0, 0]
    }

    #[test]
    fn request_sense_reports_one_unit_attention_and_clears_it() {
        let mut bench = Bench::new(plain());
        bench.nexus.raise(Ua::CAPACITY_CHANGED);
        let data = bench.data(&[3, 0, 0, 0, 252, 0], 252);
        assert_eq!(data, [0x70, 0, 6, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x2A, 9, 0, 0, 0, 0]);
        assert_eq!(bench.data(&[3, 1, 0, 0, 252, 0], 252), [0x72, 0, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn request_sense_with_no_allocation_keeps_the_unit_attention() {
        let mut bench = Bench::new(plain());
        bench.nexus.raise(Ua::CAPACITY_CHANGED);
        assert_eq!(bench.reply(&[3, 0, 0, 0, 0, 0], 0, 0), Reply::good(0, 0));
        assert_eq!(bench.nexus.pending(), [Ua::CAPACITY_CHANGED]);
    }

    #[test]
    fn request_sense_tells_that_the_unit_is_stopped() {
        let mut bench = Bench::new(plain());
        bench.lu.set_stopped(true);
        assert_eq!(bench.data(&[3, 1, 0, 0, 8, 0], 8), [0x72, 2, 4, 2, 0, 0, 0, 0]);
    }

    #[test]
    fn one_command_has_its_usage_data() {
        let mut bench = Bench::new(plain());
        let mut want = vec![0, 3, 0, 10, 0x28, 0x18, 255, 255, 255, 255, 0, 255, 255, 0];
        assert_eq!(bench.data(&rsoc(1, 0x28, 0), 512), want);
        assert_eq!(bench.data(&rsoc(3, 0x28, 0), 512), want);
        want[1] = 0x83;
        want.extend([0, 10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bench.data(&rsoc(0x81, 0x28, 0), 512), want);

        let want = [0, 3, 0, 12, 0xA3, 0x0C, 0x87, 255, 255, 255, 255, 255, 255, 255, 0, 0];
        assert_eq!(bench.data(&rsoc(2, 0xA3, 0x0C), 512), want);
        assert_eq!(bench.data(&rsoc(3, 0xA3, 0x0C), 512), want);
    }

    #[test]
    fn what_is_not_supported_is_told_in_four_bytes() {
        let mut bench = Bench::new(plain());
        for cdb in [rsoc(1, 0x7F, 0), rsoc(2, 0x83, 0), rsoc(2, 0x9E, 0x12), rsoc(3, 0x28, 1)] {
            assert_eq!(bench.data(&cdb, 512), [0, 1, 0, 0], "{cdb:x?}");
        }
        // UNMAP exists only on a thin unit.
        assert_eq!(bench.data(&rsoc(1, 0x42, 0), 512), [0, 1, 0, 0]);
        let mut thin = Bench::new(lu(|config| config.caps.unmap = true));
        assert_eq!(thin.data(&rsoc(1, 0x42, 0), 512)[..4], [0, 3, 0, 10]);
    }

    #[test]
    fn options_that_contradict_the_opcode_are_refused() {
        let mut bench = Bench::new(plain());
        for cdb in [rsoc(1, 0x9E, 0x10), rsoc(2, 0x28, 0), rsoc(4, 0, 0), rsoc(7, 0, 0)] {
            assert_eq!(bench.sense(&cdb, 0, 512), Sense::cdb_field(2).at_bit(2), "{cdb:x?}");
        }
    }

    #[test]
    fn all_commands_are_listed_with_or_without_timeouts() {
        let mut bench = Bench::new(plain());
        let short = bench.data(&rsoc(0, 0, 0), 4096);
        let count = (short.len() - 4) / 8;
        assert_eq!(short[..4], (count as u32 * 8).to_be_bytes());
        assert_eq!(short[4..12], [0x00, 0, 0, 0, 0, 0, 0, 6]);
        assert!(short[4..].chunks(8).any(|d| d == [0x9E, 0, 0, 0x10, 0, 1, 0, 16]));
        let long = bench.data(&rsoc(0x80, 0, 0), 4096);
        assert_eq!(long[..4], (count as u32 * 20).to_be_bytes());
        assert_eq!(long[4..24], [0, 0, 0, 0, 0, 2, 0, 6, 0, 10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bench.data(&rsoc(0x80, 0, 0), 4), long[..4]);
    }

    #[test]
    fn task_management_functions_are_told_in_both_forms() {
        let mut bench = Bench::new(plain());
        let cdb = [0xA3, 0x0D, 0, 0, 0, 0, 0, 0, 0, 64, 0, 0];
        assert_eq!(bench.data(&cdb, 64), [0xD8, 0, 0, 0]);
        let mut extended = cdb;
        extended[2] = 0x80;
        let mut want = vec![0xD8, 0, 0, 12];
        want.resize(16, 0);
        assert_eq!(bench.data(&extended, 64), want);
        let mut short = cdb;
        short[9] = 3;
        assert_eq!(bench.sense(&short, 0, 64), Sense::cdb_field(6));
    }
}
