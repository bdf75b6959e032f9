//! No function is longer than a screen and a bit.

use super::code::{Token, closed, is_word};

/// Lines of a function at most, from the one with `fn` to the one with its last brace.
pub(super) const MOST_LINES: usize = 80;

/// A function with a body.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct FunctionSize<'a> {
    pub name: &'a str,
    /// Its first line.
    pub line: usize,
    pub lines: usize,
}

/// Every function of a file that has a body.
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

/// Where the body of a function opens; functions of traits may have none.
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
        let body = "    x();\n".repeat(MOST_LINES - 1);
        let text =
            format!("pub fn long() {{\n{body}}}\n#[cfg(test)]\nmod tests {{\nfn longer() {{\n{body}}}\n}}\n");
        let code = without_tests(&text);
        let found = functions(&code.tokens);
        assert_eq!(found, [FunctionSize { name: "long", line: 1, lines: MOST_LINES + 1 }]);
    }
}
