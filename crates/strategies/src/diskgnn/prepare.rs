//! What comes before training: sample some epochs, lay their rows out, pack them. Done once; found again while nothing that
//! shapes it has changed.

use super::sizes::Sizes;
use crate::direct::Reads;
use crate::lists::{Lists, Loaded};
use crate::{Job, Result, StrategyError};
use esker_fetch::packed::{Largest, PackSizes, PackWriter, Packed, Packing, Room};
use esker_fetch::{FetchError, StoredRow};
use esker_sample::bulk::{Bulk, positions};
use esker_sample::{Position, SampleError, Topology, Word};
use esker_types::{ByteCount, Unit};
use std::path::PathBuf;

/// Digits of the name of a directory that tell it from those of other batches.
const NAME_DIGITS: usize = 12;

/// Finds packed rows that suit the job, or makes them.
pub(super) fn prepare<W: Word + StoredRow>(job: &Job, sizes: &Sizes, reads: &Reads) -> Result<Packed> {
    let directory = directory(job);
    if let Some(found) = Packed::open(&job.dataset, &directory)? {
        if suits(job, sizes, &found) {
            return Ok(found);
        }
        if job.out_of_core.prepared.is_some() && found.packing().sampling != job.trace_header() {
            return Err(StrategyError::request(
                format!("{} holds packed rows of other batches than these", directory.display()),
                "give the flags they were made with, or another --prepared, or remove it",
            ));
        }
    }
    let request = format!("{:?} of {}", job.epochs_sampled, job.epochs);
    if let Some(writer) = PackWriter::begin::<W>(&job.dataset, &directory, job.trace_header(), &request)? {
        make::<W>(job, sizes, reads, writer)?;
    }
    Packed::open(&job.dataset, &directory)?.ok_or_else(|| {
        StrategyError::request(
            format!("{} does not open after it was made", directory.display()),
            "check the disk, remove it and prepare again",
        )
    })
}

/// Where packed rows of this job are.
fn directory(job: &Job) -> PathBuf {
    match &job.out_of_core.prepared {
        Some(directory) => directory.clone(),
        None => {
            let header = serde_json::to_value(job.trace_header()).unwrap_or_default();
            let hash = job.dataset.inputs_of("diskgnn", &header);
            job.dataset.derived_path(&format!("diskgnn-{}", &hash[..NAME_DIGITS]))
        }
    }
}

/// Whether packed rows are what this job would make, or as good.
fn suits(job: &Job, sizes: &Sizes, found: &Packed) -> bool {
    let (packing, asked) = (found.packing(), &job.out_of_core);
    // More epochs than are wanted serve as well; fewer only where the disk takes no more.
    let wanted = job.epochs_sampled.unwrap_or(job.epochs).min(job.epochs);
    let epochs = packing.epochs >= wanted || (job.epochs_sampled.is_none() && packing.limited_by_disk);
    let row_bytes = packing.row_bytes.max(1);
    let slots = match asked.feature_cache_bytes {
        Some(bytes) => packing.slots_asked == bytes / row_bytes,
        // Memory that would hold much more is worth packing again.
        None => sizes
            .slots(job, &packing.largest, packing.batches)
            .is_ok_and(|slots| packing.slots_asked >= slots / 4 * 3 || packing.misses == 0),
    };
    // Segments made for less disk are worth replacing.
    let disk = match asked.disk_bytes_said {
        true if packing.segment == 1 => found.disk_bytes() <= asked.disk_bytes,
        true => packing.disk_bytes_allowed == Some(asked.disk_bytes),
        false => true,
    };
    packing.sampling == job.trace_header()
        && epochs
        && slots
        && disk
        && asked.segment.is_none_or(|segment| segment == packing.segment)
        && sizes.training(job, packing).is_ok()
}

fn make<W: Word + StoredRow>(
    job: &Job,
    sizes: &Sizes,
    reads: &Reads,
    mut writer: PackWriter,
) -> Result<Packing> {
    let progress = &*job.progress;
    let most = job.epochs_sampled.unwrap_or(job.epochs).min(job.epochs).max(1);
    let mut epochs = writer.recall::<u64>("epochs");
    if !writer.is_sampled() {
        // Lists are cached beside what is made.
        let mut beside = job.clone();
        beside.out_of_core.scratch = writer.work();
        let lists = Lists::prepare::<W>(&beside, sizes.lists, reads.graph.clone())?;
        let lists = lists.load::<W>(job)?;
        if epochs.is_none() && job.epochs_sampled.is_none() && most > 1 {
            // As many epochs as the disk takes: the first says what one takes.
            sample::<W>(job, sizes, &lists, &mut writer, 1)?;
            epochs = Some(epochs_that_fit::<W>(job, sizes, &mut writer)?.clamp(1, most));
        }
        let epochs = *epochs.get_or_insert(most);
        writer.remember("epochs", &epochs)?;
        sample::<W>(job, sizes, &lists, &mut writer, epochs)?;
        drop(lists);
        writer.close_samples()?;
    }
    let epochs = epochs.unwrap_or(most);
    let batches = writer.batches();
    let slots = |largest: &Largest| {
        sizes.slots(job, largest, batches).map_err(|error| match error {
            StrategyError::Fetch(error) => error,
            other => FetchError::Request { problem: other.to_string() },
        })
    };
    let room = Room {
        slots: &slots,
        slots_said: job.out_of_core.feature_cache_bytes.is_some(),
        disk_bytes: job.out_of_core.disk_bytes,
        disk_bytes_said: job.out_of_core.disk_bytes_said,
        segment: job.out_of_core.segment,
        by_hash: true,
    };
    let pack = PackSizes { memory_bytes: sizes.phase_bytes, threads: job.threads.max(1) };
    Ok(writer.finish::<W>((epochs, epochs < most), &room, pack, &reads.pool, progress)?)
}

/// Samples batches up to the end of epoch `epochs - 1`, behind those that are there.
fn sample<W: Word + StoredRow>(
    job: &Job,
    sizes: &Sizes,
    lists: &Loaded<W>,
    writer: &mut PackWriter,
    epochs: u64,
) -> Result<()> {
    match lists {
        Loaded::Memory(graph) => sample_on::<W, _>(job, sizes, graph, writer, epochs),
        Loaded::Disk(graph) => sample_on::<W, _>(job, sizes, graph, writer, epochs),
    }
}

fn sample_on<W: StoredRow, T: Topology>(
    job: &Job,
    sizes: &Sizes,
    graph: &T,
    writer: &mut PackWriter,
    epochs: u64,
) -> Result<()> {
    let start = Position { epoch: 0, batch: 0 };
    let count: u64 = (0..epochs).map(|epoch| job.batches.count(epoch)).sum();
    let done = writer.batches().min(count);
    job.progress.stage("sample", Some(count), Unit::Count("batches"));
    job.progress.advance(done);
    let bulk = Bulk {
        graph,
        batches: &*job.batches,
        settings: &job.settings,
        threads: sizes.samplers,
        most_bytes: sizes.sampling_bytes,
    };
    // Positions are listed, not skipped: a later epoch starts where it starts.
    let all: Vec<Position> = positions(&*job.batches, start, epochs).skip(done as usize).collect();
    bulk.run(all.iter().copied(), |at, sample| {
        writer.append::<W>(at, sample)?;
        job.progress.advance(1);
        Ok::<(), Failed>(())
    })
    .map_err(|failed| failed.0)?;
    job.progress.finish();
    Ok(())
}

/// Why sampling ended.
struct Failed(StrategyError);

impl From<SampleError> for Failed {
    fn from(error: SampleError) -> Failed {
        Failed(error.into())
    }
}

impl From<FetchError> for Failed {
    fn from(error: FetchError) -> Failed {
        Failed(error.into())
    }
}

/// Epochs like the first that the disk takes with every batch's rows packed.
fn epochs_that_fit<W: StoredRow>(job: &Job, sizes: &Sizes, writer: &mut PackWriter) -> Result<u64> {
    // Whatever follows, what was sampled is kept.
    writer.make_safe()?;
    let slots = sizes.slots(job, &writer.largest(), writer.batches())?;
    let (cached, epoch) = writer.packed_bytes::<W>(slots)?;
    let left = job.out_of_core.disk_bytes.saturating_sub(cached);
    job.progress.note(&format!(
        "an epoch takes {} on disk, rows for memory {}; {} are allowed",
        ByteCount(epoch),
        ByteCount(cached),
        ByteCount(job.out_of_core.disk_bytes)
    ));
    Ok(left / epoch.max(1))
}
