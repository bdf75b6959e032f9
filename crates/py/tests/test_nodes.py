"""Batches of nodes in graphs with one type of nodes and edges: every behaviour that PyG's own tests assert of its loader."""

import numpy as np
import pytest
import torch
from graphs import assert_consistent, ids, karate, pairs, random_graph
from torch_geometric.data import Data
from torch_geometric.loader import CachedLoader, ImbalancedSampler, ZipLoader
from torch_geometric.nn import GraphConv, GraphSAGE, PNAConv
from torch_geometric.utils import trim_to_layer

from esker import NeighborLoader

SUBGRAPHS = ["directional", "bidirectional", "induced"]


@pytest.mark.parametrize("subgraph_type", SUBGRAPHS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("filter_per_worker", [None, True, False])
def test_a_batch_is_a_subgraph_with_its_seeds_in_front(subgraph_type, dtype, filter_per_worker):
    data = random_graph(dtype=dtype)
    loader = NeighborLoader(data, [5, 5], batch_size=20, subgraph_type=subgraph_type, filter_per_worker=filter_per_worker)
    assert str(loader) == "NeighborLoader()" and len(loader) == 5
    assert isinstance(loader([0]), Data) and loader([0]).n_id[0] == 0
    for number, batch in enumerate(loader):
        assert type(batch) is Data and batch.batch_size == batch.input_id.numel() == 20
        assert batch.n_id.numel() == batch.num_nodes == batch.n_id.unique().numel()
        assert batch.edge_index.dtype == batch.n_id.dtype == dtype and batch.e_id.dtype == torch.int64
        assert batch.e_id.numel() == batch.num_edges == batch.edge_attr.numel()
        assert not batch.num_edges or batch.edge_index.max() < batch.num_nodes and batch.edge_index.min() >= 0
        assert batch.x[:20].tolist() == list(range(20 * number, 20 * number + 20))
        if subgraph_type == "bidirectional":
            both = pairs(batch.n_id[batch.edge_index.long()])
            assert both <= pairs(data.edge_index) | pairs(data.edge_index.flip(0)) and both == {(b, a) for a, b in both}
        else:
            assert_consistent(data, batch)
        if subgraph_type == "induced":
            inside = torch.isin(data.edge_index, batch.n_id).all(dim=0)
            assert torch.equal(batch.e_id.sort()[0], inside.nonzero().view(-1))
        assert (subgraph_type == "directional") == ("num_sampled_nodes" in batch)


class TwoLayers(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = GraphConv(width, 16), GraphConv(16, 4)

    def forward(self, x, edge_index, weight):
        return self.second(self.first(x, edge_index, weight).relu(), edge_index, weight)


@pytest.mark.parametrize("subgraph_type", SUBGRAPHS)
def test_whole_neighbourhoods_give_the_model_what_the_graph_gives(subgraph_type):
    data, seeds = karate(), torch.tensor([3, 30, 11])
    batch = next(iter(NeighborLoader(data, [-1, -1], input_nodes=seeds, batch_size=3, subgraph_type=subgraph_type)))
    model = TwoLayers(8)
    full = model(data.x, data.edge_index, data.edge_weight)[seeds]
    assert torch.allclose(model(batch.x, batch.edge_index, batch.edge_weight)[:3], full, atol=1e-6)


def test_features_may_be_a_memory_map(tmp_path):
    x = np.memmap(tmp_path / "x.npy", dtype=np.float32, mode="w+", shape=(100, 32))
    x[:] = np.arange(100)[:, None]
    data = Data(x=x, edge_index=random_graph().edge_index, num_nodes=100)
    for batch in NeighborLoader(data, [5, 5], batch_size=20, num_workers=2):
        assert isinstance(batch.x, torch.Tensor) and batch.x.shape == (batch.num_nodes, 32)
        assert torch.equal(batch.x[:, 7].long(), batch.n_id)


def test_nodes_and_edges_are_counted_by_hop():
    # 0 -> 2 <- 1, 2 -> 3 -> 4 ...: a node is expanded once, in the hop after its discovery.
    edge_index = torch.tensor([[2, 3, 4, 5, 4, 5, 6, 7, 8, 9, 10, 11], [0, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]])
    data = Data(edge_index=edge_index, num_nodes=12)
    batch = next(iter(NeighborLoader(data, [1, 2, 4], input_nodes=torch.tensor([0, 1]), batch_size=2)))
    assert batch.num_sampled_nodes == [2, 2, 2, 4] and batch.num_sampled_edges == [2, 4, 4]
    assert type(batch.num_sampled_nodes) is list and batch.n_id[:6].tolist() == [0, 1, 2, 3, 4, 5]


def test_ids_map_to_the_source():
    data = random_graph()
    for batch in NeighborLoader(data, [5, 5], batch_size=20, shuffle=True):
        assert_consistent(data, batch)


def test_seeds_drawn_with_replacement_stay_repeated():
    data = random_graph(y=(torch.arange(100) < 10).long())

    def epoch():
        torch.manual_seed(5)
        sampler = ImbalancedSampler(data)
        return list(NeighborLoader(data, [5, 5], batch_size=10, sampler=sampler))

    first, second = epoch(), epoch()
    assert sum(batch.y[: batch.batch_size].numel() for batch in first) == data.num_nodes
    assert any(batch.n_id[:10].unique().numel() < 10 for batch in first)
    assert ids(first) == ids(second)


@pytest.mark.parametrize("filter_per_worker", [True, False])
def test_loaders_can_be_zipped(filter_per_worker):
    data = random_graph(200, 1000)
    loaders = [NeighborLoader(data, [5], input_nodes=torch.arange(start, start + 50)) for start in (0, 100)]
    zipped = ZipLoader(loaders, batch_size=20, filter_per_worker=filter_per_worker)
    assert len(zipped) == 3 and loaders[0].filter_per_worker is filter_per_worker
    for number, (left, right) in enumerate(zipped):
        size = 10 if number == 2 else 20
        assert left.batch_size == right.batch_size == size
        assert left.n_id[:size].tolist() == list(range(20 * number, 20 * number + size))
        assert torch.equal(right.n_id[:size], left.n_id[:size] + 100)


def test_cached_batches_are_replayed():
    loader = NeighborLoader(random_graph(), [5], batch_size=20)
    cached = CachedLoader(loader)
    first = list(cached)
    assert len(cached) == 5 and ids(first) == ids(cached)
    moved = CachedLoader(loader, device="cpu", transform=lambda batch: batch.n_id)
    assert [batch.tolist() for batch in moved] == [batch.tolist() for batch in moved]


def test_layers_can_be_trimmed_by_hop():
    data = karate()
    batch = next(iter(NeighborLoader(data, [4, 4, 4], input_nodes=torch.arange(5), batch_size=5)))
    convolutions = torch.nn.ModuleList(GraphConv(8, 8) for _ in range(3))
    whole, trimmed = (batch.x, batch.edge_index), (batch.x, batch.edge_index)
    for layer, convolution in enumerate(convolutions):
        whole = convolution(*whole).relu(), whole[1]
        x, edge_index, _ = trim_to_layer(layer, batch.num_sampled_nodes, batch.num_sampled_edges, *trimmed)
        trimmed = convolution(x, edge_index).relu(), edge_index
    assert torch.allclose(whole[0][:5], trimmed[0][:5], atol=1e-6)


@pytest.mark.parametrize("jk", [None, "last"])
@pytest.mark.parametrize("cached", [False, True])
def test_inference_layer_by_layer_equals_the_whole_graph(jk, cached):
    data = karate()
    model = GraphSAGE(8, 16, num_layers=2, out_channels=4, jk=jk).eval()
    loader = NeighborLoader(data, [-1], batch_size=10)
    with torch.no_grad():
        full = model(data.x, data.edge_index)
        assert torch.allclose(model.inference(loader, cache=cached), full, atol=1e-4)
    assert "n_id" not in data


def test_degrees_add_up_over_the_batches():
    data = karate()
    loader = NeighborLoader(data, [-1], batch_size=8)
    histogram = PNAConv.get_degree_histogram(loader)
    assert histogram.sum() == sum(batch.num_nodes for batch in loader)


# By weight, by time, in trees ##################################################################################################


def test_weight_zero_is_never_drawn_whatever_the_order_of_edges():
    edge_index = torch.tensor([[1, 2, 3, 4, 3, 4, 1], [0, 0, 2, 2, 0, 3, 3]])
    data = Data(edge_index=edge_index, num_nodes=5, weight=torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0]))
    for _ in range(20):
        batch = next(iter(NeighborLoader(data, [2, 2, 2], input_nodes=torch.tensor([0]), weight_attr="weight")))
        assert batch.n_id.tolist() == [0, 2, 3, 4]
        assert batch.edge_index.tolist() == [[1, 2, 3], [0, 1, 2]] and batch.e_id.tolist() == [1, 2, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.float16])
def test_draws_follow_weights(dtype):
    data = Data(edge_index=torch.stack([torch.arange(1, 4), torch.zeros(3, dtype=torch.long)]), num_nodes=4)
    data.weight = torch.tensor([1, 2, 5]).to(dtype)
    torch.manual_seed(0)
    loader = NeighborLoader(data, [1], input_nodes=torch.zeros(4000, dtype=torch.long), batch_size=1, weight_attr="weight")
    counts = torch.cat([batch.n_id[1:] for batch in loader]).bincount(minlength=4)[1:]
    # Six standard deviations of the most uncertain count.
    assert (counts - torch.tensor([500, 1000, 2500])).abs().max() < 6 * (4000 * 0.25) ** 0.5


@pytest.mark.parametrize("strategy", ["uniform", "last"])
@pytest.mark.parametrize("floats", [False, True])
def test_no_node_is_later_than_its_seed(strategy, floats):
    data = random_graph(edges=2000)
    data.time = torch.randperm(100) - 50
    times = torch.arange(100) - 50
    if floats:
        data.time, times = data.time / 3, times / 3
    for batch in NeighborLoader(data, [4, 4], batch_size=10, time_attr="time", input_time=times, temporal_strategy=strategy):
        later = slice(batch.batch_size, None)
        assert torch.equal(batch.seed_time, times[batch.input_id])
        assert (batch.time[later] <= batch.seed_time[batch.batch][later]).all()
        assert_consistent(data, batch)


def test_seeds_have_their_own_time_if_none_is_given():
    data = random_graph(edges=2000, time=torch.randperm(100))
    for batch in NeighborLoader(data, [4, 4], batch_size=10, time_attr="time"):
        assert "seed_time" not in batch and (batch.time <= batch.time[batch.batch]).all()


@pytest.mark.parametrize("strategy", ["uniform", "last"])
def test_no_edge_is_later_than_its_seed(strategy):
    data = random_graph(edges=2000)
    data.edge_time = torch.randperm(2000)
    times = torch.full((100,), 700)
    for batch in NeighborLoader(data, [3, 3], batch_size=20, time_attr="edge_time", input_time=times, temporal_strategy=strategy):
        assert batch.edge_time.numel() == batch.num_edges > 0 and (batch.edge_time <= 700).all()
        assert_consistent(data, batch)


def test_last_takes_the_latest():
    data = Data(edge_index=torch.stack([torch.arange(1, 11), torch.zeros(10, dtype=torch.long)]), num_nodes=11)
    data.time = torch.tensor([8, 5, 9, 1, 8, 3, 7, 2, 6, 4, 0])
    batch = next(iter(NeighborLoader(data, [3], input_nodes=torch.tensor([0]), time_attr="time", temporal_strategy="last")))
    assert sorted(batch.time[1:].tolist()) == [6, 7, 8]


@pytest.mark.parametrize("replace", [False, True])
def test_trees_share_nothing(replace):
    data = random_graph()
    batch = next(iter(NeighborLoader(data, [4, 4], input_nodes=torch.tensor([7, 7, 9]), batch_size=3, disjoint=True, replace=replace)))
    assert batch.batch[:3].tolist() == [0, 1, 2] and batch.batch.dtype == torch.int64
    assert torch.equal(batch.batch[batch.edge_index[0]], batch.batch[batch.edge_index[1]])
    assert torch.stack([batch.batch, batch.n_id]).unique(dim=1).size(1) == batch.num_nodes
    assert_consistent(data, batch)


def test_replace_draws_exactly_as_many():
    data = random_graph(edges=300)
    degree = data.edge_index[1].bincount(minlength=100)
    batch = next(iter(NeighborLoader(data, [7], batch_size=100, replace=True)))
    drawn = batch.edge_index[1].bincount(minlength=100)
    assert torch.equal(drawn, torch.where(degree > 0, 7, 0))


# Wide rows, which are gathered into memory that is used again ##################################################################


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(2000, 1001), (2000, 7, 143), (2000, 4096)])
def test_wide_rows_are_those_of_the_ids(dtype, shape):
    generator = torch.Generator().manual_seed(4)
    wide = torch.randint(2 if dtype == torch.bool else 100, shape, generator=generator).to(dtype)
    data = random_graph(2000, 20000, wide=wide, name="g")
    kept = []
    for batch in NeighborLoader(data, [10, 5], batch_size=400, shuffle=True):
        assert batch.wide.dtype == dtype and torch.equal(batch.wide, wide[batch.n_id])
        kept.append(batch)
    # Nothing was written where an earlier batch still is.
    assert all(torch.equal(batch.wide, wide[batch.n_id]) for batch in kept)


def test_memory_of_dropped_batches_is_used_again():
    data = Data(x=torch.randn(2000, 512), edge_index=random_graph(2000, 20000).edge_index)
    loader, places = NeighborLoader(data, [10, 5], batch_size=500), []
    for batch in loader:
        places.append(batch.x.data_ptr())
        del batch
    assert len(places) == 4 and len(set(places)) < 4


def test_a_batch_has_no_more_and_no_other_keys_if_rows_are_wide():
    narrow = random_graph(2000, 20000)
    wide = narrow.clone()
    wide.feature, narrow.feature = torch.randn(2000, 300), torch.randn(2000)
    wide.y, narrow.y = torch.arange(2000), torch.arange(2000)
    first, second = (next(iter(NeighborLoader(data, [10, 5], batch_size=1000))) for data in (wide, narrow))
    assert list(first.keys()) == list(second.keys()) and type(first) is Data
    assert wide.feature.shape == (2000, 300)


def test_columns_that_are_trained_keep_their_gradient():
    x = torch.randn(2000, 300, requires_grad=True)
    batch = next(iter(NeighborLoader(Data(x=x, edge_index=random_graph(2000, 20000).edge_index), [10, 5], batch_size=1000)))
    batch.x.sum().backward()
    assert torch.equal(x.grad[:, 0] > 0, torch.isin(torch.arange(2000), batch.n_id))


def test_too_few_rows_are_refused():
    data = Data(x=torch.randn(2000, 300), edge_index=random_graph(2000, 20000).edge_index)
    loader = NeighborLoader(data, [10, 5], batch_size=1000)
    with pytest.raises(IndexError, match="row 2000 is asked for, there are 2000"):
        loader._gather(data.x, torch.tensor([0, 2000]))


def test_transforms_see_whole_rows_once():
    data = Data(x=torch.randn(2000, 300), edge_index=random_graph(2000, 20000).edge_index)
    seen = []

    def early(out):
        out.metadata = (out.metadata[0] + 5000, out.metadata[1])
        return out

    def late(batch):
        seen.append((batch.x.shape[1], int(batch.input_id.min())))
        return batch

    list(NeighborLoader(data, [10, 5], batch_size=1000, transform=late, transform_sampler_output=early))
    assert seen == [(300, 5000), (300, 6000)]
