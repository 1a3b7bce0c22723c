//! The memory of one initiator host, and the keys under which targets may reach it.
//!
//! A key belongs to one command of one link. When the command ends its key dies, as Linux frees
//! its R_Keys: an honest initiator's dead key must never be used again.

/// What a key allows the target.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Access {
    /// RDMA READ.
    Read,
    /// RDMA WRITE.
    Write,
}

/// One registration.
#[derive(Clone, Debug)]
pub struct Key {
    /// First address.
    pub va: u64,
    /// Bytes.
    pub len: u64,
    /// Direction.
    pub access: Access,
    /// The only link that may use it.
    pub link: usize,
    /// Not yet given up.
    pub alive: bool,
    /// The command, for messages.
    pub user: u64,
    /// The target has used it.
    pub touched: bool,
}

/// See the module's header.
pub struct HostMemory {
    /// Address of `bytes[0]`.
    base: u64,
    /// Contents.
    pub bytes: Vec<u8>,
    /// All keys ever, by `rkey - first`.
    keys: Vec<Key>,
    /// Value of the first key.
    first: u32,
    /// A use of a dead or wrong key is the target's fault. False for hostile hosts, which announce
    /// whatever they like.
    pub honest: bool,
}

impl HostMemory {
    /// `len` bytes at an address that only this host has.
    pub fn new(host: usize, len: usize, honest: bool) -> HostMemory {
        let base = 0x7000_0000_0000 + ((host as u64) << 32);
        let first = 0x0100_0000 * (host as u32 + 1);
        HostMemory { base, bytes: vec![0; len], keys: Vec::new(), first, honest }
    }

    /// Address of byte `at`.
    pub fn va(&self, at: usize) -> u64 {
        self.base + at as u64
    }

    /// Registers `len` bytes at offset `at`.
    pub fn register(
        &mut self,
        at: usize,
        len: usize,
        access: Access,
        link: usize,
        user: u64,
    ) -> u32 {
        let va = self.va(at);
        self.keys.push(Key {
            va,
            len: len as u64,
            access,
            link,
            alive: true,
            user,
            touched: false,
        });
        self.first + self.keys.len() as u32 - 1
    }

    /// Ends a registration.
    pub fn revoke(&mut self, rkey: u32) {
        let key = &mut self.keys[(rkey - self.first) as usize];
        assert!(key.alive, "the harness revokes a key twice");
        key.alive = false;
    }

    /// The target has used it.
    pub fn is_touched(&self, rkey: u32) -> bool {
        self.keys[(rkey - self.first) as usize].touched
    }

    /// Checks an access of the target. The offset of the first byte, or what is wrong.
    pub fn check(
        &mut self,
        link: usize,
        access: Access,
        rkey: u32,
        va: u64,
        len: u32,
    ) -> Result<usize, String> {
        let key = rkey.checked_sub(self.first).and_then(|at| self.keys.get_mut(at as usize));
        let Some(key) = key else { return Err(format!("key {rkey:#x} never was")) };
        let user = key.user;
        if !key.alive {
            return Err(format!("{access:?} for command {user:#x}, which has ended"));
        }
        if key.link != link {
            return Err(format!("{access:?} for command {user:#x} over another channel"));
        }
        if key.access != access && self.honest {
            return Err(format!("{access:?} of memory of command {user:#x} for the other way"));
        }
        let inside = va.checked_sub(key.va).is_some_and(|at| at + u64::from(len) <= key.len);
        if !inside {
            return Err(format!("{access:?} outside of the memory of command {user:#x}"));
        }
        key.touched = true;
        Ok((va - self.base) as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_allows_what_it_says_until_it_is_revoked() {
        let mut m = HostMemory::new(0, 100, true);
        let key = m.register(10, 20, Access::Read, 3, 7);
        let va = m.va(10);
        assert_eq!(m.check(3, Access::Read, key, va + 5, 15), Ok(15));
        assert!(m.check(3, Access::Read, key, va + 5, 16).is_err());
        assert!(m.check(3, Access::Read, key, va - 1, 1).is_err());
        assert!(m.check(3, Access::Write, key, va, 1).is_err());
        assert!(m.check(4, Access::Read, key, va, 1).is_err());
        assert!(m.check(3, Access::Read, key + 1, va, 1).is_err());
        m.revoke(key);
        assert!(m.check(3, Access::Read, key, va, 1).is_err());
    }
}
