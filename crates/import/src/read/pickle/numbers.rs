//! Arrays of numbers and strings in a pickle, and the CSR matrices made of them.

use super::{ElementKind, ElementType, Node, Pickle, Value};
use crate::csr::check_columns;
use crate::npy::Scalar;
use crate::source::SparseRows;
use crate::{Location, Result};
use half::f16;
use std::{path::Path, sync::Arc};

/// A numeric array. Its length is checked against its shape.
#[derive(Debug, Clone)]
pub struct Numbers<'p> {
    /// Element type.
    pub scalar: Scalar,
    /// Lengths of the axes.
    pub shape: &'p [u64],
    swap: bool,
    fortran: bool,
    bytes: &'p [u8],
}

/// A scipy CSR matrix. Its shapes are checked, its entries not yet.
pub struct SparseMatrix<'p> {
    /// Rows.
    pub rows: u64,
    /// Columns.
    pub columns: u64,
    starts: Numbers<'p>,
    indices: Numbers<'p>,
    values: Numbers<'p>,
    location: &'p Location,
}

/// The number in `bytes`, which must have exactly its length.
pub(super) fn one(scalar: Scalar, swap: bool, bytes: &[u8]) -> Option<Value> {
    let mut wide = [0u8; 8];
    let width = scalar.bytes() as usize;
    if bytes.len() != width {
        return None;
    }
    wide[..width].copy_from_slice(bytes);
    if swap {
        wide[..width].reverse();
    }
    let [a, b, c, d, ..] = wide;
    Some(match scalar {
        Scalar::Bool => Value::Bool(a != 0),
        Scalar::U8 => Value::Int(a as i64),
        Scalar::I8 => Value::Int(a as i8 as i64),
        Scalar::I16 => Value::Int(i16::from_le_bytes([a, b]) as i64),
        Scalar::U16 => Value::Int(u16::from_le_bytes([a, b]) as i64),
        Scalar::I32 => Value::Int(i32::from_le_bytes([a, b, c, d]) as i64),
        Scalar::U32 => Value::Int(u32::from_le_bytes([a, b, c, d]) as i64),
        Scalar::I64 => Value::Int(i64::from_le_bytes(wide)),
        Scalar::U64 => Value::Int(i64::try_from(u64::from_le_bytes(wide)).ok()?),
        Scalar::F16 => Value::Float(f16::from_le_bytes([a, b]).to_f64()),
        Scalar::F32 => Value::Float(f32::from_le_bytes([a, b, c, d]) as f64),
        Scalar::F64 => Value::Float(f64::from_le_bytes(wide)),
    })
}

/// One string of a numpy string type; numpy pads with zeros.
pub(super) fn string(element: ElementType, bytes: &[u8]) -> Option<String> {
    let text: String = match element.kind {
        ElementKind::Bytes(_) => bytes.iter().map(|byte| *byte as char).collect(),
        ElementKind::Text(_) => {
            let code = |code: &[u8; 4]| {
                if element.swap { u32::from_be_bytes(*code) } else { u32::from_le_bytes(*code) }
            };
            bytes.as_chunks::<4>().0.iter().map(|bytes| char::from_u32(code(bytes))).collect::<Option<_>>()?
        }
        _ => return None,
    };
    Some(text.trim_end_matches('\0').to_string())
}

/// The strings of a numpy array.
pub(super) fn strings(element: ElementType, bytes: &[u8]) -> Option<Vec<String>> {
    let width = match element.kind {
        ElementKind::Bytes(width) => width,
        ElementKind::Text(width) => width.checked_mul(4)?,
        _ => return None,
    };
    if width == 0 || !bytes.len().is_multiple_of(width) {
        return None;
    }
    bytes.chunks_exact(width).map(|bytes| string(element, bytes)).collect()
}

impl<'p> Numbers<'p> {
    /// Elements in this machine's byte order, as torch stores them; `None` if the bytes are not whole elements.
    pub fn new(scalar: Scalar, bytes: &'p [u8]) -> Option<Numbers<'p>> {
        let whole = bytes.len().is_multiple_of(scalar.bytes() as usize);
        whole.then_some(Numbers { scalar, shape: &[], swap: false, fortran: false, bytes })
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.scalar.bytes() as usize
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Element number `at` in storage order.
    pub fn value(&self, at: usize) -> Option<Value> {
        let width = self.scalar.bytes() as usize;
        let start = at.checked_mul(width)?;
        one(self.scalar, self.swap, self.bytes.get(start..start.checked_add(width)?)?)
    }

    /// Element number `at` in storage order as a float; NaN beyond the end.
    pub fn float(&self, at: usize) -> f32 {
        match self.value(at) {
            Some(Value::Float(value)) => value as f32,
            Some(Value::Int(value)) => value as f32,
            Some(Value::Bool(value)) => f32::from(u8::from(value)),
            _ => f32::NAN,
        }
    }

    /// Position of row `row`, column `column` of a matrix in storage order.
    pub fn position(&self, row: usize, column: usize) -> usize {
        match *self.shape {
            [rows, _] if self.fortran => column * rows as usize + row,
            [_, columns] => row * columns as usize + column,
            _ => row,
        }
    }

    /// Element number `at`, which must be whole and not negative.
    fn id(&self, at: usize, location: &Location) -> Result<u64> {
        match self.value(at) {
            Some(Value::Int(id)) if id >= 0 => Ok(id as u64),
            Some(Value::Int(number)) => Err(element(location, at).bad("a number from 0 on", number)),
            _ => Err(location.clone().bad("whole numbers", format!("dtype {}", self.scalar))),
        }
    }

    /// All elements, which must be whole and not negative.
    pub fn ids(&self, location: &Location) -> Result<Vec<u64>> {
        (0..self.len()).map(|at| self.id(at, location)).collect()
    }
}

fn element(location: &Location, at: usize) -> Location {
    let comma = if location.detail.is_empty() { "" } else { ", " };
    Location::at(&location.path, format!("{}{comma}element {at}", location.detail))
}

impl Pickle<'_> {
    /// A numeric array.
    pub fn numbers(&self, value: Value) -> Result<Numbers<'_>> {
        let bad = || self.bad("value", "an array of numbers", value);
        let Some(Node::Array(array)) = self.node(value) else { return Err(bad()) };
        let ElementKind::Number(scalar) = array.element.kind else { return Err(bad()) };
        // An empty array may have no data.
        let bytes = self.bytes(array.data).unwrap_or_default();
        let product = array.shape.iter().try_fold(scalar.bytes(), |product, axis| product.checked_mul(*axis));
        if product != Some(bytes.len() as u64) {
            let expected = format!("bytes for shape {:?} of {scalar:?}", array.shape);
            return Err(self.bad("array", &expected, array.data));
        }
        let (shape, fortran) = (&array.shape[..], array.fortran);
        Ok(Numbers { scalar, shape, swap: array.element.swap, fortran, bytes })
    }

    /// A scipy CSR matrix.
    pub fn sparse(&self, value: Value) -> Result<SparseMatrix<'_>> {
        let Some(Node::Sparse(state)) = self.node(value) else {
            return Err(self.bad("value", "a scipy csr matrix", value));
        };
        let attribute = |name: &str| {
            let found = self.get(*state, name);
            found.ok_or_else(|| self.bad("csr matrix", &format!("an attribute `{name}`"), *state))
        };
        let shape = attribute("_shape").or_else(|_| attribute("shape"))?;
        let axes = self.ids(shape)?;
        let [rows, columns] = axes[..] else {
            return Err(self.bad("csr matrix", "a shape of two numbers", shape));
        };
        let matrix = SparseMatrix {
            rows,
            columns,
            starts: self.numbers(attribute("indptr")?)?,
            indices: self.numbers(attribute("indices")?)?,
            values: self.numbers(attribute("data")?)?,
            location: &self.location,
        };
        if matrix.starts.len().checked_sub(1) != usize::try_from(rows).ok()
            || matrix.values.len() != matrix.indices.len()
        {
            let found = format!("{} starts, {} values", matrix.starts.len(), matrix.values.len());
            let expected =
                format!("{rows} + 1 row starts and {} values in its csr matrix", matrix.indices.len());
            return Err(self.location.clone().bad(expected, found));
        }
        Ok(matrix)
    }
}

impl SparseMatrix<'_> {
    /// Number of entries.
    pub fn entries(&self) -> usize {
        self.indices.len()
    }

    /// Row starts, checked to begin at 0, to ascend and to end at the number of entries; and columns, checked to be
    /// within the shape.
    pub fn structure(&self) -> Result<(Vec<u64>, Vec<u32>)> {
        let starts = self.starts.ids(self.location)?;
        let bad = |what: String, expected: &str, found: u64| {
            let comma = if self.location.detail.is_empty() { "" } else { ", " };
            let detail = format!("{}{comma}csr matrix, {what}", self.location.detail);
            Err(Location::at(&self.location.path, detail).bad(expected, found))
        };
        if let Some(row) = starts.windows(2).position(|pair| pair[0] > pair[1]) {
            return bad(format!("row {row}"), "an end no smaller than its start", starts[row + 1]);
        }
        match (starts.first(), starts.last()) {
            (Some(0), Some(last)) if *last == self.entries() as u64 => {}
            (Some(0), Some(last)) => return bad("the last row".into(), "an end at the last entry", *last),
            (first, _) => return bad("row 0".into(), "a start of 0", first.copied().unwrap_or(0)),
        }
        let mut columns = Vec::with_capacity(self.entries());
        for at in 0..self.entries() {
            let column = self.indices.id(at, self.location)?;
            match u32::try_from(column) {
                Ok(narrow) if column < self.columns => columns.push(narrow),
                _ => return bad(format!("entry {at}"), &format!("a column below {}", self.columns), column),
            }
        }
        Ok((starts, columns))
    }

    /// The matrix as rows of features.
    pub fn to_rows(&self, path: &Path) -> Result<SparseRows> {
        check_columns(self.columns, self.location.clone())?;
        let (starts, columns) = self.structure()?;
        // One array after the other: each is copied, and the copies must not exist at the same time.
        let columns: Arc<[u32]> = columns.into();
        let values = (0..self.entries()).map(|at| self.values.float(at)).collect();
        let (path, dim) = (path.to_path_buf(), self.columns as usize);
        Ok(SparseRows { path, dim, starts: starts.into(), columns, values })
    }
}
