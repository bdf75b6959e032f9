//! Rows that do not fit into memory are streamed past a block of targets, chunk by chunk, in ascending order. Only rows
//! that are neighbours of the block are in a chunk, or all rows of a range, where that is as fast to read.

use super::lists::ListPiece;
use super::table::{OPEN_REQUESTS, Wanted};
use esker_sample::StoredId;
use esker_types::NodeId;
use rayon::prelude::*;

/// If needed rows are at most so many bytes apart on average, what lies between them is read too: a disk reads this much
/// in order about as fast as it finds one more row.
const APART_BYTES: u64 = 16 << 10;
const WORD: u64 = 64;

/// The rows that a block reads: a bit per node.
struct NeededRows {
    words: Vec<u64>,
    nodes: u64,
}

impl NeededRows {
    fn new<W: StoredId>(pieces: &[(usize, ListPiece<W>)], nodes: u64) -> NeededRows {
        let mut words = vec![0u64; nodes.div_ceil(WORD) as usize];
        for (_, piece) in pieces {
            for nbr in &piece.nbrs {
                let node = nbr.node().0;
                words[(node / WORD) as usize] |= 1 << (node % WORD);
            }
        }
        NeededRows { words, nodes }
    }

    /// The bits of a word from `first` to before `end`.
    fn bits(&self, word: usize, first: u64, end: u64) -> u64 {
        let start = word as u64 * WORD;
        let below = |node: u64| match node.saturating_sub(start) {
            count if count >= WORD => u64::MAX,
            count => (1 << count) - 1,
        };
        self.words[word] & below(end) & !below(first)
    }

    /// The first needed row from `from` on.
    fn first(&self, from: u64) -> Option<u64> {
        let mut word = (from / WORD) as usize;
        let mut bits = if from < self.nodes { self.bits(word, from, self.nodes) } else { return None };
        while bits == 0 {
            word += 1;
            bits = *self.words.get(word)?;
        }
        Some(word as u64 * WORD + bits.trailing_zeros() as u64)
    }

    fn count(&self, first: u64, end: u64) -> u64 {
        let words = (first / WORD) as usize..end.div_ceil(WORD) as usize;
        words.map(|word| self.bits(word, first, end).count_ones() as u64).sum()
    }

    /// Up to `most` needed rows from `first` on.
    fn listed(&self, first: u64, most: usize) -> ChunkRows {
        let first_word = (first / WORD) as usize;
        let (mut ids, mut before) = (Vec::new(), Vec::new());
        for word in first_word..self.words.len() {
            if ids.len() == most {
                break;
            }
            before.push(ids.len() as u32);
            let mut bits = self.bits(word, first, self.nodes);
            while bits != 0 && ids.len() < most {
                ids.push(NodeId(word as u64 * WORD + bits.trailing_zeros() as u64));
                bits &= bits - 1;
            }
        }
        ChunkRows::Listed { ids, first, before }
    }
}

/// The rows of a chunk.
pub(super) enum ChunkRows {
    /// All rows of a range.
    Range { first: u64, count: usize },
    /// Needed rows from `first` on, and how many of them come before each word of bits.
    Listed { ids: Vec<NodeId>, first: u64, before: Vec<u32> },
}

impl ChunkRows {
    pub fn count(&self) -> usize {
        match self {
            ChunkRows::Range { count, .. } => *count,
            ChunkRows::Listed { ids, .. } => ids.len(),
        }
    }

    pub fn wanted(&self) -> Wanted {
        match self {
            ChunkRows::Range { first, count } => Wanted::Range { first: *first, count: *count },
            ChunkRows::Listed { ids, .. } => Wanted::Nodes(ids.clone()),
        }
    }

    /// The node of a row.
    pub fn node(&self, row: usize) -> u64 {
        match self {
            ChunkRows::Range { first, .. } => first + row as u64,
            ChunkRows::Listed { ids, .. } => ids[row].0,
        }
    }

    /// The node after the last.
    fn end(&self) -> u64 {
        match self {
            ChunkRows::Range { first, count } => first + *count as u64,
            ChunkRows::Listed { ids, first, .. } => ids.last().map_or(*first, |node| node.0 + 1),
        }
    }

    /// The row of a node that is among them.
    #[inline(always)]
    fn row(&self, node: u64, needed: &NeededRows) -> u32 {
        match self {
            ChunkRows::Range { first, .. } => (node - first) as u32,
            ChunkRows::Listed { first, before, .. } => {
                let word = (node / WORD) as usize;
                let bits = needed.bits(word, *first, node);
                before[word - (*first / WORD) as usize] + bits.count_ones()
            }
        }
    }
}

/// Consecutive needed rows, and the neighbours among them.
pub(super) struct RowChunk {
    pub rows: ChunkRows,
    /// By tile.
    pub parts: Vec<ChunkPart>,
}

/// The neighbours of a tile in a chunk.
pub(super) struct ChunkPart {
    pub tile: usize,
    pub offsets: Vec<u32>,
    /// Rows of the chunk.
    pub nbrs: Vec<u32>,
}

/// The chunks of a block.
pub(super) struct BlockStream<W> {
    needed: NeededRows,
    cursors: Vec<PieceCursor<W>>,
    next: u64,
    chunk_rows: u64,
    /// Rows that are at most so many apart on average are read with what lies between them.
    apart: u64,
}

impl<W: StoredId> BlockStream<W> {
    /// Memory apart from the pieces.
    pub fn bytes_for(nodes: u64) -> u64 {
        // Bits, and counts of the chunks that are requested.
        nodes.div_ceil(WORD) * (8 + OPEN_REQUESTS as u64 * 4)
    }

    pub fn new(
        pieces: Vec<(usize, ListPiece<W>)>,
        nodes: u64,
        chunk_rows: u64,
        row_bytes: u64,
    ) -> BlockStream<W> {
        let needed = NeededRows::new(&pieces, nodes);
        let cursors = pieces.into_iter().map(|(tile, piece)| PieceCursor::new(tile, piece)).collect();
        let apart = (APART_BYTES / row_bytes.max(1)).max(1);
        BlockStream { needed, cursors, next: 0, chunk_rows: chunk_rows.max(1), apart }
    }

    /// Rows that are needed in all.
    pub fn needed_rows(&self) -> u64 {
        self.needed.count(0, self.needed.nodes)
    }

    /// The next chunk. The current threads find the neighbours in it.
    pub fn next_chunk(&mut self) -> Option<RowChunk> {
        let first = self.needed.first(self.next)?;
        let end = first.saturating_add(self.chunk_rows).min(self.needed.nodes);
        let rows = match self.needed.count(first, end) * self.apart >= end - first {
            // As long as the others, so that they use the same memory in turn.
            true => ChunkRows::Range { first, count: (end - first) as usize },
            false => self.needed.listed(first, self.chunk_rows as usize),
        };
        self.next = rows.end();
        let needed = &self.needed;
        let take = |cursor: &mut PieceCursor<W>| cursor.take(&rows, needed);
        let parts = self.cursors.par_iter_mut().filter_map(take).collect();
        Some(RowChunk { rows, parts })
    }
}

/// How far the neighbours of a piece have been added.
struct PieceCursor<W> {
    tile: usize,
    piece: ListPiece<W>,
    next: Vec<u32>,
}

impl<W: StoredId> PieceCursor<W> {
    fn new(tile: usize, piece: ListPiece<W>) -> PieceCursor<W> {
        let next = piece.offsets[..piece.offsets.len() - 1].to_vec();
        PieceCursor { tile, piece, next }
    }

    /// The entries among some rows. Chunks must ascend, and miss no row that is needed.
    fn take(&mut self, rows: &ChunkRows, needed: &NeededRows) -> Option<ChunkPart> {
        let end = rows.end();
        let mut offsets = Vec::with_capacity(self.piece.offsets.len());
        let mut nbrs = Vec::new();
        offsets.push(0);
        for (target, next) in self.next.iter_mut().enumerate() {
            let last = self.piece.offsets[target + 1];
            while *next < last {
                let node = self.piece.nbrs[*next as usize].node().0;
                if node >= end {
                    break;
                }
                nbrs.push(rows.row(node, needed));
                *next += 1;
            }
            offsets.push(nbrs.len() as u32);
        }
        (!nbrs.is_empty()).then_some(ChunkPart { tile: self.tile, offsets, nbrs })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn piece(lists: &[Vec<u32>]) -> ListPiece<u32> {
        let mut offsets = vec![0];
        offsets.extend(lists.iter().scan(0, |sum, list| {
            *sum += list.len() as u32;
            Some(*sum)
        }));
        ListPiece { tile: 0, degrees: None, offsets, nbrs: lists.concat(), last: true }
    }

    proptest! {
        /// Chunks ascend and are small enough, and every neighbour comes once, in order, at the row of its node.
        #[test]
        fn chunks_have_every_neighbour_once(
            lists in prop::collection::vec(prop::collection::vec(0u32..700, 0..30), 1..12),
            chunk_rows in 1u64..300,
            row_bytes in prop::sample::select(vec![4u64, 512, 4096, 20_000]),
        ) {
            let mut lists = lists;
            lists.iter_mut().for_each(|list| list.sort_unstable());
            let mut stream = BlockStream::new(vec![(0, piece(&lists))], 700, chunk_rows, row_bytes);
            let mut distinct: Vec<u32> = lists.concat();
            distinct.sort_unstable();
            distinct.dedup();
            prop_assert_eq!(stream.needed_rows(), distinct.len() as u64);
            let (mut found, mut end, mut read) = (vec![Vec::new(); lists.len()], 0, 0);
            while let Some(chunk) = stream.next_chunk() {
                prop_assert!(chunk.rows.node(0) >= end && chunk.rows.count() as u64 <= chunk_rows);
                prop_assert!(chunk.rows.count() > 0 && !chunk.parts.is_empty());
                (end, read) = (chunk.rows.end(), read + chunk.rows.count());
                for part in &chunk.parts {
                    for (target, found) in found.iter_mut().enumerate() {
                        let entries = part.offsets[target] as usize..part.offsets[target + 1] as usize;
                        found.extend(part.nbrs[entries].iter().map(|row| chunk.rows.node(*row as usize) as u32));
                    }
                }
            }
            prop_assert_eq!(found, lists);
            prop_assert!(read >= distinct.len() && read as u64 <= distinct.len() as u64 * (16384 / row_bytes).max(1) + chunk_rows);
        }
    }
}
