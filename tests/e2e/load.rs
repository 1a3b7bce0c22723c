//! Verified loads: every block that is read is the one that was written last.

use crate::support::PATIENCE;
use crate::support::perf::{Perf, perf_ok};
use crate::support::site::{Setup, Site, cores};
use crate::support::target::Target;

/// Runs a verified load on a target with this setup and ends both in good order.
fn verified(site: &Site, setup: &Setup, words: &str) {
    let target = Target::start(site, setup);
    let report = perf_ok(&target, &format!("run --verify {words}"));
    assert!(report.contains("verified"), "{report}");
    target.end_whole();
}

/// LUN 0 is an image on disk.
fn imaged(site: &Site) -> Setup {
    let image = site.image("disk.img", 64 << 20);
    let uring = format!("{{ name: img0, uring: {{ path: {} }} }}", image.display());
    Setup::new(&[&uring], "{ 0: img0 }")
}

#[test]
fn random_reads_and_writes_in_ram_are_right() {
    verified(&Site::new(), &Setup::ram(), "--rw randrw --bs 4k --size 64MiB --range 8MiB");
}

#[test]
fn random_reads_and_writes_in_an_image_are_right() {
    let site = Site::new();
    verified(&site, &imaged(&site), "--rw randrw --bs 4k --size 32MiB --range 16MiB");
}

#[test]
fn blocks_of_512_bytes_are_right() {
    verified(&Site::new(), &Setup::ram(), "--rw randrw --bs 512 --size 8MiB --range 1MiB");
}

#[test]
fn transfers_of_the_largest_size_are_right() {
    verified(&Site::new(), &Setup::ram(), "--rw randrw --bs 1MiB --iodepth 16 --size 128MiB");
}

#[test]
fn two_luns_at_a_time_are_right() {
    verified(&Site::new(), &Setup::ram(), "--lun 0,1 --rw randrw --size 32MiB --range 8MiB");
}

#[test]
fn four_channels_on_one_reactor_are_right() {
    let words = "--channels 4 --iodepth 16 --rw randrw --size 64MiB --range 8MiB";
    verified(&Site::new(), &Setup::ram(), words);
}

#[test]
fn four_channels_on_all_reactors_are_right() {
    let mut setup = Setup::ram();
    setup.cores = "auto".into();
    let words = "--channels 4 --iodepth 16 --rw randrw --size 64MiB --range 8MiB";
    verified(&Site::new(), &setup, words);
}

#[test]
fn four_channels_on_all_reactors_are_right_on_an_image() {
    let site = Site::new();
    let mut setup = imaged(&site);
    setup.cores = "auto".into();
    verified(&site, &setup, "--channels 4 --iodepth 8 --rw randrw --size 32MiB --range 16MiB");
}

#[test]
fn a_queue_deeper_than_the_credits_waits_for_them() {
    let mut setup = Setup::ram();
    setup.target.push("credits: 4".into());
    verified(&Site::new(), &setup, "--iodepth 64 --rw randrw --size 8MiB --range 4MiB");
}

#[test]
fn more_data_under_way_than_buffers_is_waited_for() {
    // 64 x 1 MiB are asked for, the reactor has 8 MiB. An image: RAM would be lent without a
    // buffer.
    let site = Site::new();
    verified(&site, &imaged(&site), "--iodepth 64 --bs 1MiB --rw randrw --size 96MiB");
}

#[test]
fn two_initiators_at_once_are_right() {
    let site = Site::new();
    let mut setup = Setup::ram();
    if cores().len() > 1 {
        setup.cores = "auto".into();
    }
    let target = Target::start(&site, &setup);
    let load = |lun: u8| {
        let words = format!("run --verify --lun {lun} --rw randrw --size 48MiB --range 8MiB");
        Perf::start(&target, &words)
    };
    for perf in [load(0), load(1)] {
        let ended = perf.ended(PATIENCE);
        assert_eq!(ended.code, Some(0), "{ended:?}");
    }
    target.end_whole();
}

#[test]
fn direct_descriptors_are_right() {
    verified(&Site::new(), &Setup::ram(), "--desc direct --rw randrw --size 16MiB --range 4MiB");
}

#[test]
fn indirect_descriptors_are_right() {
    verified(&Site::new(), &Setup::ram(), "--desc indirect --rw randrw --size 16MiB --range 4MiB");
}

#[test]
fn partial_tables_are_right() {
    verified(&Site::new(), &Setup::ram(), "--desc partial --rw randrw --size 16MiB --range 4MiB");
}

#[test]
fn immediate_data_is_right() {
    verified(&Site::new(), &Setup::ram(), "--desc imm --rw randrw --size 16MiB --range 4MiB");
}

#[test]
fn every_format_is_right_on_an_image() {
    let site = Site::new();
    let target = Target::start(&site, &imaged(&site));
    for desc in ["direct", "indirect", "partial", "imm"] {
        let words =
            format!("run --verify --desc {desc} --bs 8k --rw randrw --size 8MiB --range 4MiB");
        perf_ok(&target, &words);
    }
    target.end_whole();
}
