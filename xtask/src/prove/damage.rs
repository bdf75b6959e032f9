//! Flipped bytes and truncated files in a dataset of real size are found, and the report names them.

use super::Bench;
use anyhow::{Context, Result, ensure};
use esker_types::random::{Key, below};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Flips `flips` random bytes in each file, one at a time, and truncates each file at as many positions.
pub fn find_and_name(bench: &Bench, nodes: u64, flips: u64, seed: u64) -> Result<Value> {
    let nodes_word = nodes.to_string();
    bench.json(&[
        "generate",
        "hurt",
        "--nodes",
        &nodes_word,
        "--dim",
        "37",
        "--out-neighbours",
        "--undirected",
        "--memory",
        "128MiB",
    ])?;
    let key = Key::new(seed);
    let mut files: Vec<PathBuf> =
        fs::read_dir(bench.path("hurt"))?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    files.sort();
    let (mut flipped, mut cut) = (0, 0);
    for (number, path) in files.iter().enumerate() {
        let bytes = fs::metadata(path)?.len();
        let key = key.with(number as u64);
        for at in (0..flips).map(|i| below(key.at(i), bytes)) {
            flip(path, at)?;
            let said = verify(bench)?.context("a flipped byte was not found")?;
            ensure!(said.contains(name(path)), "byte {at} of {}: blamed {said}", path.display());
            if path.extension().is_none_or(|e| e != "json") {
                ensure!(names_offset(&said, at), "byte {at} of {} is not in {said}", path.display());
            }
            flip(path, at)?;
            flipped += 1;
        }
        let whole = fs::read(path)?;
        for length in (0..flips).map(|i| below(key.at(flips + i), bytes)) {
            File::options().write(true).open(path)?.set_len(length)?;
            let output = bench.esker(&["info", "hurt"]).output()?;
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            ensure!(
                !output.status.success() && said.contains(name(path)),
                "{} cut to {length}: {said}",
                path.display()
            );
            fs::write(path, &whole)?;
            cut += 1;
        }
    }
    ensure!(verify(bench)?.is_none(), "the restored dataset is not whole");
    Ok(
        json!({ "nodes": nodes, "files": files.len(), "flipped_bytes_found": flipped, "cut_files_found": cut }),
    )
}

fn name(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or("")
}

fn flip(path: &Path, at: u64) -> Result<()> {
    let file = File::options().read(true).write(true).open(path)?;
    let mut byte = [0];
    file.read_exact_at(&mut byte, at)?;
    file.write_all_at(&[byte[0] ^ 0x10], at)?;
    Ok(())
}

/// The damage that `verify` reports; `None` if there is none. The exit code must match.
fn verify(bench: &Bench) -> Result<Option<String>> {
    let output = bench.esker(&["verify", "hurt", "--json"]).output()?;
    let found: Value = serde_json::from_slice(&output.stdout).context("verify printed no JSON object")?;
    let ok = found["ok"] == true;
    ensure!(output.status.code() == Some(if ok { 0 } else { 3 }), "exit code {:?}", output.status.code());
    Ok((!ok).then(|| found.to_string()))
}

/// Whether a damaged range contains the byte. A damaged header is refused as a whole when the dataset is opened.
fn names_offset(said: &str, at: u64) -> bool {
    let found: Value = serde_json::from_str(said).unwrap_or_default();
    let ranges = found["damage"].as_array().cloned().unwrap_or_default();
    let holds = |range: &Value| {
        let start = range["offset"].as_u64().unwrap_or(u64::MAX);
        start <= at && at < start.saturating_add(range["bytes"].as_u64().unwrap_or(0))
    };
    ranges.iter().any(holds) || (ranges.is_empty() && at < 4096)
}

pub(super) fn full(bench: &Bench) -> Result<Value> {
    find_and_name(bench, 200_000, 100, 1)
}
