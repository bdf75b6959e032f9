"""Batches whose rows come from Esker's engine, without torch: datasets on disk, loaders of NumPy arrays, and the verbs of the program.

What torch and PyTorch Geometric add is in `esker.disk`.
"""

import json
import os
import tempfile
import threading
import weakref
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from esker import _esker

Size = Union[int, str]

#: Strategies that yield exactly the sampled batches. All of them yield the same ones.
STRATEGIES = ("memory", "mmap", "ginex", "diskgnn", "esker")
#: Those that use all the memory that they are given.
_GREEDY = ("ginex", "diskgnn", "esker")
#: More epochs than anybody trains.
_ENDLESS = 1 << 31

_lock = threading.Lock()
# Engines are opened one after the other: each looks at what the others left.
_opening = threading.RLock()
_process_promise: Optional["_esker.Promise"] = None
_engines: "weakref.WeakSet[Engine]" = weakref.WeakSet()


def bytes_of(size: Optional[Size]) -> Optional[int]:
    """Bytes of a size: a number of bytes, or text such as "4GiB".

    >>> bytes_of("2KiB"), bytes_of(5)
    (2048, 5)
    """
    return _esker.parse_bytes(size) if isinstance(size, str) else size


def _after_fork() -> None:
    """New locks: a thread that is not in this process may hold the old ones."""
    global _lock, _opening
    _lock, _opening = threading.Lock(), threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


def _promise() -> "_esker.Promise":
    global _process_promise
    with _lock:
        if _process_promise is None:
            _process_promise = _esker.Promise()
        return _process_promise


def set_memory(size: Size) -> None:
    """Allows all loaders of this process together to use so much memory.

    The default is four fifths of what the machine, or the cgroup of the process, has available. What Python, torch and the
    batches that you keep take is yours: subtract it.
    """
    _promise().allow(bytes_of(size))


def memory() -> Tuple[int, int]:
    """Bytes that all loaders of this process together may use, and what they have taken."""
    return _promise().bytes


def generate(path, preset: Optional[str] = None, scale: float = 1.0, memory: Optional[Size] = None, overwrite: bool = False, **shape):
    """Generates a graph in the directory `path`, as `esker generate` does, and opens it.

    `preset` names the shape of a real graph, such as "papers100m", and `scale` multiplies its nodes. Settings are those of the
    program: `nodes`, `degree`, `dim`, `dtype`, `classes`, `homophily`, `signal`, `train`, `valid`, `test`, `seed`, ...
    """
    _esker.generate_(os.fspath(path), preset, scale, json.dumps(shape), bytes_of(memory), overwrite)
    return open(path)


def import_(path, format: str, memory: Optional[Size] = None, overwrite: bool = False, **request):
    """Imports a dataset of another format to the directory `path`, as `esker import` does, and opens it.

    Settings are those of the program. `source=` is the directory of formats that have a layout of their own
    (`esker import --from`); others take `edges=`, `features=`, `labels=`, `train=`, ...
    """
    request = {name: os.fspath(value) if hasattr(value, "__fspath__") else value for name, value in request.items()}
    _esker.import_(os.fspath(path), json.dumps({"format": format, **request}), bytes_of(memory), overwrite)
    return open(path)


def open(path):
    """Opens a dataset: as the `data` of PyTorch Geometric if that is installed (`esker.disk.DiskData`), else as it is."""
    try:
        from esker import disk
    except ImportError:
        return _esker.DiskDataset(os.fspath(path))
    return disk.DiskData(path)


def train(dataset, out, resume: bool = False, **settings) -> Dict[str, Any]:
    """Trains a model of Esker's own on the CPU, as `esker train` does, and returns the summary of the run.

    Settings are those of the program: `model="sage"`, `layers`, `hidden`, `fanout=[10, 10]`, `batch`, `epochs`, `lr`, `dropout`,
    `strategy`, `memory`, `seed`, ... `out` is the directory of the run. Ctrl-C saves it: continue with `resume=True`.
    """
    for name in ("memory", "disk_budget", "feature_cache", "neighbour_cache"):
        if name in settings:
            settings[name] = bytes_of(settings[name])
    for name in ("fanout", "eval_fanout"):
        if name in settings:
            given = settings[name] if isinstance(settings[name], (list, tuple)) else [settings[name]]
            settings[name] = ["all" if count in (-1, "all") else int(count) for count in given]
    return json.loads(_esker.train(_path_of(dataset), os.fspath(out), json.dumps(settings), resume))


def evaluate(run, split: str = "test", mode: Optional[str] = None, memory: Optional[Size] = None) -> Dict[str, Any]:
    """Evaluates the best model of a run on a split ("train", "valid", "test"), as `esker eval` does. `mode` is "sampled" or "full"."""
    return json.loads(_esker.evaluate(os.fspath(run), split, mode, bytes_of(memory)))


def predict(run, nodes=None, mode: Optional[str] = None, memory: Optional[Size] = None) -> Dict[str, np.ndarray]:
    """Predicts nodes (ascending; default: all) with the best model of a run: their classes, and values by class."""
    nodes = None if nodes is None else _ids(nodes)
    classes, values = _esker.predict(os.fspath(run), nodes, mode, bytes_of(memory))
    return {"classes": np.asarray(classes), "values": np.asarray(values)}


def _path_of(dataset) -> str:
    native = getattr(dataset, "_disk", dataset)
    return os.fspath(native.directory if isinstance(native, _esker.DiskDataset) else native)


def _ids(values) -> np.ndarray:
    return np.ascontiguousarray(values, dtype=np.int64).reshape(-1)


class Batch(NamedTuple):
    """A batch of NumPy arrays: what a PyTorch Geometric batch has, in its order."""

    n_id: np.ndarray
    edge_index: np.ndarray
    e_id: np.ndarray
    input_id: np.ndarray
    batch_size: int
    num_sampled_nodes: List[int]
    num_sampled_edges: List[int]
    x: Optional[np.ndarray]
    #: Other columns of the dataset by name, such as "node-labels".
    columns: Dict[str, Tuple[bool, np.ndarray, str]]


def _batch(native: "_esker.EngineBatch") -> Batch:
    items = np.asarray(native.items)
    columns = {name: (by_node, np.asarray(values), values.dtype) for name, by_node, values in native.columns}
    return Batch(
        n_id=np.asarray(native.n_id),
        edge_index=np.asarray(native.edge_index),
        e_id=None if native.e_id is None else np.asarray(native.e_id),
        input_id=items,
        batch_size=len(items),
        num_sampled_nodes=list(native.nodes_by_hop),
        num_sampled_edges=list(native.edges_by_hop),
        x=None if native.x is None else np.asarray(native.x),
        columns=columns,
    )


class Engine:
    """An engine that is opened when it is first needed, and again in another process. It is what every loader has inside."""

    def __init__(self, dataset, seeds, num_neighbors: Sequence[int], batch_size: int, *, planned: Optional[Dict[str, Any]] = None,
                 epoch_batches: int = 1, strategy: Optional[str] = None, memory: Optional[Size] = None, threads: Optional[int] = None,
                 features: bool = True, edge_ids: bool = True, columns: Sequence[str] = (), scratch=None, prepared=None,
                 disk_budget: Optional[Size] = None, epochs_sampled: Optional[int] = None):
        if strategy is not None and strategy not in STRATEGIES:
            raise ValueError(f"strategy={strategy!r} is not one of {', '.join(STRATEGIES)}; the others need Esker's own trainer")
        self.dataset, self.seeds, self.strategy, self.memory = dataset, seeds, strategy, bytes_of(memory)
        self.asked = dict(
            fanouts=[int(count) for count in num_neighbors], batch=int(batch_size), planned=planned, epoch_batches=int(epoch_batches),
            features=features, edge_ids=edge_ids, columns=list(columns), direction="incoming", threads=threads,
            scratch=os.fspath(scratch or tempfile.gettempdir()), prepared=None if prepared is None else os.path.abspath(prepared),
            disk_budget=bytes_of(disk_budget), epochs_sampled=epochs_sampled)
        self._reset()

    def _reset(self):
        self._native, self._process, self._at, self.busy, self.chosen = None, None, None, None, None

    def __getstate__(self):
        kept = dict(self.__dict__)
        for name in ("_native", "_process", "_at", "busy", "chosen"):
            kept.pop(name)
        return kept

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._reset()

    def clone(self) -> "Engine":
        """Another engine that is asked for the same."""
        other = Engine.__new__(Engine)
        other.__setstate__(self.__getstate__())
        return other

    def native(self) -> "_esker.EngineLoader":
        """The engine, opened. Memory is taken from the promise, if need be from engines that nobody iterates over."""
        with _opening:
            return self._opened()

    def _opened(self) -> "_esker.EngineLoader":
        if self._native is not None and self._process == os.getpid():
            return self._native
        self._reset()
        choices = [self.strategy] if self.strategy else ["memory", "ginex"]
        for choice in choices:
            while True:
                try:
                    self._native, self._process, self.chosen = self._open(choice), os.getpid(), choice
                    _engines.add(self)
                    return self._native
                except MemoryError:
                    idle = [engine for engine in list(_engines) if engine is not self and engine.is_idle()]
                    if idle:
                        idle[0].close()
                    elif choice == choices[-1]:
                        raise
                    else:
                        break

    def _open(self, strategy):
        allowed, taken = _promise().bytes
        left = max(0, allowed - taken)
        if self.memory is not None:
            shares = [self.memory]
        else:  # Of what is left, half: another loader may come.
            shares = [left // 2, None] if strategy in _GREEDY else [None]
        for share in shares:
            asked = json.dumps({**self.asked, "strategy": strategy, "memory": share})
            try:
                return _esker.EngineLoader(self.dataset, asked, self.seeds, _promise())
            except MemoryError as error:
                if share is not shares[-1]:
                    continue
                if self.memory is None or self.memory <= left:
                    raise
                raise MemoryError(
                    f"{error}\nAll loaders of this process together may take {allowed} bytes, and {taken} are taken: "
                    "esker.set_memory() allows more") from None

    def is_idle(self) -> bool:
        """Whether it holds memory and nobody iterates over it."""
        busy = self.busy and self.busy()
        return self._native is not None and self._process == os.getpid() and (busy is None or busy.done)

    def prepare(self) -> List[str]:
        """Does the work before the first batch. Returns how memory and disk are used, as readable lines."""
        return self._undisturbed(lambda native: native.prepare())

    def batches_of(self, epoch: int) -> int:
        return self.native().batches_of(epoch)

    def start(self, epoch: int, batch: int) -> None:
        """Continues at a batch of a planned order. What is ready is used if it is the next."""
        self.native()
        if self._at != (epoch, batch):
            self._at = None
            self._undisturbed(lambda native: native.start(epoch, batch))
            self._at = (epoch, batch)

    def start_given(self, seed: int, items: np.ndarray, counts: np.ndarray, batch: int) -> None:
        self._at = None
        self._undisturbed(lambda native: native.start_given(seed, _ids(items), _ids(counts), batch))

    def _undisturbed(self, work):
        """Work that may take long. If it is interrupted, the engine is opened again when it is needed: its request to stop cannot be
        withdrawn, and what it did on disk is found again."""
        try:
            return work(self.native())
        except BaseException:
            self.close()
            raise

    def next(self) -> Optional[Batch]:
        try:
            native = self._native.next()
        except BaseException:
            self.end()
            raise
        if native is not None and self._at is not None:
            self._at = (native.at[0], native.at[1] + 1)
        return None if native is None else _batch(native)

    def next_epoch(self) -> None:
        """The next batch is the first of the next epoch."""
        if self._at is not None:
            self._at = (self._at[0] + 1, 0)

    def end(self) -> None:
        self._at = None
        if self._native is not None and self._process == os.getpid():
            self._native.end()

    def close(self) -> None:
        """Returns all memory. The engine is opened again when it is needed."""
        if self._native is not None and self._process == os.getpid():
            self._native.close()
        self._reset()

    def stats(self) -> Dict[str, Any]:
        """Counters of the iteration, and how memory is divided."""
        if self._native is None or self._process != os.getpid():
            return {}
        text = self._native.stats()
        lines, smallest, taken = self._native.memory()
        found = json.loads(text) if text else {}
        return {**found, "strategy": self.chosen, "memory": dict(lines), "memory_bytes": taken, "smallest_bytes": smallest}


class Epoch:
    """The batches of an epoch, from one of them on. It ends its engine when it is dropped midway."""

    def __init__(self, engine: Engine, epoch: int, first: int, count: int, finished=None):
        self.engine, self.epoch, self.batch, self.count, self._finished = engine, epoch, first, count, finished
        self.done = first >= count
        engine.busy = weakref.ref(self)

    def __iter__(self):
        return self

    def __next__(self) -> Batch:
        if self.done:
            raise StopIteration
        try:
            found = self.engine.next()
        except BaseException:
            self.done = True
            raise
        if found is None:
            self.done = True
            raise RuntimeError(f"the batches ended before batch {self.batch} of {self.count}; another iteration began on this loader")
        self.batch += 1
        if self.batch == self.count:  # The next iteration is the next epoch, even if nobody asks for another batch of this one.
            self.done = True
            if self._finished:
                self._finished()
        return found

    def __del__(self):
        if not self.done:
            self.done = True
            try:
                self.engine.end()
            except Exception:  # At the end of the interpreter.
                pass


class Order:
    """The order of a loader, and where it is: what `state_dict` keeps."""

    def __init__(self, planned: Optional[Dict[str, Any]]):
        self.planned, self.epoch, self.batch, self.given = planned, 0, 0, None
        self.resumes = False

    def state_dict(self) -> Dict[str, Any]:
        """Where the next batch is, with the order of the epoch if it was given."""
        state = {"version": 1, "epoch": self.epoch, "batch": self.batch, "planned": self.planned}
        if self.given is not None:
            seed, items, counts = self.given
            state["given"] = {"seed": seed, "items": items.tolist(), "counts": counts.tolist()}
        return state

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        if state.get("version") != 1:
            raise ValueError(f"the state is of version {state.get('version')}, and this is version 1; start the epoch again")
        if state["planned"] != self.planned:
            raise ValueError(f"the state is of another order ({state['planned']}) than the loader's ({self.planned}); make the loader with that order")
        self.epoch, self.batch, self.resumes = state["epoch"], state["batch"], True
        given = state.get("given")
        self.given = given and (given["seed"], _ids(given["items"]), _ids(given["counts"]))


def planned_order(seed: Optional[int], epochs: Optional[int], shuffle: bool, drop_last: bool, rank: int, world_size: int,
                  strategy: Optional[str]) -> Optional[Dict[str, Any]]:
    """The order that is planned ahead; `None` without a seed."""
    if seed is None:
        if epochs is not None or world_size != 1:
            raise ValueError("epochs= and world_size= belong to an order that is planned ahead; give seed=, too")
        return None
    if epochs is None and strategy in ("diskgnn", "esker"):
        raise ValueError(f'strategy="{strategy}" packs all epochs before the first batch; give epochs=')
    return dict(seed=int(seed), epochs=_ENDLESS if epochs is None else int(epochs), shuffle=bool(shuffle), drop_last=bool(drop_last),
                rank=int(rank), world_size=int(world_size))


class NumpyLoader:
    """Batches of NumPy arrays, planned ahead. Each iteration is an epoch.

    >>> loader = numpy_loader("graph", [10, 5], batch_size=100, seed=1, epochs=2)  # doctest: +SKIP
    >>> for batch in loader:  # doctest: +SKIP
    ...     batch.x.shape, batch.edge_index.shape, batch.n_id[:batch.batch_size]
    """

    def __init__(self, dataset, num_neighbors, seeds=None, batch_size: int = 1, shuffle: bool = True, drop_last: bool = False, seed: int = 0,
                 epochs: Optional[int] = None, rank: int = 0, world_size: int = 1, strategy: Optional[str] = None, columns: Sequence[str] = (),
                 **engine):
        native = getattr(dataset, "_disk", dataset)
        native = native if isinstance(native, _esker.DiskDataset) else _esker.DiskDataset(os.fspath(dataset))
        order = planned_order(seed, epochs, shuffle, drop_last, rank, world_size, strategy)
        manifest = json.loads(native.manifest())
        engine.setdefault("features", manifest["nodes"]["features"] is not None)
        seeds = None if seeds is None else _ids(seeds)
        self.engine = Engine(native, seeds, num_neighbors, batch_size, planned=order, strategy=strategy, columns=columns, **engine)
        self.order = Order(order)

    def prepare(self) -> List[str]:
        return self.engine.prepare()

    def stats(self) -> Dict[str, Any]:
        return self.engine.stats()

    def set_epoch(self, epoch: int) -> None:
        self.order.epoch, self.order.batch, self.order.resumes = epoch, 0, False

    def state_dict(self) -> Dict[str, Any]:
        return self.order.state_dict()

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        self.order.load_state_dict(state)

    def close(self) -> None:
        self.engine.close()

    def __len__(self) -> int:
        return self.engine.batches_of(self.order.epoch)

    def __iter__(self) -> Iterator[Batch]:
        return planned_epoch(self.engine, self.order)


def planned_epoch(engine: Engine, order: Order) -> Iterator[Batch]:
    """The next epoch of a planned order, or what is left of it after `load_state_dict`."""
    if order.epoch >= order.planned["epochs"]:
        raise ValueError(f"epoch {order.epoch} is asked for, and the loader has epochs={order.planned['epochs']}; give more, or set_epoch")
    if not order.resumes:
        order.batch = 0
    order.resumes = False
    busy = engine.busy and engine.busy()
    if busy is not None and not busy.done:
        engine = engine.clone()
    epoch, first = order.epoch, order.batch
    engine.start(epoch, first)

    def finished():
        engine.next_epoch()
        order.epoch, order.batch = epoch + 1, 0

    return Counted(Epoch(engine, epoch, first, engine.batches_of(epoch), finished), order)


class Counted:
    """An epoch that keeps its loader's position."""

    def __init__(self, epoch: Epoch, order: Order):
        self.epoch, self.order = epoch, order

    def __iter__(self):
        return self

    def __next__(self):
        found = next(self.epoch)
        if not self.epoch.done:
            self.order.batch = self.epoch.batch
        return found

    def __len__(self):
        return self.epoch.count


def numpy_loader(dataset, num_neighbors, **settings) -> NumpyLoader:
    """A loader of NumPy arrays, for those who have no torch. See `NumpyLoader`."""
    return NumpyLoader(dataset, num_neighbors, **settings)
