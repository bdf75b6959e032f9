"""Trains a GraphSAGE in several processes (DistributedDataParallel over gloo) on a dataset of Esker on disk.

    python ddp.py GRAPH --processes 2            # starts its own processes
    torchrun --nproc_per_node 2 ddp.py GRAPH     # or let torchrun start them

Each rank prepares, packs and loads its own batches of the planned epoch, and together they have exactly the batches that one
process would have. With `drop_last` ranks have equal numbers of them, as DistributedDataParallel wants.
"""

import argparse
import json
import os
import socket
import tempfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import GraphSAGE

import esker


def work(rank, world_size, options):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    data = esker.open(options.graph)
    loader = esker.NeighborLoader(
        data, [10, 5], input_nodes=data.train_idx, batch_size=10, shuffle=True, drop_last=True, seed=1, epochs=options.epochs, rank=rank,
        world_size=world_size, strategy=options.strategy, memory=options.memory, threads=1, scratch=options.scratch,
        prepared=os.path.join(options.scratch, f"packed-{rank}"))
    torch.manual_seed(0)  # All ranks begin with the same model.
    model = DistributedDataParallel(GraphSAGE(data.num_features, 32, num_layers=2, out_channels=data.num_classes))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(options.epochs):
        seen, loss_sum, batches = [], 0.0, 0
        for batch in loader:
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index)[:batch.batch_size]
            loss = torch.nn.functional.cross_entropy(out, batch.y[:batch.batch_size])
            loss.backward()
            optimizer.step()
            seen += batch.n_id[:batch.batch_size].tolist()
            loss_sum, batches = loss_sum + loss.item(), batches + 1
    # By files: collectives of Python objects may keep gloo from ending (torch 2.2).
    with open(os.path.join(options.scratch, f"rank-{rank}.json"), "w") as file:
        json.dump((seen, loss_sum / batches, batches), file)
    dist.barrier()
    if rank == 0:
        everyone = [json.load(open(os.path.join(options.scratch, f"rank-{other}.json"))) for other in range(world_size)]
        seeds = [seed for seen, _, _ in everyone for seed in seen]
        print(json.dumps({"processes": world_size, "seeds": len(set(seeds)), "repeated": len(seeds) - len(set(seeds)),
                          "batches": [count for _, _, count in everyone], "loss": sum(loss for _, loss, _ in everyone) / world_size}))
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("graph")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--strategy", default="ginex")
    parser.add_argument("--memory", default="256MiB")
    parser.add_argument("--scratch", default=tempfile.gettempdir())
    options = parser.parse_args()
    if "RANK" in os.environ:  # Started by torchrun.
        work(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), options)
    else:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ.setdefault("MASTER_PORT", str(free.getsockname()[1]))
        torch.multiprocessing.spawn(work, (options.processes, options), options.processes)
