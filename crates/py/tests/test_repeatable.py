"""Which draws a batch has: of the epoch's seed and its number, and of nothing else."""

import pytest
import torch
from graphs import ids, random_graph

from esker import LinkNeighborLoader, NeighborLoader, NeighborSampler
from torch_geometric.loader import NodeLoader


def epochs(workers, count=1, seed=3, loader_class=NeighborLoader, **options):
    torch.manual_seed(seed)
    loader = loader_class(random_graph(edges=3000), [3, 3], batch_size=8, shuffle=True, num_workers=workers, **options)
    return [ids(loader) for _ in range(count)]


@pytest.mark.parametrize("loader_class", [NeighborLoader, LinkNeighborLoader])
@pytest.mark.parametrize("options", [{}, {"disjoint": True}, {"filter_per_worker": False}])
def test_samples_do_not_depend_on_workers(loader_class, options):
    alone = epochs(0, count=2, loader_class=loader_class, **options)
    assert alone == epochs(1, count=2, loader_class=loader_class, **options) == epochs(2, count=2, loader_class=loader_class, **options)
    assert alone[0] != alone[1]


def test_another_seed_gives_other_samples():
    assert epochs(0, seed=3) == epochs(0, seed=3) != epochs(0, seed=4)


def test_epochs_of_persistent_workers_differ_and_repeat():
    two = epochs(2, count=2, persistent_workers=True)
    assert two[0] != two[1] and two == epochs(1, count=2, persistent_workers=True)
    # Another order is not enough: the same batches are drawn anew.
    data = random_graph(edges=3000)
    loader = NeighborLoader(data, [3], batch_size=100, num_workers=1, persistent_workers=True)
    assert ids(loader) != ids(loader)


def test_equal_batches_of_an_epoch_draw_independently():
    loader = NeighborLoader(random_graph(edges=3000), [3], input_nodes=torch.zeros(50, dtype=torch.long), batch_size=1)
    assert len({tuple(batch.e_id.tolist()) for batch in loader}) > 40


def test_direct_calls_draw_afresh_and_repeat_with_the_seed():
    loader = NeighborLoader(random_graph(edges=3000), [3, 3])
    torch.manual_seed(1)
    first = ids([loader(range(20)), loader(range(20))])
    torch.manual_seed(1)
    assert first == ids([loader(range(20)), loader(range(20))]) and first[0] != first[1]


def test_order_and_draws_of_the_program_are_left_alone():
    data = random_graph()
    generator = torch.Generator().manual_seed(7)
    own = [batch.input_id for batch in NeighborLoader(data, [2], batch_size=8, shuffle=True, generator=generator)]
    generator = torch.Generator().manual_seed(7)
    plain = list(torch.utils.data.DataLoader(range(100), batch_size=8, shuffle=True, generator=generator))
    assert all(map(torch.equal, own, plain))

    def after(loader):
        torch.manual_seed(9)
        for _ in loader:
            pass
        return torch.rand(1)

    assert after(NeighborLoader(data, [2], batch_size=8)) == after(torch.utils.data.DataLoader(range(100), batch_size=8))


def test_the_sampler_serves_loaders_of_pyg():
    data = random_graph()

    def epoch():
        torch.manual_seed(3)
        loader = NodeLoader(data, node_sampler=NeighborSampler(data, [3, 3]), batch_size=20)
        return ids(loader)

    assert epoch() == epoch()


def test_lists_of_batches_and_single_indices_come_through():
    data = random_graph()
    loader = NeighborLoader(data, [2], batch_sampler=[[5, 1], [7]])
    assert [batch.n_id[: batch.batch_size].tolist() for batch in loader] == [[5, 1], [7]]
    loader = NeighborLoader(data, [2], batch_size=None, sampler=[4, 2])
    assert [batch.n_id[: batch.batch_size].tolist() for batch in loader] == [[4], [2]]
