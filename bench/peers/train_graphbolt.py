#!/usr/bin/env python3
"""Trains GraphSAGE (mean) on an Esker dataset with DGL's GraphBolt and mapped features, and prints seconds per batch as JSON.

    train_graphbolt.py DATASET --fanout 10,10,10 --batch 1000 --hidden 256

Features come through the page cache, without read-ahead. The first batches are not timed."""
import argparse
import json
import os
import time
import warnings

warnings.filterwarnings("ignore")
os.environ.setdefault("DGLBACKEND", "pytorch")
import numpy as np
import torch
import torch.nn.functional as F

from train import array


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset")
    parser.add_argument("--fanout", default="10,10,10")
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--warm", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    import dgl
    import dgl.graphbolt as gb

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(1)
    fanout = [int(count) for count in arguments.fanout.split(",")]
    ids = lambda name: torch.from_numpy(array(arguments.dataset, name).astype(np.int64))
    indptr, indices, train, labels = (ids(n) for n in ("in-offsets", "in-neighbours", "split-train", "node-labels"))
    x = torch.from_numpy(array(arguments.dataset, "node-features", True))
    graph = gb.fused_csc_sampling_graph(indptr, indices)
    items = gb.ItemSet(train, names="seed_nodes")
    pipe = gb.ItemSampler(items, batch_size=arguments.batch, shuffle=True).sample_neighbor(graph, fanout)
    loader = gb.DataLoader(pipe, num_workers=0)
    widths = [x.shape[1]] + [arguments.hidden] * (len(fanout) - 1) + [int(labels.max()) + 1]
    model = torch.nn.ModuleList(dgl.nn.SAGEConv(a, b, "mean") for a, b in zip(widths, widths[1:]))
    optimizer = torch.optim.Adam(model.parameters(), lr=arguments.lr)
    times, done, started, last = {"sample": 0.0, "gather": 0.0, "compute": 0.0}, 0, 0.0, 0.0

    def epochs():
        while True:
            yield from loader

    batches = epochs()
    for number in range(arguments.warm + arguments.batches):
        if number == arguments.warm:
            started, times = time.perf_counter(), dict.fromkeys(times, 0.0)
        moment = time.perf_counter()
        batch = next(batches)
        blocks = batch.blocks
        times["sample"] += time.perf_counter() - moment
        moment = time.perf_counter()
        rows = x.index_select(0, batch.input_nodes)
        times["gather"] += time.perf_counter() - moment
        moment = time.perf_counter()
        for layer, (convolution, block) in enumerate(zip(model, blocks)):
            rows = convolution(block, rows)
            if layer + 1 < len(blocks):
                rows = rows.relu()
        loss = F.cross_entropy(rows, labels[batch.seed_nodes])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        last = float(loss)
        times["compute"] += time.perf_counter() - moment
        done += number >= arguments.warm
    seconds = time.perf_counter() - started
    print(json.dumps({
        "peer": f"graphbolt (dgl {dgl.__version__}), mapped features", "threads": arguments.threads,
        "fanout": arguments.fanout, "batches": done, "seconds_per_batch": seconds / done, "last_loss": last,
        "stage_seconds_per_batch": {name: spent / done for name, spent in times.items()},
    }))
    os._exit(0)


if __name__ == "__main__":
    main()
