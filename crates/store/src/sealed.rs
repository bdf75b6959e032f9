//! JSON files with their own checksum, so that any changed or missing byte is detected.
//!
//! The checksum is the xxh3-64 of the file, computed with the sixteen digits of its own value replaced by zeros.

use crate::{ManifestProblem, Result, StoreError};
use serde::{Serialize, de::DeserializeOwned};
use std::path::Path;
use xxhash_rust::xxh3::xxh3_64;

const KEY: &str = "\"checksum\": \"";
/// The `checksum` field before it is filled in. It must be the first such text in the file.
pub(crate) const OPEN: &str = "0000000000000000";

/// The sealed text of a value whose `checksum` field is [`OPEN`].
pub(crate) fn seal<T: Serialize>(value: &T) -> String {
    let mut text = serde_json::to_string_pretty(value).expect("manifests are plain data");
    text.push('\n');
    let at = text.find(KEY).expect("manifests have a checksum") + KEY.len();
    let sum = format!("{:016x}", xxh3_64(text.as_bytes()));
    text.replace_range(at..at + OPEN.len(), &sum);
    text
}

/// Parses a sealed file and verifies its checksum; the path is for messages.
pub(crate) fn unseal<T: DeserializeOwned>(bytes: &[u8], path: &Path) -> Result<T> {
    let damaged = |problem| StoreError::manifest(path, problem);
    let text = std::str::from_utf8(bytes).map_err(|error| damaged(ManifestProblem::NoText(error)))?;
    let at = text.find(KEY).map(|at| at + KEY.len());
    let Some(digits) = at.and_then(|at| text.get(at..at + OPEN.len())) else {
        return Err(damaged(ManifestProblem::CutOff));
    };
    let at = at.unwrap_or_default();
    let mut open = bytes.to_vec();
    open[at..at + OPEN.len()].copy_from_slice(OPEN.as_bytes());
    let found = xxh3_64(&open);
    if format!("{found:016x}") != digits {
        return Err(damaged(ManifestProblem::Checksum { stated: digits.to_string(), found }));
    }
    serde_json::from_str(text).map_err(|error| damaged(ManifestProblem::Json(error)))
}
