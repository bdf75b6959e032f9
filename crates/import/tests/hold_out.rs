//! Edges that are held out, against a naive twin that ranks all edges in memory; and fixed negatives of OGB.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

use esker_import::generate::{FactShape, generate_facts};
use esker_import::{HoldOut, ImportJob, Request, import};
use esker_store::{Dataset, Manifest, NegativeFile, SplitOver, file, verify};
use esker_types::random::{Key, below};
use esker_types::{Budget, Silent};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

type Edge = (u64, u64, u64);

fn make(request: &Request, target: &Path, memory_bytes: u64) -> esker_import::Result<Manifest> {
    let budget = Budget { host_bytes: memory_bytes };
    let manifest = import(request, &ImportJob { target, overwrite: true, budget, progress: &Silent })?;
    assert_eq!(verify(target, 2, &Silent).unwrap().damage, []);
    Ok(manifest)
}

fn ids(dataset: &Dataset, name: &str) -> Vec<u64> {
    let array = dataset.array(name).unwrap();
    let mut values = vec![0; (array.entry().rows * array.entry().columns) as usize];
    assert_eq!(array.elements(0).unwrap().fill_ids(&mut values).unwrap(), values.len());
    values
}

fn rows(dataset: &Dataset, name: &str) -> Vec<Edge> {
    ids(dataset, name).chunks(3).map(|row| (row[0], row[1], row[2])).collect()
}

/// Source, target and relation of every edge of the graph.
fn graph(dataset: &Dataset) -> Vec<Edge> {
    let (offsets, sources) = (ids(dataset, file::IN_OFFSETS), ids(dataset, file::IN_NEIGHBOURS));
    let relations = dataset.array(file::EDGE_RELATION).map(|_| ids(dataset, file::EDGE_RELATION));
    let mut all = Vec::new();
    for target in 0..offsets.len() - 1 {
        for edge in offsets[target] as usize..offsets[target + 1] as usize {
            let relation = relations.as_ref().map_or(0, |relations| relations[edge]);
            all.push((sources[edge], target as u64, relation));
        }
    }
    all
}

fn reverse((source, target, relation): Edge) -> Edge {
    (target, source, relation)
}

/// Edges that leave, validation before test, and whether they leave with their reverses.
fn naive(edges: &[Edge], add_reverse: bool, shares: [f64; 2], seed: u64) -> (Vec<Edge>, [usize; 2], bool) {
    let known: BTreeSet<Edge> = edges.iter().copied().collect();
    let symmetric = !edges.is_empty() && edges.iter().all(|edge| known.contains(&reverse(*edge)));
    let undirected = add_reverse || symmetric;
    let turned = |edge: Edge| if undirected && edge.0 > edge.1 { reverse(edge) } else { edge };
    let units: BTreeSet<Edge> = edges.iter().map(|edge| turned(*edge)).collect();
    let priority = |edge: &Edge| {
        let key = Key::new(seed).with(0x686f6c64).with(edge.0).with(edge.1).with(edge.2);
        (key.at(0), *edge)
    };
    let mut order: Vec<(u64, Edge)> = units.iter().map(priority).collect();
    order.sort_unstable();
    let counts = shares.map(|share| (share * units.len() as f64).round() as usize);
    order.truncate(counts[0] + counts[1]);
    (order.into_iter().map(|(_, edge)| edge).collect(), counts, undirected)
}

fn csv(directory: &Path, edges: &[Edge], relations: bool) -> Request {
    let path = directory.join("edges.csv");
    let line = |(source, target, relation): &Edge| match relations {
        true => format!("{source},{target},r{relation}\n"),
        false => format!("{source},{target}\n"),
    };
    fs::write(&path, edges.iter().map(line).collect::<String>()).unwrap();
    let mut request = Request {
        format: "csv".into(),
        edges: Some(path),
        header: Some(false),
        nodes: Some(40),
        ..Request::default()
    };
    if relations {
        request.columns.source = Some("0".into());
        request.columns.target = Some("1".into());
        request.columns.relation = Some("2".into());
    }
    request
}

/// Relations numbered as they appear.
fn numbered(edges: &[Edge]) -> Vec<Edge> {
    let mut numbers = BTreeMap::new();
    let number = |edge: &Edge| {
        let next = numbers.len() as u64;
        (edge.0, edge.1, *numbers.entry(edge.2).or_insert(next))
    };
    edges.iter().map(number).collect()
}

fn check(dataset: &Dataset, edges: &[Edge], request: &Request, shares: [f64; 2]) {
    let loops = |edge: &Edge| !request.remove_self_loops || edge.0 != edge.1;
    let edges: Vec<Edge> = edges.iter().copied().filter(loops).collect();
    let (held, counts, undirected) = naive(&edges, request.add_reverse, shares, request.seed);
    let (valid, test) = (rows(dataset, file::SPLIT_VALID), rows(dataset, file::SPLIT_TEST));
    assert_eq!([valid.len(), test.len()], counts);
    assert_eq!([valid, test].concat(), held);
    let held: BTreeSet<Edge> = held.into_iter().collect();
    let leaves = |edge: Edge| held.contains(&edge) || (undirected && held.contains(&reverse(edge)));
    let mut expected = Vec::new();
    for edge in edges.iter().filter(|edge| !leaves(**edge)) {
        expected.push(*edge);
        if request.add_reverse && edge.0 != edge.1 {
            expected.push(reverse(*edge));
        }
    }
    if request.remove_duplicates {
        expected = expected.into_iter().collect::<BTreeSet<_>>().into_iter().collect();
    }
    expected.sort_unstable_by_key(|edge| (edge.1, edge.0, edge.2));
    assert_eq!(graph(dataset), expected);
    let splits = dataset.manifest().splits.as_ref().unwrap();
    assert_eq!((splits.over, splits.train), (SplitOver::Edges, expected.len() as u64));
    assert_eq!(dataset.manifest().edges.undirected, undirected);
    assert_eq!(dataset.manifest().nodes.count, 40);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn held_out_edges_are_those_of_smallest_priority(
        mut edges in prop::collection::vec((0u64..40, 0u64..40, 0u64..4), 20..300),
        (relations, symmetric, add_reverse, remove_duplicates, remove_self_loops) in any::<(bool, bool, bool, bool, bool)>(),
        seed in 0u64..1000, valid in 0u32..30, test in 0u32..40,
    ) {
        let directory = tempfile::tempdir().unwrap();
        if !relations {
            edges.iter_mut().for_each(|edge| edge.2 = 0);
        }
        if symmetric {
            let turned: Vec<Edge> = edges.iter().map(|edge| reverse(*edge)).collect();
            edges.extend(turned);
        }
        edges[0].0 = (edges[0].1 + 1) % 40;
        let hold_out: HoldOut = format!("valid:{valid}%,test:{test}%").parse().unwrap();
        let request = Request {
            hold_out: Some(hold_out), add_reverse, remove_duplicates, remove_self_loops, seed,
            ..csv(directory.path(), &edges, relations)
        };
        let target = directory.path().join("out");
        make(&request, &target, 64 << 20).unwrap();
        let shares = [valid as f64 / 100.0, test as f64 / 100.0];
        check(&Dataset::open(&target).unwrap(), &numbered(&edges), &request, shares);
    }
}

#[test]
fn edges_beyond_the_budget_are_held_out_alike() {
    let directory = tempfile::tempdir().unwrap();
    let key = Key::new(5);
    let edges: Vec<Edge> = (0..1_500_000)
        .map(|at| (below(key.at(2 * at), 200_000), below(key.at(2 * at + 1), 200_000), 0))
        .collect();
    let request = Request {
        hold_out: Some("valid:5%,test:10%".parse().unwrap()),
        add_reverse: true,
        remove_duplicates: true,
        nodes: None,
        ..csv(directory.path(), &edges, false)
    };
    let small = make(&request, &directory.path().join("small"), 48 << 20).unwrap();
    let large = make(&request, &directory.path().join("large"), 2 << 30).unwrap();
    assert_eq!(small, large);
    let (held, counts, _) = naive(&edges, true, [0.05, 0.1], request.seed);
    let dataset = Dataset::open(&directory.path().join("small")).unwrap();
    let found = [rows(&dataset, file::SPLIT_VALID), rows(&dataset, file::SPLIT_TEST)];
    assert_eq!([found[0].len(), found[1].len()], counts);
    assert!(found.concat() == held);
}

#[test]
fn what_cannot_be_held_out_is_refused_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let base = csv(directory.path(), &[(0, 1, 0), (1, 2, 0), (2, 3, 0)], false);
    let said =
        |request: &Request| make(request, &directory.path().join("out"), 64 << 20).unwrap_err().to_string();
    let hold_out = |text: &str| Some(text.parse::<HoldOut>().unwrap());
    let error = said(&Request { hold_out: hold_out("valid:1,test:2"), ..base.clone() });
    assert!(error.contains("takes 1 + 2 edges, and there are 3"), "{error}");
    let split = Some("share:0.5,0.2,0.3".parse().unwrap());
    let error = said(&Request { hold_out: hold_out("test:1"), split, ..base.clone() });
    assert!(error.contains("not both"), "{error}");
    for name in ["train", "valid", "test"] {
        fs::write(directory.path().join(format!("{name}.txt")), "a\tr\tb\n").unwrap();
    }
    let from = Some(directory.path().to_path_buf());
    let triples = Request { format: "triples".into(), from, ..Request::default() };
    let error = said(&Request { hold_out: hold_out("test:1"), ..triples });
    assert!(error.contains("leave out --hold-out"), "{error}");
    let manifest =
        make(&Request { hold_out: hold_out("test:1"), ..base }, &directory.path().join("out"), 64 << 20)
            .unwrap();
    let splits = manifest.splits.unwrap();
    assert_eq!((splits.train, splits.valid, splits.test), (2, 0, 1));
}

fn ogbl(directory: &Path, form: &str) -> Request {
    let at = |name: &str| directory.join(name);
    fs::create_dir_all(at("raw")).unwrap();
    fs::create_dir_all(at("split/time")).unwrap();
    fs::write(at("raw/edge.csv"), "0,1\n2,1\n5,4\n").unwrap();
    fs::write(at("raw/num-node-list.csv"), "10\n").unwrap();
    if form == "fact" {
        fs::write(at("raw/edge_reltype.csv"), "0\n2\n1\n").unwrap();
    }
    let fixtures = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/ogbl");
    for split in ["valid", "test"] {
        fs::copy(fixtures.join(format!("{form}.{split}.pt")), at(&format!("split/time/{split}.pt"))).unwrap();
    }
    Request { format: "ogb".into(), from: Some(directory.to_path_buf()), ..Request::default() }
}

#[test]
fn fixed_negatives_of_ogb_are_stored_beside_their_edges() {
    let directory = tempfile::tempdir().unwrap();
    let target = directory.path().join("out");
    let negatives = |manifest: &Manifest| manifest.splits.as_ref().unwrap().negatives.clone();
    let named = |name: &str, count| NegativeFile { name: name.into(), count };
    let manifest = make(&ogbl(&directory.path().join("edge"), "edge"), &target, 64 << 20).unwrap();
    let expected = [named(file::VALID_NEGATIVE_EDGES, 2), named(file::TEST_NEGATIVE_EDGES, 1)];
    assert_eq!(negatives(&manifest), expected);
    let dataset = Dataset::open(&target).unwrap();
    assert_eq!(rows(&dataset, file::SPLIT_VALID), [(0, 5, 0), (1, 6, 0), (2, 7, 0)]);
    assert_eq!(rows(&dataset, file::VALID_NEGATIVE_EDGES), [(8, 9, 0), (9, 8, 0)]);
    let manifest = make(&ogbl(&directory.path().join("node"), "node"), &target, 64 << 20).unwrap();
    let expected = [named(file::VALID_NEGATIVE_TARGETS, 3), named(file::TEST_NEGATIVE_TARGETS, 2)];
    assert_eq!(negatives(&manifest), expected);
    let dataset = Dataset::open(&target).unwrap();
    assert_eq!(ids(&dataset, file::VALID_NEGATIVE_TARGETS), [7, 8, 9, 4, 5, 6]);
    let manifest = make(&ogbl(&directory.path().join("fact"), "fact"), &target, 64 << 20).unwrap();
    assert_eq!(negatives(&manifest).len(), 4);
    let dataset = Dataset::open(&target).unwrap();
    assert_eq!(rows(&dataset, file::SPLIT_TEST), [(4, 6, 0), (4, 7, 2)]);
    assert_eq!(ids(&dataset, file::TEST_NEGATIVE_SOURCES), [1, 2, 3, 0]);
    assert_eq!(manifest.edges.relations.unwrap().count, 3);
}

#[test]
fn an_edge_split_with_reverses_is_undirected_whether_or_not_duplicates_stay() {
    let directory = tempfile::tempdir().unwrap();
    let target = directory.path().join("out");
    let stored = ogbl(&directory.path().join("edge"), "edge");
    assert!(!make(&stored, &target, 64 << 20).unwrap().edges.undirected);
    for remove_duplicates in [false, true] {
        let request = Request { add_reverse: true, remove_duplicates, ..stored.clone() };
        assert!(make(&request, &target, 64 << 20).unwrap().edges.undirected, "{remove_duplicates}");
        let edges: BTreeSet<Edge> = graph(&Dataset::open(&target).unwrap()).into_iter().collect();
        assert!(edges.iter().all(|edge| edges.contains(&reverse(*edge))));
    }
}

#[test]
fn negatives_and_relations_that_do_not_fit_are_named() {
    let directory = tempfile::tempdir().unwrap();
    let refused =
        |request: &Request| make(request, &directory.path().join("out"), 64 << 20).unwrap_err().to_string();
    let request = ogbl(directory.path(), "fact");
    fs::write(directory.path().join("raw/edge_reltype.csv"), "0\n1\n1\n").unwrap();
    let error = refused(&request);
    assert!(error.contains("expected relations below 2, those of training edges, found 2"), "{error}");
    fs::write(directory.path().join("raw/edge_reltype.csv"), "0\n2\n1\n").unwrap();
    fs::write(directory.path().join("raw/num-node-list.csv"), "9\n").unwrap();
    let error = refused(&request);
    assert!(error.contains("tail_neg, row 0: expected node ids below 9, found 9"), "{error}");
    fs::write(directory.path().join("raw/num-node-list.csv"), "10\n").unwrap();
    let error = refused(&Request { largest_component: true, ..request.clone() });
    assert!(error.contains("leave out --largest-component"), "{error}");
    // Two rows of negatives for one edge.
    let fixtures = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/ogbl");
    let whole = fs::read(fixtures.join("node.test.pt")).unwrap();
    let request = ogbl(&directory.path().join("node"), "node");
    // Shape (1, 2) of the negatives becomes (2, 1): two rows for one edge. Pickled small integers are K and a byte.
    let at = whole.windows(5).rposition(|bytes| bytes == b"K\x01K\x02\x86").unwrap();
    let mut forged = whole.clone();
    forged[at + 1] = 2;
    forged[at + 3] = 1;
    let strides = at + forged[at..].windows(5).position(|bytes| bytes == b"K\x02K\x01\x86").unwrap() + 1;
    let strides =
        strides + forged[strides..].windows(5).position(|bytes| bytes == b"K\x02K\x01\x86").unwrap();
    forged[strides + 1] = 1;
    fs::write(directory.path().join("node/split/time/test.pt"), forged).unwrap();
    let error = refused(&request);
    assert!(error.contains("expected 1 rows of negatives, one an edge, found 2 rows of 1"), "{error}");
}

#[test]
fn a_generated_knowledge_graph_is_the_same_for_any_memory_and_holds_out_its_shares() {
    let directory = tempfile::tempdir().unwrap();
    let shape = FactShape { out_neighbours: true, ..FactShape::freebase86m(0.0004) };
    let make = |name: &str, host_bytes| {
        let target = directory.path().join(name);
        let budget = Budget { host_bytes };
        let job = ImportJob { target: &target, overwrite: true, budget, progress: &Silent };
        let manifest = generate_facts(&shape, &job).unwrap();
        assert_eq!(verify(&target, 2, &Silent).unwrap().damage, []);
        manifest
    };
    let (small, large) = (make("small", 48 << 20), make("large", 1 << 30));
    assert_eq!(small, large);
    let splits = small.splits.as_ref().unwrap();
    assert_eq!((small.nodes.count, small.edges.relations.as_ref().unwrap().count), (34_422, 16));
    assert!(small.nodes.features.is_none());
    let all = splits.train + splits.valid + splits.test;
    assert!((all as f64 / 135_434.0 - 1.0).abs() < 0.1, "{all}");
    for held_out in [splits.valid, splits.test] {
        assert!((held_out as f64 / all as f64 - 0.05).abs() < 0.003, "{held_out} of {all}");
    }
    let dataset = Dataset::open(&directory.path().join("small")).unwrap();
    let known: BTreeSet<Edge> = graph(&dataset).into_iter().collect();
    assert_eq!(known.len() as u64, splits.train);
    for name in [file::SPLIT_VALID, file::SPLIT_TEST] {
        assert!(rows(&dataset, name).iter().all(|edge| !known.contains(edge)));
    }
}
