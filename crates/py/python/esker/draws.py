"""Which draws a batch has: those of its number in its epoch, and of the epoch's random seed.

A worker gets a batch as a list of indices. Here it gets the number of the batch as well, so that samples depend neither on how many
workers there are nor on which of them has which batch. The seed of an epoch is the one that torch's `DataLoader` draws when
iteration starts, so that `torch.manual_seed` repeats an epoch.
"""

from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Iterator, NamedTuple, Optional

import torch

_WORD = (1 << 64) - 1


class Draws(NamedTuple):
    """What every random number of a batch is a function of."""

    seed: int
    epoch: int
    batch: int

    def generator(self) -> torch.Generator:
        """Random numbers of torch for this batch, apart from those of the program."""
        word = self.seed & _WORD
        for number in (self.epoch, self.batch):
            # The last steps of SplitMix64: neighbouring batches get unrelated numbers.
            word = (word ^ number) * 0x9E3779B97F4A7C15 & _WORD
            word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
            word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
            word ^= word >> 31
        generator = torch.Generator()
        generator.manual_seed(word >> 1)
        return generator


_current: ContextVar[Optional[Draws]] = ContextVar("esker_draws", default=None)


def current() -> Draws:
    """The draws of the batch that is being made; outside a loader's iteration, new ones from torch's generator."""
    draws = _current.get()
    if draws is None:
        draws = Draws(int(torch.empty((), dtype=torch.int64).random_()), 0, 0)
    return draws


@contextmanager
def of_batch(draws: Draws) -> Iterator[None]:
    """Makes these the current draws."""
    token = _current.set(draws)
    try:
        yield
    finally:
        _current.reset(token)


class NumberedBatch(NamedTuple):
    """Indices of a batch, and which batch it is."""

    index: Any
    epoch: int
    batch: int
    # In a worker the seed is that of the worker.
    seed: Optional[int]

    def draws(self) -> Draws:
        """The draws of this batch."""
        seed = self.seed
        if seed is None:
            worker = torch.utils.data.get_worker_info()
            seed = worker.seed - worker.id
        return Draws(seed & _WORD, self.epoch, self.batch)


class NumberedBatches:
    """A batch sampler that numbers what another one gives."""

    def __init__(self, batches: Any):
        self.batches = batches
        self.seed: Optional[int] = None
        self.epochs = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[NumberedBatch]:
        # A generator starts when its first batch is asked for: an iteration that never began is no epoch.
        epoch = self.epochs
        self.epochs += 1
        for batch, index in enumerate(self.batches):
            yield NumberedBatch(index, epoch, batch, self.seed)


class Indices:
    """The indices below a number, as a dataset that hands on what it is asked for."""

    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Any) -> Any:
        return index

    def __getitems__(self, index: Any) -> Any:
        return index
