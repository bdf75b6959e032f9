//! Datasets made of facts, and every topology that they can be asked through.
#![allow(dead_code, reason = "each test takes what it needs")]

use esker_import::{ImportJob, Request, import};
use esker_sample::{AnyTopology, Direction, DiskGraph, EdgeLookup, OnDisk};
use esker_store::Dataset;
use esker_types::{Budget, Silent};
use std::fs;
use std::path::Path;
use std::sync::Arc;

/// Source, relation, target.
pub type Fact = (u64, u32, u64);

/// Imports facts: source, relation and target of each. Nodes are numbered as they appear if there are relations.
pub fn imported(directory: &Path, facts: &[Fact], relations: bool, wide_ids: bool) -> Arc<Dataset> {
    match relations {
        true => imported_splits(directory, [facts, &facts[..1], &facts[..1]], wide_ids),
        false => imported_ends(directory, facts, wide_ids),
    }
}

/// Imports facts that train, validate and test.
pub fn imported_splits(directory: &Path, facts: [&[Fact]; 3], wide_ids: bool) -> Arc<Dataset> {
    let from = directory.join("from");
    fs::create_dir(&from).unwrap();
    let line = |(source, relation, target): &Fact| format!("n{source}\tr{relation}\tn{target}\n");
    for (name, facts) in ["train.txt", "valid.txt", "test.txt"].into_iter().zip(facts) {
        fs::write(from.join(name), facts.iter().map(line).collect::<String>()).unwrap();
    }
    let request = Request { out_neighbours: true, wide_ids, ..Request::default() };
    make(directory, &Request { format: "triples".into(), from: Some(from), ..request })
}

fn imported_ends(directory: &Path, facts: &[Fact], wide_ids: bool) -> Arc<Dataset> {
    let from = directory.join("from");
    fs::create_dir(&from).unwrap();
    let ends = facts.iter().map(|fact| fact.0).chain(facts.iter().map(|fact| fact.2));
    let header = format!("{{'descr': '<i8', 'fortran_order': False, 'shape': (2, {}), }}\n", facts.len());
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.as_bytes());
    bytes.extend(ends.flat_map(u64::to_le_bytes));
    let edges = from.join("edges.npy");
    fs::write(&edges, bytes).unwrap();
    let request = Request { out_neighbours: true, wide_ids, ..Request::default() };
    make(directory, &Request { format: "npy".into(), edges: Some(edges), nodes: Some(40), ..request })
}

fn make(directory: &Path, request: &Request) -> Arc<Dataset> {
    let job = &ImportJob {
        target: &directory.join("to"),
        budget: Budget { host_bytes: 64 << 20 },
        overwrite: true,
        progress: &Silent,
    };
    import(request, job).unwrap();
    Arc::new(Dataset::open(job.target).unwrap())
}

/// Every topology that a dataset can be asked through.
pub fn lookups(dataset: &Arc<Dataset>, direction: Direction) -> Vec<Arc<dyn EdgeLookup>> {
    let graph = Arc::new(DiskGraph::open(dataset, direction).unwrap());
    match AnyTopology::load(dataset, direction, 1 << 30).unwrap() {
        AnyTopology::Narrow(memory) => {
            vec![Arc::new(memory), Arc::new(OnDisk::<u32>::new(graph.clone(), None)), graph]
        }
        AnyTopology::Wide(memory) => {
            vec![Arc::new(memory), Arc::new(OnDisk::<u64>::new(graph.clone(), None)), graph]
        }
    }
}
