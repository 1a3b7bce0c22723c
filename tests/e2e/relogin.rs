//! A SINGLE login of a nexus that has channels with I/O under way: they end first, and no write of
//! theirs lands later.

use usurp_srp::initiator::MultiChannel;

use crate::support::bystander::Siege;
use crate::support::iu::{Buffer, Cmd, TUR, read10, write10};
use crate::support::raw::{Got, Raw};
use crate::support::site::Setup;

/// MULTI-CHANNEL RESULT of a LOGIN_RSP.
fn result(raw: &Raw) -> u8 {
    raw.login_rsp[26] & 3
}

#[test]
fn a_relogin_ends_the_old_channels_and_says_so() {
    let siege = Siege::new();
    let mut first = Raw::login_as(&siege.target, 3, MultiChannel::Single);
    let mut second = Raw::login_as(&siege.target, 3, MultiChannel::Multi);
    first.expect_served();
    second.expect_served();
    let mut new = Raw::login_as(&siege.target, 3, MultiChannel::Single);
    assert_eq!(result(&new), 1, "existing channels were terminated");
    first.expect_cut();
    second.expect_cut();
    new.expect_served();
    siege.end();
}

#[test]
fn a_relogin_concerns_its_own_nexus_only() {
    let siege = Siege::new();
    let mut other = Raw::login_as(&siege.target, 4, MultiChannel::Single);
    let mut first = Raw::login_as(&siege.target, 3, MultiChannel::Single);
    let mut new = Raw::login_as(&siege.target, 3, MultiChannel::Single);
    first.expect_cut();
    new.expect_served();
    other.expect_served();
    siege.end();
}

#[test]
fn a_write_of_the_old_channel_never_lands_after_one_of_the_new() {
    let siege = Siege::with(&Setup::slow(300));
    for round in 0..5u8 {
        let mut old = Raw::login_as(&siege.target, 3, MultiChannel::Single);
        old.calm(&[0, 2]);
        old.lent.fill(0, 1 << 20, 0xaa);
        // LUN 2 is slow: these are still under way when the new channel comes. The last ones may
        // not have been begun.
        for at in 0..64 {
            let buffer = Buffer::Direct(old.mem(0, 4096));
            old.start(Cmd::writing(2, write10(at * 8, 8), buffer));
        }
        // They have arrived when a later command on a fast LUN is answered.
        old.run(Cmd::new(0, TUR)).expect_good();
        let mut new = Raw::login_as(&siege.target, 3, MultiChannel::Single);
        assert_eq!(result(&new), 1);
        new.calm(&[2]);
        new.lent.fill(0, 64 * 4096, round);
        for at in 0..64 {
            let buffer = Buffer::Direct(new.mem(0, 4096));
            new.start(Cmd::writing(2, write10(at * 8, 8), buffer));
        }
        (0..64).for_each(|_| new.rsp().expect_good());
        let all = Buffer::Direct(new.mem(1 << 20, 64 * 4096));
        new.run(Cmd::reading(2, read10(0, 512), all)).expect_good();
        assert_eq!(new.lent.equals(1 << 20, &vec![round; 64 * 4096]), None, "an old write landed");
        while old.next() != Got::Cut {}
    }
    siege.end();
}

#[test]
fn a_relogin_in_the_middle_of_a_load_works_again_and_again() {
    let siege = Siege::new();
    let mut old: Option<Raw> = None;
    for _ in 0..30 {
        let mut new = Raw::login_as(&siege.target, 3, MultiChannel::Single);
        new.calm(&[0]);
        for at in 0..100 {
            let cmd = if at % 2 == 0 { new.reading(0, at, 200) } else { new.writing(0, at, 200) };
            new.start(cmd);
        }
        if let Some(mut old) = old.replace(new) {
            while old.next() != Got::Cut {}
        }
    }
    drop(old);
    siege.end();
}
