"""Loaders are made, shared, sent to processes, interrupted and dropped."""

import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import warnings
import weakref

import pytest
import torch
from graphs import ids, random_graph

from esker import LinkNeighborLoader, NeighborLoader, NeighborSampler


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("loader_class", [NeighborLoader, LinkNeighborLoader])
def test_dropped_loaders_leave_nothing(loader_class):
    data = random_graph(2000, 20000)

    def make(count):
        for _ in range(count):
            loader = loader_class(data, [5], batch_size=10)
            next(iter(loader))
            loader(range(5))
            del loader
        gc.collect()

    make(100)
    before = resident_bytes()
    make(600)
    # What a loader holds takes more than 0.5 MB.
    assert resident_bytes() - before < 20 << 20


def test_batches_live_longer_than_their_loader():
    data = random_graph()
    loader = NeighborLoader(data, [5, 5], batch_size=20)
    batches = list(loader)
    kept, sampler = ids(batches), weakref.ref(loader.node_sampler)
    del loader
    gc.collect()
    assert sampler() is None and ids(batches) == kept


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_start_in_every_way(method):
    data = random_graph(edges=2000)

    def epoch(**options):
        torch.manual_seed(3)
        return ids(NeighborLoader(data, [3, 3], batch_size=25, shuffle=True, **options))

    assert epoch(num_workers=2, multiprocessing_context=method) == epoch()


def test_workers_are_forked_while_threads_sample():
    data = random_graph(edges=2000)
    loader, stop = NeighborLoader(data, [3, 3], batch_size=25), threading.Event()

    def keep_sampling():
        while not stop.is_set():
            loader(range(25))

    thread = threading.Thread(target=keep_sampling)
    thread.start()
    try:
        forked = NeighborLoader(data, [3, 3], batch_size=5, num_workers=2, neighbor_sampler=loader.node_sampler, timeout=60)
        assert sum(batch.batch_size for _ in range(3) for batch in forked) == 300
    finally:
        stop.set()
        thread.join()


def test_a_loader_is_made_in_a_forked_process():
    assert sum(batch.batch_size for batch in NeighborLoader(random_graph(), [3], batch_size=50)) == 100
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        total = sum(batch.batch_size for batch in NeighborLoader(random_graph(), [3], batch_size=50))
        os._exit(0 if total == 100 else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_threads_share_a_loader():
    loader, results = NeighborLoader(random_graph(edges=3000), [3, 3], batch_size=10), []
    torch.manual_seed(3)
    expected = ids(loader)
    sampler = loader.node_sampler
    from esker.draws import Draws, of_batch
    from torch_geometric.sampler import NodeSamplerInput

    seeds = NodeSamplerInput(None, torch.arange(50))

    def sample(number):
        with of_batch(Draws(1, 0, number)):
            results.append((number, sampler.sample_from_nodes(seeds).edge.tolist()))

    threads = [threading.Thread(target=sample, args=(number % 4,)) for number in range(16)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(results) == 16 and len({(number, tuple(edges)) for number, edges in results}) == 4
    torch.manual_seed(3)
    assert ids(loader) == expected


def test_a_pickled_loader_samples_the_same():
    loader = NeighborLoader(random_graph(), [3], batch_size=20, time_attr=None)
    copied = pickle.loads(pickle.dumps(loader))
    torch.manual_seed(1)
    expected = ids(loader)
    torch.manual_seed(1)
    assert ids(copied) == expected


def test_options_set_later_count():
    loader = NeighborLoader(random_graph(), [3], batch_size=20)
    loader.node_sampler.num_neighbors = [-1, -1]
    assert len(next(iter(loader)).num_sampled_edges) == 2
    loader.node_sampler.disjoint = True
    assert "batch" in next(iter(loader))


def test_ctrl_c_stops_an_epoch():
    program = """
import torch, esker
from torch_geometric.data import Data
data = Data(edge_index=torch.randint(20000, (2, 2000000)), num_nodes=20000)
loader = esker.NeighborLoader(data, [20, 20], batch_size=100)
try:
    print('begins', flush=True)
    while True:
        for batch in loader:
            pass
except KeyboardInterrupt:
    print('stopped', flush=True)
"""
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "begins\n"
    child.send_signal(signal.SIGINT)
    assert child.communicate(timeout=60)[0] == "stopped\n" and child.returncode == 0


def test_nothing_is_said_about_other_samplers():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        NeighborLoader(random_graph(), [2])
        NeighborSampler(random_graph(), [2])
        LinkNeighborLoader(random_graph(), [2])


def test_the_package_needs_neither_torch_nor_pyg():
    program = """
import sys
sys.modules['torch'] = sys.modules['torch_geometric'] = None
import esker
print(esker.__version__, 'NeighborLoader' in dir(esker))
try:
    esker.NeighborLoader
except ImportError as error:
    print('pip install' in str(error))
"""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    from esker import __version__

    assert out.split() == [__version__, "True", "True"]


def test_tensors_that_torch_moves_are_read_where_they_went():
    data = random_graph(20000, 200000)
    data = data.sort(sort_by_row=False)
    loader = NeighborLoader(data, [5, 5], batch_size=500, is_sorted=True)
    torch.manual_seed(3)
    expected = ids(loader)
    # The rows of `edge_index` are read in place; this frees where they were.
    data.share_memory_()
    pickle.dumps(loader)
    loader.node_sampler.colptr.share_memory_()
    torch.manual_seed(3)
    assert ids(loader) == expected
