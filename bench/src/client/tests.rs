//! Tests of the client, its waiting calls, the load engine and `cp` on an ideal target.

use super::*;
use crate::args::{CpArgs, DescFormat};
use crate::copy;
use crate::ideal::{self, BLOCK, BLOCKS, Ideal};
use crate::list;
use crate::load::{Load, Phase, Plan};
use crate::pattern::Mode;
use crate::sync::Xfer;
use usurp_srp::target::DataDesc;

const FORMATS: [DescFormat; 4] =
    [DescFormat::Direct, DescFormat::Indirect, DescFormat::Partial, DescFormat::Imm];

fn client() -> Client<Ideal> {
    ideal::client(DescFormat::Direct, 8, 1, 64)
}

fn plan(mode: Mode, verify: bool) -> Plan {
    Plan {
        mode,
        read_percent: 50,
        io_bytes: 4096,
        depth: 8,
        range_bytes: (BLOCK * BLOCKS) as u64,
        runtime_ns: None,
        total_bytes: Some(16 << 20),
        seed: 1,
        verify,
        spin: false,
    }
}

fn load(client: &mut Client<Ideal>, plan: Plan) -> Result<crate::load::Measured, Error> {
    client.wait_ready(0)?;
    let capacity = client.read_capacity16(0)?;
    let verified = plan.verify;
    let mut load = Load::new(client, plan, &[(0, capacity)]);
    if verified {
        load.phase(Phase::Preload, &mut |_| {})?;
    }
    load.phase(Phase::Measure, &mut |_| {})?;
    if verified {
        load.phase(Phase::ReadBack, &mut |_| {})?;
    }
    Ok(load.finish())
}

#[test]
fn discovery_shows_the_disk() {
    let mut client = client();
    let table = list::luns(&mut client).unwrap();
    for part in ["4MiB", "512", "USURP", "ideal disk", "serial-7", "6001020304050607"] {
        assert!(table.contains(part), "{part}: {table}");
    }
    let text = list::inq(&mut client, 0).unwrap();
    assert!(text.contains("VPD pages  00 80 83"), "{text}");
    assert_eq!(client.vpd(0, 0xb0).unwrap(), None);
    assert_eq!(client.block_limits(0).unwrap(), BlockLimits::default());
    client.close();
}

use crate::cdb::BlockLimits;

#[test]
fn every_descriptor_format_moves_the_data() {
    for desc in FORMATS {
        let mut client = ideal::client(desc, 4, 1, 64);
        let data: Vec<u8> = (0..16 * BLOCK).map(|i| (i / 7) as u8).collect();
        client.write_blocks(0, 5, BLOCK as u32, &data).unwrap();
        let mut back = vec![0; data.len()];
        client.read_blocks(0, 5, BLOCK as u32, &mut back).unwrap();
        assert_eq!(data, back, "{desc:?}");
        let as_asked = client.fabric_mut().descs.iter().all(|d| match (desc, d) {
            (DescFormat::Direct, DataDesc::Direct(_)) => true,
            (DescFormat::Indirect, DataDesc::Indirect { .. }) => !d.is_partial(),
            (DescFormat::Partial, DataDesc::Indirect { .. }) => d.is_partial(),
            (DescFormat::Imm, DataDesc::Direct(_) | DataDesc::Immediate { .. }) => true,
            _ => false,
        });
        assert!(as_asked, "{desc:?}: {:?}", client.fabric_mut().descs);
        if desc == DescFormat::Imm {
            let imm = |d: &DataDesc| matches!(d, DataDesc::Immediate { len: 8192, .. });
            assert!(client.fabric_mut().descs.iter().any(imm));
        }
        client.close();
    }
}

#[test]
fn a_unit_attention_is_tried_again_and_other_sense_is_an_error() {
    let mut client = client();
    client.fabric_mut().faults.attentions = 3;
    client.wait_ready(0).unwrap();
    client.fabric_mut().faults.attentions = 1;
    let reply = client.exec(0, 0, &crate::cdb::test_unit_ready(), Xfer::None).unwrap();
    assert_eq!((reply.status, reply.sense_code().unwrap().asc), (2, 0x29));
    let mut block = vec![0; BLOCK];
    let error = client.read_blocks(0, BLOCKS as u64, BLOCK as u32, &mut block).unwrap_err();
    assert!(error.to_string().contains("LBA out of range"), "{error}");
    client.fabric_mut().faults.attentions = 1000;
    assert!(client.wait_ready(0).unwrap_err().to_string().contains("without end"));
    client.close();
}

#[test]
fn a_short_read_with_good_status_is_an_error() {
    let mut client = client();
    client.fabric_mut().faults.short_reads = 1;
    let mut data = vec![0; 2 * BLOCK];
    let error = client.read_blocks(0, 0, BLOCK as u32, &mut data).unwrap_err();
    assert!(error.to_string().contains("residual of 512 bytes short"), "{error}");
}

#[test]
fn no_answer_is_a_timeout_and_the_command_can_be_aborted() {
    let mut client = client();
    client.fabric_mut().faults.silent = true;
    let slot = client.reserve(0).unwrap();
    let request =
        Request { lun: 0, cdb: crate::cdb::read_write(false, 9, 1), data: Data::In(512), user: 3 };
    let now = client.now();
    assert_eq!(client.start(slot, &request, now).unwrap(), Started::Yes);
    client.flush().unwrap();
    assert_eq!(client.in_flight(), 1);
    let mut out = Outcomes::default();
    let error = client.wait(&mut out).unwrap_err();
    assert!(matches!(error, Error::Timeout { lun: 0, .. }), "{error}");
    assert!(error.to_string().contains("READ(10) at LBA 9"), "{error}");
    assert_eq!(client.abort_task(slot, 0).unwrap(), RspCode::COMPLETE);
    assert!(client.is_idle(slot));
    assert_eq!(client.in_flight(), 0);
    client.release(slot);
}

#[test]
fn a_lun_reset_leaves_commands_to_be_forgotten() {
    let mut client = client();
    client.fabric_mut().faults.silent = true;
    let slot = client.reserve(0).unwrap();
    let request = Request { lun: 0, cdb: [0; 16], data: Data::None, user: 3 };
    assert_eq!(client.start(slot, &request, 0).unwrap(), Started::Yes);
    assert_eq!(client.lun_reset(0).unwrap(), RspCode::COMPLETE);
    assert!(!client.is_idle(slot));
    assert!(client.forget(slot) && !client.forget(slot));
    assert_eq!(client.in_flight(), 0);
    client.fabric_mut().faults.silent = false;
    client.wait_ready(0).unwrap();
}

#[test]
fn credits_bound_the_slots_and_one_stays_for_task_management() {
    let mut client = ideal::client(DescFormat::Direct, 8, 1, 4);
    assert_eq!(client.slots_per_channel(), 3);
    client.fabric_mut().faults.silent = true;
    let request = Request { lun: 0, cdb: [0; 16], data: Data::None, user: 0 };
    for _ in 0..3 {
        let slot = client.reserve(0).unwrap();
        assert_eq!(client.start(slot, &request, 0).unwrap(), Started::Yes);
    }
    assert!(client.reserve(0).is_none());
    client.flush().unwrap();
    assert_eq!(client.req_lim(0), 1);
    assert_eq!(client.lun_reset(0).unwrap(), RspCode::COMPLETE);
}

#[test]
fn credits_that_come_by_cred_req_are_used_and_answered() {
    let mut client = ideal::client(DescFormat::Direct, 2, 1, 3);
    client.fabric_mut().faults.withhold = true;
    for _ in 0..20 {
        client.wait_ready(0).unwrap();
    }
    assert_eq!(client.req_lim(0), 3);
    client.close();
}

#[test]
fn a_broken_connection_is_an_error_everywhere_and_at_once() {
    let mut client = client();
    client.fabric_mut().faults.die = true;
    let error = client.wait_ready(0).unwrap_err();
    assert!(matches!(error, Error::PeerGone(_)), "{error}");
    assert_eq!(error.exit_code(), 1);
}

#[test]
fn a_load_moves_as_much_as_it_was_told_in_both_directions() {
    for (mode, reads, writes) in
        [(Mode::Read, true, false), (Mode::RandWrite, false, true), (Mode::RandRw, true, true)]
    {
        let mut client = ideal::client(DescFormat::Direct, 8, 2, 64);
        let measured = load(&mut client, plan(mode, false)).unwrap();
        let [read, write] = &measured.meters;
        assert_eq!((read.ios() > 0, write.ios() > 0), (reads, writes), "{mode:?}");
        assert_eq!(read.bytes() + write.bytes(), 16 << 20);
        assert!(measured.elapsed_ns >= measured.busy_ns);
        client.close();
    }
}

#[test]
fn a_verified_load_is_clean_on_a_good_target_in_every_format() {
    for desc in FORMATS {
        let mut client = ideal::client(desc, 8, 2, 64);
        let measured = load(&mut client, plan(Mode::RandRw, true)).unwrap();
        // At least the read-back of the whole range.
        assert!(measured.blocks_verified >= BLOCKS as u64);
        client.close();
    }
}

#[test]
fn a_flipped_bit_is_found_and_placed() {
    let mut client = client();
    client.fabric_mut().faults.flip_at = Some(77 * BLOCK + 200);
    match load(&mut client, plan(Mode::RandRw, true)) {
        Err(Error::Verify(m)) => {
            assert_eq!((m.expected.lba, m.offset), (77, 200));
            assert!(m.verdict().contains("torn or corrupted"));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_lost_write_is_found() {
    let mut client = client();
    client.fabric_mut().faults.lose_lba = Some(1000);
    let error = load(&mut client, plan(Mode::RandRw, true)).unwrap_err();
    assert!(error.to_string().contains("LUN 0 LBA 1000"), "{error}");
}

#[test]
fn patience_is_counted_and_real_errors_end_the_run() {
    let mut client = client();
    client.wait_ready(0).unwrap();
    let capacity = client.read_capacity16(0).unwrap();
    client.fabric_mut().faults.attentions = 3;
    client.fabric_mut().faults.busy = 2;
    let mut engine = Load::new(&mut client, plan(Mode::RandRead, false), &[(0, capacity)]);
    engine.phase(Phase::Measure, &mut |_| {}).unwrap();
    assert_eq!(engine.finish().retries, 5);

    client.fabric_mut().faults.medium_error = true;
    let error = load(&mut client, plan(Mode::Read, false)).unwrap_err();
    assert!(error.to_string().contains("MEDIUM ERROR"), "{error}");
}

#[test]
fn a_load_whose_target_stops_answering_or_dies_ends() {
    let mut client = client();
    client.wait_ready(0).unwrap();
    let capacity = client.read_capacity16(0).unwrap();
    client.fabric_mut().faults.silent = true;
    let mut engine = Load::new(&mut client, plan(Mode::Read, false), &[(0, capacity)]);
    let error = engine.phase(Phase::Measure, &mut |_| {}).unwrap_err();
    assert!(matches!(error, Error::Timeout { .. }), "{error}");

    let mut client = self::client();
    client.fabric_mut().faults.die = true;
    let mut engine = Load::new(&mut client, plan(Mode::Read, false), &[(0, capacity)]);
    let error = engine.phase(Phase::Measure, &mut |_| {}).unwrap_err();
    assert!(matches!(error, Error::PeerGone(_)), "{error}");
}

#[test]
fn withheld_credits_slow_a_load_down_but_do_not_stop_it() {
    let mut client = ideal::client(DescFormat::Direct, 8, 1, 9);
    client.fabric_mut().faults.withhold = true;
    let measured = load(&mut client, plan(Mode::RandRead, false)).unwrap();
    assert_eq!(measured.meters[0].bytes(), 16 << 20);
}

fn cp(client: &mut Client<Ideal>, from: &str, to: &str) -> Result<copy::Copied, Error> {
    let (source, destination) = (from.parse().unwrap(), to.parse().unwrap());
    copy::copy(client, &CpArgs { source, destination, size: None, sha256: true })
}

/// A client whose buffers hold a transfer of `cp`.
fn cp_client() -> Client<Ideal> {
    let buffer_bytes = copy::COPY_CHUNK;
    let desc = DescFormat::Direct;
    let shape = Shape { slots: copy::COPY_DEPTH, buffer_bytes, desc, timeout_ns: 1 << 30 };
    ideal::client_of(shape, 1, 64)
}

#[test]
fn a_file_goes_to_the_lun_and_back_with_an_odd_tail() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (dir.path().join("a"), dir.path().join("b"));
    let bytes: Vec<u8> =
        (0..1_000_003u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 9) as u8).collect();
    std::fs::write(&a, &bytes).unwrap();
    let mut client = cp_client();
    client.fabric_mut().disk.fill(0xee);
    client.fabric_mut().faults.attentions = 2;
    let done = cp(&mut client, a.to_str().unwrap(), "lun:0@1024").unwrap();
    assert_eq!(done.bytes, 1_000_003);
    let disk = &client.fabric_mut().disk;
    assert_eq!(disk[1024..1024 + bytes.len()], bytes);
    assert!(disk[..1024].iter().all(|&b| b == 0xee));
    // Read-modify-write: what follows the file in its last block stays.
    assert!(disk[1024 + bytes.len()..].iter().all(|&b| b == 0xee));
    assert_eq!(client.fabric_mut().seen.last(), Some(&0x35), "SYNCHRONIZE CACHE comes last");

    let args = CpArgs {
        source: "lun:0@1024".parse().unwrap(),
        destination: b.to_str().unwrap().parse().unwrap(),
        size: Some(1_000_003),
        sha256: true,
    };
    let back = copy::copy(&mut client, &args).unwrap();
    assert_eq!(std::fs::read(&b).unwrap(), bytes);
    assert_eq!(back.sha256, done.sha256);
    client.close();
}

#[test]
fn a_whole_lun_goes_to_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    let mut client = cp_client();
    (0..BLOCKS).for_each(|i| client.fabric_mut().disk[i * BLOCK] = i as u8);
    let done = cp(&mut client, "lun:0", path.to_str().unwrap()).unwrap();
    assert_eq!(done.bytes, (BLOCK * BLOCKS) as u64);
    assert_eq!(std::fs::read(&path).unwrap(), client.fabric_mut().disk);
}

#[test]
fn a_copy_that_cannot_be_is_refused_before_anything_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    let file = path.to_str().unwrap();
    std::fs::write(&path, vec![1; BLOCK * BLOCKS + 1]).unwrap();
    let mut client = cp_client();
    let refused = |client: &mut Client<Ideal>, from: &str, to: &str, why: &str| {
        let error = cp(client, from, to).unwrap_err();
        assert_eq!(error.exit_code(), 2, "{error}");
        assert!(error.to_string().contains(why), "{error}");
    };
    refused(&mut client, file, "lun:0", "do not fit");
    refused(&mut client, "lun:0@100", file, "no multiple");
    refused(&mut client, "lun:0@5MiB", file, "do not fit");
    refused(&mut client, file, file, "needs a file on one side");
    refused(&mut client, "lun:0", "lun:0", "needs a file on one side");
    assert_eq!(std::fs::metadata(&path).unwrap().len(), (BLOCK * BLOCKS) as u64 + 1);
    assert!(client.fabric_mut().disk.iter().all(|&b| b == 0));
    let missing = cp(&mut client, "/nonexistent/file", "lun:0").unwrap_err();
    assert_eq!(missing.exit_code(), 1);
    client.fabric_mut().faults.medium_error = true;
    std::fs::write(&path, vec![1; 4096]).unwrap();
    let error = cp(&mut client, file, "lun:0").unwrap_err();
    assert!(error.to_string().contains("MEDIUM ERROR"), "{error}");
}

/// `cargo test --release -p usurp-bench --lib -- --ignored --nocapture speed`
#[test]
#[ignore = "a measurement, not a check"]
fn speed_of_the_initiator_alone() {
    for depth in [1, 32, 127] {
        let mut client = ideal::client(DescFormat::Direct, depth, 1, 128);
        let capacity = client.read_capacity16(0).unwrap();
        client.fabric_mut().fast = true;
        let wanted = Plan {
            depth,
            runtime_ns: Some(1_000_000_000),
            total_bytes: None,
            ..plan(Mode::RandRead, false)
        };
        let mut engine = Load::new(&mut client, wanted, &[(0, capacity)]);
        let before = usurp_reactor::cpu::thread_cpu_ns();
        engine.phase(Phase::Measure, &mut |_| {}).unwrap();
        let cpu = usurp_reactor::cpu::thread_cpu_ns() - before;
        let measured = engine.finish();
        let per_io = cpu as f64 / measured.meters[0].ios() as f64;
        println!("depth {depth}: {per_io:.1} ns of CPU per I/O, initiator and ideal target");
    }
}
