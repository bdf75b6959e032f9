//! Ginex yields the batches and bytes of `memory`, whatever its caches and superbatches; traces of earlier processes are
//! used where they fit and removed where they do not; a full disk is named.

use crate::common::{batches, dataset, dataset_of, job, scheduled, strategy};
use esker_io::{Faults, SimulatedDisk};
use esker_sample::order::{Grouping, Groups};
use esker_sample::partition::{PartitionSource, PartitionWork, make};
use esker_sample::{Direction, Form, NodeBatches, Position, Seeds};
use esker_store::Dataset;
use esker_strategies::{Job, JobPartitioning, NeighbourPolicy, SourceCounters, StrategyKind};
use esker_types::{Dtype, NodeId, Silent, StopSignal};
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

const START: Position = Position { epoch: 0, batch: 0 };
/// Batches of an epoch.
const EPOCH: u64 = 8;

fn traces(job: &Job) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> = fs::read_dir(job.out_of_core.scratch.join("superbatches"))
        .map(|folder| folder.map(|entry| entry.unwrap().path()).collect())
        .unwrap_or_default();
    all.sort();
    all
}

/// The batches of `memory` and of ginex from some positions, and what ginex counted for the whole run.
fn check(job: &Job) -> SourceCounters {
    crate::common::same_as_memory(StrategyKind::Ginex, job, || {
        assert!(traces(job).is_empty(), "{:?}", traces(job))
    })
}

#[test]
fn superbatches_of_every_length_yield_the_same_batches() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 7, Dtype::F32);
    for superbatch in [1, 3, EPOCH, 11, 1000] {
        let mut job = job(&dataset, 3);
        job.out_of_core.superbatch = Some(superbatch);
        let counters = check(&job);
        let names: Vec<&str> = counters.phases.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["inspect", "switch", "main loop"]);
        assert_eq!(counters.stages[1].items, (3 * EPOCH).div_ceil(superbatch), "plans");
        // Rows that share a block cost one read.
        assert!(counters.reads <= counters.rows - counters.hits[0].1, "{counters:?}");
    }
}

#[test]
fn caches_of_every_size_and_seeds_yield_the_same_batches() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 7, Dtype::F32);
    let mut ratios = Vec::new();
    for (seed, rows) in [(1, 0), (2, 1), (3, 200), (4, 2000), (5, 100_000)] {
        let mut job = job(&dataset, seed);
        job.out_of_core.feature_cache_bytes = Some(rows * 28);
        let counters = check(&job);
        let misses = counters.rows - counters.hits[0].1;
        assert!(counters.reads > 0 && counters.bytes_read >= 28);
        ratios.push(counters.hits[0].1 as f64 / counters.rows as f64);
        if rows >= 2000 {
            // Every row is read once.
            assert!(misses <= 2000, "{misses}");
        }
    }
    assert!(ratios[0] == 0.0 && ratios[1] > 0.0, "{ratios:?}");
    assert!(ratios.windows(2).all(|pair| pair[0] < pair[1] + 0.01), "{ratios:?}");
}

#[test]
fn rows_of_every_width_and_type_yield_the_same_batches() {
    for (dim, dtype) in
        [(1, Dtype::F32), (33, Dtype::F16), (1024, Dtype::F32), (1500, Dtype::Bf16), (130, Dtype::I8)]
    {
        let directory = tempfile::tempdir().unwrap();
        let dataset = dataset(directory.path(), dim, dtype);
        let mut job = job(&dataset, 9);
        job.out_of_core.feature_cache_bytes = Some(150 * dim);
        check(&job);
    }
}

#[test]
fn lists_from_memory_a_cache_or_the_disk_yield_the_same_batches() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 7, Dtype::F32);
    let mut shares = Vec::new();
    for (direction, bytes) in [
        (Direction::Incoming, 0),
        (Direction::Incoming, 20_000),
        (Direction::Incoming, 1 << 20),
        (Direction::Both, 40_000),
        (Direction::Outgoing, 20_000),
    ] {
        let mut job = job(&dataset, 3);
        job.direction = direction;
        job.out_of_core.neighbour_cache_bytes = Some(bytes);
        let counters = check(&job);
        shares.push((
            counters.neighbour_requests > 0,
            counters.neighbour_hits as f64 / counters.neighbour_requests.max(1) as f64,
        ));
    }
    // A third of the entries serves more than a third of the lists: those that are short and requested often.
    assert!(shares[0] == (true, 0.0) && shares[1].1 > 0.4 && !shares[2].0, "{shares:?}");
    assert!(shares[3].1 > 0.2 && shares[4].1 > 0.2, "{shares:?}");
}

/// A job whose batches come by groups of the partitions of its dataset.
fn by_groups(dataset: &Arc<Dataset>, policy: NeighbourPolicy) -> Job {
    let stop = StopSignal::default();
    let work = PartitionWork { most_bytes: 1 << 30, stop: &stop, progress: &Silent };
    let source = PartitionSource::Fennel { partitions: 40, passes: 2 };
    let stored = make(dataset, "p", &source, false, &work).unwrap().stored;
    let mut job = job(dataset, 3);
    let nodes: Vec<NodeId> = (0..500).map(|node| NodeId(node * 3)).collect();
    let (digest, of_nodes) = (stored.digest().to_string(), stored.of_nodes(&nodes).unwrap());
    let grouping = Grouping { partitions: 40, digest, group: 4, batch: 64, drop_last: false, seed: 3 };
    let order = Groups::new(grouping, &of_nodes).unwrap();
    job.batches = Arc::new(NodeBatches::new(order, Seeds::Nodes(nodes)).unwrap());
    job.epoch_batches = 12;
    job.out_of_core.neighbour_policy = Some(policy);
    job.out_of_core.partitioning =
        Some(JobPartitioning { name: "p".into(), partitions: 40, cut_permille: None });
    job
}

#[test]
fn neighbours_of_groups_in_memory_yield_the_same_batches() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset_of(directory.path(), 60_000);
    let mut shares = Vec::new();
    for (policy, bytes, superbatch) in [
        (NeighbourPolicy::Ginex, 1_200_000, 100),
        (NeighbourPolicy::Cross, 1_200_000, 5),
        (NeighbourPolicy::Group, 1_200_000, 100),
        (NeighbourPolicy::Group, 1_200_000, 2),
        (NeighbourPolicy::Group, 100_000, 7),
    ] {
        let mut job = by_groups(&dataset, policy);
        job.out_of_core.neighbour_cache_bytes = Some(bytes);
        job.out_of_core.superbatch = Some(superbatch);
        let counters = check(&scheduled(job.clone()));
        assert!(counters.neighbour_requests >= counters.neighbour_hits);
        assert!(counters.neighbour_hits >= counters.neighbour_group_hits, "{counters:?}");
        let is_read = counters.neighbour_group_bytes_read > 0;
        shares.push((counters.neighbour_group_hits > 0, is_read));
        // What is stored by partition is part of the disk budget.
        job.strategy_bytes = 0;
        let disk_bytes = StrategyKind::Ginex.needs(&job).unwrap().disk_bytes;
        let grouped = policy == NeighbourPolicy::Group;
        assert_eq!(disk_bytes > 1_400_000 + without(&job), grouped, "{disk_bytes}");
    }
    let (used, unused) = ((true, true), (false, false));
    assert_eq!(shares, [unused, unused, used, used, unused]);
}

/// The disk space of the job with another policy.
fn without(job: &Job) -> u64 {
    let mut job = job.clone();
    job.out_of_core.neighbour_policy = Some(NeighbourPolicy::Ginex);
    StrategyKind::Ginex.needs(&job).unwrap().disk_bytes
}

#[test]
fn forms_and_carried_degrees_pass_through_traces() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 7, Dtype::F32);
    for (form, degrees) in [(Form::Layered, false), (Form::Shadow, true), (Form::Dense, true)] {
        let mut job = job(&dataset, 3);
        job.settings.form = form;
        job.settings.carry.degrees = degrees;
        check(&job);
    }
}

#[test]
fn a_small_disk_budget_cuts_superbatches_short_and_none_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 7, Dtype::F32);
    let mut job = job(&dataset, 3);
    job.out_of_core.disk_bytes = 60_000;
    let counters = check(&job);
    assert!((4..=24).contains(&counters.stages[1].items), "{:?}", counters.stages);
    job.out_of_core.disk_bytes = 1000;
    let mut source = strategy(StrategyKind::Ginex, &job).batches(&job, START.into(), None).unwrap();
    let said = source.next().err().unwrap().to_string();
    assert!(said.contains("--disk-budget") && said.contains("at least"), "{said}");
}

#[test]
fn caches_that_do_not_fit_are_refused_with_what_does() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 7, Dtype::F32);
    let mut job = job(&dataset, 3);
    job.out_of_core.feature_cache_bytes = Some(1 << 40);
    let said = strategy(StrategyKind::Ginex, &job)
        .batches(&job, START.into(), None)
        .unwrap()
        .next()
        .err()
        .unwrap()
        .to_string();
    assert!(said.contains("--feature-cache") && said.contains("are left for it"), "{said}");
    job.out_of_core.neighbour_cache_bytes = Some(1 << 40);
    let mut ginex = crate::common::build(StrategyKind::Ginex);
    let said = ginex.prepare(&job).err().unwrap().to_string();
    assert!(said.contains("--neighbour-cache"), "{said}");
}

/// Takes some batches and goes away, as a killed process does: its traces stay.
fn take_some(job: &Job, from: Position, count: usize) {
    let mut source = strategy(StrategyKind::Ginex, job).batches(job, from.into(), None).unwrap();
    (0..count).for_each(|_| drop(source.next().unwrap().unwrap()));
}

#[test]
fn traces_of_an_earlier_process_are_used() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 7, Dtype::F32);
    let mut job = job(&dataset, 3);
    job.out_of_core.superbatch = Some(5);
    take_some(&job, START, 7);
    // The second superbatch is being gathered, the third was sampled while it was planned.
    let names = |job: &Job| {
        let names =
            traces(job).into_iter().map(|path| path.file_name().unwrap().to_string_lossy().into_owned());
        names.collect::<Vec<String>>()
    };
    assert_eq!(names(&job), ["0-5.trace", "1-2.trace"]);
    let from = Position { epoch: 0, batch: 6 };
    let (found, counters) = batches(StrategyKind::Ginex, &job, from);
    assert!(found == batches(StrategyKind::Memory, &job, from).0);
    // Batches 6 to 14 were there already; 15 to 23 take two superbatches.
    assert_eq!((counters.stages[0].items, counters.stages[1].items), (2, 4), "{:?}", counters.stages);
    assert!(names(&job).is_empty());
}

#[test]
fn traces_of_another_run_damaged_ones_and_unfinished_ones_are_removed() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 7, Dtype::F32);
    let mut old = job(&dataset, 4);
    old.out_of_core.superbatch = Some(5);
    take_some(&old, START, 1);
    let mut job = job(&dataset, 3);
    job.out_of_core.superbatch = Some(5);
    let folder = job.out_of_core.scratch.join("superbatches");
    fs::write(folder.join("0-0.trace.partial"), b"half").unwrap();
    fs::write(folder.join("9-9.trace"), b"damaged").unwrap();
    let (found, counters) = batches(StrategyKind::Ginex, &job, START);
    assert!(found == batches(StrategyKind::Memory, &job, START).0);
    assert_eq!(counters.stages[0].items, 5, "nothing was reused");
    assert!(traces(&job).is_empty());
    // A whole trace with a damaged record: an error that names it, not other batches.
    take_some(&job, START, 1);
    let path = traces(&job)[0].clone();
    let mut bytes = fs::read(&path).unwrap();
    let middle = bytes.len() / 3;
    bytes[middle] ^= 0x10;
    fs::write(&path, bytes).unwrap();
    let mut source = strategy(StrategyKind::Ginex, &job).batches(&job, START.into(), None).unwrap();
    let said = source.next().err().map(|error| error.to_string()).unwrap_or_default();
    assert!(said.contains("checksum") && said.contains("delete the trace"), "{said}");
}

/// The dataset on a simulated disk with these faults; its manifest stays on this machine.
fn on_bad_disk(dataset: &Dataset, faults: Faults) -> (Arc<Dataset>, SimulatedDisk) {
    let disk = SimulatedDisk::new(faults);
    for path in dataset.arrays().iter().flat_map(|array| array.layout().parts()) {
        disk.put(path, fs::read(path).unwrap());
    }
    (Arc::new(Dataset::open_on(dataset.directory(), Arc::new(disk.clone())).unwrap()), disk)
}

#[test]
fn a_disk_that_stutters_yields_the_same_batches() {
    let directory = tempfile::tempdir().unwrap();
    let good = dataset(directory.path(), 7, Dtype::F32);
    for seed in 0..4 {
        let align_bytes = [512, 4096][seed as usize % 2];
        let faults = Faults { seed, short: 0.3, put_off: 0.2, latency: 5, align_bytes, ..Faults::default() };
        let mut job = job(&on_bad_disk(&good, faults).0, 3);
        job.out_of_core.neighbour_cache_bytes = Some(20_000);
        job.out_of_core.feature_cache_bytes = Some(300 * 28);
        check(&job);
    }
}

#[test]
fn a_row_or_list_that_cannot_be_read_is_an_error_with_its_place() {
    let directory = tempfile::tempdir().unwrap();
    let good = dataset(directory.path(), 7, Dtype::F32);
    // Different seeds: what the first run sampled would serve the second.
    for (seed, name) in [(3, esker_store::file::NODE_FEATURES), (4, esker_store::file::IN_NEIGHBOURS)] {
        let (bad, disk) = on_bad_disk(&good, Faults::default());
        let path = bad.array(name).unwrap().path().to_path_buf();
        let mut job = job(&bad, seed);
        job.out_of_core.neighbour_cache_bytes = Some(0);
        // Opened and profiled while it was whole.
        let mut strategy = strategy(StrategyKind::Ginex, &job);
        disk.damage(&path, 4096..u64::MAX);
        let mut source = strategy.batches(&job, START.into(), None).unwrap();
        let mut next = || source.next();
        let said = (0..100).find_map(|_| next().err()).expect("a damaged disk is noticed").to_string();
        assert!(said.contains(name) && said.contains("offset"), "{said}");
    }
}

#[test]
fn a_source_that_nobody_reads_to_its_end_stops() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 7, Dtype::F32);
    let mut job = job(&dataset, 3);
    job.epochs = u64::MAX;
    job.out_of_core.superbatch = Some(20);
    let mut source = strategy(StrategyKind::Ginex, &job).batches(&job, START.into(), None).unwrap();
    let mut kept = source.next().unwrap().unwrap();
    drop(source);
    assert!(!crate::common::rows_of(&mut kept).is_empty());
}

#[test]
fn what_the_table_says_is_more_than_nothing_and_the_rest_goes_to_caches() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 7, Dtype::F32);
    let mut job = job(&dataset, 3);
    let table = StrategyKind::Ginex.needs(&job).unwrap().host;
    assert!(table.lines.iter().any(|line| line.what.starts_with("in turn: sampling")), "{table}");
    // With what the table says and nothing more, it works.
    job.strategy_bytes = table.total();
    check(&job);
    let notes = crate::common::build(StrategyKind::Ginex).prepare(&job).unwrap().notes;
    assert!(notes[0].contains("superbatches of 24 batches") && notes.len() == 4, "{notes:?}");
}
