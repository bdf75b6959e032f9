//! Batches through the whole path, or through all of it but the model: seconds a batch, by stage.

use crate::output::{print, print_json};
use crate::train::{Flags, bound_by};
use anyhow::bail;
use esker_nn::best_product_rate;
use esker_sample::Position;
use esker_store::Dataset;
use esker_strategies::SourceCounters;
use esker_train::{OpenRun, StageClock, StageTimes};
use esker_types::ByteCount;
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

/// Train some batches: seconds a batch, and what each stage did with them
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  esker bench epoch g --fanout 10,10,10 --batch 1000 --hidden 256
  esker bench epoch g --strategy mmap --memory 1GiB --no-compute --json     the data path alone
  esker bench epoch g --strategy ginex --memory 1GiB --no-compute --warm 0  a whole epoch, sampling and planning included
  esker bench epoch g --products                                            the model's products beside gemm's best rate

The flags are those of `esker train`.")]
pub struct Arguments {
    /// The dataset
    dataset: PathBuf,
    /// Batches measured; default: an epoch
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    batches: Option<u64>,
    /// Batches before them, not measured
    #[arg(long, default_value_t = 4)]
    warm: u64,
    /// Bring batches and throw them away
    #[arg(long)]
    no_compute: bool,
    /// Where traces and plans of ginex go; default: the system's folder for such
    #[arg(long)]
    scratch: Option<PathBuf>,
    /// Measure the best rate of products on this machine too
    #[arg(long)]
    products: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    flags: Flags,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let dataset = Dataset::open(&arguments.dataset)?;
    let mut config = arguments.flags.resolve(&dataset)?;
    drop(dataset);
    // Enough for any number of batches.
    config.epochs = u64::MAX;
    let scratch = Scratch::new(arguments.scratch.clone().unwrap_or_else(std::env::temp_dir));
    let mut run = OpenRun::new(config, scratch.0.clone())?;
    let threads = run.config.threads;
    let best_before = arguments.products.then(|| run.learner().install(|| best_product_rate(threads)));
    let batches = arguments.batches.unwrap_or_else(|| run.batches_of_epoch());
    // What is sampled ahead of the last batch would be measured and never used.
    if arguments.warm + batches <= run.batches_of_epoch() {
        run.end_behind(arguments.warm + batches);
    }
    let mut source = run.source(Position { epoch: 0, batch: 0 })?;
    let clock = StageClock::new("train");
    let (mut nodes, mut edges, mut before, mut started) = (0u64, 0u64, Vec::new(), Instant::now());
    let mut counters = run.learner().backend().counters();
    let (mut losses, mut sources_before) = (0.0, source.counters());
    for number in 0..arguments.warm + batches {
        if number == arguments.warm {
            sources_before = source.counters();
            before = stages(&sources_before.stages, &clock);
            counters = run.learner().backend().counters();
            started = Instant::now();
        }
        let Some(batch) = clock.starved(|| source.next())? else { bail!("the batches ended") };
        if !arguments.no_compute {
            losses = clock.busy(|| run.step(&batch))?.unwrap_or(0.0);
        }
        if number >= arguments.warm {
            nodes += batch.sample.node_ids.len() as u64;
            edges += batch.sample.edge_count();
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    let sources = source.counters();
    let after = stages(&sources.stages, &clock);
    let spent: Vec<StageTimes> =
        after.iter().zip(&before).map(|(after, before)| after.since(before)).collect();
    let notes = run.notes();
    drop(source);
    let now = run.learner().backend().counters();
    let operations = (now.product_operations - counters.product_operations) as f64;
    let product_seconds = (now.product_nanos - counters.product_nanos) as f64 * 1e-9 / threads as f64;
    let aggregate_seconds = (now.aggregate_nanos - counters.aggregate_nanos) as f64 * 1e-9 / threads as f64;
    let products = best_before.map(|before| {
        // The machine's rate moves: before and behind the batches.
        let best = before.max(run.learner().install(|| best_product_rate(threads)));
        let rate = operations / product_seconds.max(1e-9);
        json!({ "operations_per_second": rate, "gemm_best_per_second": best, "share_of_best": rate / best })
    });
    let disk = disk(&sources, &sources_before);
    let (each, own) = (1.0 / batches as f64, run.peak_own_bytes());
    let value = json!({
        "dataset": arguments.dataset, "strategy": run.config.strategy, "threads": threads,
        "model": run.config.model, "fanout": run.config.fanout, "batch": run.config.batch, "compute": !arguments.no_compute,
        "batches": batches, "seconds_per_batch": seconds * each, "nodes_per_batch": nodes / batches,
        "edges_per_batch": edges / batches, "bytes_useful_per_batch": nodes * run.row_bytes() / batches,
        "stages": spent, "bound_by": bound_by(&spent, seconds), "products": products,
        "product_seconds_per_batch": product_seconds * each, "aggregate_seconds_per_batch": aggregate_seconds * each,
        "seconds": seconds, "disk": disk, "notes": notes,
        "peak_host_bytes": own, "budget_host_bytes": run.config.memory, "last_loss": losses,
    });
    if arguments.json {
        return print_json(&value);
    }
    let mut text = format!(
        "{}: {} a batch of {} nodes and {} edges\n",
        arguments.dataset.display(),
        milliseconds(seconds * each),
        esker_types::grouped(nodes / batches),
        esker_types::grouped(edges / batches)
    );
    for stage in &spent {
        let [busy, starved, blocked] =
            [stage.busy, stage.starved, stage.blocked].map(|time| milliseconds(time * each));
        text += &format!("  {:8} busy {busy:>9}  starved {starved:>9}  blocked {blocked:>9}\n", stage.name);
    }
    if disk["reads"].as_u64() > Some(0) {
        let number = |name: &str| disk[name].as_f64().unwrap_or(0.0);
        text += &format!(
            "  {:.1}% of rows from the cache; {} read for {} of rows; {:.0} reads a second while reading\n",
            number("hit_ratio") * 100.0,
            ByteCount(number("bytes_read") as u64),
            ByteCount(number("bytes_useful") as u64),
            number("reads_per_second")
        );
    }
    notes.iter().for_each(|note| text += &format!("  {note}\n"));
    text += &format!(
        "  products {} and aggregation {} of training\n",
        milliseconds(product_seconds * each),
        milliseconds(aggregate_seconds * each)
    );
    if let Some(products) = &value["products"].as_object() {
        let number = |name: &str| products[name].as_f64().unwrap_or(0.0);
        text += &format!(
            "  products reach {:.0} GFLOP/s, {:.0}% of gemm at its best size\n",
            number("operations_per_second") / 1e9,
            number("share_of_best") * 100.0
        );
    }
    text += &format!(
        "  bound by {}; peak {} of {}\n",
        bound_by(&spent, seconds),
        ByteCount(own),
        ByteCount(run.config.memory)
    );
    print(&text)
}

fn stages(source: &[StageTimes], clock: &StageClock) -> Vec<StageTimes> {
    source.iter().cloned().chain([clock.times()]).collect()
}

/// What came from the disk between two looks at a source.
fn disk(now: &SourceCounters, before: &SourceCounters) -> serde_json::Value {
    let (rows, reads) = (now.rows - before.rows, now.reads - before.reads);
    let hits = |counters: &SourceCounters| counters.hits.iter().map(|(_, hits)| hits).sum::<u64>();
    let read_seconds = now.read_seconds - before.read_seconds;
    let phases: serde_json::Map<String, serde_json::Value> = now
        .phases
        .iter()
        .map(|(name, seconds)| {
            let earlier =
                before.phases.iter().find(|(other, _)| other == name).map_or(0.0, |(_, seconds)| *seconds);
            (name.clone(), json!(seconds - earlier))
        })
        .collect();
    let lists = now.lists - before.lists;
    json!({
        "rows": rows, "hit_ratio": (hits(now) - hits(before)) as f64 / rows.max(1) as f64,
        "reads": reads, "bytes_read": now.bytes_read - before.bytes_read,
        "bytes_useful": now.bytes_useful - before.bytes_useful,
        "read_seconds": read_seconds, "reads_per_second": reads as f64 / read_seconds.max(1e-9),
        "phases": phases, "lists": lists,
        "list_hit_ratio": (now.lists_cached - before.lists_cached) as f64 / lists.max(1) as f64,
        "list_reads": now.list_reads - before.list_reads, "list_bytes_read": now.list_bytes_read - before.list_bytes_read,
    })
}

/// A folder of this process that is gone when it is done.
struct Scratch(PathBuf);

impl Scratch {
    fn new(parent: PathBuf) -> Scratch {
        Scratch(parent.join(format!("esker-bench-{}", std::process::id())))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn milliseconds(seconds: f64) -> String {
    format!("{:.1} ms", seconds * 1e3)
}
