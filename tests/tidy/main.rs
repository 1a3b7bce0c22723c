//! The rules of docs/style.md that a machine can check.
//!
//! Length limits are a ratchet: what is over a limit stands in `ledger.txt` with its size, and may
//! only shrink. After shrinking something run with `USURP_TIDY=write` to write the ledger anew.
//!
//! ```text
//!   every .rs file ──> header? lengths? banned words? unsafe where it may? ──> list of faults
//!   the checkout   ──> cargo's litter in target/? top-level names? registries?
//! ```

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

const LINE_CHARS_MAX: usize = 100;
const FUNCTION_LINES_MAX: usize = 70;
const FILE_LINES_MAX: usize = 600;
const LEDGER: &str = "tests/tidy/ledger.txt";

/// Words that must not stay, put together here so that this file may be checked too.
fn banned_words() -> Vec<String> {
    let parts = [("to", "do!"), ("unimple", "mented!"), ("FIX", "ME"), ("XX", "X"), ("db", "g!")];
    parts.iter().map(|(a, b)| format!("{a}{b}")).collect()
}

/// Folders and files that may hold `unsafe` (style.md 8).
const UNSAFE_ALLOWED: &[&str] = &[
    "reactor/src/mem",
    "reactor/src/cpu",
    "target/fabric/",
    "bdev/src/uring",
    "bench/fio/",
    "tests/harness/alloc.rs",
];

/// What may stand at the top of the checkout: the design's folders, and what every repository has.
const TOP_LEVEL: &[&str] = &[
    ".cargo",
    ".ci",
    ".clippy.toml",
    ".git",
    ".gitattributes",
    ".github",
    ".gitignore",
    ".rustfmt.toml",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "Cargo.lock",
    "Cargo.toml",
    "LICENSE",
    "Makefile",
    "README.md",
    "SECURITY.md",
    "bdev",
    "bench",
    "build",
    "configs",
    "docs",
    "reactor",
    "target",
    "tests",
];

/// What cargo leaves in `target/` when it was run from outside of the checkout.
const LITTER: &[&str] =
    &["target/debug", "target/release", "target/CACHEDIR.TAG", "target/.rustc_info.json"];

fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().expect("tests/ lies in the checkout").to_path_buf()
}

/// Every file below a folder, but for build output and what git keeps.
fn walk(dir: &Path, found: &mut Vec<PathBuf>) {
    let mut entries: Vec<PathBuf> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    entries.sort();
    for path in entries {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let skip = [".git", "build", "debug", "release"].contains(&name.as_str());
        if path.is_dir() && !path.is_symlink() {
            if !skip {
                walk(&path, found);
            }
        } else {
            found.push(path);
        }
    }
}

fn files(extension: &str) -> Vec<(String, String)> {
    let root = root();
    let mut paths = Vec::new();
    walk(&root, &mut paths);
    let wanted = paths.into_iter().filter(|p| p.extension().is_some_and(|e| e == extension));
    let read = |path: PathBuf| {
        let name = path.strip_prefix(&root).unwrap().to_string_lossy().into_owned();
        (name, fs::read_to_string(&path).unwrap())
    };
    wanted.map(read).collect()
}

/// Source lines before the unit tests at the foot of a file.
fn without_tests(text: &str) -> usize {
    let lines: Vec<&str> = text.lines().collect();
    let tests = lines.windows(2).position(|w| {
        w[0].trim_start() == "#[cfg(test)]" && w[1].starts_with("mod ") && w[1].ends_with('{')
    });
    tests.unwrap_or(lines.len())
}

/// A file that is nothing but tests: no limit on its length.
fn is_test_file(name: &str) -> bool {
    let stem = Path::new(name).file_stem().unwrap().to_string_lossy().into_owned();
    stem == "tests" || stem.ends_with("_tests") || name.contains("/tests/")
}

/// Functions and their lengths: from the line with `fn` to the brace in the same column.
fn functions(text: &str) -> Vec<(String, usize)> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let code = line.trim_start();
        let indent = &line[..line.len() - code.len()];
        let Some(name) = function_name(code) else { continue };
        let end = format!("{indent}}}");
        let stop = format!("{indent}{code}");
        if code.ends_with('}') || (code.ends_with(';') && !code.contains('{')) || stop.is_empty() {
            continue;
        }
        let rest = lines[at..].iter();
        let until = rest.take_while(|l| {
            **l != end && !l.starts_with(&format!("{indent}fn ")) || std::ptr::eq(**l, *line)
        });
        found.push((name.to_string(), until.count() + 1));
    }
    found
}

/// The name of the function that a line begins.
fn function_name(code: &str) -> Option<&str> {
    let mut rest = code;
    for word in ["pub(crate) ", "pub(super) ", "pub ", "const ", "async ", "unsafe "] {
        rest = rest.strip_prefix(word).unwrap_or(rest);
    }
    let name = rest.strip_prefix("extern \"C\" ").unwrap_or(rest).strip_prefix("fn ")?;
    name.split(['(', '<']).next()
}

/// Everything over a limit: what it is, and its size.
fn excess() -> BTreeMap<String, usize> {
    let mut over = BTreeMap::new();
    for (name, text) in files("rs") {
        let lines = without_tests(&text);
        if lines > FILE_LINES_MAX && !is_test_file(&name) {
            over.insert(format!("file {name}"), lines);
        }
        let long = text.lines().filter(|l| l.chars().count() > LINE_CHARS_MAX).count();
        if long > 0 {
            over.insert(format!("lines {name}"), long);
        }
        for (function, lines) in functions(&text) {
            if lines > FUNCTION_LINES_MAX {
                over.insert(format!("function {name} {function}"), lines);
            }
        }
    }
    over
}

fn ledger() -> BTreeMap<String, usize> {
    let text = fs::read_to_string(root().join(LEDGER)).unwrap_or_default();
    let entries = text.lines().filter(|l| !l.starts_with('#') && !l.is_empty());
    let parse = |line: &str| {
        let (what, size) = line.rsplit_once(' ').unwrap_or_else(|| panic!("{LEDGER}: {line}"));
        (what.to_string(), size.parse().unwrap_or_else(|_| panic!("{LEDGER}: {line}")))
    };
    entries.map(parse).collect()
}

fn fail_if_any(faults: &[String]) {
    assert!(faults.is_empty(), "{} faults:\n  {}", faults.len(), faults.join("\n  "));
}

#[test]
fn lengths_only_shrink() {
    let over = excess();
    if std::env::var("USURP_TIDY").is_ok_and(|v| v == "write") {
        let mut text = String::from(
            "# What is over a length limit of docs/style.md, and how long it is: files without \
             their tests\n# (600 lines), functions (70 lines), how many lines of a file are over \
             100 characters.\n# A number may shrink, never grow. USURP_TIDY=write cargo tidy \
             writes it anew.\n",
        );
        for (what, size) in &over {
            text.push_str(&format!("{what} {size}\n"));
        }
        fs::write(root().join(LEDGER), text).unwrap();
        return;
    }
    let ledger = ledger();
    let mut faults = Vec::new();
    for (what, size) in &over {
        match ledger.get(what) {
            Some(allowed) if size <= allowed => {}
            Some(allowed) => faults.push(format!("{what}: {size}, the ledger allows {allowed}")),
            None => faults.push(format!("{what}: {size}, over the limit")),
        }
    }
    for (what, allowed) in &ledger {
        let size = over.get(what).copied().unwrap_or(0);
        if size < *allowed {
            println!("{what}: {size} now, its {allowed} in {LEDGER} may be lowered");
        }
    }
    fail_if_any(&faults);
}

#[test]
fn every_file_says_what_it_is() {
    let no_header = |(name, text): (String, String)| {
        let generated = text.starts_with("// @generated");
        (!text.starts_with("//!") && !generated).then(|| format!("{name}: no `//!` header"))
    };
    fail_if_any(&files("rs").into_iter().filter_map(no_header).collect::<Vec<_>>());
}

#[test]
fn banned_words_are_gone() {
    let mut faults = Vec::new();
    for (name, text) in files("rs") {
        for (at, line) in text.lines().enumerate() {
            let word = banned_words().into_iter().find(|w| has_word(line, w));
            faults.extend(word.map(|w| format!("{name}:{}: {w}", at + 1)));
        }
    }
    fail_if_any(&faults);
}

/// The word, not a part of a longer one.
fn has_word(line: &str, word: &str) -> bool {
    line.match_indices(word).any(|(at, _)| {
        let joins = |c: char| c.is_alphanumeric() || c == '_';
        let before = line[..at].chars().next_back().is_some_and(joins);
        let after = line[at + word.len()..].chars().next().is_some_and(joins);
        !before && !after
    })
}

#[test]
fn unsafe_stays_where_it_may_be() {
    let mut faults = Vec::new();
    for (name, text) in files("rs") {
        if UNSAFE_ALLOWED.iter().any(|allowed| name.starts_with(allowed)) {
            continue;
        }
        for (at, line) in text.lines().enumerate() {
            let code = line.split("//").next().unwrap_or("");
            if has_word(code, "unsafe") && !code.contains('"') {
                faults.push(format!("{name}:{}: unsafe", at + 1));
            }
        }
    }
    fail_if_any(&faults);
}

#[test]
fn cargo_has_not_littered_the_source_folder() {
    let litter = LITTER.iter().filter(|name| root().join(name).exists());
    let fault = |name: &&str| {
        format!("{name}: cargo was run from outside of the checkout; remove it, run cargo inside")
    };
    fail_if_any(&litter.map(fault).collect::<Vec<_>>());
}

#[test]
fn the_top_level_is_the_design_s() {
    let mut faults = Vec::new();
    for entry in fs::read_dir(root()).unwrap() {
        let name = entry.unwrap().file_name().to_string_lossy().into_owned();
        if !TOP_LEVEL.contains(&name.as_str()) && !name.ends_with(".swp") {
            faults.push(format!("{name}: not in the design's list of top-level names"));
        }
    }
    for folder in ["target", "reactor", "bdev", "configs", "tests", "bench"] {
        if !root().join(folder).is_dir() {
            faults.push(format!("{folder}/ is missing"));
        }
    }
    fail_if_any(&faults);
}

#[test]
fn packages_come_from_the_usual_registry_only() {
    let mut faults = Vec::new();
    let lock = fs::read_to_string(root().join("Cargo.lock")).unwrap();
    let usual = "registry+https://github.com/rust-lang/crates.io-index";
    for (at, line) in lock.lines().enumerate() {
        let Some(source) = line.strip_prefix("source = ") else { continue };
        if source.trim_matches('"') != usual {
            faults.push(format!("Cargo.lock:{}: {source}", at + 1));
        }
    }
    for (name, text) in files("toml") {
        let hosts = ["registry = ", "registry-index", "replace-with", "http://", "git = \"http"];
        for (at, line) in text.lines().enumerate() {
            let code = line.split('#').next().unwrap_or("");
            if let Some(host) = hosts.iter().find(|h| code.contains(*h)) {
                faults.push(format!("{name}:{}: {host}", at + 1));
            }
        }
    }
    fail_if_any(&faults);
}

mod own {
    //! The checks themselves, tried on small texts.

    use super::{function_name, functions, has_word, without_tests};

    #[test]
    fn a_function_ends_at_its_brace() {
        let text =
            "fn a() {\n    x();\n}\n\nimpl B {\n    pub fn c(\n        d: u8,\n    ) {\n    }\n}\n";
        assert_eq!(functions(text), [("a".to_string(), 3), ("c".to_string(), 4)]);
    }

    #[test]
    fn names_are_found_behind_any_prefix() {
        assert_eq!(function_name("pub(crate) const fn f<T>(x: T) {"), Some("f"));
        assert_eq!(function_name("let fn_like = 3;"), None);
    }

    #[test]
    fn the_tests_at_the_foot_do_not_count() {
        assert_eq!(without_tests("//! a\nfn b() {}\n#[cfg(test)]\nmod tests {\n}\n"), 2);
        assert_eq!(without_tests("//! a\nfn b() {}\n#[cfg(test)]\nmod tests;\nfn c() {}\n"), 5);
    }

    #[test]
    fn a_word_is_not_a_part_of_one() {
        assert!(has_word("// a FOO here", "FOO"));
        assert!(!has_word("FOOD, _FOO", "FOO"));
    }
}
