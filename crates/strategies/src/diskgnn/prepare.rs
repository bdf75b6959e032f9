//! Work before training: sample some epochs, lay out their rows, pack them. It is done once. The result is used again
//! as long as it is about as good as what would be packed now.

use super::home::{DiskShare, Home, touch};
use super::sampling::{most_epochs, samples};
use super::sizes::{MissBound, Sizes};
use crate::direct::Reads;
use crate::{Job, OutOfCore, Result, StrategyError};
use esker_fetch::packed::{
    PackLayout, PackSizes, PackWork, PackWriter, Packed, PackedBytes, Packing, Samples,
};
use esker_fetch::{FetchError, StoredRow};
use esker_plan::{Coverage, Hottest, PackedLayout, PackedRequest, choose_segment, is_worth_packing_again};
use esker_sample::StoredId;
use esker_store::{BlockArray, StoreError};
use esker_types::{ByteCount, Unit, grouped};

/// Finds packed rows that the job can use, or makes them. If they were made now, and memory has room, evaluations also
/// get the slots of cached rows.
pub(super) fn prepare<W: StoredId + StoredRow>(
    job: &Job,
    sizes: &Sizes,
    reads: &Reads,
) -> Result<(Packed, Option<Hottest>)> {
    let home = Home::of(job)?;
    find_or_make::<W>(job, sizes, reads, &home).map_err(|error| home.explain(error))
}

fn find_or_make<W: StoredId + StoredRow>(
    job: &Job,
    sizes: &Sizes,
    reads: &Reads,
    home: &Home,
) -> Result<(Packed, Option<Hottest>)> {
    loop {
        match find(job, sizes, home)? {
            Found::Usable(packed) => {
                touch(packed.directory());
                return Ok((*packed, None));
            }
            Found::Not(Some(reason)) => job.progress.note(&format!("{reason}: packing again")),
            Found::Not(None) => {}
        }
        let directory = home.next(job)?;
        // An earlier process had finished everything but the rename, so it may be usable now.
        let Some(writer) = PackWriter::begin(&job.dataset, &directory, job.trace_header())? else { continue };
        let hottest = make::<W>(job, sizes, reads, home, writer)?;
        let packed = Packed::open(&job.dataset, &directory)?.ok_or_else(|| {
            StoreError::inconsistent(&directory, "packed rows that were just made", "none that open")
        });
        return Ok((packed?, hottest));
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
    if !usable.is_empty() {
        // Nothing is sampled.
        job.topology.take_lent();
    }
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
    if let Some(reason) = other_segments(asked, packing, disk_bytes) {
        return Some(reason);
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
    // This memory, and batches too uneven for the narrower bound: it would be packed like this again.
    if sizes.slots(job, &packing.largest, packing.batches, MissBound::All).ok()? == packing.slots_asked {
        return None;
    }
    let coverage = Coverage::from_points(&packing.coverage);
    // If its batches are too uneven for the narrower bound, new ones would be, too.
    let narrow = Some(MissBound::ByCoverage(&coverage)).filter(|bound| bound.holds(packing));
    let bound = narrow.unwrap_or(MissBound::All);
    let slots = sizes.slots(job, &packing.largest, packing.batches, bound).ok()?;
    let anew = coverage.misses(slots);
    is_worth_packing_again(packing.misses, anew, packing.accesses).then(|| {
        let fewer = 100.0 - anew as f64 / packing.misses.max(1) as f64 * 100.0;
        format!(
            "cache {} rows; this memory has room for {} and would read {fewer:.0}% fewer",
            grouped(packing.slots),
            grouped(slots)
        )
    })
}

/// Why segments of packed rows are not those of an explicit disk budget. `None` if they are, or there is no such budget.
fn other_segments(asked: &OutOfCore, packing: &Packing, disk_bytes: u64) -> Option<String> {
    // Segments made for less disk are worth replacing.
    let fits = match packing.segment {
        1 => disk_bytes <= asked.disk_bytes,
        _ => packing.disk_bytes_allowed == Some(asked.disk_bytes),
    };
    (asked.disk_bytes_explicit && !fits).then(|| {
        let (taken, allowed) = (ByteCount(disk_bytes), ByteCount(asked.disk_bytes));
        format!("take {taken} in segments of {}, and --disk-budget is {allowed}", packing.segment)
    })
}

/// Batches per segment, if the number is requested.
fn segment_of(asked: u32, batches: u64) -> u32 {
    asked.clamp(1, batches.clamp(1, u32::MAX as u64) as u32)
}

/// Memory, threads and control of packing, beside the slots of cached rows if these are kept.
pub(super) fn work<'a>(
    job: &'a Job,
    sizes: &Sizes,
    reads: &'a Reads,
    kept: Option<&Hottest>,
) -> PackWork<'a> {
    let kept_bytes = kept.map_or(0, |hottest| Hottest::bytes_for(hottest.slots().len() as u64));
    PackWork {
        sizes: PackSizes {
            memory_bytes: sizes.preparing_bytes.saturating_sub(kept_bytes),
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
) -> Result<Option<Hottest>> {
    let (samples, epochs) = samples::<W>(job, sizes, reads, home, &writer.work())?;
    // Samples of an earlier process need no topology.
    job.topology.take_lent();
    let making = Making { job, sizes, home, samples: &samples, epochs };
    let hottest = making.lay_out::<W>(&writer, &work(job, sizes, reads, None))?;
    let hottest = hottest.filter(|_| making.keeps_slots(&writer).unwrap_or(false));
    writer.finish::<W>(&samples, home.is_alone(), &work(job, sizes, reads, hottest.as_ref()))?;
    Ok(hottest)
}

/// Samples whose rows are packed.
struct Making<'a> {
    job: &'a Job,
    sizes: &'a Sizes,
    home: &'a Home,
    samples: &'a Samples,
    epochs: u64,
}

impl Making<'_> {
    /// Lays rows out, unless an earlier process did. How many rows are cached depends on how many the largest batch
    /// reads, and that is known when they are laid out: first it is expected by the misses of all batches. If a batch
    /// reads more than memory has room for, rows are laid out again for the worst case. Returns the slots of cached rows
    /// if they were chosen now.
    fn lay_out<W: StoredId + StoredRow>(
        &self,
        writer: &PackWriter,
        work: &PackWork,
    ) -> Result<Option<Hottest>> {
        let Making { job, sizes, samples, .. } = self;
        if let Some(laid) = writer.laid() {
            let coverage = Coverage::from_points(&laid.coverage);
            let requests =
                [MissBound::ByCoverage(&coverage), MissBound::All].map(|bound| self.request(bound));
            if requests.iter().flatten().any(|request| self.goes_on(&laid, request)) && self.fits(writer)? {
                return Ok(None);
            }
        }
        let rows = job.dataset.manifest().nodes.count;
        let mut narrow = true;
        loop {
            let count = || samples.count::<W>(self.epochs, rows, &job.stop, &*job.progress);
            let mut hottest = job.pool.install(count)?;
            job.progress.stage("rank rows", Some(rows), Unit::Count("rows"));
            let coverage = hottest.coverage();
            let bound = if narrow { MissBound::ByCoverage(&coverage) } else { MissBound::All };
            let request = self.request(bound)?;
            hottest.choose(request.slots);
            job.progress.advance(rows);
            job.progress.finish();
            let layout = PackLayout {
                epochs: self.epochs,
                limited_by_disk: self.epochs < most_epochs(job),
                slots_asked: request.slots,
                segment: segment::<W>(job, sizes, self.home, samples, self.epochs, &hottest, &request)?,
                disk_bytes_allowed: request.disk_bytes_allowed,
                by_hash: true,
                coverage: coverage.points().to_vec(),
                cached_by: None,
            };
            writer.lay_out::<W>(samples, &hottest, &layout, work)?;
            if !narrow || self.fits(writer)? {
                return Ok(Some(hottest));
            }
            narrow = false;
        }
    }

    /// Whether the slots of cached rows can stay in memory while rows are packed, and evaluations use them.
    fn keeps_slots(&self, writer: &PackWriter) -> Result<bool> {
        let schedule = &self.job.schedule;
        let evaluations = [&schedule.validation, &schedule.last_validation, &schedule.test];
        let uses_them = evaluations.into_iter().flatten().any(|over| over.rows);
        let Some(packing) = writer.laid_packing(self.samples)?.filter(|_| uses_them) else {
            return Ok(false);
        };
        let rows = packing.misses.saturating_add(packing.slots);
        let padding = packing.batches.saturating_add(1).saturating_mul(2 * BlockArray::BLOCK_BYTES);
        let packed_bytes = rows.saturating_mul(packing.row_bytes).saturating_add(padding);
        let sampled = self.samples.of_epochs(self.epochs);
        let kept_bytes = Hottest::bytes_for(self.job.dataset.manifest().nodes.count);
        Ok(self.sizes.beside(kept_bytes).check_packing(self.job, &sampled, packed_bytes).is_ok())
    }

    /// What is requested of packed rows.
    fn request(&self, bound: MissBound<'_>) -> Result<PackedRequest> {
        let (asked, sampled) = (&self.job.out_of_core, self.samples.of_epochs(self.epochs));
        Ok(PackedRequest {
            slots: self.sizes.slots(self.job, &sampled.largest, sampled.batches, bound)?,
            slots_explicit: asked.feature_cache_bytes.is_some(),
            segment: asked.segment.map(|segment| segment_of(segment, sampled.batches)),
            disk_bytes_allowed: asked.disk_bytes_explicit.then_some(asked.disk_bytes),
        })
    }

    /// Whether unfinished work can be resumed.
    fn goes_on(&self, laid: &PackLayout, request: &PackedRequest) -> bool {
        let PackLayout { epochs, slots_asked, segment, disk_bytes_allowed, .. } = *laid;
        epochs == self.epochs
            && PackedLayout { slots_asked, segment, disk_bytes_allowed }.is_compatible(request)
    }

    /// Whether training has memory for the batches that are laid out.
    fn fits(&self, writer: &PackWriter) -> Result<bool> {
        let packing = writer.laid_packing(self.samples)?;
        Ok(packing.is_some_and(|packing| self.sizes.training(self.job, &packing, &[]).is_ok()))
    }
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
