//! Times of nodes or edges, by which a temporal sample takes only what was there at the time of its seed.

use super::graph::HopGraph;
use super::weights::{for_each_part, prefetch_run};
use crate::{Result, SampleError};
use esker_types::{ByteCount, NodeId};
use std::sync::atomic::{AtomicBool, Ordering};

/// Which of the neighbours that are early enough a node takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TemporalStrategy {
    /// All alike.
    #[default]
    Uniform,
    /// The latest ones.
    Last,
}

/// The time of every entry of a graph's adjacency, in the order of time node by node: 8 bytes an entry, and 4 more unless
/// the adjacency of every node is in this order already. Of nodes: 8 bytes a node, too.
#[derive(Debug)]
pub struct NeighbourTimes {
    /// By node, ascending.
    times: Vec<i64>,
    /// The position that has each of these times; equal times ascend by position. Empty if that is the order of positions.
    positions: Vec<u32>,
    /// Times of nodes, which are those of seeds, too.
    of_nodes: Option<Vec<i64>>,
    nodes: u64,
}

impl NeighbourTimes {
    /// Times of nodes: a node takes neighbours whose own time is at most that of the seed. Uses the threads of the current
    /// rayon pool. Fails if the result does not fit `most_bytes`.
    pub fn of_nodes<G: HopGraph>(graph: &G, times: &[i64], most_bytes: u64) -> Result<NeighbourTimes> {
        use crate::topology::StoredId;
        check_count(times, graph.nodes(), "node")?;
        let more_bytes = graph.nodes().saturating_mul(8);
        let mut all = NeighbourTimes::sorted(graph, most_bytes, more_bytes, |node, position| {
            times[graph.list(node).at(position as usize).index()]
        })?;
        all.of_nodes = Some(times.to_vec());
        Ok(all)
    }

    /// Times of edges, by edge id: a node takes edges whose time is at most that of the seed. Uses the threads of the
    /// current rayon pool. Fails if the result does not fit `most_bytes`.
    pub fn of_edges<G: HopGraph>(graph: &G, times: &[i64], most_bytes: u64) -> Result<NeighbourTimes> {
        check_count(times, graph.edges(), "edge")?;
        NeighbourTimes::sorted(graph, most_bytes, 0, |node, position| {
            times[graph.edge(node, position).0 as usize]
        })
    }

    fn sorted<G: HopGraph>(
        graph: &G,
        most_bytes: u64,
        more_bytes: u64,
        time: impl Fn(NodeId, u32) -> i64 + Sync,
    ) -> Result<NeighbourTimes> {
        let ask = |entry_bytes: u64| {
            let needed = graph.entries().saturating_mul(entry_bytes).saturating_add(more_bytes);
            if needed <= most_bytes {
                return Ok(());
            }
            let (needed, allowed) = (ByteCount(needed), ByteCount(most_bytes));
            Err(SampleError::Memory { what: "by time".into(), needed, allowed })
        };
        ask(8)?;
        let mut times = vec![0i64; graph.entries() as usize];
        let is_sorted = AtomicBool::new(true);
        for_each_part(graph, &mut times, |nodes, part| {
            let mut rest = part;
            for node in nodes {
                let (times, behind) = rest.split_at_mut(graph.list(node).len());
                rest = behind;
                times.iter_mut().zip(0..).for_each(|(slot, position)| *slot = time(node, position));
                if !times.is_sorted() {
                    is_sorted.store(false, Ordering::Relaxed);
                }
            }
        });
        let mut positions = Vec::new();
        if !is_sorted.into_inner() {
            ask(12)?;
            positions = vec![0u32; times.len()];
            for_each_part(graph, &mut positions, |nodes, part| {
                let mut rest = part;
                for node in nodes {
                    let (positions, behind) = rest.split_at_mut(graph.list(node).len());
                    rest = behind;
                    positions.iter_mut().zip(0..).for_each(|(slot, position)| *slot = position);
                    let start = graph.start(node) as usize;
                    positions.sort_by_key(|position| times[start + *position as usize]);
                }
            });
            // Each part is sorted as its positions are.
            for_each_part(graph, &mut times, |nodes, part| {
                let mut rest = part;
                for node in nodes {
                    let (times, behind) = rest.split_at_mut(graph.list(node).len());
                    rest = behind;
                    times.sort_unstable();
                }
            });
        }
        Ok(NeighbourTimes { times, positions, of_nodes: None, nodes: graph.nodes() })
    }

    /// Allocated bytes.
    pub fn bytes(&self) -> u64 {
        let of_nodes = self.of_nodes.as_ref().map_or(0, Vec::len);
        (self.times.len() + of_nodes) as u64 * 8 + self.positions.len() as u64 * 4
    }

    /// Whether these are of a graph of this shape.
    pub(super) fn fit<G: HopGraph>(&self, graph: &G) -> bool {
        self.times.len() as u64 == graph.entries() && self.nodes == graph.nodes()
    }

    /// The time of a node, if times are those of nodes.
    pub(super) fn of_node(&self, node: NodeId) -> Option<i64> {
        self.of_nodes.as_ref().map(|times| times[node.index()])
    }

    /// Prefetches what a draw from a node reads first.
    #[inline(always)]
    pub(super) fn prefetch(&self, start: u64, degree: u32) {
        prefetch_run(&self.times, start, degree);
        if !self.positions.is_empty() {
            prefetch_run(&self.positions, start, degree);
        }
    }

    /// How many entries of a node are early enough: these come first in the order of time.
    #[inline(always)]
    pub(super) fn early(&self, start: u64, degree: u32, latest: i64) -> u32 {
        let times = &self.times[start as usize..start as usize + degree as usize];
        times.partition_point(|time| *time <= latest) as u32
    }

    /// Turns places in the order of time into positions, ascending.
    #[inline(always)]
    pub(super) fn positions(&self, start: u64, slots: &mut [u32]) {
        if !self.positions.is_empty() {
            slots.iter_mut().for_each(|slot| *slot = self.positions[start as usize + *slot as usize]);
            slots.sort_unstable();
        }
    }
}

fn check_count(times: &[i64], expected: u64, of: &'static str) -> Result<()> {
    if times.len() as u64 == expected {
        return Ok(());
    }
    let (expected, found) = (format!("{expected}, one for each {of}"), times.len().to_string());
    Err(SampleError::HopColumn { what: "times", expected, found, of })
}

/// A floating-point time as an integer in the same order; none if it is not a number. Both zeros are the same time.
pub fn ordered_time(time: f64) -> Option<i64> {
    let bits = (time + 0.0).to_bits() as i64;
    (!time.is_nan()).then_some(bits ^ ((bits >> 63) as u64 >> 1) as i64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_keep_their_order_as_integers() {
        let times =
            [f64::NEG_INFINITY, -1e300, -2.0, -f64::MIN_POSITIVE, 0.0, 1e-310, 1.5, 2.0, f64::INFINITY];
        let ordered: Vec<i64> = times.iter().map(|time| ordered_time(*time).unwrap()).collect();
        assert!(ordered.windows(2).all(|pair| pair[0] < pair[1]), "{ordered:?}");
        assert_eq!(ordered_time(-0.0), ordered_time(0.0));
        assert_eq!(ordered_time(f64::NAN), None);
    }
}
