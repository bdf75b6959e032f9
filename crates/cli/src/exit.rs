//! Exit codes: the one place that decides them, by what an error is about.

use esker_cuda::CudaError;
use esker_fetch::FetchError;
use esker_import::ImportError;
use esker_io::IoError;
use esker_nn::NnError;
use esker_sample::SampleError;
use esker_store::StoreError;
use esker_strategies::StrategyError;
use esker_train::TrainError;
use esker_types::{Budget, ByteCount, ErrorKind};
use std::error::Error;
use std::fmt;

/// What the world did: files, disks, damage, devices.
const FAILED: u8 = 1;
/// What was asked for cannot be. Clap's own refusals have this code, too.
const USAGE: u8 = 2;
/// `verify` found damage.
pub const DAMAGED: u8 = 3;
/// Somebody asked for an end: 128 and the number of SIGINT, as shells count.
pub const INTERRUPTED: u8 = 130;

/// A request that cannot be.
#[derive(Debug)]
struct UsageError(String);

impl fmt::Display for UsageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for UsageError {}

/// The error for a request that cannot be: exit code 2.
pub fn usage(text: impl fmt::Display) -> anyhow::Error {
    UsageError(text.to_string()).into()
}

/// Refuses more memory than this machine or cgroup has. `--dry-run` may plan for another machine.
pub fn check_memory(bytes: u64) -> anyhow::Result<()> {
    Budget::within_machine(Some(ByteCount(bytes))).map(drop).map_err(usage)
}

/// What an error is about.
pub fn kind_of(error: &anyhow::Error) -> ErrorKind {
    error.chain().find_map(kind_of_one).unwrap_or(ErrorKind::World)
}

fn kind_of_one(error: &(dyn Error + 'static)) -> Option<ErrorKind> {
    let kinds = [
        error.downcast_ref::<UsageError>().map(|_| ErrorKind::Asked),
        error.downcast_ref().map(TrainError::kind),
        error.downcast_ref().map(StrategyError::kind),
        error.downcast_ref().map(FetchError::kind),
        error.downcast_ref().map(SampleError::kind),
        error.downcast_ref().map(NnError::kind),
        error.downcast_ref().map(CudaError::kind),
        error.downcast_ref().map(ImportError::kind),
        error.downcast_ref().map(StoreError::kind),
        error.downcast_ref().map(IoError::kind),
        error.downcast_ref().map(ErrorKind::of_io),
    ];
    kinds.into_iter().flatten().next()
}

/// The exit code for an error.
pub fn code_of(error: &anyhow::Error) -> u8 {
    match kind_of(error) {
        ErrorKind::Asked => USAGE,
        ErrorKind::Stopped => INTERRUPTED,
        ErrorKind::DiskFull | ErrorKind::World => FAILED,
    }
}

/// An error in words. Some messages carry their cause already.
pub fn text_of(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(|cause| cause.to_string()) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    fn check(error: impl Into<anyhow::Error>, code: u8) {
        let error = error.into();
        assert_eq!(code_of(&error), code, "{error}");
    }

    #[test]
    fn what_was_asked_and_what_the_world_did_have_codes_of_their_own() {
        let path = std::path::Path::new("g");
        let full = || StoreError::DiskFull { path: path.into() };
        let config = || TrainError::Setting { flag: "--lr", found: 0.0, allowed: "more" };
        check(usage("p"), 2);
        check(config(), 2);
        check(Err::<(), _>(config()).context("around").unwrap_err(), 2);
        check(TrainError::Strategy(StrategyError::EdgeColumn { name: "p".into() }), 2);
        check(TrainError::Strategy(StrategyError::Fetch(FetchError::Sample(full().into()))), 1);
        check(StoreError::Exists { path: path.into() }, 2);
        check(ImportError::EmptyGraph, 2);
        check(ImportError::EdgesGrew, 1);
        check(ImportError::from(full()), 1);
        check(IoError::Depth { found: 0, most: 9 }, 2);
        check(CudaError::NoDevice { asked: 9, found: 1 }, 2);
        check(TrainError::Stopped, 130);
        check(TrainError::Strategy(StrategyError::Stopped), 130);
        check(std::io::Error::from(std::io::ErrorKind::NotFound), 1);
        check(anyhow::anyhow!("anything"), 1);
    }
}
