//! A problem with the configuration as a person reads it: place, line, caret, what would be right.
//!
//! ```text
//! lab.yaml:4:24: `sise` is not a key of malloc
//!   |
//! 4 |   - { name: a, malloc: { sise: 1GiB } }
//!   |                          ^^^^
//!   = did you mean `size`?
//! ```
//!
//! Invariant: a report holds all there is to show; it needs neither the text nor the tree any more.

use std::fmt;

use super::tree::{self, NodeId, Place};

/// The text that was read, kept so that later findings can be shown in it too.
#[derive(Clone, Debug)]
pub struct Source {
    /// The file as the user named it.
    pub file: String,
    /// Its content.
    pub text: String,
}

/// One thing wrong, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The file as the user named it.
    pub file: String,
    /// Where in it; none when the file as a whole is meant.
    pub place: Option<Place>,
    /// That line of the file.
    pub line: String,
    /// How many characters the carets underline, at least 1.
    pub width: usize,
    /// What is wrong.
    pub message: String,
    /// What would be right; may be empty.
    pub hint: String,
}

impl Source {
    /// A problem at a node.
    pub fn problem(&self, at: NodeId, message: String, hint: String) -> Problem {
        self.problem_at(tree::locate(&self.text, at), message, hint)
    }

    /// A problem at a place.
    pub fn problem_at(&self, place: Option<Place>, message: String, hint: String) -> Problem {
        let line = place.and_then(|at| self.text.lines().nth(at.line - 1)).unwrap_or("");
        let line = line.trim_end().to_owned();
        let width = place.map_or(1, |at| token_width(&line, at.column - 1));
        Problem { file: self.file.clone(), place, line, width, message, hint }
    }
}

/// The length of the scalar that begins at a character of a line; 1 for anything else.
fn token_width(line: &str, start: usize) -> usize {
    let rest: Vec<char> = line.chars().skip(start).collect();
    let Some(&first) = rest.first() else { return 1 };
    if first == '"' || first == '\'' {
        let end = rest.iter().skip(1).position(|c| *c == first);
        return end.map_or(rest.len(), |at| at + 2);
    }
    let ends = |at: usize| {
        let c = rest[at];
        let next = rest.get(at + 1).copied().unwrap_or(' ');
        matches!(c, ',' | ']' | '}' | '{' | '[') || (c == ':' && next == ' ') || {
            c == ' ' && next == '#'
        }
    };
    let end = (0..rest.len()).find(|at| ends(*at)).unwrap_or(rest.len());
    let token: String = rest[..end].iter().collect();
    token.trim_end().chars().count().max(1)
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Problem { file, line, message, hint, .. } = self;
        let Some(at) = self.place else {
            write!(f, "{file}: {message}")?;
            return if hint.is_empty() { Ok(()) } else { write!(f, "\n  = {hint}") };
        };
        let number = at.line.to_string();
        let gap = " ".repeat(number.len());
        // Tabs are copied, so that the caret stands below its character whatever a tab's width.
        let lead: String = line
            .chars()
            .chain(std::iter::repeat(' '))
            .take(at.column - 1)
            .map(|c| if c == '\t' { '\t' } else { ' ' })
            .collect();
        writeln!(f, "{file}:{}:{}: {message}", at.line, at.column)?;
        writeln!(f, "{gap} |")?;
        writeln!(f, "{number} | {line}")?;
        write!(f, "{gap} | {lead}{}", "^".repeat(self.width))?;
        if hint.is_empty() { Ok(()) } else { write!(f, "\n{gap} = {hint}") }
    }
}

/// Everything that is wrong with a configuration, in the order of the text. Never empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigErrors {
    problems: Vec<Problem>,
}

impl ConfigErrors {
    /// Puts the problems into the order of the text.
    pub fn new(mut problems: Vec<Problem>) -> ConfigErrors {
        assert!(!problems.is_empty(), "an error without a problem");
        let place = |problem: &Problem| problem.place.map(|at| (at.line, at.column));
        // By message too, so that what an alias makes appear twice is side by side.
        problems.sort_by(|a, b| (place(a), &a.message).cmp(&(place(b), &b.message)));
        problems.dedup();
        ConfigErrors { problems }
    }

    /// The problems one by one.
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }
}

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for problem in &self.problems {
            writeln!(f, "{problem}\n")?;
        }
        match self.problems.len() {
            1 => write!(f, "1 error; nothing was started"),
            count => write!(f, "{count} errors; nothing was started"),
        }
    }
}

impl std::error::Error for ConfigErrors {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scalar_is_underlined_to_its_end() {
        assert_eq!(token_width("  - { sise: 1GiB }", 6), 4);
        assert_eq!(token_width("a: \"two words\", b", 3), 11);
        assert_eq!(token_width("path: /a/b c  # why", 6), 6);
        assert_eq!(token_width("rdma: [::]:5", 6), 1);
        assert_eq!(token_width("g: 0002:c903:0000:0001 }", 3), 19);
        assert_eq!(token_width("", 4), 1);
    }

    #[test]
    fn the_caret_line_copies_tabs() {
        let source = Source { file: "t.yaml".into(), text: "a:\tb\n".into() };
        let place = Some(Place { line: 1, column: 4 });
        let problem = source.problem_at(place, "no".into(), String::new());
        assert_eq!(problem.to_string(), "t.yaml:1:4: no\n  |\n1 | a:\tb\n  |   \t^");
    }
}
