//! What a loader is asked for.

use crate::{Result, TrainError};
use esker_sample::order::{Batching, GivenOrder, Order, Sequential, Shuffled};
use esker_sample::{
    Batches, Carry, Direction, Fanout, Form, NodeBatches, Position, Rank, RankBatches, Seeds, Settings,
};
use esker_strategies::StrategyKind;
use std::path::PathBuf;
use std::sync::Arc;

/// A loader with every default resolved.
#[derive(Debug, Clone)]
pub struct LoaderConfig {
    /// How rows are brought to batches. `outre` and `marius` change what is trained, and are refused.
    pub strategy: StrategyKind,
    /// The seed nodes, in any order. They may repeat.
    pub seeds: Arc<Seeds>,
    /// Neighbours per node and hop, the hop next to the seeds first.
    pub fanouts: Vec<Fanout>,
    /// Seeds of the largest batch.
    pub batch: u64,
    /// The order of batches.
    pub order: LoaderOrder,
    /// The direction of edges along which neighbours are found.
    pub direction: Direction,
    /// Whether batches have feature rows.
    pub features: bool,
    /// Whether batches have edge ids.
    pub edge_ids: bool,
    /// Arrays of the dataset by node or by edge whose values come with each batch.
    pub columns: Vec<String>,
    /// The most memory that the loader takes, with the batches that the caller has: one, beside one that is ready.
    pub memory: u64,
    /// Threads that sample and fetch rows.
    pub threads: usize,
    /// Where traces and plans go, in a directory of the loader's own that is removed with it.
    pub scratch: PathBuf,
    /// Directory of packed rows, for `diskgnn`. By default they are in the dataset.
    pub prepared: Option<PathBuf>,
    /// The most that its files may take on disk.
    pub disk_budget: Option<u64>,
    /// Distinct epochs that `diskgnn` packs. Later ones repeat them.
    pub epochs_sampled: Option<u64>,
}

/// The order of a loader's batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoaderOrder {
    /// Esker's own, as in `esker train`. All batches are known before the first.
    Planned {
        /// The random seed of order and samples.
        seed: u64,
        /// Number of epochs.
        epochs: u64,
        /// Whether each epoch has a new order of the seeds.
        shuffle: bool,
        /// Whether a last, smaller batch is left out.
        drop_last: bool,
        /// This process among those that train together.
        rank: Rank,
    },
    /// Each epoch's order is given when it begins.
    Given {
        /// Batches of an epoch, about: superbatches are divided by it.
        batches: u64,
    },
}

/// The batches of an epoch whose order is given.
#[derive(Debug, Clone)]
pub struct GivenEpoch {
    /// The random seed of its samples.
    pub seed: u64,
    /// The seeds of each batch, as indices of the loader's.
    pub batches: Vec<Vec<u64>>,
}

impl LoaderConfig {
    /// Fails if a value is out of bounds.
    pub(super) fn check(&self) -> Result<()> {
        if matches!(self.strategy, StrategyKind::Outre | StrategyKind::Marius) {
            return Err(TrainError::NoLoader { strategy: self.strategy });
        }
        if self.batch == 0 {
            return Err(TrainError::Setting { flag: "--batch", found: 0.0, allowed: "1 or more" });
        }
        if self.threads == 0 {
            return Err(TrainError::Setting { flag: "--threads", found: 0.0, allowed: "1 or more" });
        }
        if self.seeds.is_empty() {
            return Err(TrainError::NoSeeds);
        }
        Ok(())
    }

    /// How neighbours are sampled, with this random seed.
    pub(super) fn settings(&self, seed: u64) -> Settings {
        // Whatever comes after a hop without neighbours has none.
        let hops = self.fanouts.iter().position(|fanout| *fanout == Fanout::AtMost(0));
        Settings {
            seed,
            fanouts: self.fanouts[..hops.unwrap_or(self.fanouts.len())].to_vec(),
            form: Form::Dense,
            carry: Carry { edges: self.edge_ids, ..Carry::default() },
        }
    }

    /// The random seed of samples, until an epoch gives its own.
    pub(super) fn seed(&self) -> u64 {
        match self.order {
            LoaderOrder::Planned { seed, .. } => seed,
            LoaderOrder::Given { .. } => 0,
        }
    }

    /// Number of epochs that a job has.
    pub(super) fn epochs(&self) -> u64 {
        match self.order {
            LoaderOrder::Planned { epochs, .. } => epochs,
            LoaderOrder::Given { .. } => 1,
        }
    }

    /// The order of batches. Of a given order, one with batches as large.
    pub(super) fn seed_order(&self) -> Result<SeedOrder> {
        let (seed, shuffle, drop_last, rank) = match self.order {
            LoaderOrder::Planned { seed, shuffle, drop_last, rank, .. } => (seed, shuffle, drop_last, rank),
            LoaderOrder::Given { .. } => (0, true, false, Rank::ALONE),
        };
        let batching = Batching::new(self.seeds.len(), self.batch, drop_last)?;
        let order: Arc<dyn Order> = match shuffle {
            true => Arc::new(Shuffled { batching, seed }),
            false => Arc::new(Sequential(batching)),
        };
        Ok(SeedOrder { order, rank, even: drop_last, seeds: self.seeds.clone() })
    }

    /// The order of an epoch's batches that are given. Fails if one is larger than the loader was opened for.
    pub(super) fn given_order(&self, batches: Vec<Vec<u64>>) -> Result<SeedOrder> {
        let largest = batches.iter().map(Vec::len).max().unwrap_or(0) as u64;
        if largest > self.batch {
            return Err(TrainError::LargeGivenBatch { seeds: largest, most: self.batch });
        }
        let order = Arc::new(GivenOrder(batches));
        Ok(SeedOrder { order, rank: Rank::ALONE, even: false, seeds: self.seeds.clone() })
    }
}

/// An order of seeds, and which of its batches this process has.
#[derive(Clone)]
pub(super) struct SeedOrder {
    order: Arc<dyn Order>,
    rank: Rank,
    even: bool,
    seeds: Arc<Seeds>,
}

impl SeedOrder {
    /// The batches.
    pub fn batches(&self) -> Result<Arc<dyn Batches>> {
        let all: Arc<dyn Batches> = Arc::new(NodeBatches::new(self.order.clone(), self.seeds.clone())?);
        Ok(match self.rank {
            Rank { world_size: 1, .. } => all,
            rank => Arc::new(RankBatches::new(all, rank, self.even)),
        })
    }

    /// The seeds of a batch, as indices of all.
    pub fn items(&self, at: Position) -> Result<Vec<u64>> {
        let mut items = Vec::new();
        let batch = at.batch * self.rank.world_size + self.rank.rank;
        self.order.items(at.epoch, batch, &mut items)?;
        Ok(items)
    }
}
