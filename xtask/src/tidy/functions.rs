//! Limits the length of functions, and the number of long ones.

use super::code::{Token, closed, is_word};

/// The limits. They equal the current state: with a looser limit, functions could grow again unnoticed.
pub(super) struct LengthLimits {
    /// Largest number of lines of a function, from the one with `fn` to the one with its last brace. Never above 80.
    pub most_lines: usize,
    /// A function with more lines is long.
    pub long_lines: usize,
    /// Number of long functions. It may only decrease.
    pub long_functions: usize,
}

/// The current limits. They may be lowered, never raised.
pub(super) const LIMITS: LengthLimits = LengthLimits { most_lines: 78, long_lines: 60, long_functions: 21 };

/// A message for every function over the limit, and one for every limit that no longer matches the current state.
pub(super) fn findings(all: &[(String, FunctionSize)], limits: &LengthLimits) -> Vec<String> {
    let LengthLimits { most_lines, long_lines, long_functions } = *limits;
    let too_long = all.iter().filter(|(_, function)| function.lines > most_lines);
    let mut findings: Vec<String> = too_long
        .map(|(place, FunctionSize { name, line, lines })| {
            format!("{place}:{line}: `{name}` has {lines} lines, {most_lines} are allowed")
        })
        .collect();
    let here = "LIMITS in xtask/src/tidy/functions.rs";
    let longest = all.iter().map(|(_, function)| function.lines).max().unwrap_or(0);
    if longest < most_lines {
        findings
            .push(format!("the longest function has {longest} lines now: lower most_lines to it, {here}"));
    }
    let mut long: Vec<_> = all.iter().filter(|(_, function)| function.lines > long_lines).collect();
    if long.len() < long_functions {
        let count = long.len();
        findings.push(format!(
            "{count} functions have more than {long_lines} lines now: lower long_functions to {count}, {here}"
        ));
    }
    if long.len() > long_functions {
        long.sort_by_key(|(place, function)| (function.lines, place.clone()));
        let shortest: Vec<String> = long
            .iter()
            .take(10)
            .map(|(place, FunctionSize { name, line, lines })| format!("{place}:{line} `{name}` ({lines})"))
            .collect();
        findings.push(format!(
            "{} functions have more than {long_lines} lines, {long_functions} are allowed: split one that is new or has \
             grown; the shortest of them: {}",
            long.len(),
            shortest.join(", ")
        ));
    }
    findings
}

/// A function with a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FunctionSize<'a> {
    pub name: &'a str,
    /// Its first line.
    pub line: usize,
    pub lines: usize,
}

/// All functions of a file that have a body.
pub(super) fn functions<'a>(tokens: &[Token<'a>]) -> Vec<FunctionSize<'a>> {
    let mut found = Vec::new();
    for (at, two) in tokens.windows(2).enumerate() {
        if two[0].text != "fn" || !is_word(two[1].text) {
            continue;
        }
        let Some(open) = body(tokens, at) else { continue };
        let last = tokens[closed(tokens, open) - 1].line;
        found.push(FunctionSize { name: two[1].text, line: two[0].line, lines: last - two[0].line + 1 });
    }
    found
}

/// The start of a function's body; functions of traits may have none.
fn body(tokens: &[Token], function: usize) -> Option<usize> {
    let mut at = function;
    while at < tokens.len() {
        match tokens[at].text {
            "{" => return Some(at),
            ";" => return None,
            "(" | "[" => at = closed(tokens, at),
            _ => at += 1,
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::super::code::without_tests;
    use super::*;

    #[test]
    fn functions_are_measured_to_their_last_brace() {
        let text =
            "trait A {\n fn a(&self, x: [u8; 2]);\n}\nfn b(\n c: fn(u8) -> u8,\n) {\n {}\n}\nfn d() {}\n";
        let code = without_tests(text);
        let expected =
            [FunctionSize { name: "b", line: 4, lines: 5 }, FunctionSize { name: "d", line: 9, lines: 1 }];
        assert_eq!(functions(&code.tokens), expected);
    }

    #[test]
    fn a_long_function_is_seen_and_a_long_test_is_not() {
        let body = "    x();\n".repeat(79);
        let text =
            format!("pub fn long() {{\n{body}}}\n#[cfg(test)]\nmod tests {{\nfn longer() {{\n{body}}}\n}}\n");
        let code = without_tests(&text);
        let found = functions(&code.tokens);
        assert_eq!(found, [FunctionSize { name: "long", line: 1, lines: 81 }]);
    }

    /// Checks the findings for functions of these lengths, if 20 lines are allowed, and 2 functions with more than 10.
    fn check(lengths: &[usize], expected: &[&str]) {
        let sized = |lines: &usize| ("a.rs".to_string(), FunctionSize { name: "f", line: 1, lines: *lines });
        let all: Vec<_> = lengths.iter().map(sized).collect();
        let found = findings(&all, &LengthLimits { most_lines: 20, long_lines: 10, long_functions: 2 });
        assert_eq!(found.len(), expected.len(), "{found:?}");
        for (found, expected) in found.iter().zip(expected) {
            assert!(found.contains(expected), "{found}");
        }
    }

    #[test]
    fn limits_hold_in_both_directions() {
        check(&[20, 11, 10, 1], &[]);
        check(&[21, 11], &["`f` has 21 lines, 20 are allowed"]);
        check(&[19, 11], &["lower most_lines"]);
        check(&[20, 10], &["lower long_functions to 1"]);
        check(&[20, 12, 11], &["3 functions have more than 10 lines, 2 are allowed"]);
    }
}
