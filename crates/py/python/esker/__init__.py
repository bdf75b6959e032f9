"""Esker: the loaders of PyTorch Geometric, over samplers in Rust.

Change one import, and leave the rest of a program as it is::

    from esker import NeighborLoader   # was: from torch_geometric.loader import NeighborLoader

`NeighborLoader`, `LinkNeighborLoader` and `NeighborSampler` extend PyTorch Geometric's classes of the same names and need
neither pyg-lib nor torch-sparse. They are imported when they are first used, so that the rest of the package works without torch.
"""

from esker._esker import __version__
from esker.engine import evaluate, generate, import_, memory, numpy_loader, open, predict, set_memory, train

__all__ = [
    "DiskData", "FeatureStore", "GraphStore", "LinkNeighborLoader", "NeighborLoader", "NeighborSampler", "__version__", "evaluate", "from_pyg",
    "generate", "import_", "memory", "numpy_loader", "open", "predict", "set_memory", "spill", "train",
]

# Names that need torch and torch_geometric, and where they are.
_NEED_PYG = {
    "DiskData": "esker.disk",
    "FeatureStore": "esker.stores",
    "GraphStore": "esker.stores",
    "from_pyg": "esker.disk",
    "spill": "esker.spilled",
    "LinkNeighborLoader": "esker.loader",
    "NeighborLoader": "esker.loader",
    "NeighborSampler": "esker.sampler",
}


def __getattr__(name):
    if name not in _NEED_PYG:
        raise AttributeError(f"module 'esker' has no attribute {name!r}")
    import importlib

    try:
        module = importlib.import_module(_NEED_PYG[name])
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("torch", "torch_geometric"):
            raise
        raise ImportError(f"esker.{name} extends PyTorch Geometric, and {missing} is not installed: pip install esker[pyg]") from error
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *_NEED_PYG})
