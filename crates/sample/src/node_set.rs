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

    /// These nodes, in any order. Panics if they are 2^32 or more: slots have 32 bits.
    pub fn of_members(nodes: u64, taken: impl Iterator<Item = NodeId>) -> NodeSet {
        let mut members = vec![0u64; nodes.div_ceil(64) as usize];
        taken.for_each(|node| members[node.index() / 64] |= 1 << (node.index() % 64));
        NodeSet::numbered(members, nodes)
    }

    /// The members, ascending.
    pub fn iter(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.members.iter().enumerate().flat_map(|(word, bits)| {
            let mut bits = *bits;
            std::iter::from_fn(move || {
                let bit = (bits != 0).then(|| bits.trailing_zeros())?;
                bits &= bits - 1;
                Some(NodeId(word as u64 * 64 + bit as u64))
            })
        })
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
        (self.members[word] >> bit & 1 == 1).then(|| self.before_bit(word, bit))
    }

    /// The number of members with smaller ids than a node of the graph.
    #[inline]
    pub fn members_before(&self, node: NodeId) -> u64 {
        self.before_bit(node.index() / 64, node.index() % 64) as u64
    }

    #[inline(always)]
    fn before_bit(&self, word: usize, bit: usize) -> u32 {
        let block = word / BLOCK_WORDS;
        let whole: u32 = self.members[block * BLOCK_WORDS..word].iter().map(|word| word.count_ones()).sum();
        self.before[block] + whole + (self.members[word] & ((1 << bit) - 1)).count_ones()
    }

    /// The member with this number. Panics if there are not so many.
    pub fn member(&self, number: u64) -> NodeId {
        assert!(number < self.count, "a set of {} members has no member {number}", self.count);
        self.select(number, |block| self.before[block] as u64, |word| word)
    }

    /// The node with this number among those that are not members, by id. Panics if there are not so many.
    pub fn other(&self, number: u64) -> NodeId {
        let others = self.nodes - self.count;
        assert!(number < others, "{others} nodes are not members of a set, so none has number {number}");
        let bits = (BLOCK_WORDS * 64) as u64;
        self.select(number, |block| block as u64 * bits - self.before[block] as u64, |word| !word)
    }

    /// The node of the bit with this number, where so many bits are set before a block, and such bits in a word.
    fn select(&self, number: u64, before: impl Fn(usize) -> u64, bits: impl Fn(u64) -> u64) -> NodeId {
        // The last block with at most `number` such bits before it. The first has none.
        let (mut block, mut end) = (0, self.before.len());
        while end - block > 1 {
            let middle = block + (end - block) / 2;
            if before(middle) <= number {
                block = middle;
            } else {
                end = middle;
            }
        }
        let (mut word, mut left) = (block * BLOCK_WORDS, number - before(block));
        while (bits(self.members[word]).count_ones() as u64) <= left {
            left -= bits(self.members[word]).count_ones() as u64;
            word += 1;
        }
        let mut rest = bits(self.members[word]);
        (0..left).for_each(|_| rest &= rest - 1);
        NodeId(word as u64 * 64 + rest.trailing_zeros() as u64)
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
            let (mut next, mut others) = (0, 0);
            for node in (0..nodes).map(NodeId) {
                prop_assert_eq!(set.members_before(node), next as u64);
                let expected = takes(node).then(|| (next, next += 1).0);
                prop_assert_eq!(set.slot(node), expected);
                match expected {
                    Some(number) => prop_assert_eq!(set.member(number as u64), node),
                    None => prop_assert_eq!(set.other((others, others += 1).0), node),
                }
            }
            prop_assert_eq!(set.count(), next as u64);
            let members: Vec<NodeId> = (0..nodes).map(NodeId).filter(|node| takes(*node)).collect();
            prop_assert!(set.iter().eq(members.iter().copied()));
            prop_assert_eq!(&NodeSet::of_members(nodes, members.into_iter().rev()), &set);
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
