"""What cannot be done is refused: with a fitting type, and a text that says what was expected, what was found and what to do."""

import pytest
import torch
from graphs import assert_consistent, ids, random_graph
from torch_geometric.data import Data, HeteroData
from torch_geometric.testing import MyFeatureStore, MyGraphStore

from esker import LinkNeighborLoader, NeighborLoader, NeighborSampler


def refused(error, match, *arguments, loader_class=NeighborLoader, **options):
    with pytest.raises(error, match=match):
        loader = loader_class(*arguments, **options)
        next(iter(loader))


def test_seeds_outside_the_graph():
    refused(IndexError, "seed 100 is not a node: the graph has nodes 0 to 99", random_graph(), [2], input_nodes=[100])
    refused(IndexError, "seed -1 is not a node", random_graph(), [2], input_nodes=[-1])


def test_fan_outs():
    refused(ValueError, "expected -1 for all neighbours, or a number of them, found -2", random_graph(), [-2])


def test_edges_outside_the_graph():
    data = Data(edge_index=torch.tensor([[5], [0]]), num_nodes=3)
    refused(ValueError, r"sources \(`row`\) of the adjacency: expected node ids from 0 to 2, found 5 at index 0", data, [2])


def test_targets_outside_the_graph():
    data = Data(edge_index=torch.tensor([[0, 0], [0, 5]]), num_nodes=3)
    refused(ValueError, "edge_index: expected node ids from 0 to 2, found 5 as target of edge 1", data, [2])


def test_weights():
    data = random_graph(weight=torch.ones(500))
    data.weight[7] = -1
    refused(ValueError, "-1", data, [2], weight_attr="weight")
    data.weight[7] = float("nan")
    refused(ValueError, "NaN", data, [2], weight_attr="weight")
    data.time = torch.arange(100)
    data.weight[7] = 1
    refused(ValueError, "by weight or by time", data, [2], weight_attr="weight", time_attr="time")


def test_times():
    data = random_graph(time=torch.arange(100.0), edge_time=torch.arange(500))
    data.time[3] = float("nan")
    refused(ValueError, "found NaN", data, [2], time_attr="time")
    # Edges have times, seeds have none, and none is given.
    refused(ValueError, "times of seeds", data, [2], time_attr="edge_time")
    refused(ValueError, "expected uniform or last, found first", random_graph(), [2], temporal_strategy="first")
    refused(ValueError, "edge_label_time", data, [2], time_attr="edge_time", loader_class=LinkNeighborLoader)


def test_induced_trees():
    refused(ValueError, "induced", random_graph(), [2], subgraph_type="induced", disjoint=True)


def test_graphs_with_several_types_until_they_are_built():
    data = HeteroData()
    data["paper"].x = torch.rand(4, 2)
    data["paper", "cites", "paper"].edge_index = torch.tensor([[0], [1]])
    for make in (
        lambda: NeighborLoader(data, [2], input_nodes="paper"),
        lambda: LinkNeighborLoader(data, [2], edge_label_index=("paper", "cites", "paper")),
        lambda: NeighborSampler(data, [2]),
    ):
        with pytest.raises(NotImplementedError, match="Sampling by type is planned"):
            make()


def test_errors_of_workers_have_the_same_type():
    refused(IndexError, "seed 100 is not a node", random_graph(), [2], input_nodes=[100], num_workers=1)


def test_an_error_leaves_the_loader_usable():
    loader = NeighborLoader(random_graph(), [2], input_nodes=[3, 100], batch_size=1)
    with pytest.raises(IndexError):
        list(loader)
    assert loader([0]).n_id[0] == 3


@pytest.mark.parametrize("layout", ["coo", "csc"])
def test_stores_are_sampled_as_a_graph_is(layout):
    data = random_graph()
    features, graph = MyFeatureStore(), MyGraphStore()
    features.put_tensor(data.x, group_name=None, attr_name="x", index=None)
    if layout == "coo":
        graph.put_edge_index(tuple(data.edge_index), edge_type=None, layout="coo", size=(100, 100))
    else:
        order = data.edge_index[1].argsort(stable=True)
        colptr = torch.cat([torch.zeros(1, dtype=torch.long), data.edge_index[1].bincount(minlength=100).cumsum(0)])
        graph.put_edge_index((data.edge_index[0][order], colptr), edge_type=None, layout="csc", size=(100, 100))
    stores = NeighborLoader((features, graph), [-1, -1], input_nodes=torch.arange(100), batch_size=20)
    own = NeighborLoader(data, [-1, -1], batch_size=20)
    assert len(stores) == len(own)
    for left, right in zip(stores, own):
        assert torch.equal(left.x.sort()[0], right.x.sort()[0]) and left.edge_index.shape == right.edge_index.shape
        assert torch.equal(left.x, left.n_id)


def test_backward_samples_follow_edges_forward():
    data = random_graph()
    sampler = NeighborSampler(data, [-1], sample_direction="backward")
    batch = next(iter(NeighborLoader(data, [-1], batch_size=10, neighbor_sampler=sampler)))
    assert_consistent(data, batch)
    assert torch.equal(batch.e_id.sort()[0], (data.edge_index[0] < 10).nonzero().view(-1))
    assert ids([batch])
