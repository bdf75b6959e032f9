//! Link prediction on the CPU against its definition: losses, gradients, ranks and learned rows.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

mod common;

use common::link::{DECODERS, LOSSES, LinkCase, SIDES, assert_close, check, csr};
use common::{matrix, numbers};
use esker_nn::*;
use esker_types::random::{Key, below};
use proptest::prelude::*;

/// Every decoder, loss and side.
fn all(each: impl Fn(DecoderKind, LinkLoss, ReplacedEnd)) {
    for decoder in DECODERS {
        for loss in LOSSES {
            SIDES.iter().for_each(|side| each(decoder, loss, *side));
        }
    }
}

#[test]
fn columns_are_copied_where_they_belong() {
    common::columns_are_copied(&CpuBackend::new());
}

#[test]
fn gradients_by_definition_equal_differences_of_the_loss() {
    all(|decoder, loss, side| {
        for shape in [[9, 7, 6, 3, 5], [9, 7, 6, 0, 0]] {
            let case = LinkCase::new(decoder, loss, side, shape, 5);
            let ((nodes, relations), (by_nodes, by_relations)) = (case.naive_gradients(), case.differences());
            let close = |found: &[f64], expected: &[f64]| {
                let pairs = found.iter().zip(expected);
                pairs.for_each(|(x, y)| {
                    assert!((x - y).abs() < 1e-6, "{decoder:?} {loss:?} {side:?}: {x} {y}")
                });
            };
            close(&nodes, &by_nodes);
            close(&relations, &by_relations);
        }
    });
}

#[test]
fn losses_and_gradients_equal_their_definition() {
    let backend = CpuBackend::new();
    all(|decoder, loss, side| {
        // Chunks that do not divide the edges, an edge each, one chunk, all nodes.
        for shape in [[30, 50, 10, 20, 70], [30, 13, 6, 1, 9], [20, 5, 4, 5, 1], [150, 9, 8, 0, 0]] {
            for by_node in [false, true] {
                check(&backend, &LinkCase::new(decoder, loss, side, shape, 7), by_node, 1e-5);
            }
        }
    });
}

#[test]
fn candidates_beyond_a_tile_and_edges_beyond_a_block_are_no_different() {
    let backend = CpuBackend::new();
    for decoder in DECODERS {
        let case = |shape| {
            let mut case = LinkCase::new(decoder, LinkLoss::Softmax, ReplacedEnd::Target, shape, 3);
            // Differences are exact: none has another sign in f64.
            case.nodes.iter_mut().chain(&mut case.relations).for_each(|x| *x = (*x * 64.0).round() / 64.0);
            case
        };
        check(&backend, &case([4200, 40, 6, 0, 0]), false, 1e-5);
        check(&backend, &case([50, 300, 6, 150, 20]), false, 1e-5);
        // Sums of thousands of numbers: their rounding shows.
        check(&backend, &case([50, 300, 6, 300, 4100]), true, 3e-5);
    }
}

#[test]
fn rows_wider_than_a_block_of_the_depth_are_no_different() {
    for decoder in DECODERS {
        let case = LinkCase::new(decoder, LinkLoss::Softmax, ReplacedEnd::Source, [40, 20, 300, 10, 30], 3);
        check(&CpuBackend::new(), &case, false, 2e-5);
    }
}

#[test]
fn waves_of_many_chunks_are_no_different() {
    // Packed candidates of all chunks together are more than a wave has.
    let shape = [100, 120, 64, 1, 700];
    let case = LinkCase::new(DecoderKind::DistMult, LinkLoss::Logistic, ReplacedEnd::Target, shape, 3);
    check(&CpuBackend::new(), &case, true, 1e-5);
}

#[test]
fn edges_without_negatives_have_the_loss_of_their_own_score() {
    let backend = CpuBackend::new();
    for loss in LOSSES {
        check(
            &backend,
            &LinkCase::new(DecoderKind::Dot, loss, ReplacedEnd::Target, [9, 5, 4, 2, 0], 2),
            false,
            1e-6,
        );
        let mut case = LinkCase::new(DecoderKind::Dot, loss, ReplacedEnd::Target, [9, 5, 4, 2, 3], 2);
        case.masked = (0..5).flat_map(|edge| (0..3).map(move |at| (edge, at))).collect();
        check(&backend, &case, false, 1e-6);
    }
}

#[test]
fn equal_rows_have_no_gradient_of_their_distance() {
    for decoder in DECODERS {
        let mut case = LinkCase::new(decoder, LinkLoss::Softmax, ReplacedEnd::Target, [9, 5, 4, 2, 3], 2);
        case.nodes.fill(0.5);
        case.relations.fill(0.0);
        check(&CpuBackend::new(), &case, false, 1e-6);
    }
}

#[test]
fn bits_do_not_depend_on_threads() {
    all(|decoder, loss, side| {
        let case = LinkCase::new(decoder, loss, side, [60, 300, 18, 150, 90], 9);
        let with = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let found = pool.install(|| case.run(&CpuBackend::new(), false));
            let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<u32>>();
            (found.loss.to_bits(), bits(found.nodes), bits(found.relations))
        };
        let one = with(1);
        assert!(one == with(2) && one == with(4), "{decoder:?} {loss:?} {side:?}");
    });
}

#[test]
fn a_score_that_is_not_a_number_is_an_error() {
    let mut case =
        LinkCase::new(DecoderKind::Dot, LinkLoss::Softmax, ReplacedEnd::Target, [9, 5, 4, 2, 3], 2);
    case.nodes.fill(f32::NAN);
    for loss in LOSSES {
        case.loss = loss;
        let found = std::panic::catch_unwind(|| case.run(&CpuBackend::new(), false));
        let text = *found.err().unwrap().downcast::<String>().unwrap();
        assert!(text.contains("NotFinite"), "{text}");
    }
}

#[test]
fn complex_decoders_refuse_odd_columns() {
    for decoder in [DecoderKind::ComplEx, DecoderKind::RotatE { phase_scale: 1.0 }] {
        let error = decoder.relation_columns(7).unwrap_err().to_string();
        assert!(error.contains("7 columns") && error.contains(decoder.name()), "{error}");
    }
    assert_eq!(DecoderKind::RotatE { phase_scale: 1.0 }.relation_columns(8), Ok(4));
}

/// Scores, thresholds and counts of random queries against all nodes.
fn ranks(
    decoder: DecoderKind,
    [nodes, queries, columns]: [usize; 3],
    block: usize,
    filtered: &[(u32, u32)],
    constant: bool,
) -> (Vec<RankCounts>, Vec<f32>, Vec<f32>) {
    let backend = CpuBackend::new();
    let (mut table, mut rows) = (matrix(&backend, nodes, columns, 1), matrix(&backend, queries, columns, 2));
    if constant {
        backend.fill(&mut table, 0.3);
        backend.fill(&mut rows, 0.7);
    }
    let own: Vec<u32> =
        (0..queries as u64).map(|at| below(Key::new(4).at(at), nodes as u64) as u32).collect();
    let call = ScoreCall { decoder, queries: &rows, nodes: &table, candidates: Candidates::All };
    let mut thresholds = backend.matrix(queries, 1);
    backend.own_scores(&call, &own, &mut thresholds);
    let mut scores = backend.matrix(queries, nodes);
    backend.link_scores(&call, &mut scores);
    for (query, own) in own.iter().enumerate() {
        let among = scores.row(query)[*own as usize];
        assert_eq!(thresholds.values()[query].to_bits(), among.to_bits(), "{decoder:?}: a pair on its own");
    }
    let mut counts = vec![RankCounts::default(); queries];
    for first in (0..nodes).step_by(block) {
        let count = block.min(nodes - first);
        let mut part = backend.matrix(count, columns);
        part.values_mut().copy_from_slice(&table.values()[first * columns..][..count * columns]);
        let scores = ScoreCall { nodes: &part, ..call };
        let call = RankCall { scores, thresholds: &thresholds, filtered, first: first as u32 };
        backend.rank_counts(&call, &mut counts).unwrap();
    }
    (counts, thresholds.values().to_vec(), scores.values().to_vec())
}

fn counted(thresholds: &[f32], scores: &[f32], filtered: &[(u32, u32)]) -> Vec<RankCounts> {
    let nodes = scores.len() / thresholds.len();
    let of = |query: usize| {
        let mut counts = RankCounts::default();
        for (at, score) in scores[query * nodes..][..nodes].iter().enumerate() {
            if filtered.contains(&(query as u32, at as u32)) {
                continue;
            }
            counts.greater += (*score > thresholds[query]) as u64;
            counts.equal += (*score == thresholds[query]) as u64;
        }
        counts
    };
    (0..thresholds.len()).map(of).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn ranks_equal_a_look_at_every_score(
        decoder in prop::sample::select(&DECODERS[..]), nodes in 1usize..1300, queries in 1usize..230,
        columns in 1usize..80, block in 1usize..1500, picks in prop::collection::vec(any::<(u16, u16)>(), 0..300),
    ) {
        let columns = columns * 2;
        let mut filtered: Vec<(u32, u32)> =
            picks.into_iter().map(|(q, n)| (q as u32 % queries as u32, n as u32 % nodes as u32)).collect();
        filtered.sort_unstable();
        filtered.dedup();
        let (counts, thresholds, scores) = ranks(decoder, [nodes, queries, columns], block, &filtered, false);
        prop_assert_eq!(counts, counted(&thresholds, &scores, &filtered));
    }

    #[test]
    fn scores_of_chunks_equal_those_of_pairs(
        decoder in prop::sample::select(&DECODERS[..]), edges in 1usize..300, chunk in 1usize..300, each in 0usize..150,
    ) {
        let backend = CpuBackend::new();
        let (nodes, queries) = (matrix(&backend, 40, 6, 1), matrix(&backend, edges, 6, 2));
        let pick = |at: u64| below(Key::new(3).at(at), 40) as u32;
        let rows: Vec<u32> = (0..(edges.div_ceil(chunk) * each) as u64).map(pick).collect();
        let candidates = Candidates::Chunks { chunk_edges: chunk, per_chunk: each, rows: &rows };
        let call = ScoreCall { decoder, queries: &queries, nodes: &nodes, candidates };
        let mut scores = backend.matrix(edges, each);
        backend.link_scores(&call, &mut scores);
        let mut own = backend.matrix(edges, 1);
        for at in 0..each {
            let of: Vec<u32> = (0..edges).map(|edge| rows[edge / chunk * each + at]).collect();
            backend.own_scores(&call, &of, &mut own);
            for edge in 0..edges {
                prop_assert_eq!(scores.row(edge)[at].to_bits(), own.values()[edge].to_bits());
            }
        }
    }

    #[test]
    fn sums_of_rows_equal_sums_one_by_one(
        lists in prop::collection::vec(prop::collection::vec(0u32..50, 0..9), 0..200), columns in 0usize..40,
    ) {
        let backend = CpuBackend::new();
        let parts = [matrix(&backend, 20, columns, 1), matrix(&backend, 30, columns, 2)];
        let mut offsets = vec![0];
        lists.iter().for_each(|list| offsets.push(offsets[offsets.len() - 1] + list.len() as u32));
        let mut to = backend.matrix(lists.len(), columns);
        backend.sum_rows(&[&parts[0], &parts[1]], &offsets, &lists.concat(), &mut to);
        for (index, list) in lists.iter().enumerate() {
            let mut sum = vec![0.0f32; columns];
            for (place, member) in list.iter().enumerate() {
                let row = if *member < 20 { parts[0].row(*member as usize) } else { parts[1].row(*member as usize - 20) };
                sum.iter_mut().zip(row).for_each(|(sum, x)| *sum = if place == 0 { *x } else { *sum + x });
            }
            prop_assert_eq!(to.row(index), &sum[..]);
        }
    }

    #[test]
    fn updated_rows_move_as_a_dense_update_would_and_others_stay(
        picks in prop::collection::vec(0u32..300, 0..200), kind in 0usize..3, sorted: bool,
    ) {
        let mut rows = picks;
        let mut seen = std::collections::HashSet::new();
        rows.retain(|row| seen.insert(*row));
        if sorted {
            rows.sort_unstable();
        }
        let kind = [OptimizerKind::Sgd, OptimizerKind::Adam, OptimizerKind::Adagrad][kind];
        let config = OptimizerConfig { kind, clip_value: Some(0.9), ..OptimizerConfig::default() };
        let update = config.row_update(4, 0.1).unwrap();
        let backend = CpuBackend::new();
        let states = config.row_states().len();
        let mut value = matrix(&backend, 300, 7, 1);
        let positive = |seed: u64| {
            let mut state = matrix(&backend, 300, 7, seed);
            state.values_mut().iter_mut().for_each(|x| *x = x.abs());
            state
        };
        let mut state: Vec<CpuMatrix> = (0..states as u64).map(|at| positive(at + 5)).collect();
        let gradient = matrix(&backend, rows.len(), 7, 3);
        let (value_before, state_before): (Vec<f32>, Vec<Vec<f32>>) =
            (value.values().to_vec(), state.iter().map(|state| state.values().to_vec()).collect());
        backend.update_rows(&update, &rows, &gradient, &mut value, &mut state);

        let picked = |from: &[f32]| {
            let mut to = backend.matrix(rows.len(), 7);
            let all = rows.iter().flat_map(|row| &from[*row as usize * 7..][..7]);
            to.values_mut().iter_mut().zip(all).for_each(|(to, x)| *to = *x);
            to
        };
        let mut dense = picked(&value_before);
        let mut dense_state: Vec<CpuMatrix> = state_before.iter().map(|state| picked(state)).collect();
        let moved = Moved { value: &mut dense, gradient: &gradient, state: &mut dense_state };
        backend.update(&update, vec![moved]).unwrap();
        let mut expected = value_before;
        for (index, row) in rows.iter().enumerate() {
            expected[*row as usize * 7..][..7].copy_from_slice(dense.row(index));
        }
        prop_assert_eq!(value.values(), &expected[..]);
        for ((state, mut expected), dense) in state.iter().zip(state_before).zip(&dense_state) {
            for (index, row) in rows.iter().enumerate() {
                expected[*row as usize * 7..][..7].copy_from_slice(dense.row(index));
            }
            prop_assert_eq!(state.values(), &expected[..]);
        }
    }
}

#[test]
fn constant_scores_are_all_equal() {
    for decoder in DECODERS {
        let filtered = [(0, 3), (0, 599), (2, 0)];
        let (counts, ..) = ranks(decoder, [600, 3, 150], 250, &filtered, true);
        let equal: Vec<u64> = counts.iter().map(|counts| counts.equal).collect();
        assert_eq!(equal, [598, 600, 599], "{decoder:?}");
        assert!(counts.iter().all(|counts| counts.greater == 0));
    }
}

#[test]
fn a_candidate_that_is_not_a_number_ranks_above() {
    let backend = CpuBackend::new();
    let mut nodes = matrix(&backend, 9, 4, 1);
    let queries = matrix(&backend, 1, 4, 2);
    fn call<'a>(queries: &'a CpuMatrix, nodes: &'a CpuMatrix) -> ScoreCall<'a, CpuBackend> {
        ScoreCall { decoder: DecoderKind::Dot, queries, nodes, candidates: Candidates::All }
    }
    let mut thresholds = backend.matrix(1, 1);
    backend.own_scores(&call(&queries, &nodes), &[0], &mut thresholds);
    let count = |nodes: &CpuMatrix| {
        let mut counts = [RankCounts::default()];
        let call = RankCall {
            scores: call(&queries, nodes),
            thresholds: &thresholds,
            filtered: &[(0, 0)],
            first: 0,
        };
        backend.rank_counts(&call, &mut counts).unwrap();
        counts[0].greater
    };
    backend.write(&mut nodes, 5, &[f32::NAN; 4]);
    let with = count(&nodes);
    backend.write(&mut nodes, 5, &queries.values().iter().map(|x| -x * 99.0).collect::<Vec<f32>>());
    assert_eq!(with, count(&nodes) + 1);
}

#[test]
#[should_panic(expected = "rows do not repeat")]
fn a_row_that_repeats_is_refused() {
    let backend = CpuBackend::new();
    let update = OptimizerConfig { kind: OptimizerKind::Sgd, ..OptimizerConfig::default() }
        .row_update(1, 0.1)
        .unwrap();
    let (gradient, mut value) = (matrix(&backend, 3, 2, 1), matrix(&backend, 5, 2, 2));
    backend.update_rows(&update, &[1, 4, 1], &gradient, &mut value, &mut []);
}

#[test]
fn learned_rows_refuse_what_has_no_sparse_form() {
    let check = |config: OptimizerConfig, name: &str| {
        let error = config.row_update(1, 0.1).unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
    };
    let sgd = OptimizerConfig { kind: OptimizerKind::Sgd, ..OptimizerConfig::default() };
    check(OptimizerConfig { momentum: 0.9, ..sgd.clone() }, "momentum");
    check(OptimizerConfig { clip_norm: Some(1.0), ..sgd }, "clip_norm");
    let kind = OptimizerKind::AdamW;
    check(OptimizerConfig { kind, weight_decay: 0.1, ..OptimizerConfig::default() }, "weight_decay");
}

#[test]
fn penalties_equal_their_definition_and_its_differences() {
    let backend = CpuBackend::new();
    let (rows, weights) = (matrix(&backend, 70, 6, 1), numbers(70, 2));
    let value = |kind: PenaltyKind, rows: &[f64]| -> f64 {
        let of = |row: &[f64]| match kind {
            PenaltyKind::L2 => row.iter().map(|x| x * x).sum::<f64>(),
            PenaltyKind::N3 => row.iter().map(|x| x.abs().powi(3)).sum(),
            PenaltyKind::ComplexN3 => (0..3).map(|at| row[at].hypot(row[3 + at]).powi(3)).sum(),
        };
        rows.chunks(6).zip(&weights).map(|(row, weight)| *weight as f64 * of(row)).sum()
    };
    for kind in [PenaltyKind::L2, PenaltyKind::N3, PenaltyKind::ComplexN3] {
        let mut gradient = matrix(&backend, 70, 6, 3);
        let before = gradient.values().to_vec();
        let found = backend.penalty(kind, &weights, &rows, &mut gradient).unwrap().wait().unwrap();
        let mut exact: Vec<f64> = rows.values().iter().map(|x| *x as f64).collect();
        let expected = value(kind, &exact);
        assert!((found - expected).abs() < 1e-5 * expected.abs(), "{kind:?}: {found} {expected}");
        let differences = (0..exact.len()).map(|at| {
            let x = exact[at];
            exact[at] = x + 1e-5;
            let above = value(kind, &exact);
            exact[at] = x - 1e-5;
            let below = value(kind, &exact);
            exact[at] = x;
            (above - below) / 2e-5 + before[at] as f64
        });
        let differences: Vec<f64> = differences.collect();
        assert_close(&format!("{kind:?}"), 1e-5, gradient.values(), &differences);
    }
}

#[test]
fn memory_of_a_step_and_of_ranking_stays_within_its_bound() {
    let threads = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
    for [nodes, edges, columns, chunk_edges, each] in
        [[3000, 1000, 50, 100, 500], [500, 300, 20, 1, 900], [9000, 600, 8, 0, 0], [500, 70, 200, 35, 5000]]
    {
        let decoder = DecoderKind::DistMult;
        let case = LinkCase::new(
            decoder,
            LinkLoss::Softmax,
            ReplacedEnd::Target,
            [nodes, edges, columns, chunk_edges, each],
            1,
        );
        let all_nodes = chunk_edges == 0;
        let (chunk_edges, candidates) = if all_nodes { (edges, nodes) } else { (chunk_edges, each) };
        let shape =
            LinkShape { edges, chunk_edges, candidates, all_nodes, columns, relation_columns: columns };
        let bound = link_bytes(&shape, MemoryOf::Host { threads: 2 });
        let backend = CpuBackend::new();
        backend.set_reuse_bytes(0);
        threads.install(|| case.run(&backend, chunk_edges == 1));
        // Rows of nodes and relations, and the sums of their gradients, are not part of it.
        let others = (nodes * columns * 4 * 3 + 2 * 5 * columns * 4 + 4096) as u64;
        let peak = backend.peak_bytes();
        assert!(peak <= bound.step + others, "{peak} of {} + {others}", bound.step);
        assert!(bound.step < 2 * peak, "{peak} of {}", bound.step);

        let backend = CpuBackend::new();
        backend.set_reuse_bytes(0);
        let (table, queries) = (matrix(&backend, nodes, columns, 1), matrix(&backend, edges, columns, 2));
        let scores = ScoreCall { decoder, queries: &queries, nodes: &table, candidates: case.candidates() };
        let mut thresholds = backend.matrix(edges, 1);
        backend.own_scores(&scores, &case.own, &mut thresholds);
        let call = RankCall { scores, thresholds: &thresholds, filtered: &[], first: 0 };
        threads.install(|| backend.rank_counts(&call, &mut vec![RankCounts::default(); edges]).unwrap());
        let peak = backend.peak_bytes();
        assert!(peak <= bound.ranking + (nodes * columns * 4) as u64 + 4096, "{peak} of {}", bound.ranking);
    }
}

#[test]
fn a_list_of_rows_is_found_again_by_its_positions() {
    assert_eq!(csr(3, &[&vec![2, 0], &vec![2, 2]]), (vec![0, 1, 1, 4], vec![1, 0, 2, 3]));
}
