//! Tests of queue pairs over a shared ring file, without sockets, and of hostile peers.

use super::mem::{PeerMap, RingMem, Role};
use super::qp::Qp;
use super::ring::largest_message;
use super::wire::RegionDesc;
use super::*;
use crate::{Completion, CompletionBatch, Fabric, Lkey, PostCause, PostError, QpNum, RecvWr};
use crate::{Remote, SendOp, SendWr, Sge, WcStatus};
use rustix::fs::{MemfdFlags, SealFlags};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use usurp_reactor::mem::{Arena, HugePolicy};

const RING: usize = 4096;
const VA: u64 = 0x7000_0000_0000;
const RKEY: u32 = 0x1234_5600;
const LENT: u64 = 65536;

/// One end of a connection.
struct End {
    fabric: ShmFabric,
    qp: QpNum,
    arena: Arc<Arena>,
    lkey: Lkey,
}

impl End {
    fn new(qp: Box<Qp>) -> End {
        let mut fabric = ShmFabric::new(FabricConfig { max_qps: 4 });
        let arena = Arena::new("test", 1 << 20, HugePolicy::Never).unwrap();
        let lkey = fabric.register(&arena).unwrap();
        let qp = fabric.adopt(Endpoint { qp }).map_err(|e| e.0).unwrap();
        End { fabric, qp, arena, lkey }
    }
    fn sge(&self, offset: u64, len: u32) -> Sge {
        Sge { addr: self.arena.addr() + offset, len, lkey: self.lkey }
    }
    fn send(&self, wr_id: u64, len: u32) -> SendWr {
        let sge = self.sge(0, len);
        SendWr { wr_id, op: SendOp::Send, sge, signaled: true, fence: false }
    }
    fn write(&self, wr_id: u64, va: u64, rkey: u32, len: u32) -> SendWr {
        SendWr { op: SendOp::Write { remote: Remote { va, rkey } }, ..self.send(wr_id, len) }
    }
    fn read(&self, wr_id: u64, va: u64, rkey: u32, len: u32) -> SendWr {
        SendWr { op: SendOp::Read { remote: Remote { va, rkey } }, ..self.send(wr_id, len) }
    }
    fn recv(&self, wr_id: u64, len: u32) -> RecvWr {
        RecvWr { wr_id, sge: self.sge(wr_id * 4096, len) }
    }
    fn post(&mut self, list: &[SendWr]) -> Result<(), PostError> {
        self.fabric.post_send(self.qp, list)
    }
    fn poll(&mut self) -> Vec<Completion> {
        let mut all = Vec::new();
        for _ in 0..8 {
            let mut out = CompletionBatch::new();
            self.fabric.poll(0, &mut out);
            all.extend_from_slice(&out);
        }
        all
    }
    fn statuses(&mut self) -> Vec<(u64, WcStatus)> {
        self.poll().iter().map(|c| (c.wr_id, c.status)).collect()
    }
}

fn memfd(bytes: u64, seal: bool) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("lent", flags).unwrap();
    rustix::fs::ftruncate(&fd, bytes).unwrap();
    if seal {
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
    }
    fd
}

fn lend(fd: &OwnedFd, access: u32, need_seal: bool) -> Result<PeerMap, String> {
    PeerMap::new(RegionDesc { rkey: RKEY, access, va: VA, len: LENT }, fd, need_seal)
}

/// Target and initiator over one ring file; the target has `maps`.
fn pair_with(ring: usize, maps: Vec<PeerMap>, config: QpConfig) -> (End, End) {
    let (rings, file) = RingMem::create(ring).unwrap();
    let other = RingMem::open(&file, ring).unwrap();
    let target = Qp::new(Role::Target, rings, maps, None, config);
    let initiator = Qp::new(Role::Initiator, other, Vec::new(), None, config);
    (End::new(target), End::new(initiator))
}

fn pair() -> (End, End) {
    let map = lend(&memfd(LENT, true), ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ, true).unwrap();
    pair_with(RING, vec![map], QpConfig { max_send_wr: 16, max_recv_wr: 8 })
}

use WcStatus::{Flushed, LocalLength, LocalProtection, RemoteAccess, Success};

#[test]
fn a_message_arrives_as_it_was() {
    let (mut t, mut i) = pair();
    t.fabric.post_recv(t.qp, &[t.recv(1, 512)]).unwrap();
    i.arena.copy_in(0, &[7; 64]);
    i.post(&[i.send(5, 64)]).unwrap();
    assert_eq!(i.statuses(), [(5, Success)]);
    let got = t.poll();
    assert_eq!((got[0].wr_id, got[0].status, got[0].byte_len), (1, Success, 64));
    assert_eq!(t.arena.equals(4096, &[7; 64]), None);
}

#[test]
fn data_moves_both_ways() {
    let (mut t, _i) = pair();
    t.arena.copy_in(0, &[9; 4096]);
    let mut back = t.read(2, VA + 100, RKEY, 4096);
    back.sge = t.sge(8192, 4096);
    t.post(&[t.write(1, VA + 100, RKEY, 4096), back]).unwrap();
    assert_eq!(t.statuses(), [(1, Success), (2, Success)]);
    assert_eq!(t.arena.equals(8192, &[9; 4096]), None);
}

#[test]
fn each_bad_remote_range_is_refused_and_ends_the_queue_pair() {
    let bad = [
        (VA, RKEY + 1, 8),
        (VA, RKEY ^ 0x100, 8),
        (VA, 0, 8),
        (VA - 1, RKEY, 8),
        (VA + LENT, RKEY, 1),
        (VA + LENT - 7, RKEY, 8),
        (u64::MAX, RKEY, 8),
        (u64::MAX - 3, RKEY, 8),
        (0, RKEY, 8),
        (VA, RKEY, LENT as u32 + 1),
    ];
    for (va, rkey, len) in bad {
        for reading in [false, true] {
            let (mut t, _i) = pair();
            t.fabric.post_recv(t.qp, &[t.recv(7, 64)]).unwrap();
            let wr = if reading { t.read(1, va, rkey, len) } else { t.write(1, va, rkey, len) };
            let wr = SendWr { signaled: false, ..wr };
            t.post(&[wr, t.send(2, 8)]).unwrap();
            let want = [(1, RemoteAccess), (2, Flushed), (7, Flushed)];
            assert_eq!(t.statuses(), want, "{va:#x} {rkey:#x} {len}");
            t.post(&[t.send(3, 8)]).unwrap();
            t.fabric.post_recv(t.qp, &[t.recv(8, 64)]).unwrap();
            assert_eq!(t.statuses(), [(3, Flushed), (8, Flushed)]);
        }
    }
}

#[test]
fn access_rights_hold() {
    for (access, writes, reads) in [(ACCESS_REMOTE_WRITE, true, false), (2, false, true)] {
        for (reading, allowed) in [(false, writes), (true, reads)] {
            let map = lend(&memfd(LENT, true), access, true).unwrap();
            let (mut t, _i) = pair_with(RING, vec![map], QpConfig::default());
            let wr = if reading { t.read(1, VA, RKEY, 8) } else { t.write(1, VA, RKEY, 8) };
            t.post(&[wr]).unwrap();
            assert_eq!(t.statuses(), [(1, if allowed { Success } else { RemoteAccess })]);
        }
    }
}

#[test]
fn an_initiator_cannot_reach_into_the_target() {
    let (_t, mut i) = pair();
    i.post(&[i.write(1, VA, RKEY, 8)]).unwrap();
    assert_eq!(i.statuses(), [(1, RemoteAccess)]);
}

#[test]
fn each_bad_local_range_is_refused() {
    // Key, offset from the arena's start, length.
    let arena = 1u64 << 20;
    let bad = [
        (1, 0, 8),
        (0x1_0000, 0, 8),
        (0, u64::MAX, 8),
        (0, arena - 7, 8),
        (0, arena, 1),
        (0, 1 << 63, 8),
        (0, 0, arena as u32 + 1),
    ];
    for (key, offset, len) in bad {
        let sge = |end: &End| Sge {
            addr: end.arena.addr().wrapping_add(offset),
            len,
            lkey: Lkey(end.lkey.0 ^ key),
        };
        let (mut t, _i) = pair();
        t.post(&[SendWr { sge: sge(&t), ..t.write(1, VA, RKEY, 8) }]).unwrap();
        assert_eq!(t.statuses(), [(1, LocalProtection)], "write {key:#x} {offset:#x} {len}");
        let (mut t, _i) = pair();
        t.post(&[SendWr { sge: sge(&t), ..t.send(1, 8) }]).unwrap();
        assert_eq!(t.statuses(), [(1, LocalProtection)], "send {key:#x} {offset:#x} {len}");
        let (mut t, mut i) = pair();
        i.fabric.post_recv(i.qp, &[RecvWr { wr_id: 4, sge: sge(&i) }]).unwrap();
        t.post(&[t.send(1, 8)]).unwrap();
        assert_eq!(i.statuses(), [(4, LocalProtection)], "receive {key:#x} {offset:#x} {len}");
    }
}

#[test]
fn zero_length_requests_need_no_keys() {
    let (mut t, mut i) = pair();
    let nowhere = Sge { addr: 0, len: 0, lkey: Lkey(0) };
    i.fabric.post_recv(i.qp, &[RecvWr { wr_id: 9, sge: nowhere }]).unwrap();
    t.post(&[
        SendWr { sge: nowhere, ..t.write(1, 0, 0, 0) },
        SendWr { sge: nowhere, ..t.send(2, 0) },
    ])
    .unwrap();
    assert_eq!(t.statuses(), [(1, Success), (2, Success)]);
    assert_eq!(i.statuses(), [(9, Success)]);
}

#[test]
fn a_list_of_receives_stops_at_the_exact_place() {
    let (mut t, mut i) = pair();
    let list: Vec<_> = (0..11).map(|n| t.recv(n, 64)).collect();
    let full = PostError { index: 8, cause: PostCause::QueueFull };
    assert_eq!(t.fabric.post_recv(t.qp, &list), Err(full));
    for _ in 0..8 {
        i.post(&[i.send(0, 8)]).unwrap();
        i.poll();
    }
    let ids: Vec<_> = t.poll().iter().map(|c| c.wr_id).collect();
    assert_eq!(ids, [0, 1, 2, 3, 4, 5, 6, 7]);
    let mut bad = t.recv(2, 64);
    bad.sge.len = (1 << 31) + 1;
    let cause = PostCause::BadSge;
    let want = Err(PostError { index: 1, cause });
    assert_eq!(t.fabric.post_recv(t.qp, &[t.recv(1, 64), bad, t.recv(3, 64)]), want);
    t.fabric.set_error(t.qp);
    assert_eq!(t.statuses(), [(1, Flushed)]);
}

#[test]
fn a_list_of_sends_stops_at_the_exact_place_and_unsignaled_ones_count() {
    let (mut t, _i) = pair();
    let quiet = |t: &End, n| SendWr { signaled: false, ..t.write(n, VA, RKEY, 8) };
    let list: Vec<_> = (0..20).map(|n| quiet(&t, n)).collect();
    let full = PostError { index: 16, cause: PostCause::QueueFull };
    assert_eq!(t.post(&list), Err(full));
    assert_eq!(t.poll(), []);
    // Nothing frees them: no signaled request follows.
    assert_eq!(t.post(&list[..1]), Err(PostError { index: 0, cause: PostCause::QueueFull }));

    let (mut t, _i) = pair();
    let mut list: Vec<_> = (0..16).map(|n| quiet(&t, n)).collect();
    list[9].signaled = true;
    t.post(&list).unwrap();
    assert_eq!(t.statuses(), [(9, Success)]);
    let want = Err(PostError { index: 10, cause: PostCause::QueueFull });
    assert_eq!(t.post(&list), want);
    let mut bad = t.send(1, 8);
    bad.sge.len = u32::MAX;
    let (mut t, _i) = pair();
    let want = Err(PostError { index: 2, cause: PostCause::BadSge });
    assert_eq!(t.post(&[quiet(&t, 1), quiet(&t, 2), bad]), want);
}

#[test]
fn messages_wait_for_a_posted_receive() {
    let (mut t, mut i) = pair();
    i.post(&[i.send(1, 8), i.send(2, 8)]).unwrap();
    assert_eq!(t.poll(), []);
    t.fabric.post_recv(t.qp, &[t.recv(1, 64)]).unwrap();
    assert_eq!(t.statuses(), [(1, Success)]);
    assert_eq!(t.poll(), []);
    t.fabric.post_recv(t.qp, &[t.recv(2, 64)]).unwrap();
    assert_eq!(t.statuses(), [(2, Success)]);
}

#[test]
fn a_full_ring_holds_back_everything_behind_it_in_order() {
    let (mut t, mut i) = pair();
    let message = largest_message(RING) as u32;
    let mut list: Vec<_> = (0..5).map(|n| t.send(n, message)).collect();
    list.push(t.write(5, VA, RKEY, 8));
    t.post(&list).unwrap();
    let first = t.statuses();
    assert!(first.len() < 5 && first.iter().all(|(_, s)| *s == Success), "{first:?}");
    let mut seen: Vec<_> = first.iter().map(|(id, _)| *id).collect();
    for n in 0..5 {
        i.fabric.post_recv(i.qp, &[i.recv(n, 4096)]).unwrap();
        assert_eq!(i.statuses(), [(n, Success)]);
        seen.extend(t.poll().iter().map(|c| c.wr_id));
    }
    assert_eq!(seen, [0, 1, 2, 3, 4, 5]);
}

#[test]
fn an_error_flushes_what_waits_for_the_ring() {
    let (mut t, _i) = pair();
    let list: Vec<_> = (0..5).map(|n| t.send(n, 1900)).collect();
    t.post(&list).unwrap();
    let done = t.statuses().len() as u64;
    t.fabric.set_error(t.qp);
    t.fabric.set_error(t.qp);
    let want: Vec<_> = (done..5).map(|n| (n, Flushed)).collect();
    assert_eq!(t.statuses(), want);
}

#[test]
fn a_message_longer_than_its_receive_fails_the_receiver() {
    for len in [33, 64, 200] {
        let (mut t, mut i) = pair();
        t.fabric.post_recv(t.qp, &[t.recv(1, 32), t.recv(2, 512)]).unwrap();
        i.fabric.post_recv(i.qp, &[i.recv(3, 512)]).unwrap();
        i.post(&[i.send(1, len)]).unwrap();
        assert_eq!(t.statuses(), [(1, LocalLength), (2, Flushed)]);
        assert_eq!(i.statuses(), [(1, Success)]);
        // The sender finds out as soon as it looks.
        assert!(!i.fabric.check_peer(i.qp));
        assert_eq!(i.statuses(), [(3, Flushed)]);
    }
    let (mut t, _i) = pair();
    t.post(&[t.send(1, 4000)]).unwrap();
    assert_eq!(t.statuses(), [(1, LocalLength)]);
}

#[test]
fn released_queue_pairs_are_silent_and_their_numbers_stale() {
    let (mut t, mut i) = pair();
    t.fabric.post_recv(t.qp, &[t.recv(1, 64)]).unwrap();
    t.post(&[t.send(1, 8)]).unwrap();
    i.post(&[i.send(1, 8)]).unwrap();
    let old = t.qp;
    drop(t.fabric.release(old));
    assert_eq!(t.poll(), []);
    let bad = Err(PostError { index: 0, cause: PostCause::BadState });
    assert_eq!(t.fabric.post_recv(old, &[t.recv(1, 64)]), bad);
    assert_eq!(t.fabric.post_send(old, &[t.send(1, 8)]), bad);
    t.fabric.set_error(old);
    for _ in 0..9 {
        let (rings, _file) = RingMem::create(RING).unwrap();
        let qp = Qp::new(Role::Target, rings, Vec::new(), None, QpConfig::default());
        let new = t.fabric.adopt(Endpoint { qp }).map_err(|e| e.0).unwrap();
        assert_ne!(new, old);
        drop(t.fabric.release(new));
    }
}

#[test]
fn a_fabric_takes_no_more_than_its_queue_pairs() {
    let mut fabric = ShmFabric::new(FabricConfig { max_qps: 1 });
    let endpoint = || {
        let (rings, _file) = RingMem::create(RING).unwrap();
        Endpoint { qp: Qp::new(Role::Target, rings, Vec::new(), None, QpConfig::default()) }
    };
    fabric.adopt(endpoint()).map_err(|e| e.0).unwrap();
    assert!(fabric.adopt(endpoint()).is_err());
}

#[test]
fn polling_is_fair() {
    let mut fabric = ShmFabric::new(FabricConfig { max_qps: 4 });
    let arena = Arena::new("test", 1 << 20, HugePolicy::Never).unwrap();
    let lkey = fabric.register(&arena).unwrap();
    let sge = Sge { addr: arena.addr(), len: 64, lkey };
    let mut peers = Vec::new();
    for _ in 0..3 {
        let (rings, file) = RingMem::create(65536).unwrap();
        let other = RingMem::open(&file, 65536).unwrap();
        let qp = Qp::new(Role::Target, rings, Vec::new(), None, QpConfig::default());
        let qp = fabric.adopt(Endpoint { qp }).map_err(|e| e.0).unwrap();
        fabric.post_recv(qp, &[RecvWr { wr_id: 0, sge }; 500]).unwrap();
        let qp = Qp::new(Role::Initiator, other, Vec::new(), None, QpConfig::default());
        peers.push(End::new(qp));
    }
    for peer in &mut peers {
        let list: Vec<_> = (0..400).map(|n| peer.send(n, 40)).collect();
        peer.post(&list).unwrap();
    }
    let mut counts = std::collections::HashMap::new();
    for _ in 0..20 {
        let mut out = CompletionBatch::new();
        assert!(fabric.poll(0, &mut out) <= crate::BATCH);
        out.iter().for_each(|c| *counts.entry(c.qp.0).or_insert(0) += 1);
    }
    let (low, high) = (counts.values().min().unwrap(), counts.values().max().unwrap());
    assert!(counts.len() == 3 && high - low <= 32, "{counts:?}");
}

#[test]
fn regions_that_could_vanish_or_are_too_short_are_refused() {
    let lacks = lend(&memfd(LENT, false), 3, true).unwrap_err();
    assert!(lacks.contains("F_SEAL_SHRINK"), "{lacks}");
    let short = lend(&memfd(LENT - 1, true), 3, true).unwrap_err();
    assert!(short.contains("65535 bytes"), "{short}");
    let file: OwnedFd = std::fs::File::open("/proc/self/exe").unwrap().into();
    assert!(lend(&file, 3, true).unwrap_err().contains("not a memfd"));
    for (va, len) in [(VA, 0), (u64::MAX - 10, 100), (VA, u64::MAX)] {
        let desc = RegionDesc { rkey: RKEY, access: 3, va, len };
        assert!(PeerMap::new(desc, &memfd(LENT, true), true).is_err());
    }
    let (_rings, file) = RingMem::create(RING).unwrap();
    assert!(RingMem::open(&file, 2 * RING).is_err());
    assert!(RingMem::open(&file, 1000).is_err());
    assert!(RingMem::open(&memfd(1 << 20, false), RING).is_err());
}

#[test]
fn lost_pages_end_the_queue_pair_and_nothing_else() {
    for reading in [false, true] {
        let fd = memfd(LENT, false);
        let map = lend(&fd, 3, false).unwrap();
        let (mut t, _i) = pair_with(RING, vec![map], QpConfig::default());
        let whole = lend(&memfd(LENT, true), 3, true).unwrap();
        let (mut other, _i) = pair_with(RING, vec![whole], QpConfig::default());
        t.post(&[t.write(1, VA + 8192, RKEY, 64)]).unwrap();
        assert_eq!(t.statuses(), [(1, Success)]);
        rustix::fs::ftruncate(&fd, 4096).unwrap();
        let wr = if reading { t.read(2, VA, RKEY, 9000) } else { t.write(2, VA, RKEY, 9000) };
        t.post(&[wr, t.send(3, 8)]).unwrap();
        assert_eq!(t.statuses(), [(2, RemoteAccess), (3, Flushed)]);
        other.post(&[other.write(1, VA, RKEY, 64)]).unwrap();
        assert_eq!(other.statuses(), [(1, Success)]);
    }
}

/// Random bytes over the whole ring memory while the target polls and sends.
#[test]
fn a_scribbling_peer_hurts_only_itself() {
    let mut errors = 0;
    for round in 0..200u64 {
        let (rings, file) = RingMem::create(RING).unwrap();
        let config = QpConfig { max_send_wr: 64, max_recv_wr: 8 };
        let mut t = End::new(Qp::new(Role::Target, rings, Vec::new(), None, config));
        let stop = Arc::new(AtomicBool::new(false));
        let told = stop.clone();
        let file = file.as_fd().try_clone_to_owned().unwrap();
        let scribbler = std::thread::spawn(move || scribble(&file, round, &told));
        let deadline = std::time::Instant::now() + std::time::Duration::from_millis(20);
        let mut failed = false;
        while !failed && std::time::Instant::now() < deadline {
            let _ = t.fabric.post_recv(t.qp, &[t.recv(1, 2048), t.recv(2, 32)]);
            let _ = t.post(&[t.send(3, 200), t.send(4, 64)]);
            let got = t.poll();
            assert!(got.iter().all(|c| c.byte_len <= 2048));
            failed = got.iter().any(|c| c.status != Success);
        }
        errors += u32::from(failed);
        stop.store(true, Ordering::Relaxed);
        scribbler.join().unwrap();
    }
    assert!(errors > 150, "only {errors} of 200 were noticed");
}

/// Writes valid-looking headers and noise everywhere, by write(2) to the ring file.
fn scribble(file: &OwnedFd, seed: u64, stop: &AtomicBool) {
    let mut seed = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let size = 4096 + 2 * RING as u64;
    while !stop.load(Ordering::Relaxed) {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        let offset = if seed.is_multiple_of(4) { 4096 + 16 } else { (seed >> 8) % (size - 8) };
        let value = if seed.is_multiple_of(4) { 1 | (seed >> 40) << 32 } else { seed };
        rustix::io::pwrite(file, &value.to_le_bytes(), offset).unwrap();
    }
}

#[test]
fn what_arrived_before_the_peer_left_is_still_received() {
    let (mut t, mut i) = pair();
    i.fabric.post_recv(i.qp, &[i.recv(1, 64), i.recv(2, 64)]).unwrap();
    t.post(&[t.send(1, 8)]).unwrap();
    t.fabric.set_error(t.qp);
    assert!(!i.fabric.check_peer(i.qp));
    assert_eq!(i.statuses(), [(1, Success)]);
    assert!(!i.fabric.check_peer(i.qp));
    assert_eq!(i.statuses(), [(2, Flushed)]);
}

#[test]
fn a_region_need_not_be_whole_pages() {
    let desc = RegionDesc { rkey: RKEY, access: 3, va: VA + 100, len: 5000 };
    let map = PeerMap::new(desc, &memfd(5000, true), true).unwrap();
    let (mut t, _i) = pair_with(RING, vec![map], QpConfig::default());
    t.post(&[t.write(1, VA + 100, RKEY, 5000)]).unwrap();
    assert_eq!(t.statuses(), [(1, Success)]);
    t.post(&[t.write(2, VA + 101, RKEY, 5000)]).unwrap();
    assert_eq!(t.statuses(), [(2, RemoteAccess)]);
}
