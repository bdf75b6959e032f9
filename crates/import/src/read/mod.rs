//! Readers of file types, one per file. They know bytes and rows, not the dataset these belong to.

pub mod csr;
pub mod delimited;
pub mod idlist;
pub mod input;
pub mod npy;
pub mod parquet_file;
pub mod parquet_rows;
pub mod pickle;
pub mod torch;
