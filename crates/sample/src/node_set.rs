//! A set of nodes that numbers its members: one bit per node, and the number of members before each block of bits. So a
//! member's number, its slot in a table, takes a look at one block and no table by node.

use esker_types::NodeId;
use std::io::{self, Read, Write};
use xxhash_rust::xxh3::Xxh3;

/// Words of the bitmap per running count of members.
const BLOCK_WORDS: usize = 8;
/// First bytes of a stored set.
const MAGIC: [u8; 8] = *b"ESKNODES";

/// A set of nodes. Its members are numbered from 0, in the order of their ids.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeSet {
    members: Vec<u64>,
    /// Number of members before each block of the bitmap.
    before: Vec<u32>,
    nodes: u64,
    count: u64,
}

impl NodeSet {
    /// Bytes of a set among `nodes` nodes.
    pub fn bytes_for(nodes: u64) -> u64 {
        let words = nodes.div_ceil(64);
        words * 8 + words.div_ceil(BLOCK_WORDS as u64) * 4
    }

    /// The nodes that `takes` accepts. It is called in node order. Panics if they are 2^32 or more: slots have 32 bits.
    pub fn choose(nodes: u64, mut takes: impl FnMut(NodeId) -> bool) -> NodeSet {
        let mut members = vec![0u64; nodes.div_ceil(64) as usize];
        for node in (0..nodes).map(NodeId).filter(|node| takes(*node)) {
            members[node.index() / 64] |= 1 << (node.index() % 64);
        }
        NodeSet::numbered(members, nodes)
    }

    fn numbered(members: Vec<u64>, nodes: u64) -> NodeSet {
        let (mut before, mut count) = (Vec::with_capacity(members.len().div_ceil(BLOCK_WORDS)), 0u64);
        for block in members.chunks(BLOCK_WORDS) {
            before.push(u32::try_from(count).expect("slots have 32 bits"));
            count += block.iter().map(|word| word.count_ones() as u64).sum::<u64>();
        }
        assert!(count <= u32::MAX as u64, "slots have 32 bits");
        NodeSet { members, before, nodes, count }
    }

    /// Number of members.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Number of nodes that could be members.
    pub fn nodes(&self) -> u64 {
        self.nodes
    }

    /// The number of a member; `None` for other nodes.
    #[inline(always)]
    pub fn slot(&self, node: NodeId) -> Option<u32> {
        let (word, bit) = (node.index() / 64, node.index() % 64);
        if self.members[word] >> bit & 1 == 0 {
            return None;
        }
        let block = word / BLOCK_WORDS;
        let whole: u32 = self.members[block * BLOCK_WORDS..word].iter().map(|word| word.count_ones()).sum();
        Some(self.before[block] + whole + (self.members[word] & ((1 << bit) - 1)).count_ones())
    }

    /// A hash of its members.
    pub fn digest(&self) -> String {
        let mut hash = Xxh3::new();
        hash.update(&self.nodes.to_le_bytes());
        self.members.iter().for_each(|word| hash.update(&word.to_le_bytes()));
        format!("{:016x}", hash.digest())
    }

    /// Writes it: 8 bytes "ESKNODES", the number of nodes, the bitmap, xxh3-64 of all that.
    pub fn write(&self, to: &mut dyn Write) -> io::Result<()> {
        let (mut hash, mut to) = (Xxh3::new(), io::BufWriter::new(to));
        let mut put = |bytes: &[u8]| {
            hash.update(bytes);
            to.write_all(bytes)
        };
        put(&MAGIC)?;
        put(&self.nodes.to_le_bytes())?;
        self.members.iter().try_for_each(|word| put(&word.to_le_bytes()))?;
        to.write_all(&hash.digest().to_le_bytes())?;
        to.flush()
    }

    /// Reads one among `nodes` nodes. The error tells what is wrong with it.
    pub fn read(from: &mut dyn Read, nodes: u64) -> io::Result<NodeSet> {
        let wrong = |what: String| Err(io::Error::new(io::ErrorKind::InvalidData, what));
        let (mut hash, mut from, mut word) = (Xxh3::new(), io::BufReader::new(from), [0; 8]);
        let mut take = |word: &mut [u8; 8]| -> io::Result<u64> {
            from.read_exact(word)?;
            let sum = hash.digest();
            hash.update(word);
            Ok(sum)
        };
        take(&mut word)?;
        if word != MAGIC {
            return wrong("not a set of nodes".into());
        }
        take(&mut word)?;
        let found = u64::from_le_bytes(word);
        if found != nodes {
            return wrong(format!("a set among {found} nodes; the graph has {nodes}"));
        }
        let mut members = vec![0u64; nodes.div_ceil(64) as usize];
        for member in &mut members {
            take(&mut word)?;
            *member = u64::from_le_bytes(word);
        }
        let sum = take(&mut word)?;
        if sum != u64::from_le_bytes(word) {
            return wrong("not what was written, by its checksum".into());
        }
        let last = members.last().copied().unwrap_or(0);
        if !nodes.is_multiple_of(64) && last >> (nodes % 64) != 0 {
            return wrong("a node that the graph does not have".into());
        }
        Ok(NodeSet::numbered(members, nodes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn members_are_numbered_in_order(nodes in 1u64..3000, step in 1u64..70, all: bool) {
            let takes = |node: NodeId| all || (node.0 * 7919) % 71 < step;
            let set = NodeSet::choose(nodes, takes);
            let mut next = 0;
            for node in (0..nodes).map(NodeId) {
                let expected = takes(node).then(|| (next, next += 1).0);
                prop_assert_eq!(set.slot(node), expected);
            }
            prop_assert_eq!(set.count(), next as u64);
            let mut bytes = Vec::new();
            set.write(&mut bytes).unwrap();
            prop_assert_eq!(&NodeSet::read(&mut &bytes[..], nodes).unwrap(), &set);
            prop_assert!(NodeSet::read(&mut &bytes[..], nodes + 1).is_err());
            prop_assert!(NodeSet::read(&mut &bytes[..bytes.len() - 1], nodes).is_err());
            let at = (step as usize * 31) % bytes.len();
            bytes[at] ^= 4;
            prop_assert!(NodeSet::read(&mut &bytes[..], nodes).is_err());
        }
    }
}
