//! The adjacency of all targets, streamed from disk: tile after tile, in pieces of limited length. Neighbours of a node
//! come in ascending order, in both directions too.

use super::tiles::{TileNodes, Tiles};
use crate::{Result, TrainError};
use esker_fetch::pipeline::Pipeline;
use esker_sample::{Direction, SampleError, StoredId};
use esker_store::{ArrayFile, Dataset, Elements, StoreError, file};
use std::sync::Arc;

/// Offsets, and entries of one direction, that are read at a time.
const BUFFER: usize = 1 << 15;
/// Entries that are skipped by reading. After a longer gap the stream is opened again.
const SKIPPED: u64 = 1 << 20;
/// Pieces that exist at a time: being read, waiting, being used.
pub(super) const PIECES: u64 = 3;

/// Some neighbours of the targets of a tile.
pub(super) struct ListPiece<W> {
    /// The tile.
    pub tile: u64,
    /// Neighbours of each target in the whole graph, if this is the first piece of the tile.
    pub degrees: Option<Vec<u32>>,
    /// Target `i` has the entries `nbrs[offsets[i]..offsets[i + 1]]` in this piece.
    pub offsets: Vec<u32>,
    /// The neighbours, ascending for each target, also from piece to piece.
    pub nbrs: Vec<W>,
    /// Whether the tile ends with it.
    pub last: bool,
}

/// How lists are read.
#[derive(Clone)]
pub(super) struct ListReading {
    pub dataset: Arc<Dataset>,
    pub direction: Direction,
    pub tiles: Tiles,
    /// Leaves out edges from a node to itself.
    pub skips_self: bool,
    /// Largest number of entries of a piece.
    pub most_entries: usize,
}

impl ListReading {
    /// Memory of reading, apart from pieces.
    pub fn reader_bytes(tile_rows: u64) -> u64 {
        // Entries and offsets.
        2 * ListReading::offset_bytes() + tile_rows * 40
    }

    /// Memory of reading offsets: two directions, each with a stream and a buffer.
    pub fn offset_bytes() -> u64 {
        2 * ((1 << 20) + BUFFER as u64 * 8)
    }

    /// Memory of a piece.
    pub fn piece_bytes<W>(entries: u64, tile_rows: u64) -> u64 {
        entries * size_of::<W>() as u64 + tile_rows * 8
    }

    /// Starts reading, ahead of who uses the pieces.
    pub fn start<W: StoredId>(self) -> Pipeline<ListPiece<W>, TrainError> {
        // A stream stays on the thread that opens it.
        let asked = Pipeline::start("ask", 0, |_| Ok::<_, TrainError>(Some(())));
        asked.then_with("adjacency", 1, move || Lists::<W>::open(self), |_, lists, ()| lists.next_piece())
    }
}

/// Arrays of each direction: offsets and neighbours.
fn arrays(dataset: &Dataset, direction: Direction) -> Result<Vec<[ArrayFile; 2]>> {
    let incoming = [file::IN_OFFSETS, file::IN_NEIGHBOURS];
    let outgoing = [file::OUT_OFFSETS, file::OUT_NEIGHBOURS];
    let names = match direction {
        Direction::Incoming => vec![incoming],
        Direction::Outgoing => vec![outgoing],
        Direction::Both => vec![incoming, outgoing],
    };
    let array = |name: &str| -> Result<ArrayFile> {
        let missing = || SampleError::NoAdjacency {
            dataset: dataset.directory().to_path_buf(),
            array: name.to_string(),
        };
        Ok(dataset.array(name).ok_or_else(missing)?.clone())
    };
    names.into_iter().map(|[offsets, nbrs]| Ok([array(offsets)?, array(nbrs)?])).collect()
}

/// The degrees of ascending nodes.
pub(super) struct Degrees {
    runs: Vec<Offsets>,
}

impl Degrees {
    pub fn open(dataset: &Dataset, direction: Direction) -> Result<Degrees> {
        let runs = arrays(dataset, direction)?.into_iter().map(|[offsets, _]| Offsets::open(&offsets));
        Ok(Degrees { runs: runs.collect::<Result<_>>()? })
    }

    /// The degree of a node. Nodes must not descend.
    pub fn of(&mut self, node: u64) -> Result<u32> {
        let mut sum = 0;
        for run in &mut self.runs {
            let (start, end) = run.pair(node)?;
            sum += end - start;
        }
        Ok(sum.min(u32::MAX as u64) as u32)
    }
}

/// Streams offsets.
struct Offsets {
    array: ArrayFile,
    elements: Elements,
    chunk: Vec<u64>,
    /// Index of the chunk's first offset.
    first: u64,
    count: usize,
    entries: u64,
}

impl Offsets {
    fn open(array: &ArrayFile) -> Result<Offsets> {
        let (elements, chunk) = (array.elements(0)?, vec![0; BUFFER]);
        Ok(Offsets { array: array.clone(), elements, chunk, first: 0, count: 0, entries: u64::MAX })
    }

    /// Where the entries of a node start and end. Nodes must not descend.
    fn pair(&mut self, node: u64) -> Result<(u64, u64)> {
        let (start, end) = (self.at(node)?, self.at(node + 1)?);
        if start > end || end > self.entries {
            let found = format!("{start}, then {end}");
            let expected = format!("offsets of node {node} that ascend, up to {}", self.entries);
            return Err(StoreError::inconsistent(self.array.path(), expected, found).into());
        }
        Ok((start, end))
    }

    fn at(&mut self, index: u64) -> Result<u64> {
        while index >= self.first + self.count as u64 {
            // Keep the last offset: it is where the next node's entries start.
            let kept = self.count.min(1);
            if kept == 1 {
                self.chunk[0] = self.chunk[self.count - 1];
            }
            self.first += (self.count - kept) as u64;
            let more = self.elements.fill_ids(&mut self.chunk[kept..])?;
            self.count = kept + more;
            if more == 0 {
                let expected = format!("an offset for node {index}");
                return Err(StoreError::inconsistent(self.array.path(), expected, "the end").into());
            }
        }
        Ok(self.chunk[(index - self.first) as usize])
    }
}

/// Streams the neighbours of one direction.
struct Entries<W> {
    array: ArrayFile,
    elements: Elements,
    chunk: Vec<W>,
    /// Index of the chunk's first entry.
    first: u64,
    count: usize,
    nodes: u64,
}

impl<W: StoredId> Entries<W> {
    fn open(array: &ArrayFile, nodes: u64) -> Result<Entries<W>> {
        let (elements, chunk) = (array.elements(0)?, vec![W::default(); BUFFER]);
        Ok(Entries { array: array.clone(), elements, chunk, first: 0, count: 0, nodes })
    }

    /// Some entries from `at` on, at least one and at most `most`. Positions must not descend.
    fn from(&mut self, at: u64, most: u64) -> Result<&[W]> {
        while at >= self.first + self.count as u64 {
            self.first += self.count as u64;
            self.count = 0;
            if at - self.first > SKIPPED {
                (self.elements, self.first) = (self.array.elements(at)?, at);
            }
            self.count = self.elements.fill(&mut self.chunk)?;
            let expected = || format!("nodes below {}", self.nodes);
            if self.count == 0 {
                return Err(StoreError::inconsistent(self.array.path(), expected(), "the end").into());
            }
            let largest = self.chunk[..self.count].iter().max().map_or(0, |largest| largest.node().0);
            if largest >= self.nodes {
                return Err(
                    StoreError::inconsistent(self.array.path(), expected(), largest.to_string()).into()
                );
            }
        }
        let start = (at - self.first) as usize;
        Ok(&self.chunk[start..self.count.min(start + most.min(usize::MAX as u64) as usize)])
    }
}

/// One direction of the adjacency.
struct AdjacencyRun<W> {
    offsets: Offsets,
    entries: Entries<W>,
    /// What is left of each target of the tile.
    left: Vec<(u64, u64)>,
}

struct Lists<W> {
    reading: ListReading,
    runs: Vec<AdjacencyRun<W>>,
    /// The tile, and the target in it, that is next.
    tile: u64,
    target: usize,
    /// Whether a piece of the tile was made.
    begun: bool,
}

impl<W: StoredId> Lists<W> {
    fn open(reading: ListReading) -> Result<Lists<W>> {
        let nodes = reading.dataset.manifest().nodes.count;
        let mut runs = Vec::new();
        for [offsets, nbrs] in arrays(&reading.dataset, reading.direction)? {
            let mut offsets = Offsets::open(&offsets)?;
            offsets.entries = nbrs.entry().rows;
            runs.push(AdjacencyRun { offsets, entries: Entries::open(&nbrs, nodes)?, left: Vec::new() });
        }
        Ok(Lists { reading, runs, tile: 0, target: 0, begun: false })
    }

    fn next_piece(&mut self) -> Result<Option<ListPiece<W>>> {
        let tiles = self.reading.tiles.clone();
        if self.tile == tiles.count() {
            return Ok(None);
        }
        let (nodes, rows) = (tiles.nodes(self.tile), tiles.rows(self.tile));
        let degrees = if self.begun { None } else { Some(self.begin_tile(&nodes)?) };
        let mut piece = ListPiece {
            tile: self.tile,
            degrees,
            offsets: vec![0; self.target + 1],
            nbrs: Vec::new(),
            last: false,
        };
        piece.offsets.reserve(rows - self.target);
        if self.target == 0 && self.take_tile(&nodes, &mut piece)? {
            self.target = rows;
        }
        while self.target < rows && piece.nbrs.len() < self.reading.most_entries {
            self.take(nodes.at(self.target), &mut piece.nbrs)?;
            if self.is_left() {
                break;
            }
            piece.offsets.push(piece.nbrs.len() as u32);
            self.target += 1;
        }
        piece.last = self.target == rows;
        piece.offsets.resize(rows + 1, piece.nbrs.len() as u32);
        self.begun = !piece.last;
        if piece.last {
            (self.tile, self.target) = (self.tile + 1, 0);
        }
        Ok(Some(piece))
    }

    /// Finds the entries of all targets of a tile. Returns their degrees.
    fn begin_tile(&mut self, nodes: &TileNodes) -> Result<Vec<u32>> {
        let mut degrees = vec![0u64; nodes.len()];
        for run in &mut self.runs {
            run.left.clear();
            for (index, degree) in degrees.iter_mut().enumerate() {
                let (start, end) = run.offsets.pair(nodes.at(index))?;
                run.left.push((start, end));
                *degree += end - start;
            }
        }
        Ok(degrees.into_iter().map(|degree| degree.min(u32::MAX as u64) as u32).collect())
    }

    /// Takes all entries of a tile at once, if nothing is to be left out, nothing to be merged, and they fit a piece.
    fn take_tile(&mut self, nodes: &TileNodes, piece: &mut ListPiece<W>) -> Result<bool> {
        let ([run], TileNodes::Range(..), false) = (&mut self.runs[..], nodes, self.reading.skips_self)
        else {
            return Ok(false);
        };
        // The targets follow each other, and so do their entries.
        let (mut at, end) = (run.left[0].0, run.left[run.left.len() - 1].1);
        if end - at > self.reading.most_entries as u64 {
            return Ok(false);
        }
        let first = at;
        piece.offsets.extend(run.left.iter().map(|(_, end)| (end - first) as u32));
        piece.nbrs.reserve_exact((end - at) as usize);
        while at < end {
            let entries = run.entries.from(at, end - at)?;
            piece.nbrs.extend_from_slice(entries);
            at += entries.len() as u64;
        }
        run.left.iter_mut().for_each(|left| left.0 = left.1);
        Ok(true)
    }

    /// Whether entries of the current target are left.
    fn is_left(&self) -> bool {
        self.runs.iter().any(|run| run.left[self.target].0 < run.left[self.target].1)
    }

    /// Takes entries of the current target, as many as the piece may have. Two runs are merged.
    fn take(&mut self, own: u64, to: &mut Vec<W>) -> Result<()> {
        let (target, skips_self, most) = (self.target, self.reading.skips_self, self.reading.most_entries);
        while to.len() < most {
            let mut open = self.runs.iter_mut().filter(|run| run.left[target].0 < run.left[target].1);
            let Some(first) = open.next() else { return Ok(()) };
            let room = (most - to.len()) as u64;
            let taken = |run: &mut AdjacencyRun<W>| -> Result<(W, usize)> {
                let (at, end) = run.left[target];
                let entries = run.entries.from(at, end - at)?;
                Ok((entries[0], entries.len()))
            };
            // As many of one run as come before the next of the other.
            let (run, bound) = match open.next() {
                None => (first, None),
                Some(second) => {
                    let (head, other) = (taken(first)?.0, taken(second)?.0);
                    if head <= other { (first, Some((other, true))) } else { (second, Some((head, false))) }
                }
            };
            let (at, end) = run.left[target];
            let entries = run.entries.from(at, (end - at).min(room))?;
            let count = match bound {
                None => entries.len(),
                Some((bound, with_equal)) => {
                    entries.partition_point(|entry| *entry < bound || (with_equal && *entry == bound))
                }
            };
            let taken = &entries[..count.max(1)];
            match skips_self {
                true => to.extend(taken.iter().filter(|entry| entry.node().0 != own)),
                false => to.extend_from_slice(taken),
            }
            run.left[target].0 += count.max(1) as u64;
        }
        Ok(())
    }
}
