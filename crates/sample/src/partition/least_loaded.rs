//! The partition with the smallest penalty, whatever their number: a tournament in which every partition has a leaf.
//! The winner is known at once; a changed penalty plays again only the matches that it can change.

/// A penalty that never wins while another partition has room.
pub(super) const FULL: f64 = f64::INFINITY;

/// Partitions by penalty. Of equal penalties the lowest partition wins.
#[derive(Debug, Clone)]
pub(super) struct LeastLoaded {
    /// Penalties, one a leaf. Leaves beyond the last partition are full.
    penalties: Vec<f64>,
    /// The winner of each match; match 1 is the final, match `i` is between the winners of `2i` and `2i + 1`.
    winners: Vec<u32>,
}

impl LeastLoaded {
    /// Partitions with these penalties.
    pub fn new(of_partitions: impl ExactSizeIterator<Item = f64>) -> LeastLoaded {
        let leaves = of_partitions.len().next_power_of_two();
        let mut penalties: Vec<f64> = Vec::with_capacity(leaves);
        penalties.extend(of_partitions);
        penalties.resize(leaves, FULL);
        let winners = (0..leaves as u32).map(|_| 0).chain(0..leaves as u32).collect();
        let mut tournament = LeastLoaded { penalties, winners };
        (1..leaves).rev().for_each(|game| tournament.winners[game] = tournament.winner_of(game));
        tournament
    }

    /// Bytes for this many partitions.
    pub fn bytes_for(partitions: u64) -> u64 {
        partitions.next_power_of_two() * (8 + 2 * 4)
    }

    /// The partition with the smallest penalty.
    #[inline(always)]
    pub fn first(&self) -> u32 {
        self.winners[1.min(self.winners.len() - 1)]
    }

    /// Changes a penalty.
    #[inline]
    pub fn set(&mut self, partition: u32, penalty: f64) {
        self.penalties[partition as usize] = penalty;
        let mut game = (self.penalties.len() + partition as usize) / 2;
        while game > 0 {
            let winner = self.winner_of(game);
            // Another winner as before: no later match notices the change.
            if winner == self.winners[game] && winner != partition {
                return;
            }
            self.winners[game] = winner;
            game /= 2;
        }
    }

    #[inline(always)]
    fn winner_of(&self, game: usize) -> u32 {
        // Left leaves are lower partitions, so they win ties.
        let (left, right) = (self.winners[2 * game], self.winners[2 * game + 1]);
        if self.penalties[right as usize] < self.penalties[left as usize] { right } else { left }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn naive(penalties: &[f64]) -> u32 {
        (0..penalties.len()).min_by(|a, b| penalties[*a].total_cmp(&penalties[*b])).unwrap() as u32
    }

    proptest! {
        #[test]
        fn the_winner_has_the_smallest_penalty(
            mut penalties in prop::collection::vec(0u8..6, 1..40),
            changes in prop::collection::vec((0usize..40, 0u8..7), 0..200),
        ) {
            let number = |penalty: u8| if penalty == 6 { FULL } else { penalty as f64 };
            let mut tournament = LeastLoaded::new(penalties.iter().map(|penalty| *penalty as f64));
            for (partition, penalty) in changes {
                let partition = partition % penalties.len();
                penalties[partition] = penalty;
                tournament.set(partition as u32, number(penalty));
                let all: Vec<f64> = penalties.iter().map(|penalty| number(*penalty)).collect();
                prop_assert_eq!(tournament.first(), naive(&all));
            }
        }
    }
}
