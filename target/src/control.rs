//! The control plane: logins, nexuses, placement of channels on reactors, shutdown.
//!
//! Owns the connection manager and every channel that is not with a reactor. Runs on an ordinary
//! thread (or step by step in a simulation) and may block; it speaks to reactors by mail only.
//!
//! ```text
//!   ConnectRequest ─> checks ─> [fence: old channels end] ─> Adopt ─> Adopted ─> accept ─> live
//!          └─> LOGIN_REJ          └─> LOGIN_REJ after a time limit
//!   any state ─ Disconnected / Disconnect / stop ─> Close ─> Closed ─> destroyed
//! ```
//!
//! The fence: a SINGLE login replaces the channels of its nexus. The new channel is adopted only
//! when the old ones have ended and no bdev works for them any more, so that no write of theirs can
//! land after a newer one.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use crossbeam_channel::{Receiver, Sender, TrySendError};
use tracing::{debug, error, info, warn};
use usurp_fabric::{Cm, CmEvent, ConnId};
use usurp_reactor::Nanos;
use usurp_reactor::mem::Arena;
use usurp_reactor::turn::Mailbox;
use usurp_srp::PortId;
use usurp_srp::login::{
    self, LoginAccepted, LoginRejected, MultiChannel, MultiChannelResult, Policy, RejectReason,
};

use crate::conn::{ChannelShape, Conn};
use crate::luns::LunMap;
use crate::mail::{NexusId, NexusInfo, ReactorId, ToControl, ToReactor};

/// Mail for the control thread, with something that wakes it.
pub struct ControlSender<E> {
    /// The queue.
    queue: Sender<ToControl<E>>,
    /// Ends the control thread's wait.
    wake: Arc<dyn Fn() + Send + Sync>,
}

impl<E> Clone for ControlSender<E> {
    fn clone(&self) -> Self {
        ControlSender { queue: self.queue.clone(), wake: self.wake.clone() }
    }
}

impl<E> ControlSender<E> {
    /// A queue of bounded length and its receiving end.
    pub fn new(
        bound: usize,
        wake: Arc<dyn Fn() + Send + Sync>,
    ) -> (ControlSender<E>, Receiver<ToControl<E>>) {
        let (queue, receiver) = crossbeam_channel::bounded(bound);
        (ControlSender { queue, wake }, receiver)
    }

    /// Sends without waiting; gives the mail back when the queue is full.
    pub fn try_send(&self, mail: ToControl<E>) -> Result<(), ToControl<E>> {
        match self.queue.try_send(mail) {
            Ok(()) => {
                (self.wake)();
                Ok(())
            }
            Err(TrySendError::Full(mail) | TrySendError::Disconnected(mail)) => Err(mail),
        }
    }
}

/// Which initiators a rule speaks of.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum HostMatch {
    /// Every initiator that no other rule names.
    Any,
    /// The whole initiator port identifier.
    Port(PortId),
    /// Its GUID: the low eight bytes.
    Guid([u8; 8]),
}

/// What one host may see.
#[derive(Clone, Debug)]
pub struct HostRule {
    /// The host.
    pub host: HostMatch,
    /// Its logical units.
    pub luns: Arc<LunMap>,
}

/// What the control plane must know of a reactor.
pub struct ReactorPort<E> {
    /// Its mailbox.
    pub mailbox: Mailbox<ToReactor<E>>,
    /// Memory of its channels' rings.
    pub iu_arena: Arc<Arena>,
}

/// Limits and times of the control plane.
#[derive(Clone, Debug)]
pub struct ControlConfig {
    /// What a login must say and what it is told.
    pub policy: Policy,
    /// Sizes of a channel.
    pub shape: ChannelShape,
    /// Channels on one reactor at the most.
    pub channels_per_reactor: u16,
    /// Channels of one nexus at the most.
    pub channels_per_nexus: u32,
    /// Who may log in.
    pub hosts: Vec<HostRule>,
    /// How long a login waits for the end of the channels that it replaces.
    pub fence_ns: Nanos,
    /// How long an accepted login may stay without an answer from the initiator.
    pub establish_ns: Nanos,
}

/// An I_T nexus's name: the same port identifiers through two listeners are two nexuses (two target
/// ports).
type NexusKey = (usize, PortId, PortId);

/// A login that may not begin before the nexus's old channels have ended.
struct Fenced {
    conn: ConnId,
    key: NexusKey,
    login: LoginAccepted,
    luns: Arc<LunMap>,
    peer: String,
    /// It replaced channels of its nexus.
    terminated: bool,
    deadline: Nanos,
}

#[derive(Copy, Clone, Debug, PartialEq, Eq)]
enum Life {
    /// With the reactor, whose answer is awaited.
    Adopting,
    /// The initiator has our answer, we await its reaction.
    Accepted,
    /// In service.
    Live,
    /// Being brought down.
    Closing,
}

struct Entry {
    key: NexusKey,
    login: LoginAccepted,
    peer: String,
    result: MultiChannelResult,
    life: Life,
    reactor: ReactorId,
    /// Position on the reactor.
    index: u16,
    /// When a login that is not established is given up.
    deadline: Nanos,
}

struct Nexus {
    id: NexusId,
    home: ReactorId,
    conns: Vec<ConnId>,
}

struct ReactorState<E> {
    port: ReactorPort<E>,
    /// Free positions.
    free: Vec<u16>,
    /// Next generation by position.
    generations: Vec<u16>,
}

/// See the module's header.
pub struct Control<C: Cm> {
    cm: C,
    config: ControlConfig,
    reactors: Vec<ReactorState<C::Endpoint>>,
    conns: BTreeMap<ConnId, Entry>,
    nexuses: HashMap<NexusKey, Nexus>,
    next_nexus: u32,
    fenced: VecDeque<Fenced>,
    stopping: bool,
    /// Logins since the start: accepted, rejected.
    logins: (u64, u64),
}

impl<C: Cm> Control<C>
where
    C::Endpoint: Send + 'static,
{
    /// A control plane without channels.
    pub fn new(cm: C, config: ControlConfig, ports: Vec<ReactorPort<C::Endpoint>>) -> Control<C> {
        assert!(!ports.is_empty(), "a target has a reactor");
        let positions = config.channels_per_reactor;
        let reactors = ports
            .into_iter()
            .map(|port| {
                let need = config.shape.bytes() * usize::from(positions);
                assert!(port.iu_arena.len() >= need, "the IU arena is too small");
                ReactorState {
                    port,
                    free: (0..positions).rev().collect(),
                    generations: vec![0; usize::from(positions)],
                }
            })
            .collect();
        Control {
            cm,
            config,
            reactors,
            conns: BTreeMap::new(),
            nexuses: HashMap::new(),
            next_nexus: 0,
            fenced: VecDeque::new(),
            stopping: false,
            logins: (0, 0),
        }
    }

    /// The connection manager.
    pub fn cm_mut(&mut self) -> &mut C {
        &mut self.cm
    }

    /// Channels that exist, in whatever state.
    pub fn channels(&self) -> usize {
        self.conns.len()
    }

    /// Nexuses that exist.
    pub fn nexuses(&self) -> usize {
        self.nexuses.len()
    }

    /// Logins since the start: accepted, rejected.
    pub fn logins(&self) -> (u64, u64) {
        self.logins
    }

    /// The earliest moment at which [`Control::on_time`] has something to do.
    pub fn next_timer(&self) -> Option<Nanos> {
        let waiting = |e: &&Entry| matches!(e.life, Life::Adopting | Life::Accepted);
        let logins = self.conns.values().filter(waiting).map(|e| e.deadline);
        logins.chain(self.fenced.iter().map(|f| f.deadline)).min()
    }

    /// An event of the connection manager.
    pub fn on_event(&mut self, event: CmEvent, now: Nanos) {
        match event {
            CmEvent::ConnectRequest { conn, listener, peer, format, private_data } => {
                let format = match format {
                    usurp_fabric::LoginFormat::IbCm64 => login::Format::IbCm64,
                    usurp_fabric::LoginFormat::RdmaCm56 => login::Format::RdmaCm56,
                };
                let checked = login::check(format, &private_data, &self.config.policy);
                match checked.and_then(|login| self.admit(listener, login)) {
                    Ok((key, login, luns)) => self.begin(
                        Fenced {
                            conn,
                            key,
                            login,
                            luns,
                            peer,
                            terminated: false,
                            deadline: now + self.config.fence_ns,
                        },
                        now,
                    ),
                    Err(rejected) => self.reject(conn, &peer, &rejected),
                }
            }
            CmEvent::Established { conn } => {
                let entry = self.conns.get_mut(&conn);
                if let Some(entry) = entry.filter(|e| e.life == Life::Accepted) {
                    entry.life = Life::Live;
                    let reactor = entry.reactor;
                    self.mail(reactor, ToReactor::Established { conn });
                }
            }
            CmEvent::ListenerGone { listener, why } => {
                error!(listener, why, "a listener failed; nobody can log in through it any more");
            }
            CmEvent::Disconnected { conn, why } => {
                debug!(conn = conn.0, why, "disconnected");
                self.close(conn, false);
            }
        }
    }

    /// Checks that need to know the target's hosts and nexuses.
    fn admit(
        &self,
        listener: usize,
        login: LoginAccepted,
    ) -> Result<(NexusKey, LoginAccepted, Arc<LunMap>), LoginRejected> {
        if self.stopping {
            let why = "the target is shutting down";
            return Err(login.reject(RejectReason::NoResources, why));
        }
        let Some(luns) = self.luns_of(&login.i_port_id()) else {
            let why = "no host rule admits this initiator";
            return Err(login.reject(RejectReason::NoNexus, why));
        };
        let key = (listener, login.i_port_id(), login.t_port_id());
        let channels = self.nexuses.get(&key).map_or(0, |n| n.conns.len() as u32);
        let multi = login.action() == MultiChannel::Multi;
        if multi && channels >= self.config.channels_per_nexus {
            let why = "this initiator has as many channels as it may have";
            return Err(login.reject(RejectReason::ChannelLimit, why));
        }
        Ok((key, login, luns))
    }

    /// The logical units of an initiator: the most particular rule counts.
    fn luns_of(&self, port: &PortId) -> Option<Arc<LunMap>> {
        let rank = |host: &HostMatch| match host {
            HostMatch::Port(p) if p == port => Some(0),
            HostMatch::Guid(g) if *g == port.0[8..] => Some(1),
            HostMatch::Any => Some(2),
            _ => None,
        };
        let ranked = self.config.hosts.iter().filter_map(|h| Some((rank(&h.host)?, h)));
        ranked.min_by_key(|(rank, _)| *rank).map(|(_, h)| h.luns.clone())
    }

    /// A login that passed all checks: at once, or behind the fence.
    fn begin(&mut self, mut login: Fenced, now: Nanos) {
        if login.login.action() == MultiChannel::Single {
            let old = self.nexuses.get(&login.key).map_or(Vec::new(), |n| n.conns.clone());
            login.terminated = !old.is_empty();
            while let Some(i) = self.fenced.iter().position(|f| f.key == login.key) {
                let f = self.fenced.remove(i).expect("position found it");
                let why = "replaced by a newer login of the same initiator";
                let rejected = LoginRejected::new(RejectReason::Unspecified, why, f.login.tag());
                self.reject(f.conn, &f.peer, &rejected);
                login.terminated = true;
            }
            for conn in old {
                info!(conn = conn.0, "replaced by a new login of the same initiator");
                self.close(conn, false);
                self.cm.disconnect(conn);
            }
        }
        if self.may_pass(&login) {
            self.place(login, now);
        } else {
            self.fenced.push_back(login);
        }
    }

    /// Whether a login may go on: a SINGLE one when the nexus has no channel left, a MULTI one when
    /// none of the nexus waits before it.
    fn may_pass(&self, login: &Fenced) -> bool {
        let waits = self.fenced.iter().any(|f| f.key == login.key);
        let multi = login.login.action() == MultiChannel::Multi;
        !waits && (multi || !self.nexuses.contains_key(&login.key))
    }

    /// Puts a channel on the reactor with the fewest.
    fn place(&mut self, f: Fenced, now: Nanos) {
        let Some(at) = (0..self.reactors.len())
            .filter(|at| !self.reactors[*at].free.is_empty())
            .max_by_key(|at| (self.reactors[*at].free.len(), usize::MAX - at))
        else {
            let why = "every reactor has as many channels as it has memory for";
            let reason = RejectReason::NoResources;
            return self.reject(f.conn, &f.peer, &f.login.reject(reason, why));
        };
        let endpoint = match self.cm.endpoint(f.conn) {
            Ok(endpoint) => endpoint,
            Err(e) => {
                let why = "the connection cannot be set up";
                warn!(peer = f.peer, error = %e, why);
                let reason = RejectReason::NoResources;
                let rejected = f.login.reject(reason, why);
                return self.reject(f.conn, &f.peer, &rejected);
            }
        };
        let reactor = ReactorId(at as u16);
        let others = self.nexuses.get(&f.key).map_or(0, |n| n.conns.len());
        let result = match (f.login.action(), others) {
            (MultiChannel::Multi, 1..) => MultiChannelResult::Maintained,
            (MultiChannel::Single, _) if f.terminated => MultiChannelResult::Terminated,
            _ => MultiChannelResult::NoChannels,
        };
        let next = NexusId(self.next_nexus);
        let nexus = self.nexuses.entry(f.key).or_insert_with(|| {
            self.next_nexus = self.next_nexus.wrapping_add(1);
            Nexus { id: next, home: reactor, conns: Vec::new() }
        });
        nexus.conns.push(f.conn);
        let info = NexusInfo { id: nexus.id, luns: f.luns, home: nexus.home == reactor };
        let r = &mut self.reactors[at];
        let index = r.free.pop().expect("a reactor with a free position was chosen");
        let generation = &mut r.generations[usize::from(index)];
        *generation = generation.wrapping_add(1);
        let place = (r.port.iu_arena.clone(), self.config.shape.bytes() * usize::from(index));
        let shape = &self.config.shape;
        let channel = Conn::new(f.conn, index, *generation, &f.login, info, shape, place);
        self.conns.insert(
            f.conn,
            Entry {
                key: f.key,
                login: f.login,
                peer: f.peer,
                result,
                life: Life::Adopting,
                reactor,
                index,
                deadline: now + self.config.establish_ns,
            },
        );
        self.mail(reactor, ToReactor::Adopt { conn: f.conn, endpoint, channel });
    }

    /// Mail to a reactor. Waits for room: reactors never wait for us, so there soon is some.
    fn mail(&self, reactor: ReactorId, mail: ToReactor<C::Endpoint>) {
        let sent = self.reactors[usize::from(reactor.0)].port.mailbox.send_blocking(mail);
        assert!(sent.is_ok(), "a reactor ended before its channels");
    }

    fn reject(&mut self, conn: ConnId, peer: &str, rejected: &LoginRejected) {
        self.logins.1 += 1;
        warn!(peer, reason = ?rejected.reason, why = rejected.why, "login rejected");
        self.cm.reject(conn, &rejected.emit());
        self.cm.destroy(conn, None);
    }

    /// Mail of a reactor.
    pub fn on_mail(&mut self, mail: ToControl<C::Endpoint>, now: Nanos) {
        match mail {
            ToControl::Adopted { conn } => self.accept(conn, now),
            ToControl::Refused { conn, endpoint, channel, why } => {
                drop(channel);
                let Some(entry) = self.forget(conn, now) else { return };
                let reason = RejectReason::NoResources;
                let text = "the reactor could not set the channel up";
                let rejected = entry.login.reject(reason, text);
                warn!(peer = entry.peer, why, "login rejected");
                self.logins.1 += 1;
                self.cm.reject(conn, &rejected.emit());
                self.cm.destroy(conn, endpoint);
            }
            ToControl::Disconnect { conn, why } => {
                if let Some(entry) = self.conns.get_mut(&conn) {
                    warn!(peer = entry.peer, conn = conn.0, why, "channel cut off");
                    entry.life = Life::Closing;
                    self.cm.disconnect(conn);
                }
            }
            ToControl::Closed { conn, endpoint, channel } => {
                drop(channel);
                self.cm.destroy(conn, Some(endpoint));
                if let Some(entry) = self.forget(conn, now) {
                    info!(peer = entry.peer, conn = conn.0, "channel closed");
                }
            }
            ToControl::Stop => self.stop(),
        }
    }

    /// The reactor has the channel: the login is answered.
    fn accept(&mut self, conn: ConnId, now: Nanos) {
        let Some(entry) = self.conns.get_mut(&conn) else { return };
        if entry.life != Life::Adopting {
            return;
        }
        entry.life = Life::Accepted;
        entry.deadline = now + self.config.establish_ns;
        let rsp = entry.login.rsp(entry.result);
        match self.cm.accept(conn, &rsp) {
            Ok(()) => {
                self.logins.0 += 1;
                let reactor = entry.reactor.0;
                info!(peer = entry.peer, conn = conn.0, reactor, "login accepted");
            }
            Err(e) => {
                warn!(peer = entry.peer, conn = conn.0, error = %e, "the login's answer failed");
                self.close(conn, false);
            }
        }
    }

    /// Brings a connection's channel down, or drops its login.
    fn close(&mut self, conn: ConnId, grace: bool) {
        if let Some(at) = self.fenced.iter().position(|f| f.conn == conn) {
            self.fenced.remove(at);
            return self.cm.destroy(conn, None);
        }
        match self.conns.get_mut(&conn) {
            Some(entry) => {
                entry.life = Life::Closing;
                let reactor = entry.reactor;
                self.mail(reactor, ToReactor::Close { conn, grace });
            }
            None => self.cm.destroy(conn, None),
        }
    }

    /// A channel is gone from its reactor: position and nexus are free, and fenced logins may go
    /// on.
    fn forget(&mut self, conn: ConnId, now: Nanos) -> Option<Entry> {
        let entry = self.conns.remove(&conn)?;
        self.reactors[usize::from(entry.reactor.0)].free.push(entry.index);
        let nexus = self.nexuses.get_mut(&entry.key).expect("a channel has its nexus");
        nexus.conns.retain(|c| *c != conn);
        if nexus.conns.is_empty() {
            self.nexuses.remove(&entry.key);
        }
        self.pass_fence(now);
        Some(entry)
    }

    /// Logins whose nexus has no old channel left go on, in order.
    fn pass_fence(&mut self, now: Nanos) {
        let mut waiting = std::mem::take(&mut self.fenced);
        while let Some(login) = waiting.pop_front() {
            if self.may_pass(&login) {
                self.place(login, now);
            } else {
                self.fenced.push_back(login);
            }
        }
    }

    /// Gives up what has waited too long.
    pub fn on_time(&mut self, now: Nanos) {
        while let Some(at) = self.fenced.iter().position(|f| f.deadline <= now) {
            let f = self.fenced.remove(at).expect("position found it");
            let why = "channels of an earlier login have not ended in time";
            let reason = RejectReason::ChannelLimit;
            self.reject(f.conn, &f.peer, &f.login.reject(reason, why));
        }
        let late = |e: &Entry| matches!(e.life, Life::Adopting | Life::Accepted);
        let late: Vec<ConnId> = self
            .conns
            .iter()
            .filter(|(_, e)| late(e) && e.deadline <= now)
            .map(|(conn, _)| *conn)
            .collect();
        for conn in late {
            warn!(conn = conn.0, "the initiator never took up its channel");
            self.cm.disconnect(conn);
            self.close(conn, false);
        }
    }

    /// Begins to shut down: no new logins; every channel is closed after the commands it has begun.
    pub fn stop(&mut self) {
        if std::mem::replace(&mut self.stopping, true) {
            return self.hurry();
        }
        info!(channels = self.conns.len(), "shutting down");
        for f in std::mem::take(&mut self.fenced) {
            let why = "the target is shutting down";
            let reason = RejectReason::NoResources;
            self.reject(f.conn, &f.peer, &f.login.reject(reason, why));
        }
        let conns: Vec<ConnId> = self.conns.keys().copied().collect();
        for conn in conns {
            self.close(conn, true);
        }
    }

    /// Asked to stop once more: commands that are under way are not waited for any longer.
    fn hurry(&mut self) {
        let conns: Vec<ConnId> = self.conns.keys().copied().collect();
        for conn in conns {
            self.close(conn, false);
        }
    }

    /// Whether the target is shutting down.
    pub fn is_stopping(&self) -> bool {
        self.stopping
    }

    /// Whether it is shutting down and no channel is left.
    pub fn is_stopped(&self) -> bool {
        self.stopping && self.conns.is_empty()
    }

    /// Tells every reactor to end. Only once [`Control::is_stopped`].
    pub fn end_reactors(&self) {
        assert!(self.is_stopped(), "reactors end after their channels");
        for at in 0..self.reactors.len() {
            self.mail(ReactorId(at as u16), ToReactor::Shutdown);
        }
    }

    /// Peers of the channels that exist, for the message about those that do not end.
    pub fn peers(&self) -> Vec<String> {
        self.conns.values().map(|e| e.peer.clone()).collect()
    }
}
