//! The search for a layout that fits the disk (DiskGNN section 5.1 and Table 7): the heuristic, which only counts,
//! against brute force, which builds and reads every layout.

use super::layout::{RowsOnDisk, SegmentLayout};
use esker_fetch::FetchError;
use esker_plan::{SegmentSizes, ranks};
use std::time::Instant;

/// Number of segment sizes that brute force tries: tenths of all batches.
const STEPS: u64 = 10;
/// Thresholds that brute force tries: rows used more often in a segment are in its cache.
const THRESHOLDS: [u32; 4] = [1, 2, 4, 8];

/// A layout that was chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    /// Batches per segment.
    pub size: u32,
    /// Rows used more often in a segment are in its cache.
    pub threshold: u32,
    pub layout: SegmentLayout,
}

/// The results of both searches under one limit.
pub struct SearchFound {
    /// Disk space allowed, as a multiple of all features.
    pub blowup: f64,
    pub heuristic: Option<Choice>,
    pub heuristic_seconds: f64,
    pub brute_force: Option<Choice>,
    pub brute_force_seconds: f64,
    /// Layouts that brute force tried, and those of them that fit.
    pub tried: u32,
    pub fitting: u32,
}

/// Runs both searches.
pub fn search(disk: &RowsOnDisk, blowup: f64) -> Result<SearchFound, FetchError> {
    let most_rows = (disk.nodes as f64 * blowup) as u64;
    let started = Instant::now();
    let size = heuristic(disk, most_rows)?;
    let heuristic_seconds = started.elapsed().as_secs_f64();
    // The resulting layout is not part of the search, so it is not timed.
    let heuristic = match size {
        Some(size) => Some(Choice { size, threshold: 1, layout: disk.lay_out(size, true)? }),
        None => None,
    };
    let started = Instant::now();
    let (brute_force, tried, fitting) = brute_force(disk, most_rows)?;
    let brute_force_seconds = started.elapsed().as_secs_f64();
    Ok(SearchFound { blowup, heuristic, heuristic_seconds, brute_force, brute_force_seconds, tried, fitting })
}

/// The smallest segments that fit, with everything that two batches share in their caches.
fn heuristic(disk: &RowsOnDisk, most_rows: u64) -> Result<Option<u32>, FetchError> {
    let (mut sizes, mut accessed) = (SegmentSizes::new(disk.nodes, disk.batches()), Vec::new());
    for batch in 0..disk.batches() {
        disk.read(batch, &mut accessed)?;
        sizes.see(batch, accessed.iter().copied());
    }
    sizes.close();
    Ok(sizes.smallest(most_rows).ok().map(|(size, _)| size))
}

/// The layout that reads least among all that fit; how many were tried, and how many fit.
fn brute_force(disk: &RowsOnDisk, most_rows: u64) -> Result<(Option<Choice>, u32, u32), FetchError> {
    let batches = disk.batches() as u64;
    let mut sizes: Vec<u32> =
        (1..=STEPS).map(|step| ((batches * step).div_ceil(STEPS) as u32).max(1)).collect();
    sizes.dedup();
    let (mut best, mut tried, mut fitting) = (None::<Choice>, 0, 0);
    for size in sizes {
        for threshold in THRESHOLDS {
            tried += 1;
            if stored_rows(disk, size, threshold)? > most_rows {
                continue;
            }
            fitting += 1;
            let choice = Choice { size, threshold, layout: construct(disk, size, threshold)? };
            let reads = |choice: &Choice| disk.amplification(&choice.layout).unwrap_or(1.0);
            if best.is_none_or(|best| reads(&choice) < reads(&best)) {
                best = Some(choice);
            }
        }
    }
    Ok((best, tried, fitting))
}

/// Rows that a layout stores: a cached row once per segment, others once per use.
fn stored_rows(disk: &RowsOnDisk, size: u32, threshold: u32) -> Result<u64, FetchError> {
    let (mut uses, mut accessed, mut stored) = (vec![0u32; disk.nodes as usize], Vec::new(), 0);
    for segment in disk.segments(size) {
        uses.fill(0);
        for batch in segment {
            disk.read(batch, &mut accessed)?;
            accessed.iter().for_each(|row| uses[*row as usize] += 1);
        }
        stored += uses.iter().map(|uses| if *uses > threshold { 1 } else { *uses as u64 }).sum::<u64>();
    }
    Ok(stored)
}

/// Builds the caches of a layout, by MinHash, and reads every batch.
fn construct(disk: &RowsOnDisk, size: u32, threshold: u32) -> Result<SegmentLayout, FetchError> {
    let nodes = disk.nodes as usize;
    let (mut uses, mut first, mut second) = (vec![0u32; nodes], vec![0u16; nodes], vec![0u16; nodes]);
    let mut places = vec![None; nodes];
    let (mut layout, mut accessed) = (SegmentLayout::default(), Vec::new());
    for segment in disk.segments(size) {
        uses.fill(0);
        // In ascending rank: the first batch that accesses a row determines its smallest rank, the second the next.
        let mut ranked: Vec<(u16, u32)> =
            ranks(segment.len() as u32).into_iter().zip(segment.clone()).collect();
        ranked.sort_unstable();
        for (rank, batch) in ranked {
            disk.read(batch, &mut accessed)?;
            for row in accessed.iter().map(|row| *row as usize) {
                uses[row] += 1;
                match uses[row] {
                    1 => first[row] = rank,
                    2 => second[row] = rank,
                    _ => {}
                }
            }
        }
        let mut cache: Vec<usize> = (0..nodes).filter(|row| uses[*row] > threshold).collect();
        cache.sort_by_key(|row| (first[*row], second[*row]));
        places.fill(None);
        cache.iter().zip(0..).for_each(|(row, place)| places[*row] = Some(place));
        layout.stored_rows += cache.len() as u64;
        disk.read_segment(segment, |row| places[row as usize], &mut layout)?;
    }
    Ok(layout)
}

#[cfg(test)]
mod tests {
    use super::super::layout::tests::{ROWS, on_disk, traces};
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn brute_force_makes_the_layouts_that_preparing_makes(trace in traces(), size in 1u32..26) {
            let disk = on_disk(&trace, 48, 128);
            prop_assert_eq!(construct(&disk, size, 1).unwrap(), disk.lay_out(size, true).unwrap());
        }

        #[test]
        fn what_is_counted_is_what_is_stored(trace in traces(), size in 1u32..26, threshold in 1u32..9) {
            let disk = on_disk(&trace, 48, 128);
            let layout = construct(&disk, size, threshold).unwrap();
            prop_assert_eq!(stored_rows(&disk, size, threshold).unwrap(), layout.stored_rows);
        }

        #[test]
        fn both_searches_fit_or_neither_does(trace in traces(), most in 0u64..200) {
            let disk = on_disk(&trace, 48, 128);
            let found = search(&disk, most as f64 / ROWS as f64 + 1e-9).unwrap();
            prop_assert_eq!(found.heuristic.is_some(), found.brute_force.is_some());
            prop_assert_eq!(found.fitting > 0, found.brute_force.is_some());
            for choice in [found.heuristic, found.brute_force].into_iter().flatten() {
                prop_assert!(choice.layout.stored_rows <= most, "{:?}", choice);
            }
            // It is the smallest: with one batch fewer per segment, the layout does not fit.
            if let Some(choice) = found.heuristic.filter(|choice| choice.size > 1) {
                prop_assert!(stored_rows(&disk, choice.size - 1, 1).unwrap() > most);
            }
        }
    }
}
