//! SRP_AER_REQ, 36 bytes + sense, and SRP_AER_RSP, 16 bytes (reference 1.10).
//!
//! ```text
//!   AER_REQ  0 opcode  1 sol_not  4 req_lim_delta 4  8 tag 8  20 LUN 8  28 sense_data_len 4
//!           36 sense data S
//!   AER_RSP  0 opcode  8 tag 8
//! ```
//! Linux answers an AER and ignores it, so our target reports changes as unit attentions and sends
//! none. The initiator role answers them.

use super::{
    Opcode, SOL_NOT, WireError, be32, be64, bytes_at, expect_opcode, head, head_mut, put_at,
};
use crate::Tag;

mod at {
    pub const OPCODE: usize = 0;
    pub const SOL_NOT: usize = 1;
    pub const REQ_LIM_DELTA: usize = 4;
    pub const TAG: usize = 8;
    pub const LUN: usize = 20;
    pub const SENSE_DATA_LEN: usize = 28;
}

/// Bytes of AER_REQ's fixed part.
pub const REQ_LEN: usize = 36;
/// Bytes of AER_RSP.
pub const RSP_LEN: usize = 16;

const _: () = assert!(at::SENSE_DATA_LEN + 4 + 4 == REQ_LEN);
const _: () = assert!(at::TAG + 8 == RSP_LEN);

/// A view of an AER_REQ whose sense length is proven to lie inside the received bytes.
#[derive(Clone, Copy, Debug)]
pub struct AerReq<'a> {
    /// The fixed part.
    head: &'a [u8; REQ_LEN],
    /// S bytes.
    sense: &'a [u8],
}

impl<'a> AerReq<'a> {
    /// Proves the fixed part and the sense length.
    pub fn new_checked(iu: &'a [u8]) -> Result<AerReq<'a>, WireError> {
        let head = head::<REQ_LEN>(iu)?;
        let len = be32::<{ at::SENSE_DATA_LEN }, REQ_LEN>(head);
        let sense = iu[REQ_LEN..].get(..len as usize).ok_or(WireError::Lengths)?;
        Ok(AerReq { head, sense })
    }
    /// The opcode.
    pub fn opcode(&self) -> Opcode {
        Opcode(self.head[at::OPCODE])
    }
    /// Bit 0: solicited notification.
    pub fn sol_not(&self) -> u8 {
        self.head[at::SOL_NOT]
    }
    /// Credits granted; signed in principle.
    pub fn req_lim_delta(&self) -> i32 {
        be32::<{ at::REQ_LIM_DELTA }, REQ_LEN>(self.head) as i32
    }
    /// The target's tag.
    pub fn tag(&self) -> Tag {
        Tag(bytes_at::<{ at::TAG }, 8, REQ_LEN>(self.head))
    }
    /// The 8-byte LUN as a big-endian number.
    pub fn lun(&self) -> u64 {
        be64::<{ at::LUN }, REQ_LEN>(self.head)
    }
    /// Sense data.
    pub fn sense(&self) -> &'a [u8] {
        self.sense
    }
}

/// An AER_REQ in owned form, sense borrowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Req<'a> {
    /// Credits granted; signed in principle.
    pub req_lim_delta: i32,
    /// The target's tag.
    pub tag: Tag,
    /// The initiator asked for a solicited event (AESOLNT).
    pub solicited: bool,
    /// Logical unit.
    pub lun: u64,
    /// Sense data.
    pub sense: &'a [u8],
}

impl<'a> Req<'a> {
    /// Reads an AER_REQ.
    pub fn parse(iu: &'a [u8]) -> Result<Req<'a>, WireError> {
        let v = AerReq::new_checked(iu)?;
        expect_opcode::<{ at::OPCODE }, REQ_LEN>(v.head, Opcode::AER_REQ)?;
        Ok(Req {
            req_lim_delta: v.req_lim_delta(),
            tag: v.tag(),
            solicited: v.sol_not() & SOL_NOT != 0,
            lun: v.lun(),
            sense: v.sense(),
        })
    }

    /// Writes the IU and returns its length. `buf` holds 36 bytes and the sense, or that is our
    /// bug.
    pub fn emit(&self, buf: &mut [u8]) -> usize {
        let b = head_mut::<REQ_LEN>(buf);
        *b = [0; REQ_LEN];
        b[at::OPCODE] = Opcode::AER_REQ.0;
        b[at::SOL_NOT] = if self.solicited { SOL_NOT } else { 0 };
        put_at::<{ at::REQ_LIM_DELTA }, 4, REQ_LEN>(b, self.req_lim_delta.to_be_bytes());
        put_at::<{ at::TAG }, 8, REQ_LEN>(b, self.tag.0);
        put_at::<{ at::LUN }, 8, REQ_LEN>(b, self.lun.to_be_bytes());
        put_at::<{ at::SENSE_DATA_LEN }, 4, REQ_LEN>(b, (self.sense.len() as u32).to_be_bytes());
        buf[REQ_LEN..REQ_LEN + self.sense.len()].copy_from_slice(self.sense);
        REQ_LEN + self.sense.len()
    }
}

/// The answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rsp {
    /// Echo of the request's tag.
    pub tag: Tag,
}

impl Rsp {
    /// Reads an AER_RSP.
    pub fn parse(iu: &[u8]) -> Result<Rsp, WireError> {
        let b = head::<RSP_LEN>(iu)?;
        expect_opcode::<{ at::OPCODE }, RSP_LEN>(b, Opcode::AER_RSP)?;
        Ok(Rsp { tag: Tag(bytes_at::<{ at::TAG }, 8, RSP_LEN>(b)) })
    }

    /// Writes all 16 bytes.
    pub fn emit(&self, b: &mut [u8; RSP_LEN]) {
        *b = [0; RSP_LEN];
        b[at::OPCODE] = Opcode::AER_RSP.0;
        put_at::<{ at::TAG }, 8, RSP_LEN>(b, self.tag.0);
    }
}

#[cfg(test)]
mod tests {
    use super::super::golden::hex;
    use super::*;

    // Written by hand from reference 1.10; Appendix A has no capture of an AER.
    const AER_REQ: &str =
        "8201000000000001 1122334455667788 00000000 0001000000000000 00000002 00000000 7006";
    const AER_RSP: &str = "4200000000000000 1122334455667788";
    const TAG: Tag = Tag([0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88]);
    const REQ: Req<'static> = Req {
        req_lim_delta: 1,
        tag: TAG,
        solicited: true,
        lun: 0x0001_0000_0000_0000,
        sense: &[0x70, 0x06],
    };

    #[test]
    fn golden_is_taken_apart() {
        let iu = hex(AER_REQ);
        let v = AerReq::new_checked(&iu).unwrap();
        assert_eq!((v.opcode(), v.sol_not(), v.req_lim_delta()), (Opcode::AER_REQ, 1, 1));
        assert_eq!((v.tag(), v.lun(), v.sense()), (TAG, REQ.lun, REQ.sense));
    }

    #[test]
    fn golden_is_parsed() {
        assert_eq!(Req::parse(&hex(AER_REQ)), Ok(REQ));
        assert_eq!(Rsp::parse(&hex(AER_RSP)), Ok(Rsp { tag: TAG }));
    }

    #[test]
    fn golden_request_is_emitted() {
        let mut b = [0xA5; 40];
        let n = REQ.emit(&mut b);
        assert_eq!(b[..n], hex(AER_REQ));
    }

    #[test]
    fn golden_answer_is_emitted() {
        let mut b = [0xA5; RSP_LEN];
        Rsp { tag: TAG }.emit(&mut b);
        assert_eq!(b, hex(AER_RSP)[..]);
    }

    #[test]
    fn sense_beyond_the_iu_is_refused() {
        for len in [3, 0xFFFF, u32::MAX] {
            let mut iu = hex(AER_REQ);
            iu[28..32].copy_from_slice(&len.to_be_bytes());
            assert_eq!(AerReq::new_checked(&iu).unwrap_err(), WireError::Lengths);
        }
    }
}
