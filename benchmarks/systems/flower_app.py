"""Flower's client: in a module of its own, so that it is not pickled and each Ray actor keeps the data."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from benchmarks.loop import train_locally
from benchmarks.workloads import Work

app = ClientApp()


@cache
def loaded(workload: str, data: str) -> tuple[Work, torch.nn.Module]:
    """The data and a model, once per actor."""
    work = Work.load(workload, 1, data or None)
    return work, work.model()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the client that the server names."""
    config: Any = message.content["config"]
    arrays: Any = message.content["arrays"]
    work, model = loaded(config["workload"], config["data"])
    model.load_state_dict(arrays.to_torch_state_dict())
    inputs, targets = work.client(config["client"])
    train_locally(model, work.loss, inputs, targets, **work.local)
    content = RecordDict(
        {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(inputs)})}
    )
    return Message(content=content, reply_to=message)
