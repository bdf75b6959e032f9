//! One layer over all targets: the rows stay and the adjacency is streamed past them, or the rows are streamed past
//! the targets.

use super::TakeRows;
use super::lists::{Degrees, ListPiece, ListReading};
use super::scratch::{Scratch, output_name, projected_name};
use super::sizes::{LayerShape, LayerSizes};
use super::table::{RowService, StoredTable, Table, TableWriter, Traffic, Wanted};
use super::tiles::{TileNodes, Tiles};
use crate::memory::Bytes;
use crate::{Learner, Result, TrainError};
use esker_nn::{Backend, Shape, WholeLayer, WholeSums, WholeTargets};
use esker_sample::StoredId;
use esker_strategies::Job;
use esker_types::{Progress, Unit};
use rayon::prelude::*;
use serde::Serialize;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// If at least one row in this many of a chunk is needed, the whole chunk is read.
const DENSE: usize = 2;

/// What inference over a whole graph has read and written.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct WholeCounters {
    /// Bytes of rows read, as f32.
    pub row_bytes_read: u64,
    /// Bytes of hidden rows written.
    pub row_bytes_written: u64,
    /// Bytes of adjacency read.
    pub adjacency_bytes_read: u64,
    /// Bytes of rows that reading every row in every pass would have read.
    pub stream_bytes: u64,
    /// Bytes of rows that reading only neighbours would have read.
    pub gather_bytes: u64,
    /// Passes over the rows of all nodes.
    pub passes: u64,
    /// Layers whose rows stayed on the device.
    pub resident_layers: u64,
}

impl WholeCounters {
    pub(super) fn add_traffic(&mut self, traffic: &Traffic) {
        self.row_bytes_read += traffic.rows_read.load(Relaxed);
        self.row_bytes_written += traffic.rows_written.load(Relaxed);
    }
}

/// Where the output of a layer goes.
pub(super) enum Sink<'a, B: Backend> {
    /// To a table, for the next layer.
    Table,
    /// To the caller.
    Take(TakeRows<'a, B>),
}

/// One layer.
pub(super) struct LayerJob<'a, B: Backend> {
    pub learner: &'a Learner<B>,
    pub job: &'a Job,
    pub stop: &'a dyn Fn() -> bool,
    pub progress: &'a dyn Progress,
    pub scratch: &'a Scratch,
    pub traffic: Arc<Traffic>,
    pub layer: usize,
    pub shape: LayerShape,
    pub sizes: LayerSizes,
    pub tiles: Tiles,
    pub counters: &'a mut WholeCounters,
}

/// A tile while its neighbours are added.
struct OpenTile<B: Backend> {
    nodes: TileNodes,
    degrees: Vec<u32>,
    sums: WholeSums<B>,
}

/// The rows of a layer.
struct LayerRows<B: Backend> {
    /// Input rows: the targets' own.
    own: Option<TableRows<B>>,
    /// The rows that are aggregated, if they are not the input rows.
    projected: Option<TableRows<B>>,
    /// GCN's factors of all nodes, if their rows stay.
    scales: Option<B::Matrix>,
}

/// Rows on the device, or to be read.
enum TableRows<B: Backend> {
    Resident(B::Matrix),
    Stored(RowService<B>),
}

impl<B: Backend + Clone + 'static> TableRows<B> {
    /// The rows of some nodes.
    fn of(&mut self, learner: &Learner<B>, nodes: &TileNodes) -> Result<B::Matrix> {
        match self {
            TableRows::Resident(table) => Ok(gathered(learner, table, nodes)),
            TableRows::Stored(service) => {
                let wanted = match nodes {
                    TileNodes::Range(first, count) => {
                        Wanted::Range { first: *first, count: *count, skipped: Vec::new() }
                    }
                    some => Wanted::Nodes(some.ids()),
                };
                service.fetch(learner.backend(), wanted)
            }
        }
    }
}

impl<B: Backend> LayerRows<B> {
    /// The rows that are aggregated.
    fn aggregated(&mut self) -> &mut TableRows<B> {
        match &mut self.projected {
            Some(rows) => rows,
            None => self.own.as_mut().expect("a layer that does not project reads its input"),
        }
    }
}

impl<'a, B: Backend + Clone + 'static> LayerJob<'a, B> {
    fn whole(&self) -> WholeLayer<'a, B> {
        self.learner.model().whole_layer(self.layer)
    }

    fn check_stop(&self) -> Result<()> {
        if (self.stop)() { Err(TrainError::Stopped) } else { Ok(()) }
    }

    /// Computes the layer. Returns its output, if that goes to a table.
    pub fn run<W: StoredId>(&mut self, input: Table<B>, sink: Sink<'_, B>) -> Result<Option<Table<B>>> {
        let mut rows = self.rows(input)?;
        let (mut writer, done) = match &sink {
            Sink::Take(_) => (None, 0),
            Sink::Table => {
                let (writer, done) =
                    self.writer(self.sizes.output_stays, self.shape.output, &output_name(self.layer))?;
                (Some(writer), done)
            }
        };
        let mut take = match sink {
            Sink::Take(take) => Some(take),
            Sink::Table => None,
        };
        let learner = self.learner;
        let mut emit = |nodes: &TileNodes, output: B::Matrix| match (&mut writer, &mut take) {
            (Some(writer), _) => writer.append(learner, &output),
            (None, Some(take)) => take(&nodes.ids(), &output),
            (None, None) => unreachable!("the output of a layer goes somewhere"),
        };
        let from = done / self.shape.tile;
        let name = format!("computing layer {}", self.layer + 1);
        self.progress.stage(&name, Some(self.tiles.targets()), Unit::Count("nodes"));
        self.progress.advance((from * self.shape.tile).min(self.tiles.targets()));
        let ended = match self.shape.needs.neighbours {
            false => self.alone(&mut rows, from, &mut emit),
            true => self.with_neighbours::<W>(&mut rows, from, &mut emit),
        };
        self.progress.finish();
        drop(rows);
        match (ended, writer) {
            (Ok(()), Some(writer)) => Ok(Some(writer.finish()?)),
            (Ok(()), None) => Ok(None),
            (Err(error), Some(mut writer)) => {
                // What is written stays for a later run. The error that ended this one matters more than one of now.
                let _ = writer.keep();
                Err(error)
            }
            (Err(error), None) => Err(error),
        }
    }

    /// Opens the rows of the layer, and projects them first if it projects.
    fn rows(&mut self, input: Table<B>) -> Result<LayerRows<B>> {
        let (needs, stays) = (self.shape.needs, self.sizes.input_stays);
        let reads_own = self.whole().reads_own();
        let mut projected = None;
        if needs.projects {
            let table = match self.scratch.finished(&projected_name(self.layer))? {
                Some(found) => Table::Stored(found),
                None => self.project(&input)?,
            };
            projected = Some(self.opened(table, stays)?);
        }
        let own = match needs.projects {
            false => Some(self.opened(input, stays && needs.neighbours)?),
            true if reads_own => Some(self.opened(input, false)?),
            true => None,
        };
        let scales = (needs.degrees && stays).then(|| self.scales_of_all()).transpose()?;
        self.counters.resident_layers += stays as u64;
        Ok(LayerRows { own, projected, scales })
    }

    /// Rows ready for use: all of them on the device, if they should stay there.
    fn opened(&mut self, table: Table<B>, stays: bool) -> Result<TableRows<B>> {
        let stored = match table {
            Table::Resident(rows) => return Ok(TableRows::Resident(rows)),
            Table::Stored(stored) => stored,
        };
        let mut service = self.service(&stored)?;
        if !stays {
            return Ok(TableRows::Stored(service));
        }
        let (nodes, tile) = (self.job.dataset.manifest().nodes.count, self.sizes.chunk_rows);
        let (learner, backend) = (self.learner, self.learner.backend());
        let mut all = backend.matrix(nodes as usize, stored.columns);
        let wanted = |first: u64| Wanted::Range {
            first,
            count: tile.min(nodes - first) as usize,
            skipped: Vec::new(),
        };
        self.progress.stage("loading rows", Some(nodes), Unit::Count("nodes"));
        let mut starts = (0..nodes).step_by(tile as usize);
        starts.next().into_iter().for_each(|first| service.request(wanted(first)));
        for first in (0..nodes).step_by(tile as usize) {
            self.check_stop()?;
            starts.next().into_iter().for_each(|next| service.request(wanted(next)));
            let rows = service.take(backend)?;
            let count = tile.min(nodes - first);
            let places: Vec<u32> = (first as u32..(first + count) as u32).collect();
            learner.compute(|| backend.scatter_rows(Some(&rows), &places, &mut all));
            self.progress.advance(count);
        }
        self.progress.finish();
        self.counters.passes += 1;
        Ok(TableRows::Resident(all))
    }

    fn service(&self, table: &StoredTable) -> Result<RowService<B>> {
        RowService::start(table, self.learner.backend(), &self.traffic)
    }

    /// The destination of rows of all nodes, and how many rows are there already.
    fn writer(&self, stays: bool, columns: usize, name: &str) -> Result<(TableWriter<B>, u64)> {
        if stays {
            let nodes = self.job.dataset.manifest().nodes.count as usize;
            return Ok((TableWriter::Resident(self.learner.backend().matrix(nodes, columns), 0), 0));
        }
        let (file, rows) = self.scratch.writer(name, columns, &self.traffic)?;
        Ok((TableWriter::File(Box::new(file)), rows))
    }

    /// Projects the rows of all nodes.
    fn project(&mut self, input: &Table<B>) -> Result<Table<B>> {
        let nodes = self.job.dataset.manifest().nodes.count;
        let all = Tiles::new(None, nodes, self.shape.tile as usize);
        let name = projected_name(self.layer);
        let (mut writer, done) = self.writer(self.sizes.input_stays, self.shape.needs.columns, &name)?;
        let mut service = match input {
            Table::Stored(stored) => Some(self.service(stored)?),
            Table::Resident(_) => None,
        };
        let stage = format!("projecting for layer {}", self.layer + 1);
        self.progress.stage(&stage, Some(nodes), Unit::Count("nodes"));
        for tile in done / self.shape.tile..all.count() {
            if let Err(error) = self.check_stop() {
                let _ = writer.keep();
                return Err(error);
            }
            let own = match (&mut service, input) {
                (Some(service), _) => {
                    let wanted = Wanted::Range {
                        first: all.nodes(tile).at(0),
                        count: all.rows(tile),
                        skipped: Vec::new(),
                    };
                    service.fetch(self.learner.backend(), wanted)?
                }
                (None, Table::Resident(table)) => gathered(self.learner, table, &all.nodes(tile)),
                (None, Table::Stored(_)) => unreachable!("stored rows are read by a service"),
            };
            let whole = self.whole();
            let rows = self.learner.compute(|| whole.project(&own));
            writer.append(self.learner, &rows)?;
            self.progress.advance(all.rows(tile) as u64);
        }
        self.progress.finish();
        writer.finish()
    }

    /// GCN's factors of all nodes.
    fn scales_of_all(&self) -> Result<B::Matrix> {
        let nodes = self.job.dataset.manifest().nodes.count;
        let mut degrees = Degrees::open(&self.job.dataset, self.job.direction)?;
        let all: Vec<u32> = (0..nodes).map(|node| degrees.of(node)).collect::<Result<_>>()?;
        Ok(self.whole().scales(&all))
    }

    /// A layer without neighbours.
    fn alone(
        &mut self,
        rows: &mut LayerRows<B>,
        from: u64,
        emit: &mut dyn FnMut(&TileNodes, B::Matrix) -> Result<()>,
    ) -> Result<()> {
        for tile in from..self.tiles.count() {
            self.check_stop()?;
            let nodes = self.tiles.nodes(tile);
            let degrees = vec![0; nodes.len()];
            let sums = self.whole().begin(None, &degrees, self.shape.needs.columns);
            self.close(rows, OpenTile { nodes, degrees, sums }, emit)?;
        }
        Ok(())
    }

    /// The last step of a tile: from its sums and its own rows to its output.
    fn close(
        &mut self,
        rows: &mut LayerRows<B>,
        tile: OpenTile<B>,
        emit: &mut dyn FnMut(&TileNodes, B::Matrix) -> Result<()>,
    ) -> Result<()> {
        let OpenTile { nodes, degrees, sums } = tile;
        let learner = self.learner;
        let of =
            |rows: &mut Option<TableRows<B>>| rows.as_mut().map(|rows| rows.of(learner, &nodes)).transpose();
        let own = if self.whole().reads_own() { of(&mut rows.own)? } else { None };
        let projected = of(&mut rows.projected)?;
        let targets = WholeTargets { own: own.as_ref(), projected: projected.as_ref(), degrees: &degrees };
        let whole = self.whole();
        let output = learner.compute(|| whole.end(sums, &targets));
        learner.backend().check()?;
        emit(&nodes, output)?;
        self.progress.advance(nodes.len() as u64);
        Ok(())
    }

    /// The first step of a tile.
    fn open(&self, rows: &mut LayerRows<B>, tile: u64, degrees: Vec<u32>) -> Result<OpenTile<B>> {
        let nodes = self.tiles.nodes(tile);
        let own = match self.shape.needs.begins_with_own {
            true => Some(rows.aggregated().of(self.learner, &nodes)?),
            false => None,
        };
        let columns = self.shape.needs.columns;
        let whole = self.whole();
        let sums = self.learner.compute(|| whole.begin(own, &degrees, columns));
        Ok(OpenTile { nodes, degrees, sums })
    }

    fn with_neighbours<W: StoredId>(
        &mut self,
        rows: &mut LayerRows<B>,
        from: u64,
        emit: &mut dyn FnMut(&TileNodes, B::Matrix) -> Result<()>,
    ) -> Result<()> {
        let reading = ListReading {
            dataset: self.job.dataset.clone(),
            direction: self.job.direction,
            tiles: self.tiles.clone(),
            from,
            skips_self: self.shape.needs.skips_self,
            most_entries: self.sizes.entries as usize,
        };
        let mut lists = reading.start::<W>();
        let mut block = TileBlock { tiles: Vec::new(), pieces: Vec::new(), entries: 0 };
        while let Some(piece) = lists.receive() {
            self.check_stop()?;
            let mut piece = piece?;
            self.counters.adjacency_bytes_read += (piece.nbrs.len() * size_of::<W>()) as u64;
            if let Some(degrees) = piece.degrees.take() {
                if !self.fits(&block, piece.nbrs.len(), 1) {
                    self.flush(rows, &mut block, emit)?;
                }
                let tile = self.open(rows, piece.tile, degrees)?;
                block.tiles.push(tile);
            } else if !self.fits(&block, piece.nbrs.len(), 0) {
                self.add(rows, &mut block)?;
            }
            block.entries += piece.nbrs.len() as u64;
            block.pieces.push((block.tiles.len() - 1, piece));
        }
        self.flush(rows, &mut block, emit)
    }

    /// Whether a block has room for more. If rows stay, tiles are computed one at a time.
    fn fits<W>(&self, block: &TileBlock<B, W>, entries: usize, tiles: u64) -> bool {
        let (tiles, entries) = (block.tiles.len() as u64 + tiles, block.entries + entries as u64);
        if self.sizes.input_stays {
            return tiles == 1 && block.pieces.is_empty();
        }
        let Bytes { host, device } = self.shape.block_bytes(tiles, entries);
        tiles == 1 && block.pieces.is_empty() || Bytes { host, device }.fit(self.sizes.block)
    }

    /// Adds all neighbours of a block, and closes its tiles.
    fn flush<W: StoredId>(
        &mut self,
        rows: &mut LayerRows<B>,
        block: &mut TileBlock<B, W>,
        emit: &mut dyn FnMut(&TileNodes, B::Matrix) -> Result<()>,
    ) -> Result<()> {
        self.add(rows, block)?;
        for tile in std::mem::take(&mut block.tiles) {
            self.close(rows, tile, emit)?;
        }
        Ok(())
    }

    /// Adds the neighbours of a block's pieces to its tiles.
    fn add<W: StoredId>(&mut self, rows: &mut LayerRows<B>, block: &mut TileBlock<B, W>) -> Result<()> {
        let (learner, whole) = (self.learner, self.whole());
        let pieces = std::mem::take(&mut block.pieces);
        block.entries = 0;
        let scales = rows.scales.take();
        let added = match rows.aggregated() {
            TableRows::Resident(table) => {
                for (tile, piece) in pieces {
                    let nbrs: Vec<u32> = piece.nbrs.iter().map(|nbr| nbr.node().0 as u32).collect();
                    let sums = &mut block.tiles[tile].sums;
                    learner.compute(|| {
                        let graph = learner.backend().part_graph(table.rows(), &piece.offsets, &nbrs);
                        whole.add(sums, &graph, table, scales.as_ref());
                    });
                }
                Ok(())
            }
            TableRows::Stored(service) => self.stream(service, &mut block.tiles, pieces),
        };
        rows.scales = scales;
        added
    }

    /// Streams the rows of all neighbours of some pieces past their tiles.
    fn stream<W: StoredId>(
        &mut self,
        service: &mut RowService<B>,
        tiles: &mut [OpenTile<B>],
        pieces: Vec<(usize, ListPiece<W>)>,
    ) -> Result<()> {
        let nodes = self.job.dataset.manifest().nodes.count;
        let (learner, chunk_rows) = (self.learner, self.sizes.chunk_rows);
        let whole = self.whole();
        let mut degrees = match self.shape.needs.degrees {
            true => Some(Degrees::open(&self.job.dataset, self.job.direction)?),
            false => None,
        };
        let mut cursors: Vec<PieceCursor<W>> =
            pieces.into_iter().map(|(tile, piece)| PieceCursor::new(tile, piece)).collect();
        let mut starts = (0..nodes).step_by(chunk_rows as usize);
        let mut next = self.chunk(&mut starts, &mut cursors, service);
        while let Some(chunk) = next.take() {
            self.check_stop()?;
            next = self.chunk(&mut starts, &mut cursors, service);
            let rows = service.take(learner.backend())?;
            let scales = match &mut degrees {
                None => None,
                Some(degrees) => {
                    let all = chunk.first..chunk.first + chunk.count as u64;
                    let all: Vec<u32> = all.map(|node| degrees.of(node)).collect::<Result<_>>()?;
                    Some(whole.scales(&all))
                }
            };
            for part in chunk.parts {
                let sums = &mut tiles[part.tile].sums;
                learner.compute(|| {
                    let graph = learner.backend().part_graph(chunk.count, &part.offsets, &part.nbrs);
                    whole.add(sums, &graph, &rows, scales.as_ref());
                });
            }
        }
        self.counters.passes += 1;
        Ok(())
    }

    /// The next chunk of rows that has neighbours, and the entries in it. Its rows are requested.
    fn chunk<W: StoredId>(
        &mut self,
        starts: &mut impl Iterator<Item = u64>,
        cursors: &mut [PieceCursor<W>],
        service: &RowService<B>,
    ) -> Option<RowChunk> {
        let nodes = self.job.dataset.manifest().nodes.count;
        let row_bytes = self.shape.needs.columns as u64 * 4;
        for first in starts {
            let count = self.sizes.chunk_rows.min(nodes - first) as usize;
            let end = first + count as u64;
            let take = |cursor: &mut PieceCursor<W>| cursor.take(first, end);
            let parts: Vec<ChunkPart> =
                self.learner.install(|| cursors.par_iter_mut().filter_map(take).collect());
            self.counters.stream_bytes += count as u64 * row_bytes;
            if parts.is_empty() {
                continue;
            }
            let mut skipped = vec![true; count];
            parts.iter().for_each(|part| part.nbrs.iter().for_each(|nbr| skipped[*nbr as usize] = false));
            let needed = skipped.iter().filter(|skip| !**skip).count();
            self.counters.gather_bytes += needed as u64 * row_bytes;
            let skipped = if needed * DENSE >= count { Vec::new() } else { skipped };
            service.request(Wanted::Range { first, count, skipped });
            return Some(RowChunk { first, count, parts });
        }
        None
    }
}

/// Rows of some nodes of a table on the device.
fn gathered<B: Backend + Clone + 'static>(
    learner: &Learner<B>,
    table: &B::Matrix,
    nodes: &TileNodes,
) -> B::Matrix {
    let places: Vec<u32> = (0..nodes.len()).map(|index| nodes.at(index) as u32).collect();
    let mut rows = learner.backend().matrix(places.len(), table.columns());
    learner.compute(|| learner.backend().gather_rows(table, &places, &mut rows));
    rows
}

/// Tiles that are computed together, and neighbours that are not added yet.
struct TileBlock<B: Backend, W> {
    tiles: Vec<OpenTile<B>>,
    /// Each with the index of its tile.
    pieces: Vec<(usize, ListPiece<W>)>,
    entries: u64,
}

/// Consecutive rows, and the neighbours among them.
struct RowChunk {
    first: u64,
    count: usize,
    parts: Vec<ChunkPart>,
}

/// The neighbours of a tile in a chunk.
struct ChunkPart {
    tile: usize,
    offsets: Vec<u32>,
    /// Rows of the chunk.
    nbrs: Vec<u32>,
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

    /// The entries from node `first` to before node `end`. Chunks must ascend.
    fn take(&mut self, first: u64, end: u64) -> Option<ChunkPart> {
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
                nbrs.push((node - first) as u32);
                *next += 1;
            }
            offsets.push(nbrs.len() as u32);
        }
        (!nbrs.is_empty()).then_some(ChunkPart { tile: self.tile, offsets, nbrs })
    }
}
