//! The description of a dataset in another format, not read yet. A format reader (`formats/`) fills an
//! [`ImportSource`]. The builder (`build/`) opens its streams as often as it needs to, and never knows the format.

use crate::{Location, Result};
use esker_types::Dtype;
use std::path::{Path, PathBuf};

/// A graph in another format.
pub struct ImportSource {
    /// Number of nodes, if the format states it. Otherwise the builder uses the feature rows, label rows or largest
    /// id.
    pub nodes: Option<u64>,
    /// The edges.
    pub edges: Box<dyn EdgeSource>,
    /// Feature rows by node.
    pub features: Option<Box<dyn RowSource>>,
    /// Labels by node.
    pub labels: Option<NodeLabels>,
    /// Training, validation and test nodes (or edges).
    pub splits: Splits,
    /// The usual treatment of edges for users of this format; `--as-stored` turns it off.
    pub usual: Treatment,
    /// String ids, in node order.
    pub node_names: Option<Box<dyn NameSource>>,
    /// Names of the relations, by relation number.
    pub relation_names: Vec<String>,
    /// Names of the classes, by class number; empty if the format has none.
    pub class_names: Vec<String>,
}

/// Treatment of the edges during import.
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
    /// Keep every edge unchanged.
    pub const AS_STORED: Treatment =
        Treatment { add_reverse: false, remove_duplicates: false, remove_self_loops: false };
    /// Each pair of neighbours once in each direction.
    pub const UNDIRECTED: Treatment =
        Treatment { add_reverse: true, remove_duplicates: true, remove_self_loops: false };
}

/// An edge as in the file: ids are not checked yet. Columns that a source does not have are zero.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ForeignEdge {
    /// The node that sends the message.
    pub source: u64,
    /// The node that receives it.
    pub target: u64,
    /// Point in time, in the unit of the file.
    pub time: i64,
    /// Edge type.
    pub relation: u32,
    /// Weight.
    pub weight: f32,
}

/// The optional columns of a source's edges.
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

/// Edges that can be streamed any number of times.
pub trait EdgeSource: Send + Sync {
    /// Number of edges, if it is known without reading them.
    fn count(&self) -> Option<u64>;
    /// Their optional columns.
    fn columns(&self) -> EdgeColumns {
        EdgeColumns::default()
    }
    /// Starts a stream at edge number `skip`.
    fn open(&self, skip: u64) -> Result<Box<dyn EdgeStream>>;
    /// Position of edge `position` in the files, for messages.
    fn location(&self, position: u64) -> Location;
}

/// Edges, in the order of their files.
pub trait EdgeStream: Send {
    /// Replaces the content of `out` with the next edges, some thousands at a time; `false` if there are no more.
    fn next(&mut self, out: &mut Vec<ForeignEdge>) -> Result<bool>;
}

/// Rows of numbers that can be streamed any number of times: features, and labels with NaN for "none".
pub trait RowSource: Send + Sync {
    /// Number of rows.
    fn rows(&self) -> u64;
    /// Numbers per row.
    fn dim(&self) -> usize;
    /// The dtype to store if the user gives none. Values are converted to f32 and back, so f16 and bf16 stay exact.
    fn natural_dtype(&self) -> Dtype {
        Dtype::F32
    }
    /// Starts a stream at row `first`.
    fn open(&self, first: u64) -> Result<Box<dyn RowStream>>;
    /// Position of row `row` in the files, for messages.
    fn location(&self, row: u64) -> Location;
}

/// Rows in order.
pub trait RowStream: Send {
    /// Fills `rows`, a whole number of rows, with the next ones. The caller must not request more than are left.
    fn fill(&mut self, rows: &mut [f32]) -> Result<()>;
}

pub use esker_store::LabelKind;

/// Labels by node.
pub struct NodeLabels {
    /// Their meaning.
    pub kind: LabelKind,
    /// The values; one column for classes.
    pub rows: Box<dyn RowSource>,
    /// NaN means "no label" in this format; elsewhere it is an error.
    pub nan_is_unlabelled: bool,
}

/// Training, validation and test nodes or edges.
pub enum Splits {
    /// The format has none.
    None,
    /// Node ids.
    Nodes {
        /// Training nodes.
        train: Box<dyn IdSource>,
        /// Validation nodes.
        valid: Box<dyn IdSource>,
        /// Test nodes.
        test: Box<dyn IdSource>,
    },
    /// One number per node: 0 train, 1 valid, 2 test, anything else none.
    Coded(Box<dyn RowSource>),
    /// Link prediction: all of `ImportSource::edges` are for training; these are not among them.
    Edges {
        /// Validation edges.
        valid: Box<dyn EdgeSource>,
        /// Test edges.
        test: Box<dyn EdgeSource>,
        /// Negatives that a benchmark fixed, of validation and of test edges.
        negatives: Box<[Option<ForeignNegatives>; 2]>,
    },
}

/// Negatives that a benchmark fixed for held-out edges.
pub enum ForeignNegatives {
    /// Edges that are compared with all held-out ones.
    Shared(Box<dyn EdgeSource>),
    /// Nodes that replace an end, a row for each held-out edge.
    PerEdge {
        /// Instead of the source.
        sources: Option<IdMatrix>,
        /// Instead of the target.
        targets: Option<IdMatrix>,
    },
}

/// Rows of ids of a format that is read as a whole.
pub struct IdMatrix {
    /// The file they come from.
    pub path: PathBuf,
    /// The name of the matrix in it.
    pub name: String,
    /// Rows.
    pub rows: u64,
    /// Ids per row.
    pub columns: u64,
    /// The ids, row after row.
    pub ids: std::sync::Arc<[u64]>,
}

/// Node ids that can be streamed.
pub trait IdSource: Send + Sync {
    /// Starts at the beginning.
    fn open(&self) -> Result<Box<dyn IdStream>>;
    /// Position of entry `position`, for messages.
    fn location(&self, position: u64) -> Location;
}

/// Ids in file order.
pub trait IdStream: Send {
    /// Replaces the content of `out` with the next ids; `false` if there are no more.
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
    /// Replaces the content of `out` with the next name; `false` if there are no more.
    fn next(&mut self, out: &mut Vec<u8>) -> Result<bool>;
}

/// Edges or ids that a stream returns at a time.
pub const CHUNK: usize = 1 << 14;

/// Edges of a format that is read as a whole.
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

/// Dense rows of a format that is read as a whole.
pub struct DenseRows {
    /// The file they come from.
    pub path: PathBuf,
    /// Numbers per row.
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
    /// Start of each row in `columns`; one more than rows.
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

/// Ids of a format that is read as a whole.
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
