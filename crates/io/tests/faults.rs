//! Thousands of runs on a disk that misbehaves: the right bytes or a named error, never a wrong row, never a hang.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

mod support;

use esker_io::{Access, Disk, Faults, IoError, Layout, Options, Piece, SimulatedDisk, Stream};
use esker_types::random::{Key, below, unit};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;
use support::{assert_delivered, buffer, deal, layout, pattern};

const RUNS: u64 = 10_000;
const FILE_BYTES: u64 = 60_001;

/// Numbers for one run.
struct Dice(Key, u64);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        self.1 += 1;
        below(self.0.at(self.1), bound)
    }
    fn share(&mut self, most: f64) -> f64 {
        self.1 += 1;
        // Half the runs are free of this fault.
        if self.below(2) == 0 { 0.0 } else { unit(self.0.at(self.1)) * most }
    }
    fn faults(&mut self, seed: u64) -> Faults {
        Faults {
            seed,
            short: self.share(0.5),
            put_off: self.share(0.5),
            read_error: self.share(0.05),
            write_error: self.share(0.1),
            wait_error: self.share(0.02),
            sync_error: self.share(0.1),
            registers: self.below(2) == 0,
            room_bytes: u64::MAX,
            reserves: true,
            latency: 1 + self.below(200),
            align_bytes: if self.below(2) == 0 { 512 } else { 4096 },
        }
    }
    fn options(&mut self) -> Options {
        let max_bytes = 8192 << self.below(5);
        Options {
            block_bytes: [None, Some(512), Some(4096), Some(8192)][self.below(4) as usize],
            depth: 1 + self.below(64) as usize,
            gap_bytes: self.below(3) * 1000,
            in_place_bytes: self.below(2) * 8192,
            max_bytes,
            staging_bytes: max_bytes * (1 + self.below(4)),
            ..Options::default()
        }
    }
    fn pieces(&mut self) -> (Vec<Piece>, usize) {
        let widest = [8, 512, 4096, 20_000][self.below(4) as usize];
        let spans: Vec<(u64, u64)> = (0..self.below(80))
            .map(|_| {
                let offset = self.below(FILE_BYTES);
                (offset, (1 + self.below(widest)).min(FILE_BYTES - offset))
            })
            .collect();
        support::pieces(&spans, 0)
    }
}

/// How a run ended.
#[derive(PartialEq)]
enum End {
    RightBytes,
    NamedError,
}

/// Runs all seeds in a thread that is watched: no progress for a minute is a hang. Both ends must have been seen.
fn watched(run: fn(u64) -> End) {
    let (tell, told) = mpsc::channel();
    let worker = std::thread::spawn(move || {
        let mut errors = 0;
        for seed in 0..RUNS {
            tell.send(seed).ok();
            errors += u64::from(run(seed) == End::NamedError);
        }
        errors
    });
    let mut last = 0;
    loop {
        match told.recv_timeout(Duration::from_secs(60)) {
            Ok(seed) => last = seed,
            Err(mpsc::RecvTimeoutError::Timeout) => panic!("seed {last} hangs"),
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
        }
    }
    let errors = worker.join().unwrap_or_else(|_| panic!("seed {last} failed"));
    assert_eq!(last, RUNS - 1);
    println!("{RUNS} runs, {errors} ended with a named error");
    assert!(errors > RUNS / 20 && errors < RUNS * 19 / 20, "{errors} errors in {RUNS} runs show too little");
}

/// An error must be one of those that the faults explain, and must say where.
fn assert_named(error: &IoError, faults: &Faults, path: &Path) {
    let said = error.to_string();
    let explained = match error {
        IoError::Read { source, .. } => match source.raw_os_error() {
            Some(libc::EIO) => faults.read_error > 0.0,
            Some(libc::EAGAIN | libc::EINTR) => faults.put_off > 0.0,
            _ => false,
        },
        IoError::Write { source, .. } => match source.raw_os_error() {
            Some(libc::EIO) => faults.write_error > 0.0,
            Some(libc::ENOSPC) => faults.room_bytes < u64::MAX,
            _ => false,
        },
        // A hundred short transfers in a row that do not reach the next sector.
        IoError::Ended { .. } => faults.short > 0.0,
        IoError::Queue(_) => faults.wait_error > 0.0,
        IoError::File { verb: "sync", .. } => faults.sync_error > 0.0,
        _ => false,
    };
    assert!(explained, "{said} with {faults:?}");
    let placed = matches!(error, IoError::Read { .. } | IoError::Write { .. });
    assert!(!placed || said.contains("offset"), "{said}");
    assert!(said.contains(path.to_str().unwrap()) || matches!(error, IoError::Queue(_)), "{said}");
}

fn disk(dice: &mut Dice, seed: u64, file: &[u8]) -> (SimulatedDisk, Faults, Layout) {
    let faults = dice.faults(seed);
    let disk = SimulatedDisk::new(faults);
    let layout = layout(Path::new("/simulated"), 1 + dice.below(3) as usize);
    for (path, part) in layout.parts().iter().zip(deal(&layout, file)) {
        disk.put(path, part);
    }
    (disk, faults, layout)
}

#[test]
fn reads_bring_the_right_bytes_or_a_named_error() {
    watched(|seed| {
        let mut dice = Dice(Key::new(seed), 0);
        let file = pattern(FILE_BYTES as usize, seed);
        let (disk, faults, layout) = disk(&mut dice, seed, &file);
        let files = disk.open(std::slice::from_ref(&layout), Access::Read, &dice.options()).unwrap();
        let mut queue = files.queue().unwrap();
        for _ in 0..1 + dice.below(4) {
            let (pieces, bytes) = dice.pieces();
            queue.submit(0, pieces, buffer(bytes));
        }
        let (pieces, bytes) = dice.pieces();
        let mut out = vec![0; bytes];
        let mut end = End::RightBytes;
        match queue.read(0, &pieces, &mut out) {
            Ok(()) => assert_delivered(&pieces, &out, &file, "borrowed"),
            Err(error) => {
                assert_named(&error, &faults, Path::new("/simulated"));
                end = End::NamedError;
            }
        }
        // Some queues are dropped, or stopped, with jobs in flight.
        let leave = dice.below(8);
        if leave == 0 {
            return end;
        }
        if leave == 1 {
            queue.stopper().stop();
        }
        while let Some(finished) = queue.wait() {
            match finished.result {
                Ok(()) => assert_delivered(&finished.pieces, &finished.buffer, &file, "owned"),
                Err(IoError::Cancelled) => assert_eq!(leave, 1),
                Err(error) => {
                    assert_named(&error, &faults, Path::new("/simulated"));
                    end = End::NamedError;
                }
            }
        }
        end
    });
}

#[test]
fn streams_bring_the_right_bytes_or_a_named_error() {
    watched(|seed| {
        let mut dice = Dice(Key::new(seed).with(1), 0);
        let file = pattern(FILE_BYTES as usize, seed);
        let (disk, faults, layout) = disk(&mut dice, seed, &file);
        let files = disk.open(std::slice::from_ref(&layout), Access::Read, &dice.options()).unwrap();
        let from = dice.below(FILE_BYTES);
        let to = from + dice.below(FILE_BYTES - from + 1);
        let chunk = 4096 << dice.below(3);
        let mut stream = Stream::open(&files, 0, from..to, chunk, 2 + dice.below(3) as usize).unwrap();
        let mut at = from as usize;
        loop {
            match stream.next_chunk() {
                Ok(Some(chunk)) => {
                    assert!(chunk == &file[at..at + chunk.len()]);
                    at += chunk.len();
                }
                Ok(None) => {
                    assert_eq!(at as u64, to);
                    return End::RightBytes;
                }
                Err(error) => {
                    assert_named(&error, &faults, Path::new("/simulated"));
                    return End::NamedError;
                }
            }
        }
    });
}

#[test]
fn streams_that_are_read_like_files_end_whole_or_with_an_error() {
    watched(|seed| {
        let mut dice = Dice(Key::new(seed).with(3), 0);
        let file = pattern(FILE_BYTES as usize, seed);
        let mut faults = dice.faults(seed);
        // Now and then so bad that requests are given up: that must not look like something to try again.
        if dice.below(500) == 0 {
            faults.put_off = 0.97;
        }
        let disk = SimulatedDisk::new(faults);
        let path = PathBuf::from("/simulated/f");
        disk.put(&path, file.clone());
        let files = disk.open(&[Layout::file(&path)], Access::Read, &dice.options()).unwrap();
        let mut stream = Stream::open(&files, 0, 0..FILE_BYTES, 4096, 3).unwrap();
        let mut got = Vec::new();
        match stream.read_to_end(&mut got) {
            Ok(_) => {
                assert!(got == file);
                End::RightBytes
            }
            Err(_) => {
                assert!(got == file[..got.len()]);
                assert!(stream.read(&mut [0; 10]).is_err(), "a stream that failed stays failed");
                End::NamedError
            }
        }
    });
}

#[test]
fn what_is_submitted_first_happens_first() {
    watched(|seed| {
        let mut dice = Dice(Key::new(seed).with(4), 0);
        let mut requested = pattern(FILE_BYTES as usize, seed);
        let faults = dice.faults(seed);
        let disk = SimulatedDisk::new(faults);
        let path = PathBuf::from("/simulated/f");
        disk.put(&path, requested.clone());
        let files = disk.open(&[Layout::file(&path)], Access::Write, &dice.options()).unwrap();
        let mut queue = files.queue().unwrap();
        let mut expected = Vec::new();
        for turn in 0..12 {
            let offset = dice.below(FILE_BYTES);
            let bytes = (1 + dice.below(9_000)).min(FILE_BYTES - offset);
            let piece = Piece { offset, bytes, at: 0 };
            let range = offset as usize..(offset + bytes) as usize;
            let mut memory = buffer(bytes as usize);
            if dice.below(2) == 0 {
                memory.copy_from_slice(&pattern(bytes as usize, seed + turn));
                requested[range].copy_from_slice(&memory);
                queue.submit_write(0, vec![piece], memory);
                expected.push(None);
            } else {
                queue.submit(0, vec![piece], memory);
                expected.push(Some(requested[range].to_vec()));
            }
        }
        let mut end = End::RightBytes;
        for expected in expected {
            let finished = queue.wait().unwrap();
            match (finished.result, expected) {
                (Ok(()), Some(expected)) if end == End::RightBytes => {
                    assert!(finished.buffer[..] == expected[..])
                }
                (Ok(()), _) => {}
                (Err(error), _) => {
                    assert_named(&error, &faults, Path::new("/simulated"));
                    end = End::NamedError;
                }
            }
        }
        if end == End::RightBytes {
            assert!(disk.get(&path).unwrap() == requested);
        }
        end
    });
}

#[test]
fn a_row_for_rubbish_that_many_pieces_share_spoils_no_other() {
    for seed in 0..2_000 {
        let disk = SimulatedDisk::new(Faults { seed, ..Faults::default() });
        let path = PathBuf::from("/simulated/f");
        let file = pattern(100_000, 1);
        disk.put(&path, file.clone());
        let in_place = Options { in_place_bytes: 0, ..Options::default() };
        let files = disk.open(&[Layout::file(&path)], Access::Read, &in_place).unwrap();
        let mut pieces =
            vec![Piece { offset: 0, bytes: 512, at: 0 }, Piece { offset: 0, bytes: 512, at: 512 }];
        pieces.extend((1..20).map(|row| Piece { offset: row * 4096, bytes: 512, at: 0 }));
        let mut out = buffer(1024);
        files.queue().unwrap().read(0, &pieces, &mut out).unwrap();
        assert!(out[512..] == file[..512], "seed {seed}");
    }
}

#[test]
fn writes_reach_the_disk_or_a_named_error_says_so_and_a_crash_spares_what_was_synced() {
    watched(|seed| {
        let mut dice = Dice(Key::new(seed).with(2), 0);
        let mut requested = pattern(FILE_BYTES as usize, seed);
        let (disk, faults, layout) = disk(&mut dice, seed, &requested);
        let files = disk.open(std::slice::from_ref(&layout), Access::Write, &dice.options()).unwrap();
        let mut queue = files.queue().unwrap();
        let mut synced = requested.clone();
        let mut last = (0, 0);
        for round in 0..3 {
            let offset = dice.below(FILE_BYTES);
            let bytes = dice.below(FILE_BYTES - offset) as usize;
            let source = pattern(bytes, seed ^ (round << 32) ^ 77);
            last = (offset as usize, bytes);
            match queue.write(0, &[Piece { offset, bytes: bytes as u64, at: 0 }], &source) {
                Ok(()) => requested[offset as usize..offset as usize + bytes].copy_from_slice(&source),
                Err(error) => {
                    assert_named(&error, &faults, Path::new("/simulated"));
                    return End::NamedError;
                }
            }
            let now = parts_of(&disk, &layout);
            assert_eq!(now, deal(&layout, &requested), "what was written is there");
            if round < 2 {
                if let Err(error) = queue.sync() {
                    assert_named(&error, &faults, Path::new("/simulated"));
                    return End::NamedError;
                }
                synced = requested.clone();
            }
        }
        // After a crash every byte outside the last write is the synced one, and inside it the old or the new.
        let after = parts_of(&disk.crash(dice.below(1 << 32)), &layout);
        let (old, new) = (deal(&layout, &synced), deal(&layout, &requested));
        let touched = last.0..last.0 + last.1;
        let mut at = 0;
        while at < FILE_BYTES {
            let place = layout.place(at);
            let (part, offset) = (place.part, place.offset as usize);
            let byte = after[part][offset];
            let fresh = touched.contains(&(at as usize)) && byte == new[part][offset];
            assert!(byte == old[part][offset] || fresh, "byte {at}");
            at += 1 + dice.below(50);
        }
        End::RightBytes
    });
}

fn parts_of(disk: &SimulatedDisk, layout: &Layout) -> Vec<Vec<u8>> {
    layout.parts().iter().map(|path| disk.get(path).unwrap()).collect()
}

#[test]
fn a_full_disk_is_named_and_what_was_there_stays() {
    let disk = SimulatedDisk::new(Faults { room_bytes: 100_000, ..Faults::default() });
    let (a, b) = (Layout::file(Path::new("/simulated/a")), Layout::file(Path::new("/simulated/b")));
    disk.create(&a, 60_000).unwrap();
    let error = disk.create(&b, 60_000).unwrap_err();
    assert!(error.to_string().contains("/simulated/b") && error.to_string().contains("full"), "{error}");
    assert_eq!(disk.get(&a.parts()[0]).unwrap(), vec![0; 60_000]);
}

#[test]
fn a_disk_that_fills_up_while_it_is_written_is_named_with_the_offset() {
    let disk = SimulatedDisk::new(Faults { room_bytes: 200_000, reserves: false, ..Faults::default() });
    let (a, b) = (Layout::file(Path::new("/simulated/a")), Layout::file(Path::new("/simulated/b")));
    let kept = pattern(100_000, 1);
    for (layout, bytes, fits) in [(&a, 100_000, true), (&b, 150_000, false)] {
        disk.create(layout, bytes).unwrap();
        let files = disk.open(std::slice::from_ref(layout), Access::Write, &Options::default()).unwrap();
        let mut queue = files.queue().unwrap();
        let written = queue.write(0, &[Piece { offset: 0, bytes, at: 0 }], &pattern(bytes as usize, 1));
        match written {
            Ok(()) => assert!(fits),
            Err(error) => {
                let said = error.to_string();
                assert!(!fits && said.contains("/simulated/b") && said.contains("offset"), "{said}");
                assert!(said.contains("the disk is full"), "{said}");
            }
        }
    }
    assert!(disk.get(&a.parts()[0]).unwrap() == kept);
}

#[test]
fn a_bad_sector_fails_only_those_who_need_it() {
    let path = PathBuf::from("/simulated/f");
    let disk = SimulatedDisk::new(Faults::default());
    disk.put(&path, pattern(100_000, 1));
    disk.damage(&path, 51_200..51_712);
    let files = disk.open(&[Layout::file(&path)], Access::Read, &Options::default()).unwrap();
    let mut queue = files.queue().unwrap();
    let mut out = vec![0; 4096];
    for row in 0..190 {
        let read = queue.read(0, &[Piece { offset: row * 512, bytes: 512, at: 0 }], &mut out);
        match (row, read) {
            (100, Err(IoError::Read { offset: 51_200, source, .. })) => {
                assert_eq!(source.raw_os_error(), Some(libc::EIO));
            }
            (_, read) => {
                read.unwrap();
                assert!(out[..512] == pattern(100_000, 1)[row as usize * 512..][..512]);
            }
        }
    }
}
