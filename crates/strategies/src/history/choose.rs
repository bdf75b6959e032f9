//! Which nodes have a history, if only their number is given: those that are a neighbour most often.

use crate::{Job, Result};
use esker_plan::TopByScore;
use esker_sample::{CountedNeighbours, DiskGraph, EntryCounts, GraphWork, NodeSet, StoredId};
use esker_store::StoreError;
use esker_types::Dtype;

/// Memory for counting, at least.
const LEAST_BYTES: u64 = 4 << 20;

/// The `rows` nodes that are a neighbour of most others; all of them, if there are no more. The choice depends on the
/// graph and on `rows` alone, so every strategy makes the same.
pub fn choose_nodes(job: &Job, rows: u64) -> Result<NodeSet> {
    let nodes = job.dataset.manifest().nodes.count;
    if rows >= nodes {
        return Ok(NodeSet::choose(nodes, |_| true));
    }
    match job.dataset.manifest().id_dtype() {
        Dtype::U64 => counted::<u64>(job, rows),
        _ => counted::<u32>(job, rows),
    }
}

fn counted<W: StoredId>(job: &Job, rows: u64) -> Result<NodeSet> {
    let scratch = &job.out_of_core.scratch;
    std::fs::create_dir_all(scratch).map_err(StoreError::io(scratch))?;
    let graph = DiskGraph::open(&job.dataset, job.direction)?;
    let work = GraphWork {
        folder: scratch,
        // The memory of batches is free until training starts.
        most_bytes: job.strategy_bytes.saturating_sub(TopByScore::BYTES).max(LEAST_BYTES),
        pool: &job.pool,
        stop: &job.stop,
        progress: &*job.progress,
        safe_point_bytes: None,
    };
    let counts = EntryCounts::find_or_count::<W>(&graph, CountedNeighbours::All, true, &work)?;
    let (mut top, mut count) = (TopByScore::new(), counts.stream());
    for _ in 0..graph.nodes() {
        top.see(count.take()? as u64, 1);
    }
    top.set_budget(rows);
    let (mut count, mut failed) = (counts.stream(), None);
    let chosen = NodeSet::choose(graph.nodes(), |_| match count.take() {
        Ok(count) => top.takes(count as u64, 1),
        Err(error) => {
            failed.get_or_insert(error);
            false
        }
    });
    failed.map_or(Ok(chosen), |error| Err(error.into()))
}
