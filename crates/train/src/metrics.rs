//! Metrics of predictions, computed batch by batch.

use crate::config::MetricName;
use crate::link::RankMetrics;
use crate::task::{BatchLabels, LabelKind};
use serde::{Deserialize, Serialize};

/// Largest number of scores stored for a ROC curve.
pub const MOST_SCORES: usize = 1 << 24;

/// The result of an evaluation.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Metrics {
    /// Number of nodes compared, or of edges.
    pub nodes: u64,
    /// Mean loss. Negative, and not written, if there is none: links are ranked.
    #[serde(default = "no_loss", skip_serializing_if = "is_no_loss")]
    pub loss: f64,
    /// Share of right classes or labels. `None` for real values.
    pub accuracy: Option<f64>,
    /// F1 of each class that occurs or is predicted, averaged.
    pub macro_f1: Option<f64>,
    /// Area under the ROC curve: of two classes, or of each label that has both values, averaged. For links, of edges
    /// and as many pairs of nodes that are not edges.
    pub auc: Option<f64>,
    /// Average precision of the same edges and pairs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ap: Option<f64>,
    /// Nodes of these edges that no training edge has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unseen_nodes: Option<u64>,
    /// Ranks of edges.
    #[serde(default, flatten)]
    pub ranks: Option<RankMetrics>,
}

fn no_loss() -> f64 {
    Metrics::NO_LOSS
}

fn is_no_loss(loss: &f64) -> bool {
    *loss < 0.0
}

impl Metrics {
    /// The loss of what has none.
    pub(crate) const NO_LOSS: f64 = -1.0;

    /// The main number for choosing the best model, if there is one. Larger is better.
    pub fn score(&self, metric: MetricName) -> Option<f64> {
        let value = match metric {
            MetricName::Accuracy | MetricName::AccuracyAndLoss => self.accuracy,
            MetricName::MacroF1 => self.macro_f1,
            MetricName::Auc => self.auc,
            MetricName::Loss => (self.loss >= 0.0).then_some(-self.loss),
            MetricName::Mrr => self.ranks.map(|ranks| ranks.mrr),
            MetricName::HitsAt10 => self.ranks.map(|ranks| ranks.hits_at_10),
            MetricName::AveragePrecision => self.ap,
        };
        value.filter(|value| value.is_finite())
    }
}

/// Counts of one class.
#[derive(Debug, Clone, Copy, Default)]
struct Counts {
    right: u64,
    predicted: u64,
    actual: u64,
}

/// Collects predictions and labels.
#[derive(Debug)]
pub struct Tally {
    kind: LabelKind,
    nodes: u64,
    /// Of every node or known entry, summed up in order: the division into batches or blocks does not change a bit.
    losses: f64,
    compared: u64,
    classes: Vec<Counts>,
    right: u64,
    answers: u64,
    /// (score, positive) by column. Two classes have one column.
    scores: Vec<Vec<(f32, bool)>>,
    /// Largest number of scores per column, and whether all were stored.
    most: usize,
    whole: bool,
}

/// Number of columns that have a ROC curve.
fn curves(kind: LabelKind, outputs: usize) -> usize {
    match kind {
        LabelKind::Classes if outputs == 2 => 1,
        LabelKind::Multilabel => outputs,
        _ => 0,
    }
}

/// Bytes of a [`Tally`] of this many nodes.
pub(crate) fn tally_bytes(kind: LabelKind, outputs: usize, nodes: u64) -> u64 {
    let scores = nodes.saturating_mul(curves(kind, outputs) as u64).min(MOST_SCORES as u64);
    scores * size_of::<(f32, bool)>() as u64 + outputs as u64 * size_of::<Counts>() as u64
}

impl Tally {
    /// An empty tally, for logits of `outputs` columns and `nodes` nodes.
    pub fn new(kind: LabelKind, outputs: usize, nodes: usize) -> Tally {
        let curves = curves(kind, outputs);
        let each = nodes.min(MOST_SCORES.checked_div(curves).unwrap_or(0));
        Tally {
            kind,
            nodes: 0,
            losses: 0.0,
            compared: 0,
            classes: vec![Counts::default(); outputs],
            right: 0,
            answers: 0,
            scores: (0..curves).map(|_| Vec::with_capacity(each)).collect(),
            most: each,
            whole: true,
        }
    }

    /// Adds rows of logits with their labels.
    pub fn add(&mut self, logits: &[f32], labels: &BatchLabels) {
        let width = self.classes.len();
        let rows = logits.len().checked_div(width).unwrap_or(0);
        self.nodes += rows as u64;
        match labels {
            BatchLabels::Classes(classes) => {
                for (row, class) in logits.chunks_exact(width).zip(classes) {
                    self.add_class(row, *class as usize);
                }
            }
            BatchLabels::Binary(values) => {
                for (row, labels) in logits.chunks_exact(width).zip(values.chunks_exact(width)) {
                    self.add_labels(row, labels);
                }
            }
            BatchLabels::Values(values) => {
                for (value, label) in logits.iter().zip(values).filter(|(_, label)| !label.is_nan()) {
                    self.lose((*value as f64 - *label as f64).powi(2));
                }
            }
        }
    }

    fn lose(&mut self, loss: f64) {
        self.losses += loss;
        self.compared += 1;
    }

    fn score(&mut self, column: usize, score: f32, positive: bool) {
        let most = self.most;
        match self.scores.get_mut(column) {
            Some(scores) if scores.len() < most => scores.push((score, positive)),
            _ => self.whole = false,
        }
    }

    fn add_class(&mut self, row: &[f32], class: usize) {
        let predicted = largest(row);
        let most = row[predicted] as f64;
        let sum: f64 = row.iter().map(|value| (*value as f64 - most).exp()).sum();
        self.lose(most + sum.ln() - row[class] as f64);
        self.right += (predicted == class) as u64;
        self.answers += 1;
        self.classes[predicted].predicted += 1;
        self.classes[class].actual += 1;
        self.classes[class].right += (predicted == class) as u64;
        if let [no, yes] = row {
            self.score(0, yes - no, class == 1);
        }
    }

    fn add_labels(&mut self, row: &[f32], labels: &[f32]) {
        for (column, (logit, label)) in row.iter().zip(labels).enumerate() {
            if label.is_nan() {
                continue;
            }
            let (predicted, actual) = (*logit > 0.0, *label > 0.5);
            let x = *logit as f64;
            self.lose(x.max(0.0) - x * *label as f64 + (-x.abs()).exp().ln_1p());
            self.right += (predicted == actual) as u64;
            self.answers += 1;
            let counts = &mut self.classes[column];
            counts.predicted += predicted as u64;
            counts.actual += actual as u64;
            counts.right += (predicted && actual) as u64;
            self.score(column, *logit, actual);
        }
    }

    /// The metrics of everything added.
    pub fn finish(mut self) -> Metrics {
        let whole = self.whole;
        let areas: Vec<f64> = self.scores.iter_mut().filter_map(|scores| area(scores)).collect();
        let counted = self.kind != LabelKind::Real && self.answers > 0;
        Metrics {
            nodes: self.nodes,
            loss: self.losses / self.compared.max(1) as f64,
            accuracy: counted.then(|| self.right as f64 / self.answers as f64),
            macro_f1: counted.then(|| macro_f1(&self.classes)),
            auc: (whole && !areas.is_empty()).then(|| areas.iter().sum::<f64>() / areas.len() as f64),
            ap: None,
            unseen_nodes: None,
            ranks: None,
        }
    }
}

/// The index of the first largest number.
pub(crate) fn largest(row: &[f32]) -> usize {
    let mut best = 0;
    for (column, value) in row.iter().enumerate() {
        if *value > row[best] {
            best = column;
        }
    }
    best
}

fn macro_f1(classes: &[Counts]) -> f64 {
    let present = classes.iter().filter(|counts| counts.actual + counts.predicted > 0);
    let (mut sum, mut count) = (0.0, 0u32);
    for counts in present {
        sum += 2.0 * counts.right as f64 / (counts.actual + counts.predicted) as f64;
        count += 1;
    }
    sum / count.max(1) as f64
}

/// Area under the ROC curve; equal scores count half. `None` if all labels are the same.
pub(crate) fn area(scores: &mut [(f32, bool)]) -> Option<f64> {
    scores.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
    let positives = scores.iter().filter(|(_, positive)| *positive).count() as f64;
    let negatives = scores.len() as f64 - positives;
    if positives == 0.0 || negatives == 0.0 {
        return None;
    }
    // Mann-Whitney: for each positive, the negatives below it and half of those with an equal score.
    let (mut below, mut wins) = (0.0, 0.0);
    for group in scores.chunk_by(|a, b| a.0 == b.0) {
        let positive = group.iter().filter(|(_, positive)| *positive).count() as f64;
        let negative = group.len() as f64 - positive;
        wins += positive * (below + negative / 2.0);
        below += negative;
    }
    Some(wins / (positives * negatives))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn classes_are_counted() {
        let mut tally = Tally::new(LabelKind::Classes, 3, 4);
        let logits = [1.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0, 3.0, 0.0, 5.0, 0.0, 0.0];
        let labels = [0, 1, 0, 0];
        tally.add(&logits[..6], &BatchLabels::Classes(labels[..2].to_vec()));
        tally.add(&logits[6..], &BatchLabels::Classes(labels[2..].to_vec()));
        let metrics = tally.finish();
        assert_eq!((metrics.nodes, metrics.accuracy, metrics.auc), (4, Some(0.75), None));
        // Class 0: 2 right, 2 predicted, 3 actual; class 1: 1 right, 2 predicted, 1 actual; class 2 never occurs.
        let expected = (2.0 * 2.0 / 5.0 + 2.0 / 3.0) / 2.0;
        assert!((metrics.macro_f1.unwrap() - expected).abs() < 1e-12);
        let of_row = |row: &[f64], class: usize| row.iter().map(|x| x.exp()).sum::<f64>().ln() - row[class];
        let rows = [[1.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 3.0, 0.0], [5.0, 0.0, 0.0]];
        let sum: f64 = rows.iter().zip(labels).map(|(row, class)| of_row(row, class as usize)).sum();
        assert!((metrics.loss - sum / 4.0).abs() < 1e-12);
    }

    #[test]
    fn unknown_labels_do_not_count() {
        let mut tally = Tally::new(LabelKind::Multilabel, 2, 2);
        tally.add(&[1.0, -1.0, 1.0, 1.0], &BatchLabels::Binary(vec![1.0, f32::NAN, 0.0, 1.0]));
        let metrics = tally.finish();
        assert_eq!(metrics.accuracy, Some(2.0 / 3.0));
        // Column 0 has one of each with equal scores; column 1 has only a positive.
        assert_eq!(metrics.auc, Some(0.5));
        let of = |x: f64, label: f64| x.max(0.0) - x * label + (-x.abs()).exp().ln_1p();
        assert!((metrics.loss - (of(1.0, 1.0) + of(1.0, 0.0) + of(1.0, 1.0)) / 3.0).abs() < 1e-12);
    }

    proptest! {
        #[test]
        fn the_area_is_the_share_of_pairs_in_order(pairs in prop::collection::vec((0i8..6, any::<bool>()), 2..60)) {
            let mut scores: Vec<(f32, bool)> = pairs.iter().map(|(score, label)| (*score as f32, *label)).collect();
            let (mut wins, mut count) = (0.0, 0.0);
            for (score, _) in scores.iter().filter(|(_, positive)| *positive) {
                for (other, _) in scores.iter().filter(|(_, positive)| !*positive) {
                    wins += if score > other { 1.0 } else if score == other { 0.5 } else { 0.0 };
                    count += 1.0;
                }
            }
            match area(&mut scores) {
                Some(found) => prop_assert!((found - wins / count).abs() < 1e-9),
                None => prop_assert_eq!(count, 0.0),
            }
        }
    }
}
