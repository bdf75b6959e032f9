//! Whole numbers in files of `torch.save`: a dictionary of numpy arrays, tensors or lists, in either of torch's containers. The
//! newer one is a zip archive (`NAME/data.pkl` and a member per storage). The older one is a sequence of pickles,
//! followed by the storages.

use crate::pickle::{self, Pickle, TensorView, Value};
use crate::{ImportError, Location, Result, input};
use std::{io::Read, path::Path};

/// The ids under one key of a dictionary.
#[derive(Debug, PartialEq, Eq)]
pub struct IdList {
    /// The key they were found under.
    pub key: String,
    /// The ids.
    pub ids: Vec<u64>,
}

/// The ids of the three sets of a split.
#[derive(Debug)]
pub struct Split {
    /// Training nodes.
    pub train: IdList,
    /// Validation nodes.
    pub valid: IdList,
    /// Test nodes, under any of the test keys.
    pub test: IdList,
}

/// Keys of the test nodes, in this order. The later ones are OGB-LSC's, whose labels are hidden.
const TEST_KEYS: [&str; 3] = ["test", "test-dev", "test-whole"];

fn is_zip(path: &Path) -> Result<bool> {
    let mut start = Vec::new();
    input::open(path)?.take(2).read_to_end(&mut start).map_err(|error| Location::file(path).io(error))?;
    Ok(start == b"PK")
}

/// Bytes that reading the file takes after decompression.
pub fn unpacked_bytes(path: &Path) -> Result<u64> {
    if is_zip(path)? {
        let members = input::zip_members(path)?;
        return Ok(members.iter().fold(0, |sum: u64, member| sum.saturating_add(member.bytes)));
    }
    Ok(input::open(path)?.metadata().map_err(|error| Location::file(path).io(error))?.len())
}

/// Whole numbers of a vector or matrix, row after row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdTensor {
    /// Rows.
    pub rows: u64,
    /// Numbers per row; 1 for a vector.
    pub columns: u64,
    /// The numbers.
    pub ids: Vec<u64>,
}

/// Reads the dictionary of a split.
pub fn read_split(path: &Path) -> Result<Split> {
    read_dictionary(path, &|pickle, storage| split(pickle, storage))
}

/// The vectors and matrices under these keys of a dictionary, as far as it has them. Other values are not looked at.
pub fn read_tensors(path: &Path, keys: &[&str]) -> Result<Vec<Option<IdTensor>>> {
    read_dictionary(path, &|pickle, storage| {
        let root = pickle.root();
        if pickle.pairs(root).is_none() {
            return Err(pickle.bad("value", "a dictionary", root));
        }
        let tensor = |key: &&str| pickle.get(root, key).map(|value| id_tensor(pickle, value, storage));
        keys.iter().map(|key| tensor(key).transpose()).collect()
    })
}

/// Gives the bytes of a storage.
type Storages<'a> = &'a dyn Fn(&TensorView) -> Result<Vec<u8>>;

fn read_dictionary<T>(path: &Path, take: &dyn Fn(&Pickle, Storages) -> Result<T>) -> Result<T> {
    match is_zip(path)? {
        true => read_zip(path, take),
        false => read_legacy(path, &input::read_whole(path, u64::MAX)?, take),
    }
}

fn read_zip<T>(path: &Path, take: &dyn Fn(&Pickle, Storages) -> Result<T>) -> Result<T> {
    let members = input::zip_members(path)?;
    let Some((root, main)) =
        members.iter().find_map(|member| Some((member.name.strip_suffix("data.pkl")?, member)))
    else {
        return Err(Location::file(path).bad("a member data.pkl, as torch.save writes it", "none"));
    };
    if let Some(order) = members.iter().find(|member| member.name == format!("{root}byteorder"))
        && order.read_whole(16)? != b"little"
    {
        return Err(order.location().bad("`little`", "another byte order"));
    }
    let bytes = main.read_whole(u64::MAX)?;
    let pickle = pickle::read(&bytes, &main.location())?;
    take(&pickle, &|tensor| {
        let name = format!("{root}data/{}", tensor.key);
        match members.iter().find(|member| member.name == name) {
            Some(member) => member.read_whole(u64::MAX),
            None => Err(Location::file(path).bad(format!("a member {name}"), "none")),
        }
    })
}

fn read_legacy<T>(path: &Path, whole: &[u8], take: &dyn Fn(&Pickle, Storages) -> Result<T>) -> Result<T> {
    let mut at = 0;
    let mut next = |what: &str| {
        let location = Location::at(path, format!("{what} at byte {at}"));
        let (pickle, used) = pickle::read_first(&whole[at..], &location)?;
        at += used;
        Ok::<_, ImportError>(pickle)
    };
    next("torch's magic number")?;
    let version = next("torch's version")?;
    if version.root() != Value::Int(1001) {
        return Err(version.bad("version", "1001, as torch.save writes it", version.root()));
    }
    next("system information")?;
    let pickle = next("dictionary")?;
    // Only tensors need the following; numpy arrays are in the pickle itself.
    let keys = next("storage keys").ok();
    let storages = &whole[at..];
    take(&pickle, &|tensor| {
        let bad = |found: &str| Location::file(path).bad(format!("storage `{}`", tensor.key), found);
        let keys = keys.as_ref().ok_or_else(|| bad("no list of storages"))?;
        let mut rest = storages;
        for key in keys.items(keys.root()).unwrap_or_default() {
            let Some((count, data)) = rest.split_first_chunk::<8>() else { break };
            // Storages of other types could precede this one, but split files have only one type.
            let bytes = u64::from_le_bytes(*count).checked_mul(tensor.scalar.bytes());
            let Some(data) = bytes.and_then(|bytes| data.split_at_checked(usize::try_from(bytes).ok()?))
            else {
                return Err(bad("the end of the file"));
            };
            if keys.text(*key).is_some_and(|key| key == tensor.key) {
                return Ok(data.0.to_vec());
            }
            rest = data.1;
        }
        Err(bad("none of that name"))
    })
}

fn split(pickle: &Pickle, storage: Storages) -> Result<Split> {
    let root = pickle.root();
    let list = |keys: &[&str]| {
        let found = keys.iter().find_map(|key| Some((*key, pickle.get(root, key)?)));
        let Some((key, value)) = found else {
            return Err(pickle.bad("dictionary", &format!("a key `{}`", keys.join("` or `")), root));
        };
        let ids = match pickle.tensor(value) {
            Some(tensor) if tensor.shape.len() != 1 => return Err(pickle.bad("tensor", "one axis", value)),
            Some(_) => id_tensor(pickle, value, storage)?.ids,
            None => pickle.ids(value)?,
        };
        Ok(IdList { key: key.to_string(), ids })
    };
    Ok(Split { train: list(&["train"])?, valid: list(&["valid"])?, test: list(&TEST_KEYS)? })
}

/// A vector or matrix: a tensor, a numpy array, or a list.
fn id_tensor(pickle: &Pickle, value: Value, storage: Storages) -> Result<IdTensor> {
    if let Some(tensor) = pickle.tensor(value) {
        return stored_ids(pickle, value, &tensor, &storage(&tensor)?);
    }
    let Ok(numbers) = pickle.numbers(value) else {
        let ids = pickle.ids(value)?;
        return Ok(IdTensor { rows: ids.len() as u64, columns: 1, ids });
    };
    let (rows, columns) = match numbers.shape {
        [rows] => (*rows, 1),
        [rows, columns] => (*rows, *columns),
        _ => return Err(pickle.bad("array", "one or two axes", value)),
    };
    let position = |at: u64| numbers.position((at / columns.max(1)) as usize, (at % columns.max(1)) as usize);
    // The array has as many elements as its shape says.
    let id = |at: u64| whole_number(pickle, at, numbers.value(position(at)));
    Ok(IdTensor { rows, columns, ids: (0..rows * columns).map(id).collect::<Result<_>>()? })
}

fn stored_ids(pickle: &Pickle, value: Value, tensor: &TensorView, storage: &[u8]) -> Result<IdTensor> {
    let bad = |expected: &str| pickle.bad("tensor", expected, value);
    let (rows, columns, strides) = match (tensor.shape, tensor.strides) {
        ([rows], [stride]) => (*rows, 1, [*stride, 0]),
        ([rows, columns], [row, column]) => (*rows, *columns, [*row, *column]),
        _ => return Err(bad("one or two axes")),
    };
    let numbers = pickle::Numbers::new(tensor.scalar, storage).ok_or_else(|| bad("whole elements"))?;
    let span = |length: u64, stride: u64| length.saturating_sub(1).checked_mul(stride);
    let last = span(rows, strides[0])
        .and_then(|last| last.checked_add(span(columns, strides[1])?))
        .and_then(|last| last.checked_add(tensor.offset));
    // The length too: with a stride of 0, a forged tensor could request any amount of memory.
    let length = rows.checked_mul(columns).filter(|length| *length <= tensor.elements);
    let inside = length.is_some_and(|length| length == 0 || last.is_some_and(|last| last < tensor.elements));
    if numbers.len() as u64 != tensor.elements || !inside {
        return Err(bad(&format!("a view inside a storage of {} elements", numbers.len())));
    }
    let id = |at: u64| {
        let position = tensor.offset + at / columns * strides[0] + at % columns * strides[1];
        whole_number(pickle, at, numbers.value(position as usize))
    };
    Ok(IdTensor { rows, columns, ids: (0..rows * columns).map(id).collect::<Result<_>>()? })
}

fn whole_number(pickle: &Pickle, at: u64, found: Option<Value>) -> Result<u64> {
    match found {
        Some(Value::Int(id)) if id >= 0 => Ok(id as u64),
        other => Err(pickle.bad(&format!("tensor, element {at}"), "a node id", other.unwrap_or(Value::None))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::committed;

    fn check(name: &str) {
        let split = read_split(&committed(name)).unwrap();
        let ids = [split.train, split.valid, split.test].map(|list| (list.key, list.ids));
        let expected = [("train", vec![0, 2, 5]), ("valid", vec![1]), ("test-dev", vec![3, 4])];
        assert_eq!(ids, expected.map(|(key, ids)| (key.to_string(), ids)), "{name}");
    }

    #[test]
    fn arrays_and_tensors_read_from_both_containers() {
        check("arrays.zip.pt");
        check("tensors.zip.pt");
        check("arrays.legacy.pt");
        check("tensors.legacy.pt");
    }

    #[test]
    fn a_missing_key_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("split_dict.pt");
        let mut whole = std::fs::read(committed("arrays.legacy.pt")).unwrap();
        let at = whole.windows(8).position(|word| word == b"test-dev").unwrap();
        whole[at] = b'b';
        std::fs::write(&path, whole).unwrap();
        let message = read_split(&path).unwrap_err().to_string();
        assert!(message.contains("`test-dev`") && message.contains("dictionary of 3"), "{message}");
    }

    #[test]
    fn cut_files_are_errors() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("split_dict.pt");
        for name in ["arrays.zip.pt", "tensors.zip.pt", "arrays.legacy.pt", "tensors.legacy.pt"] {
            let whole = std::fs::read(committed(name)).unwrap();
            for length in (0..whole.len()).step_by(7) {
                std::fs::write(&path, &whole[..length]).unwrap();
                let cut = read_split(&path);
                // A legacy file of arrays needs nothing after its dictionary.
                assert!(cut.is_err() || name == "arrays.legacy.pt", "{name} cut to {length} bytes");
            }
        }
    }

    #[test]
    fn damaged_files_never_panic() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("split_dict.pt");
        for name in ["tensors.zip.pt", "tensors.legacy.pt", "arrays.legacy.pt"] {
            let whole = std::fs::read(committed(name)).unwrap();
            for seed in 0..500 {
                std::fs::write(&path, crate::fixture::damaged(&whole, &whole, seed)).unwrap();
                let outcome = std::panic::catch_unwind(|| read_split(&path).is_ok());
                assert!(outcome.is_ok(), "{name}, seed {seed}");
            }
        }
    }
}
