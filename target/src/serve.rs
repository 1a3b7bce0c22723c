//! Starting and ending a target: bdevs, memory, reactors, listeners, the control loop, and all of
//! it back again.
//!
//! ```text
//!   cores ─> bdevs ─> sockets ─> arenas ─> reactors (queues, registration) ─> banner ─> control
//!                                                                                     │ SIGTERM
//!   everything whole <─ reactors end <─ channels end <─ no new logins <────────────────────┘
//! ```
//! Nothing is served before everything stands; whatever fails on the way undoes what was begun by
//! being dropped.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, bounded};
use sha2::{Digest, Sha256};
use signal_hook::consts::{SIGINT, SIGTERM};
use tracing::{info, warn};
use usurp_bdev::emulate::{self, Sharing};
use usurp_bdev::registry::Registry;
use usurp_bdev::{Bdev, BdevError, QueueSetup};
use usurp_fabric::any::{AnyCm, AnyFabric};
use usurp_fabric::shm::{FabricConfig, Listener, ListenerParams, QpConfig, ShmFabric};
use usurp_fabric::{Cm, Fabric, FabricError, Lkey};
use usurp_reactor::Nanos;
use usurp_reactor::cpu::{self, Clock};
use usurp_reactor::mem::{Arena, BufPool, MemError};
use usurp_reactor::turn::{
    AdaptiveConfig, Handle, Idle, Inbox, Mailbox, ReactorConfig, SpawnError, mailbox, spawn_with,
};
use usurp_scsi::{Lu, LuConfig, SCRATCH_BYTES};
use usurp_srp::PortId;
use usurp_srp::login::Policy;

use crate::banner::{announce, describe};
use crate::config::{self, Config, ConfigErrors, Initiator, Listen};
use crate::conn::ChannelShape;
use crate::control::{Control, ControlConfig, ControlSender, HostMatch, HostRule, ReactorPort};
use crate::luns::{LunEntry, LunMap};
use crate::mail::{ReactorId, ToControl, ToReactor};
use crate::path::{Path, PathConfig};
use crate::shared::{LuSlot, Shared};

/// Largest IU taken from an initiator: SRP_CMD with 8 KiB of immediate data and room to spare, as
/// LIO has it.
const IT_IU_MAX: u32 = 8276;
/// Largest IU sent to an initiator. Initiators size buffers by it at their first login and keep
/// them: never change it.
const TI_IU_MAX: u32 = 512;
/// Descriptors of one command at the most: ib_srp's largest sg_tablesize.
const DESCS_MAX: u32 = 2048;
/// Channels of one reactor, unless the configuration says otherwise.
const CHANNELS_PER_REACTOR: u32 = 64;
/// Channels of one nexus, unless the configuration says otherwise.
const CHANNELS_PER_NEXUS: u32 = 64;
/// I/Os in one reactor's queue of a bdev.
const QUEUE_DEPTH: u32 = 256;
/// Mails that wait at a reactor.
const MAILBOX: usize = 1024;
/// How long commands may go on when the target stops.
const GRACE_NS: Nanos = 2_000_000_000;
/// How long a login waits for the channels that it replaces.
const FENCE_NS: Nanos = 10_000_000_000;
/// How long an accepted login may stay without an answer from the initiator.
const ESTABLISH_NS: Nanos = 30_000_000_000;
/// After a stop, how long channels may take to end altogether.
const STOP_NS: Nanos = 10_000_000_000;

/// How to run, beside the configuration.
#[derive(Clone, Debug, Default)]
pub struct RunOptions {
    /// Written to (one line, then closed) once logins are accepted; a FIFO or an ordinary file.
    pub ready_file: Option<PathBuf>,
    /// No banner on standard output.
    pub quiet: bool,
}

/// Why a target did not start, or did not end well.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The configuration, seen against this machine.
    #[error("{0}")]
    Config(#[from] ConfigErrors),
    /// Something that the configuration names is in use by somebody else.
    #[error("{0}")]
    Busy(String),
    /// Memory.
    #[error("memory: {0}")]
    Memory(#[from] MemError),
    /// Anything else while starting.
    #[error("{0}")]
    Start(String),
    /// A reactor did not start.
    #[error("{0}")]
    Reactor(#[from] SpawnError),
    /// Channels did not end in time.
    #[error("channels did not end in {seconds} s; their peers: {}", .peers.join(", "))]
    Stuck {
        /// Their peers.
        peers: Vec<String>,
        /// How long they had.
        seconds: u64,
    },
}

impl ServeError {
    /// What the process says to the shell; see docs/admin.md.
    pub fn exit_code(&self) -> u8 {
        match self {
            ServeError::Config(_) => 3,
            ServeError::Busy(_) => 4,
            _ => 1,
        }
    }
}

impl From<FabricError> for ServeError {
    fn from(e: FabricError) -> ServeError {
        match e {
            FabricError::InUse(_) => ServeError::Busy(e.to_string()),
            other => ServeError::Start(other.to_string()),
        }
    }
}

type Endpoint = <AnyFabric as Fabric>::Endpoint;
type ReactorHandle = Handle<Path<AnyFabric>, bool>;

/// A logical unit before reactors make theirs of it.
#[derive(Clone)]
struct LuPlan {
    bdev: Arc<dyn Bdev>,
    config: LuConfig,
}

/// What is the same for every reactor.
#[derive(Clone)]
struct Common {
    lus: Vec<LuPlan>,
    shape: ChannelShape,
    channels: u16,
    sharing: Sharing,
    mailboxes: Vec<Mailbox<ToReactor<Endpoint>>>,
    control: ControlSender<Endpoint>,
    transfer_max: usize,
    /// Some listener is by RDMA/CM.
    rdma: bool,
}

/// Serves until SIGTERM or SIGINT.
pub fn run(config: &Config, options: &RunOptions) -> Result<(), ServeError> {
    for warning in &config.warnings {
        warn!("{warning}");
    }
    let cores = cpu::resolve(&config.reactors.cores);
    let cores = cores.map_err(|e| ServeError::Start(format!("reactors.cores: {e}")))?;
    let (bdevs, maps, lus) = open_bdevs(config)?;
    let shape = shape_of(config);
    let channels = channels_per_reactor(config, cores.len());
    let cm = listen(config, &shape, cores.len() * usize::from(channels))?;
    let waker = cm.waker();
    let wake = Arc::new(move || waker.wake());
    let bound = 2 * cores.len() * usize::from(channels) + 8;
    let (sender, mails) = ControlSender::new(bound, wake);
    let boxes: Vec<_> = cores.iter().map(|_| mailbox(MAILBOX)).collect();
    let (mailboxes, inboxes): (Vec<_>, Vec<_>) = boxes.into_iter().unzip();
    let common = Common {
        lus,
        shape,
        channels,
        sharing: if cores.len() == 1 { Sharing::Sole } else { Sharing::Shared },
        mailboxes: mailboxes.clone(),
        control: sender.clone(),
        transfer_max: config.memory.transfer_bytes_max,
        rdma: wants_rdma(config),
    };
    let mut memory = String::new();
    let mut handles = Vec::new();
    let mut ports = Vec::new();
    for ((index, core), inbox) in cores.iter().enumerate().zip(inboxes) {
        let (iu_arena, data_arena) = arenas(config, &common, index)?;
        describe(&mut memory, &iu_arena);
        describe(&mut memory, &data_arena);
        let memories = [data_arena, iu_arena.clone()];
        ports.push(ReactorPort { mailbox: mailboxes[index].clone(), iu_arena });
        match start_reactor(config, &common, index, *core, inbox, memories) {
            Ok(handle) => handles.push(handle),
            Err(e) => {
                end_reactors(&mailboxes[..handles.len()], handles);
                return Err(e);
            }
        }
    }
    if cpu::unpin_current_from(&cores).is_err() {
        info!("every core has a reactor: the control thread shares them");
    }
    watch_signals(&sender)?;
    announce(config, options, &bdevs, &cores, &memory, &cm)?;
    let clock = Clock::new();
    let mut control = Control::new(cm, control_config(config, shape, channels, &maps), ports);
    let served = control_loop(&mut control, &mails, &clock);
    if served.is_ok() {
        control.end_reactors();
        for handle in handles {
            let name = handle.name().to_owned();
            assert!(handle.join(), "{name} ended with buffers, slots or commands missing");
        }
        let (accepted, rejected) = control.logins();
        info!(accepted, rejected, "ended; every pool is whole");
    }
    served
}

fn control_config(
    config: &Config,
    shape: ChannelShape,
    channels: u16,
    maps: &[Arc<LunMap>],
) -> ControlConfig {
    ControlConfig {
        policy: policy_of(config, &shape),
        shape,
        channels_per_reactor: channels,
        channels_per_nexus: config.target.nexus_channels_max.unwrap_or(CHANNELS_PER_NEXUS),
        hosts: hosts_of(config, maps),
        fence_ns: FENCE_NS,
        establish_ns: ESTABLISH_NS,
    }
}

/// Ends reactors that have no channels, because another one did not start.
fn end_reactors(mailboxes: &[Mailbox<ToReactor<Endpoint>>], handles: Vec<ReactorHandle>) {
    for (mailbox, handle) in mailboxes.iter().zip(handles) {
        // A reactor that ended by itself has nothing left to end.
        let _ = mailbox.send_blocking(ToReactor::Shutdown);
        handle.join();
    }
}

/// The control thread's life.
fn control_loop(
    control: &mut Control<AnyCm>,
    mails: &Receiver<ToControl<Endpoint>>,
    clock: &Clock,
) -> Result<(), ServeError> {
    let mut stop_by = None;
    while !control.is_stopped() {
        let now = clock.now();
        let until = control.next_timer().into_iter().chain(stop_by).min();
        let wait = until.map(|t: Nanos| Duration::from_nanos(t.saturating_sub(now)));
        let event = control.cm_mut().next_event(wait)?;
        let now = clock.now();
        if let Some(event) = event {
            control.on_event(event, now);
        }
        while let Ok(mail) = mails.try_recv() {
            control.on_mail(mail, now);
        }
        control.on_time(now);
        if control.is_stopping() {
            let by = *stop_by.get_or_insert(now + GRACE_NS + STOP_NS);
            if now >= by && !control.is_stopped() {
                let seconds = (GRACE_NS + STOP_NS) / 1_000_000_000;
                return Err(ServeError::Stuck { peers: control.peers(), seconds });
            }
        }
    }
    Ok(())
}

/// SIGTERM and SIGINT become mail.
fn watch_signals(control: &ControlSender<Endpoint>) -> Result<(), ServeError> {
    let mut signals = signal_hook::iterator::Signals::new([SIGTERM, SIGINT])
        .map_err(|e| ServeError::Start(format!("signals: {e}")))?;
    let control = control.clone();
    let watch = move || {
        for _ in signals.forever() {
            // A full queue is being drained: the next signal finds room.
            let _ = control.try_send(ToControl::Stop);
        }
    };
    std::thread::Builder::new()
        .name("usurp-signals".into())
        .spawn(watch)
        .map_err(|e| ServeError::Start(format!("signal thread: {e}")))?;
    Ok(())
}

/// Opens every bdev, and makes a logical unit of each that a host sees, one per way to see it.
#[allow(clippy::type_complexity)]
fn open_bdevs(config: &Config) -> Result<(Registry, Vec<Arc<LunMap>>, Vec<LuPlan>), ServeError> {
    let mut registry = Registry::new();
    let specs: Vec<_> = config.bdevs.iter().map(config::modules::spec).collect();
    if let Err(errors) = registry.open_all(&specs) {
        return Err(bdev_errors(config, errors));
    }
    let mut lus: Vec<((usize, bool), LuPlan)> = Vec::new();
    let mut maps = Vec::new();
    for host in &config.target.hosts {
        let mut entries = Vec::new();
        for lun in &host.luns {
            let key = (lun.bdev, lun.read_only);
            let at = match lus.iter().position(|(k, _)| *k == key) {
                Some(at) => at,
                None => {
                    let name = &config.bdevs[lun.bdev].name;
                    let bdev = registry
                        .export(name)
                        .map_err(|e| bdev_errors(config, vec![(lun.bdev, e)]))?;
                    lus.push((key, plan_lu(config, bdev, lun.read_only)?));
                    lus.len() - 1
                }
            };
            entries.push(LunEntry { lun: lun.lun, lu: at as u16 });
        }
        maps.push(Arc::new(LunMap::new(entries)));
    }
    Ok((registry, maps, lus.into_iter().map(|(_, lu)| lu).collect()))
}

fn bdev_errors(config: &Config, errors: Vec<(usize, BdevError)>) -> ServeError {
    let busy = errors.iter().all(|(_, e)| e.busy);
    let problems = config.bdev_problems(errors);
    if busy { ServeError::Busy(problems.to_string()) } else { ServeError::Config(problems) }
}

/// Identity and limits of a logical unit.
fn plan_lu(config: &Config, bdev: Arc<dyn Bdev>, read_only: bool) -> Result<LuPlan, ServeError> {
    let sharing = Sharing::Shared;
    let geometry = bdev.geometry();
    let mut lu = LuConfig::new(geometry, emulate::caps(&*bdev, sharing));
    lu.read_only = read_only;
    lu.max_transfer_blocks =
        (config.memory.transfer_bytes_max as u64 / u64::from(geometry.block_size)) as u32;
    lu.target_port = config.target.port_id();
    let identity = identity(&config.target.port_id(), bdev.name());
    lu.naa = identity;
    lu.serial = identity.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("to a string");
        text
    });
    if let Err(what) = lu.check() {
        return Err(ServeError::Start(format!("bdev `{}`: {what}", bdev.name())));
    }
    Ok(LuPlan { bdev, config: lu })
}

/// NAA 6 identifier of a logical unit: the same for the same target and bdev name, on every start.
fn identity(target: &[u8; 16], name: &str) -> [u8; 16] {
    let digest = Sha256::new().chain_update(target).chain_update(name).finalize();
    let mut naa: [u8; 16] = digest[..16].try_into().expect("a digest is 32 bytes");
    naa[0] = 0x60 | naa[0] & 0x0F;
    naa
}

fn shape_of(config: &Config) -> ChannelShape {
    ChannelShape {
        credits: u32::from(config.target.credits),
        it_iu_max: IT_IU_MAX,
        ti_iu_max: TI_IU_MAX,
        transfer_max: config.memory.transfer_bytes_max as u32,
        // A table is fetched into one buffer.
        descs_max: DESCS_MAX.min((config.memory.transfer_bytes_max / 16) as u32),
    }
}

fn channels_per_reactor(config: &Config, reactors: usize) -> u16 {
    let of_all = config.target.channels_max.map(|n| n.div_ceil(reactors as u32));
    of_all.unwrap_or(CHANNELS_PER_REACTOR).clamp(1, 4096) as u16
}

fn policy_of(config: &Config, shape: &ChannelShape) -> Policy {
    Policy {
        target_port_id: PortId(config.target.port_id()),
        max_it_iu_len: shape.it_iu_max,
        max_ti_iu_len: shape.ti_iu_max,
        credits: shape.credits,
        imm_data: config.target.immediate_data,
    }
}

fn hosts_of(config: &Config, maps: &[Arc<LunMap>]) -> Vec<HostRule> {
    let rules = config.target.hosts.iter().zip(maps);
    let rules = rules.map(|(host, luns)| HostRule {
        host: match host.initiator {
            Initiator::Any => HostMatch::Any,
            Initiator::Port(id) => HostMatch::Port(PortId(id)),
            Initiator::Guid(guid) => HostMatch::Guid(guid),
        },
        luns: luns.clone(),
    });
    rules.collect()
}

/// Sockets, before anything is served.
fn listen(config: &Config, shape: &ChannelShape, channels: usize) -> Result<AnyCm, ServeError> {
    let connections_max = channels + 64;
    let qp = queues(shape);
    let params = ListenerParams { qp, connections_max, ..ListenerParams::default() };
    let mut cm = AnyCm::new(Listener::new(params)?);
    #[cfg(feature = "verbs")]
    if wants_rdma(config) {
        let backlog = 128;
        let params = usurp_fabric::verbs::ListenerParams { qp, connections_max, backlog };
        cm = cm.with_verbs(usurp_fabric::verbs::Listener::new(params)?)?;
    }
    for listen in &config.target.listen {
        match listen {
            Listen::Shm(path) => cm.listen_shm(path, 0o600)?,
            Listen::RdmaCm(addr) => cm.listen_rdma(*addr)?,
        };
    }
    Ok(cm)
}

fn wants_rdma(config: &Config) -> bool {
    config.target.listen.iter().any(|l| matches!(l, Listen::RdmaCm(_)))
}

/// Depths of a channel's queue pair.
fn queues(shape: &ChannelShape) -> QpConfig {
    QpConfig { max_send_wr: shape.send_queue(), max_recv_wr: shape.recvs() }
}

/// A reactor's data plane.
fn fabric(common: &Common) -> AnyFabric {
    let max_qps = usize::from(common.channels);
    let fabric = AnyFabric::new(ShmFabric::new(FabricConfig { max_qps }));
    #[cfg(feature = "verbs")]
    if common.rdma {
        let config = usurp_fabric::verbs::FabricConfig { max_qps, qp: queues(&common.shape) };
        return fabric.with_verbs(usurp_fabric::verbs::VerbsFabric::new(config));
    }
    #[cfg(not(feature = "verbs"))]
    assert!(!common.rdma, "without the feature `verbs` no RDMA listener starts");
    fabric
}

/// The memory of one reactor: its channels' rings, and its data buffers.
fn arenas(
    config: &Config,
    common: &Common,
    index: usize,
) -> Result<(Arc<Arena>, Arc<Arena>), ServeError> {
    let iu_bytes = common.shape.bytes() * usize::from(common.channels);
    let policy = config.memory.hugepages;
    let iu = Arena::new(&format!("r{index} IUs"), iu_bytes, policy)?;
    let data = Arena::new(&format!("r{index} data"), config.memory.data_bytes, policy)?;
    Ok((iu, data))
}

/// Starts one reactor and waits until its queues stand. `memories`: data, IUs.
fn start_reactor(
    config: &Config,
    common: &Common,
    index: usize,
    core: usize,
    inbox: Inbox<ToReactor<Endpoint>>,
    memories: [Arc<Arena>; 2],
) -> Result<ReactorHandle, ServeError> {
    let mut reactor = ReactorConfig::new(index, core);
    reactor.mailbox = MAILBOX;
    reactor.idle = match config.reactors.idle {
        config::Idle::Spin => Idle::Spin,
        config::Idle::Adaptive => Idle::Adaptive(AdaptiveConfig::default()),
    };
    let (report, reported) = bounded(1);
    let common = common.clone();
    let make = move || {
        let path = make_path(&common, index, core, memories);
        let (path, result) = match path {
            Ok(path) => (path, Ok(())),
            Err((path, e)) => (path, Err(e)),
        };
        report.send(result).expect("the control thread waits for it");
        (path, Vec::new())
    };
    let handle = spawn_with(reactor, inbox, make, |path: Path<AnyFabric>| path.is_whole())?;
    match reported.recv() {
        Ok(Ok(())) => Ok(handle),
        Ok(Err(e)) => {
            handle.join();
            Err(ServeError::Start(format!("reactor on core {core}: {e}")))
        }
        Err(_) => {
            handle.join();
            Err(ServeError::Start(format!("the reactor on core {core} ended while starting")))
        }
    }
}

/// Everything a reactor owns, made on its own thread. On an error: a path that ends at once.
#[allow(clippy::result_large_err)]
fn make_path(
    common: &Common,
    index: usize,
    core: usize,
    [data, iu]: [Arc<Arena>; 2],
) -> Result<Path<AnyFabric>, (Path<AnyFabric>, String)> {
    let mut fabric = fabric(common);
    // The IUs' arena is registered now, so that no login has to wait for it.
    let keys = fabric.register(&data).and_then(|key| fabric.register(&iu).map(|_| key));
    let (data_lkey, mut error) = match keys {
        Ok(key) => (key, None),
        Err(e) => (Lkey(0), Some(e.to_string())),
    };
    let pool = BufPool::new(data.clone(), 0, data.len(), SCRATCH_BYTES, common.transfer_max);
    let mut lus = Vec::new();
    for plan in &common.lus {
        match make_lu(common, plan, core, &data, &mut fabric) {
            Ok(lu) => lus.push(lu),
            Err(e) => {
                error = Some(e);
                break;
            }
        }
    }
    let shared = Shared::new(lus, pool, data_lkey);
    let config = PathConfig {
        id: ReactorId(index as u16),
        reactors: common.mailboxes.clone(),
        control: common.control.clone(),
        channels_max: common.channels,
        ioctxs_per_channel: common.shape.ioctxs(),
        grace_ns: GRACE_NS,
    };
    let mut path = Path::new(config, fabric, shared);
    match error {
        None => Ok(path),
        Some(e) => {
            path.end();
            Err((path, e))
        }
    }
}

/// One logical unit's share on one reactor.
fn make_lu(
    common: &Common,
    plan: &LuPlan,
    core: usize,
    data: &Arc<Arena>,
    fabric: &mut AnyFabric,
) -> Result<LuSlot, String> {
    let setup = QueueSetup { depth: QUEUE_DEPTH, data: Some(data.clone()), core };
    let queue = emulate::open(&*plan.bdev, &setup, common.sharing)
        .map_err(|e| format!("bdev `{}`: {e}", plan.bdev.name()))?;
    let lends = match plan.bdev.lendable() {
        Some(arena) => {
            let lkey = fabric.register(arena).map_err(|e| e.to_string())?;
            Some((arena.clone(), lkey))
        }
        None => None,
    };
    Ok(LuSlot::new(Lu::new(plan.config.clone()), queue, lends))
}
