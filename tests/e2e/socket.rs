//! Rubbish on the Unix socket: it costs the sender its connection and nobody else anything.

use std::os::fd::AsFd;

use rustix::fs::SealFlags;
use rustix::io::pwrite;
use usurp_srp::initiator::{Format, MultiChannel, login_req};

use crate::support::bystander::Siege;
use crate::support::perf::perf_ok;
use crate::support::plug::{Answer, DREQ, Plug, REJ, REP, REQ, RTU, Region, datagram, memfd};
use crate::support::process;
use crate::support::raw::request;
use crate::support::site::{Random, noise};

/// Half-open connections that a target bears.
const HALF_OPEN: usize = 64;

/// A request that SRP accepts, without memory.
fn login_request(guid: u64) -> Vec<u8> {
    let login = login_req(Format::IbCm64, &request(guid, MultiChannel::Single));
    datagram(REQ, &login, &[])
}

/// Each of these datagrams as the first one ends the connection.
fn hangs_up(datagrams: &[Vec<u8>]) {
    let siege = Siege::new();
    for bytes in datagrams {
        let answer = Plug::ask(&siege.target.socket, bytes, &[]);
        assert_eq!(answer, Answer::End, "{bytes:02x?}");
    }
    perf_ok(&siege.target, "luns");
    siege.end();
}

#[test]
fn random_bytes_are_hung_up_on() {
    let mut random = Random(0xbad);
    let random = (0..100).map(|_| noise(1 + random.below(900) as usize, random.next()));
    hangs_up(&random.collect::<Vec<_>>());
}

#[test]
fn another_magic_or_version_is_hung_up_on() {
    let change = |at: usize| {
        let mut bytes = datagram(REQ, &[0; 64], &[]);
        bytes[at] ^= 1;
        bytes
    };
    hangs_up(&[0, 3, 4, 5].map(change));
}

#[test]
fn a_length_that_does_not_fit_its_header_is_hung_up_on() {
    let right = datagram(REQ, &[0; 64], &[Region::of(0, 4096)]);
    let longer = [&right[..], &[0]].concat();
    let mut lying = right.clone();
    lying[8..10].copy_from_slice(&u16::MAX.to_le_bytes());
    let mut many = right.clone();
    many[10..12].copy_from_slice(&u16::MAX.to_le_bytes());
    let short = |len: usize| right[..len].to_vec();
    hangs_up(&[short(1), short(15), short(16), short(right.len() - 1), longer, lying, many]);
}

#[test]
fn a_datagram_longer_than_any_is_hung_up_on() {
    hangs_up(&[vec![0; 4096], [datagram(REQ, &[0; 64], &[]), vec![0; 60_000]].concat()]);
}

#[test]
fn a_confirmation_or_disconnect_without_a_request_is_hung_up_on() {
    let kinds = [0, 2, 3, 4, 5, 6, 7, 8, 255];
    hangs_up(&kinds.map(|kind| datagram(kind, &[], &[])));
}

#[test]
fn a_flood_of_descriptors_is_closed_again() {
    let siege = Siege::new();
    let before = process::fd_count(&siege.target.child);
    let file = memfd(4096, SealFlags::SHRINK);
    let files = vec![file.as_fd(); 253];
    let plugs: Vec<Plug> = (0..8)
        .map(|_| {
            let plug = Plug::connect(&siege.target.socket);
            plug.send(&datagram(REQ, &[0; 64], &[]), &files);
            plug
        })
        .collect();
    for plug in &plugs {
        assert_eq!(plug.answer(), Answer::End);
    }
    assert_eq!(process::fd_count(&siege.target.child), before, "descriptors are kept");
    siege.end();
}

#[test]
fn half_open_connections_are_bounded_and_others_get_in_afterwards() {
    let siege = Siege::new();
    let mut plugs: Vec<Plug> =
        (0..HALF_OPEN).map(|_| Plug::connect(&siege.target.socket)).collect();
    let text = Plug::connect(&siege.target.socket).answer().refused();
    assert!(text.contains("without a login"), "{text}");
    siege.more_rounds(3);
    // One leaves: one gets in.
    plugs.pop();
    loop {
        // The target may hear of the new one before it hears of the one that left.
        let answer = Plug::ask(&siege.target.socket, &datagram(REQ, &[0xff; 64], &[]), &[]);
        if matches!(answer, Answer::Datagram(REJ, _)) {
            break;
        }
    }
    drop(plugs);
    siege.end();
}

#[test]
fn a_connection_that_says_nothing_is_hung_up_on_after_a_while() {
    let siege = Siege::new();
    assert_eq!(Plug::connect(&siege.target.socket).answer(), Answer::End);
    siege.end();
}

#[test]
fn an_initiator_that_vanishes_at_any_point_of_the_login_leaves_nothing_behind() {
    let siege = Siege::new();
    let before = process::fd_count(&siege.target.child);
    let request = login_request(5);
    for round in 0..50 {
        let plug = Plug::connect(&siege.target.socket);
        if round % 3 > 0 {
            plug.send(&request, &[]);
        }
        if round % 3 > 1 {
            // The target waits for our confirmation, which never comes.
            assert!(matches!(plug.answer(), Answer::Datagram(REP, _)));
        }
    }
    perf_ok(&siege.target, "luns");
    let mut looks = 0;
    while process::fd_count(&siege.target.child) > before && looks < 10_000 {
        siege.more_rounds(1);
        looks += 1;
    }
    assert!(process::fd_count(&siege.target.child) <= before, "descriptors are kept");
    siege.end();
}

#[test]
fn messages_out_of_order_end_a_login_but_nobody_else() {
    let siege = Siege::new();
    let request = login_request(6);
    for kind in [REQ, 2, 3, 4, 7, 99] {
        let plug = Plug::connect(&siege.target.socket);
        plug.send(&request, &[]);
        assert!(matches!(plug.answer(), Answer::Datagram(REP, _)));
        plug.send(&datagram(kind, &[0; 64], &[]), &[]);
        assert_eq!(plug.answer(), Answer::End, "kind {kind}");
    }
    siege.end();
}

/// Logs in, writes these bytes at this offset of the shared rings, and waits to be cut off.
fn spoil(siege: &Siege, guid: u64, offset: u64, bytes: &[u8]) {
    let plug = Plug::connect(&siege.target.socket);
    plug.send(&login_request(guid), &[]);
    let rings = plug.accepted();
    plug.send(&datagram(RTU, &[], &[]), &[]);
    assert_eq!(pwrite(&rings, bytes, offset).expect("it may be written"), bytes.len());
    let answer = plug.answer();
    assert!(matches!(answer, Answer::Datagram(DREQ, _) | Answer::End), "{answer:?}");
}

#[test]
fn random_bytes_in_the_rings_cut_off() {
    let siege = Siege::new();
    let mut random = Random(0x416);
    for guid in 0..30 {
        // Both rings and all that lies before them.
        spoil(&siege, guid, 0, &noise(4096 + (128 << 10), random.next()));
    }
    siege.end();
}

#[test]
fn records_that_cannot_be_in_the_ring_cut_off() {
    let siege = Siege::new();
    // The word at offset 16 of the first unit says what lies there. None of these can: 1 is a
    // record, but none of this length.
    for (guid, word) in [1u64, 3, 0xffff_ffff, 1 << 31, 0xdead_beef].into_iter().enumerate() {
        spoil(&siege, guid as u64, 4096 + 16, &(word | 0xffff_ffff << 32).to_le_bytes());
    }
    siege.end();
}
