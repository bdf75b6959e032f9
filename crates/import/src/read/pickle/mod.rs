//! Python pickles, read as data. Nothing is ever called. A pickle may only name the few constructors in `allowed.rs`,
//! each of which is implemented here. Any other name is refused, and the error names it.
//!
//! Values are stored in one table and refer to each other by number. So a value shared a thousand times is stored
//! once, values that contain themselves are harmless, nothing recurses, and memory is proportional to the input
//! whatever the bytes are. Long strings stay slices of the input.

mod allowed;
mod machine;
mod numbers;
#[cfg(test)]
mod tests;

pub use numbers::{Numbers, SparseMatrix};

use crate::npy::{Header, Scalar};
use crate::{ImportError, Location, Result};
use allowed::Global;
use std::{borrow::Cow, path::Path};

/// A value: small ones directly, the others by their number in the table.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Value {
    /// `None`.
    None,
    /// `True` or `False`.
    Bool(bool),
    /// A whole number.
    Int(i64),
    /// A real number.
    Float(f64),
    /// A value in the table of its [`Pickle`].
    Held(u32),
}

/// A value that does not fit in a [`Value`].
enum Node<'a> {
    Bytes(Cow<'a, [u8]>),
    Text(Cow<'a, str>),
    /// A whole number beyond 64 bits. Esker needs none.
    Big,
    List(Vec<Value>),
    Tuple(Vec<Value>),
    Set(Vec<Value>),
    Dict(Vec<(Value, Value)>),
    Global(Global),
    ElementType(ElementType),
    Array(Box<PickledArray>),
    /// A scipy CSR matrix: the dictionary of its attributes.
    Sparse(Value),
    Storage(Storage),
    Tensor(Box<PickledTensor>),
}

/// The element type of a numpy array.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ElementKind {
    Number(Scalar),
    /// Strings of this many 32-bit characters.
    Text(usize),
    /// Strings of this many bytes.
    Bytes(usize),
    Object,
}

#[derive(Debug, Clone, Copy)]
struct ElementType {
    kind: ElementKind,
    swap: bool,
}

impl ElementType {
    /// The type of a numpy code, with or without a byte order: `<f4`, `U19`, `O8`.
    fn from_code(code: &str) -> Option<ElementType> {
        let swap = code.starts_with('>');
        let code = code.strip_prefix(['<', '|', '=', '>']).unwrap_or(code);
        let width = || code.get(1..).and_then(|digits| digits.parse().ok());
        let kind = match code.as_bytes().first()? {
            b'O' => ElementKind::Object,
            b'U' => ElementKind::Text(width()?),
            b'S' => ElementKind::Bytes(width()?),
            _ => ElementKind::Number(Scalar::from_descr(&format!("|{code}"))?.0),
        };
        Some(ElementType { kind, swap })
    }
}

/// A numpy array; `data` is a byte string, or a list for arrays of objects.
struct PickledArray {
    element: ElementType,
    shape: Vec<u64>,
    fortran: bool,
    data: Value,
}

/// A torch storage, referred to but not in the pickle itself.
#[derive(Debug, Clone, Copy)]
struct Storage {
    scalar: Scalar,
    key: Value,
    elements: u64,
}

/// A torch tensor: a view of a storage.
struct PickledTensor {
    storage: Storage,
    offset: u64,
    shape: Vec<u64>,
    strides: Vec<u64>,
}

/// A torch tensor whose storage is outside the pickle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorView<'p> {
    /// Name of the storage.
    pub key: Cow<'p, str>,
    /// Element type.
    pub scalar: Scalar,
    /// Elements in the storage.
    pub elements: u64,
    /// First element of the tensor in the storage.
    pub offset: u64,
    /// Lengths of the axes.
    pub shape: &'p [u64],
    /// Elements between adjacent positions along each axis.
    pub strides: &'p [u64],
}

/// A parsed pickle.
pub struct Pickle<'a> {
    nodes: Vec<Node<'a>>,
    root: Value,
    location: Location,
}

/// Reads a pickle of any protocol up to 5, with no bytes after it.
pub fn read<'a>(bytes: &'a [u8], location: &Location) -> Result<Pickle<'a>> {
    let (pickle, used) = read_first(bytes, location)?;
    if used != bytes.len() {
        let found = format!("{} more bytes", bytes.len() - used);
        return Err(location_at(location, used).bad("the end of the pickle", found));
    }
    Ok(pickle)
}

/// Reads the pickle at the start of `bytes`, and returns its length in bytes.
pub fn read_first<'a>(bytes: &'a [u8], location: &Location) -> Result<(Pickle<'a>, usize)> {
    machine::run(bytes, location)
}

/// Reads an npy whose elements are objects (`|O`): a pickle of the array follows the header.
pub fn read_object_npy<'a>(mut bytes: &'a [u8], location: &Location) -> Result<Pickle<'a>> {
    let header = Header::read(&mut bytes, location)?;
    if header.descr != "|O" {
        return Err(location
            .clone()
            .bad("an array of Python objects (|O)", format!("dtype {}", header.descr)));
    }
    read(bytes, location)
}

/// The strings of an npy: `descr` such as `<U19`, and its elements. `None` for another type or length.
pub fn strings_of(descr: &str, bytes: &[u8]) -> Option<Vec<String>> {
    numbers::strings(ElementType::from_code(descr)?, bytes)
}

/// For fuzzing: reads `bytes` as a pickle and accesses everything in it once.
pub fn fuzz(bytes: &[u8]) -> Result<()> {
    let location = Location::file(Path::new("fuzz.pkl"));
    let (pickle, _) = read_first(bytes, &location)?;
    for number in 0..pickle.nodes.len() as u32 {
        let value = Value::Held(number);
        pickle.describe(value);
        // Most values have another type; then an error is the right answer.
        let _ = pickle.ids(value);
        let _ = pickle.strings(value);
        let _ = pickle.numbers(value);
        let _ = pickle.tensor(value);
        let _ = pickle.sparse(value).and_then(|matrix| matrix.to_rows(&location.path));
    }
    Ok(())
}

fn location_at(location: &Location, offset: usize) -> Location {
    let comma = if location.detail.is_empty() { "" } else { ", " };
    Location { path: location.path.clone(), detail: format!("{}{comma}byte {offset}", location.detail) }
}

impl Pickle<'_> {
    /// The value that was pickled; a 0-dimensional array of objects counts as the object in it.
    pub fn root(&self) -> Value {
        match self.objects(self.root) {
            Some(([], [only])) => *only,
            _ => self.root,
        }
    }

    /// The error for a value that does not match the format.
    pub fn bad(&self, what: &str, expected: &str, value: Value) -> ImportError {
        let comma = if self.location.detail.is_empty() { "" } else { ", " };
        let location = Location::at(&self.location.path, format!("{}{comma}{what}", self.location.detail));
        location.bad(expected, self.describe(value))
    }

    fn node(&self, value: Value) -> Option<&Node<'_>> {
        match value {
            Value::Held(number) => self.nodes.get(number as usize),
            _ => None,
        }
    }

    /// The value in a few words, for messages.
    pub fn describe(&self, value: Value) -> String {
        match (value, self.node(value)) {
            (Value::None, _) => "None".into(),
            (Value::Bool(truth), _) => if truth { "True" } else { "False" }.into(),
            (Value::Int(number), _) => number.to_string(),
            (Value::Float(number), _) => number.to_string(),
            (_, Some(Node::Bytes(bytes))) => format!("a string of {} bytes", bytes.len()),
            (_, Some(Node::Text(text))) => format!("`{}`", text.chars().take(40).collect::<String>()),
            (_, Some(Node::Big)) => "an integer beyond 64 bits".into(),
            (_, Some(Node::List(items))) => format!("a list of {}", items.len()),
            (_, Some(Node::Tuple(items))) => format!("a tuple of {}", items.len()),
            (_, Some(Node::Set(items))) => format!("a set of {}", items.len()),
            (_, Some(Node::Dict(pairs))) => format!("a dictionary of {}", pairs.len()),
            (_, Some(Node::Global(global))) => format!("{global:?}"),
            (_, Some(Node::ElementType(element))) => format!("dtype {:?}", element.kind),
            (_, Some(Node::Array(array))) => {
                format!("an array of {:?} and shape {:?}", array.element.kind, array.shape)
            }
            (_, Some(Node::Sparse(_))) => "a sparse matrix".into(),
            (_, Some(Node::Storage(storage))) => format!("a torch storage of {}", storage.scalar),
            (_, Some(Node::Tensor(tensor))) => format!("a tensor of shape {:?}", tensor.shape),
            (Value::Held(_), None) => "nothing".into(),
        }
    }

    /// The items of a list or tuple, or of an array of objects in storage order.
    pub fn items(&self, value: Value) -> Option<&[Value]> {
        match self.node(value)? {
            Node::List(items) | Node::Tuple(items) | Node::Set(items) => Some(items),
            Node::Array(_) => self.objects(value).map(|(_, items)| items),
            _ => None,
        }
    }

    /// Shape and items of an array of objects.
    fn objects(&self, value: Value) -> Option<(&[u64], &[Value])> {
        let Some(Node::Array(array)) = self.node(value) else { return None };
        let Some(Node::List(items)) = self.node(array.data) else { return None };
        let elements = array.shape.iter().try_fold(1u64, |product, axis| product.checked_mul(*axis));
        let whole = array.element.kind == ElementKind::Object && elements == Some(items.len() as u64);
        whole.then_some((&array.shape[..], &items[..]))
    }

    /// Keys and values of a dictionary, in the order they were stored.
    pub fn pairs(&self, value: Value) -> Option<&[(Value, Value)]> {
        match self.node(value)? {
            Node::Dict(pairs) => Some(pairs),
            _ => None,
        }
    }

    /// The value of a string key in a dictionary; the last one counts, as in Python.
    pub fn get(&self, dictionary: Value, key: &str) -> Option<Value> {
        let matches = |held: &Value| self.text(*held).is_some_and(|text| text == key);
        self.pairs(dictionary)?.iter().rev().find(|(held, _)| matches(held)).map(|(_, value)| *value)
    }

    /// A string; byte strings of Python 2 are read as latin-1.
    pub fn text(&self, value: Value) -> Option<Cow<'_, str>> {
        match self.node(value)? {
            Node::Text(text) => Some(Cow::Borrowed(text)),
            Node::Bytes(bytes) => Some(bytes.iter().map(|byte| *byte as char).collect()),
            _ => None,
        }
    }

    fn bytes(&self, value: Value) -> Option<&[u8]> {
        match self.node(value)? {
            Node::Bytes(bytes) => Some(bytes),
            _ => None,
        }
    }

    /// Whole numbers that are not negative: a list, tuple or set of them, or an array of integers.
    pub fn ids(&self, value: Value) -> Result<Vec<u64>> {
        const WHAT: &str = "a list of node ids";
        if let Some(items) = self.items(value) {
            let id = |(row, item): (usize, &Value)| match item {
                Value::Int(id) if *id >= 0 => Ok(*id as u64),
                other => Err(self.bad(&format!("item {row}"), "a node id", *other)),
            };
            return items.iter().enumerate().map(id).collect();
        }
        let numbers = self.numbers(value).map_err(|_| self.bad("value", WHAT, value))?;
        numbers.ids(&self.location)
    }

    /// Strings: a list of them, or an array in any of numpy's three forms.
    pub fn strings(&self, value: Value) -> Result<Vec<String>> {
        let bad = || self.bad("value", "a list of strings", value);
        if let Some(items) = self.items(value) {
            let string = |item: &Value| self.text(*item).map(Cow::into_owned).ok_or_else(bad);
            return items.iter().map(string).collect();
        }
        let Some(Node::Array(array)) = self.node(value) else { return Err(bad()) };
        let bytes = self.bytes(array.data).ok_or_else(bad)?;
        numbers::strings(array.element, bytes).ok_or_else(bad)
    }

    /// A tensor.
    pub fn tensor(&self, value: Value) -> Option<TensorView<'_>> {
        let Some(Node::Tensor(tensor)) = self.node(value) else { return None };
        Some(TensorView {
            key: self.text(tensor.storage.key)?,
            scalar: tensor.storage.scalar,
            elements: tensor.storage.elements,
            offset: tensor.offset,
            shape: &tensor.shape,
            strides: &tensor.strides,
        })
    }
}
