//! `usurp-perf cp`: between a file and a logical unit, 32 transfers of up to 128 KiB at a time.
//!
//! ```text
//!   ring of slots:   head (oldest) ... in flight ... tail        done[] marks answered ones
//!                    retired in order: file -> LUN frees it, LUN -> file hashes and writes it
//! ```
//! In-order retirement lets one SHA-256 see the bytes in order in both directions. A file whose
//! length is no multiple of the block size ends in a read-modify-write of the last block. The copy
//! to a LUN counts as done only after SYNCHRONIZE CACHE.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

use sha2::{Digest, Sha256};
use usurp_fabric::Fabric;

use crate::args::{CopyEnd, CpArgs};
use crate::cdb;
use crate::client::{Client, Data, Outcome, Outcomes, Request, SlotId, Started};
use crate::error::Error;

/// Transfers at a time.
pub const COPY_DEPTH: u32 = 32;
/// Bytes of one transfer, unless the LU allows less.
pub const COPY_CHUNK: u32 = 128 << 10;
/// How often one transfer is sent again after UNIT ATTENTION, BUSY or TASK SET FULL.
const RETRIES_MAX: u32 = 100;

/// The file side of a copy: fills the data to be written, or takes what was read, at an offset.
type Feed<'a> = &'a mut dyn FnMut(u64, &mut [u8]) -> Result<(), Error>;

/// What was copied.
#[derive(Debug)]
pub struct Copied {
    /// Bytes.
    pub bytes: u64,
    /// Wall time.
    pub seconds: f64,
    /// SHA-256 of the bytes, as hexadecimal digits, if asked for.
    pub sha256: Option<String>,
}

/// The LUN side of a copy, checked against the LU.
#[derive(Copy, Clone, Debug)]
struct Extent {
    /// The LU.
    lun: u16,
    /// First block.
    first_lba: u64,
    /// Bytes to copy.
    bytes: u64,
    /// Bytes per block.
    block_size: u32,
    /// Bytes per transfer, a multiple of the block size.
    chunk: u32,
}

impl Extent {
    fn whole_blocks_bytes(&self) -> u64 {
        self.bytes - self.bytes % u64::from(self.block_size)
    }
}

/// Runs `cp`. Refuses two files or two LUNs.
pub fn copy<F: Fabric>(client: &mut Client<F>, args: &CpArgs) -> Result<Copied, Error> {
    let start = Instant::now();
    let mut hash = args.sha256.then(Sha256::new);
    let bytes = match (&args.source, &args.destination) {
        (CopyEnd::File(path), CopyEnd::Lun { lun, offset }) => {
            to_lun(client, path, (*lun, *offset), args.size, &mut hash)?
        }
        (CopyEnd::Lun { lun, offset }, CopyEnd::File(path)) => {
            from_lun(client, (*lun, *offset), path, args.size, &mut hash)?
        }
        _ => return Err(Error::usage("cp needs a file on one side and lun:N on the other")),
    };
    let sha256 = hash.map(|h| cdb::hex(&h.finalize()));
    Ok(Copied { bytes, seconds: start.elapsed().as_secs_f64(), sha256 })
}

fn file_error(path: &Path) -> impl Fn(std::io::Error) -> Error + '_ {
    move |source| Error::File { path: path.to_path_buf(), source }
}

/// Checks the LUN side; `bytes` None means "to the end of the LU".
fn extent<F: Fabric>(
    client: &mut Client<F>,
    (lun, offset): (u16, u64),
    bytes: Option<u64>,
) -> Result<Extent, Error> {
    client.wait_ready(lun)?;
    let capacity = client.read_capacity16(lun)?;
    let block_size = capacity.block_size;
    if offset % u64::from(block_size) != 0 {
        let why = format!("offset {offset} is no multiple of LUN {lun}'s block size {block_size}");
        return Err(Error::Usage(why));
    }
    let room = capacity.bytes().checked_sub(offset);
    let Some(room) = room.filter(|&room| bytes.is_none_or(|b| b <= room)) else {
        return Err(Error::Usage(format!(
            "LUN {lun} has {} bytes; {} bytes at offset {offset} do not fit",
            capacity.bytes(),
            bytes.unwrap_or(0)
        )));
    };
    let limit = client.block_limits(lun)?.max_transfer_blocks;
    let limit = if limit == 0 { u32::MAX } else { limit };
    let blocks = (COPY_CHUNK / block_size).min(limit).max(1);
    let first_lba = offset / u64::from(block_size);
    let bytes = bytes.unwrap_or(room);
    Ok(Extent { lun, first_lba, bytes, block_size, chunk: blocks * block_size })
}

fn to_lun<F: Fabric>(
    client: &mut Client<F>,
    path: &Path,
    at: (u16, u64),
    size: Option<u64>,
    hash: &mut Option<Sha256>,
) -> Result<u64, Error> {
    let file = File::open(path).map_err(file_error(path))?;
    let length = file.metadata().map_err(file_error(path))?.len();
    if size.is_some_and(|s| s > length) {
        let why = format!("{} has only {length} bytes", path.display());
        return Err(Error::Usage(why));
    }
    let extent = extent(client, at, Some(size.unwrap_or(length)))?;
    let mut feed = |offset: u64, data: &mut [u8]| {
        file.read_exact_at(data, offset).map_err(file_error(path))?;
        if let Some(hash) = hash {
            hash.update(&*data);
        }
        Ok(())
    };
    pipe(client, extent, true, &mut feed)?;
    let done = extent.whole_blocks_bytes();
    let tail = (extent.bytes - done) as usize;
    if tail > 0 {
        let lba = extent.first_lba + done / u64::from(extent.block_size);
        let mut block = vec![0; extent.block_size as usize];
        client.read_blocks(extent.lun, lba, extent.block_size, &mut block)?;
        feed(done, &mut block[..tail])?;
        client.write_blocks(extent.lun, lba, extent.block_size, &block)?;
    }
    client.synchronize_cache(extent.lun)?;
    Ok(extent.bytes)
}

fn from_lun<F: Fabric>(
    client: &mut Client<F>,
    at: (u16, u64),
    path: &Path,
    size: Option<u64>,
    hash: &mut Option<Sha256>,
) -> Result<u64, Error> {
    // The LUN first: a refused copy must not have emptied the file.
    let extent = extent(client, at, size)?;
    let open = OpenOptions::new().write(true).create(true).truncate(true).open(path);
    let file = open.map_err(file_error(path))?;
    let mut feed = |offset: u64, data: &mut [u8]| {
        if let Some(hash) = hash {
            hash.update(&*data);
        }
        file.write_all_at(data, offset).map_err(file_error(path))
    };
    pipe(client, extent, false, &mut feed)?;
    let done = extent.whole_blocks_bytes();
    let tail = (extent.bytes - done) as usize;
    if tail > 0 {
        let lba = extent.first_lba + done / u64::from(extent.block_size);
        let mut block = vec![0; extent.block_size as usize];
        client.read_blocks(extent.lun, lba, extent.block_size, &mut block)?;
        feed(done, &mut block[..tail])?;
    }
    // Bytes that are not on the disk were not copied.
    match file.sync_all() {
        // A pipe or device file cannot be synchronised; that is no failure of the copy.
        Err(e) if e.raw_os_error() == Some(rustix::io::Errno::INVAL.raw_os_error()) => {}
        result => result.map_err(file_error(path))?,
    }
    Ok(extent.bytes)
}

/// The ring of transfers of a copy. See the module's header.
struct Ring {
    /// The slots, used round robin.
    slots: Vec<SlotId>,
    /// Answered, not yet retired; by slot.
    done: Vec<bool>,
    /// Times the slot's transfer was sent again.
    retries: Vec<u32>,
    /// Transfers retired and begun; position modulo the number of slots is the slot.
    head: u64,
    /// See `head`; `tail - head` <= number of slots.
    tail: u64,
}

/// Moves the whole blocks of the extent. `feed(offset, data)` fills the data to be written, or
/// takes what was read; it sees the offsets in order.
fn pipe<F: Fabric>(
    client: &mut Client<F>,
    extent: Extent,
    write: bool,
    feed: Feed<'_>,
) -> Result<(), Error> {
    let depth = COPY_DEPTH.min(client.slots_per_channel());
    let slots: Vec<SlotId> = (0..depth).filter_map(|_| client.reserve(0)).collect();
    assert!(!slots.is_empty(), "a client has slots");
    let (done, retries) = (vec![false; slots.len()], vec![0; slots.len()]);
    let mut ring = Ring { slots, done, retries, head: 0, tail: 0 };
    let result = ring.run(client, extent, write, feed);
    if result.is_ok() {
        ring.slots.iter().for_each(|&slot| client.release(slot));
    }
    result
}

impl Ring {
    fn run<F: Fabric>(
        &mut self,
        client: &mut Client<F>,
        extent: Extent,
        write: bool,
        feed: Feed<'_>,
    ) -> Result<(), Error> {
        let whole = extent.whole_blocks_bytes();
        let chunks = whole.div_ceil(u64::from(extent.chunk));
        let piece = |position: u64| {
            let offset = position * u64::from(extent.chunk);
            (offset, u64::from(extent.chunk).min(whole - offset) as u32)
        };
        let mut buffer = vec![0; extent.chunk as usize];
        let mut outcomes = Outcomes::default();
        let mut filled = 0;
        while self.head < chunks {
            while self.tail < chunks && self.tail - self.head < self.slots.len() as u64 {
                let (offset, len) = piece(self.tail);
                if write && filled == self.tail {
                    feed(offset, &mut buffer[..len as usize])?;
                    client.data_write(self.slot_at(self.tail), 0, &buffer[..len as usize]);
                    filled += 1;
                }
                if !self.start(client, &extent, write, self.tail, len)? {
                    break;
                }
                self.tail += 1;
            }
            client.flush()?;
            client.wait(&mut outcomes)?;
            for i in 0..outcomes.len() {
                let outcome = outcomes[i];
                self.on_answer(client, &extent, write, &outcome, piece(outcome.user).1)?;
            }
            while self.head < self.tail {
                let index = self.index(self.head);
                if !std::mem::take(&mut self.done[index]) {
                    break;
                }
                let (offset, len) = piece(self.head);
                if !write {
                    client.data_read(self.slot_at(self.head), 0, &mut buffer[..len as usize]);
                    feed(offset, &mut buffer[..len as usize])?;
                }
                self.head += 1;
            }
        }
        Ok(())
    }

    fn index(&self, position: u64) -> usize {
        (position % self.slots.len() as u64) as usize
    }

    fn slot_at(&self, position: u64) -> SlotId {
        self.slots[self.index(position)]
    }

    /// False when there is no credit right now.
    fn start<F: Fabric>(
        &mut self,
        client: &mut Client<F>,
        extent: &Extent,
        write: bool,
        position: u64,
        len: u32,
    ) -> Result<bool, Error> {
        let chunk_blocks = u64::from(extent.chunk / extent.block_size);
        let lba = extent.first_lba + position * chunk_blocks;
        let request = Request {
            lun: extent.lun,
            cdb: cdb::read_write(write, lba, len / extent.block_size),
            data: if write { Data::Out(len) } else { Data::In(len) },
            user: position,
        };
        let now = client.now();
        Ok(client.start(self.slot_at(position), &request, now)? == Started::Yes)
    }

    fn on_answer<F: Fabric>(
        &mut self,
        client: &mut Client<F>,
        extent: &Extent,
        write: bool,
        outcome: &Outcome,
        len: u32,
    ) -> Result<(), Error> {
        let index = self.index(outcome.user);
        if outcome.is_good() {
            self.done[index] = true;
            self.retries[index] = 0;
            return Ok(());
        }
        self.retries[index] += 1;
        if !client.is_transient(outcome) || self.retries[index] > RETRIES_MAX {
            return Err(client.error_of(outcome));
        }
        // The answer just brought a credit back, unless the target withholds it.
        if !self.start(client, extent, write, outcome.user, len)? {
            return Err(Error::Protocol("an answer returned no credit".into()));
        }
        Ok(())
    }
}
