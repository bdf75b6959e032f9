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
mod sample;
mod wave;

pub use graph::{BorrowedCsc, BorrowedId, BorrowedNumbers, HopGraph};
pub use sample::HopSample;

use crate::memory::Ledger;
use crate::relabel::{DirectTable, HashedTable, NewNodes, Relabel};
use crate::sampler::{DIRECT_PART, Fanout, MOST_NODES, Position, RelabelTable, hop_key};
use crate::topology::StoredId;
use crate::{Result, SampleError};
use draw::HopDraw;
use esker_types::NodeId;
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
}

/// How a node chooses among its neighbours.
#[derive(Debug, Clone, Default)]
pub enum NeighbourChoice {
    /// All alike.
    #[default]
    Uniform,
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
        settings: HopSettings,
        choice: NeighbourChoice,
        most_bytes: u64,
    ) -> Result<HopSampler<G>> {
        let direct = DirectTable::bytes_for(graph.nodes());
        let is_direct = !settings.disjoint && graph.nodes() <= MOST_NODES && direct <= most_bytes / DIRECT_PART;
        let table = match is_direct {
            true => RelabelTable::Direct(DirectTable::new(graph.nodes())),
            false => {
                Ledger::new(0, most_bytes).charge(HashedTable::bytes_for(0))?;
                RelabelTable::Hashed(HashedTable::new())
            }
        };
        Ok(HopSampler { graph, settings, choice, threads: 1, most_bytes, table, scratch: HopScratch::default() })
    }

    /// The same sampler, using this many threads of the current rayon pool.
    pub fn with_threads(mut self, threads: usize) -> HopSampler<G> {
        self.threads = threads.max(1);
        self
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
        table + new_nodes.bytes() + waves.bytes() + tree_waves.bytes()
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
        self.check_seed_times(seeds, seed_times)?;
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

    fn check_seed_times(&self, _seeds: &[NodeId], seed_times: Option<&[i64]>) -> Result<()> {
        match seed_times {
            None => Ok(()),
            Some(times) => {
                let (expected, found) = ("none".into(), format!("{} of them", times.len()));
                Err(SampleError::SeedTimes { expected, found })
            }
        }
    }

    fn sample_within(
        &mut self,
        at: Position,
        seeds: &[NodeId],
        seed_times: Option<&[i64]>,
        out: &mut HopSample,
        ledger: &mut Ledger,
    ) -> Result<()> {
        let HopSampler { graph, settings, choice, threads, table, scratch, .. } = self;
        let HopScratch { new_nodes, waves, tree_waves } = scratch;
        let seed_times = seed_times.unwrap_or(&[]);
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
        Ok(())
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
