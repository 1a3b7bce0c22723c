//! `kill -9` on either side.

use std::io::Write;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use usurp_bench::cdb;
use usurp_bench::client::{Data, Outcomes, Request, Started};

use crate::support::bystander::{Bystander, client};
use crate::support::perf::{Perf, perf_ok};
use crate::support::process::{self, Lines};
use crate::support::site::{Random, Setup, Site};
use crate::support::target::Target;
use crate::support::{PATIENCE, bystander};

/// Names the target's socket to the child process in [`child_that_loads_until_killed`].
const SOCKET: &str = "USURP_E2E_LOAD";
/// Kills of the initiator.
const KILLS: usize = 100;
/// Resident memory that may come and go: pages of the heap that are not given back at once.
const RSS_SLACK_KIB: u64 = 4096;

/// Not a test: a child of the tests below, which loads LUN 0 with reads and writes until it is
/// killed. It says `loaded` once a few hundred commands are through and its queue is full.
#[test]
fn child_that_loads_until_killed() {
    let Some(socket) = std::env::var_os(SOCKET) else { return };
    let mut client = client(socket.as_ref(), 2, 32);
    client.wait_ready(0).expect("the LUN is there");
    let mut random = Random(usurp_bench::connect::random_u64());
    let mut out = Outcomes::default();
    let mut idle = Vec::new();
    for channel in 0..2 {
        idle.extend(std::iter::from_fn(|| client.reserve(channel)));
    }
    let mut done = 0u64;
    loop {
        let now = client.now();
        while let Some(slot) = idle.pop() {
            let write = random.below(2) == 0;
            let blocks = 1 + random.below(128) as u32;
            let cdb = cdb::read_write(write, random.below(30_000), blocks);
            let data = if write { Data::Out(blocks * 512) } else { Data::In(blocks * 512) };
            let request = Request { lun: 0, cdb, data, user: 0 };
            assert_eq!(client.start(slot, &request, now).expect("alive"), Started::Yes);
        }
        client.flush().expect("alive");
        client.wait(&mut out).expect("alive");
        idle.extend(out.iter().map(|o| o.slot));
        let before = done;
        done += out.len() as u64;
        if before < 300 && done >= 300 {
            println!("loaded");
            std::io::stdout().flush().expect("a pipe");
        }
    }
}

/// Starts that child, and returns when it is in the middle of its load.
fn loader(target: &Target) -> Child {
    let mut command = Command::new(std::env::current_exe().expect("a program knows its path"));
    command.args(["--exact", "death::child_that_loads_until_killed", "--nocapture"]);
    command.env(SOCKET, &target.socket).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("this program starts again");
    let mut out = Lines::of(child.stdout.take().expect("it is a pipe"));
    out.wait_for("loaded", PATIENCE);
    child
}

/// Kills it, and waits until the target has taken both channels down.
fn kill(target: &mut Target, mut child: Child) {
    child.kill().expect("our child is there");
    child.wait().expect("our child can be waited for");
    for _ in 0..2 {
        target.wait_log("channel closed");
    }
}

#[test]
fn a_hundred_killed_initiators_cost_the_target_nothing() {
    let site = Site::new();
    let mut target = Target::start(&site, &Setup::ram());
    let bystander = Bystander::start(&target);
    let mut before = (0, 0);
    for round in 0..KILLS {
        let child = loader(&target);
        kill(&mut target, child);
        if round == KILLS / 10 {
            before = (process::rss_kib(&target.child), process::fd_count(&target.child));
        }
    }
    let after = (process::rss_kib(&target.child), process::fd_count(&target.child));
    assert_eq!(after.1, before.1, "open descriptors");
    assert!(after.0 <= before.0 + RSS_SLACK_KIB, "KiB resident: {before:?}, then {after:?}");
    bystander.end();
    perf_ok(&target, "luns");
    target.end_whole();
}

#[test]
fn an_initiator_killed_while_an_image_works_for_it_leaves_the_target_whole() {
    let site = Site::new();
    let image = site.image("disk.img", 16 << 20);
    let uring = format!("{{ name: img0, uring: {{ path: {} }} }}", image.display());
    let mut target = Target::start(&site, &Setup::new(&[&uring], "{ 0: img0 }"));
    for _ in 0..5 {
        let child = loader(&target);
        kill(&mut target, child);
    }
    target.end_whole();
}

#[test]
fn initiators_killed_with_channels_on_all_reactors_leave_the_target_whole() {
    let site = Site::new();
    let mut setup = Setup::ram();
    setup.cores = "auto".into();
    let mut target = Target::start(&site, &setup);
    for _ in 0..10 {
        let children = [loader(&target), loader(&target)];
        children.into_iter().for_each(|child| kill(&mut target, child));
    }
    target.end_whole();
}

#[test]
fn an_initiator_killed_with_slow_commands_under_way_leaves_the_target_whole() {
    let site = Site::new();
    let mut target = Target::start(&site, &Setup::slow(1000));
    let mut perf = Perf::start(&target, "run --lun 2 --rw randwrite --iodepth 64 --runtime 600");
    target.wait_log("login accepted");
    // Somebody else is served while the slow commands are under way.
    let mut other = bystander::client(&target.socket, 1, 2);
    other.wait_ready(0).expect("the LUN is there");
    perf.child.kill().expect("our child is there");
    target.wait_log("channel closed");
    other.close();
    target.end_whole();
}

/// Kills the target under a load and gives how the initiator ended, and after how long.
fn bereave(setup: &Setup, load: &str) -> (Duration, crate::support::perf::Ended) {
    let site = Site::new();
    let mut target = Target::start(&site, setup);
    let perf = Perf::load(&target, load);
    let start = Instant::now();
    target.kill();
    let ended = perf.ended(PATIENCE);
    (start.elapsed(), ended)
}

/// An error at once, not a hang. On an idle machine this takes milliseconds.
fn expect_error_at_once((took, ended): (Duration, crate::support::perf::Ended)) {
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.err.contains("the target is gone"), "{}", ended.err);
    assert!(!ended.err.contains("panicked"), "{}", ended.err);
    assert!(took < Duration::from_secs(5), "the error came after {took:?}");
}

#[test]
fn a_killed_target_is_an_error_at_once_for_a_busy_initiator() {
    expect_error_at_once(bereave(&Setup::ram(), "--rw randrw --runtime 600"));
}

#[test]
fn a_killed_target_is_an_error_at_once_with_several_channels() {
    expect_error_at_once(bereave(&Setup::ram(), "--rw randrw --runtime 600 --channels 8"));
}

#[test]
fn a_killed_target_is_an_error_at_once_for_one_that_waits_for_slow_answers() {
    // Each answer takes two seconds; the time allowed for one is thirty.
    let load = "--lun 2 --rw randread --iodepth 4 --runtime 600";
    expect_error_at_once(bereave(&Setup::slow(2000), load));
}

#[test]
fn an_initiator_can_come_back_after_the_target_was_killed_and_started_again() {
    let site = Site::new();
    let mut target = Target::start(&site, &Setup::ram());
    perf_ok(&target, "run --size 1MiB");
    target.kill();
    let target = Target::start(&site, &Setup::ram());
    perf_ok(&target, "run --size 1MiB");
    target.end_whole();
}
