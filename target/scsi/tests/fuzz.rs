//! Random CDBs against the device server, and RSOC against dispatch, by the public interface only.
//!
//! Owns: a hostile initiator and an obedient caller. Never does: look inside.

use usurp_bdev::{Caps, Geometry, Op, Status};
use usurp_scsi::{
    Dir, IoReq, Key, Lu, LuConfig, LunList, NexusLu, Reply, SCRATCH_BYTES, SENSE_BYTES_MAX, Sense,
    Step, Task, Ua, absent_lun, parse_lun, report_luns, status,
};

/// Knuth's MMIX generator; the high bits are good enough here.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.0 >> 16
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// Mostly small, sometimes anything.
    fn length(&mut self) -> u32 {
        match self.below(4) {
            0 => 0,
            1 => self.below(64) as u32,
            2 => (self.below(32) * 512) as u32,
            _ => (self.next() as u32) >> 8,
        }
    }
}

fn unit(thin: bool, read_only: bool, block_size: u32) -> Lu {
    let mut geometry = Geometry::new(block_size, 1000);
    geometry.unmap_granularity_blocks = 8;
    let caps = Caps { flush: true, unmap: thin, unmap_zeroes: thin, ..Caps::default() };
    let mut config = LuConfig::new(geometry, caps);
    config.read_only = read_only;
    config.max_transfer_blocks = 64;
    Lu::new(config)
}

fn check_request(lu: &Lu, request: IoReq, data_out_len: u32, data_in_len: u32) {
    let geometry = lu.geometry();
    let bytes = request.blocks * u64::from(geometry.block_size);
    if request.op.has_range() {
        assert!(request.blocks > 0, "{request:?}");
        assert!(geometry.contains(request.lba, request.blocks), "{request:?}");
    } else {
        assert_eq!((request.lba.0, request.blocks), (0, 0));
    }
    assert!(!(lu.is_read_only() && request.op.is_write()), "{request:?}");
    match request.dir {
        Dir::In => {
            assert_eq!(request.op, Op::Read);
            assert!(request.len > 0 && request.len <= data_in_len);
            assert!(u64::from(request.len) <= bytes);
            assert!(u64::from(request.len) > bytes - u64::from(geometry.block_size));
        }
        Dir::Out => {
            assert!(matches!(request.op, Op::Write { .. }));
            assert_eq!(u64::from(request.len), bytes);
            assert!(request.len <= data_out_len);
        }
        Dir::None => {
            let want = request.op.buffer_bytes(request.blocks, geometry.block_size);
            assert_eq!(Some(u64::from(request.len)), want, "{request:?}");
        }
    }
}

fn check_reply(reply: &Reply, data_in_len: u32) {
    assert_eq!(reply.sense.is_some(), reply.status == status::CHECK_CONDITION);
    assert!(reply.data_in_len <= data_in_len && reply.data_in_len as usize <= SCRATCH_BYTES);
    assert!(u64::from(reply.data_in_len) <= reply.wants_in);
    if reply.status != status::GOOD {
        assert_eq!((reply.data_in_len, reply.wants_in, reply.wants_out), (0, 0, 0));
    }
    for desc in [false, true] {
        if let Some(sense) = reply.sense {
            let (bytes, len) = sense.bytes(desc);
            assert!((8..=SENSE_BYTES_MAX).contains(&len));
            assert_eq!(usize::from(bytes[7]) + 8, len);
        }
    }
}

/// Drives one command to its end as the path would, with random data and failures.
fn drive(
    lu: &mut Lu,
    nexus: &mut NexusLu,
    task: &mut Task,
    cdb: &[u8],
    random: &mut Random,
) -> u64 {
    let (data_out_len, data_in_len) = (random.length(), random.length());
    let mut scratch = [0xA5; SCRATCH_BYTES];
    let mut held = Vec::new();
    let mut step = lu.start(nexus, cdb, data_out_len, data_in_len, task, &mut scratch);
    for round in 0..1000 {
        match step {
            Step::Respond(reply) => {
                check_reply(&reply, data_in_len);
                assert!(task.is_idle());
                return round;
            }
            Step::FetchData { len } => {
                assert!(len > 0 && len <= data_out_len && held.is_empty());
                let zeros = random.below(2) == 0;
                held = (0..len).map(|_| if zeros { 0 } else { random.next() as u8 }).collect();
                if cdb[0] == 0x42 && random.below(4) > 0 {
                    sane_unmap_list(&mut held, random);
                }
                step = lu.on_data(task, &held);
            }
            Step::Io(request) => {
                check_request(lu, request, data_out_len, data_in_len);
                assert!(!request.uses_held() || held.len() >= request.len as usize);
                let read = match (request.op, request.dir) {
                    (Op::Read, Dir::None) => vec![0; request.len as usize],
                    _ => Vec::new(),
                };
                let failures = [Status::Medium, Status::Busy, Status::Io, Status::Aborted];
                let at = random.below(40) as usize;
                let outcome = failures.get(at).copied().unwrap_or(Status::Ok);
                step = lu.on_io(task, outcome, &read, &held);
            }
        }
    }
    panic!("CDB {cdb:x?} never ends");
}

fn sane_unmap_list(list: &mut [u8], random: &mut Random) {
    if list.len() >= 8 {
        list[2] = 0;
    }
    for at in (8..list.len().saturating_sub(15)).step_by(16) {
        list[at..at + 16].fill(0);
        list[at + 7] = random.next() as u8;
        list[at + 11] = random.next() as u8;
    }
}

/// A CDB of this opcode: half of them rubbish.
fn cdb_of(opcode: u8, random: &mut Random) -> Vec<u8> {
    let mut cdb: Vec<u8> = (0..32).map(|_| random.next() as u8).collect();
    if random.below(8) > 0 {
        cdb.truncate(16);
    } else {
        cdb.truncate(random.below(33) as usize);
    }
    if cdb.is_empty() {
        return cdb;
    }
    cdb[0] = opcode;
    if random.below(2) == 0 {
        make_plausible(&mut cdb, random);
    }
    cdb
}

/// Small addresses and lengths, no reserved bits but in the flags.
fn make_plausible(cdb: &mut [u8], random: &mut Random) {
    let keep: [u8; 16] = match cdb[0] {
        0x00..0x20 => [0xFF, 0, 3, 0xFF, 0x1F, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        0x42 => [0xFF, 0, 0, 0, 0, 0, 0, 1, 0xFF, 0, 0, 0, 0, 0, 0, 0],
        0x20..0x80 => [0xFF, 0, 0, 0, 3, 0xFF, 0, 0, 0x3F, 0, 0, 0, 0, 0, 0, 0],
        0x80..0xA0 => [0xFF, 0, 0, 0, 0, 0, 0, 0, 3, 0xFF, 0, 0, 0, 0x3F, 0, 0],
        _ => [0xFF, 0, 0, 0, 3, 0xFF, 0, 0, 0, 0x3F, 0, 0, 0, 0, 0, 0],
    };
    for (byte, keep) in cdb.iter_mut().zip(keep) {
        *byte &= keep;
    }
    if cdb.len() > 1 && cdb[0] >= 0x20 && cdb[0] != 0x42 {
        let flags = [0, 0x08, 0x10, 0x02, 0x06, 0x09, random.next() as u8, 0];
        cdb[1] = flags[random.below(8) as usize];
    }
}

#[test]
fn random_cdbs_never_leave_the_geometry_nor_hang() {
    let mut random = Random(0x5EED);
    let mut rounds = [0; 256];
    for (thin, read_only, block_size) in
        [(true, false, 512), (false, false, 512), (true, true, 512), (true, false, 4096)]
    {
        let mut lu = unit(thin, read_only, block_size);
        let (mut nexus, mut task) = (NexusLu::new(), Task::new());
        for turn in 0..400_000_u32 {
            let opcode = [turn >> 1, 0x28 | turn >> 1][turn as usize % 2] as u8;
            let cdb = cdb_of(opcode, &mut random);
            if random.below(50) == 0 {
                nexus.raise(Ua { asc: 0x28 + random.below(3) as u8, ascq: random.below(12) as u8 });
            }
            if random.below(20) == 0 {
                lu.on_reset();
            }
            let took = drive(&mut lu, &mut nexus, &mut task, &cdb, &mut random);
            rounds[usize::from(opcode)] += took;
        }
    }
    // The fuzz is worth something only if it gets past the checks.
    for opcode in
        [0x08, 0x0A, 0x28, 0x2A, 0x2F, 0x35, 0x41, 0x42, 0x88, 0x8A, 0x8F, 0x93, 0xA8, 0xAA]
    {
        assert!(rounds[opcode] > 100, "opcode {opcode:#x} did {} I/Os", rounds[opcode]);
    }
}

#[test]
fn random_cdbs_to_absent_luns_and_report_luns_are_answered() {
    let mut random = Random(0xAB5E);
    let luns: Vec<u16> = (0..400).map(|at| at * 3).collect();
    for turn in 0..100_000_u32 {
        let opcode = [turn as u8, 0x12, 0x03, 0xA0][(turn >> 8) as usize % 4];
        let cdb = cdb_of(opcode, &mut random);
        let mut scratch = vec![0; [SCRATCH_BYTES, 100, 0][random.below(3) as usize]];
        let data_in_len = random.length();
        let reply = absent_lun(&cdb, data_in_len, &mut scratch, &luns);
        check_reply(&reply, data_in_len);
        assert!(reply.data_in_len as usize <= scratch.len());
        let Step::Respond(reply) = report_luns(&cdb, &LunList::new(&luns), &mut scratch) else {
            panic!("REPORT LUNS needs nothing");
        };
        check_reply(&reply, u32::MAX);
        let _ = parse_lun(random.next() << 16);
    }
}

/// Whether a unit knows a command: anything but 20/00, and but 24/00 pointing at the service
/// action.
fn dispatches(lu: &mut Lu, opcode: u8, action: u8) -> bool {
    if opcode == 0xA0 {
        return true; // by report_luns; see there
    }
    let mut cdb = [0; 16];
    cdb[..2].copy_from_slice(&[opcode, action]);
    lu.on_reset(); // the START STOP UNIT before this has stopped it
    let (mut nexus, mut task) = (NexusLu::new(), Task::new());
    nexus.report().expect("29/00");
    let mut scratch = [0; SCRATCH_BYTES];
    let step = lu.start(&mut nexus, &cdb, 0, 4096, &mut task, &mut scratch);
    let Step::Respond(Reply { sense: Some(sense), .. }) = step else { return true };
    let no_action = Sense::cdb_field(1).at_bit(4);
    let has_actions = [0x9E, 0xA3].contains(&opcode);
    assert_eq!(sense.key(), Key::IllegalRequest);
    sense != Sense::INVALID_OPCODE && !(has_actions && sense == no_action)
}

/// SUPPORT and CDB SIZE as RSOC option 3 tells them.
fn reported(lu: &mut Lu, opcode: u8, action: u16) -> (bool, u8) {
    let [high, low] = action.to_be_bytes();
    let cdb = [0xA3, 0x0C, 3, opcode, high, low, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];
    let (mut nexus, mut task) = (NexusLu::new(), Task::new());
    nexus.report().expect("29/00");
    let mut scratch = [0; SCRATCH_BYTES];
    let step = lu.start(&mut nexus, &cdb, 0, 4096, &mut task, &mut scratch);
    let Step::Respond(reply) = step else { panic!("{step:?}") };
    assert_eq!(reply.status, status::GOOD);
    (scratch[1] & 7 == 3, scratch[3])
}

#[test]
fn rsoc_and_dispatch_agree_on_all_opcodes_and_service_actions() {
    for thin in [false, true] {
        let mut lu = unit(thin, false, 512);
        let mut supported = 0;
        for opcode in 0..=255 {
            for action in 0..32 {
                let has_actions = [0x9E, 0xA3].contains(&opcode);
                let told = reported(&mut lu, opcode, if has_actions { action.into() } else { 0 });
                let done = dispatches(&mut lu, opcode, if has_actions { action } else { 0 });
                assert_eq!(told.0, done, "opcode {opcode:#x} action {action:#x}");
                supported += u32::from(done && (has_actions || action == 0));
            }
        }
        assert_eq!(supported, if thin { 27 } else { 26 });
    }
}
