//! The checks: every section of the file, its defaults and its rules, into a [`Config`].
//!
//! Each function reads one section, notes what is wrong and goes on. Only when nothing was noted
//! is the result used.
//!
//! Never: stops at the first error; touches the machine but for reading its memory size and cores.

use std::collections::HashMap;
use std::fmt;
use std::path::{Component, Path};

use usurp_bdev::ByteSize;
use usurp_reactor::cpu::{self, CoreSpec};
use usurp_reactor::mem::HugePolicy;

use super::report::{ConfigErrors, Problem, Source};
use super::section::{Notes, Section, field, refuse, suggestion};
use super::tree::{self, Kind, Node};
use super::values::{Address, Cores, Field, HexId, HugePages, Idle, Initiator};
use super::{BdevConfig, Config, Host, Listen, Lun, Memory, Reactors, Target, modules};

/// Largest LUN that both addressing methods of SAM (peripheral, flat space) can carry.
const LUN_MAX: i128 = 16383;
/// `sun_path` holds 108 bytes, one of them the closing NUL.
const SOCKET_PATH_BYTES_MAX: usize = 107;
/// Bounds of `max_transfer`. 64 MiB is what ib_srp's `max_sect=131072` asks for.
const TRANSFER_BYTES: (u64, u64) = (4 << 10, 64 << 20);
/// Data buffers of one reactor at most.
const DATA_BYTES_MAX: u64 = 1 << 40;
/// Bounds of `credits`. ib_srp keeps two back for task management and responses.
const CREDITS: (u32, u32) = (4, 1024);
/// OUIs for which ib_srp's topspin_workarounds change the login (srp-reference 1.14).
const TOPSPIN_OUIS: [u64; 2] = [0x0005ad, 0x001b0d];
/// What `bdevs` looks like.
const BDEVS: &str = "a list such as `- { name: ram0, malloc: { size: 1GiB } }`";
/// What `listen` looks like.
const LISTEN: &str = "a list such as `- { shm: /run/usurp/srp.sock }`";
/// What `hosts` looks like.
const HOSTS: &str = "a list such as `- { initiator: any, luns: { 0: ram0 } }`";

/// What of the machine the configuration is checked against.
pub struct Machine {
    /// Its memory, if sizes shall be checked against it.
    pub memory_bytes: Option<u64>,
    /// Whether `reactors.cores` must exist here.
    pub cores: bool,
}

impl Machine {
    /// The machine we run on.
    pub fn this() -> Machine {
        let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let total = info.lines().find_map(|line| line.strip_prefix("MemTotal:"));
        let kib = total.and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok());
        Machine { memory_bytes: kib.map(|kib| kib << 10), cores: true }
    }

    /// Any machine: what depends on it is not checked.
    pub fn any() -> Machine {
        Machine { memory_bytes: None, cores: false }
    }
}

/// The text and its tree.
#[derive(Clone)]
pub struct Origin {
    source: Source,
    root: Node,
}

impl fmt::Debug for Origin {
    /// The file's name only: the rest of a `Config` says what is in it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.source.file)
    }
}

impl Origin {
    /// A problem with a bdev, at the deepest node of `key` (`uring.path`, `path`) that exists.
    pub fn bdev_problem(&self, bdev: usize, key: &str, message: String, hint: String) -> Problem {
        let list = self.root.get("bdevs").map(|node| &node.kind);
        let entry = match list {
            Some(Kind::List(items)) => items.get(bdev).unwrap_or(&self.root),
            _ => &self.root,
        };
        self.source.problem(deepest(entry, key).id, message, hint)
    }
}

/// Follows a dotted path as far as it leads; the first part may also be below the module's key.
fn deepest<'a>(entry: &'a Node, path: &str) -> &'a Node {
    let mut at = entry;
    for part in path.split('.').filter(|part| !part.is_empty()) {
        let below = |node: &'a Node| match &node.kind {
            Kind::Map(pairs) => pairs.iter().find_map(|(_, value)| value.get(part)),
            _ => None,
        };
        match at.get(part).or_else(|| below(at)) {
            Some(next) => at = next,
            None => break,
        }
    }
    at
}

/// Checks a text.
pub fn check(file: &str, text: &str, machine: &Machine) -> Result<Config, ConfigErrors> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text).to_owned();
    let source = Source { file: file.to_owned(), text };
    let root = tree::read(&source.text).map_err(|error| {
        let hint =
            "this is not YAML; the place is where the parser gave up, the cause may be above";
        let problem = source.problem_at(error.place, error.message, hint.to_owned());
        ConfigErrors::new(vec![problem])
    })?;
    let mut notes = Notes::new(&source);
    notes.structure(&root);
    let parts = sections(&root, machine, &mut notes);
    let (errors, warnings) = (notes.errors, notes.warnings);
    match parts {
        Some((reactors, memory, bdevs, target)) if errors.is_empty() => {
            let origin = Origin { source, root };
            Ok(Config { reactors, memory, bdevs, target, warnings, origin })
        }
        _ => Err(ConfigErrors::new(errors)),
    }
}

type Parts = (Reactors, Memory, Vec<BdevConfig>, Target);

fn sections(root: &Node, machine: &Machine, notes: &mut Notes<'_>) -> Option<Parts> {
    let keys = ["reactors", "memory", "bdevs", "target"];
    let top = Section::open(root, "the configuration", &keys, notes)?;
    let reactors = reactors(top.get("reactors"), machine, notes);
    let memory = memory(top.get("memory"), notes);
    let entries = top.list("bdevs", BDEVS, notes);
    let bdevs: Vec<_> = entries.iter().map(|entry| bdev(entry, notes)).collect();
    unique_names(&bdevs, notes);
    module_options(&bdevs, notes);
    fits_memory(&bdevs, machine, notes);
    let names: Names = bdevs.iter().map(|bdev| bdev.name).collect();
    let bases: Bases = bdevs.iter().filter_map(base).collect();
    let known = Known { names, bases };
    let node = top.required("target", "id_ext, ioc_guid, listen and hosts", notes);
    let target = node.and_then(|node| target(node, &known, notes));
    if let Some(target) = &target {
        unused_bdevs(&bdevs, &known.bases, target, notes);
    }
    let bdevs: Option<Vec<_>> = bdevs.into_iter().map(|bdev| bdev.config).collect();
    Some((reactors, memory, bdevs?, target?))
}

fn reactors(node: Option<&Node>, machine: &Machine, notes: &mut Notes<'_>) -> Reactors {
    let mut found = Reactors { cores: CoreSpec::Auto, idle: Idle::Spin };
    let open = |node| Section::open(node, "reactors", &["cores", "idle"], notes);
    let Some(section) = node.and_then(open) else { return found };
    if let Some(Cores(cores)) = section.optional("cores", notes) {
        if machine.cores
            && let (Some(node), Err(error)) = (section.get("cores"), cpu::resolve(&cores))
        {
            notes.error(
                node,
                format!("`cores`: {error}"),
                "`auto` takes what this process may use",
            );
        }
        found.cores = cores;
    }
    found.idle = section.optional("idle", notes).unwrap_or(found.idle);
    found
}

fn memory(node: Option<&Node>, notes: &mut Notes<'_>) -> Memory {
    let mut found =
        Memory { hugepages: HugePolicy::Prefer, data_bytes: 64 << 20, transfer_bytes_max: 4 << 20 };
    let keys = ["hugepages", "data", "max_transfer"];
    let open = |node| Section::open(node, "memory", &keys, notes);
    let Some(section) = node.and_then(open) else { return found };
    if let Some(HugePages(policy)) = section.optional("hugepages", notes) {
        found.hugepages = policy;
    }
    let mut max = ByteSize(found.transfer_bytes_max as u64);
    if let Some(node) = section.get("max_transfer") {
        let size: Option<ByteSize> = field("max_transfer", node, notes);
        let range = TRANSFER_BYTES.0..=TRANSFER_BYTES.1;
        match size {
            Some(size) if size.0.is_power_of_two() && range.contains(&size.0) => max = size,
            Some(_) => {
                let right = "a power of two from 4KiB to 64MiB: buffers are handed out in halves";
                refuse("max_transfer", node, right, notes);
            }
            None => {}
        }
    }
    found.transfer_bytes_max = max.0 as usize;
    let data: Option<ByteSize> = section.optional("data", notes);
    let at = section.get("data").or(section.get("max_transfer"));
    let data = data.unwrap_or(ByteSize(found.data_bytes as u64));
    if let Some(node) = at
        && !(data.0 >= max.0 && data.0.is_multiple_of(max.0) && data.0 <= DATA_BYTES_MAX)
    {
        let message = format!("`data` is {data}, which does not fit `max_transfer`, {max}");
        let right = "make `data` (bytes of each reactor) a multiple of `max_transfer`, up to 1TiB";
        notes.error(node, message, right);
    }
    found.data_bytes = data.0 as usize;
    found
}

/// An entry of `bdevs` as far as it could be read.
struct FoundBdev<'a> {
    /// The entry.
    node: &'a Node,
    /// Its name, also if the rest is wrong: references to it are not dangling then.
    name: Option<&'a str>,
    /// All of it.
    config: Option<BdevConfig>,
}

/// Names by position in `bdevs`.
type Names<'a> = Vec<Option<&'a str>>;
/// Pairs of a base and the filter on it.
type Bases<'a> = Vec<(String, &'a str)>;

/// What LUNs may refer to.
struct Known<'a> {
    names: Names<'a>,
    bases: Bases<'a>,
}

/// The base of a filter and the filter's name.
fn base<'a>(bdev: &FoundBdev<'a>) -> Option<(String, &'a str)> {
    Some((modules::base(bdev.config.as_ref()?)?, bdev.name?))
}

fn bdev<'a>(node: &'a Node, notes: &mut Notes<'_>) -> FoundBdev<'a> {
    let mut found = FoundBdev { node, name: None, config: None };
    let known = modules::names();
    let Some(entry) = Section::open_loose(node, "a bdev", &["name", "MODULE"], notes) else {
        return found;
    };
    if let Some(at) = entry.required("name", "a name for LUNs to refer to", notes) {
        found.name = at.text();
        if !at.text().is_some_and(is_name) {
            refuse("name", at, "1 to 64 characters of A-Z a-z 0-9 . _ -", notes);
        }
    }
    let others = entry.others(&["name"]);
    let is_known = |key: &Node| key.text().is_some_and(|text| known.contains(&text));
    let (module, unknown): (Vec<_>, Vec<_>) = others.iter().partition(|(key, _)| is_known(key));
    for (key, _) in &unknown {
        let message = format!("`{}` is not a bdev module", key.shown());
        notes.error(key, message, suggestion(&key.shown(), "modules", &known));
    }
    match module[..] {
        [] if unknown.is_empty() => {
            let hint = format!("add one of: {}", known.join(", "));
            notes.error(node, "a bdev lacks its module", hint);
        }
        [] => {}
        [(key, options)] => {
            let module = key.text().unwrap_or_default().to_owned();
            let name = found.name.unwrap_or_default().to_owned();
            found.config = Some(BdevConfig { name, module, options: options.value() });
        }
        [_, (second, _), ..] => {
            let message = "a bdev has two modules".to_owned();
            notes.error(second, message, "write one entry of `bdevs` for each");
        }
    }
    found
}

fn is_name(text: &str) -> bool {
    let fine = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    (1..=64).contains(&text.len()) && text.chars().all(fine)
}

/// Has the modules look at their own options and bases, and notes what they say at the keys they
/// name.
fn module_options(bdevs: &[FoundBdev<'_>], notes: &mut Notes<'_>) {
    let (entries, specs): (Vec<_>, Vec<_>) = bdevs
        .iter()
        .filter_map(|bdev| Some((bdev.node, modules::spec(bdev.config.as_ref()?))))
        .unzip();
    let names: Names = bdevs.iter().map(|bdev| bdev.name).collect();
    for fault in modules::faults(&specs) {
        let mut at = deepest(entries[fault.index], &fault.key);
        // A base that is there, but is refused for a reason of its own.
        if fault.message.starts_with("there is no bdev") && names.contains(&at.text()) {
            continue;
        }
        if fault.is_key {
            at = key_of(entries[fault.index], at).unwrap_or(at);
        }
        notes.error(at, fault.message, fault.hint);
    }
}

/// The key whose value is `value`, anywhere below `node`.
fn key_of<'a>(node: &'a Node, value: &Node) -> Option<&'a Node> {
    let mut pairs = tree::flattened(node).into_iter();
    pairs.find_map(
        |(key, below)| {
            if below.id == value.id { Some(key) } else { key_of(below, value) }
        },
    )
}

fn unique_names(bdevs: &[FoundBdev<'_>], notes: &mut Notes<'_>) {
    for (at, bdev) in bdevs.iter().enumerate() {
        let Some(name) = bdev.name else { continue };
        if let Some(first) = bdevs[..at].iter().find(|other| other.name == bdev.name) {
            let line = first.node.get("name").map_or(0, |node| notes.line_of(node));
            let message = format!("the name `{name}` is taken");
            let hint = format!("by the bdev on line {line}; choose another");
            notes.error(bdev.node.get("name").unwrap_or(bdev.node), message, hint);
        }
    }
}

/// Malloc bdevs are taken whole at start, so together they must fit.
fn fits_memory(bdevs: &[FoundBdev<'_>], machine: &Machine, notes: &mut Notes<'_>) {
    let Some(memory) = machine.memory_bytes else { return };
    let mut sum: u64 = 0;
    for bdev in bdevs {
        let Some(node) = bdev.node.get("malloc").and_then(|node| node.get("size")) else {
            continue;
        };
        let Ok(size) = serde_yaml::from_value::<ByteSize>(node.value()) else { continue };
        sum = sum.saturating_add(size.0);
        if sum > memory {
            let (want, have) = (sum >> 20, memory >> 20);
            let message = format!("malloc bdevs up to here want {want}MiB of memory");
            notes.error(node, message, format!("this machine has {have}MiB; make them smaller"));
            return;
        }
    }
}

fn unused_bdevs(
    bdevs: &[FoundBdev<'_>],
    bases: &Bases<'_>,
    target: &Target,
    notes: &mut Notes<'_>,
) {
    let used = |at| target.hosts.iter().any(|host| host.luns.iter().any(|lun| lun.bdev == at));
    let is_base = |name: &str| bases.iter().any(|(base, _)| base == name);
    for (at, bdev) in bdevs.iter().enumerate() {
        if let Some(name) = bdev.name.filter(|name| !used(at) && !is_base(name)) {
            let node = bdev.node.get("name").unwrap_or(bdev.node);
            notes.warn(
                node,
                format!("no host sees the bdev `{name}`"),
                "it is opened all the same",
            );
        }
    }
}

const TARGET_KEYS: [&str; 7] =
    ["id_ext", "ioc_guid", "credits", "immediate_data", "channels_max", "listen", "hosts"];

fn target(node: &Node, known: &Known<'_>, notes: &mut Notes<'_>) -> Option<Target> {
    let section = Section::open(node, "target", &TARGET_KEYS, notes)?;
    let id_ext: Option<HexId> = section.wanted("id_ext", notes);
    let ioc_guid: Option<HexId> = section.wanted("ioc_guid", notes);
    if let (Some(HexId(guid)), Some(node)) = (ioc_guid, section.get("ioc_guid")) {
        if guid == 0 {
            refuse("ioc_guid", node, "a GUID other than zero", notes);
        } else if TOPSPIN_OUIS.contains(&(guid >> 40)) {
            let hint = "choose a GUID with another first half";
            notes.warn(node, "ib_srp logs in differently at GUIDs of Topspin and Cisco", hint);
        }
    }
    let credits = section.number("credits", CREDITS.0, CREDITS.1, notes).unwrap_or(128);
    let immediate_data = section.optional("immediate_data", notes).unwrap_or(true);
    let (nexus_channels_max, channels_max) = channels(section.get("channels_max"), notes);
    let listen = listeners(&section, notes);
    let hosts = hosts(&section, known, notes);
    Some(Target {
        id_ext: id_ext?.0,
        ioc_guid: ioc_guid?.0,
        credits: credits as u16,
        immediate_data,
        nexus_channels_max,
        channels_max,
        listen,
        hosts,
    })
}

/// `channels_max: { nexus: 16, all: 256 }`.
fn channels(node: Option<&Node>, notes: &mut Notes<'_>) -> (Option<u32>, Option<u32>) {
    let open = |node| Section::open(node, "channels_max", &["nexus", "all"], notes);
    let Some(section) = node.and_then(open) else { return (None, None) };
    let nexus = section.number("nexus", 1, 4096, notes);
    let all = section.number("all", 1, 4096, notes);
    if let (Some(nexus), Some(all), Some(node)) = (nexus, all, section.get("nexus"))
        && nexus > all
    {
        refuse("nexus", node, &format!("at most `all`, which is {all}"), notes);
    }
    (nexus, all)
}

fn listeners(target: &Section<'_>, notes: &mut Notes<'_>) -> Vec<Listen> {
    let mut found: Vec<(&Node, Listen)> = Vec::new();
    for node in target.list("listen", LISTEN, notes) {
        let Some((value, listen)) = listener(node, notes) else { continue };
        if let Some((first, _)) = found.iter().find(|(_, other)| *other == listen) {
            let hint = format!("the first is on line {}; keep one", notes.line_of(first));
            notes.error(value, "this listener is given twice", hint);
        }
        found.push((value, listen));
    }
    found.into_iter().map(|(_, listen)| listen).collect()
}

fn listener<'a>(node: &'a Node, notes: &mut Notes<'_>) -> Option<(&'a Node, Listen)> {
    let entry = Section::open(node, "a listener", &["shm", "rdma_cm"], notes)?;
    match (entry.get("shm"), entry.get("rdma_cm")) {
        (Some(value), None) => {
            let right = "the path of a socket, 1 to 107 bytes long";
            let fits = |path: &&str| (1..=SOCKET_PATH_BYTES_MAX).contains(&path.len());
            let path = value.text().filter(fits).filter(|path| !path.contains('\0'));
            if path.is_none() {
                refuse("shm", value, right, notes);
            }
            // As components, so that `a//b` and `./a/b` are the same listener.
            let path = Path::new(path?).components().filter(|part| *part != Component::CurDir);
            Some((value, Listen::Shm(path.collect())))
        }
        (None, Some(value)) => {
            let Address(address) = field("rdma_cm", value, notes)?;
            if cfg!(not(feature = "verbs")) {
                let hint = "`run` refuses it; build with the feature `verbs`, or use `shm`";
                notes.warn(value, "this binary was built without RDMA", hint);
            }
            Some((value, Listen::RdmaCm(address)))
        }
        (Some(_), Some(value)) => {
            notes.error(value, "a listener has two addresses", "write one entry for each");
            None
        }
        (None, None) => {
            let right = "write `{ shm: PATH }` or `{ rdma_cm: \"ADDRESS:PORT\" }`";
            notes.error(node, "a listener lacks its address", right);
            None
        }
    }
}

fn hosts(target: &Section<'_>, known: &Known<'_>, notes: &mut Notes<'_>) -> Vec<Host> {
    let mut seen: HashMap<Initiator, &Node> = HashMap::new();
    let mut found = Vec::new();
    for node in target.list("hosts", HOSTS, notes) {
        let Some(entry) = Section::open(node, "a host", &["initiator", "luns"], notes) else {
            continue;
        };
        let initiator = initiator(&entry, notes);
        if let (Some(initiator), Some(value)) = (initiator, entry.get("initiator"))
            && let Some(first) = seen.insert(initiator, value)
        {
            let hint = format!("the first is on line {}; merge the two", notes.line_of(first));
            notes.error(value, "this initiator is given twice", hint);
        }
        let luns = luns(&entry, known, notes);
        found.extend(initiator.map(|initiator| Host { initiator, luns }));
    }
    if let Some(any) = seen.get(&Initiator::Any)
        && seen.len() > 1
    {
        let hint =
            "initiators listed by identifier see only their own entry; all others get this one";
        notes.warn(any, "`any` admits every initiator, beside those listed", hint);
    }
    found
}

fn initiator(entry: &Section<'_>, notes: &mut Notes<'_>) -> Option<Initiator> {
    let node = entry.required("initiator", Initiator::RIGHT, notes)?;
    let is_ip = node.text().is_some_and(|text| text.parse::<std::net::IpAddr>().is_ok());
    if is_ip && serde_yaml::from_value::<Initiator>(node.value()).is_err() {
        let message = format!("`initiator` cannot be the IP address `{}` yet", node.shown());
        notes.error(node, message, format!("write {}", Initiator::RIGHT));
        return None;
    }
    field("initiator", node, notes)
}

fn luns(entry: &Section<'_>, known: &Known<'_>, notes: &mut Notes<'_>) -> Vec<Lun> {
    let right = "LUNs and bdevs, such as { 0: ram0, 1: { bdev: img0, read_only: true } }";
    let Some(node) = entry.required("luns", right, notes) else { return Vec::new() };
    let Some(section) = Section::open_loose(node, "luns", &["LUN"], notes) else {
        return Vec::new();
    };
    let pairs = section.others(&[]);
    if pairs.is_empty() {
        notes.error(section.node(), "`luns` is empty", format!("write {right}"));
    }
    let mut found = Vec::new();
    for (key, value) in pairs {
        let lun = match key.kind {
            Kind::Int(lun @ 0..=LUN_MAX) => Some(lun as u16),
            _ => {
                let message = format!("`{}` is not a LUN", key.shown());
                notes.error(key, message, "a LUN is a whole number from 0 to 16383");
                None
            }
        };
        let unit = lun_bdev(value, known, notes);
        if let (Some(lun), Some((bdev, read_only))) = (lun, unit) {
            found.push(Lun { lun, bdev, read_only });
        }
    }
    found.sort_by_key(|lun| lun.lun);
    found
}

/// `ram0` or `{ bdev: ram0, read_only: true }`.
fn lun_bdev(node: &Node, known: &Known<'_>, notes: &mut Notes<'_>) -> Option<(usize, bool)> {
    let (name, read_only) = match node.kind {
        Kind::Map(_) => {
            let entry = Section::open(node, "a LUN", &["bdev", "read_only"], notes)?;
            let read_only = entry.optional("read_only", notes).unwrap_or(false);
            (entry.required("bdev", "the name of a bdev", notes)?, read_only)
        }
        _ => (node, false),
    };
    let Some(text) = name.text() else {
        let message = format!("a LUN cannot be {}", name.kind.name());
        notes.error(name, message, "write a bdev's name, or { bdev: NAME, read_only: true }");
        return None;
    };
    if let Some((_, filter)) = known.bases.iter().find(|(base, _)| base == text) {
        let message = format!("`{text}` is the base of `{filter}`: its data would change under it");
        notes.error(name, message, format!("write {filter}"));
    }
    let at = known.names.iter().position(|known| *known == Some(text));
    if at.is_none() {
        let names: Vec<&str> = known.names.iter().flatten().copied().collect();
        let message = format!("there is no bdev named `{}`", name.shown());
        notes.error(name, message, suggestion(text, "bdevs", &names));
    }
    at.map(|at| (at, read_only))
}
