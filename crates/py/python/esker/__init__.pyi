from esker.loader import LinkNeighborLoader as LinkNeighborLoader
from esker.loader import NeighborLoader as NeighborLoader
from esker.sampler import NeighborSampler as NeighborSampler

__version__: str
__all__ = ["LinkNeighborLoader", "NeighborLoader", "NeighborSampler", "__version__"]
