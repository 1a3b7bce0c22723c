//! Refusals of opening, locks between bdevs and processes, and the conformance suite on files.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::PermissionsExt;
#[cfg(feature = "test-utils")]
use std::path::Path;

use tempfile::TempDir;

use crate::contract::{BdevError, QueueSetup};
use crate::registry::{Registry, Spec, open_one};

fn dir() -> TempDir {
    tempfile::tempdir().unwrap()
}

fn file(dir: &TempDir, name: &str, bytes: u64) -> String {
    let path = dir.path().join(name);
    fs::File::create(&path).unwrap().set_len(bytes).unwrap();
    path.to_str().unwrap().to_string()
}

fn refusal(options: &str) -> BdevError {
    open_one(&format!("{{ name: u, uring: {{ {options} }} }}")).err().unwrap()
}

fn spec(name: &str, options: &str) -> Spec {
    let entry = format!("{{ name: {name}, uring: {{ {options} }} }}");
    Spec::parse(&serde_yaml::from_str(&entry).unwrap()).unwrap()
}

#[test]
fn options_are_refused_by_key() {
    for (options, key) in [
        ("", "uring"),
        ("path: ''", "uring.path"),
        ("path: x, direkt: true", "uring.direkt"),
        ("path: x, block_size: 100", "uring.block_size"),
        ("path: x, create: true", "uring.create"),
        ("path: x, create: true, size: 1MiB, read_only: true", "uring.create"),
        ("path: x, size: 1MiB", "uring.size"),
        ("path: x, create: true, size: 1000", "uring.size"),
        ("path: x, iopoll: true, direct: false", "uring.iopoll"),
    ] {
        assert_eq!(refusal(options).key, key, "{options}");
    }
}

#[test]
fn a_missing_file_is_named_with_the_command_that_makes_it() {
    let dir = dir();
    let path = dir.path().join("no.img");
    let error = refusal(&format!("path: {}", path.display()));
    assert_eq!(error.key, "uring.path");
    assert!(error.message.contains("no.img"), "{error}");
    assert!(error.hint.contains(&format!("truncate -s 1G {}", path.display())), "{error}");
}

#[test]
fn what_is_no_file_is_refused() {
    let dir = dir();
    let error = refusal(&format!("path: {}", dir.path().display()));
    assert!(error.message.contains("a directory"), "{error}");
    assert!(refusal("path: /dev/null").message.contains("a character device"));
    let below = file(&dir, "f", 4096) + "/below";
    assert!(refusal(&format!("path: {below}")).message.contains("can't look at"));
}

#[test]
fn sizes_that_do_not_fit_are_refused_and_the_file_stays() {
    let dir = dir();
    let empty = file(&dir, "empty", 0);
    assert!(refusal(&format!("path: {empty}")).message.contains("too short"));
    let odd = file(&dir, "odd", 10_000);
    let error = refusal(&format!("path: {odd}"));
    assert!(error.message.contains("not a multiple"), "{error}");
    assert_eq!(error.hint, "9728 or 10240");
    let there = file(&dir, "there", 1 << 20);
    let error = refusal(&format!("path: {there}, create: true, size: 2MiB"));
    assert_eq!(error.key, "uring.size");
    assert_eq!(fs::metadata(&there).unwrap().len(), 1 << 20);
}

#[test]
fn permission_is_named() {
    let dir = dir();
    let path = file(&dir, "secret", 4096);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o000)).unwrap();
    if OpenOptions::new().read(true).write(true).open(&path).is_ok() {
        println!("skipped: root may open anything");
        return;
    }
    let error = refusal(&format!("path: {path}"));
    assert!(error.hint.contains("permission"), "{error}");
}

#[test]
fn create_makes_a_file_once_and_keeps_it() {
    let dir = dir();
    let path = dir.path().join("new.img");
    let options = format!("path: {}, create: true, size: 1MiB", path.display());
    let entry = format!("{{ name: u, uring: {{ {options} }} }}");
    assert_eq!(open_one(&entry).unwrap().geometry().blocks, 2048);
    fs::write(&path, vec![7; 1 << 20]).unwrap();
    assert_eq!(open_one(&entry).unwrap().geometry().blocks, 2048);
    assert_eq!(fs::read(&path).unwrap(), vec![7; 1 << 20]);
}

#[test]
fn two_bdevs_on_one_file_are_refused_by_name() {
    let dir = dir();
    let path = file(&dir, "f", 1 << 20);
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    let mut registry = Registry::new();
    registry.open(&spec("first", &format!("path: {path}"))).unwrap();
    let other = spec("second", &format!("path: {}", link.display()));
    let error = registry.open(&other).err().unwrap();
    assert!(error.message.contains("in use by bdev `first`"), "{error}");
    drop(registry);
    Registry::new().open(&other).unwrap();
}

#[test]
fn another_process_is_refused_but_readers_share() {
    // A second registry's lock is another open file, so it conflicts as another process's does.
    let dir = dir();
    let path = file(&dir, "f", 1 << 20);
    let writes = format!("path: {path}");
    let reads = format!("path: {path}, read_only: true");
    let held = open_one(&format!("{{ name: a, uring: {{ {writes} }} }}")).unwrap();
    for options in [&writes, &reads] {
        let error = refusal(options);
        assert!(error.message.contains("in use by another process"), "{error}");
    }
    drop(held);
    let _one = open_one(&format!("{{ name: a, uring: {{ {reads} }} }}")).unwrap();
    let _two = open_one(&format!("{{ name: b, uring: {{ {reads} }} }}")).unwrap();
    assert!(refusal(&writes).message.contains("in use by another process"));
}

#[test]
fn a_file_that_shrinks_is_a_medium_error() {
    use crate::contract::Lba;
    use crate::io::{Completions, Io, Op, Status};
    use usurp_reactor::mem::{Arena, BufPool, HugePolicy};

    let dir = dir();
    let path = file(&dir, "f", 1 << 20);
    let bdev = open_one(&format!("{{ name: u, uring: {{ path: {path} }} }}")).unwrap();
    let arena = Arena::new("shrink", 65536, HugePolicy::Never).unwrap();
    let setup = QueueSetup { depth: 1, data: Some(arena.clone()), core: 0 };
    let mut pool = BufPool::new(arena, 0, 65536, 4096, 65536);
    let mut queue = bdev.queue(&setup).unwrap();
    OpenOptions::new().write(true).open(&path).unwrap().set_len(8192).unwrap();
    let io = Io::new(Op::Read, Lba(0), 64, pool.take(32768).unwrap(), 1);
    queue.submit(io).unwrap();
    let mut done = Completions::new();
    while done.is_empty() {
        queue.poll(0, &mut done);
    }
    let finished = done.pop().unwrap();
    assert_eq!(finished.status, Status::Medium);
    pool.give(finished.buf);
}

#[test]
#[should_panic(expected = "in flight")]
fn a_queue_dropped_with_io_in_flight_panics() {
    use crate::contract::Lba;
    use crate::io::{Io, Op};
    use usurp_reactor::mem::Buf;

    let dir = dir();
    let path = file(&dir, "f", 1 << 20);
    let bdev = open_one(&format!("{{ name: u, uring: {{ path: {path} }} }}")).unwrap();
    let mut queue = bdev.queue(&QueueSetup { depth: 1, data: None, core: 0 }).unwrap();
    queue.submit(Io::new(Op::Flush, Lba(0), 0, Buf::none(), 1)).unwrap();
    drop(queue);
}

#[test]
fn polling_works_or_is_refused_when_opened() {
    let dir = dir();
    let path = file(&dir, "f", 1 << 20);
    let entry = format!("{{ name: u, uring: {{ path: {path}, iopoll: true }} }}");
    match open_one(&entry) {
        Ok(_bdev) => {
            #[cfg(feature = "test-utils")]
            crate::conformance::run(_bdev);
        }
        Err(error) => assert_eq!(error.key, "uring.iopoll", "{error}"),
    }
}

#[cfg(feature = "test-utils")]
fn conform(dir: &Path, options: &str) {
    let path = dir.join("conformance.img");
    fs::File::create(&path).unwrap().set_len(4 << 20).unwrap();
    let entry = format!("{{ name: u, uring: {{ path: {}, {options} }} }}", path.display());
    crate::conformance::run(open_one(&entry).unwrap());
}

#[cfg(feature = "test-utils")]
#[test]
fn conformance() {
    let dir = dir();
    for options in ["direct: true", "direct: false", "block_size: 4096", "read_only: true"] {
        conform(dir.path(), options);
    }
}

#[cfg(feature = "test-utils")]
#[test]
fn conformance_on_tmpfs() {
    // No ZERO_RANGE there, and no O_DIRECT before Linux 6.6: both have to be got round.
    let Ok(dir) = tempfile::tempdir_in("/dev/shm") else {
        println!("skipped: no /dev/shm");
        return;
    };
    conform(dir.path(), "direct: true");
}

/// A loop device, detached when dropped.
#[cfg(feature = "test-utils")]
struct Loop(String);

#[cfg(feature = "test-utils")]
impl Loop {
    fn new(path: &Path, sector: u32) -> Option<Loop> {
        let output = std::process::Command::new("losetup")
            .args(["--find", "--show", "--sector-size", &sector.to_string()])
            .arg(path)
            .output();
        let output = output.ok().filter(|output| output.status.success())?;
        Some(Loop(String::from_utf8(output.stdout).unwrap().trim().to_string()))
    }
}

#[cfg(feature = "test-utils")]
impl Drop for Loop {
    fn drop(&mut self) {
        let _ = std::process::Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

#[cfg(feature = "test-utils")]
#[test]
fn conformance_on_block_devices() {
    let dir = dir();
    for sector in [512, 4096] {
        let path = file(&dir, &format!("disk{sector}"), 8 << 20);
        let Some(device) = Loop::new(Path::new(&path), sector) else {
            println!("skipped: no loop devices (needs root and losetup)");
            return;
        };
        let bdev = open_one(&format!("{{ name: u, uring: {{ path: {} }} }}", device.0)).unwrap();
        let geometry = bdev.geometry();
        assert_eq!((geometry.block_size, geometry.size_bytes()), (sector, 8 << 20));
        assert!(bdev.caps().unmap, "a loop device zeroes by unmapping");
        let error = refusal(&format!("path: {}", device.0));
        assert!(error.message.contains("in use"), "{error}");
        crate::conformance::run(bdev);
    }
}
