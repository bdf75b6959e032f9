//! A backend that does what a GPU does to its caller: rows come from memory of another kind, matrices lie elsewhere, and
//! losses, with whatever is wrong with them, are known only when somebody waits. The CPU computes.

mod link;
#[path = "../../../../nn/tests/common/stored.rs"]
mod stored;

use esker_nn::*;
use esker_plan::{Placement, Placements};
use esker_types::StoredRows;
use esker_types::random::Key;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

#[derive(Clone, Default)]
pub struct Lagging {
    cpu: CpuBackend,
    /// Losses that nobody has waited for, and the most there were.
    late: Arc<AtomicUsize>,
    pub most_late: Arc<AtomicUsize>,
    /// Graphs that stages of a source made ready for upload.
    pub staged_ahead: Arc<AtomicUsize>,
}

pub struct Late {
    found: Result<f64, DeviceError>,
    late: Arc<AtomicUsize>,
}

impl Deferred for Late {
    fn wait(self) -> Result<f64, DeviceError> {
        self.found.clone()
    }
}

impl Drop for Late {
    fn drop(&mut self) {
        self.late.fetch_sub(1, SeqCst);
    }
}

pub struct LaggingRows(Vec<f32>);

impl HostRows for LaggingRows {
    fn values_mut(&mut self) -> &mut [f32] {
        &mut self.0
    }
}

/// A batch of cached rows, assembled late.
pub struct LaggingBatch {
    cache: Arc<LaggingCache>,
    placements: Placements,
    missed: Vec<u8>,
}

/// Rows in two memories, as stored; they become f32 when a batch is uploaded.
pub struct LaggingCache {
    rows: StoredRows,
    device_slots: u64,
    slots: u64,
    device: Mutex<Vec<u8>>,
    host: Mutex<Vec<u8>>,
}

pub struct LaggingBytes(Vec<u8>);

impl HostBytes for LaggingBytes {
    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

impl RowCache for LaggingCache {
    type Missed = LaggingBytes;
    type Batch = LaggingBatch;

    fn device_slots(&self) -> u64 {
        self.device_slots
    }

    fn fill(&self, first: u64, stored: &[u8]) -> Result<(), DeviceError> {
        for (slot, row) in (first..).zip(stored.chunks_exact(self.rows.row_bytes())) {
            let (memory, place) = self.tier(slot);
            memory.lock().unwrap()[place..][..row.len()].copy_from_slice(row);
        }
        Ok(())
    }

    fn missed(&self, bytes: usize) -> LaggingBytes {
        LaggingBytes(vec![0xff; bytes])
    }

    fn batch(self: &Arc<Self>, placements: &Placements, missed: LaggingBytes) -> LaggingBatch {
        LaggingBatch { cache: self.clone(), placements: placements.clone(), missed: missed.0 }
    }
}

impl LaggingCache {
    /// Where a slot's row is.
    fn tier(&self, slot: u64) -> (&Mutex<Vec<u8>>, usize) {
        let (memory, place) = match slot.checked_sub(self.device_slots) {
            None => (&self.device, slot),
            Some(place) => (&self.host, place),
        };
        (memory, place as usize * self.rows.row_bytes())
    }

    fn row(&self, word: u32, missed: &[u8]) -> Vec<f32> {
        let bytes = self.rows.row_bytes();
        let stored = match Placement::decode(word) {
            Placement::Read(index) | Placement::Keep(index) => {
                missed[index as usize * bytes..][..bytes].to_vec()
            }
            Placement::Skip => return vec![0.0; self.rows.columns],
            Placement::Hit(slot) => {
                assert!((slot.0 as u64) < self.slots);
                let (memory, place) = self.tier(slot.0 as u64);
                memory.lock().unwrap()[place..][..bytes].to_vec()
            }
        };
        stored::as_f32(&self.rows, &stored)
    }
}

fn source<'a>(from: TermRows<'a, Lagging>) -> TermRows<'a, CpuBackend> {
    match from {
        TermRows::Rows(rows) => TermRows::Rows(rows),
        TermRows::Aggregate { graph, input, aggregator, kept, winners } => {
            TermRows::Aggregate { graph, input, aggregator, kept, winners }
        }
    }
}

fn input_term<'a>(from: &InputTerm<'a, Lagging>) -> InputTerm<'a, CpuBackend> {
    match from {
        InputTerm::Rows { gradient, weight } => InputTerm::Rows { gradient, weight },
        InputTerm::Identity { gradient } => InputTerm::Identity { gradient },
        InputTerm::Aggregate { graph, gradient, weight, aggregator, winners } => {
            InputTerm::Aggregate { graph, gradient, weight, aggregator: *aggregator, winners: *winners }
        }
    }
}

fn attention<'a>(from: &Attention<'a, Lagging>) -> Attention<'a, CpuBackend> {
    let Attention { graph, heads, average, hidden, source_vector, target_vector, slope, dropout } = *from;
    Attention { graph, heads, average, hidden, source_vector, target_vector, slope, dropout }
}

/// Hidden rows whose numbers are looked at when every loss is known: to look earlier is to wait for the device.
pub struct LaggingHidden {
    cpu: CpuHidden,
    late: Arc<AtomicUsize>,
}

impl LaggingHidden {
    fn assert_known(&self) {
        assert_eq!(self.late.load(SeqCst), 0, "hidden rows are looked at when every loss is known");
    }
}

impl HiddenRows for LaggingHidden {
    type Matrix = CpuMatrix;

    fn shape(&self) -> HiddenShape {
        self.cpu.shape()
    }

    fn pull(&self, slots: &[u32], to: &mut CpuMatrix) {
        self.cpu.pull(slots, to)
    }

    fn push(&mut self, rows: &CpuMatrix, slots: &[u32], replaces: &[bool]) {
        self.cpu.push(rows, slots, replaces)
    }

    fn drift(&self) -> Result<f64, DeviceError> {
        self.assert_known();
        self.cpu.drift()
    }

    fn read(&self, first: u64, stored: &mut [u8]) {
        self.assert_known();
        self.cpu.read(first, stored)
    }

    fn write(&mut self, first: u64, stored: &[u8]) {
        self.assert_known();
        self.cpu.write(first, stored)
    }
}

impl Lagging {
    fn copy(&self, of: &CpuMatrix) -> CpuMatrix {
        let mut copy = self.cpu.matrix(of.rows(), of.columns());
        self.cpu.write(&mut copy, 0, of.values());
        copy
    }

    fn later(&self, found: Result<f64, DeviceError>) -> Late {
        let late = self.late.fetch_add(1, SeqCst) + 1;
        self.most_late.fetch_max(late, SeqCst);
        Late { found, late: self.late.clone() }
    }
}

impl Device for Lagging {
    type Matrix = CpuMatrix;
    type Graph = CpuGraph;
    type StagedGraph = CpuGraph;
    type HostRows = LaggingRows;
    type Cache = LaggingCache;
    type Hidden = LaggingHidden;
    type Number = Late;
    const STEPS_IN_FLIGHT: usize = 2;

    fn in_host_memory(&self) -> bool {
        false
    }

    fn peak_bytes(&self) -> u64 {
        self.cpu.peak_bytes()
    }

    fn check(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn host_rows(&self, rows: usize, columns: usize) -> LaggingRows {
        LaggingRows(vec![f32::NAN; rows * columns])
    }

    fn upload(&self, rows: LaggingRows, columns: usize) -> CpuMatrix {
        let mut uploaded = self.cpu.matrix(rows.0.len() / columns, columns);
        self.cpu.write(&mut uploaded, 0, &rows.0);
        uploaded
    }

    fn cache(
        &self,
        rows: &StoredRows,
        slots: u64,
        device_bytes: u64,
    ) -> Result<Option<Arc<LaggingCache>>, DeviceError> {
        let device_slots = rows.rows_in(device_bytes).min(slots);
        let memory = |slots: u64| Mutex::new(vec![0xff; slots as usize * rows.row_bytes()]);
        let (device, host) = (memory(device_slots), memory(slots - device_slots));
        Ok(Some(Arc::new(LaggingCache { rows: rows.clone(), device_slots, slots, device, host })))
    }

    fn assemble(&self, batch: LaggingBatch, columns: usize) -> CpuMatrix {
        let LaggingBatch { cache, placements, missed } = batch;
        let values = placements.words.iter().flat_map(|word| cache.row(*word, &missed)).collect();
        let stays = placements.words.iter().filter_map(|word| match Placement::decode(*word) {
            Placement::Keep(index) => Some(index as usize),
            _ => None,
        });
        for (index, slot) in stays.zip(&placements.kept) {
            let bytes = cache.rows.row_bytes();
            cache.fill(*slot as u64, &missed[index * bytes..][..bytes]).unwrap();
        }
        self.upload(LaggingRows(values), columns)
    }

    fn hidden_rows(&self, shape: HiddenShape) -> Result<LaggingHidden, DeviceError> {
        Ok(LaggingHidden { cpu: self.cpu.hidden_rows(shape)?, late: self.late.clone() })
    }

    fn matrix(&self, rows: usize, columns: usize) -> CpuMatrix {
        self.cpu.matrix(rows, columns)
    }

    fn write(&self, matrix: &mut CpuMatrix, first: usize, values: &[f32]) {
        self.cpu.write(matrix, first, values)
    }

    fn read(&self, matrix: &CpuMatrix, first: usize, values: &mut [f32]) {
        assert_eq!(self.late.load(SeqCst), 0, "numbers are looked at when every loss is known");
        self.cpu.read(matrix, first, values)
    }

    fn fill(&self, matrix: &mut CpuMatrix, value: f32) {
        self.cpu.fill(matrix, value)
    }

    fn gather_rows(&self, from: &CpuMatrix, rows: &[u32], to: &mut CpuMatrix) {
        self.cpu.gather_rows(from, rows, to)
    }

    fn scatter_rows(&self, from: Option<&CpuMatrix>, rows: &[u32], to: &mut CpuMatrix) {
        self.cpu.scatter_rows(from, rows, to)
    }

    fn add_rows(&self, from: &CpuMatrix, rows: &[u32], scale: f32, to: &mut CpuMatrix) {
        self.cpu.add_rows(from, rows, scale, to)
    }

    fn copy_columns(
        &self,
        from: &CpuMatrix,
        from_first: usize,
        to: &mut CpuMatrix,
        to_first: usize,
        count: usize,
    ) {
        self.cpu.copy_columns(from, from_first, to, to_first, count)
    }

    fn stage_graph(&self, adjacency: &Adjacency<'_>) -> CpuGraph {
        if std::thread::current().name() == Some("read") {
            self.staged_ahead.fetch_add(1, SeqCst);
        }
        self.cpu.stage_graph(adjacency)
    }

    fn upload_graph(&self, staged: CpuGraph) -> CpuGraph {
        staged
    }

    fn part_graph(&self, inputs: usize, nbr_offsets: &[u32], nbrs: &[u32]) -> CpuGraph {
        self.cpu.part_graph(inputs, nbr_offsets, nbrs)
    }
}

impl Backend for Lagging {
    fn fill_uniform(&self, matrix: &mut CpuMatrix, key: Key, bound: f32) {
        self.cpu.fill_uniform(matrix, key, bound)
    }

    fn affine(&self, call: Affine<'_, Self>, output: &mut CpuMatrix) {
        let Affine { terms, accumulate, bias, add, post } = call;
        let terms = terms.into_iter().map(|term| Term { source: source(term.source), weight: term.weight });
        self.cpu.affine(Affine { terms: terms.collect(), accumulate, bias, add, post }, output)
    }

    fn weight_gradients(
        &self,
        gradient: &mut CpuMatrix,
        post: Option<(&CpuMatrix, Post)>,
        terms: Vec<WeightTerm<'_, Self>>,
        bias_gradient: Option<&mut CpuMatrix>,
    ) {
        let terms = terms
            .into_iter()
            .map(|WeightTerm { source, weight_gradient }| WeightTerm { source, weight_gradient });
        self.cpu.weight_gradients(gradient, post, terms.collect(), bias_gradient)
    }

    fn input_gradient(&self, terms: &[InputTerm<'_, Self>], input_gradient: &mut CpuMatrix) {
        self.cpu.input_gradient(&terms.iter().map(input_term).collect::<Vec<_>>(), input_gradient)
    }

    fn attention(&self, call: &Attention<'_, Self>, output: &mut CpuMatrix) -> AttentionKept<Self> {
        let kept = self.cpu.attention(&attention(call), output);
        let AttentionKept { weights, source_scores, target_scores } = kept;
        AttentionKept { weights, source_scores, target_scores }
    }

    fn attention_backward(
        &self,
        call: &Attention<'_, Self>,
        kept: &AttentionKept<Self>,
        gradient: &CpuMatrix,
        into: AttentionGradients<'_, Self>,
    ) {
        let kept = AttentionKept {
            weights: self.copy(&kept.weights),
            source_scores: self.copy(&kept.source_scores),
            target_scores: self.copy(&kept.target_scores),
        };
        let AttentionGradients { hidden, source_vector, target_vector } = into;
        let into = AttentionGradients { hidden, source_vector, target_vector };
        self.cpu.attention_backward(&attention(call), &kept, gradient, into)
    }

    fn accumulate(
        &self,
        graph: &CpuGraph,
        input: &CpuMatrix,
        by: Accumulator<'_, CpuMatrix>,
        sums: &mut CpuMatrix,
    ) {
        self.cpu.accumulate(graph, input, by, sums)
    }

    fn scale_rows(&self, factors: &CpuMatrix, rows: &mut CpuMatrix) {
        self.cpu.scale_rows(factors, rows)
    }

    fn attention_scores(&self, rows: &CpuMatrix, vector: &CpuMatrix, heads: usize) -> CpuMatrix {
        self.cpu.attention_scores(rows, vector, heads)
    }

    fn attend_part(
        &self,
        graph: &CpuGraph,
        call: AttentionPart<'_, CpuMatrix>,
        sums: &mut AttentionSums<CpuMatrix>,
    ) {
        self.cpu.attend_part(graph, call, sums)
    }

    fn attend_end(&self, sums: AttentionSums<CpuMatrix>, average: bool, output: &mut CpuMatrix) {
        self.cpu.attend_end(sums, average, output)
    }

    fn normalise(
        &self,
        call: Normalise<'_, Self>,
        values: &mut CpuMatrix,
        output: &mut CpuMatrix,
    ) -> CpuMatrix {
        let Normalise { by, epsilon, scale, shift, post } = call;
        let by = match by {
            Normaliser::Layer => Normaliser::Layer,
            Normaliser::Batch { running_mean, running_variance, momentum } => {
                Normaliser::Batch { running_mean, running_variance, momentum }
            }
            Normaliser::Running { running_mean, running_variance } => {
                Normaliser::Running { running_mean, running_variance }
            }
        };
        self.cpu.normalise(Normalise { by, epsilon, scale, shift, post }, values, output)
    }

    fn normalise_backward(&self, call: NormaliseBackward<'_, Self>, gradient: &mut CpuMatrix) {
        let NormaliseBackward { by_row, normalised, deviations, scale, output, post, .. } = call;
        let (scale_gradient, shift_gradient) = (call.scale_gradient, call.shift_gradient);
        self.cpu.normalise_backward(
            NormaliseBackward {
                by_row,
                normalised,
                deviations,
                scale,
                output,
                post,
                scale_gradient,
                shift_gradient,
            },
            gradient,
        )
    }

    fn loss(
        &self,
        logits: &CpuMatrix,
        rows: &[u32],
        labels: Labels<'_>,
        gradient: &mut CpuMatrix,
    ) -> Result<Late> {
        self.cpu.fill(gradient, 0.0);
        match self.cpu.loss(logits, rows, labels, gradient) {
            Ok(loss) => Ok(self.later(loss.wait())),
            Err(NnError::Device(error)) => Ok(self.later(Err(error))),
            Err(error) => Err(error),
        }
    }

    fn update(&self, update: &Update, parameters: Vec<Moved<'_, Self>>) -> Result<Option<Late>> {
        let parameters =
            parameters.into_iter().map(|Moved { value, gradient, state }| Moved { value, gradient, state });
        match self.cpu.update(update, parameters.collect()) {
            Ok(length) => Ok(length.map(|length| self.later(length.wait()))),
            Err(NnError::Device(error)) => Ok(Some(self.later(Err(error)))),
            Err(error) => Err(error),
        }
    }
}
