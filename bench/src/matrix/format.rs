//! Numbers for people: sizes, rates with their spread in one unit, figures with as many digits as
//! they deserve.

use super::stats::Spread;

/// `4 KiB`, `512 MiB`; the largest unit that leaves a whole number.
pub fn bytes(count: u64) -> String {
    let units = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
    let unit =
        units.iter().find(|(shift, _)| count >= 1 << shift && count.is_multiple_of(1 << shift));
    match unit {
        Some((shift, name)) => format!("{} {name}", count >> shift),
        None => format!("{count} bytes"),
    }
}

/// A rate: `4.59 M`, `733 k`, `9.9 k`, `870`.
pub fn rate(per_second: f64) -> String {
    let unit = RateUnit::of(per_second);
    format!("{}{}", unit.number(per_second), unit.name)
}

/// A rate and its spread in one unit: `4.59 M (4.40-4.71)`.
pub fn rate_spread(s: &Spread) -> String {
    let unit = RateUnit::of(s.median);
    let [median, min, max] = [s.median, s.min, s.max].map(|n| unit.number(n));
    format!("{median}{} ({min}-{max})", unit.name)
}

/// A figure and its spread: `1.29 (1.27-1.31)`.
pub fn spread(s: &Spread) -> String {
    let [median, min, max] = [s.median, s.min, s.max].map(figure);
    format!("{median} ({min}-{max})")
}

/// Three digits that count, never an exponent: `0.81`, `15.2`, `152`, `1230`.
pub fn figure(number: f64) -> String {
    match number {
        n if n >= 99.95 => format!("{n:.0}"),
        n if n >= 9.995 => format!("{n:.1}"),
        n => format!("{n:.2}"),
    }
}

/// A share of the whole: `3.2 %`.
pub fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

struct RateUnit {
    divisor: f64,
    digits: usize,
    name: &'static str,
}

impl RateUnit {
    fn of(per_second: f64) -> RateUnit {
        let (divisor, digits, name) = match per_second {
            n if n >= 999_500.0 => (1e6, 2, " M"),
            n if n >= 99_950.0 => (1e3, 0, " k"),
            n if n >= 1_000.0 => (1e3, 1, " k"),
            _ => (1.0, 0, ""),
        };
        RateUnit { divisor, digits, name }
    }

    fn number(&self, per_second: f64) -> String {
        format!("{:.*}", self.digits, per_second / self.divisor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_take_the_largest_unit_that_is_whole() {
        assert_eq!(bytes(4096), "4 KiB");
        assert_eq!(bytes(512 << 20), "512 MiB");
        assert_eq!(bytes(1 << 40), "1024 GiB");
        assert_eq!(bytes(1000), "1000 bytes");
    }

    #[test]
    fn rates_change_units_where_they_get_long() {
        let rates = [870.4, 9_940.0, 99_949.0, 99_950.0, 733_400.0, 999_600.0, 4_590_000.0];
        let texts = ["870", "9.9 k", "99.9 k", "100 k", "733 k", "1.00 M", "4.59 M"];
        assert_eq!(rates.map(rate), texts);
    }

    #[test]
    fn a_spread_has_the_unit_of_its_median() {
        let s = Spread { median: 1.2e6, min: 0.9e6, max: 1.31e6 };
        assert_eq!(rate_spread(&s), "1.20 M (0.90-1.31)");
        assert_eq!(spread(&Spread { median: 1.294, min: 0.8, max: 215.4 }), "1.29 (0.80-215)");
    }

    #[test]
    fn figures_keep_three_digits() {
        let figures = [0.0, 0.809, 9.994, 15.24, 99.94, 99.96, 1230.0].map(figure);
        assert_eq!(figures, ["0.00", "0.81", "9.99", "15.2", "99.9", "100", "1230"]);
        assert_eq!(percent(0.0321), "3.2 %");
    }
}
