//! Weights of edges, as integers whose sums are exact, so that draws by weight are the same on every machine.

use super::graph::HopGraph;
use crate::draw::below;
use crate::{Result, SampleError};
use esker_io::prefetch;
use esker_types::random::Key;
use esker_types::{ByteCount, NodeId};
use rayon::prelude::*;

/// Nodes whose weights a thread sums up at a time.
const NODES_TOGETHER: usize = 1 << 12;
/// Up to this many neighbours are always drawn with a sorted array of those drawn before.
pub(super) const FEW_TAKEN: usize = 64;
/// Binary digits of the significand of an f64.
const SIGNIFICAND_BITS: u32 = 52;

/// A column of weights, by edge id.
#[derive(Debug, Clone, Copy)]
pub enum WeightColumn<'a> {
    /// 32-bit floats.
    F32(&'a [f32]),
    /// 64-bit floats.
    F64(&'a [f64]),
}

impl WeightColumn<'_> {
    fn len(&self) -> usize {
        match self {
            WeightColumn::F32(weights) => weights.len(),
            WeightColumn::F64(weights) => weights.len(),
        }
    }

    #[inline(always)]
    fn get(&self, index: usize) -> f64 {
        match self {
            WeightColumn::F32(weights) => weights[index] as f64,
            WeightColumn::F64(weights) => weights[index],
        }
    }

    /// Fails unless there is a weight for each edge, and none is negative, infinite or no number.
    fn check(&self, edges: u64) -> Result<()> {
        let wrong = |expected: String, found: String| {
            Err(SampleError::HopColumn { what: "weights", expected, found, of: "edge" })
        };
        if self.len() as u64 != edges {
            return wrong(format!("{edges}, one for each edge"), self.len().to_string());
        }
        let bad = (0..self.len()).into_par_iter().with_min_len(1 << 16);
        match bad.find_first(|index| !(self.get(*index) >= 0.0 && self.get(*index).is_finite())) {
            Some(index) => {
                wrong("finite numbers from 0".into(), format!("{} at edge {index}", self.get(index)))
            }
            None => Ok(()),
        }
    }
}

/// The weights of a graph's edges, in the order of its adjacency, summed up node by node: 8 bytes an entry.
#[derive(Debug)]
pub struct EdgeWeights {
    /// By entry: the sum of the integer weights of the node's entries up to this one.
    sums: Vec<u64>,
    nodes: u64,
}

impl EdgeWeights {
    /// Reads a column of weights by edge id, with the threads of the current rayon pool. Fails if the result does not fit
    /// `most_bytes`. Weights of a node keep 53 binary digits up to 1024 neighbours, and one digit less for every doubling
    /// of their number, counted from the digits of the largest.
    pub fn new<G: HopGraph>(graph: &G, column: WeightColumn<'_>, most_bytes: u64) -> Result<EdgeWeights> {
        column.check(graph.edges())?;
        let needed = graph.entries().saturating_mul(8);
        if needed > most_bytes {
            let (needed, allowed) = (ByteCount(needed), ByteCount(most_bytes));
            return Err(SampleError::Memory { what: "by weight".into(), needed, allowed });
        }
        let mut sums = vec![0u64; graph.entries() as usize];
        for_each_part(graph, &mut sums, |nodes, part| {
            let mut rest = part;
            for node in nodes {
                let (sums, behind) = rest.split_at_mut(graph.list(node).len());
                rest = behind;
                // Reads come before all arithmetic, so that they wait for memory together.
                for (slot, position) in sums.iter_mut().zip(0..) {
                    *slot = column.get(graph.edge(node, position).0 as usize).to_bits();
                }
                sum_up(sums);
            }
        });
        Ok(EdgeWeights { sums, nodes: graph.nodes() })
    }

    /// Prefetches what a draw from a node reads first.
    #[inline(always)]
    pub(super) fn prefetch(&self, start: u64, degree: u32) {
        prefetch_run(&self.sums, start, degree);
    }

    /// Allocated bytes.
    pub fn bytes(&self) -> u64 {
        self.sums.len() as u64 * 8
    }

    /// Whether these are of a graph of this shape.
    pub(super) fn fit<G: HopGraph>(&self, graph: &G) -> bool {
        self.sums.len() as u64 == graph.entries() && self.nodes == graph.nodes()
    }

    /// The sums of a node whose entries start at `start`.
    #[inline(always)]
    pub(super) fn of(&self, start: u64, degree: u32) -> &[u64] {
        &self.sums[start as usize..start as usize + degree as usize]
    }
}

/// Calls `work` with nodes and the part of an array by entry that is theirs, on several threads.
pub(super) fn for_each_part<G: HopGraph, T: Send>(
    graph: &G,
    all: &mut [T],
    work: impl Fn(&mut dyn Iterator<Item = NodeId>, &mut [T]) + Sync,
) {
    let (mut parts, mut rest) = (Vec::new(), all);
    let nodes = graph.nodes() as usize;
    for first in (0..nodes).step_by(NODES_TOGETHER) {
        let last = (first + NODES_TOGETHER).min(nodes);
        let end = if last == nodes { graph.entries() } else { graph.start(NodeId(last as u64)) };
        let (part, behind) = rest.split_at_mut((end - graph.start(NodeId(first as u64))) as usize);
        rest = behind;
        parts.push((first..last, part));
    }
    parts.into_par_iter().for_each(|(nodes, part)| {
        work(&mut nodes.map(|node| NodeId(node as u64)), part);
    });
}

/// Prefetches a short run of 8-byte numbers, or of a long one the middle and the end, which a binary search reads first.
#[inline(always)]
pub(super) fn prefetch_run<T>(all: &[T], start: u64, degree: u32) {
    let (start, degree) = (start as usize, degree as usize);
    match degree <= 32 {
        true => (0..degree).step_by(8).for_each(|position| prefetch(all, start + position)),
        false => prefetch(all, start + degree / 2),
    }
    prefetch(all, (start + degree).wrapping_sub(1));
}

/// Turns the bits of a node's weights into sums. docs/sample.md defines the integers.
fn sum_up(sums: &mut [u64]) {
    let largest = sums.iter().map(|bits| exponent(*bits)).max().flatten();
    let Some(largest) = largest else { return sums.fill(0) };
    let digits = usize::BITS - (sums.len() - 1).leading_zeros();
    let mut sum = 0;
    for slot in sums {
        sum += integer(*slot, largest, digits);
        *slot = sum;
    }
}

/// The exponent of the first binary digit of a weight, none for 0.
fn exponent(bits: u64) -> Option<i32> {
    let (significand, exponent) = parts(bits);
    (significand != 0).then(|| exponent + significand.ilog2() as i32)
}

/// A weight as an integer times a power of two.
fn parts(bits: u64) -> (u64, i32) {
    // Zero may have a sign.
    let bits = bits & (u64::MAX >> 1);
    let (fraction, biased) = (bits & ((1 << SIGNIFICAND_BITS) - 1), (bits >> SIGNIFICAND_BITS) as i32);
    match biased {
        0 => (fraction, -1074),
        _ => (fraction | 1 << SIGNIFICAND_BITS, biased - 1075),
    }
}

/// A weight times 2^(62 - digits - largest), rounded down, at least 1 unless it is 0.
fn integer(bits: u64, largest: i32, digits: u32) -> u64 {
    let (significand, exponent) = parts(bits);
    if significand == 0 {
        return 0;
    }
    let shift = exponent + 62 - digits as i32 - largest;
    let shifted = match shift {
        0.. => significand << shift,
        -63..0 => significand >> -shift,
        _ => 0,
    };
    shifted.max(1)
}

/// Draws by weight. Owns what it notes of a node.
#[derive(Debug, Default)]
pub(super) struct WeightedDrawer {
    /// What was drawn: where its sums start and end, and its position. Ascending.
    taken: Vec<(u64, u64, u32)>,
    /// A Fenwick tree of the weights that were drawn.
    drawn: Vec<u64>,
}

impl WeightedDrawer {
    pub fn bytes(&self) -> u64 {
        crate::memory::held(&self.taken) + crate::memory::held(&self.drawn)
    }

    /// Makes room for draws of up to `take` from up to `longest` neighbours.
    pub fn reserve(&mut self, take: usize, longest: u32, ledger: &mut crate::memory::Ledger) -> Result<()> {
        self.taken.clear();
        self.drawn.clear();
        ledger.reserve(&mut self.taken, take.min(longest as usize))?;
        match take > FEW_TAKEN {
            true => ledger.reserve(&mut self.drawn, longest as usize + 1),
            false => Ok(()),
        }
    }

    /// Draws with replacement: as many positions as there are slots, unless no weight is above 0.
    pub fn with_replacement(key: Key, sums: &[u64], slots: &mut [u32]) -> usize {
        let total = sums.last().copied().unwrap_or(0);
        if total == 0 {
            return 0;
        }
        for (index, slot) in slots.iter_mut().enumerate() {
            *slot = at(sums, below(key, index as u64, total));
        }
        slots.sort_unstable();
        slots.len()
    }

    /// Draws without replacement: each time among those that remain, until the slots are full or no weight remains.
    pub fn without_replacement(&mut self, key: Key, sums: &[u64], slots: &mut [u32]) -> usize {
        if sums.len() <= slots.len() {
            return all_with_weight(sums, slots);
        }
        let take = slots.len();
        match take > FEW_TAKEN && take * take / 8 > sums.len() + 16 * take {
            true => self.many(key, sums, slots),
            false => self.few(key, sums, slots),
        }
    }

    /// Notes what was drawn in a sorted array, and skips over it: a few steps for each draw before.
    fn few(&mut self, key: Key, sums: &[u64], slots: &mut [u32]) -> usize {
        let mut total = sums[sums.len() - 1];
        self.taken.clear();
        for index in 0..slots.len() as u64 {
            if total == 0 {
                break;
            }
            let mut sum = below(key, index, total);
            let mut place = 0;
            for (start, end, _) in &self.taken {
                if sum < *start {
                    break;
                }
                sum += end - start;
                place += 1;
            }
            let position = at(sums, sum);
            let (start, end) = (before(sums, position), sums[position as usize]);
            self.taken.insert(place, (start, end, position));
            total -= end - start;
        }
        slots.iter_mut().zip(&self.taken).for_each(|(slot, (_, _, position))| *slot = *position);
        self.taken.len()
    }

    /// Notes what was drawn in a tree: a logarithm of the degree for each draw, and one pass over the degree.
    fn many(&mut self, key: Key, sums: &[u64], slots: &mut [u32]) -> usize {
        let degree = sums.len();
        let (mut total, mut count) = (sums[degree - 1], 0);
        self.drawn.clear();
        self.drawn.resize(degree + 1, 0);
        while count < slots.len() && total > 0 {
            let mut sum = below(key, count as u64, total);
            let (mut position, mut step) = (0, degree.next_power_of_two());
            while step > 0 {
                let next = position + step;
                if next <= degree {
                    let weight = sums[next - 1] - before(sums, position as u32) - self.drawn[next];
                    if weight <= sum {
                        sum -= weight;
                        position = next;
                    }
                }
                step /= 2;
            }
            let weight = sums[position] - before(sums, position as u32);
            slots[count] = position as u32;
            total -= weight;
            count += 1;
            let mut node = position + 1;
            while node <= degree {
                self.drawn[node] += weight;
                node += node & node.wrapping_neg();
            }
        }
        slots[..count].sort_unstable();
        count
    }
}

/// The first position whose sum exceeds `sum`.
#[inline(always)]
fn at(sums: &[u64], sum: u64) -> u32 {
    sums.partition_point(|end| *end <= sum) as u32
}

/// The sum before a position.
#[inline(always)]
fn before(sums: &[u64], position: u32) -> u64 {
    (position as usize).checked_sub(1).map_or(0, |before| sums[before])
}

fn all_with_weight(sums: &[u64], slots: &mut [u32]) -> usize {
    let (mut count, mut before) = (0, 0);
    for (position, sum) in sums.iter().enumerate() {
        if *sum > before {
            slots[count] = position as u32;
            count += 1;
        }
        before = *sum;
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Both ways to remember what was drawn give the same positions.
        #[test]
        fn few_and_many_draw_alike(
            seed: u64,
            weights in prop::collection::vec(prop_oneof![Just(0u64), 1u64..5, 1u64 << 40..1 << 45], 2..300),
            share in 0.0f64..1.0,
        ) {
            let sums: Vec<u64> = weights.iter().scan(0, |sum, weight| { *sum += weight; Some(*sum) }).collect();
            let take = 1 + (share * (weights.len() - 1) as f64) as usize;
            let (mut few, mut many) = (vec![0; take], vec![0; take]);
            let mut drawer = WeightedDrawer::default();
            let key = Key::new(seed);
            let count = drawer.few(key, &sums, &mut few);
            prop_assert_eq!(count, drawer.many(key, &sums, &mut many));
            prop_assert_eq!(&few[..count], &many[..count]);
            let drawable = weights.iter().filter(|weight| **weight > 0).count();
            prop_assert_eq!(count, take.min(drawable));
            prop_assert!(few[..count].iter().all(|position| weights[*position as usize] > 0));
        }

        /// The integer is the product with a power of two, which floating point computes exactly.
        #[test]
        fn integers_keep_the_proportions(weights in prop::collection::vec(1e-12f64..1e12, 1..40)) {
            let mut sums: Vec<u64> = weights.iter().map(|weight| weight.to_bits()).collect();
            sum_up(&mut sums);
            let largest = weights.iter().copied().fold(0.0, f64::max).log2().floor() as i32;
            let digits = weights.len().next_power_of_two().ilog2() as i32;
            let mut before = 0;
            for (weight, sum) in weights.iter().zip(&sums) {
                let exact = weight * 2f64.powi(62 - digits - largest);
                prop_assert_eq!(sum - before, (exact as u64).max(1));
                before = *sum;
            }
            prop_assert!(before < 1 << 63);
        }
    }

    #[test]
    fn the_smallest_weight_beside_the_largest_is_not_lost() {
        let mut sums = [f64::MAX, f64::from_bits(1), -0.0, f64::MAX].map(f64::to_bits);
        sum_up(&mut sums);
        assert_eq!((sums[1] - sums[0], sums[2] - sums[1]), (1, 0));
        assert!(sums[0] >= 1 << 60 && sums[3] < 1 << 63, "{sums:?}");
        let mut sums = [1; 4];
        sum_up(&mut sums);
        assert_eq!(sums, [1 << 60, 2 << 60, 3 << 60, 4 << 60]);
        let mut sums = [0f64, -0.0].map(f64::to_bits);
        sum_up(&mut sums);
        assert_eq!(sums, [0, 0]);
    }
}
