//! Node ids as text: one whole number per line, plain or gzipped, as in OGB's splits.

use crate::source::{CHUNK, IdSource, IdStream};
use crate::{Location, Result, input};
use std::{
    io::{BufRead, Read},
    path::{Path, PathBuf},
};

/// Longest line accepted: far more than any id needs. It limits the memory for a file without line ends.
const LINE_BYTES: u64 = 64;

/// A text file of ids.
pub struct TextIds {
    path: PathBuf,
}

impl TextIds {
    /// The ids in `path`; lines are checked as they are read.
    pub fn open(path: &Path) -> Result<TextIds> {
        input::open(path)?;
        Ok(TextIds { path: path.to_path_buf() })
    }
}

struct TextIdStream {
    path: PathBuf,
    reader: Box<dyn BufRead + Send>,
    row: u64,
    line: Vec<u8>,
    /// Blank lines are allowed only at the end: anywhere else an id is missing.
    blank: bool,
}

impl IdSource for TextIds {
    fn open(&self) -> Result<Box<dyn IdStream>> {
        let reader = input::open_text(&self.path)?;
        Ok(Box::new(TextIdStream { path: self.path.clone(), reader, row: 0, line: Vec::new(), blank: false }))
    }
    fn location(&self, position: u64) -> Location {
        Location::row(&self.path, position)
    }
}

impl IdStream for TextIdStream {
    fn next(&mut self, out: &mut Vec<u64>) -> Result<bool> {
        out.clear();
        while out.len() < CHUNK {
            self.line.clear();
            let row = Location::row(&self.path, self.row);
            let count = (&mut self.reader)
                .take(LINE_BYTES)
                .read_until(b'\n', &mut self.line)
                .map_err(|error| row.clone().io(error))?;
            if count == 0 {
                break;
            }
            if count as u64 == LINE_BYTES && !self.line.ends_with(b"\n") {
                let start = String::from_utf8_lossy(&self.line).into_owned();
                return Err(
                    row.bad("a node id", format!("a line of more than {LINE_BYTES} characters, {start}..."))
                );
            }
            let text = String::from_utf8_lossy(&self.line);
            let text = text.trim();
            if text.is_empty() {
                self.blank = true;
                continue;
            }
            let id = text.parse::<u64>().ok().filter(|_| !self.blank);
            let found = if self.blank { "an empty line before it" } else { text };
            out.push(id.ok_or_else(|| row.bad("a node id", found))?);
            self.row += 1;
        }
        Ok(!out.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;

    fn ids_of(text: &[u8]) -> Result<Vec<u64>> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("train.csv");
        std::fs::write(&path, text).unwrap();
        fixture::all_ids(&TextIds::open(&path)?)
    }

    fn check_refused(text: &str, row: &str, found: &str) {
        let message = ids_of(text.as_bytes()).unwrap_err().to_string();
        assert!(message.contains(row) && message.contains(found), "{message}");
    }

    #[test]
    fn ids_stand_one_a_line() {
        assert_eq!(ids_of(b"3\n1\r\n2").unwrap(), [3, 1, 2]);
        assert_eq!(ids_of(b"3\n\n\n").unwrap(), [3]);
        assert!(ids_of(b"").unwrap().is_empty());
    }

    #[test]
    fn gzipped_lists_read_the_same() {
        let text: String = (0..50_000).map(|id| format!("{id}\n")).collect();
        assert_eq!(ids_of(&fixture::gzip(text.as_bytes())).unwrap(), (0..50_000).collect::<Vec<u64>>());
    }

    #[test]
    fn what_is_no_id_is_named_with_its_row() {
        check_refused("1\nx7\n", "row 1", "x7");
        check_refused("1\n2\n-3\n", "row 2", "-3");
        check_refused("1\n\n2\n", "row 1", "an empty line");
        check_refused(&"9".repeat(100_000), "row 0", "999");
    }

    #[test]
    fn a_cut_gzip_file_is_an_error() {
        let packed = fixture::gzip("12\n".repeat(1000).as_bytes());
        assert!(ids_of(&packed[..packed.len() - 6]).is_err());
    }
}
