//! `esker predict`: classes and probabilities of nodes, or embeddings, as npy, Parquet or safetensors.

mod background;
mod links;
mod writer;

use crate::device::{WithBackend, on_device};
use crate::exit::{INTERRUPTED, kind_of, text_of, usage};
use crate::note;
use crate::output::{print, print_json};
use crate::progress::Shown;
use crate::train::{MachineFlags, named, stop_on_interrupt};
use background::Background;
use esker_nn::LinkMath;
use esker_train::{
    EarlyRows, LabelKind, OpenRun, RunConfig, RunControl, RunDirectory, SplitName, TrainError, embeddings,
    predict,
};
use esker_types::{ErrorKind, NodeId, Progress, Silent, grouped};
use links::{LinkArguments, LinkPrediction};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;
use writer::{PredictionContent, Writer};

/// Predict nodes with the best model of a run
#[derive(clap::Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "\
Examples:
  # the test nodes
  esker predict run --out test.parquet
  # every node
  esker predict run --nodes all --out all.parquet
  # some nodes: some.npy has the probabilities, some.classes.npy the classes, some.nodes.npy the nodes
  esker predict run --nodes 5,17,123 --out some.npy
  # all neighbours instead of sampled ones, or the other way round
  esker predict run --nodes all --mode full --out all.npy
  # embeddings: the output of the first layer, for every node
  esker predict run --nodes all --layer 1 --out embeddings.safetensors
  # a run with --task link: the rows of all nodes and of relations, scores of given edges, the best targets of a source
  esker predict run --out nodes.npy
  esker predict run --relations --out relations.npy
  esker predict run --edges edges.tsv --out scores.tsv
  esker predict run --source NAME --relation NAME --top 10

A Parquet file has the columns node, class and one probability per class; for real labels, node and one value per output. With --layer: node and one column per number of the layer's output."
)]
pub struct PredictArguments {
    /// Directory of the run
    run: PathBuf,
    /// all, train, valid, test, or node ids separated by commas
    #[arg(long, default_value = "test")]
    nodes: String,
    /// File for the predictions, ending in .parquet, .npy or .safetensors; .tsv or .npy for scores of --edges
    #[arg(long, required_unless_present_any = ["source", "target"])]
    out: Option<PathBuf>,
    #[command(flatten)]
    links: LinkArguments,
    /// Write the output of this layer instead of predictions: embeddings after norm and activation; the last layer's are
    /// logits. Layers are counted from 1
    #[arg(long)]
    layer: Option<usize>,
    /// full (all neighbours) or sampled; default: the run's --final-eval
    #[arg(long)]
    mode: Option<String>,
    #[command(flatten)]
    machine: MachineFlags,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &PredictArguments) -> anyhow::Result<ExitCode> {
    let started = Instant::now();
    let (directory, config) = arguments.machine.open(&arguments.run, arguments.mode.as_deref())?;
    if config.link.is_some() {
        return on_device(config, LinkPrediction { directory, arguments });
    }
    arguments.links.check_none()?;
    arguments.file(&ENDINGS)?;
    let layers = config.model.layers;
    if let Some(layer) = arguments.layer.filter(|layer| !(1..=layers).contains(layer)) {
        return Err(TrainError::NoLayer { layer, layers }.into());
    }
    on_device(config, Prediction { directory, arguments, started, early_rows: None })
}

/// Endings of files that can be written.
const ENDINGS: [&str; 3] = ["parquet", "npy", "safetensors"];

impl PredictArguments {
    /// The file to write, with one of these endings.
    fn file(&self, endings: &[&str]) -> anyhow::Result<&Path> {
        let Some(out) = &self.out else { return Err(usage("give a file with --out")) };
        match endings.iter().any(|ending| out.extension().is_some_and(|found| found == *ending)) {
            true => Ok(out),
            false => Err(no_ending(out, endings)),
        }
    }
}

fn no_ending(out: &Path, endings: &[&str]) -> anyhow::Error {
    let (last, others) = endings.split_last().unwrap_or((&"", &[]));
    let others: Vec<String> = others.iter().map(|ending| format!(".{ending}")).collect();
    usage(format!(
        "--out {}: predictions are written to a file ending in {} or .{last}",
        out.display(),
        others.join(", ")
    ))
}

struct Prediction<'a> {
    directory: RunDirectory,
    arguments: &'a PredictArguments,
    started: Instant,
    early_rows: Option<EarlyRows>,
}

impl WithBackend for Prediction<'_> {
    type Output = ExitCode;

    fn before_opening(&mut self, config: &RunConfig) {
        self.early_rows = EarlyRows::start(config);
    }

    fn run<B: LinkMath>(mut self, backend: B, config: RunConfig) -> anyhow::Result<ExitCode> {
        let arguments = self.arguments;
        let early_rows = self.early_rows.take();
        let stop = stop_on_interrupt("stopping; press again to stop at once");
        let progress: Arc<dyn Progress + Send + Sync> = match arguments.json {
            true => Arc::new(Silent),
            false => Arc::new(Shown::new()),
        };
        let control = RunControl { stop, progress, early_rows, ..RunControl::default() };
        match self.predict(backend, config, control) {
            Err(error) if kind_of(&error) == ErrorKind::Stopped => {
                note!(
                    "stopped predicting: {} was not written; run the same command again (finished layers of --mode full are kept)",
                    arguments.out.as_deref().unwrap_or(Path::new("nothing")).display()
                );
                Ok(ExitCode::from(INTERRUPTED))
            }
            Err(error) if kind_of(&error) == ErrorKind::DiskFull => {
                Err(anyhow::anyhow!("{}, or choose another --out", text_of(&error)))
            }
            done => done,
        }
    }
}

impl Prediction<'_> {
    fn predict<B: LinkMath>(
        &self,
        backend: B,
        config: RunConfig,
        control: RunControl,
    ) -> anyhow::Result<ExitCode> {
        let arguments = self.arguments;
        let passed = || self.started.elapsed().as_secs_f64();
        let device_opened = passed();
        let mut run = OpenRun::load_watched(backend, &self.directory, config, control)?;
        let run_opened = passed();
        let total = run.node_count();
        let nodes = chosen(&arguments.nodes, &run, total)?;
        let count = nodes.as_ref().map_or(total, |nodes| nodes.len() as u64);
        let (mode, out) = (run.config.final_eval, arguments.file(&ENDINGS)?);
        let content = self.content(&run);
        let output_bytes = run.reserve_output(count * (content.columns as u64 * 4 + 12));
        let writer = Writer::create(out, content, count)?;
        let mut writer = Background::start(writer, output_bytes).map_err(TrainError::io(out))?;
        let counters = match arguments.layer {
            None => predict(&mut run, nodes.as_ref(), mode, &mut |nodes, classes, values| {
                writer.write(nodes, classes, values).map_err(TrainError::io(out))
            })?,
            Some(layer) => embeddings(&mut run, nodes.as_ref(), layer, mode, &mut |nodes, values| {
                writer.write(nodes, &[], values).map_err(TrainError::io(out))
            })?,
        };
        let inferred = passed();
        let mut found = json!({
            "out": out, "nodes": count, "mode": mode, "layer": arguments.layer, "inference": counters,
            "peak_host_bytes": run.peak_own_bytes(), "budget_host_bytes": run.config.memory,
            "peak_device_bytes": run.peak_device_bytes(), "budget_device_bytes": run.budget_device_bytes(),
        });
        // The device's memory is given back while the last rows are written.
        drop(run);
        let closed = passed();
        writer.finish().map_err(TrainError::io(out))?;
        found["wall_seconds"] = json!({
            "opening_device": device_opened, "opening_run": run_opened - device_opened,
            "inference": inferred - run_opened, "closing": closed - inferred, "finishing": passed() - closed,
        });
        match arguments.json {
            true => print_json(&found),
            false => print(&format!("{}: {} nodes\n", out.display(), grouped(count))),
        }
    }

    /// What is written for each node.
    fn content<B: LinkMath>(&self, run: &OpenRun<B>) -> PredictionContent {
        let (kind, outputs) = (run.task.kind, run.task.outputs);
        match self.arguments.layer {
            None if kind == LabelKind::Real => {
                PredictionContent { value: "value", columns: outputs, has_class: false }
            }
            None => PredictionContent {
                value: "probability",
                columns: outputs,
                has_class: kind == LabelKind::Classes,
            },
            Some(layer) => {
                let columns =
                    if layer == run.config.model.layers { outputs } else { run.config.model.hidden };
                PredictionContent { value: "embedding", columns, has_class: false }
            }
        }
    }
}

/// The nodes that were asked for, ascending; `None` for all.
fn chosen<B: LinkMath>(
    words: &str,
    run: &OpenRun<B>,
    total: u64,
) -> anyhow::Result<Option<Arc<Vec<NodeId>>>> {
    if words == "all" {
        return Ok(None);
    }
    if let Ok(split) = named::<SplitName>("--nodes", words) {
        return Ok(Some(run.task.split(split).nodes().clone()));
    }
    let mut nodes = Vec::new();
    for word in words.split(',') {
        let node: u64 = word.trim().parse().map_err(|_| {
            usage(format!("--nodes {words}: `{word}` is not a node id; write all, train, valid, test, or ids separated by commas"))
        })?;
        if node >= total {
            return Err(usage(format!(
                "--nodes {words}: there is no node {node}: the graph has nodes 0 to {}",
                total.saturating_sub(1)
            )));
        }
        nodes.push(NodeId(node));
    }
    nodes.sort_unstable();
    nodes.dedup();
    Ok(Some(Arc::new(nodes)))
}
