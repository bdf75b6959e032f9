//! JSON files that carry their own checksum, so that a changed or missing byte anywhere in them is noticed.
//!
//! The checksum is the xxh3-64 of the file with the sixteen digits of its own value replaced by zeros.

use crate::{Result, StoreError};
use serde::{Serialize, de::DeserializeOwned};
use std::path::Path;
use xxhash_rust::xxh3::xxh3_64;

const KEY: &str = "\"checksum\": \"";
/// What the `checksum` field holds before it is filled in. It must be the first text in the file that looks so.
pub(crate) const OPEN: &str = "0000000000000000";

/// The sealed text of a value whose `checksum` field holds [`OPEN`].
pub(crate) fn seal<T: Serialize>(value: &T) -> String {
    let mut text = serde_json::to_string_pretty(value).expect("manifests are plain data");
    text.push('\n');
    let at = text.find(KEY).expect("manifests have a checksum") + KEY.len();
    let sum = format!("{:016x}", xxh3_64(text.as_bytes()));
    text.replace_range(at..at + OPEN.len(), &sum);
    text
}

/// The value of a sealed file; the path is for messages.
pub(crate) fn unseal<T: DeserializeOwned>(bytes: &[u8], path: &Path) -> Result<T> {
    let damaged = |problem: String| StoreError::Manifest { path: path.to_path_buf(), problem };
    let text = std::str::from_utf8(bytes).map_err(|error| damaged(format!("no text: {error}")))?;
    let at = text.find(KEY).map(|at| at + KEY.len());
    let Some(digits) = at.and_then(|at| text.get(at..at + OPEN.len())) else {
        return Err(damaged("it ends before its checksum".into()));
    };
    let at = at.unwrap_or_default();
    let mut open = bytes.to_vec();
    open[at..at + OPEN.len()].copy_from_slice(OPEN.as_bytes());
    let found = format!("{:016x}", xxh3_64(&open));
    if found != digits {
        return Err(damaged(format!("its checksum says {digits}, its bytes give {found}")));
    }
    serde_json::from_str(text).map_err(|error| damaged(error.to_string()))
}
