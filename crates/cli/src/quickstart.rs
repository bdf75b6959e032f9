use crate::device::on_device;
use crate::exit::{INTERRUPTED, usage};
use crate::note;
use crate::progress::Shown;
use crate::train::{Flags, TrainRun, summary_text};
use esker_import::ImportJob;
use esker_import::generate::{GraphShape, generate};
use esker_sample::Fanout;
use esker_store::Dataset;
use esker_strategies::StrategyKind;
use esker_types::{Budget, ByteCount, DeviceName, grouped};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Generate a graph and train on it, with features four times larger than the memory limit
#[derive(clap::Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "\
Example:
  esker quickstart

Generates a graph of a million nodes with 256 features per node (1 GB), trains GraphSAGE on it within 240 MiB, evaluates, and shows the result. Graph and run stay in --out; delete the directory when you are done."
)]
pub struct QuickstartArguments {
    /// Directory for the graph and the run
    #[arg(long, default_value = "esker-quickstart")]
    out: PathBuf,
    /// Number of nodes
    #[arg(long, default_value_t = 1_000_000)]
    nodes: u64,
    /// Memory limit
    #[arg(long, default_value = "240MiB")]
    memory: ByteCount,
    /// Number of epochs
    #[arg(long, default_value_t = 3)]
    epochs: u64,
}

pub fn run(arguments: &QuickstartArguments) -> anyhow::Result<ExitCode> {
    let graph = arguments.out.join("graph");
    make(arguments, &graph)?;
    let dataset = Dataset::open(&graph)?;
    let features = dataset.manifest().nodes.features.as_ref();
    let bytes = features.map_or(0, |features| arguments.nodes * features.dim * features.dtype.bytes());
    note!("Training on {} of features inside {}:", ByteCount(bytes), arguments.memory);
    let flags = Flags {
        fanout: Some(crate::train::Fanouts(vec![Fanout::AtMost(10), Fanout::AtMost(5)])),
        batch: Some(512),
        hidden: Some(128),
        epochs: Some(arguments.epochs),
        lr: Some(0.003),
        strategy: Some(StrategyKind::Ginex),
        // A GPU's driver alone takes as much as all of this.
        device: Some(DeviceName::Cpu),
        memory: Some(arguments.memory),
        ..Flags::default()
    };
    let run = arguments.out.join("run");
    if run.exists() {
        std::fs::remove_dir_all(&run)?;
    }
    match on_device(flags.resolve(&dataset)?, TrainRun { out: &run, resume: false, quiet: false })? {
        Some(summary) => {
            crate::output::print(&format!("\n{}{}", summary_text(&summary, &run), next_steps(&graph, &run)))
        }
        None => Ok(ExitCode::from(INTERRUPTED)),
    }
}

/// The graph, if it is not there already.
fn make(arguments: &QuickstartArguments, graph: &Path) -> anyhow::Result<()> {
    if graph.exists() {
        let found = Dataset::open(graph)?.manifest().nodes.count;
        if found != arguments.nodes {
            return Err(usage(format!(
                "{}: has {found} nodes, not {}; remove it, or choose another --out",
                graph.display(),
                arguments.nodes
            )));
        }
        note!("{} is there already: using it", graph.display());
        return Ok(());
    }
    note!("Making a graph of {} nodes inside {}:", grouped(arguments.nodes), arguments.memory);
    std::fs::create_dir_all(&arguments.out)?;
    let shape =
        GraphShape { dim: 256, classes: 32.min(arguments.nodes), ..GraphShape::plain(arguments.nodes) };
    let (progress, budget) = (Shown::new(), Budget { host_bytes: arguments.memory.0 });
    generate(&shape, &ImportJob { target: graph, overwrite: false, budget, progress: &progress })?;
    Ok(())
}

fn next_steps(graph: &Path, run: &Path) -> String {
    format!(
        "\nNext:\n  esker info {0}\n  esker train {0} --strategy memory --epochs 3\n  esker predict {1} --out {1}/test.parquet\n  esker train --help\n",
        graph.display(),
        run.display()
    )
}
