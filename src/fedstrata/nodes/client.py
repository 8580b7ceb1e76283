"""The ClientApp: a node answers orders for its one client.

Flower sends the server the text of whatever a ClientApp raises, also while it is imported. So nothing is ever raised
here, and all that could fail on a node is imported and done in `_reply`, which tells of it in the words of failures.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedstrata.engines.flower.failures import Failed, during, ends_this_process, tell
from fedstrata.nodes.environment import SIMULATED

app = ClientApp()


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    """Say which client this is."""
    return _reply(message, context, lambda node: node.introduction(context))


@app.train()
@app.query("upload")
@app.evaluate()
def answer(message: Message, context: Context) -> Message:
    """Carry out an order."""
    return _reply(message, context, lambda node: node.answer(message.content, context))


def _reply(message: Message, context: Context, respond: Callable[[Any], RecordDict]) -> Message:
    """What node.py says to a message, or that it failed."""
    try:
        with during("installation"):
            from fedstrata.nodes import node
        with during("reply"):
            content = respond(node)
    except Failed as failed:
        if ends_this_process(failed.error):
            raise failed.error from None
        content = tell(failed, message, context, in_full=os.environ.get(SIMULATED) == "1")
    return Message(content, reply_to=message)
