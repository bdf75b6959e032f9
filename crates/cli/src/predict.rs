//! `esker predict`: classes and probabilities of nodes, as npy or Parquet.

use crate::output::{print, print_json};
use crate::train::{named, open};
use anyhow::{Context, bail};
use esker_train::{EvaluationMode, LabelKind, SplitName, predict};
use esker_types::{ByteCount, NodeId, grouped};
use parquet::basic::Compression;
use parquet::data_type::{FloatType, Int32Type, Int64Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use serde_json::json;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

/// Predict nodes with the best model of a run
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  esker predict run --out test.parquet                    the test nodes
  esker predict run --nodes all --out all.parquet         every node, with all its neighbours, layer by layer
  esker predict run --nodes 5,17,123 --out some.npy       some.npy has the probabilities, some.classes.npy the classes
  esker predict run --nodes all --mode sampled --out all.npy

Parquet has the columns node, class and one probability a class (real labels: one value a column). npy files are three: probabilities, classes and nodes.")]
pub struct Arguments {
    /// The run
    run: PathBuf,
    /// all, train, valid, test, or node ids with commas between
    #[arg(long, default_value = "test")]
    nodes: String,
    /// Where predictions go: a file ending in .parquet or .npy
    #[arg(long)]
    out: PathBuf,
    /// full (all neighbours) or sampled; default: as the run tested in the end
    #[arg(long)]
    mode: Option<String>,
    /// What it may use; default: what the run was allowed
    #[arg(long)]
    memory: Option<ByteCount>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let mode: Option<EvaluationMode> =
        arguments.mode.as_deref().map(|mode| named("--mode", mode)).transpose()?;
    let mut run = open(&arguments.run, arguments.memory, mode)?;
    let total = run.node_count();
    let nodes = chosen(&arguments.nodes, &run, total)?;
    let count = nodes.as_ref().map_or(total, |nodes| nodes.len() as u64);
    let (kind, outputs) = (run.task.kind, run.task.outputs);
    let mode = run.config.final_eval;
    let mut writer = Writer::create(&arguments.out, kind, outputs, count)?;
    predict(&mut run, nodes.as_ref(), mode, &mut |nodes, classes, values| {
        writer.write(nodes, classes, values).map_err(|error| esker_train::TrainError::Config {
            problem: format!("{}: {error:#}", arguments.out.display()),
            remedy: "make room, or choose another --out".into(),
        })
    })?;
    writer.finish()?;
    match arguments.json {
        true => print_json(&json!({
            "out": arguments.out, "nodes": count, "mode": mode,
            "peak_host_bytes": esker_types::own_resident_bytes(), "budget_host_bytes": run.config.memory,
        })),
        false => print(&format!("{}: {} nodes\n", arguments.out.display(), grouped(count))),
    }
}

/// The nodes that were asked for, ascending; `None` for all.
fn chosen(words: &str, run: &esker_train::OpenRun, total: u64) -> anyhow::Result<Option<Arc<Vec<NodeId>>>> {
    if words == "all" {
        return Ok(None);
    }
    if let Ok(split) = named::<SplitName>("--nodes", words) {
        return Ok(Some(run.task.split(split).nodes().clone()));
    }
    let mut nodes = Vec::new();
    for word in words.split(',') {
        let node: u64 = word.trim().parse().with_context(|| {
            format!("--nodes {words}: `{word}` is no node id; write all, train, valid, test or ids with commas between")
        })?;
        if node >= total {
            bail!(
                "--nodes {words}: there is no node {node}: the graph has nodes 0 to {}",
                total.saturating_sub(1)
            );
        }
        nodes.push(NodeId(node));
    }
    nodes.sort_unstable();
    nodes.dedup();
    Ok(Some(Arc::new(nodes)))
}

/// A file under another name until it is whole.
struct Part {
    path: PathBuf,
    partial: PathBuf,
    file: BufWriter<File>,
}

impl Part {
    fn create(path: PathBuf) -> anyhow::Result<Part> {
        let mut partial = path.as_os_str().to_owned();
        partial.push(".partial");
        let partial = PathBuf::from(partial);
        let file = File::create(&partial).with_context(|| partial.display().to_string())?;
        Ok(Part { path, partial, file: BufWriter::new(file) })
    }

    /// An npy file of so many rows.
    fn npy(path: PathBuf, descr: &str, shape: &str) -> anyhow::Result<Part> {
        let mut part = Part::create(path)?;
        let mut header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({shape}), }}");
        // Magic, version and length are 10 bytes; data starts at a multiple of 64.
        while (10 + header.len() + 1) % 64 != 0 {
            header.push(' ');
        }
        header.push('\n');
        part.file.write_all(b"\x93NUMPY\x01\x00")?;
        part.file.write_all(&(header.len() as u16).to_le_bytes())?;
        part.file.write_all(header.as_bytes())?;
        Ok(part)
    }

    fn finish(mut self) -> anyhow::Result<()> {
        self.file.flush()?;
        self.file.get_ref().sync_all()?;
        fs::rename(&self.partial, &self.path).with_context(|| self.path.display().to_string())
    }
}

enum Writer {
    Npy {
        values: Part,
        classes: Option<Part>,
        nodes: Part,
    },
    Parquet {
        writer: Box<SerializedFileWriter<File>>,
        path: PathBuf,
        partial: PathBuf,
        has_class: bool,
        outputs: usize,
    },
}

impl Writer {
    fn create(out: &Path, kind: LabelKind, outputs: usize, count: u64) -> anyhow::Result<Writer> {
        let has_class = kind == LabelKind::Classes;
        match out.extension().and_then(|extension| extension.to_str()) {
            Some("npy") => Ok(Writer::Npy {
                values: Part::npy(out.to_path_buf(), "<f4", &format!("{count}, {outputs}"))?,
                classes: match has_class {
                    true => Some(Part::npy(out.with_extension("classes.npy"), "<u4", &format!("{count},"))?),
                    false => None,
                },
                nodes: Part::npy(out.with_extension("nodes.npy"), "<u8", &format!("{count},"))?,
            }),
            Some("parquet") => {
                let value = if kind == LabelKind::Real { "value" } else { "probability" };
                let columns: String =
                    (0..outputs).map(|column| format!("required float {value}_{column}; ")).collect();
                let class = if has_class { "required int32 class; " } else { "" };
                let schema = parse_message_type(&format!(
                    "message prediction {{ required int64 node; {class}{columns}}}"
                ))?;
                let properties = WriterProperties::builder().set_compression(Compression::SNAPPY).build();
                let mut partial = out.as_os_str().to_owned();
                partial.push(".partial");
                let partial = PathBuf::from(partial);
                let file = File::create(&partial).with_context(|| partial.display().to_string())?;
                let writer = SerializedFileWriter::new(file, Arc::new(schema), Arc::new(properties))?;
                let (writer, path) = (Box::new(writer), out.to_path_buf());
                Ok(Writer::Parquet { writer, path, partial, has_class, outputs })
            }
            _ => {
                bail!("--out {}: predictions are written to a file ending in .parquet or .npy", out.display())
            }
        }
    }

    fn write(&mut self, ids: &[NodeId], found: &[u32], numbers: &[f32]) -> anyhow::Result<()> {
        match self {
            Writer::Npy { values, classes, nodes } => {
                numbers.iter().try_for_each(|number| values.file.write_all(&number.to_le_bytes()))?;
                ids.iter().try_for_each(|node| nodes.file.write_all(&node.0.to_le_bytes()))?;
                if let Some(classes) = classes {
                    found.iter().try_for_each(|class| classes.file.write_all(&class.to_le_bytes()))?;
                }
            }
            Writer::Parquet { writer, has_class, outputs, .. } => {
                let mut group = writer.next_row_group()?;
                let mut next = 0;
                while let Some(mut column) = group.next_column()? {
                    if next == 0 {
                        let ids: Vec<i64> = ids.iter().map(|node| node.0 as i64).collect();
                        column.typed::<Int64Type>().write_batch(&ids, None, None)?;
                    } else if *has_class && next == 1 {
                        let classes: Vec<i32> = found.iter().map(|class| *class as i32).collect();
                        column.typed::<Int32Type>().write_batch(&classes, None, None)?;
                    } else {
                        let at = next - 1 - *has_class as usize;
                        let values: Vec<f32> = numbers.chunks_exact(*outputs).map(|row| row[at]).collect();
                        column.typed::<FloatType>().write_batch(&values, None, None)?;
                    }
                    column.close()?;
                    next += 1;
                }
                group.close()?;
            }
        }
        Ok(())
    }

    fn finish(self) -> anyhow::Result<()> {
        match self {
            Writer::Npy { values, classes, nodes } => {
                nodes.finish()?;
                classes.map_or(Ok(()), Part::finish)?;
                values.finish()
            }
            Writer::Parquet { writer, path, partial, .. } => {
                let file = writer.into_inner()?;
                file.sync_all()?;
                fs::rename(&partial, &path).with_context(|| path.display().to_string())
            }
        }
    }
}
