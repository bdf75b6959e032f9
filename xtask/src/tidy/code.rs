//! Rust source as tokens, enough to find functions and types: no comments, no literals, no tests.

use std::iter::Peekable;
use std::str::CharIndices;

/// A word or a punctuation character.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Token<'a> {
    pub text: &'a str,
    /// From 1.
    pub line: usize,
}

/// The tokens of a file, and the test modules that it declares in separate files.
pub(super) struct Code<'a> {
    pub tokens: Vec<Token<'a>>,
    pub test_modules: Vec<&'a str>,
}

/// Tokenises a file without the items under `#[cfg(test)]`.
pub(super) fn without_tests(text: &str) -> Code<'_> {
    let all = tokens(text);
    let (mut kept, mut test_modules, mut at) = (Vec::new(), Vec::new(), 0);
    while at < all.len() {
        let starts = |words: &[&str]| {
            words.iter().enumerate().all(|(index, word)| all.get(at + index).is_some_and(|t| t.text == *word))
        };
        if !starts(&["#", "[", "cfg", "(", "test", ")", "]"]) {
            kept.push(all[at]);
            at += 1;
            continue;
        }
        let end = item_end(&all, at);
        let item: Vec<&str> = all[at..end].iter().map(|token| token.text).collect();
        if let [.., "mod", name, ";"] = item[..] {
            test_modules.push(name);
        }
        at = end;
    }
    Code { tokens: kept, test_modules }
}

/// The end of the item that begins here, after its attributes.
fn item_end(tokens: &[Token], first: usize) -> usize {
    let (mut depth, mut attribute) = (0i32, false);
    for (index, token) in tokens.iter().enumerate().skip(first) {
        match token.text {
            "#" if depth == 0 => attribute = true,
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => {
                depth -= 1;
                if depth < 0 {
                    return index;
                }
                if depth == 0 && token.text == "}" {
                    return index + 1;
                }
                attribute &= depth > 0 || token.text != "]";
            }
            ";" if depth == 0 && !attribute => return index + 1,
            _ => {}
        }
    }
    tokens.len()
}

/// The position after the bracket that closes the one at `open`.
pub(super) fn closed(tokens: &[Token], open: usize) -> usize {
    let mut depth = 0;
    for (index, token) in tokens.iter().enumerate().skip(open) {
        match token.text {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return index + 1;
        }
    }
    tokens.len()
}

/// Whether a token is a name or a keyword.
pub(super) fn is_word(text: &str) -> bool {
    text.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

/// All tokens outside comments and literals.
fn tokens(text: &str) -> Vec<Token<'_>> {
    let (mut found, mut line, mut counted) = (Vec::new(), 1, 0);
    let mut characters = text.char_indices().peekable();
    while let Some((start, c)) = characters.next() {
        match c {
            '/' if text[start..].starts_with("//") => skip_while(&mut characters, |c| c != '\n'),
            '/' if text[start..].starts_with("/*") => skip_to(&mut characters, comment_end(text, start)),
            '"' => skip_to(&mut characters, string_end(text, start)),
            '\'' if is_character(&text[start..]) => skip_to(&mut characters, character_end(text, start)),
            'r' | 'b' if raw_string_end(text, start).is_some() => {
                skip_to(&mut characters, raw_string_end(text, start).unwrap_or(text.len()));
            }
            c if c.is_whitespace() => {}
            c => {
                if c.is_alphanumeric() || c == '_' {
                    skip_while(&mut characters, |c| c.is_alphanumeric() || c == '_');
                }
                let end = characters.peek().map_or(text.len(), |(at, _)| *at);
                line += text[counted..start].matches('\n').count();
                counted = start;
                found.push(Token { text: &text[start..end], line });
            }
        }
    }
    found
}

fn skip_while(characters: &mut Peekable<CharIndices>, go_on: impl Fn(char) -> bool) {
    while characters.next_if(|(_, c)| go_on(*c)).is_some() {}
}

fn skip_to(characters: &mut Peekable<CharIndices>, end: usize) {
    while characters.next_if(|(at, _)| *at < end).is_some() {}
}

/// The end of a comment, which may contain others.
fn comment_end(text: &str, start: usize) -> usize {
    let (mut depth, mut at) = (0, start);
    while at < text.len() {
        let rest = &text.as_bytes()[at..];
        if rest.starts_with(b"/*") {
            (depth, at) = (depth + 1, at + 2);
        } else if rest.starts_with(b"*/") {
            (depth, at) = (depth - 1, at + 2);
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    text.len()
}

/// The end of a string with escapes that begins with its quote.
fn string_end(text: &str, start: usize) -> usize {
    let mut escaped = false;
    for (at, c) in text[start + 1..].char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return start + 1 + at + 1,
            _ => {}
        }
    }
    text.len()
}

/// The end of a raw string, if one begins here: `r"..."`, `br#"..."#`.
fn raw_string_end(text: &str, start: usize) -> Option<usize> {
    let rest = text[start..].strip_prefix('b').unwrap_or(&text[start..]).strip_prefix('r')?;
    let hashes = rest.len() - rest.trim_start_matches('#').len();
    let body = text.len() - rest.len() + hashes;
    text[body..].strip_prefix('"')?;
    let end = format!("\"{}", "#".repeat(hashes));
    Some(text[body + 1..].find(&end).map_or(text.len(), |at| body + 1 + at + end.len()))
}

/// Whether a quote begins a character and not a lifetime.
fn is_character(rest: &str) -> bool {
    let mut characters = rest.chars().skip(1);
    characters.next() == Some('\\') || characters.next() == Some('\'')
}

fn character_end(text: &str, start: usize) -> usize {
    let mut characters = text[start + 1..].char_indices();
    if characters.next().is_some_and(|(_, c)| c == '\\') {
        // The escaped character may be a quote.
        characters.next();
    }
    characters.find(|(_, c)| *c == '\'').map_or(text.len(), |(at, _)| start + 1 + at + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: &[&str]) {
        let found: Vec<&str> = without_tests(text).tokens.iter().map(|token| token.text).collect();
        assert_eq!(found, expected, "{text}");
    }

    #[test]
    fn comments_and_literals_are_left_out() {
        check("a /* { /* } */ */ b // {\nc", &["a", "b", "c"]);
        check(r#"f("{ \" {", '{', '\'', b'"', x)"#, &["f", "(", ",", ",", ",", "b", ",", "x", ")"]);
        check(r##"f(r"\", r#"" {"#, br"{")"##, &["f", "(", ",", ",", ")"]);
        check("fn f<'a>(x: &'a u8) {}", &{
            let words = "fn f < ' a > ( x : & ' a u8 ) { }";
            words.split(' ').collect::<Vec<_>>()
        });
        check("r + b - radius", &["r", "+", "b", "-", "radius"]);
    }

    #[test]
    fn tests_are_left_out() {
        check("#[cfg(test)]\nmod tests { fn f() { {} } }\nfn g();", &["fn", "g", "(", ")", ";"]);
        check("#[cfg(test)]\n#[allow(x)]\nconst A: [u8; 2] = [1; 2];\nb", &["b"]);
        check("{ a #[cfg(test)] b: C } d", &["{", "a", "}", "d"]);
        check(
            "#[cfg(all(unix, test))] a",
            &"# [ cfg ( all ( unix , test ) ) ] a".split(' ').collect::<Vec<_>>(),
        );
        assert_eq!(without_tests("#[cfg(test)]\npub mod made;\nmod real;").test_modules, ["made"]);
    }

    #[test]
    fn lines_are_those_of_the_file() {
        let code = without_tests("a\n/* \n */ \"\n\"\n  b c");
        let lines: Vec<_> = code.tokens.iter().map(|token| token.line).collect();
        assert_eq!(lines, [1, 5, 5]);
    }
}
