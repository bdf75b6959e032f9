/// What a stage counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Bytes, shown with units.
    Bytes,
    /// Things of this name.
    Count(&'static str),
}

/// Where long work reports how far it is. Stages follow one another; `advance` may come from any thread.
pub trait Progress: Sync {
    /// A stage begins; `total` when it is known.
    fn stage(&self, name: &str, total: Option<u64>, unit: Unit);
    /// So much more of the current stage is done.
    fn advance(&self, amount: u64);
    /// The current stage is over.
    fn finish(&self);
    /// Something the user should read, once.
    fn note(&self, text: &str);
}

/// Reports to nobody.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Progress for Silent {
    fn stage(&self, _: &str, _: Option<u64>, _: Unit) {}
    fn advance(&self, _: u64) {}
    fn finish(&self) {}
    fn note(&self, _: &str) {}
}
