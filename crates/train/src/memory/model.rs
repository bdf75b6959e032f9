//! The memory of a model, from its configuration and the largest batch that fan-outs allow.

use super::{Bytes, Planned, Purpose};
use crate::link::{LinkConfig, LinkTask, Links, NegativeCount, PIECE_NODES};
use crate::{EvaluationMode, InputRows, Result, RunConfig};
use esker_nn::{ExchangedRows, MemoryOf, StepShape, link_bytes, matrix_bytes, memory_bytes};
use esker_sample::negatives::NegativeMask;
use esker_sample::{Edge, Fanout, Form, Settings};
use esker_store::Dataset;
use esker_strategies::{JobOutline, MemoryTable, RowsOfLayer};
use esker_types::grouped;

impl Planned<'_> {
    /// The missed rows of a batch and a placement per row, until they are assembled, including the rounding of a pool.
    /// The next batch is uploaded to the same memory.
    pub(super) fn missed_bytes(&self, job: &JobOutline) -> u64 {
        let bytes = job.most_nodes().saturating_mul(job.row_bytes() + 4);
        bytes.saturating_add(bytes / 4).saturating_add(4096)
    }

    /// Adjacency and labels to be uploaded to a device with its own memory, and the rounding of pinned memory: an
    /// eighth by its sizes, a quarter by its pool.
    pub(super) fn pinned_bytes(&self, job: &JobOutline) -> Result<u64> {
        let held = job.prefetch_depth as u64;
        let adjacency = self.adjacency_bytes(job) / 8 * 11;
        let rounding = |nodes: u64, row_bytes: u64| nodes.saturating_mul(row_bytes) / 8 * 3;
        let (nodes, dim_bytes) = (job.most_nodes(), job.dim() * 4);
        let evaluated = job.evaluation_bound().map_or(0, |bound| bound.nodes);
        if job.device_cache_bytes == 0 || !self.caches_rows(job)? {
            return Ok(rounding(nodes, dim_bytes).saturating_add(adjacency).saturating_mul(held));
        }
        // The device assembles batches, from rows as stored and a word per node. Evaluations that cannot be packed read
        // rows one by one, in turn with training: a batch has them as f32.
        let missed = if job.caches_all_on_device() { evaluated } else { nodes };
        let words = nodes.saturating_mul(4) / 8 * 11;
        let assembled = rounding(missed, job.row_bytes()).saturating_add(words).saturating_mul(held);
        let rows = assembled.max(rounding(evaluated, dim_bytes));
        Ok(adjacency.saturating_mul(held).saturating_add(rows))
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
        let (config, inputs) = (self.config, self.inputs);
        let mut shape = self.shape(job, &job.settings, job.largest_batch);
        if config.model.layers == 0 {
            let (parameters, step) = self.link_bytes(job, &shape)?;
            let states = config.optimizer.row_states().len() as u64;
            return Ok((2 * parameters, states * parameters, step));
        }
        let exchange = (self.strategy)(job)?.exchange;
        let rows = |of: RowsOfLayer| ExchangedRows { layer: of.layer, rows: of.rows as usize };
        shape.pulled = exchange.pulls.iter().copied().map(rows).collect();
        shape.pushed = exchange.pushes.iter().copied().map(rows).collect();
        shape.input_gradient = exchange.input_gradient;
        let bytes = memory_bytes(&config.model, &config.optimizer, inputs, self.outputs, &shape)?;
        let step = bytes.step.saturating_sub(self.counted_rows(&shape));
        let step = step.saturating_add(self.joined_bytes(shape.rows[0] as u64, shape.memory));
        let (parameters, links) = self.link_bytes(job, &shape)?;
        let states = config.optimizer.row_states().len() as u64;
        Ok((bytes.model + 2 * parameters, bytes.optimizer + states * parameters, step.saturating_add(links)))
    }

    /// Bytes of input rows that the strategy counts. Rows that a step gathers from a table are its own.
    fn counted_rows(&self, shape: &StepShape) -> u64 {
        match self.config.embeddings {
            None => shape.rows[0] as u64 * self.inputs as u64 * 4,
            Some(_) => 0,
        }
    }

    /// What joining or summing features and embeddings of so many input rows takes beside the result.
    fn joined_bytes(&self, rows: u64, memory: MemoryOf) -> u64 {
        let Some(embeddings) = &self.config.embeddings else { return 0 };
        if embeddings.inputs == InputRows::Embeddings {
            return 0;
        }
        // Features, embeddings, and the gradient of the latter.
        let columns = [self.features, embeddings.columns, embeddings.columns];
        columns.into_iter().map(|columns| matrix_bytes(rows, columns, memory)).fold(0, u64::saturating_add)
    }

    /// The host or device memory of rows that are read, piece by piece, where representations are input rows.
    pub(super) fn read_bytes(&self, job: &JobOutline) -> Bytes {
        let modes = [self.config.eval, self.config.final_eval];
        let evaluates =
            self.purpose == Purpose::Infer || modes.iter().any(|mode| *mode != EvaluationMode::None);
        if self.config.link.is_none() || self.config.model.layers > 0 || !evaluates {
            return Bytes::default();
        }
        let rows = job.dataset.manifest().nodes.count.min(PIECE_NODES as u64);
        let values = rows.saturating_mul(self.inputs as u64 * 4);
        let piece = matrix_bytes(rows, self.inputs, self.device.memory(self.config));
        match self.device.in_host_memory {
            true => Bytes { host: values.saturating_add(piece), device: 0 },
            false => Bytes { host: values, device: piece },
        }
    }

    /// Rows of relations, and what a step on links takes beyond the encoder: gradients of its rows, and scores. Without
    /// layers its input rows, too.
    fn link_bytes(&self, job: &JobOutline, shape: &StepShape) -> Result<(u64, u64)> {
        let Some(link) = &self.config.link else { return Ok((0, 0)) };
        let relations = link.relation_rows(LinkTask::relations_of(&job.dataset)) as u64;
        let columns = link.decoder.relation_columns(link.columns)? as u64;
        let parameters = relations * columns * 4;
        let rows = *shape.rows.last().unwrap_or(&0) as u64;
        let row = link.columns as u64 * 4;
        let (edges, nodes) = (self.config.batch, job.dataset.manifest().nodes.count);
        let seeds = link.seeds_of(edges, nodes);
        // The gradients of both sides are there until they are summed up.
        let side = link_bytes(&link.shape(edges, nodes, columns as usize), shape.memory);
        let members = (seeds * 3 + rows) * 4 * 3;
        // The gradient of the output, and the input where no layer gives an output; the same after dropout.
        let own = match (self.config.model.layers, self.config.model.input_dropout > 0.0) {
            (0, false) => rows.saturating_mul(2 * row),
            (0, true) => {
                rows.saturating_mul(2 * row).saturating_add(matrix_bytes(rows, link.columns, shape.memory))
            }
            _ => 0,
        };
        let joined = if self.config.model.layers == 0 { self.joined_bytes(rows, shape.memory) } else { 0 };
        // The rows of a side's relations, gathered and after dropout.
        let relations = match link.relation_dropout > 0.0 {
            true => 2 * matrix_bytes(edges, columns as usize, shape.memory),
            false => 0,
        };
        let all = [side.step.saturating_mul(2), members, own, joined, relations];
        Ok((parameters, all.into_iter().fold(0, u64::saturating_add)))
    }

    /// The true ends of all edges that train, if batches need them.
    pub(super) fn masked_bytes(&self, job: &JobOutline) -> u64 {
        match self.purpose {
            Purpose::Train => masked_bytes(self.config, &job.dataset),
            Purpose::Infer => 0,
        }
    }

    /// Adds the edges and negatives of batches that are sampled, wait or are trained on, a bit for each pair that may be
    /// masked, and the rows that they have in the output.
    pub(super) fn add_targets(&self, job: &JobOutline, table: &mut MemoryTable) {
        let Some(link) = self.config.link.as_ref().filter(|_| self.purpose == Purpose::Train) else { return };
        let edges = self.config.batch.min(job.dataset.manifest().edges.count);
        // Seed nodes that all batches have in common are not listed as negatives.
        let listed = match link.negatives {
            NegativeCount::All => 2 * edges,
            NegativeCount::Shared { .. } => link.seeds_of(edges, 0),
        };
        let edge_bytes = size_of::<Edge>() as u64 + if link.edge_weights.is_equal() { 0 } else { 4 };
        let targets = edges.saturating_mul(edge_bytes).saturating_add((listed - 2 * edges).saturating_mul(8));
        let targets = targets.saturating_add(link.mask_bytes(edges));
        // A list of rows for each step, and for each side of the one that is computed.
        let rows = job.largest_batch.saturating_mul(4);
        let (steps, batches) =
            (self.device.steps_in_flight as u64 + 1, (job.prefetch_depth + job.samplers) as u64);
        let bytes = targets.saturating_mul(steps + batches).saturating_add(rows.saturating_mul(steps));
        let from = format!("of {} batches, at most {} edges each", steps + batches, grouped(edges));
        table.add_from("target edges and negatives", bytes, from);
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
        let (config, inputs) = (self.config, self.inputs);
        let Some(evaluation) = &job.evaluation else { return Ok(None) };
        let shape = self.shape(job, &evaluation.settings, evaluation.largest_batch);
        let bytes = memory_bytes(&config.model, &config.optimizer, inputs, self.outputs, &shape)?;
        let rows = shape.rows[0] as u64 * inputs as u64 * 4;
        let inference = bytes.batch_inference.saturating_sub(self.counted_rows(&shape));
        Ok(Some((inference.saturating_add(self.joined_bytes(shape.rows[0] as u64, shape.memory)), rows)))
    }
}

/// The true ends of all edges that train, if all nodes are negatives and those are left out, or if they are counted.
pub(super) fn masked_bytes(config: &RunConfig, dataset: &Dataset) -> u64 {
    let edges = dataset.manifest().edges.count;
    let masks_all =
        |link: &LinkConfig| link.negatives == NegativeCount::All && link.mask == NegativeMask::Graph;
    let link = config.link.as_ref();
    link.filter(|link| masks_all(link) || !link.edge_weights.is_equal())
        .map_or(0, |_| Links::true_end_bytes(edges, edges))
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
