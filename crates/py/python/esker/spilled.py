"""Features of a `Data` on disk: columns of two dimensions go to a temporary dataset, and batches read their rows there."""

import copy
import json
import os
import shutil
import tempfile
import weakref
from typing import Optional

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from esker import _esker

_DTYPES = {torch.float32: ("f32", np.float32), torch.float16: ("f16", np.float16)}


class SpilledColumn(np.ndarray):
    """A column on disk. It has the shape and dtype of the tensor that it was, and `numpy.take` reads rows of it, which is what PyTorch
    Geometric does with arrays. `column[ids]` is a tensor. Other numbers of it are not to be had: they would all be zeros.
    """

    def __new__(cls, path: str, shape, dtype: str, home):
        # Of a shape, and of next to no memory.
        column = np.ndarray.__new__(cls, shape, dtype, buffer=np.zeros(1, dtype), strides=(0, ) * len(shape))
        column._path, column._home, column._rows = path, home, None
        return column

    def __array_finalize__(self, other):
        self._path = self._home = self._rows = None

    def gather(self, index) -> Tensor:
        """The rows with these ids."""
        if self._path is None:
            raise TypeError("this is a part of a column on disk; take rows of the column itself")
        if self._rows is None:
            self._rows = _esker.DiskRowsOf(_esker.DiskDataset(self._path), os.cpu_count() or 1)
        index = torch.as_tensor(index)
        found = self._rows.gather(np.ascontiguousarray(index.detach().cpu().numpy(), dtype=np.int64).reshape(-1))
        # f16 is read as f32, and back again without a loss.
        return torch.from_numpy(np.asarray(found).astype(self.dtype, copy=False)).reshape(*index.shape, self.shape[1])

    def __getitem__(self, index) -> Tensor:
        if isinstance(index, slice):
            index = torch.arange(self.shape[0])[index]
        index = torch.as_tensor(index)
        if index.dtype in (torch.bool, torch.uint8):
            index = index.nonzero().view(-1)
        return self.gather(torch.where(index < 0, index + self.shape[0], index))

    def __array_function__(self, function, types, arguments, options):
        if function is np.take:
            values, index, axis = (list(arguments) + [None] * 3)[:3]
            if isinstance(values, SpilledColumn) and options.get("axis", axis) in (0, -2):
                return values.gather(torch.as_tensor(np.asarray(index))).numpy()
        return NotImplemented

    def __array_ufunc__(self, *_, **__):
        return NotImplemented

    def __reduce__(self):
        return (SpilledColumn, (self._path, tuple(self.shape), self.dtype.str, self._home))

    def __deepcopy__(self, memo):
        return self

    def __repr__(self) -> str:
        return f"SpilledColumn(shape={list(self.shape)}, dtype={self.dtype}, on disk in {self._path})"


#: Directories that were pickled: somebody may open them later, so they stay until this process ends.
_pickled: list = []


class _Directory:
    """A directory that is removed when nobody needs it any more. Processes that get a copy do not remove it."""

    def __init__(self, inside: Optional[str]):
        self.path = tempfile.mkdtemp(prefix="esker-spill-", dir=inside)
        self._end = weakref.finalize(self, _remove, self.path, os.getpid())

    def __reduce__(self):
        if self not in _pickled:
            _pickled.append(self)
        return (_BorrowedDirectory, (self.path, ))


class _BorrowedDirectory:
    def __init__(self, path: str):
        self.path = path


def _remove(path: str, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(path, ignore_errors=True)


def spill(data: Data, directory=None) -> Data:
    """A copy of `data` whose two-dimensional columns of float32 and float16 are on disk, in a temporary directory inside `directory`.

    All else is shared with `data`. Columns are as they are now: later changes of the original do not show in batches (copy on
    spill). The directory is removed when no column of it is used any more.
    """
    copied, home = copy.copy(data), _Directory(os.fspath(directory) if directory else None)
    for key, value in list(data._store.items()):
        if isinstance(value, Tensor) and value.dim() == 2 and value.dtype in _DTYPES and value.numel() and value.device.type == "cpu":
            if data.is_node_attr(key) or data.is_edge_attr(key):
                copied[key] = _write(os.path.join(home.path, key), value.detach(), home)
    copied._store.__dict__.pop("_cached_attr", None)
    return copied


class SpillMixin:
    """What loaders do with `spill=directory`, or with ESKER_SPILL=1: features of their data leave memory, for them."""

    #: The data with its features on disk, if they were spilled. `data` stays the caller's.
    _spilled: Optional[Data] = None

    def __init__(self, *arguments, **options):
        spill_to = of_environment(options.pop("spill", None))
        super().__init__(*arguments, **options)
        if spill_to is not None and isinstance(self.data, Data):
            self._spilled = spill(self.data, spill_to)

    def filter_fn(self, out):
        """Joins what was sampled with the rows of its nodes and edges."""
        if self._spilled is None:
            return super().filter_fn(out)
        inner = copy.copy(self)
        inner.__dict__.update(data=self._spilled, _spilled=None)
        return super(SpillMixin, inner).filter_fn(out)


def of_environment(spill_to):
    """Where to spill: as asked, or a temporary directory if ESKER_SPILL=1; `None` for not at all."""
    if spill_to is None and os.environ.get("ESKER_SPILL") == "1":
        return tempfile.gettempdir()
    return spill_to


def _write(path: str, value: Tensor, home: _Directory) -> SpilledColumn:
    """A dataset with a node per row and no edges."""
    name, dtype = _DTYPES[value.dtype]
    np.save(path + "-rows.npy", np.ascontiguousarray(value.numpy()))
    np.save(path + "-edges.npy", np.zeros((2, 0), dtype=np.int64))
    request = {"format": "npy", "edges": path + "-edges.npy", "features": path + "-rows.npy", "nodes": len(value), "allow_nan": True, "dtype": name}
    _esker.import_(path, json.dumps(request), None, False)
    os.remove(path + "-rows.npy")
    os.remove(path + "-edges.npy")
    return SpilledColumn(path, tuple(value.shape), np.dtype(dtype).str, home)
