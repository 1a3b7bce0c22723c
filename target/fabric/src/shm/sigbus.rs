//! SIGBUS survival: memory that a peer lent to us may lose its pages under our feet (truncation,
//! hugetlb hole punching, a memory error). The next access then raises SIGBUS, which would kill the
//! target.
//!
//! ```text
//!   access faults -> handler: address inside a watched range?
//!        yes: map zero pages over that page, poison the range, FAULTS += 1, retry the instruction
//!        no : whatever handled SIGBUS before us does
//! ```
//!
//! The table is fixed and lock-free: the handler only loads atomics and calls `mmap`, both
//! async-signal-safe. A slot belongs to the [`Watch`] that took it; the handler only sets
//! `poisoned`. Invariant: a watch ends before its range is unmapped, so no foreign mapping is ever
//! overwritten.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Once, OnceLock};

/// Ranges that can be watched at a time: 16 regions of 256 connections.
pub(crate) const SLOTS: usize = 4096;

/// Value of `start` while a slot is being filled; no mapping starts at address 1.
const RESERVED: usize = 1;

/// One watched range.
struct Slot {
    /// First address; 0 = free, 1 = being filled.
    start: AtomicUsize,
    /// End address, exclusive, a multiple of `page`.
    end: AtomicUsize,
    /// Page size of the mapping.
    page: AtomicUsize,
    /// The handler replaced a page of it.
    poisoned: AtomicBool,
}

static TABLE: [Slot; SLOTS] = [const {
    Slot {
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        page: AtomicUsize::new(0),
        poisoned: AtomicBool::new(false),
    }
}; SLOTS];

/// Slots at and above this index were never used.
static USED: AtomicUsize = AtomicUsize::new(0);

/// Pages replaced since start. Read on the I/O path after each remote copy; it changes only on a
/// fault.
static FAULTS: AtomicU32 = AtomicU32::new(0);

/// What handled SIGBUS before us.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// Pages replaced so far in this process.
#[inline]
pub(crate) fn faults() -> u32 {
    FAULTS.load(Ordering::Relaxed)
}

/// A watched range; ends when dropped. Drop it before the range is unmapped.
#[derive(Debug)]
pub(crate) struct Watch {
    /// Index into `TABLE`.
    slot: usize,
}

impl Watch {
    /// Watches `[start, start + len)`, a mapping of pages of `page` bytes; `None` = the table is
    /// full.
    pub(crate) fn new(start: usize, len: usize, page: usize) -> Option<Watch> {
        assert!(page.is_power_of_two());
        assert!(start.is_multiple_of(page) && start > RESERVED);
        install();
        for (slot, entry) in TABLE.iter().enumerate() {
            let free = entry.start.load(Ordering::Relaxed) == 0;
            let order = (Ordering::Acquire, Ordering::Relaxed);
            if free && entry.start.compare_exchange(0, RESERVED, order.0, order.1).is_ok() {
                entry.end.store(start + len.next_multiple_of(page), Ordering::Relaxed);
                entry.page.store(page, Ordering::Relaxed);
                entry.poisoned.store(false, Ordering::Relaxed);
                entry.start.store(start, Ordering::Release);
                USED.fetch_max(slot + 1, Ordering::Release);
                return Some(Watch { slot });
            }
        }
        None
    }

    /// A page of the range was lost and replaced.
    #[inline]
    pub(crate) fn is_poisoned(&self) -> bool {
        TABLE[self.slot].poisoned.load(Ordering::Relaxed)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let entry = &TABLE[self.slot];
        entry.end.store(0, Ordering::Relaxed);
        entry.start.store(0, Ordering::Release);
    }
}

/// Installs the handler, once per process.
fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: an all-zero sigaction is valid: no handler, empty mask, no flags.
        let mut old: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: the new action is null (query only), `old` is a valid place to write to.
        let rc = unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), &mut old) };
        assert!(rc == 0, "sigaction(SIGBUS) can be queried");
        PREVIOUS.set(old).unwrap_or_else(|_| unreachable!("set under Once"));
        // SAFETY: as above.
        let mut new: libc::sigaction = unsafe { std::mem::zeroed() };
        new.sa_sigaction = on_sigbus as *const () as usize;
        new.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: `on_sigbus` has the three-argument signature that SA_SIGINFO asks for.
        let rc = unsafe { libc::sigaction(libc::SIGBUS, &new, std::ptr::null_mut()) };
        assert!(rc == 0, "sigaction(SIGBUS) can be set");
    });
}

/// The handler. Async-signal-safe: atomics, `mmap`, `sigaction` only; errno is preserved.
extern "C" fn on_sigbus(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes a valid siginfo to an SA_SIGINFO handler; SIGBUS fills si_addr.
    let addr = unsafe { (*info).si_addr() } as usize;
    // SAFETY: __errno_location always returns this thread's errno.
    let errno = unsafe { *libc::__errno_location() };
    let mended = mend(addr);
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
    if !mended {
        chain(signal, info, context);
    }
}

/// Maps zeroes over the page of `addr` if it lies in a watched range.
fn mend(addr: usize) -> bool {
    for entry in &TABLE[..USED.load(Ordering::Acquire)] {
        let start = entry.start.load(Ordering::Acquire);
        let end = entry.end.load(Ordering::Relaxed);
        if start <= RESERVED || addr < start || addr >= end {
            continue;
        }
        let page = entry.page.load(Ordering::Relaxed);
        let at = (addr & !(page - 1)) as *mut c_void;
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: [at, at + page) lies inside the peer mapping of this slot, which stays mapped
        // while the slot is taken (Watch is dropped before the mapping); nothing holds a reference
        // into it.
        let got = unsafe { libc::mmap(at, page, prot, flags, -1, 0) };
        if got == libc::MAP_FAILED {
            return false;
        }
        entry.poisoned.store(true, Ordering::Relaxed);
        FAULTS.fetch_add(1, Ordering::Release);
        return true;
    }
    false
}

/// Not ours: calls the handler that was there before, or restores the default and faults again.
fn chain(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let Some(old) = PREVIOUS.get() else { return };
    let handler = old.sa_sigaction;
    if handler == libc::SIG_DFL || handler == libc::SIG_IGN {
        // SAFETY: an all-zero sigaction is SIG_DFL with an empty mask.
        let default: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: `default` is valid; on return the instruction faults again and ends the process.
        unsafe { libc::sigaction(signal, &default, std::ptr::null_mut()) };
    } else if old.sa_flags & libc::SA_SIGINFO != 0 {
        type Full = extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);
        // SAFETY: SA_SIGINFO says that the stored address is a function of this signature.
        let call = unsafe { std::mem::transmute::<usize, Full>(handler) };
        call(signal, info, context);
    } else {
        type Plain = extern "C" fn(c_int);
        // SAFETY: without SA_SIGINFO the stored address is a function of one argument.
        let call = unsafe { std::mem::transmute::<usize, Plain>(handler) };
        call(signal);
    }
}
