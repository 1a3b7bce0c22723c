//! An allocator that counts while its thread is frozen: what `tests/no_alloc` proves with.
//!
//! Owns the only `unsafe` of the tests. Passes everything on to the system's allocator; the first
//! call while frozen prints where it came from.

#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::backtrace::Backtrace;
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

/// Make it `#[global_allocator]` of the test.
pub struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
static FREES: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// Constant and without a destructor, so that looking at it never allocates.
    static FROZEN: Cell<bool> = const { Cell::new(false) };
}

/// Counts what this thread allocates and frees during `work`.
pub fn frozen(work: impl FnOnce()) -> (u64, u64) {
    let before = (ALLOCATIONS.load(Ordering::Relaxed), FREES.load(Ordering::Relaxed));
    FROZEN.set(true);
    work();
    FROZEN.set(false);
    let after = (ALLOCATIONS.load(Ordering::Relaxed), FREES.load(Ordering::Relaxed));
    (after.0 - before.0, after.1 - before.1)
}

fn count(counter: &AtomicU64, what: &str) {
    if !FROZEN.try_with(Cell::get).unwrap_or(false) {
        return;
    }
    if counter.fetch_add(1, Ordering::Relaxed) == 0 {
        // Printing allocates too, and must not be counted.
        FROZEN.set(false);
        eprintln!("the first {what} while frozen:\n{}", Backtrace::force_capture());
        FROZEN.set(true);
    }
}

// SAFETY: every method passes its arguments unchanged to `System`, which keeps GlobalAlloc's
// contract, and returns its result; counting neither unwinds nor touches the memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(&ALLOCATIONS, "allocation");
        // SAFETY: the caller keeps `alloc`'s contract (a layout of non-zero size), passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count(&FREES, "free");
        // SAFETY: the caller got `ptr` from this allocator, that is from `System`, with `layout`.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count(&ALLOCATIONS, "allocation");
        // SAFETY: the caller keeps `realloc`'s contract; `ptr` came from `System` with `layout`.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}
