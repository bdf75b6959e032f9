//! Types that all other crates share: ids, sizes, dtypes, budgets, progress, medians and counter-based random numbers.
//!
//! Nothing here opens a dataset or decides a policy. The only files read are the kernel's (`/proc`, cgroups), for the
//! memory that this process may use and has used.
#![forbid(unsafe_code)]

mod budget;
mod bytes;
mod device;
mod dtype;
mod error_kind;
mod ids;
mod median;
mod partition_steps;
mod progress;
pub mod random;
mod stop;
mod stored;

pub use budget::{
    Budget, MemoryLimit, OverMachine, disk_bytes_read, machine_memory_limit, own_resident_bytes,
    peak_resident_bytes,
};
pub use bytes::{ByteCount, ParseBytesError, counted, grouped};
pub use device::{DeviceName, ParseDeviceError};
pub use dtype::{Dtype, ParseDtypeError};
pub use error_kind::ErrorKind;
pub use ids::{EdgeId, IdWidth, LocalIndex, NodeId, PartitionId, SlotIndex};
pub use median::median;
pub use partition_steps::{EdgeBucket, PartitionStep, PartitionSteps, PartitionSwap, StepWork};
pub use progress::{Progress, Recorded, Silent, StageTaken, Unit};
pub use stop::StopSignal;
pub use stored::StoredRows;
