//! Checks that the files and folders named in ARCHITECTURE.md exist.

use anyhow::{Context, Result};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Text that looks like a path, but is a pattern or a path to be written.
const PATTERNS: [&str; 2] = ["strategies/NAME", "kernels/*.cu"];

/// Extensions of files that documents name.
const ENDINGS: [&str; 8] = ["rs", "md", "toml", "txt", "json", "py", "cu", "cuh"];

/// Adds a finding for every path that does not exist.
pub(super) fn check(root: &Path, findings: &mut Vec<String>) -> Result<()> {
    let mut present = BTreeSet::new();
    list(root, "", &mut present)?;
    let document = "ARCHITECTURE.md";
    let text = fs::read_to_string(root.join(document)).context(document)?;
    for (line, path) in named(&text) {
        if !PATTERNS.contains(&path) && !exists(&present, path) {
            findings.push(format!("{document}:{line}: there is no `{path}`"));
        }
    }
    let unused = PATTERNS.iter().filter(|pattern| !text.contains(&format!("`{pattern}`")));
    findings.extend(unused.map(|pattern| {
        format!("{document} no longer names `{pattern}`: take it out of PATTERNS in xtask/src/tidy/paths.rs")
    }));
    Ok(())
}

/// Text in backticks that looks like a path, with its line from 1. Code fences are skipped.
fn named(text: &str) -> Vec<(usize, &str)> {
    let (mut fenced, mut found) = (false, Vec::new());
    for (index, line) in text.lines().enumerate() {
        fenced ^= line.starts_with("```");
        if !fenced {
            let quoted = line.split('`').skip(1).step_by(2);
            found.extend(quoted.filter(|words| is_path(words)).map(|path| (index + 1, path)));
        }
    }
    found
}

fn is_path(words: &str) -> bool {
    let ends = || words.rsplit_once('.').is_some_and(|(_, ending)| ENDINGS.contains(&ending));
    !words.contains(' ') && !words.starts_with(['-', '/']) && (words.contains('/') || ends())
}

/// Whether a path is the end of an existing one. Existing paths begin with a slash, and folders end with one.
fn exists(present: &BTreeSet<String>, path: &str) -> bool {
    let (file, folder) = (format!("/{path}"), format!("/{}/", path.trim_end_matches('/')));
    present.iter().any(|known| known.ends_with(&folder) || known.ends_with(&file))
}

/// All files and folders, each also without the `src/` that documents omit: `train/open.rs`.
fn list(root: &Path, below: &str, present: &mut BTreeSet<String>) -> Result<()> {
    for entry in fs::read_dir(root.join(below))? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name == "target" || name.starts_with('.') {
            continue;
        }
        let path = if below.is_empty() { name } else { format!("{below}/{name}") };
        let folder = entry.file_type()?.is_dir();
        let shown = format!("/{path}{}", if folder { "/" } else { "" });
        present.insert(shown.replacen("/src/", "/", 1));
        present.insert(shown);
        if folder {
            list(root, &path, present)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_told_from_other_words() {
        let text = "a `train/open.rs` and `Job`, `--out DIR`\n```text\n`no/such.rs`\n```\n`rows.rs`: `build/`, `and or/not`";
        assert_eq!(named(text), [(1, "train/open.rs"), (5, "rows.rs"), (5, "build/")]);
    }

    #[test]
    fn a_path_exists_by_its_end_and_a_file_is_not_a_folder() {
        let present = ["/crates/train/open.rs", "/crates/import/src/build/", "/bench/record/"];
        let present: BTreeSet<String> = present.map(str::to_string).into();
        for path in ["train/open.rs", "open.rs", "build/", "bench/record", "import/src/build"] {
            assert!(exists(&present, path), "{path}");
        }
        for path in ["train/close.rs", "pen.rs", "open.rs/", "uild/", "crates/train/"] {
            assert!(!exists(&present, path), "{path}");
        }
    }
}
