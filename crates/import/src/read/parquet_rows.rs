//! Feature rows, label rows and ids from parquet files.

use crate::parquet_file::{ColumnKind, ParquetFile, TableStream};
use crate::source::{CHUNK, IdSource, IdStream, RowSource, RowStream};
use crate::{Location, Result};

/// Elements read at a time from a list column.
const LIST_ELEMENTS: usize = 1 << 18;

/// All columns of numbers together, or one column of lists, as rows.
pub struct ParquetRows {
    file: ParquetFile,
    columns: Vec<usize>,
    dim: usize,
}

impl ParquetRows {
    /// Chooses the columns; strings and other types are left out.
    pub fn new(file: ParquetFile) -> Result<ParquetRows> {
        let number =
            |index: &usize| matches!(file.columns()[*index].kind, ColumnKind::Whole | ColumnKind::Float);
        let numbers: Vec<usize> = (0..file.columns().len()).filter(number).collect();
        let lists = numbers.iter().filter(|index| file.columns()[**index].list).count();
        let dim = match (numbers.len(), lists) {
            (0, _) => return Err(Location::file(file.path()).bad("columns of numbers", "none")),
            (count, 0) => count,
            (1, 1) => first_length(&file, numbers[0])?,
            (count, lists) => {
                let found = format!("{lists} columns of lists among {count}");
                return Err(
                    Location::file(file.path()).bad("columns of numbers, or one column of lists", found)
                );
            }
        };
        Ok(ParquetRows { file, columns: numbers, dim })
    }

    /// Whether every element is an integer or a boolean.
    pub fn whole(&self) -> bool {
        self.columns.iter().all(|index| self.file.columns()[*index].kind == ColumnKind::Whole)
    }

    /// Approximate memory of a stream.
    pub fn read_bytes(&self) -> u64 {
        self.file.read_bytes(&self.columns)
    }
}

fn first_length(file: &ParquetFile, column: usize) -> Result<usize> {
    let mut stream = file.read(&[column], 0)?;
    if stream.load(1)? == 0 {
        return Err(Location::file(file.path()).bad("rows", "none"));
    }
    match stream.elements(0) {
        0 => Err(Location::row(file.path(), 0).bad("a list of numbers", "an empty one")),
        length => Ok(length),
    }
}

struct ParquetRowStream {
    table: TableStream,
    dim: usize,
    lists: bool,
}

impl RowSource for ParquetRows {
    fn rows(&self) -> u64 {
        self.file.rows()
    }
    fn dim(&self) -> usize {
        self.dim
    }
    fn open(&self, first: u64) -> Result<Box<dyn RowStream>> {
        let lists = self.file.columns()[self.columns[0]].list;
        Ok(Box::new(ParquetRowStream { table: self.file.read(&self.columns, first)?, dim: self.dim, lists }))
    }
    fn location(&self, row: u64) -> Location {
        Location::row(self.file.path(), row)
    }
}

impl RowStream for ParquetRowStream {
    fn fill(&mut self, rows: &mut [f32]) -> Result<()> {
        let most = (LIST_ELEMENTS / self.dim).max(1);
        let mut at = 0;
        while at < rows.len() {
            let count = self.table.load(most.min((rows.len() - at) / self.dim))?;
            if count == 0 {
                return Err(self.table.location(0, 0).bad("another row", "the end of the file"));
            }
            let out = &mut rows[at..at + count * self.dim];
            if self.lists {
                self.table.check_lists(0, self.dim, count)?;
                for (index, value) in out.iter_mut().enumerate() {
                    *value = self.table.float(0, index)?;
                }
            } else {
                for (row, values) in out.chunks_exact_mut(self.dim).enumerate() {
                    for (column, value) in values.iter_mut().enumerate() {
                        *value = self.table.float(column, row)?;
                    }
                }
            }
            at += count * self.dim;
        }
        Ok(())
    }
}

/// The first column of a file as node ids.
pub struct ParquetIds(ParquetFile);

impl ParquetIds {
    /// Checks that the first column has integers.
    pub fn new(file: ParquetFile) -> Result<ParquetIds> {
        let column = &file.columns()[0];
        if column.kind != ColumnKind::Whole || column.list {
            let location = Location::at(file.path(), format!("column {}", column.name));
            return Err(location.bad("a column of ids", column.kind));
        }
        Ok(ParquetIds(file))
    }
}

impl IdSource for ParquetIds {
    fn open(&self) -> Result<Box<dyn IdStream>> {
        Ok(Box::new(ParquetIdStream(self.0.read(&[0], 0)?)))
    }
    fn location(&self, position: u64) -> Location {
        Location::row(self.0.path(), position)
    }
}

struct ParquetIdStream(TableStream);

impl IdStream for ParquetIdStream {
    fn next(&mut self, out: &mut Vec<u64>) -> Result<bool> {
        out.clear();
        let count = self.0.load(CHUNK)?;
        if count > 0 {
            for (at, id) in self.0.whole(0)?.iter().enumerate() {
                let id =
                    u64::try_from(*id).map_err(|_| self.0.location(at, count).bad("an id, 0 or more", id))?;
                out.push(id);
            }
        }
        Ok(count > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;

    fn rows_of(name: &str, first: u64) -> Result<(usize, Vec<f32>)> {
        let rows = ParquetRows::new(ParquetFile::open(&fixture::committed("parquet").join(name))?)?;
        let values = fixture::all_rows(&rows, first)?;
        Ok((rows.dim(), values))
    }

    #[test]
    fn columns_of_numbers_stand_side_by_side() {
        let (dim, values) = rows_of("columns.parquet", 38).unwrap();
        assert_eq!((dim, values.len()), (3, 62 * 3));
        assert_eq!(values[..6], [9.5, 0.0, 4.75, 9.75, 1.0, 4.875]);
        assert_eq!(values[values.len() - 3..], [24.75, 1.0, 12.375]);
    }

    #[test]
    fn lists_are_rows() {
        for name in ["lists.parquet", "fixed.parquet"] {
            let (dim, values) = rows_of(name, 1).unwrap();
            assert_eq!((dim, &values[..3], values.len()), (3, &[1.0, 1.5, -1.0][..], 297), "{name}");
            assert_eq!(values[values.len() - 3..], [99.0, 99.5, -99.0], "{name}");
        }
    }

    #[test]
    fn lists_that_differ_in_length_or_hold_nulls_are_named() {
        let message = |name: &str| rows_of(name, 0).unwrap_err().to_string();
        assert!(
            message("ragged.parquet")
                .contains("ragged.parquet, row 2: expected 2 elements, as in the first row, found 1")
        );
        let found = message("hole.parquet");
        assert!(found.contains("hole.parquet, row 1: expected a value in column x, found null"), "{found}");
        assert!(
            message("empty_list.parquet").contains("empty_list.parquet, row 1: expected a value in column x")
        );
        assert!(message("names.parquet").contains("expected columns of numbers, found none"));
    }

    #[test]
    fn the_first_column_is_a_list_of_ids() {
        let path = fixture::committed("parquet");
        let ids = ParquetIds::new(ParquetFile::open(&path.join("ids.parquet")).unwrap()).unwrap();
        assert_eq!(fixture::all_ids(&ids).unwrap(), [5, 3, 99]);
        assert!(ParquetIds::new(ParquetFile::open(&path.join("lists.parquet")).unwrap()).is_err());
    }
}
