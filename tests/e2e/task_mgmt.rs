//! Task management under load: what was aborted is never answered, what is answered was not
//! aborted, credit and slots come back; across channels, reactors and initiators.

use usurp_bench::cdb;
use usurp_bench::client::{Outcomes, SlotId};
use usurp_bench::connect::ShmClient;
use usurp_bench::sync::Xfer;
use usurp_srp::initiator::MultiChannel;
use usurp_srp::wire::rsp::RspCode;

use crate::credits::{expect_credit, fill, read8};
use crate::support::PATIENCE;
use crate::support::bystander::{Siege, client};
use crate::support::iu::{Cmd, TUR};
use crate::support::perf::Perf;
use crate::support::raw::Raw;
use crate::support::site::{Setup, cores};

/// ABORT TASK.
const ABORT_TASK: u8 = 0x01;
/// LOGICAL UNIT RESET.
const LUN_RESET: u8 = 0x08;

/// Slow commands of a channel at a time.
const SLOTS: u32 = 12;

/// A client with two channels, ready for the slow LUN 2 and LUN 0.
fn ready_client(siege: &Siege) -> ShmClient {
    let mut client = client(&siege.target.socket, 2, SLOTS + 1);
    client.wait_ready(2).expect("the LUN is there");
    client.wait_ready(0).expect("the LUN is there");
    client
}

/// Starts reads of LUN 2 on every channel, and returns when they have arrived: a later command on a
/// fast LUN is answered.
fn fill_slow(client: &mut ShmClient) -> Vec<SlotId> {
    let slots = fill(client, SLOTS, |at| read8(2, at));
    for channel in 0..client.channels() {
        client.exec(channel, 0, &cdb::test_unit_ready(), Xfer::None).expect("an answer");
    }
    slots
}

/// Ends every command of a reset LU that was not answered before the reset. Answers on other
/// channels than that of the reset may be here and not be looked at yet.
fn forget(client: &mut ShmClient, slots: Vec<SlotId>) {
    let mut out = Outcomes::default();
    let now = client.now();
    while client.poll(now, &mut out).expect("the target is there") > 0 {}
    for slot in slots {
        client.forget(slot);
        client.release(slot);
    }
}

#[test]
fn aborted_commands_are_not_answered_and_the_channel_goes_on() {
    let siege = Siege::with(&Setup::slow(400));
    let mut client = ready_client(&siege);
    let slots = fill_slow(&mut client);
    for slot in &slots {
        if !client.is_idle(*slot) {
            assert_eq!(client.abort_task(*slot, 2).expect("an answer"), RspCode::COMPLETE);
        }
        assert!(client.is_idle(*slot), "answered before its abort, or aborted");
    }
    let mut out = Outcomes::default();
    let now = client.now();
    while client.poll(now, &mut out).expect("the target is there") > 0 {}
    assert_eq!(client.in_flight(), 0);
    slots.into_iter().for_each(|slot| client.release(slot));
    for channel in 0..2 {
        expect_credit(&mut client, channel, 128);
    }
    let mut data = [0; 4096];
    client.read_blocks(2, 0, 512, &mut data).expect("the channel goes on");
    client.close();
    siege.end();
}

#[test]
fn an_abort_of_a_finished_or_unknown_command_is_complete() {
    let siege = Siege::new();
    let mut raw = Raw::ready(&siege.target, &[0]);
    let done = raw.start(Cmd::new(0, TUR));
    raw.rsp().expect_good();
    for task in [done, 0xdead_beef] {
        let tag = raw.start_tm(0, ABORT_TASK, task);
        let rsp = raw.rsp();
        assert_eq!((rsp.tag, rsp.flags, rsp.code), (tag, 1, Some(0)), "{rsp:?}");
    }
    siege.end();
}

#[test]
fn functions_that_are_not_supported_say_so() {
    let siege = Siege::new();
    let mut raw = Raw::ready(&siege.target, &[0]);
    for function in [0x00, 0x10, 0x20, 0x40, 0xff] {
        raw.start_tm(0, function, 0);
        let rsp = raw.rsp();
        assert_eq!(rsp.code, Some(4), "function {function:#04x}: {rsp:?}");
    }
    raw.expect_served();
    siege.end();
}

#[test]
fn a_reset_of_a_lun_that_is_not_there_fails() {
    let siege = Siege::new();
    let mut raw = Raw::ready(&siege.target, &[0]);
    raw.start_tm(9, LUN_RESET, 0);
    let code = raw.rsp().code;
    assert!(matches!(code, Some(2 | 5)), "{code:?}");
    siege.end();
}

#[test]
fn aborts_in_a_full_window_give_all_credit_back() {
    let siege = Siege::with(&Setup::slow(300));
    let mut raw = Raw::ready(&siege.target, &[0, 2]);
    let all = raw.req_lim;
    let tags: Vec<u64> = (0..all - 1).map(|_| raw.start(raw.reading(2, 0, 8))).collect();
    // The last credit goes to one abort after the other; whatever is answered meanwhile was not
    // aborted.
    let mut answered = 0;
    for tag in &tags {
        let tm = raw.start_tm(2, ABORT_TASK, *tag);
        loop {
            let rsp = raw.rsp();
            if rsp.tag == tm {
                assert_eq!(rsp.code, Some(0));
                break;
            }
            answered += 1;
        }
    }
    assert!(answered < tags.len(), "not one abort was in time");
    raw.expect_credit(all);
    raw.expect_served();
    siege.end();
}

#[test]
fn a_reset_ends_the_commands_of_all_channels() {
    let siege = Siege::with(&Setup::slow(400));
    let mut client = ready_client(&siege);
    let slots = fill_slow(&mut client);
    assert_eq!(client.lun_reset(2).expect("an answer"), RspCode::COMPLETE);
    forget(&mut client, slots);
    assert_eq!(client.in_flight(), 0);
    for channel in 0..2 {
        expect_credit(&mut client, channel, 128);
    }
    let mut data = [0; 4096];
    client.read_blocks(2, 0, 512, &mut data).expect("the channel goes on");
    client.close();
    siege.end();
}

/// Two reactors, or nothing to test.
fn two_reactors(ms: u32) -> Option<Siege> {
    let cores = cores();
    if cores.len() < 2 {
        eprintln!("skipped: this machine has one core, so there is one reactor");
        return None;
    }
    let mut setup = Setup::slow(ms);
    setup.cores = format!("{},{}", cores[0], cores[1]);
    Some(Siege::with(&setup))
}

#[test]
fn a_reset_ends_the_commands_on_other_reactors_too() {
    let Some(siege) = two_reactors(400) else { return };
    // Channels go to the reactor with the fewest: three of one nexus are on both.
    let mut raws = vec![Raw::login_as(&siege.target, 3, MultiChannel::Single)];
    raws.extend((0..2).map(|_| Raw::login_as(&siege.target, 3, MultiChannel::Multi)));
    raws[0].calm(&[0, 2]);
    for raw in &mut raws {
        raw.calm(&[0, 2]);
        for at in 0..20 {
            raw.start(raw.reading(2, at, 8));
        }
        // They have arrived when a later command on a fast LUN is answered.
        raw.run(Cmd::new(0, TUR)).expect_good();
    }
    raws[0].start_tm(2, LUN_RESET, 0);
    let rsp = raws[0].rsp();
    assert_eq!(rsp.code, Some(0), "nothing but the reset is answered: {rsp:?}");
    for raw in &mut raws {
        raw.expect_credit(128);
        raw.run(raw.reading(2, 0, 8)).expect_good();
    }
    siege.end();
}

#[test]
fn a_reset_by_another_initiator_is_told_by_a_unit_attention() {
    let Some(siege) = two_reactors(400) else { return };
    let mut other = Raw::ready(&siege.target, &[0, 2]);
    let mut raw = Raw::ready(&siege.target, &[0, 2]);
    for at in 0..20 {
        other.start(other.reading(2, at, 8));
    }
    other.run(Cmd::new(0, TUR)).expect_good();
    raw.start_tm(2, LUN_RESET, 0);
    assert_eq!(raw.rsp().code, Some(0));
    // The victims are not answered; their credit comes back.
    other.expect_credit(128);
    other.run(Cmd::new(2, TUR)).expect_sense(6, 0x29, 3);
    other.run(Cmd::new(2, TUR)).expect_good();
    // The one who asked for it is not told.
    raw.run(Cmd::new(2, TUR)).expect_good();
    siege.end();
}

#[test]
fn resets_of_one_lun_from_two_initiators_at_once_are_both_answered() {
    let Some(siege) = two_reactors(100) else { return };
    let mut raws = [Raw::ready(&siege.target, &[0, 2]), Raw::ready(&siege.target, &[0, 2])];
    for _ in 0..20 {
        for raw in &mut raws {
            raw.calm(&[2]);
            for at in 0..10 {
                raw.start(raw.reading(2, at, 8));
            }
        }
        for raw in &mut raws {
            raw.start_tm(2, LUN_RESET, 0);
        }
        for raw in &mut raws {
            loop {
                let rsp = raw.rsp();
                if rsp.code.is_some() {
                    assert_eq!(rsp.code, Some(0));
                    break;
                }
            }
            raw.expect_credit(128);
        }
    }
    siege.end();
}

#[test]
fn resets_under_a_load_of_another_lun_disturb_nobody() {
    let Some(siege) = two_reactors(1) else { return };
    let words = "run --verify --lun 0 --channels 4 --rw randrw --size 48MiB --range 8MiB";
    let load = Perf::start(&siege.target, words);
    let mut client = client(&siege.target.socket, 2, SLOTS + 1);
    for _ in 0..200 {
        client.exec(0, 2, &cdb::test_unit_ready(), Xfer::None).expect("an answer");
        let slots = fill_slow(&mut client);
        assert_eq!(client.lun_reset(2).expect("an answer"), RspCode::COMPLETE);
        forget(&mut client, slots);
    }
    client.close();
    let ended = load.ended(PATIENCE);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    siege.end();
}
