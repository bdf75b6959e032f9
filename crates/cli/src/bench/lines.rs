//! What bounds sampling: cache lines at random addresses. Counted for a sample, and measured for the machine: reads of
//! random lines, asked for ahead, by as many threads, over an array as large as what the sampler works on.
//!
//! Every access counts, whether its line was in a cache or not: where tables or hubs stay in caches, a sampler may read
//! more lines in a second than the machine does from memory, and its share exceeds 1.

use esker_io::{prefer_large_pages, prefetch};
use esker_sample::{InMemory, Sample, StoredId};
use esker_types::random::{Key, below};
use std::hint::black_box;
use std::time::Instant;

const LINE_BYTES: usize = 64;
const LINE_WORDS: usize = LINE_BYTES / 8;
/// Reads of a thread in a round; the best round counts.
const READS: u64 = 1 << 22;
const ROUNDS: u64 = 5;
/// Lines asked for and not yet read: more than a core can wait for.
const PREFETCH_DISTANCE: usize = 32;

/// Lines that sampling touched: one of the offsets for each list, those of the entries taken, and one of the table from
/// node to place for each entry and seed. For a sample of drawn lists that carries positions.
pub fn of_sample<W: StoredId>(graph: &InMemory<W>, sample: &Sample) -> u64 {
    let mut lines = sample.seeds.len() as u64;
    for block in &sample.blocks {
        let nodes = &sample.node_ids[block.first as usize..];
        for (node, bounds) in nodes.iter().zip(block.nbr_offsets.windows(2)) {
            let list = graph.list(*node);
            let positions = &block.positions[bounds[0] as usize..bounds[1] as usize];
            let line_of = |position: &u32| match list.first.get(*position as usize) {
                Some(entry) => entry as *const W as usize / LINE_BYTES,
                None => &raw const list.second[*position as usize - list.first.len()] as usize / LINE_BYTES,
            };
            // Positions ascend, so equal lines are neighbours.
            let turns = positions.windows(2).filter(|pair| line_of(&pair[0]) != line_of(&pair[1])).count();
            let of_list = if positions.is_empty() { 0 } else { 1 + turns };
            let of_offsets = if list.second.is_empty() { 1 } else { 2 };
            lines += (of_offsets + of_list + positions.len()) as u64;
        }
    }
    lines
}

/// Random lines a second that `threads` threads read from an array of `bytes`.
pub fn of_machine(bytes: u64, threads: usize) -> f64 {
    let lines = (bytes / LINE_BYTES as u64).max(1);
    let mut words = vec![0u64; lines as usize * LINE_WORDS];
    prefer_large_pages(&mut words);
    // Pages that were never written are all the same one.
    words.chunks_mut(LINE_WORDS).zip(0..).for_each(|(line, number)| line[0] = number);
    let best = (0..ROUNDS)
        .map(|round| {
            let started = Instant::now();
            std::thread::scope(|scope| {
                for thread in 0..threads as u64 {
                    let (words, key) = (&words, Key::new(round).with(thread));
                    scope.spawn(move || black_box(read(words, lines, key)));
                }
            });
            started.elapsed().as_secs_f64()
        })
        .fold(f64::INFINITY, f64::min);
    (threads as u64 * READS) as f64 / best.max(1e-9)
}

fn read(words: &[u64], lines: u64, key: Key) -> u64 {
    let place = |number: u64| below(key.at(number), lines) as usize * LINE_WORDS;
    let mut ahead: [usize; PREFETCH_DISTANCE] = std::array::from_fn(|number| place(number as u64));
    let mut sum = 0u64;
    for number in 0..READS {
        let slot = number as usize % PREFETCH_DISTANCE;
        sum = sum.wrapping_add(words[ahead[slot]]);
        ahead[slot] = place(number + PREFETCH_DISTANCE as u64);
        prefetch(words, ahead[slot]);
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use esker_sample::{Block, Form};
    use esker_types::{LocalIndex, NodeId};

    /// Lines of one list of `degree` 32-bit entries that starts anywhere in a line, with these positions taken.
    fn check(degree: u64, positions: &[u32], least: u64, most: u64) {
        let graph = InMemory::<u32>::from_adjacency(&[(0..degree).map(|_| 0).collect()], None);
        let block = Block {
            nbr_offsets: vec![0, positions.len() as u32],
            nbrs: vec![LocalIndex(0); positions.len()],
            positions: positions.to_vec(),
            ..Block::default()
        };
        let sample = Sample {
            form: Form::Dense,
            node_ids: vec![NodeId(0)],
            node_id_offsets: vec![0, 0, 1],
            blocks: vec![block],
            seeds: vec![LocalIndex(0)],
            ..Sample::default()
        };
        let found = of_sample(&graph, &sample);
        // The seed, the offsets, and a line of the table for each position come on top.
        let list = found - 2 - positions.len() as u64;
        assert!((least..=most).contains(&list), "{list} lines for {positions:?} of {degree}");
    }

    #[test]
    fn lines_of_a_list_are_counted_once() {
        check(0, &[], 0, 0);
        check(1, &[0], 1, 1);
        check(16, &(0..16).collect::<Vec<u32>>(), 1, 2);
        check(64, &[0, 1, 2, 60, 61], 2, 4);
        check(160, &[0, 40, 80, 120], 4, 4);
    }

    #[test]
    fn the_loop_reads_the_lines_that_it_draws() {
        let (lines, key) = (1000, Key::new(3));
        let words: Vec<u64> = (0..lines * LINE_WORDS as u64).map(|word| word * word).collect();
        let plain = (0..READS).map(|number| words[below(key.at(number), lines) as usize * LINE_WORDS]);
        assert_eq!(read(&words, lines, key), plain.sum::<u64>());
    }
}
