#!/usr/bin/env python3
"""Trains PyG's SAGEConv or GATConv on the batch that `esker bench gpu --export DIR` wrote, on the GPU, and prints milliseconds
per step as JSON.

    gpu_step.py DIR --model sage --precision tf32

A step is forward, loss, backward and fused Adam. `device` is the time on the GPU, taken by events with the host far ahead;
`wall` is what a loop of steps takes from outside. Neighbours are given as PyG likes them best: edges sorted by target, and
for GraphSAGE also as a sparse matrix; the faster of the two counts."""
import argparse
import json
import statistics
import time
import warnings

warnings.filterwarnings("ignore")
import numpy as np
import torch
import torch.nn.functional as F
from torch_geometric import EdgeIndex
from torch_geometric.nn import GATConv, SAGEConv


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("batch")
    parser.add_argument("--model", choices=["sage", "gat"], default="sage")
    parser.add_argument("--precision", choices=["f32", "tf32"], default="f32")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = arguments.precision == "tf32"
    torch.manual_seed(1)
    device = torch.device("cuda")
    with open(f"{arguments.batch}/batch.json") as file:
        shape = json.load(file)
    rows, classes = shape["rows"], shape["classes"]
    offsets = np.fromfile(f"{arguments.batch}/offsets.u32", np.uint32).astype(np.int64)
    nbrs = np.fromfile(f"{arguments.batch}/nbrs.u32", np.uint32).astype(np.int64)
    layers = len(rows) - 1
    x = torch.randn(rows[0], shape["dim"], device=device)
    labels = torch.randint(classes, (rows[-1],), device=device)

    def edges(layer):
        """Sources and targets of a layer, on the host."""
        own = offsets[rows[1] - rows[layer + 1] :]
        sources = nbrs[own[0] : own[-1]] - (rows[0] - rows[layer])
        targets = np.repeat(np.arange(rows[layer + 1]), np.diff(own))
        return torch.from_numpy(np.stack([sources, targets]))

    host = [edges(layer).pin_memory() for layer in range(layers)]

    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            if arguments.model == "sage":
                widths = [shape["dim"]] + [arguments.hidden] * (layers - 1) + [classes]
                made = [SAGEConv(a, b) for a, b in zip(widths, widths[1:])]
            else:
                made = [GATConv(shape["dim"] if layer == 0 else 128, 32, heads=4) for layer in range(layers - 1)]
                made.append(GATConv(128, classes, heads=4, concat=False))
            self.layers = torch.nn.ModuleList(made)

        def forward(self, x, graphs):
            for layer, (convolution, graph) in enumerate(zip(self.layers, graphs)):
                targets = x[x.shape[0] - rows[layer + 1] :]
                x = convolution((x, targets), graph)
                if layer + 1 < layers:
                    x = F.relu(x) if arguments.model == "sage" else F.elu(x)
            return x

    def with_own(layer, edges):
        """GAT attends to the node itself; PyG adds self-loops only where inputs and outputs are the same nodes."""
        own = torch.arange(rows[layer + 1], device=device)
        return torch.cat([edges, torch.stack([own + rows[layer] - rows[layer + 1], own])], 1)

    def graphs(form):
        made = []
        for layer in range(layers):
            found = host[layer].to(device, non_blocking=True)
            if arguments.model == "gat":
                found = with_own(layer, found)
            if form == "sparse":
                found = EdgeIndex(found, sparse_size=(rows[layer], rows[layer + 1]), sort_order="col")
            made.append(found)
        return made

    def measure(form):
        network = Network().to(device)
        if arguments.model == "gat":
            for convolution in network.layers:
                convolution.add_self_loops = False
        optimizer = torch.optim.Adam(network.parameters(), lr=0.003, fused=True)

        def step():
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(network(x, graphs(form)), labels)
            loss.backward()
            optimizer.step()
            return loss

        for _ in range(5):
            step()
        torch.cuda.synchronize()
        wall, busy = [], []
        for _ in range(arguments.rounds):
            started = time.perf_counter()
            for _ in range(arguments.steps):
                loss = step()
            torch.cuda.synchronize()
            wall.append((time.perf_counter() - started) / arguments.steps * 1e3)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # About 60 ms, so that the host is ahead by the time the steps begin.
            torch.cuda._sleep(120_000_000)
            start.record()
            for _ in range(5):
                step()
            end.record()
            torch.cuda.synchronize()
            busy.append(start.elapsed_time(end) / 5)
        return {
            "form": form,
            "device_ms": statistics.median(busy),
            "wall_ms": statistics.median(wall),
            "loss": float(loss),
            "peak_device_bytes": torch.cuda.max_memory_allocated(),
        }

    forms = ["edges", "sparse"] if arguments.model == "sage" else ["edges"]
    found = []
    for form in forms:
        try:
            found.append(measure(form))
        except Exception as error:
            found.append({"form": form, "failed": str(error)[:300]})
    best = min((one for one in found if "failed" not in one), key=lambda one: one["device_ms"])
    print(json.dumps({"model": arguments.model, "precision": arguments.precision, **best, "all": found}))


if __name__ == "__main__":
    main()
