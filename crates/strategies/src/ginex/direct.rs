//! Batches without a plan, for evaluation: lists and rows read as they are wanted, in the memory that is set aside for it,
//! while the phases of training keep theirs.

use super::Prepared;
use super::sizes::{SAMPLES_AHEAD, evaluation_sampling_bytes};
use crate::batch::{Batch, BatchSource, RowBuffer, RowMaker};
use crate::resident::positions_of;
use crate::{Evaluation, Job, Result, SourceCounters, StrategyError};
use crossbeam_channel::{Sender, bounded};
use esker_fetch::StoredRow;
use esker_fetch::pipeline::{Buffers, Pipeline};
use esker_sample::{OnDisk, Position, Sample, Sampler, Word};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

struct Direct<R> {
    /// Dropped first: stages that wait for buffers give up.
    stop: Option<Sender<()>>,
    pipeline: Option<Pipeline<Batch<R>, StrategyError>>,
    rows: Arc<AtomicU64>,
    row_bytes: u64,
}

/// The only epoch of an evaluation.
pub(super) fn source<R: RowBuffer, W: Word + StoredRow>(
    graph: &Prepared<W>,
    job: &Job,
    over: &Evaluation,
    make_rows: &RowMaker<R>,
) -> Result<Box<dyn BatchSource<R>>> {
    let all_samples = 1 + SAMPLES_AHEAD;
    let (samples, places) = (Buffers::<Sample>::new(all_samples), Buffers::<()>::new(1));
    let (stop, stopped) = bounded::<()>(0);
    let (batches, settings) = (over.batches.clone(), over.settings.clone());
    let most_bytes = evaluation_sampling_bytes(job, over);
    let mut positions = positions_of(batches.clone(), Position { epoch: 0, batch: 0 }, 1);
    let (free, stop_sampling) = (samples.clone(), stopped.clone());
    let topology = OnDisk::<W>::new(graph.lists.graph.clone(), None);
    let listed = Pipeline::start("list", 0, move |_| Ok::<_, StrategyError>(positions.next()));
    // The sampler's queue stays with its thread, so the sampler is made there.
    let sampled = listed.then_with(
        "sample",
        1,
        move || {
            let sampler = Sampler::new(topology, settings, most_bytes)?;
            Ok((sampler.with_samples(all_samples as u64), Vec::new()))
        },
        move |clock, (sampler, seeds), at| {
            let Some(mut sample) = clock.blocked(|| free.take(&stop_sampling)) else { return Ok(None) };
            batches.seeds(at, seeds)?;
            sampler.sample(at, seeds, &mut sample)?;
            Ok(Some((at, sample)))
        },
    );
    let (disk, pool, make_rows) = (graph.rows.clone(), graph.pool.clone(), make_rows.clone());
    let counted = Arc::new(AtomicU64::new(0));
    let (count, with_rows, row_bytes) = (counted.clone(), over.rows, disk.format().row_bytes() as u64);
    let dim = disk.format().dim();
    let pipeline = sampled.then_with(
        "gather",
        0,
        move || Ok(disk.reader()?),
        move |clock, reader, (at, sample)| {
            if clock.blocked(|| places.take(&stopped)).is_none() {
                return Ok(None);
            }
            let nodes = if with_rows { &sample.node_ids[..] } else { &[] };
            let mut rows = make_rows(nodes.len(), dim);
            reader.read_all(nodes, rows.values_mut(), &pool)?;
            count.fetch_add(nodes.len() as u64, Ordering::Relaxed);
            let (samples, places) = (samples.clone(), places.clone());
            Ok(Some(Batch { at, sample, rows: Some(rows), samples, places }))
        },
    );
    let (stop, pipeline) = (Some(stop), Some(pipeline));
    Ok(Box::new(Direct { stop, pipeline, rows: counted, row_bytes }))
}

impl<R: RowBuffer> BatchSource<R> for Direct<R> {
    fn next(&mut self) -> Result<Option<Batch<R>>> {
        self.pipeline.as_mut().and_then(Pipeline::receive).transpose()
    }

    fn counters(&self) -> SourceCounters {
        let rows = self.rows.load(Ordering::Relaxed);
        SourceCounters {
            stages: self.pipeline.as_ref().map(Pipeline::times).unwrap_or_default(),
            rows,
            bytes_useful: rows * self.row_bytes,
            ..SourceCounters::default()
        }
    }
}

impl<R> Drop for Direct<R> {
    fn drop(&mut self) {
        self.stop = None;
        self.pipeline = None;
    }
}
