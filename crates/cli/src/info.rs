use crate::output::{TextTable, print, print_json};
use crate::partition::partitions_text;
use crate::prepare::{packing_text, run_text};
use esker_fetch::packed::{Packed, RunRows};
use esker_sample::partition::StoredPartitioning;
use esker_sample::{AdjacencyRequest, PartitionedAdjacency};
use esker_sample::{HeldOut, SplitLeaks};
use esker_store::{Dataset, Derived, LabelKind, Manifest, SplitOver, stripe_directory};
use esker_types::{ByteCount, grouped};
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;

/// Show what is in a dataset: sizes, splits, packed rows, disks
#[derive(clap::Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "\
Examples:
  esker info cora
  esker info cora --json | python3 -m json.tool

Opening checks lengths, headers and the ends of the offsets; `esker verify` checks every byte."
)]
pub struct InfoArguments {
    /// Directory of the dataset
    dataset: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &InfoArguments) -> anyhow::Result<ExitCode> {
    let dataset = Dataset::open(&arguments.dataset)?;
    if arguments.json {
        return print_json(&as_json(&dataset)?);
    }
    print(&as_text(&dataset)?)
}

/// Everything about a dataset, for machines.
pub fn as_json(dataset: &Dataset) -> anyhow::Result<serde_json::Value> {
    let manifest = dataset.manifest();
    let (nodes, edges) = (&manifest.nodes, &manifest.edges);
    let features = nodes.features.as_ref();
    let labels = nodes.labels.as_ref();
    let splits = manifest.splits.as_ref();
    let derived: Vec<_> = dataset
        .all_derived()?
        .into_iter()
        .map(|(name, derived)| derived_json(dataset, &name, derived))
        .collect();
    Ok(json!({
        "path": dataset.directory().to_string_lossy(),
        "id": manifest.id,
        "format_version": manifest.esker,
        "made_by": manifest.made_by,
        "source": manifest.source,
        "nodes": nodes.count,
        "edges": edges.count,
        "undirected": edges.undirected,
        "id_dtype": manifest.id_dtype(),
        "max_in_degree": edges.max_in_degree,
        "without_in_neighbours": edges.without_in_neighbours,
        "out_neighbours": edges.out_neighbours,
        "edge_columns": edges.columns,
        "feature_dim": features.map(|features| features.dim),
        "feature_dtype": features.map(|features| features.dtype),
        "feature_scaled": features.map(|features| features.scaled),
        "row_normalised": features.map(|features| features.row_normalised),
        "label_kind": labels.map(|labels| labels.kind),
        "classes": labels.map(|labels| labels.classes),
        "labelled": labels.map(|labels| labels.labelled),
        "relations": edges.relations.as_ref().map(|relations| relations.count),
        "named_nodes": nodes.named,
        "split_over": splits.map(|splits| splits.over),
        "train": splits.map(|splits| splits.train),
        "valid": splits.map(|splits| splits.valid),
        "test": splits.map(|splits| splits.test),
        "held_out": held_out_json(dataset)?,
        "bytes": manifest.bytes(),
        "files": manifest.files,
        "striped": striped_json(dataset),
        "derived": derived,
    }))
}

/// The splits of a dataset whose edges are held out, each with its name and counts.
fn held_out(dataset: &Dataset) -> anyhow::Result<Vec<(&'static str, SplitLeaks)>> {
    let splits = dataset.manifest().splits.as_ref();
    if splits.is_none_or(|splits| splits.over == SplitOver::Nodes) {
        return Ok(Vec::new());
    }
    let splits = [("valid", HeldOut::Valid), ("test", HeldOut::Test)];
    splits.into_iter().map(|(name, split)| Ok((name, SplitLeaks::count(dataset, split)?))).collect()
}

/// What held-out edges share with training edges and what not, for machines; null where no edges are held out.
fn held_out_json(dataset: &Dataset) -> anyhow::Result<serde_json::Value> {
    let splits = held_out(dataset)?;
    if splits.is_empty() {
        return Ok(serde_json::Value::Null);
    }
    let negatives = dataset.manifest().splits.as_ref().map(|splits| &splits.negatives);
    let counts = |(name, leaks): &(&str, SplitLeaks)| {
        let counts = json!({"also_train": leaks.also_train, "unseen_nodes": leaks.unseen_nodes});
        (name.to_string(), counts)
    };
    let mut value: serde_json::Map<String, serde_json::Value> = splits.iter().map(counts).collect();
    value.insert("negatives".into(), json!(negatives));
    Ok(value.into())
}

/// The same for people: a line per split that has something to report.
fn held_out_rows(dataset: &Dataset, table: &mut TextTable) -> anyhow::Result<()> {
    for (name, SplitLeaks { also_train, unseen_nodes }) in held_out(dataset)? {
        let text = format!(
            "{} of {name} also train; {} nodes unseen in training",
            grouped(also_train),
            grouped(unseen_nodes)
        );
        table.row("held out", text);
    }
    let splits = dataset.manifest().splits.iter();
    for negatives in splits.flat_map(|splits| &splits.negatives) {
        let shared = negatives.name.ends_with("edges");
        let what = if shared { "shared by all edges" } else { "for each edge" };
        table.row("negatives", format!("{}: {} {what}", negatives.name, grouped(negatives.count)));
    }
    Ok(())
}

/// The directories behind the stripes of a dataset, in the order of the parts; none where nothing is striped.
fn stripe_directories(dataset: &Dataset) -> Vec<PathBuf> {
    let stripes = dataset.manifest().files.iter().filter_map(|entry| entry.stripes);
    let links = (0..stripes.map(|stripes| stripes.parts()).max().unwrap_or(0))
        .map(|part| stripe_directory(dataset.directory(), part));
    links.map(|link| std::fs::canonicalize(&link).unwrap_or(link)).collect()
}

/// Which arrays are striped and over what, for machines; null where nothing is. How, says each of `files`.
pub fn striped_json(dataset: &Dataset) -> serde_json::Value {
    let striped = || dataset.manifest().files.iter().filter(|entry| entry.stripes.is_some());
    if striped().next().is_none() {
        return serde_json::Value::Null;
    }
    let directories = stripe_directories(dataset);
    json!({
        "arrays": striped().map(|entry| &entry.name).collect::<Vec<_>>(),
        "bytes": striped().map(|entry| entry.bytes).sum::<u64>(),
        "directories": directories.iter().map(|path| path.to_string_lossy()).collect::<Vec<_>>(),
    })
}

/// The directories behind the stripes, for people.
pub fn striped_text(dataset: &Dataset) -> String {
    let directories = stripe_directories(dataset);
    let lines =
        directories.iter().enumerate().map(|(part, path)| format!("  stripe-{part}  {}\n", path.display()));
    lines.collect()
}

/// Everything about a dataset, for people.
pub fn as_text(dataset: &Dataset) -> anyhow::Result<String> {
    let manifest = dataset.manifest();
    let name = dataset.directory().display();
    let mut text = format!("{name}  {}, {}\n", ByteCount(manifest.bytes()), origin(manifest));
    let mut table = TextTable::new();
    table.row("nodes", grouped(manifest.nodes.count));
    table.row("edges", edges_line(manifest));
    if let Some(relations) = &manifest.edges.relations {
        let named = if relations.named { ", named" } else { "" };
        table.row("relations", format!("{}{named}", grouped(relations.count)));
    }
    for column in &manifest.edges.columns {
        table.row("edge column", format!("{} ({} x {})", column.name, column.width, column.dtype));
    }
    if let Some(features) = &manifest.nodes.features {
        let row_bytes = features.dim * features.dtype.bytes();
        let scaled = if features.scaled { ", scaled by column" } else { "" };
        let normalised = if features.row_normalised { ", rows sum to 1" } else { "" };
        let row = ByteCount(row_bytes);
        let all = ByteCount(row_bytes * manifest.nodes.count);
        table.row(
            "features",
            format!("{} x {}, {row} a row, {all}{scaled}{normalised}", features.dim, features.dtype),
        );
    }
    if let Some(labels) = &manifest.nodes.labels {
        let what = match labels.kind {
            LabelKind::Classes => "classes",
            LabelKind::Multilabel => "labels, several a node",
            LabelKind::Real => "real values a node",
        };
        let named = if labels.named { ", named" } else { "" };
        let missing = manifest.nodes.count - labels.labelled;
        let missing =
            if missing > 0 { format!(", {} nodes without", grouped(missing)) } else { String::new() };
        table.row("labels", format!("{} {what}{named}{missing}", grouped(labels.classes)));
    }
    if let Some(splits) = &manifest.splits {
        let what = if splits.over == SplitOver::Nodes { "nodes" } else { "edges" };
        let sizes = [splits.train, splits.valid, splits.test].map(grouped);
        table.row("splits", format!("train {}, valid {}, test {} {what}", sizes[0], sizes[1], sizes[2]));
    }
    held_out_rows(dataset, &mut table)?;
    if manifest.nodes.named {
        table.row("names", "nodes have string ids");
    }
    text.push_str(&table.render());
    text.push_str("  files\n");
    let width = manifest.files.iter().map(|entry| entry.name.len()).max().unwrap_or(0) + 4;
    for entry in &manifest.files {
        let shape = format!("{} x {} {}", grouped(entry.rows), entry.columns, entry.dtype);
        let file = format!("{}.bin", entry.name);
        let stripes = entry.stripes.map_or(String::new(), |stripes| {
            format!(", in stripes of {} over {} directories", ByteCount(stripes.bytes()), stripes.parts())
        });
        text.push_str(&format!(
            "    {file:width$}  {:>10}  {shape}{stripes}\n",
            ByteCount(entry.bytes).to_string()
        ));
    }
    text.push_str(&striped_text(dataset));
    for (name, derived) in dataset.all_derived()? {
        let state = match &derived {
            Ok(derived) if dataset.is_current(derived) => derived_text(dataset, derived),
            Ok(derived) if derived.manifest.kind == "partitions" => {
                "partitions, stale: `esker partition` makes them again".to_string()
            }
            Ok(derived) => format!("{}, stale: will be made again", derived.manifest.kind),
            Err(_) => "damaged: will be made again".to_string(),
        };
        text.push_str(&format!("  derived {name}: {state}\n"));
    }
    Ok(text)
}

/// Derived data, for machines.
fn derived_json(
    dataset: &Dataset,
    name: &str,
    derived: Result<Derived, esker_store::StoreError>,
) -> serde_json::Value {
    let derived = match derived {
        Ok(derived) => derived,
        Err(error) => return json!({"name": name, "fresh": false, "error": error.to_string()}),
    };
    let bytes: u64 = derived.manifest.files.iter().map(|entry| entry.bytes).sum();
    let fresh = dataset.is_current(&derived);
    let mut value = json!({"name": name, "kind": derived.manifest.kind, "fresh": fresh, "bytes": bytes});
    if let Some((request, summary)) = StoredPartitioning::describe(&derived) {
        value["request"] = json!(request);
        value["summary"] = json!(summary);
    }
    if let Some(request) = PartitionedAdjacency::describe(&derived) {
        value["fresh"] = (fresh && partitioning_of(dataset, &request).is_some()).into();
        value["partitioning"] = json!(partitioning_of(dataset, &request));
        value["request"] = json!(request);
    }
    value
}

/// The partitioning by which adjacency is stored, if the dataset still has it.
fn partitioning_of(dataset: &Dataset, request: &AdjacencyRequest) -> Option<String> {
    let names = StoredPartitioning::names(dataset).ok()?;
    let is_it = |name: &String| {
        StoredPartitioning::open(dataset, name).is_ok_and(|stored| stored.digest() == request.digest)
    };
    names.into_iter().find(is_it)
}

/// Derived data that is current, for people.
fn derived_text(dataset: &Dataset, derived: &Derived) -> String {
    let kind = &derived.manifest.kind;
    let bytes = derived.manifest.files.iter().map(|entry| entry.bytes).sum();
    if let Some(request) = PartitionedAdjacency::describe(derived) {
        let what = format!("{} neighbours, {}", request.direction, ByteCount(bytes));
        return match partitioning_of(dataset, &request) {
            Some(name) => {
                let count = grouped(request.partitions as u64);
                format!("{kind}: {what}, by the {count} partitions of `{name}`")
            }
            None => format!("{kind}: {what}, stale: its partitions are gone, and it will be made again"),
        };
    }
    if let Some(plan) = RunRows::describe(derived) {
        return format!("{kind}\n  {}", run_text(&plan, bytes).replace("\n  ", "\n    ").trim_end());
    }
    let table = match (Packed::describe(derived), StoredPartitioning::describe(derived)) {
        (Some(packing), _) => packing_text(&packing, bytes),
        (None, Some((request, summary))) => partitions_text(&request, &summary, bytes),
        (None, None) => return kind.clone(),
    };
    format!("{kind}\n  {}", table.replace("\n  ", "\n    ").trim_end())
}

fn origin(manifest: &Manifest) -> String {
    match manifest.source.options.get("preset").and_then(|preset| preset.as_str()) {
        Some(preset) => format!("generated in the shape of {preset}"),
        None if manifest.source.format == "generate" => "generated".to_string(),
        None => format!("imported from {}", manifest.source.format),
    }
}

fn edges_line(manifest: &Manifest) -> String {
    let edges = &manifest.edges;
    let mean = edges.count as f64 / manifest.nodes.count.max(1) as f64;
    let pairs = if edges.undirected { "each in both directions, " } else { "" };
    let out = if edges.out_neighbours { ", out-neighbours stored too" } else { "" };
    let lonely = grouped(edges.without_in_neighbours);
    format!(
        "{} ({pairs}in-degree {mean:.1} mean, {} most, {lonely} nodes with none{out})",
        grouped(edges.count),
        grouped(edges.max_in_degree)
    )
}
