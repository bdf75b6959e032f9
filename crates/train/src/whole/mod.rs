//! Inference with all neighbours, layer by layer over the whole graph.
//!
//! A layer is computed tile by tile: some targets, to which the rows of their neighbours are added. If the rows of all
//! nodes fit on the device, they stay there, and the adjacency is streamed past them. If they do not, as many tiles as
//! fit are open at a time, and the rows are streamed past them, chunk by chunk, from the strategy or from a file. A
//! chunk has all rows of a range, or only those that are neighbours, if they are far apart. Neighbours are added in
//! ascending order in every case, so results are the same to the bit whatever the memory.
//!
//! Files of rows are in the run's directory. They are resumed after a kill, and removed at the end.

mod layer;
mod lists;
mod scratch;
mod sizes;
mod staged;
mod stream;
pub(crate) mod table;
mod tiles;

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]
mod tests;

pub use layer::{WholeCounters, WholeSeconds};
pub use sizes::least_bytes;

use crate::early::ReadEarly;
use crate::evaluate::Context;
use crate::memory::{Bytes, DeviceProfile};
use crate::{Result, TrainError};
use esker_nn::LinkMath;
use esker_sample::{Position, SampleError};
use esker_strategies::{BatchSource, Inference, InputTable};
use esker_types::{ByteCount, NodeId};
use layer::{LayerJob, Sink};
use scratch::Scratch;
use sizes::{LayerShape, LayerSizes};
use std::fs;
use std::sync::Arc;
use table::{StoredTable, Table, Traffic};
use tiles::Tiles;

/// Receives the output rows of some nodes.
pub type TakeRows<'a, B> = &'a mut dyn FnMut(&[NodeId], &<B as esker_nn::Device>::Matrix) -> Result<()>;

impl<B: LinkMath> Context<'_, B> {
    /// Computes the first `layers` layers, and passes the rows that the last of them gives `targets`, ascending, or
    /// every node, to `take`, tile by tile. Rows that training changes come from `source`, or from the state that the
    /// model was saved with.
    pub fn infer_whole(
        &mut self,
        targets: Option<&Arc<Vec<NodeId>>>,
        layers: usize,
        source: Option<&mut dyn BatchSource<B>>,
        take: TakeRows<B>,
    ) -> Result<WholeCounters> {
        let shapes = self.shapes(layers)?;
        let mut sizes = self.sizes(&shapes)?;
        let early = self.beside_early(&shapes, &mut sizes);
        self.infer_sized(targets, shapes.into_iter().zip(sizes).collect(), source, early, take)
    }

    /// The same with these sizes.
    fn infer_sized(
        &mut self,
        targets: Option<&Arc<Vec<NodeId>>>,
        sizes: Vec<(LayerShape, LayerSizes)>,
        source: Option<&mut dyn BatchSource<B>>,
        early: Option<ReadEarly>,
        take: TakeRows<B>,
    ) -> Result<WholeCounters> {
        let layers = sizes.len();
        // Steps and inference take turns with the same memory.
        self.give_back();
        let mut input = self.input_rows(source)?;
        let tile = sizes.first().map_or(0, |(shape, _)| shape.tile);
        let scratch = Scratch::new(self.scratch, self.fingerprint(layers, tile)?)?;
        let (traffic, mut counters) = (Arc::new(Traffic::default()), WholeCounters::default());
        if let Some(early) = early {
            counters.row_bytes_early = early.bytes();
            input = early.before(input);
        }
        let (mut first, mut table) = (0, Table::Stored(StoredTable::input(input)));
        if let Some((layer, found)) = scratch.last_output(layers)? {
            (first, table) = (layer, Table::Stored(found));
        }
        // All layers have the same tiles if all nodes are targets.
        let keeps =
            targets.is_none() && first + 1 < layers && sizes.iter().all(|(_, sizes)| sizes.adjacency_stays);
        let mut adjacency = keeps.then(Vec::new);
        for (layer, (shape, sizes)) in sizes.into_iter().enumerate().skip(first) {
            let is_last = layer + 1 == layers;
            if !sizes.output_stays && !is_last || shape.needs.projects && !sizes.input_stays {
                self.check_disk(&shape, is_last, scratch.bytes())?;
            }
            let nodes = self.job.dataset.manifest().nodes.count;
            let tiles = Tiles::new(targets.filter(|_| is_last), nodes, shape.tile as usize);
            let mut job = LayerJob {
                learner: self.learner,
                job: self.job,
                stop: self.stop,
                progress: self.progress,
                scratch: &scratch,
                traffic: traffic.clone(),
                layer,
                shape,
                sizes,
                tiles,
                adjacency: adjacency.as_mut(),
                counters: &mut counters,
            };
            let sink = if is_last { Sink::Take(&mut *take) } else { Sink::Table };
            let Some(next) = job.run(table, sink)? else { break };
            // Rows that stay on the device are lost with the process: those they came from are kept.
            if matches!(next, Table::Stored(_)) {
                scratch.remove_before(layer)?;
            }
            table = next;
        }
        self.give_back();
        counters.add_traffic(&traffic);
        scratch.end().map(|()| counters)
    }

    /// Returns freed memory to the kernel: what follows allocates other sizes.
    fn give_back(&self) {
        self.learner.backend().release_free();
        esker_io::trim_freed_memory();
    }

    fn shapes(&self, layers: usize) -> Result<Vec<LayerShape>> {
        let outputs = self.learner.objective().outputs();
        let device = DeviceProfile::of(self.learner.backend());
        LayerShape::all(self.config, self.job, outputs, layers, device, self.whole_bytes)
    }

    /// How each layer uses the memory. Output rows stay on the device if they may stay for the next layer too.
    fn sizes(&self, shapes: &[LayerShape]) -> Result<Vec<LayerSizes>> {
        let sizes =
            |(layer, shape): (usize, &LayerShape)| shape.sizes(self.whole_bytes, layer + 1 == shapes.len());
        let mut all = shapes.iter().enumerate().map(sizes).collect::<Result<Vec<LayerSizes>>>()?;
        for layer in 1..all.len() {
            all[layer - 1].output_stays &= all[layer].input_stays;
        }
        for (layer, (shape, sizes)) in shapes.iter().zip(&mut all).enumerate() {
            sizes.adjacency_stays = shape.adjacency_fits(self.whole_bytes, sizes, layer + 1 == shapes.len());
        }
        Ok(all)
    }

    /// Takes rows that are read already, as many as leave the first layer the memory that it needs to do the same. All
    /// rows are on the device before its first output, and these are freed then: they take turns with output that waits
    /// to be written, and with the other layers.
    fn beside_early(&mut self, shapes: &[LayerShape], sizes: &mut [LayerSizes]) -> Option<ReadEarly> {
        let mut early = self.early_rows.take()?.take();
        self.beside(shapes, sizes, &mut early).then_some(early)
    }

    /// Frees rows until the others leave that memory. `false` if none do.
    fn beside(&self, shapes: &[LayerShape], sizes: &mut [LayerSizes], early: &mut ReadEarly) -> bool {
        let (Some(shape), Some(before)) = (shapes.first(), sizes.first_mut()) else { return false };
        // Otherwise rows are read while the layer is computed.
        if !before.input_stays || shape.needs.projects || !shape.needs.neighbours {
            return false;
        }
        let is_last = shapes.len() == 1;
        while early.bytes() > 0 {
            let taken = early.bytes().saturating_sub(self.output_bytes);
            let within = Bytes { host: self.whole_bytes.host.saturating_sub(taken), ..self.whole_bytes };
            if let Ok(mut now) = shape.sizes(within, is_last) {
                now.output_stays &= before.output_stays;
                now.adjacency_stays = shape.adjacency_fits(within, &now, is_last);
                let stays = |of: &LayerSizes| (of.input_stays, of.output_stays, of.adjacency_stays);
                if stays(&now) == stays(before) {
                    *before = now;
                    return true;
                }
            }
            early.drop_last();
        }
        false
    }

    /// The rows that the first layer reads: from `source`, or from the state that the model was saved with.
    pub(crate) fn input_rows(&mut self, source: Option<&mut dyn BatchSource<B>>) -> Result<InputTable> {
        let table = match source {
            Some(source) => source.table()?,
            None => self.input_table()?,
        };
        self.learner.input_table(table)
    }

    fn input_table(&mut self) -> Result<InputTable> {
        // No seeds: only the table is requested.
        let over = Inference {
            batches: Arc::new(NoBatches),
            largest_batch: 0,
            settings: self.config.whole_settings(),
            rows: false,
            sampling_bytes: Some(1 << 20),
        };
        Ok(self.open_inference(&over)?.table()?)
    }

    /// Everything that hidden rows depend on. `None` if rows that training changes are among it: they are not named.
    fn fingerprint(&self, layers: usize, tile: u64) -> Result<Option<String>> {
        if self.trains_rows {
            return Ok(None);
        }
        let mut hash = xxhash_rust::xxh3::Xxh3::new();
        for named in self.learner.export_model()? {
            hash.update(named.name.as_bytes());
            named.values.iter().for_each(|value| hash.update(&value.to_le_bytes()));
        }
        let model = serde_json::to_string(&self.config.model).expect("a configuration is plain data");
        let dataset = &self.job.dataset.manifest().id;
        // Tiles of the CPU are whole chunks, since they depend on memory.
        let cpu = || format!("cpu {}", esker_nn::cpu::CHUNK_ROWS);
        let backend = if self.learner.backend().in_host_memory() { cpu() } else { format!("gpu {tile}") };
        let direction = self.job.direction;
        Ok(Some(format!("{dataset} {direction} {model} {backend} {layers} {:032x}", hash.digest128())))
    }

    /// Checks early that the disk has room for the rows of a layer, instead of failing an hour later.
    fn check_disk(&self, shape: &LayerShape, is_last: bool, there: u64) -> Result<()> {
        let nodes = self.job.dataset.manifest().nodes.count;
        let projected = if shape.needs.projects { shape.needs.columns } else { 0 };
        let needed = nodes * (projected + if is_last { 0 } else { shape.output }) as u64 * 4;
        // A part may be there from a run that was stopped.
        let needed = needed.saturating_sub(there);
        fs::create_dir_all(self.scratch).map_err(TrainError::io(self.scratch))?;
        match esker_io::available_bytes(self.scratch) {
            Ok(free) if free < needed => Err(TrainError::InferenceDisk {
                folder: self.scratch.to_path_buf(),
                needed: ByteCount(needed),
                free: ByteCount(free),
            }),
            _ => Ok(()),
        }
    }
}

/// No batches at all.
pub(crate) struct NoBatches;

impl esker_sample::Batches for NoBatches {
    fn count(&self, _: u64) -> u64 {
        0
    }

    fn seeds(&self, _: Position, out: &mut Vec<NodeId>) -> Result<(), SampleError> {
        out.clear();
        Ok(())
    }

    fn dropped(&self, _: Position, out: &mut Vec<esker_sample::Edge>) -> Result<(), SampleError> {
        out.clear();
        Ok(())
    }

    fn identity(&self) -> String {
        "none".to_string()
    }
}
