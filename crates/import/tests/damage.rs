//! Every flipped byte and every missing byte of a dataset is noticed, and named.
#![allow(clippy::unwrap_used, reason = "a test that unwraps says where it failed")]

use esker_import::generate::{GraphShape, PRESETS, generate};
use esker_import::{ImportJob, Request, import};
use esker_store::{Damage, Dataset, verify};
use esker_types::random::{Key, below};
use esker_types::{Budget, Silent};
use std::fs;
use std::path::{Path, PathBuf};

fn job(target: &Path) -> ImportJob<'_> {
    ImportJob { target, overwrite: false, budget: Budget { host_bytes: 64 << 20 }, progress: &Silent }
}

/// A dataset with node files, and one with relations, names and edge splits.
fn datasets(directory: &Path) -> Vec<PathBuf> {
    let graph = directory.join("graph");
    let shape = GraphShape { nodes: 300, classes: 5, dim: 33, out_neighbours: true, ..PRESETS[0].shape(1.0) };
    generate(&shape, &job(&graph)).unwrap();
    let triples = directory.join("triples");
    fs::create_dir(&triples).unwrap();
    for (name, text) in [
        ("train", "a\tlikes\tb\nb\tlikes\tc\nc\tknows\ta\n"),
        ("valid", "a\tknows\tb\n"),
        ("test", "c\tlikes\tb\n"),
    ] {
        fs::write(triples.join(format!("{name}.txt")), text).unwrap();
    }
    let words = directory.join("words");
    let request = Request { format: "triples".into(), from: Some(triples), ..Request::default() };
    import(&request, &job(&words)).unwrap();
    vec![graph, words]
}

fn files(dataset: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = fs::read_dir(dataset).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

fn damage_of(dataset: &Path) -> Vec<Damage> {
    verify(dataset, 2, &Silent).unwrap().damage
}

fn check_flip(dataset: &Path, file: &Path, whole: &[u8], at: usize, bit: u8) {
    let mut bytes = whole.to_vec();
    bytes[at] ^= 1 << bit;
    fs::write(file, &bytes).unwrap();
    let damage = damage_of(dataset);
    let named = |damage: &Damage| {
        damage.path == file && damage.offset <= at as u64 && (at as u64) < damage.offset + damage.bytes
    };
    assert!(damage.iter().any(named), "byte {at} bit {bit} of {}: {damage:?}", file.display());
}

#[test]
fn one_flipped_byte_anywhere_in_any_file_is_found_and_named() {
    let directory = tempfile::tempdir().unwrap();
    let key = Key::new(7);
    for dataset in datasets(directory.path()) {
        assert_eq!(damage_of(&dataset), []);
        for file in files(&dataset) {
            let whole = fs::read(&file).unwrap();
            let edges = [0, 8, 12, 16, 55, 56, 4087, 4088, 4095, 4096, whole.len() - 8, whole.len() - 1];
            let random = (0..60).map(|i| below(key.at(i), whole.len() as u64) as usize);
            // The manifest is small and free-form: all of it.
            let all = if file.extension().is_some_and(|e| e == "json") { 0..whole.len() } else { 0..0 };
            for at in edges.into_iter().chain(random).chain(all).filter(|at| *at < whole.len()) {
                check_flip(&dataset, &file, &whole, at, (key.at(at as u64) % 8) as u8);
            }
            fs::write(&file, &whole).unwrap();
        }
        assert_eq!(damage_of(&dataset), []);
    }
}

#[test]
fn every_cut_of_the_manifest_and_every_shortened_or_missing_file_is_a_clear_error() {
    let directory = tempfile::tempdir().unwrap();
    for dataset in datasets(directory.path()) {
        for file in files(&dataset) {
            let whole = fs::read(&file).unwrap();
            let name = file.display().to_string();
            let cuts: Vec<usize> = if name.ends_with(".json") {
                (0..whole.len()).collect()
            } else {
                vec![0, 1, 100, 4095, 4096, 4097, whole.len() / 2, whole.len() - 9, whole.len() - 1]
            };
            for cut in cuts.into_iter().filter(|cut| *cut < whole.len()) {
                fs::write(&file, &whole[..cut]).unwrap();
                let error = Dataset::open(&dataset).expect_err("a cut file opened").to_string();
                assert!(error.contains(&name), "{error}");
                assert!(damage_of(&dataset).iter().any(|damage| damage.path == file), "{name} cut to {cut}");
            }
            fs::write(&file, [&whole[..], b"x"].concat()).unwrap();
            assert!(Dataset::open(&dataset).is_err(), "{name} with a byte more");
            fs::remove_file(&file).unwrap();
            if !name.ends_with(".json") {
                assert!(damage_of(&dataset).iter().any(|damage| damage.path == file), "{name} is missing");
            }
            let error = Dataset::open(&dataset).expect_err("a missing file opened").to_string();
            let parent = dataset.display().to_string();
            assert!(error.contains(&parent), "{error}");
            fs::write(&file, &whole).unwrap();
        }
    }
}

#[test]
fn numbers_that_break_the_meaning_are_found_even_under_good_checksums() {
    use esker_store::{ArrayWriter, Manifest, Staging, file};
    let directory = tempfile::tempdir().unwrap();
    let dataset = datasets(directory.path()).remove(0);
    let manifest = Dataset::open(&dataset).unwrap().manifest().clone();
    let forged = directory.path().join("forged");
    let staging = Staging::begin(&forged, false).unwrap();
    for entry in &manifest.files {
        let name = format!("{}.bin", entry.name);
        fs::copy(dataset.join(&name), staging.directory().join(&name)).unwrap();
    }
    let mut ids = vec![0u32; manifest.edges.count as usize];
    ids[17] = manifest.nodes.count as u32;
    let mut writer =
        ArrayWriter::create(staging.directory(), file::IN_NEIGHBOURS, esker_types::Dtype::U32, 1).unwrap();
    writer.write_elements(&ids).unwrap();
    let entry = writer.finish().unwrap();
    let files =
        manifest.files.iter().filter(|e| e.name != entry.name).cloned().chain([entry.clone()]).collect();
    staging.publish(&Manifest { files, ..manifest }.complete(), "forged").unwrap();
    let damage = damage_of(&forged);
    assert_eq!((damage.len(), damage[0].offset), (1, 4096 + 17 * 4), "{damage:?}");
}
