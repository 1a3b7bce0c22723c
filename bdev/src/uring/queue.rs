//! One reactor's queue of a file: I/Os to entries, completions to I/Os.
//!
//! Owns: the slots, one per I/O in flight; the retry of short and interrupted transfers; what an
//! errno means. Never does: a syscall in `submit`.
//!
//! ```text
//!  submit --> slot (holds the Io, and with it the buffer) --> entry in the ring
//!                 ^ short, EAGAIN: the remainder again            |
//!                 | write-zeroes with FUA: an fsync then          v
//!                 +------------------------------------ poll: completion --> Done
//! ```
//! A slot is out from `submit` until its last completion; the Io, and so the buffer's memory, stays
//! in it as long. That is what makes pushing entries sound.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use io_uring::{opcode, squeue, types};
use usurp_reactor::Nanos;
use usurp_reactor::mem::{Arena, BufPool, HugePolicy, IndexPool};

use super::Disk;
use super::ring::{ENTRIES_MAX, Ring};
use crate::contract::{BLOCK_SIZE_MAX, BdevError, Lba, Queue, QueueSetup};
use crate::io::{Completions, Done, Io, Op, Status};

/// How often an I/O that the kernel says EAGAIN or EINTR to is tried again before it is `Busy`.
const RETRIES_MAX: u32 = 64;

/// The most bytes in one entry; what is longer goes in turns. Small in tests, so that the
/// conformance suite goes through the remainders too.
const ENTRY_BYTES_MAX: u64 = if cfg!(test) { 64 << 10 } else { 1 << 30 };

/// The registered file's index.
const FILE: types::Fixed = types::Fixed(0);

/// An I/O that the kernel has.
struct Slot {
    /// The I/O; `Some` while the slot is out.
    io: Option<Io>,
    /// Order of submission, for resets.
    seq: u64,
    /// Bytes transferred so far; a multiple of the block size, below the I/O's length.
    done_bytes: u64,
    /// Tries that ended with EAGAIN or EINTR; at most `RETRIES_MAX`.
    retries: u32,
    /// Whether the fsync that follows a write-zeroes with FUA is under way.
    syncing: bool,
}

/// A queue. All of it belongs to one reactor.
pub struct UringQueue {
    /// Reads and writes, and the rest if not polled. Dropped before `disk` closes the file.
    main: Ring,
    /// With `iopoll`, a ring for what can't be polled: fsync and fallocate.
    side: Option<Ring>,
    /// The file.
    disk: Arc<Disk>,
    /// One per I/O in flight; the entry's user data is the index.
    slots: Vec<Slot>,
    /// Which slots are out.
    free: IndexPool,
    /// The next `Slot::seq`.
    seq: u64,
    /// Resets, with the `seq` below which everything has to be done. At most the depth.
    resets: VecDeque<(u64, Io)>,
    /// Completed without the kernel. At most the depth.
    ready: VecDeque<Done>,
    /// The most I/Os in flight.
    depth: u32,
}

impl UringQueue {
    /// A queue for the calling thread.
    pub(super) fn new(
        name: &str,
        disk: &Arc<Disk>,
        setup: &QueueSetup,
        iopoll: bool,
    ) -> Result<UringQueue, BdevError> {
        let depth = setup.depth;
        if depth > ENTRIES_MAX {
            let message = format!("a queue depth of {depth} is more than io_uring takes");
            return Err(BdevError::new("uring", message, format!("at most {ENTRIES_MAX}")));
        }
        let main = Ring::new(name, depth, &disk.file, setup.data.as_ref(), iopoll)?;
        let side = iopoll.then(|| Ring::new(name, depth, &disk.file, None, false)).transpose()?;
        tracing::debug!(bdev = name, core = setup.core, fixed = main.is_fixed(), "uring queue");
        let slot = || Slot { io: None, seq: 0, done_bytes: 0, retries: 0, syncing: false };
        Ok(UringQueue {
            main,
            side,
            disk: disk.clone(),
            slots: (0..depth).map(|_| slot()).collect(),
            free: IndexPool::new("uring", depth),
            seq: 0,
            resets: VecDeque::with_capacity(depth as usize),
            ready: VecDeque::with_capacity(depth as usize),
            depth,
        })
    }

    /// I/Os that the kernel has, or will have after the next `enter`.
    fn with_kernel(&self) -> u32 {
        self.free.capacity() - self.free.free()
    }

    /// Pushes the entry for what is left of the I/O in a slot.
    fn push(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        let io = slot.io.as_mut().expect("the slot is out");
        let size = u64::from(self.disk.geometry.block_size);
        let start = if io.op.has_range() { self.disk.geometry.offset(io.lba) } else { 0 };
        let len = if io.op.has_range() { io.blocks * size } else { 0 };
        let is_transfer = matches!(io.op, Op::Read | Op::Write { .. });
        let ring = match &mut self.side {
            Some(side) if !is_transfer => side,
            _ => &mut self.main,
        };
        let entry = match io.op {
            _ if slot.syncing => fsync(),
            Op::Flush => fsync(),
            Op::Unmap => fallocate(start, len, libc::FALLOC_FL_PUNCH_HOLE),
            Op::WriteZeroes { unmap, .. } => {
                // A hole reads as zeros too, and gives the space back.
                let punch = unmap && self.disk.unmap;
                let mode =
                    if punch { libc::FALLOC_FL_PUNCH_HOLE } else { libc::FALLOC_FL_ZERO_RANGE };
                fallocate(start, len, mode)
            }
            Op::Read | Op::Write { .. } => transfer(ring, io, start, slot.done_bytes, len),
            Op::WriteSame { .. } | Op::CompareAndWrite { .. } | Op::Reset => {
                unreachable!("not claimed in caps, or has no entry")
            }
        };
        let entry = entry.user_data(u64::from(index));
        // SAFETY: the entry's buffer is that of the Io in `self.slots[index]`, which stays there
        // until `on_completion` has seen this entry's completion (`Drop` waits for it, too);
        // until then nobody can reach the buffer, for the Io is private to the slot.
        unsafe { ring.push(&entry) }
    }

    /// Handles one completion. `Some` if the I/O is done.
    fn on_completion(&mut self, index: u64, result: i32) -> Option<Done> {
        let slot = &mut self.slots[index as usize];
        let io = slot.io.as_ref().expect("a completion of an entry that was not pushed");
        let status = if result < 0 {
            let errno = -result;
            if matches!(errno, libc::EAGAIN | libc::EINTR) && slot.retries < RETRIES_MAX {
                slot.retries += 1;
                self.push(index as u32);
                return None;
            }
            if is_lost_write(slot.syncing, io.op, self.disk.direct) {
                self.disk.flush_failed.store(true, Ordering::Relaxed);
            }
            status_of(errno)
        } else if matches!(io.op, Op::Read | Op::Write { .. }) {
            let size = u64::from(self.disk.geometry.block_size);
            // A part of a block is transferred again: O_DIRECT takes whole ones.
            let moved = result as u64 / size * size;
            slot.done_bytes += moved;
            let len = io.blocks * size;
            assert!(slot.done_bytes <= len, "the kernel moved more than it was asked to");
            if moved > 0 && slot.done_bytes < len {
                self.push(index as u32);
                return None;
            }
            // Nothing moved: the file has become shorter than it was when it was opened.
            if slot.done_bytes == len { Status::Ok } else { Status::Medium }
        } else if matches!(io.op, Op::WriteZeroes { fua: true, .. }) && !slot.syncing {
            slot.syncing = true;
            self.push(index as u32);
            return None;
        } else {
            Status::Ok
        };
        let io = slot.io.take().expect("it was there above");
        self.free.put(index as u32);
        Some(io.complete(status))
    }

    /// Takes completions from one ring.
    fn reap(&mut self, is_side: bool, done: &mut Completions) {
        // A resubmission frees no slot, so this ends after as many as are in flight.
        while !done.is_full() {
            let ring = if is_side { self.side.as_mut() } else { Some(&mut self.main) };
            let Some((index, result)) = ring.and_then(Ring::pop) else { return };
            if let Some(finished) = self.on_completion(index, result) {
                done.push(finished);
            }
        }
    }

    /// Completes resets before which nothing is left.
    fn finish_resets(&mut self, done: &mut Completions) {
        while let Some((seq, _)) = self.resets.front() {
            let before = |slot: &Slot| slot.io.is_some() && slot.seq < *seq;
            if done.is_full() || !self.ready.is_empty() || self.slots.iter().any(before) {
                return;
            }
            let (_, io) = self.resets.pop_front().expect("front saw one");
            done.push(io.complete(Status::Ok));
        }
    }
}

impl Queue for UringQueue {
    fn submit(&mut self, io: Io) -> Result<(), Io> {
        if self.in_flight() == self.depth {
            return Err(io);
        }
        if io.op == Op::Reset {
            self.resets.push_back((self.seq, io));
            return Ok(());
        }
        let wants_sync = io.op == Op::Flush || io.op.fua();
        if wants_sync && self.disk.flush_failed.load(Ordering::Relaxed) {
            self.ready.push_back(io.complete(Status::Medium));
            return Ok(());
        }
        let align = u64::from(self.disk.mem_align);
        assert!(io.buf.addr().is_multiple_of(align), "{io:?}: the buffer is not aligned");
        let index = self.free.get().expect("in_flight is below the depth");
        let slot = &mut self.slots[index as usize];
        assert!(slot.io.is_none(), "a free slot with an I/O");
        *slot = Slot { io: Some(io), seq: self.seq, done_bytes: 0, retries: 0, syncing: false };
        self.seq += 1;
        self.push(index);
        Ok(())
    }

    fn poll(&mut self, _now: Nanos, done: &mut Completions) {
        let in_flight = self.with_kernel();
        self.main.enter(in_flight);
        if let Some(side) = &mut self.side {
            side.enter(in_flight);
        }
        while !done.is_full() {
            let Some(ready) = self.ready.pop_front() else { break };
            done.push(ready);
        }
        self.reap(false, done);
        self.reap(true, done);
        self.finish_resets(done);
    }

    fn in_flight(&self) -> u32 {
        self.with_kernel() + self.resets.len() as u32 + self.ready.len() as u32
    }
}

impl Drop for UringQueue {
    fn drop(&mut self) {
        if self.in_flight() == 0 {
            return;
        }
        // The kernel may still write to the buffers: it has to finish before they go.
        while self.with_kernel() > 0 && std::thread::panicking() {
            match self.main.pop().or_else(|| self.side.as_mut()?.pop()) {
                Some((index, result)) => drop(self.on_completion(index, result)),
                None => self.main.wait(),
            }
        }
        assert!(std::thread::panicking(), "a uring queue was dropped with I/O in flight");
    }
}

/// Reads a block by polling, for a clear error in the control thread where the driver can't.
pub(super) fn probe_polled(name: &str, disk: &Arc<Disk>) -> Result<(), BdevError> {
    let bytes = BLOCK_SIZE_MAX as usize;
    let arena = Arena::new(name, bytes, HugePolicy::Never)
        .map_err(|e| BdevError::new("uring", e.to_string(), ""))?;
    let mut pool = BufPool::new(arena, 0, bytes, bytes, bytes);
    let setup = QueueSetup { depth: 1, data: None, core: 0 };
    let mut queue = UringQueue::new(name, disk, &setup, true)?;
    let buf = pool.take(bytes).expect("a fresh pool has its one piece");
    let Ok(()) = queue.submit(Io::new(Op::Read, Lba(0), 1, buf, 0)) else {
        unreachable!("a fresh queue has room");
    };
    let mut done = Completions::new();
    while done.is_empty() {
        queue.poll(0, &mut done);
    }
    let Done { status, buf, .. } = done.pop().expect("it is not empty");
    pool.give(buf);
    if status == Status::Ok {
        return Ok(());
    }
    Err(super::no_poll(&format!(" (a polled read ended with {status:?})")))
}

fn fsync() -> squeue::Entry {
    opcode::Fsync::new(FILE).flags(types::FsyncFlags::DATASYNC).build()
}

fn fallocate(start: u64, len: u64, mode: i32) -> squeue::Entry {
    let mode = mode | libc::FALLOC_FL_KEEP_SIZE;
    opcode::Fallocate::new(FILE, len).offset(start).mode(mode).build()
}

/// The entry for the rest of a read or write of `len` bytes at `start`, `skip` of which are done.
fn transfer(ring: &Ring, io: &mut Io, start: u64, skip: u64, len: u64) -> squeue::Entry {
    let bytes = (len - skip).min(ENTRY_BYTES_MAX) as u32;
    let offset = start + skip;
    let from = skip as usize;
    let memory = &mut io.buf.as_mut_slice()[from..from + bytes as usize];
    let (pointer, addr) = (memory.as_mut_ptr(), memory.as_ptr() as u64);
    let fixed = ring.fixed_index(addr, bytes);
    let dsync = if io.op.fua() { libc::RWF_DSYNC } else { 0 };
    match (io.op == Op::Read, fixed) {
        (true, Some(i)) => opcode::ReadFixed::new(FILE, pointer, bytes, i).offset(offset).build(),
        (true, None) => opcode::Read::new(FILE, pointer, bytes).offset(offset).build(),
        (false, Some(i)) => {
            let entry = opcode::WriteFixed::new(FILE, pointer, bytes, i);
            entry.offset(offset).rw_flags(dsync).build()
        }
        (false, None) => {
            let entry = opcode::Write::new(FILE, pointer, bytes);
            entry.offset(offset).rw_flags(dsync).build()
        }
    }
}

/// Whether an error may be the only report of an earlier write that was lost. Without O_DIRECT a
/// write with FUA takes part in the write-back of the whole file and uses its report up.
fn is_lost_write(syncing: bool, op: Op, direct: bool) -> bool {
    syncing || op == Op::Flush || (op.fua() && !direct)
}

/// What an errno means for the initiator.
fn status_of(errno: i32) -> Status {
    match errno {
        libc::ENOSPC | libc::EDQUOT => Status::NoSpace,
        libc::EIO | libc::EREMOTEIO | libc::ENODATA | libc::EILSEQ | libc::EBADMSG => {
            Status::Medium
        }
        libc::EUCLEAN => Status::Medium,
        libc::EOPNOTSUPP | libc::ENOSYS | libc::ENODEV => Status::NotSupported,
        libc::EROFS | libc::EPERM | libc::EBADF => Status::ReadOnly,
        libc::EAGAIN | libc::EINTR | libc::EBUSY | libc::ENOMEM => Status::Busy,
        libc::ECANCELED => Status::Aborted,
        _ => Status::Io,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errnos_are_sorted_by_what_the_initiator_may_do() {
        assert_eq!(status_of(libc::ENOSPC), Status::NoSpace);
        assert_eq!(status_of(libc::EIO), Status::Medium);
        assert_eq!(status_of(libc::EOPNOTSUPP), Status::NotSupported);
        assert_eq!(status_of(libc::EAGAIN), Status::Busy);
        assert_eq!(status_of(libc::EINVAL), Status::Io);
    }

    #[test]
    fn only_a_report_of_lost_writes_poisons() {
        let fua = Op::Write { fua: true };
        assert!(is_lost_write(false, Op::Flush, true));
        assert!(is_lost_write(true, Op::WriteZeroes { unmap: false, fua: true }, true));
        assert!(is_lost_write(false, fua, false));
        assert!(!is_lost_write(false, fua, true));
        assert!(!is_lost_write(false, Op::Write { fua: false }, false));
        assert!(!is_lost_write(false, Op::Read, false));
    }
}
