//! `esker bench`: what the parts can do on this machine, one file each.

mod batches;
mod cache;
mod epoch;
mod gpu;
mod io;
mod io_workload;
mod lines;
mod pack;
mod plot;
mod sample;
mod segments;

use std::process::ExitCode;

/// Measure a part of Esker on this machine
#[derive(clap::Args)]
pub struct Arguments {
    #[command(subcommand)]
    part: Part,
}

#[derive(clap::Subcommand)]
enum Part {
    Io(io::Arguments),
    Sample(sample::Arguments),
    Epoch(Box<epoch::Arguments>),
    Cache(cache::Arguments),
    Segments(segments::Arguments),
    Pack(pack::Arguments),
    Gpu(gpu::Arguments),
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    match &arguments.part {
        Part::Io(arguments) => io::run(arguments),
        Part::Sample(arguments) => sample::run(arguments),
        Part::Epoch(arguments) => epoch::run(arguments),
        Part::Cache(arguments) => cache::run(arguments),
        Part::Segments(arguments) => segments::run(arguments),
        Part::Pack(arguments) => pack::run(arguments),
        Part::Gpu(arguments) => gpu::run(arguments),
    }
}
