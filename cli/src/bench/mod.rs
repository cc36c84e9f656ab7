//! `raccl bench`: how fast an operation is, and whether it is right.
//!
//! With `-n` the command starts its own ranks, which are this command without `-n`; those join the group of
//! their environment and [measure](mod@measure) one size after the other. Rank 0 [reports](report).

mod affinity;
mod buffer;

mod measure;
mod operation;
mod pattern;
mod report;

use std::ffi::OsString;
use std::{env, io};

use anyhow::{Context, anyhow};
use raccl::{Communicator, Config, LinkKind};
use tracing_subscriber::EnvFilter;

use self::measure::Bench;
pub(crate) use self::operation::Operation;
use self::report::{Report, Subject};
use crate::args::BenchArgs;
use crate::failure::{Failure, say};
use crate::launch;

/// Runs the command.
pub(crate) fn run(args: &BenchArgs) -> Result<(), Failure> {
    let sizes = sizes(args).map_err(Failure::usage)?;
    if args.operation.reduces() && !pattern::is_reduction(args.dtype, args.reduce) {
        let (reduce, dtype) = (args.reduce, args.dtype);
        return Err(Failure::usage(anyhow!("{reduce} has no meaning for elements of type {dtype}")));
    }
    match args.ranks {
        Some(ranks) => {
            check_ranks(args.operation, ranks as usize)?;
            // What is wrong with the settings is better said once than by each rank.
            let settings = Config::from_env().map_err(Failure::usage)?;
            // Emulated cables replace those of the environment.
            if args.emulate.is_none() {
                settings.rank(0).size(ranks as usize).check().map_err(Failure::usage)?;
            }
            if let Some(algorithm) = overrides(args) {
                Config::new().algorithm(algorithm).check().context("--algorithm").map_err(Failure::usage)?;
            }
            let program = rank_command(args).context("cannot find this executable")?;
            launch::quiet(ranks as usize, args.emulate.as_ref(), program)?.run()
        }
        None => join(args, &sizes),
    }
}

/// The sizes to measure, before they are rounded for the number of ranks.
fn sizes(args: &BenchArgs) -> anyhow::Result<Vec<u64>> {
    if args.operation == Operation::Barrier {
        return Ok(vec![0]);
    }
    if args.begin > args.end {
        return Err(anyhow!("-b {} is more than -e {}", args.begin, args.end));
    }
    // A size of 0 stays 0 however often it is multiplied.
    let next = |&size: &u64| size.max(1).checked_mul(args.factor).filter(|&size| size <= args.end);
    Ok(std::iter::successors(Some(args.begin), next).collect())
}

fn check_ranks(operation: Operation, ranks: usize) -> Result<(), Failure> {
    if operation.is_message() && ranks < 2 {
        return Err(Failure::usage(anyhow!("{} needs two ranks or more", operation.argument())));
    }
    Ok(())
}

/// This command as each rank runs it.
fn rank_command(args: &BenchArgs) -> io::Result<Vec<OsString>> {
    let mut words: Vec<OsString> =
        vec![env::current_exe()?.into(), "bench".into(), args.operation.argument().into()];
    let mut option = |name: &str, value: OsString| words.extend([name.into(), value]);
    option("-b", args.begin.to_string().into());
    option("-e", args.end.to_string().into());
    option("-f", args.factor.to_string().into());
    option("-d", args.dtype.name().into());
    option("-o", args.reduce.name().into());
    if let Some(link) = args.link {
        option("--link", link.name().into());
    }
    if let Some(algorithm) = &args.algorithm {
        option("--algorithm", algorithm.into());
    }
    if let Some(iterations) = args.iterations {
        option("--iters", iterations.to_string().into());
    }
    if let Some(warmup) = args.warmup {
        option("--warmup", warmup.to_string().into());
    }
    if let Some(timeout) = &args.timeout {
        option("--timeout", timeout.into());
    }
    if let Some(json) = &args.json {
        option("--json", json.into());
    }
    if args.check {
        words.push("--check".into());
    }
    if args.registered {
        words.push("--registered".into());
    }
    Ok(words)
}

/// Joins the group of the environment and measures.
fn join(args: &BenchArgs, sizes: &[u64]) -> Result<(), Failure> {
    log_to_stderr().map_err(Failure::usage)?;
    affinity::take();
    let config = configure(args)?;
    let warnings = config.warnings().to_vec();
    let comm = config.connect().map_err(|error| {
        let usage = matches!(error, raccl::Error::Config { .. });
        let error = anyhow::Error::new(error).context("cannot form the group");
        if usage { Failure::usage(error) } else { error.into() }
    })?;
    if comm.rank() == 0 {
        warnings.iter().for_each(say);
    }
    check_ranks(args.operation, comm.size())?;
    let wrong =
        measure(args, sizes, &comm).with_context(|| format!("rank {} of {}", comm.rank(), comm.size()))?;
    comm.close().context("cannot leave the group")?;
    match wrong {
        0 => Ok(()),
        wrong => Err(anyhow!("{wrong} elements are wrong").into()),
    }
}

/// What `RACCL_LOG` asks for.
fn log_to_stderr() -> anyhow::Result<()> {
    let Some(filter) = env::var_os("RACCL_LOG") else { return Ok(()) };
    let filter = filter.to_str().context("RACCL_LOG is not text")?;
    let filter = EnvFilter::try_new(filter).with_context(|| format!("RACCL_LOG is `{filter}`"))?;
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).init();
    Ok(())
}

fn configure(args: &BenchArgs) -> Result<Config, Failure> {
    let mut config = Config::from_env().map_err(Failure::usage)?;
    if let Some(link) = args.link {
        config = config.link(link.choice());
    }
    if let Some(timeout) = &args.timeout {
        // It has been read before, from the command line.
        config = config
            .timeout(raccl::parse::duration(timeout).map_err(|reason| Failure::usage(anyhow!(reason)))?);
    }
    Ok(match overrides(args) {
        Some(overrides) => config.algorithm(overrides),
        None => config,
    })
}

/// The wanted algorithm in the form of the settings. A name is for this operation and all sizes.
fn overrides(args: &BenchArgs) -> Option<String> {
    let algorithm = args.algorithm.as_ref()?;
    let is_name = algorithm != "auto" && !algorithm.contains(':');
    Some(if is_name { format!("{}:0-={algorithm}", args.operation.name()) } else { algorithm.clone() })
}

/// Measures all sizes; returns the number of wrong elements, which is 0 on all ranks but 0.
fn measure(args: &BenchArgs, sizes: &[u64], comm: &Communicator) -> anyhow::Result<u64> {
    let mut sizes: Vec<u64> =
        sizes.iter().map(|&size| args.operation.whole(size, args.dtype.size(), comm.size())).collect();
    sizes.dedup();
    // Less than an element for each rank is nothing to measure, unless nothing was asked for.
    sizes.retain(|&size| size > 0 || args.begin == 0 || args.operation == Operation::Barrier);

    let bench = Bench {
        comm,
        operation: args.operation,
        dtype: args.dtype,
        reduce: args.reduce,
        iterations: args.iterations,
        warmup: args.warmup,
        check: args.check,
        registered: args.registered,
    };
    let subject = Subject {
        operation: args.operation,
        dtype: args.dtype,
        reduce: args.reduce,
        ranks: comm.size(),
        links: links(comm)?,
        check: args.check,
    };
    let mut report = match comm.rank() {
        0 => Some(Report::new(subject, args.json.as_deref(), sizes.len())?),
        _ => None,
    };
    let (mut input, mut output) = bench.buffers(sizes.last().copied().unwrap_or(0))?;
    for bytes in sizes {
        if let Some(report) = &report {
            report.next(bytes);
        }
        let figures = bench.run(bytes, &mut input, &mut output)?;
        if let Some(report) = &mut report {
            report.add(&figures, &algorithm(comm, args.operation, bytes))?;
        }
    }
    let uncopied = args.registered.then(|| comm.uncopied());
    report.map_or(Ok(0), |report| report.finish(uncopied))
}

/// The kinds of link that join any pair of ranks, the fastest first.
fn links(comm: &Communicator) -> anyhow::Result<Vec<&'static str>> {
    const KINDS: [LinkKind; 4] = [LinkKind::Local, LinkKind::Shm, LinkKind::Verbs, LinkKind::Tcp];
    let mut has = [0_u8; KINDS.len()];
    for peer in 0..comm.size() {
        if let Some(at) = comm.link(peer)?.and_then(|link| KINDS.iter().position(|&kind| kind == link)) {
            has[at] = 1;
        }
    }
    comm.all_reduce(&mut has, raccl::Max)?;
    Ok(KINDS.iter().zip(has).filter(|&(_, has)| has == 1).map(|(kind, _)| kind.name()).collect())
}

/// What runs for a size.
fn algorithm(comm: &Communicator, operation: Operation, bytes: u64) -> String {
    match operation.collective() {
        Some(collective) => comm.explain(collective, bytes as usize).algorithm.to_string(),
        None => "message".into(),
    }
}
