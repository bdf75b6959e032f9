//! Held-out edges: the rows of a dataset's validation and test splits, as items of batches. They stay on disk, and a
//! batch reads its own. Fixed negatives of a benchmark lie beside them.

use crate::negatives::{Negatives, Side};
use crate::topology::Edge;
use crate::{Result, SampleError};
use esker_store::{ArrayFile, Dataset, SplitOver, StoreError, file};
use esker_types::{Dtype, NodeId};

/// Rows read at a time where all are read.
const ROWS_AT_ONCE: u64 = 1 << 14;
/// Source, target, relation.
const COLUMNS: u64 = 3;

/// A split of held-out edges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeldOut {
    /// Validation edges.
    Valid,
    /// Test edges.
    Test,
}

impl HeldOut {
    /// The file of its edges.
    fn file(self) -> &'static str {
        match self {
            HeldOut::Valid => file::SPLIT_VALID,
            HeldOut::Test => file::SPLIT_TEST,
        }
    }

    /// The file of the negatives that replace one side of its edges.
    fn negatives_file(self, side: Side) -> &'static str {
        match (self, side) {
            (HeldOut::Valid, Side::Source) => file::VALID_NEGATIVE_SOURCES,
            (HeldOut::Valid, Side::Target) => file::VALID_NEGATIVE_TARGETS,
            (HeldOut::Test, Side::Source) => file::TEST_NEGATIVE_SOURCES,
            (HeldOut::Test, Side::Target) => file::TEST_NEGATIVE_TARGETS,
        }
    }
}

/// Edges in a file of the dataset, one per row. Two are equal if their files have the same content.
#[derive(Debug, Clone)]
pub struct EdgeRows {
    array: ArrayFile,
    nodes: u64,
    relations: u64,
}

impl PartialEq for EdgeRows {
    fn eq(&self, other: &EdgeRows) -> bool {
        self.identity() == other.identity()
    }
}

impl Eq for EdgeRows {}

impl EdgeRows {
    /// The edges of a split. Fails if the dataset's splits are not over edges.
    pub fn open(dataset: &Dataset, split: HeldOut) -> Result<EdgeRows> {
        let over_edges = |splits: &&esker_store::SplitInfo| splits.over == SplitOver::Edges;
        let array = match dataset.manifest().splits.as_ref().filter(over_edges) {
            Some(_) => dataset.array(split.file()),
            None => None,
        };
        match array {
            Some(array) => Ok(EdgeRows::of(dataset, array)),
            None => Err(SampleError::NoEdgeSplit { dataset: dataset.directory().to_path_buf() }),
        }
    }

    /// Negative edges that are shared by all edges of a split; `None` if the dataset has none.
    pub fn shared_negatives(dataset: &Dataset, split: HeldOut) -> Result<Option<EdgeRows>> {
        EdgeRows::open(dataset, split)?;
        let name = match split {
            HeldOut::Valid => file::VALID_NEGATIVE_EDGES,
            HeldOut::Test => file::TEST_NEGATIVE_EDGES,
        };
        Ok(dataset.array(name).map(|array| EdgeRows::of(dataset, array)))
    }

    fn of(dataset: &Dataset, array: &ArrayFile) -> EdgeRows {
        let manifest = dataset.manifest();
        let relations = manifest.edges.relations.as_ref().map_or(1, |relations| relations.count);
        EdgeRows { array: array.clone(), nodes: manifest.nodes.count, relations }
    }

    /// Number of edges.
    pub fn len(&self) -> u64 {
        self.array.entry().rows
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A short text with the number of edges and the checksum of their file.
    pub fn identity(&self) -> String {
        let entry = self.array.entry();
        format!("rows(count={},dtype={},sums={})", entry.rows, entry.dtype, entry.sums)
    }

    /// Appends the edges of these rows, which must be below [`EdgeRows::len`]. Consecutive rows are read together.
    pub fn edges(&self, rows: &[u64], out: &mut Vec<Edge>) -> Result<()> {
        for run in rows.chunk_by(|one, next| one.checked_add(1) == Some(*next)) {
            self.read(run[0], run.len() as u64, out)?;
        }
        Ok(())
    }

    /// Passes all edges to `take`, in the order of the file.
    pub fn for_each(&self, mut take: impl FnMut(Edge)) -> Result<()> {
        let mut edges = Vec::new();
        for first in (0..self.len()).step_by(ROWS_AT_ONCE as usize) {
            edges.clear();
            self.read(first, ROWS_AT_ONCE.min(self.len() - first), &mut edges)?;
            edges.iter().copied().for_each(&mut take);
        }
        Ok(())
    }

    fn read(&self, first: u64, rows: u64, out: &mut Vec<Edge>) -> Result<()> {
        let words = read_words(&self.array, first * COLUMNS, rows * COLUMNS)?;
        out.reserve(rows as usize);
        for row in words.chunks_exact(COLUMNS as usize) {
            let (source, target, relation) = (row[0], row[1], row[2]);
            if source.max(target) >= self.nodes {
                let expected = format!("nodes below {}", self.nodes);
                return Err(self.damaged(expected, source.max(target)));
            }
            if relation >= self.relations {
                return Err(self.damaged(format!("relations below {}", self.relations), relation));
            }
            out.push(Edge { source: NodeId(source), target: NodeId(target), relation: relation as u32 });
        }
        Ok(())
    }

    fn damaged(&self, expected: String, found: u64) -> SampleError {
        StoreError::inconsistent(self.array.path(), expected, found).into()
    }
}

/// Elements of an array of ids, widened.
fn read_words(array: &ArrayFile, first: u64, count: u64) -> Result<Vec<u64>> {
    let mut words = vec![0u64; count as usize];
    if array.entry().dtype == Dtype::U64 {
        array.read_at(first, &mut words)?;
        return Ok(words);
    }
    let mut narrow = vec![0u32; count as usize];
    array.read_at(first, &mut narrow)?;
    words.iter_mut().zip(narrow).for_each(|(word, narrow)| *word = narrow as u64);
    Ok(words)
}

/// Negatives that a benchmark gives for each held-out edge and one side: a row of nodes per edge, in a file beside the
/// edges. A batch reads those of its own edges, which are then chunks of one edge each.
#[derive(Debug, Clone)]
pub struct FixedNegatives {
    array: ArrayFile,
    nodes: u64,
}

impl FixedNegatives {
    /// The negatives of a split and side; `None` if the dataset has none. Fails if they are not for its edges.
    pub fn open(dataset: &Dataset, split: HeldOut, side: Side) -> Result<Option<FixedNegatives>> {
        let edges = EdgeRows::open(dataset, split)?.len();
        let Some(array) = dataset.array(split.negatives_file(side)) else { return Ok(None) };
        let entry = array.entry();
        if entry.rows != edges || entry.columns == 0 {
            let expected = format!("{edges} rows of nodes, one a held-out edge");
            let found = format!("{} rows of {}", entry.rows, entry.columns);
            let what = array.path().display().to_string();
            return Err(SampleError::NegativeShape { what, expected, found });
        }
        Ok(Some(FixedNegatives { array: array.clone(), nodes: dataset.manifest().nodes.count }))
    }

    /// Negatives per edge.
    pub fn per_edge(&self) -> usize {
        self.array.entry().columns as usize
    }

    /// A short text with their number and the checksum of their file.
    pub fn identity(&self) -> String {
        let entry = self.array.entry();
        format!("negatives(rows={},columns={},sums={})", entry.rows, entry.columns, entry.sums)
    }

    /// Appends the negatives of these rows.
    pub fn nodes(&self, rows: &[u64], out: &mut Vec<NodeId>) -> Result<()> {
        let entry = self.array.entry();
        if let Some(row) = rows.iter().find(|row| **row >= entry.rows) {
            let what = self.array.path().display().to_string();
            let (expected, found) = (format!("rows below {}", entry.rows), row.to_string());
            return Err(SampleError::NegativeShape { what, expected, found });
        }
        for run in rows.chunk_by(|one, next| one.checked_add(1) == Some(*next)) {
            let words = read_words(&self.array, run[0] * entry.columns, run.len() as u64 * entry.columns)?;
            if let Some(node) = words.iter().find(|node| **node >= self.nodes) {
                let expected = format!("nodes below {}", self.nodes);
                return Err(StoreError::inconsistent(self.array.path(), expected, node).into());
            }
            out.extend(words.into_iter().map(NodeId));
        }
        Ok(())
    }

    /// The negatives of a batch. None is masked: whoever gave them has left out true edges.
    pub(crate) fn negatives(&self, rows: &[u64], out: &mut Negatives) -> Result<()> {
        *out = Negatives { chunk_edges: 1, per_chunk: self.per_edge(), ..Negatives::default() };
        self.nodes(rows, &mut out.nodes)
    }
}
