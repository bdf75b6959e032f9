use crate::error::SHARE;
use crate::{Activation, NnError, Result};
use serde::{Deserialize, Serialize};

/// The kind of layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// GraphSAGE: aggregated neighbours and the node itself, each with a weight (PyG's SAGEConv).
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

/// How GraphSAGE aggregates neighbours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NeighbourAggregator {
    /// Mean.
    #[default]
    Mean,
    /// Maximum per column.
    Max,
    /// Sum.
    Sum,
}

/// The degrees that GCN normalises by, and the weight of a sampled neighbour.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Degree {
    /// Degrees in the whole graph. Each sampled neighbour counts `degree / sampled` times, so that the expected sum
    /// over a sample is the sum over all neighbours.
    #[default]
    Unbiased,
    /// Degrees in the whole graph. A sampled neighbour counts as if all neighbours were present.
    Whole,
    /// Degrees in the sample, as with PyG's loaders.
    Sampled,
}

impl Degree {
    /// The value for configurations without this field: they are older than [`Degree::Unbiased`].
    fn of_older_configurations() -> Degree {
        Degree::Whole
    }
}

/// How GAT's hidden layers merge their heads. The last layer always averages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HeadMerge {
    /// Concatenated: each head has `hidden / heads` columns.
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
    /// The kind of layers.
    pub kind: Kind,
    /// Number of layers.
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
    /// Adds each layer's own input row before norm and activation, through a weight if the widths differ.
    pub residual: bool,
    /// GraphSAGE: how neighbours are aggregated.
    pub aggregator: NeighbourAggregator,
    /// GCN: the degrees to normalise by.
    #[serde(default = "Degree::of_older_configurations")]
    pub gcn_degree: Degree,
    /// GAT: heads per layer.
    pub heads: usize,
    /// GAT: heads of the last layer, if different.
    pub output_heads: Option<usize>,
    /// GAT: how hidden layers merge them.
    pub head_merge: HeadMerge,
    /// GAT: share of attention weights dropped in training.
    pub attention_dropout: f32,
    /// GAT: share of projected numbers dropped in training, between the weight and the attention.
    pub projected_dropout: f32,
    /// GIN: a node counts `1 + epsilon` times.
    pub gin_epsilon: f32,
}

/// More layers than anybody trains. Beyond this, sizes would overflow their types.
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
    /// Refuses an invalid configuration. Without layers, rows pass unchanged.
    pub fn check(&self, input_columns: usize, output_columns: usize) -> Result<()> {
        if self.layers == 0 && input_columns != output_columns {
            return Err(NnError::NoLayers);
        }
        if self.layers > MOST_LAYERS || self.hidden > MOST_COLUMNS || self.heads > MOST_COLUMNS {
            return Err(NnError::TooLarge {
                layers: self.layers,
                hidden: self.hidden,
                most_layers: MOST_LAYERS,
                most_hidden: MOST_COLUMNS,
            });
        }
        if input_columns == 0 {
            return Err(NnError::NoInput);
        }
        if output_columns == 0 || self.hidden == 0 {
            return Err(NnError::NoColumns { hidden: self.hidden, outputs: output_columns });
        }
        for (name, rate) in [
            ("dropout", self.dropout),
            ("attention_dropout", self.attention_dropout),
            ("projected_dropout", self.projected_dropout),
            ("input_dropout", self.input_dropout),
        ] {
            NnError::check_setting((0.0..1.0).contains(&rate), name, rate, SHARE)?;
        }
        let epsilon = self.gin_epsilon;
        NnError::check_setting(epsilon.is_finite(), "gin_epsilon", epsilon, "a finite number")?;
        if self.kind == Kind::Gat {
            self.check_heads()?;
        }
        Ok(())
    }

    fn check_heads(&self) -> Result<()> {
        if self.heads == 0 || self.output_heads == Some(0) {
            return Err(NnError::NoHeads);
        }
        if self.head_merge == HeadMerge::Concat && self.layers > 1 && !self.hidden.is_multiple_of(self.heads)
        {
            return Err(NnError::Heads { hidden: self.hidden, heads: self.heads });
        }
        Ok(())
    }

    /// The numbers of input and output columns of layer `layer`.
    pub fn widths(&self, layer: usize, input_columns: usize, output_columns: usize) -> (usize, usize) {
        let input = if layer == 0 { input_columns } else { self.hidden };
        let output = if layer + 1 == self.layers { output_columns } else { self.hidden };
        (input, output)
    }
}
