//! What may be on the media: for each block the writes whose data a read may find.
//!
//! A write is visible from its start; it may still take effect until its end, which is its answer,
//! or for one without an answer the moment from which nothing of it may happen any more (its abort
//! was answered, its nexus logged in anew), or never. A write that was acknowledged rules out every
//! one that had ended before it began, and so does one whose data were seen.
//!
//! ```text
//!   V |------|                        V may not be seen once W is acknowledged
//!               W |------| ack
//!      U |-------------?              U has no end: it may be seen for ever
//! ```
//! The data say which write they are of: each 8 bytes hold the write's number, the block within it
//! and the place in the block. Zeros are nobody's.

/// Number of a write; 0 are the zeros of a new disk.
pub type Gen = u32;

/// What a write leaves.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// Each block its own data.
    Pattern,
    /// One block's data on all.
    Same,
    /// Zeros.
    Zero,
}

/// How a write ended.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// GOOD: it is there.
    Acked,
    /// It may or may not have taken effect, block by block, but will not any more.
    Unknown,
    /// It was refused before it could take effect.
    Refused,
}

/// A write.
#[derive(Clone, Debug)]
struct Write {
    lu: usize,
    lba: u64,
    blocks: u64,
    content: Content,
    /// When it began.
    start: u64,
    /// When it ended; `MAX` = it may take effect any time.
    end: u64,
    /// It was refused: nobody may see it.
    refused: bool,
}

/// One logical unit.
#[derive(Clone, Debug)]
struct Unit {
    block_size: usize,
    /// Two writes, or the old and the new data, may mix within a block: RDMA goes to the medium
    /// itself.
    torn: bool,
    /// By block: writes that may be seen.
    visible: Vec<Vec<Gen>>,
}

/// A read under way.
#[derive(Clone, Debug)]
pub struct ReadToken {
    lu: usize,
    lba: u64,
    /// The first write that began after it.
    first_new: Gen,
    /// By block: what could be seen at its start.
    visible: Vec<Vec<Gen>>,
}

/// See the module's header.
#[derive(Default)]
pub struct Model {
    units: Vec<Unit>,
    /// All writes, by number.
    writes: Vec<Write>,
    /// Counts starts and ends.
    clock: u64,
}

const SAME: u64 = 0xFFFF;

impl Model {
    /// A model of no units.
    pub fn new() -> Model {
        let zeros = Write {
            lu: 0,
            lba: 0,
            blocks: 0,
            content: Content::Zero,
            start: 0,
            end: 0,
            refused: false,
        };
        Model { units: Vec::new(), writes: vec![zeros], clock: 0 }
    }

    /// Adds a unit of zeros. Its index.
    pub fn add_unit(&mut self, block_size: usize, blocks: u64, torn: bool) -> usize {
        let visible = (0..blocks).map(|_| vec![0]).collect();
        self.units.push(Unit { block_size, torn, visible });
        self.units.len() - 1
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// A write begins.
    pub fn start_write(&mut self, lu: usize, lba: u64, blocks: u64, content: Content) -> Gen {
        let start = self.tick();
        let number = self.writes.len() as Gen;
        let end = u64::MAX;
        self.writes.push(Write { lu, lba, blocks, content, start, end, refused: false });
        for block in &mut self.units[lu].visible[lba as usize..(lba + blocks) as usize] {
            block.push(number);
        }
        number
    }

    /// Its data for block `block` of it.
    pub fn fill(&self, number: Gen, block: u64, out: &mut [u8]) {
        let content = self.writes[number as usize].content;
        for (i, word) in out.chunks_exact_mut(8).enumerate() {
            word.copy_from_slice(&word_of(number, content, block, i as u64).to_le_bytes());
        }
    }

    /// A write ends.
    pub fn end_write(&mut self, number: Gen, how: End) {
        let end = self.tick();
        let write = &mut self.writes[number as usize];
        assert!(write.end == u64::MAX, "write {number} ends twice");
        write.end = end;
        write.refused = how == End::Refused;
        let (lu, first, last) = (write.lu, write.lba, write.lba + write.blocks);
        for block in first..last {
            match how {
                End::Acked => self.seen(lu, block, number),
                End::Refused => self.units[lu].visible[block as usize].retain(|g| *g != number),
                End::Unknown => {}
            }
        }
    }

    /// Whatever had ended before that write began is gone from the block.
    fn seen(&mut self, lu: usize, block: u64, number: Gen) {
        let start = self.writes[number as usize].start;
        let writes = &self.writes;
        let block = &mut self.units[lu].visible[block as usize];
        block.retain(|g| *g == number || writes[*g as usize].end >= start);
    }

    /// A read begins.
    pub fn start_read(&self, lu: usize, lba: u64, blocks: u64) -> ReadToken {
        let visible = &self.units[lu].visible[lba as usize..(lba + blocks) as usize];
        let first_new = self.writes.len() as Gen;
        ReadToken { lu, lba, first_new, visible: visible.to_vec() }
    }

    /// A read has brought `data`, which may end within a block. What is wrong with it.
    pub fn check_read(&mut self, read: &ReadToken, data: &[u8]) -> Result<(), String> {
        let size = self.units[read.lu].block_size;
        for (i, bytes) in data.chunks(size).enumerate() {
            let lba = read.lba + i as u64;
            let found = self.check_block(read.lu, lba, bytes, &read.visible[i], read.first_new)?;
            // Of a block that may be torn, a part says nothing about the rest.
            let tells = bytes.len() == size || !self.units[read.lu].torn;
            if let Some(number) = found.filter(|g| *g != 0 && tells) {
                self.seen(read.lu, lba, number);
            }
        }
        Ok(())
    }

    /// What is on a medium at the end.
    pub fn check_medium(&mut self, lu: usize, data: &[u8]) -> Result<(), String> {
        let size = self.units[lu].block_size;
        for (lba, bytes) in data.chunks(size).enumerate() {
            let visible = &self.units[lu].visible[lba];
            self.check_block(lu, lba as u64, bytes, visible, self.writes.len() as Gen)?;
        }
        Ok(())
    }

    /// Checks a block, or the beginning of one, against the writes that may be seen: those listed
    /// and all from number `first_new` on. The one write all of it is of, if that is so.
    fn check_block(
        &self,
        lu: usize,
        lba: u64,
        bytes: &[u8],
        visible: &[Gen],
        first_new: Gen,
    ) -> Result<Option<Gen>, String> {
        let here = |w: &Write| !w.refused && w.lu == lu && covers(w, lba);
        let may = |g: Gen| {
            let w = &self.writes[g as usize];
            visible.contains(&g) && !w.refused || g >= first_new && here(w)
        };
        let is_zero = |w: &Write| w.content == Content::Zero;
        let zeros = || {
            let new = &self.writes[first_new as usize..];
            visible.iter().any(|g| is_zero(&self.writes[*g as usize]) && may(*g))
                || new.iter().any(|w| is_zero(w) && here(w))
        };
        let mut zero_ok = None;
        let mut only = None;
        let mut mixed = false;
        for (i, chunk) in bytes.chunks_exact(8).enumerate() {
            let word = u64::from_le_bytes(chunk.try_into().expect("8 bytes"));
            let number = (word >> 32) as Gen;
            let Some(write) = self.writes.get(number as usize) else {
                return Err(format!("LU {lu} LBA {lba} word {i}: {word:#018x} is nobody's data"));
            };
            let fine = if word == 0 {
                *zero_ok.get_or_insert_with(zeros)
            } else {
                let rel = lba.wrapping_sub(write.lba);
                word_of(number, write.content, rel, i as u64) == word && may(number)
            };
            if !fine {
                return Err(format!(
                    "LU {lu} LBA {lba} word {i}: {word:#018x} is of write {number} ({write:?}), \
                     which may not be seen here any more or yet; visible: {visible:?}, and all \
                     from {first_new}"
                ));
            }
            mixed |= only.is_some_and(|o| o != number);
            only = Some(number);
        }
        if mixed && !self.units[lu].torn {
            return Err(format!("LU {lu} LBA {lba}: data of two writes in one block"));
        }
        Ok(if mixed { None } else { only })
    }
}

fn covers(write: &Write, lba: u64) -> bool {
    (write.lba..write.lba + write.blocks).contains(&lba)
}

fn word_of(number: Gen, content: Content, block: u64, place: u64) -> u64 {
    match content {
        Content::Zero => 0,
        Content::Pattern => u64::from(number) << 32 | block << 16 | place,
        Content::Same => u64::from(number) << 32 | SAME << 16 | place,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(m: &Model, number: Gen, block: u64) -> Vec<u8> {
        let mut out = vec![0; 512];
        m.fill(number, block, &mut out);
        out
    }

    fn model() -> Model {
        let mut m = Model::new();
        m.add_unit(512, 8, false);
        m
    }

    #[test]
    fn an_acknowledged_write_hides_what_ended_before_it() {
        let mut m = model();
        let old = m.start_write(0, 1, 2, Content::Pattern);
        m.end_write(old, End::Acked);
        let new = m.start_write(0, 2, 1, Content::Pattern);
        let during = m.start_read(0, 2, 1);
        assert!(m.check_read(&during, &block(&m, old, 1)).is_ok());
        m.end_write(new, End::Acked);
        assert!(m.check_read(&during, &block(&m, old, 1)).is_ok(), "it began before the ack");
        let after = m.start_read(0, 2, 1);
        assert!(m.check_read(&after, &block(&m, old, 1)).is_err());
        assert!(m.check_read(&after, &block(&m, new, 0)).is_ok());
        assert!(m.check_read(&after, &[0; 512]).is_err());
    }

    #[test]
    fn a_write_without_an_end_may_land_late() {
        let mut m = model();
        let lost = m.start_write(0, 0, 1, Content::Pattern);
        let new = m.start_write(0, 0, 1, Content::Pattern);
        m.end_write(new, End::Acked);
        let read = m.start_read(0, 0, 1);
        assert!(m.check_read(&read, &block(&m, lost, 0)).is_ok());
        m.end_write(lost, End::Unknown);
        let newest = m.start_write(0, 0, 1, Content::Pattern);
        m.end_write(newest, End::Acked);
        let read = m.start_read(0, 0, 1);
        assert!(m.check_read(&read, &block(&m, lost, 0)).is_err());
    }

    #[test]
    fn what_was_seen_stays() {
        let mut m = model();
        let a = m.start_write(0, 0, 1, Content::Pattern);
        m.end_write(a, End::Unknown);
        let b = m.start_write(0, 0, 1, Content::Same);
        let read = m.start_read(0, 0, 1);
        assert!(m.check_read(&read, &block(&m, b, 0)).is_ok());
        let read = m.start_read(0, 0, 1);
        assert!(m.check_read(&read, &block(&m, a, 0)).is_err());
    }

    #[test]
    fn misplaced_torn_and_refused_data_are_found() {
        let mut m = model();
        let a = m.start_write(0, 0, 2, Content::Pattern);
        let b = m.start_write(0, 0, 2, Content::Pattern);
        let read = m.start_read(0, 0, 1);
        assert!(m.check_read(&read, &block(&m, a, 1)).is_err(), "block 1's data in block 0");
        let mut torn = block(&m, a, 0);
        torn[256..].copy_from_slice(&block(&m, b, 0)[256..]);
        assert!(m.check_read(&read, &torn).is_err());
        m.end_write(b, End::Refused);
        assert!(m.check_read(&read, &block(&m, b, 0)).is_err());
    }
}
