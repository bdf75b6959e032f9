//! The dataset directory: create, open, verify, and a place for derived data. `docs/format.md` draws every byte.
//!
//! Knows files, not policies. What is written appears under its final name whole or not at all; what is opened is
//! checked where that is cheap; `verify` checks every byte.
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
