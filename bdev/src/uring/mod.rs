//! # uring: a file or a block device, by io_uring
//!
//! ```yaml
//! - { name: img0, uring: { path: /var/lib/usurp/disk.img } }
//! - { name: nvme0, uring: { path: /dev/nvme0n1, block_size: 4096 } }
//! - { name: new0, uring: { path: new.img, create: true, size: 10GiB } }
//! ```
//!
//! | key | default | meaning |
//! |---|---|---|
//! | `path` | required | a regular file or a block device |
//! | `block_size` | the device's, or 512 | bytes in a logical block |
//! | `direct` | true | O_DIRECT; falls back, with a warning, where the file system has none |
//! | `read_only` | false | open for reading; writes are refused |
//! | `iopoll` | false | poll the device for completions (needs `direct` and poll queues) |
//! | `create` | false | make the file if it does not exist; needs `size` |
//! | `size` | - | size of a created file; an existing file must have it: it is never resized |
//!
//! Each reactor has its own ring, with the file registered, and the reactor's data arena too if the
//! locked-memory limit allows. A turn makes at most one `io_uring_enter` (with `iopoll` two), none
//! if there is nothing to submit and the kernel has nothing to hand over.
//!
//! FLUSH is `fdatasync`, FUA `RWF_DSYNC`, UNMAP punches holes, WRITE ZEROES zeroes ranges; COMPARE
//! AND WRITE and WRITE SAME are left to the core. Once a flush has failed, every later flush and
//! FUA fails too: the kernel reports lost writes only once, so a second flush must not say all is
//! well (data safety comes first; restart the target after mending the disk).
//!
//! The file is locked: by the registry within the process, by `flock` (shared if `read_only`) and,
//! for block devices that are written, `O_EXCL` between processes.
//!
//! Limits: a block device unmaps only if it can zero by unmapping (`write_zeroes_max_bytes` in
//! sysfs; NVMe, SCSI with LBPRZ, loop), since TRIM alone has no opcode in older kernels. With
//! `iopoll` FUA is a write and a flush. A reset waits for I/O that the kernel has. Growing a file
//! takes a restart. Buffers must be aligned as O_DIRECT asks, which arena buffers are.

mod open;
mod queue;
mod ring;

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use serde::Deserialize;
use serde_yaml::Value;

use crate::contract::{Bdev, BdevError, Caps, Geometry, Queue, QueueSetup};
use crate::options;
use crate::registry::{Module, OpenContext};
use crate::size::ByteSize;

/// This module's line in the table of modules.
pub const MODULE: Module = Module { name: "uring", example: EXAMPLE, check, open };

const EXAMPLE: &str = "uring: { path: disk.img }";

/// The YAML keys.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Options {
    path: PathBuf,
    block_size: Option<u32>,
    #[serde(default = "direct_default")]
    direct: bool,
    #[serde(default)]
    read_only: bool,
    #[serde(default)]
    iopoll: bool,
    #[serde(default)]
    create: bool,
    size: Option<ByteSize>,
}

fn direct_default() -> bool {
    true
}

fn read(options: &Value) -> Result<Options, BdevError> {
    let options: Options = options::parse("uring", options, EXAMPLE)?;
    let error = |key, message, hint| Err(BdevError::new(key, message, hint));
    if options.path.as_os_str().is_empty() {
        return error("uring.path", "the path is empty", "such as `path: disk.img`");
    }
    if let Some(block_size) = options.block_size {
        options::check_block_size("uring.block_size", block_size)?;
    }
    if let Some(size) = options.size {
        options::blocks_of("uring.size", size.0, options.block_size.unwrap_or(512))?;
    }
    if options.create && options.size.is_none() {
        return error("uring.create", "a file to be created needs a size", "add `size: 1GiB`");
    }
    if options.create && options.read_only {
        return error("uring.create", "a created file can't be read-only", "leave one away");
    }
    if options.size.is_some() && !options.create {
        return error(
            "uring.size",
            "the size of an existing file is its own",
            "leave it away, or add `create: true` to make the file if it does not exist",
        );
    }
    if options.iopoll && !options.direct {
        return error("uring.iopoll", "polling needs O_DIRECT", "leave `direct: false` away");
    }
    Ok(options)
}

fn check(options: &Value) -> Result<Option<String>, BdevError> {
    read(options).map(|_| None)
}

fn open(
    name: &str,
    options: &Value,
    context: &mut OpenContext<'_>,
) -> Result<Arc<dyn Bdev>, BdevError> {
    let options = read(options)?;
    ring::probe()?;
    let disk = Arc::new(open::open(name, &options, context)?);
    if options.iopoll {
        queue::probe_polled(name, &disk)?;
    }
    tracing::info!(
        bdev = name, path = %options.path.display(), direct = disk.direct,
        blocks = disk.geometry.blocks, block_size = disk.geometry.block_size, "uring opened"
    );
    Ok(Arc::new(Uring {
        name: name.to_string(),
        read_only: options.read_only,
        iopoll: options.iopoll,
        disk,
    }))
}

/// The error for `iopoll` on a device that can't.
fn no_poll(why: &str) -> BdevError {
    BdevError::new(
        "uring.iopoll",
        format!("the device has no poll queues{why}"),
        "leave `iopoll` away, or load the driver with them, such as `nvme.poll_queues=2`",
    )
}

/// An open file or device, locked. Shared by all queues.
struct Disk {
    /// Open for as long as any queue lives; holds the `flock`.
    file: File,
    /// From its size and the device's or the configured block size.
    geometry: Geometry,
    /// Whether O_DIRECT is on.
    direct: bool,
    /// The alignment in bytes that O_DIRECT asks of buffers; a power of two; 1 without.
    mem_align: u32,
    /// Whether holes can be punched (files), or the device zeroes by unmapping.
    unmap: bool,
    /// A flush has failed: some write that was reported as done is lost. Never reset. Set by any
    /// queue, read by all.
    flush_failed: AtomicBool,
}

/// The control plane's handle.
struct Uring {
    /// The configured name.
    name: String,
    /// As configured.
    read_only: bool,
    /// As configured.
    iopoll: bool,
    /// The file.
    disk: Arc<Disk>,
}

impl Bdev for Uring {
    fn name(&self) -> &str {
        &self.name
    }

    fn module(&self) -> &'static str {
        "uring"
    }

    fn geometry(&self) -> Geometry {
        self.disk.geometry
    }

    fn caps(&self) -> Caps {
        Caps {
            // The page cache, or the device's own, which we can't see from here.
            flush: !self.read_only,
            fua: !self.iopoll,
            unmap: self.disk.unmap && !self.read_only,
            // A hole reads as zeros, and so does what a device zeroed by unmapping.
            unmap_zeroes: self.disk.unmap && !self.read_only,
            write_zeroes: !self.read_only,
            write_same: false,
            compare_and_write: false,
            read_only: self.read_only,
        }
    }

    fn queue(&self, setup: &QueueSetup) -> Result<Box<dyn Queue>, BdevError> {
        let queue = queue::UringQueue::new(&self.name, &self.disk, setup, self.iopoll)?;
        Ok(Box::new(queue))
    }
}

#[cfg(test)]
mod tests;
