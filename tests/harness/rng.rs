//! Random numbers from one seed (splitmix64): the only source of chance in a simulation.
//!
//! Never reads a clock, an address or the environment, so the same seed gives the same run.

/// A generator. Copies go their own way.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// Starts at `seed`.
    pub fn new(seed: u64) -> Rng {
        Rng(seed ^ 0x9E37_79B9_7F4A_7C15)
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    /// A number below `n`; `n` is at least 1.
    pub fn below(&mut self, n: u64) -> u64 {
        assert!(n > 0, "a choice among nothing");
        ((u128::from(self.bits()) * u128::from(n)) >> 64) as u64
    }

    /// A number from `lo` to `hi`, both included.
    pub fn range(&mut self, lo: u64, hi: u64) -> u64 {
        assert!(lo <= hi, "an empty range {lo}..={hi}");
        lo + self.below(hi - lo + 1)
    }

    /// An index of a list of `n`.
    pub fn index(&mut self, n: usize) -> usize {
        self.below(n as u64) as usize
    }

    /// True `per_million` times in a million.
    pub fn chance(&mut self, per_million: u64) -> bool {
        self.below(1_000_000) < per_million
    }

    /// One of a list.
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.index(of.len())]
    }

    /// A generator for a part, which then does not disturb the others.
    pub fn fork(&mut self) -> Rng {
        Rng::new(self.bits())
    }
}

/// Spreads the bits of a number.
pub fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// What happened in a run, folded into one number; with `USURP_TRACE=1` also printed.
#[derive(Debug)]
pub struct Trace {
    /// Everything so far.
    hash: u64,
    /// Events so far.
    events: u64,
    /// Print each event.
    print: bool,
}

impl Trace {
    /// An empty trace.
    pub fn new() -> Trace {
        let print = std::env::var_os("USURP_TRACE").is_some_and(|v| v != "0");
        Trace { hash: 0, events: 0, print }
    }

    /// Adds an event: a name and two numbers that do not depend on addresses of this process.
    pub fn note(&mut self, now: u64, what: &'static str, a: u64, b: u64) {
        self.events += 1;
        for part in [now, what.as_bytes()[0].into(), what.len() as u64, a, b] {
            self.hash = mix(self.hash ^ part).wrapping_add(part);
        }
        if self.print {
            eprintln!("{:>12} {what} {a:#x} {b:#x}", now);
        }
    }

    /// Whether events are printed: what they would show more need not be put together otherwise.
    pub fn prints(&self) -> bool {
        self.print
    }

    /// The number.
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// Events so far.
    pub fn events(&self) -> u64 {
        self.events
    }
}

impl Default for Trace {
    fn default() -> Trace {
        Trace::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_repeats_itself() {
        let run = |seed| {
            let mut rng = Rng::new(seed);
            (rng.bits(), rng.below(10), rng.range(5, 9), rng.fork().bits())
        };
        assert_eq!(run(1), run(1));
        assert_ne!(run(1), run(2));
    }

    #[test]
    fn numbers_stay_in_their_range() {
        let mut rng = Rng::new(3);
        for _ in 0..1000 {
            assert!(rng.below(7) < 7);
            assert!((3..=5).contains(&rng.range(3, 5)));
        }
    }
}
