//! In-neighbours as CSC: `--indptr P.npy` has the start of each node's in-neighbours in `--indices I.npy`. Both are
//! streamed.

use super::Format;
use crate::npy::{NpyArray, NpyElements};
use crate::source::{CHUNK, EdgeColumns, EdgeSource, EdgeStream, ForeignEdge, ImportSource};
use crate::{ImportWorkspace, Location, Request, Result, given, input};
use std::path::PathBuf;

/// The format.
pub struct Csc;

impl Format for Csc {
    fn name(&self) -> &'static str {
        "csc"
    }

    fn about(&self) -> &'static str {
        "in-neighbours as --indptr and --indices, and the files other flags name"
    }

    fn flags(&self) -> Vec<&'static str> {
        [&["indptr", "indices", "edge-weights"], super::GIVEN].concat()
    }

    fn inputs(&self, request: &Request) -> Result<Vec<PathBuf>> {
        let indptr = request.need(&request.indptr, "--indptr P.npy")?;
        let indices = request.need(&request.indices, "--indices I.npy")?;
        let mut inputs = vec![
            input::existing(indptr, "--indptr names it")?,
            input::existing(indices, "--indices names it")?,
        ];
        inputs.extend(given::inputs(request)?);
        Ok(inputs)
    }

    fn open(&self, request: &Request, workspace: &mut ImportWorkspace) -> Result<ImportSource> {
        let edges = CscEdges::new(
            NpyArray::open(request.need(&request.indptr, "--indptr P.npy")?)?,
            NpyArray::open(request.need(&request.indices, "--indices I.npy")?)?,
            request.edge_weights.as_deref().map(NpyArray::open).transpose()?,
        )?;
        let nodes = (edges.nodes(), "--indptr");
        Ok(given::open(request, workspace, Some(nodes))?.with_edges(Box::new(edges)))
    }
}

struct CscEdges {
    starts: NpyArray,
    neighbours: NpyArray,
    weights: Option<NpyArray>,
}

impl CscEdges {
    fn new(starts: NpyArray, neighbours: NpyArray, weights: Option<NpyArray>) -> Result<CscEdges> {
        for array in [&starts, &neighbours] {
            if array.shape().len() != 1 {
                return Err(array.location().bad("a vector", format!("shape {:?}", array.shape())));
            }
        }
        if starts.elements() == 0 {
            return Err(starts.location().bad("at least one number, one more than nodes", "an empty vector"));
        }
        if let Some(weights) = &weights
            && weights.elements() != neighbours.elements()
        {
            let expected = format!("{} weights, one an edge", neighbours.elements());
            return Err(weights.location().bad(expected, weights.elements()));
        }
        let mut ends = Vec::new();
        starts.stream(0)?.integers(1, &mut ends)?;
        starts.stream(starts.elements() - 1)?.integers(1, &mut ends)?;
        if ends[0] != 0 {
            return Err(starts.row_location(0).bad("0, where the first node's in-neighbours start", ends[0]));
        }
        if ends[1] as u64 != neighbours.elements() {
            let expected = format!("{}, the length of --indices", neighbours.elements());
            return Err(starts.row_location(starts.elements() - 1).bad(expected, ends[1]));
        }
        Ok(CscEdges { starts, neighbours, weights })
    }

    fn nodes(&self) -> u64 {
        self.starts.elements() - 1
    }
}

impl EdgeSource for CscEdges {
    fn count(&self) -> Option<u64> {
        Some(self.neighbours.elements())
    }
    fn columns(&self) -> EdgeColumns {
        EdgeColumns { weight: self.weights.is_some(), ..EdgeColumns::default() }
    }
    fn open(&self, skip: u64) -> Result<Box<dyn EdgeStream>> {
        let count = self.neighbours.elements();
        let skip = skip.min(count);
        let mut targets = CscTargets::new(&self.starts)?;
        targets.seek(skip)?;
        Ok(Box::new(CscEdgeStream {
            targets,
            neighbours: self.neighbours.stream(skip)?,
            weights: self.weights.as_ref().map(|weights| weights.stream(skip)).transpose()?,
            position: skip,
            count,
            ids: Vec::new(),
            floats: Vec::new(),
        }))
    }
    fn location(&self, position: u64) -> Location {
        self.neighbours.row_location(position)
    }
}

/// Walks the starts to find the node whose range contains an edge.
struct CscTargets {
    elements: NpyElements,
    location: NpyArray,
    /// Starts not loaded yet.
    left: u64,
    loaded: Vec<i64>,
    at: usize,
    /// The node of the current range, which ends before edge `end`.
    node: u64,
    end: u64,
}

impl CscTargets {
    fn new(starts: &NpyArray) -> Result<CscTargets> {
        let mut elements = starts.stream(0)?;
        // The first start is 0; the following ones are the ends of the ranges of nodes 0, 1, ...
        elements.integers(1, &mut Vec::new())?;
        let left = starts.elements() - 1;
        let (loaded, at) = (Vec::new(), 0);
        let mut targets =
            CscTargets { elements, location: starts.clone(), left, loaded, at, node: 0, end: 0 };
        if left > 0 {
            targets.end = targets.next_end(0)?;
        }
        Ok(targets)
    }

    /// The end of the next range: row `row` of the starts, counted after the first.
    fn next_end(&mut self, row: u64) -> Result<u64> {
        if self.at == self.loaded.len() {
            self.loaded.clear();
            self.at = 0;
            let count = self.left.min(CHUNK as u64) as usize;
            self.left -= count as u64;
            self.elements.integers(count, &mut self.loaded)?;
        }
        let Some(end) = self.loaded.get(self.at).copied() else {
            return Err(self.location.location().bad("a start for each node", "too few"));
        };
        self.at += 1;
        if end < 0 || (end as u64) < self.end {
            let expected = format!("at least {}, the start before it", self.end);
            return Err(self.location.row_location(row + 1).bad(expected, end));
        }
        Ok(end as u64)
    }

    /// Moves to the range that contains `edge`, or to the end.
    fn seek(&mut self, edge: u64) -> Result<()> {
        while self.end <= edge && (self.left > 0 || self.at < self.loaded.len()) {
            self.end = self.next_end(self.node + 1)?;
            self.node += 1;
        }
        Ok(())
    }
}

struct CscEdgeStream {
    targets: CscTargets,
    neighbours: NpyElements,
    weights: Option<NpyElements>,
    position: u64,
    count: u64,
    ids: Vec<u64>,
    floats: Vec<f32>,
}

impl EdgeStream for CscEdgeStream {
    fn next(&mut self, out: &mut Vec<ForeignEdge>) -> Result<bool> {
        out.clear();
        let count = (self.count - self.position).min(CHUNK as u64) as usize;
        self.ids.clear();
        self.neighbours.ids(count, &mut self.ids)?;
        for source in &self.ids {
            self.targets.seek(self.position)?;
            out.push(ForeignEdge { source: *source, target: self.targets.node, ..ForeignEdge::default() });
            self.position += 1;
        }
        if let Some(weights) = &mut self.weights {
            self.floats.resize(count, 0.0);
            weights.floats(&mut self.floats)?;
            out.iter_mut().zip(&self.floats).for_each(|(edge, weight)| edge.weight = *weight);
        }
        if self.position == self.count {
            // The starts after the last edge are checked too.
            self.targets.seek(u64::MAX)?;
        }
        Ok(count > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;

    fn edges_of(starts: &[i64], neighbours: &[i64], skip: u64) -> Result<Vec<(u64, u64)>> {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| Some(directory.path().join(name));
        std::fs::write(directory.path().join("p.npy"), fixture::integers(starts)).unwrap();
        std::fs::write(directory.path().join("i.npy"), fixture::integers(neighbours)).unwrap();
        let request = Request { indptr: path("p.npy"), indices: path("i.npy"), ..Request::default() };
        Csc.inputs(&request)?;
        let source = fixture::in_workspace(|workspace| Csc.open(&request, workspace))?;
        assert_eq!(source.nodes, Some(starts.len() as u64 - 1));
        fixture::all_edges(&*source.edges, skip)
    }

    #[test]
    fn each_neighbour_points_to_the_node_whose_range_it_is_in() {
        let expected = [(5, 0), (6, 0), (7, 2), (8, 4)];
        for skip in 0..=4 {
            let found = edges_of(&[0, 2, 2, 3, 3, 4, 4], &[5, 6, 7, 8], skip as u64).unwrap();
            assert_eq!(found, expected[skip..], "from {skip}");
        }
        assert_eq!(edges_of(&[0], &[], 0).unwrap(), []);
        assert_eq!(edges_of(&[0, 0, 0], &[], 0).unwrap(), []);
    }

    #[test]
    fn ranges_longer_than_a_chunk_and_many_empty_ones_pass() {
        let mut starts = vec![0; 40_000];
        starts.extend(vec![40_000; 40_000]);
        let found = edges_of(&starts, &vec![3; 40_000], 17_000).unwrap();
        assert!(found.len() == 23_000 && found.iter().all(|edge| *edge == (3, 39_999)));
    }

    #[test]
    fn bad_starts_are_named_with_row_and_value() {
        let message = |starts: &[i64]| edges_of(starts, &[5, 6, 7], 0).unwrap_err().to_string();
        assert!(message(&[1, 3]).contains("p.npy, row 0: expected 0"));
        assert!(message(&[0, 2]).contains("p.npy, row 1: expected 3, the length of --indices, found 2"));
        let found = message(&[0, 2, 1, 3]);
        assert!(found.contains("p.npy, row 2: expected at least 2, the start before it, found 1"), "{found}");
        assert!(message(&[0, -2, 3]).contains("p.npy, row 1: expected at least 0"));
        assert!(message(&[0, 3, 9, 3]).contains("p.npy, row 3: expected at least 9"));
    }
}
