//! `esker bench`: what the parts can do on this machine, one file each.

mod epoch;
mod gpu;
mod hops;
mod io;
mod io_workload;
mod lines;
mod sample;

use std::process::ExitCode;

/// Measure a part of Esker on this machine
#[derive(clap::Args)]
pub struct BenchArguments {
    #[command(subcommand)]
    part: BenchPart,
}

#[derive(clap::Subcommand)]
enum BenchPart {
    Io(io::IoArguments),
    Sample(sample::SampleArguments),
    Epoch(Box<epoch::EpochArguments>),
    Gpu(gpu::GpuArguments),
}

pub fn run(arguments: &BenchArguments) -> anyhow::Result<ExitCode> {
    match &arguments.part {
        BenchPart::Io(arguments) => io::run(arguments),
        BenchPart::Sample(arguments) => sample::run(arguments),
        BenchPart::Epoch(arguments) => epoch::run(arguments),
        BenchPart::Gpu(arguments) => gpu::run(arguments),
    }
}
