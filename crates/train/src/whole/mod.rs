//! Inference with all neighbours, layer by layer over the whole graph. A layer is computed block by block: some nodes,
//! all their neighbours, and the rows of those. For the first layer, the rows come from the strategy; for the others,
//! from the output of the previous layer. Rows that training changes are stored first, like the output of a layer.
//! Hidden rows stay in memory if they fit, and go to files of the run if they do not. So any graph can be predicted
//! within the budget that trained it.

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

/// Samples of a source of blocks: one being made, one waiting, one in inference.
const SAMPLES: u64 = 3;
/// Offsets read at a time while blocks are cut.
const CHUNK: usize = 1 << 15;
/// Largest useful number of rows per block: enough to outweigh its set-up.
const MOST_ROWS: u64 = 1 << 20;

/// Rows are copied to a file through a buffer of this size.
const COPY_BYTES: u64 = 1 << 20;

/// Receives the logits of some nodes.
pub type TakeLogits<'a, B> = &'a mut dyn FnMut(&[NodeId], &<B as esker_nn::Device>::Matrix) -> Result<()>;

impl<B: Backend + Clone + 'static> Context<'_, B> {
    /// Predicts `targets`, ascending, or every node, and passes their logits to `take`, block by block. Rows that
    /// training changes come from `source`, or from the state that the model was saved with.
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

    /// Bytes of the hidden rows at a time: those that a layer reads and those that it writes.
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

    /// The destination of rows of this width for every node.
    fn hidden_writer(&self, in_memory: bool, width: usize, number: usize) -> Result<HiddenWriter> {
        let nodes = self.job.dataset.manifest().nodes.count as usize;
        match in_memory {
            true => Ok(HiddenWriter::Memory(Vec::with_capacity(nodes * width))),
            false => HiddenWriter::file(self.scratch, number),
        }
    }

    /// Stores the rows of a table, to be read in any order.
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

    /// Blocks without rows. Rows and state come from elsewhere.
    fn open_blocks(&mut self, over: &Inference) -> Result<Box<dyn BatchSource<B>>> {
        Ok(self.strategy.inference(self.job, over, None)?)
    }

    /// Checks early that the disk has room for hidden rows, instead of failing an hour later.
    fn check_disk(&self, needed: u64) -> Result<()> {
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

/// The sample of a block. Inference layer by layer reads it on the host.
fn sample_of<B: Backend>(batch: &Batch<B>) -> Result<&Sample> {
    batch.blocks.sample().ok_or(TrainError::DeviceBlocks)
}
