//! Stores of hidden rows: what is pulled is what was pushed, as stored, and drift is what a naive sum says.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

use esker_nn::*;
use esker_types::Dtype;
use half::f16;
use proptest::prelude::*;
use std::collections::BTreeMap;

/// A row as it is stored.
fn stored(row: &[f32], dtype: Dtype) -> Vec<f32> {
    let one = |value: &f32| match dtype {
        Dtype::F16 => f16::from_f32(value.clamp(-65504.0, 65504.0)).to_f32(),
        _ => *value,
    };
    row.iter().map(one).collect()
}

/// How far a row moved.
fn drift(before: &[f32], after: &[f32]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>().sqrt();
    let moved = norm(&mut before.iter().zip(after).map(|(before, after)| *after as f64 - *before as f64));
    let length = norm(&mut before.iter().map(|value| *value as f64));
    match (moved, length) {
        (0.0, _) => 0.0,
        (_, 0.0) => 1.0,
        (moved, length) => moved / length,
    }
}

fn numbers() -> impl Strategy<Value = f32> {
    prop_oneof![6 => -4.0f32..4.0, 2 => Just(0.0), 1 => Just(1e6), 1 => Just(-7e4), 1 => -1e-7f32..1e-7]
}

proptest! {
    #[test]
    fn rows_are_pulled_as_they_were_pushed(
        columns in 1usize..40, slots in 1u32..30, half: bool, device in 0u64..3000,
        pushes in prop::collection::vec((prop::collection::btree_set(0u32..30, 0..12), any::<u32>()), 1..8),
        values in prop::collection::vec(numbers(), 40 * 30),
    ) {
        let (backend, dtype) = (CpuBackend::new(), if half { Dtype::F16 } else { Dtype::F32 });
        let shape = HiddenShape { slots: slots as u64, columns, dtype, device_bytes: device };
        let mut hidden = backend.hidden_rows(shape).unwrap();
        let mut naive: BTreeMap<u32, Vec<f32>> = (0..slots).map(|slot| (slot, vec![0.0; columns])).collect();
        let mut expected = 0.0;
        for (chosen, turn) in &pushes {
            let chosen: Vec<u32> = chosen.iter().copied().filter(|slot| *slot < slots).collect();
            let mut rows = backend.matrix(chosen.len(), columns);
            let replaces: Vec<bool> = chosen.iter().map(|slot| (slot + turn) % 3 > 0).collect();
            for (index, slot) in chosen.iter().enumerate() {
                let start = (*turn as usize % 7 + *slot as usize) * columns % (values.len() - columns);
                let row = &values[start..][..columns];
                backend.write(&mut rows, index, row);
                let before = naive.insert(*slot, stored(row, dtype)).unwrap();
                if replaces[index] {
                    expected += drift(&before, &naive[slot]);
                }
            }
            hidden.push(&rows, &chosen, &replaces);
        }
        let all: Vec<u32> = (0..slots).rev().collect();
        let mut pulled = backend.matrix(all.len(), columns);
        hidden.pull(&all, &mut pulled);
        for (row, slot) in pulled.values().chunks_exact(columns).zip(&all) {
            prop_assert_eq!(row, &naive[slot][..]);
        }
        let found = hidden.drift().unwrap();
        prop_assert!((found - expected).abs() <= 1e-9 * expected.max(1.0), "{} {}", found, expected);
        // As stored, in two parts, into another store.
        let bytes = shape.row_bytes();
        let mut content = vec![0; slots as usize * bytes];
        hidden.read(0, &mut content);
        let (mut copy, part) = (backend.hidden_rows(shape).unwrap(), slots as usize / 2);
        copy.write(0, &content[..part * bytes]);
        copy.write(part as u64, &content[part * bytes..]);
        let mut again = backend.matrix(all.len(), columns);
        copy.pull(&all, &mut again);
        prop_assert_eq!(again.values(), pulled.values());
        prop_assert!(shape.device_slots() <= slots as u64);
    }
}
