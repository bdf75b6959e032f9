//! Planned misses against an exhaustive search, a naive Belady and the other policies; plans against a cache that carries
//! them out; the speed that planning must have.

use esker_plan::{
    AccessTrace, Belady, Fixed, LAPS, Lru, NextUses, Placement, Placements, PlanTally, RequestCount,
};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::convert::Infallible;
use std::time::Instant;

type Trace = Vec<Vec<u32>>;

/// What a planner found, in memory.
#[derive(Default)]
struct Kept {
    next: HashMap<u32, Vec<u32>>,
    accessed: HashMap<u32, Vec<RequestCount>>,
}

impl NextUses for Kept {
    type Error = Infallible;
    fn put(&mut self, batch: u32, next: &[u32], accessed: &[RequestCount]) -> Result<(), Infallible> {
        self.next.insert(batch, next.to_vec());
        self.accessed.insert(batch, accessed.to_vec());
        Ok(())
    }
    fn next(&mut self, batch: u32, next: &mut Vec<u32>) -> Result<(), Infallible> {
        next.clone_from(&self.next[&batch]);
        Ok(())
    }
    fn accessed(&mut self, batch: u32, accessed: &mut Vec<RequestCount>) -> Result<(), Infallible> {
        accessed.clone_from(&self.accessed[&batch]);
        Ok(())
    }
}

/// Plans a trace; the placements of each batch beside the tally.
fn plan_with(planner: &mut Belady<u32>, trace: &Trace) -> (PlanTally, Vec<Placements>) {
    let (mut kept, mut words) = (Kept::default(), vec![Placements::default(); trace.len()]);
    let keep = |batch: u32, found: &Placements| {
        words[batch as usize] = found.clone();
        Ok(())
    };
    let Ok(tally) = planner.plan(&mut &trace[..], &mut kept, keep);
    for (at, batch) in trace.iter().enumerate() {
        let later = |row: &u32| {
            trace[at + 1..].iter().position(|later| later.contains(row)).map(|found| at + 1 + found)
        };
        let next: Vec<u32> =
            batch.iter().map(|row| later(row).map_or(u32::MAX, |next| next as u32)).collect();
        let mut counts: BTreeMap<u32, u32> = BTreeMap::new();
        next.iter().filter(|next| **next != u32::MAX).for_each(|next| *counts.entry(*next).or_default() += 1);
        let counts: Vec<RequestCount> =
            counts.into_iter().map(|(by, rows)| RequestCount { by, rows }).collect();
        assert_eq!((&kept.next[&(at as u32)], &kept.accessed[&(at as u32)]), (&next, &counts));
    }
    (tally, words)
}

fn plan(trace: &Trace, rows: u64, slots: u64) -> (PlanTally, Vec<Placements>) {
    plan_with(&mut Belady::new(rows, slots, trace.len() as u32), trace)
}

/// The fewest misses of any way to run a cache: every state that can follow every state.
fn fewest_misses(trace: &Trace, slots: usize) -> u64 {
    let mut states: HashMap<u32, u64> = HashMap::from([(0, 0)]);
    for batch in trace {
        let accessed = batch.iter().fold(0u32, |set, row| set | 1 << row);
        let mut behind: HashMap<u32, u64> = HashMap::new();
        for (state, misses) in states {
            let (all, misses) = (state | accessed, misses + (accessed & !state).count_ones() as u64);
            let mut subset = all;
            loop {
                if subset.count_ones() as usize <= slots {
                    behind.entry(subset).and_modify(|known| *known = misses.min(*known)).or_insert(misses);
                }
                if subset == 0 {
                    break;
                }
                subset = (subset - 1) & all;
            }
        }
        states = behind;
    }
    states.into_values().min().unwrap_or(0)
}

/// Belady by the book: after each batch sort by next use, found by looking through the rest of the trace.
fn naive_misses(trace: &Trace, slots: usize) -> u64 {
    let mut cached: BTreeSet<u32> = BTreeSet::new();
    let mut misses = 0;
    for (at, batch) in trace.iter().enumerate() {
        misses += batch.iter().filter(|row| !cached.contains(row)).count() as u64;
        cached.extend(batch);
        let next =
            |row: &u32| trace[at + 1..].iter().position(|later| later.contains(row)).unwrap_or(usize::MAX);
        let mut by_use: Vec<(usize, u32)> = cached.iter().map(|row| (next(row), *row)).collect();
        by_use.sort_unstable();
        cached = by_use
            .into_iter()
            .take(slots)
            .filter(|(next, _)| *next < usize::MAX)
            .map(|(_, row)| row)
            .collect();
    }
    misses
}

fn naive_lru(trace: &Trace, slots: usize) -> u64 {
    let mut cached: VecDeque<u32> = VecDeque::new();
    let mut misses = 0;
    for row in trace.iter().flatten() {
        match cached.iter().position(|held| held == row) {
            Some(at) => drop(cached.remove(at)),
            None => misses += 1,
        }
        cached.push_back(*row);
        if cached.len() > slots {
            cached.pop_front();
        }
    }
    misses
}

/// Carries a plan out on a cache that holds row numbers: every hit must find its row.
fn carried_out(trace: &Trace, plan: &[Placements], slots: usize) -> u64 {
    let mut cache = vec![None; slots];
    let mut misses = 0;
    for (batch, placements) in trace.iter().zip(plan) {
        let (mut reads, mut kept) = (0, Vec::new());
        for (row, word) in batch.iter().zip(&placements.words) {
            match Placement::decode(*word) {
                Placement::Hit(slot) => assert_eq!(cache[slot.index()], Some(*row)),
                Placement::Skip => panic!("every row is needed"),
                Placement::Read(index) | Placement::Keep(index) => {
                    assert_eq!(index, reads, "rows are read in the order of the batch");
                    reads += 1;
                    if let Placement::Keep(_) = Placement::decode(*word) {
                        kept.push(*row);
                    }
                }
            }
        }
        misses += reads as u64;
        assert_eq!(kept.len(), placements.kept.len());
        for (row, slot) in kept.iter().zip(&placements.kept) {
            cache[*slot as usize] = Some(*row);
        }
    }
    misses
}

fn traces(rows: u32, batch: usize, batches: usize) -> impl Strategy<Value = Trace> {
    let one = prop::collection::btree_set(0..rows, 0..=batch)
        .prop_map(|rows| rows.into_iter().collect::<Vec<u32>>());
    prop::collection::vec(one.prop_shuffle(), 0..=batches)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn no_cache_of_that_size_misses_less(trace in traces(7, 4, 7), slots in 0usize..6) {
        let (tally, words) = plan(&trace, 7, slots as u64);
        prop_assert_eq!(tally.misses(), fewest_misses(&trace, slots));
        prop_assert_eq!(carried_out(&trace, &words, slots), tally.misses());
    }

    #[test]
    fn plans_equal_sorting_by_next_use(trace in traces(60, 25, 20), slots in 0usize..64) {
        let (tally, words) = plan(&trace, 60, slots as u64);
        prop_assert_eq!(tally.misses(), naive_misses(&trace, slots));
        prop_assert_eq!(carried_out(&trace, &words, slots), tally.misses());
        prop_assert_eq!(tally.accesses, trace.iter().map(|batch| batch.len() as u64).sum::<u64>());
    }

    /// Far more batches than a batch has rows: what waits is sorted, not counted through.
    #[test]
    fn many_small_batches_are_planned_alike(trace in traces(12, 3, 120), slots in 0usize..13) {
        let (tally, words) = plan(&trace, 12, slots as u64);
        prop_assert_eq!(tally.misses(), naive_misses(&trace, slots));
        prop_assert_eq!(carried_out(&trace, &words, slots), tally.misses());
    }

    #[test]
    fn belady_is_never_behind_lru_or_any_fixed_rows(trace in traces(40, 20, 20), slots in 0usize..45, first in 0u32..40) {
        let belady = plan(&trace, 40, slots as u64).0.misses();
        let mut lru = Lru::new(40, slots as u64);
        let of_lru: u64 = trace.iter().map(|batch| lru.batch(batch)).sum();
        prop_assert_eq!(of_lru, naive_lru(&trace, slots));
        let fixed = Fixed::new(40, (0..40u32).map(|row| (row + first) % 40).take(slots));
        let of_fixed = fixed.fills() + trace.iter().map(|batch| fixed.batch(batch)).sum::<u64>();
        prop_assert!(belady <= of_lru && belady <= of_fixed, "{} {} {}", belady, of_lru, of_fixed);
    }
}

#[test]
fn belady_keeps_the_row_used_next() {
    let trace = [vec![1], vec![2], vec![3], vec![1]].to_vec();
    assert_eq!(plan(&trace, 4, 1).0.misses(), 3);
    assert_eq!(plan(&trace, 4, 0).0.misses(), 4);
}

#[test]
fn a_planner_can_be_used_again() {
    let (first, second) = ([vec![1, 2], vec![2, 3]].to_vec(), [vec![0, 2], vec![0, 1], vec![2]].to_vec());
    let mut planner = Belady::new(4, 2, 3);
    for trace in [first, second] {
        let found = plan_with(&mut planner, &trace).0;
        assert_eq!(found, plan(&trace, 4, 2).0);
    }
}

/// Batches are told apart by 16 bits where these are enough. Empty ones change nothing but their number.
#[test]
fn more_batches_than_sixteen_bits_are_planned_alike() {
    let full: Trace =
        (0..300u32).map(|batch| vec![batch * 7 % 40, 40 + batch * batch % 23, 63 + batch % 5]).collect();
    let (expected, _) = plan(&full, 70, 20);
    for count in [65_533, 65_534, 65_535, 66_000] {
        let mut trace = full[..200].to_vec();
        trace.resize(count - 100, Vec::new());
        trace.extend_from_slice(&full[200..]);
        let mut words = Vec::new();
        let keep = |_: u32, found: &Placements| {
            words.push(found.clone());
            Ok(())
        };
        let mut planner = Belady::new(70, 20, count as u32);
        let Ok(tally) = planner.plan(&mut &trace[..], &mut Kept::default(), keep);
        assert_eq!((tally, carried_out(&trace, &words, 20)), (expected, expected.misses()), "{count}");
    }
}

#[test]
#[should_panic(expected = "names a row once")]
fn a_batch_that_names_a_row_twice_is_a_bug() {
    plan(&[vec![1, 2, 1]].to_vec(), 4, 2);
}

/// A trace that is never whole: batches are made when they are read.
struct Made {
    batches: u32,
    rows: u64,
    batch_rows: usize,
    seen: Vec<u32>,
}

impl AccessTrace for Made {
    type Row = u32;
    type Error = Infallible;
    fn batches(&self) -> u32 {
        self.batches
    }
    fn read(&mut self, batch: u32, rows: &mut Vec<u32>) -> Result<(), Infallible> {
        rows.clear();
        self.seen.fill(0);
        for number in 0..self.batch_rows as u64 {
            // Skewed: half of the draws fall on a sixteenth of the rows.
            let random = esker_types::random::mix(((batch as u64) << 32) | number);
            let bound = if random & 1 == 0 { self.rows } else { self.rows / 16 };
            let row = (((random >> 32) * bound) >> 32) as u32;
            if self.seen[row as usize] != batch + 1 {
                self.seen[row as usize] = batch + 1;
                rows.push(row);
            }
        }
        Ok(())
    }
}

/// What planning keeps between batches does not grow with the trace. (`cargo xtask prove plan` measures its speed.)
#[test]
fn memory_is_that_of_rows_and_slots() {
    let short = Belady::<u32>::bytes_for(1_000_000, 10_000, 10, 100);
    let long = Belady::<u32>::bytes_for(1_000_000, 10_000, 1000, 100);
    assert!(short >= 4_000_000 && long - short <= 1000 * 32, "{short} {long}");
    let mut trace = Made { batches: 40, rows: 50_000, batch_rows: 5000, seen: vec![0; 50_000] };
    let mut planner = Belady::new(50_000, 8000, 40);
    let started = Instant::now();
    let Ok(tally) = planner.plan(&mut trace, &mut Kept::default(), |_, _| Ok(()));
    assert!(tally.hits > tally.accesses / 3 && started.elapsed().as_secs() < 60, "{tally:?}");
}

/// Plans a trace as a lap: the rows that stay from lap to lap, their slots at its end, the tally and the placements.
fn plan_lap(trace: &Trace, rows: u64, slots: u64) -> (Vec<u64>, Vec<u32>, PlanTally, Vec<Placements>) {
    let mut planner = Belady::new(rows, slots, LAPS * trace.len() as u32);
    let Ok(around) = planner.between_laps(&mut &trace[..], &mut Kept::default());
    let mut words = Vec::new();
    let keep = |_: u32, found: &Placements| {
        words.push(found.clone());
        Ok(())
    };
    let Ok((tally, ends)) = planner.plan_lap(&mut &trace[..], &mut Kept::default(), &around, keep);
    (around, ends, tally, words)
}

/// Carries out laps, one after the other, on a cache of row numbers. The rows that stay move between them.
fn carried_around(trace: &Trace, rows: u64, slots: u64, laps: usize) -> u64 {
    let (around, ends, tally, words) = plan_lap(trace, rows, slots);
    let mut cache = vec![None; slots as usize];
    around.iter().zip(&mut cache).for_each(|(row, slot)| *slot = Some(*row as u32));
    let mut misses = around.len() as u64;
    for _ in 0..laps {
        let before = misses;
        for (batch, placements) in trace.iter().zip(&words) {
            let mut kept = Vec::new();
            for (row, word) in batch.iter().zip(&placements.words) {
                match Placement::decode(*word) {
                    Placement::Hit(slot) => assert_eq!(cache[slot.index()], Some(*row)),
                    Placement::Keep(_) => kept.push(*row),
                    Placement::Read(_) => {}
                    Placement::Skip => panic!("every row is needed"),
                }
                misses += u64::from(Placement::is_read(*word));
            }
            assert_eq!(kept.len(), placements.kept.len());
            kept.iter().zip(&placements.kept).for_each(|(row, slot)| cache[*slot as usize] = Some(*row));
        }
        assert_eq!(misses - before, tally.misses());
        let moved: Vec<Option<u32>> = ends.iter().map(|slot| cache[*slot as usize]).collect();
        cache.fill(None);
        moved.into_iter().zip(&mut cache).for_each(|(row, slot)| *slot = row);
    }
    misses
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// The rows that stay are where the next lap looks for them, and no way to run a cache misses less.
    #[test]
    fn a_lap_finds_what_the_one_before_it_left(trace in traces(60, 25, 12), slots in 0u64..64) {
        let laps: Trace = trace.iter().cycle().take(trace.len() * 3).cloned().collect();
        prop_assert!(carried_around(&trace, 60, slots, 3) >= naive_misses(&laps, slots as usize));
    }

    /// With room for everything nothing is read twice, however often it is used.
    #[test]
    fn laps_that_fit_read_every_row_once(trace in traces(30, 12, 8)) {
        let all: BTreeSet<u32> = trace.iter().flatten().copied().collect();
        prop_assert_eq!(carried_around(&trace, 30, 30, 4), all.len() as u64);
    }
}

/// What a lap costs beside the best for all of them as one trace. The best for few laps reads less in the first and the
/// last one, where it has more slots for rows that do not stay: at most the slots' rows, once.
#[test]
fn laps_read_hardly_more_than_the_best_for_the_whole_run() {
    let mut made = Made { batches: 24, rows: 4000, batch_rows: 900, seen: vec![0; 4000] };
    let trace: Trace = (0..24)
        .map(|batch| {
            let mut rows = Vec::new();
            let Ok(()) = made.read(batch, &mut rows);
            rows
        })
        .collect();
    let of = |count: usize| -> Trace { trace.iter().cycle().take(trace.len() * count).cloned().collect() };
    let best = |count: usize, slots: u64| plan(&of(count), 4000, slots).0.misses();
    for slots in [40, 200, 400, 1000, 2000] {
        let (five, ten) = (carried_around(&trace, 4000, slots, 5), carried_around(&trace, 4000, slots, 10));
        let (of_five, of_ten) = (best(5, slots), best(10, slots));
        assert!(
            five <= of_five + slots && ten <= of_ten + slots,
            "{slots}: {five} {of_five}, {ten} {of_ten}"
        );
        let (more, least) = (ten - five, of_ten - of_five);
        assert!(more as f64 <= least as f64 * 1.025, "{slots} slots: {more} rows read, {least} at best");
    }
}
