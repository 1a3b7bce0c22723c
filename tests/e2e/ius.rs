//! The other rows of reference table 4.8: IUs that cut their channel off, that are ignored, or that
//! look odd and are right. In each case the target lives and a bystander notices nothing.

use crate::support::bystander::Siege;
use crate::support::iu::{Buffer, Cmd, TUR, inquiry, plain, read10, tsk_mgmt, write10};
use crate::support::raw::{Got, Raw};
use crate::support::site::{Random, Setup, noise};

/// Flag DOUNDER of SRP_RSP.
const DOUNDER: u8 = 0x08;
/// Flag DIUNDER.
const DIUNDER: u8 = 0x20;

/// Each of these IUs cuts its channel off, without an answer.
fn cuts(ius: &[Vec<u8>]) {
    let siege = Siege::new();
    for iu in ius {
        let mut raw = Raw::ready(&siege.target, &[0]);
        raw.send(iu);
        raw.expect_cut();
    }
    Raw::ready(&siege.target, &[0]).expect_served();
    siege.end();
}

/// Each of these IUs is ignored; requests among them get their credit back.
fn ignored(ius: &[Vec<u8>]) {
    let siege = Siege::new();
    let mut raw = Raw::ready(&siege.target, &[0]);
    let all = raw.req_lim;
    for iu in ius {
        let is_response = iu[0] & 0x40 != 0;
        if is_response {
            raw.send(iu)
        } else {
            raw.send_request(iu)
        }
        raw.expect_credit(all);
    }
    raw.expect_served();
    raw.expect_credit(all);
    siege.end();
}

#[test]
fn an_iu_without_a_byte_cuts_off() {
    cuts(&[Vec::new()]);
}

#[test]
fn a_command_shorter_than_48_bytes_cuts_off() {
    let whole = Cmd::new(0, TUR).bytes();
    cuts(&[1, 16, 31, 47].map(|len| whole[..len].to_vec()));
}

#[test]
fn a_task_management_request_shorter_than_48_bytes_cuts_off() {
    let whole = tsk_mgmt(5, 0, 8, 0);
    cuts(&[1, 30, 47].map(|len| whole[..len].to_vec()));
}

#[test]
fn answers_shorter_than_16_bytes_cut_off() {
    cuts(&[plain(0x41, 0, 15), plain(0x42, 0, 15)]);
}

#[test]
fn an_iu_longer_than_was_agreed_cuts_off() {
    cuts(&[Cmd { tag: 9, ..Cmd::new(0, TUR) }.bytes(), Vec::new()].map(|mut iu| {
        iu.resize(8277, 0);
        iu
    }));
}

#[test]
fn a_logout_disconnects() {
    cuts(&[plain(0x03, 1, 16)]);
}

#[test]
fn more_requests_than_credit_cut_off() {
    let siege = Siege::with(&Setup::slow(3000));
    let mut raw = Raw::ready(&siege.target, &[0, 2]);
    // A few too many may be a race of a sloppy initiator; these are not.
    for _ in 0..200 {
        raw.start(raw.reading(2, 0, 8));
    }
    raw.expect_cut();
    siege.end();
}

#[test]
fn a_flood_of_requests_hurts_nobody_else() {
    let siege = Siege::new();
    let mut raw = Raw::ready(&siege.target, &[0]);
    // Far more than the credit, but never more than the send queue takes; answers are not read.
    for tag in 0..1500 {
        raw.send_unread(&Cmd { tag, ..Cmd::new(0, TUR) }.bytes());
    }
    siege.more_rounds(3);
    raw.expect_served_or_cut();
    siege.end();
}

#[test]
fn unknown_opcodes_are_ignored_and_their_credit_comes_back() {
    let opcodes = [0x04, 0x0f, 0x30, 0x80, 0x81, 0x82, 0xbf, 0x43, 0x7f, 0xc3, 0xff];
    ignored(&opcodes.map(|opcode| plain(opcode, 3, 64)));
}

#[test]
fn an_unknown_opcode_of_one_byte_is_ignored() {
    ignored(&[vec![0x0f], vec![0xff]]);
}

#[test]
fn responses_and_logins_as_sends_are_ignored() {
    ignored(&[plain(0xc1, 3, 36), plain(0xc0, 3, 52), plain(0xc2, 3, 32), plain(0x00, 3, 64)]);
}

#[test]
fn answers_to_nothing_are_ignored() {
    ignored(&[plain(0x41, 3, 16), plain(0x42, 3, 16), plain(0x41, u64::MAX, 300)]);
}

#[test]
fn a_transfer_longer_than_the_limit_is_an_invalid_cdb() {
    let siege = Siege::new();
    let mut raw = Raw::ready(&siege.target, &[0]);
    // max_transfer is 1 MiB: 2048 blocks.
    raw.run(raw.reading(0, 0, 2049)).expect_sense(5, 0x24, 0);
    raw.run(raw.writing(0, 0, 4096)).expect_sense(5, 0x24, 0);
    raw.run(raw.reading(0, 0, 2048)).expect_good();
    siege.end();
}

#[test]
fn a_buffer_longer_than_the_limit_gets_what_the_cdb_asks_for() {
    let siege = Siege::new();
    let mut raw = Raw::ready(&siege.target, &[0]);
    let buffer = Buffer::Direct(raw.mem(0, 2 << 20));
    let rsp = raw.run(Cmd::reading(0, read10(0, 8), buffer));
    assert_eq!((rsp.status, rsp.flags, rsp.residuals), (0, DIUNDER, (0, (2 << 20) - 4096)));
    siege.end();
}

#[test]
fn a_write_with_less_data_than_its_cdb_says_touches_nothing() {
    let siege = Siege::new();
    let mut raw = Raw::ready(&siege.target, &[0]);
    raw.lent.fill(0, 8192, 0xee);
    let short = Cmd::writing(0, write10(0, 8), Buffer::Direct(raw.mem(0, 4095)));
    raw.run(short).expect_sense(5, 0x0e, 3);
    raw.run(raw.reading(0, 0, 8)).expect_good();
    assert_eq!(raw.lent.equals(0, &[0; 4096]), None, "the medium was never written");
    siege.end();
}

#[test]
fn a_read_with_a_longer_buffer_reports_what_is_missing() {
    let siege = Siege::new();
    let mut raw = Raw::ready(&siege.target, &[0]);
    raw.lent.fill(0, 8192, 0xee);
    let rsp = raw.run(Cmd::reading(0, read10(0, 8), Buffer::Direct(raw.mem(0, 5000))));
    assert_eq!((rsp.status, rsp.flags, rsp.residuals), (0, DIUNDER, (0, 904)));
    assert_eq!(raw.lent.equals(4096, &[0xee; 904]), None, "bytes beyond the data were written");
    siege.end();
}

#[test]
fn an_inquiry_with_a_longer_buffer_reports_what_is_missing() {
    let siege = Siege::new();
    let mut raw = Raw::ready(&siege.target, &[0]);
    let rsp = raw.run(Cmd::reading(0, inquiry(), Buffer::Direct(raw.mem(0, 1024))));
    assert_eq!((rsp.status, rsp.flags), (0, DIUNDER));
    assert!((1024 - 96..=1024 - 36).contains(&rsp.residuals.1), "{rsp:?}");
    siege.end();
}

#[test]
fn a_command_with_both_buffers_uses_the_one_of_its_direction() {
    let siege = Siege::new();
    let mut raw = Raw::ready(&siege.target, &[0]);
    let data = noise(4096, 21);
    raw.lent.copy_in(0, &data);
    raw.lent.fill(8192, 4096, 0xee);
    let both = |raw: &Raw, cdb| Cmd {
        out: Buffer::Direct(raw.mem(0, 4096)),
        inn: Buffer::Direct(raw.mem(8192, 4096)),
        ..Cmd::new(0, cdb)
    };
    let rsp = raw.run(both(&raw, write10(0, 8)));
    assert_eq!((rsp.status, rsp.flags, rsp.residuals), (0, DIUNDER, (0, 4096)));
    assert_eq!(raw.lent.equals(8192, &[0xee; 4096]), None, "a write touches no data-in buffer");
    let rsp = raw.run(both(&raw, read10(0, 8)));
    assert_eq!((rsp.status, rsp.flags, rsp.residuals), (0, DOUNDER, (4096, 0)));
    assert_eq!(raw.lent.equals(8192, &data), None, "the data comes into the data-in buffer");
    siege.end();
}

#[test]
fn additional_bytes_of_a_short_cdb_are_ignored() {
    let siege = Siege::new();
    let mut raw = Raw::ready(&siege.target, &[0]);
    for len in [4, 16, 252] {
        let cmd = Cmd { more_cdb: vec![0xee; len], ..raw.reading(0, 0, 8) };
        raw.run(cmd).expect_good();
    }
    siege.end();
}

#[test]
fn reserved_bits_are_ignored() {
    let siege = Siege::new();
    let mut raw = Raw::ready(&siege.target, &[0]);
    let mut iu = Cmd { tag: 88, ..raw.reading(0, 0, 8) }.bytes();
    for at in [2, 3, 4, 16, 17, 18, 19, 28, 30] {
        iu[at] = 0xff;
    }
    iu[29] = 0xf8;
    iu[31] = 0x03;
    raw.send_request(&iu);
    raw.rsp().expect_good();
    siege.end();
}

#[test]
fn unsupported_lun_addressing_is_no_logical_unit() {
    let siege = Siege::new();
    let mut raw = Raw::ready(&siege.target, &[0]);
    let luns = [
        [0x80, 0, 0, 0, 0, 0, 0, 0],
        [0xd2, 0, 0, 0, 0, 0, 0, 0],
        [0xff; 8],
        [0, 0, 0, 1, 0, 0, 0, 0],
        [0, 9, 0, 0, 0, 0, 0, 0],
    ];
    for lun in luns {
        raw.run(Cmd { lun, ..Cmd::new(0, TUR) }).expect_sense(5, 0x25, 0);
    }
    siege.end();
}

#[test]
fn flat_lun_addressing_reaches_the_same_lun() {
    let siege = Siege::new();
    let mut raw = Raw::ready(&siege.target, &[0]);
    raw.run(Cmd { lun: [0x40, 0, 0, 0, 0, 0, 0, 0], ..Cmd::new(0, TUR) }).expect_good();
    siege.end();
}

#[test]
fn buffers_without_a_byte_are_no_data() {
    let siege = Siege::new();
    let mut raw = Raw::ready(&siege.target, &[0]);
    let nothing = raw.mem(0, 0);
    let outs = [
        Buffer::Direct(nothing),
        Buffer::Indirect(nothing, 0, Vec::new()),
        Buffer::Indirect(raw.mem(0, 16), 0, vec![nothing]),
        Buffer::Immediate(0, Vec::new()),
    ];
    for out in outs {
        raw.run(Cmd::writing(0, write10(0, 0), out.clone())).expect_good();
        raw.run(Cmd::writing(0, TUR, out)).expect_good();
    }
    for inn in [Buffer::Direct(nothing), Buffer::Indirect(nothing, 0, Vec::new())] {
        raw.run(Cmd::reading(0, read10(0, 0), inn.clone())).expect_good();
        let rsp = raw.run(Cmd::reading(0, read10(0, 8), inn));
        assert!(rsp.status == 0 || rsp.sense.is_some(), "{rsp:?}");
    }
    raw.expect_served();
    siege.end();
}

#[test]
fn empty_descriptors_between_others_are_skipped() {
    let siege = Siege::new();
    let mut raw = Raw::ready(&siege.target, &[0]);
    let list =
        vec![raw.mem(0, 0), raw.mem(0, 2048), raw.mem(0, 0), raw.mem(4096, 2048), raw.mem(0, 0)];
    let table = raw.mem(1 << 20, 80);
    let data = noise(4096, 22);
    raw.lent.copy_in(0, &data[..2048]);
    raw.lent.copy_in(4096, &data[2048..]);
    raw.run(Cmd::writing(0, write10(0, 8), Buffer::Indirect(table, 4096, list))).expect_good();
    raw.lent.fill(0, 8192, 0);
    raw.run(raw.reading(0, 0, 8)).expect_good();
    assert_eq!(raw.lent.equals(0, &data), None);
    siege.end();
}

#[test]
fn the_same_tag_twice_is_answered_twice_or_refused() {
    let siege = Siege::new();
    let mut raw = Raw::ready(&siege.target, &[0]);
    let all = raw.req_lim;
    let iu = Cmd { tag: 5, ..raw.reading(0, 0, 8) }.bytes();
    for _ in 0..2 {
        raw.send_request(&iu);
    }
    for _ in 0..2 {
        assert_eq!(raw.rsp().tag, 5);
    }
    raw.expect_credit(all);
    siege.end();
}

#[test]
fn random_bytes_are_answered_ignored_or_cut_off() {
    let siege = Siege::new();
    let mut random = Random(0x5eed);
    for _ in 0..200 {
        let mut raw = Raw::ready(&siege.target, &[0]);
        for _ in 0..1 + random.below(20) {
            let mut iu = noise(random.below(300) as usize, random.next());
            // Most start like a request, or nothing deep is reached.
            if let Some(first) = iu.first_mut().filter(|_| random.below(4) > 0) {
                *first = random.below(4) as u8;
            }
            raw.send(&iu);
        }
        raw.expect_served_or_cut();
    }
    siege.end();
}

#[test]
fn commands_with_one_random_byte_are_answered_ignored_or_cut_off() {
    let siege = Siege::new();
    let mut random = Random(0x0dd);
    let mut raw = Raw::ready(&siege.target, &[0]);
    for _ in 0..3000 {
        let mut iu = Cmd { tag: random.next(), ..raw.reading(0, 0, 8) }.bytes();
        let at = random.below(iu.len() as u64) as usize;
        iu[at] = random.next() as u8;
        raw.send(&iu);
        // What it is worth is said by the next command's answer, or by the end of the channel.
        if !raw.expect_served_or_cut() {
            raw = Raw::ready(&siege.target, &[0]);
        }
    }
    siege.end();
}

#[test]
fn an_initiator_that_never_reads_hurts_only_itself() {
    let siege = Siege::new();
    let mut raw = Raw::ready(&siege.target, &[0]);
    // Commands up to the credit, whose answers stay in the ring.
    for tag in 0..100u64 {
        raw.send_unread(&Cmd { tag, ..raw.reading(0, 0, 256) }.bytes());
    }
    siege.more_rounds(3);
    drop(raw);
    siege.end();
}

#[test]
fn nothing_is_sent_before_the_first_iu() {
    let siege = Siege::new();
    let mut raw = Raw::login(&siege.target);
    siege.more_rounds(3);
    assert_eq!(raw.peek(), None, "the target spoke first");
    assert!(matches!(
        {
            raw.start(Cmd::new(0, TUR));
            raw.next()
        },
        Got::Iu(_)
    ));
    siege.end();
}
