/// The kind of an error: who can fix it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// The request is invalid: flags, values, combinations, budgets that are too small, names that exist already.
    Asked,
    /// The disk is full.
    DiskFull,
    /// A stop was requested.
    Stopped,
    /// All other causes: files that are missing, unreadable or damaged, devices that fail.
    World,
}

impl ErrorKind {
    /// The kind of a system error.
    pub fn of_io(error: &std::io::Error) -> ErrorKind {
        match error.kind() {
            std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => ErrorKind::DiskFull,
            _ => ErrorKind::World,
        }
    }
}
