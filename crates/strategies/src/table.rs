//! What a run will hold in memory, line by line, added up before anything is allocated.

use esker_types::ByteCount;
use serde::{Deserialize, Serialize};
use std::fmt;

/// One thing that takes memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryLine {
    /// What it is.
    pub what: String,
    /// How much it takes at most.
    pub bytes: u64,
}

/// Everything that takes memory.
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

    /// All lines together.
    pub fn total(&self) -> u64 {
        self.lines.iter().fold(0u64, |sum, line| sum.saturating_add(line.bytes))
    }

    /// Lines of another table behind these.
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
        write!(f, "  {:width$}  {:>10}", "together", ByteCount(self.total()).to_string())
    }
}
