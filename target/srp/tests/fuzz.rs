//! Hostile bytes for both roles: random ones, mutated valid ones, every truncation.
//!
//! Nothing may panic. For SRP_CMD the verdict is compared with a second, naive reading of the same
//! rules (reference 1.6 and table 4.8) that shares no code with the crate.

use proptest::prelude::*;
use usurp_srp::initiator::{self, Event, InBuf, OutBuf, linux_login, login_answer};
use usurp_srp::login::{self, Format, LoginAccepted, MultiChannel, MultiChannelResult, Policy};
use usurp_srp::target::{
    Channel, ChannelConfig, ChannelState, CmdResult, CutReason, DataDesc, Received, RspCode, descs,
};
use usurp_srp::{PortId, wire};

const MAX_DESCS: u32 = 2048;
const CREDITS: u32 = 32;

const READ10: &str = "02000000000100000500010000000000 00000000000100000000000000000000
    28000000100000000800000000000000 00007f12345600000000a1b200001000";
const WRITE10: &str = "02000000002002000500010000000000 00000000000100000000000000000000
    2a000000100000001000000000000000 11223344556600000000beef00000020
    0000200000007f00000010000000a1b2 0000100000007f00000090000000a1b2 00001000";
const IMM: &str = "02000000003000000500010000000000 00000000000100000000000000000000
    2a000000100000000100000000000000 00000200eeeeeeeeeeeeeeeeeeeeeeee eeeeeeee";
const TSK_MGMT: &str = "01000000000000000100008000000000 00000000000100000000000000000100
    05000100000000000000000000000000";
const CRED_RSP: &str = "41000000000000001122334455667788";
const I_LOGOUT: &str = "03000000000000001122334455667788";
const RSP_SENSE: &str = "c1000000000000010500010000000000 00000202000000000000000000000012
    00000000700005000000000a00000000 240000000000";
const RSP_TM: &str = "c1000000000000010100008000000000 00000100000000000000000000000000
    0000000400000000";
const CRED_REQ: &str = "81000000000000021122334455667788";
const AER_REQ: &str = "82010000000000011122334455667788 000000000001000000000000
    00000002000000007006";
const T_LOGOUT: &str = "80010000000000021122334455667788";

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(|b| !b.is_ascii_whitespace()).collect();
    let pair = |p: &[u8]| u8::from_str_radix(std::str::from_utf8(p).unwrap(), 16).unwrap();
    digits.chunks(2).map(pair).collect()
}

fn imm() -> Vec<u8> {
    let mut iu = hex(IMM);
    iu.resize(580, 0xAA);
    iu
}

fn accepted(imm_data: bool) -> LoginAccepted {
    let t_port = PortId::from_halves(1, 2);
    let policy = Policy { credits: CREDITS, imm_data, ..Policy::new(t_port) };
    let req = linux_login(PortId::from_halves(0, 3), t_port, MultiChannel::Single);
    login::check(Format::IbCm64, &initiator::login_req(Format::IbCm64, &req), &policy).unwrap()
}

fn live(login: &LoginAccepted) -> Channel {
    let cfg = ChannelConfig {
        credits: CREDITS,
        ioctxs: CREDITS * 2,
        max_ti_iu_len: 512,
        max_transfer: 1 << 20,
        max_descs: MAX_DESCS,
    };
    let mut ch = Channel::new(login, cfg);
    ch.advance(ChannelState::Live);
    ch
}

/// A naive reading of an SRP_CMD: bytes of (data-out, data-in), or `None` for malformed.
fn naive(iu: &[u8], imm_offset: Option<u128>) -> Option<(u128, u128)> {
    let num = |at: u128, n: u128| -> Option<u128> {
        let (at, end) = (at as usize, (at + n) as usize);
        (end <= iu.len()).then(|| iu[at..end].iter().fold(0, |v, &b| v << 8 | u128::from(b)))
    };
    let formats = [iu[5] >> 4, iu[5] & 15];
    let mut counts = [u128::from(iu[6]), u128::from(iu[7])];
    if formats[0] == 0 || formats[1] == 0 {
        counts = [counts[0] + counts[1]; 2];
    }
    let mut at = 48 + u128::from(iu[31] / 4) * 4;
    if at > iu.len() as u128 {
        return None;
    }
    let mut lens = [0, 0];
    let mut imm = None;
    for dir in [0, 1] {
        match formats[dir] {
            0 => {}
            1 => {
                let (va, len) = (num(at, 8)?, num(at + 12, 4)?);
                if va + len >= 1 << 64 {
                    return None;
                }
                lens[dir] = len;
                at += 16;
            }
            2 => {
                let (va, table, total) = (num(at, 8)?, num(at + 12, 4)?, num(at + 16, 4)?);
                let mut sum = 0;
                for i in 0..counts[dir] {
                    let (va, len) = (num(at + 20 + 16 * i, 8)?, num(at + 32 + 16 * i, 4)?);
                    sum += len;
                    if va + len >= 1 << 64 {
                        return None;
                    }
                }
                let whole = table == counts[dir] * 16;
                let bad = table % 16 != 0
                    || table / 16 > u128::from(MAX_DESCS)
                    || counts[dir] * 16 > table
                    || (whole && sum != total)
                    || (!whole && (sum > total || va + table >= 1 << 64));
                if bad {
                    return None;
                }
                lens[dir] = total;
                at += 20 + 16 * counts[dir];
            }
            3 if dir == 0 => {
                imm = Some(num(at, 4)?);
                at += 4;
            }
            _ => return None,
        }
    }
    if let Some(len) = imm {
        let from = imm_offset?;
        if at > from || from + len > iu.len() as u128 {
            return None;
        }
        lens[0] = len;
    }
    Some((lens[0], lens[1]))
}

/// Offers an IU to a live channel, compares with the naive reading and ends what it started.
fn offer(ch: &mut Channel, iu: &[u8], imm_offset: Option<u128>) -> Received {
    let got = ch.on_iu(iu);
    let mut buf = [0xA5; 512];
    match got {
        Received::Command(cmd) => {
            let want = naive(iu, imm_offset).expect("the naive reading says malformed");
            let lens = (u128::from(cmd.data_out.len()), u128::from(cmd.data_in.len()));
            assert_eq!(lens, want);
            check_descs(&cmd.data_out, iu);
            check_descs(&cmd.data_in, iu);
            assert_eq!(cmd.too_long, cmd.data_out.len().max(cmd.data_in.len()) > 1 << 20);
            assert!((16..=32).contains(&cmd.cdb().len()));
            ch.rsp(cmd.ioctx, &CmdResult::default(), &mut buf);
            ch.on_sent(cmd.ioctx);
        }
        Received::Malformed { ioctx } => {
            assert_eq!(naive(iu, imm_offset), None);
            ch.rsp(ioctx, &CmdResult { status: 2, ..CmdResult::default() }, &mut buf);
            ch.on_sent(ioctx);
        }
        Received::TaskMgmt { ioctx, .. } => {
            ch.tsk_rsp(ioctx, RspCode::COMPLETE, &mut buf);
            ch.on_sent(ioctx);
        }
        Received::Wait => panic!("there are ioctxs"),
        Received::Consumed | Received::Logout | Received::Cut(_) => {}
    }
    if ch.cred_req(&mut buf).is_some() {
        ch.on_cred_req_sent();
        ch.on_iu(&[0x41; 16]);
    }
    assert!(ch.is_whole());
    assert_eq!(ch.credits().held(), CREDITS);
    got
}

/// The descriptors add up and lie inside the IU.
fn check_descs(desc: &DataDesc, iu: &[u8]) {
    let sum: u64 = descs(desc, iu).map(|d| u64::from(d.len)).sum();
    match *desc {
        DataDesc::Immediate { at, len } => {
            assert_eq!(desc.immediate(iu).unwrap().len(), len as usize);
            assert!(usize::from(at) >= 52);
        }
        DataDesc::Indirect { count, all, at, .. } => {
            assert!(u32::from(count) <= all && all <= MAX_DESCS);
            assert!(usize::from(at) + usize::from(count) * 16 <= iu.len());
            assert!(if desc.is_partial() { sum <= 1 << 32 } else { sum == desc.len().into() });
        }
        _ => assert_eq!(sum, u64::from(desc.len())),
    }
    let len = desc.len();
    assert_eq!(desc.is_empty(), len == 0);
}

/// What a live channel must say of the first `n` bytes of a golden IU.
fn verdict(iu: &[u8], whole: usize) -> &'static str {
    match (iu.first(), iu.len()) {
        (None, _) => "cut",
        (Some(0x02 | 0x01), n) if n < 48 => "cut",
        (Some(0x41), n) if n < 16 => "cut",
        (Some(0x02), n) if n < whole => "malformed",
        (Some(0x02), _) => "command",
        (Some(0x01), _) => "task",
        (Some(0x03), _) => "logout",
        _ => "consumed",
    }
}

fn name(r: &Received) -> &'static str {
    match r {
        Received::Command(_) => "command",
        Received::Malformed { .. } => "malformed",
        Received::TaskMgmt { .. } => "task",
        Received::Wait => "wait",
        Received::Consumed => "consumed",
        Received::Logout => "logout",
        Received::Cut(_) => "cut",
    }
}

#[test]
fn every_truncation_of_every_golden_iu_is_received_rightly() {
    let login = accepted(true);
    let texts = [READ10, WRITE10, TSK_MGMT, CRED_RSP, I_LOGOUT, RSP_SENSE, RSP_TM, CRED_REQ];
    for whole in texts.map(hex).into_iter().chain([imm()]) {
        let mut ch = live(&login);
        for n in 0..=whole.len() {
            let iu = &whole[..n];
            let got = offer(&mut ch, iu, Some(68));
            assert_eq!(name(&got), verdict(iu, whole.len()), "{:02x?} {n}", whole.first());
        }
    }
}

#[test]
fn every_single_byte_change_of_a_golden_command_is_judged_as_the_naive_reading_does() {
    for imm_data in [true, false] {
        let login = accepted(imm_data);
        let mut ch = live(&login);
        for whole in [hex(READ10), hex(WRITE10), imm()[..80].to_vec(), imm()] {
            for at in 1..whole.len().min(200) {
                for v in 0..=255 {
                    let mut iu = whole.clone();
                    iu[at] = v;
                    offer(&mut ch, &iu, imm_data.then_some(68));
                }
            }
        }
    }
}

#[test]
fn edges_of_every_length_field_in_pairs() {
    let login = accepted(true);
    let mut ch = live(&login);
    let edges = [0_u32, 1, 8, 15, 16, 31, 32, 33, 48, 512, 513, 4096, 8191, 8192, 8193, 0x8000]
        .into_iter()
        .chain([0x8010, 0x7FFF_FFF0, 0x8000_0000, 0xFFFF_FFBB, 0xFFFF_FFBC, 0xFFFF_FFF0, u32::MAX]);
    let edges: Vec<u32> = edges.collect();
    for whole in [hex(READ10), hex(WRITE10), imm()] {
        for a in [48, 52, 56, 60, 64, 80, 96] {
            for b in [48, 60, 64, 80] {
                for &x in &edges {
                    for &y in &edges {
                        let mut iu = whole.clone();
                        for (at, v) in [(a, x), (b, y)] {
                            if at + 4 <= iu.len() {
                                iu[at..at + 4].copy_from_slice(&v.to_be_bytes());
                            }
                        }
                        offer(&mut ch, &iu, Some(68));
                    }
                }
            }
        }
    }
}

#[test]
fn every_format_and_count_and_cdb_length() {
    let login = accepted(true);
    let mut ch = live(&login);
    for whole in [hex(WRITE10), imm()] {
        for fmt in 0..=255 {
            for counts in [(0, 0), (1, 0), (0, 1), (2, 0), (0, 2), (1, 1), (255, 255), (255, 0)] {
                for add in [0, 3, 4, 16, 17, 20, 36, 252, 255] {
                    let mut iu = whole.clone();
                    (iu[5], iu[6], iu[7], iu[31]) = (fmt, counts.0, counts.1, add);
                    offer(&mut ch, &iu, Some(68));
                }
            }
        }
    }
}

#[test]
fn an_empty_iu_says_so() {
    let mut ch = live(&accepted(true));
    assert_eq!(offer(&mut ch, &[], None), Received::Cut(CutReason::Empty));
}

/// An initiator with a command and an abort outstanding, tags as in nobody's capture.
fn initiator() -> initiator::Channel {
    let t_port = PortId::from_halves(1, 2);
    let req = linux_login(PortId::from_halves(0, 3), t_port, MultiChannel::Single);
    let rsp = accepted(true).rsp(MultiChannelResult::NoChannels);
    let granted = login_answer(&rsp, &req).unwrap();
    let mut i = initiator::Channel::new(&granted, initiator::Config { slots: 8 });
    let mut iu = [0; 64];
    let (tag, _) = i.start_cmd(&[0; 6], 0, OutBuf::None, InBuf::None, 1, &mut iu).unwrap();
    i.abort_task(tag, 2, &mut iu).unwrap();
    i
}

#[test]
fn every_truncation_of_a_targets_iu_is_bogus_for_the_initiator() {
    for text in [RSP_SENSE, RSP_TM, CRED_REQ, AER_REQ, T_LOGOUT] {
        let whole = hex(text);
        for n in 0..whole.len() {
            let mut i = initiator();
            let before = (i.req_lim(), i.outstanding());
            assert!(matches!(i.on_iu(&whole[..n]), Event::Bogus(_)), "{n}");
            assert_eq!((i.req_lim(), i.outstanding()), before);
        }
        let mut i = initiator();
        assert!(!matches!(i.on_iu(&whole), Event::Bogus(initiator::Bogus::Iu(_))));
    }
}

/// Random edits of a golden IU: bytes changed, then cut or grown.
fn mutated() -> impl Strategy<Value = Vec<u8>> {
    let base = prop_oneof![
        Just(hex(READ10)),
        Just(hex(WRITE10)),
        Just(imm()),
        Just(hex(TSK_MGMT)),
        Just(hex(RSP_SENSE)),
        Just(hex(RSP_TM)),
        Just(hex(AER_REQ)),
    ];
    let interesting =
        prop_oneof![Just(0_u8), Just(1), Just(0x7F), Just(0x80), Just(0xFF), any::<u8>()];
    let edits = prop::collection::vec((0..120_usize, interesting), 0..8);
    (base, edits, prop::option::of(0..700_usize)).prop_map(|(mut iu, edits, len)| {
        for (at, v) in edits {
            if at < iu.len() {
                iu[at] = v;
            }
        }
        if let Some(len) = len {
            iu.resize(len, 0x01);
        }
        iu
    })
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 20_000,
        failure_persistence: None,
        ..Default::default()
    })]

    #[test]
    fn the_target_survives_mutated_ius(iu in mutated(), imm_data: bool) {
        let mut ch = live(&accepted(imm_data));
        offer(&mut ch, &iu, imm_data.then_some(68));
    }

    #[test]
    fn the_target_survives_random_bytes(
        op in 0..5_u8, rest in prop::collection::vec(any::<u8>(), 0..700),
    ) {
        let mut iu = rest;
        if let Some(first) = iu.first_mut() {
            *first = op;
        }
        offer(&mut live(&accepted(true)), &iu, Some(68));
    }

    #[test]
    fn the_initiator_survives_mutated_ius(iu in mutated()) {
        initiator().on_iu(&iu);
    }

    #[test]
    fn logins_survive_random_bytes(data in prop::collection::vec(any::<u8>(), 0..100), cm: bool) {
        let format = if cm { Format::RdmaCm56 } else { Format::IbCm64 };
        let policy = Policy::new(PortId::from_halves(1, 2));
        if let Err(e) = login::check(format, &data, &policy) {
            let rej = wire::login_rej::Repr::parse(&e.emit()).unwrap();
            prop_assert_eq!(rej.reason, e.reason.code());
        }
        let req = linux_login(PortId::default(), PortId::default(), MultiChannel::Single);
        let _ = login_answer(&data, &req);
    }

    #[test]
    fn rare_ius_survive_a_round_trip(data in prop::collection::vec(any::<u8>(), 64)) {
        if let Ok(r) = wire::tsk_mgmt::Repr::parse(&data) {
            let mut b = [0xA5; 48];
            r.emit(&mut b);
            prop_assert_eq!(wire::tsk_mgmt::Repr::parse(&b), Ok(r));
        }
        let mut iu = data;
        iu[0] = 0xC0;
        let r = wire::login_rsp::Repr::parse(&iu).unwrap();
        let mut b = [0xA5; 52];
        r.emit(&mut b);
        prop_assert_eq!(wire::login_rsp::Repr::parse(&b), Ok(r));
    }
}
