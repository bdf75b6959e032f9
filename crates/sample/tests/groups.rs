//! Neighbours by partition: what is stored is what a naive program would store, for any memory and after interruptions;
//! samples are those of a topology in memory, whatever groups are cached; nothing damaged or foreign is used.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

use esker_import::ImportJob;
use esker_import::generate::{GraphShape, generate};
use esker_sample::bulk::{Bulk, positions};
use esker_sample::order::{Grouping, Groups};
use esker_sample::partition::{PartitionSource, PartitionWork, StoredPartitioning, make};
use esker_sample::{
    AnyTopology, Batches, CacheIndex, Carry, CountedNeighbours, Direction, DiskGraph, EntryCounts, Fanout,
    Form, GraphWork, GroupCache, GroupNeighbours, GroupRoom, InMemory, NeighbourCacheFile, NodeBatches,
    OnDisk, PartitionedAdjacency, Position, Sample, SampleError, Seeds, Settings, Topology,
};
use esker_store::Dataset;
use esker_types::{Budget, NodeId, Progress, Silent, StopSignal, Unit};
use proptest::prelude::*;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const PLENTY: u64 = 1 << 30;
const DIRECTIONS: [Direction; 3] = [Direction::Incoming, Direction::Outgoing, Direction::Both];

struct Bench {
    folder: tempfile::TempDir,
    pool: rayon::ThreadPool,
    stop: StopSignal,
}

impl Bench {
    fn new(shape: GraphShape) -> Bench {
        let folder = tempfile::tempdir().unwrap();
        let (target, budget) = (folder.path().join("g"), Budget { host_bytes: 64 << 20 });
        let job = ImportJob { target: &target, budget, overwrite: false, progress: &Silent };
        generate(&shape, &job).unwrap();
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        Bench { folder, pool, stop: StopSignal::default() }
    }

    fn dataset(&self) -> Arc<Dataset> {
        Arc::new(Dataset::open(&self.folder.path().join("g")).unwrap())
    }

    fn graph(&self, direction: Direction) -> Arc<DiskGraph> {
        Arc::new(DiskGraph::open(&self.dataset(), direction).unwrap())
    }

    fn partition(&self, name: &str, partitions: u32) -> StoredPartitioning {
        let source = PartitionSource::Fennel { partitions, passes: 2 };
        let work = PartitionWork { most_bytes: PLENTY, stop: &self.stop, progress: &Silent };
        make(&self.dataset(), name, &source, true, &work).unwrap().stored
    }

    fn work(&self, most_bytes: u64) -> GraphWork<'_> {
        let folder = self.folder.path();
        GraphWork {
            folder,
            most_bytes,
            pool: &self.pool,
            stop: &self.stop,
            progress: &Silent,
            safe_point_bytes: None,
        }
    }

    fn adjacency(&self, direction: Direction, stored: &StoredPartitioning) -> Arc<PartitionedAdjacency> {
        let graph = self.graph(direction);
        Arc::new(PartitionedAdjacency::find_or_make::<u32>(&graph, stored, &self.work(PLENTY)).unwrap())
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dataset().derived_path(name).join("neighbours.bin")
    }

    fn memory(&self, direction: Direction) -> InMemory<u32> {
        match AnyTopology::load(&self.dataset(), direction, PLENTY).unwrap() {
            AnyTopology::Narrow(graph) => graph,
            AnyTopology::Wide(_) => panic!("few nodes"),
        }
    }
}

fn shape(nodes: u64) -> GraphShape {
    GraphShape {
        degree: 7.0,
        dim: 1,
        classes: 12,
        train: 0.3,
        homophily: 0.9,
        out_neighbours: true,
        ..GraphShape::plain(nodes)
    }
}

fn partitions_of(stored: &StoredPartitioning, nodes: u64) -> Vec<u32> {
    let nodes: Vec<NodeId> = (0..nodes).map(NodeId).collect();
    stored.of_nodes(&nodes).unwrap().iter().map(|partition| partition.0).collect()
}

/// The words that are stored: of each partition its nodes, then their neighbours.
fn naive(graph: &InMemory<u32>, partitions: &[u32], count: u32) -> Vec<u32> {
    let mut words = Vec::new();
    for partition in 0..count {
        let nodes: Vec<u32> =
            (0..partitions.len() as u32).filter(|node| partitions[*node as usize] == partition).collect();
        words.extend(&nodes);
        for node in nodes {
            let list = graph.list(NodeId(node as u64));
            words.extend(list.first.iter().chain(list.second));
        }
    }
    words
}

fn words_in(path: &Path, count: usize) -> Vec<u32> {
    let bytes = fs::read(path).unwrap();
    bytes[4096..4096 + count * 4].as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
}

#[test]
fn partitions_are_stored_as_a_naive_program_would_for_any_memory() {
    let bench = Bench::new(shape(30_000));
    for (partitions, direction) in
        [(7, Direction::Incoming), (300, Direction::Both), (1, Direction::Outgoing)]
    {
        let name = format!("p{partitions}");
        let stored = bench.partition(&name, partitions);
        let expected = naive(&bench.memory(direction), &partitions_of(&stored, 30_000), partitions);
        let mut files = Vec::new();
        // Several passes over the graph, and one.
        for most_bytes in [0, PLENTY] {
            let graph = bench.graph(direction);
            let made = PartitionedAdjacency::find_or_make::<u32>(&graph, &stored, &bench.work(most_bytes));
            let bytes = made.unwrap().bytes();
            assert!(bytes <= PartitionedAdjacency::disk_bytes(&bench.dataset(), direction, partitions));
            let short = ["in", "out", "both"][direction as usize];
            let path = bench.file(&format!("adjacency-{short}-{name}"));
            assert!(words_in(&path, expected.len()) == expected, "{partitions} {direction:?} {most_bytes}");
            files.push(fs::read(&path).unwrap());
            fs::remove_dir_all(path.parent().unwrap()).unwrap();
        }
        assert!(files[0] == files[1]);
    }
}

/// Asks for an end after so many reports.
struct StopAt<'a> {
    stop: &'a StopSignal,
    left: AtomicU64,
}

impl Progress for StopAt<'_> {
    fn stage(&self, _: &str, _: Option<u64>, _: Unit) {}
    fn advance(&self, _: u64) {
        if self.left.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.stop.ask();
        }
    }
    fn finish(&self) {}
    fn note(&self, _: &str) {}
}

#[test]
fn an_interrupted_store_continues_and_yields_the_same_bytes() {
    let bench = Bench::new(shape(40_000));
    let stored = bench.partition("p", 50);
    let graph = bench.graph(Direction::Incoming);
    drop(bench.adjacency(Direction::Incoming, &stored));
    let path = bench.file("adjacency-in-p");
    let expected = fs::read(&path).unwrap();
    let reports = |stop: &StopSignal, left: u64| {
        let progress = StopAt { stop, left: AtomicU64::new(left) };
        let work = GraphWork { stop, progress: &progress, ..bench.work(0) };
        let made = PartitionedAdjacency::find_or_make::<u32>(&graph, &stored, &work);
        (made.is_ok(), u64::MAX / 2 - progress.left.into_inner().min(u64::MAX / 2))
    };
    fs::remove_dir_all(path.parent().unwrap()).unwrap();
    let (is_made, whole) = reports(&StopSignal::default(), u64::MAX / 2);
    assert!(is_made && whole > 10, "{whole} reports");
    for after in [2, 5, whole - 2] {
        fs::remove_dir_all(path.parent().unwrap()).unwrap();
        assert!(!reports(&StopSignal::default(), after).0, "{after}");
        assert!(!path.exists());
        // Parts that are on disk are not made again.
        let (is_made, rest) = reports(&StopSignal::default(), u64::MAX / 2);
        assert!(is_made && (rest < whole || after == 2), "{after}: {rest} of {whole}");
        assert!(fs::read(&path).unwrap() == expected, "{after}");
    }
    // Other partitions of the same name replace it.
    let other = bench.partition("p", 51);
    let found = bench.adjacency(Direction::Incoming, &other);
    assert!(found.bytes() > 0 && fs::read(&path).unwrap() != expected);
}

#[test]
fn edges_from_other_partitions_are_counted_in_any_number_of_passes() {
    let bench = Bench::new(shape(9000));
    let stored = bench.partition("p", 30);
    let partitions = partitions_of(&stored, 9000);
    for direction in DIRECTIONS {
        let (memory, graph) = (bench.memory(direction), bench.graph(direction));
        let mut expected = vec![0u32; 9000];
        for node in 0..9000 {
            let list = memory.list(NodeId(node));
            let others = list.first.iter().chain(list.second);
            let others = others.filter(|other| partitions[**other as usize] != partitions[node as usize]);
            others.for_each(|other| expected[*other as usize] += 1);
        }
        assert!(expected.iter().any(|count| *count > 0));
        for most_bytes in [0, PLENTY] {
            let is_expected = |counts: EntryCounts| {
                let mut found = counts.stream();
                expected.iter().all(|count| found.take().unwrap() == *count)
            };
            let (work, cross) = (bench.work(most_bytes), CountedNeighbours::Cross(&stored));
            assert!(is_expected(EntryCounts::count::<u32>(&graph, cross, &work).unwrap()));
            // Counted once, then found; and counted again for other partitions.
            assert!(is_expected(EntryCounts::find_or_count::<u32>(&graph, cross, true, &work).unwrap()));
        }
    }
    let other = bench.partition("p", 2);
    let graph = bench.graph(Direction::Incoming);
    let cross = CountedNeighbours::Cross(&other);
    let counts = EntryCounts::find_or_count::<u32>(&graph, cross, true, &bench.work(PLENTY)).unwrap();
    let (mut stream, mut all) = (counts.stream(), 0u64);
    (0..9000).for_each(|_| all += stream.take().unwrap() as u64);
    assert_eq!(all, other.summary().cut_edges);
}

fn batches(bench: &Bench, stored: &StoredPartitioning, group: u32, batch: u64) -> Arc<dyn Batches> {
    let dataset = bench.dataset();
    let mut seeds = vec![0u32; dataset.manifest().splits.as_ref().unwrap().train as usize];
    dataset.array(esker_store::file::SPLIT_TRAIN).unwrap().read_at(0, &mut seeds).unwrap();
    let seeds: Vec<NodeId> = seeds.into_iter().map(|node| NodeId(node as u64)).collect();
    let grouping = Grouping {
        partitions: stored.partitions(),
        digest: stored.digest().into(),
        group,
        batch,
        drop_last: false,
        seed: 5,
    };
    let order = Groups::new(grouping, &stored.of_nodes(&seeds).unwrap()).unwrap();
    Arc::new(NodeBatches::new(order, Seeds::Nodes(seeds)).unwrap())
}

fn samples<T: Topology>(graph: &T, batches: &dyn Batches, settings: &Settings, threads: usize) -> Vec<u64> {
    let bulk = Bulk { graph, batches: &batches, settings, threads, most_bytes: PLENTY };
    let mut all = Vec::new();
    let from = Position { epoch: 0, batch: 0 };
    bulk.run_with(threads, positions(&batches, from, 2), |_, sample: &Sample| {
        all.push(sample.digest());
        Ok::<(), SampleError>(())
    })
    .unwrap();
    all
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Groups of every size, with room for all, for some and for none, alone and beside a static cache, for one sampler
    /// and for several.
    #[test]
    fn samples_are_those_of_a_topology_in_memory(
        partitions in 1u32..90,
        group in 1u32..25,
        batch in 3u64..80,
        direction in prop::sample::select(DIRECTIONS.to_vec()),
        form in prop::sample::select(vec![Form::Dense, Form::Layered, Form::Shadow]),
        threads in 1usize..5,
        room in prop::sample::select(vec![0u64, 20_000, 90_000, PLENTY]),
        every in prop::option::of(1u64..4),
        edges: bool,
    ) {
        let bench = Bench::new(shape(1200));
        let stored = bench.partition("p", partitions);
        let batches = batches(&bench, &stored, group, batch);
        let carry = Carry { positions: edges, edges, relations: false, degrees: edges };
        let settings = Settings { seed: 3, fanouts: vec![Fanout::AtMost(4); 2], form, carry };
        let expected = samples(&bench.memory(direction), &*batches, &settings, 1);
        let (graph, adjacency) = (bench.graph(direction), bench.adjacency(direction, &stored));
        let cache = every.map(|every| {
            let work = bench.work(PLENTY);
            let index = CacheIndex::choose(&graph, &work, |node, _| Ok(node.0 % every == 0)).unwrap();
            Arc::new(NeighbourCacheFile::write::<u32>(&graph, index, &work).unwrap().load::<u32>().unwrap())
        });
        let room = GroupRoom::within::<u32>(&adjacency, &*batches, 2, threads, room);
        prop_assert!(room.groups <= threads as u64 + 1);
        let groups = (room.groups > 0).then(|| Arc::new(GroupCache::new(adjacency, graph.clone(), room).unwrap()));
        let topology = OnDisk::new(graph.clone(), cache).with_groups(groups);
        let found = samples(&topology, &*batches, &settings, threads);
        prop_assert!(found == expected);
        let counters = graph.counters();
        prop_assert!((counters.grouped > 0) == (room.groups > 0), "{counters:?} {room:?}");
        prop_assert!(counters.cached >= counters.grouped && counters.lists >= counters.cached);
        prop_assert!((counters.group_read_bytes > 0) == (room.groups > 0));
        // Every group that has room for all its partitions serves the seeds at least.
        if threads == 1 && room.groups == 2 {
            let seeds: u64 = (0..2).map(|epoch| (0..batches.count(epoch)).map(|batch| {
                let mut nodes = Vec::new();
                batches.seeds(Position { epoch, batch }, &mut nodes).unwrap();
                let memory = bench.memory(direction);
                nodes.iter().filter(|node| !memory.list(**node).is_empty()).count() as u64
            }).sum::<u64>()).sum();
            prop_assert!(counters.grouped >= seeds, "{} of {seeds}", counters.grouped);
        }
    }
}

#[test]
fn a_group_is_read_once_and_its_memory_is_what_was_promised() {
    let bench = Bench::new(shape(6000));
    let stored = bench.partition("p", 60);
    let batches = batches(&bench, &stored, 6, 50);
    let (graph, adjacency) =
        (bench.graph(Direction::Incoming), bench.adjacency(Direction::Incoming, &stored));
    let room = GroupRoom::within::<u32>(&adjacency, &*batches, 1, 1, PLENTY);
    assert_eq!(room.groups, 2);
    let all = GroupNeighbours::<u32>::bytes_for(6000, 6000 + graph.entries());
    assert!(room.group_bytes < all / 4 && room.bytes() >= 2 * room.group_bytes);
    // A little less than the largest group needs: all but a partition are there.
    let less = GroupRoom { group_bytes: room.group_bytes - 1, ..room };
    let settings =
        Settings { seed: 3, fanouts: vec![Fanout::AtMost(4); 2], form: Form::Dense, carry: Carry::default() };
    let mut hits = Vec::new();
    for room in [room, less] {
        let graph = bench.graph(Direction::Incoming);
        let groups = GroupCache::new(adjacency.clone(), graph.clone(), room).unwrap();
        let topology = OnDisk::<u32>::new(graph.clone(), None).with_groups(Some(Arc::new(groups)));
        samples(&topology, &*batches, &settings, 1);
        let counters = graph.counters();
        hits.push(counters.grouped);
        // Two epochs: every partition with seeds is read twice, and reads are whole blocks of 512 bytes.
        let words = 2 * (6000 + graph.entries()) * 4;
        assert!(counters.group_read_bytes <= words + 2 * 60 * 1024, "{counters:?}");
    }
    assert!(hits[0] > hits[1] && hits[1] > hits[0] / 2, "{hits:?}");
}

#[test]
fn empty_partitions_and_more_partitions_than_nodes_are_groups_like_others() {
    let bench = Bench::new(shape(90));
    let stored = bench.partition("p", 400);
    assert!(stored.summary().empty >= 310);
    let batches = batches(&bench, &stored, 20, 4);
    let settings =
        Settings { seed: 3, fanouts: vec![Fanout::All; 2], form: Form::Dense, carry: Carry::default() };
    let (graph, adjacency) = (bench.graph(Direction::Both), bench.adjacency(Direction::Both, &stored));
    let room = GroupRoom::within::<u32>(&adjacency, &*batches, 2, 2, PLENTY);
    let groups = GroupCache::new(adjacency, graph.clone(), room).unwrap();
    let topology = OnDisk::<u32>::new(graph.clone(), None).with_groups(Some(Arc::new(groups)));
    let expected = samples(&bench.memory(Direction::Both), &*batches, &settings, 1);
    assert!(samples(&topology, &*batches, &settings, 2) == expected);
    assert!(graph.counters().grouped > 0);
}

#[test]
fn damaged_and_foreign_adjacency_is_named_or_made_again() {
    let bench = Bench::new(shape(3000));
    let stored = bench.partition("p", 20);
    let batches = batches(&bench, &stored, 4, 50);
    let graph = bench.graph(Direction::Incoming);
    let expected = {
        drop(bench.adjacency(Direction::Incoming, &stored));
        fs::read(bench.file("adjacency-in-p")).unwrap()
    };
    let path = bench.file("adjacency-in-p");
    let flip = |path: &Path, at: usize| {
        let mut bytes = fs::read(path).unwrap();
        bytes[at] ^= 0xff;
        fs::write(path, bytes).unwrap();
    };
    // Damage in the middle is found by `verify`, and by whoever reads it where it matters.
    (0..3000).for_each(|word| flip(&path, 4096 + word * 4 + 3));
    let damage = esker_store::verify(bench.dataset().directory(), 1, &Silent).unwrap().damage;
    assert!(!damage.is_empty() && damage.iter().all(|damage| damage.path == path), "{damage:?}");
    let adjacency = bench.adjacency(Direction::Incoming, &stored);
    let room = GroupRoom::within::<u32>(&adjacency, &*batches, 1, 1, PLENTY);
    let groups = GroupCache::new(adjacency, graph.clone(), room).unwrap();
    let topology = OnDisk::<u32>::new(graph, None).with_groups(Some(Arc::new(groups)));
    let settings =
        Settings { seed: 3, fanouts: vec![Fanout::AtMost(4)], form: Form::Dense, carry: Carry::default() };
    let bulk =
        Bulk { graph: &topology, batches: &batches, settings: &settings, threads: 2, most_bytes: PLENTY };
    let from = Position { epoch: 0, batch: 0 };
    let said = bulk.run(positions(&batches, from, 1), |_, _| Ok::<(), SampleError>(())).unwrap_err();
    let said = said.to_string();
    assert!(said.contains("neighbours.bin") && said.contains("remove the directory"), "{said}");
    // A damaged header, and a damaged table of partitions.
    for (name, at) in [("neighbours.bin", 20), ("starts.bin", 4096 + 16)] {
        flip(&path.with_file_name(name), at);
        drop(bench.adjacency(Direction::Incoming, &stored));
        assert!(fs::read(&path).unwrap() == expected, "{name}");
        assert!(esker_store::verify(bench.dataset().directory(), 1, &Silent).unwrap().damage.is_empty());
    }
    // Of another graph.
    let other = Bench::new(GraphShape { seed: 9, ..shape(3000) });
    let theirs = other.partition("p", 20);
    let moved = other.dataset().derived_path("adjacency-in-p");
    fs::rename(path.parent().unwrap(), &moved).unwrap();
    drop(other.adjacency(Direction::Incoming, &theirs));
    assert!(fs::read(moved.join("neighbours.bin")).unwrap() != expected);
}
