//! A listening socket at a path, owned exclusively.
//!
//! ```text
//!   lock PATH.lock --held by another--> "another target is serving"
//!        | ours
//!   connect PATH --accepted--> "another target is serving"    (one that takes no lock)
//!        | refused: a dead target left it                      | no such file
//!   unlink -------------------------------------------------> bind, chmod, listen
//! ```
//!
//! The lock makes the take-over free of races: whoever holds it is the only one to unlink and bind.
//! The socket and the lock file go away with the value; the lock itself ends with the process in
//! any case.

use crate::FabricError;
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Connections that the kernel keeps for us until we accept them.
const BACKLOG: i32 = 128;

/// A bound, listening socket.
#[derive(Debug)]
pub(crate) struct ListenSocket {
    /// Non-blocking.
    pub(crate) fd: OwnedFd,
    /// Where it is bound.
    pub(crate) path: PathBuf,
    /// Inode of the socket file, to remove only our own.
    inode: u64,
    /// The lock file, locked while open.
    _lock: OwnedFd,
}

/// A new SOCK_SEQPACKET socket.
pub(crate) fn seqpacket(flags: SocketFlags) -> Result<OwnedFd, Errno> {
    let flags = flags | SocketFlags::CLOEXEC;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

impl ListenSocket {
    /// Binds `path` with the file mode `mode`. The parent folder must exist.
    pub(crate) fn bind(path: &Path, mode: u32) -> Result<ListenSocket, FabricError> {
        let shown = path.display();
        let parent = path.parent().filter(|p| !p.as_os_str().is_empty());
        let parent = parent.unwrap_or(Path::new("."));
        if !parent.is_dir() {
            return Err(FabricError::Invalid(format!(
                "{shown}: the folder {} does not exist",
                parent.display()
            )));
        }
        let addr = SocketAddrUnix::new(path).map_err(|e| FabricError::os(shown.to_string(), e))?;
        let lock = lock(path)?;
        remove_stale(path, &addr)?;
        let fd = seqpacket(SocketFlags::NONBLOCK).map_err(|e| FabricError::os("socket", e))?;
        rustix::net::bind(&fd, &addr).map_err(|e| FabricError::os(format!("bind {shown}"), e))?;
        // Nobody can connect before listen(), so the mode is in force in time.
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
            .map_err(|e| FabricError::os(format!("mode of {shown}"), e))?;
        let inode = std::fs::symlink_metadata(path)
            .map_err(|e| FabricError::os(shown.to_string(), e))?
            .ino();
        rustix::net::listen(&fd, BACKLOG)
            .map_err(|e| FabricError::os(format!("listen {shown}"), e))?;
        Ok(ListenSocket { fd, path: path.to_owned(), inode, _lock: lock })
    }
}

impl Drop for ListenSocket {
    fn drop(&mut self) {
        let ours = std::fs::symlink_metadata(&self.path).is_ok_and(|m| m.ino() == self.inode);
        if ours {
            let _ = std::fs::remove_file(&self.path);
        }
        // Still locked: nobody else can have locked this very file, and `lock` notices when it is
        // gone.
        let _ = std::fs::remove_file(lock_path(&self.path));
    }
}

fn lock_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    name.into()
}

/// Locks PATH.lock for this process, without waiting.
fn lock(path: &Path) -> Result<OwnedFd, FabricError> {
    let at = lock_path(path);
    let failed = |e: Errno| FabricError::os(format!("lock file {}", at.display()), e);
    // The file may be removed between open and flock by a target that ends; then try the new one.
    for _ in 0..16 {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let fd = rustix::fs::open(&at, flags, Mode::RUSR | Mode::WUSR).map_err(failed)?;
        match rustix::fs::flock(&fd, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::AGAIN) => return Err(FabricError::InUse(path.display().to_string())),
            Err(e) => return Err(failed(e)),
        }
        let held = rustix::fs::fstat(&fd).map_err(failed)?;
        if std::fs::metadata(&at).is_ok_and(|m| m.ino() == held.st_ino) {
            return Ok(fd);
        }
    }
    Err(FabricError::InUse(path.display().to_string()))
}

/// Removes the socket of a dead target; errors if somebody serves there, or if it is no socket.
fn remove_stale(path: &Path, addr: &SocketAddrUnix) -> Result<(), FabricError> {
    let Ok(meta) = std::fs::symlink_metadata(path) else { return Ok(()) };
    let shown = path.display().to_string();
    if !meta.file_type().is_socket() {
        return Err(FabricError::Invalid(format!("{shown} exists and is not a socket")));
    }
    let probe = seqpacket(SocketFlags::NONBLOCK).map_err(|e| FabricError::os("socket", e))?;
    match rustix::net::connect(&probe, addr) {
        Err(Errno::CONNREFUSED) => std::fs::remove_file(path)
            .map_err(|e| FabricError::os(format!("removing the stale {shown}"), e)),
        Err(Errno::NOENT) => Ok(()),
        // Anything else (accepted, backlog full, another socket type, no permission): somebody is
        // there.
        _ => Err(FabricError::InUse(shown)),
    }
}
