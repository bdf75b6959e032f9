/// The median of measurements: the middle one, or the mean of the two in the middle.
///
/// Panics if there are none.
pub fn median(values: &[f64]) -> f64 {
    assert!(!values.is_empty(), "no measurement has no median");
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len().is_multiple_of(2) { (sorted[middle - 1] + sorted[middle]) / 2.0 } else { sorted[middle] }
}

#[cfg(test)]
mod tests {
    use super::median;

    #[test]
    fn the_middle_of_an_odd_count_counts() {
        assert_eq!(median(&[4.0]), 4.0);
        assert_eq!(median(&[9.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[5.0, -1.0, 100.0, 3.0, 4.0]), 4.0);
    }

    #[test]
    fn an_even_count_has_the_mean_of_the_middle_two() {
        assert_eq!(median(&[1.0, 2.0]), 1.5);
        assert_eq!(median(&[10.0, 1.0, 2.0, 4.0]), 3.0);
    }
}
