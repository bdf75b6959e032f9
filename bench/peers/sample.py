#!/usr/bin/env python3
"""Samples batches of an Esker dataset with PyG's NeighborLoader or GraphBolt, and prints edges per second as JSON.

    sample.py DATASET --peer pyg --fanout 10,10,10 --batch 1000 --workers 2

Sampling alone: no features are attached. The graph is in memory; reading it is not timed, nor are the first batches."""
import argparse
import json
import os
import time
import warnings

warnings.filterwarnings("ignore")
os.environ.setdefault("DGLBACKEND", "pytorch")
import numpy as np
import torch

DTYPES = {"u32": np.uint32, "u64": np.uint64}


def array(dataset, name):
    """An array of the dataset as int64, which both peers want."""
    with open(f"{dataset}/esker.json") as manifest:
        entry = next(entry for entry in json.load(manifest)["files"] if entry["name"] == name)
    rows = np.memmap(f"{dataset}/{name}.bin", DTYPES[entry["dtype"]], "r", 4096, entry["rows"])
    return torch.from_numpy(rows.astype(np.int64))


def pyg(indptr, indices, train, fanout, arguments):
    import torch_geometric
    from torch_geometric import typing
    from torch_geometric.data import Data
    from torch_geometric.loader import NeighborLoader

    class Lists:
        """What PyG asks of an adjacency: no copy, no sort."""

        def csr(self):
            return indptr, indices, None

    class Loader(NeighborLoader):
        def filter_fn(self, out):
            return out.row.numel(), out.node.numel()

    data = Data(num_nodes=indptr.numel() - 1)
    data.adj_t = Lists()
    library = "pyg-lib" if typing.WITH_PYG_LIB else "torch-sparse" if typing.WITH_TORCH_SPARSE else None
    assert library, "PyG has no sampler library here"
    loader = Loader(data, num_neighbors=fanout, input_nodes=train, batch_size=arguments.batch, shuffle=True,
                    num_workers=arguments.workers, filter_per_worker=False)
    return iter(loader), lambda counts: counts, f"pyg {torch_geometric.__version__} ({library})"


def graphbolt(indptr, indices, train, fanout, arguments):
    import dgl
    import dgl.graphbolt as gb

    graph = gb.fused_csc_sampling_graph(indptr, indices)
    items = gb.ItemSet(train, names="seed_nodes")
    pipe = gb.ItemSampler(items, batch_size=arguments.batch, shuffle=True)
    pipe = pipe.sample_neighbor(graph, fanout)

    def counts(batch):
        edges = sum(layer.sampled_csc.indices.numel() for layer in batch.sampled_subgraphs)
        return edges, batch.input_nodes.numel()

    return iter(gb.DataLoader(pipe, num_workers=arguments.workers)), counts, f"graphbolt (dgl {dgl.__version__})"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset")
    parser.add_argument("--peer", choices=["pyg", "graphbolt"], required=True)
    parser.add_argument("--fanout", default="10,10,10")
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--warm", type=int, default=4)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(1)
    fanout = [int(count) for count in arguments.fanout.split(",")]
    lists = [array(arguments.dataset, name) for name in ("in-offsets", "in-neighbours", "split-train")]
    batches, counts, name = {"pyg": pyg, "graphbolt": graphbolt}[arguments.peer](*lists, fanout, arguments)
    for _ in range(arguments.warm):
        next(batches)
    edges = nodes = 0
    started = time.perf_counter()
    for _ in range(arguments.batches):
        more = counts(next(batches))
        edges, nodes = edges + more[0], nodes + more[1]
    seconds = time.perf_counter() - started
    print(json.dumps({
        "peer": name, "workers": arguments.workers, "threads": arguments.threads, "fanout": arguments.fanout,
        "batches": arguments.batches, "edges_per_second": edges / seconds,
        "seconds_per_batch": seconds / arguments.batches,
        "edges_per_batch": edges // arguments.batches, "nodes_per_batch": nodes // arguments.batches,
    }))
    os._exit(0)  # Workers that are still sampling would hold the exit up.


if __name__ == "__main__":
    main()
