//! The command line.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Parser, Subcommand, ValueEnum};

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

    /// The first moments of a local rank; started by `launch` itself.
    #[command(name = "__rank", hide = true)]
    Rank {
        /// The rank's program and its arguments.
        #[arg(required = true, trailing_var_arg = true)]
        program: Vec<OsString>,
    },

    /// Ends the ranks of a launcher that was killed; started by `launch` itself.
    #[command(name = "__keeper", hide = true)]
    Keeper,
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

    /// Arguments of every kind of run.
    #[command(flatten)]
    pub(crate) run: RunArgs,

    /// The program of every rank, and its arguments.
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    pub(crate) program: Vec<OsString>,
}

/// What every way to start ranks takes.
#[derive(Debug, clap::Args)]
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
