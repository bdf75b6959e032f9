//! Guesses the layout of an edge table from its first rows: header, columns, numbers or names. Every guess is
//! reported, and an ambiguous table is an error.

use crate::delimited::{EdgeLayout, parse_id};
use crate::{Location, Request, Result};
use std::path::Path;

/// Header words by meaning.
const SOURCE_WORDS: &[&str] = &[
    "source",
    "src",
    "from",
    "head",
    "subject",
    "u",
    "node1",
    "node_1",
    "id_1",
    "source_id",
    "src_id",
    "source_node",
];
const TARGET_WORDS: &[&str] = &[
    "target",
    "dst",
    "dest",
    "destination",
    "to",
    "tail",
    "object",
    "v",
    "node2",
    "node_2",
    "id_2",
    "target_id",
    "dst_id",
    "target_node",
];
const RELATION_WORDS: &[&str] = &["relation", "rel", "type", "edge_type", "predicate", "label", "kind"];
const WEIGHT_WORDS: &[&str] = &["weight", "w", "value", "score"];
const TIME_WORDS: &[&str] = &["time", "timestamp", "ts", "date"];

/// What a field looks like.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Look {
    Id,
    /// A number that is not an id: a mistake in an id column, not a name.
    Number,
    Empty,
    Word,
}

fn look(field: &[u8]) -> Look {
    let text = std::str::from_utf8(field).map(str::trim).unwrap_or("?");
    if text.is_empty() {
        Look::Empty
    } else if parse_id(field).is_some() {
        Look::Id
    } else if text.parse::<f64>().is_ok() && text.bytes().any(|b| b.is_ascii_digit()) {
        Look::Number
    } else {
        Look::Word
    }
}

/// The first rows of a table.
pub struct FirstRows {
    /// Fields of the first line.
    pub first: Vec<Vec<u8>>,
    /// The looks of the fields of the next lines, row by row.
    looks: Vec<Vec<Look>>,
}

/// The decisions.
pub struct Guess {
    pub header: bool,
    pub layout: EdgeLayout,
    /// Ids are names.
    pub named_nodes: bool,
    /// Relations are names.
    pub named_relations: bool,
    /// The guesses, for the user to check.
    pub notes: Vec<String>,
}

impl FirstRows {
    pub fn new(first: Vec<Vec<u8>>) -> FirstRows {
        FirstRows { first, looks: Vec::new() }
    }

    /// Adds a row.
    pub fn see<'a>(&mut self, fields: impl Iterator<Item = &'a [u8]>) {
        self.looks.push(fields.map(look).collect());
    }

    /// Decides. Flags take precedence.
    pub fn guess(&self, request: &Request, path: &Path) -> Result<Guess> {
        let named = request.columns != Default::default();
        let (mut layout, by_name) = self.requested_layout(request, path)?;
        let speaks = self.column_called(SOURCE_WORDS).is_some() && self.column_called(TARGET_WORDS).is_some();
        let header = request.header.unwrap_or(by_name || speaks || self.words_over_numbers());
        let mut notes = Vec::new();
        if request.header.is_none() {
            let decision = if header {
                "a header (--header no if it is an edge)"
            } else {
                "an edge (--header yes if it is not)"
            };
            notes.push(format!("the first line is taken for {decision}"));
        }
        if !named {
            self.fill_layout(&mut layout, header && speaks, header, &mut notes);
        }
        let used = [Some(layout.source), Some(layout.target), layout.relation, layout.weight, layout.time];
        let unread: Vec<String> = (0..self.first.len())
            .filter(|column| !used.contains(&Some(*column)))
            .map(|column| {
                if header { String::from_utf8_lossy(&self.first[column]).into() } else { column.to_string() }
            })
            .collect();
        if !unread.is_empty() {
            notes.push(format!("not read: column {}", unread.join(", ")));
        }
        let is_word = |column: usize| self.column(column, header).any(|(_, look)| look == Look::Word);
        let requested_names = request.string_ids || request.node_ids.is_some();
        if !requested_names {
            self.check_ids(layout.source, header, path)?;
            self.check_ids(layout.target, header, path)?;
        }
        let named_nodes = requested_names || is_word(layout.source) || is_word(layout.target);
        if named_nodes && request.node_ids.is_none() {
            notes.push("ids are names, numbered in the order they appear".into());
        }
        let names_relations =
            |column| self.column(column, header).any(|(_, look)| look != Look::Id && look != Look::Empty);
        let named_relations = layout.relation.is_some_and(names_relations);
        let notes = notes.into_iter().map(|note| format!("{}: {note}", path.display())).collect();
        Ok(Guess { header, layout, named_nodes, named_relations, notes })
    }

    /// The looks of a column with their lines. The first line counts if it is not a header.
    fn column(&self, column: usize, header: bool) -> impl Iterator<Item = (usize, Look)> + '_ {
        let first = (!header).then(|| (1, look(&self.first[column])));
        first.into_iter().chain((2..).zip(self.looks.iter().filter_map(move |row| row.get(column).copied())))
    }

    /// Refuses a column of ids with both numbers and words: a typo, or names that happen to be numbers. Only the user
    /// knows.
    fn check_ids(&self, column: usize, header: bool, path: &Path) -> Result<()> {
        let find = |requested: Look| self.column(column, header).find(|(_, look)| *look == requested);
        if let (Some(_), Some((line, _))) = (find(Look::Id), find(Look::Word)) {
            let expected =
                "ids that are all numbers or all names (--string-ids if numbers are names here too)";
            return Err(Location::at(path, format!("line {line}, column {column}"))
                .bad(expected, "a name among numbers"));
        }
        Ok(())
    }

    fn column_called(&self, words: &[&str]) -> Option<usize> {
        self.first.iter().position(|field| {
            let field = field.trim_ascii().to_ascii_lowercase();
            words.iter().any(|word| word.as_bytes() == field)
        })
    }

    /// Whether the first line has no number and some column below it has only numbers.
    fn words_over_numbers(&self) -> bool {
        let number = |look: &Look| matches!(look, Look::Id | Look::Number);
        let all_numbers = |column: usize| {
            !self.looks.is_empty() && self.looks.iter().all(|row| row.get(column).is_some_and(number))
        };
        !self.first.iter().any(|field| number(&look(field))) && (0..self.first.len()).any(all_numbers)
    }

    /// Chooses the columns that no flag names: by the header's words if it has them, else source, target, and a third
    /// one. The third is a weight if it has fractions, else a relation.
    fn fill_layout(&self, layout: &mut EdgeLayout, speaks: bool, header: bool, notes: &mut Vec<String>) {
        if speaks {
            let called = |words| self.column_called(words);
            layout.source = called(SOURCE_WORDS).unwrap_or(0);
            layout.target = called(TARGET_WORDS).unwrap_or(1);
            let free = |column: &usize| *column != layout.source && *column != layout.target;
            layout.relation = called(RELATION_WORDS).filter(free);
            layout.weight = called(WEIGHT_WORDS).filter(free);
            layout.time = called(TIME_WORDS).filter(free);
            if (layout.source, layout.target) != (0, 1) {
                notes.push(format!(
                    "column {} is the source, column {} the target",
                    layout.source, layout.target
                ));
            }
        }
        let settled = layout.relation.or(layout.weight).or(layout.time).is_some();
        if settled || (layout.source, layout.target) != (0, 1) || self.first.len() < 3 {
            return;
        }
        let third: Vec<Look> = self.column(2, header).map(|(_, look)| look).collect();
        let called = |words: &[&str]| header && self.column_called(words) == Some(2);
        let what = if called(TIME_WORDS) {
            layout.time = Some(2);
            "time"
        } else if called(WEIGHT_WORDS) || (third.contains(&Look::Number) && !third.contains(&Look::Word)) {
            layout.weight = Some(2);
            "weight"
        } else {
            layout.relation = Some(2);
            "relation"
        };
        notes.push(format!("the third column is taken for the {what}; --relation-column, --weight-column or --time-column say otherwise"));
    }

    /// Columns given by flags, by name or number, and whether a name was used.
    fn requested_layout(&self, request: &Request, path: &Path) -> Result<(EdgeLayout, bool)> {
        let columns = &request.columns;
        let mut by_name = false;
        let mut find = |word: &String| -> Result<usize> {
            let number = word.parse::<usize>().ok();
            let named = self.first.iter().position(|field| field == word.as_bytes());
            by_name |= number.is_none();
            number.or(named).filter(|column| *column < self.first.len()).ok_or_else(|| {
                let names: Vec<_> = self.first.iter().map(|field| String::from_utf8_lossy(field)).collect();
                Location::at(path, "line 1")
                    .bad(format!("a column `{word}`"), format!("the columns {}", names.join(", ")))
            })
        };
        let mut optional = |word: &Option<String>| word.as_ref().map(&mut find).transpose();
        let layout = EdgeLayout {
            source: optional(&columns.source)?.unwrap_or(0),
            target: optional(&columns.target)?.unwrap_or(1),
            relation: optional(&columns.relation)?,
            weight: optional(&columns.weight)?,
            time: optional(&columns.time)?,
        };
        Ok((layout, by_name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guess(text: &str, change: impl FnOnce(&mut Request)) -> Result<Guess> {
        let mut rows =
            text.lines().map(|line| line.split(',').map(|f| f.as_bytes().to_vec()).collect::<Vec<_>>());
        let mut sample = FirstRows::new(rows.next().unwrap());
        rows.for_each(|row| sample.see(row.iter().map(|field| &field[..])));
        let mut request = Request::default();
        change(&mut request);
        sample.guess(&request, Path::new("e.csv"))
    }

    fn check(text: &str, header: bool, columns: [Option<usize>; 5], named: bool) {
        let found = guess(text, |_| ()).unwrap();
        let layout = found.layout;
        let layout = [Some(layout.source), Some(layout.target), layout.relation, layout.weight, layout.time];
        assert_eq!((found.header, layout, found.named_nodes), (header, columns, named), "{text}");
    }

    #[test]
    fn headers_are_words_over_numbers_or_speak_for_themselves() {
        let plain = [Some(0), Some(1), None, None, None];
        check("1,2\n3,4", false, plain, false);
        check("a,b\n3,4", true, plain, false);
        check("src,dst\nx,y", true, plain, true);
        check("x,y\ny,z", false, plain, true);
        check("source,target", true, plain, false);
        // It is neither: a typo. It must not be dropped as a header.
        assert!(guess("O,1\n2,3", |_| ()).is_err());
    }

    #[test]
    fn a_header_says_which_column_is_which() {
        check("target,source\n10,11", true, [Some(1), Some(0), None, None, None], false);
        check("weight,target,source\n0.5,10,11", true, [Some(2), Some(1), None, Some(0), None], false);
        check(",src,dst\n0,10,11", true, [Some(1), Some(2), None, None, None], false);
        check("src,dst,timestamp\n1,2,3", true, [Some(0), Some(1), None, None, Some(2)], false);
        check("a,b,w\n1,2,3", true, [Some(0), Some(1), None, Some(2), None], false);
    }

    #[test]
    fn a_third_column_is_a_weight_when_it_has_fractions() {
        check("1,2,0.5\n3,4,1", false, [Some(0), Some(1), None, Some(2), None], false);
        check("1,2,7\n3,4,8", false, [Some(0), Some(1), Some(2), None, None], false);
        check("1,2,is-a\n3,4,8", false, [Some(0), Some(1), Some(2), None, None], false);
    }

    #[test]
    fn a_name_among_numbers_is_an_error_unless_numbers_are_names() {
        let text = "1,2\n3,4\nx,5";
        let error = guess(text, |_| ()).err().unwrap().to_string();
        assert!(error.contains("line 3") && error.contains("--string-ids"), "{error}");
        assert!(guess(text, |request| request.string_ids = true).unwrap().named_nodes);
    }
}
