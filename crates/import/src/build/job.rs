use crate::{ImportWorkspace, MINIMUM_MEMORY_BYTES, Result};
use esker_store::{Dataset, Manifest, Staging};
use esker_types::{Budget, Progress};
use std::path::Path;

/// How to run a job. Nothing in it changes the result.
pub struct ImportJob<'a> {
    /// Path of the dataset.
    pub target: &'a Path,
    /// Whether a dataset of that name may be replaced.
    pub overwrite: bool,
    /// The memory budget.
    pub budget: Budget,
    /// Receives progress reports.
    pub progress: &'a dyn Progress,
}

impl ImportJob<'_> {
    /// Makes the dataset that `fingerprint` names, resuming an interrupted run. `build` writes arrays to the staging
    /// directory and describes them.
    pub(crate) fn make(
        &self,
        fingerprint: &str,
        build: impl FnOnce(&Staging, &mut ImportWorkspace) -> Result<Manifest>,
    ) -> Result<Manifest> {
        if Staging::is_in_place(self.target, fingerprint)? {
            self.progress.note("an earlier run had finished");
            return Ok(Dataset::open(self.target)?.manifest().clone());
        }
        let staging = Staging::begin(self.target, self.overwrite)?;
        if staging.is_complete(fingerprint) {
            self.progress.note("an earlier run had finished all but the last step");
            staging.put_in_place()?.iter().for_each(|left| self.progress.note(left));
            return Ok(Dataset::open(self.target)?.manifest().clone());
        }
        let (journal, resumed) = staging.journal(fingerprint)?;
        if resumed {
            self.progress.note("an earlier run was interrupted: going on where it stopped");
        }
        let mut workspace = ImportWorkspace {
            directory: staging.work_directory(),
            budget: self.budget,
            journal: &journal,
            progress: self.progress,
        };
        let fits = workspace.require("making a dataset", MINIMUM_MEMORY_BYTES, 0);
        match fits.and_then(|()| build(&staging, &mut workspace)) {
            Ok(manifest) => {
                staging.publish(&manifest, fingerprint)?.iter().for_each(|left| self.progress.note(left));
                Ok(manifest)
            }
            // Nothing worth keeping yet: remove everything.
            Err(error) if journal.is_empty() => {
                // The original error matters more than a failure to remove the directory.
                let _ = staging.discard();
                Err(error)
            }
            Err(error) => {
                let kept = staging.directory().display();
                self.progress
                    .note(&format!("what is done so far is kept in {kept}, for the same command to go on"));
                Err(error)
            }
        }
    }
}
