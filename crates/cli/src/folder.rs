//! A folder for work that is of no use afterwards.

use std::path::{Path, PathBuf};

/// A folder of this process that is gone when it is done. It is made by whoever first needs it.
pub struct OwnFolder(PathBuf);

impl OwnFolder {
    /// One inside `parent`.
    pub fn inside(parent: &Path) -> OwnFolder {
        OwnFolder(parent.join(format!("esker-work-{}", std::process::id())))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for OwnFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
