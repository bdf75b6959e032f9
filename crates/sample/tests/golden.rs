//! Samples that must never change: another processor, another release and a GPU must give these bits. A change here is
//! a change of the sampling algorithm, and of every recorded run.

use esker_sample::order::{Batching, Order, Shuffled};
use esker_sample::{Carry, Fanout, Form, InMemory, Position, Sample, Sampler, Settings};
use esker_types::NodeId;
use std::fmt::Write;

/// Node v has v % 13 incoming edges, every tenth node 70 more, from nodes spread over the graph.
fn graph() -> InMemory<u32> {
    let list = |node: u64| {
        let degree = node % 13 + if node.is_multiple_of(10) { 70 } else { 0 };
        let mut list: Vec<u64> =
            (0..degree).map(|slot| (node * 31 + slot * slot * 17 + slot) % 100).collect();
        list.sort_unstable();
        list
    };
    InMemory::from_lists(&(0..100).map(list).collect::<Vec<_>>(), None)
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
    line(out, "pruned", &sample.pruned, u64::from);
    for block in &sample.blocks {
        line(out, "nbr_offsets", &block.nbr_offsets, u64::from);
        line(out, "degrees", &block.degrees, u64::from);
        line(out, "nbrs", &block.nbrs, |nbr| nbr.0 as u64);
        line(out, "positions", &block.positions, u64::from);
    }
}

#[test]
fn golden_samples_are_as_they_were() {
    let carry = Carry { positions: true, ..Carry::default() };
    let (graph, mut out, mut sample) = (graph(), String::new(), Sample::default());
    let mut items = Vec::new();
    let order = Shuffled { batching: Batching::new(100, 4, false).unwrap(), seed: 42 };
    order.items(1, 2, &mut items).unwrap();
    line(&mut out, "shuffled seeds", &items, |item| item);
    let seeds: Vec<NodeId> = items.iter().chain(&items[..1]).map(|item| NodeId(*item)).collect();
    let at = Position { epoch: 1, batch: 2 };
    for (name, form) in [("dense", Form::Dense), ("layered", Form::Layered), ("shadow", Form::Shadow)] {
        let fanouts = vec![Fanout::AtMost(3), Fanout::AtMost(2)];
        let settings = Settings { seed: 42, fanouts, form, carry };
        let mut sampler = Sampler::new(&graph, settings, 1 << 30).unwrap();
        sampler.sample(at, &seeds, &mut sample).unwrap();
        show(&mut out, name, &sample);
        if form == Form::Dense {
            let mut expand = |_: u32, node: NodeId| node.0.is_multiple_of(3);
            sampler.sample_pruned(at, &seeds, &mut expand, &mut sample).unwrap();
            show(&mut out, "pruned", &sample);
        }
    }
    assert!(out == include_str!("golden.txt"), "samples changed; they are now:\n{out}");
}
