//! Packs the rows that batches will access and reads them in one piece (DiskGNN, SIGMOD 2025). Batches are sampled
//! before training. The most accessed rows are cached in memory, first of a GPU and then of the host. The others are
//! stored on disk batch by batch. Training loads samples, reads rows and assembles batches in parallel stages.
//!
//! # The life of packed rows
//!
//! ```text
//!  positions ── sample ──> samples ── count, decide ── lay out ──> parts ── pack ──> rows ── order ──> NAME
//!               log.rs     samples.rs prepare.rs       layout.rs   outputs.rs pack.rs        order.rs
//!  NAME ── load, read, assemble ──> Batch
//!          read.rs, source.rs
//! ```
//!
//! Files are in `strategies/diskgnn/` and `fetch/packed/`.
//!
//! 1. `prepare.rs` searches `home.rs` for packed rows that can be used, and reports why none can. `plan/packing.rs`
//!    decides by misses. `sampling.rs` finds samples, or logs new ones within the disk budget. All packed rows of the
//!    same batches share them.
//! 2. `prepare.rs` counts accesses. It decides which rows are for memory (`Hottest`) and how long segments must be
//!    (`choose_segment`). `layout.rs` then determines what batches of a segment share (`SegmentRows`), a placement per
//!    row and, for every part of the file of rows (`outputs.rs`), its rows, ascending.
//! 3. `pack.rs` reads the features once and copies each row to every part that has it, through one block of memory per
//!    part. If memory has too few blocks, it packs in episodes. `order.rs` moves rows of caches to their positions,
//!    part by part, and sums up checksums of shared rows.
//! 4. `source.rs` has workers that take batches in turn and load and read them. Then one stage verifies and assembles
//!    them. `esker prepare` ends after step 3.

pub(crate) mod evaluation;
pub(crate) mod home;
mod prepare;
pub(crate) mod sampling;
pub(crate) mod sizes;
mod source;

use crate::direct::Reads;
use crate::phases::Phases;
use crate::{
    BatchSource, CheckpointReader, Inference, Job, JobOutline, Needs, Prepared, Result, RunPosition, Strategy,
};
use esker_device::{Device, RowCache};
use esker_fetch::packed::{Packed, Packing, SafePoints};
use esker_fetch::{FetchError, HostCache};
use esker_types::{ByteCount, Dtype, Unit, counted, grouped};
use evaluation::PackedPhases;
use sizes::{Sizes, Training};
use source::PackedRun;
use std::sync::Arc;
use std::time::Instant;

/// DiskGNN for a device.
pub struct DiskGnn<D: Device> {
    device: D,
    opened: Option<Opened<D>>,
}

/// State that sources share.
struct Opened<D: Device> {
    reads: Reads,
    /// `None` if the job does not train.
    packed: Option<PackedPhases>,
    training: Training,
    tier: RowTier<D>,
    /// Number of distinct epochs. Later epochs repeat them.
    epochs: u64,
}

/// Location of the most accessed rows.
enum RowTier<D: Device> {
    /// In host memory, as stored. Batches are assembled there.
    Host(Arc<HostCache>),
    /// In memory that the training device reads. The device assembles batches.
    Device(Arc<D::Cache>),
}

impl<D: Device> Clone for RowTier<D> {
    fn clone(&self) -> RowTier<D> {
        match self {
            RowTier::Host(rows) => RowTier::Host(rows.clone()),
            RowTier::Device(cache) => RowTier::Device(cache.clone()),
        }
    }
}

/// How much work may be lost if preparing is killed.
pub(crate) fn safe_points(job: &JobOutline) -> SafePoints {
    match job.out_of_core.safe_point_bytes {
        Some(bytes) => SafePoints { sample_bytes: bytes, packed_bytes: bytes },
        None => SafePoints::default(),
    }
}

/// The memory it needs.
pub fn needs(job: &JobOutline) -> Result<Needs> {
    Ok(Needs {
        host: sizes::memory(job),
        disk_bytes: sizes::most_on_disk(job),
        samples_beforehand: job.largest_batch > 0,
        takes_the_rest: true,
        caches_on_device: true,
        ..Needs::default()
    })
}

/// The strategy, not yet prepared.
pub fn strategy<D: Device>(device: D) -> DiskGnn<D> {
    DiskGnn { device, opened: None }
}

impl<D: Device> DiskGnn<D> {
    /// The prepared state. Panics before `prepare`.
    fn opened(&self) -> &Opened<D> {
        self.opened.as_ref().expect("a strategy is prepared before it yields batches")
    }

    /// Reads the most accessed rows into their cache. A job that only prepares has no use for them.
    fn load(&self, job: &Job, packed: &Packed, reads: &Reads) -> Result<RowTier<D>> {
        let format = reads.rows.format();
        if job.out_of_core.prepare_only {
            return Ok(RowTier::Host(Arc::new(HostCache::new(0, format))));
        }
        let (slots, row_bytes) = (packed.packing().slots, format.row_bytes() as u64);
        job.progress.stage("load cached rows", Some(slots * row_bytes), Unit::Bytes);
        let tier = match self.device.cache(&format.stored_rows(), slots, job.device_cache_bytes)? {
            Some(cache) => {
                let mut failed = None;
                job.load_rows(packed, |first, stored| {
                    failed = failed.take().or(cache.fill(first, stored).err())
                })?;
                failed.map_or(Ok(RowTier::Device(cache)), |error| Err(error.into()))
            }
            None => {
                let mut cache = HostCache::new(slots, format);
                job.load_rows(packed, |first, stored| cache.fill(first, stored))?;
                Ok(RowTier::Host(Arc::new(cache)))
            }
        };
        job.progress.finish();
        tier
    }
}

impl Job {
    /// Passes the rows set aside for memory on, with progress. Ends soon after a stop is requested.
    fn load_rows(&self, packed: &Packed, mut fill: impl FnMut(u64, &[u8]) + Send) -> Result<()> {
        let (stop, progress) = (&self.stop, &self.progress);
        Ok(self.pool.install(|| {
            packed.cached_rows(|first, stored| {
                if stop.is_asked() {
                    return Err(FetchError::Stopped);
                }
                fill(first, stored);
                progress.advance(stored.len() as u64);
                Ok(())
            })
        })?)
    }
}

impl<D: Device> Strategy<D> for DiskGnn<D> {
    fn needs(&self, job: &JobOutline) -> Result<Needs> {
        needs(job)
    }

    fn prepare(&mut self, job: &Job) -> Result<Prepared> {
        let (started, reads) = (Instant::now(), Reads::open(job)?);
        // An inference-only job has no training batches.
        if job.largest_batch == 0 {
            let tier = RowTier::Host(Arc::new(HostCache::new(0, reads.rows.format())));
            let training = Training::default();
            job.topology.take_lent();
            self.opened = Some(Opened { reads, packed: None, training, tier, epochs: 1 });
            return Ok(Prepared::default());
        }
        let format = reads.rows.format();
        let device_slots = match self.device.in_host_memory() {
            true => 0,
            false => format.stored_rows().rows_in(job.device_cache_bytes),
        };
        let sizes = Sizes::new(job, device_slots * format.row_bytes() as u64)?;
        if !sizes.neighbours.all {
            job.topology.take_lent();
        }
        let (packed, hottest) = match job.dataset.manifest().id_dtype() {
            Dtype::U64 => prepare::prepare::<u64>(job, &sizes, &reads)?,
            _ => prepare::prepare::<u32>(job, &sizes, &reads)?,
        };
        let packed = Arc::new(packed);
        // Rows may have been packed before, and then nothing was sampled.
        job.topology.take_lent();
        let phases = match job.dataset.manifest().id_dtype() {
            Dtype::U64 => evaluation::prepare::<u64>(job, &sizes, &reads, packed.clone(), hottest)?,
            _ => evaluation::prepare::<u32>(job, &sizes, &reads, packed.clone(), hottest)?,
        };
        let evaluations: Vec<&Packing> = phases.evaluations().iter().map(|packed| packed.packing()).collect();
        let training = sizes.training(job, packed.packing(), &evaluations)?;
        // Preparing takes turns with what follows.
        esker_io::trim_freed_memory();
        let tier = self.load(job, &packed, &reads)?;
        let seconds = started.elapsed().as_secs_f64();
        let epochs = job.epochs_sampled.unwrap_or(job.epochs).min(packed.packing().epochs).max(1);
        let on_disk = serde_json::json!({
            "directory": packed.directory(), "seconds": seconds, "disk_bytes": packed.disk_bytes(),
            "packing": packed.packing(),
        });
        let opened = Opened { reads, packed: Some(phases.clone()), training, tier, epochs };
        let notes = opened.notes(&packed);
        self.opened = Some(opened);
        Ok(Prepared { epochs_sampled: Some(epochs), on_disk: Some(on_disk), notes, ..Prepared::default() })
    }

    fn batches(
        &mut self,
        job: &Job,
        from: RunPosition,
        _: Option<&mut dyn CheckpointReader>,
    ) -> Result<Box<dyn BatchSource<D>>> {
        let opened = self.opened();
        let training = PackedRun::open(opened, job, Phases::<D>::first_of(from), &self.device)?;
        Ok(Box::new(Phases::new(job, from, Box::new(training), opened.reads.on(&self.device))))
    }

    fn inference(
        &mut self,
        job: &Job,
        over: &Inference,
        _: Option<&mut dyn CheckpointReader>,
    ) -> Result<Box<dyn BatchSource<D>>> {
        Ok(Box::new(Phases::alone(job, over, self.opened().reads.on(&self.device))?))
    }
}

impl<D: Device> Opened<D> {
    /// How memory and disk are used, as readable text.
    fn notes(&self, packed: &Packed) -> Vec<String> {
        let packing = packed.packing();
        let share = |part: u64, all: u64| part as f64 / all.max(1) as f64 * 100.0;
        let hits = share(packing.accesses - packing.misses, packing.accesses);
        let depth = match &self.tier {
            RowTier::Host(_) => String::new(),
            RowTier::Device(cache) => format!(", {} of them on the GPU", grouped(cache.device_slots())),
        };
        let layout = match packing.segment {
            _ if packing.misses == 0 => "nothing is read from disk".to_string(),
            1 => "all others packed batch by batch".to_string(),
            segment => format!(
                "of the others {:.0}% in caches of {segment} batches, the rest packed batch by batch",
                share(packing.shared, packing.misses)
            ),
        };
        let mut notes = vec![
            format!(
                "{} of {} sampled and packed, {} on disk: {}",
                counted(packing.batches, "batch", "batches"),
                counted(packing.epochs, "epoch", "epochs"),
                ByteCount(packed.disk_bytes()),
                packed.directory().display()
            ),
            format!(
                "{} rows in memory{depth}: {hits:.1}% of the rows that batches access; {layout}",
                grouped(packing.slots)
            ),
            format!(
                "{} read at a time; files are read by {}",
                counted(self.training.workers as u64, "batch", "batches"),
                packed.io_backend()
            ),
        ];
        let evaluations = self.packed.as_ref().map_or(&[][..], PackedPhases::evaluations);
        if !evaluations.is_empty() {
            let (batches, bytes) = evaluations.iter().fold((0, 0), |(batches, bytes), packed| {
                (batches + packed.packing().batches, bytes + packed.disk_bytes())
            });
            let batches = counted(batches, "batch", "batches");
            notes.push(format!("{batches} of evaluation packed as well, {} on disk", ByteCount(bytes)));
        }
        notes
    }
}
