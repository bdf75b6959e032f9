//! The math of links: the CPU's, with losses that are known later.

use super::{Lagging, Late};
use esker_nn::*;

fn queries<'a>(from: &QueryCall<'a, Lagging>) -> QueryCall<'a, CpuBackend> {
    let QueryCall { decoder, replaced, nodes, known, relations, relation_of } = *from;
    QueryCall { decoder, replaced, nodes, known, relations, relation_of }
}

fn scores<'a>(from: &ScoreCall<'a, Lagging>) -> ScoreCall<'a, CpuBackend> {
    let ScoreCall { decoder, queries, nodes, candidates } = *from;
    ScoreCall { decoder, queries, nodes, candidates }
}

impl LinkMath for Lagging {
    fn link_queries(&self, call: &QueryCall<'_, Self>, out: &mut CpuMatrix) {
        self.cpu.link_queries(&queries(call), out)
    }

    fn link_queries_backward(
        &self,
        call: &QueryCall<'_, Self>,
        gradient: &mut CpuMatrix,
        relation_gradient: Option<&mut CpuMatrix>,
    ) {
        self.cpu.link_queries_backward(&queries(call), gradient, relation_gradient)
    }

    fn link_loss(
        &self,
        call: &ScoreCall<'_, Self>,
        loss: &LossCall<'_>,
        into: LinkGradients<'_, Self>,
    ) -> Result<Late> {
        let LinkGradients { queries, own, candidates } = into;
        let candidates = match candidates {
            CandidateGradients::Rows(rows) => CandidateGradients::Rows(rows),
            CandidateGradients::ByNode { offsets, members, to } => {
                CandidateGradients::ByNode { offsets, members, to }
            }
        };
        let into = LinkGradients { queries, own, candidates };
        match self.cpu.link_loss(&scores(call), loss, into) {
            Ok(loss) => Ok(self.later(loss.wait())),
            Err(NnError::Device(error)) => Ok(self.later(Err(error))),
            Err(error) => Err(error),
        }
    }

    fn own_scores(&self, call: &ScoreCall<'_, Self>, own: &[u32], out: &mut CpuMatrix) {
        self.cpu.own_scores(&scores(call), own, out)
    }

    fn link_scores(&self, call: &ScoreCall<'_, Self>, out: &mut CpuMatrix) {
        self.cpu.link_scores(&scores(call), out)
    }

    fn rank_counts(&self, call: &RankCall<'_, Self>, counts: &mut [RankCounts]) -> Result<()> {
        let RankCall { thresholds, filtered, first, .. } = *call;
        let call = RankCall { scores: scores(&call.scores), thresholds, filtered, first };
        self.cpu.rank_counts(&call, counts)
    }

    fn sum_rows(&self, parts: &[&CpuMatrix], offsets: &[u32], members: &[u32], to: &mut CpuMatrix) {
        self.cpu.sum_rows(parts, offsets, members, to)
    }

    fn update_rows(
        &self,
        update: &Update,
        rows: &[u32],
        gradient: &CpuMatrix,
        value: &mut CpuMatrix,
        state: &mut [CpuMatrix],
    ) {
        self.cpu.update_rows(update, rows, gradient, value, state)
    }

    fn penalty(
        &self,
        kind: PenaltyKind,
        weights: &[f32],
        rows: &CpuMatrix,
        gradient: &mut CpuMatrix,
    ) -> Result<Late> {
        self.cpu.penalty(kind, weights, rows, gradient).map(|number| self.later(number.wait()))
    }
}
