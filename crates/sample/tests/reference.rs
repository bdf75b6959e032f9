//! The sampler against a naive reference written from the definitions, on random small graphs.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

mod naive;

use esker_sample::bulk::{Bulk, positions};
use esker_sample::order::{Batching, Shuffled};
use esker_sample::{
    Batches, Bound, Carry, Direction, Fanout, Fetched, Form, InMemory, NodeBatches, NotInMemory, Position,
    RequestedEntries, Result, Sample, SampleError, Sampler, Seeds, Settings, StoredId, Topology,
    TopologyWorkspace,
};
use esker_types::NodeId;
use naive::Reference;
use proptest::prelude::*;
use std::collections::HashSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const AT: Position = Position { epoch: 3, batch: 5 };
/// More than any test needs.
const PLENTY: u64 = 1 << 30;

fn lists() -> impl Strategy<Value = Vec<Vec<u64>>> {
    (1u64..60).prop_flat_map(|nodes| {
        let list = prop::collection::vec(0..nodes, 0..90).prop_map(|mut list| {
            list.sort_unstable();
            list
        });
        prop::collection::vec(list, nodes as usize)
    })
}

/// Few edges, so that some nodes are met once.
fn sparse_lists() -> impl Strategy<Value = Vec<Vec<u64>>> {
    let list = prop::collection::vec(0u64..80, 0..4).prop_map(|mut list| {
        list.sort_unstable();
        list
    });
    prop::collection::vec(list, 80)
}

fn fanouts() -> impl Strategy<Value = Vec<Fanout>> {
    let one = prop_oneof![4 => (1u32..8).prop_map(Fanout::AtMost), 1 => Just(Fanout::All)];
    prop::collection::vec(one, 0..4)
}

fn deep_fanouts() -> impl Strategy<Value = Vec<Fanout>> {
    let one = prop_oneof![4 => (1u32..5).prop_map(Fanout::AtMost), 1 => Just(Fanout::All)];
    prop::collection::vec(one, 2..5)
}

/// Follows what the targets need, value by value: value l of a node is what enters layer l, value L is the output.
/// Whatever is needed and not supplied must be computed by its layer from its inputs, and nothing else may be.
fn check_needed(sample: &Sample, seeds: &[NodeId], pulls: impl Fn(usize, NodeId) -> bool) {
    let layers = sample.layers();
    let (first, block) = (sample.blocks[0].first, &sample.blocks[0]);
    let nbrs = |node: u32| match node.checked_sub(first) {
        Some(at) => {
            &block.nbrs[block.nbr_offsets[at as usize] as usize..block.nbr_offsets[at as usize + 1] as usize]
        }
        None => panic!("the neighbours of node {node} are needed and were not sampled"),
    };
    let targets: HashSet<u64> = seeds.iter().map(|seed| seed.0).collect();
    let all = 0..sample.node_ids.len() as u32;
    // By value: those of layer L first, features last.
    let mut needed: Vec<HashSet<u32>> = vec![HashSet::new(); layers + 1];
    needed[layers] = all.filter(|node| targets.contains(&sample.node_ids[*node as usize].0)).collect();
    let mut supplied = needed.iter().map(|_| HashSet::new()).collect::<Vec<HashSet<u32>>>();
    for value in (1..=layers).rev() {
        for node in needed[value].clone() {
            // It is asked about the last of a node's values that is needed, and that one is its level at this hop.
            let is_last = !needed[value + 1..].iter().any(|above| above.contains(&node));
            let hop = layers - value;
            if hop > 0 && is_last && pulls(hop, sample.node_ids[node as usize]) {
                supplied[value].insert(node);
                continue;
            }
            needed[value - 1].insert(node);
            needed[value - 1].extend(nbrs(node).iter().map(|nbr| nbr.0));
        }
    }
    for layer in 0..layers {
        let view = sample.layer(layer);
        let computed: HashSet<u32> = needed[layer + 1].difference(&supplied[layer + 1]).copied().collect();
        assert_eq!(view.outputs.collect::<HashSet<u32>>(), computed);
        assert_eq!(view.inputs.collect::<HashSet<u32>>(), needed[layer]);
    }
    for hop in 1..layers {
        assert_eq!(supplied[layers - hop], sample.pulled_nodes(hop).collect());
    }
    assert_eq!(sample.node_ids.len(), needed[0].len(), "no row is there that no layer needs");
}

fn forms() -> impl Strategy<Value = Form> {
    prop_oneof![Just(Form::Dense), Just(Form::Layered), Just(Form::Shadow)]
}

fn directions() -> impl Strategy<Value = Direction> {
    prop_oneof![Just(Direction::Incoming), Just(Direction::Outgoing), Just(Direction::Both)]
}

fn settings(fanouts: Vec<Fanout>, form: Form, carry: Carry) -> Settings {
    Settings { seed: 11, fanouts, form, carry }
}

fn seeds_of(lists: &[Vec<u64>], picks: &[u64]) -> Vec<NodeId> {
    picks.iter().map(|pick| NodeId(pick % lists.len() as u64)).collect()
}

fn sampled_at<T: Topology>(graph: &T, settings: &Settings, at: Position, seeds: &[NodeId]) -> Sample {
    let mut sample = Sample::default();
    Sampler::new(graph, settings.clone(), PLENTY).unwrap().sample(at, seeds, &mut sample).unwrap();
    sample
}

/// A topology whose lists are never at hand, as if they were on disk.
struct Fetching<W>(InMemory<W>);

/// Counts what was fetched, as a workspace can.
#[derive(Default)]
struct Counted(u64);

impl TopologyWorkspace for Counted {
    fn bytes(&self) -> u64 {
        self.0.min(1000)
    }
}

impl<W: StoredId> Topology for Fetching<W> {
    type StoredId = W;
    type Workspace = Counted;
    type HopInMemory<'a> = NotInMemory<W>;
    fn nodes(&self) -> u64 {
        self.0.nodes()
    }
    fn entries(&self) -> u64 {
        self.0.entries()
    }
    fn has_relations(&self) -> bool {
        self.0.has_relations()
    }
    fn hop_in_memory(&self, _: &[NodeId], _: &Counted) -> Result<Option<NotInMemory<W>>> {
        Ok(None)
    }
    fn degrees(&self, nodes: &[NodeId], _: &Counted, out: &mut Vec<u32>) -> Result<()> {
        self.0.degrees(nodes, &(), out)
    }
    fn fetch(
        &self,
        requested: RequestedEntries,
        workspace: &mut Counted,
        out: &mut Fetched<W>,
    ) -> Result<()> {
        workspace.0 += requested.positions.len() as u64;
        self.0.fetch(requested, &mut (), out)
    }
}

fn sampled<T: Topology>(graph: &T, settings: &Settings, seeds: &[NodeId], most_bytes: u64) -> Sample {
    let mut sample = Sample::default();
    let mut sampler = Sampler::new(graph, settings.clone(), most_bytes).unwrap();
    // Once before, so that what an earlier batch left behind is met.
    sampler.sample(Position { epoch: 0, batch: 0 }, seeds, &mut sample).unwrap();
    sampler.sample(AT, seeds, &mut sample).unwrap();
    sample
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn samples_equal_the_reference(
        lists in lists(), fanouts in fanouts(), form in forms(), direction in directions(), carried: bool,
        picks in prop::collection::vec(0u64..1000, 0..12),
    ) {
        let carry = Carry { positions: carried, edges: carried, relations: carried, degrees: carried };
        let relations: Vec<u32> = (0..lists.concat().len() as u32).map(|edge| edge * 7 % 5).collect();
        let (settings, seeds) = (settings(fanouts, form, carry), seeds_of(&lists, &picks));
        let expected = Reference::new(&lists, Some(&relations), direction).sample(&settings, AT, &seeds);
        let narrow = InMemory::<u32>::from_adjacency(&lists, Some(relations.clone())).in_direction(direction);
        prop_assert_eq!(&sampled(&narrow, &settings, &seeds, PLENTY), &expected);
        let wide = InMemory::<u64>::from_adjacency(&lists, Some(relations)).in_direction(direction);
        prop_assert_eq!(&sampled(&wide, &settings, &seeds, PLENTY), &expected);
        prop_assert_eq!(&sampled(&Fetching(narrow), &settings, &seeds, PLENTY), &expected);
    }

    #[test]
    fn samples_with_pulled_nodes_equal_the_reference_and_have_what_is_needed(
        lists in sparse_lists(), fanouts in deep_fanouts(), picks in prop::collection::vec(0u64..1000, 0..6),
        kept in 0u64..6, hops in 1usize..5, degrees: bool, edges: bool, direction in directions(),
        threads in 1usize..3,
    ) {
        let carry = Carry { degrees, positions: edges, edges, ..Carry::default() };
        let (settings, seeds) = (settings(fanouts, Form::Dense, carry), seeds_of(&lists, &picks));
        let pulls = |hop: usize, node: NodeId| hop <= hops && (node.0 + hop as u64) * 31 % 5 >= kept;
        let reference = Reference::new(&lists, None, direction);
        let expected = reference.sample_with_pulls(&settings, AT, &seeds, pulls);
        let graph = InMemory::<u32>::from_adjacency(&lists, None).in_direction(direction);
        let mut sample = Sample::default();
        let mut sampler = Sampler::new(&graph, settings.clone(), PLENTY).unwrap().with_threads(threads);
        let bound = sampler.bound(seeds.len() as u64);
        sampler.sample(AT, &seeds, &mut sample).unwrap();
        let without = sample.clone();
        sampler.sample_with_pulls(AT, &seeds, &mut |hop, _, node| pulls(hop, node), &mut sample).unwrap();
        prop_assert_eq!(&sample, &expected);
        check_needed(&sample, &seeds, pulls);
        prop_assert!(sample.allocated_bytes() <= bound.sample_bytes.max(without.allocated_bytes()));
        prop_assert!(sampler.bytes() <= bound.buffer_bytes + bound.direct_bytes, "{} {bound:?}", sampler.bytes());
        // Of up to three layers, what is left is a part of what is sampled without pulled nodes.
        if settings.fanouts.len() <= 3 {
            prop_assert!(sample.edge_count() <= without.edge_count());
            prop_assert!(sample.node_ids.iter().all(|node| without.node_ids.contains(node)));
        }
        if !sample.has_pulled() {
            prop_assert_eq!(&sample, &without);
        }
        let mut sampler = Sampler::new(Fetching(graph), settings, PLENTY).unwrap();
        sampler.sample_with_pulls(AT, &seeds, &mut |hop, _, node| pulls(hop, node), &mut sample).unwrap();
        prop_assert_eq!(&sample, &expected);
    }

    /// Whatever the graph: no batch has more than its bound, and none is refused that much.
    #[test]
    fn a_batch_stays_within_its_bound(
        lists in lists(), fanouts in fanouts(), form in forms(), direction in directions(), carried: bool,
        picks in prop::collection::vec(0u64..1000, 0..12),
    ) {
        let carry = Carry { positions: carried, edges: carried, relations: false, degrees: carried };
        let (settings, seeds) = (settings(fanouts, form, carry), seeds_of(&lists, &picks));
        let graph = InMemory::<u32>::from_adjacency(&lists, None).in_direction(direction);
        let (mut sample, mut sampler) = (Sample::default(), Sampler::new(&graph, settings.clone(), PLENTY).unwrap());
        let bound = sampler.bound(seeds.len() as u64);
        for batch in 0..3 {
            sampler.sample(Position { epoch: 0, batch }, &seeds, &mut sample).unwrap();
            prop_assert!(sample.node_ids.len() as u64 <= bound.nodes && sample.edge_count() <= bound.edges);
            prop_assert!(sample.allocated_bytes() <= bound.sample_bytes, "{} {bound:?}", sample.allocated_bytes());
            prop_assert!(sampler.bytes() <= bound.buffer_bytes + bound.direct_bytes, "{} {bound:?}", sampler.bytes());
        }
        let mut frugal = Sampler::new(&graph, settings, bound.bytes(1)).unwrap();
        frugal.sample(Position { epoch: 0, batch: 2 }, &seeds, &mut sample).unwrap();
        prop_assert!(frugal.bytes() + sample.allocated_bytes() <= bound.bytes(1));
    }

    /// With any allowance a batch comes out as it should, or is refused; never is more than the allowance held, and what
    /// came before does not decide it.
    #[test]
    fn memory_is_kept_or_refused(
        lists in lists(), fanouts in fanouts(), form in forms(), most in 20_000u64..120_000,
        picks in prop::collection::vec(0u64..1000, 1..12),
    ) {
        let (settings, seeds) = (settings(fanouts, form, Carry::default()), seeds_of(&lists, &picks));
        let graph = InMemory::<u32>::from_adjacency(&lists, None);
        let (mut sampler, mut sample) = (Sampler::new(&graph, settings.clone(), most).unwrap(), Sample::default());
        for batch in 0..6 {
            let at = Position { epoch: 0, batch };
            let some = &seeds[..seeds.len().min(1 + batch as usize * 3)];
            let result = sampler.sample(at, some, &mut sample);
            prop_assert!(sampler.bytes() + sample.allocated_bytes() <= most);
            let (mut fresh, mut again) = (Sampler::new(&graph, settings.clone(), most).unwrap(), Sample::default());
            let alone = fresh.sample(at, some, &mut again);
            prop_assert_eq!(result.is_ok() || alone.is_err(), true, "{:?}", result);
            if result.is_ok() {
                prop_assert_eq!(&sample, &sampled_at(&graph, &settings, at, some));
            }
        }
    }
}

/// A graph large enough for several waves and threads.
fn large() -> Vec<Vec<u64>> {
    let nodes = 20_000u64;
    let list = |node: u64| {
        let degree = 3 + node % 37 + if node.is_multiple_of(500) { 400 } else { 0 };
        let mut list: Vec<u64> =
            (0..degree).map(|slot| (node * 7919 + slot * slot * 104_729) % nodes).collect();
        list.sort_unstable();
        list
    };
    (0..nodes).map(list).collect()
}

fn check_threads(form: Form, most_bytes: u64) {
    let graph = InMemory::<u32>::from_adjacency(&large(), None);
    let settings = settings(
        vec![Fanout::AtMost(10); 3],
        form,
        Carry { positions: true, edges: true, ..Carry::default() },
    );
    let seeds: Vec<NodeId> = (0..700).map(|seed| NodeId(seed * 13)).collect();
    let expected = sampled(&graph, &settings, &seeds, most_bytes);
    for threads in [2, 4, 8] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let mut sample = Sample::default();
        let sampler = Sampler::new(&graph, settings.clone(), most_bytes).unwrap();
        let mut sampler = sampler.with_threads(threads);
        pool.install(|| sampler.sample(AT, &seeds, &mut sample)).unwrap();
        assert!(sample == expected, "{form:?} with {threads} threads");
    }
}

#[test]
fn any_number_of_threads_gives_the_same_dense_sample() {
    check_threads(Form::Dense, PLENTY);
}

#[test]
fn any_number_of_threads_gives_the_same_layered_sample() {
    check_threads(Form::Layered, PLENTY);
}

#[test]
fn any_number_of_threads_gives_the_same_shadow_sample() {
    check_threads(Form::Shadow, PLENTY);
}

/// A graph whose direct table would take more than the batch: 20 000 linked nodes of 4 million.
fn check_hashed(form: Form) {
    let mut lists = large();
    lists.resize(4_000_000, Vec::new());
    let graph = InMemory::<u32>::from_adjacency(&lists, None);
    let settings = settings(vec![Fanout::AtMost(10); 3], form, Carry::default());
    let seeds: Vec<NodeId> = (0..700).map(|seed| NodeId(seed * 13)).collect();
    let expected = sampled(&graph, &settings, &seeds, PLENTY);
    for threads in [1, 2, 8] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let mut sample = Sample::default();
        let mut sampler = Sampler::new(&graph, settings.clone(), 30_000_000).unwrap().with_threads(threads);
        assert!(sampler.bytes() < 1 << 20, "a hash table, which starts small");
        pool.install(|| sampler.sample(AT, &seeds, &mut sample)).unwrap();
        assert!(sampler.bytes() > 1 << 20, "and grows");
        assert!(sample == expected, "{form:?} with {threads} threads");
    }
}

#[test]
fn a_hash_table_that_grows_gives_the_same_samples_with_any_threads() {
    check_hashed(Form::Dense);
    check_hashed(Form::Layered);
    check_hashed(Form::Shadow);
}

#[test]
fn large_batches_equal_the_reference() {
    let lists = large();
    let graph = InMemory::<u32>::from_adjacency(&lists, None);
    let seeds: Vec<NodeId> = (0..1500).map(|seed| NodeId(seed * 13)).collect();
    for form in [Form::Dense, Form::Layered] {
        let settings = settings(vec![Fanout::AtMost(3), Fanout::All], form, Carry::default());
        let expected = Reference::new(&lists, None, Direction::Incoming).sample(&settings, AT, &seeds);
        assert!(sampled(&graph, &settings, &seeds, PLENTY) == expected, "{form:?}");
    }
}

#[test]
fn a_hash_table_gives_the_same_sample_as_a_direct_one() {
    let graph = InMemory::<u32>::from_adjacency(&large(), None);
    let settings = settings(vec![Fanout::AtMost(2), Fanout::AtMost(2)], Form::Dense, Carry::default());
    let seeds: Vec<NodeId> = (0..20).map(|seed| NodeId(seed * 97)).collect();
    // The direct table alone would take 80 000 bytes.
    assert_eq!(sampled(&graph, &settings, &seeds, 140_000), sampled(&graph, &settings, &seeds, PLENTY));
}

fn shuffled(seeds: Vec<NodeId>, batch: u64) -> NodeBatches<Shuffled, Seeds> {
    let batching = Batching::new(seeds.len() as u64, batch, false).unwrap();
    NodeBatches::new(Shuffled { batching, seed: 9 }, Seeds::Nodes(seeds)).unwrap()
}

fn check_bulk(form: Form) {
    let graph = InMemory::<u32>::from_adjacency(&large(), None);
    let settings = settings(vec![Fanout::AtMost(5); 2], form, Carry::default());
    let batches = shuffled((0..5000).map(NodeId).collect(), 300);
    // From the middle of an epoch into the next but one.
    let requested: Vec<Position> = positions(&batches, Position { epoch: 1, batch: 14 }, 3).collect();
    assert_eq!(requested.len(), 3 + 17);
    let (mut sampler, mut seeds) = (Sampler::new(&graph, settings.clone(), PLENTY).unwrap(), Vec::new());
    let one_by_one = requested.iter().map(|at| {
        let mut sample = Sample::default();
        batches.seeds(*at, &mut seeds).unwrap();
        sampler.sample(*at, &seeds, &mut sample).unwrap();
        (*at, sample)
    });
    let expected: Vec<_> = one_by_one.collect();
    for threads in [1, 2, 4, 8] {
        let bulk =
            Bulk { graph: &graph, batches: &batches, settings: &settings, threads, most_bytes: PLENTY };
        let mut samples = Vec::new();
        bulk.run::<SampleError>(requested.iter().copied(), |at, sample| {
            samples.push((at, sample.clone()));
            Ok(())
        })
        .unwrap();
        assert!(samples == expected, "{form:?}, {threads} threads");
    }
}

#[test]
fn bulk_sampling_equals_batch_by_batch_for_any_number_of_threads() {
    check_bulk(Form::Dense);
    check_bulk(Form::Layered);
    check_bulk(Form::Shadow);
}

#[test]
fn bulk_sampling_takes_fewer_threads_before_it_is_refused() {
    let graph = InMemory::<u32>::from_adjacency(&large(), None);
    let settings = settings(vec![Fanout::AtMost(5); 2], Form::Dense, Carry::default());
    let batches = shuffled((0..5000).map(NodeId).collect(), 300);
    let bulk =
        |most_bytes| Bulk { graph: &graph, batches: &batches, settings: &settings, threads: 8, most_bytes };
    let one = Bound::new(&settings, 300, graph.nodes(), graph.entries(), 1).bytes(4);
    assert_eq!(
        [bulk(one - 1).workers(300), bulk(3 * one).workers(300), bulk(PLENTY).workers(300)],
        [1, 3, 8]
    );
    let mut taken = 0;
    let all = positions(&batches, Position { epoch: 0, batch: 0 }, 1);
    let count = |_: Position, _: &Sample| {
        taken += 1;
        Ok::<(), SampleError>(())
    };
    bulk(one).run(all.clone(), count).unwrap();
    assert_eq!(taken, 17);
    let said = bulk(40_000).run::<SampleError>(all, |_, _| Ok(())).unwrap_err().to_string();
    assert!(said.contains("smaller batches"), "{said}");
}

#[test]
fn an_error_ends_bulk_sampling() {
    let graph = InMemory::<u32>::from_adjacency(&large(), None);
    let settings = settings(vec![Fanout::AtMost(5)], Form::Dense, Carry::default());
    let batches = shuffled((0..5000).map(|seed| NodeId(seed * 5)).collect(), 10);
    let bulk = Bulk { graph: &graph, batches: &batches, settings: &settings, threads: 4, most_bytes: PLENTY };
    let result: Result<()> = bulk.run(positions(&batches, Position { epoch: 0, batch: 0 }, 1), |_, _| Ok(()));
    assert!(result.unwrap_err().to_string().contains("nodes 0 to 19999"));
}

/// Batches of one seed each, and which of them were begun.
#[derive(Default)]
struct Watched {
    begun: Mutex<Vec<u64>>,
    panics_at: Option<u64>,
}

impl Batches for Watched {
    fn count(&self, _: u64) -> u64 {
        1000
    }

    fn seeds(&self, at: Position, out: &mut Vec<NodeId>) -> Result<()> {
        assert_ne!(Some(at.batch), self.panics_at, "seeds that panic");
        self.begun.lock().unwrap().push(at.batch);
        *out = vec![NodeId(at.batch)];
        Ok(())
    }

    fn dropped(&self, _: Position, out: &mut Vec<esker_sample::Edge>) -> Result<()> {
        out.clear();
        Ok(())
    }

    fn identity(&self) -> String {
        "watched".into()
    }
}

fn run_watched(
    batches: &Watched,
    threads: usize,
    positions: impl Iterator<Item = Position> + Clone + Send,
    take: impl FnMut(Position, &Sample) -> Result<()>,
) -> Result<()> {
    let graph = InMemory::<u32>::from_adjacency(&large(), None);
    let settings = settings(vec![Fanout::AtMost(5)], Form::Dense, Carry::default());
    Bulk { graph: &graph, batches, settings: &settings, threads, most_bytes: PLENTY }.run(positions, take)
}

#[test]
fn after_an_error_no_batch_is_begun() {
    for threads in [1, 3] {
        let (batches, failed) = (Watched::default(), AtomicBool::new(false));
        // Every worker makes one batch, and turns to its next when the error has arrived.
        let all = positions(&batches, Position { epoch: 0, batch: 0 }, 1).inspect(|at| {
            while at.batch == threads as u64 && !failed.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_millis(1));
            }
            if at.batch == threads as u64 {
                std::thread::sleep(Duration::from_millis(100));
            }
        });
        let result = run_watched(&batches, threads, all, |at, _| {
            assert_eq!(at.batch, 0);
            failed.store(true, Ordering::Release);
            Err(SampleError::Seed { found: 77, last: 7 })
        });
        assert!(result.unwrap_err().to_string().contains("77"));
        let begun = batches.begun.lock().unwrap();
        assert!(begun.iter().all(|batch| *batch < threads as u64), "{threads} threads: {begun:?}");
    }
}

#[test]
fn a_panic_of_a_worker_ends_bulk_sampling() {
    for (threads, panics_at) in [(1, 4), (3, 4), (3, 1), (4, 0)] {
        let batches = Watched { panics_at: Some(panics_at), ..Watched::default() };
        let all = positions(&batches, Position { epoch: 0, batch: 0 }, 1);
        let mut taken = 0;
        let run = std::panic::AssertUnwindSafe(|| {
            run_watched(&batches, threads, all, |_, _| {
                taken += 1;
                Ok(())
            })
        });
        let panic = std::panic::catch_unwind(run).unwrap_err();
        let said = panic.downcast_ref::<String>().unwrap();
        assert!(said.contains("seeds that panic"), "{said}");
        assert_eq!(taken, panics_at, "batches before it arrive");
    }
}

#[test]
fn a_batch_beyond_its_memory_is_refused_with_what_would_do() {
    let graph = InMemory::<u32>::from_adjacency(&large(), None);
    let settings = settings(vec![Fanout::All; 3], Form::Dense, Carry::default());
    let seeds: Vec<NodeId> = (0..500).map(NodeId).collect();
    let mut sample = Sample::default();
    let mut sampler = Sampler::new(&graph, settings.clone(), 1 << 20).unwrap();
    let said = sampler.sample(AT, &seeds, &mut sample).unwrap_err().to_string();
    assert!(said.contains("1 MiB") && said.contains("smaller"), "{said}");
    let mut sampler = Sampler::new(&graph, settings, PLENTY).unwrap();
    sampler.sample(AT, &seeds, &mut sample).unwrap();
    let bound = sampler.bound(500);
    let (nodes, edges) = (sample.node_ids.len() as u64, sample.edge_count());
    assert!(nodes <= bound.nodes && edges <= bound.edges && sample.bytes() <= bound.sample_bytes);
    assert!(sampler.bytes() <= bound.buffer_bytes + bound.direct_bytes);
}
