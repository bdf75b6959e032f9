//! The random graph. Everything about a node is a function of the random seed and its id, so nothing is kept in memory
//! and any thread can draw any part.
//!
//! Nodes have a popularity rank, a pseudo-random permutation of their ids. Ranks are assigned to communities in turn,
//! so that every community has popular and unpopular members; a class is a range of communities. The sources of a
//! target's in-edges are drawn from its community, its class, or anywhere, always by popularity. Because ranks are
//! assigned evenly, "a popular member of community c" is arithmetic and needs no table.

use super::{GraphShape, Popularity};
use crate::build::share_of;
use esker_types::random::{Key, Permutation, below, normal, unit};
use rustc_hash::FxHashSet;

/// Of the in-edges that stay in the class, the share that stays in the community.
const COMMUNITY_SHARE: f64 = 0.6;
/// Of a node's in-degree, the share that does not depend on its popularity.
const DEGREE_FLOOR: f64 = 0.5;
/// Hubs: x = u^6, so the density is x^(1/6 - 1) / 6.
const HUB_POWER: i32 = 6;
/// Points of the table of the quantile function.
const QUANTILES: usize = 1 << 14;
/// How often a duplicate draw is repeated.
const REDRAWS: u64 = 6;
/// Above this in-degree, duplicates are found with a set, else by scanning the neighbours.
const FEW_NEIGHBOURS: u64 = 64;

/// The random graph.
pub(super) struct GraphModel {
    nodes: u64,
    dim: usize,
    degree: f64,
    homophily: f64,
    label_noise: f64,
    communities: u64,
    /// Class `c` owns communities `class_starts[c]..class_starts[c + 1]`.
    class_starts: Vec<u64>,
    draws: PopularityDraws,
    ranks: Permutation,
    order: Permutation,
    split_ends: [u64; 3],
    centroids: Vec<f32>,
    degree_key: Key,
    edge_key: Key,
    feature_key: Key,
    label_key: Key,
}

impl GraphModel {
    pub fn new(shape: &GraphShape) -> GraphModel {
        let root = Key::new(shape.seed);
        let nodes = shape.nodes;
        let community_nodes = (nodes / 4096).clamp(256, 8192);
        let communities = (nodes / community_nodes).max(shape.classes).max(1);
        let dim = shape.dim as usize;
        let centroid_key = root.with(6);
        let centroids =
            (0..shape.classes * shape.dim).map(|at| normal(centroid_key.at(at)) * shape.signal as f32);
        let train = share_of(nodes, shape.train);
        let valid = train + share_of(nodes, shape.valid);
        let test = (valid + share_of(nodes, shape.test)).min(nodes);
        GraphModel {
            nodes,
            dim,
            // Reversing doubles the number of edges.
            degree: if shape.undirected { shape.degree / 2.0 } else { shape.degree },
            homophily: shape.homophily,
            label_noise: shape.label_noise,
            communities,
            class_starts: class_starts(shape.classes, communities),
            draws: PopularityDraws::new(&shape.popularity),
            ranks: Permutation::new(nodes, root.with(1)),
            order: Permutation::new(nodes, root.with(2)),
            split_ends: [train, valid, test],
            centroids: centroids.collect(),
            degree_key: root.with(3),
            edge_key: root.with(4),
            feature_key: root.with(5),
            label_key: root.with(7),
        }
    }

    pub fn nodes(&self) -> u64 {
        self.nodes
    }

    pub fn mean_degree(&self) -> f64 {
        self.degree
    }

    pub fn dim(&self) -> usize {
        self.dim
    }

    fn community(&self, node: u64) -> u64 {
        self.ranks.forward(node) % self.communities
    }

    fn class_of_community(&self, community: u64) -> u64 {
        self.class_starts.partition_point(|start| *start <= community) as u64 - 1
    }

    /// The class that determines a node's edges and features.
    pub fn class(&self, node: u64) -> u64 {
        self.class_of_community(self.community(node))
    }

    /// The label in the dataset: mostly the class.
    pub fn label(&self, node: u64) -> u64 {
        let key = self.label_key.with(node);
        if unit(key.at(0)) < self.label_noise {
            below(key.at(1), self.class_starts.len() as u64 - 1)
        } else {
            self.class(node)
        }
    }

    /// 0 train, 1 valid, 2 test.
    pub fn split(&self, node: u64) -> Option<usize> {
        let at = self.order.forward(node);
        self.split_ends.iter().position(|end| at < *end)
    }

    pub fn features(&self, node: u64, row: &mut [f32]) {
        let class = self.class(node) as usize;
        let key = self.feature_key.with(node);
        let centroid = &self.centroids[class * self.dim..][..self.dim];
        for (index, (value, centre)) in row.iter_mut().zip(centroid).enumerate() {
            *value = centre + normal(key.at(index as u64));
        }
    }

    /// The sources of a node's in-edges: ascending, each once, never the node itself. Each in-edge has a circle
    /// (community, class or anywhere). It leaves the circle only if that has no new source, so that homophily is as
    /// requested.
    pub fn in_neighbours(&self, node: u64, list: &mut Vec<u64>) {
        list.clear();
        let rank = self.ranks.forward(node);
        let community = rank % self.communities;
        let class = self.class_of_community(community) as usize;
        let requested = in_degree(self.degree_key, &self.draws, self.degree, self.nodes, node, rank);
        let key = self.edge_key.with(node);
        let mut taken = Taken::for_about(requested);
        for slot in 0..requested {
            let kind = unit(key.at(slot));
            let draws = key.with(slot);
            for attempt in 0..=REDRAWS {
                // If a circle has no new source, the next wider circle is used.
                let kind = match attempt {
                    0 | 1 => kind,
                    REDRAWS => 1.0,
                    _ => kind.max(self.homophily * COMMUNITY_SHARE),
                };
                let source = self.draw_source(draws, attempt, kind, community, class);
                if source != node && taken.insert(source, list) {
                    list.push(source);
                    break;
                }
            }
        }
        list.sort_unstable();
    }

    fn draw_source(&self, key: Key, attempt: u64, kind: f64, community: u64, class: usize) -> u64 {
        let x = self.draws.draw(key.at(attempt * 3), key.at(attempt * 3 + 1));
        let rank = if kind < self.homophily {
            let community = if kind < self.homophily * COMMUNITY_SHARE {
                community
            } else {
                let (start, end) = (self.class_starts[class], self.class_starts[class + 1]);
                start + below(key.at(attempt * 3 + 2), end - start)
            };
            let members = (self.nodes - community).div_ceil(self.communities);
            ((x * members as f64) as u64).min(members - 1) * self.communities + community
        } else {
            ((x * self.nodes as f64) as u64).min(self.nodes - 1)
        };
        self.ranks.backward(rank)
    }
}

/// Draws popularity ranks.
pub(super) struct PopularityDraws {
    popularity: Popularity,
    quantiles: Vec<f64>,
}

impl PopularityDraws {
    pub fn new(popularity: &Popularity) -> PopularityDraws {
        PopularityDraws { popularity: *popularity, quantiles: quantiles(popularity) }
    }

    /// A popularity rank in 0..1.
    pub fn draw(&self, choice: u64, bits: u64) -> f64 {
        if unit(choice) < self.popularity.hubs {
            return unit(bits).powi(HUB_POWER);
        }
        let at = unit(bits) * QUANTILES as f64;
        let (low, part) = (at as usize, at.fract());
        self.quantiles[low] + (self.quantiles[low + 1] - self.quantiles[low]) * part
    }
}

/// Number of in-edges to draw for a node: half of the mean `degree`, and more by its popularity.
pub(super) fn in_degree(
    key: Key,
    draws: &PopularityDraws,
    degree: f64,
    nodes: u64,
    node: u64,
    rank: u64,
) -> u64 {
    let x = (rank as f64 + 0.5) / nodes as f64;
    let popular = density(&draws.popularity, x);
    let requested = degree * (DEGREE_FLOOR + (1.0 - DEGREE_FLOOR) * popular);
    let most = (nodes - 1).min(nodes / 4 + 16);
    let whole = requested.floor();
    let more = unit(key.at(node)) < requested - whole;
    (whole as u64 + more as u64).min(most)
}

/// The sources that a node already has.
enum Taken {
    Scanned,
    Set(FxHashSet<u64>),
}

impl Taken {
    fn for_about(count: u64) -> Taken {
        if count <= FEW_NEIGHBOURS { Taken::Scanned } else { Taken::Set(FxHashSet::default()) }
    }

    /// Whether `source` is new.
    fn insert(&mut self, source: u64, list: &[u64]) -> bool {
        match self {
            Taken::Scanned => !list.contains(&source),
            Taken::Set(set) => set.insert(source),
        }
    }
}

/// Popularity of a node of rank x relative to the mean.
fn density(popularity: &Popularity, x: f64) -> f64 {
    let Popularity { exponent, plateau, hubs } = *popularity;
    let tail = libm::pow((1.0 + plateau) / plateau, 1.0 - exponent);
    let body = (exponent - 1.0) / plateau / (1.0 - tail) * libm::pow((x + plateau) / plateau, -exponent);
    let power = 1.0 / HUB_POWER as f64;
    (1.0 - hubs) * body + hubs * power * libm::pow(x, power - 1.0)
}

/// The inverse of the share of draws on ranks below x, at evenly spaced shares.
fn quantiles(popularity: &Popularity) -> Vec<f64> {
    let Popularity { exponent, plateau, .. } = *popularity;
    let tail = libm::pow((1.0 + plateau) / plateau, 1.0 - exponent);
    (0..=QUANTILES)
        .map(|at| {
            let share = at as f64 / QUANTILES as f64;
            plateau * (libm::pow(1.0 - share * (1.0 - tail), 1.0 / (1.0 - exponent)) - 1.0)
        })
        .collect()
}

/// Class sizes decrease like 1 / sqrt(c + 4): some classes are several times larger than others, none is empty.
fn class_starts(classes: u64, communities: u64) -> Vec<u64> {
    let weight = |class: u64| 1.0 / libm::sqrt(class as f64 + 4.0);
    let total: f64 = (0..classes).map(weight).sum();
    // One community per class, the rest by weight.
    let spare = (communities - classes) as f64;
    let (mut starts, mut sum) = (vec![0], 0.0);
    for class in 0..classes {
        sum += weight(class);
        starts.push(class + 1 + (spare * sum / total) as u64);
    }
    starts[classes as usize] = communities;
    starts
}

#[cfg(test)]
mod tests {
    use super::super::PRESETS;
    use super::*;
    use proptest::prelude::*;

    fn model(nodes: u64, classes: u64, degree: f64) -> GraphModel {
        let shape = GraphShape { nodes, classes, degree, dim: 4, ..PRESETS[0].shape(1.0) };
        GraphModel::new(&shape)
    }

    proptest! {
        #[test]
        fn lists_are_sorted_sets_of_other_nodes(nodes in 1u64..3000, classes in 1u64..20, degree in 0.0f64..40.0) {
            let model = model(nodes, classes.min(nodes), degree);
            let mut list = Vec::new();
            for node in (0..nodes).step_by(17) {
                model.in_neighbours(node, &mut list);
                prop_assert!(list.windows(2).all(|pair| pair[0] < pair[1]));
                prop_assert!(list.iter().all(|source| *source < nodes && *source != node));
                prop_assert!(model.label(node) < classes.min(nodes));
            }
        }
    }

    #[test]
    fn every_class_has_nodes_and_neighbours_mostly_share_it() {
        let model = model(20_000, 8, 20.0);
        let mut sizes = [0u64; 8];
        (0..20_000).for_each(|node| sizes[model.class(node) as usize] += 1);
        assert!(sizes.iter().all(|size| *size > 1000), "{sizes:?}");
        let (mut same, mut all, mut list) = (0, 0, Vec::new());
        for node in 0..20_000 {
            model.in_neighbours(node, &mut list);
            all += list.len();
            same += list.iter().filter(|source| model.class(**source) == model.class(node)).count();
        }
        let (homophily, degree) = (same as f64 / all as f64, all as f64 / 20_000.0);
        assert!(homophily > 0.6 && homophily < 0.85, "{homophily}");
        // A graph this small has too few new neighbours for its most popular nodes.
        assert!((15.0..=20.5).contains(&degree), "{degree}");
    }

    #[test]
    fn splits_have_exactly_their_shares() {
        let shape =
            GraphShape { nodes: 10_000, train: 0.1, valid: 0.05, test: 0.2, ..PRESETS[0].shape(0.001) };
        let model = GraphModel::new(&shape);
        let mut counts = [0; 3];
        (0..10_000).filter_map(|node| model.split(node)).for_each(|split| counts[split] += 1);
        assert_eq!(counts, [1000, 500, 2000]);
    }

    #[test]
    fn quantiles_run_from_the_most_to_the_least_popular() {
        for preset in PRESETS {
            let quantiles = quantiles(&preset.shape(1.0).popularity);
            assert!(quantiles[0].abs() < 1e-12 && (quantiles[QUANTILES] - 1.0).abs() < 1e-9);
            assert!(quantiles.windows(2).all(|pair| pair[0] < pair[1]));
        }
    }
}
