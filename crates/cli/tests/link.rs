//! Link prediction as a user meets it: what is predicted agrees with itself, and what cannot be is refused by name.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

mod common;

use common::{esker, json};
use serde_json::Value;
use std::fmt::Write;
use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::Stdio;

const FLAGS: &str =
    "--task link --negatives 8 --chunks 2 --batch 20 --epochs 2 --optimizer adagrad --lr 0.1 --device cpu";

/// 30 nodes; relation `r` leads to the node `r + 1` further.
fn with_facts() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let mut texts = [String::new(), String::new(), String::new()];
    for node in 0..30 {
        for relation in 0..3 {
            let split = [0, 0, 0, 0, 1, 0, 0, 2][(node * 3 + relation) % 8];
            writeln!(texts[split], "n{node}\tr{relation}\tn{}", (node + relation + 1) % 30).unwrap();
        }
    }
    let folder = directory.path().join("triples");
    fs::create_dir(&folder).unwrap();
    for (name, text) in ["train", "valid", "test"].iter().zip(&texts) {
        fs::write(folder.join(format!("{name}.txt")), text).unwrap();
    }
    json(directory.path(), "import facts --format triples --from triples");
    json(directory.path(), &format!("train facts {FLAGS} --encoder none --embeddings 8 --out run"));
    directory
}

fn check_refusal(at: &Path, words: &str, said: &[&str]) {
    let output = esker(at, words).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{words} succeeded");
    assert!(said.iter().all(|part| text.contains(part)) && !text.contains("panicked"), "{words}: {text}");
}

#[test]
fn the_best_targets_have_the_scores_of_their_edges() {
    let directory = with_facts();
    let at = directory.path();
    let best = json(at, "predict run --source n4 --relation r1 --top 30");
    let best = best["best"].as_array().unwrap();
    assert_eq!(best.len(), 30);
    let scores: Vec<f64> = best.iter().map(|found| found["score"].as_f64().unwrap()).collect();
    assert!(scores.is_sorted_by(|a, b| a >= b), "{scores:?}");
    let mut text = String::new();
    for found in best {
        writeln!(text, "n4\tr1\t{}", found["node"].as_str().unwrap()).unwrap();
    }
    fs::write(at.join("edges.tsv"), text).unwrap();
    json(at, "predict run --edges edges.tsv --out scores.tsv");
    let written = fs::read_to_string(at.join("scores.tsv")).unwrap();
    for (line, expected) in written.lines().zip(&scores) {
        let score: f32 = line.rsplit('\t').next().unwrap().parse().unwrap();
        assert_eq!(score, *expected as f32, "{line}");
    }
    assert_eq!(written.lines().count(), 30);
}

#[test]
fn scores_of_many_edges_are_written_in_their_order() {
    let directory = with_facts();
    let at = directory.path();
    let edge = |index: usize| format!("n{}\tr{}\tn{}", index % 30, index % 3, index % 7);
    // More than are read at a time, with an empty line among them.
    let count = 66_000;
    let text: Vec<String> = (0..count).map(edge).collect();
    fs::write(at.join("edges.tsv"), format!("{}\n\n{}\n", text[0], text[1..].join("\n"))).unwrap();
    assert_eq!(json(at, "predict run --edges edges.tsv --out scores.tsv")["edges"], count);
    let written = fs::read_to_string(at.join("scores.tsv")).unwrap();
    let lines: Vec<&str> = written.lines().collect();
    assert_eq!(lines.len(), count);
    for (index, line) in lines.iter().enumerate() {
        assert!(line.starts_with(&format!("{}\t", edge(index))), "{index}: {line}");
        assert_eq!(line, &lines[index % 210]);
    }
    json(at, "predict run --edges edges.tsv --out scores.npy");
    let bytes = fs::read(at.join("scores.npy")).unwrap();
    let numbers = bytes[bytes.len() - count * 4..].chunks_exact(4);
    for (line, number) in lines.iter().zip(numbers) {
        let score = f32::from_le_bytes(number.try_into().unwrap());
        assert_eq!(line.rsplit('\t').next().unwrap().parse::<f32>().unwrap(), score);
    }
}

#[test]
fn nodes_that_no_training_edge_has_are_reported() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    fs::create_dir(at.join("triples")).unwrap();
    let texts =
        [("train", "a\tr\tb\nb\tr\tc\nc\tr\ta\n"), ("valid", "a\tr\tc\n"), ("test", "a\tr\td\ne\tr\td\n")];
    for (name, text) in texts {
        fs::write(at.join(format!("triples/{name}.txt")), text).unwrap();
    }
    json(at, "import facts --format triples --from triples");
    let summary = json(at, &format!("train facts {FLAGS} --encoder none --embeddings 4 --out run"));
    assert_eq!((&summary["valid"]["unseen_nodes"], &summary["test"]["unseen_nodes"]), (&0.into(), &2.into()));
    assert_eq!(json(at, "eval run --split test")["ranks"]["unseen_nodes"], 2);
}

#[test]
fn edges_of_a_pipe_are_read_once() {
    let directory = with_facts();
    let at = directory.path();
    let predict = |out: &str, text: String| {
        let mut child = esker(at, &format!("predict run --edges /dev/stdin --out {out}"))
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // A program that refuses its input does not read all of it.
        let _ = child.stdin.take().unwrap().write_all(text.as_bytes());
        let output = child.wait_with_output().unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let lines = |count: usize| "n4\tr1\tn5\nn7\tr0\tn8\n".repeat(count / 2);
    let (done, said) = predict("few.npy", lines(6));
    assert!(done, "{said}");
    fs::write(at.join("edges.tsv"), lines(6)).unwrap();
    json(at, "predict run --edges edges.tsv --out same.npy");
    assert_eq!(fs::read(at.join("few.npy")).unwrap(), fs::read(at.join("same.npy")).unwrap());
    let (done, said) = predict("many.npy", lines(70_000));
    assert!(!done && said.contains("/dev/stdin") && said.contains(".tsv"), "{said}");
    assert!(!at.join("many.npy").exists());
    let (done, said) = predict("many.tsv", lines(70_000));
    assert!(done && fs::read_to_string(at.join("many.tsv")).unwrap().lines().count() == 70_000, "{said}");
}

#[test]
fn evaluation_again_gives_the_summary_and_ties_only_reorder_equal_scores() {
    let directory = with_facts();
    let at = directory.path();
    let summary: Value =
        serde_json::from_str(&fs::read_to_string(at.join("run/summary.json")).unwrap()).unwrap();
    let unseen = |value: &Value| value["unseen_nodes"].as_u64().unwrap();
    let of_info = json(at, "info facts")["held_out"]["test"].clone();
    assert_eq!(unseen(&summary["test"]), unseen(&of_info));
    let mrr = |flags: &str| {
        let found = json(at, &format!("eval run --split test{flags}"));
        assert!(unseen(&found["metrics"]) == unseen(&of_info) && unseen(&found["ranks"]) == unseen(&of_info));
        found["metrics"]["mrr"].as_f64().unwrap()
    };
    let [realistic, optimistic, pessimistic] = ["", " --ties optimistic", " --ties pessimistic"].map(mrr);
    assert_eq!(realistic, summary["test"]["mrr"].as_f64().unwrap());
    assert!(pessimistic <= realistic && realistic <= optimistic);
}

#[test]
fn links_keep_within_the_smallest_memory() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    json(at, "generate facts --preset freebase86m --scale 0.0004");
    let flags = "--task link --encoder none --embeddings 32 --decoder complex --negatives 20 --chunks 4 --batch 20000 --epochs 1 --optimizer adagrad --lr 0.1 --device cpu";
    for ranks in ["", " --candidate-block 20000", " --candidates 2000"] {
        let dry = json(at, &format!("train facts {flags}{ranks} --memory 4GiB --dry-run"));
        let smallest = dry["smallest_host_bytes"].as_u64().unwrap();
        let out = format!("run{}", ranks.len());
        let found = json(at, &format!("train facts {flags}{ranks} --memory {smallest}B --out {out}"));
        let peak = found["peak_host_bytes"].as_u64().unwrap();
        assert!(peak <= smallest, "{ranks}: {peak} of {smallest}");
    }
}

#[test]
fn flags_of_links_that_change_nothing_are_refused() {
    let directory = with_facts();
    let at = directory.path();
    let base =
        "train facts --task link --batch 20 --epochs 1 --optimizer adagrad --lr 0.1 --device cpu --out r";
    let rows = "--encoder none --embeddings 8";
    let cases = [
        (rows, "--eval none --final-eval none --schedule plateau:0.5,1", "--schedule plateau", "--eval"),
        (rows, "--negatives all --chunks 4", "--chunks", "--negatives all"),
        (rows, "--negatives all --degree-share 0.5", "--degree-share", "--negatives all"),
        (rows, "--loss softmax --margin 6", "--margin", "--loss softmax"),
        (rows, "--loss margin --temperature 1", "--temperature", "--loss margin"),
        (rows, "--decoder distmult --distance l1", "--distance", "--decoder transe"),
        (rows, "--decoder dot --relation-dropout 0.1", "--relation-dropout", "--decoder dot"),
        (rows, "--decoder dot --inverse-relations", "--inverse-relations", "--decoder dot"),
        (rows, "--decoder dot --init-relations ones", "--init-relations", "--decoder dot"),
        (rows, "--target-edges keep", "--target-edges", "neighbours"),
        ("--encoder sage --layers 1", "--init normal:0.1", "--init", "--embeddings"),
        (rows, "--schedule plateau:0.95,-3", "plateau:0.95,-3", "whole number"),
        (rows, "--schedule step:2.5,0.1", "step:2.5,0.1", "whole number"),
    ];
    for (rows, flags, flag, with) in cases {
        check_refusal(at, &format!("{base} {rows} {flags}"), &[flag, with]);
    }
    // The same flags count elsewhere.
    for flags in [
        "--schedule plateau:0.5,1",
        "--negatives 4 --chunks 2 --degree-share 0.5",
        "--loss self-adversarial --margin 6 --temperature 1",
        "--decoder rotate --margin 6 --loss softmax --relation-dropout 0.1 --inverse-relations",
        "--decoder transe --distance l1 --init-relations ones",
        "--decoder rotate --n3 0.01",
    ] {
        json(at, &format!("{base} {rows} {flags} --dry-run"));
    }
}

#[test]
fn settings_of_an_optimizer_are_those_of_embeddings_if_they_have_the_same() {
    let directory = with_facts();
    let at = directory.path();
    let base = "train facts --task link --batch 20 --epochs 1 --negatives 4 --chunks 2 --encoder sage --layers 1 --hidden 8 --embeddings 8 --lr 0.1 --device cpu";
    let optimizer = |flags: &str, out: &str| {
        json(at, &format!("{base} {flags} --out {out}"));
        let text = fs::read_to_string(at.join(out).join("config.json")).unwrap();
        let config: Value = serde_json::from_str(&text).unwrap();
        json(at, &format!("train --resume --out {out}"));
        config["embeddings"]["optimizer"].clone()
    };
    let found = optimizer("--optimizer sgd --momentum 0.9 --nesterov --embedding-optimizer adagrad", "a");
    assert_eq!((&found["kind"], found["momentum"].as_f64()), (&Value::from("adagrad"), Some(0.0)));
    let found = optimizer("--optimizer adam --epsilon 0.001 --embedding-optimizer adam", "b");
    assert_eq!(found["epsilon"].as_f64().map(|value| value as f32), Some(0.001));
    let found = optimizer("--optimizer adam --epsilon 0.001 --embedding-optimizer adagrad", "c");
    assert!(found["epsilon"].is_null());
}

#[test]
fn what_cannot_be_learned_or_predicted_is_refused_by_name() {
    let directory = with_facts();
    let at = directory.path();
    fs::write(at.join("node.tsv"), "n4\tr1\tn99\n").unwrap();
    fs::write(at.join("relation.tsv"), "n4\tr9\tn5\n").unwrap();
    check_refusal(at, "predict run --edges node.tsv --out s.tsv", &["no node `n99`"]);
    check_refusal(at, "predict run --edges relation.tsv --out s.tsv", &["no relation `r9`"]);
    fs::write(at.join("pair.tsv"), "n4\tr1\tn5\nn4\tn5\n").unwrap();
    check_refusal(at, "predict run --edges pair.tsv --out s.tsv", &["line 2", "no relation", "has 3"]);
    // The file to write is checked before the one to read.
    check_refusal(at, "predict run --edges missing.tsv --out s.parquet", &["s.parquet", ".tsv"]);
    check_refusal(at, "predict run --source n99 --relation r1", &["no node `n99`"]);
    check_refusal(at, "predict run --source n4", &["--relation"]);
    check_refusal(at, "predict run --source n4 --relation r9", &["no relation `r9`"]);
    check_refusal(
        at,
        &format!("train facts {FLAGS} --encoder none --decoder complex --embeddings 7 --out odd"),
        &["complex", "7"],
    );
    check_refusal(
        at,
        &format!("train facts {FLAGS} --encoder none --decoder rotate --embeddings 7 --out odd"),
        &["rotate", "7"],
    );
    check_refusal(at, &format!("train facts {FLAGS} --embeddings 8 --encoder rgcn --out r"), &["R-GCN"]);
    // A checkpoint of another d.
    check_refusal(
        at,
        &format!("train facts {FLAGS} --encoder none --embeddings 16 --out run --resume"),
        &["16", "8"],
    );
    json(at, "generate g --nodes 100 --degree 4 --dim 4 --classes 2");
    check_refusal(at, "train g --task link --embeddings 8 --encoder none --out none", &["--hold-out"]);
    check_refusal(
        at,
        &format!("train facts {FLAGS} --encoder none --embeddings 8 --init normal:1e20 --out nan"),
        &["loss"],
    );
}

#[test]
fn links_are_trained_in_steps_over_partitions() {
    let directory = with_facts();
    let at = directory.path();
    let common = format!("train facts {FLAGS} --encoder none --embeddings 8");
    let tour = "--order tour --partitions 6 --resident 4 --resident-only";
    let found = json(at, &format!("{common} {tour} --out steps"));
    let steps = &found["partition_steps"];
    assert_eq!(
        ["partitions", "resident", "logical", "steps", "swaps"].map(|name| steps[name].as_u64().unwrap()),
        [6, 4, 3, 3, 4]
    );
    assert!(steps["bias"].as_f64().is_some_and(|bias| bias > 0.0 && bias <= 1.0), "{steps}");
    // A file says the same.
    let keys = format!(
        "dataset = \"facts\"\ntask = \"link\"\nencoder = \"none\"\nembeddings = 8\norder = \"tour\"\npartitions = 6\nresident = 4\nresident-only = \"all\"\n{}",
        "negatives = 8\nchunks = 2\nbatch = 20\nepochs = 2\noptimizer = \"adagrad\"\nlr = 0.1\ndevice = \"cpu\"\n"
    );
    fs::write(at.join("steps.toml"), keys).unwrap();
    assert_eq!(json(at, "train steps.toml --out again")["loss_digest"], found["loss_digest"]);
    // With all partitions resident, residents are all nodes.
    let [whole, all] = ["", "--resident-only"].map(|seen| {
        let out = if seen.is_empty() { "whole" } else { "all" };
        json(
            at,
            format!("{common} --order beta --partitions 6 {seen} --out {out}").replace("  ", " ").as_str(),
        )
    });
    assert_eq!((&whole["loss_digest"], &whole["test"]), (&all["loss_digest"], &all["test"]));
    for (flags, said) in [
        ("--partitions 4", &["--partitions has no effect with --order shuffled", "two-level-beta"][..]),
        ("--resident-only", &["--resident-only has no effect"]),
        ("--order tour", &["--partitions 32 --resident 8"]),
        ("--order tour --partitions 8 --resident 4", &["odd number", "found 4", "--logical 3 or 5"]),
        ("--order two-level-beta --partitions 9 --resident 4 --logical 4", &["multiple of --logical"]),
        (
            "--order two-level-beta --partitions 8 --resident 3 --logical 4",
            &["make --resident a multiple of 2"],
        ),
        ("--order beta --partitions 40 --resident 8", &["40 node partitions", "from 1 to 30"]),
        ("--order beta --partitions 8 --resident 1", &["give --resident 2 or more"]),
        ("--order dispersed --partitions 8 --resident 4", &["task is links", "two-level-beta"]),
        ("--order tour --partitions 6 --resident 4 --group 3", &["--group has no effect with --order tour"]),
        ("--order tour --partitions 6 --resident 4 --resident-only some", &["some", "negatives"]),
    ] {
        check_refusal(at, &format!("{common} {flags} --out refused"), said);
    }
    let all = common.replace("--negatives 8 --chunks 2", "--negatives all");
    check_refusal(
        at,
        &format!("{all} {tour} --out refused"),
        &["every node is a negative", "give --negatives N"],
    );
}

#[test]
fn training_nodes_come_first_where_they_fit() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    json(at, "generate g --nodes 1000 --degree 5 --dim 8 --classes 3 --train 0.2");
    let train = |flags: &str, out: &str| {
        let words =
            format!("train g --layers 1 --hidden 8 --fanout 5 --batch 50 --epochs 1 {flags} --out {out}");
        json(at, &words)["partition_steps"].clone()
    };
    let first = train("--order training-first --partitions 10 --resident 4 --resident-only", "first");
    assert_eq!((&first["steps"], &first["swaps"], &first["logical"]), (&1.into(), &0.into(), &10.into()));
    // 200 of 1000 nodes fill two partitions of ten.
    let dispersed = train("--order training-first --partitions 10 --resident 2", "dispersed");
    assert_eq!((&dispersed["steps"], &dispersed["logical"]), (&5.into(), &5.into()));
    let text = fs::read_to_string(at.join("dispersed/config.json")).unwrap();
    assert_eq!(serde_json::from_str::<Value>(&text).unwrap()["order"], "dispersed");
    check_refusal(
        at,
        "train g --order two-level-beta --partitions 8 --resident 4 --out refused",
        &["task is node labels", "dispersed or training-first"],
    );
    check_refusal(
        at,
        "train g --order dispersed --partitions 8 --resident 4 --resident-only negatives --out refused",
        &["negatives is for links"],
    );
}
