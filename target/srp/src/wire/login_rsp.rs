//! SRP_LOGIN_RSP, 52 bytes in CM REP private data (reference 1.4).
//!
//! ```text
//!   0 opcode  4 req_lim_delta 4  8 tag 8  16 max_it_iu_len 4  20 max_ti_iu_len 4  24 buf_fmt 2
//!  26 rsp_flags  27 reserved 25
//! ```
//! Reserved bytes and unused flags are zero: garbage there was once taken for IMMED_SUPP
//! (known-bugs B1).

use core::borrow::{Borrow, BorrowMut};

use super::{Opcode, WireError, be16, be32, bytes_at, expect_opcode, head, put_at};
use crate::Tag;

mod at {
    pub const OPCODE: usize = 0;
    pub const REQ_LIM_DELTA: usize = 4;
    pub const TAG: usize = 8;
    pub const MAX_IT_IU_LEN: usize = 16;
    pub const MAX_TI_IU_LEN: usize = 20;
    pub const BUF_FMT: usize = 24;
    pub const RSP_FLAGS: usize = 26;
}

/// Bytes of the IU.
pub const LEN: usize = 52;

const _: () = assert!(at::RSP_FLAGS + 1 + 25 == LEN);

/// rsp_flags: MULTI-CHANNEL RESULT.
pub const FLAG_RESULT_MASK: u8 = 0x03;
/// rsp_flags: the target supports solicited notification.
pub const FLAG_SOLNT: u8 = 0x10;
/// rsp_flags: the target accepts immediate data (SRP2).
pub const FLAG_IMMED: u8 = 0x80;

/// A view of the IU.
#[derive(Clone, Copy, Debug)]
pub struct LoginRsp<B>(B);

impl<'a> LoginRsp<&'a [u8; LEN]> {
    /// Proves the length.
    pub fn new_checked(bytes: &'a [u8]) -> Result<Self, WireError> {
        head(bytes).map(LoginRsp)
    }
}

impl<B: Borrow<[u8; LEN]>> LoginRsp<B> {
    /// The opcode.
    pub fn opcode(&self) -> Opcode {
        Opcode(self.0.borrow()[at::OPCODE])
    }
    /// Initial credit.
    pub fn req_lim_delta(&self) -> u32 {
        be32::<{ at::REQ_LIM_DELTA }, LEN>(self.0.borrow())
    }
    /// The request's tag.
    pub fn tag(&self) -> Tag {
        Tag(bytes_at::<{ at::TAG }, 8, LEN>(self.0.borrow()))
    }
    /// Largest initiator-to-target IU the target accepts.
    pub fn max_it_iu_len(&self) -> u32 {
        be32::<{ at::MAX_IT_IU_LEN }, LEN>(self.0.borrow())
    }
    /// Largest target-to-initiator IU the target will ever send.
    pub fn max_ti_iu_len(&self) -> u32 {
        be32::<{ at::MAX_TI_IU_LEN }, LEN>(self.0.borrow())
    }
    /// Supported data-buffer formats.
    pub fn buf_fmt(&self) -> u16 {
        be16::<{ at::BUF_FMT }, LEN>(self.0.borrow())
    }
    /// Flags.
    pub fn rsp_flags(&self) -> u8 {
        self.0.borrow()[at::RSP_FLAGS]
    }
}

impl<B: BorrowMut<[u8; LEN]>> LoginRsp<B> {
    /// Zeroes all and writes the opcode.
    pub fn init(mut bytes: B) -> Self {
        *bytes.borrow_mut() = [0; LEN];
        bytes.borrow_mut()[at::OPCODE] = Opcode::LOGIN_RSP.0;
        LoginRsp(bytes)
    }
    /// Writes the initial credit.
    pub fn set_req_lim_delta(&mut self, v: u32) {
        put_at::<{ at::REQ_LIM_DELTA }, 4, LEN>(self.0.borrow_mut(), v.to_be_bytes());
    }
    /// Writes the tag.
    pub fn set_tag(&mut self, tag: Tag) {
        put_at::<{ at::TAG }, 8, LEN>(self.0.borrow_mut(), tag.0);
    }
    /// Writes the largest initiator-to-target IU.
    pub fn set_max_it_iu_len(&mut self, v: u32) {
        put_at::<{ at::MAX_IT_IU_LEN }, 4, LEN>(self.0.borrow_mut(), v.to_be_bytes());
    }
    /// Writes the largest target-to-initiator IU.
    pub fn set_max_ti_iu_len(&mut self, v: u32) {
        put_at::<{ at::MAX_TI_IU_LEN }, 4, LEN>(self.0.borrow_mut(), v.to_be_bytes());
    }
    /// Writes the supported formats.
    pub fn set_buf_fmt(&mut self, v: u16) {
        put_at::<{ at::BUF_FMT }, 2, LEN>(self.0.borrow_mut(), v.to_be_bytes());
    }
    /// Writes the flags.
    pub fn set_rsp_flags(&mut self, v: u8) {
        self.0.borrow_mut()[at::RSP_FLAGS] = v;
    }
}

/// The owned form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repr {
    /// Initial credit, requests.
    pub req_lim_delta: u32,
    /// Echo of the request's tag.
    pub tag: Tag,
    /// Largest initiator-to-target IU, bytes.
    pub max_it_iu_len: u32,
    /// Largest target-to-initiator IU, bytes.
    pub max_ti_iu_len: u32,
    /// Supported data-buffer formats.
    pub buf_fmt: u16,
    /// MULTI-CHANNEL RESULT, [`FLAG_SOLNT`], [`FLAG_IMMED`].
    pub rsp_flags: u8,
}

impl Repr {
    /// Reads the IU.
    pub fn parse(bytes: &[u8]) -> Result<Repr, WireError> {
        let v = LoginRsp::new_checked(bytes)?;
        expect_opcode::<{ at::OPCODE }, LEN>(v.0, Opcode::LOGIN_RSP)?;
        Ok(Repr {
            req_lim_delta: v.req_lim_delta(),
            tag: v.tag(),
            max_it_iu_len: v.max_it_iu_len(),
            max_ti_iu_len: v.max_ti_iu_len(),
            buf_fmt: v.buf_fmt(),
            rsp_flags: v.rsp_flags(),
        })
    }

    /// Writes all 52 bytes.
    pub fn emit(&self, b: &mut [u8; LEN]) {
        let mut v = LoginRsp::init(b);
        v.set_req_lim_delta(self.req_lim_delta);
        v.set_tag(self.tag);
        v.set_max_it_iu_len(self.max_it_iu_len);
        v.set_max_ti_iu_len(self.max_ti_iu_len);
        v.set_buf_fmt(self.buf_fmt);
        v.set_rsp_flags(self.rsp_flags);
    }
}

#[cfg(test)]
mod tests {
    use super::super::golden::{LOGIN_RSP, hex};
    use super::*;

    const LIO: Repr = Repr {
        req_lim_delta: 128,
        tag: Tag([0; 8]),
        max_it_iu_len: 8276,
        max_ti_iu_len: 8260,
        buf_fmt: 6,
        rsp_flags: FLAG_IMMED,
    };

    #[test]
    fn golden_is_taken_apart() {
        let bytes = hex(LOGIN_RSP);
        let v = LoginRsp::new_checked(&bytes).unwrap();
        assert_eq!((v.opcode(), v.req_lim_delta()), (Opcode::LOGIN_RSP, 128));
        assert_eq!((v.max_it_iu_len(), v.max_ti_iu_len()), (8276, 8260));
        assert_eq!((v.buf_fmt(), v.rsp_flags(), v.tag()), (6, 0x80, Tag::default()));
    }

    #[test]
    fn golden_is_built() {
        let mut v = LoginRsp::init([0xA5; LEN]);
        v.set_rsp_flags(FLAG_IMMED);
        v.set_buf_fmt(6);
        v.set_max_ti_iu_len(8260);
        v.set_max_it_iu_len(8276);
        v.set_req_lim_delta(128);
        assert_eq!(v.0, hex(LOGIN_RSP)[..]);
    }

    #[test]
    fn golden_is_parsed() {
        assert_eq!(Repr::parse(&hex(LOGIN_RSP)), Ok(LIO));
        assert_eq!(Repr::parse(&[0xC0; 51]), Err(WireError::Truncated { need: 52, got: 51 }));
    }

    #[test]
    fn golden_is_emitted() {
        let mut b = [0xA5; LEN];
        LIO.emit(&mut b);
        assert_eq!(b, hex(LOGIN_RSP)[..]);
    }
}
