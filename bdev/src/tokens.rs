//! A table of I/Os in flight by index, for queues that send I/O on under tokens of their own.
//!
//! Owns: the caller's token and what the queue remembers per I/O, until the I/O comes back.
//! Invariant: an index is out from `enter` to `leave`; a completion that was never submitted, or
//! that comes twice, panics.

use usurp_reactor::mem::IndexPool;

/// I/Os in flight, each with the caller's token and a `T`.
pub struct TokenMap<T> {
    /// Which indices are out.
    pool: IndexPool,
    /// `Some` exactly where the index is out.
    entries: Vec<Option<(u64, T)>>,
}

impl<T> TokenMap<T> {
    /// A table for `depth` I/Os.
    pub fn new(name: &'static str, depth: u32) -> TokenMap<T> {
        TokenMap { pool: IndexPool::new(name, depth), entries: (0..depth).map(|_| None).collect() }
    }

    /// Remembers an I/O. `None` = full.
    pub fn enter(&mut self, token: u64, what: T) -> Option<u64> {
        let index = self.pool.get()?;
        let old = self.entries[index as usize].replace((token, what));
        assert!(old.is_none(), "a free index that is in use");
        Some(u64::from(index))
    }

    /// Forgets an I/O; `index` is what `enter` gave.
    pub fn leave(&mut self, index: u64) -> (u64, T) {
        let entry = self.entries.get_mut(index as usize).and_then(Option::take);
        let entry = entry.expect("a completion of an I/O that is not in flight");
        self.pool.put(index as u32);
        entry
    }

    /// What is remembered of an I/O in flight.
    pub fn get(&self, index: u64) -> Option<&T> {
        self.entries.get(index as usize)?.as_ref().map(|(_, what)| what)
    }

    /// I/Os in flight.
    pub fn len(&self) -> u32 {
        self.pool.capacity() - self.pool.free()
    }

    /// Whether none is in flight.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_come_back_and_a_full_table_refuses() {
        let mut map = TokenMap::new("test", 2);
        let a = map.enter(u64::MAX, 'a').unwrap();
        let b = map.enter(u64::MAX, 'b').unwrap();
        assert_eq!((map.len(), map.enter(1, 'c')), (2, None));
        assert_eq!(map.leave(b), (u64::MAX, 'b'));
        assert_eq!((map.get(a), map.get(b)), (Some(&'a'), None));
        assert_eq!(map.leave(a), (u64::MAX, 'a'));
        assert!(map.is_empty());
    }

    #[test]
    #[should_panic(expected = "not in flight")]
    fn a_completion_that_comes_twice_panics() {
        let mut map = TokenMap::new("test", 2);
        let a = map.enter(1, ()).unwrap();
        map.leave(a);
        map.leave(a);
    }

    #[test]
    #[should_panic(expected = "not in flight")]
    fn a_completion_from_nowhere_panics() {
        TokenMap::<()>::new("test", 2).leave(99);
    }
}
