//! The table of modules, and the bdevs that were opened by name.
//!
//! Owns: which module a configuration entry means, the order of opening (bases before filters), and
//! claims: a bdev belongs to one filter, or is exported; a file belongs to one bdev.
//! Never does: I/O, locking of files against other processes (`uring` does). Used by the control
//! thread only.
//!
//! ```text
//!  - { name: ram0, malloc: { ... } }        free --claim_base--> Filter("slow0")   exclusive
//!  - { name: slow0, delay: { base: ram0 }}    \---export-------> Exported          many LUNs
//! ```

use std::sync::Arc;

use serde_yaml::Value;

use crate::contract::{Bdev, BdevError};

/// A module: its name in the configuration and how it is opened.
#[derive(Clone, Copy)]
pub struct Module {
    /// The key in an entry, such as `malloc`.
    pub name: &'static str,
    /// An example of the key and its options, for hints.
    pub example: &'static str,
    /// Checks the options without opening anything; gives the name of the base if it is a filter.
    pub check: fn(options: &Value) -> Result<Option<String>, BdevError>,
    /// Opens a bdev. May block.
    pub open: OpenFn,
}

/// Constructor of a module: name, options, what else it may use.
pub type OpenFn = fn(&str, &Value, &mut OpenContext<'_>) -> Result<Arc<dyn Bdev>, BdevError>;

/// One entry of the configuration's list of bdevs.
#[derive(Clone, Debug)]
pub struct Spec {
    /// Its unique name.
    pub name: String,
    /// The module's key.
    pub module: String,
    /// The module's options.
    pub options: Value,
}

impl Spec {
    /// Takes `{ name: ram0, malloc: { ... } }` apart.
    pub fn parse(entry: &Value) -> Result<Spec, BdevError> {
        const LIKE: &str = "such as `{ name: ram0, malloc: { size: 1GiB } }`";
        let error = |key: &str, message: &str| Err(BdevError::new(key, message, LIKE));
        let Value::Mapping(map) = entry else {
            return error("", "a bdev is not a mapping");
        };
        let Some(name) = map.get("name") else {
            return error("", "a bdev needs a name");
        };
        let good = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        let name = match name.as_str() {
            Some(name) if !name.is_empty() && name.chars().all(good) => name.to_string(),
            _ => return error("name", "a bdev's name is made of letters, digits, `.`, `_`, `-`"),
        };
        let mut modules = map.iter().filter(|(key, _)| key.as_str() != Some("name"));
        let Some((module, options)) = modules.next() else {
            return error("", "a bdev needs a module");
        };
        let Some(module) = module_name(module) else {
            return error("", "a module's name is not a string");
        };
        if let Some((second, _)) = modules.next() {
            let second = module_name(second).unwrap_or("?");
            return error(second, &format!("a second module beside `{module}`: want exactly one"));
        }
        Ok(Spec { name, module: module.to_string(), options: options.clone() })
    }
}

/// A module's key. In YAML a bare `null` is not a string, but here it can only mean the module.
fn module_name(key: &Value) -> Option<&str> {
    if key.is_null() { Some("null") } else { key.as_str() }
}

/// What makes two paths the same file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileId {
    /// A regular file.
    Inode {
        /// Device that holds the file system.
        dev: u64,
        /// Inode number.
        ino: u64,
    },
    /// A device, whichever node leads to it.
    Device {
        /// Device number.
        rdev: u64,
    },
}

/// Who uses a bdev.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Claim {
    /// Nobody.
    Free,
    /// The filter of that name, alone.
    Filter(String),
    /// The target, as one or more LUNs.
    Exported,
}

/// A bdev that is open.
struct Opened {
    /// The bdev.
    bdev: Arc<dyn Bdev>,
    /// Who uses it.
    claim: Claim,
}

/// Claims and open bdevs: what a constructor may see and change.
#[derive(Default)]
struct Tables {
    /// In order of opening.
    opened: Vec<Opened>,
    /// Files in use, with the name of the bdev.
    files: Vec<(FileId, String)>,
}

/// What a constructor may use beside its options.
pub struct OpenContext<'a> {
    /// The bdev that is being opened.
    name: &'a str,
    /// The registry's tables.
    tables: &'a mut Tables,
}

impl OpenContext<'_> {
    /// Takes the bdev `base` for this filter alone. `key` is where the name stands.
    pub fn claim_base(&mut self, key: &str, base: &str) -> Result<Arc<dyn Bdev>, BdevError> {
        let opened = self.tables.opened.iter_mut().find(|o| o.bdev.name() == base);
        let Some(opened) = opened else {
            return Err(BdevError::new(key, format!("there is no bdev `{base}`"), ""));
        };
        match &opened.claim {
            Claim::Free => {
                opened.claim = Claim::Filter(self.name.to_string());
                Ok(opened.bdev.clone())
            }
            Claim::Filter(other) => Err(claimed_twice(key, base, other)),
            Claim::Exported => Err(BdevError::new(
                key,
                format!("bdev `{base}` is exported as a LUN already"),
                format!("export `{}` instead of `{base}`", self.name),
            )),
        }
    }

    /// Takes a file for this bdev alone, within this process.
    pub fn claim_file(&mut self, key: &str, file: FileId) -> Result<(), BdevError> {
        if let Some((_, other)) = self.tables.files.iter().find(|(id, _)| *id == file) {
            return Err(BdevError::new(
                key,
                format!("the file is in use by bdev `{other}` already"),
                format!("export `{other}` as several LUNs, or name another file"),
            ));
        }
        self.tables.files.push((file, self.name.to_string()));
        Ok(())
    }
}

fn claimed_twice(key: &str, base: &str, other: &str) -> BdevError {
    BdevError::new(
        key,
        format!("bdev `{base}` is the base of `{other}` already"),
        format!("stack on `{other}`, or give each filter its own base"),
    )
}

/// Modules by name, and bdevs by name.
pub struct Registry {
    /// Known modules; names are unique.
    modules: Vec<Module>,
    /// What is open, and claims.
    tables: Tables,
}

impl Registry {
    /// With the modules of this crate, and nothing open.
    pub fn new() -> Registry {
        let modules = vec![
            crate::null::MODULE,
            crate::malloc::MODULE,
            crate::uring::MODULE,
            crate::filter::delay::MODULE,
            crate::filter::error::MODULE,
        ];
        Registry { modules, tables: Tables::default() }
    }

    /// Adds a module from elsewhere.
    pub fn add_module(&mut self, module: Module) {
        let known = self.modules.iter().any(|m| m.name == module.name);
        assert!(!known && module.name != "name", "module `{}` twice", module.name);
        self.modules.push(module);
    }

    /// The known modules.
    pub fn modules(&self) -> &[Module] {
        &self.modules
    }

    /// An open bdev.
    pub fn get(&self, name: &str) -> Option<&Arc<dyn Bdev>> {
        self.bdevs().find(|bdev| bdev.name() == name)
    }

    /// All open bdevs, in order of opening.
    pub fn bdevs(&self) -> impl Iterator<Item = &Arc<dyn Bdev>> {
        self.tables.opened.iter().map(|opened| &opened.bdev)
    }

    /// Takes a bdev for a LUN. Several LUNs may share one; none may share it with a filter.
    pub fn export(&mut self, name: &str) -> Result<Arc<dyn Bdev>, BdevError> {
        let opened = self.tables.opened.iter_mut().find(|o| o.bdev.name() == name);
        let Some(opened) = opened else {
            return Err(BdevError::new("", format!("there is no bdev `{name}`"), ""));
        };
        if let Claim::Filter(filter) = &opened.claim {
            return Err(BdevError::new(
                "",
                format!("bdev `{name}` is the base of `{filter}`: its data would change under it"),
                format!("export `{filter}`"),
            ));
        }
        opened.claim = Claim::Exported;
        Ok(opened.bdev.clone())
    }

    /// Opens one bdev; the base of a filter must be open.
    pub fn open(&mut self, spec: &Spec) -> Result<Arc<dyn Bdev>, BdevError> {
        let module = *self.module(spec)?;
        if self.get(&spec.name).is_some() {
            return Err(duplicate(&spec.name));
        }
        let mut context = OpenContext { name: &spec.name, tables: &mut self.tables };
        let result = (module.open)(&spec.name, &spec.options, &mut context);
        let Ok(bdev) = result else {
            self.unclaim(&spec.name);
            return result;
        };
        let caps = bdev.caps();
        assert!(bdev.geometry().is_sane(), "{}: {:?}", spec.name, bdev.geometry());
        assert!(caps.unmap || !caps.unmap_zeroes, "{}: unmap_zeroes without unmap", spec.name);
        assert_eq!(bdev.name(), spec.name, "the bdev has another name than its entry");
        self.tables.opened.push(Opened { bdev: bdev.clone(), claim: Claim::Free });
        Ok(bdev)
    }

    /// Undoes the claims of a bdev that did not open.
    fn unclaim(&mut self, name: &str) {
        self.tables.files.retain(|(_, owner)| owner != name);
        for opened in &mut self.tables.opened {
            if opened.claim == Claim::Filter(name.to_string()) {
                opened.claim = Claim::Free;
            }
        }
    }

    fn module(&self, spec: &Spec) -> Result<&Module, BdevError> {
        let found = self.modules.iter().find(|m| m.name == spec.module);
        found.ok_or_else(|| {
            let known: Vec<&str> = self.modules.iter().map(|m| m.name).collect();
            BdevError::new(
                spec.module.as_str(),
                format!("there is no bdev module `{}`", spec.module),
                format!("one of: {}", known.join(", ")),
            )
        })
    }

    /// Finds what is wrong with a list of entries without opening any: options, names, bases.
    /// Gives all errors, each with the entry's index.
    pub fn check_all(&self, specs: &[Spec]) -> Vec<(usize, BdevError)> {
        let mut errors = Vec::new();
        let mut bases: Vec<Option<String>> = Vec::new();
        for (index, spec) in specs.iter().enumerate() {
            let base = self.module(spec).and_then(|module| (module.check)(&spec.options));
            let base = base.unwrap_or_else(|error| {
                errors.push((index, error));
                None
            });
            if specs[..index].iter().any(|other| other.name == spec.name) {
                errors.push((index, duplicate(&spec.name)));
            }
            if let Some(base) = &base {
                errors.extend(check_base(specs, &bases, index, base).map(|e| (index, e)));
            }
            bases.push(base);
        }
        for index in 0..specs.len() {
            if is_circular(specs, &bases, index) {
                let key = format!("{}.base", specs[index].module);
                let message = format!("bdev `{}` stacks on itself", specs[index].name);
                errors.push((index, BdevError::new(key, message, "")));
            }
        }
        errors
    }

    /// Opens a list of entries, bases first. Stops before opening any if [`Self::check_all`] finds
    /// errors; else opens what it can and gives all errors.
    pub fn open_all(&mut self, specs: &[Spec]) -> Result<(), Vec<(usize, BdevError)>> {
        let mut errors = self.check_all(specs);
        if !errors.is_empty() {
            return Err(errors);
        }
        let mut waiting: Vec<usize> = (0..specs.len()).collect();
        while !waiting.is_empty() {
            let before = waiting.len();
            waiting.retain(|&index| {
                let base = self.base_of(&specs[index]);
                if base.is_some_and(|base| self.get(&base).is_none()) {
                    return true;
                }
                errors.extend(self.open(&specs[index]).err().map(|e| (index, e)));
                false
            });
            if waiting.len() == before {
                // Their bases failed, which is the error to report.
                break;
            }
        }
        if errors.is_empty() { Ok(()) } else { Err(errors) }
    }

    fn base_of(&self, spec: &Spec) -> Option<String> {
        let module = self.module(spec).ok()?;
        (module.check)(&spec.options).ok()?
    }
}

impl Default for Registry {
    fn default() -> Registry {
        Registry::new()
    }
}

fn duplicate(name: &str) -> BdevError {
    BdevError::new("name", format!("there are two bdevs `{name}`"), "names are unique")
}

/// Checks the base of the filter at `index`; `bases` are those of the entries before it.
fn check_base(
    specs: &[Spec],
    bases: &[Option<String>],
    index: usize,
    base: &str,
) -> Option<BdevError> {
    let key = format!("{}.base", specs[index].module);
    if !specs.iter().any(|spec| spec.name == base) {
        let names: Vec<&str> = specs.iter().map(|spec| spec.name.as_str()).collect();
        let hint = format!("one of: {}", names.join(", "));
        return Some(BdevError::new(key, format!("there is no bdev `{base}`"), hint));
    }
    let other = bases.iter().position(|b| b.as_deref() == Some(base))?;
    Some(claimed_twice(&key, base, &specs[other].name))
}

/// Whether the chain of bases from `index` comes back to it.
fn is_circular(specs: &[Spec], bases: &[Option<String>], index: usize) -> bool {
    let mut at = index;
    for _ in 0..specs.len() {
        let Some(base) = &bases[at] else { return false };
        let Some(next) = specs.iter().position(|spec| spec.name == *base) else { return false };
        if next == index {
            return true;
        }
        at = next;
    }
    false
}

/// Opens the entries of a YAML list (or one entry) and gives the last: for tests.
#[cfg(any(test, feature = "test-utils"))]
pub fn open_one(yaml: &str) -> Result<Arc<dyn Bdev>, BdevError> {
    let value: Value = serde_yaml::from_str(yaml).expect("the test's YAML is well formed");
    let entries = match value {
        Value::Sequence(entries) => entries,
        entry => vec![entry],
    };
    let mut registry = Registry::new();
    let mut last = None;
    for entry in &entries {
        last = Some(registry.open(&Spec::parse(entry)?)?);
    }
    Ok(last.expect("the test opens at least one bdev"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn specs(yaml: &str) -> Vec<Spec> {
        let entries: Vec<Value> = serde_yaml::from_str(yaml).unwrap();
        entries.iter().map(|entry| Spec::parse(entry).unwrap()).collect()
    }

    fn refusal(entry: &str) -> BdevError {
        Spec::parse(&serde_yaml::from_str(entry).unwrap()).unwrap_err()
    }

    #[test]
    fn malformed_entries_are_refused() {
        for (entry, key, message) in [
            ("7", "", "not a mapping"),
            ("{ malloc: { size: 1MiB } }", "", "needs a name"),
            ("{ name: a }", "", "needs a module"),
            ("{ name: 'a b', null: }", "name", "letters"),
            ("{ name: '', null: }", "name", "letters"),
            ("{ name: 3, null: }", "name", "letters"),
            ("{ name: a, null: , malloc: }", "malloc", "second module"),
            ("{ name: a, 7: }", "", "not a string"),
        ] {
            let error = refusal(entry);
            assert_eq!(error.key, key, "{entry}");
            assert!(error.message.contains(message), "{entry}: {error}");
        }
    }

    #[test]
    fn an_unknown_module_lists_the_known() {
        let mut registry = Registry::new();
        let error = registry.open(&specs("[{ name: a, mallok: {} }]")[0]).err().unwrap();
        assert_eq!(error.key, "mallok");
        assert!(error.hint.contains("null, malloc, uring"), "{error}");
    }

    #[test]
    fn bases_are_opened_before_their_filters_in_any_order() {
        let mut registry = Registry::new();
        let list = specs(
            "[{ name: c, error: { base: b, status: io } }, { name: b, delay: { base: a } },
              { name: a, null: { size: 1MiB } }]",
        );
        registry.open_all(&list).unwrap();
        let names: Vec<&str> = registry.bdevs().map(|b| b.name()).collect();
        assert_eq!(names, ["a", "b", "c"]);
        assert_eq!(registry.get("c").unwrap().geometry().blocks, 2048);
    }

    #[test]
    fn all_errors_are_found_at_once_and_nothing_is_opened() {
        let mut registry = Registry::new();
        let list = specs(
            "[{ name: a, null: { size: 1 } }, { name: a, null: }, { name: x, delay: { base: no } },
              { name: l, delay: { base: m } }, { name: m, delay: { base: l } },
              { name: p, delay: { base: a } }, { name: q, delay: { base: a } }]",
        );
        let errors = registry.open_all(&list).unwrap_err();
        let found: Vec<(usize, &str)> = errors.iter().map(|(i, e)| (*i, e.key.as_str())).collect();
        let want = [
            (0, "null.size"),
            (1, "name"),
            (2, "delay.base"),
            (6, "delay.base"),
            (3, "delay.base"),
            (4, "delay.base"),
        ];
        assert_eq!(found, want);
        assert_eq!(registry.bdevs().count(), 0);
    }

    #[test]
    fn a_claimed_bdev_is_neither_claimed_again_nor_exported() {
        let mut registry = Registry::new();
        let list = specs(
            "[{ name: a, null: }, { name: f, delay: { base: a } },
              { name: g, delay: { base: a } }, { name: h, delay: { base: f } }]",
        );
        registry.open(&list[0]).unwrap();
        registry.open(&list[1]).unwrap();
        let error = registry.open(&list[2]).err().unwrap();
        assert!(error.message.contains("base of `f` already"), "{error}");
        let error = registry.export("a").err().unwrap();
        assert_eq!(error.hint, "export `f`");
        registry.export("f").unwrap();
        registry.export("f").unwrap();
        let error = registry.open(&list[3]).err().unwrap();
        assert!(error.message.contains("exported"), "{error}");
        assert!(registry.export("nobody").is_err());
    }

    #[test]
    fn a_failed_open_leaves_no_claim() {
        fn fails(
            _: &str,
            _: &Value,
            context: &mut OpenContext<'_>,
        ) -> Result<Arc<dyn Bdev>, BdevError> {
            context.claim_base("bad.base", "a")?;
            context.claim_file("bad.path", FileId::Device { rdev: 1 })?;
            Err(BdevError::new("bad", "never", ""))
        }
        let mut registry = Registry::new();
        registry.add_module(Module { name: "bad", example: "", check: |_| Ok(None), open: fails });
        registry.open(&specs("[{ name: a, null: }]")[0]).unwrap();
        let bad = &specs("[{ name: b, bad: }]")[0];
        for _ in 0..2 {
            assert_eq!(registry.open(bad).err().unwrap().message, "never");
        }
        registry.export("a").unwrap();
    }

    #[test]
    #[should_panic(expected = "twice")]
    fn a_module_can_not_be_added_twice() {
        Registry::new().add_module(crate::null::MODULE);
    }
}
