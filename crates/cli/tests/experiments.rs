//! The experiments of `cargo xtask bench` on datasets that the program makes: what they find, what they refuse.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

use std::fs;
use std::path::Path;
use std::process::Command;
use xtask::bench::Findings;

fn generate(directory: &Path, words: &str) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_esker"));
    let output = command.arg("generate").args(words.split(' ')).current_dir(directory).output().unwrap();
    assert!(output.status.success(), "{words}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Runs an experiment; `DIR` in its words is the directory.
fn experiment(directory: &Path, words: &str) -> anyhow::Result<Findings> {
    let words = words.replace("DIR", directory.to_str().unwrap());
    xtask::bench::run(&words.split(' ').collect::<Vec<_>>())
}

/// Whether it is the usage that is wrong, and what is said.
fn check_refusal(directory: &Path, words: &str, usage: bool, expected: &[&str]) {
    let Err(error) = experiment(directory, words) else { panic!("{words} was not refused") };
    assert_eq!(error.downcast_ref::<clap::Error>().is_some(), usage, "{words}: {error:#}");
    let said = format!("{error:#}");
    expected.iter().for_each(|word| assert!(said.contains(word), "{words}: `{word}` is not in: {said}"));
}

#[test]
fn wrong_usage_is_told_with_what_would_be_right() {
    let directory = tempfile::tempdir().unwrap();
    let check =
        |words: &str, usage, expected: &[&str]| check_refusal(directory.path(), words, usage, expected);
    check("segments DIR/nothing", false, &["nothing", "not an Esker dataset"]);
    check("segments DIR/g --sizes 0", true, &["--sizes", "0"]);
    check("segments DIR/g --blowup 0", false, &["--blowup 0", "above 0"]);
    check("segments DIR/g --page 0", false, &["--page 0"]);
    check("pack DIR/nothing", false, &["nothing", "not an Esker dataset"]);
    check("pack DIR/g --cache-percent 101", false, &["--cache-percent 101", "0 to 100"]);
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0, "something was left behind");
}

#[test]
fn segments_count_what_layouts_store_and_read() {
    let directory = tempfile::tempdir().unwrap();
    generate(directory.path(), "g --nodes 3000 --dim 25 --degree 10 --train 0.5");
    let sampling = "--batch 50 --batches 24 --fanout 5,5 --cache-percent 5";
    let more = "--sizes 1,4,9,500 --blowup 0.01,1.5,100 --plot DIR/s.svg";
    let value = experiment(directory.path(), &format!("segments DIR/g {sampling} {more}")).unwrap().json;
    assert_eq!((value["slots"].as_u64(), value["row_bytes"].as_u64()), (Some(150), Some(100)));
    let misses = value["misses"].as_u64().unwrap();
    assert!(misses > 0 && misses < value["accesses"].as_u64().unwrap());
    let lines = value["segments"].as_array().unwrap();
    let sizes: Vec<_> = lines.iter().map(|line| line["size"].as_u64().unwrap()).collect();
    assert_eq!(sizes, [1, 4, 9, 24], "sizes beyond all batches are all batches");
    let number = |value: &serde_json::Value| value.as_f64().unwrap();
    for line in lines {
        let (packed, cached) = (line["packed_rows"].as_u64().unwrap(), line["cache_rows"].as_u64().unwrap());
        assert_eq!(packed + cached, misses);
        for order in ["by_number", "minhash"] {
            let all = number(&line[order]["amplification"]);
            assert!(all >= 1.0, "{line}");
            let Some(caches) = line[order]["cache_amplification"].as_f64() else { continue };
            // Rows do not divide pages, and the whole is a mean of packed rows, read to the byte, and caches.
            let mean = (packed as f64 + cached as f64 * caches) / misses as f64;
            assert!(caches > 1.0 && (all - mean).abs() < 1e-9, "{line}");
        }
        assert!((number(&line["space"]) - number(&line["stored_rows"]) / 3000.0).abs() < 1e-9);
    }
    // Alone, every batch has its rows to itself; together, each row is stored once.
    assert_eq!(
        (&lines[0]["stored_rows"], number(&lines[0]["minhash"]["amplification"])),
        (&value["misses"], 1.0)
    );
    assert!(number(&lines[3]["space"]) <= 1.0 && lines[3]["global"] == true);
    assert!(lines.windows(2).all(|two| number(&two[0]["space"]) > number(&two[1]["space"])));
    let search = value["search"].as_array().unwrap();
    let fits: Vec<_> = search.iter().map(|one| one["fits"].as_bool().unwrap()).collect();
    assert_eq!(fits, [false, true, true]);
    for one in search {
        for method in ["heuristic", "brute_force"] {
            let found = &one[method]["found"];
            assert_eq!(found.is_null(), !one["fits"].as_bool().unwrap());
            assert!(found.is_null() || number(&found["space"]) <= number(&one["blowup"]), "{one}");
        }
        assert_eq!(one["tried"], 40);
    }
    // With room for everything nothing is shared.
    assert_eq!((&search[2]["heuristic"]["found"]["size"], &search[2]["fitting"]), (&1.into(), &40.into()));
    let plot = fs::read_to_string(directory.path().join("s.svg")).unwrap();
    assert_eq!(plot.matches("<polyline").count(), 2);
    let found = experiment(directory.path(), &format!("segments DIR/g {sampling} --blowup 0.01")).unwrap();
    assert!(found.text.contains("nothing fits"));
    check_refusal(directory.path(), "segments DIR/g --cache-percent 101", false, &["--cache-percent 101"]);
}

#[test]
fn packing_makes_the_same_bytes_both_ways() {
    let directory = tempfile::tempdir().unwrap();
    for (name, dtype) in [("plain", "f32"), ("narrow", "f16")] {
        generate(directory.path(), &format!("{name} --nodes 2000 --dim 25 --train 0.5 --dtype {dtype}"));
        let more = "--batch 50 --batches 12 --fanout 5,5 --cache-percent 20 --scratch DIR";
        let value = experiment(directory.path(), &format!("pack DIR/{name} {more}")).unwrap().json;
        let count = |key: &str| value[key].as_u64().unwrap();
        assert_eq!((count("batches"), count("slots"), count("batches_compared")), (12, 400, 8));
        assert_eq!(count("packed_bytes"), count("misses") * count("row_bytes"));
        assert_eq!(count("row_bytes"), if dtype == "f32" { 100 } else { 50 });
        for way in ["individual", "batched"] {
            let seconds = |key: &str| value[way][key].as_f64().unwrap();
            assert!(seconds("seconds") > 0.0 && seconds("read_seconds") > 0.0, "{value}");
        }
        let stages = value["batched"]["stages"].as_array().unwrap();
        let named: Vec<_> = stages.iter().map(|stage| stage["name"].as_str().unwrap()).collect();
        assert_eq!(named, ["lay rows out", "pack rows", "order caches", "finish"]);
        let apart: f64 = stages.iter().map(|stage| stage["seconds"].as_f64().unwrap()).sum();
        assert!(apart <= value["batched"]["seconds"].as_f64().unwrap());
    }
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2, "it left something behind");
}
