//! The largest weakly connected component, by union-find over a stream of edges.

use super::edges::CheckedEdges;
use super::selection::{Bitmap, Selection};
use crate::source::EdgeSource;
use crate::{ImportWorkspace, MINIMUM_MEMORY_BYTES, Result};
use esker_types::Unit;

/// The nodes of the largest component. Ties go to the component with the smallest node.
pub fn largest(
    edges: &dyn EdgeSource,
    stated: Option<u64>,
    workspace: &ImportWorkspace,
) -> Result<Selection> {
    workspace.progress.stage("components", edges.count(), Unit::Count("edges"));
    let mut parents: Vec<u64> = Vec::new();
    if let Some(nodes) = stated {
        check_budget(nodes, workspace)?;
        parents.extend(0..nodes);
    }
    let (mut stream, mut chunk) = (CheckedEdges::open(edges, stated, 0)?, Vec::new());
    while stream.next(&mut chunk)? {
        let top = chunk.iter().map(|edge| edge.source.max(edge.target)).max().unwrap_or(0);
        if top >= parents.len() as u64 {
            check_budget(top + 1, workspace)?;
            parents.extend(parents.len() as u64..=top);
        }
        for edge in &chunk {
            join(&mut parents, edge.source, edge.target);
        }
        workspace.progress.advance(chunk.len() as u64);
    }
    let mut sizes = vec![0u64; parents.len()];
    for node in 0..parents.len() as u64 {
        sizes[root(&mut parents, node) as usize] += 1;
    }
    // A root is the smallest node of its component, so the first of the largest ones wins a tie.
    let best =
        sizes.iter().max().and_then(|most| sizes.iter().position(|size| size == most)).unwrap_or(0) as u64;
    let mut bits = Bitmap::new(parents.len() as u64);
    for node in 0..parents.len() as u64 {
        if root(&mut parents, node) == best {
            bits.insert(node);
        }
    }
    workspace.progress.finish();
    Ok(Selection::new(bits))
}

/// Parents and sizes take a word per node each, the selection a little over a bit.
fn check_budget(nodes: u64, workspace: &ImportWorkspace) -> Result<()> {
    let bytes = nodes.saturating_mul(16).saturating_add(Selection::memory_bytes(nodes));
    workspace.require(&format!("--largest-component of {nodes} nodes"), bytes, MINIMUM_MEMORY_BYTES / 2)
}

fn root(parents: &mut [u64], mut node: u64) -> u64 {
    while parents[node as usize] != node {
        let grandparent = parents[parents[node as usize] as usize];
        parents[node as usize] = grandparent;
        node = grandparent;
    }
    node
}

fn join(parents: &mut [u64], a: u64, b: u64) {
    let (a, b) = (root(parents, a), root(parents, b));
    parents[a.max(b) as usize] = a.min(b);
}
