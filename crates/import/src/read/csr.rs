//! Sparse feature matrices as scipy saves them (`scipy.sparse.save_npz`), made dense row by row. All three arrays are
//! streamed in parallel, so a matrix of any size takes the memory of a few buffers.

use crate::input::Member;
use crate::npy::{Header, NpyArray, NpyElements, Scalar, find_member};
use crate::source::{CHUNK, EdgeSource, EdgeStream, ForeignEdge, RowSource, RowStream};
use crate::{Location, Result, input};
use esker_types::Dtype;
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// Longest text member (`format`) that is read.
const TEXT_BYTES: u64 = 4096;

/// Largest number of columns of a sparse feature matrix: rows are made dense, and a sparse file can claim any number
/// for free.
pub const MOST_COLUMNS: u64 = 1 << 24;

/// Refuses feature matrices without columns, and those whose dense rows would be too long.
pub fn check_columns(columns: u64, location: Location) -> Result<()> {
    if (1..=MOST_COLUMNS).contains(&columns) {
        return Ok(());
    }
    Err(location.bad(format!("1 to {MOST_COLUMNS} columns, as feature rows are stored dense"), columns))
}

/// Opens a CSR matrix saved by `scipy.sparse.save_npz`.
pub fn open_csr(path: &Path) -> Result<Box<dyn RowSource>> {
    let members = input::zip_members(path)?;
    let member = find_member(&members, path, "format")?;
    let format = text_member(member)?;
    if format != "csr" {
        return Err(member
            .location()
            .bad("a matrix in csr form", format!("`{format}`; save it again after `.tocsr()`")));
    }
    let matrix = CsrRows::open(&members, path, "")?;
    check_columns(matrix.dim, Location::file(path))?;
    Ok(Box::new(matrix))
}

/// A scalar member that is a string: numpy writes it as bytes (`|S3`) or as 32-bit characters (`<U3`).
fn text_member(member: &Member) -> Result<String> {
    let bytes = member.read_whole(TEXT_BYTES)?;
    let mut rest = &bytes[..];
    let header = Header::read(&mut rest, &member.location())?;
    let mut text = String::new();
    match header.descr.get(..2) {
        Some("|S") => text.push_str(&String::from_utf8_lossy(rest)),
        Some("<U") => text.extend(
            rest.as_chunks::<4>().0.iter().filter_map(|code| char::from_u32(u32::from_le_bytes(*code))),
        ),
        _ => return Err(member.location().bad("a string", format!("dtype {}", header.descr))),
    }
    Ok(text.trim_end_matches('\0').to_string())
}

/// A CSR matrix whose arrays are members of an npz.
pub struct CsrRows {
    path: PathBuf,
    starts: NpyArray,
    columns: NpyArray,
    values: NpyArray,
    rows: u64,
    dim: u64,
}

impl CsrRows {
    /// The matrix in the members `{prefix}indptr`, `{prefix}indices`, `{prefix}data` and `{prefix}shape`. Lengths are
    /// checked here; entries are checked when they are read.
    pub fn open(members: &[Member], path: &Path, prefix: &str) -> Result<CsrRows> {
        let array = |name: &str| NpyArray::member(members, path, &format!("{prefix}{name}"));
        let shape = array("shape")?;
        if shape.elements() != 2 {
            return Err(shape.location().bad("two numbers, rows and columns", shape.elements()));
        }
        let mut axes = Vec::with_capacity(2);
        shape.stream(0)?.ids(2, &mut axes)?;
        let matrix = CsrRows {
            path: path.to_path_buf(),
            starts: vector(array("indptr")?)?,
            columns: vector(array("indices")?)?,
            values: vector(array("data")?)?,
            rows: axes[0],
            dim: axes[1],
        };
        if matrix.starts.elements().checked_sub(1) != Some(matrix.rows) {
            let expected = format!("{} + 1 row starts", matrix.rows);
            return Err(matrix.starts.location().bad(expected, matrix.starts.elements()));
        }
        if matrix.values.elements() != matrix.columns.elements() {
            let expected = format!("{} values, one for each of `indices`", matrix.columns.elements());
            return Err(matrix.values.location().bad(expected, matrix.values.elements()));
        }
        Ok(matrix)
    }

    /// Number of entries.
    pub fn entries(&self) -> u64 {
        self.columns.elements()
    }

    /// Row starts and columns of the whole matrix, checked, for matrices that are small or used as edges.
    pub fn structure(&self) -> Result<(Vec<u64>, Vec<u32>)> {
        if self.dim > u32::MAX as u64 {
            return Err(Location::file(&self.path).bad("fewer than 2^32 columns", self.dim));
        }
        let (mut starts, mut columns) = (vec![0], Vec::new());
        let mut walk = self.walk(0)?;
        while walk.row < walk.rows {
            let count = (walk.rows - walk.row).min(CHUNK as u64) as usize;
            walk.rows(count, |_, column, _| columns.push(column as u32))?;
            starts.extend_from_slice(&walk.ends);
        }
        Ok((starts, columns))
    }

    fn walk(&self, first: u64) -> Result<CsrWalk> {
        let mut starts = self.starts.stream(first)?;
        let mut start = Vec::with_capacity(1);
        starts.ids(1, &mut start)?;
        let position = start[0];
        let allowed = if first == 0 { 0..=0 } else { 0..=self.entries() };
        if !allowed.contains(&position) {
            let expected = format!("a row start in {allowed:?}");
            return Err(self.starts.row_location(first).bad(expected, position));
        }
        Ok(CsrWalk {
            starts,
            columns: self.columns.stream(position)?,
            values: self.values.stream(position)?,
            starts_location: self.starts.location(),
            columns_location: self.columns.location(),
            row: first,
            rows: self.rows,
            dim: self.dim,
            position,
            entries: self.entries(),
            ends: Vec::new(),
            column_chunk: Vec::new(),
            value_chunk: Vec::new(),
        })
    }
}

fn vector(array: NpyArray) -> Result<NpyArray> {
    if array.shape().len() == 1 {
        return Ok(array);
    }
    Err(array.location().bad("a vector", format!("shape {:?}", array.shape())))
}

impl RowSource for CsrRows {
    fn rows(&self) -> u64 {
        self.rows
    }
    fn dim(&self) -> usize {
        self.dim as usize
    }
    fn natural_dtype(&self) -> Dtype {
        if self.values.scalar() == Scalar::F16 { Dtype::F16 } else { Dtype::F32 }
    }
    fn open(&self, first: u64) -> Result<Box<dyn RowStream>> {
        Ok(Box::new(self.walk(first)?))
    }
    fn location(&self, row: u64) -> Location {
        // A row of the matrix is in all members at once, so this names only the archive.
        Location::row(&self.path, row)
    }
}

/// The three arrays, at the same row.
struct CsrWalk {
    starts: NpyElements,
    columns: NpyElements,
    values: NpyElements,
    starts_location: Location,
    columns_location: Location,
    row: u64,
    rows: u64,
    dim: u64,
    position: u64,
    entries: u64,
    /// Ends of the next rows.
    ends: Vec<u64>,
    column_chunk: Vec<u64>,
    value_chunk: Vec<f32>,
}

impl CsrWalk {
    /// Passes row (counted from the next one), column and value of every entry in the next `count` rows to `visit`.
    fn rows(&mut self, count: usize, mut visit: impl FnMut(usize, usize, f32)) -> Result<()> {
        self.load_ends(count)?;
        let last = self.ends.last().copied().unwrap_or(self.position);
        let mut row = 0;
        while self.position < last {
            let entries = (last - self.position).min(CHUNK as u64) as usize;
            self.column_chunk.clear();
            self.columns.ids(entries, &mut self.column_chunk)?;
            self.value_chunk.resize(entries, 0.0);
            self.values.floats(&mut self.value_chunk)?;
            for (column, value) in self.column_chunk.iter().zip(&self.value_chunk) {
                while self.ends[row] <= self.position {
                    row += 1;
                }
                if *column >= self.dim {
                    let detail = format!("{}, entry {}", self.columns_location.detail, self.position);
                    let expected = format!("a column below {} in row {}", self.dim, self.row + row as u64);
                    return Err(Location::at(&self.columns_location.path, detail).bad(expected, column));
                }
                visit(row, *column as usize, *value);
                self.position += 1;
            }
        }
        self.row += count as u64;
        Ok(())
    }

    /// Reads the ends of the next `count` rows and checks that they do not decrease.
    fn load_ends(&mut self, count: usize) -> Result<()> {
        self.ends.clear();
        self.starts.ids(count, &mut self.ends)?;
        let mut least = self.position;
        for (index, end) in (self.row + 1..).zip(&self.ends) {
            let most = self.entries;
            if index == self.rows {
                // The last row ends at the last entry.
                least = least.max(most);
            }
            if *end < least || *end > most {
                let detail = format!("{}, element {index}", self.starts_location.detail);
                let expected = format!("a row end in {least}..={most}");
                return Err(Location::at(&self.starts_location.path, detail).bad(expected, end));
            }
            least = *end;
        }
        Ok(())
    }
}

impl RowStream for CsrWalk {
    fn fill(&mut self, rows: &mut [f32]) -> Result<()> {
        rows.fill(0.0);
        let dim = self.dim as usize;
        for rows in rows.chunks_mut(dim.max(1) * CHUNK) {
            // Scipy allows an entry to be stored in pieces: the value is their sum.
            self.rows(rows.len() / dim.max(1), |row, column, value| rows[row * dim + column] += value)?;
        }
        Ok(())
    }
}

/// The entries of a square matrix in memory, as edges from row to column.
pub struct CsrEdges {
    path: PathBuf,
    starts: Arc<[u64]>,
    columns: Arc<[u32]>,
}

impl CsrEdges {
    /// `starts` ascends from 0 to the number of `columns`, and has one more number than there are rows.
    pub fn new(path: &Path, starts: Vec<u64>, columns: Vec<u32>) -> CsrEdges {
        assert_eq!(starts.last().copied(), Some(columns.len() as u64), "row starts fit the columns");
        CsrEdges { path: path.to_path_buf(), starts: starts.into(), columns: columns.into() }
    }
}

struct CsrEdgeStream {
    starts: Arc<[u64]>,
    columns: Arc<[u32]>,
    position: usize,
    row: usize,
}

impl EdgeSource for CsrEdges {
    fn count(&self) -> Option<u64> {
        Some(self.columns.len() as u64)
    }
    fn open(&self, skip: u64) -> Result<Box<dyn EdgeStream>> {
        let position = (skip as usize).min(self.columns.len());
        let (starts, columns) = (self.starts.clone(), self.columns.clone());
        Ok(Box::new(CsrEdgeStream { starts, columns, position, row: 0 }))
    }
    fn location(&self, position: u64) -> Location {
        Location::at(&self.path, format!("edge {position}"))
    }
}

impl EdgeStream for CsrEdgeStream {
    fn next(&mut self, out: &mut Vec<ForeignEdge>) -> Result<bool> {
        out.clear();
        let end = (self.position + CHUNK).min(self.columns.len());
        for position in self.position..end {
            while self.starts[self.row + 1] <= position as u64 {
                self.row += 1;
            }
            let (source, target) = (self.row as u64, self.columns[position] as u64);
            out.push(ForeignEdge { source, target, ..ForeignEdge::default() });
        }
        self.position = end;
        Ok(!out.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;

    struct Matrix {
        format: &'static [u8],
        shape: Vec<i64>,
        starts: Vec<i64>,
        columns: Vec<i64>,
        values: Vec<f32>,
    }

    fn matrix() -> Matrix {
        Matrix {
            format: b"csr",
            shape: vec![4, 3],
            starts: vec![0, 2, 2, 5, 6],
            columns: vec![2, 0, 1, 1, 2, 0],
            values: vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        }
    }

    fn rows_of(matrix: &Matrix, first: u64) -> Result<Vec<f32>> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("features.npz");
        let values = fixture::floats(&format!("({},)", matrix.values.len()), &matrix.values);
        let members = [
            ("indptr.npy", fixture::integers(&matrix.starts)),
            ("indices.npy", fixture::integers(&matrix.columns)),
            ("format.npy", fixture::npy("|S3", "()", matrix.format)),
            ("shape.npy", fixture::integers(&matrix.shape)),
            ("data.npy", values),
        ];
        fixture::write_zip(&path, &members);
        fixture::all_rows(&*open_csr(&path)?, first)
    }

    fn check_refused(break_it: impl FnOnce(&mut Matrix), words: &[&str]) {
        let mut broken = matrix();
        break_it(&mut broken);
        let message = rows_of(&broken, 0).unwrap_err().to_string();
        assert!(words.iter().all(|word| message.contains(word)), "{message}");
    }

    #[test]
    fn entries_fall_into_their_rows_and_pieces_add_up() {
        let dense = [2.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 7.0, 5.0, 6.0, 0.0, 0.0];
        assert_eq!(rows_of(&matrix(), 0).unwrap(), dense);
        for first in 1..4 {
            assert_eq!(rows_of(&matrix(), first).unwrap(), dense[first as usize * 3..]);
        }
    }

    #[test]
    fn other_sparse_forms_name_the_remedy() {
        check_refused(|m| m.format = b"csc", &["format.npy", "csc", ".tocsr()"]);
        check_refused(|m| m.format = b"coo", &["coo", ".tocsr()"]);
    }

    #[test]
    fn a_column_beyond_the_shape_is_named() {
        check_refused(|m| m.columns[3] = 3, &["indices.npy", "entry 3", "row 2", "below 3", "found 3"]);
        check_refused(|m| m.columns[3] = -1, &["indices.npy", "element 3", "-1"]);
    }

    #[test]
    fn row_starts_that_go_back_or_past_the_end_are_named() {
        check_refused(|m| m.starts[2] = 1, &["indptr.npy", "element 2", "found 1"]);
        check_refused(|m| m.starts[2] = 7, &["indptr.npy", "element 2", "found 7"]);
        check_refused(|m| m.starts[0] = 1, &["indptr.npy", "row 0", "found 1"]);
        check_refused(|m| m.starts[4] = 5, &["indptr.npy", "element 4", "6..=6", "found 5"]);
    }

    #[test]
    fn lengths_that_do_not_agree_are_refused() {
        check_refused(|m| m.starts.push(6), &["indptr.npy", "4 + 1", "found 6"]);
        check_refused(|m| m.values.push(6.0), &["data.npy", "6 values", "found 7"]);
        check_refused(|m| m.shape.push(6), &["shape.npy", "found 3"]);
        check_refused(|m| m.shape[0] = i64::MAX, &["indptr.npy"]);
        check_refused(|m| m.shape[1] = i64::MAX, &["features.npz", "columns", "9223372036854775807"]);
        check_refused(|m| m.shape[1] = 0, &["features.npz", "columns", "found 0"]);
    }

    #[test]
    fn the_entries_of_a_matrix_in_memory_are_edges() {
        let edges = CsrEdges::new(Path::new("a"), vec![0, 2, 2, 5, 6], vec![2, 0, 1, 1, 2, 0]);
        let expected = [(0, 2), (0, 0), (2, 1), (2, 1), (2, 2), (3, 0)];
        for skip in 0..=6 {
            assert_eq!(fixture::all_edges(&edges, skip).unwrap(), expected[skip as usize..]);
        }
    }

    #[test]
    fn wordnets_bag_of_words_is_read() {
        let Some(path) = fixture::real_data("wordnet-synsets/features.npz") else { return };
        let source = open_csr(&path).unwrap();
        assert_eq!((source.rows(), source.dim()), (117_659, 1_000));
        let mut stream = source.open(0).unwrap();
        let (mut row, mut ones, mut empty) = (vec![0.0; 1_000], 0, 0);
        for _ in 0..source.rows() {
            stream.fill(&mut row).unwrap();
            let set = row.iter().filter(|value| **value == 1.0).count();
            ones += set;
            empty += usize::from(set == 0);
        }
        assert_eq!((ones, empty), (395_225, 8_560));
    }
}
