//! The skew of accesses to the presets' nodes, compared with DiskGNN's report for the real graphs (its Table 3).

use super::Bench;
use anyhow::{Result, ensure};
use serde_json::{Value, json};

/// A preset, its scale and batch size, and DiskGNN's shares in percent: top 1%, 1-5%, 5-10%, rest.
#[derive(Clone, Copy)]
pub struct ExpectedSkew {
    /// The preset.
    pub preset: &'static str,
    /// Its scale; the batch size is 1024 times the scale.
    pub scale: &'static str,
    /// Seed nodes per batch.
    pub batch: &'static str,
    /// Percent of all accesses.
    pub shares: [f64; 4],
}

/// Table 3.
pub const TABLE: [ExpectedSkew; 4] = [
    ExpectedSkew { preset: "papers100m", scale: "0.01", batch: "10", shares: [43.2, 36.5, 11.2, 9.1] },
    ExpectedSkew { preset: "mag240m", scale: "0.005", batch: "5", shares: [56.4, 32.3, 7.3, 4.0] },
    ExpectedSkew { preset: "friendster", scale: "0.01", batch: "10", shares: [14.1, 25.5, 18.2, 42.1] },
    ExpectedSkew { preset: "igb", scale: "0.0025", batch: "3", shares: [22.5, 30.0, 20.8, 26.7] },
];

/// Generates the preset and measures it under 3-hop sampling with fan-out 10,15,20. No share may differ by more than
/// `most_points`.
pub fn check(bench: &Bench, expected: &ExpectedSkew, batches: &str, most_points: f64) -> Result<Value> {
    let ExpectedSkew { preset, scale, batch, shares } = expected;
    bench
        .json(&["generate", preset, "--preset", preset, "--scale", scale, "--dim", "1", "--dtype", "f32"])?;
    let words = [
        "bench",
        "sample",
        preset,
        "--fanout",
        "10,15,20",
        "--batch",
        batch,
        "--batches",
        batches,
        "--threads",
        "2",
        "--skew",
    ];
    let skew = bench.json(&words)?["skew"].clone();
    std::fs::remove_dir_all(bench.path(preset))?;
    let found = ["top_1_percent", "1_to_5_percent", "5_to_10_percent", "rest"]
        .map(|key| skew[key].as_f64().unwrap_or(0.0) * 100.0);
    let off = found.iter().zip(shares).map(|(found, expected)| (found - expected).abs()).fold(0.0, f64::max);
    let found = found.map(|share| (share * 10.0).round() / 10.0);
    ensure!(off <= most_points, "{preset}: {found:?} is {off:.1} points off {shares:?}");
    Ok(json!({
        "preset": preset, "scale": scale, "batch": batch, "batches": batches, "percent": found,
        "diskgnn_percent": shares, "most_points_off": (off * 10.0).round() / 10.0,
    }))
}

pub(super) fn full(bench: &Bench) -> Result<Value> {
    TABLE.iter().map(|expected| check(bench, expected, "700", 5.0)).collect()
}
