//! Wire formats of SRP: one file per IU (reference section 1).
//!
//! Each file has a view over bytes with its offsets in a private module `at`. `new_checked` proves
//! the length once; from then on a view holds a `[u8; N]`, every access is at a constant offset,
//! and the compiler refuses an offset outside it (`const { assert!(..) }` below). So no accessor
//! can panic. All integers are big-endian; tags are opaque bytes; values that we don't know
//! survive. Rare IUs also have a small owned form `Repr` with `parse` and `emit`.
//!
//! ```text
//!   bytes --new_checked--> View<&[u8; N]> --getters--> values      (no copy)
//!   bytes --Repr::parse--> Repr --emit--> bytes        (every byte written, reserved ones as 0)
//! ```

pub mod aer;
pub mod cmd;
pub mod cred;
pub mod desc;
pub mod login_rej;
pub mod login_req;
pub mod login_rsp;
pub mod logout;
pub mod rsp;
pub mod tsk_mgmt;

use core::fmt;

/// First byte of an IU. Bit 7: sent by the target. Bit 6: a response (reference 1.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opcode(pub u8);

#[allow(missing_docs)] // the names are the standard's
impl Opcode {
    pub const LOGIN_REQ: Opcode = Opcode(0x00);
    pub const TSK_MGMT: Opcode = Opcode(0x01);
    pub const CMD: Opcode = Opcode(0x02);
    pub const I_LOGOUT: Opcode = Opcode(0x03);
    pub const CRED_RSP: Opcode = Opcode(0x41);
    pub const AER_RSP: Opcode = Opcode(0x42);
    pub const T_LOGOUT: Opcode = Opcode(0x80);
    pub const CRED_REQ: Opcode = Opcode(0x81);
    pub const AER_REQ: Opcode = Opcode(0x82);
    pub const LOGIN_RSP: Opcode = Opcode(0xC0);
    pub const RSP: Opcode = Opcode(0xC1);
    pub const LOGIN_REJ: Opcode = Opcode(0xC2);
}

impl Opcode {
    /// A response answers a request and costs no credit.
    #[inline]
    pub const fn is_response(self) -> bool {
        self.0 & 0x40 != 0
    }

    /// True for IUs that only a target sends.
    #[inline]
    pub const fn is_from_target(self) -> bool {
        self.0 & 0x80 != 0
    }
}

/// Bits of a request's SOL_NOT byte: the initiator asks for a solicited event on success / on
/// failure.
pub const SOL_NOT_SUCCESS: u8 = 0x02;
/// See [`SOL_NOT_SUCCESS`].
pub const SOL_NOT_FAILURE: u8 = 0x04;
/// Bit of a response's SOL_NOT byte.
pub const SOL_NOT: u8 = 0x01;

/// Data-buffer format bits of login IUs: direct descriptors.
pub const BUF_FMT_DIRECT: u16 = 0x0002;
/// Data-buffer format bits of login IUs: indirect descriptors.
pub const BUF_FMT_INDIRECT: u16 = 0x0004;

/// Why bytes are not the IU they were taken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WireError {
    /// Fewer bytes than the fixed part needs.
    Truncated {
        /// Bytes the fixed part needs.
        need: usize,
        /// Bytes there are.
        got: usize,
    },
    /// Another opcode than this IU has.
    Opcode(u8),
    /// A length field reaches beyond the bytes that were received.
    Lengths,
}

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WireError::Truncated { need, got } => write!(f, "IU of {got} bytes, needs {need}"),
            WireError::Opcode(op) => write!(f, "unexpected opcode 0x{op:02x}"),
            WireError::Lengths => f.write_str("length fields reach beyond the IU"),
        }
    }
}

impl std::error::Error for WireError {}

/// The first `N` bytes of an IU, or how many are missing.
#[inline]
pub(crate) fn head<const N: usize>(bytes: &[u8]) -> Result<&[u8; N], WireError> {
    bytes.first_chunk::<N>().ok_or(WireError::Truncated { need: N, got: bytes.len() })
}

/// The first `N` bytes of an outgoing buffer. Our own buffer: it is large enough or that is our
/// bug.
#[inline]
pub(crate) fn head_mut<const N: usize>(buf: &mut [u8]) -> &mut [u8; N] {
    buf.first_chunk_mut::<N>().expect("the caller's buffer holds the fixed part of the IU")
}

/// Fails unless byte `AT` holds `op`.
#[inline]
pub(crate) fn expect_opcode<const AT: usize, const N: usize>(
    b: &[u8; N],
    op: Opcode,
) -> Result<(), WireError> {
    const { assert!(AT < N) }
    if b[AT] == op.0 { Ok(()) } else { Err(WireError::Opcode(b[AT])) }
}

/// `K` bytes at the constant offset `AT`, proven inside at compile time.
#[inline(always)]
pub(crate) fn bytes_at<const AT: usize, const K: usize, const N: usize>(b: &[u8; N]) -> [u8; K] {
    const { assert!(AT + K <= N) }
    let mut out = [0; K];
    out.copy_from_slice(&b[AT..AT + K]);
    out
}

/// Writes `K` bytes at the constant offset `AT`, proven inside at compile time.
#[inline(always)]
pub(crate) fn put_at<const AT: usize, const K: usize, const N: usize>(b: &mut [u8; N], v: [u8; K]) {
    const { assert!(AT + K <= N) }
    b[AT..AT + K].copy_from_slice(&v);
}

#[inline(always)]
pub(crate) fn be16<const AT: usize, const N: usize>(b: &[u8; N]) -> u16 {
    u16::from_be_bytes(bytes_at::<AT, 2, N>(b))
}

#[inline(always)]
pub(crate) fn be32<const AT: usize, const N: usize>(b: &[u8; N]) -> u32 {
    u32::from_be_bytes(bytes_at::<AT, 4, N>(b))
}

#[inline(always)]
pub(crate) fn be64<const AT: usize, const N: usize>(b: &[u8; N]) -> u64 {
    u64::from_be_bytes(bytes_at::<AT, 8, N>(b))
}

/// Helpers of the wire tests: golden vectors are written as hex, as in the reference's Appendix A.
#[cfg(test)]
pub(crate) mod golden {
    /// Bytes of a hex dump; blanks are ignored.
    pub fn hex(text: &str) -> Vec<u8> {
        let digits: Vec<u8> = text.bytes().filter(|b| !b.is_ascii_whitespace()).collect();
        let pair = |p: &[u8]| u8::from_str_radix(core::str::from_utf8(p).unwrap(), 16).unwrap();
        digits.chunks(2).map(pair).collect()
    }

    /// LOGIN_REQ of a default Linux initiator's first channel.
    pub const LOGIN_REQ: &str = "00000000000000000000000000000000
        00002044000000000006800000440000 0000000000000000505400fffe4a0b7b
        0002c90300a1b2c40002c90300a1b2c4";
    /// The same through RDMA/CM.
    pub const LOGIN_REQ_CM: &str = "00000000000000000006800000002044
        0000000000000000505400fffe4a0b7b 0002c90300a1b2c40002c90300a1b2c4 0044000000000000";
    /// Delta 128, max_it 8276, max_ti 8260, immediate data supported.
    pub const LOGIN_RSP: &str = "c0000000000000800000000000000000
        00002054000020440006800000000000 00000000000000000000000000000000 00000000";
    /// Reason 0x00010002.
    pub const LOGIN_REJ: &str = "c2000000000100020000000000000000
        00000000000000000006000000000000";
    /// READ(10), direct.
    pub const READ10: &str = "02000000000100000500010000000000
        00000000000100000000000000000000 28000000100000000800000000000000
        00007f12345600000000a1b200001000";
    /// WRITE(10), two descriptors in the IU.
    pub const WRITE10_INDIRECT: &str = "02000000002002000500010000000000
        00000000000100000000000000000000 2a000000100000001000000000000000
        11223344556600000000beef00000020 0000200000007f00000010000000a1b2
        0000100000007f00000090000000a1b2 00001000";
    /// WRITE(10), 512 bytes of immediate data at 68 (without the data; bytes 52-67 are undefined).
    pub const WRITE10_IMM: &str = "02000000003000000500010000000000
        00000000000100000000000000000000 2a000000100000000100000000000000
        00000200eeeeeeeeeeeeeeeeeeeeeeee eeeeeeee";
    /// CHECK CONDITION 5/24/00.
    pub const RSP_SENSE: &str = "c1000000000000010500010000000000
        00000202000000000000000000000012 00000000700005000000000a00000000 240000000000";
    /// ABORT TASK of the READ(10).
    pub const TSK_MGMT: &str = "01000000000000000100008000000000
        00000000000100000000000000000100 05000100000000000000000000000000";
    /// Its success response.
    pub const RSP_TM: &str = "c1000000000000010100008000000000
        00000100000000000000000000000000 0000000400000000";
    /// CRED_REQ granting 2.
    pub const CRED_REQ: &str = "8100000000000002 1122334455667788";
    /// Its answer.
    pub const CRED_RSP: &str = "4100000000000000 1122334455667788";

    /// WRITE10_IMM with its 512 bytes of 0xAA.
    pub fn write10_imm() -> Vec<u8> {
        let mut iu = hex(WRITE10_IMM);
        iu.resize(580, 0xAA);
        iu
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opcode_bits_tell_direction_and_kind() {
        assert!(Opcode::CRED_RSP.is_response() && !Opcode::CRED_RSP.is_from_target());
        assert!(Opcode::RSP.is_response() && Opcode::RSP.is_from_target());
        assert!(!Opcode::CMD.is_response() && !Opcode::CRED_REQ.is_response());
    }

    #[test]
    fn a_short_head_says_what_is_missing() {
        let e = head::<16>(&[0; 15]).unwrap_err();
        assert_eq!(e, WireError::Truncated { need: 16, got: 15 });
        assert_eq!(e.to_string(), "IU of 15 bytes, needs 16");
    }
}
