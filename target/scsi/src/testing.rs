//! What the unit tests of this crate share: a logical unit on a bench.
//!
//! Owns: the fixtures. Never does: check anything itself.

use usurp_bdev::{Caps, Geometry, Status};

use crate::lu::{Lu, LuConfig};
use crate::sense::Sense;
use crate::step::{Reply, SCRATCH_BYTES, Step, status};
use crate::task::Task;
use crate::ua::NexusLu;

/// 10 000 blocks of 512 bytes with a write cache, fat; transfers up to 2048 blocks.
pub(crate) fn plain() -> LuConfig {
    let mut geometry = Geometry::new(512, 10_000);
    geometry.physical_block_exp = 3;
    geometry.optimal_io_blocks = 64;
    let caps = Caps { flush: true, ..Caps::default() };
    let mut config = LuConfig::new(geometry, caps);
    config.max_transfer_blocks = 2048;
    config.serial = "SN1234".into();
    for (at, byte) in config.naa.iter_mut().enumerate() {
        *byte = if at == 0 { 0x60 } else { at as u8 };
    }
    config.rel_port_id = 7;
    config.target_port[..8].fill(0xE1);
    config.target_port[8..].fill(0xF2);
    config
}

/// `plain` with changes.
pub(crate) fn lu(change: impl FnOnce(&mut LuConfig)) -> LuConfig {
    let mut config = plain();
    change(&mut config);
    config
}

/// A logical unit, a nexus without unit attentions, and one task.
#[derive(Clone)]
pub(crate) struct Bench {
    pub lu: Lu,
    pub nexus: NexusLu,
    pub task: Task,
    pub scratch: Vec<u8>,
}

impl Bench {
    pub fn new(config: LuConfig) -> Bench {
        let mut nexus = NexusLu::new();
        nexus.report().expect("a new nexus has one");
        let (lu, task) = (Lu::new(config), Task::new());
        Bench { lu, nexus, task, scratch: vec![0xA5; SCRATCH_BYTES] }
    }

    /// Starts a command; the CDB is padded to 16 bytes with A5h, as if the IU had rubbish there.
    pub fn start(&mut self, cdb: &[u8], data_out_len: u32, data_in_len: u32) -> Step {
        let mut padded = [0xA5; 16];
        padded[..cdb.len()].copy_from_slice(cdb);
        self.scratch.fill(0xA5);
        let (nexus, task) = (&mut self.nexus, &mut self.task);
        self.lu.start(nexus, &padded, data_out_len, data_in_len, task, &mut self.scratch)
    }

    pub fn io(&mut self, status: Status, read: &[u8], held: &[u8]) -> Step {
        self.lu.on_io(&mut self.task, status, read, held)
    }

    pub fn io_ok(&mut self, read: &[u8], held: &[u8]) -> Step {
        self.io(Status::Ok, read, held)
    }

    /// The reply of a command that needs nothing.
    pub fn reply(&mut self, cdb: &[u8], data_out_len: u32, data_in_len: u32) -> Reply {
        match self.start(cdb, data_out_len, data_in_len) {
            Step::Respond(reply) => reply,
            step => panic!("{step:?}"),
        }
    }

    /// The sense data of a command that is refused at once.
    pub fn sense(&mut self, cdb: &[u8], data_out_len: u32, data_in_len: u32) -> Sense {
        let reply = self.reply(cdb, data_out_len, data_in_len);
        let sense = reply.sense.expect("it is refused");
        assert_eq!(reply, Reply::check(sense));
        assert!(self.task.is_idle());
        sense
    }

    /// The parameter data of a command that succeeds.
    pub fn data(&mut self, cdb: &[u8], data_in_len: u32) -> Vec<u8> {
        let reply = self.reply(cdb, 0, data_in_len);
        assert_eq!((reply.status, reply.sense, reply.wants_out), (status::GOOD, None, 0));
        let len = reply.data_in_len as usize;
        assert!(self.scratch[len..].iter().all(|byte| *byte == 0xA5), "built more than it says");
        self.scratch[..len].to_vec()
    }
}
