//! The binary as a user meets it: exit codes, and which text goes where.
#![forbid(unsafe_code)]

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal};

fn usurp(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_usurp"));
    command.args(args).env("USURP_LOG", "warn").output().expect("the binary starts")
}

fn code(output: &Output) -> i32 {
    output.status.code().expect("it ends by itself")
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("output is UTF-8")
}

/// A file of its own for each test, removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str, content: &str) -> Scratch {
        let path = std::env::temp_dir().join(format!("usurp-cli-{}-{name}", std::process::id()));
        std::fs::write(&path, content).expect("the temporary folder is writable");
        Scratch(path)
    }

    fn path(&self) -> &str {
        self.0.to_str().expect("UTF-8")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn shipped(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs").join(name);
    path.to_str().expect("UTF-8").to_owned()
}

#[test]
fn login_info_without_rdma_says_what_is_missing() {
    let no_listener = usurp(&["login-info", &shipped("minimal.yaml")]);
    assert_eq!(code(&no_listener), 1);
    assert!(no_listener.stdout.is_empty());
    let why = text(&no_listener.stderr);
    assert!(why.contains("no listener is by RDMA") && why.contains("target.listen"), "{why}");

    let refused = Scratch::new("login-info.yaml", "target: 7\n");
    assert_eq!(code(&usurp(&["login-info", refused.path()])), 3);
}

#[test]
fn a_good_configuration_is_accepted_with_0() {
    let output = usurp(&["check", &shipped("minimal.yaml")]);
    assert_eq!(code(&output), 0, "{}", text(&output.stderr));
    let wanted = "minimal.yaml: accepted: 1 bdev, 1 listener, 1 host, 1 LUN\n";
    assert!(text(&output.stdout).ends_with(wanted), "{}", text(&output.stdout));
}

#[test]
fn its_bdevs_are_opened_on_demand() {
    let output = usurp(&["check", "--open", &shipped("minimal.yaml")]);
    assert_eq!(code(&output), 0, "{}", text(&output.stderr));
    let wanted = "bdev ram0: malloc, 131072 blocks of 512 bytes\n";
    assert!(text(&output.stdout).contains(wanted), "{}", text(&output.stdout));
}

#[test]
fn no_or_a_wrong_command_ends_with_2() {
    assert_eq!(code(&usurp(&[])), 2);
    assert_eq!(code(&usurp(&["serve", "x.yaml"])), 2);
    assert_eq!(code(&usurp(&["run"])), 2);
    let output = usurp(&["check", "--opne", "x.yaml"]);
    assert_eq!(code(&output), 2);
    assert!(text(&output.stderr).contains("--open"), "{}", text(&output.stderr));
}

#[test]
fn a_refused_configuration_ends_with_3_and_all_errors_on_stderr() {
    let file = Scratch::new("bad.yaml", "reactors: { core: 1 }\nbdevs: []\ntarget: 3\n");
    for command in ["run", "check"] {
        let output = usurp(&[command, file.path()]);
        assert_eq!(code(&output), 3);
        let errors = text(&output.stderr);
        assert!(errors.contains("bad.yaml:1:13: `core` is not a key of reactors"), "{errors}");
        assert!(errors.contains("bad.yaml:2:8: `bdevs` is empty"), "{errors}");
        assert!(errors.contains("bad.yaml:3:9: target must be a mapping"), "{errors}");
        assert!(errors.ends_with("3 errors; nothing was started\n"), "{errors}");
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn a_missing_configuration_ends_with_3() {
    let output = usurp(&["check", "/does/not/exist.yaml"]);
    assert_eq!(code(&output), 3);
    let wanted = "/does/not/exist.yaml: cannot be read: ";
    assert!(text(&output.stderr).starts_with(wanted), "{}", text(&output.stderr));
}

#[test]
fn an_image_that_is_not_there_is_shown_in_the_file() {
    let content = std::fs::read_to_string(shipped("minimal.yaml")).expect("it is shipped");
    let content = content.replace("malloc: { size: 64MiB }", "uring: { path: /does/not/exist }");
    let file = Scratch::new("noimage.yaml", &content);
    assert_eq!(code(&usurp(&["check", file.path()])), 0, "the text alone is right");
    let output = usurp(&["check", "--open", file.path()]);
    assert_eq!(code(&output), 3);
    let errors = text(&output.stderr);
    assert!(errors.contains("noimage.yaml:3:34: bdev `ram0`: "), "{errors}");
    assert!(errors.contains("^^^^^^^^^^^^^^^"), "{errors}");
}

#[test]
fn warnings_do_not_refuse() {
    let content = std::fs::read_to_string(shipped("minimal.yaml")).expect("it is shipped");
    let second = "malloc: { size: 64MiB } }\n  - { name: unseen, malloc: { size: 64MiB } }";
    let content = content.replace("malloc: { size: 64MiB } }", second);
    let file = Scratch::new("unseen.yaml", &content);
    let output = usurp(&["check", file.path()]);
    assert_eq!(code(&output), 0);
    let warnings = text(&output.stdout);
    assert!(warnings.starts_with("warning: "), "{warnings}");
    assert!(warnings.contains("no host sees the bdev `unseen`"), "{warnings}");
}

#[test]
fn rdma_cm_listeners_without_rdma_are_refused_in_clear_words() {
    if Path::new("/dev/infiniband/rdma_cm").exists() {
        return println!("skipped, because this machine has RDMA");
    }
    let content = std::fs::read_to_string(shipped("minimal.yaml")).expect("it is shipped");
    let content = content.replace("{ shm: /tmp/usurp.sock }", "{ rdma_cm: \"[::]:5555\" }");
    let file = Scratch::new("rdma-run.yaml", &content);
    let output = usurp(&["run", file.path()]);
    assert_eq!(code(&output), 1);
    let errors = text(&output.stderr);
    let what = if cfg!(feature = "verbs") { "modprobe rdma_ucm" } else { "feature `verbs`" };
    assert!(errors.contains("rdma_cm") && errors.contains(what), "{errors}");
}

/// A small target on one core, ready and serving.
struct Serving(Child);

impl Serving {
    fn start(config: &Scratch, ready: &Path) -> Serving {
        let mut command = Command::new(env!("CARGO_BIN_EXE_usurp"));
        command.args(["run", "--quiet", "--ready-file"]).arg(ready).arg(config.path());
        let child = command.env("USURP_LOG", "warn").spawn().expect("the binary starts");
        Serving(child)
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.0)
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// So that opening the FIFO does not wait for a target that never comes.
const NONBLOCK: i32 = rustix::fs::OFlags::NONBLOCK.bits() as i32;

/// Waits for the line `ready`, half a minute at most.
fn wait_until_ready(mut fifo: &File) {
    let limit = Timespec { tv_sec: 30, tv_nsec: 0 };
    let count = poll(&mut [PollFd::new(fifo, PollFlags::IN)], Some(&limit)).expect("poll works");
    assert_eq!(count, 1, "the target does not get ready");
    let mut line = [0; 6];
    fifo.read_exact(&mut line).expect("it writes the line at once");
    assert_eq!(&line, b"ready\n");
}

#[test]
fn run_serves_until_sigterm_and_a_second_one_finds_the_socket_in_use() {
    let folder = std::env::temp_dir().join(format!("usurp-cli-{}-run", std::process::id()));
    std::fs::create_dir(&folder).expect("the temporary folder is writable");
    let content = format!(
        "reactors: {{ cores: [{}], idle: adaptive }}\n\
         memory: {{ hugepages: never, data: 2MiB, max_transfer: 1MiB }}\n\
         bdevs: [{{ name: ram0, malloc: {{ size: 1MiB, hugepages: never }} }}]\n\
         target:\n  id_ext: \"0000000000000001\"\n  ioc_guid: \"0000000000000001\"\n  \
         channels_max: {{ nexus: 2, all: 2 }}\n  listen: [{{ shm: {}/s }}]\n  \
         hosts: [{{ initiator: any, luns: {{ 0: ram0 }} }}]\n",
        usurp_reactor::cpu::start_cores().expect("there is a mask")[0],
        folder.display(),
    );
    let config = Scratch::new("run.yaml", &content);
    let ready = folder.join("ready");
    rustix::fs::mkfifoat(rustix::fs::CWD, &ready, 0o600.into()).expect("a FIFO can be made");
    let fifo = File::options().read(true).custom_flags(NONBLOCK).open(&ready).expect("it is ours");
    let mut first = Serving::start(&config, &ready);
    wait_until_ready(&fifo);
    assert_eq!(code(&usurp(&["run", config.path()])), 4);
    rustix::process::kill_process(first.pid(), Signal::TERM).expect("it runs still");
    assert_eq!(first.0.wait().expect("it ends").code(), Some(0));
    assert!(!folder.join("s").exists(), "the socket is removed at the end");
    std::fs::remove_dir_all(&folder).expect("it is ours");
}

#[test]
fn doctor_ends_with_0_where_a_target_can_run() {
    let output = usurp(&["doctor"]);
    let report = text(&output.stdout);
    let is_able = !report.contains("FAIL");
    assert_eq!(code(&output), i32::from(!is_able), "{report}");
    for topic in ["cores", "clock", "shared memory", "huge pages", "locked memory", "io_uring"] {
        assert!(report.contains(topic), "{report}");
    }
}
