//! Traces, read from both ends. Checksums keep damage away from the decoder, so every input is also read with checksums
//! that fit it: what a careful attacker would do.

use crate::Verdict;
use esker_sample::trace::{TraceHeader, TraceReader, TraceWriter};
use esker_sample::{Carry, Direction, Fanout, Form, InMemory, Position, Sample, Sampler, Settings};
use esker_types::NodeId;
use std::fs;
use std::ops::Range;
use std::path::Path;
use xxhash_rust::xxh3::xxh3_64;

const FOOTER_BYTES: usize = 40;
const ENTRY_BYTES: usize = 56;

/// A trace of each form, with everything a sample can carry.
pub fn seeds() -> Vec<Vec<u8>> {
    let lists: Vec<Vec<u64>> = (0..60u64).map(|node| (0..node * 2).map(|at| at / 2).collect()).collect();
    let edges = lists.iter().map(Vec::len).sum::<usize>() as u64;
    let graph =
        InMemory::<u32>::from_adjacency(&lists, Some((0..edges as u32).map(|edge| edge % 3).collect()));
    let directory = crate::scratch();
    let trace = |form: Form, carried: bool| {
        let carry = Carry { positions: carried, edges: carried, relations: carried, degrees: carried };
        let settings = Settings { seed: 1, fanouts: vec![Fanout::AtMost(3), Fanout::All], form, carry };
        let path = directory.path().join("trace");
        let header = TraceHeader {
            dataset: "d".into(),
            nodes: 60,
            edges,
            relations: 3,
            direction: Direction::Incoming,
            batches: String::new(),
            settings: settings.clone(),
        };
        let mut writer = TraceWriter::create(&path, header).expect("a scratch file");
        let mut sampler = Sampler::new(&graph, settings, 1 << 26).expect("a graph with kinds");
        let mut sample = Sample::default();
        for batch in 0..3 {
            let at = Position { epoch: 0, batch };
            let seeds = [batch, 40, 59, 40].map(NodeId);
            sampler.sample(at, &seeds, &mut sample).expect("seeds of the graph");
            writer.write(at, &sample).expect("a scratch file");
        }
        writer.finish().expect("a scratch file");
        fs::read(&path).expect("the trace")
    };
    [(Form::Dense, false), (Form::Dense, true), (Form::Layered, true), (Form::Shadow, false)]
        .map(|(form, carried)| trace(form, carried))
        .into()
}

/// Reads a trace as it is, and with checksums that fit it.
pub fn run(scratch: &Path, bytes: &[u8]) -> Verdict {
    let path = scratch.join("trace");
    let _ = read(&path, &sealed(bytes.to_vec()));
    read(&path, bytes)
}

fn read(path: &Path, bytes: &[u8]) -> Verdict {
    fs::write(path, bytes).expect("a scratch file");
    let trace = TraceReader::open(path).map_err(|error| error.to_string())?;
    let (mut sample, mut verdict) = (Sample::default(), Ok(()));
    for mut cursor in [trace.forwards(), trace.backwards()] {
        loop {
            match cursor.next(&mut sample) {
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(error) => verdict = Err(error.to_string()),
            }
        }
    }
    verdict
}

/// The bytes with every checksum made to fit, as far as they still have places for them.
fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    let Some(footer) = bytes.len().checked_sub(FOOTER_BYTES) else { return bytes };
    let text = bytes
        .get(12..16)
        .map_or(0, |length| u32::from_le_bytes([length[0], length[1], length[2], length[3]]));
    seal(&mut bytes, 0..16 + text as usize, 16 + text as usize);
    let index = word(&bytes, footer) as usize..footer;
    for entry in index.clone().step_by(ENTRY_BYTES) {
        let (offset, length) = (word(&bytes, entry + 32) as usize, word(&bytes, entry + 40) as usize);
        seal(&mut bytes, offset..offset.saturating_add(length), entry + 48);
    }
    seal(&mut bytes, index, footer + 16);
    seal(&mut bytes, footer..footer + 24, footer + 24);
    bytes
}

fn word(bytes: &[u8], at: usize) -> u64 {
    let word = at.checked_add(8).and_then(|end| bytes.get(at..end));
    word.map_or(0, |word| u64::from_le_bytes(word.try_into().unwrap_or_default()))
}

/// Writes the checksum of a range to a place.
fn seal(bytes: &mut [u8], range: Range<usize>, location: usize) {
    let Some(sum) = bytes.get(range).map(xxh3_64) else { return };
    if let Some(location) = location.checked_add(8).and_then(|end| bytes.get_mut(location..end)) {
        location.copy_from_slice(&sum.to_le_bytes());
    }
}
