//! The sampler: hops of draws and relabelling, assembled into a [`Sample`].
//!
//! A hop is worked off node by node in three steps, each some nodes behind the one before: draw positions and ask for the
//! lines they lie in; read the neighbours and ask for their lines of the table; relabel. So a cache miss is waited for
//! together with dozens of others, while the processor draws. With more than one thread, waves of nodes are drawn while the
//! waves before them are relabelled: relabelling is in order of first appearance, hence sequential, and drawing depends on
//! nothing but keys. Buffers live as long as the sampler; nothing is allocated per node.

mod hop;
mod prune;

use crate::draw::PURPOSE_SAMPLE;
use crate::found::{Found, Section};
use crate::relabel::{Direct, Fresh, Hashed, Relabel};
use crate::topology::Topology;
use crate::{Bound, Form, Result, Sample, SampleError, Touched};
use esker_types::random::Key;
use esker_types::{ByteCount, NodeId};
use hop::Waves;
use std::fmt;
use std::str::FromStr;

/// How many neighbours a node takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Fanout {
    /// So many, or all when there are no more.
    AtMost(u32),
    /// All of them.
    All,
}

impl FromStr for Fanout {
    type Err = String;
    fn from_str(word: &str) -> Result<Fanout, String> {
        match word.parse() {
            _ if word == "all" => Ok(Fanout::All),
            Ok(count) if count > 0 => Ok(Fanout::AtMost(count)),
            _ => Err(format!("`{word}` is no fan-out; write a number from 1, or `all`")),
        }
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

/// What a sample carries beside the neighbours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct Carry {
    /// Where each neighbour stands in its node's stored list.
    pub positions: bool,
    /// Edge ids.
    pub edges: bool,
    /// Kinds of edges.
    pub relations: bool,
}

/// How to sample.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Settings {
    /// Seed of every draw.
    pub seed: u64,
    /// Neighbours a node takes, by hop; the first is next to the targets.
    pub fanouts: Vec<Fanout>,
    /// Dense, layered or ShaDow.
    pub form: Form,
    /// What comes with the neighbours.
    pub carry: Carry,
}

/// Which batch of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    /// The epoch, from 0.
    pub epoch: u64,
    /// The batch in its epoch, from 0.
    pub batch: u64,
}

/// Decides whether a node first met in a hop is expanded; asked once for each (hop, node) of a batch.
pub type Expand<'a> = &'a mut dyn FnMut(u32, NodeId) -> bool;

enum Table {
    Direct(Direct),
    Hashed(Hashed),
}

/// Local indices are 32 bits, and stamps need room beside them.
const MOST_NODES: u64 = 1 << 31;

/// Samples batches, one after the other, with buffers of its own.
pub struct Sampler<'t, T: Topology> {
    topology: &'t T,
    settings: Settings,
    threads: usize,
    most_bytes: u64,
    table: Table,
    scratch: Scratch<T>,
}

/// A batch in the making.
struct Scratch<T: Topology> {
    found: Found,
    fresh: Fresh,
    waves: Waves<T::Word>,
    workspace: T::Workspace,
}

impl<'t, T: Topology> Sampler<'t, T> {
    /// A sampler that uses `most_bytes` at most, its samples included. It takes the table by node of the graph when that
    /// leaves half of them free.
    pub fn new(topology: &'t T, settings: Settings, most_bytes: u64) -> Result<Sampler<'t, T>> {
        if settings.carry.relations && !topology.has_relations() {
            return Err(SampleError::request(
                "the graph has no kinds of edges to carry",
                "leave relations out, or import them",
            ));
        }
        let direct = Direct::bytes_for(topology.nodes());
        let table = match topology.nodes() <= MOST_NODES && direct <= most_bytes / 2 {
            true => Table::Direct(Direct::new(topology.nodes())),
            false => Table::Hashed(Hashed::new()),
        };
        let scratch = Scratch {
            found: Found::default(),
            fresh: Fresh::default(),
            waves: Waves::default(),
            workspace: T::Workspace::default(),
        };
        Ok(Sampler { topology, settings, threads: 1, most_bytes, table, scratch })
    }

    /// The same sampler, drawing with so many threads of the surrounding rayon pool.
    pub fn with_threads(mut self, threads: usize) -> Sampler<'t, T> {
        self.threads = threads.max(1);
        self
    }

    /// How it samples.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Samples the neighbourhood of `seeds`, which may repeat.
    pub fn sample(&mut self, at: Position, seeds: &[NodeId], out: &mut Sample) -> Result<()> {
        match &mut self.table {
            Table::Direct(table) => {
                run(self.topology, &self.settings, self.threads, table, &mut self.scratch, at, seeds, out)
            }
            Table::Hashed(table) => {
                run(self.topology, &self.settings, self.threads, table, &mut self.scratch, at, seeds, out)
            }
        }?;
        self.check_memory(out)
    }

    /// Samples DENSE, leaving nodes of the middle hops unexpanded where `expand` says so. A node left out that is met
    /// again in a list of its own hop or a deeper one is expanded after all, until nothing changes.
    pub fn sample_pruned(
        &mut self,
        at: Position,
        seeds: &[NodeId],
        expand: Expand,
        out: &mut Sample,
    ) -> Result<()> {
        if self.settings.form != Form::Dense {
            return Err(SampleError::request("only DENSE samples can be pruned", "sample with form dense"));
        }
        match &mut self.table {
            Table::Direct(table) => {
                prune::run(self.topology, &self.settings, table, &mut self.scratch, at, seeds, expand, out)
            }
            Table::Hashed(table) => {
                prune::run(self.topology, &self.settings, table, &mut self.scratch, at, seeds, expand, out)
            }
        }?;
        self.check_memory(out)
    }

    /// The most that batches of `batch` seeds can take.
    pub fn bound(&self, batch: u64) -> Bound {
        Bound::new(&self.settings, batch, self.topology.nodes(), self.topology.entries())
    }

    /// Bytes this sampler holds now.
    pub fn bytes(&self) -> u64 {
        let table = match &self.table {
            Table::Direct(table) => table.bytes(),
            Table::Hashed(table) => table.bytes(),
        };
        table + self.scratch.bytes()
    }

    /// What sampling `sample` touched.
    pub fn touched(&self, sample: &Sample) -> Touched {
        let table_word_bytes = if matches!(self.table, Table::Direct(_)) { 4 } else { 16 };
        Touched::of(sample, size_of::<T::Word>() as u64, table_word_bytes)
    }

    fn check_memory(&self, sample: &Sample) -> Result<()> {
        let needed = self.bytes() + sample.bytes();
        if needed > self.most_bytes {
            let what = format!("a batch of {} nodes", sample.node_ids.len());
            let (needed, allowed) = (ByteCount(needed), ByteCount(self.most_bytes));
            return Err(SampleError::Memory { what, needed, allowed });
        }
        Ok(())
    }
}

impl<T: Topology> Scratch<T> {
    fn bytes(&self) -> u64 {
        self.found.bytes() + self.fresh.bytes() + self.waves.bytes()
    }

    /// Takes the seeds as hop 0: each once, in order of first appearance.
    fn begin<R: Relabel>(&mut self, table: &mut R, seeds: &[NodeId], nodes: u64, most: u64) -> Result<()> {
        if let Some(seed) = seeds.iter().find(|seed| seed.0 >= nodes) {
            return Err(SampleError::Seed { found: seed.0, last: nodes.saturating_sub(1) });
        }
        table.begin(most.min(MOST_NODES) as usize);
        let found = &mut self.found;
        found.nodes.clear();
        found.skipped.clear();
        found.seeds.clear();
        found.seeds.resize(seeds.len(), 0);
        // Seeds are `NodeId`s; `u64` is the word that holds any of them.
        let words: Vec<u64> = seeds.iter().map(|seed| seed.0).collect();
        self.fresh.clear();
        table.assign(&words, 0, &mut self.fresh, &mut found.seeds);
        found.nodes.extend_from_slice(self.fresh.nodes());
        found.hop_starts.clear();
        found.hop_starts.extend([0, found.nodes.len() as u32]);
        Ok(())
    }

    /// Takes what the last hop found as the next hop.
    fn close_hop(&mut self) -> Result<()> {
        let found = &mut self.found;
        found.nodes.extend_from_slice(self.fresh.nodes());
        if found.nodes.len() as u64 > MOST_NODES {
            let problem = format!("a batch reached {} nodes, more than 2^31", found.nodes.len());
            return Err(SampleError::request(problem, "take smaller batches or fan-outs"));
        }
        found.hop_starts.push(found.nodes.len() as u32);
        Ok(())
    }
}

/// The key of a hop's draws.
fn hop_key(seed: u64, at: Position, hop: usize) -> Key {
    Key::new(seed).with(PURPOSE_SAMPLE).with(at.epoch).with(at.batch).with(hop as u64)
}

#[allow(clippy::too_many_arguments)] // Borrowed apart, so that the table's kind is known to the loops.
fn run<T: Topology, R: Relabel + Sync + Send>(
    topology: &T,
    settings: &Settings,
    threads: usize,
    table: &mut R,
    scratch: &mut Scratch<T>,
    at: Position,
    seeds: &[NodeId],
    out: &mut Sample,
) -> Result<()> {
    let layers = settings.fanouts.len();
    let bound = Bound::new(settings, seeds.len() as u64, topology.nodes(), topology.entries());
    scratch.begin(table, seeds, topology.nodes(), bound.nodes)?;
    scratch.found.sections.resize_with(layers + 1, Section::default);
    for (hop, fanout) in settings.fanouts.iter().enumerate() {
        let first = if settings.form == Form::Layered { 0 } else { scratch.found.hop_starts[hop] as usize };
        let frontier = &scratch.found.nodes[first..];
        let lists = topology.hop(frontier, &mut scratch.workspace)?;
        let job = hop::Job {
            lists: &lists,
            nodes: frontier,
            skipped: &[],
            fanout: *fanout,
            key: hop_key(settings.seed, at, hop),
            carry: settings.carry,
            first_place: scratch.found.nodes.len() as u32,
            threads,
        };
        hop::expand(&job, table, &mut scratch.waves, &mut scratch.fresh, &mut scratch.found.sections[hop])?;
        drop(lists);
        scratch.close_hop()?;
    }
    if settings.form == Form::Shadow {
        let lists = topology.hop(&scratch.found.nodes, &mut scratch.workspace)?;
        let section = &mut scratch.found.sections[layers];
        hop::induce(
            &lists,
            &scratch.found.nodes,
            settings.carry,
            threads,
            table,
            &mut scratch.waves,
            section,
        )?;
    }
    scratch.found.assemble(settings.form, out);
    Ok(())
}
