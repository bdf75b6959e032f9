//! `esker prepare`: the work on disk that comes before training, alone.

use crate::device::{WithBackend, on_device};
use crate::exit::{INTERRUPTED, check_memory, usage};
use crate::note;
use crate::output::{TextTable, print, print_json};
use crate::partition::choose_partitioning;
use crate::progress::Shown;
use crate::train::{Flags, note_buffer, stop_on_interrupt};
use esker_fetch::packed::{Packing, RunPlan};
use esker_nn::LinkMath;
use esker_store::Dataset;
use esker_strategies::StrategyKind;
use esker_train::{OpenRun, RunConfig, RunControl};
use esker_types::{ByteCount, ErrorKind, Progress, Recorded, StageTaken, counted, grouped};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

/// Do the work before training alone: with diskgnn or esker sample batches and pack their feature rows, with outre choose the history, with marius sort edges and features by partition
#[derive(clap::Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "\
Examples:
  esker prepare g --fanout 10,10,10 --batch 1000 --epochs 10 --memory 1GiB
  # sample two epochs, which training repeats
  esker prepare g --epochs-sampled 2 --disk-budget 20GB
  # into another directory than the dataset, and train on it
  esker prepare g --prepared /fast/disk/g --epochs 10
  esker train g --strategy diskgnn --prepared /fast/disk/g --epochs 10
  # the cache planned for the whole run, and what it misses packed
  esker prepare g --strategy esker --fanout 10,10,10 --batch 1000 --epochs 10 --memory 1GiB
  # measure, profile and divide memory for outre
  esker prepare g --strategy outre --memory 1GiB --staleness 20 --epochs 10
  # edges by pairs of 16 partitions, feature rows by partition
  esker prepare g --strategy marius --partitions 16 --resident 4

`esker train` prepares too, if it finds nothing that it can use. `prepare` does it beforehand, or on another machine: the directory can be copied. It takes the flags of `esker train`; those that determine batches and memory must be the same for both. If it is killed, the same command resumes it."
)]
pub struct PrepareArguments {
    /// Directory of the dataset
    dataset: PathBuf,
    #[command(flatten)]
    flags: Flags,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &PrepareArguments) -> anyhow::Result<ExitCode> {
    let dataset = Dataset::open(&arguments.dataset)?;
    let mut flags = arguments.flags.clone();
    flags.strategy.get_or_insert(StrategyKind::DiskGnn);
    let mut config = flags.resolve(&dataset)?;
    flags.check_effect(&config)?;
    check_memory(config.memory)?;
    let prepares = [StrategyKind::DiskGnn, StrategyKind::Esker, StrategyKind::Outre, StrategyKind::Marius];
    if !prepares.contains(&config.strategy) {
        let strategy = config.strategy;
        return Err(usage(format!(
            "{strategy} needs no preparation; use --strategy diskgnn, esker, outre or marius"
        )));
    }
    flags.note_history(&config, &dataset);
    choose_partitioning(&mut config, &dataset, flags.partitioning.as_deref(), arguments.json, true)?;
    let scratch = PrepareScratch::new(&config);
    on_device(config, Preparing { json: arguments.json, scratch: scratch.0.clone() })
}

struct Preparing {
    json: bool,
    scratch: PathBuf,
}

/// The folder of temporary files, removed in the end: on the disk of the dataset if that can be written.
struct PrepareScratch(PathBuf);

impl PrepareScratch {
    fn new(config: &RunConfig) -> PrepareScratch {
        let name = format!("prepare-{}.partial", std::process::id());
        let beside = config.dataset.join("derived").join(&name);
        match std::fs::create_dir_all(&beside) {
            Ok(()) => PrepareScratch(beside),
            Err(_) => PrepareScratch(std::env::temp_dir().join(name)),
        }
    }
}

impl Drop for PrepareScratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl WithBackend for Preparing {
    type Output = ExitCode;

    fn run<B: LinkMath>(self, backend: B, mut config: RunConfig) -> anyhow::Result<ExitCode> {
        let started = Instant::now();
        let recorded = Arc::new(Recorded::default());
        let progress: Arc<dyn Progress + Send + Sync> = match self.json {
            true => recorded.clone(),
            false => Arc::new(Shown::new()),
        };
        let stop = stop_on_interrupt("stopping once everything done is on disk; press again to stop at once");
        let control = RunControl { progress, stop, prepare_only: true, ..RunControl::default() };
        let run = note_buffer(&backend, &mut config, &control)
            .and_then(|()| OpenRun::new_watched(backend, config, self.scratch, control));
        let run = match run {
            Err(error) if error.kind() == ErrorKind::Stopped => {
                note!("stopped preparing; what was done is kept, and the same command continues with it");
                return Ok(ExitCode::from(INTERRUPTED));
            }
            run => run?,
        };
        let seconds = started.elapsed().as_secs_f64();
        let notes = run.notes();
        if self.json {
            let stages: Vec<Value> =
                recorded.stages().iter().map(|stage| stage_json(stage, started)).collect();
            return print_json(&json!({
                "seconds": seconds, "notes": notes, "epochs_sampled": run.config.epochs_sampled,
                "peak_host_bytes": run.peak_own_bytes(), "budget_host_bytes": run.config.memory,
                "packed": run.prepared(), "history_split": run.history_split(), "stages": stages,
            }));
        }
        let mut text = String::new();
        notes.iter().for_each(|note| text += &format!("{note}\n"));
        let repeated = run.config.epochs_sampled.filter(|epochs| *epochs < run.config.epochs);
        if let Some(epochs) = repeated {
            text += &format!(
                "training for {} epochs will repeat the batches of {}\n",
                run.config.epochs,
                counted(epochs, "epoch", "epochs")
            );
        }
        text += &format!("{seconds:.1} s; peak {}\n", ByteCount(run.peak_own_bytes()));
        print(&text)
    }
}

fn stage_json(stage: &StageTaken, started: Instant) -> Value {
    json!({
        "name": stage.name, "began": stage.began.duration_since(started).as_secs_f64(), "seconds": stage.seconds(), "amount": stage.amount, "unit": stage.unit.name(),
    })
}

/// Rows packed for a run, for people.
pub fn run_text(plan: &RunPlan, bytes: u64) -> String {
    let mut table = TextTable::new();
    let share = |part: u64| format!("{:.1}%", part as f64 / plan.accesses.max(1) as f64 * 100.0);
    let epochs = plan.layout.sources.first().map_or(0, |training| training.epochs);
    let laps = counted(plan.layout.laps.len() as u64, "lap", "laps");
    table.row("on disk", ByteCount(bytes).to_string());
    table.row(
        "batches",
        format!(
            "{} of {} in {laps}, {} row accesses",
            grouped(plan.batches),
            counted(epochs, "epoch", "epochs"),
            grouped(plan.accesses)
        ),
    );
    let (slots, slot_bytes) = (plan.layout.slots, ByteCount(plan.layout.slots * plan.row_bytes));
    let hits = share(plan.accesses - plan.misses);
    table.row("in memory", format!("{} rows ({slot_bytes}), {hits} of row accesses", grouped(slots)));
    table
        .row("on disk for a batch", format!("packed, one read each: {} of row accesses", share(plan.misses)));
    table.render()
}

/// Packed rows, for people.
pub fn packing_text(packing: &Packing, bytes: u64) -> String {
    let mut table = TextTable::new();
    let share = |part: u64, all: u64| format!("{:.1}%", part as f64 / all.max(1) as f64 * 100.0);
    table.row("on disk", ByteCount(bytes).to_string());
    table.row(
        "batches",
        format!(
            "{} of {}, {} row accesses",
            grouped(packing.batches),
            counted(packing.epochs, "epoch", "epochs"),
            grouped(packing.accesses)
        ),
    );
    table.row(
        "in memory",
        format!(
            "{} rows ({}), {} of row accesses",
            grouped(packing.slots),
            ByteCount(packing.slots * packing.row_bytes),
            share(packing.accesses - packing.misses, packing.accesses)
        ),
    );
    table.row(
        "on disk for a batch",
        match packing.segment {
            _ if packing.misses == 0 => "nothing".to_string(),
            1 => "packed, one read each".to_string(),
            segment => format!(
                "{} in caches of {segment} batches, the rest packed",
                share(packing.shared, packing.misses)
            ),
        },
    );
    table.render()
}
