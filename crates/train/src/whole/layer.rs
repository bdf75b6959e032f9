//! One layer over all targets: the rows stay and the adjacency is streamed past them, or the rows are streamed past
//! the targets.

use super::TakeRows;
use super::lists::{Degrees, ListPiece, ListReading};
use super::scratch::{Scratch, output_name, projected_name};
use super::sizes::{LayerShape, LayerSizes};
use super::staged::{KeptTile, StagedTiles, narrowed};
use super::stream::{BlockStream, ChunkPart, RowChunk};
use super::table::{OPEN_REQUESTS, RowService, StoredTable, Table, TableWriter, Traffic, Wanted};
use super::tiles::{TileNodes, Tiles};
use crate::memory::Bytes;
use crate::{Learner, Result, TrainError};
use esker_nn::LinkMath;
use esker_nn::{Backend, Shape, WholeFactors, WholeLayer, WholeSums, WholeTargets};
use esker_sample::StoredId;
use esker_strategies::Job;
use esker_types::{Dtype, Progress, Unit};
use rayon::prelude::*;
use serde::Serialize;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

/// Readers that load rows which stay on the device: one alone does not keep a disk busy.
pub(super) const LOADERS: usize = 4;

/// Where the time of inference over a whole graph went, in seconds.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct WholeSeconds {
    /// Loading rows that stay on the device.
    pub loading: f64,
    /// Projecting rows before they are aggregated.
    pub projecting: f64,
    /// Each layer, including the waits and the output below.
    pub layers: Vec<f64>,
    /// Waiting for adjacency.
    pub adjacency_waits: f64,
    /// Waiting for rows.
    pub row_waits: f64,
    /// Handing output rows over: to a table, a file, or the caller.
    pub output: f64,
}

/// What inference over a whole graph has read and written.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct WholeCounters {
    /// Bytes of rows read, as f32.
    pub row_bytes_read: u64,
    /// How many of them were read before the run was opened.
    pub row_bytes_early: u64,
    /// Bytes of hidden rows written.
    pub row_bytes_written: u64,
    /// Bytes of adjacency read.
    pub adjacency_bytes_read: u64,
    /// Bytes of rows that reading every row in every pass would have read.
    pub stream_bytes: u64,
    /// Bytes of rows that reading only neighbours would have read.
    pub gather_bytes: u64,
    /// Passes over the rows that are needed.
    pub passes: u64,
    /// Layers whose rows stayed on the device.
    pub resident_layers: u64,
    /// Where the time went.
    pub seconds: WholeSeconds,
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
    /// The adjacency of all tiles, if it stays on the device: empty before the first layer that reads it.
    pub adjacency: Option<&'a mut Vec<KeptTile<B>>>,
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
    /// The factors of all rows that are aggregated, if they stay.
    factors: Option<WholeFactors<B>>,
}

/// Rows on the device, or to be read.
enum TableRows<B: Backend> {
    Resident(B::Matrix),
    Stored(RowService<B>),
}

impl<B: LinkMath> TableRows<B> {
    /// The rows of some nodes.
    fn of(&mut self, learner: &Learner<B>, nodes: &TileNodes) -> Result<B::Matrix> {
        match self {
            TableRows::Resident(table) => Ok(gathered(learner, table, nodes)),
            TableRows::Stored(service) => {
                let wanted = match nodes {
                    TileNodes::Range(first, count) => Wanted::Range { first: *first, count: *count },
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

impl<'a, B: LinkMath> LayerJob<'a, B> {
    fn whole(&self) -> WholeLayer<'a, B> {
        self.learner.model().whole_layer(self.layer)
    }

    fn check_stop(&self) -> Result<()> {
        if (self.stop)() { Err(TrainError::Stopped) } else { Ok(()) }
    }

    /// Computes the layer. Returns its output, if that goes to a table.
    pub fn run(&mut self, input: Table<B>, sink: Sink<'_, B>) -> Result<Option<Table<B>>> {
        match self.job.dataset.manifest().id_dtype() {
            Dtype::U64 => self.run_as::<u64>(input, sink),
            _ => self.run_as::<u32>(input, sink),
        }
    }

    /// The same, with ids as they are stored.
    fn run_as<W: StoredId>(&mut self, input: Table<B>, sink: Sink<'_, B>) -> Result<Option<Table<B>>> {
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
        self.tiles.start_at(done);
        if done > 0 {
            // Other layers have other tiles.
            self.adjacency = None;
        }
        // Adjacency is read while rows are loaded.
        let staged = self.stage_adjacency::<W>()?;
        let mut rows = self.rows(input)?;
        let (started, mut output_seconds) = (Instant::now(), 0.0);
        let mut emit = |nodes: &TileNodes, output: B::Matrix| {
            let started = Instant::now();
            let done = match (&mut writer, &mut take) {
                (Some(writer), _) => writer.append(learner, &output),
                (None, Some(take)) => take(&nodes.ids(), &output),
                (None, None) => unreachable!("the output of a layer goes somewhere"),
            };
            output_seconds += started.elapsed().as_secs_f64();
            done
        };
        let name = format!("computing layer {}", self.layer + 1);
        self.progress.stage(&name, Some(self.tiles.targets()), Unit::Count("nodes"));
        self.progress.advance(done.min(self.tiles.targets()));
        let ended = match self.shape.needs.neighbours {
            false => self.alone(&mut rows, &mut emit),
            true => match staged {
                Some(staged) => self.with_staged(staged, &mut rows, &mut emit),
                None => self.with_neighbours::<W>(&mut rows, &mut emit),
            },
        };
        self.progress.finish();
        self.counters.seconds.layers.push(started.elapsed().as_secs_f64());
        self.counters.seconds.output += output_seconds;
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
        self.counters.resident_layers += stays as u64;
        let mut rows = LayerRows { own, projected, factors: None };
        if let (true, TableRows::Resident(table)) = (needs.neighbours, rows.aggregated()) {
            rows.factors = Some(self.factors_of_all(table)?);
        }
        Ok(rows)
    }

    /// Rows ready for use: all of them on the device, if they should stay there.
    fn opened(&mut self, table: Table<B>, stays: bool) -> Result<TableRows<B>> {
        let stored = match table {
            Table::Resident(rows) => return Ok(TableRows::Resident(rows)),
            Table::Stored(stored) => stored,
        };
        if !stays {
            return Ok(TableRows::Stored(self.service(&stored)?));
        }
        let started = Instant::now();
        let nodes = self.job.dataset.manifest().nodes.count;
        // Together they have as many rows in memory as one reader with whole chunks.
        let tile = self.sizes.chunk_rows.div_ceil(LOADERS as u64).max(1);
        let (learner, backend) = (self.learner, self.learner.backend());
        let mut service = RowService::start(&stored, backend, &self.traffic, LOADERS)?;
        let mut all = backend.matrix(nodes as usize, stored.columns);
        let wanted = |first: u64| Wanted::Range { first, count: tile.min(nodes - first) as usize };
        self.progress.stage("loading rows", Some(nodes), Unit::Count("nodes"));
        let mut starts = (0..nodes).step_by(tile as usize);
        starts.by_ref().take(LOADERS).for_each(|first| service.request(wanted(first)));
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
        self.counters.seconds.loading += started.elapsed().as_secs_f64();
        Ok(TableRows::Resident(all))
    }

    fn service(&self, table: &StoredTable) -> Result<RowService<B>> {
        RowService::start(table, self.learner.backend(), &self.traffic, self.sizes.readers)
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
        let name = projected_name(self.layer);
        let (mut writer, done) = self.writer(self.sizes.input_stays, self.shape.needs.columns, &name)?;
        let mut all = Tiles::new(None, nodes, self.shape.tile as usize);
        all.start_at(done);
        let mut service = match input {
            Table::Stored(stored) => Some(self.service(stored)?),
            Table::Resident(_) => None,
        };
        let started = Instant::now();
        let stage = format!("projecting for layer {}", self.layer + 1);
        self.progress.stage(&stage, Some(nodes), Unit::Count("nodes"));
        self.progress.advance(done);
        for tile in 0..all.count() {
            if let Err(error) = self.check_stop() {
                let _ = writer.keep();
                return Err(error);
            }
            let own = match (&mut service, input) {
                (Some(service), _) => {
                    let wanted = Wanted::Range { first: all.nodes(tile).at(0), count: all.rows(tile) };
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
        self.counters.seconds.projecting += started.elapsed().as_secs_f64();
        writer.finish()
    }

    /// The factors of the rows of all nodes.
    fn factors_of_all(&self, rows: &B::Matrix) -> Result<WholeFactors<B>> {
        let mut degrees = self.degrees()?;
        let all = degrees.as_mut().map(|degrees| degrees_of(degrees, rows.rows(), |row| row as u64));
        let (all, whole) = (all.transpose()?, self.whole());
        Ok(self.learner.compute(|| whole.factors(rows, all.as_deref())))
    }

    /// The degrees of nodes, if the layer weights rows by them.
    fn degrees(&self) -> Result<Option<Degrees>> {
        let open = || Degrees::open(&self.job.dataset, self.job.direction);
        self.shape.needs.degrees.then(open).transpose()
    }

    /// A layer without neighbours.
    fn alone(
        &mut self,
        rows: &mut LayerRows<B>,
        emit: &mut dyn FnMut(&TileNodes, B::Matrix) -> Result<()>,
    ) -> Result<()> {
        for tile in 0..self.tiles.count() {
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

    /// How the adjacency of the tiles is read.
    fn reading(&self) -> ListReading {
        ListReading {
            dataset: self.job.dataset.clone(),
            direction: self.job.direction,
            tiles: self.tiles.clone(),
            skips_self: self.shape.needs.skips_self,
            most_entries: self.sizes.entries as usize,
        }
    }

    /// Starts to bring the adjacency to the device, if it stays there and is not there yet.
    fn stage_adjacency<W: StoredId>(&self) -> Result<Option<StagedTiles<B>>> {
        if !self.shape.needs.neighbours || self.adjacency.as_ref().is_none_or(|kept| !kept.is_empty()) {
            return Ok(None);
        }
        let nodes = self.job.dataset.manifest().nodes.count as usize;
        StagedTiles::start::<W>(self.reading(), self.learner.backend(), nodes).map(Some)
    }

    fn with_neighbours<W: StoredId>(
        &mut self,
        rows: &mut LayerRows<B>,
        emit: &mut dyn FnMut(&TileNodes, B::Matrix) -> Result<()>,
    ) -> Result<()> {
        if self.adjacency.as_ref().is_some_and(|kept| !kept.is_empty()) {
            return self.with_kept(rows, emit);
        }
        let mut lists = self.reading().start::<W>();
        let mut waits = 0.0;
        let mut block = TileBlock { tiles: Vec::new(), pieces: Vec::new(), entries: 0 };
        loop {
            let started = Instant::now();
            let Some(piece) = lists.receive() else { break };
            waits += started.elapsed().as_secs_f64();
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
        self.counters.seconds.adjacency_waits += waits;
        self.flush(rows, &mut block, emit)
    }

    /// The same, with neighbours that are brought to the device meanwhile, and stay there.
    fn with_staged(
        &mut self,
        mut staged: StagedTiles<B>,
        rows: &mut LayerRows<B>,
        emit: &mut dyn FnMut(&TileNodes, B::Matrix) -> Result<()>,
    ) -> Result<()> {
        let Some(kept) = self.adjacency.take() else { return Ok(()) };
        loop {
            let started = Instant::now();
            let Some(tile) = staged.receive()? else { return Ok(()) };
            self.counters.seconds.adjacency_waits += started.elapsed().as_secs_f64();
            self.counters.adjacency_bytes_read += tile.bytes_read;
            self.whole_tile(rows, kept.len() as u64, &tile, emit)?;
            kept.push(tile);
        }
    }

    /// The same, with neighbours that an earlier layer left on the device.
    fn with_kept(
        &mut self,
        rows: &mut LayerRows<B>,
        emit: &mut dyn FnMut(&TileNodes, B::Matrix) -> Result<()>,
    ) -> Result<()> {
        let Some(kept) = self.adjacency.take() else { return Ok(()) };
        for (number, tile) in kept.iter().enumerate() {
            self.whole_tile(rows, number as u64, tile, emit)?;
        }
        Ok(())
    }

    /// Computes a tile whose neighbours are on the device, as all rows are.
    fn whole_tile(
        &mut self,
        rows: &mut LayerRows<B>,
        number: u64,
        tile: &KeptTile<B>,
        emit: &mut dyn FnMut(&TileNodes, B::Matrix) -> Result<()>,
    ) -> Result<()> {
        self.check_stop()?;
        let mut open = self.open(rows, number, tile.degrees.clone())?;
        let factors = rows.factors.take().expect("rows that stay have factors");
        let TableRows::Resident(table) = rows.aggregated() else {
            unreachable!("adjacency stays only if rows do")
        };
        let whole = self.whole();
        self.learner.compute(|| {
            tile.graphs.iter().for_each(|graph| whole.add(&mut open.sums, graph, table, &factors));
        });
        rows.factors = Some(factors);
        self.close(rows, open, emit)
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
        let factors = rows.factors.take();
        let added = match (rows.aggregated(), &factors) {
            (TableRows::Resident(table), Some(factors)) => {
                for (tile, piece) in pieces {
                    let (nbrs, sums) = (narrowed(&piece.nbrs), &mut block.tiles[tile].sums);
                    learner.compute(|| {
                        let graph = learner.backend().part_graph(table.rows(), &piece.offsets, &nbrs);
                        whole.add(sums, &graph, table, factors);
                    });
                }
                Ok(())
            }
            (TableRows::Resident(_), None) => unreachable!("rows that stay have factors"),
            (TableRows::Stored(service), _) => self.stream(service, &mut block.tiles, pieces),
        };
        rows.factors = factors;
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
        let (learner, row_bytes) = (self.learner, self.shape.needs.columns as u64 * 4);
        let mut stream = BlockStream::new(pieces, nodes, self.sizes.chunk_rows, row_bytes);
        self.counters.stream_bytes += nodes * row_bytes;
        self.counters.gather_bytes += stream.needed_rows() * row_bytes;
        let mut degrees = self.degrees()?;
        let mut requested = VecDeque::new();
        loop {
            while requested.len() < OPEN_REQUESTS
                && let Some(chunk) = learner.install(|| stream.next_chunk())
            {
                service.request(chunk.rows.wanted());
                requested.push_back(chunk);
            }
            let Some(chunk) = requested.pop_front() else { break };
            self.check_stop()?;
            let started = Instant::now();
            let rows = service.take(learner.backend())?;
            self.counters.seconds.row_waits += started.elapsed().as_secs_f64();
            let of_rows = degrees
                .as_mut()
                .map(|degrees| degrees_of(degrees, chunk.rows.count(), |row| chunk.rows.node(row)));
            self.add_chunk(tiles, chunk, &rows, of_rows.transpose()?.as_deref());
        }
        self.counters.passes += 1;
        Ok(())
    }

    /// Adds the neighbours of all tiles that are in a chunk. If threads compute, each takes some tiles.
    fn add_chunk(
        &self,
        tiles: &mut [OpenTile<B>],
        chunk: RowChunk,
        rows: &B::Matrix,
        degrees: Option<&[u32]>,
    ) {
        let (learner, whole, count) = (self.learner, self.whole(), chunk.rows.count());
        let mut parts = chunk.parts.into_iter().peekable();
        let mut work: Vec<(&mut WholeSums<B>, Vec<ChunkPart>)> = Vec::new();
        for (index, tile) in tiles.iter_mut().enumerate() {
            let own: Vec<ChunkPart> =
                std::iter::from_fn(|| parts.next_if(|part| part.tile == index)).collect();
            if !own.is_empty() {
                work.push((&mut tile.sums, own));
            }
        }
        learner.compute(|| {
            let factors = whole.factors(rows, degrees);
            let add = |(sums, parts): (&mut WholeSums<B>, Vec<ChunkPart>)| {
                for part in parts {
                    let graph = learner.backend().part_graph(count, &part.offsets, &part.nbrs);
                    whole.add(sums, &graph, rows, &factors);
                }
            };
            match learner.backend().in_host_memory() {
                true => work.into_par_iter().for_each(add),
                false => work.into_iter().for_each(add),
            }
        });
    }
}

/// The degrees of some nodes, ascending.
fn degrees_of(degrees: &mut Degrees, count: usize, node: impl Fn(usize) -> u64) -> Result<Vec<u32>> {
    (0..count).map(|row| degrees.of(node(row))).collect()
}

/// Rows of some nodes of a table on the device.
fn gathered<B: LinkMath>(learner: &Learner<B>, table: &B::Matrix, nodes: &TileNodes) -> B::Matrix {
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
