"""Esker's loaders in place of PyG's for tests that were written for those, and no test skipped for want of pyg-lib."""

import torch_geometric.loader
import torch_geometric.testing

import esker


def _always(function):
    return function


# What these packages would do, Esker does itself.
_NOT_NEEDED = {"pyg_lib", "torch_sparse"}
_with_package = torch_geometric.testing.withPackage
torch_geometric.testing.onlyNeighborSampler = _always
torch_geometric.testing.withPackage = lambda *names: _with_package(*(name for name in names if name not in _NOT_NEEDED))
torch_geometric.loader.NeighborLoader = esker.NeighborLoader
torch_geometric.loader.LinkNeighborLoader = esker.LinkNeighborLoader
