//! SRP_RSP, 36 bytes + response data + sense data (reference 1.8, SRP r16a 6.9).
//!
//! ```text
//!   0 opcode  1 sol_not  4 req_lim_delta 4  8 tag 8  18 flags  19 status  20 data_out_res_cnt 4
//!  24 data_in_res_cnt 4  28 sense_data_len 4  32 resp_data_len 4 |
//!  36 response data R | 36+R sense data S |
//! ```
//! Invariant of `emit_*`: 36 + R + S is the number of bytes returned (known-bugs A16).

use super::{Opcode, SOL_NOT, WireError, be32, bytes_at, head, head_mut, put_at};
use crate::{Residual, Tag};

mod at {
    pub const OPCODE: usize = 0;
    pub const SOL_NOT: usize = 1;
    pub const REQ_LIM_DELTA: usize = 4;
    pub const TAG: usize = 8;
    pub const FLAGS: usize = 18;
    pub const STATUS: usize = 19;
    pub const DATA_OUT_RES_CNT: usize = 20;
    pub const DATA_IN_RES_CNT: usize = 24;
    pub const SENSE_DATA_LEN: usize = 28;
    pub const RESP_DATA_LEN: usize = 32;
}

/// Bytes of the fixed part.
pub const LEN: usize = 36;
/// Bytes of response data: three reserved and RSP_CODE.
pub const RESP_DATA_LEN: usize = 4;

const _: () = assert!(at::RESP_DATA_LEN + 4 == LEN);

/// Response data is present.
pub const FLAG_RSPVALID: u8 = 0x01;
/// Sense data is present.
pub const FLAG_SNSVALID: u8 = 0x02;
/// Data-out residual is over.
pub const FLAG_DOOVER: u8 = 0x04;
/// Data-out residual is under.
pub const FLAG_DOUNDER: u8 = 0x08;
/// Data-in residual is over.
pub const FLAG_DIOVER: u8 = 0x10;
/// Data-in residual is under.
pub const FLAG_DIUNDER: u8 = 0x20;

/// RSP_CODE of the response data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RspCode(pub u8);

impl RspCode {
    /// No failure; the task management function is complete.
    pub const COMPLETE: RspCode = RspCode(0x00);
    /// Request fields invalid.
    pub const FIELDS_INVALID: RspCode = RspCode(0x02);
    /// Task management function not supported.
    pub const NOT_SUPPORTED: RspCode = RspCode(0x04);
    /// Task management function failed.
    pub const FAILED: RspCode = RspCode(0x05);
}

/// A view of a response whose lengths are proven to lie inside the received bytes.
#[derive(Clone, Copy, Debug)]
pub struct Rsp<'a> {
    /// The fixed part.
    head: &'a [u8; LEN],
    /// R bytes; empty without RSPVALID.
    resp_data: &'a [u8],
    /// S bytes; empty without SNSVALID.
    sense: &'a [u8],
}

impl<'a> Rsp<'a> {
    /// Proves the fixed part and both variable lengths, summed in 64 bits.
    #[inline]
    pub fn new_checked(iu: &'a [u8]) -> Result<Rsp<'a>, WireError> {
        let head = head::<LEN>(iu)?;
        let flags = head[at::FLAGS];
        let len_if = |flag: u8, len: u32| if flags & flag != 0 { u64::from(len) } else { 0 };
        let r = len_if(FLAG_RSPVALID, be32::<{ at::RESP_DATA_LEN }, LEN>(head));
        let s = len_if(FLAG_SNSVALID, be32::<{ at::SENSE_DATA_LEN }, LEN>(head));
        let tail = &iu[LEN..];
        if r + s > tail.len() as u64 {
            return Err(WireError::Lengths);
        }
        let (resp_data, rest) = tail.split_at(r as usize);
        Ok(Rsp { head, resp_data, sense: &rest[..s as usize] })
    }

    /// The opcode.
    #[inline]
    pub fn opcode(&self) -> Opcode {
        Opcode(self.head[at::OPCODE])
    }
    /// Bit 0: solicited notification.
    pub fn sol_not(&self) -> u8 {
        self.head[at::SOL_NOT]
    }
    /// Credits granted; signed in principle.
    #[inline]
    pub fn req_lim_delta(&self) -> i32 {
        be32::<{ at::REQ_LIM_DELTA }, LEN>(self.head) as i32
    }
    /// The request's tag.
    #[inline]
    pub fn tag(&self) -> Tag {
        Tag(bytes_at::<{ at::TAG }, 8, LEN>(self.head))
    }
    /// Validity and residual flags.
    #[inline]
    pub fn flags(&self) -> u8 {
        self.head[at::FLAGS]
    }
    /// SCSI status.
    #[inline]
    pub fn status(&self) -> u8 {
        self.head[at::STATUS]
    }
    /// Data-out residual; UNDER wins should a target set both flags, as with Linux.
    #[inline]
    pub fn data_out(&self) -> Residual {
        let count = be32::<{ at::DATA_OUT_RES_CNT }, LEN>(self.head);
        residual(self.flags(), FLAG_DOUNDER, FLAG_DOOVER, count)
    }
    /// Data-in residual; UNDER wins should a target set both flags.
    #[inline]
    pub fn data_in(&self) -> Residual {
        let count = be32::<{ at::DATA_IN_RES_CNT }, LEN>(self.head);
        residual(self.flags(), FLAG_DIUNDER, FLAG_DIOVER, count)
    }
    /// Response data.
    pub fn resp_data(&self) -> &'a [u8] {
        self.resp_data
    }
    /// RSP_CODE, when there are at least 4 bytes of response data.
    #[inline]
    pub fn rsp_code(&self) -> Option<RspCode> {
        self.resp_data.get(3).map(|&code| RspCode(code))
    }
    /// Sense data.
    #[inline]
    pub fn sense(&self) -> &'a [u8] {
        self.sense
    }
}

#[inline]
fn residual(flags: u8, under: u8, over: u8, count: u32) -> Residual {
    if flags & under != 0 {
        Residual::Under(count)
    } else if flags & over != 0 {
        Residual::Over(count)
    } else {
        Residual::None
    }
}

/// What every response says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// The request's tag.
    pub tag: Tag,
    /// Credits granted.
    pub req_lim_delta: u32,
    /// The initiator asked for a solicited event and gets one.
    pub solicited: bool,
}

/// Writes the response to a command and returns its length. Sense is cut to what `buf` holds
/// (reference 4.10).
#[inline]
pub fn emit_cmd(
    buf: &mut [u8],
    head: Head,
    status: u8,
    data_out: Residual,
    data_in: Residual,
    sense: &[u8],
) -> usize {
    assert!(buf.len() >= LEN, "a response needs {LEN} bytes");
    let sense = &sense[..sense.len().min(buf.len() - LEN)];
    let b = head_mut::<LEN>(buf);
    let mut flags = if sense.is_empty() { 0 } else { FLAG_SNSVALID };
    let (out_flag, out_count) = residual_bits(data_out, FLAG_DOUNDER, FLAG_DOOVER);
    let (in_flag, in_count) = residual_bits(data_in, FLAG_DIUNDER, FLAG_DIOVER);
    flags |= out_flag | in_flag;
    emit_head(b, head, flags, status);
    put_at::<{ at::DATA_OUT_RES_CNT }, 4, LEN>(b, out_count.to_be_bytes());
    put_at::<{ at::DATA_IN_RES_CNT }, 4, LEN>(b, in_count.to_be_bytes());
    put_at::<{ at::SENSE_DATA_LEN }, 4, LEN>(b, (sense.len() as u32).to_be_bytes());
    buf[LEN..LEN + sense.len()].copy_from_slice(sense);
    LEN + sense.len()
}

/// Writes the response to a TSK_MGMT and returns its length. It always carries RSPVALID and 4 bytes
/// of response data, on success too (known-bugs E1).
pub fn emit_tm(buf: &mut [u8], head: Head, code: RspCode) -> usize {
    assert!(buf.len() >= LEN + RESP_DATA_LEN, "a task management response needs 40 bytes");
    let b = head_mut::<LEN>(buf);
    emit_head(b, head, FLAG_RSPVALID, 0);
    put_at::<{ at::RESP_DATA_LEN }, 4, LEN>(b, (RESP_DATA_LEN as u32).to_be_bytes());
    buf[LEN..LEN + RESP_DATA_LEN].copy_from_slice(&[0, 0, 0, code.0]);
    LEN + RESP_DATA_LEN
}

#[inline]
fn emit_head(b: &mut [u8; LEN], head: Head, flags: u8, status: u8) {
    *b = [0; LEN];
    b[at::OPCODE] = Opcode::RSP.0;
    b[at::SOL_NOT] = if head.solicited { SOL_NOT } else { 0 };
    put_at::<{ at::REQ_LIM_DELTA }, 4, LEN>(b, head.req_lim_delta.to_be_bytes());
    put_at::<{ at::TAG }, 8, LEN>(b, head.tag.0);
    b[at::FLAGS] = flags;
    b[at::STATUS] = status;
}

#[inline]
fn residual_bits(residual: Residual, under: u8, over: u8) -> (u8, u32) {
    match residual {
        Residual::None => (0, 0),
        Residual::Under(count) => (under, count),
        Residual::Over(count) => (over, count),
    }
}

#[cfg(test)]
mod tests {
    use super::super::golden::{RSP_SENSE, RSP_TM, hex};
    use super::*;

    const SENSE: [u8; 18] = [0x70, 0, 5, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x24, 0, 0, 0, 0, 0];
    const CMD_HEAD: Head =
        Head { tag: Tag([5, 0, 1, 0, 0, 0, 0, 0]), req_lim_delta: 1, solicited: false };
    const TM_HEAD: Head =
        Head { tag: Tag([1, 0, 0, 0x80, 0, 0, 0, 0]), req_lim_delta: 1, solicited: false };

    #[test]
    fn golden_check_condition_is_taken_apart() {
        let iu = hex(RSP_SENSE);
        let v = Rsp::new_checked(&iu).unwrap();
        assert_eq!((v.opcode(), v.sol_not(), v.req_lim_delta()), (Opcode::RSP, 0, 1));
        assert_eq!((v.tag(), v.flags(), v.status()), (CMD_HEAD.tag, FLAG_SNSVALID, 2));
        assert_eq!((v.data_out(), v.data_in()), (Residual::None, Residual::None));
        assert_eq!((v.sense(), v.rsp_code()), (&SENSE[..], None));
    }

    #[test]
    fn golden_check_condition_is_emitted() {
        let mut b = [0xA5; 64];
        let n = emit_cmd(&mut b, CMD_HEAD, 2, Residual::None, Residual::None, &SENSE);
        assert_eq!(b[..n], hex(RSP_SENSE));
        assert!(b[n..].iter().all(|&x| x == 0xA5));
    }

    #[test]
    fn golden_tm_response_is_taken_apart() {
        let iu = hex(RSP_TM);
        let v = Rsp::new_checked(&iu).unwrap();
        assert_eq!((v.tag(), v.flags()), (TM_HEAD.tag, FLAG_RSPVALID));
        assert_eq!((v.rsp_code(), v.resp_data().len()), (Some(RspCode::COMPLETE), 4));
    }

    #[test]
    fn golden_tm_response_is_emitted() {
        let mut b = [0xA5; 40];
        assert_eq!(emit_tm(&mut b, TM_HEAD, RspCode::COMPLETE), 40);
        assert_eq!(b, hex(RSP_TM)[..]);
    }

    #[test]
    fn sense_is_cut_to_the_buffer() {
        let mut b = [0xA5; 40];
        let n = emit_cmd(&mut b, CMD_HEAD, 2, Residual::None, Residual::None, &[7; 96]);
        let v = Rsp::new_checked(&b[..n]).unwrap();
        assert_eq!((n, v.sense()), (40, &[7; 4][..]));
    }

    #[test]
    fn no_room_for_sense_means_no_snsvalid() {
        let mut b = [0xA5; 36];
        let n = emit_cmd(&mut b, CMD_HEAD, 2, Residual::None, Residual::None, &SENSE);
        assert_eq!((n, Rsp::new_checked(&b).unwrap().flags()), (36, 0));
    }

    #[test]
    fn residuals_set_flag_and_count_of_their_direction() {
        let cases = [Residual::None, Residual::Over(7), Residual::Under(0x0102_0304)];
        for out in cases {
            for inn in cases {
                let mut b = [0xA5; 36];
                emit_cmd(&mut b, CMD_HEAD, 0, out, inn, &[]);
                let v = Rsp::new_checked(&b).unwrap();
                assert_eq!((v.data_out(), v.data_in()), (out, inn));
            }
        }
    }

    #[test]
    fn lengths_near_2_to_the_32_are_refused() {
        for (r, s) in
            [(u32::MAX, 0), (0, u32::MAX), (u32::MAX, u32::MAX), (4, 1), (1 << 31, 1 << 31)]
        {
            let mut iu = hex(RSP_TM);
            iu[18] = FLAG_RSPVALID | FLAG_SNSVALID;
            iu[28..32].copy_from_slice(&s.to_be_bytes());
            iu[32..36].copy_from_slice(&r.to_be_bytes());
            assert_eq!(Rsp::new_checked(&iu).unwrap_err(), WireError::Lengths);
        }
    }

    #[test]
    fn lengths_without_their_flag_do_not_count() {
        let mut iu = hex(RSP_TM);
        iu[28..32].copy_from_slice(&u32::MAX.to_be_bytes());
        assert!(Rsp::new_checked(&iu).unwrap().sense().is_empty());
    }
}
