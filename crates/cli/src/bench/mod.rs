//! Measurements of this machine, against its own limits.

mod io;
mod io_workload;

use std::process::ExitCode;

/// Measure this machine and the engine on it
#[derive(clap::Args)]
pub struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    Io(io::Arguments),
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    match &arguments.what {
        What::Io(arguments) => io::run(arguments),
    }
}
