//! Runs damaged inputs through one target, or all of them: `cargo run --release -p esker-fuzz -- csv --seconds 60`.
#![forbid(unsafe_code)]

use clap::Parser;
use esker_fuzz::{FuzzFailure, FuzzTarget, Session, TARGETS, quiet_panics};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Feeds damaged files to Esker's readers. Exit codes: 0 nothing found, 1 something found, 2 wrong usage.
#[derive(Parser)]
struct FuzzArguments {
    /// What to feed: `all`, or one of the names that `list` prints
    #[arg(default_value = "all")]
    target: String,
    /// How long, for each target
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// Which sequence of inputs
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Run this input only, and say what came of it
    #[arg(long)]
    case: Option<u64>,
}

fn main() -> ExitCode {
    let arguments = FuzzArguments::parse();
    if arguments.target == "list" {
        TARGETS.iter().for_each(|target| println!("{}", target.name));
        return ExitCode::SUCCESS;
    }
    let chosen = |target: &&FuzzTarget| ["all", target.name].contains(&arguments.target.as_str());
    let targets: Vec<&FuzzTarget> = TARGETS.iter().filter(chosen).collect();
    if targets.is_empty() {
        eprintln!("`{}` is not a target; `list` prints them", arguments.target);
        return ExitCode::from(2);
    }
    quiet_panics();
    let failures = targets.into_iter().filter(|target| !passes(target, &arguments)).count();
    if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs one target until its time is up or something is found.
fn passes(target: &FuzzTarget, arguments: &FuzzArguments) -> bool {
    let mut session = Session::new(target, arguments.seed);
    if let Some(case) = arguments.case {
        return match session.run(case) {
            Ok(verdict) => {
                println!("{} case {case}: {verdict:?}", target.name);
                true
            }
            Err(failure) => report(target, arguments.seed, &failure),
        };
    }
    let (started, limit) = (Instant::now(), Duration::from_secs(arguments.seconds));
    let (mut cases, mut accepted) = (0u64, 0u64);
    while started.elapsed() < limit {
        match session.run(cases) {
            Ok(verdict) => accepted += verdict.is_ok() as u64,
            Err(failure) => return report(target, arguments.seed, &failure),
        }
        cases += 1;
    }
    let rate = cases as f64 / started.elapsed().as_secs_f64();
    println!("{:16} {cases:>8} cases, {accepted:>7} accepted, {rate:>7.0} cases/s", target.name);
    true
}

fn report(target: &FuzzTarget, seed: u64, failure: &FuzzFailure) -> bool {
    let path = format!("{}-{seed}-{}.input", target.name, failure.case);
    println!("{}: {}", target.name, failure.problem);
    println!("  repeat with: {} --seed {seed} --case {}", target.name, failure.case);
    match std::fs::write(&path, &failure.input) {
        Ok(()) => println!("  input: {path}"),
        Err(error) => println!("  {path}: {error}"),
    }
    false
}
