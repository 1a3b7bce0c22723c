//! The target's side of login: checks a request in the order of reference table 2.4 (column "new
//! target") and makes the answer.
//!
//! Owns: what a well-formed, acceptable login is. Never decides: ports that are disabled, names
//! (ACL), nexuses and resources; for those the caller turns the accepted login down with
//! [`LoginAccepted::reject`].
//!
//! ```text
//!   private data --check--> LoginAccepted --(caller: ACL, channels, memory)--> rsp(result) -> REP
//!                     `---> LoginRejected <------------- reject(reason) <-------'  emit() -> REJ
//! ```
//! Invariant: a `LoginAccepted` comes only from [`check`], so whoever holds one holds checked
//! values.

use crate::wire::{
    self, BUF_FMT_DIRECT, BUF_FMT_INDIRECT, WireError, login_rej, login_req, login_rsp,
};
use crate::{PortId, Tag};

/// Which connection manager brought the private data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// 64 bytes, native IB/CM or AF_IB.
    IbCm64,
    /// 56 bytes, RDMA/CM over IP addresses.
    RdmaCm56,
}

/// Smallest initiator-to-target IU an initiator may ask for (SRP r16a; reference 1.13).
pub const IT_IU_LEN_MIN: u32 = 64;
/// Smallest target-to-initiator IU length a target may state.
pub const TI_IU_LEN_MIN: u32 = 56;
/// Formats this target supports.
pub const BUF_FMT: u16 = BUF_FMT_DIRECT | BUF_FMT_INDIRECT;
/// Room for immediate data that makes it worth accepting.
const IMM_ROOM_MIN: u32 = 512;

/// What this target grants. Every value is the same for all logins of one target: a *re*login must
/// never be told a larger `max_ti_iu_len` than before, as Linux keeps its old receive buffers
/// (reference 2.3, known-bugs B3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// The only target port identifier that is served.
    pub target_port_id: PortId,
    /// Largest initiator-to-target IU, bytes; at least 8260 for a default Linux initiator.
    pub max_it_iu_len: u32,
    /// Largest target-to-initiator IU, bytes; at least 56.
    pub max_ti_iu_len: u32,
    /// Initial credit, requests; at least 2 (Linux computes can_queue = credits - 1).
    pub credits: u32,
    /// Accept immediate data from those who ask.
    pub imm_data: bool,
}

impl Policy {
    /// The usual values: LIO's 8276, 512 bytes to the initiator, 128 credits, immediate data.
    pub const fn new(target_port_id: PortId) -> Policy {
        Policy {
            target_port_id,
            max_it_iu_len: 8276,
            max_ti_iu_len: 512,
            credits: 128,
            imm_data: true,
        }
    }
}

/// MULTI-CHANNEL ACTION.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MultiChannel {
    /// End all other channels of this nexus.
    Single,
    /// Keep them.
    Multi,
}

/// MULTI-CHANNEL RESULT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MultiChannelResult {
    /// There were no other channels.
    NoChannels,
    /// Other channels were ended.
    Terminated,
    /// Other channels live on.
    Maintained,
}

impl MultiChannelResult {
    /// Bits 1:0 of rsp_flags.
    pub const fn bits(self) -> u8 {
        match self {
            MultiChannelResult::NoChannels => 0,
            MultiChannelResult::Terminated => 1,
            MultiChannelResult::Maintained => 2,
        }
    }

    /// Reads bits 1:0 of rsp_flags; 3 is reserved.
    pub const fn from_bits(flags: u8) -> Option<MultiChannelResult> {
        match flags & login_rsp::FLAG_RESULT_MASK {
            0 => Some(MultiChannelResult::NoChannels),
            1 => Some(MultiChannelResult::Terminated),
            2 => Some(MultiChannelResult::Maintained),
            _ => None,
        }
    }
}

/// Reasons of SRP_LOGIN_REJ (reference 1.5). There is no 0: it must never be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RejectReason {
    /// 0x00010000: unable to establish the channel, no reason given.
    Unspecified,
    /// 0x00010001: insufficient channel resources; also for a disabled port.
    NoResources,
    /// 0x00010002: requested initiator-to-target IU length too large.
    IuTooLong,
    /// 0x00010003: unable to associate the channel with the I_T nexus: unknown port id, no ACL.
    NoNexus,
    /// 0x00010004: unsupported data-buffer descriptor format.
    BadFormat,
    /// 0x00010005: no support for multiple channels per nexus.
    NoMultiChannel,
    /// 0x00010006: channel limit reached for this initiator.
    ChannelLimit,
}

impl RejectReason {
    /// Every reason, in the order of its code.
    pub const ALL: [RejectReason; 7] = [
        RejectReason::Unspecified,
        RejectReason::NoResources,
        RejectReason::IuTooLong,
        RejectReason::NoNexus,
        RejectReason::BadFormat,
        RejectReason::NoMultiChannel,
        RejectReason::ChannelLimit,
    ];

    /// The wire value.
    pub const fn code(self) -> u32 {
        0x0001_0000 + self as u32
    }

    /// The reason of a wire value, if it is one.
    pub fn from_code(code: u32) -> Option<RejectReason> {
        RejectReason::ALL.into_iter().find(|r| r.code() == code)
    }
}

/// A login request that passed every check of [`check`]. Holds what was agreed; cannot be built
/// otherwise.
#[derive(Clone, Debug)]
pub struct LoginAccepted {
    /// The request.
    req: login_req::Repr,
    /// Bits 1:0 of req_flags, checked.
    action: MultiChannel,
    /// Where immediate data begins, when it is accepted.
    imm_offset: Option<u32>,
    /// What the request was checked against, and what the answer says.
    policy: Policy,
}

/// A login that is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoginRejected {
    /// Goes over the wire.
    pub reason: RejectReason,
    /// Goes into the log.
    pub why: &'static str,
    /// Echo; zero when the request was too short to hold one.
    pub tag: Tag,
}

impl LoginRejected {
    /// A refusal for a reason of the caller's.
    pub fn new(reason: RejectReason, why: &'static str, tag: Tag) -> LoginRejected {
        LoginRejected { reason, why, tag }
    }

    /// The IU, for the private data of a CM REJ with reason 28.
    pub fn emit(&self) -> [u8; login_rej::LEN] {
        let mut b = [0; login_rej::LEN];
        let repr = login_rej::Repr { reason: self.reason.code(), tag: self.tag, buf_fmt: BUF_FMT };
        repr.emit(&mut b);
        b
    }
}

impl core::fmt::Display for LoginRejected {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "login rejected, reason 0x{:08x}: {}", self.reason.code(), self.why)
    }
}

impl std::error::Error for LoginRejected {}

/// Checks the private data of a connection request.
pub fn check(
    format: Format,
    private_data: &[u8],
    policy: &Policy,
) -> Result<LoginAccepted, LoginRejected> {
    assert!(policy.credits >= 2, "an initiator with fewer than 2 credits can send no command");
    assert!(policy.max_ti_iu_len >= TI_IU_LEN_MIN);
    assert!(policy.max_it_iu_len >= IT_IU_LEN_MIN);
    let req = match format {
        Format::IbCm64 => login_req::Repr::parse(private_data),
        Format::RdmaCm56 => login_req::Repr::parse_cm(private_data),
    }
    .map_err(|e| {
        let why = match e {
            WireError::Opcode(_) => "opcode is not LOGIN_REQ",
            _ => "private data too short",
        };
        LoginRejected::new(RejectReason::Unspecified, why, tag_of(format, private_data))
    })?;
    let refuse = |reason, why| Err(LoginRejected::new(reason, why, req.tag));
    if req.req_it_iu_len > policy.max_it_iu_len {
        return refuse(RejectReason::IuTooLong, "requested IU length too large");
    }
    if req.req_it_iu_len < IT_IU_LEN_MIN {
        return refuse(RejectReason::Unspecified, "requested IU length below 64");
    }
    if req.t_port_id != policy.target_port_id {
        return refuse(RejectReason::NoNexus, "unknown target port identifier");
    }
    if req.req_buf_fmt & !BUF_FMT != 0 {
        return refuse(RejectReason::BadFormat, "unsupported data-buffer format");
    }
    let action = match req.req_flags & login_req::FLAG_ACTION_MASK {
        0 => MultiChannel::Single,
        1 => MultiChannel::Multi,
        _ => return refuse(RejectReason::Unspecified, "reserved multi-channel action"),
    };
    Ok(LoginAccepted { req, action, imm_offset: imm_offset(&req, policy), policy: *policy })
}

/// Immediate data is accepted iff it was asked for and fits; else the login goes on without
/// (reference 2.6).
fn imm_offset(req: &login_req::Repr, policy: &Policy) -> Option<u32> {
    let asked = policy.imm_data && req.req_flags & login_req::FLAG_IMMED != 0;
    let offset = u32::from(req.imm_data_offset);
    let fits = offset >= wire::cmd::IMM_OFFSET_MIN as u32
        && offset.is_multiple_of(4)
        && offset + IMM_ROOM_MIN <= policy.max_it_iu_len;
    (asked && fits).then_some(offset)
}

/// The tag of a request that may be too short or no request at all.
fn tag_of(format: Format, private_data: &[u8]) -> Tag {
    let at = match format {
        Format::IbCm64 => 8,
        Format::RdmaCm56 => 0,
    };
    let bytes = private_data.get(at..).and_then(|rest| rest.first_chunk::<8>());
    bytes.copied().map(Tag).unwrap_or_default()
}

impl LoginAccepted {
    /// Who logs in.
    pub fn i_port_id(&self) -> PortId {
        self.req.i_port_id
    }
    /// Where to.
    pub fn t_port_id(&self) -> PortId {
        self.req.t_port_id
    }
    /// What shall become of the nexus' other channels.
    pub fn action(&self) -> MultiChannel {
        self.action
    }
    /// Where immediate data begins in an IU; `None`: none is accepted.
    pub fn imm_offset(&self) -> Option<u32> {
        self.imm_offset
    }
    /// The request's tag.
    pub fn tag(&self) -> Tag {
        self.req.tag
    }
    /// Largest IU the initiator will send, bytes.
    pub fn req_it_iu_len(&self) -> u32 {
        self.req.req_it_iu_len
    }
    /// Largest IU the target accepts, bytes: the size of a receive buffer.
    pub fn max_it_iu_len(&self) -> u32 {
        self.policy.max_it_iu_len
    }
    /// Largest IU the target sends, bytes.
    pub fn max_ti_iu_len(&self) -> u32 {
        self.policy.max_ti_iu_len
    }
    /// Initial credit, requests.
    pub fn credits(&self) -> u32 {
        self.policy.credits
    }

    /// The answer, for the private data of the CM REP.
    pub fn rsp(&self, result: MultiChannelResult) -> [u8; login_rsp::LEN] {
        let immed = if self.imm_offset.is_some() { login_rsp::FLAG_IMMED } else { 0 };
        let mut b = [0; login_rsp::LEN];
        let repr = login_rsp::Repr {
            req_lim_delta: self.policy.credits,
            tag: self.req.tag,
            max_it_iu_len: self.policy.max_it_iu_len,
            max_ti_iu_len: self.policy.max_ti_iu_len,
            buf_fmt: BUF_FMT,
            rsp_flags: result.bits() | immed,
        };
        repr.emit(&mut b);
        b
    }

    /// Turns it down after all: no ACL, a disabled port, no memory, too many channels.
    pub fn reject(&self, reason: RejectReason, why: &'static str) -> LoginRejected {
        LoginRejected::new(reason, why, self.req.tag)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::golden::{LOGIN_REJ, LOGIN_REQ, LOGIN_REQ_CM, LOGIN_RSP, hex};

    fn policy() -> Policy {
        Policy {
            max_ti_iu_len: 8260, // as in the golden LOGIN_RSP
            ..Policy::new(PortId::from_halves(0x0002_c903_00a1_b2c4, 0x0002_c903_00a1_b2c4))
        }
    }

    /// The golden request with `bytes` at `at`.
    fn changed(at: usize, bytes: &[u8]) -> Result<LoginAccepted, LoginRejected> {
        let mut b = hex(LOGIN_REQ);
        b[at..at + bytes.len()].copy_from_slice(bytes);
        check(Format::IbCm64, &b, &policy())
    }

    fn reason(r: Result<LoginAccepted, LoginRejected>) -> RejectReason {
        r.unwrap_err().reason
    }

    #[test]
    fn golden_logins_are_accepted_and_answered() {
        for (format, text) in [(Format::IbCm64, LOGIN_REQ), (Format::RdmaCm56, LOGIN_REQ_CM)] {
            let ok = check(format, &hex(text), &policy()).unwrap();
            assert_eq!(ok.i_port_id(), PortId::from_halves(0, 0x5054_00ff_fe4a_0b7b));
            assert_eq!((ok.action(), ok.imm_offset()), (MultiChannel::Single, Some(68)));
            assert_eq!((ok.req_it_iu_len(), ok.t_port_id()), (8260, policy().target_port_id));
            assert_eq!(ok.rsp(MultiChannelResult::NoChannels), hex(LOGIN_RSP)[..]);
        }
    }

    #[test]
    fn native_private_data_is_padded_to_92_bytes() {
        let mut b = hex(LOGIN_REQ);
        b.resize(92, 0);
        assert!(check(Format::IbCm64, &b, &policy()).is_ok());
    }

    #[test]
    fn result_and_flags_are_the_only_bits_set() {
        let ok = changed(26, &[0x01]).unwrap();
        let rsp = ok.rsp(MultiChannelResult::Maintained);
        assert_eq!((rsp[26], &rsp[27..]), (0x02, &[0; 25][..]));
        assert_eq!(ok.rsp(MultiChannelResult::Terminated)[26], 0x01);
    }

    #[test]
    fn every_truncation_is_rejected() {
        for (format, text) in [(Format::IbCm64, LOGIN_REQ), (Format::RdmaCm56, LOGIN_REQ_CM)] {
            let bytes = hex(text);
            for n in 0..bytes.len() {
                let r = check(format, &bytes[..n], &policy());
                assert_eq!(reason(r), RejectReason::Unspecified);
            }
        }
    }

    #[test]
    fn a_wrong_opcode_is_rejected_with_its_tag() {
        let mut b = hex(LOGIN_REQ);
        b[0] = 0x02;
        b[8..16].copy_from_slice(b"01234567");
        let e = check(Format::IbCm64, &b, &policy()).unwrap_err();
        assert_eq!((e.reason, e.tag), (RejectReason::Unspecified, Tag(*b"01234567")));
    }

    #[test]
    fn iu_length_limits_have_their_reasons() {
        assert!(changed(16, &8276_u32.to_be_bytes()).is_ok());
        let r = changed(16, &8277_u32.to_be_bytes());
        assert_eq!(r.clone().unwrap_err().emit(), hex(LOGIN_REJ)[..]);
        assert_eq!(reason(r), RejectReason::IuTooLong);
        assert_eq!(reason(changed(16, &[0xFF; 4])), RejectReason::IuTooLong);
        assert!(changed(16, &64_u32.to_be_bytes()).is_ok());
        assert_eq!(reason(changed(16, &63_u32.to_be_bytes())), RejectReason::Unspecified);
        assert_eq!(reason(changed(16, &[0; 4])), RejectReason::Unspecified);
    }

    #[test]
    fn ipxe_asks_for_80_bytes_and_direct_only() {
        let mut b = hex(LOGIN_REQ);
        b[16..20].copy_from_slice(&80_u32.to_be_bytes());
        b[24..31].copy_from_slice(&[0, 2, 0, 0, 0, 0, 0]);
        let ok = check(Format::IbCm64, &b, &policy()).unwrap();
        assert_eq!((ok.imm_offset(), ok.req_it_iu_len()), (None, 80));
        assert_eq!(ok.rsp(MultiChannelResult::NoChannels)[26], 0);
    }

    #[test]
    fn an_unknown_target_port_is_no_nexus() {
        assert_eq!(reason(changed(63, &[0])), RejectReason::NoNexus);
        assert_eq!(reason(changed(48, &[1])), RejectReason::NoNexus);
    }

    #[test]
    fn unknown_formats_are_rejected() {
        for bits in [0x0001_u16, 0x0008, 0x8006] {
            assert_eq!(reason(changed(24, &bits.to_be_bytes())), RejectReason::BadFormat);
        }
        assert!(changed(24, &[0, 4]).is_ok());
    }

    #[test]
    fn reserved_actions_are_rejected() {
        assert_eq!(changed(26, &[0x81]).unwrap().action(), MultiChannel::Multi);
        assert_eq!(reason(changed(26, &[0x82])), RejectReason::Unspecified);
        assert_eq!(reason(changed(26, &[0x03])), RejectReason::Unspecified);
    }

    #[test]
    fn checks_come_in_the_order_of_table_2_4() {
        let mut b = hex(LOGIN_REQ);
        b[26] = 0x83; // reserved action
        b[24] = 0x80; // bad format
        let now = |b: &[u8]| reason(check(Format::IbCm64, b, &policy()));
        assert_eq!(now(&b), RejectReason::BadFormat);
        b[50] = 0; // wrong port
        assert_eq!(now(&b), RejectReason::NoNexus);
        b[16..20].copy_from_slice(&[0; 4]); // too short
        assert_eq!(now(&b), RejectReason::Unspecified);
        b[16..20].copy_from_slice(&[1; 4]); // too long
        assert_eq!(now(&b), RejectReason::IuTooLong);
        b[0] = 9; // no login
        assert_eq!(now(&b), RejectReason::Unspecified);
    }

    #[test]
    fn unsuitable_immediate_data_is_not_granted_but_no_reason_to_reject() {
        let offset = |v: u16| changed(28, &v.to_be_bytes()).unwrap().imm_offset();
        assert_eq!(offset(52), Some(52));
        assert_eq!(offset(8276 - 512), Some(7764));
        for v in [0, 48, 51, 53, 54, 8276 - 511, 8276 - 508, 0xFFFF, 0xFFFC] {
            assert_eq!(offset(v), None, "{v}");
        }
        assert_eq!(changed(26, &[0x00]).unwrap().imm_offset(), None);
        let no = Policy { imm_data: false, ..policy() };
        let ok = check(Format::IbCm64, &hex(LOGIN_REQ), &no).unwrap();
        assert_eq!(ok.rsp(MultiChannelResult::NoChannels)[26], 0);
    }

    #[test]
    fn reasons_have_the_codes_of_1_5_and_none_is_0() {
        for (i, r) in RejectReason::ALL.into_iter().enumerate() {
            assert_eq!(r.code(), 0x0001_0000 + i as u32);
            assert_eq!(RejectReason::from_code(r.code()), Some(r));
        }
        assert_eq!(RejectReason::from_code(0), None);
        assert_eq!(RejectReason::from_code(0x0001_0007), None);
    }

    #[test]
    fn the_caller_can_turn_an_accepted_login_down() {
        let ok = changed(8, b"taggggg!").unwrap();
        let rej = ok.reject(RejectReason::ChannelLimit, "too many channels").emit();
        assert_eq!(rej[4..8], [0, 1, 0, 6]);
        assert_eq!(rej[8..16], *b"taggggg!");
    }
}
