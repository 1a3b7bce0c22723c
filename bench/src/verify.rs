//! Data verification: every block carries who it is, and a table remembers what each should be.
//!
//! ```text
//!  block, little endian                              table, 4 bytes a block
//!  0      8     16     20    24     32    36         0          unknown: not checked
//!  | magic | LBA | gen | LUN | seed | crc | payload  g > 0      generation last written
//! ```
//! `crc` is CRC-32C over the whole block but itself; the payload is derived from seed, LBA and
//! generation, so that a wrong byte can be pointed at. What the fields tell apart: an LBA that is
//! not ours is a misdirected I/O, an old generation is a lost write, a bad checksum is torn data.
//!
//! A unit (the blocks of one I/O) is claimed before an I/O on it starts and released when it ends:
//! never two outstanding I/Os on a block, so there is always exactly one right answer.
//! Invariant: a unit's generations change only between `claim` and `release`.

use std::fmt;

const MAGIC: u64 = u64::from_le_bytes(*b"USURPVFY");
const CRC_AT: usize = 32;
const PAYLOAD_AT: usize = 36;

/// What a block says about itself.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Where it was written to.
    pub lba: u64,
    /// Which write of that block it is, from 1; 0 in a block that carries no stamp.
    pub generation: u32,
    /// The LU it was written to.
    pub lun: u32,
    /// The seed of the run that wrote it.
    pub seed: u64,
}

/// A block that is not what was written.
#[derive(Debug)]
pub struct Mismatch {
    /// What it should have been.
    pub expected: Stamp,
    /// What it says it is; None if it carries no stamp of ours.
    pub got: Option<Stamp>,
    /// The block's own checksum is right: it is a whole block, but a wrong one.
    pub whole: bool,
    /// Offset in the block of the first wrong byte.
    pub offset: usize,
    /// The byte there, as it should be and as it is.
    pub bytes: (u8, u8),
}

impl Mismatch {
    /// What went wrong, as far as the block tells.
    pub fn verdict(&self) -> &'static str {
        match self.got {
            None => "no stamp of this program: never written, or overwritten by another",
            Some(_) if !self.whole => "torn or corrupted: its checksum does not match",
            Some(got) if got.seed != self.expected.seed => {
                "left by another run: the write was lost"
            }
            Some(got) if got.lun != self.expected.lun => "misdirected: it belongs to another LUN",
            Some(got) if got.lba != self.expected.lba => "misdirected: it belongs to another LBA",
            Some(got) if got.generation < self.expected.generation => "stale: a write was lost",
            Some(_) => "from the future: a newer generation than was ever acknowledged",
        }
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let want = self.expected;
        writeln!(f, "LUN {} LBA {}: wrong data; {}", want.lun, want.lba, self.verdict())?;
        writeln!(f, "  expected: LBA {} generation {}", want.lba, want.generation)?;
        match self.got {
            Some(got) => writeln!(
                f,
                "  got:      LBA {} generation {} LUN {}, checksum {}",
                got.lba,
                got.generation,
                got.lun,
                if self.whole { "right" } else { "wrong" }
            )?,
            None => writeln!(f, "  got:      a block without stamp")?,
        }
        let (want, got) = self.bytes;
        write!(
            f,
            "  first differing byte: offset {}, expected {want:#04x}, got {got:#04x}",
            self.offset
        )
    }
}

/// Writes a stamped block over all of `block`.
pub fn fill_block(block: &mut [u8], stamp: Stamp) {
    assert!(block.len() > PAYLOAD_AT, "a block has room for its stamp");
    block[0..8].copy_from_slice(&MAGIC.to_le_bytes());
    block[8..16].copy_from_slice(&stamp.lba.to_le_bytes());
    block[16..20].copy_from_slice(&stamp.generation.to_le_bytes());
    block[20..24].copy_from_slice(&stamp.lun.to_le_bytes());
    block[24..32].copy_from_slice(&stamp.seed.to_le_bytes());
    let key = payload_key(stamp);
    // Independent words, so that the compiler can do several at a time.
    let (words, rest) = block[PAYLOAD_AT..].as_chunks_mut::<4>();
    for (i, word) in words.iter_mut().enumerate() {
        *word = (key.wrapping_add(i as u32)).wrapping_mul(0x9e37_79b1).to_le_bytes();
    }
    rest.fill(key as u8);
    let crc = block_crc(block);
    block[CRC_AT..PAYLOAD_AT].copy_from_slice(&crc.to_le_bytes());
}

fn payload_key(stamp: Stamp) -> u32 {
    let mix = stamp.seed ^ stamp.lba.rotate_left(17) ^ u64::from(stamp.generation).rotate_left(43);
    (mix.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) as u32 ^ stamp.lun
}

fn block_crc(block: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&block[..CRC_AT]), &block[PAYLOAD_AT..])
}

/// The stamp of a block and whether its checksum is right; None without our magic number.
pub fn read_block(block: &[u8]) -> Option<(Stamp, bool)> {
    let head = block.first_chunk::<PAYLOAD_AT>()?;
    let u64_at = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| head[at + i]));
    let u32_at = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| head[at + i]));
    if u64_at(0) != MAGIC {
        return None;
    }
    let stamp = Stamp { lba: u64_at(8), generation: u32_at(16), lun: u32_at(20), seed: u64_at(24) };
    Some((stamp, u32_at(CRC_AT) == block_crc(block)))
}

/// What every block of one LU's range should be, and which units are in use.
#[derive(Debug)]
pub struct Verifier {
    /// The LU.
    lun: u32,
    /// Bytes per logical block.
    block_size: usize,
    /// Blocks per unit (per I/O).
    unit_blocks: u64,
    /// Marks the blocks of this run.
    seed: u64,
    /// Generation last acknowledged, per block; 0 = unknown.
    generations: Vec<u32>,
    /// One bit per unit: an I/O on it is outstanding.
    busy: Vec<u64>,
    /// Number of units claimed, for the check at the end.
    claimed: u64,
}

impl Verifier {
    /// For `units` units of `unit_blocks` blocks from LBA 0 on.
    pub fn new(lun: u16, block_size: u32, unit_blocks: u64, units: u64, seed: u64) -> Verifier {
        assert!(unit_blocks > 0 && units > 0, "a range has blocks");
        Verifier {
            lun: u32::from(lun),
            block_size: block_size as usize,
            unit_blocks,
            seed,
            generations: vec![0; (units * unit_blocks) as usize],
            busy: vec![0; units.div_ceil(64) as usize],
            claimed: 0,
        }
    }

    /// Number of units in the range.
    pub fn units(&self) -> u64 {
        self.generations.len() as u64 / self.unit_blocks
    }

    /// Takes the unit for one I/O; false when another I/O has it.
    pub fn claim(&mut self, unit: u64) -> bool {
        assert!(unit < self.units(), "unit {unit} in range");
        let (word, bit) = (&mut self.busy[(unit / 64) as usize], 1 << (unit % 64));
        let free = *word & bit == 0;
        *word |= bit;
        self.claimed += u64::from(free);
        free
    }

    /// Gives the unit back.
    pub fn release(&mut self, unit: u64) {
        let (word, bit) = (&mut self.busy[(unit / 64) as usize], 1 << (unit % 64));
        assert!(*word & bit != 0, "unit {unit} is claimed");
        *word &= !bit;
        self.claimed -= 1;
    }

    /// True when no unit is claimed.
    pub fn is_whole(&self) -> bool {
        self.claimed == 0
    }

    /// True when at least one block of the unit has a known generation.
    pub fn is_known(&self, unit: u64) -> bool {
        self.generations[self.blocks_of(unit)].iter().any(|&g| g != 0)
    }

    /// Fills `data` with the blocks that the next write of `unit` must carry.
    pub fn stamp(&self, unit: u64, data: &mut [u8]) {
        self.assert_claimed(unit);
        let blocks = self.blocks_of(unit);
        assert!(data.len() == blocks.len() * self.block_size, "one unit of data");
        for (lba, block) in blocks.zip(data.chunks_exact_mut(self.block_size)) {
            fill_block(block, self.stamp_of(lba, next_generation(self.generations[lba])));
        }
    }

    /// The write of `unit` was acknowledged: its new generations count from now on.
    pub fn on_written(&mut self, unit: u64) {
        self.assert_claimed(unit);
        for lba in self.blocks_of(unit) {
            self.generations[lba] = next_generation(self.generations[lba]);
        }
    }

    /// Checks what a read of `unit` brought; blocks never written are passed over.
    pub fn check(&self, unit: u64, data: &[u8]) -> Result<(), Box<Mismatch>> {
        self.assert_claimed(unit);
        let blocks = self.blocks_of(unit);
        assert!(data.len() == blocks.len() * self.block_size, "one unit of data");
        for (lba, block) in blocks.zip(data.chunks_exact(self.block_size)) {
            let generation = self.generations[lba];
            if generation == 0 {
                continue;
            }
            let expected = self.stamp_of(lba, generation);
            if read_block(block) != Some((expected, true)) {
                return Err(Box::new(self.explain(expected, block)));
            }
        }
        Ok(())
    }

    /// The slow path of `check`: builds the block anew to find the first wrong byte.
    #[cold]
    fn explain(&self, expected: Stamp, block: &[u8]) -> Mismatch {
        let mut right = vec![0; block.len()];
        fill_block(&mut right, expected);
        let differs = right.iter().zip(block).position(|(a, b)| a != b);
        let offset = differs.unwrap_or(0);
        let (got, whole) = read_block(block).map_or((None, false), |(s, ok)| (Some(s), ok));
        Mismatch { expected, got, whole, offset, bytes: (right[offset], block[offset]) }
    }

    fn stamp_of(&self, lba: usize, generation: u32) -> Stamp {
        Stamp { lba: lba as u64, generation, lun: self.lun, seed: self.seed }
    }

    fn blocks_of(&self, unit: u64) -> std::ops::Range<usize> {
        let first = (unit * self.unit_blocks) as usize;
        first..first + self.unit_blocks as usize
    }

    fn assert_claimed(&self, unit: u64) {
        assert!(self.busy[(unit / 64) as usize] >> (unit % 64) & 1 == 1, "unit {unit} is claimed");
    }
}

/// The generation after `generation`; 0 is kept for "unknown".
fn next_generation(generation: u32) -> u32 {
    generation.wrapping_add(1).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: usize = 512;

    /// Two blocks per unit, eight units, with unit 3 written twice.
    fn written() -> (Verifier, Vec<u8>) {
        let mut v = Verifier::new(5, BLOCK as u32, 2, 8, 99);
        let mut data = vec![0xa5; 2 * BLOCK];
        assert!(v.claim(3));
        for _ in 0..2 {
            v.stamp(3, &mut data);
            v.on_written(3);
        }
        (v, data)
    }

    #[test]
    fn what_was_written_is_accepted() {
        let (mut v, data) = written();
        v.check(3, &data).unwrap();
        v.release(3);
        assert!(v.is_whole());
        assert!(v.is_known(3) && !v.is_known(4));
    }

    #[test]
    fn unknown_blocks_are_passed_over() {
        let (mut v, _) = written();
        assert!(v.claim(4));
        v.check(4, &[0xee; 2 * BLOCK]).unwrap();
    }

    #[test]
    fn each_kind_of_damage_gets_its_verdict_and_place() {
        let (v, good) = written();
        let verdict = |data: &[u8]| {
            let m = v.check(3, data).unwrap_err();
            (m.verdict().split(':').next().unwrap().to_string(), m.expected.lba, m.offset)
        };

        let mut flipped = good.clone();
        flipped[BLOCK + 300] ^= 4;
        assert_eq!(verdict(&flipped), ("torn or corrupted".into(), 7, 300));

        let mut stale = good.clone();
        fill_block(&mut stale[..BLOCK], Stamp { lba: 6, generation: 1, lun: 5, seed: 99 });
        assert_eq!(verdict(&stale), ("stale".into(), 6, 16));

        let mut moved = good.clone();
        moved[..BLOCK].copy_from_slice(&good[BLOCK..]);
        assert_eq!(verdict(&moved), ("misdirected".into(), 6, 8));

        let mut other = good.clone();
        fill_block(&mut other[..BLOCK], Stamp { lba: 6, generation: 2, lun: 4, seed: 99 });
        assert_eq!(verdict(&other).0, "misdirected");

        let mut zero = good.clone();
        zero[BLOCK..].fill(0);
        assert_eq!(verdict(&zero), ("no stamp of this program".into(), 7, 0));

        let mut future = good;
        fill_block(&mut future[..BLOCK], Stamp { lba: 6, generation: 3, lun: 5, seed: 99 });
        assert_eq!(verdict(&future).0, "from the future");
    }

    #[test]
    fn a_mismatch_prints_lba_expected_got_and_offset() {
        let (v, mut data) = written();
        data[40] ^= 0xff;
        let text = v.check(3, &data).unwrap_err().to_string();
        for part in ["LUN 5 LBA 6", "expected: LBA 6 generation 2", "offset 40", "wrong"] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn a_unit_is_had_by_one_io_at_a_time() {
        let mut v = Verifier::new(0, 512, 1, 130, 0);
        assert!(v.claim(129) && v.claim(64));
        assert!(!v.claim(129));
        v.release(129);
        assert!(v.claim(129));
        assert!(!v.is_whole());
    }

    #[test]
    #[should_panic(expected = "is claimed")]
    fn checking_an_unclaimed_unit_is_our_own_bug() {
        let v = Verifier::new(0, 512, 1, 8, 0);
        let _ = v.check(0, &[0; 512]);
    }

    #[test]
    fn generation_zero_is_skipped_when_the_counter_wraps() {
        assert_eq!(next_generation(0), 1);
        assert_eq!(next_generation(u32::MAX), 1);
    }

    #[test]
    fn odd_block_sizes_are_filled_to_the_last_byte() {
        for size in [37, 520, 4104] {
            let mut block = vec![0xa5; size];
            fill_block(&mut block, Stamp { lba: 1, generation: 1, lun: 0, seed: 0 });
            assert!(read_block(&block).unwrap().1);
            block[size - 1] ^= 1;
            assert!(!read_block(&block).unwrap().1);
        }
        assert_eq!(read_block(&[0; 10]), None);
    }
}
