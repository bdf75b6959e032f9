//! Batches of packed rows (Figure 7 of the paper): load a sample, read its rows in one go, put the batch together. Each is a
//! stage; some lanes take batches in turn for the first two, so that the disk has the next batch to read while the last reads of
//! one are still on their way.

use super::sizes::{LANE_AHEAD, LANE_BUFFERS};
use super::{Cache, Prepared};
use crate::batch::{Batch, BatchSource, RowBuffer, RowMaker};
use crate::resident::positions_of;
use crate::{FreshRows, Job, Result, SourceCounters, StrategyError};
use crossbeam_channel::{Receiver, Sender, bounded};
use esker_fetch::Missed;
use esker_fetch::packed::{Packed, PackedBatch};
use esker_fetch::pipeline::{AnyBusy, Buffers, Pipeline};
use esker_io::{AlignedBuffer, DIRECT_ALIGN};
use esker_sample::{Position, Sample};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What is counted.
#[derive(Default)]
struct Counts {
    rows: AtomicU64,
    device_hits: AtomicU64,
    host_hits: AtomicU64,
    reads: AtomicU64,
    read_bytes: AtomicU64,
    /// Any lane reads.
    reading: AnyBusy,
}

/// Rows as they were read, in memory of ours or where the processor reads them.
enum Fresh {
    Ours(AlignedBuffer),
    Held(Box<dyn FreshRows>),
}

impl Fresh {
    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Fresh::Ours(buffer) => buffer,
            Fresh::Held(fresh) => fresh.bytes_mut(),
        }
    }
}

/// A batch on its way through a lane; buffers go back to the lane that has them.
struct Loaded {
    at: Position,
    sample: Sample,
    packed: PackedBatch,
    fresh: Option<Fresh>,
    home: Lane,
}

/// Buffers of a lane.
#[derive(Clone)]
struct Lane {
    samples: Buffers<Sample>,
    batches: Buffers<PackedBatch>,
    fresh: Buffers<Option<AlignedBuffer>>,
}

/// Batches of a run.
pub(super) struct Source<R> {
    /// Dropped first: stages that wait for buffers give up.
    stop: Option<Sender<()>>,
    pipeline: Option<Pipeline<Batch<R>, StrategyError>>,
    counts: Arc<Counts>,
    row_bytes: u64,
    on_device: bool,
}

impl<R: RowBuffer> Source<R> {
    pub fn new(
        prepared: &Prepared<R>,
        job: &Job,
        from: Position,
        make_rows: &RowMaker<R>,
    ) -> Result<Source<R>> {
        let packed = prepared.packed.clone().expect("rows are packed before batches are asked for");
        let (stop, stopped) = bounded::<()>(0);
        let training = prepared.training;
        let places = Buffers::<()>::new(training.held);
        let counts = Arc::<Counts>::default();
        let lanes = (0..training.lanes).map(|number| {
            let epochs = prepared.epochs;
            let lane = LaneStart { packed: &packed, job, from, epochs, stopped: &stopped, counts: &counts };
            lane.start(number, training.lanes, &prepared.cache, training.held, &places)
        });
        let read = match lanes.collect::<Vec<_>>() {
            mut only if only.len() == 1 => only.remove(0),
            several => Pipeline::in_turn(several),
        };
        let (pool, disk, cache) =
            (prepared.reads.pool.clone(), prepared.reads.rows.clone(), prepared.cache.clone());
        let (make_rows, count, rows_of) = (make_rows.clone(), counts.clone(), packed.clone());
        let on_device = matches!(cache, Cache::Held(_));
        let sequential = job.out_of_core.sequential;
        let pipeline =
            read.then("assemble", training.held.saturating_sub(2), move |clock, loaded: Loaded| {
                let Loaded { at, sample, packed, fresh, home } = loaded;
                let mut fresh = fresh.expect("rows were read");
                pool.install(|| rows_of.check_rows(&packed, fresh.bytes_mut()))?;
                // A processor that assembles by itself had its place when its memory was asked for.
                let early = on_device || sequential;
                if !early && clock.blocked(|| places.take(&stopped)).is_none() {
                    return Ok(None);
                }
                let placements = &packed.placements;
                let placed = placements.counts();
                let rows = match (&cache, fresh) {
                    (Cache::Host(cached), Fresh::Ours(buffer)) => {
                        let format = disk.format();
                        let mut rows = make_rows(placements.words.len(), format.dim());
                        let (missed, values) = (Missed::Buffer(&buffer), rows.values_mut());
                        pool.install(|| cached.assemble(placements, missed, format, values));
                        count.host_hits.fetch_add(placed.hits, Ordering::Relaxed);
                        home.fresh.put(Some(buffer));
                        rows
                    }
                    (Cache::Held(held), Fresh::Held(fresh)) => {
                        // Hits are slots as they are, and the first slots are the device's.
                        let device = held.device_slots() as u32;
                        let on_device = placements.words.iter().filter(|word| **word < device).count() as u64;
                        count.device_hits.fetch_add(on_device, Ordering::Relaxed);
                        count.host_hits.fetch_add(placed.hits - on_device, Ordering::Relaxed);
                        held.batch(placements, fresh)
                    }
                    _ => unreachable!("rows are read to where they are assembled"),
                };
                count.rows.fetch_add(placed.hits + placed.reads, Ordering::Relaxed);
                home.batches.put(packed);
                Ok(Some(Batch {
                    at,
                    sample,
                    rows: Some(rows),
                    samples: home.samples,
                    places: places.clone(),
                }))
            });
        Ok(Source {
            stop: Some(stop),
            pipeline: Some(pipeline),
            counts,
            row_bytes: packed.packing().row_bytes,
            on_device,
        })
    }
}

/// What a lane is started with.
struct LaneStart<'a> {
    packed: &'a Arc<Packed>,
    job: &'a Job,
    from: Position,
    epochs: u64,
    stopped: &'a Receiver<()>,
    counts: &'a Arc<Counts>,
}

impl LaneStart<'_> {
    fn start<R: RowBuffer>(
        &self,
        number: usize,
        lanes: usize,
        cache: &Cache<R>,
        held: usize,
        places: &Buffers<()>,
    ) -> Pipeline<Loaded, StrategyError> {
        let all = held.div_ceil(lanes) + LANE_AHEAD;
        let lane = Lane {
            samples: Buffers::new(all),
            batches: Buffers::new(LANE_AHEAD),
            fresh: Buffers::new(LANE_BUFFERS),
        };
        let mut positions =
            positions_of(self.job.batches.clone(), self.from, self.job.epochs).skip(number).step_by(lanes);
        let listed = Pipeline::start("list", 0, move |_| Ok::<_, StrategyError>(positions.next()));
        let (packed, stopped) = (self.packed.clone(), self.stopped.clone());
        let (sequential, epochs) = (self.job.out_of_core.sequential, self.epochs);
        let first_places = places.clone();
        let loaded = listed.then_with(
            "load",
            0,
            move || Ok(packed.reader()?),
            move |clock, reader, at| {
                if sequential && clock.blocked(|| first_places.take(&stopped)).is_none() {
                    return Ok(None);
                }
                let Some(mut sample) = clock.blocked(|| lane.samples.take(&stopped)) else { return Ok(None) };
                let Some(mut packed) = clock.blocked(|| lane.batches.take(&stopped)) else { return Ok(None) };
                // Later epochs repeat those that were sampled.
                let drawn = Position { epoch: at.epoch % epochs, ..at };
                reader.load(drawn, &mut sample, &mut packed)?;
                Ok(Some(Loaded { at, sample, packed, fresh: None, home: lane.clone() }))
            },
        );
        let (packed, stopped, counts) = (self.packed.clone(), self.stopped.clone(), self.counts.clone());
        let (cache, places) = (cache.clone(), places.clone());
        let most_bytes = self.packed.rows_bytes() as usize;
        loaded.then_with(
            "read",
            0,
            move || Ok(packed.reader()?),
            move |clock, reader, mut loaded: Loaded| {
                let mut fresh = match &cache {
                    Cache::Host(_) => {
                        let Some(free) = clock.blocked(|| loaded.home.fresh.take(&stopped)) else {
                            return Ok(None);
                        };
                        Fresh::Ours(match free {
                            Some(buffer) => buffer,
                            None => {
                                let buffer = AlignedBuffer::new(most_bytes, DIRECT_ALIGN);
                                reader.register(&buffer)?;
                                buffer
                            }
                        })
                    }
                    Cache::Held(held) => {
                        if !sequential && clock.blocked(|| places.take(&stopped)).is_none() {
                            return Ok(None);
                        }
                        Fresh::Held(held.missed(reader.rows_bytes(&loaded.packed)))
                    }
                };
                let found = counts.reading.busy(|| reader.read(&loaded.packed, fresh.bytes_mut()))?;
                counts.reads.fetch_add(found.reads, Ordering::Relaxed);
                counts.read_bytes.fetch_add(found.bytes, Ordering::Relaxed);
                loaded.fresh = Some(fresh);
                Ok(Some(loaded))
            },
        )
    }
}

impl<R: RowBuffer> BatchSource<R> for Source<R> {
    fn next(&mut self) -> Result<Option<Batch<R>>> {
        self.pipeline.as_mut().and_then(Pipeline::receive).transpose()
    }

    fn counters(&self) -> SourceCounters {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counts = &*self.counts;
        let mut hits = vec![("host".to_string(), get(&counts.host_hits))];
        if self.on_device {
            hits.insert(0, ("gpu".to_string(), get(&counts.device_hits)));
        }
        SourceCounters {
            stages: self.pipeline.as_ref().map(Pipeline::times).unwrap_or_default(),
            rows: get(&counts.rows),
            bytes_useful: get(&counts.rows) * self.row_bytes,
            bytes_read: get(&counts.read_bytes),
            reads: get(&counts.reads),
            hits,
            read_seconds: counts.reading.passed().as_secs_f64(),
            ..SourceCounters::default()
        }
    }
}

impl<R> Drop for Source<R> {
    fn drop(&mut self) {
        self.stop = None;
        self.pipeline = None;
    }
}
