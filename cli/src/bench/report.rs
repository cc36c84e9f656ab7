//! The figures for people and for programs.

use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use raccl::{DType, ReduceOp, Uncopied};
use serde::Serialize;

use super::measure::Figures;
use super::operation::Operation;

/// What all sizes have in common.
pub(super) struct Subject {
    pub(super) operation: Operation,
    pub(super) dtype: DType,
    pub(super) reduce: ReduceOp,
    pub(super) ranks: usize,
    /// The kinds of link in the group.
    pub(super) links: Vec<&'static str>,
    pub(super) check: bool,
}

/// Where the figures go.
pub(super) struct Report {
    subject: Subject,
    table: bool,
    json: Option<(Box<dyn Write>, PathBuf)>,
    progress: ProgressBar,
    /// Sum and number of bus bandwidths.
    bus: (f64, usize),
    wrong: u64,
}

/// One size for programs.
#[derive(Serialize)]
struct Line<'a> {
    op: String,
    bytes: u64,
    count: u64,
    dtype: &'a str,
    reduce: &'a str,
    ranks: usize,
    links: &'a [&'static str],
    algorithm: &'a str,
    batch_median_us: f64,
    batch_min_us: f64,
    p50_us: f64,
    p99_us: f64,
    max_us: f64,
    algbw_gbs: f64,
    busbw_gbs: f64,
    checked: bool,
    wrong: u64,
}

impl Report {
    /// Begins the report on so many sizes. JSON goes to a file besides the table, or with `-` to the standard
    /// output instead of it.
    pub(super) fn new(subject: Subject, json: Option<&Path>, sizes: usize) -> anyhow::Result<Self> {
        let to_stdout = json == Some(Path::new("-"));
        let json = match json {
            None => None,
            Some(path) if to_stdout => Some((Box::new(io::stdout()) as Box<dyn Write>, path.to_owned())),
            Some(path) => {
                let file = File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
                Some((Box::new(file) as Box<dyn Write>, path.to_owned()))
            }
        };
        let target = match io::stderr().is_terminal() {
            true => ProgressDrawTarget::stderr(),
            false => ProgressDrawTarget::hidden(),
        };
        let progress = ProgressBar::with_draw_target(Some(sizes as u64), target);
        // The template is right, and without one there would only be another look.
        if let Ok(style) = ProgressStyle::with_template("{wide_bar} {pos}/{len} {msg:>10}") {
            progress.set_style(style);
        }
        let report = Self { subject, table: !to_stdout, json, progress, bus: (0.0, 0), wrong: 0 };
        report.header()?;
        Ok(report)
    }

    /// Says what comes next.
    pub(super) fn next(&self, bytes: u64) {
        self.progress.set_message(size(bytes));
        self.progress.tick();
    }

    /// One size.
    pub(super) fn add(&mut self, figures: &Figures, algorithm: &str) -> anyhow::Result<()> {
        let Subject { operation, ranks, dtype, reduce, .. } = self.subject;
        let (algbw, busbw) = operation.bandwidths(figures.bytes, figures.batch_median, ranks);
        self.bus = (self.bus.0 + busbw, self.bus.1 + 1);
        self.wrong += figures.wrong.unwrap_or(0);
        let count = figures.bytes / dtype.size() as u64;
        if let Some((file, path)) = &mut self.json {
            let line = Line {
                op: operation.name(),
                bytes: figures.bytes,
                count,
                dtype: dtype.name(),
                reduce: if operation.reduces() { reduce.name() } else { "none" },
                ranks,
                links: &self.subject.links,
                algorithm,
                batch_median_us: rounded(figures.batch_median),
                batch_min_us: rounded(figures.batch_min),
                p50_us: rounded(figures.p50),
                p99_us: rounded(figures.p99),
                max_us: rounded(figures.max),
                algbw_gbs: rounded(algbw),
                busbw_gbs: rounded(busbw),
                checked: figures.wrong.is_some(),
                wrong: figures.wrong.unwrap_or(0),
            };
            let text = serde_json::to_string(&line).context("cannot write the figures as JSON")? + "\n";
            let written = file.write_all(text.as_bytes()).and_then(|()| file.flush());
            written.with_context(|| format!("cannot write {}", path.display()))?;
        }
        let wrong = figures.wrong.map_or("-".into(), |wrong| wrong.to_string());
        self.print(&format!(
            "{:>11} {:>11}  {:<9} {:<19} {:>9} {:>9} {:>9} {:>9} {:>8} {:>8} {:>7}\n",
            figures.bytes,
            count,
            self.links(),
            algorithm,
            time(figures.batch_median),
            time(figures.batch_min),
            time(figures.p50),
            time(figures.p99),
            bandwidth(algbw),
            bandwidth(busbw),
            wrong,
        ))?;
        self.progress.inc(1);
        Ok(())
    }

    /// The end of the report; returns the number of wrong elements. `uncopied` is what rank 0 did not copy, if that is of interest.
    pub(super) fn finish(self, uncopied: Option<Uncopied>) -> anyhow::Result<u64> {
        self.progress.finish_and_clear();
        let (sum, count) = self.bus;
        let mean = if count == 0 { 0.0 } else { sum / count as f64 };
        let verdict = match (self.subject.check, self.wrong) {
            (false, _) => "nothing was checked (--check)".into(),
            (true, 0) => "every element of every size is right".into(),
            (true, wrong) => format!("{wrong} elements are WRONG"),
        };
        self.print(&format!("# mean bus bandwidth {} GB/s; {verdict}\n", bandwidth(mean)))?;
        if let Some(Uncopied { sent, received, .. }) = uncopied {
            self.print(&format!(
                "# rank 0 sent {sent} bytes from its buffers and received {received} in them without a copy\n"
            ))?;
        }
        Ok(self.wrong)
    }

    fn header(&self) -> anyhow::Result<()> {
        let Subject { operation, dtype, reduce, ranks, .. } = &self.subject;
        let elements = match operation {
            Operation::Barrier => String::new(),
            _ if operation.reduces() => format!(" of {dtype}, {reduce}"),
            _ => format!(" of {dtype}"),
        };
        let plural = if *ranks == 1 { "" } else { "s" };
        let version = env!("CARGO_PKG_VERSION");
        self.print(&format!(
            "# raccl {version}: {}{elements}, {ranks} rank{plural}; out of place; time and min of nine batches, p50 and p99 of single calls\n\
             # {:>9} {:>11}  {:<9} {:<19} {:>9} {:>9} {:>9} {:>9} {:>8} {:>8} {:>7}\n\
             # {:>9} {:>11}  {:<9} {:<19} {:>9} {:>9} {:>9} {:>9} {:>8} {:>8} {:>7}\n",
            operation.argument(),
            "size", "count", "link", "algorithm", "time", "min", "p50", "p99", "algbw", "busbw", "wrong",
            "(B)", "(elements)", "", "", "(us)", "(us)", "(us)", "(us)", "(GB/s)", "(GB/s)", "",
        ))
    }

    fn links(&self) -> String {
        if self.subject.links.is_empty() { "self".into() } else { self.subject.links.join("+") }
    }

    fn print(&self, text: &str) -> anyhow::Result<()> {
        if !self.table {
            return Ok(());
        }
        self.progress.suspend(|| {
            let mut stdout = io::stdout().lock();
            stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).context("cannot write the table")
        })
    }
}

/// Three digits after the point.
fn rounded(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

/// Microseconds in four digits or more.
fn time(us: f64) -> String {
    match us {
        ..100.0 => format!("{us:.2}"),
        ..1000.0 => format!("{us:.1}"),
        _ => format!("{us:.0}"),
    }
}

fn bandwidth(gbs: f64) -> String {
    if gbs < 10.0 { format!("{gbs:.3}") } else { format!("{gbs:.2}") }
}

/// A size as the command line takes it.
fn size(bytes: u64) -> String {
    for (unit, name) in [(1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")] {
        if bytes >= unit && bytes.is_multiple_of(unit) {
            return format!("{}{name}", bytes / unit);
        }
    }
    bytes.to_string()
}
