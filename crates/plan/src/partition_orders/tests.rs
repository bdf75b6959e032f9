use super::*;
use proptest::prelude::*;
use std::collections::BTreeSet;

fn order(kind: PartitionOrderKind, counts: (u32, u32, u32), seed: u64) -> PartitionOrder {
    let (partitions, resident, logical) = counts;
    let counts = PartitionCounts { partitions, resident, logical };
    PartitionOrder::new(kind, counts, 1, seed).unwrap()
}

/// An order that may be had: kind, logical partitions, those resident, partitions in each.
fn any_order() -> impl Strategy<Value = PartitionOrder> {
    any_of(&PartitionOrderKind::ALL)
}

fn any_of(kinds: &'static [PartitionOrderKind]) -> impl Strategy<Value = PartitionOrder> {
    (0..kinds.len(), 1u32..14, 0.0f64..1.0, 1u32..5, any::<u64>()).prop_map(
        |(kind, count, share, each, seed)| {
            let kind = kinds[kind];
            let (logical, least, each) = match kind {
                PartitionOrderKind::Tour if count > 1 => (2 * (count / 2) + 1, 2, each),
                PartitionOrderKind::Beta => (count, 2, 1),
                PartitionOrderKind::TwoLevelBeta => (count, 2, each),
                _ => (count, 1, each),
            };
            let resident = match kind {
                PartitionOrderKind::Tour => 2.min(logical),
                _ => least.min(logical) + (share * (logical - least.min(logical) + 1) as f64) as u32,
            };
            let counts = PartitionCounts {
                partitions: logical * each,
                resident: resident.min(logical) * each,
                logical,
            };
            let training = (counts.resident - 1).min(1 + (seed % 4) as u32);
            PartitionOrder::new(kind, counts, training, seed).unwrap()
        },
    )
}

/// Every step is what the step before becomes by its swaps, a partition is resident once, and keeps its slot.
fn check_residents(order: &PartitionOrder, steps: &[PartitionStep]) {
    let counts = order.counts();
    let mut resident = steps[0].resident.clone();
    assert!(steps[0].swaps.is_empty());
    for step in steps {
        for swap in &step.swaps {
            assert_eq!(resident[swap.slot as usize], swap.leaves);
            assert!(!resident.contains(&swap.enters));
            resident[swap.slot as usize] = swap.enters;
        }
        assert_eq!(resident, step.resident);
        let different: BTreeSet<_> = step.resident.iter().collect();
        assert_eq!(different.len() as u32, counts.resident);
        assert!(step.resident.iter().all(|partition| partition.0 < counts.partitions));
    }
}

/// Everything is trained once, where it is resident.
fn check_work(order: &PartitionOrder, steps: &[PartitionStep]) {
    let partitions = order.counts().partitions;
    let (mut buckets, mut nodes) = (Vec::new(), Vec::new());
    for step in steps {
        let here = |partition: &PartitionId| step.resident.contains(partition);
        match &step.work {
            StepWork::Buckets(trained) => {
                assert!(
                    trained.is_sorted()
                        && trained.iter().all(|bucket| here(&bucket.source) && here(&bucket.target))
                );
                buckets.extend(trained.iter().map(|bucket| bucket.index(partitions)));
            }
            StepWork::Partitions(trained) => {
                assert!(trained.is_sorted() && trained.iter().all(here));
                nodes.extend(trained.iter().map(|partition| partition.0));
            }
        }
    }
    buckets.sort_unstable();
    nodes.sort_unstable();
    let trained = match order.kind() {
        PartitionOrderKind::TrainingFirst => order.training,
        _ => partitions,
    };
    match order.kind().trains_edges() {
        true => assert!(nodes.is_empty() && buckets.into_iter().eq(0..(partitions as usize).pow(2))),
        false => assert!(buckets.is_empty() && nodes.into_iter().eq(0..trained)),
    }
}

/// The definition of the bias, node by node and edge by edge: each partition has two nodes, each pair of nodes an edge in
/// each direction, loops included.
fn bias_of_every_edge(partitions: u32, steps: &[PartitionStep]) -> f64 {
    let nodes = 2 * partitions as usize;
    let mut seen = vec![0u64; nodes];
    let mut gaps = Vec::new();
    for step in steps {
        let StepWork::Buckets(buckets) = &step.work else { panic!("buckets") };
        for (source, target) in (0..nodes).flat_map(|source| (0..nodes).map(move |target| (source, target))) {
            let partition = |node: usize| PartitionId(node as u32 / 2);
            if buckets.contains(&EdgeBucket { source: partition(source), target: partition(target) }) {
                seen[source] += 1;
                seen[target] += 1;
            }
        }
        let tallies: Vec<f64> = seen.iter().map(|count| *count as f64 / (2 * nodes) as f64).collect();
        for one in &tallies {
            gaps.extend(tallies.iter().map(|other| one - other));
        }
    }
    assert!(seen.iter().all(|count| *count == 2 * nodes as u64));
    gaps.into_iter().fold(0.0, f64::max)
}

proptest! {
    #[test]
    fn everything_is_trained_once_while_it_is_resident(order in any_order(), epoch in 0u64..5) {
        let steps = order.steps(epoch);
        prop_assert_eq!(&steps, &order.steps(epoch));
        check_residents(&order, &steps);
        check_work(&order, &steps);
        prop_assert_eq!(steps.len() as u64, order.step_count());
        prop_assert_eq!(steps.iter().map(|step| step.swaps.len() as u64).sum::<u64>(), order.swaps());
        // One logical partition at a time.
        let each = order.counts().each() as usize;
        prop_assert!(steps[1..].iter().all(|step| step.swaps.len() == each));
    }

    #[test]
    fn the_bias_is_that_of_every_edge(order in any_of(&PartitionOrderKind::ALL[..3]), epoch in 0u64..3) {
        prop_assume!(order.counts().partitions <= 24);
        let steps = order.steps(epoch);
        let partitions = order.counts().partitions;
        let (found, expected) = (edge_permutation_bias(partitions, &steps), bias_of_every_edge(partitions, &steps));
        prop_assert!((found - expected).abs() < 1e-9, "{} {}", found, expected);
    }

    #[test]
    fn beta_trains_a_bucket_when_its_partitions_first_meet(order in any_of(&PartitionOrderKind::ALL[..1]), epoch in 0u64..3) {
        let steps = order.steps(epoch);
        for (at, step) in steps.iter().enumerate() {
            let StepWork::Buckets(buckets) = &step.work else { panic!("buckets") };
            for bucket in buckets {
                let both = |step: &PartitionStep| {
                    step.resident.contains(&bucket.source) && step.resident.contains(&bucket.target)
                };
                prop_assert_eq!(steps.iter().position(both), Some(at));
            }
        }
    }

    #[test]
    fn what_was_tuned_fits_and_is_an_order(
        kind in 0usize..5, nodes in 1u64..1_000_000, row in 1u64..900, degree in 0u64..40, training in 0.0f64..1.0,
        read in prop::sample::select(vec![1u64, 4096, 1 << 17]), share in 0.0f64..1.5,
    ) {
        let request = BufferRequest {
            kind: PartitionOrderKind::ALL[kind],
            nodes,
            training_nodes: (training * training * nodes as f64) as u64,
            row_bytes: nodes * row,
            edge_bytes: nodes * degree * 12,
            edge_copies: 2,
            read_bytes: read.max(nodes / 100),
            memory_bytes: (share * (nodes * row + nodes * degree * 24) as f64) as u64,
            working_bytes: 1000,
        };
        match request.tune() {
            Ok(tuning) => {
                let counts = tuning.counts;
                prop_assert!(tuning.bytes.total() <= request.memory_bytes);
                prop_assert!(counts.partitions <= tuning.most_partitions);
                let training = request.training_partitions(counts.partitions);
                let order = PartitionOrder::new(tuning.kind, counts, training, 1);
                prop_assert!(order.is_ok(), "{:?}", order);
                prop_assert_eq!(tuning.kind != request.kind, tuning.reasons(&request).len() == 4);
            }
            Err(refused) => prop_assert!(refused.needed_bytes > refused.memory_bytes),
        }
    }
}

/// The fewest swaps with which every pair of `count` partitions meets, where `resident` fit.
fn swap_bound(count: u64, resident: u64) -> u64 {
    (count * (count - 1) - resident * (resident - 1)).div_ceil(2 * (resident - 1))
}

#[test]
fn swaps_are_as_many_as_the_papers_say() {
    let beta = |l, c| order(PartitionOrderKind::Beta, (l, c, l), 3).swaps();
    assert_eq!((beta(8, 2), swap_bound(8, 2)), (27, 27));
    assert_eq!((beta(32, 8), swap_bound(32, 8)), (78, 67));
    let two_level = order(PartitionOrderKind::TwoLevelBeta, (32, 8, 8), 3);
    assert_eq!((two_level.swaps(), two_level.step_count()), (27 * 4, 28));
    for (l, bound) in [(3, 2), (5, 9), (9, 35), (17, 135)] {
        let tour = order(PartitionOrderKind::Tour, (4 * l, 8, l), 3);
        assert_eq!((tour.swaps() / 4, swap_bound(l as u64, 2)), (bound, bound));
    }
    assert_eq!(order(PartitionOrderKind::Dispersed, (16, 4, 16), 3).swaps(), 12);
    assert_eq!(order(PartitionOrderKind::Dispersed, (16, 4, 4), 3).swaps(), 12);
    assert_eq!(order(PartitionOrderKind::TrainingFirst, (16, 4, 16), 3).swaps(), 0);
}

/// The mean bias over orders.
fn mean_bias(kind: PartitionOrderKind, counts: (u32, u32, u32)) -> f64 {
    let biases = (0..50).map(|seed| edge_permutation_bias(counts.0, &order(kind, counts, seed).steps(seed)));
    biases.sum::<f64>() / 50.0
}

#[test]
fn a_tour_has_a_third_of_the_bias() {
    let beta = mean_bias(PartitionOrderKind::Beta, (9, 2, 9));
    let tour = mean_bias(PartitionOrderKind::Tour, (36, 8, 9));
    assert!((beta - 0.89).abs() < 0.01 && (tour - 0.33).abs() < 0.02, "{beta} {tour}");
    for partitions in [8, 32, 64] {
        let two_level = mean_bias(PartitionOrderKind::TwoLevelBeta, (partitions, partitions / 4, 8));
        assert!((two_level - 0.875).abs() < 0.02, "{partitions}: {two_level}");
    }
}

#[test]
fn steps_are_chosen_evenly() {
    // In a tour, the buckets inside a logical partition have 8 steps each.
    let mut counts = [0u64; 8];
    for seed in 0..500 {
        let steps = order(PartitionOrderKind::Tour, (9, 2, 9), seed).steps(0);
        let own = EdgeBucket { source: PartitionId(4), target: PartitionId(4) };
        let with = steps.iter().filter(|step| step.resident.contains(&PartitionId(4)));
        let at = with
            .into_iter()
            .position(|step| matches!(&step.work, StepWork::Buckets(all) if all.contains(&own)));
        counts[at.unwrap()] += 1;
    }
    let sum: f64 = counts.iter().map(|count| (*count as f64 - 62.5).powi(2) / 62.5).sum();
    // 7 degrees of freedom: 24.3 is the 99.9% quantile.
    assert!(sum < 24.3, "{counts:?}");
}

#[test]
fn epochs_and_seeds_differ() {
    let of = |seed, epoch| order(PartitionOrderKind::TwoLevelBeta, (32, 8, 8), seed).steps(epoch);
    assert_ne!(of(1, 0), of(1, 1));
    assert_ne!(of(1, 0), of(2, 0));
    let first =
        |epoch| order(PartitionOrderKind::TrainingFirst, (16, 4, 16), 1).steps(epoch)[0].resident.clone();
    assert_eq!((first(0)[0], first(1)[0]), (PartitionId(0), PartitionId(0)));
    assert_ne!(first(0), first(1));
}

fn refused(kind: PartitionOrderKind, counts: (u32, u32, u32)) -> String {
    let (partitions, resident, logical) = counts;
    let counts = PartitionCounts { partitions, resident, logical };
    PartitionOrder::new(kind, counts, 5, 1).unwrap_err().to_string()
}

#[test]
fn counts_that_do_not_go_together_are_refused() {
    use PartitionOrderKind::*;
    for (kind, counts, expected) in [
        (Beta, (0, 1, 1), "0 partitions are asked for"),
        (Beta, (8, 0, 8), "0 resident partitions"),
        (TwoLevelBeta, (8, 2, 0), "0 logical partitions"),
        (Beta, (8, 9, 8), "9 resident partitions of 8 partitions are asked for; give at most 8"),
        (TwoLevelBeta, (8, 2, 9), "9 logical partitions of 8"),
        (TwoLevelBeta, (32, 8, 5), "32 partitions do not make 5 equal"),
        (TwoLevelBeta, (32, 6, 8), "make --resident a multiple of 4"),
        (TwoLevelBeta, (32, 4, 8), "give --resident 8 or more"),
        (Beta, (32, 8, 8), "leave --logical out"),
        (Tour, (32, 8, 8), "give --logical 7 or 9"),
        (
            Tour,
            (36, 12, 9),
            "keeps 2 of 9 logical partitions resident, 8 partitions, and --resident is 12; give --resident 8",
        ),
        (Tour, (36, 36, 9), "give --resident 8"),
        (TrainingFirst, (16, 5, 16), "fill 5 partitions and 5 are resident"),
    ] {
        let said = refused(kind, counts);
        assert!(said.contains(expected), "{said}");
    }
}

#[test]
fn what_is_left_out_is_chosen() {
    let of = |kind, partitions, resident| PartitionCounts::of(kind, partitions, resident, None).logical;
    assert_eq!(of(PartitionOrderKind::TwoLevelBeta, 32, 8), 8);
    assert_eq!(of(PartitionOrderKind::Tour, 36, 8), 9);
    assert_eq!(of(PartitionOrderKind::Dispersed, 32, 8), 4);
    assert_eq!(of(PartitionOrderKind::Beta, 32, 8), 32);
    assert_eq!(of(PartitionOrderKind::Tour, 36, 36), 1);
}

const FREEBASE: BufferRequest = BufferRequest {
    kind: PartitionOrderKind::TwoLevelBeta,
    nodes: 86_100_000,
    training_nodes: 0,
    row_bytes: 86_100_000 * 800,
    edge_bytes: 338_000_000 * 12,
    edge_copies: 2,
    read_bytes: 4096,
    memory_bytes: 61_000_000_000,
    working_bytes: 4_000_000_000,
};

#[test]
fn freebase_on_the_papers_machine() {
    let tuning = FREEBASE.tune().unwrap();
    // sqrt(4.056e9 / 4096) = 995. Half of 69 GB, and half of that prefetched: 52 of 57 GB.
    assert_eq!(tuning.most_partitions, 995);
    assert_eq!(tuning.counts, PartitionCounts { partitions: 992, resident: 496, logical: 4 });
    let tour = BufferRequest { kind: PartitionOrderKind::Tour, ..FREEBASE }.tune().unwrap();
    assert_eq!(tour.counts.logical, 5);
    let order = PartitionOrder::new(tuning.kind, tuning.counts, 0, 1).unwrap();
    let cost = FREEBASE.epoch_cost(&order);
    assert_eq!((cost.steps, cost.swaps), (6, 5 * 248));
    let share = cost.row_bytes as f64 / FREEBASE.row_bytes as f64;
    assert!((share - (5.0 + 2.0) / 4.0).abs() < 1e-3, "{share}");
}

#[test]
fn a_buffer_for_everything_prefetches_nothing() {
    let large = BufferRequest { memory_bytes: 200 << 30, ..FREEBASE };
    let tuning = large.tune().unwrap();
    assert_eq!(tuning.counts, PartitionCounts { partitions: 995, resident: 995, logical: 1 });
    assert_eq!(tuning.bytes.prefetched_rows, 0);
    assert!(tuning.reasons(&large)[2].contains("everything is resident"));
}

#[test]
fn training_nodes_that_do_not_fit_are_dispersed() {
    let request = |training_nodes| BufferRequest {
        kind: PartitionOrderKind::TrainingFirst,
        training_nodes,
        ..FREEBASE
    };
    assert_eq!(request(1_000_000).tune().unwrap().kind, PartitionOrderKind::TrainingFirst);
    let many = request(86_000_000);
    let tuning = many.tune().unwrap();
    assert_eq!(tuning.kind, PartitionOrderKind::Dispersed);
    assert!(tuning.reasons(&many)[3].contains("order dispersed instead of training-first"));
}

#[test]
fn one_byte_too_few_is_refused() {
    let small = BufferRequest { read_bytes: 1 << 22, ..FREEBASE };
    let refused = BufferRequest { memory_bytes: 1000, ..small }.tune().unwrap_err();
    let needed_bytes = refused.needed_bytes;
    assert!(BufferRequest { memory_bytes: needed_bytes, ..small }.tune().is_ok());
    assert!(BufferRequest { memory_bytes: needed_bytes - 1, ..small }.tune().is_err());
}
