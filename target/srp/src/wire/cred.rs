//! SRP_CRED_REQ and SRP_CRED_RSP, 16 bytes each (reference 1.9).
//!
//! ```text
//!   CRED_REQ  0 opcode  1 sol_not  4 req_lim_delta 4  8 tag 8        CRED_RSP  0 opcode  8 tag 8
//! ```

use super::{Opcode, SOL_NOT, WireError, be32, bytes_at, expect_opcode, head, put_at};
use crate::Tag;

mod at {
    pub const OPCODE: usize = 0;
    pub const SOL_NOT: usize = 1;
    pub const REQ_LIM_DELTA: usize = 4;
    pub const TAG: usize = 8;
}

/// Bytes of either IU.
pub const LEN: usize = 16;

const _: () = assert!(at::TAG + 8 == LEN);

/// A view of either IU; CRED_RSP has no delta.
#[derive(Clone, Copy, Debug)]
pub struct Cred<'a>(&'a [u8; LEN]);

impl<'a> Cred<'a> {
    /// Proves the length.
    pub fn new_checked(iu: &'a [u8]) -> Result<Self, WireError> {
        head(iu).map(Cred)
    }
    /// The opcode.
    pub fn opcode(&self) -> Opcode {
        Opcode(self.0[at::OPCODE])
    }
    /// Bit 0: solicited notification.
    pub fn sol_not(&self) -> u8 {
        self.0[at::SOL_NOT]
    }
    /// Credits granted; signed in principle.
    pub fn req_lim_delta(&self) -> i32 {
        be32::<{ at::REQ_LIM_DELTA }, LEN>(self.0) as i32
    }
    /// The tag.
    pub fn tag(&self) -> Tag {
        Tag(bytes_at::<{ at::TAG }, 8, LEN>(self.0))
    }
}

/// A credit request in owned form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Req {
    /// Credits granted; signed in principle.
    pub req_lim_delta: i32,
    /// The target's tag.
    pub tag: Tag,
    /// The initiator asked for a solicited event (CRSOLNT).
    pub solicited: bool,
}

impl Req {
    /// Reads a CRED_REQ.
    pub fn parse(iu: &[u8]) -> Result<Req, WireError> {
        let v = Cred::new_checked(iu)?;
        expect_opcode::<{ at::OPCODE }, LEN>(v.0, Opcode::CRED_REQ)?;
        let solicited = v.sol_not() & SOL_NOT != 0;
        Ok(Req { req_lim_delta: v.req_lim_delta(), tag: v.tag(), solicited })
    }

    /// Writes all 16 bytes.
    pub fn emit(&self, b: &mut [u8; LEN]) {
        *b = [0; LEN];
        b[at::OPCODE] = Opcode::CRED_REQ.0;
        b[at::SOL_NOT] = if self.solicited { SOL_NOT } else { 0 };
        put_at::<{ at::REQ_LIM_DELTA }, 4, LEN>(b, self.req_lim_delta.to_be_bytes());
        put_at::<{ at::TAG }, 8, LEN>(b, self.tag.0);
    }
}

/// The answer in owned form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rsp {
    /// Echo of the request's tag.
    pub tag: Tag,
}

impl Rsp {
    /// Reads a CRED_RSP.
    pub fn parse(iu: &[u8]) -> Result<Rsp, WireError> {
        let v = Cred::new_checked(iu)?;
        expect_opcode::<{ at::OPCODE }, LEN>(v.0, Opcode::CRED_RSP)?;
        Ok(Rsp { tag: v.tag() })
    }

    /// Writes all 16 bytes.
    pub fn emit(&self, b: &mut [u8; LEN]) {
        *b = [0; LEN];
        b[at::OPCODE] = Opcode::CRED_RSP.0;
        put_at::<{ at::TAG }, 8, LEN>(b, self.tag.0);
    }
}

#[cfg(test)]
mod tests {
    use super::super::golden::{CRED_REQ, CRED_RSP, hex};
    use super::*;

    const TAG: Tag = Tag([0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88]);
    const REQ: Req = Req { req_lim_delta: 2, tag: TAG, solicited: false };

    #[test]
    fn golden_is_taken_apart() {
        let iu = hex(CRED_REQ);
        let v = Cred::new_checked(&iu).unwrap();
        assert_eq!((v.opcode(), v.sol_not()), (Opcode::CRED_REQ, 0));
        assert_eq!((v.req_lim_delta(), v.tag()), (2, TAG));
    }

    #[test]
    fn golden_is_parsed() {
        assert_eq!(Req::parse(&hex(CRED_REQ)), Ok(REQ));
        assert_eq!(Rsp::parse(&hex(CRED_RSP)), Ok(Rsp { tag: TAG }));
        assert_eq!(Rsp::parse(&hex(CRED_REQ)), Err(WireError::Opcode(0x81)));
        assert!(Req::parse(&hex(CRED_REQ)[..15]).is_err());
    }

    #[test]
    fn golden_request_is_emitted() {
        let mut b = [0xA5; LEN];
        REQ.emit(&mut b);
        assert_eq!(b, hex(CRED_REQ)[..]);
    }

    #[test]
    fn golden_answer_is_emitted() {
        let mut b = [0xA5; LEN];
        Rsp { tag: TAG }.emit(&mut b);
        assert_eq!(b, hex(CRED_RSP)[..]);
    }

    #[test]
    fn a_negative_delta_survives() {
        let mut b = [0xA5; LEN];
        let req = Req { req_lim_delta: -3, tag: TAG, solicited: true };
        req.emit(&mut b);
        assert_eq!(Req::parse(&b), Ok(req));
    }
}
