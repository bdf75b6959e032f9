use crate::DeviceMatrix;
use crate::gpu::{Gpu, launch};
use crate::matrix::blocks;
use crate::memory::DeviceBuffer;

/// A decoder, as in `kernels/link.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum DeviceDecoder {
    /// Dot product.
    Dot = 0,
    /// Product with the relation.
    DistMult = 1,
    /// Translation, sum of absolute differences.
    TranslationL1 = 2,
    /// Translation, Euclidean distance.
    TranslationL2 = 3,
    /// Complex product.
    ComplEx = 4,
    /// Rotation.
    RotatE = 5,
}

impl DeviceDecoder {
    pub(super) fn is_dot(self) -> bool {
        matches!(self, DeviceDecoder::Dot | DeviceDecoder::DistMult | DeviceDecoder::ComplEx)
    }

    /// Whether gradients are matmuls.
    pub(super) fn is_matmul(self) -> bool {
        self.is_dot() || self == DeviceDecoder::TranslationL2
    }

    /// Threads for a row in backward passes: a complex number has one.
    pub(super) fn width(self, columns: usize) -> usize {
        if self == DeviceDecoder::RotatE { columns / 2 } else { columns }
    }

    fn is_complex(self) -> bool {
        matches!(self, DeviceDecoder::ComplEx | DeviceDecoder::RotatE)
    }
}

/// Known ends and relations that form queries.
pub struct DeviceQueries<'a> {
    /// The decoder.
    pub decoder: DeviceDecoder,
    /// -1 if the source is replaced, else 1.
    pub sign: f32,
    /// RotatE: angles are this times the relation's numbers, with the sign.
    pub phase: f32,
    /// Rows of nodes.
    pub nodes: &'a DeviceMatrix,
    /// The row of each edge's known end.
    pub known: &'a [u32],
    /// Rows of relations, unless the decoder has none.
    pub relations: Option<&'a DeviceMatrix>,
    /// The row of each edge's relation.
    pub relation_of: &'a [u32],
}

/// Queries and candidates.
#[derive(Clone, Copy)]
pub struct DevicePairs<'a> {
    /// The decoder.
    pub decoder: DeviceDecoder,
    /// One row per edge.
    pub queries: &'a DeviceMatrix,
    /// Rows of nodes.
    pub nodes: &'a DeviceMatrix,
    /// The candidates of all chunks, one after the other; without, every node is one.
    pub rows: Option<&'a [u32]>,
    /// Edges per chunk; all of them without `rows`.
    pub chunk_edges: usize,
    /// Candidates per edge.
    pub each: usize,
}

/// A loss, as in `kernels/link.cu`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeviceLinkLoss {
    /// 0 softmax, 1 logistic, 2 margin, 3 self-adversarial.
    pub kind: u32,
    /// Factor of loss and gradients.
    pub scale: f32,
    /// The margin.
    pub margin: f32,
    /// Factor of scores in self-adversarial weights.
    pub temperature: f32,
}

/// Passes on candidates of an edge.
pub type MaskedOfEdge<'a> = dyn Fn(usize, &mut dyn FnMut(u32)) + 'a;

/// What a loss knows of its edges.
#[derive(Clone, Copy)]
pub struct DeviceEdges<'a> {
    /// The row of each edge's true end.
    pub own: &'a [u32],
    /// A factor for each edge; empty if all are 1.
    pub weights: &'a [f32],
    /// Passes on the candidates of an edge that are not negatives.
    pub masked: &'a MaskedOfEdge<'a>,
}

/// Where the gradient of candidates goes.
pub enum DeviceCandidateGradients<'a> {
    /// A row per candidate of all chunks, or per node.
    Rows(&'a mut DeviceMatrix),
    /// Summed by node; positions of a node's candidates are its members.
    ByNode {
        /// One more than there are nodes.
        offsets: &'a [u32],
        /// Positions among all candidates.
        members: &'a [u32],
        /// A row per node.
        to: &'a mut DeviceMatrix,
    },
}

/// Queries and candidates of a tile.
const SIDE: usize = 64;

impl DevicePairs<'_> {
    pub(super) fn assert_valid(&self) {
        let edges = self.queries.rows();
        assert_eq!(self.queries.columns(), self.nodes.columns());
        assert!(!self.decoder.is_complex() || self.queries.columns().is_multiple_of(2));
        match self.rows {
            Some(rows) => {
                assert_eq!(rows.len(), edges.div_ceil(self.chunk_edges) * self.each);
                assert!(rows.iter().all(|row| (*row as usize) < self.nodes.rows()), "rows of the nodes");
            }
            None => assert!(self.each == self.nodes.rows() && self.chunk_edges >= edges),
        }
    }

    fn tiles(&self, edges: usize) -> usize {
        let chunks = edges.div_ceil(self.chunk_edges.max(1));
        chunks * self.chunk_edges.min(edges).div_ceil(SIDE) * self.each.div_ceil(SIDE)
    }
}

impl Gpu {
    fn assert_queries(&self, call: &DeviceQueries<'_>, queries: &DeviceMatrix) -> (u64, [DeviceBuffer; 2]) {
        let columns = call.nodes.columns();
        assert_eq!((queries.rows(), queries.columns()), (call.known.len(), columns));
        assert!(call.known.iter().all(|row| (*row as usize) < call.nodes.rows()), "rows of the nodes");
        let wide = match call.decoder {
            DeviceDecoder::Dot => 0,
            DeviceDecoder::RotatE => columns / 2,
            _ => columns,
        };
        assert!(!call.decoder.is_complex() || columns.is_multiple_of(2), "complex numbers have two columns");
        let relations = call.relations.filter(|_| wide > 0);
        if wide > 0 {
            let relations = relations.expect("a decoder with relations has their rows");
            assert_eq!((relations.columns(), call.relation_of.len()), (wide, call.known.len()));
            assert!(call.relation_of.iter().all(|row| (*row as usize) < relations.rows()));
        }
        let uploaded = [call.known, call.relation_of].map(|words| self.upload_slice(words));
        (relations.map_or(0, DeviceMatrix::address), uploaded)
    }

    /// Query rows from known ends and relations.
    pub fn link_queries(&self, call: &DeviceQueries<'_>, queries: &mut DeviceMatrix) {
        let (relations, [known, relation_of]) = self.assert_queries(call, queries);
        let (edges, columns) = (call.known.len(), call.nodes.columns());
        // SAFETY: every row is one of its matrix, by the assertions; queries have a row per edge.
        unsafe {
            launch!(
                self, "link_queries", [blocks(edges * columns, 256), 1], [256, 1];
                call.nodes.address(), known.address(), relations, relation_of.address(), queries.address(),
                edges as u32, columns as u32, call.decoder as u32, call.sign, call.phase
            )
        }
    }

    /// Gradients of queries become those of known ends, in place.
    pub fn link_queries_back(
        &self,
        call: &DeviceQueries<'_>,
        gradient: &mut DeviceMatrix,
        of_relations: Option<&mut DeviceMatrix>,
    ) {
        let (relations, [known, relation_of]) = self.assert_queries(call, gradient);
        let Some(of_relations) = of_relations else {
            assert_eq!(call.decoder, DeviceDecoder::Dot, "relations get a gradient");
            return;
        };
        if call.decoder == DeviceDecoder::Dot {
            return;
        }
        let (edges, columns) = (call.known.len(), call.nodes.columns());
        let wide = call.relations.map_or(0, DeviceMatrix::columns);
        assert_eq!((of_relations.rows(), of_relations.columns()), (edges, wide));
        // SAFETY: as above; gradients of relations have a row per edge.
        unsafe {
            launch!(
                self, "link_queries_back", [blocks(edges * columns, 256), 1], [256, 1];
                call.nodes.address(), known.address(), relations, relation_of.address(), gradient.address(),
                of_relations.address(), edges as u32, columns as u32, call.decoder as u32, call.sign, call.phase
            )
        }
    }

    /// The score of each query with its own row, with the bits of [`Gpu::link_scores`].
    pub fn link_own_scores(&self, call: &DevicePairs<'_>, own: &[u32], scores: &mut DeviceMatrix) {
        let edges = call.queries.rows();
        assert_eq!((scores.rows(), scores.columns(), own.len()), (edges, 1, edges));
        assert!(own.iter().all(|row| (*row as usize) < call.nodes.rows()), "rows of the nodes");
        assert_eq!(call.queries.columns(), call.nodes.columns());
        let uploaded = self.upload_slice(own);
        // SAFETY: every row is one of the nodes; scores have an entry per query.
        unsafe {
            launch!(
                self, "link_own_scores", [blocks(edges, 128), 1], [128, 1];
                call.queries.address(), call.nodes.address(), uploaded.address(), scores.address(), edges as u32,
                call.queries.columns() as u32, call.decoder as u32
            )
        }
    }

    /// Scores, or counts against thresholds, of all pairs.
    fn link_tiles(&self, call: &DevicePairs<'_>, rows: u64, scores: u64, thresholds: u64, counts: u64) {
        let edges = call.queries.rows();
        // SAFETY: callers checked rows, and that scores, thresholds and counts have their entries.
        unsafe {
            launch!(
                self, "link_tile", [call.tiles(edges) as u32, 1], [256, 1];
                call.queries.address(), call.nodes.address(), rows, scores, thresholds, counts, edges as u32,
                call.chunk_edges.min(edges).max(1) as u32, call.each as u32, call.queries.columns() as u32,
                call.decoder as u32
            )
        }
    }

    /// Scores of all pairs, each a sum in the order of the columns.
    pub fn link_scores(&self, call: &DevicePairs<'_>, scores: &mut DeviceMatrix) {
        call.assert_valid();
        assert_eq!((scores.rows(), scores.columns()), (call.queries.rows(), call.each));
        let rows = call.rows.map(|rows| self.upload_slice(rows));
        self.link_tiles(call, rows.as_ref().map_or(0, DeviceBuffer::address), scores.address(), 0, 0);
    }

    /// For each query the candidates above its threshold, or not a number, and those equal to it, without filtered
    /// pairs. Waits for the device.
    pub fn link_counts(
        &self,
        call: &DevicePairs<'_>,
        thresholds: &DeviceMatrix,
        filtered: &[(u32, u32)],
    ) -> Vec<[u32; 2]> {
        call.assert_valid();
        let edges = call.queries.rows();
        assert_eq!((thresholds.rows(), thresholds.columns()), (edges, 1));
        assert!(filtered.iter().all(|(edge, at)| (*edge as usize) < edges && (*at as usize) < call.each));
        let rows = call.rows.map(|rows| self.upload_slice(rows));
        let rows = rows.as_ref().map_or(0, DeviceBuffer::address);
        let counts = DeviceMatrix::new(self, edges, 2);
        self.fill_words(counts.address(), edges * 2, 0);
        self.link_tiles(call, rows, 0, thresholds.address(), counts.address());
        let pairs: Vec<u32> = filtered.iter().flat_map(|(edge, at)| [*edge, *at]).collect();
        let uploaded = self.upload_slice(&pairs);
        // SAFETY: pairs are inside by the assertion above; each query has two counts.
        unsafe {
            launch!(
                self, "link_filter", [blocks(filtered.len(), 128), 1], [128, 1];
                call.queries.address(), call.nodes.address(), rows, uploaded.address(), thresholds.address(),
                counts.address(), filtered.len() as u32, call.chunk_edges.max(1) as u32, call.each as u32,
                call.queries.columns() as u32, call.decoder as u32
            )
        }
        let mut found = vec![0.0f32; edges * 2];
        self.read(&counts, 0, &mut found);
        found.chunks_exact(2).map(|pair| [pair[0].to_bits(), pair[1].to_bits()]).collect()
    }
}
