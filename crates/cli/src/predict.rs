//! `esker predict`: classes and probabilities of nodes, as npy or Parquet.

use crate::device::{WithBackend, on_device};
use crate::exit::{INTERRUPTED, kind_of, text_of, usage};
use crate::note;
use crate::output::{print, print_json};
use crate::train::{MachineFlags, named, stop_on_interrupt};
use esker_nn::Backend;
use esker_train::{LabelKind, OpenRun, RunConfig, RunControl, RunDirectory, SplitName, TrainError, predict};
use esker_types::{ErrorKind, NodeId, grouped};
use parquet::basic::Compression;
use parquet::data_type::{FloatType, Int32Type, Int64Type};
use parquet::errors::ParquetError;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use serde_json::json;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

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

A Parquet file has the columns node, class and one probability per class; for real labels, node and one value per output."
)]
pub struct PredictArguments {
    /// Directory of the run
    run: PathBuf,
    /// all, train, valid, test, or node ids separated by commas
    #[arg(long, default_value = "test")]
    nodes: String,
    /// File for the predictions, ending in .parquet or .npy
    #[arg(long)]
    out: PathBuf,
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
    if !["npy", "parquet"]
        .iter()
        .any(|ending| arguments.out.extension().is_some_and(|found| found == *ending))
    {
        return Err(no_ending(&arguments.out));
    }
    let (directory, config) = arguments.machine.open(&arguments.run, arguments.mode.as_deref())?;
    on_device(config, Prediction { directory, arguments })
}

fn no_ending(out: &Path) -> anyhow::Error {
    usage(format!("--out {}: predictions are written to a file ending in .parquet or .npy", out.display()))
}

struct Prediction<'a> {
    directory: RunDirectory,
    arguments: &'a PredictArguments,
}

impl WithBackend for Prediction<'_> {
    type Output = ExitCode;

    fn run<B: Backend + Clone + 'static>(self, backend: B, config: RunConfig) -> anyhow::Result<ExitCode> {
        let arguments = self.arguments;
        let stop = stop_on_interrupt("stopping; press again to stop at once");
        let control = RunControl { stop, ..RunControl::default() };
        match self.predict(backend, config, control) {
            Err(error) if kind_of(&error) == ErrorKind::Stopped => {
                note!(
                    "stopped predicting: {} was not written; run the same command again to start over",
                    arguments.out.display()
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
    fn predict<B: Backend + Clone + 'static>(
        &self,
        backend: B,
        config: RunConfig,
        control: RunControl,
    ) -> anyhow::Result<ExitCode> {
        let arguments = self.arguments;
        let mut run = OpenRun::load_watched(backend, &self.directory, config, control)?;
        let total = run.node_count();
        let nodes = chosen(&arguments.nodes, &run, total)?;
        let count = nodes.as_ref().map_or(total, |nodes| nodes.len() as u64);
        let (kind, outputs) = (run.task.kind, run.task.outputs);
        let mode = run.config.final_eval;
        let mut writer = Writer::create(&arguments.out, kind, outputs, count)?;
        predict(&mut run, nodes.as_ref(), mode, &mut |nodes, classes, values| {
            writer.write(nodes, classes, values).map_err(TrainError::io(&arguments.out))
        })?;
        writer.finish().map_err(TrainError::io(&arguments.out))?;
        match arguments.json {
            true => print_json(&json!({
                "out": arguments.out, "nodes": count, "mode": mode,
                "peak_host_bytes": run.peak_own_bytes(), "budget_host_bytes": run.config.memory,
                "peak_device_bytes": run.peak_device_bytes(), "budget_device_bytes": run.budget_device_bytes(),
            })),
            false => print(&format!("{}: {} nodes\n", arguments.out.display(), grouped(count))),
        }
    }
}

/// The nodes that were asked for, ascending; `None` for all.
fn chosen<B: Backend + Clone + 'static>(
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

/// The name of a file until it is whole. It goes with whoever does not finish.
struct PartialName {
    path: PathBuf,
    partial: PathBuf,
}

impl PartialName {
    fn create(path: PathBuf) -> anyhow::Result<(PartialName, File)> {
        let mut partial = path.as_os_str().to_owned();
        partial.push(".partial");
        let partial = PathBuf::from(partial);
        let file = File::create(&partial).map_err(TrainError::io(&partial))?;
        Ok((PartialName { path, partial }, file))
    }

    /// Gives the file its name.
    fn finish(self) -> io::Result<()> {
        fs::rename(&self.partial, &self.path)
    }
}

impl Drop for PartialName {
    fn drop(&mut self) {
        // After a rename there is none.
        let _ = fs::remove_file(&self.partial);
    }
}

/// A file under another name until it is whole.
struct PartialFile {
    name: PartialName,
    file: BufWriter<File>,
}

impl PartialFile {
    /// An npy file of so many rows.
    fn npy(path: PathBuf, descr: &str, shape: &str) -> anyhow::Result<PartialFile> {
        let (name, file) = PartialName::create(path)?;
        let mut part = PartialFile { name, file: BufWriter::new(file) };
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

    fn sync(&mut self) -> io::Result<()> {
        self.file.flush()?;
        self.file.get_ref().sync_all()
    }
}

/// The npy files.
struct PredictionArrays {
    values: PartialFile,
    classes: Option<PartialFile>,
    nodes: PartialFile,
}

enum Writer {
    Npy(Box<PredictionArrays>),
    Parquet(Box<ParquetTable>),
}

/// A Parquet file in the making. Rows are gathered into groups of some size: the description of every group is held until
/// the end.
struct ParquetTable {
    writer: SerializedFileWriter<File>,
    name: PartialName,
    has_class: bool,
    outputs: usize,
    group_rows: usize,
    nodes: Vec<i64>,
    classes: Vec<i32>,
    values: Vec<f32>,
}

/// Bytes of a group of rows.
const GROUP_BYTES: usize = 8 << 20;

impl ParquetTable {
    fn write(&mut self, ids: &[NodeId], found: &[u32], numbers: &[f32]) -> io::Result<()> {
        for (at, node) in ids.iter().enumerate() {
            self.nodes.push(node.0 as i64);
            self.classes.extend(found.get(at).map(|class| *class as i32));
            self.values.extend_from_slice(&numbers[at * self.outputs..(at + 1) * self.outputs]);
            if self.nodes.len() == self.group_rows {
                self.close_group().map_err(said_by_parquet)?;
            }
        }
        Ok(())
    }

    fn close_group(&mut self) -> parquet::errors::Result<()> {
        if self.nodes.is_empty() {
            return Ok(());
        }
        let mut group = self.writer.next_row_group()?;
        let (mut next, mut values) = (0, Vec::with_capacity(self.nodes.len()));
        while let Some(mut column) = group.next_column()? {
            if next == 0 {
                column.typed::<Int64Type>().write_batch(&self.nodes, None, None)?;
            } else if self.has_class && next == 1 {
                column.typed::<Int32Type>().write_batch(&self.classes, None, None)?;
            } else {
                let at = next - 1 - self.has_class as usize;
                values.clear();
                values.extend(self.values.chunks_exact(self.outputs).map(|row| row[at]));
                column.typed::<FloatType>().write_batch(&values, None, None)?;
            }
            column.close()?;
            next += 1;
        }
        group.close()?;
        self.nodes.clear();
        self.classes.clear();
        self.values.clear();
        Ok(())
    }

    fn finish(mut self) -> io::Result<()> {
        self.close_group().map_err(said_by_parquet)?;
        let file = self.writer.into_inner().map_err(said_by_parquet)?;
        file.sync_all()?;
        self.name.finish()
    }
}

/// What the operating system said to whoever writes Parquet, without the words around it.
fn said_by_parquet(error: ParquetError) -> io::Error {
    match error {
        ParquetError::External(inner) => match inner.downcast::<io::Error>() {
            Ok(inner) => *inner,
            Err(inner) => io::Error::other(inner),
        },
        other => io::Error::other(other),
    }
}

impl Writer {
    fn create(out: &Path, kind: LabelKind, outputs: usize, count: u64) -> anyhow::Result<Writer> {
        let has_class = kind == LabelKind::Classes;
        match out.extension().and_then(|extension| extension.to_str()) {
            Some("npy") => Ok(Writer::Npy(Box::new(PredictionArrays {
                values: PartialFile::npy(out.to_path_buf(), "<f4", &format!("{count}, {outputs}"))?,
                classes: match has_class {
                    true => Some(PartialFile::npy(
                        out.with_extension("classes.npy"),
                        "<u4",
                        &format!("{count},"),
                    )?),
                    false => None,
                },
                nodes: PartialFile::npy(out.with_extension("nodes.npy"), "<u8", &format!("{count},"))?,
            }))),
            Some("parquet") => {
                let value = if kind == LabelKind::Real { "value" } else { "probability" };
                let columns: String =
                    (0..outputs).map(|column| format!("required float {value}_{column}; ")).collect();
                let class = if has_class { "required int32 class; " } else { "" };
                let schema = parse_message_type(&format!(
                    "message prediction {{ required int64 node; {class}{columns}}}"
                ))?;
                let properties = WriterProperties::builder().set_compression(Compression::SNAPPY).build();
                let (name, file) = PartialName::create(out.to_path_buf())?;
                let writer = SerializedFileWriter::new(file, Arc::new(schema), Arc::new(properties))
                    .map_err(said_by_parquet)
                    .map_err(TrainError::io(out))?;
                Ok(Writer::Parquet(Box::new(ParquetTable {
                    writer,
                    name,
                    has_class,
                    outputs,
                    group_rows: (GROUP_BYTES / (12 + 4 * outputs)).max(1),
                    nodes: Vec::new(),
                    classes: Vec::new(),
                    values: Vec::new(),
                })))
            }
            _ => Err(no_ending(out)),
        }
    }

    fn write(&mut self, ids: &[NodeId], found: &[u32], numbers: &[f32]) -> io::Result<()> {
        match self {
            Writer::Npy(arrays) => {
                let PredictionArrays { values, classes, nodes } = &mut **arrays;
                numbers.iter().try_for_each(|number| values.file.write_all(&number.to_le_bytes()))?;
                ids.iter().try_for_each(|node| nodes.file.write_all(&node.0.to_le_bytes()))?;
                if let Some(classes) = classes {
                    found.iter().try_for_each(|class| classes.file.write_all(&class.to_le_bytes()))?;
                }
            }
            Writer::Parquet(table) => table.write(ids, found, numbers)?,
        }
        Ok(())
    }

    fn finish(self) -> io::Result<()> {
        match self {
            Writer::Npy(arrays) => {
                let PredictionArrays { values, classes, nodes } = *arrays;
                // All of them are whole before one has its name.
                let mut parts: Vec<PartialFile> =
                    [Some(nodes), classes, Some(values)].into_iter().flatten().collect();
                parts.iter_mut().try_for_each(PartialFile::sync)?;
                parts.into_iter().try_for_each(|part| part.name.finish())
            }
            Writer::Parquet(table) => table.finish(),
        }
    }
}
