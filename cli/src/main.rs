//! The `raccl` command: starts the ranks of a job, here or over ssh, and measures operations.

#![forbid(unsafe_code)]

mod args;
mod bench;
mod devices;
mod failure;
mod launch;

use std::process::ExitCode;

use clap::Parser;

use crate::args::{Args, Command};
use crate::failure::Failure;

fn main() -> ExitCode {
    match run(Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            failure.report();
            ExitCode::from(failure.status())
        }
    }
}

fn run(args: Args) -> Result<(), Failure> {
    match args.command {
        Command::Launch(args) => launch::run(args),
        Command::Bench(args) => bench::run(&args),
        Command::Devices(args) => devices::run(args),
        Command::Rank { program } => launch::enter(program),
        Command::Keeper { folder } => launch::keep(folder.as_deref()),
    }
}
