//! SRP_TSK_MGMT, 48 bytes (reference 1.7, SRP r16a 6.8).
//!
//! ```text
//!   0 opcode  1 sol_not  8 tag 8  20 LUN 8  30 function  32 task_tag 8  40 reserved 8
//! ```

use core::borrow::{Borrow, BorrowMut};

use super::{Opcode, WireError, be64, bytes_at, expect_opcode, head, put_at};
use crate::Tag;

mod at {
    pub const OPCODE: usize = 0;
    pub const SOL_NOT: usize = 1;
    pub const TAG: usize = 8;
    pub const LUN: usize = 20;
    pub const TSK_MGMT_FUNC: usize = 30;
    pub const TASK_TAG: usize = 32;
}

/// Bytes of the IU.
pub const LEN: usize = 48;

const _: () = assert!(at::TASK_TAG + 8 + 8 == LEN);

/// Task management function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TmFunc {
    /// One command of this channel.
    AbortTask,
    /// All commands of this nexus on the LU.
    AbortTaskSet,
    /// All commands of all nexuses on the LU.
    ClearTaskSet,
    /// LOGICAL UNIT RESET.
    LunReset,
    /// CLEAR ACA.
    ClearAca,
    /// Any other code, 0x20 (TARGET RESET of old drafts) among them: answer "not supported".
    Other(u8),
}

impl TmFunc {
    /// Reads the code.
    pub const fn parse(code: u8) -> TmFunc {
        match code {
            0x01 => TmFunc::AbortTask,
            0x02 => TmFunc::AbortTaskSet,
            0x04 => TmFunc::ClearTaskSet,
            0x08 => TmFunc::LunReset,
            0x40 => TmFunc::ClearAca,
            other => TmFunc::Other(other),
        }
    }

    /// The code.
    pub const fn code(self) -> u8 {
        match self {
            TmFunc::AbortTask => 0x01,
            TmFunc::AbortTaskSet => 0x02,
            TmFunc::ClearTaskSet => 0x04,
            TmFunc::LunReset => 0x08,
            TmFunc::ClearAca => 0x40,
            TmFunc::Other(code) => code,
        }
    }
}

/// A view of the IU.
#[derive(Clone, Copy, Debug)]
pub struct TskMgmt<B>(B);

impl<'a> TskMgmt<&'a [u8; LEN]> {
    /// Proves the length.
    pub fn new_checked(iu: &'a [u8]) -> Result<Self, WireError> {
        head(iu).map(TskMgmt)
    }
}

impl<B: Borrow<[u8; LEN]>> TskMgmt<B> {
    /// The opcode.
    pub fn opcode(&self) -> Opcode {
        Opcode(self.0.borrow()[at::OPCODE])
    }
    /// Solicited notification wishes.
    pub fn sol_not(&self) -> u8 {
        self.0.borrow()[at::SOL_NOT]
    }
    /// Tag of this request.
    pub fn tag(&self) -> Tag {
        Tag(bytes_at::<{ at::TAG }, 8, LEN>(self.0.borrow()))
    }
    /// The 8-byte LUN as a big-endian number.
    pub fn lun(&self) -> u64 {
        be64::<{ at::LUN }, LEN>(self.0.borrow())
    }
    /// The function.
    pub fn func(&self) -> TmFunc {
        TmFunc::parse(self.0.borrow()[at::TSK_MGMT_FUNC])
    }
    /// Tag of the command to abort; only meaningful for ABORT TASK.
    pub fn task_tag(&self) -> Tag {
        Tag(bytes_at::<{ at::TASK_TAG }, 8, LEN>(self.0.borrow()))
    }
}

impl<B: BorrowMut<[u8; LEN]>> TskMgmt<B> {
    /// Zeroes all and writes the opcode.
    pub fn init(mut bytes: B) -> Self {
        *bytes.borrow_mut() = [0; LEN];
        bytes.borrow_mut()[at::OPCODE] = Opcode::TSK_MGMT.0;
        TskMgmt(bytes)
    }
    /// Writes the notification wishes.
    pub fn set_sol_not(&mut self, v: u8) {
        self.0.borrow_mut()[at::SOL_NOT] = v;
    }
    /// Writes the tag.
    pub fn set_tag(&mut self, tag: Tag) {
        put_at::<{ at::TAG }, 8, LEN>(self.0.borrow_mut(), tag.0);
    }
    /// Writes the LUN.
    pub fn set_lun(&mut self, lun: u64) {
        put_at::<{ at::LUN }, 8, LEN>(self.0.borrow_mut(), lun.to_be_bytes());
    }
    /// Writes the function.
    pub fn set_func(&mut self, func: TmFunc) {
        self.0.borrow_mut()[at::TSK_MGMT_FUNC] = func.code();
    }
    /// Writes the tag of the command to abort.
    pub fn set_task_tag(&mut self, tag: Tag) {
        put_at::<{ at::TASK_TAG }, 8, LEN>(self.0.borrow_mut(), tag.0);
    }
}

/// The owned form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repr {
    /// Solicited notification wishes.
    pub sol_not: u8,
    /// Tag of this request.
    pub tag: Tag,
    /// Logical unit.
    pub lun: u64,
    /// What to do.
    pub func: TmFunc,
    /// Which command (ABORT TASK).
    pub task_tag: Tag,
}

impl Repr {
    /// Reads the IU.
    pub fn parse(iu: &[u8]) -> Result<Repr, WireError> {
        let v = TskMgmt::new_checked(iu)?;
        expect_opcode::<{ at::OPCODE }, LEN>(v.0, Opcode::TSK_MGMT)?;
        Ok(Repr {
            sol_not: v.sol_not(),
            tag: v.tag(),
            lun: v.lun(),
            func: v.func(),
            task_tag: v.task_tag(),
        })
    }

    /// Writes all 48 bytes.
    pub fn emit(&self, b: &mut [u8; LEN]) {
        let mut v = TskMgmt::init(b);
        v.set_sol_not(self.sol_not);
        v.set_tag(self.tag);
        v.set_lun(self.lun);
        v.set_func(self.func);
        v.set_task_tag(self.task_tag);
    }
}

#[cfg(test)]
mod tests {
    use super::super::golden::{TSK_MGMT, hex};
    use super::*;

    const ABORT: Repr = Repr {
        sol_not: 0,
        tag: Tag([1, 0, 0, 0x80, 0, 0, 0, 0]),
        lun: 0x0001_0000_0000_0000,
        func: TmFunc::AbortTask,
        task_tag: Tag([5, 0, 1, 0, 0, 0, 0, 0]),
    };

    #[test]
    fn golden_is_taken_apart() {
        let iu = hex(TSK_MGMT);
        let v = TskMgmt::new_checked(&iu).unwrap();
        assert_eq!((v.opcode(), v.sol_not(), v.tag()), (Opcode::TSK_MGMT, 0, ABORT.tag));
        assert_eq!((v.lun(), v.func(), v.task_tag()), (ABORT.lun, ABORT.func, ABORT.task_tag));
    }

    #[test]
    fn golden_is_built() {
        let mut v = TskMgmt::init([0xA5; LEN]);
        v.set_tag(ABORT.tag);
        v.set_lun(ABORT.lun);
        v.set_func(TmFunc::AbortTask);
        v.set_task_tag(ABORT.task_tag);
        v.set_sol_not(0);
        assert_eq!(v.0, hex(TSK_MGMT)[..]);
    }

    #[test]
    fn golden_is_parsed() {
        assert_eq!(Repr::parse(&hex(TSK_MGMT)), Ok(ABORT));
        assert_eq!(Repr::parse(&[2; 48]), Err(WireError::Opcode(2)));
        assert!(Repr::parse(&hex(TSK_MGMT)[..47]).is_err());
    }

    #[test]
    fn golden_is_emitted() {
        let mut b = [0xA5; LEN];
        ABORT.emit(&mut b);
        assert_eq!(b, hex(TSK_MGMT)[..]);
    }

    #[test]
    fn unknown_functions_survive() {
        for code in 0..=255 {
            assert_eq!(TmFunc::parse(code).code(), code);
        }
        assert_eq!(TmFunc::parse(0x20), TmFunc::Other(0x20));
    }
}
