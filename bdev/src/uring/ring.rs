//! One io_uring: set-up, registration, submission, completion.
//!
//! Owns: the ring, the registered file and buffers. Never does: know what an entry is for.
//! Invariants: entries pushed and not consumed never exceed the ring, because at most `entries`
//! I/Os are in flight, each with one entry; so a push never fails and the CQ (twice as long) never
//! overflows. Used on one thread only, the one that made it.
//!
//! ```text
//!  push -> SQ (memory) ..enter: one syscall per turn..> kernel -> CQ (memory) -> pop
//!                                   ^ also when the kernel raises IORING_SQ_TASKRUN: with
//!                                     DEFER_TASKRUN it hands completions over only then
//! ```
//! DEFER_TASKRUN with the flag is the choice because completions then run on this thread, when it
//! asks, in batches, with no interrupt of the spinning reactor; without work the turn reads one
//! word. Older kernels: COOP_TASKRUN (5.19), then plain.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use io_uring::{EnterFlags, IoUring, cqueue, squeue};
use usurp_reactor::mem::Arena;

use crate::contract::BdevError;

/// The kernel takes at most 1 GiB per registered buffer.
const FIXED_SHIFT: u32 = 30;

/// The most entries that the kernel takes (IORING_MAX_ENTRIES).
pub const ENTRIES_MAX: u32 = 32768;

/// A ring with one file.
pub struct Ring {
    /// The ring; first, so that it closes before the arena that it has registered is unmapped.
    ring: IoUring,
    /// The arena registered as fixed buffers, if any: buffer i is its i-th GiB.
    fixed: Option<Arc<Arena>>,
    /// Entries pushed since the last `enter` that took them all.
    pending: u32,
    /// Whether the device is polled: then every turn with I/O in flight enters.
    iopoll: bool,
}

/// Checks that io_uring can be used at all, for an error in the control thread.
pub fn probe() -> Result<(), BdevError> {
    IoUring::new(2).map(|_| ()).map_err(|error| unavailable(&error))
}

fn unavailable(error: &io::Error) -> BdevError {
    let hint = match error.raw_os_error() {
        Some(libc::ENOSYS) => "the kernel was built without it, or a seccomp filter hides it",
        Some(libc::EPERM) => {
            "`sysctl kernel.io_uring_disabled` must be 0 (or 1, for root), and a container's \
             seccomp profile must allow io_uring_setup, _enter and _register"
        }
        Some(libc::ENOMEM) => "raise the limit of locked memory: `ulimit -l`",
        _ => "",
    };
    BdevError::new("uring", format!("io_uring is not available: {error}"), hint)
}

/// Makes a ring with the best flags that the kernel takes.
fn build(entries: u32, iopoll: bool) -> io::Result<IoUring> {
    let mut last = None;
    for level in 0..3 {
        let mut builder = IoUring::builder();
        builder.setup_clamp();
        if level == 0 {
            builder.setup_single_issuer().setup_defer_taskrun();
        }
        if level == 1 {
            builder.setup_coop_taskrun();
        }
        if level < 2 {
            builder.setup_taskrun_flag().setup_submit_all();
        }
        if iopoll {
            builder.setup_iopoll();
        }
        match builder.build(entries) {
            Ok(ring) => return Ok(ring),
            // A kernel that does not know a flag says EINVAL.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => last = Some(error),
            Err(error) => return Err(error),
        }
    }
    Err(last.expect("three attempts failed"))
}

impl Ring {
    /// A ring for `entries` I/Os on `file`, with `data` registered if the kernel lets us.
    pub fn new(
        name: &str,
        entries: u32,
        file: &File,
        data: Option<&Arc<Arena>>,
        iopoll: bool,
    ) -> Result<Ring, BdevError> {
        assert!(entries > 0 && entries <= ENTRIES_MAX, "a ring of {entries}");
        let ring = build(entries, iopoll).map_err(|error| unavailable(&error))?;
        ring.submitter().register_files(&[file.as_raw_fd()]).map_err(|error| {
            BdevError::new("uring", format!("can't register the file: {error}"), "")
        })?;
        let fixed = data.filter(|arena| is_registered(name, &ring, arena)).cloned();
        assert!(ring.params().sq_entries() >= entries, "the kernel clamped the ring");
        Ok(Ring { ring, fixed, pending: 0, iopoll })
    }

    /// The index of the registered buffer that holds `[addr, addr + len)`.
    pub fn fixed_index(&self, addr: u64, len: u32) -> Option<u16> {
        let arena = self.fixed.as_ref()?;
        let offset = addr.checked_sub(arena.addr())?;
        let end = offset.checked_add(u64::from(len))?;
        if len == 0 || end > arena.len() as u64 {
            return None;
        }
        let (first, last) = (offset >> FIXED_SHIFT, (end - 1) >> FIXED_SHIFT);
        if first == last { u16::try_from(first).ok() } else { None }
    }

    /// Queues an entry for the next `enter`.
    ///
    /// # Safety
    /// The memory that the entry names must stay valid, and untouched by others, until `pop`
    /// has returned the entry's completion.
    pub unsafe fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: our caller keeps the entry's memory valid until it completes.
        let pushed = unsafe { self.ring.submission().push(entry) };
        pushed.expect("at most as many I/Os in flight as the ring has entries");
        self.pending += 1;
    }

    /// Hands entries to the kernel and takes completions from it, if there is cause: at most one
    /// syscall.
    pub fn enter(&mut self, in_flight: u32) {
        let kernel_waits = {
            let queue = self.ring.submission();
            queue.taskrun() || queue.cq_overflow()
        };
        if self.pending == 0 && !kernel_waits && !(self.iopoll && in_flight > 0) {
            return;
        }
        let submitter = self.ring.submitter();
        let flags = EnterFlags::GETEVENTS.bits();
        // SAFETY: no argument is passed; the entries' memory is the concern of `push`.
        let result = unsafe { submitter.enter::<()>(self.pending, 0, flags, None) };
        match result {
            Ok(taken) => {
                let taken = u32::try_from(taken).expect("at most pending");
                self.pending = self.pending.checked_sub(taken).expect("took what was not pushed");
            }
            // A shortage of the kernel's, or a signal: the entries stay queued for the next turn.
            Err(error) => match error.raw_os_error() {
                Some(libc::EINTR | libc::EAGAIN | libc::EBUSY | libc::ENOMEM) => {}
                _ => panic!("io_uring_enter: {error}"),
            },
        }
    }

    /// Waits for a completion; for tear-down only.
    pub fn wait(&mut self) {
        let _ = self.ring.submit_and_wait(1);
        self.pending = 0;
    }

    /// Takes the next completion: the entry's user data, and the result.
    pub fn pop(&mut self) -> Option<(u64, i32)> {
        let entry: cqueue::Entry = self.ring.completion().next()?;
        Some((entry.user_data(), entry.result()))
    }

    /// Whether buffers are registered.
    pub fn is_fixed(&self) -> bool {
        self.fixed.is_some()
    }
}

/// Registers the arena. False, with a log line, if the kernel refuses.
fn is_registered(name: &str, ring: &IoUring, arena: &Arena) -> bool {
    let piece = 1u64 << FIXED_SHIFT;
    let pieces = (arena.len() as u64).div_ceil(piece);
    let vectors: Vec<libc::iovec> = (0..pieces)
        .map(|index| {
            let start = index * piece;
            libc::iovec {
                iov_base: (arena.addr() + start) as *mut libc::c_void,
                iov_len: (arena.len() as u64 - start).min(piece) as usize,
            }
        })
        .collect();
    // SAFETY: the vectors lie inside the arena's mapping, which `Ring::fixed` keeps alive for as
    // long as the ring.
    match unsafe { ring.submitter().register_buffers(&vectors) } {
        Ok(()) => true,
        Err(error) => {
            tracing::info!(
                bdev = name, arena = arena.name(), %error,
                "buffers are not registered: plain reads and writes (see `ulimit -l`)"
            );
            false
        }
    }
}
