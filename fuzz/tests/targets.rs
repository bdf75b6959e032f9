//! A few hundred damaged inputs for every target, as `cargo run -p esker-fuzz` makes them; that goes on for longer.

use esker_fuzz::{Session, TARGETS};

const CASES: u64 = 300;

/// Valid inputs are accepted, damaged ones do no harm, and some of them are noticed.
fn check(name: &str) {
    let target = TARGETS.iter().find(|target| target.name == name).expect("a target of that name");
    let mut session = Session::new(target, 0);
    let (valid, mut refused) = (session.valid(), 0);
    for case in 0..valid + CASES {
        let verdict = session.run(case).unwrap_or_else(|failure| {
            panic!("{}; repeat with: {name} --seed 0 --case {}", failure.problem, failure.case)
        });
        assert!(case >= valid || verdict.is_ok(), "{name}: valid input {case}: {verdict:?}");
        refused += verdict.is_err() as u64;
    }
    assert!(refused > CASES / 20, "{name}: only {refused} refused: is anything damaged?");
}

#[test]
fn manifest() {
    check("manifest");
}

#[test]
fn derived() {
    check("derived");
}

#[test]
fn trace() {
    check("trace");
}

#[test]
fn pickle() {
    check("pickle");
}

#[test]
fn npy() {
    check("npy");
}

#[test]
fn empty() {
    check("empty");
}

#[test]
fn csr() {
    check("csr");
}

#[test]
fn csc() {
    check("csc");
}

#[test]
fn csv() {
    check("csv");
}

#[test]
fn csv_names() {
    check("csv-names");
}

#[test]
fn gzip_text() {
    check("gzip-text");
}

#[test]
fn id_list() {
    check("id-list");
}

#[test]
fn parquet() {
    check("parquet");
}

#[test]
fn parquet_names() {
    check("parquet-names");
}

#[test]
fn parquet_rows() {
    check("parquet-rows");
}

#[test]
fn triples() {
    check("triples");
}

#[test]
fn ogb() {
    check("ogb");
}

#[test]
fn ogb_bare() {
    check("ogb-bare");
}

#[test]
fn igb() {
    check("igb");
}

#[test]
fn igb_raw() {
    check("igb-raw");
}

#[test]
fn graphbolt() {
    check("graphbolt");
}

#[test]
fn planetoid() {
    check("planetoid");
}

#[test]
fn gnn_npz() {
    check("gnn-npz");
}

#[test]
fn gnn_npz_pickled() {
    check("gnn-npz-pickled");
}

#[test]
fn masked_npz() {
    check("masked-npz");
}

#[test]
fn musae() {
    check("musae");
}

#[test]
fn musae_zip() {
    check("musae-zip");
}

#[test]
fn mag240m() {
    check("mag240m");
}

#[test]
fn torch() {
    check("torch");
}

#[test]
fn papers100m() {
    check("papers100m");
}

#[test]
fn every_target_has_a_test() {
    let source = include_str!("targets.rs");
    for target in TARGETS {
        assert!(source.contains(&format!("check(\"{}\")", target.name)), "{}", target.name);
    }
}
