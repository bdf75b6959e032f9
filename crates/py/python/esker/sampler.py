"""`esker.NeighborSampler`: PyTorch Geometric's sampler, with Esker's draws."""

import copy
import warnings
from typing import Any, Optional, Tuple, Union

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import NegativeSampling, SamplerOutput
from torch_geometric.sampler import NeighborSampler as PygNeighborSampler
from torch_geometric.sampler.base import DataType, SubgraphType
from torch_geometric.sampler.neighbor_sampler import edge_sample, node_sample
from torch_geometric.sampler.utils import to_csc

from esker import draws
from esker._esker import Hops

_HETERO = (
    "esker.{name} samples graphs with one type of nodes; this one has several types. Sampling by type is planned as the next "
    "step (docs/python.md, 'Heterogeneous graphs'). Until then take torch_geometric.loader for this graph, or "
    "`data.to_homogeneous()`"
)


class NeighborSampler(PygNeighborSampler):
    """Samples the neighbourhoods of seed nodes and seed edges in Rust, without the interpreter lock.

    It takes the parameters of :class:`torch_geometric.sampler.NeighborSampler` and can be given wherever one is expected, for
    instance to `LightningNodeData` as `node_sampler`. Its samples have PyG's order: seeds first, then nodes as they are
    discovered, edges by hop.

    >>> import torch
    >>> from torch_geometric.data import Data
    >>> from torch_geometric.sampler import NodeSamplerInput
    >>> data = Data(edge_index=torch.tensor([[1, 2, 0], [0, 0, 2]]), num_nodes=3)
    >>> sampler = NeighborSampler(data, num_neighbors=[-1, -1])
    >>> sample = sampler.sample_from_nodes(NodeSamplerInput(input_id=None, node=torch.tensor([0])))
    >>> sample.node.tolist(), sample.row.tolist(), sample.col.tolist(), sample.edge.tolist()
    ([0, 1, 2], [1, 2, 0], [0, 0, 2], [0, 1, 2])
    """

    def __init__(
        self,
        data: Any,
        num_neighbors: Any,
        subgraph_type: Union[SubgraphType, str] = "directional",
        replace: bool = False,
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        time_attr: Optional[str] = None,
        weight_attr: Optional[str] = None,
        is_sorted: bool = False,
        share_memory: bool = False,
        directed: bool = True,
        sample_direction: str = "forward",
    ):
        # PyG's own initialisation asks for pyg-lib: what it sets is set here.
        if not directed:
            subgraph_type = SubgraphType.induced
            warnings.warn(
                f"The usage of the 'directed' argument in '{type(self).__name__}' is deprecated. "
                "Use `subgraph_type='induced'` instead.",
                stacklevel=2,
            )
        if sample_direction not in ("forward", "backward"):
            raise ValueError(f"sample_direction: expected 'forward' or 'backward', found {sample_direction!r}")
        if sample_direction == "backward" and time_attr is not None:
            raise NotImplementedError("Temporal Sampling not yet supported for backward sampling")
        self.data_type = DataType.from_data(data)
        self.sample_direction = sample_direction
        self.node_time: Optional[Tensor] = None
        self.edge_time: Optional[Tensor] = None
        self.edge_weight: Optional[Tensor] = None
        if self.data_type == DataType.homogeneous:
            self._take_data(data, time_attr, weight_attr, is_sorted, share_memory)
        elif self.data_type == DataType.remote:
            self._take_stores(data, time_attr, weight_attr)
        else:
            raise NotImplementedError(_HETERO.format(name=type(self).__name__))
        self.num_neighbors = num_neighbors
        self.replace = replace
        self.subgraph_type = SubgraphType(subgraph_type)
        self.disjoint = disjoint
        self.temporal_strategy = temporal_strategy
        self.keep_orig_edges = False
        # What cannot be sampled is refused now, not in a worker.
        self._native()

    def _take_data(self, data: Data, time_attr, weight_attr, is_sorted: bool, share_memory: bool) -> None:
        self.num_nodes = data.num_nodes
        if time_attr is not None:
            if data.is_node_attr(time_attr):
                self.node_time = data[time_attr]
            elif data.is_edge_attr(time_attr):
                self.edge_time = data[time_attr]
            else:
                raise ValueError(f"The time attribute '{time_attr}' is neither a node-level or edge-level attribute")
        if weight_attr is not None:
            self.edge_weight = data[weight_attr]
        # Only then does PyG know the argument in every version.
        transposed = {"to_transpose": True} if self.sample_direction == "backward" else {}
        self.colptr, self.row, self.perm = to_csc(data, device="cpu", share_memory=share_memory, is_sorted=is_sorted, **transposed)

    def _take_stores(self, stores, time_attr, weight_attr) -> None:
        feature_store, graph_store = stores
        attributes = graph_store.get_all_edge_attrs()
        self.edge_types = list({attribute.edge_type for attribute in attributes})
        if self.is_hetero:
            raise NotImplementedError(_HETERO.format(name=type(self).__name__))
        for name, value in (("time_attr", time_attr), ("weight_attr", weight_attr)):
            if value is not None:
                raise NotImplementedError(f"'{name}' is not supported for '(FeatureStore, GraphStore)' inputs; take a 'Data' object")
        self.node_types = [None]
        self.num_nodes = max(attributes[0].size)
        if self.sample_direction == "backward":
            self.colptr, self.row, self.perm = graph_store.csr()
        else:
            self.row, self.colptr, self.perm = graph_store.csc()

    @property
    def edge_permutation(self) -> None:
        """None: edges of a sample are columns of `edge_index` already."""
        return None

    # Sampling ################################################################

    def sample_from_nodes(self, inputs):
        """The neighbourhoods of seed nodes, as PyG's sampler gives them."""
        return self._with_original_edges(node_sample(inputs, self._sample))

    def sample_from_edges(self, inputs, neg_sampling: Optional[NegativeSampling] = None):
        """The neighbourhoods of the ends of seed edges and of negatives, as PyG's sampler gives them."""
        now = draws.current()
        with draws.of_batch(now):
            out = edge_sample(inputs, self._sample, self.num_nodes, self.disjoint, self.node_time, _repeatable(neg_sampling, now))
        return self._with_original_edges(out)

    def _with_original_edges(self, out: SamplerOutput) -> SamplerOutput:
        # The sampler makes samples bidirectional itself, but keeps no edges apart.
        if self.subgraph_type == SubgraphType.bidirectional and self.keep_orig_edges:
            return out.to_bidirectional(keep_orig_edges=True)
        return out

    def _sample(self, seed: Tensor, seed_time: Optional[Tensor] = None, **kwargs) -> SamplerOutput:
        now = draws.current()
        seed = seed.detach().to("cpu", torch.int64).contiguous()
        if seed_time is not None:
            seed_time = _times(seed_time, "seed times")
        hops = self._native()
        node, edge_index, edge, batch, nodes, edges = hops.sample(seed, seed_time, now.seed & (1 << 64) - 1, now.epoch, now.batch)
        row, col = torch.from_dlpack(edge_index)
        if self.sample_direction == "backward":
            row, col = col, row
        by_hop = self.subgraph_type == SubgraphType.directional
        return SamplerOutput(
            node=torch.from_dlpack(node),
            row=row,
            col=col,
            edge=torch.from_dlpack(edge),
            batch=None if batch is None else torch.from_dlpack(batch),
            num_sampled_nodes=nodes if by_hop else None,
            num_sampled_edges=edges if by_hop else None,
        )

    # The native sampler ######################################################

    def _options(self) -> Tuple:
        """What the native sampler is made of, besides tensors: all of it may be set after a sampler is made."""
        subgraph_type = self.subgraph_type.value
        if subgraph_type == "bidirectional" and self.keep_orig_edges:
            subgraph_type = "directional"
        return tuple(self.num_neighbors.get_mapped_values()), self.replace, self.disjoint, subgraph_type, self.temporal_strategy

    def _native(self) -> Hops:
        options = self._options()
        made = self.__dict__.get("_made")
        if made is None or made[0] != options:
            keys = ("num_neighbors", "replace", "disjoint", "subgraph_type", "temporal_strategy")
            hops = Hops(
                self.colptr.contiguous(),
                self.row.contiguous(),
                None if self.perm is None else self.perm.contiguous(),
                dict(zip(keys, options)),
                edge_weight=None if self.edge_weight is None else _weights(self.edge_weight),
                node_time=None if self.node_time is None else _times(self.node_time, "node times"),
                edge_time=None if self.edge_time is None else _times(self.edge_time, "edge times"),
            )
            self._made = made = (options, hops)
        return made[1]

    def __getstate__(self):
        # The native sampler is made again where it is needed: tensors travel, and may be shared.
        state = self.__dict__.copy()
        state.pop("_made", None)
        return state


def _weights(weights: Tensor) -> Tensor:
    """Weights as one of the two floats that the sampler reads."""
    weights = weights.detach().to("cpu")
    if weights.dtype not in (torch.float32, torch.float64):
        weights = weights.to(torch.float64)
    return weights.reshape(-1).contiguous()


def _times(times: Tensor, what: str) -> Tensor:
    """Times as integers in the same order."""
    times = times.detach().to("cpu")
    if not times.is_floating_point():
        return times.to(torch.int64).reshape(-1).contiguous()
    times = times.to(torch.float64)
    if times.isnan().any():
        raise ValueError(f"{what}: expected numbers, found NaN; give every node or edge a time")
    # Bits of floats ascend as the floats do; those of negative ones descend. Adding 0 makes one zero of two.
    bits = (times + 0.0).reshape(-1).contiguous().view(torch.int64)
    return torch.where(bits < 0, bits ^ 0x7FFF_FFFF_FFFF_FFFF, bits)


class _RepeatableNegatives(NegativeSampling):
    """Negatives that are a function of the batch, whatever else in the program draws."""

    def sample(self, num_samples: int, endpoint: Any, num_nodes: Optional[int] = None) -> Tensor:
        weight = self.src_weight if endpoint == "src" else self.dst_weight
        if weight is None:
            if num_nodes is None:
                raise ValueError(f"Cannot sample negatives in '{type(self).__name__}' without passing the 'num_nodes' argument")
            return torch.randint(num_nodes, (num_samples,), generator=self.generator)
        if num_nodes is not None and weight.numel() != num_nodes:
            raise ValueError(
                f"The 'weight' attribute in '{type(self).__name__}' needs to match the number of nodes {num_nodes} "
                f"(got {weight.numel()})"
            )
        return torch.multinomial(weight, num_samples, replacement=True, generator=self.generator)


def _repeatable(negatives: Optional[NegativeSampling], now: draws.Draws) -> Optional[NegativeSampling]:
    # Whoever overrides how negatives are drawn keeps their own way.
    if negatives is None or type(negatives) is not NegativeSampling:
        return negatives
    repeatable = copy.copy(negatives)
    repeatable.__class__ = _RepeatableNegatives
    repeatable.generator = now.generator()
    return repeatable
