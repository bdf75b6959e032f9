//! Readers of foreign file types, one a file: they know bytes and rows, not which dataset they belong to.

pub mod csr;
pub mod delimited;
pub mod idlist;
pub mod input;
pub mod npy;
pub mod parquet_file;
pub mod parquet_rows;
pub mod pickle;
pub mod torch;
