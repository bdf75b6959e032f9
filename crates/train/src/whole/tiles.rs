//! Targets in fixed groups. Their size follows from the model alone, so that every number is computed in the same way
//! whatever the memory.

use esker_types::NodeId;
use std::sync::Arc;

/// Numbers of the widest rows of a tile: a few MiB.
const TILE_NUMBERS: usize = 1 << 20;
const LEAST_ROWS: usize = 64;
/// Unit tests have graphs of some thousand nodes, and want several tiles.
const MOST_ROWS: usize = if cfg!(test) { 256 } else { 8192 };

/// Rows per tile for rows of at most this many columns.
pub(super) fn tile_rows(columns: usize) -> usize {
    let rows = (TILE_NUMBERS / columns.max(1)).clamp(LEAST_ROWS, MOST_ROWS);
    1 << rows.ilog2()
}

/// All nodes, or some, ascending, in tiles.
#[derive(Clone)]
pub(super) struct Tiles {
    nodes: Option<Arc<Vec<NodeId>>>,
    total: u64,
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
        Tiles { total: nodes.map_or(all, |nodes| nodes.len() as u64), nodes: nodes.cloned(), rows }
    }

    /// Number of targets.
    pub fn targets(&self) -> u64 {
        self.total
    }

    /// Number of tiles.
    pub fn count(&self) -> u64 {
        self.total.div_ceil(self.rows as u64)
    }

    /// Targets of a tile.
    pub fn rows(&self, tile: u64) -> usize {
        (self.total - tile * self.rows as u64).min(self.rows as u64) as usize
    }

    pub fn nodes(&self, tile: u64) -> TileNodes {
        let (first, count) = (tile * self.rows as u64, self.rows(tile));
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
