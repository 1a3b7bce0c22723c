//! Credit is never lost: what an initiator holds after the work is what it was given at login.

use std::time::Instant;

use usurp_bench::cdb;
use usurp_bench::client::{Data, Outcomes, Request, SlotId, Started};
use usurp_bench::connect::ShmClient;

use crate::support::PATIENCE;
use crate::support::bystander::{Siege, client};
use crate::support::iu::{Cmd, TUR, plain};
use crate::support::raw::Raw;

/// Waits until a channel holds `all` credits.
pub fn expect_credit(client: &mut ShmClient, channel: usize, all: u32) {
    let until = Instant::now() + PATIENCE;
    let mut out = Outcomes::default();
    while client.req_lim(channel) != all {
        let now = client.now();
        assert_eq!(
            client.poll(now, &mut out).expect("the target is there"),
            0,
            "an answer to nothing"
        );
        client.flush().expect("the target is there");
        assert!(Instant::now() < until, "{} of {all} credits", client.req_lim(channel));
    }
}

/// Starts `count` commands on every channel.
pub fn fill(client: &mut ShmClient, count: u32, request: impl Fn(u32) -> Request) -> Vec<SlotId> {
    let mut slots = Vec::new();
    let now = client.now();
    for channel in 0..client.channels() {
        for _ in 0..count {
            let slot = client.reserve(channel).expect("a client with that many slots");
            let started = client.start(slot, &request(slots.len() as u32), now);
            assert_eq!(started.expect("the target is there"), Started::Yes);
            slots.push(slot);
        }
    }
    client.flush().expect("the target is there");
    slots
}

/// A read of eight blocks.
pub fn read8(lun: u16, at: u32) -> Request {
    let cdb = cdb::read_write(false, u64::from(at) * 8, 8);
    Request { lun, cdb, data: Data::In(4096), user: u64::from(at) }
}

#[test]
fn after_a_load_all_credit_is_back_on_every_channel() {
    let siege = Siege::new();
    let mut client = client(&siege.target.socket, 4, 64);
    let all: Vec<u32> = (0..4).map(|channel| client.req_lim(channel)).collect();
    assert_eq!(all, [128; 4]);
    client.wait_ready(0).expect("the LUN is there");
    for _ in 0..20 {
        let slots = fill(&mut client, 64, |at| read8(0, at));
        let mut out = Outcomes::default();
        while client.in_flight() > 0 {
            client.wait(&mut out).expect("every command is answered");
            // The first command of each nexus on an LU may meet a unit attention, no more.
            assert!(out.iter().all(|o| o.is_good()));
        }
        slots.into_iter().for_each(|slot| client.release(slot));
    }
    for (channel, all) in all.iter().enumerate() {
        expect_credit(&mut client, channel, *all);
    }
    client.close();
    siege.end();
}

#[test]
fn after_200_unknown_ius_io_goes_on() {
    let siege = Siege::new();
    let mut raw = Raw::ready(&siege.target, &[0]);
    let all = raw.req_lim;
    for tag in 0..200 {
        if raw.req_lim <= 1 {
            raw.expect_some_credit();
        }
        raw.send_request(&plain(0x0e, tag, 48));
    }
    raw.expect_credit(all);
    raw.run(raw.reading(0, 0, 8)).expect_good();
    raw.expect_credit(all);
    siege.end();
}

#[test]
fn unknown_ius_among_commands_cost_nothing() {
    let siege = Siege::new();
    let mut raw = Raw::ready(&siege.target, &[0]);
    let all = raw.req_lim;
    for _ in 0..50 {
        for _ in 0..5 {
            raw.send_request(&plain(0x0e, 1, 16));
            raw.start(raw.reading(0, 0, 8));
        }
        (0..5).for_each(|_| raw.rsp().expect_good());
    }
    raw.expect_credit(all);
    siege.end();
}

#[test]
fn a_full_window_of_commands_is_answered_with_a_full_window_of_credit() {
    let siege = Siege::new();
    let mut raw = Raw::ready(&siege.target, &[0]);
    let all = raw.req_lim;
    for _ in 0..50 {
        for _ in 0..all {
            raw.start(Cmd::new(0, TUR));
        }
        assert_eq!(raw.req_lim, 0);
        (0..all).for_each(|_| raw.rsp().expect_good());
        raw.expect_credit(all);
    }
    siege.end();
}
