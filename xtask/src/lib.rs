//! Tasks, experiments and proofs of this repository. A proof is a function of a size, so that tests run it small and
//! `cargo xtask prove` runs it in full.
#![forbid(unsafe_code)]

pub mod bench;
pub mod cgroup;
pub mod dependencies;
pub mod prove;
pub mod python;
pub mod tidy;

use std::path::{Path, PathBuf};

/// The root of the repository.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map(Path::to_path_buf).unwrap_or_default()
}

/// The real datasets, next to the checkout, if they exist.
pub fn real_data() -> Option<PathBuf> {
    let path = root().parent()?.join("shared/data");
    path.is_dir().then_some(path)
}
