from esker.disk import DiskData as DiskData
from esker.disk import from_pyg as from_pyg
from esker.engine import evaluate as evaluate
from esker.engine import generate as generate
from esker.engine import import_ as import_
from esker.engine import memory as memory
from esker.engine import numpy_loader as numpy_loader
from esker.engine import open as open
from esker.engine import predict as predict
from esker.engine import set_memory as set_memory
from esker.engine import train as train
from esker.loader import LinkNeighborLoader as LinkNeighborLoader
from esker.loader import NeighborLoader as NeighborLoader
from esker.sampler import NeighborSampler as NeighborSampler
from esker.spilled import spill as spill
from esker.stores import FeatureStore as FeatureStore
from esker.stores import GraphStore as GraphStore

__version__: str
