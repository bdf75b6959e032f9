//! Entry points for fuzz targets and mutation tests: bytes in, a result out. Each writes the bytes into `scratch`, an
//! existing directory, imports them through one parser and reads every stream to its end.

use crate::formats::by_name;
use crate::source::{EdgeSource, ForeignNegatives, IdSource, ImportSource, NameSource, RowSource, Splits};
use crate::{ImportWorkspace, Request, Result};
use esker_store::{Journal, StoreError};
use esker_types::{Budget, Silent};
use std::path::{Path, PathBuf};

/// Rows read at a time, and the largest number of elements they may have.
const ROWS: u64 = 256;
const ELEMENTS: usize = 1 << 22;

/// An edge list as text.
pub fn csv(scratch: &Path, bytes: &[u8]) -> Result<()> {
    let edges = put(scratch, "edges.csv", bytes)?;
    import(scratch, "csv", Request { edges: Some(edges), ..Request::default() })
}

/// Features and labels as text.
pub fn csv_rows(scratch: &Path, bytes: &[u8]) -> Result<()> {
    rows(scratch, put(scratch, "rows.csv", bytes)?)
}

/// An edge list in parquet, with or without strings.
pub fn parquet(scratch: &Path, bytes: &[u8]) -> Result<()> {
    let edges = put(scratch, "edges.parquet", bytes)?;
    import(scratch, "parquet", Request { edges: Some(edges), ..Request::default() })
}

/// Features and labels in parquet.
pub fn parquet_rows(scratch: &Path, bytes: &[u8]) -> Result<()> {
    rows(scratch, put(scratch, "rows.parquet", bytes)?)
}

/// An edge list as npy.
pub fn npy(scratch: &Path, bytes: &[u8]) -> Result<()> {
    let edges = put(scratch, "edges.npy", bytes)?;
    import(scratch, "npy", Request { edges: Some(edges), ..Request::default() })
}

/// Features and labels as npy.
pub fn npy_rows(scratch: &Path, bytes: &[u8]) -> Result<()> {
    rows(scratch, put(scratch, "rows.npy", bytes)?)
}

/// The starts of a CSC matrix, as npy; its indices are a fixed vector of three.
pub fn csc(scratch: &Path, bytes: &[u8]) -> Result<()> {
    let indptr = put(scratch, "starts.npy", bytes)?;
    let indices = put(scratch, "indices.npy", THREE_BYTES)?;
    import(scratch, "csc", Request { indptr: Some(indptr), indices: Some(indices), ..Request::default() })
}

const THREE_BYTES: &[u8] =
    b"\x93NUMPY\x01\x00\x3c\x00{'descr': '|u1', 'fortran_order': False, 'shape': (3,), }  \n\x00\x01\x02";

/// The training file of a knowledge graph.
pub fn triples(scratch: &Path, bytes: &[u8]) -> Result<()> {
    put(scratch, "train.txt", bytes)?;
    put(scratch, "valid.txt", b"")?;
    put(scratch, "test.txt", b"")?;
    import(scratch, "triples", Request { from: Some(scratch.to_path_buf()), ..Request::default() })
}

/// A GraphBolt description; the files it names are not opened.
pub fn graphbolt(scratch: &Path, bytes: &[u8]) -> Result<()> {
    crate::formats::graphbolt::check_metadata(&scratch.join("metadata.yaml"), bytes)
}

/// Opens the files of `request`, reads every stream to its end and returns the number of nodes of the dataset. A few
/// bytes of text may claim more nodes than a disk has space for, and a test needs to know this before it builds.
pub fn nodes(scratch: &Path, request: &Request) -> Result<u64> {
    in_workspace(scratch, request, |source| {
        drain(source)?;
        let (mut stream, mut chunk, mut nodes) = (source.edges.open(0)?, Vec::new(), 0);
        while stream.next(&mut chunk)? {
            let ends = chunk.iter().map(|edge| edge.source.max(edge.target).saturating_add(1));
            nodes = nodes.max(ends.max().unwrap_or(0));
        }
        Ok(source.nodes.map_or(nodes, |stated| stated.max(nodes)))
    })
}

fn put(scratch: &Path, name: &str, bytes: &[u8]) -> Result<PathBuf> {
    let path = scratch.join(name);
    std::fs::write(&path, bytes).map_err(StoreError::io(&path))?;
    Ok(path)
}

fn rows(scratch: &Path, path: PathBuf) -> Result<()> {
    let edges = put(scratch, "no-edges.csv", b"0,0\n")?;
    let (features, labels) = (Some(path.clone()), Some(path));
    import(scratch, "csv", Request { edges: Some(edges), features, labels, ..Request::default() })
}

fn import(scratch: &Path, format: &str, request: Request) -> Result<()> {
    in_workspace(scratch, &Request { format: format.to_string(), ..request }, drain)
}

fn in_workspace<T>(
    scratch: &Path,
    request: &Request,
    look: impl FnOnce(&ImportSource) -> Result<T>,
) -> Result<T> {
    let directory = scratch.join("work");
    // The journal of the previous bytes belongs to another job.
    let _ = std::fs::remove_dir_all(&directory);
    let (journal, _) = Journal::open(&directory, "hostile")?;
    let budget = Budget { host_bytes: 256 << 20 };
    let mut workspace = ImportWorkspace { directory, budget, journal: &journal, progress: &Silent };
    let format = by_name(&request.format)?;
    format.inputs(request)?;
    look(&format.open(request, &mut workspace)?)
}

/// Reads every stream of a source to its end.
fn drain(source: &ImportSource) -> Result<()> {
    drain_edges(&*source.edges)?;
    let features = source.features.iter().chain(source.labels.iter().map(|labels| &labels.rows));
    features.into_iter().try_for_each(|rows| drain_rows(&**rows))?;
    match &source.splits {
        Splits::None => (),
        Splits::Nodes { train, valid, test } => {
            [train, valid, test].into_iter().try_for_each(|ids| drain_ids(&**ids))?;
        }
        Splits::Coded(rows) => drain_rows(&**rows)?,
        Splits::Edges { valid, test, negatives } => {
            [valid, test].into_iter().try_for_each(|edges| drain_edges(&**edges))?;
            for negatives in negatives.iter().flatten() {
                if let ForeignNegatives::Shared(edges) = negatives {
                    drain_edges(&**edges)?;
                }
            }
        }
    }
    source.node_names.as_ref().map_or(Ok(()), |names| drain_names(&**names))
}

fn drain_edges(edges: &dyn EdgeSource) -> Result<()> {
    let (mut stream, mut chunk) = (edges.open(0)?, Vec::new());
    while stream.next(&mut chunk)? {}
    edges.open(1)?.next(&mut chunk).map(|_| ())
}

fn drain_rows(rows: &dyn RowSource) -> Result<()> {
    let (mut stream, mut left) = (rows.open(0)?, rows.rows());
    if left == 0 {
        return Ok(());
    }
    let at_a_time = (ELEMENTS / rows.dim().max(1)).clamp(1, ROWS as usize) as u64;
    let mut values = vec![0.0; rows.dim() * at_a_time as usize];
    while left > 0 {
        let count = left.min(at_a_time);
        stream.fill(&mut values[..count as usize * rows.dim()])?;
        left -= count;
    }
    Ok(())
}

fn drain_ids(ids: &dyn IdSource) -> Result<()> {
    let (mut stream, mut chunk) = (ids.open()?, Vec::new());
    while stream.next(&mut chunk)? {}
    Ok(())
}

fn drain_names(names: &dyn NameSource) -> Result<()> {
    let (mut stream, mut name) = (names.open()?, Vec::new());
    while stream.next(&mut name)? {}
    Ok(())
}
