//! Listing and copying: what goes in comes out, through every module and after a restart.

use std::path::Path;

use crate::support::perf::{perf, perf_ok};
use crate::support::site::{Setup, Site};
use crate::support::target::Target;

/// Copies `file` to a LUN and back, and compares: the bytes and both SHA-256 that `usurp-perf`
/// prints.
fn there_and_back(site: &Site, target: &Target, lun: &str, file: &Path) {
    let back = site.disk("back");
    let size = std::fs::metadata(file).expect("it is there").len();
    let there = format!("cp --sha256 {} {lun}", file.display());
    let put = perf_ok(target, &there);
    let got = perf_ok(target, &format!("cp --sha256 --size {size} {lun} {}", back.display()));
    assert_eq!(digest(&put), digest(&got));
    let same =
        std::fs::read(file).expect("it is there") == std::fs::read(&back).expect("it is there");
    assert!(same, "the copy differs from the original");
}

fn digest(output: &str) -> &str {
    output.lines().find_map(|line| line.strip_prefix("sha256 ")).expect("a digest is printed")
}

/// A setup with an image file on LUN 0.
fn imaged(image: &Path, options: &str) -> Setup {
    let uring = format!("{{ name: img0, uring: {{ path: {}{options} }} }}", image.display());
    Setup::new(&[&uring], "{ 0: img0 }")
}

#[test]
fn luns_lists_every_lun_with_its_size() {
    let site = Site::new();
    let target = Target::start(&site, &Setup::ram());
    let list = perf_ok(&target, "luns");
    assert_eq!(list.matches(" 16MiB ").count(), 2, "{list}");
    target.end_whole();
}

#[test]
fn inq_shows_identity_and_pages() {
    let site = Site::new();
    let target = Target::start(&site, &Setup::ram());
    let first = perf_ok(&target, "inq --lun 0");
    assert!(first.to_lowercase().contains("naa"), "{first}");
    assert_ne!(first, perf_ok(&target, "inq --lun 1"), "two LUNs have two identities");
    target.end_whole();
}

#[test]
fn a_lun_keeps_its_identity_over_a_restart() {
    let site = Site::new();
    let mut seen = Vec::new();
    for _ in 0..2 {
        let target = Target::start(&site, &Setup::ram());
        seen.push(perf_ok(&target, "inq --lun 1"));
        target.end_whole();
    }
    assert_eq!(seen[0], seen[1]);
}

#[test]
fn a_file_copied_to_ram_comes_back() {
    let site = Site::new();
    let target = Target::start(&site, &Setup::ram());
    there_and_back(&site, &target, "lun:0", &site.noise("file", 9 << 20, 1));
    target.end_whole();
}

#[test]
fn a_file_copied_to_an_image_comes_back() {
    let site = Site::new();
    let image = site.image("disk.img", 32 << 20);
    let target = Target::start(&site, &imaged(&image, ""));
    there_and_back(&site, &target, "lun:0@1MiB", &site.noise("file", 9 << 20, 2));
    target.end_whole();
}

#[test]
fn what_was_copied_lies_in_the_image_at_its_offset() {
    let site = Site::new();
    let image = site.image("disk.img", 32 << 20);
    let file = site.noise("file", 3 << 20, 3);
    let target = Target::start(&site, &imaged(&image, ""));
    perf_ok(&target, &format!("cp {} lun:0@5MiB", file.display()));
    target.end_whole();
    let image = std::fs::read(&image).expect("it is there");
    let file = std::fs::read(&file).expect("it is there");
    assert!(image[5 << 20..8 << 20] == file[..], "the bytes at their offset");
    assert!(image[..5 << 20].iter().all(|b| *b == 0), "nothing before");
    assert!(image[8 << 20..].iter().all(|b| *b == 0), "nothing behind");
}

#[test]
fn data_survives_a_restart_of_the_target() {
    let site = Site::new();
    let image = site.image("disk.img", 16 << 20);
    let file = site.noise("file", 6 << 20, 4);
    let back = site.disk("back");
    let target = Target::start(&site, &imaged(&image, ""));
    perf_ok(&target, &format!("cp {} lun:0", file.display()));
    target.end_whole();
    let target = Target::start(&site, &imaged(&image, ", direct: false"));
    perf_ok(&target, &format!("cp --size 6MiB lun:0 {}", back.display()));
    target.end_whole();
    let same =
        std::fs::read(file).expect("it is there") == std::fs::read(back).expect("it is there");
    assert!(same, "other bytes after the restart");
}

#[test]
fn a_read_only_lun_refuses_writes_and_keeps_its_data() {
    let site = Site::new();
    let image = site.noise("disk.img", 16 << 20, 5);
    let uring = format!("{{ name: img0, uring: {{ path: {} }} }}", image.display());
    let setup = Setup::new(&[&uring], "{ 0: { bdev: img0, read_only: true } }");
    let target = Target::start(&site, &setup);
    let file = site.noise("file", 1 << 20, 6);
    let ended = perf(&target, &format!("cp {} lun:0", file.display()));
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.err.contains("27/00"), "write protected: {}", ended.err);
    perf_ok(&target, &format!("cp lun:0 {}", site.disk("back").display()));
    target.end_whole();
    let same = std::fs::read(image).expect("it is there")
        == std::fs::read(site.disk("back")).expect("it is there");
    assert!(same, "a read-only LUN is read as it is");
}

#[test]
fn a_lun_that_is_not_there_is_an_error_in_words() {
    let site = Site::new();
    let target = Target::start(&site, &Setup::ram());
    let ended = perf(&target, "cp --size 4k lun:7 /dev/null");
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.err.contains("25/00"), "{}", ended.err);
    target.end_whole();
}
