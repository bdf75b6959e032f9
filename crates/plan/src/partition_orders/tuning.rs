//! How many partitions, how many of them resident, and how many logical ones (Marius++ section 6).
//!
//! Many partitions mix edges better, and reads that are too small slow the disk down: p = min(NO / D, sqrt(EO / D)), so
//! that neither a partition's rows nor a bucket are smaller than D, the smallest read at nearly the disk's full rate. As
//! much as fits is resident. Few logical partitions mean few steps, and large ones.
//!
//! What the paper leaves out is counted here: rows include the optimizer's state, and the partition that is prefetched has
//! memory of its own. It is one logical partition: half of what is resident where two logical ones are. For this reason a
//! dispersed order has four resident ones (the paper: one, so that half of the memory would wait for the next step).

use super::{PartitionCounts, PartitionOrder, PartitionOrderKind};
use esker_types::{ByteCount, PartitionSteps, counted};

/// Resident logical partitions of a dispersed order.
const DISPERSED_RESIDENT: u32 = 4;

/// What a partition buffer is chosen by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BufferRequest {
    /// The order.
    pub kind: PartitionOrderKind,
    /// Nodes of the graph.
    pub nodes: u64,
    /// Training nodes. Only training nodes first uses them.
    pub training_nodes: u64,
    /// Bytes of all rows that partitions have, with the optimizer's state: the paper's NO.
    pub row_bytes: u64,
    /// Bytes of all edges on disk: its EO.
    pub edge_bytes: u64,
    /// Bytes in memory of a resident edge, for each byte on disk: sorted copies.
    pub edge_copies: u64,
    /// The smallest read that is not slow: its D.
    pub read_bytes: u64,
    /// Memory for resident partitions, prefetched ones, and work.
    pub memory_bytes: u64,
    /// Memory for work: its F.
    pub working_bytes: u64,
}

/// Memory of a partition buffer. Edges are expected numbers: buckets differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BufferBytes {
    /// Rows of resident partitions.
    pub resident_rows: u64,
    /// Edges between resident partitions.
    pub resident_edges: u64,
    /// Rows that are prefetched.
    pub prefetched_rows: u64,
    /// Edges that are prefetched.
    pub prefetched_edges: u64,
    /// Work.
    pub working: u64,
}

impl BufferBytes {
    /// All of it.
    pub fn total(&self) -> u64 {
        [self.resident_rows, self.resident_edges, self.prefetched_rows, self.prefetched_edges, self.working]
            .into_iter()
            .fold(0, u64::saturating_add)
    }
}

/// What an epoch over partitions costs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EpochCost {
    /// Steps.
    pub steps: u64,
    /// Swaps of single partitions.
    pub swaps: u64,
    /// Bytes of rows that are read; as many are written if rows are trained.
    pub row_bytes: u64,
    /// Bytes of edges that are read, as expected.
    pub edge_bytes: u64,
}

/// Numbers of partitions, chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tuning {
    /// The order: dispersed where training nodes were to come first and do not fit.
    pub kind: PartitionOrderKind,
    /// The numbers.
    pub counts: PartitionCounts,
    /// The most partitions that have large reads.
    pub most_partitions: u32,
    /// Memory.
    pub bytes: BufferBytes,
}

/// Memory that is too small for any buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "order {kind} needs {} for its resident partitions, and {} are there; give --memory at least {} more, or more --partitions with smaller reads",
    ByteCount(*needed_bytes), ByteCount(*memory_bytes), ByteCount(needed_bytes.saturating_sub(*memory_bytes))
)]
pub struct BufferTooSmall {
    /// The order.
    pub kind: PartitionOrderKind,
    /// The least that would do.
    pub needed_bytes: u64,
    /// What there is.
    pub memory_bytes: u64,
}

impl BufferRequest {
    /// The most partitions whose rows and buckets are at least as large as the smallest read.
    pub fn most_partitions(&self) -> u32 {
        let read = self.read_bytes.max(1);
        let most = (self.row_bytes / read).min((self.edge_bytes / read).isqrt());
        most.clamp(1, self.nodes.clamp(1, u32::MAX as u64)) as u32
    }

    /// The memory that these counts need.
    pub fn bytes(&self, counts: &PartitionCounts) -> BufferBytes {
        let resident = counts.resident as u64;
        // Nothing is prefetched where nothing is swapped within an epoch.
        let swaps = counts.resident < counts.partitions && self.kind != PartitionOrderKind::TrainingFirst;
        let prefetched = if swaps { counts.each() as u64 } else { 0 };
        let entering = prefetched * (2 * resident).saturating_sub(prefetched);
        BufferBytes {
            resident_rows: self.rows_of(resident, counts.partitions),
            resident_edges: self.edges_of(resident * resident, counts).saturating_mul(self.edge_copies),
            prefetched_rows: self.rows_of(prefetched, counts.partitions),
            prefetched_edges: self.edges_of(entering, counts),
            working: self.working_bytes,
        }
    }

    /// Bytes of the rows of so many partitions, each as large as the largest.
    fn rows_of(&self, partitions: u64, count: u32) -> u64 {
        let largest = self.nodes.div_ceil(count as u64);
        let bytes = (partitions * largest) as u128 * self.row_bytes as u128 / self.nodes.max(1) as u128;
        bytes.min(u64::MAX as u128) as u64
    }

    /// Bytes of the edges of so many buckets.
    fn edges_of(&self, buckets: u64, counts: &PartitionCounts) -> u64 {
        let all = counts.partitions as u128 * counts.partitions as u128;
        (buckets as u128 * self.edge_bytes as u128).div_ceil(all).min(u64::MAX as u128) as u64
    }

    /// What an epoch costs with an order.
    pub fn epoch_cost(&self, order: &PartitionOrder) -> EpochCost {
        let (counts, swaps) = (order.counts(), order.swaps());
        let (resident, each) = (counts.resident as u64, counts.each() as u64);
        let entering = swaps / each * each * (2 * resident - each);
        EpochCost {
            steps: order.step_count(),
            swaps,
            row_bytes: self.rows_of(swaps + resident, counts.partitions),
            edge_bytes: self.edges_of(resident * resident + entering, &counts),
        }
    }

    /// Chooses. Fails if no numbers of partitions fit.
    pub fn tune(&self) -> Result<Tuning, BufferTooSmall> {
        let most = self.most_partitions();
        let mut needed = u64::MAX;
        for counts in self.candidates(most) {
            let bytes = self.bytes(&counts);
            needed = needed.min(bytes.total());
            if bytes.total() > self.memory_bytes {
                continue;
            }
            let fits = counts.resident == counts.partitions
                || self.training_partitions(counts.partitions) < counts.resident;
            if self.kind == PartitionOrderKind::TrainingFirst && !fits {
                return BufferRequest { kind: PartitionOrderKind::Dispersed, ..*self }.tune();
            }
            return Ok(Tuning { kind: self.kind, counts, most_partitions: most, bytes });
        }
        Err(BufferTooSmall { kind: self.kind, needed_bytes: needed, memory_bytes: self.memory_bytes })
    }

    /// The numbers that take the least memory, whether they fit or not.
    pub fn smallest(&self) -> Tuning {
        if self.kind == PartitionOrderKind::TrainingFirst {
            return BufferRequest { kind: PartitionOrderKind::Dispersed, ..*self }.smallest();
        }
        let most = self.most_partitions();
        let all = self.candidates(most).map(|counts| (counts, self.bytes(&counts)));
        let (counts, bytes) =
            all.min_by_key(|(_, bytes)| bytes.total()).expect("all partitions resident is a candidate");
        Tuning { kind: self.kind, counts, most_partitions: most, bytes }
    }

    /// Partitions that training nodes fill: the paper's k.
    pub fn training_partitions(&self, partitions: u32) -> u32 {
        let of = self.training_nodes as u128 * partitions as u128;
        of.div_ceil(self.nodes.max(1) as u128).min(partitions as u128) as u32
    }

    /// Counts to try, the best first.
    fn candidates(&self, most: u32) -> Box<dyn Iterator<Item = PartitionCounts>> {
        let all = PartitionCounts { partitions: most, resident: most, logical: 1 };
        // As many equal logical partitions, as many partitions as are left.
        let by_logical = move |logical: u32, resident: u32| {
            let each = most / logical;
            PartitionCounts { partitions: each * logical, resident: each * resident, logical }
        };
        let others: Box<dyn Iterator<Item = PartitionCounts>> = match self.kind {
            PartitionOrderKind::TwoLevelBeta => {
                Box::new((3..=most).map(move |logical| by_logical(logical, 2)))
            }
            PartitionOrderKind::Tour => {
                Box::new((3..=most).step_by(2).map(move |logical| by_logical(logical, 2)))
            }
            PartitionOrderKind::Dispersed => {
                let some = (DISPERSED_RESIDENT + 1..=most)
                    .map(move |logical| by_logical(logical, DISPERSED_RESIDENT));
                // Where four parts of a small table are too much: fewer, of the smallest partitions.
                let fewer = (1..DISPERSED_RESIDENT.min(most)).rev();
                Box::new(some.chain(fewer.map(move |resident| by_logical(most, resident))))
            }
            PartitionOrderKind::Beta => {
                Box::new((2..most).rev().map(move |resident| by_logical(most, resident)))
            }
            PartitionOrderKind::TrainingFirst => {
                Box::new((1..most).rev().map(move |resident| by_logical(most, resident)))
            }
        };
        Box::new(std::iter::once(all).chain(others))
    }
}

impl Tuning {
    /// Why these numbers, line by line.
    pub fn reasons(&self, request: &BufferRequest) -> Vec<String> {
        let PartitionCounts { partitions, resident, logical } = self.counts;
        let (rows, edges, read) = (request.row_bytes, request.edge_bytes, request.read_bytes);
        let mut lines = vec![format!(
            "p {partitions}: at most {} partitions have rows and buckets of {} or more (rows {}, edges {})",
            self.most_partitions,
            ByteCount(read),
            ByteCount(rows),
            ByteCount(edges)
        )];
        let bytes = &self.bytes;
        lines.push(format!(
            "c {resident}: {} of rows and {} of edges are resident, {} are prefetched, {} are for work; together {} of {}",
            ByteCount(bytes.resident_rows),
            ByteCount(bytes.resident_edges),
            ByteCount(bytes.prefetched_rows + bytes.prefetched_edges),
            ByteCount(bytes.working),
            ByteCount(bytes.total()),
            ByteCount(request.memory_bytes)
        ));
        lines.push(match resident == partitions {
            true => "l 1: everything is resident".to_string(),
            false => format!(
                "l {logical}: {} at a time for order {}",
                counted(self.counts.logical_resident() as u64, "logical partition", "logical partitions"),
                self.kind
            ),
        });
        if self.kind != request.kind {
            lines.push(format!(
                "order {} instead of {}: training nodes fill {} partitions, not fewer than are resident",
                self.kind,
                request.kind,
                request.training_partitions(request.most_partitions())
            ));
        }
        lines
    }
}
