//! `esker verify` compared with the disk: raw reads of the same bytes in the same run.

use super::{Bench, succeed};
use anyhow::Result;
use esker_io::limit::{BareLoop, bare_loop};
use esker_types::median;
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;

/// The best rate of bare loops over a file, in bytes per second.
fn raw_rate(path: &Path) -> Result<f64> {
    let mut best: f64 = 0.0;
    for (depth, threads) in [(8, 1), (16, 1), (8, 2)] {
        let how = BareLoop { block_bytes: 1 << 20, depth, threads, sequential: true, memory_bytes: 0 };
        best = best.max(bare_loop(path, how, Duration::from_millis(500))?.bytes_per_second());
    }
    Ok(best)
}

pub(super) fn full(bench: &Bench) -> Result<Value> {
    bench.json(&["generate", "large", "--nodes", "4000000", "--dim", "256", "--memory", "512MiB"])?;
    let features = bench.path("large/node-features.bin");
    let (mut raw, mut verified) = (Vec::new(), Vec::new());
    for _ in 0..5 {
        raw.push(raw_rate(&features)?);
        let output = succeed(bench.esker(&["verify", "large", "--json"]).current_dir(&bench.directory))?;
        let found: Value = serde_json::from_slice(&output.stdout)?;
        verified.push(
            found["bytes"].as_f64().unwrap_or(0.0) / found["seconds"].as_f64().unwrap_or(f64::INFINITY),
        );
    }
    let (raw, verified) = (median(&raw), median(&verified));
    Ok(json!({
        "raw_bytes_per_second": raw, "verify_bytes_per_second": verified, "verify_over_raw": verified / raw,
    }))
}
