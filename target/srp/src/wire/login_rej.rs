//! SRP_LOGIN_REJ, 32 bytes in CM REJ private data, CM reason 28 (reference 1.5).
//!
//! ```text
//!   0 opcode  4 reason 4  8 tag 8  16 reserved 8  24 buf_fmt 2  26 reserved 6
//! ```

use core::borrow::{Borrow, BorrowMut};

use super::{Opcode, WireError, be16, be32, bytes_at, expect_opcode, head, put_at};
use crate::Tag;

mod at {
    pub const OPCODE: usize = 0;
    pub const REASON: usize = 4;
    pub const TAG: usize = 8;
    pub const BUF_FMT: usize = 24;
}

/// Bytes of the IU.
pub const LEN: usize = 32;

const _: () = assert!(at::BUF_FMT + 2 + 6 == LEN);

/// A view of the IU.
#[derive(Clone, Copy, Debug)]
pub struct LoginRej<B>(B);

impl<'a> LoginRej<&'a [u8; LEN]> {
    /// Proves the length.
    pub fn new_checked(bytes: &'a [u8]) -> Result<Self, WireError> {
        head(bytes).map(LoginRej)
    }
}

impl<B: Borrow<[u8; LEN]>> LoginRej<B> {
    /// The opcode.
    pub fn opcode(&self) -> Opcode {
        Opcode(self.0.borrow()[at::OPCODE])
    }
    /// The reason; unknown codes survive.
    pub fn reason(&self) -> u32 {
        be32::<{ at::REASON }, LEN>(self.0.borrow())
    }
    /// The request's tag.
    pub fn tag(&self) -> Tag {
        Tag(bytes_at::<{ at::TAG }, 8, LEN>(self.0.borrow()))
    }
    /// Supported data-buffer formats.
    pub fn buf_fmt(&self) -> u16 {
        be16::<{ at::BUF_FMT }, LEN>(self.0.borrow())
    }
}

impl<B: BorrowMut<[u8; LEN]>> LoginRej<B> {
    /// Zeroes all and writes the opcode.
    pub fn init(mut bytes: B) -> Self {
        *bytes.borrow_mut() = [0; LEN];
        bytes.borrow_mut()[at::OPCODE] = Opcode::LOGIN_REJ.0;
        LoginRej(bytes)
    }
    /// Writes the reason.
    pub fn set_reason(&mut self, v: u32) {
        put_at::<{ at::REASON }, 4, LEN>(self.0.borrow_mut(), v.to_be_bytes());
    }
    /// Writes the tag.
    pub fn set_tag(&mut self, tag: Tag) {
        put_at::<{ at::TAG }, 8, LEN>(self.0.borrow_mut(), tag.0);
    }
    /// Writes the supported formats.
    pub fn set_buf_fmt(&mut self, v: u16) {
        put_at::<{ at::BUF_FMT }, 2, LEN>(self.0.borrow_mut(), v.to_be_bytes());
    }
}

/// The owned form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repr {
    /// Reason code, 0x0001_0000 and up.
    pub reason: u32,
    /// Echo of the request's tag.
    pub tag: Tag,
    /// Supported data-buffer formats.
    pub buf_fmt: u16,
}

impl Repr {
    /// Reads the IU.
    pub fn parse(bytes: &[u8]) -> Result<Repr, WireError> {
        let v = LoginRej::new_checked(bytes)?;
        expect_opcode::<{ at::OPCODE }, LEN>(v.0, Opcode::LOGIN_REJ)?;
        Ok(Repr { reason: v.reason(), tag: v.tag(), buf_fmt: v.buf_fmt() })
    }

    /// Writes all 32 bytes.
    pub fn emit(&self, b: &mut [u8; LEN]) {
        let mut v = LoginRej::init(b);
        v.set_reason(self.reason);
        v.set_tag(self.tag);
        v.set_buf_fmt(self.buf_fmt);
    }
}

#[cfg(test)]
mod tests {
    use super::super::golden::{LOGIN_REJ, hex};
    use super::*;

    const TOO_LONG: Repr = Repr { reason: 0x0001_0002, tag: Tag([0; 8]), buf_fmt: 6 };

    #[test]
    fn golden_is_taken_apart() {
        let bytes = hex(LOGIN_REJ);
        let v = LoginRej::new_checked(&bytes).unwrap();
        assert_eq!((v.opcode(), v.reason()), (Opcode::LOGIN_REJ, 0x0001_0002));
        assert_eq!((v.tag(), v.buf_fmt()), (Tag::default(), 6));
    }

    #[test]
    fn golden_is_built() {
        let mut v = LoginRej::init([0xA5; LEN]);
        v.set_buf_fmt(6);
        v.set_reason(0x0001_0002);
        assert_eq!(v.0, hex(LOGIN_REJ)[..]);
    }

    #[test]
    fn golden_is_parsed() {
        assert_eq!(Repr::parse(&hex(LOGIN_REJ)), Ok(TOO_LONG));
        assert_eq!(Repr::parse(&[0xC0; 32]), Err(WireError::Opcode(0xC0)));
    }

    #[test]
    fn golden_is_emitted() {
        let mut b = [0xA5; LEN];
        TOO_LONG.emit(&mut b);
        assert_eq!(b, hex(LOGIN_REJ)[..]);
    }
}
