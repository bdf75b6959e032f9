//! What a source keeps in a checkpoint beside the model: named by what it is, not by who wrote it, so that another strategy
//! or device reads it or refuses it by name; streamed, because it may be larger than memory.

use crate::Result;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

/// Takes up the state of a source.
pub trait CheckpointSink {
    /// Bytes under a name, streamed by `write`. They are there for the next process once the checkpoint is whole.
    fn bytes(
        &mut self,
        name: &str,
        write: &mut dyn FnMut(&mut dyn Write) -> std::io::Result<()>,
    ) -> Result<()>;

    /// A file that the source keeps itself, in a version that it will find again.
    fn file(&mut self, name: &str, path: &Path, version: u64) -> Result<()>;
}

/// State under a name.
pub enum SavedState<'a> {
    /// Bytes, checked as they are read: reading ends with an error where they are not what was written.
    Bytes(Box<dyn Read + 'a>),
    /// A file, and its version.
    File(PathBuf, u64),
}

/// Hands out the state of a source. What nobody asks for is refused by name.
pub trait CheckpointReader {
    /// What a checkpoint has under a name.
    fn take(&mut self, name: &str) -> Result<Option<SavedState<'_>>>;
}
