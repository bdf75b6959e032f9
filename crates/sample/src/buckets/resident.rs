//! The buckets between the residents of a step, in memory. What stays resident is not read again.

use super::{BucketReader, EdgeBuckets};
use crate::Result;
use crate::topology::StoredId;
use esker_types::{EdgeBucket, PartitionId};
use std::collections::HashMap;
use std::sync::Arc;

/// The words of buckets, by bucket.
pub type BucketWords<W> = HashMap<EdgeBucket, Arc<Vec<W>>>;

/// Keeps the buckets of a step. It stays on the thread that made it.
pub struct ResidentBuckets<W> {
    reader: BucketReader<W>,
    words: BucketWords<W>,
}

impl<W: StoredId> ResidentBuckets<W> {
    /// No buckets yet.
    pub fn new(buckets: &Arc<EdgeBuckets>) -> Result<ResidentBuckets<W>> {
        Ok(ResidentBuckets { reader: buckets.reader()?, words: BucketWords::new() })
    }

    /// Drops buckets that are not between these partitions, and reads those that are missing.
    pub fn advance(&mut self, resident: &[PartitionId]) -> Result<&BucketWords<W>> {
        self.words.retain(|bucket, _| resident.contains(&bucket.source) && resident.contains(&bucket.target));
        let pairs = resident
            .iter()
            .flat_map(|source| resident.iter().map(|target| EdgeBucket { source: *source, target: *target }));
        let mut missing: Vec<EdgeBucket> = pairs.filter(|bucket| !self.words.contains_key(bucket)).collect();
        missing.sort_unstable();
        let words = &mut self.words;
        self.reader.read(&missing, |bucket, own| drop(words.insert(bucket, Arc::new(own.to_vec()))))?;
        Ok(&self.words)
    }

    /// Bytes read so far.
    pub fn bytes_read(&self) -> u64 {
        self.reader.bytes_read()
    }
}
