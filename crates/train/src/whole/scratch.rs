//! The directory of hidden rows. A journal has what is finished, so that a run that was killed continues. Another
//! process that predicts with the same run has a directory of its own.

use super::table::{FileState, FileWriter, StoredTable, Traffic};
use crate::{Result, TrainError};
use esker_store::Journal;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// Hidden rows on disk, once there are any.
pub(super) struct Scratch {
    parent: PathBuf,
    fingerprint: Option<String>,
    opened: OnceLock<OpenScratch>,
}

struct OpenScratch {
    directory: PathBuf,
    journal: Arc<Journal>,
    /// The locked parent, while the directory is in use. `None` for a directory that nobody else opens.
    lock: Option<File>,
}

/// The name of a layer's output, and of its projected rows.
pub(super) fn output_name(layer: usize) -> String {
    format!("layer-{}", layer + 1)
}

pub(super) fn projected_name(layer: usize) -> String {
    format!("projected-{}", layer + 1)
}

impl Scratch {
    /// Hidden rows in a run's directory. Those of another model are removed. Without a fingerprint nothing is resumed.
    pub fn new(parent: &Path, fingerprint: Option<String>) -> Result<Scratch> {
        let scratch = Scratch { parent: parent.to_path_buf(), fingerprint, opened: OnceLock::new() };
        if scratch.shared().exists() {
            scratch.opened()?;
        }
        Ok(scratch)
    }

    fn shared(&self) -> PathBuf {
        self.parent.join("inference")
    }

    fn opened(&self) -> Result<&OpenScratch> {
        if let Some(opened) = self.opened.get() {
            return Ok(opened);
        }
        fs::create_dir_all(&self.parent).map_err(TrainError::io(&self.parent))?;
        let lock = File::open(&self.parent).map_err(TrainError::io(&self.parent))?;
        let opened = match (&self.fingerprint, lock.try_lock()) {
            (Some(fingerprint), Ok(())) => {
                let directory = self.shared();
                let (journal, _) = Journal::open(&directory, fingerprint)?;
                OpenScratch { directory, journal: Arc::new(journal), lock: Some(lock) }
            }
            _ => {
                let directory = self.parent.join(format!("inference-{}.partial", std::process::id()));
                let (journal, _) = Journal::open(&directory, "once")?;
                OpenScratch { directory, journal: Arc::new(journal), lock: None }
            }
        };
        Ok(self.opened.get_or_init(|| opened))
    }

    /// The output of the last finished layer below `layers`, and the layer that reads it.
    pub fn last_output(&self, layers: usize) -> Result<Option<(usize, StoredTable)>> {
        for layer in (1..layers).rev() {
            if let Some(found) = self.finished(&output_name(layer - 1))? {
                return Ok(Some((layer, found)));
            }
        }
        Ok(None)
    }

    /// A finished file, if there is one.
    pub fn finished(&self, name: &str) -> Result<Option<StoredTable>> {
        let Some(opened) = self.opened.get() else { return Ok(None) };
        match opened.journal.done::<FileState>(name).and_then(|state| state.entry) {
            Some(entry) => Ok(Some(StoredTable::file(&opened.directory, &entry)?)),
            None => Ok(None),
        }
    }

    /// Starts a file, or resumes it. Returns how many rows it has.
    pub fn writer(&self, name: &str, columns: usize, traffic: &Arc<Traffic>) -> Result<(FileWriter, u64)> {
        let opened = self.opened()?;
        FileWriter::open(&opened.directory, &opened.journal, name, columns, traffic)
    }

    /// Bytes of files that are not finished.
    pub fn bytes(&self) -> u64 {
        let Some(opened) = self.opened.get() else { return 0 };
        let files = fs::read_dir(&opened.directory).into_iter().flatten().flatten();
        let unfinished = files.filter(|file| {
            let name = file.path().file_stem().map(|stem| stem.to_string_lossy().into_owned());
            let state = name.and_then(|name| opened.journal.done::<FileState>(&name));
            state.is_some_and(|state| state.entry.is_none())
        });
        unfinished.filter_map(|file| file.metadata().ok()).map(|found| found.len()).sum()
    }

    /// Removes files that no layer after this one reads.
    pub fn remove_before(&self, layer: usize) -> Result<()> {
        let Some(opened) = self.opened.get() else { return Ok(()) };
        let input = layer.checked_sub(1).map(output_name);
        for name in input.into_iter().chain([projected_name(layer)]) {
            let path = opened.directory.join(format!("{name}.bin"));
            // The output of this layer is finished, so its input is not needed for a resumed run either.
            opened.journal.forget(&name)?;
            match fs::remove_file(&path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(TrainError::io(&path)(error));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Removes everything, after the last layer.
    pub fn end(mut self) -> Result<()> {
        if let Some(opened) = self.opened.take() {
            fs::remove_dir_all(&opened.directory).map_err(TrainError::io(&opened.directory))?;
        }
        Ok(())
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A directory without a name that a later run finds is of no use.
        if let Some(opened) = self.opened.get().filter(|opened| opened.lock.is_none()) {
            let _ = fs::remove_dir_all(&opened.directory);
        }
    }
}
