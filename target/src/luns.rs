//! Which logical units a host sees under which LUN.
//!
//! Immutable after the configuration was read; shared by `Arc` with every reactor that serves the
//! host.

/// A logical unit as one host sees it.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct LunEntry {
    /// The LUN, 0..=16383.
    pub lun: u16,
    /// Index of the logical unit in each reactor's table.
    pub lu: u16,
}

/// LUN 0..=255 resolves by one indexed load; larger ones by binary search.
#[derive(Clone, Debug)]
pub struct LunMap {
    /// Position in `all` by LUN; `NONE` where the LUN is absent.
    low: Box<[u16; 256]>,
    /// All entries, ascending by LUN.
    all: Vec<LunEntry>,
    /// The LUNs alone, ascending, as REPORT LUNS wants them.
    numbers: Vec<u16>,
}

const NONE: u16 = u16::MAX;

impl LunMap {
    /// Builds the map. Entries may come in any order.
    ///
    /// # Panics
    /// When a LUN appears twice: the configuration check refuses that.
    pub fn new(mut all: Vec<LunEntry>) -> LunMap {
        all.sort_by_key(|e| e.lun);
        assert!(all.windows(2).all(|w| w[0].lun != w[1].lun), "a LUN appears twice");
        let mut low = Box::new([NONE; 256]);
        assert!(all.len() < usize::from(NONE), "more LUNs than a host can address");
        for (at, e) in all.iter().enumerate() {
            if let Some(slot) = low.get_mut(usize::from(e.lun)) {
                *slot = at as u16;
            }
        }
        let numbers = all.iter().map(|e| e.lun).collect();
        LunMap { low, all, numbers }
    }

    /// Position in [`LunMap::entries`] of a LUN.
    #[inline]
    pub fn lookup(&self, lun: u16) -> Option<usize> {
        match self.low.get(usize::from(lun)) {
            Some(&NONE) => None,
            Some(&at) => Some(usize::from(at)),
            None => self.all.binary_search_by_key(&lun, |e| e.lun).ok(),
        }
    }

    /// The LUNs in ascending order.
    pub fn numbers(&self) -> &[u16] {
        &self.numbers
    }

    /// All entries in ascending order of LUN.
    pub fn entries(&self) -> &[LunEntry] {
        &self.all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(lun: u16, lu: u16) -> LunEntry {
        LunEntry { lun, lu }
    }

    fn map() -> LunMap {
        LunMap::new(vec![entry(300, 2), entry(0, 0), entry(255, 1)])
    }

    #[test]
    fn resolves_low_and_high_luns() {
        let m = map();
        let lu = |lun| m.lookup(lun).map(|at| m.entries()[at].lu);
        assert_eq!((lu(0), lu(255), lu(300)), (Some(0), Some(1), Some(2)));
        assert_eq!(m.numbers(), &[0, 255, 300]);
    }

    #[test]
    fn absent_luns_resolve_to_nothing() {
        let m = map();
        for lun in [1, 254, 256, 299, 301, 16383] {
            assert_eq!(m.lookup(lun), None, "LUN {lun}");
        }
    }

    #[test]
    #[should_panic(expected = "twice")]
    fn the_same_lun_twice_is_our_bug() {
        LunMap::new(vec![entry(1, 0), entry(1, 1)]);
    }
}
