//! Ranks become metrics: MRR, MR and Hits@k, of all queries, by side and by relation.

use serde::{Deserialize, Serialize};

/// The rank of an answer among candidates with the same score.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Ties {
    /// In the middle of them: the mean of the other two.
    #[default]
    Realistic,
    /// Before them.
    Optimistic,
    /// After them.
    Pessimistic,
}

impl Ties {
    /// The rank after `greater` candidates with a greater score, beside `equal` others with the same.
    pub fn rank(self, greater: u64, equal: u64) -> f64 {
        let first = (1 + greater) as f64;
        match self {
            Ties::Realistic => first + equal as f64 / 2.0,
            Ties::Optimistic => first,
            Ties::Pessimistic => first + equal as f64,
        }
    }
}

/// The metrics of ranks.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RankMetrics {
    /// Number of ranks: two for each edge, if both sides are ranked.
    pub ranks: u64,
    /// Mean of the reciprocal ranks.
    pub mrr: f64,
    /// Mean rank.
    pub mr: f64,
    /// Share of ranks that are at most 1.
    #[serde(rename = "hits@1")]
    pub hits_at_1: f64,
    /// Share of ranks that are at most 3.
    #[serde(rename = "hits@3")]
    pub hits_at_3: f64,
    /// Share of ranks that are at most 10.
    #[serde(rename = "hits@10")]
    pub hits_at_10: f64,
    /// Share of ranks that are at most 20, 50 and 100: what benchmarks with shared negatives report.
    #[serde(rename = "hits@20")]
    pub hits_at_20: f64,
    /// See above.
    #[serde(rename = "hits@50")]
    pub hits_at_50: f64,
    /// See above.
    #[serde(rename = "hits@100")]
    pub hits_at_100: f64,
}

/// The ranks that Hits@k counts up to.
const MOST_RANKS: [f64; 6] = [1.0, 3.0, 10.0, 20.0, 50.0, 100.0];

/// Collects ranks. Sums are taken in the order of queries, so that blocks and threads do not change a bit.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct RankTally {
    ranks: u64,
    reciprocals: f64,
    sum: f64,
    hits: [u64; MOST_RANKS.len()],
}

impl RankTally {
    /// Adds a rank.
    pub fn add(&mut self, rank: f64) {
        self.ranks += 1;
        self.reciprocals += 1.0 / rank;
        self.sum += rank;
        for (hits, most) in self.hits.iter_mut().zip(MOST_RANKS) {
            *hits += u64::from(rank <= most);
        }
    }

    /// The metrics; `None` without ranks.
    pub fn finish(&self) -> Option<RankMetrics> {
        let count = self.ranks as f64;
        let hits = self.hits.map(|hits| hits as f64 / count);
        (self.ranks > 0).then_some(RankMetrics {
            ranks: self.ranks,
            mrr: self.reciprocals / count,
            mr: self.sum / count,
            hits_at_1: hits[0],
            hits_at_3: hits[1],
            hits_at_10: hits[2],
            hits_at_20: hits[3],
            hits_at_50: hits[4],
            hits_at_100: hits[5],
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The mean rank over all orders of candidates with the same score.
    fn naive_rank(ties: Ties, answer: i8, others: &[i8]) -> f64 {
        let greater = others.iter().filter(|score| **score > answer).count() as f64;
        let equal = others.iter().filter(|score| **score == answer).count();
        let ranks: Vec<f64> = (0..=equal).map(|before| 1.0 + greater + before as f64).collect();
        match ties {
            Ties::Realistic => ranks.iter().sum::<f64>() / ranks.len() as f64,
            Ties::Optimistic => ranks[0],
            Ties::Pessimistic => ranks[equal],
        }
    }

    #[test]
    fn constant_scores_rank_in_the_middle() {
        // n candidates with the answer among them: (n + 1) / 2.
        for n in 1..50u64 {
            assert_eq!(Ties::Realistic.rank(0, n - 1), (n + 1) as f64 / 2.0);
        }
    }

    proptest! {
        #[test]
        fn ranks_are_means_over_orders_of_equal_scores(answer in 0i8..5, others in prop::collection::vec(0i8..5, 0..30)) {
            let greater = others.iter().filter(|score| **score > answer).count() as u64;
            let equal = others.iter().filter(|score| **score == answer).count() as u64;
            for ties in [Ties::Realistic, Ties::Optimistic, Ties::Pessimistic] {
                prop_assert_eq!(ties.rank(greater, equal), naive_rank(ties, answer, &others));
            }
        }
    }

    proptest! {
        /// OGB counts an edge as a hit if its score is strictly above the k-th greatest shared negative.
        #[test]
        fn pessimistic_ranks_give_the_hits_of_ogb(
            edges in prop::collection::vec(0i8..6, 1..20),
            negatives in prop::collection::vec(0i8..6, 1..40),
        ) {
            let mut sorted = negatives.clone();
            sorted.sort_unstable_by(|a, b| b.cmp(a));
            let mut tally = RankTally::default();
            for score in &edges {
                tally.add(naive_rank(Ties::Pessimistic, *score, &negatives));
            }
            let found = tally.finish().unwrap();
            for (k, hits) in [(1, found.hits_at_1), (3, found.hits_at_3), (10, found.hits_at_10), (20, found.hits_at_20)] {
                // With fewer negatives than k, OGB counts every edge.
                let is_hit = |score: &&i8| sorted.get(k - 1).is_none_or(|threshold| **score > *threshold);
                prop_assert_eq!(hits, edges.iter().filter(is_hit).count() as f64 / edges.len() as f64);
            }
        }
    }

    proptest! {
        /// OGB's MRR against each edge's own negatives: the mean of the ranks before and after equal scores.
        #[test]
        fn realistic_ranks_give_the_mrr_of_ogb(
            edges in prop::collection::vec((0i8..6, prop::collection::vec(0i8..6, 1..40)), 1..20),
        ) {
            let (mut tally, mut sum) = (RankTally::default(), 0.0);
            for (score, negatives) in &edges {
                let count = |is: &dyn Fn(i8) -> bool| negatives.iter().filter(|other| is(**other)).count();
                let (above, not_below) = (count(&|other| other > *score), count(&|other| other >= *score));
                sum += 1.0 / (0.5 * (above + not_below) as f64 + 1.0);
                tally.add(Ties::Realistic.rank(above as u64, (not_below - above) as u64));
            }
            prop_assert!((tally.finish().unwrap().mrr - sum / edges.len() as f64).abs() < 1e-12);
        }
    }

    #[test]
    fn metrics_are_means_of_ranks() {
        let mut tally = RankTally::default();
        assert_eq!(tally.finish(), None);
        [1.0, 2.0, 3.5, 10.0, 40.0].into_iter().for_each(|rank| tally.add(rank));
        let found = tally.finish().unwrap();
        assert_eq!((found.ranks, found.mr), (5, 56.5 / 5.0));
        assert_eq!((found.hits_at_1, found.hits_at_3, found.hits_at_10), (0.2, 0.4, 0.8));
        assert_eq!((found.hits_at_20, found.hits_at_50, found.hits_at_100), (0.8, 1.0, 1.0));
        let mrr = (1.0 + 0.5 + 1.0 / 3.5 + 0.1 + 1.0 / 40.0) / 5.0;
        assert!((found.mrr - mrr).abs() < 1e-15);
    }
}
