//! Samples that must never change: another processor, another release and a GPU must give these bits. A change here is
//! a change of the sampling algorithm, and of every recorded run.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

use esker_sample::order::{Batching, Order, Shuffled};
use esker_sample::{Carry, Direction, Fanout, Form, InMemory, Position, Sample, Sampler, Settings, StoredId};
use esker_types::NodeId;
use std::fmt::Write;

/// Node v has v % 13 incoming edges, every tenth node 70 more, from nodes spread over the graph; edge e is of kind 3e % 5.
fn graph<W: StoredId>() -> InMemory<W> {
    let list = |node: u64| {
        let degree = node % 13 + if node.is_multiple_of(10) { 70 } else { 0 };
        let mut list: Vec<u64> =
            (0..degree).map(|slot| (node * 31 + slot * slot * 17 + slot) % 100).collect();
        list.sort_unstable();
        list
    };
    let lists: Vec<Vec<u64>> = (0..100).map(list).collect();
    let kinds = (0..lists.concat().len() as u32).map(|edge| edge * 3 % 5).collect();
    InMemory::from_adjacency(&lists, Some(kinds))
}

fn line<T: Copy>(out: &mut String, name: &str, values: &[T], number: impl Fn(T) -> u64) {
    let numbers: Vec<String> = values.iter().map(|value| number(*value).to_string()).collect();
    writeln!(out, "{name}: {}", numbers.join(" ")).unwrap();
}

fn show(out: &mut String, name: &str, sample: &Sample) {
    writeln!(out, "# {name}").unwrap();
    line(out, "node_ids", &sample.node_ids, |node| node.0);
    line(out, "node_id_offsets", &sample.node_id_offsets, u64::from);
    line(out, "seeds", &sample.seeds, |seed| seed.0 as u64);
    line(out, "degrees", &sample.degrees, u64::from);
    line(out, "pulled", &[sample.pulled_at(1)], u64::from);
    for block in &sample.blocks {
        line(out, "nbr_offsets", &block.nbr_offsets, u64::from);
        line(out, "nbrs", &block.nbrs, |nbr| nbr.0 as u64);
        line(out, "positions", &block.positions, u64::from);
        line(out, "edges", &block.edges, |edge| edge.0);
        line(out, "relations", &block.relations, u64::from);
    }
}

#[test]
fn golden_samples_are_as_they_were() {
    let (mut out, mut sample) = (String::new(), Sample::default());
    let mut items = Vec::new();
    let order = Shuffled { batching: Batching::new(100, 4, false).unwrap(), seed: 42 };
    order.items(1, 2, &mut items).unwrap();
    line(&mut out, "shuffled seeds", &items, |item| item);
    let seeds: Vec<NodeId> = items.iter().chain(&items[..1]).map(|item| NodeId(*item)).collect();
    let at = Position { epoch: 1, batch: 2 };
    let graph = graph::<u32>();
    let settings = |form, fanouts: &[Fanout]| Settings {
        seed: 42,
        fanouts: fanouts.to_vec(),
        form,
        carry: Carry { positions: true, ..Carry::default() },
    };
    let (two, three) = (Fanout::AtMost(2), Fanout::AtMost(3));
    for (name, form) in [("dense", Form::Dense), ("layered", Form::Layered), ("shadow", Form::Shadow)] {
        let mut sampler = Sampler::new(&graph, settings(form, &[three, two]), 1 << 30).unwrap();
        sampler.sample(at, &seeds, &mut sample).unwrap();
        show(&mut out, name, &sample);
    }
    for (name, fanouts) in [("two", &[three, two][..]), ("three", &[three, two, three])] {
        let mut sampler = Sampler::new(&graph, settings(Form::Dense, fanouts), 1 << 30).unwrap();
        let pulls = &mut |hop: usize, _: usize, node: NodeId| hop == 1 && !node.0.is_multiple_of(3);
        sampler.sample_with_pulls(at, &seeds, pulls, &mut sample).unwrap();
        show(&mut out, &format!("dense, {name} layers, with pulled nodes"), &sample);
    }
    let wide = self::graph::<u64>().in_direction(Direction::Both);
    let carry = Carry { positions: true, edges: true, relations: true, degrees: true };
    let both = Settings { carry, ..settings(Form::Dense, &[two, Fanout::All]) };
    Sampler::new(&wide, both, 1 << 30).unwrap().sample(at, &seeds[..1], &mut sample).unwrap();
    show(&mut out, "both directions, then all, with edges, kinds and degrees", &sample);
    assert!(out == include_str!("golden.txt"), "samples changed; they are now:\n{out}");
}
