//! Reads numpy's `.npy`: a header, then elements as a stream, from a file or from a member of an `.npz`. Headers of
//! version 1 to 3, either byte order. No array is loaded as a whole.

mod sources;

pub use sources::{NpyEdges, NpyIds, NpyRows};

use crate::{Location, Result, input};
use half::{f16, slice::HalfFloatSliceExt};
use std::{
    fmt,
    io::{BufReader, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
};

/// Element types that Esker reads as numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Scalar {
    Bool,
    I8,
    U8,
    I16,
    U16,
    I32,
    U32,
    I64,
    U64,
    F16,
    F32,
    F64,
}

/// Named like Rust's types.
impl fmt::Display for Scalar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&format!("{self:?}").to_lowercase())
    }
}

impl Scalar {
    /// Bytes per element.
    pub fn bytes(self) -> u64 {
        match self {
            Scalar::Bool | Scalar::I8 | Scalar::U8 => 1,
            Scalar::I16 | Scalar::U16 | Scalar::F16 => 2,
            Scalar::I32 | Scalar::U32 | Scalar::F32 => 4,
            Scalar::I64 | Scalar::U64 | Scalar::F64 => 8,
        }
    }

    fn integral(self) -> bool {
        !matches!(self, Scalar::F16 | Scalar::F32 | Scalar::F64)
    }

    /// The type and byte order (true: swap) of a numpy description such as `<f4`.
    pub fn from_descr(descr: &str) -> Option<(Scalar, bool)> {
        let (order, code) = descr.split_at_checked(1)?;
        let scalar = match code {
            "b1" => Scalar::Bool,
            "i1" => Scalar::I8,
            "u1" => Scalar::U8,
            "i2" => Scalar::I16,
            "u2" => Scalar::U16,
            "i4" => Scalar::I32,
            "u4" => Scalar::U32,
            "i8" => Scalar::I64,
            "u8" => Scalar::U64,
            "f2" => Scalar::F16,
            "f4" => Scalar::F32,
            "f8" => Scalar::F64,
            _ => return None,
        };
        match order {
            "<" | "|" | "=" => Some((scalar, false)),
            ">" => Some((scalar, true)),
            _ => None,
        }
    }
}

/// The header of an npy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// Numpy's description of an element: `<f4`, `|O`, `<U19`.
    pub descr: String,
    /// Column-major.
    pub fortran: bool,
    /// Lengths of the axes.
    pub shape: Vec<u64>,
    /// Offset of the elements.
    pub data_offset: u64,
}

impl Header {
    /// Reads a header. `reader` is then at the first element.
    pub fn read(reader: &mut dyn Read, location: &Location) -> Result<Header> {
        let mut start = [0u8; 10];
        let bad = |found: &str| location.clone().bad("a numpy array (.npy)", found);
        reader.read_exact(&mut start).map_err(|_| bad("fewer than 10 bytes"))?;
        if start.starts_with(b"PK") {
            return Err(bad(
                "a zip archive (.npz); save the array alone, or give a sparse matrix to --features-csr",
            ));
        }
        if &start[..6] != b"\x93NUMPY" {
            return Err(bad("another file type (no \\x93NUMPY at the start)"));
        }
        let (length, prefix) = match start[6] {
            1 => (u16::from_le_bytes([start[8], start[9]]) as u64, 10),
            2 | 3 => {
                let mut rest = [0u8; 2];
                reader.read_exact(&mut rest).map_err(|_| bad("a cut header"))?;
                (u32::from_le_bytes([start[8], start[9], rest[0], rest[1]]) as u64, 12)
            }
            version => return Err(bad(&format!("header version {version}"))),
        };
        if length > 1 << 20 {
            return Err(bad(&format!("a header of {length} bytes")));
        }
        let mut text = vec![0u8; length as usize];
        reader.read_exact(&mut text).map_err(|_| bad("a cut header"))?;
        let text = String::from_utf8_lossy(&text);
        let (descr, fortran, shape) =
            parse_dictionary(&text).ok_or_else(|| bad(&format!("header {}", text.trim())))?;
        Ok(Header { descr, fortran, shape, data_offset: prefix + length })
    }

    /// Number of elements; `None` if it does not fit 64 bits.
    pub fn elements(&self) -> Option<u64> {
        self.shape.iter().try_fold(1u64, |product, axis| product.checked_mul(*axis))
    }
}

/// Parses `{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }`.
fn parse_dictionary(text: &str) -> Option<(String, bool, Vec<u64>)> {
    let value = |key: &str| {
        let at = text.find(&format!("'{key}'"))? + key.len() + 2;
        Some(text[at..].trim_start().strip_prefix(':')?.trim_start())
    };
    let descr = value("descr")?.strip_prefix('\'')?;
    let descr = &descr[..descr.find('\'')?];
    let fortran = match value("fortran_order")? {
        rest if rest.starts_with("True") => true,
        rest if rest.starts_with("False") => false,
        _ => return None,
    };
    let shape = value("shape")?.strip_prefix('(')?;
    let shape = shape[..shape.find(')')?]
        .split(',')
        .map(str::trim)
        .filter(|axis| !axis.is_empty())
        .map(|axis| axis.trim_end_matches('L').parse().ok())
        .collect::<Option<Vec<u64>>>()?;
    Some((descr.to_string(), fortran, shape))
}

/// An array on disk whose elements are numbers: an npy, a member of an npz, or raw values without a header.
#[derive(Debug, Clone)]
pub struct NpyArray {
    path: PathBuf,
    member: Option<input::Member>,
    header: Header,
    scalar: Scalar,
    swap: bool,
}

impl NpyArray {
    /// Opens `path` and checks its header against its length.
    pub fn open(path: &Path) -> Result<NpyArray> {
        let file = input::open(path)?;
        let bytes = file.metadata().map_err(|error| Location::file(path).io(error))?.len();
        let header = Header::read(&mut BufReader::new(file), &Location::file(path))?;
        NpyArray::checked(path, None, header, bytes)
    }

    /// Opens a member of an npz; `member` is its name with or without `.npy`.
    pub fn member(members: &[input::Member], path: &Path, name: &str) -> Result<NpyArray> {
        let member = find_member(members, path, name)?;
        let header = Header::read(&mut member.open()?, &member.location())?;
        NpyArray::checked(path, Some(member.clone()), header, member.bytes)
    }

    /// Values without a header, as in IGB's large files: the shape must come from elsewhere.
    pub fn raw(path: &Path, scalar: Scalar, shape: Vec<u64>) -> Result<NpyArray> {
        let bytes = input::open(path)?.metadata().map_err(|error| Location::file(path).io(error))?.len();
        let header = Header { descr: format!("raw {scalar}"), fortran: false, shape, data_offset: 0 };
        let array = NpyArray { path: path.to_path_buf(), member: None, header, scalar, swap: false };
        array.check_length(bytes)?;
        Ok(array)
    }

    fn checked(path: &Path, member: Option<input::Member>, header: Header, bytes: u64) -> Result<NpyArray> {
        let location = member.as_ref().map_or_else(|| Location::file(path), |member| member.location());
        let Some((scalar, swap)) = Scalar::from_descr(&header.descr) else {
            let found = format!("dtype {}; save it as numbers, not as objects or strings", header.descr);
            return Err(location.bad("an array of integers, floats or booleans", found));
        };
        let array = NpyArray { path: path.to_path_buf(), member, header, scalar, swap };
        array.check_length(bytes)?;
        Ok(array)
    }

    fn check_length(&self, bytes: u64) -> Result<()> {
        let requested = self
            .header
            .elements()
            .and_then(|elements| elements.checked_mul(self.scalar.bytes()))
            .and_then(|payload| payload.checked_add(self.header.data_offset));
        if requested != Some(bytes) {
            let requested = requested.map_or("more than 2^64".to_string(), |requested| requested.to_string());
            let expected =
                format!("{requested} bytes for shape {:?} of {}", self.header.shape, self.header.descr);
            return Err(self.location().bad(expected, format!("{bytes} bytes")));
        }
        Ok(())
    }

    /// Lengths of the axes.
    pub fn shape(&self) -> &[u64] {
        &self.header.shape
    }

    /// The element type.
    pub fn scalar(&self) -> Scalar {
        self.scalar
    }

    /// Column-major.
    pub fn fortran(&self) -> bool {
        self.header.fortran
    }

    /// Number of elements.
    pub fn elements(&self) -> u64 {
        self.header.elements().unwrap_or(0)
    }

    /// Position of this array, for messages.
    pub fn location(&self) -> Location {
        self.member.as_ref().map_or_else(|| Location::file(&self.path), |member| member.location())
    }

    /// Position of a row of this array, for messages.
    pub fn row_location(&self, row: u64) -> Location {
        let mut location = self.location();
        if !location.detail.is_empty() {
            location.detail.push_str(", ");
        }
        location.detail.push_str(&format!("row {row}"));
        location
    }

    /// A stream of elements in storage order, starting at element `first`.
    pub fn stream(&self, first: u64) -> Result<NpyElements> {
        let skip = self.header.data_offset + first * self.scalar.bytes();
        let location = self.location();
        let reader: Box<dyn Read + Send> = match &self.member {
            Some(member) => {
                let mut reader = member.open()?;
                std::io::copy(&mut reader.by_ref().take(skip), &mut std::io::sink())
                    .map_err(|error| location.clone().io(error))?;
                reader
            }
            None => {
                let mut file = input::open(&self.path)?;
                file.seek(SeekFrom::Start(skip)).map_err(|error| location.clone().io(error))?;
                // Large reads bypass the buffer; it is for callers that read row by row.
                Box::new(BufReader::with_capacity(256 << 10, file))
            }
        };
        Ok(NpyElements {
            reader,
            scalar: self.scalar,
            swap: self.swap,
            location,
            next: first,
            bytes: Vec::new(),
        })
    }
}

/// Finds `name` or `name.npy` among an archive's members.
pub fn find_member<'a>(members: &'a [input::Member], path: &Path, name: &str) -> Result<&'a input::Member> {
    members.iter().find(|m| m.name == name || m.name.strip_suffix(".npy") == Some(name)).ok_or_else(|| {
        let names: Vec<_> = members.iter().map(|m| m.name.as_str()).take(16).collect();
        Location::file(path).bad(format!("an array `{name}`"), format!("the arrays {}", names.join(", ")))
    })
}

/// A stream of an array's elements that converts them.
pub struct NpyElements {
    reader: Box<dyn Read + Send>,
    scalar: Scalar,
    swap: bool,
    location: Location,
    next: u64,
    bytes: Vec<u8>,
}

macro_rules! each {
    ($bytes:expr, $type:ty, |$value:ident| $body:expr) => {
        for chunk in $bytes.chunks_exact(size_of::<$type>()) {
            let $value = <$type>::from_le_bytes(chunk.try_into().expect("chunks are exact"));
            $body
        }
    };
}

impl NpyElements {
    /// Reads `count` elements into `self.bytes`, in this machine's (little-endian) byte order.
    fn load(&mut self, count: usize) -> Result<()> {
        let width = self.scalar.bytes() as usize;
        self.bytes.resize(count * width, 0);
        self.reader.read_exact(&mut self.bytes).map_err(|error| self.location.clone().io(error))?;
        if self.swap {
            self.bytes.chunks_exact_mut(width).for_each(<[u8]>::reverse);
        }
        self.next += count as u64;
        Ok(())
    }

    fn element_location(&self, back: usize) -> Location {
        let mut location = self.location.clone();
        if !location.detail.is_empty() {
            location.detail.push_str(", ");
        }
        location.detail.push_str(&format!("element {}", self.next - back as u64));
        location
    }

    /// Appends the next `count` elements, which must be whole numbers.
    pub fn integers(&mut self, count: usize, out: &mut Vec<i64>) -> Result<()> {
        if !self.scalar.integral() {
            return Err(self.location.clone().bad("whole numbers", format!("dtype {}", self.scalar)));
        }
        self.load(count)?;
        match self.scalar {
            Scalar::Bool | Scalar::U8 => out.extend(self.bytes.iter().map(|v| *v as i64)),
            Scalar::I8 => out.extend(self.bytes.iter().map(|v| *v as i8 as i64)),
            Scalar::I16 => each!(self.bytes, i16, |v| out.push(v as i64)),
            Scalar::U16 => each!(self.bytes, u16, |v| out.push(v as i64)),
            Scalar::I32 => each!(self.bytes, i32, |v| out.push(v as i64)),
            Scalar::U32 => each!(self.bytes, u32, |v| out.push(v as i64)),
            Scalar::I64 => each!(self.bytes, i64, |v| out.push(v)),
            Scalar::U64 => {
                let first = out.len();
                each!(self.bytes, u64, |v| out.push(v as i64));
                if let Some(at) = out[first..].iter().position(|v| *v < 0) {
                    let value = out[first + at] as u64;
                    return Err(self.element_location(count - at).bad("a number below 2^63", value));
                }
            }
            Scalar::F16 | Scalar::F32 | Scalar::F64 => unreachable!("refused above"),
        }
        Ok(())
    }

    /// Appends the next `count` elements, which must be ids: whole and not negative.
    pub fn ids(&mut self, count: usize, out: &mut Vec<u64>) -> Result<()> {
        let first = out.len();
        let mut signed = Vec::with_capacity(count);
        self.integers(count, &mut signed)?;
        out.extend(signed.iter().map(|v| *v as u64));
        // One fast pass over the signs, then a slow search for the wrong element.
        if out[first..].iter().fold(0, |all, v| all | v) >> 63 != 0
            && let Some(at) = signed.iter().position(|v| *v < 0)
        {
            return Err(self.element_location(count - at).bad("an id, 0 or more", signed[at]));
        }
        Ok(())
    }

    /// Fills `out` with the next elements as f32.
    pub fn floats(&mut self, out: &mut [f32]) -> Result<()> {
        if self.scalar == Scalar::F32 && !self.swap {
            self.reader
                .read_exact(bytemuck::cast_slice_mut(out))
                .map_err(|error| self.location.clone().io(error))?;
            self.next += out.len() as u64;
            return Ok(());
        }
        self.load(out.len())?;
        macro_rules! convert {
            ($type:ty) => {{
                let mut slots = out.iter_mut();
                each!(self.bytes, $type, |v| if let Some(slot) = slots.next() {
                    *slot = v as f32
                });
            }};
        }
        match self.scalar {
            Scalar::Bool | Scalar::U8 => convert!(u8),
            Scalar::I8 => convert!(i8),
            Scalar::I16 => convert!(i16),
            Scalar::U16 => convert!(u16),
            Scalar::I32 => convert!(i32),
            Scalar::U32 => convert!(u32),
            Scalar::I64 => convert!(i64),
            Scalar::U64 => convert!(u64),
            Scalar::F32 => convert!(f32),
            Scalar::F64 => {
                convert!(f64);
                if let Some(at) = out.iter().position(|value| value.is_infinite()) {
                    let bytes = &self.bytes[at * 8..at * 8 + 8];
                    let value = f64::from_le_bytes(bytes.try_into().expect("eight bytes"));
                    if value.is_finite() {
                        return Err(self
                            .element_location(out.len() - at)
                            .bad("a number that fits f32", value));
                    }
                }
            }
            Scalar::F16 => {
                let halves: Vec<f16> =
                    self.bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]])).collect();
                halves.convert_to_f32_slice(out);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::npy;
    use crate::source::EdgeSource;

    fn check_floats(descr: &str, data: &[u8], expected: &[f32]) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.npy");
        std::fs::write(&path, npy(descr, &format!("({},)", expected.len()), data)).unwrap();
        let array = NpyArray::open(&path).unwrap();
        let mut out = vec![0.0; expected.len()];
        array.stream(0).unwrap().floats(&mut out).unwrap();
        assert_eq!(out, expected, "{descr}");
        let mut last = [0.0];
        array.stream(expected.len() as u64 - 1).unwrap().floats(&mut last).unwrap();
        assert_eq!(last[0], expected[expected.len() - 1]);
    }

    #[test]
    fn every_number_type_in_either_byte_order_reads_as_f32() {
        check_floats("<f4", &[0, 0, 128, 63, 0, 0, 0, 192], &[1.0, -2.0]);
        check_floats(">f4", &[63, 128, 0, 0, 192, 0, 0, 0], &[1.0, -2.0]);
        check_floats("<f2", &[0, 60, 0, 192], &[1.0, -2.0]);
        check_floats("<f8", &1.5f64.to_le_bytes(), &[1.5]);
        check_floats("|u1", &[7, 255], &[7.0, 255.0]);
        check_floats("|i1", &[7, 255], &[7.0, -1.0]);
        check_floats("|b1", &[0, 1], &[0.0, 1.0]);
        check_floats(">i2", &[1, 0], &[256.0]);
        check_floats("<u4", &[1, 0, 0, 0], &[1.0]);
        check_floats("<i8", &(-3i64).to_le_bytes(), &[-3.0]);
    }

    fn edges_of(shape: &str, ids: &[i64]) -> Result<Vec<(u64, u64)>> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("e.npy");
        let data: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        std::fs::write(&path, npy("<i8", shape, &data)).unwrap();
        let edges = NpyEdges::new(NpyArray::open(&path)?, false)?;
        let (mut stream, mut chunk, mut all) = (edges.open(0)?, Vec::new(), Vec::new());
        while stream.next(&mut chunk)? {
            all.extend(chunk.iter().map(|edge| (edge.source, edge.target)));
        }
        Ok(all)
    }

    #[test]
    fn edges_come_as_two_rows_or_as_pairs() {
        assert_eq!(edges_of("(2, 3)", &[1, 2, 3, 4, 5, 6]).unwrap(), [(1, 4), (2, 5), (3, 6)]);
        assert_eq!(edges_of("(3, 2)", &[1, 4, 2, 5, 3, 6]).unwrap(), [(1, 4), (2, 5), (3, 6)]);
        assert!(edges_of("(6,)", &[1, 2, 3, 4, 5, 6]).is_err());
    }

    #[test]
    fn a_negative_id_is_named_with_its_element() {
        let message = edges_of("(2, 3)", &[1, 2, 3, 4, -5, 6]).unwrap_err().to_string();
        assert!(message.contains("element 4") && message.contains("-5"), "{message}");
    }

    #[test]
    fn a_length_that_does_not_fit_the_shape_is_an_error() {
        let message = edges_of("(2, 3)", &[1, 2, 3, 4, 5]).unwrap_err().to_string();
        assert!(message.contains("expected") && message.contains("found"), "{message}");
        assert!(edges_of("(2, 4611686018427387904)", &[1, 2]).is_err());
        assert!(edges_of("(9223372036854775807, 2)", &[1, 2]).is_err());
    }
}
