//! Derived data: data that can be computed again from a dataset, stored under `derived/NAME` in it. Its manifest has a
//! hash of everything it was made from, so that it is used only while that has not changed.

use crate::shared_disk::SharedDisk;
use crate::{ArrayFile, Dataset, FileEntry, Result, Staging, StoreError, files, sealed};
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
    /// The kind of data: `packed extents`, `partitions`.
    pub kind: String,
    /// Hash of the dataset's id and of `parameters`.
    pub inputs: String,
    /// The parameters it was made with.
    pub parameters: serde_json::Value,
    /// Its arrays.
    pub files: Vec<FileEntry>,
}

/// Open derived data that matches its dataset as it is now.
#[derive(Debug)]
pub struct Derived {
    /// Its directory.
    pub directory: PathBuf,
    /// Its manifest.
    pub manifest: DerivedManifest,
    /// Its arrays.
    pub arrays: Vec<ArrayFile>,
}

impl Dataset {
    /// The hash that ties derived data to this dataset and to its parameters.
    pub fn inputs_of(&self, kind: &str, parameters: &serde_json::Value) -> String {
        let mut hash = Xxh3::new();
        for part in [self.manifest().id.as_str(), kind, &parameters.to_string()] {
            hash.update(part.as_bytes());
            hash.update(&[0]);
        }
        format!("{:032x}", hash.digest128())
    }

    /// The derived data `name`, if it exists, is complete, and was made from exactly this; `None` means that it must
    /// be made.
    pub fn derived(&self, name: &str, kind: &str, parameters: &serde_json::Value) -> Option<Derived> {
        let found = open(self.disk(), &self.derived_directory().join(name)).ok()?;
        (found.manifest.inputs == self.inputs_of(kind, parameters)).then_some(found)
    }

    /// Everything under `derived/`, by name. Data that cannot be opened has the reason. Derived data inside other
    /// derived data is named `OUTER/INNER`.
    pub fn all_derived(&self) -> Result<Vec<(String, Result<Derived>)>> {
        let mut all = Vec::new();
        for (name, path) in directories(&self.derived_directory())? {
            for (inner, path) in
                directories(&path)?.into_iter().filter(|(_, path)| path.join(MANIFEST).exists())
            {
                all.push((format!("{name}/{inner}"), open(self.disk(), &path)));
            }
            all.push((name, open(self.disk(), &path)));
        }
        all.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(all)
    }

    /// Opens derived data in a directory outside the dataset.
    pub fn open_derived(&self, directory: &Path) -> Result<Derived> {
        open(self.disk(), directory)
    }

    /// Starts making derived data in a directory outside the dataset, replacing derived data there.
    pub fn derive_at(&self, directory: &Path) -> Result<Staging> {
        if let Some(parent) = directory.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            fs::create_dir_all(parent).map_err(StoreError::io(parent))?;
        }
        Staging::begin_with(directory, true, MANIFEST)
    }

    /// Path of the derived data of this name inside the dataset.
    pub fn derived_path(&self, name: &str) -> PathBuf {
        self.derived_directory().join(name)
    }

    /// Whether derived data matches this dataset as it is now.
    pub fn is_current(&self, derived: &Derived) -> bool {
        derived.manifest.inputs == self.inputs_of(&derived.manifest.kind, &derived.manifest.parameters)
    }

    /// Starts making `name`, replacing derived data of that name.
    pub fn derive(&self, name: &str) -> Result<Staging> {
        self.derive_at(&self.derived_path(name))
    }

    fn derived_directory(&self) -> PathBuf {
        self.directory().join("derived")
    }
}

/// The finished directories in a directory, by name. None if there is no such directory.
fn directories(directory: &Path) -> Result<Vec<(String, PathBuf)>> {
    let Ok(entries) = fs::read_dir(directory) else { return Ok(Vec::new()) };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.map_err(StoreError::io(directory))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() && !name.ends_with(".partial") {
            found.push((name, path));
        }
    }
    Ok(found)
}

impl Staging {
    /// Writes the manifest of derived data and renames the directory to its final name.
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
        self.complete(&sealed::seal(&manifest), &manifest.inputs, &listed, |directory| {
            open(&SharedDisk::this_machine(), directory).map(drop)
        })?;
        self.put_in_place().map(drop)
    }
}

fn open(disk: &SharedDisk, directory: &Path) -> Result<Derived> {
    let path = directory.join(MANIFEST);
    let bytes = files::read(&path).map_err(StoreError::io(&path))?;
    let manifest: DerivedManifest = sealed::unseal(&bytes, &path)?;
    if manifest.esker_derived > VERSION {
        return Err(StoreError::Version { path, found: manifest.esker_derived as u64, supported: VERSION });
    }
    crate::manifest::check_names(&manifest.files, &path)?;
    let arrays = manifest
        .files
        .iter()
        .map(|entry| ArrayFile::open_on(disk, directory, entry))
        .collect::<Result<_>>()?;
    Ok(Derived { directory: directory.to_path_buf(), manifest, arrays })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ArrayWriter, EdgeInfo, FORMAT_VERSION, Manifest, NodeInfo, Provenance, file};
    use esker_types::Dtype;
    use serde_json::json;

    /// A dataset of `nodes` nodes without edges.
    fn dataset(directory: &Path, nodes: u64) -> Dataset {
        let target = directory.join(format!("of-{nodes}"));
        let staging = Staging::begin(&target, false).unwrap();
        let mut offsets = ArrayWriter::create(staging.directory(), file::IN_OFFSETS, Dtype::U64, 1).unwrap();
        offsets.write_elements(&vec![0u64; nodes as usize + 1]).unwrap();
        let neighbours =
            ArrayWriter::create(staging.directory(), file::IN_NEIGHBOURS, Dtype::U32, 1).unwrap();
        let manifest = Manifest {
            esker: FORMAT_VERSION,
            checksum: String::new(),
            id: String::new(),
            made_by: "test".into(),
            source: Provenance::default(),
            nodes: NodeInfo { count: nodes, types: vec![], features: None, labels: None, named: false },
            edges: EdgeInfo {
                count: 0,
                types: vec![],
                undirected: false,
                max_in_degree: 0,
                without_in_neighbours: nodes,
                out_neighbours: false,
                relations: None,
                columns: vec![],
            },
            splits: None,
            files: vec![offsets.finish().unwrap(), neighbours.finish().unwrap()],
        };
        staging.publish(&manifest.complete(), "test").unwrap();
        Dataset::open(&target).unwrap()
    }

    fn make(dataset: &Dataset, parameters: &serde_json::Value) {
        let staging = dataset.derive("extents").unwrap();
        let mut writer = ArrayWriter::create(staging.directory(), "rows", Dtype::U8, 1).unwrap();
        writer.write(b"abc").unwrap();
        let files = vec![writer.finish().unwrap()];
        staging.publish_derived(dataset, "packed", parameters.clone(), files).unwrap();
    }

    #[test]
    fn derived_data_is_used_while_its_inputs_match_and_made_again_when_not() {
        let directory = tempfile::tempdir().unwrap();
        let dataset = dataset(directory.path(), 5);
        let (eight, nine) = (json!({"batch": 8}), json!({"batch": 9}));
        assert!(dataset.derived("extents", "packed", &eight).is_none());
        make(&dataset, &eight);
        assert!(dataset.derived("extents", "packed", &eight).is_some());
        assert!(dataset.derived("extents", "packed", &nine).is_none());
        assert!(dataset.derived("extents", "partitions", &eight).is_none());
        make(&dataset, &nine);
        assert!(dataset.derived("extents", "packed", &nine).is_some());
    }

    #[test]
    fn a_kill_behind_the_swap_is_recognised_as_finished() {
        let directory = tempfile::tempdir().unwrap();
        let made = dataset(directory.path(), 5);
        let old = directory.path().join("of-5.partial");
        fs::create_dir(&old).unwrap();
        fs::write(old.join("lock"), "replaced").unwrap();
        assert!(!Staging::is_in_place(made.directory(), "test").unwrap());
        fs::write(made.directory().join("lock"), "test").unwrap();
        assert!(!Staging::is_in_place(made.directory(), "another job").unwrap());
        assert!(Staging::is_in_place(made.directory(), "test").unwrap());
        assert!(!old.exists() && !made.directory().join("lock").exists());
    }

    #[test]
    fn derived_data_of_another_dataset_or_damaged_is_not_used() {
        let directory = tempfile::tempdir().unwrap();
        let (five, six) = (dataset(directory.path(), 5), dataset(directory.path(), 6));
        let parameters = json!({});
        make(&five, &parameters);
        fs::create_dir(six.derived_directory()).unwrap();
        fs::rename(five.derived_directory().join("extents"), six.derived_directory().join("extents"))
            .unwrap();
        assert!(six.derived("extents", "packed", &parameters).is_none());
        assert_eq!(six.all_derived().unwrap().len(), 1);
        make(&five, &parameters);
        let manifest = five.derived_directory().join("extents").join(MANIFEST);
        let text = fs::read_to_string(&manifest).unwrap().replace("packed", "pocked");
        fs::write(&manifest, text).unwrap();
        assert!(five.derived("extents", "packed", &parameters).is_none());
        let damage = crate::verify(five.directory(), 1, &esker_types::Silent).unwrap().damage;
        assert!(damage.len() == 1 && damage[0].path == manifest, "{damage:?}");
        make(&five, &parameters);
        assert!(five.derived("extents", "packed", &parameters).is_some());
    }
}
