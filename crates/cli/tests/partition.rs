//! Partitions and the order by groups as a user meets them: made, found, killed, refused, and worth it.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

mod common;

use common::{esker, json};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

fn check_refusal(directory: &Path, words: &str, code: i32, expected: &[&str]) {
    let output = esker(directory, words).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{words}: {said}");
    expected.iter().for_each(|word| assert!(said.contains(word), "{words}: `{word}` is not in: {said}"));
}

/// A graph with communities.
fn with_graph(flags: &str) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let words = "generate g --degree 8 --dim 8 --homophily 0.95 --signal 0.5 --seed 1";
    json(directory.path(), &format!("{words} {flags}"));
    directory
}

const RUN: &str = "--device cpu --fanout 4,4 --hidden 16 --batch 50 --epochs 3 --memory 1GiB";

#[test]
fn a_partitioning_is_made_found_listed_and_verified() {
    let directory = with_graph("--nodes 5000 --classes 50 --train 0.2");
    let path = directory.path();
    let made = json(path, "partition g --partitions 40 --passes 2");
    assert_eq!((&made["name"], &made["reused"]), (&"default".into(), &false.into()));
    assert_eq!(made["passes"].as_array().unwrap().len(), 2);
    let number = |value: &Value, name: &str| value[name].as_f64().unwrap_or_else(|| panic!("{name}"));
    assert!(number(&made, "cut_share") < 0.8 && number(&made, "edges_per_second") > 0.0, "{made}");
    assert!(number(&made, "node_balance") < 1.12 && number(&made, "training_balance") < 1.12, "{made}");
    assert!(number(&made, "peak_host_bytes") <= number(&made, "smallest_host_bytes"), "{made}");
    assert_eq!(json(path, "partition g --partitions 40 --passes 2")["reused"], true);
    let info = json(path, "info g");
    let listed = &info["derived"][0];
    assert_eq!(
        (&listed["name"], &listed["request"]["partitions"], &listed["fresh"]),
        (&"partitions-default".into(), &40.into(), &true.into())
    );
    let shown = esker(path, "info g").output().unwrap();
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(shown.contains("40 by fennel") && shown.contains("edges cut"), "{shown}");
    assert_eq!(json(path, "verify g")["ok"], true);
    check_refusal(path, "partition g --partitions 41", 2, &["`default`", "--overwrite"]);
    assert_eq!(json(path, "partition g --partitions 41 --overwrite")["request"]["partitions"], 41);
    // 1000 training nodes in batches of 100: 40 partitions of 160 have two and a half.
    assert_eq!(json(path, "partition g --batch 100 --name auto")["request"]["partitions"], 160);
    let file = path.join("g/derived/partitions-auto/partitions.bin");
    let mut bytes = fs::read(&file).unwrap();
    bytes[5000] ^= 1;
    fs::write(&file, bytes).unwrap();
    check_refusal(path, "verify g", 3, &["partitions-auto", "partitions.bin"]);
    check_refusal(
        path,
        &format!("train g --order groups --group 20 --partitioning auto {RUN}"),
        1,
        &["partitions.bin", "esker partition"],
    );
}

#[test]
fn wrong_requests_are_told_what_would_be_right() {
    let directory = with_graph("--nodes 400 --classes 4");
    let path = directory.path();
    check_refusal(path, "partition g --partitions 0", 2, &["auto"]);
    check_refusal(path, "partition g --partitions 9 --group 3", 2, &["--group", "--partitions auto"]);
    check_refusal(path, "partition g --memory 1MiB", 2, &["--memory", "MiB"]);
    check_refusal(path, "partition g --name a/b", 2, &["a/b"]);
    fs::write(path.join("few"), "0\n1\n").unwrap();
    check_refusal(path, "partition g --from few", 2, &["few", "400 lines", "found 2"]);
    fs::write(path.join("odd"), "0\nx\n").unwrap();
    check_refusal(path, "partition g --from odd", 2, &["odd, line 2", "`x`"]);
    check_refusal(path, "partition g --from odd --passes 2", 2, &["--passes"]);
    check_refusal(path, "train g --group 3", 2, &["--group has no effect", "--order groups"]);
    check_refusal(path, "train g --partitioning a", 2, &["--partitioning has no effect"]);
    check_refusal(path, "train g --order groups --group 20 --partitioning a", 2, &["no partitioning `a`"]);
    check_refusal(path, "train g --order groups --group 0", 2, &["--group"]);
    assert!(!path.join("g/derived").exists(), "a refusal left something behind");
}

#[test]
fn killed_at_any_moment_the_same_command_ends_with_the_same_bytes() {
    let directory = with_graph("--nodes 300000 --classes 50 --train 0.2");
    let path = directory.path();
    let words = "partition g --partitions 200 --passes 4";
    let whole = json(path, &format!("{words} --name whole"));
    let seconds = whole["seconds"].as_f64().unwrap();
    let file =
        |name: &str| fs::read(path.join(format!("g/derived/partitions-{name}/partitions.bin"))).unwrap();
    let mut kills = 0;
    for (number, share) in [0.15, 0.3, 0.5, 0.7, 0.9].into_iter().enumerate() {
        let name = format!("killed-{number}");
        let mut command = esker(path, &format!("{words} --name {name}"));
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_secs_f64(seconds * share));
        kills += child.try_wait().unwrap().is_none() as u32;
        child.kill().ok();
        child.wait().unwrap();
        let again = json(path, &format!("{words} --name {name}"));
        assert_eq!(again["digest"], whole["digest"]);
        assert!(file(&name) == file("whole"));
    }
    assert!(kills > 0, "every command had ended before it was killed");
    assert_eq!(json(path, "verify g")["ok"], true);
}

#[test]
fn every_strategy_trains_by_groups_alike_and_partitions_are_made_where_there_are_none() {
    let directory = with_graph("--nodes 5000 --classes 50 --train 0.2");
    let path = directory.path();
    let words = format!("{RUN} --order groups --group 20 --schedule cosine:3");
    let first = esker(path, &format!("train g {words} --out memory --json")).output().unwrap();
    let said = String::from_utf8_lossy(&first.stderr).into_owned();
    assert!(first.status.success() && said.contains("no partitions yet"), "{said}");
    let first: Value = serde_json::from_slice(&first.stdout).unwrap();
    for strategy in ["mmap", "ginex", "diskgnn"] {
        let found = json(path, &format!("train g {words} --strategy {strategy} --out {strategy}"));
        assert_eq!(found["loss_digest"], first["loss_digest"], "{strategy}");
    }
    let config: Value = serde_json::from_slice(&fs::read(path.join("memory/config.json")).unwrap()).unwrap();
    assert_eq!((&config["order"], &config["group"]), (&"groups".into(), &20.into()));
    assert_eq!(config["partitioning"]["name"], "default");
    // The last step of a schedule is the last of the run.
    let batches: u64 =
        first["epochs"].as_array().unwrap().iter().map(|epoch| epoch["batches"].as_u64().unwrap()).sum();
    let steps = config["schedule"].to_string();
    assert!(steps.contains(&batches.to_string()), "{steps} {batches}");
    // The order is in the memory table.
    let plan = json(path, &format!("train g {words} --dry-run"));
    assert!(plan["memory"].to_string().contains("order by groups"), "{plan}");
    json(path, "partition g --partitions 30 --name other");
    check_refusal(path, &format!("train g {words}"), 2, &["default, other", "--partitioning NAME"]);
    let other = json(path, &format!("train g {words} --partitioning other --out other"));
    assert_ne!(other["loss_digest"], first["loss_digest"]);
    // Another partitioning under the same name is not the one that the run was started with.
    json(path, "partition g --partitions 31 --name other --overwrite");
    check_refusal(path, "train --resume --out other", 2, &["partitioning.digest"]);
}

/// Flags that leave most neighbours on disk.
const FEW: &str = "--strategy ginex --order groups --group 20 --neighbour-cache 1MiB";

#[test]
fn neighbour_caches_of_every_policy_train_alike_and_are_counted() {
    let directory = with_graph("--nodes 60000 --classes 600 --train 0.05 --out-neighbours");
    let path = directory.path();
    json(path, "partition g --batch 50 --group 20");
    for direction in ["incoming", "both"] {
        let words = format!("{RUN} --eval none --direction {direction}");
        let expected =
            json(path, &format!("train g {words} --order groups --group 20 --out {direction}-memory"));
        let mut ratios = Vec::new();
        for policy in ["ginex", "cross", "group"] {
            let out = format!("{direction}-{policy}");
            let found = json(path, &format!("train g {words} {FEW} --neighbour-policy {policy} --out {out}"));
            assert_eq!(found["loss_digest"], expected["loss_digest"], "{policy}");
            let neighbours = &found["epochs"][1]["neighbours"];
            let number = |name: &str| neighbours[name].as_f64().unwrap();
            assert_eq!(number("group_hit_ratio") > 0.0, policy == "group", "{neighbours}");
            assert_eq!(number("group_bytes_read") > 0.0, policy == "group", "{neighbours}");
            assert!(number("bytes_read") >= number("group_bytes_read"));
            ratios.push(number("hit_ratio"));
        }
        // Without a choice, groups are used.
        let found = json(path, &format!("train g {words} {FEW} --out {direction}-auto"));
        assert!(found["epochs"][1]["neighbours"]["group_hit_ratio"].as_f64().unwrap() > 0.0);
        assert!(ratios[2] > ratios[0] && ratios[2] > ratios[1], "{ratios:?}");
    }
    check_what_is_stored(path);
}

/// Neighbours by partition are listed, counted in the disk budget, made again for other partitions, and verified.
fn check_what_is_stored(path: &Path) {
    let listed = json(path, "info g");
    let of = |name: &str| {
        let all = listed["derived"].as_array().unwrap();
        all.iter()
            .find(|derived| derived["name"] == name)
            .unwrap_or_else(|| panic!("{name}: {listed}"))
            .clone()
    };
    let stored = of("adjacency-both-default");
    assert_eq!((&stored["partitioning"], &stored["fresh"]), (&"default".into(), &true.into()), "{stored}");
    let shown = esker(path, "info g").output().unwrap();
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(shown.contains("incoming neighbours") && shown.contains("partitions of `default`"), "{shown}");
    assert_eq!(json(path, "verify g")["ok"], true);
    // Its bytes are part of the disk budget.
    let words = format!("{RUN} --eval none {FEW}");
    let plan = |more: &str| json(path, &format!("train g {words} --dry-run {more}"));
    let bytes = |plan: &Value| plan["most_disk_bytes"].as_u64().unwrap_or_else(|| panic!("{plan}"));
    let (with, without) = (plan("--neighbour-policy group"), plan("--neighbour-policy cross"));
    assert!(
        bytes(&with) >= bytes(&without) + of("adjacency-in-default")["bytes"].as_u64().unwrap(),
        "{with}"
    );
    let small = format!("train g {words} --neighbour-policy group --disk-budget 100KB");
    check_refusal(path, &small, 2, &["--disk-budget", "--neighbour-policy cross"]);
    check_refusal(
        path,
        "train g --strategy ginex --neighbour-policy cross",
        2,
        &["--neighbour-policy has no effect", "--order groups"],
    );
    // Other partitions of the name: it is made again.
    json(path, "partition g --partitions 33 --overwrite");
    let shown = esker(path, "info g").output().unwrap();
    assert!(String::from_utf8_lossy(&shown.stdout).contains("its partitions are gone"));
    let flip = |name: &str| {
        let file = path.join("g/derived").join(name);
        let mut bytes = fs::read(&file).unwrap();
        bytes[5000] ^= 1;
        fs::write(&file, bytes).unwrap();
    };
    flip("adjacency-in-default/neighbours.bin");
    check_refusal(path, "verify g", 3, &["adjacency-in-default", "train again"]);
    flip("partitions-default/partitions.bin");
    check_refusal(path, "verify g", 3, &["esker partition g --name default"]);
}

#[test]
fn killed_while_neighbours_are_stored_by_partition_the_next_run_ends_with_the_same_bytes() {
    let directory = with_graph("--nodes 300000 --classes 50 --train 0.02");
    let path = directory.path();
    json(path, "partition g --partitions 1000");
    let words = "bench epoch g --no-compute --warm 0 --batches 2 --device cpu --batch 50 --fanout 4,4 --hidden 8 --memory 64MiB";
    let file = path.join("g/derived/adjacency-in-default/neighbours.bin");
    let run = format!("{words} {FEW} --neighbour-policy group --scratch {}", path.display());
    let remove = || fs::remove_dir_all(file.parent().unwrap()).unwrap();
    json(path, &run);
    let expected = fs::read(&file).unwrap();
    remove();
    let started = std::time::Instant::now();
    json(path, &run);
    let seconds = started.elapsed().as_secs_f64();
    let mut unfinished = 0;
    for number in 0..8 {
        if file.exists() {
            remove();
        }
        let mut command = esker(path, &run);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_secs_f64(seconds * (number as f64 + 0.5) / 9.0));
        child.kill().ok();
        child.wait().unwrap();
        unfinished += !file.exists() as u32;
        json(path, &run);
        assert!(fs::read(&file).unwrap() == expected, "killed the {number}. time");
    }
    assert!(unfinished > 0, "everything was stored before a kill");
    assert_eq!(json(path, "verify g")["ok"], true);
}

#[test]
fn lost_partitions_are_named_with_their_parameters_and_redundancy_is_shown() {
    let directory = with_graph("--nodes 3000 --classes 30 --train 0.2");
    let path = directory.path();
    json(path, "partition g --partitions 24 --passes 2 --name mine");
    let words = format!("{RUN} --order groups --group 20 --eval none");
    let by_groups = json(path, &format!("train g {words} --out run"));
    let shuffled = json(path, &format!("train g {RUN} --eval none --out shuffled"));
    let redundancy = |summary: &Value| summary["redundancy"].as_f64().unwrap();
    assert!(redundancy(&by_groups) < redundancy(&shuffled), "{by_groups}");
    let epoch = &shuffled["epochs"][0];
    let nodes = epoch["bytes_useful"].as_f64().unwrap() / 32.0;
    assert!((epoch["redundancy"].as_f64().unwrap() - nodes / 600.0).abs() < 1e-9, "{epoch}");
    let shown = esker(path, &format!("train g {words} --out shown")).output().unwrap();
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(shown.contains("redundancy") && shown.contains("per training node"), "{shown}");
    fs::remove_dir_all(path.join("g/derived/partitions-mine")).unwrap();
    let config = path.join("run/config.json");
    let more = fs::read_to_string(&config).unwrap().replace("\"epochs\": 3", "\"epochs\": 4");
    fs::write(&config, more).unwrap();
    fs::remove_file(path.join("run/summary.json")).unwrap();
    check_refusal(path, "train --resume --out run", 2, &["`mine`", "24 by fennel, 2 passes", "--name mine"]);
}

#[test]
fn full_batches_alone_are_trained_on_where_every_epoch_has_some() {
    // 80 training nodes in 10 groups of 2 uneven partitions: no group needs to have 10, some have.
    let directory = with_graph("--nodes 400 --classes 4 --train 0.2");
    let path = directory.path();
    let uneven: String = (0..400u64).map(|node| format!("{}\n", node * (node + 7) % 97 % 20)).collect();
    fs::write(path.join("uneven"), uneven).unwrap();
    json(path, "partition g --partitions 20 --from uneven");
    let words = "train g --device cpu --fanout 4,4 --hidden 8 --epochs 3 --eval none --drop-last --order groups --group 2";
    let found = json(path, &format!("{words} --batch 10 --out ten"));
    assert!(found["steps"].as_u64().unwrap() >= 3, "{found}");
    check_refusal(path, &format!("{words} --batch 40 --out forty"), 2, &["epoch", "batches of 40"]);
    // Later epochs repeat the first two, and so does the schedule.
    let repeated =
        format!("{RUN} --order groups --group 3 --epochs-sampled 2 --schedule linear:2 --eval none");
    let found = json(path, &format!("train g {repeated} --out repeated"));
    let config: Value =
        serde_json::from_slice(&fs::read(path.join("repeated/config.json")).unwrap()).unwrap();
    assert_eq!(config["schedule"]["steps"], found["steps"], "{}", config["schedule"]);
}
