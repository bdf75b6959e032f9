//! Training, evaluation and inference over any strategy.
//!
//! [`RunConfig`] is a run with every default resolved; [`Task`] is what is learned: splits and labels; [`Trainer`] takes
//! batches from a strategy, steps the model, evaluates, stops early, and writes a run directory whose checkpoints repeat
//! an interrupted run to the bit; `whole.rs` infers every node with all its neighbours, layer by layer, inside the same
//! memory. Nothing here knows where rows come from.
#![forbid(unsafe_code)]

mod checkpoint;
mod config;
mod error;
mod evaluate;
mod learner;
mod memory;
mod metrics;
mod objective;
mod open;
mod peak;
mod predict;
mod record;
mod state;
mod step;
mod task;
mod trainer;
mod whole;

pub use checkpoint::Checkpoint;
pub use config::{EvaluationMode, MetricName, OrderName, RunConfig};
pub use error::{Result, TrainError};
pub use esker_fetch::pipeline::{StageClock, StageTimes};
pub use evaluate::evaluate_run;
pub use learner::{Learner, adjacency};
pub use memory::{Bytes, Plan, Processor, Purpose};
pub use metrics::{Metrics, Tally};
pub use objective::{BatchTargets, Objective, Picked};
pub use open::{OpenRun, RunControl};
pub use predict::{TakePredictions, predict};
pub use record::{BatchRecord, EpochRecord, ListRecord, RunDirectory, Summary};
pub use step::{InFlight, Step, StepDone};
pub use task::{LabelKind, LabelledNodes, SplitName, Task};
pub use trainer::{BatchProgress, Outcome, Trainer, Watcher};
