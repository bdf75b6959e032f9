//! Link prediction on the CPU. Edges are cut into blocks of at most 128 that share candidates. A block's scores, loss
//! and gradient are computed while they are in the L2 cache; the gradients of candidates follow, a range of candidates
//! at a time. All cuts depend on shapes only, so results do not depend on the number of threads.

mod loss;
mod query;
mod rank;
mod rows;
mod score;
mod step;

pub(crate) use rank::COUNTED_WORDS;
pub(crate) use score::{TILE, panel_words};
pub(crate) use step::step_words;

use super::{CpuBackend, CpuMatrix, Ready};
use crate::*;

impl LinkMath for CpuBackend {
    fn link_queries(&self, call: &QueryCall<'_, Self>, queries: &mut CpuMatrix) {
        query::forward(call, queries)
    }

    fn link_queries_backward(
        &self,
        call: &QueryCall<'_, Self>,
        gradient: &mut CpuMatrix,
        relation_gradient: Option<&mut CpuMatrix>,
    ) {
        query::backward(call, gradient, relation_gradient)
    }

    fn link_loss(
        &self,
        call: &ScoreCall<'_, Self>,
        loss: &LossCall<'_>,
        into: LinkGradients<'_, Self>,
    ) -> Result<Ready> {
        let found = self.link_step(call, loss, into);
        if !found.is_finite() {
            return Err(DeviceError::NotFinite { what: "the loss".to_string(), found }.into());
        }
        Ok(Ready(found))
    }

    fn own_scores(&self, call: &ScoreCall<'_, Self>, own: &[u32], scores: &mut CpuMatrix) {
        score::own_scores(call, own, scores)
    }

    fn link_scores(&self, call: &ScoreCall<'_, Self>, scores: &mut CpuMatrix) {
        self.scores_of_all(call, scores)
    }

    fn rank_counts(&self, call: &RankCall<'_, Self>, counts: &mut [RankCounts]) -> Result<()> {
        self.count_ranks(call, counts);
        Ok(())
    }

    fn sum_rows(&self, parts: &[&CpuMatrix], offsets: &[u32], members: &[u32], to: &mut CpuMatrix) {
        rows::sum(parts, offsets, members, to)
    }

    fn update_rows(
        &self,
        update: &Update,
        rows: &[u32],
        gradient: &CpuMatrix,
        value: &mut CpuMatrix,
        state: &mut [CpuMatrix],
    ) {
        rows::update(update, rows, gradient, value, state)
    }

    fn penalty(
        &self,
        kind: PenaltyKind,
        weights: &[f32],
        rows: &CpuMatrix,
        gradient: &mut CpuMatrix,
    ) -> Result<Ready> {
        let found = rows::penalty(kind, weights, rows, gradient);
        if !found.is_finite() {
            return Err(DeviceError::NotFinite { what: "the penalty".to_string(), found }.into());
        }
        Ok(Ready(found))
    }
}
