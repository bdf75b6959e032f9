//! Ranks: how many candidates score above a threshold, and how many score the same. Scores of a few hundred candidates
//! are counted while they are in the cache; filtered ones are looked up among them and taken out.

use super::score::{CandidateTile, QUERIES};
use crate::cpu::CpuBackend;
use crate::cpu::buffer::Parts;
use crate::cpu::wide::wide;
use crate::{RankCall, RankCounts, Shape};

/// Candidates that are scored before they are counted: a multiple of a panel.
const SCORED: usize = 512;
/// Lanes of the counts.
const LANES: usize = 64;

/// Words of scores that a thread counts at a time.
pub(crate) const COUNTED_WORDS: usize = QUERIES * SCORED;

/// Whether a score counts as greater or equal. One that is not a number does.
#[inline(always)]
fn is_not_below(score: f32, threshold: f32) -> bool {
    score >= threshold || score.is_nan() || threshold.is_nan()
}

wide! {
    /// How many scores are not below the threshold, and how many are equal to it.
    fn count(scores: &[f32], threshold: f32) -> (u64, u64) {
        let (mut not_below, mut equal) = ([0u32; LANES], [0u32; LANES]);
        let chunks = scores.chunks_exact(LANES);
        let rest = chunks.remainder();
        for chunk in chunks {
            for lane in 0..LANES {
                not_below[lane] += is_not_below(chunk[lane], threshold) as u32;
                equal[lane] += (chunk[lane] == threshold) as u32;
            }
        }
        for score in rest {
            not_below[0] += is_not_below(*score, threshold) as u32;
            equal[0] += (*score == threshold) as u32;
        }
        let sum = |lanes: [u32; LANES]| lanes.iter().map(|lane| *lane as u64).sum::<u64>();
        (sum(not_below), sum(equal))
    }
}

/// The filtered candidates of each query: offsets into the ascending pairs.
fn offsets(filtered: &[(u32, u32)], queries: usize) -> Vec<usize> {
    let mut offsets = Vec::with_capacity(queries + 1);
    let mut at = 0;
    for query in 0..=queries {
        at += filtered[at..].iter().take_while(|(of, _)| (*of as usize) < query).count();
        offsets.push(at);
    }
    offsets
}

impl CpuBackend {
    pub(super) fn count_ranks(&self, call: &RankCall<'_, CpuBackend>, counts: &mut [RankCounts]) {
        let (queries, columns) = (call.scores.queries.rows(), call.scores.queries.columns());
        let shape = call.scores.candidates.shape(queries, call.scores.nodes.rows());
        assert_eq!((counts.len(), columns), (queries, call.scores.nodes.columns()));
        assert_eq!((call.thresholds.rows(), call.thresholds.columns()), (queries, 1));
        assert!(call.filtered.is_sorted(), "filtered candidates ascend");
        let offsets = offsets(call.filtered, queries);
        let counts = Parts::new(counts);
        self.for_candidate_tiles(&call.scores, &shape, |tile| {
            let rows = tile.queries.len() / columns;
            // SAFETY: a query is in one task at a time, and the counts outlive the loop.
            let counts = unsafe { counts.part(tile.first_query, rows) };
            self.count_tile(call, &tile, &offsets, counts);
        });
    }

    fn count_tile(
        &self,
        call: &RankCall<'_, CpuBackend>,
        tile: &CandidateTile<'_>,
        offsets: &[usize],
        counts: &mut [RankCounts],
    ) {
        let mut scratch = self.pool.take(QUERIES.min(counts.len()) * SCORED);
        let columns = call.scores.queries.columns();
        for start in (0..tile.count).step_by(SCORED) {
            let wide = SCORED.min(tile.count - start);
            let first = call.first as usize + tile.first + start;
            for part in (0..counts.len()).step_by(QUERIES) {
                let rows = QUERIES.min(counts.len() - part);
                let queries = &tile.queries[part * columns..][..rows * columns];
                tile.panels.scores(call.scores.decoder, queries, [start, wide], scratch.floats_mut(), SCORED);
                for (row, counts) in counts[part..][..rows].iter_mut().enumerate() {
                    let scores = &scratch.floats()[row * SCORED..][..wide];
                    let query = tile.first_query + part + row;
                    let threshold = call.thresholds.values()[query];
                    let (mut not_below, mut equal) = count(scores, threshold);
                    let filtered = &call.filtered[offsets[query]..offsets[query + 1]];
                    let begin = filtered.partition_point(|(_, candidate)| (*candidate as usize) < first);
                    for (_, candidate) in &filtered[begin..] {
                        let Some(score) = scores.get(*candidate as usize - first) else { break };
                        not_below -= is_not_below(*score, threshold) as u64;
                        equal -= (*score == threshold) as u64;
                    }
                    counts.greater += not_below - equal;
                    counts.equal += equal;
                }
            }
        }
    }
}
