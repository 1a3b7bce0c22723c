//! An initiator that sends whatever it is told: one channel, IUs as bytes, no rules but its own
//! count of credit.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use usurp_fabric::shm::{ConnectError, ConnectParams, FabricConfig, Regions, ShmFabric, connect};
use usurp_fabric::{CompletionBatch, Fabric, Lkey, QpNum, RecvWr, SendOp, SendWr, Sge, WcStatus};
use usurp_reactor::mem::{Arena, HugePolicy};
use usurp_srp::PortId;
use usurp_srp::initiator::{Format, MultiChannel, linux_login, login_req};
use usurp_srp::wire::login_req::Repr;

use super::iu::{self, Buffer, Cmd, Mem};
use super::target::Target;
use super::{ID_EXT, IOC_GUID, PATIENCE};

/// Receives posted.
const RECVS: u64 = 160;
/// Bytes of a receive.
const RECV_BYTES: u64 = 512;
/// Send slots, used in turn.
const SENDS: u64 = 64;
/// Bytes of one.
const SEND_BYTES: u64 = 32 << 10;
/// Marks the wr_id of a receive.
const RECV: u64 = 1 << 32;
/// Tag of the command that shows whether we are still served.
const PROBE: u64 = 0x7072_6f62_6521_2121;
/// Bytes lent to the target.
const LENT: usize = 4 << 20;

/// What came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Got {
    /// An IU.
    Iu(Vec<u8>),
    /// The target cut us off.
    Cut,
}

/// An SRP_RSP, taken apart after reference 1.8.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rsp {
    /// Tag of the request.
    pub tag: u64,
    /// Credits granted.
    pub delta: i32,
    /// Flag bits.
    pub flags: u8,
    /// SCSI status.
    pub status: u8,
    /// Residuals: data-out, data-in.
    pub residuals: (u32, u32),
    /// Response code, if there is response data.
    pub code: Option<u8>,
    /// Sense key, ASC, ASCQ, if there is sense data.
    pub sense: Option<(u8, u8, u8)>,
}

impl Rsp {
    fn parse(iu: &[u8]) -> Rsp {
        let u32_at = |at: usize| u32::from_be_bytes(iu[at..at + 4].try_into().expect("4 bytes"));
        assert!(iu[0] == 0xc1 && iu.len() >= 36, "not an SRP_RSP: {iu:02x?}");
        let (sense_len, data_len) = (u32_at(28) as usize, u32_at(32) as usize);
        assert_eq!(36 + sense_len + data_len, iu.len(), "lengths of {iu:02x?}");
        let sense = &iu[36 + data_len..];
        Rsp {
            tag: u64::from_be_bytes(iu[8..16].try_into().expect("8 bytes")),
            delta: u32_at(4) as i32,
            flags: iu[18],
            status: iu[19],
            residuals: (u32_at(20), u32_at(24)),
            code: (iu[18] & 1 != 0).then(|| iu[39]),
            sense: (iu[18] & 2 != 0).then(|| (sense[2] & 15, sense[12], sense[13])),
        }
    }

    /// Panics unless it is CHECK CONDITION with this sense.
    pub fn expect_sense(&self, key: u8, asc: u8, ascq: u8) {
        assert_eq!((self.status, self.sense), (2, Some((key, asc, ascq))), "{self:?}");
    }

    /// Panics unless it is GOOD without residual.
    pub fn expect_good(&self) {
        assert_eq!((self.status, self.flags), (0, 0), "{self:?}");
    }
}

/// A channel.
pub struct Raw {
    /// Our end.
    fabric: ShmFabric,
    /// The queue pair.
    qp: QpNum,
    /// IUs: receives, then sends.
    ius: Arc<Arena>,
    /// Key to them.
    lkey: Lkey,
    /// Memory that the target may read and write.
    pub lent: Arc<Arena>,
    /// Its key.
    pub rkey: u32,
    /// The first part of `lent`, as a region that may only be read.
    pub rkey_read_only: u32,
    /// SRP_LOGIN_RSP.
    pub login_rsp: Vec<u8>,
    /// Credits we hold.
    pub req_lim: i32,
    /// Came and were not asked for yet.
    stash: VecDeque<Got>,
    /// Sends so far.
    sent: u64,
    /// Tag of the next command.
    next_tag: u64,
    /// The fabric's time begins here.
    born: Instant,
}

/// A login request as Linux sends it, from an initiator port with this GUID.
pub fn request(guid: u64, action: MultiChannel) -> Repr {
    let ours = PortId::from_halves(0, guid);
    linux_login(ours, PortId::from_halves(ID_EXT, IOC_GUID), action)
}

/// SRP_LOGIN_RSP, or why not.
fn dial(
    socket: &Path,
    data: &[u8],
    regions: &Regions,
) -> Result<usurp_fabric::shm::Connected, ConnectError> {
    let params = ConnectParams { timeout: PATIENCE, ..ConnectParams::default() };
    connect(socket, data, regions, params)
}

/// The reason code of the LOGIN_REJ that these bytes get as their answer.
pub fn reject_reason(target: &Target, data: &[u8]) -> u32 {
    match dial(&target.socket, data, &Regions::new()) {
        Err(ConnectError::Rejected(iu)) => {
            assert_eq!((iu[0], iu.len()), (0xc2, 32), "not a LOGIN_REJ: {iu:02x?}");
            u32::from_be_bytes(iu[4..8].try_into().expect("4 bytes"))
        }
        Err(other) => panic!("no LOGIN_REJ: {other}"),
        Ok(_) => panic!("the login was accepted"),
    }
}

impl Raw {
    /// Logs in with a GUID of its own.
    pub fn login(target: &Target) -> Raw {
        Raw::login_as(target, usurp_bench::connect::random_u64(), MultiChannel::Single)
    }

    /// Logs in from a given port; panics when it is rejected.
    pub fn login_as(target: &Target, guid: u64, action: MultiChannel) -> Raw {
        Raw::login_with(target, &request(guid, action))
    }

    /// Logs in with a given request; panics when it is rejected.
    pub fn login_with(target: &Target, request: &Repr) -> Raw {
        let lent = Arena::shared("lent", LENT, HugePolicy::Never).expect("memory");
        let mut regions = Regions::new();
        let rkey = regions.add(&lent);
        let rkey_read_only = regions.add_with(&lent, usurp_fabric::shm::ACCESS_REMOTE_READ);
        let connected = dial(&target.socket, &login_req(Format::IbCm64, request), &regions);
        let connected = connected.unwrap_or_else(|why| panic!("login: {why}"));
        let bytes = (RECVS * RECV_BYTES + SENDS * SEND_BYTES) as usize;
        let ius = Arena::new("ius", bytes, HugePolicy::Never).expect("memory");
        let mut fabric = ShmFabric::new(FabricConfig { max_qps: 1 });
        let lkey = fabric.register(&ius).expect("room for one");
        let qp = fabric.adopt(connected.endpoint).map_err(|(why, _)| why).expect("room for one");
        let login_rsp = connected.rsp_private_data;
        let req_lim = i32::from_be_bytes(login_rsp[4..8].try_into().expect("4 bytes"));
        let (stash, sent, next_tag) = (VecDeque::new(), 0, 1);
        let mut raw = Raw {
            fabric,
            qp,
            ius,
            lkey,
            lent,
            rkey,
            rkey_read_only,
            login_rsp,
            req_lim,
            stash,
            sent,
            next_tag,
            born: Instant::now(),
        };
        (0..RECVS).for_each(|slot| raw.repost(slot));
        raw
    }

    /// Logs in, and takes the unit attentions of these LUNs away.
    pub fn ready(target: &Target, luns: &[u8]) -> Raw {
        let mut raw = Raw::login(target);
        raw.calm(luns);
        raw
    }

    /// Takes the unit attentions of these LUNs away.
    pub fn calm(&mut self, luns: &[u8]) {
        for &lun in luns {
            while self.run(Cmd::new(lun, iu::TUR)).status != 0 {}
        }
    }

    /// Part of the lent memory.
    pub fn mem(&self, offset: u64, len: u32) -> Mem {
        Mem { va: self.lent.addr() + offset, key: self.rkey, len }
    }

    fn repost(&mut self, slot: u64) {
        let addr = self.ius.addr() + slot * RECV_BYTES;
        let sge = Sge { addr, len: RECV_BYTES as u32, lkey: self.lkey };
        let posted = self.fabric.post_recv(self.qp, &[RecvWr { wr_id: RECV | slot, sge }]);
        posted.expect("room for all receives");
    }

    /// Sends bytes as they are.
    pub fn send(&mut self, iu: &[u8]) {
        self.post(iu);
        self.poll();
    }

    fn post(&mut self, iu: &[u8]) {
        assert!(iu.len() as u64 <= SEND_BYTES, "longer than a send slot");
        let slot = self.sent % SENDS;
        self.sent += 1;
        let offset = RECVS * RECV_BYTES + slot * SEND_BYTES;
        self.ius.copy_in(offset as usize, iu);
        let addr = self.ius.addr() + offset;
        let sge = Sge { addr, len: iu.len() as u32, lkey: self.lkey };
        let wr = SendWr { wr_id: slot, op: SendOp::Send, sge, signaled: true, fence: false };
        self.fabric.post_send(self.qp, &[wr]).expect("room in the send queue");
    }

    /// Sends a request: it costs a credit.
    pub fn send_request(&mut self, iu: &[u8]) {
        self.req_lim -= 1;
        self.send(iu);
    }

    /// Sends a command under a tag of its own, and returns that.
    pub fn start(&mut self, mut cmd: Cmd) -> u64 {
        cmd.tag = self.next_tag;
        self.next_tag += 1;
        self.send_request(&cmd.bytes());
        cmd.tag
    }

    /// Sends a task management request under a tag of its own, and returns that.
    pub fn start_tm(&mut self, lun: u8, function: u8, task: u64) -> u64 {
        let tag = 1 << 31 | self.next_tag;
        self.next_tag += 1;
        self.send_request(&iu::tsk_mgmt(tag, lun, function, task));
        tag
    }

    /// Sends a command and waits for its response.
    pub fn run(&mut self, cmd: Cmd) -> Rsp {
        let tag = self.start(cmd);
        let rsp = self.rsp();
        assert_eq!(rsp.tag, tag, "the response to another command");
        rsp
    }

    fn poll(&mut self) {
        let mut batch = CompletionBatch::new();
        self.fabric.poll(self.born.elapsed().as_nanos() as u64, &mut batch);
        for c in batch.as_slice() {
            if c.status != WcStatus::Success {
                if self.stash.back() != Some(&Got::Cut) {
                    self.stash.push_back(Got::Cut);
                }
            } else if c.wr_id & RECV != 0 {
                let slot = c.wr_id & 0xffff;
                let mut iu = vec![0; c.byte_len as usize];
                self.ius.copy_out((slot * RECV_BYTES) as usize, &mut iu);
                self.stash.push_back(Got::Iu(iu));
                self.repost(slot);
            }
        }
    }

    /// Whatever comes next.
    pub fn next(&mut self) -> Got {
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(got) = self.stash.pop_front() {
                return got;
            }
            self.poll();
            if self.stash.is_empty() {
                assert!(Instant::now() < until, "the target neither answers nor cuts us off");
                std::thread::yield_now();
            }
        }
    }

    /// The next response; answers SRP_CRED_REQ on the way.
    pub fn rsp(&mut self) -> Rsp {
        loop {
            match self.next() {
                Got::Iu(iu) if iu[0] == 0x81 => self.on_cred_req(&iu),
                Got::Iu(iu) => {
                    let rsp = Rsp::parse(&iu);
                    self.req_lim += rsp.delta;
                    return rsp;
                }
                Got::Cut => panic!("cut off instead of a response"),
            }
        }
    }

    fn on_cred_req(&mut self, iu: &[u8]) {
        assert_eq!(iu.len(), 16, "SRP_CRED_REQ: {iu:02x?}");
        self.req_lim += i32::from_be_bytes(iu[4..8].try_into().expect("4 bytes"));
        let tag = u64::from_be_bytes(iu[8..16].try_into().expect("8 bytes"));
        self.send(&iu::plain(0x41, tag, 16));
    }

    /// Waits until all credit is back; nothing but SRP_CRED_REQ may come.
    pub fn expect_credit(&mut self, all: i32) {
        while self.req_lim < all {
            match self.next() {
                Got::Iu(iu) if iu[0] == 0x81 => self.on_cred_req(&iu),
                other => panic!("instead of credit: {other:02x?}"),
            }
        }
        assert_eq!(self.req_lim, all, "more credit than there is");
    }

    /// Waits until there is some credit again; nothing but SRP_CRED_REQ may come.
    pub fn expect_some_credit(&mut self) {
        let more = self.req_lim + 1;
        while self.req_lim < more {
            match self.next() {
                Got::Iu(iu) if iu[0] == 0x81 => self.on_cred_req(&iu),
                other => panic!("instead of credit: {other:02x?}"),
            }
        }
    }

    /// Waits until the target cuts us off; no response may come before.
    pub fn expect_cut(&mut self) {
        match self.next() {
            Got::Cut => {}
            Got::Iu(iu) => panic!("an answer instead of being cut off: {iu:02x?}"),
        }
    }

    /// Still in service: a command gets its answer.
    pub fn expect_served(&mut self) {
        self.calm(&[0]);
        self.run(Cmd::new(0, iu::TUR)).expect_good();
    }

    /// What has come and was not asked for.
    pub fn peek(&mut self) -> Option<Got> {
        self.poll();
        self.stash.front().cloned()
    }

    /// Whatever was sent before: either a command of ours is answered now (true), or we are cut off
    /// (false). Answers to what was sent before are passed over.
    pub fn expect_served_or_cut(&mut self) -> bool {
        let probe = Cmd { tag: PROBE, ..Cmd::new(0, iu::TUR) };
        self.send(&probe.bytes());
        loop {
            match self.next() {
                Got::Cut => return false,
                Got::Iu(iu) if iu[0] == 0x81 => self.on_cred_req(&iu),
                Got::Iu(iu) if Rsp::parse(&iu).tag == PROBE => return true,
                Got::Iu(_) => {}
            }
        }
    }

    /// Sends and looks at nothing that comes.
    pub fn send_unread(&mut self, iu: &[u8]) {
        self.post(iu);
    }

    /// A READ(10) of LUN `lun` into the start of the lent memory.
    pub fn reading(&self, lun: u8, lba: u32, blocks: u16) -> Cmd {
        let mem = self.mem(0, u32::from(blocks) * 512);
        Cmd::reading(lun, iu::read10(lba, blocks), Buffer::Direct(mem))
    }

    /// A WRITE(10) to LUN `lun` from the start of the lent memory.
    pub fn writing(&self, lun: u8, lba: u32, blocks: u16) -> Cmd {
        let mem = self.mem(0, u32::from(blocks) * 512);
        Cmd::writing(lun, iu::write10(lba, blocks), Buffer::Direct(mem))
    }
}
