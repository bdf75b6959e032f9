//! Takes the best candidates under a budget, without sorting or storing them. Scores are counted in classes so fine
//! that order within a class hardly matters. One pass finds the class at which the budget ends, and a second pass takes
//! candidates.

/// Scores of a class have the same exponent and the same first eleven bits of the mantissa.
const SHIFT: u32 = 12;

/// Takes candidates by falling score until their costs fill a budget. Candidates are passed twice, in the same order.
#[derive(Debug)]
pub struct TopByScore {
    /// Cost of each class.
    costs: Vec<u64>,
    /// Candidates of a higher class are taken, and those of this class while they fit.
    limit: u32,
    left: u64,
}

/// The class of benefit over cost. A candidate without cost has score 0: it needs no room.
fn class(benefit: u64, cost: u64) -> u32 {
    match cost {
        0 => 0,
        cost => (benefit as f32 / cost as f32).to_bits() >> SHIFT,
    }
}

impl TopByScore {
    /// Its size in bytes.
    pub const BYTES: u64 = (8 << (32 - SHIFT)) / 2;

    /// Starts without candidates.
    pub fn new() -> TopByScore {
        // Scores are not negative.
        TopByScore { costs: vec![0; 1 << (31 - SHIFT)], limit: 0, left: 0 }
    }

    /// Step 1: counts a candidate. Call it for all of them.
    pub fn see(&mut self, benefit: u64, cost: u64) {
        let class = &mut self.costs[class(benefit, cost) as usize];
        *class = class.saturating_add(cost);
    }

    /// Step 2: sets the budget.
    pub fn set_budget(&mut self, budget: u64) {
        self.left = budget;
        for (class, cost) in self.costs.iter().enumerate().rev() {
            self.limit = class as u32;
            if *cost > self.left {
                return;
            }
            self.left -= cost;
        }
        // All candidates fit, including those of the last class.
        self.left += self.costs[0];
    }

    /// Step 3: whether a candidate is taken. The last class is taken in call order, while there is room.
    pub fn takes(&mut self, benefit: u64, cost: u64) -> bool {
        let class = class(benefit, cost);
        match class == self.limit {
            true if cost > self.left => false,
            true => {
                self.left -= cost;
                true
            }
            false => class > self.limit,
        }
    }
}

impl Default for TopByScore {
    fn default() -> TopByScore {
        TopByScore::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn taken(candidates: &[(u64, u64)], budget: u64) -> Vec<bool> {
        let mut top = TopByScore::new();
        candidates.iter().for_each(|(benefit, cost)| top.see(*benefit, *cost));
        top.set_budget(budget);
        candidates.iter().map(|(benefit, cost)| top.takes(*benefit, *cost)).collect()
    }

    proptest! {
        /// Compares with sorting: no candidate is rejected while a clearly worse one is taken, and the budget is kept.
        #[test]
        fn the_best_are_taken(candidates in prop::collection::vec((0u64..5000, 1u64..300), 0..80), budget in 0u64..9000) {
            let taken = taken(&candidates, budget);
            let pairs = || candidates.iter().zip(&taken);
            let cost: u64 = pairs().filter(|(_, taken)| **taken).map(|(candidate, _)| candidate.1).sum();
            prop_assert!(cost <= budget);
            let score = |candidate: &(u64, u64)| candidate.0 as f64 / candidate.1 as f64;
            let worst_taken = pairs().filter(|(_, taken)| **taken).map(|(c, _)| score(c)).fold(f64::INFINITY, f64::min);
            for (candidate, _) in pairs().filter(|(_, taken)| !**taken) {
                prop_assert!(score(candidate) <= worst_taken * 1.001, "{candidate:?} is better than one taken");
                // Only the last class may be rejected for lack of room.
                prop_assert!(cost + candidate.1 > budget || score(candidate) <= worst_taken * 1.001);
            }
        }
    }

    #[test]
    fn a_budget_for_all_takes_all() {
        let candidates: Vec<(u64, u64)> = (1..50).map(|number| (number % 7, number)).collect();
        let all: u64 = candidates.iter().map(|candidate| candidate.1).sum();
        assert!(taken(&candidates, all).iter().all(|taken| *taken));
        assert!(taken(&candidates, all - 1).iter().filter(|taken| !**taken).count() >= 1);
        assert!(taken(&candidates, 0).iter().all(|taken| !taken));
    }
}
