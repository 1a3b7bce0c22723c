//! What the user sees of a configuration that cannot be: exit codes, places and carets.

use crate::support::site::{Setup, Site};
use crate::support::target::{Target, usurp};

/// The refusal of a configuration by `usurp check`.
fn check(yaml: &str) -> (i32, String) {
    let site = Site::new();
    let path = site.near("bad.yaml");
    std::fs::write(&path, yaml).expect("a configuration can be written");
    let (code, out, err) = usurp(&["check", "bad.yaml"], path.parent().expect("a folder"));
    assert!(out.is_empty(), "a refusal goes to standard error: {out}");
    (code, err)
}

/// A configuration that would be right.
fn good() -> String {
    Setup::ram().yaml(std::path::Path::new("/tmp/usurp-e2e-never"))
}

#[test]
fn a_misspelt_key_is_refused_with_place_caret_and_suggestion() {
    let (code, text) = check(&good().replace("max_transfer: 1MiB", "max_tranfser: 1MiB"));
    assert_eq!(code, 3, "{text}");
    assert!(text.contains("bad.yaml:2:41: `max_tranfser` is not a key of memory"), "{text}");
    assert!(text.contains("did you mean `max_transfer`?"), "{text}");
    let caret = text.lines().find(|line| line.contains("^^^^")).expect("a caret");
    let shown = text.lines().find(|line| line.contains("max_tranfser: 1MiB")).expect("the line");
    assert_eq!(caret.find('^'), shown.find("max_tranfser"), "{text}");
}

#[test]
fn all_errors_come_at_once() {
    let yaml = good().replace("adaptive", "adaptve").replace("0: ram0", "0: ram7");
    let (code, text) = check(&yaml);
    assert_eq!(code, 3, "{text}");
    assert!(text.contains("adaptve") && text.contains("no bdev named `ram7`"), "{text}");
    assert!(text.contains("2 errors; nothing was started"), "{text}");
}

#[test]
fn text_that_is_not_yaml_is_refused_with_its_place() {
    let (code, text) = check("reactors: { cores: auto\nbdevs: [\n");
    assert_eq!(code, 3, "{text}");
    assert!(text.contains("bad.yaml:"), "{text}");
}

#[test]
fn run_refuses_what_check_refuses() {
    let refused = Target::try_start(&Site::new(), &good().replace("malloc", "mallok"));
    let refused = refused.err().expect("it does not start");
    assert_eq!(refused.code, Some(3), "{refused:?}");
    assert!(refused.text.contains("mallok") && refused.text.contains('^'), "{refused:?}");
}

#[test]
fn run_on_a_missing_image_says_which_and_how_to_make_it() {
    let site = Site::new();
    let image = site.disk("none.img");
    let uring = format!("{{ name: img0, uring: {{ path: {} }} }}", image.display());
    let setup = Setup::new(&[&uring], "{ 0: img0 }");
    let refused = Target::try_start(&site, &setup.yaml(&site.socket())).err().expect("it ends");
    assert_eq!(refused.code, Some(3), "{refused:?}");
    assert!(refused.text.contains("none.img") && refused.text.contains("truncate"), "{refused:?}");
    assert!(refused.text.contains('^'), "{refused:?}");
    assert!(!site.socket().exists(), "it never listened");
}

#[test]
fn run_in_a_missing_folder_says_so() {
    let site = Site::new();
    let yaml = Setup::ram().yaml(&site.near("no/such/folder/s"));
    let refused = Target::try_start(&site, &yaml).err().expect("it ends");
    assert_eq!(refused.code, Some(1), "{refused:?}");
    assert!(refused.text.contains("no/such/folder does not exist"), "{refused:?}");
}
