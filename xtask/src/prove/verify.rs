//! `esker verify` against the disk: the same bytes, read raw, in the same run.

use super::{Bench, succeed};
use anyhow::Result;
use esker_io::{AlignedBuffer, DIRECT_ALIGN, DirectFile};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

const BLOCK_BYTES: usize = 2 << 20;

/// Reads a file with several threads and throws it away; bytes per second.
fn raw_rate(path: &Path, threads: usize) -> Result<f64> {
    let bytes = std::fs::metadata(path)?.len();
    let (next, started) = (AtomicU64::new(0), Instant::now());
    let read = || -> std::io::Result<()> {
        let mut file = DirectFile::open(path)?;
        let mut buffer = AlignedBuffer::new(BLOCK_BYTES, DIRECT_ALIGN);
        loop {
            let at = next.fetch_add(BLOCK_BYTES as u64, Ordering::Relaxed);
            if at >= bytes {
                return Ok(());
            }
            file.read(&mut buffer, at, path)?;
        }
    };
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..threads).map(|_| scope.spawn(read)).collect();
        readers.into_iter().try_for_each(|reader| reader.join().expect("readers do not panic"))
    })?;
    Ok(bytes as f64 / started.elapsed().as_secs_f64())
}

pub(super) fn full(bench: &Bench) -> Result<Value> {
    bench.json(&["generate", "large", "--nodes", "4000000", "--dim", "256", "--memory", "512MiB"])?;
    let features = bench.path("large/node-features.bin");
    let (mut raw, mut verified) = (Vec::new(), Vec::new());
    for _ in 0..5 {
        let best =
            [2, 4, 8].iter().map(|threads| raw_rate(&features, *threads)).collect::<Result<Vec<_>>>()?;
        raw.push(best.into_iter().fold(0.0, f64::max));
        let output = succeed(bench.esker(&["verify", "large", "--json"]).current_dir(&bench.directory))?;
        let found: Value = serde_json::from_slice(&output.stdout)?;
        verified.push(
            found["bytes"].as_f64().unwrap_or(0.0) / found["seconds"].as_f64().unwrap_or(f64::INFINITY),
        );
    }
    let median = |rates: &mut Vec<f64>| {
        rates.sort_by(f64::total_cmp);
        rates[rates.len() / 2]
    };
    let (raw, verified) = (median(&mut raw), median(&mut verified));
    Ok(json!({
        "raw_bytes_per_second": raw, "verify_bytes_per_second": verified, "verify_over_raw": verified / raw,
    }))
}
