//! What one seed stands for: sizes, speeds and faults of a simulated world, all drawn from it.
//!
//! [`KNOWN_GAPS`] switches off, by name, what the target is known to do wrong, so that the rest can
//! still be tested. It should be empty.

use usurp_bdev::{Caps, Geometry};
use usurp_reactor::Nanos;
use usurp_target::conn::ChannelShape;

use crate::bdev::DiskConfig;
use crate::host::{Disasters, Mix};
use crate::net::NetConfig;
use crate::rng::Rng;

/// Faults that are left out because the target does not stand them yet, each with its reason.
pub const KNOWN_GAPS: &[(&str, &str)] = &[];

/// Whether a fault is left out.
pub fn gap(name: &str) -> bool {
    let listed = KNOWN_GAPS.iter().any(|(gap, _)| *gap == name);
    let extra = std::env::var("USURP_GAPS").unwrap_or_default();
    listed || extra.split(',').any(|gap| gap == name)
}

/// A disk of the world.
#[derive(Clone, Debug)]
pub enum DiskKind {
    /// The simulated one.
    Sim(DiskConfig),
    /// `malloc`, whose memory is lent to RDMA.
    Malloc(Geometry),
    /// `delay` and `error` filters on `malloc`.
    Stack(Geometry),
}

impl DiskKind {
    /// Its geometry.
    pub fn geometry(&self) -> Geometry {
        match self {
            DiskKind::Sim(config) => config.geometry,
            DiskKind::Malloc(g) | DiskKind::Stack(g) => *g,
        }
    }

    /// Whether its I/O may fail.
    pub fn errors(&self) -> bool {
        match self {
            DiskKind::Sim(config) => config.errors_ppm > 0,
            DiskKind::Malloc(_) => false,
            DiskKind::Stack(_) => true,
        }
    }

    /// Whether RDMA goes to the medium itself.
    pub fn lends(&self) -> bool {
        matches!(self, DiskKind::Malloc(_))
    }
}

/// A host of the world.
#[derive(Clone, Debug)]
pub struct HostProfile {
    /// Channels.
    pub channels: usize,
    /// Commands outstanding on one.
    pub queue: usize,
    /// Commands in all.
    pub commands: u32,
    /// Kinds of commands.
    pub mix: Mix,
    /// What else it does.
    pub disasters: Disasters,
    /// Immediate data.
    pub immediate: bool,
    /// Time between actions.
    pub pause_ns: (Nanos, Nanos),
}

/// See the module's header.
#[derive(Clone, Debug)]
pub struct Profile {
    /// Where it comes from.
    pub seed: u64,
    /// Reactors.
    pub reactors: usize,
    /// Sizes of channels.
    pub shape: ChannelShape,
    /// Channels of one reactor.
    pub channels_per_reactor: u16,
    /// Places in a send queue beside what channels ask for at least.
    pub rdma_wrs: u32,
    /// Data buffers of a reactor, bytes.
    pub data_bytes: usize,
    /// Depth of bdev queues.
    pub queue_depth: u32,
    /// The disks.
    pub disks: Vec<DiskKind>,
    /// The honest hosts.
    pub hosts: Vec<HostProfile>,
    /// IUs that a hostile host sends; 0 = there is none.
    pub hostile: u32,
    /// Mails that the control thread's queue holds.
    pub control_mails: usize,
    /// The network.
    pub net: NetConfig,
    /// The target is told to stop while all hosts are busy.
    pub stop_early: bool,
    /// How long commands may go on after that.
    pub grace_ns: Nanos,
}

/// Bytes of a transfer at the most.
pub const TRANSFER_MAX: u32 = 16 << 10;

impl Profile {
    /// Draws a world.
    pub fn draw(seed: u64) -> Profile {
        let mut rng = Rng::new(seed);
        let rng = &mut rng;
        // One seed in three has no faults at all but delays: a failure there is easy to read.
        let wild = !rng.chance(333_333);
        let credits = rng.pick(&[2, 3, 4, 8, 16]);
        let shape = ChannelShape {
            credits,
            it_iu_max: rng.pick(&[512, 1024, 2116]),
            ti_iu_max: rng.pick(&[96, 288, 512]),
            transfer_max: TRANSFER_MAX,
            descs_max: 128,
        };
        let least = 2 * TRANSFER_MAX as usize;
        let rdma_wrs = rng.pick(&[1, 2, 8, 2 * credits]).min(2 * credits);
        let hosts: Vec<_> =
            (0..rng.range(1, 4)).map(|_| host(rng, wild, credits as usize)).collect();
        // All their channels, those of the hostile host, and dead ones that nobody has missed yet.
        let channels = hosts.iter().map(|h| h.channels).sum::<usize>() + 8 + 4;
        Profile {
            seed,
            reactors: rng.range(1, 3) as usize,
            shape,
            channels_per_reactor: channels as u16,
            rdma_wrs,
            data_bytes: rng.pick(&[least, least, 4 * least, 16 * least]),
            queue_depth: rng.pick(&[1, 2, 8, 64]),
            disks: (0..rng.range(1, 3)).map(|_| disk(rng, wild)).collect(),
            hosts,
            hostile: if wild && rng.chance(400_000) { rng.range(20, 1_000) as u32 } else { 0 },
            control_mails: rng.pick(&[1, 3, 256]),
            net: net(rng, wild),
            stop_early: wild && rng.chance(200_000),
            grace_ns: rng.pick(&[0, 100_000, 5_000_000, 100_000_000]),
        }
    }
}

fn disk(rng: &mut Rng, wild: bool) -> DiskKind {
    let block_size = rng.pick(&[512, 512, 4096]);
    let blocks = rng.pick(&[16, 64, 200]);
    let geometry = Geometry::new(block_size, blocks);
    match rng.below(4) {
        0 => DiskKind::Malloc(geometry),
        1 if wild => DiskKind::Stack(geometry),
        _ => {
            let mut any = || rng.chance(500_000);
            let unmap = any();
            let caps = Caps {
                flush: any(),
                fua: any(),
                unmap,
                unmap_zeroes: unmap,
                write_zeroes: any(),
                write_same: any(),
                compare_and_write: false,
                read_only: false,
            };
            let most = rng.pick(&[2_000, 50_000, 400_000]);
            DiskKind::Sim(DiskConfig {
                geometry,
                caps,
                latency_ns: (1_000, most),
                slow_ppm: if wild { 5_000 } else { 0 },
                errors_ppm: if wild { rng.pick(&[0, 0, 10_000, 100_000]) } else { 0 },
                full_ppm: if wild { rng.pick(&[0, 50_000]) } else { 0 },
            })
        }
    }
}

fn host(rng: &mut Rng, wild: bool, credits: usize) -> HostProfile {
    let even = rng.chance(300_000);
    let weight = |usual: u64| if even { 10 } else { usual };
    let mix = Mix {
        read: weight(50),
        write: weight(50),
        write_same: weight(3),
        unmap: weight(3),
        verify: weight(3),
        flush: weight(3),
        inform: weight(3),
        wrong: weight(3),
    };
    let mut some = |ppm: u64| if wild && rng.chance(500_000) { ppm } else { 0 };
    let disasters = Disasters {
        abort: if gap("abort") { 0 } else { some(50_000) },
        reset: if gap("reset") { 0 } else { some(10_000) },
        relogin: if gap("relogin") { 0 } else { some(6_000) },
        drop: if gap("drop") { 0 } else { some(6_000) },
        logout: if gap("logout") { 0 } else { some(3_000) },
        impatient: if gap("impatient") { 0 } else { some(200_000) },
    };
    HostProfile {
        channels: rng.range(1, 4) as usize,
        queue: rng.range(1, credits as u64) as usize,
        commands: rng.range(50, 1_000) as u32,
        mix,
        disasters,
        immediate: rng.chance(700_000),
        pause_ns: rng.pick(&[(100, 1_000), (500, 10_000), (10_000, 200_000)]),
    }
}

fn net(rng: &mut Rng, wild: bool) -> NetConfig {
    let mut some = |name: &str, ppm: u64| {
        if wild && !gap(name) && rng.chance(500_000) { ppm } else { 0 }
    };
    let post_fails_ppm = some("post-fails", 2_000);
    let rnr_ppm = some("rnr", 20_000);
    let setup_fails_ppm = some("setup-fails", 30_000);
    NetConfig {
        leg_ns: rng.pick(&[(500, 3_000), (500, 50_000), (5_000, 6_000)]),
        slow_factor: 30,
        slow_ppm: if wild { 20_000 } else { 0 },
        post_fails_ppm,
        rnr_ppm,
        setup_fails_ppm,
        retry_ns: 3_000_000,
    }
}
