//! Which commands an initiator sends, and what it expects of their answers.
//!
//! Owns: CDBs, the data that go with them, what of it the model has to know, and the check of the
//! answer. Never does: SRP.

use usurp_srp::Residual;
use usurp_srp::initiator::Done;

use crate::model::{Content, End, Gen, Model, ReadToken};
use crate::rng::Rng;

/// A logical unit as a host sees it.
#[derive(Clone, Debug)]
pub struct View {
    /// Its LUN.
    pub lun: u16,
    /// Its unit in the model.
    pub unit: usize,
    /// Block size, bytes.
    pub block_size: u32,
    /// Blocks.
    pub blocks: u64,
    /// I/O on it may fail.
    pub errors: bool,
    /// It has UNMAP.
    pub unmap: bool,
    /// RDMA goes to the medium itself, so that data are cut at multiples of 8 only: the model
    /// knows no smaller unit.
    pub torn: bool,
}

/// What a command is to do.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Index of the view.
    pub view: usize,
    /// The CDB.
    pub cdb: [u8; 16],
    /// Data for the target.
    pub out: Option<Vec<u8>>,
    /// Bytes of the buffer for data from the target.
    pub in_len: u32,
    /// Bytes that a successful command moves each way, if it is known beforehand (S).
    pub wants: Option<(u64, u64)>,
    /// It must end in ILLEGAL REQUEST.
    pub illegal: bool,
    /// The write in the model.
    pub write: Option<Gen>,
    /// The read in the model.
    pub read: Option<ReadToken>,
}

/// Likelihoods of kinds of commands, as weights.
#[derive(Clone, Debug)]
pub struct Mix {
    /// READ(10) and (16).
    pub read: u64,
    /// WRITE(10) and (16).
    pub write: u64,
    /// WRITE SAME(16).
    pub write_same: u64,
    /// UNMAP.
    pub unmap: u64,
    /// VERIFY(16) without data.
    pub verify: u64,
    /// SYNCHRONIZE CACHE(10).
    pub flush: u64,
    /// INQUIRY, TEST UNIT READY, REPORT LUNS, READ CAPACITY(16).
    pub inform: u64,
    /// Reads and writes beyond the end, or with too short a buffer.
    pub wrong: u64,
}

fn cdb16(opcode: u8, flags: u8, lba: u64, blocks: u32) -> [u8; 16] {
    let mut cdb = [0; 16];
    cdb[0] = opcode;
    cdb[1] = flags;
    cdb[2..10].copy_from_slice(&lba.to_be_bytes());
    cdb[10..14].copy_from_slice(&blocks.to_be_bytes());
    cdb
}

fn cdb10(opcode: u8, flags: u8, lba: u64, blocks: u32) -> [u8; 16] {
    let mut cdb = [0; 16];
    cdb[0] = opcode;
    cdb[1] = flags;
    cdb[2..6].copy_from_slice(&(lba as u32).to_be_bytes());
    cdb[7..9].copy_from_slice(&(blocks as u16).to_be_bytes());
    cdb
}

fn rw_cdb(rng: &mut Rng, write: bool, fua: bool, lba: u64, blocks: u32) -> [u8; 16] {
    let flags = if fua { 0x08 } else { 0 };
    if rng.chance(500_000) {
        cdb10(if write { 0x2A } else { 0x28 }, flags, lba, blocks)
    } else {
        cdb16(if write { 0x8A } else { 0x88 }, flags, lba, blocks)
    }
}

impl Mix {
    /// Draws the next command. Nothing of it is in the model yet.
    pub fn draw(&self, rng: &mut Rng, views: &[View], transfer_max: u32) -> Plan {
        let view = rng.index(views.len());
        let v = &views[view];
        let most = u64::from(transfer_max / v.block_size).min(v.blocks);
        let most = if rng.chance(850_000) { most.min(8) } else { most };
        let blocks = rng.range(1, most);
        let lba = rng.below(v.blocks - blocks + 1);
        let bytes = blocks * u64::from(v.block_size);
        let mut plan = Plan {
            view,
            cdb: [0; 16],
            out: None,
            in_len: 0,
            wants: Some((0, 0)),
            illegal: false,
            write: None,
            read: None,
        };
        let weights = [
            self.read,
            self.write,
            self.write_same,
            self.unmap,
            self.verify,
            self.flush,
            self.inform,
            self.wrong,
        ];
        let mut at = rng.below(weights.iter().sum());
        let kind = weights.iter().position(|w| {
            let here = at < *w;
            at = at.saturating_sub(*w);
            here
        });
        let n = blocks as u32;
        match kind.expect("the sum is above") {
            0 => plan.read(rng, lba, n, bytes),
            1 => plan.write(rng, lba, n, bytes),
            2 => {
                plan.cdb = cdb16(0x93, 0, lba, n);
                plan.out = Some(vec![0; v.block_size as usize]);
                plan.wants = Some((0, v.block_size.into()));
                plan.write = Some(0);
            }
            3 if v.unmap => plan.unmap(lba, n),
            4 => plan.cdb = cdb16(0x8F, 0, lba, n),
            3 | 5 => plan.cdb = cdb10(0x35, 0, 0, 0),
            6 => plan.inform(rng),
            _ => plan.wrong(rng, v, lba, n, bytes),
        }
        plan
    }
}

impl Plan {
    fn read(&mut self, rng: &mut Rng, lba: u64, blocks: u32, bytes: u64) {
        let fua = rng.chance(50_000);
        self.cdb = rw_cdb(rng, false, fua, lba, blocks);
        self.in_len = match rng.below(10) {
            0 => rng.range(1, bytes) as u32,
            1 => bytes as u32 + rng.range(1, 64) as u32,
            _ => bytes as u32,
        };
        self.wants = Some((bytes, 0));
    }

    fn write(&mut self, rng: &mut Rng, lba: u64, blocks: u32, bytes: u64) {
        let fua = rng.chance(200_000);
        self.cdb = rw_cdb(rng, true, fua, lba, blocks);
        let more = if rng.chance(50_000) { rng.range(1, 64) } else { 0 };
        self.out = Some(vec![0; (bytes + more) as usize]);
        self.wants = Some((0, bytes));
        self.write = Some(0);
    }

    fn unmap(&mut self, lba: u64, blocks: u32) {
        let mut list = vec![0; 24];
        list[0..2].copy_from_slice(&22u16.to_be_bytes());
        list[2..4].copy_from_slice(&16u16.to_be_bytes());
        list[8..16].copy_from_slice(&lba.to_be_bytes());
        list[16..20].copy_from_slice(&blocks.to_be_bytes());
        self.cdb[0] = 0x42;
        self.cdb[7..9].copy_from_slice(&24u16.to_be_bytes());
        self.out = Some(list);
        self.wants = Some((0, 24));
        self.write = Some(0);
    }

    fn inform(&mut self, rng: &mut Rng) {
        self.in_len = rng.range(8, 300) as u32;
        let allocation = self.in_len as u16;
        self.wants = None;
        match rng.below(4) {
            0 => {
                self.cdb[0] = 0x12;
                self.cdb[3..5].copy_from_slice(&allocation.to_be_bytes());
            }
            1 => {
                self.in_len = 0;
                self.wants = Some((0, 0));
            }
            2 => {
                self.in_len = self.in_len.max(16);
                self.cdb[0] = 0xA0;
                self.cdb[6..10].copy_from_slice(&self.in_len.to_be_bytes());
            }
            _ => {
                self.cdb[0] = 0x9E;
                self.cdb[1] = 0x10;
                self.cdb[10..14].copy_from_slice(&self.in_len.to_be_bytes());
            }
        }
    }

    fn wrong(&mut self, rng: &mut Rng, v: &View, lba: u64, blocks: u32, bytes: u64) {
        self.illegal = true;
        match rng.below(3) {
            0 => {
                self.cdb = cdb16(0x88, 0, v.blocks - u64::from(blocks) + 1, blocks);
                self.in_len = bytes as u32;
            }
            1 => {
                self.cdb = cdb16(0x8A, 0, u64::MAX - 1, blocks);
                self.out = Some(vec![0xAB; bytes as usize]);
            }
            _ => {
                self.cdb = cdb16(0x8A, 0, lba, blocks);
                self.out = Some(vec![0xAB; bytes as usize - 1]);
            }
        }
    }

    /// Enters the command into the model as it is sent, and makes the data of a write.
    pub fn begin(&mut self, model: &mut Model, views: &[View]) {
        let view = &views[self.view];
        let Some((lba, blocks)) = self.range() else { return };
        if self.write.is_some() {
            let content = match self.cdb[0] {
                0x42 => Content::Zero,
                0x93 => Content::Same,
                _ => Content::Pattern,
            };
            let number = model.start_write(view.unit, lba, blocks, content);
            self.write = Some(number);
            if content == Content::Zero {
                return;
            }
            let out = self.out.as_mut().expect("a write has data");
            for (i, block) in out.chunks_mut(view.block_size as usize).enumerate() {
                model.fill(number, i as u64, block);
            }
        } else if matches!(self.cdb[0], 0x28 | 0x88) && !self.illegal {
            self.read = Some(model.start_read(view.unit, lba, blocks));
        }
    }

    /// Blocks it addresses.
    fn range(&self) -> Option<(u64, u64)> {
        let be = |range: std::ops::Range<usize>, of: &[u8]| {
            of[range].iter().fold(0u64, |sum, b| sum << 8 | u64::from(*b))
        };
        match self.cdb[0] {
            0x28 | 0x2A => Some((be(2..6, &self.cdb), be(7..9, &self.cdb))),
            0x88 | 0x8A | 0x93 if !self.illegal => {
                Some((be(2..10, &self.cdb), be(10..14, &self.cdb)))
            }
            0x42 => {
                let list = self.out.as_ref().expect("UNMAP has a list");
                Some((be(8..16, list), be(16..20, list)))
            }
            _ => None,
        }
    }

    /// Judges the answer: what it means for the model, or what is wrong with it. `data` is what the
    /// data-in buffer now holds, `untouched` what it held before.
    pub fn judge(
        &self,
        done: &Done<'_>,
        view: &View,
        data: &[u8],
        untouched: u8,
        model: &mut Model,
    ) -> Result<End, String> {
        let out_len = self.out.as_ref().map_or(0, Vec::len) as u64;
        let end = match (done.status, sense_key(done.sense)) {
            (0x00, _) => End::Acked,
            (0x08 | 0x28, _) => End::Refused,
            (0x02, Some(5)) if self.illegal => End::Refused,
            (0x02, Some(6)) => End::Refused,
            (0x02, Some(3 | 4 | 0xB)) if view.errors => End::Unknown,
            (status, key) => {
                return Err(format!("status {status:#x}, sense key {key:x?}: {:x?}", done.sense));
            }
        };
        let good = end == End::Acked;
        if good && self.illegal {
            return Err("an illegal command succeeded".into());
        }
        let wants = if good { self.wants } else { Some((0, 0)) };
        let moved = match wants {
            Some((s_in, s_out)) => {
                let want = Residual::of(s_in, self.in_len.into());
                if done.data_in != want {
                    return Err(format!("residual in {:?}, not {want:?}", done.data_in));
                }
                let want = Residual::of(s_out, out_len);
                if done.data_out != want {
                    return Err(format!("residual out {:?}, not {want:?}", done.data_out));
                }
                s_in.min(self.in_len.into()) as usize
            }
            None => match done.data_in {
                Residual::Under(n) => (self.in_len - n) as usize,
                _ => self.in_len as usize,
            },
        };
        // Data of a failed read may have gone out before the failure was known; a good one's not.
        if let Some(at) = data[moved..].iter().position(|b| *b != untouched).filter(|_| good) {
            return Err(format!("byte {} behind the data was written", moved + at));
        }
        if let Some(read) = self.read.as_ref().filter(|_| good) {
            model.check_read(read, &data[..moved])?;
        }
        Ok(end)
    }
}

/// Sense key of either format.
pub fn sense_key(sense: &[u8]) -> Option<u8> {
    match sense.first()? & 0x7F {
        0x70 | 0x71 => sense.get(2).map(|b| b & 0x0F),
        0x72 | 0x73 => sense.get(1).map(|b| b & 0x0F),
        _ => None,
    }
}
