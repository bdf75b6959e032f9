//! Partitions from a file, as METIS writes them: a line a node, with the number of its partition.

use super::{MOST_PARTITIONS, PartitionMethod, PartitionWord};
use crate::{Result, SampleError};
use esker_store::StoreError;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
use xxhash_rust::xxh3::Xxh3;

/// The longest line that can be a number.
const MOST_LINE_BYTES: usize = 64;

/// What a file of partitions has.
pub(super) struct GivenPartitions {
    /// One more than the highest partition.
    pub partitions: u32,
    /// A hash of all of them.
    pub digest: String,
}

/// Reads a file line by line. `take` gets the partition of each node in order. `most` is the number of partitions, if
/// it is known.
fn each_line(path: &Path, nodes: u64, most: u32, mut take: impl FnMut(u64, u32)) -> Result<GivenPartitions> {
    let mut reader = BufReader::new(File::open(path).map_err(SampleError::io(path))?);
    let (mut line, mut count, mut highest, mut hash) = (Vec::new(), 0, 0, Xxh3::new());
    loop {
        line.clear();
        let mut limited = std::io::Read::take(&mut reader, MOST_LINE_BYTES as u64);
        if limited.read_until(b'\n', &mut line).map_err(SampleError::io(path))? == 0 {
            break;
        }
        let text = String::from_utf8_lossy(&line);
        let text = text.trim();
        // An empty line at the end is not a node.
        if text.is_empty() && count == nodes && reader.fill_buf().map_err(SampleError::io(path))?.is_empty() {
            break;
        }
        let is_cut = line.len() == MOST_LINE_BYTES && line.last() != Some(&b'\n');
        let partition = text.parse::<u32>().ok().filter(|partition| *partition < most && !is_cut);
        let Some(partition) = partition else {
            return Err(SampleError::PartitionLine {
                path: path.to_path_buf(),
                line: count + 1,
                expected: format!("a partition from 0 to {}", most.saturating_sub(1)),
                found: if text.is_empty() { "nothing".into() } else { format!("`{text}`") },
            });
        };
        if count < nodes {
            take(count, partition);
        }
        highest = highest.max(partition);
        hash.update(&partition.to_le_bytes());
        count += 1;
    }
    if count != nodes {
        return Err(SampleError::PartitionLines { path: path.to_path_buf(), expected: nodes, found: count });
    }
    Ok(GivenPartitions { partitions: highest + 1, digest: format!("{:016x}", hash.digest()) })
}

/// Checks a file and finds its number of partitions: what was requested, else one more than the highest.
pub(super) fn check(path: &Path, nodes: u64, requested: Option<u32>) -> Result<GivenPartitions> {
    let found = each_line(path, nodes, requested.unwrap_or(MOST_PARTITIONS), |_, _| {})?;
    Ok(GivenPartitions { partitions: requested.unwrap_or(found.partitions), ..found })
}

/// Reads the partitions of a file that was checked. Fails if it has changed since then.
pub(super) fn read<W: PartitionWord>(
    path: &Path,
    nodes: u64,
    partitions: u32,
    checked: &PartitionMethod,
) -> Result<Vec<W>> {
    let mut words = vec![W::of(0); nodes as usize];
    let found =
        each_line(path, nodes, partitions, |node, partition| words[node as usize] = W::of(partition))?;
    if (PartitionMethod::File { digest: found.digest }) != *checked {
        let expected = "the partitions that it had a moment ago";
        return Err(StoreError::inconsistent(path, expected, "others: the file was written meanwhile").into());
    }
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_text(text: &str, nodes: u64, requested: Option<u32>) -> std::result::Result<u32, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("g.part.4");
        std::fs::write(&path, text).unwrap();
        check(&path, nodes, requested).map(|found| found.partitions).map_err(|error| error.to_string())
    }

    #[test]
    fn a_line_a_node_is_read() {
        assert_eq!(check_text("0\n2\n 1\n", 3, None), Ok(3));
        assert_eq!(check_text("0\n2\r\n1", 3, Some(4)), Ok(4));
        assert_eq!(check_text("0\n2\n1\n\n", 3, None), Ok(3));
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("p");
        std::fs::write(&path, "0\n2\n1\n").unwrap();
        let method = PartitionMethod::File { digest: check(&path, 3, None).unwrap().digest };
        assert_eq!(read::<u16>(&path, 3, 3, &method).unwrap(), [0, 2, 1]);
        std::fs::write(&path, "0\n1\n1\n").unwrap();
        assert!(read::<u16>(&path, 3, 3, &method).unwrap_err().to_string().contains("meanwhile"));
    }

    #[test]
    fn wrong_counts_and_numbers_are_named_with_their_line() {
        let refused = |text: &str, nodes, requested, words: &[&str]| {
            let said = check_text(text, nodes, requested).unwrap_err();
            words.iter().for_each(|word| assert!(said.contains(word), "`{word}` is not in: {said}"));
        };
        refused("0\n1\n", 3, None, &["g.part.4", "3 lines", "2"]);
        refused("0\n1\n0\n1\n", 3, None, &["3 lines", "4"]);
        refused("0\n1\nx\n", 3, None, &["line 3", "`x`"]);
        refused("0\n-1\n0\n", 3, None, &["line 2", "`-1`"]);
        refused("0\n\n0\n", 3, None, &["line 2", "nothing"]);
        refused("0\n4\n0\n", 3, Some(4), &["line 2", "from 0 to 3", "`4`"]);
        refused("", 3, None, &["3 lines", "0"]);
        refused(&"7".repeat(1000), 1, None, &["line 1"]);
        assert!(check(Path::new("nowhere"), 3, None).err().unwrap().to_string().contains("nowhere"));
    }
}
