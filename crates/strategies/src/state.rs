//! The state of a source in a checkpoint, in addition to the model. Its names describe the content, not the writer, so
//! that another strategy or device reads it or refuses it by name. It is streamed, because it may be larger than
//! memory.

use crate::Result;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

/// Stores the state of a source.
pub trait CheckpointSink {
    /// Bytes under a name, streamed by `write`. The next process can read them once the checkpoint is complete.
    fn bytes(
        &mut self,
        name: &str,
        write: &mut dyn FnMut(&mut dyn Write) -> std::io::Result<()>,
    ) -> Result<()>;

    /// A file that the source manages itself, in a version that it will find again.
    fn file(&mut self, name: &str, path: &Path, version: u64) -> Result<()>;
}

/// State under a name.
pub enum SavedState<'a> {
    /// Bytes, verified while they are read: reading fails if they do not match what was written.
    Bytes(Box<dyn Read + 'a>),
    /// A file, and its version.
    File(PathBuf, u64),
}

/// Provides the state of a source. State that is not taken is refused by name.
pub trait CheckpointReader {
    /// The state under a name.
    fn take(&mut self, name: &str) -> Result<Option<SavedState<'_>>>;
}
