#!/usr/bin/env python3
"""Trains GraphSAGE (mean) on an Esker dataset with PyG, everything in memory or with mapped features, and prints seconds per
batch as JSON.

    train.py DATASET --fanout 10,10,10 --batch 1000 --hidden 256 --workers 2
    train.py DATASET --mapped                   features through the page cache, without read-ahead

Sampling (torch-sparse or pyg-lib), gathering rows, forward, backward and Adam; the first batches are not timed. Layers see
only the nodes and edges they need, and aggregate with a sparse product, which is the fastest way PyG has on a CPU."""
import argparse
import json
import mmap
import os
import time
import warnings

warnings.filterwarnings("ignore")
import numpy as np
import torch
import torch.nn.functional as F

DTYPES = {"u32": np.uint32, "u64": np.uint64, "i32": np.int32, "f32": np.float32}


def array(dataset, name, mapped=False):
    with open(f"{dataset}/esker.json") as manifest:
        entry = next(entry for entry in json.load(manifest)["files"] if entry["name"] == name)
    shape = (entry["rows"], entry["columns"]) if entry["columns"] > 1 else (entry["rows"],)
    found = np.memmap(f"{dataset}/{name}.bin", DTYPES[entry["dtype"]], "r", 4096, shape)
    if mapped:
        found._mmap.madvise(mmap.MADV_RANDOM)
        return found
    return np.array(found)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset")
    parser.add_argument("--fanout", default="10,10,10")
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--warm", type=int, default=4)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--mapped", action="store_true")
    arguments = parser.parse_args()
    from torch_geometric import typing
    from torch_geometric.data import Data
    from torch_geometric.loader import NeighborLoader
    from torch_geometric.nn import SAGEConv

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(1)
    fanout = [int(count) for count in arguments.fanout.split(",")]
    layers = len(fanout)
    ids = lambda name: torch.from_numpy(array(arguments.dataset, name).astype(np.int64))
    indptr, indices, train, labels = (ids(n) for n in ("in-offsets", "in-neighbours", "split-train", "node-labels"))
    x = torch.from_numpy(array(arguments.dataset, "node-features", arguments.mapped))
    times = {"sample": 0.0, "gather": 0.0, "compute": 0.0}

    def timed(name, work):
        started = time.perf_counter()
        result = work()
        times[name] += time.perf_counter() - started
        return result

    def hops(row, col, seeds):
        """Nodes and edges by hop. torch-sparse does not say, but lists nodes as it finds them and edges by destination."""
        nodes, edges, known, taken = [seeds], [], seeds, 0
        for _ in fanout:
            end = int(torch.searchsorted(col, known))
            reached = max(int(row[taken:end].max()) + 1, known) if end > taken else known
            nodes.append(reached - known)
            edges.append(end - taken)
            known, taken = reached, end
        return nodes, edges

    class Lists:
        """What PyG asks of an adjacency: no copy, no sort."""

        def csr(self):
            return indptr, indices, None

    class Loader(NeighborLoader):
        def collate_fn(self, index):
            return timed("sample", lambda: super(Loader, self).collate_fn(index))

        def filter_fn(self, out):
            def gather():
                size = out.metadata[0].numel()
                batch = Data(x=x.index_select(0, out.node), y=labels[out.node[:size]])
                batch.row, batch.col = out.row, out.col
                batch.hop_nodes, batch.hop_edges = hops(out.row, out.col, size)
                return batch

            return timed("gather", gather)

    data = Data(x=x, num_nodes=indptr.numel() - 1)
    data.adj_t = Lists()
    library = "pyg-lib" if typing.WITH_PYG_LIB else "torch-sparse" if typing.WITH_TORCH_SPARSE else None
    assert library, "PyG has no sampler library here"
    loader = Loader(data, num_neighbors=fanout, input_nodes=train, batch_size=arguments.batch, shuffle=True,
                    num_workers=arguments.workers, filter_per_worker=arguments.workers > 0)
    widths = [x.shape[1]] + [arguments.hidden] * (layers - 1) + [int(labels.max()) + 1]
    model = torch.nn.ModuleList(SAGEConv(a, b, aggr="mean") for a, b in zip(widths, widths[1:]))
    optimizer = torch.optim.Adam(model.parameters(), lr=arguments.lr)

    def step(batch):
        rows, nodes, edges = batch.x, batch.hop_nodes, batch.hop_edges
        for layer, convolution in enumerate(model):
            hops = layers - layer
            count, outputs, inputs = sum(edges[:hops]), sum(nodes[:hops]), sum(nodes[:hops + 1])
            # Edges come sorted by destination: a CSR needs only its offsets.
            starts = torch.zeros(outputs + 1, dtype=torch.long)
            torch.cumsum(torch.bincount(batch.col[:count], minlength=outputs), 0, out=starts[1:])
            lists = torch.sparse_csr_tensor(starts, batch.row[:count], torch.ones(count), size=(outputs, inputs))
            rows = rows[:inputs]
            rows = convolution((rows, rows[:outputs]), lists)
            if layer + 1 < layers:
                rows = rows.relu()
        loss = F.cross_entropy(rows, batch.y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss)

    def endless():
        while True:
            yield from loader

    batches = endless()
    for _ in range(arguments.warm):
        step(next(batches))
    times.update(sample=0.0, gather=0.0, compute=0.0)
    nodes = edges = 0
    started = time.perf_counter()
    for _ in range(arguments.batches):
        batch = next(batches)
        loss = timed("compute", lambda: step(batch))
        nodes, edges = nodes + batch.x.shape[0], edges + batch.row.numel()
    seconds = time.perf_counter() - started
    print(json.dumps({
        "peer": f"pyg ({library}), torch {torch.__version__}", "workers": arguments.workers, "mapped": arguments.mapped,
        "threads": arguments.threads, "batches": arguments.batches, "seconds_per_batch": seconds / arguments.batches,
        "stage_seconds_per_batch": {name: value / arguments.batches for name, value in times.items()},
        "nodes_per_batch": nodes // arguments.batches, "edges_per_batch": edges // arguments.batches, "loss": loss,
    }))
    os._exit(0)  # Workers that are still sampling would hold the exit up.


if __name__ == "__main__":
    main()
