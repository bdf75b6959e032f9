//! Times a training step of the reference workload: 3-layer GraphSAGE mean, hidden 256, a batch of about 240 000 nodes
//! and 450 000 edges with 128 features. Prints the step by part, the rate of its matmuls, and the rate `gemm` reaches
//! by itself at its best size, measured between the steps. Arguments: threads, steps, dropout, kind (sage, gcn, gat, gin, mlp).

use esker_nn::*;
use esker_types::random::{Key, below, normal};
use std::time::Instant;

const NODES: [usize; 4] = [240_000, 61_500, 8_300, 1_000];
const COLUMNS: usize = 128;
const CLASSES: usize = 32;

struct Batch {
    offsets: Vec<u32>,
    nbrs: Vec<u32>,
}

/// DENSE lists of all nodes but the deepest hop, about 7.3 neighbours each, most of them in the next hop.
fn batch(key: Key) -> Batch {
    let (mut offsets, mut nbrs) = (vec![0], Vec::new());
    for node in 0..NODES[1] {
        let own = NODES[0] - NODES[1] + node;
        // The hop of this node, and the rows that hop may read.
        let hop = (1..3).find(|hop| own < NODES[0] - NODES[hop + 1]).unwrap_or(3);
        let first = NODES[0] - NODES[hop - 1];
        let count = below(key.at(own as u64), 5) + 5 + below(key.with(1).at(own as u64), 2);
        for place in 0..count {
            let bits = key.with(own as u64).at(place);
            nbrs.push((first as u64 + below(bits, (NODES[0] - first) as u64)) as u32);
        }
        offsets.push(nbrs.len() as u32);
    }
    Batch { offsets, nbrs }
}

fn lists(batch: &Batch, layer: usize) -> Adjacency<'_> {
    let skip = NODES[1] - NODES[layer + 1];
    Adjacency {
        inputs: NODES[layer],
        outputs: NODES[layer + 1],
        nbr_offsets: &batch.offsets[skip..],
        nbrs: &batch.nbrs,
        base: (NODES[0] - NODES[layer]) as u32,
        input_degrees: &[],
    }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

struct Times {
    parts: Vec<(&'static str, Vec<f64>)>,
}

impl Times {
    fn time<T>(&mut self, name: &'static str, work: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = work();
        let seconds = start.elapsed().as_secs_f64();
        match self.parts.iter_mut().find(|part| part.0 == name) {
            Some(part) => part.1.push(seconds),
            None => self.parts.push((name, vec![seconds])),
        }
        result
    }
}

fn main() {
    let argument = |index: usize| std::env::args().nth(index);
    let threads: usize = argument(1).map_or(2, |word| word.parse().expect("a count of threads"));
    let steps: usize = argument(2).map_or(15, |word| word.parse().expect("a count of steps"));
    let dropout: f32 = argument(3).map_or(0.0, |word| word.parse().expect("a share"));
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
    let kind = argument(4).unwrap_or("sage".to_string());
    let kind = serde_json::from_str(&format!("\"{kind}\"")).expect("a kind of layer");
    let config = ModelConfig { kind, dropout, gcn_degree: Degree::Sampled, ..ModelConfig::default() };
    pool.install(|| run(threads, steps, &config));
}

fn run(threads: usize, steps: usize, config: &ModelConfig) {
    let backend = CpuBackend::new();
    let key = Key::new(7);
    let batch = batch(key);
    let mut model = Model::new(&backend, config, COLUMNS, CLASSES, 1).expect("a model");
    let mut optimizer = Optimizer::new(&model, &OptimizerConfig::default()).expect("an optimizer");
    let mut input = backend.matrix(NODES[0], COLUMNS);
    input.values_mut().iter_mut().enumerate().for_each(|(i, x)| *x = normal(key.with(9).at(i as u64)));
    let rows: Vec<u32> = (0..NODES[3] as u32).collect();
    let labels: Vec<u32> = rows.iter().map(|row| below(key.at(*row as u64), CLASSES as u64) as u32).collect();
    let mut times = Times { parts: Vec::new() };
    let (mut totals, mut rates, mut best, mut aggregate) = (vec![], vec![], vec![], vec![]);
    let mut loss = 0.0;
    for step in 0..steps as u64 + 2 {
        best.push(best_matmul_rate(threads));
        if step == 2 {
            // The first steps fill the pool.
            times.parts.clear();
            totals.clear();
            rates.clear();
            aggregate.clear();
        }
        let (before, start) = (backend.counters(), Instant::now());
        let graphs: Vec<CpuGraph> =
            times.time("graphs", || (0..3).map(|layer| backend.graph(&lists(&batch, layer))).collect());
        let mut saved: Vec<Saved<CpuBackend>> = Vec::new();
        for layer in 0..3 {
            let name = ["forward 0", "forward 1", "forward 2"][layer];
            let input = saved.last().map_or(&input, |saved| &saved.output);
            let output = times.time(name, || model.forward_layer(layer, &graphs[layer], input, step));
            saved.push(output);
        }
        let logits = &saved[2].output;
        let (found, gradient) =
            times.time("loss", || model.loss(logits, &rows, Labels::Classes(&labels))).expect("a loss");
        loss = found.wait().expect("a loss");
        let mut gradient = Some(gradient);
        for layer in (0..3).rev() {
            let name = ["backward 0", "backward 1", "backward 2"][layer];
            let (Some(own), Some(above)) = (saved.pop(), gradient.take()) else { break };
            let input = saved.last().map_or(&input, |saved| &saved.output);
            gradient = times
                .time(name, || model.backward_layer(layer, &graphs[layer], input, own, above, layer > 0));
        }
        times.time("optimizer", || optimizer.step(&mut model, 0.003)).expect("a step");
        totals.push(start.elapsed().as_secs_f64());
        let after = backend.counters();
        let nanos = (after.matmul_nanos - before.matmul_nanos) as f64 / threads as f64;
        rates.push((after.matmul_operations - before.matmul_operations) as f64 / nanos);
        aggregate.push((after.aggregate_nanos - before.aggregate_nanos) as f64 / threads as f64 / 1e9);
    }
    let edges = batch.nbrs.len();
    println!(
        "{threads} threads, {} nodes, {edges} edges, {:?}, dropout {}, loss {loss:.6}",
        NODES[0], config.kind, config.dropout
    );
    for (name, seconds) in &mut times.parts {
        println!("  {name:12} {:8.2} ms", median(seconds) * 1e3);
    }
    println!("  step         {:8.2} ms", median(&mut totals) * 1e3);
    println!("  aggregating  {:8.2} ms of it", median(&mut aggregate) * 1e3);
    let (rate, best) = (median(&mut rates), median(&mut best) / 1e9);
    println!("  matmuls {rate:.1} GFLOP/s, gemm at its best size {best:.1}: {:.0}%", 100.0 * rate / best);
    let made = backend.counters().allocated_bytes as f64 / (1 << 20) as f64;
    println!(
        "  matrices made {made:.0} MiB in all, peak {:.0} MiB",
        backend.peak_bytes() as f64 / (1 << 20) as f64
    );
}
