use esker_device::DeviceError;
use esker_types::ErrorKind;

/// Allowed values of dropout, momentum and betas.
pub(crate) const SHARE: &str = "a share from 0 to below 1";

/// Errors of building or training a model.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum NnError {
    /// A setting that is out of bounds.
    #[error("{name} = {found}; take {allowed}")]
    Setting {
        /// Its name.
        name: &'static str,
        /// The given value.
        found: f32,
        /// The allowed values.
        allowed: &'static str,
    },
    /// A model without layers.
    #[error("a model of 0 layers; ask for at least 1")]
    NoLayers,
    /// A model that is far too large.
    #[error("{layers} layers of {hidden} columns; take at most {most_layers} and {most_hidden}")]
    TooLarge {
        /// Requested layers.
        layers: usize,
        /// Requested hidden columns.
        hidden: usize,
        /// Largest number of layers.
        most_layers: usize,
        /// Largest number of columns.
        most_hidden: usize,
    },
    /// The model has no input.
    #[error("rows of 0 features; train on a dataset with features, or on embeddings")]
    NoInput,
    /// A layer has no output.
    #[error("{hidden} hidden and {outputs} output columns; both must be at least 1")]
    NoColumns {
        /// Hidden columns.
        hidden: usize,
        /// Output columns.
        outputs: usize,
    },
    /// Attention has no heads.
    #[error("attention with 0 heads; ask for at least 1")]
    NoHeads,
    /// The heads do not divide the columns.
    #[error(
        "{hidden} hidden columns do not divide into {heads} heads; take hidden = {}",
        hidden.next_multiple_of(*heads)
    )]
    Heads {
        /// Hidden columns.
        hidden: usize,
        /// Heads, at least 1.
        heads: usize,
    },
    /// A decoder over complex numbers needs pairs of columns.
    #[error("{decoder} over {columns} columns; its numbers are complex, so take an even number: {}", columns + 1)]
    OddColumns {
        /// The decoder.
        decoder: &'static str,
        /// Columns of a node's row.
        columns: usize,
    },
    /// A row-sparse optimizer without a form for this setting.
    #[error("{name} = {found} for learned rows, of which a step moves only some; take 0")]
    SparseSetting {
        /// The setting.
        name: &'static str,
        /// Its value.
        found: f32,
    },
    /// Nesterov momentum needs momentum.
    #[error("nesterov without momentum; give momentum above 0 and below 1")]
    NoMomentum,
    /// The warm-up is longer than the schedule.
    #[error("{warmup} steps of warm-up of {steps} in all; take warmup at most steps")]
    Warmup {
        /// Steps of warm-up.
        warmup: u64,
        /// Total steps.
        steps: u64,
    },
    /// A label is not a class.
    #[error("label {found} of row {row} is not a class: the model has classes 0 to {last}; check the labels")]
    Label {
        /// The row of the logits.
        row: u32,
        /// The label.
        found: u32,
        /// The largest class.
        last: u32,
    },
    /// The device failed, or computed an infinite number or NaN.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The saved numbers belong to another model or optimizer.
    #[error(
        "{name}: expected {} x {} numbers, found {}; load them into a model of the configuration they come from",
        expected[0], expected[1], shape_text(found)
    )]
    Load {
        /// The parameter or state.
        name: String,
        /// The shape in this model.
        expected: [usize; 2],
        /// The given shape, if there is an entry of that name.
        found: Option<[usize; 2]>,
    },
}

fn shape_text(shape: &Option<[usize; 2]>) -> String {
    match shape {
        Some([rows, columns]) => format!("{rows} x {columns}"),
        None => "nothing of that name".to_string(),
    }
}

/// Result of everything in this crate.
pub type Result<T, E = NnError> = std::result::Result<T, E>;

impl From<esker_cuda::CudaError> for NnError {
    fn from(error: esker_cuda::CudaError) -> NnError {
        DeviceError::failed(error).into()
    }
}

impl NnError {
    /// The kind of error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            NnError::Label { .. } | NnError::Device(_) | NnError::Load { .. } => ErrorKind::World,
            _ => ErrorKind::Asked,
        }
    }

    /// Refuses a setting that is out of bounds.
    pub(crate) fn check_setting(
        within: bool,
        name: &'static str,
        found: f32,
        allowed: &'static str,
    ) -> Result<()> {
        if within { Ok(()) } else { Err(NnError::Setting { name, found, allowed }) }
    }
}
