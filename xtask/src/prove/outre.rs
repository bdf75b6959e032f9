//! The redundancy ratio of OUTRE: nodes of all batches of an epoch, per training node, in shuffled order and by groups of
//! partitions. (The paper's Table 3: 32% and 27% less with METIS.)

use super::accuracy::{WORDNET, import};
use super::{Bench, number};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

/// Nodes of all batches of an epoch, per training node.
fn redundancy(bench: &Bench, dataset: &str, sampling: &[&str], order: &str) -> Result<f64> {
    let words =
        ["bench", "epoch", dataset, "--device", "cpu", "--no-compute", "--warm", "0", "--hidden", "8"];
    let found = bench.json(&[&words[..], sampling, &["--order", order]].concat())?;
    let info = bench.json(&["info", dataset])?;
    Ok(number(&found, "nodes")? / number(&info, "train")?)
}

/// Both orders on a dataset, with partitions made for these batches.
fn compare(bench: &Bench, dataset: &str, fanout: &str, batch: &str) -> Result<Value> {
    let made = bench.json(&["partition", dataset, "--batch", batch])?;
    let sampling = ["--fanout", fanout, "--batch", batch];
    let shuffled = redundancy(bench, dataset, &sampling, "shuffled")?;
    let groups = redundancy(bench, dataset, &sampling, "groups")?;
    let less = 1.0 - groups / shuffled;
    println!(
        "{dataset}, fan-out {fanout}: {shuffled:.2} shuffled, {groups:.2} by groups, {:.1}% less",
        less * 100.0
    );
    Ok(json!({
        "dataset": dataset, "fanout": fanout, "batch": batch, "shuffled": shuffled, "groups": groups,
        "less": less, "partitions": made["request"]["partitions"], "cut_share": made["cut_share"],
        "node_balance": made["node_balance"], "training_balance": made["training_balance"],
        "edges_per_second": made["edges_per_second"], "peak_host_bytes": made["peak_host_bytes"],
    }))
}

/// A generated graph with communities: its batches by groups reach fewer nodes.
pub fn generated(bench: &Bench, nodes: u64, batch: &str) -> Result<Value> {
    let (nodes, classes) = (nodes.to_string(), (nodes / 100).to_string());
    let words = ["generate", "graph", "--nodes", &nodes, "--degree", "8", "--dim", "8", "--undirected"];
    let also = ["--classes", &classes, "--homophily", "0.95", "--train", "0.2"];
    bench.json(&[&words[..], &also].concat())?;
    let found = compare(bench, "graph", "10,10", batch)?;
    let less = number(&found, "less")?;
    ensure!(less > 0.2, "batches by groups have {:.1}% fewer nodes", less * 100.0);
    Ok(found)
}

/// WordNet with three layers; `None` if it is not beside the checkout.
pub fn wordnet(bench: &Bench) -> Result<Option<Value>> {
    let Some(data) = crate::real_data() else { return Ok(None) };
    import(
        bench,
        WORDNET,
        "wordnet-synsets",
        data.to_str().context("the path of the datasets is not text")?,
        1,
    )?;
    let found = compare(bench, "real", "10,10,10", "1000")?;
    ensure!(number(&found, "less")? > 0.0, "batches by groups have more nodes: {found:#}");
    Ok(Some(found))
}

pub(super) fn full(bench: &Bench) -> Result<Value> {
    let generated = generated(bench, 1_000_000, "1000")?;
    let wordnet = wordnet(bench)?;
    if wordnet.is_none() {
        println!("skipped: WordNet is not beside the checkout");
    }
    Ok(json!({ "generated": generated, "wordnet": wordnet }))
}
