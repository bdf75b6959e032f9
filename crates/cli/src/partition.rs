//! `esker partition`: divides the nodes of a graph, for `--order groups`.

use crate::exit::{INTERRUPTED, usage};
use crate::note;
use crate::output::{TextTable, print, print_json};
use crate::progress::Shown;
use crate::train::stop_on_interrupt;
use anyhow::Context;
use esker_nn::Schedule;
use esker_sample::SampleError;
use esker_sample::partition::{
    PartitionMade, PartitionRequest, PartitionSource, PartitionSummary, PartitionWork, StoredPartitioning,
    USUAL_GROUP, USUAL_NAME, USUAL_PASSES, automatic_partitions, make,
};
use esker_store::Dataset;
use esker_train::{OrderName, RunConfig, count_steps};
use esker_types::{Budget, ByteCount, Progress, Silent, StopSignal, grouped, peak_resident_bytes};
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Instant;

/// Divide a graph into partitions with few edges between them, for --order groups
#[derive(clap::Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "\
Examples:
  esker partition g
  esker partition g --partitions 10000 --passes 3 --name fine
  # as METIS wrote them: a partition number per line, a line per node
  esker partition g --from g.graph.part.1000 --name metis
  esker train g --order groups --partitioning metis

Partitions are stored in the dataset; `esker info` lists them. The same command finds what it made before. If it is killed, it continues after the last finished pass. The result does not depend on --memory."
)]
pub struct PartitionArguments {
    /// Directory of the dataset
    dataset: PathBuf,
    /// Number of partitions, or auto: as many as give a group two to three batches of training nodes; default: auto
    #[arg(long)]
    partitions: Option<PartitionCountFlag>,
    /// Passes over the graph; later passes move nodes; default: 3
    #[arg(long)]
    passes: Option<u32>,
    /// Name of the partitioning
    #[arg(long, default_value = USUAL_NAME)]
    name: String,
    /// Take partitions from this file: a partition number per line, a line per node, as METIS writes it
    #[arg(long, conflicts_with_all = ["passes", "group", "batch"])]
    from: Option<PathBuf>,
    /// Partitions in a group, for --partitions auto; default: 40
    #[arg(long)]
    group: Option<u32>,
    /// Seed nodes in a batch, for --partitions auto; default: 1000
    #[arg(long)]
    batch: Option<u64>,
    /// Memory limit, as in 512MiB; default: four fifths of the available memory
    #[arg(long)]
    memory: Option<ByteCount>,
    /// Replace a partitioning of this name that has other parameters
    #[arg(long)]
    overwrite: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// `auto`, or a number of partitions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PartitionCountFlag {
    Auto,
    Count(u32),
}

impl FromStr for PartitionCountFlag {
    type Err = String;
    fn from_str(text: &str) -> Result<PartitionCountFlag, String> {
        match (text, text.parse()) {
            ("auto", _) => Ok(PartitionCountFlag::Auto),
            (_, Ok(count @ 1..)) => Ok(PartitionCountFlag::Count(count)),
            _ => Err(format!("`{text}` is not a number of partitions; write one from 1 on, or auto")),
        }
    }
}

/// Seed nodes in a batch, unless requested otherwise.
const USUAL_BATCH: u64 = 1000;

impl PartitionArguments {
    fn source(&self, dataset: &Dataset) -> anyhow::Result<PartitionSource> {
        let given = match self.partitions {
            Some(PartitionCountFlag::Count(count)) => Some(count),
            _ => None,
        };
        if given.is_some() && (self.group.is_some() || self.batch.is_some()) {
            let flag = if self.group.is_some() { "--group" } else { "--batch" };
            return Err(usage(format!(
                "{flag} has no effect with --partitions N; leave it out, or use --partitions auto"
            )));
        }
        if let Some(path) = &self.from {
            return Ok(PartitionSource::File { path: path.clone(), partitions: given });
        }
        let (batch, group) = (self.batch.unwrap_or(USUAL_BATCH), self.group.unwrap_or(USUAL_GROUP));
        let partitions = match given {
            Some(count) => count,
            None => automatic_partitions(dataset, batch, group)?,
        };
        Ok(PartitionSource::Fennel { partitions, passes: self.passes.unwrap_or(USUAL_PASSES) })
    }
}

pub fn run(arguments: &PartitionArguments) -> anyhow::Result<ExitCode> {
    let started = Instant::now();
    let dataset = Dataset::open(&arguments.dataset)?;
    let budget = Budget::within_machine(arguments.memory).map_err(usage)?;
    let source = arguments.source(&dataset)?;
    let stop = stop_on_interrupt("stopping; the same command continues after the last finished pass");
    let shown = Shown::new();
    let progress: &dyn Progress = if arguments.json { &Silent } else { &shown };
    let work = PartitionWork { most_bytes: budget.host_bytes, stop: &stop, progress };
    let made = match make(&dataset, &arguments.name, &source, arguments.overwrite, &work) {
        Err(SampleError::Stopped) => {
            note!("stopped; finished passes are kept, and the same command continues with them");
            return Ok(ExitCode::from(INTERRUPTED));
        }
        made => made?,
    };
    let (seconds, peak) = (started.elapsed().as_secs_f64(), peak_resident_bytes());
    if arguments.json {
        let stored = &made.stored;
        return print_json(&json!({
            "name": stored.name(), "digest": stored.digest(), "request": stored.request(),
            "summary": stored.summary(), "cut_share": stored.summary().cut_share(),
            "node_balance": balance(stored.summary().most_nodes, stored.summary().nodes, stored.partitions()),
            "training_balance": balance(stored.summary().most_training, stored.summary().training, stored.partitions()),
            "reused": made.is_reused, "passes": made.passes, "cluster_passes": made.cluster_passes, "edges_per_second": edges_per_second(&made),
            "bytes": stored.bytes(), "seconds": seconds, "peak_host_bytes": peak,
            "smallest_host_bytes": made.memory_bytes, "budget_host_bytes": budget.host_bytes,
        }));
    }
    print(&made_text(&made, seconds, peak, budget))
}

/// The largest against the mean.
fn balance(most: u64, all: u64, partitions: u32) -> f64 {
    if all == 0 { 1.0 } else { most as f64 * partitions as f64 / all as f64 }
}

fn edges_per_second(made: &PartitionMade) -> Option<f64> {
    let (edges, seconds) = made
        .passes
        .iter()
        .chain(&made.cluster_passes)
        .fold((0, 0.0), |(edges, seconds), pass| (edges + pass.neighbours, seconds + pass.seconds));
    (edges > 0).then(|| edges as f64 / f64::max(seconds, 1e-9))
}

fn made_text(made: &PartitionMade, seconds: f64, peak: u64, budget: Budget) -> String {
    let stored = &made.stored;
    let mut text = format!(
        "partitioning {}{}\n{}",
        stored.name(),
        if made.is_reused { ", made before" } else { "" },
        partitions_text(stored.request(), stored.summary(), stored.bytes())
    );
    let rate = edges_per_second(made).map_or(String::new(), |rate| {
        let passes = made.passes.len() + made.cluster_passes.len();
        format!(
            ", {:.1} M edges/s in {passes} passes, {} of them for clusters",
            rate / 1e6,
            made.cluster_passes.len()
        )
    });
    text += &format!(
        "{seconds:.1} s{rate}; peak memory {} of {}\n",
        ByteCount(peak),
        ByteCount(budget.host_bytes)
    );
    text
}

/// A partitioning, for people.
pub fn partitions_text(request: &PartitionRequest, summary: &PartitionSummary, bytes: u64) -> String {
    let mut table = TextTable::new();
    let empty = match summary.empty {
        0 => String::new(),
        empty => format!(", {} of them empty", grouped(empty)),
    };
    table.row("partitions", format!("{request}{empty}, {}", ByteCount(bytes)));
    table.row(
        "edges cut",
        format!(
            "{:.1}%, {} of {}",
            summary.cut_share() * 100.0,
            grouped(summary.cut_edges),
            grouped(summary.edges)
        ),
    );
    let largest = |most: u64, all: u64| {
        let mean = all as f64 / request.partitions as f64;
        format!(
            "largest {}, {:.2} x the mean of {mean:.1}",
            grouped(most),
            balance(most, all, request.partitions)
        )
    };
    table.row("nodes", largest(summary.most_nodes, summary.nodes));
    if summary.training > 0 {
        table.row("training nodes", largest(summary.most_training, summary.training));
    }
    table.render()
}

/// Chooses the partitioning of a run by groups: the one of this name, the only one, or a new one.
pub fn choose_partitioning(
    config: &mut RunConfig,
    dataset: &Dataset,
    name: Option<&str>,
    quiet: bool,
    may_make: bool,
) -> anyhow::Result<()> {
    if config.order != OrderName::Groups {
        return match config.over_partitions() {
            Some(_) => Ok(set_schedule(config, dataset)?),
            None => Ok(()),
        };
    }
    // Before anything is made: a run that cannot be needs no partitions.
    config.check()?;
    let names = StoredPartitioning::names(dataset)?;
    let stored = match (name, &names[..]) {
        (Some(name), _) => StoredPartitioning::open(dataset, name)?,
        (None, [only]) => StoredPartitioning::open(dataset, only)?,
        (None, []) if may_make => made_for(config, dataset, quiet)?,
        (None, []) => {
            let path = dataset.directory().display();
            return Err(usage(format!("{path} has no partitions yet; run `esker partition {path}` first")));
        }
        (None, several) => {
            return Err(usage(format!(
                "{} has several partitionings: {}; choose one with --partitioning NAME",
                dataset.directory().display(),
                several.join(", ")
            )));
        }
    };
    config.partitioning = Some((&stored).into());
    Ok(set_schedule(config, dataset)?)
}

/// Sets the number of steps of a schedule that ends with the run, where epochs differ in theirs.
pub fn set_schedule(config: &mut RunConfig, dataset: &Dataset) -> esker_train::Result<()> {
    if let Schedule::Cosine { .. } | Schedule::Linear { .. } = config.schedule {
        let all = count_steps(config, dataset)?;
        if let Schedule::Cosine { steps, .. } | Schedule::Linear { steps, .. } = &mut config.schedule {
            *steps = all;
        }
    }
    Ok(())
}

/// Makes the partitioning of a run whose dataset has none.
fn made_for(config: &RunConfig, dataset: &Dataset, quiet: bool) -> anyhow::Result<StoredPartitioning> {
    let group = config.group.unwrap_or(USUAL_GROUP);
    let partitions = automatic_partitions(dataset, config.batch, group)?;
    note!(
        "{} has no partitions yet: making {} (`esker partition` makes others)",
        dataset.directory().display(),
        grouped(partitions as u64)
    );
    let shown = Shown::new();
    let progress: &dyn Progress = if quiet { &Silent } else { &shown };
    let stop = StopSignal::default();
    let work = PartitionWork { most_bytes: config.memory, stop: &stop, progress };
    let source = PartitionSource::Fennel { partitions, passes: USUAL_PASSES };
    let made = make(dataset, USUAL_NAME, &source, false, &work);
    Ok(made.context("--order groups needs partitions")?.stored)
}
