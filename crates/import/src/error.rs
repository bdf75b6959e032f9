use esker_types::{ByteCount, Dtype, ErrorKind};
use std::{
    error::Error,
    fmt, io,
    path::{Path, PathBuf},
};
use zip::result::ZipError;

/// Errors of reading other formats.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// The operating system refused.
    #[error("{location}: {source}")]
    Io {
        /// Where.
        location: Location,
        /// Its error.
        source: io::Error,
    },
    /// The bytes do not match the format.
    #[error("{location}: expected {expected}, found {found}")]
    Bad {
        /// File, and row, byte or key.
        location: Location,
        /// What was expected.
        expected: String,
        /// What was found.
        found: String,
    },
    /// A file ends too early, or a compressed stream is broken.
    #[error(
        "{location}: expected more bytes, found the end of the file ({source}); is it cut off or damaged?"
    )]
    CutOff {
        /// Where.
        location: Location,
        /// The reader's error.
        source: io::Error,
    },
    /// A decoder failed.
    #[error("{location}: expected {expected}, found {source}")]
    Undecodable {
        /// Where.
        location: Location,
        /// What was expected.
        expected: &'static str,
        /// The decoder's error.
        source: Box<dyn Error + Send + Sync>,
    },
    /// An archive cannot be opened.
    #[error(
        "{path}: expected a whole zip archive, found one that does not open ({source}): it is cut off, or not a zip or npz; fetch or save it again"
    )]
    Zip {
        /// The archive.
        path: PathBuf,
        /// Its reader's error.
        source: ZipError,
    },
    /// A file that the format needs does not exist.
    #[error("{path}: not found; {need}")]
    Missing {
        /// The missing path.
        path: PathBuf,
        /// What it is needed for, and a remedy.
        need: &'static str,
    },
    /// The edge list has more edges than on the first read.
    #[error("the edge list grew while it was read; import it again when nothing writes to it")]
    EdgesGrew,
    /// There is no format of that name.
    #[error("`{name}` is not a format; use one of {}", known.join(", "))]
    NoSuchFormat {
        /// The given name.
        name: String,
        /// The known formats.
        known: Vec<&'static str>,
    },
    /// Flags that exclude each other.
    #[error("give {flags}, not both")]
    NotBoth {
        /// The flags, with `or` between them.
        flags: &'static str,
    },
    /// A flag that the format does not read.
    #[error("--format {format} does not read --{flag}; it reads --{}", reads.join(", --"))]
    NotRead {
        /// The format.
        format: &'static str,
        /// The flag, without dashes.
        flag: &'static str,
        /// The flags that it reads.
        reads: Vec<&'static str>,
    },
    /// A flag that the format requires is missing.
    #[error("--format {format} needs {flag}; see `esker import --help`")]
    NoFlag {
        /// The format.
        format: String,
        /// The flag and its value.
        flag: &'static str,
    },
    /// The file names of Planetoid need a name.
    #[error("--format planetoid needs --name NAME, as in --name cora for ind.cora.x")]
    NoPlanetoidName,
    /// IGB has no such labels.
    #[error("--name {name}: IGB has labels 19 and 2K")]
    NoSuchIgbLabels {
        /// The given name.
        name: String,
    },
    /// A flag without effect.
    #[error("{flag} has nothing to work on: there are no {what}")]
    Idle {
        /// The flag.
        flag: &'static str,
        /// What it would work on.
        what: &'static str,
    },
    /// Nodes are numbered in the order of their names, but another file has them by row.
    #[error(
        "ids are names, and {flag} counts nodes by row: say which name has which row with --node-ids FILE, one name a line"
    )]
    NoNodeIds {
        /// The flag of the other file.
        flag: &'static str,
    },
    /// Two different numbers of nodes.
    #[error("--nodes says {asked}, but {who} has {found}")]
    NodesDiffer {
        /// According to `--nodes`.
        asked: u64,
        /// The contradicting source.
        who: &'static str,
        /// According to that source.
        found: u64,
    },
    /// An input that `--overwrite` would delete.
    #[error("{path}: lies inside the dataset to be written")]
    InsideTarget {
        /// The input.
        path: PathBuf,
    },
    /// Features cannot be stored in this dtype.
    #[error("--dtype {dtype}: features are stored as f32, f16, bf16, u8 or i8")]
    NoFeatureDtype {
        /// The given dtype.
        dtype: Dtype,
    },
    /// There is no row of masks with this index.
    #[error(
        "{location}: there are {count} splits, 0 to {}; --split-index {index} is none of them",
        count.saturating_sub(1)
    )]
    NoSuchMask {
        /// The masks.
        location: Location,
        /// Number of rows.
        count: u64,
        /// The given index.
        index: usize,
    },
    /// There is no split with this index.
    #[error("{path}: there are {count} splits, counted from 0; --split-index {index} is none of them")]
    NoSuchSplit {
        /// The file of splits.
        path: PathBuf,
        /// Number of splits.
        count: u64,
        /// The given index.
        index: usize,
    },
    /// A split index is given, but the file has only one split.
    #[error("{path}: --split-index {index} chooses among the splits of one file; a mask holds one")]
    SingleMask {
        /// The mask.
        path: PathBuf,
        /// The given index.
        index: usize,
    },
    /// A word of `per-class:` is not a number.
    #[error("`{word}` is not a count; write per-class:20,30")]
    NoCount {
        /// The word.
        word: String,
    },
    /// Too few or too many counts.
    #[error("`{word}`: write per-class:TRAIN,VALID, as in per-class:20,30")]
    NoCounts {
        /// The given text.
        word: String,
    },
    /// A word of `share:` is not a number.
    #[error("`{word}` is not a share; write share:0.6,0.2,0.2")]
    NoShare {
        /// The word.
        word: String,
    },
    /// Too few or too many shares, or shares that add up to more than 1.
    #[error("`{word}`: write share:TRAIN,VALID,TEST with shares that add up to at most 1")]
    NoShares {
        /// The given text.
        word: String,
    },
    /// Edges to hold out that cannot be read.
    #[error("`{word}`: write --hold-out valid:5%,test:10%, or numbers of edges; less than all of them")]
    NoHoldOut {
        /// The given text.
        word: String,
    },
    /// Nothing would be left to train on.
    #[error("--hold-out takes {valid} + {test} edges, and there are {edges}; leave some for training")]
    AllHeldOut {
        /// Validation edges.
        valid: u64,
        /// Test edges.
        test: u64,
        /// Edges of the source; two directions count once.
        edges: u64,
    },
    /// The format holds out edges itself.
    #[error("the format has validation and test edges of its own; leave out --hold-out")]
    HeldOutAlready,
    /// Negatives of nodes that were left out.
    #[error("the format has fixed negatives, which need all nodes; leave out --largest-component")]
    NegativesOfSome,
    /// A knowledge graph without nodes or relations.
    #[error("a knowledge graph needs a node and a relation at least")]
    EmptyFacts,
    /// A knowledge graph larger than ids allow.
    #[error("{nodes} nodes and {relations} relations are more than a dataset can have")]
    HugeFacts {
        /// Nodes.
        nodes: u64,
        /// Relations.
        relations: u64,
    },
    /// There are no classes to draw from.
    #[error("--split per-class needs labels that are classes")]
    NoClasses,
    /// More nodes per class are requested than the graph has.
    #[error("--split per-class:{train},{valid}: there are only {nodes} nodes")]
    FewNodes {
        /// Training nodes per class.
        train: u64,
        /// Validation nodes per class.
        valid: u64,
        /// Nodes of the graph.
        nodes: u64,
    },
    /// More nodes of a class are requested than it has.
    #[error(
        "--split per-class:{train},{valid}: class {class} has {found} nodes, {needed} are needed; choose smaller numbers"
    )]
    SmallClass {
        /// Training nodes per class.
        train: u64,
        /// Validation nodes per class.
        valid: u64,
        /// The class.
        class: i32,
        /// Nodes of the class.
        found: u64,
        /// Nodes requested of the class.
        needed: u64,
    },
    /// A training node without a label.
    #[error(
        "node {node} of the dataset is in the training split and has no label; fix the split or the labels"
    )]
    Unlabelled {
        /// The node.
        node: u64,
    },
    /// The graph is empty.
    #[error("--nodes, --dim and --classes must be at least 1")]
    EmptyGraph,
    /// The graph is larger than any disk.
    #[error("--nodes {nodes} --dim {dim}: at most 2^56 nodes and 2^24 numbers a row")]
    HugeGraph {
        /// Requested nodes.
        nodes: u64,
        /// Requested numbers per row.
        dim: u64,
    },
    /// Too many classes.
    #[error("--classes {classes}: at most one a node, and at most 2^24")]
    ManyClasses {
        /// Requested classes.
        classes: u64,
    },
    /// A parameter of the graph is out of range.
    #[error("{flag} {value}: {allowed}")]
    OutOfRange {
        /// The flag.
        flag: &'static str,
        /// The given value.
        value: f64,
        /// The allowed values.
        allowed: &'static str,
    },
    /// The split shares are out of range, or add up to more than 1.
    #[error("the shares of train, valid and test must be from 0 to 1 and add up to at most 1")]
    GraphShares,
    /// The work does not fit into the memory budget.
    #[error("{what} needs {} but --memory gives {}; use --memory {} or more", ByteCount(*.needs_bytes), ByteCount(*.budget_bytes), ByteCount(*.minimum_bytes).flag_value())]
    OverBudget {
        /// The part that needs it.
        what: String,
        /// Bytes it needs.
        needs_bytes: u64,
        /// Bytes of the budget.
        budget_bytes: u64,
        /// The smallest budget that works.
        minimum_bytes: u64,
    },
    /// The disk has too little space.
    #[error("{path}: this takes about {}, the disk has {} free; make it smaller, or use another disk", ByteCount(*.needs_bytes), ByteCount(*.free_bytes))]
    NoRoom {
        /// The target directory.
        path: PathBuf,
        /// Bytes it needs.
        needs_bytes: u64,
        /// Bytes available.
        free_bytes: u64,
    },
    /// Writing the dataset failed.
    #[error(transparent)]
    Store(#[from] esker_store::StoreError),
}

impl ImportError {
    /// The kind of error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            ImportError::Store(error) => error.kind(),
            ImportError::Io { source, .. } => ErrorKind::of_io(source),
            ImportError::Bad { .. }
            | ImportError::CutOff { .. }
            | ImportError::Undecodable { .. }
            | ImportError::Zip { .. }
            | ImportError::Missing { .. }
            | ImportError::EdgesGrew
            | ImportError::NoRoom { .. } => ErrorKind::World,
            // All others are mistakes in the request.
            _ => ErrorKind::Asked,
        }
    }
}

/// Result of everything in this crate.
pub type Result<T, E = ImportError> = std::result::Result<T, E>;

/// A position in an input file, for messages: `edges.csv.gz, row 17`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Location {
    /// The file.
    pub path: PathBuf,
    /// The position in words; empty for the whole file.
    pub detail: String,
}

impl Location {
    /// The whole file.
    pub fn file(path: &Path) -> Location {
        Location { path: path.to_path_buf(), detail: String::new() }
    }

    /// A row, counted from 0.
    pub fn row(path: &Path, row: u64) -> Location {
        Location { path: path.to_path_buf(), detail: format!("row {row}") }
    }

    /// A byte offset.
    pub fn byte(path: &Path, offset: u64) -> Location {
        Location { path: path.to_path_buf(), detail: format!("byte {offset}") }
    }

    /// Any other description of the position: a key, an archive member, a line.
    pub fn at(path: &Path, detail: impl fmt::Display) -> Location {
        Location { path: path.to_path_buf(), detail: detail.to_string() }
    }

    /// A column at this position, counted from 0.
    pub fn column(self, column: usize) -> Location {
        let gap = if self.detail.is_empty() { "" } else { ", " };
        Location { detail: format!("{}{gap}column {column}", self.detail), ..self }
    }

    /// The error for bytes at this position that are not as expected.
    pub fn bad(self, expected: impl fmt::Display, found: impl fmt::Display) -> ImportError {
        ImportError::Bad { location: self, expected: expected.to_string(), found: found.to_string() }
    }

    /// The error for a failed system call, or a broken compressed stream, at this position.
    pub fn io(self, source: io::Error) -> ImportError {
        // The error text of decompressors for a truncated download.
        let cut = source.kind() == io::ErrorKind::UnexpectedEof || source.to_string().contains("deflate");
        match cut {
            true => ImportError::CutOff { location: self, source },
            false => ImportError::Io { location: self, source },
        }
    }

    /// The error for bytes at this position that a decoder rejected.
    pub fn undecodable(
        self,
        expected: &'static str,
        source: impl Into<Box<dyn Error + Send + Sync>>,
    ) -> ImportError {
        ImportError::Undecodable { location: self, expected, source: source.into() }
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path.display())?;
        if self.detail.is_empty() { Ok(()) } else { write!(f, ", {}", self.detail) }
    }
}
