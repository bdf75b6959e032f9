//! The program, run as a user runs it.

use serde_json::Value;
use std::path::Path;
use std::process::Command;

/// The command `esker` with these words, in a directory.
pub fn esker(directory: &Path, words: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_esker"));
    command.args(words.split(' ')).current_dir(directory);
    command
}

/// Runs a command that must succeed with `--json`, and reads what it printed.
pub fn json(directory: &Path, words: &str) -> Value {
    let output = esker(directory, words).arg("--json").output().unwrap();
    assert!(output.status.success(), "{words}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}
