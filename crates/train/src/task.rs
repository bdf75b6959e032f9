//! What is learned: the nodes of training, validation and test, and their labels. Only labels of these nodes are in
//! memory.

use crate::{Result, TrainError};
use esker_nn::Labels;
pub use esker_store::LabelKind;
use esker_store::{ArrayFile, Dataset, LabelInfo, SplitInfo, SplitOver, file};
use esker_types::NodeId;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// A split.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SplitName {
    /// For training.
    Train,
    /// For choosing the best model.
    Valid,
    /// For the result at the end.
    Test,
}

impl SplitName {
    fn file(self) -> &'static str {
        match self {
            SplitName::Train => file::SPLIT_TRAIN,
            SplitName::Valid => file::SPLIT_VALID,
            SplitName::Test => file::SPLIT_TEST,
        }
    }
}

/// Labels by position of the node in its split.
#[derive(Debug, Clone, PartialEq)]
enum LabelValues {
    /// One class each; `UNKNOWN` for none.
    Classes(Vec<u32>),
    /// This many numbers each; NaN for unknown.
    Numbers(Vec<f32>, usize),
}

const UNKNOWN: u32 = u32::MAX;

/// Nodes, ascending, with their labels.
#[derive(Debug, Clone, PartialEq)]
pub struct LabelledNodes {
    nodes: Arc<Vec<NodeId>>,
    held: Arc<LabelValues>,
}

/// Labels of the rows of a batch that have one.
#[derive(Debug, Clone, PartialEq)]
pub enum BatchLabels {
    /// One class each.
    Classes(Vec<u32>),
    /// 0, 1 or NaN for each column.
    Binary(Vec<f32>),
    /// A number or NaN for each column.
    Values(Vec<f32>),
}

impl BatchLabels {
    /// The labels in the form that the loss takes.
    pub fn as_labels(&self) -> Labels<'_> {
        match self {
            BatchLabels::Classes(classes) => Labels::Classes(classes),
            BatchLabels::Binary(values) => Labels::Binary(values),
            BatchLabels::Values(values) => Labels::Values(values),
        }
    }
}

/// What is learned on a dataset.
#[derive(Debug, Clone)]
pub struct Task {
    /// The kind of labels.
    pub kind: LabelKind,
    /// Columns of the logits.
    pub outputs: usize,
    /// Training nodes.
    pub train: LabelledNodes,
    /// Nodes for choosing the best model.
    pub valid: LabelledNodes,
    /// Nodes for the result at the end.
    pub test: LabelledNodes,
}

impl Task {
    /// Bytes that [`Task::load`] will allocate.
    pub fn bytes_for(dataset: &Dataset) -> u64 {
        let manifest = dataset.manifest();
        let items = manifest.splits.as_ref().map_or(0, |splits| splits.train + splits.valid + splits.test);
        let label_bytes = manifest.nodes.labels.as_ref().map_or(0, |labels| match labels.kind {
            LabelKind::Classes => 4,
            LabelKind::Multilabel | LabelKind::Real => 4 * labels.classes,
        });
        items.saturating_mul(8 + label_bytes)
    }

    /// No nodes and no labels: links are learned.
    pub(crate) fn none(outputs: usize) -> Task {
        let nodes = || LabelledNodes {
            nodes: Arc::default(),
            held: Arc::new(LabelValues::Numbers(Vec::new(), outputs)),
        };
        Task { kind: LabelKind::Real, outputs, train: nodes(), valid: nodes(), test: nodes() }
    }

    /// The labels and splits of a dataset. The error names what it lacks for training.
    pub fn of(dataset: &Dataset) -> Result<(&LabelInfo, &SplitInfo)> {
        let (manifest, name) = (dataset.manifest(), || dataset.directory().to_path_buf());
        if manifest.splits.as_ref().is_some_and(|splits| splits.over == SplitOver::Edges) {
            return Err(TrainError::EdgeSplit { dataset: name() });
        }
        let Some(labels) = &manifest.nodes.labels else {
            return Err(TrainError::NoLabels { dataset: name() });
        };
        let Some(splits) = manifest.splits.as_ref().filter(|splits| splits.train > 0) else {
            return Err(TrainError::NoSplit { dataset: name() });
        };
        Ok((labels, splits))
    }

    /// Loads splits and labels.
    pub fn load(dataset: &Dataset) -> Result<Task> {
        let (labels, splits) = Task::of(dataset)?;
        let name = || dataset.directory().to_path_buf();
        let array =
            dataset.array(file::NODE_LABELS).ok_or_else(|| TrainError::NoLabels { dataset: name() })?;
        let read = |split: SplitName, count: u64| -> Result<LabelledNodes> {
            let nodes = read_split(dataset, split, count)?;
            let held = read_labels(array, labels.kind, labels.classes as usize, &nodes)?;
            Ok(LabelledNodes { nodes: Arc::new(nodes), held: Arc::new(held) })
        };
        let task = Task {
            kind: labels.kind,
            outputs: labels.classes as usize,
            train: read(SplitName::Train, splits.train)?,
            valid: read(SplitName::Valid, splits.valid)?,
            test: read(SplitName::Test, splits.test)?,
        };
        if task.train.labelled() == 0 {
            return Err(TrainError::Unlabelled { dataset: name() });
        }
        Ok(task)
    }

    /// A split's nodes.
    pub fn split(&self, name: SplitName) -> &LabelledNodes {
        match name {
            SplitName::Train => &self.train,
            SplitName::Valid => &self.valid,
            SplitName::Test => &self.test,
        }
    }
}

impl LabelledNodes {
    /// The nodes, ascending.
    pub fn nodes(&self) -> &Arc<Vec<NodeId>> {
        &self.nodes
    }

    /// Number of nodes with a label.
    pub fn labelled(&self) -> usize {
        match &*self.held {
            LabelValues::Classes(classes) => classes.iter().filter(|class| **class != UNKNOWN).count(),
            LabelValues::Numbers(values, width) => {
                let known = |row: &&[f32]| row.iter().any(|value| !value.is_nan());
                if *width == 0 { 0 } else { values.chunks(*width).filter(known).count() }
            }
        }
    }

    /// Picks the rows whose node has a label: which rows, and their labels. `kind` defines what numbers mean.
    pub fn pick(&self, kind: LabelKind, nodes: &[NodeId], rows: &[u32]) -> (Vec<u32>, BatchLabels) {
        let mut picked = Vec::with_capacity(rows.len());
        let places = nodes
            .iter()
            .zip(rows)
            .filter_map(|(node, row)| self.nodes.binary_search(node).ok().map(|place| (place, *row)));
        match &*self.held {
            LabelValues::Classes(all) => {
                let mut classes = Vec::with_capacity(rows.len());
                for (place, row) in places.filter(|(place, _)| all[*place] != UNKNOWN) {
                    picked.push(row);
                    classes.push(all[place]);
                }
                (picked, BatchLabels::Classes(classes))
            }
            LabelValues::Numbers(all, width) => {
                let mut values = Vec::with_capacity(rows.len() * width);
                for (place, row) in places {
                    let label = &all[place * width..(place + 1) * width];
                    if label.iter().any(|value| !value.is_nan()) {
                        picked.push(row);
                        values.extend_from_slice(label);
                    }
                }
                let labels = match kind {
                    LabelKind::Real => BatchLabels::Values(values),
                    _ => BatchLabels::Binary(values),
                };
                (picked, labels)
            }
        }
    }
}

impl Task {
    /// The training nodes of a dataset.
    pub(crate) fn training_nodes(dataset: &Dataset) -> Result<Vec<NodeId>> {
        read_split(dataset, SplitName::Train, Task::of(dataset)?.1.train)
    }
}

fn read_split(dataset: &Dataset, split: SplitName, count: u64) -> Result<Vec<NodeId>> {
    let Some(array) = dataset.array(split.file()).filter(|_| count > 0) else { return Ok(Vec::new()) };
    let mut ids = vec![0u64; count as usize];
    array.elements(0)?.fill_ids(&mut ids)?;
    let nodes = dataset.manifest().nodes.count;
    let out_of_order = ids.windows(2).any(|pair| pair[0] >= pair[1]);
    if out_of_order || ids.last().is_some_and(|last| *last >= nodes) {
        let expected = format!("ascending node ids below {nodes}");
        return Err(TrainError::file(array.path(), expected, "others", "run `esker verify`"));
    }
    Ok(ids.into_iter().map(NodeId).collect())
}

/// Labels of ascending nodes, in one pass over the array.
fn read_labels(array: &ArrayFile, kind: LabelKind, width: usize, nodes: &[NodeId]) -> Result<LabelValues> {
    match kind {
        LabelKind::Classes => {
            let mut classes = Vec::with_capacity(nodes.len());
            each_row::<i32>(array, 1, nodes, |row| classes.push(u32::try_from(row[0]).unwrap_or(UNKNOWN)))?;
            match classes.iter().find(|class| **class != UNKNOWN && **class as usize >= width) {
                Some(class) => {
                    let expected = format!("classes below {width}");
                    Err(TrainError::file(array.path(), expected, class, "run `esker verify`"))
                }
                None => Ok(LabelValues::Classes(classes)),
            }
        }
        LabelKind::Multilabel => {
            let mut values = Vec::with_capacity(nodes.len() * width);
            let number = |byte: &u8| match *byte {
                0 => 0.0,
                1 => 1.0,
                _ => f32::NAN,
            };
            each_row::<u8>(array, width, nodes, |row| values.extend(row.iter().map(number)))?;
            Ok(LabelValues::Numbers(values, width))
        }
        LabelKind::Real => {
            let mut values = Vec::with_capacity(nodes.len() * width);
            each_row::<f32>(array, width, nodes, |row| values.extend_from_slice(row))?;
            Ok(LabelValues::Numbers(values, width))
        }
    }
}

/// Bytes of rows read at a time.
const CHUNK_BYTES: usize = 1 << 20;

fn each_row<T: bytemuck::Pod>(
    array: &ArrayFile,
    width: usize,
    nodes: &[NodeId],
    mut take: impl FnMut(&[T]),
) -> Result<()> {
    let chunk_rows = (CHUNK_BYTES / (width * size_of::<T>()).max(1)).max(1);
    let mut chunk = vec![T::zeroed(); chunk_rows * width];
    let mut at = 0;
    while at < nodes.len() {
        let first = nodes[at].0;
        let rows = (chunk_rows as u64).min(array.entry().rows - first);
        let chunk = &mut chunk[..rows as usize * width];
        array.read_at(first * width as u64, chunk)?;
        while let Some(node) = nodes.get(at).filter(|node| node.0 < first + rows) {
            let start = (node.0 - first) as usize * width;
            take(&chunk[start..start + width]);
            at += 1;
        }
    }
    Ok(())
}
