//! The memory of a model, from its configuration and the largest batch that fan-outs allow.

use super::Planned;
use crate::{Result, RunConfig};
use esker_nn::{ExchangedRows, MemoryOf, StepShape, memory_bytes};
use esker_sample::{Fanout, Form, Settings};
use esker_strategies::{JobOutline, RowsOfLayer};

impl Planned<'_> {
    /// The missed rows of a batch and a placement per row, until they are assembled, including the rounding of a pool.
    /// The next batch is uploaded to the same memory.
    pub(super) fn missed_bytes(&self, job: &JobOutline) -> u64 {
        let bytes = job.most_nodes().saturating_mul(job.row_bytes() + 4);
        bytes.saturating_add(bytes / 4).saturating_add(4096)
    }

    /// Adjacency and labels to be uploaded to a device with its own memory, and the rounding of pinned memory: an
    /// eighth by its sizes, a quarter by its pool.
    pub(super) fn pinned_bytes(&self, job: &JobOutline) -> u64 {
        let rows = job.most_nodes().saturating_mul(job.dim() * 4);
        let held = job.prefetch_depth as u64;
        (rows / 8 * 3).saturating_add(self.adjacency_bytes(job) / 8 * 11).saturating_mul(held)
    }

    /// Bytes of the adjacency of a batch.
    pub(super) fn adjacency_bytes(&self, job: &JobOutline) -> u64 {
        let shape = self.shape(job, &job.settings, job.largest_batch);
        let words = |layer: usize| shape.rows[layer] + shape.rows[layer + 1] + shape.edges[layer];
        (0..self.config.model.layers).map(words).sum::<usize>() as u64 * 4
    }

    fn shape(&self, job: &JobOutline, settings: &Settings, batch: u64) -> StepShape {
        step_shape(self.config, job, settings, batch, self.device.memory(self.config))
    }

    /// The model, its optimizer, and a step without the rows of its batch, which are counted separately.
    pub(super) fn step_bytes(&self, job: &JobOutline) -> Result<(u64, u64, u64)> {
        let (config, inputs) = (self.config, job.dim() as usize);
        let mut shape = self.shape(job, &job.settings, job.largest_batch);
        let exchange = (self.strategy)(job)?.exchange;
        let rows = |of: RowsOfLayer| ExchangedRows { layer: of.layer, rows: of.rows as usize };
        shape.pulled = exchange.pulls.iter().copied().map(rows).collect();
        shape.pushed = exchange.pushes.iter().copied().map(rows).collect();
        shape.input_gradient = exchange.input_gradient;
        let bytes = memory_bytes(&config.model, &config.optimizer, inputs, self.outputs, &shape)?;
        let rows = shape.rows[0] as u64 * inputs as u64 * 4;
        Ok((bytes.model, bytes.optimizer, bytes.step.saturating_sub(rows)))
    }

    /// The host memory of a step, whichever takes more.
    pub(super) fn host_step_bytes(&self, job: &JobOutline) -> Result<u64> {
        if !self.device.in_host_memory {
            return Ok(0);
        }
        let inference = self.inference_bytes(job)?.map_or(0, |(inference, _)| inference);
        Ok(self.step_bytes(job)?.2.max(inference))
    }

    /// Inference of an evaluation batch without its rows, and the rows. `None` if evaluation does not sample.
    pub(super) fn inference_bytes(&self, job: &JobOutline) -> Result<Option<(u64, u64)>> {
        let (config, inputs) = (self.config, job.dim() as usize);
        let Some(evaluation) = &job.evaluation else { return Ok(None) };
        let shape = self.shape(job, &evaluation.settings, evaluation.largest_batch);
        let bytes = memory_bytes(&config.model, &config.optimizer, inputs, self.outputs, &shape)?;
        let rows = shape.rows[0] as u64 * inputs as u64 * 4;
        Ok(Some((bytes.batch_inference.saturating_sub(rows), rows)))
    }
}

/// The shape of the largest batch, layer by layer.
fn step_shape(
    config: &RunConfig,
    job: &JobOutline,
    settings: &Settings,
    batch: u64,
    memory: MemoryOf,
) -> StepShape {
    let layers = config.model.layers;
    let bound = |hops: usize| {
        let part = Settings { fanouts: settings.fanouts[..hops].to_vec(), ..settings.clone() };
        job.bound(&part, batch)
    };
    let hops = settings.fanouts.len();
    let whole = bound(hops);
    // Layer l reads nodes within L - l hops. Layers of ShaDow, and layers without neighbours, read all nodes.
    let shadow = settings.form == Form::Shadow;
    let rows = (0..=layers).map(|layer| match hops {
        0 => whole.nodes as usize,
        _ if shadow => whole.nodes as usize,
        _ => bound(hops - layer).nodes as usize,
    });
    let edges = (0..layers).map(|layer| match hops {
        0 => 0,
        _ if shadow => whole.edges as usize,
        // The layered form samples the neighbours of a layer at one depth.
        _ if settings.form == Form::Layered => {
            let nodes = bound(hops - layer - 1).nodes;
            let entries = job.dataset.manifest().edges.count * 2;
            match settings.fanouts[hops - layer - 1] {
                Fanout::AtMost(most) => nodes.saturating_mul(most as u64).min(entries) as usize,
                Fanout::All => entries as usize,
            }
        }
        _ => bound(hops - layer).edges as usize,
    });
    StepShape {
        rows: rows.collect(),
        edges: edges.collect(),
        seeds: batch as usize,
        degrees: settings.carry.degrees,
        input_gradient: false,
        pulled: Vec::new(),
        pushed: Vec::new(),
        memory,
    }
}
