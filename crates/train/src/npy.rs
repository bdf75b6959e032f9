//! Matrices of f32 in npy files, read row by row: initial embeddings.

use crate::{Result, TrainError};
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// The longest header that is read. NumPy writes 128 bytes.
const MOST_HEADER_BYTES: usize = 1 << 16;

/// An open matrix.
pub(crate) struct NpyMatrix {
    path: PathBuf,
    file: BufReader<File>,
    /// Where the first row starts.
    start: u64,
    pub rows: u64,
    pub columns: u64,
}

impl NpyMatrix {
    /// Opens a matrix of little-endian f32 in C order.
    pub fn open(path: &Path) -> Result<NpyMatrix> {
        let wrong = |found: String| {
            TrainError::file(
                path,
                "an npy matrix of f32 (<f4), two dimensions, in C order",
                found,
                "save it with numpy.save(file, rows.astype('float32'))",
            )
        };
        let mut file = BufReader::new(File::open(path).map_err(TrainError::io(path))?);
        let mut start = [0u8; 8];
        file.read_exact(&mut start).map_err(TrainError::io(path))?;
        if &start[..6] != b"\x93NUMPY" {
            return Err(wrong("another kind of file".into()));
        }
        let mut length = [0u8; 4];
        let bytes = if start[6] == 1 { 2 } else { 4 };
        file.read_exact(&mut length[..bytes]).map_err(TrainError::io(path))?;
        let length = u32::from_le_bytes(length) as usize;
        if length > MOST_HEADER_BYTES {
            return Err(wrong(format!("a header of {length} bytes")));
        }
        let mut header = vec![0u8; length];
        file.read_exact(&mut header).map_err(TrainError::io(path))?;
        let header = String::from_utf8_lossy(&header).into_owned();
        let (rows, columns) = shape_of(&header).ok_or_else(|| wrong(header.trim().to_string()))?;
        let payload = file.get_ref().metadata().map_err(TrainError::io(path))?.len();
        let expected = rows.checked_mul(columns).and_then(|count| count.checked_mul(4));
        let expected = expected.and_then(|bytes| bytes.checked_add(10 + length as u64));
        if expected.is_none_or(|expected| payload < expected) {
            return Err(wrong(format!("{payload} bytes, too few for {rows} x {columns}")));
        }
        let start = file.stream_position().map_err(TrainError::io(path))?;
        Ok(NpyMatrix { path: path.to_path_buf(), file, start, rows, columns })
    }

    /// Reads a row.
    pub fn read_row(&mut self, row: u64, values: &mut [f32]) -> Result<()> {
        let at = self.start + row * self.columns * 4;
        self.file.seek(SeekFrom::Start(at)).map_err(TrainError::io(&self.path))?;
        self.read(values)
    }

    /// Reads the next numbers.
    pub fn read(&mut self, values: &mut [f32]) -> Result<()> {
        self.file.read_exact(bytemuck::cast_slice_mut(values)).map_err(TrainError::io(&self.path))
    }
}

/// Rows and columns of a header like `{'descr': '<f4', 'fortran_order': False, 'shape': (3, 5), }`.
fn shape_of(header: &str) -> Option<(u64, u64)> {
    let after = |key: &str| header.split_once(key).map(|(_, rest)| rest.trim_start_matches([' ', ':']));
    let is_f32 = after("'descr'")?.starts_with("'<f4'");
    let in_c_order = after("'fortran_order'")?.starts_with("False");
    let shape = after("'shape'")?.strip_prefix('(')?.split_once(')')?.0;
    let sizes: Vec<u64> = shape
        .split(',')
        .map(str::trim)
        .filter(|size| !size.is_empty())
        .map(|size| size.parse().ok())
        .collect::<Option<_>>()?;
    match sizes[..] {
        [rows, columns] if is_f32 && in_c_order => Some((rows, columns)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::shape_of;

    #[test]
    fn shapes_are_read_and_others_refused() {
        let header = |descr: &str, order: &str, shape: &str| {
            format!("{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape}, }}  \n")
        };
        assert_eq!(shape_of(&header("<f4", "False", "(3, 5)")), Some((3, 5)));
        for (descr, order, shape) in [
            ("<f8", "False", "(3, 5)"),
            ("<f4", "True", "(3, 5)"),
            ("<f4", "False", "(3,)"),
            ("<f4", "False", "(3, x)"),
            ("<f4", "False", "3, 5"),
        ] {
            assert_eq!(shape_of(&header(descr, order, shape)), None);
        }
        assert_eq!(shape_of("nothing"), None);
    }
}
