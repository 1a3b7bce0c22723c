//! One contiguous mapping: the memory that pools are cut from and that devices and peers are shown.
//!
//! Owns the mapping (and the memfd of a shared one) and the claims of the pools on it. Never grows
//! or moves; lives as long as any `Arc` of it. Every page is written once at creation, so that
//! serving never faults one in.
//!
//! ```text
//!             require / prefer                      prefer, failed        never
//!   new    -> hugepage-rs alloc -> populate ok? --> mmap anon + mlock + THP advice
//!   shared -> memfd MFD_HUGETLB -> fallocate, map, populate ok? --> memfd, fallocate, map, mlock
//! ```
//! Invariants: `base` is aligned to the page of the backing; `len` is a multiple of it; claims
//! never overlap.

use std::alloc::Layout;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use memmap2::{Advice, MmapOptions, MmapRaw};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};

use super::huge::{HugePages, huge_pages};
use super::{CLAIM, PAGE, round_up};

/// What the configuration says about huge pages (`hugepages: require | prefer | never`).
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum HugePolicy {
    /// No huge pages is an error.
    Require,
    /// Huge pages if there are enough, else ordinary ones.
    #[default]
    Prefer,
    /// Ordinary pages.
    Never,
}

/// What an arena's memory is made of, for the log and the statistics.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Backing {
    /// Huge pages of `page` bytes.
    Huge {
        /// Bytes in one page.
        page: usize,
    },
    /// Ordinary pages.
    Ordinary {
        /// True when `mlock` succeeded: the pages stay in memory.
        locked: bool,
        /// Why there are no huge pages, and why the memory isn't locked if it isn't.
        why: String,
    },
}

/// Why an arena could not be had.
#[derive(Debug, thiserror::Error)]
pub enum MemError {
    /// An arena of no bytes, or more than half the address space.
    #[error("arena {name}: a size of {bytes} bytes can't be mapped")]
    Size {
        /// The arena's name.
        name: String,
        /// The size asked for.
        bytes: usize,
    },
    /// `hugepages: require`, but there are not enough.
    #[error("arena {name}: hugepages are required: {why}")]
    NoHugePages {
        /// The arena's name.
        name: String,
        /// Free, needed, page size and the command that mends it.
        why: String,
    },
    /// The kernel refused.
    #[error("arena {name}: {step} of {bytes} bytes failed: {source}")]
    Os {
        /// The arena's name.
        name: String,
        /// The call that failed.
        step: &'static str,
        /// The size asked for.
        bytes: usize,
        /// What the kernel said.
        source: io::Error,
    },
}

/// The mapping under an arena; dropping it unmaps.
enum Mapping {
    /// From hugepage-rs: given back with the same layout.
    Huge(HugeAlloc),
    /// From memmap2, anonymous or of a memfd.
    Map(MmapRaw),
}

/// A block of hugepage-rs memory. Its own `Box` is never used: it panics when there are no pages.
struct HugeAlloc {
    /// Start of the block; never null.
    base: *mut u8,
    /// What it was allocated with.
    layout: Layout,
}

impl HugeAlloc {
    fn new(bytes: usize, page: usize) -> Option<HugeAlloc> {
        assert!(bytes > 0);
        let layout = Layout::from_size_align(bytes, page).ok()?;
        // SAFETY: the layout's size is not zero (asserted above), all that `alloc` asks for.
        let base = unsafe { hugepage_rs::alloc(layout) };
        if base.is_null() { None } else { Some(HugeAlloc { base, layout }) }
    }
}

impl Drop for HugeAlloc {
    fn drop(&mut self) {
        // SAFETY: `base` came from `alloc` with this very layout (HugeAlloc::new) and is freed only
        // here.
        unsafe { hugepage_rs::dealloc(self.base, self.layout) }
    }
}

impl Mapping {
    fn base(&self) -> *mut u8 {
        match self {
            Mapping::Huge(huge) => huge.base,
            Mapping::Map(map) => map.as_mut_ptr(),
        }
    }

    /// Faults every page in by one call that reports a shortage instead of raising SIGBUS (a
    /// cgroup's limit, or hugetlb pages taken by others). Old kernels (before 5.14) don't know it:
    /// then the reservation has to do.
    fn populate(&self, bytes: usize) -> io::Result<()> {
        let base = self.base().cast();
        // SAFETY: `base..base+bytes` is the mapping that `self` owns; populating it changes no
        // content.
        let code = unsafe { libc::madvise(base, bytes, libc::MADV_POPULATE_WRITE) };
        match code {
            0 => Ok(()),
            _ => match io::Error::last_os_error() {
                error if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
                error => Err(error),
            },
        }
    }
}

/// One contiguous mapping, touched at creation; page aligned (2 MiB when huge). Shared by `Arc` and
/// read-only itself: its bytes belong to the pools that claimed them, or are copied in and out by
/// the raw copies below.
pub struct Arena {
    /// What it is for: appears in errors, the log and statistics.
    name: String,
    /// Start of the mapping; fixed.
    base: *mut u8,
    /// Bytes, a multiple of the page.
    len: usize,
    /// What the memory is made of.
    backing: Backing,
    /// The memfd of a shared arena, sealed against resizing.
    file: Option<File>,
    /// One bit per [`CLAIM`] bytes, set while a pool owns them. Made by the first claim: a malloc
    /// bdev never has one.
    claims: OnceLock<Box<[AtomicU64]>>,
    /// Keeps the memory mapped; never touched but by drop.
    _mapping: Mapping,
}

// SAFETY: `base` points into `_mapping`, which the arena owns and which no thread changes; access
// to the bytes is governed by claims (pools) or goes through raw copies that promise nothing about
// races.
unsafe impl Send for Arena {}
// SAFETY: as for Send; `&Arena` offers only raw copies, atomics (claims) and immutable fields.
unsafe impl Sync for Arena {}

impl Arena {
    /// Private memory of `bytes` (rounded up to the page), zeroed and touched.
    pub fn new(name: &str, bytes: usize, policy: HugePolicy) -> Result<Arc<Arena>, MemError> {
        check_size(name, bytes)?;
        let why = match policy {
            HugePolicy::Never => "hugepages: never".to_string(),
            HugePolicy::Require | HugePolicy::Prefer => match huge_private(bytes) {
                Ok((mapping, len, page)) => {
                    return Ok(Arena::finish(name, mapping, len, Backing::Huge { page }, None));
                }
                Err(why) => why,
            },
        };
        if policy == HugePolicy::Require {
            return Err(MemError::NoHugePages { name: name.to_string(), why });
        }
        let len = round_up(bytes, PAGE);
        let map = MmapOptions::new().len(len).map_anon();
        let map: MmapRaw = map.map_err(|source| os(name, "mmap", len, source))?.into();
        Arena::ordinary(name, map, len, why, None)
    }

    /// Memory that a peer process may map too: a memfd, sealed so that neither side can resize it
    /// (a truncated file would raise SIGBUS in the other). The bytes themselves may change at any
    /// time by the peer's hand.
    pub fn shared(name: &str, bytes: usize, policy: HugePolicy) -> Result<Arc<Arena>, MemError> {
        check_size(name, bytes)?;
        let why = match policy {
            HugePolicy::Never => "hugepages: never".to_string(),
            HugePolicy::Require | HugePolicy::Prefer => match huge_shared(name, bytes) {
                Ok((map, len, page, file)) => {
                    let backing = Backing::Huge { page };
                    return Ok(Arena::finish(name, Mapping::Map(map), len, backing, Some(file)));
                }
                Err(why) => why,
            },
        };
        if policy == HugePolicy::Require {
            return Err(MemError::NoHugePages { name: name.to_string(), why });
        }
        let len = round_up(bytes, PAGE);
        let made = shared_map(name, len, MemfdFlags::empty());
        let (map, file) = made.map_err(|(step, source)| os(name, step, len, source))?;
        Arena::ordinary(name, map, len, why, Some(file))
    }

    /// Locks and advises ordinary memory; a refusal of either only costs speed, so it is noted and
    /// no error.
    fn ordinary(
        name: &str,
        map: MmapRaw,
        len: usize,
        mut why: String,
        file: Option<File>,
    ) -> Result<Arc<Arena>, MemError> {
        // Advice first, so that the pages which locking faults in may be huge ones.
        if let Err(error) = map.advise(Advice::HugePage) {
            why.push_str(&format!("; no transparent huge pages: {error}"));
        }
        let locked = match map.lock() {
            Ok(()) => true,
            Err(error) => {
                why.push_str(&format!("; not locked in memory (ulimit -l): {error}"));
                false
            }
        };
        let mapping = Mapping::Map(map);
        mapping.populate(len).map_err(|source| os(name, "populate", len, source))?;
        tracing::info!(arena = name, bytes = len, locked, why, "ordinary pages");
        Ok(Arena::finish(name, mapping, len, Backing::Ordinary { locked, why }, file))
    }

    fn finish(
        name: &str,
        mapping: Mapping,
        len: usize,
        backing: Backing,
        file: Option<File>,
    ) -> Arc<Arena> {
        let base = mapping.base();
        assert!(!base.is_null());
        assert_eq!(base as usize % PAGE, 0, "mapping is not page aligned");
        assert_eq!(len % PAGE, 0, "mapping is not whole pages");
        // On new mappings only: writing a zero to each page keeps the content (zeroes) and makes
        // the page ours.
        for offset in (0..len).step_by(PAGE) {
            // SAFETY: `offset < len`, the size of the mapping that `base` starts.
            let page = unsafe { base.add(offset) };
            // SAFETY: `page` lies in the writable mapping that only this function knows yet.
            unsafe { page.write_volatile(0) };
        }
        let name = name.to_string();
        let claims = OnceLock::new();
        Arc::new(Arena { name, base, len, backing, file, claims, _mapping: mapping })
    }

    /// The memfd of a shared arena, to be sent to a peer.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(|file| file.as_fd())
    }

    /// What the arena is for.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Bytes, a multiple of the page; at least what was asked for.
    #[expect(clippy::len_without_is_empty, reason = "an arena is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Address of the first byte in this process.
    pub fn addr(&self) -> u64 {
        self.base as u64
    }

    /// What the memory is made of.
    pub fn backing(&self) -> &Backing {
        &self.backing
    }

    /// True when `addr..addr+len` lies inside.
    pub fn contains(&self, addr: u64, len: usize) -> bool {
        match addr.checked_sub(self.addr()) {
            Some(offset) => offset <= self.len as u64 && len as u64 <= self.len as u64 - offset,
            None => false,
        }
    }

    /// Copies `src` to `offset`. Raw: other cores may write or read the same bytes meanwhile, then
    /// bytes mix (SBC lets overlapping commands do so). Not for ranges of a pool whose owner reads
    /// them as slices at the same time.
    pub fn copy_in(&self, offset: usize, src: &[u8]) {
        let dst = self.at(offset, src.len());
        // SAFETY: `at` checked that `src.len()` bytes from `dst` lie in the mapping; `copy` allows
        // overlap, so `src` may itself be a `Buf` of this arena.
        unsafe { std::ptr::copy(src.as_ptr(), dst, src.len()) }
    }

    /// Copies from `offset` into `dst`; raw as [`Arena::copy_in`].
    pub fn copy_out(&self, offset: usize, dst: &mut [u8]) {
        let src = self.at(offset, dst.len());
        // SAFETY: `at` checked that `dst.len()` bytes from `src` lie in the mapping; `copy` allows
        // overlap.
        unsafe { std::ptr::copy(src, dst.as_mut_ptr(), dst.len()) }
    }

    /// Sets `len` bytes from `offset` to `byte`; raw as [`Arena::copy_in`].
    pub fn fill(&self, offset: usize, len: usize, byte: u8) {
        let dst = self.at(offset, len);
        // SAFETY: `at` checked that `len` bytes from `dst` lie in the mapping.
        unsafe { std::ptr::write_bytes(dst, byte, len) }
    }

    /// Compares with `other`: `None` when equal, else the offset (within `other`) of the first byte
    /// that differs.
    pub fn equals(&self, offset: usize, other: &[u8]) -> Option<usize> {
        let mine = self.at(offset, other.len());
        // SAFETY: `at` checked that `other.len()` bytes from `mine` lie in the mapping.
        let order = unsafe { libc::memcmp(mine.cast(), other.as_ptr().cast(), other.len()) };
        if order == 0 {
            return None;
        }
        (0..other.len()).find(|&i| {
            // SAFETY: `i < other.len()`, and `at` checked that many bytes from `mine`.
            let byte = unsafe { mine.add(i) };
            // SAFETY: `byte` lies in the mapping (line above), which is initialised since creation.
            (unsafe { byte.read_volatile() }) != other[i]
        })
    }

    /// Pointer to `offset`, with `len` bytes from there checked to be inside.
    pub(super) fn at(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(offset <= self.len, "offset {offset} outside arena {} ({})", self.name, self.len);
        assert!(
            len <= self.len - offset,
            "{len} bytes at {offset} outside arena {} ({})",
            self.name,
            self.len
        );
        // SAFETY: `offset <= len`, asserted above: the result lies in or one past the mapping.
        unsafe { self.base.add(offset) }
    }

    /// Marks a range as owned by one pool. Panics when any of it already is: two owners would alias
    /// slices.
    pub(super) fn claim(&self, offset: usize, bytes: usize) {
        assert_eq!(offset % CLAIM, 0, "a pool starts on a multiple of {CLAIM} bytes");
        let _ = self.at(offset, bytes);
        let bits = self.claims.get_or_init(|| {
            (0..self.len.div_ceil(CLAIM * 64)).map(|_| AtomicU64::new(0)).collect()
        });
        for_each_word(offset / CLAIM, (offset + bytes).div_ceil(CLAIM), |word, mask| {
            // AcqRel: who claims after a release sees all that the former owner wrote.
            let before = bits[word].fetch_or(mask, Ordering::AcqRel);
            assert_eq!(before & mask, 0, "two pools claim one range of arena {}", self.name);
        });
    }

    /// Ends a claim.
    pub(super) fn unclaim(&self, offset: usize, bytes: usize) {
        let bits = self.claims.get().expect("only a claimed range is unclaimed");
        for_each_word(offset / CLAIM, (offset + bytes).div_ceil(CLAIM), |word, mask| {
            let before = bits[word].fetch_and(!mask, Ordering::AcqRel);
            assert_eq!(before & mask, mask, "range of arena {} was not claimed", self.name);
        });
    }
}

/// Calls `f(word, mask)` for the 64-bit words that hold the bits `from..to`.
fn for_each_word(from: usize, to: usize, mut f: impl FnMut(usize, u64)) {
    let mut bit = from;
    while bit < to {
        let end = to.min((bit / 64 + 1) * 64);
        let mask = (u64::MAX >> (64 - (end - bit))) << (bit % 64);
        f(bit / 64, mask);
        bit = end;
    }
}

fn check_size(name: &str, bytes: usize) -> Result<(), MemError> {
    if bytes == 0 || bytes > isize::MAX as usize / 2 {
        return Err(MemError::Size { name: name.to_string(), bytes });
    }
    Ok(())
}

fn os(name: &str, step: &'static str, bytes: usize, source: io::Error) -> MemError {
    MemError::Os { name: name.to_string(), step, bytes, source }
}

/// Enough free huge pages? Asked first, for a clear reason; the allocation itself still decides.
fn free_huge_pages(bytes: usize) -> Result<HugePages, String> {
    let pages = huge_pages();
    if pages.page == 0 || pages.free < pages.needed(bytes) {
        return Err(pages.lack(bytes));
    }
    Ok(pages)
}

fn huge_private(bytes: usize) -> Result<(Mapping, usize, usize), String> {
    let pages = free_huge_pages(bytes)?;
    let len = round_up(bytes, pages.page);
    let huge = HugeAlloc::new(len, pages.page).ok_or_else(|| huge_pages().lack(bytes))?;
    let mapping = Mapping::Huge(huge);
    mapping.populate(len).map_err(|error| format!("huge pages could not be populated: {error}"))?;
    Ok((mapping, len, pages.page))
}

fn huge_shared(name: &str, bytes: usize) -> Result<(MmapRaw, usize, usize, File), String> {
    let pages = free_huge_pages(bytes)?;
    let len = round_up(bytes, pages.page);
    let made = shared_map(name, len, MemfdFlags::HUGETLB);
    let (map, file) = made.map_err(|(step, error)| format!("huge pages: {step}: {error}"))?;
    let mapping = Mapping::Map(map);
    mapping.populate(len).map_err(|error| format!("huge pages could not be populated: {error}"))?;
    match mapping {
        Mapping::Map(map) => Ok((map, len, pages.page, file)),
        Mapping::Huge(_) => unreachable!("made as a Map above"),
    }
}

/// A sealed memfd of `len` bytes with all its pages allocated, and its mapping.
fn shared_map(
    name: &str,
    len: usize,
    extra: MemfdFlags,
) -> Result<(MmapRaw, File), (&'static str, io::Error)> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | extra;
    let fd = rustix::fs::memfd_create(format!("usurp-{name}"), flags)
        .map_err(|e| ("memfd_create", e.into()))?;
    rustix::fs::ftruncate(&fd, len as u64).map_err(|e| ("ftruncate", e.into()))?;
    // Takes the pages now: a shortage is an error here and not a SIGBUS at the first touch.
    rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, len as u64)
        .map_err(|e| ("fallocate", e.into()))?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&fd, seals).map_err(|e| ("F_ADD_SEALS", e.into()))?;
    let file = File::from(fd);
    let map = MmapOptions::new().len(len).map_raw(&file).map_err(|e| ("mmap", e))?;
    Ok((map, file))
}

impl std::fmt::Debug for Arena {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Arena { name, len, backing, .. } = self;
        write!(f, "Arena {name}: {len} bytes, {backing:?}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEVER: HugePolicy = HugePolicy::Never;

    #[test]
    fn memory_is_zeroed_rounded_up_and_aligned() {
        let arena = Arena::new("test", 5000, NEVER).unwrap();
        assert_eq!((arena.len(), arena.addr() % 4096, arena.name()), (8192, 0, "test"));
        let mut all = vec![1; 8192];
        arena.copy_out(0, &mut all);
        assert!(all.iter().all(|&byte| byte == 0));
        assert!(arena.fd().is_none());
        let Backing::Ordinary { why, .. } = arena.backing() else { panic!("{arena:?}") };
        assert!(why.starts_with("hugepages: never"), "{why}");
    }

    #[test]
    fn bytes_are_copied_filled_and_compared() {
        let arena = Arena::new("test", 4096, NEVER).unwrap();
        arena.copy_in(10, b"usurp");
        let mut word = [0; 5];
        arena.copy_out(10, &mut word);
        assert_eq!(&word, b"usurp");
        assert_eq!(arena.equals(10, b"usurp"), None);
        assert_eq!(arena.equals(10, b"usuRp"), Some(3));
        arena.fill(4090, 6, 0xEE);
        assert_eq!(arena.equals(4089, &[0, 0xEE, 0xEE]), None);
        assert_eq!(arena.equals(4096, &[]), None);
    }

    #[test]
    fn contains_counts_to_the_last_byte() {
        let arena = Arena::new("test", 4096, NEVER).unwrap();
        let base = arena.addr();
        assert!(arena.contains(base, 4096) && arena.contains(base + 4096, 0));
        assert!(!arena.contains(base, 4097) && !arena.contains(base - 1, 1));
        assert!(!arena.contains(u64::MAX, usize::MAX));
    }

    #[test]
    #[should_panic(expected = "outside arena test")]
    fn a_copy_beyond_the_end_panics() {
        Arena::new("test", 4096, NEVER).unwrap().copy_in(4090, &[0; 7]);
    }

    #[test]
    #[should_panic(expected = "outside arena test")]
    fn an_offset_that_would_overflow_panics() {
        Arena::new("test", 4096, NEVER).unwrap().fill(usize::MAX, 2, 0);
    }

    #[test]
    fn impossible_sizes_are_errors() {
        for bytes in [0, usize::MAX] {
            assert!(matches!(Arena::new("x", bytes, NEVER), Err(MemError::Size { .. })));
            assert!(matches!(Arena::shared("x", bytes, NEVER), Err(MemError::Size { .. })));
        }
        // More than the machine can map: the kernel's refusal, not a crash.
        let error = Arena::new("x", 1 << 60, NEVER).unwrap_err();
        assert!(error.to_string().contains("arena x: mmap of"), "{error}");
    }

    #[test]
    fn a_shared_arena_is_seen_through_its_fd_and_can_not_be_resized() {
        let arena = Arena::shared("test", 10_000, NEVER).unwrap();
        let fd = arena.fd().unwrap().try_clone_to_owned().unwrap();
        let map = MmapOptions::new().len(arena.len()).map_raw(&File::from(fd)).unwrap();
        arena.copy_in(8192, b"seen");
        // SAFETY: 8192 < 12288, the length of `map`.
        let at = unsafe { map.as_ptr().add(8192) };
        // SAFETY: four bytes from 8192 lie in `map`, and nobody writes them now.
        assert_eq!(unsafe { std::slice::from_raw_parts(at, 4) }, b"seen");
        let fd = arena.fd().unwrap();
        for len in [0, 4096, 1 << 20] {
            assert_eq!(rustix::fs::ftruncate(fd, len), Err(rustix::io::Errno::PERM));
        }
        let more = rustix::fs::fcntl_add_seals(fd, SealFlags::WRITE);
        assert_eq!(more, Err(rustix::io::Errno::PERM));
    }

    #[test]
    fn required_hugepages_that_are_lacking_are_a_clear_error() {
        // More than any machine that runs tests has free.
        let bytes = (huge_pages().free + 1) * huge_pages().page.max(1) + 1;
        for error in [
            Arena::new("ring", bytes, HugePolicy::Require).unwrap_err().to_string(),
            Arena::shared("ring", bytes, HugePolicy::Require).unwrap_err().to_string(),
        ] {
            assert!(error.starts_with("arena ring: hugepages are required: "), "{error}");
            assert!(
                huge_pages().page == 0 || error.contains("> /proc/sys/vm/nr_hugepages"),
                "{error}"
            );
        }
    }

    #[test]
    fn preferred_hugepages_that_are_lacking_fall_back_and_say_why() {
        if huge_pages().free > 0 {
            return println!("skipped: this machine has free huge pages");
        }
        for arena in [
            Arena::new("test", 4096, HugePolicy::Prefer).unwrap(),
            Arena::shared("test", 4096, HugePolicy::Prefer).unwrap(),
        ] {
            let Backing::Ordinary { why, .. } = arena.backing() else { panic!("{arena:?}") };
            assert!(why.contains("huge pages"), "{why}");
        }
    }

    #[test]
    fn hugepages_are_used_when_there_are_some() {
        let pages = huge_pages();
        if pages.free < 2 {
            return println!("skipped: /proc/sys/vm/nr_hugepages leaves no 2 free pages here");
        }
        for arena in [
            Arena::new("test", 4096, HugePolicy::Require).unwrap(),
            Arena::shared("test", 4096, HugePolicy::Require).unwrap(),
        ] {
            assert_eq!(arena.backing(), &Backing::Huge { page: pages.page });
            assert_eq!(arena.len(), pages.page);
            assert_eq!(arena.addr() % pages.page as u64, 0);
            arena.fill(0, arena.len(), 1);
            assert_eq!(arena.equals(arena.len() - 1, &[1]), None);
        }
    }

    #[test]
    fn claims_cover_words_exactly() {
        let mut seen = Vec::new();
        for_each_word(60, 130, |word, mask| seen.push((word, mask)));
        assert_eq!(seen, [(0, 0xF << 60), (1, u64::MAX), (2, 0b11)]);
        for_each_word(5, 5, |_, _| panic!("no bits"));
    }
}
