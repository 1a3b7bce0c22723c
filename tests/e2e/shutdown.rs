//! SIGTERM: what has begun is answered, nothing new begins, and the end comes in bounded time.

use std::time::{Duration, Instant};

use crate::support::PATIENCE;
use crate::support::iu::{Cmd, TUR};
use crate::support::perf::Perf;
use crate::support::raw::Raw;
use crate::support::site::{Setup, Site};
use crate::support::target::Target;

/// Longest end after a SIGTERM: two seconds of grace, ten for channels to end, and some for a
/// loaded machine.
const END: Duration = Duration::from_secs(30);

#[test]
fn an_idle_target_ends_at_once_and_whole() {
    let site = Site::new();
    let target = Target::start(&site, &Setup::ram());
    target.terminate();
    let took = target.expect_whole();
    assert!(took < END, "{took:?}");
}

#[test]
fn under_load_it_ends_whole_and_the_initiator_gets_a_clean_error() {
    let site = Site::new();
    let target = Target::start(&site, &Setup::ram());
    let perf = Perf::load(&target, "--rw randrw --runtime 600 --channels 2");
    target.terminate();
    let took = target.expect_whole();
    assert!(took < END, "{took:?}");
    let ended = perf.ended(PATIENCE);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.err.contains("the target is gone"), "{}", ended.err);
    assert!(!ended.err.contains("panicked"), "{}", ended.err);
}

#[test]
fn a_command_already_begun_is_answered_first() {
    let site = Site::new();
    let mut target = Target::start(&site, &Setup::slow(1000));
    let mut raw = Raw::ready(&target, &[0, 2]);
    raw.start(raw.reading(2, 0, 8));
    // The command must have arrived: a later one on another LUN is answered.
    raw.run(Cmd::new(0, TUR)).expect_good();
    target.terminate();
    target.wait_log("shutting down");
    raw.rsp().expect_good();
    raw.expect_cut();
    target.expect_whole();
}

#[test]
fn a_command_slower_than_the_grace_is_not_waited_for() {
    let site = Site::new();
    let mut target = Target::start(&site, &Setup::slow(6000));
    let mut raw = Raw::ready(&target, &[0, 2]);
    raw.start(raw.reading(2, 0, 8));
    raw.run(Cmd::new(0, TUR)).expect_good();
    target.terminate();
    target.wait_log("shutting down");
    raw.expect_cut();
    target.expect_whole();
}

#[test]
fn a_second_sigterm_waits_for_no_command() {
    let site = Site::new();
    let mut target = Target::start(&site, &Setup::slow(1900));
    let mut raw = Raw::ready(&target, &[0, 2]);
    let begun = Instant::now();
    raw.start(raw.reading(2, 0, 8));
    raw.run(Cmd::new(0, TUR)).expect_good();
    target.terminate();
    target.wait_log("shutting down");
    target.terminate();
    // One SIGTERM would have waited for the answer (see above); on a machine so slow that the
    // command was done before the signals came, there is nothing to see.
    if begun.elapsed() < Duration::from_millis(1000) {
        raw.expect_cut();
    }
    target.expect_whole();
}

#[test]
fn nobody_can_log_in_once_it_has_begun() {
    let site = Site::new();
    let mut target = Target::start(&site, &Setup::slow(1900));
    let mut raw = Raw::ready(&target, &[0, 2]);
    raw.start(raw.reading(2, 0, 8));
    raw.run(Cmd::new(0, TUR)).expect_good();
    target.terminate();
    target.wait_log("shutting down");
    let ended = crate::support::perf::perf(&target, "luns");
    assert_eq!(ended.code, Some(3), "{ended:?}");
    target.expect_whole();
}

#[test]
fn sigint_ends_it_too() {
    let site = Site::new();
    let target = Target::start(&site, &Setup::ram());
    let pid = rustix::process::Pid::from_child(&target.child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).expect("it is there");
    target.expect_whole();
}
