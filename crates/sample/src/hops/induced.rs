//! All edges between the nodes of a batch. It reads the whole adjacency of each of them.

use super::graph::HopGraph;
use super::sample::HopSample;
use super::wave::Naming;
use crate::Result;
use crate::memory::Ledger;
use crate::relabel::Relabel;
use crate::sampler::PREFETCH_BOUNDS;
use crate::topology::StoredId;

/// Neighbours looked up at a time. Their table entries are prefetched together.
const LOOKED_UP: usize = 128;

/// Replaces the edges of a sample by all that are between its nodes, by target, then by position.
pub(super) fn induce<G: HopGraph, N: Naming<G::StoredId>, R: Relabel>(
    graph: &G,
    naming: N,
    table: &R,
    out: &mut HopSample,
    ledger: &mut Ledger,
) -> Result<()> {
    out.clear_edges();
    out.nodes.iter().take(PREFETCH_BOUNDS).for_each(|node| graph.prefetch(*node));
    for target in 0..out.nodes.len() {
        if let Some(ahead) = out.nodes.get(target + PREFETCH_BOUNDS) {
            graph.prefetch(*ahead);
        }
        let (node, tree) = (out.nodes[target], naming.tree(out, target));
        let list = graph.list(node);
        let mut position = 0;
        for ids in list.first.chunks(LOOKED_UP).chain(list.second.chunks(LOOKED_UP)) {
            let words = || ids.iter().map(|id| naming.word(*id, tree).node());
            words().for_each(|word| table.prefetch(word));
            ledger.reserve(&mut out.sources, ids.len())?;
            ledger.reserve(&mut out.targets, ids.len())?;
            ledger.reserve(&mut out.edges, ids.len())?;
            for word in words() {
                if let Some(source) = table.find(word) {
                    out.sources.push(source);
                    out.targets.push(target as u32);
                    out.edges.push(graph.edge(node, position));
                }
                position += 1;
            }
        }
    }
    Ok(())
}
