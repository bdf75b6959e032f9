//! What pulls save. Some batches are sampled once more without pulls, ahead of training: what they would request and
//! compute. The batch that is trained on then tells the difference.

use esker_sample::{Position, Sample};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// One batch of so many is compared: sampling it twice costs little then.
const EVERY: u64 = 16;
/// The first one of an epoch: not the first batch, which pulls nothing in the first epoch.
const FIRST: u64 = 3;

/// The work of batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct WorkCounts {
    /// Feature rows.
    pub rows: u64,
    /// Sampled neighbours.
    pub edges: u64,
    /// Rows that layers compute.
    pub computed: u64,
}

/// The work of some batches, with pulls and without.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct SavedWork {
    /// Number of batches.
    pub batches: u64,
    /// As trained on.
    pub with: WorkCounts,
    /// The same batches without pulls.
    pub without: WorkCounts,
}

impl WorkCounts {
    pub(super) fn of(sample: &Sample) -> WorkCounts {
        let computed = (0..sample.layers()).map(|layer| sample.layer(layer).outputs.len() as u64).sum();
        WorkCounts { rows: sample.node_ids.len() as u64, edges: sample.edge_count(), computed }
    }

    fn add(&mut self, other: WorkCounts) {
        self.rows += other.rows;
        self.edges += other.edges;
        self.computed += other.computed;
    }

    fn since(&self, before: &WorkCounts) -> WorkCounts {
        WorkCounts {
            rows: self.rows - before.rows,
            edges: self.edges - before.edges,
            computed: self.computed - before.computed,
        }
    }
}

impl SavedWork {
    /// What was counted after an earlier moment.
    pub fn since(&self, before: &SavedWork) -> SavedWork {
        SavedWork {
            batches: self.batches - before.batches,
            with: self.with.since(&before.with),
            without: self.without.since(&before.without),
        }
    }
}

/// The work without pulls of batches that are yet to be trained on. Clones share it.
#[derive(Clone, Default)]
pub(crate) struct BatchWork(Arc<Mutex<BTreeMap<Position, WorkCounts>>>);

impl BatchWork {
    /// Whether a batch is compared.
    pub fn is_compared(at: Position) -> bool {
        at.batch % EVERY == FIRST
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Position, WorkCounts>> {
        // Every change leaves it consistent.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A batch, sampled without pulls.
    pub fn put(&self, at: Position, sample: &Sample) {
        self.lock().insert(at, WorkCounts::of(sample));
    }

    /// Compares a batch that is trained on now, if it was sampled without pulls. Forgets those before it.
    pub fn compare(&self, at: Position, sample: &Sample, saved: &mut SavedWork) {
        let mut all = self.lock();
        let later = all.split_off(&at);
        *all = later;
        if let Some(without) = all.remove(&at) {
            saved.batches += 1;
            saved.with.add(WorkCounts::of(sample));
            saved.without.add(without);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use esker_sample::{Carry, Fanout, Form, InMemory, Sampler, Settings};
    use esker_types::NodeId;

    #[test]
    fn a_batch_is_compared_once_and_those_before_it_are_forgotten() {
        // 0 <- 1 <- 2 <- 3.
        let graph = InMemory::<u32>::from_adjacency(&[vec![1], vec![2], vec![3], vec![]], None);
        let fanouts = vec![Fanout::AtMost(2); 3];
        let settings = Settings { seed: 1, fanouts, form: Form::Dense, carry: Carry::default() };
        let mut sampler = Sampler::new(&graph, settings, 1 << 20).unwrap();
        let (at, mut sample, work) =
            (|batch| Position { epoch: 0, batch }, Sample::default(), BatchWork::default());
        let (mut saved, seeds) = (SavedWork::default(), [NodeId(0)]);
        sampler.sample(at(16), &seeds, &mut sample).unwrap();
        work.put(at(0), &sample);
        work.put(at(16), &sample);
        sampler.sample_with_pulls(at(16), &seeds, &mut |hop, _, _| hop == 1, &mut sample).unwrap();
        work.compare(at(16), &sample, &mut saved);
        // Node 1 is computed by the first layer alone, and node 3 is needed by none.
        let without = WorkCounts { rows: 4, edges: 3, computed: 3 + 2 + 1 };
        let with = WorkCounts { rows: 3, edges: 2, computed: 2 + 1 + 1 };
        assert_eq!(saved, SavedWork { batches: 1, with, without });
        work.compare(at(16), &sample, &mut saved);
        work.compare(at(0), &sample, &mut saved);
        assert_eq!((saved.batches, work.lock().len()), (1, 0));
        assert_eq!(saved.since(&saved), SavedWork::default());
    }
}
