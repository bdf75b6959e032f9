//! The directories on other disks that hold the parts of a striped dataset.
//!
//! Each is a directory of this dataset's own, `DIR/NAME.stripe-i`, linked to as `stripe-i` and marked with the dataset
//! it belongs to. What has no mark is a stranger's. The mark names the dataset's directory by what a move keeps and a
//! copy does not have: a copy took the links along, and must not take its original's parts away, wherever that is.

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

/// The mark.
const MARK: &str = "esker-stripe.json";
/// What a copy is called while it is being written.
pub(crate) const UNFINISHED: &str = ".new";

/// What ties a directory of parts to its dataset.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Mark {
    esker_stripe: u32,
    /// Where the dataset was when it was striped: for people.
    dataset: String,
    /// Which directory that was.
    directory: Identity,
    /// Its content: parts of another content are not these.
    id: String,
    part: u32,
    stripes: Stripes,
}

impl Mark {
    /// The mark of part 0 of a dataset.
    pub(crate) fn new(dataset: &Path, manifest: &Manifest, stripes: Stripes) -> Result<Mark> {
        let Some(place) = dataset.to_str() else {
            let problem = "a dataset whose path is not UTF-8 cannot be striped; rename it";
            return Err(StoreError::Stripe { path: dataset.to_path_buf(), problem: problem.into() });
        };
        let directory = Identity::of(dataset).map_err(StoreError::io(dataset))?;
        let (dataset, id) = (place.to_string(), manifest.id.clone());
        Ok(Mark { esker_stripe: 1, dataset, directory, id, part: 0, stripes })
    }

    fn of(home: &Path) -> Option<Mark> {
        serde_json::from_slice(&files::read(&home.join(MARK)).ok()?).ok()
    }
}

/// A directory, by what stays when it is moved within its file system and differs in every copy. The device's number
/// would not survive a restart; the moment it was made tells apart who had the same number one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Identity {
    inode: u64,
    /// Since 1970; 0 where the file system does not know.
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

/// The directories for the parts of `dataset` below `over`, none of them made yet.
pub(crate) fn homes(dataset: &Path, over: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let refuse = |path: &Path, problem: &str| {
        Err(StoreError::Stripe { path: path.to_path_buf(), problem: problem.to_string() })
    };
    let name = dataset.file_name().unwrap_or_default().to_os_string();
    let mut homes: Vec<PathBuf> = Vec::new();
    for (part, directory) in over.iter().enumerate() {
        let Some(place) = fs::canonicalize(directory).ok().filter(|place| place.is_dir()) else {
            return refuse(directory, "there is no such directory; make it, or mount its disk");
        };
        if place.starts_with(dataset) {
            return refuse(directory, "lies inside the dataset; choose a directory on another disk");
        }
        if homes.iter().any(|home| home.parent() == Some(&place)) {
            return refuse(directory, "is given twice; each part wants a disk of its own");
        }
        let mut home = name.clone();
        home.push(format!(".stripe-{part}"));
        homes.push(place.join(home));
    }
    Ok(homes)
}

/// Makes `home` the directory of part `part`: linked to, marked, and without parts of anything else. The link comes
/// before the mark, so a marked directory without a link from here is another dataset's, whatever its name.
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
            let problem = format!(
                "holds parts of another dataset, which was {} when it was striped; choose another directory, run \
                 `esker stripe --undo` on that dataset wherever it is now, or remove this directory if it is gone",
                found.dataset
            );
            return Err(StoreError::Stripe { path: home.to_path_buf(), problem });
        }
        None if !is_bare(home)? => return Err(StoreError::Foreign { path: home.to_path_buf() }),
        _ => {}
    }
    // From here on whoever tidies up finds the directory.
    if !linked {
        symlink(home, &link).map_err(StoreError::io(&link))?;
        sync_directory(dataset)?;
    }
    fs::create_dir_all(home).map_err(StoreError::io(home))?;
    if found.as_ref() != Some(&mark) {
        // Parts of what the dataset was before, or of other stripes, are of no use.
        if found.is_some_and(|found| (found.id, found.stripes) != (mark.id.clone(), mark.stripes)) {
            remove_arrays(home, |_| false)?;
        }
        let text = serde_json::to_vec_pretty(&mark).expect("marks are plain data");
        files::replace(&home.join(MARK), &text)?;
    }
    sync_directory(home.parent().unwrap_or(Path::new("/")))
}

/// Removes the links and directories of a dataset's parts, as far as they are its own. What was left, in words.
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

/// Removes what lies among the parts of a dataset and is none: copies of arrays that are not striped.
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

/// Where part `part` really is, if what is there is certainly the dataset's to remove: a directory inside it, an empty
/// one that was made for it, or one whose mark means this directory.
fn owned(dataset: &Path, part: u32) -> Option<PathBuf> {
    let link = stripe_directory(dataset, part);
    let home = fs::canonicalize(&link).ok().filter(|home| home.is_dir())?;
    // A kill may come before the mark is written or behind its removal. Any other empty directory may be the place
    // where a disk is to be mounted.
    let named = home.as_os_str().as_encoded_bytes().ends_with(format!(".stripe-{part}").as_bytes());
    if !link.is_symlink() || named && is_bare(&home).unwrap_or(false) {
        return Some(home);
    }
    let mark = Mark::of(&home)?;
    let same = Identity::of(dataset).is_ok_and(|here| here == mark.directory);
    // Numbers may be equal on two file systems that do not know when: whoever is where the mark says has the say.
    let marked = Path::new(&mark.dataset);
    let elsewhere = fs::canonicalize(marked).ok() != fs::canonicalize(dataset).ok();
    let used = fs::canonicalize(stripe_directory(marked, mark.part)).is_ok_and(|used| used == home);
    (same && !(elsewhere && used)).then_some(home)
}

/// Whether a directory is not there, or has nothing in it but a mark that was being written.
fn is_bare(home: &Path) -> Result<bool> {
    let entries = match fs::read_dir(home) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
        entries => entries.map_err(StoreError::io(home))?,
    };
    let unfinished = Path::new(MARK).with_extension("new");
    Ok(entries.into_iter().all(|entry| entry.is_ok_and(|entry| Path::new(&entry.file_name()) == unfinished)))
}

/// Removes array files, finished and not, except those of arrays that `keep` names.
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
