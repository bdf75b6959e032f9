//! Damaged files: bits flipped, tails cut, pieces copied elsewhere. A parser may say yes or no; it may not panic,
//! hang or take memory that the file does not justify.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

use esker_import::{Result, hostile};
use esker_types::{peak_resident_bytes, random::Key};
use std::path::Path;

const MUTATIONS: u64 = 4000;
/// One page of the largest accepted size, read and unpacked, beside everything else.
const MOST_BYTES: u64 = 900 << 20;

/// Changes a few places of `bytes`, as `key` says.
fn mutate(bytes: &[u8], key: Key) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for round in 0..1 + key.at(0) % 4 {
        let key = key.with(round);
        let location = |salt: u64, length: usize| (key.at(salt) % length.max(1) as u64) as usize;
        let at = location(1, bytes.len());
        match key.at(2) % 6 {
            _ if bytes.is_empty() => return bytes,
            0 => bytes[at] ^= 1 << (key.at(3) % 8),
            1 => bytes[at] = [0, 0xff, 0x7f, 0x80, b'9', b'-', b'\n', b','][location(3, 8)],
            2 => bytes.truncate(at),
            3 => {
                let from = location(3, bytes.len());
                let piece = bytes[from..(from + 1 + location(4, 16)).min(bytes.len())].to_vec();
                bytes.splice(at..at, piece);
            }
            4 => {
                let end = (at + 1 + location(3, 8)).min(bytes.len());
                bytes.drain(at..end);
            }
            _ => bytes[at] = key.at(3) as u8,
        }
    }
    bytes
}

fn check(parser: fn(&Path, &[u8]) -> Result<()>, valid: &[u8]) {
    // Every import syncs its journal: thousands of them want a directory in memory, where there is one.
    let scratch = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    parser(scratch.path(), valid).expect("the file is valid before it is damaged");
    let mut refused = 0;
    for seed in 0..MUTATIONS {
        let bytes = mutate(valid, Key::new(seed));
        match parser(scratch.path(), &bytes) {
            Ok(()) => (),
            Err(error) => {
                assert!(!error.to_string().is_empty());
                refused += 1;
            }
        }
        assert!(peak_resident_bytes() < MOST_BYTES, "seed {seed} took {} bytes", peak_resident_bytes());
    }
    assert!(refused > MUTATIONS / 20, "only {refused} refused: is anything damaged?");
}

fn fixture(name: &str) -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/parquet").join(name)).unwrap()
}

fn npy(descr: &str, shape: &str, data: &[u8]) -> Vec<u8> {
    let header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n");
    [b"\x93NUMPY\x01\x00", &(header.len() as u16).to_le_bytes()[..], header.as_bytes(), data].concat()
}

#[test]
fn edge_lists_as_text() {
    check(hostile::csv, b"src,dst,relation\n1,2,0\n3,4,1\n5,6,0\n\"7\",8,12\n");
}

#[test]
fn edge_lists_of_strings() {
    check(hostile::csv, "a,b,\"likes, a lot\"\nb,c,knows\n\u{e9},a,\"say \"\"hi\"\"\"\n".as_bytes());
}

#[test]
fn rows_as_text() {
    check(hostile::csv_rows, b"x,y\n1,2\n-3,4e5\n0.5,nan\n");
}

#[test]
fn triples() {
    check(hostile::triples, b"a\tlikes\tb\nb\tknows\tc\n/m/1\tlikes\ta\n");
}

#[test]
fn descriptions_in_yaml() {
    let text = "graph:\n  nodes:\n    - num: 4\n  edges:\n    - {format: csv, path: e.csv}\nfeature_data:\n  - &a {domain: node, name: feat, format: numpy, path: x.npy}\n  - *a\ntasks:\n  - name: n\n    train_set:\n      - data: [{name: seeds, format: numpy, path: t.npy}]\n";
    check(hostile::graphbolt, text.as_bytes());
}

#[test]
fn npy_edges_and_rows() {
    check(hostile::npy, &npy("<u2", "(2, 3)", &[0, 0, 1, 0, 2, 0, 1, 0, 2, 0, 0, 0]));
    check(hostile::npy_rows, &npy("<f2", "(3, 2)", &[0; 12]));
    check(hostile::csc, &npy("|i1", "(5,)", &[0, 1, 1, 3, 3]));
}

#[test]
fn parquet_edges() {
    check(hostile::parquet, &fixture("numbers.parquet"));
    check(hostile::parquet, &fixture("names.parquet"));
}

#[test]
fn parquet_rows() {
    check(hostile::parquet_rows, &fixture("columns.parquet"));
    check(hostile::parquet_rows, &fixture("lists.parquet"));
    check(hostile::parquet_rows, &fixture("fixed.parquet"));
}
