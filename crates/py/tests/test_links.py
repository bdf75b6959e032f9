"""Batches of links: every behaviour that PyG's own tests assert of its loader, for graphs with one type of nodes and edges."""

import pytest
import torch
from graphs import assert_consistent, ids, pairs, random_graph
from torch_geometric.data import Data
from torch_geometric.sampler import NegativeSampling

from esker import LinkNeighborLoader


@pytest.mark.parametrize("subgraph_type", ["directional", "bidirectional"])
@pytest.mark.parametrize("ratio", [None, 1.0])
@pytest.mark.parametrize("filter_per_worker", [None, True, False])
def test_a_batch_holds_its_links(subgraph_type, ratio, filter_per_worker):
    data = random_graph(50, 500)
    data.x, data.num_nodes = torch.arange(100), 100
    # Real edges, and pairs among nodes that have none.
    links = torch.cat([data.edge_index, data.edge_index.flip(0) + 50], dim=1)
    label = torch.cat([torch.ones(500), torch.zeros(500)])
    loader = LinkNeighborLoader(
        data, [-1, -1], batch_size=20, edge_label_index=links, edge_label=label if ratio is None else None,
        subgraph_type=subgraph_type, neg_sampling_ratio=ratio, shuffle=True, filter_per_worker=filter_per_worker,
    )  # fmt: skip
    assert str(loader) == "LinkNeighborLoader()" and len(loader) == 50
    called = loader([0])
    assert set(links[:, 0].tolist()) <= set(called.n_id.tolist())
    for batch in loader:
        assert type(batch) is Data and batch.input_id.numel() == 20
        assert batch.n_id.numel() == batch.num_nodes and batch.e_id.numel() == batch.num_edges == batch.edge_attr.numel()
        assert torch.equal(batch.n_id[batch.edge_label_index[:, :20]], links[:, batch.input_id])
        if ratio is None:
            assert batch.edge_label_index.size(1) == 20
            edges = pairs(batch.edge_index)
            assert pairs(batch.edge_label_index[:, batch.edge_label == 1]) <= edges
            assert not pairs(batch.edge_label_index[:, batch.edge_label == 0]) & edges
        else:
            assert batch.edge_label.tolist() == [1.0] * 20 + [0.0] * 20 and batch.edge_label_index.size(1) == 40


def test_labels_are_made_or_kept_long():
    data = random_graph()
    for label in (None, torch.ones(500, dtype=torch.long)):
        for batch in LinkNeighborLoader(data, [-1, -1], batch_size=10, edge_label=label, neg_sampling_ratio=1.0):
            assert batch.edge_label.dtype == (torch.float if label is None else torch.long)
            assert batch.edge_label.tolist() == [1] * 10 + [0] * 10


def test_a_graph_may_have_no_edges():
    links = torch.randint(100, (2, 100))
    for batch in LinkNeighborLoader(Data(num_nodes=100), [], batch_size=20, edge_label_index=links):
        assert batch.input_id.numel() == batch.edge_label_index.size(1) == 20
        assert batch.num_nodes == batch.edge_label_index.unique().numel() == links[:, batch.input_id].unique().numel()


@pytest.mark.parametrize("disjoint,temporal", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("amount", [1, 2])
def test_triplets(disjoint, temporal, amount):
    size, data = 20, random_graph(edges=400)
    data.edge_label_index = torch.randint(100, (2, 500))
    times = {}
    if temporal:
        data.time = torch.arange(100)
        times = dict(time_attr="time", edge_label_time=data.time[data.edge_label_index].amax(dim=0) + 50)
    loader = LinkNeighborLoader(
        data, [-1, -1], batch_size=size, edge_label_index=data.edge_label_index, disjoint=disjoint,
        neg_sampling=dict(mode="triplet", amount=amount), shuffle=True, **times,
    )  # fmt: skip
    assert len(loader) == 25
    for batch in loader:
        assert_consistent(data, batch)
        ends = data.edge_label_index[:, batch.input_id]
        assert torch.equal(batch.x[batch.src_index], ends[0]) and torch.equal(batch.x[batch.dst_pos_index], ends[1])
        assert batch.dst_neg_index.shape == ((size,) if amount == 1 else (size, amount))
        assert batch.dst_neg_index.min() >= 0 and batch.dst_neg_index.max() < batch.num_nodes
        assert "edge_label_index" not in batch and "edge_label" not in batch
        if disjoint:
            trees = torch.arange(size)
            assert torch.equal(batch.src_index, trees) and torch.equal(batch.dst_pos_index, trees + size)
            assert batch.dst_neg_index.min() == 2 * size and batch.dst_neg_index.max() == (2 + amount) * size - 1
            for index in (batch.src_index, batch.dst_pos_index, *batch.dst_neg_index.view(size, amount).t()):
                assert torch.equal(batch.batch[index], trees)
        if temporal:
            assert (batch.time <= batch.seed_time[batch.batch]).all()


def test_ids_map_to_the_source():
    data = random_graph()
    for batch in LinkNeighborLoader(data, [5, 5], batch_size=20, shuffle=True):
        assert_consistent(data, batch)


def test_no_node_is_later_than_its_label():
    data = Data(x=torch.randn(10, 5), edge_index=torch.randint(10, (2, 123)), time=torch.arange(10))
    times = data.time[data.edge_index].amax(dim=0)
    loader = LinkNeighborLoader(
        data, [-1], time_attr="time", edge_label=torch.ones(123), edge_label_time=times, batch_size=1, shuffle=True
    )
    for batch in loader:
        assert batch.edge_label_index.shape == (2, 1) and batch.edge_label.shape == batch.edge_label_time.shape == (1,)
        assert (batch.time <= batch.edge_label_time).all()


def test_negatives_with_times_are_not_later_than_their_label():
    data = random_graph(edges=1000, time=torch.arange(100))
    times = torch.full((1000,), 60)
    loader = LinkNeighborLoader(data, [3], time_attr="time", edge_label_time=times, batch_size=50, neg_sampling="binary")
    for batch in loader:
        negative = batch.edge_label_index[:, 50:]
        assert (batch.time[negative] <= 60).all() and batch.edge_label_time.tolist() == [60] * 100


def test_negatives_repeat_whatever_else_draws():
    data = random_graph()

    def epoch(workers, disturb):
        torch.manual_seed(2)
        loader = LinkNeighborLoader(data, [3], batch_size=100, neg_sampling="binary", num_workers=workers)
        found = []
        for batch in loader:
            found.append((batch.n_id[batch.edge_label_index].tolist(), batch.e_id.tolist()))
            if disturb:
                torch.rand(3)
        return found

    assert epoch(0, False) == epoch(0, True) == epoch(1, False) == epoch(2, True)


def test_negatives_are_uniform_and_drawn_afresh():
    data = random_graph(20, 2000)
    torch.manual_seed(0)
    loader = LinkNeighborLoader(data, [], batch_size=50, edge_label_index=data.edge_index[:, :50].repeat(1, 40), neg_sampling="binary")
    drawn = [batch.n_id[batch.edge_label_index[:, 50:]] for batch in loader]
    counts = torch.cat(drawn, dim=1).flatten().bincount(minlength=20)
    assert counts.sum() == 4000 and (counts - 200).abs().max() < 6 * (4000 * 0.05 * 0.95) ** 0.5
    assert len({tuple(negatives.flatten().tolist()) for negatives in drawn}) == 40


def test_whoever_draws_negatives_himself_keeps_doing_so():
    class Nought(NegativeSampling):
        def sample(self, num_samples, endpoint, num_nodes=None):
            return torch.zeros(num_samples, dtype=torch.long)

    loader = LinkNeighborLoader(random_graph(), [2], batch_size=10, neg_sampling=Nought("binary", 1))
    batch = next(iter(loader))
    assert (batch.n_id[batch.edge_label_index[:, 10:]] == 0).all()


def test_direct_calls_draw_afresh_and_repeat_with_the_seed():
    loader = LinkNeighborLoader(random_graph(edges=2000), [3], neg_sampling="binary")
    torch.manual_seed(1)
    first = ids([loader(range(20)), loader(range(20))])
    torch.manual_seed(1)
    assert first == ids([loader(range(20)), loader(range(20))]) and first[0] != first[1]
