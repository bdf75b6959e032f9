//! Pruned sampling. Sample, leaving out nodes that `expand` rejects. The strategy supplies such a node's value as it
//! enters layer `L - hop`. Then follow what the targets need, from the last layer to the first. If a layer needs a
//! value of such a node that must be computed and is not the supplied one, the node is expanded regardless from now on.
//! Sample again until no node is added to that set. The set only grows, so this ends.

use super::{BatchSampling, Expand, SamplerScratch};
use crate::memory::Ledger;
use crate::relabel::Relabel;
use crate::topology::Topology;
use crate::{Result, Sample};
use esker_types::NodeId;
use rustc_hash::{FxHashMap, FxHashSet};

/// Bytes per remembered answer or node in the maps just after they have grown.
const REMEMBERED_BYTES: u64 = 64;

pub(super) fn run<T: Topology, R: Relabel + Sync + Send>(
    batch: &BatchSampling<T>,
    table: &mut R,
    scratch: &mut SamplerScratch<T>,
    expand: &mut dyn FnMut(u32, NodeId) -> bool,
    out: &mut Sample,
    ledger: &mut Ledger,
) -> Result<()> {
    let mut answers: FxHashMap<(u32, NodeId), bool> = FxHashMap::default();
    let mut regardless: FxHashSet<NodeId> = FxHashSet::default();
    loop {
        let remembered = answers.len() + regardless.len();
        let mut decide = |hop: u32, node: NodeId| {
            regardless.contains(&node) || *answers.entry((hop, node)).or_insert_with(|| expand(hop, node))
        };
        let decide: Expand = &mut decide;
        batch.discover(table, scratch, Some(decide), ledger)?;
        scratch.found.assemble(batch.settings.form, out, ledger)?;
        let before = regardless.len();
        mark_unneeded(out, ledger, |node| {
            regardless.insert(node);
        })?;
        ledger.charge((answers.len() + regardless.len() - remembered) as u64 * REMEMBERED_BYTES)?;
        if regardless.len() == before {
            return Ok(());
        }
    }
}

/// Follows what the targets of a pruned sample need and marks the feature rows that nothing reads. Calls `expand` with
/// nodes that were left out and must not be.
pub(crate) fn mark_unneeded(
    sample: &mut Sample,
    ledger: &mut Ledger,
    mut expand: impl FnMut(NodeId),
) -> Result<()> {
    if sample.unexpanded.is_empty() {
        return Ok(());
    }
    let (nodes, layers) = (sample.node_ids.len(), sample.layers());
    let mut needed = std::mem::take(&mut sample.unneeded);
    needed.clear();
    ledger.reserve_exact(&mut needed, nodes)?;
    needed.resize(nodes, false);
    needed[sample.node_id_offsets[layers] as usize..].fill(true);
    let mut below: Vec<bool> = Vec::new();
    ledger.reserve_exact(&mut below, nodes)?;
    for layer in (0..layers).rev() {
        let view = sample.layer(layer);
        below.clear();
        below.resize(nodes, false);
        // The value that enters layer L - hop is an output of the previous layer, for the deepest hop among its
        // outputs.
        let supplied = sample.node_id_offsets[layer + 1]..sample.node_id_offsets[layer + 2];
        for (node, bounds) in view.outputs.clone().zip(view.nbr_offsets.windows(2)) {
            if !needed[node as usize] {
                continue;
            }
            if sample.unexpanded[node as usize] {
                if !supplied.contains(&node) {
                    expand(sample.node_ids[node as usize]);
                }
                continue;
            }
            below[node as usize] = true;
            view.nbrs[bounds[0] as usize..bounds[1] as usize]
                .iter()
                .for_each(|nbr| below[nbr.index()] = true);
        }
        std::mem::swap(&mut needed, &mut below);
    }
    needed.iter_mut().for_each(|needed| *needed = !*needed);
    sample.unneeded = needed;
    ledger.release(crate::memory::held(&below));
    Ok(())
}
