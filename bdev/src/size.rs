//! Sizes in bytes as people write them: `4096`, `64MiB`, `1 GiB`.
//!
//! Owns: [`ByteSize`], used by the options of modules and by the configuration file.
//! Never does: guessing. Decimal units (`MB`) and bare letters (`M`) are refused by name, because
//! half the readers would take them for the other kind.

use std::fmt;
use std::str::FromStr;

use serde::de::{self, Deserialize, Deserializer, Visitor};

/// A size in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteSize(pub u64);

/// The units, the greatest first; `Display` picks the first that divides.
const UNITS: [(&str, u32); 5] = [("PiB", 50), ("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];

impl ByteSize {
    /// The bytes as a `usize`; `None` if they do not fit.
    pub fn to_usize(self) -> Option<usize> {
        usize::try_from(self.0).ok()
    }
}

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<ByteSize, String> {
        let text = text.trim();
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = (&text[..digits], text[digits..].trim());
        let number: u64 = number.parse().map_err(|_| {
            format!("`{text}` is not a size: want a whole number and a unit, such as 64MiB")
        })?;
        if unit.is_empty() || unit == "B" {
            return Ok(ByteSize(number));
        }
        let Some((_, shift)) = UNITS.iter().find(|(name, _)| *name == unit) else {
            return Err(format!(
                "`{text}` has the unit `{unit}`: want B, KiB, MiB, GiB, TiB or PiB (powers of 1024)"
            ));
        };
        let bytes = number.checked_mul(1u64 << shift);
        bytes.map(ByteSize).ok_or_else(|| format!("`{text}` is more than 2^64 bytes"))
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, shift) in UNITS {
            if self.0 != 0 && self.0.trailing_zeros() >= shift {
                return write!(f, "{}{name}", self.0 >> shift);
            }
        }
        write!(f, "{}", self.0)
    }
}

/// Takes a size from a YAML number or string.
struct SizeVisitor;

impl Visitor<'_> for SizeVisitor {
    type Value = ByteSize;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a size such as 4096, 64MiB or 1GiB")
    }

    fn visit_u64<E: de::Error>(self, bytes: u64) -> Result<ByteSize, E> {
        Ok(ByteSize(bytes))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<ByteSize, E> {
        text.parse().map_err(E::custom)
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<ByteSize, D::Error> {
        deserializer.deserialize_any(SizeVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("512B", 512),
            ("4KiB", 4096),
            ("64MiB", 64 << 20),
            (" 1 GiB ", 1 << 30),
            ("2TiB", 2 << 40),
        ] {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_refused_with_a_reason() {
        for (text, reason) in [
            ("", "not a size"),
            ("GiB", "not a size"),
            ("-1", "not a size"),
            ("1.5GiB", "unit `.5GiB`"),
            ("1GB", "unit `GB`"),
            ("1g", "unit `g`"),
            ("99999999PiB", "more than 2^64"),
            ("99999999999999999999", "not a size"),
        ] {
            let error = text.parse::<ByteSize>().unwrap_err();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }

    #[test]
    fn yaml_numbers_and_strings_both_do() {
        assert_eq!(serde_yaml::from_str::<ByteSize>("1048576").unwrap().0, 1 << 20);
        assert_eq!(serde_yaml::from_str::<ByteSize>("1MiB").unwrap().0, 1 << 20);
        assert!(serde_yaml::from_str::<ByteSize>("-5").is_err());
        assert!(serde_yaml::from_str::<ByteSize>("[1]").is_err());
    }

    #[test]
    fn display_is_read_back() {
        for bytes in [0, 1, 512, 1536, 1 << 20, 3 << 30, (1 << 40) + 512] {
            assert_eq!(ByteSize(bytes).to_string().parse(), Ok(ByteSize(bytes)));
        }
    }
}
