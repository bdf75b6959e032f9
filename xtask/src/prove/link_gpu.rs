//! Link prediction on a GPU at the shape of a quarter of Freebase: edges per second with the table of embeddings on the
//! GPU, and with all of it in host memory. Both give the same loss to the bit.

use super::{Bench, ROUNDS, repeated};
use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value, json};

const FLAGS: &str = "--task link --encoder none --embeddings 100 --decoder distmult --loss softmax --reduction sum --negatives 500 --chunks 10 --mask none --optimizer adagrad --lr 0.1";

/// The size of the measurement.
pub struct Size {
    /// Of the graph, against Freebase.
    pub scale: &'static str,
    /// Edges per batch.
    pub batch: u64,
    /// Measured batches.
    pub batches: u64,
    /// The device.
    pub device: &'static str,
    /// Smallest rates: with the table on the device, and in host memory.
    pub least: [f64; 2],
}

pub(super) fn full(bench: &Bench) -> Result<Value> {
    beside_each_other(
        bench,
        &Size { scale: "0.25", batch: 50_000, batches: 150, device: "cuda", least: [15e6, 6e6] },
    )
}

/// Measures both places of the table in turn.
pub fn beside_each_other(bench: &Bench, size: &Size) -> Result<Value> {
    bench.json(&["generate", "freebase", "--preset", "freebase86m", "--scale", size.scale])?;
    let (batch, batches) = (size.batch.to_string(), size.batches.to_string());
    let mut found = Map::new();
    let least = least_device_memory(bench, size, &batch)?;
    let mut cases = vec![("on the device", None, size.least[0])];
    if let Some(least) = &least {
        cases.push(("in host memory", Some(least.as_str()), size.least[1]));
    }
    let mut short = Vec::new();
    for (name, gpu_memory, least) in cases {
        let mut words = vec!["bench", "epoch", "freebase"];
        words.extend(FLAGS.split(' '));
        words.extend(["--batch", &batch, "--batches", &batches, "--warm", "20", "--device", size.device]);
        words.extend(gpu_memory.iter().flat_map(|bytes| ["--gpu-memory", *bytes]));
        let run = repeated(ROUNDS, &["seconds_per_batch"], || bench.json(&words))?;
        let seconds = run["seconds_per_batch"].as_f64().context("seconds per batch")?;
        let rate = size.batch as f64 / seconds;
        println!("table {name}: {:.2} million edges/s", rate / 1e6);
        if rate < least {
            short.push(format!("{rate:.3e} edges/s with the table {name}, {least:.1e} were asked"));
        }
        let mut row = Map::new();
        for key in ["seconds_per_batch", "rounds", "nodes_per_batch", "stages", "bound_by", "last_loss"] {
            row.insert(key.to_string(), run[key].clone());
        }
        row.insert("edges_per_second".into(), rate.into());
        row.insert("peak_device_bytes".into(), run["peak_device_bytes"].clone());
        row.insert("budget_device_bytes".into(), run["budget_device_bytes"].clone());
        row.insert("peak_host_bytes".into(), run["peak_host_bytes"].clone());
        found.insert(name.to_string(), row.into());
    }
    let losses: Vec<&Value> = found.values().map(|row| &row["last_loss"]).collect();
    ensure!(losses.windows(2).all(|pair| pair[0] == pair[1]), "losses differ: {losses:?}");
    ensure!(short.is_empty(), "too slow:\n  {}\n{found:#?}", short.join("\n  "));
    Ok(json!({ "flags": FLAGS, "batch": size.batch, "scale": size.scale, "runs": found }))
}

/// The least device memory, as a flag's value: what the refusal of a byte tells. `None` for a device without its own.
fn least_device_memory(bench: &Bench, size: &Size, batch: &str) -> Result<Option<String>> {
    if size.device == "cpu" {
        return Ok(None);
    }
    let mut words = vec!["bench", "epoch", "freebase"];
    words.extend(FLAGS.split(' '));
    words.extend(["--batch", batch, "--batches", "1", "--device", size.device, "--gpu-memory", "1B"]);
    let output = bench.esker(&words).output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(!output.status.success(), "a byte of device memory was not refused");
    let (_, after) = said.split_once("--gpu-memory ").with_context(|| format!("no budget in {said}"))?;
    let value: String = after.chars().take_while(|letter| !",; \n".contains(*letter)).collect();
    Ok(Some(value))
}
