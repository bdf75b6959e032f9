//! Batches of packed rows (Figure 7 of the paper): load a sample, read its rows in one piece, assemble the batch. Each
//! is a stage. Several workers take batches in turn for the first two stages, so that the disk has the next batch to
//! read while the last reads of one batch are still in flight.

use super::evaluation::PackedPhases;
use super::sizes::{Training, WORKER_PREFETCH};
use super::{Opened, RowTier};
use crate::direct::Reads;
use crate::job::run_positions;
use crate::phases::PhaseSource;
use crate::source::Stages;
use crate::{
    Batch, Blocks, EvaluationCounters, Exchange, FixedRows, Input, Job, Phase, Result, RunPosition,
    SourceCounters, StagedBlocks, StrategyError,
};
use esker_device::{BatchOf, Device, HostBytes, HostRows, RowCache};
use esker_fetch::Missed;
use esker_fetch::packed::{PackReader, PackedBatch};
use esker_fetch::pipeline::{AnyBusy, Permit, Permits, Pipeline, Recycled, Recycler, Stage};
use esker_io::{AlignedBuffer, DIRECT_ALIGN};
use esker_plan::PlacementCounts;
use esker_sample::{Position, Sample, Targets};
use rayon::ThreadPool;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counters.
#[derive(Default)]
struct ReadCounts {
    rows: AtomicU64,
    device_hits: AtomicU64,
    host_hits: AtomicU64,
    reads: AtomicU64,
    read_bytes: AtomicU64,
    sample_bytes: AtomicU64,
    /// The time in which any worker reads.
    reading: AnyBusy,
}

/// The rows of a batch after reading.
enum ReadRows<D: Device> {
    /// Missed rows, to be assembled with cached ones in host memory.
    Missed(Recycled<Option<AlignedBuffer>>),
    /// Everything that a device assembles.
    OfDevice(BatchOf<D>),
}

/// A batch with its sample loaded.
struct LoadedSample {
    at: Position,
    /// Of which packed rows it is.
    phase: usize,
    sample: Recycled<Sample>,
    packed: Recycled<PackedBatch>,
    targets: Targets,
    permit: Option<Permit>,
}

/// A batch with its sample loaded and its rows read.
struct LoadedRows<D: Device> {
    loaded: LoadedSample,
    rows: ReadRows<D>,
    /// The graphs of its layers, if workers stage them.
    graphs: Option<Vec<D::StagedGraph>>,
}

/// The batches of a run in one stream: of training, and of evaluations whose rows are packed. So the first batches of
/// an evaluation are read while the last ones of an epoch are trained on, and the other way round.
pub(super) struct PackedRun<D: Device> {
    /// `None` while an evaluation without packed rows has their memory.
    stages: Option<Stages<D>>,
    /// The counters when they ended.
    counted: SourceCounters,
    evaluates: bool,
    /// Opens the stages at a position.
    open: Box<dyn Fn(RunPosition) -> Result<Stages<D>> + Send>,
}

impl<D: Device> PackedRun<D> {
    /// The batches of a run from a position on.
    pub fn open(opened: &Opened<D>, job: &Job, from: RunPosition, device: &D) -> Result<PackedRun<D>> {
        let phases = opened.packed.clone().expect("rows are packed before batches are requested");
        let evaluates = phases.evaluates(&job.schedule);
        let (job, device, reads) = (job.clone(), device.clone(), opened.reads.clone());
        let (training, epochs, tier) = (opened.training, opened.epochs, opened.tier.clone());
        // Counters continue if the stages are opened again.
        let counts: [Arc<ReadCounts>; 2] = Default::default();
        let open = move |from: RunPosition| {
            let shared = Shared {
                permits: Permits::new(training.depth),
                counts: counts.clone(),
                tier: tier.clone(),
                sequential: job.out_of_core.sequential,
                phases: phases.clone(),
                staging: training.stages_graphs.then(|| device.clone()),
            };
            stages(shared, &job, from, training, epochs, &reads, &device)
        };
        let (stages, counted) = (Some(open(from)?), SourceCounters::default());
        Ok(PackedRun { stages, counted, evaluates, open: Box::new(open) })
    }
}

impl<D: Device> PhaseSource<D> for PackedRun<D> {
    fn next(&mut self) -> Result<Option<Batch<D>>> {
        self.stages.as_mut().map_or(Ok(None), Stages::next)
    }

    fn counters(&self) -> SourceCounters {
        self.stages.as_ref().map_or_else(|| self.counted.clone(), Stages::counters)
    }

    fn rest(&mut self) -> bool {
        self.counted = self.counters();
        self.stages = None;
        true
    }

    fn evaluates(&self) -> bool {
        self.evaluates
    }

    fn restart(&mut self, at: RunPosition) -> Result<()> {
        // Those before end first, and free their memory.
        self.stages = None;
        self.stages = Some((self.open)(at)?);
        Ok(())
    }
}

/// The stages of a run from a position on.
fn stages<D: Device>(
    shared: Shared<D>,
    job: &Job,
    from: RunPosition,
    training: Training,
    epochs: u64,
    reads: &Reads,
    device: &D,
) -> Result<Stages<D>> {
    let evaluates = shared.phases.evaluates(&job.schedule);
    let workers = (0..training.workers).map(|number| {
        let positions = run_positions(job, from);
        let yielded = move |at: &RunPosition| evaluates || matches!(at.phase, Phase::Train { .. });
        let mut positions = positions.filter(yielded).skip(number).step_by(training.workers);
        let ahead = ReadAhead { phases: shared.phases.clone(), epochs, none: shared.sequential };
        // A worker loads one batch while this stage has listed the next two: the disk reads their samples meanwhile.
        let listed = Pipeline::start("list", 1, move |_| {
            let next = positions.next();
            next.into_iter().for_each(|at| ahead.read(at));
            Ok::<_, StrategyError>(next)
        });
        let samples = training.depth.div_ceil(training.workers) + WORKER_PREFETCH;
        shared.read(shared.load(listed, job, epochs, samples), training.buffers, &reads.pool)
    });
    let read = Pipeline::in_turn(workers.collect());
    let assemble = Assemble { shared: shared.clone(), reads: reads.clone(), device: device.clone() };
    let queue = training.depth.saturating_sub(2);
    let pipeline = read.then("assemble", queue, move |stage, read| assemble.batch(stage, read));
    let row_bytes = shared.phases.all()[0].packing().row_bytes;
    let (on_device, [counts, evaluated]) = (matches!(shared.tier, RowTier::Device(_)), shared.counts.clone());
    Stages::new(job, &job.settings, pipeline, move |stages| {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let mut hits = vec![("host".to_string(), get(&counts.host_hits))];
        if on_device {
            hits.insert(0, ("gpu".to_string(), get(&counts.device_hits)));
        }
        SourceCounters {
            stages,
            rows: get(&counts.rows),
            bytes_useful: get(&counts.rows) * row_bytes,
            bytes_read: get(&counts.read_bytes),
            reads: get(&counts.reads),
            sample_bytes_read: get(&counts.sample_bytes),
            hits,
            read_seconds: counts.reading.passed().as_secs_f64(),
            evaluation: EvaluationCounters {
                rows: get(&evaluated.rows),
                hits: get(&evaluated.device_hits) + get(&evaluated.host_hits),
                bytes_useful: get(&evaluated.rows) * row_bytes,
                bytes_read: get(&evaluated.read_bytes),
                reads: get(&evaluated.reads),
                read_seconds: evaluated.reading.passed().as_secs_f64(),
            },
            ..SourceCounters::default()
        }
    })
}

/// Reads samples into the page cache ahead of the workers that load them.
struct ReadAhead {
    phases: PackedPhases,
    epochs: u64,
    /// Whether nothing is prefetched.
    none: bool,
}

impl ReadAhead {
    fn read(&self, at: RunPosition) {
        if !self.none {
            let packed = &self.phases.all()[self.phases.index(at.phase)];
            packed.read_ahead(sampled_at(at, self.epochs));
        }
    }
}

/// The position at which a batch was sampled. Later epochs of training repeat the sampled ones.
fn sampled_at(at: RunPosition, epochs: u64) -> Position {
    let position = at.position();
    match at.phase {
        Phase::Train { .. } => Position { epoch: position.epoch % epochs, ..position },
        _ => position,
    }
}

/// Readers of all packed rows, for one thread.
fn readers_of(phases: &PackedPhases) -> Result<Vec<PackReader>> {
    phases.all().iter().map(|packed| Ok(packed.reader()?)).collect()
}

/// State that stages share.
struct Shared<D: Device> {
    phases: PackedPhases,
    tier: RowTier<D>,
    permits: Permits,
    /// Those of training, and those of evaluations.
    counts: [Arc<ReadCounts>; 2],
    /// No prefetching: a batch gets its permit before anything of it is loaded.
    sequential: bool,
    /// The device for which workers stage graphs, if memory has room for them.
    staging: Option<D>,
}

impl<D: Device> Clone for Shared<D> {
    fn clone(&self) -> Shared<D> {
        Shared {
            phases: self.phases.clone(),
            tier: self.tier.clone(),
            permits: self.permits.clone(),
            counts: self.counts.clone(),
            sequential: self.sequential,
            staging: self.staging.clone(),
        }
    }
}

impl<D: Device> Shared<D> {
    /// Loads samples and placements. Later epochs repeat the sampled ones.
    fn load(
        &self,
        listed: Pipeline<RunPosition, StrategyError>,
        job: &Job,
        epochs: u64,
        samples: usize,
    ) -> Pipeline<LoadedSample, StrategyError> {
        let (phases, permits, sequential) = (self.phases.clone(), self.permits.clone(), self.sequential);
        let (readers, job, counts) = (self.phases.clone(), job.clone(), self.counts.clone());
        let (samples, loads) =
            (Recycler::<Sample>::new(samples), Recycler::<PackedBatch>::new(WORKER_PREFETCH));
        listed.then_with(
            "load",
            0,
            move || readers_of(&readers),
            move |stage, readers, run_at: RunPosition| {
                let permit = match sequential {
                    true => match stage.permit(&permits) {
                        None => return Ok(None),
                        permit => permit,
                    },
                    false => None,
                };
                let Some(mut sample) = stage.take(&samples) else { return Ok(None) };
                let Some(mut packed) = stage.take(&loads) else { return Ok(None) };
                let (at, phase) = (run_at.position(), phases.index(run_at.phase));
                let batches = match job.inference(run_at.phase) {
                    None => &job.batches,
                    Some(over) => &over.batches,
                };
                let sampled = sampled_at(run_at, epochs);
                let reader = &mut readers[phase];
                reader.load(sampled, &mut sample, &mut packed)?;
                counts[phase.min(1)].sample_bytes.fetch_add(reader.loaded_bytes(&packed), Ordering::Relaxed);
                let targets = batches.targets(sampled)?;
                Ok(Some(LoadedSample { at, phase, sample, packed, targets, permit }))
            },
        )
    }

    /// Reads rows. What a device assembles is checked and handed to it here, by several workers.
    fn read(
        &self,
        loaded: Pipeline<LoadedSample, StrategyError>,
        buffers: usize,
        pool: &Arc<ThreadPool>,
    ) -> Pipeline<LoadedRows<D>, StrategyError> {
        let (readers, shared, pool) = (self.phases.clone(), self.clone(), pool.clone());
        let buffers = Recycler::<Option<AlignedBuffer>>::new(buffers);
        let most_bytes =
            self.phases.all().iter().map(|packed| packed.rows_bytes()).max().unwrap_or(0) as usize;
        loaded.then_with(
            "read",
            0,
            move || readers_of(&readers),
            move |stage, readers, mut loaded: LoadedSample| {
                let reader = &mut readers[loaded.phase];
                let rows = match &shared.tier {
                    RowTier::Host(_) => {
                        let Some(mut buffer) = stage.take(&buffers) else { return Ok(None) };
                        if buffer.is_none() {
                            reader.register(buffer.insert(AlignedBuffer::new(most_bytes, DIRECT_ALIGN)))?;
                        }
                        shared.read_rows(reader, &loaded, buffer.as_deref_mut().unwrap_or_default())?;
                        ReadRows::Missed(buffer)
                    }
                    RowTier::Device(cache) => {
                        // A device that assembles gets the buffer of the reads, so the permit comes before the memory.
                        if !shared.permitted(stage, &mut loaded) {
                            return Ok(None);
                        }
                        let mut missed = cache.missed(reader.rows_bytes(&loaded.packed));
                        shared.read_rows(reader, &loaded, missed.bytes_mut())?;
                        shared.check_rows(&loaded, missed.bytes_mut(), &pool)?;
                        let placements = &loaded.packed.placements;
                        let on_device = placements.hits_below(cache.device_slots());
                        shared.count(loaded.phase, placements.counts(), on_device);
                        ReadRows::OfDevice(cache.batch(placements, missed))
                    }
                };
                let sample = &loaded.sample;
                let graphs = shared.staging.as_ref().map(|device| StagedBlocks::graphs_of(device, sample));
                Ok(Some(LoadedRows { loaded, rows, graphs }))
            },
        )
    }

    fn read_rows(&self, reader: &mut PackReader, loaded: &LoadedSample, missed: &mut [u8]) -> Result<()> {
        let counts = self.counts_of(loaded.phase);
        let found = counts.reading.busy(|| reader.read(&loaded.packed, missed))?;
        counts.reads.fetch_add(found.reads, Ordering::Relaxed);
        counts.read_bytes.fetch_add(found.bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Verifies the rows that were read.
    fn check_rows(&self, loaded: &LoadedSample, missed: &mut [u8], pool: &ThreadPool) -> Result<()> {
        let packed = &self.phases.all()[loaded.phase];
        if missed.is_empty() {
            return Ok(());
        }
        Ok(pool.install(|| packed.check_rows(&loaded.packed, missed))?)
    }

    /// Waits for the permit of a batch, unless it has one. `false` if nobody waits for the batch any more.
    fn permitted(&self, stage: &Stage, loaded: &mut LoadedSample) -> bool {
        if loaded.permit.is_none() {
            loaded.permit = stage.permit(&self.permits);
        }
        loaded.permit.is_some()
    }

    fn counts_of(&self, phase: usize) -> &ReadCounts {
        &self.counts[phase.min(1)]
    }

    fn count(&self, phase: usize, placed: PlacementCounts, on_device: u64) {
        let counts = self.counts_of(phase);
        counts.rows.fetch_add(placed.hits + placed.reads, Ordering::Relaxed);
        counts.device_hits.fetch_add(on_device, Ordering::Relaxed);
        counts.host_hits.fetch_add(placed.hits - on_device, Ordering::Relaxed);
    }
}

/// The last stage: assembles batches in host memory.
struct Assemble<D: Device> {
    shared: Shared<D>,
    reads: Reads,
    device: D,
}

impl<D: Device> Assemble<D> {
    fn batch(&self, stage: &Stage, read: LoadedRows<D>) -> Result<Option<Batch<D>>> {
        let LoadedRows { mut loaded, rows, graphs } = read;
        let (shared, pool) = (&self.shared, &self.reads.pool);
        let rows = match (&shared.tier, rows) {
            (_, ReadRows::OfDevice(rows)) => FixedRows::Cached(rows),
            (RowTier::Host(cache), ReadRows::Missed(mut buffer)) => {
                let missed = buffer.as_deref_mut().unwrap_or_default();
                shared.check_rows(&loaded, missed, pool)?;
                if !shared.permitted(stage, &mut loaded) {
                    return Ok(None);
                }
                let (format, placements) = (self.reads.rows.format(), &loaded.packed.placements);
                let mut rows = self.device.host_rows(placements.words.len(), format.dim());
                let missed = Missed::Buffer(missed);
                pool.install(|| cache.assemble(placements, missed, format, rows.values_mut()));
                shared.count(loaded.phase, placements.counts(), 0);
                FixedRows::Host(rows)
            }
            (RowTier::Device(_), ReadRows::Missed(_)) => {
                unreachable!("rows are read to where they are assembled")
            }
        };
        let LoadedSample { at, sample, targets, permit, .. } = loaded;
        let permit = permit.expect("taken before rows have memory");
        let blocks = match graphs {
            Some(graphs) => Blocks::Staged(StagedBlocks { sample, graphs }),
            None => Blocks::Host(sample),
        };
        let (at, input, exchange) = (at.into(), Input::fixed(rows), Exchange::none());
        Ok(Some(Batch { at, blocks, input, targets, exchange, permit }))
    }
}
