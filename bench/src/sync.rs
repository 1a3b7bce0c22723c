//! One command at a time: what set-up code, `luns`, `inq` and tests want. Each call sends, polls
//! until the answer is there or the time is up, and gives the slot back. Answers to other commands
//! that arrive meanwhile are kept for the next [`Client::poll`]. Free to allocate; not for the hot
//! loop.

use usurp_fabric::Fabric;
use usurp_reactor::Nanos;
use usurp_srp::Residual;
use usurp_srp::wire::rsp::RspCode;
use usurp_srp::wire::tsk_mgmt::TmFunc;

use crate::cdb::{self, BlockLimits, Capacity, Cdb, Inquiry};
use crate::client::{Client, Data, Outcome, Outcomes, Request, SlotId, Started};
use crate::error::Error;
use crate::sense::{self, SenseCode, SenseText};

/// How often TEST UNIT READY is tried while it reports unit attentions or "becoming ready".
const READY_TRIES: u32 = 16;

/// Spinning for so long, a waiting call begins to yield its core.
const YIELD_AFTER: Nanos = 20_000;

/// The caller's buffer of one command.
#[derive(Debug)]
pub enum Xfer<'a> {
    /// No data.
    None,
    /// Data comes in.
    In(&'a mut [u8]),
    /// Data goes out.
    Out(&'a [u8]),
}

/// The whole answer to one command, whatever its status.
#[derive(Clone, Debug)]
pub struct Reply {
    /// SAM status.
    pub status: u8,
    /// Sense data, empty if there was none.
    pub sense: Vec<u8>,
    /// Residual of data-in.
    pub data_in: Residual,
    /// Residual of data-out.
    pub data_out: Residual,
}

impl Reply {
    /// Status GOOD.
    pub fn is_good(&self) -> bool {
        self.status == 0
    }

    /// Key and codes of the sense data.
    pub fn sense_code(&self) -> Option<SenseCode> {
        SenseCode::parse(&self.sense)
    }

    /// Bytes of `buffer` that data-in filled.
    pub fn filled(&self, buffer: usize) -> usize {
        match self.data_in {
            Residual::Under(n) => buffer.saturating_sub(n as usize),
            Residual::None | Residual::Over(_) => buffer,
        }
    }
}

impl<F: Fabric> Client<F> {
    /// Polls until at least one answer is there, at most until the oldest command's time is up.
    pub fn wait(&mut self, out: &mut Outcomes) -> Result<(), Error> {
        let start = self.now();
        loop {
            let now = self.now();
            if self.poll(now, out)? > 0 {
                return Ok(());
            }
            yield_after(now - start);
            self.check_overdue(now)?;
            if self.in_flight() == 0 {
                return Err(Error::Protocol("no credit, and no command outstanding".into()));
            }
        }
    }

    /// Sends one command on `channel` and returns its answer; any status is a success here.
    pub fn exec(
        &mut self,
        channel: usize,
        lun: u16,
        cdb: &Cdb,
        xfer: Xfer<'_>,
    ) -> Result<Reply, Error> {
        let no_slot = || Error::usage("all command slots of the channel are in use");
        let slot = self.reserve(channel).ok_or_else(no_slot)?;
        let (data, len) = match &xfer {
            Xfer::None => (Data::None, 0),
            Xfer::In(buffer) => (Data::In(buffer.len() as u32), buffer.len()),
            Xfer::Out(buffer) => (Data::Out(buffer.len() as u32), buffer.len()),
        };
        if len > self.buffer_bytes() {
            self.release(slot);
            return Err(Error::usage(format!("{len} bytes do not fit the command's buffer")));
        }
        match &xfer {
            Xfer::Out(buffer) => self.data_write(slot, 0, buffer),
            // A target that claims to have sent what it did not must not show us old data.
            Xfer::In(buffer) => self.data_fill(slot, buffer.len(), 0),
            Xfer::None => {}
        }
        let request = Request { lun, cdb: *cdb, data, user: u64::MAX };
        let outcome = self.round_trip(slot, &request)?;
        if let Xfer::In(buffer) = xfer {
            self.data_read(slot, 0, buffer);
        }
        let reply = Reply {
            status: outcome.status,
            sense: self.sense(&outcome).to_vec(),
            data_in: outcome.data_in,
            data_out: outcome.data_out,
        };
        self.release(slot);
        Ok(reply)
    }

    fn round_trip(&mut self, slot: SlotId, request: &Request) -> Result<Outcome, Error> {
        let start = self.now();
        while self.start(slot, request, start)? == Started::NoRoom {
            let waited = self.now() - start;
            self.check_credit_wait(waited)?;
            self.poll_aside()?;
        }
        self.flush()?;
        loop {
            if let Some(outcome) = self.take_aside(slot) {
                return Ok(outcome);
            }
            let now = self.poll_aside()?;
            yield_after(now - start);
            self.check_overdue(now)?;
        }
    }

    /// As [`Client::exec`], but anything except GOOD is an error, and a unit attention, BUSY or
    /// TASK SET FULL is tried again.
    pub fn exec_good(&mut self, lun: u16, cdb: &Cdb, mut xfer: Xfer<'_>) -> Result<Reply, Error> {
        for _ in 0..READY_TRIES {
            let again = match &mut xfer {
                Xfer::None => Xfer::None,
                Xfer::In(buffer) => Xfer::In(buffer),
                Xfer::Out(buffer) => Xfer::Out(buffer),
            };
            let reply = self.exec(0, lun, cdb, again)?;
            let attention = reply.sense_code().is_some_and(SenseCode::is_unit_attention);
            if reply.is_good() || !(attention || matches!(reply.status, 0x08 | 0x28)) {
                return match reply.is_good() {
                    true => Ok(reply),
                    false => Err(scsi_error(lun, cdb, &reply)),
                };
            }
        }
        Err(Error::Protocol(format!("LUN {lun} reports unit attentions without end")))
    }

    /// TEST UNIT READY until it succeeds: takes pending unit attentions away.
    pub fn wait_ready(&mut self, lun: u16) -> Result<(), Error> {
        self.exec_good(lun, &cdb::test_unit_ready(), Xfer::None).map(|_| ())
    }

    /// Standard INQUIRY data.
    pub fn inquiry(&mut self, lun: u16) -> Result<Inquiry, Error> {
        let data = self.data_in(lun, &cdb::inquiry(None, 96), 96)?;
        let short =
            || Error::Protocol(format!("INQUIRY of LUN {lun} returned {} bytes", data.len()));
        Inquiry::parse(&data).ok_or_else(short)
    }

    /// One VPD page; None when the LU does not have it.
    pub fn vpd(&mut self, lun: u16, page: u8) -> Result<Option<Vec<u8>>, Error> {
        match self.data_in(lun, &cdb::inquiry(Some(page), 1024), 1024) {
            Ok(data) if data.get(1) == Some(&page) => Ok(Some(data)),
            Ok(_) => Err(Error::Protocol(format!("LUN {lun} answered another VPD page"))),
            Err(Error::Scsi { sense: SenseText { code: Some(code) }, .. })
                if code.key == sense::KEY_ILLEGAL_REQUEST =>
            {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// The LUNs that the target reports to us.
    pub fn report_luns(&mut self) -> Result<Vec<u16>, Error> {
        let len = self.buffer_bytes().min(8 + 8 * 512) as u32;
        let data = self.data_in(0, &cdb::report_luns(len), len as usize)?;
        Ok(cdb::parse_luns(&data))
    }

    /// Size of an LU.
    pub fn read_capacity16(&mut self, lun: u16) -> Result<Capacity, Error> {
        let data = self.data_in(lun, &cdb::read_capacity16(32), 32)?;
        Capacity::parse(&data).map_err(|why| Error::Protocol(format!("LUN {lun}: {why}")))
    }

    /// VPD page B0; all zero when there is none.
    pub fn block_limits(&mut self, lun: u16) -> Result<BlockLimits, Error> {
        let page = self.vpd(lun, 0xb0)?;
        Ok(page.map(|page| BlockLimits::parse(&page)).unwrap_or_default())
    }

    /// SYNCHRONIZE CACHE of the whole LU.
    pub fn synchronize_cache(&mut self, lun: u16) -> Result<(), Error> {
        self.exec_good(lun, &cdb::synchronize_cache(), Xfer::None).map(|_| ())
    }

    /// Reads whole blocks, in as many commands as the buffer size asks for.
    pub fn read_blocks(
        &mut self,
        lun: u16,
        lba: u64,
        block_size: u32,
        data: &mut [u8],
    ) -> Result<(), Error> {
        let per_command = self.blocks_per_command(block_size)?;
        let mut lba = lba;
        for piece in data.chunks_mut(per_command * block_size as usize) {
            let blocks = piece.len() as u32 / block_size;
            let cdb = cdb::read_write(false, lba, blocks);
            let reply = self.exec_good(lun, &cdb, Xfer::In(piece))?;
            no_residual(lun, &cdb, reply.data_in)?;
            lba += u64::from(blocks);
        }
        Ok(())
    }

    /// Writes whole blocks, in as many commands as the buffer size asks for.
    pub fn write_blocks(
        &mut self,
        lun: u16,
        lba: u64,
        block_size: u32,
        data: &[u8],
    ) -> Result<(), Error> {
        let per_command = self.blocks_per_command(block_size)?;
        let mut lba = lba;
        for piece in data.chunks(per_command * block_size as usize) {
            let blocks = piece.len() as u32 / block_size;
            let cdb = cdb::read_write(true, lba, blocks);
            let reply = self.exec_good(lun, &cdb, Xfer::Out(piece))?;
            no_residual(lun, &cdb, reply.data_out)?;
            lba += u64::from(blocks);
        }
        Ok(())
    }

    fn blocks_per_command(&self, block_size: u32) -> Result<usize, Error> {
        match self.buffer_bytes() / block_size as usize {
            0 => Err(Error::usage(format!("a block of {block_size} bytes does not fit a buffer"))),
            blocks => Ok(blocks),
        }
    }

    /// LOGICAL UNIT RESET on channel 0.
    pub fn lun_reset(&mut self, lun: u16) -> Result<RspCode, Error> {
        self.task_management(0, TmFunc::LunReset, lun, None)
    }

    /// ABORT TASK of a command in flight, on its own channel. Afterwards its slot is idle: either
    /// the answer came before the abort, and the next poll brings it, or none will come.
    pub fn abort_task(&mut self, slot: SlotId, lun: u16) -> Result<RspCode, Error> {
        self.task_management(slot.channel(), TmFunc::AbortTask, lun, Some(slot))
    }

    /// Any task management function; waits for the answer.
    pub fn task_management(
        &mut self,
        channel: usize,
        func: TmFunc,
        lun: u16,
        task: Option<SlotId>,
    ) -> Result<RspCode, Error> {
        self.start_tm(channel, func, lun, task)?;
        let start = self.now();
        loop {
            if let Some(code) = self.take_tm(channel) {
                return Ok(code);
            }
            let now = self.poll_aside()?;
            yield_after(now - start);
            if now - start > self.timeout_ns() {
                let seconds = self.timeout_ns() / 1_000_000_000;
                let what = format!("task management function {:#04x}", func.code());
                return Err(Error::Timeout { what, lun, seconds });
            }
        }
    }

    /// Data-in command whose answer may be shorter than asked for.
    fn data_in(&mut self, lun: u16, cdb: &Cdb, len: usize) -> Result<Vec<u8>, Error> {
        let mut data = vec![0; len];
        let reply = self.exec_good(lun, cdb, Xfer::In(&mut data))?;
        data.truncate(reply.filled(len));
        Ok(data)
    }
}

/// A waiting call offers its core to others after a while: the target may share it.
fn yield_after(waited: Nanos) {
    if waited > YIELD_AFTER {
        std::thread::yield_now();
    }
}

fn scsi_error(lun: u16, cdb: &Cdb, reply: &Reply) -> Error {
    let sense = SenseText::new(&reply.sense);
    Error::Scsi { what: cdb::name(cdb), lun, status: reply.status, sense }
}

/// An error unless all data was moved.
pub fn no_residual(lun: u16, cdb: &Cdb, residual: Residual) -> Result<(), Error> {
    let (residual, kind) = match residual {
        Residual::None => return Ok(()),
        Residual::Under(n) => (n, "short"),
        Residual::Over(n) => (n, "over"),
    };
    Err(Error::Residual { what: cdb::name(cdb), lun, residual, kind })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_residual_shortens_what_counts_as_filled() {
        let mut reply =
            Reply { status: 0, sense: vec![], data_in: Residual::None, data_out: Residual::None };
        assert_eq!(reply.filled(96), 96);
        reply.data_in = Residual::Under(60);
        assert_eq!(reply.filled(96), 36);
        reply.data_in = Residual::Under(1000);
        assert_eq!(reply.filled(96), 0);
        reply.data_in = Residual::Over(9);
        assert_eq!(reply.filled(96), 96);
    }

    #[test]
    fn any_residual_is_an_error_for_media_commands() {
        let cdb = cdb::read_write(false, 7, 1);
        assert!(no_residual(1, &cdb, Residual::None).is_ok());
        let text = no_residual(1, &cdb, Residual::Under(512)).unwrap_err().to_string();
        assert!(text.contains("READ(10) at LBA 7 on LUN 1") && text.contains("512"), "{text}");
    }
}
