//! Every I/O backend gives the same bytes for the same plans, and does the same to files.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

mod support;

use esker_io::{Access, Disk, IoBackendKind, IoError, Layout, Options, Piece, Stream, ThisMachine};
use esker_types::ErrorKind;
use proptest::prelude::*;
use std::io::Read;
use support::{assert_delivered, buffer, deal, io_backends, lay, layout, open, pattern, pieces};

const FILE_BYTES: usize = 150_001;

fn spans(most: u64) -> impl Strategy<Value = Vec<(u64, u64)>> {
    // Widths from 1 to 20 000 bytes at any offset, often the same row again, often the file's end.
    let width = prop_oneof![1u64..600, 1u64..20_001, Just(512), Just(4096)];
    let span = (0u64..FILE_BYTES as u64, width, 0u8..8).prop_map(move |(offset, bytes, kind)| {
        let offset = match kind {
            0 => offset / 512 * 512,
            1 => FILE_BYTES as u64 - bytes.min(FILE_BYTES as u64),
            2 => offset % 3 * bytes,
            _ => offset,
        };
        (
            offset.min(FILE_BYTES as u64),
            bytes.min(most).min(FILE_BYTES as u64 - offset.min(FILE_BYTES as u64)),
        )
    });
    prop::collection::vec(span, 0..60)
}

fn options() -> impl Strategy<Value = Options> {
    let block = prop::sample::select(vec![None, Some(4096u64)]);
    let gap = prop::sample::select(vec![0u64, 700, 20_000]);
    let max = prop::sample::select(vec![4096u64, 16_384, 1 << 20]);
    let in_place = prop::sample::select(vec![0u64, 8192]);
    (block, gap, max, 1usize..40, in_place).prop_map(
        |(block_bytes, gap_bytes, max_bytes, depth, in_place_bytes)| Options {
            in_place_bytes,
            block_bytes,
            gap_bytes,
            max_bytes,
            depth,
            staging_bytes: max_bytes * 2,
            ..Options::default()
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn every_backend_reads_the_same_bytes(
        spans in spans(20_000), more in spans(20_000), options in options(), parts in 1usize..4,
        pad in 0u64..3, shift in 0usize..3,
    ) {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let file = pattern(FILE_BYTES, 1);
        let layout = layout(directory.path(), parts);
        lay(&layout, &file);
        for io_backend in io_backends(directory.path()) {
            let files = open(&layout, Access::Read, io_backend, options).unwrap();
            prop_assert_eq!(files.bytes(0), FILE_BYTES as u64);
            let mut queue = files.queue().unwrap();
            // Two jobs of the queue's own, and one borrowed, at an odd address, that overtakes nobody.
            let (own, own_bytes) = pieces(&more, 0);
            let first = queue.submit(0, own.clone(), buffer(own_bytes));
            let second = queue.submit(0, own.clone(), buffer(own_bytes));
            let (borrowed, bytes) = pieces(&spans, pad);
            let mut out = vec![0u8; bytes + shift];
            queue.read(0, &borrowed, &mut out[shift..]).unwrap();
            assert_delivered(&borrowed, &out[shift..], &file, io_backend.name());
            for number in [first, second] {
                let finished = queue.wait().unwrap();
                prop_assert_eq!(finished.job, number);
                finished.result.unwrap();
                assert_delivered(&own, &finished.buffer, &file, io_backend.name());
            }
            prop_assert!(queue.wait().is_none());
            let counters = queue.counters();
            prop_assert!(counters.deepest <= options.depth as u64);
            prop_assert_eq!(counters.useful_bytes, borrowed.iter().chain(&own).chain(&own).map(|p| p.bytes).sum::<u64>());
        }
    }

    #[test]
    fn every_backend_writes_the_same_bytes_and_nothing_around_them(
        steps in prop::collection::vec((0u64..9_000, 0u64..20_000), 1..12), parts in 1usize..4, shift in 0u64..2,
    ) {
        let mut offset = 0;
        let spans: Vec<(u64, u64)> = steps
            .iter()
            .map(|&(skip, bytes)| {
                offset += skip + bytes;
                (offset - bytes, bytes)
            })
            .filter(|&(offset, bytes)| offset + bytes <= FILE_BYTES as u64)
            .collect();
        let (mut pieces, bytes) = pieces(&spans, 0);
        pieces.iter_mut().for_each(|piece| piece.at += shift);
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let layout = layout(directory.path(), parts);
        for io_backend in io_backends(directory.path()) {
            let mut requested = pattern(FILE_BYTES, 2);
            lay(&layout, &requested);
            let mut source = buffer(bytes + shift as usize);
            source.copy_from_slice(&pattern(bytes + shift as usize, 3));
            for piece in &pieces {
                let (from, to) = (piece.at as usize, piece.offset as usize);
                requested[to..to + piece.bytes as usize].copy_from_slice(&source[from..from + piece.bytes as usize]);
            }
            let files = open(&layout, Access::Write, io_backend, Options { depth: 4, ..Options::default() }).unwrap();
            let mut queue = files.queue().unwrap();
            let half = pieces.len() / 2;
            queue.write(0, &pieces[..half], &source).unwrap();
            queue.submit_write(0, pieces[half..].to_vec(), source);
            queue.sync().unwrap();
            queue.wait().unwrap().result.unwrap();
            // What was written is read back by the same queue, and by anybody else.
            let mut back = vec![0u8; FILE_BYTES];
            queue.read(0, &[Piece { offset: 0, bytes: FILE_BYTES as u64, at: 0 }], &mut back).unwrap();
            prop_assert!(back == requested, "{io_backend:?}");
            for (path, part) in layout.parts().iter().zip(deal(&layout, &requested)) {
                prop_assert!(std::fs::read(path).unwrap() == part, "{io_backend:?}: {}", path.display());
            }
        }
    }

    #[test]
    fn streams_bring_any_range_in_order(from in 0u64..FILE_BYTES as u64, bytes in 0u64..FILE_BYTES as u64, pages in 1u64..9, parts in 1usize..4) {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let file = pattern(FILE_BYTES, 1);
        let layout = layout(directory.path(), parts);
        lay(&layout, &file);
        let end = (from + bytes).min(FILE_BYTES as u64);
        for io_backend in io_backends(directory.path()) {
            let files = open(&layout, Access::Read, io_backend, Options::default()).unwrap();
            let mut stream = Stream::open(&files, 0, from..end, pages * 4096, 3).unwrap();
            let mut got = Vec::new();
            while let Some(chunk) = stream.next_chunk().unwrap() {
                prop_assert!(!chunk.is_empty());
                got.extend_from_slice(chunk);
            }
            prop_assert!(got == file[from as usize..end as usize], "{io_backend:?}");
            let mut got = Vec::new();
            Stream::open(&files, 0, from..end, pages * 4096, 3).unwrap().read_to_end(&mut got).unwrap();
            prop_assert!(got == file[from as usize..end as usize], "{io_backend:?}");
        }
    }
}

fn on_every_backend(bytes: usize, check: impl Fn(IoBackendKind, &Layout)) {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let layout = Layout::file(&directory.path().join("f"));
    let io_backends = io_backends(directory.path());
    assert!(io_backends.contains(&IoBackendKind::PoolBuffered), "the last backend works everywhere");
    for io_backend in io_backends {
        lay(&layout, &pattern(bytes, 1));
        check(io_backend, &layout);
    }
}

#[test]
fn a_piece_beyond_the_file_is_refused_before_anything_is_read() {
    on_every_backend(10_000, |io_backend, layout| {
        let mut queue = open(layout, Access::Read, io_backend, Options::default()).unwrap().queue().unwrap();
        for (offset, bytes) in [(9_999, 2), (10_000, 1), (u64::MAX, 1), (0, 10_001)] {
            let mut out = vec![0; 20_000];
            let error = queue.read(0, &[Piece { offset, bytes, at: 0 }], &mut out).unwrap_err();
            assert!(matches!(error, IoError::Ended { found_bytes: 10_000, .. }), "{error}");
        }
        assert_eq!(queue.counters().reads, 0);
        // The queue is as good as before.
        let mut out = vec![0; 10_000];
        queue.read(0, &[Piece { offset: 0, bytes: 10_000, at: 0 }], &mut out).unwrap();
        assert!(out == pattern(10_000, 1));
    });
}

#[test]
fn a_file_cut_while_it_is_open_is_an_error_that_names_it() {
    on_every_backend(100_000, |io_backend, layout| {
        let mut queue = open(layout, Access::Read, io_backend, Options::default()).unwrap().queue().unwrap();
        let file = std::fs::File::options().write(true).open(&layout.parts()[0]).unwrap();
        file.set_len(50_001).unwrap();
        let mut out = vec![0; 100_000];
        let error = queue.read(0, &[Piece { offset: 0, bytes: 100_000, at: 0 }], &mut out).unwrap_err();
        assert!(matches!(error, IoError::Ended { .. }), "{io_backend:?}: {error}");
        assert!(error.to_string().contains("esker verify"), "{error}");
        queue.read(0, &[Piece { offset: 0, bytes: 50_000, at: 0 }], &mut out).unwrap();
        assert!(out[..50_000] == pattern(50_000, 1), "{io_backend:?}");
    });
}

#[test]
fn a_queue_dropped_with_jobs_in_flight_gives_nothing_back_early() {
    on_every_backend(1 << 20, |io_backend, layout| {
        for _ in 0..20 {
            let mut queue =
                open(layout, Access::Read, io_backend, Options::default()).unwrap().queue().unwrap();
            let rows: Vec<(u64, u64)> = (0..2_000).map(|row| (row * 523 % 1_000_000, 512)).collect();
            for _ in 0..3 {
                let (pieces, bytes) = pieces(&rows, 0);
                queue.submit(0, pieces, buffer(bytes));
            }
            drop(queue);
            // Memory that the kernel still wrote to would be somebody else's by now.
            let others = vec![7u8; 3 << 20];
            assert!(others.iter().all(|byte| *byte == 7));
        }
    });
}

#[test]
fn a_queue_that_is_stopped_says_so_and_another_one_works() {
    on_every_backend(1 << 20, |io_backend, layout| {
        let options = Options { depth: 2, ..Options::default() };
        let files = open(layout, Access::Read, io_backend, options).unwrap();
        let mut queue = files.queue().unwrap();
        // Far apart, so that each is a read of its own and two are soon in flight.
        let rows: Vec<(u64, u64)> = (0..900).map(|row| (row * 1153, 100)).collect();
        let (pieces, bytes) = pieces(&rows, 0);
        queue.submit(0, pieces.clone(), buffer(bytes));
        queue.stopper().stop();
        let finished = queue.wait().unwrap();
        assert!(matches!(finished.result, Err(IoError::Cancelled)), "{io_backend:?}");
        let mut out = vec![0; bytes];
        let later = queue.read(0, &pieces, &mut out);
        assert!(matches!(later, Err(IoError::Cancelled)), "{io_backend:?}");
        files.queue().unwrap().read(0, &pieces, &mut out).unwrap();
        assert_delivered(&pieces, &out, &pattern(1 << 20, 1), io_backend.name());
    });
}

#[test]
fn a_dense_batch_reads_each_block_once() {
    on_every_backend(1 << 20, |io_backend, layout| {
        // 400-byte rows, every other one: 2621 of 2621 blocks hold a part of one, or nearly so.
        let mut queue = open(layout, Access::Read, io_backend, Options::default()).unwrap().queue().unwrap();
        let rows: Vec<u64> = (0..2_600).map(|row| row * 401 % 2_600).filter(|row| row % 3 != 0).collect();
        let spans: Vec<(u64, u64)> = rows.iter().map(|row| (row * 400, 400)).collect();
        let (pieces, bytes) = pieces(&spans, 0);
        let mut out = vec![0; bytes];
        queue.read(0, &pieces, &mut out).unwrap();
        let block = queue.io_backend().block_bytes;
        let blocks: std::collections::BTreeSet<u64> =
            spans.iter().flat_map(|(at, bytes)| at / block..(at + bytes).div_ceil(block)).collect();
        assert_eq!(queue.counters().read_bytes, blocks.len() as u64 * block, "{io_backend:?}");
        assert_eq!(queue.counters().requests, rows.len() as u64);
        let runs = blocks.iter().filter(|block| !blocks.contains(&(*block + 1))).count() as u64;
        assert!(
            queue.counters().reads <= runs + (1 << 20) / 4096,
            "{io_backend:?}: {:?}",
            queue.counters().reads
        );
    });
}

#[test]
fn files_are_created_at_their_length_with_their_room_reserved() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let layout = layout(directory.path(), 3);
    ThisMachine.create(&layout, 50_000).unwrap();
    let files = ThisMachine.open(std::slice::from_ref(&layout), Access::Write, &Options::default()).unwrap();
    assert_eq!(files.bytes(0), 50_000);
    let error = ThisMachine.create(&layout, 1 << 60).unwrap_err();
    assert!(error.to_string().contains("part-0"), "{error}");
}

#[test]
fn options_that_cannot_be_are_refused_in_words() {
    on_every_backend(4096, |io_backend, layout| {
        for bad in [
            Options { depth: 0, ..Options::default() },
            Options { block_bytes: Some(1000), ..Options::default() },
            Options { max_bytes: 100, ..Options::default() },
            Options { staging_bytes: 4096, ..Options::default() },
        ] {
            let error = open(layout, Access::Read, io_backend, bad).map(|_| ()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Asked, "{error}");
        }
    });
}

#[test]
fn jobs_can_be_asked_for_without_waiting() {
    on_every_backend(1 << 20, |io_backend, layout| {
        let mut queue = open(layout, Access::Read, io_backend, Options::default()).unwrap().queue().unwrap();
        assert!(queue.try_wait().is_none());
        queue.submit(0, vec![Piece { offset: 5, bytes: 1 << 19, at: 0 }], buffer(1 << 19));
        let finished = loop {
            match queue.try_wait() {
                Some(finished) => break finished,
                None => std::thread::yield_now(),
            }
        };
        finished.result.unwrap();
        assert!(finished.buffer[..] == pattern(1 << 20, 1)[5..5 + (1 << 19)], "{io_backend:?}");
        assert!(queue.try_wait().is_none());
    });
}

#[test]
fn the_part_that_is_too_short_is_named_and_writes_do_not_grow_files() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let layout = layout(directory.path(), 2);
    lay(&layout, &pattern(50_000, 1));
    std::fs::File::options().write(true).open(&layout.parts()[1]).unwrap().set_len(100).unwrap();
    let files = open(&layout, Access::Write, IoBackendKind::PoolBuffered, Options::default()).unwrap();
    let mut queue = files.queue().unwrap();
    let piece = Piece { offset: 0, bytes: 50_000, at: 0 };
    let error = queue.read(0, &[piece], &mut vec![0; 50_000]).unwrap_err().to_string();
    assert!(error.contains("part-1") && error.contains("ends after 100"), "{error}");
    let error = queue.write(0, &[piece], &vec![0; 50_000]).unwrap_err().to_string();
    assert!(error.contains("part-1") && error.contains("full length"), "{error}");
}

#[test]
fn only_regular_files_are_opened_and_links_are_not_followed_when_files_are_made() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let pipe = directory.path().join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for path in [pipe, directory.path().to_path_buf()] {
        let error = ThisMachine.open(&[Layout::file(&path)], Access::Read, &Options::default());
        let error = error.map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("regular"), "{error}");
    }
    let (victim, link) = (directory.path().join("victim"), directory.path().join("link"));
    std::fs::write(&victim, "mine").unwrap();
    std::os::unix::fs::symlink(&victim, &link).unwrap();
    ThisMachine.create(&Layout::file(&link), 4096).unwrap();
    assert_eq!(std::fs::read(&victim).unwrap(), b"mine");
    assert_eq!(std::fs::read(&link).unwrap(), vec![0; 4096]);
}
