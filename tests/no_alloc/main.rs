//! A million mixed commands through the real control plane and I/O path, without one allocation or
//! free once the channels stand.
//!
//! ```text
//!   three logical units: null and malloc (memory lent), malloc behind a filter (through buffers)
//!   commands: reads and writes (direct, indirect, partial tables, immediate), FUA, flush, unmap,
//!   write same, verify, inquiry, errors, ABORT TASK, LOGICAL UNIT RESET
//! ```
//! `USURP_COMMANDS` changes the number.

use std::sync::Arc;

use usurp_bdev::emulate::{self, Sharing};
use usurp_bdev::registry::open_one;
use usurp_bdev::{Bdev, QueueSetup};
use usurp_fabric::{Cm, Fabric};
use usurp_reactor::Nanos;
use usurp_reactor::mem::{Arena, BufPool, HugePolicy};
use usurp_reactor::turn::{Reactor, ReactorConfig, mailbox};
use usurp_scsi::{Lu, LuConfig, SCRATCH_BYTES};
use usurp_srp::PortId;
use usurp_srp::initiator::{
    Channel, Config, Event, Format, InBuf, MemDesc, MultiChannel, OutBuf, Table, TmFunc,
    linux_login, login_answer, login_req,
};
use usurp_srp::login::Policy;
use usurp_target::conn::ChannelShape;
use usurp_target::control::{
    Control, ControlConfig, ControlSender, HostMatch, HostRule, ReactorPort,
};
use usurp_target::luns::{LunEntry, LunMap};
use usurp_target::mail::{ReactorId, ToControl};
use usurp_target::path::{Path, PathConfig};
use usurp_target::shared::{LuSlot, Shared};
use usurp_tests::alloc::{Counting, frozen};
use usurp_tests::loopback::{Loop, LoopCm, LoopEndpoint, LoopFabric, RKEY, SharedLoop};
use usurp_tests::rng::Rng;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const COMMANDS: u64 = 1_000_000;
const CHANNELS: usize = 3;
const CREDITS: u32 = 32;
const TRANSFER_MAX: usize = 64 << 10;
/// Descriptor tables of one channel: more than it has commands outstanding.
const TABLES: u64 = 64;
/// Bytes of one.
const TABLE_BYTES: u64 = 128;
/// Initiator memory of one channel: data, then the tables.
const WINDOW: usize = TRANSFER_MAX + (TABLES * TABLE_BYTES) as usize;

const BDEVS: &[&str] = &[
    "{ name: n, null: { size: 1GiB, block_size: 512 } }",
    "{ name: m, malloc: { size: 1MiB, block_size: 512 } }",
    "[{ name: b, malloc: { size: 1MiB, block_size: 4096 } }, { name: d, delay: { base: b } }]",
];

fn shape() -> ChannelShape {
    ChannelShape {
        credits: CREDITS,
        it_iu_max: 8276,
        ti_iu_max: 512,
        transfer_max: TRANSFER_MAX as u32,
        descs_max: 256,
    }
}

fn target() -> PortId {
    PortId::from_halves(1, 2)
}

/// An initiator's channel.
struct Chan {
    link: usize,
    srp: Channel,
    /// Its memory.
    va: u64,
}

/// Everything, in one thread.
struct Rig {
    shared: SharedLoop,
    control: Control<LoopCm>,
    mails: crossbeam_channel::Receiver<ToControl<LoopEndpoint>>,
    reactor: Reactor<Path<LoopFabric>>,
    chans: Vec<Chan>,
    memory: Arc<Arena>,
    rng: Rng,
    now: Nanos,
    iu: Box<[u8]>,
    descs: Vec<MemDesc>,
    sent: u64,
    done: u64,
    failed: u64,
}

fn path(
    shared: &SharedLoop,
    bdevs: &[Arc<dyn Bdev>],
    config: PathConfig<LoopEndpoint>,
) -> Path<LoopFabric> {
    let mut fabric = LoopFabric(shared.clone());
    let data = Arena::new("data", 4 << 20, HugePolicy::Never).unwrap();
    let data_lkey = fabric.register(&data).unwrap();
    let pool = BufPool::new(data.clone(), 0, data.len(), SCRATCH_BYTES, TRANSFER_MAX);
    let lus = bdevs.iter().map(|bdev| {
        let setup = QueueSetup { depth: 16, data: Some(data.clone()), core: 0 };
        let queue = emulate::open(&**bdev, &setup, Sharing::Sole).unwrap();
        let lends = bdev.lendable().map(|a| (a.clone(), fabric.register(a).unwrap()));
        let caps = emulate::caps(&**bdev, Sharing::Sole);
        let mut lu = LuConfig::new(bdev.geometry(), caps);
        lu.max_transfer_blocks = TRANSFER_MAX as u32 / bdev.geometry().block_size;
        LuSlot::new(Lu::new(lu), queue, lends)
    });
    let lus = lus.collect();
    Path::new(config, fabric, Shared::new(lus, pool, data_lkey))
}

impl Rig {
    fn new() -> Rig {
        let memory = Arena::new("initiator", CHANNELS * WINDOW, HugePolicy::Never).unwrap();
        let shape = shape();
        let shared = Loop::new(memory.clone(), (shape.send_queue(), shape.recvs()));
        let bdevs: Vec<_> = BDEVS.iter().map(|yaml| open_one(yaml).unwrap()).collect();
        let (sender, mails) = ControlSender::new(64, Arc::new(|| ()));
        let (mail, inbox) = mailbox(64);
        let config = PathConfig {
            id: ReactorId(0),
            reactors: vec![mail.clone()],
            control: sender,
            channels_max: CHANNELS as u16,
            ioctxs_per_channel: shape.ioctxs(),
            grace_ns: 0,
        };
        let path = path(&shared, &bdevs, config);
        let reactor = ReactorConfig::new(0, 0);
        let reactor = Reactor::with(&reactor, inbox, Arc::default(), path, Vec::new());
        let bytes = shape.bytes() * CHANNELS;
        let iu_arena = Arena::new("IUs", bytes, HugePolicy::Never).unwrap();
        let entry = |at: u16| LunEntry { lun: at, lu: at };
        let luns = Arc::new(LunMap::new((0..bdevs.len() as u16).map(entry).collect()));
        let mut policy = Policy::new(target());
        policy.credits = CREDITS;
        let config = ControlConfig {
            policy,
            shape,
            channels_per_reactor: CHANNELS as u16,
            channels_per_nexus: CHANNELS as u32,
            hosts: vec![HostRule { host: HostMatch::Any, luns }],
            fence_ns: 1_000_000,
            establish_ns: 1_000_000,
        };
        let port = ReactorPort { mailbox: mail, iu_arena };
        Rig {
            control: Control::new(LoopCm(shared.clone()), config, vec![port]),
            shared,
            mails,
            reactor,
            chans: Vec::new(),
            memory,
            rng: Rng::new(7),
            now: 1,
            iu: vec![0; 8300].into(),
            descs: Vec::with_capacity(16),
            sent: 0,
            done: 0,
            failed: 0,
        }
    }

    fn turn(&mut self) {
        self.now += 1_000;
        self.reactor.turn_once(self.now);
    }

    fn control_turn(&mut self) {
        while let Some(event) = self.control.cm_mut().next_event(None).unwrap() {
            self.control.on_event(event, self.now);
        }
        while let Ok(mail) = self.mails.try_recv() {
            self.control.on_mail(mail, self.now);
        }
        self.turn();
    }

    fn login(&mut self) {
        let action = match self.chans.len() {
            0 => MultiChannel::Single,
            _ => MultiChannel::Multi,
        };
        let req = linux_login(PortId::from_halves(3, 4), target(), action);
        let link = self.shared.borrow_mut().connect(&login_req(Format::IbCm64, &req));
        let answer = loop {
            self.control_turn();
            if let Some(answer) = self.shared.borrow_mut().answer(link) {
                break answer;
            }
        };
        self.control_turn();
        let granted = login_answer(&answer, &req).expect("the login is granted");
        let srp = Channel::new(&granted, Config { slots: CREDITS as u16 + 2 });
        let va = self.memory.addr() + (self.chans.len() * WINDOW) as u64;
        self.chans.push(Chan { link, srp, va });
    }

    /// Takes all answers.
    fn drain(&mut self) {
        for chan in &mut self.chans {
            while let Some(len) = {
                let mut shared = self.shared.borrow_mut();
                shared.take_from_target(chan.link, &mut self.iu)
            } {
                match chan.srp.on_iu(&self.iu[..len]) {
                    Event::Done(done) => {
                        self.done += 1;
                        self.failed += u64::from(done.status != 0);
                    }
                    Event::TmDone { aborted, .. } => self.done += 1 + u64::from(aborted.is_some()),
                    Event::CredReq { answer, .. } => {
                        self.shared.borrow_mut().send_to_target(chan.link, &answer);
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
    }

    /// Sends one random request, if there is credit.
    fn send(&mut self) {
        let at = self.rng.index(self.chans.len());
        let lun = self.rng.below(BDEVS.len() as u64);
        let block = if lun == 2 { 4096 } else { 512 };
        let chan = &mut self.chans[at];
        if !chan.srp.can_start_cmd() {
            return;
        }
        if self.rng.chance(2_000) {
            let Some(tag) = chan.srp.any_cmd(None) else { return };
            let Ok((_, len)) = chan.srp.abort_task(tag, 0, &mut self.iu) else { return };
            self.sent += 1;
            return self.shared.borrow_mut().send_to_target(chan.link, &self.iu[..len]);
        }
        let blocks = self.rng.range(1, (TRANSFER_MAX / block / 8) as u64) as u32;
        let lba = self.rng.below(64);
        let len = blocks as usize * block;
        let (cdb, out, inn) = command(&mut self.rng, lba, blocks, len, block);
        let data = chan.va;
        self.descs.clear();
        let pieces = self.rng.range(1, 6) as usize;
        let total = out.max(inn);
        for i in 0..pieces {
            let (from, to) = (total * i / pieces, total * (i + 1) / pieces);
            let va = data + from as u64;
            self.descs.push(MemDesc { va, key: RKEY, len: (to - from) as u32 });
        }
        let whole = MemDesc { va: data, key: RKEY, len: total as u32 };
        let va = data + TRANSFER_MAX as u64 + self.sent % TABLES * TABLE_BYTES;
        let in_iu = if self.rng.chance(500_000) { pieces } else { pieces / 2 };
        let table = Table { va, key: RKEY, descs: &self.descs, in_iu };
        put_table(&self.memory, va, &self.descs);
        let small = [0x5A; 4096];
        let form = self.rng.below(3);
        let data_out = match form {
            _ if out == 0 => OutBuf::None,
            0 if out <= small.len() => OutBuf::Immediate(&small[..out]),
            1 => OutBuf::Table(table),
            _ => OutBuf::Direct(whole),
        };
        let data_in = match form {
            _ if inn == 0 => InBuf::None,
            1 => InBuf::Table(table),
            _ => InBuf::Direct(whole),
        };
        let started = chan.srp.start_cmd(&cdb, lun << 48, data_out, data_in, 0, &mut self.iu);
        let (_, len) = started.expect("credit was looked at");
        self.sent += 1;
        self.shared.borrow_mut().send_to_target(chan.link, &self.iu[..len]);
    }

    /// Resets a logical unit: while nothing is outstanding, or commands would end without answers.
    fn reset(&mut self) {
        let lun = self.rng.below(BDEVS.len() as u64);
        let chan = &mut self.chans[0];
        let reset = chan.srp.start_tm(TmFunc::LunReset, lun << 48, 0, &mut self.iu);
        let (_, len) = reset.expect("an idle channel has credit");
        self.sent += 1;
        self.shared.borrow_mut().send_to_target(chan.link, &self.iu[..len]);
    }

    fn run(&mut self, commands: u64) {
        let until = self.sent + commands;
        while self.sent < until {
            for _ in 0..250 {
                for _ in 0..self.rng.range(1, 40) {
                    self.send();
                }
                self.turn();
                self.drain();
            }
            self.settle();
            self.reset();
            self.settle();
        }
    }

    /// Waits until every request is answered.
    fn settle(&mut self) {
        for _ in 0..10_000 {
            if self.done >= self.sent {
                return;
            }
            self.turn();
            self.drain();
        }
        panic!("{} requests were sent, {} answered", self.sent, self.done);
    }
}

/// Writes a descriptor table into the initiator's memory.
fn put_table(memory: &Arena, va: u64, descs: &[MemDesc]) {
    for (i, desc) in descs.iter().enumerate() {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&desc.va.to_be_bytes());
        bytes[8..12].copy_from_slice(&desc.key.to_be_bytes());
        bytes[12..].copy_from_slice(&desc.len.to_be_bytes());
        memory.copy_in((va - memory.addr()) as usize + i * 16, &bytes);
    }
}

/// A CDB, and its bytes of data-out and data-in.
fn command(
    rng: &mut Rng,
    lba: u64,
    blocks: u32,
    len: usize,
    block: usize,
) -> ([u8; 16], usize, usize) {
    let mut cdb = [0; 16];
    cdb[2..10].copy_from_slice(&lba.to_be_bytes());
    cdb[10..14].copy_from_slice(&blocks.to_be_bytes());
    let fua = if rng.chance(100_000) { 8 } else { 0 };
    let (opcode, flags, out, inn) = match rng.below(100) {
        0..40 => (0x88, fua, 0, len),
        40..80 => (0x8A, fua, len, 0),
        80..84 => (0x93, 0, block, 0),
        84..88 => (0x8F, 0, 0, 0),
        88..91 => {
            cdb = [0; 16];
            (0x35, 0, 0, 0)
        }
        91..94 => {
            cdb = [0; 16];
            cdb[4] = 96;
            (0x12, 0, 0, 96)
        }
        94..96 => {
            cdb = [0; 16];
            cdb[8] = 24;
            (0x42, 0, 24, 0)
        }
        96..98 => {
            cdb[2] = 0xFF;
            (0x88, 0, 0, len)
        }
        _ => {
            cdb = [0; 16];
            (0x00, 0, 0, 0)
        }
    };
    cdb[0] = opcode;
    cdb[1] = flags;
    (cdb, out, inn)
}

#[test]
fn a_million_commands_allocate_and_free_nothing() {
    let commands = std::env::var("USURP_COMMANDS").map_or(COMMANDS, |n| n.parse().unwrap());
    let mut rig = Rig::new();
    for _ in 0..CHANNELS {
        rig.login();
    }
    // The very first commands may still grow something once; all later ones may not.
    rig.run(1_000);
    let before = rig.done;
    let counted = frozen(|| rig.run(commands));
    println!("{} requests, {} ended in an error", rig.done - before, rig.failed);
    assert!(rig.failed < rig.done / 5, "most commands fail: the test tests nothing");
    assert_eq!(counted, (0, 0), "allocations and frees on the I/O path");
}
