"""The native half of `esker`."""

from typing import Any, List, Mapping, Optional, Tuple

__version__: str

class Column:
    """A tensor until somebody takes it over, once: by `torch.from_dlpack` or `numpy.from_dlpack`."""

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: Optional[Tuple[int, int]] = None,
        dl_device: Optional[Tuple[int, int]] = None,
        copy: Optional[bool] = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> Tuple[int, int]: ...

class Hops:
    """Samples neighbourhoods of a graph that Python holds as `colptr`, `row` and `perm`."""

    def __init__(self, tensors: Mapping[str, Any], options: Mapping[str, Any]) -> None: ...
    def sample(
        self, seeds: Any, seed_time: Any, seed: int, epoch: int, batch: int
    ) -> Tuple[Column, Column, Column, Optional[Column], List[int], List[int]]: ...

class Rows:
    """Gathers rows of tensors into memory that is used again when the result is dropped."""

    def __init__(self) -> None: ...
    def gather(self, source: Any, row_bytes: int, index: Any, threads: int) -> Column: ...

def csc(row: Any, col: Any, nodes: int) -> Tuple[Column, Column, Column]: ...
