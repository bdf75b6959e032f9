//! What is learned from links: every edge of the graph trains, and some edges were held out for validation and test.

use crate::task::SplitName;
use crate::{Result, TrainError};
use esker_sample::{Edge, EdgeRows, HeldOut};
use esker_store::{Dataset, SplitInfo, SplitOver};
use std::path::Path;
use std::sync::Arc;

/// The row of an inverse relation has a number, too.
const MOST_RELATIONS: u64 = 1 << 31;

/// The edges of a dataset that are learned or held out.
#[derive(Debug, Clone)]
pub struct LinkTask {
    /// Nodes of the graph: the candidates of every edge.
    pub nodes: u64,
    /// Relations of the graph, at least 1.
    pub relations: u32,
    /// Edges that train.
    pub train: u64,
    /// Edges for choosing the best model.
    pub valid: Arc<Vec<Edge>>,
    /// Edges for the result at the end.
    pub test: Arc<Vec<Edge>>,
}

impl LinkTask {
    /// The splits of a dataset. The error names what it lacks.
    pub fn of(dataset: &Dataset) -> Result<&SplitInfo> {
        let splits = dataset.manifest().splits.as_ref();
        match splits.filter(|splits| splits.over == SplitOver::Edges) {
            None => Err(TrainError::NoEdgeSplit { dataset: dataset.directory().to_path_buf() }),
            Some(splits) => {
                let relations = dataset.manifest().edges.relations.as_ref();
                check_relations(dataset.directory(), relations.map_or(1, |relations| relations.count))?;
                Ok(splits)
            }
        }
    }

    /// Relations of a dataset, at least 1. [`LinkTask::of`] refuses more than there are numbers for.
    pub fn relations_of(dataset: &Dataset) -> u32 {
        let relations = dataset.manifest().edges.relations.as_ref();
        relations.map_or(1, |relations| u32::try_from(relations.count.max(1)).unwrap_or(u32::MAX))
    }

    /// Bytes that [`LinkTask::load`] will allocate.
    pub fn bytes_for(dataset: &Dataset) -> u64 {
        let held_out = dataset.manifest().splits.as_ref().map_or(0, |splits| splits.valid + splits.test);
        held_out.saturating_mul(size_of::<Edge>() as u64)
    }

    /// Loads the held-out edges.
    pub fn load(dataset: &Dataset) -> Result<LinkTask> {
        let splits = LinkTask::of(dataset)?;
        let manifest = dataset.manifest();
        let (nodes, relations) = (manifest.nodes.count, LinkTask::relations_of(dataset));
        let read = |split: HeldOut, count: u64| -> Result<Arc<Vec<Edge>>> {
            let mut edges = Vec::with_capacity(count as usize);
            if count > 0 {
                EdgeRows::open(dataset, split)?.for_each(|edge| edges.push(edge))?;
            }
            Ok(Arc::new(edges))
        };
        Ok(LinkTask {
            nodes,
            relations,
            train: manifest.edges.count,
            valid: read(HeldOut::Valid, splits.valid)?,
            test: read(HeldOut::Test, splits.test)?,
        })
    }

    /// The held-out edges of a split. Those that train are not listed.
    pub fn split(&self, name: SplitName) -> Option<&Arc<Vec<Edge>>> {
        match name {
            SplitName::Train => None,
            SplitName::Valid => Some(&self.valid),
            SplitName::Test => Some(&self.test),
        }
    }
}

/// Refuses more relations than have numbers together with their inverses.
fn check_relations(dataset: &Path, count: u64) -> Result<()> {
    match count > MOST_RELATIONS {
        true => Err(TrainError::TooManyRelations {
            dataset: dataset.to_path_buf(),
            found: count,
            most: MOST_RELATIONS,
        }),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relations_have_numbers_with_their_inverses() {
        let check = |count| check_relations(Path::new("facts"), count);
        assert!(check(0).is_ok() && check(1 << 31).is_ok());
        for count in [(1 << 31) + 1, 1 << 32, (1 << 32) + 3, u64::MAX] {
            let said = check(count).map_or_else(|error| error.to_string(), |()| "accepted".to_string());
            assert!(said.contains("facts") && said.contains(&count.to_string()), "{said}");
        }
    }
}
