//! A small graph, a run on it, what is compared of two runs, and rows that a backend holds.
#![allow(dead_code)]

use esker_fetch::{FeatureRows, RowFormat};
use esker_import::generate::{GraphShape, generate};
use esker_import::{ImportJob, Request, import};
use esker_nn::{Device, HostBytes, Kind, LinkMath, ModelConfig, RowCache};
use esker_plan::{Belady, NextUses, Placement, Placements, RequestCount};
use esker_sample::Fanout;
use esker_sample::partition::{PartitionSource, PartitionWork, make};
use esker_store::{Dataset, file};
use esker_train::{
    BatchProgress, Checkpoint, EpochRecord, OpenRun, OrderName, Outcome, RunConfig, Summary, TrainError,
    Trainer, Watcher,
};
use esker_types::{Budget, Dtype, NodeId, Silent, SlotIndex, StopSignal};
use std::path::{Path, PathBuf};

pub struct Bench {
    directory: tempfile::TempDir,
}

impl Bench {
    pub fn new() -> Bench {
        let directory = tempfile::tempdir().unwrap();
        let shape = GraphShape {
            degree: 8.0,
            dim: 12,
            dtype: Dtype::F16,
            classes: 5,
            homophily: 0.8,
            signal: 0.3,
            label_noise: 0.05,
            train: 0.2,
            valid: 0.1,
            test: 0.1,
            out_neighbours: true,
            ..GraphShape::plain(3000)
        };
        let target = directory.path().join("g");
        let budget = Budget { host_bytes: 64 << 20 };
        generate(&shape, &ImportJob { target: &target, budget, overwrite: false, progress: &Silent })
            .unwrap();
        Bench { directory }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub fn config(&self) -> RunConfig {
        let dataset = Dataset::open(&self.path("g")).unwrap();
        RunConfig {
            dataset: self.path("g"),
            dataset_id: dataset.manifest().id.clone(),
            model: ModelConfig {
                kind: Kind::Sage,
                layers: 2,
                hidden: 24,
                dropout: 0.3,
                ..ModelConfig::default()
            },
            lr: 0.01,
            fanout: vec![Fanout::AtMost(5), Fanout::AtMost(3)],
            eval_fanout: vec![Fanout::AtMost(5), Fanout::AtMost(3)],
            batch: 100,
            epochs: 3,
            seed: 7,
            memory: 1 << 30,
            threads: 2,
            checkpoint_seconds: 0,
            ..RunConfig::for_dataset(&dataset)
        }
    }
}

impl Bench {
    /// 64 training nodes with one neighbour each, but for the second, which has 2900. No pilot samples its batch.
    pub fn with_hub() -> (Bench, RunConfig) {
        let bench = Bench { directory: tempfile::tempdir().unwrap() };
        let integers = |name: &str, shape: &str, values: &mut dyn Iterator<Item = i64>| {
            let data: Vec<u8> = values.flat_map(i64::to_le_bytes).collect();
            Some(write_npy(&bench.path(name), "<i8", shape, &data))
        };
        let edges: Vec<(i64, i64)> =
            (0..80).map(|node| (node + 100, node)).chain((100..3000).map(|node| (node, 1))).collect();
        let mut ends = edges.iter().map(|edge| edge.0).chain(edges.iter().map(|edge| edge.1));
        let features: Vec<u8> = (0..3000 * 64).flat_map(|at| ((at % 7) as f32).to_le_bytes()).collect();
        let request = Request {
            format: "npy".into(),
            edges: integers("edges.npy", &format!("(2, {})", edges.len()), &mut ends),
            features: Some(write_npy(&bench.path("features.npy"), "<f4", "(3000, 64)", &features)),
            labels: integers("labels.npy", "(3000,)", &mut (0..3000).map(|node| node % 2)),
            train: integers("train.npy", "(64,)", &mut (0..64)),
            valid: integers("valid.npy", "(8,)", &mut (64..72)),
            test: integers("test.npy", "(8,)", &mut (72..80)),
            ..Request::default()
        };
        let (target, budget) = (bench.path("g"), Budget { host_bytes: 64 << 20 });
        import(&request, &ImportJob { target: &target, budget, overwrite: false, progress: &Silent })
            .unwrap();
        let mut config = bench.config();
        (config.model.layers, config.model.hidden, config.batch, config.epochs) = (1, 8, 1, 2);
        (config.fanout, config.eval_fanout) = (vec![Fanout::All], vec![Fanout::All]);
        config.order = OrderName::Sequential;
        (bench, config)
    }
}

/// A file of numbers as NumPy writes it.
pub fn write_npy(path: &Path, descr: &str, shape: &str, data: &[u8]) -> PathBuf {
    let header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}");
    let header = format!("{header:<117}\n");
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    std::fs::write(path, bytes).unwrap();
    path.to_path_buf()
}

/// A batch larger than expected ends a run on a device with its own memory. The error names a budget; with it, the run
/// goes on to the same end as one with plenty.
pub fn check_large_device_batch<B: LinkMath>(
    device: impl Fn(&RunConfig) -> B,
    base: RunConfig,
    bench: &Bench,
) {
    let run = |trainer: Trainer<B>| trainer.run(&mut StopAfter(u64::MAX));
    let plenty = RunConfig { gpu_memory: Some(1 << 30), ..base.clone() };
    let whole =
        finished(run(Trainer::create(device(&plenty), plenty, &bench.path("whole")).unwrap()).unwrap());
    let smallest = OpenRun::plan_only(&device(&base), &base).unwrap().device_table.unwrap().total();
    let tight = RunConfig { gpu_memory: Some(smallest), ..base.clone() };
    let out = bench.path("tight");
    let error = run(Trainer::create(device(&tight), tight, &out).unwrap()).err().unwrap();
    assert!(error.to_string().starts_with("batch 2 of epoch 1 is larger than expected (2"), "{error}");
    let TrainError::LargeDeviceBatch { needed, allowed, .. } = error else { panic!("{error}") };
    assert!(allowed.0 == smallest && needed > allowed && out.join("checkpoint.safetensors").exists());
    let enough = RunConfig { gpu_memory: Some(needed.0), ..base };
    let found = finished(run(Trainer::resume(device(&enough), enough, &out).unwrap()).unwrap());
    assert!(result(&found, &out) == result(&whole, &bench.path("whole")));
    assert!(found.peak_device_bytes.unwrap() <= needed.0, "{:?} of {needed}", found.peak_device_bytes);
}

impl Bench {
    /// A run by groups of partitions, whose epochs differ in their number of batches.
    pub fn by_groups(&self) -> RunConfig {
        let dataset = Dataset::open(&self.path("g")).unwrap();
        let (stop, source) = (StopSignal::default(), PartitionSource::Fennel { partitions: 13, passes: 2 });
        let work = PartitionWork { most_bytes: 1 << 30, stop: &stop, progress: &Silent };
        let made = make(&dataset, "thirteen", &source, false, &work).unwrap();
        RunConfig {
            order: OrderName::Groups,
            group: Some(3),
            partitioning: Some((&made.stored).into()),
            batch: 46,
            ..self.config()
        }
    }
}

/// Stops after so many batches.
pub struct StopAfter(pub u64);

impl Watcher for StopAfter {
    fn batch(&mut self, _: &BatchProgress) {
        self.0 = self.0.saturating_sub(1);
    }
    fn stop(&self) -> bool {
        self.0 == 0
    }
    fn evaluation(&mut self, _: &str) {}
    fn epoch(&mut self, _: &EpochRecord, _: bool) {}
}

pub fn finished(outcome: Outcome) -> Summary {
    match outcome {
        Outcome::Finished(summary) => *summary,
        Outcome::Stopped(at) => panic!("stopped at {at:?}"),
    }
}

/// What must not depend on time or memory.
pub fn result(summary: &Summary, out: &Path) -> (String, Option<f64>, Option<f64>, Checkpoint) {
    let accuracy = |metrics: Option<esker_train::Metrics>| metrics.and_then(|metrics| metrics.accuracy);
    let weights = Checkpoint::read(&out.join("last.safetensors")).unwrap();
    (summary.loss_digest.clone(), accuracy(summary.test), accuracy(summary.valid), weights)
}

/// The lines about batches.
pub fn batch_lines(out: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    text.lines().filter(|line| line.contains("\"kind\":\"batch\"")).map(str::to_string).collect()
}

/// Room for 100 rows, and not quite for one more.
pub fn cache_bytes(format: &RowFormat) -> u64 {
    101 * format.row_bytes() as u64 - 1
}

pub fn row_format(bench: &Bench) -> RowFormat {
    RowFormat::of(&Dataset::open(&bench.path("g")).unwrap()).unwrap()
}

/// Batches from all that a device caches, and from rows that they read, are the rows of the dataset.
pub fn check_cached_rows<D: Device>(bench: &Bench, device: D) {
    let format = row_format(bench);
    let (dim, row_bytes) = (format.dim(), format.row_bytes());
    let dataset = Dataset::open(&bench.path("g")).unwrap();
    let mut stored = vec![0u16; 400 * dim];
    dataset.array(file::NODE_FEATURES).unwrap().read_at(0, &mut stored).unwrap();
    let stored: Vec<u8> = stored.into_iter().flat_map(u16::to_le_bytes).collect();
    let all = FeatureRows::load(&dataset, u64::MAX).unwrap();
    for slots in [0, 60, 100, 250u32] {
        let cache = device.cache(&format.stored_rows(), slots as u64, cache_bytes(&format)).unwrap().unwrap();
        assert_eq!(cache.device_slots(), slots.min(100) as u64);
        for first in (0..slots).step_by(64) {
            let rows = first as usize * row_bytes..(first + 64).min(slots) as usize * row_bytes;
            cache.fill(first as u64, &stored[rows]).unwrap();
        }
        for missed in [0, 1, 50] {
            // Node `slots + i` is row `i` of those that the batch reads.
            let nodes: Vec<u32> = (0..700).map(|at| at * at % (slots + missed).max(1)).collect();
            let nodes = if slots + missed == 0 { &[][..] } else { &nodes };
            let placement = |node: &u32| match node.checked_sub(slots) {
                Some(index) => Placement::Read(index).encode(),
                None => Placement::Hit(SlotIndex(*node)).encode(),
            };
            let placements = Placements { words: nodes.iter().map(placement).collect(), kept: Vec::new() };
            let own = &stored[slots as usize * row_bytes..][..missed as usize * row_bytes];
            let mut memory = cache.missed(own.len());
            memory.bytes_mut().copy_from_slice(own);
            let assembled = device.assemble(cache.batch(&placements, memory), dim);
            let mut found = vec![f32::NAN; nodes.len() * dim];
            if !found.is_empty() {
                device.read(&assembled, 0, &mut found);
                device.check().unwrap();
            }
            let nodes: Vec<NodeId> = nodes.iter().map(|node| NodeId(*node as u64)).collect();
            let mut expected = vec![0.0; found.len()];
            all.gather(&nodes, &[], &mut expected).unwrap();
            assert!(found == expected, "{slots} slots, {missed} missed rows");
        }
    }
}

/// A cache that follows a plan: rows that batches read and keep are hits of later batches. Against the rows of the dataset.
pub fn check_kept_rows<D: Device>(bench: &Bench, device: D) {
    let format = row_format(bench);
    let (dim, row_bytes) = (format.dim(), format.row_bytes());
    let dataset = Dataset::open(&bench.path("g")).unwrap();
    let mut stored = vec![0u16; 3000 * dim];
    dataset.array(file::NODE_FEATURES).unwrap().read_at(0, &mut stored).unwrap();
    let stored: Vec<u8> = stored.into_iter().flat_map(u16::to_le_bytes).collect();
    let all = FeatureRows::load(&dataset, u64::MAX).unwrap();
    let batches: Vec<Vec<u32>> = (0..20u64)
        .map(|batch| {
            let nodes = (0..400u64).map(|at| (esker_types::random::mix(batch << 20 | at) % 700) as u32);
            let nodes: std::collections::BTreeSet<u32> = nodes.collect();
            nodes.into_iter().collect()
        })
        .collect();
    for slots in [1, 90, 250u64] {
        let cache = device.cache(&format.stored_rows(), slots, cache_bytes(&format)).unwrap().unwrap();
        let mut planner = Belady::<u32>::new(3000, slots, batches.len() as u32);
        let mut kept = 0;
        let emit = |batch: u32, placements: &Placements| {
            let nodes = &batches[batch as usize];
            let counts = placements.counts();
            kept += counts.kept;
            let mut memory = cache.missed(counts.reads as usize * row_bytes);
            let read = nodes.iter().zip(&placements.words).filter(|(_, word)| Placement::is_read(**word));
            for ((node, _), to) in read.zip(memory.bytes_mut().chunks_exact_mut(row_bytes)) {
                to.copy_from_slice(&stored[*node as usize * row_bytes..][..row_bytes]);
            }
            let assembled = device.assemble(cache.batch(placements, memory), dim);
            let mut found = vec![f32::NAN; nodes.len() * dim];
            device.read(&assembled, 0, &mut found);
            device.check().unwrap();
            let nodes: Vec<NodeId> = nodes.iter().map(|node| NodeId(*node as u64)).collect();
            let mut expected = vec![0.0; found.len()];
            all.gather(&nodes, &[], &mut expected).unwrap();
            assert!(found == expected, "{slots} slots, batch {batch}");
            Ok(())
        };
        let Ok(tally) = planner.plan(&mut &batches[..], &mut Uses::default(), emit);
        assert!(tally.hits > 0 && kept == tally.kept, "{tally:?}");
    }
}

/// What a planner finds on its way back, in memory.
#[derive(Default)]
struct Uses(std::collections::HashMap<u32, (Vec<u32>, Vec<RequestCount>)>);

impl NextUses for Uses {
    type Error = std::convert::Infallible;

    fn put(&mut self, batch: u32, next: &[u32], counts: &[RequestCount]) -> Result<(), Self::Error> {
        self.0.insert(batch, (next.to_vec(), counts.to_vec()));
        Ok(())
    }

    fn next(&mut self, batch: u32, next: &mut Vec<u32>) -> Result<(), Self::Error> {
        next.clone_from(&self.0[&batch].0);
        Ok(())
    }

    fn accessed(&mut self, batch: u32, counts: &mut Vec<RequestCount>) -> Result<(), Self::Error> {
        counts.clone_from(&self.0[&batch].1);
        Ok(())
    }
}
