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
    /// How the size follows, if that is more than a sum of small things.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub from: String,
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
        self.add_from(what, bytes, "");
    }

    /// Adds a line, with how its size follows.
    pub fn add_from(&mut self, what: impl Into<String>, bytes: u64, from: impl Into<String>) {
        self.lines.push(MemoryLine { what: what.into(), bytes, from: from.into() });
    }

    /// The table with how each size follows.
    pub fn explained(&self) -> String {
        let width = self.width();
        let lines = self.lines.iter().map(|MemoryLine { what, bytes, from }| {
            let line = format!("  {what:width$}  {:>10}   {from}", ByteCount(*bytes).to_string());
            line.trim_end().to_string()
        });
        let total = format!("  {:width$}  {:>10}", "total", ByteCount(self.total()).to_string());
        lines.chain([total]).collect::<Vec<_>>().join("\n")
    }

    fn width(&self) -> usize {
        self.lines.iter().map(|line| line.what.len()).max().unwrap_or(0).max(8)
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
        let width = self.width();
        for line in &self.lines {
            writeln!(f, "  {:width$}  {:>10}", line.what, ByteCount(line.bytes).to_string())?;
        }
        write!(f, "  {:width$}  {:>10}", "total", ByteCount(self.total()).to_string())
    }
}
