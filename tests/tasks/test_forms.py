"""The forms that a client's data may have: all give the same run, and what has none of them is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import Dataset

import fedstrata
from fedstrata.clients.client import Client
from fedstrata.core import rng
from fedstrata.core.errors import DataError
from fedstrata.core.messages import Order, Reply
from fedstrata.core.status import Status
from fedstrata.recipes.experiment import build_experiment
from fedstrata.recipes.schema import load
from fedstrata.tasks.metric import Metric
from fedstrata.tasks.task import NestedSamples, Samples, Task, as_data

TABLE = {"training": {"rounds": 2, "epochs": 2, "batch_size": 4, "lr": 0.1}}


class Halves(NamedTuple):
    left: Any
    right: Any


class Listed(Dataset[Any]):
    """Samples as they are; it says that it has as many as we like."""

    def __init__(self, samples: list[Any], length: int | None = None) -> None:
        self.samples, self.length = samples, len(samples) if length is None else length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


class Asked:
    """Makes its batches by a function of the indices."""

    def __init__(self, batch: Callable[[np.ndarray], Any], length: int = 4) -> None:
        self.batch, self.length = batch, length

    def __len__(self) -> int:
        return self.length


class Sum(nn.Module):
    """A linear model of two halves of the features, whichever way it is given them."""

    def __init__(self, parts: Callable[[Any], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(2, 3), nn.Linear(2, 3)
        self.parts = parts

    def forward(self, inputs: Any) -> Tensor:
        left, right = self.parts(inputs)
        return self.left(left) + self.right(right)


def samples(inputs: Any, targets: Tensor, at: Callable[[Any, int], Any]) -> list[tuple[Any, int]]:
    return [(at(inputs, row), int(targets[row])) for row in range(len(targets))]


FORMS: dict[str, tuple[Any, Any]] = {
    # from left and right halves and targets: a client's data; from a batch's inputs: the two halves
    "one tensor": (lambda x, z, y: (torch.cat([x, z], 1), y), lambda i: (i[:, :2], i[:, 2:])),
    "dict": (lambda x, z, y: ({"left": x, "right": z}, y), lambda i: (i["left"], i["right"])),
    "dict of arrays": (lambda x, z, y: ({"a": x.numpy(), "b": [z]}, y.numpy()), lambda i: (i["a"], i["b"][0])),
    "tuple": (lambda x, z, y: ((x, z), y), lambda i: i),
    "list": (lambda x, z, y: ([x, z], y), lambda i: i),
    "namedtuple": (lambda x, z, y: (Halves(x, z), y), lambda i: (i.left, i.right)),
    "lists of numbers": (
        lambda x, z, y: (torch.cat([x, z], 1).tolist(), y.tolist()),
        lambda i: (i[:, :2], i[:, 2:]),
    ),
    "list of samples": (
        lambda x, z, y: samples((x, z), y, lambda i, row: Halves(i[0][row], i[1][row])),
        lambda i: (i.left, i.right),
    ),
    "Dataset of dicts": (
        lambda x, z, y: Listed(samples((x, z), y, lambda i, row: {"left": i[0][row], "right": i[1][row]})),
        lambda i: (i["left"], i["right"]),
    ),
    "batches of namedtuples": (
        lambda x, z, y: Asked(lambda rows: (Halves(x[rows], z[rows]), y[rows]), len(y)),
        lambda i: (i.left, i.right),
    ),
}


def halves(size: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(size, 2, generator=generator) for _ in range(2))
    return left, right, torch.randint(0, 3, (size,), generator=generator)


def test_every_form_gives_the_same_run(tmp_path: Path) -> None:
    """Clients of 9 and of 2 samples: a list of two samples is a data set of two."""
    histories, digests = {}, {}
    for number, (form, (data, parts)) in enumerate(FORMS.items()):
        task = Task(
            model=partial(Sum, parts),
            clients=[data(*halves(size, size)) for size in (9, 2, 5)],
            held_out=[data(*halves(size, 10 + size)) for size in (2, 3, 4)],
            evaluation={"test": data(*halves(30, 99))},
        )
        assert task.sizes().tolist() == [9, 2, 5]
        assert task.held_out_sizes().tolist() == [2, 3, 4]
        table = TABLE | {"engine": {"workers": 1 + number % 2}, "evaluation": {"on": ["test", "clients"]}}
        run = fedstrata.run(table, task=task, out=tmp_path / str(number))
        histories[form] = [line["metrics"] for line in run.history()]
        digests[form] = run.summary()["weights_sha256"]
        assert run.history()[-1]["clients"] == 3
    assert len(set(digests.values())) == 1, digests
    assert all(history == histories["one tensor"] for history in histories.values())


class Reader(nn.Module):
    """An LSTM over sequences of unequal lengths, packed by the data, or here."""

    def __init__(self) -> None:
        super().__init__()
        self.reader, self.head = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, inputs: Any) -> Tensor:
        if isinstance(inputs, dict):
            inputs = pack(inputs["padded"], inputs["lengths"])
        return self.head(self.reader(inputs)[1][0][-1])


def pack(padded: Tensor, lengths: Tensor) -> Any:
    return pack_padded_sequence(padded, lengths, batch_first=True, enforce_sorted=False)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_packed_sequences_give_the_run_of_padded_ones(tmp_path: Path, dtype: str) -> None:
    def sequences(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, 6, (7,), generator=generator)
        return torch.randn(7, 5, 2, generator=generator), lengths, torch.randint(0, 2, (7,), generator=generator)

    def packed(padded: Tensor, lengths: Tensor, targets: Tensor) -> Asked:
        return Asked(lambda rows: (pack(padded[rows], lengths[rows]), targets[rows]), 7)

    def together(padded: Tensor, lengths: Tensor, targets: Tensor) -> Any:
        return {"padded": padded, "lengths": lengths}, targets

    runs = [
        fedstrata.run(
            TABLE | {"engine": {"workers": 1, "dtype": dtype}, "evaluation": {"batch_size": 3}},
            task=Task(Reader, [make(*sequences(k)) for k in range(3)], {"test": make(*sequences(9))}),
            out=tmp_path / make.__name__,
        )
        for make in (packed, together)
    ]
    assert runs[0].summary()["weights_sha256"] == runs[1].summary()["weights_sha256"]
    assert [line["metrics"] for line in runs[0].history()] == [line["metrics"] for line in runs[1].history()]
    assert runs[0].history()[-1]["clients"] == 3


# --- refused by name -------------------------------------------------------------------------------------------------

X, Y = torch.ones(4, 2), torch.tensor([0, 1, 0, 1])

AT_ONCE: dict[str, tuple[Any, str]] = {
    "a list of two tensors": ([X, Y], "a list is one of samples, and this one has Tensor and Tensor; use a tuple, "),
    "a list of two arrays": ([X.numpy(), Y.numpy()], "has ndarray and ndarray; use a tuple, (inputs, targets)"),
    "a list of a dict and a tensor": ([{"a": X}, Y], "has dict of 1 and Tensor; use a tuple, (inputs, targets)"),
    "unequal lengths": ((X, Y[:3]), "inputs has 4 samples, but targets has 3"),
    "unequal lengths in a dict": (({"a": X, "b": X[:2]}, Y), "inputs['a'] has 4 samples, but inputs['b'] has 2"),
    "unequal lengths in a namedtuple": ((X, Halves(Y, Y[1:])), "inputs has 4 samples, but targets.right has 3"),
    "a tuple of two samples": (((X[0], 0), (X[1], 1)), "inputs[1] is the number 0, without a row for each sample"),
    "no tensor": (({}, Y), "there is no tensor in its inputs"),
    "no targets": ((X, None), "expected a tensor or array, got NoneType"),
    "words": ((X, ["a", "b", "c", "d"]), "expected a tensor or array, got str"),
    "a dict": ({"x": X, "y": Y}, "got dict of 2"),
    "a number": (3, "got int"),
    "a class": (Listed, "got type"),
    "rows that are not there": (Samples(X, Y, np.array([0, 4])), "its rows go from 0 to 4, but there are 4, from 0"),
    "rows below 0": (Samples(X, Y, np.array([-1, 2])), "its rows go from -1 to 2, but there are 4, from 0"),
    "unequal samples": (Samples(X, Y[:3]), "inputs has 4 samples, but targets has 3"),
}


@pytest.mark.parametrize("case", AT_ONCE)
def test_what_has_no_form_is_refused_before_training_with_the_clients_name(case: str, tmp_path: Path) -> None:
    data, problem = AT_ONCE[case]
    with pytest.raises(DataError) as error:
        fedstrata.run(TABLE, task=Task(linear, [(X, Y), data], {"test": (X, Y)}), out=tmp_path / "run")
    assert str(error.value).startswith("clients[1]: ")
    assert problem in str(error.value)
    assert list(tmp_path.iterdir()) == []
    for name, ask in (
        ("held_out[1]", lambda: Task(linear, [X, X], held_out=[(X, Y), data]).client_held_out(1)),
        ("validation", lambda: Task(linear, [X], {"validation": data}).server_data("validation")),
    ):
        with pytest.raises(DataError) as error:
            ask()
        assert str(error.value).startswith(f"{name}: ")
        assert problem in str(error.value)


def linear() -> nn.Module:
    return nn.Linear(2, 2)


IN_A_BATCH: dict[str, tuple[Any, str]] = {
    "a tensor": (X, "sample 1 must be a pair (input, target), not Tensor"),
    "a sample of three": (Listed([(X[0], 0), (X[0], 0, 0)]), "sample 1 must be a pair (input, target), not tuple of 3"),
    "a sample as a dict": (Listed([(X[0], 0), {"x": X[0], "y": 0}]), "not dict of 2"),
    "a list of three tensors": ([X, Y, Y], "sample 1 must be a pair (input, target), not Tensor"),
    "unequal shapes": (
        Listed([(X[0], 0), (X[:, 0], 1)]),
        "samples cannot be put into one batch: RuntimeError: stack expects each",
    ),
    "a thing": (
        Listed([(SimpleNamespace(), 0)] * 2),
        "samples cannot be put into one batch: TypeError: default_collate: batch must",
    ),
    "unequal keys": (Listed([({"a": 1}, 0), ({"b": 1}, 0)]), "samples cannot be put into one batch: KeyError: '"),
    "too long": (Listed([(X[0], 0)], length=2), "sample 1 of 2: IndexError: list index out of range"),
    "a batch of inputs only": (Asked(lambda rows: X[rows]), "batch(indices) must give a pair (inputs, targets), not T"),
    "a batch of three": (
        Asked(lambda rows: (X, Y, Y)),
        "batch(indices) must give a pair (inputs, targets), not tuple ",
    ),
    "a batch as a dict": (Asked(lambda rows: {"x": X, "y": Y}), "not dict of 2"),
}


@pytest.mark.parametrize("case", IN_A_BATCH)
def test_what_is_found_in_a_batch_is_refused_with_the_clients_name(case: str) -> None:
    data, problem = IN_A_BATCH[case]
    task = Task(lambda: nn.Linear(2, 2), [(X, Y), data], {"test": data}, held_out=[(X, Y), data])
    indices = np.array([1, 0])
    for name, found in (
        ("clients[1]", task.client(1)),
        ("held_out[1]", task.client_held_out(1)),
        ("test", task.server_data("test")),
    ):
        with pytest.raises(DataError) as error:
            found.batch(indices)
        assert str(error.value).startswith(f"{name}: ")
        assert problem in str(error.value)


def test_a_run_says_whose_samples_could_not_be_used(tmp_path: Path) -> None:
    """The others go on; the second client's samples are of two shapes."""
    bad = Listed([(X[0], 0), (X[:, 0], 1)])
    run = fedstrata.run(TABLE, task=Task(linear, [(X, Y), bad], {"test": (X, Y)}), out=tmp_path / "r")
    lost = run.history()[0]["lost"]
    assert len(lost) == 1
    assert "DataError: clients[1]: samples cannot be put into one batch" in str(lost)


def test_a_mistake_in_the_users_code_keeps_its_own_words_and_place() -> None:
    class Patients(Dataset[Any]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            raise OSError("the disk is gone")

    class Short(Patients):
        def __getitem__(self, index: int) -> Any:
            return [][index]

    task = Task(lambda: nn.Linear(2, 2), [Patients(), Short()], {"test": (X, Y)})
    with pytest.raises(OSError, match=r"^the disk is gone$"):
        task.client(0).batch(np.arange(2))
    setup = build_experiment(load({"evaluation": {"on": ["test"]}}), task)
    model = setup.first_state().model
    client = Client(setup.setup)
    mask = torch.ones(len(setup.layers), dtype=torch.bool)
    answers = [client.answer(Order("train", 1, 0, k, model=model, answer="layers", mask=mask)) for k in (0, 1)]
    found = [answer.reason for answer in answers if isinstance(answer, Status)]
    assert found[0].startswith("OSError: the disk is gone (test_forms.py, line ")
    assert found[1].startswith("DataError: clients[1]: sample ")
    assert "of 3: IndexError: list index out of range (test_forms.py, line " in found[1]


# --- what is counted and measured ------------------------------------------------------------------------------------


def test_classes_are_counted_beside_nests_of_inputs() -> None:
    nested = ({"a": X, "b": (X,)}, Y)
    assert Task(linear, [nested, (X, Y)]).described()["table"] == [[2, 2], [2, 2]]
    assert Task(linear, [(X, {"y": Y})]).described() == {}
    rows = NestedSamples({"a": X}, Y, np.array([1, 3]))
    assert Task(linear, [rows]).described()["table"] == [[0, 2]]
    assert Task(linear, [rows]).sizes().tolist() == [2]


class Named(nn.Module):
    """Answers in a nest, with a place for what it does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, inputs: Any) -> Any:
        return {"logits": self.linear(inputs["x"]), "rest": Halves(inputs["number"], None)}


def one_of_each(outputs: Any, targets: Any) -> float:
    """Depends on all samples at once, on every part of outputs and targets, and on their order."""
    left, right = outputs["logits"].double().T
    order = torch.arange(1, len(left) + 1)
    assert outputs["rest"].right is None
    assert torch.equal(outputs["rest"].left, targets[1]["number"])
    return float((left * order).max() - (right * targets[0]).min() + len(left))


@pytest.mark.parametrize("batch", [3, 10, 1000])
def test_a_whole_metric_of_nests_sees_all_samples_at_once(batch: int) -> None:
    left, _, targets = halves(23, 1)
    number = torch.arange(23)
    data = ({"x": left, "number": number}, (targets, {"number": number}))
    task = Task(
        Named,
        [data],
        {"test": data},
        loss=lambda outputs, targets: nn.functional.cross_entropy(outputs["logits"], targets[0] % 2),
        metric=Metric("each", one_of_each, whole=True),
    )
    setup = build_experiment(load({"evaluation": {"batch_size": batch}}), task)
    order = Order("evaluate", 1, 0, rng.SERVER, model=setup.first_state().model, dataset="test")
    found = Client(setup.setup).answer(order)
    assert isinstance(found, Reply)
    with torch.no_grad():
        outputs = setup.build()(data[0])
    assert found.metrics["each"] == pytest.approx(one_of_each(outputs, data[1]), rel=1e-6)


def test_a_whole_metric_of_what_cannot_be_put_together() -> None:
    task = Task(
        lambda: nn.Linear(2, 2),
        [(X, Y)],
        {"test": Asked(lambda rows: (X[rows], ["word"] * len(rows)))},
        loss=lambda outputs, targets: outputs.sum(),
        metric=Metric("bleu", lambda outputs, targets: 0.0, whole=True),
    )
    setup = build_experiment(load({"evaluation": {"batch_size": 3}}), task)
    order = Order("evaluate", 1, 0, rng.SERVER, model=setup.first_state().model, dataset="test")
    answer = Client(setup.setup).answer(order)
    assert isinstance(answer, Status)
    error = answer.reason
    assert error.startswith("DataError: metric 'bleu' needs all samples at once, and outputs or targets of several bat")


def test_data_that_has_its_form_is_not_wrapped_again() -> None:
    """A node's data has been given its name already."""
    for data in ((X, Y), Listed([(X[0], 0)]), Asked(lambda rows: (X[rows], Y[rows]))):
        found = as_data(data, "hospital:patients")
        assert as_data(found, "clients[0]") is found
