//! IUs made by hand, byte by byte after reference 1.6 and 1.7, so that they can be wrong in any
//! way. Shares no code with the target's parser.

/// A memory descriptor.
#[derive(Copy, Clone, Debug)]
pub struct Mem {
    /// Address.
    pub va: u64,
    /// Key.
    pub key: u32,
    /// Bytes.
    pub len: u32,
}

impl Mem {
    /// Its 16 bytes.
    pub fn bytes(&self) -> [u8; 16] {
        let mut out = [0; 16];
        out[..8].copy_from_slice(&self.va.to_be_bytes());
        out[8..12].copy_from_slice(&self.key.to_be_bytes());
        out[12..].copy_from_slice(&self.len.to_be_bytes());
        out
    }
}

/// One direction's data buffer as the IU says it.
#[derive(Clone, Debug)]
pub enum Buffer {
    /// Format 0.
    None,
    /// Format 1.
    Direct(Mem),
    /// Format 2: the full table, the total length, the descriptors in the IU.
    Indirect(Mem, u32, Vec<Mem>),
    /// Format 3: the length, and the data at offset 68 of the IU.
    Immediate(u32, Vec<u8>),
    /// Any nibble with any bytes for its descriptor.
    Odd(u8, Vec<u8>),
}

impl Buffer {
    fn nibble(&self) -> u8 {
        match self {
            Buffer::None => 0,
            Buffer::Direct(_) => 1,
            Buffer::Indirect(..) => 2,
            Buffer::Immediate(..) => 3,
            Buffer::Odd(nibble, _) => *nibble,
        }
    }

    fn count(&self) -> u8 {
        match self {
            Buffer::Indirect(_, _, list) => list.len() as u8,
            _ => 0,
        }
    }

    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Buffer::None => {}
            Buffer::Direct(mem) => out.extend(mem.bytes()),
            Buffer::Indirect(table, total, list) => {
                out.extend(table.bytes());
                out.extend(total.to_be_bytes());
                list.iter().for_each(|mem| out.extend(mem.bytes()));
            }
            Buffer::Immediate(len, _) => out.extend(len.to_be_bytes()),
            Buffer::Odd(_, bytes) => out.extend(bytes),
        }
    }
}

/// An SRP_CMD.
#[derive(Clone, Debug)]
pub struct Cmd {
    /// Its tag.
    pub tag: u64,
    /// The LUN field.
    pub lun: [u8; 8],
    /// First 16 bytes of the CDB.
    pub cdb: [u8; 16],
    /// The rest of it; a multiple of 4.
    pub more_cdb: Vec<u8>,
    /// Data-out.
    pub out: Buffer,
    /// Data-in.
    pub inn: Buffer,
    /// Both descriptor counts, if they shall not be right.
    pub counts: Option<(u8, u8)>,
}

impl Cmd {
    /// A command without data.
    pub fn new(lun: u8, cdb: [u8; 16]) -> Cmd {
        let lun = [0, lun, 0, 0, 0, 0, 0, 0];
        let (out, inn) = (Buffer::None, Buffer::None);
        Cmd { tag: 0, lun, cdb, more_cdb: Vec::new(), out, inn, counts: None }
    }

    /// With data from the target.
    pub fn reading(lun: u8, cdb: [u8; 16], inn: Buffer) -> Cmd {
        Cmd { inn, ..Cmd::new(lun, cdb) }
    }

    /// With data to the target.
    pub fn writing(lun: u8, cdb: [u8; 16], out: Buffer) -> Cmd {
        Cmd { out, ..Cmd::new(lun, cdb) }
    }

    /// The IU.
    pub fn bytes(&self) -> Vec<u8> {
        let (outs, inns) = self.counts.unwrap_or((self.out.count(), self.inn.count()));
        let mut iu = vec![0x02, 0, 0, 0, 0, self.out.nibble() << 4 | self.inn.nibble(), outs, inns];
        iu.extend(self.tag.to_be_bytes());
        iu.extend([0; 4]);
        iu.extend(self.lun);
        iu.extend([0, 0, 0, self.more_cdb.len() as u8]);
        iu.extend(self.cdb);
        iu.extend(&self.more_cdb);
        self.out.put(&mut iu);
        self.inn.put(&mut iu);
        if let Buffer::Immediate(_, data) = &self.out {
            iu.resize(iu.len().max(68), 0xee);
            iu.extend(data);
        }
        iu
    }
}

/// An SRP_TSK_MGMT.
pub fn tsk_mgmt(tag: u64, lun: u8, function: u8, task: u64) -> Vec<u8> {
    let mut iu = vec![0; 48];
    iu[0] = 0x01;
    iu[8..16].copy_from_slice(&tag.to_be_bytes());
    iu[21] = lun;
    iu[30] = function;
    iu[32..40].copy_from_slice(&task.to_be_bytes());
    iu
}

/// An IU of `len` bytes, zero but for its opcode and tag.
pub fn plain(opcode: u8, tag: u64, len: usize) -> Vec<u8> {
    let mut iu = vec![0; len.max(16)];
    iu[0] = opcode;
    iu[8..16].copy_from_slice(&tag.to_be_bytes());
    iu.truncate(len);
    iu
}

/// READ(10).
pub fn read10(lba: u32, blocks: u16) -> [u8; 16] {
    rw10(0x28, lba, blocks)
}

/// WRITE(10).
pub fn write10(lba: u32, blocks: u16) -> [u8; 16] {
    rw10(0x2a, lba, blocks)
}

fn rw10(opcode: u8, lba: u32, blocks: u16) -> [u8; 16] {
    let mut cdb = [0; 16];
    cdb[0] = opcode;
    cdb[2..6].copy_from_slice(&lba.to_be_bytes());
    cdb[7..9].copy_from_slice(&blocks.to_be_bytes());
    cdb
}

/// TEST UNIT READY.
pub const TUR: [u8; 16] = [0; 16];

/// INQUIRY of 96 bytes.
pub fn inquiry() -> [u8; 16] {
    let mut cdb = [0; 16];
    cdb[0] = 0x12;
    cdb[4] = 96;
    cdb
}
