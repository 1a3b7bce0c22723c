//! The bdev modules, as the configuration sees them: their names, and what they say to options.
//!
//! Owns: nothing; asks the registry of `usurp-bdev`. Never: opens a bdev.
//!
//! A module reports the first option that is wrong. To learn of the others too, that option is
//! taken away and the module asked again, until it is content or finds only something missing.

use serde_yaml::Value;
use usurp_bdev::BdevError;
use usurp_bdev::registry::{Registry, Spec};

use super::BdevConfig;
use super::section::suggestion;

/// What a module refuses.
#[derive(Debug)]
pub struct Fault {
    /// Index into the specs.
    pub index: usize,
    /// Path of the key at fault below the entry, such as `uring.path`.
    pub key: String,
    /// Whether the key itself is wrong, not its value.
    pub is_key: bool,
    /// What is wrong.
    pub message: String,
    /// What would be right.
    pub hint: String,
}

/// The names of all modules.
pub fn names() -> Vec<&'static str> {
    Registry::new().modules().iter().map(|module| module.name).collect()
}

/// The entry as the registry wants it.
pub fn spec(config: &BdevConfig) -> Spec {
    let BdevConfig { name, module, options } = config.clone();
    Spec { name, module, options }
}

/// The bdev that this one is stacked on, if it is a filter and its options are right.
pub fn base(config: &BdevConfig) -> Option<String> {
    let registry = Registry::new();
    let module = registry.modules().iter().find(|module| module.name == config.module)?;
    (module.check)(&config.options).ok().flatten()
}

/// Everything that is wrong with the options and the bases of a list of entries. Names given twice
/// are for the caller, who knows the lines.
pub fn faults(specs: &[Spec]) -> Vec<Fault> {
    let registry = Registry::new();
    let found = registry.check_all(specs);
    let mut faults: Vec<Fault> = found
        .into_iter()
        .filter(|(_, error)| error.key != "name")
        .map(|(index, error)| fault(index, error))
        .collect();
    for (index, spec) in specs.iter().enumerate() {
        let Some(module) = registry.modules().iter().find(|m| m.name == spec.module) else {
            continue;
        };
        let mut options = spec.options.clone();
        let mut error = (module.check)(&options).err();
        while let Some(before) = error {
            if !take_away(&mut options, &before.key) {
                break;
            }
            error = (module.check)(&options).err().filter(|error| error.key.contains('.'));
            faults.extend(error.clone().map(|error| fault(index, error)));
        }
    }
    faults
}

/// Removes the option that `module.option` names; false if there is none.
fn take_away(options: &mut Value, key: &str) -> bool {
    let (Some((_, option)), Some(map)) = (key.split_once('.'), options.as_mapping_mut()) else {
        return false;
    };
    map.remove(option).is_some()
}

/// An unknown option is said in our words, with the nearest known one; the rest in the module's.
fn fault(index: usize, error: BdevError) -> Fault {
    let BdevError { key, message, hint, .. } = error;
    let option = key.rsplit('.').next().unwrap_or_default();
    let start = format!("unknown field `{option}`, expected ");
    let Some(known) = message.strip_prefix(&start) else {
        return Fault { index, key, is_key: false, message, hint };
    };
    // serde lists them in backquotes: "one of `size`, `block_size`".
    let known: Vec<&str> = known.split('`').skip(1).step_by(2).collect();
    let module = key.split('.').next().unwrap_or_default();
    let message = format!("`{option}` is not an option of {module}");
    let hint = suggestion(option, "options", &known);
    Fault { index, is_key: true, message, hint, key }
}
