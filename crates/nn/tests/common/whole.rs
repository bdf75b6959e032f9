//! Layers over a whole graph whose rows come in parts, against the same layer over all rows at once.

use super::{configs, numbers};
use esker_nn::*;
use esker_types::random::{Key, below};

const NODES: usize = 61;
const INPUT: usize = 12;
const OUTPUT: usize = 3;

/// Ascending neighbours of each node, with repeats, self-loops and nodes without any.
fn lists() -> Vec<Vec<u32>> {
    let key = Key::new(5);
    let list = |node: u64| {
        let count = below(key.at(node), 9) * u64::from(!node.is_multiple_of(7));
        let pick = |at: u64| below(key.with(node).at(at), NODES as u64) as u32;
        let mut list: Vec<u32> = (0..count).map(pick).chain((node % 5 == 1).then_some(node as u32)).collect();
        list.sort_unstable();
        list
    };
    (0..NODES as u64).map(list).collect()
}

fn values<B: Backend>(backend: &B, matrix: &B::Matrix) -> Vec<f32> {
    let mut values = vec![0.0; matrix.rows() * matrix.columns()];
    backend.read(matrix, 0, &mut values);
    values
}

fn uploaded<B: Backend>(backend: &B, values: &[f32], columns: usize) -> B::Matrix {
    let mut matrix = backend.matrix(values.len() / columns, columns);
    backend.write(&mut matrix, 0, values);
    matrix
}

/// The output of a layer, with the rows of so many nodes at a time.
fn in_parts<B: Backend + Clone>(
    model: &Model<B>,
    layer: usize,
    rows: &[f32],
    columns: usize,
    part: usize,
) -> Vec<f32> {
    let (backend, whole, lists) = (model.backend(), model.whole_layer(layer), lists());
    let needs = model.config().whole_needs(layer, INPUT, OUTPUT);
    let own = uploaded(backend, rows, columns);
    let projected = needs.projects.then(|| whole.project(&own));
    let aggregated = projected.as_ref().map_or_else(|| rows.to_vec(), |rows| values(backend, rows));
    let degrees: Vec<u32> = lists.iter().map(|list| list.len() as u32).collect();
    let first = needs.begins_with_own.then(|| uploaded(backend, &aggregated, needs.columns));
    let mut sums = whole.begin(first, &degrees, needs.columns);
    for start in (0..NODES).step_by(part).filter(|_| needs.neighbours) {
        let end = (start + part).min(NODES);
        let (mut offsets, mut nbrs) = (vec![0], Vec::new());
        for (node, list) in lists.iter().enumerate() {
            let among = list.iter().filter(|nbr| (start..end).contains(&(**nbr as usize)));
            let others = among.filter(|nbr| !needs.skips_self || **nbr as usize != node);
            nbrs.extend(others.map(|nbr| nbr - start as u32));
            offsets.push(nbrs.len() as u32);
        }
        let rows = uploaded(backend, &aggregated[start * needs.columns..end * needs.columns], needs.columns);
        let factors = whole.factors(&rows, needs.degrees.then(|| &degrees[start..end]));
        let graph = backend.part_graph(end - start, &offsets, &nbrs);
        whole.add(&mut sums, &graph, &rows, &factors);
    }
    let own = whole.reads_own().then_some(&own);
    let targets = WholeTargets { own, projected: projected.as_ref(), degrees: &degrees };
    values(backend, &whole.end(sums, &targets))
}

/// Every kind of layer: parts do not change a bit, and all rows at once give the same within the tolerance, or to the
/// bit if there is no tolerance and no attention.
pub fn layers_in_any_parts<B: Backend + Clone>(backend: &B, tolerance: f32) {
    let lists = lists();
    let mut offsets = vec![0u32];
    offsets.extend(lists.iter().scan(0, |sum, list| {
        *sum += list.len() as u32;
        Some(*sum)
    }));
    let nbrs: Vec<u32> = lists.concat();
    let degrees: Vec<u32> = lists.iter().map(|list| list.len() as u32).collect();
    let (inputs, outputs) = (NODES, NODES);
    let adjacency =
        Adjacency { inputs, outputs, nbr_offsets: &offsets, nbrs: &nbrs, base: 0, input_degrees: &degrees };
    for config in configs() {
        let model = Model::new(backend, &config, INPUT, OUTPUT, 3).unwrap();
        for layer in 0..2 {
            let columns = config.widths(layer, INPUT, OUTPUT).0;
            let rows = numbers(NODES * columns, 8 + layer as u64);
            let input = uploaded(backend, &rows, columns);
            let expected = values(backend, &model.infer_layer(layer, &backend.graph(&adjacency), &input));
            let whole = in_parts(&model, layer, &rows, columns, NODES);
            for part in [1, 7, 32] {
                assert!(in_parts(&model, layer, &rows, columns, part) == whole, "{part} {config:?}");
            }
            let worst = whole.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            let exact = tolerance == 0.0 && config.kind != Kind::Gat;
            assert!(worst <= if exact { 0.0 } else { tolerance.max(1e-5) }, "{worst} {config:?}");
        }
    }
    backend.check().unwrap();
}
