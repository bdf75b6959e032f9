"""`esker.NeighborLoader` and `esker.LinkNeighborLoader`: PyTorch Geometric's loaders over Esker's sampler."""

import copy
from typing import Any, Callable, Dict, List, Optional, Union

import torch
import torch_geometric.loader as pyg
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import SamplerOutput

from esker import disk, draws, spilled
from esker._esker import Rows
from esker.sampler import _HETERO, NeighborSampler


# Rows of fewer bytes than this in a batch are gathered by torch: threads and kept memory do not pay.
_FEW_BYTES = 1 << 20


class _Numbered:
    """What both loaders share: every batch knows its number, and wide rows are gathered into memory that is used again."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        # `DataLoader` keeps this method, bound to the loader, in the loader: a cycle, whose tensors would stay until the next
        # collection. The method is found without.
        self.__dict__.pop("collate_fn", None)

    @property
    def _index_sampler(self):
        return draws.NumberedBatches(super()._index_sampler)

    def _get_iterator(self):
        # `dataset` is what PyG's loaders have, a range; what iterates hands batches on with their numbers.
        inner = copy.copy(self)
        inner.__dict__["dataset"] = draws.Indices(len(self.dataset))
        inner.__dict__["filter_fn"] = self.filter_fn
        iterator = super(_Numbered, inner)._get_iterator()
        base = getattr(iterator, "iterator", iterator)
        if self.num_workers == 0:
            base._index_sampler.seed = base._base_seed
        return iterator

    def collate_fn(self, index: Any) -> Any:
        """Samples the neighbourhood of the seeds at these indices."""
        if not isinstance(index, draws.NumberedBatch):
            return super().collate_fn(index)
        seeds = [index.index] if isinstance(index.index, int) else index.index
        with draws.of_batch(index.draws()):
            return super().collate_fn(seeds)


    def filter_fn(self, out: Any) -> Any:
        """Joins a sample with the rows of its nodes and edges."""
        if torch.utils.data.get_worker_info() is not None or not isinstance(self.data, Data):
            # A worker's rows go into shared memory, as PyG has it.
            return super().filter_fn(out)
        if self.transform_sampler_output:
            out = self.transform_sampler_output(out)
        # PyG's own code does everything but gather wide columns. It gathers none of their width, which keeps their place.
        inner = copy.copy(self)
        inner.transform = inner.transform_sampler_output = None
        wide = _wide_columns(self.data, out.node.numel()) if isinstance(out, SamplerOutput) else {}
        if wide:
            inner.data = copy.copy(self.data)
            for key, value in wide.items():
                inner.data[key] = value.new_empty((value.size(0), 0))
        batch = super(_Numbered, inner).filter_fn(out)
        if wide:
            index = out.node.to(torch.int64).contiguous()
            for key, value in wide.items():
                batch[key] = self._gather(value, index)
        return batch if self.transform is None else self.transform(batch)

    def _gather(self, value: Tensor, index: Tensor) -> Tensor:
        row = value[0]
        source = value.detach().view(-1).view(torch.uint8)
        threads = torch.get_num_threads()
        rows = self._rows.gather(source, row.numel() * row.element_size(), index, threads)
        return torch.from_dlpack(rows).view(value.dtype).view(index.numel(), *row.shape)

    @property
    def _rows(self) -> Rows:
        rows = self.__dict__.get("_kept_rows")
        if rows is None:
            rows = self.__dict__["_kept_rows"] = Rows()
        return rows

    def __getstate__(self) -> Dict[str, Any]:
        state = self.__dict__.copy()
        state.pop("_kept_rows", None)
        return state


def _wide_columns(data: Data, count: int) -> Dict[str, Tensor]:
    """The node attributes whose rows of a batch are worth kept memory."""
    wide = {}
    for key, value in data._store.items():
        # Columns that are trained stay torch's, which knows their gradient.
        if type(value) is not Tensor or value.requires_grad or value.device.type != "cpu" or value.layout != torch.strided:
            continue
        if value.dim() < 2 or value.size(0) == 0 or not value.is_contiguous() or value.is_complex() or value.is_quantized:
            continue
        bytes_of_row = value.numel() // value.size(0) * value.element_size()
        if bytes_of_row * count >= _FEW_BYTES and data._store.is_node_attr(key) and data.__cat_dim__(key, value, data._store) == 0:
            wide[key] = value
    return wide


class NeighborLoader(disk.DiskMixin, spilled.SpillMixin, _Numbered, pyg.NeighborLoader):
    """Mini-batches of sampled neighbourhoods of nodes: :class:`torch_geometric.loader.NeighborLoader`, sampled by Esker.

    Parameters, attributes and batches are those of PyG's loader, which documents them. pyg-lib and torch-sparse are not needed.
    A batch is a function of the epoch's random seed and of its number, so `torch.manual_seed` repeats an epoch with any
    `num_workers`.

    >>> import torch
    >>> from torch_geometric.data import Data
    >>> data = Data(x=torch.eye(4), edge_index=torch.tensor([[1, 2, 3], [0, 0, 2]]))
    >>> loader = NeighborLoader(data, num_neighbors=[-1, -1], input_nodes=torch.tensor([0]), batch_size=1)
    >>> batch = next(iter(loader))
    >>> batch.n_id.tolist(), batch.edge_index.tolist(), batch.num_sampled_nodes
    ([0, 1, 2, 3], [[1, 2, 3], [0, 0, 2]], [1, 2, 1])
    """

    def __init__(
        self,
        data: Any,
        num_neighbors: Union[List[int], Dict[Any, List[int]]],
        input_nodes: Any = None,
        input_time: Any = None,
        replace: bool = False,
        subgraph_type: Any = "directional",
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        time_attr: Optional[str] = None,
        weight_attr: Optional[str] = None,
        transform: Optional[Callable] = None,
        transform_sampler_output: Optional[Callable] = None,
        is_sorted: bool = False,
        filter_per_worker: Optional[bool] = None,
        neighbor_sampler: Any = None,
        directed: bool = True,
        **kwargs,
    ):
        if isinstance(data, disk.DiskData):
            settings = dict(
                input_nodes=input_nodes,
                input_time=input_time,
                replace=replace,
                subgraph_type=subgraph_type if directed else "induced",
                disjoint=disjoint,
                time_attr=time_attr,
                weight_attr=weight_attr,
                transform=transform,
                transform_sampler_output=transform_sampler_output,
                filter_per_worker=filter_per_worker,
            )
            return disk.init_nodes(self, data, num_neighbors, settings, kwargs)
        if input_time is not None and time_attr is None:
            raise ValueError(
                "Received conflicting 'input_time' and 'time_attr' arguments: 'input_time' is set while 'time_attr' is not set."
            )
        if isinstance(data, HeteroData) and neighbor_sampler is None:
            raise NotImplementedError(_HETERO.format(name=type(self).__name__))
        if neighbor_sampler is None:
            neighbor_sampler = NeighborSampler(
                data,
                num_neighbors=num_neighbors,
                replace=replace,
                subgraph_type=subgraph_type,
                disjoint=disjoint,
                temporal_strategy=temporal_strategy,
                time_attr=time_attr,
                weight_attr=weight_attr,
                is_sorted=is_sorted,
                share_memory=kwargs.get("num_workers", 0) > 0,
                directed=directed,
            )
        super().__init__(
            data,
            num_neighbors,
            input_nodes=input_nodes,
            input_time=input_time,
            time_attr=time_attr,
            transform=transform,
            transform_sampler_output=transform_sampler_output,
            filter_per_worker=filter_per_worker,
            neighbor_sampler=neighbor_sampler,
            **kwargs,
        )


class LinkNeighborLoader(disk.DiskMixin, spilled.SpillMixin, _Numbered, pyg.LinkNeighborLoader):
    """Mini-batches of sampled neighbourhoods of edges and negatives: :class:`torch_geometric.loader.LinkNeighborLoader`, sampled by
    Esker.

    Parameters, attributes and batches are those of PyG's loader, which documents them. Negatives, too, are a function of the epoch's
    random seed and of the batch's number.

    >>> import torch
    >>> from torch_geometric.data import Data
    >>> data = Data(x=torch.eye(4), edge_index=torch.tensor([[1, 2, 3], [0, 0, 2]]))
    >>> loader = LinkNeighborLoader(data, num_neighbors=[-1], batch_size=3, neg_sampling="binary")
    >>> batch = next(iter(loader))
    >>> batch.edge_label.tolist()
    [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    """

    def __init__(
        self,
        data: Any,
        num_neighbors: Union[List[int], Dict[Any, List[int]]],
        edge_label_index: Any = None,
        edge_label: Any = None,
        edge_label_time: Any = None,
        replace: bool = False,
        subgraph_type: Any = "directional",
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        neg_sampling: Any = None,
        neg_sampling_ratio: Optional[Union[int, float]] = None,
        time_attr: Optional[str] = None,
        weight_attr: Optional[str] = None,
        transform: Optional[Callable] = None,
        transform_sampler_output: Optional[Callable] = None,
        is_sorted: bool = False,
        filter_per_worker: Optional[bool] = None,
        neighbor_sampler: Any = None,
        directed: bool = True,
        **kwargs,
    ):
        if isinstance(data, disk.DiskData):
            settings = dict(
                edge_label_index=edge_label_index,
                edge_label=edge_label,
                edge_label_time=edge_label_time,
                replace=replace,
                subgraph_type=subgraph_type if directed else "induced",
                disjoint=disjoint,
                neg_sampling=neg_sampling,
                neg_sampling_ratio=neg_sampling_ratio,
                time_attr=time_attr,
                weight_attr=weight_attr,
                transform=transform,
                transform_sampler_output=transform_sampler_output,
                filter_per_worker=filter_per_worker,
            )
            return disk.init_links(self, data, num_neighbors, settings, kwargs)
        if (edge_label_time is not None) != (time_attr is not None):
            state = {True: "set", False: "not set"}
            raise ValueError(
                "Received conflicting 'edge_label_time' and 'time_attr' arguments: 'edge_label_time' is "
                f"{state[edge_label_time is not None]} while 'time_attr' is {state[time_attr is not None]}. "
                "Both arguments must be provided for temporal sampling."
            )
        if isinstance(data, HeteroData) and neighbor_sampler is None:
            raise NotImplementedError(_HETERO.format(name=type(self).__name__))
        if neighbor_sampler is None:
            neighbor_sampler = NeighborSampler(
                data,
                num_neighbors=num_neighbors,
                replace=replace,
                subgraph_type=subgraph_type,
                disjoint=disjoint,
                temporal_strategy=temporal_strategy,
                time_attr=time_attr,
                weight_attr=weight_attr,
                is_sorted=is_sorted,
                share_memory=kwargs.get("num_workers", 0) > 0,
                directed=directed,
            )
        super().__init__(
            data,
            num_neighbors,
            edge_label_index=edge_label_index,
            edge_label=edge_label,
            edge_label_time=edge_label_time,
            time_attr=time_attr,
            neg_sampling=neg_sampling,
            neg_sampling_ratio=neg_sampling_ratio,
            transform=transform,
            transform_sampler_output=transform_sampler_output,
            filter_per_worker=filter_per_worker,
            neighbor_sampler=neighbor_sampler,
            **kwargs,
        )
