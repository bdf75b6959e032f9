use esker_io::{Disk, ThisMachine};
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

/// The disk that the arrays of a dataset are read from: this machine's, or a simulation of a bad one.
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
