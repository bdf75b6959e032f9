//! Traces: what is written comes back, from either end; what is damaged is refused and named.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

use esker_sample::trace::{TraceHeader, TraceReader, TraceSummary, TraceWriter};
use esker_sample::{Carry, Direction, Fanout, Form, InMemory, Position, Sample, Sampler, Settings};
use esker_types::NodeId;
use proptest::prelude::*;
use std::fs;
use std::path::Path;

fn settings(form: Form, fanouts: Vec<Fanout>, carry: bool) -> Settings {
    Settings {
        seed: 5,
        fanouts,
        form,
        carry: Carry { positions: carry, edges: carry, relations: carry, degrees: carry },
    }
}

/// Samples some batches of a graph, the second one with repeated seeds, the last one with pulled nodes if it can be.
fn samples(graph: &InMemory<u32>, settings: &Settings, nodes: u64) -> Vec<(Position, Sample)> {
    let mut sampler = Sampler::new(graph, settings.clone(), 1 << 30).unwrap();
    (0..4)
        .map(|batch| {
            let at = Position { epoch: 1, batch };
            let step = if batch == 1 { 0 } else { 1 + batch };
            let seeds: Vec<NodeId> = (0..5).map(|seed| NodeId((seed * step + batch) % nodes)).collect();
            let mut sample = Sample::default();
            if settings.check_pulls().is_ok() && batch == 3 {
                let pulls = &mut |hop: usize, _: usize, node: NodeId| node.0 % 3 == hop as u64 % 3;
                sampler.sample_with_pulls(at, &seeds, pulls, &mut sample).unwrap();
            } else {
                sampler.sample(at, &seeds, &mut sample).unwrap();
            }
            (at, sample)
        })
        .collect()
}

fn write(
    path: &Path,
    lists: &[Vec<u64>],
    direction: Direction,
    settings: Settings,
) -> Vec<(Position, Sample)> {
    let edges = lists.iter().map(Vec::len).sum::<usize>();
    let kinds: Vec<u32> = (0..edges as u32).map(|edge| edge % 7).collect();
    let graph = InMemory::from_adjacency(lists, Some(kinds)).in_direction(direction);
    let samples = samples(&graph, &settings, lists.len() as u64);
    let (dataset, nodes, edges) = ("test".to_string(), lists.len() as u64, edges as u64);
    let mut writer = TraceWriter::create(
        path,
        TraceHeader { dataset, nodes, edges, relations: 7, direction, batches: "given".into(), settings },
    )
    .unwrap();
    samples.iter().for_each(|(at, sample)| writer.write(*at, sample).unwrap());
    let summary: TraceSummary = writer.finish().unwrap();
    assert_eq!(summary.bytes, fs::metadata(path).unwrap().len());
    samples
}

fn lists() -> impl Strategy<Value = Vec<Vec<u64>>> {
    (1u64..80).prop_flat_map(|nodes| {
        let list = prop::collection::vec(0..nodes, 0..120).prop_map(|mut list| {
            list.sort_unstable();
            list
        });
        prop::collection::vec(list, nodes as usize)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn samples_come_back_from_both_ends(
        lists in lists(), form in 0usize..3, direction in 0usize..3, carry: bool, all: bool, depth in 0usize..4,
    ) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("trace");
        let form = [Form::Dense, Form::Layered, Form::Shadow][form];
        let direction = [Direction::Incoming, Direction::Outgoing, Direction::Both][direction];
        let fanouts = vec![if all { Fanout::All } else { Fanout::AtMost(3) }; depth];
        let samples = write(&path, &lists, direction, settings(form, fanouts, carry));
        let trace = TraceReader::open(&path).unwrap();
        let (mut forwards, mut backwards, mut out) = (trace.forwards(), trace.backwards(), Sample::default());
        for (at, expected) in &samples {
            prop_assert_eq!(forwards.next(&mut out).unwrap(), Some(*at));
            prop_assert_eq!(&out, expected);
        }
        prop_assert_eq!(forwards.next(&mut out).unwrap(), None);
        for (at, expected) in samples.iter().rev() {
            prop_assert_eq!(backwards.next(&mut out).unwrap(), Some(*at));
            prop_assert_eq!(&out, expected);
        }
    }
}

/// Lists of a graph of some hundred nodes.
fn graph() -> Vec<Vec<u64>> {
    (0..300u64)
        .map(|node| (0..node % 90).map(|slot| (node + slot * 3) % 300).collect::<Vec<u64>>())
        .map(sorted)
        .collect()
}

fn sorted(mut list: Vec<u64>) -> Vec<u64> {
    list.sort_unstable();
    list
}

/// Reads everything in a trace; what it says when it refuses.
fn refusal(path: &Path) -> Option<String> {
    let trace = match TraceReader::open(path) {
        Ok(trace) => trace,
        Err(error) => return Some(error.to_string()),
    };
    let (mut cursor, mut out) = (trace.forwards(), Sample::default());
    loop {
        match cursor.next(&mut out) {
            Ok(Some(_)) => {}
            Ok(None) => return None,
            Err(error) => return Some(error.to_string()),
        }
    }
}

fn written() -> (tempfile::TempDir, std::path::PathBuf, Vec<u8>) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("damaged-trace");
    write(&path, &graph(), Direction::Incoming, settings(Form::Dense, vec![Fanout::AtMost(5); 3], false));
    assert_eq!(refusal(&path), None);
    let bytes = fs::read(&path).unwrap();
    (directory, path, bytes)
}

#[test]
fn one_changed_byte_anywhere_is_refused_and_named() {
    let (_directory, path, bytes) = written();
    for at in (0..bytes.len()).step_by(bytes.len() / 200) {
        let mut damaged = bytes.clone();
        damaged[at] ^= 1 << (at % 8);
        fs::write(&path, damaged).unwrap();
        let said = refusal(&path).unwrap_or_else(|| panic!("byte {at} may be anything"));
        assert!(
            said.contains("damaged-trace") && said.contains("expected") && said.contains("sample again"),
            "{said}"
        );
    }
}

#[test]
fn a_trace_cut_anywhere_is_refused_and_named() {
    let (_directory, path, bytes) = written();
    for length in (0..bytes.len()).step_by(bytes.len() / 100) {
        fs::write(&path, &bytes[..length]).unwrap();
        let said = refusal(&path).unwrap_or_else(|| panic!("{length} of {} bytes are taken", bytes.len()));
        assert!(said.contains("damaged-trace"), "{said}");
    }
}

#[test]
fn an_unfinished_trace_has_no_name() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("trace");
    let settings = settings(Form::Dense, vec![], false);
    let (dataset, batches, direction) = (String::new(), String::new(), Direction::Incoming);
    let header = TraceHeader { dataset, nodes: 1, edges: 0, relations: 0, direction, batches, settings };
    drop(TraceWriter::create(&path, header).unwrap());
    assert!(!path.exists());
}

/// What a header does not say, a record cannot hold: samples made otherwise are refused instead of garbled.
#[test]
fn a_sample_of_other_settings_is_not_written() {
    let directory = tempfile::tempdir().unwrap();
    let lists: Vec<Vec<u64>> = (0..50).map(|node| (0..node).collect()).collect();
    let graph = InMemory::from_adjacency(&lists, Some(vec![6; 1225])).in_direction(Direction::Incoming);
    let two = vec![Fanout::AtMost(3); 2];
    let sample = &samples(&graph, &settings(Form::Dense, two.clone(), true), 50)[0].1;
    let refused = |settings: Settings, nodes, edges, relations| {
        let (dataset, batches, direction) = (String::new(), String::new(), Direction::Incoming);
        let header = TraceHeader { dataset, nodes, edges, relations, direction, batches, settings };
        let mut writer = TraceWriter::create(&directory.path().join("trace"), header).unwrap();
        writer.write(Position { epoch: 0, batch: 0 }, sample).map_err(|error| error.to_string())
    };
    assert!(refused(settings(Form::Dense, two.clone(), true), 50, 1225, 7).is_ok());
    let said = refused(settings(Form::Layered, two.clone(), true), 50, 1225, 7).unwrap_err();
    assert!(said.contains("form or depth"), "{said}");
    let said = refused(settings(Form::Dense, two[..1].to_vec(), true), 50, 1225, 7).unwrap_err();
    assert!(said.contains("form or depth"), "{said}");
    let said = refused(settings(Form::Dense, two.clone(), false), 50, 1225, 7).unwrap_err();
    assert!(said.contains("carried"), "{said}");
    let said = refused(settings(Form::Dense, two.clone(), true), 50, 1225, 6).unwrap_err();
    assert!(said.contains("kinds"), "{said}");
    let said = refused(settings(Form::Dense, two.clone(), true), 4, 1225, 7).unwrap_err();
    assert!(said.contains("another graph"), "{said}");
}
