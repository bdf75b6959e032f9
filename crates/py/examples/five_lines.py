import torch
from torch_geometric.data import Data
from esker import NeighborLoader  # was: from torch_geometric.loader import NeighborLoader

data = Data(x=torch.randn(1000, 16), edge_index=torch.randint(1000, (2, 10_000)))
for batch in NeighborLoader(data, num_neighbors=[10, 5], batch_size=250, shuffle=True):
    print(batch)
