use esker_io::{Disk, ThisMachine};
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

/// The disk from which the arrays of a dataset are read: this machine's, or a simulated one with faults.
#[derive(Clone)]
pub(crate) struct SharedDisk(Arc<dyn Disk>);

impl SharedDisk {
    pub(crate) fn this_machine() -> SharedDisk {
        SharedDisk(Arc::new(ThisMachine))
    }

    pub(crate) fn new(disk: Arc<dyn Disk>) -> SharedDisk {
        SharedDisk(disk)
    }
}

impl Deref for SharedDisk {
    type Target = dyn Disk;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

impl fmt::Debug for SharedDisk {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str("SharedDisk")
    }
}
