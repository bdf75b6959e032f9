//! How OUTRE's memory is divided between cached rows and a history (the paper's Figure 5 and Tables 10 to 12): the chosen
//! share beside every tenth of the memory, and the predicted seconds beside those that were measured.

use super::outre_history::{Size, graph, run};
use super::{Bench, number};
use anyhow::{Context, Result, ensure};
use esker_types::median;
use serde_json::{Value, json};

/// Rounds of all shares in turn.
#[derive(Debug, Clone, Copy)]
pub struct SplitProof {
    /// The graph and its training.
    pub size: Size,
    /// Shares of the memory that the chosen history takes are compared with these many tenths.
    pub tenths: &'static [u64],
    /// Rounds.
    pub rounds: usize,
    /// The most seconds of the chosen share, as a multiple of the best.
    pub most: f64,
}

/// Rows of a history that takes so many tenths of the memory that the chosen split divided.
fn rows_of(split: &Value, tenths: u64, hidden: f64, row_bytes: f64, nodes: u64) -> Result<u64> {
    let history_row_bytes = hidden * 4.0 + 12.0;
    let divided =
        number(split, "history_rows")? * history_row_bytes + number(split, "cached_rows")? * row_bytes;
    Ok(((divided * tenths as f64 / 10.0 / history_row_bytes) as u64).min(nodes))
}

/// Prepares, trains with what was chosen, and with a history of every so many tenths of the memory.
pub fn shares(bench: &Bench, proof: SplitProof) -> Result<Value> {
    let size = proof.size;
    graph(bench, size)?;
    let training = ["--fanout", "10,10,10", "--batch", size.batch, "--hidden", size.hidden];
    let flags = ["--strategy", "outre", "--memory", size.memory, "--staleness", size.staleness];
    let more = ["--epochs", size.epochs, "--eval", "none", "--device", "cpu"];
    let prepare = [&["prepare", "graph"], &training[..], &flags, &more].concat();
    let prepared = bench.json(&prepare)?;
    let split = &prepared["history_split"];
    ensure!(!split.is_null(), "nothing was chosen: {prepared:#}");
    let again = bench.json(&prepare)?;
    ensure!(again["history_split"]["is_reused"] == true, "chosen again: {again:#}");
    let hidden: f64 = size.hidden.parse()?;
    let mut rows: Vec<u64> = Vec::new();
    for tenths in proof.tenths {
        rows.push(rows_of(split, *tenths, hidden, size.dim as f64 * 4.0, size.nodes)?);
    }
    rows.dedup();
    let (mut chosen, mut others) = (Vec::new(), vec![Vec::new(); rows.len()]);
    let mut last = Value::Null;
    for _ in 0..proof.rounds {
        let found = run(bench, size, "chosen", &flags)?;
        ensure!(found["split"]["is_reused"] == true, "training did not use what was prepared: {found:#}");
        chosen.push(number(&found, "seconds")?);
        last = found;
        for (rows, seconds) in rows.iter().zip(&mut others) {
            let rows = rows.to_string();
            let found = run(bench, size, "given", &[&flags[..], &["--history-rows", &rows]].concat())?;
            seconds.push(number(&found, "seconds")?);
        }
    }
    let of_chosen = median(&chosen);
    let of_others: Vec<f64> = others.iter().map(|seconds| median(seconds)).collect();
    let best = of_others.iter().copied().fold(of_chosen, f64::min);
    let predicted = number(split, "predicted_seconds")?;
    println!("chosen {of_chosen:.2} s, best {best:.2} s, predicted {predicted:.2} s");
    ensure!(
        of_chosen <= proof.most * best,
        "the chosen share takes {:.3} times the best: {of_chosen:.2} s against {of_others:?} with {rows:?} rows",
        of_chosen / best
    );
    Ok(json!({
        "split": split, "prepare_seconds": prepared["seconds"], "chosen_seconds": chosen, "median_seconds": of_chosen,
        "predicted_over_measured": predicted / of_chosen, "chosen_over_best": of_chosen / best,
        "shares": rows.iter().zip(&others).map(|(rows, seconds)| json!({ "history_rows": rows, "seconds": seconds })).collect::<Vec<_>>(),
        "run": last,
    }))
}

pub(super) fn full(bench: &Bench) -> Result<Value> {
    let size = Size {
        nodes: 200_000,
        dim: 1024,
        homophily: "0.7",
        batch: "250",
        hidden: "256",
        memory: "800MiB",
        epochs: "2",
        staleness: "20",
        device: "cpu",
    };
    let tenths = &[0, 2, 4, 6, 8, 10];
    let proof = SplitProof { size, tenths, rounds: 3, most: 1.03 };
    let found = shares(bench, proof)?;
    found["split"].as_object().context("a split")?;
    Ok(found)
}
