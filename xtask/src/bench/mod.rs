//! `cargo xtask bench`: experiments with algorithms, one file each. Users measure their machine with `esker bench`.

mod batches;
mod cache;
mod decode;
mod pack;
mod plot;
mod segments;

use anyhow::Result;
use clap::Parser;
use serde_json::Value;

/// Compare algorithms on batches of a dataset
#[derive(Parser)]
#[command(name = "cargo xtask bench", disable_version_flag = true)]
struct BenchCommand {
    #[command(subcommand)]
    experiment: Experiment,
    /// Print JSON
    #[arg(long, global = true)]
    json: bool,
}

#[derive(clap::Subcommand)]
enum Experiment {
    Cache(cache::CacheArguments),
    Decode(decode::DecodeArguments),
    Segments(segments::SegmentArguments),
    Pack(pack::PackArguments),
}

/// The result of an experiment.
pub struct Findings {
    /// For programs.
    pub json: Value,
    /// For people.
    pub text: String,
}

/// Runs the experiment given by command-line words. Invalid words are a [`clap::Error`].
pub fn run(words: &[&str]) -> Result<Findings> {
    perform(&parsed(words)?)
}

/// The same, and prints the result, as JSON if requested.
pub fn run_and_print(words: &[&str]) -> Result<()> {
    let command = parsed(words)?;
    let found = perform(&command)?;
    if command.json {
        println!("{:#}", found.json);
    } else {
        print!("{}", found.text);
    }
    Ok(())
}

fn parsed(words: &[&str]) -> Result<BenchCommand> {
    Ok(BenchCommand::try_parse_from(["cargo xtask bench"].iter().chain(words))?)
}

fn perform(command: &BenchCommand) -> Result<Findings> {
    match &command.experiment {
        Experiment::Cache(arguments) => cache::run(arguments),
        Experiment::Decode(arguments) => decode::run(arguments),
        Experiment::Segments(arguments) => segments::run(arguments),
        Experiment::Pack(arguments) => pack::run(arguments),
    }
}
