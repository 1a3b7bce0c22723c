//! Target and initiator as two processes: data integrity, and the sudden death of either.
//!
//! A test starts this very executable again with `USURP_HELPER` set; only `helper` does something
//! then.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use usurp_fabric::shm::{ConnectParams, Connected, FabricConfig, Listener, ListenerParams};
use usurp_fabric::shm::{Regions, ShmFabric, connect};
use usurp_fabric::{Cm, CmEvent, CompletionBatch, ConnId, Fabric, Lkey, QpNum, RecvWr, Remote};
use usurp_fabric::{SendOp, SendWr, Sge, WcStatus};
use usurp_reactor::mem::{Arena, HugePolicy};

const DEPTH: u64 = 64;
const SLOT: u64 = 2048;
const RECV: u64 = 1 << 32;
const MESSAGES: u64 = 1_000_000;
const LENT: usize = 1 << 20;

struct End {
    fabric: ShmFabric,
    qp: QpNum,
    arena: std::sync::Arc<Arena>,
    lkey: Lkey,
}

impl End {
    fn new(endpoint: usurp_fabric::shm::Endpoint) -> End {
        let mut fabric = ShmFabric::new(FabricConfig::default());
        let arena = Arena::new("end", 1 << 20, HugePolicy::Never).unwrap();
        let lkey = fabric.register(&arena).unwrap();
        let qp = fabric.adopt(endpoint).map_err(|e| e.0).unwrap();
        let mut end = End { fabric, qp, arena, lkey };
        (0..DEPTH).for_each(|i| end.repost(i));
        end
    }
    fn repost(&mut self, i: u64) {
        let sge = Sge { addr: self.arena.addr() + i * SLOT, len: SLOT as u32, lkey: self.lkey };
        self.fabric.post_recv(self.qp, &[RecvWr { wr_id: RECV | i, sge }]).unwrap();
    }
    fn send(&mut self, i: u64, message: &[u8]) {
        let offset = (DEPTH + i) * SLOT;
        self.arena.copy_in(offset as usize, message);
        let addr = self.arena.addr() + offset;
        let sge = Sge { addr, len: message.len() as u32, lkey: self.lkey };
        let wr = SendWr { wr_id: i, op: SendOp::Send, sge, signaled: true, fence: false };
        self.fabric.post_send(self.qp, &[wr]).unwrap();
    }
    fn message(&self, i: u64, len: u32) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        self.arena.copy_out((i * SLOT) as usize, &mut bytes);
        bytes
    }
    /// Polls until a completion comes; panics after a while.
    fn poll(&mut self) -> CompletionBatch {
        let start = Instant::now();
        let mut out = CompletionBatch::new();
        let mut polls = 0u32;
        while self.fabric.poll(start.elapsed().as_nanos() as u64, &mut out) == 0 {
            assert!(start.elapsed() < Duration::from_secs(30), "nothing comes");
            polls += 1;
            // Both processes may share one core.
            if polls.is_multiple_of(1000) {
                std::thread::yield_now();
            }
        }
        out
    }
}

fn next(seed: &mut u64) -> u64 {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    *seed
}

/// A message whose length and bytes follow from its number.
fn content(number: u64) -> Vec<u8> {
    let mut seed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let len = match next(&mut seed) % 4 {
        0 => 64,
        1 => 8 + next(&mut seed) % 2000,
        _ => 8 + next(&mut seed) % 100,
    };
    let mut bytes: Vec<u8> =
        (0..len.div_ceil(8)).flat_map(|_| next(&mut seed).to_le_bytes()).collect();
    bytes.truncate(len as usize);
    if len == 64 && number.is_multiple_of(2) {
        bytes[16..20].fill(0);
    }
    bytes
}

fn path(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("usurp-two-{}-{name}.sock", std::process::id()))
}

fn start(role: &str, path: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "helper", "--nocapture"])
        .env("USURP_HELPER", role)
        .env("USURP_PATH", path)
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

/// Accepts one connection.
fn accept(listener: &mut Listener) -> (ConnId, End) {
    let event = listener.next_event(Some(Duration::from_secs(20))).unwrap();
    let Some(CmEvent::ConnectRequest { conn, .. }) = event else { panic!("{event:?}") };
    let end = End::new(listener.endpoint(conn).unwrap());
    listener.accept(conn, &[7; 52]).unwrap();
    let event = listener.next_event(Some(Duration::from_secs(20))).unwrap();
    assert!(matches!(event, Some(CmEvent::Established { .. })), "{event:?}");
    (conn, end)
}

fn listen(path: &Path) -> Listener {
    let mut listener = Listener::new(ListenerParams::default()).unwrap();
    listener.listen(path, 0o600).unwrap();
    listener
}

/// Connects, however long the target takes to start.
fn dial(path: &Path, regions: &Regions) -> Connected {
    let start = Instant::now();
    loop {
        match connect(path, &[3; 64], regions, ConnectParams::default()) {
            Ok(connected) => return connected,
            Err(e) => assert!(start.elapsed() < Duration::from_secs(20), "{e}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Answers each message with itself.
fn echo(end: &mut End, count: u64) {
    let mut done = 0;
    while done < count {
        for c in end.poll().iter() {
            assert_eq!(c.status, WcStatus::Success);
            if c.wr_id & RECV != 0 {
                let i = c.wr_id & 0xffff;
                let message = end.message(i, c.byte_len);
                assert_eq!(message, content(done), "message {done}");
                end.send(done % (2 * DEPTH), &message);
                end.repost(i);
                done += 1;
            }
        }
    }
}

/// Sends `count` messages, `DEPTH` at a time, and checks the echoes.
fn drive(end: &mut End, count: u64) {
    let mut sent = 0;
    let mut got = 0;
    while got < count {
        while sent < count && sent - got < DEPTH {
            end.send(sent % (2 * DEPTH), &content(sent));
            sent += 1;
        }
        for c in end.poll().iter() {
            assert_eq!(c.status, WcStatus::Success);
            if c.wr_id & RECV != 0 {
                let i = c.wr_id & 0xffff;
                assert_eq!(end.message(i, c.byte_len), content(got), "echo {got}");
                end.repost(i);
                got += 1;
            }
        }
    }
}

/// The other process.
#[test]
fn helper() {
    let Ok(role) = std::env::var("USURP_HELPER") else { return };
    let path = PathBuf::from(std::env::var("USURP_PATH").unwrap());
    match role.as_str() {
        "drive" => {
            let lent = Arena::shared("lent", LENT, HugePolicy::Never).unwrap();
            let mut regions = Regions::new();
            let rkey = regions.add(&lent);
            let mut end = End::new(dial(&path, &regions).endpoint);
            drive(&mut end, MESSAGES);
            // Where the target shall write, then its answer.
            let mut where_to = lent.addr().to_le_bytes().to_vec();
            where_to.extend_from_slice(&rkey.to_le_bytes());
            end.send(0, &where_to);
            while !end.poll().iter().any(|c| c.wr_id & RECV != 0) {}
            assert_eq!(lent.equals(0, &vec![0x5a; LENT / 2]), None);
        }
        "initiator" => {
            let mut end = End::new(dial(&path, &Regions::new()).endpoint);
            end.send(0, &content(0));
            loop {
                end.poll();
            }
        }
        "target" => {
            let mut listener = listen(&path);
            let (_conn, mut end) = accept(&mut listener);
            loop {
                end.poll();
            }
        }
        other => panic!("{other}"),
    }
}

#[test]
fn a_million_messages_arrive_unchanged_and_in_order() {
    let path = path("million");
    let mut listener = listen(&path);
    let mut child = start("drive", &path);
    let (conn, mut end) = accept(&mut listener);
    echo(&mut end, MESSAGES);
    let (va, rkey) = loop {
        if let Some(c) = end.poll().iter().find(|c| c.wr_id & RECV != 0) {
            let m = end.message(c.wr_id & 0xffff, c.byte_len);
            let va = u64::from_le_bytes(m[..8].try_into().unwrap());
            break (va, u32::from_le_bytes(m[8..12].try_into().unwrap()));
        }
    };
    end.arena.fill(0, LENT / 2, 0x5a);
    let sge = Sge { addr: end.arena.addr(), len: LENT as u32 / 2, lkey: end.lkey };
    let op = SendOp::Write { remote: Remote { va, rkey } };
    let write = SendWr { wr_id: 1, op, sge, signaled: false, fence: false };
    let answer = SendWr { op: SendOp::Send, sge: Sge { len: 36, ..sge }, signaled: true, ..write };
    end.fabric.post_send(end.qp, &[write, answer]).unwrap();
    assert!(child.wait().unwrap().success());
    let event = listener.next_event(Some(Duration::from_secs(10))).unwrap();
    let Some(CmEvent::Disconnected { conn: gone, why }) = event else { panic!("{event:?}") };
    assert_eq!(gone, conn);
    assert_eq!(why, "the initiator disconnected");
    let endpoint = end.fabric.release(end.qp);
    listener.destroy(conn, Some(endpoint));
    assert_eq!(listener.connection_count(), 0);
}

#[test]
fn a_killed_initiator_is_a_disconnect() {
    let path = path("kill-initiator");
    let mut listener = listen(&path);
    let mut child = start("initiator", &path);
    let (conn, mut end) = accept(&mut listener);
    assert_eq!(end.poll()[0].status, WcStatus::Success);
    child.kill().unwrap();
    child.wait().unwrap();
    let event = listener.next_event(Some(Duration::from_secs(10))).unwrap();
    assert!(matches!(event, Some(CmEvent::Disconnected { conn: c, .. }) if c == conn), "{event:?}");
    end.fabric.set_error(end.qp);
    let mut flushed = 0;
    while flushed < DEPTH - 1 {
        flushed += end.poll().iter().filter(|c| c.status == WcStatus::Flushed).count() as u64;
    }
    listener.destroy(conn, Some(end.fabric.release(end.qp)));
}

#[test]
fn a_killed_target_is_an_error_for_the_initiator_and_its_socket_is_taken_over() {
    let path = path("kill-target");
    let mut child = start("target", &path);
    let mut end = End::new(dial(&path, &Regions::new()).endpoint);
    assert!(end.fabric.check_peer(end.qp));
    child.kill().unwrap();
    child.wait().unwrap();
    let start = Instant::now();
    let mut flushed = 0;
    while flushed < DEPTH {
        let out = end.poll();
        assert!(out.iter().all(|c| c.status == WcStatus::Flushed));
        flushed += out.len() as u64;
    }
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    assert!(!end.fabric.check_peer(end.qp));
    assert!(path.exists(), "a killed process leaves its socket");
    drop(listen(&path));
}

#[test]
fn a_disconnecting_target_is_noticed_by_the_initiator() {
    let path = path("dreq");
    let mut listener = listen(&path);
    let there = path.clone();
    let client = std::thread::spawn(move || {
        let mut end = End::new(dial(&there, &Regions::new()).endpoint);
        let mut flushed = 0;
        while flushed < DEPTH {
            flushed += end.poll().iter().filter(|c| c.status == WcStatus::Flushed).count() as u64;
        }
    });
    let (conn, end) = accept(&mut listener);
    listener.disconnect(conn);
    let event = listener.next_event(Some(Duration::from_secs(10))).unwrap();
    let Some(CmEvent::Disconnected { why, .. }) = event else { panic!("{event:?}") };
    assert_eq!(why, "disconnected by the target");
    client.join().unwrap();
    drop(end);
}
