//! What a foreign format offers, described but not read yet. A format reader (`formats/`) fills an [`ImportSource`];
//! the builder (`build/`) opens its streams, as often as it needs to, and never learns which format it was.

use crate::{Location, Result};
use esker_types::Dtype;
use std::path::{Path, PathBuf};

/// A graph in a foreign format.
pub struct ImportSource {
    /// Number of nodes, when the format says so; else the builder takes the feature rows, label rows or largest id.
    pub nodes: Option<u64>,
    /// The edges.
    pub edges: Box<dyn EdgeSource>,
    /// Feature rows by node.
    pub features: Option<Box<dyn RowSource>>,
    /// Labels by node.
    pub labels: Option<NodeLabels>,
    /// Which nodes (or edges) train, validate and test.
    pub splits: Splits,
    /// What everybody who uses this format does to its edges; `--as-stored` turns it off.
    pub usual: Treatment,
    /// String ids, in node order.
    pub node_names: Option<Box<dyn NameSource>>,
    /// Names of the relations, by relation number.
    pub relation_names: Vec<String>,
    /// Names of the classes, by class number; empty when the format has none.
    pub class_names: Vec<String>,
}

/// What is done to the edges on their way in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub struct Treatment {
    /// Add `v -> u` for each `u -> v` (a self-loop is its own reverse).
    pub add_reverse: bool,
    /// Keep one of several edges with the same ends and relation.
    pub remove_duplicates: bool,
    /// Drop edges from a node to itself.
    pub remove_self_loops: bool,
}

impl Treatment {
    /// Keep every edge as it stands.
    pub const AS_STORED: Treatment =
        Treatment { add_reverse: false, remove_duplicates: false, remove_self_loops: false };
    /// Each pair of neighbours once in each direction.
    pub const UNDIRECTED: Treatment =
        Treatment { add_reverse: true, remove_duplicates: true, remove_self_loops: false };
}

/// An edge as a file gives it: ids are not checked yet. Columns a source does not have are zero.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ForeignEdge {
    /// The node the message comes from.
    pub source: u64,
    /// The node it goes to.
    pub target: u64,
    /// Point in time, in whatever unit the file uses.
    pub time: i64,
    /// Kind of edge.
    pub relation: u32,
    /// Weight.
    pub weight: f32,
}

/// Which optional columns a source's edges carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EdgeColumns {
    /// `ForeignEdge::relation` is set.
    pub relation: bool,
    /// `ForeignEdge::weight` is set.
    pub weight: bool,
    /// `ForeignEdge::time` is set.
    pub time: bool,
}

impl EdgeColumns {
    /// Source and target only.
    pub fn none(self) -> bool {
        self == EdgeColumns::default()
    }
}

/// Edges that can be streamed, any number of times.
pub trait EdgeSource: Send + Sync {
    /// How many there are, when that is known without reading them.
    fn count(&self) -> Option<u64>;
    /// Which optional columns they carry.
    fn columns(&self) -> EdgeColumns {
        EdgeColumns::default()
    }
    /// Starts a stream at edge number `skip`.
    fn open(&self, skip: u64) -> Result<Box<dyn EdgeStream>>;
    /// Where edge number `position` stands in the files, for messages.
    fn location(&self, position: u64) -> Location;
}

/// Edges, in the order of their files.
pub trait EdgeStream: Send {
    /// Clears `out` and puts the next edges there, some thousands at a time; `false` when there are no more.
    fn next(&mut self, out: &mut Vec<ForeignEdge>) -> Result<bool>;
}

/// Rows of numbers that can be streamed, any number of times: features, and labels with NaN for "none".
pub trait RowSource: Send + Sync {
    /// Number of rows.
    fn rows(&self) -> u64;
    /// Numbers in a row.
    fn dim(&self) -> usize;
    /// The dtype to store when the user asks for none. Values pass through f32, so f16 and bf16 survive exactly.
    fn natural_dtype(&self) -> Dtype {
        Dtype::F32
    }
    /// Starts a stream at row `first`.
    fn open(&self, first: u64) -> Result<Box<dyn RowStream>>;
    /// Where row number `row` stands in the files, for messages.
    fn location(&self, row: u64) -> Location;
}

/// Rows in order.
pub trait RowStream: Send {
    /// Fills `rows`, a whole number of rows, with the next ones. Asking for more than are left is a bug.
    fn fill(&mut self, rows: &mut [f32]) -> Result<()>;
}

pub use esker_store::LabelKind;

/// Labels by node.
pub struct NodeLabels {
    /// What they mean.
    pub kind: LabelKind,
    /// The values; one column for classes.
    pub rows: Box<dyn RowSource>,
    /// NaN means "no label" in this format; elsewhere it is an error.
    pub nan_is_unlabelled: bool,
}

/// Which nodes or edges train, validate and test.
pub enum Splits {
    /// The format has none.
    None,
    /// Lists of node ids.
    Nodes {
        /// Training nodes.
        train: Box<dyn IdSource>,
        /// Validation nodes.
        valid: Box<dyn IdSource>,
        /// Test nodes.
        test: Box<dyn IdSource>,
    },
    /// One number a node: 0 train, 1 valid, 2 test, anything else none.
    Coded(Box<dyn RowSource>),
    /// Link prediction: all of `ImportSource::edges` train, these are held out.
    Edges {
        /// Validation edges.
        valid: Box<dyn EdgeSource>,
        /// Test edges.
        test: Box<dyn EdgeSource>,
    },
}

/// A list of node ids that can be streamed.
pub trait IdSource: Send + Sync {
    /// Starts at the beginning.
    fn open(&self) -> Result<Box<dyn IdStream>>;
    /// Where entry number `position` stands, for messages.
    fn location(&self, position: u64) -> Location;
}

/// Ids in file order.
pub trait IdStream: Send {
    /// Clears `out` and puts the next ids there; `false` when there are no more.
    fn next(&mut self, out: &mut Vec<u64>) -> Result<bool>;
}

/// Strings that can be streamed in id order.
pub trait NameSource: Send + Sync {
    /// Number of names.
    fn count(&self) -> u64;
    /// Starts at the first name.
    fn open(&self) -> Result<Box<dyn NameStream>>;
}

/// Names in id order.
pub trait NameStream: Send {
    /// Puts the next name into `out`; `false` when there are no more.
    fn next(&mut self, out: &mut Vec<u8>) -> Result<bool>;
}

/// How many edges or ids a stream hands over at a time.
pub const CHUNK: usize = 1 << 14;

/// Edges that a format had to read whole.
pub struct EdgesInMemory {
    /// The file they come from.
    pub path: PathBuf,
    /// The edges.
    pub edges: std::sync::Arc<[ForeignEdge]>,
    /// Which columns are set.
    pub columns: EdgeColumns,
}

struct EdgeMemoryStream {
    edges: std::sync::Arc<[ForeignEdge]>,
    at: usize,
}

impl EdgeSource for EdgesInMemory {
    fn count(&self) -> Option<u64> {
        Some(self.edges.len() as u64)
    }
    fn columns(&self) -> EdgeColumns {
        self.columns
    }
    fn open(&self, skip: u64) -> Result<Box<dyn EdgeStream>> {
        let at = (skip as usize).min(self.edges.len());
        Ok(Box::new(EdgeMemoryStream { edges: self.edges.clone(), at }))
    }
    fn location(&self, position: u64) -> Location {
        Location::at(&self.path, format!("edge {position}"))
    }
}

impl EdgeStream for EdgeMemoryStream {
    fn next(&mut self, out: &mut Vec<ForeignEdge>) -> Result<bool> {
        out.clear();
        let end = (self.at + CHUNK).min(self.edges.len());
        out.extend_from_slice(&self.edges[self.at..end]);
        self.at = end;
        Ok(!out.is_empty())
    }
}

/// Dense rows that a format had to read whole.
pub struct DenseRows {
    /// The file they come from.
    pub path: PathBuf,
    /// Numbers in a row.
    pub dim: usize,
    /// The rows, one after the other.
    pub values: std::sync::Arc<[f32]>,
}

struct RowMemoryStream {
    values: std::sync::Arc<[f32]>,
    at: usize,
}

impl RowSource for DenseRows {
    fn rows(&self) -> u64 {
        (self.values.len() / self.dim.max(1)) as u64
    }
    fn dim(&self) -> usize {
        self.dim
    }
    fn open(&self, first: u64) -> Result<Box<dyn RowStream>> {
        Ok(Box::new(RowMemoryStream { values: self.values.clone(), at: first as usize * self.dim }))
    }
    fn location(&self, row: u64) -> Location {
        Location::row(&self.path, row)
    }
}

impl RowStream for RowMemoryStream {
    fn fill(&mut self, rows: &mut [f32]) -> Result<()> {
        rows.copy_from_slice(&self.values[self.at..self.at + rows.len()]);
        self.at += rows.len();
        Ok(())
    }
}

/// Sparse rows in memory (CSR), made dense as they are read.
pub struct SparseRows {
    /// The file they come from.
    pub path: PathBuf,
    /// Columns.
    pub dim: usize,
    /// Where each row starts in `columns`; one more than rows.
    pub starts: std::sync::Arc<[u64]>,
    /// Column of each entry, checked to be below `dim`.
    pub columns: std::sync::Arc<[u32]>,
    /// Value of each entry.
    pub values: std::sync::Arc<[f32]>,
}

struct SparseRowStream {
    dim: usize,
    starts: std::sync::Arc<[u64]>,
    columns: std::sync::Arc<[u32]>,
    values: std::sync::Arc<[f32]>,
    row: usize,
}

impl RowSource for SparseRows {
    fn rows(&self) -> u64 {
        self.starts.len() as u64 - 1
    }
    fn dim(&self) -> usize {
        self.dim
    }
    fn open(&self, first: u64) -> Result<Box<dyn RowStream>> {
        Ok(Box::new(SparseRowStream {
            dim: self.dim,
            starts: self.starts.clone(),
            columns: self.columns.clone(),
            values: self.values.clone(),
            row: first as usize,
        }))
    }
    fn location(&self, row: u64) -> Location {
        Location::row(&self.path, row)
    }
}

impl RowStream for SparseRowStream {
    fn fill(&mut self, rows: &mut [f32]) -> Result<()> {
        rows.fill(0.0);
        for row in rows.chunks_exact_mut(self.dim) {
            let entries = self.starts[self.row] as usize..self.starts[self.row + 1] as usize;
            // Scipy allows an entry to be stored in pieces: the value is their sum.
            for (column, value) in self.columns[entries.clone()].iter().zip(&self.values[entries]) {
                row[*column as usize] += value;
            }
            self.row += 1;
        }
        Ok(())
    }
}

/// Ids that a format had to read whole.
pub struct IdsInMemory {
    /// The file they come from.
    pub path: PathBuf,
    /// The ids.
    pub ids: std::sync::Arc<[u64]>,
}

struct IdMemoryStream(Option<std::sync::Arc<[u64]>>);

impl IdsInMemory {
    /// The ids of `path`, boxed.
    pub fn boxed(path: &Path, ids: impl Into<std::sync::Arc<[u64]>>) -> Box<dyn IdSource> {
        Box::new(IdsInMemory { path: path.to_path_buf(), ids: ids.into() })
    }
}

impl IdSource for IdsInMemory {
    fn open(&self) -> Result<Box<dyn IdStream>> {
        Ok(Box::new(IdMemoryStream(Some(self.ids.clone()))))
    }
    fn location(&self, position: u64) -> Location {
        Location::row(&self.path, position)
    }
}

impl IdStream for IdMemoryStream {
    fn next(&mut self, out: &mut Vec<u64>) -> Result<bool> {
        out.clear();
        out.extend_from_slice(&self.0.take().unwrap_or_default());
        Ok(!out.is_empty())
    }
}
