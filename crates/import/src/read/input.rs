//! Opens input files: plain or gzipped text, and members of zip archives as independent streams.

use crate::{ImportError, Location, Result};
use flate2::{Crc, bufread::MultiGzDecoder, read::DeflateDecoder};
use std::{
    fs::File,
    io::{self, BufRead, BufReader, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
};

const BUFFER_BYTES: usize = 256 << 10;

/// The path itself if it is a file, else the path with `.gz` appended, else an error that names the purpose.
pub fn plain_or_gz(path: &Path, need: &'static str) -> Result<PathBuf> {
    let mut packed = path.as_os_str().to_owned();
    packed.push(".gz");
    let packed = PathBuf::from(packed);
    match (path.is_file(), packed.is_file()) {
        (true, _) => Ok(path.to_path_buf()),
        (false, true) => Ok(packed),
        _ => Err(ImportError::Missing { path: path.to_path_buf(), need }),
    }
}

/// The path, checked to be a file.
pub fn existing(path: &Path, need: &'static str) -> Result<PathBuf> {
    if path.is_file() {
        return Ok(path.to_path_buf());
    }
    if path.is_dir() {
        return Err(Location::file(path).bad("a file", "a directory"));
    }
    Err(ImportError::Missing { path: path.to_path_buf(), need })
}

/// Opens a file for reading from its start.
pub fn open(path: &Path) -> Result<File> {
    File::open(path).map_err(|error| Location::file(path).io(error))
}

/// Opens a text file, decompressing it if it starts like gzip.
pub fn open_text(path: &Path) -> Result<Box<dyn BufRead + Send>> {
    let mut reader = BufReader::with_capacity(BUFFER_BYTES, open(path)?);
    let start = reader.fill_buf().map_err(|error| Location::file(path).io(error))?;
    if start.starts_with(&[0x1f, 0x8b]) {
        return Ok(Box::new(BufReader::with_capacity(BUFFER_BYTES, MultiGzDecoder::new(reader))));
    }
    Ok(Box::new(reader))
}

/// Reads a whole file of at most `limit_bytes`.
pub fn read_whole(path: &Path, limit_bytes: u64) -> Result<Vec<u8>> {
    let mut file = open(path)?;
    let length = file.metadata().map_err(|error| Location::file(path).io(error))?.len();
    if length > limit_bytes {
        return Err(
            Location::file(path).bad(format!("at most {limit_bytes} bytes"), format!("{length} bytes"))
        );
    }
    let mut bytes = Vec::with_capacity(length as usize);
    file.read_to_end(&mut bytes).map_err(|error| Location::file(path).io(error))?;
    Ok(bytes)
}

/// One member of a zip archive.
#[derive(Debug, Clone)]
pub struct Member {
    /// Name inside the archive.
    pub name: String,
    /// Unpacked length.
    pub bytes: u64,
    archive: PathBuf,
    data_offset: u64,
    packed_bytes: u64,
    crc32: u32,
    deflated: bool,
}

/// Lists the members of a zip archive (zip64 included).
pub fn zip_members(path: &Path) -> Result<Vec<Member>> {
    let broken = |source| ImportError::Zip { path: path.to_path_buf(), source };
    let mut archive = zip::ZipArchive::new(BufReader::new(open(path)?)).map_err(broken)?;
    let mut members = Vec::with_capacity(archive.len().min(4096));
    for index in 0..archive.len() {
        let entry = archive.by_index_raw(index).map_err(broken)?;
        let name = entry.name().map_err(broken)?.into_owned();
        let location = || Location::at(path, format!("member {name}"));
        let deflated = match entry.compression() {
            zip::CompressionMethod::Stored => false,
            zip::CompressionMethod::Deflated => true,
            other => return Err(location().bad("a stored or deflated member", format!("{other:?}"))),
        };
        if entry.encrypted() {
            return Err(location().bad("a member without a password", "an encrypted one"));
        }
        let Some(data_offset) = entry.data_start() else {
            return Err(location().bad("a local header", "none"));
        };
        members.push(Member {
            name,
            bytes: entry.size(),
            archive: path.to_path_buf(),
            data_offset,
            packed_bytes: entry.compressed_size(),
            crc32: entry.crc32(),
            deflated,
        });
    }
    Ok(members)
}

impl Member {
    /// Position of this member, for messages.
    pub fn location(&self) -> Location {
        Location::at(&self.archive, format!("member {}", self.name))
    }

    /// A stream of the unpacked bytes; their checksum is verified at the end.
    pub fn open(&self) -> Result<Box<dyn Read + Send>> {
        let mut file = open(&self.archive)?;
        file.seek(SeekFrom::Start(self.data_offset)).map_err(|error| self.location().io(error))?;
        let packed = BufReader::with_capacity(BUFFER_BYTES, file.take(self.packed_bytes));
        let reader: Box<dyn Read + Send> =
            if self.deflated { Box::new(DeflateDecoder::new(packed)) } else { Box::new(packed) };
        Ok(Box::new(Checked { reader, crc: Crc::new(), left: self.bytes, crc32: self.crc32 }))
    }

    /// All unpacked bytes, if they are at most `limit_bytes`.
    pub fn read_whole(&self, limit_bytes: u64) -> Result<Vec<u8>> {
        if self.bytes > limit_bytes {
            return Err(self
                .location()
                .bad(format!("at most {limit_bytes} bytes"), format!("{} bytes", self.bytes)));
        }
        let mut bytes = Vec::new();
        self.open()?.read_to_end(&mut bytes).map_err(|error| self.location().io(error))?;
        Ok(bytes)
    }
}

struct Checked {
    reader: Box<dyn Read + Send>,
    crc: Crc,
    left: u64,
    crc32: u32,
}

impl Read for Checked {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if out.is_empty() || self.left == 0 {
            return Ok(0);
        }
        let most = out.len().min(self.left.min(usize::MAX as u64) as usize);
        let count = self.reader.read(&mut out[..most])?;
        if count == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the archive member ends early"));
        }
        self.crc.update(&out[..count]);
        self.left -= count as u64;
        if self.left == 0 && self.crc.sum() != self.crc32 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the archive member's checksum does not match",
            ));
        }
        Ok(count)
    }
}
