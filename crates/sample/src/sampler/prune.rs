//! Pruned sampling. The definition: sample, leaving out nodes that `expand` rejects; every node left out that a list of
//! its own hop or of a deeper one names is needed exactly, so it joins the nodes expanded regardless; sample again,
//! until no more join. They only ever join, so it ends; each round draws the same for a node of the same hop.

use super::{Expand, Position, Scratch, Settings, hop, hop_key};
use crate::relabel::Relabel;
use crate::topology::Topology;
use crate::{Bound, Result, Sample};
use esker_types::NodeId;
use std::collections::{HashMap, HashSet};

#[allow(clippy::too_many_arguments)] // As in `super::run`.
pub(super) fn run<T: Topology, R: Relabel + Sync + Send>(
    topology: &T,
    settings: &Settings,
    table: &mut R,
    scratch: &mut Scratch<T>,
    at: Position,
    seeds: &[NodeId],
    expand: Expand,
    out: &mut Sample,
) -> Result<()> {
    let mut answers: HashMap<(u32, NodeId), bool> = HashMap::new();
    let mut regardless: HashSet<NodeId> = HashSet::new();
    loop {
        let mut decide = |hop: u32, node: NodeId| {
            regardless.contains(&node) || *answers.entry((hop, node)).or_insert_with(|| expand(hop, node))
        };
        let met_again = round(topology, settings, table, scratch, at, seeds, &mut decide)?;
        if met_again.is_empty() {
            break;
        }
        regardless.extend(met_again);
    }
    scratch.found.assemble(settings.form, out);
    Ok(())
}

/// Samples once; returns the nodes left out that are needed exactly.
fn round<T: Topology, R: Relabel + Sync + Send>(
    topology: &T,
    settings: &Settings,
    table: &mut R,
    scratch: &mut Scratch<T>,
    at: Position,
    seeds: &[NodeId],
    decide: Expand,
) -> Result<Vec<NodeId>> {
    let bound = Bound::new(settings, seeds.len() as u64, topology.nodes(), topology.entries());
    scratch.begin(table, seeds, topology.nodes(), bound.nodes)?;
    scratch.found.skipped.resize(scratch.found.nodes.len(), false);
    scratch.found.sections.resize_with(settings.fanouts.len() + 1, Default::default);
    let mut met_again = Vec::new();
    for (depth, fanout) in settings.fanouts.iter().enumerate() {
        let first = scratch.found.hop_starts[depth] as usize;
        let frontier = &scratch.found.nodes[first..];
        let lists = topology.hop(frontier, &mut scratch.workspace)?;
        let job = hop::Job {
            lists: &lists,
            nodes: frontier,
            skipped: &scratch.found.skipped[first..],
            fanout: *fanout,
            key: hop_key(settings.seed, at, depth),
            carry: settings.carry,
            first_place: scratch.found.nodes.len() as u32,
            threads: 1,
        };
        hop::expand(&job, table, &mut scratch.waves, &mut scratch.fresh, &mut scratch.found.sections[depth])?;
        drop(lists);
        let known = |place: &&u32| (**place as usize) < scratch.found.skipped.len();
        let places = scratch.found.sections[depth].places.iter().filter(known);
        let left_out = places.filter(|place| scratch.found.skipped[**place as usize]);
        met_again.extend(left_out.map(|place| scratch.found.nodes[*place as usize]));
        let middle = depth + 1 < settings.fanouts.len();
        let fresh = scratch.fresh.nodes().iter();
        scratch.found.skipped.extend(fresh.map(|node| middle && !decide(depth as u32 + 1, *node)));
        scratch.close_hop()?;
    }
    Ok(met_again)
}
