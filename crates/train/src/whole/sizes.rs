//! The memory of inference over a whole graph, and how it is used: which rows stay on the device, how many targets are
//! computed at a time, and how many rows are read at a time.

use super::layer::LOADERS;
use super::lists::{ListReading, PIECES};
use super::stream::BlockStream;
use super::table::{COPY_BYTES, MOST_READERS, OPEN_REQUESTS, StoredTable};
use super::tiles::tile_rows;
use crate::memory::{Bytes, DeviceProfile};
use crate::{Result, RunConfig, TrainError};
use esker_nn::{StepShape, WholeNeeds, memory_bytes};
use esker_strategies::JobOutline;
use esker_types::ByteCount;

/// Entries of a piece of adjacency, at least and at most.
const LEAST_ENTRIES: u64 = 1 << 15;
const MOST_ENTRIES: u64 = 1 << 22;
/// Bytes of rows read at a time, at least. More, if memory allows.
const LEAST_CHUNK_BYTES: u64 = 1 << 19;
/// Rows read at a time, at most. More would not make reading faster.
const MOST_CHUNK_BYTES: u64 = 256 << 20;
/// Bytes of rows read at a time while all of them are loaded.
const LOADED_BYTES: u64 = 32 << 20;
/// The smallest memory of a tile is at most one part in this many of the memory, unless tiles cannot be smaller.
const TILE_PART: u64 = 3;
/// Tiles of output rows, with their nodes and classes: filled, handed over, turned into predictions, copied for the file,
/// two waiting, being written.
const OUTPUT_BUFFERS: u64 = 7;
/// One part in this many of a block's memory is left to the allocator, which keeps what many small blocks leave.
const SLACK_PART: u64 = 6;
/// The part of memory for rows being read: one in this many for all requests.
const CHUNK_PART: u64 = 8;
/// There is a second reader if it takes at most one part in this many of the memory.
const READER_PART: u64 = 16;

/// The sizes of one layer that do not depend on memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct LayerShape {
    pub needs: WholeNeeds,
    /// Columns of input rows and of output rows.
    pub input: usize,
    pub output: usize,
    /// Targets per tile.
    pub tile: u64,
    nodes: u64,
    edges: u64,
    id_bytes: u64,
    /// Columns of the rows that are handed to the caller; 0 if they go to a table.
    handed_over: usize,
    /// Matrices of a tile, from its sums to its output.
    work: u64,
    in_host_memory: bool,
}

/// How a layer uses its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LayerSizes {
    /// Whether the rows that it aggregates are all on the device.
    pub input_stays: bool,
    /// Whether its output rows stay on the device.
    pub output_stays: bool,
    /// Whether the adjacency may stay on the device for the layers after it.
    pub adjacency_stays: bool,
    /// Largest number of entries of a piece of adjacency.
    pub entries: u64,
    /// Rows read at a time.
    pub chunk_rows: u64,
    /// Readers of rows.
    pub readers: usize,
    /// Memory of targets and their neighbours that are computed at a time, if rows do not stay.
    pub block: Bytes,
}

/// Matrices come from a pool. On a device it may exceed what is used by a quarter; on the host, the run counts what it may
/// have beyond that.
fn pooled(bytes: u64, in_host_memory: bool) -> u64 {
    if in_host_memory { bytes } else { bytes.saturating_add(bytes / 4) }
}

/// Rows to be uploaded are in pinned memory, whose sizes are rounded up.
fn pinned(bytes: u64) -> u64 {
    bytes.saturating_add(bytes / 8 * 3)
}

impl LayerShape {
    /// The shapes of the first `layers` layers, with the largest tiles that leave most of `within` to rows and
    /// neighbours.
    pub fn all(
        config: &RunConfig,
        job: &JobOutline,
        outputs: usize,
        layers: usize,
        device: DeviceProfile,
        within: Bytes,
    ) -> Result<Vec<LayerShape>> {
        let dim = config.input_columns(job.dim() as usize);
        let widths = (0..config.model.layers).map(|layer| {
            let (input, output) = config.model.widths(layer, dim, outputs);
            input.max(output).max(config.model.whole_needs(layer, dim, outputs).columns)
        });
        let tiles = tile_rows(widths.max().unwrap_or(1), device);
        let least = tiles.last().copied();
        for tile in tiles {
            let shape = |layer| LayerShape::new(config, job, outputs, layer, device, tile);
            let mut shapes = (0..layers).map(shape).collect::<Result<Vec<LayerShape>>>()?;
            shapes.iter_mut().last().into_iter().for_each(|last| last.handed_over = last.output);
            let fits = |shape: &LayerShape| shape.least().host <= within.host / TILE_PART;
            if Some(tile) == least || shapes.iter().all(fits) {
                return Ok(shapes);
            }
        }
        unreachable!("there is a smallest tile")
    }

    fn new(
        config: &RunConfig,
        job: &JobOutline,
        outputs: usize,
        layer: usize,
        device: DeviceProfile,
        tile: usize,
    ) -> Result<LayerShape> {
        let dim = config.input_columns(job.dim() as usize);
        let (input, output) = config.model.widths(layer, dim, outputs);
        let needs = config.model.whole_needs(layer, dim, outputs);
        let manifest = job.dataset.manifest();
        let tile_in_use = (tile as u64).min(manifest.nodes.count.max(1));
        let shape = StepShape {
            rows: vec![tile_in_use as usize; config.model.layers + 1],
            edges: vec![tile_in_use as usize; config.model.layers],
            seeds: 0,
            degrees: false,
            input_gradient: false,
            pulled: Vec::new(),
            pushed: Vec::new(),
            memory: device.memory(config),
        };
        let model = memory_bytes(&config.model, &config.optimizer, dim, outputs, &shape)?;
        let rows = tile_in_use * (needs.columns * 2 + needs.heads * 2 + 2) as u64 * 4;
        let both = if job.direction == esker_sample::Direction::Both { 2 } else { 1 };
        Ok(LayerShape {
            needs,
            input,
            output,
            tile: tile_in_use,
            nodes: manifest.nodes.count,
            edges: manifest.edges.count * both,
            id_bytes: manifest.id_dtype().bytes(),
            handed_over: 0,
            work: pooled(rows + model.inference, device.in_host_memory),
            in_host_memory: device.in_host_memory,
        })
    }

    fn pooled(&self, bytes: u64) -> u64 {
        pooled(bytes, self.in_host_memory)
    }

    /// Matrices on the device and memory of the host, together.
    fn bytes(&self, host: u64, matrices: u64) -> Bytes {
        match self.in_host_memory {
            true => Bytes { host: host.saturating_add(matrices), device: 0 },
            false => Bytes { host, device: matrices },
        }
    }

    /// The memory of this many rows being loaded by several readers, to stay.
    fn loading(&self, rows: u64, columns: usize) -> Bytes {
        let readers = StoredTable::reader_bytes(rows.div_ceil(LOADERS as u64)) * LOADERS as u64;
        add(self.reading(rows, columns), Bytes { host: readers, device: 0 })
    }

    /// The memory of this many rows being read: requests that are open, and their upload.
    fn reading(&self, rows: u64, columns: usize) -> Bytes {
        self.reading_with(1, rows, columns)
    }

    /// The same with this many readers.
    fn reading_with(&self, readers: usize, rows: u64, columns: usize) -> Bytes {
        let (bytes, requests) = (rows.saturating_mul(columns as u64 * 4), OPEN_REQUESTS as u64);
        // A layer that projects may also read the rows that it projected from.
        let second = if self.needs.projects { StoredTable::reader_bytes(self.tile) } else { 0 };
        let degrees = if self.needs.degrees { ListReading::offset_bytes() + rows * 4 } else { 0 };
        let reader = (StoredTable::reader_bytes(rows.max(self.tile)) + second) * readers as u64 + degrees;
        let bytes = bytes.saturating_add(rows.saturating_mul(self.factor_columns() * 4));
        match self.in_host_memory {
            true => self.bytes(reader, bytes * requests),
            false => self.bytes(reader + pinned(bytes * requests), self.pooled(bytes * requests)),
        }
    }

    /// What a layer always needs: a tile, its own rows, adjacency in pieces, and the copy of its output.
    fn fixed(&self, entries: u64) -> Bytes {
        let lists = match self.id_bytes {
            8 => ListReading::piece_bytes::<u64>(entries, self.tile),
            _ => ListReading::piece_bytes::<u32>(entries, self.tile),
        };
        // Own rows are counted with the tile; only their way to it is not.
        let row_bytes = self.input.max(self.needs.columns) as u64 * 4;
        let own = if self.in_host_memory { 0 } else { pinned(self.tile * row_bytes) };
        let needed = BlockStream::<u64>::bytes_for(self.nodes);
        let reading = own + ListReading::reader_bytes(self.tile) + PIECES * lists + needed;
        // A piece as the device takes it, and the graph that it makes of it.
        let graph = (entries + self.tile * 2) * 4;
        // Rows of the last layer are copied, and some wait to be written.
        let handed_over = match self.handed_over as u64 {
            0 => 0,
            columns => self.tile * (columns * 4 + 12) * OUTPUT_BUFFERS,
        };
        let host = reading
            + graph
            + COPY_BYTES * 2
            + handed_over
            + if self.in_host_memory { 0 } else { pinned(graph) };
        let matrices = self.pooled(graph) + self.work;
        self.bytes(host, matrices)
    }

    /// Columns of what is known of rows besides the rows: GCN's factors, or GAT's scores.
    fn factor_columns(&self) -> u64 {
        if self.needs.degrees { 1 } else { self.needs.heads as u64 }
    }

    /// Host memory of all degrees, and of their factors on their way to a device, if rows stay.
    fn degree_bytes(&self) -> u64 {
        let each = if self.in_host_memory { 4 } else { 4 + pinned(4) };
        if self.needs.degrees { self.nodes.saturating_mul(each) } else { 0 }
    }

    /// The matrices of all nodes, if they stay.
    fn tables(&self, input_stays: bool, output_stays: bool) -> u64 {
        let factors = self.factor_columns() as usize;
        // Rows that are projected may be there as well.
        let projected_from = if self.needs.projects { self.input } else { 0 };
        let columns = if input_stays { self.needs.columns + factors + projected_from } else { 0 };
        let columns = columns + if output_stays { self.output } else { 0 };
        self.pooled(self.nodes.saturating_mul(columns as u64 * 4))
    }

    /// The memory of a tile and its neighbours in a block of targets.
    pub fn block_bytes(&self, tiles: u64, entries: u64) -> Bytes {
        let sums = self.tile * (self.needs.columns + 3 * self.needs.heads) as u64 * 4;
        // Entries, how far each target is, and the entries of chunks as the device takes them.
        let lists = entries * (self.id_bytes + 8) + self.tile * tiles * (16 + 4 * OPEN_REQUESTS as u64);
        self.bytes(lists, self.pooled(sums).saturating_mul(tiles))
    }

    /// The smallest memory that it needs.
    pub fn least(&self) -> Bytes {
        let entries = LEAST_ENTRIES.min(self.edges.max(1));
        add(
            add(self.fixed(entries), self.reading(self.least_chunk(), self.needs.columns)),
            self.block_bytes(1, entries),
        )
    }

    fn least_chunk(&self) -> u64 {
        (LEAST_CHUNK_BYTES / (self.needs.columns as u64 * 4).max(1)).clamp(1, self.nodes.max(1))
    }

    /// Divides the memory of a layer. `is_last`: its output is not needed as a table.
    pub fn sizes(&self, within: Bytes, is_last: bool) -> Result<LayerSizes> {
        let least = self.least();
        if !least.fit(within) {
            let (needed, left) = match least.host > within.host {
                true => (least.host, within.host),
                false => (least.device, within.device),
            };
            return Err(TrainError::InferenceMemory { needed: ByteCount(needed), left: ByteCount(left) });
        }
        let spare = within.host - least.host;
        let entries =
            (spare / 32 / (self.id_bytes + 8)).clamp(LEAST_ENTRIES, MOST_ENTRIES).min(self.edges.max(1));
        for output_stays in [true, false] {
            let tables = self.bytes(self.degree_bytes(), self.tables(true, output_stays && !is_last));
            let row_bytes = (self.needs.columns as u64 * 4).max(1);
            for chunk_rows in [(LOADED_BYTES / row_bytes).max(self.tile), self.tile] {
                let chunk_rows = chunk_rows.min(self.nodes.max(1));
                let reading = self.loading(chunk_rows, self.needs.columns);
                if add(add(self.fixed(entries), tables), reading).fit(within) {
                    let block = Bytes::default();
                    return Ok(LayerSizes {
                        input_stays: true,
                        output_stays,
                        adjacency_stays: false,
                        entries,
                        chunk_rows,
                        readers: 1,
                        block,
                    });
                }
            }
        }
        self.streaming(within, entries)
    }

    /// Whether the adjacency of all nodes fits as well, on a device with its own memory, if rows stay there.
    pub fn adjacency_fits(&self, within: Bytes, sizes: &LayerSizes, is_last: bool) -> bool {
        if self.in_host_memory || !sizes.input_stays || !self.needs.neighbours {
            return false;
        }
        let tables = self.bytes(self.degree_bytes(), self.tables(true, sizes.output_stays && !is_last));
        let reading = self.loading(sizes.chunk_rows, self.needs.columns);
        // Neighbours and offsets on the device; degrees stay on the host.
        let lists = self.pooled((self.edges + self.nodes + self.nodes.div_ceil(self.tile)).saturating_mul(4));
        let adjacency = Bytes { host: self.nodes.saturating_mul(4), device: lists };
        add(add(add(self.fixed(sizes.entries), tables), reading), adjacency).fit(within)
    }

    /// The sizes of a layer whose input rows do not fit.
    fn streaming(&self, within: Bytes, entries: u64) -> Result<LayerSizes> {
        let fixed = self.fixed(entries);
        let left =
            Bytes { host: within.host - fixed.host, device: within.device.saturating_sub(fixed.device) };
        let matrices = if self.in_host_memory { left.host } else { left.device.min(left.host) };
        let row_bytes = (self.needs.columns as u64 * 4).max(1);
        let chunk = (matrices / CHUNK_PART / OPEN_REQUESTS as u64).min(MOST_CHUNK_BYTES) / row_bytes;
        let mut chunk_rows = chunk.clamp(self.least_chunk(), self.nodes.max(1));
        // Another reader is worth a small part of the memory.
        let readers = match StoredTable::reader_bytes(chunk_rows) <= left.host / READER_PART {
            true => MOST_READERS,
            false => 1,
        };
        loop {
            let reading = self.reading_with(readers, chunk_rows, self.needs.columns);
            let room = Bytes {
                host: left.host.saturating_sub(reading.host),
                device: left.device.saturating_sub(reading.device),
            };
            if self.block_bytes(1, entries).fit(room) || chunk_rows == self.least_chunk() {
                let block = Bytes { host: room.host - room.host / SLACK_PART, device: room.device };
                let sizes = LayerSizes {
                    input_stays: false,
                    output_stays: false,
                    adjacency_stays: false,
                    entries,
                    chunk_rows,
                    readers,
                    block,
                };
                // Shorter pieces leave more: the shortest are what the smallest memory was counted with.
                let least = LEAST_ENTRIES.min(self.edges.max(1));
                return match self.block_bytes(1, entries).fit(room) || entries == least {
                    true => Ok(sizes),
                    false => self.streaming(within, least),
                };
            }
            chunk_rows = (chunk_rows / 2).max(self.least_chunk());
        }
    }
}

fn add(a: Bytes, b: Bytes) -> Bytes {
    Bytes { host: a.host.saturating_add(b.host), device: a.device.saturating_add(b.device) }
}

/// The smallest memory of inference over a whole graph.
pub fn least_bytes(
    config: &RunConfig,
    job: &JobOutline,
    outputs: usize,
    device: DeviceProfile,
) -> Result<Bytes> {
    let mut least = Bytes::default();
    let layers = config.model.layers;
    for shape in LayerShape::all(config, job, outputs, layers, device, Bytes::default())? {
        let Bytes { host, device } = shape.least();
        least = Bytes { host: least.host.max(host), device: least.device.max(device) };
    }
    Ok(least)
}
