"""Writes down, in a server app's own process, what every round began with, what came in and what came out of it."""

import json
import os
from pathlib import Path

import numpy as np
from flwr.common.serde import recorddict_to_proto

from fedstrata.flower.strategy import Strategy


def install():
    """Wrap the two calls that make a round; $FLOWER_CAPTURE is where the files go."""
    folder = Path(os.environ["FLOWER_CAPTURE"])
    configure, aggregate = Strategy.configure_train, Strategy.aggregate_train

    def configured(self, server_round, arrays, config, grid):
        store(folder / f"{server_round}-before.npz", arrays)
        return configure(self, server_round, arrays, config, grid)

    def aggregated(self, server_round, replies):
        replies = list(replies)
        table = []
        for reply in replies:
            if reply.has_error():
                table.append({"error": reply.error.reason})
                continue
            node = reply.metadata.src_node_id
            for record in reply.content.array_records.values():
                store(folder / f"{server_round}-{node}.npz", record)
            table.append(
                {
                    "node": node,
                    "size": reply.content["metrics"]["num-examples"],
                    "arrays": sum(len(record) for record in reply.content.array_records.values()),
                    "bytes": len(recorddict_to_proto(reply.content).SerializeToString()),
                    "objects": deflated(reply),
                }
            )
        try:
            arrays, metrics = aggregate(self, server_round, replies)
        finally:
            record = self.records[-1]
            told = {
                "replies": table,
                "layers": {layer.name: [e.name for e in layer.entries] for layer in self.layers.layers},
                "nodes": record.clients.tolist(),
                "status": [str(status) for status in record.status],
                "upload": record.ledger.upload,
                "weight": record.layers["weight"].tolist() if record.layers else None,
                "mu": record.layers["mu"].tolist() if record.layers else None,
            }
            (folder / f"{server_round}.json").write_text(json.dumps(told))
        if arrays is not None:
            store(folder / f"{server_round}-after.npz", arrays)
        return arrays, metrics

    Strategy.configure_train, Strategy.aggregate_train = configured, aggregated


def store(path, record):
    """Arrays by name."""
    np.savez(path, **{name: array.numpy() for name, array in record.items()})


def deflated(message):
    """What a message weighs as the objects that Flower sends one by one, each with its address."""
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

    return sum(len(part.deflate()) for part in get_all_nested_objects(message).values())
