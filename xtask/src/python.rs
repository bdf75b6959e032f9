//! The Python package: its wheel, and its tests in an environment of their own under `target/python`.

use anyhow::{Context, Result, bail};
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The torch of the tests: the newest whose GPU half can be left out (crates/py/tools/lean_torch.py), so that it takes 0.7
/// instead of 5 GB. `ESKER_TEST_TORCH` names another version, or `newest`: it is installed as it comes.
const TORCH: &str = "2.2.2";
/// What it goes with.
const PACKAGES: [&str; 7] =
    ["numpy<2", "torch_geometric==2.8.1", "typing_extensions", "filelock", "networkx", "sympy", "pytest"];
const MATURIN: &str = "maturin>=1.9,<2";

/// Builds a wheel for every Python from 3.9 on, optimised as a release is, and returns its path.
pub fn wheel() -> Result<()> {
    let Some(wheel) = built("release")? else {
        bail!("a wheel is built by maturin, a Python package: install python3 with its venv module");
    };
    println!("{}", wheel.display());
    Ok(())
}

/// Builds a wheel, installs it into an environment with torch and PyG, and runs the example and the tests there.
pub fn test() -> Result<()> {
    if let Some(missing) = missing() {
        println!("== Python: skipped, {missing}");
        return Ok(());
    }
    // The profile of the other tests: what they compiled serves here too.
    let Some(wheel) = built("dev")? else {
        println!("== Python: skipped, there is no python3 with its venv module");
        return Ok(());
    };
    let python = test_environment()?.context("python3 lost its venv module")?;
    let install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-cache-dir", "--force-reinstall"];
    run("installing the wheel", Command::new(&python).args(install).arg(&wheel))?;
    let package = crate::root().join("crates/py");
    println!("== Python: example");
    run("the example", Command::new(&python).arg(package.join("examples/five_lines.py")))?;
    println!("== Python: pytest");
    let words = ["-m", "pytest", "--quiet", "-p", "no:cacheprovider"];
    run("pytest", Command::new(&python).args(words).arg(package.join("tests")))
}

fn folder() -> PathBuf {
    crate::root().join("target/python")
}

/// The wheel as built with a profile, unless there is no Python.
fn built(profile: &str) -> Result<Option<PathBuf>> {
    let Some(python) = environment("build", &[MATURIN], |_| Ok(()))? else { return Ok(None) };
    let wheels = folder().join("wheels").join(profile);
    if wheels.exists() {
        fs::remove_dir_all(&wheels).with_context(|| format!("removing {}", wheels.display()))?;
    }
    println!("== Python: wheel, {profile}");
    let mut command = Command::new(&python);
    command.args(["-m", "maturin", "build", "--quiet", "--locked", "--profile", profile, "--interpreter"]);
    command.arg(&python).arg("--out").arg(&wheels).current_dir(crate::root().join("crates/py"));
    run("maturin", &mut command)?;
    let wheel = fs::read_dir(&wheels)?.next().context("maturin built no wheel")??.path();
    Ok(Some(wheel))
}

/// An environment of this name with these packages, made once for each list of them. `None` without a usable python3.
fn environment(
    name: &str,
    packages: &[&str],
    more: impl FnOnce(&Path) -> Result<()>,
) -> Result<Option<PathBuf>> {
    let usable = Command::new("python3").args(["-c", "import venv, ensurepip"]).output();
    if !usable.is_ok_and(|output| output.status.success()) {
        return Ok(None);
    }
    let home = folder().join(name);
    let (python, stamp) = (home.join("bin/python"), home.join("packages.txt"));
    let wanted = format!("{}\n{}", python_version().unwrap_or_default(), packages.join("\n"));
    if fs::read_to_string(&stamp).is_ok_and(|found| found == wanted) {
        return Ok(Some(python));
    }
    println!("== Python: environment for {name}: {}", packages.join(", "));
    if home.exists() {
        fs::remove_dir_all(&home).with_context(|| format!("removing {}", home.display()))?;
    }
    run("python3 -m venv", Command::new("python3").args(["-m", "venv"]).arg(&home))?;
    more(&python)?;
    let rest = packages.iter().filter(|package| !package.starts_with("lean "));
    run("pip install", pip(&python, "install").args(rest))?;
    fs::write(&stamp, wanted)?;
    Ok(Some(python))
}

/// The environment of the tests.
fn test_environment() -> Result<Option<PathBuf>> {
    let torch = std::env::var("ESKER_TEST_TORCH").ok();
    let is_lean = torch.is_none() && cfg!(target_arch = "x86_64");
    let chosen = match torch.as_deref() {
        None if is_lean => format!("lean torch {TORCH}"),
        None => format!("torch=={TORCH}"),
        Some("newest") => "torch".to_string(),
        Some(version) => format!("torch=={version}"),
    };
    // Old versions of torch need the old numpy; new ones take either.
    let mut packages = vec![chosen.as_str()];
    packages.extend(PACKAGES);
    environment("test", &packages, |python| if is_lean { install_lean_torch(python) } else { Ok(()) })
}

/// What the tests lack on this machine, if anything.
fn missing() -> Option<String> {
    if std::env::var_os("ESKER_TEST_TORCH").is_some() {
        return None;
    }
    // PyG begins at 3.10; the index has [`TORCH`] for Pythons of its time.
    let minor: Option<u32> = python_version().and_then(|version| version.split('.').nth(1)?.parse().ok());
    if !minor.is_some_and(|minor| (10..=12).contains(&minor)) {
        let found = python_version().unwrap_or_else(|| "none".into());
        return Some(format!(
            "torch {TORCH} is for Python 3.10 to 3.12, found {found}; ESKER_TEST_TORCH names another"
        ));
    }
    let has = |tool: &&str| {
        Command::new(tool).arg("--version").output().is_ok_and(|output| output.status.success())
    };
    let tools = ["cc", "nm", "readelf"];
    let absent = tools.iter().find(|tool| cfg!(target_arch = "x86_64") && !has(tool))?;
    Some(format!(
        "{absent} is not there, which leaves torch's GPU half out; ESKER_TEST_TORCH={TORCH} installs it whole"
    ))
}

/// The version of python3, as it says it.
fn python_version() -> Option<String> {
    let output = Command::new("python3")
        .args(["-c", "import platform; print(platform.python_version())"])
        .output()
        .ok()?;
    Some(String::from_utf8_lossy(&output.stdout).trim().to_string())
}

/// Downloads torch, unpacks what the CPU needs, and deletes the download.
fn install_lean_torch(python: &Path) -> Result<()> {
    let download = folder().join("download");
    if download.exists() {
        // An interrupted download left it.
        fs::remove_dir_all(&download).with_context(|| format!("removing {}", download.display()))?;
    }
    fs::create_dir_all(&download)?;
    let mut command = pip(python, "download");
    command.args(["--no-deps", "--only-binary", ":all:", "--dest"]).arg(&download);
    run("downloading torch", command.arg(format!("torch=={TORCH}")))?;
    let wheel = fs::read_dir(&download)?.next().context("pip downloaded no torch")??.path();
    let site = "import sysconfig; print(sysconfig.get_path('purelib'))";
    let output = Command::new(python).args(["-c", site]).output()?;
    let site = String::from_utf8(output.stdout)?;
    let script = crate::root().join("crates/py/tools/lean_torch.py");
    run("unpacking torch", Command::new(python).arg(script).arg(wheel).arg(site.trim()))?;
    fs::remove_dir_all(&download).with_context(|| format!("removing {}", download.display()))
}

/// pip without a cache: it would keep everything a second time.
fn pip(python: &Path, verb: &str) -> Command {
    let mut command = Command::new(python);
    command.args(["-m", "pip", verb, "--quiet", "--no-cache-dir", "--disable-pip-version-check"]);
    command
}

fn run(what: &str, command: &mut Command) -> Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    let words: Vec<_> = command.get_args().map(OsStr::to_string_lossy).collect();
    let shown = format!("{program} {}", words.join(" "));
    let status = command.status().with_context(|| shown.clone())?;
    if !status.success() {
        bail!("{what} failed: {shown}");
    }
    Ok(())
}
