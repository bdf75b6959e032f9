//! The memory of a model, from its configuration and the largest batch that fan-outs allow.

use super::Planned;
use crate::link::{LinkTask, Links, NegativeCount, PIECE_QUERIES};
use crate::{Result, RunConfig};
use esker_nn::{ExchangedRows, LinkShape, MemoryOf, StepShape, link_bytes, memory_bytes};
use esker_sample::negatives::NegativeMask;
use esker_sample::{Fanout, Form, Settings};
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
        // The gradient of the output, and the input where no layer gives an output.
        let own = if self.config.model.layers == 0 { rows.saturating_mul(2 * row) } else { 0 };
        Ok((parameters, side.step.saturating_mul(2).saturating_add(members).saturating_add(own)))
    }

    /// The true ends of all edges that train, if all nodes are negatives and those are left out.
    pub(super) fn masked_bytes(&self, job: &JobOutline) -> u64 {
        let edges = job.dataset.manifest().edges.count;
        let link = self.config.link.as_ref().filter(|link| link.negatives == NegativeCount::All);
        link.filter(|link| link.mask == NegativeMask::Graph)
            .map_or(0, |_| Links::true_end_bytes(edges, edges))
    }

    /// The representations of all nodes.
    pub(super) fn representation_bytes(&self, job: &JobOutline) -> u64 {
        job.dataset.manifest().nodes.count.saturating_mul(self.outputs as u64 * 4)
    }

    /// Adds what ranking takes.
    pub(super) fn add_ranking(&self, job: &JobOutline, table: &mut MemoryTable) {
        let manifest = job.dataset.manifest();
        let (nodes, edges) = (manifest.nodes.count, manifest.edges.count);
        let (valid, test) = manifest.splits.as_ref().map_or((0, 0), |splits| (splits.valid, splits.test));
        let queries = 2 * (valid + test);
        let known = 2 * Links::true_end_bytes(edges + valid + test, valid + test);
        table.add_from("evaluation: true edges of ranked pairs", known, "of validation and test, at most");
        if self.device.in_host_memory {
            let from = format!("{} nodes x {} x 4 bytes", grouped(nodes), self.outputs);
            table.add_from("evaluation: representations of nodes", self.representation_bytes(job), from);
        }
        if let Some(link) = &self.config.link {
            let shape = LinkShape {
                edges: PIECE_QUERIES,
                chunk_edges: PIECE_QUERIES,
                candidates: nodes as usize,
                all_nodes: true,
                columns: self.outputs,
                relation_columns: link.decoder.relation_columns(link.columns).unwrap_or(0),
            };
            let ranked = link_bytes(&shape, self.device.memory(self.config)).ranking;
            // A query and its rank, pairs that are not edges, scores.
            table.add("evaluation: queries and ranks", ranked.saturating_add(queries * 96));
        }
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
        Ok(Some((bytes.batch_inference.saturating_sub(self.counted_rows(&shape)), rows)))
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
