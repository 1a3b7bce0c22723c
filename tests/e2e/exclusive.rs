//! A socket and an image belong to one target at a time, however the one before ended.

use crate::support::perf::perf_ok;
use crate::support::site::{Setup, Site};
use crate::support::target::Target;

/// LUN 0 is the image `disk.img` of the site.
fn imaged(site: &Site) -> Setup {
    let image = site.disk("disk.img");
    if !image.exists() {
        site.image("disk.img", 16 << 20);
    }
    let uring = format!("{{ name: img0, uring: {{ path: {} }} }}", image.display());
    Setup::new(&[&uring], "{ 0: img0 }")
}

#[test]
fn a_second_target_on_the_same_socket_is_refused() {
    let site = Site::new();
    let target = Target::start(&site, &Setup::ram());
    let refused = Target::try_start(&site, &Setup::ram().yaml(&site.socket()));
    let refused = refused.err().expect("the socket is taken");
    assert_eq!(refused.code, Some(4), "{refused:?}");
    let path = site.socket().display().to_string();
    assert!(refused.text.contains(&path) && refused.text.contains("another"), "{refused:?}");
    perf_ok(&target, "luns");
    target.end_whole();
}

#[test]
fn a_second_target_on_the_same_image_is_refused() {
    let (site, other) = (Site::new(), Site::new());
    let target = Target::start(&site, &imaged(&site));
    let refused = Target::try_start(&other, &imaged(&site).yaml(&other.socket()));
    let refused = refused.err().expect("the image is taken");
    assert_eq!(refused.code, Some(4), "{refused:?}");
    assert!(refused.text.contains("disk.img") && refused.text.contains("in use"), "{refused:?}");
    assert!(refused.text.contains('^'), "it points into the file: {refused:?}");
    perf_ok(&target, "luns");
    target.end_whole();
}

#[test]
fn the_socket_of_a_killed_target_is_taken_over() {
    let site = Site::new();
    let mut target = Target::start(&site, &Setup::ram());
    target.kill();
    assert!(site.socket().exists(), "a killed target leaves its socket");
    let target = Target::start(&site, &Setup::ram());
    perf_ok(&target, "luns");
    target.end_whole();
}

#[test]
fn the_image_of_a_killed_target_is_taken_over_with_its_data() {
    let site = Site::new();
    let file = site.noise("file", 2 << 20, 9);
    let back = site.disk("back");
    let mut target = Target::start(&site, &imaged(&site));
    perf_ok(&target, &format!("cp {} lun:0", file.display()));
    target.kill();
    let target = Target::start(&site, &imaged(&site));
    perf_ok(&target, &format!("cp --size 2MiB lun:0 {}", back.display()));
    target.end_whole();
    let same =
        std::fs::read(file).expect("it is there") == std::fs::read(back).expect("it is there");
    assert!(same, "other bytes after the kill");
}

#[test]
fn a_target_that_ended_in_good_order_leaves_no_socket() {
    let site = Site::new();
    Target::start(&site, &Setup::ram()).end_whole();
    assert!(!site.socket().exists());
}

#[test]
fn a_file_in_the_place_of_the_socket_is_not_removed() {
    let site = Site::new();
    std::fs::write(site.socket(), "precious").expect("a file can be written");
    let refused = Target::try_start(&site, &Setup::ram().yaml(&site.socket()));
    let refused = refused.err().expect("the place is taken");
    assert!(refused.text.contains("is not a socket"), "{refused:?}");
    assert_eq!(std::fs::read(site.socket()).expect("it is there"), b"precious");
}
