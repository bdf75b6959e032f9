//! Nodes cut into blocks by the number of rows they read.

use super::CHUNK;
use crate::Result;
use esker_sample::{Batches, Direction, Position, SampleError};
use esker_store::{Dataset, Elements, file};
use esker_types::NodeId;
use std::sync::Arc;

/// Nodes in order, cut into blocks of at most a given number of rows. Each neighbour counts as one row.
pub(super) struct NodeBlocks {
    /// The nodes. `None` for all nodes.
    nodes: Option<Arc<Vec<NodeId>>>,
    /// Block `b` has the nodes at positions `starts[b]..starts[b + 1]`.
    starts: Vec<u64>,
}

impl NodeBlocks {
    /// Blocks without nodes.
    pub fn none() -> NodeBlocks {
        NodeBlocks { nodes: None, starts: vec![0] }
    }

    pub fn cut(
        dataset: &Dataset,
        direction: Direction,
        nodes: Option<&Arc<Vec<NodeId>>>,
        hops: bool,
        limit: u64,
    ) -> Result<NodeBlocks> {
        let count = nodes.map_or(dataset.manifest().nodes.count, |nodes| nodes.len() as u64);
        let mut degrees = Degrees::open(dataset, if hops { Some(direction) } else { None })?;
        let (mut starts, mut rows) = (vec![0], 0);
        for place in 0..count {
            let node = nodes.map_or(place, |nodes| nodes[place as usize].0);
            let more = 1 + degrees.of(node)?;
            if rows + more > limit && rows > 0 {
                starts.push(place);
                rows = 0;
            }
            rows += more;
        }
        if count > 0 {
            starts.push(count);
        }
        Ok(NodeBlocks { nodes: nodes.cloned(), starts })
    }
}

impl Batches for NodeBlocks {
    fn count(&self, _: u64) -> u64 {
        self.starts.len() as u64 - 1
    }

    fn seeds(&self, at: Position, out: &mut Vec<NodeId>) -> Result<(), SampleError> {
        out.clear();
        let bounds = self.starts.get(at.batch as usize).zip(self.starts.get(at.batch as usize + 1));
        let (start, end) = bounds.map_or((0, 0), |(start, end)| (*start, *end));
        match &self.nodes {
            Some(nodes) => out.extend_from_slice(&nodes[start as usize..end as usize]),
            None => out.extend((start..end).map(NodeId)),
        }
        Ok(())
    }

    fn identity(&self) -> String {
        format!("{} blocks", self.starts.len() - 1)
    }
}

/// Streams the degrees of ascending nodes.
pub(super) struct Degrees {
    lists: Vec<Offsets>,
}

struct Offsets {
    elements: Elements,
    chunk: Vec<u64>,
    /// Index of the chunk's first offset, and the number of offsets.
    first: u64,
    count: usize,
}

impl Degrees {
    pub fn open(dataset: &Dataset, direction: Option<Direction>) -> Result<Degrees> {
        let names: &[&str] = match direction {
            None => &[],
            Some(Direction::Incoming) => &[file::IN_OFFSETS],
            Some(Direction::Outgoing) => &[file::OUT_OFFSETS],
            Some(Direction::Both) => &[file::IN_OFFSETS, file::OUT_OFFSETS],
        };
        let mut lists = Vec::new();
        for name in names {
            let array = dataset.array(name).ok_or_else(|| SampleError::NoAdjacency {
                dataset: dataset.directory().to_path_buf(),
                array: name.to_string(),
            })?;
            lists.push(Offsets { elements: array.elements(0)?, chunk: vec![0; CHUNK], first: 0, count: 0 });
        }
        Ok(Degrees { lists })
    }

    pub fn of(&mut self, node: u64) -> Result<u64> {
        let mut sum = 0;
        for list in &mut self.lists {
            let start = list.at(node)?;
            sum += list.at(node + 1)?.saturating_sub(start);
        }
        Ok(sum)
    }
}

impl Offsets {
    /// Offset `index`. Indices never fall by more than one.
    fn at(&mut self, index: u64) -> Result<u64> {
        while index >= self.first + self.count as u64 {
            // Keep the last offset: it is where the next node's neighbours start.
            let kept = self.count.min(1);
            if kept == 1 {
                self.chunk[0] = self.chunk[self.count - 1];
            }
            self.first += (self.count - kept) as u64;
            let more = self.elements.fill_ids(&mut self.chunk[kept..])?;
            self.count = kept + more;
            if more == 0 {
                return Ok(self.chunk[kept.saturating_sub(1)]);
            }
        }
        Ok(self.chunk[(index - self.first) as usize])
    }
}
