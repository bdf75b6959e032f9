"""Datasets on disk as the feature store and the graph store of PyTorch Geometric, for its own loaders."""

import os
from typing import List, Optional

import numpy as np
import torch
from torch_geometric.data import EdgeAttr, TensorAttr
from torch_geometric.data import FeatureStore as _FeatureStore
from torch_geometric.data import GraphStore as _GraphStore
from torch_geometric.data.graph_store import EdgeLayout

from esker.disk import DiskColumn, DiskData


class FeatureStore(_FeatureStore):
    """The columns of a dataset (`x`, `y`). Rows are read when a batch asks for them.

    >>> features, graph = FeatureStore("graph"), GraphStore("graph")  # doctest: +SKIP
    >>> loader = torch_geometric.loader.NeighborLoader((features, graph), [10, 5], input_nodes=nodes)  # doctest: +SKIP
    """

    def __init__(self, dataset):
        super().__init__()
        self.data = dataset if isinstance(dataset, DiskData) else DiskData(os.fspath(dataset))

    def _columns(self) -> List[str]:
        return [key for key, value in self.data._store.items() if isinstance(value, DiskColumn) and value._name.startswith("node-")]

    def _get_tensor(self, attr: TensorAttr) -> Optional[torch.Tensor]:
        if attr.attr_name not in self._columns():
            return None
        column, index = self.data[attr.attr_name], attr.index
        return column.load() if index is None else column[torch.as_tensor(index) if isinstance(index, np.ndarray) else index]

    def _get_tensor_size(self, attr: TensorAttr):
        return tuple(self.data[attr.attr_name].shape)

    def get_all_tensor_attrs(self) -> List[TensorAttr]:
        return [TensorAttr(None, name, None) for name in self._columns()]

    def _put_tensor(self, tensor, attr: TensorAttr) -> bool:
        raise NotImplementedError("a dataset on disk does not change; import it again")

    def _remove_tensor(self, attr: TensorAttr) -> bool:
        raise NotImplementedError("a dataset on disk does not change; import it again")


class GraphStore(_GraphStore):
    """The edges of a dataset, by target. They are read to memory when they are first asked for."""

    def __init__(self, dataset):
        super().__init__()
        self.data, self._csc = dataset if isinstance(dataset, DiskData) else DiskData(os.fspath(dataset)), None

    def _get_edge_index(self, attr: EdgeAttr):
        if attr.layout not in (EdgeLayout.CSC, "csc"):
            return None
        if self._csc is None:
            offsets, sources = self.data.edge_index.csc()
            self._csc = (sources, offsets)
        return self._csc

    def get_all_edge_attrs(self) -> List[EdgeAttr]:
        nodes = self.data.num_nodes
        return [EdgeAttr(None, EdgeLayout.CSC, is_sorted=True, size=(nodes, nodes))]

    def _put_edge_index(self, edge_index, attr: EdgeAttr) -> bool:
        raise NotImplementedError("a dataset on disk does not change; import it again")

    def _remove_edge_index(self, attr: EdgeAttr) -> bool:
        raise NotImplementedError("a dataset on disk does not change; import it again")
