//! Parquet files, read a few thousand rows at a time: only the current pages are in memory.
//!
//! This reads numbers, strings and lists of numbers, without nulls. The `parquet` crate does the decoding. Damaged
//! files are contained here: page sizes are checked before pages are allocated, and panics inside the crate become
//! errors.

use crate::delimited::quoted;
use crate::{ImportError, Location, Result, input};
use bytes::Bytes;
use half::f16;
use parquet::{
    basic::{ConvertedType, LogicalType, Type},
    column::reader::{ColumnReader, get_column_reader},
    data_type::{ByteArray, FixedLenByteArray},
    errors::ParquetError,
    file::{
        metadata::{ParquetMetaData, ParquetMetaDataReader},
        reader::{ChunkReader, Length},
        serialized_reader::SerializedPageReader,
    },
};
use std::{
    fmt,
    fs::File,
    io::{BufReader, Read},
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::Arc,
};

/// The largest page accepted. Writers aim at 1 MiB; a writer that never splits pages still has to split row groups.
const PAGE_BYTES: u64 = 256 << 20;

/// The type of a column's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ColumnKind {
    /// Booleans or integers.
    Whole,
    /// Floats of 16, 32 or 64 bits.
    Float,
    /// Strings.
    Text,
    /// Anything else; it is not read.
    Other,
}

impl fmt::Display for ColumnKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ColumnKind::Whole => "integers",
            ColumnKind::Float => "floats",
            ColumnKind::Text => "strings",
            ColumnKind::Other => "values of another type",
        })
    }
}

/// A column of a file.
#[derive(Debug, Clone)]
pub struct ParquetColumn {
    /// Its name; nested ones have dots.
    pub name: String,
    /// The type of its elements.
    pub kind: ColumnKind,
    /// Whether each row has a list of them.
    pub list: bool,
    /// 32-bit elements are unsigned.
    unsigned: bool,
    most_definition: i16,
}

/// An open file: its columns and the positions of its row groups.
#[derive(Clone)]
pub struct ParquetFile {
    path: PathBuf,
    metadata: Arc<ParquetMetaData>,
    columns: Arc<[ParquetColumn]>,
    rows: u64,
}

/// Runs decoding code of the `parquet` crate. Damaged files can trigger its assertions (with a negative offset, for
/// example), so a panic means that the bytes are not valid parquet.
fn fenced<T>(path: &Path, work: impl FnOnce() -> Result<T, ParquetError>) -> Result<T> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(Location::file(path).undecodable("readable parquet data", error)),
        Err(_) => {
            Err(Location::file(path).bad("readable parquet data", "damage that the decoder tripped over"))
        }
    }
}

impl ParquetFile {
    /// Reads the footer of `path`.
    pub fn open(path: &Path) -> Result<ParquetFile> {
        let file = input::open(path)?;
        let metadata = fenced(path, || ParquetMetaDataReader::new().parse_and_finish(&file))?;
        let mut rows = 0u64;
        for group in metadata.row_groups() {
            let count = u64::try_from(group.num_rows()).ok();
            rows = count.and_then(|count| rows.checked_add(count)).ok_or_else(|| {
                Location::file(path).bad("a number of rows", format!("{} in a row group", group.num_rows()))
            })?;
        }
        let columns: Arc<[ParquetColumn]> =
            metadata.file_metadata().schema_descr().columns().iter().map(describe).collect();
        if columns.is_empty() {
            return Err(Location::file(path).bad("columns", "none"));
        }
        for group in metadata.row_groups() {
            if group.num_columns() != columns.len() {
                let found = format!("{} in a row group", group.num_columns());
                return Err(Location::file(path).bad(format!("{} columns", columns.len()), found));
            }
        }
        Ok(ParquetFile { path: path.to_path_buf(), metadata: Arc::new(metadata), columns, rows })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Number of rows.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// The columns, in file order.
    pub fn columns(&self) -> &[ParquetColumn] {
        &self.columns
    }

    /// The number of the column with this name or number.
    pub fn find(&self, word: &str) -> Result<usize> {
        let by_name = self.columns.iter().position(|column| column.name == word);
        let by_number = || word.parse::<usize>().ok().filter(|number| *number < self.columns.len());
        by_name.or_else(by_number).ok_or_else(|| {
            let names: Vec<_> = self.columns.iter().map(|column| column.name.as_str()).take(32).collect();
            Location::file(&self.path)
                .bad(format!("a column `{word}`"), format!("the columns {}", names.join(", ")))
        })
    }

    /// Approximate memory for reading these columns in parallel: a page and a dictionary of each.
    pub fn read_bytes(&self, columns: &[usize]) -> u64 {
        let chunk_bytes = |column: &usize| {
            let sizes =
                self.metadata.row_groups().iter().map(|group| group.column(*column).uncompressed_size());
            sizes.max().unwrap_or(0).clamp(0, 2 << 20) as u64
        };
        columns.iter().map(chunk_bytes).sum()
    }

    /// Starts reading some columns at row `first`.
    pub fn read(&self, columns: &[usize], first: u64) -> Result<TableStream> {
        let pages = Arc::new(Pages(input::open(&self.path)?));
        let columns = columns.iter().map(|column| ColumnSlot {
            column: *column,
            reader: None,
            batch: LoadedColumn::default(),
        });
        let columns = columns.collect();
        let mut stream =
            TableStream { file: self.clone(), pages, columns, next_group: 0, left_in_group: 0, row: 0 };
        let groups = self.metadata.row_groups();
        while stream.next_group < groups.len() {
            let rows = groups[stream.next_group].num_rows() as u64;
            if stream.row + rows > first {
                break;
            }
            stream.row += rows;
            stream.next_group += 1;
        }
        while stream.row < first {
            let most = (first - stream.row).min(4096) as usize;
            if stream.load(most)? == 0 {
                break;
            }
        }
        Ok(stream)
    }
}

fn describe(column: &parquet::schema::types::ColumnDescPtr) -> ParquetColumn {
    let (logical, converted) = (column.logical_type_ref(), column.converted_type());
    let decimal = matches!(logical, Some(LogicalType::Decimal(_))) || converted == ConvertedType::DECIMAL;
    let kind = match column.physical_type() {
        _ if decimal || column.max_rep_level() > 1 => ColumnKind::Other,
        Type::BOOLEAN | Type::INT32 | Type::INT64 => ColumnKind::Whole,
        Type::FLOAT | Type::DOUBLE => ColumnKind::Float,
        Type::BYTE_ARRAY => ColumnKind::Text,
        Type::FIXED_LEN_BYTE_ARRAY if logical == Some(&LogicalType::Float16) => ColumnKind::Float,
        Type::INT96 | Type::FIXED_LEN_BYTE_ARRAY => ColumnKind::Other,
    };
    ParquetColumn {
        name: match column.max_rep_level() {
            0 => column.path().string(),
            // A list is called `x.list.element` internally.
            _ => column.path().parts().first().cloned().unwrap_or_default(),
        },
        kind,
        list: column.max_rep_level() == 1,
        unsigned: converted == ConvertedType::UINT_32,
        most_definition: column.max_def_level(),
    }
}

/// The file as the page reader sees it. The page reader requests a reader at the start of each page's header, which
/// contains the sizes. A size that no writer would choose is refused before it is allocated.
struct Pages(File);

impl Length for Pages {
    fn len(&self) -> u64 {
        self.0.len()
    }
}

impl ChunkReader for Pages {
    type T = BufReader<File>;

    fn get_read(&self, start: u64) -> Result<Self::T, ParquetError> {
        let mut head = Vec::new();
        self.0.get_read(start)?.take(16).read_to_end(&mut head)?;
        if let Some(bytes) = unpacked_page_bytes(&head).filter(|bytes| *bytes > PAGE_BYTES) {
            return Err(ParquetError::General(format!(
                "a page of {bytes} bytes; at most {PAGE_BYTES} are read"
            )));
        }
        self.0.get_read(start)
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes, ParquetError> {
        if start.checked_add(length as u64).is_none_or(|end| end > self.len()) {
            return Err(ParquetError::General("a page that goes beyond the end of the file".into()));
        }
        self.0.get_bytes(start, length)
    }
}

/// The unpacked size in a page header: the second field of a Thrift compact struct, after the page type. A field is a
/// byte (0x15: the next field, a 32-bit integer) and a zigzag varint.
fn unpacked_page_bytes(head: &[u8]) -> Option<u64> {
    let mut rest = head;
    let mut value = 0u64;
    for _ in 0..2 {
        let (first, behind) = rest.split_first()?;
        if *first != 0x15 {
            return None;
        }
        let length = behind.iter().position(|byte| byte & 0x80 == 0)? + 1;
        let digits = behind[..length.min(9)].iter().rev();
        value = digits.fold(0u64, |value, byte| value << 7 | (byte & 0x7f) as u64);
        rest = &behind[length..];
    }
    Some(value >> 1)
}

/// Some columns, read in parallel.
pub struct TableStream {
    file: ParquetFile,
    pages: Arc<Pages>,
    columns: Vec<ColumnSlot>,
    next_group: usize,
    left_in_group: u64,
    /// The row after the loaded ones.
    row: u64,
}

struct ColumnSlot {
    column: usize,
    reader: Option<ColumnReader>,
    batch: LoadedColumn,
}

/// The loaded rows of a column.
#[derive(Default)]
struct LoadedColumn {
    values: Values,
    definition: Vec<i16>,
    repetition: Vec<i16>,
}

#[derive(Default)]
enum Values {
    #[default]
    None,
    Whole(Vec<i64>),
    Float(Vec<f32>),
    Text(Vec<ByteArray>),
}

impl TableStream {
    /// Loads the next rows, at most `most`; 0 if none are left. Nulls are an error that names the row.
    pub fn load(&mut self, most: usize) -> Result<usize> {
        while self.left_in_group == 0 {
            if self.next_group == self.file.metadata.num_row_groups() {
                return Ok(0);
            }
            self.open_group()?;
        }
        let count = self.left_in_group.min(most as u64) as usize;
        for slot in &mut self.columns {
            let column = &self.file.columns[slot.column];
            let Some(reader) = &mut slot.reader else { continue };
            let (records, levels) =
                fenced(&self.file.path, || slot.batch.read(reader, count, column.unsigned))?;
            if records != count {
                let found = format!("{records} in column {}", column.name);
                return Err(Location::row(&self.file.path, self.row).bad(format!("{count} more rows"), found));
            }
            slot.batch.check_nulls(column, levels, &self.file.path, self.row)?;
        }
        self.left_in_group -= count as u64;
        self.row += count as u64;
        Ok(count)
    }

    fn open_group(&mut self) -> Result<()> {
        let group = self.file.metadata.row_group(self.next_group);
        for slot in &mut self.columns {
            let chunk = group.column(slot.column);
            slot.reader = Some(fenced(&self.file.path, || {
                let rows = group.num_rows() as usize;
                let pages = SerializedPageReader::new(self.pages.clone(), chunk, rows, None)?;
                Ok(get_column_reader(chunk.column_descr_ptr(), Box::new(pages)))
            })?);
        }
        self.left_in_group = group.num_rows() as u64;
        self.next_group += 1;
        Ok(())
    }

    fn wrong_kind(&self, slot: usize, expected: &str) -> ImportError {
        let column = &self.file.columns[self.columns[slot].column];
        let found = if column.list { format!("lists of {}", column.kind) } else { column.kind.to_string() };
        Location::at(&self.file.path, format!("column {}", column.name)).bad(expected, found)
    }

    /// The loaded elements of a column of integers.
    pub fn whole(&self, slot: usize) -> Result<&[i64]> {
        match &self.columns[slot].batch.values {
            Values::Whole(values) => Ok(values),
            _ => Err(self.wrong_kind(slot, "integers")),
        }
    }

    /// The loaded elements of a column of strings.
    pub fn texts(&self, slot: usize) -> Result<&[ByteArray]> {
        match &self.columns[slot].batch.values {
            Values::Text(values) => Ok(values),
            _ => Err(self.wrong_kind(slot, "strings")),
        }
    }

    /// Loaded element `at` of a column of numbers.
    pub fn float(&self, slot: usize, at: usize) -> Result<f32> {
        match &self.columns[slot].batch.values {
            Values::Whole(values) => Ok(values[at] as f32),
            Values::Float(values) => Ok(values[at]),
            _ => Err(self.wrong_kind(slot, "numbers")),
        }
    }

    /// Number of loaded elements of a column: more than rows for lists.
    pub fn elements(&self, slot: usize) -> usize {
        match &self.columns[slot].batch.values {
            Values::None => 0,
            Values::Whole(values) => values.len(),
            Values::Float(values) => values.len(),
            Values::Text(values) => values.len(),
        }
    }

    /// Checks that each loaded row of a list column has `length` elements.
    pub fn check_lists(&self, slot: usize, length: usize, loaded: usize) -> Result<()> {
        let starts = self.columns[slot].batch.repetition.iter().enumerate().filter(|(_, level)| **level == 0);
        let starts: Vec<usize> = starts.map(|(at, _)| at).chain([self.elements(slot)]).collect();
        match starts.windows(2).position(|ends| ends[1] - ends[0] != length) {
            None => Ok(()),
            Some(at) => {
                let location = Location::row(&self.file.path, self.row - loaded as u64 + at as u64);
                Err(location
                    .bad(format!("{length} elements, as in the first row"), starts[at + 1] - starts[at]))
            }
        }
    }

    /// Position of row `at` of the `loaded` rows, for messages.
    pub fn location(&self, at: usize, loaded: usize) -> Location {
        Location::row(&self.file.path, self.row - loaded as u64 + at as u64)
    }
}

impl LoadedColumn {
    /// Reads `count` rows. Returns the numbers of rows and of levels (elements and nulls).
    fn read(
        &mut self,
        reader: &mut ColumnReader,
        count: usize,
        unsigned: bool,
    ) -> Result<(usize, usize), ParquetError> {
        self.definition.clear();
        self.repetition.clear();
        macro_rules! records {
            ($reader:expr, $values:expr) => {{
                let (definition, repetition) = (&mut self.definition, &mut self.repetition);
                let (records, _, levels) =
                    $reader.read_records(count, Some(definition), Some(repetition), $values)?;
                (records, levels)
            }};
        }
        macro_rules! converted {
            ($reader:expr, $into:path, |$value:ident| $convert:expr) => {{
                let mut values = Vec::new();
                let read = records!($reader, &mut values);
                self.values = $into(values.iter().map(|$value| $convert).collect());
                read
            }};
        }
        let read = match reader {
            ColumnReader::BoolColumnReader(reader) => {
                converted!(reader, Values::Whole, |value| *value as i64)
            }
            ColumnReader::Int32ColumnReader(reader) if unsigned => {
                converted!(reader, Values::Whole, |value| *value as u32 as i64)
            }
            ColumnReader::Int32ColumnReader(reader) => {
                converted!(reader, Values::Whole, |value| *value as i64)
            }
            ColumnReader::Int64ColumnReader(reader) => {
                let mut values = Vec::new();
                let read = records!(reader, &mut values);
                self.values = Values::Whole(values);
                read
            }
            ColumnReader::FloatColumnReader(reader) => {
                let mut values = Vec::new();
                let read = records!(reader, &mut values);
                self.values = Values::Float(values);
                read
            }
            ColumnReader::DoubleColumnReader(reader) => {
                converted!(reader, Values::Float, |value| *value as f32)
            }
            ColumnReader::ByteArrayColumnReader(reader) => {
                let mut values = Vec::new();
                let read = records!(reader, &mut values);
                self.values = Values::Text(values);
                read
            }
            ColumnReader::FixedLenByteArrayColumnReader(reader) => {
                converted!(reader, Values::Float, |value| half(value))
            }
            ColumnReader::Int96ColumnReader(_) => {
                return Err(ParquetError::General(
                    "a column of 96-bit timestamps, which are not read".into(),
                ));
            }
        };
        Ok(read)
    }

    /// A level below the deepest is a null, or an empty list.
    fn check_nulls(&self, column: &ParquetColumn, levels: usize, path: &Path, first_row: u64) -> Result<()> {
        if column.most_definition == 0 {
            return Ok(());
        }
        let levels = &self.definition[..levels.min(self.definition.len())];
        let Some(at) = levels.iter().position(|level| *level != column.most_definition) else {
            return Ok(());
        };
        let rows = match column.list {
            true => self.repetition[..=at].iter().filter(|level| **level == 0).count().saturating_sub(1),
            false => at,
        };
        let location = Location::row(path, first_row + rows as u64);
        Err(location.bad(format!("a value in column {}", column.name), "null"))
    }
}

fn half(value: &FixedLenByteArray) -> f32 {
    match value.data() {
        [low, high] => f16::from_le_bytes([*low, *high]).to_f32(),
        // Columns of other lengths are `ColumnKind::Other`, which is never opened.
        _ => f32::NAN,
    }
}

/// A string element, for messages.
pub fn shown(text: &ByteArray) -> String {
    quoted(text.data())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_sizes_are_found_before_the_page_is_unpacked() {
        // Type 0, then 2^30 bytes as a zigzag varint.
        assert_eq!(unpacked_page_bytes(&[0x15, 0, 0x15, 0x80, 0x80, 0x80, 0x80, 0x08, 0x15]), Some(1 << 30));
        assert_eq!(unpacked_page_bytes(&[0x15, 4, 0x15, 0x14, 0x15]), Some(10));
        assert_eq!(unpacked_page_bytes(&[0x15, 4]), None);
        assert_eq!(unpacked_page_bytes(&[0x19, 4, 0x15, 0x14]), None);
    }

    #[test]
    fn a_page_that_claims_too_much_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("page");
        std::fs::write(&path, [0x15, 0, 0x15, 0x80, 0x80, 0x80, 0x80, 0x08, 0x15]).unwrap();
        let pages = Pages(File::open(&path).unwrap());
        let message = pages.get_read(0).err().unwrap().to_string();
        assert!(message.contains("a page of 1073741824 bytes"), "{message}");
        assert!(pages.get_bytes(4, 100).is_err());
        assert_eq!(pages.get_bytes(4, 3).unwrap().len(), 3);
    }

    #[test]
    fn a_panic_inside_the_decoder_is_an_error_that_names_the_file() {
        let error = fenced::<()>(Path::new("e.parquet"), || panic!("as damaged files make it")).unwrap_err();
        assert!(error.to_string().starts_with("e.parquet: expected readable parquet data"), "{error}");
    }
}
