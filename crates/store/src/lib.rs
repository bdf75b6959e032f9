//! The dataset directory: create, open, verify, and store derived data. `docs/format.md` describes every byte.
//!
//! This crate knows files, not policies. A dataset appears under its final name complete or not at all. Opening does
//! the cheap checks; `verify` checks every byte.
//!
//! ```
//! use esker_store::{Dataset, file};
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("g");
//! # let shape = esker_import::generate::GraphShape { dim: 8, ..esker_import::generate::GraphShape::plain(100) };
//! # let budget = esker_types::Budget { host_bytes: 64 << 20 };
//! # let job = esker_import::ImportJob { target: &path, budget, overwrite: false, progress: &esker_types::Silent };
//! # esker_import::generate::generate(&shape, &job)?;
//!
//! let dataset = Dataset::open(&path)?;
//! assert_eq!(dataset.manifest().nodes.count, 100);
//!
//! // Rows 40 and 41 of features with 8 numbers each.
//! let features = dataset.array(file::NODE_FEATURES).expect("a generated graph has features");
//! let mut rows = [0f32; 2 * 8];
//! features.read_at(40 * 8, &mut rows)?;
//! assert!(rows.iter().all(|value| value.is_finite()));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What always holds
//!
//! - An array is accessed only through `FileEntry::layout`, so that readers need not know whether it is one file or
//!   several.
//! - The header of an array file is written last. Every byte of a dataset is covered by a checksum; the manifest has
//!   its own.
#![forbid(unsafe_code)]

mod array;
mod blocks;
mod dataset;
mod derived;
mod error;
mod files;
mod grouped;
mod homes;
mod journal;
mod manifest;
mod names;
mod scan;
mod sealed;
mod shared_disk;
mod staging;
mod stripes;
mod striping;
mod verify;

pub use array::{ArrayFile, ArrayWriter, Elements, FileEntry, PAYLOAD_OFFSET};
pub use blocks::BlockArray;
pub use dataset::Dataset;
pub use derived::{Derived, DerivedManifest};
pub use error::{ManifestProblem, Result, StoreError};
pub use files::create_sequential;
pub use grouped::{GroupReader, GroupWriter, GroupedRecords};
pub use journal::Journal;
pub use manifest::{
    EdgeColumn, EdgeInfo, FORMAT_VERSION, FeatureInfo, LabelInfo, LabelKind, MOST_NODES, Manifest,
    NegativeFile, NodeInfo, Provenance, RelationInfo, SplitInfo, SplitOver, file,
};
pub use names::{Names, NamesWriter};
pub use staging::Staging;
pub use stripes::{Stripes, StripesError, stripe_directory};
pub use striping::{MovedArrays, StripeRequest, stripe, unstripe};
pub use verify::{Damage, Verified, verify, verify_on};
