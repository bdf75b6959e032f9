//! How OUTRE's memory is divided between cached rows and a history (the paper's Figure 5, and Table 12's choice of nodes): the
//! chosen share beside every tenth of the memory, and the predicted seconds beside those that were measured.

use super::outre_speed::{DiskMemory, Size, graph, run};
use super::{Bench, number};
use anyhow::{Context, Result, ensure};
use esker_types::median;
use serde_json::{Value, json};

/// How shares are compared.
#[derive(Debug, Clone, Copy)]
pub struct SplitProof {
    /// The graph and its training.
    pub size: Size,
    /// Shares of the memory that the chosen history takes are compared with these many tenths.
    pub tenths: &'static [u64],
    /// Rounds of the chosen share in turn with the best others, after one round of all.
    pub rounds: usize,
    /// How many of these there are.
    pub best: usize,
    /// The most seconds of the chosen share, as a multiple of the best.
    pub most: f64,
}

/// A share that is given: rows of the nodes that are a neighbour most often.
struct GivenShare {
    name: String,
    rows: u64,
    first_seconds: f64,
    seconds: Vec<f64>,
    run: Value,
}

impl GivenShare {
    fn row(&self) -> Value {
        let GivenShare { name, rows, first_seconds, seconds, run } = self;
        json!({
            "share": name, "history_rows": rows, "first_seconds": first_seconds, "seconds": seconds,
            "redundancy": run["redundancy"], "bytes_read": run["bytes_read"], "history": run["history"],
        })
    }
}

/// Rows of a history that takes so many tenths of the memory that the chosen split divided.
fn rows_of(split: &Value, tenths: u64, hidden: f64, row_bytes: f64, nodes: u64) -> Result<u64> {
    let history_row_bytes = hidden * 4.0 + 12.0;
    let divided =
        number(split, "history_rows")? * history_row_bytes + number(split, "cached_rows")? * row_bytes;
    Ok(((divided * tenths as f64 / 10.0 / history_row_bytes) as u64).min(nodes))
}

/// The shares to compare with. A history of all nodes is taken once.
fn given_shares(proof: &SplitProof, split: &Value) -> Result<Vec<GivenShare>> {
    let size = proof.size;
    let hidden: f64 = size.hidden.parse()?;
    let mut named = Vec::new();
    for tenths in proof.tenths {
        let rows = rows_of(split, *tenths, hidden, size.dim as f64 * 4.0, size.nodes)?;
        named.push((format!("{tenths} tenths"), rows));
    }
    named.dedup_by_key(|(_, rows)| *rows);
    let chosen = number(split, "history_rows")? as u64;
    if chosen > 0 && chosen < size.nodes {
        named.push(("as many as chosen, by number of neighbours".into(), chosen));
    }
    let share =
        |(name, rows)| GivenShare { name, rows, first_seconds: 0.0, seconds: Vec::new(), run: Value::Null };
    Ok(named.into_iter().map(share).collect())
}

/// The shares that were fastest so far.
fn fastest(given: &[GivenShare], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..given.len()).collect();
    order.sort_by(|one, other| given[*one].first_seconds.total_cmp(&given[*other].first_seconds));
    order.truncate(count);
    order
}

/// Prepares, trains with what was chosen, and with a history of every so many tenths of the memory.
pub fn shares(bench: &Bench, proof: SplitProof) -> Result<Value> {
    let size = proof.size;
    graph(bench, size)?;
    let memory = format!("{}B", size.budget(bench)?);
    let training = ["--fanout", size.fanout, "--batch", size.batch, "--hidden", size.hidden];
    let flags = ["--strategy", "outre", "--memory", &memory, "--staleness", size.staleness];
    let more = ["--epochs", size.epochs, "--eval", "none", "--device", size.device];
    let prepare = [&["prepare", "graph"], &training[..], &flags, &more].concat();
    let prepared = bench.json(&prepare)?;
    let split = &prepared["history_split"];
    ensure!(!split.is_null(), "nothing was chosen: {prepared:#}");
    println!("chosen: {split}");
    let again = bench.json(&prepare)?;
    ensure!(again["history_split"]["is_reused"] == true, "chosen again: {again:#}");
    let mut given = given_shares(&proof, split)?;
    let with_chosen = || {
        let found = run(bench, size, "chosen", &flags)?;
        ensure!(found["split"]["is_reused"] == true, "training did not use what was prepared: {found:#}");
        Ok(found)
    };
    let with_rows = |rows: u64| {
        let rows = rows.to_string();
        run(bench, size, "given", &[&flags[..], &["--history-rows", &rows]].concat())
    };
    let last = with_chosen()?;
    let first = number(&last, "seconds")?;
    for share in &mut given {
        share.run = with_rows(share.rows)?;
        share.first_seconds = number(&share.run, "seconds")?;
    }
    // The best of many single runs was lucky, too: the best of them are measured anew, in turn with the chosen one.
    let order = fastest(&given, proof.best);
    let mut chosen = Vec::new();
    for _ in 0..proof.rounds {
        chosen.push(number(&with_chosen()?, "seconds")?);
        for at in &order {
            let found = with_rows(given[*at].rows)?;
            given[*at].seconds.push(number(&found, "seconds")?);
        }
    }
    let of_chosen = median(&chosen);
    let of_others: Vec<f64> = order.iter().map(|at| median(&given[*at].seconds)).collect();
    let best = of_others.iter().copied().fold(of_chosen, f64::min);
    let predicted = number(split, "predicted_seconds")?;
    let table: Vec<Value> = given.iter().map(GivenShare::row).collect();
    let found = json!({
        "split": split, "prepare_seconds": prepared["seconds"], "first_seconds": first, "chosen_seconds": chosen,
        "median_seconds": of_chosen, "predicted_over_measured": predicted / of_chosen, "chosen_over_best": of_chosen / best,
        "shares": table, "run": last,
    });
    println!("{found:#}\nchosen {of_chosen:.2} s, best {best:.2} s, predicted {predicted:.2} s");
    let over = of_chosen / best;
    ensure!(of_chosen <= proof.most * best, "the chosen share takes {over:.3} times the best: {of_others:?}");
    Ok(found)
}

pub(super) fn full(bench: &Bench) -> Result<Value> {
    // Rows of 4 KiB; a hundred batches an epoch.
    let size = Size {
        nodes: 200_000,
        dim: 1024,
        homophily: "0.7",
        train: "0.05",
        test: "0.02",
        fanout: "10,5,5",
        batch: "100",
        hidden: "128",
        memory: DiskMemory::TenthOfRows,
        epochs: "2",
        staleness: "20",
        device: "cpu",
    };
    let tenths = &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10];
    let found = shares(bench, SplitProof { size, tenths, rounds: 3, best: 3, most: 1.03 })?;
    found["split"].as_object().context("a split")?;
    Ok(found)
}
