"""Other machines reach the part of the SuperLink that is for nodes, and no other."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedstrata.deployment.superlink import NodesOnly


def answer(path: str, client: tuple[str, int] | None, kind: str = "http") -> list[dict[str, Any]]:
    """What a caller is told; the app itself would say `passed on`."""
    told: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        told.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "passed on"})

    async def receive() -> Any:
        raise AssertionError

    asyncio.run(NodesOnly(app)({"type": kind, "path": path, "client": client}, receive, send))
    return told


@pytest.mark.parametrize("client", ["192.168.1.11", "127.0.0.2", "::2", ""])
@pytest.mark.parametrize("path", ["/v1/control/start-run", "/v1/runtime/acquire-task", "/docs", "/", "/v1/fleet"])
def test_a_call_from_another_machine_is_refused(path: str, client: str) -> None:
    assert answer(path, (client, 1))[0]["status"] == 403
    assert answer(path, (client, 1), "websocket") == [{"type": "websocket.close"}]


@pytest.mark.parametrize(
    ("path", "client"),
    [
        ("/v1/fleet/pull-messages", "192.168.1.11"),
        ("/v1/fleet/pull-messages", "127.0.0.1"),
        ("/v1/control/start-run", "127.0.0.1"),
        ("/v1/control/start-run", "::1"),
    ],
)
def test_nodes_and_this_machine_are_passed_on(path: str, client: str) -> None:
    assert answer(path, (client, 1)) == [{"type": "passed on"}]


def test_a_caller_without_an_address_is_no_one_we_know() -> None:
    assert answer("/v1/control/start-run", None)[0]["status"] == 403
