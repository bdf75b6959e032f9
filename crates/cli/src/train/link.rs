//! What flags say of links and of learned embeddings, with their defaults.

use super::Flags;
use crate::exit::usage;
use esker_nn::{DecoderKind, DistanceNorm, Kind, LinkLoss, ModelConfig, OptimizerConfig, RowInit};
use esker_store::Dataset;
use esker_train::link::{LinkConfig, NegativeCount, PenaltyConfig, PenaltyName, RankConfig, RelationInit};
use esker_train::{EmbeddingConfig, EvaluationMode, InputRows, MetricName, RunConfig};
use serde::{Deserialize, Serialize};
use std::str::FromStr;

/// What is learned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TaskName {
    /// Labels of nodes.
    #[default]
    Node,
    /// Edges.
    Link,
}

/// An encoder: the kind of layers, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum EncoderName {
    /// Layers of this kind.
    Layers(Kind),
    /// No layers: the decoder reads the input rows.
    None,
}

impl FromStr for EncoderName {
    type Err = String;
    fn from_str(text: &str) -> Result<EncoderName, String> {
        match text {
            "none" => Ok(EncoderName::None),
            "rgcn" | "r-gcn" => Err("relational encoders such as R-GCN are not trained yet; take sage, gcn, gat, gin, mlp or none".into()),
            kind => super::flags::word(kind).map(EncoderName::Layers),
        }
    }
}

impl TryFrom<String> for EncoderName {
    type Error = String;
    fn try_from(text: String) -> Result<EncoderName, String> {
        text.parse()
    }
}

impl From<EncoderName> for String {
    fn from(name: EncoderName) -> String {
        match name {
            EncoderName::None => "none".into(),
            EncoderName::Layers(kind) => format!("{kind:?}").to_lowercase(),
        }
    }
}

impl EncoderName {
    /// The encoder of a model.
    pub fn of(model: &ModelConfig) -> EncoderName {
        match (model.layers, model.kind) {
            (0, Kind::Mlp) => EncoderName::None,
            (_, kind) => EncoderName::Layers(kind),
        }
    }

    /// The kind of its layers.
    pub fn kind(self) -> Kind {
        match self {
            EncoderName::Layers(kind) => kind,
            EncoderName::None => Kind::Mlp,
        }
    }
}

/// A number of negatives, or `all` nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "NegativesAsWritten")]
pub enum NegativesName {
    /// So many per chunk and side.
    Count(u32),
    /// All nodes.
    All,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum NegativesAsWritten {
    Count(u32),
    Text(String),
}

impl TryFrom<NegativesAsWritten> for NegativesName {
    type Error = String;
    fn try_from(written: NegativesAsWritten) -> Result<NegativesName, String> {
        match written {
            NegativesAsWritten::Count(count) => Ok(NegativesName::Count(count)),
            NegativesAsWritten::Text(text) => text.parse(),
        }
    }
}

impl From<NegativesName> for String {
    fn from(name: NegativesName) -> String {
        match name {
            NegativesName::Count(count) => count.to_string(),
            NegativesName::All => "all".into(),
        }
    }
}

impl FromStr for NegativesName {
    type Err = String;
    fn from_str(text: &str) -> Result<NegativesName, String> {
        match text {
            "all" => Ok(NegativesName::All),
            number => number
                .parse()
                .map(NegativesName::Count)
                .map_err(|_| format!("`{number}` is not a number of negatives; write one, or all")),
        }
    }
}

/// The decoders by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DecoderName {
    /// Dot product.
    Dot,
    /// DistMult.
    DistMult,
    /// TransE.
    TransE,
    /// ComplEx.
    ComplEx,
    /// RotatE.
    RotatE,
}

/// The losses by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LossName {
    /// Softmax cross-entropy.
    #[default]
    Softmax,
    /// Logistic.
    Logistic,
    /// Margin.
    Margin,
    /// Self-adversarial.
    SelfAdversarial,
}

/// Initial rows: `normal:DEVIATION` or `uniform:BOUND`.
pub fn initial(text: &str) -> Result<RowInit, String> {
    let wrong = || format!("`{text}` is not an initial distribution; write normal:0.1 or uniform:0.05");
    let (name, number) = text.split_once(':').ok_or_else(wrong)?;
    let number: f32 = number.parse().map_err(|_| wrong())?;
    match name {
        _ if !(number >= 0.0 && number.is_finite()) => Err(wrong()),
        "normal" => Ok(RowInit::Normal { deviation: number }),
        "uniform" => Ok(RowInit::Uniform { bound: number }),
        _ => Err(wrong()),
    }
}

fn initial_text(init: RowInit) -> String {
    match init {
        RowInit::Normal { deviation } => format!("normal:{deviation}"),
        RowInit::Uniform { bound } => format!("uniform:{bound}"),
    }
}

/// Deviation of initial rows, if none is given.
const USUAL_DEVIATION: f32 = 0.1;
/// Margin of losses that have one, if none is given.
const USUAL_MARGIN: f32 = 9.0;
/// Added to the margin in the range of RotatE's initial numbers, as its authors do.
const ROTATE_RANGE: f32 = 2.0;

impl Flags {
    /// Whether links are learned.
    pub fn learns_links(&self) -> bool {
        self.task == Some(TaskName::Link)
    }

    /// How evaluation is done if it is not given: links with all neighbours.
    pub fn usual_eval(&self, usual: EvaluationMode) -> EvaluationMode {
        if self.learns_links() { EvaluationMode::Full } else { usual }
    }

    /// The metric if none is given.
    pub fn usual_metric(&self, usual: MetricName) -> MetricName {
        if self.learns_links() { MetricName::Mrr } else { usual }
    }

    /// Learned embeddings, if they are asked for.
    pub fn embedding_config(
        &self,
        optimizer: &OptimizerConfig,
        lr: f64,
    ) -> anyhow::Result<Option<EmbeddingConfig>> {
        let Some(columns) = self.embeddings else {
            let given = [
                ("--inputs", self.inputs.is_some_and(|inputs| inputs != InputsName::X)),
                ("--embedding-optimizer", self.embedding_optimizer.is_some()),
                ("--embedding-lr", self.embedding_lr.is_some()),
                ("--lag", self.lag.is_some()),
                ("--init-embeddings", self.init_embeddings.is_some()),
            ];
            return match given.iter().find(|(_, given)| *given) {
                None => Ok(None),
                Some((flag, _)) => Err(usage(format!("{flag} has no effect without --embeddings D"))),
            };
        };
        let inputs = match self.inputs.unwrap_or(InputsName::Z) {
            InputsName::X => return Err(usage("--inputs x reads no embeddings; leave --embeddings out")),
            InputsName::Z => InputRows::Embeddings,
            InputsName::Concat => InputRows::Concatenated,
            InputsName::Sum => InputRows::Summed,
        };
        let optimizer = match self.embedding_optimizer {
            None => optimizer.clone(),
            Some(kind) if kind == optimizer.kind => optimizer.clone(),
            // What was given for another kind is not for this one.
            Some(kind) => {
                OptimizerConfig { kind, epsilon: None, momentum: 0.0, nesterov: false, ..optimizer.clone() }
            }
        };
        let lr = self.embedding_lr.unwrap_or(lr);
        let init = self.initial_rows(columns)?;
        // Whole, so that the run can be resumed from anywhere.
        let init_file = self.init_embeddings.as_ref();
        let init_file = init_file.map(|path| std::path::absolute(path).unwrap_or(path.clone()));
        Ok(Some(EmbeddingConfig { columns, inputs, optimizer, lr, init, init_file }))
    }

    fn initial_rows(&self, columns: usize) -> anyhow::Result<RowInit> {
        match &self.init {
            Some(text) => initial(text).map_err(|error| usage(format!("--init {text}: {error}"))),
            None if self.decoder == Some(DecoderName::RotatE) => {
                let margin = self.margin.unwrap_or(USUAL_MARGIN);
                Ok(RowInit::Uniform { bound: (margin + ROTATE_RANGE) / (columns / 2).max(1) as f32 })
            }
            None => Ok(RowInit::Normal { deviation: USUAL_DEVIATION }),
        }
    }

    /// Links, if they are learned.
    pub fn link_config(&self, dataset: &Dataset, model: &ModelConfig) -> anyhow::Result<Option<LinkConfig>> {
        if !self.learns_links() {
            return Ok(None);
        }
        let features = dataset.manifest().nodes.features.as_ref().map_or(0, |features| features.dim as usize);
        let inputs = match (self.embeddings, self.inputs) {
            (None, _) => features,
            (Some(columns), Some(InputsName::Concat)) => features + columns,
            (Some(columns), _) => columns,
        };
        let usual = if model.layers == 0 { inputs } else { self.embeddings.unwrap_or(model.hidden) };
        let columns = self.out_channels.unwrap_or(usual);
        let penalty = match (self.l2, self.n3) {
            (Some(_), Some(_)) => return Err(usage("--l2 and --n3: give one of them")),
            (Some(weight), None) => Some(PenaltyConfig { kind: PenaltyName::L2, weight }),
            (None, Some(weight)) => Some(PenaltyConfig { kind: PenaltyName::N3, weight }),
            (None, None) => None,
        };
        Ok(Some(LinkConfig {
            decoder: self.decoder_kind(dataset, columns)?,
            columns,
            loss: self.link_loss(),
            reduction: self.reduction.unwrap_or_default(),
            negatives: self.negative_count()?,
            source_negatives: self.source_counts()?,
            mask: self.mask.unwrap_or_default(),
            edge_weights: self.edge_weights.unwrap_or_default(),
            relation_init: self.relation_init()?,
            inverse: self.inverse_relations.unwrap_or(false),
            target_edges: self.target_edges.unwrap_or_default(),
            relation_dropout: self.relation_dropout.unwrap_or(0.0),
            penalty,
            ranks: RankConfig {
                ties: self.ties.unwrap_or_default(),
                raw: self.raw.unwrap_or(false),
                candidates: self.candidates,
                block: self.candidate_block,
            },
        }))
    }

    fn decoder_kind(&self, dataset: &Dataset, columns: usize) -> anyhow::Result<DecoderKind> {
        let typed = dataset.manifest().edges.relations.as_ref().is_some_and(|relations| relations.count > 1);
        let usual = if typed { DecoderName::DistMult } else { DecoderName::Dot };
        Ok(match self.decoder.unwrap_or(usual) {
            DecoderName::Dot => DecoderKind::Dot,
            DecoderName::DistMult => DecoderKind::DistMult,
            DecoderName::TransE => DecoderKind::TransE { norm: self.distance.unwrap_or(DistanceNorm::L2) },
            DecoderName::ComplEx => DecoderKind::ComplEx,
            DecoderName::RotatE => DecoderKind::RotatE {
                phase_scale: match (self.phase_scale, self.initial_rows(columns)?) {
                    (Some(scale), _) => scale,
                    (None, RowInit::Uniform { bound }) if bound > 0.0 => std::f32::consts::PI / bound,
                    _ => 1.0,
                },
            },
        })
    }

    fn link_loss(&self) -> LinkLoss {
        let margin = self.margin.unwrap_or(USUAL_MARGIN);
        match self.loss.unwrap_or_default() {
            LossName::Softmax => LinkLoss::Softmax,
            LossName::Logistic => LinkLoss::Logistic,
            LossName::Margin => LinkLoss::Margin { margin },
            LossName::SelfAdversarial => {
                LinkLoss::SelfAdversarial { margin, temperature: self.temperature.unwrap_or(1.0) }
            }
        }
    }

    /// How many of so many negatives are drawn uniformly, and how many by degree.
    fn drawn(&self, count: u32) -> anyhow::Result<[u32; 2]> {
        let share = self.degree_share.unwrap_or(0.0);
        if !(0.0..=1.0).contains(&share) {
            return Err(usage(format!("--degree-share {share}: a share is between 0 and 1")));
        }
        let by_degree = by_degree(count, share);
        Ok([count - by_degree, by_degree])
    }

    fn source_counts(&self) -> anyhow::Result<Option<[u32; 2]>> {
        match (self.source_negatives, self.negatives) {
            (Some(_), Some(NegativesName::All)) => {
                Err(usage("--source-negatives has no effect with --negatives all"))
            }
            (count, _) => count.map(|count| self.drawn(count)).transpose(),
        }
    }

    fn relation_init(&self) -> anyhow::Result<Option<RelationInit>> {
        let Some(text) = &self.init_relations else { return Ok(None) };
        Ok(Some(match text.as_str() {
            "ones" => RelationInit::Ones,
            text => RelationInit::Random(
                initial(text).map_err(|error| usage(format!("--init-relations {text}: {error}")))?,
            ),
        }))
    }

    fn negative_count(&self) -> anyhow::Result<NegativeCount> {
        Ok(match self.negatives.unwrap_or(NegativesName::Count(500)) {
            NegativesName::All => NegativeCount::All,
            NegativesName::Count(count) => {
                let [uniform, by_degree] = self.drawn(count)?;
                NegativeCount::Shared { uniform, by_degree, chunks: self.chunks.unwrap_or(10) }
            }
        })
    }

    /// Leaves out of a run's flags what follows from these anew: the range of RotatE's initial numbers.
    pub(super) fn leave_range(&self, of_run: &mut Flags) {
        // The margin decides it where the loss has none.
        let by_margin = self.margin.is_some() && of_run.margin.is_none() && self.init.is_none();
        if self.init.is_some() || by_margin {
            of_run.phase_scale = None;
        }
        if by_margin && of_run.decoder == Some(DecoderName::RotatE) {
            of_run.init = None;
        }
    }

    /// The flags that give what a configuration has of links and embeddings.
    pub(super) fn links_of(config: &RunConfig) -> Flags {
        let mut flags = Flags::default();
        if let Some(rows) = &config.embeddings {
            flags.embeddings = Some(rows.columns);
            flags.inputs = Some(match rows.inputs {
                InputRows::Embeddings => InputsName::Z,
                InputRows::Concatenated => InputsName::Concat,
                InputRows::Summed => InputsName::Sum,
            });
            flags.embedding_optimizer =
                Some(rows.optimizer.kind).filter(|kind| *kind != config.optimizer.kind);
            flags.embedding_lr = Some(rows.lr);
            flags.init = Some(initial_text(rows.init));
            flags.init_embeddings.clone_from(&rows.init_file);
        }
        if let Some(link) = &config.link {
            flags.set_links(link);
        }
        flags
    }

    fn set_links(&mut self, link: &LinkConfig) {
        self.task = Some(TaskName::Link);
        let (decoder, distance) = match link.decoder {
            DecoderKind::Dot => (DecoderName::Dot, None),
            DecoderKind::DistMult => (DecoderName::DistMult, None),
            DecoderKind::TransE { norm } => (DecoderName::TransE, Some(norm)),
            DecoderKind::ComplEx => (DecoderName::ComplEx, None),
            DecoderKind::RotatE { phase_scale } => {
                // Initial rows have the width of embeddings, rotations that of the encoder's output: a bound may have
                // been derived for each.
                self.phase_scale = Some(phase_scale);
                (DecoderName::RotatE, None)
            }
        };
        (self.decoder, self.distance) = (Some(decoder), distance);
        self.out_channels = Some(link.columns);
        let (loss, margin, temperature) = match link.loss {
            LinkLoss::Softmax => (LossName::Softmax, None, None),
            LinkLoss::Logistic => (LossName::Logistic, None, None),
            LinkLoss::Margin { margin } => (LossName::Margin, Some(margin), None),
            LinkLoss::SelfAdversarial { margin, temperature } => {
                (LossName::SelfAdversarial, Some(margin), Some(temperature))
            }
        };
        (self.loss, self.margin, self.temperature) = (Some(loss), margin, temperature);
        self.reduction = Some(link.reduction);
        match link.negatives {
            NegativeCount::All => self.negatives = Some(NegativesName::All),
            NegativeCount::Shared { uniform, by_degree, chunks } => {
                self.negatives = Some(NegativesName::Count(uniform + by_degree));
                let sides = [[uniform, by_degree], link.source_negatives.unwrap_or([uniform, by_degree])];
                self.degree_share = Some(degree_share(sides));
                self.chunks = Some(chunks);
            }
        }
        self.source_negatives = link.source_negatives.map(|counts| counts.iter().sum());
        self.edge_weights = Some(link.edge_weights);
        self.init_relations = link.relation_init.map(|init| match init {
            RelationInit::Ones => "ones".into(),
            RelationInit::Random(init) => initial_text(init),
        });
        (self.mask, self.target_edges) = (Some(link.mask), Some(link.target_edges));
        self.inverse_relations = Some(link.inverse);
        self.relation_dropout = Some(link.relation_dropout);
        match link.penalty {
            Some(PenaltyConfig { kind: PenaltyName::L2, weight }) => self.l2 = Some(weight),
            Some(PenaltyConfig { kind: PenaltyName::N3, weight }) => self.n3 = Some(weight),
            None => {}
        }
        (self.ties, self.raw) = (Some(link.ranks.ties), Some(link.ranks.raw));
        (self.candidates, self.candidate_block) = (link.ranks.candidates, link.ranks.block);
    }
}

/// How many of so many negatives are drawn by degree.
fn by_degree(count: u32, share: f32) -> u32 {
    ((count as f32 * share).round() as u32).min(count)
}

/// A share that gives both sides as many negatives by degree as they have, written with the fewest digits. If there is
/// none, that of the first side.
fn degree_share(sides: [[u32; 2]; 2]) -> f32 {
    let reaches =
        |share: f32| sides.iter().all(|[uniform, degree]| by_degree(uniform + degree, share) >= *degree);
    let gives_both =
        |share: f32| sides.iter().all(|[uniform, degree]| by_degree(uniform + degree, share) == *degree);
    // Counts grow with the share, and floats from 0 up are ordered as their bits are.
    let (mut below, mut least) = (0f32.to_bits(), 1f32.to_bits());
    if reaches(0.0) {
        least = below;
    }
    while least - below > 1 {
        let middle = below + (least - below) / 2;
        if reaches(f32::from_bits(middle)) { least = middle } else { below = middle }
    }
    let least = f32::from_bits(least);
    let rounded = (0..9).flat_map(|digits| {
        let unit = 10f64.powi(digits);
        let least = least as f64 * unit;
        [least.floor(), least.ceil()].map(|number| (number / unit) as f32)
    });
    let [[uniform, degree], _] = sides;
    let first = degree as f32 / (uniform + degree).max(1) as f32;
    rounded.chain([least]).find(|share| gives_both(*share)).unwrap_or(first)
}

/// What the first layer reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum InputsName {
    /// Features.
    X,
    /// Embeddings.
    Z,
    /// Both, side by side.
    Concat,
    /// Features through a weight, plus embeddings.
    Sum,
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]
mod tests {
    use super::*;
    use crate::train::TrainArguments;
    use clap::Parser;
    use esker_import::ImportJob;
    use esker_import::generate::{FactShape, GraphShape, generate, generate_facts};
    use esker_types::{Budget, Silent};
    use proptest::prelude::*;
    use std::sync::LazyLock;

    /// A graph with features and one with relations.
    struct Graphs {
        featured: Dataset,
        typed: Dataset,
        _directory: tempfile::TempDir,
    }

    static GRAPHS: LazyLock<Graphs> = LazyLock::new(|| {
        let directory = tempfile::tempdir().unwrap();
        let make = |name: &str, shape: Option<GraphShape>| {
            let (target, budget) = (directory.path().join(name), Budget { host_bytes: 64 << 20 });
            let job = ImportJob { target: &target, overwrite: true, budget, progress: &Silent };
            match shape {
                Some(shape) => generate(&shape, &job).unwrap(),
                None => {
                    generate_facts(&FactShape { nodes: 200, ..FactShape::freebase86m(1e-5) }, &job).unwrap()
                }
            };
            Dataset::open(&target).unwrap()
        };
        let shape = GraphShape { classes: 2, dim: 6, degree: 3.0, ..GraphShape::plain(100) };
        let (featured, typed) = (make("featured", Some(shape)), make("typed", None));
        Graphs { featured, typed, _directory: directory }
    });

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        arguments: TrainArguments,
    }

    fn flags_of(words: &str) -> Flags {
        let line = format!("train dataset --device cpu --memory 1GiB {words}");
        Line::try_parse_from(line.split_whitespace()).unwrap().arguments.flags
    }

    /// What resuming with `again`, and nothing else, finds changed in a run of these flags.
    fn changed(words: &str, again: &str, dataset: &Dataset) -> Vec<String> {
        let config = flags_of(words).resolve(dataset).unwrap();
        let mut base = Flags::of(&config, true);
        let again = match again {
            "" => Flags::default(),
            again => flags_of(again),
        };
        again.leave_range(&mut base);
        let resumed = again.over(base).unwrap().resolve(dataset).unwrap();
        resumed.differences(&config).into_iter().map(|difference| difference.name).collect()
    }

    fn check_resumes(words: &str) {
        let words = format!("--task link {words}");
        for dataset in [&GRAPHS.featured, &GRAPHS.typed] {
            for again in ["", &words] {
                assert_eq!(changed(&words, again, dataset), [""; 0], "{words}, then {again}");
            }
        }
    }

    #[test]
    fn shares_of_both_sides_are_resumed() {
        check_resumes("--embeddings 8 --negatives 402 --source-negatives 255 --degree-share 0.1");
    }

    #[test]
    fn a_range_for_embeddings_and_one_for_rotations_are_resumed() {
        check_resumes("--encoder sage --layers 1 --embeddings 32 --out-channels 16 --decoder rotate");
    }

    #[test]
    fn a_range_without_embeddings_is_resumed() {
        check_resumes("--encoder sage --layers 1 --out-channels 16 --decoder rotate --init uniform:0.5");
    }

    #[test]
    fn a_range_from_a_margin_that_the_loss_does_not_have_is_resumed() {
        check_resumes("--encoder none --embeddings 8 --decoder rotate --margin 6 --loss softmax");
    }

    #[test]
    fn an_encoder_of_no_layers_is_resumed_by_its_name() {
        check_resumes("--encoder sage --layers 0 --embeddings 8");
    }

    #[test]
    fn another_range_is_another_run() {
        let run = "--task link --encoder sage --layers 1 --out-channels 8 --decoder rotate";
        let dataset = &GRAPHS.featured;
        assert_eq!(changed(&format!("{run} --init uniform:0.5"), "--init uniform:0.25", dataset).len(), 1);
        let found = changed(&format!("{run} --embeddings 8 --margin 6"), "--margin 7", dataset);
        assert_eq!(found.len(), 2, "{found:?}");
    }

    #[test]
    fn a_share_is_written_as_it_was() {
        for (share, counts) in [(0.1, [402, 255]), (0.5, [500, 500]), (1.0, [7, 3]), (0.0, [9, 1])] {
            let sides = counts.map(|count| [count - by_degree(count, share), by_degree(count, share)]);
            assert_eq!(degree_share(sides), share);
        }
    }

    /// One of these words, or none.
    fn word(words: &'static [&'static str]) -> impl Strategy<Value = &'static str> {
        prop::sample::select(words)
    }

    fn links() -> impl Strategy<Value = String> {
        let decoder = word(&[
            "",
            "--decoder dot",
            "--decoder transe --distance l1",
            "--decoder complex",
            "--decoder rotate",
        ]);
        let loss = word(&[
            "",
            "--loss logistic",
            "--loss margin --margin 3.3",
            "--loss self-adversarial --temperature 0.7",
        ]);
        let penalty = word(&["", "--l2 0.3", "--n3 0.01"]);
        let rows =
            word(&["", "--init-relations ones", "--init-relations uniform:0.3", "--inverse-relations"]);
        let others =
            word(&["", "--mask batch --reduction sum", "--edge-weights subsampling --target-edges keep"]);
        let ranks = word(&["", "--ties pessimistic --raw", "--candidates 9 --candidate-block 4"]);
        let negatives = (1u32..2000, prop::option::of(1u32..2000), prop::option::of(0f32..=1.0)).prop_map(
            |(all, sources, share)| {
                let sources =
                    sources.map_or(String::new(), |sources| format!("--source-negatives {sources}"));
                let share = share.map_or(String::new(), |share| format!("--degree-share {share}"));
                format!("--negatives {all} {sources} {share} --chunks 3")
            },
        );
        let negatives = prop_oneof![negatives, Just("--negatives all".to_string())];
        (decoder, loss, penalty, rows, others, ranks, negatives).prop_map(
            |(decoder, loss, penalty, rows, others, ranks, negatives)| {
                [decoder, loss, penalty, rows, others, ranks, &negatives].join(" ")
            },
        )
    }

    fn rows() -> impl Strategy<Value = String> {
        let encoder = word(&[
            "--encoder none",
            "--encoder sage --layers 1 --out-channels 6",
            "--encoder gat --layers 2 --hidden 4",
            "--encoder mlp --layers 0",
        ]);
        let init = (prop::option::of(0.001f32..3.0), any::<bool>()).prop_map(|(number, normal)| {
            number.map_or(String::new(), |number| {
                format!("--init {}:{number}", if normal { "normal" } else { "uniform" })
            })
        });
        let optimizer = word(&["", "--optimizer adagrad --lr 0.1", "--optimizer sgd --momentum 0.9"]);
        let inputs = word(&["", "--inputs concat", "--inputs sum"]);
        let own = word(&["", "--embedding-optimizer adagrad --embedding-lr 0.03"]);
        let embeddings = prop::option::of((1usize..40, inputs, own)).prop_map(|embeddings| {
            embeddings.map_or(String::new(), |(columns, inputs, own)| {
                format!("--embeddings {columns} {inputs} {own}")
            })
        });
        (encoder, init, optimizer, embeddings).prop_map(|(encoder, init, optimizer, embeddings)| {
            [encoder, &init, optimizer, &embeddings].join(" ")
        })
    }

    proptest! {
        #[test]
        fn flags_of_a_configuration_give_it_again(rows in rows(), links in links(), margin in prop::option::of(1f32..20.0)) {
            let margin = margin.filter(|_| !links.contains("--margin"));
            let margin = margin.map_or(String::new(), |margin| format!("--margin {margin}"));
            let words = format!("--task link {rows} {links} {margin}");
            for dataset in [&GRAPHS.featured, &GRAPHS.typed] {
                prop_assert_eq!(changed(&words, "", dataset), [""; 0], "{}", words);
            }
        }
    }
}
