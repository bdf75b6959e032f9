"""Esker in Python."""

from esker._esker import __version__
from esker.engine import evaluate, generate, import_, memory, numpy_loader, open, predict, set_memory, train

__all__ = ["__version__", "evaluate", "generate", "import_", "memory", "numpy_loader", "open", "predict", "set_memory", "train"]

#: What needs torch and torch_geometric: it is imported when it is first asked for.
_DISK = ("DiskData", "LinkNeighborLoader", "NeighborLoader", "from_pyg", "spill")


def __getattr__(name):
    if name in _DISK:
        from esker import disk
        return getattr(disk, name)
    raise AttributeError(f"module 'esker' has no attribute {name!r}")
