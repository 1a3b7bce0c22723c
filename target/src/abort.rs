//! Task management: taking commands down, on this reactor and on the others.
//!
//! The rule that everything here serves: once a task management function is answered, nothing of
//! the commands it took down may reach the initiator any more, neither an RDMA operation nor a
//! response (Linux frees and re-uses tag and R_Keys at once). So a command that waits is ended on
//! the spot, one that is in flight is marked and ended when its RDMA or bdev I/O completes, and the
//! answer waits for all of them; also for responses that are posted already, which nothing else
//! would keep from overtaking it on another channel.
//!
//! ```text
//!   TSK_MGMT ──> Tmf slot ──> this reactor: end or mark ──┐
//!                    └──────> other reactors: Abort ──────┼─> all gone ──> response
//!                                       <── AbortDone ────┘
//! ```

use usurp_scsi::Ua;
use usurp_srp::target::{IoctxId, RspCode, TmFunc};

use crate::command::Ctx;
use crate::conn::Conn;
use crate::ioctx::{NO_LU, Stage};
use crate::mail::{ReactorId, Scope, TmfRef};
use crate::shared::Shared;

/// Task management functions under way at a time on one reactor; more than that wait as IUs do.
pub const TMF_SLOTS: usize = 64;

/// What a task management function waits for.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Waits {
    /// One command of its own channel: ioctx and serial.
    Command(u16, u32),
    /// All aborted commands on that logical unit, here and on the reactors not yet heard from.
    Lu(u16),
    /// Nothing.
    Nothing,
}

/// One task management function under way.
#[derive(Copy, Clone, Debug)]
pub struct Tmf {
    /// Channel that gets the answer.
    pub channel: u16,
    /// Its ioctx.
    pub ioctx: u16,
    /// What it waits for here.
    pub waits: Waits,
    /// What others were asked to do.
    pub scope: Option<Scope>,
    /// Reactors that have not been told yet (their mailbox was full), a bit each.
    pub untold: u64,
    /// Reactors that have not answered, a bit each.
    pub unheard: u64,
    /// Distinguishes successive users of the slot.
    pub serial: u32,
}

/// A request of another reactor that waits until everything in its scope is gone here.
#[derive(Copy, Clone, Debug)]
pub struct Foreign {
    /// Whom to answer.
    pub tmf: TmfRef,
    /// The logical unit.
    pub lu: u16,
}

/// All functions under way on a reactor.
pub struct Tmfs {
    /// By slot.
    slots: Box<[Option<Tmf>]>,
    /// Slots in use.
    in_use: usize,
    /// Serial for the next one.
    serial: u32,
    /// Other reactors' requests: at most one for each of their slots.
    pub foreign: Vec<Foreign>,
    /// A request had to wait because no slot was free.
    pub refused: bool,
}

impl Tmfs {
    /// An empty table; `reactors` bounds the requests of others.
    pub fn new(reactors: usize) -> Tmfs {
        assert!(reactors < 64, "reactors are counted in a 64-bit set");
        Tmfs {
            slots: (0..TMF_SLOTS).map(|_| None).collect(),
            in_use: 0,
            serial: 0,
            foreign: Vec::with_capacity(TMF_SLOTS * reactors),
            refused: false,
        }
    }

    /// Whether none is under way, own or foreign.
    #[inline]
    pub fn is_idle(&self) -> bool {
        self.in_use == 0 && self.foreign.is_empty()
    }

    /// Whether another one can begin.
    pub fn has_room(&self) -> bool {
        self.in_use < TMF_SLOTS
    }

    /// Enters one.
    pub fn begin(&mut self, mut tmf: Tmf) -> usize {
        let at = self.slots.iter().position(Option::is_none).expect("has_room was asked first");
        self.serial = self.serial.wrapping_add(1);
        tmf.serial = self.serial;
        self.slots[at] = Some(tmf);
        self.in_use += 1;
        at
    }

    /// Another reactor's request. A slot of its table that is used anew has dropped its earlier
    /// request.
    pub fn begin_foreign(&mut self, tmf: TmfRef, lu: u16) {
        let same = |f: &&mut Foreign| f.tmf.reactor == tmf.reactor && f.tmf.slot == tmf.slot;
        match self.foreign.iter_mut().find(same) {
            Some(old) => *old = Foreign { tmf, lu },
            None => self.foreign.push(Foreign { tmf, lu }),
        }
    }

    /// Ends one.
    pub fn end(&mut self, at: usize) -> Tmf {
        self.in_use -= 1;
        self.slots[at].take().expect("the slot is in use")
    }

    /// One by slot.
    pub fn at(&mut self, at: usize) -> Option<&mut Tmf> {
        self.slots[at].as_mut()
    }

    /// Drops those whose channel is going down; answers of others to them are ignored by their
    /// serial.
    pub fn forget_channel(&mut self, channel: u16, mut each: impl FnMut(u16)) {
        for slot in self.slots.iter_mut() {
            if let Some(tmf) = slot.filter(|t| t.channel == channel) {
                *slot = None;
                self.in_use -= 1;
                each(tmf.ioctx);
            }
        }
    }

    /// Another reactor has nothing in scope any more.
    pub fn heard(&mut self, tmf: TmfRef, from: ReactorId) {
        if let Some(t) = self.at(usize::from(tmf.slot)).filter(|t| t.serial == tmf.serial) {
            t.unheard &= !(1 << from.0);
        }
    }
}

/// What a task management function asks of the target, or the code that refuses it.
pub enum Plan {
    /// Abort one command of the same channel.
    Task,
    /// Abort what is in that scope on all reactors.
    Scope(Scope),
    /// Answer at once.
    Answer(RspCode),
}

/// Decides what a function does.
pub fn plan(conn: &Conn, func: TmFunc, lu: Option<u16>) -> Plan {
    let me = conn.nexus.id;
    match func {
        TmFunc::AbortTask => Plan::Task,
        TmFunc::AbortTaskSet | TmFunc::ClearTaskSet | TmFunc::LunReset if lu.is_none() => {
            Plan::Answer(RspCode::FAILED)
        }
        TmFunc::AbortTaskSet => Plan::Scope(Scope::Nexus(me)),
        TmFunc::ClearTaskSet => Plan::Scope(Scope::Clear(me)),
        TmFunc::LunReset => Plan::Scope(Scope::Reset(me)),
        TmFunc::ClearAca | TmFunc::Other(_) => Plan::Answer(RspCode::NOT_SUPPORTED),
    }
}

impl Ctx<'_> {
    /// Takes one command down: at once when nothing of it is in flight, else it is marked. True =
    /// it is in flight.
    pub fn abort(&mut self, id: u16) -> bool {
        let io = &mut self.conn.ioctxs[usize::from(id)];
        let in_flight = match io.stage() {
            Stage::Free | Stage::Mgmt => return false,
            _ if io.aborted => return true,
            // On another channel than the one that gets the answer, nothing keeps the response
            // before it.
            Stage::Rsp => true,
            Stage::Resources => {
                let me = (self.conn.index, id);
                self.sh.waiting.retain(|w| *w != me);
                false
            }
            Stage::Table | Stage::Params | Stage::DataOut | Stage::DataIn => {
                let posted = io.cursor.posted > 0;
                if !posted {
                    self.conn.sq_wait.retain(|w| *w != id);
                }
                posted
            }
            Stage::Bdev => !self.pull_stalled(id),
        };
        if in_flight {
            let io = &mut self.conn.ioctxs[usize::from(id)];
            io.aborted = true;
            if io.lu != NO_LU {
                self.sh.lus[usize::from(io.lu)].aborting += 1;
            }
        } else {
            self.finish_aborted(id);
        }
        in_flight
    }

    /// Takes a command's I/O out of the line before its bdev queue, if it is still there.
    fn pull_stalled(&mut self, id: u16) -> bool {
        let token = self.token(id);
        let io = &mut self.conn.ioctxs[usize::from(id)];
        let Some(pulled) = self.sh.lus[usize::from(io.lu)].pull(token) else { return false };
        io.buf = pulled.complete(usurp_bdev::Status::Aborted).buf;
        self.conn.in_bdev -= 1;
        true
    }

    /// ABORT TASK: the command with that tag, if it is on that logical unit. What the function
    /// waits for.
    pub fn abort_task(&mut self, tag: usurp_srp::Tag, lu: Option<u16>) -> Waits {
        let Some(IoctxId(id)) = self.conn.srp.find(tag) else { return Waits::Nothing };
        let io = &self.conn.ioctxs[usize::from(id)];
        if Some(io.lu) != lu {
            return Waits::Nothing;
        }
        let serial = io.serial;
        if self.abort(id) { Waits::Command(id, serial) } else { Waits::Nothing }
    }

    /// Takes down every command of this channel on a logical unit.
    pub fn abort_lu(&mut self, lu: u16) {
        for id in 0..self.conn.ioctxs.len() as u16 {
            if self.conn.ioctxs[usize::from(id)].lu == lu {
                self.abort(id);
            }
        }
    }

    /// Takes down everything of a channel whose queue pair is in the error state.
    pub fn abort_all(&mut self) {
        for id in 0..self.conn.ioctxs.len() as u16 {
            self.abort(id);
        }
        self.conn.held.clear();
    }
}

/// The part of a scope that falls on one channel.
pub fn applies(scope: Scope, conn: &Conn) -> bool {
    match scope {
        Scope::Nexus(nexus) => conn.nexus.id == nexus,
        Scope::Clear(_) | Scope::Reset(_) => true,
    }
}

/// The effects of a scope beside the aborts: unit attentions for other nexuses, and the reset of
/// the logical unit.
pub fn side_effects(sh: &mut Shared, lu: u16, scope: Scope) {
    match scope {
        Scope::Nexus(_) => {}
        Scope::Clear(me) => {
            sh.for_other_nexuses(lu, me, |n| n.raise(Ua::COMMANDS_CLEARED));
        }
        Scope::Reset(me) => {
            let slot = &mut sh.lus[usize::from(lu)];
            slot.scsi.on_reset();
            slot.stopped_told = false;
            sh.for_other_nexuses(lu, me, |n| n.raise(Ua::LU_RESET));
        }
    }
}
