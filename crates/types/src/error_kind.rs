/// What an error is about: who can do something about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// What was asked for cannot be: flags, values, combinations, budgets that are too small, names that are taken.
    Asked,
    /// The disk is full.
    DiskFull,
    /// Somebody asked for an end.
    Stopped,
    /// Everything else that the world does: files that are missing, unreadable or damaged, devices that fail.
    World,
}

impl ErrorKind {
    /// That of a refusal by the operating system.
    pub fn of_io(error: &std::io::Error) -> ErrorKind {
        match error.kind() {
            std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => ErrorKind::DiskFull,
            _ => ErrorKind::World,
        }
    }
}
