//! Median and spread of a handful of runs. Medians, because one run that went wrong must not move
//! the figure; the extremes beside it, because they are what tells a reader how far to trust it.

use serde::Serialize;

/// The middle and the ends of some values.
#[derive(Copy, Clone, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// The middle value; of an even number of values, the mean of the middle two.
    pub median: f64,
    /// The smallest.
    pub min: f64,
    /// The largest.
    pub max: f64,
}

impl Spread {
    /// None of no values. Values must be numbers (no NaN): they are times, rates and sizes.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Spread> {
        let mut sorted: Vec<f64> = values.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        assert!(!min.is_nan() && !max.is_nan(), "a figure is a number");
        let (low, high) = (sorted[(sorted.len() - 1) / 2], sorted[sorted.len() / 2]);
        Some(Spread { median: f64::midpoint(low, high), min, max })
    }

    /// All three, times `factor`; it must not be negative, or the ends would change places.
    pub fn scaled(self, factor: f64) -> Spread {
        assert!(factor >= 0.0);
        let Spread { median, min, max } = self;
        Spread { median: median * factor, min: min * factor, max: max * factor }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_odd_number_of_values_has_a_middle_one() {
        let spread = Spread::of([5.0, 1.0, 9.0, 2.0, 100.0]).unwrap();
        assert_eq!(spread, Spread { median: 5.0, min: 1.0, max: 100.0 });
    }

    #[test]
    fn of_an_even_number_the_middle_two_are_averaged() {
        assert_eq!(Spread::of([4.0, 1.0, 2.0, 100.0]).unwrap().median, 3.0);
    }

    #[test]
    fn one_value_is_its_own_spread_and_none_has_none() {
        assert_eq!(Spread::of([7.0]), Some(Spread { median: 7.0, min: 7.0, max: 7.0 }));
        assert_eq!(Spread::of([]), None);
    }

    #[test]
    fn one_bad_run_does_not_move_the_median() {
        let quiet = Spread::of([10.0, 11.0, 12.0, 11.0, 10.5]).unwrap();
        let bad = Spread::of([10.0, 11.0, 12.0, 11.0, 0.1]).unwrap();
        assert_eq!(quiet.median, bad.median);
    }
}
