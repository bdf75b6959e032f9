"""From Cora to a graph shaped like ogbn-papers100M, with the same PyTorch Geometric model: only `data` changes.

    python tutorial.py                        # a papers-shaped graph of 100 thousand nodes, features 49 MiB, in 128 MiB
    python tutorial.py --scale 0.1 --memory 1GiB
"""

import argparse
import os
import time

import torch
from torch_geometric.nn import GraphSAGE

import esker

parser = argparse.ArgumentParser()
parser.add_argument("--cora", default=None, help="directory of Planetoid's Cora; left out if there is none")
parser.add_argument("--work", default="esker-tutorial", help="where datasets go")
parser.add_argument("--scale", type=float, default=0.0009)
parser.add_argument("--memory", default="128MiB")
parser.add_argument("--epochs", type=int, default=2)
options = parser.parse_args()


def train(data, epochs, batch_size, **engine):
    """Trains GraphSAGE on sampled neighbourhoods, and returns its accuracy on the first test nodes."""
    torch.manual_seed(0)
    model = GraphSAGE(data.num_features, 64, num_layers=2, out_channels=data.num_classes, dropout=0.3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    settings = dict(num_neighbors=[10, 10], batch_size=batch_size, scratch=options.work, prepared=os.path.join(options.work, "packed"), **engine)
    loader = esker.NeighborLoader(data, input_nodes=data.train_idx, shuffle=True, seed=1, epochs=epochs, **settings)
    for note in loader.prepare():
        print("   ", note)
    for epoch in range(epochs):
        started, loss_sum = time.time(), 0.0
        for batch in loader:
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index)[:batch.batch_size]
            loss = torch.nn.functional.cross_entropy(out, batch.y[:batch.batch_size])
            loss.backward()
            optimizer.step()
            loss_sum += loss.item()
        print(f"    epoch {epoch}: loss {loss_sum / len(loader):.3f}, {time.time() - started:.1f} s")
    loader.close()  # Its memory is for the next loader.
    settings["prepared"] = None
    right = seen = 0
    model.eval()
    for batch in esker.NeighborLoader(data, input_nodes=data.test_idx[:2000], **{**settings, "strategy": "ginex"}):
        with torch.no_grad():
            out = model(batch.x, batch.edge_index)[:batch.batch_size].argmax(1)
        right, seen = right + (out == batch.y[:batch.batch_size]).sum().item(), seen + batch.batch_size
    return right / seen


os.makedirs(options.work, exist_ok=True)
if options.cora:
    print("Cora, in memory:")
    cora = esker.import_(os.path.join(options.work, "cora"), "planetoid", source=options.cora, name="cora", overwrite=True)
    print(f"    accuracy {train(cora, 20, 32, strategy='memory'):.3f}")
print("a graph shaped like papers100M, from disk:")
papers = esker.generate(os.path.join(options.work, "papers"), preset="papers100m", scale=options.scale, overwrite=True)
size = papers.x.shape.numel() * 4 / 2**20
print(f"    {papers.num_nodes} nodes, {papers.num_edges} edges, {size:.0f} MiB of features")
print(f"    accuracy {train(papers, options.epochs, 200, strategy='diskgnn', memory=options.memory):.3f}")
