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

/// A file of numbers as NumPy writes it.
#[allow(dead_code, reason = "not every test makes arrays")]
pub fn npy(path: &Path, descr: &str, shape: &str, data: &[u8]) {
    let header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}");
    let header = format!("{header:<117}\n");
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    std::fs::write(path, bytes).unwrap();
}
