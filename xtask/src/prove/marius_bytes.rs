//! What a partition buffer reads and writes: no more than the swaps of its order take.

use super::{Bench, link, number, train};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::fs;

/// Bytes may be more than swaps take, by this factor: partitions on disk are as long as the largest.
const MOST: f64 = 1.01;

/// An order with its sizes.
struct BytesCase {
    flags: &'static str,
    links: bool,
}

const CASES: [BytesCase; 5] = [
    BytesCase { flags: "--order tour --partitions 18 --resident 4 --logical 9", links: true },
    BytesCase { flags: "--order two-level-beta --partitions 16 --resident 4 --logical 8", links: true },
    BytesCase { flags: "--order beta --partitions 8 --resident 2", links: true },
    BytesCase { flags: "--order dispersed --partitions 16 --resident 4 --logical 8", links: false },
    BytesCase { flags: "--order dispersed --partitions 16 --resident 8 --logical 4", links: false },
];

/// Widths of rows, and epochs of a run.
#[derive(Debug, Clone, Copy)]
pub struct BytesSize {
    /// Nodes of both graphs.
    pub nodes: u64,
    /// Numbers per row.
    pub dim: u64,
    /// Epochs.
    pub epochs: u64,
}

/// Bytes of rows that all epochs read and write, beside what swaps take. Expects `graph` with rows of `dim` numbers, and
/// `facts`.
pub fn beside_swaps(bench: &Bench, size: BytesSize) -> Result<Value> {
    let BytesSize { nodes, dim, epochs } = size;
    let mut rows = Vec::new();
    for case in &CASES {
        // Embeddings have a state of Adagrad; features are read only.
        let (dataset, what, matrices) = match case.links {
            true => {
                ("facts", format!("--task link --encoder none --embeddings {dim} --optimizer adagrad"), 2)
            }
            false => ("graph", "--fanout 5 --layers 1 --hidden 16".to_string(), 1),
        };
        let words = format!(
            "train {dataset} {what} {} --strategy marius --epochs {epochs} --batch 1000 --eval none --final-eval none --device cpu --out bytes",
            case.flags
        );
        let found = bench.json(&words.split_whitespace().collect::<Vec<_>>())?;
        fs::remove_dir_all(bench.path("bytes"))?;
        let steps = &found["partition_steps"];
        // Swaps of single partitions, and those that an epoch begins with.
        let (partitions, resident) = (number(steps, "partitions")?, number(steps, "resident")?);
        let table = (nodes * dim * 4 * matrices) as f64;
        let most = epochs as f64 * (number(steps, "swaps")? + resident) / partitions * table;
        let sum = |name: &str| -> Result<f64> {
            let all = found["epochs"].as_array().context("epochs")?;
            Ok(all.iter().map(|epoch| epoch[name].as_f64().unwrap_or(0.0)).sum())
        };
        let (read, written, edges) = (sum("bytes_read")?, sum("bytes_written")?, sum("edge_bytes_read")?);
        println!(
            "{:60} read {:.3}, written {:.3} of what swaps take",
            case.flags,
            read / most,
            written / most
        );
        ensure!(read > 0.0 && edges > 0.0, "{}: nothing was read: {found:#}", case.flags);
        ensure!(read <= MOST * most, "{}: {read} bytes read, swaps take {most}", case.flags);
        // The residents are written once more in the end.
        let most_written = if case.links { most + resident / partitions * table } else { 0.0 };
        ensure!(
            written <= MOST * most_written && (written > 0.0) == case.links,
            "{}: {written} bytes written, swaps take {most_written}",
            case.flags
        );
        rows.push(json!({
            "flags": case.flags, "dataset": dataset, "steps": steps, "bytes_of_swaps": most, "bytes_read": read,
            "bytes_written": written, "edge_bytes_read": edges, "read_over_swaps": read / most,
        }));
    }
    Ok(Value::Array(rows))
}

pub(super) fn full(bench: &Bench) -> Result<Value> {
    let size = BytesSize { nodes: 200_000, dim: 64, epochs: 4 };
    train::graph(bench, size.nodes, size.dim)?;
    link::facts(bench, size.nodes, 1_000_000)?;
    beside_swaps(bench, size)
}
