//! How many accesses a cache of any size would serve, as a small table. It shows what more memory would save without
//! counting again.

/// Accesses to the most accessed rows, for some numbers of rows.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Coverage {
    /// Numbers of rows and the accesses to them, both ascending: 1, 2, 4, ... rows, and finally all accessed rows.
    points: Vec<[u64; 2]>,
}

impl Coverage {
    /// From pairs of an access count and the number of rows with it, the highest count first.
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

    /// From stored points.
    pub fn from_points(points: &[[u64; 2]]) -> Coverage {
        Coverage { points: points.to_vec() }
    }

    /// The points, for storage.
    pub fn points(&self) -> &[[u64; 2]] {
        &self.points
    }

    /// Accesses to rows without a slot, if this many rows have one. It is exact at the points and an upper bound
    /// between them, because rows are in order of falling counts.
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
