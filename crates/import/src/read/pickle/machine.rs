//! The pickle machine: a stack, a memo and one small step per opcode. The memory of a step is bounded by the bytes it
//! consumes. The few steps that copy bytes count them against the length of the input.

use super::{Node, Pickle, Storage, Value, allowed, location_at};
use crate::{ImportError, Location, Result};
use rustc_hash::FxHashMap;
use std::borrow::Cow;

pub(super) struct Machine<'a, 'p> {
    bytes: &'a [u8],
    at: usize,
    /// Position of the current opcode, for messages.
    opcode_at: usize,
    location: &'p Location,
    pub(super) nodes: Vec<Node<'a>>,
    stack: Vec<Value>,
    /// Heights of the stack at each open MARK.
    marks: Vec<usize>,
    memo: FxHashMap<u64, Value>,
    copied_bytes: usize,
}

pub(super) fn run<'a>(bytes: &'a [u8], location: &Location) -> Result<(Pickle<'a>, usize)> {
    let mut machine = Machine {
        bytes,
        at: 0,
        opcode_at: 0,
        location,
        nodes: Vec::new(),
        stack: Vec::new(),
        marks: Vec::new(),
        memo: FxHashMap::default(),
        copied_bytes: 0,
    };
    loop {
        machine.opcode_at = machine.at;
        let opcode = machine.number::<1>()?[0];
        if opcode == b'.' {
            let root = machine.pop()?;
            return Ok((Pickle { nodes: machine.nodes, root, location: location.clone() }, machine.at));
        }
        machine.step(opcode)?;
    }
}

impl<'a> Machine<'a, '_> {
    fn step(&mut self, opcode: u8) -> Result<()> {
        match opcode {
            b'N' => self.push(Value::None),
            0x88 => self.push(Value::Bool(true)),
            0x89 => self.push(Value::Bool(false)),
            b'J' => self.push_int(|[a, b, c, d]| i32::from_le_bytes([a, b, c, d]) as i64),
            b'K' => self.push_int(|[byte]| byte as i64),
            b'M' => self.push_int(|[low, high]| u16::from_le_bytes([low, high]) as i64),
            b'G' => {
                let float = f64::from_be_bytes(self.number()?);
                self.push(Value::Float(float))
            }
            0x8a => self.long(1),
            0x8b => self.long(4),
            b'I' | b'L' | b'F' => self.number_line(opcode),
            b'S' | b'V' => self.string_line(opcode),
            b'U' | b'C' => self.push_bytes(1),
            b'T' | b'B' => self.push_bytes(4),
            0x8e | 0x96 => self.push_bytes(8),
            0x8c => self.push_text(1),
            b'X' => self.push_text(4),
            0x8d => self.push_text(8),
            b']' => self.push_node(Node::List(Vec::new())),
            b'}' => self.push_node(Node::Dict(Vec::new())),
            b')' => self.push_node(Node::Tuple(Vec::new())),
            0x8f => self.push_node(Node::Set(Vec::new())),
            0x85..=0x87 => {
                let items = self.pop_many((opcode - 0x84) as usize)?;
                self.push_node(Node::Tuple(items))
            }
            b't' | b'l' | 0x91 | b'd' => self.collect(opcode),
            b'a' | b'e' | 0x90 | b's' | b'u' => self.extend(opcode),
            b'(' => {
                self.marks.push(self.stack.len());
                Ok(())
            }
            b'0' | b'1' | b'2' => self.shuffle(opcode),
            b'p' | b'q' | b'r' | 0x94 | b'g' | b'h' | b'j' => self.remember(opcode),
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                self.push_global(&String::from_utf8_lossy(module), &String::from_utf8_lossy(name))
            }
            0x93 => self.stack_global(),
            b'R' | 0x81 => {
                let (arguments, callable) = (self.pop()?, self.pop()?);
                let made = allowed::make(self, callable, arguments)?;
                self.push(made)
            }
            b'b' => {
                let (state, object) = (self.pop()?, self.top()?);
                allowed::build(self, object, state)
            }
            b'Q' => self.persistent(),
            0x80 => match self.number::<1>()?[0] {
                0..=5 => Ok(()),
                version => Err(self.bad("a pickle of protocol 5 or older", format!("protocol {version}"))),
            },
            0x95 => self.number::<8>().map(drop),
            other => Err(self.bad("an opcode that data needs", format!("opcode {other:#04x}"))),
        }
    }

    pub(super) fn bad(&self, expected: &str, found: impl std::fmt::Display) -> ImportError {
        self.here().bad(expected, found)
    }

    fn here(&self) -> Location {
        location_at(self.location, self.opcode_at)
    }

    /// Counts bytes that are copied rather than sliced. An honest pickle copies each string at most once; a forged one
    /// could copy the same long string again and again.
    pub(super) fn charge(&mut self, bytes: usize) -> Result<()> {
        self.copied_bytes = self.copied_bytes.saturating_add(bytes);
        if self.copied_bytes > self.bytes.len().saturating_mul(32).saturating_add(4096) {
            return Err(self.bad("values that unpack to about their size", "copies of copies"));
        }
        Ok(())
    }

    fn take(&mut self, count: u64) -> Result<&'a [u8]> {
        let rest = &self.bytes[self.at..];
        let Some(taken) = usize::try_from(count).ok().and_then(|count| rest.get(..count)) else {
            let found = format!("the end of the file after {}", rest.len());
            return Err(self.bad(&format!("{count} more bytes"), found));
        };
        self.at += taken.len();
        Ok(taken)
    }

    fn number<const BYTES: usize>(&mut self) -> Result<[u8; BYTES]> {
        let mut out = [0; BYTES];
        out.copy_from_slice(self.take(BYTES as u64)?);
        Ok(out)
    }

    fn length(&mut self, width: usize) -> Result<u64> {
        let mut out = [0; 8];
        out[..width].copy_from_slice(self.take(width as u64)?);
        Ok(u64::from_le_bytes(out))
    }

    fn line(&mut self) -> Result<&'a [u8]> {
        let rest = &self.bytes[self.at..];
        let Some(end) = rest.iter().position(|byte| *byte == b'\n') else {
            return Err(self.bad("a line", "the end of the file"));
        };
        self.at += end + 1;
        Ok(rest[..end].strip_suffix(b"\r").unwrap_or(&rest[..end]))
    }

    fn push(&mut self, value: Value) -> Result<()> {
        self.stack.push(value);
        Ok(())
    }

    pub(super) fn hold(&mut self, node: Node<'a>) -> Result<Value> {
        let Ok(number) = u32::try_from(self.nodes.len()) else {
            return Err(self.bad("fewer than 2^32 values", "more"));
        };
        self.nodes.push(node);
        Ok(Value::Held(number))
    }

    fn push_node(&mut self, node: Node<'a>) -> Result<()> {
        let value = self.hold(node)?;
        self.push(value)
    }

    fn push_int<const BYTES: usize>(&mut self, decode: impl Fn([u8; BYTES]) -> i64) -> Result<()> {
        let bytes = self.number()?;
        self.push(Value::Int(decode(bytes)))
    }

    /// LONG1 and LONG4: little-endian two's complement of any length.
    fn long(&mut self, width: usize) -> Result<()> {
        let length = self.length(width)?;
        let bytes = self.take(length)?;
        if bytes.len() > 8 {
            return self.push_node(Node::Big);
        }
        let negative = bytes.last().is_some_and(|byte| *byte >= 0x80);
        let mut out = if negative { [0xff; 8] } else { [0; 8] };
        out[..bytes.len()].copy_from_slice(bytes);
        self.push(Value::Int(i64::from_le_bytes(out)))
    }

    /// Decimal numbers of protocol 0.
    fn number_line(&mut self, opcode: u8) -> Result<()> {
        let line = String::from_utf8_lossy(self.line()?);
        let value = match (opcode, line.as_ref()) {
            (b'I', "00") => Some(Value::Bool(false)),
            (b'I', "01") => Some(Value::Bool(true)),
            (b'F', text) => text.parse().ok().map(Value::Float),
            (_, text) => text.strip_suffix('L').unwrap_or(text).parse().ok().map(Value::Int),
        };
        let digits = line.trim_start_matches('-').trim_end_matches('L');
        match value {
            Some(value) => self.push(value),
            None if opcode == b'L' && digits.bytes().all(|byte| byte.is_ascii_digit()) => {
                self.push_node(Node::Big)
            }
            None => Err(self.bad("a number in decimal", format!("`{line:.40}`"))),
        }
    }

    /// Strings of protocol 0: a byte string in quotes, or text, both with backslashes.
    fn string_line(&mut self, opcode: u8) -> Result<()> {
        let line = self.line()?;
        if opcode == b'V' {
            let text = unescape_text(line).ok_or_else(|| self.bad("text", "a broken \\u escape"))?;
            return self.push_node(Node::Text(Cow::Owned(text)));
        }
        let quoted = match line {
            [b'\'', inner @ .., b'\''] | [b'"', inner @ .., b'"'] => unescape_bytes(inner),
            _ => None,
        };
        let bytes = quoted.ok_or_else(|| self.bad("a string in quotes", "something else"))?;
        self.push_node(Node::Bytes(Cow::Owned(bytes)))
    }

    fn push_bytes(&mut self, width: usize) -> Result<()> {
        let length = self.length(width)?;
        let bytes = self.take(length)?;
        self.push_node(Node::Bytes(Cow::Borrowed(bytes)))
    }

    fn push_text(&mut self, width: usize) -> Result<()> {
        let length = self.length(width)?;
        let bytes = self.take(length)?;
        let text =
            std::str::from_utf8(bytes).map_err(|error| self.here().undecodable("text in UTF-8", error))?;
        self.push_node(Node::Text(Cow::Borrowed(text)))
    }

    fn fence(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn pop(&mut self) -> Result<Value> {
        let value = self.top()?;
        self.stack.pop();
        Ok(value)
    }

    fn pop_many(&mut self, count: usize) -> Result<Vec<Value>> {
        match self.stack.len().checked_sub(count) {
            Some(rest) if rest >= self.fence() => Ok(self.stack.split_off(rest)),
            _ => Err(self.bad("a value on the stack", "none")),
        }
    }

    fn top(&self) -> Result<Value> {
        match self.stack.last() {
            Some(value) if self.stack.len() > self.fence() => Ok(*value),
            _ => Err(self.bad("a value on the stack", "none")),
        }
    }

    fn pop_to_mark(&mut self) -> Result<Vec<Value>> {
        let Some(mark) = self.marks.pop() else { return Err(self.bad("a mark on the stack", "none")) };
        Ok(self.stack.split_off(mark))
    }

    fn pairs(&self, items: &[Value]) -> Result<Vec<(Value, Value)>> {
        match items.as_chunks::<2>() {
            (pairs, []) => Ok(pairs.iter().map(|[key, value]| (*key, *value)).collect()),
            _ => Err(self.bad("keys and values in pairs", format!("{} items", items.len()))),
        }
    }

    /// Everything since the mark becomes one value.
    fn collect(&mut self, opcode: u8) -> Result<()> {
        let items = self.pop_to_mark()?;
        let node = match opcode {
            b't' => Node::Tuple(items),
            b'l' => Node::List(items),
            b'd' => Node::Dict(self.pairs(&items)?),
            _ => Node::Set(items),
        };
        self.push_node(node)
    }

    /// Adds items to the list, set or dictionary below them.
    fn extend(&mut self, opcode: u8) -> Result<()> {
        let items = match opcode {
            b'a' => self.pop_many(1)?,
            b's' => self.pop_many(2)?,
            _ => self.pop_to_mark()?,
        };
        let pairs = if matches!(opcode, b's' | b'u') { self.pairs(&items)? } else { Vec::new() };
        let target = self.top()?;
        match (opcode, self.node_mut(target)) {
            (b'a' | b'e', Some(Node::List(list))) => list.extend(items),
            (0x90, Some(Node::Set(set))) => set.extend(items),
            (b's' | b'u', Some(Node::Dict(dictionary))) => dictionary.extend(pairs),
            _ => return Err(self.bad("a list, set or dictionary to fill", "another value")),
        }
        Ok(())
    }

    pub(super) fn node(&self, value: Value) -> Option<&Node<'a>> {
        match value {
            Value::Held(number) => self.nodes.get(number as usize),
            _ => None,
        }
    }

    pub(super) fn node_mut(&mut self, value: Value) -> Option<&mut Node<'a>> {
        match value {
            Value::Held(number) => self.nodes.get_mut(number as usize),
            _ => None,
        }
    }

    /// POP, POP_MARK and DUP.
    fn shuffle(&mut self, opcode: u8) -> Result<()> {
        match opcode {
            b'0' if self.marks.last() == Some(&self.stack.len()) => self.pop_to_mark().map(drop),
            b'0' => self.pop().map(drop),
            b'1' => self.pop_to_mark().map(drop),
            _ => {
                let value = self.top()?;
                self.push(value)
            }
        }
    }

    /// PUT and GET in their several widths.
    fn remember(&mut self, opcode: u8) -> Result<()> {
        let key = match opcode {
            b'q' | b'h' => self.length(1)?,
            b'r' | b'j' => self.length(4)?,
            0x94 => self.memo.len() as u64,
            _ => {
                let line = self.line()?;
                let number = std::str::from_utf8(line).ok().and_then(|text| text.parse().ok());
                number.ok_or_else(|| self.bad("a memo number", String::from_utf8_lossy(line)))?
            }
        };
        if matches!(opcode, b'g' | b'h' | b'j') {
            let Some(value) = self.memo.get(&key) else {
                return Err(self.bad(&format!("a value remembered as {key}"), "none"));
            };
            return self.push(*value);
        }
        let value = self.top()?;
        self.memo.insert(key, value);
        Ok(())
    }

    fn push_global(&mut self, module: &str, name: &str) -> Result<()> {
        match allowed::global(module, name) {
            Some(global) => self.push_node(Node::Global(global)),
            None => {
                let found = format!("`{module:.80}.{name:.80}`, which is not read");
                Err(self.bad("numbers, strings, lists, arrays or csr matrices", found))
            }
        }
    }

    fn stack_global(&mut self) -> Result<()> {
        let items = self.pop_many(2)?;
        match (self.node(items[0]), self.node(items[1])) {
            (Some(Node::Text(module)), Some(Node::Text(name))) => {
                let (module, name) = (module.clone(), name.clone());
                self.push_global(&module, &name)
            }
            _ => Err(self.bad("two strings that name a constructor", "other values")),
        }
    }

    /// Storages of torch: `('storage', torch.LongStorage, '0', 'cpu', 17)`.
    fn persistent(&mut self) -> Result<()> {
        let id = self.pop()?;
        let storage = match self.node(id) {
            Some(Node::Tuple(parts)) => match parts[..] {
                [_, kind, key, _, Value::Int(elements), ..] if elements >= 0 => match self.node(kind) {
                    Some(Node::Global(allowed::Global::Storage(scalar))) => {
                        Some(Storage { scalar: *scalar, key, elements: elements as u64 })
                    }
                    _ => None,
                },
                _ => None,
            },
            _ => None,
        };
        let storage = storage.ok_or_else(|| self.bad("a torch storage", "another persistent id"))?;
        self.push_node(Node::Storage(storage))
    }
}

/// Python's `repr` of a byte string, without the quotes.
fn unescape_bytes(text: &[u8]) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text.iter().copied();
    while let Some(byte) = rest.next() {
        out.push(match byte {
            b'\\' => match rest.next()? {
                b'n' => b'\n',
                b't' => b'\t',
                b'r' => b'\r',
                b'x' => {
                    let digits = [rest.next()?, rest.next()?];
                    u8::from_str_radix(std::str::from_utf8(&digits).ok()?, 16).ok()?
                }
                other @ (b'\\' | b'\'' | b'"') => other,
                _ => return None,
            },
            other => other,
        });
    }
    Some(out)
}

/// Python's raw-unicode-escape: latin-1, with `\uHHHH` and `\UHHHHHHHH` for the rest.
fn unescape_text(text: &[u8]) -> Option<String> {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((first, tail)) = rest.split_first() {
        let digits = match rest {
            [b'\\', b'u', ..] => 4,
            [b'\\', b'U', ..] => 8,
            _ => {
                out.push(*first as char);
                rest = tail;
                continue;
            }
        };
        let code = std::str::from_utf8(rest.get(2..2 + digits)?).ok()?;
        out.push(char::from_u32(u32::from_str_radix(code, 16).ok()?)?);
        rest = &rest[2 + digits..];
    }
    Some(out)
}
