"""The client: a regression on made-up numbers, with the proximal term and the mod."""

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from fedstrata.flower import Local, selection_mod


def malformed(message, context, call_next):
    """Client 0, if it is told so, sends an array that Flower puts on the wire and cannot read again."""
    reply = call_next(message, context)
    if context.run_config["fault"] == "malformed" and int(context.node_config["partition-id"]) == 0:
        for array in reply.content.get("arrays", {}).values():
            array.dtype = 5
    return reply


app = ClientApp(mods=[malformed, selection_mod])


def network():
    """Two layers, the same at every call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


@app.train()
def train(message, context):
    """A few epochs on this client's own function."""
    model = network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    who = int(context.node_config["partition-id"])
    draw = torch.Generator().manual_seed(who)
    inputs = torch.randn(20 + 10 * who, 4, generator=draw)
    targets = inputs[:, who % 4, None] + 0.1 * torch.randn(len(inputs), 1, generator=draw)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = Local(message, model)
    for _ in range(3):
        local.epoch()
        for x, y in zip(inputs.split(10), targets.split(10), strict=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            if context.run_config["fault"] != "no pull":
                local.pull()
            optimizer.step()
    metrics = MetricRecord({"num-examples": len(inputs)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(local.acknowledge(content), reply_to=message)
