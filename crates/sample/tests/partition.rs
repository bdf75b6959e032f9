//! Partitions of a dataset on disk: the same bytes for any memory and after interruptions, and nothing damaged or
//! foreign is used.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

use esker_import::ImportJob;
use esker_import::generate::{GraphShape, generate};
use esker_sample::SampleError;
use esker_sample::partition::{
    PartitionMade, PartitionSource, PartitionWork, StoredPartitioning, automatic_partitions, make,
};
use esker_store::Dataset;
use esker_types::{Budget, NodeId, Progress, Silent, StopSignal, Unit};
use proptest::prelude::*;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

struct Bench {
    folder: tempfile::TempDir,
}

impl Bench {
    fn new(shape: GraphShape) -> Bench {
        let folder = tempfile::tempdir().unwrap();
        let (target, budget) = (folder.path().join("g"), Budget { host_bytes: 64 << 20 });
        let job = ImportJob { target: &target, budget, overwrite: false, progress: &Silent };
        generate(&shape, &job).unwrap();
        Bench { folder }
    }

    fn dataset(&self) -> Dataset {
        Dataset::open(&self.folder.path().join("g")).unwrap()
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dataset().derived_path(&format!("partitions-{name}")).join("partitions.bin")
    }

    fn make(&self, name: &str, source: &PartitionSource) -> Result<PartitionMade, SampleError> {
        let stop = StopSignal::default();
        let work = PartitionWork { most_bytes: 1 << 30, stop: &stop, progress: &Silent };
        make(&self.dataset(), name, source, false, &work)
    }
}

fn shape(nodes: u64) -> GraphShape {
    GraphShape { dim: 4, classes: 8, train: 0.2, homophily: 0.9, ..GraphShape::plain(nodes) }
}

fn fennel(partitions: u32) -> PartitionSource {
    PartitionSource::Fennel { partitions, passes: 3 }
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

/// Asks for an end when a stage begins.
struct StopInStage<'a> {
    stop: &'a StopSignal,
    name: &'static str,
}

impl Progress for StopInStage<'_> {
    fn stage(&self, name: &str, _: Option<u64>, _: Unit) {
        if name == self.name {
            self.stop.ask();
        }
    }
    fn advance(&self, _: u64) {}
    fn finish(&self) {}
    fn note(&self, _: &str) {}
}

#[test]
fn any_memory_that_suffices_gives_the_same_bytes_and_the_smallest_is_named() {
    let bench = Bench::new(shape(5000));
    bench.make("a", &fennel(40)).unwrap();
    let expected = fs::read(bench.file("a")).unwrap();
    let stop = StopSignal::default();
    let work = |most_bytes| PartitionWork { most_bytes, stop: &stop, progress: &Silent };
    let refused = make(&bench.dataset(), "b", &fennel(40), false, &work(1 << 20)).unwrap_err();
    let SampleError::PartitionMemory { needed, .. } = &refused else { panic!("{refused}") };
    assert!(refused.to_string().contains("--memory"), "{refused}");
    assert!(make(&bench.dataset(), "b", &fennel(40), false, &work(needed.0 - 1)).is_err());
    for (name, most_bytes) in [("b", needed.0), ("c", 100 << 20)] {
        make(&bench.dataset(), name, &fennel(40), false, &work(most_bytes)).unwrap();
        assert!(fs::read(bench.file(name)).unwrap() == expected);
    }
}

#[test]
fn the_same_request_is_found_and_another_is_refused_unless_it_may_replace() {
    let bench = Bench::new(shape(1000));
    let made = bench.make("a", &fennel(10)).unwrap();
    assert!(!made.is_reused && made.passes.len() == 3);
    assert!(bench.make("a", &fennel(10)).unwrap().is_reused);
    let said = bench.make("a", &fennel(11)).unwrap_err().to_string();
    assert!(said.contains("`a`") && said.contains("10 by fennel") && said.contains("--overwrite"), "{said}");
    let stop = StopSignal::default();
    let work = PartitionWork { most_bytes: 1 << 30, stop: &stop, progress: &Silent };
    let made = make(&bench.dataset(), "a", &fennel(11), true, &work).unwrap();
    assert_eq!(made.stored.partitions(), 11);
    assert_eq!(StoredPartitioning::names(&bench.dataset()).unwrap(), ["a"]);
    for name in ["", "a/b", "..", "a b", &"x".repeat(101)] {
        assert!(matches!(bench.make(name, &fennel(3)), Err(SampleError::PartitioningName { .. })));
    }
    let said = StoredPartitioning::open(&bench.dataset(), "other").unwrap_err().to_string();
    assert!(said.contains("no partitioning `other`, it has a"), "{said}");
}

#[test]
fn sizes_stay_below_their_caps_and_neighbours_are_together() {
    let bench = Bench::new(shape(4000));
    let made = bench.make("a", &fennel(16)).unwrap();
    let summary = made.stored.summary();
    assert!(
        summary.most_nodes <= 4000 * 11 / 160 + 1 && summary.most_training <= 800 * 11 / 160 + 1,
        "{summary:?}"
    );
    let nodes: Vec<NodeId> = (0..4000).map(NodeId).collect();
    let partitions = made.stored.of_nodes(&nodes).unwrap();
    let most = (0..16).map(|p| partitions.iter().filter(|found| found.0 == p).count()).max().unwrap();
    assert_eq!(most as u64, summary.most_nodes);
    // At random, 15 of 16 edges would be cut.
    assert!(summary.cut_share() < 0.75, "{}", summary.cut_share());
    // Some nodes are those of all nodes.
    let some: Vec<NodeId> = nodes.iter().copied().filter(|node| node.0 % 7 == 3).collect();
    let expected: Vec<_> = some.iter().map(|node| partitions[node.index()]).collect();
    assert_eq!(made.stored.of_nodes(&some).unwrap(), expected);
}

#[test]
fn graphs_at_the_edges_of_what_can_be_are_partitioned() {
    let odd = [
        (GraphShape { train: 0.0, valid: 0.0, test: 0.0, ..shape(300) }, 7),
        (shape(40), 400),
        (shape(100), 1),
        (GraphShape { out_neighbours: true, ..shape(500) }, 9),
        (GraphShape { undirected: true, ..shape(500) }, 9),
        (shape(300), 70_000),
    ];
    for (shape, partitions) in odd {
        let bench = Bench::new(shape);
        let stored = bench.make("a", &fennel(partitions)).unwrap().stored;
        let summary = stored.summary().clone();
        assert!(summary.empty >= (partitions as u64).saturating_sub(summary.nodes), "{summary:?}");
        let nodes: Vec<NodeId> = (0..summary.nodes).map(NodeId).collect();
        assert!(stored.of_nodes(&nodes).unwrap().iter().all(|found| found.0 < partitions));
        assert!(esker_store::verify(bench.dataset().directory(), 1, &Silent).unwrap().damage.is_empty());
    }
    let bench = Bench::new(shape(100));
    assert!(bench.make("a", &fennel(0)).unwrap_err().to_string().contains("0 partitions"));
    let no_pass = PartitionSource::Fennel { partitions: 2, passes: 0 };
    assert!(bench.make("a", &no_pass).unwrap_err().to_string().contains("0 passes"));
}

#[test]
fn automatic_numbers_give_a_group_two_to_three_batches() {
    let bench = Bench::new(GraphShape { train: 0.5, ..shape(10_000) });
    for (batch, group) in [(100, 20), (10, 20), (1000, 20), (50, 5)] {
        let partitions = automatic_partitions(&bench.dataset(), batch, group).unwrap() as f64;
        let batches = 5000.0 / partitions * group as f64 / batch as f64;
        assert!((2.0..=3.0).contains(&batches), "{batches}");
    }
    assert_eq!(automatic_partitions(&bench.dataset(), 1 << 40, 20).unwrap(), 1);
    assert_eq!(automatic_partitions(&bench.dataset(), 1, 1 << 30).unwrap(), 10_000);
    let bare = Bench::new(GraphShape { train: 0.0, valid: 0.0, test: 0.0, ..shape(100) });
    let said = automatic_partitions(&bare.dataset(), 10, 20).unwrap_err().to_string();
    assert!(said.contains("--partitions N"), "{said}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn stopped_anywhere_and_continued_the_bytes_are_the_same(stops in prop::collection::vec(1u64..70, 1..6)) {
        let bench = Bench::new(GraphShape { degree: 3.0, ..shape(50_000) });
        bench.make("whole", &fennel(30)).unwrap();
        let expected = fs::read(bench.file("whole")).unwrap();
        let mut ran = 0;
        for left in stops.into_iter().chain([u64::MAX]) {
            let stop = StopSignal::default();
            let progress = StopAt { stop: &stop, left: AtomicU64::new(left) };
            let work = PartitionWork { most_bytes: 1 << 30, stop: &stop, progress: &progress };
            match make(&bench.dataset(), "a", &fennel(30), false, &work) {
                Ok(made) => { ran += made.passes.len(); break }
                Err(SampleError::Stopped) => {
                    prop_assert!(!bench.file("a").exists());
                    prop_assert_eq!(StoredPartitioning::names(&bench.dataset()).unwrap(), ["whole"]);
                }
                Err(error) => panic!("{error}"),
            }
        }
        prop_assert!(ran <= 3);
        prop_assert!(fs::read(bench.file("a")).unwrap() == expected);
    }
}

#[test]
fn a_finished_pass_is_not_made_again() {
    let bench = Bench::new(GraphShape { degree: 3.0, ..shape(50_000) });
    let stop = StopSignal::default();
    let progress = StopInStage { stop: &stop, name: "pass 3 of 3" };
    let work = PartitionWork { most_bytes: 1 << 30, stop: &stop, progress: &progress };
    assert!(matches!(make(&bench.dataset(), "a", &fennel(30), false, &work), Err(SampleError::Stopped)));
    let made = bench.make("a", &fennel(30)).unwrap();
    assert_eq!(made.passes.iter().map(|pass| pass.pass).collect::<Vec<_>>(), [3]);
    // Another request starts from the beginning.
    assert_eq!(bench.make("b", &fennel(31)).unwrap().passes.len(), 3);
}

#[test]
fn partitions_from_a_file_are_taken_as_they_are() {
    let bench = Bench::new(shape(200));
    let path = bench.folder.path().join("g.part.4");
    let text: String = (0..200).map(|node| format!("{}\n", node % 4)).collect();
    fs::write(&path, text).unwrap();
    let source = PartitionSource::File { path: path.clone(), partitions: None };
    let made = bench.make("metis", &source).unwrap();
    let nodes: Vec<NodeId> = (0..200).map(NodeId).collect();
    let partitions = made.stored.of_nodes(&nodes).unwrap();
    assert!(partitions.iter().zip(0..).all(|(found, node)| found.0 == node % 4));
    assert_eq!((made.stored.partitions(), made.stored.summary().most_nodes), (4, 50));
    assert!(bench.make("metis", &source).unwrap().is_reused);
    fs::write(&path, "0\n1\n").unwrap();
    let said = bench.make("other", &source).unwrap_err().to_string();
    assert!(said.contains("g.part.4") && said.contains("200 lines") && said.contains("found 2"), "{said}");
}

fn flip(path: &Path, at: usize) {
    let mut bytes = fs::read(path).unwrap();
    bytes[at] ^= 1;
    fs::write(path, bytes).unwrap();
}

#[test]
fn damaged_and_foreign_partitions_are_refused_by_name_and_can_be_made_again() {
    let bench = Bench::new(shape(2000));
    bench.make("a", &fennel(10)).unwrap();
    flip(&bench.file("a"), 4096 + 77);
    let stored = StoredPartitioning::open(&bench.dataset(), "a").unwrap();
    let said = stored.of_nodes(&[NodeId(5)]).unwrap_err().to_string();
    assert!(said.contains("partitions.bin") && said.contains("checksum"), "{said}");
    let damage = esker_store::verify(bench.dataset().directory(), 1, &Silent).unwrap().damage;
    assert!(damage.len() == 1 && damage[0].path == bench.file("a"), "{damage:?}");
    // A damaged header is found when it is opened, and then it is made again.
    flip(&bench.file("a"), 20);
    let said = StoredPartitioning::open(&bench.dataset(), "a").unwrap_err().to_string();
    assert!(said.contains("partitions.bin"), "{said}");
    assert!(!bench.make("a", &fennel(10)).unwrap().is_reused);
    assert!(esker_store::verify(bench.dataset().directory(), 1, &Silent).unwrap().damage.is_empty());
    // Of another graph.
    let other = Bench::new(GraphShape { seed: 9, ..shape(2000) });
    fs::create_dir_all(other.dataset().directory().join("derived")).unwrap();
    let moved = other.dataset().derived_path("partitions-a");
    fs::rename(bench.dataset().derived_path("partitions-a"), &moved).unwrap();
    let said = StoredPartitioning::open(&other.dataset(), "a").unwrap_err().to_string();
    assert!(said.contains("partitions-a") && said.contains("those of another"), "{said}");
    assert!(!other.make("a", &fennel(10)).unwrap().is_reused);
}
