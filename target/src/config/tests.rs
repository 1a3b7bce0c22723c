//! Whole files: what is refused and in which words, what is accepted and as what.

use std::path::{Path, PathBuf};

use super::check::{Machine, check};
use super::*;

/// A file with nothing wrong; tests change one piece of it.
const GOOD: &str = r#"reactors: { cores: auto, idle: adaptive }
memory: { hugepages: never, data: 8MiB, max_transfer: 1MiB }
bdevs:
  - { name: ram0, malloc: { size: 1MiB, block_size: 512 } }
  - { name: ram1, malloc: { size: 2MiB, block_size: 4096 } }
target:
  id_ext: "0x0002c903000e8acd"
  ioc_guid: "0002:c903:000e:8acc"
  credits: 64
  immediate_data: false
  channels_max: { nexus: 4, all: 16 }
  listen:
    - { shm: /run/usurp/srp.sock }
  hosts:
    - { initiator: "0x00000000000000010002c903000e8acd", luns: { 1: ram1, 0: ram0 } }
    - { initiator: "0002:c903:000e:8acd", luns: { 0: { bdev: ram1, read_only: true } } }
    - { initiator: any, luns: { 16383: ram1 } }
"#;

fn errors_of(text: &str) -> String {
    Config::parse("t.yaml", text).expect_err("is refused").to_string()
}

/// Replaces `from` in the good file and returns the one report that this must give.
fn one_error(from: &str, to: &str) -> String {
    assert!(GOOD.contains(from), "{from:?} is not in the good file");
    let text = errors_of(&GOOD.replacen(from, to, 1));
    let end = "\n\n1 error; nothing was started";
    text.strip_suffix(end).unwrap_or_else(|| panic!("not one error:\n{text}")).to_owned()
}

#[test]
fn a_good_file_becomes_types() {
    let config = Config::parse("t.yaml", GOOD).unwrap();
    assert!(matches!(config.reactors.cores, CoreSpec::Auto));
    assert_eq!(config.reactors.idle, Idle::Adaptive);
    assert!(matches!(config.memory.hugepages, HugePolicy::Never));
    assert_eq!((config.memory.data_bytes, config.memory.transfer_bytes_max), (8 << 20, 1 << 20));
    let names: Vec<_> = config.bdevs.iter().map(|b| (&b.name[..], &b.module[..])).collect();
    assert_eq!(names, [("ram0", "malloc"), ("ram1", "malloc")]);
    assert_eq!(config.bdevs[1].options["block_size"], serde_yaml::Value::from(4096));
    let target = &config.target;
    let port = *b"\x00\x02\xc9\x03\x00\x0e\x8a\xcd\x00\x02\xc9\x03\x00\x0e\x8a\xcc";
    assert_eq!(target.port_id(), port);
    assert_eq!((target.credits, target.immediate_data), (64, false));
    assert_eq!((target.nexus_channels_max, target.channels_max), (Some(4), Some(16)));
    assert_eq!(target.listen, [Listen::Shm(PathBuf::from("/run/usurp/srp.sock"))]);
    let lun = |lun, bdev, read_only| Lun { lun, bdev, read_only };
    assert_eq!(target.hosts[0].luns, [lun(0, 0, false), lun(1, 1, false)]);
    assert_eq!(target.hosts[1].luns, [lun(0, 1, true)]);
    assert_eq!(target.hosts[2].luns, [lun(16383, 1, false)]);
}

#[test]
fn what_is_left_out_has_a_default() {
    let text = "bdevs: [{ name: a, malloc: { size: 1MiB } }]\n\
        target: { id_ext: \"0000000000000000\", ioc_guid: \"0000000000000001\",\n\
        listen: [{ shm: a.sock }], hosts: [{ initiator: any, luns: { 0: a } }] }\n";
    let config = Config::parse("t.yaml", text).unwrap();
    assert!(matches!(config.reactors.cores, CoreSpec::Auto));
    assert_eq!(config.reactors.idle, Idle::Spin);
    assert!(matches!(config.memory.hugepages, HugePolicy::Prefer));
    assert_eq!((config.memory.data_bytes, config.memory.transfer_bytes_max), (64 << 20, 4 << 20));
    assert_eq!((config.target.credits, config.target.immediate_data), (128, true));
    assert_eq!((config.target.nexus_channels_max, config.target.channels_max), (None, None));
    assert!(config.warnings.is_empty(), "{:?}", config.warnings);
}

#[test]
fn a_port_identifier_comes_before_a_guid_and_that_before_any() {
    let target = Config::parse("t.yaml", GOOD).unwrap().target;
    let mut port = *b"\x00\x00\x00\x00\x00\x00\x00\x01\x00\x02\xc9\x03\x00\x0e\x8a\xcd";
    assert_eq!(target.host_for(&port), Some(0));
    port[0] = 1;
    assert_eq!(target.host_for(&port), Some(1));
    port[15] = 1;
    assert_eq!(target.host_for(&port), Some(2));
}

#[test]
fn an_unknown_initiator_gets_nothing_unless_any_is_listed() {
    let text = GOOD.replace("    - { initiator: any, luns: { 16383: ram1 } }\n", "");
    let target = Config::parse("t.yaml", &text).unwrap().target;
    assert_eq!(target.host_for(&[7; 16]), None);
}

/// Each row: a piece of the good file, what stands there instead, and the whole report.
const REFUSALS: &[(&str, &str, &str)] = &[
    (
        "memory: {",
        "memory: { hugepage: 1,",
        "t.yaml:2:11: `hugepage` is not a key of memory\n\
         \x20 |\n\
         2 | memory: { hugepage: 1, hugepages: never, data: 8MiB, max_transfer: 1MiB }\n\
         \x20 |           ^^^^^^^^\n\
         \x20 = did you mean `hugepages`? the keys here are: hugepages, data, max_transfer",
    ),
    (
        "16383: ram1",
        "16384: ram1",
        "t.yaml:17:33: `16384` is not a LUN\n\
         \x20  |\n\
         17 |     - { initiator: any, luns: { 16384: ram1 } }\n\
         \x20  |                                 ^^^^^\n\
         \x20  = a LUN is a whole number from 0 to 16383",
    ),
];

#[test]
fn a_report_has_place_line_caret_and_remedy() {
    for (from, to, wanted) in REFUSALS {
        assert_eq!(one_error(from, to), *wanted);
    }
}

/// Each row: a piece of the good file, what stands there instead, the report's first line and its
/// last, and what the carets underline.
const SHORT: &[(&str, &str, &str, &str, &str)] = &[
    // Wrong types and values.
    (
        "cores: auto",
        "cores: 3-x",
        "1:20: `cores` cannot be `3-x`",
        "write auto, a list such as 0-3,8 or [0, 1], or numa:0",
        "3-x",
    ),
    ("adaptive", "slow", "1:32: `idle` cannot be `slow`", "write `spin` or `adaptive`", "slow"),
    (
        "hugepages: never",
        "hugepages: no",
        "2:22: `hugepages` cannot be `no`",
        "write `require`, `prefer` or `never`",
        "no",
    ),
    (
        "data: 8MiB",
        "data: 8MB",
        "2:35: `data` cannot be `8MB`",
        "write a size: bytes, or a whole number with KiB, MiB, GiB or TiB",
        "8MB",
    ),
    (
        "data: 8MiB",
        "data: -1",
        "2:35: `data` cannot be `-1`",
        "write a size: bytes, or a whole number with KiB, MiB, GiB or TiB",
        "-1",
    ),
    (
        "max_transfer: 1MiB",
        "max_transfer: 3MiB",
        "2:55: `max_transfer` cannot be `3MiB`",
        "write a power of two from 4KiB to 64MiB: buffers are handed out in halves",
        "3MiB",
    ),
    (
        "data: 8MiB",
        "data: 512KiB",
        "2:35: `data` is 512KiB, which does not fit `max_transfer`, 1MiB",
        "make `data` (bytes of each reactor) a multiple of `max_transfer`, up to 1TiB",
        "512KiB",
    ),
    (
        "reactors: { cores: auto, idle: adaptive }",
        "reactors: 3",
        "1:11: reactors must be a mapping, not a number",
        "write `key: value` pairs: cores, idle",
        "3",
    ),
    // Bdevs.
    (
        "  - { name: ram1",
        "  - { name: ram0, malloc: { size: 1MiB } }\n  - { name: ram1",
        "5:13: the name `ram0` is taken",
        "by the bdev on line 4; choose another",
        "ram0",
    ),
    (
        "  - { name: ram1",
        "  - { name: \"ram 0\", malloc: { size: 1MiB } }\n  - { name: ram1",
        "5:13: `name` cannot be `ram 0`",
        "write 1 to 64 characters of A-Z a-z 0-9 . _ -",
        "\"ram 0\"",
    ),
    (
        "{ name: ram1, malloc: { size: 2MiB, block_size: 4096 } }",
        "{ name: ram1 }",
        "5:5: a bdev lacks its module",
        "",
        "{",
    ),
    (
        "{ name: ram1, malloc: { size: 2MiB, block_size: 4096 } }",
        "{ name: ram1, malloc: { size: 2MiB }, \"null\": { size: 2MiB } }",
        "5:43: a bdev has two modules",
        "write one entry of `bdevs` for each",
        "\"null\"",
    ),
    // Identifiers.
    (
        "\"0x0002c903000e8acd\"\n",
        "\"0x0002c903000e8acg\"\n",
        "7:11: `id_ext` cannot be `0x0002c903000e8acg`",
        "write 16 hex digits in quotes, such as \"0x0002c903000e8acd\"",
        "\"0x0002c903000e8acg\"",
    ),
    (
        "\"0x0002c903000e8acd\"\n",
        "0x0002c903000e8acd\n",
        "7:11: `id_ext` cannot be a number without quotes",
        "write 16 hex digits in quotes, such as \"0x0002c903000e8acd\"",
        "0x0002c903000e8acd",
    ),
    (
        "\"0002:c903:000e:8acc\"",
        "\"0000:0000:0000:0000\"",
        "8:13: `ioc_guid` cannot be `0000:0000:0000:0000`",
        "write a GUID other than zero",
        "\"0000:0000:0000:0000\"",
    ),
    (
        "  ioc_guid: \"0002:c903:000e:8acc\"\n",
        "",
        "7:3: target lacks `ioc_guid`",
        "add `ioc_guid:` with 16 hex digits in quotes, such as \"0x0002c903000e8acd\"",
        "id_ext",
    ),
    // Numbers.
    (
        "credits: 64",
        "credits: 2",
        "9:12: `credits` cannot be `2`",
        "write a whole number from 4 to 1024",
        "2",
    ),
    (
        "nexus: 4",
        "nexus: 17",
        "11:26: `nexus` cannot be `17`",
        "write at most `all`, which is 16",
        "17",
    ),
    // Listeners.
    (
        "    - { shm: /run/usurp/srp.sock }\n",
        "    - { shm: a.sock }\n    - { shm: ./a.sock }\n",
        "14:14: this listener is given twice",
        "the first is on line 13; keep one",
        "./a.sock",
    ),
    (
        "{ shm: /run/usurp/srp.sock }",
        "{ rdma_cm: \"[::]:99999\" }",
        "13:18: `rdma_cm` cannot be `[::]:99999`",
        "write an address and port in quotes, such as \"[::]:5555\"",
        "\"[::]:99999\"",
    ),
    (
        "{ shm: /run/usurp/srp.sock }",
        "{ shm: a, rdma_cm: \"[::]:5555\" }",
        "13:26: a listener has two addresses",
        "write one entry for each",
        "\"[::]:5555\"",
    ),
    (
        "{ shm: /run/usurp/srp.sock }",
        "{}",
        "13:7: a listener lacks its address",
        "write `{ shm: PATH }` or `{ rdma_cm: \"ADDRESS:PORT\" }`",
        "{",
    ),
    (
        "\n    - { shm: /run/usurp/srp.sock }",
        " []",
        "12:11: `listen` is empty",
        "write a list such as `- { shm: /run/usurp/srp.sock }`",
        "[",
    ),
    // Hosts and LUNs.
    (
        "initiator: any",
        "initiator: 10.0.0.1",
        "17:20: `initiator` cannot be the IP address `10.0.0.1` yet",
        "write any, 32 hex digits in quotes (\"0x...\": identifier extension, then GUID), \
         or a GUID as xxxx:xxxx:xxxx:xxxx",
        "10.0.0.1",
    ),
    (
        "initiator: any",
        "initiator: \"0x0002C903000E8ACD\"",
        "17:20: this initiator is given twice",
        "the first is on line 16; merge the two",
        "\"0x0002C903000E8ACD\"",
    ),
    (
        "0: ram0 }",
        "0: ram }",
        "15:78: there is no bdev named `ram`",
        "did you mean `ram0`? the bdevs here are: ram0, ram1",
        "ram",
    ),
    (
        "1: ram1, 0: ram0",
        "0: ram1, 0: ram0",
        "15:75: `0` is given twice",
        "the first is on line 15; keep one of them",
        "0",
    ),
    (
        "read_only: true",
        "read_only: yes",
        "16:79: `read_only` cannot be `yes`",
        "write true or false",
        "yes",
    ),
    (
        "16383: ram1",
        "3: 4",
        "17:36: a LUN cannot be a number",
        "write a bdev's name, or { bdev: NAME, read_only: true }",
        "4",
    ),
    // The structure of the file.
    (
        "credits: 64",
        "credits: 64\n  credits: 65",
        "10:3: `credits` is given twice",
        "the first is on line 9; keep one of them",
        "credits",
    ),
    (
        "size: 2MiB",
        "size: 2MiB, size: 2MiB",
        "5:41: `size` is given twice",
        "the first is on line 5; keep one of them",
        "size",
    ),
    (
        "luns: { 16383: ram1 }",
        "luns: { <<: ram1, 0: ram1 }",
        "17:37: `<<` cannot merge a string",
        "write an alias of a mapping, such as *common",
        "ram1",
    ),
];

#[test]
fn each_mistake_is_refused_at_its_place_with_its_remedy() {
    let mut wrong = String::new();
    for (from, to, first, last, underlined) in SHORT {
        let report = one_error(from, to);
        let lines: Vec<&str> = report.lines().collect();
        let caret = lines[3].find('^').expect("a caret");
        let width = lines[3].matches('^').count();
        let remedy = lines[4].trim_start().strip_prefix("= ").expect("a remedy");
        let is_right = lines[0] == format!("t.yaml:{first}")
            && &lines[2][caret..caret + width] == *underlined
            && (last.is_empty() || remedy == *last);
        if !is_right {
            wrong += &format!("{report}\n\n");
        }
    }
    assert!(wrong.is_empty(), "these differ:\n{wrong}");
}

#[test]
fn a_module_s_own_refusals_point_into_its_options() {
    let report = one_error("{ size: 2MiB,", "{ size: 2MiB, sise: 1,");
    let lines: Vec<&str> = report.lines().collect();
    assert_eq!(lines[0], "t.yaml:5:41: `sise` is not an option of malloc");
    assert_eq!(lines[3], "  |                                         ^^^^");
    assert!(lines[4].starts_with("  = did you mean `size`? the options here are: "), "{report}");
    let report = one_error("block_size: 4096", "block_size: 4000");
    assert!(report.starts_with("t.yaml:5:53: "), "{report}");
}

#[test]
fn all_wrong_options_of_a_bdev_are_told_at_once() {
    let text =
        GOOD.replace("{ size: 2MiB, block_size: 4096 }", "{ size: big, block_size: x, y: 1 }");
    let error = Config::parse("t.yaml", &text).unwrap_err();
    let columns: Vec<_> = error.problems().iter().map(|p| p.place.unwrap().column).collect();
    assert_eq!(columns, [35, 52, 55], "{error}");
}

#[test]
fn a_missing_option_is_told_at_the_options() {
    let report = one_error("{ size: 2MiB, block_size: 4096 }", "{ block_size: 4096 }");
    assert!(report.starts_with("t.yaml:5:27: "), "{report}");
    assert!(report.contains("`size`"), "{report}");
}

#[test]
fn a_filter_needs_a_base_that_nobody_else_uses() {
    let with = |base: &str, lun: &str| {
        let filter = format!("  - {{ name: slow, delay: {{ base: {base} }} }}\ntarget:");
        GOOD.replace("target:", &filter).replace("16383: ram1", &format!("16383: {lun}"))
    };
    let error = errors_of(&with("rom", "slow"));
    assert!(error.starts_with("t.yaml:6:34: there is no bdev `rom`\n"), "{error}");
    let error = errors_of(&with("slow", "slow"));
    assert!(error.starts_with("t.yaml:6:34: bdev `slow` stacks on itself\n"), "{error}");
    let error = errors_of(&with("ram0", "slow"));
    let wanted = "`ram0` is the base of `slow`: its data would change under it";
    assert!(error.contains(wanted) && error.contains("\n1 error;"), "{error}");
    let text = with("ram0", "slow").replace(", 0: ram0", "");
    Config::parse("t.yaml", &text).unwrap();
}

#[test]
fn a_bare_null_key_is_the_module_of_that_name() {
    let config = Config::parse("t.yaml", &GOOD.replace("malloc: { size: 2MiB,", "null: {"));
    assert_eq!(config.unwrap().bdevs[1].module, "null");
}

#[test]
fn a_socket_path_is_at_most_107_bytes_long() {
    let path = "x".repeat(107);
    Config::parse("t.yaml", &GOOD.replace("/run/usurp/srp.sock", &path)).unwrap();
    let report = one_error("/run/usurp/srp.sock", &"x".repeat(108));
    assert!(report.ends_with("= write the path of a socket, 1 to 107 bytes long"), "{report}");
}

#[test]
fn everything_wrong_is_told_at_once_in_the_order_of_the_file() {
    let text = "reactors: { core: 1, idle: slow }\nmemory: { data: big }\n\
        bdevs: [{ name: a, mallok: {} }]\ntarget: { hosts: [{ initiator: x, luns: { 0: b } }] }\n";
    let error = Config::parse("t.yaml", text).unwrap_err();
    let places: Vec<_> = error.problems().iter().map(|p| p.place.unwrap().line).collect();
    assert_eq!(places, [1, 1, 2, 3, 4, 4, 4, 4, 4]);
    assert!(error.to_string().ends_with("\n\n9 errors; nothing was started"), "{error}");
}

#[test]
fn what_is_not_yaml_is_refused_where_the_parser_gave_up() {
    let error = errors_of("a: { b: 1\nc: [\n");
    assert_eq!(error.lines().next(), Some("t.yaml:2:2: did not find expected ',' or '}'"));
    let error = errors_of("a: 1\n\tb: 2\n");
    let wanted = "t.yaml:2:1: found a tab character that violates indentation";
    assert_eq!(error.lines().next(), Some(wanted));
    let error = errors_of("a: 1\n---\nb: 2\n");
    assert!(error.starts_with("t.yaml: deserializing from YAML containing more than one document"));
}

#[test]
fn a_mistake_in_what_an_alias_stands_for_is_told_once() {
    let text = GOOD
        .replace("malloc: { size: 1MiB, block_size: 512 }", "malloc: &m { size: 1MiB, sise: 1 }")
        .replace("malloc: { size: 2MiB, block_size: 4096 }", "malloc: *m");
    let error = errors_of(&text);
    assert!(error.ends_with("\n1 error; nothing was started"), "{error}");
}

#[test]
fn no_damage_to_a_file_makes_the_check_panic() {
    for at in 0..GOOD.len() {
        let _ = Config::parse("t.yaml", &GOOD[..at]);
        let mut bytes = GOOD.as_bytes().to_vec();
        for byte in *b"{:*&!\t\n\"-0" {
            bytes[at] = byte;
            let text = String::from_utf8(bytes.clone()).expect("ASCII");
            if let Err(errors) = Config::parse("t.yaml", &text) {
                assert!(!errors.to_string().is_empty());
            }
        }
    }
}

#[test]
fn an_empty_file_is_refused() {
    for text in ["", "# nothing\n", "\u{feff}"] {
        let error = errors_of(text);
        assert!(error.contains("the configuration must be a mapping, not nothing"), "{error}");
    }
}

#[test]
fn a_tag_is_refused() {
    let error = errors_of("bdevs: !secret x\n");
    assert!(error.contains("t.yaml:1:8: the tag `!secret` means nothing here"), "{error}");
}

#[test]
fn windows_line_ends_and_a_byte_order_mark_are_read() {
    let text = format!("\u{feff}{}", GOOD.replace('\n', "\r\n"));
    Config::parse("t.yaml", &text).unwrap();
    let error = errors_of(&text.replace("adaptive", "slow"));
    assert!(error.starts_with("t.yaml:1:32: `idle` cannot be `slow`"), "{error}");
}

#[test]
fn a_file_that_cannot_be_read_is_an_error_too() {
    let error = Config::load(Path::new("/does/not/exist.yaml")).unwrap_err().to_string();
    assert!(error.starts_with("/does/not/exist.yaml: cannot be read: "), "{error}");
}

#[test]
fn anchors_and_merge_keys_are_understood() {
    let text = GOOD
        .replace("malloc: { size: 1MiB, block_size: 512 }", "malloc: &m { size: 1MiB }")
        .replace(
            "malloc: { size: 2MiB, block_size: 4096 }",
            "malloc: { <<: *m, block_size: 4096 }",
        );
    let config = Config::parse("t.yaml", &text).unwrap();
    assert_eq!(config.bdevs[1].options["size"], serde_yaml::Value::from("1MiB"));
    assert_eq!(config.bdevs[1].options["block_size"], serde_yaml::Value::from(4096));
}

#[test]
fn malloc_bdevs_that_exceed_the_memory_together_are_refused() {
    let machine = Machine { memory_bytes: Some(2 << 20), cores: false };
    let error = check("t.yaml", GOOD, &machine).unwrap_err().to_string();
    let wanted = "t.yaml:5:35: malloc bdevs up to here want 3MiB of memory";
    assert_eq!(error.lines().next(), Some(wanted));
    assert!(error.contains("this machine has 2MiB; make them smaller"), "{error}");
}

#[test]
fn what_is_allowed_but_odd_is_a_warning() {
    let warnings = |text: &str| {
        let config = Config::parse("t.yaml", text).unwrap();
        config.warnings.iter().map(|w| w.message.clone()).collect::<Vec<_>>()
    };
    assert_eq!(warnings(GOOD), ["`any` admits every initiator, beside those listed"]);
    let specific = GOOD.replace("    - { initiator: any, luns: { 16383: ram1 } }\n", "");
    assert!(warnings(&specific).is_empty());
    let text = specific.replace("shm: /run/usurp/srp.sock", "rdma_cm: \"[::]:5555\"");
    let without: &[&str] = &["this binary was built without RDMA"];
    assert_eq!(warnings(&text), if cfg!(feature = "verbs") { &[] } else { without });
    let text = specific.replace("0002:c903:000e:8acc", "0005:ad03:000e:8acc");
    assert_eq!(warnings(&text), ["ib_srp logs in differently at GUIDs of Topspin and Cisco"]);
    let text = specific.replace("1: ram1, 0: ram0", "0: ram1");
    assert_eq!(warnings(&text), ["no host sees the bdev `ram0`"]);
}

#[test]
fn a_bdev_that_does_not_open_is_shown_in_the_file() {
    let config = Config::parse("t.yaml", GOOD).unwrap();
    let report = config.bdev_problem(1, "malloc.block_size", "is odd", "be even").to_string();
    assert!(report.starts_with("t.yaml:5:53: bdev `ram1`: is odd\n"), "{report}");
    let report = config.bdev_problem(1, "block_size", "is odd", "").to_string();
    assert!(report.starts_with("t.yaml:5:53: "), "{report}");
    let report = config.bdev_problem(0, "", "is odd", "").to_string();
    assert!(report.starts_with("t.yaml:4:5: "), "{report}");
}

#[test]
fn every_file_in_configs_is_accepted() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs");
    let mut count = 0;
    for entry in std::fs::read_dir(&folder).expect("configs/ is there") {
        let path = entry.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        if let Err(error) = Config::parse(&path.display().to_string(), &text) {
            panic!("{error}");
        }
        count += 1;
    }
    assert!(count >= 4, "only {count} files in {}", folder.display());
}
