//! Orders over partitions with the whole graph in memory: what training on the residents of a quarter of the buffer costs
//! in MRR, by order (Marius++ Table 4), and which part of it comes from what.

use super::Bench;
use super::link::{MARIUS, import_facts};
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use std::fs;

/// A model, and the MRR that is published for it: in memory, two-level BETA, BETA.
struct ModelCase {
    name: &'static str,
    flags: &'static str,
    published: [f64; 3],
}

const MODELS: [ModelCase; 3] = [
    ModelCase { name: "distmult", flags: "--encoder none --epochs 10", published: [0.2533, 0.2659, 0.2431] },
    ModelCase {
        name: "sage",
        flags: "--encoder sage --layers 1 --fanout all --direction both --epochs 5",
        published: [0.2825, 0.2736, 0.2369],
    },
    ModelCase {
        name: "gat",
        flags: "--encoder gat --layers 1 --heads 1 --fanout all --direction both --epochs 5",
        published: [0.2869, 0.2341, 0.2076],
    },
];

/// An order, and where its MRR is published.
struct OrderCase {
    name: &'static str,
    flags: &'static str,
    published: Option<usize>,
}

const ORDERS: [OrderCase; 3] = [
    OrderCase {
        name: "two-level-beta",
        flags: "--order two-level-beta --partitions 32 --resident 8 --logical 8",
        published: Some(1),
    },
    OrderCase { name: "beta", flags: "--order beta --partitions 32 --resident 8", published: Some(2) },
    OrderCase {
        name: "tour",
        flags: "--order tour --partitions 36 --resident 8 --logical 9",
        published: None,
    },
];

/// What batches see, each with more of the partition buffer: the order alone, resident negatives too, resident neighbours
/// too.
const SEEN: [(&str, &str); 3] = [
    ("order alone", ""),
    ("resident negatives", "--resident-only negatives"),
    ("residents only", "--resident-only"),
];

/// The published MRR may be missed by this.
const WITHIN: f64 = 0.01;
/// The goal of a tour: the MRR in memory, less this.
const GOAL: f64 = 0.003;
const SEEDS: u64 = 3;

/// Runs whose words are these.
fn run(bench: &Bench, words: &str) -> Result<Value> {
    let found = bench.json(&words.split_whitespace().collect::<Vec<_>>());
    fs::remove_dir_all(bench.path("orders")).ok();
    found
}

/// The MRR of some seeds, and what the runs say of their steps and losses.
struct MrrOfSeeds {
    all: Vec<f64>,
    digests: Vec<Value>,
    steps: Value,
}

impl MrrOfSeeds {
    fn measure(bench: &Bench, flags: &str, seeds: u64) -> Result<MrrOfSeeds> {
        let mut of = MrrOfSeeds { all: Vec::new(), digests: Vec::new(), steps: Value::Null };
        for seed in 1..=seeds {
            let words = format!("train fb {MARIUS} {flags} --seed {seed} --device cpu --out orders");
            let found = run(bench, &words)?;
            of.all.push(found["test"]["mrr"].as_f64().context("a test MRR")?);
            of.digests.push(found["loss_digest"].clone());
            of.steps = found["partition_steps"].clone();
        }
        Ok(of)
    }

    fn mean(&self) -> f64 {
        self.all.iter().sum::<f64>() / self.all.len() as f64
    }

    /// The variance of the mean.
    fn variance(&self) -> f64 {
        let (mean, count) = (self.mean(), self.all.len() as f64);
        let squares: f64 = self.all.iter().map(|mrr| (mrr - mean).powi(2)).sum();
        squares / (count - 1.0).max(1.0) / count
    }

    /// Two standard errors of the difference of two means.
    fn noise(&self, other: &MrrOfSeeds) -> f64 {
        2.0 * (self.variance() + other.variance()).sqrt()
    }

    fn json(&self) -> Value {
        json!({ "mean_mrr": self.mean(), "mrr": self.all, "loss_digests": self.digests, "steps": self.steps })
    }
}

/// One order: each part of what a buffer leaves out, and the buffer itself, whose losses are those of the residents alone.
fn parts_of(
    bench: &Bench,
    model: &ModelCase,
    order: &OrderCase,
    (memory, seeds): (&MrrOfSeeds, u64),
) -> Result<(MrrOfSeeds, Vec<Value>)> {
    let (mut parts, mut last) = (Vec::new(), None::<MrrOfSeeds>);
    for (seen, flags) in SEEN {
        let found = MrrOfSeeds::measure(bench, &format!("{} {} {flags}", model.flags, order.flags), seeds)?;
        let difference = found.mean() - last.as_ref().unwrap_or(memory).mean();
        println!("{:10} {:15} {seen:18} MRR {:.4}, {difference:+.4}", model.name, order.name, found.mean());
        let mut part = found.json();
        part["seen"] = json!(seen);
        part["difference"] = json!(difference);
        parts.push(part);
        last = Some(found);
    }
    let last = last.context("parts of what a buffer leaves out")?;
    let buffer =
        MrrOfSeeds::measure(bench, &format!("{} {} --strategy marius", model.flags, order.flags), 1)?;
    ensure!(
        buffer.digests[0] == last.digests[0] && buffer.all[0].to_bits() == last.all[0].to_bits(),
        "{} {}: a partition buffer trains something else than its residents in memory",
        model.name,
        order.name
    );
    Ok((last, parts))
}

/// One model: in memory, and in every order, with each part of what a buffer leaves out. What is missed goes to `missed`.
fn table_of(bench: &Bench, model: &ModelCase, seeds: u64, missed: &mut Vec<String>) -> Result<Value> {
    let memory = MrrOfSeeds::measure(bench, model.flags, seeds)?;
    println!("{:10} in memory: MRR {:.4}, published {}", model.name, memory.mean(), model.published[0]);
    let mut below = |name: &str, mrr: f64, published: f64| {
        if mrr < published - WITHIN {
            missed.push(format!("{} {name}: MRR {mrr:.4}, published {published}", model.name));
        }
    };
    below("in memory", memory.mean(), model.published[0]);
    let (mut orders, mut found) = (Vec::new(), Vec::new());
    for order in &ORDERS {
        let (mrr, parts) = parts_of(bench, model, order, (&memory, seeds))?;
        let published = order.published.map(|at| model.published[at]);
        published.into_iter().for_each(|published| below(order.name, mrr.mean(), published));
        orders
            .push(json!({ "order": order.flags, "mrr": mrr.mean(), "published": published, "parts": parts }));
        found.push(mrr);
    }
    let [two_level, tour] = [0, 2].map(|at: usize| &found[at]);
    // Never more than what a published figure may be missed by.
    let noise = tour.noise(two_level).min(WITHIN);
    let (difference, goal) = (tour.mean() - two_level.mean(), memory.mean() - GOAL);
    if difference < -noise {
        missed.push(format!(
            "{}: tour has MRR {:.4}, two-level BETA {:.4}, noise of seeds {noise:.4}",
            model.name,
            tour.mean(),
            two_level.mean()
        ));
    }
    println!("{:10} tour: goal MRR {goal:.4}, found {:.4}", model.name, tour.mean());
    Ok(json!({
        "model": model.name, "flags": model.flags, "in_memory": memory.json(), "orders": orders,
        "published_in_memory": model.published[0],
        "tour": {
            "less_two_level": difference, "noise_of_seeds": noise, "goal": goal,
            "reaches_goal": tour.mean() >= goal,
        },
    }))
}

/// The models of `--models NAME,NAME`, or all.
fn asked_models(words: &[String]) -> Result<Vec<&'static ModelCase>> {
    let names: Vec<&str> = match words {
        [] => MODELS.iter().map(|model| model.name).collect(),
        [flag, names] if flag == "--models" => names.split(',').collect(),
        _ => bail!("marius-orders takes --models, as in --models distmult,sage"),
    };
    let find = |name: &&str| MODELS.iter().find(|model| model.name == *name);
    names.iter().map(|name| find(name).with_context(|| format!("`{name}` is not a model of it"))).collect()
}

/// Table 4 on FB15k-237, three seeds.
pub(super) fn full(bench: &Bench) -> Result<Value> {
    let models = asked_models(&bench.words)?;
    ensure!(import_facts(bench)?, "FB15k-237 is not beside the checkout");
    let mut missed = Vec::new();
    let rows: Vec<Value> =
        models.iter().map(|model| table_of(bench, model, SEEDS, &mut missed)).collect::<Result<_>>()?;
    Ok(json!({
        "common": MARIUS, "seeds": SEEDS, "models": rows, "is_as_asked": missed.is_empty(), "missed": missed,
    }))
}

/// The same on a small graph: with all partitions resident, training is as with the whole graph to the bit; with a quarter,
/// every order learns, and resident negatives and resident neighbours change training.
pub fn small(bench: &Bench, epochs: &str) -> Result<Value> {
    let common = format!(
        "train facts --task link --encoder sage --layers 1 --fanout all --embeddings 16 --decoder complex --negatives 40 --chunks 4 --degree-share 0.25 --batch 200 --epochs {epochs} --optimizer adagrad --lr 0.1 --device cpu"
    );
    let train = |flags: &str| run(bench, &format!("{common} {flags} --out orders"));
    let mut rows = Vec::new();
    for order in &ORDERS {
        let name = order.name;
        let whole = train(&format!("--order {name} --partitions 8"))?;
        let all = train(&format!("--order {name} --partitions 8 --resident-only"))?;
        ensure!(
            whole["loss_digest"] == all["loss_digest"] && whole["test"] == all["test"],
            "{name}: with all partitions resident, training is not that of the whole graph"
        );
        let parts: Vec<Value> = SEEN
            .iter()
            .map(|(_, flags)| train(&format!("{} {flags}", order.flags)))
            .collect::<Result<_>>()?;
        let digests: Vec<&Value> = parts.iter().map(|part| &part["loss_digest"]).collect();
        ensure!(digests[0] != digests[1] && digests[1] != digests[2], "{name}: parts train alike");
        let mrr = parts.iter().map(|part| part["test"]["mrr"].as_f64().context("a test MRR"));
        let mrr: Vec<f64> = mrr.collect::<Result<_>>()?;
        // A random order of 400 nodes has an MRR of 0.016. With residents alone, BETA is hardly better.
        let least = if name == "beta" { 0.016 } else { 0.05 };
        ensure!(mrr[..2].iter().all(|mrr| *mrr > 0.05) && mrr[2] > least, "{name}: MRR {mrr:?}");
        let buffer = train(&format!("{} --strategy marius", order.flags))?;
        ensure!(
            buffer["loss_digest"] == *digests[2] && buffer["test"] == parts[2]["test"],
            "{name}: a partition buffer trains something else than its residents in memory"
        );
        rows.push(json!({ "order": name, "mrr": mrr, "steps": parts[0]["partition_steps"] }));
    }
    let bias = |at: usize| rows[at]["steps"]["bias"].as_f64().unwrap_or(1.0);
    ensure!(bias(2) < bias(0) && bias(2) < bias(1), "a tour has the smallest bias: {rows:#?}");
    Ok(Value::Array(rows))
}
