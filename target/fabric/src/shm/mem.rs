//! Memory of a connection: the ring file (made by the target) and the regions that the initiator
//! lends.
//!
//! ```text
//!  ring file                                            who writes       who reads
//!    0     consumed position of initiator -> target     target           initiator
//!    64    target's queue pair is closed                target           initiator
//!    128   consumed position of target -> initiator     initiator        target
//!    192   initiator's queue pair is closed             initiator        target
//!    4096              ring initiator -> target         initiator        target
//!    4096 + size       ring target -> initiator         target           initiator
//! ```
//!
//! The ring file is sealed against any change of size, so it cannot fault. A region must be sealed
//! against shrinking; what can still take its pages is caught by `sigbus`. Mapping and unmapping
//! happen on the control thread only.

use super::ring::{Rx, Tx, UNIT};
use super::sigbus::Watch;
use super::wire::RegionDesc;
use crate::FabricError;
use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, SealFlags};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};
use usurp_reactor::mem::Arena;

/// Where the rings start.
const RINGS_AT: usize = 4096;
/// Regions of one connection.
pub const REGIONS_MAX: usize = 16;
/// The target may write to the region.
pub const ACCESS_REMOTE_WRITE: u32 = 1;
/// The target may read from the region.
pub const ACCESS_REMOTE_READ: u32 = 2;

/// Which end of a connection we are.
#[derive(Copy, Clone, Eq, PartialEq, Debug)]
pub(crate) enum Role {
    /// Accepted the connection; may READ and WRITE the peer's regions.
    Target,
    /// Made the connection; sends and receives only.
    Initiator,
}

/// The mapped ring file.
#[derive(Debug)]
pub(crate) struct RingMem {
    /// Its mapping.
    map: MmapRaw,
    /// Bytes of each ring.
    ring_bytes: usize,
}

impl RingMem {
    /// Creates the file and maps it (target).
    pub(crate) fn create(ring_bytes: usize) -> Result<(RingMem, OwnedFd), FabricError> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("usurp-ring", flags)
            .map_err(|e| FabricError::os("memfd for the rings", e))?;
        let bytes = RINGS_AT + 2 * ring_bytes;
        rustix::fs::ftruncate(&fd, bytes as u64)
            .map_err(|e| FabricError::os("size of the rings", e))?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&fd, seals)
            .map_err(|e| FabricError::os("seals of the rings", e))?;
        let map = MmapOptions::new().len(bytes).populate().map_raw(&fd);
        let map = map.map_err(|e| FabricError::os("mapping the rings", e))?;
        Ok((RingMem { map, ring_bytes }, fd))
    }

    /// Maps the file that the target sent (initiator).
    pub(crate) fn open(fd: &OwnedFd, ring_bytes: usize) -> Result<RingMem, FabricError> {
        let fits = ring_bytes.is_power_of_two() && (4 * UNIT..=1 << 30).contains(&ring_bytes);
        if !fits {
            return Err(FabricError::Invalid(format!(
                "rings of {ring_bytes} bytes are not usable"
            )));
        }
        let bytes = RINGS_AT + 2 * ring_bytes;
        check_file(fd, bytes as u64, "the rings", true).map_err(FabricError::Invalid)?;
        let map = MmapOptions::new().len(bytes).populate().map_raw(fd);
        let map = map.map_err(|e| FabricError::os("mapping the rings", e))?;
        Ok(RingMem { map, ring_bytes })
    }

    /// A place inside the mapping.
    fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset < self.map.len());
        // SAFETY: offset < length of the mapping, asserted above.
        unsafe { self.map.as_mut_ptr().add(offset) }
    }

    /// Both ends of the rings for this role. They point into the mapping: keep `self` while they
    /// live.
    pub(crate) fn ends(&self, role: Role) -> (Tx, Rx) {
        let size = self.ring_bytes;
        let (i_to_t, t_to_i) = (self.at(RINGS_AT), self.at(RINGS_AT + size));
        let (by_target, by_initiator): (*const AtomicU64, *const AtomicU64) =
            (self.at(0).cast(), self.at(128).cast());
        let (tx, rx) = match role {
            Role::Target => ((t_to_i, by_initiator), (i_to_t, by_target)),
            Role::Initiator => ((i_to_t, by_target), (t_to_i, by_initiator)),
        };
        // SAFETY: page-aligned, `size` bytes inside the mapping (its length is RINGS_AT + 2 *
        // size), zeroed at creation; the caller keeps the mapping.
        let tx = unsafe { Tx::new(tx.0, size, tx.1) };
        // SAFETY: as above.
        let rx = unsafe { Rx::new(rx.0, size, rx.1) };
        (tx, rx)
    }

    /// Our own and the peer's closed flag.
    pub(crate) fn closed(&self, role: Role) -> (&AtomicU32, &AtomicU32) {
        // SAFETY: offset 64 of a page-aligned mapping of more than 4096 bytes; only accessed
        // atomically.
        let target = unsafe { AtomicU32::from_ptr(self.at(64).cast()) };
        // SAFETY: as above, offset 192.
        let initiator = unsafe { AtomicU32::from_ptr(self.at(192).cast()) };
        match role {
            Role::Target => (target, initiator),
            Role::Initiator => (initiator, target),
        }
    }

    /// Bytes of each ring.
    pub(crate) fn ring_bytes(&self) -> usize {
        self.ring_bytes
    }
}

/// A region of the peer, mapped here.
#[derive(Debug)]
pub(crate) struct PeerMap {
    /// What the peer said about it; checked.
    pub(crate) desc: RegionDesc,
    /// Guards against SIGBUS; declared before `map`, because it must end before the memory is
    /// unmapped.
    pub(crate) watch: Watch,
    /// The mapping, `desc.len` bytes rounded up to whole pages.
    map: MmapRaw,
}

impl PeerMap {
    /// Maps a region; the error text goes to the peer.
    pub(crate) fn new(desc: RegionDesc, fd: &OwnedFd, need_seal: bool) -> Result<PeerMap, String> {
        let name = format!("region {:#x}", desc.rkey);
        if desc.len == 0 || desc.va.checked_add(desc.len).is_none() {
            return Err(format!("{name}: address {:#x} + {} bytes", desc.va, desc.len));
        }
        check_file(fd, desc.len, &name, need_seal)?;
        let stat = rustix::fs::fstat(fd).map_err(|e| format!("{name}: fstat: {e}"))?;
        let page = page_size(fd).map_err(|e| format!("{name}: fstatfs: {e}"))?;
        // A mapping of huge pages can be unmapped in whole pages only.
        let len = usize::try_from(desc.len).ok().and_then(|n| n.checked_next_multiple_of(page));
        let len = len.ok_or_else(|| format!("{name}: too long"))?;
        let mut options = MmapOptions::new();
        options.len(len);
        // Fault it in now rather than on the I/O path, unless we would allocate for the peer.
        if (stat.st_blocks as u64).saturating_mul(512) >= desc.len {
            options.populate();
        }
        let writable = desc.access & ACCESS_REMOTE_WRITE != 0;
        let map = if writable { options.map_raw(fd) } else { options.map_raw_read_only(fd) };
        let map = map.map_err(|e| format!("{name}: mmap: {e}"))?;
        let watch = Watch::new(map.as_ptr() as usize, len, page)
            .ok_or_else(|| format!("{name}: too many regions in all"))?;
        Ok(PeerMap { desc, watch, map })
    }

    /// First byte.
    pub(crate) fn base(&self) -> *mut u8 {
        self.map.as_mut_ptr()
    }
}

/// Page size of a memory file. (`st_blksize` would not do: it is large for transparent huge pages
/// too, whose mappings are not aligned to it.)
fn page_size(fd: &OwnedFd) -> Result<usize, rustix::io::Errno> {
    const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;
    let fs = rustix::fs::fstatfs(fd)?;
    let huge = fs.f_type as u64 == HUGETLBFS_MAGIC;
    let page = if huge { fs.f_bsize as usize } else { rustix::param::page_size() };
    assert!(page.is_power_of_two(), "the kernel's page sizes are powers of two");
    Ok(page)
}

/// A memory file of at least `bytes` bytes that cannot shrink.
fn check_file(fd: &OwnedFd, bytes: u64, name: &str, need_seal: bool) -> Result<(), String> {
    let seals = rustix::fs::fcntl_get_seals(fd).map_err(|_| format!("{name}: not a memfd"))?;
    if need_seal && !seals.contains(SealFlags::SHRINK) {
        return Err(format!("{name}: the memfd lacks F_SEAL_SHRINK"));
    }
    let stat = rustix::fs::fstat(fd).map_err(|e| format!("{name}: fstat: {e}"))?;
    let size = stat.st_size as u64;
    if size < bytes {
        return Err(format!("{name}: the memfd has {size} bytes, {bytes} are needed"));
    }
    Ok(())
}

/// Memory that an initiator lends to the target. Add all arenas before connecting.
#[derive(Clone, Debug, Default)]
pub struct Regions {
    /// Arena and description of each; the index is the low byte of the rkey.
    pub(crate) list: Vec<(Arc<Arena>, RegionDesc)>,
}

impl Regions {
    /// None yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Lends an arena for reading and writing; returns its rkey. The remote address of a byte is
    /// its address in this process. Panics unless the arena is shared (`Arena::shared`), and at the
    /// 17th.
    pub fn add(&mut self, arena: &Arc<Arena>) -> u32 {
        self.add_with(arena, ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ)
    }

    /// Lends an arena with these access rights (`ACCESS_REMOTE_WRITE`, `ACCESS_REMOTE_READ`).
    pub fn add_with(&mut self, arena: &Arc<Arena>, access: u32) -> u32 {
        assert!(arena.fd().is_some(), "only a shared arena can be lent");
        assert!(self.list.len() < REGIONS_MAX, "at most {REGIONS_MAX} regions");
        let rkey = (salt() & 0xffff_ff00) | self.list.len() as u32;
        let (va, len) = (arena.addr(), arena.len() as u64);
        self.list.push((arena.clone(), RegionDesc { rkey, access, va, len }));
        rkey
    }
}

/// Some unpredictable bits, so that a stale key does not fit by chance.
fn salt() -> u32 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(0u8) as u32
}
