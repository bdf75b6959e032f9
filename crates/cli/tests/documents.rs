//! Runs every command of the documents, as a reader would, in a directory with small stand-ins for their files.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

use std::fs;
use std::path::Path;
use std::process::Command;

fn npy(path: &Path, descr: &str, shape: &str, data: &[u8]) {
    let header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n");
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    fs::write(path, bytes).unwrap();
}

fn integers(path: &Path, shape: &str, values: impl IntoIterator<Item = i64>) {
    npy(path, "<i8", shape, &values.into_iter().flat_map(i64::to_le_bytes).collect::<Vec<_>>());
}

/// The files that the documents' commands read: a ring of ten nodes in several dresses.
fn prepare(directory: &Path) {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../import/tests/fixtures");
    ["data/cora", "disk1", "disk2"].iter().for_each(|name| fs::create_dir_all(directory.join(name)).unwrap());
    for file in fs::read_dir(fixtures.join("planetoid")).unwrap() {
        let path = file.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().replace("tiny", "cora");
        fs::copy(&path, directory.join("data/cora").join(name)).unwrap();
    }
    fs::copy(fixtures.join("gnn.npz"), directory.join("data/products.npz")).unwrap();
    let facts = directory.join("data/fb15k-237");
    fs::create_dir_all(&facts).unwrap();
    fs::write(facts.join("train.txt"), "a\tlikes\tb\nb\tknows\tc\nc\tlikes\ta\n").unwrap();
    fs::write(facts.join("valid.txt"), "a\tknows\tc\n").unwrap();
    fs::write(facts.join("test.txt"), "b\tlikes\ta\n").unwrap();
    let at = |name: &str| directory.join(name);
    integers(&at("edges.npy"), "(2, 10)", (0..10).chain((0..10).map(|node| (node + 1) % 10)));
    integers(&at("times.npy"), "(10,)", (0..10).map(|edge| edge * 7 % 10));
    let weights: Vec<u8> = (0..10).flat_map(|edge| (edge as f32 / 4.0).to_le_bytes()).collect();
    npy(&at("weights.npy"), "<f4", "(10,)", &weights);
    integers(&at("labels.npy"), "(10,)", (0..10).map(|node| node % 2));
    integers(&at("train.npy"), "(4,)", 0..4);
    integers(&at("valid.npy"), "(3,)", 4..7);
    integers(&at("test.npy"), "(3,)", 7..10);
    integers(&at("indptr.npy"), "(11,)", 0..11);
    integers(&at("indices.npy"), "(10,)", (0..10).map(|node| (node + 9) % 10));
    let features: Vec<u8> = (0..40).flat_map(|value| (value as f32 / 7.0).to_le_bytes()).collect();
    npy(&at("features.npy"), "<f4", "(10, 4)", &features);
    fs::write(at("run.toml"), shown_file("docs/train.md", "run.toml")).unwrap();
    fs::write(at("links.csv"), "source,target\n0,1\n1,2\n2,0\n").unwrap();
    fs::write(
        at("words.tsv"),
        "src\tdst\trelation\ncat\tanimal\tis-a\ndog\tanimal\tis-a\ncat\tmouse\teats\n",
    )
    .unwrap();
}

/// A file that a document shows, as it stands there.
fn shown_file(document: &str, name: &str) -> String {
    let text = fs::read_to_string(xtask::root().join(document)).unwrap();
    let (_, behind) = text.split_once(&format!("file={name}\n")).expect("the document shows the file");
    behind.split_once("```").expect("the block ends").0.to_string()
}

fn run(words: &str, directory: &Path) -> Result<(), String> {
    let mut words = words.split_whitespace();
    assert_eq!(words.next(), Some("esker"));
    let output =
        Command::new(env!("CARGO_BIN_EXE_esker")).args(words).current_dir(directory).output().unwrap();
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}

/// Runs an experiment in this process, which has but one test: the folder it works in is nobody else's.
fn experiment(command: &str, directory: &Path) -> Result<(), String> {
    std::env::set_current_dir(directory).unwrap();
    let words: Vec<&str> = command.split_whitespace().skip(3).collect();
    xtask::bench::run(&words).map(drop).map_err(|error| format!("{error:#}"))
}

#[test]
fn every_command_in_the_documents_runs() {
    let commands = xtask::tidy::commands(&xtask::root()).unwrap();
    assert!(commands.len() > 15, "only {} commands found", commands.len());
    let (mut document, mut directory) = (None, None);
    let mut failures = Vec::new();
    for documented in commands {
        // Commands of one document build on each other; documents do not.
        if document.as_ref() != Some(&documented.path) {
            let fresh = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
            prepare(fresh.path());
            (document, directory) = (Some(documented.path.clone()), Some(fresh));
        }
        let directory = directory.as_ref().unwrap().path();
        let result = match documented.command.as_str() {
            // This test is part of it.
            "cargo xtask test" | "cargo xtask test --fast" | "cargo xtask python" => Ok(()),
            "cargo xtask dependencies" => xtask::dependencies::check().map_err(|error| error.to_string()),
            "cargo xtask tidy" => xtask::tidy::check().map_err(|error| error.to_string()),
            "cargo run --release -- quickstart" => run("esker quickstart", directory),
            command if command.starts_with("cargo xtask bench ") => experiment(command, directory),
            command if command.starts_with("esker ") => run(command, directory),
            command => Err(format!("no way to run `{command}` is known")),
        };
        if let Err(said) = result {
            let place = format!("{}:{}", documented.path.display(), documented.line);
            failures.push(format!("{place}: {}\n{said}", documented.command));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
