//! Rows from memory and from a map are the rows that were stored, whatever their type.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

use esker_fetch::FeatureRows;
use esker_import::ImportJob;
use esker_import::generate::{GraphShape, generate};
use esker_store::{Dataset, file};
use esker_types::{Budget, Dtype, NodeId, Silent};
use half::{bf16, f16};

fn dataset(directory: &std::path::Path, dtype: Dtype) -> Dataset {
    let shape = GraphShape { degree: 3.0, dim: 11, dtype, classes: 4, ..GraphShape::plain(3000) };
    let out = directory.join("graph");
    let budget = Budget { host_bytes: 64 << 20 };
    let job = ImportJob { target: &out, budget, overwrite: false, progress: &Silent };
    generate(&shape, &job).unwrap();
    Dataset::open(&out).unwrap()
}

/// One row, by the format's definition.
fn stored_row(dataset: &Dataset, dtype: Dtype, node: u64) -> Vec<f32> {
    let array = dataset.array(file::NODE_FEATURES).unwrap();
    let first = node * 11;
    let scales = dataset.array(file::NODE_FEATURE_SCALES).map(|array| {
        let mut scales = vec![0f32; 11];
        array.read_at(0, &mut scales).unwrap();
        scales
    });
    let scale = |at: usize| scales.as_ref().map_or(1.0, |scales| scales[at]);
    match dtype {
        Dtype::F32 => {
            let mut row = vec![0f32; 11];
            array.read_at(first, &mut row).unwrap();
            row
        }
        Dtype::F16 | Dtype::Bf16 => {
            let mut row = vec![0u16; 11];
            array.read_at(first, &mut row).unwrap();
            let number = |bits: u16| match dtype {
                Dtype::F16 => f16::from_bits(bits).to_f32(),
                _ => bf16::from_bits(bits).to_f32(),
            };
            row.into_iter().map(number).collect()
        }
        _ => {
            let mut row = vec![0u8; 11];
            array.read_at(first, &mut row).unwrap();
            let number = |byte: u8| if dtype == Dtype::I8 { byte as i8 as f32 } else { byte as f32 };
            row.into_iter().enumerate().map(|(at, byte)| number(byte) * scale(at)).collect()
        }
    }
}

fn check(dtype: Dtype) {
    let directory = tempfile::tempdir().unwrap();
    let dataset = dataset(directory.path(), dtype);
    let nodes: Vec<NodeId> = (0..2500).map(|at| NodeId(at * at * 31 % 3000)).collect();
    let expected: Vec<f32> = nodes.iter().flat_map(|node| stored_row(&dataset, dtype, node.0)).collect();
    let needed = FeatureRows::bytes_in_memory(&dataset).unwrap();
    assert!(FeatureRows::load(&dataset, needed - 1).is_err());
    let mut out = vec![0f32; 2500 * 11];
    for rows in [FeatureRows::load(&dataset, needed).unwrap(), FeatureRows::map(&dataset).unwrap()] {
        out.fill(-1.0);
        rows.gather(&nodes, &[], &mut out).unwrap();
        assert!(out == expected, "{dtype}");
        rows.gather(&nodes[3..6], &[], &mut out[..33]).unwrap();
        assert!(out[..33] == expected[33..66]);
        let said = rows.gather(&[NodeId(3000)], &[], &mut out[..11]).unwrap_err().to_string();
        assert!(said.contains("rows 0 to 2999"), "{said}");
    }
}

#[test]
fn rows_of_every_type_are_what_was_stored() {
    [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::I8].into_iter().for_each(check);
}
