use crate::{ImportError, Result};
use esker_store::Journal;
use esker_types::{Budget, Progress};
use serde::{Serialize, de::DeserializeOwned};
use std::path::{Path, PathBuf};

/// Where an import does its work: a directory for temporary files, a memory budget, and a journal of finished
/// steps, so that an interrupted import goes on where it was.
pub struct ImportWorkspace<'a> {
    /// Temporary files; removed when the dataset is complete.
    pub directory: PathBuf,
    /// What may be used. Sources that hold things in memory subtract them first (see [`ImportWorkspace::hold`]).
    pub budget: Budget,
    /// Finished steps.
    pub journal: &'a Journal,
    /// Where to report.
    pub progress: &'a dyn Progress,
}

impl ImportWorkspace<'_> {
    /// Does a step once: a later run of the same import gets the recorded result instead. What the step left in
    /// the work directory must be synced when it returns.
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

    /// Takes `bytes` out of the budget for something that stays in memory for the whole import, or says why not.
    pub fn hold(&mut self, what: &str, bytes: u64) -> Result<()> {
        // Sorting and copying want some room too.
        self.require(what, bytes, crate::MINIMUM_MEMORY_BYTES)?;
        self.budget.host_bytes -= bytes;
        Ok(())
    }

    /// Checks that `bytes` for a step fit the budget and leave `room_bytes` for the rest.
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

    /// The same place with `bytes` less to use.
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

    /// What a sort may use: the budget without code, stacks, stream buffers and the writers' blocks.
    pub fn sort_bytes(&self) -> u64 {
        self.budget
            .host_bytes
            .saturating_sub(crate::MINIMUM_MEMORY_BYTES / 2)
            .max(crate::MINIMUM_MEMORY_BYTES / 2)
    }

    /// What one chunk of rows in flight may use.
    pub fn chunk_bytes(&self) -> u64 {
        (self.budget.host_bytes / 16).clamp(1 << 20, 16 << 20)
    }
}
