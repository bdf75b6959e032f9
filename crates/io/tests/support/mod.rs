//! What the tests of reading and writing share: files with known bytes and the definition of a plan.
#![allow(dead_code, reason = "each test binary uses a part")]

use esker_io::{
    Access, AlignedBuffer, Disk, Files, IoBackendKind, IoError, Layout, Options, Piece, ThisMachine,
};
use std::path::{Path, PathBuf};

/// Bytes that differ from place to place, so a wrong row shows.
pub fn pattern(bytes: usize, salt: u64) -> Vec<u8> {
    (0..bytes as u64).map(|at| ((at + salt).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 37) as u8).collect()
}

/// A layout of `parts` parts below `directory`.
pub fn layout(directory: &Path, parts: usize) -> Layout {
    let names: Vec<PathBuf> = (0..parts).map(|part| directory.join(format!("part-{part}"))).collect();
    Layout::striped(names, 8192)
}

/// The bytes of each part of a file with these bytes: the naive twin of the layout.
pub fn deal(layout: &Layout, bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut parts = vec![Vec::new(); layout.parts().len()];
    let stripe = if parts.len() == 1 { bytes.len().max(1) } else { 8192 };
    let turns = parts.len();
    bytes.chunks(stripe).enumerate().for_each(|(number, stripe)| parts[number % turns].extend(stripe));
    parts
}

/// Writes the parts of a file with these bytes.
pub fn lay(layout: &Layout, bytes: &[u8]) {
    for (path, part) in layout.parts().iter().zip(deal(layout, bytes)) {
        std::fs::write(path, part).unwrap();
    }
}

/// The I/O backends that work in `directory`.
pub fn io_backends(directory: &Path) -> Vec<IoBackendKind> {
    let path = directory.join("probe");
    std::fs::write(&path, [0u8; 4096]).unwrap();
    let works = |io_backend: &IoBackendKind| {
        open(&Layout::file(&path), Access::Read, *io_backend, Options::default()).is_ok()
    };
    IoBackendKind::LADDER.into_iter().filter(works).collect()
}

/// Opens one file on one I/O backend.
pub fn open(
    layout: &Layout,
    access: Access,
    io_backend: IoBackendKind,
    options: Options,
) -> Result<Files, IoError> {
    ThisMachine.open(
        std::slice::from_ref(layout),
        access,
        &Options { io_backend: Some(io_backend), ..options },
    )
}

/// Pieces for these spans of the file, one behind the other in the buffer with `pad` bytes between.
pub fn pieces(spans: &[(u64, u64)], pad: u64) -> (Vec<Piece>, usize) {
    let mut at = 0;
    let pieces = spans.iter().map(|&(offset, bytes)| {
        let piece = Piece { offset, bytes, at };
        at += bytes + pad;
        piece
    });
    let pieces = pieces.collect();
    (pieces, at as usize)
}

/// What the buffer must hold: the definition, piece by piece.
pub fn assert_delivered(pieces: &[Piece], buffer: &[u8], file: &[u8], what: &str) {
    for piece in pieces {
        let got = &buffer[piece.at as usize..(piece.at + piece.bytes) as usize];
        let requested = &file[piece.offset as usize..(piece.offset + piece.bytes) as usize];
        assert!(got == requested, "{what}: {piece:?} is wrong");
    }
}

/// A buffer for direct IO.
pub fn buffer(bytes: usize) -> AlignedBuffer {
    AlignedBuffer::new(bytes, 4096)
}
