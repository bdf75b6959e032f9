//! A record of finished steps, so that a long job that was killed can resume.
//!
//! It is one JSON file, replaced atomically at every step. It belongs to one job, identified by a fingerprint of
//! everything that determines the result. A journal of another job is deleted together with the files beside it.

use crate::{Result, StoreError, files};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::Mutex,
};

/// Finished steps of a job.
pub struct Journal {
    path: PathBuf,
    state: Mutex<JournalState>,
}

#[derive(Serialize, Deserialize)]
struct JournalState {
    fingerprint: String,
    steps: BTreeMap<String, serde_json::Value>,
}

impl Journal {
    /// Opens the journal in `directory`. If there is no journal of this job, empties the directory and starts one. The
    /// second value is whether there were finished steps.
    pub fn open(directory: &Path, fingerprint: &str) -> Result<(Journal, bool)> {
        let path = directory.join("journal.json");
        let found = files::read(&path)
            .ok()
            // A link could lead to a directory that is not ours.
            .filter(|_| !directory.is_symlink())
            .and_then(|bytes| serde_json::from_slice::<JournalState>(&bytes).ok())
            .filter(|state| state.fingerprint == fingerprint);
        if let Some(state) = found {
            let resumed = !state.steps.is_empty();
            return Ok((Journal { path, state: Mutex::new(state) }, resumed));
        }
        if directory.symlink_metadata().is_ok() {
            fs::remove_dir_all(directory).map_err(StoreError::io(directory))?;
        }
        fs::create_dir_all(directory).map_err(StoreError::io(directory))?;
        let state = JournalState { fingerprint: fingerprint.to_string(), steps: BTreeMap::new() };
        let journal = Journal { path, state: Mutex::new(state) };
        journal.write()?;
        Ok((journal, false))
    }

    /// The recorded result of a step, if it is finished.
    pub fn done<T: DeserializeOwned>(&self, step: &str) -> Option<T> {
        let state = self.lock();
        serde_json::from_value(state.steps.get(step)?.clone()).ok()
    }

    /// Records a step as finished, durably. Its files must be synced already.
    pub fn record<T: Serialize>(&self, step: &str, result: &T) -> Result<()> {
        let value = serde_json::to_value(result).expect("step results are plain data");
        self.lock().steps.insert(step.to_string(), value);
        self.write()
    }

    /// Whether no step is finished.
    pub fn is_empty(&self) -> bool {
        self.lock().steps.is_empty()
    }

    /// Forgets a step.
    pub fn forget(&self, step: &str) -> Result<()> {
        if self.lock().steps.remove(step).is_some() {
            self.write()?;
        }
        Ok(())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, JournalState> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn write(&self) -> Result<()> {
        let bytes = serde_json::to_vec_pretty(&*self.lock()).expect("the journal is plain data");
        files::replace(&self.path, &bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_survive_and_another_job_starts_anew() {
        let directory = tempfile::tempdir().unwrap();
        let work = directory.path().join("work");
        let (journal, resumed) = Journal::open(&work, "job 1").unwrap();
        assert!(!resumed);
        journal.record("sorted", &17u64).unwrap();
        fs::write(work.join("run-0"), "x").unwrap();
        let (journal, resumed) = Journal::open(&work, "job 1").unwrap();
        assert!(resumed);
        assert_eq!(journal.done("sorted"), Some(17u64));
        assert_eq!(journal.done::<u64>("merged"), None);
        let (journal, resumed) = Journal::open(&work, "job 2").unwrap();
        assert!(!resumed && !work.join("run-0").exists());
        assert_eq!(journal.done::<u64>("sorted"), None);
    }

    #[test]
    fn a_torn_journal_starts_anew() {
        let directory = tempfile::tempdir().unwrap();
        let work = directory.path().join("work");
        Journal::open(&work, "job").unwrap().0.record("a", &1).unwrap();
        let text = fs::read_to_string(work.join("journal.json")).unwrap();
        fs::write(work.join("journal.json"), &text[..text.len() / 2]).unwrap();
        assert!(!Journal::open(&work, "job").unwrap().1);
    }
}
