//! The YAML text as a tree of numbered nodes, and the way back from a number to a place in it.
//!
//! `serde_yaml::Value` knows no positions and stops at the first duplicate key. This module has
//! serde_yaml deserialise into a tree of its own instead: mappings stay lists of pairs (so that a
//! duplicate key can be *reported*), and every node has a number, its rank in reading order.
//!
//! ```text
//!   text --serde_yaml--> Node 0 ── Node 1 (key) ─ Node 2 (value) ...       read(): no positions
//!   text --serde_yaml, told to fail at node 7--> error.location()          locate(7): one position
//! ```
//!
//! A position is wanted only when something is wrong. So it is had by reading the text once more
//! with a visitor that fails on purpose at that node: serde_yaml then says where it stood. One
//! parser, hence no disagreement about what a node is; the cost is a parse per reported problem.
//!
//! Never: interprets keys; that is `check`'s.

use std::cell::Cell;
use std::fmt;

use serde::de::{
    DeserializeSeed, Deserializer, EnumAccess, Error, MapAccess, SeqAccess, VariantAccess, Visitor,
};

/// Rank of a node in reading order; the root is 0. What an alias stands for is counted again.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct NodeId(pub u32);

/// A place in the text, both counted from 1.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Line.
    pub line: usize,
    /// Column, in characters.
    pub column: usize,
}

/// One YAML node.
#[derive(Clone, Debug)]
pub struct Node {
    /// Its rank.
    pub id: NodeId,
    /// Its content.
    pub kind: Kind,
}

/// What a node holds.
#[derive(Clone, Debug)]
pub enum Kind {
    /// `null`, `~` or nothing at all.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// An integer, decimal, hexadecimal or octal.
    Int(i128),
    /// Any other number.
    Float(f64),
    /// A string.
    Text(String),
    /// A sequence.
    List(Vec<Node>),
    /// A mapping, in the order of the text, duplicates and `<<` included.
    Map(Vec<(Node, Node)>),
    /// A node with a tag of its own, such as `!secret x`; nothing here takes one.
    Tagged(String),
}

impl Kind {
    /// What a person calls it.
    pub fn name(&self) -> &'static str {
        match self {
            Kind::Null => "nothing",
            Kind::Bool(_) => "a truth value",
            Kind::Int(_) | Kind::Float(_) => "a number",
            Kind::Text(_) => "a string",
            Kind::List(_) => "a list",
            Kind::Map(_) => "a mapping",
            Kind::Tagged(_) => "a tagged value",
        }
    }
}

impl Node {
    /// The string, if it is one.
    pub fn text(&self) -> Option<&str> {
        match &self.kind {
            Kind::Text(text) => Some(text),
            _ => None,
        }
    }

    /// The node as it would look in an error text, cut to a bearable length.
    pub fn shown(&self) -> String {
        match &self.kind {
            Kind::Text(text) if text.chars().count() > 48 => {
                text.chars().take(45).collect::<String>() + "..."
            }
            Kind::Text(text) => text.clone(),
            Kind::Bool(value) => value.to_string(),
            Kind::Int(value) => value.to_string(),
            Kind::Float(value) => value.to_string(),
            other => other.name().to_owned(),
        }
    }

    /// The value of a key of this mapping; explicit keys come before merged ones.
    pub fn get(&self, key: &str) -> Option<&Node> {
        let pairs = flattened(self);
        pairs.into_iter().find(|(k, _)| k.text() == Some(key)).map(|(_, value)| value)
    }

    /// The same content as serde_yaml's own value, for typed deserialisation.
    pub fn value(&self) -> serde_yaml::Value {
        use serde_yaml::Value;
        match &self.kind {
            Kind::Null | Kind::Tagged(_) => Value::Null,
            Kind::Bool(value) => Value::Bool(*value),
            Kind::Int(value) => match (u64::try_from(*value), i64::try_from(*value)) {
                (Ok(value), _) => Value::from(value),
                (_, Ok(value)) => Value::from(value),
                _ => Value::String(value.to_string()),
            },
            Kind::Float(value) => Value::from(*value),
            Kind::Text(text) => Value::String(text.clone()),
            Kind::List(items) => Value::Sequence(items.iter().map(Node::value).collect()),
            Kind::Map(_) => {
                let pairs = flattened(self).into_iter().rev(); // the first of two keys wins
                Value::Mapping(pairs.map(|(key, value)| (key.value(), value.value())).collect())
            }
        }
    }
}

/// The pairs of a mapping with `<<` resolved: its own first, then those merged in that it lacks.
pub fn flattened(map: &Node) -> Vec<(&Node, &Node)> {
    let Kind::Map(pairs) = &map.kind else { return Vec::new() };
    let is_merge = |key: &Node| key.text() == Some("<<");
    let mut all: Vec<_> =
        pairs.iter().filter(|(key, _)| !is_merge(key)).map(|(k, v)| (k, v)).collect();
    for (_, from) in pairs.iter().filter(|(key, _)| is_merge(key)) {
        let sources = match &from.kind {
            Kind::List(items) => items.iter().collect(),
            _ => vec![from],
        };
        for (key, value) in sources.into_iter().flat_map(flattened) {
            if !all.iter().any(|(have, _)| same_key(have, key)) {
                all.push((key, value));
            }
        }
    }
    all
}

/// Whether two keys are the same key.
pub fn same_key(a: &Node, b: &Node) -> bool {
    match (&a.kind, &b.kind) {
        (Kind::Text(a), Kind::Text(b)) => a == b,
        (Kind::Int(a), Kind::Int(b)) => a == b,
        (Kind::Bool(a), Kind::Bool(b)) => a == b,
        (Kind::Null, Kind::Null) => true,
        _ => false,
    }
}

/// Why a text is no YAML.
#[derive(Debug)]
pub struct SyntaxError {
    /// Where the parser gave up; none for a second document.
    pub place: Option<Place>,
    /// What it said.
    pub message: String,
}

/// Reads the text into a tree.
pub fn read(text: &str) -> Result<Node, SyntaxError> {
    let next = Cell::new(0);
    let seed = Seed { next: &next, stop: None };
    seed.deserialize(serde_yaml::Deserializer::from_str(text)).map_err(|error| SyntaxError {
        place: place_of(&error),
        message: without_place(&error.to_string()).to_owned(),
    })
}

/// Where a node of [`read`]'s tree begins in the same text. An alias leads to what it stands for.
pub fn locate(text: &str, id: NodeId) -> Option<Place> {
    let next = Cell::new(0);
    let seed = Seed { next: &next, stop: Some(id) };
    let error = seed.deserialize(serde_yaml::Deserializer::from_str(text)).err()?;
    place_of(&error)
}

fn place_of(error: &serde_yaml::Error) -> Option<Place> {
    error.location().map(|at| Place { line: at.line(), column: at.column() })
}

/// The first clause of a parser message, before its own words for the place.
fn without_place(message: &str) -> &str {
    message.split(" at line ").next().unwrap_or(message)
}

/// Numbers the nodes as they come, and fails at `stop`.
#[derive(Copy, Clone)]
struct Seed<'a> {
    next: &'a Cell<u32>,
    stop: Option<NodeId>,
}

impl<'de> DeserializeSeed<'de> for Seed<'_> {
    type Value = Node;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Node, D::Error> {
        let id = NodeId(self.next.get());
        self.next.set(id.0 + 1);
        from.deserialize_any(NodeVisitor { id, seed: self })
    }
}

struct NodeVisitor<'a> {
    id: NodeId,
    seed: Seed<'a>,
}

impl NodeVisitor<'_> {
    /// The error that carries the position back, when this is the node asked for.
    fn pass<E: Error>(&self) -> Result<(), E> {
        if self.seed.stop == Some(self.id) { Err(E::custom("here")) } else { Ok(()) }
    }

    fn leaf<E: Error>(self, kind: Kind) -> Result<Node, E> {
        self.pass()?;
        Ok(Node { id: self.id, kind })
    }
}

impl<'de> Visitor<'de> for NodeVisitor<'_> {
    type Value = Node;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any YAML value")
    }

    fn visit_none<E: Error>(self) -> Result<Node, E> {
        self.leaf(Kind::Null)
    }

    fn visit_unit<E: Error>(self) -> Result<Node, E> {
        self.leaf(Kind::Null)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Node, E> {
        self.leaf(Kind::Bool(value))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Node, E> {
        self.leaf(Kind::Int(value.into()))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Node, E> {
        self.leaf(Kind::Int(value.into()))
    }

    fn visit_i128<E: Error>(self, value: i128) -> Result<Node, E> {
        self.leaf(Kind::Int(value))
    }

    fn visit_u128<E: Error>(self, value: u128) -> Result<Node, E> {
        let kind = i128::try_from(value).map_or(Kind::Float(value as f64), Kind::Int);
        self.leaf(kind)
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Node, E> {
        self.leaf(Kind::Float(value))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Node, E> {
        self.leaf(Kind::Text(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Node, A::Error> {
        self.pass()?;
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(self.seed)? {
            list.push(item);
        }
        Ok(Node { id: self.id, kind: Kind::List(list) })
    }

    fn visit_map<A: MapAccess<'de>>(self, mut pairs: A) -> Result<Node, A::Error> {
        self.pass()?;
        let mut map = Vec::new();
        while let Some(mut key) = pairs.next_key_seed(self.seed)? {
            // YAML reads a bare `null:` as no key at all; here it is the module of that name.
            if matches!(key.kind, Kind::Null) {
                key.kind = Kind::Text("null".to_owned());
            }
            map.push((key, pairs.next_value_seed(self.seed)?));
        }
        Ok(Node { id: self.id, kind: Kind::Map(map) })
    }

    fn visit_enum<A: EnumAccess<'de>>(self, tagged: A) -> Result<Node, A::Error> {
        self.pass()?;
        let (tag, content) = tagged.variant::<String>()?;
        content.newtype_variant_seed(self.seed)?;
        Ok(Node { id: self.id, kind: Kind::Tagged(tag) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(text: &str, node: &Node, out: &mut Vec<(String, usize, usize)>) {
        let at = locate(text, node.id).expect("every node has a place");
        out.push((node.shown(), at.line, at.column));
        match &node.kind {
            Kind::List(items) => items.iter().for_each(|item| places(text, item, out)),
            Kind::Map(pairs) => pairs.iter().for_each(|(key, value)| {
                places(text, key, out);
                places(text, value, out);
            }),
            _ => {}
        }
    }

    #[test]
    fn every_node_of_block_and_flow_style_is_found_where_it_stands() {
        let text = "# comment\na: { b: 1, \"c\": [x, 2.5] }\nd:\n  - e: ~\n  - é: true\n";
        let mut found = Vec::new();
        places(text, &read(text).unwrap(), &mut found);
        let found: Vec<_> = found.iter().map(|(s, l, c)| (s.as_str(), *l, *c)).collect();
        let wanted = [
            ("a mapping", 2, 1),
            ("a", 2, 1),
            ("a mapping", 2, 4),
            ("b", 2, 6),
            ("1", 2, 9),
            ("c", 2, 12),
            ("a list", 2, 17),
            ("x", 2, 18),
            ("2.5", 2, 21),
            ("d", 3, 1),
            ("a list", 4, 3),
            ("a mapping", 4, 5),
            ("e", 4, 5),
            ("nothing", 4, 8),
            ("a mapping", 5, 5),
            ("é", 5, 5),
            ("true", 5, 8),
        ];
        assert_eq!(found, wanted);
    }

    #[test]
    fn an_alias_leads_to_its_anchor() {
        let text = "a: &x { k: 1 }\nb: *x\n";
        let root = read(text).unwrap();
        let k = root.get("b").unwrap().get("k").unwrap();
        assert_eq!(locate(text, k.id), Some(Place { line: 1, column: 12 }));
    }

    #[test]
    fn merged_keys_give_way_to_the_mapping_s_own() {
        let root = read("a: &x { k: 1, m: 2 }\nb: { <<: *x, k: 3 }\n").unwrap();
        let b = root.get("b").unwrap();
        assert!(matches!(b.get("k").unwrap().kind, Kind::Int(3)));
        assert!(matches!(b.get("m").unwrap().kind, Kind::Int(2)));
        let value: std::collections::BTreeMap<String, u8> =
            serde_yaml::from_value(b.value()).unwrap();
        assert_eq!(value.into_iter().collect::<Vec<_>>(), [("k".into(), 3), ("m".into(), 2)]);
    }

    #[test]
    fn an_integer_of_128_bits_is_still_read() {
        let root = read("a: 0x00112233445566778899aabbccddeeff\n").unwrap();
        assert!(matches!(root.get("a").unwrap().kind, Kind::Int(_)), "{root:?}");
    }
}
