//! Small files, and the names that larger ones are written under.
//!
//! A dataset may come from anywhere. A link that waits where Esker is going to write would lead the bytes into a file
//! of the user's, and a pipe in place of a file would make a reader wait for ever: so nothing is written to a file that
//! was there already, and nothing is read that is not a file.

use crate::{Result, StoreError};
use esker_io::SequentialWriter;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

/// All of a file.
pub(crate) fn read(path: &Path) -> io::Result<Vec<u8>> {
    match not_a_file(&fs::metadata(path)?) {
        Some(found) => Err(io::Error::other(format!("expected a file, found {found}; remove it"))),
        None => fs::read(path),
    }
}

/// What something is that is not a file.
pub(crate) fn not_a_file(found: &fs::Metadata) -> Option<&'static str> {
    let kind = found.file_type();
    match () {
        _ if kind.is_file() => None,
        _ if kind.is_dir() => Some("a directory"),
        _ if kind.is_symlink() => Some("a link"),
        _ if kind.is_fifo() => Some("a pipe"),
        _ => Some("a device or a socket"),
    }
}

/// Refuses what is about to be written to if it is there and not a plain file, a link to one included.
pub(crate) fn refuse_links(path: &Path) -> Result<()> {
    match path.symlink_metadata() {
        Ok(found) if !found.is_file() => Err(StoreError::Foreign { path: path.to_path_buf() }),
        _ => Ok(()),
    }
}

/// Writes a file from front to back, in place of what has its name.
pub fn create_sequential(path: &Path) -> Result<SequentialWriter> {
    remove(path)?;
    SequentialWriter::create(path).map_err(StoreError::io(path))
}

/// Writes `bytes` under a temporary name, syncs, renames, syncs the directory.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    let temporary = path.with_extension("new");
    remove(&temporary)?;
    let mut file = File::create_new(&temporary).map_err(StoreError::io(&temporary))?;
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(StoreError::io(&temporary))?;
    fs::rename(&temporary, path).map_err(StoreError::io(path))?;
    sync_directory(path.parent().unwrap_or(Path::new(".")))
}

/// Makes renames and new names in a directory durable.
pub(crate) fn sync_directory(path: &Path) -> Result<()> {
    File::open(path).and_then(|directory| directory.sync_all()).map_err(StoreError::io(path))
}

/// Removes a file, if it is there.
pub(crate) fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed.map_err(StoreError::io(path)),
    }
}
