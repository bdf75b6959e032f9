use std::fmt;
use std::sync::Arc;

/// Errors of a device.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum DeviceError {
    /// A loss or gradient that is infinite or not a number.
    #[error(
        "{what} is {found}; lower the learning rate, clip gradients, or check the features for such values"
    )]
    NotFinite {
        /// The computed quantity.
        what: String,
        /// Its value.
        found: f64,
    },
    /// The device failed, or is out of memory.
    #[error(transparent)]
    Failed(#[from] Failure),
}

/// Result of everything in this crate.
pub type Result<T, E = DeviceError> = std::result::Result<T, E>;

/// The error of a device that failed. Clones share it.
#[derive(Debug, Clone)]
pub struct Failure(Arc<dyn std::error::Error + Send + Sync>);

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Failure {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source()
    }
}

/// Failures with the same text are the same.
impl PartialEq for Failure {
    fn eq(&self, other: &Failure) -> bool {
        self.0.to_string() == other.0.to_string()
    }
}

impl DeviceError {
    /// A failure with the device's own error.
    pub fn failed(error: impl std::error::Error + Send + Sync + 'static) -> DeviceError {
        DeviceError::Failed(Failure(Arc::new(error)))
    }

    /// A gradient whose norm is infinite or not a number.
    pub fn gradient(norm: f64) -> DeviceError {
        DeviceError::NotFinite { what: "the norm of the gradient".to_string(), found: norm }
    }
}
