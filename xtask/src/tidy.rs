//! Checks the repository's own rules by reading its files.

mod code;
mod functions;
mod names;
mod paths;

use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The order of the data flow: a crate depends only on crates before it.
const CRATES: [&str; 15] = [
    "types",
    "io",
    "store",
    "import",
    "sample",
    "plan",
    "device",
    "cuda",
    "nn",
    "fetch",
    "strategies",
    "train",
    "report",
    "cli",
    "py",
];

/// The crates that may use `unsafe`.
const UNSAFE_CRATES: [&str; 4] = ["io", "cuda", "nn", "py"];

/// Words that mark unfinished work. Split, so that this file passes its own test.
const UNFINISHED: [&str; 5] = [
    concat!("todo", "!("),
    concat!("unimplemented", "!("),
    concat!("dbg", "!("),
    concat!("FIX", "ME"),
    concat!("XX", "X"),
];

/// Checks everything; the error lists all findings.
pub fn check() -> Result<()> {
    let root = crate::root();
    let mut findings = Vec::new();
    check_directions(&root, &mut findings)?;
    check_unsafe(&root, &mut findings)?;
    check_unfinished(&root, &mut findings)?;
    check_code(&root, &mut findings)?;
    check_documents(&root, &mut findings)?;
    paths::check(&root, &mut findings)?;
    check_spelling(&root, &mut findings);
    if findings.is_empty() {
        println!(
            "== tidy: {} crates, {} commands in documents",
            crates(&root)?.len(),
            commands(&root)?.len()
        );
        return Ok(());
    }
    bail!("not tidy:\n  {}", findings.join("\n  "))
}

/// The folders under `crates/`.
fn crates(root: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(root.join("crates"))? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

fn check_directions(root: &Path, findings: &mut Vec<String>) -> Result<()> {
    for name in crates(root)? {
        let Some(place) = CRATES.iter().position(|known| *known == name) else {
            findings.push(format!(
                "crates/{name} has no place in the data flow; see ARCHITECTURE.md and xtask/src/tidy.rs"
            ));
            continue;
        };
        let manifest = fs::read_to_string(root.join("crates").join(&name).join("Cargo.toml"))?;
        for used in esker_dependencies(&manifest) {
            if !CRATES[..place].contains(&used.as_str()) {
                findings.push(format!(
                    "crates/{name} depends on {used}, which is not before it in the data flow"
                ));
            }
        }
    }
    Ok(())
}

/// The `esker-*` crates under `[dependencies]`; dev-dependencies are not checked.
fn esker_dependencies(manifest: &str) -> Vec<String> {
    let mut section = "";
    let mut used = Vec::new();
    for line in manifest.lines() {
        if line.starts_with('[') {
            section = line;
        } else if section == "[dependencies]"
            && let Some(rest) = line.strip_prefix("esker-")
        {
            used.push(rest.split(['.', ' ', '=']).next().unwrap_or("").to_string());
        }
    }
    used
}

fn check_unsafe(root: &Path, findings: &mut Vec<String>) -> Result<()> {
    for name in crates(root)?.iter().filter(|name| !UNSAFE_CRATES.contains(&name.as_str())) {
        let source = root.join("crates").join(name).join("src");
        let entry =
            ["lib.rs", "main.rs"].map(|file| source.join(file)).into_iter().find(|path| path.is_file());
        let text =
            fs::read_to_string(entry.with_context(|| format!("crates/{name} has no lib.rs or main.rs"))?)?;
        if !text.contains("#![forbid(unsafe_code)]") {
            findings.push(format!("crates/{name} must say #![forbid(unsafe_code)]"));
        }
    }
    for name in UNSAFE_CRATES {
        for path in files(&root.join("crates").join(name), "rs")? {
            let text = fs::read_to_string(&path)?;
            let lines: Vec<&str> = text.lines().collect();
            for (index, line) in lines.iter().enumerate() {
                let opens = line.contains("unsafe {") || line.trim_start().starts_with("unsafe impl");
                let explained =
                    lines[index.saturating_sub(4)..=index].iter().any(|line| line.contains("SAFETY:"));
                if opens && !explained {
                    findings.push(format!(
                        "{}:{}: unsafe without a SAFETY comment",
                        path.display(),
                        index + 1
                    ));
                }
            }
        }
    }
    Ok(())
}

fn check_unfinished(root: &Path, findings: &mut Vec<String>) -> Result<()> {
    for folder in ["crates", "xtask", "fuzz"] {
        for path in files(&root.join(folder), "rs")? {
            for (index, line) in fs::read_to_string(&path)?.lines().enumerate() {
                if let Some(word) = UNFINISHED.iter().find(|word| line.contains(**word)) {
                    findings.push(format!("{}:{}: {word}", path.display(), index + 1));
                }
            }
        }
    }
    Ok(())
}

/// Checks for functions that are too long and for type names with two meanings. Tests are exempt.
fn check_code(root: &Path, findings: &mut Vec<String>) -> Result<()> {
    let mut folders: Vec<String> = crates(root)?.iter().map(|name| format!("crates/{name}")).collect();
    folders.extend(["xtask".into(), "fuzz".into()]);
    let mut definitions = names::Definitions::new();
    let mut texts = Vec::new();
    for folder in folders {
        let mut own = Vec::new();
        for path in files(&root.join(&folder).join("src"), "rs")? {
            own.push((fs::read_to_string(&path)?, path));
        }
        texts.push((folder, own));
    }
    let mut sizes = Vec::new();
    for (folder, texts) in &texts {
        let all: Vec<_> = texts.iter().map(|(text, path)| (code::without_tests(text), path)).collect();
        let of_tests: Vec<PathBuf> = all
            .iter()
            .flat_map(|(code, path)| code.test_modules.iter().map(|name| module_path(path, name)))
            .collect();
        for (code, path) in &all {
            // A module is `name.rs`, or a folder.
            if of_tests.iter().any(|module| path.starts_with(module) || **path == module.with_extension("rs"))
            {
                continue;
            }
            let place = path.strip_prefix(root).unwrap_or(path).display().to_string();
            sizes.extend(functions::functions(&code.tokens).into_iter().map(|size| (place.clone(), size)));
            for name in names::types(&code.tokens) {
                let crates = definitions.entry(name.to_string()).or_default();
                crates.entry(folder.clone()).or_default().insert(place.clone());
            }
        }
    }
    findings.extend(functions::findings(&sizes, &functions::LIMITS));
    let exempt = |name: &str| names::SHARED.contains(&name);
    findings.extend(names::findings(&definitions, exempt));
    Ok(())
}

/// The path of a module that a file declares, without its extension.
fn module_path(file: &Path, name: &str) -> PathBuf {
    let folder = file.parent().unwrap_or(file);
    match file.file_stem().and_then(|stem| stem.to_str()) {
        Some("lib" | "main" | "mod") | None => folder.join(name),
        Some(stem) => folder.join(stem).join(name),
    }
}

/// The documents whose commands are executed by a test.
pub fn documents(root: &Path) -> Result<Vec<PathBuf>> {
    let mut documents =
        vec![root.join("README.md"), root.join("CONTRIBUTING.md"), root.join("ARCHITECTURE.md")];
    documents.extend(files(&root.join("docs"), "md")?);
    Ok(documents)
}

/// A command in a document.
#[derive(Debug, Clone)]
pub struct Documented {
    /// The document.
    pub path: PathBuf,
    /// Its line, from 1.
    pub line: usize,
    /// The command, continuation lines joined.
    pub command: String,
}

/// All commands in the `sh` blocks of the documents, in order.
pub fn commands(root: &Path) -> Result<Vec<Documented>> {
    let mut commands: Vec<Documented> = Vec::new();
    for path in documents(root)? {
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let (mut inside, mut open) = (false, false);
        for (index, line) in text.lines().enumerate() {
            if let Some(language) = line.strip_prefix("```") {
                inside = !inside && language == "sh";
                continue;
            }
            let words = line.split(" #").next().unwrap_or("").trim();
            if !inside || words.is_empty() || words.starts_with('#') {
                continue;
            }
            let continues = words.ends_with('\\');
            let words = words.trim_end_matches('\\').trim();
            match commands.last_mut().filter(|_| open) {
                Some(last) => last.command = format!("{} {words}", last.command),
                None => commands.push(Documented {
                    path: path.clone(),
                    line: index + 1,
                    command: words.to_string(),
                }),
            }
            open = continues;
        }
    }
    Ok(commands)
}

/// Checks that no command is outside an `sh` block: the test that runs commands would miss it.
fn check_documents(root: &Path, findings: &mut Vec<String>) -> Result<()> {
    for path in documents(root)? {
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let (mut fence, place) = (None, path.strip_prefix(root).unwrap_or(&path).display().to_string());
        for (index, line) in text.lines().enumerate() {
            if let Some(language) = line.strip_prefix("```") {
                fence = if fence.is_some() { None } else { Some(language.to_string()) };
            } else if fence.as_deref().is_some_and(|language| language != "sh")
                && ["esker ", "cargo ", "$ "].iter().any(|start| line.trim_start().starts_with(start))
            {
                findings.push(format!("{place}:{}: a command outside an sh block is never run", index + 1));
            }
        }
    }
    let readme = fs::read_to_string(root.join("README.md"))?;
    for command in ["cargo run --release -- quickstart", "cargo xtask test"] {
        if !readme.contains(command) {
            findings.push(format!("README.md does not show `{command}`"));
        }
    }
    Ok(())
}

/// Checks spelling if `typos` is installed; `_typos.toml` has the exceptions.
fn check_spelling(root: &Path, findings: &mut Vec<String>) {
    match Command::new("typos").args(["--format", "brief"]).current_dir(root).output() {
        Err(_) => println!("== tidy: spelling is not checked, there is no `typos`"),
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stdout);
            findings.extend(text.lines().map(str::to_string));
        }
    }
}

/// Files below a folder by extension; empty if the folder does not exist.
fn files(folder: &Path, ending: &str) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    if folder.is_dir() {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            if path.is_dir() && path.file_name().is_some_and(|name| name != "target") {
                found.extend(files(&path, ending)?);
            } else if path.extension().is_some_and(|e| e == ending) {
                found.push(path);
            }
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dependency_against_the_flow_is_seen() {
        let manifest = "[dependencies]\nesker-types.workspace = true\nesker-store = { path = \"x\" }\n[dev-dependencies]\nesker-cli = \"1\"\n";
        assert_eq!(esker_dependencies(manifest), ["types", "store"]);
    }

    #[test]
    fn modules_lie_beside_or_below_the_file_that_declares_them() {
        let check = |file: &str, expected: &str| {
            assert_eq!(module_path(Path::new(file), "tests"), Path::new(expected));
        };
        check("src/lib.rs", "src/tests");
        check("src/read/mod.rs", "src/read/tests");
        check("src/read.rs", "src/read/tests");
    }
}
