//! Generated knowledge graphs: typed edges that a model of links can learn, and some of them held out.
//!
//! Nodes have a popularity rank, a pseudo-random permutation of their ids, and ranks are assigned to communities in turn
//! (`model.rs`). Communities lie on a ring, and relation r shifts it by some steps: most facts (s, r, t) have t in the
//! community that r maps the community of s to, and t and s are popular there. A shift is what TransE, RotatE and ComplEx
//! can represent, and DistMult up to its direction. Relations are skewed: relation r is drawn as u^3 of all.
//!
//! Facts are drawn by their target, so nothing is sorted, and whether a fact is held out is a function of (seed, fact).

use super::model::{PopularityDraws, in_degree};
use super::{Popularity, check_space, in_order};
use crate::build::{AdjacencyWriter, IdWriter, ImportJob, TopologyResult, out_neighbours};
use crate::{ImportError, ImportWorkspace, Result};
use esker_store::{
    ArrayWriter, EdgeInfo, FORMAT_VERSION, FileEntry, Manifest, NodeInfo, Provenance, RelationInfo,
    SplitInfo, SplitOver, Staging, file,
};
use esker_types::random::{Key, Permutation, below, unit};
use esker_types::{Dtype, IdWidth, Unit};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// How often a fact that is there already is drawn again.
const REDRAWS: u64 = 6;
/// Nodes of a community, within these bounds.
const COMMUNITY_NODES: (u64, u64) = (32, 8192);
/// Communities of a graph that is not too small or too large for them.
const COMMUNITIES: u64 = 1024;
/// Freebase86m: nodes, edges, relations.
const FREEBASE: (u64, u64, u64) = (86_054_151, 338_586_276, 14_824);
/// The fewest relations of a scaled graph.
const FEWEST_RELATIONS: u64 = 16;
/// The most relations: they are stored in 32 bits.
const MOST_RELATIONS: u64 = 1 << 31;

/// Parameters of a generated knowledge graph. All of them determine the result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FactShape {
    /// The preset it came from, if any.
    pub preset: Option<String>,
    /// Nodes.
    pub nodes: u64,
    /// Mean in-degree, held-out facts included.
    pub degree: f64,
    /// Relations.
    pub relations: u64,
    /// Share of facts whose source is drawn from all nodes.
    pub noise: f64,
    /// Skew of the popularity.
    pub popularity: Popularity,
    /// Share of facts held out for validation.
    pub valid: f64,
    /// Share of facts held out for test.
    pub test: f64,
    /// Store out-neighbours too.
    pub out_neighbours: bool,
    /// Random seed of everything.
    pub seed: u64,
}

impl FactShape {
    /// The name of the preset.
    pub const PRESET: &'static str = "freebase86m";
    /// One line for `--help`.
    pub const ABOUT: &'static str = "Freebase86m: 86 million nodes, 339 million typed edges of 14 824 relations, 5% each held out for validation and test; no features";

    /// Freebase86m with `scale` times the nodes, facts and relations.
    pub fn freebase86m(scale: f64) -> FactShape {
        let (nodes, edges, relations) = FREEBASE;
        let scaled = |count: u64| (count as f64 * scale).round() as u64;
        FactShape {
            preset: Some(FactShape::PRESET.to_string()),
            nodes: scaled(nodes).max(1),
            degree: edges as f64 / nodes as f64,
            relations: scaled(relations).max(FEWEST_RELATIONS),
            noise: 0.1,
            popularity: Popularity { exponent: 2.0, plateau: 0.03, hubs: 0.01 },
            valid: 0.05,
            test: 0.05,
            out_neighbours: false,
            seed: 1,
        }
    }

    /// Approximate size of the dataset in bytes.
    pub fn estimated_bytes(&self) -> u64 {
        let edges = self.nodes as f64 * self.degree;
        let id_bytes = IdWidth::for_nodes(self.nodes).dtype().bytes() as f64;
        let lists = edges * id_bytes + self.nodes as f64 * 8.0;
        let out = if self.out_neighbours { lists + edges * 4.0 } else { 0.0 };
        (lists + out + edges * 4.0 + edges * (self.valid + self.test) * 3.0 * id_bytes) as u64
    }

    fn check(&self) -> Result<()> {
        if self.nodes == 0 || self.relations == 0 {
            return Err(ImportError::EmptyFacts);
        }
        if self.nodes > esker_store::MOST_NODES || self.relations > MOST_RELATIONS {
            return Err(ImportError::HugeFacts { nodes: self.nodes, relations: self.relations });
        }
        let out_of_range = |flag, value, allowed| Err(ImportError::OutOfRange { flag, value, allowed });
        if !(self.degree >= 0.0 && self.degree <= 1e6) {
            return out_of_range("--degree", self.degree, "from 0 to 1 000 000");
        }
        let shares = [("--valid", self.valid), ("--test", self.test), ("--noise", self.noise)];
        for (flag, share) in shares {
            if !(0.0..=1.0).contains(&share) {
                return out_of_range(flag, share, "from 0 to 1");
            }
        }
        match self.valid + self.test < 1.0 {
            true => Ok(()),
            false => out_of_range("--test", self.test, "less than what --valid leaves"),
        }
    }
}

/// Generates a knowledge graph.
pub fn generate_facts(shape: &FactShape, job: &ImportJob) -> Result<Manifest> {
    shape.check()?;
    let text = serde_json::to_string(shape).expect("shapes are plain data");
    let fingerprint = format!("generate {} {text}", env!("CARGO_PKG_VERSION"));
    job.make(&fingerprint, |staging, workspace| {
        if workspace.journal.done::<WrittenFacts>("facts").is_none() {
            check_space(shape.estimated_bytes(), staging.directory(), workspace.progress)?;
        }
        build(shape, staging, workspace)
    })
}

fn build(shape: &FactShape, staging: &Staging, workspace: &ImportWorkspace) -> Result<Manifest> {
    let directory = staging.directory();
    let model = FactModel::new(shape);
    let written = workspace.step("facts", || write_facts(&model, directory, workspace))?;
    let WrittenFacts { topology, held_out } = written;
    let mut files = topology.files.clone();
    files.extend(out_neighbours(shape.out_neighbours, directory, &topology, workspace)?);
    let splits = SplitInfo {
        over: SplitOver::Edges,
        train: topology.edges,
        valid: held_out[0].rows,
        test: held_out[1].rows,
        negatives: Vec::new(),
    };
    files.extend(held_out);
    let serde_json::Value::Object(options) = serde_json::to_value(shape).expect("shapes are plain data")
    else {
        unreachable!("a shape is an object")
    };
    Ok(Manifest {
        esker: FORMAT_VERSION,
        checksum: String::new(),
        id: String::new(),
        made_by: format!("esker {}", env!("CARGO_PKG_VERSION")),
        source: Provenance { format: "generate".into(), options: options.into_iter().collect() },
        nodes: NodeInfo {
            count: shape.nodes,
            types: vec!["node".into()],
            features: None,
            labels: None,
            named: false,
        },
        edges: EdgeInfo {
            count: topology.edges,
            types: vec!["edge".into()],
            undirected: false,
            max_in_degree: topology.max_in_degree,
            without_in_neighbours: topology.without_in_neighbours,
            out_neighbours: shape.out_neighbours,
            relations: Some(RelationInfo { count: shape.relations, named: false }),
            columns: Vec::new(),
        },
        splits: Some(splits),
        files,
    }
    .complete())
}

#[derive(Serialize, Deserialize)]
struct WrittenFacts {
    topology: TopologyResult,
    held_out: Vec<FileEntry>,
}

/// Draws the facts of all targets in order, and writes each where it belongs.
fn write_facts(model: &FactModel, directory: &Path, workspace: &ImportWorkspace) -> Result<WrittenFacts> {
    workspace.progress.stage("draw facts", Some(model.nodes), Unit::Count("nodes"));
    let width = IdWidth::for_nodes(model.nodes);
    let names = [file::IN_OFFSETS, file::IN_NEIGHBOURS];
    let mut lists = AdjacencyWriter::create(directory, names, model.nodes, width)?;
    let mut relations = ArrayWriter::create(directory, file::EDGE_RELATION, Dtype::U32, 1)?;
    let mut held_out = [
        IdWriter::create(directory, file::SPLIT_VALID, width, 3)?,
        IdWriter::create(directory, file::SPLIT_TEST, width, 3)?,
    ];
    // A fact in memory is two words.
    let node_bytes = ((model.degree * 2.0 + 8.0) * 16.0) as u64;
    let host_bytes = workspace.budget.host_bytes;
    in_order(
        model.nodes,
        node_bytes,
        host_bytes,
        |target, out| model.facts(target, out),
        |first, block| {
            let mut own = Vec::new();
            for (target, facts) in (first..).zip(block.lists()) {
                for fact in facts {
                    match model.split(target, fact) {
                        Some(split) => {
                            held_out[split].push(fact.source)?;
                            held_out[split].push(target)?;
                            held_out[split].push(fact.relation as u64)?;
                        }
                        None => {
                            lists.push(target, fact.source)?;
                            own.push(fact.relation);
                        }
                    }
                }
            }
            relations.write_elements(&own)?;
            workspace.progress.advance(block.len() as u64);
            Ok(())
        },
    )?;
    let mut topology = lists.finish()?;
    topology.relations = model.relations;
    topology.files.push(relations.finish()?);
    let held_out = held_out.into_iter().map(IdWriter::finish).collect::<Result<_>>()?;
    workspace.progress.finish();
    Ok(WrittenFacts { topology, held_out })
}

/// A fact about its target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Fact {
    source: u64,
    relation: u32,
}

/// The random facts.
struct FactModel {
    nodes: u64,
    degree: f64,
    relations: u64,
    noise: f64,
    communities: u64,
    draws: PopularityDraws,
    ranks: Permutation,
    held_out: [f64; 2],
    degree_key: Key,
    fact_key: Key,
    shift_key: Key,
    split_key: Key,
}

impl FactModel {
    fn new(shape: &FactShape) -> FactModel {
        let root = Key::new(shape.seed);
        let (fewest, most) = COMMUNITY_NODES;
        let communities = (shape.nodes / (shape.nodes / COMMUNITIES).clamp(fewest, most)).max(1);
        FactModel {
            nodes: shape.nodes,
            degree: shape.degree,
            relations: shape.relations,
            noise: shape.noise,
            communities,
            draws: PopularityDraws::new(&shape.popularity),
            ranks: Permutation::new(shape.nodes, root.with(1)),
            held_out: [shape.valid, shape.valid + shape.test],
            degree_key: root.with(3),
            fact_key: root.with(4),
            shift_key: root.with(8),
            split_key: root.with(9),
        }
    }

    /// How far a relation shifts the ring of communities.
    fn shift(&self, relation: u32) -> u64 {
        below(self.shift_key.at(relation as u64), self.communities)
    }

    /// The facts about a target: ascending, each once, never about itself.
    fn facts(&self, target: u64, out: &mut Vec<Fact>) {
        out.clear();
        let rank = self.ranks.forward(target);
        let community = rank % self.communities;
        let key = self.fact_key.with(target);
        for slot in 0..in_degree(self.degree_key, &self.draws, self.degree, self.nodes, target, rank) {
            let draws = key.with(slot);
            for attempt in 0..=REDRAWS {
                let fact = self.draw(draws.with(attempt), community);
                if fact.source != target && !out.contains(&fact) {
                    out.push(fact);
                    break;
                }
            }
        }
        out.sort_unstable();
    }

    fn draw(&self, key: Key, community: u64) -> Fact {
        let share = unit(key.at(0));
        let relation =
            ((share * share * share * self.relations as f64) as u64).min(self.relations - 1) as u32;
        let x = self.draws.draw(key.at(1), key.at(2));
        let rank = match unit(key.at(3)) < self.noise {
            true => ((x * self.nodes as f64) as u64).min(self.nodes - 1),
            false => {
                let community = (community + self.communities - self.shift(relation)) % self.communities;
                let members = (self.nodes - community).div_ceil(self.communities);
                ((x * members as f64) as u64).min(members - 1) * self.communities + community
            }
        };
        Fact { source: self.ranks.backward(rank), relation }
    }

    /// 0 if a fact is held out for validation, 1 if for test.
    fn split(&self, target: u64, fact: &Fact) -> Option<usize> {
        let key = self.split_key.with(target).with(fact.source).with(fact.relation as u64);
        let share = unit(key.at(0));
        self.held_out.iter().position(|end| share < *end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn community(model: &FactModel, node: u64) -> u64 {
        model.ranks.forward(node) % model.communities
    }

    fn shape(nodes: u64, relations: u64, degree: f64) -> FactShape {
        FactShape { nodes, relations, degree, ..FactShape::freebase86m(0.001) }
    }

    proptest! {
        #[test]
        fn facts_are_sorted_sets_about_other_nodes(nodes in 1u64..3000, relations in 1u64..40, degree in 0.0f64..30.0) {
            let model = FactModel::new(&shape(nodes, relations, degree));
            let mut facts = Vec::new();
            for target in (0..nodes).step_by(17) {
                model.facts(target, &mut facts);
                prop_assert!(facts.windows(2).all(|pair| pair[0] < pair[1]));
                for fact in &facts {
                    prop_assert!(fact.source < nodes && fact.source != target);
                    prop_assert!((fact.relation as u64) < relations);
                }
            }
        }
    }

    #[test]
    fn most_facts_follow_the_map_of_their_relation() {
        let model = FactModel::new(&shape(50_000, 40, 4.0));
        let (mut facts, mut all, mut mapped, mut seen) = (Vec::new(), 0u64, 0u64, BTreeSet::new());
        let mut held_out = [0u64; 2];
        for target in 0..50_000 {
            model.facts(target, &mut facts);
            for fact in &facts {
                all += 1;
                seen.insert(fact.relation);
                let expected =
                    (community(&model, fact.source) + model.shift(fact.relation)) % model.communities;
                mapped += (expected == community(&model, target)) as u64;
                if let Some(split) = model.split(target, fact) {
                    held_out[split] += 1;
                }
            }
        }
        let share = mapped as f64 / all as f64;
        assert!((0.88..0.92).contains(&share), "{share}");
        assert_eq!(seen.len(), 40);
        assert!((3.6..4.05).contains(&(all as f64 / 50_000.0)), "{all}");
        for count in held_out {
            assert!((count as f64 / all as f64 - 0.05).abs() < 0.003, "{count} of {all}");
        }
    }

    #[test]
    fn the_whole_preset_has_the_published_counts() {
        let whole = FactShape::freebase86m(1.0);
        assert_eq!((whole.nodes, whole.relations), (86_054_151, 14_824));
        assert_eq!((whole.nodes as f64 * whole.degree).round() as u64, 338_586_276);
        assert_eq!(FactShape::freebase86m(0.0001).relations, 16);
        let bad = FactShape { valid: 0.6, test: 0.4, ..whole.clone() };
        assert!(bad.check().unwrap_err().to_string().contains("--test"));
        assert!(FactShape { relations: 0, ..whole }.check().is_err());
    }
}
