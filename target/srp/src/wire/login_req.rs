//! SRP_LOGIN_REQ: 64 bytes in IB/CM private data, or the same facts in 56 bytes through RDMA/CM
//! (reference 1.2, 1.3).
//!
//! ```text
//!   64:  0 opcode  8 tag 8  16 req_it_iu_len 4  24 req_buf_fmt 2  26 req_flags
//!       28 imm_data_offset 2  32 initiator port id 16  48 target port id 16
//!   56:  0 tag 8   8 req_buf_fmt 2  10 req_flags  11 opcode  12 req_it_iu_len 4
//!       16 initiator port id 16  32 target port id 16  48 imm_data_offset 2
//! ```

use core::borrow::{Borrow, BorrowMut};

use super::{Opcode, WireError, be16, be32, bytes_at, expect_opcode, head, put_at};
use crate::{PortId, Tag};

mod at {
    pub const OPCODE: usize = 0;
    pub const TAG: usize = 8;
    pub const REQ_IT_IU_LEN: usize = 16;
    pub const REQ_BUF_FMT: usize = 24;
    pub const REQ_FLAGS: usize = 26;
    pub const IMM_DATA_OFFSET: usize = 28;
    pub const I_PORT_ID: usize = 32;
    pub const T_PORT_ID: usize = 48;
}

/// Offsets of the RDMA/CM form.
mod cm {
    pub const TAG: usize = 0;
    pub const REQ_BUF_FMT: usize = 8;
    pub const REQ_FLAGS: usize = 10;
    pub const OPCODE: usize = 11;
    pub const REQ_IT_IU_LEN: usize = 12;
    pub const I_PORT_ID: usize = 16;
    pub const T_PORT_ID: usize = 32;
    pub const IMM_DATA_OFFSET: usize = 48;
}

/// Bytes of the IB/CM form.
pub const LEN: usize = 64;
/// Bytes of the RDMA/CM form.
pub const CM_LEN: usize = 56;

const _: () = assert!(at::T_PORT_ID + 16 == LEN);
const _: () = assert!(cm::IMM_DATA_OFFSET + 2 + 6 == CM_LEN);

/// req_flags: MULTI-CHANNEL ACTION.
pub const FLAG_ACTION_MASK: u8 = 0x03;
/// req_flags: immediate data requested (SRP2).
pub const FLAG_IMMED: u8 = 0x80;

/// A view of the 64-byte form.
#[derive(Clone, Copy, Debug)]
pub struct LoginReq<B>(B);

/// A view of the 56-byte form.
#[derive(Clone, Copy, Debug)]
pub struct LoginReqCm<B>(B);

impl<'a> LoginReq<&'a [u8; LEN]> {
    /// Proves the length.
    pub fn new_checked(bytes: &'a [u8]) -> Result<Self, WireError> {
        head(bytes).map(LoginReq)
    }
}

impl<'a> LoginReqCm<&'a [u8; CM_LEN]> {
    /// Proves the length.
    pub fn new_checked(bytes: &'a [u8]) -> Result<Self, WireError> {
        head(bytes).map(LoginReqCm)
    }
}

impl<B: Borrow<[u8; LEN]>> LoginReq<B> {
    /// Over bytes whose length the type proves.
    pub fn new(bytes: B) -> Self {
        LoginReq(bytes)
    }
    /// The opcode.
    pub fn opcode(&self) -> Opcode {
        Opcode(self.0.borrow()[at::OPCODE])
    }
    /// The tag, to be echoed.
    pub fn tag(&self) -> Tag {
        Tag(bytes_at::<{ at::TAG }, 8, LEN>(self.0.borrow()))
    }
    /// Largest initiator-to-target IU the initiator wants to send.
    pub fn req_it_iu_len(&self) -> u32 {
        be32::<{ at::REQ_IT_IU_LEN }, LEN>(self.0.borrow())
    }
    /// Required data-buffer formats.
    pub fn req_buf_fmt(&self) -> u16 {
        be16::<{ at::REQ_BUF_FMT }, LEN>(self.0.borrow())
    }
    /// Flags.
    pub fn req_flags(&self) -> u8 {
        self.0.borrow()[at::REQ_FLAGS]
    }
    /// Where immediate data would begin; meaningful with [`FLAG_IMMED`].
    pub fn imm_data_offset(&self) -> u16 {
        be16::<{ at::IMM_DATA_OFFSET }, LEN>(self.0.borrow())
    }
    /// Initiator port identifier.
    pub fn i_port_id(&self) -> PortId {
        PortId(bytes_at::<{ at::I_PORT_ID }, 16, LEN>(self.0.borrow()))
    }
    /// Target port identifier.
    pub fn t_port_id(&self) -> PortId {
        PortId(bytes_at::<{ at::T_PORT_ID }, 16, LEN>(self.0.borrow()))
    }
}

impl<B: BorrowMut<[u8; LEN]>> LoginReq<B> {
    /// Zeroes all and writes the opcode.
    pub fn init(mut bytes: B) -> Self {
        *bytes.borrow_mut() = [0; LEN];
        bytes.borrow_mut()[at::OPCODE] = Opcode::LOGIN_REQ.0;
        LoginReq(bytes)
    }
    /// Writes the tag.
    pub fn set_tag(&mut self, tag: Tag) {
        put_at::<{ at::TAG }, 8, LEN>(self.0.borrow_mut(), tag.0);
    }
    /// Writes the wanted IU length.
    pub fn set_req_it_iu_len(&mut self, v: u32) {
        put_at::<{ at::REQ_IT_IU_LEN }, 4, LEN>(self.0.borrow_mut(), v.to_be_bytes());
    }
    /// Writes the required formats.
    pub fn set_req_buf_fmt(&mut self, v: u16) {
        put_at::<{ at::REQ_BUF_FMT }, 2, LEN>(self.0.borrow_mut(), v.to_be_bytes());
    }
    /// Writes the flags.
    pub fn set_req_flags(&mut self, v: u8) {
        self.0.borrow_mut()[at::REQ_FLAGS] = v;
    }
    /// Writes the immediate data offset.
    pub fn set_imm_data_offset(&mut self, v: u16) {
        put_at::<{ at::IMM_DATA_OFFSET }, 2, LEN>(self.0.borrow_mut(), v.to_be_bytes());
    }
    /// Writes the initiator port identifier.
    pub fn set_i_port_id(&mut self, v: PortId) {
        put_at::<{ at::I_PORT_ID }, 16, LEN>(self.0.borrow_mut(), v.0);
    }
    /// Writes the target port identifier.
    pub fn set_t_port_id(&mut self, v: PortId) {
        put_at::<{ at::T_PORT_ID }, 16, LEN>(self.0.borrow_mut(), v.0);
    }
}

impl<B: Borrow<[u8; CM_LEN]>> LoginReqCm<B> {
    /// The opcode: it sits at byte 11 here.
    pub fn opcode(&self) -> Opcode {
        Opcode(self.0.borrow()[cm::OPCODE])
    }
    /// The tag, to be echoed.
    pub fn tag(&self) -> Tag {
        Tag(bytes_at::<{ cm::TAG }, 8, CM_LEN>(self.0.borrow()))
    }
    /// Largest initiator-to-target IU the initiator wants to send.
    pub fn req_it_iu_len(&self) -> u32 {
        be32::<{ cm::REQ_IT_IU_LEN }, CM_LEN>(self.0.borrow())
    }
    /// Required data-buffer formats.
    pub fn req_buf_fmt(&self) -> u16 {
        be16::<{ cm::REQ_BUF_FMT }, CM_LEN>(self.0.borrow())
    }
    /// Flags.
    pub fn req_flags(&self) -> u8 {
        self.0.borrow()[cm::REQ_FLAGS]
    }
    /// Where immediate data would begin; meaningful with [`FLAG_IMMED`].
    pub fn imm_data_offset(&self) -> u16 {
        be16::<{ cm::IMM_DATA_OFFSET }, CM_LEN>(self.0.borrow())
    }
    /// Initiator port identifier.
    pub fn i_port_id(&self) -> PortId {
        PortId(bytes_at::<{ cm::I_PORT_ID }, 16, CM_LEN>(self.0.borrow()))
    }
    /// Target port identifier.
    pub fn t_port_id(&self) -> PortId {
        PortId(bytes_at::<{ cm::T_PORT_ID }, 16, CM_LEN>(self.0.borrow()))
    }
}

/// The facts of a login request, whichever form brought them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repr {
    /// To be echoed; Linux sends 0.
    pub tag: Tag,
    /// Largest initiator-to-target IU the initiator wants to send, bytes.
    pub req_it_iu_len: u32,
    /// Required data-buffer formats.
    pub req_buf_fmt: u16,
    /// MULTI-CHANNEL ACTION, notification bits, [`FLAG_IMMED`].
    pub req_flags: u8,
    /// Where immediate data would begin.
    pub imm_data_offset: u16,
    /// Who logs in.
    pub i_port_id: PortId,
    /// Where to.
    pub t_port_id: PortId,
}

impl Repr {
    /// Reads the 64-byte form.
    pub fn parse(bytes: &[u8]) -> Result<Repr, WireError> {
        let v = LoginReq::new_checked(bytes)?;
        expect_opcode::<{ at::OPCODE }, LEN>(v.0, Opcode::LOGIN_REQ)?;
        Ok(Repr {
            tag: v.tag(),
            req_it_iu_len: v.req_it_iu_len(),
            req_buf_fmt: v.req_buf_fmt(),
            req_flags: v.req_flags(),
            imm_data_offset: v.imm_data_offset(),
            i_port_id: v.i_port_id(),
            t_port_id: v.t_port_id(),
        })
    }

    /// Reads the 56-byte form.
    pub fn parse_cm(bytes: &[u8]) -> Result<Repr, WireError> {
        let v = LoginReqCm::new_checked(bytes)?;
        expect_opcode::<{ cm::OPCODE }, CM_LEN>(v.0, Opcode::LOGIN_REQ)?;
        Ok(Repr {
            tag: v.tag(),
            req_it_iu_len: v.req_it_iu_len(),
            req_buf_fmt: v.req_buf_fmt(),
            req_flags: v.req_flags(),
            imm_data_offset: v.imm_data_offset(),
            i_port_id: v.i_port_id(),
            t_port_id: v.t_port_id(),
        })
    }

    /// Writes all 64 bytes.
    pub fn emit(&self, b: &mut [u8; LEN]) {
        let mut v = LoginReq::init(b);
        v.set_tag(self.tag);
        v.set_req_it_iu_len(self.req_it_iu_len);
        v.set_req_buf_fmt(self.req_buf_fmt);
        v.set_req_flags(self.req_flags);
        v.set_imm_data_offset(self.imm_data_offset);
        v.set_i_port_id(self.i_port_id);
        v.set_t_port_id(self.t_port_id);
    }

    /// Writes all 56 bytes of the RDMA/CM form.
    pub fn emit_cm(&self, b: &mut [u8; CM_LEN]) {
        *b = [0; CM_LEN];
        put_at::<{ cm::TAG }, 8, CM_LEN>(b, self.tag.0);
        put_at::<{ cm::REQ_BUF_FMT }, 2, CM_LEN>(b, self.req_buf_fmt.to_be_bytes());
        b[cm::REQ_FLAGS] = self.req_flags;
        b[cm::OPCODE] = Opcode::LOGIN_REQ.0;
        put_at::<{ cm::REQ_IT_IU_LEN }, 4, CM_LEN>(b, self.req_it_iu_len.to_be_bytes());
        put_at::<{ cm::I_PORT_ID }, 16, CM_LEN>(b, self.i_port_id.0);
        put_at::<{ cm::T_PORT_ID }, 16, CM_LEN>(b, self.t_port_id.0);
        put_at::<{ cm::IMM_DATA_OFFSET }, 2, CM_LEN>(b, self.imm_data_offset.to_be_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::super::golden::{LOGIN_REQ, LOGIN_REQ_CM, hex};
    use super::*;

    fn linux() -> Repr {
        Repr {
            tag: Tag::default(),
            req_it_iu_len: 8260,
            req_buf_fmt: 0x0006,
            req_flags: 0x80,
            imm_data_offset: 68,
            i_port_id: PortId::from_halves(0, 0x5054_00ff_fe4a_0b7b),
            t_port_id: PortId::from_halves(0x0002_c903_00a1_b2c4, 0x0002_c903_00a1_b2c4),
        }
    }

    #[test]
    fn golden_is_taken_apart() {
        let bytes = hex(LOGIN_REQ);
        let v = LoginReq::new_checked(&bytes).unwrap();
        assert_eq!(v.opcode(), Opcode::LOGIN_REQ);
        assert_eq!((v.req_it_iu_len(), v.req_buf_fmt(), v.req_flags()), (8260, 6, 0x80));
        assert_eq!((v.imm_data_offset(), v.i_port_id()), (68, linux().i_port_id));
        assert_eq!((v.t_port_id(), v.tag()), (linux().t_port_id, Tag::default()));
    }

    #[test]
    fn golden_is_built() {
        let mut v = LoginReq::init([0xA5; LEN]);
        v.set_req_it_iu_len(8260);
        v.set_req_buf_fmt(6);
        v.set_req_flags(FLAG_IMMED);
        v.set_imm_data_offset(68);
        v.set_i_port_id(linux().i_port_id);
        v.set_t_port_id(linux().t_port_id);
        v.set_tag(Tag::default());
        assert_eq!(v.0, hex(LOGIN_REQ)[..]);
    }

    #[test]
    fn golden_is_parsed() {
        assert_eq!(Repr::parse(&hex(LOGIN_REQ)), Ok(linux()));
        assert_eq!(Repr::parse(&[0xC0; 64]), Err(WireError::Opcode(0xC0)));
    }

    #[test]
    fn golden_is_emitted() {
        let mut b = [0xA5; LEN];
        linux().emit(&mut b);
        assert_eq!(b, hex(LOGIN_REQ)[..]);
    }

    #[test]
    fn golden_cm_is_taken_apart() {
        let bytes = hex(LOGIN_REQ_CM);
        let v = LoginReqCm::new_checked(&bytes).unwrap();
        assert_eq!(v.opcode(), Opcode::LOGIN_REQ);
        assert_eq!((v.req_it_iu_len(), v.req_buf_fmt(), v.req_flags()), (8260, 6, 0x80));
        assert_eq!((v.imm_data_offset(), v.i_port_id()), (68, linux().i_port_id));
    }

    #[test]
    fn golden_cm_is_parsed() {
        assert_eq!(Repr::parse_cm(&hex(LOGIN_REQ_CM)), Ok(linux()));
    }

    #[test]
    fn golden_cm_is_emitted() {
        let mut b = [0xA5; CM_LEN];
        linux().emit_cm(&mut b);
        assert_eq!(b, hex(LOGIN_REQ_CM)[..]);
    }

    #[test]
    fn both_forms_carry_the_same_facts() {
        let r = Repr { tag: Tag(*b"usurp\0\x01\x02"), req_flags: 0xF3, ..linux() };
        let (mut a, mut b) = ([0xA5; LEN], [0xA5; CM_LEN]);
        r.emit(&mut a);
        r.emit_cm(&mut b);
        assert_eq!((Repr::parse(&a), Repr::parse_cm(&b)), (Ok(r), Ok(r)));
    }
}
