#!/usr/bin/env python3
"""Loaders alone, without a model: Esker's beside PyG's on the same graph in memory, batch by batch in turns.

PyG samples with pyg-lib or torch-sparse; without either only Esker is measured. The default graph is M of the other peers: 4 million
nodes, 15 edges each, 128 features, seeds 5% of the nodes. Run it on an idle machine.

    python bench/peers/loader.py --nodes 1000000 --batches 20
"""

import argparse
import json
import statistics
import time
import warnings

import torch
from torch_geometric import typing
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader as PygLoader

import esker


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4_000_000)
    parser.add_argument("--degree", type=int, default=15)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--fanout", default="10,10,10")
    parser.add_argument("--batch-size", type=int, default=1000)
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args()


def graph(nodes, degree, dim):
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(nodes, (nodes * degree,), generator=generator)
    target = torch.randint(nodes, (nodes * degree,), generator=generator)
    x = torch.randn(nodes, dim, generator=generator)
    return Data(x=x, y=torch.randint(32, (nodes,), generator=generator), edge_index=torch.stack([source, target]))


class Timed:
    """A loader whose batches are timed: the wall clock, and the processor's time of this process."""

    def __init__(self, name, make):
        started = time.perf_counter()
        self.name, self.loader = name, make()
        self.made_seconds = time.perf_counter() - started
        self.batches, self.seconds, self.cpu_seconds, self.nodes, self.edges = iter(self.loader), [], [], 0, 0

    def step(self):
        started, cpu_started = time.perf_counter(), time.process_time()
        batch = next(self.batches)
        self.nodes, self.edges = self.nodes + batch.num_nodes, self.edges + batch.num_edges
        # Dropping a batch is part of its cost.
        del batch
        self.seconds.append(time.perf_counter() - started)
        self.cpu_seconds.append(time.process_time() - cpu_started)

    def result(self):
        count = len(self.seconds)
        return {
            "loader": self.name,
            "made_seconds": round(self.made_seconds, 3),
            "batches": count,
            "nodes_per_batch": self.nodes // count,
            "edges_per_batch": self.edges // count,
            "median_seconds": round(statistics.median(self.seconds), 5),
            "least_seconds": round(min(self.seconds), 5),
            "median_cpu_seconds": round(statistics.median(self.cpu_seconds), 5),
        }


def main():
    given = arguments()
    torch.set_num_threads(given.threads)
    warnings.filterwarnings("ignore")
    data = graph(given.nodes, given.degree, given.dim)
    options = dict(
        num_neighbors=[int(number) for number in given.fanout.split(",")],
        input_nodes=torch.randperm(given.nodes)[: given.nodes // 20],
        batch_size=given.batch_size,
        shuffle=True,
        num_workers=given.workers,
    )
    loaders = [Timed("esker", lambda: esker.NeighborLoader(data, **options))]
    sampler = "pyg-lib" if typing.WITH_PYG_LIB else "torch-sparse" if typing.WITH_TORCH_SPARSE else None
    if sampler:
        loaders.append(Timed(f"pyg, {sampler}", lambda: PygLoader(data, **options)))
    # The first batches of each warm up.
    for count in range(given.batches + 2):
        for loader in loaders:
            loader.step()
            if count == 1:
                loader.seconds.clear()
                loader.cpu_seconds.clear()
                loader.nodes = loader.edges = 0
    results = [loader.result() for loader in loaders]
    for result in results:
        print(json.dumps(result))
    if sampler:
        ratio = results[1]["median_seconds"] / results[0]["median_seconds"]
        print(json.dumps({"pyg_seconds_per_esker_second": round(ratio, 2), "torch": torch.__version__, "threads": given.threads}))
    else:
        print(json.dumps({"pyg": "not measured: neither pyg-lib nor torch-sparse is installed", "torch": torch.__version__}))


if __name__ == "__main__":
    main()
