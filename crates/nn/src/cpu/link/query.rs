//! Query rows from a known end and a relation, and their gradients. Replacing the source instead of the target negates
//! the relation: its translation, its angle, or the imaginary part of its numbers.

use crate::cpu::affine::for_chunks;
use crate::cpu::buffer::Parts;
use crate::cpu::wide::wide;
use crate::cpu::{CpuBackend, CpuMatrix};
use crate::{DecoderKind, QueryCall, ReplacedEnd, Shape};

/// Edges per parallel task.
const EDGES: usize = 64;

wide! {
    fn multiply(known: &[f32], relation: &[f32], to: &mut [f32]) {
        for ((to, known), relation) in to.iter_mut().zip(known).zip(relation) {
            *to = known * relation;
        }
    }

    fn translate(known: &[f32], relation: &[f32], sign: f32, to: &mut [f32]) {
        for ((to, known), relation) in to.iter_mut().zip(known).zip(relation) {
            *to = known + sign * relation;
        }
    }

    /// Complex product; the relation's imaginary part times `sign`.
    fn multiply_complex(known: &[f32], relation: &[f32], sign: f32, to: &mut [f32]) {
        let half = to.len() / 2;
        let (to_re, to_im) = to.split_at_mut(half);
        let ((known_re, known_im), (re, im)) = (known.split_at(half), relation.split_at(half));
        for at in 0..half {
            let im = sign * im[at];
            to_re[at] = known_re[at] * re[at] - known_im[at] * im;
            to_im[at] = known_re[at] * im + known_im[at] * re[at];
        }
    }

    fn multiply_back(known: &[f32], relation: &[f32], gradient: &mut [f32], of_relation: &mut [f32]) {
        let relations = of_relation.iter_mut().zip(relation);
        for ((gradient, known), (of_relation, relation)) in gradient.iter_mut().zip(known).zip(relations) {
            *of_relation = *gradient * known;
            *gradient *= relation;
        }
    }

    fn translate_back(sign: f32, gradient: &[f32], of_relation: &mut [f32]) {
        for (of_relation, gradient) in of_relation.iter_mut().zip(gradient) {
            *of_relation = sign * gradient;
        }
    }

    fn multiply_complex_back(
        known: &[f32], relation: &[f32], sign: f32, gradient: &mut [f32], of_relation: &mut [f32],
    ) {
        let half = gradient.len() / 2;
        let (g_re, g_im) = gradient.split_at_mut(half);
        let (r_re, r_im) = of_relation.split_at_mut(half);
        let ((known_re, known_im), (re, im)) = (known.split_at(half), relation.split_at(half));
        for at in 0..half {
            let (a, b, im) = (g_re[at], g_im[at], sign * im[at]);
            r_re[at] = a * known_re[at] + b * known_im[at];
            r_im[at] = sign * (b * known_re[at] - a * known_im[at]);
            g_re[at] = a * re[at] + b * im;
            g_im[at] = b * re[at] - a * im;
        }
    }
}

/// Complex product with rotations, angles `sign x scale x relation`.
fn rotate(known: &[f32], relation: &[f32], scale: f32, to: &mut [f32]) {
    let half = to.len() / 2;
    for at in 0..half {
        let (sin, cos) = (scale * relation[at]).sin_cos();
        let (re, im) = (known[at], known[half + at]);
        to[at] = re * cos - im * sin;
        to[half + at] = re * sin + im * cos;
    }
}

fn rotate_back(known: &[f32], relation: &[f32], scale: f32, gradient: &mut [f32], of_relation: &mut [f32]) {
    let half = gradient.len() / 2;
    for at in 0..half {
        let (sin, cos) = (scale * relation[at]).sin_cos();
        let (re, im) = (known[at], known[half + at]);
        let (a, b) = (gradient[at], gradient[half + at]);
        let (query_re, query_im) = (re * cos - im * sin, re * sin + im * cos);
        of_relation[at] = scale * (b * query_re - a * query_im);
        gradient[at] = a * cos + b * sin;
        gradient[half + at] = b * cos - a * sin;
    }
}

fn sign(replaced: ReplacedEnd) -> f32 {
    match replaced {
        ReplacedEnd::Target => 1.0,
        ReplacedEnd::Source => -1.0,
    }
}

/// The relations' rows; asserts that there is one for each edge.
fn relation_row<'a>(call: &QueryCall<'a, CpuBackend>, edge: usize) -> &'a [f32] {
    let relations = call.relations.expect("a decoder with relations has their rows");
    relations.row(call.relation_of[edge] as usize)
}

fn assert_shapes(call: &QueryCall<'_, CpuBackend>, queries: &CpuMatrix) {
    let columns = call.nodes.columns();
    assert_eq!((queries.rows(), queries.columns()), (call.known.len(), columns), "a query an edge");
    let wide = call.decoder.relation_columns(columns).expect("checked where the decoder was chosen");
    if wide > 0 {
        let relations = call.relations.expect("a decoder with relations has their rows");
        assert_eq!((relations.columns(), call.relation_of.len()), (wide, call.known.len()));
    }
}

pub(super) fn forward(call: &QueryCall<'_, CpuBackend>, queries: &mut CpuMatrix) {
    assert_shapes(call, queries);
    let (columns, sign) = (call.nodes.columns(), sign(call.replaced));
    let parts = Parts::new(queries.values_mut());
    for_chunks(call.known.len(), EDGES, |first, count| {
        for edge in first..first + count {
            // SAFETY: each edge has its own row, and the matrix outlives the loop.
            let to = unsafe { parts.part(edge * columns, columns) };
            let known = call.nodes.row(call.known[edge] as usize);
            match call.decoder {
                DecoderKind::Dot => to.copy_from_slice(known),
                DecoderKind::DistMult => multiply(known, relation_row(call, edge), to),
                DecoderKind::TransE { .. } => translate(known, relation_row(call, edge), sign, to),
                DecoderKind::ComplEx => multiply_complex(known, relation_row(call, edge), sign, to),
                DecoderKind::RotatE { phase_scale } => {
                    rotate(known, relation_row(call, edge), sign * phase_scale, to)
                }
            }
        }
    });
}

pub(super) fn backward(
    call: &QueryCall<'_, CpuBackend>,
    gradient: &mut CpuMatrix,
    relation_gradient: Option<&mut CpuMatrix>,
) {
    assert_shapes(call, gradient);
    let (columns, sign) = (call.nodes.columns(), sign(call.replaced));
    let wide = call.relations.map_or(0, Shape::columns);
    let Some(of_relation) = relation_gradient else {
        assert_eq!(call.decoder, DecoderKind::Dot, "relations get a gradient");
        return;
    };
    assert_eq!((of_relation.rows(), of_relation.columns()), (call.known.len(), wide));
    let (parts, of_relation) = (Parts::new(gradient.values_mut()), Parts::new(of_relation.values_mut()));
    for_chunks(call.known.len(), EDGES, |first, count| {
        for edge in first..first + count {
            // SAFETY: each edge has its own rows, and both matrices outlive the loop.
            let (gradient, of_relation) =
                unsafe { (parts.part(edge * columns, columns), of_relation.part(edge * wide, wide)) };
            let known = call.nodes.row(call.known[edge] as usize);
            match call.decoder {
                DecoderKind::Dot => {}
                DecoderKind::DistMult => {
                    multiply_back(known, relation_row(call, edge), gradient, of_relation)
                }
                DecoderKind::TransE { .. } => translate_back(sign, gradient, of_relation),
                DecoderKind::ComplEx => {
                    multiply_complex_back(known, relation_row(call, edge), sign, gradient, of_relation)
                }
                DecoderKind::RotatE { phase_scale } => {
                    let scale = sign * phase_scale;
                    rotate_back(known, relation_row(call, edge), scale, gradient, of_relation)
                }
            }
        }
    });
}
