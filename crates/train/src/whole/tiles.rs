//! Targets in groups. On a device with its own memory their size follows from the model alone, so that every number is
//! computed in the same way whatever the memory. The CPU computes rows in chunks of a fixed size: any number of them
//! will do, and less memory means smaller tiles.

use crate::memory::DeviceProfile;
use esker_nn::cpu::CHUNK_ROWS;
use esker_types::NodeId;
use std::sync::Arc;

/// Numbers of the widest rows of a tile: a few MiB. And the smallest number, if memory is short.
const MOST_NUMBERS: usize = 1 << 20;
/// The same on a device with its own memory. Each tile costs some launches and copies, whatever its size.
const DEVICE_NUMBERS: usize = 1 << 22;
const LEAST_NUMBERS: usize = 1 << 17;
const LEAST_ROWS: usize = 64;
/// Unit tests have graphs of some thousand nodes, and want several tiles.
const MOST_ROWS: usize = if cfg!(test) { 256 } else { 8192 };
const DEVICE_ROWS: usize = if cfg!(test) { 256 } else { 1 << 15 };

/// Rows per tile for rows of at most this many columns: what may be chosen, the largest first.
pub(super) fn tile_rows(columns: usize, device: DeviceProfile) -> Vec<usize> {
    let rows = |numbers: usize| (numbers / columns.max(1)).clamp(LEAST_ROWS, MOST_ROWS);
    if !device.in_host_memory {
        let rows = (DEVICE_NUMBERS / columns.max(1)).clamp(LEAST_ROWS, DEVICE_ROWS);
        return vec![1 << rows.ilog2()];
    }
    let numbers = std::iter::successors(Some(MOST_NUMBERS), |numbers| Some(numbers / 2));
    let fitting = numbers.take_while(|numbers| *numbers >= LEAST_NUMBERS);
    fitting.map(|numbers| (rows(numbers) / CHUNK_ROWS).max(1) * CHUNK_ROWS).collect()
}

/// All nodes, or some, ascending, in tiles.
#[derive(Clone)]
pub(super) struct Tiles {
    nodes: Option<Arc<Vec<NodeId>>>,
    /// The first target, and the one after the last.
    first: u64,
    end: u64,
    rows: usize,
}

/// The nodes of a tile.
#[derive(Clone)]
pub(super) enum TileNodes {
    /// Consecutive ones: the first and how many.
    Range(u64, usize),
    /// Some of a list.
    Some(Arc<Vec<NodeId>>, usize, usize),
}

impl Tiles {
    pub fn new(nodes: Option<&Arc<Vec<NodeId>>>, all: u64, rows: usize) -> Tiles {
        Tiles { first: 0, end: nodes.map_or(all, |nodes| nodes.len() as u64), nodes: nodes.cloned(), rows }
    }

    /// Leaves out targets that are done.
    pub fn start_at(&mut self, done: u64) {
        self.first = done.min(self.end);
    }

    /// Number of targets, including those that are done.
    pub fn targets(&self) -> u64 {
        self.end
    }

    /// Number of tiles.
    pub fn count(&self) -> u64 {
        (self.end - self.first).div_ceil(self.rows as u64)
    }

    /// Targets of a tile.
    pub fn rows(&self, tile: u64) -> usize {
        (self.end - self.first - tile * self.rows as u64).min(self.rows as u64) as usize
    }

    pub fn nodes(&self, tile: u64) -> TileNodes {
        let (first, count) = (self.first + tile * self.rows as u64, self.rows(tile));
        match &self.nodes {
            None => TileNodes::Range(first, count),
            Some(nodes) => TileNodes::Some(nodes.clone(), first as usize, count),
        }
    }
}

impl TileNodes {
    pub fn len(&self) -> usize {
        match self {
            TileNodes::Range(_, count) | TileNodes::Some(_, _, count) => *count,
        }
    }

    #[inline(always)]
    pub fn at(&self, index: usize) -> u64 {
        match self {
            TileNodes::Range(first, _) => first + index as u64,
            TileNodes::Some(nodes, first, _) => nodes[first + index].0,
        }
    }

    pub fn ids(&self) -> Vec<NodeId> {
        (0..self.len()).map(|index| NodeId(self.at(index))).collect()
    }
}
