//! The dataset directory: create, open, verify, and a place for derived data. `docs/format.md` draws every byte.
//!
//! Knows files, not policies. What is written appears under its final name whole or not at all; what is opened is
//! checked where that is cheap; `verify` checks every byte.
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
//! - An array is reached through `FileEntry::layout` alone, so that one file or several makes no difference to a
//!   reader.
//! - An array file gets its header last. Every byte of a dataset is under a checksum; the manifest is under its
//!   own.
#![forbid(unsafe_code)]

mod array;
mod blocks;
mod dataset;
mod derived;
mod error;
mod files;
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
pub use error::{Result, StoreError};
pub use files::create_sequential;
pub use journal::Journal;
pub use manifest::{
    EdgeColumn, EdgeInfo, FORMAT_VERSION, FeatureInfo, LabelInfo, LabelKind, MOST_NODES, Manifest, NodeInfo,
    Provenance, RelationInfo, SplitInfo, SplitOver, file,
};
pub use names::{Names, NamesWriter};
pub use staging::Staging;
pub use stripes::{Stripes, stripe_directory};
pub use striping::{MovedArrays, StripeRequest, stripe, unstripe};
pub use verify::{Damage, Verified, verify, verify_on};
