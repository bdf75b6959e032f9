//! Upper bounds on the memory of link prediction, beside rows of nodes and the encoder's step.

use crate::MemoryOf;
use crate::cpu::link::{COUNTED_WORDS, TILE, panel_words, step_words};
use crate::cpu::pooled_words;

/// The size of a batch of edges whose one end is replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkShape {
    /// Edges of a batch, or queries that are ranked together.
    pub edges: usize,
    /// Edges per chunk.
    pub chunk_edges: usize,
    /// Candidates of an edge.
    pub candidates: usize,
    /// Whether these are all nodes, so that they are read in place.
    pub all_nodes: bool,
    /// Columns of a node's row.
    pub columns: usize,
    /// Columns of a relation's row.
    pub relation_columns: usize,
}

/// Bytes of link prediction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkBytes {
    /// Loss and gradients of one side of a batch: queries, gradients of queries, own rows, relations and candidates,
    /// and what the operation takes meanwhile. If each edge has its own candidates, their gradient is summed by node,
    /// and the matrix for it is not counted here.
    pub step: u64,
    /// Ranking: queries and thresholds, and what the operation takes meanwhile.
    pub ranking: u64,
}

/// Memory of a matrix that a step has for a while.
pub fn matrix_bytes(rows: u64, columns: usize, memory: MemoryOf) -> u64 {
    memory.pooled_bytes(pooled_words((rows as usize).saturating_mul(columns)))
}

/// Largest memory of one side of a batch of this shape.
pub fn link_bytes(shape: &LinkShape, memory: MemoryOf) -> LinkBytes {
    let LinkShape { edges, chunk_edges, candidates, all_nodes, columns, relation_columns } = *shape;
    let chunks = edges.div_ceil(chunk_edges.max(1));
    let matrices = [
        edges * columns,
        edges * columns,
        edges * columns,
        edges * relation_columns,
        // By node, where each edge has its own: the caller has that matrix.
        if chunk_edges == 1 { 0 } else { chunks * candidates * columns },
    ];
    let kept: usize = matrices.iter().map(|words| pooled_words(*words)).sum();
    let ranked = pooled_words(edges * columns) + pooled_words(edges) * 4;
    let (step, ranking) = match memory {
        MemoryOf::Host { threads } => {
            let packed = panel_words(candidates.min(TILE), columns);
            (step_words(edges, chunk_edges, candidates, columns), (packed + COUNTED_WORDS) * threads)
        }
        MemoryOf::Device(_) => {
            let step = esker_cuda::link_loss_words(edges, chunk_edges, candidates, columns, all_nodes);
            (step, if all_nodes { 0 } else { chunks * candidates })
        }
    };
    LinkBytes { step: memory.pooled_bytes(kept + step), ranking: memory.pooled_bytes(ranked + ranking) }
}
