//! RDMA between local memory and an initiator's descriptors.
//!
//! A transfer goes in rounds: as many work requests as the send queue has room for, the last of
//! them signalled, then the next round when it completes. Nearly every command needs one round of
//! one request. The last round of data-in is not signalled at all: the response follows it in the
//! same list, and on a reliable connection nothing overtakes.
//!
//! Send-queue slots: one is set aside for each ioctx's response, so responses never wait; the rest
//! (`sq_free`) is for RDMA. A transfer that finds none stands in `sq_wait`, in order.

use usurp_fabric::{Remote, SendOp, SendWr, Sge};
use usurp_srp::target::{DataDesc, MemDesc, check_table};

use crate::command::Ctx;
use crate::conn::Conn;
use crate::ioctx::{Cursor, Ioctx, Local, Stage};
use crate::wrid::Kind;

/// Bytes of one descriptor in a table.
const DESC_BYTES: u32 = 16;

/// Direction of an RDMA operation, from the target's side.
#[derive(Copy, Clone, PartialEq, Eq)]
enum Way {
    /// RDMA READ: data-out.
    Read,
    /// RDMA WRITE: data-in.
    Write,
}

impl Ctx<'_> {
    /// Starts the transfer of `stage` over an indirect descriptor, for which a table in the
    /// initiator's memory may have to be fetched first.
    pub(crate) fn with_table(&mut self, id: u16, desc: &DataDesc, stage: Stage) {
        let DataDesc::Indirect { all, .. } = *desc else {
            panic!("only an indirect descriptor has a table");
        };
        let io = &mut self.conn.ioctxs[usize::from(id)];
        if !desc.is_partial() || !io.table.is_none() {
            return self.begin_stage(id, stage);
        }
        let bytes = all * DESC_BYTES;
        let Some(buf) = self.sh.data.take(bytes as usize) else {
            io.reply = usurp_scsi::Reply::bare(usurp_scsi::status::BUSY);
            return self.post_rsp(id, 0);
        };
        io.table = buf;
        io.after_table = stage;
        io.go(Stage::Table);
        self.post_table(id);
    }

    fn begin_stage(&mut self, id: u16, stage: Stage) {
        if stage == Stage::DataIn {
            return self.post_writes(id);
        }
        self.conn.ioctxs[usize::from(id)].go(stage);
        self.post_reads(id);
    }

    /// Posts the RDMA READ of a descriptor table.
    fn post_table(&mut self, id: u16) {
        let lkey = self.sh.data_lkey;
        let conn = &mut *self.conn;
        if conn.sq_free == 0 {
            return conn.sq_wait.push_back(id);
        }
        let io = &mut conn.ioctxs[usize::from(id)];
        let DataDesc::Indirect { table, all, .. } = *data_desc(io) else {
            panic!("only an indirect descriptor has a table");
        };
        conn.sq_free -= 1;
        let sge = Sge { addr: io.table.addr(), len: all * DESC_BYTES, lkey };
        io.saved = std::mem::take(&mut io.cursor);
        io.cursor.posted = 1;
        let remote = Remote { va: table.va, rkey: table.key };
        let wr_id = conn.wr_id(Kind::Table, id);
        let op = SendOp::Read { remote };
        conn.push_wr(SendWr { wr_id, op, sge, signaled: true, fence: false });
    }

    /// A descriptor table is here. False: it contradicts its descriptor, and the command must be
    /// refused.
    pub(crate) fn on_table(&mut self, id: u16) -> bool {
        let io = &mut self.conn.ioctxs[usize::from(id)];
        assert!(io.stage() == Stage::Table, "a table arrived that nobody wants");
        io.cursor = io.saved;
        let desc = *data_desc(io);
        let DataDesc::Indirect { all, .. } = desc else { panic!("a table has its descriptor") };
        let bytes = all * DESC_BYTES;
        if check_table(&desc, &io.table.as_slice()[..bytes as usize]).is_err() {
            return false;
        }
        let stage = io.after_table;
        self.begin_stage(id, stage);
        true
    }

    /// Posts a round of RDMA READs.
    pub(crate) fn post_reads(&mut self, id: u16) {
        let conn = &mut *self.conn;
        if conn.sq_free == 0 || !conn.sq_wait.is_empty() {
            return conn.sq_wait.push_back(id);
        }
        let posted = conn.push_round(id, Way::Read);
        conn.sq_free -= posted;
        let io = &mut conn.ioctxs[usize::from(id)];
        io.cursor.posted = posted;
        conn.signal_last(Kind::Read, id);
    }

    /// Posts a round of RDMA WRITEs, and the response behind it when it is the last.
    #[inline]
    pub(crate) fn post_writes(&mut self, id: u16) {
        let conn = &mut *self.conn;
        if conn.sq_free == 0 || !conn.sq_wait.is_empty() {
            conn.ioctxs[usize::from(id)].enter_data_in();
            return conn.sq_wait.push_back(id);
        }
        let posted = conn.push_round(id, Way::Write);
        conn.sq_free -= posted;
        let io = &mut conn.ioctxs[usize::from(id)];
        if io.cursor.left == 0 {
            return self.post_rsp(id, posted);
        }
        io.enter_data_in();
        io.cursor.posted = posted;
        conn.signal_last(Kind::Write, id);
    }

    /// A round has completed: its send-queue slots are free.
    pub(crate) fn on_round(&mut self, id: u16) {
        let io = &mut self.conn.ioctxs[usize::from(id)];
        assert!(io.cursor.posted > 0, "a round completed that was not posted");
        self.conn.sq_free += io.cursor.posted;
        io.cursor.posted = 0;
    }

    /// Send-queue slots came back: transfers that wait for some go on, in order.
    pub(crate) fn retry_sq(&mut self) {
        while self.conn.sq_free > 0 {
            let Some(id) = self.conn.sq_wait.pop_front() else { return };
            // The rest of the line must not make the head wait for itself.
            let line = std::mem::take(&mut self.conn.sq_wait);
            match self.conn.ioctxs[usize::from(id)].stage() {
                Stage::Table => self.post_table(id),
                Stage::DataIn => self.post_writes(id),
                _ => self.post_reads(id),
            }
            assert!(self.conn.sq_wait.is_empty(), "a transfer with room waits again");
            self.conn.sq_wait = line;
        }
    }
}

impl Ioctx {
    /// DataIn, unless it is there already (a later round).
    fn enter_data_in(&mut self) {
        if self.stage() != Stage::DataIn {
            self.go(Stage::DataIn);
        }
    }
}

/// The descriptor that the transfer under way, or about to begin, uses.
fn data_desc(io: &Ioctx) -> &DataDesc {
    let stage = if io.stage() == Stage::Table { io.after_table } else { io.stage() };
    match stage {
        Stage::Params | Stage::DataOut => &io.cmd.data_out,
        _ => &io.cmd.data_in,
    }
}

/// Descriptor `at` of a table.
#[inline]
fn nth(table: &[u8], at: u32) -> MemDesc {
    let from = at as usize * DESC_BYTES as usize;
    let bytes = table[from..].first_chunk().expect("the table's length was checked");
    MemDesc::parse(bytes)
}

impl Conn {
    /// Adds work requests for the rest of a transfer, as far as the send queue has room, all
    /// unsignalled. Returns how many.
    #[inline]
    fn push_round(&mut self, id: u16, way: Way) -> u32 {
        let room = self.sq_free;
        let mut count = 0;
        while count < room {
            let io = &self.ioctxs[usize::from(id)];
            if io.cursor.left == 0 {
                break;
            }
            let desc = match way {
                Way::Read => &io.cmd.data_out,
                Way::Write => &io.cmd.data_in,
            };
            let mem = self.descriptor(io, desc, io.cursor.desc);
            let io = &mut self.ioctxs[usize::from(id)];
            let Some((remote, local)) = io.cursor.advance(mem) else { continue };
            let op = match way {
                Way::Read => SendOp::Read { remote },
                Way::Write => SendOp::Write { remote },
            };
            let wr_id = self.wr_id(Kind::Silent, id);
            let sge = Sge { addr: local.addr, len: local.len, lkey: local.lkey };
            self.push_wr(SendWr { wr_id, op, sge, signaled: false, fence: false });
            count += 1;
        }
        assert!(count > 0, "a round without work");
        count
    }

    /// Descriptor `at` of a command.
    #[inline]
    fn descriptor(&self, io: &Ioctx, desc: &DataDesc, at: u32) -> MemDesc {
        match desc {
            DataDesc::Direct(mem) => *mem,
            DataDesc::Indirect { .. } if !io.table.is_none() => nth(io.table.as_slice(), at),
            DataDesc::Indirect { at: table, .. } => {
                nth(&self.recv.bytes(u32::from(io.recv_slot))[usize::from(*table)..], at)
            }
            DataDesc::None | DataDesc::Immediate { .. } => {
                panic!("a transfer without descriptors")
            }
        }
    }

    /// Makes the last work request of the list a signalled one of that kind.
    fn signal_last(&mut self, kind: Kind, id: u16) {
        let wr_id = self.wr_id(kind, id);
        let last = self.sends.last_mut().expect("a round has work");
        assert!(!last.signaled, "the last request of a round is already signalled");
        last.signaled = true;
        last.wr_id = wr_id;
        self.sends_out += 1;
    }
}

impl Cursor {
    /// The next piece within descriptor `mem`: as much as both sides have. None when the descriptor
    /// is used up or empty; the cursor then stands on the next one.
    #[inline]
    fn advance(&mut self, mem: MemDesc) -> Option<(Remote, Local)> {
        let rest = mem.len - self.offset;
        let len = rest.min(self.left);
        let piece = (len > 0).then_some((
            Remote { va: mem.va + u64::from(self.offset), rkey: mem.key },
            Local { addr: self.local, len, lkey: self.lkey },
        ));
        self.left -= len;
        self.local += u64::from(len);
        self.offset += len;
        if self.offset == mem.len {
            self.desc += 1;
            self.offset = 0;
        }
        piece
    }
}

#[cfg(test)]
mod tests {
    use usurp_fabric::Lkey;

    use super::*;

    fn cursor(left: u32) -> Cursor {
        Cursor { left, local: 0x1000, lkey: Lkey(7), ..Cursor::default() }
    }

    #[test]
    fn a_piece_ends_where_the_descriptor_ends() {
        let mut c = cursor(100);
        let (remote, local) = c.advance(MemDesc { va: 0x5000, key: 9, len: 60 }).unwrap();
        assert_eq!((remote.va, remote.rkey, local.addr, local.len), (0x5000, 9, 0x1000, 60));
        assert_eq!((c.left, c.desc, c.offset, c.local), (40, 1, 0, 0x103C));
    }

    #[test]
    fn a_piece_ends_where_the_data_ends() {
        let mut c = cursor(10);
        let (_, local) = c.advance(MemDesc { va: 0, key: 0, len: 60 }).unwrap();
        assert_eq!((local.len, c.left, c.desc, c.offset), (10, 0, 0, 10));
    }

    #[test]
    fn an_empty_descriptor_is_skipped() {
        let mut c = cursor(10);
        assert!(c.advance(MemDesc { va: 0, key: 0, len: 0 }).is_none());
        assert_eq!((c.left, c.desc), (10, 1));
    }
}
