//! How many rows `diskgnn` caches, as a user meets it: as many as what batches read leaves room for.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

mod common;

use common::{json, npy};
use esker_types::random::{Key, below};
use serde_json::Value;
use std::fmt::Write;
use std::fs;
use std::path::Path;

const POPULAR: u64 = 1500;
const LONELY: u64 = 600;
const OWN: u64 = 20;

/// 16 200 training nodes with neighbours among 1500 popular nodes, and 600 with 20 neighbours of their own each, if
/// `is_uneven`; 300 training nodes a partition. A batch of the latter reads 6300 rows that no other batch reads.
fn with_graph(is_uneven: bool) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    let (usual, lonely, key) = (16_200, if is_uneven { LONELY } else { 0 }, Key::new(1));
    let (popular, own) = (usual + lonely, usual + lonely + POPULAR);
    let nodes = own + LONELY * OWN;
    let of_usual =
        (0..usual * 8).map(|edge| (popular + below(key.at(edge), POPULAR), edge / 8)).collect::<Vec<_>>();
    let of_lonely = (0..lonely * OWN).map(|edge| (own + edge, usual + edge / OWN));
    let edges: Vec<(u64, u64)> = of_usual.into_iter().chain(of_lonely).collect();
    let integers = |name: &str, shape: String, values: Vec<u64>| {
        npy(
            &at.join(name),
            "<i8",
            &shape,
            &values.into_iter().flat_map(u64::to_le_bytes).collect::<Vec<_>>(),
        );
    };
    let ends = edges.iter().map(|edge| edge.0).chain(edges.iter().map(|edge| edge.1)).collect();
    integers("edges.npy", format!("(2, {})", edges.len()), ends);
    integers("labels.npy", format!("({nodes},)"), (0..nodes).map(|node| node % 4).collect());
    integers("train.npy", format!("({popular},)"), (0..popular).collect());
    let features: Vec<u8> =
        (0..nodes * 1024).flat_map(|at| (at as f32 * 0.001).sin().to_le_bytes()).collect();
    npy(&at.join("features.npy"), "<f4", &format!("({nodes}, 1024)"), &features);
    let mut partitions = String::new();
    for node in 0..nodes {
        let partition = if node < popular { node / 300 } else { node % (popular / 300) };
        writeln!(partitions, "{partition}").unwrap();
    }
    fs::write(at.join("partitions.txt"), partitions).unwrap();
    let words = "import g --format npy --edges edges.npy --features features.npy --labels labels.npy --train train.npy";
    json(at, words);
    json(at, "partition g --from partitions.txt");
    directory
}

const JOB: &str =
    "--batch 300 --fanout 20 --layers 1 --hidden 8 --epochs 2 --eval none --device cpu --threads 2";

/// How often rows were counted, and what was packed.
fn prepared(at: &Path, order: &str) -> (usize, Value) {
    let found = json(at, &format!("prepare g {JOB} --memory 90MiB --order {order}"));
    let stages = found["stages"].as_array().unwrap();
    let counted = stages.iter().filter(|stage| stage["name"] == "count rows").count();
    (counted, found["packed"]["packing"].clone())
}

fn check_losses(at: &Path, order: &str) {
    let run = format!("train g {JOB} --final-eval none --order {order}");
    let found = json(at, &format!("{run} --strategy diskgnn --memory 90MiB --out packed"));
    let twin = json(at, &format!("{run} --strategy memory --out twin"));
    assert_eq!(found["loss_digest"], twin["loss_digest"]);
    let (peak, promised) =
        (found["peak_host_bytes"].as_u64().unwrap(), found["budget_host_bytes"].as_u64().unwrap());
    assert!(peak <= promised, "{peak} of {promised} bytes");
}

#[test]
fn batches_that_read_alike_leave_memory_to_cached_rows() {
    let directory = with_graph(false);
    let (counted, packing) = prepared(directory.path(), "shuffled");
    assert_eq!(counted, 1);
    let most = |key: &str| packing["largest"][key].as_u64().unwrap();
    let misses = packing["misses"].as_u64().unwrap() * most("nodes") / packing["accesses"].as_u64().unwrap();
    assert!(misses > 0 && most("packed_rows") <= 2 * misses + most("nodes") / 32 + 64, "{packing:#}");
    check_losses(directory.path(), "shuffled");
}

#[test]
fn a_batch_that_reads_far_more_than_others_has_room() {
    let directory = with_graph(true);
    let (counted, packing) = prepared(directory.path(), "groups --group 1");
    assert_eq!(counted, 2, "laid out once more, for the worst case");
    assert_eq!(packing["largest"]["packed_rows"], LONELY / 2 * (OWN + 1));
    let (counted, again) = prepared(directory.path(), "groups --group 1");
    assert_eq!((counted, &again), (0, &packing), "what was packed is used");
    check_losses(directory.path(), "groups --group 1");
}
