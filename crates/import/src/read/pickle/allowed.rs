//! The constructors a pickle may name, and the value that each of them makes. A pickle cannot make Esker do anything
//! else.

use super::machine::Machine;
use super::{ElementKind, ElementType, Node, PickledArray, PickledTensor, Value};
use crate::Result;
use crate::npy::Scalar;
use std::borrow::Cow;

/// A known name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Global {
    Array,
    ElementType,
    ReconstructArray,
    ArrayFromBuffer,
    NumpyScalar,
    Encode,
    List,
    Tuple,
    Dict,
    /// `defaultdict`: its first argument makes missing values.
    DefaultDict,
    Set,
    Bytes,
    /// A type that is only an argument and makes nothing here: `object`, `int`, `float`.
    Plain,
    Reconstruct,
    Sparse,
    RebuildTensor,
    Storage(Scalar),
}

/// Largest number of axes in numpy.
const AXES: usize = 64;

pub(super) fn global(module: &str, name: &str) -> Option<Global> {
    Some(match (module, name) {
        ("numpy", "ndarray") => Global::Array,
        ("numpy", "dtype") => Global::ElementType,
        ("numpy.core.multiarray" | "numpy._core.multiarray", "_reconstruct") => Global::ReconstructArray,
        ("numpy.core.multiarray" | "numpy._core.multiarray", "scalar") => Global::NumpyScalar,
        ("numpy.core.numeric" | "numpy._core.numeric", "_frombuffer") => Global::ArrayFromBuffer,
        ("_codecs", "encode") => Global::Encode,
        ("collections", "defaultdict") => Global::DefaultDict,
        ("collections", "OrderedDict") => Global::Dict,
        ("__builtin__" | "builtins", "list") => Global::List,
        ("__builtin__" | "builtins", "tuple") => Global::Tuple,
        ("__builtin__" | "builtins", "dict") => Global::Dict,
        ("__builtin__" | "builtins", "set" | "frozenset") => Global::Set,
        ("__builtin__" | "builtins", "bytes" | "bytearray") => Global::Bytes,
        ("__builtin__" | "builtins", "object" | "int" | "long" | "float" | "str") => Global::Plain,
        ("copy_reg" | "copyreg", "_reconstructor") => Global::Reconstruct,
        ("scipy.sparse.csr" | "scipy.sparse._csr", "csr_matrix" | "csr_array") => Global::Sparse,
        ("torch._utils", "_rebuild_tensor_v2") => Global::RebuildTensor,
        ("torch", storage) => Global::Storage(match storage {
            "BoolStorage" => Scalar::Bool,
            "CharStorage" => Scalar::I8,
            "ByteStorage" => Scalar::U8,
            "ShortStorage" => Scalar::I16,
            "IntStorage" => Scalar::I32,
            "LongStorage" => Scalar::I64,
            "HalfStorage" => Scalar::F16,
            "FloatStorage" => Scalar::F32,
            "DoubleStorage" => Scalar::F64,
            _ => return None,
        }),
        _ => return None,
    })
}

/// REDUCE and NEWOBJ: the value of `callable(*arguments)`.
pub(super) fn make(machine: &mut Machine, callable: Value, arguments: Value) -> Result<Value> {
    let Some(Node::Global(global)) = machine.node(callable) else {
        return Err(machine.bad("a constructor", "another value"));
    };
    let global = *global;
    let Some(Node::Tuple(arguments)) = machine.node(arguments) else {
        return Err(machine.bad("a tuple of arguments", "another value"));
    };
    if arguments.len() > 16 {
        return Err(machine.bad("at most 16 arguments", arguments.len()));
    }
    let arguments = arguments.clone();
    if let (Global::NumpyScalar, [element, data]) = (global, &arguments[..]) {
        return numpy_scalar(machine, *element, *data);
    }
    let node = match (global, &arguments[..]) {
        (Global::ElementType, [code, ..]) => {
            short_text(machine, *code).and_then(|code| ElementType::from_code(&code)).map(Node::ElementType)
        }
        (Global::ReconstructArray, _) => Some(empty_array()),
        (Global::ArrayFromBuffer, [data, element, shape, order]) => {
            array_from_buffer(machine, *data, *element, *shape, *order)
        }
        (Global::Encode, [text, _encoding]) => latin1(machine, *text)?,
        (Global::List, []) => Some(Node::List(Vec::new())),
        (Global::List, [items]) => copied(machine, *items)?.map(Node::List),
        (Global::Tuple, [items]) => copied(machine, *items)?.map(Node::Tuple),
        (Global::Set, []) => Some(Node::Set(Vec::new())),
        (Global::Set, [items]) => copied(machine, *items)?.map(Node::Set),
        (Global::Dict, []) | (Global::DefaultDict, [] | [_]) => Some(Node::Dict(Vec::new())),
        (Global::Dict, [pairs]) => dictionary(machine, *pairs)?,
        (Global::Bytes, []) => Some(Node::Bytes(Cow::Borrowed(&[]))),
        (Global::Bytes, [bytes]) | (Global::Bytes, [bytes, _]) => latin1(machine, *bytes)?,
        (Global::Sparse, _) => Some(Node::Sparse(Value::None)),
        (Global::Reconstruct, [class, ..]) => match machine.node(*class) {
            Some(Node::Global(Global::Sparse)) => Some(Node::Sparse(Value::None)),
            _ => None,
        },
        (Global::RebuildTensor, [storage, offset, shape, strides, ..]) => {
            tensor(machine, *storage, *offset, *shape, *strides)
        }
        _ => None,
    };
    match node {
        Some(node) => machine.hold(node),
        None => {
            Err(machine
                .bad("arguments as numpy, scipy and torch write them", format!("others for {global:?}")))
        }
    }
}

/// BUILD: fills in the value that `make` left empty.
pub(super) fn build(machine: &mut Machine, object: Value, state: Value) -> Result<()> {
    let built = match machine.node(object) {
        Some(Node::ElementType(element)) => built_element_type(machine, *element, state),
        Some(Node::Array(_)) => built_array(machine, state),
        Some(Node::Sparse(_)) => sparse_state(machine, state).map(Node::Sparse),
        // Attributes of an OrderedDict: nothing here reads them.
        Some(Node::Dict(_)) => return Ok(()),
        _ => None,
    };
    match (built, machine.node_mut(object)) {
        (Some(built), Some(node)) => {
            *node = built;
            Ok(())
        }
        _ => Err(machine.bad("a state as numpy and scipy write it", "another")),
    }
}

/// State `(3, '<', None, None, None, ...)`: version, byte order, then fields of structured types.
fn built_element_type<'a>(machine: &Machine<'a, '_>, element: ElementType, state: Value) -> Option<Node<'a>> {
    let Some(Node::Tuple(state)) = machine.node(state) else { return None };
    let [_, order, Value::None, Value::None, Value::None, ..] = state[..] else { return None };
    let swap = match short_text(machine, order)?.as_str() {
        "<" | "|" | "=" => false,
        ">" => true,
        _ => return None,
    };
    Some(Node::ElementType(ElementType { swap, ..element }))
}

fn empty_array<'a>() -> Node<'a> {
    let element = ElementType { kind: ElementKind::Number(Scalar::I8), swap: false };
    Node::Array(Box::new(PickledArray { element, shape: vec![0], fortran: false, data: Value::None }))
}

/// State `(1, shape, dtype, fortran, data)`; the oldest numpy omits the version.
fn built_array<'a>(machine: &Machine<'a, '_>, state: Value) -> Option<Node<'a>> {
    let Some(Node::Tuple(state)) = machine.node(state) else { return None };
    let (shape, element, fortran, data) = match state[..] {
        [_, shape, element, fortran, data] | [shape, element, fortran, data] => {
            (shape, element, fortran, data)
        }
        _ => return None,
    };
    let Some(Node::ElementType(element)) = machine.node(element) else { return None };
    let fortran = match fortran {
        Value::Bool(fortran) => fortran,
        Value::Int(flag @ 0..=1) => flag == 1,
        _ => return None,
    };
    let shape = axes(machine, shape)?;
    Some(Node::Array(Box::new(PickledArray { element: *element, shape, fortran, data })))
}

/// Protocol 5: `_frombuffer(bytes, dtype, shape, 'C')`.
fn array_from_buffer<'a>(
    machine: &Machine<'a, '_>,
    data: Value,
    element: Value,
    shape: Value,
    order: Value,
) -> Option<Node<'a>> {
    let Some(Node::ElementType(element)) = machine.node(element) else { return None };
    let fortran = match short_text(machine, order)?.as_str() {
        "C" => false,
        "F" => true,
        _ => return None,
    };
    let shape = axes(machine, shape)?;
    Some(Node::Array(Box::new(PickledArray { element: *element, shape, fortran, data })))
}

fn axes(machine: &Machine, shape: Value) -> Option<Vec<u64>> {
    let Some(Node::Tuple(axes)) = machine.node(shape) else { return None };
    if axes.len() > AXES {
        return None;
    }
    let length = |axis: &Value| match axis {
        Value::Int(length) => u64::try_from(*length).ok(),
        _ => None,
    };
    axes.iter().map(length).collect()
}

/// A string of a few characters, such as a byte order; anything longer is not one.
fn short_text(machine: &Machine, value: Value) -> Option<String> {
    match machine.node(value)? {
        Node::Text(text) if text.len() <= 64 => Some(text.to_string()),
        Node::Bytes(bytes) if bytes.len() <= 64 => Some(bytes.iter().map(|byte| *byte as char).collect()),
        _ => None,
    }
}

fn numpy_scalar(machine: &mut Machine, element: Value, data: Value) -> Result<Value> {
    let bad = "a numpy number and its bytes";
    let (Some(Node::ElementType(element)), Some(Node::Bytes(bytes))) =
        (machine.node(element), machine.node(data))
    else {
        return Err(machine.bad(bad, "other values"));
    };
    let (element, length) = (*element, bytes.len());
    if let ElementKind::Number(scalar) = element.kind {
        return super::numbers::one(scalar, element.swap, bytes)
            .ok_or_else(|| machine.bad(bad, format!("{length} bytes for {scalar:?}")));
    }
    machine.charge(length)?;
    let text = match machine.node(data) {
        Some(Node::Bytes(bytes)) => super::numbers::string(element, bytes),
        _ => None,
    };
    let text = text.ok_or_else(|| machine.bad(bad, format!("a {:?}", element.kind)))?;
    machine.hold(Node::Text(Cow::Owned(text)))
}

/// `_codecs.encode(text, 'latin1')`: how Python 3 writes bytes in protocol 2.
fn latin1<'a>(machine: &mut Machine<'a, '_>, value: Value) -> Result<Option<Node<'a>>> {
    let length = match machine.node(value) {
        Some(Node::Text(text)) => text.len(),
        Some(Node::Bytes(bytes)) => bytes.len(),
        _ => return Ok(None),
    };
    machine.charge(length)?;
    let bytes: Option<Vec<u8>> = match machine.node(value) {
        Some(Node::Text(text)) => text.chars().map(|letter| u8::try_from(letter as u32).ok()).collect(),
        Some(Node::Bytes(bytes)) => Some(bytes.to_vec()),
        _ => None,
    };
    Ok(bytes.map(|bytes| Node::Bytes(Cow::Owned(bytes))))
}

/// A copy of the items of a list, tuple or set.
fn copied(machine: &mut Machine, items: Value) -> Result<Option<Vec<Value>>> {
    let Some(Node::List(items) | Node::Tuple(items) | Node::Set(items)) = machine.node(items) else {
        return Ok(None);
    };
    let items = items.clone();
    machine.charge(items.len() * size_of::<Value>())?;
    Ok(Some(items))
}

/// `OrderedDict([[key, value], ...])`, as Python 2 writes it.
fn dictionary<'a>(machine: &mut Machine<'a, '_>, pairs: Value) -> Result<Option<Node<'a>>> {
    let Some(items) = copied(machine, pairs)? else { return Ok(None) };
    let pair = |item: &Value| match machine.node(*item) {
        Some(Node::List(pair) | Node::Tuple(pair)) => match pair[..] {
            [key, value] => Some((key, value)),
            _ => None,
        },
        _ => None,
    };
    Ok(items.iter().map(pair).collect::<Option<_>>().map(Node::Dict))
}

/// A dictionary of attributes, alone or with slots after it.
fn sparse_state(machine: &Machine, state: Value) -> Option<Value> {
    match machine.node(state)? {
        Node::Dict(_) => Some(state),
        Node::Tuple(parts) => match parts[..] {
            [attributes, _] if matches!(machine.node(attributes), Some(Node::Dict(_))) => Some(attributes),
            _ => None,
        },
        _ => None,
    }
}

fn tensor<'a>(
    machine: &Machine<'a, '_>,
    storage: Value,
    offset: Value,
    shape: Value,
    strides: Value,
) -> Option<Node<'a>> {
    let (Some(Node::Storage(storage)), Value::Int(offset)) = (machine.node(storage), offset) else {
        return None;
    };
    let (shape, strides) = (axes(machine, shape)?, axes(machine, strides)?);
    let offset = u64::try_from(offset).ok().filter(|_| shape.len() == strides.len())?;
    Some(Node::Tensor(Box::new(PickledTensor { storage: *storage, offset, shape, strides })))
}
