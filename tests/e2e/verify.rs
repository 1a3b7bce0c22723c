//! VERIFY reads the medium in pieces, and compares: the one command that takes two buffers.

use usurp_bench::sync::Xfer;

use crate::support::bystander::client;
use crate::support::site::{Setup, Site};
use crate::support::target::Target;

const VERIFY_10: u8 = 0x2F;
const WRITE_10: u8 = 0x2A;
/// BYTCHK = 01b: compare with the data-out buffer, byte by byte.
const BYTCHK: u8 = 0x02;

/// A ten-byte CDB on `blocks` blocks from LBA 8.
fn cdb(opcode: u8, flags: u8, blocks: u16) -> [u8; 16] {
    let [high, low] = blocks.to_be_bytes();
    [opcode, flags, 0, 0, 0, 8, 0, high, low, 0, 0, 0, 0, 0, 0, 0]
}

/// Runs `act` on a target whose LUN 0 is an image on disk, and wants it whole afterwards.
fn with_image(act: impl FnOnce(&mut usurp_bench::connect::ShmClient)) {
    let site = Site::new();
    let image = site.image("disk.img", 8 << 20);
    let uring = format!("{{ name: img0, uring: {{ path: {} }} }}", image.display());
    let target = Target::start(&site, &Setup::new(&[&uring], "{ 0: img0 }"));
    let mut client = client(&site.socket(), 1, 8);
    client.wait_ready(0).expect("a disk");
    act(&mut client);
    drop(client);
    target.end_whole();
}

#[test]
fn a_long_verify_goes_in_pieces() {
    with_image(|client| {
        let reply = client.exec(0, 0, &cdb(VERIFY_10, 0, 1024), Xfer::None).expect("an answer");
        assert!(reply.is_good(), "{reply:?}");
    });
}

#[test]
fn a_compare_that_is_equal_is_good_and_one_that_differs_says_miscompare() {
    with_image(|client| {
        let mut data = vec![0x5A; 64 << 10];
        client.exec_good(0, &cdb(WRITE_10, 0, 128), Xfer::Out(&data)).expect("a write");
        let same = client.exec(0, 0, &cdb(VERIFY_10, BYTCHK, 128), Xfer::Out(&data));
        assert!(same.as_ref().is_ok_and(|r| r.is_good()), "{same:?}");
        data[70_000 - 8192] ^= 1;
        let reply = client.exec(0, 0, &cdb(VERIFY_10, BYTCHK, 128), Xfer::Out(&data));
        let reply = reply.expect("an answer");
        assert_eq!(reply.status, 0x02, "{reply:?}");
        assert_eq!(reply.sense[2] & 0x0F, 0x0E, "MISCOMPARE: {reply:?}");
    });
}
