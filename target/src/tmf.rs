//! Task management functions from TSK_MGMT to their answer, and what else reactors tell each other
//! of a logical unit. The rules, and the aborts themselves, are in [`crate::abort`].

use usurp_fabric::Fabric;
use usurp_reactor::turn::Mailbox;
use usurp_srp::target::{IoctxId, RspCode, TmFunc};

use crate::abort::{self, Plan, Tmf, Waits};
use crate::command::Ctx;
use crate::ioctx::{NO_LU, Stage};
use crate::mail::{ReactorId, ToReactor};
use crate::path::Path;

impl<F: Fabric> Path<F> {
    /// A task management function begins.
    pub(crate) fn task_mgmt(
        &mut self,
        at: usize,
        ioctx: IoctxId,
        lu: Option<u16>,
        func: TmFunc,
        task_tag: usurp_srp::Tag,
    ) {
        let conn = self.conns[at].as_mut().expect("the channel is there");
        let io = &mut conn.ioctxs[usize::from(ioctx.0)];
        io.go(Stage::Mgmt);
        io.lu = NO_LU;
        io.serial = io.serial.wrapping_add(1);
        let mut tmf = Tmf {
            channel: at as u16,
            ioctx: ioctx.0,
            waits: Waits::Nothing,
            scope: None,
            untold: 0,
            unheard: 0,
            serial: 0,
        };
        match abort::plan(conn, func, lu) {
            Plan::Answer(code) => return self.answer_tmf(at, ioctx.0, code),
            Plan::Task => {
                tmf.waits = Ctx { conn, sh: &mut self.sh }.abort_task(task_tag, lu);
            }
            Plan::Scope(scope) => {
                let lu = lu.expect("a scope has its logical unit");
                self.abort_scope(lu, scope);
                let all = (1u64 << self.reactors.len()) - 1;
                let others = all & !(1 << self.id.0);
                tmf.waits = Waits::Lu(lu);
                tmf.scope = Some(scope);
                tmf.untold = others;
                tmf.unheard = others;
            }
        }
        self.tmfs.begin(tmf);
        self.step_tmfs();
    }

    /// Takes down what a scope covers on this reactor.
    pub(crate) fn abort_scope(&mut self, lu: u16, scope: crate::mail::Scope) {
        for at in 0..self.conns.len() {
            let Some(conn) = self.conns[at].as_mut() else { continue };
            if abort::applies(scope, conn) {
                Ctx { conn, sh: &mut self.sh }.abort_lu(lu);
                self.mark_dirty(at);
            }
        }
        abort::side_effects(&mut self.sh, lu, scope);
    }

    /// Task management functions that wait: tell reactors, answer those that are complete.
    pub(crate) fn step_tmfs(&mut self) {
        for slot in 0..abort::TMF_SLOTS {
            let Some(tmf) = self.tmfs.at(slot) else { continue };
            let reactors = &self.reactors;
            let me = TmfRefOf { reactor: self.id, slot: slot as u16 };
            tell_reactors(tmf, reactors, me);
            let tmf = *tmf;
            if tmf.unheard == 0 && self.is_gone(&tmf) {
                self.tmfs.end(slot);
                self.answer_tmf(usize::from(tmf.channel), tmf.ioctx, RspCode::COMPLETE);
            }
        }
        if self.tmfs.refused && self.tmfs.has_room() {
            self.tmfs.refused = false;
            self.offer_all_held();
        }
        self.answer_foreign();
    }

    /// Channels whose IUs wait are looked at again when they are flushed.
    fn offer_all_held(&mut self) {
        for at in 0..self.conns.len() {
            if self.conns[at].as_ref().is_some_and(|c| !c.held.is_empty()) {
                self.mark_dirty(at);
            }
        }
    }

    /// Whether everything a function waits for on this reactor is gone.
    pub(crate) fn is_gone(&self, tmf: &Tmf) -> bool {
        match tmf.waits {
            Waits::Nothing => true,
            Waits::Lu(lu) => self.sh.lus[usize::from(lu)].aborting == 0,
            Waits::Command(id, serial) => {
                let conn = self.conns[usize::from(tmf.channel)].as_ref();
                let io = &conn.expect("its channel is there").ioctxs[usize::from(id)];
                io.serial != serial || io.stage() == Stage::Free
            }
        }
    }

    /// Answers other reactors whose scope is clear here.
    pub(crate) fn answer_foreign(&mut self) {
        let mut i = 0;
        while i < self.tmfs.foreign.len() {
            let foreign = self.tmfs.foreign[i];
            let clear = self.sh.lus[usize::from(foreign.lu)].aborting == 0;
            let to = &self.reactors[usize::from(foreign.tmf.reactor.0)];
            let from = self.id;
            let done = ToReactor::AbortDone { tmf: foreign.tmf, from };
            if clear && (to.try_send(done).is_ok() || to.is_gone()) {
                self.tmfs.foreign.swap_remove(i);
            } else {
                i += 1;
            }
        }
    }

    /// Posts the answer to a task management function.
    pub(crate) fn answer_tmf(&mut self, at: usize, id: u16, code: RspCode) {
        let conn = self.conns[at].as_mut().expect("its channel is there");
        conn.ioctxs[usize::from(id)].go(Stage::Rsp);
        let buf = conn.send.bytes_mut(u32::from(id));
        let len = conn.srp.tsk_rsp(IoctxId(id), code, buf);
        conn.push_rsp(id, len as u32);
        self.mark_dirty(at);
    }

    /// Tells other reactors which logical units were stopped or started here.
    pub(crate) fn tell_stops(&mut self) {
        self.sh.stop_changed = false;
        for (at, lu) in self.sh.lus.iter_mut().enumerate().filter(|(_, lu)| lu.untold != 0) {
            for (to, mailbox) in self.reactors.iter().enumerate() {
                let mail = ToReactor::Stopped { lu: at as u16, stopped: lu.stopped_told };
                let told = to == usize::from(self.id.0) || mailbox.try_send(mail).is_ok();
                lu.untold &= !(u64::from(told) << to);
            }
            lu.untold &= (1 << self.reactors.len()) - 1;
            self.sh.stop_changed |= lu.untold != 0;
        }
    }
}

struct TmfRefOf {
    reactor: ReactorId,
    slot: u16,
}

/// Sends a function's request to the reactors that have not had it.
fn tell_reactors<E>(tmf: &mut Tmf, reactors: &[Mailbox<ToReactor<E>>], me: TmfRefOf) {
    let (Some(scope), Waits::Lu(lu)) = (tmf.scope, tmf.waits) else { return };
    let name = crate::mail::TmfRef { reactor: me.reactor, slot: me.slot, serial: tmf.serial };
    for (at, mailbox) in reactors.iter().enumerate() {
        let bit = 1u64 << at;
        if tmf.untold & bit != 0 {
            let mail = ToReactor::Abort { tmf: name, lu, scope };
            if mailbox.try_send(mail).is_ok() {
                tmf.untold &= !bit;
            }
        }
    }
}
