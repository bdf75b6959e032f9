//! One file per foreign format. Each says which files it reads, and opens them as an [`ImportSource`].

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
mod papers100m;
mod parquet;
mod planetoid;
mod triples;

use crate::{ImportError, ImportWorkspace, Request, Result, source::ImportSource};
use std::path::PathBuf;

/// A foreign format.
pub trait Format: Sync {
    /// What `--format` calls it.
    fn name(&self) -> &'static str;
    /// One line for `--help`.
    fn about(&self) -> &'static str;
    /// The reading flags it understands; giving another is an error, not a silence.
    fn flags(&self) -> Vec<&'static str>;
    /// The files a request reads, all checked to exist. Their lengths and times of change decide whether an
    /// interrupted import can go on.
    fn inputs(&self, request: &Request) -> Result<Vec<PathBuf>>;
    /// Describes what is in them. Steps that take long are recorded in the workspace.
    fn open(&self, request: &Request, workspace: &mut ImportWorkspace) -> Result<ImportSource>;
}

/// Flags of formats that are a directory or file of their own, with or without a split inside.
const FROM: &[&str] = &["from", "train", "valid", "test", "split", "split-index"];

/// Flags that name files beside an edge list, read by `given`.
const GIVEN: &[&str] =
    &["features", "features-csr", "labels", "train", "valid", "test", "split", "nodes", "delimiter"];

/// Every format, in the order `--help` lists them.
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
        let names: Vec<_> = all().iter().map(|format| format.name()).collect();
        ImportError::Request(format!("`{name}` is not a format; use one of {}", names.join(", ")))
    })
}

/// Refuses a flag that the request's format would not look at.
pub fn check_flags(request: &Request) -> Result<()> {
    if request.split.is_some()
        && (request.train.is_some() || request.valid.is_some() || request.test.is_some())
    {
        return Err(ImportError::Request("give --split, or --train, --valid and --test, not both".into()));
    }
    if let Some(from) = request.from.as_ref().filter(|from| !from.exists()) {
        return Err(ImportError::Missing { path: from.clone(), need: "--from names it".into() });
    }
    let format = by_name(&request.format)?;
    let flags = format.flags();
    match request.given_flags().into_iter().find(|flag| !flags.contains(flag)) {
        Some(flag) => {
            let known: Vec<String> = flags.iter().map(|flag| format!("--{flag}")).collect();
            let text =
                format!("--format {} does not read --{flag}; it reads {}", format.name(), known.join(", "));
            Err(ImportError::Request(text))
        }
        None => Ok(()),
    }
}

/// Names are numbered as they appear; rows of other files would meet the wrong nodes.
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
        Some((_, flag)) => Err(ImportError::Request(format!(
            "ids are names, and {flag} counts nodes by row: say which name has which row with --node-ids FILE, one name a line"
        ))),
        None => Ok(()),
    }
}
