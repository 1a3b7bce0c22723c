//! The suite that every module passes (feature `test-utils`): `conformance::run(bdev)` in a test.
//!
//! Owns: what "a block device" means, as checks. It works through the front queue of
//! [`crate::emulate`], as the target does, and overwrites the device.
//! Never does: real time. `now` is virtual and runs ahead to `next_timer`, so delays cost nothing;
//! only a module that waits for the kernel takes as long as that does, 30 s at most.

use std::sync::Arc;
use std::time::{Duration, Instant};

use usurp_reactor::Nanos;
use usurp_reactor::mem::{Arena, Buf, BufPool, HugePolicy};

use crate::contract::{Bdev, Geometry, Lba, Queue, QueueSetup};
use crate::emulate::{self, Sharing};
use crate::io::{Completions, Done, Io, Op, Status};

/// Depth of the queues under test.
const DEPTH: u32 = 8;
/// Memory for data, and the longest buffer in it.
const ARENA_BYTES: usize = 16 << 20;
const BUF_BYTES_MAX: usize = 1 << 20;
/// The smallest device that can be tested, in blocks.
const BLOCKS_MIN: u64 = 256;
/// How long the kernel may take.
const PATIENCE: Duration = Duration::from_secs(30);

const WRITE: Op = Op::Write { fua: false };

/// What a device may be excused from.
#[derive(Clone, Copy, Debug)]
pub struct Expect {
    /// What is written is read again. False for `null`, which then has to read as zeros.
    pub keeps_data: bool,
}

impl Default for Expect {
    fn default() -> Expect {
        Expect { keeps_data: true }
    }
}

/// Runs the suite; panics at the first failure. Overwrites the device.
pub fn run(bdev: Arc<dyn Bdev>) {
    run_with(bdev, Expect::default());
}

/// Runs the suite with some expectations changed.
pub fn run_with(bdev: Arc<dyn Bdev>, expect: Expect) {
    let geometry = bdev.geometry();
    assert!(geometry.is_sane(), "{geometry:?}");
    assert!(geometry.blocks >= BLOCKS_MIN, "the suite needs {BLOCKS_MIN} blocks");
    assert!(!bdev.name().is_empty() && !bdev.module().is_empty());
    let bdev = &*bdev;
    out_of_range_is_refused(bdev);
    an_empty_range_is_ok(bdev);
    the_depth_holds_and_everything_comes_back(bdev);
    a_reset_comes_back_last(bdev);
    flush_and_reset_are_ok(bdev);
    if bdev.caps().read_only {
        read_only_refuses_writes(bdev);
        return;
    }
    what_is_lent_is_the_data(bdev, expect);
    if expect.keeps_data {
        first_middle_and_last_blocks_are_read_back(bdev);
        a_later_write_wins(bdev);
        fua_writes_are_written(bdev);
        zeroes_and_unmap(bdev);
        write_same_repeats_the_block(bdev);
        compare_and_write(bdev);
        queues_see_each_other(bdev);
        random_operations_match_a_model(bdev);
    } else {
        everything_reads_as_zeros(bdev);
    }
}

/// A queue, memory for data, and a virtual clock.
struct Rig {
    queue: Box<dyn Queue>,
    geometry: Geometry,
    pool: BufPool,
    now: Nanos,
    done: Completions,
}

impl Rig {
    fn new(bdev: &dyn Bdev) -> Rig {
        Rig::shared(bdev, Sharing::Shared)
    }

    fn shared(bdev: &dyn Bdev, sharing: Sharing) -> Rig {
        let arena = Arena::new("conformance", ARENA_BYTES, HugePolicy::Never).expect("memory");
        let setup = QueueSetup { depth: DEPTH, data: Some(arena.clone()), core: 0 };
        let queue = emulate::open(bdev, &setup, sharing).expect("a queue");
        assert_eq!(queue.in_flight(), 0);
        Rig {
            queue,
            geometry: bdev.geometry(),
            pool: BufPool::new(arena, 0, ARENA_BYTES, 4096, BUF_BYTES_MAX),
            now: 0,
            done: Completions::new(),
        }
    }

    fn block(&self) -> usize {
        self.geometry.block_size as usize
    }

    /// An I/O with a buffer that fits, filled with `data` and then 0xA5.
    fn io(&mut self, op: Op, lba: u64, blocks: u64, data: &[u8], token: u64) -> Io {
        let need = op.buffer_bytes(blocks, self.geometry.block_size).expect("fits");
        let mut buf = Buf::none();
        if need > 0 {
            buf = self.pool.take(need as usize).expect("the suite's memory is enough");
            buf.as_mut_slice().fill(0xA5);
            buf.as_mut_slice()[..data.len()].copy_from_slice(data);
        }
        Io::new(op, Lba(lba), blocks, buf, token)
    }

    fn submit(&mut self, op: Op, lba: u64, blocks: u64, data: &[u8], token: u64) {
        let io = self.io(op, lba, blocks, data, token);
        let before = self.queue.in_flight();
        self.queue.submit(io).expect("room in the queue");
        assert_eq!(self.queue.in_flight(), before + 1, "a submit completes nothing");
    }

    /// Polls until a completion comes.
    fn next(&mut self) -> Done {
        let start = Instant::now();
        loop {
            if let Some(done) = self.done.pop() {
                return done;
            }
            self.now += 1000;
            self.queue.poll(self.now, &mut self.done);
            if self.done.is_empty() {
                let timer = self.queue.next_timer().unwrap_or(0);
                self.now = self.now.max(timer);
                assert!(start.elapsed() < PATIENCE, "no completion for {PATIENCE:?}");
                std::thread::yield_now();
            }
        }
    }

    fn give(&mut self, done: Done) {
        if !done.buf.is_none() {
            self.pool.give(done.buf);
        }
    }

    /// Runs one I/O alone. Gives its status and, of a read, the data.
    fn run(&mut self, op: Op, lba: u64, blocks: u64, data: &[u8]) -> (Status, Vec<u8>) {
        let token = 0xFEDC_BA98_0000_0000 | lba;
        self.submit(op, lba, blocks, data, token);
        let done = self.next();
        assert_eq!(done.token, token, "the token comes back as it was");
        let len = if op == Op::Read { blocks as usize * self.block() } else { 0 };
        let bytes = done.buf.as_slice()[..len].to_vec();
        let status = done.status;
        self.give(done);
        assert_eq!(self.queue.in_flight(), 0);
        (status, bytes)
    }

    fn ok(&mut self, op: Op, lba: u64, blocks: u64, data: &[u8]) {
        let (status, _) = self.run(op, lba, blocks, data);
        assert_eq!(status, Status::Ok, "{op:?} at {lba} +{blocks}");
    }

    fn read(&mut self, lba: u64, blocks: u64) -> Vec<u8> {
        let (status, data) = self.run(Op::Read, lba, blocks, &[]);
        assert_eq!(status, Status::Ok, "read at {lba} +{blocks}");
        data
    }

    /// Fails unless the blocks read as `want`, naming the first that does not.
    fn expect(&mut self, lba: u64, want: &[u8], why: &str) {
        let size = self.block();
        let got = self.read(lba, (want.len() / size) as u64);
        for (n, (got, want)) in got.chunks(size).zip(want.chunks(size)).enumerate() {
            assert!(got == want, "{why}: LBA {} reads wrong", lba + n as u64);
        }
    }

    /// Data for blocks, each different from every other block and seed.
    fn pattern(&self, seed: u64, lba: u64, blocks: u64) -> Vec<u8> {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (lba << 20) ^ 1;
        let mut data = vec![0; blocks as usize * self.block()];
        for word in data.chunks_mut(8) {
            word.copy_from_slice(&random(&mut state).to_le_bytes());
        }
        data
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert_eq!(self.queue.in_flight(), 0, "I/O in flight at the end");
            assert!(self.pool.is_whole(), "a buffer did not come back");
        }
    }
}

/// Xorshift: the suite needs variety, not quality.
fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

fn out_of_range_is_refused(bdev: &dyn Bdev) {
    let mut rig = Rig::new(bdev);
    let end = rig.geometry.blocks;
    let last = rig.read(end - 1, 1);
    for (lba, blocks) in [(end, 1), (end - 1, 2), (u64::MAX, 1), (u64::MAX - 1, 2)] {
        for op in [Op::Read, WRITE, Op::WriteSame { fua: false }] {
            assert_eq!(rig.run(op, lba, blocks, &[]).0, Status::OutOfRange, "{op:?} {lba}");
        }
    }
    for op in [Op::Unmap, Op::WriteZeroes { unmap: true, fua: false }] {
        assert_eq!(rig.run(op, 1, u64::MAX, &[]).0, Status::OutOfRange);
        assert_eq!(rig.run(op, end - 1, 2, &[]).0, Status::OutOfRange);
    }
    rig.expect(end - 1, &last, "a refused operation has no effect");
}

fn an_empty_range_is_ok(bdev: &dyn Bdev) {
    let mut rig = Rig::new(bdev);
    let end = rig.geometry.blocks;
    assert_eq!(rig.run(Op::Read, 0, 0, &[]).0, Status::Ok);
    assert_eq!(rig.run(Op::Read, end, 0, &[]).0, Status::Ok);
    assert_eq!(rig.run(Op::Read, end + 1, 0, &[]).0, Status::OutOfRange);
}

fn the_depth_holds_and_everything_comes_back(bdev: &dyn Bdev) {
    let mut rig = Rig::new(bdev);
    for round in 0..20 {
        let mut waiting = Vec::new();
        for n in 0..u64::from(DEPTH) {
            let token = u64::MAX - n - round;
            let io = rig.io(Op::Read, n * 8, 8, &[], token);
            waiting.push((token, io.buf.addr()));
            rig.queue.submit(io).expect("below the depth");
        }
        assert_eq!(rig.queue.in_flight(), DEPTH);
        let io = rig.io(WRITE, 3, 2, &[], 77);
        let addr = io.buf.addr();
        let back = rig.queue.submit(io).expect_err("the depth is reached");
        let same = (back.op, back.lba, back.blocks, back.token, back.buf.addr());
        assert_eq!(same, (WRITE, Lba(3), 2, 77, addr), "the refused I/O is intact");
        rig.pool.give(back.complete(Status::Busy).buf);
        for _ in 0..DEPTH {
            let done = rig.next();
            assert_eq!(done.status, Status::Ok);
            let key = (done.token, done.buf.addr());
            let at = waiting.iter().position(|w| *w == key).expect("own token with own buffer");
            waiting.swap_remove(at);
            rig.give(done);
        }
        assert_eq!(rig.queue.in_flight(), 0);
    }
}

fn a_reset_comes_back_last(bdev: &dyn Bdev) {
    let mut rig = Rig::new(bdev);
    for n in 0..4 {
        rig.submit(Op::Read, n, 1, &[], n);
    }
    rig.submit(Op::Reset, 0, 0, &[], 99);
    for _ in 0..4 {
        let done = rig.next();
        assert!(done.token < 4, "the reset overtook an I/O");
        assert!(matches!(done.status, Status::Ok | Status::Aborted), "{done:?}");
        rig.give(done);
    }
    let done = rig.next();
    assert_eq!((done.token, done.status), (99, Status::Ok));
    rig.read(0, 1);
}

fn flush_and_reset_are_ok(bdev: &dyn Bdev) {
    let mut rig = Rig::new(bdev);
    rig.ok(Op::Flush, 0, 0, &[]);
    rig.ok(Op::Reset, 0, 0, &[]);
    // They have no range, whatever their fields say.
    rig.ok(Op::Flush, u64::MAX, u64::MAX, &[]);
}

fn read_only_refuses_writes(bdev: &dyn Bdev) {
    let mut rig = Rig::new(bdev);
    let before = rig.read(0, 4);
    let data = rig.pattern(1, 0, 2);
    for op in [
        WRITE,
        Op::Write { fua: true },
        Op::Unmap,
        Op::WriteZeroes { unmap: false, fua: false },
        Op::WriteSame { fua: false },
        Op::CompareAndWrite { fua: false },
    ] {
        let need = op.buffer_bytes(2, rig.geometry.block_size).expect("fits") as usize;
        let data = &data[..need.min(data.len())];
        assert_eq!(rig.run(op, 0, 2, data).0, Status::ReadOnly, "{op:?}");
    }
    rig.expect(0, &before, "a refused write has no effect");
    assert!(rig.queue.lend(Lba(0), 1, true).is_none(), "lent for writing");
}

fn what_is_lent_is_the_data(bdev: &dyn Bdev, expect: Expect) {
    let mut rig = Rig::new(bdev);
    let Some(lent) = rig.queue.lend(Lba(5), 3, false) else { return };
    let arena = bdev.lendable().expect("a bdev that lends names its arena");
    let size = rig.block();
    assert_eq!(lent.len as usize, 3 * size);
    assert!(lent.addr >= arena.addr(), "lent from below the arena");
    let offset = (lent.addr - arena.addr()) as usize;
    assert!(offset + 3 * size <= arena.len(), "lent from beyond the arena");
    let mut data = rig.pattern(2, 5, 3);
    rig.ok(WRITE, 5, 3, &data);
    if !expect.keeps_data {
        data.fill(0);
    }
    let mut seen = vec![1; data.len()];
    arena.copy_out(offset, &mut seen);
    assert!(seen == data, "lent memory is not the data");
    let Some(lent) = rig.queue.lend(Lba(5), 3, true) else { return };
    let mut data = rig.pattern(3, 5, 3);
    arena.copy_in((lent.addr - arena.addr()) as usize, &data);
    if !expect.keeps_data {
        data.fill(0);
    }
    rig.expect(5, &data, "written in place");
}

fn first_middle_and_last_blocks_are_read_back(bdev: &dyn Bdev) {
    let mut rig = Rig::new(bdev);
    let end = rig.geometry.blocks;
    let long = (BUF_BYTES_MAX / rig.block()) as u64;
    let long = long.min(end / 4);
    let places = [(0, 1), (1, 7), (end / 2, 1), (end / 2 + 3, long), (end - 1, 1), (end - 9, 8)];
    for (seed, (lba, blocks)) in places.iter().enumerate() {
        let data = rig.pattern(seed as u64, *lba, *blocks);
        rig.ok(WRITE, *lba, *blocks, &data);
    }
    for (seed, (lba, blocks)) in places.iter().enumerate() {
        let data = rig.pattern(seed as u64, *lba, *blocks);
        rig.expect(*lba, &data, "written and read");
    }
}

fn a_later_write_wins(bdev: &dyn Bdev) {
    let mut rig = Rig::new(bdev);
    let (old, new) = (rig.pattern(10, 20, 8), rig.pattern(11, 22, 4));
    rig.ok(WRITE, 20, 8, &old);
    rig.ok(WRITE, 22, 4, &new);
    let size = rig.block();
    let mut want = old.clone();
    want[2 * size..6 * size].copy_from_slice(&new);
    rig.expect(20, &want, "an overlapping write after another");
    // In flight together their order is free, but each block is one of them as a whole.
    let writes: Vec<Vec<u8>> = (0..u64::from(DEPTH)).map(|n| rig.pattern(n, 30, 4)).collect();
    for (n, data) in writes.iter().enumerate() {
        rig.submit(WRITE, 30, 4, data, n as u64);
    }
    for _ in 0..DEPTH {
        let done = rig.next();
        assert_eq!(done.status, Status::Ok);
        rig.give(done);
    }
    let got = rig.read(30, 4);
    for (n, block) in got.chunks(size).enumerate() {
        let whole = writes.iter().any(|w| &w[n * size..(n + 1) * size] == block);
        assert!(whole, "block {n} mixes overlapping writes");
    }
}

fn fua_writes_are_written(bdev: &dyn Bdev) {
    let mut rig = Rig::new(bdev);
    let data = rig.pattern(20, 7, 3);
    rig.ok(Op::Write { fua: true }, 7, 3, &data);
    rig.expect(7, &data, "a write with FUA");
    rig.ok(Op::WriteSame { fua: true }, 7, 3, &data[..rig.block()]);
    rig.ok(Op::WriteZeroes { unmap: false, fua: true }, 8, 1, &[]);
    rig.ok(Op::WriteZeroes { unmap: true, fua: true }, 9, 1, &[]);
    let want = [&data[..rig.block()], &vec![0; 2 * rig.block()]].concat();
    rig.expect(7, &want, "write-same and zeroes with FUA");
    rig.ok(Op::Flush, 0, 0, &[]);
}

fn zeroes_and_unmap(bdev: &dyn Bdev) {
    let offered = emulate::caps(bdev, Sharing::Shared);
    let mut rig = Rig::new(bdev);
    let blocks = (rig.geometry.blocks / 2).min((BUF_BYTES_MAX / rig.block()) as u64);
    let size = rig.block();
    let mut zeroed = rig.pattern(30, 0, blocks);
    let inner = size..zeroed.len() - size;
    zeroed[inner].fill(0);
    for unmap in [false, true] {
        let data = rig.pattern(30, 0, blocks);
        rig.ok(WRITE, 0, blocks, &data);
        rig.ok(Op::WriteZeroes { unmap, fua: false }, 1, blocks - 2, &[]);
        rig.expect(0, &zeroed, "write-zeroes, and its neighbours");
    }
    let data = rig.pattern(30, 0, blocks);
    rig.ok(WRITE, 0, blocks, &data);
    rig.ok(Op::Unmap, 1, blocks - 2, &[]);
    if offered.unmap_zeroes {
        rig.expect(0, &zeroed, "an unmap that zeroes, and its neighbours");
    }
    rig.expect(0, &data[..size], "the block before an unmap");
    rig.expect(blocks - 1, &data[data.len() - size..], "the block after an unmap");
    rig.ok(WRITE, 0, blocks, &data);
    rig.expect(0, &data, "a write after an unmap");
}

fn write_same_repeats_the_block(bdev: &dyn Bdev) {
    let mut rig = Rig::new(bdev);
    let blocks = (rig.geometry.blocks / 2).min((BUF_BYTES_MAX / rig.block()) as u64);
    let data = rig.pattern(40, 0, blocks);
    rig.ok(WRITE, 0, blocks, &data);
    let block = rig.pattern(41, 0, 1);
    rig.ok(Op::WriteSame { fua: false }, 2, blocks - 3, &block);
    let size = rig.block();
    let mut want = data;
    let len = want.len();
    want[2 * size..len - size].chunks_mut(size).for_each(|chunk| chunk.copy_from_slice(&block));
    rig.expect(0, &want, "write-same, and its neighbours");
}

fn compare_and_write(bdev: &dyn Bdev) {
    let op = Op::CompareAndWrite { fua: true };
    for sharing in [Sharing::Shared, Sharing::Sole] {
        let mut rig = Rig::shared(bdev, sharing);
        let (old, new) = (rig.pattern(50, 6, 2), rig.pattern(51, 6, 2));
        rig.ok(WRITE, 6, 2, &old);
        let both = [old.clone(), new.clone()].concat();
        if !emulate::caps(bdev, sharing).compare_and_write {
            assert_eq!(rig.run(op, 6, 2, &both).0, Status::NotSupported);
            rig.expect(6, &old, "what is not supported has no effect");
            continue;
        }
        rig.ok(op, 6, 2, &both);
        rig.expect(6, &new, "an equal compare writes");
        let mut wrong = [new.clone(), old].concat();
        let at = rig.block() + 3;
        wrong[at] ^= 1;
        let status = rig.run(op, 6, 2, &wrong).0;
        assert_eq!(status, Status::Miscompare { offset: at as u32 });
        rig.expect(6, &new, "a miscompare has no effect");
    }
}

fn queues_see_each_other(bdev: &dyn Bdev) {
    let (mut a, mut b) = (Rig::new(bdev), Rig::new(bdev));
    for n in 0..10 {
        let data = a.pattern(60 + n, 9, 4);
        a.ok(WRITE, 9, 4, &data);
        b.expect(9, &data, "another queue's write");
        let data = b.pattern(80 + n, 9, 4);
        b.ok(Op::Write { fua: true }, 9, 4, &data);
        a.expect(9, &data, "another queue's write");
    }
}

fn random_operations_match_a_model(bdev: &dyn Bdev) {
    const SPAN: u64 = 64;
    let mut rig = Rig::new(bdev);
    let size = rig.block();
    let zeroes = emulate::caps(bdev, Sharing::Shared).unmap_zeroes;
    let start = rig.geometry.blocks - SPAN;
    let mut model = rig.pattern(99, start, SPAN);
    rig.ok(WRITE, start, SPAN, &model);
    let mut state = 0x1234_5678_9ABC_DEF1;
    for step in 0..300 {
        let first = random(&mut state) % SPAN;
        let blocks = 1 + random(&mut state) % (SPAN - first);
        let fua = random(&mut state).is_multiple_of(4);
        let lba = start + first;
        let place = first as usize * size..(first + blocks) as usize * size;
        match random(&mut state) % 6 {
            0 => rig.expect(lba, &model[place], &format!("step {step}")),
            1 | 2 => {
                let data = rig.pattern(step, lba, blocks);
                rig.ok(Op::Write { fua }, lba, blocks, &data);
                model[place].copy_from_slice(&data);
            }
            3 => {
                rig.ok(Op::WriteZeroes { unmap: step % 2 == 0, fua }, lba, blocks, &[]);
                model[place].fill(0);
            }
            4 => {
                let block = rig.pattern(step, lba, 1);
                rig.ok(Op::WriteSame { fua }, lba, blocks, &block);
                model[place].chunks_mut(size).for_each(|chunk| chunk.copy_from_slice(&block));
            }
            _ if zeroes => {
                rig.ok(Op::Unmap, lba, blocks, &[]);
                model[place].fill(0);
            }
            _ => rig.ok(Op::Flush, 0, 0, &[]),
        }
    }
    rig.expect(start, &model, "after all steps");
}

fn everything_reads_as_zeros(bdev: &dyn Bdev) {
    let mut rig = Rig::new(bdev);
    let data = rig.pattern(1, 3, 5);
    rig.ok(WRITE, 3, 5, &data);
    rig.ok(Op::WriteSame { fua: true }, 3, 5, &data[..rig.block()]);
    rig.ok(Op::WriteZeroes { unmap: true, fua: true }, 3, 5, &[]);
    rig.ok(Op::Unmap, 3, 5, &[]);
    rig.expect(3, &vec![0; 5 * rig.block()], "nothing is kept");
}
