//! Learned embeddings Z of a run: how rows begin, how gradients change them, and what the first layer reads of features X
//! and embeddings: f(X, Z).

use crate::npy::NpyMatrix;
use crate::{Result, RunConfig, TrainError};
use esker_nn::OptimizerConfig;
use esker_nn::{LinkMath, RowInit, initial_rows, initial_rows_of};
use esker_strategies::{
    EmbeddingUse, Embeddings, Pushed, RowTraining, Strategy, StrategyError, StrategyKind, marius,
};
use esker_types::NodeId;
use esker_types::random::Key;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::sync::Arc;

/// The stream of random numbers of initial rows.
const INITIAL: u64 = 6;
/// Numbers that are made at a time.
const PIECE_NUMBERS: usize = 1 << 20;

/// What the first layer reads: f(X, Z).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum InputRows {
    /// Embeddings alone.
    #[default]
    #[serde(rename = "z")]
    Embeddings,
    /// Features, then embeddings, side by side.
    #[serde(rename = "concat")]
    Concatenated,
    /// Features through a weight, plus embeddings.
    #[serde(rename = "sum")]
    Summed,
}

/// Embeddings, with every default resolved.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EmbeddingConfig {
    /// Numbers per row.
    pub columns: usize,
    /// What the first layer reads.
    pub inputs: InputRows,
    /// The optimizer. Only rows that a batch read are updated.
    pub optimizer: OptimizerConfig,
    /// The learning rate. It follows the schedule of the run.
    pub lr: f64,
    /// Initial numbers: a function of seed, node and column.
    pub init: RowInit,
    /// A matrix of initial rows instead, in an npy file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub init_file: Option<PathBuf>,
}

impl EmbeddingConfig {
    pub(crate) fn check(&self) -> Result<()> {
        let setting = |flag, found: f64, allowed| Err(TrainError::Setting { flag, found, allowed });
        if self.columns == 0 {
            return setting("--embeddings", 0.0, "at least 1");
        }
        if !(self.lr > 0.0 && self.lr.is_finite()) {
            return setting("--embedding-lr", self.lr, "greater than 0, and finite");
        }
        self.optimizer.row_update(1, self.lr)?;
        Ok(())
    }

    /// Fails if the initial rows are not for so many nodes.
    pub(crate) fn check_initial(&self, nodes: u64) -> Result<()> {
        let Some(path) = &self.init_file else { return Ok(()) };
        let matrix = NpyMatrix::open(path)?;
        match (matrix.rows, matrix.columns) == (nodes, self.columns as u64) {
            true => Ok(()),
            false => Err(TrainError::InitialRows {
                path: path.clone(),
                expected: format!("{nodes} rows of {}", self.columns),
                found: format!("{} rows of {}", matrix.rows, matrix.columns),
            }),
        }
    }

    /// Columns of the rows that the first layer reads.
    pub(crate) fn input_columns(&self, features: usize) -> usize {
        match self.inputs {
            InputRows::Embeddings | InputRows::Summed => self.columns,
            InputRows::Concatenated => features + self.columns,
        }
    }
}

/// How the rows of a run begin and change.
pub struct TableTraining {
    config: EmbeddingConfig,
    key: Key,
    /// Learning rate of embeddings by that of the run.
    rate: f64,
    names: Vec<&'static str>,
}

impl TableTraining {
    /// Rows of this configuration.
    pub fn new(config: &EmbeddingConfig, run: &RunConfig) -> TableTraining {
        let names = config.optimizer.row_states().iter().map(|name| match *name {
            "momentum" => "embeddings-momentum",
            "first" => "embeddings-first-moment",
            "second" => "embeddings-second-moment",
            _ => "embeddings-squares",
        });
        TableTraining {
            config: config.clone(),
            key: Key::new(run.seed).with(INITIAL),
            rate: config.lr / run.lr,
            names: names.collect(),
        }
    }
}

impl<B: LinkMath> RowTraining<B> for TableTraining {
    fn dim(&self) -> usize {
        self.config.columns
    }

    fn state_names(&self) -> &[&'static str] {
        &self.names
    }

    fn initial_rows(&self, nodes: &[NodeId], values: &mut [f32]) -> Result<(), StrategyError> {
        let (columns, given) =
            (self.config.columns, |error: TrainError| StrategyError::InitialRows { said: error.to_string() });
        match &self.config.init_file {
            None => initial_rows_of(self.key, self.config.init, nodes, columns, values),
            Some(path) => {
                let mut file = NpyMatrix::open(path).map_err(given)?;
                for (node, row) in nodes.iter().zip(values.chunks_exact_mut(columns)) {
                    file.read_row(node.0, row).map_err(given)?;
                }
            }
        }
        Ok(())
    }

    fn initialise(
        &self,
        rows: usize,
        write: &mut (dyn FnMut(usize, &[f32]) + Send),
    ) -> Result<(), StrategyError> {
        let columns = self.config.columns;
        let (piece, mut values) = ((PIECE_NUMBERS / columns).max(1), Vec::new());
        let given = |error: TrainError| StrategyError::InitialRows { said: error.to_string() };
        self.config.check_initial(rows as u64).map_err(given)?;
        let mut file = self.config.init_file.as_deref().map(NpyMatrix::open).transpose().map_err(given)?;
        for first in (0..rows).step_by(piece) {
            values.resize(piece.min(rows - first) * columns, 0.0);
            match &mut file {
                Some(file) => file.read(&mut values).map_err(given)?,
                None => initial_rows(self.key, self.config.init, first as u64, columns, &mut values),
            }
            write(first, &values);
        }
        Ok(())
    }

    fn update(
        &self,
        device: &B,
        table: &mut B::Matrix,
        state: &mut [B::Matrix],
        gradient: &Pushed<B>,
        rate: f64,
        step: u64,
    ) -> Result<(), StrategyError> {
        let update = self.config.optimizer.row_update(step, rate * self.rate);
        let update = update.expect("the optimizer was checked with the configuration");
        device.update_rows(&update, &gradient.slots, &gradient.rows, table, state);
        Ok(())
    }
}

/// The strategy of a run on a device, with embeddings if it learns any.
pub fn build_strategy<B: LinkMath>(config: &RunConfig, device: &B) -> Box<dyn Strategy<B>> {
    let rows = config.embeddings.as_ref().map(|embeddings| {
        let usage = match embeddings.inputs {
            InputRows::Embeddings => EmbeddingUse::Alone,
            InputRows::Concatenated | InputRows::Summed => EmbeddingUse::WithFeatures,
        };
        let training: Arc<dyn RowTraining<B>> = Arc::new(TableTraining::new(embeddings, config));
        (training, usage)
    });
    match (config.strategy, rows) {
        // Its rows are in partitions, as all others.
        (StrategyKind::Marius, rows) => Box::new(marius(device.clone(), rows)),
        (kind, None) => kind.build(device.clone()),
        (kind, Some((training, usage))) => {
            Box::new(Embeddings::over(kind.build(device.clone()), device.clone(), training, usage))
        }
    }
}
