//! The batches of one rank among several: processes that train together take turns in the batches of an epoch. Every
//! batch has the seeds and draws that it has for one process, so the ranks together have exactly its batches, and each
//! rank plans and packs only its own.

use crate::order::{BatchGroup, BatchStep};
use crate::topology::Edge;
use crate::{Batches, Position, Result, SampleError, Targets};
use esker_types::NodeId;
use std::sync::Arc;

/// A process among several that train together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Rank {
    /// Its number, from 0.
    pub rank: u64,
    /// How many there are.
    pub world_size: u64,
}

impl Rank {
    /// The only process.
    pub const ALONE: Rank = Rank { rank: 0, world_size: 1 };

    /// Number `rank` of `world_size` processes. Fails if there is no such process.
    pub fn new(rank: u64, world_size: u64) -> Result<Rank> {
        match rank < world_size {
            true => Ok(Rank { rank, world_size }),
            false => Err(SampleError::Rank { rank, world_size }),
        }
    }
}

/// The batches of a rank: every `world_size`-th of an epoch, from number `rank` on.
pub struct RankBatches {
    all: Arc<dyn Batches>,
    rank: Rank,
    /// Whether every rank has as many batches as the others: the last few are left out.
    even: bool,
}

impl RankBatches {
    /// The batches of `rank` among `all`. `even` leaves out the last batches of an epoch that not every rank has.
    pub fn new(all: Arc<dyn Batches>, rank: Rank, even: bool) -> RankBatches {
        RankBatches { all, rank, even }
    }

    fn among_all(&self, at: Position) -> Position {
        Position { epoch: at.epoch, batch: at.batch * self.rank.world_size + self.rank.rank }
    }
}

impl Batches for RankBatches {
    fn count(&self, epoch: u64) -> u64 {
        let all = self.all.count(epoch);
        match self.even {
            true => all / self.rank.world_size,
            false => all.saturating_sub(self.rank.rank).div_ceil(self.rank.world_size),
        }
    }

    fn seeds(&self, at: Position, out: &mut Vec<NodeId>) -> Result<()> {
        self.all.seeds(self.among_all(at), out)
    }

    fn targets(&self, at: Position) -> Result<Targets> {
        self.all.targets(self.among_all(at))
    }

    fn dropped(&self, at: Position, out: &mut Vec<Edge>) -> Result<()> {
        self.all.dropped(self.among_all(at), out)
    }

    fn drawn_at(&self, at: Position) -> Position {
        self.all.drawn_at(self.among_all(at))
    }

    fn group(&self, at: Position) -> Option<BatchGroup> {
        self.all.group(self.among_all(at))
    }

    fn step(&self, at: Position) -> Option<BatchStep> {
        self.all.step(self.among_all(at))
    }

    fn identity(&self) -> String {
        let (Rank { rank, world_size }, even) = (self.rank, if self.even { " even" } else { "" });
        match world_size {
            1 => self.all.identity(),
            _ => format!("{} rank:{rank}/{world_size}{even}", self.all.identity()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::order::{Batching, Shuffled};
    use crate::{Carry, Fanout, Form, InMemory, NodeBatches, Sample, Sampler, Seeds, Settings};

    fn batches(count: u64) -> Arc<dyn Batches> {
        let batching = Batching::new(count, 3, false).unwrap();
        Arc::new(NodeBatches::new(Shuffled { batching, seed: 5 }, Seeds::AllNodes(count)).unwrap())
    }

    #[test]
    fn ranks_divide_an_epoch_and_sample_what_one_process_does() {
        let lists: Vec<Vec<u64>> =
            (0..40).map(|node| (0..12).map(|at| (node + at * 3) % 40).collect()).collect();
        let graph = InMemory::<u32>::from_adjacency(&lists, None);
        let settings = Settings {
            seed: 3,
            fanouts: vec![Fanout::AtMost(4), Fanout::AtMost(2)],
            form: Form::Dense,
            carry: Carry::default(),
        };
        let mut sampler = Sampler::new(&graph, settings, 1 << 30).unwrap();
        let (mut seeds, mut sample) = (Vec::new(), Sample::default());
        let mut sampled = |of: &dyn Batches, batch: u64| {
            let at = Position { epoch: 2, batch };
            of.seeds(at, &mut seeds).unwrap();
            sampler.begin(of, at).unwrap();
            sampler.sample(at, &seeds, &mut sample).unwrap();
            sample.clone()
        };
        let all = batches(40);
        for world_size in [1, 2, 3, 20] {
            let mut found = vec![None; all.count(2) as usize];
            for rank in 0..world_size {
                let mine = RankBatches::new(all.clone(), Rank::new(rank, world_size).unwrap(), false);
                for batch in 0..mine.count(2) {
                    let slot = &mut found[(batch * world_size + rank) as usize];
                    assert!(slot.replace(sampled(&mine, batch)).is_none());
                }
            }
            for (batch, found) in found.into_iter().enumerate() {
                assert_eq!(found.unwrap(), sampled(&all, batch as u64));
            }
        }
    }

    #[test]
    fn even_ranks_have_equal_numbers_of_batches() {
        // Fourteen batches.
        let count = |rank, even| RankBatches::new(batches(40), Rank { rank, world_size: 4 }, even).count(0);
        assert_eq!((0..4).map(|rank| count(rank, false)).collect::<Vec<_>>(), [4, 4, 3, 3]);
        assert!((0..4).all(|rank| count(rank, true) == 3));
    }

    #[test]
    fn ranks_have_identities_of_their_own() {
        let of = |rank, world_size, even| {
            RankBatches::new(batches(40), Rank { rank, world_size }, even).identity()
        };
        assert_eq!(of(0, 1, false), batches(40).identity());
        assert_ne!(of(0, 2, false), of(1, 2, false));
        assert_ne!(of(0, 2, false), of(0, 2, true));
        assert!(Rank::new(2, 2).is_err());
    }
}
