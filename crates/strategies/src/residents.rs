//! Training that sees resident nodes only, with the whole graph in memory: the twin of a partition buffer (Marius++).
//! Batches of a step over partitions have the neighbours, degrees and negatives that a buffer with the same partitions
//! would give them. Evaluation sees the whole graph.

use crate::job::LoadedTopology;
use crate::sampling::ResidentTopology;
use esker_sample::negatives::PoolOfBatch;
use esker_sample::{
    ByStep, InMemory, NodePartitions, Order, ResidentPool, StepSubgraphs, StoredId, SubgraphsInMemory,
};
use std::sync::{Arc, OnceLock};

/// Subgraphs in memory where several samplers may be in different steps.
const MOST_KEPT: usize = 2;

/// The partitions whose nodes are resident in turn, and the subgraphs of the steps.
#[derive(Debug, Clone)]
pub struct Residents {
    partitions: NodePartitions,
    edge_ids: bool,
    samplers: usize,
    topology: Arc<OnceLock<StepTopology>>,
}

/// What the residents of a run take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResidentsOutline {
    /// The most nodes that are resident at a time.
    pub nodes: u64,
}

/// A topology in memory with the subgraphs of steps, with ids of either width.
#[derive(Debug)]
pub(crate) enum StepTopology {
    Narrow(StepGraph<u32>),
    Wide(StepGraph<u64>),
}

/// The same for one width.
#[derive(Debug)]
pub(crate) struct StepGraph<W: StoredId> {
    pub by_step: ByStep<Arc<InMemory<W>>>,
    subgraphs: Arc<dyn StepSubgraphs<W>>,
}

impl Residents {
    /// Residents in these partitions. `edge_ids` says whether samples carry edge ids.
    pub fn new(partitions: NodePartitions, edge_ids: bool, samplers: usize) -> Residents {
        Residents { partitions, edge_ids, samplers, topology: Arc::default() }
    }

    /// Subgraphs that may be in memory at a time.
    pub(crate) fn subgraphs(samplers: usize) -> u64 {
        // One sampler frees that of a step before it makes the next.
        if samplers <= 1 { 1 } else { (MOST_KEPT + samplers) as u64 }
    }

    /// Negatives from the residents of the steps of an order. `None` if the topology is not loaded.
    pub fn pool(&self, topology: &LoadedTopology, order: Arc<dyn Order>) -> Option<Arc<dyn PoolOfBatch>> {
        let topology = self.topology(topology.resident.as_ref()?);
        Some(match topology {
            StepTopology::Narrow(graph) => Arc::new(ResidentPool::new(order, graph.subgraphs.clone())),
            StepTopology::Wide(graph) => Arc::new(ResidentPool::new(order, graph.subgraphs.clone())),
        })
    }

    /// The topology that shows residents. All users of a job share its subgraphs.
    pub(crate) fn topology(&self, whole: &ResidentTopology) -> &StepTopology {
        self.topology.get_or_init(|| match whole {
            ResidentTopology::Narrow(graph) => StepTopology::Narrow(self.graph(graph)),
            ResidentTopology::Wide(graph) => StepTopology::Wide(self.graph(graph)),
        })
    }

    fn graph<W: StoredId>(&self, whole: &Arc<InMemory<W>>) -> StepGraph<W> {
        let kept = if self.samplers > 1 { MOST_KEPT } else { 1 };
        let subgraphs = SubgraphsInMemory::new(whole.clone(), self.partitions.clone(), self.edge_ids, kept);
        let subgraphs: Arc<dyn StepSubgraphs<W>> = Arc::new(subgraphs);
        StepGraph { by_step: ByStep::new(whole.clone(), subgraphs.clone()), subgraphs }
    }
}
