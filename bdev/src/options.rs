//! Options of a module: from YAML to the module's own struct, with the key at fault named.
//!
//! Owns: the search for that key, which serde_yaml does not give when it reads a [`Value`].
//! Never does: defaults or checks of meaning; the module does those.

use serde::de::DeserializeOwned;
use serde_yaml::{Mapping, Value};

use crate::contract::{BLOCK_SIZE_MAX, BLOCK_SIZE_MIN, BdevError};

/// Reads `options` into `T`, which should be `#[serde(deny_unknown_fields)]`. `example` goes into
/// the hint of an error.
pub fn parse<T: DeserializeOwned>(
    module: &str,
    options: &Value,
    example: &str,
) -> Result<T, BdevError> {
    let map = match options {
        Value::Mapping(map) => map.clone(),
        // `null0: { null: }` means all defaults.
        Value::Null => Mapping::new(),
        _ => return Err(BdevError::new(module, "the options are not a mapping", like(example))),
    };
    serde_yaml::from_value(Value::Mapping(map.clone())).map_err(|whole| {
        let (key, message) = culprit::<T>(&map, whole.to_string());
        let key = key.map_or(module.to_string(), |key| format!("{module}.{key}"));
        BdevError::new(key, message, like(example))
    })
}

/// Which key is at fault, and the message about it: each key is tried alone, where the only other
/// complaint can be that a required one is missing.
fn culprit<T: DeserializeOwned>(map: &Mapping, whole: String) -> (Option<String>, String) {
    for (key, value) in map {
        let Some(name) = key.as_str() else {
            return (None, "an option's name is not a string".to_string());
        };
        let mut alone = Mapping::new();
        alone.insert(key.clone(), value.clone());
        if let Err(error) = serde_yaml::from_value::<T>(Value::Mapping(alone)) {
            let message = error.to_string();
            if !message.starts_with("missing field") {
                // serde_yaml puts "key: " before some messages; the error has the key already.
                let bare = message.strip_prefix(&format!("{name}: ")).unwrap_or(&message);
                return (Some(name.to_string()), bare.to_string());
            }
        }
    }
    (None, whole)
}

fn like(example: &str) -> String {
    if example.is_empty() { String::new() } else { format!("such as `{example}`") }
}

/// Checks an option that is a block size.
pub fn check_block_size(key: &str, block_size: u32) -> Result<(), BdevError> {
    if block_size.is_power_of_two() && (BLOCK_SIZE_MIN..=BLOCK_SIZE_MAX).contains(&block_size) {
        return Ok(());
    }
    Err(BdevError::new(
        key,
        format!("a block size of {block_size} is not possible"),
        format!("a power of two from {BLOCK_SIZE_MIN} to {BLOCK_SIZE_MAX}, mostly 512 or 4096"),
    ))
}

/// Checks an option that is a device's size and gives the blocks in it.
pub fn blocks_of(key: &str, bytes: u64, block_size: u32) -> Result<u64, BdevError> {
    let size = u64::from(block_size);
    if bytes == 0 || bytes > i64::MAX as u64 {
        return Err(BdevError::new(key, format!("a size of {bytes} bytes is not possible"), ""));
    }
    if !bytes.is_multiple_of(size) {
        return Err(BdevError::new(
            key,
            format!("{bytes} bytes are not a multiple of the block size, {block_size}"),
            format!("{} or {}", bytes - bytes % size, (bytes - bytes % size).saturating_add(size)),
        ));
    }
    Ok(bytes / size)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::size::ByteSize;

    #[derive(Debug, serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Options {
        size: ByteSize,
        #[serde(default)]
        lazy: bool,
        other: String,
    }

    fn read(yaml: &str) -> Result<Options, BdevError> {
        parse("mod", &serde_yaml::from_str(yaml).unwrap(), "{ mod: {} }")
    }

    #[test]
    fn good_options_are_read() {
        let options = read("{ size: 1KiB, lazy: true, other: x }").unwrap();
        assert!(options.lazy && options.size == ByteSize(1024) && options.other == "x");
    }

    #[test]
    fn the_key_at_fault_is_named() {
        for (yaml, key, message) in [
            ("{ size: 1GB, other: x }", "mod.size", "unit `GB`"),
            ("{ size: 1, lazy: maybe, other: x }", "mod.lazy", "boolean"),
            ("{ size: 1, other: x, sise: 3 }", "mod.sise", "unknown field"),
            ("{ size: 1 }", "mod", "missing field `other`"),
            ("{ other: x }", "mod", "missing field `size`"),
            ("~", "mod", "missing field"),
            ("7", "mod", "not a mapping"),
            ("{ 3: 4 }", "mod", "not a string"),
        ] {
            let error = read(yaml).unwrap_err();
            assert_eq!(error.key, key, "{yaml}: {error}");
            assert!(error.message.contains(message), "{yaml}: {error}");
            assert!(error.hint.contains("{ mod: {} }"));
        }
    }

    #[test]
    fn sizes_must_fit_blocks() {
        assert_eq!(blocks_of("k", 4096, 512), Ok(8));
        assert!(blocks_of("k", 0, 512).is_err());
        assert!(blocks_of("k", u64::MAX, 512).is_err());
        let error = blocks_of("k", 1000, 512).unwrap_err();
        assert_eq!(error.hint, "512 or 1024");
        assert!(check_block_size("k", 520).is_err());
        assert!(check_block_size("k", 256).is_err());
        assert!(check_block_size("k", 4096).is_ok());
    }
}
