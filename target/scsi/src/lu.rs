//! A logical unit as one reactor sees it: configuration, state, and the order of checks.
//!
//! Owns: [`LuConfig`], [`Lu`], the entry points `start`, `on_data`, `on_io`.
//! Never does: know other nexuses or reactors. State that all reactors share (whether the unit is
//! stopped) is a copy here; the target forwards a change by message and `set_stopped`.
//!
//! ```text
//!  start: I/O path (READ, WRITE 10 and 16; nothing pending, unit started)
//!     \-> dispatch: table -> unit attention -> (reservation) -> (ALUA) -> started? -> bits
//!                 -> the command: range -> length -> write protected -> buffer length -> medium
//! ```
//!
//! Invariant: that order (reference 8.4) holds on both ways.

use usurp_bdev::{Caps, Geometry, Lba, Status};

use crate::cdb::{CDB_BYTES, Cdb, Range};
use crate::inquiry::Identity;
use crate::limits::Limits;
use crate::opcodes::{self, Command};
use crate::sense::Sense;
use crate::step::{Reply, Step};
use crate::task::{Plan, Task};
use crate::ua::NexusLu;
use crate::{inquiry, rw, start_stop, unmap, verify, write_same};

/// What a logical unit is made of. [`LuConfig::check`] says what must hold.
#[derive(Clone, Debug)]
pub struct LuConfig {
    /// The bdev's geometry.
    pub geometry: Geometry,
    /// The bdev's capabilities.
    pub caps: Caps,
    /// Writing is refused by configuration; a read-only bdev refuses too.
    pub read_only: bool,
    /// RMB of INQUIRY.
    pub removable: bool,
    /// T10 VENDOR IDENTIFICATION: at most 8 printable ASCII characters.
    pub vendor: String,
    /// PRODUCT IDENTIFICATION: at most 16 printable ASCII characters.
    pub product: String,
    /// PRODUCT REVISION LEVEL: at most 4 printable ASCII characters.
    pub revision: String,
    /// PRODUCT SERIAL NUMBER: 1 to [`crate::SERIAL_BYTES_MAX`] printable ASCII characters; unique
    /// and stable.
    pub serial: String,
    /// NAA 6 designator (its first four bits are 6); unique, stable, the same on every port.
    pub naa: [u8; 16],
    /// The longest transfer, in blocks; its bytes fit a `u32`.
    pub max_transfer_blocks: u32,
    /// RELATIVE TARGET PORT IDENTIFIER, from 1.
    pub rel_port_id: u16,
    /// SRP target port identifier: identifier extension, then GUID.
    pub target_port: [u8; 16],
}

impl LuConfig {
    /// A logical unit on a bdev, with our names and an identity that the caller has to replace.
    pub fn new(geometry: Geometry, caps: Caps) -> LuConfig {
        LuConfig {
            geometry,
            caps,
            read_only: false,
            removable: false,
            vendor: "USURP".into(),
            product: "Virtual Disk".into(),
            revision: "0001".into(),
            serial: "0".into(),
            naa: [0x60; 16],
            max_transfer_blocks: (16 << 20) / geometry.block_size,
            rel_port_id: 1,
            target_port: [0; 16],
        }
    }

    /// What is wrong with it, as "key: what would be right".
    pub fn check(&self) -> Result<(), &'static str> {
        let printable = |text: &str, max: usize| {
            text.len() <= max && text.bytes().all(|byte| (0x20..=0x7E).contains(&byte))
        };
        let bytes = u64::from(self.max_transfer_blocks) * u64::from(self.geometry.block_size);
        let checks = [
            (self.geometry.is_sane(), "geometry: not one that a bdev may have"),
            (printable(&self.vendor, 8), "vendor: at most 8 printable ASCII characters"),
            (printable(&self.product, 16), "product: at most 16 printable ASCII characters"),
            (printable(&self.revision, 4), "revision: at most 4 printable ASCII characters"),
            (
                !self.serial.is_empty() && printable(&self.serial, inquiry::SERIAL_BYTES_MAX),
                "serial: 1 to 64 printable ASCII characters",
            ),
            (self.naa[0] >> 4 == 6, "naa: the first hexadecimal digit is 6"),
            (self.max_transfer_blocks > 0, "max_transfer_blocks: at least 1"),
            (bytes <= u64::from(u32::MAX), "max_transfer_blocks: less than 4 GiB"),
            (self.rel_port_id > 0, "rel_port_id: at least 1"),
        ];
        checks.iter().find(|(holds, _)| !holds).map_or(Ok(()), |(_, what)| Err(*what))
    }
}

/// A logical unit. One per reactor that serves it.
#[derive(Clone, Debug)]
pub struct Lu {
    /// Size and shape; constant.
    pub(crate) geometry: Geometry,
    /// What the bdev can do; constant.
    pub(crate) caps: Caps,
    /// Whether writing is refused; constant.
    pub(crate) read_only: bool,
    /// RMB; constant.
    pub(crate) removable: bool,
    /// log2 of the block size.
    pub(crate) block_shift: u32,
    /// What is checked and reported.
    pub(crate) limits: Limits,
    /// Names and designators; constant.
    pub(crate) identity: Identity,
    /// Stopped by START STOP UNIT. Changed by that command here, or by `set_stopped`.
    pub(crate) stopped: bool,
    /// D_SENSE of the control mode page. Constant 0 until there is MODE SELECT.
    pub(crate) d_sense: bool,
}

/// A command that is being started.
pub(crate) struct Call<'a> {
    pub cdb: Cdb<'a>,
    pub nexus: &'a mut NexusLu,
    pub task: &'a mut Task,
    /// Where data-in parameter data are built.
    pub scratch: &'a mut [u8],
}

impl Lu {
    /// A logical unit. Panics if [`LuConfig::check`] fails: the configuration checks it first.
    pub fn new(config: LuConfig) -> Lu {
        if let Err(what) = config.check() {
            panic!("unchecked LU configuration: {what}");
        }
        Lu {
            geometry: config.geometry,
            caps: config.caps,
            read_only: config.read_only || config.caps.read_only,
            removable: config.removable,
            block_shift: config.geometry.block_size.trailing_zeros(),
            limits: Limits::new(&config.geometry, &config.caps, config.max_transfer_blocks),
            identity: Identity::new(&config),
            stopped: false,
            d_sense: false,
        }
    }

    /// Begins a command. `data_out_len` and `data_in_len` are the initiator's buffers (D);
    /// parameter data for the data-in buffer are built in `scratch` ([`crate::SCRATCH_BYTES`]).
    #[inline]
    pub fn start(
        &mut self,
        nexus: &mut NexusLu,
        cdb: &[u8],
        data_out_len: u32,
        data_in_len: u32,
        task: &mut Task,
        scratch: &mut [u8],
    ) -> Step {
        task.begin(data_out_len, data_in_len);
        if let Some(bytes) = cdb.first_chunk()
            && nexus.is_empty()
            && !self.stopped
        {
            let cdb = Cdb(bytes);
            match cdb.opcode() {
                0x28 if opcodes::READ_10.fits(cdb) => {
                    return rw::read(self, task, cdb.range_10(), cdb.fua());
                }
                0x2A if opcodes::WRITE_10.fits(cdb) => {
                    return rw::write(self, task, cdb.range_10(), cdb.fua());
                }
                0x88 if opcodes::READ_16.fits(cdb) => {
                    return rw::read(self, task, cdb.range_16(), cdb.fua());
                }
                0x8A if opcodes::WRITE_16.fits(cdb) => {
                    return rw::write(self, task, cdb.range_16(), cdb.fua());
                }
                _ => {}
            }
        }
        self.dispatch(nexus, cdb, task, scratch)
    }

    /// The way of every other command, and of a READ or WRITE that something is wrong with.
    #[inline(never)]
    fn dispatch(
        &mut self,
        nexus: &mut NexusLu,
        cdb: &[u8],
        task: &mut Task,
        scratch: &mut [u8],
    ) -> Step {
        let mut padded = [0; CDB_BYTES];
        let given = cdb.len().min(CDB_BYTES);
        padded[..given].copy_from_slice(&cdb[..given]);
        let cdb = Cdb(&padded);
        let found = opcodes::find(self, cdb);
        if let Err(sense) = self.access(nexus, found.as_ref().ok().copied()) {
            return task.check(sense);
        }
        let command = match found {
            Ok(command) if given < usize::from(command.cdb_len) => {
                return task.check(Sense::INVALID_IU);
            }
            Ok(command) if !command.fits(cdb) => return task.check(command.misfit(cdb)),
            Ok(command) => command,
            Err(_) if given == 0 => return task.check(Sense::INVALID_IU),
            Err(sense) => return task.check(sense),
        };
        (command.run)(self, &mut Call { cdb, nexus, task, scratch })
    }

    /// May this nexus run this command now? Reservations (after the unit attention) and the ALUA
    /// state (after those) will be asked here. An unknown command (`None`) is no reason to keep a
    /// unit attention back.
    fn access(&self, nexus: &mut NexusLu, command: Option<&Command>) -> Result<(), Sense> {
        if !command.is_some_and(Command::is_exempt)
            && let Some(ua) = nexus.report()
        {
            return Err(ua.sense());
        }
        if self.stopped && command.is_some_and(Command::needs_medium) {
            return Err(Sense::STOPPED);
        }
        Ok(())
    }

    /// The data of `Step::FetchData` are there: `data` holds at least the bytes asked for.
    pub fn on_data(&mut self, task: &mut Task, data: &[u8]) -> Step {
        match task.plan {
            Plan::FetchCompare => verify::on_data(self, task),
            Plan::FetchBlock => write_same::on_data(self, task, data),
            Plan::FetchList => unmap::on_data(self, task, data),
            plan => panic!("data for a task that did not ask for any ({plan:?})"),
        }
    }

    /// The I/O of `Step::Io` ended. `read` is what a `Read` with `Dir::None` brought, `held` the
    /// data that `FetchData` brought before; both may be longer than needed, or empty otherwise.
    #[inline]
    pub fn on_io(&mut self, task: &mut Task, status: Status, read: &[u8], held: &[u8]) -> Step {
        if task.plan == Plan::Single && status == Status::Ok {
            return task.good();
        }
        self.on_other_io(task, status, read, held)
    }

    #[inline(never)]
    fn on_other_io(&mut self, task: &mut Task, status: Status, read: &[u8], held: &[u8]) -> Step {
        if status != Status::Ok {
            if task.plan == Plan::Stop {
                self.stopped = false;
            }
            assert!(!task.is_idle(), "an I/O of a task that has none");
            return task.failed(status);
        }
        match task.plan {
            Plan::FlushThenRead => rw::read_after_flush(task),
            Plan::Stop => start_stop::on_stopped(task),
            Plan::Verify => verify::on_io(self, task, read, held),
            Plan::Unmap => unmap::on_io(task, held),
            plan => panic!("an I/O of a task that has none ({plan:?})"),
        }
    }

    /// LOGICAL UNIT RESET: mode parameters to their defaults, and the unit is started. The caller
    /// raises `Ua::LU_RESET` for the other nexuses, and aborts the tasks.
    pub fn on_reset(&mut self) {
        self.stopped = false;
        self.d_sense = false;
    }

    /// Format of sense data: what [`Sense::bytes`] wants.
    pub fn d_sense(&self) -> bool {
        self.d_sense
    }

    /// Whether START STOP UNIT has stopped the unit, on this reactor.
    pub fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// Another reactor's copy was stopped or started.
    pub fn set_stopped(&mut self, stopped: bool) {
        self.stopped = stopped;
    }

    /// Whether writing is refused.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// The bdev's geometry.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The range is inside the device.
    #[inline]
    pub(crate) fn check_range(&self, range: Range) -> Result<(), Sense> {
        let inside = self.geometry.contains(Lba(range.lba), range.blocks);
        if inside { Ok(()) } else { Err(Sense::LBA_OUT_OF_RANGE) }
    }

    /// The range is inside the device and not longer than a transfer; its bytes.
    #[inline]
    pub(crate) fn check_transfer(&self, range: Range) -> Result<u32, Sense> {
        self.check_range(range)?;
        if range.blocks > u64::from(self.limits.transfer_blocks) {
            return Err(Sense::cdb_field(range.length_at));
        }
        Ok((range.blocks << self.block_shift) as u32)
    }

    /// Whether the unit may be written.
    #[inline]
    pub(crate) fn check_writable(&self) -> Result<(), Sense> {
        if self.read_only { Err(Sense::WRITE_PROTECTED) } else { Ok(()) }
    }

    /// Whether the data-out buffer has what the command needs (reference 4.9: refused before the
    /// medium is touched).
    #[inline]
    pub(crate) fn check_data_out(task: &Task, needed: u32) -> Result<(), Sense> {
        if task.data_out_len < needed { Err(Sense::INVALID_IU) } else { Ok(()) }
    }
}

/// Ends a started command with `Ok(reply)` or sense data.
pub(crate) fn respond(task: &Task, result: Result<Reply, Sense>) -> Step {
    assert!(task.is_idle(), "only a command that asked for nothing ends in its start");
    match result {
        Ok(reply) => Step::Respond(reply),
        Err(sense) => Step::check(sense),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sense::Key;
    use crate::step::status;
    use crate::testing::{Bench, plain};
    use crate::ua::Ua;

    const READ: [u8; 10] = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];

    #[test]
    fn a_new_nexus_hears_power_on_once_before_anything_else() {
        let mut bench = Bench::new(plain());
        bench.nexus = NexusLu::new();
        assert_eq!(bench.data(&[0x12, 0, 0, 0, 5, 0], 5).len(), 5);
        assert_eq!(bench.sense(&READ, 0, 512), Sense::new(Key::UnitAttention, 0x29, 0));
        assert!(matches!(bench.start(&READ, 0, 512), Step::Io(_)));
    }

    #[test]
    fn a_unit_attention_comes_before_every_refusal() {
        let mut bench = Bench::new(plain());
        for cdb in [[0xFF; 16], [0x83; 16], [0x28; 16]] {
            bench.nexus.raise(Ua::CAPACITY_CHANGED);
            assert_eq!(bench.sense(&cdb, 0, 0), Ua::CAPACITY_CHANGED.sense());
        }
        bench.lu.set_stopped(true);
        bench.nexus.raise(Ua::CAPACITY_CHANGED);
        assert_eq!(bench.sense(&READ, 0, 512), Ua::CAPACITY_CHANGED.sense());
        assert_eq!(bench.sense(&READ, 0, 512), Sense::STOPPED);
    }

    #[test]
    fn unknown_opcodes_and_service_actions_differ() {
        let mut bench = Bench::new(plain());
        assert_eq!(bench.sense(&[0x1E, 0, 0, 0, 1, 0], 0, 0), Sense::INVALID_OPCODE);
        assert_eq!(bench.sense(&[0x7F; 16], 0, 0), Sense::INVALID_OPCODE);
        let status = [0x9E, 0x12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32, 0, 0];
        assert_eq!(bench.sense(&status, 0, 32), Sense::cdb_field(1).at_bit(4));
    }

    #[test]
    fn a_cdb_that_is_cut_short_is_an_invalid_iu() {
        let mut bench = Bench::new(plain());
        for cdb in [&READ[..9], &[0x88; 15][..], &[][..], &[0x00; 5][..]] {
            let (nexus, task) = (&mut bench.nexus, &mut bench.task);
            let step = bench.lu.start(nexus, cdb, 0, 512, task, &mut bench.scratch);
            assert_eq!(step, Step::check(Sense::INVALID_IU), "{cdb:x?}");
        }
        let (nexus, task) = (&mut bench.nexus, &mut bench.task);
        let step = bench.lu.start(nexus, &READ, 0, 512, task, &mut bench.scratch);
        assert!(matches!(step, Step::Io(_)), "10 bytes are enough for a READ(10)");
    }

    #[test]
    fn every_bdev_status_has_its_sense() {
        let write = [0x2A, 0, 0, 0, 0, 0, 0, 0, 1, 0];
        let table = [
            (&READ, Status::Medium, Some((0x3, 0x11, 0x00))),
            (&write, Status::Medium, Some((0x3, 0x0C, 0x00))),
            (&write, Status::NoSpace, Some((0x7, 0x27, 0x07))),
            (&write, Status::ReadOnly, Some((0x7, 0x27, 0x00))),
            (&READ, Status::OutOfRange, Some((0x5, 0x21, 0x00))),
            (&READ, Status::NotSupported, Some((0x5, 0x20, 0x00))),
            (&READ, Status::Io, Some((0x4, 0x44, 0x00))),
            (&READ, Status::Aborted, Some((0xB, 0x00, 0x06))),
            (&write, Status::Miscompare { offset: 9 }, Some((0xE, 0x1D, 0x00))),
            (&READ, Status::Busy, None),
        ];
        for (cdb, bdev, want) in table {
            let mut bench = Bench::new(plain());
            assert!(matches!(bench.start(cdb, 512, 512), Step::Io(_)));
            let Step::Respond(reply) = bench.io(bdev, &[], &[]) else { panic!("{bdev:?}") };
            let got = reply.sense.map(|s| (s.key() as u8, s.code().0, s.code().1));
            assert_eq!(got, want, "{bdev:?}");
            let busy = if want.is_none() { status::TASK_SET_FULL } else { status::CHECK_CONDITION };
            assert_eq!((reply.status, reply.wants_in, reply.wants_out), (busy, 0, 0));
            assert!(bench.task.is_idle());
        }
    }

    #[test]
    fn a_wrong_configuration_is_named() {
        let wrong = |change: fn(&mut LuConfig)| {
            let mut config = plain();
            change(&mut config);
            config.check().expect_err("wrong").split(':').next().map(str::to_owned)
        };
        assert_eq!(plain().check(), Ok(()));
        assert_eq!(wrong(|c| c.serial.clear()).as_deref(), Some("serial"));
        assert_eq!(wrong(|c| c.vendor = "NINECHARS".into()).as_deref(), Some("vendor"));
        assert_eq!(wrong(|c| c.product = "na\u{ef}ve".into()).as_deref(), Some("product"));
        assert_eq!(wrong(|c| c.naa[0] = 0x50).as_deref(), Some("naa"));
        assert_eq!(
            wrong(|c| c.max_transfer_blocks = u32::MAX).as_deref(),
            Some("max_transfer_blocks")
        );
        assert_eq!(wrong(|c| c.rel_port_id = 0).as_deref(), Some("rel_port_id"));
    }

    #[test]
    #[should_panic(expected = "the task still has a command")]
    fn a_task_takes_one_command_at_a_time() {
        let mut bench = Bench::new(plain());
        assert!(matches!(bench.start(&READ, 0, 512), Step::Io(_)));
        let _ = bench.start(&READ, 0, 512);
    }
}
