//! Which partitions are resident when, and what is trained then (Marius++ section 5). All orders are functions of (seed,
//! epoch).
//!
//! An epoch groups the partitions (the *physical* ones, equal and fixed) at random into *logical* ones. A walk says which
//! logical partitions are resident in which step: see `beta.rs`, `tour.rs` and `dispersed.rs`, one order each. Then every
//! edge bucket, or the training nodes of every partition, go to a step in which they are resident: see `assign.rs`.
//! `bias.rs` says how uneven the result is, `tuning.rs` chooses the numbers of partitions.

mod assign;
mod beta;
mod bias;
mod dispersed;
#[cfg(test)]
mod tests;
mod tour;
mod tuning;

pub use bias::edge_permutation_bias;
pub use tuning::{BufferBytes, BufferRequest, BufferTooSmall, EpochCost, Tuning};

use assign::{Residency, greedy_step, random_step};
use esker_types::random::{Key, below};
use esker_types::{EdgeBucket, PartitionId, PartitionStep, PartitionSteps, PartitionSwap, StepWork};
use std::fmt;

/// First word of the key of an epoch's steps.
const PURPOSE_STEPS: u64 = 0x0073_7465_7073;

/// How partitions take turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PartitionOrderKind {
    /// Every pair of partitions meets, with few swaps; a bucket is trained when its partitions first meet (Marius).
    Beta,
    /// BETA over logical partitions; a bucket is trained at random in one of the steps that have it (Marius++).
    TwoLevelBeta,
    /// All pairs of logical partitions along Hamiltonian cycles; buckets as in two-level BETA.
    Tour,
    /// Every logical partition enters once, in place of a random one. For training nodes.
    Dispersed,
    /// The first partitions, which have all training nodes, are resident; others are chosen at random in each epoch. For
    /// training nodes.
    TrainingFirst,
}

impl PartitionOrderKind {
    /// All of them.
    pub const ALL: [PartitionOrderKind; 5] = [
        PartitionOrderKind::Beta,
        PartitionOrderKind::TwoLevelBeta,
        PartitionOrderKind::Tour,
        PartitionOrderKind::Dispersed,
        PartitionOrderKind::TrainingFirst,
    ];

    /// Whether edges are trained on, bucket by bucket; else training nodes, partition by partition.
    pub fn trains_edges(self) -> bool {
        matches!(self, PartitionOrderKind::Beta | PartitionOrderKind::TwoLevelBeta | PartitionOrderKind::Tour)
    }
}

impl fmt::Display for PartitionOrderKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PartitionOrderKind::Beta => "beta",
            PartitionOrderKind::TwoLevelBeta => "two-level-beta",
            PartitionOrderKind::Tour => "tour",
            PartitionOrderKind::Dispersed => "dispersed",
            PartitionOrderKind::TrainingFirst => "training-first",
        })
    }
}

/// Numbers of partitions that do not go together.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PartitionOrderError {
    /// No partitions.
    #[error("0 {what} are asked for; give at least 1")]
    None {
        /// What there are none of.
        what: &'static str,
    },
    /// More than there are.
    #[error("{found} {what} of {partitions} partitions are asked for; give at most {partitions}")]
    TooMany {
        /// What there are too many of.
        what: &'static str,
        /// How many.
        found: u32,
        /// Number of partitions.
        partitions: u32,
    },
    /// Logical partitions of different sizes.
    #[error(
        "{partitions} partitions do not make {logical} equal logical partitions; make --partitions a multiple of --logical"
    )]
    UnequalLogical {
        /// Number of partitions.
        partitions: u32,
        /// Number of logical partitions.
        logical: u32,
    },
    /// A part of a logical partition would be resident.
    #[error(
        "{resident} resident partitions are not a whole number of logical partitions of {each} partitions each; make --resident a multiple of {each}, or change --logical"
    )]
    PartlyResident {
        /// Number of resident partitions.
        resident: u32,
        /// Partitions in a logical partition.
        each: u32,
    },
    /// Pairs of partitions cannot meet.
    #[error(
        "order {kind} brings pairs of logical partitions together, and only one is resident; give --resident {} or more, or more --logical partitions",
        2 * each
    )]
    OneResident {
        /// The order.
        kind: PartitionOrderKind,
        /// Partitions in a logical partition.
        each: u32,
    },
    /// BETA has one level.
    #[error(
        "order beta has no logical partitions, and --logical is {logical} of {partitions} partitions; leave --logical out, or use --order two-level-beta"
    )]
    BetaHasOneLevel {
        /// Number of partitions.
        partitions: u32,
        /// Number of logical partitions.
        logical: u32,
    },
    /// A tour needs two resident logical partitions.
    #[error(
        "order tour keeps 2 of {logical} logical partitions resident, {} partitions, and --resident is {resident}; give --resident {}",
        2 * each, 2 * each
    )]
    TourResident {
        /// Number of logical partitions.
        logical: u32,
        /// Partitions in a logical partition.
        each: u32,
        /// Number of resident partitions.
        resident: u32,
    },
    /// A tour needs an odd number of logical partitions.
    #[error(
        "order tour needs an odd number of logical partitions, found {logical}; give --logical {} or {}, and --partitions and --resident to match, or use --order two-level-beta",
        logical.saturating_sub(1), logical + 1
    )]
    EvenTour {
        /// Number of logical partitions.
        logical: u32,
    },
    /// No room beside the partitions with training nodes.
    #[error(
        "training nodes fill {training} partitions and {resident} are resident; give a larger --resident, or use --order dispersed"
    )]
    TrainingResident {
        /// Partitions with training nodes.
        training: u32,
        /// Number of resident partitions.
        resident: u32,
    },
}

/// How many partitions there are, how many are resident, and into how many logical ones they are grouped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct PartitionCounts {
    /// Partitions: the paper's p.
    pub partitions: u32,
    /// Resident ones: its c.
    pub resident: u32,
    /// Logical partitions: its l.
    pub logical: u32,
}

impl PartitionCounts {
    /// The counts of a kind of order where logical partitions are not given: 1 if all partitions are resident, as many as
    /// partitions for BETA and training nodes first, 2 p / c where pairs meet, p / c else.
    pub fn of(
        kind: PartitionOrderKind,
        partitions: u32,
        resident: u32,
        logical: Option<u32>,
    ) -> PartitionCounts {
        let logical = logical.unwrap_or(match kind {
            _ if resident >= partitions => 1,
            PartitionOrderKind::Beta | PartitionOrderKind::TrainingFirst => partitions,
            PartitionOrderKind::TwoLevelBeta | PartitionOrderKind::Tour => {
                (2 * partitions as u64 / resident.max(1) as u64).min(u32::MAX as u64) as u32
            }
            PartitionOrderKind::Dispersed => partitions / resident.max(1),
        });
        PartitionCounts { partitions, resident, logical }
    }

    /// Partitions in a logical partition.
    pub fn each(&self) -> u32 {
        self.partitions / self.logical
    }

    /// Logical partitions that are resident at a time.
    pub fn logical_resident(&self) -> u32 {
        self.resident / self.each()
    }

    fn check(&self, kind: PartitionOrderKind) -> Result<(), PartitionOrderError> {
        let PartitionCounts { partitions, resident, logical } = *self;
        let counts =
            [("partitions", partitions), ("resident partitions", resident), ("logical partitions", logical)];
        for (what, found) in counts {
            if found == 0 {
                return Err(PartitionOrderError::None { what });
            }
            if found > partitions {
                return Err(PartitionOrderError::TooMany { what, found, partitions });
            }
        }
        if !partitions.is_multiple_of(logical) {
            return Err(PartitionOrderError::UnequalLogical { partitions, logical });
        }
        let each = self.each();
        if !resident.is_multiple_of(each) {
            return Err(PartitionOrderError::PartlyResident { resident, each });
        }
        let all = resident == partitions;
        match kind {
            PartitionOrderKind::Beta if !all && logical != partitions => {
                Err(PartitionOrderError::BetaHasOneLevel { partitions, logical })
            }
            PartitionOrderKind::Tour if !all && logical.is_multiple_of(2) => {
                Err(PartitionOrderError::EvenTour { logical })
            }
            PartitionOrderKind::Tour if logical > 1 && resident != 2 * each => {
                Err(PartitionOrderError::TourResident { logical, each, resident })
            }
            _ if kind.trains_edges() && !all && resident == each => {
                Err(PartitionOrderError::OneResident { kind, each })
            }
            _ => Ok(()),
        }
    }
}

/// An order over partitions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartitionOrder {
    kind: PartitionOrderKind,
    counts: PartitionCounts,
    seed: u64,
    /// The first partitions, which have all training nodes.
    training: u32,
}

impl PartitionOrder {
    /// An order of these counts. `training` is the number of first partitions that have all training nodes; only
    /// training nodes first uses it. Fails if the counts do not go together.
    pub fn new(
        kind: PartitionOrderKind,
        counts: PartitionCounts,
        training: u32,
        seed: u64,
    ) -> Result<PartitionOrder, PartitionOrderError> {
        counts.check(kind)?;
        let PartitionCounts { partitions, resident, .. } = counts;
        let fits = training < resident || resident == partitions;
        if kind == PartitionOrderKind::TrainingFirst && !fits {
            return Err(PartitionOrderError::TrainingResident { training, resident });
        }
        Ok(PartitionOrder { kind, counts, seed, training })
    }

    /// How partitions take turns.
    pub fn kind(&self) -> PartitionOrderKind {
        self.kind
    }

    /// How many partitions there are, are resident, and are grouped.
    pub fn counts(&self) -> PartitionCounts {
        self.counts
    }

    /// Swaps of single partitions within an epoch.
    pub fn swaps(&self) -> u64 {
        self.logical_swaps().saturating_mul(self.counts.each() as u64)
    }

    /// Swaps of logical partitions within an epoch, without walking.
    fn logical_swaps(&self) -> u64 {
        let (logical, resident) = (self.counts.logical as u64, self.counts.logical_resident() as u64);
        match self.kind {
            PartitionOrderKind::TrainingFirst => 0,
            _ if resident >= logical => 0,
            PartitionOrderKind::Beta | PartitionOrderKind::TwoLevelBeta => beta::swaps(logical, resident),
            PartitionOrderKind::Tour => tour::swaps(logical),
            PartitionOrderKind::Dispersed => logical - resident,
        }
    }

    fn walk(&self, key: Key) -> Walk {
        let (logical, resident) = (self.counts.logical, self.counts.logical_resident());
        let mut random = Shuffler { key, next: 0 };
        match self.kind {
            _ if resident == logical => Walk { first: random.permutation(logical), swaps: Vec::new() },
            PartitionOrderKind::Beta | PartitionOrderKind::TwoLevelBeta => {
                beta::walk(logical, resident, &mut random)
            }
            PartitionOrderKind::Tour => tour::walk(logical, &mut random),
            PartitionOrderKind::Dispersed | PartitionOrderKind::TrainingFirst => {
                dispersed::walk(logical, resident, &mut random)
            }
        }
    }

    /// Gives every bucket, or every partition, to a step. `groups` has the partitions, logical one after the other.
    fn assign(&self, groups: &[u32], residency: &Residency, key: Key, steps: &mut [PartitionStep]) {
        let partitions = self.counts.partitions;
        let mut logical_of = vec![0; groups.len()];
        for (at, partition) in (0..).zip(groups) {
            logical_of[*partition as usize] = at / self.counts.each();
        }
        for source in 0..partitions {
            let key = key.with(source as u64);
            let own = logical_of[source as usize];
            if !self.kind.trains_edges() {
                let step = random_step(&residency.of_one(own), key);
                if let StepWork::Partitions(trained) = &mut steps[step].work {
                    trained.push(PartitionId(source));
                }
                continue;
            }
            for target in 0..partitions {
                let together = residency.of_pair(own, logical_of[target as usize]);
                let step = match self.kind {
                    PartitionOrderKind::Beta => greedy_step(&together),
                    _ => random_step(&together, key.with(target as u64)),
                };
                if let StepWork::Buckets(trained) = &mut steps[step].work {
                    trained.push(EdgeBucket { source: PartitionId(source), target: PartitionId(target) });
                }
            }
        }
    }
}

impl PartitionSteps for PartitionOrder {
    fn partitions(&self) -> u32 {
        self.counts.partitions
    }

    fn trains_edges(&self) -> bool {
        self.kind.trains_edges()
    }

    fn step_count(&self) -> u64 {
        self.logical_swaps() + 1
    }

    fn steps(&self, epoch: u64) -> Vec<PartitionStep> {
        let key = Key::new(self.seed).with(PURPOSE_STEPS).with(epoch);
        if self.kind == PartitionOrderKind::TrainingFirst {
            return vec![dispersed::training_first(&self.counts, self.training, key.with(0))];
        }
        let groups = shuffled(self.counts.partitions, key.with(0));
        let walk = self.walk(key.with(1));
        let residency = Residency::of(&walk, self.counts.logical);
        let mut steps = expanded(&walk, &groups, self.counts.each() as usize, self.kind.trains_edges());
        self.assign(&groups, &residency, key.with(2), &mut steps);
        steps
    }

    fn identity(&self) -> String {
        let PartitionCounts { partitions, resident, logical } = self.counts;
        let training = match self.kind {
            PartitionOrderKind::TrainingFirst => format!(",training={}", self.training),
            _ => String::new(),
        };
        format!("{}(p={partitions},c={resident},l={logical},seed={}{training})", self.kind, self.seed)
    }
}

/// Logical partitions step by step: the first ones by slot, and one swap for each further step.
#[derive(Debug)]
struct Walk {
    first: Vec<u32>,
    swaps: Vec<LogicalSwap>,
}

/// A logical partition that enters a slot.
#[derive(Debug, Clone, Copy)]
struct LogicalSwap {
    slot: u32,
    enters: u32,
}

/// The steps of a walk, without work. A logical partition at slot s has the slots from s * `each`.
fn expanded(walk: &Walk, groups: &[u32], each: usize, trains_edges: bool) -> Vec<PartitionStep> {
    let members = |logical: u32| groups[logical as usize * each..][..each].iter().copied().map(PartitionId);
    let work = || if trains_edges { StepWork::Buckets(Vec::new()) } else { StepWork::Partitions(Vec::new()) };
    let mut resident: Vec<PartitionId> = walk.first.iter().flat_map(|logical| members(*logical)).collect();
    let mut steps = vec![PartitionStep { resident: resident.clone(), swaps: Vec::new(), work: work() }];
    for swap in &walk.swaps {
        let slots = swap.slot as usize * each..(swap.slot as usize + 1) * each;
        let swaps = slots
            .zip(members(swap.enters))
            .map(|(slot, enters)| {
                let leaves = std::mem::replace(&mut resident[slot], enters);
                PartitionSwap { slot: slot as u32, leaves, enters }
            })
            .collect();
        steps.push(PartitionStep { resident: resident.clone(), swaps, work: work() });
    }
    steps
}

/// Random choices from one key, one after the other.
struct Shuffler {
    key: Key,
    next: u64,
}

impl Shuffler {
    /// A number below `bound`.
    fn below(&mut self, bound: u64) -> u64 {
        self.next += 1;
        below(self.key.at(self.next - 1), bound)
    }

    /// Fisher and Yates. (`Permutation` is for counts that a table is too large for; of few items it knows few orders.)
    fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last as u64 + 1) as usize);
        }
    }

    fn permutation(&mut self, count: u32) -> Vec<u32> {
        let mut items: Vec<u32> = (0..count).collect();
        self.shuffle(&mut items);
        items
    }
}

fn shuffled(count: u32, key: Key) -> Vec<u32> {
    Shuffler { key, next: 0 }.permutation(count)
}
