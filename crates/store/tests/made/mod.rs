//! Small datasets for tests.

use esker_store::{
    ArrayWriter, EdgeInfo, FORMAT_VERSION, FeatureInfo, Manifest, NodeInfo, Provenance, Staging, file,
};
use esker_types::Dtype;
use esker_types::random::{Key, below};
use std::path::Path;

/// Makes a dataset of `nodes` nodes with one edge each and features of `dim` numbers; the seed makes the content.
pub fn make(target: &Path, nodes: u64, dim: u64, seed: u64) {
    try_make(target, nodes, dim, seed).unwrap();
}

/// The same, or why not.
pub fn try_make(target: &Path, nodes: u64, dim: u64, seed: u64) -> esker_store::Result<()> {
    let staging = Staging::begin(target, true)?;
    staging.journal("test")?;
    let directory = staging.directory();
    let key = Key::new(seed);
    let mut offsets = ArrayWriter::create(directory, file::IN_OFFSETS, Dtype::U64, 1).unwrap();
    offsets.write_elements(&(0..=nodes).collect::<Vec<u64>>()).unwrap();
    let mut neighbours = ArrayWriter::create(directory, file::IN_NEIGHBOURS, Dtype::U32, 1).unwrap();
    let sources: Vec<u32> = (0..nodes).map(|node| below(key.at(node), nodes) as u32).collect();
    neighbours.write_elements(&sources).unwrap();
    let mut features = ArrayWriter::create(directory, file::NODE_FEATURES, Dtype::F32, dim).unwrap();
    let numbers: Vec<f32> = (0..nodes * dim).map(|at| key.with(1).at(at) as f32).collect();
    features.write_elements(&numbers).unwrap();
    let info = FeatureInfo { dim, dtype: Dtype::F32, scaled: false, row_normalised: false };
    let manifest = Manifest {
        esker: FORMAT_VERSION,
        checksum: String::new(),
        id: String::new(),
        made_by: "test".into(),
        source: Provenance::default(),
        nodes: NodeInfo { count: nodes, types: vec![], features: Some(info), labels: None, named: false },
        edges: EdgeInfo {
            count: nodes,
            types: vec![],
            undirected: false,
            max_in_degree: 1,
            without_in_neighbours: 0,
            out_neighbours: false,
            relations: None,
            columns: vec![],
        },
        splits: None,
        files: [offsets, neighbours, features].map(|writer| writer.finish().unwrap()).into(),
    };
    staging.publish(&manifest.complete(), "test").map(drop)
}
