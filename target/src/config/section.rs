//! One mapping of the configuration: its keys checked, its values read one by one.
//!
//! A problem is noted and reading goes on, so that one run shows all of them. A value that could
//! not be read is `None`; nobody uses a half-read configuration, because a note means refusal.

use super::report::{Problem, Source};
use super::tree::{Kind, Node, flattened, same_key};
use super::values::Field;

/// What was found wrong so far.
pub struct Notes<'a> {
    /// The text, to point into.
    source: &'a Source,
    /// Reasons to refuse.
    pub errors: Vec<Problem>,
    /// Reasons to wonder.
    pub warnings: Vec<Problem>,
}

impl<'a> Notes<'a> {
    /// None yet.
    pub fn new(source: &'a Source) -> Notes<'a> {
        Notes { source, errors: Vec::new(), warnings: Vec::new() }
    }

    /// Notes an error at a node: what is wrong, and what would be right.
    pub fn error(&mut self, at: &Node, message: impl Into<String>, hint: impl Into<String>) {
        self.errors.push(self.source.problem(at.id, message.into(), hint.into()));
    }

    /// Notes a warning at a node.
    pub fn warn(&mut self, at: &Node, message: impl Into<String>, hint: impl Into<String>) {
        self.warnings.push(self.source.problem(at.id, message.into(), hint.into()));
    }

    /// The line a node stands on.
    pub fn line_of(&self, node: &Node) -> usize {
        super::tree::locate(&self.source.text, node.id).map_or(0, |at| at.line)
    }

    /// Notes what is wrong anywhere below `node`, whatever the keys mean: keys that are given
    /// twice, tags, and `<<` with nothing to merge.
    pub fn structure(&mut self, node: &Node) {
        match &node.kind {
            Kind::Tagged(tag) => {
                let message = format!("the tag `!{}` means nothing here", tag.trim_matches('!'));
                self.error(node, message, "write the value without it");
            }
            Kind::List(items) => items.iter().for_each(|item| self.structure(item)),
            Kind::Map(pairs) => {
                for (at, (key, value)) in pairs.iter().enumerate() {
                    if let Some((first, _)) = pairs[..at].iter().find(|(k, _)| same_key(k, key)) {
                        let line = self.line_of(first);
                        self.error(
                            key,
                            format!("`{}` is given twice", key.shown()),
                            format!("the first is on line {line}; keep one of them"),
                        );
                    }
                    if key.text() == Some("<<") && !is_mergeable(value) {
                        let message = format!("`<<` cannot merge {}", value.kind.name());
                        self.error(value, message, "write an alias of a mapping, such as *common");
                    }
                    self.structure(value);
                }
            }
            _ => {}
        }
    }
}

/// Whether `<<` takes it: a mapping, or a list of mappings.
fn is_mergeable(node: &Node) -> bool {
    match &node.kind {
        Kind::Map(_) => true,
        Kind::List(items) => items.iter().all(|item| matches!(item.kind, Kind::Map(_))),
        _ => false,
    }
}

/// A mapping whose keys are known.
pub struct Section<'a> {
    /// The mapping.
    node: &'a Node,
    /// What it is, for messages: `memory`, "a host".
    what: &'static str,
    /// Its pairs, merged ones included, without duplicates.
    pairs: Vec<(&'a Node, &'a Node)>,
}

impl<'a> Section<'a> {
    /// Opens a mapping and notes every key that is none of `keys`.
    pub fn open(
        node: &'a Node,
        what: &'static str,
        keys: &[&str],
        notes: &mut Notes<'_>,
    ) -> Option<Section<'a>> {
        let section = Section::open_loose(node, what, keys, notes)?;
        for (key, _) in &section.pairs {
            if !key.text().is_some_and(|text| keys.contains(&text)) {
                let message = format!("`{}` is not a key of {what}", key.shown());
                notes.error(key, message, suggestion(&key.shown(), "keys", keys));
            }
        }
        Some(section)
    }

    /// Opens a mapping that may have further keys, which [`Section::others`] lists.
    pub fn open_loose(
        node: &'a Node,
        what: &'static str,
        keys: &[&str],
        notes: &mut Notes<'_>,
    ) -> Option<Section<'a>> {
        if !matches!(node.kind, Kind::Map(_)) {
            let message = format!("{what} must be a mapping, not {}", node.kind.name());
            notes.error(node, message, format!("write `key: value` pairs: {}", keys.join(", ")));
            return None;
        }
        Some(Section { node, what, pairs: flattened(node) })
    }

    /// The mapping itself.
    pub fn node(&self) -> &'a Node {
        self.node
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&'a Node> {
        self.pairs.iter().find(|(k, _)| k.text() == Some(key)).map(|(_, value)| *value)
    }

    /// The pairs whose key is none of `keys`.
    pub fn others(&self, keys: &[&str]) -> Vec<(&'a Node, &'a Node)> {
        let known = |key: &Node| key.text().is_some_and(|text| keys.contains(&text));
        self.pairs.iter().filter(|(key, _)| !known(key)).copied().collect()
    }

    /// The value of a key that must be there.
    pub fn required(&self, key: &str, right: &str, notes: &mut Notes<'_>) -> Option<&'a Node> {
        let found = self.get(key);
        if found.is_none() {
            let message = format!("{} lacks `{key}`", self.what);
            notes.error(self.node, message, format!("add `{key}:` with {right}"));
        }
        found
    }

    /// Reads a value that may be missing.
    pub fn optional<T: Field>(&self, key: &str, notes: &mut Notes<'_>) -> Option<T> {
        self.get(key).and_then(|node| field(key, node, notes))
    }

    /// Reads a value that must be there.
    pub fn wanted<T: Field>(&self, key: &str, notes: &mut Notes<'_>) -> Option<T> {
        self.required(key, T::RIGHT, notes).and_then(|node| field(key, node, notes))
    }

    /// Reads a whole number within bounds.
    pub fn number(&self, key: &str, min: u32, max: u32, notes: &mut Notes<'_>) -> Option<u32> {
        let node = self.get(key)?;
        let number = serde_yaml::from_value::<u32>(node.value()).ok();
        let number = number.filter(|number| (min..=max).contains(number));
        if number.is_none() {
            refuse(key, node, &format!("a whole number from {min} to {max}"), notes);
        }
        number
    }

    /// The items of a list that must be there and must not be empty.
    pub fn list(&self, key: &str, right: &str, notes: &mut Notes<'_>) -> &'a [Node] {
        let Some(node) = self.required(key, right, notes) else { return &[] };
        match &node.kind {
            Kind::List(items) if !items.is_empty() => items,
            Kind::List(_) => {
                notes.error(node, format!("`{key}` is empty"), format!("write {right}"));
                &[]
            }
            other => {
                let message = format!("`{key}` must be a list, not {}", other.name());
                notes.error(node, message, format!("write {right}"));
                &[]
            }
        }
    }
}

/// Reads one value by serde, or notes what would be right.
pub fn field<T: Field>(key: &str, node: &Node, notes: &mut Notes<'_>) -> Option<T> {
    let value = serde_yaml::from_value(node.value()).ok();
    if value.is_none() {
        refuse(key, node, T::RIGHT, notes);
    }
    value
}

/// Notes that a key cannot hold this value.
pub fn refuse(key: &str, node: &Node, right: &str, notes: &mut Notes<'_>) {
    let shown = match node.kind {
        Kind::Null | Kind::List(_) | Kind::Map(_) | Kind::Tagged(_) => node.shown(),
        Kind::Int(_) | Kind::Float(_) if right.contains("in quotes") => {
            "a number without quotes".to_owned()
        }
        _ => format!("`{}`", node.shown()),
    };
    notes.error(node, format!("`{key}` cannot be {shown}"), format!("write {right}"));
}

/// "did you mean ...?" when something comes close, and the full list.
pub fn suggestion(word: &str, kind: &str, known: &[&str]) -> String {
    if known.is_empty() {
        return format!("there are no {kind} here");
    }
    let list = known.join(", ");
    let distance = |known: &&&str| strsim::damerau_levenshtein(word, known);
    match known.iter().min_by_key(distance) {
        Some(near) if distance(&near) <= 1 + near.len() / 3 => {
            format!("did you mean `{near}`? the {kind} here are: {list}")
        }
        _ => format!("the {kind} here are: {list}"),
    }
}
