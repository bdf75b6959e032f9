//! Numbers that no honest writer would write, and that once ended in an overflow: refused, with the file named.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

use esker_import::{ImportJob, ImportWorkspace, Request, import};
use esker_store::{Dataset, Journal, Manifest, verify};
use esker_types::{Budget, Silent};
use std::fs;
use std::path::{Path, PathBuf};

const BUDGET: Budget = Budget { host_bytes: 64 << 20 };

/// Imports a graph of these files and says why not.
fn refusal(files: &[(&str, &[u8])], request: fn(&Path) -> Request) -> String {
    let directory = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        let path = directory.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
    let target = directory.path().join("dataset");
    let job = ImportJob { target: &target, overwrite: false, budget: BUDGET, progress: &Silent };
    import(&request(directory.path()), &job).unwrap_err().to_string()
}

fn npy(descr: &str, shape: &str) -> Vec<u8> {
    let header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n");
    [b"\x93NUMPY\x01\x00", &(header.len() as u16).to_le_bytes()[..], header.as_bytes()].concat()
}

/// Two nodes and the edge between them.
fn dataset(directory: &Path) -> PathBuf {
    let (edges, target) = (directory.join("edges.csv"), directory.join("dataset"));
    fs::write(&edges, "0,1\n").unwrap();
    let request = Request { format: "csv".into(), edges: Some(edges), ..Request::default() };
    import(&request, &ImportJob { target: &target, overwrite: false, budget: BUDGET, progress: &Silent })
        .unwrap();
    target
}

#[test]
fn more_nodes_than_words_can_count_have_no_components() {
    let nodes = u64::MAX.to_string();
    let files = [("raw/edge.csv", &b"0,1\n"[..]), ("raw/num-node-list.csv", nodes.as_bytes())];
    let message = refusal(&files, |directory| Request {
        format: "ogb".into(),
        from: Some(directory.into()),
        largest_component: true,
        ..Request::default()
    });
    assert!(message.contains("--largest-component"), "{message}");
}

#[test]
fn rows_of_any_length_are_refused_where_there_are_none() {
    let (edges, features) = (npy("<i8", "(2, 0)"), npy("<f4", "(0, 9223372036854775807)"));
    let message = refusal(&[("edges.npy", &edges), ("x.npy", &features)], |directory| Request {
        format: "npy".into(),
        edges: Some(directory.join("edges.npy")),
        features: Some(directory.join("x.npy")),
        ..Request::default()
    });
    assert!(message.contains("x.npy") && message.contains("9223372036854775807"), "{message}");
}

#[test]
fn no_nodes_and_no_edges_are_a_graph() {
    let directory = tempfile::tempdir().unwrap();
    let (edges, features) = (directory.path().join("edges.npy"), directory.path().join("x.npy"));
    fs::write(&edges, npy("<i8", "(2, 0)")).unwrap();
    fs::write(&features, npy("<f4", "(0, 3)")).unwrap();
    for largest_component in [false, true] {
        let target = directory.path().join(format!("dataset-{largest_component}"));
        let request = Request {
            format: "npy".into(),
            edges: Some(edges.clone()),
            features: Some(features.clone()),
            out_neighbours: true,
            largest_component,
            ..Request::default()
        };
        let job = ImportJob { target: &target, overwrite: false, budget: BUDGET, progress: &Silent };
        assert_eq!(import(&request, &job).unwrap().nodes.count, 0);
        assert!(verify(&target, 1, &Silent).unwrap().damage.is_empty());
    }
}

#[test]
fn nothing_that_fills_all_memory_is_held() {
    let directory = tempfile::tempdir().unwrap();
    let (journal, _) = Journal::open(directory.path(), "test").unwrap();
    let directory = directory.path().to_path_buf();
    let mut workspace = ImportWorkspace { directory, budget: BUDGET, journal: &journal, progress: &Silent };
    assert!(workspace.hold("everything", u64::MAX).unwrap_err().to_string().contains("everything"));
}

#[test]
fn a_manifest_that_counts_every_node_there_could_be_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = dataset(directory.path());
    let mut manifest: Manifest = Dataset::open(&path).unwrap().manifest().clone();
    manifest.nodes.count = u64::MAX;
    fs::write(path.join("esker.json"), manifest.complete().to_text()).unwrap();
    let message = Dataset::open(&path).unwrap_err().to_string();
    assert!(message.contains("esker.json") && message.contains(&u64::MAX.to_string()), "{message}");
}

#[test]
fn a_manifest_whose_files_are_longer_than_words_can_count_has_a_size() {
    let directory = tempfile::tempdir().unwrap();
    let mut manifest = Dataset::open(&dataset(directory.path())).unwrap().manifest().clone();
    manifest.files.iter_mut().for_each(|entry| entry.bytes = u64::MAX);
    assert_eq!(manifest.bytes(), u64::MAX);
}

#[test]
fn derived_data_names_no_file_outside_its_directory() {
    let directory = tempfile::tempdir().unwrap();
    let dataset = Dataset::open(&dataset(directory.path())).unwrap();
    let mut entry = dataset.manifest().entry("in-offsets").unwrap().clone();
    entry.name = "../../in-offsets".into();
    let staging = dataset.derive("outside").unwrap();
    let published = staging.publish_derived(&dataset, "test", serde_json::Value::Null, vec![entry]);
    let message = published.unwrap_err().to_string();
    assert!(message.contains("derived.json") && message.contains("../../in-offsets"), "{message}");
}
