//! A command's way from its IU to its response.
//!
//! Joins the three parts that do not know each other: `usurp-srp` (tag, credits, descriptors),
//! `usurp-scsi` (what the CDB means) and the bdev queue (who does it). Nothing here blocks,
//! allocates or calls back; each function takes one event and leaves the command in a [`Stage`].
//!
//! Shortages: a command that holds nothing waits in line for its buffer; one that already holds a
//! buffer and needs a second one that is not there gets BUSY, because two of those waiting for each
//! other would never end.

use usurp_bdev::{Done, Io, Op, Status as BdevStatus};
use usurp_reactor::mem::Buf;
use usurp_scsi::{Dir, IoReq, LunList, Reply, SCRATCH_BYTES, SENSE_BYTES_MAX, Sense, Step, status};
use usurp_srp::Residual;
use usurp_srp::target::{CmdResult, Command, DataDesc, IoctxId};

use crate::conn::Conn;
use crate::ioctx::{Cursor, Local, NO_LU, NO_SLOT, Resume, Stage, no_command};
use crate::shared::{LuSlot, Shared};

const REPORT_LUNS: u8 = 0xA0;
const START_STOP_UNIT: u8 = 0x1B;

/// A channel and what it shares with the others of its reactor, for the length of one event.
pub struct Ctx<'a> {
    /// The channel.
    pub conn: &'a mut Conn,
    /// What it shares.
    pub sh: &'a mut Shared,
}

/// Channel and ioctx of a token made by this reactor.
#[inline]
pub fn token_parts(token: u64) -> (u16, u16) {
    ((token >> 16) as u16, token as u16)
}

/// Whether descriptors or data stay in the receive slot while the command runs.
fn needs_iu(cmd: &Command) -> bool {
    let inside = |d: &DataDesc| matches!(d, DataDesc::Indirect { .. } | DataDesc::Immediate { .. });
    inside(&cmd.data_out) || inside(&cmd.data_in)
}

impl Ctx<'_> {
    /// Token of a command's I/O: which command of which channel it belongs to.
    #[inline]
    pub fn token(&self, id: u16) -> u64 {
        u64::from(self.conn.index) << 16 | u64::from(id)
    }

    /// The logical unit that this channel's nexus sees under a LUN field.
    pub fn lu_of(&self, lun: u64) -> Option<u16> {
        let nexus = self.sh.nexuses[usize::from(self.conn.nexus_at)].as_ref();
        let luns = &nexus.expect("a channel's nexus is entered").info.luns;
        let at = luns.lookup(usurp_scsi::parse_lun(lun)?)?;
        Some(luns.entries()[at].lu)
    }

    /// A command has arrived in receive slot `slot`.
    #[inline]
    pub fn begin(&mut self, cmd: Command, slot: u16) {
        let id = cmd.ioctx.0;
        let keep = needs_iu(&cmd);
        let io = &mut self.conn.ioctxs[usize::from(id)];
        assert!(io.stage() == Stage::Free, "a busy ioctx was handed out");
        io.cmd = cmd;
        io.serial = io.serial.wrapping_add(1);
        io.recv_slot = if keep { slot } else { NO_SLOT };
        io.lu = NO_LU;
        if !keep {
            self.conn.release_recv(slot);
        }
        if self.sh.can_start() {
            self.start(id);
        } else {
            // Task management must find it while it waits.
            self.conn.ioctxs[usize::from(id)].lu = self.lu_of(cmd.lun).unwrap_or(NO_LU);
            self.wait(id, Resume::Start);
        }
    }

    /// Joins the line for a data buffer.
    fn wait(&mut self, id: u16, resume: Resume) {
        let io = &mut self.conn.ioctxs[usize::from(id)];
        io.go(Stage::Resources);
        io.resume = resume;
        self.sh.waiting.push_back((self.conn.index, id));
    }

    /// The command was taken from the head of the line because a buffer came back. False = it has
    /// to wait on, and stands at the head again.
    pub fn retry(&mut self, id: u16) -> bool {
        let resume = self.conn.ioctxs[usize::from(id)].resume;
        let wants = match resume {
            Resume::Start => SCRATCH_BYTES,
            Resume::Io(req) => self.buffer_bytes(id, &req) as usize,
            Resume::Fetch(len) => len.max(1) as usize,
        };
        if !self.can_take(wants) {
            self.sh.waiting.push_front((self.conn.index, id));
            return false;
        }
        match resume {
            Resume::Start => self.start(id),
            Resume::Io(req) => self.run(id, Step::Io(req)),
            Resume::Fetch(len) => self.run(id, Step::FetchData { len }),
        }
        self.conn.ioctxs[usize::from(id)].stage() != Stage::Resources
    }

    fn can_take(&mut self, len: usize) -> bool {
        match self.sh.data.take(len) {
            Some(buf) => {
                self.sh.data.give(buf);
                true
            }
            None => false,
        }
    }

    /// Hands the CDB to the device server.
    #[inline]
    fn start(&mut self, id: u16) {
        let Ctx { conn, sh } = self;
        let io = &mut conn.ioctxs[usize::from(id)];
        let nexus = sh.nexuses[usize::from(conn.nexus_at)].as_mut();
        let nexus = nexus.expect("a channel's nexus is entered");
        let cdb = io.cmd.cdb();
        let entry = usurp_scsi::parse_lun(io.cmd.lun).and_then(|lun| nexus.info.luns.lookup(lun));
        io.lu = entry.map_or(NO_LU, |at| nexus.info.luns.entries()[at].lu);
        let in_len = io.cmd.data_in.len();
        let step = match entry {
            None => Step::Respond(usurp_scsi::absent_lun(
                cdb,
                in_len,
                &mut sh.scratch,
                nexus.info.luns.numbers(),
            )),
            Some(_) if cdb[0] == REPORT_LUNS => {
                let luns = LunList::new(nexus.info.luns.numbers());
                usurp_scsi::report_luns(cdb, &luns, &mut sh.scratch)
            }
            Some(at) => {
                let lu = &mut sh.lus[usize::from(io.lu)];
                lu.scsi.start(
                    &mut nexus.lus[at],
                    cdb,
                    io.cmd.data_out.len(),
                    in_len,
                    &mut io.task,
                    &mut sh.scratch,
                )
            }
        };
        self.run(id, step);
    }

    /// Does what the device server asked for, until the command waits for something or is answered.
    #[inline]
    pub fn run(&mut self, id: u16, first: Step) {
        let mut next = Some(first);
        while let Some(step) = next {
            next = match step {
                Step::Respond(reply) => {
                    self.respond(id, reply);
                    None
                }
                Step::FetchData { len } => self.fetch_params(id, len),
                Step::Io(req) => match req.dir {
                    Dir::In => self.media_in(id, req),
                    Dir::Out => self.media_out(id, req),
                    Dir::None => self.plain(id, req),
                },
            };
        }
    }

    /// A read: from memory that the bdev lends, or through a buffer.
    #[inline]
    fn media_in(&mut self, id: u16, req: IoReq) -> Option<Step> {
        let Ctx { conn, sh } = self;
        let io = &mut conn.ioctxs[usize::from(id)];
        let lu = &mut sh.lus[usize::from(io.lu)];
        if let Some(local) = lend(lu, &req, false) {
            io.local = Some(local);
            return Some(lu.scsi.on_io(&mut io.task, BdevStatus::Ok, &[], &[]));
        }
        let buf = self.take_buf(id, self.buffer_bytes(id, &req), Resume::Io(req))?;
        let lkey = self.sh.data_lkey;
        self.conn.ioctxs[usize::from(id)].local =
            Some(Local { addr: buf.addr(), len: req.len, lkey });
        self.submit(id, req, buf);
        None
    }

    /// Bytes of the buffer that a transfer needs: the bdev reads whole blocks even if the
    /// initiator's buffer is shorter.
    fn buffer_bytes(&self, id: u16, req: &IoReq) -> u32 {
        if req.op != Op::Read {
            return req.len;
        }
        let lu = &self.sh.lus[usize::from(self.conn.ioctxs[usize::from(id)].lu)];
        let bytes = lu.scsi.geometry().bytes(req.blocks);
        let bytes = bytes.and_then(|b| u32::try_from(b).ok());
        bytes.expect("the device server limits the length of a transfer")
    }

    /// A write: the data is fetched into memory that the bdev lends, or into a buffer.
    #[inline]
    fn media_out(&mut self, id: u16, req: IoReq) -> Option<Step> {
        let Ctx { conn, sh } = self;
        let io = &mut conn.ioctxs[usize::from(id)];
        let lu = &mut sh.lus[usize::from(io.lu)];
        let local = match lend(lu, &req, true) {
            Some(local) => local,
            None => {
                let buf = self.take_buf(id, req.len, Resume::Io(req))?;
                let local = Local { addr: buf.addr(), len: req.len, lkey: self.sh.data_lkey };
                self.conn.ioctxs[usize::from(id)].buf = buf;
                local
            }
        };
        let io = &mut self.conn.ioctxs[usize::from(id)];
        io.local = Some(local);
        io.resume = Resume::Io(req);
        self.fetch(id, Stage::DataOut, local, req.len)
    }

    /// An operation that moves no media data to or from the initiator.
    fn plain(&mut self, id: u16, req: IoReq) -> Option<Step> {
        let buf = match req.op {
            Op::Read => self.piece_buf(id, &req)?,
            _ if req.uses_held() => self.conn.ioctxs[usize::from(id)].held.take(),
            _ => Buf::none(),
        };
        self.submit(id, req, buf);
        None
    }

    /// The buffer for one piece of a longer read: the one that the piece before left, if it is
    /// large enough.
    fn piece_buf(&mut self, id: u16, req: &IoReq) -> Option<Buf> {
        let len = self.buffer_bytes(id, req);
        let old = self.conn.ioctxs[usize::from(id)].buf.take();
        if !old.is_none() && old.len() >= len as usize {
            return Some(old);
        }
        self.sh.give(old);
        self.take_buf(id, len, Resume::Io(*req))
    }

    /// Fetches a parameter list of `len` bytes at most.
    fn fetch_params(&mut self, id: u16, len: u32) -> Option<Step> {
        let have = self.conn.ioctxs[usize::from(id)].cmd.data_out.len().min(len);
        let buf = self.take_buf(id, have.max(1), Resume::Fetch(len))?;
        let local = Local { addr: buf.addr(), len: have, lkey: self.sh.data_lkey };
        let io = &mut self.conn.ioctxs[usize::from(id)];
        io.held = buf;
        io.held_len = have;
        self.fetch(id, Stage::Params, local, have)
    }

    /// A data buffer, or none: the command then waits in line, or was answered BUSY because it
    /// holds one already.
    fn take_buf(&mut self, id: u16, len: u32, resume: Resume) -> Option<Buf> {
        if let Some(buf) = self.sh.data.take(len as usize) {
            return Some(buf);
        }
        let io = &mut self.conn.ioctxs[usize::from(id)];
        let holds = !(io.buf.is_none() && io.held.is_none() && io.table.is_none());
        if holds {
            self.respond(id, Reply::bare(status::BUSY));
        } else if io.stage() == Stage::Resources {
            // It stood at the head of the line, was started, and needs more than was free: back to
            // the head.
            io.resume = resume;
            self.sh.waiting.push_front((self.conn.index, id));
        } else {
            self.wait(id, resume);
        }
        None
    }

    /// Brings `len` bytes of the data-out buffer to `local`. The next step when they are there
    /// already.
    fn fetch(&mut self, id: u16, stage: Stage, local: Local, len: u32) -> Option<Step> {
        let io = &mut self.conn.ioctxs[usize::from(id)];
        io.cursor = Cursor { left: len, local: local.addr, lkey: local.lkey, ..Cursor::default() };
        match io.cmd.data_out {
            DataDesc::Immediate { at, .. } => {
                io.go(stage);
                self.copy_immediate(id, usize::from(at), len as usize);
                self.arrived(id)
            }
            _ if len == 0 => {
                io.go(stage);
                self.arrived(id)
            }
            DataDesc::Direct(_) => {
                io.go(stage);
                self.post_reads(id);
                None
            }
            out => {
                self.with_table(id, &out, stage);
                None
            }
        }
    }

    /// Copies immediate data from the receive slot to where it is wanted.
    fn copy_immediate(&mut self, id: u16, at: usize, len: usize) {
        let Ctx { conn, sh } = self;
        let io = &mut conn.ioctxs[usize::from(id)];
        let data = &conn.recv.bytes(u32::from(io.recv_slot))[at..at + len];
        let into = if io.stage() == Stage::Params { &mut io.held } else { &mut io.buf };
        if into.is_none() {
            let (arena, _) = sh.lus[usize::from(io.lu)].lends.as_ref().expect("a lender's arena");
            arena.copy_in((io.cursor.local - arena.addr()) as usize, data);
        } else {
            into.as_mut_slice()[..len].copy_from_slice(data);
        }
        io.cursor.left = 0;
    }

    /// All data of a fetch is here. What comes next.
    pub fn arrived(&mut self, id: u16) -> Option<Step> {
        let Ctx { conn, sh } = self;
        let io = &mut conn.ioctxs[usize::from(id)];
        assert!(io.cursor.left == 0, "data has not arrived in full");
        let lu = &mut sh.lus[usize::from(io.lu)];
        if io.stage() == Stage::Params {
            let data = &io.held.as_slice()[..io.held_len as usize];
            return Some(lu.scsi.on_data(&mut io.task, data));
        }
        assert!(io.stage() == Stage::DataOut, "data arrived for a command that wants none");
        if io.buf.is_none() {
            return Some(lu.scsi.on_io(&mut io.task, BdevStatus::Ok, &[], &[]));
        }
        let Resume::Io(req) = io.resume else { panic!("a write has its request") };
        let buf = io.buf.take();
        self.submit(id, req, buf);
        None
    }

    /// Hands an I/O to the bdev queue, or to the line before it.
    fn submit(&mut self, id: u16, req: IoReq, buf: Buf) {
        let token = self.token(id);
        let io = &mut self.conn.ioctxs[usize::from(id)];
        io.go(Stage::Bdev);
        io.resume = Resume::Io(req);
        self.conn.in_bdev += 1;
        let lu = &mut self.sh.lus[usize::from(io.lu)];
        lu.submit(Io::new(req.op, req.lba, req.blocks, buf, token));
    }

    /// The bdev is done with a command's I/O; its buffer comes back.
    pub fn on_done(&mut self, id: u16, done: Done) {
        let io = &mut self.conn.ioctxs[usize::from(id)];
        assert!(io.stage() == Stage::Bdev, "the bdev completed a command that was not there");
        let Resume::Io(req) = io.resume else { panic!("an I/O has its request") };
        self.conn.in_bdev -= 1;
        let home = if req.uses_held() { &mut io.held } else { &mut io.buf };
        assert!(home.is_none(), "the place of a returning buffer is taken");
        *home = done.buf;
        if io.aborted || self.conn.closing.is_some_and(|c| c.errored) {
            self.finish_aborted(id);
            return;
        }
        let compare = req.op == Op::Read && req.dir == Dir::None;
        let read: &[u8] = if compare { &io.buf.as_slice()[..req.len as usize] } else { &[] };
        let held: &[u8] =
            if io.held.is_none() { &[] } else { &io.held.as_slice()[..io.held_len as usize] };
        let lu = &mut self.sh.lus[usize::from(io.lu)];
        let step = lu.scsi.on_io(&mut io.task, done.status, read, held);
        self.run(id, step);
    }

    /// The device server's answer is here: data first, then the response.
    #[inline]
    fn respond(&mut self, id: u16, reply: Reply) {
        let Ctx { conn, sh } = self;
        let io = &mut conn.ioctxs[usize::from(id)];
        io.reply = reply;
        if io.cmd.cdb[0] == START_STOP_UNIT && io.lu != NO_LU {
            sh.note_stop(io.lu);
        }
        let mut left = 0;
        if reply.data_in_len > 0 {
            if !io.place_reply(sh, reply.data_in_len) {
                io.reply = Reply::bare(status::BUSY);
                return self.post_rsp(id, 0);
            }
            left = reply.data_in_len.min(io.cmd.data_in.len());
        } else if reply.wants_in > 0 && reply.status == status::GOOD {
            left = io.cmd.data_in.len().min(reply.wants_in as u32);
        }
        if left == 0 {
            return self.post_rsp(id, 0);
        }
        let local = io.local.expect("data-in lies somewhere");
        assert!(left <= local.len, "more data-in than was read");
        io.cursor = Cursor { left, local: local.addr, lkey: local.lkey, ..Cursor::default() };
        match io.cmd.data_in {
            DataDesc::Direct(_) => self.post_writes(id),
            desc => self.with_table(id, &desc, Stage::DataIn),
        }
    }

    /// Builds the response and adds it to the turn's sends. `wrs` send-queue slots of RDMA end with
    /// it.
    #[inline]
    pub fn post_rsp(&mut self, id: u16, wrs: u32) {
        let conn = &mut *self.conn;
        let io = &mut conn.ioctxs[usize::from(id)];
        io.task.abandon();
        let (sense, sense_len) =
            io.reply.sense.map_or(([0; SENSE_BYTES_MAX], 0), |s| s.bytes(false));
        let result = CmdResult {
            status: io.reply.status,
            sense: &sense[..sense_len],
            data_in: Residual::of(io.reply.wants_in, u64::from(io.cmd.data_in.len())),
            data_out: Residual::of(io.reply.wants_out, u64::from(io.cmd.data_out.len())),
        };
        io.rsp_wrs = wrs;
        io.go(Stage::Rsp);
        let slot = io.recv_slot;
        io.recv_slot = NO_SLOT;
        let len = conn.srp.rsp(IoctxId(id), &result, conn.send.bytes_mut(u32::from(id)));
        if slot != NO_SLOT {
            conn.release_recv(slot);
        }
        conn.push_rsp(id, len as u32);
    }

    /// An IU whose descriptors make no sense: answered, never executed.
    pub fn malformed(&mut self, id: u16, slot: u16) {
        self.conn.release_recv(slot);
        let io = &mut self.conn.ioctxs[usize::from(id)];
        io.serial = io.serial.wrapping_add(1);
        io.cmd = no_command();
        io.lu = NO_LU;
        io.reply = Reply::check(Sense::INVALID_IU);
        self.post_rsp(id, 0);
    }

    /// A descriptor table that contradicts its descriptor: answered like a malformed IU.
    pub fn refuse_table(&mut self, id: u16) {
        let io = &mut self.conn.ioctxs[usize::from(id)];
        io.reply = Reply::check(Sense::INVALID_IU);
        self.post_rsp(id, 0);
    }

    /// The response's send completion: everything of the command is free again.
    pub fn on_rsp_sent(&mut self, id: u16) {
        let conn = &mut *self.conn;
        let io = &mut conn.ioctxs[usize::from(id)];
        io.go(Stage::Free);
        if std::mem::take(&mut io.aborted) && io.lu != NO_LU {
            self.sh.lus[usize::from(io.lu)].aborting -= 1;
        }
        conn.send.take_back(u32::from(id));
        conn.sq_free += io.rsp_wrs;
        io.rsp_wrs = 0;
        conn.srp.on_sent(IoctxId(id));
        self.free_bufs(id);
    }

    /// Gives back the buffers of a command.
    #[inline]
    fn free_bufs(&mut self, id: u16) {
        let io = &mut self.conn.ioctxs[usize::from(id)];
        io.local = None;
        self.sh.give(io.buf.take());
        self.sh.give(io.held.take());
        self.sh.give(io.table.take());
    }

    /// Ends a command without a response: it was aborted, or its channel is gone. Nothing of it may
    /// be in flight.
    pub fn finish_aborted(&mut self, id: u16) {
        let io = &mut self.conn.ioctxs[usize::from(id)];
        io.go(Stage::Free);
        io.task.abandon();
        if std::mem::take(&mut io.aborted) && io.lu != NO_LU {
            self.sh.lus[usize::from(io.lu)].aborting -= 1;
        }
        let slot = std::mem::replace(&mut io.recv_slot, NO_SLOT);
        self.conn.srp.finish_silently(IoctxId(id));
        if slot != NO_SLOT && self.conn.closing.is_none() {
            self.conn.release_recv(slot);
        }
        self.free_bufs(id);
    }
}

/// Memory of the bdev itself for this transfer.
#[inline]
fn lend(lu: &mut LuSlot, req: &IoReq, for_write: bool) -> Option<Local> {
    let lkey = lu.lends.as_ref()?.1;
    let lent = lu.queue.lend(req.lba, req.blocks, for_write)?;
    assert!(lent.len >= req.len, "the bdev lent less than it was asked for");
    Some(Local { addr: lent.addr, len: req.len, lkey })
}
