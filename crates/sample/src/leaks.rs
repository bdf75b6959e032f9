//! What a split of edges gives away, and what it asks for that nobody saw: held-out edges that are training edges too,
//! and nodes of held-out edges that no training edge has.

use crate::Result;
use crate::held_out::{EdgeRows, HeldOut};
use crate::topology::Edge;
use crate::true_ends::{for_each_edge, for_each_edge_until};
use esker_store::Dataset;
use esker_types::NodeId;

/// Held-out edges that are compared with the graph in one pass over it: about 200 MB with what sorts them.
const EDGES_AT_ONCE: usize = 1 << 22;

/// Counts about a split of held-out edges.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SplitLeaks {
    /// Held-out edges that also train: with the same ends and relation, or reversed if edges are undirected.
    pub also_train: u64,
    /// Distinct nodes of held-out edges that no training edge has.
    pub unseen_nodes: u64,
}

impl SplitLeaks {
    /// Counts them for a split, in passes over the graph. Takes 2 bits a node and about 200 MB.
    pub fn count(dataset: &Dataset, split: HeldOut) -> Result<SplitLeaks> {
        SplitLeaks::count_by(dataset, split, EDGES_AT_ONCE)
    }

    fn count_by(dataset: &Dataset, split: HeldOut, at_once: usize) -> Result<SplitLeaks> {
        let rows = EdgeRows::open(dataset, split)?;
        let mut held_out = NodeBits::new(dataset.manifest().nodes.count);
        rows.for_each(|edge| held_out.insert_ends(&edge))?;
        let unseen_nodes = unseen(dataset, &held_out, &|| false)?;
        let undirected = dataset.manifest().edges.undirected;
        let mut also_train = 0;
        let (mut first, mut block) = (0, Vec::new());
        while first < rows.len() {
            let count = (rows.len() - first).min(at_once as u64);
            let numbers: Vec<u64> = (first..first + count).collect();
            block.clear();
            rows.edges(&numbers, &mut block)?;
            also_train += trained(dataset, &block, undirected)?;
            first += count;
        }
        Ok(SplitLeaks { also_train, unseen_nodes })
    }
}

/// Distinct nodes of held-out edges that no training edge has, in a pass over the graph. Takes
/// [`unseen_node_bytes`]. `stop` is called once in a while; if it returns `true`, the work ends with
/// [`SampleError::Stopped`](crate::SampleError::Stopped).
pub fn unseen_nodes(dataset: &Dataset, held_out: &[Edge], stop: &dyn Fn() -> bool) -> Result<u64> {
    let mut bits = NodeBits::new(dataset.manifest().nodes.count);
    held_out.iter().for_each(|edge| bits.insert_ends(edge));
    unseen(dataset, &bits, stop)
}

/// Memory of [`unseen_nodes`] for so many nodes: two bits each.
pub fn unseen_node_bytes(nodes: u64) -> u64 {
    nodes.div_ceil(64) * 16
}

/// How many of these nodes no training edge has.
fn unseen(dataset: &Dataset, held_out: &NodeBits, stop: &dyn Fn() -> bool) -> Result<u64> {
    let mut seen = NodeBits::new(dataset.manifest().nodes.count);
    for_each_edge_until(dataset, stop, &mut |edge| seen.insert_ends(&edge))?;
    Ok(held_out.count_without(&seen))
}

/// How many of these edges are in the graph.
fn trained(dataset: &Dataset, edges: &[Edge], undirected: bool) -> Result<u64> {
    // In the order of the graph: by target, source and relation.
    let mut ordered: Vec<(Edge, u32)> = Vec::with_capacity(edges.len() * (1 + undirected as usize));
    for (edge, number) in edges.iter().zip(0u32..) {
        ordered.push((*edge, number));
        if undirected {
            ordered.push((Edge { source: edge.target, target: edge.source, ..*edge }, number));
        }
    }
    let key = |edge: &Edge| (edge.target, edge.source, edge.relation);
    ordered.sort_unstable_by_key(|(edge, _)| key(edge));
    let (mut at, mut found) = (0, vec![false; edges.len()]);
    for_each_edge(dataset, &mut |edge| {
        while ordered.get(at).is_some_and(|(held_out, _)| key(held_out) < key(&edge)) {
            at += 1;
        }
        // Repeated rows are all found; the next equal edge of the graph finds none again.
        while ordered.get(at).is_some_and(|(held_out, _)| *held_out == edge) {
            found[ordered[at].1 as usize] = true;
            at += 1;
        }
    })?;
    Ok(found.iter().filter(|found| **found).count() as u64)
}

/// A bit per node.
struct NodeBits(Vec<u64>);

impl NodeBits {
    fn new(nodes: u64) -> NodeBits {
        NodeBits(vec![0; nodes.div_ceil(64) as usize])
    }

    fn insert_ends(&mut self, edge: &Edge) {
        [edge.source, edge.target].into_iter().for_each(|node| self.insert(node));
    }

    fn insert(&mut self, node: NodeId) {
        self.0[node.index() / 64] |= 1 << (node.0 % 64);
    }

    fn count_without(&self, others: &NodeBits) -> u64 {
        self.0.iter().zip(&others.0).map(|(own, others)| (own & !others).count_ones() as u64).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use esker_import::{HoldOut, ImportJob, Request, import};
    use esker_types::{Budget, Silent};
    use proptest::prelude::*;
    use std::collections::BTreeSet;
    use std::path::Path;

    fn make(directory: &Path, request: &Request) -> Dataset {
        let target = directory.join("to");
        let budget = Budget { host_bytes: 64 << 20 };
        import(request, &ImportJob { target: &target, budget, overwrite: true, progress: &Silent }).unwrap();
        Dataset::open(&target).unwrap()
    }

    fn all_edges(dataset: &Dataset) -> Vec<Edge> {
        let mut all = Vec::new();
        for_each_edge(dataset, &mut |edge| all.push(edge)).unwrap();
        all
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn leaks_are_what_a_look_at_every_pair_finds(
            facts in prop::collection::vec((0u64..30, 0u32..3, 0u64..30), 3..120), at_once in 1usize..9,
        ) {
            let directory = tempfile::tempdir().unwrap();
            let third = facts.len() / 3;
            let parts = [&facts[..third], &facts[third..2 * third], &facts[2 * third..]];
            for (name, part) in ["train.txt", "valid.txt", "test.txt"].into_iter().zip(parts) {
                let line = |fact: &(u64, u32, u64)| format!("n{}\tr{}\tn{}\n", fact.0, fact.1, fact.2);
                let text: String = part.iter().map(line).collect();
                std::fs::write(directory.path().join(name), text).unwrap();
            }
            let from = Some(directory.path().to_path_buf());
            let dataset = make(directory.path(), &Request { format: "triples".into(), from, ..Request::default() });
            let graph = all_edges(&dataset);
            let seen: BTreeSet<NodeId> = graph.iter().flat_map(|edge| [edge.source, edge.target]).collect();
            for split in [HeldOut::Valid, HeldOut::Test] {
                let mut rows = Vec::new();
                EdgeRows::open(&dataset, split).unwrap().for_each(|edge| rows.push(edge)).unwrap();
                let nodes: BTreeSet<NodeId> = rows.iter().flat_map(|edge| [edge.source, edge.target]).collect();
                let expected = SplitLeaks {
                    also_train: rows.iter().filter(|edge| graph.contains(edge)).count() as u64,
                    unseen_nodes: nodes.difference(&seen).count() as u64,
                };
                prop_assert_eq!(SplitLeaks::count_by(&dataset, split, at_once).unwrap(), expected);
            }
        }
    }

    #[test]
    fn edges_that_are_held_out_of_an_undirected_graph_do_not_train() {
        let directory = tempfile::tempdir().unwrap();
        let lines: String = (0..400u64).map(|at| format!("{},{}\n", at * 7 % 50, at * at % 50)).collect();
        std::fs::write(directory.path().join("e.csv"), lines).unwrap();
        let request = Request {
            format: "csv".into(),
            edges: Some(directory.path().join("e.csv")),
            add_reverse: true,
            remove_duplicates: true,
            hold_out: Some("valid:10%,test:20%".parse::<HoldOut>().unwrap()),
            ..Request::default()
        };
        let dataset = make(directory.path(), &request);
        let splits = dataset.manifest().splits.as_ref().unwrap();
        assert!(splits.valid > 0 && splits.test > splits.valid);
        assert!(dataset.manifest().edges.undirected);
        for split in [HeldOut::Valid, HeldOut::Test] {
            assert_eq!(SplitLeaks::count(&dataset, split).unwrap().also_train, 0);
        }
    }
}
