//! A replay of an epoch with a history finds what a run of `outre` then does, row by row: the run is the oracle.

use crate::common::{dataset, job, strategy};
use esker_sample::{Fanout, NodeSet};
use esker_strategies::{
    CachePolicy, HistoryOutline, HistoryProfile, Job, RunPosition, SourceCounters, StrategyKind,
    weighted_rows,
};
use esker_types::{Dtype, NodeId};
use std::sync::Arc;

/// Batches of an epoch.
const EPOCH: u64 = 8;

fn with_history(job: &Job, staleness: u32, takes: impl FnMut(NodeId) -> bool) -> Job {
    let nodes = NodeSet::choose(job.dataset.manifest().nodes.count, takes);
    let mut job = job.clone();
    let layer = job.settings.fanouts.len() - 1;
    let (hops, dtype, device_bytes) = (1, Dtype::F32, u64::MAX);
    let outline =
        HistoryOutline { rows: nodes.count(), staleness, layer, hops, columns: 4, dtype, device_bytes };
    job.outline.history = (nodes.count() > 0).then_some(outline);
    job.history = job.outline.history.map(|_| Arc::new(nodes));
    job
}

/// Rows, misses, neighbours and hidden rows of the second epoch of a run, and how many rows it pulls.
fn second_epoch(job: &Job, weights: &[f64]) -> ([f64; 4], u64) {
    let mut source = strategy(StrategyKind::Outre, job).batches(job, RunPosition::START, None).unwrap();
    let (mut edges, mut computed, mut pulled) = (0, 0.0, 0);
    let mut before = SourceCounters::default();
    for number in 0..2 * EPOCH {
        if number == EPOCH {
            before = source.counters();
        }
        let batch = source.next().unwrap().unwrap();
        if number >= EPOCH {
            let sample = batch.blocks.sample().unwrap();
            edges += sample.edge_count();
            computed += weighted_rows(sample, weights);
            pulled += sample.pulled.iter().map(|count| *count as u64).sum::<u64>();
        }
    }
    let now = source.counters();
    let (rows, hits) =
        (now.rows - before.rows, now.hits[0].1 - before.hits.first().map_or(0, |(_, hits)| *hits));
    ([rows as f64, (rows - hits) as f64, edges as f64, computed], pulled)
}

fn check(layers: usize, staleness: u32, cached: u64, takes: impl Fn(NodeId) -> bool) -> u64 {
    check_with(CachePolicy::Belady, layers, staleness, cached, takes).1
}

/// Returns the misses and how many rows the run pulls.
fn check_with(
    cache: CachePolicy,
    layers: usize,
    staleness: u32,
    cached: u64,
    takes: impl Fn(NodeId) -> bool,
) -> (f64, u64) {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), 7, Dtype::F32);
    let mut plain = job(&dataset, 3);
    plain.settings.fanouts = vec![Fanout::AtMost(4); layers];
    // An epoch is a superbatch, so that its cache begins with it.
    plain.out_of_core.superbatch = Some(EPOCH);
    plain.out_of_core.feature_cache_bytes = Some(cached * 28);
    plain.out_of_core.cache = cache;
    let weights: Vec<f64> = (0..layers).map(|layer| 1.0 / (layer + 1) as f64).collect();
    let profile = HistoryProfile::sample(&plain, staleness, weights.clone()).unwrap();
    let job = with_history(&plain, staleness, &takes);
    let work = profile.replay(&job).unwrap();
    let (found, pulled) = second_epoch(&job, &weights);
    assert_eq!([work.rows, work.misses, work.edges, work.computed], found, "{layers} {staleness} {cached}");
    assert_eq!(work.batches, EPOCH as f64);
    assert_eq!(work.decided_edges > 0.0, job.history.is_some());
    (work.misses, pulled)
}

#[test]
fn a_replay_without_a_history_is_ginex() {
    assert_eq!(check(2, 5, 300, |_| false), 0);
}

#[test]
fn a_replay_pulls_what_the_run_pulls() {
    for (layers, staleness, cached) in [(2, 3, 0), (2, 20, 300), (3, 7, 150), (3, 100, 5000)] {
        assert!(check(layers, staleness, cached, |_| true) > 0);
    }
}

#[test]
fn a_replay_knows_which_nodes_have_a_history() {
    assert!(check(2, 20, 200, |node| node.0 % 3 == 0) > 0);
    assert!(check(3, 20, 200, |node| node.0 % 7 < 2) > 0);
}

#[test]
fn a_replay_plans_the_cache_that_the_run_has() {
    for (layers, staleness, cached, of) in [(2, 5, 300, 0), (2, 20, 300, 1), (3, 20, 200, 3)] {
        let takes = |node: NodeId| of > 0 && node.0.is_multiple_of(of);
        let (belady, _) = check_with(CachePolicy::Belady, layers, staleness, cached, takes);
        let (fixed, _) = check_with(CachePolicy::Static, layers, staleness, cached, takes);
        assert!(fixed > belady, "{layers} {staleness} {cached}: {fixed} {belady}");
    }
}
