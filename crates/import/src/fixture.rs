//! Small input files for the tests, and helpers that read sources to their end.

use crate::source::{EdgeSource, IdSource, RowSource, Splits};
use crate::{ImportWorkspace, Result};
use esker_types::{Budget, Silent};
use std::{
    io::Write,
    path::{Path, PathBuf},
};

/// An npy of `descr` elements; `shape` as Python prints it.
pub fn npy(descr: &str, shape: &str, data: &[u8]) -> Vec<u8> {
    let header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n");
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    bytes
}

/// An npy vector of 64-bit integers.
pub fn integers(values: &[i64]) -> Vec<u8> {
    shaped_integers(&format!("({},)", values.len()), values)
}

/// An npy of 64-bit integers of any shape.
pub fn shaped_integers(shape: &str, values: &[i64]) -> Vec<u8> {
    npy("<i8", shape, &values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>())
}

/// An npy of 32-bit floats of any shape.
pub fn floats(shape: &str, values: &[f32]) -> Vec<u8> {
    npy("<f4", shape, &values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>())
}

/// Writes a zip archive, deflated, of these members.
pub fn write_zip(path: &Path, members: &[(&str, Vec<u8>)]) {
    let mut archive = zip::ZipWriter::new(std::fs::File::create(path).unwrap());
    let options =
        zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Deflated);
    for (name, bytes) in members {
        archive.start_file(*name, options).unwrap();
        archive.write_all(bytes).unwrap();
    }
    archive.finish().unwrap();
}

/// The bytes as a gzip file.
pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// A file committed under `tests/fixtures`.
pub fn committed(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// The real datasets next to the checkout. If they are missing, prints that the test is skipped.
pub fn real_data(name: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data").join(name);
    if path.exists() {
        return Some(path);
    }
    println!("skipped: {} is not here", path.display());
    None
}

/// Every id.
pub fn all_ids(source: &dyn IdSource) -> Result<Vec<u64>> {
    let (mut stream, mut chunk, mut all) = (source.open()?, Vec::new(), Vec::new());
    while stream.next(&mut chunk)? {
        all.extend_from_slice(&chunk);
    }
    Ok(all)
}

/// The ends of every edge from number `skip` on.
pub fn all_edges(source: &dyn EdgeSource, skip: u64) -> Result<Vec<(u64, u64)>> {
    let (mut stream, mut chunk, mut all) = (source.open(skip)?, Vec::new(), Vec::new());
    while stream.next(&mut chunk)? {
        all.extend(chunk.iter().map(|edge| (edge.source, edge.target)));
    }
    Ok(all)
}

/// Every value from row `first` on, read a few rows at a time.
pub fn all_rows(source: &dyn RowSource, first: u64) -> Result<Vec<f32>> {
    let mut values = vec![0.0; (source.rows() - first) as usize * source.dim()];
    let mut stream = source.open(first)?;
    for rows in values.chunks_mut(source.dim().max(1) * 7) {
        stream.fill(rows)?;
    }
    Ok(values)
}

/// Runs `work` in a workspace with a generous budget and no progress reports.
pub fn in_workspace<T>(work: impl FnOnce(&mut ImportWorkspace) -> T) -> T {
    let directory = tempfile::tempdir().unwrap();
    let (journal, _) = esker_store::Journal::open(directory.path(), "test").unwrap();
    work(&mut ImportWorkspace {
        directory: directory.path().to_path_buf(),
        budget: Budget { host_bytes: 4 << 30 },
        journal: &journal,
        progress: &Silent,
    })
}

/// Numbers of training, validation and test nodes.
pub fn split_sizes(splits: &Splits) -> Result<[usize; 3]> {
    let Splits::Nodes { train, valid, test } = splits else { panic!("no lists of nodes") };
    Ok([all_ids(&**train)?.len(), all_ids(&**valid)?.len(), all_ids(&**test)?.len()])
}

/// A small generator, so that a failure can be repeated from its printed seed.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % limit.max(1)
    }
}

/// `whole` with a few bytes flipped, truncated, or replaced from `other`. Deterministic for a seed.
pub fn damaged(whole: &[u8], other: &[u8], seed: u64) -> Vec<u8> {
    let (mut bytes, mut random) = (whole.to_vec(), Random(seed));
    for _ in 0..1 + random.below(4) {
        let at = random.below(bytes.len());
        match random.below(5) {
            0 if !bytes.is_empty() => bytes[at] ^= 1 << random.below(8),
            1 if !bytes.is_empty() => bytes[at] = random.below(256) as u8,
            2 => bytes.truncate(bytes.len() - random.below(bytes.len() / 4)),
            3 => {
                let from = random.below(other.len());
                let piece = &other[from..(from + random.below(64)).min(other.len())];
                bytes.splice(at..at, piece.iter().copied());
            }
            _ => drop(bytes.drain(at..(at + random.below(8)).min(bytes.len()))),
        }
    }
    bytes
}
