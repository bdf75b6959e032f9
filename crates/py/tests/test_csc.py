"""The adjacency that samplers read equals the one that PyG makes."""

import pytest
import torch
from graphs import random_graph
from torch_geometric.data import Data
from torch_geometric.utils import scatter

from esker import NeighborSampler


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("nodes,edges", [(1, 0), (1, 5), (7, 3), (50, 400), (3000, 2000)])
@pytest.mark.parametrize("contiguous", [True, False])
def test_edges_are_sorted_by_target_and_stay_in_order(dtype, nodes, edges, contiguous):
    edge_index = random_graph(nodes, edges, dtype).edge_index
    data = Data(edge_index=edge_index if contiguous else edge_index.t().contiguous().t(), num_nodes=nodes)
    sampler = NeighborSampler(data, [1])
    target, order = edge_index[1].sort(stable=True)
    degree = scatter(torch.ones(edges, dtype=torch.long), target.long(), dim_size=nodes, reduce="sum")
    assert torch.equal(sampler.perm, order) and torch.equal(sampler.row, edge_index[0][order])
    assert torch.equal(sampler.colptr.long(), torch.cat([torch.zeros(1, dtype=torch.long), degree.cumsum(0)]))
    assert sampler.row.dtype == sampler.colptr.dtype == dtype
