//! Keys, addresses and lengths that do not fit what was lent: the peer is cut off as an RDMA device
//! would do it, and memory that may vanish is refused at login.

use rustix::fs::{FallocateFlags, SealFlags};

use crate::support::bystander::Siege;
use crate::support::iu::{Buffer, Cmd, Mem, read10, write10};
use crate::support::plug::{Answer, Plug, REJ, REQ, Region, datagram, memfd};
use crate::support::raw::Raw;

/// Each of these commands cuts its channel off.
fn cuts(make: impl Fn(&Raw) -> Vec<Cmd>) {
    let siege = Siege::new();
    let count = make(&Raw::login(&siege.target)).len();
    for at in 0..count {
        let mut raw = Raw::ready(&siege.target, &[0]);
        let cmd = make(&raw).swap_remove(at);
        raw.start(cmd);
        raw.expect_cut();
    }
    Raw::ready(&siege.target, &[0]).expect_served();
    siege.end();
}

/// A read and a write of 8 blocks by one direct descriptor.
fn both(mem: Mem) -> [Cmd; 2] {
    let buffer = || Buffer::Direct(mem);
    [Cmd::reading(0, read10(0, 8), buffer()), Cmd::writing(0, write10(0, 8), buffer())]
}

#[test]
fn a_wrong_key_cuts_off() {
    cuts(|raw| {
        let keys = [0, raw.rkey ^ 0x100, raw.rkey ^ 1 << 31, raw.rkey + 2, u32::MAX];
        keys.iter().flat_map(|key| both(Mem { key: *key, ..raw.mem(0, 4096) })).collect()
    });
}

#[test]
fn an_address_outside_of_what_was_lent_cuts_off() {
    cuts(|raw| {
        let end = raw.lent.len() as u64;
        let at = [end, end - 4095, 1 << 40, 0u64.wrapping_sub(1)];
        let mem = |at: &u64| Mem { va: raw.lent.addr().wrapping_add(*at), ..raw.mem(0, 4096) };
        at.iter()
            .flat_map(|at| both(mem(at)))
            .chain(both(Mem { va: 0, ..raw.mem(0, 4096) }))
            .collect()
    });
}

#[test]
fn the_last_bytes_of_what_was_lent_are_good() {
    let siege = Siege::new();
    let mut raw = Raw::ready(&siege.target, &[0]);
    for cmd in both(raw.mem(raw.lent.len() as u64 - 4096, 4096)) {
        raw.run(cmd).expect_good();
    }
    siege.end();
}

#[test]
fn the_second_descriptor_of_a_list_is_checked_too() {
    cuts(|raw| {
        let bad = Mem { key: raw.rkey ^ 0x100, ..raw.mem(2048, 2048) };
        let list = Buffer::Indirect(raw.mem(1 << 20, 32), 4096, vec![raw.mem(0, 2048), bad]);
        vec![Cmd::reading(0, read10(0, 8), list.clone()), Cmd::writing(0, write10(0, 8), list)]
    });
}

#[test]
fn a_table_outside_of_what_was_lent_cuts_off() {
    cuts(|raw| {
        let tables = [
            raw.mem(raw.lent.len() as u64, 32),
            raw.mem(raw.lent.len() as u64 - 16, 32),
            Mem { key: 1, ..raw.mem(0, 32) },
        ];
        let partial = |table| Buffer::Indirect(table, 4096, vec![raw.mem(0, 2048)]);
        tables.map(|table| Cmd::writing(0, write10(0, 8), partial(table))).to_vec()
    });
}

#[test]
fn memory_lent_for_reading_is_not_written() {
    let siege = Siege::new();
    let mut raw = Raw::ready(&siege.target, &[0]);
    raw.lent.fill(0, 4096, 0xee);
    let [read, write] = both(Mem { key: raw.rkey_read_only, ..raw.mem(0, 4096) });
    raw.run(write).expect_good();
    raw.lent.fill(0, 4096, 0xdd);
    raw.start(read);
    raw.expect_cut();
    assert_eq!(raw.lent.equals(0, &[0xdd; 4096]), None);
    siege.end();
}

#[test]
fn a_table_that_changes_while_it_is_used_hurts_nobody_else() {
    let siege = Siege::new();
    let mut raw = Raw::ready(&siege.target, &[0]);
    let (lent, good) = (raw.lent.clone(), raw.mem(0, 4096));
    let stop = std::sync::atomic::AtomicBool::new(false);
    let mut answered = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let bad = Mem { len: u32::MAX, ..good };
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                lent.copy_in(1 << 20, &bad.bytes());
                lent.copy_in(1 << 20, &good.bytes());
                std::thread::yield_now();
            }
        });
        for _ in 0..500 {
            let partial = Buffer::Indirect(raw.mem(1 << 20, 16), 4096, Vec::new());
            let rsp = raw.run(Cmd::writing(0, write10(0, 8), partial));
            assert!(rsp.status == 0 || rsp.sense == Some((5, 0x0e, 3)), "{rsp:?}");
            answered += 1;
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    assert_eq!(answered, 500);
    siege.end();
}

/// The refusal of a request that lends these regions with these files.
fn refusal(siege: &Siege, regions: &[Region], files: &[std::os::fd::OwnedFd]) -> String {
    Plug::ask(&siege.target.socket, &datagram(REQ, &[0; 64], regions), files).refused()
}

#[test]
fn memory_that_may_shrink_is_refused() {
    let siege = Siege::new();
    let file = memfd(8192, SealFlags::empty());
    let text = refusal(&siege, &[Region::of(0, 8192)], &[file]);
    assert!(text.contains("F_SEAL_SHRINK"), "{text}");
    let file = memfd(8192, SealFlags::GROW);
    assert!(refusal(&siege, &[Region::of(0, 8192)], &[file]).contains("F_SEAL_SHRINK"));
    siege.end();
}

#[test]
fn memory_shorter_than_it_is_said_to_be_is_refused() {
    let siege = Siege::new();
    let file = memfd(4096, SealFlags::SHRINK);
    let text = refusal(&siege, &[Region::of(0, 4097)], &[file]);
    assert!(text.contains("4096"), "{text}");
    siege.end();
}

#[test]
fn memory_that_cannot_be_written_is_refused_for_writing() {
    let siege = Siege::new();
    let file = memfd(4096, SealFlags::SHRINK | SealFlags::WRITE);
    let text = refusal(&siege, &[Region::of(0, 4096)], &[file]);
    assert!(text.contains("mmap"), "{text}");
    siege.end();
}

#[test]
fn files_that_are_no_memory_are_refused() {
    let siege = Siege::new();
    let null = std::fs::File::open("/dev/null").expect("it is there");
    let text = refusal(&siege, &[Region::of(0, 4096)], &[null.into()]);
    assert!(text.contains("not a memfd"), "{text}");
    let file = tempfile::tempfile().expect("a file can be made");
    file.set_len(8192).expect("a file can be sized");
    let text = refusal(&siege, &[Region::of(0, 4096)], &[file.into()]);
    assert!(text.contains("not a memfd") || text.contains("F_SEAL_SHRINK"), "{text}");
    siege.end();
}

#[test]
fn regions_that_cannot_be_are_refused() {
    let siege = Siege::new();
    let good = Region::of(0, 4096);
    let bad = [
        Region { len: 0, ..good },
        Region { len: u64::MAX, ..good },
        Region { va: u64::MAX - 100, ..good },
        Region { access: 4, ..good },
        Region { rkey: 7, ..good },
    ];
    for region in bad {
        let text = refusal(&siege, &[region], &[memfd(4096, SealFlags::SHRINK)]);
        assert!(!text.is_empty(), "{region:?}");
    }
    let huge = |index| Region { len: 1 << 63, ..Region::of(index, 0) };
    let files = [memfd(1, SealFlags::SHRINK), memfd(1, SealFlags::SHRINK)];
    assert!(refusal(&siege, &[huge(0), huge(1)], &files).contains("exceed"));
    siege.end();
}

#[test]
fn a_request_with_more_or_fewer_files_than_regions_is_refused() {
    let siege = Siege::new();
    let file = || memfd(4096, SealFlags::SHRINK);
    let one = [Region::of(0, 4096)];
    assert!(refusal(&siege, &one, &[]).contains("descriptors"));
    assert!(refusal(&siege, &one, &[file(), file()]).contains("descriptors"));
    assert!(refusal(&siege, &[], &[file()]).contains("descriptors"));
    siege.end();
}

#[test]
fn memory_with_holes_is_served_as_zeros() {
    // A lent file may lose its pages at any time without shrinking; the target must not trip over
    // it.
    let siege = Siege::new();
    let mut raw = Raw::ready(&siege.target, &[0]);
    raw.lent.fill(0, 1 << 20, 0xee);
    let fd = raw.lent.fd().expect("a shared arena").try_clone_to_owned().expect("it can be copied");
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    for _ in 0..50 {
        raw.start(raw.writing(0, 0, 2048));
        rustix::fs::fallocate(&fd, flags, 0, 1 << 20).expect("a hole can be punched");
        raw.rsp().expect_good();
    }
    raw.run(raw.writing(0, 0, 2048)).expect_good();
    raw.run(raw.reading(0, 0, 2048)).expect_good();
    assert_eq!(raw.lent.equals(0, &vec![0; 1 << 20]), None);
    siege.end();
}

#[test]
fn the_kinds_of_datagrams_are_those_of_the_fabric() {
    // Guards the tests above: a request that is right in every way is not refused by the fabric but
    // answered by SRP.
    let siege = Siege::new();
    let file = memfd(4096, SealFlags::SHRINK);
    let request = datagram(REQ, &[0xff; 64], &[Region::of(0, 4096)]);
    let answer = Plug::ask(&siege.target.socket, &request, &[file]);
    assert!(matches!(&answer, Answer::Datagram(REJ, data) if data[0] == 0xc2), "{answer:?}");
    siege.end();
}
