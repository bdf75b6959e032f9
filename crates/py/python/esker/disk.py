"""Datasets on disk as the `data` of PyTorch Geometric, and loaders whose rows come from Esker's engine."""

import copy
import json
import os
import tempfile
import weakref
from typing import Any, Dict, Iterator, List, Optional, Tuple

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader.link_loader import LinkLoader
from torch_geometric.loader.node_loader import NodeLoader
from torch_geometric.sampler import SamplerOutput
from torch_geometric.sampler.neighbor_sampler import edge_sample

from esker import _esker
from esker.engine import Engine, Epoch, Order, Counted, _ids, bytes_of, planned_epoch, planned_order

_TORCH = {"u8": torch.uint8, "i8": torch.int8, "f16": torch.float16, "bf16": torch.bfloat16, "i32": torch.int32, "f32": torch.float32,
          "i64": torch.int64, "u32": torch.int64, "u64": torch.int64}
#: What columns of a dataset are called in PyTorch Geometric.
_NAMES = {"node-labels": "y", "edge-features": "edge_attr", "edge-weight": "edge_weight", "edge-time": "edge_time", "edge-relation": "edge_type"}
#: Seeds of links that are planned together, at most: their order is in memory.
_PLANNED_SEEDS = 1 << 22


def _tensor(array: np.ndarray, dtype: str) -> Tensor:
    """A tensor that shares the memory of an array, unless torch lacks its dtype."""
    if dtype == "bf16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    if dtype in ("u32", "u64"):
        return torch.from_numpy(array.astype(np.int64))
    return torch.from_numpy(array)


def _labels(values: Tensor, kind: str) -> Tensor:
    """Labels as models take them: classes as int64 (-1: none), several labels as float (NaN: unknown)."""
    if kind == "classes":
        return values.to(torch.int64)
    if kind == "multilabel":
        found = values.to(torch.float32)
        return found.masked_fill_(values == 255, float("nan"))
    return values


class DiskColumn:
    """A column of a dataset. Rows are read when they are asked for: `column[ids]` is a tensor.

    It has the shape and dtype that the whole column would have as a tensor.
    """

    def __init__(self, disk: "_esker.DiskDataset", name: str, shape: Tuple[int, ...], dtype: torch.dtype, labels: Optional[str] = None,
                 threads: int = 1):
        self._disk, self._name, self._labels, self._threads = disk, name, labels, threads
        self.shape, self.dtype, self.device = torch.Size(shape), dtype, torch.device("cpu")
        self._rows = None

    def gather(self, index) -> Tensor:
        """The rows with these ids."""
        index = torch.as_tensor(index)
        ids = _ids(index.detach().cpu().numpy())
        if self._name == "node-features":
            if self._rows is None:
                self._rows = _esker.DiskRowsOf(self._disk, self._threads)
            found = torch.from_numpy(np.asarray(self._rows.gather(ids))).to(self.dtype)
        else:
            if len(ids) and ids.max() >= self.shape[0]:
                raise IndexError(f"row {ids.max()} is asked for, and there are {self.shape[0]}")
            native = self._disk.gather(self._name, ids)
            found = self._typed(np.asarray(native), native.dtype)
        return found.reshape(*index.shape, *self.shape[1:])

    def _typed(self, array: np.ndarray, dtype: str) -> Tensor:
        found = _tensor(array, dtype)
        return _labels(found, self._labels) if self._labels else found

    def load(self) -> Tensor:
        """The whole column, in memory."""
        return self.gather(torch.arange(self.shape[0]))

    def __getitem__(self, index) -> Tensor:
        if isinstance(index, tuple):
            return self[index[0]][(slice(None), *index[1:])]
        if isinstance(index, (int, np.integer)):
            return self.gather(torch.tensor([range(self.shape[0])[index]]))[0]
        if isinstance(index, slice):
            return self.gather(torch.arange(self.shape[0])[index])
        index = torch.as_tensor(index)
        if index.dtype in (torch.bool, torch.uint8):
            index = index.nonzero().view(-1)
        return self.gather(torch.where(index < 0, index + self.shape[0], index))

    def __len__(self) -> int:
        return self.shape[0]

    def size(self, dim: Optional[int] = None):
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return self.shape.numel()

    def __getstate__(self):
        return {**self.__dict__, "_rows": None}

    def __deepcopy__(self, memo):
        return self

    def __copy__(self):
        return self

    def __repr__(self) -> str:
        return f"DiskColumn({self._name}, shape={list(self.shape)}, dtype={self.dtype}, on disk in {self._disk.directory})"


class DiskEdges:
    """The edges of a dataset. They stay on disk; `load()` has them as `edge_index`, sorted by target."""

    def __init__(self, disk: "_esker.DiskDataset", nodes: int, edges: int):
        self._disk, self._nodes, self.shape = disk, nodes, torch.Size((2, edges))

    def load(self) -> Tensor:
        offsets = np.asarray(self._disk.read("in-offsets")).astype(np.int64)
        sources = np.asarray(self._disk.read("in-neighbours")).astype(np.int64)
        targets = np.repeat(np.arange(self._nodes), np.diff(offsets))
        return torch.from_numpy(np.stack([sources, targets]))

    def csc(self) -> Tuple[Tensor, Tensor]:
        """Offsets of incoming edges by node, and their sources."""
        offsets = np.asarray(self._disk.read("in-offsets")).astype(np.int64)
        return torch.from_numpy(offsets), torch.from_numpy(np.asarray(self._disk.read("in-neighbours")).astype(np.int64))

    def size(self, dim: Optional[int] = None):
        return self.shape if dim is None else self.shape[dim]

    def __repr__(self) -> str:
        return f"DiskEdges(shape={list(self.shape)}, on disk in {self._disk.directory})"


class DiskData(Data):
    """A dataset of Esker as a `Data`. Its columns are handles (`DiskColumn`), and stay on disk.

    `x`, `y`, `edge_attr`, `edge_weight`, `edge_time` and `edge_type` are there if the dataset has them. `train_mask`, `val_mask`,
    `test_mask` (and `train_idx`, ...) are read when they are first asked for. Tensors that you add become rows of the batch as
    those of any `Data` do.
    """

    def __init__(self, path=None, **attributes):
        super().__init__(**attributes)
        if path is None:  # PyTorch Geometric makes empty ones.
            return
        disk = path if isinstance(path, _esker.DiskDataset) else _esker.DiskDataset(os.fspath(path))
        manifest = json.loads(disk.manifest())
        self.__dict__.update(_disk=disk, _manifest=manifest, _splits={})
        nodes, edges, files = manifest["nodes"], manifest["edges"], {entry["name"]: entry for entry in manifest["files"]}
        if nodes["features"]:
            self.x = DiskColumn(disk, "node-features", (nodes["count"], nodes["features"]["dim"]), torch.float32)
        self.edge_index = DiskEdges(disk, nodes["count"], edges["count"])
        for name, called in _NAMES.items():
            if name not in files:
                continue
            entry, kind = files[name], nodes["labels"]["kind"] if name == "node-labels" else None
            dtype = {"classes": torch.int64, "multilabel": torch.float32}.get(kind, _TORCH[entry["dtype"]])
            shape = (entry["rows"], ) if entry["columns"] == 1 else (entry["rows"], entry["columns"])
            self[called] = DiskColumn(disk, name, shape, dtype, labels=kind)

    @property
    def num_nodes(self) -> int:
        return self.__dict__["_manifest"]["nodes"]["count"] if "_manifest" in self.__dict__ else super().num_nodes

    @num_nodes.setter
    def num_nodes(self, count):
        Data.num_nodes.fset(self, count)

    @property
    def num_edges(self) -> int:
        return self.__dict__["_manifest"]["edges"]["count"] if "_manifest" in self.__dict__ else super().num_edges

    @property
    def num_node_features(self) -> int:
        return self.x.shape[1] if "x" in self else 0

    num_features = num_node_features

    @property
    def num_classes(self) -> int:
        """Classes of the labels."""
        labels = self._manifest["nodes"]["labels"]
        return labels["classes"] if labels else 0

    def split(self, name: str) -> Tensor:
        """The nodes of a split ("train", "valid", "test"), ascending."""
        if name not in self._splits:
            if not self._manifest["splits"] or self._manifest["splits"]["over"] != "nodes":
                raise AttributeError(f"{self._disk.directory} has no splits of its nodes")
            array = np.asarray(self._disk.read(f"split-{name}")).astype(np.int64)
            self._splits[name] = torch.from_numpy(array)
        return self._splits[name]

    def mask(self, name: str) -> Tensor:
        """The same as a mask of all nodes."""
        mask = torch.zeros(self.num_nodes, dtype=torch.bool)
        mask[self.split(name)] = True
        return mask

    train_idx = property(lambda self: self.split("train"))
    val_idx = property(lambda self: self.split("valid"))
    test_idx = property(lambda self: self.split("test"))
    train_mask = property(lambda self: self.mask("train"))
    val_mask = property(lambda self: self.mask("valid"))
    test_mask = property(lambda self: self.mask("test"))

    def is_node_attr(self, key: str) -> bool:
        value = self[key]
        if isinstance(value, DiskColumn):
            return value._name.startswith("node-")
        return not isinstance(value, DiskEdges) and super().is_node_attr(key)

    def is_edge_attr(self, key: str) -> bool:
        value = self[key]
        if isinstance(value, DiskColumn):
            return value._name.startswith("edge-")
        return isinstance(value, DiskEdges) or super().is_edge_attr(key)

    def load(self) -> Data:
        """Everything in memory, as a plain `Data`."""
        data = Data()
        for key, value in self._store.items():
            data[key] = value.load() if isinstance(value, (DiskColumn, DiskEdges)) else value
        for name, called in (("train", "train_mask"), ("valid", "val_mask"), ("test", "test_mask")):
            if self._manifest["splits"] and self._manifest["splits"]["over"] == "nodes":
                data[called] = self.mask(name)
        data.num_nodes = self.num_nodes
        return data


def from_pyg(data: Data, path, memory=None, overwrite: bool = False) -> DiskData:
    """Writes a `Data` as a dataset, and opens it. Edges are then sorted by target: `edge_index` of the result has another order.

    It takes `x`, `y`, `edge_index`, `edge_attr`, `edge_weight`, `edge_time`, and splits by `train_mask`, `val_mask` and `test_mask`.
    """
    with tempfile.TemporaryDirectory(dir=os.path.dirname(os.path.abspath(path))) as folder:
        request: Dict[str, Any] = {"format": "npy", "nodes": data.num_nodes, "as_stored": True, "allow_nan": True}

        def save(flag: str, value: Optional[Tensor], dtype=None):
            if value is not None:
                array = np.ascontiguousarray(value.detach().cpu().numpy())
                request[flag] = os.path.join(folder, flag + ".npy")
                np.save(request[flag], array if dtype is None else array.astype(dtype))

        save("edges", data.edge_index, np.int64)
        x = data.get("x")
        if x is not None and x.dtype in (torch.bfloat16, torch.float16):
            request["dtype"] = "bf16" if x.dtype == torch.bfloat16 else "f16"
        save("features", None if x is None else x.float())
        y = data.get("y")
        save("labels", None if y is None else (y.view(-1) if y.dim() == 2 and y.size(1) == 1 else y))
        for name, flag in (("train_mask", "train"), ("val_mask", "valid"), ("test_mask", "test")):
            mask = data.get(name)
            if mask is not None:
                save(flag, (mask if mask.dim() == 1 else mask[:, 0]).nonzero().view(-1), np.int64)
        for name, flag in (("edge_attr", "edge_features"), ("edge_weight", "edge_weights"), ("edge_time", "edge_times")):
            value = data.get(name)
            if value is not None and name == "edge_attr" and value.dim() == 1:
                value = value.view(-1, 1)
            save(flag, value)
        disk = _esker.import_(os.fspath(path), json.dumps(request), bytes_of(memory), overwrite)
    return DiskData(disk)


#: Keywords of the engine, and their defaults.
ENGINE = dict(memory=None, strategy=None, seed=None, epochs=None, device=None, rank=0, world_size=1, threads=None, scratch=None, prepared=None,
              disk_budget=None, epochs_sampled=None)


def take_engine(kwargs: Dict[str, Any]) -> Dict[str, Any]:
    """Takes the engine's keywords out of others."""
    return {name: kwargs.pop(name, usual) for name, usual in ENGINE.items()}


class DiskSampler:
    """Stands where PyTorch Geometric has a sampler. The engine samples."""

    edge_permutation = None

    def __init__(self, num_neighbors):
        from torch_geometric.sampler import NumNeighbors
        self.num_neighbors = num_neighbors if isinstance(num_neighbors, NumNeighbors) else NumNeighbors(num_neighbors)

    def sample_from_nodes(self, *_):
        raise RuntimeError("batches of a dataset on disk come from the engine; iterate over the loader, or call it with indices")

    sample_from_edges = sample_from_nodes


class Feed:
    """Brings the batches of a loader from the engine: nodes."""

    def __init__(self, loader, data: DiskData, num_neighbors: List[int], settings: Dict[str, Any]):
        # The loader owns the feed.
        self._loader = weakref.ref(loader)
        self.data, self.num_neighbors, self.settings = data, list(num_neighbors), settings
        self.planned, self.engine, self.order, self._single = None, None, None, None

    def __getstate__(self):
        return {**self.__dict__, "_loader": None, "_single": None}

    @property
    def loader(self):
        return self._loader()

    def open(self, seeds: Optional[Tensor], batch_size: int, shuffle: bool, drop_last: bool) -> None:
        """Settles what the engine is asked for. Nothing is opened yet."""
        settings = self.settings
        self.planned = planned_order(settings["seed"], settings["epochs"], shuffle, drop_last, settings["rank"], settings["world_size"], settings["strategy"])
        self.engine = self._engine(seeds, batch_size, self.planned, settings["strategy"])
        self.order = Order(self.planned)

    def _engine(self, seeds, batch_size, planned, strategy) -> Engine:
        columns = [value._name for value in self.data._store.values() if isinstance(value, DiskColumn) and value._name != "node-features"]
        seeds = None if seeds is None else _ids(seeds.cpu().numpy())
        batches = max(1, -(-(self.data.num_nodes if seeds is None else len(seeds)) // batch_size))
        settings = {name: self.settings[name] for name in ("memory", "threads", "scratch", "prepared", "disk_budget", "epochs_sampled")}
        return Engine(self.data._disk, seeds, self.num_neighbors, batch_size, planned=planned, epoch_batches=batches, strategy=strategy,
                      features="x" in self.data, columns=columns, **settings)

    def prepare(self) -> List[str]:
        return self.engine.prepare()

    def stats(self) -> Dict[str, Any]:
        return self.engine.stats()

    def set_epoch(self, epoch: int) -> None:
        self.order.epoch, self.order.batch, self.order.resumes = epoch, 0, False

    def length(self) -> Optional[int]:
        return self.engine.batches_of(self.order.epoch) if self.planned else None

    def iterate(self) -> Iterator[Data]:
        if self.planned:
            return _Batches(self, planned_epoch(self.engine, self.order))
        return _Batches(self, self._given_epoch())

    def _given_epoch(self):
        """An epoch in the order of `DataLoader`: it is drawn now, as `DataLoader` draws it."""
        order, loader = self.order, self.loader
        if not (order.resumes and order.given):
            index = iter(loader._index_sampler)
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item())
            batches = [_indices(batch) for batch in index]
            items = np.concatenate(batches) if batches else np.zeros(0, dtype=np.int64)
            order.given = (seed, items, np.array([len(batch) for batch in batches], dtype=np.int64))
            order.batch = 0
        order.resumes = False
        seed, items, counts = order.given
        if len(counts) == 0:
            return iter(())
        busy = self.engine.busy and self.engine.busy()
        engine = self.engine if busy is None or busy.done else self.engine.clone()
        if counts.max() > engine.asked["batch"]:
            engine.close()
            engine.asked["batch"] = int(counts.max())
        engine.start_given(seed, items, counts, order.batch)

        def finished():
            engine.end()
            order.epoch, order.batch, order.given = order.epoch + 1, 0, None

        return Counted(Epoch(engine, order.epoch, order.batch, len(counts), finished), order)

    def call(self, index) -> Data:
        """One batch of these indices, beside any iteration."""
        index = torch.as_tensor(index).view(-1)
        if index.dtype == torch.bool:
            index = index.nonzero().view(-1)
        if self._single is None:
            seeds = self.loader.input_data.node
            self._single = self._engine(seeds, max(1, index.numel()), None, "ginex")
        if index.numel() > self._single.asked["batch"]:
            self._single.close()
            self._single.asked["batch"] = index.numel()
        seed = int(torch.empty((), dtype=torch.int64).random_())
        self._single.start_given(seed, _ids(index.numpy()), _ids([index.numel()]), 0)
        try:
            return self.finish(self.output(self._single.next()))
        finally:
            self._single.end()

    def output(self, found):
        """What a sampler gives, with the rows beside it."""
        loader = self.loader
        index = torch.from_numpy(found.input_id)
        inputs = loader.input_data[index]
        out = SamplerOutput(
            node=torch.from_numpy(found.n_id), row=torch.from_numpy(found.edge_index[0]), col=torch.from_numpy(found.edge_index[1]),
            edge=torch.from_numpy(found.e_id), batch=None, num_sampled_nodes=found.num_sampled_nodes,
            num_sampled_edges=found.num_sampled_edges, metadata=(inputs.input_id, inputs.time))
        return out, found

    def finish(self, pair) -> Data:
        """The batch that a sampler's output becomes."""
        (out, found), loader = pair, self.loader
        sampled = (out.node, out.edge)
        if loader.transform_sampler_output:
            out = loader.transform_sampler_output(out)
        data = self.join(out, found, out.node is sampled[0] and out.edge is sampled[1])
        self.add_metadata(data, out)
        if self.settings["device"] is not None:
            data = data.to(self.settings["device"], non_blocking=True)
        elif loader.pin_memory and torch.cuda.is_available():
            data = data.pin_memory()
        return data if loader.transform is None else loader.transform(data)

    def join(self, out: SamplerOutput, found, has_rows: bool) -> Data:
        """Nodes, edges and rows of a batch."""
        data, source = Data(), self.data
        for key, value in source._store.items():
            if isinstance(value, DiskEdges):
                data.edge_index = torch.stack([out.row, out.col]) if not has_rows else torch.from_numpy(found.edge_index)
            elif isinstance(value, DiskColumn):
                data[key] = self.rows(value, found) if has_rows else value.gather(out.node if value._name.startswith("node-") else out.edge)
            elif key == "num_nodes":
                continue
            elif isinstance(value, (Tensor, np.ndarray)) and source.is_node_attr(key):
                data[key] = torch.as_tensor(value[out.node.numpy()] if isinstance(value, np.ndarray) else value[out.node.to(value.device)])
            elif isinstance(value, (Tensor, np.ndarray)) and source.is_edge_attr(key):
                data[key] = torch.as_tensor(value[out.edge.numpy()] if isinstance(value, np.ndarray) else value[out.edge.to(value.device)])
            else:
                data[key] = value
        if "num_nodes" in source._store or not any(source.is_node_attr(key) for key in source._store):
            data.num_nodes = out.node.numel()
        if "n_id" not in data:
            data.n_id = out.node
        if "e_id" not in data:
            data.e_id = out.edge
        data.num_sampled_nodes, data.num_sampled_edges = out.num_sampled_nodes, out.num_sampled_edges
        return data

    def rows(self, column: DiskColumn, found) -> Tensor:
        if column._name == "node-features":
            return torch.from_numpy(found.x)
        _, array, dtype = found.columns[column._name]
        return column._typed(array, dtype)

    def add_metadata(self, data: Data, out: SamplerOutput) -> None:
        data.input_id = out.metadata[0]
        if out.metadata[1] is not None:
            data.seed_time = out.metadata[1]
        data.batch_size = out.metadata[0].size(0)


class LinkFeed(Feed):
    """The same for links. Negatives of some batches are drawn ahead, so that their plans span them."""

    def open_links(self, batch_size: int, shuffle: bool, drop_last: bool) -> None:
        if self.settings["seed"] is not None:
            raise ValueError("LinkNeighborLoader plans each epoch when it begins; leave seed= out, and use torch.manual_seed")
        amount = self.loader.neg_sampling.amount if self.loader.neg_sampling else 0
        most = int(2 * batch_size * (1 + np.ceil(amount)))
        self.seeds_of_link = int(2 * (1 + np.ceil(amount)))
        self.open(None, most, shuffle, drop_last)

    def iterate(self) -> Iterator[Data]:
        loader, order = self.loader, self.order
        if order.resumes and order.given:
            seed, items, counts = order.given
            batches = np.split(items, np.cumsum(counts)[:-1])
        else:
            index = iter(loader._index_sampler)
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item())
            batches = [_indices(batch) for batch in index]
            items = np.concatenate(batches) if batches else np.zeros(0, dtype=np.int64)
            order.given, order.batch = (seed, items, np.array([len(batch) for batch in batches])), 0
        order.resumes = False
        return _Batches(self, self._chunks(seed, batches, order))

    def _chunks(self, seed: int, batches: List[np.ndarray], order: Order):
        """The batches of an epoch, some thousand planned at a time."""
        busy = self.engine.busy and self.engine.busy()
        engine = self.engine if busy is None or busy.done else self.engine.clone()
        at = order.batch
        # Chunks begin at the same batches wherever an iteration begins: their draws depend on it.
        planned = max(1, _PLANNED_SEEDS // (max(map(len, batches), default=1) * self.seeds_of_link))
        while at < len(batches):
            begin = at - at % planned
            chunk = range(begin, min(begin + planned, len(batches)))
            seeds = [self.seeds_of(seed, number, batches[number]) for number in chunk]
            counts = np.array([len(nodes) for nodes in seeds])
            if counts.max() > engine.asked["batch"]:
                engine.close()
                engine.asked["batch"] = int(counts.max())
            engine.start_given(seed ^ begin, np.concatenate(seeds), counts, at - begin)
            for found in Epoch(engine, order.epoch, at - begin, len(seeds), engine.end):
                at += 1
                order.batch = at
                yield seed, at - 1, batches[at - 1], found
        order.epoch, order.batch, order.given = order.epoch + 1, 0, None

    def _sample(self, seed: int, number: int, index: np.ndarray, sample) -> SamplerOutput:
        """PyTorch Geometric's links, whose negatives depend on the epoch and the batch alone."""
        with torch.random.fork_rng(devices=[]):
            # Not `torch.manual_seed`, which reseeds other devices, too.
            torch.default_generator.manual_seed((seed + number * 0x9E3779B97F4A7C15) % (1 << 63))
            return edge_sample(self.loader.input_data[torch.from_numpy(index)], sample, self.data.num_nodes, False, None, self.loader.neg_sampling)

    def seeds_of(self, seed: int, number: int, index: np.ndarray) -> np.ndarray:
        found: List[np.ndarray] = []

        def record(nodes, _):
            found.append(nodes.numpy())
            raise _Recorded

        try:
            self._sample(seed, number, index, record)
        except _Recorded:
            pass
        return found[0]

    def output(self, numbered):
        seed, number, index, found = numbered

        def sample(_, __):
            return SamplerOutput(
                node=torch.from_numpy(found.n_id), row=torch.from_numpy(found.edge_index[0]), col=torch.from_numpy(found.edge_index[1]),
                edge=torch.from_numpy(found.e_id), batch=None, num_sampled_nodes=found.num_sampled_nodes,
                num_sampled_edges=found.num_sampled_edges)

        return self._sample(seed, number, index, sample), found

    def call(self, index) -> Data:
        index = torch.as_tensor(index).view(-1).numpy()
        seed = int(torch.empty((), dtype=torch.int64).random_())
        nodes = self.seeds_of(seed, 0, index)
        single = self._engine(None, len(nodes), None, "ginex")
        single.start_given(seed, nodes, _ids([len(nodes)]), 0)
        try:
            return self.finish(self.output((seed, 0, index, single.next())))
        finally:
            single.close()

    def add_metadata(self, data: Data, out: SamplerOutput) -> None:
        loader, metadata = self.loader, out.metadata
        data.input_id = metadata[0]
        if loader.neg_sampling is None or loader.neg_sampling.is_binary():
            data.edge_label_index = metadata[1]
            if metadata[2] is not None:
                data.edge_label = metadata[2]
        else:
            data.src_index, data.dst_pos_index, data.dst_neg_index = metadata[1:4]


def _indices(batch) -> np.ndarray:
    """The indices of a batch, which may be numbered (`esker.draws`)."""
    return np.asarray(getattr(batch, "index", batch) if not isinstance(batch, list) else batch, dtype=np.int64).reshape(-1)


class _Recorded(Exception):
    """The seeds of a batch are known."""


class _Batches:
    """Batches of an epoch."""

    def __init__(self, feed: Feed, epoch):
        self._feed, self._loader, self._epoch = feed, feed.loader, epoch

    def __iter__(self):
        return self

    def __next__(self) -> Data:
        return self._feed.finish(self._feed.output(next(self._epoch)))


def unsupported(settings: Dict[str, Any]) -> None:
    """Refuses options that the engine does not sample."""
    usual = dict(replace=False, disjoint=False, time_attr=None, weight_attr=None, input_time=None, edge_label_time=None)
    asked = [name for name, value in usual.items() if settings.get(name, value) is not value]
    if settings.get("subgraph_type", "directional") not in ("directional", ) and getattr(settings["subgraph_type"], "value", settings["subgraph_type"]) != "directional":
        asked.append("subgraph_type")
    if asked:
        raise NotImplementedError(f"{', '.join(asked)}: the engine samples plain neighbourhoods; load the topology for these "
                                  "(data = esker.open(path).load() or esker.spill(data, directory)), or leave them out")


class DiskMixin:
    """What loaders of a dataset on disk do themselves. For other data it is not there."""

    _feed: Optional[Feed] = None

    def __iter__(self):
        if self._feed is None:
            return super().__iter__()
        return self._feed.iterate()

    def __len__(self) -> int:
        length = self._feed.length() if self._feed is not None else None
        return super().__len__() if length is None else length

    def __call__(self, index):
        return super().__call__(index) if self._feed is None else self._feed.call(index)

    def __setstate__(self, state):
        self.__dict__.update(state)
        if self._feed is not None:
            # A copy of a loader has a feed of its own; that of the original stays with it.
            self._feed = copy.copy(self._feed)
            self._feed._loader = weakref.ref(self)

    def _disk_feed(self) -> Feed:
        if self._feed is None:
            raise TypeError("this loader has its data in memory; open a dataset with esker.open to load batches from disk")
        return self._feed

    def prepare(self) -> List[str]:
        """Does the work before the first batch now. Returns how memory and disk are used, as readable lines."""
        return self._disk_feed().prepare()

    def stats(self) -> Dict[str, Any]:
        """Counters of the iteration, and how memory is divided, line by line."""
        return self._disk_feed().stats()

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch, from its start."""
        self._disk_feed().set_epoch(epoch)

    def state_dict(self) -> Dict[str, Any]:
        """Where the next batch is (torchdata's protocol). It may be taken within an epoch. A loader of data in memory has no state."""
        # Lightning asks every loader that has this method.
        return {} if self._feed is None else self._feed.order.state_dict()

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """The next iteration goes on where `state_dict` was taken."""
        if self._feed is not None or state:
            self._disk_feed().order.load_state_dict(state)

    def close(self) -> None:
        """Returns the memory of the engine. The next iteration opens it again."""
        self._disk_feed().engine.close()


def _batching(kwargs: Dict[str, Any], planned: bool) -> Tuple[int, bool, bool]:
    """Batch size, shuffle and drop_last of a `DataLoader`'s arguments."""
    if planned:
        given = [name for name in ("sampler", "batch_sampler", "generator") if kwargs.get(name) is not None]
        if given:
            raise ValueError(f"{', '.join(given)} gives an order, and seed= plans Esker's own; leave one out")
    batch_size = kwargs.get("batch_size", 1)
    sampler = kwargs.get("batch_sampler")
    if sampler is not None:
        batch_size = getattr(sampler, "batch_size", None) or max((len(batch) for batch in sampler), default=1) if hasattr(sampler, "__len__") else 1
    return batch_size or 1, bool(kwargs.get("shuffle")), bool(kwargs.get("drop_last"))


def init_nodes(loader, data: DiskData, num_neighbors, settings: Dict[str, Any], kwargs: Dict[str, Any]) -> None:
    """Makes `loader` a loader of nodes from disk. `settings` are arguments of `NeighborLoader` by name, and `kwargs` all others."""
    unsupported(settings)
    engine, sampler = take_engine(kwargs), DiskSampler(num_neighbors)
    batching = _batching(kwargs, engine["seed"] is not None)
    kwargs.pop("num_workers", None)  # Threads of the engine take their place.
    for name in ("persistent_workers", "prefetch_factor", "multiprocessing_context", "timeout", "worker_init_fn"):
        kwargs.pop(name, None)
    NodeLoader.__init__(
        loader, data=data, node_sampler=sampler, input_nodes=settings.get("input_nodes"), transform=settings.get("transform"),
        transform_sampler_output=settings.get("transform_sampler_output"), filter_per_worker=settings.get("filter_per_worker"), **kwargs)
    loader._feed = Feed(loader, data, sampler.num_neighbors.values, engine)
    seeds = None if settings.get("input_nodes") is None else loader.input_data.node
    loader._feed.open(seeds, *batching)


def init_links(loader, data: DiskData, num_neighbors, settings: Dict[str, Any], kwargs: Dict[str, Any]) -> None:
    """The same for links."""
    unsupported(settings)
    engine, sampler = take_engine(kwargs), DiskSampler(num_neighbors)
    batching = _batching(kwargs, False)
    kwargs.pop("num_workers", None)
    for name in ("persistent_workers", "prefetch_factor", "multiprocessing_context", "timeout", "worker_init_fn"):
        kwargs.pop(name, None)
    edges = settings.get("edge_label_index")
    if edges is None:  # All edges: their ends are in memory.
        edges = data.edge_index.load()
    names = ("edge_label", "neg_sampling", "neg_sampling_ratio", "transform", "transform_sampler_output", "filter_per_worker")
    LinkLoader.__init__(loader, data=data, link_sampler=sampler, edge_label_index=edges, **{name: settings.get(name) for name in names}, **kwargs)
    loader._feed = LinkFeed(loader, data, sampler.num_neighbors.values, engine)
    loader._feed.open_links(*batching)

