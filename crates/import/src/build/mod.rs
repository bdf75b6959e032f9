//! Streams an [`ImportSource`] into a dataset: topology through an external sort, rows directly. Everything stays
//! within the memory budget and is resumable. This module knows no formats.

mod components;
mod edges;
mod hold_out;
mod job;
mod labels;
mod rows;
mod selection;
mod splits;
mod topology;

pub(crate) use edges::EdgePlan;
pub use job::ImportJob;
pub(crate) use rows::{FeaturePlan, write_features};
pub(crate) use selection::share_of;
pub(crate) use topology::{AdjacencyWriter, IdWriter, TopologyResult, out_neighbours};

use crate::source::{ImportSource, NameSource, RowSource, Splits, Treatment};
use crate::{ImportError, ImportWorkspace, Request, Result, formats};
use esker_store::{
    EdgeColumn, EdgeInfo, FORMAT_VERSION, FeatureInfo, FileEntry, LabelInfo, Manifest, NamesWriter, NodeInfo,
    Provenance, RelationInfo, SplitInfo, Staging, file,
};
use esker_types::Unit;
use hold_out::{HeldOutEdges, HoldOutPlan};
use selection::Selection;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::xxh3_128;

/// Imports a dataset from another format.
pub fn import(request: &Request, job: &ImportJob) -> Result<Manifest> {
    formats::check_flags(request)?;
    let format = formats::by_name(&request.format)?;
    let mut inputs = format.inputs(request)?;
    inputs.extend(request.edge_features.clone());
    for input in &inputs {
        // --overwrite must not delete the input.
        if let (Ok(input), Ok(target)) = (input.canonicalize(), job.target.canonicalize())
            && input.starts_with(&target)
        {
            return Err(ImportError::InsideTarget { path: input });
        }
    }
    job.make(&fingerprint(request, &inputs)?, |staging, workspace| {
        let source = format.open(request, workspace)?;
        Builder { source: &source, request, staging, workspace }.build()
    })
}

/// Identifies the job by everything that determines its result: the request, and the length and modification time of
/// each input.
fn fingerprint(request: &Request, inputs: &[PathBuf]) -> Result<String> {
    // Debug output distinguishes paths that are not UTF-8.
    let mut text = format!("{request:?}{}", env!("CARGO_PKG_VERSION"));
    for path in inputs {
        let found = std::fs::metadata(path).map_err(|error| crate::Location::file(path).io(error))?;
        text.push_str(&format!("{:?} {} {:?}\n", path, found.len(), found.modified().ok()));
    }
    Ok(format!("{:032x}", xxh3_128(text.as_bytes())))
}

struct Builder<'a> {
    source: &'a ImportSource,
    request: &'a Request,
    staging: &'a Staging,
    workspace: &'a ImportWorkspace<'a>,
}

impl Builder<'_> {
    fn build(&self) -> Result<Manifest> {
        let (request, source) = (self.request, self.source);
        self.check_request()?;
        let treatment = self.treatment();
        let stated_nodes = self.stated_nodes()?;
        let selection = match request.largest_component {
            true => Some(components::largest(source.edges.as_ref(), stated_nodes, self.workspace)?),
            false => None,
        };
        let selection = selection.as_ref();
        // The selection stays in memory from here on.
        let selection_bytes = selection.map_or(0, |selection| Selection::memory_bytes(selection.of()));
        let workspace = &self.workspace.without(selection_bytes);
        let held_out = self.hold_out(treatment, stated_nodes, selection, workspace)?;
        let held_out = held_out.as_ref();
        let plan = EdgePlan {
            source: source.edges.as_ref(),
            treatment,
            stated_nodes,
            selection,
            held_out,
            keep_positions: request.keep_positions || request.edge_features.is_some(),
            wide_ids: request.wide_ids,
        };
        let topology = plan.build(self.staging.directory(), workspace)?;
        let mut files = topology.files.clone();
        let columns = self.edge_columns(&topology, workspace, &mut files)?;
        // Small parts first: a mistake in a split should not cost an hour of reading features.
        let labels = self.labels(selection, &mut files)?;
        let splits = match held_out {
            Some(held_out) => Some(self.held_out_splits(held_out, &topology, workspace, &mut files)?),
            None => self.splits(&topology, labels.as_ref(), selection, workspace, &mut files)?,
        };
        let features = self.features(selection, workspace, &mut files)?;
        let named =
            self.names("node names", file::NODE_NAMES, source.node_names.as_deref(), selection, &mut files)?;
        let relations = self.relations(&topology, &mut files)?;
        Ok(Manifest {
            esker: FORMAT_VERSION,
            checksum: String::new(),
            id: String::new(),
            made_by: format!("esker {}", env!("CARGO_PKG_VERSION")),
            source: self.provenance(treatment),
            nodes: NodeInfo { count: topology.nodes, types: vec!["node".into()], features, labels, named },
            edges: EdgeInfo {
                count: topology.edges,
                types: vec!["edge".into()],
                // Each edge has its reverse, also where both occur more than once.
                undirected: treatment.add_reverse || held_out.is_some_and(|held_out| held_out.undirected),
                max_in_degree: topology.max_in_degree,
                without_in_neighbours: topology.without_in_neighbours,
                out_neighbours: request.out_neighbours,
                relations,
                columns,
            },
            splits,
            files,
        }
        .complete())
    }

    /// Chooses the edges of `--hold-out`.
    fn hold_out(
        &self,
        treatment: Treatment,
        stated_nodes: Option<u64>,
        selection: Option<&Selection>,
        workspace: &ImportWorkspace,
    ) -> Result<Option<HeldOutEdges>> {
        let Some(choice) = &self.request.hold_out else { return Ok(None) };
        match &self.source.splits {
            Splits::Edges { .. } => return Err(ImportError::HeldOutAlready),
            Splits::None => {}
            _ => {
                workspace.progress.note("--hold-out: the split of nodes is left out, edges are split instead")
            }
        }
        let source = self.source.edges.as_ref();
        let seed = self.request.seed;
        HoldOutPlan { source, choice, seed, treatment, stated_nodes, selection }.build(workspace).map(Some)
    }

    fn held_out_splits(
        &self,
        held_out: &HeldOutEdges,
        topology: &TopologyResult,
        workspace: &ImportWorkspace,
        files: &mut Vec<FileEntry>,
    ) -> Result<SplitInfo> {
        let (info, entries) = workspace.step("splits", || {
            held_out.write(self.staging.directory(), topology.id_width, topology.edges, workspace)
        })?;
        files.extend(entries);
        Ok(info)
    }

    /// Writes out-neighbours and edge features if requested. Returns all edge columns.
    fn edge_columns(
        &self,
        topology: &TopologyResult,
        workspace: &ImportWorkspace,
        files: &mut Vec<FileEntry>,
    ) -> Result<Vec<EdgeColumn>> {
        let directory = self.staging.directory();
        files.extend(out_neighbours(self.request.out_neighbours, directory, topology, workspace)?);
        let mut columns = topology.columns.clone();
        if let Some(path) = &self.request.edge_features {
            let (column, entry) =
                rows::edge_features(path, directory, topology, self.request.allow_nan, workspace)?;
            columns.push(column);
            files.push(entry);
        }
        Ok(columns)
    }

    fn splits(
        &self,
        topology: &TopologyResult,
        labels: Option<&LabelInfo>,
        selection: Option<&Selection>,
        workspace: &ImportWorkspace,
        files: &mut Vec<FileEntry>,
    ) -> Result<Option<SplitInfo>> {
        let label_entry = files.iter().find(|entry| entry.name == file::NODE_LABELS);
        let plan = splits::SplitPlan {
            source: &self.source.splits,
            choice: self.request.split.as_ref(),
            seed: self.request.seed,
            nodes: topology.nodes,
            edges: topology.edges,
            id_width: topology.id_width,
            selection,
            has_relations: self.source.edges.columns().relation,
            relations: topology.relations.max(self.source.relation_names.len() as u64),
        };
        let built = plan.build(self.staging.directory(), labels.zip(label_entry), workspace)?;
        Ok(built.map(|(info, entries)| {
            files.extend(entries);
            info
        }))
    }

    fn features(
        &self,
        selection: Option<&Selection>,
        workspace: &ImportWorkspace,
        files: &mut Vec<FileEntry>,
    ) -> Result<Option<FeatureInfo>> {
        let Some(rows) = &self.source.features else { return Ok(None) };
        let Request { dtype, row_normalise, allow_nan, .. } = *self.request;
        let plan = FeaturePlan { dtype, row_normalise, allow_nan };
        let (info, entries) =
            write_features(rows.as_ref(), &plan, selection, self.staging.directory(), workspace)?;
        files.extend(entries);
        Ok(Some(info))
    }

    /// Refuses options that would have no effect.
    fn check_request(&self) -> Result<()> {
        let (request, source) = (self.request, self.source);
        let idle = [
            ("--dtype", request.dtype.is_some() && source.features.is_none(), "features"),
            ("--row-normalise", request.row_normalise && source.features.is_none(), "features"),
            (
                "--allow-nan",
                request.allow_nan && source.features.is_none() && request.edge_features.is_none(),
                "features",
            ),
            ("--label-kind", request.label_kind.is_some() && source.labels.is_none(), "labels"),
            ("--nan-is-unlabelled", request.nan_is_unlabelled && source.labels.is_none(), "labels"),
        ];
        match idle.into_iter().find(|(_, idle, _)| *idle) {
            Some((flag, _, what)) => Err(ImportError::Idle { flag, what }),
            None => Ok(()),
        }
    }

    fn treatment(&self) -> Treatment {
        let usual = if self.request.as_stored { Treatment::AS_STORED } else { self.source.usual };
        Treatment {
            add_reverse: usual.add_reverse || self.request.add_reverse,
            remove_duplicates: usual.remove_duplicates || self.request.remove_duplicates,
            remove_self_loops: usual.remove_self_loops || self.request.remove_self_loops,
        }
    }

    /// The number of nodes according to all sources that state it. They must agree.
    fn stated_nodes(&self) -> Result<Option<u64>> {
        let mut stated = self.source.nodes.or(self.request.nodes);
        let rows: [Option<&dyn RowSource>; 2] =
            [self.source.features.as_deref(), self.source.labels.as_ref().map(|labels| labels.rows.as_ref())];
        for rows in rows.into_iter().flatten() {
            let expected = *stated.get_or_insert(rows.rows());
            if rows.rows() != expected {
                let location = crate::Location { detail: String::new(), ..rows.location(0) };
                return Err(
                    location.bad(format!("{expected} rows, one a node"), format!("{} rows", rows.rows()))
                );
            }
        }
        Ok(stated)
    }

    fn labels(&self, selection: Option<&Selection>, files: &mut Vec<FileEntry>) -> Result<Option<LabelInfo>> {
        let Some(given) = &self.source.labels else { return Ok(None) };
        let plan = labels::LabelPlan {
            rows: given.rows.as_ref(),
            kind: self.request.label_kind.unwrap_or(given.kind),
            nan_is_unlabelled: given.nan_is_unlabelled || self.request.nan_is_unlabelled,
        };
        let (mut info, entry) = plan.write(selection, self.staging.directory(), self.workspace)?;
        files.push(entry);
        let names = &self.source.class_names;
        if info.kind == esker_store::LabelKind::Classes
            && names.len() as u64 >= info.classes
            && !names.is_empty()
        {
            info.classes = names.len() as u64;
            info.named = true;
            files.extend(self.few_names(file::CLASS_NAMES, names)?);
        }
        Ok(Some(info))
    }

    fn relations(
        &self,
        topology: &TopologyResult,
        files: &mut Vec<FileEntry>,
    ) -> Result<Option<RelationInfo>> {
        if !self.source.edges.columns().relation {
            return Ok(None);
        }
        let names = &self.source.relation_names;
        let count = (names.len() as u64).max(topology.relations);
        let named = !names.is_empty() && names.len() as u64 == count;
        if named {
            files.extend(self.few_names(file::RELATION_NAMES, names)?);
        }
        Ok(Some(RelationInfo { count, named }))
    }

    fn few_names(&self, name: &str, names: &[String]) -> Result<Vec<FileEntry>> {
        self.workspace.step(name, || {
            let mut writer = NamesWriter::create(self.staging.directory(), name)?;
            for name in names {
                writer.push(name.as_bytes())?;
            }
            Ok(writer.finish()?)
        })
    }

    fn names(
        &self,
        stage: &str,
        name: &str,
        names: Option<&dyn NameSource>,
        selection: Option<&Selection>,
        files: &mut Vec<FileEntry>,
    ) -> Result<bool> {
        let Some(names) = names else { return Ok(false) };
        let entries = self.workspace.step(name, || {
            self.workspace.progress.stage(stage, Some(names.count()), Unit::Count("names"));
            let mut writer = NamesWriter::create(self.staging.directory(), name)?;
            let (mut stream, mut text, mut id) = (names.open()?, Vec::new(), 0);
            while stream.next(&mut text)? {
                if selection.is_none_or(|selection| selection.contains(id)) {
                    writer.push(&text)?;
                }
                id += 1;
                self.workspace.progress.advance(1);
            }
            let entries = writer.finish()?;
            self.workspace.progress.finish();
            Ok(entries)
        })?;
        files.extend(entries);
        Ok(true)
    }

    /// The options that determined the dataset, for later readers. File names only: paths are specific to one machine.
    fn provenance(&self, treatment: Treatment) -> Provenance {
        let serde_json::Value::Object(asked) =
            serde_json::to_value(self.request.with_readable_paths()).expect("plain data")
        else {
            unreachable!("a request is an object")
        };
        let mut options: BTreeMap<String, serde_json::Value> = asked
            .into_iter()
            .filter(|(key, value)| key != "format" && !is_default(value))
            .map(|(key, value)| (key, base_name(value)))
            .collect();
        options.insert("edges_treated".into(), serde_json::to_value(treatment).expect("plain data"));
        Provenance { format: self.request.format.clone(), options }
    }
}

fn is_default(value: &serde_json::Value) -> bool {
    use serde_json::Value;
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Number(number) => number.as_u64() == Some(0),
        Value::Object(map) => map.values().all(is_default),
        _ => false,
    }
}

fn base_name(value: serde_json::Value) -> serde_json::Value {
    match value {
        serde_json::Value::String(text) => {
            let name = Path::new(&text).file_name().map(|name| name.to_string_lossy().into_owned());
            name.unwrap_or(text).into()
        }
        serde_json::Value::Object(map) => {
            map.into_iter().map(|(key, value)| (key, base_name(value))).collect()
        }
        value => value,
    }
}
