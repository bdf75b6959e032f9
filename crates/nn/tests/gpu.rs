//! A GPU against PyTorch's fixtures and against the CPU backend, within 1e-4; the same bits every time. Skipped, saying so,
//! where there is no GPU.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

mod common;

use common::link::{DECODERS, LOSSES, LinkCase, SIDES};
use common::{Batch, configs, golden, link, link_golden, numbers, stored, whole};
use esker_cuda::{DeviceAdjacency, DeviceMatrix, Gathering, Gpu, NodeCache, Pinned, Precision};
use esker_nn::*;
use esker_plan::{Placement, Placements};
use esker_types::random::{Key, below};
use esker_types::{Dtype, SlotIndex, StoredRows};

const TOLERANCE: f32 = 1e-4;

/// One GPU for all tests of a name, or none.
fn backend(test: &str) -> Option<CudaBackend> {
    Gpu::or_skip(test).map(CudaBackend::new)
}

#[test]
fn forward_and_backward_agree_with_pytorch() {
    let Some(backend) = backend("forward and backward") else { return };
    golden::forward_and_backward(&backend, TOLERANCE);
}

#[test]
fn ten_optimizer_steps_agree_with_pytorch() {
    let Some(backend) = backend("optimizer steps") else { return };
    golden::ten_optimizer_steps(&backend, TOLERANCE);
}

#[test]
fn losses_agree_with_pytorch() {
    let Some(backend) = backend("losses") else { return };
    golden::losses(&backend, TOLERANCE);
}

#[test]
fn whole_layers_are_the_same_in_any_parts() {
    let Some(backend) = backend("whole layers in parts") else { return };
    whole::layers_in_any_parts(&backend, TOLERANCE);
}

#[test]
fn columns_are_copied_where_they_belong() {
    let Some(backend) = backend("copied columns") else { return };
    common::columns_are_copied(&backend);
}

fn values<B: Backend>(backend: &B, matrix: &B::Matrix) -> Vec<f32> {
    let mut values = vec![0.0; matrix.rows() * matrix.columns()];
    backend.read(matrix, 0, &mut values);
    values
}

/// What one training step gives: loss, logits, gradients by name, gradient of the input, then the parameters.
struct Outcome {
    loss: f64,
    numbers: Vec<(String, Vec<f32>)>,
}

fn step<B: Backend + Clone>(
    backend: &B,
    config: &ModelConfig,
    batch: &Batch,
    [input, output]: [usize; 2],
) -> Outcome {
    let mut model = Model::new(backend, config, input, output, 3).unwrap();
    let optimizer = OptimizerConfig { clip_norm: Some(1.0), ..OptimizerConfig::default() };
    let mut optimizer = Optimizer::new(&model, &optimizer).unwrap();
    let targets = batch.rows[batch.rows.len() - 1] as u64;
    let pick = |seed: u64, bound: u64| -> Vec<u32> {
        (0..targets + 5).map(|index| below(Key::new(seed).at(index), bound) as u32).collect()
    };
    let (labels, seeds) = (pick(1, output as u64), pick(2, targets));
    let mut host = backend.host_rows(batch.rows[0], input);
    host.values_mut().copy_from_slice(&numbers(batch.rows[0] * input, 6));
    let rows = backend.upload(host, input);
    let graphs = batch.graphs(backend);
    let activations = model.forward(&graphs, &rows, 0);
    let mut found = vec![("logits".to_string(), values(backend, activations.logits()))];
    let (loss, gradient) = model.loss(activations.logits(), &seeds, Labels::Classes(&labels)).unwrap();
    let input = model.backward(&graphs, &rows, activations, gradient, true).unwrap();
    found.push(("input gradient".to_string(), values(backend, &input)));
    found.extend(model.parameters().into_iter().map(|p| (p.name.clone(), values(backend, &p.gradient))));
    let length = optimizer.step(&mut model, 0.01).unwrap().unwrap().wait().unwrap();
    found.push(("length".to_string(), vec![length as f32]));
    backend.check().unwrap();
    found.extend(
        model.export().into_iter().filter(|n| n.name.contains("running")).map(|n| (n.name, n.values)),
    );
    found.push(("inferred".to_string(), values(backend, &model.infer(&graphs, &rows))));
    Outcome { loss: loss.wait().unwrap(), numbers: found }
}

fn assert_close(what: &str, found: &Outcome, expected: &Outcome) {
    assert!((found.loss - expected.loss).abs() < 1e-4 * expected.loss.abs().max(1.0), "{what}: loss");
    assert_eq!(found.numbers.len(), expected.numbers.len());
    for ((name, found), (_, expected)) in found.numbers.iter().zip(&expected.numbers) {
        assert_eq!(found.len(), expected.len(), "{what} {name}");
        // After Adam's first step numbers near zero may differ in sign: inferred rows are looser.
        let tolerance = if name == "inferred" { 2e-2 } else { TOLERANCE };
        let largest = expected.iter().fold(1e-2f32, |largest, x| largest.max(x.abs()));
        for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
            let error = (found - expected).abs() / largest;
            assert!(
                error <= tolerance,
                "{what} {name}[{index}]: {found} against {expected}, error {error:e}"
            );
        }
    }
}

#[test]
fn every_layer_agrees_with_the_cpu_in_every_shape() {
    let Some(gpu) = backend("layers against the CPU") else { return };
    let shapes: [(&[usize], u64); 4] =
        [(&[40, 20, 7], 4), (&[3000, 900, 100], 12), (&[300, 300, 300], 0), (&[2000, 5, 1], 700)];
    for config in configs() {
        for (rows, most) in shapes {
            for (hidden, widths) in [(8, [5, 3]), (64, [32, 10]), (128, [100, 47]), (300, [257, 4])] {
                let config = ModelConfig { hidden: hidden / config.heads * config.heads, ..config.clone() };
                let batch = Batch::new(rows, most, 4);
                let (cpu, gpu) =
                    (step(&CpuBackend::new(), &config, &batch, widths), step(&gpu, &config, &batch, widths));
                assert_close(&format!("{config:?} {rows:?} {widths:?}"), &gpu, &cpu);
            }
        }
    }
}

#[test]
fn input_dropout_and_output_heads_agree_with_the_cpu() {
    let Some(gpu) = backend("dropout against the CPU") else { return };
    let config = ModelConfig {
        kind: Kind::Gat,
        layers: 2,
        hidden: 64,
        heads: 4,
        output_heads: Some(3),
        dropout: 0.4,
        input_dropout: 0.3,
        attention_dropout: 0.5,
        activation: Activation::Elu,
        ..ModelConfig::default()
    };
    let batch = Batch::new(&[500, 200, 60], 9, 5);
    let found = step(&gpu, &config, &batch, [33, 5]);
    assert_close("GAT with every dropout", &found, &step(&CpuBackend::new(), &config, &batch, [33, 5]));
}

#[test]
fn the_same_step_has_the_same_bits_on_every_run_and_every_opening() {
    let Some(first) = backend("the same bits") else { return };
    for config in configs() {
        let batch = Batch::new(&[9000, 5000, 700], 8, 4);
        let bits = |outcome: Outcome| -> Vec<u32> {
            outcome.numbers.iter().flat_map(|(_, numbers)| numbers.iter().map(|x| x.to_bits())).collect()
        };
        let expected = bits(step(&first, &config, &batch, [20, 7]));
        assert!(bits(step(&first, &config, &batch, [20, 7])) == expected, "{config:?}");
        let second = backend("the same bits").unwrap();
        assert!(bits(step(&second, &config, &batch, [20, 7])) == expected, "opened again: {config:?}");
    }
}

#[test]
fn lower_precisions_are_close_and_are_really_taken() {
    if backend("precisions").is_none() {
        return;
    }
    let config = ModelConfig { hidden: 128, layers: 2, ..ModelConfig::default() };
    let batch = Batch::new(&[3000, 900, 100], 12, 4);
    let run = |precision| {
        step(&CudaBackend::new(Gpu::open(0, None, precision).unwrap()), &config, &batch, [64, 10])
    };
    let [exact, tf32, bf16] = [Precision::F32, Precision::Tf32, Precision::Bf16].map(run);
    let distance = |other: &Outcome| {
        let pairs = other.numbers[0].1.iter().zip(&exact.numbers[0].1);
        let largest = exact.numbers[0].1.iter().fold(0f32, |largest, x| largest.max(x.abs()));
        pairs.fold(0f32, |most, (a, b)| most.max((a - b).abs())) / largest
    };
    let (tf32, bf16) = (distance(&tf32), distance(&bf16));
    assert!(tf32 > 1e-6 && tf32 < 5e-3, "{tf32}");
    assert!(bf16 > tf32 && bf16 < 5e-2, "{bf16}");
}

#[test]
fn kernels_stay_inside_memory_of_exactly_their_size() {
    // A stray access shows under compute-sanitizer, which sees every buffer by itself here.
    if backend("memory of exact sizes").is_none() {
        return;
    }
    let gpu = CudaBackend::new(Gpu::open_exact(0, Precision::F32).unwrap());
    for config in configs() {
        for (rows, most, widths) in
            [(&[41, 19, 7], 5, [5, 3]), (&[333, 77, 10], 9, [33, 7]), (&[129, 65, 1], 3, [130, 2])]
        {
            let config = ModelConfig { hidden: 34 / config.heads * config.heads, ..config.clone() };
            let batch = Batch::new(rows, most, 8);
            let expected = step(&CpuBackend::new(), &config, &batch, widths);
            assert_close(&format!("{config:?} {rows:?}"), &step(&gpu, &config, &batch, widths), &expected);
        }
    }
    for decoder in DECODERS {
        for shape in [[60, 90, 34, 40, 70], [30, 13, 6, 1, 9], [150, 70, 130, 0, 0]] {
            let case = LinkCase::new(decoder, LinkLoss::Softmax, ReplacedEnd::Source, shape, 7);
            let (found, expected) = (case.run(&gpu, false), case.run(&CpuBackend::new(), false));
            let wide = |all: &[f32]| all.iter().map(|x| *x as f64).collect::<Vec<f64>>();
            let what = format!("{decoder:?} {shape:?}");
            link::assert_close(&what, TOLERANCE as f64, &found.nodes, &wide(&expected.nodes));
            link::assert_close(&what, TOLERANCE as f64, &found.relations, &wide(&expected.relations));
        }
    }
}

#[test]
fn rows_land_while_a_step_computes() {
    let Some(gpu) = Gpu::or_skip("copies beside work") else { return };
    let (rows, columns) = (1 << 16, 128);
    let from = DeviceMatrix::new(&gpu, 1 << 20, 512);
    let mut to = DeviceMatrix::new(&gpu, 1 << 20, 512);
    let upload = |rows: Pinned| drop(gpu.upload(rows, columns));
    let pinned = || Pinned::new(&gpu, rows * columns);
    upload(pinned());
    gpu.synchronize().unwrap();
    // Taken before the work starts: pinning may take longer than the work, beside other tests.
    let [first, second, third] = [pinned(), pinned(), pinned()];
    (0..400).for_each(|_| gpu.copy_matrix(&from, &mut to));
    // The first takes memory that is free; the second must not take it again, since work before its release goes on.
    let before = gpu.allocations();
    upload(first);
    upload(second);
    let (after, busy) = (gpu.allocations(), !gpu.is_idle().unwrap());
    gpu.synchronize().unwrap();
    // A tool that makes every launch wait leaves nothing to overlap.
    assert!(!busy || after > before, "memory that is still in use was landed in");
    let warm = gpu.allocations();
    upload(third);
    assert_eq!(gpu.allocations(), warm);
}

#[test]
fn rows_come_from_the_cache_from_the_batch_and_from_the_host() {
    let Some(gpu) = Gpu::or_skip("the row cache") else { return };
    for columns in [1usize, 3, 8, 100, 128, 1024] {
        let nodes = 2000usize;
        let all = numbers(nodes * columns, 9);
        let mut host = Pinned::new(&gpu, nodes * columns);
        host.floats_mut().copy_from_slice(&all);
        let row = |node: u32| &all[node as usize * columns..][..columns];
        let rows_of =
            |nodes: &[u32]| -> Vec<f32> { nodes.iter().flat_map(|node| row(*node).to_vec()).collect() };
        let mut cache = NodeCache::new(&gpu, nodes, 300, columns).unwrap();
        for part in 0..3u32 {
            let kept: Vec<u32> =
                (0..100).map(|i| (i * 17 + part * 5) % 2000).filter(|n| !cache.has(*n)).collect();
            cache.add(&kept, &rows_of(&kept));
        }
        let batch: Vec<u32> = (0..700).map(|i| below(Key::new(3).at(i), 2000) as u32).collect();
        let missing: Vec<u32> = batch.iter().copied().filter(|node| !cache.has(*node)).collect();
        assert!(!missing.is_empty() && missing.len() < batch.len() && !cache.is_empty());
        let mut others = DeviceMatrix::new(&gpu, missing.len(), columns);
        gpu.write(&mut others, 0, &rows_of(&missing));
        let mut to = DeviceMatrix::new(&gpu, batch.len(), columns);
        let mut found = vec![0.0; batch.len() * columns];
        let mut check = |what: &str, to: &mut DeviceMatrix| {
            gpu.read(to, 0, &mut found);
            gpu.check().unwrap();
            assert!(found == rows_of(&batch), "{what} of {columns} columns");
            gpu.fill(to, 0.0);
        };
        cache.assemble(&batch, &others, &mut to);
        check("cache and batch", &mut to);
        cache.assemble_from_host(&batch, &host, &mut to);
        check("cache and host", &mut to);
        gpu.gather_from_host(&host, &batch, &mut to);
        check("host", &mut to);
    }
}

/// Rows of any bits that numbers can have, with scales where they have any.
fn stored_rows(dtype: Dtype, columns: usize, scaled: bool) -> StoredRows {
    StoredRows { columns, dtype, scales: scaled.then(|| numbers(columns, 17)) }
}

fn random_bytes(count: usize, seed: u64) -> Vec<u8> {
    (0..count as u64).map(|at| Key::new(seed).at(at) as u8).collect()
}

/// A batch of so many rows from cached slots and rows that it read, some of them skipped, and what it is on the CPU.
fn cached_batch(
    cache: &std::sync::Arc<CudaCache>,
    rows: &StoredRows,
    slots: &[u8],
    [missed, words]: [usize; 2],
    seed: u64,
) -> (BatchOf<CudaBackend>, Vec<u32>) {
    let row_bytes = rows.row_bytes();
    let own = random_bytes(missed * row_bytes, seed);
    let all = [slots, &own].concat();
    let (slot_count, all_rows) = ((slots.len() / row_bytes) as u32, (all.len() / row_bytes) as u64);
    let picked: Vec<u32> =
        (0..words as u64).map(|at| below(Key::new(seed).with(1).at(at), all_rows) as u32).collect();
    let skips = |at: usize| below(Key::new(seed).with(2).at(at as u64), 7) == 0;
    let placement = |(at, row): (usize, &u32)| match row.checked_sub(slot_count) {
        _ if skips(at) => Placement::Skip.encode(),
        Some(index) => Placement::Read(index).encode(),
        None => Placement::Hit(SlotIndex(*row)).encode(),
    };
    let placements =
        Placements { words: picked.iter().enumerate().map(placement).collect(), kept: Vec::new() };
    // More memory than whole rows take, as reading in blocks needs.
    let mut memory = cache.missed(own.len() + 3);
    assert_eq!(memory.bytes_mut().len(), own.len() + 3);
    memory.bytes_mut()[..own.len()].copy_from_slice(&own);
    let stored = picked.iter().flat_map(|row| &all[*row as usize * row_bytes..][..row_bytes]);
    let mut expected = stored::as_f32(rows, &stored.copied().collect::<Vec<u8>>());
    for (at, row) in expected.chunks_exact_mut(rows.columns).enumerate() {
        if skips(at) {
            row.fill(0.0);
        }
    }
    (cache.batch(&placements, memory), expected.into_iter().map(f32::to_bits).collect())
}

#[test]
fn cached_rows_are_assembled_as_the_cpu_would() {
    let Some(gpu) = backend("cached rows") else { return };
    let kinds = [
        (Dtype::F32, false),
        (Dtype::F16, false),
        (Dtype::Bf16, false),
        (Dtype::U8, false),
        (Dtype::U8, true),
        (Dtype::I8, false),
        (Dtype::I8, true),
    ];
    // Slots on the device and in host memory, and rows that a batch brings.
    let tiers = [[50, 40, 30], [50, 40, 0], [50, 0, 30], [0, 40, 30], [50, 0, 0], [0, 40, 0], [0, 0, 30]];
    for (dtype, scaled) in kinds {
        for columns in [1usize, 4, 7, 12, 20, 33, 64, 100, 128, 132, 256, 602, 1024, 1028] {
            let rows = stored_rows(dtype, columns, scaled);
            let row_bytes = rows.row_bytes();
            for [device, host, fresh] in tiers {
                let slots = random_bytes((device + host) * row_bytes, 5);
                let held = gpu.cache(&rows, (device + host) as u64, (device * row_bytes) as u64);
                let held = held.unwrap().unwrap();
                assert_eq!(held.device_slots(), device as u64);
                // In pieces, one of them across both memories.
                for (part, stored) in slots.chunks(7 * row_bytes).enumerate() {
                    held.fill(part as u64 * 7, stored).unwrap();
                }
                for words in [0, 1, 77] {
                    let (batch, expected) = cached_batch(&held, &rows, &slots, [fresh, words], 9);
                    let uploaded = gpu.assemble(batch, columns);
                    assert_eq!((uploaded.rows(), uploaded.columns()), (words, columns));
                    let same =
                        words == 0 || values(&gpu, &uploaded).into_iter().map(f32::to_bits).eq(expected);
                    gpu.check().unwrap();
                    assert!(same, "{rows:?} {device} {host} {fresh}: {words} rows");
                }
            }
        }
    }
}

#[test]
fn batches_of_held_rows_do_not_disturb_each_other() {
    let Some(gpu) = backend("batches of held rows") else { return };
    let rows = stored_rows(Dtype::F16, 128, false);
    let (slots, on_device) = (5000, 2000);
    let stored = random_bytes(slots * rows.row_bytes(), 5);
    let held = gpu.cache(&rows, slots as u64, (on_device * rows.row_bytes()) as u64).unwrap().unwrap();
    held.fill(0, &stored).unwrap();
    // Memory of every size goes round while nobody waits; some batches are read late, some are never uploaded.
    let mut uploaded = Vec::new();
    for number in 0..60 {
        let sizes = [below(Key::new(2).at(number), 3000), below(Key::new(3).at(number), 20_000)];
        let (batch, expected) =
            cached_batch(&held, &rows, &stored, sizes.map(|size| size as usize), 100 + number);
        if number % 7 == 3 {
            continue;
        }
        uploaded.push((gpu.assemble(batch, 128), expected));
        if number % 5 == 0 {
            uploaded.remove(0);
        }
        if uploaded.len() > 4 {
            let (matrix, expected) = uploaded.remove(1);
            assert!(values(&gpu, &matrix).into_iter().map(f32::to_bits).eq(expected), "batch {number}");
        }
    }
    drop(held);
    for (matrix, expected) in uploaded {
        assert!(values(&gpu, &matrix).into_iter().map(f32::to_bits).eq(expected));
    }
    gpu.check().unwrap();
}

#[test]
fn held_rows_land_while_a_step_computes() {
    let Some(backend) = backend("held rows beside work") else { return };
    let gpu = backend.gpu();
    let rows = stored_rows(Dtype::F32, 128, false);
    let stored = random_bytes(40_000 * rows.row_bytes(), 5);
    let held = backend.cache(&rows, 40_000, 20_000 * rows.row_bytes() as u64).unwrap().unwrap();
    held.fill(0, &stored).unwrap();
    let upload = |seed| backend.assemble(cached_batch(&held, &rows, &stored, [1000, 30_000], seed).0, 128);
    drop(upload(1));
    gpu.synchronize().unwrap();
    let batch = cached_batch(&held, &rows, &stored, [1000, 30_000], 2).0;
    let (before, _) = gpu.busy_seconds();
    let from = DeviceMatrix::new(gpu, 1 << 20, 512);
    let mut to = DeviceMatrix::new(gpu, 1 << 20, 512);
    (0..400).for_each(|_| gpu.copy_matrix(&from, &mut to));
    let uploaded = backend.assemble(batch, 128);
    let busy = !gpu.is_idle().unwrap();
    let mut beside = false;
    while !gpu.is_idle().unwrap() && !beside {
        beside = gpu.busy_seconds().0 > before;
    }
    // A tool that makes every launch wait leaves nothing to overlap.
    assert!(!busy || beside, "rows were brought together behind the step, not beside it");
    drop(uploaded);
    gpu.synchronize().unwrap();
}

#[test]
fn held_rows_that_find_no_room_are_refused_and_the_gpu_goes_on() {
    let Some(gpu) = backend("room for held rows") else { return };
    let rows = stored_rows(Dtype::F32, 1 << 20, false);
    // More than there are addresses.
    let said = |device_bytes| gpu.cache(&rows, 1 << 27, device_bytes).err().unwrap().to_string();
    let (device, host) = (said(1 << 49), said(0));
    assert!(device.contains("--gpu-memory") && device.contains("512 TiB"), "{device}");
    assert!(host.contains("--feature-cache") && host.contains("512 TiB"), "{host}");
    gpu.check().unwrap();
    let held = gpu.cache(&rows, 1, 0).unwrap().unwrap();
    held.fill(0, &vec![0; rows.row_bytes()]).unwrap();
    let placements = Placements { words: vec![0, 0], kept: Vec::new() };
    let rows = gpu.assemble(held.batch(&placements, held.missed(0)), 1 << 20);
    assert!(values(&gpu, &rows) == vec![0.0; 2 << 20]);
}

#[test]
fn lists_with_every_number_of_inputs_are_turned_round_in_order() {
    let Some(gpu) = Gpu::or_skip("transposed lists") else { return };
    for (inputs, outputs, most) in
        [(1usize, 1usize, 3u64), (130, 20, 40), (70_000, 9000, 30), (600_000, 40_000, 25), (5, 5, 5000)]
    {
        let key = Key::new(inputs as u64);
        let mut offsets = vec![0u32];
        let mut nbrs = Vec::new();
        for output in 0..outputs as u64 {
            for place in 0..below(key.at(output), most + 1) {
                nbrs.push(below(key.with(output).at(place), inputs as u64) as u32);
            }
            offsets.push(nbrs.len() as u32);
        }
        let lists = DeviceAdjacency::new(&gpu, inputs, &offsets, &nbrs, 0, &[]);
        // Gradients that make sums in another order come out differently.
        let slopes = numbers(outputs, 4);
        let mut gradient = DeviceMatrix::new(&gpu, outputs, 1);
        gpu.write(&mut gradient, 0, &slopes);
        let mut to = DeviceMatrix::new(&gpu, inputs, 1);
        gpu.hand_back(&lists, &gradient, Gathering::Sum, None, false, &mut to);
        let mut found = vec![0.0; inputs];
        gpu.read(&to, 0, &mut found);
        gpu.check().unwrap();
        let mut expected = vec![0.0f32; inputs];
        for output in 0..outputs {
            for nbr in &nbrs[offsets[output] as usize..offsets[output + 1] as usize] {
                expected[*nbr as usize] += slopes[output];
            }
        }
        assert!(found == expected, "{inputs} inputs");
    }
}

#[test]
fn too_little_memory_is_said_and_nothing_is_computed_after_it() {
    if backend("the limit of memory").is_none() {
        return;
    }
    let gpu = Gpu::open(0, Some(100 << 20), Precision::F32).unwrap();
    let small = DeviceMatrix::new(&gpu, 1000, 1000);
    gpu.check().unwrap();
    let _large = DeviceMatrix::new(&gpu, 100_000, 1000);
    let error = gpu.check().unwrap_err().to_string();
    for part in ["--gpu-memory", "--batch", "384 MiB", "100 MiB", "free on the device"] {
        assert!(error.contains(part), "{part}: {error}");
    }
    let mut values = vec![7.0; 10];
    gpu.read(&small, 0, &mut values);
    assert!(values == [7.0; 10], "nothing is done on a GPU that failed");
    assert!(gpu.peak_bytes() <= 100 << 20);
    let error = CudaBackend::new(gpu).check().unwrap_err().to_string();
    assert!(error.contains("--gpu-memory"), "{error}");
}

#[test]
fn a_loss_that_is_no_number_is_an_error() {
    let Some(gpu) = backend("a loss that is not a number") else { return };
    let mut logits = gpu.matrix(4, 3);
    gpu.fill(&mut logits, f32::NAN);
    let mut gradient = gpu.matrix(4, 3);
    let loss = gpu.loss(&logits, &[0, 1], Labels::Classes(&[1, 2]), &mut gradient).unwrap();
    assert!(matches!(loss.wait(), Err(DeviceError::NotFinite { .. })));
    let error = gpu.loss(&logits, &[1], Labels::Classes(&[3]), &mut gradient).err().unwrap();
    assert!(matches!(error, NnError::Label { .. }));
}

#[test]
fn a_warm_step_takes_no_memory_from_the_driver() {
    let Some(backend) = backend("a warm step") else { return };
    let config = ModelConfig { hidden: 64, layers: 2, ..ModelConfig::default() };
    let batch = Batch::new(&[9000, 5000, 700], 8, 4);
    let run = || step(&backend, &config, &batch, [20, 7]).loss;
    let first = (run(), run());
    let before = backend.gpu().allocations();
    assert_eq!(first, (run(), run()));
    assert_eq!(backend.gpu().allocations(), before);
}

#[test]
fn hidden_rows_are_kept_in_both_tiers_as_the_cpu_would() {
    let Some(gpu) = backend("hidden rows") else { return };
    let cpu = CpuBackend::new();
    for dtype in [Dtype::F32, Dtype::F16] {
        for (columns, slots, device) in [(1, 40, 7), (24, 1000, 1000), (33, 500, 0), (256, 3000, 1100)] {
            let shape = HiddenShape { slots, columns, dtype, device_bytes: 0 };
            let device_bytes = device * shape.row_bytes().next_multiple_of(4) as u64;
            let shape = HiddenShape { device_bytes, ..shape };
            assert_eq!(shape.device_slots(), device);
            let (mut found, mut expected) =
                (gpu.hidden_rows(shape).unwrap(), cpu.hidden_rows(shape).unwrap());
            for turn in 0..5u32 {
                let chosen: Vec<u32> =
                    (0..slots as u32).filter(|slot| (slot * 7 + turn) % 5 < 2 + turn % 2).collect();
                let replaces: Vec<bool> = chosen.iter().map(|slot| (slot + turn) % 4 > 0).collect();
                let value = |index: usize| match (index + turn as usize) % 11 {
                    0 => 0.0,
                    1 => 1e6,
                    2 => 3e-8,
                    _ => ((index * 37 + turn as usize * 11) % 1000) as f32 / 250.0 - 2.0,
                };
                let values: Vec<f32> = (0..chosen.len() * columns).map(value).collect();
                let mut rows = gpu.matrix(chosen.len(), columns);
                gpu.write(&mut rows, 0, &values);
                found.push(&rows, &chosen, &replaces);
                let mut rows = cpu.matrix(chosen.len(), columns);
                cpu.write(&mut rows, 0, &values);
                expected.push(&rows, &chosen, &replaces);
            }
            let all: Vec<u32> = (0..slots as u32).rev().collect();
            let mut pulled = gpu.matrix(all.len(), columns);
            found.pull(&all, &mut pulled);
            let mut twin = cpu.matrix(all.len(), columns);
            expected.pull(&all, &mut twin);
            assert_eq!(self::values(&gpu, &pulled), twin.values(), "{dtype} {columns} {slots} {device}");
            let (moved, twin_moved) = (found.drift().unwrap(), expected.drift().unwrap());
            assert!(
                twin_moved > 0.0 && (moved - twin_moved).abs() < 1e-9 * twin_moved,
                "{moved} {twin_moved}"
            );
            // As stored, in parts that cross the border between the tiers.
            let bytes = shape.row_bytes();
            let (mut stored, mut twin) = (vec![0; slots as usize * bytes], vec![0; slots as usize * bytes]);
            found.read(0, &mut stored);
            expected.read(0, &mut twin);
            assert!(stored == twin);
            let mut copy = gpu.hidden_rows(shape).unwrap();
            let third = slots as usize / 3;
            for first in (0..slots as usize).step_by(third) {
                copy.write(first as u64, &stored[first * bytes..(first + third).min(slots as usize) * bytes]);
            }
            let mut again = vec![0; stored.len()];
            copy.read(0, &mut again);
            assert!(again == stored);
        }
    }
}

#[test]
fn link_prediction_agrees_with_pytorch() {
    let Some(backend) = backend("link prediction") else { return };
    link_golden::decoders_and_losses(&backend, TOLERANCE as f64);
    link_golden::ten_sparse_steps(&backend, TOLERANCE as f64);
}

#[test]
fn link_losses_and_gradients_equal_their_definition() {
    let Some(backend) = backend("link losses") else { return };
    // Chunks for matmuls and for kernels, the last one smaller; an edge each; no negatives; all nodes.
    let shapes =
        [[60, 90, 34, 40, 70], [30, 50, 6, 7, 9], [30, 13, 6, 1, 9], [9, 5, 4, 2, 0], [150, 70, 130, 0, 0]];
    for decoder in DECODERS {
        for loss in LOSSES {
            for side in SIDES {
                for shape in shapes {
                    let mut case = LinkCase::new(decoder, loss, side, shape, 7);
                    // Differences are exact: none has another sign in f64.
                    let numbers = case.nodes.iter_mut().chain(&mut case.relations);
                    numbers.for_each(|x| *x = (*x * 64.0).round() / 64.0);
                    for by_node in [false, true] {
                        link::check(&backend, &case, by_node, TOLERANCE as f64);
                    }
                }
            }
        }
    }
}

#[test]
fn link_prediction_has_the_same_bits_on_every_run() {
    let Some(first) = backend("the same bits of links") else { return };
    let second = backend("the same bits of links").unwrap();
    for decoder in DECODERS {
        for shape in [[500, 700, 50, 100, 300], [500, 300, 50, 1, 90], [900, 300, 50, 0, 0]] {
            let case = LinkCase::new(decoder, LinkLoss::Softmax, ReplacedEnd::Target, shape, 7);
            let bits = |backend: &CudaBackend| {
                let found = case.run(backend, shape[3] == 1);
                let all = found.nodes.into_iter().chain(found.relations);
                (found.loss.to_bits(), all.map(f32::to_bits).collect::<Vec<u32>>())
            };
            let expected = bits(&first);
            assert!(bits(&first) == expected && bits(&second) == expected, "{decoder:?} {shape:?}");
        }
    }
}

#[test]
fn ranks_on_a_gpu_equal_a_look_at_every_score() {
    let Some(backend) = backend("ranks") else { return };
    let (nodes, queries) = (1000, 150);
    for decoder in DECODERS {
        for (columns, constant) in [(6, false), (50, false), (300, false), (50, true)] {
            let matrix = |rows: usize, seed: u64| {
                let mut matrix = backend.matrix(rows, columns);
                let all = if constant { vec![0.3; rows * columns] } else { numbers(rows * columns, seed) };
                backend.write(&mut matrix, 0, &all);
                matrix
            };
            let (table, rows) = (matrix(nodes, 1), matrix(queries, 2));
            let own: Vec<u32> =
                (0..queries as u64).map(|at| below(Key::new(3).at(at), 1000) as u32).collect();
            let call = ScoreCall { decoder, queries: &rows, nodes: &table, candidates: Candidates::All };
            let (mut thresholds, mut scores) = (backend.matrix(queries, 1), backend.matrix(queries, nodes));
            backend.own_scores(&call, &own, &mut thresholds);
            backend.link_scores(&call, &mut scores);
            let (thresholds_read, scores) = (values(&backend, &thresholds), values(&backend, &scores));
            let filtered: Vec<(u32, u32)> =
                (0..queries as u32).flat_map(|query| [(query, query * 3), (query, 900)]).collect();
            let mut counts = vec![RankCounts::default(); queries];
            for first in [0, 300] {
                let count = if first == 0 { 300 } else { 700 };
                let mut part = backend.matrix(count, columns);
                let picked: Vec<u32> = (first as u32..(first + count) as u32).collect();
                backend.gather_rows(&table, &picked, &mut part);
                let scores = ScoreCall { nodes: &part, ..call };
                let call =
                    RankCall { scores, thresholds: &thresholds, filtered: &filtered, first: first as u32 };
                backend.rank_counts(&call, &mut counts).unwrap();
            }
            for query in 0..queries {
                let of = &scores[query * nodes..][..nodes];
                let threshold = thresholds_read[query];
                assert_eq!(of[own[query] as usize].to_bits(), threshold.to_bits(), "{decoder:?} {columns}");
                let kept = of.iter().zip(0..).filter(|(_, at)| !filtered.contains(&(query as u32, *at)));
                let (greater, equal) = kept.fold((0, 0), |(greater, equal), (score, _)| {
                    (greater + (*score > threshold) as u64, equal + (*score == threshold) as u64)
                });
                assert_eq!(counts[query], RankCounts { greater, equal }, "{decoder:?} {columns} {query}");
            }
        }
    }
}

#[test]
fn learned_rows_on_a_gpu_equal_those_of_the_cpu() {
    let Some(gpu) = backend("learned rows") else { return };
    fn run<B: LinkMath>(backend: &B, kind: OptimizerKind) -> Vec<Vec<f32>> {
        let matrix = |rows: usize, seed: u64| {
            let mut matrix = backend.matrix(rows, 50);
            backend.write(&mut matrix, 0, &numbers(rows * 50, seed));
            matrix
        };
        // Few members a row, then hundreds.
        let parts = [matrix(700, 1), matrix(900, 2)];
        let mut found = Vec::new();
        for rows in [300u64, 4] {
            let of: Vec<u32> = (0..1600).map(|at| below(Key::new(5).at(at), rows) as u32).collect();
            let (offsets, members) = link::csr(rows as usize, &[&of]);
            let mut summed = backend.matrix(rows as usize, 50);
            backend.sum_rows(&[&parts[0], &parts[1]], &offsets, &members, &mut summed);
            found.push(values(backend, &summed));
        }
        let config = OptimizerConfig { kind, ..OptimizerConfig::default() };
        let (mut table, gradient) = (matrix(500, 3), matrix(40, 4));
        let mut state: Vec<B::Matrix> = config.row_states().iter().map(|_| matrix(500, 6)).collect();
        state.iter_mut().for_each(|state| backend.fill(state, 0.1));
        let rows: Vec<u32> = (0..40).map(|at| (at * 37 + 11) % 500).collect();
        backend.update_rows(&config.row_update(3, 0.1).unwrap(), &rows, &gradient, &mut table, &mut state);
        found.push(values(backend, &table));
        found.extend(state.iter().map(|state| values(backend, state)));
        for penalty in [PenaltyKind::L2, PenaltyKind::N3, PenaltyKind::ComplexN3] {
            let mut gradient = matrix(500, 8);
            let sum = backend.penalty(penalty, &numbers(500, 9), &table, &mut gradient).unwrap();
            found.push(vec![sum.wait().unwrap() as f32]);
            found.push(values(backend, &gradient));
        }
        found
    }
    for kind in [OptimizerKind::Sgd, OptimizerKind::Adam, OptimizerKind::Adagrad] {
        let (found, expected) = (run(&gpu, kind), run(&CpuBackend::new(), kind));
        for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let expected: Vec<f64> = expected.iter().map(|x| *x as f64).collect();
            link::assert_close(&format!("{kind:?} {at}"), TOLERANCE as f64, found, &expected);
        }
    }
}
