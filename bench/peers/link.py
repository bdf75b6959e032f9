#!/usr/bin/env python3
"""Trains DistMult on triples as Marius does for FB15k-237, with PyTorch or with PyKEEN, and prints seconds per epoch as JSON.

    link.py TRIPLES                             PyTorch: the arithmetic of Esker, batch by batch
    link.py TRIPLES --peer pykeen               PyKEEN's own training loop, negatives of each edge

TRIPLES has train.txt or train.txt.gz: source, relation and target, separated by tabs. Batches of 1000 edges in 10 chunks;
the edges of a chunk share 500 negatives for either side; inverse relations; softmax cross-entropy, summed; Adagrad. With
PyTorch, rows of nodes have sparse gradients or dense ones: --gradients says which."""
import argparse
import gzip
import json
import os
import time
import warnings

warnings.filterwarnings("ignore")
import torch
import torch.nn.functional as F

BATCH, CHUNKS, NEGATIVES, WIDTH, RATE = 1000, 10, 500, 50, 0.1


def triples(directory):
    """Sources, relations and targets as numbers, and how many nodes and relations there are."""
    path = os.path.join(directory, "train.txt")
    opened = open(path) if os.path.exists(path) else gzip.open(path + ".gz", "rt")
    nodes, relations, rows = {}, {}, []
    with opened as file:
        for line in file:
            source, relation, target = line.rstrip("\n").split("\t")
            rows.append(
                (
                    nodes.setdefault(source, len(nodes)),
                    relations.setdefault(relation, len(relations)),
                    nodes.setdefault(target, len(nodes)),
                )
            )
    return torch.tensor(rows), len(nodes), len(relations)


class DistMult(torch.nn.Module):
    def __init__(self, nodes, relations, sparse):
        super().__init__()
        self.count = relations
        self.nodes = torch.nn.Embedding(nodes, WIDTH, sparse=sparse)
        self.relations = torch.nn.Embedding(2 * relations, WIDTH)
        torch.nn.init.normal_(self.nodes.weight, std=0.001)
        torch.nn.init.ones_(self.relations.weight)

    def loss(self, edges):
        """Of a batch whose edges are a multiple of the chunks, or fewer than a batch: then in one chunk."""
        chunks = CHUNKS if len(edges) % CHUNKS == 0 else 1
        source, relation, target = edges.unbind(1)
        negatives = torch.randint(self.nodes.num_embeddings, (2, chunks * NEGATIVES))
        # Each node once, as Esker reads it.
        unique, places = torch.cat([source, target, negatives.flatten()]).unique(return_inverse=True)
        rows = self.nodes(unique)
        size = len(edges)
        source, target, drawn = rows[places[:size]], rows[places[size : 2 * size]], places[2 * size :]
        drawn = rows[drawn].view(2, chunks, NEGATIVES, WIDTH)
        total = 0
        for side, (known, own) in enumerate([(source, target), (target, source)]):
            query = known * self.relations(relation + side * self.count)
            positive = (query * own).sum(1, keepdim=True)
            negative = torch.bmm(query.view(chunks, -1, WIDTH), drawn[side].transpose(1, 2)).view(size, NEGATIVES)
            scores = torch.cat([positive, negative], 1)
            total = total + F.cross_entropy(scores, torch.zeros(size, dtype=torch.long), reduction="sum")
        return total


def pytorch(arguments):
    edges, nodes, relations = triples(arguments.triples)
    model = DistMult(nodes, relations, arguments.gradients == "sparse")
    optimizer = torch.optim.Adagrad(model.parameters(), lr=RATE)
    seconds, losses = [], []
    for epoch in range(arguments.epochs + 1):
        started, losses = time.perf_counter(), []
        order = torch.randperm(len(edges))
        for first in range(0, len(edges), BATCH):
            optimizer.zero_grad()
            loss = model.loss(edges[order[first : first + BATCH]])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        # The first epoch warms up.
        if epoch > 0:
            seconds.append(time.perf_counter() - started)
    return {"seconds_per_epoch": sorted(seconds)[len(seconds) // 2], "epochs": seconds, "last_loss": sum(losses) / len(losses)}


def pykeen(arguments):
    import pykeen
    from pykeen.losses import CrossEntropyLoss
    from pykeen.models import DistMult as Model
    from pykeen.sampling import BasicNegativeSampler
    from pykeen.training import SLCWATrainingLoop
    from pykeen.triples import CoreTriplesFactory

    edges, nodes, relations = triples(arguments.triples)
    # A part of an epoch: every edge has its own negatives, which takes long.
    part = edges[torch.randperm(len(edges))[: arguments.batches * BATCH]]
    factory = CoreTriplesFactory(part, num_entities=nodes, num_relations=relations, create_inverse_triples=False)
    model = Model(triples_factory=factory, embedding_dim=WIDTH, loss=CrossEntropyLoss(), random_seed=1)
    loop = SLCWATrainingLoop(
        model=model,
        triples_factory=factory,
        optimizer=torch.optim.Adagrad(model.parameters(), lr=RATE),
        negative_sampler=BasicNegativeSampler,
        negative_sampler_kwargs={"num_negs_per_pos": 2 * NEGATIVES},
    )
    train = lambda: loop.train(triples_factory=factory, num_epochs=1, batch_size=BATCH, use_tqdm=False, sampler=None)
    train()
    started = time.perf_counter()
    train()
    seconds = (time.perf_counter() - started) * len(edges) / len(part)
    return {"seconds_per_epoch": seconds, "batches": arguments.batches, "version": pykeen.get_version()}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("triples")
    parser.add_argument("--peer", choices=["pytorch", "pykeen"], default="pytorch")
    parser.add_argument("--gradients", choices=["sparse", "dense"], default="sparse")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.manual_seed(1)
    torch.set_num_threads(arguments.threads)
    found = pytorch(arguments) if arguments.peer == "pytorch" else pykeen(arguments)
    print(json.dumps({"peer": arguments.peer, "gradients": arguments.gradients, "torch": torch.__version__, **found}))


if __name__ == "__main__":
    main()
