//! How fast logged samples are decoded, in both formats of records: what bounds `diskgnn` if a GPU trains and all rows
//! are cached.

use super::Findings;
use super::batches::{BatchFlags, OpenedGraph};
use anyhow::ensure;
use esker_sample::trace::{RecordFormat, SampleRecords, TraceHeader};
use esker_sample::{AnyTopology, InMemory, Sample, StoredId};
use esker_store::Dataset;
use serde_json::json;
use std::path::Path;
use std::time::Instant;

/// Encode some batches in both formats of records, and decode them again and again
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  cargo xtask bench decode g                            8 batches, on one thread and on all
  cargo xtask bench decode g --batches 20 --rounds 50 --threads 1,4,16 --json

Batches of the training seeds are sampled as training would. Records are in memory, so no disk is measured. Each thread decodes all batches in turn, checked against the samples once before.")]
pub struct DecodeArguments {
    #[command(flatten)]
    batches: BatchFlags,
    /// How often every thread decodes all batches
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..))]
    rounds: u64,
    /// Threads that decode at a time; default: one, and all
    #[arg(long, value_delimiter = ',')]
    threads: Vec<usize>,
}

/// Records of all batches in one format.
struct Encoded {
    format: RecordFormat,
    records: Vec<Vec<u8>>,
    encode_seconds: f64,
}

pub fn run(arguments: &DecodeArguments) -> anyhow::Result<Findings> {
    let OpenedGraph { dataset, graph, most_bytes } = arguments.batches.open()?;
    match graph {
        AnyTopology::Narrow(graph) => measure(arguments, &dataset, &graph, most_bytes),
        AnyTopology::Wide(graph) => measure(arguments, &dataset, &graph, most_bytes),
    }
}

fn measure<W: StoredId>(
    arguments: &DecodeArguments,
    dataset: &Dataset,
    graph: &InMemory<W>,
    most_bytes: u64,
) -> anyhow::Result<Findings> {
    let header = arguments.batches.trace_header(dataset)?;
    let mut samples: Vec<Sample> = Vec::new();
    let asked =
        BatchFlags { batches: Some(arguments.batches.batches.unwrap_or(8)), ..arguments.batches.clone() };
    asked.sample(dataset, graph, most_bytes, |_, sample| {
        samples.push(sample.clone());
        Ok(())
    })?;
    let edges: u64 = samples.iter().map(Sample::edge_count).sum();
    let nodes: u64 = samples.iter().map(|sample| sample.node_ids.len() as u64).sum();
    let mut text = format!("{} batches, {nodes} nodes and {edges} edges\n", samples.len());
    let mut lines = Vec::new();
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = if arguments.threads.is_empty() { vec![1, all] } else { arguments.threads.clone() };
    for format in [RecordFormat::Gaps, RecordFormat::Columns] {
        let encoded = encode(&header, &samples, format)?;
        let bytes = encoded.records.iter().map(Vec::len).sum::<usize>() as f64 / edges.max(1) as f64;
        let encode_rate = edges as f64 / encoded.encode_seconds.max(1e-9);
        for threads in &threads {
            let seconds = decode(&header, &encoded, *threads, arguments.rounds)?;
            let rate = edges as f64 * arguments.rounds as f64 * *threads as f64 / seconds.max(1e-9);
            text += &format!(
                "  format {}, {threads} threads: {:.0} M edges/s, {:.0} a thread; {bytes:.2} bytes an edge, encoded at {:.0} M/s\n",
                format.number(),
                rate / 1e6,
                rate / 1e6 / *threads as f64,
                encode_rate / 1e6
            );
            lines.push(json!({
                "format": format.number(), "threads": threads, "edges_per_second": rate,
                "edges_per_second_a_thread": rate / *threads as f64, "bytes_per_edge": bytes,
                "encoded_edges_per_second": encode_rate,
            }));
        }
    }
    Ok(Findings {
        json: json!({ "batches": samples.len(), "nodes": nodes, "edges": edges, "lines": lines }),
        text,
    })
}

/// Encodes all samples, and checks that they come back.
fn encode(header: &TraceHeader, samples: &[Sample], format: RecordFormat) -> anyhow::Result<Encoded> {
    let (mut coder, home, mut records) = (SampleRecords::new(format), Path::new("memory"), Vec::new());
    let started = Instant::now();
    for sample in samples {
        records.push(coder.encode(header, sample, home)?.to_vec());
    }
    let encode_seconds = started.elapsed().as_secs_f64();
    let mut out = Sample::default();
    for (record, sample) in records.iter().zip(samples) {
        coder.decode(header, record, home, &mut out)?;
        ensure!(out == *sample, "a sample came back different; this is a bug of esker");
    }
    Ok(Encoded { format, records, encode_seconds })
}

/// Seconds in which each thread decodes all records this many times.
fn decode(header: &TraceHeader, encoded: &Encoded, threads: usize, rounds: u64) -> anyhow::Result<f64> {
    let work = || -> anyhow::Result<()> {
        let (mut coder, mut out) = (SampleRecords::new(encoded.format), Sample::default());
        for _ in 0..rounds {
            for record in &encoded.records {
                coder.decode(header, record, Path::new("memory"), &mut out)?;
            }
        }
        Ok(())
    };
    let started = Instant::now();
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads.max(1)).map(|_| scope.spawn(work)).collect();
        workers
            .into_iter()
            .try_for_each(|worker| worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })?;
    Ok(started.elapsed().as_secs_f64())
}
