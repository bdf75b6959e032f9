//! Batches through the whole path, or through all of it but the model: seconds a batch, by stage.

use crate::device::{WithBackend, on_device};
use crate::exit::{check_memory, usage};
use crate::folder::OwnFolder;
use crate::output::{print, print_json};
use crate::partition::choose_partitioning;
use crate::train::{Flags, bound_by};
use anyhow::bail;
use esker_nn::{CpuCounters, LinkMath, best_matmul_rate};
use esker_store::Dataset;
use esker_strategies::{RunPosition, SourceCounters, StrategyKind};
use esker_train::{EvaluationMode, InFlight, OpenRun, RunConfig, StageClock, StageTimes, StepDone};
use esker_types::ByteCount;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

/// Train some batches: seconds per batch, and how busy each stage was
#[derive(clap::Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "\
Examples:
  esker bench epoch g --fanout 10,10,10 --batch 1000 --hidden 256
  # the data path alone
  esker bench epoch g --strategy mmap --memory 1GiB --no-compute --json
  # a whole epoch, sampling and planning included
  esker bench epoch g --strategy ginex --memory 1GiB --no-compute --warm 0
  # the model's matmuls beside the machine's best rate
  esker bench epoch g --matmul

The flags are those of `esker train`."
)]
pub struct EpochArguments {
    /// Directory of the dataset
    dataset: PathBuf,
    /// Batches to measure; default: an epoch
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    batches: Option<u64>,
    /// Batches before them, not measured
    #[arg(long, default_value_t = 4)]
    warm: u64,
    /// Load batches, and do not train on them
    #[arg(long)]
    no_compute: bool,
    /// Directory for traces and plans of ginex; default: the system's temporary directory
    #[arg(long)]
    scratch: Option<PathBuf>,
    /// Measure the best rate of matmuls on this machine too
    #[arg(long)]
    matmul: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    flags: Flags,
}

pub fn run(arguments: &EpochArguments) -> anyhow::Result<ExitCode> {
    let dataset = Dataset::open(&arguments.dataset)?;
    let mut config = arguments.flags.resolve(&dataset)?;
    arguments.flags.check_effect(&config)?;
    check_memory(config.memory)?;
    let dataset_train = dataset.manifest().splits.as_ref().map_or(0, |splits| splits.train);
    let partitioning = arguments.flags.partitioning.as_deref();
    choose_partitioning(&mut config, &dataset, partitioning, arguments.json, true)?;
    drop(dataset);
    // Enough for any number of batches. Nothing is evaluated.
    config.epochs = u64::MAX;
    (config.eval, config.final_eval) = (EvaluationMode::None, EvaluationMode::None);
    if matches!(config.strategy, StrategyKind::DiskGnn | StrategyKind::Esker) {
        // As many epochs as are measured.
        let batches = arguments.warm + arguments.batches.unwrap_or(0);
        let train = dataset_train / config.batch.max(1);
        config.epochs_sampled.get_or_insert((batches / train.max(1)).max(1));
    }
    let scratch = OwnFolder::inside(&arguments.scratch.clone().unwrap_or_else(std::env::temp_dir));
    // What training prepared stays as it is.
    config.prepared.get_or_insert_with(|| scratch.path().join("packed"));
    on_device(config, Measurement { arguments, scratch: scratch.path() })
}

struct Measurement<'a> {
    arguments: &'a EpochArguments,
    scratch: &'a Path,
}

/// What the measured batches were and took.
struct Measured {
    batches: u64,
    nodes: u64,
    edges: u64,
    seconds: f64,
    stages: Vec<StageTimes>,
    last_loss: f64,
    /// What threads of the host did for them, where that is counted.
    host: Option<HostWork>,
    /// What came from the disk.
    disk: serde_json::Value,
}

struct HostWork {
    operations: f64,
    matmul_seconds: f64,
    aggregate_seconds: f64,
}

impl WithBackend for Measurement<'_> {
    type Output = ExitCode;

    fn run<B: LinkMath>(self, backend: B, config: RunConfig) -> anyhow::Result<ExitCode> {
        let arguments = self.arguments;
        if arguments.matmul && backend.counted().is_none() {
            return Err(usage("--matmul looks at matmuls on the CPU; leave it out, or take --device cpu"));
        }
        let mut run = OpenRun::new(backend, config, self.scratch.to_path_buf())?;
        let threads = run.config.threads;
        let best = |run: &OpenRun<B>| run.learner().install(|| best_matmul_rate(threads));
        let best_before = arguments.matmul.then(|| best(&run));
        let measured = measure(arguments, &mut run)?;
        let matmuls = best_before.zip(measured.host.as_ref()).map(|(before, host)| {
            // The machine's rate moves: before and behind the batches.
            let best = before.max(best(&run));
            let rate = host.operations / host.matmul_seconds.max(1e-9);
            json!({ "operations_per_second": rate, "gemm_best_per_second": best, "share_of_best": rate / best })
        });
        show(arguments, &run, &measured, matmuls)
    }
}

/// Takes batches through the run, as a trainer would.
fn measure<B: LinkMath>(arguments: &EpochArguments, run: &mut OpenRun<B>) -> anyhow::Result<Measured> {
    let batches = arguments.batches.unwrap_or_else(|| run.batches_of_epoch());
    // What is sampled ahead of the last batch would be measured and never used.
    if arguments.warm + batches <= run.batches_of_epoch() {
        run.end_after(arguments.warm + batches);
    }
    run.leave_out_evaluation();
    let mut source = run.source(RunPosition::START, None)?;
    let clock = StageClock::new("train");
    let mut sources_before = source.counters();
    let (mut nodes, mut edges, mut before, mut started) = (0u64, 0u64, Vec::new(), Instant::now());
    let mut counters = run.learner().backend().counted();
    let (mut in_flight, mut last_loss) = (InFlight::new(source.lag()), 0.0);
    let mut loss_of = |done: StepDone| last_loss = done.loss.unwrap_or(0.0);
    for number in 0..arguments.warm + batches {
        if number == arguments.warm {
            while let Some(done) = in_flight.finish_one()? {
                loss_of(done);
            }
            sources_before = source.counters();
            before = stages(&sources_before.stages, &clock, run);
            counters = run.learner().backend().counted();
            started = Instant::now();
        }
        let Some(batch) = clock.starved(|| source.next())? else { bail!("the batches ended") };
        if number >= arguments.warm {
            nodes += batch.blocks.nodes();
            edges += batch.blocks.edges();
        }
        if !arguments.no_compute {
            let step = clock.busy(|| {
                let (step, feedback) = run.step(batch)?;
                source.apply(feedback)?;
                anyhow::Ok(step)
            })?;
            clock.blocked(|| in_flight.push(step))?.map(&mut loss_of);
        }
    }
    while let Some(done) = in_flight.finish_one()? {
        loss_of(done);
    }
    let seconds = started.elapsed().as_secs_f64();
    let sources = source.counters();
    let after = stages(&sources.stages, &clock, run);
    let disk = disk(&sources, &sources_before);
    let stages = after.iter().zip(&before).map(|(after, before)| after.since(before)).collect();
    let host = counters.zip(run.learner().backend().counted());
    let host = host.map(|(before, now)| HostWork::between(&before, &now, run.config.threads));
    Ok(Measured { batches, nodes, edges, seconds, stages, last_loss, host, disk })
}

impl HostWork {
    fn between(before: &CpuCounters, now: &CpuCounters, threads: usize) -> HostWork {
        let seconds = |nanos: u64| nanos as f64 * 1e-9 / threads as f64;
        HostWork {
            operations: (now.matmul_operations - before.matmul_operations) as f64,
            matmul_seconds: seconds(now.matmul_nanos - before.matmul_nanos),
            aggregate_seconds: seconds(now.aggregate_nanos - before.aggregate_nanos),
        }
    }
}

fn show<B: LinkMath>(
    arguments: &EpochArguments,
    run: &OpenRun<B>,
    measured: &Measured,
    matmuls: Option<serde_json::Value>,
) -> anyhow::Result<ExitCode> {
    let Measured { batches, nodes, edges, seconds, stages: spent, last_loss, host, disk } = measured;
    let (each, own, seconds) = (1.0 / *batches as f64, run.peak_own_bytes(), *seconds);
    let (host, notes) = (host.as_ref(), run.notes());
    let value = json!({
        "dataset": arguments.dataset, "strategy": run.config.strategy, "threads": run.config.threads,
        "device": run.config.device, "precision": run.config.precision,
        "model": run.config.model, "fanout": run.config.fanout, "batch": run.config.batch, "compute": !arguments.no_compute,
        "order": run.config.order, "batches": batches, "nodes": nodes, "seconds_per_batch": seconds * each, "nodes_per_batch": nodes / batches,
        "edges_per_batch": edges / batches, "bytes_useful_per_batch": nodes * run.row_bytes() / batches,
        "stages": spent, "bound_by": bound_by(spent, seconds), "matmul": matmuls,
        "matmul_seconds_per_batch": host.map(|host| host.matmul_seconds * each),
        "aggregate_seconds_per_batch": host.map(|host| host.aggregate_seconds * each),
        "seconds": seconds, "disk": disk, "notes": notes, "prepared": run.prepared(),
        "peak_host_bytes": own, "budget_host_bytes": run.config.memory, "last_loss": last_loss,
        "peak_device_bytes": run.peak_device_bytes(), "budget_device_bytes": run.budget_device_bytes(),
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
    for stage in spent {
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
    if let Some(host) = host {
        text += &format!(
            "  matmuls {} and aggregation {} of training\n",
            milliseconds(host.matmul_seconds * each),
            milliseconds(host.aggregate_seconds * each)
        );
    }
    if let Some(matmuls) = &value["matmul"].as_object() {
        let number = |name: &str| matmuls[name].as_f64().unwrap_or(0.0);
        text += &format!(
            "  matmuls reach {:.0} GFLOP/s, {:.0}% of gemm at its best size\n",
            number("operations_per_second") / 1e9,
            number("share_of_best") * 100.0
        );
    }
    text += &format!(
        "  bound by {}; peak {} of {}\n",
        bound_by(spent, seconds),
        ByteCount(own),
        ByteCount(run.config.memory)
    );
    print(&text)
}

fn stages<B: LinkMath>(source: &[StageTimes], clock: &StageClock, run: &OpenRun<B>) -> Vec<StageTimes> {
    source.iter().cloned().chain([clock.times()]).chain(run.learner().device_stages()).collect()
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
    let lists = now.neighbour_requests - before.neighbour_requests;
    json!({
        "rows": rows, "hit_ratio": (hits(now) - hits(before)) as f64 / rows.max(1) as f64,
        "reads": reads, "bytes_read": now.bytes_read - before.bytes_read,
        "sample_bytes_read": now.sample_bytes_read - before.sample_bytes_read,
        "bytes_useful": now.bytes_useful - before.bytes_useful,
        "read_seconds": read_seconds, "reads_per_second": reads as f64 / read_seconds.max(1e-9),
        "phases": phases, "neighbour_requests": lists,
        "neighbour_hit_ratio": (now.neighbour_hits - before.neighbour_hits) as f64 / lists.max(1) as f64,
        "neighbour_group_hit_ratio":
            (now.neighbour_group_hits - before.neighbour_group_hits) as f64 / lists.max(1) as f64,
        "neighbour_group_bytes_read": now.neighbour_group_bytes_read - before.neighbour_group_bytes_read,
        "neighbour_reads": now.neighbour_reads - before.neighbour_reads, "neighbour_bytes_read": now.neighbour_bytes_read - before.neighbour_bytes_read,
    })
}

fn milliseconds(seconds: f64) -> String {
    format!("{:.1} ms", seconds * 1e3)
}
