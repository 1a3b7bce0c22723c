//! Tests of connection management that need to speak the socket's protocol by hand.

use super::listen::seqpacket;
use super::wire::{self, Message, Received, RegionDesc};
use super::*;
use crate::{Cm, CmEvent, FabricError};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::net::{SocketAddrUnix, SocketFlags};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// A path that no other test uses.
fn path() -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("usurp-cm-{}-{n}.sock", std::process::id()))
}

fn listener(path: &std::path::Path, params: ListenerParams) -> Listener {
    let mut listener = Listener::new(params).unwrap();
    listener.listen(path, 0o600).unwrap();
    listener
}

fn dial(path: &std::path::Path) -> OwnedFd {
    let socket = seqpacket(SocketFlags::empty()).unwrap();
    rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    socket
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

fn region(index: u32, len: u64) -> RegionDesc {
    RegionDesc { rkey: 0xaa00 | index, access: 3, va: 0x1000_0000, len }
}

fn request(regions: &[RegionDesc]) -> Message {
    Message { regions: regions.to_vec(), ..Message::new(wire::REQ, &[0; 64]) }
}

fn soon(listener: &mut Listener) -> Option<CmEvent> {
    listener.next_event(Some(Duration::from_millis(50))).unwrap()
}

/// What the target answers to this request: the text of a refusal.
fn refusal(params: ListenerParams, message: &Message, fds: &[BorrowedFd<'_>]) -> String {
    let path = path();
    let mut listener = listener(&path, params);
    let socket = dial(&path);
    wire::send(socket.as_fd(), message, fds).unwrap();
    assert!(soon(&mut listener).is_none());
    assert_eq!(listener.connection_count(), 0);
    match wire::receive(socket.as_fd()) {
        Received::Message(m, _) if m.kind == wire::REFUSED => String::from_utf8(m.data).unwrap(),
        Received::End => "closed".to_owned(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn each_bad_request_is_refused_with_its_reason() {
    let (good, bare, short) = (memfd(8192, true), memfd(8192, false), memfd(4096, true));
    let one = |desc| request(&[desc]);
    let params = ListenerParams::default();
    let cases = [
        (one(region(0, 8192)), vec![bare.as_fd()], "F_SEAL_SHRINK"),
        (one(region(0, 8192)), vec![short.as_fd()], "the memfd has 4096 bytes, 8192 are needed"),
        (one(region(0, 8192)), vec![], "1 regions, but 0 descriptors"),
        (one(region(0, 8192)), vec![good.as_fd(), good.as_fd()], "1 regions, but 2"),
        (one(region(1, 8192)), vec![good.as_fd()], "does not end in its index"),
        (one(RegionDesc { access: 4, ..region(0, 1) }), vec![good.as_fd()], "access bits"),
        (one(region(0, 0)), vec![good.as_fd()], "0 bytes"),
        (one(RegionDesc { va: u64::MAX, ..region(0, 2) }), vec![good.as_fd()], "address"),
        (one(region(0, (4 << 30) + 1)), vec![good.as_fd()], "regions exceed"),
        (request(&[region(0, u64::MAX), region(1, 2)]), vec![good.as_fd(); 2], "regions exceed"),
        (Message::new(wire::REQ, &[0; 93]), vec![], "malformed"),
        (Message { format: 2, ..request(&[]) }, vec![], "malformed"),
        (Message::new(wire::RTU, &[]), vec![], "closed"),
    ];
    for (message, fds, want) in cases {
        let got = refusal(params.clone(), &message, &fds);
        assert!(got.contains(want), "{got:?} instead of {want:?}");
    }
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn garbage_and_excess_descriptors_are_closed() {
    let path = path();
    let mut listener = listener(&path, ListenerParams::default());
    let fd = memfd(4096, true);
    for round in 0..3 {
        let socket = dial(&path);
        match round {
            0 => drop(rustix::net::send(&socket, b"hello", rustix::net::SendFlags::empty())),
            1 => {
                let noise = vec![0x55; wire::MESSAGE_MAX + 1];
                rustix::net::send(&socket, &noise, rustix::net::SendFlags::empty()).unwrap();
            }
            _ => send_many(&socket, &fd),
        }
        assert!(soon(&mut listener).is_none());
        assert_eq!(listener.connection_count(), 0);
        let answer = wire::receive(socket.as_fd());
        let refused = matches!(&answer, Received::Message(m, _) if m.kind == wire::REFUSED);
        assert!(refused || matches!(answer, Received::End), "{answer:?}");
    }
    // Other tests open files too; a leak of 17 a round would show all the same.
    let before = open_files();
    for _ in 0..40 {
        send_many(&dial(&path), &fd);
        assert!(soon(&mut listener).is_none());
    }
    assert!(open_files() < before + 100);
}

/// A request with 17 descriptors, one too many.
fn send_many(socket: &OwnedFd, fd: &OwnedFd) {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
    let bytes = request(&[region(0, 4096)]).encode();
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(17))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [fd.as_fd(); 17];
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    let iov = [std::io::IoSlice::new(&bytes)];
    rustix::net::sendmsg(socket, &iov, &mut control, SendFlags::empty()).unwrap();
}

#[test]
fn silent_peers_are_bounded_in_number_and_time() {
    let path = path();
    let params = ListenerParams {
        login_timeout: Duration::from_millis(100),
        half_open_max: 3,
        ..ListenerParams::default()
    };
    let mut listener = listener(&path, params);
    let _quiet: Vec<_> = (0..3).map(|_| dial(&path)).collect();
    let fourth = dial(&path);
    assert!(soon(&mut listener).is_none());
    assert_eq!(listener.connection_count(), 3);
    let Received::Message(m, _) = wire::receive(fourth.as_fd()) else { panic!("no refusal") };
    assert_eq!(m.kind, wire::REFUSED);
    let start = Instant::now();
    while listener.connection_count() > 0 && start.elapsed() < Duration::from_secs(2) {
        assert!(soon(&mut listener).is_none());
    }
    assert_eq!(listener.connection_count(), 0);
    assert!(start.elapsed() < Duration::from_secs(1));
}

/// A peer that got as far as REP.
fn until_rep(
    path: &std::path::Path,
    listener: &mut Listener,
) -> (OwnedFd, crate::ConnId, Endpoint) {
    let socket = dial(path);
    wire::send(socket.as_fd(), &request(&[]), &[]).unwrap();
    let Some(CmEvent::ConnectRequest { conn, peer, private_data, .. }) = soon(listener) else {
        panic!("no request");
    };
    assert!(peer.starts_with(&format!("pid {} uid ", std::process::id())), "{peer}");
    assert_eq!(private_data, [0; 64]);
    assert!(listener.accept(conn, &[]).is_err(), "no endpoint was made yet");
    let endpoint = listener.endpoint(conn).unwrap();
    assert!(listener.endpoint(conn).is_err(), "there is only one");
    listener.accept(conn, &[2; 52]).unwrap();
    (socket, conn, endpoint)
}

#[test]
fn a_peer_that_never_confirms_is_dropped() {
    let path = path();
    let login_timeout = Duration::from_millis(80);
    let mut listener = listener(&path, ListenerParams { login_timeout, ..Default::default() });
    let (_socket, conn, endpoint) = until_rep(&path, &mut listener);
    let event = listener.next_event(Some(Duration::from_secs(2))).unwrap();
    assert!(matches!(event, Some(CmEvent::Disconnected { conn: c, .. }) if c == conn));
    listener.destroy(conn, Some(endpoint));
    assert_eq!(listener.connection_count(), 0);
}

#[test]
fn a_second_request_or_noise_on_a_live_connection_ends_it() {
    let path = path();
    let mut listener = listener(&path, ListenerParams::default());
    for message in [request(&[]), Message::new(99, &[]), Message::new(wire::DREP, &[])] {
        let (socket, conn, endpoint) = until_rep(&path, &mut listener);
        wire::send(socket.as_fd(), &Message::new(wire::RTU, &[]), &[]).unwrap();
        assert!(matches!(soon(&mut listener), Some(CmEvent::Established { .. })));
        wire::send(socket.as_fd(), &message, &[]).unwrap();
        assert!(matches!(soon(&mut listener), Some(CmEvent::Disconnected { .. })));
        assert!(soon(&mut listener).is_none(), "exactly once");
        listener.destroy(conn, Some(endpoint));
    }
}

#[test]
fn a_disconnect_nobody_answers_ends_by_itself() {
    let path = path();
    let mut listener = listener(&path, ListenerParams::default());
    let (socket, conn, endpoint) = until_rep(&path, &mut listener);
    wire::send(socket.as_fd(), &Message::new(wire::RTU, &[]), &[]).unwrap();
    soon(&mut listener);
    listener.disconnect(conn);
    listener.disconnect(conn);
    let event = listener.next_event(Some(Duration::from_secs(5))).unwrap();
    assert!(matches!(event, Some(CmEvent::Disconnected { .. })));
    listener.destroy(conn, Some(endpoint));
}

#[test]
fn stale_sockets_are_taken_over_and_live_ones_are_not() {
    let path = path();
    // A dead target's socket: bound and closed, the file stays.
    let dead = seqpacket(SocketFlags::empty()).unwrap();
    rustix::net::bind(&dead, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    drop(dead);
    assert!(path.exists());
    let first = listener(&path, ListenerParams::default());
    let mut second = Listener::new(ListenerParams::default()).unwrap();
    let error = second.listen(&path, 0o600).unwrap_err();
    assert_eq!(error.to_string(), format!("another target is serving at {}", path.display()));
    drop(first);
    assert!(!path.exists(), "the socket goes away with its listener");
    second.listen(&path, 0o640).unwrap();
    use std::os::unix::fs::PermissionsExt;
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o640);
}

#[test]
fn a_live_server_without_lock_is_respected_and_other_files_are_kept() {
    let path = path();
    let other = seqpacket(SocketFlags::empty()).unwrap();
    rustix::net::bind(&other, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    rustix::net::listen(&other, 8).unwrap();
    let mut listener = Listener::new(ListenerParams::default()).unwrap();
    assert!(matches!(listener.listen(&path, 0o600), Err(FabricError::InUse(_))));
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "precious").unwrap();
    assert!(matches!(listener.listen(&path, 0o600), Err(FabricError::Invalid(_))));
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
    std::fs::remove_file(&path).unwrap();
    let nowhere = path.join("not/there.sock");
    let error = listener.listen(&nowhere, 0o600).unwrap_err().to_string();
    assert!(error.contains("does not exist"), "{error}");
    let _ = std::fs::remove_file(path.with_extension("sock.lock"));
}

#[test]
fn rejects_reach_the_initiator_and_wakers_wake() {
    let path = path();
    let mut listener = listener(&path, ListenerParams::default());
    let waker = listener.waker();
    let (waked, there) = (Instant::now(), path.clone());
    let client = std::thread::spawn(move || {
        waker.wake();
        connect(
            &there,
            &[5; 56],
            &Regions::new(),
            ConnectParams { format: crate::LoginFormat::RdmaCm56, ..ConnectParams::default() },
        )
    });
    let mut event = listener.next_event(Some(Duration::from_secs(60))).unwrap();
    while event.is_none() {
        event = listener.next_event(Some(Duration::from_secs(60))).unwrap();
    }
    assert!(waked.elapsed() < Duration::from_secs(30));
    let Some(CmEvent::ConnectRequest { conn, format, .. }) = event else { panic!("{event:?}") };
    assert_eq!(format, crate::LoginFormat::RdmaCm56);
    listener.reject(conn, &[0xc2; 32]);
    match client.join().unwrap() {
        Err(ConnectError::Rejected(data)) => assert_eq!(data, [0xc2; 32]),
        other => panic!("{other:?}"),
    }
    assert_eq!(listener.connection_count(), 0);
    drop(listener);
    let error = connect(&path, &[], &Regions::new(), ConnectParams::default()).unwrap_err();
    assert!(matches!(error, ConnectError::NoTarget(_)));
}

#[test]
fn a_silent_target_does_not_hang_the_initiator() {
    let path = path();
    let _silent = listener(&path, ListenerParams::default());
    let params = ConnectParams { timeout: Duration::from_millis(50), ..Default::default() };
    let error = connect(&path, &[], &Regions::new(), params).unwrap_err();
    assert!(matches!(error, ConnectError::TimedOut));
}
