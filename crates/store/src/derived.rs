//! Derived data: what can be computed again from a dataset, kept under `derived/NAME` inside it. Its manifest
//! carries a hash of everything it was made from, so that it is used only while that has not changed.

use crate::manifest::plain_name;
use crate::{ArrayFile, Dataset, FileEntry, Result, Staging, StoreError, sealed};
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::Xxh3;

const MANIFEST: &str = "derived.json";
const VERSION: u32 = 1;

/// The manifest of derived data.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DerivedManifest {
    /// Version of the derived-data format.
    pub esker_derived: u32,
    /// Seal over the whole file.
    pub checksum: String,
    /// What kind of thing it is: `packed extents`, `partitions`.
    pub kind: String,
    /// Hash of the dataset's id and of `parameters`.
    pub inputs: String,
    /// What it was made with.
    pub parameters: serde_json::Value,
    /// Its arrays.
    pub files: Vec<FileEntry>,
}

/// Derived data that opened and belongs to its dataset as it is now.
#[derive(Debug)]
pub struct Derived {
    /// Where it is.
    pub directory: PathBuf,
    /// What it is.
    pub manifest: DerivedManifest,
    /// Its arrays.
    pub arrays: Vec<ArrayFile>,
}

impl Dataset {
    /// The hash that ties derived data to this dataset and to what it is made with.
    pub fn inputs_of(&self, kind: &str, parameters: &serde_json::Value) -> String {
        let mut hash = Xxh3::new();
        for part in [self.manifest().id.as_str(), kind, &parameters.to_string()] {
            hash.update(part.as_bytes());
            hash.update(&[0]);
        }
        format!("{:032x}", hash.digest128())
    }

    /// The derived data `name`, if it is there and was made from exactly this; `None` means: make it.
    pub fn derived(&self, name: &str, kind: &str, parameters: &serde_json::Value) -> Result<Option<Derived>> {
        let found = open(&self.derived_directory().join(name))?;
        Ok(found.filter(|derived| derived.manifest.inputs == self.inputs_of(kind, parameters)))
    }

    /// Everything under `derived/` that opens, with whether it still belongs to this dataset.
    pub fn all_derived(&self) -> Result<Vec<(String, Derived, bool)>> {
        let directory = self.derived_directory();
        let mut all = Vec::new();
        let Ok(entries) = fs::read_dir(&directory) else { return Ok(all) };
        for entry in entries {
            let path = entry.map_err(StoreError::io(&directory))?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if !name.ends_with(".partial")
                && let Some(derived) = open(&path)?
            {
                let current = self.inputs_of(&derived.manifest.kind, &derived.manifest.parameters);
                let fresh = derived.manifest.inputs == current;
                all.push((name, derived, fresh));
            }
        }
        all.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(all)
    }

    /// Starts making `name`, in place of whatever has that name.
    pub fn derive(&self, name: &str) -> Result<Staging> {
        let directory = self.derived_directory();
        fs::create_dir_all(&directory).map_err(StoreError::io(&directory))?;
        Staging::begin(&directory.join(name), true)
    }

    fn derived_directory(&self) -> PathBuf {
        self.directory().join("derived")
    }
}

impl Staging {
    /// Writes the manifest of derived data and gives the directory its name.
    pub fn publish_derived(
        self,
        dataset: &Dataset,
        kind: &str,
        parameters: serde_json::Value,
        files: Vec<FileEntry>,
    ) -> Result<()> {
        let manifest = DerivedManifest {
            esker_derived: VERSION,
            checksum: sealed::OPEN.into(),
            kind: kind.to_string(),
            inputs: dataset.inputs_of(kind, &parameters),
            parameters,
            files,
        };
        let listed: Vec<String> = manifest.files.iter().map(|entry| format!("{}.bin", entry.name)).collect();
        self.publish_as(MANIFEST, &sealed::seal(&manifest), |name| listed.iter().any(|listed| listed == name))
    }
}

fn open(directory: &Path) -> Result<Option<Derived>> {
    let path = directory.join(MANIFEST);
    let Ok(bytes) = fs::read(&path) else { return Ok(None) };
    let manifest: DerivedManifest = sealed::unseal(&bytes, &path)?;
    if let Some(bad) = manifest.files.iter().find(|entry| !plain_name(&entry.name)) {
        let problem = format!("`{}` is no file name of derived data", bad.name);
        return Err(StoreError::Manifest { path, problem });
    }
    let arrays =
        manifest.files.iter().map(|entry| ArrayFile::open(directory, entry)).collect::<Result<_>>()?;
    Ok(Some(Derived { directory: directory.to_path_buf(), manifest, arrays }))
}
