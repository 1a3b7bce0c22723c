//! A well-behaved initiator on LUN 1 that writes, reads back and compares while somebody else
//! misbehaves.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

use usurp_bench::args::DescFormat;
use usurp_bench::client::Shape;
use usurp_bench::connect::{Nexus, ShmClient, open_shm, random_u64};
use usurp_reactor::cpu::Clock;
use usurp_srp::PortId;

use super::site::{Random, Setup, Site, noise};
use super::target::Target;
use super::{ID_EXT, IOC_GUID, PATIENCE};

/// The LUN that nobody else touches.
const LUN: u16 = 1;

/// A client of the library, with `slots` commands per channel, that gives way while it waits.
pub fn client(socket: &std::path::Path, channels: usize, slots: u32) -> ShmClient {
    let nexus = Nexus {
        initiator: PortId::from_halves(0, random_u64()),
        target: PortId::from_halves(ID_EXT, IOC_GUID),
    };
    client_as(socket, &nexus, channels, slots)
}

/// The same from a given port.
pub fn client_as(
    socket: &std::path::Path,
    nexus: &Nexus,
    channels: usize,
    slots: u32,
) -> ShmClient {
    let timeout_ns = PATIENCE.as_nanos() as u64;
    let shape = Shape { slots, buffer_bytes: 64 << 10, desc: DescFormat::Direct, timeout_ns };
    let client = open_shm(socket, nexus, shape, channels);
    let mut client = client.unwrap_or_else(|why| panic!("{why}"));
    let clock = Clock::new();
    client.set_time(Box::new(move || {
        std::thread::yield_now();
        clock.now()
    }));
    client
}

/// A thread with a client that checks what it reads.
pub struct Bystander {
    /// Ends it.
    stop: Arc<AtomicBool>,
    /// Rounds that were right.
    rounds: Arc<AtomicU64>,
    /// Panics if it noticed anything.
    thread: JoinHandle<()>,
}

impl Bystander {
    /// Starts, and returns after the first round.
    pub fn start(target: &Target) -> Bystander {
        let stop = Arc::new(AtomicBool::new(false));
        let rounds = Arc::new(AtomicU64::new(0));
        let (socket, seen, count) = (target.socket.clone(), stop.clone(), rounds.clone());
        let thread = std::thread::spawn(move || live(socket, &seen, &count));
        let bystander = Bystander { stop, rounds, thread };
        bystander.more_rounds(1);
        bystander
    }

    /// Waits until it has done some more rounds.
    pub fn more_rounds(&self, more: u64) {
        let wanted = self.rounds.load(Ordering::Relaxed) + more;
        let until = Instant::now() + PATIENCE;
        while self.rounds.load(Ordering::Relaxed) < wanted {
            assert!(!self.thread.is_finished(), "the bystander noticed something");
            assert!(Instant::now() < until, "the bystander is not served");
            std::thread::yield_now();
        }
    }

    /// Ends it; panics if it noticed anything.
    pub fn end(self) {
        self.more_rounds(1);
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("the bystander noticed nothing");
    }
}

fn live(socket: PathBuf, stop: &AtomicBool, rounds: &AtomicU64) {
    let mut client = client(&socket, 1, 4);
    client.wait_ready(LUN).expect("its LUN is there");
    let mut random = Random(random_u64());
    while !stop.load(Ordering::Relaxed) {
        let lba = random.below(30_000);
        let blocks = 1 + random.below(256) as usize;
        let written = noise(blocks * 512, random.next());
        let mut read = vec![0; written.len()];
        client.write_blocks(LUN, lba, 512, &written).expect("its writes are good");
        client.read_blocks(LUN, lba, 512, &mut read).expect("its reads are good");
        assert!(read == written, "{blocks} blocks at LBA {lba} changed");
        rounds.fetch_add(1, Ordering::Relaxed);
    }
    client.close();
}

/// A target under observation: somebody misbehaves on LUN 0, somebody else works on LUN 1.
pub struct Siege {
    /// The target; one reactor serves all.
    pub target: Target,
    /// The one who must not notice.
    bystander: Bystander,
    /// Kept for the socket's folder.
    _site: Site,
}

impl Siege {
    /// RAM for both.
    pub fn new() -> Siege {
        Siege::with(&Setup::ram())
    }

    /// Any setup whose LUN 1 may be overwritten.
    pub fn with(setup: &Setup) -> Siege {
        let site = Site::new();
        let target = Target::start(&site, setup);
        let bystander = Bystander::start(&target);
        Siege { target, bystander, _site: site }
    }

    /// Waits until the bystander has done some more rounds.
    pub fn more_rounds(&self, more: u64) {
        self.bystander.more_rounds(more);
    }

    /// The bystander noticed nothing, the target ends in good order.
    pub fn end(self) {
        self.bystander.end();
        self.target.end_whole();
    }
}
