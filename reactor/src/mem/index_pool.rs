//! A fixed pool of indices `0..n`, last in first out (the warmest one comes back first). Owns who
//! is out; never grows. Invariant: an index is either on the stack or marked out, never both.

/// Indices `0..n`, each free or out.
pub struct IndexPool {
    /// What the indices number, for the message of a failed assertion.
    name: &'static str,
    /// The free ones; the top is handed out next. Capacity `n`, never reallocated.
    free: Vec<u32>,
    /// One bit per index, set while it is out.
    out: Vec<u64>,
    /// How many there are.
    capacity: u32,
}

impl IndexPool {
    /// A whole pool of `n` indices; the lowest is handed out first.
    pub fn new(name: &'static str, n: u32) -> IndexPool {
        let words = (n as usize).div_ceil(64);
        IndexPool { name, free: (0..n).rev().collect(), out: vec![0; words], capacity: n }
    }

    /// Takes an index, or `None` when all are out.
    pub fn get(&mut self) -> Option<u32> {
        let index = self.free.pop()?;
        let (word, bit) = (index as usize / 64, 1u64 << (index % 64));
        assert_eq!(self.out[word] & bit, 0, "{}: index {index} was free and out", self.name);
        self.out[word] |= bit;
        Some(index)
    }

    /// Gives an index back; panics unless it is out.
    pub fn put(&mut self, index: u32) {
        assert!(index < self.capacity, "{}: index {index} of {}", self.name, self.capacity);
        assert!(self.is_out(index), "{}: index {index} is given back twice", self.name);
        self.out[index as usize / 64] &= !(1u64 << (index % 64));
        self.free.push(index);
    }

    /// True while `index` is out.
    pub fn is_out(&self, index: u32) -> bool {
        assert!(index < self.capacity, "{}: index {index} of {}", self.name, self.capacity);
        self.out[index as usize / 64] & (1u64 << (index % 64)) != 0
    }

    /// True when none is out.
    pub fn is_whole(&self) -> bool {
        self.free.len() == self.capacity as usize
    }

    /// How many can be had now.
    pub fn free(&self) -> u32 {
        self.free.len() as u32
    }

    /// How many there are in all.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indices_are_distinct_and_come_back_last_in_first_out() {
        let mut pool = IndexPool::new("test", 70);
        let all: Vec<u32> = std::iter::from_fn(|| pool.get()).collect();
        assert_eq!(all, (0..70).collect::<Vec<_>>());
        assert_eq!((pool.get(), pool.free(), pool.is_whole()), (None, 0, false));
        pool.put(3);
        pool.put(66);
        assert!(!pool.is_out(66) && pool.is_out(65));
        assert_eq!((pool.get(), pool.get()), (Some(66), Some(3)));
        all.into_iter().for_each(|index| pool.put(index));
        assert!(pool.is_whole());
        assert_eq!(pool.free(), pool.capacity());
    }

    #[test]
    #[should_panic(expected = "given back twice")]
    fn a_double_put_panics() {
        let mut pool = IndexPool::new("test", 2);
        let index = pool.get().unwrap();
        pool.put(index);
        pool.put(index);
    }

    #[test]
    #[should_panic(expected = "index 2 of 2")]
    fn a_foreign_index_panics() {
        IndexPool::new("test", 2).put(2);
    }
}
