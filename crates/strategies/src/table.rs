//! The memory of a run, line by line, summed up before anything is allocated.

use esker_types::ByteCount;
use serde::{Deserialize, Serialize};
use std::fmt;

/// One use of memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryLine {
    /// What it is.
    pub what: String,
    /// Its largest size.
    pub bytes: u64,
}

/// All uses of memory.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct MemoryTable {
    /// The lines.
    pub lines: Vec<MemoryLine>,
}

impl MemoryTable {
    /// Adds a line.
    pub fn add(&mut self, what: impl Into<String>, bytes: u64) {
        self.lines.push(MemoryLine { what: what.into(), bytes });
    }

    /// The sum of all lines.
    pub fn total(&self) -> u64 {
        self.lines.iter().fold(0u64, |sum, line| sum.saturating_add(line.bytes))
    }

    /// Appends the lines of another table.
    pub fn extend(&mut self, other: MemoryTable) {
        self.lines.extend(other.lines);
    }
}

impl fmt::Display for MemoryTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.lines.iter().map(|line| line.what.len()).max().unwrap_or(0).max(8);
        for line in &self.lines {
            writeln!(f, "  {:width$}  {:>10}", line.what, ByteCount(line.bytes).to_string())?;
        }
        write!(f, "  {:width$}  {:>10}", "total", ByteCount(self.total()).to_string())
    }
}
