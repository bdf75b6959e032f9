//! The result of sampling: one type for every form, with one view per layer.

use crate::memory::held;
use esker_types::{EdgeId, LocalIndex, NodeId};
use std::fmt;
use std::ops::Range;
use xxhash_rust::xxh3::Xxh3;

/// How neighbourhoods are sampled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Form {
    /// Each node's neighbours are sampled once and used by every layer (Marius++ section 4).
    Dense,
    /// Each layer samples again for all its nodes, as DGL does.
    Layered,
    /// All edges between the nodes that DENSE would sample, used by every layer.
    Shadow,
}

impl fmt::Display for Form {
    /// As `--form` takes it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Form::Dense => "dense",
            Form::Layered => "layered",
            Form::Shadow => "shadow",
        })
    }
}

/// Sampled neighbours of the nodes from local index `first` to the last.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Block {
    /// Local index of the first node in this block.
    pub first: u32,
    /// Node `first + i` has the entries `nbr_offsets[i]..nbr_offsets[i + 1]` of the arrays below.
    pub nbr_offsets: Vec<u32>,
    /// The neighbours.
    pub nbrs: Vec<LocalIndex>,
    /// Position of each neighbour in the node's stored adjacency, ascending within a node. Empty unless the settings
    /// carry them.
    pub positions: Vec<u32>,
    /// The edge ids. Empty unless the settings carry them.
    pub edges: Vec<EdgeId>,
    /// The relations of the edges. Empty unless the settings carry them.
    pub relations: Vec<u32>,
}

impl Block {
    /// Bytes of its arrays.
    pub fn bytes(&self) -> u64 {
        let words = self.nbr_offsets.len() + self.nbrs.len() + self.positions.len() + self.relations.len();
        (words * 4 + self.edges.len() * 8) as u64
    }

    fn allocated_bytes(&self) -> u64 {
        let words = held(&self.nbr_offsets) + held(&self.nbrs) + held(&self.positions);
        words + held(&self.edges) + held(&self.relations)
    }

    pub(crate) fn clear(&mut self) {
        self.first = 0;
        self.nbr_offsets.clear();
        self.nbrs.clear();
        self.positions.clear();
        self.edges.clear();
        self.relations.clear();
    }
}

/// A sampled neighbourhood. Two samples are equal if all their arrays are. The next batch reuses its buffers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sample {
    /// How it was sampled.
    pub form: Form,
    /// Every node once: the deepest hop first, targets last. Within a hop, in order of first appearance in `nbrs`. Nodes
    /// of hop `h` have level `L - h`: their values are computed up to the one that leaves layer `L - h - 1`. A node that is
    /// pulled at hop `h` is computed as far as one of hop `h + 1`, so it counts as one.
    pub node_ids: Vec<NodeId>,
    /// Hop `h` of `L` is nodes `node_id_offsets[L - h]..node_id_offsets[L - h + 1]`. It has L + 2 entries, from 0.
    pub node_id_offsets: Vec<u32>,
    /// One block for DENSE and ShaDow; one per layer for the layered form, in the order of computation.
    pub blocks: Vec<Block>,
    /// The local index of each seed node, in the given order. Seed nodes may repeat, targets do not.
    pub seeds: Vec<LocalIndex>,
    /// Degrees in the whole topology, for a suffix of `node_ids`: all nodes if the settings carry degrees, else the
    /// nodes of the blocks.
    pub degrees: Vec<u32>,
    /// How many nodes are pulled, by the hop in which they are met, from hop 1 on, without zeros at the end: what enters
    /// layer `L - h` for them is supplied, not computed. They are the last nodes of the hop after, see
    /// [`Sample::pulled_nodes`].
    pub pulled: Vec<u32>,
}

/// One layer reads the rows of `inputs` and computes the rows of `outputs`. Both are suffixes of the node ids.
#[derive(Debug, Clone)]
pub struct LayerView<'a> {
    /// Nodes whose rows are read.
    pub inputs: Range<u32>,
    /// Nodes whose rows are written: those of `nbr_offsets`.
    pub outputs: Range<u32>,
    /// Output `i` has the neighbours `nbrs[nbr_offsets[i]..nbr_offsets[i + 1]]`.
    pub nbr_offsets: &'a [u32],
    /// Neighbours as indices into the whole of `node_ids`. `nbr_offsets` index this array.
    pub nbrs: &'a [LocalIndex],
    /// Degrees of the outputs in the whole topology.
    pub degrees: &'a [u32],
    /// Degrees of the inputs; empty unless the settings carry degrees.
    pub input_degrees: &'a [u32],
    /// Relations of the edges, if carried.
    pub relations: &'a [u32],
}

impl Default for Sample {
    fn default() -> Sample {
        Sample {
            form: Form::Dense,
            node_ids: Vec::new(),
            node_id_offsets: vec![0, 0],
            blocks: Vec::new(),
            seeds: Vec::new(),
            degrees: Vec::new(),
            pulled: Vec::new(),
        }
    }
}

impl Sample {
    /// Number of layers.
    pub fn layers(&self) -> usize {
        self.node_id_offsets.len() - 2
    }

    /// The nodes whose representation is requested: the last ones.
    pub fn targets(&self) -> &[NodeId] {
        &self.node_ids[self.node_id_offsets[self.layers()] as usize..]
    }

    /// How many nodes are pulled at a hop.
    pub fn pulled_at(&self, hop: usize) -> u32 {
        hop.checked_sub(1).and_then(|index| self.pulled.get(index)).copied().unwrap_or(0)
    }

    /// Whether any node is pulled.
    pub fn has_pulled(&self) -> bool {
        !self.pulled.is_empty()
    }

    /// The local indices of nodes that are pulled at a hop, which is at most the number of layers. They end where the
    /// nodes begin that layer `L - hop` reads as computed.
    pub fn pulled_nodes(&self, hop: usize) -> Range<u32> {
        let end = self.node_id_offsets[self.layers() - hop];
        end - self.pulled_at(hop)..end
    }

    /// Neighbours in all blocks.
    pub fn edge_count(&self) -> u64 {
        self.blocks.iter().map(|block| block.nbrs.len() as u64).sum()
    }

    /// Bytes of its arrays.
    pub fn bytes(&self) -> u64 {
        let blocks: u64 = self.blocks.iter().map(Block::bytes).sum();
        let words =
            self.node_ids.len() * 2 + self.node_id_offsets.len() + self.seeds.len() + self.degrees.len();
        blocks + words as u64 * 4
    }

    /// Allocated bytes, including room for later batches.
    pub fn allocated_bytes(&self) -> u64 {
        let blocks: u64 = self.blocks.iter().map(Block::allocated_bytes).sum();
        let words =
            held(&self.node_ids) + held(&self.node_id_offsets) + held(&self.seeds) + held(&self.degrees);
        blocks + words + held(&self.pulled)
    }

    /// A hash of form, lengths and contents of every array. Equal samples have equal digests.
    pub fn digest(&self) -> u64 {
        let mut hash = Xxh3::new();
        let mut array = |numbers: &mut dyn ExactSizeIterator<Item = u64>| {
            hash.update(&(numbers.len() as u64).to_le_bytes());
            numbers.for_each(|number| hash.update(&number.to_le_bytes()));
        };
        array(&mut [self.form as u64, self.blocks.len() as u64].into_iter());
        array(&mut self.node_ids.iter().map(|node| node.0));
        array(&mut self.node_id_offsets.iter().map(|offset| *offset as u64));
        array(&mut self.seeds.iter().map(|seed| seed.0 as u64));
        array(&mut self.degrees.iter().map(|degree| *degree as u64));
        array(&mut (0..self.pulled_at(1)).map(u64::from));
        // Digests of samples without pulled nodes stay what they were when this was another array.
        array(&mut self.pulled.iter().skip(1).map(|count| *count as u64));
        for block in &self.blocks {
            array(&mut [block.first as u64].into_iter());
            array(&mut block.nbr_offsets.iter().map(|offset| *offset as u64));
            array(&mut block.nbrs.iter().map(|nbr| nbr.0 as u64));
            array(&mut block.positions.iter().map(|position| *position as u64));
            array(&mut block.edges.iter().map(|edge| edge.0));
            array(&mut block.relations.iter().map(|relation| *relation as u64));
        }
        hash.digest()
    }

    /// The view of layer `layer`, 0 being the first.
    pub fn layer(&self, layer: usize) -> LayerView<'_> {
        let nodes = self.node_ids.len() as u32;
        let (input, output, block) = match self.form {
            // A layer reads the nodes that are pulled as they enter it, too. The layer before it does not write them.
            Form::Dense => {
                let first = self.pulled_nodes(self.layers() - layer).start;
                (first, self.node_id_offsets[layer + 1], &self.blocks[0])
            }
            Form::Layered => {
                (self.node_id_offsets[layer], self.node_id_offsets[layer + 1], &self.blocks[layer])
            }
            // Every layer computes every node, and only the targets are read in the end.
            Form::Shadow => (0, 0, &self.blocks[0]),
        };
        let skip = (output - block.first) as usize;
        LayerView {
            inputs: input..nodes,
            outputs: output..nodes,
            nbr_offsets: &block.nbr_offsets[skip..],
            nbrs: &block.nbrs,
            degrees: &self.degrees[self.degrees.len() - (nodes - output) as usize..],
            input_degrees: match self.degrees.len() == self.node_ids.len() {
                true => &self.degrees[input as usize..],
                false => &[],
            },
            relations: &block.relations,
        }
    }

    pub(crate) fn clear(&mut self, form: Form, blocks: usize) {
        self.form = form;
        self.node_ids.clear();
        self.node_id_offsets.clear();
        self.seeds.clear();
        self.degrees.clear();
        self.pulled.clear();
        self.blocks.resize_with(blocks, Block::default);
        self.blocks.iter_mut().for_each(Block::clear);
    }
}
