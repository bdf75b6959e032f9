//! A checkpoint: weights and everything else that a resumed run needs, in one file. It is a safetensors file, so that
//! other programs can read the weights, with the run's state as text and a checksum in its metadata. It is written
//! under another name, synced and renamed.

use crate::state::StatePart;
use crate::{Result, TrainError};
use esker_nn::Named;
use safetensors::tensor::{Dtype, TensorView};
use safetensors::{SafeTensors, serialize};
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::Xxh3;

/// Checksum and state in one text: the order of several entries would differ from file to file.
const STATE: &str = "esker";
/// Prefix of the optimizer's tensors.
const OPTIMIZER: &str = "optimizer.";

/// The tensors of a run and a text about it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Checkpoint {
    /// Parameters and running statistics.
    pub model: Vec<Named>,
    /// The optimizer's state. Empty if only weights are stored.
    pub optimizer: Vec<Named>,
    /// State that belongs to them.
    pub state: serde_json::Value,
}

/// Advice for a damaged file.
const DAMAGED: &str = "delete it and train again, or restore it from a copy";

impl Checkpoint {
    /// Writes it and replaces a file of the same name. If killed at any moment, the old or the new file exists.
    pub fn write(&self, path: &Path) -> Result<()> {
        let optimizer = self.optimizer.iter().map(|named| (format!("{OPTIMIZER}{}", named.name), named));
        let all: Vec<(String, &Named)> =
            self.model.iter().map(|named| (named.name.clone(), named)).chain(optimizer).collect();
        let state = self.state.to_string();
        let mut views = Vec::with_capacity(all.len());
        for (name, named) in &all {
            let bytes = bytemuck::cast_slice(&named.values);
            let view = TensorView::new(Dtype::F32, named.shape.to_vec(), bytes);
            let view =
                view.map_err(TrainError::format(path, "numbers that fit their shape", "report this"))?;
            views.push((name.clone(), view));
        }
        let sum = checksum(
            all.iter().map(|(name, named)| (name.as_str(), bytemuck::cast_slice(&named.values))),
            &state,
        );
        let about = HashMap::from([(STATE.to_string(), format!("{sum} {state}"))]);
        let bytes = serialize(views, Some(about)).map_err(TrainError::format(
            path,
            "numbers with names",
            "report this",
        ))?;
        write_atomically(path, &bytes)
    }

    /// The state of a source that was saved with a model.
    pub(crate) fn source_state(&self, path: &Path) -> Result<Vec<StatePart>> {
        match self.state.get("source") {
            None => Ok(Vec::new()),
            Some(parts) => serde_json::from_value(parts.clone()).map_err(TrainError::format(
                path,
                "the state of a source",
                DAMAGED,
            )),
        }
    }

    /// Reads it. The error describes any damage.
    pub fn read(path: &Path) -> Result<Checkpoint> {
        let bytes = fs::read(path).map_err(TrainError::io(path))?;
        let refuse = |expected: &str, found: String| TrainError::file(path, expected, found, DAMAGED);
        let (_, about) = SafeTensors::read_metadata(&bytes).map_err(TrainError::format(
            path,
            "a safetensors file",
            DAMAGED,
        ))?;
        let tensors = SafeTensors::deserialize(&bytes).map_err(TrainError::format(
            path,
            "a safetensors file",
            DAMAGED,
        ))?;
        let about = about.metadata().clone().unwrap_or_default();
        let Some((sum, state)) = about.get(STATE).and_then(|text| text.split_once(' ')) else {
            return Err(refuse("weights written by esker", "another file".into()));
        };
        let mut all = tensors.tensors();
        all.sort_by(|a, b| a.0.cmp(&b.0));
        let found = checksum(all.iter().map(|(name, view)| (name.as_str(), view.data())), state);
        if found != sum {
            return Err(refuse(&format!("checksum {sum}"), found));
        }
        let state =
            serde_json::from_str(state).map_err(TrainError::format(path, "the state of a run", DAMAGED))?;
        let mut checkpoint = Checkpoint { state, ..Checkpoint::default() };
        for (name, view) in all {
            let ([rows, columns], Dtype::F32) = (view.shape(), view.dtype()) else {
                return Err(refuse(
                    "matrices of f32",
                    format!("{name}: {:?} {:?}", view.shape(), view.dtype()),
                ));
            };
            let numbers = view
                .data()
                .chunks_exact(4)
                .map(|four| f32::from_le_bytes([four[0], four[1], four[2], four[3]]));
            let named =
                |name: &str| Named { name: name.into(), shape: [*rows, *columns], values: numbers.collect() };
            match name.strip_prefix(OPTIMIZER) {
                Some(name) => checkpoint.optimizer.push(named(name)),
                None => checkpoint.model.push(named(&name)),
            }
        }
        Ok(checkpoint)
    }
}

/// The checksum of all tensors, by ascending name, and of the text.
fn checksum<'a>(parts: impl Iterator<Item = (&'a str, &'a [u8])>, state: &str) -> String {
    let mut parts: Vec<(&str, &[u8])> = parts.collect();
    parts.sort_by_key(|(name, _)| *name);
    let mut hash = Xxh3::new();
    for (name, bytes) in parts {
        hash.update(name.as_bytes());
        hash.update(&(bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    }
    hash.update(state.as_bytes());
    format!("{:016x}", hash.digest())
}

/// Writes a file under another name, syncs it, and renames it.
pub(crate) fn write_atomically(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    let partial = PathBuf::from(partial);
    let written = File::create(&partial).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()
    });
    written.map_err(TrainError::io(&partial))?;
    fs::rename(&partial, path).map_err(TrainError::io(path))?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(TrainError::io(folder))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checkpoint() -> Checkpoint {
        let named = |name: &str, value: f32| Named {
            name: name.into(),
            shape: [2, 2],
            values: vec![value, 1.0, f32::MIN, 3.0],
        };
        Checkpoint {
            model: vec![named("layers.0.weight", 0.5), named("layers.1.weight", -0.5)],
            optimizer: vec![named("layers.0.weight.first", 7.0)],
            state: serde_json::json!({ "epoch": 3 }),
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("c.safetensors");
        checkpoint().write(&path).unwrap();
        let bytes = fs::read(&path).unwrap();
        checkpoint().write(&path).unwrap();
        assert_eq!(fs::read(&path).unwrap(), bytes, "the same numbers are the same bytes");
        assert_eq!(Checkpoint::read(&path).unwrap(), checkpoint());
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn any_damage_is_found() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("c.safetensors");
        checkpoint().write(&path).unwrap();
        let whole = fs::read(&path).unwrap();
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 1;
            fs::write(&path, &bytes).unwrap();
            // A space in the header's padding may change without effect.
            if let Ok(found) = Checkpoint::read(&path) {
                assert_eq!(found, checkpoint(), "byte {at}");
            }
            fs::write(&path, &whole[..at]).unwrap();
            assert!(Checkpoint::read(&path).is_err(), "cut at {at}");
        }
    }
}
