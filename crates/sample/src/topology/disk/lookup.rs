//! Edges and incoming adjacency of a graph on disk. Offsets are in memory. What a call needs is read together, in file
//! order. The queue lives only as long as the call, because a queue belongs to one thread and any thread may call.

use super::{DiskColumn, DiskGraph, DiskReading, OnDisk};
use crate::Result;
use crate::topology::lookup::{check_edge, check_incoming, check_nodes, target_of};
use crate::topology::{Edge, EdgeLookup, IncomingNeighbours, Sources, StoredId};
use esker_types::{EdgeId, NodeId};
use std::ops::Range;

/// Edges whose sources are in memory at a time while adjacency is read.
const MOST_ENTRIES: u64 = 1 << 17;

impl EdgeLookup for DiskGraph {
    fn node_count(&self) -> u64 {
        self.nodes
    }

    fn edge_count(&self) -> u64 {
        self.parts[0].entries
    }

    fn has_incoming(&self) -> bool {
        !self.parts[0].is_outgoing
    }

    fn edges_by_id(&self, ids: &[EdgeId], out: &mut Vec<Edge>) -> Result<()> {
        let mut targets = Vec::with_capacity(ids.len());
        self.targets_by_id(ids, &mut targets)?;
        let mut workspace = DiskReading::default();
        workspace.entries.extend(ids.iter().zip(0..).map(|(edge, at)| (edge.0, at)));
        workspace.entries.sort_unstable();
        let (mut sources, mut relations) = (vec![0; ids.len()], Vec::new());
        self.read_sources(&mut workspace, &mut sources)?;
        self.read_relations(&mut workspace, ids.len(), &mut relations)?;
        out.extend(sources.iter().zip(targets).enumerate().map(|(at, (source, target))| Edge {
            source: NodeId(*source),
            target,
            relation: relations.get(at).copied().unwrap_or(0),
        }));
        Ok(())
    }

    fn targets_by_id(&self, ids: &[EdgeId], out: &mut Vec<NodeId>) -> Result<()> {
        for edge in ids {
            check_edge(*edge, self.direction, self.edge_count())?;
            out.push(target_of(*edge, self.nodes, |node| self.bounds(0, NodeId(node as u64)).0));
        }
        Ok(())
    }

    fn in_degrees(&self, nodes: &[NodeId], out: &mut Vec<u64>) -> Result<()> {
        check_incoming(self.direction)?;
        check_nodes(nodes.iter().copied(), self.nodes)?;
        out.extend(nodes.iter().map(|node| self.part_degree(0, *node)));
        Ok(())
    }

    fn lookup_bytes(&self, edges: u64) -> u64 {
        // Sources, targets and relations, of edges by id or of a piece of adjacency.
        let answered = edges.max(MOST_ENTRIES);
        OnDisk::<u64>::workspace_bytes(0, answered).saturating_add(answered.saturating_mul(2 * (8 + 8 + 4)))
    }

    fn incoming(&self, nodes: &[NodeId], take: &mut dyn FnMut(usize, IncomingNeighbours<'_>)) -> Result<()> {
        check_incoming(self.direction)?;
        check_nodes(nodes.iter().copied(), self.nodes)?;
        let mut workspace = DiskReading::default();
        let (mut sources, mut relations) = (Vec::new(), Vec::new());
        let mut pieces: Vec<(usize, Range<usize>)> = Vec::new();
        let mut read = |workspace: &mut DiskReading, pieces: &mut Vec<(usize, Range<usize>)>| -> Result<()> {
            sources.resize(workspace.entries.len(), 0);
            self.read_sources(workspace, &mut sources)?;
            self.read_relations(workspace, sources.len(), &mut relations)?;
            for (at, range) in pieces.drain(..) {
                let relations = (!relations.is_empty()).then(|| &relations[range.clone()]);
                take(at, IncomingNeighbours { sources: Sources::Wide(&sources[range]), relations });
            }
            workspace.entries.clear();
            Ok(())
        };
        for (at, node) in nodes.iter().enumerate() {
            let (mut start, end) = self.bounds(0, *node);
            // Long adjacency is read in pieces.
            while start < end {
                let first = workspace.entries.len();
                let piece = start..end.min(start + MOST_ENTRIES - first as u64);
                start = piece.end;
                workspace.entries.extend(piece.zip(first as u32..));
                pieces.push((at, first..workspace.entries.len()));
                if workspace.entries.len() as u64 == MOST_ENTRIES {
                    read(&mut workspace, &mut pieces)?;
                }
            }
        }
        read(&mut workspace, &mut pieces)
    }
}

impl DiskGraph {
    /// Reads the sources of the workspace's entries, which are edge ids.
    fn read_sources(&self, workspace: &mut DiskReading, out: &mut [u64]) -> Result<()> {
        let array = self.parts[0].array;
        let bytes = self.dataset.arrays()[array].entry().dtype.bytes();
        let column = DiskColumn { file: 0, array, bytes, bound: self.nodes };
        self.read_column(column, workspace, |place, source| out[place as usize] = source)
    }

    /// Reads the relations of the workspace's `count` entries. `out` stays empty if the graph has no relations.
    fn read_relations(&self, workspace: &mut DiskReading, count: usize, out: &mut Vec<u32>) -> Result<()> {
        let Some(column) = self.relations else { return Ok(()) };
        out.resize(count, 0);
        self.read_column(column, workspace, |place, relation| out[place as usize] = relation as u32)
    }
}

impl<W: StoredId> EdgeLookup for OnDisk<W> {
    fn node_count(&self) -> u64 {
        self.graph.node_count()
    }

    fn edge_count(&self) -> u64 {
        self.graph.edge_count()
    }

    fn has_incoming(&self) -> bool {
        self.graph.has_incoming()
    }

    fn edges_by_id(&self, ids: &[EdgeId], out: &mut Vec<Edge>) -> Result<()> {
        self.graph.edges_by_id(ids, out)
    }

    fn targets_by_id(&self, ids: &[EdgeId], out: &mut Vec<NodeId>) -> Result<()> {
        self.graph.targets_by_id(ids, out)
    }

    fn in_degrees(&self, nodes: &[NodeId], out: &mut Vec<u64>) -> Result<()> {
        self.graph.in_degrees(nodes, out)
    }

    fn lookup_bytes(&self, edges: u64) -> u64 {
        self.graph.lookup_bytes(edges)
    }

    fn incoming(&self, nodes: &[NodeId], take: &mut dyn FnMut(usize, IncomingNeighbours<'_>)) -> Result<()> {
        self.graph.incoming(nodes, take)
    }
}
