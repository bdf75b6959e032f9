//! How much memory sampling takes: bounded before it starts, counted while it runs.

use crate::relabel::{Direct, Hashed};
use crate::{Fanout, Form, Sample, Settings};

/// The most a batch can have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bound {
    /// Nodes.
    pub nodes: u64,
    /// Neighbours in all blocks.
    pub edges: u64,
    /// Bytes of one sample.
    pub sample_bytes: u64,
    /// Bytes of a sampler's own buffers, without its table.
    pub buffer_bytes: u64,
    /// Bytes of the table by node of the graph.
    pub direct_bytes: u64,
    /// Bytes of the table by node of the batch.
    pub hashed_bytes: u64,
}

impl Bound {
    /// For batches of `batch` seeds on a graph of `nodes` nodes whose lists have `entries` entries.
    pub fn new(settings: &Settings, batch: u64, nodes: u64, entries: u64) -> Bound {
        let (mut frontier, mut total, mut edges) = (batch.min(nodes), batch.min(nodes), 0u64);
        let mut listed = 0u64;
        for fanout in &settings.fanouts {
            let expanded = if settings.form == Form::Layered { total } else { frontier };
            let drawn = match fanout {
                Fanout::AtMost(count) => expanded.saturating_mul(*count as u64).min(entries),
                Fanout::All => entries,
            };
            edges = edges.saturating_add(drawn);
            listed = listed.saturating_add(expanded);
            frontier = drawn.min(nodes - total);
            total += frontier;
        }
        if settings.form == Form::Shadow {
            // The induced lists come on top of the drawn ones.
            edges = edges.saturating_add(entries);
            listed = listed.saturating_add(total);
        }
        let carry = settings.carry;
        let edge_bytes = 4 + 4 * (carry.positions as u64 + carry.relations as u64) + 8 * carry.edges as u64;
        let sample_bytes = edges
            .saturating_mul(edge_bytes)
            .saturating_add(total.saturating_mul(9))
            .saturating_add(listed.saturating_mul(8))
            .saturating_add(batch.saturating_mul(4));
        Bound {
            nodes: total,
            edges,
            sample_bytes,
            // The same arrays in order of discovery; buffers grow by doubling.
            buffer_bytes: sample_bytes.saturating_mul(2),
            direct_bytes: Direct::bytes_for(nodes),
            hashed_bytes: Hashed::bytes_for(total),
        }
    }
}

/// Bytes that sampling one batch reads and writes: what bounds its speed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Touched {
    /// Offsets and entries of neighbour lists.
    pub list_bytes: u64,
    /// Words of the table from node to place.
    pub table_bytes: u64,
    /// The sample.
    pub sample_bytes: u64,
}

impl Touched {
    /// What a sample took: two offsets a list, every entry taken (ShaDow: every entry), one table word a look-up.
    pub(crate) fn of(sample: &Sample, word_bytes: u64, table_word_bytes: u64) -> Touched {
        let lists: u64 = sample.blocks.iter().map(|block| block.degrees.len() as u64).sum();
        let entries = match sample.form {
            Form::Shadow => sample.blocks[0].degrees.iter().map(|degree| *degree as u64).sum(),
            _ => sample.edge_count(),
        };
        Touched {
            list_bytes: lists * 8 + entries * word_bytes,
            table_bytes: (entries + sample.seeds.len() as u64) * table_word_bytes,
            sample_bytes: sample.bytes(),
        }
    }

    /// All of it.
    pub fn bytes(&self) -> u64 {
        self.list_bytes + self.table_bytes + self.sample_bytes
    }
}
