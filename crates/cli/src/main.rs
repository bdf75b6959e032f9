//! The `esker` program: parse, match on the verb, run.
#![forbid(unsafe_code)]

mod bench;
mod device;
mod doctor;
mod exit;
mod folder;
mod generate;
mod gpu;
mod import;
mod info;
mod output;
mod partition;
mod predict;
mod prepare;
mod progress;
mod quickstart;
mod rate;
mod scratch;
mod stripe;
mod train;
mod verify;

use clap::{CommandFactory, Parser, Subcommand};
use esker_types::ErrorKind;
use std::process::ExitCode;

/// Trains graph neural networks on graphs far larger than memory, on one machine.
#[derive(Parser)]
#[command(
    name = "esker",
    version,
    arg_required_else_help = true,
    after_help = "\
Start here:
  esker quickstart                                              generate a graph and train on it
  esker doctor                                                  check memory, disk and GPU of this machine
  esker import cora --format planetoid --from DIR --name cora   import a graph
  esker train cora --model gcn                                  train on it

Exit codes:
  0    done
  1    something failed: a file, a disk, a device
  2    the request cannot be met: usage, a configuration, a budget that is too small
  3    `verify` found damage
  130  interrupted by Ctrl-C or SIGTERM"
)]
struct EskerArguments {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    Quickstart(quickstart::QuickstartArguments),
    Doctor(doctor::DoctorArguments),
    Generate(Box<generate::GenerateArguments>),
    Import(Box<import::ImportArguments>),
    Info(info::InfoArguments),
    Verify(verify::VerifyArguments),
    Stripe(stripe::StripeArguments),
    Partition(partition::PartitionArguments),
    Prepare(Box<prepare::PrepareArguments>),
    Train(Box<train::TrainArguments>),
    Eval(train::EvalArguments),
    Predict(predict::PredictArguments),
    Bench(Box<bench::BenchArguments>),
    /// Print a completion script for your shell
    #[command(
        after_help = "Example:\n  esker completions bash > ~/.local/share/bash-completion/completions/esker"
    )]
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
}

impl Verb {
    /// Whether the same command continues where an earlier one ended.
    fn continues(&self) -> bool {
        matches!(
            self,
            Verb::Generate(_) | Verb::Import(_) | Verb::Stripe(_) | Verb::Partition(_) | Verb::Prepare(_)
        )
    }
}

fn main() -> ExitCode {
    esker_io::return_freed_memory();
    let arguments = EskerArguments::parse();
    let continues = arguments.verb.continues();
    let result = match arguments.verb {
        Verb::Quickstart(arguments) => quickstart::run(&arguments),
        Verb::Doctor(arguments) => doctor::run(&arguments),
        Verb::Generate(arguments) => generate::run(&arguments),
        Verb::Import(arguments) => import::run(&arguments),
        Verb::Info(arguments) => info::run(&arguments),
        Verb::Verify(arguments) => verify::run(&arguments),
        Verb::Bench(arguments) => bench::run(&arguments),
        Verb::Stripe(arguments) => stripe::run(&arguments),
        Verb::Partition(arguments) => partition::run(&arguments),
        Verb::Prepare(arguments) => prepare::run(&arguments),
        Verb::Train(arguments) => train::run(&arguments),
        Verb::Eval(arguments) => train::eval(&arguments),
        Verb::Predict(arguments) => predict::run(&arguments),
        Verb::Completions { shell } => completions(shell),
    };
    result.unwrap_or_else(|error| {
        let mut text = exit::text_of(&error);
        if exit::kind_of(&error) == ErrorKind::DiskFull {
            text += " and run the same command again";
            text += if continues { ": it continues where it stopped" } else { "" };
        }
        note!("error: {text}");
        ExitCode::from(exit::code_of(&error))
    })
}

fn completions(shell: clap_complete::Shell) -> anyhow::Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut EskerArguments::command(), "esker", &mut script);
    output::print(&String::from_utf8_lossy(&script))
}
