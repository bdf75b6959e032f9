//! Link prediction by definition, in f64, and the same through a backend's operations.

use super::numbers;
use esker_nn::*;
use esker_types::random::{Key, below};

/// One side of a batch of edges.
#[derive(Clone)]
pub struct LinkCase {
    pub decoder: DecoderKind,
    pub replaced: ReplacedEnd,
    pub loss: LinkLoss,
    pub scale: f32,
    /// A factor for each edge, or none.
    pub weights: Vec<f32>,
    pub columns: usize,
    pub nodes: Vec<f32>,
    pub relations: Vec<f32>,
    pub known: Vec<u32>,
    pub own: Vec<u32>,
    pub relation_of: Vec<u32>,
    /// Edges per chunk, candidates per chunk and their rows; `None` for all nodes.
    pub chunks: Option<(usize, usize, Vec<u32>)>,
    pub masked: Vec<(u32, u32)>,
}

/// Loss and gradients of a case.
pub struct LinkFound {
    pub loss: f64,
    pub nodes: Vec<f32>,
    pub relations: Vec<f32>,
}

pub const DECODERS: [DecoderKind; 6] = [
    DecoderKind::Dot,
    DecoderKind::DistMult,
    DecoderKind::TransE { norm: DistanceNorm::L1 },
    DecoderKind::TransE { norm: DistanceNorm::L2 },
    DecoderKind::ComplEx,
    DecoderKind::RotatE { phase_scale: 1.5 },
];

pub const LOSSES: [LinkLoss; 4] = [
    LinkLoss::Softmax,
    LinkLoss::Logistic,
    LinkLoss::Margin { margin: 1.5 },
    LinkLoss::SelfAdversarial { margin: 2.0, temperature: 0.7 },
];

pub const SIDES: [ReplacedEnd; 2] = [ReplacedEnd::Source, ReplacedEnd::Target];

pub const RELATIONS: usize = 5;

impl LinkCase {
    /// Random edges among `node_count` nodes. A `chunk_edges` of 0 is for all nodes as candidates.
    pub fn new(
        decoder: DecoderKind,
        loss: LinkLoss,
        replaced: ReplacedEnd,
        [node_count, edges, columns, chunk_edges, per_chunk]: [usize; 5],
        seed: u64,
    ) -> LinkCase {
        let key = Key::new(seed);
        let pick = |purpose: u64, count: usize, bound: usize| -> Vec<u32> {
            (0..count as u64).map(|at| below(key.with(purpose).at(at), bound as u64) as u32).collect()
        };
        let wide = decoder.relation_columns(columns).unwrap();
        let each = if chunk_edges == 0 { node_count } else { per_chunk };
        let mut masked: Vec<(u32, u32)> =
            pick(5, edges / 2, edges).into_iter().zip(pick(6, edges / 2, each.max(1))).collect();
        masked.sort_unstable();
        masked.dedup();
        if each == 0 {
            masked.clear();
        }
        let chunks = (chunk_edges > 0).then(|| {
            let count = edges.div_ceil(chunk_edges) * per_chunk;
            (chunk_edges, per_chunk, pick(4, count, node_count))
        });
        LinkCase {
            decoder,
            replaced,
            loss,
            scale: 0.3,
            // Cases of odd seeds have weights.
            weights: numbers(if seed % 2 == 1 { edges } else { 0 }, seed ^ 13)
                .iter()
                .map(|x| x.abs() + 0.1)
                .collect(),
            columns,
            nodes: numbers(node_count * columns, seed ^ 11),
            relations: numbers(RELATIONS * wide, seed ^ 12),
            known: pick(1, edges, node_count),
            own: pick(2, edges, node_count),
            relation_of: pick(3, edges, RELATIONS),
            chunks,
            masked,
        }
    }

    pub fn candidates(&self) -> Candidates<'_> {
        match &self.chunks {
            Some((chunk_edges, per_chunk, rows)) => {
                Candidates::Chunks { chunk_edges: *chunk_edges, per_chunk: *per_chunk, rows }
            }
            None => Candidates::All,
        }
    }

    fn weight(&self, edge: usize) -> f64 {
        self.weights.get(edge).map_or(1.0, |weight| *weight as f64)
    }

    fn node_count(&self) -> usize {
        self.nodes.len() / self.columns
    }

    /// The node rows of an edge's candidates, in order.
    pub fn candidates_of(&self, edge: usize) -> Vec<u32> {
        match &self.chunks {
            Some((chunk_edges, per_chunk, rows)) => {
                rows[edge / chunk_edges * per_chunk..][..*per_chunk].to_vec()
            }
            None => (0..self.node_count() as u32).collect(),
        }
    }

    fn is_masked(&self, edge: usize, at: usize) -> bool {
        self.masked.contains(&(edge as u32, at as u32))
            || (self.chunks.is_none() && self.own[edge] as usize == at)
    }

    pub fn node<'a>(&self, nodes: &'a [f64], row: u32) -> &'a [f64] {
        &nodes[row as usize * self.columns..][..self.columns]
    }

    /// The score of an edge with its replaced end, by definition.
    pub fn score(&self, nodes: &[f64], relations: &[f64], edge: usize, end: u32) -> f64 {
        let (known, end) = (self.node(nodes, self.known[edge]), self.node(nodes, end));
        let (source, target) = match self.replaced {
            ReplacedEnd::Source => (end, known),
            ReplacedEnd::Target => (known, end),
        };
        let wide = relations.len() / RELATIONS;
        let relation = &relations[self.relation_of[edge] as usize * wide..][..wide];
        score(self.decoder, source, relation, target)
    }

    /// The loss by definition.
    pub fn naive_loss(&self, nodes: &[f64], relations: &[f64]) -> f64 {
        let of_edge = |edge: usize| {
            let own = self.score(nodes, relations, edge, self.own[edge]);
            let candidates = self.candidates_of(edge).into_iter().enumerate();
            let negatives: Vec<f64> = candidates
                .filter(|(at, _)| !self.is_masked(edge, *at))
                .map(|(_, end)| self.score(nodes, relations, edge, end))
                .collect();
            loss(self.loss, own, &negatives, &negatives) * self.weight(edge)
        };
        (0..self.known.len()).map(of_edge).sum::<f64>() * self.scale as f64
    }

    /// Gradients by differences of the naive loss. Weights of self-adversarial negatives stay as they are.
    pub fn differences(&self) -> (Vec<f64>, Vec<f64>) {
        let wide = |values: &[f32]| values.iter().map(|x| *x as f64).collect::<Vec<f64>>();
        let (nodes, relations) = (wide(&self.nodes), wide(&self.relations));
        let fixed = (nodes.clone(), relations.clone());
        let total = |nodes: &[f64], relations: &[f64]| {
            let of_edge = |edge: usize| {
                let own = self.score(nodes, relations, edge, self.own[edge]);
                let ends: Vec<u32> = self
                    .candidates_of(edge)
                    .into_iter()
                    .enumerate()
                    .filter(|(at, _)| !self.is_masked(edge, *at))
                    .map(|(_, end)| end)
                    .collect();
                let scores = |nodes: &[f64], relations: &[f64]| -> Vec<f64> {
                    ends.iter().map(|end| self.score(nodes, relations, edge, *end)).collect()
                };
                let negatives = scores(nodes, relations);
                loss(self.loss, own, &negatives, &scores(&fixed.0, &fixed.1)) * self.weight(edge)
            };
            (0..self.known.len()).map(of_edge).sum::<f64>() * self.scale as f64
        };
        let step = 1e-5;
        let mut by_nodes = nodes.clone();
        let of_nodes = (0..nodes.len()).map(|at| {
            by_nodes[at] = nodes[at] + step;
            let above = total(&by_nodes, &relations);
            by_nodes[at] = nodes[at] - step;
            let below = total(&by_nodes, &relations);
            by_nodes[at] = nodes[at];
            (above - below) / (2.0 * step)
        });
        let of_nodes: Vec<f64> = of_nodes.collect();
        let mut by_relations = relations.clone();
        let of_relations = (0..relations.len()).map(|at| {
            by_relations[at] = relations[at] + step;
            let above = total(&nodes, &by_relations);
            by_relations[at] = relations[at] - step;
            let below = total(&nodes, &by_relations);
            by_relations[at] = relations[at];
            (above - below) / (2.0 * step)
        });
        (of_nodes, of_relations.collect())
    }

    /// Gradients by definition, edge by edge and candidate by candidate.
    pub fn naive_gradients(&self) -> (Vec<f64>, Vec<f64>) {
        let wide = |values: &[f32]| values.iter().map(|x| *x as f64).collect::<Vec<f64>>();
        let (nodes, relations) = (wide(&self.nodes), wide(&self.relations));
        let (mut of_nodes, mut of_relations) = (vec![0.0; nodes.len()], vec![0.0; relations.len()]);
        for edge in 0..self.known.len() {
            let ends: Vec<u32> = self
                .candidates_of(edge)
                .into_iter()
                .enumerate()
                .filter(|(at, _)| !self.is_masked(edge, *at))
                .map(|(_, end)| end)
                .collect();
            let own = self.score(&nodes, &relations, edge, self.own[edge]);
            let scores: Vec<f64> =
                ends.iter().map(|end| self.score(&nodes, &relations, edge, *end)).collect();
            let (of_own, of_scores) = slopes(self.loss, own, &scores);
            let weight = self.weight(edge);
            self.add_slope(
                &nodes,
                &relations,
                edge,
                self.own[edge],
                weight * of_own,
                (&mut of_nodes, &mut of_relations),
            );
            for (end, slope) in ends.iter().zip(of_scores) {
                self.add_slope(
                    &nodes,
                    &relations,
                    edge,
                    *end,
                    weight * slope,
                    (&mut of_nodes, &mut of_relations),
                );
            }
        }
        let scale = |all: Vec<f64>| all.into_iter().map(|x| x * self.scale as f64).collect();
        (scale(of_nodes), scale(of_relations))
    }

    fn add_slope(
        &self,
        nodes: &[f64],
        relations: &[f64],
        edge: usize,
        end: u32,
        slope: f64,
        (of_nodes, of_relations): (&mut [f64], &mut [f64]),
    ) {
        let (source, target) = match self.replaced {
            ReplacedEnd::Source => (end, self.known[edge]),
            ReplacedEnd::Target => (self.known[edge], end),
        };
        let wide = relations.len() / RELATIONS;
        let relation = self.relation_of[edge] as usize * wide;
        let [by_source, by_relation, by_target] = derivatives(
            self.decoder,
            self.node(nodes, source),
            &relations[relation..][..wide],
            self.node(nodes, target),
        );
        let add =
            |to: &mut [f64], from: Vec<f64>| to.iter_mut().zip(from).for_each(|(to, x)| *to += slope * x);
        add(&mut of_nodes[source as usize * self.columns..], by_source);
        add(&mut of_nodes[target as usize * self.columns..], by_target);
        add(&mut of_relations[relation..], by_relation);
    }

    /// Loss and gradients by a backend's operations. `by_node` sums candidates inside the loss.
    pub fn run<B: LinkMath>(&self, backend: &B, by_node: bool) -> LinkFound {
        let (edges, columns, nodes) = (self.known.len(), self.columns, self.node_count());
        let matrix = |rows: usize, values: &[f32]| {
            let mut matrix = backend.matrix(rows, values.len().checked_div(rows).unwrap_or(0));
            backend.write(&mut matrix, 0, values);
            matrix
        };
        let node_rows = matrix(nodes, &self.nodes);
        let relation_rows = (!self.relations.is_empty()).then(|| matrix(RELATIONS, &self.relations));
        let call = QueryCall {
            decoder: self.decoder,
            replaced: self.replaced,
            nodes: &node_rows,
            known: &self.known,
            relations: relation_rows.as_ref(),
            relation_of: &self.relation_of,
        };
        let mut queries = backend.matrix(edges, columns);
        backend.link_queries(&call, &mut queries);
        let candidates = match &self.chunks {
            Some((_, _, rows)) => rows.clone(),
            None => (0..nodes as u32).collect(),
        };
        let scores = ScoreCall {
            decoder: self.decoder,
            queries: &queries,
            nodes: &node_rows,
            candidates: self.candidates(),
        };
        let (scale, weights) = (self.scale, &self.weights[..]);
        let loss = LossCall { loss: self.loss, scale, weights, own: &self.own, masked: &self.masked };
        let (mut of_known, mut of_own) = (backend.matrix(edges, columns), backend.matrix(edges, columns));
        let rows = if by_node { nodes } else { candidates.len() };
        let mut of_candidates = backend.matrix(rows, columns);
        let (offsets, members) = csr(nodes, &[&candidates]);
        let into = LinkGradients {
            queries: &mut of_known,
            own: &mut of_own,
            candidates: match by_node {
                true => CandidateGradients::ByNode {
                    offsets: &offsets,
                    members: &members,
                    to: &mut of_candidates,
                },
                false => CandidateGradients::Rows(&mut of_candidates),
            },
        };
        let found = backend.link_loss(&scores, &loss, into).unwrap().wait().unwrap();
        let mut of_relations = relation_rows.as_ref().map(|rows| backend.matrix(edges, rows.columns()));
        backend.link_queries_backward(&call, &mut of_known, of_relations.as_mut());
        let read = |matrix: &B::Matrix| {
            let mut values = vec![0.0; matrix.rows() * matrix.columns()];
            backend.read(matrix, 0, &mut values);
            values
        };
        let all_nodes: Vec<u32> = (0..nodes as u32).collect();
        let last = if by_node { &all_nodes } else { &candidates };
        let (offsets, members) = csr(nodes, &[&self.known, &self.own, last]);
        let mut summed = backend.matrix(nodes, columns);
        backend.sum_rows(&[&of_known, &of_own, &of_candidates], &offsets, &members, &mut summed);
        let relations = of_relations.map_or(Vec::new(), |of_relations| {
            let (offsets, members) = csr(RELATIONS, &[&self.relation_of]);
            let mut summed = backend.matrix(RELATIONS, of_relations.columns());
            backend.sum_rows(&[&of_relations], &offsets, &members, &mut summed);
            read(&summed)
        });
        LinkFound { loss: found, nodes: read(&summed), relations }
    }
}

/// For each row, the positions where it occurs in the concatenated lists.
pub fn csr(rows: usize, lists: &[&Vec<u32>]) -> (Vec<u32>, Vec<u32>) {
    let mut positions = vec![Vec::new(); rows];
    for (position, row) in lists.iter().flat_map(|list| list.iter()).enumerate() {
        positions[*row as usize].push(position as u32);
    }
    let mut offsets = vec![0];
    positions.iter().for_each(|list| offsets.push(offsets[offsets.len() - 1] + list.len() as u32));
    (offsets, positions.concat())
}

fn complex(row: &[f64], at: usize) -> [f64; 2] {
    [row[at], row[row.len() / 2 + at]]
}

fn times([a, b]: [f64; 2], [c, d]: [f64; 2]) -> [f64; 2] {
    [a * c - b * d, a * d + b * c]
}

fn rotation(decoder: DecoderKind, relation: &[f64], at: usize) -> [f64; 2] {
    let DecoderKind::RotatE { phase_scale } = decoder else { return complex(relation, at) };
    let angle = phase_scale as f64 * relation[at];
    [angle.cos(), angle.sin()]
}

fn score(decoder: DecoderKind, s: &[f64], r: &[f64], t: &[f64]) -> f64 {
    let all = 0..s.len();
    let half = 0..s.len() / 2;
    match decoder {
        DecoderKind::Dot => all.map(|at| s[at] * t[at]).sum(),
        DecoderKind::DistMult => all.map(|at| s[at] * r[at] * t[at]).sum(),
        DecoderKind::TransE { norm: DistanceNorm::L1 } => {
            -all.map(|at| (s[at] + r[at] - t[at]).abs()).sum::<f64>()
        }
        DecoderKind::TransE { norm: DistanceNorm::L2 } => {
            -all.map(|at| (s[at] + r[at] - t[at]).powi(2)).sum::<f64>().sqrt()
        }
        DecoderKind::ComplEx => half
            .map(|at| {
                let ([a, b], [c, d]) = (times(complex(s, at), complex(r, at)), complex(t, at));
                a * c + b * d
            })
            .sum(),
        DecoderKind::RotatE { .. } => -half
            .map(|at| {
                let ([a, b], [c, d]) = (times(complex(s, at), rotation(decoder, r, at)), complex(t, at));
                ((a - c).powi(2) + (b - d).powi(2)).sqrt()
            })
            .sum::<f64>(),
    }
}

/// Derivatives of a score by source, relation and target.
fn derivatives(decoder: DecoderKind, s: &[f64], r: &[f64], t: &[f64]) -> [Vec<f64>; 3] {
    let zeros = [vec![0.0; s.len()], vec![0.0; r.len()], vec![0.0; t.len()]];
    let [mut by_s, mut by_r, mut by_t] = zeros;
    match decoder {
        DecoderKind::Dot => return [t.to_vec(), by_r, s.to_vec()],
        DecoderKind::DistMult => {
            for at in 0..s.len() {
                (by_s[at], by_r[at], by_t[at]) = (r[at] * t[at], s[at] * t[at], s[at] * r[at]);
            }
        }
        DecoderKind::TransE { norm } => {
            let distance = -score(decoder, s, r, t);
            for at in 0..s.len() {
                let difference = s[at] + r[at] - t[at];
                let slope = match norm {
                    DistanceNorm::L1 if difference == 0.0 => 0.0,
                    DistanceNorm::L1 => difference.signum(),
                    DistanceNorm::L2 if distance == 0.0 => 0.0,
                    DistanceNorm::L2 => difference / distance,
                };
                (by_s[at], by_r[at], by_t[at]) = (-slope, -slope, slope);
            }
        }
        DecoderKind::ComplEx => {
            let half = s.len() / 2;
            for at in 0..half {
                let (cs, cr, ct) = (complex(s, at), complex(r, at), complex(t, at));
                let conjugate = |[a, b]: [f64; 2]| [a, -b];
                [by_s[at], by_s[half + at]] = times(ct, conjugate(cr));
                [by_r[at], by_r[half + at]] = times(ct, conjugate(cs));
                [by_t[at], by_t[half + at]] = times(cs, cr);
            }
        }
        DecoderKind::RotatE { phase_scale } => {
            let half = s.len() / 2;
            for at in 0..half {
                let turn = rotation(decoder, r, at);
                let [a, b] = times(complex(s, at), turn);
                let [c, d] = complex(t, at);
                let modulus = ((a - c).powi(2) + (b - d).powi(2)).sqrt();
                if modulus == 0.0 {
                    continue;
                }
                let [x, y] = [(a - c) / modulus, (b - d) / modulus];
                [by_s[at], by_s[half + at]] = times([-x, -y], [turn[0], -turn[1]]);
                [by_t[at], by_t[half + at]] = [x, y];
                by_r[at] = -phase_scale as f64 * (x * -b + y * a);
            }
        }
    }
    [by_s, by_r, by_t]
}

fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn shares(temperature: f64, scores: &[f64]) -> Vec<f64> {
    let most = scores.iter().fold(f64::NEG_INFINITY, |most, x| most.max(*x));
    let powers: Vec<f64> = scores.iter().map(|x| (temperature * (x - most)).exp()).collect();
    let sum: f64 = powers.iter().sum();
    powers.into_iter().map(|x| x / sum).collect()
}

/// The loss of an edge. Weights of self-adversarial negatives come from `weighing`.
fn loss(kind: LinkLoss, own: f64, negatives: &[f64], weighing: &[f64]) -> f64 {
    let mean = |each: &dyn Fn(f64) -> f64| {
        negatives.iter().map(|x| each(*x)).sum::<f64>() / negatives.len().max(1) as f64
    };
    match kind {
        LinkLoss::Softmax => {
            let most = negatives.iter().fold(own, |most, x| most.max(*x));
            (negatives.iter().map(|x| (x - most).exp()).sum::<f64>() + (own - most).exp()).ln() + most - own
        }
        LinkLoss::Logistic => softplus(-own) + mean(&softplus),
        LinkLoss::Margin { margin } => mean(&|x| (margin as f64 - own + x).max(0.0)),
        LinkLoss::SelfAdversarial { margin, temperature } => {
            let weights = shares(temperature as f64, weighing);
            let negative: f64 =
                negatives.iter().zip(weights).map(|(x, w)| w * softplus(margin as f64 + x)).sum();
            0.5 * (softplus(-margin as f64 - own) + negative)
        }
    }
}

/// Derivatives of the loss by the edge's own score and by its negatives'.
fn slopes(kind: LinkLoss, own: f64, negatives: &[f64]) -> (f64, Vec<f64>) {
    let share = 1.0 / negatives.len().max(1) as f64;
    match kind {
        LinkLoss::Softmax => {
            let all: Vec<f64> = negatives.iter().copied().chain([own]).collect();
            let mut shares = shares(1.0, &all);
            let of_own = shares.pop().unwrap() - 1.0;
            (of_own, shares)
        }
        LinkLoss::Logistic => (-sigmoid(-own), negatives.iter().map(|x| share * sigmoid(*x)).collect()),
        LinkLoss::Margin { margin } => {
            let slopes: Vec<f64> =
                negatives.iter().map(|x| if margin as f64 - own + x > 0.0 { share } else { 0.0 }).collect();
            (-slopes.iter().sum::<f64>(), slopes)
        }
        LinkLoss::SelfAdversarial { margin, temperature } => {
            let weights = shares(temperature as f64, negatives);
            let of_negatives =
                negatives.iter().zip(weights).map(|(x, w)| 0.5 * w * sigmoid(margin as f64 + x));
            (-0.5 * sigmoid(-margin as f64 - own), of_negatives.collect())
        }
    }
}

/// Asserts that numbers agree, relative to the largest.
pub fn assert_close(what: &str, tolerance: f64, found: &[f32], expected: &[f64]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(1e-2f64, |most, x| most.max(x.abs()));
    for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (*found as f64 - expected).abs() / largest;
        assert!(error <= tolerance, "{what}[{at}]: {found} against {expected}, error {error:e}");
    }
}

/// A backend's loss and gradients against the definition.
pub fn check<B: LinkMath>(backend: &B, case: &LinkCase, by_node: bool, tolerance: f64) {
    let what = format!("{:?} {:?} {:?}", case.decoder, case.loss, case.replaced);
    let wide = |values: &[f32]| values.iter().map(|x| *x as f64).collect::<Vec<f64>>();
    let found = case.run(backend, by_node);
    let expected = case.naive_loss(&wide(&case.nodes), &wide(&case.relations));
    let error = (found.loss - expected).abs() / expected.abs().max(1.0);
    assert!(error <= tolerance, "{what}: loss {} against {expected}", found.loss);
    let (of_nodes, of_relations) = case.naive_gradients();
    assert_close(&format!("{what} nodes"), tolerance, &found.nodes, &of_nodes);
    assert_close(&format!("{what} relations"), tolerance, &found.relations, &of_relations);
}
