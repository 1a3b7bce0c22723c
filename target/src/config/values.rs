//! The types of single values: sizes, identifiers, core lists, initiators, addresses.
//!
//! Each is read by serde (`Deserialize`) and says in one line what would be right (`Field::RIGHT`),
//! so that every refusal can end with it. Nothing here knows keys or positions.

use std::fmt;
use std::net::SocketAddr;

use serde::de::{DeserializeOwned, Deserializer, Error};
use serde::{Deserialize, Serialize};
use usurp_bdev::ByteSize;
use usurp_reactor::cpu::{self, CoreSpec};
use usurp_reactor::mem::HugePolicy;

/// A value that a key may hold.
pub trait Field: DeserializeOwned {
    /// What would be right, to follow "write ".
    const RIGHT: &'static str;
}

impl Field for bool {
    const RIGHT: &'static str = "true or false";
}

impl Field for u32 {
    const RIGHT: &'static str = "a whole number";
}

impl Field for String {
    const RIGHT: &'static str = "a string";
}

/// How a reactor passes empty turns.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Idle {
    /// Never gives up the core: lowest latency.
    Spin,
    /// After many empty turns: pause, then yield, then sleep briefly. For shared cores.
    Adaptive,
}

impl Field for Idle {
    const RIGHT: &'static str = "`spin` or `adaptive`";
}

impl Field for ByteSize {
    const RIGHT: &'static str = "a size: bytes, or a whole number with KiB, MiB, GiB or TiB";
}

/// As people write core lists.
#[derive(Deserialize)]
#[serde(untagged)]
enum Loose {
    Number(u64),
    Text(String),
    List(Vec<u64>),
}

/// Which cores run reactors.
#[derive(Clone, Debug)]
pub struct Cores(pub CoreSpec);

impl Field for Cores {
    const RIGHT: &'static str = "auto, a list such as 0-3,8 or [0, 1], or numa:0";
}

impl<'de> Deserialize<'de> for Cores {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Cores, D::Error> {
        let text = match Loose::deserialize(from)? {
            Loose::Number(core) => core.to_string(),
            Loose::Text(text) => text,
            Loose::List(cores) => cores.iter().map(u64::to_string).collect::<Vec<_>>().join(","),
        };
        cpu::parse_cores(&text).map(Cores).map_err(D::Error::custom)
    }
}

/// Whether arenas must, may or must not lie in huge pages.
#[derive(Clone, Debug)]
pub struct HugePages(pub HugePolicy);

impl Field for HugePages {
    const RIGHT: &'static str = "`require`, `prefer` or `never`";
}

impl<'de> Deserialize<'de> for HugePages {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<HugePages, D::Error> {
        match String::deserialize(from)?.as_str() {
            "require" => Ok(HugePages(HugePolicy::Require)),
            "prefer" => Ok(HugePages(HugePolicy::Prefer)),
            "never" => Ok(HugePages(HugePolicy::Never)),
            _ => Err(D::Error::custom("hugepages")),
        }
    }
}

/// A 64-bit identifier in hexadecimal.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct HexId(pub u64);

impl Field for HexId {
    const RIGHT: &'static str = "16 hex digits in quotes, such as \"0x0002c903000e8acd\"";
}

impl<'de> Deserialize<'de> for HexId {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<HexId, D::Error> {
        let text = String::deserialize(from)?;
        let bytes = hex_bytes::<8>(&text).ok_or_else(|| D::Error::custom("id"))?;
        Ok(HexId(u64::from_be_bytes(bytes)))
    }
}

/// Reads exactly `N` bytes of hex: plain, with `0x`, or in groups of four digits (`0002:c903:...`).
fn hex_bytes<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digits = if text.contains(':') {
        let groups: Vec<&str> = text.split(':').collect();
        if groups.iter().any(|group| group.len() != 4) {
            return None;
        }
        groups.concat()
    } else {
        text.strip_prefix("0x").or(text.strip_prefix("0X")).unwrap_or(text).to_owned()
    };
    if digits.len() != 2 * N || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    let mut bytes = [0; N];
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).ok()?;
    }
    Some(bytes)
}

/// Which initiators an entry of `hosts` is for, as a binary key.
#[derive(Copy, Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Initiator {
    /// This port identifier: identifier extension, then GUID (SRP r16a; srp-reference 1.14).
    Port([u8; 16]),
    /// Any identifier extension with this GUID.
    Guid([u8; 8]),
    /// Every initiator that no other entry names.
    Any,
}

impl Initiator {
    /// Whether this entry is for an initiator port.
    pub fn matches(&self, port: &[u8; 16]) -> bool {
        match self {
            Initiator::Port(id) => id == port,
            Initiator::Guid(guid) => guid == &port[8..],
            Initiator::Any => true,
        }
    }

    fn parse(text: &str) -> Option<Initiator> {
        if text == "any" {
            return Some(Initiator::Any);
        }
        let guid = || hex_bytes(text).map(Initiator::Guid);
        hex_bytes(text).map(Initiator::Port).or_else(guid)
    }
}

impl fmt::Display for Initiator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Initiator::Any => f.write_str("any"),
            Initiator::Port(id) => write!(f, "0x{:032x}", u128::from_be_bytes(*id)),
            Initiator::Guid(guid) => {
                let groups: Vec<String> =
                    guid.chunks(2).map(|two| format!("{:02x}{:02x}", two[0], two[1])).collect();
                f.write_str(&groups.join(":"))
            }
        }
    }
}

impl Field for Initiator {
    const RIGHT: &'static str = "any, 32 hex digits in quotes (\"0x...\": identifier extension, \
        then GUID), or a GUID as xxxx:xxxx:xxxx:xxxx";
}

impl<'de> Deserialize<'de> for Initiator {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Initiator, D::Error> {
        let text = String::deserialize(from)?;
        Initiator::parse(&text).ok_or_else(|| D::Error::custom("initiator"))
    }
}

/// An IP address and port.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Address(pub SocketAddr);

impl Field for Address {
    const RIGHT: &'static str = "an address and port in quotes, such as \"[::]:5555\"";
}

impl<'de> Deserialize<'de> for Address {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Address, D::Error> {
        String::deserialize(from)?.parse().map(Address).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn initiators_are_normalised_to_a_binary_key() {
        let port = Initiator::Port([
            0, 0, 0, 0, 0, 0, 0, 1, 0, 2, 0xc9, 3, 0, 0xe, 0x8a, 0xcd, //
        ]);
        let guid = Initiator::Guid([0, 2, 0xc9, 3, 0, 0xe, 0x8a, 0xcd]);
        for text in [
            "0x00000000000000010002c903000e8acd",
            "00000000000000010002C903000E8ACD",
            "0000:0000:0000:0001:0002:c903:000e:8acd",
        ] {
            assert_eq!(Initiator::parse(text), Some(port), "{text}");
        }
        for text in ["0002:c903:000e:8acd", "0x0002c903000e8acd"] {
            assert_eq!(Initiator::parse(text), Some(guid), "{text}");
        }
        for text in ["", "Any", "0x12", "10.0.0.1", "fe80::1", "0002:c903:000e:8acg", "é"] {
            assert_eq!(Initiator::parse(text), None, "{text}");
        }
    }

    #[test]
    fn an_initiator_is_shown_as_it_may_be_written() {
        for text in ["any", "0x00000000000000010002c903000e8acd", "0002:c903:000e:8acd"] {
            assert_eq!(Initiator::parse(text).unwrap().to_string(), text);
        }
    }

    #[test]
    fn a_guid_matches_whatever_the_extension() {
        let port = [9, 9, 9, 9, 9, 9, 9, 9, 0, 2, 0xc9, 3, 0, 0xe, 0x8a, 0xcd];
        assert!(Initiator::parse("0002:c903:000e:8acd").unwrap().matches(&port));
        assert!(!Initiator::parse("0002:c903:000e:8ace").unwrap().matches(&port));
        assert!(Initiator::Any.matches(&port));
        assert!(!Initiator::Port([0; 16]).matches(&port));
    }
}
