//! One file per input format. Each determines which files it reads, and opens them as an [`ImportSource`].

mod classes;
mod csc;
mod csv;
mod csv_guess;
mod gnn_npz;
pub mod graphbolt;
mod igb;
mod mag240m;
mod masked_npz;
mod musae;
mod npy;
mod ogb;
mod ogb_link;
mod papers100m;
mod parquet;
mod planetoid;
mod triples;

use crate::{ImportError, ImportWorkspace, Request, Result, source::ImportSource};
use std::path::PathBuf;

/// An input format.
pub trait Format: Sync {
    /// Its name in `--format`.
    fn name(&self) -> &'static str;
    /// One line for `--help`.
    fn about(&self) -> &'static str;
    /// The input flags it understands. Any other is an error; none is silently ignored.
    fn flags(&self) -> Vec<&'static str>;
    /// The files that a request reads, all checked to exist. Their lengths and modification times decide whether an
    /// interrupted import can be resumed.
    fn inputs(&self, request: &Request) -> Result<Vec<PathBuf>>;
    /// Describes their content. Long steps are recorded in the workspace.
    fn open(&self, request: &Request, workspace: &mut ImportWorkspace) -> Result<ImportSource>;
}

/// Flags of formats that have a directory or file layout of their own, with or without a split in it.
const FROM: &[&str] = &["from", "train", "valid", "test", "split", "split-index"];

/// Flags for files that accompany an edge list, read by `given`.
const GIVEN: &[&str] =
    &["features", "features-csr", "labels", "train", "valid", "test", "split", "nodes", "delimiter"];

/// All formats, in the order of `--help`.
pub fn all() -> Vec<&'static dyn Format> {
    vec![
        &npy::Npy,
        &csc::Csc,
        &csv::Csv,
        &parquet::Parquet,
        &triples::Triples,
        &ogb::Ogb,
        &igb::Igb,
        &graphbolt::GraphBolt,
        &planetoid::Planetoid,
        &gnn_npz::GnnNpz,
        &masked_npz::MaskedNpz,
        &musae::Musae,
        &mag240m::Mag240m,
        &papers100m::Papers100m,
    ]
}

/// The format of that name.
pub fn by_name(name: &str) -> Result<&'static dyn Format> {
    all().into_iter().find(|format| format.name() == name).ok_or_else(|| {
        let known = all().iter().map(|format| format.name()).collect();
        ImportError::NoSuchFormat { name: name.to_string(), known }
    })
}

/// Refuses a flag that the request's format does not read.
pub fn check_flags(request: &Request) -> Result<()> {
    if request.split.is_some()
        && (request.train.is_some() || request.valid.is_some() || request.test.is_some())
    {
        return Err(ImportError::NotBoth { flags: "--split, or --train, --valid and --test" });
    }
    if request.split.is_some() && request.hold_out.is_some() {
        return Err(ImportError::NotBoth { flags: "--split (of nodes), or --hold-out (of edges)" });
    }
    if let Some(from) = request.from.as_ref().filter(|from| !from.exists()) {
        return Err(ImportError::Missing { path: from.clone(), need: "--from names it" });
    }
    let format = by_name(&request.format)?;
    let flags = format.flags();
    match request.given_flags().into_iter().find(|flag| !flags.contains(flag)) {
        Some(flag) => Err(ImportError::NotRead { format: format.name(), flag, reads: flags }),
        None => Ok(()),
    }
}

/// Nodes are numbered by the first appearance of their names, so rows of other files would match the wrong nodes.
fn need_row_order(request: &Request) -> Result<()> {
    let by_row = [
        (request.features.is_some(), "--features"),
        (request.features_csr.is_some(), "--features-csr"),
        (request.labels.is_some(), "--labels"),
        (
            request.train.is_some() || request.valid.is_some() || request.test.is_some(),
            "--train, --valid and --test",
        ),
        (matches!(request.split, Some(crate::SplitChoice::File(_))), "--split FILE"),
    ];
    match by_row.into_iter().find(|(given, _)| *given && request.node_ids.is_none()) {
        Some((_, flag)) => Err(ImportError::NoNodeIds { flag }),
        None => Ok(()),
    }
}
