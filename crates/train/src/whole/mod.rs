//! Inference with all neighbours, layer by layer over the whole graph. A layer is computed block by block: some nodes, all
//! their neighbours, and the rows of those, which come from the strategy for the first layer and from what the layer
//! before wrote for the others. Rows that training changes are written down first, as a layer's would be. Hidden rows stay in memory where they fit and go to files of the run where they do not,
//! so that any graph can be inferred inside the budget that trained it.

mod blocks;
mod hidden;
mod sizes;

pub use sizes::{block_bytes, least_rows};

use crate::evaluate::Context;
use crate::memory::{Bytes, DeviceProfile};
use crate::{Result, TrainError};
use blocks::NodeBlocks;
use esker_nn::Backend;
use esker_sample::Sample;
use esker_strategies::{Batch, BatchSource, Inference, InputTable};
use esker_types::{ByteCount, NodeId};
use hidden::{Hidden, HiddenWriter};
use sizes::{rows_within, sampling_bytes};
use std::fs;
use std::sync::Arc;

/// Samples that a source of blocks holds: one being made, one waiting, one being inferred.
const SAMPLES: u64 = 3;
/// Offsets read at a time while blocks are cut.
const CHUNK: usize = 1 << 15;
/// No block needs more rows than this to be worth its set-up.
const MOST_ROWS: u64 = 1 << 20;

/// Rows are brought to a file through memory of this size.
const COPY_BYTES: u64 = 1 << 20;

/// Takes the logits of some nodes.
pub type TakeLogits<'a, B> = &'a mut dyn FnMut(&[NodeId], &<B as esker_nn::Device>::Matrix) -> Result<()>;

impl<B: Backend + Clone + 'static> Context<'_, B> {
    /// Infers `targets`, ascending, or every node, and hands their logits over, block by block. Rows that training changes are
    /// those of `source`, or of the state that the model was saved with.
    pub fn infer_whole(
        &mut self,
        targets: Option<&Arc<Vec<NodeId>>>,
        source: Option<&mut dyn BatchSource<B>>,
        take: TakeLogits<B>,
    ) -> Result<()> {
        let model = self.learner.model();
        let layers = model.layer_count();
        let outputs = self.learner.objective().outputs();
        let (hidden_bytes, most) = (self.hidden_bytes(), self.whole_bytes);
        let device = DeviceProfile::of(self.learner.backend());
        let least = least_rows(self.config, self.job)?;
        let least = block_bytes(self.config, self.job, outputs, least, device)?;
        let in_memory = hidden_bytes <= most.host / 2 && hidden_bytes + least.host <= most.host;
        let host = if in_memory { most.host - hidden_bytes } else { most.host };
        let limit = rows_within(self.config, self.job, outputs, Bytes { host, ..most }, device)?;
        if !in_memory {
            self.check_disk(hidden_bytes)?;
        }
        let mut input = match self.trains_rows {
            false => Hidden::Features,
            true => {
                let mut table = match source {
                    Some(source) => source.table()?,
                    // No seeds: only the table is requested.
                    None => {
                        let nobody = Arc::new(NodeBlocks::none());
                        self.open_inference(&self.inference(&nobody, false, limit))?.table()?
                    }
                };
                self.written_down(&mut table, in_memory)?
            }
        };
        for layer in 0..layers {
            let last = layer + 1 == layers;
            let over = if last { targets } else { None };
            let blocks =
                Arc::new(NodeBlocks::cut(&self.job.dataset, self.job.direction, over, self.hops(), limit)?);
            let width = self.config.model.widths(layer, self.job.dim() as usize, outputs).1;
            let mut output = match last {
                true => None,
                false => Some(self.hidden_writer(in_memory, width, layer + 1)?),
            };
            let rows = matches!(input, Hidden::Features);
            let over = self.inference(&blocks, rows, limit);
            let mut source = if rows { self.open_inference(&over)? } else { self.open_blocks(&over)? };
            while let Some(mut batch) = source.next()? {
                if (self.stop)() {
                    return Err(TrainError::Stopped);
                }
                let rows = match &mut input {
                    Hidden::Features => self.learner.upload(&mut batch),
                    other => other.gather(self.learner, &sample_of(&batch)?.node_ids)?,
                };
                let sample = sample_of(&batch)?;
                let logits = self.learner.infer_layer(layer, sample, &rows);
                match &mut output {
                    None => take(sample.targets(), &logits)?,
                    Some(writer) => writer.append(self.learner, &logits)?,
                }
            }
            if let Some(writer) = output {
                input = writer.finish(width)?;
            }
        }
        Ok(())
    }

    /// Bytes of the hidden rows that are there at a time: those a layer reads and those it writes.
    fn hidden_bytes(&self) -> u64 {
        let (nodes, outputs) = (self.job.dataset.manifest().nodes.count, self.learner.objective().outputs());
        let layers = self.config.model.layers;
        let of = |layer: usize| {
            let (read, written) = self.config.model.widths(layer, self.job.dim() as usize, outputs);
            let read = if layer > 0 || self.trains_rows { read } else { 0 };
            (read + if layer + 1 < layers { written } else { 0 }) as u64
        };
        nodes.saturating_mul((0..layers).map(of).max().unwrap_or(0) * 4)
    }

    /// Where rows of this width of every node go.
    fn hidden_writer(&self, in_memory: bool, width: usize, number: usize) -> Result<HiddenWriter> {
        let nodes = self.job.dataset.manifest().nodes.count as usize;
        match in_memory {
            true => Ok(HiddenWriter::Memory(Vec::with_capacity(nodes * width))),
            false => HiddenWriter::file(self.scratch, number),
        }
    }

    /// The rows of a table, to be read in any order.
    fn written_down(&self, table: &mut InputTable, in_memory: bool) -> Result<Hidden> {
        let width = table.dim();
        let mut writer = self.hidden_writer(in_memory, width, 0)?;
        while let Some((_, rows)) = table.next_rows()? {
            if (self.stop)() {
                return Err(TrainError::Stopped);
            }
            writer.append_values(rows)?;
        }
        writer.finish(width)
    }

    /// Blocks without rows: those come from elsewhere, and so does any state.
    fn open_blocks(&mut self, over: &Inference) -> Result<Box<dyn BatchSource<B>>> {
        Ok(self.strategy.inference(self.job, over, None)?)
    }

    /// Hidden rows will need room on disk: better said now than in an hour.
    fn check_disk(&self, needed: u64) -> Result<()> {
        fs::create_dir_all(self.scratch).map_err(TrainError::io(self.scratch))?;
        match esker_io::available_bytes(self.scratch) {
            Ok(free) if free < needed => Err(TrainError::machine(
                format!(
                    "{}: inference with all neighbours writes {} of hidden rows, and {} are free",
                    self.scratch.display(),
                    ByteCount(needed),
                    ByteCount(free)
                ),
                "make room, allow more memory, or evaluate with --eval sampled",
            )),
            _ => Ok(()),
        }
    }

    fn hops(&self) -> bool {
        !self.config.whole_settings().fanouts.is_empty()
    }

    fn inference(&self, blocks: &Arc<NodeBlocks>, rows: bool, limit: u64) -> Inference {
        Inference {
            batches: blocks.clone(),
            largest_batch: limit,
            settings: self.config.whole_settings(),
            rows,
            sampling_bytes: Some(sampling_bytes(self.config, self.job, limit)),
        }
    }
}

/// The sample of a block. Layers one by one are read from the host.
fn sample_of<B: Backend>(batch: &Batch<B>) -> Result<&Sample> {
    batch.blocks.sample().ok_or_else(|| {
        TrainError::config("blocks of whole graphs are sampled on the device", "evaluate with --eval sampled")
    })
}
