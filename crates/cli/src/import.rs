use crate::generate::Common;
use esker_import::{EdgeColumnNames, HoldOut, Request, SplitChoice};
use esker_store::LabelKind;
use esker_types::Dtype;
use std::path::PathBuf;
use std::process::ExitCode;

/// Import a graph from another format, within a memory limit
#[derive(clap::Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "\
Examples:
  esker import cora --format planetoid --from DIR --name cora --row-normalise
  esker import computers --format gnn-npz --from amazon_cs.npz --largest-component --split per-class:20,30
  esker import fb --format triples --from DIR
  esker import g --format npy --edges E.npy --features X.npy --labels Y.npy --train A.npy --valid B.npy --test C.npy --memory 256MiB
  esker import g --format csc --indptr P.npy --indices I.npy --features X.npy --labels Y.npy
  esker import words --format csv --edges E.tsv.gz --delimiter tab --features-csr F.npz --labels Y.npy --split S.npy
  esker import products --format ogb --from dataset/ogbn_products --add-reverse
  esker import papers --format papers100m --from dataset/ogbn_papers100M --add-reverse --memory 8GiB

If it is interrupted or killed, the same command resumes it. Whole-number features from 0 to 255 are stored as bytes, unless --dtype is given. planetoid, gnn-npz, masked-npz and musae make edges undirected, as PyG does; --as-stored turns that off."
)]
pub struct ImportArguments {
    /// Directory of the new dataset
    out: PathBuf,
    /// planetoid, gnn-npz, masked-npz, musae, triples, npy, csc, csv, parquet, ogb, papers100m, mag240m, igb or graphbolt
    #[arg(long)]
    format: String,
    /// Directory or file to import
    #[arg(long, value_name = "PATH")]
    from: Option<PathBuf>,
    /// Name in it: planetoid's dataset, ogb's split, igb's labels, graphbolt's task
    #[arg(long)]
    name: Option<String>,

    /// Edge list
    #[arg(long, value_name = "FILE", help_heading = "Files")]
    edges: Option<PathBuf>,
    /// Offsets of each node's in-neighbours (csc)
    #[arg(long, value_name = "FILE", help_heading = "Files")]
    indptr: Option<PathBuf>,
    /// In-neighbours (csc)
    #[arg(long, value_name = "FILE", help_heading = "Files")]
    indices: Option<PathBuf>,
    /// Feature matrix: npy, csv or parquet
    #[arg(long, value_name = "FILE", help_heading = "Files")]
    features: Option<PathBuf>,
    /// Sparse feature matrix: scipy CSR npz
    #[arg(long, value_name = "FILE", conflicts_with = "features", help_heading = "Files")]
    features_csr: Option<PathBuf>,
    /// Labels: npy, csv or parquet
    #[arg(long, value_name = "FILE", help_heading = "Files")]
    labels: Option<PathBuf>,
    /// Training nodes: ids or a boolean mask
    #[arg(long, value_name = "FILE", help_heading = "Files")]
    train: Option<PathBuf>,
    /// Validation nodes
    #[arg(long, value_name = "FILE", help_heading = "Files")]
    valid: Option<PathBuf>,
    /// Test nodes
    #[arg(long, value_name = "FILE", help_heading = "Files")]
    test: Option<PathBuf>,
    /// String ids, one per line, in the order of the feature rows
    #[arg(long, value_name = "FILE", help_heading = "Files")]
    node_ids: Option<PathBuf>,
    /// Edge weights in edge order (npy)
    #[arg(long, value_name = "FILE", help_heading = "Files")]
    edge_weights: Option<PathBuf>,
    /// Edge times in edge order (npy)
    #[arg(long, value_name = "FILE", help_heading = "Files")]
    edge_times: Option<PathBuf>,
    /// Edge feature rows in edge order (npy)
    #[arg(long, value_name = "FILE", help_heading = "Files")]
    edge_features: Option<PathBuf>,

    /// Field separator: comma, tab, space or one character
    #[arg(long, value_parser = delimiter, help_heading = "Reading")]
    delimiter: Option<char>,
    /// Whether the edge list starts with a header: yes or no; default: guessed, and reported
    #[arg(long, value_parser = yes_or_no, help_heading = "Reading")]
    header: Option<bool>,
    /// Column of the message source, by name or number
    #[arg(long, value_name = "COLUMN", help_heading = "Reading")]
    source_column: Option<String>,
    /// Column of the message target
    #[arg(long, value_name = "COLUMN", help_heading = "Reading")]
    target_column: Option<String>,
    /// Column of the relation
    #[arg(long, value_name = "COLUMN", help_heading = "Reading")]
    relation_column: Option<String>,
    /// Column of the weight
    #[arg(long, value_name = "COLUMN", help_heading = "Reading")]
    weight_column: Option<String>,
    /// Column of the time
    #[arg(long, value_name = "COLUMN", help_heading = "Reading")]
    time_column: Option<String>,
    /// Ids are strings even if they look like numbers
    #[arg(long, help_heading = "Reading")]
    string_ids: bool,
    /// Number of nodes, if no file tells it
    #[arg(long, help_heading = "Reading")]
    nodes: Option<u64>,
    /// What labels mean: classes, multilabel or real
    #[arg(long, value_parser = label_kind, help_heading = "Reading")]
    label_kind: Option<LabelKind>,
    /// NaN labels mean no label
    #[arg(long, help_heading = "Reading")]
    nan_is_unlabelled: bool,
    /// Import NaN and infinite features as they are; default: they are an error
    #[arg(long, help_heading = "Reading")]
    allow_nan: bool,
    /// Random split, per-class:TRAIN,VALID or share:TRAIN,VALID,TEST; or a file with a split
    #[arg(long, help_heading = "Reading")]
    split: Option<SplitChoice>,
    /// Edges to hold out for link prediction, as in valid:5%,test:10%, or numbers of edges. An undirected edge leaves with its reverse
    #[arg(long, value_name = "valid:V,test:T", help_heading = "Reading")]
    hold_out: Option<HoldOut>,
    /// Which of several splits in the file
    #[arg(long, default_value_t = 0, help_heading = "Reading")]
    split_index: usize,

    /// Take edges exactly as stored
    #[arg(long, help_heading = "Changing", conflicts_with_all = ["add_reverse", "remove_duplicates", "remove_self_loops"])]
    as_stored: bool,
    /// Add the reverse of every edge
    #[arg(long, help_heading = "Changing")]
    add_reverse: bool,
    /// Keep one of several identical edges
    #[arg(long, help_heading = "Changing")]
    remove_duplicates: bool,
    /// Remove edges from a node to itself
    #[arg(long, help_heading = "Changing")]
    remove_self_loops: bool,
    /// Keep only the largest connected component
    #[arg(long, help_heading = "Changing")]
    largest_component: bool,
    /// Divide each feature row by its sum
    #[arg(long, help_heading = "Changing")]
    row_normalise: bool,
    /// Store features as f32, f16, bf16, u8 or i8
    #[arg(long, help_heading = "Changing")]
    dtype: Option<Dtype>,
    /// Store out-neighbours too, for --direction outgoing and both
    #[arg(long, help_heading = "Changing")]
    out_neighbours: bool,
    /// Store each edge's position in the original list
    #[arg(long, help_heading = "Changing")]
    keep_positions: bool,
    /// Store 64-bit ids even where 32 bits would do
    #[arg(long, hide = true)]
    wide_ids: bool,
    /// Random seed of --split and --hold-out
    #[arg(long, default_value_t = 1, help_heading = "Changing")]
    seed: u64,
    #[command(flatten)]
    common: Common,
}

fn delimiter(word: &str) -> Result<char, String> {
    match word {
        "tab" | "\\t" => Ok('\t'),
        "comma" => Ok(','),
        "space" => Ok(' '),
        "semicolon" => Ok(';'),
        _ => {
            let mut chars = word.chars();
            match (chars.next(), chars.next()) {
                (Some(one), None) if one.is_ascii() => Ok(one),
                _ => Err(format!(
                    "`{word}` is not a delimiter; use comma, tab, space, semicolon or one character"
                )),
            }
        }
    }
}

fn yes_or_no(word: &str) -> Result<bool, String> {
    match word {
        "yes" => Ok(true),
        "no" => Ok(false),
        _ => Err(format!("`{word}`: use yes or no")),
    }
}

fn label_kind(word: &str) -> Result<LabelKind, String> {
    match word {
        "classes" => Ok(LabelKind::Classes),
        "multilabel" => Ok(LabelKind::Multilabel),
        "real" => Ok(LabelKind::Real),
        _ => Err(format!("`{word}`: use classes, multilabel or real")),
    }
}

impl ImportArguments {
    fn request(&self) -> Request {
        Request {
            format: self.format.clone(),
            from: self.from.clone(),
            name: self.name.clone(),
            edges: self.edges.clone(),
            features: self.features.clone(),
            features_csr: self.features_csr.clone(),
            labels: self.labels.clone(),
            label_kind: self.label_kind,
            nan_is_unlabelled: self.nan_is_unlabelled,
            allow_nan: self.allow_nan,
            train: self.train.clone(),
            valid: self.valid.clone(),
            test: self.test.clone(),
            split: self.split.clone(),
            hold_out: self.hold_out.clone(),
            split_index: self.split_index,
            indptr: self.indptr.clone(),
            indices: self.indices.clone(),
            delimiter: self.delimiter,
            columns: EdgeColumnNames {
                source: self.source_column.clone(),
                target: self.target_column.clone(),
                relation: self.relation_column.clone(),
                weight: self.weight_column.clone(),
                time: self.time_column.clone(),
            },
            header: self.header,
            node_ids: self.node_ids.clone(),
            edge_weights: self.edge_weights.clone(),
            edge_times: self.edge_times.clone(),
            edge_features: self.edge_features.clone(),
            string_ids: self.string_ids,
            nodes: self.nodes,
            as_stored: self.as_stored,
            add_reverse: self.add_reverse,
            remove_duplicates: self.remove_duplicates,
            remove_self_loops: self.remove_self_loops,
            largest_component: self.largest_component,
            row_normalise: self.row_normalise,
            dtype: self.dtype,
            out_neighbours: self.out_neighbours,
            keep_positions: self.keep_positions,
            seed: self.seed,
            wide_ids: self.wide_ids,
        }
    }
}

pub fn run(arguments: &ImportArguments) -> anyhow::Result<ExitCode> {
    let request = arguments.request();
    arguments.common.make(&arguments.out, |job| esker_import::import(&request, job))
}
