use crate::{Activation, NnError, Result};
use serde::{Deserialize, Serialize};

/// What the layers are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// GraphSAGE: neighbours aggregated, and the node itself, each with a weight (PyG's SAGEConv).
    #[default]
    Sage,
    /// Symmetric normalisation with self-loops (PyG's GCNConv).
    Gcn,
    /// Attention over neighbours and self (PyG's GATConv).
    Gat,
    /// Sum of neighbours and self through two linear layers (PyG's GINConv).
    Gin,
    /// No neighbours at all.
    Mlp,
}

/// How GraphSAGE brings neighbours together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NeighbourAggregator {
    /// Mean.
    #[default]
    Mean,
    /// Largest of each column.
    Max,
    /// Sum.
    Sum,
}

/// Which degrees GCN normalises by, and what a sampled neighbour counts for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Degree {
    /// Those in the whole graph; each sampled neighbour counts `degree / sampled` times, so that the expected sum over a sample
    /// is the sum over all neighbours.
    #[default]
    Unbiased,
    /// Those in the whole graph; a sampled neighbour counts as if all were there.
    Whole,
    /// Those in the sample, as under PyG's loaders.
    Sampled,
}

impl Degree {
    /// What configurations mean that do not say it: they are older than [`Degree::Unbiased`].
    fn of_older_configurations() -> Degree {
        Degree::Whole
    }
}

/// What GAT's hidden layers do with their heads; the last layer always averages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HeadMerge {
    /// Side by side: each head has `hidden / heads` columns.
    #[default]
    Concat,
    /// Averaged: each head has `hidden` columns.
    Average,
}

/// What is normalised between layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NormKind {
    /// Nothing.
    #[default]
    None,
    /// Each row.
    Layer,
    /// Each column over the batch.
    Batch,
}

/// A model as a user describes it. Between layers: norm, activation, dropout, in this order, as in PyG's models.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ModelConfig {
    /// What the layers are.
    pub kind: Kind,
    /// How many.
    pub layers: usize,
    /// Columns between layers.
    pub hidden: usize,
    /// Share of hidden numbers dropped in training.
    pub dropout: f32,
    /// Share of input numbers dropped in training.
    pub input_dropout: f32,
    /// The function between layers.
    pub activation: Activation,
    /// What is normalised between layers.
    pub norm: NormKind,
    /// Adds each layer's own input row before norm and activation, through a weight where widths differ.
    pub residual: bool,
    /// GraphSAGE: how neighbours come together.
    pub aggregator: NeighbourAggregator,
    /// GCN: by which degrees.
    #[serde(default = "Degree::of_older_configurations")]
    pub gcn_degree: Degree,
    /// GAT: heads of every layer.
    pub heads: usize,
    /// GAT: heads of the last layer, where it has others.
    pub output_heads: Option<usize>,
    /// GAT: what becomes of them in hidden layers.
    pub head_merge: HeadMerge,
    /// GAT: share of attention weights dropped in training.
    pub attention_dropout: f32,
    /// GAT: share of projected numbers dropped in training, between the weight and the attention.
    pub projected_dropout: f32,
    /// GIN: a node counts `1 + epsilon` times.
    pub gin_epsilon: f32,
}

/// More than anybody trains; beyond it sizes would not fit their types.
const MOST_LAYERS: usize = 1000;
const MOST_COLUMNS: usize = 1 << 20;

impl Default for ModelConfig {
    fn default() -> ModelConfig {
        ModelConfig {
            kind: Kind::Sage,
            layers: 3,
            hidden: 256,
            dropout: 0.0,
            input_dropout: 0.0,
            activation: Activation::Relu,
            norm: NormKind::None,
            residual: false,
            aggregator: NeighbourAggregator::Mean,
            gcn_degree: Degree::default(),
            heads: 4,
            output_heads: None,
            head_merge: HeadMerge::Concat,
            attention_dropout: 0.0,
            projected_dropout: 0.0,
            gin_epsilon: 0.0,
        }
    }
}

impl ModelConfig {
    /// Refuses what describes no model.
    pub fn check(&self, input_columns: usize, output_columns: usize) -> Result<()> {
        if self.layers == 0 {
            return Err(NnError::config("a model of 0 layers", "ask for at least 1"));
        }
        if self.layers > MOST_LAYERS || self.hidden > MOST_COLUMNS || self.heads > MOST_COLUMNS {
            let problem = format!("{} layers of {} columns", self.layers, self.hidden);
            return Err(NnError::config(problem, format!("take at most {MOST_LAYERS} and {MOST_COLUMNS}")));
        }
        if input_columns == 0 {
            return Err(NnError::config(
                "rows of 0 features",
                "train on a dataset with features, or on embeddings",
            ));
        }
        if output_columns == 0 || self.hidden == 0 {
            let problem = format!("{} hidden and {output_columns} output columns", self.hidden);
            return Err(NnError::config(problem, "both must be at least 1"));
        }
        for (name, rate) in [
            ("dropout", self.dropout),
            ("attention_dropout", self.attention_dropout),
            ("projected_dropout", self.projected_dropout),
            ("input_dropout", self.input_dropout),
        ] {
            if !(0.0..1.0).contains(&rate) {
                return Err(NnError::config(format!("{name} = {rate}"), "take a share from 0 to below 1"));
            }
        }
        if !self.gin_epsilon.is_finite() {
            return Err(NnError::config(
                format!("gin_epsilon = {}", self.gin_epsilon),
                "take a finite number",
            ));
        }
        if self.kind == Kind::Gat {
            self.check_heads()?;
        }
        Ok(())
    }

    fn check_heads(&self) -> Result<()> {
        if self.heads == 0 || self.output_heads == Some(0) {
            return Err(NnError::config("attention with 0 heads", "ask for at least 1"));
        }
        if self.head_merge == HeadMerge::Concat && self.layers > 1 && !self.hidden.is_multiple_of(self.heads)
        {
            return Err(NnError::config(
                format!("{} hidden columns do not divide into {} heads", self.hidden, self.heads),
                format!("take hidden = {}", self.hidden.next_multiple_of(self.heads)),
            ));
        }
        Ok(())
    }

    /// Columns that layer `layer` reads and writes.
    pub fn widths(&self, layer: usize, input_columns: usize, output_columns: usize) -> (usize, usize) {
        let input = if layer == 0 { input_columns } else { self.hidden };
        let output = if layer + 1 == self.layers { output_columns } else { self.hidden };
        (input, output)
    }
}
