//! Samples by level, for nodes whose hidden rows are pulled from a history (OUTRE).
//!
//! The targets have level L, the number of layers. A node of level k is computed up to the value that leaves layer k - 1,
//! so a node that is met from one of level k has level k - 1 at least, and level 0 has no neighbours. A node that is met at
//! hop h has level L - h, and its value of that level enters layer L - h. If it is pulled, that value is supplied. In DENSE
//! the nodes that meet it use the same neighbours in every layer, so its values before that one are still needed: it has
//! level L - h - 1. A neighbour of a target has level L - 2 if it is pulled, and a node of hop 2 has level L - 3. A node is
//! pulled once at most, and not at hop L, where its value is its feature row.
//!
//! Levels fall from hop to hop, so they are found hop by hop: nodes that are pulled at a hop wait until the nodes of the next
//! one have been expanded, and what only they lead to is found with the hop after. No node is in a sample whose feature row
//! no layer needs. Nodes are ordered by level, pulled ones last in theirs: so a layer reads a suffix that begins with those
//! that are pulled as they enter it, and writes a shorter one.

use super::{BatchSampling, Pulls, SamplerScratch, Settings};
use crate::found::PulledNodes;
use crate::memory::Ledger;
use crate::topology::Topology;
use crate::{Form, Result, SampleError};

impl Settings {
    /// Fails if samples of these settings cannot have pulled nodes.
    pub fn check_pulls(&self) -> Result<()> {
        match (self.form, self.fanouts.len()) {
            (Form::Dense, 2..) => Ok(()),
            (form, layers) => Err(SampleError::Pulls { form, layers }),
        }
    }
}

/// Asks which nodes of a hop are pulled.
pub(super) fn choose<T: Topology>(
    scratch: &mut SamplerScratch<T>,
    hop: usize,
    pulls: Pulls,
    ledger: &mut Ledger,
) -> Result<()> {
    let found = &mut scratch.found;
    if found.pulled.len() < hop {
        let missing = hop - found.pulled.len();
        ledger.reserve_exact(&mut found.pulled, missing)?;
        found.pulled.resize_with(hop, PulledNodes::default);
    }
    let pulled = &mut found.pulled[hop - 1].nodes;
    for (number, index) in (found.hop_starts[hop]..found.hop_starts[hop + 1]).enumerate() {
        if pulls(hop, number, found.nodes[index as usize]) {
            ledger.reserve(pulled, 1)?;
            pulled.push(index);
        }
    }
    Ok(())
}

/// Lists the pulled nodes of a hop as the frontier, or the others.
pub(super) fn list<T: Topology>(
    scratch: &mut SamplerScratch<T>,
    hop: usize,
    pulled: bool,
    ledger: &mut Ledger,
) -> Result<()> {
    let (found, frontier) = (&scratch.found, &mut scratch.frontier);
    let own = found.hop_starts[hop]..found.hop_starts[hop + 1];
    frontier.clear();
    ledger.reserve(frontier, own.len())?;
    let mut pulled_nodes = found.pulled_at(hop).iter().copied().peekable();
    let listed = own.filter(|index| pulled_nodes.next_if_eq(index).is_some() == pulled);
    frontier.extend(listed.map(|index| found.nodes[index as usize]));
    Ok(())
}

impl<T: Topology> BatchSampling<'_, T> {
    /// The degrees of nodes that are not expanded, in canonical order, if they are carried. Others are in sections.
    pub(super) fn degrees_of_level_0(
        &self,
        scratch: &mut SamplerScratch<T>,
        ledger: &mut Ledger,
    ) -> Result<()> {
        let layers = self.settings.fanouts.len();
        scratch.found.degrees.clear();
        if !self.settings.carry.degrees {
            return Ok(());
        }
        // What is pulled at the hop before the last has level 0, too.
        list(scratch, layers - 1, true, ledger)?;
        let found = &mut scratch.found;
        let deepest = &found.nodes[found.hop_starts[layers] as usize..];
        ledger.reserve(&mut found.degrees, deepest.len() + scratch.frontier.len())?;
        self.topology.degrees(deepest, &scratch.workspace, &mut found.degrees)?;
        self.topology.degrees(&scratch.frontier, &scratch.workspace, &mut found.degrees)
    }
}
