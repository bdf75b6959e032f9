//! A topology on disk yields the samples of the same topology in memory, whatever is cached; its faults are errors.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

use esker_import::generate::{GraphShape, generate};
use esker_import::{ImportJob, Request, import};
use esker_sample::{
    AnyTopology, CacheIndex, Carry, CountedNeighbours, Direction, DiskGraph, EntryCounts, Fanout, Form,
    GraphWork, InMemory, NeighbourCache, NeighbourCacheFile, OnDisk, Position, Sample, SampleError, Sampler,
    Settings, Topology,
};
use esker_store::{Dataset, StoreError};
use esker_types::{Budget, NodeId, Silent, StopSignal};
use std::path::Path;
use std::sync::Arc;

const PLENTY: u64 = 1 << 30;
const BUDGET: Budget = Budget { host_bytes: 64 << 20 };

fn generated(directory: &Path, nodes: u64) -> Arc<Dataset> {
    let shape = GraphShape { degree: 9.0, dim: 1, out_neighbours: true, ..GraphShape::plain(nodes) };
    let target = directory.join("g");
    generate(&shape, &ImportJob { target: &target, budget: BUDGET, overwrite: false, progress: &Silent })
        .unwrap();
    Arc::new(Dataset::open(&target).unwrap())
}

fn in_memory(dataset: &Dataset, direction: Direction) -> InMemory<u32> {
    match AnyTopology::load(dataset, direction, PLENTY).unwrap() {
        AnyTopology::Narrow(graph) => graph,
        AnyTopology::Wide(_) => panic!("few nodes"),
    }
}

/// Threads, and who may stop them.
struct Threads {
    pool: rayon::ThreadPool,
    stop: StopSignal,
}

impl Threads {
    fn new(count: usize) -> Threads {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(count).build().unwrap();
        Threads { pool, stop: StopSignal::default() }
    }

    fn work<'a>(&'a self, folder: &'a Path, most_bytes: u64) -> GraphWork<'a> {
        GraphWork {
            folder,
            most_bytes,
            pool: &self.pool,
            stop: &self.stop,
            progress: &Silent,
            safe_point_bytes: None,
        }
    }
}

fn sample<T: Topology>(graph: T, settings: &Settings, batch: u64) -> Sample {
    let nodes = graph.nodes();
    let seeds: Vec<NodeId> = (0..40).map(|number| NodeId((number * 37 + batch * 11) % nodes)).collect();
    let (mut sampler, mut sample) =
        (Sampler::new(graph, settings.clone(), PLENTY).unwrap(), Sample::default());
    sampler.sample(Position { epoch: 1, batch }, &seeds, &mut sample).unwrap();
    sample
}

fn cached(graph: &DiskGraph, folder: &Path, takes: impl Fn(u64) -> bool) -> NeighbourCache<u32> {
    let threads = Threads::new(2);
    let index = CacheIndex::choose(graph, &threads.work(folder, 0), |node, _| Ok(takes(node.0))).unwrap();
    assert!(index.bytes() <= CacheIndex::bytes_for(graph.nodes(), graph.entries()));
    NeighbourCacheFile::write::<u32>(graph, index, &threads.work(folder, 1 << 30)).unwrap().load().unwrap()
}

/// Every direction and form, with nothing, a third, and everything cached.
fn check(dataset: &Arc<Dataset>, folder: &Path, relations: bool) {
    for direction in [Direction::Incoming, Direction::Outgoing, Direction::Both] {
        let memory = in_memory(dataset, direction);
        let graph = Arc::new(DiskGraph::open(dataset, direction).unwrap());
        for (caches, takes) in [None, Some(3), Some(1)].into_iter().enumerate() {
            let cache = takes.map(|every| Arc::new(cached(&graph, folder, |node| node % every == 0)));
            for (form, fanout) in [
                (Form::Dense, Fanout::AtMost(4)),
                (Form::Layered, Fanout::AtMost(3)),
                (Form::Shadow, Fanout::AtMost(2)),
                (Form::Dense, Fanout::All),
            ] {
                let carry = Carry { positions: true, edges: true, relations, degrees: true };
                for carry in [carry, Carry::default()] {
                    let settings = Settings { seed: 9, fanouts: vec![fanout; 2], form, carry };
                    for batch in 0..3 {
                        let found = sample(OnDisk::new(graph.clone(), cache.clone()), &settings, batch);
                        let expected = sample(&memory, &settings, batch);
                        assert!(found == expected, "{direction:?} {form:?} {fanout} {takes:?} {batch}");
                    }
                }
            }
            let counters = graph.counters();
            assert!(counters.lists > 0 && (counters.cached > 0) == (caches > 0), "{counters:?}");
        }
    }
}

#[test]
fn samples_from_disk_are_those_from_memory() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = generated(directory.path(), 3000);
    check(&dataset, directory.path(), false);
}

#[test]
fn kinds_of_edges_come_from_disk_too() {
    let directory = tempfile::tempdir().unwrap();
    let from = directory.path().join("facts");
    std::fs::create_dir(&from).unwrap();
    let facts: String =
        (0..900).map(|number| format!("n{}\tr{}\tn{}\n", number % 83, number % 5, number * 7 % 89)).collect();
    std::fs::write(from.join("train.txt"), facts).unwrap();
    ["valid.txt", "test.txt"]
        .iter()
        .for_each(|name| std::fs::write(from.join(name), "n1\tr1\tn2\n").unwrap());
    let target = directory.path().join("k");
    let request =
        Request { format: "triples".into(), from: Some(from), out_neighbours: true, ..Request::default() };
    import(&request, &ImportJob { target: &target, budget: BUDGET, overwrite: false, progress: &Silent })
        .unwrap();
    check(&Arc::new(Dataset::open(&target).unwrap()), directory.path(), true);
}

#[test]
fn a_cached_list_costs_no_read_and_lists_of_one_block_cost_one() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = generated(directory.path(), 3000);
    let settings =
        Settings { seed: 9, fanouts: vec![Fanout::AtMost(4)], form: Form::Dense, carry: Carry::default() };
    let graph = Arc::new(DiskGraph::open(&dataset, Direction::Incoming).unwrap());
    let all = Arc::new(cached(&graph, directory.path(), |_| true));
    sample(OnDisk::new(graph.clone(), Some(all)), &settings, 0);
    assert_eq!((graph.counters().reads, graph.counters().read_bytes), (0, 0));
    let mut sampler = Sampler::new(OnDisk::<u32>::new(graph.clone(), None), settings, PLENTY).unwrap();
    let seeds: Vec<NodeId> = (0..3000).map(NodeId).collect();
    sampler.sample(Position { epoch: 0, batch: 0 }, &seeds, &mut Sample::default()).unwrap();
    let bytes = dataset.manifest().edges.count * 4;
    let read = graph.counters().read_bytes;
    assert!(read <= bytes + bytes / 10 + 8192, "{read} bytes were read of {bytes}");
}

#[test]
fn entries_are_counted_in_any_number_of_passes() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = generated(directory.path(), 9000);
    for direction in [Direction::Incoming, Direction::Both] {
        let (memory, graph) = (in_memory(&dataset, direction), DiskGraph::open(&dataset, direction).unwrap());
        let mut expected = vec![0u32; 9000];
        for node in 0..9000 {
            let list = memory.list(NodeId(node));
            list.first.iter().chain(list.second).for_each(|word| expected[*word as usize] += 1);
        }
        for (most_bytes, threads) in [(0, 1), (1 << 30, 1), (1 << 30, 4)] {
            let threads = Threads::new(threads);
            let work = threads.work(directory.path(), most_bytes);
            let is_expected = |counts: EntryCounts| {
                let mut found = counts.stream();
                expected.iter().all(|count| found.take().unwrap() == *count)
            };
            assert!(is_expected(EntryCounts::count::<u32>(&graph, CountedNeighbours::All, &work).unwrap()));
            // Counted once, then found.
            assert!(is_expected(
                EntryCounts::find_or_count::<u32>(&graph, CountedNeighbours::All, true, &work).unwrap()
            ));
        }
    }
    let derived = dataset.all_derived().unwrap();
    assert_eq!(derived.len(), 2);
    assert!(derived.iter().all(|(_, found)| dataset.is_current(found.as_ref().unwrap())));
}

/// A dataset that nothing can be added to, and counts that are damaged, cost time and nothing else.
#[test]
fn counts_that_cannot_be_kept_are_counted_each_time() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = generated(directory.path(), 3000);
    let graph = DiskGraph::open(&dataset, Direction::Incoming).unwrap();
    let threads = Threads::new(2);
    let work = threads.work(directory.path(), 1 << 30);
    let first = |counts: EntryCounts| counts.stream().take().unwrap();
    let expected = first(EntryCounts::count::<u32>(&graph, CountedNeighbours::All, &work).unwrap());
    // Not a directory: nothing can be derived.
    let derived = dataset.directory().join("derived");
    std::fs::write(&derived, "in the way").unwrap();
    assert_eq!(
        first(EntryCounts::find_or_count::<u32>(&graph, CountedNeighbours::All, true, &work).unwrap()),
        expected
    );
    std::fs::remove_file(&derived).unwrap();
    assert_eq!(
        first(EntryCounts::find_or_count::<u32>(&graph, CountedNeighbours::All, false, &work).unwrap()),
        expected
    );
    assert!(!derived.exists());
    assert_eq!(
        first(EntryCounts::find_or_count::<u32>(&graph, CountedNeighbours::All, true, &work).unwrap()),
        expected
    );
    let manifest = derived.join("neighbour-counts-in/derived.json");
    let text = std::fs::read_to_string(&manifest).unwrap();
    std::fs::write(&manifest, text.replace("neighbour", "neighbor")).unwrap();
    assert_eq!(
        first(EntryCounts::find_or_count::<u32>(&graph, CountedNeighbours::All, true, &work).unwrap()),
        expected
    );
    assert_eq!(std::fs::read_to_string(&manifest).unwrap(), text, "made again");
}

#[test]
fn choosing_lists_ends_when_somebody_asks_for_it() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = generated(directory.path(), 3000);
    let graph = Arc::new(DiskGraph::open(&dataset, Direction::Incoming).unwrap());
    let threads = Threads::new(2);
    let work = threads.work(directory.path(), 0);
    let index = CacheIndex::choose(&graph, &work, |_, _| Ok(true)).unwrap();
    threads.stop.ask();
    let stopped = EntryCounts::find_or_count::<u32>(&graph, CountedNeighbours::All, true, &work).unwrap_err();
    assert!(matches!(stopped, SampleError::Stopped));
    let stopped = CacheIndex::choose(&graph, &work, |_, _| Ok(true)).unwrap_err();
    assert!(matches!(stopped, SampleError::Stopped));
    let stopped = NeighbourCacheFile::write::<u32>(&graph, index, &work).unwrap_err();
    assert!(matches!(stopped, SampleError::Stopped));
    assert!(dataset.all_derived().unwrap().is_empty());
}

#[test]
fn a_damaged_list_is_named_and_does_not_panic() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = generated(directory.path(), 3000);
    let path = dataset.array(esker_store::file::IN_NEIGHBOURS).unwrap().path().to_path_buf();
    let mut bytes = std::fs::read(&path).unwrap();
    let payload = 4096..4096 + dataset.manifest().edges.count as usize * 4;
    bytes[payload].fill(0xff);
    std::fs::write(&path, bytes).unwrap();
    let graph = Arc::new(DiskGraph::open(&dataset, Direction::Incoming).unwrap());
    let settings =
        Settings { seed: 9, fanouts: vec![Fanout::AtMost(4)], form: Form::Dense, carry: Carry::default() };
    let mut sampler = Sampler::new(OnDisk::<u32>::new(graph.clone(), None), settings, PLENTY).unwrap();
    let seeds: Vec<NodeId> = (0..50).map(NodeId).collect();
    let said = sampler.sample(Position { epoch: 0, batch: 0 }, &seeds, &mut Sample::default()).unwrap_err();
    assert!(said.to_string().contains("node ids below 3000"), "{said}");
    let (threads, none) = (Threads::new(2), directory.path().join("none"));
    let work = threads.work(directory.path(), 0);
    let index = CacheIndex::choose(&graph, &work, |_, _| Ok(true)).unwrap();
    let said = NeighbourCacheFile::write::<u32>(&graph, index, &work).unwrap_err();
    assert!(said.to_string().contains("in-neighbours"), "{said}");
    let said = EntryCounts::find_or_count::<u32>(&graph, CountedNeighbours::All, true, &work).unwrap_err();
    assert!(said.to_string().contains("in-neighbours"), "{said}");
    // A folder that is not there.
    let nowhere =
        EntryCounts::count::<u32>(&graph, CountedNeighbours::All, &threads.work(&none, 0)).unwrap_err();
    assert!(matches!(nowhere, SampleError::Store(StoreError::Io { .. })), "{nowhere}");
}
