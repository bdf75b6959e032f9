"""Datasets on disk as the `data` of PyTorch Geometric's loaders."""

import copy
import gc
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch_geometric")

from torch_geometric.data import Data  # noqa: E402
from torch_geometric.loader.neighbor_loader import NeighborLoader as PygNodes  # noqa: E402

import esker.engine as engine  # noqa: E402
from esker import FeatureStore, GraphStore, LinkNeighborLoader, NeighborLoader, disk, spilled  # noqa: E402

EXACT = ["memory", "mmap", "ginex", "diskgnn", "esker"]
CHECKOUT = Path(__file__).resolve().parents[3]
#: Real data is beside the checkout.
CORA = next((folder for folder in (CHECKOUT.parents[0] / "shared/data/cora", CHECKOUT.parents[1] / "shared/data/cora") if folder.exists()), CHECKOUT / "no-data")


@pytest.fixture(scope="module")
def source():
    generator = torch.Generator().manual_seed(1)
    edge_index = torch.randint(300, (2, 3000), generator=generator)
    return Data(x=torch.randn(300, 8, generator=generator), y=torch.randint(4, (300, ), generator=generator), edge_index=edge_index,
                edge_attr=torch.randn(3000, 3, generator=generator), train_mask=torch.arange(300) % 3 == 0, val_mask=torch.arange(300) % 3 == 1,
                test_mask=torch.arange(300) % 3 == 2)


@pytest.fixture(scope="module")
def data(source, tmp_path_factory):
    return disk.from_pyg(source, tmp_path_factory.mktemp("data") / "g")


@pytest.fixture(scope="module")
def loaded(data):
    return data.load()


@pytest.fixture
def place(tmp_path):
    return dict(scratch=tmp_path, prepared=tmp_path / "packed", threads=2)


def consistent(loaded, batch):
    """Every row of every attribute is the one of the global id beside it."""
    assert type(batch) is Data and batch.num_nodes == batch.x.size(0) == len(batch.n_id)
    assert torch.equal(batch.x, loaded.x[batch.n_id]) and torch.equal(batch.y, loaded.y[batch.n_id])
    assert torch.equal(batch.n_id[batch.edge_index], loaded.edge_index[:, batch.e_id])
    assert torch.equal(batch.edge_attr, loaded.edge_attr[batch.e_id])
    assert batch.edge_index.is_contiguous() and batch.edge_index.dtype == batch.n_id.dtype == batch.e_id.dtype == torch.int64


def same(one, other):
    assert set(one.keys()) == set(other.keys())
    for key in one.keys():
        assert torch.equal(one[key], other[key]) if torch.is_tensor(one[key]) else one[key] == other[key], key


def test_a_data_is_written_and_read_back(source, data, loaded):
    assert data.num_nodes == 300 and data.num_edges == 3000 and data.num_features == 8 and data.num_classes == 4
    assert torch.equal(data.x.load(), source.x) and torch.equal(data.y[torch.arange(300)], source.y)
    assert torch.equal(data.train_mask, source.train_mask) and torch.equal(data.val_idx, source.val_mask.nonzero().view(-1))
    order = torch.from_numpy(np.lexsort((np.arange(3000), source.edge_index[0].numpy(), source.edge_index[1].numpy())))
    assert torch.equal(loaded.edge_index, source.edge_index[:, order]) and torch.equal(loaded.edge_attr, source.edge_attr[order])
    assert data.x.shape == (300, 8) and data.x.dtype == torch.float32 and "on disk" in repr(data.x)
    assert torch.equal(data.x[5], source.x[5]) and torch.equal(data.x[-3:, :2], source.x[-3:, :2])
    assert torch.equal(data.x[source.train_mask], source.x[source.train_mask])
    assert copy.copy(data).num_nodes == 300 and torch.equal(pickle.loads(pickle.dumps(data)).y.load(), source.y)


@pytest.mark.parametrize("strategy", EXACT)
def test_an_order_of_torch(data, loaded, place, strategy):
    def run():
        torch.manual_seed(3)
        of = NeighborLoader(data, [4, 3], input_nodes=data.train_mask, batch_size=7, shuffle=True, strategy=strategy, **place)
        return list(of)

    place["prepared"] = None
    found = run()
    for batch in found:
        consistent(loaded, batch)
        assert set(batch.keys()) == {"x", "y", "edge_index", "edge_attr", "n_id", "e_id", "input_id", "batch_size", "num_sampled_nodes", "num_sampled_edges"}
        assert torch.equal(batch.n_id[:batch.batch_size], batch.input_id)
    seen = torch.cat([batch.input_id for batch in found])
    torch.manual_seed(3)
    expected = torch.cat(list(torch.utils.data.DataLoader(range(100), batch_size=7, shuffle=True)))
    assert torch.equal(seen, data.train_idx[expected])
    for one, other in zip(found, run()):
        same(one, other)


def test_epochs_of_torch_differ_and_are_alike_for_all_strategies(data, place):
    place["prepared"] = None
    expected = None
    for strategy in EXACT:
        of = NeighborLoader(data, [3, 2], batch_size=60, shuffle=True, strategy=strategy, generator=torch.Generator().manual_seed(5), **place)
        assert len(of) == 5
        found = [list(of), list(of)]
        assert not torch.equal(found[0][0].n_id, found[1][0].n_id)
        for one, other in zip(sum(found, []), sum(expected or found, [])):
            same(one, other)
        expected = found


def test_planned_epochs_are_those_of_esker_train(data, place, tmp_path):
    of = NeighborLoader(data, [4, 3], input_nodes=data.train_mask, batch_size=10, shuffle=True, seed=5, epochs=2, strategy="diskgnn", **place)
    notes = of.prepare()
    assert any("packed" in note for note in notes)
    plain = engine.numpy_loader(data, [4, 3], seeds=data.train_idx.numpy(), batch_size=10, seed=5, epochs=2, scratch=tmp_path)
    for _ in range(2):
        batches = list(of)
        assert len(batches) == len(of) == 10
        for batch, expected in zip(batches, plain):
            assert (batch.n_id.numpy() == expected.n_id).all() and (batch.x.numpy() == expected.x).all()
    assert of.stats()["rows"] > 0 and of.stats()["memory_bytes"] > 0


@pytest.mark.parametrize("seed", [None, 4])
def test_state_within_an_epoch(data, place, seed):
    place["prepared"] = None
    more = {} if seed is None else dict(seed=seed, epochs=3)
    make = lambda: NeighborLoader(data, [3], batch_size=25, shuffle=True, strategy="ginex", **place, **more)  # noqa: E731
    torch.manual_seed(1)
    of = make()
    batches = iter(of)
    for _ in range(4):
        next(batches)
    state = pickle.loads(pickle.dumps(of.state_dict()))
    rest, other = list(batches), make()
    other.load_state_dict(state)
    found = list(other)
    assert len(found) == len(rest) == 8
    for one, expected in zip(found, rest):
        same(one, expected)


def test_state_within_an_epoch_of_links(data, loaded, place):
    place["prepared"] = None
    make = lambda: LinkNeighborLoader(  # noqa: E731
        data, [3], edge_label_index=loaded.edge_index[:, ::7], batch_size=40, shuffle=True, neg_sampling="binary", strategy="ginex", **place)
    torch.manual_seed(1)
    of = make()
    batches = iter(of)
    for _ in range(3):
        next(batches)
    state = pickle.loads(pickle.dumps(of.state_dict()))
    rest, other = list(batches), make()
    other.load_state_dict(state)
    found = list(other)
    assert len(found) == len(rest) > 2
    for one, expected in zip(found, rest):
        same(one, expected)
        assert torch.equal(one.edge_label_index, expected.edge_label_index)


def test_data_in_memory_has_no_state(loaded):
    of = NeighborLoader(loaded, [3], batch_size=25)
    assert of.state_dict() == {}  # Lightning asks when it writes a checkpoint.
    of.load_state_dict({})
    with pytest.raises(TypeError, match="in memory"):
        of.load_state_dict({"epoch": 1})


def test_options_and_attributes(data, loaded, place):
    seen = []

    def early(out):
        out.metadata = (out.metadata[0] + 1000, out.metadata[1])
        return out

    extra = copy.copy(data)
    extra.z, extra.name, extra.n_id = torch.arange(300) * 2, "g", torch.arange(300) + 7000
    of = NeighborLoader(extra, num_neighbors=[3, 0, 2], batch_size=100, transform=lambda batch: seen.append(1) or batch,
                        transform_sampler_output=early, **place)
    assert isinstance(of, PygNodes) and of.data is extra and len(of.node_sampler.num_neighbors) == 3 and repr(of) == "NeighborLoader()"
    for batch in of:
        assert torch.equal(batch.z, (batch.n_id - 7000) * 2) and batch.name == "g" and batch.input_id.min() >= 1000
        assert batch.num_sampled_nodes[2:] == [0, 0] and batch.num_sampled_edges[1:] == [0, 0]
    assert len(seen) == 3
    one = of(torch.tensor([5, 2]))
    assert one.n_id[:2].tolist() == [7005, 7002] and one.batch_size == 2
    for option in (dict(replace=True), dict(disjoint=True), dict(subgraph_type="induced")):
        with pytest.raises(NotImplementedError, match=list(option)[0]):
            NeighborLoader(data, [2], **option)
    with pytest.raises(ValueError, match="sampler"):
        NeighborLoader(data, [2], seed=1, sampler=torch.utils.data.SequentialSampler(range(300)))
    with pytest.raises(TypeError):
        NeighborLoader(data, [2], no_such_option=1)


def test_samplers_of_torch(data, place):
    place["prepared"] = None
    of = NeighborLoader(data, [2], batch_sampler=[[1, 2], [7], [4, 4, 5]], **place)
    assert [batch.n_id[:batch.batch_size].tolist() for batch in of] == [[1, 2], [7], [4, 4, 5]]
    of = NeighborLoader(data, [2], sampler=torch.utils.data.SubsetRandomSampler([4, 9]), batch_size=2, **place)
    assert sorted(next(iter(of)).n_id[:2].tolist()) == [4, 9]
    again = pickle.loads(pickle.dumps(of))
    assert sorted(next(iter(again)).n_id[:2].tolist()) == [4, 9]


@pytest.mark.parametrize("neg_sampling", [None, dict(mode="binary", amount=1.5), dict(mode="triplet", amount=2)])
def test_links(data, loaded, place, neg_sampling):
    place["prepared"] = None
    links = torch.randint(300, (2, 50), generator=torch.Generator().manual_seed(2))
    of = LinkNeighborLoader(data, [3, 2], edge_label_index=links, neg_sampling=neg_sampling, batch_size=8, shuffle=True, strategy="ginex", **place)
    assert len(of) == 7
    seen = []
    for batch in of:
        consistent(loaded, batch)
        seen.append(batch.input_id)
        ends, count = links[:, batch.input_id], len(batch.input_id)
        if neg_sampling and neg_sampling["mode"] == "triplet":
            assert torch.equal(batch.n_id[batch.src_index], ends[0]) and torch.equal(batch.n_id[batch.dst_pos_index], ends[1])
            assert batch.dst_neg_index.shape == (count, 2) and "edge_label_index" not in batch
        else:
            assert torch.equal(batch.n_id[batch.edge_label_index[:, :count]], ends)
            if neg_sampling:
                assert batch.edge_label.tolist() == [1.0] * count + [0.0] * (batch.edge_label.numel() - count)
                assert batch.edge_label.numel() == count + -(-3 * count // 2)
        assert "batch_size" not in batch
    assert torch.cat(seen).sort()[0].tolist() == list(range(50))


def test_columns_that_were_spilled(source, tmp_path):
    half = copy.copy(source)
    half.h, half.many = source.x.half(), torch.arange(300)
    on_disk = spilled.spill(half, tmp_path)
    assert isinstance(on_disk.x, spilled.SpilledColumn) and isinstance(on_disk.edge_attr, spilled.SpilledColumn)
    assert torch.is_tensor(on_disk.many) and torch.is_tensor(half.x) and on_disk.x.shape == (300, 8)
    index = torch.tensor([5, 299, 5, 0])
    for key in ("x", "h", "edge_attr"):
        assert torch.equal(on_disk[key][index], half[key][index]) and on_disk[key][index].dtype == half[key].dtype
        assert np.array_equal(np.take(on_disk[key], index, axis=0), half[key][index].numpy())
    with pytest.raises(TypeError):
        on_disk.x + 1
    (directory, ) = os.listdir(tmp_path)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(on_disk.x[index], source.x[index]) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert os.listdir(tmp_path) == [directory]
    del on_disk
    gc.collect()
    assert os.listdir(tmp_path) == []
    # What is pickled outlives its original.
    pickled = pickle.dumps(spilled.spill(half, tmp_path))
    gc.collect()
    assert torch.equal(pickle.loads(pickled).x[index], source.x[index])


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("loader", [NeighborLoader, LinkNeighborLoader])
def test_a_loader_that_spills_has_the_same_batches(source, tmp_path, loader, num_workers, monkeypatch):
    def batches(**more):
        torch.manual_seed(2)
        of = loader(source, [3, 2], batch_size=100, shuffle=True, num_workers=num_workers, **more)
        assert of.data is source and (of._spilled is None) == (not more and "ESKER_SPILL" not in os.environ)
        return list(of)

    expected, found = batches(), batches(spill=tmp_path)
    monkeypatch.setenv("ESKER_SPILL", "1")
    for one, other, third in zip(expected, found, batches()):
        assert type(other) is Data and torch.is_tensor(other.x)
        same(one, other)
        same(one, third)


def accuracy(loader, data, epochs):
    """That of PyTorch Geometric's GraphSAGE, trained on the batches of a loader."""
    from torch_geometric.nn import GraphSAGE
    torch.manual_seed(12)
    model = GraphSAGE(data.x.size(1), 64, num_layers=2, out_channels=int(data.y.max()) + 1, dropout=0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    for _ in range(epochs):
        model.train()
        for batch in loader:
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index)[:batch.batch_size]
            torch.nn.functional.cross_entropy(out, batch.y[:batch.batch_size]).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        out = model(data.x, data.edge_index).argmax(1)
    return (out == data.y)[data.test_mask].float().mean().item()


@pytest.mark.skipif(not CORA.exists(), reason=f"real data is not there: {CORA}")
def test_graphsage_on_cora_from_disk(tmp_path):
    torch.set_num_threads(1)
    data = engine.import_(tmp_path / "cora", "planetoid", source=CORA, name="cora")
    whole = data.load()
    found = {}
    for strategy in EXACT:
        of = NeighborLoader(data, [10, 10], input_nodes=data.train_mask, batch_size=32, shuffle=True, seed=3, epochs=30, strategy=strategy,
                            scratch=tmp_path, prepared=tmp_path / f"packed-{strategy}")
        found[strategy] = accuracy(of, whole, 30)
    assert len(set(found.values())) == 1 and found["memory"] > 0.75, found


def test_two_processes_train_together(data, tmp_path):
    """DDP over gloo, with ranks of one planned order."""
    program = Path(__file__).resolve().parents[1] / "examples/ddp.py"
    arguments = [sys.executable, str(program), data._disk.directory, "--processes", "2", "--epochs", "3", "--scratch", str(tmp_path)]
    done = subprocess.run([str(argument) for argument in arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads(done.stdout.strip().splitlines()[-1])
    assert record["processes"] == 2 and record["seeds"] == 100 and record["batches"] == [5, 5]


def test_stores_of_pyg(data, loaded):
    from torch_geometric.data import EdgeAttr, TensorAttr
    features, graph = FeatureStore(data), GraphStore(data._disk.directory)
    assert [attr.attr_name for attr in features.get_all_tensor_attrs()] == ["x", "y"]
    index = torch.tensor([5, 0, 299])
    assert torch.equal(features.get_tensor(TensorAttr(None, "x", index)), loaded.x[index])
    assert torch.equal(features.get_tensor(TensorAttr(None, "y", None)), loaded.y)
    assert features.get_tensor_size(TensorAttr(None, "x")) == (300, 8)
    (attr, ) = graph.get_all_edge_attrs()
    row, colptr = graph.get_edge_index(attr)
    assert torch.equal(row, loaded.edge_index[0]) and torch.equal(colptr.diff(), loaded.edge_index[1].bincount(minlength=300))
    with pytest.raises(NotImplementedError):
        features.put_tensor(loaded.x, TensorAttr(None, "x", None))
    assert graph.get_edge_index(EdgeAttr(None, "csc")) is not None


def test_the_contract_holds_with_features_on_disk():
    """All of it but that later changes of features show: they are copied."""
    contract = Path(__file__).with_name("test_shared_contract.py")
    arguments = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(contract), "-k", "not test_changes_to_features_are_seen"]
    done = subprocess.run(arguments, capture_output=True, text=True, env={**os.environ, "ESKER_SPILL": "1"}, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    if passed is None:
        pytest.skip("the contract is not beside the checkout")
    assert int(passed[1]) >= 50, done.stdout[-3000:]
