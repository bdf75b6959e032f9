//! One layer over whole graphs, for some targets at a time. The rows of their neighbours may come in any number of
//! parts: they are added in the order of the neighbours, so that the result is the same to the bit.
//!
//! ```text
//!  begin(own rows) ── add(part of the neighbours), again and again ──> end(own rows) = rows of the next layer
//! ```
//!
//! GAT aggregates projected rows: [`WholeLayer::project`] makes them from input rows, once per node.

use crate::convolution::{ATTENTION_SLOPE, Convolution};
use crate::layer::Layer;
use crate::*;

/// What a layer needs for inference over a whole graph. It follows from the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WholeNeeds {
    /// Whether it reads neighbours.
    pub neighbours: bool,
    /// Whether it projects rows before it aggregates them.
    pub projects: bool,
    /// Columns of the rows that it aggregates.
    pub columns: usize,
    /// Heads of its attention; 0 without attention.
    pub heads: usize,
    /// Whether it weights rows by the degrees of their nodes.
    pub degrees: bool,
    /// Whether an edge from a node to itself is left out, because the layer has its own self-loops.
    pub skips_self: bool,
    /// Whether sums start from the nodes' own rows.
    pub begins_with_own: bool,
}

impl ModelConfig {
    /// What layer `layer` needs, with rows of this many input columns and so many outputs.
    pub fn whole_needs(&self, layer: usize, inputs: usize, outputs: usize) -> WholeNeeds {
        let (input, output) = self.widths(layer, inputs, outputs);
        let attends = self.kind == Kind::Gat;
        let last = layer + 1 == self.layers;
        let heads = self.output_heads.filter(|_| last).unwrap_or(self.heads);
        let average = last || self.head_merge == HeadMerge::Average;
        let projected = if average { output * heads } else { output };
        WholeNeeds {
            neighbours: self.kind != Kind::Mlp,
            projects: attends,
            columns: if attends { projected } else { input },
            heads: if attends { heads } else { 0 },
            degrees: self.kind == Kind::Gcn,
            skips_self: attends || self.kind == Kind::Gcn,
            begins_with_own: matches!(self.kind, Kind::Gcn | Kind::Gin | Kind::Gat),
        }
    }
}

/// A layer of a model, for inference over a whole graph.
pub struct WholeLayer<'a, B: Backend> {
    pub(crate) backend: &'a B,
    pub(crate) layer: &'a Layer<B>,
}

/// What is known of some targets while their neighbours are added.
pub struct WholeSums<B: Backend> {
    kind: SumsKind<B>,
}

enum SumsKind<B: Backend> {
    None,
    Rows(B::Matrix),
    Attention { sums: AttentionSums<B::Matrix>, target_scores: B::Matrix },
}

/// What a layer needs to know of rows that it aggregates, besides the rows. It is made once for rows that many targets
/// read.
pub struct WholeFactors<B: Backend> {
    /// GCN's factors.
    scales: Option<B::Matrix>,
    /// GAT's scores.
    scores: Option<B::Matrix>,
}

/// Targets whose neighbours have been added.
pub struct WholeTargets<'a, B: Backend> {
    /// Their input rows, if [`WholeLayer::reads_own`].
    pub own: Option<&'a B::Matrix>,
    /// Their projected rows, if the layer projects.
    pub projected: Option<&'a B::Matrix>,
    /// How many neighbours each has.
    pub degrees: &'a [u32],
}

impl<B: Backend> WholeLayer<'_, B> {
    /// The rows that a GAT layer aggregates.
    pub fn project(&self, input: &B::Matrix) -> B::Matrix {
        self.layer.convolution().project(self.backend, input, None)
    }

    /// The factors of some rows, projected if the layer projects. `degrees` are those of their nodes, if
    /// [`WholeNeeds::degrees`].
    pub fn factors(&self, rows: &B::Matrix, degrees: Option<&[u32]>) -> WholeFactors<B> {
        let scores = match self.layer.convolution() {
            Convolution::Gat { source, heads, .. } => {
                Some(self.backend.attention_scores(rows, &source.value, *heads))
            }
            _ => None,
        };
        WholeFactors { scales: degrees.map(|degrees| self.scales(degrees)), scores }
    }

    /// `1 / sqrt(degree + 1)` of some rows: GCN's factors.
    fn scales(&self, degrees: &[u32]) -> B::Matrix {
        self.column(degrees.iter().map(|degree| 1.0 / ((*degree as f32 + 1.0).sqrt())))
    }

    /// A matrix of one column. It is uploaded as rows are, so that nothing waits for the device.
    fn column(&self, factors: impl ExactSizeIterator<Item = f32>) -> B::Matrix {
        let mut rows = self.backend.host_rows(factors.len(), 1);
        rows.values_mut().iter_mut().zip(factors).for_each(|(to, factor)| *to = factor);
        self.backend.upload(rows, 1)
    }

    /// Starts the sums of some targets. `own` are their rows, projected if the layer projects, if
    /// [`WholeNeeds::begins_with_own`]. `columns` are those of the rows that are aggregated.
    pub fn begin(&self, own: Option<B::Matrix>, degrees: &[u32], columns: usize) -> WholeSums<B> {
        let backend = self.backend;
        let filled = |rows: usize, columns: usize, value: f32| {
            let mut matrix = backend.matrix(rows, columns);
            backend.fill(&mut matrix, value);
            matrix
        };
        let targets = degrees.len();
        let own = || own.expect("sums that begin with own rows get them");
        let kind = match self.layer.convolution() {
            Convolution::Linear { .. } => SumsKind::None,
            Convolution::Sage { aggregator, .. } => {
                let value = if *aggregator == Aggregator::Max { f32::NEG_INFINITY } else { 0.0 };
                SumsKind::Rows(filled(targets, columns, value))
            }
            Convolution::Gcn { .. } => {
                let mut rows = own();
                backend.scale_rows(&self.scales(degrees), &mut rows);
                SumsKind::Rows(rows)
            }
            Convolution::Gin { aggregator, .. } => {
                let mut rows = own();
                let multiple =
                    if let Aggregator::SumWithSelf(multiple) = aggregator { *multiple } else { 1.0 };
                backend.scale_rows(&filled(targets, 1, multiple), &mut rows);
                SumsKind::Rows(rows)
            }
            Convolution::Gat { target, heads, .. } => SumsKind::Attention {
                target_scores: backend.attention_scores(&own(), &target.value, *heads),
                sums: AttentionSums {
                    rows: filled(targets, columns, 0.0),
                    most: filled(targets, *heads, f32::NEG_INFINITY),
                    total: filled(targets, *heads, 0.0),
                },
            },
        };
        WholeSums { kind }
    }

    /// Adds neighbours that are among these rows, projected if the layer projects, with the factors of the rows.
    pub fn add(
        &self,
        sums: &mut WholeSums<B>,
        graph: &B::Graph,
        rows: &B::Matrix,
        factors: &WholeFactors<B>,
    ) {
        match (&mut sums.kind, self.layer.convolution()) {
            (SumsKind::None, _) => {}
            (SumsKind::Rows(sums), Convolution::Sage { aggregator: Aggregator::Max, .. }) => {
                self.backend.accumulate(graph, rows, Accumulator::Max, sums);
            }
            (SumsKind::Rows(sums), _) => {
                let by = factors.scales.as_ref().map_or(Accumulator::Sum, Accumulator::Scaled);
                self.backend.accumulate(graph, rows, by, sums);
            }
            (SumsKind::Attention { sums, target_scores }, _) => {
                let source_scores = factors.scores.as_ref().expect("rows that GAT aggregates have scores");
                let call =
                    AttentionPart { hidden: rows, source_scores, target_scores, slope: ATTENTION_SLOPE };
                self.backend.attend_part(graph, call, sums);
            }
        }
    }

    /// The layer's output rows.
    pub fn end(&self, sums: WholeSums<B>, targets: &WholeTargets<'_, B>) -> B::Matrix {
        let aggregated = match sums.kind {
            SumsKind::None => None,
            SumsKind::Rows(mut rows) => {
                self.end_rows(&mut rows, targets.degrees);
                Some(rows)
            }
            SumsKind::Attention { sums, target_scores } => Some(
                self.end_attention(WholeSums { kind: SumsKind::Attention { sums, target_scores } }, targets),
            ),
        };
        let nothing;
        let own = match targets.own {
            Some(own) => own,
            None => {
                assert!(!self.reads_own(), "a layer that reads own rows gets them");
                nothing = self.backend.matrix(0, 0);
                &nothing
            }
        };
        self.layer.infer_aggregated(self.backend, targets.degrees.len(), own, aggregated)
    }

    /// From sums to aggregated rows.
    fn end_rows(&self, rows: &mut B::Matrix, degrees: &[u32]) {
        match self.layer.convolution() {
            Convolution::Sage { aggregator: Aggregator::Mean, .. } => {
                let factor = |degree: &u32| if *degree > 1 { 1.0 / *degree as f32 } else { 1.0 };
                self.backend.scale_rows(&self.column(degrees.iter().map(factor)), rows);
            }
            Convolution::Sage { aggregator: Aggregator::Max, .. } => {
                let alone = (0..degrees.len() as u32).filter(|row| degrees[*row as usize] == 0);
                let alone: Vec<u32> = alone.collect();
                if !alone.is_empty() {
                    self.backend.scatter_rows(None, &alone, rows);
                }
            }
            Convolution::Gcn { .. } => self.backend.scale_rows(&self.scales(degrees), rows),
            _ => {}
        }
    }

    /// Adds the self-loops, last, and divides by the weights.
    fn end_attention(&self, mut sums: WholeSums<B>, targets: &WholeTargets<'_, B>) -> B::Matrix {
        let projected = targets.projected.expect("a layer that projects gets projected rows");
        let count = targets.degrees.len() as u32;
        let (offsets, own): (Vec<u32>, Vec<u32>) = ((0..=count).collect(), (0..count).collect());
        let graph = self.backend.part_graph(count as usize, &offsets, &own);
        self.add(&mut sums, &graph, projected, &self.factors(projected, None));
        let (SumsKind::Attention { sums, .. }, Convolution::Gat { average, heads, .. }) =
            (sums.kind, self.layer.convolution())
        else {
            unreachable!("only GAT attends")
        };
        let columns = if *average { projected.columns() / heads } else { projected.columns() };
        let mut output = self.backend.matrix(count as usize, columns);
        self.backend.attend_end(sums, *average, &mut output);
        output
    }

    /// Whether a node's own input row is needed at the end.
    pub fn reads_own(&self) -> bool {
        let by_kind =
            matches!(self.layer.convolution(), Convolution::Linear { .. } | Convolution::Sage { .. });
        by_kind || self.layer.has_residual()
    }
}
