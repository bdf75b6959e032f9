//! Work before training: sample some epochs, lay out their rows, pack them. It is done once. The result is used again
//! as long as it is about as good as what would be packed now.

use super::home::{DiskShare, Home, touch};
use super::sampling::{most_epochs, samples};
use super::sizes::Sizes;
use crate::direct::Reads;
use crate::{Job, Result, StrategyError};
use esker_fetch::packed::{
    PackLayout, PackSizes, PackWork, PackWriter, Packed, PackedBytes, Packing, Samples,
};
use esker_fetch::{FetchError, StoredRow};
use esker_plan::{Coverage, Hottest, PackedLayout, PackedRequest, choose_segment, is_worth_packing_again};
use esker_sample::StoredId;
use esker_store::StoreError;
use esker_types::{ByteCount, grouped};

/// Finds packed rows that the job can use, or makes them.
pub(super) fn prepare<W: StoredId + StoredRow>(job: &Job, sizes: &Sizes, reads: &Reads) -> Result<Packed> {
    let home = Home::of(job)?;
    find_or_make::<W>(job, sizes, reads, &home).map_err(|error| home.explain(error))
}

fn find_or_make<W: StoredId + StoredRow>(
    job: &Job,
    sizes: &Sizes,
    reads: &Reads,
    home: &Home,
) -> Result<Packed> {
    loop {
        match find(job, sizes, home)? {
            Found::Usable(packed) => {
                touch(packed.directory());
                return Ok(*packed);
            }
            Found::Not(Some(reason)) => job.progress.note(&format!("{reason}: packing again")),
            Found::Not(None) => {}
        }
        let directory = home.next(job)?;
        // An earlier process had finished everything but the rename, so it may be usable now.
        let Some(writer) = PackWriter::begin(&job.dataset, &directory, job.trace_header())? else { continue };
        make::<W>(job, sizes, reads, home, writer)?;
        return Packed::open(&job.dataset, &directory)?.ok_or_else(|| {
            StoreError::inconsistent(&directory, "packed rows that were just made", "none that open").into()
        });
    }
}

/// The result of searching packed rows.
enum Found {
    Usable(Box<Packed>),
    /// Why the closest match cannot be used, if there is one.
    Not(Option<String>),
}

/// Searches packed rows that can be used. Of several it takes those that miss least.
fn find(job: &Job, sizes: &Sizes, home: &Home) -> Result<Found> {
    let (mut usable, mut reason) = (Vec::new(), None);
    for directory in home.packed() {
        let Some((packing, disk_bytes)) = home.look(job, &directory)? else { continue };
        if packing.sampling != job.trace_header() {
            if home.is_alone() {
                return Err(StrategyError::OtherBatches { directory });
            }
            continue;
        }
        match why_not(job, sizes, &packing, disk_bytes) {
            Some(why) => reason = reason.or(Some(format!("packed rows in {} {why}", directory.display()))),
            None => usable.push((packing.misses, packing.segment, directory)),
        }
    }
    usable.sort();
    for (_, _, directory) in usable {
        if let Some(packed) = Packed::open(&job.dataset, &directory)? {
            return Ok(Found::Usable(Box::new(packed)));
        }
    }
    Ok(Found::Not(reason))
}

/// Why packed rows cannot be used for a job. `None` if they can.
fn why_not(job: &Job, sizes: &Sizes, packing: &Packing, disk_bytes: u64) -> Option<String> {
    let asked = &job.out_of_core;
    let most = most_epochs(job);
    // More epochs than requested can be used. Fewer can be used only if the disk has no room for more.
    if packing.epochs < most && !(job.epochs_sampled.is_none() && packing.limited_by_disk) {
        return Some(format!("have {} of {most} epochs", packing.epochs));
    }
    if let Some(segment) = asked.segment.map(|segment| segment_of(segment, packing.batches))
        && segment != packing.segment
    {
        return Some(format!(
            "have segments of {} batches, and --segment asks for {segment}",
            packing.segment
        ));
    }
    // Segments made for less disk are worth replacing.
    if asked.disk_bytes_explicit {
        let fits = match packing.segment {
            1 => disk_bytes <= asked.disk_bytes,
            _ => packing.disk_bytes_allowed == Some(asked.disk_bytes),
        };
        if !fits {
            let (taken, allowed) = (ByteCount(disk_bytes), ByteCount(asked.disk_bytes));
            return Some(format!(
                "take {taken} in segments of {}, and --disk-budget is {allowed}",
                packing.segment
            ));
        }
    }
    if let Some(bytes) = asked.feature_cache_bytes {
        let slots = bytes / packing.row_bytes.max(1);
        if packing.slots_asked != slots {
            let (there, slots) = (grouped(packing.slots_asked), grouped(slots));
            return Some(format!("cache {there} rows, and --feature-cache asks for {slots}"));
        }
    }
    if sizes.training(job, packing, &[]).is_err() {
        return Some(format!("cache {} rows, more than fit --memory", grouped(packing.slots)));
    }
    if asked.feature_cache_bytes.is_some() {
        return None;
    }
    let slots = sizes.slots(job, &packing.largest, packing.batches).ok()?;
    let anew = Coverage::from_points(&packing.coverage).misses(slots);
    is_worth_packing_again(packing.misses, anew, packing.accesses).then(|| {
        let fewer = 100.0 - anew as f64 / packing.misses.max(1) as f64 * 100.0;
        format!(
            "cache {} rows; this memory has room for {} and would read {fewer:.0}% fewer",
            grouped(packing.slots),
            grouped(slots)
        )
    })
}

/// Batches per segment, if the number is requested.
fn segment_of(asked: u32, batches: u64) -> u32 {
    asked.clamp(1, batches.clamp(1, u32::MAX as u64) as u32)
}

/// Memory, threads and control of packing.
pub(super) fn work<'a>(job: &'a Job, sizes: &Sizes, reads: &'a Reads) -> PackWork<'a> {
    PackWork {
        sizes: PackSizes {
            memory_bytes: sizes.preparing_bytes,
            threads: job.threads.max(1),
            safe_points: super::safe_points(job),
            row_by_row: None,
        },
        pool: &reads.pool,
        stop: &job.stop,
        progress: &*job.progress,
    }
}

/// Samples, lays out and packs.
fn make<W: StoredId + StoredRow>(
    job: &Job,
    sizes: &Sizes,
    reads: &Reads,
    home: &Home,
    writer: PackWriter,
) -> Result<()> {
    let (samples, epochs) = samples::<W>(job, sizes, reads, home, &writer.work())?;
    let work = work(job, sizes, reads);
    let sampled = samples.of_epochs(epochs);
    let asked = &job.out_of_core;
    let request = PackedRequest {
        slots: sizes.slots(job, &sampled.largest, sampled.batches)?,
        slots_explicit: asked.feature_cache_bytes.is_some(),
        segment: asked.segment.map(|segment| segment_of(segment, sampled.batches)),
        disk_bytes_allowed: asked.disk_bytes_explicit.then_some(asked.disk_bytes),
    };
    let goes_on = |laid: PackLayout| {
        let PackLayout { epochs: laid_epochs, slots_asked, segment, disk_bytes_allowed, .. } = laid;
        laid_epochs == epochs
            && PackedLayout { slots_asked, segment, disk_bytes_allowed }.is_compatible(&request)
    };
    if !writer.laid().is_some_and(goes_on) {
        let rows = job.dataset.manifest().nodes.count;
        let count = || samples.count::<W>(epochs, rows, &job.stop, &*job.progress);
        let mut hottest = job.pool.install(count)?;
        let coverage = hottest.coverage().points().to_vec();
        hottest.choose(request.slots);
        let segment = segment::<W>(job, sizes, home, &samples, epochs, &hottest, &request)?;
        let layout = PackLayout {
            epochs,
            limited_by_disk: epochs < most_epochs(job),
            slots_asked: request.slots,
            segment,
            disk_bytes_allowed: request.disk_bytes_allowed,
            by_hash: true,
            coverage,
            cached_by: None,
        };
        writer.lay_out::<W>(&samples, &hottest, &layout, &work)?;
    }
    writer.finish::<W>(&samples, home.is_alone(), &work)?;
    Ok(())
}

/// Batches per segment: the requested number, or the smallest that fits the disk. Makes room for the result.
fn segment<W: StoredRow>(
    job: &Job,
    sizes: &Sizes,
    home: &Home,
    samples: &Samples,
    epochs: u64,
    hottest: &Hottest,
    request: &PackedRequest,
) -> Result<u32> {
    let sampled = samples.of_epochs(epochs);
    let needs = PackedBytes::of::<W>(samples.disk_bytes(), &sampled, hottest, job.row_bytes()).needs();
    let mut disk = DiskShare::of(job, home, Some(samples));
    let too_little =
        |needed: u64| FetchError::Disk { needed: ByteCount(needed), allowed: ByteCount(disk.allowed) };
    let (segment, rows) = match request.segment {
        None if needs.bytes(hottest.misses()) <= disk.allowed => (1, hottest.misses()),
        Some(1) => (1, hottest.misses()),
        Some(segment) => {
            (segment, samples.stored_rows::<W>(epochs, hottest, segment, &job.stop, &*job.progress)?)
        }
        None => {
            let all = samples.segment_sizes::<W>(epochs, hottest, &job.stop, &*job.progress)?;
            let segment = choose_segment(&all, needs, disk.allowed).map_err(too_little)?;
            (segment, all.rows(segment))
        }
    };
    let needed = needs.bytes(rows);
    if needed > disk.allowed {
        return Err(too_little(needed).into());
    }
    sizes.check_packing(job, &sampled, needed)?;
    disk.make_room(needed)?;
    Ok(segment)
}
