//! Imports the real datasets beside the checkout and compares the result with the sizes their authors published.
//! Where the data is absent, each test says so and passes. deezer_europe is left out: its features are 3.5 GB when
//! dense; the format's own tests read it.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

use esker_import::{ImportJob, Request, import};
use esker_types::{Budget, Silent};
use std::path::Path;

/// Nodes, directed edges, feature columns, classes, and the sizes of the three splits.
type Sizes = (u64, u64, u64, u64, [u64; 3]);

fn check(format: &str, path: &str, name: Option<&str>, expected: Sizes) {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data").join(path);
    if !from.exists() {
        println!("skipped: {} is not here", from.display());
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let request = Request {
        format: format.to_string(),
        from: Some(from),
        name: name.map(str::to_string),
        ..Request::default()
    };
    let job = ImportJob {
        target: &directory.path().join("dataset"),
        overwrite: false,
        budget: Budget { host_bytes: 192 << 20 },
        progress: &Silent,
    };
    let manifest = import(&request, &job).unwrap();
    let splits = manifest.splits.map_or([0; 3], |splits| [splits.train, splits.valid, splits.test]);
    let (features, labels) = (manifest.nodes.features.unwrap(), manifest.nodes.labels.unwrap());
    let found = (manifest.nodes.count, manifest.edges.count, features.dim, labels.classes, splits);
    assert_eq!(found, expected, "{path}");
}

#[test]
fn cora() {
    check("planetoid", "cora", Some("cora"), (2_708, 10_556, 1_433, 7, [140, 500, 1_000]));
}

#[test]
fn citeseer() {
    check("planetoid", "citeseer", Some("citeseer"), (3_327, 9_104, 3_703, 6, [120, 500, 1_000]));
}

#[test]
fn pubmed() {
    check("planetoid", "pubmed", Some("pubmed"), (19_717, 88_648, 500, 3, [60, 500, 1_000]));
}

#[test]
fn amazon_computers() {
    check("gnn-npz", "amazon_computers/amazon_cs.npz", None, (13_752, 491_722, 767, 10, [0; 3]));
}

#[test]
fn coauthor_cs() {
    check("gnn-npz", "coauthor_cs/coauthor_cs.npz", None, (18_333, 163_788, 6_805, 15, [0; 3]));
}

#[test]
fn tolokers() {
    let splits = [5_879, 2_939, 2_940];
    check("masked-npz", "tolokers/tolokers.npz", None, (11_758, 1_038_000, 10, 2, splits));
}
