//! Packing rows batch by batch, with separate reads per batch, against packing all batches in one pass over the
//! features (DiskGNN section 5.2 and Figure 17).

use super::Findings;
use super::batches::{BatchFlags, Misses, OpenedGraph, slots_of};
use anyhow::{Context, ensure};
use esker_fetch::packed::{
    PackLayout, PackSizes, PackWork, PackWriter, Packed, PackedBatch, SafePoints, SampleLog, Samples,
};
use esker_fetch::{AccessFile, DiskRows, StoredRow};
use esker_io::{AlignedBuffer, DIRECT_ALIGN, Options, SequentialWriter, Stream};
use esker_plan::{AccessTrace, Placement, Placements};
use esker_sample::{AnyTopology, InMemory, Position, Sample, StoredId};
use esker_store::{Dataset, PAYLOAD_OFFSET, file};
use esker_types::{ByteCount, NodeId, Recorded, StageTaken, StopSignal, grouped};
use serde_json::json;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Batches whose bytes are compared.
const COMPARED: u64 = 8;

/// Pack the rows of batches both ways: each batch with reads of its own, and all in one pass over the features
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask bench pack g                                          an epoch of batches, 10% of all rows in memory
  cargo xtask bench pack g --batches 100 --cache-percent 5 --scratch /fast/disk --json

Batches of the training seeds are sampled as training would; the rows accessed most are in memory, and all others are packed for each batch that wants them. Packed one by one, a batch's rows are read wherever they lie and written behind those of the batch before. Packed together, features are read once from front to back, as `esker prepare` does; that makes the rows for memory too, and checksums of everything. Sampling and counting come before either and are not part of the seconds. Some batches are compared byte by byte.

Both ways read past the page cache where the disk lets them, and end with everything safe on disk. Reading of the second is a pass over the features alone: while packing it happens beside the rest.")]
pub struct PackArguments {
    #[command(flatten)]
    batches: BatchFlags,
    /// Rows in memory, in percent of all rows
    #[arg(long, default_value_t = 10.0)]
    cache_percent: f64,
}

pub fn run(arguments: &PackArguments) -> anyhow::Result<Findings> {
    slots_of(arguments.cache_percent, 0, "--cache-percent")?;
    let OpenedGraph { dataset, graph, most_bytes } = arguments.batches.open()?;
    match graph {
        AnyTopology::Narrow(graph) => measure(arguments, &dataset, graph, most_bytes),
        AnyTopology::Wide(graph) => measure(arguments, &dataset, graph, most_bytes),
    }
}

/// Measurements of packing batch by batch.
struct Individual {
    seconds: f64,
    read_seconds: f64,
    reads: u64,
    read_bytes: u64,
    /// End of each batch in the file.
    ends: Vec<u64>,
}

/// Measurements of packing together.
struct Batched {
    seconds: f64,
    read_seconds: f64,
    packed: Arc<Packed>,
    stages: Vec<StageTaken>,
}

fn measure<W: StoredId + StoredRow>(
    arguments: &PackArguments,
    dataset: &Dataset,
    graph: InMemory<W>,
    most_bytes: u64,
) -> anyhow::Result<Findings> {
    let (asked, nodes) = (&arguments.batches, dataset.manifest().nodes.count);
    let slots = slots_of(arguments.cache_percent, nodes, "--cache-percent")?;
    let rows = Arc::new(DiskRows::open(dataset)?);
    let folder = tempfile::Builder::new().prefix("esker-work-").tempdir_in(asked.scratch())?;
    let directory = folder.path().join("packed");
    let header = asked.trace_header(dataset)?;
    let safe_points = SafePoints::default();
    let samples = folder.path().join("samples");
    let log = SampleLog::begin::<W>(dataset, &samples, header.clone(), None, safe_points.sample_bytes)?;
    let mut log = log.context("an empty folder holds samples")?;
    let writer = PackWriter::begin(dataset, &directory, header)?;
    let writer = writer.context("an empty folder holds packed rows")?;
    let mut accesses = AccessFile::<W>::create(folder.path())?;
    let mut positions = Vec::new();
    asked.sample(dataset, &graph, most_bytes, |at, sample| {
        positions.push(at);
        log.append::<W>(at, sample)?;
        Ok(accesses.append(&sample.node_ids, &[])?)
    })?;
    accesses.close();
    let samples = log.finish::<W>(u64::MAX)?;
    drop(graph);
    let misses = Misses::of(&accesses, nodes, slots, folder.path())?;
    let all = accesses.accesses();
    drop(accesses);
    // If rows go through the page cache after all, the second one gains from it, so the other method is second.
    let batched = pack_together::<W>(dataset, writer, &samples, &directory, slots, most_bytes)?;
    let path = folder.path().join("one-by-one");
    let individual = pack_one_by_one(&misses.rows, &rows, &path)?;
    let slots = batched.packed.packing().slots;
    ensure!(
        slots == misses.cached,
        "{slots} rows set aside, {} counted; this is a bug of esker",
        misses.cached
    );
    let compared = compare(&batched.packed, &positions, &individual.ends, &path)?;
    findings(arguments, &individual, &batched, (all, misses.rows.accesses(), compared))
}

/// For one batch after the other: reads its rows from their positions in the features and writes them.
fn pack_one_by_one<W: StoredRow>(
    mut misses: &AccessFile<W>,
    rows: &Arc<DiskRows>,
    path: &Path,
) -> anyhow::Result<Individual> {
    let (dim, row_bytes) = (rows.format().dim(), rows.format().row_bytes());
    let named = || path.display().to_string();
    let (mut accessed, mut nodes, mut values) = (Vec::new(), Vec::new(), Vec::new());
    let mut placements = Placements::default();
    let (mut read_seconds, mut ends) = (0.0, Vec::new());
    let started = Instant::now();
    let mut reader = rows.reader()?;
    let mut file = SequentialWriter::create(path).with_context(named)?;
    for batch in 0..misses.batches() {
        misses.read(batch, &mut accessed)?;
        nodes.clear();
        nodes.extend(accessed.iter().map(|row| NodeId(row.index() as u64)));
        placements.words.resize(nodes.len(), Placement::Read(0).encode());
        values.resize(nodes.len() * dim, 0f32);
        let reading = Instant::now();
        reader.read(&nodes, &placements, &mut values)?;
        read_seconds += reading.elapsed().as_secs_f64();
        // A stored row is at the start of its slot, which has space for it as f32.
        for row in values.chunks_exact(dim.max(1)) {
            file.write_all(&bytemuck::cast_slice(row)[..row_bytes]).with_context(named)?;
        }
        ends.push(file.position());
    }
    file.finish().with_context(named)?;
    let (seconds, counters) = (started.elapsed().as_secs_f64(), reader.counters());
    let (reads, read_bytes) = (counters.reads, counters.read_bytes);
    Ok(Individual { seconds, read_seconds, reads, read_bytes, ends })
}

/// Packs all batches as `esker prepare` does, without sharing rows between batches.
fn pack_together<W: StoredRow>(
    dataset: &Dataset,
    writer: PackWriter,
    samples: &Samples,
    directory: &Path,
    slots: u64,
    memory_bytes: u64,
) -> anyhow::Result<Batched> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
    let (progress, stop) = (Recorded::default(), StopSignal::default());
    let sizes =
        PackSizes { memory_bytes, threads, safe_points: SafePoints::default(), row_by_row: Some(false) };
    let work = PackWork { sizes, pool: &pool, stop: &stop, progress: &progress };
    let epochs = samples.sampled().epochs.len() as u64;
    let mut hottest = samples.count::<W>(epochs, dataset.manifest().nodes.count, &stop, &progress)?;
    let coverage = hottest.coverage().points().to_vec();
    hottest.choose(slots);
    let layout = PackLayout {
        epochs,
        limited_by_disk: false,
        slots_asked: slots,
        segment: 1,
        disk_bytes_allowed: None,
        by_hash: true,
        cached_by: None,
        coverage,
    };
    writer.lay_out::<W>(samples, &hottest, &layout, &work)?;
    writer.finish::<W>(samples, false, &work)?;
    let ended = Instant::now();
    let stages = progress.stages();
    let counted = stages.iter().position(|stage| stage.name == "count rows");
    let counted = counted.context("packing counts rows first")?;
    // All the time from there on, including the time between stages.
    let since = stages[counted].ended.context("counting has ended")?;
    let seconds = ended.duration_since(since).as_secs_f64();
    let packed = Packed::open(dataset, directory)?.context("packed rows do not open after they were made")?;
    Ok(Batched {
        seconds,
        read_seconds: read_features(dataset)?,
        packed: Arc::new(packed),
        stages: stages[counted + 1..].to_vec(),
    })
}

/// Seconds of a pass over the features.
fn read_features(dataset: &Dataset) -> anyhow::Result<f64> {
    let array = dataset.array(file::NODE_FEATURES).context("the features are not there")?;
    let bytes = array.entry().rows * array.entry().row_bytes();
    let started = Instant::now();
    let files = array.open_files(&Options::default())?;
    let mut stream = Stream::open(&files, 0, PAYLOAD_OFFSET..PAYLOAD_OFFSET + bytes, 2 << 20, 4)?;
    while stream.next_chunk()?.is_some() {}
    Ok(started.elapsed().as_secs_f64())
}

/// Compares the packed rows: the size of every batch, and every byte of some. Returns how many those are.
fn compare(packed: &Arc<Packed>, positions: &[Position], ends: &[u64], path: &Path) -> anyhow::Result<u64> {
    let named = || path.display().to_string();
    let (count, single) = (positions.len() as u64, File::open(path).with_context(named)?);
    let starts: Vec<u64> = std::iter::once(0).chain(ends.iter().copied()).collect();
    for (number, at) in positions.iter().enumerate() {
        let bytes = starts[number + 1] - starts[number];
        let found = packed.number(*at).map(|number| packed.planned_bytes(number));
        ensure!(
            found == Some(bytes),
            "epoch {}, batch {}: {bytes} bytes packed alone, {found:?} together; this is a bug of esker",
            at.epoch,
            at.batch
        );
    }
    let some: BTreeSet<u64> =
        (0..COMPARED).map(|part| part * count.saturating_sub(1) / (COMPARED - 1)).collect();
    let (mut reader, mut sample, mut batch) = (packed.reader()?, Sample::default(), PackedBatch::default());
    let mut rows = AlignedBuffer::new(packed.rows_bytes() as usize, DIRECT_ALIGN);
    let mut alone = Vec::new();
    for number in some.iter().map(|number| *number as usize).filter(|number| *number < positions.len()) {
        let at = positions[number];
        reader.load(at, &mut sample, &mut batch)?;
        reader.read(&batch, &mut rows)?;
        packed.check_rows(&batch, &mut rows)?;
        alone.resize((starts[number + 1] - starts[number]) as usize, 0);
        single.read_exact_at(&mut alone, starts[number]).with_context(named)?;
        let differs = first_difference(&alone, &rows);
        ensure!(
            differs.is_none(),
            "epoch {}, batch {}: rows packed alone and together differ from byte {} on; this is a bug of esker",
            at.epoch,
            at.batch,
            differs.unwrap_or(0)
        );
    }
    Ok(some.len().min(positions.len()) as u64)
}

/// The first byte of `expected` that differs from `found`.
fn first_difference(expected: &[u8], found: &[u8]) -> Option<usize> {
    (0..expected.len()).find(|at| found.get(*at) != Some(&expected[*at]))
}

fn findings(
    arguments: &PackArguments,
    individual: &Individual,
    batched: &Batched,
    (accesses, misses, compared): (u64, u64, u64),
) -> anyhow::Result<Findings> {
    let (asked, packing) = (&arguments.batches, batched.packed.packing());
    let speedup = individual.seconds / batched.seconds.max(1e-9);
    let bytes = individual.ends.last().copied().unwrap_or(0);
    let feature_bytes = packing.sampling.nodes * packing.row_bytes;
    let stages: Vec<_> = batched
        .stages
        .iter()
        .map(|stage| {
            let (name, unit) = (&stage.name, stage.unit.name());
            json!({ "name": name, "seconds": stage.seconds(), "amount": stage.amount, "unit": unit })
        })
        .collect();
    let json = json!({
        "dataset": asked.dataset, "nodes": packing.sampling.nodes, "fanout": asked.fanout,
        "batch": asked.batch, "batches": packing.batches, "accesses": accesses,
        "cache_percent": arguments.cache_percent, "slots": packing.slots, "misses": misses,
        "row_bytes": packing.row_bytes, "packed_bytes": bytes, "feature_bytes": feature_bytes,
        "individual": {
            "seconds": individual.seconds, "read_seconds": individual.read_seconds,
            "reads": individual.reads, "read_bytes": individual.read_bytes, "written_bytes": bytes,
        },
        "batched": {
            "seconds": batched.seconds, "read_seconds": batched.read_seconds,
            "written_bytes": bytes + packing.slots * packing.row_bytes, "stages": stages,
        },
        "speedup": speedup, "batches_compared": compared,
    });
    let mut text = format!(
        "{}: {} batches with {} rows on disk, {} to pack; {} batches compared byte by byte\n",
        asked.dataset.display(),
        grouped(packing.batches),
        grouped(misses),
        ByteCount(bytes),
        compared
    );
    let mut line = |name: &str, value: String| text += &format!("  {name:14}  {value}\n");
    line(
        "one by one",
        format!(
            "{:.2} s, {:.2} s of them reading {} in {} reads",
            individual.seconds,
            individual.read_seconds,
            ByteCount(individual.read_bytes),
            grouped(individual.reads)
        ),
    );
    line(
        "together",
        format!(
            "{:.2} s; a pass over {} of features alone {:.2} s",
            batched.seconds,
            ByteCount(feature_bytes),
            batched.read_seconds
        ),
    );
    for stage in &batched.stages {
        line(&format!("  {}", stage.name), format!("{:.2} s", stage.seconds()));
    }
    line("speedup", format!("{speedup:.1}x"));
    Ok(Findings { json, text })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_that_differs_or_is_not_there_is_found() {
        assert_eq!(first_difference(&[1, 2, 3], &[1, 2, 3, 9]), None);
        assert_eq!(first_difference(&[1, 2, 3], &[1, 0, 3]), Some(1));
        assert_eq!(first_difference(&[1, 2, 3], &[1, 2]), Some(2));
    }
}
