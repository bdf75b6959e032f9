//! Packs the rows of evaluations. Their batches are the same every time, so they are sampled once, and their rows are
//! packed beside those of training. The rows that training caches serve them as well.

use super::home::{Home, bytes_of, is_read_only};
use super::prepare::work;
use super::sampling::samples;
use super::sizes::Sizes;
use crate::direct::Reads;
use crate::{EvaluationSchedule, Inference, Job, KnownSizes, Phase, Result};
use esker_fetch::packed::{PackLayout, PackWriter, Packed, PackedBytes, Packing, Samples};
use esker_fetch::{FetchError, StoredRow};
use esker_plan::Hottest;
use esker_sample::StoredId;
use esker_store::StoreError;
use esker_types::{ByteCount, ErrorKind};
use std::path::Path;
use std::sync::Arc;

/// The packed rows of all phases of a run.
#[derive(Clone)]
pub(super) struct PackedPhases {
    /// Training first, then evaluations.
    all: Vec<Arc<Packed>>,
    validation: Option<usize>,
    last_validation: Option<usize>,
    test: Option<usize>,
    /// The epochs of the run. The validation after them is the last one.
    epochs: u64,
}

impl PackedPhases {
    /// Training, and no evaluation.
    pub fn of_training(job: &Job, training: Arc<Packed>) -> PackedPhases {
        PackedPhases {
            all: vec![training],
            validation: None,
            last_validation: None,
            test: None,
            epochs: job.epochs,
        }
    }

    /// Training first, then evaluations.
    pub fn all(&self) -> &[Arc<Packed>] {
        &self.all
    }

    /// Those of evaluations.
    pub fn evaluations(&self) -> &[Arc<Packed>] {
        &self.all[1..]
    }

    /// The index of a phase in [`PackedPhases::all`]. A phase without packed rows is a bug.
    pub fn index(&self, phase: Phase) -> usize {
        let index = match phase {
            Phase::Train { .. } => Some(0),
            Phase::Validation { epoch } if epoch == self.epochs => self.last_validation,
            Phase::Validation { .. } => self.validation,
            Phase::Test => self.test,
        };
        index.expect("evaluations are packed before their batches are requested")
    }

    /// Whether every evaluation of a schedule has packed rows.
    pub fn evaluates(&self, schedule: &EvaluationSchedule) -> bool {
        let packed = |over: &Option<Inference>, index: Option<usize>| over.is_none() || index.is_some();
        packed(&schedule.validation, self.validation)
            && packed(&schedule.last_validation, self.last_validation)
            && packed(&schedule.test, self.test)
    }
}

/// Finds or makes the packed rows of a job's evaluations. If they do not fit memory or disk, or cannot be written, none
/// are used: evaluation then reads rows one by one, and a note says so.
pub(super) fn prepare<W: StoredId + StoredRow>(
    job: &Job,
    sizes: &Sizes,
    reads: &Reads,
    training: Arc<Packed>,
    hottest: Option<Hottest>,
) -> Result<PackedPhases> {
    let preparation = Preparation { job, sizes, reads, training: training.clone(), hottest };
    match preparation.all::<W>() {
        Err(error) if error.kind() == ErrorKind::Asked || is_read_only(&error) => {
            job.progress.note(&format!("evaluation reads rows one by one: {error}"));
            Ok(PackedPhases::of_training(job, training))
        }
        phases => phases,
    }
}

/// An evaluation as a job: one epoch of its batches. It may use the disk space that others leave, who take `taken` bytes.
pub(crate) fn job_over(job: &Job, over: &Inference, taken: u64) -> Job {
    let mut job = job.clone();
    job.batches = over.batches.clone();
    job.schedule = EvaluationSchedule::default();
    let outline = &mut job.outline;
    outline.largest_batch = over.largest_batch;
    outline.settings = over.settings.clone();
    (outline.epochs, outline.epochs_sampled) = (1, Some(1));
    outline.epoch_batches = over.batches.count(0);
    outline.evaluation = None;
    let known = outline.known.take();
    outline.known = known.map(|known| KnownSizes { training: known.evaluation, evaluation: None });
    let out_of_core = &mut outline.out_of_core;
    (out_of_core.segment, out_of_core.feature_cache_bytes) = (None, None);
    if out_of_core.disk_bytes_explicit {
        out_of_core.disk_bytes = out_of_core.disk_bytes.saturating_sub(taken);
    }
    job
}

struct Preparation<'a> {
    job: &'a Job,
    sizes: &'a Sizes,
    reads: &'a Reads,
    training: Arc<Packed>,
    /// Slots of the rows that training caches, once they are needed.
    hottest: Option<Hottest>,
}

impl Preparation<'_> {
    fn all<W: StoredId + StoredRow>(mut self) -> Result<PackedPhases> {
        let mut phases = PackedPhases::of_training(self.job, self.training.clone());
        let EvaluationSchedule { validation, last_validation, test, .. } = &self.job.schedule;
        phases.validation = self.add::<W>(&mut phases.all, validation)?;
        phases.last_validation = self.add::<W>(&mut phases.all, last_validation)?;
        phases.test = self.add::<W>(&mut phases.all, test)?;
        let packings: Vec<&Packing> = phases.evaluations().iter().map(|packed| packed.packing()).collect();
        self.sizes.training(self.job, self.training.packing(), &packings)?;
        Ok(phases)
    }

    /// Adds the packed rows of an evaluation, unless they are there. Returns their index.
    fn add<W: StoredId + StoredRow>(
        &mut self,
        all: &mut Vec<Arc<Packed>>,
        over: &Option<Inference>,
    ) -> Result<Option<usize>> {
        let Some(over) = over.as_ref().filter(|over| over.rows) else { return Ok(None) };
        let job = self.job_of(over);
        let header = job.trace_header();
        let found = all.iter().skip(1).position(|packed| packed.packing().sampling == header);
        if let Some(index) = found {
            return Ok(Some(index + 1));
        }
        let home = Home::inside(self.training.directory(), &job);
        all.push(Arc::new(self.packed::<W>(&job, &home)?));
        Ok(Some(all.len() - 1))
    }

    /// The evaluation as a job: one epoch of its batches. It may use the disk space that training leaves.
    fn job_of(&self, over: &Inference) -> Job {
        job_over(self.job, over, bytes_of(self.training.directory()))
    }

    /// Finds or makes the packed rows of one evaluation.
    fn packed<W: StoredId + StoredRow>(&mut self, job: &Job, home: &Home) -> Result<Packed> {
        let directory = home.next(job)?;
        let cached_by = self.cache_name();
        loop {
            let found = Packed::open(&job.dataset, &directory)?.filter(|found| {
                let packing = found.packing();
                packing.sampling == job.trace_header() && packing.cached_by.as_ref() == Some(&cached_by)
            });
            if let Some(found) = found {
                return Ok(found);
            }
            // `None`: an earlier process had finished them except for the name.
            if let Some(writer) = PackWriter::begin(&job.dataset, &directory, job.trace_header())? {
                self.make::<W>(job, home, writer, &cached_by)?;
                return Packed::open(&job.dataset, &directory)?.ok_or_else(|| {
                    let expected = "packed rows that were just made";
                    StoreError::inconsistent(&directory, expected, "none that open").into()
                });
            }
        }
    }

    /// Identifies the cached rows of training.
    fn cache_name(&self) -> String {
        let packing = self.training.packing();
        let header = serde_json::json!([packing.sampling, packing.epochs, packing.slots]);
        self.job.dataset.inputs_of("diskgnn-cache", &header)
    }

    fn make<W: StoredId + StoredRow>(
        &mut self,
        job: &Job,
        home: &Home,
        writer: PackWriter,
        cached_by: &str,
    ) -> Result<()> {
        // Sampling has memory for them only if the disk determines the number of epochs (`least_sampling`).
        if self.job.epochs_sampled.is_some() || self.job.epochs <= 1 {
            self.hottest = None;
        }
        let (samples, epochs) = samples::<W>(job, self.sizes, self.reads, home, &writer.work())?;
        let sampled = samples.of_epochs(epochs);
        // At worst no row is cached.
        let needed = PackedBytes::of::<W>(samples.disk_bytes(), &sampled, &Hottest::new(0), job.row_bytes())
            .needs()
            .bytes(sampled.accesses);
        let allowed = job.out_of_core.disk_bytes;
        if needed > allowed {
            let (needed, allowed) = (ByteCount(needed), ByteCount(allowed));
            return Err(FetchError::Disk { needed, allowed }.into());
        }
        self.sizes.check_packing(job, &sampled, needed)?;
        let layout = PackLayout {
            epochs,
            limited_by_disk: false,
            slots_asked: self.training.packing().slots_asked,
            segment: 1,
            disk_bytes_allowed: None,
            by_hash: true,
            coverage: Vec::new(),
            cached_by: Some(cached_by.to_string()),
        };
        if writer.laid().as_ref() != Some(&layout) {
            let (sizes, reads) = (self.sizes, self.reads);
            writer.lay_out::<W>(&samples, self.hottest::<W>()?, &layout, &work(job, sizes, reads, None))?;
        }
        // Kept for the next evaluation, unless packing needs the memory.
        let kept_bytes = Hottest::bytes_for(job.dataset.manifest().nodes.count);
        if self.sizes.beside(kept_bytes).check_packing(job, &sampled, needed).is_err() {
            self.hottest = None;
        }
        writer.finish::<W>(&samples, true, &work(job, self.sizes, self.reads, self.hottest.as_ref()))?;
        Ok(())
    }

    /// Slots of the rows that training caches. They are chosen as they were when training's rows were packed.
    fn hottest<W: StoredRow>(&mut self) -> Result<&Hottest> {
        if self.hottest.is_none() {
            let (job, packing) = (self.job, self.training.packing());
            let directory = self.training.directory();
            let beside = packing.samples.as_ref().map(|name| directory.with_file_name(name));
            let home: &Path = beside.as_deref().unwrap_or(directory);
            let samples = Samples::open(&job.dataset, home)?
                .ok_or_else(|| StoreError::Missing { path: home.to_path_buf() })?;
            let rows = job.dataset.manifest().nodes.count;
            let count = || samples.count::<W>(packing.epochs, rows, &job.stop, &*job.progress);
            let mut hottest = job.pool.install(count)?;
            hottest.choose(packing.slots);
            self.hottest = Some(hottest);
        }
        Ok(self.hottest.as_ref().expect("made above"))
    }
}
