//! The backend for NVIDIA GPUs. Every operation is one or a few kernel launches, in order on one stream. Operations
//! that are one pass on the CPU are one kernel of `esker_cuda`; matmuls use cuBLAS.

mod link;

use crate::cpu::counted;
use crate::*;
use esker_cuda::{
    Adding, AttentionCall, AttentionMore, AttentionState, Columns, DeviceActivation, DeviceAdjacency,
    DeviceDropout, DeviceHidden, DeviceMatrix, DevicePost, DeviceRule, Gathering, Gpu, LossTargets, Pending,
    Pinned, StagedAdjacency, TieredBatch, TieredRows, UpdatedMatrix,
};
use esker_plan::Placements;
use esker_types::StoredRows;
use esker_types::random::{Key, unit};
use std::sync::Arc;

/// Computes on a GPU. Clones share the GPU.
#[derive(Clone)]
pub struct CudaBackend {
    gpu: Gpu,
}

/// A matrix on the GPU.
pub struct CudaMatrix(DeviceMatrix);

/// A layer's adjacency on the GPU.
pub struct CudaGraph(DeviceAdjacency);

/// Rows of a batch in pinned memory.
pub struct CudaRows(Pinned);

/// Rows of a batch, to be assembled from a cache and from the rows that the batch read.
pub struct CudaBatch(TieredBatch);

/// Rows cached on the GPU and in pinned memory.
pub struct CudaCache(Arc<TieredRows>);

/// Hidden rows on the GPU and in pinned memory.
pub struct CudaHidden {
    rows: DeviceHidden,
    shape: HiddenShape,
}

/// Pinned memory for rows in their stored form.
pub struct CudaBytes {
    pinned: Pinned,
    bytes: usize,
}

/// A number being copied from the GPU.
pub struct CudaNumber {
    pending: Pending,
    what: &'static str,
}

impl CudaBackend {
    /// A backend on an opened GPU.
    pub fn new(gpu: Gpu) -> CudaBackend {
        CudaBackend { gpu }
    }

    /// The GPU.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }
}

impl Shape for CudaMatrix {
    fn rows(&self) -> usize {
        self.0.rows()
    }

    fn columns(&self) -> usize {
        self.0.columns()
    }
}

impl AdjacencyShape for CudaGraph {
    fn inputs(&self) -> usize {
        self.0.inputs()
    }

    fn outputs(&self) -> usize {
        self.0.outputs()
    }
}

impl CudaGraph {
    /// The adjacency.
    pub fn lists(&self) -> &DeviceAdjacency {
        &self.0
    }
}

impl HostRows for CudaRows {
    fn values_mut(&mut self) -> &mut [f32] {
        self.0.floats_mut()
    }
}

impl HostBytes for CudaBytes {
    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.pinned.bytes_mut()[..self.bytes]
    }
}

impl RowCache for CudaCache {
    type Missed = CudaBytes;
    type Batch = CudaBatch;

    fn device_slots(&self) -> u64 {
        self.0.device_slots()
    }

    fn fill(&self, first: u64, stored: &[u8]) -> Result<(), DeviceError> {
        self.0.fill(first, stored).map_err(DeviceError::failed)
    }

    fn missed(&self, bytes: usize) -> CudaBytes {
        CudaBytes { pinned: self.0.missed(bytes), bytes }
    }

    fn batch(self: &Arc<Self>, placements: &Placements, missed: CudaBytes) -> CudaBatch {
        CudaBatch(self.0.batch(placements, missed.pinned))
    }
}

impl HiddenRows for CudaHidden {
    type Matrix = CudaMatrix;

    fn shape(&self) -> HiddenShape {
        self.shape
    }

    fn pull(&self, slots: &[u32], to: &mut CudaMatrix) {
        self.rows.pull(slots, &mut to.0);
    }

    fn push(&mut self, rows: &CudaMatrix, slots: &[u32], replaces: &[bool]) {
        self.rows.push(&rows.0, slots, replaces);
    }

    fn drift(&self) -> Result<f64, DeviceError> {
        self.rows.drift().map_err(DeviceError::failed)
    }

    fn read(&self, first: u64, stored: &mut [u8]) {
        self.rows.read(first, stored);
    }

    fn write(&mut self, first: u64, stored: &[u8]) {
        self.rows.write(first, stored);
    }
}

impl Deferred for CudaNumber {
    fn wait(self) -> Result<f64, DeviceError> {
        let found = self.pending.wait().map_err(DeviceError::failed)?;
        if !found.is_finite() {
            return Err(DeviceError::NotFinite { what: self.what.to_string(), found });
        }
        Ok(found)
    }
}

fn dropout(dropout: Option<Dropout>) -> DeviceDropout {
    dropout.map_or(DeviceDropout::default(), |dropout| DeviceDropout {
        key: dropout.key.word(),
        threshold: dropout.threshold,
        scale: dropout.scale,
    })
}

fn post(post: Post) -> DevicePost {
    let activation = match post.activation {
        Activation::Identity => DeviceActivation::Identity,
        Activation::Relu => DeviceActivation::Relu,
        Activation::Elu => DeviceActivation::Elu,
        Activation::LeakyRelu => DeviceActivation::LeakyRelu,
    };
    DevicePost { dropout: dropout(post.dropout), activation }
}

fn device_rule(update: &Update) -> DeviceRule {
    let mut rule = DeviceRule {
        rate: update.rate,
        limit: update.gradient_limit,
        weight_decay: update.weight_decay,
        shrink: update.shrink,
        clip_norm: update.clip_norm.unwrap_or(0.0),
        ..DeviceRule::default()
    };
    match update.rule {
        Rule::Sgd { momentum, nesterov } => {
            (rule.kind, rule.momentum, rule.nesterov) = (0, momentum, nesterov as u32);
        }
        Rule::Adam { beta1, beta2, epsilon, correction1, correction2_root } => {
            (rule.kind, rule.beta1, rule.beta2, rule.epsilon) = (1, beta1, beta2, epsilon);
            (rule.correction1, rule.correction2_root) = (correction1, correction2_root);
        }
        Rule::Adagrad { epsilon } => (rule.kind, rule.epsilon) = (2, epsilon),
    }
    rule
}

fn gathering(aggregator: Aggregator) -> Gathering {
    match aggregator {
        Aggregator::Mean => Gathering::Mean,
        Aggregator::Sum => Gathering::Sum,
        Aggregator::Max => Gathering::Max,
        Aggregator::SumWithSelf(multiple) => Gathering::SumWithSelf(multiple),
        Aggregator::Gcn(Degree::Unbiased) => Gathering::GcnUnbiased,
        Aggregator::Gcn(Degree::Whole) => Gathering::GcnWhole,
        Aggregator::Gcn(Degree::Sampled) => Gathering::GcnSampled,
    }
}

fn attention<'a>(call: &Attention<'a, CudaBackend>) -> AttentionCall<'a> {
    AttentionCall {
        lists: &call.graph.0,
        heads: call.heads,
        average: call.average,
        hidden: &call.hidden.0,
        source: &call.source_vector.0,
        target: &call.target_vector.0,
        slope: call.slope,
        dropout: dropout(call.dropout),
    }
}

impl Device for CudaBackend {
    type Matrix = CudaMatrix;
    type Graph = CudaGraph;
    type StagedGraph = StagedAdjacency;
    type HostRows = CudaRows;
    type Cache = CudaCache;
    type Hidden = CudaHidden;
    type Number = CudaNumber;
    /// One being computed, and one whose rows are being uploaded.
    const STEPS_IN_FLIGHT: usize = 2;

    fn in_host_memory(&self) -> bool {
        false
    }

    fn memory_limit(&self) -> Option<u64> {
        Some(self.gpu.limit_bytes())
    }

    fn peak_bytes(&self) -> u64 {
        self.gpu.peak_bytes()
    }

    fn busy_seconds(&self) -> Vec<(&'static str, f64)> {
        let (copies, steps) = self.gpu.busy_seconds();
        vec![("copy", copies), ("gpu", steps)]
    }

    fn check(&self) -> Result<(), DeviceError> {
        self.gpu.check().map_err(DeviceError::failed)
    }

    fn host_rows(&self, rows: usize, columns: usize) -> CudaRows {
        CudaRows(Pinned::new(&self.gpu, rows * columns))
    }

    fn upload(&self, rows: CudaRows, columns: usize) -> CudaMatrix {
        let uploaded = self.gpu.upload(rows.0, columns);
        // After the wait for the rows: the step starts here.
        self.gpu.begin_step();
        CudaMatrix(uploaded)
    }

    fn cache(
        &self,
        rows: &StoredRows,
        slots: u64,
        device_bytes: u64,
    ) -> Result<Option<Arc<CudaCache>>, DeviceError> {
        let device_slots = rows.rows_in(device_bytes).min(slots);
        let tiers = TieredRows::new(&self.gpu, device_slots, slots - device_slots, rows);
        Ok(Some(Arc::new(CudaCache(Arc::new(tiers.map_err(DeviceError::failed)?)))))
    }

    fn assemble(&self, batch: CudaBatch, columns: usize) -> CudaMatrix {
        assert_eq!(batch.0.columns(), columns);
        let assembled = batch.0.upload();
        self.gpu.begin_step();
        CudaMatrix(assembled)
    }

    fn hidden_rows(&self, shape: HiddenShape) -> Result<CudaHidden, DeviceError> {
        let (slots, on_device) = (shape.slots, shape.device_slots());
        let rows = DeviceHidden::new(&self.gpu, on_device, slots - on_device, shape.columns, shape.dtype);
        Ok(CudaHidden { rows: rows.map_err(DeviceError::failed)?, shape })
    }

    fn matrix(&self, rows: usize, columns: usize) -> CudaMatrix {
        CudaMatrix(DeviceMatrix::new(&self.gpu, rows, columns))
    }

    fn write(&self, matrix: &mut CudaMatrix, first: usize, values: &[f32]) {
        self.gpu.write(&mut matrix.0, first, values);
    }

    fn read(&self, matrix: &CudaMatrix, first: usize, values: &mut [f32]) {
        self.gpu.read(&matrix.0, first, values);
    }

    fn fill(&self, matrix: &mut CudaMatrix, value: f32) {
        self.gpu.fill(&mut matrix.0, value);
    }

    fn gather_rows(&self, from: &CudaMatrix, rows: &[u32], to: &mut CudaMatrix) {
        self.gpu.gather_rows(&from.0, rows, &mut to.0);
    }

    fn scatter_rows(&self, from: Option<&CudaMatrix>, rows: &[u32], to: &mut CudaMatrix) {
        self.gpu.scatter_rows(from.map(|from| &from.0), rows, &mut to.0);
    }

    fn add_rows(&self, from: &CudaMatrix, rows: &[u32], scale: f32, to: &mut CudaMatrix) {
        self.gpu.add_rows(&from.0, rows, scale, &mut to.0);
    }

    fn copy_columns(
        &self,
        from: &CudaMatrix,
        from_first: usize,
        to: &mut CudaMatrix,
        to_first: usize,
        count: usize,
    ) {
        self.gpu.copy_columns(&from.0, from_first, &mut to.0, to_first, count);
    }

    fn stage_graph(&self, adjacency: &Adjacency<'_>) -> StagedAdjacency {
        adjacency.assert_valid();
        let Adjacency { inputs, nbr_offsets, nbrs, base, input_degrees, .. } = *adjacency;
        StagedAdjacency::new(&self.gpu, inputs, nbr_offsets, nbrs, base, input_degrees)
    }

    fn upload_graph(&self, staged: StagedAdjacency) -> CudaGraph {
        CudaGraph(staged.upload(&self.gpu))
    }

    fn part_graph(&self, inputs: usize, nbr_offsets: &[u32], nbrs: &[u32]) -> CudaGraph {
        Adjacency::part(inputs, nbr_offsets, nbrs).assert_lists();
        CudaGraph(DeviceAdjacency::part(&self.gpu, inputs, nbr_offsets, nbrs))
    }
}

impl Backend for CudaBackend {
    /// Computed on the host, so that every device starts from identical bits.
    fn fill_uniform(&self, matrix: &mut CudaMatrix, key: Key, bound: f32) {
        let number = |index: u64| (bound as f64 * (2.0 * unit(key.at(index)) - 1.0)) as f32;
        let count = (matrix.rows() * matrix.columns()) as u64;
        self.gpu.write(&mut matrix.0, 0, &(0..count).map(number).collect::<Vec<f32>>());
    }

    fn affine(&self, call: Affine<'_, Self>, output: &mut CudaMatrix) {
        let bias = call.bias.map(|bias| &bias.0);
        let added = call.add.map(|add| &add.0);
        if call.terms.is_empty() && !call.accumulate {
            return match added {
                Some(from) => self.gpu.finish_copy(from, bias, post(call.post), &mut output.0),
                None => {
                    self.gpu.fill(&mut output.0, 0.0);
                    self.gpu.finish(&mut output.0, bias, None, post(call.post));
                }
            };
        }
        for (index, term) in call.terms.into_iter().enumerate() {
            let add = call.accumulate || index > 0;
            match term.source {
                TermRows::Rows(from) => self.gpu.matmul(&from.0, &term.weight.0, add, &mut output.0),
                TermRows::Aggregate { graph, input, aggregator, kept, winners } => {
                    let mut own = None;
                    let rows = match kept {
                        Some(kept) => kept,
                        None => own.insert(self.matrix(graph.outputs(), input.columns())),
                    };
                    let winners = winners.map(|winners| &mut winners.0);
                    self.gpu.aggregate(&graph.0, &input.0, gathering(aggregator), &mut rows.0, winners);
                    self.gpu.matmul(&rows.0, &term.weight.0, add, &mut output.0);
                }
            }
        }
        if bias.is_some() || added.is_some() || !call.post.is_none() {
            self.gpu.finish(&mut output.0, bias, added, post(call.post));
        }
    }

    fn weight_gradients(
        &self,
        gradient: &mut CudaMatrix,
        applied: Option<(&CudaMatrix, Post)>,
        terms: Vec<WeightTerm<'_, Self>>,
        bias_gradient: Option<&mut CudaMatrix>,
    ) {
        let applied = applied.filter(|(_, applied)| !applied.is_none());
        let applied = applied.map(|(output, applied)| (&output.0, post(applied)));
        self.gpu.unfinish(&mut gradient.0, applied, bias_gradient.map(|bias| &mut bias.0));
        for term in terms {
            self.gpu.matmul_weights(&gradient.0, &term.source.0, &mut term.weight_gradient.0);
        }
    }

    fn input_gradient(&self, terms: &[InputTerm<'_, Self>], input_gradient: &mut CudaMatrix) {
        let to = &mut input_gradient.0;
        let outputs = terms.iter().map(|term| match term {
            InputTerm::Rows { gradient, .. }
            | InputTerm::Identity { gradient }
            | InputTerm::Aggregate { gradient, .. } => gradient.rows(),
        });
        let outputs = outputs.max().unwrap_or(0);
        // The outputs' own terms are written to the last rows first; the neighbours' terms are added to them.
        let mut own = false;
        for term in terms {
            match term {
                InputTerm::Rows { gradient, weight } => {
                    self.gpu.matmul_backward(&gradient.0, &weight.0, own, to)
                }
                InputTerm::Identity { gradient } if own => {
                    self.gpu.add_last(&gradient.0, gradient.rows(), to)
                }
                InputTerm::Identity { gradient } => self.gpu.copy_last(&gradient.0, gradient.rows(), to),
                InputTerm::Aggregate { .. } => continue,
            }
            own = true;
        }
        let mut handed = false;
        for term in terms {
            let InputTerm::Aggregate { graph, gradient, weight, aggregator, winners } = term else {
                continue;
            };
            assert!(!handed, "one aggregate a layer");
            let mut back = self.matrix(gradient.rows(), weight.columns());
            self.gpu.matmul_backward(&gradient.0, &weight.0, false, &mut back.0);
            let winners = winners.map(|winners| &winners.0);
            self.gpu.hand_back(&graph.0, &back.0, gathering(*aggregator), winners, own, to);
            handed = true;
        }
        if !handed {
            let others = to.rows() - if own { outputs } else { 0 };
            self.gpu.fill_first(to, others, 0.0);
        }
    }

    fn attention(&self, call: &Attention<'_, Self>, output: &mut CudaMatrix) -> AttentionKept<Self> {
        let kept = self.gpu.attend(&attention(call), &mut output.0);
        let [weights, source_scores, target_scores] = kept.map(CudaMatrix);
        AttentionKept { weights, source_scores, target_scores }
    }

    fn attention_backward(
        &self,
        call: &Attention<'_, Self>,
        kept: &AttentionKept<Self>,
        gradient: &CudaMatrix,
        into: AttentionGradients<'_, Self>,
    ) {
        let state = AttentionState {
            weights: &kept.weights.0,
            source_scores: &kept.source_scores.0,
            target_scores: &kept.target_scores.0,
        };
        let vectors = [&mut into.source_vector.0, &mut into.target_vector.0];
        self.gpu.attend_back(&attention(call), &state, &gradient.0, &mut into.hidden.0, vectors);
    }

    fn accumulate(
        &self,
        graph: &CudaGraph,
        input: &CudaMatrix,
        by: Accumulator<'_, CudaMatrix>,
        sums: &mut CudaMatrix,
    ) {
        let how = match by {
            Accumulator::Sum => Adding::Sum,
            Accumulator::Scaled(scales) => Adding::Scaled(&scales.0),
            Accumulator::Max => Adding::Max,
        };
        self.gpu.accumulate(&graph.0, &input.0, how, &mut sums.0);
    }

    fn scale_rows(&self, factors: &CudaMatrix, rows: &mut CudaMatrix) {
        self.gpu.scale_rows(&factors.0, &mut rows.0);
    }

    fn attention_scores(&self, rows: &CudaMatrix, vector: &CudaMatrix, heads: usize) -> CudaMatrix {
        CudaMatrix(self.gpu.attention_scores(&rows.0, &vector.0, heads))
    }

    fn attend_part(
        &self,
        graph: &CudaGraph,
        call: AttentionPart<'_, CudaMatrix>,
        sums: &mut AttentionSums<CudaMatrix>,
    ) {
        let more = AttentionMore {
            hidden: &call.hidden.0,
            source_scores: &call.source_scores.0,
            target_scores: &call.target_scores.0,
            slope: call.slope,
        };
        let AttentionSums { rows, most, total } = sums;
        self.gpu.attend_more(&graph.0, &more, [&mut rows.0, &mut most.0, &mut total.0]);
    }

    fn attend_end(&self, sums: AttentionSums<CudaMatrix>, average: bool, output: &mut CudaMatrix) {
        self.gpu.attend_end(&sums.rows.0, &sums.total.0, average, &mut output.0);
    }

    fn normalise(
        &self,
        call: Normalise<'_, Self>,
        values: &mut CudaMatrix,
        output: &mut CudaMatrix,
    ) -> CudaMatrix {
        let affine = [&call.scale.0, &call.shift.0];
        let (values, to, epsilon) = (&mut values.0, &mut output.0, call.epsilon);
        let deviations = match call.by {
            Normaliser::Layer => self.gpu.layer_norm(values, affine, epsilon, to),
            Normaliser::Batch { running_mean, running_variance, momentum } => {
                let (running_mean, running_variance) = (&mut running_mean.0, &mut running_variance.0);
                let by = Columns::Batch { running_mean, running_variance, momentum };
                self.gpu.batch_norm(by, values, affine, epsilon, to)
            }
            Normaliser::Running { running_mean, running_variance } => {
                let by = Columns::Running { mean: &running_mean.0, variance: &running_variance.0 };
                self.gpu.batch_norm(by, values, affine, epsilon, to)
            }
        };
        if !call.post.is_none() {
            self.gpu.finish(to, None, None, post(call.post));
        }
        CudaMatrix(deviations)
    }

    fn normalise_backward(&self, call: NormaliseBackward<'_, Self>, gradient: &mut CudaMatrix) {
        let applied = (!call.post.is_none()).then(|| (&call.output.0, post(call.post)));
        self.gpu.unfinish(&mut gradient.0, applied, None);
        let by = [&call.scale.0, &call.deviations.0];
        let into = [&mut call.scale_gradient.0, &mut call.shift_gradient.0];
        self.gpu.norm_back(call.by_row, &mut gradient.0, &call.normalised.0, by, into);
    }

    fn loss(
        &self,
        logits: &CudaMatrix,
        rows: &[u32],
        labels: Labels<'_>,
        gradient: &mut CudaMatrix,
    ) -> Result<CudaNumber> {
        let counted = counted(rows, labels, logits.columns())?;
        let targets = match labels {
            Labels::Classes(classes) => LossTargets::Classes(classes),
            Labels::Binary(targets) => LossTargets::Binary(targets),
            Labels::Values(targets) => LossTargets::Values(targets),
        };
        let pending = self.gpu.loss(&logits.0, rows, targets, counted, &mut gradient.0);
        self.gpu.check()?;
        Ok(CudaNumber { pending, what: "the loss" })
    }

    fn update(&self, update: &Update, parameters: Vec<Moved<'_, Self>>) -> Result<Option<CudaNumber>> {
        let rule = device_rule(update);
        let moved: Vec<UpdatedMatrix<'_>> = parameters
            .into_iter()
            .map(|Moved { value, gradient, state }| UpdatedMatrix {
                value: &mut value.0,
                gradient: &gradient.0,
                state: state.iter_mut().map(|state| &mut state.0).collect(),
            })
            .collect();
        let length = self.gpu.update(rule, update.clip_norm.is_some(), &moved);
        self.gpu.end_step();
        self.gpu.check()?;
        Ok(length.map(|pending| CudaNumber { pending, what: "the norm of the gradient" }))
    }
}
