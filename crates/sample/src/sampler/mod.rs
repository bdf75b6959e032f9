//! The sampler: samples and relabels hop by hop and assembles a [`Sample`].
//!
//! A hop is processed node by node in three steps, each some nodes after the previous one: draw positions and prefetch
//! their cache lines; read the neighbours and prefetch their table entries; relabel. This overlaps dozens of cache
//! misses, while the CPU draws. With several threads, some waves of nodes are sampled while earlier waves are
//! relabelled. Relabelling is in order of first appearance, hence sequential. Drawing depends on keys only. Buffers
//! live as long as the sampler, nothing is allocated per node, and buffers that grow ask the ledger first. If adjacency
//! is not in memory, positions are drawn from degrees, and the entries of a hop are fetched together.

mod dropped;
mod hop;
mod levels;

use crate::draw::PURPOSE_SAMPLE;
use crate::found::{Discovered, Section};
use crate::memory::{Ledger, held};
use crate::relabel::{DirectTable, HashedTable, NewNodes, Relabel};
use crate::topology::{Fetched, Topology, TopologyWorkspace};
use crate::{Batches, Bound, Form, Result, Sample, SampleError, Touched};
use dropped::{DroppedEdges, DroppedEntries};
use esker_types::NodeId;
use esker_types::random::Key;
use hop::Waves;
pub(crate) use hop::{
    CLUSTER, FEW, LAG, PREFETCH_BOUNDS, SHARED_WAVE_NODES, WAVE_NODES, ask_for, ask_for_head, longest_drawn,
    ranges, relabel, wave_entries_at_most, wave_nodes, waves_at_once,
};
use std::fmt;
use std::str::FromStr;

/// How many neighbours are sampled per node. Written as a number, or `all`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fanout {
    /// At most this many.
    AtMost(u32),
    /// All of them.
    All,
}

impl Fanout {
    /// How many of `degree` neighbours are sampled.
    #[inline(always)]
    pub fn of(self, degree: u32) -> u32 {
        match self {
            Fanout::AtMost(most) => degree.min(most),
            Fanout::All => degree,
        }
    }
}

impl FromStr for Fanout {
    type Err = String;
    fn from_str(word: &str) -> Result<Fanout, String> {
        match word.parse() {
            _ if word == "all" => Ok(Fanout::All),
            Ok(count) if count > 0 => Ok(Fanout::AtMost(count)),
            _ => Err(format!("`{word}` is not a fan-out; write a number from 1, or `all`")),
        }
    }
}

impl serde::Serialize for Fanout {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Fanout::AtMost(count) => serializer.serialize_u32(*count),
            Fanout::All => serializer.serialize_str("all"),
        }
    }
}

impl<'de> serde::Deserialize<'de> for Fanout {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Fanout, D::Error> {
        #[derive(serde::Deserialize)]
        #[serde(untagged)]
        enum WrittenFanout {
            Number(u32),
            StoredId(String),
        }
        match WrittenFanout::deserialize(deserializer)? {
            WrittenFanout::Number(count) => count.to_string().parse(),
            WrittenFanout::StoredId(word) => word.parse(),
        }
        .map_err(serde::de::Error::custom)
    }
}

impl fmt::Display for Fanout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fanout::AtMost(count) => write!(f, "{count}"),
            Fanout::All => f.write_str("all"),
        }
    }
}

/// What a sample carries in addition to the neighbours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct Carry {
    /// Position of each neighbour in its node's stored adjacency.
    pub positions: bool,
    /// Edge ids.
    pub edges: bool,
    /// Relations.
    pub relations: bool,
    /// Degrees of all nodes, not only of expanded ones.
    #[serde(default)]
    pub degrees: bool,
}

/// How to sample.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Settings {
    /// Random seed of every draw.
    pub seed: u64,
    /// Fan-out by hop, the hop next to the targets first.
    pub fanouts: Vec<Fanout>,
    /// Dense, layered or ShaDow.
    pub form: Form,
    /// What is carried with the neighbours.
    pub carry: Carry,
}

/// The position of a batch in a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    /// The epoch, from 0.
    pub epoch: u64,
    /// The batch in its epoch, from 0.
    pub batch: u64,
}

/// Decides whether what enters layer `L - hop` for a node that is met at a hop is supplied instead of being computed. Called
/// with the hop, from 1 to L - 1, and with each of its nodes and its index there, in order of first appearance.
pub type Pulls<'a> = &'a mut dyn FnMut(usize, usize, NodeId) -> bool;

pub(crate) enum RelabelTable {
    Direct(DirectTable),
    Hashed(HashedTable),
}

/// Local indices are 32 bits, and stamps need some of that range.
pub(crate) const MOST_NODES: u64 = 1 << 31;
/// Seeds looked up at a time.
const SEEDS_AT_ONCE: usize = 64;
/// The table per node of the graph is used if it takes at most one part in `DIRECT_PART` of the memory.
pub(crate) const DIRECT_PART: u64 = 2;

/// Samples batches, one after the other, with its own buffers.
pub struct Sampler<T: Topology> {
    topology: T,
    settings: Settings,
    threads: usize,
    most_bytes: u64,
    /// How many samples are in memory at a time.
    samples: u64,
    /// Bytes of the largest sample so far.
    largest_sample: u64,
    table: RelabelTable,
    scratch: SamplerScratch<T>,
    dropped: DroppedEdges,
    /// The batch that was begun, and the position that its draws are keyed by.
    begun: Option<(Position, Position)>,
}

/// The state of a batch while it is sampled.
struct SamplerScratch<T: Topology> {
    found: Discovered,
    new_nodes: NewNodes,
    waves: Waves<T::StoredId>,
    /// Nodes of a depth, if they are not those of a hop in order of discovery.
    frontier: Vec<NodeId>,
    workspace: T::Workspace,
    fetched: Fetched<T::StoredId>,
}

impl<T: Topology> Default for SamplerScratch<T> {
    fn default() -> SamplerScratch<T> {
        SamplerScratch {
            found: Discovered::default(),
            new_nodes: NewNodes::default(),
            waves: Waves { ahead: Vec::new(), behind: Vec::new() },
            frontier: Vec::new(),
            workspace: T::Workspace::default(),
            fetched: Fetched { words: Vec::new(), edges: Vec::new(), relations: Vec::new() },
        }
    }
}

/// What to sample, borrowed separately from the buffers.
#[derive(Clone, Copy)]
struct BatchSampling<'a, T> {
    topology: &'a T,
    settings: &'a Settings,
    threads: usize,
    at: Position,
    seeds: &'a [NodeId],
    dropped: DroppedEntries<'a>,
}

impl<T: Topology> Sampler<T> {
    /// A sampler that uses at most `most_bytes`, including the sample it makes. It uses the table per node of the graph
    /// if that leaves half of them free. The topology may be borrowed or shared: references and `Arc`s are topologies.
    pub fn new(topology: T, settings: Settings, most_bytes: u64) -> Result<Sampler<T>> {
        if settings.carry.relations && !topology.has_relations() {
            return Err(SampleError::NoRelations);
        }
        if settings.fanouts.contains(&Fanout::AtMost(0)) {
            return Err(SampleError::ZeroFanout);
        }
        let direct = DirectTable::bytes_for(topology.nodes());
        let table = match topology.nodes() <= MOST_NODES && direct <= most_bytes / DIRECT_PART {
            true => RelabelTable::Direct(DirectTable::new(topology.nodes())),
            false => {
                Ledger::new(0, most_bytes).charge(HashedTable::bytes_for(0))?;
                RelabelTable::Hashed(HashedTable::new())
            }
        };
        let scratch = SamplerScratch::default();
        Ok(Sampler {
            topology,
            settings,
            threads: 1,
            most_bytes,
            samples: 1,
            largest_sample: 0,
            table,
            scratch,
            dropped: DroppedEdges::default(),
            begun: None,
        })
    }

    /// The same sampler, using this many threads of the current rayon pool.
    pub fn with_threads(mut self, threads: usize) -> Sampler<T> {
        self.threads = threads.max(1);
        self
    }

    /// The same sampler, with this many samples in memory at a time, all within its memory limit.
    pub fn with_samples(mut self, samples: u64) -> Sampler<T> {
        self.samples = samples.max(1);
        self
    }

    /// Prepares for a batch: whoever samples it calls this first, with the position that it samples. The topology prepares
    /// ([`Topology::begin`]), and edges that the batch leaves out ([`Batches::dropped`]) are noted: they take 72 bytes each
    /// until the next batch, beside the sampler's memory.
    pub fn begin(&mut self, batches: &dyn Batches, at: Position) -> Result<()> {
        self.dropped.begin(batches, at, self.topology.nodes(), self.topology.has_relations())?;
        if self.settings.carry.positions && !self.dropped.of_batch(at).is_empty() {
            return Err(SampleError::PositionsOfDropped);
        }
        self.begun = Some((at, batches.drawn_at(at)));
        self.topology.begin(batches, at, &mut self.scratch.workspace)
    }

    /// The position that the draws of a batch are keyed by.
    fn drawn_at(&self, at: Position) -> Position {
        self.begun.filter(|(begun, _)| *begun == at).map_or(at, |(_, drawn)| drawn)
    }

    /// Its settings.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Samples the neighbourhood of `seeds`, which may repeat.
    pub fn sample(&mut self, at: Position, seeds: &[NodeId], out: &mut Sample) -> Result<()> {
        let drawn = self.drawn_at(at);
        self.within_memory(out, |sampler, ledger, out| {
            let Sampler { topology, settings, threads, table, scratch, dropped, .. } = sampler;
            let (threads, dropped) = (*threads, dropped.of_batch(at));
            let batch = BatchSampling { topology: &*topology, settings, threads, at: drawn, seeds, dropped };
            match table {
                RelabelTable::Direct(table) => batch.discover(table, scratch, None, ledger),
                RelabelTable::Hashed(table) => batch.discover(table, scratch, None, ledger),
            }?;
            scratch.found.assemble(settings.form, out, ledger)
        })
    }

    /// Samples DENSE, with the nodes that `pulls` accepts taken from elsewhere as they enter the layer of their hop. In
    /// DENSE every layer uses the same neighbours, so a pulled node is still computed as far as the layer before needs it:
    /// see `levels.rs`. Without pulled nodes, this is [`Sampler::sample`]. If memory is short, a batch is sampled twice, so
    /// `pulls` must answer alike.
    pub fn sample_with_pulls(
        &mut self,
        at: Position,
        seeds: &[NodeId],
        pulls: Pulls,
        out: &mut Sample,
    ) -> Result<()> {
        self.settings.check_pulls()?;
        let drawn = self.drawn_at(at);
        self.within_memory(out, |sampler, ledger, out| {
            let Sampler { topology, settings, threads, table, scratch, dropped, .. } = sampler;
            let (threads, dropped) = (*threads, dropped.of_batch(at));
            let batch = BatchSampling { topology: &*topology, settings, threads, at: drawn, seeds, dropped };
            match table {
                RelabelTable::Direct(table) => batch.discover(table, scratch, Some(&mut *pulls), ledger),
                RelabelTable::Hashed(table) => batch.discover(table, scratch, Some(&mut *pulls), ledger),
            }?;
            scratch.found.assemble(settings.form, out, ledger)
        })
    }

    /// Samples. If memory is refused, it frees what earlier batches left and tries once more, so that a refusal is
    /// about this batch.
    fn within_memory(
        &mut self,
        out: &mut Sample,
        mut sample: impl FnMut(&mut Self, &mut Ledger, &mut Sample) -> Result<()>,
    ) -> Result<()> {
        for again in [false, true] {
            let others = (self.samples - 1) * self.largest_sample.max(out.allocated_bytes());
            let held = self.bytes() + out.allocated_bytes() + others;
            let mut ledger = Ledger::new(held, self.most_bytes);
            // The other samples in memory may grow as large as this one.
            let result = sample(self, &mut ledger, out).and_then(|()| {
                let growth = out.allocated_bytes().saturating_sub(self.largest_sample);
                ledger.charge(growth.saturating_mul(self.samples - 1))
            });
            match result {
                Err(SampleError::Memory { .. }) if !again => {
                    self.scratch = SamplerScratch::default();
                    *out = Sample::default();
                    if let RelabelTable::Hashed(table) = &mut self.table {
                        *table = HashedTable::new();
                    }
                }
                Err(error) => return Err(error),
                Ok(()) => break,
            }
        }
        self.largest_sample = self.largest_sample.max(out.allocated_bytes());
        Ok(())
    }

    /// The upper bounds of batches with `batch` seed nodes.
    pub fn bound(&self, batch: u64) -> Bound {
        Bound::new(&self.settings, batch, self.topology.nodes(), self.topology.entries(), self.threads)
    }

    /// Bytes allocated now.
    pub fn bytes(&self) -> u64 {
        let table = match &self.table {
            RelabelTable::Direct(table) => table.bytes(),
            RelabelTable::Hashed(table) => table.bytes(),
        };
        table + self.scratch.bytes()
    }

    /// The bytes that sampling `sample` read and wrote.
    pub fn touched(&self, sample: &Sample) -> Touched {
        let table_word_bytes = if matches!(self.table, RelabelTable::Direct(_)) { 4 } else { 16 };
        Touched::of(sample, size_of::<T::StoredId>() as u64, table_word_bytes)
    }
}

impl<T: Topology> SamplerScratch<T> {
    fn bytes(&self) -> u64 {
        let fetched = held(&self.fetched.words) + held(&self.fetched.edges) + held(&self.fetched.relations);
        let (frontier, workspace) = (held(&self.frontier), self.workspace.bytes());
        self.found.bytes() + self.new_nodes.bytes() + self.waves.bytes() + frontier + fetched + workspace
    }
}

/// The random key of a hop.
pub(crate) fn hop_key(seed: u64, at: Position, hop: usize) -> Key {
    Key::new(seed).with(PURPOSE_SAMPLE).with(at.epoch).with(at.batch).with(hop as u64)
}

impl<T: Topology> BatchSampling<'_, T> {
    /// Finds the nodes of the batch and samples their neighbours, in order of discovery.
    fn discover<R: Relabel + Sync + Send>(
        &self,
        table: &mut R,
        scratch: &mut SamplerScratch<T>,
        mut pulls: Option<Pulls>,
        ledger: &mut Ledger,
    ) -> Result<()> {
        let layers = self.settings.fanouts.len();
        self.begin(table, scratch, ledger)?;
        scratch.found.sections.resize_with(layers + 1, Section::default);
        for depth in 0..layers {
            self.hop(table, scratch, depth, ledger)?;
            self.close_hop(scratch, depth, ledger)?;
            if let Some(pulls) = pulls.as_mut().filter(|_| depth + 1 < layers) {
                levels::choose(scratch, depth + 1, &mut **pulls, ledger)?;
            }
        }
        if self.settings.form == Form::Shadow {
            self.induce(table, scratch, ledger)?;
        } else if scratch.found.has_pulled() {
            self.degrees_of_level_0(scratch, ledger)?;
        } else if self.settings.carry.degrees {
            let deepest = &scratch.found.nodes[scratch.found.hop_starts[layers] as usize..];
            ledger.reserve(&mut scratch.found.degrees, deepest.len())?;
            self.topology.degrees(deepest, &scratch.workspace, &mut scratch.found.degrees)?;
        }
        Ok(())
    }

    /// Takes the seed nodes as hop 0: each once, in order of first appearance.
    fn begin<R: Relabel>(
        &self,
        table: &mut R,
        scratch: &mut SamplerScratch<T>,
        ledger: &mut Ledger,
    ) -> Result<()> {
        let (nodes, seeds) = (self.topology.nodes(), self.seeds);
        if let Some(seed) = seeds.iter().find(|seed| seed.0 >= nodes) {
            return Err(SampleError::Seed { found: seed.0, last: nodes.saturating_sub(1) });
        }
        table.begin(nodes.min(MOST_NODES) as usize);
        let (found, new_nodes) = (&mut scratch.found, &mut scratch.new_nodes);
        found.clear();
        new_nodes.clear();
        ledger.extend_to(&mut found.seeds, seeds.len(), 0)?;
        new_nodes.reserve(seeds.len(), ledger)?;
        table.reserve(seeds.len(), ledger)?;
        // `u64` fits any node id.
        let mut words = [0u64; SEEDS_AT_ONCE];
        for (seeds, local_indices) in seeds.chunks(SEEDS_AT_ONCE).zip(found.seeds.chunks_mut(SEEDS_AT_ONCE)) {
            words.iter_mut().zip(seeds).for_each(|(word, seed)| *word = seed.0);
            table.assign(&words[..seeds.len()], 0, new_nodes, local_indices);
        }
        ledger.reserve(&mut found.nodes, new_nodes.nodes().len())?;
        found.nodes.extend_from_slice(new_nodes.nodes());
        ledger.reserve(&mut found.hop_starts, self.settings.fanouts.len() + 2)?;
        found.hop_starts.extend([0, found.nodes.len() as u32]);
        Ok(())
    }

    /// Samples the neighbours at a depth.
    fn hop<R: Relabel + Send>(
        &self,
        table: &mut R,
        scratch: &mut SamplerScratch<T>,
        depth: usize,
        ledger: &mut Ledger,
    ) -> Result<()> {
        let is_listed = match self.settings.form {
            Form::Layered => {
                in_block_order(scratch, depth, ledger)?;
                true
            }
            _ if !scratch.found.pulled_at(depth).is_empty() => {
                levels::list(scratch, depth, false, ledger)?;
                true
            }
            _ => false,
        };
        self.expand(table, scratch, HopPart { depth, is_listed, is_pulled: false }, ledger)?;
        match depth.checked_sub(1).filter(|before| !scratch.found.pulled_at(*before).is_empty()) {
            Some(before) => {
                take_found(scratch, ledger)?;
                levels::list(scratch, before, true, ledger)?;
                // The draw of a node does not depend on whether it is pulled.
                self.expand(
                    table,
                    scratch,
                    HopPart { depth: before, is_listed: true, is_pulled: true },
                    ledger,
                )
            }
            None => Ok(()),
        }
    }

    /// Samples the neighbours of some nodes.
    fn expand<R: Relabel + Send>(
        &self,
        table: &mut R,
        scratch: &mut SamplerScratch<T>,
        part: HopPart,
        ledger: &mut Ledger,
    ) -> Result<()> {
        let found = &mut scratch.found;
        let first = found.hop_starts[part.depth] as usize;
        let job = hop::HopJob {
            nodes: if part.is_listed { &scratch.frontier } else { &found.nodes[first..] },
            fanout: self.settings.fanouts[part.depth],
            key: hop_key(self.settings.seed, self.at, part.depth),
            carry: self.settings.carry,
            first_local_index: found.nodes.len() as u32,
            most_local_indices: self.topology.nodes(),
            threads: self.threads,
            // Ends of dropped edges are targets, which DENSE and ShaDow expand once.
            dropped: match part.depth > 0 && self.settings.form != Form::Layered {
                true => DroppedEntries::NONE,
                false => self.dropped,
            },
        };
        let section = match part.is_pulled {
            true => &mut found.pulled[part.depth - 1].section,
            false => &mut found.sections[part.depth],
        };
        let mut into = hop::Into { table, new_nodes: &mut scratch.new_nodes, section, ledger };
        if let Some(lists) = self.topology.hop_in_memory(job.nodes, &scratch.workspace)? {
            return hop::expand(&job, &lists, &mut scratch.waves, &mut into);
        }
        let (workspace, fetched) = (&mut scratch.workspace, &mut scratch.fetched);
        hop::expand_fetched(&job, self.topology, workspace, fetched, &mut into)
    }

    /// Takes the nodes that the last depth found as the next hop.
    fn close_hop(&self, scratch: &mut SamplerScratch<T>, depth: usize, ledger: &mut Ledger) -> Result<()> {
        let found = &mut scratch.found;
        // With pulled nodes, degrees are taken from sections.
        if !found.has_pulled() {
            // The depth's own hop comes first in its section.
            let listed = found.nodes.len() - found.hop_starts[depth] as usize;
            ledger.reserve(&mut found.degrees, listed)?;
            found.degrees.extend_from_slice(&found.sections[depth].degrees[..listed]);
        }
        take_found(scratch, ledger)?;
        scratch.found.hop_starts.push(scratch.found.nodes.len() as u32);
        Ok(())
    }

    /// ShaDow: finds all edges between the nodes found.
    fn induce<R: Relabel + Sync + Send>(
        &self,
        table: &mut R,
        scratch: &mut SamplerScratch<T>,
        ledger: &mut Ledger,
    ) -> Result<()> {
        let layers = self.settings.fanouts.len();
        in_block_order(scratch, layers, ledger)?;
        let job = hop::HopJob {
            nodes: &scratch.frontier,
            fanout: Fanout::All,
            key: hop_key(self.settings.seed, self.at, layers),
            carry: self.settings.carry,
            first_local_index: scratch.found.nodes.len() as u32,
            most_local_indices: self.topology.nodes(),
            threads: self.threads,
            dropped: self.dropped,
        };
        let (new_nodes, section) = (&mut scratch.new_nodes, &mut scratch.found.sections[layers]);
        let mut into = hop::Into { table, new_nodes, section, ledger: &mut *ledger };
        if let Some(lists) = self.topology.hop_in_memory(job.nodes, &scratch.workspace)? {
            hop::induce(&job, &lists, &mut scratch.waves, &mut into)?;
        } else {
            let (workspace, fetched) = (&mut scratch.workspace, &mut scratch.fetched);
            hop::induce_fetched(&job, self.topology, workspace, fetched, &mut into)?;
        }
        let found = &mut scratch.found;
        let deepest = found.nodes.len() - found.hop_starts[layers] as usize;
        ledger.reserve(&mut found.degrees, deepest)?;
        found.degrees.extend_from_slice(&found.sections[layers].degrees[..deepest]);
        Ok(())
    }
}

/// Nodes whose neighbours are sampled together.
struct HopPart {
    /// The hop in which they were found.
    depth: usize,
    /// Whether they are in the list of the frontier. Otherwise they are the last nodes found.
    is_listed: bool,
    /// Whether they are pulled.
    is_pulled: bool,
}

/// Appends the nodes that were found last.
fn take_found<T: Topology>(scratch: &mut SamplerScratch<T>, ledger: &mut Ledger) -> Result<()> {
    let new_nodes = scratch.new_nodes.nodes();
    ledger.reserve(&mut scratch.found.nodes, new_nodes.len())?;
    scratch.found.nodes.extend_from_slice(new_nodes);
    Ok(())
}

/// Puts the nodes of hops 0 to `depth` in the order of a block: the deepest hop first.
fn in_block_order<T: Topology>(
    scratch: &mut SamplerScratch<T>,
    depth: usize,
    ledger: &mut Ledger,
) -> Result<()> {
    let (found, frontier) = (&scratch.found, &mut scratch.frontier);
    frontier.clear();
    ledger.reserve(frontier, found.nodes.len())?;
    for hop in (0..=depth).rev() {
        let local_indices = found.hop_starts[hop] as usize..found.hop_starts[hop + 1] as usize;
        frontier.extend_from_slice(&found.nodes[local_indices]);
    }
    Ok(())
}
