//! How many accesses a cache of any size would answer, as a small table: enough to say what more memory would bring without
//! counting again.

/// Accesses to the rows accessed most, at some numbers of rows.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Coverage {
    /// Rows and the accesses to them, both rising: 1, 2, 4, ... rows, and at last all that are accessed.
    points: Vec<[u64; 2]>,
}

impl Coverage {
    /// From how many rows have each number of accesses, the highest number first.
    pub(crate) fn of(by_count: impl Iterator<Item = (u64, u64)>) -> Coverage {
        let (mut points, mut rows, mut accesses, mut next) = (Vec::new(), 0, 0, 1);
        for (count, more) in by_count {
            while next <= rows + more {
                points.push([next, accesses + (next - rows) * count]);
                next *= 2;
            }
            (rows, accesses) = (rows + more, accesses + more * count);
        }
        if points.last().is_some_and(|[last, _]| *last < rows) {
            points.push([rows, accesses]);
        }
        Coverage { points }
    }

    /// As it was written down.
    pub fn from_points(points: &[[u64; 2]]) -> Coverage {
        Coverage { points: points.to_vec() }
    }

    /// To be written down.
    pub fn points(&self) -> &[[u64; 2]] {
        &self.points
    }

    /// Accesses to rows without a slot, where so many rows have one: exact at the points, between them not too few, because
    /// the next row never has more accesses than the one before.
    pub fn misses(&self, slots: u64) -> u64 {
        let all = self.points.last().map_or(0, |[_, accesses]| *accesses);
        let mut before = [0, 0];
        for point in &self.points {
            if slots <= point[0] {
                let (rows, accesses) = (point[0] - before[0], point[1] - before[1]);
                let more = (slots - before[0]) as u128 * accesses as u128 / rows.max(1) as u128;
                return all - before[1] - more as u64;
            }
            before = *point;
        }
        0
    }
}
