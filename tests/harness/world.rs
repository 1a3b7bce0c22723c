//! One simulated world: the real control plane and reactors on a simulated network, with simulated
//! hosts and disks, on virtual time, from one seed.
//!
//! ```text
//!   loop: who is next? (chance)  control | a reactor | a host | the hostile host    time += a bit
//!         nobody has anything to do: time = the next thing that anybody waits for
//!
//!   load ──all commands sent──> calm ──all idle, credits back──> stop ──channels gone──> end:
//!   pools whole, network quiet, media as the model says
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam_channel::Receiver;
use usurp_bdev::emulate::{self, Sharing};
use usurp_bdev::registry::open_one;
use usurp_bdev::{Bdev, QueueSetup};
use usurp_fabric::{Cm, Fabric};
use usurp_reactor::Nanos;
use usurp_reactor::mem::{Arena, BufPool, HugePolicy};
use usurp_reactor::turn::{Mailbox, Reactor, ReactorConfig, mailbox};
use usurp_scsi::{Lu, LuConfig, SCRATCH_BYTES};
use usurp_srp::PortId;
use usurp_srp::login::Policy;
use usurp_target::control::{
    Control, ControlConfig, ControlSender, HostMatch, HostRule, ReactorPort,
};
use usurp_target::luns::{LunEntry, LunMap};
use usurp_target::mail::{ReactorId, ToControl, ToReactor};
use usurp_target::path::{Path, PathConfig};
use usurp_target::shared::{LuSlot, Shared as PathShared};

use crate::bdev::Disk;
use crate::host::{Env, Host, HostConfig, Resets, View};
use crate::hostile::Hostile;
use crate::model::Model;
use crate::net::{Net, Shared, SimCm, SimEndpoint, SimFabric};
use crate::profile::{DiskKind, Profile, TRANSFER_MAX};
use crate::rng::Rng;

/// How long a command or task management function may take: far more than the slowest leg and disk.
const ANSWER_NS: Nanos = 400_000_000;
/// How long a login may wait for older channels. As in the product less than `ESTABLISH_NS`.
const FENCE_NS: Nanos = 300_000_000;
/// How long a login may stay without the initiator's reaction.
const ESTABLISH_NS: Nanos = 900_000_000;
/// How long any phase may take, in virtual time.
const PHASE_NS: Nanos = 20_000_000_000;
/// How long the target may take to stop, beside its grace time.
const STOP_NS: Nanos = 1_000_000_000;
/// Steps without any event after which time jumps.
const IDLE_ROUNDS: usize = 3;

/// A disk and how to look at its medium.
struct Medium {
    bdev: Arc<dyn Bdev>,
    arena: Option<Arc<Arena>>,
    unit: usize,
}

/// What a run came to.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Hash of all events.
    pub hash: u64,
    /// How many there were.
    pub events: u64,
    /// Commands answered.
    pub answered: u64,
    /// Virtual time at the end.
    pub end_ns: Nanos,
    /// Logins accepted and rejected.
    pub logins: (u64, u64),
}

/// See the module's header.
pub struct World {
    profile: Profile,
    rng: Rng,
    net: Shared,
    clock: Arc<AtomicU64>,
    control: Control<SimCm>,
    mails: Receiver<ToControl<SimEndpoint>>,
    reactors: Vec<Reactor<Path<SimFabric>>>,
    hosts: Vec<Host>,
    hostile: Option<Hostile>,
    model: Model,
    resets: Vec<Resets>,
    answered: u64,
    media: Vec<Medium>,
}

/// Runs the world of a seed to its end.
pub fn run(seed: u64) -> Summary {
    let mut world = World::new(Profile::draw(seed));
    if world.net.borrow().trace.prints() {
        eprintln!("{:#?}", world.profile);
    }
    world.load();
    world.stop();
    world.end()
}

fn port(index: usize) -> PortId {
    PortId::from_halves(0, 0x5054_0000_0000_0001 + index as u64)
}

fn target_port() -> PortId {
    PortId::from_halves(0x0002_c903_000e_8acd, 0x0002_c903_000e_8acc)
}

impl World {
    /// Builds everything.
    pub fn new(profile: Profile) -> World {
        let mut rng = Rng::new(profile.seed ^ 0x5EED);
        let net = Net::new(rng.fork(), profile.net.clone());
        let clock = Arc::new(AtomicU64::new(0));
        let mut model = Model::new();
        let media: Vec<Medium> = profile
            .disks
            .iter()
            .enumerate()
            .map(|(at, kind)| open_disk(at, kind, &mut model, &mut rng, &clock))
            .collect();
        // The hostile host's own disk, which nobody looks at.
        let geometry = usurp_bdev::Geometry::new(512, 64);
        let own = DiskKind::Malloc(geometry);
        let victim = open_disk(media.len(), &own, &mut Model::new(), &mut rng, &clock);
        let mut all: Vec<Arc<dyn Bdev>> = media.iter().map(|m| m.bdev.clone()).collect();
        all.push(victim.bdev);
        let (sender, mails) = ControlSender::new(profile.control_mails, Arc::new(|| ()));
        let boxes: Vec<_> = (0..profile.reactors).map(|_| mailbox(512)).collect();
        let (mailboxes, inboxes): (Vec<_>, Vec<_>) = boxes.into_iter().unzip();
        let mut reactors = Vec::new();
        let mut ports = Vec::new();
        for (index, inbox) in inboxes.into_iter().enumerate() {
            let bytes = profile.shape.bytes() * usize::from(profile.channels_per_reactor);
            let iu_arena = Arena::new("IUs", bytes, HugePolicy::Never).expect("a small arena");
            ports.push(ReactorPort { mailbox: mailboxes[index].clone(), iu_arena });
            let path = make_path(&profile, index, &net, &all, &mailboxes, &sender);
            let config = ReactorConfig::new(index, 0);
            reactors.push(Reactor::with(&config, inbox, Arc::default(), path, Vec::new()));
        }
        let config = control_config(&profile, media.len());
        let control = Control::new(SimCm::new(net.clone()), config, ports);
        let mut world = World {
            rng,
            net,
            clock,
            control,
            mails,
            reactors,
            hosts: Vec::new(),
            hostile: None,
            resets: vec![Resets::default(); media.len()],
            model,
            answered: 0,
            media,
            profile,
        };
        world.make_hosts();
        world
    }

    fn make_hosts(&mut self) {
        let views: Vec<View> = self
            .media
            .iter()
            .zip(&self.profile.disks)
            .enumerate()
            .map(|(at, (medium, kind))| View {
                lun: at as u16,
                unit: medium.unit,
                block_size: kind.geometry().block_size,
                blocks: kind.geometry().blocks,
                errors: kind.errors(),
                unmap: emulate::caps(&*medium.bdev, Sharing::Shared).unmap,
                torn: kind.lends(),
            })
            .collect();
        for (index, p) in self.profile.hosts.clone().into_iter().enumerate() {
            let config = HostConfig {
                index,
                port: port(index),
                target: target_port(),
                channels: p.channels,
                views: views.clone(),
                commands: p.commands,
                queue: p.queue,
                mix: p.mix,
                disasters: p.disasters,
                transfer_max: TRANSFER_MAX,
                it_iu_len: self.profile.shape.it_iu_max,
                immediate: p.immediate,
                pause_ns: p.pause_ns,
                answer_ns: ANSWER_NS,
            };
            let (host, memory) = Host::new(config, self.rng.fork());
            self.hosts.push(host);
            self.net.borrow_mut().memory.push(memory);
        }
        if self.profile.hostile > 0 {
            let index = self.hosts.len();
            let count = self.profile.hostile;
            let rng = self.rng.fork();
            let hostile = Hostile::new(index, port(1000), target_port(), count, rng);
            self.hostile = Some(hostile.0);
            self.net.borrow_mut().memory.push(hostile.1);
        }
    }

    /// One step of one of those who act. How much it did.
    fn step(&mut self) -> usize {
        let now = {
            let net = &mut *self.net.borrow_mut();
            net.now += self.rng.range(50, 1_500);
            net.advance();
            net.now
        };
        self.clock.store(now, Ordering::Relaxed);
        let (reactors, hosts) = (self.reactors.len(), self.hosts.len());
        // Reactors poll more often than anybody else does anything.
        let who = self.rng.index(1 + 2 * reactors + hosts + 1);
        match who {
            0 => self.control_turn(now),
            _ if who <= 2 * reactors => self.reactors[(who - 1) / 2].turn_once(now),
            _ if who <= 2 * reactors + hosts => self.host_turn(who - 1 - 2 * reactors),
            _ => {
                let net = &mut *self.net.borrow_mut();
                self.hostile.as_mut().map_or(0, |h| h.turn(net))
            }
        }
    }

    fn control_turn(&mut self, now: Nanos) -> usize {
        let mut events = 0;
        while let Some(event) = self.control.cm_mut().next_event(None).expect("never fails") {
            self.control.on_event(event, now);
            events += 1;
        }
        while let Ok(mail) = self.mails.try_recv() {
            self.control.on_mail(mail, now);
            events += 1;
        }
        self.control.on_time(now);
        events
    }

    fn host_turn(&mut self, at: usize) -> usize {
        let net = &mut *self.net.borrow_mut();
        let mut env = Env {
            net,
            model: &mut self.model,
            resets: &mut self.resets,
            answered: &mut self.answered,
        };
        self.hosts[at].turn(&mut env)
    }

    /// When nobody has anything to do, time goes on to the next thing.
    fn jump(&mut self) {
        let reactors = self.reactors.iter().filter_map(Reactor::next_timer);
        let hosts = self.hosts.iter().map(Host::next_timer);
        let hostile = self.hostile.iter().map(Hostile::next_timer);
        let control = self.control.next_timer();
        let net = &mut *self.net.borrow_mut();
        let next = reactors.chain(hosts).chain(hostile).chain(control).chain(net.next_event());
        let next = next.min().unwrap_or(Nanos::MAX).min(net.now + 1_000_000);
        net.now = net.now.max(next);
    }

    /// Goes on until `over`, for `limit` at the most.
    fn run_until(&mut self, what: &str, limit: Nanos, over: impl Fn(&World) -> bool) {
        let start = self.net.borrow().now;
        let mut idle = 0;
        while !over(self) {
            let patience = IDLE_ROUNDS * (2 + 2 * self.reactors.len() + self.hosts.len());
            idle = if self.step() > 0 { 0 } else { idle + 1 };
            if idle > patience {
                self.jump();
                idle = 0;
            }
            let now = self.net.borrow().now;
            if now > start + limit {
                panic!("{what} is not over after {limit} ns\n{}", self.describe());
            }
        }
    }

    fn describe(&self) -> String {
        let mut lines: Vec<String> = self.hosts.iter().map(Host::describe).collect();
        lines.push(format!(
            "control: {} channels, {} nexuses, peers {:?}",
            self.control.channels(),
            self.control.nexuses(),
            self.control.peers()
        ));
        for (at, reactor) in self.reactors.iter().enumerate() {
            let shared = reactor.work().shared();
            let lus = shared.lus.iter().map(|l| (l.in_flight, l.stalled.len(), l.aborting));
            let (whole, waiting) = (reactor.work().is_whole(), &shared.waiting);
            let lus: Vec<_> = lus.collect();
            lines.push(format!(
                "reactor {at}: whole {whole}, (in flight, stalled, aborting) {lus:?}, waiting for \
                 buffers {waiting:?}, {} of {} bytes free",
                shared.data.free_bytes(),
                shared.data.bytes()
            ));
        }
        lines.join("\n")
    }

    /// The load, and the calm after it.
    fn load(&mut self) {
        if self.profile.stop_early {
            let until = self.net.borrow().now + self.rng.range(100_000, 20_000_000);
            let idle = |w: &World| w.hosts.iter().all(Host::is_idle);
            self.run_until("load", PHASE_NS, |w| w.net.borrow().now >= until || idle(w));
            return;
        }
        self.run_until("load", PHASE_NS, |w| {
            w.hosts.iter().all(Host::is_idle) && w.hostile.iter().all(Hostile::is_idle)
        });
    }

    /// The target stops.
    fn stop(&mut self) {
        self.net.borrow_mut().calm = true;
        for host in &mut self.hosts {
            host.close();
        }
        if let Some(hostile) = &mut self.hostile {
            hostile.close();
        }
        let now = self.net.borrow().now;
        self.control.on_mail(ToControl::Stop, now);
        let limit = self.profile.grace_ns + STOP_NS;
        self.run_until("stopping", limit, |w| w.control.is_stopped());
        self.control.end_reactors();
        self.run_until("the reactors' end", STOP_NS, |w| {
            w.reactors.iter().all(Reactor::is_finished)
        });
    }

    /// Everything must be back, and the media must be as the model says.
    fn end(mut self) -> Summary {
        self.run_until("the hosts' end", STOP_NS, |w| w.hosts.iter().all(Host::is_down));
        for host in &mut self.hosts {
            host.end(&mut self.model);
        }
        assert_eq!(self.control.channels(), 0, "channels are left");
        assert_eq!(self.control.nexuses(), 0, "nexuses are left");
        for (at, reactor) in self.reactors.iter().enumerate() {
            assert!(reactor.work().is_whole(), "reactor {at} is not whole\n{}", self.describe());
        }
        assert!(self.net.borrow().is_quiet(), "the network still has connections of the target");
        for (at, medium) in self.media.iter().enumerate() {
            let Some(arena) = &medium.arena else { continue };
            let mut data = vec![0; medium.bdev.geometry().size_bytes() as usize];
            arena.copy_out(0, &mut data);
            let checked = self.model.check_medium(medium.unit, &data);
            checked.unwrap_or_else(|why| panic!("disk {at} at the end: {why}"));
        }
        let net = self.net.borrow();
        Summary {
            hash: net.trace.hash(),
            events: net.trace.events(),
            answered: self.answered,
            end_ns: net.now,
            logins: self.control.logins(),
        }
    }
}

fn open_disk(
    at: usize,
    kind: &DiskKind,
    model: &mut Model,
    rng: &mut Rng,
    clock: &Arc<AtomicU64>,
) -> Medium {
    let g = kind.geometry();
    let unit = model.add_unit(g.block_size as usize, g.blocks, kind.lends());
    let (bytes, block_size) = (g.size_bytes(), g.block_size);
    let base = format!("{{ name: d{at}, malloc: {{ size: {bytes}, block_size: {block_size} }} }}");
    let bdev = match kind {
        DiskKind::Sim(config) => {
            let disk = Disk::new(&format!("d{at}"), config.clone(), rng.bits(), clock.clone());
            let arena = Some(disk.medium().clone());
            return Medium { bdev: disk, arena, unit };
        }
        DiskKind::Malloc(_) => open_one(&base).expect("a malloc bdev opens"),
        DiskKind::Stack(_) => {
            let every = rng.range(5, 50);
            let (read, write) = (rng.range(1, 200), rng.range(1, 200));
            let yaml = format!(
                "- {base}\n\
                 - name: s{at}\n  \
                   delay: {{ base: d{at}, read_us: {read}, write_us: {write} }}\n\
                 - {{ name: e{at}, error: {{ base: s{at}, every: {every}, status: medium }} }}\n"
            );
            open_one(&yaml).expect("a stack of filters opens")
        }
    };
    let arena = bdev.lendable().cloned();
    Medium { bdev, arena, unit }
}

fn make_path(
    profile: &Profile,
    index: usize,
    net: &Shared,
    disks: &[Arc<dyn Bdev>],
    mailboxes: &[Mailbox<ToReactor<SimEndpoint>>],
    sender: &ControlSender<SimEndpoint>,
) -> Path<SimFabric> {
    let lent = disks.iter().filter_map(|d| d.lendable()).map(|arena| arena.addr()).collect();
    let send_wr = profile.shape.sends() + profile.rdma_wrs;
    let mut fabric = SimFabric::new(net.clone(), send_wr, profile.shape.recvs(), lent);
    let data = Arena::new("data", profile.data_bytes, HugePolicy::Never).expect("a small arena");
    let data_lkey = fabric.register(&data).expect("it registers");
    let max = TRANSFER_MAX as usize;
    let pool = BufPool::new(data.clone(), 0, data.len(), SCRATCH_BYTES, max);
    let lus = disks.iter().map(|bdev| {
        let depth = profile.queue_depth;
        let setup = QueueSetup { depth, data: Some(data.clone()), core: index };
        let queue = emulate::open(&**bdev, &setup, Sharing::Shared).expect("a queue opens");
        let lends = bdev
            .lendable()
            .map(|arena| (arena.clone(), fabric.register(arena).expect("it registers")));
        let geometry = bdev.geometry();
        let mut config = LuConfig::new(geometry, emulate::caps(&**bdev, Sharing::Shared));
        config.max_transfer_blocks = TRANSFER_MAX / geometry.block_size;
        LuSlot::new(Lu::new(config), queue, lends)
    });
    let lus = lus.collect();
    let config = PathConfig {
        id: ReactorId(index as u16),
        reactors: mailboxes.to_vec(),
        control: sender.clone(),
        channels_max: profile.channels_per_reactor,
        ioctxs_per_channel: profile.shape.ioctxs(),
        grace_ns: profile.grace_ns,
    };
    Path::new(config, fabric, PathShared::new(lus, pool, data_lkey))
}

fn control_config(profile: &Profile, disks: usize) -> ControlConfig {
    let entry = |lun: usize, lu: usize| LunEntry { lun: lun as u16, lu: lu as u16 };
    let all = LunMap::new((0..disks).map(|at| entry(at, at)).collect());
    let all = Arc::new(all);
    let own = Arc::new(LunMap::new(vec![entry(0, disks)]));
    let known = |at: usize| HostRule { host: HostMatch::Port(port(at)), luns: all.clone() };
    let mut hosts: Vec<HostRule> = (0..profile.hosts.len()).map(known).collect();
    hosts.push(HostRule { host: HostMatch::Any, luns: own });
    let mut policy = Policy::new(target_port());
    policy.max_it_iu_len = profile.shape.it_iu_max;
    policy.max_ti_iu_len = profile.shape.ti_iu_max;
    policy.credits = profile.shape.credits;
    ControlConfig {
        policy,
        shape: profile.shape,
        channels_per_reactor: profile.channels_per_reactor,
        channels_per_nexus: 8,
        // Whoever is not known is the hostile host, which changes its name at times.
        hosts,
        fence_ns: FENCE_NS,
        establish_ns: ESTABLISH_NS,
    }
}
