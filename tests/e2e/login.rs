//! Logins that are refused, each with the reason of reference 1.5, and rules about who may log in.

use usurp_srp::PortId;
use usurp_srp::initiator::{Format, MultiChannel, login_req};
use usurp_srp::wire::login_req::Repr;

use crate::support::bystander::{Bystander, Siege};
use crate::support::perf::{perf, perf_ok};
use crate::support::process;
use crate::support::raw::{Raw, reject_reason, request};
use crate::support::site::{Random, Setup, Site, noise};
use crate::support::target::Target;

/// Unable to establish the channel, no reason given.
const UNSPECIFIED: u32 = 0x0001_0000;
/// Requested IU length too large.
const IU_TOO_LONG: u32 = 0x0001_0002;
/// Unable to associate the channel with the nexus.
const NO_NEXUS: u32 = 0x0001_0003;
/// Unsupported data-buffer descriptor format.
const BAD_FORMAT: u32 = 0x0001_0004;
/// Channel limit reached for this initiator.
const CHANNEL_LIMIT: u32 = 0x0001_0006;

/// The reason that a login gets which is right but for one change.
fn reason(siege: &Siege, change: impl FnOnce(&mut Repr)) -> u32 {
    let mut login = request(1, MultiChannel::Single);
    change(&mut login);
    reject_reason(&siege.target, &login_req(Format::IbCm64, &login))
}

#[test]
fn an_unknown_target_port_is_no_nexus() {
    let siege = Siege::new();
    let wrong = |siege: &Siege, id| reason(siege, |login| login.t_port_id = id);
    assert_eq!(wrong(&siege, PortId::from_halves(1, 2)), NO_NEXUS);
    let (ext, guid) = (crate::support::ID_EXT, crate::support::IOC_GUID);
    assert_eq!(wrong(&siege, PortId::from_halves(ext, guid + 1)), NO_NEXUS);
    assert_eq!(wrong(&siege, PortId::from_halves(ext + 1, guid)), NO_NEXUS);
    siege.end();
}

#[test]
fn an_iu_longer_than_the_target_takes_is_too_long() {
    let siege = Siege::new();
    for len in [8277, 1 << 20, u32::MAX] {
        assert_eq!(reason(&siege, |login| login.req_it_iu_len = len), IU_TOO_LONG);
    }
    siege.end();
}

#[test]
fn an_iu_shorter_than_any_command_is_refused() {
    let siege = Siege::new();
    for len in [0, 1, 63] {
        assert_eq!(reason(&siege, |login| login.req_it_iu_len = len), UNSPECIFIED);
    }
    siege.end();
}

#[test]
fn unsupported_formats_are_refused() {
    let siege = Siege::new();
    for format in [1, 8, 0x8006, 0xffff] {
        assert_eq!(reason(&siege, |login| login.req_buf_fmt = format), BAD_FORMAT);
    }
    siege.end();
}

#[test]
fn reserved_multi_channel_actions_are_refused() {
    let siege = Siege::new();
    for action in [2, 3] {
        assert_eq!(reason(&siege, |login| login.req_flags |= action), UNSPECIFIED);
    }
    siege.end();
}

#[test]
fn another_opcode_is_refused() {
    let siege = Siege::new();
    for opcode in [1, 2, 0x80, 0xc0, 0xff] {
        let mut bytes = login_req(Format::IbCm64, &request(1, MultiChannel::Single)).to_vec();
        bytes[0] = opcode;
        assert_eq!(reject_reason(&siege.target, &bytes), UNSPECIFIED);
    }
    siege.end();
}

#[test]
fn short_requests_are_refused_with_a_reason() {
    let siege = Siege::new();
    let whole = login_req(Format::IbCm64, &request(1, MultiChannel::Single)).to_vec();
    for len in [0, 1, 16, 55, 63] {
        assert_eq!(reject_reason(&siege.target, &whole[..len]), UNSPECIFIED, "{len} bytes");
    }
    siege.end();
}

#[test]
fn random_requests_are_refused_with_a_reason() {
    let siege = Siege::new();
    let mut random = Random(77);
    for _ in 0..200 {
        let bytes = noise(random.below(93) as usize, random.next());
        let reason = reject_reason(&siege.target, &bytes);
        assert!((UNSPECIFIED..=CHANNEL_LIMIT).contains(&reason), "{reason:#x}");
    }
    siege.end();
}

#[test]
fn a_login_answers_what_was_asked() {
    let siege = Siege::new();
    let raw = Raw::login(&siege.target);
    let rsp = &raw.login_rsp;
    assert_eq!((rsp.len(), rsp[0]), (52, 0xc0));
    let u32_at = |at: usize| u32::from_be_bytes(rsp[at..at + 4].try_into().expect("4 bytes"));
    assert_eq!((u32_at(4), u32_at(16), u32_at(20)), (128, 8276, 512));
    assert_eq!((rsp[24], rsp[25]), (0, 6), "direct and indirect descriptors");
    assert_eq!(rsp[26], 0x80, "immediate data, no other channels");
    assert!(rsp[1..4].iter().chain(&rsp[27..]).all(|b| *b == 0), "reserved bytes: {rsp:02x?}");
    siege.end();
}

#[test]
fn immediate_data_that_cannot_be_is_declined_not_refused() {
    let siege = Siege::new();
    for offset in [0, 48, 51, 70, 8000, u16::MAX] {
        let mut login = request(1, MultiChannel::Single);
        login.imm_data_offset = offset;
        let raw = Raw::login_with(&siege.target, &login);
        assert_eq!(raw.login_rsp[26] & 0x80, 0, "offset {offset}");
    }
    siege.end();
}

#[test]
fn more_channels_of_one_initiator_than_configured_are_refused() {
    let site = Site::new();
    let mut setup = Setup::ram();
    setup.target = vec!["channels_max: { nexus: 2, all: 16 }".into()];
    let target = Target::start(&site, &setup);
    let mut first = Raw::login_as(&target, 9, MultiChannel::Single);
    let mut second = Raw::login_as(&target, 9, MultiChannel::Multi);
    assert_eq!(second.login_rsp[26] & 3, 2, "the first channel is maintained");
    let third = login_req(Format::IbCm64, &request(9, MultiChannel::Multi));
    assert_eq!(reject_reason(&target, &third), CHANNEL_LIMIT);
    // Another initiator is not concerned, nor are the channels that exist.
    Raw::login_as(&target, 10, MultiChannel::Multi).expect_served();
    first.expect_served();
    second.expect_served();
    target.end_whole();
}

#[test]
fn more_channels_in_all_than_configured_are_refused() {
    let site = Site::new();
    let mut setup = Setup::ram();
    setup.target = vec!["channels_max: { nexus: 3, all: 3 }".into()];
    let target = Target::start(&site, &setup);
    let mut raws: Vec<Raw> = (0..3).map(|_| Raw::login(&target)).collect();
    let fourth = login_req(Format::IbCm64, &request(9, MultiChannel::Single));
    assert_eq!(reject_reason(&target, &fourth), 0x0001_0001);
    raws.iter_mut().for_each(Raw::expect_served);
    target.end_whole();
}

#[test]
fn only_initiators_with_a_rule_get_in() {
    let site = Site::new();
    let mut setup = Setup::ram();
    let port = "0x00000000000000070000000000000008";
    setup.hosts = vec![format!("{{ initiator: \"{port}\", luns: {{ 0: ram0 }} }}")];
    let target = Target::start(&site, &setup);
    let stranger = login_req(Format::IbCm64, &request(8, MultiChannel::Single));
    assert_eq!(reject_reason(&target, &stranger), NO_NEXUS);
    let known = "--initiator-ext 7 --initiator-guid 8 luns";
    assert!(perf_ok(&target, known).contains("16"), "the one with a rule sees its LUN");
    let ended = perf(&target, "--initiator-ext 7 --initiator-guid 9 luns");
    assert_eq!(ended.code, Some(3), "{ended:?}");
    assert!(ended.err.contains("not allowed in"), "{}", ended.err);
    target.end_whole();
}

#[test]
fn each_initiator_sees_the_luns_of_its_most_particular_rule() {
    let site = Site::new();
    let mut setup = Setup::ram();
    setup.hosts = vec![
        "{ initiator: any, luns: { 0: ram0 } }".into(),
        "{ initiator: \"0000:0000:0000:0008\", luns: { 5: ram1 } }".into(),
        "{ initiator: \"0x00000000000000070000000000000008\", luns: { 6: ram0, 7: ram1 } }".into(),
    ];
    let target = Target::start(&site, &setup);
    let luns = |ext: u64, guid: u64| {
        let nexus = usurp_bench::connect::Nexus {
            initiator: PortId::from_halves(ext, guid),
            target: PortId::from_halves(crate::support::ID_EXT, crate::support::IOC_GUID),
        };
        let mut client = crate::support::bystander::client_as(&target.socket, &nexus, 1, 2);
        let luns = client.report_luns().expect("REPORT LUNS is answered");
        client.close();
        luns
    };
    assert_eq!(luns(1, 1), [0]);
    assert_eq!(luns(1, 8), [5]);
    assert_eq!(luns(7, 8), [6, 7]);
    target.end_whole();
}

#[test]
fn a_thousand_logins_and_logouts_leave_nothing_behind() {
    let site = Site::new();
    let target = Target::start(&site, &Setup::ram());
    let bystander = Bystander::start(&target);
    let mut before = (0, 0);
    for round in 0..1000 {
        Raw::login(&target);
        if round == 100 {
            before = (process::rss_kib(&target.child), process::fd_count(&target.child));
        }
    }
    Raw::ready(&target, &[0]).expect_served();
    bystander.end();
    let after = process::rss_kib(&target.child);
    assert!(after <= before.0 + 4096, "KiB resident: {before:?}, then {after}");
    target.end_whole();
}

#[test]
fn a_thousand_refused_logins_leave_nothing_behind() {
    let siege = Siege::new();
    let mut before = 0;
    for round in 0..1000 {
        let mut login = request(round, MultiChannel::Single);
        login.t_port_id = PortId::from_halves(1, round);
        assert_eq!(reject_reason(&siege.target, &login_req(Format::IbCm64, &login)), NO_NEXUS);
        if round == 100 {
            before = process::rss_kib(&siege.target.child);
        }
    }
    let after = process::rss_kib(&siege.target.child);
    assert!(after <= before + 4096, "KiB resident: {before}, then {after}");
    siege.end();
}
