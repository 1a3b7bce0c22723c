//! A simulated initiator host: one nexus of several channels under a random load.
//!
//! Owns: its channels (protocol state by `usurp_srp::initiator`), its commands and their memory.
//! Plays by the rules, so whatever goes wrong is the target's fault and a panic: an answer to
//! nothing, no answer in time, wrong data, credits that do not come back.
//!
//! ```text
//!   channel: Down --connect--> Asking --Accepted--> Up --lost, relogin, logout--> Down
//! ```
//! Writes of a channel that died are orphans: they may land until a SINGLE login of the nexus is
//! accepted, for that login fences them.

mod buffers;
mod plan;
mod run;

use std::collections::VecDeque;

use usurp_fabric::LoginFormat;
use usurp_reactor::Nanos;
use usurp_srp::initiator::{
    Channel, Config, Format, MultiChannel, linux_login, login_answer, login_req,
};
use usurp_srp::wire::login_req::Repr;
use usurp_srp::{PortId, Tag};

pub use buffers::Slots;
pub use plan::{Mix, Plan, View};

use crate::model::{End, Gen, Model};
use crate::net::{HostMemory, InitEvent, Net};
use crate::profile::gap;
use crate::rng::Rng;
use buffers::Placed;

/// How long a login may take.
const PATIENCE_NS: Nanos = 10_000_000_000;

/// Likelihoods of what a host does beside commands, per million of its actions.
#[derive(Clone, Debug, Default)]
pub struct Disasters {
    /// ABORT TASK of any of its commands.
    pub abort: u64,
    /// LOGICAL UNIT RESET, ABORT TASK SET, CLEAR TASK SET.
    pub reset: u64,
    /// Its channels die and it logs in anew with SINGLE.
    pub relogin: u64,
    /// One channel dies.
    pub drop: u64,
    /// I_LOGOUT.
    pub logout: u64,
    /// Of its logins: given up early, and tried again.
    pub impatient: u64,
}

/// How a host behaves.
#[derive(Clone, Debug)]
pub struct HostConfig {
    /// Which host, and which memory of the network.
    pub index: usize,
    /// Its initiator port.
    pub port: PortId,
    /// The target's port.
    pub target: PortId,
    /// Channels it wants.
    pub channels: usize,
    /// Logical units it uses.
    pub views: Vec<View>,
    /// Commands it sends in all.
    pub commands: u32,
    /// Commands outstanding on one channel.
    pub queue: usize,
    /// What commands.
    pub mix: Mix,
    /// What else.
    pub disasters: Disasters,
    /// Longest transfer.
    pub transfer_max: u32,
    /// IUs it wants to send.
    pub it_iu_len: u32,
    /// Immediate data.
    pub immediate: bool,
    /// Shortest and longest time between actions.
    pub pause_ns: (Nanos, Nanos),
    /// How long an answer may take.
    pub answer_ns: Nanos,
}

/// Where a channel is in its life.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
enum Life {
    /// Until then nothing is tried.
    Down(Nanos),
    /// The login is on its way.
    Asking,
    Up,
}

/// An outstanding command.
struct Cmd {
    user: u64,
    tag: Tag,
    plan: Plan,
    placed: Option<Placed>,
    sent_at: Nanos,
    /// Resets of its unit by anybody when it was sent.
    resets: Option<u64>,
    /// An ABORT TASK for it is under way.
    aborting: bool,
}

/// An outstanding task management function.
struct Tm {
    user: u64,
    sent_at: Nanos,
    /// Commands of the same channel that are gone once it is answered.
    victims: Vec<u64>,
    /// Commands of other channels that are.
    elsewhere: Vec<(usize, u64)>,
    /// The unit that it resets.
    unit: Option<usize>,
}

struct Chan {
    life: Life,
    link: usize,
    req: Option<Repr>,
    srp: Option<Channel>,
    credits: u32,
    cmds: Vec<Cmd>,
    tms: Vec<Tm>,
    /// When receives are posted again.
    repost: VecDeque<Nanos>,
    /// An I_LOGOUT was sent: nothing more is.
    logged_out: bool,
    /// When a login without an answer is given up.
    give_up_at: Nanos,
    /// Immediate data was granted.
    immediate: bool,
}

/// Who may have taken down commands on a unit.
#[derive(Clone, Debug, Default)]
pub struct Resets {
    /// Resets by anybody, counted when they begin and when they end.
    pub count: u64,
    /// Links that were lost with a reset under way, which may yet be carried out.
    pub lost: Vec<usize>,
}

impl Resets {
    /// Something that differs from what it was before when commands may have been taken down since.
    fn mark(&mut self, net: &Net) -> Option<u64> {
        self.lost.retain(|link| !net.links[*link].destroyed);
        self.lost.is_empty().then_some(self.count)
    }
}

/// What hosts and their surroundings share.
pub struct Env<'a> {
    /// The network.
    pub net: &'a mut Net,
    /// What may be on the media.
    pub model: &'a mut Model,
    /// Resets by unit, counted when they begin and when they end.
    pub resets: &'a mut Vec<Resets>,
    /// Commands answered by all.
    pub answered: &'a mut u64,
}

/// See the module's header.
pub struct Host {
    config: HostConfig,
    rng: Rng,
    chans: Vec<Chan>,
    slots: Slots,
    /// Writes without an answer on channels that are gone.
    orphans: Vec<Gen>,
    /// Commands that are still to be sent.
    left: u32,
    /// Next action.
    next_at: Nanos,
    /// Numbers commands.
    serial: u64,
    /// No new logins.
    closing: bool,
    /// No new disasters.
    calm: bool,
}

impl Host {
    /// A host and its memory.
    pub fn new(config: HostConfig, rng: Rng) -> (Host, HostMemory) {
        let slots = config.channels * config.queue + 1;
        let data = config.transfer_max as usize + 128;
        let memory = HostMemory::new(config.index, Slots::bytes(slots, data), true);
        let down = || Chan {
            life: Life::Down(0),
            link: 0,
            req: None,
            srp: None,
            credits: 0,
            cmds: Vec::new(),
            tms: Vec::new(),
            repost: VecDeque::new(),
            logged_out: false,
            give_up_at: 0,
            immediate: false,
        };
        let host = Host {
            chans: (0..config.channels).map(|_| down()).collect(),
            slots: Slots::new(slots, data),
            orphans: Vec::new(),
            left: config.commands,
            next_at: 0,
            serial: (config.index as u64) << 32,
            closing: false,
            calm: false,
            config,
            rng,
        };
        (host, memory)
    }

    /// Nothing is outstanding, nothing is left to do, and every credit is back.
    pub fn is_idle(&self) -> bool {
        let idle = |c: &Chan| match c.life {
            Life::Down(_) => self.left == 0 || self.closing,
            Life::Asking => false,
            Life::Up => {
                let whole = c.srp.as_ref().is_some_and(|s| s.req_lim() == c.credits);
                c.cmds.is_empty() && c.tms.is_empty() && (whole || c.logged_out)
            }
        };
        (self.left == 0 || self.closing) && self.chans.iter().all(idle)
    }

    /// From now on only what must be.
    pub fn calm(&mut self) {
        self.calm = true;
    }

    /// The target is going: no new commands or logins.
    pub fn close(&mut self) {
        self.closing = true;
        self.calm = true;
    }

    /// Nothing of the target works for any host any more: no orphan will land.
    pub fn end(&mut self, model: &mut Model) {
        for number in self.orphans.drain(..) {
            model.end_write(number, End::Unknown);
        }
    }

    /// Whether all channels are down.
    pub fn is_down(&self) -> bool {
        self.chans.iter().all(|c| matches!(c.life, Life::Down(_)))
    }

    /// When it next has something to do by itself.
    pub fn next_timer(&self) -> Nanos {
        let mut next = if self.left > 0 && !self.closing { self.next_at } else { Nanos::MAX };
        for c in &self.chans {
            let repost = c.repost.front().copied().unwrap_or(Nanos::MAX);
            let cmds = c.cmds.iter().filter(|c| !c.aborting).map(|c| c.sent_at);
            let sent = cmds.chain(c.tms.iter().map(|t| t.sent_at)).min();
            let late = sent.map_or(Nanos::MAX, |t| t + self.config.answer_ns);
            let retry = match c.life {
                Life::Down(at) if self.left > 0 && !self.closing => at,
                _ => Nanos::MAX,
            };
            let give_up = if c.life == Life::Asking { c.give_up_at } else { Nanos::MAX };
            next = next.min(give_up).min(repost).min(late).min(retry);
        }
        next
    }

    /// Text for the message when a run does not end.
    pub fn describe(&self) -> String {
        let chan = |c: &Chan| {
            let req_lim = c.srp.as_ref().map_or(0, Channel::req_lim);
            let tags: Vec<_> = c.cmds.iter().map(|c| (c.user, c.plan.cdb[0], c.sent_at)).collect();
            format!(
                "[link {} {:?} req_lim {req_lim}/{} commands {tags:x?} tms {}]",
                c.link,
                c.life,
                c.credits,
                c.tms.len()
            )
        };
        let chans: Vec<String> = self.chans.iter().map(chan).collect();
        format!("host {}: {} left, {}", self.config.index, self.left, chans.join(" "))
    }

    /// Does what there is to do. How much that was.
    pub fn turn(&mut self, env: &mut Env<'_>) -> usize {
        let mut events = 0;
        for at in 0..self.chans.len() {
            events += self.connection(at, env);
            events += self.receive(at, env);
            events += self.repost(at, env);
            events += self.overdue(at, env);
        }
        if !self.closing && self.left > 0 {
            events += self.connect(env);
            if env.net.now >= self.next_at {
                events += self.act(env);
                let (lo, hi) = self.config.pause_ns;
                self.next_at = env.net.now + self.rng.range(lo, hi);
            }
        }
        events
    }

    /// What has become of the connection.
    fn connection(&mut self, at: usize, env: &mut Env<'_>) -> usize {
        let chan = &mut self.chans[at];
        if matches!(chan.life, Life::Down(_)) {
            return 0;
        }
        let Some(event) = env.net.init_event(chan.link) else {
            if chan.life == Life::Asking && env.net.now >= chan.give_up_at {
                // It tries again, and nobody takes the old login back.
                env.net.vanish(chan.link, None);
                self.down(at, env);
                return 1;
            }
            return 0;
        };
        match event {
            InitEvent::Accepted(answer) => self.accepted(at, &answer, env),
            InitEvent::Rejected(rej) => {
                // Dead channels that nobody has missed yet may stand in the way of a further
                // one, but never of a login that replaces them.
                let single = chan.req.is_some_and(|req| req.req_flags & 0x03 == 0);
                let limit = rej[4..8] == 0x0001_0006_u32.to_be_bytes();
                let fault = single && limit && !gap("fence");
                assert!(!fault, "host {}: a SINGLE login was refused", self.config.index);
                self.down(at, env);
            }
            InitEvent::Lost => self.down(at, env),
        }
        1
    }

    fn accepted(&mut self, at: usize, answer: &[u8], env: &mut Env<'_>) {
        let chan = &mut self.chans[at];
        let req = chan.req.as_ref().expect("a login was sent");
        let granted = login_answer(answer, req).expect("a login answer makes sense");
        if req.req_flags & 0x03 == 0 {
            // A SINGLE login: the target has fenced what older channels had under way.
            for number in self.orphans.drain(..) {
                env.model.end_write(number, End::Unknown);
            }
        }
        chan.credits = granted.credits();
        chan.immediate = granted.imm_offset().is_some();
        let slots = granted.credits() as u16 + 4;
        chan.srp = Some(Channel::new(&granted, Config { slots }));
        chan.life = Life::Up;
        chan.logged_out = false;
        env.net.init_ready(chan.link);
    }

    /// The channel is gone, and what was outstanding on it has no answer.
    fn down(&mut self, at: usize, env: &mut Env<'_>) {
        let retry = env.net.now + self.rng.range(1_000, 300_000);
        let chan = &mut self.chans[at];
        chan.life = Life::Down(retry);
        chan.srp = None;
        chan.repost.clear();
        for cmd in std::mem::take(&mut chan.cmds) {
            self.orphans.extend(cmd.plan.write);
            self.free(cmd.placed, env);
        }
        let link = self.chans[at].link;
        for tm in std::mem::take(&mut self.chans[at].tms) {
            if let Some(unit) = tm.unit {
                env.resets[unit].count += 1;
                env.resets[unit].lost.push(link);
            }
        }
    }

    /// Gives a command's memory back; the target may not touch it any more.
    fn free(&mut self, placed: Option<Placed>, env: &mut Env<'_>) {
        let Some(placed) = placed else { return };
        let memory = &mut env.net.memory[self.config.index];
        for key in &placed.keys {
            memory.revoke(*key);
        }
        self.slots.give(placed.slot);
    }

    /// Logs in: SINGLE when there is no channel, else MULTI.
    fn connect(&mut self, env: &mut Env<'_>) -> usize {
        let now = env.net.now;
        let ready = |c: &Chan| matches!(c.life, Life::Down(at) if at <= now);
        let Some(at) = self.chans.iter().position(ready) else { return 0 };
        let up = self.chans.iter().any(|c| c.life == Life::Up);
        let asking = self.chans.iter().any(|c| c.life == Life::Asking);
        if !up && asking {
            return 0;
        }
        let action = if up { MultiChannel::Multi } else { MultiChannel::Single };
        let mut req = linux_login(self.config.port, self.config.target, action);
        req.req_it_iu_len = self.config.it_iu_len;
        if !self.config.immediate {
            req.req_flags &= 0x7F;
        }
        let (format, kind) = if self.config.index.is_multiple_of(2) {
            (LoginFormat::IbCm64, Format::IbCm64)
        } else {
            (LoginFormat::RdmaCm56, Format::RdmaCm56)
        };
        let patience = if !self.calm && self.rng.chance(self.config.disasters.impatient) {
            self.rng.range(1_000, 500_000)
        } else {
            PATIENCE_NS
        };
        let chan = &mut self.chans[at];
        chan.give_up_at = env.net.now + patience;
        chan.link = env.net.connect(self.config.index, format, login_req(kind, &req).to_vec());
        chan.req = Some(req);
        chan.life = Life::Asking;
        1
    }
}
