"""The promise of memory, kept under a cgroup with torch loaded, by two loaders together."""

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

pytest.importorskip("torch")

import esker.engine as engine  # noqa: E402

PROGRAM = """
import json, os, sys, threading
import torch, torch_geometric, esker
torch.set_num_threads(1)
path, scratch, promise = sys.argv[1], sys.argv[2], int(sys.argv[3])
data = esker.open(path)
# What Python and torch take comes on top of what loaders may take.
warm = torch.randn(64, 64) @ torch.randn(64, 64)

def own():
    lines = dict(line.split(":") for line in open("/proc/self/status") if ":" in line)
    return sum(int(lines[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))

before, peak, done = own(), 0, threading.Event()
def watch():
    global peak
    while not done.wait(0.005):
        peak = max(peak, own())
watcher = threading.Thread(target=watch, daemon=True)
watcher.start()
esker.set_memory(promise)
loaders = [esker.NeighborLoader(data, [10, 10], input_nodes=data.train_idx, batch_size=200, shuffle=True, seed=seed, epochs=2, strategy=strategy,
                                memory=share, threads=1, scratch=scratch, prepared=os.path.join(scratch, str(seed)))
           for seed, strategy, share in ((1, "ginex", 62 << 20), (2, sys.argv[4], promise - (62 << 20)))]
batches = 0
for _ in range(2):
    for one, other in zip(*loaders):
        assert one.x.shape[1] == other.x.shape[1] == 128
        batches += 2
taken = esker.memory()[1]
done.set()
watcher.join()
print(json.dumps({"batches": batches, "taken": taken, "before": before, "peak": max(peak, own())}))
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    target = tmp_path_factory.mktemp("data") / "g"
    engine.generate(target, nodes=400_000, degree=10, dim=128, train=0.0105, seed=1, memory="256MiB")
    return str(target)


def run(path, scratch, promise, strategy, group=None):
    enter = None
    if group is not None:
        def enter():
            (group / "cgroup.procs").write_text(str(os.getpid()))
    arguments = [sys.executable, "-c", PROGRAM, path, str(scratch), str(promise), strategy]
    return subprocess.run(arguments, capture_output=True, text=True, preexec_fn=enter, timeout=600)


@pytest.mark.parametrize("strategy, promise", [("ginex", 124 << 20), ("diskgnn", 176 << 20)])
def test_two_loaders_together_keep_their_promise(path, tmp_path, strategy, promise):
    """Features alone take 195 MiB."""
    done = run(path, tmp_path, promise, strategy)
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads(done.stdout)
    assert record["batches"] == 84 and record["taken"] <= promise
    assert record["peak"] - record["before"] <= promise, record


def make_group(limit):
    """A cgroup with so much memory; `None` where this process cannot make one."""
    for root, name in ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max")):
        group = root / f"esker-py-{uuid.uuid4().hex[:8]}"
        try:
            group.mkdir()
            (group / name).write_text(str(limit))
            return group
        except OSError:
            if group.is_dir():
                group.rmdir()
    return None


def test_the_promise_is_kept_in_a_cgroup(path, tmp_path):
    promise = 124 << 20
    alone = run(path, tmp_path / "a", promise, "ginex")
    assert alone.returncode == 0, alone.stderr[-3000:]
    # With torch, which takes what it took before the loaders were opened, and the page cache of its libraries.
    limit = json.loads(alone.stdout)["before"] + promise + (64 << 20)
    group = make_group(limit)
    if group is None:
        pytest.skip("this process cannot make a cgroup")
    try:
        done = run(path, tmp_path / "b", promise, "ginex", group)
    finally:
        group.rmdir()
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["batches"] == 84
