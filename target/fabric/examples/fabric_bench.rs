//! Figures of the shm fabric: round trip and message rate between two pinned threads (64-byte
//! request, 36-byte answer), with the machine's raw cache-line round trip before and after, and
//! RDMA WRITEs of 4 KiB and 128 KiB.
//!
//! `cargo run --release -p usurp-fabric --no-default-features --example fabric_bench [core core]`

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use usurp_fabric::shm::{ConnectParams, Endpoint, FabricConfig, Listener, ListenerParams};
use usurp_fabric::shm::{Regions, ShmFabric, connect};
use usurp_fabric::{Cm, CmEvent, CompletionBatch, Fabric, Lkey, QpNum, RecvWr, Remote, SendOp};
use usurp_fabric::{SendWr, Sge, WcStatus};
use usurp_reactor::cpu::pin_current;
use usurp_reactor::mem::{Arena, HugePolicy};

const RECV: u64 = 1 << 32;
const SLOT: u64 = 512;

#[repr(align(128))]
struct Line(AtomicU64);

/// Typical round trip of two lines, one each way, in nanoseconds.
fn raw(cores: (usize, usize)) -> f64 {
    let lines = Arc::new((Line(AtomicU64::new(0)), Line(AtomicU64::new(0))));
    let other = lines.clone();
    const ROUNDS: u64 = 200_000;
    let echo = std::thread::spawn(move || {
        let _ = pin_current(cores.0);
        for i in 1..=ROUNDS {
            while other.0.0.load(Ordering::Acquire) != i {}
            other.1.0.store(i, Ordering::Release);
        }
    });
    let _ = pin_current(cores.1);
    let mut times = Vec::new();
    for chunk in 0..100 {
        let start = Instant::now();
        for i in 1..=ROUNDS / 100 {
            lines.0.0.store(chunk * (ROUNDS / 100) + i, Ordering::Release);
            while lines.1.0.load(Ordering::Acquire) != chunk * (ROUNDS / 100) + i {}
        }
        times.push(start.elapsed().as_nanos() as f64 / (ROUNDS / 100) as f64);
    }
    echo.join().expect("echo thread");
    quiet(times)
}

fn pair(regions: &Regions) -> (Endpoint, Endpoint, Listener) {
    let path = std::env::temp_dir().join(format!("usurp-bench-{}.sock", std::process::id()));
    let mut listener = Listener::new(ListenerParams::default()).expect("listener");
    listener.listen(&path, 0o600).expect("listen");
    let regions = regions.clone();
    let client = std::thread::spawn(move || {
        connect(&path, &[0; 64], &regions, ConnectParams::default()).expect("connect")
    });
    let mut endpoint = None;
    loop {
        match listener.next_event(Some(Duration::from_secs(5))).expect("event") {
            Some(CmEvent::ConnectRequest { conn, .. }) => {
                endpoint = Some(listener.endpoint(conn).expect("endpoint"));
                listener.accept(conn, &[1; 52]).expect("accept");
            }
            Some(CmEvent::Established { .. }) => break,
            other => panic!("{other:?}"),
        }
    }
    listener.close_listeners();
    (endpoint.expect("set above"), client.join().expect("client").endpoint, listener)
}

/// One end: a fabric with a queue pair, `depth` receive and send slots.
struct End {
    fabric: ShmFabric,
    qp: QpNum,
    lkey: Lkey,
    base: u64,
    depth: u64,
}

impl End {
    fn new(endpoint: Endpoint, depth: u64) -> End {
        let mut fabric = ShmFabric::new(FabricConfig { max_qps: 4 });
        let arena = Arena::new("bench", 1 << 20, HugePolicy::Prefer).expect("arena");
        let lkey = fabric.register(&arena).expect("register");
        let qp = fabric.adopt(endpoint).map_err(|e| e.0).expect("adopt");
        let mut end = End { fabric, qp, lkey, base: arena.addr(), depth };
        let list: Vec<_> = (0..depth).map(|i| end.recv(i)).collect();
        end.fabric.post_recv(qp, &list).expect("receives");
        end
    }
    fn recv(&self, i: u64) -> RecvWr {
        let sge = Sge { addr: self.base + i * SLOT, len: SLOT as u32, lkey: self.lkey };
        RecvWr { wr_id: RECV | i, sge }
    }
    fn send(&self, i: u64, len: u32) -> SendWr {
        let addr = self.base + (512 << 10) + i * SLOT;
        let sge = Sge { addr, len, lkey: self.lkey };
        SendWr { wr_id: i, op: SendOp::Send, sge, signaled: true, fence: false }
    }
    /// Answers every message with one of `len` bytes, until told to stop.
    fn serve(&mut self, len: u32, stop: &AtomicBool) {
        let mut out = CompletionBatch::new();
        let mut recvs = Vec::with_capacity(64);
        let mut sends = Vec::with_capacity(64);
        while !stop.load(Ordering::Relaxed) {
            out.clear();
            if self.fabric.poll(0, &mut out) == 0 {
                continue;
            }
            recvs.clear();
            sends.clear();
            for c in out.iter() {
                assert_eq!(c.status, WcStatus::Success);
                if c.wr_id & RECV != 0 {
                    recvs.push(self.recv(c.wr_id & 0xffff));
                    sends.push(self.send(c.wr_id & 0xffff, len));
                }
            }
            self.fabric.post_recv(self.qp, &recvs).expect("receive queue");
            self.fabric.post_send(self.qp, &sends).expect("send queue");
        }
    }
    /// Sends `count` requests, `depth` at a time; returns nanoseconds per request.
    fn drive(&mut self, depth: u64, count: u64) -> f64 {
        let mut out = CompletionBatch::new();
        let mut recvs = Vec::with_capacity(64);
        let mut sends: Vec<_> = (0..depth).map(|i| self.send(i, 64)).collect();
        let start = Instant::now();
        self.fabric.post_send(self.qp, &sends).expect("send queue");
        let (mut sent, mut got) = (depth, 0);
        while got < count {
            out.clear();
            if self.fabric.poll(0, &mut out) == 0 {
                continue;
            }
            recvs.clear();
            sends.clear();
            for c in out.iter() {
                assert_eq!(c.status, WcStatus::Success);
                if c.wr_id & RECV != 0 {
                    got += 1;
                    recvs.push(self.recv(c.wr_id & 0xffff));
                    if sent < count {
                        sends.push(self.send(sent % self.depth, 64));
                        sent += 1;
                    }
                }
            }
            self.fabric.post_recv(self.qp, &recvs).expect("receive queue");
            self.fabric.post_send(self.qp, &sends).expect("send queue");
        }
        start.elapsed().as_nanos() as f64 / count as f64
    }
}

/// Chunks of a measurement. A chunk is shorter than a time slice, so that on a busy machine some
/// pass undisturbed.
const CHUNKS: usize = 500;

/// The 20th percentile: what a chunk takes when nobody takes our cores away.
fn quiet(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 5]
}

/// Typical (round trip at depth 1, nanoseconds per message at depth 32 and 128).
fn messages(cores: (usize, usize)) -> [f64; 3] {
    let (target, initiator, _listener) = pair(&Regions::new());
    let stop = Arc::new(AtomicBool::new(false));
    let told = stop.clone();
    let server = std::thread::spawn(move || {
        let _ = pin_current(cores.0);
        End::new(target, 256).serve(36, &told);
    });
    let _ = pin_current(cores.1);
    let mut end = End::new(initiator, 256);
    end.drive(1, 10_000);
    let typical =
        |end: &mut End, depth, count| quiet((0..CHUNKS).map(|_| end.drive(depth, count)).collect());
    let figures = [
        typical(&mut end, 1, 1_000),
        typical(&mut end, 32, 10_000),
        typical(&mut end, 128, 10_000),
    ];
    stop.store(true, Ordering::Relaxed);
    server.join().expect("server");
    figures
}

/// WRITEs of `size` bytes from a source of `span` bytes, lists of 32; nanoseconds per WRITE in the
/// best of 16 rounds.
fn writes(size: u64, span: usize, core: usize) -> f64 {
    let _ = pin_current(core);
    let lent = Arena::shared("lent", 8 << 20, HugePolicy::Prefer).expect("arena");
    let mut regions = Regions::new();
    let rkey = regions.add(&lent);
    let (target, _initiator, _listener) = pair(&regions);
    let mut fabric = ShmFabric::new(FabricConfig::default());
    let data = Arena::new("data", span, HugePolicy::Prefer).expect("arena");
    let lkey = fabric.register(&data).expect("register");
    let qp = fabric.adopt(target).map_err(|e| e.0).expect("adopt");
    let mut out = CompletionBatch::new();
    let mut seed = 1u64;
    let rounds = (1 << 26) / size / 32;
    let mut best = f64::MAX;
    for _ in 0..16 {
        let start = Instant::now();
        for _ in 0..rounds {
            let list: [SendWr; 32] = std::array::from_fn(|i| {
                seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let at = (seed >> 20) % (span as u64 / size) * size;
                let va = lent.addr() + i as u64 * size % (8 << 20);
                let op = SendOp::Write { remote: Remote { va, rkey } };
                let sge = Sge { addr: data.addr() + at, len: size as u32, lkey };
                SendWr { wr_id: 0, op, sge, signaled: i == 31, fence: false }
            });
            fabric.post_send(qp, &list).expect("send queue");
            out.clear();
            fabric.poll(0, &mut out);
            assert_eq!(out[0].status, WcStatus::Success);
        }
        best = best.min(start.elapsed().as_nanos() as f64 / (rounds * 32) as f64);
    }
    best
}

fn main() {
    let args: Vec<usize> = std::env::args().skip(1).filter_map(|a| a.parse().ok()).collect();
    let cores = (args.first().copied().unwrap_or(0), args.get(1).copied().unwrap_or(1));
    let writes_only = std::env::args().any(|a| a == "writes");
    for _ in 0..if writes_only { 0 } else { 3 } {
        let before = raw(cores);
        let [rtt, d32, d128] = messages(cores);
        let after = raw(cores);
        println!(
            "raw {before:.0}..{after:.0} ns | round trip {rtt:.0} ns = {:.2} raw \
             | depth 32 {:.1} M/s | depth 128 {:.1} M/s (requests, each with its answer)",
            rtt / ((before + after) / 2.0),
            1e3 / d32,
            1e3 / d128
        );
    }
    for (size, span, what) in [
        (4096, 1 << 18, "4 KiB hot"),
        (4096, 512 << 20, "4 KiB cold source"),
        (131072, 512 << 20, "128 KiB cold source"),
    ] {
        println!("WRITE {what}: {:.0} ns", writes(size, span, cores.0));
    }
}
