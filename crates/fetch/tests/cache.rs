//! Batches assembled by a plan, from a cache and the disk, have the bytes that gathering from memory gives: for any width and
//! type of rows, any cache, any accesses.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

use esker_fetch::{AccessFile, DiskRows, FeatureRows, HostCache, Missed, PlanFile, StoredRow};
use esker_import::ImportJob;
use esker_import::generate::{GraphShape, generate};
use esker_plan::{Belady, Placement, Placements, PlanTally};
use esker_store::Dataset;
use esker_types::random::mix;
use esker_types::{Budget, Dtype, NodeId, Silent};
use std::path::Path;
use std::sync::Arc;

fn dataset(directory: &Path, nodes: u64, dim: u64, dtype: Dtype) -> Dataset {
    let target = directory.join(format!("{nodes}-{dim}-{dtype}"));
    let shape = GraphShape { degree: 1.0, dim, dtype, ..GraphShape::plain(nodes) };
    let job = ImportJob {
        target: &target,
        budget: Budget { host_bytes: 64 << 20 },
        overwrite: false,
        progress: &Silent,
    };
    generate(&shape, &job).unwrap();
    Dataset::open(&target).unwrap()
}

/// Batches of distinct nodes, some nodes far more often than others.
fn accesses(nodes: u64, batches: u64, rows: u64) -> Vec<Vec<NodeId>> {
    let batch = |batch: u64| {
        let mut all: Vec<NodeId> = Vec::new();
        for number in 0..rows {
            let random = mix(batch << 32 | number);
            let node = NodeId((random >> 8) % if random & 3 == 0 { nodes } else { nodes.div_ceil(5) });
            if !all.contains(&node) {
                all.push(node);
            }
        }
        all
    };
    (0..batches).map(batch).collect()
}

fn planned<R: StoredRow>(
    folder: &Path,
    batches: &[Vec<NodeId>],
    nodes: u64,
    slots: u64,
) -> (PlanFile, PlanTally) {
    let mut file = AccessFile::<R>::create(folder).unwrap();
    batches.iter().for_each(|batch| file.append(batch, &[]).unwrap());
    file.close();
    let plan = PlanFile::create(&file).unwrap();
    let mut planner = Belady::<R>::new(nodes, slots, batches.len() as u32);
    let mut uses = plan.next_uses(0..batches.len() as u32).unwrap();
    let tally = planner.plan(&mut &file, &mut uses, |batch, words| plan.put(batch, words)).unwrap();
    (plan, tally)
}

fn check(dim: u64, dtype: Dtype, slots: u64) {
    let (directory, nodes) = (tempfile::tempdir().unwrap(), 700);
    let dataset = dataset(directory.path(), nodes, dim, dtype);
    let (memory, disk) =
        (FeatureRows::load(&dataset, u64::MAX).unwrap(), Arc::new(DiskRows::open(&dataset).unwrap()));
    let batches = accesses(nodes, 12, 150);
    let (plan, tally) = planned::<u32>(directory.path(), &batches, nodes, slots);
    let (_, wide) = planned::<u64>(directory.path(), &batches, nodes, slots);
    assert_eq!(tally, wide);
    let (mut cache, mut reader) = (HostCache::new(slots, disk.format()), disk.reader().unwrap());
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
    let (mut placements, mut hits, mut reads) = (Placements::default(), 0, 0);
    let mut other_cache = HostCache::new(slots, disk.format());
    let row_bytes = disk.format().row_bytes();
    for (number, batch) in batches.iter().enumerate() {
        let mut expected = vec![0f32; batch.len() * dim as usize];
        memory.gather(batch, &[], &mut expected).unwrap();
        plan.get(number as u32, &mut placements).unwrap();
        assert!(placements.are_valid(slots, batch.len() as u64));
        // What an earlier batch left in the buffer must not show.
        let mut found = vec![f32::NAN; expected.len()];
        reads += reader.read(batch, &placements, &mut found).unwrap();
        hits += placements.counts().hits;
        // The same from a buffer of the rows that are read.
        let mut buffer = vec![0xffu8; placements.counts().reads_end as usize * row_bytes];
        for (word, row) in placements.words.iter().zip(found.chunks_exact(dim as usize)) {
            if let Placement::Read(index) | Placement::Keep(index) = Placement::decode(*word) {
                let stored = &bytemuck::cast_slice::<f32, u8>(row)[..row_bytes];
                buffer[index as usize * row_bytes..][..row_bytes].copy_from_slice(stored);
            }
        }
        cache.assemble_and_keep(&placements, Missed::InPlace, disk.format(), &mut found);
        assert!(found == expected, "{dim} {dtype} {slots}: batch {number}");
        found.fill(f32::NAN);
        other_cache.assemble_and_keep(&placements, Missed::Buffer(&buffer), disk.format(), &mut found);
        assert!(found == expected, "{dim} {dtype} {slots}: batch {number} from a buffer");
        found.fill(f32::NAN);
        reader.read_all(batch, &[], &mut found, &pool).unwrap();
        assert!(found == expected, "{dim} {dtype}: batch {number} without a plan");
    }
    assert_eq!((hits, reads), (tally.hits, tally.misses()));
}

#[test]
fn rows_of_every_width_come_as_from_memory() {
    for dim in [1, 3, 7, 32, 128, 1024, 1100, 2500] {
        check(dim, Dtype::F32, 60);
    }
}

#[test]
fn caches_of_every_size_bring_the_same_rows() {
    for slots in [0, 1, 2, 33, 699, 700, 5000] {
        check(5, Dtype::F32, slots);
        check(33, Dtype::F16, slots);
    }
}

#[test]
fn rows_of_every_type_come_as_from_memory() {
    for dtype in [Dtype::F16, Dtype::Bf16, Dtype::I8] {
        check(9, dtype, 50);
        check(1000, dtype, 50);
    }
}

#[test]
fn a_row_that_is_not_there_is_an_error() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 100, 4, Dtype::F32);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    let mut reader = Arc::new(DiskRows::open(&dataset).unwrap()).reader().unwrap();
    let said = reader.read_all(&[NodeId(100)], &[], &mut [0.0; 4], &pool).unwrap_err().to_string();
    assert!(said.contains("row 100"), "{said}");
}

/// Rows that a pruned sample does not need: nothing is planned or read for them, and they are zeros.
#[test]
fn rows_that_are_skipped_are_neither_planned_nor_read() {
    let (directory, nodes, slots) = (tempfile::tempdir().unwrap(), 700, 60);
    for (dim, dtype) in [(7, Dtype::F32), (33, Dtype::F16)] {
        let dataset = dataset(directory.path(), nodes, dim, dtype);
        let (memory, disk) =
            (FeatureRows::load(&dataset, u64::MAX).unwrap(), Arc::new(DiskRows::open(&dataset).unwrap()));
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        let batches = accesses(nodes, 12, 150);
        let skips =
            |batch: &[NodeId]| batch.iter().map(|node| mix(node.0).is_multiple_of(3)).collect::<Vec<bool>>();
        let mut file = AccessFile::<u32>::create(directory.path()).unwrap();
        batches.iter().for_each(|batch| file.append(batch, &skips(batch)).unwrap());
        let plan = PlanFile::create(&file).unwrap();
        let mut planner = Belady::<u32>::new(nodes, slots, batches.len() as u32);
        let mut uses = plan.next_uses(0..batches.len() as u32).unwrap();
        let tally = planner.plan(&mut &file, &mut uses, |batch, found| plan.put(batch, found)).unwrap();
        let (mut cache, mut reader) = (HostCache::new(slots, disk.format()), disk.reader().unwrap());
        let (mut placements, mut needed, mut read) = (Placements::default(), 0, 0);
        for (number, batch) in batches.iter().enumerate() {
            let skipped = skips(batch);
            needed += skipped.iter().filter(|skip| !**skip).count() as u64;
            let mut expected = vec![0f32; batch.len() * dim as usize];
            memory.gather(batch, &[], &mut expected).unwrap();
            for (row, skip) in expected.chunks_exact_mut(dim as usize).zip(&skipped) {
                if *skip {
                    row.fill(0.0);
                }
            }
            plan.get(number as u32, &mut placements).unwrap();
            placements.insert_skipped(&skipped);
            let mut found = vec![f32::NAN; expected.len()];
            read += reader.read(batch, &placements, &mut found).unwrap();
            cache.assemble_and_keep(&placements, Missed::InPlace, disk.format(), &mut found);
            assert!(found == expected, "{dim} {dtype}: batch {number}");
            for gathered in [false, true] {
                found.fill(f32::NAN);
                match gathered {
                    true => memory.gather(batch, &skipped, &mut found).unwrap(),
                    false => reader.read_all(batch, &skipped, &mut found, &pool).unwrap(),
                }
                assert!(found == expected, "{dim} {dtype}: batch {number} without a plan");
            }
        }
        assert_eq!((tally.accesses, tally.misses()), (needed, read));
        assert!(tally.hits > 0);
    }
}
