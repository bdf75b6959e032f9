"""Batches from disk: those of `esker train`, from every strategy, resumed, by rank, within the memory that was promised."""

import copy
import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import esker.engine as engine
from esker import _esker

EXACT = ["memory", "mmap", "ginex", "diskgnn", "esker"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    target = tmp_path_factory.mktemp("data") / "g"
    engine.generate(target, nodes=2000, degree=8, dim=12, classes=5, train=0.2, valid=0.1, test=0.1, seed=3)
    return str(target)


@pytest.fixture
def asked(tmp_path):
    return dict(num_neighbors=[5, 3], batch_size=50, seed=7, epochs=2, scratch=tmp_path, prepared=tmp_path / "packed", threads=2)


def loader(path, asked, **more):
    return engine.numpy_loader(path, **{**asked, "columns": ["node-labels"], **more})


def said(batch):
    arrays = [batch.n_id, batch.edge_index, batch.e_id, batch.input_id, batch.x, batch.columns["node-labels"][1]]
    return [array.tobytes() for array in arrays] + [batch.batch_size, batch.num_sampled_nodes, batch.num_sampled_edges]


def epochs(of, count=2):
    return [[said(batch) for batch in of] for _ in range(count)]


def test_all_strategies_have_the_same_batches(path, asked, tmp_path):
    expected = epochs(loader(path, asked, strategy="memory"))
    assert len(expected[0]) == len(expected[1]) == 40 and expected[0] != expected[1]
    for strategy in EXACT[1:]:
        assert epochs(loader(path, asked, strategy=strategy, prepared=tmp_path / strategy)) == expected


def test_rows_and_edges_are_those_of_the_dataset(path, asked):
    disk = _esker.DiskDataset(path)
    x, y = np.asarray(disk.read("node-features")), np.asarray(disk.read("node-labels"))
    offsets, sources = np.asarray(disk.read("in-offsets")), np.asarray(disk.read("in-neighbours"))
    seeds = np.array([3, 1999, 3, 40, 7])
    for batch in loader(path, {**asked, "batch_size": 2}, seeds=seeds, shuffle=False):
        assert (batch.x == x[batch.n_id]).all() and (batch.columns["node-labels"][1] == y[batch.n_id]).all()
        assert (batch.n_id[:batch.batch_size] == seeds[batch.input_id]).all()
        assert (batch.n_id[batch.edge_index[0]] == sources[batch.e_id]).all()
        target = batch.n_id[batch.edge_index[1]]
        assert ((offsets[target] <= batch.e_id) & (batch.e_id < offsets[target + 1])).all()
        assert sum(batch.num_sampled_nodes) == len(batch.n_id) and sum(batch.num_sampled_edges) == len(batch.e_id)


@pytest.mark.parametrize("strategy", EXACT)
def test_an_epoch_is_resumed_where_its_state_was_taken(path, asked, strategy):
    expected = epochs(loader(path, asked, strategy=strategy))
    first = loader(path, asked, strategy=strategy)
    batches = iter(first)
    for _ in range(13):
        next(batches)
    state = json.loads(json.dumps(first.state_dict()))
    del batches
    other = loader(path, asked, strategy=strategy)
    other.load_state_dict(state)
    assert [said(batch) for batch in other] == expected[0][13:]
    assert [said(batch) for batch in other] == expected[1]
    other.set_epoch(0)
    assert [said(batch) for batch in other] == expected[0]
    with pytest.raises(ValueError, match="another order"):
        loader(path, {**asked, "seed": 8}).load_state_dict(state)


def test_ranks_divide_the_epoch(path, asked, tmp_path):
    expected = epochs(loader(path, asked), 1)[0]
    ranks = [epochs(loader(path, {**asked, "prepared": tmp_path / f"r{rank}"}, rank=rank, world_size=3, strategy="diskgnn"), 1)[0] for rank in range(3)]
    assert [ranks[batch % 3][batch // 3] for batch in range(len(expected))] == expected
    even = [len(loader(path, asked, rank=rank, world_size=3, drop_last=True)) for rank in range(3)]
    assert even == [13] * 3


def test_an_iteration_that_is_left_begins_again(path, asked):
    of = loader(path, asked, strategy="ginex")
    expected = epochs(loader(path, asked))
    for taken in (0, 1, 5):
        batches = iter(of)
        assert [said(next(batches)) for _ in range(taken)] == expected[0][:taken]
        del batches
    one, other = iter(of), iter(of)
    assert said(next(one)) == said(next(other)) == expected[0][0]
    del one, other
    assert epochs(of) == expected
    with pytest.raises(ValueError, match="epochs=2"):
        iter(of)


def test_loaders_share_a_promise_and_take_turns(path, asked):
    before = engine.memory()
    try:
        probe = loader(path, asked, strategy="memory")
        probe.prepare()
        need = probe.stats()["memory_bytes"]
        probe.close()
        engine.set_memory(need + need // 2)
        one, other = (loader(path, asked, strategy="memory") for _ in range(2))
        first = iter(one)
        next(first)
        with pytest.raises(MemoryError, match="may take"):
            next(iter(other))
        del first  # Nobody iterates over it: it makes room.
        assert len(list(other)) == 40 and engine.memory()[1] <= need + need // 2
        assert len(list(one)) == 40
        one.engine.close(), other.engine.close()
        engine.set_memory(need // 4)
        with pytest.raises(MemoryError, match="set_memory"):
            loader(path, asked, strategy="memory", memory=need).prepare()
    finally:
        engine.set_memory(before[0])
    with pytest.raises(MemoryError, match='memory="[0-9.]+MiB"'):
        loader(path, asked, strategy="ginex", memory="1MiB").prepare()


def test_memory_is_returned_and_threads_end(path, asked):
    gc.collect()
    taken, threads = engine.memory()[1], len(os.listdir("/proc/self/task"))
    for number in range(30):
        of = loader(path, asked, strategy=EXACT[number % 3])
        next(iter(of))
        del of
    gc.collect()
    assert engine.memory()[1] == taken and len(os.listdir("/proc/self/task")) <= threads
    assert not [name for name in os.listdir(asked["scratch"]) if name.startswith("esker-loader")]


def test_batches_outlive_their_loader(path, asked):
    of = loader(path, asked)
    kept = list(of)
    expected = [said(batch) for batch in kept]
    of.close()
    del of
    gc.collect()
    assert [said(batch) for batch in kept] == expected


def test_other_threads_run_while_batches_are_made(path, asked):
    turns, stop = [0], threading.Event()

    def count():
        while not stop.is_set():
            turns[0] += 1
            time.sleep(0.0005)

    thread = threading.Thread(target=count)
    thread.start()
    list(loader(path, asked, strategy="ginex"))
    stop.set()
    thread.join()
    assert turns[0] > 5


def test_ctrl_c_ends_preparing(path, tmp_path):
    program = f"""
import esker.engine as engine, os, signal, threading, time
of = engine.numpy_loader({path!r}, [20, 20, 20], batch_size=500, seed=1, epochs=100000, strategy="diskgnn", prepared={str(tmp_path / 'p')!r},
                         scratch={str(tmp_path)!r}, disk_budget="2GiB", epochs_sampled=100000)
of.engine.native()
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    of.prepare()
except KeyboardInterrupt:
    print("interrupted")
# The next attempt goes on until it is interrupted itself.
started = time.monotonic()
threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    of.prepare()
except KeyboardInterrupt:
    print(time.monotonic() - started >= 0.5)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "interrupted\nTrue\n", done.stderr


def test_a_forked_process_opens_its_own(path, asked):
    of = loader(path, asked, strategy="memory")
    expected = epochs(of, 1)[0]
    of.set_epoch(0)
    child = os.fork()
    if child == 0:
        os._exit(0 if epochs(of, 1)[0] == expected else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert epochs(pickle.loads(pickle.dumps(of)), 1)[0] == expected


def test_errors_name_what_to_do(path, asked):
    with pytest.raises(FileNotFoundError):
        engine.open(path + "-none")
    with pytest.raises(ValueError, match="marius"):
        loader(path, asked, strategy="marius")
    with pytest.raises(ValueError, match="epochs="):
        loader(path, {**asked, "epochs": None}, strategy="diskgnn")
    with pytest.raises(ValueError, match="seeds|node"):
        loader(path, asked, seeds=np.array([2000])).prepare()
    with pytest.raises(ValueError, match="rank 3 of 3"):
        loader(path, asked, rank=3, world_size=3).prepare()
    with pytest.raises(ValueError, match="-2 neighbours"):
        loader(path, {**asked, "num_neighbors": [-2]}).prepare()
    with pytest.raises(KeyError, match="no-such"):
        _esker.DiskDataset(path).read("no-such")


def test_a_run_is_trained_evaluated_and_predicted(path, tmp_path):
    settings = dict(fanout=[5, 3], layers=2, hidden=16, batch=100, epochs=2, lr=0.01, memory="512MiB")
    summary = engine.train(path, tmp_path / "run", strategy="ginex", **settings)
    same = engine.train(path, tmp_path / "same", **settings)
    assert len(summary["epochs"]) == 2 and [epoch["loss"] for epoch in summary["epochs"]] == [epoch["loss"] for epoch in same["epochs"]]
    metrics = engine.evaluate(tmp_path / "run", "valid")
    assert set(metrics) and all(isinstance(value, (int, float, type(None))) for value in metrics.values())
    found = engine.predict(tmp_path / "run", [1, 5, 9])
    assert found["classes"].shape == (3, ) and found["values"].shape == (3, 5)
    assert (found["values"].argmax(1) == found["classes"]).all()
    with pytest.raises(TypeError, match="no setting colour"):
        engine.train(path, tmp_path / "other", colour="blue")
    with pytest.raises(ValueError):
        engine.train(path, tmp_path / "run", **settings)


def test_no_pyg_is_needed(path):
    program = f"""
import sys
sys.modules['torch'] = sys.modules['torch_geometric'] = None
import esker.engine as engine
disk = engine.open({path!r})
assert type(disk).__name__ == 'DiskDataset'
batch = next(iter(engine.numpy_loader(disk, [4], batch_size=10, seed=1)))
assert batch.x.shape == (len(batch.n_id), 12), batch
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
