//! Sampling and packing are interrupted at any moment, by a stop signal or like a kill, and resumed with other memory
//! and threads. The result must be the same byte for byte as that of an undisturbed run.

use super::*;
use crate::FetchError;
use esker_import::ImportJob;
use esker_import::generate::{GraphShape, generate};
use esker_sample::bulk::{Bulk, positions};
use esker_sample::order::{Batching, Shuffled};
use esker_sample::trace::TraceHeader;
use esker_sample::{
    Batches, Carry, Direction, Fanout, Form, InMemory, NodeBatches, Position, Sample, SampleError, Seeds,
    Settings,
};
use esker_store::Dataset;
use esker_types::random::{Key, mix};
use esker_types::{Budget, Dtype, NodeId, Progress, Silent, StopSignal, Unit};
use std::collections::BTreeMap;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

const NODES: u64 = 2000;
const EPOCHS: u64 = 2;

/// A graph, its batches and its sampling settings.
struct Given {
    dataset: Dataset,
    graph: InMemory<u32>,
    batches: Arc<dyn Batches>,
    settings: Settings,
}

impl Given {
    fn new(directory: &Path, dim: u64) -> Given {
        let shape = GraphShape { degree: 6.0, dim, dtype: Dtype::F32, ..GraphShape::plain(NODES) };
        let (target, budget) = (directory.join("g"), Budget { host_bytes: 64 << 20 });
        generate(&shape, &ImportJob { target: &target, budget, overwrite: false, progress: &Silent })
            .unwrap();
        let dataset = Dataset::open(&target).unwrap();
        let order = Shuffled { batching: Batching::new(500, 64, false).unwrap(), seed: 5 };
        let seeds = Seeds::Nodes((0..500).map(|node| NodeId(node * 3)).collect());
        let fanouts = vec![Fanout::AtMost(4), Fanout::AtMost(3)];
        Given {
            graph: InMemory::load(&dataset, Direction::Incoming).unwrap(),
            batches: Arc::new(NodeBatches::new(order, seeds).unwrap()),
            settings: Settings { seed: 5, fanouts, form: Form::Dense, carry: Carry::default() },
            dataset,
        }
    }

    fn header(&self) -> TraceHeader {
        let manifest = self.dataset.manifest();
        TraceHeader {
            dataset: manifest.id.clone(),
            nodes: manifest.nodes.count,
            edges: manifest.edges.count,
            relations: 0,
            direction: Direction::Incoming,
            batches: self.batches.identity(),
            settings: self.settings.clone(),
        }
    }

    /// Samples epochs after what is in the log. Ends after `most` batches, as a killed process does.
    fn sample(&self, log: &mut SampleLog, epochs: u64, most: u64) {
        let bulk = Bulk {
            graph: &self.graph,
            batches: &*self.batches,
            settings: &self.settings,
            threads: 1,
            most_bytes: 64 << 20,
        };
        let done = log.logged(u64::MAX).batches as usize;
        let all: Vec<Position> = positions(&*self.batches, Position { epoch: 0, batch: 0 }, epochs).collect();
        let some = all[done..].iter().copied().take(most as usize);
        let take = |at: Position, sample: &Sample| {
            log.append::<u32>(at, sample).unwrap();
            Ok::<(), SampleError>(())
        };
        bulk.run(some, take).unwrap();
    }

    fn samples(&self, directory: &Path) -> Samples {
        let log = SampleLog::begin::<u32>(&self.dataset, directory, self.header(), None, 1 << 20).unwrap();
        let mut log = log.unwrap();
        self.sample(&mut log, EPOCHS, u64::MAX);
        log.finish::<u32>(EPOCHS).unwrap()
    }

    /// Packs or resumes packing. The layout does not depend on memory or threads.
    fn pack(
        &self,
        samples: &Samples,
        directory: &Path,
        with: &With,
        progress: &dyn Progress,
    ) -> crate::Result<()> {
        let writer = PackWriter::begin(&self.dataset, directory, self.header())?;
        let Some(writer) = writer else { return Ok(()) };
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        let safe_points = SafePoints { sample_bytes: 1 << 20, packed_bytes: with.safe_bytes };
        let With { memory_bytes, threads, row_by_row, .. } = *with;
        let sizes = PackSizes { memory_bytes, threads, safe_points, row_by_row: Some(row_by_row) };
        let work = PackWork { sizes, pool: &pool, stop: &with.stop, progress };
        if writer.laid().is_none() {
            let mut hottest = samples.count::<u32>(EPOCHS, NODES, &with.stop, progress)?;
            let coverage = hottest.coverage().points().to_vec();
            hottest.choose(100);
            let layout = PackLayout {
                epochs: EPOCHS,
                limited_by_disk: false,
                slots_asked: 100,
                segment: 4,
                disk_bytes_allowed: None,
                by_hash: true,
                cached_by: None,
                coverage,
            };
            writer.lay_out::<u32>(samples, &hottest, &layout, &work)?;
        }
        writer.finish::<u32>(samples, false, &work).map(drop)
    }
}

/// The resources of a packing process.
struct With {
    memory_bytes: u64,
    threads: usize,
    safe_bytes: u64,
    stop: StopSignal,
    row_by_row: bool,
}

impl With {
    /// Enough memory for `parts` parts at a time.
    fn parts(parts: u64, threads: usize, safe_bytes: u64) -> With {
        let memory_bytes = pack::memory_for(threads as u64, parts);
        With { memory_bytes, threads, safe_bytes, stop: StopSignal::default(), row_by_row: false }
    }
}

/// Ends the work after a given amount: by a stop signal, or by a panic like a killed process.
struct Ends {
    left: AtomicI64,
    stop: Option<StopSignal>,
}

impl Progress for Ends {
    fn stage(&self, _: &str, _: Option<u64>, _: Unit) {}
    fn advance(&self, amount: u64) {
        if self.left.fetch_sub(amount as i64, Ordering::Relaxed) < amount as i64 {
            match &self.stop {
                Some(stop) => stop.ask(),
                None => panic!("gone"),
            }
        }
    }
    fn finish(&self) {}
    fn note(&self, _: &str) {}
}

/// Every byte of every file of a directory, by name.
fn content(directory: &Path) -> BTreeMap<String, Vec<u8>> {
    let files = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    files
        .map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), fs::read(&path).unwrap()))
        .collect()
}

#[test]
fn packing_ended_in_any_episode_goes_on_with_other_memory_and_threads_to_the_same_bytes() {
    let directory = tempfile::tempdir().unwrap();
    let given = Given::new(directory.path(), 300);
    let samples = given.samples(&directory.path().join("samples"));
    let at = |name: &str| directory.path().join(name);
    given.pack(&samples, &at("undisturbed"), &With::parts(1000, 2, 4 << 30), &Silent).unwrap();
    let expected = content(&at("undisturbed"));
    let bytes = expected["rows.bin"].len() as u64;
    let (mut stopped, mut killed, mut inside) = (0, 0, 0);
    for case in 0..6u64 {
        let key = Key::new(7).with(case);
        let random = |number: u64, most: u64| mix(key.at(number)) % most;
        let name = format!("case-{case}");
        for run in 0..8 {
            let mut with = With::parts(2 + random(run * 4, 8), 1 + random(run * 4 + 1, 3) as usize, 100_000);
            with.row_by_row = random(run * 4 + 3, 2) == 0;
            let asked = run % 2 == 0;
            let ends = Ends {
                left: AtomicI64::new(random(run * 4 + 2, bytes * 2) as i64),
                stop: asked.then(|| with.stop.clone()),
            };
            match catch_unwind(AssertUnwindSafe(|| given.pack(&samples, &at(&name), &with, &ends))) {
                Ok(Ok(())) => break,
                Ok(Err(FetchError::Stopped)) => stopped += 1,
                Ok(Err(error)) => panic!("case {case}, run {run}: {error}"),
                Err(panic) if panic.downcast_ref() == Some(&"gone") => killed += 1,
                Err(panic) => std::panic::resume_unwind(panic),
            }
            inside += u64::from(at(&format!("{name}.partial/work/packing")).exists());
        }
        let mut with = With::parts(2 + random(100, 16), 1 + random(101, 3) as usize, 1 << 20);
        with.row_by_row = case % 2 == 0;
        given.pack(&samples, &at(&name), &with, &Silent).unwrap();
        assert!(content(&at(&name)) == expected, "case {case}");
    }
    assert!(
        stopped > 2 && killed > 2 && inside > 3,
        "{stopped} stopped, {killed} killed, {inside} in an episode"
    );
}

#[test]
fn rows_read_one_by_one_are_packed_as_rows_read_in_order() {
    for dim in [3, 300, 5000] {
        let directory = tempfile::tempdir().unwrap();
        let given = Given::new(directory.path(), dim);
        let samples = given.samples(&directory.path().join("samples"));
        let packed = |name: &str, row_by_row: bool| {
            let (with, at) = (With::parts(1000, 2, 4 << 30), directory.path().join(name));
            given.pack(&samples, &at, &With { row_by_row, ..with }, &Silent).unwrap();
            content(&at)
        };
        assert!(packed("one by one", true) == packed("in order", false), "{dim} columns");
    }
}

/// Parts of caches are in order at once if memory has room for them, and are moved later if it has not.
#[test]
fn caches_are_the_same_whether_they_are_put_in_order_at_once_or_later() {
    let directory = tempfile::tempdir().unwrap();
    let given = Given::new(directory.path(), 300);
    let samples = given.samples(&directory.path().join("samples"));
    let at = |name: &str| directory.path().join(name);
    // Memory for the open blocks of all parts: one for the rows of memory, one per segment and one per batch.
    let parts = 1 + 4 + 16;
    let least = With::parts(parts, 2, 4 << 30).memory_bytes;
    let moved = Moved(AtomicI64::new(0));
    given.pack(&samples, &at("later"), &With::parts(parts, 2, 4 << 30), &moved).unwrap();
    let expected = content(&at("later"));
    let all_moved = moved.0.load(Ordering::Relaxed);
    assert!(all_moved > 0);
    let mut between = 0;
    for more in [100_000u64, 200_000, 400_000, 800_000, 64 << 20] {
        let name = format!("more-{more}");
        let with = |safe: u64| With { memory_bytes: least + more, ..With::parts(parts, 2, safe) };
        let moved = Moved(AtomicI64::new(0));
        given.pack(&samples, &at(&name), &with(4 << 30), &moved).unwrap();
        assert!(content(&at(&name)) == expected, "{more} bytes more");
        let moved = moved.0.load(Ordering::Relaxed);
        between += u64::from(moved > 0 && moved < all_moved);
        assert!(more < 64 << 20 || moved == 0, "{moved} bytes were moved");
        // Ended with this much, and finished with any.
        for (round, then) in [least, least + more, least + (64 << 20)].into_iter().enumerate() {
            let name = format!("{name}-{round}");
            let with = with(600_000);
            let ends = Ends { left: AtomicI64::new(400_000), stop: Some(with.stop.clone()) };
            assert!(matches!(given.pack(&samples, &at(&name), &with, &ends), Err(FetchError::Stopped)));
            assert!(at(&format!("{name}.partial/work/packing")).exists(), "it was to end inside an episode");
            let then = With { memory_bytes: then, ..With::parts(parts, 3, 4 << 30) };
            given.pack(&samples, &at(&name), &then, &Silent).unwrap();
            assert!(content(&at(&name)) == expected, "{name}");
        }
    }
    assert!(between > 0, "some parts were put in order at once, and others were moved");
}

/// Counts the bytes of rows that are moved.
struct Moved(AtomicI64);

impl Progress for Moved {
    fn stage(&self, name: &str, total: Option<u64>, _: Unit) {
        if name == "order caches" {
            self.0.store(total.unwrap_or(0) as i64, Ordering::Relaxed);
        }
    }
    fn advance(&self, _: u64) {}
    fn finish(&self) {}
    fn note(&self, _: &str) {}
}

#[test]
fn an_episode_that_was_begun_with_more_memory_or_less_is_finished() {
    let directory = tempfile::tempdir().unwrap();
    let given = Given::new(directory.path(), 300);
    let samples = given.samples(&directory.path().join("samples"));
    let at = |name: &str| directory.path().join(name);
    given.pack(&samples, &at("undisturbed"), &With::parts(1000, 2, 4 << 30), &Silent).unwrap();
    let expected = content(&at("undisturbed"));
    for (first, then) in [((4, 2), (9, 2)), ((9, 2), (4, 2)), ((6, 3), (6, 1)), ((6, 1), (6, 3))] {
        let name = format!("{first:?}-{then:?}");
        let with = With::parts(first.0, first.1, 100_000);
        let ends = Ends { left: AtomicI64::new(500_000), stop: Some(with.stop.clone()) };
        assert!(matches!(given.pack(&samples, &at(&name), &with, &ends), Err(FetchError::Stopped)));
        assert!(at(&format!("{name}.partial/work/packing")).exists(), "it was to end inside an episode");
        given.pack(&samples, &at(&name), &With::parts(then.0, then.1, 4 << 30), &Silent).unwrap();
        assert!(content(&at(&name)) == expected, "{name}");
    }
}

#[test]
fn a_log_that_was_cut_short_goes_on_wherever_it_was_even_while_it_was_being_closed() {
    let directory = tempfile::tempdir().unwrap();
    let given = Given::new(directory.path(), 3);
    given.samples(&directory.path().join("undisturbed"));
    let expected = content(&directory.path().join("undisturbed"));
    let at = directory.path().join("samples");
    let begin = |safe: u64| {
        SampleLog::begin::<u32>(&given.dataset, &at, given.header(), None, safe).unwrap().unwrap()
    };
    for most in [1, 0, 4, 7] {
        given.sample(&mut begin(2000), EPOCHS, most);
    }
    let mut log = begin(2000);
    let kept = log.logged(u64::MAX).batches;
    assert!(kept > 3, "what was safe was kept, {kept} batches");
    given.sample(&mut log, EPOCHS, u64::MAX);
    log.make_safe().unwrap();
    drop(log);
    // As if killed while some of its arrays were closed.
    let partial = directory.path().join("samples.partial");
    fs::remove_file(partial.join("samples.sums")).unwrap();
    let mut samples = fs::read(partial.join("samples.bin")).unwrap();
    samples.extend([7; 5000]);
    fs::write(partial.join("samples.bin"), samples).unwrap();
    let log = begin(2000);
    assert_eq!(log.logged(u64::MAX).batches, 16);
    log.finish::<u32>(EPOCHS).unwrap();
    assert!(content(&at) == expected);
}

#[test]
fn a_log_that_does_not_open_is_named_and_kept() {
    let directory = tempfile::tempdir().unwrap();
    let given = Given::new(directory.path(), 3);
    let (at, partial) = (directory.path().join("samples"), directory.path().join("samples.partial"));
    let begin = || SampleLog::begin::<u32>(&given.dataset, &at, given.header(), None, 2000);
    let mut log = begin().unwrap().unwrap();
    given.sample(&mut log, EPOCHS, 5);
    log.make_safe().unwrap();
    drop(log);
    fs::rename(partial.join("accesses.bin"), partial.join("away")).unwrap();
    for _ in 0..2 {
        let said = begin().err().unwrap().to_string();
        assert!(said.contains("accesses.bin"), "{said}");
    }
    fs::rename(partial.join("away"), partial.join("accesses.bin")).unwrap();
    assert_eq!(begin().unwrap().unwrap().logged(u64::MAX).batches, 5);
    // As if killed right after opening: the last blocks are gone.
    let cut = fs::File::options().write(true).open(partial.join("samples.bin")).unwrap();
    cut.set_len(4096 + 1).unwrap();
    let mut log = begin().unwrap().unwrap();
    assert_eq!(log.logged(u64::MAX).batches, 0);
    given.sample(&mut log, EPOCHS, u64::MAX);
    log.finish::<u32>(EPOCHS).unwrap();
    given.samples(&directory.path().join("undisturbed"));
    assert!(content(&at) == content(&directory.path().join("undisturbed")));
}

#[test]
fn more_epochs_follow_those_that_are_there_and_packed_rows_go_on_using_them() {
    let directory = tempfile::tempdir().unwrap();
    let given = Given::new(directory.path(), 30);
    let at = directory.path().join("samples");
    let two = given.samples(&at);
    given.pack(&two, &directory.path().join("packed"), &With::parts(9, 2, 1 << 20), &Silent).unwrap();
    let before = content(&at);
    let log = SampleLog::begin::<u32>(&given.dataset, &at, given.header(), Some(&two), 2000).unwrap();
    let mut log = log.unwrap();
    given.sample(&mut log, EPOCHS + 1, u64::MAX);
    let three = log.finish::<u32>(EPOCHS + 1).unwrap();
    assert_eq!(three.sampled().epochs[..2], two.sampled().epochs);
    let payload = two.of_epochs(2).sample_bytes as usize;
    assert!(content(&at)["samples.bin"][4096..4096 + payload] == before["samples.bin"][4096..4096 + payload]);
    let packed = Packed::open(&given.dataset, &directory.path().join("packed")).unwrap().unwrap();
    read_all(&Arc::new(packed));
}

/// Reads and verifies every batch.
fn read_all(packed: &Arc<Packed>) {
    let mut reader = packed.reader().unwrap();
    let (mut sample, mut batch) = (Sample::default(), PackedBatch::default());
    for entry in &packed.entries {
        let at = Position { epoch: entry.epoch, batch: entry.batch };
        reader.load(at, &mut sample, &mut batch).unwrap();
        let mut rows = esker_io::AlignedBuffer::new(packed.rows_bytes() as usize, esker_io::DIRECT_ALIGN);
        reader.read(&batch, &mut rows).unwrap();
        packed.check_rows(&batch, &mut rows).unwrap();
    }
}

#[test]
fn a_directory_that_is_replaced_or_removed_meanwhile_is_read_to_its_end() {
    let directory = tempfile::tempdir().unwrap();
    let given = Given::new(directory.path(), 30);
    let samples = given.samples(&directory.path().join("samples"));
    let at = directory.path().join("packed");
    given.pack(&samples, &at, &With::parts(9, 2, 1 << 20), &Silent).unwrap();
    let packed = Arc::new(Packed::open(&given.dataset, &at).unwrap().unwrap());
    fs::rename(&at, directory.path().join("moved")).unwrap();
    read_all(&packed);
    // Another directory of the same name with wrong content.
    fs::create_dir(&at).unwrap();
    for name in ["samples", "words", "shared", "rows"] {
        fs::write(at.join(format!("{name}.bin")), vec![0xAB; 100_000]).unwrap();
    }
    read_all(&packed);
    fs::remove_dir_all(directory.path().join("moved")).unwrap();
    fs::remove_dir_all(directory.path().join("samples")).unwrap();
    read_all(&packed);
}

#[test]
fn finished_work_of_other_batches_is_refused_and_kept() {
    let directory = tempfile::tempdir().unwrap();
    let given = Given::new(directory.path(), 30);
    let samples = given.samples(&directory.path().join("samples"));
    let (at, partial) = (directory.path().join("packed"), directory.path().join("packed.partial"));
    given.pack(&samples, &at, &With::parts(9, 2, 1 << 20), &Silent).unwrap();
    // As if killed before the rename.
    let manifest: serde_json::Value =
        serde_json::from_slice(&fs::read(at.join("derived.json")).unwrap()).unwrap();
    fs::rename(&at, &partial).unwrap();
    fs::write(partial.join("lock"), manifest["inputs"].as_str().unwrap()).unwrap();
    let other = TraceHeader { settings: Settings { seed: 6, ..given.settings.clone() }, ..given.header() };
    let said = PackWriter::begin(&given.dataset, &at, other).err().unwrap().to_string();
    assert!(said.contains("packed.partial") && said.contains("other batches"), "{said}");
    assert!(PackWriter::begin(&given.dataset, &at, given.header()).unwrap().is_none());
    assert!(at.exists() && !partial.exists());
}
