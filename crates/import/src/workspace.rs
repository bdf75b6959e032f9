use crate::{ImportError, Result};
use esker_store::Journal;
use esker_types::{Budget, Progress};
use serde::{Serialize, de::DeserializeOwned};
use std::path::{Path, PathBuf};

/// The working environment of an import: a directory for temporary files, a memory budget, and a journal of finished
/// steps, so that an interrupted import can be resumed.
pub struct ImportWorkspace<'a> {
    /// Temporary files; removed when the dataset is complete.
    pub directory: PathBuf,
    /// The remaining budget. Sources that keep data in memory subtract it first (see [`ImportWorkspace::hold`]).
    pub budget: Budget,
    /// Finished steps.
    pub journal: &'a Journal,
    /// Receives progress reports.
    pub progress: &'a dyn Progress,
}

impl ImportWorkspace<'_> {
    /// Does a step once: a later run of the same import gets the recorded result instead. Files that the step writes
    /// to the work directory must be synced when it returns.
    pub fn step<T: Serialize + DeserializeOwned>(
        &self,
        name: &str,
        work: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        if let Some(done) = self.journal.done(name) {
            return Ok(done);
        }
        let result = work()?;
        self.journal.record(name, &result)?;
        Ok(result)
    }

    /// Subtracts `bytes` from the budget for data that stays in memory for the whole import. The error explains a
    /// refusal.
    pub fn hold(&mut self, what: &str, bytes: u64) -> Result<()> {
        // Sorting and copying need some memory too.
        self.require(what, bytes, crate::MINIMUM_MEMORY_BYTES)?;
        self.budget.host_bytes -= bytes;
        Ok(())
    }

    /// Checks that `bytes` for a step fit into the budget and leave `room_bytes` for the rest.
    pub fn require(&self, what: &str, bytes: u64, room_bytes: u64) -> Result<()> {
        let minimum_bytes = bytes.saturating_add(room_bytes);
        if minimum_bytes > self.budget.host_bytes {
            return Err(ImportError::OverBudget {
                what: what.to_string(),
                needs_bytes: bytes,
                budget_bytes: self.budget.host_bytes,
                minimum_bytes,
            });
        }
        Ok(())
    }

    /// The same workspace with a budget smaller by `bytes`.
    pub fn without(&self, bytes: u64) -> ImportWorkspace<'_> {
        let budget = Budget { host_bytes: self.budget.host_bytes.saturating_sub(bytes) };
        ImportWorkspace {
            directory: self.directory.clone(),
            budget,
            journal: self.journal,
            progress: self.progress,
        }
    }

    /// A path in the work directory.
    pub fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.directory.join(name)
    }

    /// Memory for a sort: the budget without code, stacks, stream buffers and the writers' blocks.
    pub fn sort_bytes(&self) -> u64 {
        self.budget
            .host_bytes
            .saturating_sub(crate::MINIMUM_MEMORY_BYTES / 2)
            .max(crate::MINIMUM_MEMORY_BYTES / 2)
    }

    /// Memory for one chunk of rows in flight.
    pub fn chunk_bytes(&self) -> u64 {
        (self.budget.host_bytes / 16).clamp(1 << 20, 16 << 20)
    }
}
