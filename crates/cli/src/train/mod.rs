//! `esker train`, `esker eval`: a run from flags or a file, watched.

mod effect;
mod flags;
mod link;
mod watch;

pub use flags::{Fanouts, Flags};

use crate::device::{WithBackend, on_device, resolve};
use crate::exit::{INTERRUPTED, check_memory, kind_of, text_of, usage};
use crate::note;
use crate::output::{TextTable, print, print_json};
use crate::partition::{choose_partitioning, set_schedule};
use crate::progress::Shown;
use esker_nn::{LinkMath, Precision};
use esker_sample::Position;
use esker_store::Dataset;
use esker_strategies::{SavedWork, WorkCounts};
use esker_train::{
    EvaluationMode, Metrics, OpenRun, Outcome, ResidentOnly, RunConfig, RunControl, RunDirectory, SplitName,
    Summary, Trainer, choose_buffer, evaluate_run, rank_run,
};
use esker_types::{Budget, ByteCount, DeviceName, ErrorKind, Progress, Silent, StopSignal, counted, grouped};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
pub use watch::{Watch, bound_by};

/// Train a model
#[derive(clap::Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "\
Examples:
  # GraphSAGE with 3 layers, everything in memory
  esker train g
  # the same, every number given
  esker train g --model sage --layers 3 --hidden 256 --fanout 10,10,10 --batch 1000 --epochs 3 --lr 0.003 --out run
  # topology and features on disk
  esker train g --strategy ginex --memory 1GiB --out run
  # batches sampled before training; samples and packed rows are used again by the next run
  esker train g --strategy diskgnn --memory 1GiB --out run
  # on disk, in batches of neighbouring seed nodes, with hidden rows that are used again for some batches
  esker train g --strategy outre --memory 1GiB --out run
  # neighbouring seed nodes in the same batch: fewer nodes are sampled
  esker train g --order groups --out run
  # what a partition buffer for a quarter of the nodes would train on, with the whole graph in memory
  esker train g --order dispersed --partitions 16 --resident 4 --resident-only --out run
  # full-batch GCN of the paper: all neighbours, evaluated on the whole graph
  esker train cora --model gcn --layers 2 --hidden 16 --fanout all --dropout 0.5 --lr 0.01 --epochs 200 --eval full
  # options from a file: dataset = \"g\", hidden = 256
  esker train run.toml
  # resume a run that was stopped or killed, from its last checkpoint
  esker train --resume --out run

Ctrl-C writes a checkpoint, then ends the run. After a kill, --resume continues from the last checkpoint. Everything about a run is in its
directory: config.json, metrics.jsonl, summary.json, and the best and last weights as safetensors, which PyTorch reads."
)]
pub struct TrainArguments {
    /// Directory of the dataset, or a configuration file ending in .toml; with --resume it can be left out
    #[arg(required_unless_present = "resume")]
    dataset: Option<PathBuf>,
    #[command(flatten)]
    flags: Flags,
    /// Resume the run in --out from its last checkpoint
    #[arg(long)]
    resume: bool,
    /// Print what memory the run takes, and exit
    #[arg(long)]
    dry_run: bool,
    /// Print the summary as JSON
    #[arg(long)]
    json: bool,
}

impl TrainArguments {
    /// What is asked for now, by flags and a file.
    fn given(&self) -> anyhow::Result<Flags> {
        match &self.dataset {
            Some(file) if file.extension().is_some_and(|extension| extension == "toml") => {
                let flags = self.flags.clone().over(Flags::read(file)?)?;
                if flags.dataset.is_none() && !self.resume {
                    return Err(usage(format!(
                        "{}: there is no dataset in it; add a line: dataset = \"PATH\"",
                        file.display()
                    )));
                }
                Ok(flags)
            }
            dataset => Ok(Flags { dataset: dataset.clone(), ..self.flags.clone() }),
        }
    }

    /// The run to go on with, where there is to be one.
    fn before(&self, given: &Flags) -> anyhow::Result<Option<(RunDirectory, RunConfig)>> {
        match &given.out {
            _ if !self.resume => Ok(None),
            None => Err(usage("--resume needs --out: the directory of the run to resume")),
            Some(out) if RunDirectory::holds_run(out) => Ok(Some(RunDirectory::open(out)?)),
            Some(out) => Err(usage(format!(
                "{}: there is nothing to resume; give the --out of a run that was started, or leave --resume out to start one",
                out.display()
            ))),
        }
    }
}

pub fn run(arguments: &TrainArguments) -> anyhow::Result<ExitCode> {
    let given = arguments.given()?;
    let before = arguments.before(&given)?;
    let flags = match &before {
        // What is not given again is as it was.
        Some((directory, before)) => {
            let mut base = Flags::of(before, directory.has_begun());
            given.leave_range(&mut base);
            if given.device == Some(DeviceName::Cpu) {
                base.precision = None;
            }
            given.clone().over(base)?
        }
        None => given.clone(),
    };
    let Some(path) = &flags.dataset else { return Err(usage("give the dataset to train on")) };
    let dataset = Dataset::open(path)?;
    let mut config = flags.resolve(&dataset)?;
    given.check_effect(&config)?;
    if !arguments.dry_run {
        check_memory(config.memory)?;
    }
    // Refused before anything is made for it.
    if let Some((directory, before)) = before.as_ref().filter(|(_, before)| before.order != config.order) {
        config.check_resumes(before, directory.path())?;
    }
    let name = flags.partitioning.as_deref();
    if let Some((_, before)) = &before {
        check_started_with(before, &dataset, name)?;
    }
    if before.is_none() {
        flags.note_history(&config, &dataset);
        flags.note_order(&config, &dataset);
    }
    choose_partitioning(&mut config, &dataset, name, arguments.json, !arguments.dry_run)?;
    if let Some((directory, before)) = &before {
        config.check_resumes(before, directory.path())?;
        if before.device != config.device {
            note!(
                "resuming on {}: the run was started on {}, so the last bits may differ",
                config.device,
                before.device
            );
        }
    }
    if arguments.dry_run {
        return on_device(config, DryRun { json: arguments.json });
    }
    let out = flags.out.clone().unwrap_or_else(|| fresh_directory(&config));
    if let Some((directory, _)) = &before
        && let Some(summary) = directory.summary()?
    {
        note!("{} has ended already", out.display());
        return show(&summary, &out, arguments.json);
    }
    match on_device(config, TrainRun { out: &out, resume: before.is_some(), quiet: arguments.json })? {
        Some(summary) => show(&summary, &out, arguments.json),
        None => Ok(ExitCode::from(INTERRUPTED)),
    }
}

/// Says what memory a run would take.
struct DryRun {
    json: bool,
}

impl WithBackend for DryRun {
    type Output = ExitCode;

    fn run<B: LinkMath>(self, backend: B, mut config: RunConfig) -> anyhow::Result<ExitCode> {
        note_buffer(&backend, &mut config, &RunControl::default())?;
        let plan = OpenRun::plan_only(&backend, &config)?;
        if self.json {
            return print_json(&json!({
                "budget_host_bytes": config.memory, "promised_bytes": plan.table.total(),
                "smallest_host_bytes": plan.smallest_bytes, "smallest_bytes": plan.smallest_bytes, "memory": plan.table,
                "most_disk_bytes": plan.disk_bytes.0, "disk_budget_bytes": plan.disk_bytes.1, "largest_batch": plan.largest,
                "budget_device_bytes": config.gpu_memory.or(backend.memory_limit()), "device_memory": plan.device_table, "config": config,
            }));
        }
        let smallest = ByteCount(plan.smallest_bytes);
        let mut text = format!("{}\n\nsmallest budget that would do: {smallest}\n", plan.table.explained());
        if let Some(table) = &plan.device_table {
            text += &format!("{}:\n{}\n", config.device, table.explained());
        }
        let size =
            |(nodes, edges): (u64, u64)| format!("{} nodes, {} neighbours", grouped(nodes), grouped(edges));
        text += &format!("largest batch: {}", size(plan.largest.training));
        if let Some(evaluation) = plan.largest.evaluation {
            text += &format!("; of evaluation: {}", size(evaluation));
        }
        text += match plan.largest.sampled {
            true => " (some batches were sampled, and a margin added)\n",
            false => " (what fan-outs allow)\n",
        };
        if let (most @ 1.., allowed) = plan.disk_bytes {
            let (most, allowed) = (ByteCount(most), ByteCount(allowed));
            text += &format!("disk space: at most {most}, and --disk-budget allows {allowed}\n");
        }
        print(&text)
    }
}

/// Chooses the numbers of partitions of a run that needs some, and says why.
pub fn note_buffer<B: LinkMath>(
    backend: &B,
    config: &mut RunConfig,
    control: &RunControl,
) -> esker_train::Result<()> {
    if let Some(choice) = choose_buffer(backend, config, control)? {
        choice.reasons().iter().for_each(|line| note!("{line}"));
        choice.costs().iter().for_each(|line| note!("{line}"));
        // Every step ends with a batch of its own size, so the number of batches was not known before.
        set_schedule(config, &Dataset::open(&config.dataset)?)?;
    }
    Ok(())
}

/// Trains a new run, or goes on with one; nothing comes out when somebody stopped it.
pub struct TrainRun<'a> {
    pub out: &'a Path,
    pub resume: bool,
    pub quiet: bool,
}

impl WithBackend for TrainRun<'_> {
    type Output = Option<Summary>;

    fn run<B: LinkMath>(self, backend: B, mut config: RunConfig) -> anyhow::Result<Option<Summary>> {
        let progress: Arc<dyn Progress + Send + Sync> = match self.quiet {
            true => Arc::new(Silent),
            false => Arc::new(Shown::new()),
        };
        let stop = stop_on_interrupt("stopping after a checkpoint; once more to stop at once");
        let control = RunControl { progress, stop: stop.clone(), ..RunControl::default() };
        let trainer = note_buffer(&backend, &mut config, &control).and_then(|()| match self.resume {
            true => Trainer::resume_watched(backend, config, self.out, control),
            false => Trainer::create_watched(backend, config, self.out, control),
        });
        match trainer.map_err(anyhow::Error::from).and_then(|t| train(t, self.out, self.quiet, stop)) {
            Err(error) if kind_of(&error) == ErrorKind::Stopped => {
                note!("stopped before training; {}", resume_text(self.out));
                Ok(None)
            }
            Err(error) if kind_of(&error) == ErrorKind::DiskFull && RunDirectory::holds_run(self.out) => {
                Err(anyhow::anyhow!("{} and {}", text_of(&error), resume_text(self.out)))
            }
            done => done,
        }
    }
}

/// Fails if the partitioning of this name, with which a run was started, is gone. The error tells how it was made.
fn check_started_with(before: &RunConfig, dataset: &Dataset, name: Option<&str>) -> anyhow::Result<()> {
    if let Some(chosen) = before.partitioning.as_ref().filter(|chosen| name == Some(&*chosen.name)) {
        chosen.open(dataset)?;
    }
    Ok(())
}

/// How to resume a run.
fn resume_text(out: &Path) -> String {
    format!("resume with `esker train --resume --out {}`", out.display())
}

fn show(summary: &Summary, out: &Path, json: bool) -> anyhow::Result<ExitCode> {
    match json {
        true => print_json(&serde_json::to_value(summary)?),
        false => print(&summary_text(summary, out)),
    }
}

/// Trains and shows how; `None` when somebody stopped it.
fn train<B: LinkMath>(
    trainer: Trainer<B>,
    out: &Path,
    quiet: bool,
    stop: StopSignal,
) -> anyhow::Result<Option<Summary>> {
    let (run, from) = (trainer.open_run(), trainer.position());
    if !quiet {
        note!("{}", plan_text(run));
    }
    if (from.epoch, from.batch) != (0, 0) {
        note!("resuming at epoch {}, batch {}", from.epoch + 1, from.batch + 1);
    }
    let (mut watch, epochs) = (Watch::new(&run.config, stop, quiet), run.config.epochs);
    match trainer.run(&mut watch)? {
        Outcome::Finished(summary) => Ok(Some(*summary)),
        Outcome::Stopped(at) => {
            note!("{}; {}", stopped_text(at, epochs), resume_text(out));
            Ok(None)
        }
    }
}

/// Where a run was stopped: `at` is what comes next.
fn stopped_text(at: Position, epochs: u64) -> String {
    match (at.epoch, at.batch) {
        (0, 0) => "stopped before the first batch".into(),
        (epoch, _) if epoch >= epochs => "stopped after the last epoch, before the result".into(),
        (epoch, 0) => format!("stopped after epoch {epoch}"),
        (epoch, batch) => format!("stopped after batch {batch} of epoch {}", epoch + 1),
    }
}

/// Asks for an end at the first Ctrl-C, saying so, and ends the program at the second.
pub fn stop_on_interrupt(said: &'static str) -> StopSignal {
    let stop = StopSignal::default();
    let asked = stop.clone();
    // A second handler cannot be set: the program does one thing.
    ctrlc::set_handler(move || {
        if asked.is_asked() {
            std::process::exit(130);
        }
        asked.ask();
        note!("{said}");
    })
    .ok();
    stop
}

/// A directory that is not there yet.
fn fresh_directory(config: &RunConfig) -> PathBuf {
    let name = config.dataset.file_name().unwrap_or_else(|| "run".as_ref()).to_string_lossy().into_owned();
    let encoder = String::from(link::EncoderName::of(&config.model));
    let model = match &config.link {
        None => encoder,
        Some(link) => format!("{encoder}-{}", link.decoder.name()),
    };
    let number = |number: u32| PathBuf::from("runs").join(format!("{name}-{model}-{number}"));
    let mut at = 1;
    while number(at).exists() {
        at += 1;
    }
    number(at)
}

fn plan_text<B: LinkMath>(run: &OpenRun<B>) -> String {
    let config = &run.config;
    let fanout = config.fanout.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
    let fanout = if fanout.is_empty() { "no neighbours".into() } else { format!("fan-out {fanout}") };
    let steps = run.partition_steps().map(|steps| format!("order {}: {}", order_text(config), steps.text()));
    let notes: String = run.notes().iter().chain(&steps).map(|note| format!("\n  {note}")).collect();
    let mut text = format!(
        "{}: {:?}, {} layers of {}, {fanout}, batches of {}, {} with {} threads\n{} of {}:\n{}{notes}",
        config.dataset.display(),
        config.model.kind,
        config.model.layers,
        config.model.hidden,
        config.batch,
        config.strategy,
        config.threads,
        ByteCount(run.plan.table.total()),
        ByteCount(config.memory),
        run.plan.table
    );
    if let Some(table) = &run.plan.device_table {
        let budget =
            run.budget_device_bytes().map_or(String::new(), |bytes| format!(" of {}", ByteCount(bytes)));
        text += &format!("\n{}{budget} on {}:\n{table}", ByteCount(table.total()), config.device);
    }
    text
}

/// The order over partitions, and what batches of its steps see.
fn order_text(config: &RunConfig) -> String {
    let order = config.order.over_partitions().map_or(String::new(), |kind| kind.to_string());
    match config.resident_only {
        None => order,
        Some(ResidentOnly::All) => format!("{order}, resident nodes only"),
        Some(ResidentOnly::Negatives) => format!("{order}, resident negatives"),
    }
}

/// A line about metrics.
pub fn metrics_text(metrics: &Metrics) -> String {
    let part = |name: &str, value: Option<f64>| value.map(|value| format!("{name} {:.2}%", value * 100.0));
    let ranks = metrics.ranks.as_ref();
    let mut parts: Vec<String> = [
        ranks.map(|ranks| format!("MRR {:.4}", ranks.mrr)),
        ranks.map(|ranks| format!("MR {:.1}", ranks.mr)),
        part("Hits@1", ranks.map(|ranks| ranks.hits_at_1)),
        part("Hits@3", ranks.map(|ranks| ranks.hits_at_3)),
        part("Hits@10", ranks.map(|ranks| ranks.hits_at_10)),
        part("accuracy", metrics.accuracy),
        part("macro-F1", metrics.macro_f1),
        part("AUC", metrics.auc),
        part("AP", metrics.ap),
    ]
    .into_iter()
    .flatten()
    .collect();
    if metrics.loss >= 0.0 {
        parts.push(format!("loss {:.4}", metrics.loss));
    }
    parts.join(", ")
}

pub fn summary_text(summary: &Summary, out: &Path) -> String {
    let mut table = TextTable::new();
    if let Some(test) = &summary.test {
        let items = if test.ranks.is_some() { "edges" } else { "nodes" };
        table.row("test", format!("{} ({} {items})", metrics_text(test), esker_types::grouped(test.nodes)));
    }
    if let (Some(valid), Some(epoch)) = (&summary.valid, summary.best_epoch) {
        table.row("valid", format!("{}, best in epoch {}", metrics_text(valid), epoch + 1));
    }
    let (count, seconds) =
        (summary.epochs.len(), summary.epochs.iter().map(|epoch| epoch.seconds).sum::<f64>());
    table.row(
        "epochs",
        format!("{count}, {:.2} s each; ended: {}", seconds / count.max(1) as f64, summary.ended),
    );
    let clock = &summary.wall_seconds;
    table.row(
        "time",
        format!(
            "{:.1} s: starting {:.1}, preparing {:.1}, epochs {:.1}, validation {:.1}, test {:.1}",
            clock.total(),
            clock.starting,
            clock.preparing,
            clock.epochs,
            clock.validation,
            clock.test
        ),
    );
    if let Some(steps) = &summary.partition_steps {
        table.row("order", steps.text());
    }
    if let Some(sampled) = summary.epochs_sampled {
        table.row("batches", format!("those of {}, repeated", counted(sampled, "epoch", "epochs")));
    }
    add_history(&mut table, summary, seconds / count.max(1) as f64);
    if let Some(redundancy) = summary.redundancy {
        table.row("redundancy", format!("{redundancy:.2} sampled nodes per training node and epoch"));
    }
    if let Some(last) = summary.epochs.last() {
        table.row("bound by", watch::bound_by(&last.stages, last.seconds));
    }
    let (peak, budget) = (ByteCount(summary.peak_host_bytes), ByteCount(summary.budget_host_bytes));
    let mapped = summary.peak_with_mapped_bytes.saturating_sub(summary.peak_host_bytes);
    let mapped = match summary.strategy.as_str() {
        "mmap" => format!("; {} more of the page cache was mapped", ByteCount(mapped)),
        _ => String::new(),
    };
    table.row("memory", format!("peak {peak} of {budget}{mapped}"));
    if let Some(peak) = summary.peak_device_bytes {
        let budget = summary.budget_device_bytes.map_or(String::new(), |b| format!(" of {}", ByteCount(b)));
        table.row(&summary.device, format!("peak {}{budget}", ByteCount(peak)));
    }
    table.row("losses", format!("{} (the same for every exact strategy)", summary.loss_digest));
    table.row("run", out.display().to_string());
    table.render()
}

/// What a history was used for, and how well its effect was predicted.
fn add_history(table: &mut TextTable, summary: &Summary, measured: f64) {
    if let Some(split) = &summary.history_split {
        let (rows, predicted) = (grouped(split.history_rows), split.predicted_seconds);
        let without = split.predicted_seconds_without;
        let text = format!(
            "{rows} rows; an epoch should take {predicted:.2} s ({without:.2} without a history), and took {measured:.2}"
        );
        table.row("history", text);
    }
    if let Some(history) = summary.epochs.last().and_then(|epoch| epoch.history) {
        let (pulls, pushes, age) = (grouped(history.pulls), grouped(history.pushes), history.mean_age);
        let text = format!("history: {pulls} rows pulled, {pushes} pushed, {age:.1} batches old");
        table.row("last epoch", text);
        let SavedWork { with, without, .. } = history.saved;
        let less = |of: fn(&WorkCounts) -> u64| {
            format!("{:.0}%", 100.0 - of(&with) as f64 * 100.0 / of(&without).max(1) as f64)
        };
        let saved = [less(|work| work.rows), less(|work| work.edges), less(|work| work.computed)];
        let text = format!(
            "pulls saved {} of the rows, {} of the neighbours, {} of the computed rows; rows drifted by {:.1}%",
            saved[0],
            saved[1],
            saved[2],
            history.mean_drift * 100.0
        );
        table.row("", text);
    }
}

/// Evaluate the best model of a run on a split
#[derive(clap::Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "\
Examples:
  esker eval run
  esker eval run --split valid --mode full --json
  # links: the answer after all candidates with the same score
  esker eval run --split test --ties pessimistic"
)]
pub struct EvalArguments {
    /// Directory of the run
    run: PathBuf,
    /// Split to evaluate: train, valid or test
    #[arg(long, default_value = "test")]
    split: String,
    /// sampled or full (all neighbours); default: the run's --final-eval
    #[arg(long)]
    mode: Option<String>,
    /// Links: rank among equal scores: realistic, optimistic or pessimistic; default: that of the run
    #[arg(long)]
    ties: Option<String>,
    /// Links: rank among all candidates, true edges included
    #[arg(long)]
    raw: bool,
    /// Links: rank among this many nodes, drawn for every query; default: that of the run
    #[arg(long)]
    candidates: Option<u32>,
    #[command(flatten)]
    machine: MachineFlags,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What evaluates or predicts, and inside which memory.
#[derive(clap::Args)]
pub struct MachineFlags {
    /// Memory limit; default: the run's --memory
    #[arg(long)]
    memory: Option<ByteCount>,
    /// Device: cpu, cuda, cuda:N or auto; default: that of the run
    #[arg(long)]
    device: Option<DeviceName>,
    /// GPU memory limit; default: the run's --gpu-memory
    #[arg(long)]
    gpu_memory: Option<ByteCount>,
}

pub fn eval(arguments: &EvalArguments) -> anyhow::Result<ExitCode> {
    let (directory, mut config) = arguments.machine.open(&arguments.run, arguments.mode.as_deref())?;
    arguments.set_ranks(&mut config)?;
    on_device(config, EvaluateRun { directory, arguments })
}

impl EvalArguments {
    /// Ranks as they are asked for now.
    fn set_ranks(&self, config: &mut RunConfig) -> anyhow::Result<()> {
        let ties = self.ties.as_deref().map(|word| named("--ties", word)).transpose()?;
        match &mut config.link {
            Some(link) => {
                link.ranks.ties = ties.unwrap_or(link.ranks.ties);
                link.ranks.raw |= self.raw;
                link.ranks.candidates = self.candidates.or(link.ranks.candidates);
                Ok(())
            }
            None if ties.is_some() || self.raw || self.candidates.is_some() => {
                Err(usage("--ties, --raw and --candidates are for runs with --task link"))
            }
            None => Ok(()),
        }
    }
}

struct EvaluateRun<'a> {
    directory: RunDirectory,
    arguments: &'a EvalArguments,
}

impl WithBackend for EvaluateRun<'_> {
    type Output = ExitCode;

    fn run<B: LinkMath>(self, backend: B, config: RunConfig) -> anyhow::Result<ExitCode> {
        let arguments = self.arguments;
        let split: SplitName = named("--split", &arguments.split)?;
        let stop = stop_on_interrupt("stopping; press again to stop at once");
        let progress: Arc<dyn Progress + Send + Sync> = match arguments.json {
            true => Arc::new(Silent),
            false => Arc::new(Shown::new()),
        };
        let control = RunControl { stop, progress, ..RunControl::default() };
        let evaluated =
            OpenRun::load_watched(backend, &self.directory, config, control).and_then(|mut run| {
                let mode = run.config.final_eval;
                let links =
                    run.links.as_ref().map(|links| links.task.split(split).map_or(0, |edges| edges.len()));
                Ok(match links {
                    None => (evaluate_run(&mut run, split, mode)?, None, run),
                    Some(edges) => {
                        let ranks = rank_run(&mut run, split, mode)?;
                        (ranks.as_ref().map(|ranks| ranks.metrics(edges as u64)), ranks, run)
                    }
                })
            });
        let (metrics, ranks, run) = match evaluated {
            Err(error) if error.kind() == ErrorKind::Stopped => {
                note!(
                    "stopped evaluating {}: nothing was written; run the same command again to start over",
                    arguments.run.display()
                );
                return Ok(ExitCode::from(INTERRUPTED));
            }
            evaluated => evaluated?,
        };
        let mode = run.config.final_eval;
        let Some(metrics) = metrics else {
            let none = if run.links.is_some() { "there is no {} edge" } else { "no {} node has a label" };
            return Err(usage(format!(
                "{}: {}; use another --split",
                run.config.dataset.display(),
                none.replace("{}", &arguments.split)
            )));
        };
        match arguments.json {
            true => print_json(&json!({
                "run": arguments.run, "split": split, "mode": mode, "metrics": metrics, "ranks": ranks,
                "peak_host_bytes": run.peak_own_bytes(), "budget_host_bytes": run.config.memory,
                "peak_device_bytes": run.peak_device_bytes(), "budget_device_bytes": run.budget_device_bytes(),
            })),
            false => print(&format!("{}: {}\n", arguments.split, metrics_text(&metrics))),
        }
    }
}

impl MachineFlags {
    /// A run to evaluate or predict in a mode, and how; memory is added up for that mode.
    pub fn open(&self, run: &Path, mode: Option<&str>) -> anyhow::Result<(RunDirectory, RunConfig)> {
        let mode = mode_of(mode)?;
        let (directory, config) = RunDirectory::open(run)?;
        let device = resolve(self.device.unwrap_or(config.device));
        effect::check_gpu_memory(self.gpu_memory.is_some(), device)?;
        let config = RunConfig {
            memory: self.memory_of(&config)?,
            device,
            gpu_memory: self.gpu_memory.map(|bytes| bytes.0).or(config.gpu_memory),
            precision: if device == DeviceName::Cpu { Precision::F32 } else { config.precision },
            ..config.to_infer(mode)
        };
        Ok((directory, config))
    }

    /// The memory given, or the run's. What a run had elsewhere is cut to what there is here.
    fn memory_of(&self, config: &RunConfig) -> anyhow::Result<u64> {
        if let Some(bytes) = self.memory {
            return check_memory(bytes.0).map(|()| bytes.0);
        }
        if check_memory(config.memory).is_ok() {
            return Ok(config.memory);
        }
        let here = Budget::resolve(None).host_bytes;
        note!("the run had {} of memory, this machine gives {}", ByteCount(config.memory), ByteCount(here));
        Ok(here)
    }
}

/// How to infer: sampled or full.
fn mode_of(word: Option<&str>) -> anyhow::Result<Option<EvaluationMode>> {
    match word {
        Some("none") => Err(usage("--mode none evaluates nothing; use sampled or full")),
        word => word.map(|word| named("--mode", word)).transpose(),
    }
}

/// Reads a word as a value of that name.
pub fn named<T: serde::de::DeserializeOwned>(flag: &str, word: &str) -> anyhow::Result<T> {
    let value = serde_json::Value::String(word.to_string());
    serde_json::from_value(value).map_err(|error| usage(format!("{flag} {word}: {error}")))
}
