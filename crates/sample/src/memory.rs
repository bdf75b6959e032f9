//! How much memory sampling takes: bounded before it starts, kept while it runs, counted afterwards.

use crate::relabel::{DirectTable, HashedTable};
use crate::sampler::{DIRECT_PART, wave_entries_at_most, wave_nodes, waves_at_once};
use crate::{Fanout, Form, Result, Sample, SampleError, Settings};
use esker_types::ByteCount;

/// What a sampler holds and may hold. Every buffer that grows with the batch asks here first, so memory is refused
/// before it is taken.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ledger {
    held: u64,
    most: u64,
}

impl Ledger {
    pub fn new(held: u64, most: u64) -> Ledger {
        Ledger { held, most }
    }

    /// For what is bounded elsewhere.
    pub fn unlimited() -> Ledger {
        Ledger { held: 0, most: u64::MAX }
    }

    /// Bytes still free.
    pub fn free(&self) -> u64 {
        self.most.saturating_sub(self.held)
    }

    /// Takes note of bytes that are about to be taken, or refuses them.
    pub fn charge(&mut self, bytes: u64) -> Result<()> {
        if bytes > self.free() {
            let (needed, allowed) = (ByteCount(self.held.saturating_add(bytes)), ByteCount(self.most));
            return Err(SampleError::Memory { what: "a batch".into(), needed, allowed });
        }
        self.held += bytes;
        Ok(())
    }

    /// Takes note of bytes that were given back.
    pub fn release(&mut self, bytes: u64) {
        self.held -= bytes;
    }

    /// Room for `more` elements after the last: twice as much as before where that is free, so that growing is
    /// seldom, else what is needed.
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

    /// Room for `more` elements and no more.
    pub fn reserve_exact<T>(&mut self, elements: &mut Vec<T>, more: usize) -> Result<()> {
        let needed = elements.len() + more;
        if needed > elements.capacity() {
            self.charge(((needed - elements.capacity()) * size_of::<T>()) as u64)?;
            elements.reserve_exact(more);
        }
        Ok(())
    }

    /// At least `count` elements, the new ones being `value`.
    pub fn extend_to<T: Clone>(&mut self, elements: &mut Vec<T>, count: usize, value: T) -> Result<()> {
        if count > elements.len() {
            self.reserve(elements, count - elements.len())?;
            elements.resize(count, value);
        }
        Ok(())
    }
}

/// Bytes that a vector holds.
pub(crate) fn held<T>(elements: &Vec<T>) -> u64 {
    elements.capacity() as u64 * size_of::<T>() as u64
}

/// The most a batch can have.
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
    /// Bytes of the table by node of the graph.
    pub direct_bytes: u64,
    /// Bytes of the table by node of the batch.
    pub hashed_bytes: u64,
}

impl Bound {
    /// For batches of `batch` seeds on a graph of `nodes` nodes whose lists have `entries` entries, drawn by `threads`.
    pub fn new(settings: &Settings, batch: u64, nodes: u64, entries: u64, threads: usize) -> Bound {
        let (mut frontier, mut total) = (batch.min(nodes), batch.min(nodes));
        let (mut drawn_in_all, mut listed, mut in_a_wave) = (0u64, 0u64, 0u64);
        for fanout in &settings.fanouts {
            let expanded = if settings.form == Form::Layered { total } else { frontier };
            let drawn = match fanout {
                Fanout::AtMost(count) => expanded.saturating_mul(*count as u64).min(entries),
                Fanout::All => entries,
            };
            let wave = wave_entries_at_most(*fanout, wave_nodes(threads).min(expanded), entries);
            in_a_wave = in_a_wave.max(wave);
            drawn_in_all = drawn_in_all.saturating_add(drawn);
            listed = listed.saturating_add(expanded);
            // Seeds may repeat, so any node may be left to be found.
            frontier = drawn.min(nodes);
            total = total.saturating_add(frontier).min(nodes);
        }
        // DENSE and ShaDow list a node once; the layered form once a layer.
        let edges = match settings.form {
            Form::Dense => drawn_in_all.min(entries),
            Form::Layered => drawn_in_all,
            Form::Shadow => entries,
        };
        let offsets = if settings.form == Form::Layered { listed } else { total };
        let blocks = if settings.form == Form::Layered { settings.fanouts.len() as u64 } else { 1 };
        if settings.form == Form::Shadow {
            in_a_wave = entries;
            drawn_in_all = drawn_in_all.saturating_add(entries);
            listed = listed.saturating_add(total);
        }
        let sum = |terms: &[(u64, u64)]| {
            terms.iter().fold(0u64, |sum, (count, bytes)| sum.saturating_add(count.saturating_mul(*bytes)))
        };
        let carried = carried_bytes(settings);
        let sample_bytes =
            sum(&[(edges, 4 + carried), (total, 8 + 4 + 2), (offsets + blocks, 4), (batch, 4)])
                .saturating_add(settings.fanouts.len() as u64 * 4 + 8);
        let waves = waves_at_once(threads) as u64;
        // Arrays that grow do so by doubling; each keeps its largest size.
        let doubled =
            sum(&[(drawn_in_all, 4 + carried), (listed, 8), (total, 8 + 8 + 4 + 2 + 8), (batch, 4)])
                .saturating_add(sum(&[(in_a_wave, 8 + 4 + carried), (wave_nodes(threads), 12)]));
        let of_waves = sum(&[(in_a_wave, 16 + carried), (wave_nodes(threads), 8), (entries / 64 + 1, 8)]);
        Bound {
            nodes: total,
            edges,
            sample_bytes,
            buffer_bytes: doubled.saturating_mul(2).saturating_add(of_waves.saturating_mul(2 * waves)),
            direct_bytes: DirectTable::bytes_for(nodes),
            hashed_bytes: HashedTable::bytes_for(total),
        }
    }

    /// For batches that are known to reach no more than `nodes` of the graph's nodes and to draw from no more than
    /// `entries` entries of their lists.
    pub fn of_part(settings: &Settings, batch: u64, part: (u64, u64), graph_nodes: u64) -> Bound {
        let (nodes, entries) = part;
        Bound {
            direct_bytes: DirectTable::bytes_for(graph_nodes),
            ..Bound::new(settings, batch, nodes, entries, 1)
        }
    }

    /// Bytes of a sampler with a budget that lets it have the table by node of the graph, or else with the smaller
    /// table; `samples` samples included.
    pub fn bytes(&self, samples: u64) -> u64 {
        let others = self.buffer_bytes.saturating_add(self.sample_bytes.saturating_mul(samples));
        let with_direct =
            others.saturating_add(self.direct_bytes).max(self.direct_bytes.saturating_mul(DIRECT_PART));
        // While a hash table grows, the one before it is held too.
        let with_hashed = others.saturating_add(self.hashed_bytes.saturating_mul(3) / 2);
        with_direct.min(with_hashed)
    }
}

/// Bytes that come with each neighbour.
fn carried_bytes(settings: &Settings) -> u64 {
    let carry = settings.carry;
    4 * (carry.positions as u64 + carry.relations as u64) + 8 * carry.edges as u64
}

/// Bytes that sampling one batch reads and writes: what bounds its speed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Touched {
    /// Offsets and entries of neighbour lists.
    pub adjacency_bytes: u64,
    /// Words of the table from node to place.
    pub table_bytes: u64,
    /// The sample.
    pub sample_bytes: u64,
}

impl Touched {
    /// What a sample took: two offsets a list, every entry taken (ShaDow: every entry), one table word a look-up.
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

    /// All of it.
    pub fn bytes(&self) -> u64 {
        self.adjacency_bytes + self.table_bytes + self.sample_bytes
    }
}
