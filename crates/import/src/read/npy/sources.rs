//! Arrays as the streams of an [`ImportSource`](crate::source::ImportSource): rows, edges, ids.

use super::{NpyArray, NpyElements, Scalar};
use crate::csr::check_columns;
use crate::source::{
    CHUNK, EdgeColumns, EdgeSource, EdgeStream, ForeignEdge, IdSource, IdStream, RowSource, RowStream,
};
use crate::{Location, Result};
use esker_types::Dtype;

/// A matrix (or a vector, as a matrix of one column) as feature or label rows.
pub struct NpyRows(NpyArray);

impl NpyRows {
    /// Checks that the array is a vector or a row-major matrix.
    pub fn new(array: NpyArray) -> Result<NpyRows> {
        let shape = array.shape();
        if shape.len() > 2 || shape.is_empty() {
            return Err(array.location().bad("a matrix or a vector", format!("shape {shape:?}")));
        }
        if shape.len() == 2 && array.fortran() && shape[0] > 1 && shape[1] > 1 {
            let remedy = "a column-major matrix; save it again after numpy.ascontiguousarray";
            return Err(array.location().bad("a row-major matrix", remedy));
        }
        // Without rows, no byte of the file limits the row length, but a buffer for one row is allocated anyway.
        if let [0, columns] = *shape {
            check_columns(columns.max(1), array.location())?;
        }
        Ok(NpyRows(array))
    }
}

struct NpyRowStream(NpyElements);

impl RowSource for NpyRows {
    fn rows(&self) -> u64 {
        self.0.shape()[0]
    }
    fn dim(&self) -> usize {
        self.0.shape().get(1).copied().unwrap_or(1) as usize
    }
    fn natural_dtype(&self) -> Dtype {
        if self.0.scalar() == Scalar::F16 { Dtype::F16 } else { Dtype::F32 }
    }
    fn open(&self, first: u64) -> Result<Box<dyn RowStream>> {
        Ok(Box::new(NpyRowStream(self.0.stream(first * self.dim() as u64)?)))
    }
    fn location(&self, row: u64) -> Location {
        self.0.row_location(row)
    }
}

impl RowStream for NpyRowStream {
    fn fill(&mut self, rows: &mut [f32]) -> Result<()> {
        self.0.floats(rows)
    }
}

/// An edge list as npy: shape (2, E) or (E, 2), in either storage order, with optional columns of length E.
pub struct NpyEdges {
    ends: NpyArray,
    pairs: bool,
    count: u64,
    relations: Option<NpyArray>,
    weights: Option<NpyArray>,
    times: Option<NpyArray>,
}

impl NpyEdges {
    /// Interprets the array by its shape. `pairs` decides the ambiguous shape (2, 2): true for (E, 2).
    pub fn new(ends: NpyArray, pairs: bool) -> Result<NpyEdges> {
        let (count, by_pairs) = match *ends.shape() {
            [2, 2] => (2, pairs),
            [2, count] => (count, false),
            [count, 2] => (count, true),
            ref shape => {
                return Err(ends
                    .location()
                    .bad("an edge list of shape (2, E) or (E, 2)", format!("shape {shape:?}")));
            }
        };
        if !ends.scalar().integral() || ends.scalar() == Scalar::Bool {
            return Err(ends.location().bad("an edge list of integers", format!("dtype {}", ends.scalar())));
        }
        // Column-major storage of one shape is row-major storage of the other.
        let pairs = by_pairs != ends.fortran();
        Ok(NpyEdges { ends, pairs, count, relations: None, weights: None, times: None })
    }

    fn column(&self, array: Option<NpyArray>, what: &str) -> Result<Option<NpyArray>> {
        match array {
            Some(array) if array.elements() != self.count => {
                Err(array.location().bad(format!("{} {what}, one an edge", self.count), array.elements()))
            }
            array => Ok(array),
        }
    }

    /// Adds columns with one value per edge.
    pub fn with(
        mut self,
        relations: Option<NpyArray>,
        weights: Option<NpyArray>,
        times: Option<NpyArray>,
    ) -> Result<NpyEdges> {
        self.relations = self.column(relations, "relations")?;
        self.weights = self.column(weights, "weights")?;
        self.times = self.column(times, "times")?;
        Ok(self)
    }
}

struct NpyEdgeStream {
    sources: NpyElements,
    /// `None` if `sources` has both ends in pairs.
    targets: Option<NpyElements>,
    relations: Option<NpyElements>,
    weights: Option<NpyElements>,
    times: Option<NpyElements>,
    left: u64,
    ids: Vec<u64>,
    other_ids: Vec<u64>,
    integers: Vec<i64>,
    floats: Vec<f32>,
}

impl EdgeSource for NpyEdges {
    fn count(&self) -> Option<u64> {
        Some(self.count)
    }
    fn columns(&self) -> EdgeColumns {
        EdgeColumns {
            relation: self.relations.is_some(),
            weight: self.weights.is_some(),
            time: self.times.is_some(),
        }
    }
    fn open(&self, skip: u64) -> Result<Box<dyn EdgeStream>> {
        let skip = skip.min(self.count);
        let column = |array: &Option<NpyArray>| array.as_ref().map(|array| array.stream(skip)).transpose();
        Ok(Box::new(NpyEdgeStream {
            sources: self.ends.stream(if self.pairs { skip * 2 } else { skip })?,
            targets: if self.pairs { None } else { Some(self.ends.stream(self.count + skip)?) },
            relations: column(&self.relations)?,
            weights: column(&self.weights)?,
            times: column(&self.times)?,
            left: self.count - skip,
            ids: Vec::new(),
            other_ids: Vec::new(),
            integers: Vec::new(),
            floats: Vec::new(),
        }))
    }
    fn location(&self, position: u64) -> Location {
        let mut location = self.ends.row_location(position);
        location.detail = location.detail.replace("row ", "edge ");
        location
    }
}

impl EdgeStream for NpyEdgeStream {
    fn next(&mut self, out: &mut Vec<ForeignEdge>) -> Result<bool> {
        out.clear();
        let count = self.left.min(CHUNK as u64) as usize;
        self.left -= count as u64;
        if count == 0 {
            return Ok(false);
        }
        self.ids.clear();
        match &mut self.targets {
            None => {
                self.sources.ids(count * 2, &mut self.ids)?;
                out.extend(self.ids.chunks_exact(2).map(|ends| ForeignEdge {
                    source: ends[0],
                    target: ends[1],
                    ..ForeignEdge::default()
                }));
            }
            Some(targets) => {
                self.sources.ids(count, &mut self.ids)?;
                self.other_ids.clear();
                targets.ids(count, &mut self.other_ids)?;
                let ends = self.ids.iter().zip(&self.other_ids);
                out.extend(ends.map(|(source, target)| ForeignEdge {
                    source: *source,
                    target: *target,
                    ..ForeignEdge::default()
                }));
            }
        }
        if let Some(relations) = &mut self.relations {
            self.integers.clear();
            relations.integers(count, &mut self.integers)?;
            for (at, (edge, relation)) in out.iter_mut().zip(&self.integers).enumerate() {
                edge.relation = u32::try_from(*relation).map_err(|_| {
                    relations.element_location(count - at).bad("a relation number below 2^32", relation)
                })?;
            }
        }
        if let Some(weights) = &mut self.weights {
            self.floats.resize(count, 0.0);
            weights.floats(&mut self.floats)?;
            out.iter_mut().zip(&self.floats).for_each(|(edge, weight)| edge.weight = *weight);
        }
        if let Some(times) = &mut self.times {
            self.integers.clear();
            times.integers(count, &mut self.integers)?;
            out.iter_mut().zip(&self.integers).for_each(|(edge, time)| edge.time = *time);
        }
        Ok(true)
    }
}

/// Node ids, or a mask (booleans) whose true positions are the ids.
pub struct NpyIds(NpyArray);

impl NpyIds {
    /// Checks that the array is a vector of integers or booleans. A matrix of one column or row is accepted too.
    pub fn new(array: NpyArray) -> Result<NpyIds> {
        if array.shape().iter().filter(|axis| **axis != 1).count() > 1 {
            return Err(array.location().bad("a list of ids", format!("shape {:?}", array.shape())));
        }
        if !array.scalar().integral() {
            return Err(array
                .location()
                .bad("a list of integer ids, or a boolean mask", format!("dtype {}", array.scalar())));
        }
        Ok(NpyIds(array))
    }
}

struct NpyIdStream {
    elements: NpyElements,
    mask: bool,
    left: u64,
    position: u64,
    flags: Vec<i64>,
}

impl IdSource for NpyIds {
    fn open(&self) -> Result<Box<dyn IdStream>> {
        Ok(Box::new(NpyIdStream {
            elements: self.0.stream(0)?,
            mask: self.0.scalar() == Scalar::Bool,
            left: self.0.elements(),
            position: 0,
            flags: Vec::new(),
        }))
    }
    fn location(&self, position: u64) -> Location {
        self.0.row_location(position)
    }
}

impl IdStream for NpyIdStream {
    fn next(&mut self, out: &mut Vec<u64>) -> Result<bool> {
        out.clear();
        while out.is_empty() && self.left > 0 {
            let count = self.left.min(CHUNK as u64) as usize;
            self.left -= count as u64;
            if self.mask {
                self.flags.clear();
                self.elements.integers(count, &mut self.flags)?;
                let first = self.position;
                out.extend((first..).zip(&self.flags).filter(|(_, flag)| **flag != 0).map(|(id, _)| id));
            } else {
                self.elements.ids(count, out)?;
            }
            self.position += count as u64;
        }
        Ok(!out.is_empty())
    }
}
