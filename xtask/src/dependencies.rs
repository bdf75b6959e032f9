//! Checks the dependencies of the workspace: allowed licences, a single registry, and no unnoticed duplicate versions.
//! It uses `cargo metadata`, so it needs no other tool and no network.

use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

/// Licences that a dependency may have, by their SPDX ids. All of them allow shipping under MIT or Apache-2.0.
const LICENCES: [&str; 11] = [
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "ISC",
    "MIT",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// The only allowed registry.
const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// Crates that are compiled in several incompatible versions, because dependencies disagree; those of `rand` are only
/// in tests. The number may only decrease.
const SEVERAL_VERSIONS: [&str; 5] = ["getrandom", "hashbrown", "rand", "rand_core", "syn"];

/// The only platform: io_uring, O_DIRECT and cgroups need Linux.
const PLATFORM: &str = "x86_64-unknown-linux-gnu";

/// Checks every dependency; an error lists every finding.
pub fn check() -> Result<()> {
    let words = ["metadata", "--format-version", "1", "--locked", "--filter-platform", PLATFORM];
    let mut command = Command::new(std::env::var("CARGO").unwrap_or_else(|_| "cargo".into()));
    let output = command.args(words).current_dir(crate::root()).output().context("cargo metadata")?;
    if !output.status.success() {
        bail!("cargo metadata failed: {}", String::from_utf8_lossy(&output.stderr));
    }
    let metadata: Value = serde_json::from_slice(&output.stdout).context("cargo metadata")?;
    let packages = metadata["packages"].as_array().context("cargo metadata lists no packages")?;
    let findings = findings(packages);
    if !findings.is_empty() {
        bail!("dependencies, see xtask/src/dependencies.rs:\n  {}", findings.join("\n  "));
    }
    println!("== dependencies: {} packages, licences and sources allowed", packages.len());
    Ok(())
}

fn findings(packages: &[Value]) -> Vec<String> {
    let mut findings = Vec::new();
    let mut versions: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for package in packages {
        let text = |key: &str| package[key].as_str();
        let (name, version) = (text("name").unwrap_or("?"), text("version").unwrap_or("?"));
        // A package without a source is local: it belongs to the workspace.
        let Some(source) = text("source") else { continue };
        if source != REGISTRY {
            findings.push(format!("{name} {version} comes from {source}, not from the registry"));
        }
        let licence = text("license").unwrap_or("none");
        if !is_allowed(licence) {
            findings.push(format!(
                "{name} {version} has licence `{licence}`: replace it, or allow the licence in LICENCES"
            ));
        }
        versions.entry(name).or_default().insert(compatible_part(version));
    }
    for (name, versions) in &versions {
        let found: Vec<&str> = versions.iter().copied().collect();
        match (versions.len() > 1, SEVERAL_VERSIONS.contains(name)) {
            (true, false) => findings
                .push(format!("{name} is compiled in versions {}: bring them together", found.join(" and "))),
            (false, true) => {
                findings.push(format!("{name} has but one version now: take it out of SEVERAL_VERSIONS"))
            }
            _ => {}
        }
    }
    findings
}

/// The part of a version that compatible versions share: `1`, `0.5`.
fn compatible_part(version: &str) -> &str {
    let parts = if version.starts_with("0.") { 2 } else { 1 };
    version.match_indices('.').nth(parts - 1).map_or(version, |(dot, _)| &version[..dot])
}

/// Whether an SPDX expression can be satisfied: `OR` (old: `/`) needs one side, `AND`, which binds closer, both.
fn is_allowed(expression: &str) -> bool {
    let expression = expression.replace('/', " OR ");
    // The last opening bracket starts an innermost group: replace it by an allowed id, or by one that is not.
    if let Some(open) = expression.rfind('(') {
        let Some(close) = expression[open..].find(')').map(|at| open + at) else { return false };
        let inner = if is_allowed(&expression[open + 1..close]) { "MIT" } else { "refused" };
        return is_allowed(&format!("{}{inner}{}", &expression[..open], &expression[close + 1..]));
    }
    let known = |id: &str| LICENCES.contains(&id.split_whitespace().collect::<Vec<_>>().join(" ").as_str());
    expression.split(" OR ").any(|side| side.split(" AND ").all(known))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn licences_are_read_as_spdx_says() {
        for allowed in [
            "MIT",
            "MIT OR GPL-3.0",
            "GPL-3.0/MIT",
            "Apache-2.0 / MIT",
            "(GPL-3.0 OR MIT) AND Unicode-3.0",
            "GPL-3.0 OR (MIT AND (Zlib OR GPL-2.0))",
            "Apache-2.0 WITH LLVM-exception",
        ] {
            assert!(is_allowed(allowed), "{allowed}");
        }
        for refused in [
            "",
            "none",
            "GPL-3.0",
            "MIT AND GPL-3.0",
            "(MIT OR Zlib) AND GPL-3.0",
            "(MIT",
            "Apache-2.0 WITH other-exception",
        ] {
            assert!(!is_allowed(refused), "{refused}");
        }
    }

    #[test]
    fn another_source_and_a_second_version_are_seen() {
        let package = |name: &str, version: &str, source: &str| json!({"name": name, "version": version, "license": "MIT", "source": source});
        let mut packages: Vec<Value> = SEVERAL_VERSIONS
            .iter()
            .flat_map(|name| ["1.2.0", "0.5.1"].map(|version| package(name, version, REGISTRY)))
            .collect();
        packages.extend(["1.0.1", "1.4.0"].map(|version| package("one", version, REGISTRY)));
        assert_eq!(findings(&packages), Vec::<String>::new());
        packages.push(package("one", "2.0.0", "git+https://example.org"));
        let found = findings(&packages);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("git+") && found[1].contains("versions 1 and 2"), "{found:?}");
        packages.truncate(1);
        assert!(findings(&packages)[0].contains("but one version"));
    }

    #[test]
    fn compatible_versions_agree() {
        assert_eq!(
            ["1.2.3", "0.5.1", "12.0.0-rc.1", "0.0.3"].map(compatible_part),
            ["1", "0.5", "12", "0.0"]
        );
    }
}
