//! Link prediction on a GPU.

use super::{CudaBackend, CudaMatrix, CudaNumber, device_rule};
use crate::*;
use esker_cuda::{
    DeviceCandidateGradients, DeviceDecoder, DeviceEdges, DeviceLinkLoss, DeviceMatrix, DevicePairs,
    DeviceQueries,
};

fn decoder(kind: DecoderKind) -> DeviceDecoder {
    match kind {
        DecoderKind::Dot => DeviceDecoder::Dot,
        DecoderKind::DistMult => DeviceDecoder::DistMult,
        DecoderKind::TransE { norm: DistanceNorm::L1 } => DeviceDecoder::TranslationL1,
        DecoderKind::TransE { norm: DistanceNorm::L2 } => DeviceDecoder::TranslationL2,
        DecoderKind::ComplEx => DeviceDecoder::ComplEx,
        DecoderKind::RotatE { .. } => DeviceDecoder::RotatE,
    }
}

fn queries<'a>(call: &QueryCall<'a, CudaBackend>) -> DeviceQueries<'a> {
    let sign = match call.replaced {
        ReplacedEnd::Target => 1.0,
        ReplacedEnd::Source => -1.0,
    };
    let phase = match call.decoder {
        DecoderKind::RotatE { phase_scale } => sign * phase_scale,
        _ => 0.0,
    };
    DeviceQueries {
        decoder: decoder(call.decoder),
        sign,
        phase,
        nodes: &call.nodes.0,
        known: call.known,
        relations: call.relations.map(|relations| &relations.0),
        relation_of: call.relation_of,
    }
}

fn pairs<'a>(call: &ScoreCall<'a, CudaBackend>) -> DevicePairs<'a> {
    let shape = call.candidates.shape(call.queries.rows(), call.nodes.rows());
    let rows = match call.candidates {
        Candidates::Chunks { rows, .. } => Some(rows),
        Candidates::All => None,
    };
    DevicePairs {
        decoder: decoder(call.decoder),
        queries: &call.queries.0,
        nodes: &call.nodes.0,
        rows,
        chunk_edges: shape.chunk_edges,
        each: shape.each,
    }
}

fn link_loss(call: &LossCall<'_>) -> DeviceLinkLoss {
    let (kind, margin, temperature) = match call.loss {
        LinkLoss::Softmax => (0, 0.0, 0.0),
        LinkLoss::Logistic => (1, 0.0, 0.0),
        LinkLoss::Margin { margin } => (2, margin, 0.0),
        LinkLoss::SelfAdversarial { margin, temperature } => (3, margin, temperature),
    };
    DeviceLinkLoss { kind, scale: call.scale, margin, temperature }
}

impl LinkMath for CudaBackend {
    fn link_queries(&self, call: &QueryCall<'_, Self>, to: &mut CudaMatrix) {
        self.gpu.link_queries(&queries(call), &mut to.0);
    }

    fn link_queries_backward(
        &self,
        call: &QueryCall<'_, Self>,
        gradient: &mut CudaMatrix,
        relation_gradient: Option<&mut CudaMatrix>,
    ) {
        let of_relations = relation_gradient.map(|gradient| &mut gradient.0);
        self.gpu.link_queries_back(&queries(call), &mut gradient.0, of_relations);
    }

    fn link_loss(
        &self,
        call: &ScoreCall<'_, Self>,
        loss: &LossCall<'_>,
        into: LinkGradients<'_, Self>,
    ) -> Result<CudaNumber> {
        let pairs = pairs(call);
        let gradients = [&mut into.queries.0, &mut into.own.0];
        let candidates = match into.candidates {
            CandidateGradients::Rows(to) => DeviceCandidateGradients::Rows(&mut to.0),
            CandidateGradients::ByNode { offsets, members, to } => {
                DeviceCandidateGradients::ByNode { offsets, members, to: &mut to.0 }
            }
        };
        let masked = |edge: usize, take: &mut dyn FnMut(u32)| loss.masked.for_each(edge, take);
        let edges = DeviceEdges { own: loss.own, weights: loss.weights, masked: &masked };
        let pending = self.gpu.link_loss(&pairs, link_loss(loss), edges, gradients, candidates);
        self.gpu.check()?;
        Ok(CudaNumber { pending, what: "the loss" })
    }

    fn own_scores(&self, call: &ScoreCall<'_, Self>, own: &[u32], scores: &mut CudaMatrix) {
        let all = ScoreCall { candidates: Candidates::All, ..*call };
        self.gpu.link_own_scores(&pairs(&all), own, &mut scores.0);
    }

    fn link_scores(&self, call: &ScoreCall<'_, Self>, scores: &mut CudaMatrix) {
        self.gpu.link_scores(&pairs(call), &mut scores.0);
    }

    fn rank_counts(&self, call: &RankCall<'_, Self>, counts: &mut [RankCounts]) -> Result<()> {
        let pairs = pairs(&call.scores);
        let queries = call.scores.queries.rows();
        assert_eq!(counts.len(), queries);
        assert!(call.filtered.is_sorted(), "filtered candidates ascend");
        let local = |(query, candidate): &(u32, u32)| {
            let at = candidate.checked_sub(call.first)?;
            ((at as usize) < pairs.each).then_some((*query, at))
        };
        let filtered: Vec<(u32, u32)> = call.filtered.iter().filter_map(local).collect();
        let found = self.gpu.link_counts(&pairs, &call.thresholds.0, &filtered);
        self.gpu.check()?;
        for (counts, [greater, equal]) in counts.iter_mut().zip(found) {
            counts.greater += greater as u64;
            counts.equal += equal as u64;
        }
        Ok(())
    }

    fn sum_rows(&self, parts: &[&CudaMatrix], offsets: &[u32], members: &[u32], to: &mut CudaMatrix) {
        let parts: Vec<&DeviceMatrix> = parts.iter().map(|part| &part.0).collect();
        self.gpu.sum_rows(&parts, offsets, members, &mut to.0);
    }

    fn update_rows(
        &self,
        update: &Update,
        rows: &[u32],
        gradient: &CudaMatrix,
        value: &mut CudaMatrix,
        state: &mut [CudaMatrix],
    ) {
        let state: Vec<&mut DeviceMatrix> = state.iter_mut().map(|state| &mut state.0).collect();
        self.gpu.update_rows(device_rule(update), rows, &gradient.0, &mut value.0, &state);
    }

    fn penalty(
        &self,
        kind: PenaltyKind,
        weights: &[f32],
        rows: &CudaMatrix,
        gradient: &mut CudaMatrix,
    ) -> Result<CudaNumber> {
        let kind = match kind {
            PenaltyKind::L2 => 0,
            PenaltyKind::N3 => 1,
            PenaltyKind::ComplexN3 => 2,
        };
        let pending = self.gpu.penalty(kind, weights, &rows.0, &mut gradient.0);
        self.gpu.check()?;
        Ok(CudaNumber { pending, what: "the penalty" })
    }
}
