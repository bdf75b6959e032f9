//! Small files, and the temporary names under which larger ones are written.
//!
//! A dataset may come from an untrusted source. A link at a path that Esker writes to would redirect the bytes into
//! one of the user's files, and a pipe instead of a file would make a reader wait forever. So Esker never writes to an
//! existing file, and reads regular files only.

use crate::{Result, StoreError};
use esker_io::SequentialWriter;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

/// Reads a whole file.
pub(crate) fn read(path: &Path) -> io::Result<Vec<u8>> {
    match not_a_file(&fs::metadata(path)?) {
        Some(found) => Err(io::Error::other(format!("expected a file, found {found}; remove it"))),
        None => fs::read(path),
    }
}

/// What kind of thing it is, if it is not a regular file.
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

/// Refuses a path that is about to be written if it exists and is not a regular file. A link to a file is refused too.
pub(crate) fn refuse_links(path: &Path) -> Result<()> {
    match path.symlink_metadata() {
        Ok(found) if !found.is_file() => Err(StoreError::Foreign { path: path.to_path_buf() }),
        _ => Ok(()),
    }
}

/// Starts writing a file from front to back, replacing any file of this name.
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

/// Removes a file if it exists.
pub(crate) fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed.map_err(StoreError::io(path)),
    }
}
