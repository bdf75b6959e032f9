use esker_device::DeviceError;
use esker_types::ErrorKind;

/// What can go wrong while a model is built or trained.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum NnError {
    /// A configuration that describes no model, optimizer or schedule.
    #[error("{problem}; {remedy}")]
    Config {
        /// What was asked.
        problem: String,
        /// What to do.
        remedy: String,
    },
    /// A label that names no class.
    #[error("label {found} of row {row} is not a class: the model has classes 0 to {last}; check the labels")]
    Label {
        /// The row of the logits.
        row: u32,
        /// The label.
        found: u32,
        /// The largest class.
        last: u32,
    },
    /// The device failed, or a number it computed is not one.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Saved numbers that belong to another model or optimizer.
    #[error(
        "{name}: expected {expected}, found {found}; load them into a model of the configuration they come from"
    )]
    Load {
        /// The parameter or state.
        name: String,
        /// What this model has.
        expected: String,
        /// What was given.
        found: String,
    },
}

/// Result of everything in this crate.
pub type Result<T, E = NnError> = std::result::Result<T, E>;

impl From<esker_cuda::CudaError> for NnError {
    fn from(error: esker_cuda::CudaError) -> NnError {
        DeviceError::failed(error).into()
    }
}

impl NnError {
    /// What it is about.
    pub fn kind(&self) -> ErrorKind {
        match self {
            NnError::Config { .. } => ErrorKind::Asked,
            NnError::Label { .. } | NnError::Device(_) | NnError::Load { .. } => ErrorKind::World,
        }
    }

    pub(crate) fn config(problem: impl ToString, remedy: impl ToString) -> NnError {
        NnError::Config { problem: problem.to_string(), remedy: remedy.to_string() }
    }

    pub(crate) fn load(name: &str, expected: impl ToString, found: impl ToString) -> NnError {
        NnError::Load { name: name.to_string(), expected: expected.to_string(), found: found.to_string() }
    }
}
