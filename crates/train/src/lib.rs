//! Training, evaluation and inference over any strategy.
//!
//! [`RunConfig`] is a run with every default resolved. [`Task`] is what is learned: splits and labels. [`Trainer`]
//! takes batches from a strategy, steps the model, evaluates, stops early, and writes a run directory. A run that is
//! resumed from its checkpoints is bit-identical to an uninterrupted one. `whole/` predicts every node with all its
//! neighbours, layer by layer, in the same memory. Nothing here knows where feature rows come from.
//!
//! ```
//! use esker_nn::{CpuBackend, ModelConfig};
//! use esker_sample::Fanout;
//! use esker_store::Dataset;
//! use esker_train::{Outcome, RunConfig, Trainer, Unwatched};
//! # let folder = tempfile::tempdir()?;
//! # let (path, out) = (folder.path().join("g"), folder.path().join("run"));
//! # let shape = esker_import::generate::GraphShape {
//! #     dim: 8, classes: 4, train: 0.5, valid: 0.2, test: 0.2, ..esker_import::generate::GraphShape::plain(1000)
//! # };
//! # let budget = esker_types::Budget { host_bytes: 64 << 20 };
//! # let job = esker_import::ImportJob { target: &path, budget, overwrite: false, progress: &esker_types::Silent };
//! # esker_import::generate::generate(&shape, &job)?;
//!
//! let dataset = Dataset::open(&path)?;
//! let fanout = vec![Fanout::AtMost(10), Fanout::AtMost(5)];
//! let config = RunConfig {
//!     model: ModelConfig { layers: 2, hidden: 16, ..ModelConfig::default() },
//!     eval_fanout: fanout.clone(),
//!     fanout,
//!     batch: 100,
//!     epochs: 2,
//!     ..RunConfig::for_dataset(&dataset)
//! };
//! let trainer = Trainer::create(CpuBackend::new(), config, &out)?;
//! let Outcome::Finished(summary) = trainer.run(&mut Unwatched)? else { unreachable!("nobody stops it") };
//! assert_eq!(summary.epochs.len(), 2);
//! assert!(out.join("best.safetensors").exists());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod checkpoint;
mod config;
mod early;
mod embeddings;
mod error;
mod evaluate;
mod history;
mod inputs;
mod learner;
pub mod link;
mod loader;
mod memory;
mod metrics;
mod npy;
mod objective;
mod open;
mod partition_orders;
mod peak;
mod predict;
mod record;
mod split;
mod state;
mod step;
mod task;
mod trainer;
mod tuning;
mod whole;

pub use checkpoint::Checkpoint;
pub use config::{ChosenPartitioning, EvaluationMode, MetricName, OrderName, RunConfig};
pub use early::EarlyRows;
pub use embeddings::{EmbeddingConfig, InputRows, TableTraining, build_strategy};
pub use error::{Difference, Result, TrainError};
pub use esker_fetch::pipeline::{StageClock, StageTimes};
pub use esker_strategies::adjacency;
pub use evaluate::{evaluate_run, rank_run};
pub use history::{HistoryConfig, HistoryHop, LEAST_HISTORY_BATCHES, USUAL_STALENESS, usual_staleness};
pub use learner::Learner;
pub use loader::{
    BatchValues, GivenEpoch, HandedColumn, LoadedBatch, Loader, LoaderConfig, LoaderOrder, LoaderPlan,
    LoaderRun, MemoryShare, SharedMemory,
};
pub use memory::{Bytes, DeviceProfile, Plan, PlannedBatches, Purpose};
pub use metrics::{Metrics, Tally};
pub use objective::{BatchTargets, Losses, Objective, Picked};
pub use open::{OpenRun, RunControl, count_steps};
pub use partition_orders::{CountedBuckets, ResidentOnly, StepsRecord, training_partitions};
pub use predict::{TakeEmbeddings, TakePredictions, embeddings, predict};
pub use record::{
    BatchRecord, EpochRecord, HistoryRecord, NeighbourRecord, RunDirectory, Summary, WallClock,
};
pub use split::HistorySplit;
pub use step::{InFlight, Step, StepDone};
pub use task::{LabelKind, LabelledNodes, SplitName, Task};
pub use trainer::{BatchProgress, Outcome, Trainer, Unwatched, Watcher};
pub use tuning::{BufferChoice, choose_buffer};
pub use whole::{WholeCounters, WholeSeconds};
