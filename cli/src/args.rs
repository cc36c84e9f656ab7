//! The command line.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Parser, Subcommand, ValueEnum};
use raccl::{DType, LinkChoice, LinkKind, ReduceOp};
use raccl_emulator::Layout;

use crate::bench::Operation;

/// Collective communications for small clusters of strong machines.
#[derive(Debug, Parser)]
#[command(name = "raccl", version, disable_help_subcommand = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Start the ranks of a job, on this machine or over ssh.
    Launch(LaunchArgs),

    /// Measure an operation, and verify it.
    Bench(BenchArgs),

    /// Show this machine's RDMA devices, and what keeps RDMA from working.
    Devices(DevicesArgs),

    /// The first moments of a local rank; started by `launch` itself.
    #[command(name = "__rank", hide = true)]
    Rank {
        /// The rank's program and its arguments.
        #[arg(required = true, trailing_var_arg = true)]
        program: Vec<OsString>,
    },

    /// Ends the ranks of a launcher that was killed; started by `launch` itself.
    #[command(name = "__keeper", hide = true)]
    Keeper {
        /// What else the launcher would leave.
        folder: Option<PathBuf>,
    },
}

/// Arguments of `raccl launch`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Each rank finds its place in RACCL_RANK, RACCL_SIZE, RACCL_COORDINATOR and RACCL_SECRET_FD. Its output \
lines are prefixed with `[rank]`; rank 0 reads the standard input. When one rank fails the others are \
ended and the status is that rank's (128 + the signal's number for a signal).")]
pub(crate) struct LaunchArgs {
    /// How many ranks; with hosts, at most one a slot (the default).
    #[arg(short = 'n', long = "ranks", required_unless_present_any = ["hosts", "hostfile"])]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub(crate) ranks: Option<u32>,

    /// The hosts of ranks 0, 1, 2 and so on, as ssh knows them. RACCL_SSH replaces the command `ssh`.
    #[arg(long, value_name = "A,B,C", conflicts_with = "hostfile")]
    pub(crate) hosts: Option<String>,

    /// A file of hosts: `HOST [slots=N] [ip=ADDRESS]` a line, or the JSON of mlx.launch.
    #[arg(long, value_name = "FILE")]
    pub(crate) hostfile: Option<PathBuf>,

    /// The address of the first host as the others reach it (default: its name, or what the hostfile says).
    #[arg(long, value_name = "HOST[:PORT]")]
    pub(crate) coordinator: Option<String>,

    /// Make every rank a machine of its own on emulated Thunderbolt cables: mesh, ring or line, then
    /// `,cables=K`, `,latency=20us`, `,bandwidth=100M`.
    #[arg(long, value_name = "SPEC", conflicts_with_all = ["hosts", "hostfile"])]
    pub(crate) emulate: Option<Layout>,

    /// Arguments of every kind of run.
    #[command(flatten)]
    pub(crate) run: RunArgs,

    /// The program of every rank, and its arguments.
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    pub(crate) program: Vec<OsString>,
}

/// Arguments of `raccl bench`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Sizes are as nccl-tests counts them: one rank's buffer for all-reduce and broadcast, the total received for \
all-gather, the total sent for reduce-scatter. So are algbw and busbw. They take K, M and G (of 1024).")]
pub(crate) struct BenchArgs {
    /// What to measure.
    pub(crate) operation: Operation,

    /// Start so many ranks on this machine; without it, join the group of the environment.
    #[arg(short = 'n', long = "ranks", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub(crate) ranks: Option<u32>,

    /// The smallest size.
    #[arg(short = 'b', long, default_value = "4", value_parser = raccl::parse::size)]
    pub(crate) begin: u64,

    /// The largest size.
    #[arg(short = 'e', long, default_value = "64M", value_parser = raccl::parse::size)]
    pub(crate) end: u64,

    /// From one size to the next.
    #[arg(short = 'f', long, default_value = "2", value_parser = clap::value_parser!(u64).range(2..))]
    pub(crate) factor: u64,

    /// The type of the elements.
    #[arg(short = 'd', long, default_value = "f32", value_name = "TYPE")]
    pub(crate) dtype: DType,

    /// What is computed of them, where something is.
    #[arg(short = 'o', long = "op", default_value = "sum", value_name = "OP")]
    pub(crate) reduce: ReduceOp,

    /// The kind of link between ranks.
    #[arg(long, value_enum)]
    pub(crate) link: Option<Link>,

    /// The algorithm for all sizes, or rules such as `all_reduce:0-32k=one_shot,32k-=two_shot`.
    #[arg(long, value_name = "NAME")]
    pub(crate) algorithm: Option<String>,

    /// Calls in a batch (default: 2000 for small sizes, 4 for large ones).
    #[arg(long = "iters", value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) iterations: Option<u64>,

    /// Calls before the batches (default: as many as in one).
    #[arg(long, value_name = "N")]
    pub(crate) warmup: Option<u64>,

    /// Fail an operation in which no byte moves for so long.
    #[arg(long, value_name = "TIME", value_parser = time)]
    pub(crate) timeout: Option<String>,

    /// Verify every element of every size; a wrong one is a failure.
    #[arg(long)]
    pub(crate) check: bool,

    /// Let RDMA devices know the buffers, so that large messages are not copied (`Communicator::allocate`).
    #[arg(long)]
    pub(crate) registered: bool,

    /// Write a line of JSON for each size, to a file or, with `-`, instead of the table.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,

    /// Make every rank a machine of its own on emulated Thunderbolt cables: mesh, ring or line, then
    /// `,cables=K`, `,latency=20us`, `,bandwidth=100M`.
    #[arg(long, value_name = "SPEC", requires = "ranks")]
    pub(crate) emulate: Option<Layout>,
}

/// Arguments of `raccl devices`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Nothing is allocated on a device. What is not given here comes from RACCL_VERBS_LIBRARY, RACCL_DEVICES (or \
MLX's names for it) and RACCL_RANK. The status is 0 when the report could be made, with --check 1 when \
RDMA is not available.")]
pub(crate) struct DevicesArgs {
    /// The device matrix, or its file: shows its cables.
    #[arg(long, value_name = "FILE|JSON")]
    pub(crate) matrix: Option<String>,

    /// Which rank of the matrix this machine has: checks its cables.
    #[arg(long, value_name = "RANK")]
    pub(crate) rank: Option<usize>,

    /// The verbs library to load instead of the system's.
    #[arg(long, value_name = "FILE")]
    pub(crate) library: Option<PathBuf>,

    /// Write one line of JSON instead of tables.
    #[arg(long)]
    pub(crate) json: bool,

    /// Fail when RDMA, or a device that the matrix names for the rank, is not usable.
    #[arg(long)]
    pub(crate) check: bool,
}

/// What every way to start ranks takes.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct RunArgs {
    /// A variable for the environment of every rank; without `=`, this command's own value.
    #[arg(long = "env", value_name = "K=V", value_parser = OsStringValueParser::new().try_map(variable))]
    pub(crate) environment: Vec<(OsString, OsString)>,

    /// The kind of link between ranks.
    #[arg(long, value_enum)]
    pub(crate) link: Option<Link>,

    /// Fail an operation in which no byte moves for so long (`500ms`, `30s`, `2m`; `0` for never).
    #[arg(long, value_name = "TIME", value_parser = time)]
    pub(crate) timeout: Option<String>,

    /// The directory that ranks run in (default: this one).
    #[arg(long, value_name = "DIR")]
    pub(crate) cwd: Option<PathBuf>,

    /// The port where rank 0 listens (default: a free one).
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) port: Option<u16>,
}

/// Kinds of link that can be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Link {
    /// The best that each pair of ranks has.
    Auto,
    /// Shared memory.
    Shm,
    /// RDMA.
    Verbs,
    /// TCP.
    Tcp,
}

impl Link {
    /// The name in `RACCL_LINK`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Link::Auto => "auto",
            Link::Shm => "shm",
            Link::Verbs => "verbs",
            Link::Tcp => "tcp",
        }
    }

    /// The same for the library.
    pub(crate) fn choice(self) -> LinkChoice {
        match self {
            Link::Auto => LinkChoice::Auto,
            Link::Shm => LinkChoice::Only(LinkKind::Shm),
            Link::Verbs => LinkChoice::Only(LinkKind::Verbs),
            Link::Tcp => LinkChoice::Only(LinkKind::Tcp),
        }
    }
}

/// Variables that say which rank a process is. The launcher sets them itself.
const PLACE: [&str; 5] =
    ["RACCL_RANK", "RACCL_SIZE", "RACCL_COORDINATOR", "RACCL_SECRET_FD", "RACCL_SECRET_FILE"];

/// Splits `K=V`; looks `K` alone up in the command's own environment.
pub(crate) fn variable(text: OsString) -> Result<(OsString, OsString), String> {
    let bytes = text.as_bytes();
    let split = bytes.iter().position(|&b| b == b'=');
    let name = OsStr::from_bytes(&bytes[..split.unwrap_or(bytes.len())]);
    if name.is_empty() {
        return Err("a variable needs a name before the `=`".into());
    }
    if PLACE.iter().any(|&place| name == place) {
        return Err(format!("{} is set by the launcher itself", name.display()));
    }
    let value = match split {
        Some(at) => OsString::from_vec(bytes[at + 1..].to_vec()),
        None => std::env::var_os(name)
            .ok_or_else(|| format!("{} is not set here; write {0}=VALUE", name.display()))?,
    };
    Ok((name.to_owned(), value))
}

/// Checks a duration and leaves it as it was written.
fn time(text: &str) -> Result<String, String> {
    raccl::parse::duration(text).map(|_| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_is_consistent() {
        use clap::CommandFactory;
        Args::command().debug_assert();
    }

    #[test]
    fn options_after_the_program_belong_to_the_program() {
        for line in [
            &["raccl", "launch", "-n", "2", "--", "prog", "-n", "9", "--", "--env"][..],
            &["raccl", "launch", "-n", "2", "prog", "-n", "9", "--", "--env"],
        ] {
            let Command::Launch(args) = Args::try_parse_from(line).expect("parses").command else {
                panic!("not a launch")
            };
            assert_eq!(args.program, ["prog", "-n", "9", "--", "--env"]);
            assert_eq!(args.ranks, Some(2));
        }
    }

    #[test]
    fn a_misspelt_option_is_not_taken_for_the_program() {
        assert!(Args::try_parse_from(["raccl", "launch", "-n", "2", "--hots", "a", "prog"]).is_err());
        assert!(Args::try_parse_from(["raccl", "launch", "prog"]).is_err(), "no number of ranks");
    }

    #[test]
    fn variables_keep_every_byte() {
        let value = OsString::from_vec(b"K=a=b\n\xff".to_vec());
        let (name, value) = variable(value).expect("good");
        assert_eq!(name, "K");
        assert_eq!(value.as_bytes(), b"a=b\n\xff");
        assert!(variable("=x".into()).is_err());
        assert!(variable("RACCL_RANK=1".into()).is_err());
        assert!(variable("RACCL_SURELY_NOT_SET".into()).is_err());
    }
}
