"""Flower's SuperLink, of which other machines reach the part for nodes and no other.

Flower has one port for everything. It asks nodes for a key, but those who start runs for nothing: whoever reaches
`/v1/control` may register keys, and start a run whose app brings code for the server and every node. So here only
`/v1/fleet`, where nodes are asked for their keys, answers a call from another machine.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from flwr.superlink import main as flowers
from flwr.superlink.cli import flower_superlink
from starlette.types import ASGIApp, Receive, Scope, Send

FOR_NODES = "/v1/fleet/"
HERE = ("127.0.0.1", "::1")


class NodesOnly:
    """Refuses what comes from other machines, unless it is for nodes."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a call on, or answer 403."""
        if scope["type"] == "lifespan" or scope["path"].startswith(FOR_NODES) or (scope["client"] or [""])[0] in HERE:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 403, "headers": []})
            await send({"type": "http.response.body", "body": b"only from the server's own machine"})
        else:
            await send({"type": "websocket.close"})


def main() -> None:
    """`flower-superlink`, with its options, behind `NodesOnly`."""
    create = flowers.create_app

    def create_guarded(*arguments: Any, **options: Any) -> FastAPI:
        app = create(*arguments, **options)
        app.add_middleware(NodesOnly)
        return app

    flowers.create_app = create_guarded
    flower_superlink()


if __name__ == "__main__":
    main()
