//! Samples in the order of PyG's loaders, with the options they have: the seeds first, then hop after hop as it is
//! discovered. [`HopSampler`] reads adjacency in memory, its own or borrowed ([`BorrowedCsc`]), and uses the draws,
//! tables and prefetching of [`Sampler`](crate::Sampler). Without options it takes the very neighbours that a DENSE
//! sample of the same batch has. It knows no strategies, traces or adjacency on disk.
//!
//! ```
//! use esker_sample::hops::{BorrowedCsc, BorrowedNumbers, HopSample, HopSampler, HopSettings, NeighbourChoice};
//! use esker_sample::{Fanout, Position};
//! use esker_types::NodeId;
//!
//! // Edges 1 -> 0, 2 -> 0 and 0 -> 2.
//! let (colptr, row) = (vec![0i64, 2, 2, 3], vec![1i64, 2, 0]);
//! let graph = BorrowedCsc::new(BorrowedNumbers::Wide(&colptr), &row, None)?;
//! let settings = HopSettings { fanouts: vec![Fanout::All, Fanout::AtMost(5)], ..HopSettings::default() };
//! let mut sampler = HopSampler::new(graph, settings, NeighbourChoice::Uniform, 64 << 20)?;
//! let mut sample = HopSample::default();
//! sampler.sample(Position { epoch: 0, batch: 0 }, &[NodeId(0)], None, &mut sample)?;
//! assert_eq!(sample.nodes, [NodeId(0), NodeId(1), NodeId(2)]);
//! assert_eq!((&sample.sources[..], &sample.targets[..]), (&[1, 2, 0][..], &[0, 0, 2][..]));
//! assert_eq!((&sample.nodes_by_hop[..], &sample.edges_by_hop[..]), (&[1, 2, 0][..], &[2, 1][..]));
//! # Ok::<(), esker_sample::SampleError>(())
//! ```

mod draw;
mod graph;
mod induced;
mod sample;
mod times;
mod wave;
mod weights;

pub use graph::{BorrowedCsc, BorrowedId, BorrowedNumbers, HopGraph};
pub use sample::HopSample;
pub use times::{NeighbourTimes, TemporalStrategy, ordered_time};
pub use weights::{EdgeWeights, WeightColumn};

use crate::memory::{Ledger, held};
use crate::relabel::{DirectTable, HashedTable, NewNodes, Relabel};
use crate::sampler::{DIRECT_PART, Fanout, MOST_NODES, Position, RelabelTable, hop_key};
use crate::topology::StoredId;
use crate::{Result, SampleError};
use draw::HopDraw;
use esker_types::NodeId;
use std::sync::Arc;
use induced::induce;
use wave::{ById, ByTree, HopInto, HopToExpand, HopWaves, Naming};

/// How to sample hop by hop.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct HopSettings {
    /// Random seed of every draw.
    pub seed: u64,
    /// Fan-out by hop, the hop next to the seeds first. A fan-out of 0 takes none.
    pub fanouts: Vec<Fanout>,
    /// Whether a node draws with replacement: exactly as many neighbours as the fan-out says, if it has any. A fan-out of
    /// all takes each once.
    pub replace: bool,
    /// Whether each seed has a tree of its own, which shares no nodes with others.
    pub disjoint: bool,
    /// Which edges the sample has.
    pub edges: HopEdges,
}

/// Which edges are between the nodes of a hop sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HopEdges {
    /// Those that were sampled.
    #[default]
    Directional,
    /// Those that were sampled and the reverse of each, every pair of nodes once, by target, then by source. An edge and
    /// the reverse of another may be between the same nodes: then the edge is taken.
    Bidirectional,
    /// All that the graph has, by target, then by position.
    Induced,
}

/// How a node chooses among its neighbours.
#[derive(Debug, Clone, Default)]
pub enum NeighbourChoice {
    /// All alike.
    #[default]
    Uniform,
    /// By weight: one after the other, each in proportion to its weight among those that remain. Without weight it is never
    /// drawn; a fan-out of all takes every neighbour.
    Weighted(Arc<EdgeWeights>),
    /// Among those that are not later than the seed. Makes samples disjoint.
    Temporal(Arc<NeighbourTimes>, TemporalStrategy),
}

impl NeighbourChoice {
    /// Prefetches what a draw from a node reads first.
    #[inline(always)]
    fn prefetch<G: HopGraph>(&self, graph: &G, node: NodeId, degree: u32) {
        match self {
            NeighbourChoice::Uniform => {}
            NeighbourChoice::Weighted(weights) => weights.prefetch(graph.start(node), degree),
            NeighbourChoice::Temporal(times, _) => times.prefetch(graph.start(node), degree),
        }
    }

    /// Fails unless weights or times are of this graph.
    fn check<G: HopGraph>(&self, graph: &G) -> Result<()> {
        let fit = match self {
            NeighbourChoice::Uniform => true,
            NeighbourChoice::Weighted(weights) => weights.fit(graph),
            NeighbourChoice::Temporal(times, _) => times.fit(graph),
        };
        match fit {
            true => Ok(()),
            false => Err(SampleError::HopOptions {
                what: "weights or times are those of another graph",
                remedy: "make them from the graph that is sampled",
            }),
        }
    }
}

/// Samples batches hop by hop, one after the other, with its own buffers.
pub struct HopSampler<G: HopGraph> {
    graph: G,
    settings: HopSettings,
    choice: NeighbourChoice,
    threads: usize,
    most_bytes: u64,
    table: RelabelTable,
    scratch: HopScratch<G::StoredId>,
    /// The times of the batch's seeds.
    seed_times: Vec<i64>,
}

/// The state of a batch while it is sampled.
struct HopScratch<W> {
    new_nodes: NewNodes,
    waves: HopWaves<W>,
    /// Waves of disjoint samples.
    tree_waves: HopWaves<u64>,
}

impl<W> Default for HopScratch<W> {
    fn default() -> HopScratch<W> {
        HopScratch {
            new_nodes: NewNodes::default(),
            waves: HopWaves::default(),
            tree_waves: HopWaves::default(),
        }
    }
}

impl<G: HopGraph> HopSampler<G> {
    /// A sampler that uses at most `most_bytes`, including the sample it makes, but neither the graph nor what `choice`
    /// shares with others. It uses the table per node of the graph if that leaves half of them free.
    pub fn new(
        graph: G,
        mut settings: HopSettings,
        choice: NeighbourChoice,
        most_bytes: u64,
    ) -> Result<HopSampler<G>> {
        settings.disjoint |= matches!(choice, NeighbourChoice::Temporal(..));
        if settings.disjoint && settings.edges == HopEdges::Induced {
            return Err(SampleError::HopOptions {
                what: "induced edges are not sampled in disjoint trees, nor by time",
                remedy: "leave out `disjoint` and times, or take the subgraph type `directional`",
            });
        }
        choice.check(&graph)?;
        let direct = DirectTable::bytes_for(graph.nodes());
        let is_direct = !settings.disjoint && graph.nodes() <= MOST_NODES && direct <= most_bytes / DIRECT_PART;
        let table = match is_direct {
            true => RelabelTable::Direct(DirectTable::new(graph.nodes())),
            false => {
                Ledger::new(0, most_bytes).charge(HashedTable::bytes_for(0))?;
                RelabelTable::Hashed(HashedTable::new())
            }
        };
        let scratch = HopScratch::default();
        Ok(HopSampler { graph, settings, choice, threads: 1, most_bytes, table, scratch, seed_times: Vec::new() })
    }

    /// The same sampler, using this many threads of the current rayon pool.
    pub fn with_threads(mut self, threads: usize) -> HopSampler<G> {
        self.threads = threads.max(1);
        self
    }

    /// Draws with another seed from now on.
    pub fn set_seed(&mut self, seed: u64) {
        self.settings.seed = seed;
    }

    /// Its settings.
    pub fn settings(&self) -> &HopSettings {
        &self.settings
    }

    /// Bytes allocated now, without the graph.
    pub fn bytes(&self) -> u64 {
        let table = match &self.table {
            RelabelTable::Direct(table) => table.bytes(),
            RelabelTable::Hashed(table) => table.bytes(),
        };
        let HopScratch { new_nodes, waves, tree_waves } = &self.scratch;
        held(&self.seed_times) + table + new_nodes.bytes() + waves.bytes() + tree_waves.bytes()
    }

    /// Samples the neighbourhood of `seeds`, which may repeat. `seed_times` has the time of each seed. If memory is
    /// refused, it frees what earlier batches left and tries once more, so that a refusal is about this batch.
    pub fn sample(
        &mut self,
        at: Position,
        seeds: &[NodeId],
        seed_times: Option<&[i64]>,
        out: &mut HopSample,
    ) -> Result<()> {
        let nodes = self.graph.nodes();
        if let Some(seed) = seeds.iter().find(|seed| seed.0 >= nodes) {
            return Err(SampleError::Seed { found: seed.0, last: nodes.saturating_sub(1) });
        }
        for again in [false, true] {
            let mut ledger = Ledger::new(self.bytes() + out.allocated_bytes(), self.most_bytes);
            match self.sample_within(at, seeds, seed_times, out, &mut ledger) {
                Err(SampleError::Memory { .. }) if !again => {
                    self.scratch = HopScratch::default();
                    *out = HopSample::default();
                    if let RelabelTable::Hashed(table) = &mut self.table {
                        *table = HashedTable::new();
                    }
                }
                result => return result,
            }
        }
        Ok(())
    }

    /// Notes the time of every seed, if there are times.
    fn take_seed_times(&mut self, seeds: &[NodeId], given: Option<&[i64]>, ledger: &mut Ledger) -> Result<()> {
        let wrong = |expected: String, found: String| Err(SampleError::SeedTimes { expected, found });
        self.seed_times.clear();
        let NeighbourChoice::Temporal(times, _) = &self.choice else {
            return match given {
                None => Ok(()),
                Some(given) => wrong("none".into(), format!("{} of them", given.len())),
            };
        };
        ledger.reserve(&mut self.seed_times, seeds.len())?;
        match given {
            Some(given) if given.len() == seeds.len() => self.seed_times.extend_from_slice(given),
            Some(given) => return wrong(format!("{} of them", seeds.len()), given.len().to_string()),
            None => {
                self.seed_times.extend(seeds.iter().filter_map(|seed| times.of_node(*seed)));
                if self.seed_times.len() != seeds.len() {
                    return wrong(format!("{}, as edges have times", seeds.len()), "none".into());
                }
            }
        }
        Ok(())
    }

    fn sample_within(
        &mut self,
        at: Position,
        seeds: &[NodeId],
        seed_times: Option<&[i64]>,
        out: &mut HopSample,
        ledger: &mut Ledger,
    ) -> Result<()> {
        self.take_seed_times(seeds, seed_times, ledger)?;
        let HopSampler { graph, settings, choice, threads, table, scratch, seed_times, .. } = self;
        let HopScratch { new_nodes, waves, tree_waves } = scratch;
        let batch = HopBatch { graph: &*graph, settings, choice, threads: *threads, at, seeds, seed_times };
        match (settings.disjoint, table) {
            (false, RelabelTable::Direct(table)) => batch.sample(ById, waves, table, new_nodes, out, ledger),
            (false, RelabelTable::Hashed(table)) => batch.sample(ById, waves, table, new_nodes, out, ledger),
            (true, RelabelTable::Hashed(table)) => {
                let naming = ByTree::new(graph.nodes(), seeds.len())?;
                batch.sample(naming, tree_waves, table, new_nodes, out, ledger)
            }
            (true, RelabelTable::Direct(_)) => unreachable!("pairs of tree and node are hashed"),
        }
    }
}

/// A batch to sample, borrowed separately from the buffers.
struct HopBatch<'a, G> {
    graph: &'a G,
    settings: &'a HopSettings,
    choice: &'a NeighbourChoice,
    threads: usize,
    at: Position,
    seeds: &'a [NodeId],
    seed_times: &'a [i64],
}

impl<G: HopGraph> HopBatch<'_, G> {
    fn sample<N: Naming<G::StoredId>, R: Relabel + Send + Sync>(
        &self,
        naming: N,
        waves: &mut HopWaves<N::Word>,
        table: &mut R,
        new_nodes: &mut NewNodes,
        out: &mut HopSample,
        ledger: &mut Ledger,
    ) -> Result<()> {
        let settings = self.settings;
        let most_nodes = self.begin(naming, table, new_nodes, out, ledger)?;
        let mut first = 0;
        for (hop, fanout) in settings.fanouts.iter().enumerate() {
            let (known, sampled) = (out.nodes.len(), out.sources.len());
            let draw = HopDraw {
                fanout: *fanout,
                replace: settings.replace,
                is_disjoint: settings.disjoint,
                key: hop_key(settings.seed, self.at, hop),
                choice: self.choice,
                seed_times: self.seed_times,
            };
            let job =
                HopToExpand { graph: self.graph, naming, draw, nodes: first..known, most_nodes, threads: self.threads };
            job.expand(waves, &mut HopInto { table, new_nodes, out, ledger })?;
            let found = new_nodes.nodes();
            ledger.reserve(&mut out.nodes, found.len())?;
            out.nodes.extend(found.iter().map(|word| naming.node(*word).0));
            if settings.disjoint {
                ledger.reserve(&mut out.trees, found.len())?;
                out.trees.extend(found.iter().map(|word| naming.node(*word).1));
            }
            out.nodes_by_hop.push(found.len());
            out.edges_by_hop.push(out.sources.len() - sampled);
            first = known;
        }
        match settings.edges {
            HopEdges::Directional => Ok(()),
            HopEdges::Bidirectional => out.make_bidirectional(ledger),
            HopEdges::Induced => induce(self.graph, naming, table, out, ledger),
        }
    }

    /// Takes the seeds as the first nodes. Returns the most nodes that the sample may have.
    fn begin<N: Naming<G::StoredId>, R: Relabel>(
        &self,
        naming: N,
        table: &mut R,
        new_nodes: &mut NewNodes,
        out: &mut HopSample,
        ledger: &mut Ledger,
    ) -> Result<u64> {
        let (seeds, hops) = (self.seeds, self.settings.fanouts.len());
        let trees = if self.settings.disjoint { seeds.len() as u64 } else { 1 };
        // Repeated seeds are nodes of their own.
        let most_nodes = self.graph.nodes().saturating_mul(trees).saturating_add(seeds.len() as u64);
        if seeds.len() as u64 > MOST_NODES {
            return Err(SampleError::TooManyNodes { nodes: seeds.len() as u64 });
        }
        out.clear();
        new_nodes.clear();
        table.begin(most_nodes.min(MOST_NODES) as usize);
        table.reserve(seeds.len(), ledger)?;
        new_nodes.reserve(seeds.len(), ledger)?;
        ledger.reserve(&mut out.nodes, seeds.len())?;
        ledger.reserve(&mut out.nodes_by_hop, hops + 1)?;
        ledger.reserve(&mut out.edges_by_hop, hops)?;
        if self.settings.disjoint {
            ledger.reserve(&mut out.trees, seeds.len())?;
            out.trees.extend(0..seeds.len() as u32);
        }
        for (index, seed) in seeds.iter().enumerate() {
            let word = naming.word(G::StoredId::of(*seed), index as u32);
            // A seed has the local index of its place, so new ones skip those of repeated ones.
            let first = index - new_nodes.nodes().len();
            table.assign(&[word], first as u32, new_nodes, &mut [0]);
        }
        out.nodes.extend_from_slice(seeds);
        out.nodes_by_hop.push(seeds.len());
        Ok(most_nodes)
    }
}
