//! `cargo xtask`: the repository's tasks.

use anyhow::{Context, Result, bail};
use std::process::{Command, ExitCode};
use std::time::Instant;

const HELP: &str = "\
cargo xtask test              everything CI runs: format, lints, tidy, dependencies, tests, documentation
cargo xtask test --fast       what finds most mistakes in two minutes: format, tidy, unit tests, quick tests
cargo xtask tidy              the repository's own rules
cargo xtask dependencies      licences and sources of everything the workspace depends on
cargo xtask fixtures          write the files that later versions must open, as this version writes them
cargo xtask kernels           compile every GPU kernel; NVRTC must be found
cargo xtask wheel             build the Python package, with the release profile, into target/python/wheels/release
cargo xtask python            its tests alone: an environment under target/python, the wheel, an example, pytest
cargo xtask gpu               fill target/gpu with the program, the tests that need a GPU and xtask, to be
                              copied to a machine with one: gpu-tests, and xtask prove gpu, run there as they are
cargo xtask prove ITEM|all    run a proof at full size, write bench/record/ITEM.json
cargo xtask bench cache|segments|pack DATASET ...
                              experiments with algorithms; --help has their flags
cargo xtask fuzz [TARGET] [--seconds N]
                              throw damaged input at the parsers
";

fn main() -> ExitCode {
    esker_io::return_freed_memory();
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let result = match words[..] {
        ["test"] => test(),
        ["test", "--fast"] => fast_test(),
        ["tidy"] => xtask::tidy::check(),
        ["dependencies"] => xtask::dependencies::check(),
        ["fixtures"] => make_fixtures(),
        ["kernels"] => compile_kernels(),
        ["wheel"] => xtask::python::wheel(),
        ["python"] => xtask::python::test(),
        ["gpu"] => xtask::prove::gpu::fill_folder().map(|folder| println!("filled {}", folder.display())),
        ["prove", "all"] => xtask::prove::ITEMS.iter().try_for_each(|item| xtask::prove::run(item.name, &[])),
        ["prove", item, ref rest @ ..] => xtask::prove::run(item, rest),
        ["prove"] => xtask::prove::run("", &[]),
        ["bench", ref rest @ ..] => xtask::bench::run_and_print(rest),
        ["fuzz", ref rest @ ..] => fuzz(rest),
        _ => {
            print!("{HELP}");
            return if words.is_empty() || words == ["--help"] {
                ExitCode::SUCCESS
            } else {
                ExitCode::from(2)
            };
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            if let Some(usage) = error.downcast_ref::<clap::Error>() {
                usage.exit();
            }
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn test() -> Result<()> {
    let started = Instant::now();
    cargo("format", &["fmt", "--all", "--", "--check"])?;
    xtask::tidy::check()?;
    xtask::dependencies::check()?;
    cargo("lints", &["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"])?;
    cargo("tests", &["test", "--workspace"])?;
    kernels()?;
    sanitized()?;
    cargo("documentation", &["doc", "--workspace", "--no-deps", "--quiet"])?;
    xtask::python::test()?;
    println!("all good in {:.0} s", started.elapsed().as_secs_f64());
    Ok(())
}

/// Integration tests that `--fast` runs. The others kill processes, enter cgroups, train for long or prove something.
/// If two crates have a test of the same name, both run.
const QUICK_TESTS: [&str; 16] = [
    "backends",
    "cache",
    "damage",
    "disk",
    "forged",
    "golden",
    "hostile",
    "links",
    "merged",
    "oracle",
    "policies",
    "reference",
    "refused",
    "rows",
    "trace",
    "versions",
];

/// Finds most mistakes during development. It does not replace [`test`], which CI runs.
fn fast_test() -> Result<()> {
    let started = Instant::now();
    cargo("format", &["fmt", "--all", "--", "--check"])?;
    xtask::tidy::check()?;
    let mut words = vec!["test", "--workspace", "--lib", "--bins"];
    words.extend(QUICK_TESTS.iter().flat_map(|name| ["--test", name]));
    cargo("quick tests", &words)?;
    let words = ["test", "--package", "esker-strategies", "--test", "it", "columns::", "phases::"];
    cargo("quick tests of strategies", &words)?;
    println!("good so far in {:.0} s; `cargo xtask test` runs the rest", started.elapsed().as_secs_f64());
    Ok(())
}

/// Makes the test that opens the fixtures write them again.
fn make_fixtures() -> Result<()> {
    let words = ["test", "--package", "esker", "--test", "versions", "--", "--ignored", "make_fixtures"];
    cargo("fixtures", &words)
}

/// Tests the crate whose unsafe code passes memory to the kernel, under the address sanitizer. The sanitizer sees our
/// own copies, the pool's reads and everything on the simulated disk, which writes to memory as late as a kernel
/// would. It does not see what a ring writes. The sanitizer comes with the compiler; only its flag is unstable.
fn sanitized() -> Result<()> {
    let target = "x86_64-unknown-linux-gnu";
    if !cfg!(all(target_arch = "x86_64", target_os = "linux", target_env = "gnu")) {
        println!("== sanitizer: skipped, it is only tried on {target}");
        return Ok(());
    }
    let words =
        ["test", "--package", "esker-io", "--target", target, "--target-dir", "target/sanitized", "--tests"];
    let switches = [("RUSTC_BOOTSTRAP", "1"), ("RUSTFLAGS", "-Zsanitizer=address")];
    cargo_with("address sanitizer", &words, &switches)
}

/// Compiles every GPU kernel with NVIDIA's compiler from the Python package index: a broken kernel fails without a
/// GPU.
fn kernels() -> Result<()> {
    let home = xtask::root().join("target/nvrtc");
    let packages = home.join("lib/python3/site-packages");
    if !packages.join("nvidia").exists() {
        println!("== kernels: installing their compiler");
        let words = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target"];
        let installed =
            Command::new("python3").args(words).arg(&packages).arg("nvidia-cuda-nvrtc>=13,<14").status();
        match installed {
            Err(error) => {
                println!(
                    "== kernels: skipped, their compiler comes from a Python package and python3 fails: {error}"
                );
                return Ok(());
            }
            Ok(status) if !status.success() => bail!("installing nvidia-cuda-nvrtc with pip failed"),
            Ok(_) => {}
        }
    }
    let home = home.to_str().context("the path of the checkout is no text")?.to_string();
    cargo_with(
        "kernels",
        &["run", "--quiet", "--package", "xtask", "--", "kernels"],
        &[("VIRTUAL_ENV", &home)],
    )
}

/// Compiles every kernel for every supported architecture.
fn compile_kernels() -> Result<()> {
    esker_cuda::can_compile()?;
    for source in esker_cuda::SOURCES {
        for architecture in ["sm_75", "sm_80", "sm_90"] {
            let bytes = source.compile(architecture)?.len();
            println!("{:14} {architecture}  {bytes:>7} bytes", source.file);
        }
    }
    Ok(())
}

fn fuzz(rest: &[&str]) -> Result<()> {
    let words = [&["run", "--release", "--package", "esker-fuzz", "--"][..], rest].concat();
    cargo("fuzz", &words)
}

fn cargo(what: &str, words: &[&str]) -> Result<()> {
    let variables: &[_] = if words[0] == "doc" { &[("RUSTDOCFLAGS", "-D warnings")] } else { &[] };
    cargo_with(what, words, variables)
}

fn cargo_with(what: &str, words: &[&str], variables: &[(&str, &str)]) -> Result<()> {
    println!("== {what}: cargo {}", words.join(" "));
    let mut command = Command::new(std::env::var("CARGO").unwrap_or_else(|_| "cargo".into()));
    command.args(words).envs(variables.iter().copied()).current_dir(xtask::root());
    let status = command.status().with_context(|| format!("cargo {}", words.join(" ")))?;
    if !status.success() {
        bail!("{what} failed");
    }
    Ok(())
}
