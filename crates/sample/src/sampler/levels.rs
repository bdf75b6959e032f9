//! Samples by level, for neighbours of targets whose hidden rows are pulled from a history (OUTRE).
//!
//! The targets have level L, the number of layers. A node of level k is computed up to the value that leaves layer k - 1,
//! so a node that is met from one of level k has level k - 1 at least, and level 0 has no neighbours. A pulled node is a
//! neighbour of a target whose value that enters the last layer is supplied. In DENSE the target's other layers use the
//! same neighbours, so the node's values before that one are still needed: it has level L - 2.
//!
//! Levels fall from hop to hop, so they are found hop by hop: pulled nodes wait until the nodes of hop 2 have been
//! expanded, and what only they lead to is found with hop 3. No node is in a sample whose feature row no layer needs.
//! Nodes are ordered by level, pulled ones last in theirs: so the last layer reads a suffix that begins with them, and
//! every other layer a suffix as in a sample without them.

use super::{BatchSampling, Pulls, SamplerScratch, Settings};
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

/// Asks which nodes of hop 1 are pulled.
pub(super) fn choose<T: Topology>(
    scratch: &mut SamplerScratch<T>,
    pulls: Pulls,
    ledger: &mut Ledger,
) -> Result<()> {
    let found = &mut scratch.found;
    for (number, index) in (found.hop_starts[1]..found.hop_starts[2]).enumerate() {
        if pulls(number, found.nodes[index as usize]) {
            ledger.reserve(&mut found.pulled, 1)?;
            found.pulled.push(index);
        }
    }
    Ok(())
}

/// Lists the pulled nodes of hop 1 as the frontier, or the others.
pub(super) fn list<T: Topology>(
    scratch: &mut SamplerScratch<T>,
    pulled: bool,
    ledger: &mut Ledger,
) -> Result<()> {
    let (found, frontier) = (&scratch.found, &mut scratch.frontier);
    let own = found.hop_starts[1]..found.hop_starts[2];
    frontier.clear();
    ledger.reserve(frontier, own.len())?;
    let mut pulled_nodes = found.pulled.iter().copied().peekable();
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
        // Of two layers, pulled nodes have level 0, too.
        scratch.frontier.clear();
        if layers == 2 {
            list(scratch, true, ledger)?;
        }
        let found = &mut scratch.found;
        let deepest = &found.nodes[found.hop_starts[layers] as usize..];
        ledger.reserve(&mut found.degrees, deepest.len() + scratch.frontier.len())?;
        self.topology.degrees(deepest, &mut found.degrees)?;
        self.topology.degrees(&scratch.frontier, &mut found.degrees)
    }
}
