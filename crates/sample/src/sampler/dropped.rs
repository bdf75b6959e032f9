//! Edges that a batch leaves out of its sample: those it is to predict, and their reverses. The sample is that of the
//! graph without these edges: degrees do not count them, and positions are drawn among the entries that remain. Only ends
//! of these edges are affected, which are targets, so deeper hops of DENSE look nothing up. A sample of no hops has the
//! degrees of the whole graph, if it carries any: no layer uses them.
//!
//! Adjacency in memory is sorted, so entries are found by binary search. Other topologies fetch the adjacency of the
//! affected nodes once, before positions are drawn.

use super::Position;
use crate::topology::lookup::check_nodes;
use crate::topology::{Edge, Neighbours, StoredId};
use crate::{Batches, Result};
use esker_types::NodeId;

/// An entry that is left out: its node, the neighbour, the relation.
type DroppedEntry = (NodeId, NodeId, u32);

/// The entries that a batch leaves out.
#[derive(Debug, Default)]
pub(crate) struct DroppedEdges {
    /// The batch; no other batch leaves anything out.
    at: Option<Position>,
    /// Ascending, each once.
    entries: Vec<DroppedEntry>,
    edges: Vec<Edge>,
}

impl DroppedEdges {
    /// Asks for the edges of a batch. `relations` says whether the topology knows relations: otherwise every edge between
    /// the same ends is left out.
    pub fn begin(&mut self, batches: &dyn Batches, at: Position, nodes: u64, relations: bool) -> Result<()> {
        batches.dropped(at, &mut self.edges)?;
        check_nodes(self.edges.iter().flat_map(|edge| [edge.source, edge.target]), nodes)?;
        self.at = Some(at);
        self.entries.clear();
        self.entries.extend(self.edges.iter().flat_map(|edge| {
            let relation = if relations { edge.relation } else { 0 };
            [(edge.source, edge.target, relation), (edge.target, edge.source, relation)]
        }));
        self.entries.sort_unstable();
        self.entries.dedup();
        Ok(())
    }

    /// The entries that the batch at this position leaves out.
    pub fn of_batch(&self, at: Position) -> DroppedEntries<'_> {
        DroppedEntries(if self.at == Some(at) { &self.entries } else { &[] })
    }
}

/// Entries to leave out, of all nodes or of one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DroppedEntries<'a>(&'a [DroppedEntry]);

impl<'a> DroppedEntries<'a> {
    pub const NONE: DroppedEntries<'static> = DroppedEntries(&[]);

    #[inline(always)]
    pub fn is_empty(self) -> bool {
        self.0.is_empty()
    }

    /// Those of a node.
    pub fn of(self, node: NodeId) -> DroppedEntries<'a> {
        let start = self.0.partition_point(|entry| entry.0 < node);
        let count = self.0[start..].iter().take_while(|entry| entry.0 == node).count();
        DroppedEntries(&self.0[start..start + count])
    }

    /// Replaces `out` by the positions in a node's adjacency that are left out, ascending. `self` has the node's entries.
    pub fn positions<W: StoredId>(
        self,
        list: &Neighbours<W>,
        relation: impl Fn(u32) -> u32,
        out: &mut Vec<u32>,
    ) {
        out.clear();
        for (run, start) in [(list.first, 0), (list.second, list.first.len())] {
            for same in self.0.chunk_by(|one, other| one.1 == other.1) {
                let neighbour = W::of(same[0].1);
                let from = run.partition_point(|word| *word < neighbour);
                let found = (from..run.len()).take_while(|at| run[*at] == neighbour);
                let positions = found.map(|at| (start + at) as u32);
                out.extend(positions.filter(|at| same.iter().any(|entry| entry.2 == relation(*at))));
            }
        }
    }

    /// Whether an entry of the node is left out. `self` has the node's entries.
    pub fn contains(self, neighbour: NodeId, relation: u32) -> bool {
        let key = |entry: &DroppedEntry| (entry.1, entry.2);
        self.0.binary_search_by_key(&(neighbour, relation), key).is_ok()
    }
}

/// Turns ascending positions among the entries that remain into positions in the whole adjacency. `dropped` ascends.
pub(crate) fn restore(positions: &mut [u32], dropped: &[u32]) {
    let mut skipped = 0;
    for position in positions {
        while dropped.get(skipped).is_some_and(|at| *at <= *position + skipped as u32) {
            skipped += 1;
        }
        *position += skipped as u32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn positions_among_the_rest_become_positions_in_all(left_out in prop::collection::vec(any::<bool>(), 0..80)) {
            let of = |kept: bool| -> Vec<u32> {
                (0..left_out.len() as u32).filter(|at| left_out[*at as usize] != kept).collect()
            };
            let (remaining, dropped) = (of(true), of(false));
            let mut positions: Vec<u32> = (0..remaining.len() as u32).collect();
            restore(&mut positions, &dropped);
            prop_assert_eq!(&positions, &remaining);
            let mut odd: Vec<u32> = (0..remaining.len() as u32).filter(|at| at % 3 == 1).collect();
            let expected: Vec<u32> = odd.iter().map(|at| remaining[*at as usize]).collect();
            restore(&mut odd, &dropped);
            prop_assert_eq!(odd, expected);
        }
    }
}
