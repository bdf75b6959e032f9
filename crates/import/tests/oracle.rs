//! The builder against a naive twin that holds everything in memory.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

use esker_import::{ImportJob, Request, SplitChoice, import};
use esker_store::{Dataset, Manifest, file, verify};
use esker_types::random::{Key, below};
use esker_types::{Budget, Dtype, Silent};
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Writes an npy of little-endian values.
fn npy(path: &Path, descr: &str, shape: &[usize], data: &[u8]) -> PathBuf {
    let axes: Vec<String> = shape.iter().map(|axis| format!("{axis},")).collect();
    let header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({}), }}\n", axes.join(" "));
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    fs::write(path, bytes).unwrap();
    path.to_path_buf()
}

fn integers(path: &Path, shape: &[usize], values: &[i64]) -> PathBuf {
    npy(path, "<i8", shape, &values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>())
}

fn floats(path: &Path, shape: &[usize], values: &[f32]) -> PathBuf {
    npy(path, "<f4", shape, &values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>())
}

fn make(request: &Request, target: &Path, memory_bytes: u64) -> Manifest {
    let job =
        ImportJob { target, overwrite: true, budget: Budget { host_bytes: memory_bytes }, progress: &Silent };
    let manifest = import(request, &job).unwrap();
    let dataset = Dataset::open(target).unwrap();
    assert_eq!(verify(target, 2, &Silent).unwrap().damage, []);
    assert_eq!(dataset.manifest().id, manifest.id);
    manifest
}

fn ids(dataset: &Dataset, name: &str) -> Vec<u64> {
    let array = dataset.array(name).unwrap();
    let mut values = vec![0; (array.entry().rows * array.entry().columns) as usize];
    assert_eq!(array.elements(0).unwrap().fill_ids(&mut values).unwrap(), values.len());
    values
}

fn values<T: bytemuck::AnyBitPattern + bytemuck::NoUninit + Default>(
    dataset: &Dataset,
    name: &str,
) -> Vec<T> {
    let array = dataset.array(name).unwrap();
    let mut values = vec![T::default(); (array.entry().rows * array.entry().columns) as usize];
    assert_eq!(array.elements(0).unwrap().fill(&mut values).unwrap(), values.len());
    values
}

/// What an edge becomes, by the definition: a list of (target, source, position), sorted.
fn naive_edges(edges: &[(u64, u64)], request: &Request) -> Vec<(u64, u64, u64)> {
    let mut all = Vec::new();
    for (position, (source, target)) in edges.iter().enumerate() {
        if request.remove_self_loops && source == target {
            continue;
        }
        all.push((*target, *source, position as u64));
        if request.add_reverse && source != target {
            all.push((*source, *target, position as u64));
        }
    }
    all.sort_unstable();
    if request.remove_duplicates {
        all.dedup_by_key(|(target, source, _)| (*target, *source));
    }
    all
}

fn check_topology(dataset: &Dataset, expected: &[(u64, u64, u64)], nodes: u64) {
    let mut offsets = vec![0u64; nodes as usize + 1];
    expected.iter().for_each(|(target, _, _)| offsets[*target as usize + 1] += 1);
    (0..nodes as usize).for_each(|node| offsets[node + 1] += offsets[node]);
    assert!(values::<u64>(dataset, file::IN_OFFSETS) == offsets);
    assert!(ids(dataset, file::IN_NEIGHBOURS) == expected.iter().map(|edge| edge.1).collect::<Vec<_>>());
    let manifest = dataset.manifest();
    assert_eq!(manifest.edges.count, expected.len() as u64);
    assert_eq!(manifest.edges.max_in_degree, offsets.windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0));
    if dataset.array(file::EDGE_POSITION).is_some() {
        let positions: Vec<u64> = expected.iter().map(|edge| edge.2).collect();
        assert!(values::<u64>(dataset, file::EDGE_POSITION) == positions);
    }
    if manifest.edges.out_neighbours {
        let mut out: Vec<(u64, u64, u64)> = expected.iter().zip(0..).map(|(e, id)| (e.1, e.0, id)).collect();
        out.sort_unstable();
        assert!(ids(dataset, file::OUT_NEIGHBOURS) == out.iter().map(|edge| edge.1).collect::<Vec<_>>());
        assert!(ids(dataset, file::OUT_EDGE_IDS) == out.iter().map(|edge| edge.2).collect::<Vec<_>>());
        let ends = values::<u64>(dataset, file::OUT_OFFSETS);
        for (node, pair) in ends.windows(2).enumerate() {
            assert!(out[pair[0] as usize..pair[1] as usize].iter().all(|edge| edge.0 == node as u64));
        }
    }
}

fn edge_request(directory: &Path, edges: &[(u64, u64)]) -> Request {
    let sources = edges.iter().map(|edge| edge.0 as i64);
    let flat: Vec<i64> = sources.chain(edges.iter().map(|edge| edge.1 as i64)).collect();
    let path = integers(&directory.join("edges.npy"), &[2, edges.len()], &flat);
    Request { format: "npy".into(), edges: Some(path), ..Request::default() }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn topology_equals_its_definition(
        edges in prop::collection::vec((0u64..60, 0u64..60), 0..400),
        flags in any::<[bool; 6]>(),
    ) {
        let directory = tempfile::tempdir().unwrap();
        let [add_reverse, remove_duplicates, remove_self_loops, out_neighbours, keep_positions, wide_ids] = flags;
        let request = Request {
            nodes: Some(60), add_reverse, remove_duplicates, remove_self_loops, out_neighbours, keep_positions, wide_ids,
            ..edge_request(directory.path(), &edges)
        };
        let target = directory.path().join("out");
        let manifest = make(&request, &target, 64 << 20);
        prop_assert_eq!(manifest.id_dtype(), if wide_ids { Dtype::U64 } else { Dtype::U32 });
        check_topology(&Dataset::open(&target).unwrap(), &naive_edges(&edges, &request), 60);
    }

    #[test]
    fn the_largest_component_equals_a_search(edges in prop::collection::vec((0u64..40, 0u64..40), 0..45)) {
        let directory = tempfile::tempdir().unwrap();
        let features: Vec<f32> = (0..40).map(|node| node as f32 + 0.5).collect();
        let labels: Vec<i64> = (0..40).collect();
        let request = Request {
            largest_component: true,
            features: Some(floats(&directory.path().join("x.npy"), &[40, 1], &features)),
            labels: Some(integers(&directory.path().join("y.npy"), &[40], &labels)),
            train: Some(integers(&directory.path().join("t.npy"), &[40], &labels)),
            ..edge_request(directory.path(), &edges)
        };
        let target = directory.path().join("out");
        let kept = largest_by_search(&edges, 40);
        make(&request, &target, 64 << 20);
        let dataset = Dataset::open(&target).unwrap();
        let rank = |node: u64| kept.iter().position(|k| *k == node).map(|at| at as u64);
        let renamed: Vec<(u64, u64)> = edges.iter().filter_map(|e| Some((rank(e.0)?, rank(e.1)?))).collect();
        check_topology(&dataset, &naive_edges(&renamed, &Request::default()), kept.len() as u64);
        let rows: Vec<f32> = kept.iter().map(|node| *node as f32 + 0.5).collect();
        prop_assert_eq!(values::<f32>(&dataset, file::NODE_FEATURES), rows);
        let classes: Vec<i32> = kept.iter().map(|node| *node as i32).collect();
        prop_assert_eq!(values::<i32>(&dataset, file::NODE_LABELS), classes);
        prop_assert_eq!(ids(&dataset, file::SPLIT_TRAIN), (0..kept.len() as u64).collect::<Vec<_>>());
    }
}

fn largest_by_search(edges: &[(u64, u64)], nodes: u64) -> Vec<u64> {
    let (mut best, mut seen) = (Vec::new(), BTreeSet::new());
    for start in 0..nodes {
        let (mut component, mut queue) = (BTreeSet::new(), vec![start]);
        while let Some(node) = queue.pop() {
            if seen.insert(node) {
                component.insert(node);
                let next =
                    |e: &(u64, u64)| if e.0 == node { Some(e.1) } else { (e.1 == node).then_some(e.0) };
                queue.extend(edges.iter().filter_map(next));
                queue.extend(edges.iter().filter(|e| e.0 == node).map(|e| e.1));
            }
        }
        if component.len() > best.len() {
            best = component.into_iter().collect();
        }
    }
    best
}

/// More edges than fit the smallest budget, so that runs are spilled and merged.
#[test]
fn edges_beyond_the_budget_are_sorted_on_disk_to_the_same_bytes() {
    let directory = tempfile::tempdir().unwrap();
    let key = Key::new(3);
    let edges: Vec<(u64, u64)> =
        (0..2_000_000).map(|i| (below(key.at(2 * i), 50_000), below(key.at(2 * i + 1), 50_000))).collect();
    let request = Request {
        add_reverse: true,
        remove_duplicates: true,
        keep_positions: true,
        out_neighbours: true,
        ..edge_request(directory.path(), &edges)
    };
    let small = make(&request, &directory.path().join("small"), 48 << 20);
    let large = make(&request, &directory.path().join("large"), 2 << 30);
    assert_eq!(small, large);
    let dataset = Dataset::open(&directory.path().join("small")).unwrap();
    check_topology(&dataset, &naive_edges(&edges, &request), small.nodes.count);
}

#[test]
fn weights_times_and_feature_rows_follow_their_edges() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let edges = [(3, 1), (0, 2), (2, 1), (3, 0), (0, 2)];
    let request = Request {
        edge_weights: Some(floats(&at("w.npy"), &[5], &[0.5, 1.5, 2.5, 3.5, 4.5])),
        edge_times: Some(integers(&at("t.npy"), &[5], &[10, -11, 12, 13, 14])),
        edge_features: Some(floats(&at("f.npy"), &[5, 2], &[0., 0., 1., 10., 2., 20., 3., 30., 4., 40.])),
        add_reverse: true,
        ..edge_request(directory.path(), &edges)
    };
    let target = at("out");
    make(&request, &target, 64 << 20);
    let dataset = Dataset::open(&target).unwrap();
    let expected = naive_edges(&edges, &request);
    check_topology(&dataset, &expected, 4);
    let by =
        |column: &dyn Fn(usize) -> f32| expected.iter().map(|e| column(e.2 as usize)).collect::<Vec<f32>>();
    assert_eq!(values::<f32>(&dataset, file::EDGE_WEIGHT), by(&|p| p as f32 + 0.5));
    let times: Vec<i64> = expected.iter().map(|e| [10, -11, 12, 13, 14][e.2 as usize]).collect();
    assert_eq!(values::<i64>(&dataset, file::EDGE_TIME), times);
    let rows: Vec<f32> = expected.iter().flat_map(|e| [e.2 as f32, e.2 as f32 * 10.0]).collect();
    assert_eq!(values::<f32>(&dataset, file::EDGE_FEATURES), rows);
}

fn stored(dtype: Option<Dtype>, rows: &[f32], row_normalise: bool) -> (Dataset, tempfile::TempDir) {
    let directory = tempfile::tempdir().unwrap();
    let path = floats(&directory.path().join("x.npy"), &[rows.len() / 3, 3], rows);
    let request =
        Request { features: Some(path), dtype, row_normalise, ..edge_request(directory.path(), &[(0, 1)]) };
    make(&request, &directory.path().join("out"), 64 << 20);
    (Dataset::open(&directory.path().join("out")).unwrap(), directory)
}

#[test]
fn whole_numbers_from_0_to_255_are_stored_as_bytes_and_others_are_not() {
    let (dataset, _keep) = stored(None, &[0., 1., 255., 7., 8., 9.], false);
    assert_eq!(values::<u8>(&dataset, file::NODE_FEATURES), [0, 1, 255, 7, 8, 9]);
    for row in [[0.5, 1., 2.], [-1., 1., 2.], [256., 0., 0.]] {
        let (dataset, _keep) = stored(None, &[row, [1., 2., 3.]].concat(), false);
        assert_eq!(dataset.manifest().nodes.features.as_ref().unwrap().dtype, Dtype::F32);
    }
}

#[test]
fn nan_and_infinite_features_are_named_and_imported_on_request_only() {
    let directory = tempfile::tempdir().unwrap();
    for (value, number) in [("NaN", f32::NAN), ("inf", f32::INFINITY), ("-inf", f32::NEG_INFINITY)] {
        let path = floats(&directory.path().join("x.npy"), &[2, 3], &[0., 1., 2., 3., number, 5.]);
        for (dtype, row_normalise) in [(None, false), (None, true), (Some(Dtype::F16), false)] {
            let base = edge_request(directory.path(), &[(0, 1)]);
            let request = Request { features: Some(path.clone()), dtype, row_normalise, ..base };
            let target = directory.path().join("out");
            let job = |overwrite| ImportJob {
                target: &target,
                overwrite,
                budget: Budget { host_bytes: 64 << 20 },
                progress: &Silent,
            };
            let said = import(&request, &job(true)).unwrap_err().to_string();
            for word in ["x.npy, row 1, column 1", value, "--allow-nan"] {
                assert!(said.contains(word), "{word} is not in: {said}");
            }
            import(&Request { allow_nan: true, ..request }, &job(true)).unwrap();
            let dataset = Dataset::open(&target).unwrap();
            let stored = dataset.manifest().nodes.features.as_ref().unwrap().dtype;
            assert_eq!(stored, dtype.unwrap_or(Dtype::F32));
        }
    }
}

#[test]
fn features_are_converted_scaled_and_normalised() {
    let rows = [0.5, -1.0, 2.0, 1.0, 1.0, 2.0];
    let (dataset, _keep) = stored(Some(Dtype::F16), &rows, false);
    let halves = values::<u16>(&dataset, file::NODE_FEATURES);
    assert_eq!(halves, [0x3800, 0xbc00, 0x4000, 0x3c00, 0x3c00, 0x4000]);
    let (dataset, _keep) = stored(Some(Dtype::I8), &rows, false);
    let scales = values::<f32>(&dataset, file::NODE_FEATURE_SCALES);
    let back: Vec<f32> = values::<i8>(&dataset, file::NODE_FEATURES)
        .chunks(3)
        .flat_map(|row| row.iter().zip(&scales).map(|(q, scale)| *q as f32 * scale).collect::<Vec<_>>())
        .collect();
    assert!(rows.iter().zip(&back).all(|(a, b)| (a - b).abs() <= 2.0 / 127.0), "{back:?}");
    let (dataset, _keep) = stored(None, &[1., 1., 2., 0., 0., 0.], true);
    assert_eq!(values::<f32>(&dataset, file::NODE_FEATURES), [0.25, 0.25, 0.5, 0., 0., 0.]);
}

fn split(labels: &[i64], choice: &str, seed: u64) -> [Vec<u64>; 3] {
    let directory = tempfile::tempdir().unwrap();
    let request = Request {
        labels: Some(integers(&directory.path().join("y.npy"), &[labels.len()], labels)),
        split: Some(choice.parse::<SplitChoice>().unwrap()),
        seed,
        ..edge_request(directory.path(), &[(0, 1)])
    };
    make(&request, &directory.path().join("out"), 64 << 20);
    let dataset = Dataset::open(&directory.path().join("out")).unwrap();
    [file::SPLIT_TRAIN, file::SPLIT_VALID, file::SPLIT_TEST].map(|name| ids(&dataset, name))
}

#[test]
fn a_split_per_class_takes_so_many_of_each_and_leaves_the_rest() {
    let labels: Vec<i64> = (0..1000).map(|node| if node % 10 == 9 { -1 } else { node % 3 }).collect();
    let [train, valid, test] = split(&labels, "per-class:20,30", 1);
    for (set, each) in [(&train, 20), (&valid, 30)] {
        for class in 0..3 {
            assert_eq!(set.iter().filter(|node| labels[**node as usize] == class).count(), each);
        }
    }
    let all: BTreeSet<u64> = [&train[..], &valid, &test].concat().into_iter().collect();
    assert_eq!(all.len(), train.len() + valid.len() + test.len());
    assert_eq!(all.len(), 900);
    assert_ne!(train, split(&labels, "per-class:20,30", 2)[0]);
}

#[test]
fn a_split_by_share_covers_the_labelled_nodes_once() {
    let labels: Vec<i64> = (0..1000).map(|node| if node % 10 == 9 { -1 } else { 0 }).collect();
    let [train, valid, test] = split(&labels, "share:0.6,0.2,0.2", 1);
    assert_eq!((train.len(), valid.len(), test.len()), (540, 180, 180));
    assert!([&train[..], &valid, &test].concat().iter().all(|node| node % 10 != 9));
}

fn refusal(request: &Request, directory: &Path) -> String {
    let target = directory.join("refused");
    let job = ImportJob {
        target: &target,
        overwrite: false,
        budget: Budget { host_bytes: 64 << 20 },
        progress: &Silent,
    };
    let error = import(request, &job).expect_err("this should be refused").to_string();
    assert!(Dataset::open(&target).is_err());
    error
}

fn check_refusal(change: impl Fn(&Path) -> Request, words: &[&str]) {
    let directory = tempfile::tempdir().unwrap();
    let error = refusal(&change(directory.path()), directory.path());
    words.iter().for_each(|word| assert!(error.contains(word), "`{word}` is not in: {error}"));
}

#[test]
fn bad_input_is_named_with_file_row_and_value() {
    let edges = [(0, 1), (1, 2), (2, 0)];
    check_refusal(
        |d| Request { nodes: Some(2), ..edge_request(d, &edges) },
        &["edges.npy, edge 1", "below 2", "found 2"],
    );
    check_refusal(
        |d| Request {
            labels: Some(integers(&d.join("y.npy"), &[3], &[0, -2, 1])),
            ..edge_request(d, &edges)
        },
        &["y.npy, row 1", "-2"],
    );
    check_refusal(
        |d| Request {
            labels: Some(floats(&d.join("y.npy"), &[3], &[0., f32::NAN, 1.])),
            label_kind: Some(esker_store::LabelKind::Classes),
            ..edge_request(d, &edges)
        },
        &["y.npy, row 1", "NaN", "--nan-is-unlabelled"],
    );
    check_refusal(
        |d| Request {
            features: Some(floats(&d.join("x.npy"), &[2, 1], &[0., 1.])),
            nodes: Some(3),
            ..edge_request(d, &edges)
        },
        &["x.npy", "expected 3 feature rows", "found 2"],
    );
    check_refusal(
        |d| Request {
            train: Some(integers(&d.join("t.npy"), &[2], &[0, 3])),
            nodes: Some(3),
            ..edge_request(d, &edges)
        },
        &["t.npy, row 1", "found 3"],
    );
    check_refusal(
        |d| Request {
            train: Some(integers(&d.join("t.npy"), &[1], &[1])),
            test: Some(integers(&d.join("s.npy"), &[2], &[0, 1])),
            ..edge_request(d, &edges)
        },
        &["s.npy, row 1", "split-train"],
    );
    check_refusal(
        |d| Request {
            labels: Some(integers(&d.join("y.npy"), &[3], &[0, -1, 1])),
            train: Some(integers(&d.join("t.npy"), &[1], &[1])),
            ..edge_request(d, &edges)
        },
        &["node 1", "no label"],
    );
    check_refusal(
        |d| Request {
            features: Some(floats(&d.join("x.npy"), &[3, 1], &[0., 1e6, 0.])),
            dtype: Some(Dtype::F16),
            ..edge_request(d, &edges)
        },
        &["x.npy, row 1", "fit f16", "1000000"],
    );
    check_refusal(
        |d| Request { edges: Some(d.join("no.npy")), ..edge_request(d, &edges) },
        &["no.npy", "not found"],
    );
}

#[test]
fn a_budget_too_small_is_refused_with_one_that_would_do() {
    let directory = tempfile::tempdir().unwrap();
    let request = edge_request(directory.path(), &[(0, 1)]);
    let target = directory.path().join("out");
    let job = ImportJob {
        target: &target,
        overwrite: false,
        budget: Budget { host_bytes: 1 << 20 },
        progress: &Silent,
    };
    let error = import(&request, &job).unwrap_err().to_string();
    assert!(error.contains("--memory") && error.contains("48 MiB"), "{error}");
}

#[test]
fn graphs_without_edges_or_without_nodes_are_graphs() {
    let directory = tempfile::tempdir().unwrap();
    for nodes in [0, 1, 7] {
        let request = Request {
            nodes: Some(nodes),
            out_neighbours: true,
            split: Some("share:0.5,0.25,0.25".parse().unwrap()),
            ..edge_request(directory.path(), &[])
        };
        let manifest = make(&request, &directory.path().join("out"), 64 << 20);
        assert_eq!((manifest.nodes.count, manifest.edges.count), (nodes, 0));
    }
}

#[test]
fn errors_name_the_row_of_the_file_even_when_nodes_are_left_out() {
    let directory = tempfile::tempdir().unwrap();
    // The largest component is the upper half; its first chunk keeps no row at all.
    let edges: Vec<(u64, u64)> = (1000..1999).map(|node| (node, node + 1)).collect();
    let mut rows = vec![0.5f32; 2000 * 1024];
    let request = |rows: &[f32]| Request {
        largest_component: true,
        dtype: Some(Dtype::F16),
        features: Some(floats(&directory.path().join("x.npy"), &[2000, 1024], rows)),
        ..edge_request(directory.path(), &edges)
    };
    let manifest = make(&request(&rows), &directory.path().join("out"), 64 << 20);
    assert_eq!(manifest.nodes.count, 1000);
    rows[1500 * 1024 + 3] = 1e9;
    let error = refusal(&request(&rows), directory.path());
    assert!(error.contains("x.npy, row 1500"), "{error}");
}

#[test]
fn what_would_have_no_effect_or_lose_something_is_refused() {
    let edges = [(0, 1), (1, 2)];
    check_refusal(
        |d| Request { dtype: Some(Dtype::F16), ..edge_request(d, &edges) },
        &["--dtype", "no features"],
    );
    check_refusal(
        |d| Request {
            edge_features: Some(floats(&d.join("f.npy"), &[3, 1], &[0.; 3])),
            ..edge_request(d, &edges)
        },
        &["f.npy", "2 rows", "3 rows"],
    );
    check_refusal(
        |d| Request {
            edge_features: Some(floats(&d.join("f.npy"), &[2, 0], &[])),
            ..edge_request(d, &edges)
        },
        &["f.npy", "2 rows of 0"],
    );
    check_refusal(
        |d| Request {
            labels: Some(integers(&d.join("y.npy"), &[3], &[0, 1, 2])),
            split: Some(SplitChoice::PerClass { train: u64::MAX, valid: 1 }),
            ..edge_request(d, &edges)
        },
        &["per-class", "only 3 nodes"],
    );
    check_refusal(|d| edge_request(d, &[(0, 1), (0, 1 << 50)]), &["edges.npy, edge 1", "count nodes from 0"]);
    check_refusal(
        |d| Request { nodes: Some(1 << 50), ..edge_request(d, &edges) },
        &["edges.npy", "free on this disk"],
    );
    check_refusal(|d| edge_request(d, &[(0, 1), (0, 1 << 60)]), &["edges.npy, edge 1", "a dataset can have"]);
}

#[test]
fn only_datasets_are_overwritten_and_only_our_own_unfinished_work_is_removed() {
    let directory = tempfile::tempdir().unwrap();
    let request = edge_request(directory.path(), &[(0, 1)]);
    let attempt = |name: &str| {
        let target = directory.path().join(name);
        let job = ImportJob {
            target: &target,
            overwrite: true,
            budget: Budget { host_bytes: 64 << 20 },
            progress: &Silent,
        };
        import(&request, &job).map(|_| ()).map_err(|error| error.to_string())
    };
    for name in ["precious", "mine.partial"] {
        fs::create_dir(directory.path().join(name)).unwrap();
        fs::write(directory.path().join(name).join("thesis.txt"), "x").unwrap();
    }
    assert!(attempt("precious").unwrap_err().contains("not Esker's"));
    assert!(attempt("mine").unwrap_err().contains("not Esker's"));
    assert!(attempt("mine.partial").is_err());
    assert!(attempt("edges.npy").is_err());
    assert!(
        directory.path().join("precious/thesis.txt").exists()
            && directory.path().join("mine.partial/thesis.txt").exists()
    );
    attempt("good").unwrap();
    fs::rename(directory.path().join("edges.npy"), directory.path().join("good/edges.npy")).unwrap();
    let inside = Request { edges: Some(directory.path().join("good/edges.npy")), ..request.clone() };
    let target = directory.path().join("good");
    let job = ImportJob {
        target: &target,
        overwrite: true,
        budget: Budget { host_bytes: 64 << 20 },
        progress: &Silent,
    };
    assert!(import(&inside, &job).unwrap_err().to_string().contains("inside the dataset"));
}

#[test]
fn a_dataset_of_that_name_is_not_overwritten_unless_asked() {
    let directory = tempfile::tempdir().unwrap();
    let request = edge_request(directory.path(), &[(0, 1)]);
    let target = directory.path().join("out");
    make(&request, &target, 64 << 20);
    let job = ImportJob {
        target: &target,
        overwrite: false,
        budget: Budget { host_bytes: 64 << 20 },
        progress: &Silent,
    };
    assert!(import(&request, &job).unwrap_err().to_string().contains("--overwrite"));
    make(&request, &target, 64 << 20);
}
