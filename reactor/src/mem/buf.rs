//! An owned piece of an arena. Owns its bytes exclusively from `BufPool::take` to `BufPool::give`;
//! never copied, never dropped in between (a lost buffer is our bug: panic). 16 bytes, so that it
//! can ride inside an I/O.
//!
//! ```text
//!   BufPool::take -> Buf --moves into an Io, a Done, an ioctx ...--> BufPool::give
//!                     `-- dropped on the way: panic
//! ```
//! While a device or peer writes the bytes (an RDMA READ, io_uring) the owner must not look at
//! them: the `Buf` lies in the I/O token meanwhile.

/// An exclusive piece of an arena, or none.
pub struct Buf {
    /// First byte; null in none.
    base: *mut u8,
    /// Usable bytes: the size of the piece (a power of two), not what was asked for.
    len: u32,
    /// Which pool it came from, so that another pool refuses it; 0 in none.
    pool: u32,
}

const _: () = assert!(size_of::<Buf>() == 16);

// SAFETY: a `Buf` is the only handle to its bytes (BufPool gives each piece out once), so it may
// change threads.
unsafe impl Send for Buf {}
// SAFETY: `&Buf` gives nothing but a shared slice and plain fields.
unsafe impl Sync for Buf {}

impl Buf {
    /// No buffer. May be dropped.
    pub const fn none() -> Buf {
        Buf { base: std::ptr::null_mut(), len: 0, pool: 0 }
    }

    /// Only `BufPool::take` makes these: `len` bytes from `base` must be out to nobody else and
    /// stay mapped until the piece is given back.
    pub(super) fn new(base: *mut u8, len: u32, pool: u32) -> Buf {
        assert!(!base.is_null());
        assert!(pool != 0);
        Buf { base, len, pool }
    }

    /// True for [`Buf::none`].
    pub fn is_none(&self) -> bool {
        self.base.is_null()
    }

    /// Address of the first byte, for a device; 0 for none.
    pub fn addr(&self) -> u64 {
        self.base as u64
    }

    /// Usable bytes; 0 for none.
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// True when there are no bytes, which is the same as none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes; empty for none.
    pub fn as_slice(&self) -> &[u8] {
        if self.is_none() {
            return &[];
        }
        // SAFETY: `base..base+len` is a piece that BufPool gave to this `Buf` alone; its arena
        // stays mapped while it is out (BufPool leaks the arena rather than unmap under a `Buf`).
        unsafe { std::slice::from_raw_parts(self.base, self.len as usize) }
    }

    /// The bytes, to be written; empty for none.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        if self.is_none() {
            return &mut [];
        }
        // SAFETY: as in `as_slice`; `&mut self` makes this the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.base, self.len as usize) }
    }

    /// Moves the buffer out and leaves none.
    pub fn take(&mut self) -> Buf {
        std::mem::take(self)
    }

    /// Which pool it belongs to; 0 for none.
    pub(super) fn pool(&self) -> u32 {
        self.pool
    }

    /// Ends the `Buf` without the panic of drop: it is back in its pool.
    pub(super) fn forget(self) {
        std::mem::forget(self);
    }
}

impl Default for Buf {
    fn default() -> Buf {
        Buf::none()
    }
}

impl std::fmt::Debug for Buf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buf {:#x}+{}", self.addr(), self.len)
    }
}

impl Drop for Buf {
    fn drop(&mut self) {
        // While a panic unwinds, buffers fall on the floor; a second panic would hide the first.
        if !self.is_none() && !std::thread::panicking() {
            panic!("lost buffer: {self:?} dropped instead of given back to its pool");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::{Arena, BufPool, HugePolicy};

    fn pool() -> BufPool {
        let arena = Arena::new("buf-test", 8192, HugePolicy::Never).unwrap();
        BufPool::new(arena, 0, 8192, 512, 4096)
    }

    #[test]
    fn none_is_empty_and_may_be_dropped() {
        let mut none = Buf::none();
        assert!(none.is_none() && none.is_empty());
        assert_eq!((none.addr(), none.len()), (0, 0));
        assert!(none.as_slice().is_empty() && none.as_mut_slice().is_empty());
    }

    #[test]
    #[should_panic(expected = "lost buffer")]
    fn a_lost_buffer_panics() {
        let mut pool = pool();
        drop(pool.take(512).unwrap());
    }

    #[test]
    fn take_moves_the_buffer_out() {
        let mut pool = pool();
        let mut buf = pool.take(512).unwrap();
        buf.as_mut_slice().fill(7);
        let moved = buf.take();
        assert!(buf.is_none());
        assert_eq!(moved.as_slice(), [7; 512]);
        pool.give(moved);
    }

    #[test]
    fn a_buffer_outlives_its_pool_without_dangling() {
        let mut pool = pool();
        let mut buf = pool.take(4096).unwrap();
        drop(pool);
        buf.as_mut_slice().fill(1);
        assert!(buf.as_slice().iter().all(|&byte| byte == 1));
        buf.forget();
    }

    #[test]
    fn a_buffer_may_change_threads() {
        let mut pool = pool();
        let mut buf = pool.take(512).unwrap();
        let buf = std::thread::spawn(move || {
            buf.as_mut_slice()[0] = 9;
            buf
        });
        let buf = buf.join().unwrap();
        assert_eq!(buf.as_slice()[0], 9);
        pool.give(buf);
    }
}
