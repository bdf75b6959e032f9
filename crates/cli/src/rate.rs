//! How fast something goes now, for estimates of the time left. What came before the last half minute does not count:
//! a slow start says nothing about the rest.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// The time that counts.
const WINDOW: Duration = Duration::from_secs(30);
/// Points are at least this far apart, so that there are few.
const SPACING: Duration = Duration::from_millis(500);

/// The rate over the last half minute.
#[derive(Debug, Default)]
pub struct RecentRate {
    /// When how much was done. The first is at the start of the window, the last is the present.
    points: VecDeque<(Instant, u64)>,
}

impl RecentRate {
    /// So much is done now. The rate is measured from the first call on: what was done before then came from elsewhere,
    /// or took the time to start.
    pub fn see(&mut self, now: Instant, done: u64) {
        // The last point moves along until it is far enough from the one before.
        if let [.., before, _] = *self.points.make_contiguous()
            && now.duration_since(before.0) < SPACING
        {
            self.points.pop_back();
        }
        self.points.push_back((now, done));
        while self.points.get(1).is_some_and(|second| now.duration_since(second.0) >= WINDOW) {
            self.points.pop_front();
        }
    }

    /// Done per second. `None` as long as nothing can be said.
    pub fn per_second(&self) -> Option<f64> {
        let (first, last) = (self.points.front()?, self.points.back()?);
        let seconds = last.0.duration_since(first.0).as_secs_f64();
        let done = last.1.checked_sub(first.1).filter(|done| *done > 0 && seconds > 0.0)?;
        Some(done as f64 / seconds)
    }

    /// The seconds for so much more.
    pub fn seconds_for(&self, left: u64) -> Option<f64> {
        self.per_second().map(|rate| left as f64 / rate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rate after points of seconds and what was done.
    fn rate(points: &[(f64, u64)]) -> Option<f64> {
        let (start, mut rate) = (Instant::now(), RecentRate::default());
        points.iter().for_each(|(seconds, done)| rate.see(start + Duration::from_secs_f64(*seconds), *done));
        rate.per_second().map(|rate| (rate * 100.0).round() / 100.0)
    }

    #[test]
    fn one_point_says_nothing() {
        assert_eq!(rate(&[]), None);
        assert_eq!(rate(&[(42.0, 1)]), None);
        assert_eq!(rate(&[(1.0, 5), (2.0, 5)]), None);
    }

    #[test]
    fn the_time_to_the_first_does_not_count() {
        assert_eq!(rate(&[(42.0, 1), (43.0, 11)]), Some(10.0));
    }

    #[test]
    fn what_was_done_earlier_does_not_count() {
        assert_eq!(rate(&[(0.0, 1000), (10.0, 1010)]), Some(1.0));
    }

    #[test]
    fn only_the_last_half_minute_counts() {
        let slow = (0..100).map(|second| (second as f64, second));
        let fast = (0..35).map(|second| (100.0 + second as f64, 100 + second * 7));
        assert_eq!(rate(&slow.chain(fast).collect::<Vec<_>>()), Some(7.0));
    }

    #[test]
    fn many_points_are_kept_as_few() {
        let (start, mut rate) = (Instant::now(), RecentRate::default());
        (0..100_000u64).for_each(|at| rate.see(start + Duration::from_millis(at), at));
        assert!(rate.points.len() < 70, "{}", rate.points.len());
        assert!((rate.per_second().unwrap() - 1000.0).abs() < 1.0);
        assert!((rate.seconds_for(5000).unwrap() - 5.0).abs() < 0.1);
    }
}
