use crate::generate::{Common, default_shape};
use crate::note;
use esker_import::generate::Shape;
use esker_types::ByteCount;
use std::path::PathBuf;
use std::process::ExitCode;

/// Make a graph of a million nodes under a small memory budget and show it
#[derive(clap::Args)]
#[command(after_help = "\
Example:
  esker quickstart

Training comes with a later release: until then this stops once the graph is made and shown.")]
pub struct Arguments {
    /// Where the graph goes
    #[arg(long, default_value = "esker-quickstart")]
    out: PathBuf,
    /// Number of nodes
    #[arg(long, default_value_t = 1_000_000)]
    nodes: u64,
    /// Memory to use
    #[arg(long, default_value = "256MiB")]
    memory: ByteCount,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let out = &arguments.out;
    if out.exists() {
        note!("{} is there already: showing it", out.display());
        let dataset = esker_store::Dataset::open(out)?;
        let found = dataset.manifest().nodes.count;
        anyhow::ensure!(
            found == arguments.nodes,
            "{}: has {found} nodes, not {}; remove it, or choose another --out",
            out.display(),
            arguments.nodes
        );
        return crate::output::print(&format!("{}{}", crate::info::as_text(&dataset)?, next_steps(out)));
    }
    note!("Making a graph of {} nodes inside {}:", esker_types::grouped(arguments.nodes), arguments.memory);
    let shape = Shape { dim: 256, classes: 32.min(arguments.nodes), ..default_shape(arguments.nodes) };
    let common = Common { memory: Some(arguments.memory), ..Common::default() };
    common.make(out, |job| esker_import::generate::generate(&shape, job))?;
    crate::output::print(&next_steps(out))
}

fn next_steps(out: &std::path::Path) -> String {
    format!(
        "\nTraining comes with a later release; for now, look around:\n  \
         esker info {0} --json\n  esker verify {0}\n  esker import --help\n",
        out.display()
    )
}
