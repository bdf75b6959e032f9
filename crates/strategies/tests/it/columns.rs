//! Columns by name, for a loader: values of a batch's nodes and edges as stored, from every strategy, against a look into the
//! whole array.

use crate::common::{build, job, sample_of, strategy, whole_graph_strategies};
use esker_import::{ImportJob, Request, import};
use esker_sample::Carry;
use esker_store::Dataset;
use esker_strategies::{Job, JobOutline, NamedColumn, RunPosition, StrategyKind, grant};
use esker_types::random::mix;
use esker_types::{Budget, Silent};
use std::path::Path;
use std::sync::Arc;

const COLUMNS: [&str; 3] = ["node-labels", "edge-weight", "node-features"];
const NODES: u64 = 2000;
const EDGES: u64 = 12_000;

/// An array as numpy saves it.
fn save(path: &Path, kind: &str, shape: &str, bytes: &[u8]) {
    let header = format!("{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}");
    let padded = format!("{header:<117}\n");
    let parts = [&b"\x93NUMPY\x01\x00"[..], &118u16.to_le_bytes(), padded.as_bytes(), bytes];
    std::fs::write(path, parts.concat()).unwrap();
}

/// A graph with weights of edges, and a job that wants columns.
fn wanted(directory: &Path) -> (Arc<Dataset>, Job) {
    let ends: Vec<i64> = (0..2 * EDGES).map(|end| (mix(end) % NODES) as i64).collect();
    let weights: Vec<f32> = (0..EDGES).map(|edge| edge as f32 + 0.5).collect();
    let features: Vec<f32> = (0..NODES * 7).map(|number| number as f32 * 0.25).collect();
    let labels: Vec<i64> = (0..NODES).map(|node| (node % 4) as i64).collect();
    let file = |name: &str| Some(directory.join(name));
    save(&directory.join("e.npy"), "<i8", &format!("(2, {EDGES})"), bytemuck::cast_slice(&ends));
    save(&directory.join("w.npy"), "<f4", &format!("({EDGES},)"), bytemuck::cast_slice(&weights));
    save(&directory.join("x.npy"), "<f4", &format!("({NODES}, 7)"), bytemuck::cast_slice(&features));
    save(&directory.join("y.npy"), "<i8", &format!("({NODES},)"), bytemuck::cast_slice(&labels));
    let request = Request {
        format: "npy".into(),
        edges: file("e.npy"),
        edge_weights: file("w.npy"),
        features: file("x.npy"),
        labels: file("y.npy"),
        ..Request::default()
    };
    let (target, budget) = (directory.join("g"), Budget { host_bytes: 64 << 20 });
    import(&request, &ImportJob { target: &target, budget, overwrite: false, progress: &Silent }).unwrap();
    let dataset = Arc::new(Dataset::open(&target).unwrap());
    let mut job = job(&dataset, 3);
    job.columns = COLUMNS.map(str::to_string).to_vec();
    job.settings.carry = Carry { edges: true, ..Carry::default() };
    (dataset, job)
}

/// All bytes of an array.
fn whole(dataset: &Dataset, name: &str) -> Vec<u8> {
    let array = dataset.array(name).unwrap();
    let entry = array.entry();
    let mut bytes = vec![0; (entry.rows * entry.row_bytes()) as usize];
    let mut elements = array.elements(0).unwrap();
    match entry.dtype.bytes() {
        4 => assert!(elements.fill(bytemuck::cast_slice_mut::<u8, u32>(&mut bytes)).is_ok()),
        _ => assert!(elements.fill(&mut bytes).is_ok()),
    }
    bytes
}

#[test]
fn every_strategy_hands_out_the_columns_of_nodes_and_edges() {
    let directory = tempfile::tempdir().unwrap();
    let (dataset, job) = wanted(directory.path());
    let arrays = COLUMNS.map(|name| whole(&dataset, name));
    for kind in whole_graph_strategies() {
        let mut source = strategy(kind, &job).batches(&job, RunPosition::START, None).unwrap();
        let mut batches = 0;
        while let Some(batch) = source.next().unwrap() {
            let sample = sample_of(&batch);
            let nodes: Vec<u64> = sample.node_ids.iter().map(|node| node.0).collect();
            let edges: Vec<u64> =
                sample.blocks.iter().flat_map(|block| &block.edges).map(|edge| edge.0).collect();
            assert!(edges.len() as u64 == sample.edge_count() && !edges.is_empty());
            for (number, column) in batch.input.columns.iter().enumerate() {
                let NamedColumn { name, by_node, dtype, width, bytes } = column;
                let ids = if *by_node { &nodes } else { &edges };
                let row = *width * dtype.bytes() as usize;
                let expected: Vec<u8> =
                    ids.iter().flat_map(|id| &arrays[number][*id as usize * row..][..row]).copied().collect();
                assert!(*bytes == expected && name == COLUMNS[number], "{kind} {name}");
            }
            assert_eq!(batch.input.columns.len(), COLUMNS.len());
            batches += 1;
        }
        assert_eq!(batches, 24, "{kind}");
        let stages = source.counters().stages;
        let columns = stages.iter().find(|stage| stage.name == "columns");
        assert_eq!(columns.map(|stage| stage.items), Some(24), "{kind}: {stages:?}");
    }
}

#[test]
fn columns_that_cannot_be_are_refused_and_those_that_can_are_counted() {
    let directory = tempfile::tempdir().unwrap();
    let (_, job) = wanted(directory.path());
    let refused = |columns: &[&str], carry: Carry| {
        let mut job = job.clone();
        job.columns = columns.iter().map(|name| name.to_string()).collect();
        job.settings.carry = carry;
        let mut memory = build(StrategyKind::Memory);
        memory.prepare(&job).unwrap();
        memory.batches(&job, RunPosition::START, None).err().unwrap().to_string()
    };
    let said = refused(&["node-colour"], Carry::default());
    assert!(said.contains("node-colour") && said.contains("node-labels"), "{said}");
    assert!(refused(&["in-offsets"], Carry::default()).contains("in-offsets"));
    assert!(refused(&["edge-weight"], Carry::default()).contains("edge ids"));
    let needs = |job: &JobOutline| StrategyKind::Mmap.needs(job);
    let table = |job: &JobOutline| {
        let others = |_: &JobOutline| Ok::<_, esker_strategies::StrategyError>(Default::default());
        grant(&needs, job, u64::MAX, &others).unwrap().unwrap().table
    };
    let with = table(&job);
    let without = table(&JobOutline { columns: Vec::new(), ..job.outline.clone() });
    let bound = job.bound(&job.settings, 64);
    let batch = bound.nodes * (4 + 28) + bound.edges * 4;
    let line = with.lines.iter().find(|line| line.what.starts_with("columns of")).unwrap();
    assert_eq!(line.bytes, batch * 3);
    assert!(with.total() - without.total() > batch * 3);
}
