//! What is learned from links: every edge of the graph trains, and some edges were held out for validation and test.

use crate::task::SplitName;
use crate::{Result, TrainError};
use esker_sample::{Edge, EdgeRows, HeldOut};
use esker_store::{Dataset, SplitInfo, SplitOver};
use std::sync::Arc;

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
            Some(splits) => Ok(splits),
        }
    }

    /// Relations of a dataset, at least 1.
    pub fn relations_of(dataset: &Dataset) -> u32 {
        dataset.manifest().edges.relations.as_ref().map_or(1, |relations| relations.count.max(1) as u32)
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
