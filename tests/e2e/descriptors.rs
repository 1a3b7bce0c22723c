//! Data-buffer descriptors that cannot be: the rows of reference table 4.8 that are answered with
//! CHECK CONDITION ILLEGAL REQUEST, 0E/03 INVALID FIELD IN COMMAND INFORMATION UNIT. The channel
//! goes on, nobody else notices.

use usurp_srp::initiator::MultiChannel;

use crate::support::bystander::Siege;
use crate::support::iu::{Buffer, Cmd, Mem, inquiry, read10, write10};
use crate::support::raw::{Raw, request};

/// Each command gets 05/0E/03, and an honest one its answer afterwards; nobody notices, no credit
/// is lost.
fn malformed(make: impl FnOnce(&Raw) -> Vec<Cmd>) {
    let siege = Siege::new();
    let mut raw = Raw::ready(&siege.target, &[0]);
    let all = raw.req_lim;
    for cmd in make(&raw) {
        let rsp = raw.run(cmd.clone());
        assert_eq!((rsp.status, rsp.sense), (2, Some((5, 0x0e, 3))), "{cmd:?}: {rsp:?}");
    }
    raw.expect_served();
    raw.expect_credit(all);
    siege.end();
}

/// A WRITE(10) of 8 blocks with this data-out.
fn write8(out: Buffer) -> Cmd {
    Cmd::writing(0, write10(0, 8), out)
}

/// A READ(10) of 8 blocks with this data-in.
fn read8(inn: Buffer) -> Cmd {
    Cmd::reading(0, read10(0, 8), inn)
}

#[test]
fn descriptors_beyond_the_end_of_the_iu() {
    malformed(|raw| {
        let mem = raw.mem(0, 4096);
        let cut = |len: usize| mem.bytes()[..len].to_vec();
        let mut cmds: Vec<Cmd> = (0..16).map(|len| read8(Buffer::Odd(1, cut(len)))).collect();
        cmds.push(write8(Buffer::Odd(2, cut(16))));
        cmds.push(write8(Buffer::Odd(3, vec![0; 3])));
        // The IU says how many descriptors follow, and ends before.
        let table = Mem { len: 255 * 16, ..mem };
        let more =
            Cmd { counts: Some((255, 0)), ..write8(Buffer::Indirect(table, 4096, vec![mem])) };
        cmds.push(more);
        cmds
    });
}

#[test]
fn the_largest_counts_in_the_smallest_iu() {
    malformed(|raw| {
        let mut cmd = read8(Buffer::Odd(2, raw.mem(0, 4096).bytes().to_vec()));
        cmd.out = Buffer::Odd(2, Vec::new());
        cmd.counts = Some((255, 255));
        vec![cmd]
    });
}

#[test]
fn an_additional_cdb_beyond_the_end_of_the_iu() {
    let siege = Siege::new();
    let mut raw = Raw::ready(&siege.target, &[0]);
    let mut iu = Cmd { tag: 77, ..Cmd::new(0, inquiry()) }.bytes();
    iu[31] = 252;
    raw.send_request(&iu);
    let rsp = raw.rsp();
    assert_eq!(rsp.tag, 77);
    rsp.expect_sense(5, 0x0e, 3);
    siege.end();
}

#[test]
fn reserved_formats() {
    malformed(|raw| {
        let bytes = raw.mem(0, 4096).bytes().to_vec();
        let both = |nibble| {
            let odd = Buffer::Odd(nibble, bytes.repeat(4));
            [write8(odd.clone()), read8(odd)]
        };
        (4..16).flat_map(both).collect()
    });
}

#[test]
fn immediate_data_for_a_read() {
    malformed(|_| vec![read8(Buffer::Odd(3, [&512u32.to_be_bytes()[..], &[0; 600]].concat()))]);
}

#[test]
fn immediate_data_that_was_not_negotiated() {
    let siege = Siege::new();
    let mut login = request(1, MultiChannel::Single);
    login.req_flags &= 3;
    login.imm_data_offset = 0;
    let mut raw = Raw::login_with(&siege.target, &login);
    raw.calm(&[0]);
    let imm = Buffer::Immediate(512, vec![0xaa; 512]);
    raw.run(Cmd::writing(0, write10(0, 1), imm)).expect_sense(5, 0x0e, 3);
    raw.expect_served();
    siege.end();
}

#[test]
fn immediate_data_beyond_the_end_of_the_iu() {
    malformed(|_| {
        // 512 bytes are there. The last ones make offset + length overflow 32 bits.
        let lens = [513, 4096, 8277, 1 << 31, u32::MAX - 68, u32::MAX - 67, u32::MAX];
        let imm = |len| Cmd::writing(0, write10(0, 1), Buffer::Immediate(len, vec![0xaa; 512]));
        lens.map(imm).to_vec()
    });
}

#[test]
fn immediate_data_that_overlaps_its_descriptor() {
    malformed(|_| {
        // With 20 more bytes of CDB the descriptor ends at 72, and the data begins at 68.
        let mut cmd = Cmd::writing(0, write10(0, 1), Buffer::Immediate(512, vec![0xaa; 512]));
        cmd.more_cdb = vec![0; 20];
        vec![cmd]
    });
}

#[test]
fn a_table_whose_length_is_no_multiple_of_16() {
    malformed(|raw| {
        let mem = raw.mem(0, 4096);
        let table = |len| Buffer::Indirect(raw.mem(1 << 20, len), 4096, vec![mem]);
        [1, 15, 17, 31, 33].map(|len| write8(table(len))).to_vec()
    });
}

#[test]
fn an_empty_table_for_data() {
    malformed(|raw| {
        let empty = |len| Buffer::Indirect(raw.mem(1 << 20, len), 4096, Vec::new());
        vec![write8(empty(0)), read8(empty(0)), write8(empty(8))]
    });
}

#[test]
fn more_descriptors_in_the_iu_than_in_the_table() {
    malformed(|raw| {
        let half = |at| raw.mem(at, 2048);
        let list = vec![half(0), half(2048)];
        vec![write8(Buffer::Indirect(raw.mem(1 << 20, 16), 4096, list))]
    });
}

#[test]
fn a_table_longer_than_any_initiator_has() {
    malformed(|raw| {
        let table = |len| Buffer::Indirect(raw.mem(1 << 20, len), 4096, vec![raw.mem(0, 4096)]);
        vec![write8(table(16 * 2049)), write8(table(!15))]
    });
}

#[test]
fn descriptors_whose_sum_is_not_the_length() {
    malformed(|raw| {
        let sum = |total| {
            let list = vec![raw.mem(0, 2048), raw.mem(2048, 2048)];
            Buffer::Indirect(raw.mem(1 << 20, 32), total, list)
        };
        [0, 1, 4095, 4097, 8192, u32::MAX].map(|total| write8(sum(total))).to_vec()
    });
}

#[test]
fn descriptors_whose_sum_overflows_32_bits() {
    malformed(|raw| {
        // 2 x 2 GiB + 4096 = 4096 modulo 2^32.
        let list = vec![raw.mem(0, 1 << 31), raw.mem(0, 1 << 31), raw.mem(0, 4096)];
        let buffer = Buffer::Indirect(raw.mem(1 << 20, 48), 4096, list);
        vec![write8(buffer.clone()), read8(buffer)]
    });
}

#[test]
fn addresses_that_wrap() {
    malformed(|raw| {
        let at = |va| Mem { va, ..raw.mem(0, 4096) };
        let direct = |va| Buffer::Direct(at(va));
        let listed = |va| Buffer::Indirect(raw.mem(1 << 20, 16), 4096, vec![at(va)]);
        let vas = [u64::MAX, u64::MAX - 4094];
        vas.iter().flat_map(|va| [write8(direct(*va)), read8(listed(*va))]).collect()
    });
}

#[test]
fn a_fetched_table_whose_sum_is_not_the_length() {
    malformed(|raw| {
        // The IU carries no descriptor; the table that is fetched has two, of 6144 bytes.
        let table = [raw.mem(0, 4096).bytes(), raw.mem(4096, 2048).bytes()].concat();
        raw.lent.copy_in(1 << 20, &table);
        let partial = Buffer::Indirect(raw.mem(1 << 20, 32), 4096, Vec::new());
        vec![write8(partial.clone()), read8(partial)]
    });
}

#[test]
fn a_fetched_table_with_an_address_that_wraps() {
    malformed(|raw| {
        raw.lent.copy_in(1 << 20, &Mem { va: u64::MAX - 8, ..raw.mem(0, 4096) }.bytes());
        vec![write8(Buffer::Indirect(raw.mem(1 << 20, 16), 4096, Vec::new()))]
    });
}
