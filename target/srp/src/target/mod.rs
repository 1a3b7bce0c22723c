//! The target's side of one channel: receives IUs, keeps credits and send ioctxs, builds responses.
//!
//! Owns: channel state, credit sum, ioctx states. Never does: I/O, data movement, SCSI, allocation
//! after `new`. One reactor owns a channel. The caller keeps the IUs of `Received::Wait` in order
//! and offers them again after every `on_sent`, `unpost` and `finish_silently`, and after
//! `advance(Live)`.
//!
//! ```text
//!   CONNECTING --> LIVE --> DISCONNECTING --> DRAINING --> DISCONNECTED   (only upward, may skip)
//!
//!   on_iu -> Command/Malformed/TaskMgmt -> rsp | tsk_rsp -> (posted) -> on_sent
//!                                    |             `-> (not posted) -> unpost
//!                                    `-> finish_silently
//! ```
//! Invariants: given = held + in flight + owed; a request ends exactly once; one ioctx is kept for
//! TSK_MGMT.

mod credit;
mod ioctx;
mod parse;

pub use self::credit::Credit;
pub use self::ioctx::{EVENTS, IoctxEvent, IoctxId, IoctxState, STATES, TABLE};
pub use self::parse::{BadTable, DataDesc, check_table, descs, table_descs};
pub use crate::wire::cmd::TaskAttr;
pub use crate::wire::desc::{Descs, MemDesc};
pub use crate::wire::rsp::RspCode;
pub use crate::wire::tsk_mgmt::TmFunc;

use self::ioctx::Ioctxs;
use self::parse::Limits;
use crate::login::LoginAccepted;
use crate::wire::cmd::Cmd;
use crate::wire::tsk_mgmt::TskMgmt;
use crate::wire::{self, Opcode, SOL_NOT_FAILURE, SOL_NOT_SUCCESS};
use crate::{Residual, Tag};

/// Life of a channel (reference 3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ChannelState {
    /// The login is accepted; the initiator may not know yet. IUs wait.
    Connecting,
    /// In service.
    Live,
    /// Going: no new requests, responses may still go out.
    Disconnecting,
    /// The QP is in ERR; everything posted comes back flushed.
    Draining,
    /// Nothing is posted any more.
    Disconnected,
}

/// Sizes of a channel; fixed for its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChannelConfig {
    /// Credits: those of the login.
    pub credits: u32,
    /// Send ioctxs, normally `credits * 2`: a response may bring a new command before its own send
    /// completion.
    pub ioctxs: u32,
    /// Largest IU to send: that of the login, bytes.
    pub max_ti_iu_len: u32,
    /// Longest transfer that is served, bytes. Longer ones are marked (`Command::too_long`), not
    /// refused.
    pub max_transfer: u32,
    /// Most descriptors of a table.
    pub max_descs: u32,
}

/// Most bytes of a CDB that are kept: the longest CDB of SBC. Additional bytes beyond are ignored
/// (reference 4.8).
pub const CDB_MAX: usize = 32;

/// A command, copied out of its IU: lengths and sums are checked, the receive buffer may be posted
/// again (unless the data is immediate, and once the caller copied the descriptors of an indirect
/// table).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Command {
    /// Its send ioctx.
    pub ioctx: IoctxId,
    /// Task attribute.
    pub attr: TaskAttr,
    /// A transfer is longer than `ChannelConfig::max_transfer`: answer 05 24/00.
    pub too_long: bool,
    /// Valid bytes of `cdb`: 16 to 32.
    pub cdb_len: u16,
    /// Its tag.
    pub tag: Tag,
    /// The LUN's 8 bytes as a big-endian number.
    pub lun: u64,
    /// CDB, padded with 0.
    pub cdb: [u8; CDB_MAX],
    /// Data from the initiator.
    pub data_out: DataDesc,
    /// Data to the initiator.
    pub data_in: DataDesc,
}

impl Command {
    /// The CDB.
    #[inline]
    pub fn cdb(&self) -> &[u8] {
        &self.cdb[..usize::from(self.cdb_len)]
    }
}

/// Why a channel must be cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CutReason {
    /// An IU of no bytes.
    Empty,
    /// An IU shorter than its fixed part: even the tag may be unreadable.
    Short {
        /// Its opcode.
        opcode: u8,
        /// Its length in bytes.
        len: u32,
    },
    /// The initiator keeps sending more requests than it has credit for.
    CreditOverrun,
}

/// What an IU means for the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// Carry it out, then `rsp` or `finish_silently`.
    Command(Command),
    /// A command with bad descriptors: `rsp` with CHECK CONDITION 05/0E/03.
    Malformed {
        /// Its send ioctx.
        ioctx: IoctxId,
    },
    /// Carry it out, then `tsk_rsp` or `finish_silently`.
    TaskMgmt {
        /// Its send ioctx.
        ioctx: IoctxId,
        /// The LUN's 8 bytes as a big-endian number.
        lun: u64,
        /// What to do.
        func: TmFunc,
        /// Which command (ABORT TASK).
        task_tag: Tag,
    },
    /// CONNECTING, or no send ioctx is free. Nothing changed: keep the IU and offer it again, in
    /// order.
    Wait,
    /// Nothing to do: a CRED_RSP, an AER_RSP, something unknown, or the channel is going.
    Consumed,
    /// The initiator logs out: disconnect.
    Logout,
    /// Protocol error: disconnect.
    Cut(CutReason),
}

/// The outcome of a command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CmdResult<'a> {
    /// SCSI status byte.
    pub status: u8,
    /// Sense data; empty unless CHECK CONDITION.
    pub sense: &'a [u8],
    /// Residual of the data to the initiator.
    pub data_in: Residual,
    /// Residual of the data from the initiator.
    pub data_out: Residual,
}

/// Requests without credit, in a row, that are still served. A single one can be a race of a sloppy
/// initiator.
const OVERRUNS_MAX: u32 = 8;

/// Smallest response buffer: a task management response.
const TI_IU_MIN: u32 = (wire::rsp::LEN + wire::rsp::RESP_DATA_LEN) as u32;

/// The one target-originated request that may be unanswered (reference 4.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CredReq {
    /// Built, and its send completion has not come: its buffer is in use.
    posted: bool,
    /// Built, and no CRED_RSP has come.
    unanswered: bool,
    /// Credits that the last one carried.
    delta: u32,
    /// Number of the last one; its tag.
    serial: u64,
}

/// One channel.
#[derive(Debug)]
pub struct Channel {
    /// Only ever rises.
    state: ChannelState,
    /// Requests in a row that came without credit; at most `OVERRUNS_MAX + 1`.
    overruns: u32,
    /// Requests without credit since login, for statistics.
    overruns_total: u64,
    /// The credit sum.
    credit: Credit,
    /// The CRED_REQ that may be under way.
    cred_req: CredReq,
    /// What the parser allows.
    limits: Limits,
    /// Longest transfer that is not marked, bytes.
    max_transfer: u32,
    /// Largest IU to send, bytes.
    max_ti_iu_len: u32,
    /// Send ioctxs.
    ioctxs: Ioctxs,
}

impl Channel {
    /// A channel in state CONNECTING. Allocates its tables once.
    pub fn new(login: &LoginAccepted, cfg: ChannelConfig) -> Channel {
        assert_eq!(login.credits(), cfg.credits, "the LOGIN_RSP promised these credits");
        assert_eq!(login.max_ti_iu_len(), cfg.max_ti_iu_len, "the LOGIN_RSP promised this length");
        assert!(cfg.ioctxs >= 2, "one ioctx is kept for task management");
        assert!(cfg.max_ti_iu_len >= TI_IU_MIN);
        Channel {
            state: ChannelState::Connecting,
            overruns: 0,
            overruns_total: 0,
            credit: Credit::new(cfg.credits),
            cred_req: CredReq { posted: false, unanswered: false, delta: 0, serial: 0 },
            limits: Limits { imm_offset: login.imm_offset(), max_descs: cfg.max_descs },
            max_transfer: cfg.max_transfer,
            max_ti_iu_len: cfg.max_ti_iu_len,
            ioctxs: Ioctxs::new(cfg.ioctxs),
        }
    }

    /// Where it is in its life.
    #[inline]
    pub fn state(&self) -> ChannelState {
        self.state
    }

    /// Moves up to `to`. True: this call changed it, and its caller does what belongs to the
    /// change. False: it was there or beyond already.
    pub fn advance(&mut self, to: ChannelState) -> bool {
        let up = to > self.state;
        if up {
            self.state = to;
        }
        up
    }

    /// Takes in one IU: the bytes received, no more. Requests cost a credit; CMD and TSK_MGMT get a
    /// send ioctx.
    #[inline]
    pub fn on_iu(&mut self, iu: &[u8]) -> Received {
        if self.state != ChannelState::Live {
            return match self.state {
                ChannelState::Connecting => Received::Wait,
                _ => Received::Consumed,
            };
        }
        match iu.first() {
            Some(&op) if op == Opcode::CMD.0 => self.on_cmd(iu),
            Some(&op) => self.on_other(Opcode(op), iu),
            None => Received::Cut(CutReason::Empty),
        }
    }

    #[inline]
    fn on_cmd(&mut self, iu: &[u8]) -> Received {
        let Ok(cmd) = Cmd::new_checked(iu) else { return short(iu) };
        if self.ioctxs.free() < 2 {
            return Received::Wait; // the last one is for task management
        }
        let Ok(credit) = self.take_credit() else {
            return Received::Cut(CutReason::CreditOverrun);
        };
        let ioctx = self.ioctxs.take(IoctxEvent::TakeCmd, cmd.tag(), credit, cmd.sol_not());
        let mut received = Command {
            ioctx,
            attr: cmd.task_attr(),
            too_long: false,
            cdb_len: 16,
            tag: cmd.tag(),
            lun: cmd.lun(),
            cdb: [0; CDB_MAX],
            data_out: DataDesc::None,
            data_in: DataDesc::None,
        };
        if parse::data_descs(cmd, iu, &self.limits, &mut received).is_none() {
            return Received::Malformed { ioctx };
        }
        received.cdb[..16].copy_from_slice(&cmd.cdb());
        let extra = cmd.add_cdb_bytes().min(CDB_MAX - 16);
        if extra > 0 {
            // In bounds: data_descs has proven 48 + A <= length.
            let from = wire::cmd::LEN;
            received.cdb[16..16 + extra].copy_from_slice(&iu[from..from + extra]);
            received.cdb_len = (16 + extra) as u16;
        }
        let longest = received.data_out.len().max(received.data_in.len());
        received.too_long = longest > self.max_transfer;
        Received::Command(received)
    }

    #[cold]
    fn on_other(&mut self, op: Opcode, iu: &[u8]) -> Received {
        match op {
            Opcode::TSK_MGMT => return self.on_tsk_mgmt(iu),
            Opcode::CRED_RSP => {
                if iu.len() < wire::cred::LEN {
                    return short(iu);
                }
                self.cred_req.unanswered = false; // without one outstanding: ignored
            }
            Opcode::AER_RSP if iu.len() < wire::aer::RSP_LEN => return short(iu),
            _ => {}
        }
        if !op.is_response() {
            // Whatever it is, the initiator paid for it and gets the credit back (known-bugs C4).
            match self.take_credit() {
                Ok(true) => self.credit.spend(),
                Ok(false) => {}
                Err(Overrun) => return Received::Cut(CutReason::CreditOverrun),
            }
        }
        if op == Opcode::I_LOGOUT { Received::Logout } else { Received::Consumed }
    }

    fn on_tsk_mgmt(&mut self, iu: &[u8]) -> Received {
        let Ok(tm) = TskMgmt::new_checked(iu) else { return short(iu) };
        if self.ioctxs.free() < 1 {
            return Received::Wait;
        }
        let Ok(credit) = self.take_credit() else {
            return Received::Cut(CutReason::CreditOverrun);
        };
        let ioctx = self.ioctxs.take(IoctxEvent::TakeTm, tm.tag(), credit, tm.sol_not());
        Received::TaskMgmt { ioctx, lun: tm.lun(), func: tm.func(), task_tag: tm.task_tag() }
    }

    /// Charges a request. `Ok(false)`: it came without credit and is served all the same; `Err`:
    /// once too often.
    #[inline]
    fn take_credit(&mut self) -> Result<bool, Overrun> {
        if self.credit.take() {
            self.overruns = 0;
            return Ok(true);
        }
        self.overruns += 1;
        self.overruns_total += 1;
        if self.overruns > OVERRUNS_MAX { Err(Overrun) } else { Ok(false) }
    }

    /// Builds the response to a command into `buf` and returns its length. Active -> RspPosted. The
    /// delta is its own credit and all that is owed. Post it next: after receives whose credit it
    /// returns are posted (reference 4.2).
    #[inline]
    pub fn rsp(&mut self, id: IoctxId, r: &CmdResult<'_>, buf: &mut [u8]) -> usize {
        let slot = self.ioctxs.apply(id, IoctxEvent::Respond);
        slot.delta = self.credit.grant_with_rsp(slot.credit);
        let wish = if r.status == 0 { SOL_NOT_SUCCESS } else { SOL_NOT_FAILURE };
        let head = wire::rsp::Head {
            tag: slot.tag,
            req_lim_delta: slot.delta,
            solicited: slot.sol_not & wish != 0,
        };
        let room = buf.len().min(self.max_ti_iu_len as usize);
        let buf = &mut buf[..room];
        let n = wire::rsp::emit_cmd(buf, head, r.status, r.data_out, r.data_in, r.sense);
        assert!(n <= room, "a response is no longer than promised");
        n
    }

    /// Builds the response to a task management request into `buf` and returns its length. Mgmt ->
    /// RspPosted.
    pub fn tsk_rsp(&mut self, id: IoctxId, code: RspCode, buf: &mut [u8]) -> usize {
        let slot = self.ioctxs.apply(id, IoctxEvent::RespondTm);
        slot.delta = self.credit.grant_with_rsp(slot.credit);
        let complete = code == RspCode::COMPLETE;
        let wish = if complete { SOL_NOT_SUCCESS } else { SOL_NOT_FAILURE };
        let head = wire::rsp::Head {
            tag: slot.tag,
            req_lim_delta: slot.delta,
            solicited: slot.sol_not & wish != 0,
        };
        wire::rsp::emit_tm(buf, head, code)
    }

    /// The response that was built could not be posted; its credits are owed again. RspPosted ->
    /// Free.
    pub fn unpost(&mut self, id: IoctxId) {
        let delta = self.ioctxs.apply(id, IoctxEvent::Unpost).delta;
        self.credit.ungrant(delta);
    }

    /// The send completion of a response came (flushed or not). RspPosted -> Free.
    #[inline]
    pub fn on_sent(&mut self, id: IoctxId) {
        self.ioctxs.apply(id, IoctxEvent::Sent);
    }

    /// A request ends without a response: aborted, or the channel is going. Its credit is owed.
    /// Active | Mgmt -> Free.
    pub fn finish_silently(&mut self, id: IoctxId) {
        if self.ioctxs.apply(id, IoctxEvent::Silent).credit {
            self.credit.spend();
        }
    }

    /// True when a CRED_REQ is due (reference 4.3): credits are owed, and (a) no request is in
    /// flight whose response could carry them, or (b) they are a quarter of the window. Never two
    /// at a time. Nor before the initiator's first IU, when it may have no receive posted
    /// (reference 2.1): only requests that came in make us owe anything.
    #[inline]
    pub fn cred_req_due(&self) -> bool {
        let owed = self.credit.owed();
        if owed == 0 {
            return false;
        }
        let free = !self.cred_req.posted && !self.cred_req.unanswered;
        let due = self.credit.in_flight() == 0 || owed >= self.credit.given().div_ceil(4);
        free && due && self.state == ChannelState::Live
    }

    /// Builds a CRED_REQ into `buf` when one is due, and returns its length. Then
    /// `on_cred_req_sent` at its send completion, or `unpost_cred_req`.
    pub fn cred_req(&mut self, buf: &mut [u8]) -> Option<usize> {
        if !self.cred_req_due() {
            return None;
        }
        let delta = self.credit.grant_owed();
        let serial = self.cred_req.serial + 1;
        self.cred_req = CredReq { posted: true, unanswered: true, delta, serial };
        let req_lim_delta = i32::try_from(delta).expect("fewer than 2^16 credits");
        let tag = Tag(serial.to_be_bytes());
        let req = wire::cred::Req { req_lim_delta, tag, solicited: false };
        req.emit(wire::head_mut(buf));
        Some(wire::cred::LEN)
    }

    /// The send completion of the CRED_REQ came; its buffer is free. The next one also waits for
    /// the CRED_RSP.
    pub fn on_cred_req_sent(&mut self) {
        assert!(self.cred_req.posted, "a CRED_REQ is posted");
        self.cred_req.posted = false;
    }

    /// The CRED_REQ that was built could not be posted.
    pub fn unpost_cred_req(&mut self) {
        assert!(self.cred_req.posted, "a CRED_REQ is posted");
        self.credit.ungrant(self.cred_req.delta);
        self.cred_req.posted = false;
        self.cred_req.unanswered = false;
    }

    /// The command with this tag that is not answered yet: the one ABORT TASK means. None: it is
    /// finished or never was, and the function is complete (reference 4.11).
    pub fn find(&self, tag: Tag) -> Option<IoctxId> {
        let wanted = |&(_, state, t): &_| state == IoctxState::Active && t == tag;
        self.ioctxs.iter().find(wanted).map(|(id, _, _)| id)
    }

    /// All ioctxs in use, whatever their state.
    pub fn live(&self) -> impl Iterator<Item = IoctxId> + '_ {
        self.ioctxs.iter().filter(|&(_, state, _)| state != IoctxState::Free).map(|(id, _, _)| id)
    }

    /// State of an ioctx.
    #[inline]
    pub fn ioctx_state(&self, id: IoctxId) -> IoctxState {
        self.ioctxs.state(id)
    }

    /// Tag of the request that an ioctx serves.
    #[inline]
    pub fn tag(&self, id: IoctxId) -> Tag {
        self.ioctxs.get(id).tag
    }

    /// Number of ioctxs in use.
    #[inline]
    pub fn in_use(&self) -> u32 {
        (self.ioctxs.count() - self.ioctxs.free()) as u32
    }

    /// True when nothing of this channel is under way: no ioctx in use, no CRED_REQ posted.
    pub fn is_whole(&self) -> bool {
        self.in_use() == 0 && !self.cred_req.posted
    }

    /// The credit sum.
    #[inline]
    pub fn credits(&self) -> Credit {
        self.credit
    }

    /// Requests that came without credit since login.
    pub fn overruns(&self) -> u64 {
        self.overruns_total
    }

    /// See [`check_table`].
    pub fn check_table(desc: &DataDesc, table: &[u8]) -> Result<(), BadTable> {
        check_table(desc, table)
    }
}

/// The initiator overran its credit once too often.
struct Overrun;

#[cold]
fn short(iu: &[u8]) -> Received {
    let opcode = iu.first().copied().unwrap_or_default();
    Received::Cut(CutReason::Short { opcode, len: iu.len() as u32 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PortId;
    use crate::login::{self, Format, Policy};
    use crate::wire::golden::{self, READ10, RSP_SENSE, RSP_TM, TSK_MGMT, hex};
    use crate::wire::rsp::Rsp;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    fn connecting(credits: u32, ioctxs: u32) -> Channel {
        let id = PortId::from_halves(0x0002_c903_00a1_b2c4, 0x0002_c903_00a1_b2c4);
        let policy = Policy { credits, ..Policy::new(id) };
        let login = login::check(Format::IbCm64, &hex(golden::LOGIN_REQ), &policy).unwrap();
        let cfg = ChannelConfig {
            credits,
            ioctxs,
            max_ti_iu_len: policy.max_ti_iu_len,
            max_transfer: 1 << 20,
            max_descs: 2048,
        };
        Channel::new(&login, cfg)
    }

    fn live(credits: u32, ioctxs: u32) -> Channel {
        let mut ch = connecting(credits, ioctxs);
        assert!(ch.advance(ChannelState::Live));
        ch
    }

    fn take_cmd(ch: &mut Channel) -> IoctxId {
        match ch.on_iu(&hex(READ10)) {
            Received::Command(cmd) => cmd.ioctx,
            other => panic!("{other:?}"),
        }
    }

    fn take_tm(ch: &mut Channel) -> IoctxId {
        match ch.on_iu(&hex(TSK_MGMT)) {
            Received::TaskMgmt { ioctx, .. } => ioctx,
            other => panic!("{other:?}"),
        }
    }

    fn good(ch: &mut Channel, id: IoctxId) -> i32 {
        let mut b = [0xA5; 512];
        let n = ch.rsp(id, &CmdResult::default(), &mut b);
        Rsp::new_checked(&b[..n]).unwrap().req_lim_delta()
    }

    #[test]
    fn states_only_move_upward() {
        use ChannelState::{Connecting, Disconnected, Disconnecting, Draining, Live};
        let all = [Connecting, Live, Disconnecting, Draining, Disconnected];
        for (i, &from) in all.iter().enumerate() {
            for (j, &to) in all.iter().enumerate() {
                let mut ch = connecting(4, 8);
                ch.advance(from);
                assert_eq!(ch.advance(to), j > i, "{from:?} -> {to:?}");
                assert_eq!(ch.state(), all[i.max(j)]);
            }
        }
    }

    #[test]
    fn a_connecting_channel_lets_every_iu_wait_and_changes_nothing() {
        let mut ch = connecting(4, 8);
        let before = ch.credits();
        for iu in [hex(READ10), hex(TSK_MGMT), hex(golden::CRED_RSP), vec![0x30], vec![]] {
            assert_eq!(ch.on_iu(&iu), Received::Wait);
        }
        assert_eq!((ch.credits(), ch.in_use()), (before, 0));
        ch.advance(ChannelState::Live);
        take_cmd(&mut ch);
    }

    #[test]
    fn a_going_channel_takes_nothing() {
        let mut ch = live(4, 8);
        ch.advance(ChannelState::Disconnecting);
        assert_eq!(ch.on_iu(&hex(READ10)), Received::Consumed);
        assert_eq!(ch.credits().held(), 4);
    }

    #[test]
    fn golden_read_becomes_a_command() {
        let mut ch = live(4, 8);
        let Received::Command(cmd) = ch.on_iu(&hex(READ10)) else { panic!() };
        assert_eq!((cmd.tag, cmd.lun), (Tag([5, 0, 1, 0, 0, 0, 0, 0]), 1 << 48));
        assert_eq!((cmd.cdb()[..2].to_vec(), cmd.cdb_len), (vec![0x28, 0], 16));
        assert_eq!((cmd.attr, cmd.too_long), (TaskAttr::Simple, false));
        assert_eq!((cmd.data_in.len(), cmd.data_out), (4096, DataDesc::None));
        assert_eq!(ch.find(cmd.tag), Some(cmd.ioctx));
        assert_eq!(ch.live().collect::<Vec<_>>(), [cmd.ioctx]);
    }

    #[test]
    fn long_cdbs_are_kept_to_32_bytes() {
        for (add, len) in [(0, 16), (4, 20), (16, 32), (20, 32), (252, 32)] {
            let mut iu = hex(READ10);
            (iu[5], iu[31]) = (0, add);
            iu.truncate(48);
            iu.extend((0..add).map(|i| i + 1));
            let Received::Command(cmd) = live(4, 8).on_iu(&iu) else { panic!() };
            assert_eq!(cmd.cdb().len(), len);
            let extra: Vec<u8> = (1..=add.min(16)).collect();
            assert_eq!(cmd.cdb()[16..], extra);
        }
    }

    #[test]
    fn a_short_cdb_after_a_long_one_holds_nothing_of_it() {
        let mut ch = live(4, 8);
        let mut iu = hex(READ10);
        (iu[5], iu[31]) = (0, 16);
        iu[48..].fill(0xEE);
        let Received::Command(long) = ch.on_iu(&iu) else { panic!() };
        good(&mut ch, long.ioctx);
        ch.on_sent(long.ioctx);
        let Received::Command(short) = ch.on_iu(&hex(READ10)) else { panic!() };
        assert_eq!((long.ioctx, short.cdb[16..].to_vec()), (short.ioctx, vec![0; 16]));
    }

    #[test]
    fn long_transfers_are_marked() {
        let mut iu = hex(READ10);
        iu[60..64].copy_from_slice(&((1_u32 << 20) + 1).to_be_bytes());
        let Received::Command(cmd) = live(4, 8).on_iu(&iu) else { panic!() };
        assert!(cmd.too_long);
    }

    #[test]
    fn golden_task_management_is_taken_and_answered() {
        let mut ch = live(4, 8);
        let Received::TaskMgmt { ioctx, lun, func, task_tag } = ch.on_iu(&hex(TSK_MGMT)) else {
            panic!()
        };
        assert_eq!((lun, func), (1 << 48, TmFunc::AbortTask));
        assert_eq!(task_tag, Tag([5, 0, 1, 0, 0, 0, 0, 0]));
        let mut b = [0xA5; 512];
        let n = ch.tsk_rsp(ioctx, RspCode::COMPLETE, &mut b);
        assert_eq!(b[..n], hex(RSP_TM));
    }

    #[test]
    fn golden_check_condition_is_sent() {
        let mut ch = live(4, 8);
        let id = take_cmd(&mut ch);
        let sense = &hex(RSP_SENSE)[36..];
        let mut b = [0xA5; 512];
        let n = ch.rsp(id, &CmdResult { status: 2, sense, ..CmdResult::default() }, &mut b);
        assert_eq!(b[..n], hex(RSP_SENSE));
    }

    #[test]
    fn sense_is_cut_to_max_ti_iu_len_and_to_the_buffer() {
        let mut ch = live(4, 8);
        let result = CmdResult { status: 2, sense: &[7; 1000], ..CmdResult::default() };
        let id = take_cmd(&mut ch);
        assert_eq!(ch.rsp(id, &result, &mut [0; 2000]), 512);
        let id = take_cmd(&mut ch);
        assert_eq!(ch.rsp(id, &result, &mut [0; 40]), 40);
    }

    #[test]
    fn solicited_notification_follows_the_wish_for_the_outcome() {
        for (wish, status, bit) in [(0, 0, 0), (2, 0, 1), (2, 2, 0), (4, 0, 0), (4, 2, 1)] {
            let mut ch = live(4, 8);
            let mut iu = hex(READ10);
            iu[1] = wish;
            let Received::Command(cmd) = ch.on_iu(&iu) else { panic!() };
            let mut b = [0; 64];
            ch.rsp(cmd.ioctx, &CmdResult { status, ..CmdResult::default() }, &mut b);
            assert_eq!(b[1], bit, "wish {wish} status {status}");
        }
    }

    #[test]
    fn short_ius_cut_the_channel() {
        let cut = |iu: &[u8]| live(4, 8).on_iu(iu);
        assert_eq!(cut(&[]), Received::Cut(CutReason::Empty));
        for (op, need) in [(0x01, 48), (0x02, 48), (0x41, 16), (0x42, 16)] {
            for n in 1..need {
                let mut iu = vec![0; n];
                iu[0] = op;
                let want = CutReason::Short { opcode: op, len: n as u32 };
                assert_eq!(cut(&iu), Received::Cut(want));
            }
        }
    }

    #[test]
    fn bad_descriptors_are_answered_not_cut() {
        let mut ch = live(4, 8);
        let mut iu = hex(READ10);
        iu[5] = 0x03;
        let Received::Malformed { ioctx } = ch.on_iu(&iu) else { panic!() };
        assert_eq!(ch.ioctx_state(ioctx), IoctxState::Active);
        assert_eq!(good(&mut ch, ioctx), 1);
    }

    #[test]
    fn one_ioctx_is_kept_for_task_management() {
        let mut ch = live(8, 3);
        let first = take_cmd(&mut ch);
        take_cmd(&mut ch);
        let before = ch.credits();
        assert_eq!(ch.on_iu(&hex(READ10)), Received::Wait);
        assert_eq!((ch.credits(), ch.in_use()), (before, 2));
        take_tm(&mut ch);
        assert_eq!(ch.on_iu(&hex(TSK_MGMT)), Received::Wait);
        good(&mut ch, first);
        assert_eq!(ch.on_iu(&hex(TSK_MGMT)), Received::Wait, "the send has not completed");
        ch.on_sent(first);
        assert_eq!(ch.on_iu(&hex(READ10)), Received::Wait);
        take_tm(&mut ch);
    }

    #[test]
    fn unknown_requests_are_owed_and_responses_cost_nothing() {
        let mut ch = live(4, 8);
        for op in [0x00, 0x04, 0x3F, 0x80] {
            assert_eq!(ch.on_iu(&[op]), Received::Consumed);
        }
        assert_eq!((ch.credits().held(), ch.credits().owed()), (0, 4));
        for op in [0x40, 0x7F, 0xC0, 0xC1, 0xFF, 0x41, 0x42] {
            assert_eq!(ch.on_iu(&[op; 16]), Received::Consumed);
        }
        assert_eq!((ch.credits().owed(), ch.in_use()), (4, 0));
    }

    #[test]
    fn logout_is_told_and_costs_no_credit_for_ever() {
        let mut ch = live(4, 8);
        assert_eq!(ch.on_iu(&[3; 16]), Received::Logout);
        assert_eq!(ch.on_iu(&[3]), Received::Logout);
        assert_eq!(ch.credits().owed(), 2);
    }

    #[test]
    fn too_many_requests_are_served_a_few_times_then_cut() {
        let mut ch = live(2, 64);
        let first = take_cmd(&mut ch);
        take_cmd(&mut ch);
        for i in 0..OVERRUNS_MAX {
            let id = take_cmd(&mut ch);
            assert_eq!(good(&mut ch, id), 0, "what came without credit brings none, {i}");
            ch.on_sent(id);
        }
        assert_eq!(ch.on_iu(&hex(READ10)), Received::Cut(CutReason::CreditOverrun));
        assert_eq!(ch.on_iu(&[0x30]), Received::Cut(CutReason::CreditOverrun));
        assert_eq!(ch.overruns(), u64::from(OVERRUNS_MAX) + 2);
        good(&mut ch, first);
        take_cmd(&mut ch); // with credit again
        take_cmd(&mut ch); // a single one without
        assert_eq!(ch.credits().held(), 0);
    }

    #[test]
    fn silently_finished_requests_are_returned_by_the_next_response() {
        let mut ch = live(8, 16);
        let ids: Vec<_> = (0..4).map(|_| take_cmd(&mut ch)).collect();
        for &id in &ids[..3] {
            ch.finish_silently(id);
        }
        assert_eq!((ch.credits().owed(), ch.in_use()), (3, 1));
        assert_eq!(good(&mut ch, ids[3]), 4);
        assert_eq!((ch.credits().held(), ch.credits().owed()), (8, 0));
    }

    #[test]
    fn an_abort_is_answered_with_the_credit_of_the_aborted_command() {
        let mut ch = live(8, 16);
        let cmd = take_cmd(&mut ch);
        let tm = take_tm(&mut ch);
        ch.finish_silently(cmd);
        let mut b = [0; 40];
        ch.tsk_rsp(tm, RspCode::COMPLETE, &mut b);
        assert_eq!(b[4..8], [0, 0, 0, 2]);
        assert_eq!(ch.credits().held(), 8);
    }

    #[test]
    fn an_unposted_response_gives_its_credits_back_to_the_owed() {
        let mut ch = live(8, 16);
        let (a, b) = (take_cmd(&mut ch), take_cmd(&mut ch));
        ch.finish_silently(a);
        assert_eq!(good(&mut ch, b), 2);
        ch.unpost(b);
        assert_eq!((ch.credits().held(), ch.credits().owed()), (6, 2));
        assert!(ch.is_whole());
    }

    #[test]
    fn find_means_only_unanswered_commands() {
        let mut ch = live(8, 16);
        let id = take_cmd(&mut ch);
        let tag = ch.tag(id);
        let tm = take_tm(&mut ch);
        assert_eq!(ch.find(ch.tag(tm)), None);
        assert_eq!(ch.find(tag), Some(id));
        good(&mut ch, id);
        assert_eq!(ch.find(tag), None);
        ch.on_sent(id);
        assert_eq!(ch.find(tag), None);
    }

    #[test]
    fn a_cred_req_is_due_when_nothing_is_in_flight_or_a_quarter_is_owed() {
        let mut ch = live(8, 16);
        assert_eq!(ch.cred_req(&mut [0; 16]), None, "nothing is owed");
        let ids: Vec<_> = (0..4).map(|_| take_cmd(&mut ch)).collect();
        ch.finish_silently(ids[0]);
        assert!(!ch.cred_req_due(), "a response will carry it");
        ch.finish_silently(ids[1]);
        assert!(ch.cred_req_due(), "a quarter of 8");
        let mut b = [0xA5; 16];
        assert_eq!(ch.cred_req(&mut b), Some(16));
        let req = wire::cred::Req::parse(&b).unwrap();
        assert_eq!((req.req_lim_delta, ch.credits().owed()), (2, 0));
        ch.finish_silently(ids[2]);
        ch.finish_silently(ids[3]);
        assert!(!ch.cred_req_due(), "one is outstanding");
        ch.on_iu(&hex(golden::CRED_RSP));
        assert!(!ch.cred_req_due(), "its buffer is still in use");
        assert!(!ch.is_whole());
        ch.on_cred_req_sent();
        assert!(ch.cred_req_due(), "nothing is in flight");
        assert!(ch.is_whole());
    }

    #[test]
    fn a_cred_req_waits_for_its_answer() {
        let mut ch = live(8, 16);
        ch.on_iu(&[0x30]);
        assert!(ch.cred_req(&mut [0; 16]).is_some());
        ch.on_cred_req_sent();
        ch.on_iu(&[0x30]);
        assert!(!ch.cred_req_due());
        ch.on_iu(&hex(golden::CRED_RSP));
        assert!(ch.cred_req_due());
    }

    #[test]
    fn an_unposted_cred_req_is_due_again() {
        let mut ch = live(8, 16);
        ch.on_iu(&[0x30]);
        assert!(ch.cred_req(&mut [0; 16]).is_some());
        ch.unpost_cred_req();
        assert!(ch.cred_req_due());
        ch.advance(ChannelState::Disconnecting);
        assert!(!ch.cred_req_due());
    }

    #[test]
    fn a_single_credit_owed_of_two_is_due_at_once() {
        let mut ch = live(2, 4);
        let cmd = take_cmd(&mut ch);
        ch.on_iu(&[0x30]);
        assert!(ch.cred_req_due());
        good(&mut ch, cmd);
    }

    /// Every call on an ioctx in every state: allowed or stopped, as the table says.
    #[test]
    fn every_call_in_every_ioctx_state_follows_the_table() {
        type Call = fn(&mut Channel, IoctxId);
        let calls: [(IoctxEvent, Call); 5] = [
            (IoctxEvent::Respond, |ch, id| {
                good(ch, id);
            }),
            (IoctxEvent::RespondTm, |ch, id| {
                ch.tsk_rsp(id, RspCode::COMPLETE, &mut [0; 40]);
            }),
            (IoctxEvent::Sent, |ch, id| ch.on_sent(id)),
            (IoctxEvent::Unpost, |ch, id| ch.unpost(id)),
            (IoctxEvent::Silent, |ch, id| ch.finish_silently(id)),
        ];
        for state in STATES {
            for (event, call) in calls {
                let mut ch = live(4, 8);
                let id = match state {
                    IoctxState::Free => IoctxId(0),
                    IoctxState::Mgmt => take_tm(&mut ch),
                    _ => take_cmd(&mut ch),
                };
                if state == IoctxState::RspPosted {
                    good(&mut ch, id);
                }
                assert_eq!(ch.ioctx_state(id), state);
                let (held, before) = (ch.credits(), state);
                let done = catch_unwind(AssertUnwindSafe(|| call(&mut ch, id)));
                let allowed = TABLE[state as usize][event as usize];
                assert_eq!(done.is_ok(), allowed.is_some(), "{state:?} {event:?}");
                assert_eq!(ch.ioctx_state(id), allowed.unwrap_or(before));
                if allowed.is_none() {
                    assert_eq!(ch.credits(), held, "a refused call changes nothing");
                }
            }
        }
    }

    #[test]
    fn sizes_stay_small() {
        assert!(size_of::<Command>() <= 128);
        assert!(size_of::<Received>() <= 136);
    }
}
