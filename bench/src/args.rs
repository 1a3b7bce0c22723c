//! The command line of `usurp-perf`: what it accepts, and how each value is read. A value that
//! cannot be meant is refused with what would be right; nothing is opened or sent here.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::error::Error;
use crate::pattern::Mode;

/// The target port of the shipped configurations.
const DEFAULT_ID_EXT: u64 = 0x0002_c903_000e_8acd;
/// The IO controller GUID of the shipped configurations.
const DEFAULT_IOC_GUID: u64 = 0x0002_c903_000e_8acc;

const EXIT_CODES: &str = "\
Sizes take k, M, G, T (powers of 1024; KiB, MiB, GiB, TiB are the same).
Exit codes: 0 all went well; 1 an I/O failed, data was wrong, or the target went away;
2 the command line cannot be meant; 3 no connection, or the login was rejected.";

/// SRP initiator and load generator.
#[derive(Parser, Debug)]
#[command(name = "usurp-perf", version, about, after_help = EXIT_CODES)]
pub struct Cli {
    /// Where the target is and who we are.
    #[command(flatten)]
    pub link: LinkArgs,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Options that every command has.
#[derive(Args, Debug, Clone)]
pub struct LinkArgs {
    /// The target: shm:PATH of the Unix socket it listens on
    #[arg(long, global = true, value_name = "ADDRESS", value_parser = Address::from_str)]
    pub connect: Option<Address>,
    /// Identifier extension of the target port
    #[arg(
        long,
        global = true,
        value_name = "HEX",
        value_parser = hex_u64,
        default_value_t = Hex(DEFAULT_ID_EXT),
    )]
    pub id_ext: Hex,
    /// IO controller GUID of the target port
    #[arg(
        long,
        global = true,
        value_name = "HEX",
        value_parser = hex_u64,
        default_value_t = Hex(DEFAULT_IOC_GUID),
    )]
    pub ioc_guid: Hex,
    /// Identifier extension of our own port
    #[arg(
        long,
        global = true,
        value_name = "HEX",
        value_parser = hex_u64,
        default_value_t = Hex(0),
    )]
    pub initiator_ext: Hex,
    /// GUID of our own port [default: a random one]
    #[arg(long, global = true, value_name = "HEX", value_parser = hex_u64)]
    pub initiator_guid: Option<Hex>,
    /// Seconds to wait for the answer to a command
    #[arg(
        long,
        global = true,
        value_name = "S",
        default_value_t = 30,
        value_parser = clap::value_parser!(u64).range(1..=3600),
    )]
    pub timeout: u64,
}

/// The commands.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// List the logical units: size, block size, names
    Luns,
    /// INQUIRY data and VPD pages of one logical unit
    Inq {
        /// The logical unit
        #[arg(long, default_value_t = 0, value_parser = lun_number)]
        lun: u16,
    },
    /// Copy between a file and a logical unit; one of the two is lun:N or lun:N@OFFSET
    Cp(CpArgs),
    /// Generate load and measure it
    Run(RunArgs),
}

/// Options of `cp`.
#[derive(Args, Debug, Clone)]
pub struct CpArgs {
    /// From: a file, or lun:N[@OFFSET]
    #[arg(value_parser = CopyEnd::from_str)]
    pub source: CopyEnd,
    /// To: a file, or lun:N[@OFFSET]
    #[arg(value_parser = CopyEnd::from_str)]
    pub destination: CopyEnd,
    /// Bytes to copy [default: the file's length; from a LUN, up to its end]
    #[arg(long, value_name = "BYTES", value_parser = size)]
    pub size: Option<u64>,
    /// Print the SHA-256 of the bytes copied
    #[arg(long)]
    pub sha256: bool,
}

/// Options of `run`.
#[derive(Args, Debug, Clone)]
pub struct RunArgs {
    /// The logical unit, or several with commas
    #[arg(
        long,
        value_name = "N[,M]",
        value_delimiter = ',',
        default_value = "0",
        value_parser = lun_number,
    )]
    pub lun: Vec<u16>,
    /// What to do; everything but read and randread overwrites the LUN
    #[arg(long, value_enum, default_value = "randread")]
    pub rw: Mode,
    /// Percentage of reads in randrw
    #[arg(
        long,
        value_name = "PCT",
        default_value_t = 70,
        value_parser = clap::value_parser!(u8).range(0..=100),
    )]
    pub rwmixread: u8,
    /// Bytes per I/O
    #[arg(long, value_name = "BYTES", default_value = "4k", value_parser = size)]
    pub bs: u64,
    /// I/Os outstanding per channel
    #[arg(
        long,
        value_name = "N",
        default_value_t = 32,
        value_parser = clap::value_parser!(u32).range(1..=4096),
    )]
    pub iodepth: u32,
    /// Seconds to run [default: 10, if --size is not given either]
    #[arg(long, value_name = "S", value_parser = seconds)]
    pub runtime: Option<f64>,
    /// Bytes to move in all; what comes first of --runtime and --size ends the run
    #[arg(long, value_name = "BYTES", value_parser = size)]
    pub size: Option<u64>,
    /// RDMA channels
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        value_parser = clap::value_parser!(u16).range(1..=64),
    )]
    pub channels: u16,
    /// Use only the first BYTES of each LUN [default: all of it; with --verify at most 1 GiB]
    #[arg(long, value_name = "BYTES", value_parser = size)]
    pub range: Option<u64>,
    /// Stamp every block written, check every block read, read everything back at the end.
    /// With reads in the pattern the range is written first, so the LUN is overwritten
    #[arg(long)]
    pub verify: bool,
    /// With --verify: do not write the range first, pass over blocks not written in this run
    #[arg(long, requires = "verify")]
    pub no_preload: bool,
    /// Seed of addresses and data [default: a random one, printed]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Pin the thread to this CPU
    #[arg(long, value_name = "CPU")]
    pub core: Option<usize>,
    /// Never yield the CPU, even if nothing came for 20 us
    #[arg(long)]
    pub spin: bool,
    /// Write the report as JSON to this file; - is stdout, instead of the table
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Report the whole latency distribution
    #[arg(long)]
    pub percentiles: bool,
    /// Show rates once a second even if stderr is not a terminal
    #[arg(long)]
    pub progress: bool,
    /// Also report the CPU time of this target process's reactor threads
    #[arg(long, value_name = "PID")]
    pub target_pid: Option<u32>,
    /// How data buffers are described to the target
    #[arg(long, value_enum, default_value = "direct")]
    pub desc: DescFormat,
}

/// `--desc`: the data-buffer descriptor formats of SRP r16a 5.6.2.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum DescFormat {
    /// One direct descriptor.
    #[default]
    Direct,
    /// An indirect table, complete in the IU.
    Indirect,
    /// An indirect table of which the IU carries only the first half.
    Partial,
    /// Immediate data for writes that fit the IU, direct otherwise (SRP-2).
    Imm,
}

impl DescFormat {
    /// The word on the command line.
    pub fn word(self) -> &'static str {
        match self {
            DescFormat::Direct => "direct",
            DescFormat::Indirect => "indirect",
            DescFormat::Partial => "partial",
            DescFormat::Imm => "imm",
        }
    }
}

/// Where a target listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// The Unix socket of a shared-memory fabric.
    Shm(PathBuf),
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Address, String> {
        match text.split_once(':') {
            Some(("shm", "")) => Err("shm: needs a path, as in shm:/run/usurp/srp.sock".into()),
            Some(("shm", path)) => Ok(Address::Shm(path.into())),
            Some(("rdma", _)) => {
                Err("rdma: is not in this version; use shm:PATH, or ib_srp for RDMA".into())
            }
            _ => Err("an address looks like shm:/run/usurp/srp.sock".into()),
        }
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Address::Shm(path) => write!(f, "shm:{}", path.display()),
        }
    }
}

/// One side of `cp`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CopyEnd {
    /// A logical unit from a byte offset on.
    Lun {
        /// The LU.
        lun: u16,
        /// Bytes from its start.
        offset: u64,
    },
    /// A file of this machine.
    File(PathBuf),
}

impl FromStr for CopyEnd {
    type Err = String;

    fn from_str(text: &str) -> Result<CopyEnd, String> {
        let Some(rest) = text.strip_prefix("lun:") else {
            return match text {
                "" => Err("an empty file name".into()),
                "-" => Err("a file is needed, its length counts; for a file named -: ./-".into()),
                path => Ok(CopyEnd::File(path.into())),
            };
        };
        let (lun, offset) = rest.split_once('@').unwrap_or((rest, "0"));
        Ok(CopyEnd::Lun { lun: lun_number(lun)?, offset: size(offset)? })
    }
}

/// A 64-bit number that is written in hexadecimal.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Hex(pub u64);

impl std::fmt::Display for Hex {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#018x}", self.0)
    }
}

fn hex_u64(text: &str) -> Result<Hex, String> {
    let digits = text.strip_prefix("0x").unwrap_or(text);
    let plain = digits.bytes().all(|b| b.is_ascii_hexdigit());
    match u64::from_str_radix(digits, 16) {
        Ok(n) if plain => Ok(Hex(n)),
        _ => Err("up to 16 hexadecimal digits, as in 0x0002c903000e8acd".into()),
    }
}

fn lun_number(text: &str) -> Result<u16, String> {
    match text.parse() {
        Ok(n) if n < 16384 => Ok(n),
        _ => Err("a LUN is a number from 0 to 16383".into()),
    }
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(n) if n > 0.0 && n <= 1e7 => Ok(n),
        _ => Err("a number of seconds above 0".into()),
    }
}

/// Bytes: a number with an optional unit, all powers of 1024.
pub fn size(text: &str) -> Result<u64, String> {
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(split);
    let shift = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        "t" | "tib" => 40,
        "kb" | "mb" | "gb" | "tb" => {
            return Err(format!("say {}iB for powers of 1024", &unit[..1]));
        }
        _ => return Err("a size looks like 4096, 4k or 1GiB".into()),
    };
    let number: u64 = digits.parse().map_err(|_| "a size looks like 4096, 4k or 1GiB")?;
    let bytes = number.checked_mul(1 << shift);
    bytes.ok_or_else(|| "more than 2^64 bytes".into())
}

impl Cli {
    /// The address; a usage error without `--connect`.
    pub fn address(&self) -> Result<&Address, Error> {
        let missing = "--connect shm:PATH is missing: which target?";
        self.link.connect.as_ref().ok_or_else(|| Error::usage(missing))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Cli, String> {
        let words = std::iter::once("usurp-perf").chain(line.split_ascii_whitespace());
        Cli::try_parse_from(words).map_err(|e| {
            assert_eq!(e.exit_code(), 2, "usage errors exit with 2");
            e.to_string()
        })
    }

    fn run(line: &str) -> RunArgs {
        match parse(line).unwrap().command {
            Command::Run(args) => args,
            other => panic!("{other:?}"),
        }
    }

    fn refused(line: &str, why: &str) {
        let text = parse(line).expect_err(line);
        assert!(text.contains(why), "{line}: {text}");
    }

    #[test]
    fn the_command_line_is_well_formed() {
        <Cli as clap::CommandFactory>::command().debug_assert();
    }

    #[test]
    fn run_has_working_defaults() {
        let args = run("--connect shm:/s run");
        assert_eq!((args.bs, args.iodepth, args.channels), (4096, 32, 1));
        assert_eq!((args.rw, args.desc, args.lun), (Mode::RandRead, DescFormat::Direct, vec![0]));
    }

    #[test]
    fn run_takes_everything_it_documents() {
        let args = run(
            "--connect shm:/s run --lun 0,3 --rw randrw --rwmixread 30 --bs 128KiB --iodepth 8 \
             --runtime 2.5 --size 1G --channels 4 --verify --no-preload --seed 9 --core 1 \
             --json - --percentiles --range 64m --progress --spin --target-pid 7 --desc partial",
        );
        assert_eq!((args.lun.as_slice(), args.bs, args.rwmixread), (&[0, 3][..], 131072, 30));
        assert_eq!((args.size, args.range), (Some(1 << 30), Some(64 << 20)));
        assert_eq!((args.desc, args.target_pid), (DescFormat::Partial, Some(7)));
    }

    #[test]
    fn connection_options_may_stand_before_or_after_the_command() {
        for line in ["--connect shm:/a/b luns", "luns --connect shm:/a/b"] {
            let cli = parse(line).unwrap();
            assert_eq!(cli.address().unwrap(), &Address::Shm("/a/b".into()));
            assert_eq!(cli.link.id_ext.0, DEFAULT_ID_EXT);
            assert_eq!(cli.link.ioc_guid.0, DEFAULT_IOC_GUID);
        }
        assert_eq!(parse("luns").unwrap().address().unwrap_err().exit_code(), 2);
    }

    #[test]
    fn addresses_that_cannot_be_are_refused() {
        refused("--connect rdma:10.0.0.1:5555 luns", "not in this version");
        refused("--connect /run/x luns", "an address looks like");
        refused("--connect shm: luns", "needs a path");
    }

    #[test]
    fn numbers_that_cannot_be_are_refused() {
        refused("run --bs 4q", "a size looks like");
        refused("run --bs 4kb", "kiB");
        refused("run --bs -4k", "");
        refused("run --bs 99999999999999999999", "a size looks like");
        refused("run --size 99999999999T", "2^64");
        refused("run --iodepth 0", "1..=4096");
        refused("run --rwmixread 101", "0..=100");
        refused("run --lun 16384", "0 to 16383");
        refused("run --lun 0,x", "0 to 16383");
        refused("run --runtime 0", "above 0");
        refused("run --runtime nan", "above 0");
        refused("run --rw trim", "possible values");
        refused("run --no-preload", "--verify");
        refused("luns --id-ext 0x1g", "hexadecimal");
        refused("luns --id-ext +1", "hexadecimal");
        refused("luns --id-ext 12345678123456781", "hexadecimal");
        refused("luns --timeout 0", "1..=3600");
    }

    #[test]
    fn copy_ends_are_told_apart() {
        let end = |text: &str| text.parse::<CopyEnd>();
        assert_eq!(end("lun:3"), Ok(CopyEnd::Lun { lun: 3, offset: 0 }));
        assert_eq!(end("lun:0@1MiB"), Ok(CopyEnd::Lun { lun: 0, offset: 1 << 20 }));
        assert_eq!(end("./lun:3"), Ok(CopyEnd::File("./lun:3".into())));
        assert!(end("lun:").unwrap_err().contains("a LUN is"));
        assert!(end("lun:1@x").unwrap_err().contains("a size"));
        assert!(end("").is_err());
        assert!(end("-").unwrap_err().contains("./-"));
    }

    #[test]
    fn identifiers_are_hexadecimal_with_or_without_prefix() {
        let cli = parse("luns --id-ext 0x1f --ioc-guid 1F").unwrap();
        assert_eq!((cli.link.id_ext.0, cli.link.ioc_guid.0), (0x1f, 0x1f));
        assert_eq!(cli.link.id_ext.to_string(), "0x000000000000001f");
    }
}
