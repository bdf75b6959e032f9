//! Memory of sampling: bounded before a run starts, enforced while it runs, counted afterwards.

use crate::found::PulledNodes;
use crate::relabel::{DirectTable, HashedTable};
use crate::sampler::{DIRECT_PART, longest_drawn, wave_entries_at_most, wave_nodes, waves_at_once};
use crate::{Fanout, Form, Result, Sample, SampleError, Settings};
use esker_types::ByteCount;

/// Bits of adjacency that a wave has room for in any case: 1 MiB.
const LEAST_BITS: u64 = 1 << 23;

/// Words of a bitmap over the longest adjacency, if draws need one. It is also what batches may exceed a pilot's sizes by.
fn bitmap(settings: &Settings, entries: u64) -> u64 {
    let longest = match settings.form {
        Form::Shadow => entries,
        _ => settings.fanouts.iter().map(|fanout| longest_drawn(*fanout, entries)).max().unwrap_or(0),
    };
    longest.max(entries.min(LEAST_BITS)) / 64 + 1
}

/// The bytes that a sampler has allocated and may allocate. Every buffer that grows with the batch asks here first, so
/// memory is refused before it is allocated.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ledger {
    held: u64,
    most: u64,
}

impl Ledger {
    pub fn new(held: u64, most: u64) -> Ledger {
        Ledger { held, most }
    }

    /// A ledger for memory that is bounded elsewhere.
    pub fn unlimited() -> Ledger {
        Ledger { held: 0, most: u64::MAX }
    }

    /// Bytes still free.
    pub fn free(&self) -> u64 {
        self.most.saturating_sub(self.held)
    }

    /// Records bytes that are about to be allocated, or refuses them.
    pub fn charge(&mut self, bytes: u64) -> Result<()> {
        if bytes > self.free() {
            let (needed, allowed) = (ByteCount(self.held.saturating_add(bytes)), ByteCount(self.most));
            return Err(SampleError::Memory { what: "a batch".into(), needed, allowed });
        }
        self.held += bytes;
        Ok(())
    }

    /// Records bytes that were freed. An unlimited ledger does not know of buffers that were there before it.
    pub fn release(&mut self, bytes: u64) {
        self.held = self.held.saturating_sub(bytes);
    }

    /// Makes room for `more` elements after the last. It doubles the capacity if that much is free, so that growth is
    /// rare. Otherwise it takes what is needed.
    pub fn reserve<T>(&mut self, elements: &mut Vec<T>, more: usize) -> Result<()> {
        let needed = elements.len() + more;
        if needed <= elements.capacity() {
            return Ok(());
        }
        let bytes = |capacity: usize| ((capacity - elements.capacity()) * size_of::<T>()) as u64;
        let generous = needed.max(elements.capacity().saturating_mul(2));
        let capacity = if bytes(generous) <= self.free() { generous } else { needed };
        self.charge(bytes(capacity))?;
        elements.reserve_exact(capacity - elements.len());
        Ok(())
    }

    /// Makes room for exactly `more` elements.
    pub fn reserve_exact<T>(&mut self, elements: &mut Vec<T>, more: usize) -> Result<()> {
        let needed = elements.len() + more;
        if needed > elements.capacity() {
            self.charge(((needed - elements.capacity()) * size_of::<T>()) as u64)?;
            elements.reserve_exact(more);
        }
        Ok(())
    }

    /// Extends to at least `count` elements. New elements are `value`.
    pub fn extend_to<T: Clone>(&mut self, elements: &mut Vec<T>, count: usize, value: T) -> Result<()> {
        if count > elements.len() {
            self.reserve(elements, count - elements.len())?;
            elements.resize(count, value);
        }
        Ok(())
    }
}

/// Allocated bytes of a vector.
pub(crate) fn held<T>(elements: &Vec<T>) -> u64 {
    elements.capacity() as u64 * size_of::<T>() as u64
}

/// The upper bounds of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bound {
    /// Nodes.
    pub nodes: u64,
    /// Neighbours in all blocks.
    pub edges: u64,
    /// Bytes of one sample.
    pub sample_bytes: u64,
    /// Bytes of a sampler's own buffers, without its table and without the topology's workspace.
    pub buffer_bytes: u64,
    /// Bytes of the table with one word per node of the graph.
    pub direct_bytes: u64,
    /// Bytes of the table of the batch's own nodes.
    pub hashed_bytes: u64,
}

impl Bound {
    /// Bounds for batches of `batch` seed nodes, sampled by `threads` threads on a graph of `nodes` nodes and `entries`
    /// adjacency entries.
    pub fn new(settings: &Settings, batch: u64, nodes: u64, entries: u64, threads: usize) -> Bound {
        Bound::within(settings, batch, nodes, entries, threads, None)
    }

    /// The same for batches that are known to stay below some sizes, hop by hop.
    pub fn within(
        settings: &Settings,
        batch: u64,
        nodes: u64,
        entries: u64,
        threads: usize,
        known: Option<&HopSizes>,
    ) -> Bound {
        let (mut frontier, mut total) = (batch.min(nodes), batch.min(nodes));
        let (mut sampled_total, mut listed, mut wave_entries) = (0u64, 0u64, 0u64);
        for (hop, fanout) in settings.fanouts.iter().enumerate() {
            let (most_found, most_sampled) = known.map_or((u64::MAX, u64::MAX), |known| known.of_hop(hop));
            let expanded = if settings.form == Form::Layered { total } else { frontier };
            let drawn = match fanout {
                Fanout::AtMost(count) => expanded.saturating_mul(*count as u64).min(entries),
                Fanout::All => entries,
            };
            let drawn = drawn.min(most_sampled);
            let wave = wave_entries_at_most(*fanout, wave_nodes(threads).min(expanded), entries);
            wave_entries = wave_entries.max(wave);
            sampled_total = sampled_total.saturating_add(drawn);
            listed = listed.saturating_add(expanded);
            // Seed nodes may repeat, so a hop may find any node.
            frontier = drawn.min(nodes).min(most_found);
            total = total.saturating_add(frontier).min(nodes);
        }
        // A node's neighbours are in DENSE and ShaDow once, in the layered form once per layer.
        let edges = match settings.form {
            Form::Dense => sampled_total.min(entries),
            Form::Layered => sampled_total,
            Form::Shadow => known.map_or(entries, |known| known.edges.min(entries)),
        };
        let offsets = if settings.form == Form::Layered { listed } else { total };
        let blocks = if settings.form == Form::Layered { settings.fanouts.len() as u64 } else { 1 };
        if settings.form == Form::Shadow {
            wave_entries = entries;
            sampled_total = sampled_total.saturating_add(entries);
            listed = listed.saturating_add(total);
        }
        let carried = carried_bytes(settings);
        let sample_bytes = sum(&[(edges, 4 + carried), (total, 8 + 4), (offsets + blocks, 4), (batch, 4)])
            .saturating_add(settings.fanouts.len() as u64 * 8 + 8);
        // Arrays grow by doubling, and each keeps its largest size. Nodes, new nodes, degrees, the frontier; which nodes
        // are pulled, and the order of nodes if some are.
        let doubled =
            sum(&[(sampled_total, 4 + carried), (listed, 8), (total, 8 + 8 + 4 + 8 + 8), (batch, 4)])
                .saturating_add(sum(&[(wave_entries, 8 + 4 + carried), (wave_nodes(threads), 12)]))
                .saturating_add(sum(&[(settings.fanouts.len() as u64, size_of::<PulledNodes>() as u64)]));
        let bits = bitmap(settings, entries);
        let of_waves = sum(&[(wave_entries, 16 + carried), (wave_nodes(threads), 8), (bits, 8)])
            .saturating_mul(2 * waves_at_once(threads) as u64);
        Bound {
            nodes: total,
            edges,
            sample_bytes,
            buffer_bytes: doubled.saturating_mul(2).saturating_add(of_waves),
            direct_bytes: DirectTable::bytes_for(nodes),
            hashed_bytes: HashedTable::bytes_for(total),
        }
    }

    /// Bounds for batches that are known to reach at most `nodes` of the graph's nodes and to sample from at most
    /// `entries` adjacency entries, with `part` being `(nodes, entries)`.
    pub fn of_part(settings: &Settings, batch: u64, part: (u64, u64), graph_nodes: u64) -> Bound {
        let (nodes, entries) = part;
        Bound {
            direct_bytes: DirectTable::bytes_for(graph_nodes),
            ..Bound::new(settings, batch, nodes, entries, 1)
        }
    }

    /// The larger of both in every respect.
    pub fn max(&self, other: &Bound) -> Bound {
        Bound {
            nodes: self.nodes.max(other.nodes),
            edges: self.edges.max(other.edges),
            sample_bytes: self.sample_bytes.max(other.sample_bytes),
            buffer_bytes: self.buffer_bytes.max(other.buffer_bytes),
            direct_bytes: self.direct_bytes.max(other.direct_bytes),
            hashed_bytes: self.hashed_bytes.max(other.hashed_bytes),
        }
    }

    /// Bytes of a sampler, `samples` samples included. It is the smaller of two: a budget that lets it have the table
    /// per node of the graph, and one with the smaller table.
    pub fn bytes(&self, samples: u64) -> u64 {
        let others = self.buffer_bytes.saturating_add(self.sample_bytes.saturating_mul(samples));
        let with_direct =
            others.saturating_add(self.direct_bytes).max(self.direct_bytes.saturating_mul(DIRECT_PART));
        // While a hash table grows, the previous one is still allocated.
        let with_hashed = others.saturating_add(self.hashed_bytes.saturating_mul(3) / 2);
        with_direct.min(with_hashed)
    }
}

/// The size of batches, hop by hop from their seed nodes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HopSizes {
    /// Nodes that each hop finds first.
    pub found: Vec<u64>,
    /// Neighbours that each hop samples.
    pub sampled: Vec<u64>,
    /// Neighbours in all blocks.
    pub edges: u64,
}

impl HopSizes {
    /// The size of a sample.
    pub fn of(sample: &Sample) -> HopSizes {
        let hops = sample.layers();
        let nodes = |hop: usize| {
            let at = hops - hop;
            sample.node_id_offsets[at]..sample.node_id_offsets[at + 1]
        };
        let sampled = |hop: usize| match sample.form {
            // The neighbours of a node are listed once, where the node was found.
            Form::Dense => {
                let (block, nodes) = (&sample.blocks[0], nodes(hop));
                let offset = |node: u32| block.nbr_offsets[(node - block.first) as usize] as u64;
                offset(nodes.end) - offset(nodes.start)
            }
            Form::Layered => sample.blocks[hops - 1 - hop].nbrs.len() as u64,
            // What is drawn on the way to the induced subgraph is not kept.
            Form::Shadow => u64::MAX,
        };
        HopSizes {
            found: (1..=hops).map(|hop| nodes(hop).len() as u64).collect(),
            sampled: (0..hops).map(sampled).collect(),
            edges: sample.edge_count(),
        }
    }

    /// The larger of both in every hop.
    pub fn max(&self, other: &HopSizes) -> HopSizes {
        let each = |ours: &[u64], others: &[u64]| {
            let at = |of: &[u64], hop: usize| of.get(hop).copied().unwrap_or(0);
            (0..ours.len().max(others.len())).map(|hop| at(ours, hop).max(at(others, hop))).collect()
        };
        HopSizes {
            found: each(&self.found, &other.found),
            sampled: each(&self.sampled, &other.sampled),
            edges: self.edges.max(other.edges),
        }
    }

    /// Every size enlarged by a share, and by a few.
    pub fn enlarged(&self, share: f64) -> HopSizes {
        let more = |size: &u64| match *size {
            u64::MAX => u64::MAX,
            size => size.saturating_add((size as f64 * share).ceil() as u64).saturating_add(16),
        };
        HopSizes {
            found: self.found.iter().map(more).collect(),
            sampled: self.sampled.iter().map(more).collect(),
            edges: more(&self.edges),
        }
    }

    /// Nodes that all hops find.
    pub fn nodes(&self) -> u64 {
        self.found.iter().fold(0, |sum: u64, found| sum.saturating_add(*found))
    }

    /// The nodes that a hop finds and the neighbours that it samples.
    fn of_hop(&self, hop: usize) -> (u64, u64) {
        let at = |of: &[u64]| of.get(hop).copied().unwrap_or(u64::MAX);
        (at(&self.found), at(&self.sampled))
    }
}

/// The sum of counts times bytes.
fn sum(terms: &[(u64, u64)]) -> u64 {
    terms.iter().fold(0u64, |sum, (count, bytes)| sum.saturating_add(count.saturating_mul(*bytes)))
}

/// Bytes that are carried per neighbour.
fn carried_bytes(settings: &Settings) -> u64 {
    let carry = settings.carry;
    4 * (carry.positions as u64 + carry.relations as u64) + 8 * carry.edges as u64
}

/// Bytes that sampling one batch reads and writes. They bound its speed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Touched {
    /// Offsets and entries of adjacency.
    pub adjacency_bytes: u64,
    /// Words of the table from node to local index.
    pub table_bytes: u64,
    /// The sample.
    pub sample_bytes: u64,
}

impl Touched {
    /// Bytes that a sample took: two offsets per expanded node, every entry taken (ShaDow: every entry), one table word
    /// per look-up.
    pub(crate) fn of(sample: &Sample, word_bytes: u64, table_word_bytes: u64) -> Touched {
        let lists: u64 = sample.blocks.iter().map(|block| block.nbr_offsets.len() as u64 - 1).sum();
        let entries = match sample.form {
            Form::Shadow => sample.degrees.iter().map(|degree| *degree as u64).sum(),
            _ => sample.edge_count(),
        };
        Touched {
            adjacency_bytes: lists * 8 + entries * word_bytes,
            table_bytes: (entries + sample.seeds.len() as u64) * table_word_bytes,
            sample_bytes: sample.bytes(),
        }
    }

    /// The sum.
    pub fn bytes(&self) -> u64 {
        self.adjacency_bytes + self.table_bytes + self.sample_bytes
    }
}
