//! Label checks that several formats share.

use crate::npy::{NpyArray, NpyRows, Scalar};
use crate::source::{LabelKind, NodeLabels};
use crate::{Request, Result};

/// One class per node: whole numbers, or floats if `nan_is_unlabelled`.
pub(super) fn from_npy(
    array: NpyArray,
    nodes: u64,
    request: &Request,
    nan_is_unlabelled: bool,
) -> Result<NodeLabels> {
    let kind = request.label_kind.unwrap_or(LabelKind::Classes);
    let nan_is_unlabelled = nan_is_unlabelled || request.nan_is_unlabelled;
    let shape = array.shape();
    let one_column = matches!(shape, [_] | [_, 1]);
    if shape.first() != Some(&nodes) || (kind == LabelKind::Classes && !one_column) {
        return Err(array.location().bad(format!("{nodes} labels, one a node"), format!("shape {shape:?}")));
    }
    let whole = !matches!(array.scalar(), Scalar::F16 | Scalar::F32 | Scalar::F64);
    if kind == LabelKind::Classes && !whole && !nan_is_unlabelled {
        return Err(array
            .location()
            .bad("labels that are whole numbers", format!("dtype {}", array.scalar())));
    }
    Ok(NodeLabels { kind, rows: Box::new(NpyRows::new(array)?), nan_is_unlabelled })
}
