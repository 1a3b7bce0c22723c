//! What a host does on channels that are up: commands, task management, answers, disasters.

use usurp_reactor::Nanos;
use usurp_srp::initiator::{Event, InBuf, OutBuf, RspCode, Table, TmFunc};

use super::buffers::{PIECES_MAX, Placed, Purpose, UNTOUCHED};
use super::{Cmd, Env, Host, Life, Tm};
use crate::model::End;
use crate::net::Access;
use crate::profile::gap;

/// The LUN field of a small LUN: peripheral device addressing.
fn lun_field(lun: u16) -> u64 {
    u64::from(lun) << 48
}

/// How data are described to the target.
enum Form {
    None,
    Immediate,
    Direct,
    /// With so many descriptors in the IU; fewer than all make a partial table.
    Table(usize),
}

impl Host {
    /// Posts receives again, some time after they were used.
    pub(super) fn repost(&mut self, at: usize, env: &mut Env<'_>) -> usize {
        let chan = &mut self.chans[at];
        let mut count = 0;
        while chan.repost.front().is_some_and(|t| *t <= env.net.now) {
            chan.repost.pop_front();
            env.net.init_post_recv(chan.link);
            count += 1;
        }
        count
    }

    /// Takes what the target sent.
    pub(super) fn receive(&mut self, at: usize, env: &mut Env<'_>) -> usize {
        let mut count = 0;
        while self.chans[at].life == Life::Up {
            let link = self.chans[at].link;
            let Some(iu) = env.net.init_recv(link) else { break };
            count += 1;
            let late = env.net.config.rnr_ppm;
            let wait = if env.net.fault(late) { 50_000 } else { 0 };
            let due = env.net.now + wait;
            let last = self.chans[at].repost.back().map_or(0, |t| *t);
            self.chans[at].repost.push_back(due.max(last));
            // Linux posts the receive before it does anything with the answer.
            self.repost(at, env);
            self.on_iu(at, &iu, env);
        }
        count
    }

    fn on_iu(&mut self, at: usize, iu: &[u8], env: &mut Env<'_>) {
        let (host, link) = (self.config.index, self.chans[at].link);
        let srp = self.chans[at].srp.as_mut().expect("an Up channel has its state");
        match srp.on_iu(iu) {
            Event::Done(done) => {
                let position = self.chans[at].cmds.iter().position(|c| c.user == done.user);
                let position = position.expect("the harness knows its commands");
                let cmd = self.chans[at].cmds.remove(position);
                self.on_done(cmd, &done, env);
            }
            Event::TmDone { user, code, aborted, .. } => {
                let complete = code == Some(RspCode::COMPLETE);
                assert!(complete, "host {host} link {link}: task management ended with {code:?}");
                self.on_tm(at, user, aborted, env);
            }
            Event::CredReq { answer, .. } => env.net.init_send(link, &answer),
            Event::Aer { answer, .. } => env.net.init_send(link, &answer),
            Event::Logout { .. } => {}
            Event::Bogus(bogus) => panic!("host {host} link {link}: {bogus:?} in {iu:x?}"),
        }
    }

    fn on_done(&mut self, cmd: Cmd, done: &usurp_srp::initiator::Done<'_>, env: &mut Env<'_>) {
        let view = &self.config.views[cmd.plan.view];
        let memory = &env.net.memory[self.config.index];
        let is_in = cmd.plan.in_len > 0;
        let data = match &cmd.placed {
            Some(placed) if is_in => placed.get(memory),
            _ => Vec::new(),
        };
        let judged = cmd.plan.judge(done, view, &data, UNTOUCHED, env.model);
        let end = judged.unwrap_or_else(|why| {
            let (user, cdb) = (cmd.user, cmd.plan.cdb);
            panic!("host {}: command {user:#x} {cdb:x?}: {why}", self.config.index)
        });
        if let Some(number) = cmd.plan.write {
            env.model.end_write(number, end);
        }
        *env.answered += 1;
        env.net.note("done", cmd.user, done.status.into());
        self.free(cmd.placed, env);
    }

    /// A task management function was answered: nothing of its victims may happen any more.
    fn on_tm(&mut self, at: usize, user: u64, aborted: Option<u64>, env: &mut Env<'_>) {
        let chan = &mut self.chans[at];
        let position = chan.tms.iter().position(|t| t.user == user);
        let tm = chan.tms.remove(position.expect("the harness knows its functions"));
        env.net.note("tm-done", user, aborted.unwrap_or(0));
        if let Some(unit) = tm.unit {
            env.resets[unit].count += 1;
        }
        for victim in tm.victims {
            self.take_down(at, victim, true, env);
        }
        for (other, victim) in tm.elsewhere {
            // Its answer may have come before this one, and waits to be looked at.
            self.receive(other, env);
            self.take_down(other, victim, true, env);
        }
        if let Some(victim) = aborted {
            self.take_down(at, victim, false, env);
        }
    }

    /// A command is gone without an answer, and its memory is used again at once.
    fn take_down(&mut self, at: usize, victim: u64, forget: bool, env: &mut Env<'_>) {
        let chan = &mut self.chans[at];
        let Some(position) = chan.cmds.iter().position(|c| c.user == victim) else { return };
        let cmd = chan.cmds.remove(position);
        if forget {
            let srp = chan.srp.as_mut().expect("an Up channel has its state");
            let forgotten = srp.forget(cmd.tag);
            assert_eq!(forgotten, Some(victim), "the harness and its channel agree");
        }
        if let Some(number) = cmd.plan.write {
            env.model.end_write(number, End::Unknown);
        }
        self.free(cmd.placed, env);
    }

    /// Answers that do not come.
    pub(super) fn overdue(&mut self, at: usize, env: &mut Env<'_>) -> usize {
        let now = env.net.now;
        let limit = self.config.answer_ns;
        let late = |sent_at: Nanos| now >= sent_at + limit;
        let chan = &self.chans[at];
        if chan.life != Life::Up {
            return 0;
        }
        if chan.logged_out {
            let lost = chan.cmds.iter().any(|c| late(c.sent_at));
            assert!(!lost, "host {}: a logout is not followed by the end", self.config.index);
            return 0;
        }
        if let Some(tm) = chan.tms.iter().find(|t| late(t.sent_at)) {
            let text = self.describe();
            panic!("task management {:#x} has no answer after {limit} ns\n{text}", tm.user);
        }
        let Some(cmd) = chan.cmds.iter().find(|c| !c.aborting && late(c.sent_at)) else {
            return 0;
        };
        let unit = self.config.views[cmd.plan.view].unit;
        if cmd.resets.is_some() && env.resets[unit].mark(env.net) == cmd.resets {
            let text = self.describe();
            panic!("command {:#x} has no answer after {limit} ns\n{text}", cmd.user);
        }
        // Another host's reset may have taken it; then nobody answers it.
        let user = cmd.user;
        usize::from(self.abort(at, user, env))
    }

    /// One random action.
    pub(super) fn act(&mut self, env: &mut Env<'_>) -> usize {
        let up = |c: &super::Chan| c.life == Life::Up && !c.logged_out;
        let ups: Vec<usize> = (0..self.chans.len()).filter(|at| up(&self.chans[*at])).collect();
        if ups.is_empty() {
            return 0;
        }
        let at = self.rng.pick(&ups);
        let d = self.config.disasters.clone();
        let mut dice = self.rng.below(1_000_000);
        let mut hit = |ppm: u64| {
            let hit = dice < ppm;
            dice = if hit { u64::MAX } else { dice - ppm.min(dice) };
            hit
        };
        if hit(d.abort) {
            let Some(user) = self.any_command(at) else { return 0 };
            return usize::from(self.abort(at, user, env));
        }
        if hit(d.reset) {
            return usize::from(self.reset(at, env));
        }
        if !self.calm {
            if hit(d.relogin) {
                return self.relogin(env);
            }
            if hit(d.drop) {
                return self.drop_channel(at, env);
            }
            if hit(d.logout) {
                return self.log_out(at, env);
            }
        }
        usize::from(self.command(at, env))
    }

    fn any_command(&mut self, at: usize) -> Option<u64> {
        let chan = &self.chans[at];
        let users: Vec<u64> = chan.cmds.iter().filter(|c| !c.aborting).map(|c| c.user).collect();
        if users.is_empty() { None } else { Some(self.rng.pick(&users)) }
    }

    fn abort(&mut self, at: usize, victim: u64, env: &mut Env<'_>) -> bool {
        let sent_at = env.net.now;
        self.serial += 1;
        let user = self.serial;
        let chan = &mut self.chans[at];
        let cmd = chan.cmds.iter_mut().find(|c| c.user == victim).expect("it was found");
        let srp = chan.srp.as_mut().expect("an Up channel has its state");
        let mut iu = [0; 64];
        let Ok((_, len)) = srp.abort_task(cmd.tag, user, &mut iu) else { return false };
        cmd.aborting = true;
        let (victims, elsewhere) = (Vec::new(), Vec::new());
        chan.tms.push(Tm { user, sent_at, victims, elsewhere, unit: None });
        env.net.note("abort", user, victim);
        env.net.init_send(chan.link, &iu[..len]);
        true
    }

    /// LOGICAL UNIT RESET, ABORT TASK SET or CLEAR TASK SET.
    fn reset(&mut self, at: usize, env: &mut Env<'_>) -> bool {
        let sent_at = env.net.now;
        let view = self.rng.index(self.config.views.len());
        let func = self.rng.pick(&[TmFunc::LunReset, TmFunc::AbortTaskSet, TmFunc::ClearTaskSet]);
        self.serial += 1;
        let user = self.serial;
        let (lun, unit) = (self.config.views[view].lun, self.config.views[view].unit);
        let chan = &mut self.chans[at];
        let srp = chan.srp.as_mut().expect("an Up channel has its state");
        let mut iu = [0; 64];
        let Ok((_, len)) = srp.start_tm(func, lun_field(lun), user, &mut iu) else {
            return false;
        };
        let link = chan.link;
        let victims = chan.cmds.iter().filter(|c| c.plan.view == view).map(|c| c.user).collect();
        let elsewhere = self.begun_elsewhere(at, view, env);
        env.resets[unit].count += 1;
        let unit = Some(unit);
        self.chans[at].tms.push(Tm { user, sent_at, victims, elsewhere, unit });
        env.net.note("reset", user, func.code().into());
        env.net.init_send(link, &iu[..len]);
        true
    }

    /// Commands of other channels on a unit that the target has begun to work on, as one can see by
    /// what it did with their memory. A reset takes them down too: Linux uses their tags and keys
    /// again as soon as it is answered.
    fn begun_elsewhere(&self, at: usize, view: usize, env: &Env<'_>) -> Vec<(usize, u64)> {
        if gap("reset-elsewhere") {
            return Vec::new();
        }
        let memory = &env.net.memory[self.config.index];
        let begun = |c: &&Cmd| {
            let placed = c.placed.as_ref();
            let touched = placed.is_some_and(|p| p.keys.iter().any(|k| memory.is_touched(*k)));
            c.plan.view == view && touched
        };
        let others = self.chans.iter().enumerate().filter(|(other, _)| *other != at);
        others
            .flat_map(|(other, chan)| chan.cmds.iter().filter(begun).map(move |c| (other, c.user)))
            .collect()
    }

    /// All channels die, by a goodbye or without.
    fn relogin(&mut self, env: &mut Env<'_>) -> usize {
        let polite = self.rng.chance(500_000);
        for at in 0..self.chans.len() {
            if self.chans[at].life != Life::Up {
                continue;
            }
            self.end_channel(at, polite, env);
            self.chans[at].life = Life::Down(env.net.now);
        }
        1
    }

    fn drop_channel(&mut self, at: usize, env: &mut Env<'_>) -> usize {
        let polite = self.rng.chance(500_000);
        self.end_channel(at, polite, env);
        1
    }

    fn end_channel(&mut self, at: usize, polite: bool, env: &mut Env<'_>) {
        let link = self.chans[at].link;
        if polite {
            env.net.init_disconnect(link);
        } else {
            let told = self.rng.chance(700_000);
            let after = self.rng.range(1_000, 3_000_000);
            env.net.vanish(link, told.then_some(after));
        }
        self.down(at, env);
    }

    fn log_out(&mut self, at: usize, env: &mut Env<'_>) -> usize {
        let chan = &mut self.chans[at];
        let mut iu = [0; 16];
        iu[0] = 0x03;
        chan.logged_out = true;
        env.net.note("logout", chan.link as u64, 0);
        env.net.init_send(chan.link, &iu);
        1
    }

    /// Sends a command.
    fn command(&mut self, at: usize, env: &mut Env<'_>) -> bool {
        let chan = &self.chans[at];
        let srp = chan.srp.as_ref().expect("an Up channel has its state");
        if chan.cmds.len() >= self.config.queue || !srp.can_start_cmd() {
            return false;
        }
        let views = &self.config.views;
        let mut plan = self.config.mix.draw(&mut self.rng, views, self.config.transfer_max);
        plan.begin(env.model, views);
        self.serial += 1;
        let user = self.serial;
        let (placed, form) = self.place(at, &plan, user, env);
        let lun = lun_field(views_lun(&self.config.views, plan.view));
        let chan = &mut self.chans[at];
        let srp = chan.srp.as_mut().expect("an Up channel has its state");
        let mut iu = vec![0; self.config.it_iu_len as usize];
        let table = |p: &Placed| p.table.expect("a table was placed");
        let descs = placed.as_ref().map_or(&[][..], |p| &p.descs[..]);
        let (mut out, mut inn) = (OutBuf::None, InBuf::None);
        match (&form, placed.as_ref()) {
            (Form::Immediate, _) => {
                out = OutBuf::Immediate(plan.out.as_ref().expect("data-out"));
            }
            (Form::Direct, _) if plan.out.is_some() => out = OutBuf::Direct(descs[0]),
            (Form::Direct, _) => inn = InBuf::Direct(descs[0]),
            (Form::Table(in_iu), Some(placed)) => {
                let (va, key) = table(placed);
                let table = Table { va, key, descs, in_iu: *in_iu };
                match plan.out {
                    Some(_) => out = OutBuf::Table(table),
                    None => inn = InBuf::Table(table),
                }
            }
            (Form::None | Form::Table(_), _) => {}
        }
        let started = srp.start_cmd(&plan.cdb, lun, out, inn, user, &mut iu);
        let (tag, len) = started.expect("credit, slot and length were looked at first");
        let resets = env.resets[self.config.views[plan.view].unit].mark(env.net);
        let sent_at = env.net.now;
        env.net.note("command", user, u64::from(plan.cdb[0]));
        if env.net.trace.prints() {
            let (link, write) = (chan.link, plan.write);
            let places = placed.as_ref().map(|p| (&p.descs, &p.table));
            eprintln!(
                "    link {link} LU {} {:x?} write {write:?} {places:x?}",
                plan.view, plan.cdb
            );
        }
        env.net.init_send(chan.link, &iu[..len]);
        chan.cmds.push(Cmd { user, tag, plan, placed, sent_at, resets, aborting: false });
        self.left -= 1;
        true
    }

    /// Puts a command's data into memory.
    fn place(
        &mut self,
        at: usize,
        plan: &super::Plan,
        user: u64,
        env: &mut Env<'_>,
    ) -> (Option<Placed>, Form) {
        let len = plan.out.as_ref().map_or(plan.in_len as usize, Vec::len);
        if len == 0 {
            return (None, Form::None);
        }
        let fits = len + 68 <= self.config.it_iu_len as usize;
        if plan.out.is_some() && self.chans[at].immediate && fits && self.rng.chance(500_000) {
            return (None, Form::Immediate);
        }
        let access = if plan.out.is_some() { Access::Read } else { Access::Write };
        let purpose = Purpose { link: self.chans[at].link, user, access };
        let slot = self.slots.take().expect("as many slots as commands");
        let memory = &mut env.net.memory[self.config.index];
        let pieces = if self.rng.chance(600_000) { 1 } else { self.rng.range(1, 8) as usize };
        let pieces = pieces.min(PIECES_MAX);
        let rng = &mut self.rng;
        let cut = (pieces, if self.config.views[plan.view].torn { 8 } else { 1 });
        let mut placed = self.slots.place(slot, len, cut, &purpose, memory, rng);
        match &plan.out {
            Some(data) => placed.put(memory, data),
            None => placed.wipe(memory),
        }
        if pieces == 1 && rng.chance(800_000) {
            return (Some(placed), Form::Direct);
        }
        self.slots.place_table(&mut placed, &purpose, memory);
        let all = rng.chance(600_000);
        let in_iu = if all { pieces } else { rng.index(pieces + 1) };
        (Some(placed), Form::Table(in_iu))
    }
}

fn views_lun(views: &[super::View], view: usize) -> u16 {
    views[view].lun
}
