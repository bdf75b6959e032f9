use super::selection::Selection;
use crate::source::RowSource;
use crate::{ImportWorkspace, Result};
use esker_store::{ArrayWriter, FileEntry, LabelInfo, LabelKind, file};
use esker_types::{Dtype, Unit};
use std::path::Path;

/// Class numbers are converted through f32, which represents every whole number up to this one.
const MOST_CLASSES: f32 = 16_777_216.0;
/// Values converted at a time.
const PIECE_VALUES: u64 = 1 << 16;

/// Labels and their meaning.
pub(super) struct LabelPlan<'a> {
    pub rows: &'a dyn RowSource,
    pub kind: LabelKind,
    pub nan_is_unlabelled: bool,
}

impl LabelPlan<'_> {
    /// Writes the labels of the selected nodes.
    pub fn write(
        &self,
        selection: Option<&Selection>,
        directory: &Path,
        workspace: &ImportWorkspace,
    ) -> Result<(LabelInfo, FileEntry)> {
        let dim = self.rows.dim();
        if dim == 0 || (self.kind == LabelKind::Classes && dim != 1) {
            let found = format!("{dim} columns; --label-kind multilabel or real takes several");
            return Err(self.rows.location(0).bad("one class a row", found));
        }
        workspace.step("labels", || {
            let dtype = match self.kind {
                LabelKind::Classes => Dtype::I32,
                LabelKind::Multilabel => Dtype::U8,
                LabelKind::Real => Dtype::F32,
            };
            workspace.progress.stage("write labels", Some(self.rows.rows()), Unit::Count("rows"));
            let mut writer = ArrayWriter::create(directory, file::NODE_LABELS, dtype, dim as u64)?;
            let piece_rows = (PIECE_VALUES / dim as u64).max(1);
            let (mut stream, mut row, mut values) = (self.rows.open(0)?, 0, Vec::new());
            let (mut labelled, mut classes, mut bytes) = (0, 0, Vec::new());
            while row < self.rows.rows() {
                let count = piece_rows.min(self.rows.rows() - row);
                values.resize(count as usize * dim, 0.0);
                stream.fill(&mut values)?;
                bytes.clear();
                for (label, node) in values.chunks_exact(dim).zip(row..) {
                    if selection.is_none_or(|selection| selection.contains(node)) {
                        let known = self.append(label, node, &mut classes, &mut bytes)?;
                        labelled += known as u64;
                    }
                }
                writer.write(&bytes)?;
                row += count;
                workspace.progress.advance(count);
            }
            let classes = if self.kind == LabelKind::Classes { classes } else { dim as u64 };
            let info = LabelInfo { kind: self.kind, classes, labelled, named: false };
            let entry = writer.finish()?;
            workspace.progress.finish();
            Ok((info, entry))
        })
    }

    /// Appends a label in its stored form. Returns whether the node has one.
    fn append(&self, label: &[f32], node: u64, classes: &mut u64, bytes: &mut Vec<u8>) -> Result<bool> {
        let mut known = false;
        for value in label {
            if value.is_nan() && !self.nan_is_unlabelled {
                let expected = "a label (pass --nan-is-unlabelled if NaN stands for none)";
                return Err(self.rows.location(node).bad(expected, "NaN"));
            }
            match self.kind {
                LabelKind::Classes => {
                    let class = if value.is_nan() { -1.0 } else { *value };
                    if class.fract() != 0.0 || !(-1.0..MOST_CLASSES).contains(&class) {
                        let expected = "a class: a whole number from 0, or -1 for none";
                        return Err(self.rows.location(node).bad(expected, value));
                    }
                    known |= class >= 0.0;
                    *classes = (*classes).max((class + 1.0) as u64);
                    bytes.extend((class as i32).to_le_bytes());
                }
                LabelKind::Multilabel => {
                    let flag = match *value {
                        0.0 => 0,
                        1.0 => 1,
                        v if v.is_nan() || v == -1.0 => 255,
                        v => return Err(self.rows.location(node).bad("0 or 1 (-1 for unknown)", v)),
                    };
                    known |= flag != 255;
                    bytes.push(flag);
                }
                LabelKind::Real => {
                    known |= !value.is_nan();
                    bytes.extend(value.to_le_bytes());
                }
            }
        }
        Ok(known)
    }
}
