//! What flags say of links and of learned embeddings, with their defaults.

use super::Flags;
use crate::exit::usage;
use esker_nn::{DecoderKind, DistanceNorm, Kind, LinkLoss, ModelConfig, OptimizerConfig, RowInit};
use esker_store::Dataset;
use esker_train::link::{LinkConfig, NegativeCount, PenaltyConfig, PenaltyName, RankConfig};
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
        if model.layers == 0 { EncoderName::None } else { EncoderName::Layers(model.kind) }
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
            Some(kind) => OptimizerConfig { kind, epsilon: None, ..optimizer.clone() },
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
            mask: self.mask.unwrap_or_default(),
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
                phase_scale: match self.initial_rows(columns)? {
                    RowInit::Uniform { bound } if bound > 0.0 => std::f32::consts::PI / bound,
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

    fn negative_count(&self) -> anyhow::Result<NegativeCount> {
        let share = self.degree_share.unwrap_or(0.0);
        if !(0.0..=1.0).contains(&share) {
            return Err(usage(format!("--degree-share {share}: a share is between 0 and 1")));
        }
        Ok(match self.negatives.unwrap_or(NegativesName::Count(500)) {
            NegativesName::All => NegativeCount::All,
            NegativesName::Count(count) => {
                let by_degree = (count as f32 * share).round() as u32;
                let chunks = self.chunks.unwrap_or(10);
                NegativeCount::Shared { uniform: count - by_degree, by_degree, chunks }
            }
        })
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
            DecoderKind::RotatE { .. } => (DecoderName::RotatE, None),
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
                let all = uniform + by_degree;
                self.negatives = Some(NegativesName::Count(all));
                self.degree_share = Some(by_degree as f32 / all.max(1) as f32);
                self.chunks = Some(chunks);
            }
        }
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
