//! Checks that a type name has one meaning in all crates.

use super::code::{Token, is_word};
use std::collections::{BTreeMap, BTreeSet};

/// Names that several crates may have: each crate has its own alias.
pub(super) const SHARED: [&str; 1] = ["Result"];

/// The types that a file defines, without the associated types of traits and implementations.
pub(super) fn types<'a>(tokens: &[Token<'a>]) -> Vec<&'a str> {
    // For every open brace, whether it belongs to a module.
    let (mut open, mut found) = (Vec::new(), Vec::new());
    for (at, token) in tokens.iter().enumerate() {
        let defines = match token.text {
            "struct" | "enum" | "trait" => true,
            "type" => open.iter().all(|module| *module),
            "{" => {
                open.push(at >= 2 && tokens[at - 2].text == "mod");
                false
            }
            "}" => {
                open.pop();
                false
            }
            _ => false,
        };
        if let Some(name) = tokens.get(at + 1).filter(|name| defines && is_word(name.text)) {
            found.push(name.text);
        }
    }
    found
}

/// Where each name is defined: the crates, and the files in each.
pub(super) type Definitions = BTreeMap<String, BTreeMap<String, BTreeSet<String>>>;

/// A message for every name that is defined in several crates and not exempt.
pub(super) fn findings(definitions: &Definitions, exempt: impl Fn(&str) -> bool) -> Vec<String> {
    let several = definitions.iter().filter(|(name, crates)| crates.len() > 1 && !exempt(name));
    several
        .map(|(name, crates)| {
            let files: Vec<&str> = crates.values().flatten().map(String::as_str).collect();
            format!("`{name}` is a type of several crates: {}", files.join(", "))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::code::without_tests;
    use super::*;

    #[test]
    fn types_are_found_whoever_sees_them() {
        let text = "pub struct A<T>(T);\nenum B { C }\npub(crate) trait D { type E; }\ntype F = u8;\n\
                    impl D for A {\n    type E = u8;\n}\nfn f() {\n    struct G;\n}\n#[cfg(test)]\nmod tests { struct H; }\n\
                    macro_rules! m { ($n:ident) => { struct $n; } }\nmod i { pub type J = u8; }\n";
        assert_eq!(types(&without_tests(text).tokens), ["A", "B", "D", "F", "G", "J"]);
    }

    #[test]
    fn a_name_of_two_crates_is_seen_and_of_two_files_of_one_is_not() {
        let mut definitions = Definitions::new();
        let all = [
            ("Job", "io"),
            ("Job", "store"),
            ("Row", "io"),
            ("Row", "io"),
            ("Result", "io"),
            ("Result", "nn"),
        ];
        for (at, (name, folder)) in all.into_iter().enumerate() {
            let crates = definitions.entry(name.into()).or_default();
            crates.entry(folder.into()).or_default().insert(format!("{folder}/{at}.rs"));
        }
        let found = findings(&definitions, |name| SHARED.contains(&name));
        assert_eq!(found, ["`Job` is a type of several crates: io/0.rs, store/1.rs"]);
    }
}
