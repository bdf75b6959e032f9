//! Feature rows by node partition against those of the dataset, and a stream of partitions against a naive buffer.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

use esker_fetch::FeatureRows;
use esker_fetch::partitions::{
    InitialRows, PartitionFiles, PartitionRowStream, PartitionedFeatures, ResidentFeatures, RowFileShape,
    SlotAssignment,
};
use esker_import::ImportJob;
use esker_import::generate::{GraphShape, generate};
use esker_io::{Faults, SimulatedDisk};
use esker_sample::{BufferRows, GraphWork, NodePartitions, NodeSet};
use esker_store::Dataset;
use esker_types::random::{Key, below};
use esker_types::{Budget, Dtype, NodeId, PartitionId, Silent, StopSignal};
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

fn dataset(folder: &Path, nodes: u64, dim: u64, dtype: Dtype) -> Arc<Dataset> {
    let path = folder.join("g");
    let shape = GraphShape { dim, dtype, ..GraphShape::plain(nodes) };
    let budget = Budget { host_bytes: 64 << 20 };
    generate(&shape, &ImportJob { target: &path, budget, overwrite: false, progress: &Silent }).unwrap();
    Arc::new(Dataset::open(&path).unwrap())
}

fn pool() -> Arc<rayon::ThreadPool> {
    Arc::new(rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap())
}

fn made(dataset: &Arc<Dataset>, partitions: &Arc<NodePartitions>, bytes: u64) -> Arc<PartitionedFeatures> {
    let (pool, stop) = (pool(), StopSignal::default());
    let folder = dataset.directory();
    let work = GraphWork {
        folder,
        most_bytes: bytes,
        pool: &pool,
        stop: &stop,
        progress: &Silent,
        safe_point_bytes: None,
    };
    Arc::new(PartitionedFeatures::find_or_make(dataset, partitions, &work).unwrap())
}

#[test]
fn rows_of_residents_are_those_of_their_nodes_whatever_the_memory() {
    for (nodes, dim, dtype, count) in
        [(3000, 12, Dtype::F32, 7), (900, 5, Dtype::F16, 30), (20_000, 33, Dtype::I8, 4)]
    {
        let folder = tempfile::tempdir().unwrap();
        let dataset = dataset(folder.path(), nodes, dim, dtype);
        let whole = FeatureRows::load(&dataset, u64::MAX).unwrap();
        let training = Arc::new(NodeSet::choose(nodes, |node| node.0 % 5 == 1));
        let first = NodePartitions::training_first(count, 3, training).unwrap();
        for partitions in [NodePartitions::random(nodes, count, 9).unwrap(), first].map(Arc::new) {
            let path = dataset.derived_path(&format!("partition-features-{}", partitions.label()));
            let mut files = Vec::new();
            for bytes in [1 << 20, 1 << 30] {
                let _ = std::fs::remove_dir_all(&path);
                let features = made(&dataset, &partitions, bytes);
                files.push(
                    ["rows", "sums"].map(|name| std::fs::read(path.join(format!("{name}.bin"))).unwrap()),
                );
                let mut kept = ResidentFeatures::new(&features).unwrap();
                for resident in [vec![0, 2], vec![2, 1, 3], vec![3]] {
                    let resident: Vec<PartitionId> = resident.into_iter().map(PartitionId).collect();
                    let rows = kept.advance(&resident).unwrap();
                    let resident = BufferRows::new(&partitions, &resident);
                    let all = 0..resident.rows() as u32;
                    let here = |node: &NodeId| resident.row(*node).is_some();
                    let nodes: Vec<NodeId> = (0..nodes).map(NodeId).filter(here).collect();
                    assert!(nodes.len() <= all.len());
                    let mut found = vec![0.0; nodes.len() * dim as usize];
                    let mut expected = found.clone();
                    features.gather(&resident, &rows, &nodes, &mut found).unwrap();
                    whole.gather(&nodes, &[], &mut expected).unwrap();
                    assert!(found == expected);
                }
            }
            assert!(files[0] == files[1], "the same bytes for any memory");
        }
    }
}

#[test]
fn damaged_feature_rows_are_named_by_partition() {
    let folder = tempfile::tempdir().unwrap();
    let dataset = dataset(folder.path(), 1000, 8, Dtype::F32);
    let partitions = Arc::new(NodePartitions::random(1000, 4, 1).unwrap());
    let features = made(&dataset, &partitions, 1 << 30);
    let path = dataset.derived_path("partition-features-4").join("rows.bin");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[4096 + partitions.positions(PartitionId(2)).start as usize * 32] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let mut kept = ResidentFeatures::new(&features).unwrap();
    kept.advance(&[PartitionId(1), PartitionId(3)]).unwrap();
    let said = kept.advance(&[PartitionId(2)]).map(drop).unwrap_err().to_string();
    assert!(said.contains("partition 2") && said.contains("rows.bin"), "{said}");
}

#[test]
fn feature_rows_that_cannot_be_read_are_an_error_with_their_place() {
    let folder = tempfile::tempdir().unwrap();
    let good = dataset(folder.path(), 1000, 8, Dtype::F32);
    let partitions = Arc::new(NodePartitions::random(1000, 4, 1).unwrap());
    made(&good, &partitions, 1 << 30);
    let path = good.derived_path("partition-features-4").join("rows.bin");
    let disk = SimulatedDisk::new(Faults { seed: 3, short: 0.3, put_off: 0.2, ..Faults::default() });
    let derived = std::fs::read_dir(path.parent().unwrap()).unwrap().map(|file| file.unwrap().path());
    let arrays: Vec<_> = good.arrays().iter().map(|array| array.path().to_path_buf()).collect();
    for path in derived.chain(arrays) {
        disk.put(&path, std::fs::read(&path).unwrap());
    }
    let bad = Arc::new(Dataset::open_on(good.directory(), Arc::new(disk.clone())).unwrap());
    let features = made(&bad, &partitions, 1 << 30);
    let mut kept = ResidentFeatures::new(&features).unwrap();
    kept.advance(&[PartitionId(0), PartitionId(1)]).unwrap();
    disk.damage(&path, 4096..u64::MAX);
    let said = kept.advance(&[PartitionId(1), PartitionId(2)]).map(drop).unwrap_err().to_string();
    assert!(said.contains("rows.bin") && said.contains("offset"), "{said}");
}

fn files(folder: &Path, partitions: &Arc<NodePartitions>) -> Arc<PartitionFiles> {
    let initial: InitialRows = Arc::new(|nodes, rows| {
        rows.chunks_exact_mut(3).zip(nodes).for_each(|(row, node)| row.fill(node.0 as f32));
        Ok(())
    });
    let shape = RowFileShape { dim: 3, matrices: 2 };
    Arc::new(PartitionFiles::open(folder, "rows", partitions, shape, None, initial, &pool()))
}

/// Random residents, some of them changed: what is read is what was left.
#[test]
fn a_partition_that_returns_is_as_it_left() {
    for (count, resident, buffers) in [(9, 3, 1), (12, 4, 2), (5, 5, 1), (8, 3, 3)] {
        let folder = tempfile::tempdir().unwrap();
        let partitions = Arc::new(NodePartitions::random(400, count, 1).unwrap());
        let files = files(folder.path(), &partitions);
        let mut stream = PartitionRowStream::start(&files, buffers);
        let (mut slots, mut held) = (SlotAssignment::new(), vec![Vec::<f32>::new(); resident]);
        let (mut owner, key) = (vec![None; resident], Key::new(4));
        let (mut expected, mut changed) = (HashMap::<PartitionId, Vec<f32>>::new(), vec![false; resident]);
        for step in 0..40u64 {
            let mut all: Vec<u32> = (0..count).collect();
            for at in 0..resident {
                let other = at + below(key.with(step).at(at as u64), (count as usize - at) as u64) as usize;
                all.swap(at, other);
            }
            let wanted: Vec<PartitionId> = all[..resident].iter().copied().map(PartitionId).collect();
            let swaps = slots.advance(&wanted);
            stream.prefetch(swaps.iter().map(|swap| swap.enters)).unwrap();
            for swap in &swaps {
                let (partition, mut buffer) = stream.take().unwrap();
                assert_eq!(partition, swap.enters);
                let slot = swap.slot as usize;
                let values: &mut [f32] = bytemuck::cast_slice_mut(&mut buffer[..files.numbers() * 4]);
                let entered = values.to_vec();
                if let Some(known) = expected.get(&partition) {
                    assert!(known == &entered, "partition {partition:?} in step {step}");
                }
                let left = std::mem::replace(&mut held[slot], entered);
                match owner[slot].replace(partition) {
                    Some(before) if std::mem::take(&mut changed[slot]) => {
                        values.copy_from_slice(&left);
                        expected.insert(before, left);
                        stream.write(before, step, buffer).unwrap();
                    }
                    _ => stream.free(buffer).unwrap(),
                }
            }
            for slot in 0..resident {
                if (step + slot as u64).is_multiple_of(3) {
                    held[slot].iter_mut().for_each(|number| *number += step as f32);
                    changed[slot] = true;
                }
            }
        }
        stream.settle().unwrap();
        let written = files.versions().iter().flatten().count();
        assert!(written == expected.len() && std::fs::read_dir(folder.path()).unwrap().count() == written);
    }
}

#[test]
fn a_partition_that_cannot_be_read_ends_the_stream_with_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let partitions = Arc::new(NodePartitions::random(100, 4, 1).unwrap());
    let files = files(folder.path(), &partitions);
    files.write(PartitionId(2), 7, &vec![1.0; files.numbers()]).unwrap();
    std::fs::write(folder.path().join("rows-00002.7"), [0u8; 9]).unwrap();
    let mut stream = PartitionRowStream::start(&files, 2);
    stream.prefetch([PartitionId(1), PartitionId(2), PartitionId(3)]).unwrap();
    let (_, buffer) = stream.take().unwrap();
    let said = stream.take().map(drop).unwrap_err().to_string();
    assert!(said.contains("rows-00002.7"), "{said}");
    drop(buffer);
    assert!(stream.settle().is_err());
}

#[test]
fn a_folder_that_cannot_be_written_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    std::fs::write(&path, "not a folder").unwrap();
    let partitions = Arc::new(NodePartitions::random(100, 4, 1).unwrap());
    let files = files(&path, &partitions);
    let mut stream = PartitionRowStream::start(&files, 1);
    stream.prefetch([PartitionId(0)]).unwrap();
    let (_, buffer) = stream.take().unwrap();
    stream.write(PartitionId(0), 1, buffer).unwrap();
    let said = stream.settle().unwrap_err().to_string();
    assert!(said.contains("file"), "{said}");
}
