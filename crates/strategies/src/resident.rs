//! Topology in memory, and feature rows that can be read by node at any time. `memory` and `mmap` share this. Two
//! stages, sampling and gathering, run ahead of the trainer.

use crate::phases::{InferenceGraph, PhaseSource, Phases};
use crate::sampling::{ResidentTopology, SampledBatch, Walk, sampling_bytes};
use crate::source::Stages;
use crate::{
    Batch, BatchSource, CheckpointReader, FixedRows, Inference, Input, InputTable, Job, JobOutline,
    MemoryTable, Needs, Prepared, Result, RunPosition, SourceCounters, Strategy,
};
use esker_device::{Device, HostRows};
use esker_fetch::FeatureRows;
use esker_fetch::pipeline::Permits;
use esker_sample::{AnyTopology, Position};
use esker_store::Dataset;
use esker_types::counted;
use rayon::ThreadPool;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The feature rows of a strategy with its topology in memory.
pub trait ResidentRows: Send {
    /// Opens the rows.
    fn open(&self, dataset: &Dataset) -> Result<FeatureRows>;
    /// The memory that the strategy needs.
    fn needs(&self, job: &JobOutline) -> Result<Needs>;
}

/// The memory of such a strategy: `rows`, the topology, samples and rows of batches.
pub fn needs(job: &JobOutline, rows: &[(&str, u64)]) -> Result<Needs> {
    let mut table = MemoryTable::default();
    rows.iter().for_each(|(what, bytes)| table.add(*what, *bytes));
    table.add("topology", AnyTopology::bytes_for(&job.dataset, job.direction));
    let row_bytes = job.dim() * 4;
    let bound = job.bound(&job.settings, job.largest_batch);
    let sampler = sampling_bytes(job, &job.settings, job.largest_batch, job.prefetch_depth, job.samplers);
    table.add("sampling", sampler.saturating_mul(job.samplers as u64));
    let rows = bound.nodes.saturating_mul(row_bytes).saturating_mul(job.prefetch_depth as u64);
    let batches = counted(job.prefetch_depth as u64, "batch", "batches");
    table.add(format!("feature rows of {batches}"), rows);
    if let Some(evaluation) = &job.evaluation {
        let bound = job.bound(&evaluation.settings, evaluation.largest_batch);
        let sampling = sampling_bytes(job, &evaluation.settings, evaluation.largest_batch, 1, 1);
        table.add("evaluation: sampling", sampling);
        table.add("evaluation: feature rows of a batch", bound.nodes.saturating_mul(row_bytes));
    }
    Ok(Needs { host: table, ..Needs::default() })
}

/// The graph that sources share.
struct Resident<D> {
    topology: ResidentTopology,
    rows: Arc<FeatureRows>,
    pool: Arc<ThreadPool>,
    device: D,
}

/// A strategy with its topology in memory and any kind of rows.
pub struct ResidentStrategy<D, H> {
    device: D,
    rows: H,
    graph: Option<Arc<Resident<D>>>,
}

impl<D, H> ResidentStrategy<D, H> {
    pub fn new(device: D, rows: H) -> ResidentStrategy<D, H> {
        ResidentStrategy { device, rows, graph: None }
    }

    /// The graph. Panics before `prepare`.
    fn opened(&self) -> &Arc<Resident<D>> {
        self.graph.as_ref().expect("a strategy is prepared before it yields batches")
    }
}

impl<D: Device, H: ResidentRows> Strategy<D> for ResidentStrategy<D, H> {
    fn needs(&self, job: &JobOutline) -> Result<Needs> {
        self.rows.needs(job)
    }

    fn prepare(&mut self, job: &Job) -> Result<Prepared> {
        let topology = ResidentTopology::load(job)?;
        let (rows, pool) = (Arc::new(self.rows.open(&job.dataset)?), job.pool.clone());
        self.graph = Some(Arc::new(Resident { topology, rows, pool, device: self.device.clone() }));
        Ok(Prepared::default())
    }

    fn batches(
        &mut self,
        job: &Job,
        from: RunPosition,
        _: Option<&mut dyn CheckpointReader>,
    ) -> Result<Box<dyn BatchSource<D>>> {
        let training = self.opened().training(job, job.training_position(from))?;
        Ok(Box::new(Phases::new(job, from, training, self.opened().clone())))
    }

    fn inference(
        &mut self,
        job: &Job,
        over: &Inference,
        _: Option<&mut dyn CheckpointReader>,
    ) -> Result<Box<dyn BatchSource<D>>> {
        Ok(Box::new(Phases::alone(job, over, self.opened().clone())?))
    }
}

impl<D: Device> InferenceGraph<D> for Arc<Resident<D>> {
    /// Batches over other seeds, with one epoch.
    fn infer(&self, job: &Job, over: &Inference) -> Result<Box<dyn PhaseSource<D>>> {
        let sampling = || sampling_bytes(job, &over.settings, over.largest_batch, 1, 1);
        let walk = Walk {
            batches: over.batches.clone(),
            from: Position { epoch: 0, batch: 0 },
            epochs: 1,
            epochs_sampled: 1,
            settings: over.settings.clone(),
            most_bytes: over.sampling_bytes.unwrap_or_else(sampling),
            depth: 1,
            rows: over.rows,
            samplers: 1,
        };
        self.source(job, walk)
    }

    fn table(&self) -> Result<InputTable> {
        let graph = self.clone();
        Ok(InputTable::new(self.rows.rows(), self.rows.dim(), move |nodes, skipped, values| {
            Ok(graph.pool.install(|| graph.rows.gather(nodes, skipped, values))?)
        }))
    }
}

impl<D: Device> Resident<D> {
    /// Training batches from a position on.
    fn training(&self, job: &Job, from: Position) -> Result<Box<dyn PhaseSource<D>>> {
        let walk = Walk {
            batches: job.batches.clone(),
            from,
            epochs: job.epochs,
            epochs_sampled: job.epochs_sampled.unwrap_or(u64::MAX),
            settings: job.settings.clone(),
            most_bytes: sampling_bytes(
                job,
                &job.settings,
                job.largest_batch,
                job.prefetch_depth,
                job.samplers,
            ),
            depth: job.prefetch_depth,
            rows: true,
            samplers: job.samplers.max(1),
        };
        self.source(job, walk)
    }

    fn source(&self, job: &Job, walk: Walk) -> Result<Box<dyn PhaseSource<D>>> {
        let sampled = self.topology.sampled(&walk)?;
        let (rows, pool, device) = (self.rows.clone(), self.pool.clone(), self.device.clone());
        let (permits, gathered) = (Permits::new(walk.depth), Arc::new(AtomicU64::new(0)));
        let (count, with_rows) = (gathered.clone(), walk.rows);
        let pipeline =
            sampled.then("gather", walk.depth.saturating_sub(2), move |stage, sampled: SampledBatch| {
                let SampledBatch { at, sample, targets } = sampled;
                let Some(permit) = stage.permit(&permits) else { return Ok(None) };
                let input = match with_rows {
                    true => {
                        let mut input = device.host_rows(sample.node_ids.len(), rows.dim());
                        pool.install(|| rows.gather(&sample.node_ids, &sample.unneeded, input.values_mut()))?;
                        count.fetch_add(sample.needed_rows(), Ordering::Relaxed);
                        Input::fixed(FixedRows::Host(input))
                    }
                    false => Input::none(),
                };
                Ok(Some(Batch::of_sample(at, sample, targets, input, permit)))
            });
        let row_bytes = self.rows.row_bytes() as u64;
        // The hits of the page cache are not known.
        let tier = self.rows.is_in_memory().then_some("memory");
        Ok(Box::new(Stages::new(job, &walk.settings, pipeline, move |stages| {
            let rows = gathered.load(Ordering::Relaxed);
            let hits = tier.iter().map(|tier| (tier.to_string(), rows)).collect();
            SourceCounters { stages, rows, bytes_useful: rows * row_bytes, hits, ..SourceCounters::default() }
        })?))
    }
}
