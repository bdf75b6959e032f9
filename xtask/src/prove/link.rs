//! Link prediction: published results on FB15k-237 and Cora, bit-identical results however they are computed, and nothing
//! that leaks from held-out edges.

use super::{Bench, train};
use anyhow::{Context, Result, bail, ensure};
use esker_types::random::{Key, below};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;

/// The configuration of the Marius authors for FB15k-237.
const MARIUS: &str = "--task link --embeddings 50 --decoder distmult --inverse-relations --loss softmax --reduction sum --negatives 500 --chunks 10 --mask none --batch 1000 --optimizer adagrad --lr 0.1";

/// A model on FB15k-237, and the MRR that is published for it.
struct MariusCase {
    name: &'static str,
    flags: &'static str,
    mrr: f64,
}

const MARIUS_CASES: [MariusCase; 3] = [
    MariusCase { name: "distmult", flags: "--encoder none --epochs 10", mrr: 0.2533 },
    MariusCase {
        name: "sage",
        flags: "--encoder sage --layers 1 --fanout all --direction both --epochs 5",
        mrr: 0.2825,
    },
    MariusCase {
        name: "gat",
        flags: "--encoder gat --layers 1 --heads 1 --fanout all --direction both --epochs 5",
        mrr: 0.2869,
    },
];

/// GAE (Kipf and Welling): GCN 32-16 and dot.
const GAE: &str = "--task link --encoder gcn --layers 2 --hidden 32 --out-channels 16 --fanout all --direction incoming --decoder dot --loss logistic --negatives 1000 --chunks 1 --lr 0.01 --metric auc --eval full";

/// Writes a knowledge graph with a plan as triples, and imports it as `facts`: relation `r` leads from group `g` to group
/// `g + r + 1`.
pub fn facts(bench: &Bench, nodes: u64, edges: u64) -> Result<()> {
    let (groups, relations, key) = (20, 6, Key::new(9));
    let mut all = BTreeSet::new();
    for index in 0..edges {
        let (source, relation) = (below(key.at(3 * index), nodes), below(key.at(3 * index + 1), relations));
        let group = (source % groups + relation + 1) % groups;
        all.insert((source, relation, group + groups * below(key.at(3 * index + 2), nodes / groups)));
    }
    let mut texts = [String::new(), String::new(), String::new()];
    for (index, (source, relation, target)) in all.iter().enumerate() {
        let split = match below(key.with(1).at(index as u64), 20) {
            0 => 1,
            1 | 2 => 2,
            _ => 0,
        };
        writeln!(texts[split], "n{source}\tr{relation}\tn{target}")?;
    }
    fs::create_dir_all(bench.path("triples"))?;
    for (name, text) in ["train", "valid", "test"].iter().zip(&texts) {
        fs::write(bench.path(&format!("triples/{name}.txt")), text)?;
    }
    bench.json(&["import", "facts", "--overwrite", "--format", "triples", "--from", "triples"])?;
    Ok(())
}

/// The words of a run on `facts`.
fn words(out: &str, epochs: &str, more: &[&str]) -> Vec<String> {
    let common = "--task link --encoder none --embeddings 24 --decoder complex --negatives 50 --chunks 4 --degree-share 0.2 --inverse-relations --input-dropout 0.1 --relation-dropout 0.1 --n3 0.001 --batch 200 --optimizer adagrad --lr 0.1 --device cpu";
    let words = ["train", "facts", "--epochs", epochs, "--out", out];
    words.into_iter().chain(common.split(' ')).chain(more.iter().copied()).map(String::from).collect()
}

/// Everything that a run leaves behind and that must not depend on how it was computed.
fn left_behind(bench: &Bench, out: &str) -> Result<Vec<Vec<u8>>> {
    let state = bench.path(out).join("state");
    let mut files: Vec<_> = fs::read_dir(&state)?.map(|file| Ok(file?.path())).collect::<Result<_>>()?;
    files.sort();
    files.push(bench.path(out).join("last.safetensors"));
    files.iter().map(|file| fs::read(file).with_context(|| file.display().to_string())).collect()
}

/// Losses, metrics, weights and embeddings are bit-identical for any number of threads and any candidate block.
pub fn same(bench: &Bench, epochs: &str) -> Result<Value> {
    let (mut rows, mut kept) = (Vec::new(), Vec::new());
    for (threads, block) in [("1", "100000"), ("2", "100000"), ("4", "64"), ("2", "1000"), ("1", "37")] {
        let out = format!("same-{threads}-{block}");
        let words = words(&out, epochs, &["--threads", threads, "--candidate-block", block]);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let found = bench.json(&words)?;
        rows.push(json!({
            "threads": threads, "candidate_block": block, "loss_digest": found["loss_digest"], "test": found["test"],
        }));
        kept.push(left_behind(bench, &out)?);
    }
    let first = &rows[0];
    let same = |row: &Value| row["loss_digest"] == first["loss_digest"] && row["test"] == first["test"];
    ensure!(first["test"]["mrr"].is_f64() && rows.iter().all(same), "results differ: {rows:#?}");
    ensure!(kept.windows(2).all(|pair| pair[0] == pair[1]), "weights or embeddings differ");
    Ok(Value::Array(rows))
}

/// SIGKILL at random moments, `--resume` until it ends: embeddings, weights and metrics of an undisturbed run.
pub fn killed(bench: &Bench, epochs: &str, kills: u64, seed: u64) -> Result<Value> {
    train::killed_runs(
        bench,
        kills,
        seed,
        &|out, more| words(out, epochs, &[&["--checkpoint-batches", "3"], more].concat()),
        &|out| left_behind(bench, out),
    )
}

/// A graph without structure: nothing of a held-out edge can be known, so test AUC is 50% unless something leaks.
pub fn no_leak(bench: &Bench, nodes: u64, edges: u64, epochs: &str, within: f64) -> Result<Value> {
    let key = Key::new(17);
    let mut pairs = BTreeSet::new();
    for index in 0.. {
        if pairs.len() as u64 >= edges {
            break;
        }
        let (one, other) = (below(key.at(2 * index), nodes), below(key.at(2 * index + 1), nodes));
        if one != other {
            pairs.insert((one.min(other), one.max(other)));
        }
    }
    let mut text = String::from("source,target\n");
    pairs.iter().try_for_each(|(one, other)| writeln!(text, "{one},{other}"))?;
    fs::write(bench.path("random.csv"), text)?;
    let import = "import random --overwrite --format csv --edges random.csv --add-reverse --hold-out valid:5%,test:10%";
    bench.json(&import.split(' ').collect::<Vec<_>>())?;
    let mut rows = Vec::new();
    for encoder in ["none", "gcn --layers 1 --fanout 10", "sage --layers 2 --fanout 5"] {
        let out = format!("leak-{}", encoder.split(' ').next().unwrap_or(encoder));
        let flags = format!(
            "train random --task link --encoder {encoder} --embeddings 16 --decoder dot --loss logistic --negatives 100 --chunks 4 --batch 1000 --epochs {epochs} --lr 0.01 --device cpu --out {out}"
        );
        let found = bench.json(&flags.split(' ').collect::<Vec<_>>())?;
        let auc = found["test"]["auc"].as_f64().context("a test AUC")? * 100.0;
        println!("{encoder:28} AUC {auc:.2}");
        ensure!((auc - 50.0).abs() <= within, "{encoder}: AUC {auc:.2} on a graph without structure");
        rows.push(json!({ "encoder": encoder, "auc": auc }));
    }
    Ok(Value::Array(rows))
}

/// MRR of one run on FB15k-237.
fn marius_mrr(bench: &Bench, flags: &str, seed: u64) -> Result<(f64, Value)> {
    let out = format!("fb-{seed}");
    let all = format!("train fb {MARIUS} {flags} --seed {seed} --device cpu --out {out}");
    let found = bench.json(&all.split(' ').collect::<Vec<_>>())?;
    fs::remove_dir_all(bench.path(&out)).ok();
    let mrr = found["test"]["mrr"].as_f64().context("a test MRR")?;
    Ok((mrr, json!({ "test": found["test"], "wall_seconds": found["wall_seconds"] })))
}

fn import_facts(bench: &Bench) -> Result<bool> {
    let Some(data) = crate::real_data() else { return Ok(false) };
    let from = data.join("fb15k-237");
    let from = from.to_str().context("the path of the datasets is not text")?;
    bench.json(&[
        "import",
        "fb",
        "--overwrite",
        "--format",
        "triples",
        "--from",
        from,
        "--out-neighbours",
    ])?;
    Ok(true)
}

/// DistMult on FB15k-237 for some epochs; `None` if the dataset is missing.
pub fn facts_are_learned(bench: &Bench, epochs: &str, least: f64) -> Result<Option<Value>> {
    if !import_facts(bench)? {
        return Ok(None);
    }
    let (mrr, found) = marius_mrr(bench, &format!("--encoder none --epochs {epochs}"), 1)?;
    ensure!(mrr > least, "MRR {mrr:.4} after {epochs} epochs");
    Ok(Some(found))
}

pub(super) fn full_marius(bench: &Bench) -> Result<Value> {
    ensure!(import_facts(bench)?, "FB15k-237 is not beside the checkout");
    let (mut rows, mut short) = (Vec::new(), Vec::new());
    for case in &MARIUS_CASES {
        let runs: Vec<(f64, Value)> =
            (1..=3).map(|seed| marius_mrr(bench, case.flags, seed)).collect::<Result<_>>()?;
        let mean = runs.iter().map(|(mrr, _)| mrr).sum::<f64>() / runs.len() as f64;
        println!("{:10} MRR {mean:.4}, published {}", case.name, case.mrr);
        if (mean - case.mrr).abs() > 0.01 {
            short.push(format!("{}: MRR {mean:.4}, published {}", case.name, case.mrr));
        }
        let runs: Vec<Value> = runs.into_iter().map(|(_, run)| run).collect();
        rows.push(json!({
            "model": case.name, "mean_mrr": mean, "published": case.mrr, "runs": runs, "flags": format!("{MARIUS} {}", case.flags),
        }));
    }
    match short.is_empty() {
        true => Ok(Value::Array(rows)),
        false => bail!("not within 0.01:\n  {}\n{rows:#?}", short.join("\n  ")),
    }
}

/// AUC and AP of GAE on a citation graph, with held-out edges that depend on the seed; `None` if it is missing.
pub fn gae(bench: &Bench, dataset: &str, rows: &str, splits: u64, epochs: &str) -> Result<Option<Value>> {
    let Some(data) = crate::real_data() else { return Ok(None) };
    let from = data.join(dataset);
    let from = from.to_str().context("the path of the datasets is not text")?;
    let mut found = Vec::new();
    for seed in 1..=splits {
        let import = format!(
            "import cited --overwrite --format planetoid --from {from} --name {dataset} --row-normalise --hold-out valid:5%,test:10% --seed {seed}"
        );
        bench.json(&import.split(' ').collect::<Vec<_>>())?;
        let out = format!("gae-{dataset}-{seed}");
        let all = format!(
            "train cited {GAE} {rows} --batch 100000 --epochs {epochs} --seed {seed} --device cpu --out {out}"
        );
        let summary = bench.json(&all.split(' ').collect::<Vec<_>>())?;
        found.push(
            [&summary["test"]["auc"], &summary["test"]["ap"]]
                .map(|value| value.as_f64().unwrap_or(0.0) * 100.0),
        );
        fs::remove_dir_all(bench.path(&out)).ok();
    }
    let mean = |at: usize| found.iter().map(|pair| pair[at]).sum::<f64>() / found.len() as f64;
    println!("{dataset:10} {rows:20} AUC {:.2}, AP {:.2}", mean(0), mean(1));
    Ok(Some(json!({ "dataset": dataset, "rows": rows, "auc": mean(0), "ap": mean(1), "runs": found })))
}

pub(super) fn full_gae(bench: &Bench) -> Result<Value> {
    let (mut all, mut short) = (Vec::new(), Vec::new());
    let (features, embeddings) = ("", "--embeddings 32");
    for (dataset, rows, published) in [
        ("cora", features, Some(91.0)),
        ("cora", embeddings, Some(84.3)),
        ("citeseer", features, None),
        ("pubmed", features, None),
    ] {
        let found = gae(bench, dataset, rows.trim(), 10, "200")?.context("the datasets are not there")?;
        let auc = found["auc"].as_f64().unwrap_or(0.0);
        if let Some(published) = published.filter(|published| (auc - published).abs() > 1.0) {
            short.push(format!("{dataset} {rows}: AUC {auc:.2}, published {published}"));
        }
        all.push(found);
    }
    match short.is_empty() {
        true => Ok(Value::Array(all)),
        false => bail!("not within a point:\n  {}\n{all:#?}", short.join("\n  ")),
    }
}

pub(super) fn full_same(bench: &Bench) -> Result<Value> {
    facts(bench, 10_000, 100_000)?;
    same(bench, "3")
}

pub(super) fn full_kill(bench: &Bench) -> Result<Value> {
    facts(bench, 2000, 20_000)?;
    killed(bench, "4", 100, 5)
}

pub(super) fn full_leak(bench: &Bench) -> Result<Value> {
    no_leak(bench, 20_000, 100_000, "5", 2.0)
}
