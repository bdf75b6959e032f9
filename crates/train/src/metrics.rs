//! What predictions are worth: counted as they come, batch by batch.

use crate::config::MetricName;
use crate::task::{BatchLabels, LabelKind};
use serde::{Deserialize, Serialize};

/// Scores kept for a ROC curve, at most.
pub const MOST_SCORES: usize = 1 << 26;

/// The result of an evaluation.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Metrics {
    /// Nodes that counted.
    pub nodes: u64,
    /// Mean loss.
    pub loss: f64,
    /// Share of right classes or labels; none for real values.
    pub accuracy: Option<f64>,
    /// F1 of each class that occurs or is predicted, averaged.
    pub macro_f1: Option<f64>,
    /// Area under the ROC curve: of two classes, or of each label that has both values, averaged.
    pub auc: Option<f64>,
}

impl Metrics {
    /// The number that "best" looks at; larger is better.
    pub fn score(&self, metric: MetricName) -> f64 {
        let value = match metric {
            MetricName::Accuracy => self.accuracy,
            MetricName::MacroF1 => self.macro_f1,
            MetricName::Auc => self.auc,
            MetricName::Loss => Some(-self.loss),
        };
        value.unwrap_or(f64::NEG_INFINITY)
    }
}

/// Counts of one class.
#[derive(Debug, Clone, Copy, Default)]
struct Counts {
    right: u64,
    predicted: u64,
    actual: u64,
}

/// Takes up predictions and labels.
#[derive(Debug)]
pub struct Tally {
    kind: LabelKind,
    nodes: u64,
    losses: f64,
    classes: Vec<Counts>,
    right: u64,
    answers: u64,
    /// (score, positive) by column; one column for two classes.
    scores: Vec<Vec<(f32, bool)>>,
    kept: usize,
}

impl Tally {
    /// An empty one, for logits of `outputs` columns.
    pub fn new(kind: LabelKind, outputs: usize) -> Tally {
        let curves = match kind {
            LabelKind::Classes if outputs == 2 => 1,
            LabelKind::Multilabel => outputs,
            _ => 0,
        };
        Tally {
            kind,
            nodes: 0,
            losses: 0.0,
            classes: vec![Counts::default(); outputs],
            right: 0,
            answers: 0,
            scores: vec![Vec::new(); curves],
            kept: 0,
        }
    }

    /// Takes up rows of logits with their labels, and their mean loss.
    pub fn add(&mut self, logits: &[f32], labels: &BatchLabels, loss: f64) {
        let width = self.classes.len();
        let rows = logits.len().checked_div(width).unwrap_or(0);
        self.nodes += rows as u64;
        self.losses += loss * rows as f64;
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
            BatchLabels::Values(_) => {}
        }
    }

    fn add_class(&mut self, row: &[f32], class: usize) {
        let predicted = largest(row);
        self.right += (predicted == class) as u64;
        self.answers += 1;
        self.classes[predicted].predicted += 1;
        self.classes[class].actual += 1;
        self.classes[class].right += (predicted == class) as u64;
        if self.scores.len() == 1 && self.kept < MOST_SCORES {
            self.scores[0].push((row[1] - row[0], class == 1));
            self.kept += 1;
        }
    }

    fn add_labels(&mut self, row: &[f32], labels: &[f32]) {
        for (column, (logit, label)) in row.iter().zip(labels).enumerate() {
            if label.is_nan() {
                continue;
            }
            let (predicted, actual) = (*logit > 0.0, *label > 0.5);
            self.right += (predicted == actual) as u64;
            self.answers += 1;
            let counts = &mut self.classes[column];
            counts.predicted += predicted as u64;
            counts.actual += actual as u64;
            counts.right += (predicted && actual) as u64;
            if self.kept < MOST_SCORES {
                self.scores[column].push((*logit, actual));
                self.kept += 1;
            }
        }
    }

    /// The metrics of everything taken up.
    pub fn finish(mut self) -> Metrics {
        let whole = self.kept < MOST_SCORES;
        let areas: Vec<f64> = self.scores.iter_mut().filter_map(|scores| area(scores)).collect();
        let counted = self.kind != LabelKind::Real && self.answers > 0;
        Metrics {
            nodes: self.nodes,
            loss: self.losses / self.nodes.max(1) as f64,
            accuracy: counted.then(|| self.right as f64 / self.answers as f64),
            macro_f1: counted.then(|| macro_f1(&self.classes)),
            auc: (whole && !areas.is_empty()).then(|| areas.iter().sum::<f64>() / areas.len() as f64),
        }
    }
}

/// The first of the largest.
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

/// Area under the ROC curve, equal scores counting half; `None` when all are of one kind.
fn area(scores: &mut [(f32, bool)]) -> Option<f64> {
    scores.sort_by(|a, b| a.0.total_cmp(&b.0));
    let positives = scores.iter().filter(|(_, positive)| *positive).count() as f64;
    let negatives = scores.len() as f64 - positives;
    if positives == 0.0 || negatives == 0.0 {
        return None;
    }
    // Mann and Whitney: for each positive the negatives below it, and half of those beside it.
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
        let mut tally = Tally::new(LabelKind::Classes, 3);
        let logits = [1.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0, 3.0, 0.0, 5.0, 0.0, 0.0];
        tally.add(&logits, &BatchLabels::Classes(vec![0, 1, 0, 0]), 0.5);
        let metrics = tally.finish();
        assert_eq!((metrics.nodes, metrics.accuracy, metrics.auc), (4, Some(0.75), None));
        // Class 0: 2 right, 2 predicted, 3 actual; class 1: 1 right, 2 predicted, 1 actual; class 2 never occurs.
        let expected = (2.0 * 2.0 / 5.0 + 2.0 / 3.0) / 2.0;
        assert!((metrics.macro_f1.unwrap() - expected).abs() < 1e-12);
        assert_eq!(metrics.loss, 0.5);
    }

    #[test]
    fn unknown_labels_do_not_count() {
        let mut tally = Tally::new(LabelKind::Multilabel, 2);
        tally.add(&[1.0, -1.0, 1.0, 1.0], &BatchLabels::Binary(vec![1.0, f32::NAN, 0.0, 1.0]), 1.0);
        let metrics = tally.finish();
        assert_eq!(metrics.accuracy, Some(2.0 / 3.0));
        // Column 0 has one of each with equal scores; column 1 has only a positive.
        assert_eq!(metrics.auc, Some(0.5));
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
