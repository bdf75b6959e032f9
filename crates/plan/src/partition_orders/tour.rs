//! A tour: two partitions are resident, and every pair meets in exactly one step, so no order has fewer swaps. It walks
//! along the edges of the complete graph K_l, and at each step the partition that is behind leaves.
//!
//! Of all such walks it takes one through Hamiltonian cycles (Walecki, 1892): for odd l the edges of K_l are (l - 1) / 2
//! cycles that have only edges of their own. While the walk is in a cycle, every partition has met as many others as
//! every other, up to two. So no partition is trained far ahead of another, which is what the edge permutation bias
//! measures.

use super::{LogicalSwap, Shuffler, Walk};

/// A walk over `count` partitions, an odd number of 3 or more.
pub(super) fn walk(count: u32, random: &mut Shuffler) -> Walk {
    let names = random.permutation(count);
    let mut cycles: Vec<u32> = (0..(count - 1) / 2).collect();
    random.shuffle(&mut cycles);
    // The hub begins and ends every cycle.
    let hub = count - 1;
    let mut places = vec![hub];
    for cycle in cycles {
        let start = places.len();
        places.extend((0..count - 1).map(|at| zigzag(cycle, at, count - 1)));
        if random.below(2) == 1 {
            places[start..].reverse();
        }
        places.push(hub);
    }
    let visited: Vec<u32> = places.into_iter().map(|place| names[place as usize]).collect();
    let swaps = (2..visited.len()).map(|at| LogicalSwap { slot: at as u32 % 2, enters: visited[at] });
    Walk { first: visited[..2].to_vec(), swaps: swaps.collect() }
}

/// Swaps of such a walk: the first step has a pair, and every other pair has a swap.
pub(super) fn swaps(count: u64) -> u64 {
    count * (count - 1) / 2 - 1
}

/// Place `at` of a cycle, after the hub: i, i + 1, i - 1, i + 2, i - 2 and so on, modulo `count`.
fn zigzag(cycle: u32, at: u32, count: u32) -> u32 {
    let away = at.div_ceil(2);
    if at % 2 == 1 { (cycle + away) % count } else { (cycle + count - away) % count }
}
