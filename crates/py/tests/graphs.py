"""Graphs and checks that several tests share."""

import torch
from torch_geometric.data import Data


def random_graph(nodes=100, edges=500, dtype=torch.int64, seed=12345, **attributes):
    """A graph whose attributes are their own ids, so that a batch shows what it took."""
    generator = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(nodes, (2, edges), generator=generator).to(dtype)
    return Data(x=torch.arange(nodes), edge_index=edge_index, edge_attr=torch.arange(edges), num_nodes=nodes, **attributes)


def assert_consistent(data, batch):
    """Every edge of a batch is the edge of the graph that its id names; attributes are those of the ids."""
    assert torch.equal(batch.n_id[batch.edge_index.long()], data.edge_index[:, batch.e_id])
    assert torch.equal(batch.x, data.x[batch.n_id.long()])
    assert torch.equal(batch.edge_attr, data.edge_attr[batch.e_id])


def pairs(edge_index):
    """The edges as a set of pairs."""
    return set(map(tuple, edge_index.t().tolist()))


def ids(batches):
    """What tells samples apart."""
    return [(batch.n_id.tolist(), batch.e_id.tolist(), batch.edge_index.tolist()) for batch in batches]


def karate():
    """Zachary's karate club, 34 nodes, symmetric, with random features and symmetric weights."""
    rows = {
        0: [1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 17, 19, 21, 31], 1: [2, 3, 7, 13, 17, 19, 21, 30], 2: [3, 7, 8, 9, 13, 27, 28, 32],
        3: [7, 12, 13], 4: [6, 10], 5: [6, 10, 16], 6: [16], 8: [30, 32, 33], 9: [33], 13: [33], 14: [32, 33], 15: [32, 33],
        18: [32, 33], 19: [33], 20: [32, 33], 22: [32, 33], 23: [25, 27, 29, 32, 33], 24: [25, 27, 31], 25: [31], 26: [29, 33],
        27: [33], 28: [31, 33], 29: [32, 33], 30: [32, 33], 31: [32, 33], 32: [33],
    }  # fmt: skip
    one_way = torch.tensor([(a, b) for a, ends in rows.items() for b in ends]).t()
    weight = torch.rand(one_way.size(1), generator=torch.Generator().manual_seed(1))
    x = torch.randn(34, 8, generator=torch.Generator().manual_seed(2))
    return Data(x=x, edge_index=torch.cat([one_way, one_way.flip(0)], dim=1), edge_weight=weight.repeat(2))
