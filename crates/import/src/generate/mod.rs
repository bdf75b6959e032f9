//! Generated graphs: streamed and seeded. The bytes are the same for any number of threads and any memory budget.

mod facts;
mod model;
mod presets;

pub use facts::{FactShape, generate_facts};
pub use presets::{PRESETS, Preset};

use crate::build::{
    AdjacencyWriter, EdgePlan, FeaturePlan, ImportJob, TopologyResult, out_neighbours, write_features,
};
use crate::source::{CHUNK, EdgeSource, EdgeStream, ForeignEdge, RowSource, RowStream, Treatment};
use crate::{ImportError, ImportWorkspace, Location, Result};
use esker_store::{
    ArrayWriter, EdgeInfo, FORMAT_VERSION, FileEntry, LabelInfo, LabelKind, Manifest, NodeInfo, Provenance,
    SplitInfo, SplitOver, Staging, file,
};
use esker_types::{Dtype, IdWidth, Progress, Unit};
use model::GraphModel;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::sync::Arc;

/// Parameters of a generated graph. All of them determine the result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GraphShape {
    /// The preset it came from, if any.
    pub preset: Option<String>,
    /// Nodes.
    pub nodes: u64,
    /// Mean in-degree.
    pub degree: f64,
    /// Numbers per feature row.
    pub dim: u64,
    /// Dtype of the feature rows.
    pub dtype: Dtype,
    /// Classes.
    pub classes: u64,
    /// Share of edges whose source is drawn from the target's class.
    pub homophily: f64,
    /// Distance of class centroids, relative to noise with standard deviation 1.
    pub signal: f64,
    /// Share of labels that are drawn again, after edges and features: no model can reach accuracy 1.
    pub label_noise: f64,
    /// Skew of the popularity.
    pub popularity: Popularity,
    /// Share of training nodes.
    pub train: f64,
    /// Share of validation nodes.
    pub valid: f64,
    /// Share of test nodes.
    pub test: f64,
    /// Every edge in both directions.
    pub undirected: bool,
    /// Store out-neighbours too.
    pub out_neighbours: bool,
    /// Random seed of everything.
    pub seed: u64,
}

/// Distribution of draws over nodes by popularity rank x in 0..1. The density is (x + plateau)^-exponent. A small
/// share of the draws is far more skewed, which makes the few hubs that real graphs have.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Popularity {
    /// How fast popularity decreases.
    pub exponent: f64,
    /// The share of nodes at the top that are about equally popular.
    pub plateau: f64,
    /// Share of draws that go to hubs.
    pub hubs: f64,
}

impl GraphShape {
    /// A typical graph, with average skew and five per cent training nodes. The program's default.
    pub fn plain(nodes: u64) -> GraphShape {
        GraphShape {
            preset: None,
            nodes,
            degree: 15.0,
            dim: 128,
            dtype: Dtype::F32,
            classes: 32,
            homophily: 0.7,
            signal: 0.12,
            label_noise: 0.1,
            popularity: Popularity { exponent: 2.0, plateau: 0.03, hubs: 0.01 },
            train: 0.05,
            valid: 0.01,
            test: 0.02,
            undirected: false,
            out_neighbours: false,
            seed: 1,
        }
    }

    fn check(&self) -> Result<()> {
        if self.nodes == 0 || self.dim == 0 || self.classes == 0 {
            return Err(ImportError::EmptyGraph);
        }
        if self.nodes > esker_store::MOST_NODES || self.dim > 1 << 24 {
            return Err(ImportError::HugeGraph { nodes: self.nodes, dim: self.dim });
        }
        let out_of_range = |flag, value, allowed| Err(ImportError::OutOfRange { flag, value, allowed });
        if !self.signal.is_finite() {
            return out_of_range("--signal", self.signal, "a finite number");
        }
        if self.classes > self.nodes || self.classes > 1 << 24 {
            return Err(ImportError::ManyClasses { classes: self.classes });
        }
        if !(self.degree >= 0.0 && self.degree <= 1e6) {
            return out_of_range("--degree", self.degree, "from 0 to 1 000 000");
        }
        for (flag, share) in [("--homophily", self.homophily), ("--label-noise", self.label_noise)] {
            if !(0.0..=1.0).contains(&share) {
                return out_of_range(flag, share, "from 0 to 1");
            }
        }
        let shares = [self.train, self.valid, self.test];
        if shares.iter().any(|share| !(0.0..=1.0).contains(share)) || shares.iter().sum::<f64>() > 1.0 + 1e-9
        {
            return Err(ImportError::GraphShares);
        }
        if !self.dtype.holds_features() {
            return Err(ImportError::NoFeatureDtype { dtype: self.dtype });
        }
        Ok(())
    }

    /// Approximate size of the dataset in bytes.
    pub fn estimated_bytes(&self) -> u64 {
        let edges = self.nodes as f64 * self.degree;
        let id_bytes = IdWidth::for_nodes(self.nodes).dtype().bytes() as f64;
        let lists = edges * id_bytes + self.nodes as f64 * 8.0;
        let out = if self.out_neighbours { lists + edges * 4.0 } else { 0.0 };
        let rows = self.nodes as f64 * (self.dim as f64 * self.dtype.bytes() as f64 + 4.0);
        (lists + out + rows) as u64
    }
}

/// Generates a dataset.
pub fn generate(shape: &GraphShape, job: &ImportJob) -> Result<Manifest> {
    shape.check()?;
    let text = serde_json::to_string(shape).expect("shapes are plain data");
    let fingerprint = format!("generate {} {text}", env!("CARGO_PKG_VERSION"));
    job.make(&fingerprint, |staging, workspace| {
        if workspace.journal.done::<TopologyResult>("topology").is_none() {
            check_space(shape.estimated_bytes(), staging.directory(), workspace.progress)?;
        }
        workspace
            .hold("centroids of all classes", shape.classes.saturating_mul(shape.dim).saturating_mul(4))?;
        let model = Arc::new(GraphModel::new(shape));
        build(shape, &model, staging, workspace)
    })
}

fn check_space(needs: u64, directory: &Path, progress: &dyn Progress) -> Result<()> {
    if needs > 1 << 30 {
        progress.note(&format!("about {} will be written", esker_types::ByteCount(needs)));
    }
    match esker_io::available_bytes(directory) {
        Ok(free_bytes) if free_bytes < needs => {
            Err(ImportError::NoRoom { path: directory.to_path_buf(), needs_bytes: needs, free_bytes })
        }
        _ => Ok(()),
    }
}

fn build(
    shape: &GraphShape,
    model: &Arc<GraphModel>,
    staging: &Staging,
    workspace: &ImportWorkspace,
) -> Result<Manifest> {
    let directory = staging.directory();
    let topology = if shape.undirected {
        // A waiting edge takes a `ForeignEdge` and an id.
        let block_nodes = block_nodes(model, 40, workspace.budget.host_bytes);
        let edges = GeneratedEdges { model: model.clone(), block_nodes };
        let plan = EdgePlan {
            source: &edges,
            treatment: Treatment::UNDIRECTED,
            stated_nodes: Some(shape.nodes),
            selection: None,
            held_out: None,
            keep_positions: false,
            wide_ids: false,
        };
        plan.build(directory, workspace)?
    } else {
        workspace.step("topology", || write_adjacency(model, directory, workspace))?
    };
    let mut files = topology.files.clone();
    files.extend(out_neighbours(shape.out_neighbours, directory, &topology, workspace)?);
    let rows = GeneratedRows(model.clone());
    let plan = FeaturePlan { dtype: Some(shape.dtype), row_normalise: false, allow_nan: false };
    let (features, entries) = write_features(&rows, &plan, None, directory, workspace)?;
    files.extend(entries);
    files.push(workspace.step("labels", || write_labels(model, directory, workspace))?);
    let (splits, entries) =
        workspace.step("splits", || write_splits(model, topology.id_width, directory, workspace))?;
    files.extend(entries);
    let serde_json::Value::Object(options) = serde_json::to_value(shape).expect("shapes are plain data")
    else {
        unreachable!("a shape is an object")
    };
    let source = Provenance { format: "generate".into(), options: options.into_iter().collect() };
    let labels =
        LabelInfo { kind: LabelKind::Classes, classes: shape.classes, labelled: shape.nodes, named: false };
    Ok(Manifest {
        esker: FORMAT_VERSION,
        checksum: String::new(),
        id: String::new(),
        made_by: format!("esker {}", env!("CARGO_PKG_VERSION")),
        source,
        nodes: NodeInfo {
            count: shape.nodes,
            types: vec!["node".into()],
            features: Some(features),
            labels: Some(labels),
            named: false,
        },
        edges: EdgeInfo {
            count: topology.edges,
            types: vec!["edge".into()],
            undirected: shape.undirected,
            max_in_degree: topology.max_in_degree,
            without_in_neighbours: topology.without_in_neighbours,
            out_neighbours: shape.out_neighbours,
            relations: None,
            columns: Vec::new(),
        },
        splits: Some(splits),
        files,
    }
    .complete())
}

/// Largest number of nodes per block. One task draws the in-neighbours of a block.
const BLOCK_NODES: u64 = 2048;

/// Nodes per block, so that two blocks per thread, with `bytes` per edge, take at most an eighth of the budget.
fn block_nodes(model: &GraphModel, bytes: u64, host_bytes: u64) -> u64 {
    nodes_at_once(((model.mean_degree() * 2.0 + 8.0) * bytes as f64) as u64, host_bytes)
}

fn nodes_at_once(node_bytes: u64, host_bytes: u64) -> u64 {
    let threads = rayon::current_num_threads() as u64;
    (host_bytes / 8 / (threads * 2) / node_bytes.max(1)).clamp(1, BLOCK_NODES)
}

/// In-neighbours are drawn by target, so no sort is needed: blocks are drawn in parallel and written in order.
fn write_adjacency(
    model: &GraphModel,
    directory: &Path,
    workspace: &ImportWorkspace,
) -> Result<TopologyResult> {
    workspace.progress.stage("draw edges", Some(model.nodes()), Unit::Count("nodes"));
    let width = IdWidth::for_nodes(model.nodes());
    let mut lists =
        AdjacencyWriter::create(directory, [file::IN_OFFSETS, file::IN_NEIGHBOURS], model.nodes(), width)?;
    let node_bytes = ((model.mean_degree() * 2.0 + 8.0) * 8.0) as u64;
    let host_bytes = workspace.budget.host_bytes;
    let draw = |node, list: &mut Vec<u64>| model.in_neighbours(node, list);
    in_order(model.nodes(), node_bytes, host_bytes, draw, |start, block| {
        for (node, list) in (start..).zip(block.lists()) {
            for source in list {
                lists.push(node, *source)?;
            }
        }
        workspace.progress.advance(block.len() as u64);
        Ok(())
    })?;
    let result = lists.finish()?;
    workspace.progress.finish();
    Ok(result)
}

/// Draws something for each node, in parallel, and passes it on block by block, in order. `node_bytes` is about what a
/// node takes.
fn in_order<T: Copy + Send>(
    nodes: u64,
    node_bytes: u64,
    host_bytes: u64,
    draw: impl Fn(u64, &mut Vec<T>) + Sync,
    mut take: impl FnMut(u64, &NeighbourBlock<T>) -> Result<()>,
) -> Result<()> {
    let block = nodes_at_once(node_bytes, host_bytes);
    let window = block * rayon::current_num_threads() as u64 * 2;
    for first in (0..nodes).step_by(window as usize) {
        for (start, block) in draw_blocks(&draw, first, (first + window).min(nodes), block) {
            take(start, &block)?;
        }
    }
    Ok(())
}

/// What was drawn for consecutive nodes.
struct NeighbourBlock<T> {
    drawn: Vec<T>,
    ends: Vec<usize>,
}

impl<T> NeighbourBlock<T> {
    /// Number of nodes.
    fn len(&self) -> usize {
        self.ends.len()
    }

    fn lists(&self) -> impl Iterator<Item = &[T]> {
        let starts = std::iter::once(&0).chain(&self.ends);
        starts.zip(&self.ends).map(|(start, end)| &self.drawn[*start..*end])
    }
}

fn draw_blocks<T: Copy + Send>(
    draw: &(impl Fn(u64, &mut Vec<T>) + Sync),
    first: u64,
    end: u64,
    nodes: u64,
) -> Vec<(u64, NeighbourBlock<T>)> {
    let starts: Vec<u64> = (first..end).step_by(nodes as usize).collect();
    starts
        .into_par_iter()
        .map(|start| {
            let mut block = NeighbourBlock { drawn: Vec::new(), ends: Vec::with_capacity(nodes as usize) };
            let mut list = Vec::new();
            for node in start..(start + nodes).min(end) {
                draw(node, &mut list);
                block.drawn.extend_from_slice(&list);
                block.ends.push(block.drawn.len());
            }
            (start, block)
        })
        .collect()
}

/// The drawn edges as a stream, for datasets that need a sort.
struct GeneratedEdges {
    model: Arc<GraphModel>,
    block_nodes: u64,
}

struct GeneratedEdgeStream {
    model: Arc<GraphModel>,
    block_nodes: u64,
    next_node: u64,
    waiting: Vec<ForeignEdge>,
    skip: u64,
}

impl EdgeSource for GeneratedEdges {
    fn count(&self) -> Option<u64> {
        None
    }
    fn open(&self, skip: u64) -> Result<Box<dyn EdgeStream>> {
        Ok(Box::new(GeneratedEdgeStream {
            model: self.model.clone(),
            block_nodes: self.block_nodes,
            next_node: 0,
            waiting: Vec::new(),
            skip,
        }))
    }
    fn location(&self, position: u64) -> Location {
        Location::at(Path::new("generated graph"), format!("edge {position}"))
    }
}

impl EdgeStream for GeneratedEdgeStream {
    fn next(&mut self, out: &mut Vec<ForeignEdge>) -> Result<bool> {
        out.clear();
        while self.waiting.is_empty() && self.next_node < self.model.nodes() {
            let window = self.block_nodes * rayon::current_num_threads() as u64 * 2;
            let end = (self.next_node + window).min(self.model.nodes());
            let draw = |node, list: &mut Vec<u64>| self.model.in_neighbours(node, list);
            for (start, block) in draw_blocks(&draw, self.next_node, end, self.block_nodes) {
                for (target, list) in (start..).zip(block.lists()) {
                    self.waiting.extend(list.iter().map(|source| ForeignEdge {
                        source: *source,
                        target,
                        ..ForeignEdge::default()
                    }));
                }
            }
            self.next_node = end;
            let dropped = self.skip.min(self.waiting.len() as u64);
            self.waiting.drain(..dropped as usize);
            self.skip -= dropped;
            // Edges are taken from the back below, so reverse the order.
            self.waiting.reverse();
        }
        let count = self.waiting.len().min(CHUNK);
        out.extend(self.waiting.drain(self.waiting.len() - count..).rev());
        Ok(!out.is_empty())
    }
}

/// Feature rows, drawn when they are read.
struct GeneratedRows(Arc<GraphModel>);

struct GeneratedRowStream {
    model: Arc<GraphModel>,
    next: u64,
}

impl RowSource for GeneratedRows {
    fn rows(&self) -> u64 {
        self.0.nodes()
    }
    fn dim(&self) -> usize {
        self.0.dim()
    }
    fn open(&self, first: u64) -> Result<Box<dyn RowStream>> {
        Ok(Box::new(GeneratedRowStream { model: self.0.clone(), next: first }))
    }
    fn location(&self, row: u64) -> Location {
        Location::row(Path::new("generated graph"), row)
    }
}

impl RowStream for GeneratedRowStream {
    fn fill(&mut self, rows: &mut [f32]) -> Result<()> {
        let dim = self.model.dim();
        let first = self.next;
        rows.par_chunks_exact_mut(dim).with_min_len(64).enumerate().for_each(|(index, row)| {
            self.model.features(first + index as u64, row);
        });
        self.next += (rows.len() / dim) as u64;
        Ok(())
    }
}

fn write_labels(model: &GraphModel, directory: &Path, workspace: &ImportWorkspace) -> Result<FileEntry> {
    workspace.progress.stage("write labels", Some(model.nodes()), Unit::Count("nodes"));
    let mut writer = ArrayWriter::create(directory, file::NODE_LABELS, Dtype::I32, 1)?;
    let mut first = 0;
    while first < model.nodes() {
        let end = (first + (1 << 16)).min(model.nodes());
        let labels: Vec<i32> = (first..end).into_par_iter().map(|node| model.label(node) as i32).collect();
        writer.write_elements(&labels)?;
        workspace.progress.advance(end - first);
        first = end;
    }
    workspace.progress.finish();
    Ok(writer.finish()?)
}

fn write_splits(
    model: &GraphModel,
    width: IdWidth,
    directory: &Path,
    workspace: &ImportWorkspace,
) -> Result<(SplitInfo, Vec<FileEntry>)> {
    workspace.progress.stage("write splits", Some(model.nodes()), Unit::Count("nodes"));
    let names = [file::SPLIT_TRAIN, file::SPLIT_VALID, file::SPLIT_TEST];
    let mut writers = Vec::new();
    for name in names {
        writers.push(crate::build::IdWriter::create(directory, name, width, 1)?);
    }
    let mut first = 0;
    while first < model.nodes() {
        let end = (first + (1 << 16)).min(model.nodes());
        let splits: Vec<Option<usize>> = (first..end).into_par_iter().map(|node| model.split(node)).collect();
        for (node, split) in (first..).zip(splits) {
            if let Some(split) = split {
                writers[split].push(node)?;
            }
        }
        workspace.progress.advance(end - first);
        first = end;
    }
    let files: Vec<FileEntry> = writers.into_iter().map(|writer| writer.finish()).collect::<Result<_>>()?;
    workspace.progress.finish();
    let [train, valid, test] = [files[0].rows, files[1].rows, files[2].rows];
    Ok((SplitInfo { over: SplitOver::Nodes, train, valid, test, negatives: Vec::new() }, files))
}
