//! The front queue before a scripted module: what is asked of the module, and what comes of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use usurp_reactor::mem::Buf;

use super::*;

const BLOCK: u32 = 512;
const BLOCKS: u64 = 1024;

/// A module in memory that records what it is asked.
struct Fake {
    caps: Caps,
    /// What `Unmap` and `WriteZeroes` end with.
    refuse: Arc<AtomicBool>,
    /// Operations seen.
    seen: std::sync::mpsc::SyncSender<(Op, u64, u64)>,
    /// Completions held back.
    hold: Arc<AtomicU32>,
}

struct FakeQueue {
    caps: Caps,
    refuse: Arc<AtomicBool>,
    seen: std::sync::mpsc::SyncSender<(Op, u64, u64)>,
    hold: Arc<AtomicU32>,
    data: Vec<u8>,
    fifo: VecDeque<Io>,
    depth: usize,
}

impl Bdev for Fake {
    fn name(&self) -> &str {
        "fake"
    }
    fn module(&self) -> &'static str {
        "fake"
    }
    fn geometry(&self) -> Geometry {
        Geometry::new(BLOCK, BLOCKS)
    }
    fn caps(&self) -> Caps {
        self.caps
    }
    fn queue(&self, setup: &QueueSetup) -> Result<Box<dyn Queue>, BdevError> {
        Ok(Box::new(FakeQueue {
            caps: self.caps,
            refuse: self.refuse.clone(),
            seen: self.seen.clone(),
            hold: self.hold.clone(),
            data: vec![0x11; (BLOCKS * u64::from(BLOCK)) as usize],
            fifo: VecDeque::new(),
            depth: setup.depth as usize,
        }))
    }
}

impl FakeQueue {
    fn run(&mut self, io: &mut Io) -> Status {
        let from = (io.lba.0 * u64::from(BLOCK)) as usize;
        let len = (io.blocks * u64::from(BLOCK)) as usize;
        let refuse = self.refuse.load(Ordering::Relaxed);
        assert!(!io.op.fua() || self.caps.fua, "FUA was not claimed");
        match io.op {
            Op::Read => io.buf.as_mut_slice()[..len].copy_from_slice(&self.data[from..from + len]),
            Op::Write { .. } => {
                self.data[from..from + len].copy_from_slice(&io.buf.as_slice()[..len]);
            }
            Op::Unmap => {
                assert!(self.caps.unmap);
                if refuse {
                    return Status::NotSupported;
                }
                if self.caps.unmap_zeroes {
                    self.data[from..from + len].fill(0);
                }
            }
            Op::WriteZeroes { .. } => {
                assert!(self.caps.write_zeroes);
                if refuse {
                    return Status::NotSupported;
                }
                self.data[from..from + len].fill(0);
            }
            Op::Flush => assert!(self.caps.flush),
            Op::Reset => {}
            other => panic!("{other:?} was not claimed"),
        }
        Status::Ok
    }
}

impl Queue for FakeQueue {
    fn submit(&mut self, io: Io) -> Result<(), Io> {
        if self.fifo.len() == self.depth {
            return Err(io);
        }
        let blocks = if io.op.has_range() { io.blocks } else { 0 };
        self.seen.try_send((io.op, io.lba.0, blocks)).unwrap();
        self.fifo.push_back(io);
        Ok(())
    }
    fn poll(&mut self, _now: Nanos, done: &mut Completions) {
        while self.fifo.len() > self.hold.load(Ordering::Relaxed) as usize && !done.is_full() {
            let mut io = self.fifo.pop_front().unwrap();
            let status = self.run(&mut io);
            done.push(io.complete(status));
        }
    }
    fn in_flight(&self) -> u32 {
        self.fifo.len() as u32
    }
}

/// A front queue before a fake, with buffers.
struct Bench {
    queue: Box<dyn Queue>,
    seen: std::sync::mpsc::Receiver<(Op, u64, u64)>,
    pool: BufPool,
    refuse: Arc<AtomicBool>,
    hold: Arc<AtomicU32>,
}

fn bench(caps: Caps, sharing: Sharing) -> Bench {
    let (sender, seen) = std::sync::mpsc::sync_channel(10_000);
    let (refuse, hold) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU32::new(0)));
    let fake = Fake { caps, refuse: refuse.clone(), seen: sender, hold: hold.clone() };
    let setup = QueueSetup { depth: 4, data: None, core: 0 };
    let queue = open(&fake, &setup, sharing).unwrap();
    let arena = Arena::new("bench", 4 << 20, HugePolicy::Never).unwrap();
    Bench { queue, seen, pool: BufPool::new(arena, 0, 4 << 20, 512, 1 << 20), refuse, hold }
}

impl Bench {
    fn buf(&mut self, bytes: &[u8]) -> Buf {
        let mut buf = self.pool.take(bytes.len().max(512)).unwrap();
        buf.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
        buf
    }

    fn submit(&mut self, op: Op, lba: u64, blocks: u64, bytes: &[u8], token: u64) {
        let buf = if bytes.is_empty() { Buf::none() } else { self.buf(bytes) };
        self.queue.submit(Io::new(op, Lba(lba), blocks, buf, token)).unwrap();
    }

    fn collect(&mut self) -> Vec<(u64, Status)> {
        let mut done = Completions::new();
        let mut all = Vec::new();
        for _ in 0..100 {
            self.queue.poll(0, &mut done);
            while let Some(d) = done.pop() {
                all.push((d.token, d.status));
                if !d.buf.is_none() {
                    self.pool.give(d.buf);
                }
            }
        }
        all
    }

    fn run(&mut self, op: Op, lba: u64, blocks: u64, bytes: &[u8]) -> Status {
        self.submit(op, lba, blocks, bytes, u64::MAX);
        let all = self.collect();
        assert_eq!(all.len(), 1);
        assert_eq!(all[0].0, u64::MAX);
        all[0].1
    }

    fn seen(&mut self) -> Vec<(Op, u64, u64)> {
        self.seen.try_iter().collect()
    }

    fn read(&mut self, lba: u64, blocks: u64) -> Vec<u8> {
        let len = (blocks * u64::from(BLOCK)) as usize;
        let buf = self.pool.take(len).unwrap();
        self.queue.submit(Io::new(Op::Read, Lba(lba), blocks, buf, 1)).unwrap();
        let mut done = Completions::new();
        self.queue.poll(0, &mut done);
        let finished = done.pop().unwrap();
        let bytes = finished.buf.as_slice()[..len].to_vec();
        self.pool.give(finished.buf);
        self.seen();
        bytes
    }
}

const WRITE: Op = Op::Write { fua: false };
const CAW: Op = Op::CompareAndWrite { fua: false };

fn zeroes(unmap: bool, fua: bool) -> Op {
    Op::WriteZeroes { unmap, fua }
}

#[test]
fn out_of_range_never_reaches_the_module() {
    let mut b = bench(Caps::default(), Sharing::Shared);
    for (lba, blocks) in [(1024, 1), (1023, 2), (u64::MAX, 1), (1, u64::MAX), (5, u64::MAX - 2)] {
        for op in [Op::Unmap, zeroes(false, false), Op::Read, WRITE, CAW] {
            assert_eq!(b.run(op, lba, blocks, &[]), Status::OutOfRange);
        }
    }
    assert_eq!(b.seen(), []);
}

#[test]
fn read_only_refuses_every_write_and_takes_reads() {
    let mut b = bench(Caps { read_only: true, ..Caps::default() }, Sharing::Sole);
    for op in [Op::Unmap, zeroes(true, true), WRITE, CAW, Op::WriteSame { fua: false }] {
        assert_eq!(b.run(op, 0, 1, &[]), Status::ReadOnly);
    }
    assert_eq!(b.run(Op::Read, 0, 1, &[0; 512]), Status::Ok);
    assert_eq!(b.run(Op::Flush, 0, 0, &[]), Status::Ok);
    assert_eq!(b.seen(), [(Op::Read, 0, 1)]);
}

#[test]
fn nothing_to_do_is_ok_without_the_module() {
    let mut b = bench(Caps::default(), Sharing::Shared);
    for op in [Op::Read, WRITE, Op::Flush, Op::Unmap, zeroes(true, false)] {
        assert_eq!(b.run(op, BLOCKS, 0, &[]), Status::Ok);
    }
    assert_eq!(b.run(Op::Unmap, 0, 5, &[]), Status::Ok);
    assert_eq!(b.seen(), []);
}

#[test]
#[should_panic(expected = "short buffer")]
fn a_short_buffer_is_our_own_bug() {
    bench(Caps::default(), Sharing::Shared).submit(WRITE, 0, 2, &[0; 512], 0);
}

#[test]
fn fua_is_a_flush_after_the_write() {
    let mut b = bench(Caps { flush: true, ..Caps::default() }, Sharing::Shared);
    assert_eq!(b.run(Op::Write { fua: true }, 3, 1, &[7; 512]), Status::Ok);
    assert_eq!(b.seen(), [(WRITE, 3, 1), (Op::Flush, 0, 0)]);
    assert_eq!(b.read(3, 1), [7; 512]);
}

#[test]
fn fua_is_passed_on_or_dropped_as_the_caps_say() {
    let fua = Op::Write { fua: true };
    let mut b = bench(Caps { flush: true, fua: true, ..Caps::default() }, Sharing::Shared);
    assert_eq!(b.run(fua, 3, 1, &[7; 512]), Status::Ok);
    assert_eq!(b.seen(), [(fua, 3, 1)]);
    let mut b = bench(Caps::default(), Sharing::Shared);
    assert_eq!(b.run(fua, 3, 1, &[7; 512]), Status::Ok);
    assert_eq!(b.seen(), [(WRITE, 3, 1)]);
}

#[test]
fn write_same_and_zeroes_are_written_in_chunks() {
    let mut b = bench(Caps { flush: true, ..Caps::default() }, Sharing::Shared);
    let block: Vec<u8> = (0..512).map(|n| n as u8).collect();
    assert_eq!(b.run(Op::WriteSame { fua: true }, 1, 600, &block), Status::Ok);
    let want = [(WRITE, 1, 256), (WRITE, 257, 256), (WRITE, 513, 88), (Op::Flush, 0, 0)];
    assert_eq!(b.seen(), want);
    let got = b.read(0, 602);
    assert!(got[..512].iter().all(|x| *x == 0x11));
    assert!(got[512..601 * 512].chunks(512).all(|chunk| chunk == block));
    assert!(got[601 * 512..].iter().all(|x| *x == 0x11));
    assert_eq!(b.run(zeroes(false, false), 2, 2, &[]), Status::Ok);
    assert_eq!(b.read(1, 4), [&block[..], &[0; 1024], &block[..]].concat());
}

#[test]
fn zeroes_may_be_an_unmap_with_a_flush_for_fua() {
    let caps = Caps { unmap: true, unmap_zeroes: true, flush: true, fua: true, ..Caps::default() };
    let mut b = bench(caps, Sharing::Shared);
    assert_eq!(b.run(zeroes(true, true), 2, 500, &[]), Status::Ok);
    assert_eq!(b.seen(), [(Op::Unmap, 2, 500), (Op::Flush, 0, 0)]);
    assert_eq!(b.run(zeroes(false, true), 2, 5, &[]), Status::Ok);
    assert_eq!(b.seen(), [(Op::Write { fua: true }, 2, 5)]);
}

#[test]
fn what_the_module_refuses_is_done_by_other_means_and_not_asked_again() {
    let caps = Caps { unmap: true, unmap_zeroes: true, write_zeroes: true, ..Caps::default() };
    let mut b = bench(caps, Sharing::Shared);
    b.refuse.store(true, Ordering::Relaxed);
    let op = zeroes(true, false);
    assert_eq!(b.run(op, 0, 4, &[]), Status::Ok);
    assert_eq!(b.seen(), [(op, 0, 4), (Op::Unmap, 0, 4), (WRITE, 0, 4)]);
    assert_eq!(b.run(op, 4, 4, &[]), Status::Ok);
    assert_eq!(b.run(Op::Unmap, 8, 4, &[]), Status::Ok);
    assert_eq!(b.seen(), [(WRITE, 4, 4), (WRITE, 8, 4)]);
    assert_eq!(b.read(0, 12), [0; 12 * 512]);
}

#[test]
fn a_refused_unmap_that_promises_nothing_is_ok() {
    let mut b = bench(Caps { unmap: true, ..Caps::default() }, Sharing::Shared);
    b.refuse.store(true, Ordering::Relaxed);
    assert_eq!(b.run(Op::Unmap, 0, 4, &[]), Status::Ok);
    assert_eq!(b.run(Op::Unmap, 0, 4, &[]), Status::Ok);
    assert_eq!(b.seen(), [(Op::Unmap, 0, 4)]);
}

#[test]
fn compare_and_write_needs_a_sole_queue() {
    let mut b = bench(Caps::default(), Sharing::Shared);
    assert_eq!(b.run(CAW, 0, 1, &[0x11; 1024]), Status::NotSupported);
    assert_eq!(b.seen(), []);
}

#[test]
fn compare_and_write_writes_if_equal_and_names_the_first_difference() {
    let mut b = bench(Caps::default(), Sharing::Sole);
    let equal = [[0x11; 1024], [0x22; 1024]].concat();
    assert_eq!(b.run(CAW, 4, 2, &equal), Status::Ok);
    assert_eq!(b.seen(), [(Op::Read, 4, 2), (WRITE, 4, 2)]);
    assert_eq!(b.read(4, 2), [0x22; 1024]);
    let mut other = [[0x22; 1024], [0x33; 1024]].concat();
    other[777] = 0;
    assert_eq!(b.run(CAW, 4, 2, &other), Status::Miscompare { offset: 777 });
    assert_eq!(b.seen(), [(Op::Read, 4, 2)]);
    assert_eq!(b.read(4, 2), [0x22; 1024]);
    assert_eq!(b.run(CAW, 0, 257, &vec![0; 257 * 1024]), Status::NotSupported);
}

#[test]
fn compare_and_write_is_alone_on_its_queue() {
    let mut b = bench(Caps::default(), Sharing::Sole);
    b.hold.store(1, Ordering::Relaxed);
    b.submit(WRITE, 9, 1, &[5; 512], 1);
    b.submit(CAW, 9, 1, &[[5; 512], [6; 512]].concat(), 2);
    let io = Io::new(WRITE, Lba(9), 1, b.buf(&[7; 512]), 3);
    let back = b.queue.submit(io).unwrap_err();
    assert_eq!((back.token, back.op), (3, WRITE));
    b.pool.give(back.complete(Status::Busy).buf);
    assert_eq!(b.collect(), []);
    assert_eq!(b.seen(), [(WRITE, 9, 1)]);
    b.hold.store(0, Ordering::Relaxed);
    assert_eq!(b.collect(), [(1, Status::Ok), (2, Status::Ok)]);
    assert_eq!(b.read(9, 1), [6; 512]);
}

#[test]
fn a_reset_aborts_emulated_ios_and_comes_back_last() {
    let mut b = bench(Caps::default(), Sharing::Sole);
    b.hold.store(9, Ordering::Relaxed);
    b.submit(zeroes(false, false), 0, 600, &[], 1);
    assert_eq!(b.collect(), []);
    b.submit(CAW, 9, 1, &[0; 1024], 2);
    b.submit(Op::Reset, 0, 0, &[], 3);
    assert_eq!(b.collect(), [(2, Status::Aborted)]);
    b.hold.store(0, Ordering::Relaxed);
    assert_eq!(b.collect(), [(1, Status::Aborted), (3, Status::Ok)]);
    assert_eq!(b.queue.in_flight(), 0);
    assert_eq!(b.run(WRITE, 0, 1, &[0; 512]), Status::Ok);
}

#[test]
fn more_emulated_ios_than_scratch_take_turns() {
    let mut b = bench(Caps::default(), Sharing::Shared);
    for token in 0..4 {
        b.submit(zeroes(false, false), token * 100, 100, &[], token);
    }
    let mut all = b.collect();
    all.sort_by_key(|(token, _)| *token);
    assert_eq!(all, [0, 1, 2, 3].map(|token| (token, Status::Ok)));
    assert_eq!(b.read(0, 401)[400 * 512..], [0x11; 512]);
    assert_eq!(b.read(0, 400), vec![0; 400 * 512]);
}

#[test]
#[should_panic(expected = "in flight")]
fn a_queue_dropped_with_io_in_flight_panics() {
    let mut b = bench(Caps::default(), Sharing::Shared);
    b.submit(zeroes(false, false), 0, 1, &[], 1);
    drop(b);
}

#[test]
fn offered_caps_include_what_is_emulated() {
    let (sender, _seen) = std::sync::mpsc::sync_channel(1);
    let mut fake =
        Fake { caps: Caps::default(), refuse: Arc::default(), seen: sender, hold: Arc::default() };
    let offered = caps(&fake, Sharing::Shared);
    assert!(offered.fua && offered.write_same && offered.write_zeroes);
    assert!(!offered.unmap && !offered.compare_and_write && !offered.flush);
    assert!(caps(&fake, Sharing::Sole).compare_and_write);
    fake.caps.read_only = true;
    let offered = caps(&fake, Sharing::Sole);
    assert!(offered.read_only && !offered.compare_and_write && !offered.write_same);
}
