//! GCN trained on sampled neighbours. Each model is evaluated with sampled and with all neighbours, for each weighting
//! of sampled neighbours, and compared with training on all neighbours.

use super::accuracy::{COAUTHOR, PLANETOID, WORDNET, import};
use super::{Bench, ROUNDS};
use anyhow::{Context, Result, ensure};
use esker_types::median;
use serde_json::{Value, json};
use std::collections::HashMap;

/// A dataset and its training flags, except model and fan-out.
struct Case {
    dataset: &'static str,
    import: &'static str,
    train: &'static str,
}

const CASES: &[Case] = &[
    Case {
        dataset: "coauthor_cs",
        import: COAUTHOR,
        train: "--layers 2 --hidden 64 --dropout 0.5 --lr 0.01 --epochs 60 --eval-every 20",
    },
    Case {
        dataset: "wordnet-synsets",
        import: WORDNET,
        train: "--layers 2 --hidden 128 --dropout 0.2 --lr 0.01 --epochs 8 --eval-every 2",
    },
    Case {
        dataset: "pubmed",
        import: PLANETOID,
        train: "--layers 2 --hidden 16 --dropout 0.5 --lr 0.01 --weight-decay 5e-4 --epochs 200 --eval-every 5",
    },
];

const FANOUTS: &[&str] = &["2,2", "5,5"];
const DEGREES: [&str; 3] = ["unbiased", "whole", "sampled"];

/// A model of a case: its name, its `--gcn-degree`, its fan-out; `-` if it has none.
type Arm = [&'static str; 3];

/// Accuracies of one model in percent.
#[derive(Clone, Copy)]
struct Accuracies {
    sampled: f64,
    full: f64,
}

/// Trains once on the dataset `real` and evaluates the best model in both ways.
fn evaluate(bench: &Bench, case: &Case, [model, degree, fanout]: Arm, seed: u64) -> Result<Accuracies> {
    let seed = seed.to_string();
    let mut words =
        vec!["train", "real", "--out", "run", "--device", "cpu", "--seed", &seed, "--model", model];
    for (flag, value) in [("--gcn-degree", degree), ("--fanout", fanout)] {
        if value != "-" {
            words.extend([flag, value]);
        }
    }
    words.extend(["--eval", "sampled", "--final-eval", "sampled"]);
    words.extend(case.train.split(' '));
    bench.json(&words)?;
    let accuracy = |mode: &str| -> Result<f64> {
        let found = bench.json(&["eval", "run", "--mode", mode])?;
        Ok(found["metrics"]["accuracy"].as_f64().context("a test accuracy")? * 100.0)
    };
    let found = Accuracies { sampled: accuracy("sampled")?, full: accuracy("full")? };
    std::fs::remove_dir_all(bench.path("run"))?;
    Ok(found)
}

/// Every arm of a case with random seeds from 1 on: medians, and the results of each run.
fn compare(bench: &Bench, case: &Case, arms: &[Arm], data: &str, seeds: u64) -> Result<Vec<Value>> {
    let mut runs: HashMap<Arm, Vec<Accuracies>> = HashMap::new();
    for seed in 1..=seeds {
        if seed == 1 || case.import.contains("SEED") {
            import(bench, case.import, case.dataset, data, seed)?;
        }
        for arm in arms {
            runs.entry(*arm).or_default().push(evaluate(bench, case, *arm, seed)?);
        }
    }
    let row = |arm: &Arm| {
        let [model, degree, fanout] = *arm;
        let of = |part: fn(&Accuracies) -> f64| runs[arm].iter().map(part).collect::<Vec<f64>>();
        let (sampled, full) = (of(|found| found.sampled), of(|found| found.full));
        let (in_sample, in_full) = (median(&sampled), median(&full));
        println!(
            "{:16} {model:4} {degree:8} {fanout:4} sampled {in_sample:.1}, full {in_full:.1}",
            case.dataset
        );
        json!({
            "dataset": case.dataset, "model": model, "gcn_degree": degree, "fanout": fanout, "train": case.train,
            "sampled": in_sample, "full": in_full, "runs": { "sampled": sampled, "full": full },
        })
    };
    Ok(arms.iter().map(row).collect())
}

fn full_accuracy(rows: &[Value], dataset: &str, [model, degree, fanout]: Arm) -> Result<f64> {
    let is = |row: &&Value| {
        row["dataset"] == dataset
            && row["model"] == model
            && row["gcn_degree"] == degree
            && row["fanout"] == fanout
    };
    rows.iter().find(is).and_then(|row| row["full"].as_f64()).context("a row of this model")
}

/// One random seed and one fan-out on one dataset; `None` if the datasets are missing.
pub fn sampled_is_near_full(bench: &Bench) -> Result<Option<Value>> {
    let Some(data) = crate::real_data() else { return Ok(None) };
    let data = data.to_str().context("the path of the datasets is not text")?;
    let arms = [["gcn", "unbiased", "2,2"], ["gcn", "-", "all"]];
    let rows = compare(bench, &CASES[2], &arms, data, 1)?;
    let [sampled, all] = arms.map(|arm| full_accuracy(&rows, "pubmed", arm));
    let (sampled, all) = (sampled?, all?);
    ensure!(
        sampled > all - 2.0,
        "two neighbours a node reach {sampled:.1}% in full, all neighbours {all:.1}%"
    );
    Ok(Some(rows.into()))
}

pub(super) fn full(bench: &Bench) -> Result<Value> {
    let data = crate::real_data().context("the real datasets are not beside the checkout")?;
    let data = data.to_str().context("the path of the datasets is not text")?;
    let mut rows = Vec::new();
    for case in CASES {
        let mut arms: Vec<Arm> = vec![["gcn", "-", "all"], ["mlp", "-", "-"]];
        for fanout in FANOUTS {
            arms.push(["sage", "-", fanout]);
            arms.extend(DEGREES.iter().map(|degree| ["gcn", degree, fanout]));
        }
        rows.extend(compare(bench, case, &arms, data, ROUNDS as u64)?);
        for fanout in FANOUTS {
            let [unbiased, whole, sampled] =
                DEGREES.map(|degree| full_accuracy(&rows, case.dataset, ["gcn", degree, fanout]));
            let (unbiased, others) = (unbiased?, whole?.max(sampled?));
            ensure!(
                unbiased >= others - 0.5,
                "{} by {fanout}: {unbiased:.1}% in full, {others:.1}% with the other sums",
                case.dataset
            );
        }
    }
    Ok(rows.into())
}
