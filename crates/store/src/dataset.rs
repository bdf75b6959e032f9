use crate::shared_disk::SharedDisk;
use crate::{ArrayFile, Manifest, Result, StoreError, file, files};
use esker_io::{Access, Disk, Files, Layout, Options};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// An open dataset: its manifest is consistent, every file has its length and header, and offsets span the edges.
#[derive(Debug, Clone)]
pub struct Dataset {
    directory: PathBuf,
    manifest: Manifest,
    arrays: Vec<ArrayFile>,
    disk: SharedDisk,
}

impl Dataset {
    /// Opens a dataset with cheap checks. [`crate::verify`] checks the rest.
    pub fn open(directory: &Path) -> Result<Dataset> {
        Dataset::open_from(SharedDisk::this_machine(), directory)
    }

    /// Opens a dataset whose arrays are on the given disk, under the same paths. The manifest, and the directories or
    /// links of stripes, are still on this machine.
    pub fn open_on(directory: &Path, disk: Arc<dyn Disk>) -> Result<Dataset> {
        Dataset::open_from(SharedDisk::new(disk), directory)
    }

    pub(crate) fn open_from(disk: SharedDisk, directory: &Path) -> Result<Dataset> {
        let path = directory.join(file::MANIFEST);
        let bytes = match files::read(&path) {
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                return Err(not_a_dataset(directory));
            }
            read => read.map_err(StoreError::io(&path))?,
        };
        let manifest = Manifest::from_bytes(&bytes, &path)?;
        let arrays = manifest.open_files(&disk, directory)?;
        let dataset = Dataset { directory: directory.to_path_buf(), manifest, arrays, disk };
        dataset.check_offsets(file::IN_OFFSETS)?;
        if dataset.manifest.edges.out_neighbours {
            dataset.check_offsets(file::OUT_OFFSETS)?;
        }
        Ok(dataset)
    }

    fn check_offsets(&self, name: &str) -> Result<()> {
        let Some(offsets) = self.array(name) else { return Ok(()) };
        let (mut first, mut last) = ([0u64], [0u64]);
        offsets.read_at(0, &mut first)?;
        offsets.read_at(self.manifest.nodes.count, &mut last)?;
        if first[0] != 0 || last[0] != self.manifest.edges.count {
            let expected = format!("offsets from 0 to {}", self.manifest.edges.count);
            return Err(StoreError::inconsistent(
                offsets.path(),
                expected,
                format!("{} to {}", first[0], last[0]),
            ));
        }
        Ok(())
    }

    /// Its directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The disk of its arrays.
    pub(crate) fn disk(&self) -> &SharedDisk {
        &self.disk
    }

    /// Its manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// An array by name.
    pub fn array(&self, name: &str) -> Option<&ArrayFile> {
        self.arrays.iter().find(|array| array.entry().name == name)
    }

    /// Opens arrays together, so that they share queues: the elements of each start at [`crate::PAYLOAD_OFFSET`] of its
    /// file.
    pub fn open_files(&self, arrays: &[&ArrayFile], options: &Options) -> Result<Files> {
        let layouts: Vec<Layout> = arrays.iter().map(|array| array.layout().clone()).collect();
        Ok(self.disk.open(&layouts, Access::Read, options)?)
    }

    /// All arrays.
    pub fn arrays(&self) -> &[ArrayFile] {
        &self.arrays
    }
}

fn not_a_dataset(directory: &Path) -> StoreError {
    let hint = if !directory.exists() {
        "; there is nothing of that name"
    } else if directory.is_file() {
        "; it is a file, and `esker import` makes datasets from files"
    } else if directory.join("work").is_dir() {
        "; it is an unfinished one: run the command that was making it again, it goes on where it stopped"
    } else {
        "; `esker generate` and `esker import` make datasets"
    };
    StoreError::NotADataset { path: directory.to_path_buf(), hint }
}
