//! Link prediction: published results on FB15k-237 and Cora, bit-identical results however they are computed, and nothing
//! that leaks from held-out edges.

use super::{Bench, ROUNDS, repeated, train};
use anyhow::{Context, Result, bail, ensure};
use esker_types::random::{Key, below};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;

/// The configuration of the Marius authors for FB15k-237. Initial rows are those of their experiments.
pub(super) const MARIUS: &str = "--task link --embeddings 50 --init normal:0.001 --decoder distmult --inverse-relations --loss softmax --reduction sum --negatives 500 --chunks 10 --mask none --batch 1000 --optimizer adagrad --lr 0.1";

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

/// GAE (Kipf and Welling): GCN 32-16 and dot, over features that are not normalised. Whether target edges are dropped and
/// the width of embeddings were chosen by validation AUC, on four and three splits.
pub(super) const GAE: &str = "--task link --encoder gcn --layers 2 --hidden 32 --out-channels 16 --fanout all --direction incoming --decoder dot --loss logistic --negatives 1000 --chunks 1 --lr 0.01 --metric auc --eval full";

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

/// An MRR counts as learned from so many times that of guessing on.
const TIMES_GUESSING: f64 = 4.0;

/// Fails unless a model learned to rank the nodes of a dataset: bits of a model that knows nothing prove little.
pub fn check_learned(bench: &Bench, dataset: &str, summary: &Value) -> Result<()> {
    let info = bench.json(&["info", dataset])?;
    let nodes = info["nodes"].as_f64().context("the number of nodes")?;
    let mrr = summary["test"]["mrr"].as_f64().context("a test MRR")?;
    // The mean of 1 / rank, where every rank is as likely.
    let guessing = (nodes.ln() + 0.577) / nodes;
    println!("MRR {mrr:.4}, guessing has {guessing:.4}");
    ensure!(mrr >= TIMES_GUESSING * guessing, "MRR {mrr:.4}, where guessing has {guessing:.4}");
    Ok(())
}

/// The words of a run on `facts`.
pub(super) fn words(out: &str, epochs: &str, more: &[&str]) -> Vec<String> {
    let common = "--task link --encoder none --embeddings 24 --decoder complex --negatives 50 --chunks 4 --degree-share 0.2 --inverse-relations --input-dropout 0.1 --relation-dropout 0.1 --n3 0.001 --batch 200 --optimizer adagrad --lr 0.1 --device cpu";
    let words = ["train", "facts", "--epochs", epochs, "--out", out];
    words.into_iter().chain(common.split(' ')).chain(more.iter().copied()).map(String::from).collect()
}

/// Everything that a run leaves behind and that must not depend on how it was computed.
pub(super) fn left_behind(bench: &Bench, out: &str) -> Result<Vec<Vec<u8>>> {
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
        check_learned(bench, "facts", &found)?;
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
    let found = train::killed_runs(
        bench,
        kills,
        seed,
        &|out, more| words(out, epochs, &[&["--checkpoint-batches", "3"], more].concat()),
        &|out| left_behind(bench, out),
    )?;
    let summary = fs::read(bench.path("whole/summary.json"))?;
    check_learned(bench, "facts", &serde_json::from_slice(&summary)?)?;
    Ok(found)
}

/// A graph without structure: nothing of a held-out edge can be known, so test AUC is 50% unless something leaks. Where
/// the same edges are held out and train, too, it is far from that: the models see what there is to be seen.
pub fn no_leak(bench: &Bench, nodes: u64, edges: u64, epochs: [&str; 2], within: f64) -> Result<Value> {
    let pairs = random_pairs(nodes, edges);
    let mut text = String::from("source,target\n");
    pairs.iter().try_for_each(|(one, other)| writeln!(text, "{one},{other}"))?;
    fs::write(bench.path("random.csv"), text)?;
    let import = "import random --overwrite --format csv --edges random.csv --add-reverse --hold-out valid:5%,test:10%";
    bench.json(&import.split(' ').collect::<Vec<_>>())?;
    import_leaking(bench, &pairs)?;
    let mut rows = Vec::new();
    for encoder in ["none", "gcn --layers 1 --fanout 10", "sage --layers 2 --fanout 5"] {
        let auc = random_auc(bench, "random", encoder, epochs[0])?;
        let leaking = random_auc(bench, "leaking", encoder, epochs[1])?;
        println!("{encoder:28} AUC {auc:.2}, {leaking:.2} where test edges train");
        ensure!((auc - 50.0).abs() <= within, "{encoder}: AUC {auc:.2} on a graph without structure");
        ensure!(leaking > 50.0 + 2.0 * within, "{encoder}: AUC {leaking:.2} of edges that train");
        rows.push(json!({ "encoder": encoder, "auc": auc, "auc_where_test_edges_train": leaking }));
    }
    Ok(Value::Array(rows))
}

/// Every pair trains, and every tenth is a test edge as well.
fn import_leaking(bench: &Bench, pairs: &BTreeSet<(u64, u64)>) -> Result<()> {
    let lines = |skip: usize, each: usize| -> String {
        let some = pairs.iter().skip(skip).step_by(each);
        some.map(|(one, other)| format!("{one}\tr\t{other}\n")).collect()
    };
    fs::create_dir_all(bench.path("leaking-triples"))?;
    for (name, text) in [("train", lines(0, 1)), ("valid", lines(1, 20)), ("test", lines(0, 10))] {
        fs::write(bench.path(&format!("leaking-triples/{name}.txt")), text)?;
    }
    let import = "import leaking --overwrite --format triples --from leaking-triples --add-reverse";
    bench.json(&import.split(' ').collect::<Vec<_>>())?;
    Ok(())
}

/// Test AUC of a model on a graph without structure, in percent.
fn random_auc(bench: &Bench, dataset: &str, encoder: &str, epochs: &str) -> Result<f64> {
    let out = format!("{dataset}-{}", encoder.split(' ').next().unwrap_or(encoder));
    let flags = format!(
        "train {dataset} --task link --encoder {encoder} --embeddings 16 --decoder dot --loss logistic --negatives 100 --chunks 4 --batch 1000 --epochs {epochs} --lr 0.01 --device cpu --out {out}"
    );
    let found = bench.json(&flags.split(' ').collect::<Vec<_>>())?;
    Ok(found["test"]["auc"].as_f64().context("a test AUC")? * 100.0)
}

fn random_pairs(nodes: u64, edges: u64) -> BTreeSet<(u64, u64)> {
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
    pairs
}

/// MRR of one run on FB15k-237.
fn marius_mrr(bench: &Bench, flags: &str, seed: u64) -> Result<(f64, Value)> {
    let out = format!("fb-{seed}");
    let all = format!("train fb {MARIUS} {flags} --seed {seed} --device cpu --out {out}");
    let found = bench.json(&all.split_whitespace().collect::<Vec<_>>())?;
    fs::remove_dir_all(bench.path(&out)).ok();
    let mrr = found["test"]["mrr"].as_f64().context("a test MRR")?;
    Ok((mrr, json!({ "test": found["test"], "wall_seconds": found["wall_seconds"] })))
}

pub(super) fn import_facts(bench: &Bench) -> Result<bool> {
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

/// Edges that train, nodes and test edges of FB15k-237.
const FACTS: [f64; 3] = [272_115.0, 14_541.0, 20_466.0];
/// Largest ratios of an epoch and of ranking to the time of their matmuls at gemm's best rate.
const MOST_EPOCH: f64 = 2.5;
const MOST_RANKING: f64 = 3.0;

/// Epochs and test ranking of DistMult on FB15k-237, as multiples of their matmuls.
pub(super) fn full_speed(bench: &Bench) -> Result<Value> {
    ensure!(import_facts(bench)?, "FB15k-237 is not beside the checkout");
    let [edges, nodes, test] = FACTS;
    // Both sides: 500 negatives an edge, forward and to both gradients; all nodes.
    let (step, ranking) = (edges * 2.0 * 500.0 * 50.0 * 2.0 * 3.0, test * 2.0 * nodes * 50.0 * 2.0);
    let flags = format!("{MARIUS} --encoder none --device cpu");
    let words = format!("bench epoch fb {flags} --matmul --batches 50");
    let measured = bench.json(&words.split(' ').collect::<Vec<_>>())?;
    let rate = measured["matmul"]["gemm_best_per_second"].as_f64().context("the rate of gemm")?;
    let epochs = 4.0;
    let found = repeated(ROUNDS, &["epoch_seconds", "ranking_seconds"], || {
        let all = format!("train fb {flags} --epochs {epochs} --eval none --final-eval full --out fb-speed");
        let found = bench.json(&all.split_whitespace().collect::<Vec<_>>())?;
        fs::remove_dir_all(bench.path("fb-speed")).ok();
        let seconds = |name: &str| found["wall_seconds"][name].as_f64().with_context(|| name.to_string());
        Ok(json!({ "epoch_seconds": seconds("epochs")? / epochs, "ranking_seconds": seconds("test")? }))
    })?;
    let times = |name: &str, operations: f64| -> Result<f64> {
        Ok(found[name].as_f64().context("a median")? * rate / operations)
    };
    let (epoch, ranked) = (times("epoch_seconds", step)?, times("ranking_seconds", ranking)?);
    println!("an epoch is {epoch:.2} times its matmuls, ranking {ranked:.2} times");
    ensure!(epoch <= MOST_EPOCH && ranked <= MOST_RANKING, "{epoch:.2} and {ranked:.2} times the matmuls");
    Ok(json!({
        "gemm_best_per_second": rate, "epoch_times_matmuls": epoch, "ranking_times_matmuls": ranked, "measured": found,
        "flags": flags,
    }))
}

/// AUC and AP of GAE on a citation graph, with held-out edges that depend on the seed; `None` if it is missing.
pub fn gae(bench: &Bench, dataset: &str, rows: &str, splits: u64, epochs: &str) -> Result<Option<Value>> {
    let Some(data) = crate::real_data() else { return Ok(None) };
    let from = data.join(dataset);
    let from = from.to_str().context("the path of the datasets is not text")?;
    let mut found = Vec::new();
    for seed in 1..=splits {
        let import = format!(
            "import cited --overwrite --format planetoid --from {from} --name {dataset} --hold-out valid:5%,test:10% --seed {seed}"
        );
        bench.json(&import.split(' ').collect::<Vec<_>>())?;
        let out = format!("gae-{dataset}-{seed}");
        let all = format!(
            "train cited {GAE} {rows} --batch 100000 --epochs {epochs} --seed {seed} --device cpu --out {out}"
        );
        let summary = bench.json(&all.split_whitespace().collect::<Vec<_>>())?;
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
    let (features, embeddings) = ("", "--embeddings 128 --target-edges keep");
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
    same(bench, "8")
}

pub(super) fn full_kill(bench: &Bench) -> Result<Value> {
    facts(bench, 2000, 20_000)?;
    killed(bench, "8", 100, 5)
}

pub(super) fn full_leak(bench: &Bench) -> Result<Value> {
    no_leak(bench, 20_000, 100_000, ["5", "30"], 2.0)
}
