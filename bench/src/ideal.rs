//! A target without transport, for tests: a [`Fabric`] whose peer lives in the same call. A SEND is
//! carried out at once on a disk in memory, with the target role of `usurp-srp` doing the protocol.
//!
//! ```text
//!   post_send -> target::Channel::on_iu -> disk -> rsp -> copied into a posted receive -> poll
//! ```
//! [`Faults`] make it misbehave in one way at a time. `fast` answers GOOD to everything without
//! looking: what remains is the cost of the initiator.

use std::collections::VecDeque;
use std::sync::Arc;

use usurp_fabric::{
    Completion, CompletionBatch, Fabric, FabricError, Lkey, PostCause, PostError, QpLimits, QpNum,
    RecvWr, SendWr, WcStatus,
};
use usurp_reactor::Nanos;
use usurp_reactor::mem::Arena;
use usurp_srp::Residual;
use usurp_srp::initiator::{Format, login_answer, login_req};
use usurp_srp::login::{self, MultiChannelResult, Policy};
use usurp_srp::target::{
    Channel, ChannelConfig, ChannelState, CmdResult, Command, DataDesc, Received, RspCode, descs,
    table_descs,
};

use crate::args::DescFormat;
use crate::client::{Client, DataArea, Shape};
use crate::connect::{self, Nexus};

/// Bytes per block of the disk.
pub const BLOCK: usize = 512;
/// Blocks of the disk.
pub const BLOCKS: usize = 8192;
/// The key to the initiator's data.
const RKEY: u32 = 0x77;

/// What to do wrong.
#[derive(Debug, Default)]
pub struct Faults {
    /// So many commands get a unit attention.
    pub attentions: u32,
    /// So many commands get BUSY.
    pub busy: u32,
    /// So many reads are a block short.
    pub short_reads: u32,
    /// The byte of the disk at this offset reads as something else.
    pub flip_at: Option<usize>,
    /// Writes of this block are acknowledged and lost.
    pub lose_lba: Option<u64>,
    /// Media commands get MEDIUM ERROR.
    pub medium_error: bool,
    /// Commands get no answer.
    pub silent: bool,
    /// The connection breaks at the next poll.
    pub die: bool,
    /// Credits are held back until a CRED_REQ brings them.
    pub withhold: bool,
}

/// One queue pair and the target's channel behind it.
struct Qp {
    recvs: VecDeque<RecvWr>,
    done: VecDeque<Completion>,
    srp: Channel,
}

/// See the module's header.
pub struct Ideal {
    arenas: Vec<Arc<Arena>>,
    qps: Vec<Qp>,
    pub disk: Vec<u8>,
    pub faults: Faults,
    pub fast: bool,
    /// Commands carried out, by first CDB byte.
    pub seen: Vec<u8>,
    /// Data descriptors as they came.
    pub descs: Vec<DataDesc>,
}

/// A client on an ideal target, logged in with `channels` channels and `credits` each.
pub fn client(desc: DescFormat, slots: u32, channels: usize, credits: u32) -> Client<Ideal> {
    let shape = Shape { slots, buffer_bytes: 16384, desc, timeout_ns: 100_000_000 };
    client_of(shape, channels, credits)
}

/// The same with all sizes given.
pub fn client_of(shape: Shape, channels: usize, credits: u32) -> Client<Ideal> {
    let nexus = Nexus {
        initiator: usurp_srp::PortId::from_halves(1, 2),
        target: usurp_srp::PortId::from_halves(3, 4),
    };
    let fabric = Ideal {
        arenas: vec![],
        qps: vec![],
        disk: vec![0; BLOCK * BLOCKS],
        faults: Faults::default(),
        fast: false,
        seen: vec![],
        descs: vec![],
    };
    let arena = DataArea::arena(&shape, channels).unwrap();
    let data = DataArea { arena, rkey: RKEY };
    let mut client = Client::new(fabric, shape, data, channels).unwrap();
    for at in 0..channels {
        let request = connect::login_request(&nexus, shape.desc, at == 0);
        let mut policy = Policy::new(nexus.target);
        policy.credits = credits;
        let iu = login_req(Format::IbCm64, &request);
        let accepted = login::check(Format::IbCm64, &iu, &policy).unwrap();
        let rsp = accepted.rsp(MultiChannelResult::NoChannels);
        let granted = login_answer(&rsp, &request).unwrap();
        let config = ChannelConfig {
            credits,
            ioctxs: credits * 2,
            max_ti_iu_len: accepted.max_ti_iu_len(),
            max_transfer: 1 << 20,
            max_descs: 16,
        };
        let mut srp = Channel::new(&accepted, config);
        srp.advance(ChannelState::Live);
        client.add_channel(srp, &granted).unwrap();
    }
    client
}

impl Ideal {
    fn arena(&self, addr: u64) -> (&Arena, usize) {
        let arena = self.arenas.iter().find(|a| a.contains(addr, 1)).expect("registered memory");
        (arena, (addr - arena.addr()) as usize)
    }

    fn fetch(&self, addr: u64, len: usize) -> Vec<u8> {
        let (arena, at) = self.arena(addr);
        let mut data = vec![0; len];
        arena.copy_out(at, &mut data);
        data
    }

    fn store(&self, addr: u64, data: &[u8]) {
        let (arena, at) = self.arena(addr);
        arena.copy_in(at, data);
    }

    /// SEND to the initiator.
    fn send(&mut self, qp: usize, iu: &[u8]) {
        let wr = self.qps[qp].recvs.pop_front().expect("a receive for every answer");
        assert!(iu.len() <= wr.sge.len as usize, "an IU fits its receive");
        self.store(wr.sge.addr, iu);
        self.complete(qp, wr.wr_id, iu.len() as u32);
    }

    fn complete(&mut self, qp: usize, wr_id: u64, byte_len: u32) {
        let num = QpNum(qp as u32);
        let completion = Completion { qp: num, wr_id, status: WcStatus::Success, byte_len };
        self.qps[qp].done.push_back(completion);
    }

    fn on_iu(&mut self, qp: usize, iu: &[u8]) {
        match self.qps[qp].srp.on_iu(iu) {
            Received::Command(cmd) => self.on_command(qp, &cmd, iu),
            Received::TaskMgmt { ioctx, .. } => {
                let mut buf = [0; 64];
                let len = self.qps[qp].srp.tsk_rsp(ioctx, RspCode::COMPLETE, &mut buf);
                self.send(qp, &buf[..len]);
                self.qps[qp].srp.on_sent(ioctx);
            }
            Received::Consumed => {}
            other => panic!("the initiator sent {other:?}"),
        }
    }

    fn on_command(&mut self, qp: usize, cmd: &Command, iu: &[u8]) {
        if self.faults.silent {
            return;
        }
        self.seen.push(cmd.cdb[0]);
        for desc in [cmd.data_out, cmd.data_in] {
            if !desc.is_empty() {
                self.descs.push(desc);
            }
        }
        let mut sense = [0u8; 18];
        let result = self.execute(cmd, iu, &mut sense);
        let checked = result.status == 2;
        let result = CmdResult { sense: if checked { &sense } else { &[] }, ..result };
        if self.faults.withhold {
            self.qps[qp].srp.finish_silently(cmd.ioctx);
            self.send_raw_rsp(qp, cmd, &result);
            let mut buf = [0; 16];
            if let Some(len) = self.qps[qp].srp.cred_req(&mut buf) {
                self.send(qp, &buf[..len]);
                self.qps[qp].srp.on_cred_req_sent();
            }
            return;
        }
        let mut buf = [0; 512];
        let len = self.qps[qp].srp.rsp(cmd.ioctx, &result, &mut buf);
        self.send(qp, &buf[..len]);
        self.qps[qp].srp.on_sent(cmd.ioctx);
    }

    /// A response that grants nothing.
    fn send_raw_rsp(&mut self, qp: usize, cmd: &Command, r: &CmdResult<'_>) {
        let head = usurp_srp::wire::rsp::Head { tag: cmd.tag, req_lim_delta: 0, solicited: false };
        let mut buf = [0; 512];
        let len = usurp_srp::wire::rsp::emit_cmd(
            &mut buf, head, r.status, r.data_out, r.data_in, r.sense,
        );
        self.send(qp, &buf[..len]);
    }

    fn execute(&mut self, cmd: &Command, iu: &[u8], sense: &mut [u8; 18]) -> CmdResult<'static> {
        let op = cmd.cdb[0];
        let mut check = |key: u8, asc: u8| {
            sense[0] = 0x70;
            sense[2] = key;
            sense[7] = 10;
            sense[12] = asc;
            CmdResult { status: 2, ..CmdResult::default() }
        };
        let exempt = matches!(op, 0x12 | 0xa0);
        if !exempt && self.faults.attentions > 0 {
            self.faults.attentions -= 1;
            return check(6, 0x29);
        }
        if self.faults.busy > 0 {
            self.faults.busy -= 1;
            return CmdResult { status: 8, ..CmdResult::default() };
        }
        let be = |at: usize, len: usize| {
            cmd.cdb[at..at + len].iter().fold(0u64, |n, &b| n << 8 | u64::from(b))
        };
        match op {
            0x00 | 0x35 => CmdResult::default(),
            0x12 => match inquiry(cmd.cdb[1], cmd.cdb[2]) {
                Some(data) => self.give(cmd, iu, data),
                None => check(5, 0x24),
            },
            0xa0 => self.give(cmd, iu, vec![0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
            0x9e => {
                let mut data = vec![0; 32];
                data[..8].copy_from_slice(&(BLOCKS as u64 - 1).to_be_bytes());
                data[8..12].copy_from_slice(&(BLOCK as u32).to_be_bytes());
                self.give(cmd, iu, data)
            }
            0x28 | 0x2a | 0x88 | 0x8a => {
                let long = op >= 0x80;
                let (lba, blocks) = if long { (be(2, 8), be(10, 4)) } else { (be(2, 4), be(7, 2)) };
                if lba + blocks > BLOCKS as u64 {
                    return check(5, 0x21);
                }
                if self.faults.medium_error {
                    return check(3, 0x11);
                }
                self.media(cmd, iu, lba, blocks)
            }
            _ => check(5, 0x20),
        }
    }

    fn media(&mut self, cmd: &Command, iu: &[u8], lba: u64, blocks: u64) -> CmdResult<'static> {
        let range = lba as usize * BLOCK..(lba + blocks) as usize * BLOCK;
        if cmd.cdb[0] & 2 == 0 {
            let mut data = self.disk[range.clone()].to_vec();
            if let Some(at) = self.faults.flip_at.filter(|at| range.contains(at)) {
                data[at - range.start] ^= 0x10;
            }
            if self.faults.short_reads > 0 {
                self.faults.short_reads -= 1;
                data.truncate(data.len() - BLOCK);
            }
            return self.give(cmd, iu, data);
        }
        let mut data = self.take(cmd, iu);
        let residual = Residual::of(range.len() as u64, data.len() as u64);
        data.truncate(range.len());
        if let Some(lost) = self.faults.lose_lba.filter(|l| (lba..lba + blocks).contains(l)) {
            let at = (lost - lba) as usize * BLOCK;
            let old = lost as usize * BLOCK;
            data[at..at + BLOCK].copy_from_slice(&self.disk[old..old + BLOCK]);
        }
        self.disk[range].copy_from_slice(&data);
        CmdResult { data_out: residual, ..CmdResult::default() }
    }

    /// The pieces of the initiator's buffer.
    fn pieces(&self, desc: &DataDesc, iu: &[u8]) -> Vec<(u64, usize)> {
        let list = |d: usurp_srp::target::MemDesc| {
            assert_eq!(d.key, RKEY);
            (d.va, d.len as usize)
        };
        if let DataDesc::Indirect { table, .. } = desc
            && desc.is_partial()
        {
            assert_eq!(table.key, RKEY);
            let bytes = self.fetch(table.va, table.len as usize);
            Channel::check_table(desc, &bytes).expect("the table is what the IU announced");
            return table_descs(&bytes).map(list).collect();
        }
        descs(desc, iu).map(list).collect()
    }

    fn give(&mut self, cmd: &Command, iu: &[u8], data: Vec<u8>) -> CmdResult<'static> {
        let mut rest = data.as_slice();
        for (va, len) in self.pieces(&cmd.data_in, iu) {
            let (now, later) = rest.split_at(len.min(rest.len()));
            self.store(va, now);
            rest = later;
        }
        let data_in = Residual::of(data.len() as u64, u64::from(cmd.data_in.len()));
        CmdResult { data_in, ..CmdResult::default() }
    }

    fn take(&mut self, cmd: &Command, iu: &[u8]) -> Vec<u8> {
        if let Some(data) = cmd.data_out.immediate(iu) {
            return data.to_vec();
        }
        let pieces = self.pieces(&cmd.data_out, iu);
        pieces.into_iter().flat_map(|(va, len)| self.fetch(va, len)).collect()
    }

    fn answer_fast(&mut self, qp: usize, wr: &SendWr) {
        let mut rsp = [0u8; 36];
        rsp[0] = 0xc1;
        rsp[7] = 1;
        let (arena, at) = self.arena(wr.sge.addr);
        arena.copy_out(at + 8, &mut rsp[8..16]);
        self.send(qp, &rsp);
    }
}

fn inquiry(evpd: u8, page: u8) -> Option<Vec<u8>> {
    let mut data = match (evpd, page) {
        (0, 0) => {
            let mut data = vec![0, 0, 6, 2, 31, 0, 0, 2];
            data.extend(b"USURP   ideal disk      0001");
            return Some(data);
        }
        (1, 0x00) => vec![0, 0, 0, 0, 0x00, 0x80, 0x83],
        (1, 0x80) => [&[0, 0x80, 0, 0][..], b"serial-7"].concat(),
        (1, 0x83) => vec![0, 0x83, 0, 0, 1, 3, 0, 8, 0x60, 1, 2, 3, 4, 5, 6, 7],
        _ => return None,
    };
    data[3] = data.len() as u8 - 4;
    Some(data)
}

impl Fabric for Ideal {
    type Endpoint = Channel;

    fn register(&mut self, arena: &Arc<Arena>) -> Result<Lkey, FabricError> {
        self.arenas.push(arena.clone());
        Ok(Lkey(self.arenas.len() as u32))
    }

    fn adopt(&mut self, srp: Channel) -> Result<QpNum, (FabricError, Channel)> {
        let (recvs, done) = (VecDeque::with_capacity(1024), VecDeque::with_capacity(1024));
        self.qps.push(Qp { recvs, done, srp });
        Ok(QpNum(self.qps.len() as u32 - 1))
    }

    fn post_recv(&mut self, qp: QpNum, list: &[RecvWr]) -> Result<(), PostError> {
        self.qps[qp.0 as usize].recvs.extend(list);
        Ok(())
    }

    fn post_send(&mut self, qp: QpNum, list: &[SendWr]) -> Result<(), PostError> {
        let at = qp.0 as usize;
        if self.faults.die {
            return Err(PostError { index: 0, cause: PostCause::BadState });
        }
        for wr in list {
            if self.fast {
                self.answer_fast(at, wr);
            } else {
                let iu = self.fetch(wr.sge.addr, wr.sge.len as usize);
                self.on_iu(at, &iu);
            }
            if wr.signaled {
                self.complete(at, wr.wr_id, 0);
            }
        }
        Ok(())
    }

    fn poll(&mut self, _now: Nanos, out: &mut CompletionBatch) -> usize {
        if self.faults.die {
            (0..self.qps.len()).for_each(|qp| self.set_error(QpNum(qp as u32)));
        }
        let before = out.len();
        for qp in &mut self.qps {
            while !out.is_full()
                && let Some(completion) = qp.done.pop_front()
            {
                out.push(completion);
            }
        }
        out.len() - before
    }

    fn set_error(&mut self, qp: QpNum) {
        let state = &mut self.qps[qp.0 as usize];
        for wr in state.recvs.drain(..) {
            let status = WcStatus::Flushed;
            state.done.push_back(Completion { qp, wr_id: wr.wr_id, status, byte_len: 0 });
        }
    }

    fn release(&mut self, qp: QpNum) -> Channel {
        let nobody = Policy::new(usurp_srp::PortId::default());
        let nexus = Nexus { initiator: nobody.target_port_id, target: nobody.target_port_id };
        let request = connect::login_request(&nexus, DescFormat::Direct, true);
        let iu = login_req(Format::IbCm64, &request);
        let login = login::check(Format::IbCm64, &iu, &nobody).unwrap();
        let config = ChannelConfig {
            credits: 128,
            ioctxs: 256,
            max_ti_iu_len: 512,
            max_transfer: 0,
            max_descs: 1,
        };
        std::mem::replace(&mut self.qps[qp.0 as usize].srp, Channel::new(&login, config))
    }

    fn limits(&self, _qp: QpNum) -> QpLimits {
        QpLimits {
            max_send_wr: 512,
            max_recv_wr: 512,
            max_inline: 0,
            max_rd_atomic: 0,
            max_sge_rd: 1,
        }
    }
}
