//! SRP_I_LOGOUT and SRP_T_LOGOUT, 16 bytes each; neither is answered by an IU (reference 1.11,
//! 1.12).
//!
//! ```text
//!   I_LOGOUT  0 opcode  8 tag 8          T_LOGOUT  0 opcode  1 sol_not  4 reason 4  8 tag 8
//! ```

use super::{Opcode, SOL_NOT, WireError, be32, bytes_at, expect_opcode, head, put_at};
use crate::Tag;

mod at {
    pub const OPCODE: usize = 0;
    pub const SOL_NOT: usize = 1;
    pub const REASON: usize = 4;
    pub const TAG: usize = 8;
}

/// Bytes of either IU.
pub const LEN: usize = 16;

const _: () = assert!(at::TAG + 8 == LEN);

/// A view of either IU; I_LOGOUT has no reason.
#[derive(Clone, Copy, Debug)]
pub struct Logout<'a>(&'a [u8; LEN]);

impl<'a> Logout<'a> {
    /// Proves the length.
    pub fn new_checked(iu: &'a [u8]) -> Result<Self, WireError> {
        head(iu).map(Logout)
    }
    /// The opcode.
    pub fn opcode(&self) -> Opcode {
        Opcode(self.0[at::OPCODE])
    }
    /// Bit 0: solicited notification.
    pub fn sol_not(&self) -> u8 {
        self.0[at::SOL_NOT]
    }
    /// Why the target logs out.
    pub fn reason(&self) -> u32 {
        be32::<{ at::REASON }, LEN>(self.0)
    }
    /// The tag.
    pub fn tag(&self) -> Tag {
        Tag(bytes_at::<{ at::TAG }, 8, LEN>(self.0))
    }
}

/// Reason of a T_LOGOUT; unknown ones survive. Headers disagree on 5, 8 and 9, so they have no name
/// here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reason(pub u32);

#[allow(missing_docs)] // reference 1.12
impl Reason {
    pub const NONE: Reason = Reason(0);
    pub const INACTIVE: Reason = Reason(1);
    pub const INVALID_IU: Reason = Reason(2);
    pub const STRAY_RESPONSE: Reason = Reason(3);
    pub const MULTI_CHANNEL_ACTION: Reason = Reason(4);
    pub const BAD_OUT_FORMAT: Reason = Reason(6);
    pub const BAD_IN_FORMAT: Reason = Reason(7);
}

/// SRP_I_LOGOUT in owned form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Initiator {
    /// The request's tag.
    pub tag: Tag,
}

impl Initiator {
    /// Reads an I_LOGOUT.
    pub fn parse(iu: &[u8]) -> Result<Initiator, WireError> {
        let v = Logout::new_checked(iu)?;
        expect_opcode::<{ at::OPCODE }, LEN>(v.0, Opcode::I_LOGOUT)?;
        Ok(Initiator { tag: v.tag() })
    }

    /// Writes all 16 bytes.
    pub fn emit(&self, b: &mut [u8; LEN]) {
        *b = [0; LEN];
        b[at::OPCODE] = Opcode::I_LOGOUT.0;
        put_at::<{ at::TAG }, 8, LEN>(b, self.tag.0);
    }
}

/// SRP_T_LOGOUT in owned form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// Why.
    pub reason: Reason,
    /// The request's tag.
    pub tag: Tag,
    /// The initiator asked for a solicited event (LOSOLNT).
    pub solicited: bool,
}

impl Target {
    /// Reads a T_LOGOUT.
    pub fn parse(iu: &[u8]) -> Result<Target, WireError> {
        let v = Logout::new_checked(iu)?;
        expect_opcode::<{ at::OPCODE }, LEN>(v.0, Opcode::T_LOGOUT)?;
        let solicited = v.sol_not() & SOL_NOT != 0;
        Ok(Target { reason: Reason(v.reason()), tag: v.tag(), solicited })
    }

    /// Writes all 16 bytes.
    pub fn emit(&self, b: &mut [u8; LEN]) {
        *b = [0; LEN];
        b[at::OPCODE] = Opcode::T_LOGOUT.0;
        b[at::SOL_NOT] = if self.solicited { SOL_NOT } else { 0 };
        put_at::<{ at::REASON }, 4, LEN>(b, self.reason.0.to_be_bytes());
        put_at::<{ at::TAG }, 8, LEN>(b, self.tag.0);
    }
}

#[cfg(test)]
mod tests {
    use super::super::golden::hex;
    use super::*;

    // Written by hand from reference 1.11 and 1.12; Appendix A has no capture of a logout.
    const I_LOGOUT: &str = "0300000000000000 1122334455667788";
    const T_LOGOUT: &str = "8001000000000002 1122334455667788";
    const TAG: Tag = Tag([0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88]);
    const TARGET: Target = Target { reason: Reason::INVALID_IU, tag: TAG, solicited: true };

    #[test]
    fn golden_is_taken_apart() {
        let iu = hex(T_LOGOUT);
        let v = Logout::new_checked(&iu).unwrap();
        assert_eq!((v.opcode(), v.sol_not()), (Opcode::T_LOGOUT, 1));
        assert_eq!((v.reason(), v.tag()), (2, TAG));
    }

    #[test]
    fn golden_is_parsed() {
        assert_eq!(Initiator::parse(&hex(I_LOGOUT)), Ok(Initiator { tag: TAG }));
        assert_eq!(Target::parse(&hex(T_LOGOUT)), Ok(TARGET));
        assert_eq!(Target::parse(&hex(I_LOGOUT)), Err(WireError::Opcode(3)));
        assert!(Initiator::parse(&hex(I_LOGOUT)[..15]).is_err());
    }

    #[test]
    fn golden_i_logout_is_emitted() {
        let mut b = [0xA5; LEN];
        Initiator { tag: TAG }.emit(&mut b);
        assert_eq!(b, hex(I_LOGOUT)[..]);
    }

    #[test]
    fn golden_t_logout_is_emitted() {
        let mut b = [0xA5; LEN];
        TARGET.emit(&mut b);
        assert_eq!(b, hex(T_LOGOUT)[..]);
    }
}
