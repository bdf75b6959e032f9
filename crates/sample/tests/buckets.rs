//! Edge buckets and the graph of residents against the whole graph with its other edges left out.

#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

use esker_import::ImportJob;
use esker_import::generate::{FactShape, GraphShape, generate, generate_facts};
use esker_sample::negatives::{NegativeMask, NegativePool, NegativeSampler, NegativeSettings, Side};
use esker_sample::order::{StepBatching, StepOrder, StepSettings};
use esker_sample::{
    AnyTopology, Batches, BucketCounts, BucketLinks, BucketPool, BucketSubgraphs, BucketTopology, BufferRows,
    ByStep, Carry, Direction, Edge, EdgeBuckets, Fanout, Form, GraphSize, GraphWork, LinkBatches,
    NodePartitions, NodeSet, Position, ResidentBuckets, ResidentPool, Sample, Sampler, Seeds, Settings,
    StepSubgraphs, StoredId, SubgraphShape, SubgraphsInMemory, for_each_edge,
};
use esker_store::Dataset;
use esker_types::{
    Budget, EdgeBucket, PartitionId, PartitionStep, PartitionSteps, Silent, StepWork, StopSignal,
};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

fn dataset(folder: &Path, nodes: u64, relations: u32) -> Arc<Dataset> {
    let path = folder.join("g");
    let budget = Budget { host_bytes: 64 << 20 };
    let job = ImportJob { target: &path, budget, overwrite: false, progress: &Silent };
    match relations {
        0 => {
            let shape = GraphShape { dim: 4, out_neighbours: true, ..GraphShape::plain(nodes) };
            generate(&shape, &job).unwrap();
        }
        _ => {
            let relations = relations as u64;
            let shape = FactShape { nodes, relations, out_neighbours: true, ..FactShape::freebase86m(1e-4) };
            generate_facts(&shape, &job).unwrap();
        }
    }
    Arc::new(Dataset::open(&path).unwrap())
}

fn work<'a>(
    folder: &'a Path,
    pool: &'a rayon::ThreadPool,
    stop: &'a StopSignal,
    bytes: u64,
) -> GraphWork<'a> {
    GraphWork { folder, most_bytes: bytes, pool, stop, progress: &Silent, safe_point_bytes: None }
}

fn made(dataset: &Arc<Dataset>, partitions: &NodePartitions, bytes: u64) -> Arc<EdgeBuckets> {
    let (pool, stop) =
        (rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap(), StopSignal::default());
    let work = work(dataset.directory(), &pool, &stop, bytes);
    Arc::new(EdgeBuckets::find_or_make(dataset, partitions, &work).unwrap())
}

fn all_edges(dataset: &Dataset) -> Vec<Edge> {
    let mut all = Vec::new();
    for_each_edge(dataset, &mut |edge| all.push(edge)).unwrap();
    all
}

fn pairs(resident: &[PartitionId]) -> Vec<EdgeBucket> {
    resident
        .iter()
        .flat_map(|source| resident.iter().map(|target| EdgeBucket { source: *source, target: *target }))
        .collect()
}

/// One step for each pair of groups of partitions: its buckets, and all of both groups resident.
#[derive(Debug)]
struct Pairs {
    groups: u32,
    each: u32,
}

impl PartitionSteps for Pairs {
    fn partitions(&self) -> u32 {
        self.groups * self.each
    }

    fn trains_edges(&self) -> bool {
        true
    }

    fn step_count(&self) -> u64 {
        self.steps(0).len() as u64
    }

    fn steps(&self, epoch: u64) -> Vec<PartitionStep> {
        let all: Vec<PartitionId> = (0..self.partitions()).map(PartitionId).collect();
        let group = |partition: PartitionId| partition.0 / self.each;
        let both = (0..self.groups).flat_map(|one| (one..self.groups).map(move |other| (one, other)));
        let step = |(one, other): (u32, u32)| {
            let resident = all.iter().copied().filter(|at| [one, other].contains(&group(*at)));
            let is_of = |bucket: &EdgeBucket| {
                let (source, target) = (group(bucket.source), group(bucket.target));
                (source.min(target), source.max(target)) == (one, other)
            };
            let work = StepWork::Buckets(pairs(&all).into_iter().filter(is_of).collect());
            PartitionStep { resident: resident.collect(), swaps: vec![], work }
        };
        let mut steps: Vec<PartitionStep> = both.map(step).collect();
        steps.rotate_left(epoch as usize % 3);
        steps
    }

    fn identity(&self) -> String {
        format!("{self:?}")
    }
}

#[test]
fn buckets_have_their_edges_in_order_whatever_the_memory() {
    for (nodes, relations, count) in [(500, 0, 7), (40_000, 5, 6), (40, 3, 40)] {
        let folder = tempfile::tempdir().unwrap();
        let dataset = dataset(folder.path(), nodes, relations);
        let training = Arc::new(NodeSet::choose(nodes, |node| node.0 % 9 == 4));
        let first = NodePartitions::training_first(count, 3, training).unwrap();
        for partitions in [NodePartitions::random(nodes, count, 3).unwrap(), first] {
            let mut expected: BTreeMap<EdgeBucket, Vec<Edge>> = BTreeMap::new();
            for edge in all_edges(&dataset) {
                let [source, target] = [edge.source, edge.target].map(|node| partitions.partition(node));
                expected.entry(EdgeBucket { source, target }).or_default().push(edge);
            }
            let mut files = Vec::new();
            for bytes in [1 << 20, 1 << 30] {
                let path = dataset.derived_path(&format!("edge-buckets-{}", partitions.label()));
                let _ = std::fs::remove_dir_all(&path);
                let counted =
                    || BucketCounts::of(&dataset, &partitions, &StopSignal::default(), &Silent).unwrap();
                let counts = counted();
                for bucket in pairs(&(0..count).map(PartitionId).collect::<Vec<_>>()) {
                    let own = expected.get(&bucket).map_or(0, Vec::len) as u64;
                    assert_eq!(counts.counts()[bucket.index(count)], own);
                }
                let buckets = made(&dataset, &partitions, bytes);
                counts.check(&buckets).unwrap();
                assert_eq!(counted(), counts, "from what is sorted");
                files.push(
                    ["edges", "starts", "sums"]
                        .map(|name| std::fs::read(path.join(format!("{name}.bin"))).unwrap()),
                );
                let mut reader = buckets.reader::<u32>().unwrap();
                let all = pairs(&(0..count).map(PartitionId).collect::<Vec<_>>());
                reader
                    .read(&all, |bucket, words| {
                        let edges = words.chunks_exact(if relations > 0 { 3 } else { 2 }).map(|words| Edge {
                            source: words[1].node(),
                            target: words[0].node(),
                            relation: words.get(2).copied().unwrap_or(0),
                        });
                        assert_eq!(
                            edges.collect::<Vec<_>>(),
                            expected.get(&bucket).cloned().unwrap_or_default()
                        );
                    })
                    .unwrap();
                assert_eq!(buckets.counts().iter().sum::<u64>(), dataset.manifest().edges.count);
            }
            assert!(files[0] == files[1], "the same bytes for any memory");
        }
    }
}

/// Batches of links from buckets against those of all edges in memory, and their samples.
fn check_batches(relations: u32, groups: u32, each: u32, direction: Direction, mask: NegativeMask) {
    let folder = tempfile::tempdir().unwrap();
    let dataset = dataset(folder.path(), 600, relations);
    let partitions = Arc::new(NodePartitions::random(600, groups * each, 5).unwrap());
    let AnyTopology::Narrow(whole) = AnyTopology::load(&dataset, direction, 1 << 30).unwrap() else {
        panic!("few nodes")
    };
    let whole = Arc::new(whole);
    let steps: Arc<dyn PartitionSteps> = Arc::new(Pairs { groups, each });
    let settings = StepSettings { steps: steps.clone(), batch: 70, drop_last: false, seed: 3 };
    let order = Arc::new(StepOrder::of_edges(&settings, &partitions, &*whole).unwrap());
    let in_memory: Arc<dyn StepSubgraphs<u32>> =
        Arc::new(SubgraphsInMemory::new(whole.clone(), (*partitions).clone(), false, 1));
    let negatives = NegativeSettings { seed: 8, chunks: 2, uniform: 6, by_degree: 4 };
    let edges = dataset.manifest().edges.count;
    let mut expected =
        LinkBatches::new(order.clone(), Seeds::AllEdges(edges), whole.clone()).unwrap().dropping_targets();
    let has_relations = relations > 0;
    let buckets = made(&dataset, &partitions, 64 << 20);
    let subgraphs = BucketSubgraphs::<u32>::new(has_relations);
    let batching = Arc::new(StepBatching::new(steps, &buckets.counts(), 70, false, 3).unwrap());
    let identity = partitions.identity();
    let mut found =
        BucketLinks::new(batching.clone(), groups * each, identity, &subgraphs).dropping_targets();
    for side in [Side::Target, Side::Source] {
        let pool = ResidentPool::new(order.clone(), in_memory.clone());
        let drawn =
            NegativeSampler::new(whole.clone(), NegativePool::PerBatch(Arc::new(pool)), negatives).unwrap();
        expected = expected.with_negatives(side, drawn.with_mask(mask));
        let pool = BucketPool::new(&batching, &subgraphs);
        let size = GraphSize { nodes: 600, edges };
        let drawn = NegativeSampler::new(size, NegativePool::PerBatch(Arc::new(pool)), negatives).unwrap();
        found = found.with_negatives(side, drawn.with_mask(mask));
    }
    let carry = Carry { relations: has_relations, degrees: true, ..Carry::default() };
    let fanouts = vec![Fanout::AtMost(4), Fanout::AtMost(3)];
    let settings = Settings { seed: 2, fanouts, form: Form::Dense, carry };
    let mut one =
        Sampler::new(BucketTopology::new(600, edges, &subgraphs), settings.clone(), 64 << 20).unwrap();
    let mut other = Sampler::new(ByStep::new(whole.clone(), in_memory), settings, 64 << 20).unwrap();
    let mut kept = ResidentBuckets::<u32>::new(&buckets).unwrap();
    let shape = SubgraphShape { direction, relations: has_relations, edge_ids: false };
    for epoch in 0..2 {
        assert_eq!(found.count(epoch), expected.count(epoch));
        for at in (0..found.count(epoch)).map(|batch| Position { epoch, batch }) {
            let step = found.step(at).unwrap();
            if step.batches().start == at.batch {
                let resident = &step.step().resident;
                let words = kept.advance(resident).unwrap();
                let subgraph = BucketSubgraphs::build(&partitions, resident, words, shape).unwrap();
                subgraphs.set(&step, Arc::new(subgraph), words.clone());
            }
            assert_eq!(found.targets(at).unwrap(), expected.targets(at).unwrap(), "{at:?}");
            let (mut seeds, mut others) = (Vec::new(), Vec::new());
            found.seeds(at, &mut seeds).unwrap();
            expected.seeds(at, &mut others).unwrap();
            assert_eq!(seeds, others);
            one.begin(&found, at).unwrap();
            other.begin(&expected, at).unwrap();
            let (mut sample, mut twin) = (Sample::default(), Sample::default());
            one.sample(at, &seeds, &mut sample).unwrap();
            other.sample(at, &others, &mut twin).unwrap();
            assert_eq!(sample, twin);
        }
    }
}

#[test]
fn batches_from_buckets_are_those_of_all_edges_in_memory() {
    check_batches(6, 4, 2, Direction::Both, NegativeMask::Graph);
    check_batches(0, 3, 3, Direction::Incoming, NegativeMask::Graph);
    check_batches(3, 5, 1, Direction::Incoming, NegativeMask::Batch);
    check_batches(2, 1, 4, Direction::Both, NegativeMask::Graph);
}

#[test]
fn rows_of_residents_are_where_their_slots_are() {
    let partitions = Arc::new(NodePartitions::random(700, 6, 1).unwrap());
    let resident = [5, 1, 2].map(PartitionId);
    let rows = BufferRows::new(&partitions, &resident);
    for (slot, partition) in resident.iter().enumerate() {
        for offset in 0..partitions.size_of(*partition) {
            let node = partitions.node(*partition, offset);
            let row = slot as u32 * partitions.largest() as u32 + offset as u32;
            assert_eq!((rows.row(node), rows.nodes_of(&[row])), (Some(row), vec![node.0]));
        }
    }
    let other = partitions.node(PartitionId(3), 0);
    assert!(rows.row(other).is_none() && rows.rows_of(&[other]).is_err());
}

#[test]
fn a_damaged_bucket_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let dataset = dataset(folder.path(), 700, 0);
    let partitions = Arc::new(NodePartitions::random(700, 3, 1).unwrap());
    let buckets = made(&dataset, &partitions, 64 << 20);
    let path = dataset.derived_path("edge-buckets-3").join("edges.bin");
    let mut bytes = std::fs::read(&path).unwrap();
    // The last edge of the bucket from partition 1 to 1, after the header.
    let before: u64 = buckets.counts()[..5].iter().sum();
    bytes[4096 + before as usize * 8 - 1] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let mut kept = ResidentBuckets::<u32>::new(&buckets).unwrap();
    let said = kept.advance(&[PartitionId(0), PartitionId(1)]).unwrap_err().to_string();
    assert!(said.contains("from partition 1 to 1") && said.contains("edges.bin"), "{said}");
    kept.advance(&[PartitionId(0), PartitionId(2)]).unwrap();
}
