//! Opening a file or block device so that it is safe to serve.
//!
//! Owns: the checks before and after opening, the locks, creation, and the geometry.
//! Never does: I/O to the data, or change an existing file. No unsafe in here.
//!
//! ```text
//!  look (kind of file) -> create? -> open (O_DIRECT, O_EXCL) -> claim (process) -> flock -> size
//! ```

use std::fs::{File, FileType, Metadata, OpenOptions};
use std::io::{ErrorKind, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, FallocateFlags, FlockOperation, StatxFlags};
use rustix::io::Errno;

use super::{Disk, Options};
use crate::contract::{BdevError, Geometry};
use crate::options;
use crate::registry::{FileId, OpenContext};

/// udev takes a block device's lock for a moment when it looks at it; wait that long for a lock.
const LOCK_WAIT: Duration = Duration::from_millis(500);

/// The key that most errors are about.
const PATH: &str = "uring.path";

/// What is served.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    File,
    Device,
}

/// Opens, locks and measures.
pub(super) fn open(
    name: &str,
    options: &Options,
    context: &mut OpenContext<'_>,
) -> Result<Disk, BdevError> {
    let path = options.path.as_path();
    let kind = look_or_create(options)?;
    let (file, direct) = open_file(name, options, kind)?;
    let meta = file.metadata().map_err(|e| os_error(path, "can't look at", &e))?;
    if kind_of(path, meta.file_type())? != kind {
        return Err(BdevError::new(PATH, format!("{} was replaced meanwhile", path.display()), ""));
    }
    context.claim_file(PATH, file_id(&meta, kind))?;
    lock(&file, path, options.read_only)?;
    if options.iopoll {
        check_polled(&meta, kind)?;
    }
    let (geometry, mem_align) = measure(&file, &meta, options, kind, direct)?;
    let unmap = match kind {
        Kind::File => !options.read_only && punches_holes(&file, geometry.size_bytes()),
        Kind::Device => sysfs(meta.rdev(), "write_zeroes_max_bytes").is_some_and(|bytes| bytes > 0),
    };
    let flush_failed = AtomicBool::new(false);
    Ok(Disk { file, geometry, direct, mem_align, unmap, flush_failed })
}

/// An operating system's error about the path.
fn os_error(path: &Path, what: &str, error: &std::io::Error) -> BdevError {
    let hint = match error.kind() {
        ErrorKind::PermissionDenied => "the target's user needs read and write permission",
        ErrorKind::ReadOnlyFilesystem => "`read_only: true` serves it without writing",
        _ => "",
    };
    BdevError::new(PATH, format!("{what} {}: {error}", path.display()), hint)
}

/// File or device; anything else is refused before it is opened, since opening may block (a FIFO).
fn kind_of(path: &Path, kind: FileType) -> Result<Kind, BdevError> {
    let what = if kind.is_file() {
        return Ok(Kind::File);
    } else if kind.is_block_device() {
        return Ok(Kind::Device);
    } else if kind.is_dir() {
        "a directory"
    } else if kind.is_char_device() {
        "a character device"
    } else if kind.is_fifo() {
        "a FIFO"
    } else {
        "neither a file nor a block device"
    };
    Err(BdevError::new(
        PATH,
        format!("{} is {what}", path.display()),
        "a regular file or a block device",
    ))
}

/// What the path leads to; makes the file if it leads nowhere and `create` says so.
fn look_or_create(options: &Options) -> Result<Kind, BdevError> {
    let path = options.path.as_path();
    let missing = match std::fs::metadata(path) {
        Ok(meta) => return kind_of(path, meta.file_type()),
        Err(error) if error.kind() == ErrorKind::NotFound => error,
        Err(error) => return Err(os_error(path, "can't look at", &error)),
    };
    let (true, Some(size)) = (options.create, options.size) else {
        let hint = format!(
            "`truncate -s 1G {}` makes a sparse one, as do `create: true, size: 1GiB`",
            path.display()
        );
        return Err(BdevError::new(PATH, format!("{}: {missing}", path.display()), hint));
    };
    let create = || {
        // `create_new`: if another process is faster, its file is not ours to size.
        let file = OpenOptions::new().write(true).create_new(true).open(path)?;
        file.set_len(size.0)?;
        file.sync_all()
    };
    create().map_err(|e| os_error(path, "can't create", &e))?;
    Ok(Kind::File)
}

/// Opens it, with O_DIRECT if that is wanted and possible. Gives whether it is on.
fn open_file(name: &str, options: &Options, kind: Kind) -> Result<(File, bool), BdevError> {
    let path = options.path.as_path();
    // On a block device O_EXCL without O_CREAT means: nobody else may have it so, no mount either.
    let excl = if kind == Kind::Device && !options.read_only { libc::O_EXCL } else { 0 };
    // Not O_NONBLOCK, which would make io_uring say EAGAIN where it has to wait.
    let attempt = |direct: bool| {
        let direct = if direct { libc::O_DIRECT } else { 0 };
        OpenOptions::new()
            .read(true)
            .write(!options.read_only)
            .custom_flags(excl | direct)
            .open(path)
    };
    let result = match attempt(options.direct) {
        Err(error) if options.direct && error.raw_os_error() == Some(libc::EINVAL) => {
            if options.iopoll {
                let message = format!("{}: the file system has no O_DIRECT", path.display());
                return Err(BdevError::new("uring.iopoll", message, "leave `iopoll` away"));
            }
            let file = attempt(false);
            if file.is_ok() {
                tracing::warn!(
                    bdev = name, path = %path.display(),
                    "the file system has no O_DIRECT: going through the page cache \
                     (`direct: false` says that this is meant)"
                );
            }
            file.map(|file| (file, false))
        }
        other => other.map(|file| (file, options.direct)),
    };
    result.map_err(|error| match error.raw_os_error() {
        Some(libc::EBUSY) => BdevError::new(
            PATH,
            format!("{} is already in use: mounted, or held by another process", path.display()),
            format!("`lsblk {0}` and `fuser -v {0}` tell by whom", path.display()),
        )
        .busy(),
        _ => os_error(path, "can't open", &error),
    })
}

fn file_id(meta: &Metadata, kind: Kind) -> FileId {
    match kind {
        Kind::File => FileId::Inode { dev: meta.dev(), ino: meta.ino() },
        Kind::Device => FileId::Device { rdev: meta.rdev() },
    }
}

/// Locks the file against other processes for as long as it is open.
fn lock(file: &File, path: &Path, read_only: bool) -> Result<(), BdevError> {
    let operation = if read_only {
        FlockOperation::NonBlockingLockShared
    } else {
        FlockOperation::NonBlockingLockExclusive
    };
    let start = Instant::now();
    loop {
        match rustix::fs::flock(file, operation) {
            Ok(()) => return Ok(()),
            Err(Errno::WOULDBLOCK) if start.elapsed() < LOCK_WAIT => {
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(Errno::INTR) => {}
            Err(Errno::WOULDBLOCK) => {
                return Err(BdevError::new(
                    PATH,
                    format!("{} is already in use by another process", path.display()),
                    format!("`fuser -v {}` tells by which", path.display()),
                )
                .busy());
            }
            Err(error) => return Err(os_error(path, "can't lock", &error.into())),
        }
    }
}

/// Refuses polling where the device, or the file system's, is known to have no poll queues. If it
/// is not known (btrfs), the probing read in `queue.rs` has to do, which a hole would pass.
fn check_polled(meta: &Metadata, kind: Kind) -> Result<(), BdevError> {
    let device = if kind == Kind::Device { meta.rdev() } else { meta.dev() };
    if sysfs(device, "io_poll") == Some(0) { Err(super::no_poll("")) } else { Ok(()) }
}

/// Size and shape, and the alignment that O_DIRECT asks of buffers.
fn measure(
    mut file: &File,
    meta: &Metadata,
    options: &Options,
    kind: Kind,
    direct: bool,
) -> Result<(Geometry, u32), BdevError> {
    let path = options.path.as_path();
    let io = |what: &'static str| move |e: std::io::Error| os_error(path, what, &e);
    let bytes = file.seek(SeekFrom::End(0)).map_err(io("can't find the size of"))?;
    let (unit, physical) = match kind {
        Kind::File => (512, meta.blksize().min(4096) as u32),
        Kind::Device => {
            let logical = rustix::fs::ioctl_blksszget(file);
            let physical = rustix::fs::ioctl_blkpbszget(file);
            let logical = logical.map_err(|e| io("can't ask the block size of")(e.into()))?;
            (logical, physical.unwrap_or(logical))
        }
    };
    let (mem_align, io_align) = if direct { direct_alignment(file, unit) } else { (1, unit) };
    let block_size = options.block_size.unwrap_or(unit.max(512));
    if block_size < io_align {
        return Err(BdevError::new(
            "uring.block_size",
            format!("{}: I/O must be aligned to {io_align} bytes", path.display()),
            format!("`block_size: {io_align}`, or `direct: false` for a file"),
        ));
    }
    check_size(path, bytes, options, block_size)?;
    let blocks = options::blocks_of(PATH, bytes, block_size).map_err(|mut error| {
        error.message = format!("{}: {}", path.display(), error.message);
        error
    })?;
    let in_blocks = |bytes: u64| u32::try_from(bytes / u64::from(block_size)).unwrap_or(0);
    let exp = (physical.max(block_size) / block_size).checked_ilog2().unwrap_or(0);
    let mut geometry = Geometry::new(block_size, blocks);
    geometry.physical_block_exp = exp.min(15) as u8;
    match kind {
        Kind::File => geometry.unmap_granularity_blocks = in_blocks(meta.blksize()),
        Kind::Device => {
            geometry.rotational = sysfs(meta.rdev(), "rotational") == Some(1);
            geometry.optimal_io_blocks =
                in_blocks(sysfs(meta.rdev(), "optimal_io_size").unwrap_or(0));
            let granularity = sysfs(meta.rdev(), "discard_granularity").unwrap_or(0);
            geometry.unmap_granularity_blocks = in_blocks(granularity);
        }
    }
    Ok((geometry, mem_align))
}

/// Refuses an empty file, and an existing one of another size than `create` was to make.
fn check_size(
    path: &Path,
    bytes: u64,
    options: &Options,
    block_size: u32,
) -> Result<(), BdevError> {
    if let Some(size) = options.size
        && size.0 != bytes
    {
        return Err(BdevError::new(
            "uring.size",
            format!("{} exists with {bytes} bytes, not {}", path.display(), size.0),
            "an existing file is never resized: leave `create` and `size` away",
        ));
    }
    if bytes < u64::from(block_size) {
        return Err(BdevError::new(
            PATH,
            format!("{} is too short: {bytes} bytes, less than one block", path.display()),
            format!("`truncate -s 1G {}` makes it 1 GiB", path.display()),
        ));
    }
    Ok(())
}

/// The alignment that O_DIRECT asks: of memory, of offsets. `fallback` if the kernel won't tell.
fn direct_alignment(file: &File, fallback: u32) -> (u32, u32) {
    let stat = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN);
    match stat {
        Ok(stat) if stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0 => {
            let memory = stat.stx_dio_mem_align.max(1).next_power_of_two();
            let offset = stat.stx_dio_offset_align;
            if offset.is_power_of_two() { (memory, offset) } else { (memory, fallback) }
        }
        _ => (fallback, fallback),
    }
}

/// Whether the file system punches holes: tried beyond the end, where there is nothing to lose.
fn punches_holes(file: &File, bytes: u64) -> bool {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let start = bytes.next_multiple_of(1 << 20);
    rustix::fs::fallocate(file, flags, start, 1 << 20).is_ok()
}

/// A number from the device's queue folder in sysfs; a partition's is its disk's.
fn sysfs(device: u64, name: &str) -> Option<u64> {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let base = format!("/sys/dev/block/{major}:{minor}");
    ["queue", "../queue"].iter().find_map(|folder| {
        std::fs::read_to_string(format!("{base}/{folder}/{name}")).ok()?.trim().parse().ok()
    })
}
