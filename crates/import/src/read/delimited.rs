//! Delimited text, plain or gzipped, as records of byte fields, as rows of numbers and as edges. Every error names the
//! line. A record has a bounded length, and so has the memory for a file without line ends or with a quote that is
//! never closed.

use crate::source::{CHUNK, EdgeColumns, EdgeSource, EdgeStream, ForeignEdge, RowSource, RowStream};
use crate::{Location, Result, input};
use serde::{Deserialize, Serialize};
use std::{
    io::{self, BufRead, Read},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

/// The longest record accepted: enough for a feature row of a million numbers.
const RECORD_BYTES: u64 = 16 << 20;

/// How a text file separates its fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dialect {
    /// The separator.
    pub delimiter: u8,
    /// Whether the first line names the columns.
    pub header: bool,
}

impl Dialect {
    /// The given separator, or the one of the extension, or the first of tab, comma and space in the first line.
    pub fn guess(path: &Path, asked: Option<char>) -> Result<Dialect> {
        let delimiter = match asked {
            Some(asked) if asked.is_ascii() && !matches!(asked, '\n' | '\r' | '"') => asked as u8,
            Some(asked) => {
                let expected = "a delimiter of one ASCII character, no quote and no line end";
                return Err(Location::file(path).bad(expected, format!("--delimiter {asked:?}")));
            }
            None => guess_delimiter(path)?,
        };
        Ok(Dialect { delimiter, header: false })
    }

    /// Quotes are special in comma-separated files only: names of a knowledge graph may contain them.
    fn quoting(self) -> bool {
        matches!(self.delimiter, b',' | b';')
    }
}

fn guess_delimiter(path: &Path) -> Result<u8> {
    let name = path.to_string_lossy().to_lowercase();
    let name = name.strip_suffix(".gz").unwrap_or(&name);
    if name.ends_with(".tsv") {
        return Ok(b'\t');
    }
    let (mut line, mut text) = (Vec::new(), input::open_text(path)?);
    skip_comments(&mut text)
        .and_then(|_| text.take(RECORD_BYTES).read_until(b'\n', &mut line))
        .map_err(|error| Location::file(path).io(error))?;
    let found = [b'\t', b',', b';', b' '].into_iter().find(|byte| line.contains(byte));
    Ok(found.unwrap_or(b','))
}

/// Skips lines that start with `#` at the start of a file, as in SNAP's edge lists. Returns their number. Later such
/// lines are ordinary records, because names may start this way.
fn skip_comments(text: &mut dyn BufRead) -> io::Result<u64> {
    let mut lines = 0;
    while text.fill_buf()?.first() == Some(&b'#') {
        text.take(RECORD_BYTES).skip_until(b'\n')?;
        lines += 1;
    }
    Ok(lines)
}

/// Returns at most the allowed number of bytes per record.
struct Bounded {
    reader: Box<dyn BufRead + Send>,
    left: Arc<AtomicU64>,
}

impl Read for Bounded {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let left = self.left.load(Relaxed);
        if left == 0 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!(
                    "a record longer than {RECORD_BYTES} bytes; is a line end or a closing quote missing?"
                ),
            ));
        }
        let count = self.reader.read(out)?;
        self.left.store(left.saturating_sub(count as u64), Relaxed);
        Ok(count)
    }
}

/// A stream of records with the same number of fields.
pub struct DelimitedRecords {
    path: PathBuf,
    reader: csv::Reader<Bounded>,
    left: Arc<AtomicU64>,
    record: csv::ByteRecord,
    /// Lines before the first record.
    comments: u64,
}

impl DelimitedRecords {
    /// Opens `path` at its first record; a header is skipped.
    pub fn open(path: &Path, dialect: Dialect) -> Result<DelimitedRecords> {
        let left = Arc::new(AtomicU64::new(RECORD_BYTES));
        let mut text = input::open_text(path)?;
        let comments = skip_comments(&mut text).map_err(|error| Location::file(path).io(error))?;
        let bounded = Bounded { reader: text, left: left.clone() };
        let reader = csv::ReaderBuilder::new()
            .delimiter(dialect.delimiter)
            .quoting(dialect.quoting())
            .has_headers(false)
            .from_reader(bounded);
        let mut records = DelimitedRecords {
            path: path.to_path_buf(),
            reader,
            left,
            record: csv::ByteRecord::new(),
            comments,
        };
        if dialect.header {
            records.advance()?;
        }
        Ok(records)
    }

    /// Moves to the next record; `false` if there is none.
    pub fn advance(&mut self) -> Result<bool> {
        self.left.store(RECORD_BYTES, Relaxed);
        let line = self.reader.position().line() + self.comments;
        self.reader.read_byte_record(&mut self.record).map_err(|error| self.broken(error, line))
    }

    /// Skips `count` records, or fewer if the file ends.
    pub fn skip(&mut self, count: u64) -> Result<()> {
        for _ in 0..count {
            if !self.advance()? {
                break;
            }
        }
        Ok(())
    }

    fn broken(&self, error: csv::Error, line: u64) -> crate::ImportError {
        let location = Location::at(&self.path, format!("line {line}"));
        match error.into_kind() {
            csv::ErrorKind::Io(error) => location.io(error),
            csv::ErrorKind::UnequalLengths { pos, expected_len, len } => {
                let line = pos.map_or(line, |pos| pos.line() + self.comments);
                let expected = format!("{expected_len} fields, as in the first line");
                Location::at(&self.path, format!("line {line}")).bad(expected, format!("{len} fields"))
            }
            other => location.bad("delimited text", format!("{other:?}")),
        }
    }

    /// Number of fields of the current record.
    pub fn width(&self) -> usize {
        self.record.len()
    }

    /// A field of the current record, trimmed.
    pub fn field(&self, column: usize) -> Result<&[u8]> {
        match self.record.get(column) {
            Some(field) => Ok(field.trim_ascii()),
            None => Err(self.location().bad(format!("{} columns", column + 1), self.width())),
        }
    }

    /// The position of the current record, for messages.
    pub fn location(&self) -> Location {
        let line = self.record.position().map_or(0, |position| position.line() + self.comments);
        Location::at(&self.path, format!("line {line}"))
    }

    /// The error for a field that is not as expected.
    pub fn bad(&self, column: usize, expected: &str) -> crate::ImportError {
        let found = self.record.get(column).unwrap_or_default();
        self.location().bad(format!("{expected} in column {column}"), quoted(found))
    }

    /// A field that must be a whole number, at least 0.
    pub fn id(&self, column: usize, expected: &str) -> Result<u64> {
        parse_id(self.field(column)?).ok_or_else(|| self.bad(column, expected))
    }

    /// A field that must be a non-empty string.
    pub fn name(&self, column: usize) -> Result<&[u8]> {
        let field = self.field(column)?;
        if field.is_empty() { Err(self.bad(column, "a name")) } else { Ok(field) }
    }
}

/// A stream of lines, each a name.
pub struct Lines {
    path: PathBuf,
    reader: Box<dyn BufRead + Send>,
    line: Vec<u8>,
    number: u64,
}

impl Lines {
    /// Opens `path` before its first line.
    pub fn open(path: &Path) -> Result<Lines> {
        Ok(Lines { path: path.to_path_buf(), reader: input::open_text(path)?, line: Vec::new(), number: 0 })
    }

    /// Moves to the next line, which must not be empty; `false` if there is none.
    pub fn advance(&mut self) -> Result<bool> {
        self.line.clear();
        self.number += 1;
        let count = (&mut self.reader)
            .take(RECORD_BYTES)
            .read_until(b'\n', &mut self.line)
            .map_err(|error| self.location().io(error))?;
        if count as u64 == RECORD_BYTES {
            return Err(self.location().bad("a name", format!("a line longer than {RECORD_BYTES} bytes")));
        }
        if count > 0 && self.name().is_empty() {
            return Err(self.location().bad("a name", "an empty line"));
        }
        Ok(count > 0)
    }

    /// The current line, trimmed.
    pub fn name(&self) -> &[u8] {
        self.line.trim_ascii()
    }

    /// The position of the current line, for messages.
    pub fn location(&self) -> Location {
        Location::at(&self.path, format!("line {}", self.number))
    }
}

/// Bytes of an input file, formatted for a message.
pub fn quoted(bytes: &[u8]) -> String {
    if bytes.is_empty() {
        return "nothing".into();
    }
    let text: String = String::from_utf8_lossy(bytes).chars().take(60).collect();
    format!("`{}`", text.escape_debug())
}

/// A whole number, at least 0, in decimal digits.
pub fn parse_id(field: &[u8]) -> Option<u64> {
    if field.is_empty() || field.len() > 20 {
        return None;
    }
    field.iter().try_fold(0u64, |value, byte| {
        let digit = byte.wrapping_sub(b'0');
        if digit > 9 { None } else { value.checked_mul(10)?.checked_add(digit as u64) }
    })
}

/// A number in any usual notation.
pub fn parse_float(field: &[u8]) -> Option<f32> {
    std::str::from_utf8(field).ok()?.parse().ok()
}

/// The shape of a table of numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TableShape {
    /// Rows without the header.
    pub rows: u64,
    /// Columns.
    pub columns: usize,
    /// The first line names the columns.
    pub header: bool,
    /// Every field is a whole number (or empty).
    pub whole: bool,
}

/// Reads a table of numbers once to determine its shape. A first line without any number is a header.
pub fn scan_table(path: &Path, dialect: Dialect) -> Result<TableShape> {
    let mut records = DelimitedRecords::open(path, dialect)?;
    let mut shape = TableShape { rows: 0, columns: 0, header: false, whole: true };
    while records.advance()? {
        shape.columns = records.width();
        if shape.rows == 0 && !shape.header {
            let number = |column| records.field(column).is_ok_and(|field| parse_float(field).is_some());
            shape.header = !(0..records.width()).any(number);
            if shape.header {
                continue;
            }
        }
        for column in 0..shape.columns {
            let field = records.field(column)?;
            let digits = field.strip_prefix(b"-").unwrap_or(field);
            shape.whole &= digits.iter().all(u8::is_ascii_digit);
        }
        shape.rows += 1;
    }
    if shape.columns == 0 {
        return Err(Location::file(path).bad("rows of numbers", "an empty file"));
    }
    Ok(shape)
}

/// A table of numbers as rows.
pub struct TextRows {
    path: PathBuf,
    dialect: Dialect,
    rows: u64,
    dim: usize,
    missing_is_nan: bool,
}

impl TextRows {
    /// The table in `path` with a known number of rows, which is verified during reading. With `missing_is_nan` an
    /// empty field is NaN; otherwise it is an error.
    pub fn new(path: &Path, dialect: Dialect, rows: u64, missing_is_nan: bool) -> Result<TextRows> {
        let mut records = DelimitedRecords::open(path, dialect)?;
        if !records.advance()? {
            return Err(Location::file(path).bad(format!("{rows} rows"), "an empty file"));
        }
        Ok(TextRows { path: path.to_path_buf(), dialect, rows, dim: records.width(), missing_is_nan })
    }
}

struct TextRowStream {
    records: DelimitedRecords,
    row: u64,
    rows: u64,
    dim: usize,
    missing_is_nan: bool,
}

impl RowSource for TextRows {
    fn rows(&self) -> u64 {
        self.rows
    }
    fn dim(&self) -> usize {
        self.dim
    }
    fn open(&self, first: u64) -> Result<Box<dyn RowStream>> {
        let mut records = DelimitedRecords::open(&self.path, self.dialect)?;
        records.skip(first)?;
        Ok(Box::new(TextRowStream {
            records,
            row: first,
            rows: self.rows,
            dim: self.dim,
            missing_is_nan: self.missing_is_nan,
        }))
    }
    fn location(&self, row: u64) -> Location {
        Location::row(&self.path, row)
    }
}

impl RowStream for TextRowStream {
    fn fill(&mut self, rows: &mut [f32]) -> Result<()> {
        for row in rows.chunks_exact_mut(self.dim) {
            if !self.records.advance()? {
                let found = format!("{} rows", self.row);
                return Err(Location::file(&self.records.path).bad(format!("{} rows", self.rows), found));
            }
            for (column, value) in row.iter_mut().enumerate() {
                let field = self.records.field(column)?;
                *value = match parse_float(field) {
                    Some(value) => value,
                    None if field.is_empty() && self.missing_is_nan => f32::NAN,
                    None => return Err(self.records.bad(column, "a number")),
                };
            }
            self.row += 1;
            if self.row == self.rows && self.records.advance()? {
                return Err(self.records.location().bad(format!("{} rows", self.rows), "one more"));
            }
        }
        Ok(())
    }
}

/// The column of each part of an edge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EdgeLayout {
    /// Column of the message source.
    pub source: usize,
    /// Column of the message target.
    pub target: usize,
    /// Column of the relation.
    pub relation: Option<usize>,
    /// Column of the weight.
    pub weight: Option<usize>,
    /// Column of the time.
    pub time: Option<usize>,
}

impl EdgeLayout {
    /// Source and target, in the first two columns.
    pub const ENDS: EdgeLayout =
        EdgeLayout { source: 0, target: 1, relation: None, weight: None, time: None };

    /// Which optional columns there are.
    pub fn columns(&self) -> EdgeColumns {
        EdgeColumns {
            relation: self.relation.is_some(),
            weight: self.weight.is_some(),
            time: self.time.is_some(),
        }
    }
}

/// An edge list as text, with integer ids.
pub struct TextEdges {
    /// The file.
    pub path: PathBuf,
    /// How it is written.
    pub dialect: Dialect,
    /// The meaning of the columns.
    pub layout: EdgeLayout,
    /// Numbers of relations written as names; `None` if they are already numbers.
    pub relations: Option<Arc<crate::dictionary::Relations>>,
    /// Number of edges, if known; verified when the file is read to its end.
    pub count: Option<u64>,
}

struct TextEdgeStream {
    records: DelimitedRecords,
    layout: EdgeLayout,
    relations: Option<Arc<crate::dictionary::Relations>>,
    position: u64,
    count: Option<u64>,
}

impl EdgeSource for TextEdges {
    fn count(&self) -> Option<u64> {
        self.count
    }
    fn columns(&self) -> EdgeColumns {
        self.layout.columns()
    }
    fn open(&self, skip: u64) -> Result<Box<dyn EdgeStream>> {
        let mut records = DelimitedRecords::open(&self.path, self.dialect)?;
        records.skip(skip)?;
        Ok(Box::new(TextEdgeStream {
            records,
            layout: self.layout,
            relations: self.relations.clone(),
            position: skip,
            count: self.count,
        }))
    }
    fn location(&self, position: u64) -> Location {
        // Blank lines and line ends inside quotes are not counted, so "row" is correct and "line" would not be.
        Location::at(&self.path, format!("row {}", position + self.dialect.header as u64))
    }
}

/// All columns of an edge except its ends.
pub fn read_attributes(
    records: &DelimitedRecords,
    layout: &EdgeLayout,
    relations: Option<&crate::dictionary::Relations>,
) -> Result<ForeignEdge> {
    let mut edge = ForeignEdge::default();
    if let Some(column) = layout.relation {
        edge.relation = match relations {
            Some(relations) => relations
                .number(records.field(column)?)
                .ok_or_else(|| records.bad(column, "a relation seen before"))?,
            None => records
                .id(column, "a relation number, as in the first rows,")?
                .try_into()
                .map_err(|_| records.bad(column, "a relation number below 2^32"))?,
        };
    }
    if let Some(column) = layout.weight {
        edge.weight = parse_float(records.field(column)?).ok_or_else(|| records.bad(column, "a weight"))?;
    }
    if let Some(column) = layout.time {
        let text = std::str::from_utf8(records.field(column)?).unwrap_or_default();
        edge.time = text.parse().map_err(|_| records.bad(column, "a whole number for the time"))?;
    }
    Ok(edge)
}

impl EdgeStream for TextEdgeStream {
    fn next(&mut self, out: &mut Vec<ForeignEdge>) -> Result<bool> {
        out.clear();
        let id = "an id (a whole number, 0 or more; for names add --string-ids)";
        while out.len() < CHUNK && self.records.advance()? {
            let mut edge = read_attributes(&self.records, &self.layout, self.relations.as_deref())?;
            edge.source = self.records.id(self.layout.source, id)?;
            edge.target = self.records.id(self.layout.target, id)?;
            out.push(edge);
        }
        self.position += out.len() as u64;
        let ended = out.len() < CHUNK;
        if let Some(count) = self.count
            && (self.position > count || ended && self.position != count)
        {
            let found = format!("{}{} edges", if ended { "" } else { "at least " }, self.position);
            return Err(Location::file(&self.records.path).bad(format!("{count} edges"), found));
        }
        Ok(!out.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;

    fn rows_of(text: &str, rows: u64, missing_is_nan: bool) -> Result<Vec<f32>> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x.csv");
        std::fs::write(&path, text).unwrap();
        let dialect = Dialect::guess(&path, None)?;
        let shape = scan_table(&path, dialect)?;
        let dialect = Dialect { header: shape.header, ..dialect };
        fixture::all_rows(&TextRows::new(&path, dialect, rows, missing_is_nan)?, 0)
    }

    fn message(text: &str, rows: u64) -> String {
        rows_of(text, rows, false).unwrap_err().to_string()
    }

    #[test]
    fn numbers_come_with_any_separator_and_with_or_without_a_header() {
        for text in ["1,2\n3,4\n", "1\t2\n3\t4", "1 2\r\n3 4\r\n", "a;b\n1;2\n3;4\n", "x,y\n1, 2\n\n3 ,4\n"] {
            assert_eq!(rows_of(text, 2, false).unwrap(), [1.0, 2.0, 3.0, 4.0], "{text:?}");
        }
    }

    #[test]
    fn an_empty_field_is_nan_only_where_that_is_allowed() {
        assert!(rows_of("1,\n3,4\n", 2, true).unwrap()[1].is_nan());
        assert!(
            message("1,\n3,4\n", 2).contains("x.csv, line 1: expected a number in column 1, found nothing")
        );
    }

    #[test]
    fn ragged_rows_words_and_wrong_lengths_are_named() {
        assert!(message("1,2\n3\n", 2).contains("line 2: expected 2 fields, as in the first line, found 1"));
        assert!(message("1,2\n3,dog\n", 2).contains("line 2: expected a number in column 1, found `dog`"));
        assert!(message("1,2\n", 2).contains("expected 2 rows, found 1 rows"));
        assert!(message("1,2\n3,4\n5,6\n", 2).contains("line 3: expected 2 rows, found one more"));
        assert!(message("", 2).contains("an empty file"));
    }

    #[test]
    fn a_file_without_line_ends_is_refused_before_it_fills_memory() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x.csv");
        std::fs::write(&path, vec![b'1'; RECORD_BYTES as usize * 2]).unwrap();
        let dialect = Dialect { delimiter: b',', header: false };
        let message = scan_table(&path, dialect).unwrap_err().to_string();
        assert!(message.contains("a record longer than"), "{message}");
    }

    #[test]
    fn ids_are_digits_that_fit_64_bits() {
        assert_eq!(parse_id(b"18446744073709551615"), Some(u64::MAX));
        for field in ["", "-1", "+1", "1.0", "18446744073709551616", "99999999999999999999", "1a"] {
            assert_eq!(parse_id(field.as_bytes()), None, "{field}");
        }
    }
}
