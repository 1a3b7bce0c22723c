//! The initiator's side of SRP: login requests, and one channel with its slots, tags and credit.
//!
//! Used by tests (wired to the target role in memory), by `usurp-perf` and by the fio engine.
//! Behaves as Linux `ib_srp` does where that matters: a command needs two credits so that one is
//! left for task management, the response to an ABORT TASK frees the command whatever it says.
//! Never does: I/O, memory registration, retries.
//!
//! ```text
//!   linux_login/Repr -> login_req -> CM REQ ... CM REP -> login_answer -> Granted -> Channel::new
//!   start_cmd / start_tm -> SEND ... RECV -> on_iu -> Event
//! ```

mod build;
mod channel;
mod login;

pub use self::build::{InBuf, OutBuf, StartError, Table};
pub use self::channel::{Bogus, Channel, Config, Done, Event};
pub use self::login::{Granted, LoginError, LoginIu, linux_login, login_answer, login_req};
pub use crate::login::{Format, MultiChannel};
pub use crate::wire::cmd::TaskAttr;
pub use crate::wire::desc::MemDesc;
pub use crate::wire::rsp::RspCode;
pub use crate::wire::tsk_mgmt::TmFunc;
