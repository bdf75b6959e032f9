//! Rows that are read in one go are the rows that are read one by one, on a disk with faults, and the bytes read beside
//! them are no more than the costs that the gap came from allow.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

mod support;

use esker_io::{
    Access, Disk, Faults, IoCounters, Layout, Options, Piece, ReadChoice, ReadCost, SimulatedDisk,
};
use esker_types::random::{Key, below};
use std::path::PathBuf;
use support::{assert_delivered, pattern};

const FILE_BYTES: u64 = 1_000_001;
const RUNS: u64 = 300;

/// Rows of one length, in no order, some of them twice.
fn rows(key: Key) -> Vec<Piece> {
    let row_bytes = [100, 512, 1024, 4096, 20_000][below(key.at(0), 5) as usize];
    let count = below(key.at(1), 400);
    let row = |number: u64| {
        let offset = below(key.at(2 + number), FILE_BYTES / row_bytes) * row_bytes;
        Piece { offset, bytes: row_bytes, at: number * row_bytes }
    };
    (0..count).map(row).collect()
}

/// Reads all pieces as jobs of `at_once`. Faults that a queue does not get over by itself are not among those of the disk.
fn read(disk: &SimulatedDisk, options: &Options, pieces: &[Piece], at_once: usize) -> (Vec<u8>, IoCounters) {
    let layout = Layout::file(&PathBuf::from("/simulated/f"));
    let files = disk.open(&[layout], Access::Read, options).unwrap();
    let mut queue = files.queue().unwrap();
    let mut out = vec![0; pieces.iter().map(|piece| piece.bytes).sum::<u64>() as usize];
    for job in pieces.chunks(at_once) {
        queue.read(0, job, &mut out).unwrap();
    }
    (out, queue.counters())
}

#[test]
fn merged_rows_are_those_read_one_by_one() {
    let file = pattern(FILE_BYTES as usize, 1);
    for seed in 0..RUNS {
        let key = Key::new(seed);
        let align_bytes = [512, 4096][below(key.at(1000), 2) as usize];
        let faults = Faults { seed, short: 0.2, put_off: 0.2, align_bytes, ..Faults::default() };
        let disk = SimulatedDisk::new(faults);
        disk.put(&PathBuf::from("/simulated/f"), file.clone());
        let cost =
            ReadCost { seconds_per_read: 6e-6, seconds_per_byte: [1e-10, 1e-9, 1e-8][seed as usize % 3] };
        let block_bytes = [None, Some(4096)][below(key.at(1001), 2) as usize];
        let choice = ReadChoice::measured(block_bytes, cost);
        let pieces = rows(key);
        let (merged, _) = read(&disk, &choice.options, &pieces, pieces.len().max(1));
        let (one_by_one, _) = read(&disk, &Options::default(), &pieces, 1);
        assert_delivered(&pieces, &merged, &file, &format!("seed {seed}"));
        assert!(merged == one_by_one, "seed {seed}");
    }
}

#[test]
fn a_gap_costs_less_than_the_read_that_it_saves() {
    for seed in 0..RUNS {
        let key = Key::new(seed).with(1);
        let disk = SimulatedDisk::new(Faults { seed, ..Faults::default() });
        disk.put(&PathBuf::from("/simulated/f"), pattern(FILE_BYTES as usize, 1));
        let cost =
            ReadCost { seconds_per_read: 6e-6, seconds_per_byte: [1e-10, 1e-9, 1e-8][seed as usize % 3] };
        let merging = ReadChoice::measured(None, cost).options;
        let pieces = rows(key);
        let (_, merged) = read(&disk, &merging, &pieces, pieces.len().max(1));
        let apart = Options { gap_bytes: 0, ..merging };
        let (_, apart) = read(&disk, &apart, &pieces, pieces.len().max(1));
        // A read that is full may split a run of rows where it would not have been: that saves no read.
        let full = merged.read_bytes / merging.max_bytes;
        let merges = apart.reads - merged.reads.min(apart.reads) + full;
        let over = merged.read_bytes - apart.read_bytes;
        assert!(over <= merges * merging.gap_bytes, "seed {seed}: {over} bytes over for {merges} merges");
        let allowed = cost.seconds(apart.reads + full, apart.read_bytes);
        let took = cost.seconds(merged.reads, merged.read_bytes);
        assert!(took <= allowed * (1.0 + 1e-9), "seed {seed}: {took} s, apart {allowed} s");
    }
}
