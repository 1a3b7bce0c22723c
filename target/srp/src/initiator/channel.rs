//! One channel of the initiator: slots, tags, credit (reference 1.15, 4.3).
//!
//! Owns: which requests are outstanding and what the target may be sent. Never does: I/O,
//! allocation after `new`.
//!
//! ```text
//!   Free --start_cmd--> Cmd --RSP | answered abort | forget--> Free
//!     `----start_tm---> Tm  --RSP | forget-------------------> Free
//! ```
//! A tag is the slot's index and the number of its uses, so a late response never hits a later
//! request. Invariants: a slot is on the free list iff it is `Free`; a command leaves one slot and
//! one credit for task management.

use super::build::{self, InBuf, OutBuf, Parts, StartError};
use super::login::Granted;
use crate::wire::cmd::TaskAttr;
use crate::wire::rsp::{Rsp, RspCode};
use crate::wire::tsk_mgmt::{self, TmFunc};
use crate::wire::{self, Opcode, WireError, aer, cred, logout};
use crate::{Residual, Tag};

/// Sizes of a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Outstanding requests; one of them is kept for task management.
    pub slots: u16,
}

/// A command's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done<'a> {
    /// What `start_cmd` was given.
    pub user: u64,
    /// The command's tag; free again.
    pub tag: Tag,
    /// SCSI status.
    pub status: u8,
    /// Response code, should the target send one with a command. Linux ignores it.
    pub rsp_code: Option<RspCode>,
    /// Sense data; empty if there is none.
    pub sense: &'a [u8],
    /// Residual of the data to the target.
    pub data_out: Residual,
    /// Residual of the data from the target.
    pub data_in: Residual,
}

/// Why an IU of the target is nonsense.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bogus {
    /// Too short, or lengths beyond its end.
    Iu(WireError),
    /// No IU that a target sends.
    Opcode(u8),
    /// A response to nothing that is outstanding.
    UnknownTag(Tag),
    /// The credit count would leave 0..2^31.
    Credit(i32),
}

/// What an IU of the target means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// A command ended.
    Done(Done<'a>),
    /// A task management request ended.
    TmDone {
        /// What `start_tm` was given.
        user: u64,
        /// Its tag; free again.
        tag: Tag,
        /// RSP_CODE; `None` if the target sent none (Linux takes that as failed).
        code: Option<RspCode>,
        /// `user` of the command that this ABORT TASK ended; its tag is free, nothing comes for it
        /// any more.
        aborted: Option<u64>,
    },
    /// Credit came; send the answer.
    CredReq {
        /// SRP_CRED_RSP to send.
        answer: [u8; cred::LEN],
        /// Credits that came.
        delta: i32,
    },
    /// An asynchronous event; send the answer.
    Aer {
        /// SRP_AER_RSP to send.
        answer: [u8; aer::RSP_LEN],
        /// Logical unit.
        lun: u64,
        /// Sense data.
        sense: &'a [u8],
    },
    /// The target logs out.
    Logout {
        /// Why.
        reason: logout::Reason,
    },
    /// The target is at fault; nothing changed but, for an unknown tag, the credit.
    Bogus(Bogus),
}

/// What a slot is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Free,
    Cmd,
    /// With the tag of the command to abort.
    Tm(Option<Tag>),
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    /// The caller's value.
    user: u64,
    /// Logical unit of the request.
    lun: u64,
    /// How often the slot was used: the upper part of its tag.
    uses: u32,
    /// What for.
    used: Use,
}

/// One channel.
#[derive(Debug)]
pub struct Channel {
    /// Requests that we may send; never negative.
    req_lim: i32,
    /// Where immediate data begins, if negotiated.
    imm_offset: Option<u16>,
    /// Longest IU we may send, bytes.
    it_iu_len: usize,
    /// Fixed length.
    slots: Box<[Slot]>,
    /// Indices of the free slots; never longer than `slots`.
    free: Vec<u16>,
}

impl Channel {
    /// A channel after login. Allocates its tables once.
    pub fn new(granted: &Granted, cfg: Config) -> Channel {
        assert!(cfg.slots >= 2, "one slot is kept for task management");
        let slot = Slot { user: 0, lun: 0, uses: 0, used: Use::Free };
        Channel {
            req_lim: i32::try_from(granted.credits()).expect("login_answer checked it"),
            imm_offset: granted.imm_offset(),
            it_iu_len: granted.it_iu_len() as usize,
            slots: vec![slot; usize::from(cfg.slots)].into_boxed_slice(),
            free: (0..cfg.slots).rev().collect(),
        }
    }

    /// Builds a SIMPLE command into `iu`: its tag and length. `user` comes back with its end. `lun`
    /// is the LUN's 8 bytes as a big-endian number.
    #[inline]
    pub fn start_cmd(
        &mut self,
        cdb: &[u8],
        lun: u64,
        data_out: OutBuf<'_>,
        data_in: InBuf<'_>,
        user: u64,
        iu: &mut [u8],
    ) -> Result<(Tag, usize), StartError> {
        self.start_cmd_with(TaskAttr::Simple, cdb, lun, data_out, data_in, user, iu)
    }

    /// The same with another task attribute.
    #[inline]
    #[allow(clippy::too_many_arguments)] // start_cmd and one more
    pub fn start_cmd_with(
        &mut self,
        attr: TaskAttr,
        cdb: &[u8],
        lun: u64,
        data_out: OutBuf<'_>,
        data_in: InBuf<'_>,
        user: u64,
        iu: &mut [u8],
    ) -> Result<(Tag, usize), StartError> {
        if self.req_lim < 2 {
            return Err(StartError::NoCredit);
        }
        if self.free.len() < 2 {
            return Err(StartError::NoSlot);
        }
        let tag = self.next_tag();
        let parts = Parts { tag, attr, lun, cdb, data_out, data_in };
        let len = build::cmd(&parts, self.imm_offset, self.it_iu_len, iu)?;
        self.take(Use::Cmd, lun, user);
        Ok((tag, len))
    }

    /// Builds a task management request into `iu`. For ABORT TASK use [`Channel::abort_task`]. For
    /// the rest the task tag is 0xFFFFFFFF, as Linux sends it.
    pub fn start_tm(
        &mut self,
        func: TmFunc,
        lun: u64,
        user: u64,
        iu: &mut [u8],
    ) -> Result<(Tag, usize), StartError> {
        self.tm(func, lun, None, user, iu)
    }

    /// Builds an ABORT TASK for an outstanding command. Its response ends the command, whatever it
    /// says.
    pub fn abort_task(
        &mut self,
        task: Tag,
        user: u64,
        iu: &mut [u8],
    ) -> Result<(Tag, usize), StartError> {
        let index = self.slot_of(task).ok_or(StartError::NoSuchTask)?;
        let slot = &self.slots[usize::from(index)];
        if slot.used != Use::Cmd {
            return Err(StartError::NoSuchTask);
        }
        self.tm(TmFunc::AbortTask, slot.lun, Some(task), user, iu)
    }

    fn tm(
        &mut self,
        func: TmFunc,
        lun: u64,
        task: Option<Tag>,
        user: u64,
        iu: &mut [u8],
    ) -> Result<(Tag, usize), StartError> {
        if self.req_lim < 1 {
            return Err(StartError::NoCredit);
        }
        if self.free.is_empty() {
            return Err(StartError::NoSlot);
        }
        let b = iu.first_chunk_mut().ok_or(StartError::TooLong)?;
        let tag = self.next_tag();
        let task_tag = task.unwrap_or(Tag(0xFFFF_FFFF_u64.to_le_bytes()));
        tsk_mgmt::Repr { sol_not: 0, tag, lun, func, task_tag }.emit(b);
        self.take(Use::Tm(task), lun, user);
        Ok((tag, tsk_mgmt::LEN))
    }

    /// Takes in one IU of the target: the bytes received, no more.
    #[inline]
    pub fn on_iu<'a>(&mut self, iu: &'a [u8]) -> Event<'a> {
        match iu.first() {
            Some(&op) if op == Opcode::RSP.0 => match Rsp::new_checked(iu) {
                Ok(rsp) => self.on_rsp(rsp),
                Err(e) => Event::Bogus(Bogus::Iu(e)),
            },
            Some(&op) => match self.on_request(Opcode(op), iu) {
                Ok(event) => event,
                Err(bogus) => Event::Bogus(bogus),
            },
            None => Event::Bogus(Bogus::Iu(WireError::Truncated { need: 1, got: 0 })),
        }
    }

    #[inline]
    fn on_rsp<'a>(&mut self, rsp: Rsp<'a>) -> Event<'a> {
        if let Err(bogus) = self.add_credit(rsp.req_lim_delta()) {
            return Event::Bogus(bogus);
        }
        let tag = rsp.tag();
        let Some(index) = self.slot_of(tag) else {
            return Event::Bogus(Bogus::UnknownTag(tag));
        };
        let slot = self.slots[usize::from(index)];
        self.put(index);
        if let Use::Tm(task) = slot.used {
            let aborted = task.and_then(|task| self.forget(task));
            return Event::TmDone { user: slot.user, tag, code: rsp.rsp_code(), aborted };
        }
        Event::Done(Done {
            user: slot.user,
            tag,
            status: rsp.status(),
            rsp_code: rsp.rsp_code(),
            sense: rsp.sense(),
            data_out: rsp.data_out(),
            data_in: rsp.data_in(),
        })
    }

    #[cold]
    fn on_request<'a>(&mut self, op: Opcode, iu: &'a [u8]) -> Result<Event<'a>, Bogus> {
        match op {
            Opcode::CRED_REQ => {
                let req = cred::Req::parse(iu).map_err(Bogus::Iu)?;
                self.add_credit(req.req_lim_delta)?;
                let mut answer = [0; cred::LEN];
                cred::Rsp { tag: req.tag }.emit(&mut answer);
                Ok(Event::CredReq { answer, delta: req.req_lim_delta })
            }
            Opcode::AER_REQ => {
                let req = aer::Req::parse(iu).map_err(Bogus::Iu)?;
                self.add_credit(req.req_lim_delta)?;
                let mut answer = [0; aer::RSP_LEN];
                aer::Rsp { tag: req.tag }.emit(&mut answer);
                Ok(Event::Aer { answer, lun: req.lun, sense: req.sense })
            }
            Opcode::T_LOGOUT => {
                let iu = logout::Target::parse(iu).map_err(Bogus::Iu)?;
                Ok(Event::Logout { reason: iu.reason })
            }
            wire::Opcode(other) => Err(Bogus::Opcode(other)),
        }
    }

    /// Ends an outstanding request without a response: after a LUN reset or a disconnect. Returns
    /// its `user`.
    pub fn forget(&mut self, tag: Tag) -> Option<u64> {
        let index = self.slot_of(tag)?;
        let user = self.slots[usize::from(index)].user;
        self.put(index);
        Some(user)
    }

    /// Any outstanding command, of one LU or of all: what to `forget` next after a reset or a
    /// disconnect.
    pub fn any_cmd(&self, lun: Option<u64>) -> Option<Tag> {
        let of_lun = |s: &Slot| s.used == Use::Cmd && lun.is_none_or(|lun| s.lun == lun);
        let index = self.slots.iter().position(of_lun)?;
        Some(tag_of(index as u16, self.slots[index].uses))
    }

    /// Credit: requests that may be sent.
    #[inline]
    pub fn req_lim(&self) -> u32 {
        self.req_lim as u32
    }

    /// Requests that are outstanding.
    #[inline]
    pub fn outstanding(&self) -> u32 {
        (self.slots.len() - self.free.len()) as u32
    }

    /// True when `start_cmd` would find credit and a slot.
    #[inline]
    pub fn can_start_cmd(&self) -> bool {
        self.req_lim >= 2 && self.free.len() >= 2
    }

    fn add_credit(&mut self, delta: i32) -> Result<(), Bogus> {
        match self.req_lim.checked_add(delta) {
            Some(sum) if sum >= 0 => {
                self.req_lim = sum;
                Ok(())
            }
            _ => Err(Bogus::Credit(delta)),
        }
    }

    /// The tag that `take` will give next.
    #[inline]
    fn next_tag(&self) -> Tag {
        let index = *self.free.last().expect("the caller saw a free slot");
        tag_of(index, self.slots[usize::from(index)].uses.wrapping_add(1))
    }

    #[inline]
    fn take(&mut self, used: Use, lun: u64, user: u64) {
        let index = self.free.pop().expect("the caller saw a free slot");
        let slot = &mut self.slots[usize::from(index)];
        assert!(slot.used == Use::Free, "a slot on the free list is free");
        *slot = Slot { user, lun, uses: slot.uses.wrapping_add(1), used };
        assert!(self.req_lim > 0, "a request costs a credit");
        self.req_lim -= 1;
    }

    #[inline]
    fn put(&mut self, index: u16) {
        let slot = &mut self.slots[usize::from(index)];
        assert!(slot.used != Use::Free, "a slot is freed once");
        slot.used = Use::Free;
        assert!(self.free.len() < self.slots.len());
        self.free.push(index);
    }

    /// The slot in use whose tag this is.
    #[inline]
    fn slot_of(&self, tag: Tag) -> Option<u16> {
        let raw = u64::from_le_bytes(tag.0);
        let index = raw as u16;
        let slot = self.slots.get(usize::from(index))?;
        (slot.used != Use::Free && tag_of(index, slot.uses) == tag).then_some(index)
    }
}

/// Index in the low 16 bits, uses above them. Little-endian, as on x86 Linux; the target must not
/// care.
#[inline]
fn tag_of(index: u16, uses: u32) -> Tag {
    Tag((u64::from(index) | u64::from(uses) << 16).to_le_bytes())
}

#[cfg(test)]
mod tests {
    use super::super::{MultiChannel, linux_login, login_answer};
    use super::*;
    use crate::PortId;
    use crate::wire::golden::{LOGIN_RSP, hex};
    use crate::wire::rsp::{Head, emit_cmd, emit_tm};

    const CDB: [u8; 6] = [0; 6];

    fn channel(credits: u8, slots: u16) -> Channel {
        let req = linux_login(PortId::default(), PortId::default(), MultiChannel::Single);
        let mut answer = hex(LOGIN_RSP);
        answer[7] = credits;
        Channel::new(&login_answer(&answer, &req).unwrap(), Config { slots })
    }

    fn start(ch: &mut Channel, user: u64) -> Result<Tag, StartError> {
        let mut iu = [0; 128];
        let r = ch.start_cmd(&CDB, 0, OutBuf::None, InBuf::None, user, &mut iu);
        r.map(|(tag, _)| tag)
    }

    fn good(tag: Tag, req_lim_delta: u32) -> [u8; 36] {
        let mut b = [0xA5; 36];
        let head = Head { tag, req_lim_delta, solicited: false };
        emit_cmd(&mut b, head, 0, Residual::None, Residual::None, &[]);
        b
    }

    #[test]
    fn a_command_leaves_one_credit_for_task_management() {
        let mut ch = channel(2, 8);
        let task = start(&mut ch, 1).unwrap();
        assert_eq!(start(&mut ch, 2), Err(StartError::NoCredit));
        assert!(ch.abort_task(task, 3, &mut [0; 48]).is_ok());
        assert_eq!(ch.start_tm(TmFunc::LunReset, 0, 4, &mut [0; 48]), Err(StartError::NoCredit));
        assert_eq!((ch.req_lim(), ch.outstanding()), (0, 2));
    }

    #[test]
    fn a_command_leaves_one_slot_for_task_management() {
        let mut ch = channel(8, 2);
        start(&mut ch, 1).unwrap();
        assert_eq!(start(&mut ch, 2), Err(StartError::NoSlot));
        assert!(ch.start_tm(TmFunc::LunReset, 0, 3, &mut [0; 48]).is_ok());
        assert_eq!(ch.start_tm(TmFunc::LunReset, 0, 4, &mut [0; 48]), Err(StartError::NoSlot));
    }

    #[test]
    fn a_failed_start_changes_nothing() {
        let mut ch = channel(8, 8);
        let r = ch.start_cmd(&CDB, 0, OutBuf::None, InBuf::None, 1, &mut [0; 47]);
        assert_eq!(r, Err(StartError::TooLong));
        assert_eq!(ch.start_tm(TmFunc::LunReset, 0, 1, &mut [0; 47]), Err(StartError::TooLong));
        assert_eq!((ch.req_lim(), ch.outstanding()), (8, 0));
    }

    #[test]
    fn a_response_ends_its_command_once() {
        let mut ch = channel(8, 8);
        let tag = start(&mut ch, 77).unwrap();
        let iu = good(tag, 1);
        assert!(matches!(ch.on_iu(&iu), Event::Done(Done { user: 77, status: 0, .. })));
        assert_eq!(ch.on_iu(&iu), Event::Bogus(Bogus::UnknownTag(tag)));
        let next = start(&mut ch, 78).unwrap();
        assert_ne!(next, tag);
        assert_eq!(ch.on_iu(&iu), Event::Bogus(Bogus::UnknownTag(tag)));
    }

    #[test]
    fn an_answered_abort_ends_the_command_whatever_it_says() {
        for code in [RspCode::COMPLETE, RspCode::FAILED, RspCode(0x77)] {
            let mut ch = channel(8, 8);
            let task = start(&mut ch, 1).unwrap();
            let (tm, _) = ch.abort_task(task, 2, &mut [0; 48]).unwrap();
            let mut b = [0; 40];
            emit_tm(&mut b, Head { tag: tm, req_lim_delta: 2, solicited: false }, code);
            let done = Event::TmDone { user: 2, tag: tm, code: Some(code), aborted: Some(1) };
            assert_eq!(ch.on_iu(&b), done);
            assert_eq!((ch.req_lim(), ch.outstanding()), (8, 0));
            let mut iu = [0; 48];
            assert_eq!(ch.abort_task(task, 3, &mut iu), Err(StartError::NoSuchTask));
        }
    }

    #[test]
    fn requests_of_the_target_are_answered() {
        let mut ch = channel(8, 8);
        let mut b = [0; 16];
        let tag = Tag(*b"usurp\0\0\x01");
        cred::Req { req_lim_delta: 3, tag, solicited: false }.emit(&mut b);
        let Event::CredReq { answer, delta: 3 } = ch.on_iu(&b) else { panic!() };
        assert_eq!(cred::Rsp::parse(&answer), Ok(cred::Rsp { tag }));
        assert_eq!(ch.req_lim(), 11);
        let mut b = [0; 40];
        let n =
            aer::Req { req_lim_delta: 0, tag, solicited: false, lun: 9, sense: &[1] }.emit(&mut b);
        let Event::Aer { answer, lun: 9, sense: [1] } = ch.on_iu(&b[..n]) else { panic!() };
        assert_eq!(aer::Rsp::parse(&answer), Ok(aer::Rsp { tag }));
        let mut b = [0; 16];
        let reason = logout::Reason(99);
        logout::Target { reason, tag, solicited: false }.emit(&mut b);
        assert_eq!(ch.on_iu(&b), Event::Logout { reason });
    }

    #[test]
    fn absurd_credit_is_bogus() {
        let mut ch = channel(8, 8);
        let tag = start(&mut ch, 1).unwrap();
        for delta in [i32::MAX, -8, i32::MIN] {
            let iu = good(tag, delta as u32);
            assert_eq!(ch.on_iu(&iu), Event::Bogus(Bogus::Credit(delta)));
        }
        assert_eq!((ch.req_lim(), ch.outstanding()), (7, 1));
    }

    #[test]
    fn foreign_and_short_ius_are_bogus() {
        let mut ch = channel(8, 8);
        for op in [0x00, 0x01, 0x02, 0x41, 0xC0, 0xC2, 0xFF] {
            assert_eq!(ch.on_iu(&[op; 64]), Event::Bogus(Bogus::Opcode(op)));
        }
        for op in [0x80, 0x81, 0x82, 0xC1] {
            assert!(matches!(ch.on_iu(&[op; 15]), Event::Bogus(Bogus::Iu(_))));
        }
        assert!(matches!(ch.on_iu(&[]), Event::Bogus(Bogus::Iu(_))));
    }

    #[test]
    fn after_a_reset_commands_of_the_lun_are_forgotten() {
        let mut ch = channel(8, 8);
        for lun in [1, 2, 1] {
            ch.start_cmd(&CDB, lun, OutBuf::None, InBuf::None, lun, &mut [0; 64]).unwrap();
        }
        while let Some(tag) = ch.any_cmd(Some(1)) {
            assert_eq!(ch.forget(tag), Some(1));
        }
        assert_eq!(ch.outstanding(), 1);
        let last = ch.any_cmd(None).unwrap();
        assert_eq!(ch.forget(last), Some(2));
        assert_eq!(ch.any_cmd(None), None);
    }
}
