//! Raw copies between our memory and memory that a peer may change at the same time.
//!
//! Both ends are raw pointers: no Rust reference to shared memory ever exists. A racing peer can
//! only make the copied bytes arbitrary, and the copy is what we look at afterwards; nothing is
//! read from the source twice.

use std::ptr;

/// Copies `N` bytes through registers.
///
/// # Safety
/// `src` is readable and `dst` writable for `N` bytes; they do not overlap.
#[inline(always)]
unsafe fn fixed<const N: usize>(dst: *mut u8, src: *const u8) {
    // SAFETY: readable for N bytes by contract; [u8; N] has no alignment.
    let bytes = unsafe { ptr::read_unaligned(src.cast::<[u8; N]>()) };
    // SAFETY: writable for N bytes by contract.
    unsafe { ptr::write_unaligned(dst.cast::<[u8; N]>(), bytes) };
}

/// Copies `N` bytes at `at`, and `N` bytes that end at `len` (overlapping is fine: same source,
/// same bytes).
///
/// # Safety
/// As [`small`], and `N <= len <= 2 * N`.
#[inline(always)]
unsafe fn both_ends<const N: usize>(dst: *mut u8, src: *const u8, len: usize) {
    debug_assert!(N <= len && len <= 2 * N);
    // SAFETY: N <= len.
    unsafe { fixed::<N>(dst, src) };
    // SAFETY: len - N + N = len, inside both buffers.
    let (d, s) = unsafe { (dst.add(len - N), src.add(len - N)) };
    // SAFETY: N bytes remain behind both.
    unsafe { fixed::<N>(d, s) };
}

/// Copies `len <= 64` bytes without a call.
///
/// # Safety
/// `src` is readable and `dst` writable for `len` bytes; they do not overlap.
#[inline(always)]
pub(crate) unsafe fn small(dst: *mut u8, src: *const u8, len: usize) {
    debug_assert!(len <= 64);
    match len {
        // SAFETY: len within the bounds that `both_ends` asks for, buffers by contract.
        32.. => unsafe { both_ends::<32>(dst, src, len) },
        // SAFETY: as above.
        16..32 => unsafe { both_ends::<16>(dst, src, len) },
        // SAFETY: as above.
        8..16 => unsafe { both_ends::<8>(dst, src, len) },
        // SAFETY: as above.
        4..8 => unsafe { both_ends::<4>(dst, src, len) },
        // SAFETY: as above.
        2..4 => unsafe { both_ends::<2>(dst, src, len) },
        // SAFETY: one byte by contract.
        1 => unsafe { fixed::<1>(dst, src) },
        _ => {}
    }
}

/// Copies 16 bytes.
///
/// # Safety
/// As [`small`] with 16.
#[inline(always)]
pub(crate) unsafe fn copy16(dst: *mut u8, src: *const u8) {
    // SAFETY: the caller's contract.
    unsafe { fixed::<16>(dst, src) };
}

/// Copies any number of bytes; short ones without a call.
///
/// # Safety
/// `src` is readable and `dst` writable for `len` bytes; they do not overlap.
#[inline(always)]
pub(crate) unsafe fn any(dst: *mut u8, src: *const u8, len: usize) {
    if len <= 64 {
        // SAFETY: the caller's contract.
        unsafe { small(dst, src, len) };
    } else {
        // SAFETY: the caller's contract.
        unsafe { ptr::copy_nonoverlapping(src, dst, len) };
    }
}

/// Asks for a cache line; any address is fine, mapped or not.
#[inline(always)]
pub(crate) fn prefetch(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_length_is_copied_exactly() {
        let src: Vec<u8> = (0..200).map(|i| i as u8 + 1).collect();
        for len in 0..=130 {
            let mut dst = vec![0u8; 200];
            // SAFETY: both vectors hold 200 bytes.
            unsafe { super::any(dst.as_mut_ptr(), src.as_ptr(), len) };
            assert_eq!(dst[..len], src[..len]);
            assert!(dst[len..].iter().all(|b| *b == 0));
        }
    }
}
