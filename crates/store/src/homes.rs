//! The directories on other disks that contain the parts of a striped dataset.
//!
//! Each is a directory of this dataset's own, `DIR/NAME.stripe-i`. The dataset has a link to it, `stripe-i`, and the
//! directory has a mark that names its dataset. A directory without a mark is not Esker's. The mark identifies the
//! dataset's directory by properties that survive a move but not a copy: a copy has the same links, and must not
//! remove its original's parts, wherever that is.

use crate::files::{self, sync_directory};
use crate::manifest::plain_name;
use crate::stripes::stripe_directory;
use crate::{Manifest, Result, StoreError, Stripes};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

/// File name of the mark.
const MARK: &str = "esker-stripe.json";
/// Suffix of a copy while it is being written.
pub(crate) const UNFINISHED: &str = ".new";

/// Ties a directory of parts to its dataset.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Mark {
    esker_stripe: u32,
    /// Path of the dataset when it was striped, for people.
    dataset: String,
    /// Identity of that directory.
    directory: Identity,
    /// Content id of the dataset: parts of another content do not match.
    id: String,
    part: u32,
    stripes: Stripes,
}

impl Mark {
    /// The mark of part 0 of a dataset.
    pub(crate) fn new(dataset: &Path, manifest: &Manifest, stripes: Stripes) -> Result<Mark> {
        let Some(place) = dataset.to_str() else {
            return Err(StoreError::NotUtf8 { path: dataset.to_path_buf() });
        };
        let directory = Identity::of(dataset).map_err(StoreError::io(dataset))?;
        let (dataset, id) = (place.to_string(), manifest.id.clone());
        Ok(Mark { esker_stripe: 1, dataset, directory, id, part: 0, stripes })
    }

    fn of(home: &Path) -> Option<Mark> {
        serde_json::from_slice(&files::read(&home.join(MARK)).ok()?).ok()
    }
}

/// Identifies a directory by properties that stay the same when it is moved within its file system and differ in every
/// copy. The device number would not survive a restart. The creation time distinguishes directories that had the same
/// inode number one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Identity {
    inode: u64,
    /// Since 1970; 0 if the file system does not store it.
    made_nanoseconds: u64,
}

impl Identity {
    fn of(directory: &Path) -> io::Result<Identity> {
        let found = fs::metadata(directory)?;
        let made = found.created().ok().and_then(|made| made.duration_since(UNIX_EPOCH).ok());
        let made_nanoseconds = made.map_or(0, |made| made.as_nanos() as u64);
        Ok(Identity { inode: found.ino(), made_nanoseconds })
    }
}

/// The directories for the parts of `dataset` below `over`. None of them is created yet.
pub(crate) fn homes(dataset: &Path, over: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let name = dataset.file_name().unwrap_or_default().to_os_string();
    let mut homes: Vec<PathBuf> = Vec::new();
    for (part, directory) in over.iter().enumerate() {
        let Some(place) = fs::canonicalize(directory).ok().filter(|place| place.is_dir()) else {
            return Err(StoreError::NoHome { path: directory.clone() });
        };
        if place.starts_with(dataset) {
            return Err(StoreError::HomeInside { path: directory.clone() });
        }
        if homes.iter().any(|home| home.parent() == Some(&place)) {
            return Err(StoreError::HomeTwice { path: directory.clone() });
        }
        let mut home = name.clone();
        home.push(format!(".stripe-{part}"));
        homes.push(place.join(home));
    }
    Ok(homes)
}

/// Makes `home` the directory of part `part`: linked, marked, and without parts of any other data. The link is created
/// before the mark, so a marked directory without a link from here belongs to another dataset, whatever its name.
pub(crate) fn claim(dataset: &Path, part: u32, home: &Path, mark: &Mark) -> Result<()> {
    let mark = Mark { part, ..mark.clone() };
    let link = stripe_directory(dataset, part);
    let linked = match fs::read_link(&link) {
        Ok(target) if target == home => true,
        Err(_) if link.symlink_metadata().is_err() => false,
        _ => return Err(StoreError::Foreign { path: link }),
    };
    let found = Mark::of(home);
    match &found {
        Some(found) if !(linked && owned(dataset, part).is_some()) => {
            let dataset = found.dataset.clone().into();
            return Err(StoreError::HomeTaken { path: home.to_path_buf(), dataset });
        }
        None if !is_bare(home)? => return Err(StoreError::Foreign { path: home.to_path_buf() }),
        _ => {}
    }
    // From here on, a cleanup finds the directory.
    if !linked {
        symlink(home, &link).map_err(StoreError::io(&link))?;
        sync_directory(dataset)?;
    }
    fs::create_dir_all(home).map_err(StoreError::io(home))?;
    if found.as_ref() != Some(&mark) {
        // Parts of an earlier content of the dataset, or of other stripes, are useless.
        if found.is_some_and(|found| (found.id, found.stripes) != (mark.id.clone(), mark.stripes)) {
            remove_arrays(home, |_| false)?;
        }
        let text = serde_json::to_vec_pretty(&mark).expect("marks are plain data");
        files::replace(&home.join(MARK), &text)?;
    }
    sync_directory(home.parent().unwrap_or(Path::new("/")))
}

/// Removes the links and directories of a dataset's parts if they are its own. Returns messages about what remains.
pub(crate) fn release(dataset: &Path) -> Result<Vec<String>> {
    let mut left = Vec::new();
    for part in linked_parts(dataset)? {
        let link = stripe_directory(dataset, part);
        let is_link = link.is_symlink();
        match owned(dataset, part) {
            Some(home) => {
                remove_arrays(&home, |_| false)?;
                files::remove(&home.join(MARK))?;
                match fs::remove_dir(&home) {
                    Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {
                        left.push(format!("{} is left: other files are in it", home.display()));
                    }
                    removed => removed.map_err(StoreError::io(&home))?,
                }
            }
            None => {
                let target = fs::read_link(&link).unwrap_or_else(|_| link.clone());
                left.push(format!(
                    "{} is left: it is not there, or not known to be this dataset's own; remove it if no dataset links to it",
                    target.display()
                ));
            }
        }
        if is_link {
            files::remove(&link)?;
        }
    }
    Ok(left)
}

/// Removes files in the part directories that are not parts: copies of arrays that are not striped.
pub(crate) fn remove_strays(dataset: &Path, manifest: &Manifest) -> Result<()> {
    let striped = |name: &str| manifest.entry(name).is_some_and(|entry| entry.stripes.is_some());
    for part in linked_parts(dataset)? {
        if let Some(home) = owned(dataset, part) {
            remove_arrays(&home, striped)?;
        }
    }
    Ok(())
}

/// The parts for which the dataset has a directory or a link.
pub(crate) fn linked_parts(dataset: &Path) -> Result<Vec<u32>> {
    let mut parts = Vec::new();
    for entry in fs::read_dir(dataset).map_err(StoreError::io(dataset))? {
        let name = entry.map_err(StoreError::io(dataset))?.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix("stripe-")?.parse::<u32>().ok());
        parts.extend(number.filter(|number| stripe_directory(dataset, *number).file_name() == Some(&name)));
    }
    parts.sort();
    Ok(parts)
}

/// The real path of part `part`, if the dataset certainly owns it: a directory inside the dataset, an empty one that
/// was made for it, or one whose mark identifies this dataset.
fn owned(dataset: &Path, part: u32) -> Option<PathBuf> {
    let link = stripe_directory(dataset, part);
    let home = fs::canonicalize(&link).ok().filter(|home| home.is_dir())?;
    // A kill may happen before the mark is written or after it is removed. Any other empty directory may be the mount
    // point of a disk that is not mounted now.
    let named = home.as_os_str().as_encoded_bytes().ends_with(format!(".stripe-{part}").as_bytes());
    if !link.is_symlink() || named && is_bare(&home).unwrap_or(false) {
        return Some(home);
    }
    let mark = Mark::of(&home)?;
    let same = Identity::of(dataset).is_ok_and(|here| here == mark.directory);
    // Without creation times, two file systems may give equal identities: then the dataset at the marked path owns it.
    let marked = Path::new(&mark.dataset);
    let elsewhere = fs::canonicalize(marked).ok() != fs::canonicalize(dataset).ok();
    let used = fs::canonicalize(stripe_directory(marked, mark.part)).is_ok_and(|used| used == home);
    (same && !(elsewhere && used)).then_some(home)
}

/// Whether a directory does not exist, or contains nothing but an unfinished mark.
fn is_bare(home: &Path) -> Result<bool> {
    let entries = match fs::read_dir(home) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
        entries => entries.map_err(StoreError::io(home))?,
    };
    let unfinished = Path::new(MARK).with_extension("new");
    Ok(entries.into_iter().all(|entry| entry.is_ok_and(|entry| Path::new(&entry.file_name()) == unfinished)))
}

/// Removes array files, finished or not, except finished ones for which `keep` returns `true`.
fn remove_arrays(home: &Path, keep: impl Fn(&str) -> bool) -> Result<()> {
    for entry in fs::read_dir(home).map_err(StoreError::io(home))? {
        let path = entry.map_err(StoreError::io(home))?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
        let finished = name.strip_suffix(UNFINISHED).unwrap_or(name);
        let array = finished.strip_suffix(".bin").filter(|array| plain_name(array));
        if array.is_some_and(|array| finished != name || !keep(array)) {
            files::remove(&path)?;
        }
    }
    files::remove(&home.join(MARK).with_extension("new"))
}
