"""Nothing of a node's data, and no path, leaves it when something goes wrong; its own log has it all.

Every kind of bad data has a secret in it, which is looked for in the bytes of all that the node sends.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch

from tests.support import node_data

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from fedstrata.core import errors
from fedstrata.core.errors import FedstrataError, MessageError
from fedstrata.core.messages import Answer, Order, Reply
from fedstrata.core.status import Status
from fedstrata.engines.flower import failures
from fedstrata.engines.flower.engine import FlowerEngine
from fedstrata.engines.flower.failures import NodeFailed, type_name
from fedstrata.nodes.environment import SIMULATED
from fedstrata.recipes.experiment import Experiment, build_experiment
from fedstrata.recipes.schema import load
from tests.support.fake_grid import FakeGrid
from tests.support.searching import SECRET, is_in

NUMBER = 471147114711
RECIPE: dict[str, Any] = {
    "name": "ward",
    "task": {
        "dataset": "nodes",
        "inputs": "unit",
        "nodes": {"clients": 1, "shape": [1, 2, 2], "classes": ["ill", "well"]},
        "model": {"name": "mlp", "hidden": 2},
    },
    "training": {"rounds": 1, "batch_size": 2, "lr": 0.1},
    "evaluation": {"on": ["clients"], "held_out": 0.25},
}


class Ward:
    """A server and its one node, which has data of its own."""

    def __init__(self, folder: Path, data: str, recipe: dict[str, Any] = RECIPE, **options: Any) -> None:
        path = folder / "ward.toml"
        path.write_text(tomli_w.dumps(recipe))
        self.experiment: Experiment = build_experiment(load(path, settings={"engine.name": "flower"}))
        self.grid = FakeGrid(path, 0)
        self.grid.join(1000, 0, data=data)
        self.engine = FlowerEngine(
            self.grid, self.experiment.setup, self.experiment.agreement, 1, timeout=0.05, poll=0.001, **options
        )

    def problem(self) -> str:
        """Why the node is not there."""
        with pytest.raises(FedstrataError) as caught:
            self.engine.wait_for(1, 0)
        return str(caught.value).partition("; ")[2]

    def ask(self, kind: Any, **changes: Any) -> Answer:
        """The answer to an order."""
        model = None if kind == "upload" else self.experiment.first_state().model
        mask = torch.ones(len(self.experiment.layers), dtype=torch.bool)
        [(_, answer)] = self.engine.exchange([Order(kind, 3, 1, 0, model=model, mask=mask, **changes)])
        return answer

    def sent(self) -> bytes:
        assert self.grid.replies
        return b"\n".join(self.grid.replies)


def python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A process of its own, which finds modules in a folder before all others."""
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": path, "FLWR_TELEMETRY_ENABLED": "0"}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=folder)


# --- data that cannot be read ----------------------------------------------------------------------------------------


def csv(header: str, *rows: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "rows.csv").write_text("\n".join([header, *rows]))


def table(columns: dict[str, list[Any]]) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.table(columns), folder / "rows.parquet")

    return write


def image(path: str, content: bytes) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        pytest.importorskip("PIL")
        (folder / path).parent.mkdir()
        (folder / path).write_bytes(content)

    return write


def idx(folder: Path) -> None:
    """One image too few."""
    (folder / f"{SECRET}-images-idx3-ubyte").write_bytes(node_data.idx(np.zeros((3, 2, 2)))[:-4])
    (folder / f"{SECRET}-labels-idx1-ubyte").write_bytes(node_data.idx(np.zeros(3)))


GOOD = ("ill,0,0,0,1", "well,0,1,0,1", "ill,0,0,1,1", "well,0,1,1,1")
NUMBERS: dict[str, list[Any]] = {name: [0.0, 0.5, 1.0, 0.5] for name in "abcd"}
LABELS = ["ill", "well", "ill", "well"]

BAD: dict[str, Callable[[Path], object]] = {
    "csv: a label that is no class": csv("label,a,b,c,d", *GOOD, f"{SECRET},0,0,0,0"),
    "csv: a cell that is no number": csv("label,a,b,c,d", *GOOD, f"ill,0,{SECRET},0,0"),
    "csv: an infinite cell": csv(f"label,a,b,{SECRET},d", *GOOD, "ill,0,0,inf,0"),
    "csv: a column that is missing": csv("a,b,c,d", "0,0,0,0"),
    "csv: secret names": csv(f"a,b,{SECRET},c,d", "0,0,0,0,0"),
    "csv: bytes that are no text": lambda folder: (folder / "rows.csv").write_bytes(b"label,a,b,c,\xff\n"),
    "parquet: a label that is no class": table({"label": [*LABELS[1:], SECRET], **NUMBERS}),
    "parquet: a cell that is no number": table({"label": LABELS, **NUMBERS, "d": [SECRET] * 4}),
    "parquet: an infinite cell": table({"label": LABELS, **dict.fromkeys(("a", "b", SECRET, "d"), [np.inf] * 4)}),
    "parquet: secret names": table({SECRET: LABELS, **NUMBERS}),
    "parquet: damaged": lambda folder: (folder / "rows.parquet").write_bytes(f"PAR1{SECRET}".encode()),
    "images: a class of a secret name": image(f"{SECRET}/1.png", b"\x89PNG"),
    "images: damaged": image("ill/1.png", b"\x89PNG\r\n\x1a\n" + SECRET.encode()),
    "idx: damaged": idx,
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_of_bad_data_the_server_is_told_the_kind(what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The folder has the secret in its name, too, so that the node's log has it in any case."""
    folder = tmp_path / f"records of {SECRET}"
    folder.mkdir()
    BAD[what](folder)
    ward = Ward(tmp_path, str(folder))
    assert ward.problem() == "node 1000: it cannot read its data (DataError); its own log says more"
    assert not is_in(SECRET, ward.sent())
    assert not is_in(str(tmp_path), ward.sent())
    assert "client 0, asked who it is: it cannot read its data" in caplog.text
    assert SECRET in caplog.text
    assert "Traceback" in caplog.text


def test_an_order_finds_data_that_has_become_bad(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in a deployment, where every message is a new process that reads the data again."""
    from fedstrata.nodes import node

    csv("label,a,b,c,d", *GOOD)(tmp_path)
    ward = Ward(tmp_path, str(tmp_path))
    ward.engine.wait_for(1, 10)
    csv("label,a,b,c,d", f"{SECRET},0,0,0,0")(tmp_path)
    node._load.cache_clear()
    for kind in ("train", "evaluate", "upload"):
        assert ward.ask(kind) == Status("failed", "it cannot read its data (DataError); its own log says more")
    assert not is_in(SECRET, ward.sent())
    assert "client 0, round 3: it cannot read its data" in caplog.text
    assert f"label = '{SECRET}' in row 1" in caplog.text


# --- functions that misbehave ----------------------------------------------------------------------------------------

IMPORTS = "import sys, torch\n"

FUNCTIONS: dict[str, tuple[str, str]] = {
    "raises": (f"def data(): raise ValueError('{SECRET}')", "RecipeError"),
    "raises KeyError": (f"def data(): return {{}}['{SECRET}']", "RecipeError"),
    "raises a class of its own": (f"def data(): raise type('{SECRET}', (Exception,), {{}})('{SECRET}')", "RecipeError"),
    "raises an exception that cannot be printed": (
        f"class {SECRET}(Exception):\n    def __str__(self): raise KeyError('{SECRET}')\ndef data(): raise {SECRET}",
        "KeyError",
    ),
    "leaves": (f"def data(): sys.exit('{SECRET}')", "SystemExit"),
    "is interrupted": (f"def data(): raise KeyboardInterrupt('{SECRET}')", "KeyboardInterrupt"),
    "cannot open a file": (f"def data(): open('/no/{SECRET}')", "RecipeError"),
    "cannot be imported": (f"import {SECRET}", "RecipeError"),
    "leaves when it is imported": (f"sys.exit('{SECRET}')", "SystemExit"),
    "is not there": (f"__name__ = '{SECRET}'", "RecipeError"),
    "gives something else": (f"def data(): return type('{SECRET}', (), {{}})()", "DataError"),
    "gives wrong targets": (
        f"def data(): return torch.zeros(4, 1, 2, 2), torch.tensor([0, 1, 0, {NUMBER}])",
        "RecipeError",
    ),
    "runs out of memory": (f"def data(): raise MemoryError('{SECRET}')", "RecipeError"),
    "nests for ever": ("def data(): return data()", "RecipeError"),
}


@pytest.mark.parametrize("what", FUNCTIONS)
def test_of_a_function_that_fails_the_server_is_told_the_kind(
    what: str, tmp_path: Path, user_module: Callable[[str, str], str], caplog: pytest.LogCaptureFixture
) -> None:
    code, expected = FUNCTIONS[what]
    user_module("hidden_ward", f"{IMPORTS}{code}\n")
    ward = Ward(tmp_path, "hidden_ward:data")
    assert ward.problem() == f"node 1000: it cannot read its data ({expected}); its own log says more"
    for secret in (SECRET, str(NUMBER), "hidden_ward", str(tmp_path)):
        assert not is_in(secret, ward.sent())
    assert "client 0, asked who it is: it cannot read its data" in caplog.text
    assert any(secret in caplog.text for secret in (SECRET, str(NUMBER), "hidden_ward"))


ENDED = """
from flwr.app import Context, Message, RecordDict
from flwr.supercore.exit import register_signal_handlers
from flwr.supercore.task_identity import TaskIdentity
from flwr.supercore.telemetry import EventType
TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
register_signal_handlers(EventType.FLWR_CLIENTAPP_RUN_LEAVE)
from fedstrata.nodes.client import app
config = {"partition-id": 0, "recipe": "ward.toml", "data": "hidden_ward:data"}
app(Message(RecordDict(), dst_node_id=1, message_type="query.hello"), Context(1, 1, config, RecordDict(), {}))
print("it goes on")
"""


def test_flower_may_end_the_process(tmp_path: Path) -> None:
    """On SIGTERM its handler raises SystemExit in the midst of a user's function; that is no failure of the node."""
    (tmp_path / "ward.toml").write_text(tomli_w.dumps(RECIPE))
    kill = "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)"
    (tmp_path / "hidden_ward.py").write_text(f"import os, signal, time\ndef data(): {kill}\n")
    done = python(ENDED, tmp_path)
    assert (done.returncode, done.stdout) == (0, "")
    assert "The server is told" not in done.stderr


MOODY = """
import torch

mood = None

class Patients(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if mood is not None:
            raise mood
        return torch.zeros(1, 2, 2), index % 2

def data():
    return Patients()
"""


def made_at_run_time(*bases: type, **body: Any) -> Any:
    return type(SECRET, bases, body)


MOODS: dict[str, tuple[BaseException, str]] = {
    "ValueError": (ValueError(SECRET), "ValueError"),
    "KeyError": (KeyError(SECRET), "KeyError"),
    "OSError": (FileNotFoundError(2, "No such file", f"/data/{SECRET}"), "FileNotFoundError"),
    "SystemExit": (SystemExit(SECRET), "SystemExit"),
    "KeyboardInterrupt": (KeyboardInterrupt(SECRET), "KeyboardInterrupt"),
    "a class of its own": (made_at_run_time(LookupError)(SECRET), "LookupError"),
    "a class that says to be Python's": (made_at_run_time(OSError, __module__="builtins")(SECRET), "OSError"),
    "a class with a note": (made_at_run_time(Exception)(), "Exception"),
    "a group": (ExceptionGroup(SECRET, [ValueError(SECRET)]), "ExceptionGroup"),
    "DataError": (errors.DataError(SECRET), "DataError"),
    "out of memory": (torch.OutOfMemoryError(SECRET), "OutOfMemoryError"),
}
MOODS["a class with a note"][0].add_note(SECRET)


@pytest.mark.parametrize("mood", MOODS)
def test_data_that_fails_only_when_it_is_used(
    mood: str, tmp_path: Path, user_module: Callable[[str, str], str], caplog: pytest.LogCaptureFixture
) -> None:
    """It is all right when the node introduces itself, and raises while training and while it is evaluated."""
    user_module("hidden_ward", MOODY)
    ward = Ward(tmp_path, "hidden_ward:data")
    ward.engine.wait_for(1, 10)
    error, name = MOODS[mood]
    sys.modules["hidden_ward"].mood = error  # type: ignore[attr-defined]
    for kind, does in (("train", "it cannot train"), ("evaluate", "it cannot evaluate the model")):
        caplog.clear()
        assert ward.ask(kind) == Status("failed", f"{does} ({name}); its own log says more")
        assert f"client 0, round 3: {does}" in caplog.text
        assert SECRET in caplog.text
    for secret in (SECRET, "hidden_ward", str(tmp_path)):
        assert not is_in(secret, ward.sent())
    sys.modules["hidden_ward"].mood = None  # type: ignore[attr-defined]
    assert isinstance(ward.ask("train"), Reply)


# --- the rest of what leaves a node ----------------------------------------------------------------------------------

TASK = """
import torch
import fedstrata

def task(name="{metric}"):
    blob = (torch.zeros(8, 2), torch.arange(8) % 2)
    metric = fedstrata.Metric(name, lambda outputs, targets: 0.5)
    return fedstrata.Task(model=lambda: torch.nn.Linear(2, 2), clients=[blob], held_out=[blob], metric=metric)
"""


def test_a_metric_leaves_a_node_under_the_servers_name_only(
    tmp_path: Path, user_module: Callable[[str, str], str], caplog: pytest.LogCaptureFixture
) -> None:
    """A node's task may be its own; if its metric has another name, neither the name nor the number is sent."""
    for module, metric in (("public_task", "recall"), ("same_task", "recall"), ("hidden_task", SECRET)):
        user_module(module, TASK.format(metric=metric))
    common = {"name": "ward", "evaluation": {"on": ["clients"]}}
    ward = Ward(tmp_path, "", common | {"task": {"function": "public_task:task"}})
    for module, expected in (("same_task", None), ("hidden_task", "its metric has another name than the server's")):
        path = tmp_path / f"{module}.toml"
        path.write_text(tomli_w.dumps(common | {"task": {"function": f"{module}:task"}}))
        ward.grid.join(1000, 0, recipe=str(path))
        ward.engine.wait_for(1, 10)
        answer = ward.ask("evaluate")
        if expected is None:
            assert isinstance(answer, Reply)
            assert answer.metrics.keys() == {"loss", "recall"}
        else:
            assert answer == Status("failed", f"{expected} (MessageError); its own log says more")
    assert not is_in(SECRET, ward.sent())
    assert f"this node's task has '{SECRET}'" in caplog.text


def test_all_that_leaves_a_node_that_is_well(tmp_path: Path) -> None:
    """Records and fields by name: there is nothing else."""
    csv("label,a,b,c,d", *GOOD)(tmp_path)
    fedldf = RECIPE | {"algorithm": {"name": "fedldf", "n": 1}}
    ward = Ward(tmp_path, str(tmp_path), fedldf)
    ward.engine.wait_for(1, 10)
    replies = [ward.ask("train"), ward.ask("train", answer="scores"), ward.ask("upload"), ward.ask("evaluate")]
    assert [type(reply) for reply in replies] == [Reply] * 4
    header = ["schema", "kind", "round", "attempt", "client", "size"]
    layers = list(ward.experiment.layers.names)
    assert [{name: list(record) for name, record in content.items()} for _, content, _ in ward.grid.wire] == [
        {"hello": ["schema", "client", "size", "held_out", "agreement"]},
        {"reply": header, "metrics": ["loss"], "figures": ["stiffness"], "layers": layers},
        {"reply": header, "metrics": ["loss"], "figures": ["scores", "stiffness"]},
        {"reply": header, "layers": layers},
        {"reply": header, "metrics": ["loss", "accuracy"]},
    ]


def test_an_order_that_cannot_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    csv("label,a,b,c,d", *GOOD)(tmp_path)
    grid = Ward(tmp_path, str(tmp_path)).grid
    order = Message(RecordDict({"order": ConfigRecord({"round": SECRET})}), dst_node_id=1000, message_type="train")
    [about] = grid.push_messages([order])
    [reply] = grid.pull_messages([about])
    with pytest.raises(NodeFailed, match=r"^it cannot read the order \(MessageError\); its own log says more$"):
        failures.read(reply.content)
    assert "schema = None" in caplog.text


BROKEN = """
import base64, json, sys
from flwr.app import Context, Message, RecordDict
from flwr.common.serde import message_to_proto
from flwr.supercore.task_identity import TaskIdentity
TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
from fedstrata.nodes.client import app
message = Message(RecordDict(), dst_node_id=1, message_type="query.hello")
reply = app(message, Context(1, 1, {"partition-id": 0}, RecordDict(), {}))
sent = base64.b64encode(message_to_proto(reply).SerializeToString()).decode()
print(json.dumps([dict(reply.content["failure"]), sent]))
"""


def test_a_node_without_torch_says_so_and_no_more(tmp_path: Path) -> None:
    """The ClientApp itself can be imported: what Flower says of one that cannot has the text."""
    (tmp_path / "torch.py").write_text(f"raise ImportError('/opt/{SECRET}/libtorch.so: undefined symbol')\n")
    done = python(BROKEN, tmp_path)
    assert done.returncode == 0, done.stderr
    failure, sent = json.loads(done.stdout)
    assert failure == {"kind": "installation", "type": "ImportError"}
    assert not is_in(SECRET, base64.b64decode(sent))
    assert f"ImportError: /opt/{SECRET}/libtorch.so" in done.stderr  # a node's own log, without any set-up
    assert "client 0, asked who it is: it cannot load fedstrata" in done.stderr


# --- what the server believes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", range(10))
def test_of_flowers_own_errors_only_the_code_counts(
    code: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Flower writes an exception's text into its error."""
    csv("label,a,b,c,d", *GOOD)(tmp_path)
    ward = Ward(tmp_path, str(tmp_path))
    ward.grid.faults[0] = lambda message, reply: Message(Error(code, SECRET), reply_to=message)
    assert SECRET not in ward.problem()
    ward.grid.faults.clear()
    ward.engine.wait_for(1, 10)
    ward.grid.faults[0] = lambda message, reply: Message(Error(code, SECRET), reply_to=message)
    answer = ward.ask("train")
    assert isinstance(answer, Status)
    assert SECRET not in str(answer)
    assert SECRET not in caplog.text


WORDS: dict[str, Any] = {"kind": "data", "type": "DataError"}


@pytest.mark.parametrize(
    "content",
    [
        {"failure": ConfigRecord(WORDS | {"kind": SECRET})},
        {"failure": ConfigRecord(WORDS | {"type": SECRET})},
        {"failure": ConfigRecord(WORDS | {"text": SECRET})},
        {"failure": ConfigRecord(WORDS | {SECRET: 1})},
        {"failure": ConfigRecord(WORDS | {"type": [SECRET]})},
        {"failure": ConfigRecord(WORDS | {"kind": SECRET.encode()})},
        {"failure": ConfigRecord({"kind": "data"})},
        {"failure": ConfigRecord()},
        {"failure": MetricRecord({SECRET: 1})},
        {"failure": ArrayRecord({SECRET: Array(np.zeros(1))})},
        {"failure": ConfigRecord(WORDS), SECRET: ConfigRecord()},
    ],
)
def test_a_node_that_fails_in_other_words_is_refused_and_not_quoted(
    content: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    csv("label,a,b,c,d", *GOOD)(tmp_path)
    ward = Ward(tmp_path, str(tmp_path))
    refusal = "says that it failed, in words that are not fedstrata's"
    with pytest.raises(MessageError, match=f"^{refusal}$"):
        failures.read(RecordDict(content))
    ward.grid.faults[0] = lambda message, reply: Message(RecordDict(content), reply_to=message)
    assert ward.problem() == f"node 1000: {refusal}"
    ward.grid.leave(1000)
    ward.engine.wait_for(0, 10)
    ward.grid.join(1000, 0, data=str(tmp_path))
    ward.grid.faults.clear()
    ward.engine.wait_for(1, 10)
    ward.grid.faults[0] = lambda message, reply: Message(RecordDict(content), reply_to=message)
    assert ward.ask("train") == Status("refused", refusal)
    assert SECRET not in caplog.text


def test_a_simulation_tells_everything(
    tmp_path: Path, user_module: Callable[[str, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its variable makes a node talkative; a server that is not told so refuses what it says."""
    monkeypatch.setenv(SIMULATED, "1")
    user_module("hidden_ward", MOODY)
    ward = Ward(tmp_path, "hidden_ward:data", simulated=True)
    ward.engine.wait_for(1, 10)
    sys.modules["hidden_ward"].mood = ValueError(SECRET)  # type: ignore[attr-defined]
    assert ward.ask("train") == Status("failed", f"ValueError: {SECRET} (hidden_ward.py, line 12)")
    ward = Ward(tmp_path, "/no/where", simulated=True)
    problem = ward.problem()
    assert problem.startswith("node 1000: RecipeError: data = '/no/where': is neither a folder")
    ward = Ward(tmp_path, "/no/where")
    assert ward.problem() == "node 1000: says that it failed, in words that are not fedstrata's"


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (zlib.error(), "Exception"),
        (np.exceptions.AxisError(2, 1), "AxisError"),
        (np.linalg.LinAlgError(), "LinAlgError"),
        (torch.linalg.LinAlgError(), "LinAlgError"),  # type: ignore[attr-defined]
        (errors.RecipeError("a", 1, "b"), "RecipeError"),
        (UnicodeDecodeError("utf-8", b"", 0, 1, ""), "UnicodeDecodeError"),
        (type("KeyError", (ValueError,), {"__module__": "builtins"})(), "ValueError"),
        (type("DataError", (errors.MessageError,), {"__module__": "fedstrata.core.errors"})(""), "MessageError"),
        (type("Odd", (BaseException,), {})(), "BaseException"),
    ],
)
def test_the_name_of_an_exception_is_of_a_class_that_everybody_has(error: BaseException, name: str) -> None:
    """Not of one that has the name of another."""
    assert type_name(error) == name
    assert name in failures.TYPES


def test_the_documentation_has_every_kind() -> None:
    text = (Path(__file__).parents[3] / "docs" / "flower.md").read_text(encoding="utf-8")
    for kind in failures.KINDS:
        with pytest.raises(NodeFailed) as told:
            failures.read(RecordDict({"failure": ConfigRecord({"kind": kind, "type": "ValueError"})}))
        assert f"| `{kind}` | {str(told.value).partition(' (ValueError)')[0]} |" in text


def test_a_log_that_is_broken_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError(28, f"no space left on {SECRET}")

    logger = logging.getLogger("fedstrata")
    handler = Broken()
    logger.addHandler(handler)
    monkeypatch.setattr(logger, "disabled", False)
    try:
        ward = Ward(tmp_path, "/no/where")
        ward.engine._greet()
        assert not is_in(SECRET, ward.sent())
        failure = ward.grid.wire[0][1]["failure"]
        assert dict(failure.items()) == {"kind": "data", "type": "RecipeError"}
    finally:
        logger.removeHandler(handler)
