//! Loops compiled once per vector width and chosen at run time, because programs are built for any x86-64. The
//! compiler reorders no sum in these loops, so all widths give bit-identical results.

/// Defines functions whose bodies are compiled for AVX-512, AVX2 and the baseline.
macro_rules! wide {
    ($($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $result:ty)? $body:block)+) => {$(
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name($($arg: $type),*) $(-> $result)? {
            #[inline(always)]
            #[allow(clippy::too_many_arguments)]
            fn body($($arg: $type),*) $(-> $result)? $body
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2")]
                #[allow(clippy::too_many_arguments)]
                fn avx512($($arg: $type),*) $(-> $result)? { body($($arg),*) }
                #[target_feature(enable = "avx2")]
                #[allow(clippy::too_many_arguments)]
                fn avx2($($arg: $type),*) $(-> $result)? { body($($arg),*) }
                match $crate::cpu::wide::width() {
                    // SAFETY: `width` has checked that the CPU has these instructions.
                    $crate::cpu::wide::Width::Avx512 => return unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    $crate::cpu::wide::Width::Avx2 => return unsafe { avx2($($arg),*) },
                    $crate::cpu::wide::Width::Baseline => {}
                }
            }
            body($($arg),*)
        }
    )+};
}
pub(crate) use wide;

/// The vector width of the CPU.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Width {
    Avx512,
    Avx2,
    Baseline,
}

/// The widest that this CPU has. The standard library caches the detection.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(crate) fn width() -> Width {
    use std::arch::is_x86_feature_detected as has;
    if has!("avx512f") && has!("avx512vl") && has!("avx512dq") && has!("avx512bw") {
        Width::Avx512
    } else if has!("avx2") {
        Width::Avx2
    } else {
        Width::Baseline
    }
}

/// Prefetches the cache lines of a row that is needed soon.
#[inline(always)]
pub(crate) fn prefetch_row(values: &[f32], first: usize, columns: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        for column in (0..columns).step_by(16) {
            let address = values.as_ptr().wrapping_add(first + column);
            // SAFETY: a prefetch reads nothing the program can see and never faults, whatever the address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (values, first, columns);
}

/// Prefetches a row that is needed later, into the L2 cache.
#[inline(always)]
pub(crate) fn prefetch_row_later(values: &[f32], first: usize, columns: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        for column in (0..columns).step_by(16) {
            let address = values.as_ptr().wrapping_add(first + column);
            // SAFETY: as above.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (values, first, columns);
}

/// `e^x` within two units in the last place, without a branch, so that it vectorises: a power of two by the exponent
/// bits times a polynomial on [-ln 2 / 2, ln 2 / 2].
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    let clamped = x.clamp(-87.3, 88.7);
    const ROUND: f32 = 12_582_912.0;
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let power = shifted - ROUND;
    let r = (clamped - power * 0.693_359_4) - power * -2.121_944_4e-4;
    let mut p = 1.987_569_1e-4f32;
    p = p * r + 1.398_199_9e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_6e-1;
    p = p * r + 0.5;
    let value = p * r * r + r + 1.0;
    let scale = f32::from_bits(
        ((shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32).wrapping_add(127) << 23) as u32,
    );
    let value = value * scale;
    // Infinite and NaN inputs keep their meaning.
    if x > 88.7 {
        f32::INFINITY
    } else if x < -103.0 {
        0.0
    } else if x.is_nan() {
        x
    } else {
        value
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_units_of_the_last_place() {
        for step in -870_000..880_000 {
            let x = step as f32 * 1e-4;
            let expected = (x as f64).exp();
            let error = (exp(x) as f64 - expected).abs() / expected;
            assert!(error < 2.4e-7, "exp({x}): {} against {expected}", exp(x));
        }
        assert!(exp(f32::NAN).is_nan() && exp(200.0).is_infinite() && exp(-200.0) == 0.0 && exp(0.0) == 1.0);
        assert!(exp(f32::INFINITY).is_infinite() && exp(f32::NEG_INFINITY) == 0.0);
    }
}
