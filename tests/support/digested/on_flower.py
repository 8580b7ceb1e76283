"""The cases on Flower: `fedstrata.flower.Strategy`, and recipes over Flower's messages. Adapt this file, too."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Error, Message
from flwr.supercore.task_identity import TaskIdentity

import fedstrata
from fedstrata.algorithms import named
from fedstrata.flower import Strategy
from tests.support import fake_grid
from tests.support.digested.inside import values_of_records
from tests.support.digested.recipes import ALL, NAMED, ON_CLIENTS, STRAGGLERS, by_command, merged, write_recipe
from tests.support.digested.tasks import images, small_cnn
from tests.support.digested.values import Case, Values, as_arrays, contents, ending, leaves, values_of_run
from tests.support.flower import FakeGrid, array_app, failure, helped_app, stock_app

CASES: dict[str, Case] = {}
SIMULATIONS: dict[str, Case] = {}

NODES = [random.Random(seed).getrandbits(64) for seed in range(6)]
"""Ids of nodes are 64 bits long and in no order."""


# --- strategies ------------------------------------------------------------------------------------------------------


def image_task(dtype: torch.dtype) -> fedstrata.Task:
    (x, y), _ = images()
    clients = [(x[at::7][: 10 + 3 * at].to(dtype), y[at::7][: 10 + 3 * at]) for at in range(len(NODES))]
    return fedstrata.Task(model=lambda: small_cnn((1, 8, 8), 5), clients=clients)


def first_arrays(task: fedstrata.Task, dtype: torch.dtype) -> ArrayRecord:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return ArrayRecord(task.model().to(dtype).state_dict())


class Echoing(FakeGrid):
    """Every reply comes twice, and once more each from nobody and as another node's."""

    def pull_messages(self, message_ids: Any) -> list[Message]:
        replies = super().pull_messages(message_ids)
        for reply in list(replies):
            for node in (NODES[0], 31337):
                other = Message(reply.content, dst_node_id=1, message_type="train")
                other.metadata.__dict__["_src_node_id"] = node
                replies += [reply, other]
        return replies


def on_strategy(
    folder: Path,
    algorithm: fedstrata.Algorithm,
    *,
    dtype: torch.dtype = torch.float32,
    faults: Mapping[tuple[int, int], str] | None = None,
    present: Sequence[Sequence[int]] = (range(6), range(6), range(6)),
    grid: type[FakeGrid] = FakeGrid,
    **options: Any,
) -> Values:
    """ClientApps in PyTorch, with BatchNorm and its counters.

    `faults` names what goes wrong, by a node's position and the number of its exchange; `present` says who is there in
    which round.
    """
    task, exchanges, here = image_task(dtype), Counter[int](), [NODES[at] for at in present[0]]

    def change(reply: Message, node: int) -> Message | None:
        at = NODES.index(node)
        exchanges[at] += 1
        fault = (faults or {}).get((at, exchanges[at]))
        return reply if fault is None else FAULTS[fault](reply)

    def next_meeting(number: int, arrays: ArrayRecord) -> None:
        here[:] = [NODES[at] for at in present[number]] if number < len(present) else []

    nodes = dict.fromkeys(NODES, helped_app(task, lr=0.2, epochs=2, dtype=dtype))
    strategy = Strategy(algorithm, fraction_evaluate=0.0, **options)
    first = first_arrays(task, dtype)
    return started(strategy, grid(nodes, change=change, connected=lambda: here), first, len(present), next_meeting)


def started(strategy: Strategy, grid: FakeGrid, first: ArrayRecord, rounds: int, evaluate: Any = None) -> Values:
    """A strategy's rounds: its records, what it returns, and whom it has asked."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1  # this process is a ServerApp's
    random.seed(0)  # by which Flower samples nodes
    results: list[Any] = []

    def start() -> None:
        results.append(strategy.start(grid, first, num_rounds=rounds, timeout=0.2, evaluate_fn=evaluate))

    end = ending(start)
    values = values_of_records(strategy.records)
    asked = Counter((message.metadata.message_type, message.metadata.dst_node_id) for message in grid.sent)
    values["status"] += [*(f"asked {node} to {kind}: {count}" for (kind, node), count in sorted(asked.items())), end]
    for result in results:
        arrays = {name: array.numpy() for name, array in result.arrays.items()}
        values["weights"] += contents(as_arrays(arrays), "at the end")
        for part in ("train_metrics_clientapp", "evaluate_metrics_clientapp"):
            for number, metrics in getattr(result, part).items():
                values["history"] += leaves(dict(metrics), f"round {number} {part}")
    return values


def any_arrays(folder: Path, algorithm: fedstrata.Algorithm, **options: Any) -> Values:
    """Arrays of no framework and of five dtypes; nodes have metrics of their own, and one computes in float64."""

    def train(arrays: dict[str, Any], node: int) -> Any:
        draw = np.random.default_rng([node % 1000, int(arrays["2"][0])])
        new = {name: np.asarray(array + draw.normal(size=array.shape)) for name, array in arrays.items()}
        if node != NODES[2]:
            new = {name: array.astype(arrays[name].dtype) for name, array in new.items()}
        new |= {"2": arrays["2"] + 1, "3": ~arrays["3"]}
        return new, {"num-examples": 1 + node % 7, "list": [1.5, node / 3], f"of-{node % 2}": 1.0}

    shapes = {"float32": (2, 3, 4, 5), "float16": (2,), "int32": (3,), "bool": (2,), "float64": ()}
    first = ArrayRecord([np.ones(shape, dtype) for dtype, shape in shapes.items()] + [np.ones((3, 1))])
    strategy = Strategy(algorithm, fraction_evaluate=0.0, **options)
    return started(strategy, FakeGrid(dict.fromkeys(NODES, array_app(train))), first, 3)


def evaluated(folder: Path) -> Values:
    """Stock ClientApps, some of which are asked to train and some to evaluate."""
    task = image_task(torch.float64)
    grid = FakeGrid(dict.fromkeys(NODES, stock_app(task, lr=0.2)))
    strategy = Strategy(fedstrata.fedlayerwise(), fraction_train=0.7, fraction_evaluate=0.5, record=False)
    return started(strategy, grid, first_arrays(task, torch.float64), 3)


Fault = Callable[[Message], Message | None]
"""From a true reply to what comes in its place."""


def spoilt(change: Callable[[Any], object]) -> Fault:
    """The same reply, of which something is changed."""

    def fault(reply: Message) -> Message:
        change(reply.content)
        return reply

    return fault


def first_array(value: np.ndarray) -> Fault:
    def change(content: Any) -> None:
        record = next(iter(content.array_records.values()))
        record[next(iter(record))] = Array(value)

    return spoilt(change)


def error(code: int) -> Fault:
    return lambda reply: failure(reply, "a loss that is not finite", code)


OF_ANY: dict[str, Fault] = {
    "lost": lambda reply: None,
    **{f"error-{code}": error(code) for code in (0, 2, 3, 5, 6, 8)},
    "nan": first_array(np.full((4, 1, 3, 3), np.nan, np.float32)),
    "shape": first_array(np.zeros((4, 1, 3), np.float32)),
    "integers": first_array(np.zeros((4, 1, 3, 3), np.int64)),
    "huge": first_array(np.full((4, 1, 3, 3), 1e300)),
    "no-arrays": spoilt(lambda content: next(iter(content.array_records.values())).clear()),
}
OF_FIRST: dict[str, Fault] = {
    "no-samples": spoilt(lambda content: content["metrics"].update({"num-examples": 0})),
    "absurd-samples": spoilt(lambda content: content["metrics"].update({"num-examples": 1e300})),
    "another-metric": spoilt(lambda content: content["metrics"].update({"mood": 3.0})),
    "no-metrics": spoilt(lambda content: content.pop("metrics")),
}
FAULTS = OF_ANY | OF_FIRST
ALGORITHMS: dict[str, Any] = {
    "fedavg": fedstrata.fedavg(),
    "fedprox": fedstrata.fedprox(mu=0.5),
    "fedadp": fedstrata.fedadp(),
    "fedlayerwise": fedstrata.fedlayerwise(),
    "fedldf": fedstrata.fedldf(n=2),
    "random_layers": fedstrata.random_layers(n=2),
    "hdfl": fedstrata.hdfl(n=2),
    "adaptive_mu": fedstrata.adaptive_mu(mu0=0.5),
    "fedlap": fedstrata.fedlap(),
    "fedlap-through": fedstrata.fedlap(through=True),
    "fedavgm": fedstrata.fedavgm(),
    "fedadagrad": fedstrata.fedadagrad(),
    "fedadam": fedstrata.fedadam(),
    "fedyogi": fedstrata.fedyogi(),
    "fedexp": fedstrata.fedexp(),
    "ida": fedstrata.ida(),
    "krum": fedstrata.krum(),
    "multi_krum": fedstrata.multi_krum(),
    "norm_bounding": fedstrata.norm_bounding(),
    "median": fedstrata.median(),
    "trimmed_mean": fedstrata.trimmed_mean(),
    "mixed": fedstrata.Algorithm(
        fedstrata.fedlap(q=0.9).objective, fedstrata.fedldf(n=3).selection, fedstrata.fedlayerwise().weighting
    ),
}
MEETINGS = [(1, 4, 3), (0, 1, 3, 4), (2, 4, 0, 1, 5), (3, 4), (5, 0, 2, 3)]

for name, algorithm in ALGORITHMS.items():
    run = partial(on_strategy, algorithm=algorithm)
    CASES[f"strategy/{name}/float32"] = run
    CASES[f"strategy/{name}/float64"] = partial(run, dtype=torch.float64, layers="tensor")
    CASES[f"strategy/{name}/meetings"] = partial(run, present=MEETINGS, seed=5)
for name in ("fedlayerwise", "fedprox", "mixed"):
    run = partial(on_strategy, algorithm=ALGORITHMS[name])
    for fault in FAULTS:
        CASES[f"strategy/{name}/fault/{fault}"] = partial(run, faults={(1, 1): fault, (3, 1): fault})
    for fault in ("lost", "error-2", "nan"):
        everyone = {(at, exchange): fault for at in range(len(NODES)) for exchange in (1, 2)}
        CASES[f"strategy/{name}/all/{fault}"] = partial(run, faults=everyone)
    CASES[f"strategy/{name}/too-few"] = partial(run, faults={(at, 2): "lost" for at in (0, 1, 2)}, min_replies=4)
    CASES[f"strategy/{name}/echoes"] = partial(run, grid=Echoing)
for fault in OF_ANY:
    second = {(at, 2): fault for at in (0, 1, 2)}
    CASES[f"strategy/mixed/upload/{fault}"] = partial(on_strategy, algorithm=ALGORITHMS["mixed"], faults=second)
for name in ("fedavg", "fedadp", "fedlayerwise", "hdfl"):
    CASES[f"strategy/{name}/any-arrays"] = partial(any_arrays, algorithm=ALGORITHMS[name])
own: dict[str, Any] = {"layers": {"front": ["0", "1"], "rest": ["4", "5"]}, "buffers": ["1", "5"]}
CASES["strategy/own-layers"] = partial(any_arrays, algorithm=fedstrata.fedlayerwise(), **own)
CASES["strategy/evaluated"] = evaluated


# --- recipes over Flower's messages ----------------------------------------------------------------------------------


def on_messages(folder: Path, algorithm: str, errors: Mapping[int, int] | None = None, **settings: Any) -> Values:
    """Without a network. `errors` has the code of Flower's error that a client's orders always end in."""
    from fedstrata.deployment.server import serve

    recipe = write_recipe(folder, {"algorithm.name": algorithm, "engine.timeout": 60.0, **settings})
    grid = fake_grid.FakeGrid(recipe, 6)
    for client, code in (errors or {}).items():
        grid.faults[client] = partial(failing, code=code)
    end = ending(lambda: list(serve(grid, {"recipe": str(recipe), "out": str(folder / "run"), "wait": 10})))
    return values_of_run(folder / "run", end)


def failing(order: Message, reply: Message, code: int) -> Message:
    """Orders fail; that a node introduces itself is none."""
    return Message(Error(code, "a loss that is not finite"), reply_to=order) if "order" in order.content else reply


for name in NAMED:
    there = {"evaluation.on": ["clients"]} if named(name).private else ON_CLIENTS
    CASES[f"messages/{name}"] = partial(on_messages, algorithm=name, **merged(there, STRAGGLERS))
CASES["messages/errors"] = partial(on_messages, algorithm="fedldf", errors={1: 2, 2: 3, 4: 5, 5: 8}, **ALL)
CASES["messages/all-errors"] = partial(on_messages, algorithm="fedavg", errors=dict.fromkeys(range(6), 2))
for name in ("fedadp", "fedldf"):
    settings = {"algorithm.name": name, "engine.name": "flower", **ON_CLIENTS}
    SIMULATIONS[f"simulation/{name}"] = partial(by_command, **settings)
