//! The initiator's side of login: builds both forms of the request, reads the answer (reference
//! 2.2, 2.3).
//!
//! Invariant: a [`Granted`] comes only from [`login_answer`], with values that a channel can work
//! with.

use core::fmt;
use core::ops::Deref;

use crate::login::{
    BUF_FMT, Format, MultiChannel, MultiChannelResult, RejectReason, TI_IU_LEN_MIN,
};
use crate::wire::login_req::{CM_LEN, FLAG_IMMED, LEN, Repr};
use crate::wire::{Opcode, WireError, login_rej, login_rsp};
use crate::{PortId, Tag};

/// The bytes of a login request: 64 or 56.
#[derive(Clone, Copy, Debug)]
pub struct LoginIu {
    /// The first `len` bytes count.
    bytes: [u8; LEN],
    /// 64 or 56.
    len: usize,
}

impl Deref for LoginIu {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// What a default Linux initiator asks for: IUs of 8260 bytes, both formats, immediate data at 68.
pub fn linux_login(i_port_id: PortId, t_port_id: PortId, action: MultiChannel) -> Repr {
    let multi = match action {
        MultiChannel::Single => 0,
        MultiChannel::Multi => 1,
    };
    Repr {
        tag: Tag::default(),
        req_it_iu_len: 8260,
        req_buf_fmt: BUF_FMT,
        req_flags: FLAG_IMMED | multi,
        imm_data_offset: 68,
        i_port_id,
        t_port_id,
    }
}

/// The request in the form that the connection manager wants.
pub fn login_req(format: Format, req: &Repr) -> LoginIu {
    let mut iu = LoginIu { bytes: [0; LEN], len: LEN };
    match format {
        Format::IbCm64 => req.emit(&mut iu.bytes),
        Format::RdmaCm56 => {
            iu.len = CM_LEN;
            req.emit_cm(iu.bytes.first_chunk_mut().expect("56 < 64"));
        }
    }
    iu
}

/// What the target granted. Cannot be built otherwise than by [`login_answer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Granted {
    /// The answer.
    rsp: login_rsp::Repr,
    /// Longest IU we send: what we asked for, bytes.
    it_iu_len: u32,
    /// Where immediate data begins, if we asked and the target accepts.
    imm_offset: Option<u16>,
}

impl Granted {
    /// Initial credit, requests; at least 2.
    pub fn credits(&self) -> u32 {
        self.rsp.req_lim_delta
    }
    /// Longest IU we may send, bytes.
    pub fn it_iu_len(&self) -> u32 {
        self.it_iu_len
    }
    /// Longest IU the target accepts, bytes.
    pub fn max_it_iu_len(&self) -> u32 {
        self.rsp.max_it_iu_len
    }
    /// Longest IU the target sends, bytes: the size of our receive buffers.
    pub fn max_ti_iu_len(&self) -> u32 {
        self.rsp.max_ti_iu_len
    }
    /// Where immediate data begins, if it is accepted.
    pub fn imm_offset(&self) -> Option<u16> {
        self.imm_offset
    }
    /// What became of the nexus' other channels; `None` for the reserved value.
    pub fn result(&self) -> Option<MultiChannelResult> {
        MultiChannelResult::from_bits(self.rsp.rsp_flags)
    }
}

/// Why there is no channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoginError {
    /// The target refused.
    Rejected {
        /// The reason as it came.
        code: u32,
        /// Its meaning, if the code is known.
        reason: Option<RejectReason>,
    },
    /// The bytes are no login answer.
    Garbage(WireError),
    /// The answer echoes another tag than ours.
    WrongTag(Tag),
    /// The target grants too little, or less than it must.
    Unusable(&'static str),
}

impl fmt::Display for LoginError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LoginError::Rejected { code, reason: Some(r) } => {
                write!(f, "login rejected, reason 0x{code:08x} ({r:?})")
            }
            LoginError::Rejected { code, reason: None } => {
                write!(f, "login rejected, unknown reason 0x{code:08x}")
            }
            LoginError::Garbage(e) => write!(f, "no login answer: {e}"),
            LoginError::WrongTag(tag) => write!(f, "login answer with foreign tag {tag}"),
            LoginError::Unusable(why) => write!(f, "unusable login answer: {why}"),
        }
    }
}

impl std::error::Error for LoginError {}

/// Reads the private data of a CM REP or REJ.
pub fn login_answer(private_data: &[u8], req: &Repr) -> Result<Granted, LoginError> {
    if private_data.first() == Some(&Opcode::LOGIN_REJ.0) {
        let rej = login_rej::Repr::parse(private_data).map_err(LoginError::Garbage)?;
        let reason = RejectReason::from_code(rej.reason);
        return Err(LoginError::Rejected { code: rej.reason, reason });
    }
    let rsp = login_rsp::Repr::parse(private_data).map_err(LoginError::Garbage)?;
    if rsp.tag != req.tag {
        return Err(LoginError::WrongTag(rsp.tag));
    }
    if rsp.req_lim_delta < 2 {
        return Err(LoginError::Unusable("fewer than 2 credits"));
    }
    if i32::try_from(rsp.req_lim_delta).is_err() {
        return Err(LoginError::Unusable("more credits than a signed 32-bit count holds"));
    }
    if rsp.max_it_iu_len < req.req_it_iu_len {
        return Err(LoginError::Unusable("max_it_iu_len below what was asked for"));
    }
    if rsp.max_ti_iu_len < TI_IU_LEN_MIN {
        return Err(LoginError::Unusable("max_ti_iu_len below 56"));
    }
    let asked = req.req_flags & FLAG_IMMED != 0;
    let granted = rsp.rsp_flags & login_rsp::FLAG_IMMED != 0;
    let imm_offset = (asked && granted).then_some(req.imm_data_offset);
    Ok(Granted { rsp, it_iu_len: req.req_it_iu_len, imm_offset })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::golden::{LOGIN_REJ, LOGIN_REQ, LOGIN_REQ_CM, LOGIN_RSP, hex};

    fn req() -> Repr {
        let i = PortId::from_halves(0, 0x5054_00ff_fe4a_0b7b);
        let t = PortId::from_halves(0x0002_c903_00a1_b2c4, 0x0002_c903_00a1_b2c4);
        linux_login(i, t, MultiChannel::Single)
    }

    #[test]
    fn linux_login_is_the_golden_request_in_both_forms() {
        assert_eq!(login_req(Format::IbCm64, &req())[..], hex(LOGIN_REQ));
        assert_eq!(login_req(Format::RdmaCm56, &req())[..], hex(LOGIN_REQ_CM));
    }

    #[test]
    fn golden_answer_is_granted() {
        let g = login_answer(&hex(LOGIN_RSP), &req()).unwrap();
        assert_eq!((g.credits(), g.max_it_iu_len(), g.max_ti_iu_len()), (128, 8276, 8260));
        assert_eq!((g.imm_offset(), g.it_iu_len()), (Some(68), 8260));
        assert_eq!(g.result(), Some(MultiChannelResult::NoChannels));
    }

    #[test]
    fn golden_reject_is_an_error_with_its_reason() {
        let e = login_answer(&hex(LOGIN_REJ), &req()).unwrap_err();
        let reason = Some(RejectReason::IuTooLong);
        assert_eq!(e, LoginError::Rejected { code: 0x0001_0002, reason });
        assert_eq!(e.to_string(), "login rejected, reason 0x00010002 (IuTooLong)");
    }

    #[test]
    fn immediate_data_needs_asking() {
        let r = Repr { req_flags: 0, ..req() };
        assert_eq!(login_answer(&hex(LOGIN_RSP), &r).unwrap().imm_offset(), None);
    }

    #[test]
    fn bad_answers_are_refused() {
        let with = |at: usize, bytes: &[u8]| {
            let mut b = hex(LOGIN_RSP);
            b[at..at + bytes.len()].copy_from_slice(bytes);
            login_answer(&b, &req())
        };
        assert!(matches!(with(4, &[0, 0, 0, 1]), Err(LoginError::Unusable(_))));
        assert!(matches!(with(4, &[0x80, 0, 0, 0]), Err(LoginError::Unusable(_))));
        assert!(matches!(with(16, &[0, 0, 0x20, 0x43]), Err(LoginError::Unusable(_))));
        assert!(matches!(with(20, &[0, 0, 0, 55]), Err(LoginError::Unusable(_))));
        assert!(matches!(with(8, &[1]), Err(LoginError::WrongTag(_))));
        assert!(matches!(with(0, &[0]), Err(LoginError::Garbage(_))));
        for n in 0..52 {
            assert!(login_answer(&hex(LOGIN_RSP)[..n], &req()).is_err());
        }
        for n in 0..32 {
            let e = login_answer(&hex(LOGIN_REJ)[..n], &req());
            assert!(matches!(e, Err(LoginError::Garbage(_))));
        }
    }
}
