//! The memory of ranking links: the representations of all nodes, or what is read of them at a time. Of what other memory
//! is left, passes over all candidates get as much as makes them fewer.

use super::{FittedPlan, Planned, Purpose};
use crate::link::{Links, PIECE_QUERIES, RankRows, RankStream, copied_nodes, listed_bytes};
use crate::whole::table::{COPY_BYTES, StoredTable};
use crate::{EvaluationMode, InputRows, Plan, Result, TrainError};
use esker_nn::{LinkShape, link_bytes};
use esker_sample::unseen_node_bytes;
use esker_strategies::{JobOutline, MemoryTable};
use esker_types::grouped;

/// Candidates of a block, and edges of a pass, where memory is least.
const LEAST_BLOCK_NODES: u64 = 1 << 12;
const LEAST_PASS_EDGES: u64 = 1 << 9;
/// Larger blocks are read no faster.
const MOST_BLOCK_BYTES: u64 = 16 << 20;
/// Blocks at a time: one is compared, the next is read.
const BLOCKS: u64 = 2;
/// One part in this many of a memory that is left goes to ranking, and of that to blocks and to true ends.
const SPARE_PART: u64 = 2;
const BLOCK_PART: u64 = 4;
const END_PART: u64 = 4;

/// The memory of streamed ranking by what determines it.
struct StreamCosts {
    nodes: u64,
    held_out: u64,
    all_edges: u64,
    /// A candidate of a block, an edge of a pass.
    node_bytes: u64,
    edge_bytes: u64,
}

impl StreamCosts {
    fn block_bytes(&self, nodes: u64) -> u64 {
        nodes.saturating_mul(self.node_bytes).saturating_add(StoredTable::reader_bytes(nodes))
    }

    fn pass_bytes(&self, edges: u64) -> u64 {
        edges.saturating_mul(self.edge_bytes)
    }

    /// Those of validation stay while test edges are ranked.
    fn end_bytes(&self, stream: RankStream) -> u64 {
        2 * stream.end_bytes
    }

    fn least(&self) -> RankStream {
        let pass_edges = self.held_out.clamp(1, LEAST_PASS_EDGES);
        RankStream {
            block_nodes: self.nodes.clamp(1, LEAST_BLOCK_NODES),
            pass_edges,
            end_bytes: Links::least_end_bytes(self.nodes, self.all_edges, pass_edges),
            export_bytes: 0,
        }
    }

    /// With so many bytes more, at most: no more than makes a difference.
    fn grown(&self, least: RankStream, more: u64, most_block: u64) -> RankStream {
        let mut stream = least;
        let wanted = Links::true_end_bytes(self.all_edges, self.held_out.max(1)).max(least.end_bytes);
        stream.end_bytes += (wanted - least.end_bytes).min(more / END_PART / 2);
        let each = self.block_bytes(1 << 20) >> 20;
        let most_block = most_block.clamp(least.block_nodes, self.nodes.max(least.block_nodes));
        stream.block_nodes += (most_block - least.block_nodes).min(more / BLOCK_PART / (each + 1));
        let taken = |stream: RankStream| self.end_bytes(stream) + self.block_bytes(stream.block_nodes);
        let left = more.saturating_sub(taken(stream) - taken(least));
        let edges = self.held_out.max(least.pass_edges) - least.pass_edges;
        stream.pass_edges += edges.min(left / self.edge_bytes.max(1));
        stream
    }
}

impl Planned<'_> {
    /// Ranks with all representations on the device if they fit, or else with what fits.
    pub(super) fn plan_ranking(&self, job: &JobOutline, least: RankStream) -> Result<Plan> {
        let streamed = Planned { ranking: RankRows::Streamed(least), ..*self };
        let smallest = [self.smallest(job), streamed.smallest(job)].into_iter().filter_map(Result::ok).min();
        let plan = match self.plan(job) {
            Err(refused) if is_refused(&refused) => match streamed.plan_streamed(job, least) {
                Err(error) if is_refused(&error) => return Err(smaller(refused, error)),
                plan => plan?,
            },
            plan => plan?.plan,
        };
        Ok(Plan { smallest_bytes: smallest.unwrap_or(plan.smallest_bytes), ..plan })
    }

    /// Gives ranking a part of what is left beside its least.
    fn plan_streamed(&self, job: &JobOutline, least: RankStream) -> Result<Plan> {
        let FittedPlan { plan, spare } = self.plan(job)?;
        let costs = self.stream_costs(job);
        let left = match self.device.in_host_memory {
            true => spare.host,
            false => spare.host.min(spare.device),
        };
        let row = self.outputs as u64 * 4;
        let grown = costs.grown(least, left / SPARE_PART, MOST_BLOCK_BYTES / row.max(1));
        let larger = Planned { ranking: RankRows::Streamed(grown), ..*self };
        let (mut plan, stream, left) = match larger.plan(job) {
            Ok(fitted) => (fitted.plan, grown, fitted.spare.host),
            Err(error) if is_refused(&error) => (plan, least, spare.host),
            Err(error) => return Err(error),
        };
        // An export needs no queries and no true ends, and nothing else runs meanwhile.
        let others = costs.pass_bytes(stream.pass_edges) + costs.end_bytes(stream);
        let beside = if self.purpose == Purpose::Infer { left / 2 } else { 0 };
        plan.ranking = RankRows::Streamed(RankStream { export_bytes: others / 2 + beside, ..stream });
        Ok(plan)
    }

    /// The least of streamed ranking, if links are ranked.
    pub(super) fn least_stream(&self, job: &JobOutline) -> Option<RankStream> {
        let modes = [self.config.eval, self.config.final_eval];
        let evaluates = modes.iter().any(|mode| *mode != EvaluationMode::None);
        let ranks = self.config.link.is_some() && (evaluates || self.purpose == Purpose::Infer);
        ranks.then(|| self.stream_costs(job).least())
    }

    fn stream_costs(&self, job: &JobOutline) -> StreamCosts {
        let manifest = job.dataset.manifest();
        let (valid, test) = manifest.splits.as_ref().map_or((0, 0), |splits| (splits.valid, splits.test));
        let row = self.outputs as u64 * 4;
        // Where two tables are joined, both are copied first, and the parts of a sum once more.
        let copied = match self.config.embeddings.as_ref().map(|embeddings| embeddings.inputs) {
            Some(InputRows::Concatenated) => row,
            Some(InputRows::Summed) => 3 * (job.dim() * 4 + row),
            Some(InputRows::Embeddings) | None => 0,
        };
        // Both ends of an edge and both queries, with the rounding of their matrices; numbers, counts and scores.
        let rows = 4 * row + row / 2;
        // The candidates of each query, and once more those in a block.
        let listed = match self.config.link.as_ref().and_then(|link| link.ranks.candidates) {
            Some(drawn) => drawn as u64,
            None => self.fixed_candidates(job),
        };
        StreamCosts {
            nodes: manifest.nodes.count,
            held_out: valid.max(test),
            all_edges: Links::true_edge_count(&job.dataset),
            // A quarter of a block is what an allocator rounds.
            node_bytes: BLOCKS * row + row / 2 + copied + 2 * 8,
            edge_bytes: rows + 256 + 2 * listed.saturating_mul(2 * 8),
        }
    }

    /// The most candidates that came with a held-out edge.
    fn fixed_candidates(&self, job: &JobOutline) -> u64 {
        let files = job.dataset.manifest().splits.iter().flat_map(|splits| &splits.negatives);
        let arrays = files.filter_map(|file| job.dataset.array(&file.name));
        arrays.map(|array| array.entry().columns).max().unwrap_or(0)
    }

    /// The representations of all nodes.
    fn representation_bytes(&self, job: &JobOutline) -> u64 {
        job.dataset.manifest().nodes.count.saturating_mul(self.outputs as u64 * 4)
    }

    /// Adds representations where candidates are compared with queries.
    pub(super) fn add_rank_rows(&self, job: &JobOutline, table: &mut MemoryTable) {
        let nodes = job.dataset.manifest().nodes.count;
        match self.ranking {
            RankRows::Resident => {
                let from = format!("{} nodes x {} x 4 bytes", grouped(nodes), self.outputs);
                table.add_from("evaluation: representations of nodes", self.representation_bytes(job), from);
                let block = self.config.link.as_ref().map_or(0, |link| copied_nodes(&link.ranks, nodes));
                if block > 0 {
                    let bytes = block.saturating_mul(self.outputs as u64 * 4 + 4);
                    table.add("evaluation: candidates of a block", bytes);
                }
            }
            RankRows::Streamed(stream) => {
                let costs = self.stream_costs(job);
                let from = format!("{BLOCKS} x {} of {} nodes", grouped(stream.block_nodes), grouped(nodes));
                table.add_from(
                    "evaluation: blocks of candidates",
                    costs.block_bytes(stream.block_nodes),
                    from,
                );
                let from = format!("{} of {} edges", grouped(stream.pass_edges), grouped(costs.held_out));
                table.add_from("evaluation: queries of a pass", costs.pass_bytes(stream.pass_edges), from);
            }
        }
    }

    /// Adds what ranking takes of host memory.
    pub(super) fn add_ranking(&self, job: &JobOutline, table: &mut MemoryTable) {
        let Some(link) = &self.config.link else { return };
        let manifest = job.dataset.manifest();
        let nodes = manifest.nodes.count;
        let (valid, test) = manifest.splits.as_ref().map_or((0, 0), |splits| (splits.valid, splits.test));
        let queries = 2 * (valid + test);
        let all = Links::true_end_bytes(Links::true_edge_count(&job.dataset), valid + test);
        let (known, from) = match self.ranking {
            RankRows::Resident => (2 * all, "of validation and test, at most"),
            RankRows::Streamed(stream) => {
                (self.stream_costs(job).end_bytes(stream), "of edges of validation and of test at a time")
            }
        };
        table.add_from("evaluation: true edges of ranked pairs", known, from);
        if self.device.in_host_memory || matches!(self.ranking, RankRows::Streamed(_)) {
            // A device of its own has a copy of what host memory is read into.
            self.add_rank_rows(job, table);
        }
        if matches!(self.ranking, RankRows::Streamed(_)) && self.config.model.layers > 0 {
            // A piece that is copied, a block of the file, and what waits to be written.
            table.add("evaluation: writing representations", COPY_BYTES + (8 << 20));
        }
        let shape = LinkShape {
            edges: PIECE_QUERIES,
            chunk_edges: PIECE_QUERIES,
            candidates: nodes as usize,
            all_nodes: true,
            columns: self.outputs,
            relation_columns: link.decoder.relation_columns(link.columns).unwrap_or(0),
        };
        let ranked = link_bytes(&shape, self.device.memory(self.config)).ranking;
        // A query and its rank, pairs that are not edges, scores; which nodes train.
        let ranked = ranked.saturating_add(queries * 96).saturating_add(unseen_node_bytes(nodes));
        table.add("evaluation: queries and ranks", ranked);
        let listed = listed_bytes(&link.ranks, &job.dataset);
        table.add_from("evaluation: candidates", listed, "drawn, fixed or left out, of some queries");
    }
}

/// Whether a plan failed for want of memory.
fn is_refused(error: &TrainError) -> bool {
    matches!(error, TrainError::Memory { .. } | TrainError::DeviceMemory { .. })
}

/// The refusal that asks for less.
fn smaller(a: TrainError, b: TrainError) -> TrainError {
    match (&a, &b) {
        (TrainError::Memory { needed: first, .. }, TrainError::Memory { needed: second, .. })
        | (TrainError::DeviceMemory { needed: first, .. }, TrainError::DeviceMemory { needed: second, .. })
            if first.0 <= second.0 =>
        {
            a
        }
        // Rows on the device do not fit there, and others do.
        (TrainError::Memory { .. }, TrainError::DeviceMemory { .. }) => a,
        _ => b,
    }
}
