"""Data sets of other libraries: a stand-in for Hugging Face's, samples one by one, and what cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedstrata
from fedstrata import partitions, tasks
from fedstrata.core.errors import BadValue, DataError, RecipeError
from fedstrata.tasks import mapped
from fedstrata.tasks.metric import Metric
from fedstrata.tasks.task import Samples


class Hub:
    """What fedstrata uses of a Hugging Face Dataset: columns of plain lists, and arrays in the format "numpy".

    As there, rows are a number, a slice or a list; images are pictures until they are asked for as arrays.
    """

    def __init__(self, columns: Mapping[str, list[Any]], features: Any = None, chosen: Any = None) -> None:
        self.columns, self.features = dict(columns), features or {}
        self.column_names = list(columns)
        self.format = {"type": chosen}
        self.read: list[tuple[str, ...]] = []

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def with_format(self, type: str, columns: list[str]) -> Hub:
        found = Hub({name: self.columns[name] for name in columns}, self.features, type)
        found.read = self.read
        return found

    def __getitem__(self, rows: Any) -> dict[str, Any]:
        self.read.append(tuple(self.column_names))
        at = list(range(len(self)))[rows] if isinstance(rows, slice) else rows
        if isinstance(at, int):
            return {name: column[at] for name, column in self.columns.items()}
        found = {name: [column[row] for row in at] for name, column in self.columns.items()}
        return {name: _array(values) for name, values in found.items()} if self.format["type"] == "numpy" else found


def _array(values: list[Any]) -> Any:
    arrays = [np.asarray(value) for value in values]
    return np.stack(arrays) if len({array.shape for array in arrays}) == 1 else arrays


def pictures(count: int, seed: int = 0, channels: tuple[int, ...] = (3,)) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 256, (8, 6, *channels), dtype=np.uint8) for _ in range(count)]


HOSPITALS = ["west", "east", "west", "north", "east", "west"]
LABELS = [0, 1, 2, 1, 0, 2]


def hub(**more: list[Any]) -> Hub:
    return Hub({"image": pictures(6), "label": LABELS, "hospital": HOSPITALS, **more})


def test_a_column_says_whose_each_sample_is_and_names_are_kept() -> None:
    """The clients are the column's values in their order: east has samples 1 and 4, north 3, west 0, 2 and 5."""
    task = tasks.from_dataset(hub(), inputs="image", targets="label", partition_by="hospital", model="logreg").build()
    assert task.notes["client_names"] == ["east", "north", "west"]
    assert task.notes["table"] == [[1, 1, 0], [0, 1, 0], [1, 0, 2]]
    assert task.notes["class_names"] == ["0", "1", "2"]
    inputs, targets = task.client(2).batch(np.arange(3))
    expected = np.stack([pictures(6)[at].transpose(2, 0, 1) for at in (0, 2, 5)]).astype(np.float32) / np.float32(255)
    assert np.array_equal(inputs.numpy(), expected)
    assert targets.tolist() == [0, 2, 2]
    assert sum(p.numel() for p in task.model().parameters()) == 3 * 8 * 6 * 3 + 3


def test_columns_that_are_not_needed_are_not_read() -> None:
    """An image that nobody asked for would be decoded for nothing."""
    dataset = hub(scan=pictures(6, seed=1))
    tasks.from_dataset(dataset, inputs="image", targets="label", partition_by="hospital", model="logreg").build()
    assert set(dataset.read) == {("image",), ("label",), ("hospital",)}


def test_the_data_set_knows_what_numbers_stand_for() -> None:
    features = {
        "label": SimpleNamespace(names=["cat", "dog", "owl", "fox"]),
        "hospital": SimpleNamespace(names=["A", "B"]),
    }
    dataset = Hub({"image": pictures(4), "label": [0, 2, 2, 0], "hospital": [1, 0, 1, 1]}, features)
    notes = (
        tasks.from_dataset(dataset, inputs="image", targets="label", partition_by="hospital", model="cnn").build().notes
    )
    assert notes["class_names"] == ["cat", "dog", "owl", "fox"]
    assert notes["client_names"] == ["A", "B"]
    assert notes["table"] == [[0, 0, 1, 0], [2, 0, 1, 0]]


def test_samples_may_be_dicts_tuples_or_arrays_and_are_the_same() -> None:
    images = pictures(6)
    dicts = [{"image": image, "label": label} for image, label in zip(images, LABELS, strict=True)]
    tensors = [(torch.from_numpy(image).permute(2, 0, 1), label) for image, label in zip(images, LABELS, strict=True)]
    found = [
        tasks.from_dataset(hub(), inputs="image", targets="label", partition_by=HOSPITALS, model="logreg"),
        tasks.from_dataset(dicts, inputs="image", targets="label", partition_by=np.array(HOSPITALS), model="logreg"),
        tasks.from_dataset(tensors, partition_by=HOSPITALS, model="logreg"),
        tasks.from_dataset(list(zip(images, LABELS, strict=True)), partition_by=HOSPITALS, model="logreg"),
    ]
    batches = [task.build().client(2).batch(np.arange(3)) for task in found]
    for inputs, targets in batches[1:]:
        assert torch.equal(inputs, batches[0][0])
        assert torch.equal(targets, batches[0][1])


def test_grey_pictures_have_one_channel_and_floats_stay_as_they_are() -> None:
    grey = Hub({"image": pictures(2, channels=()), "label": [0, 1]})
    task = tasks.from_dataset(grey, inputs="image", targets="label", partition_by=[0, 0], model="logreg").build()
    assert task.client(0).batch(np.arange(2))[0].shape == (2, 1, 8, 6)
    points = [(np.array([300.0, -1.5]), 0), (np.array([0.25, 7]), 1)]
    task = tasks.from_dataset(points, partition_by=[0, 1], model="logreg", transform=lambda x: 2 * x).build()
    assert task.client(1).batch(np.arange(1))[0].tolist() == [[0.5, 14]]


def test_several_inputs_are_a_dict_and_texts_are_classes() -> None:
    dataset = Hub({"a": [[1, 2], [3, 4]], "b": [[0.5], [1.5]], "word": ["yes", "no"]})
    test = Hub({"a": [[5, 6]], "b": [[2.5]], "word": ["yes"]})

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(1, 2)

        def forward(self, inputs: dict[str, Tensor]) -> Tensor:
            return self.fc(inputs["b"]) + inputs["a"]

    task = tasks.from_dataset(
        dataset, inputs=["a", "b"], targets="word", partition_by=[1, 1], model=Both, test=test
    ).build()
    inputs, targets = task.client(0).batch(np.array([1, 0]))
    assert inputs["a"].tolist() == [[3, 4], [1, 2]]
    assert inputs["b"].tolist() == [[1.5], [0.5]]
    assert targets.tolist() == [0, 1]
    assert task.notes["class_names"] == ["no", "yes"]
    assert task.server_data("test").batch(np.arange(1))[1].tolist() == [1]
    assert task.notes["client_names"] == ["1"]


def test_drawn_partitions_are_those_of_a_data_set_in_a_recipe(user_module: Callable[[str, str], str]) -> None:
    """The same samples by `module:function`: the same clients for each seed."""
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.rand(60, 5, generator=generator), torch.randint(3, (60,), generator=generator)
    torch.save((inputs, labels), "pair.pt")
    user_module("mine", "import torch\ndef data():\n    pair = torch.load('pair.pt')\n    return pair, pair\n")
    scheme = partitions.dirichlet(clients=4, alpha=0.5)
    task = tasks.from_dataset(
        list(zip(inputs, labels.tolist(), strict=True)), partition=scheme, model="logreg", validation=10
    )
    table = {"dataset": "mine:data", "validation": 10, "partition": {"name": "dirichlet", "clients": 4, "alpha": 0.5}}
    recipe = fedstrata.load({"task": table | {"model": {"name": "logreg"}}})
    for seed in (0, 3):
        ours, theirs = task.build(seed, 0.2), tasks.SeededTask(recipe.task).build(seed, 0.2)
        assert ours.sizes().tolist() == theirs.sizes().tolist()
        for client in range(4):
            rows = np.arange(int(ours.sizes()[client]))
            for one, other in zip(ours.client(client).batch(rows), theirs.client(client).batch(rows), strict=True):
                assert torch.equal(one, other)


def test_what_is_too_large_to_be_kept_is_read_when_it_is_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_run: Callable[..., None]
) -> None:
    """Kept or not, and with one worker or two: the same bits."""
    task = tasks.from_dataset(
        hub(), inputs="image", targets="label", partition_by="hospital", model="logreg", test=hub(), augment=["crop"]
    )
    recipe: dict[str, Any] = {"training": {"rounds": 2, "batch_size": 2, "lr": 0.1}, "engine": {"workers": 1}}
    fedstrata.run(recipe, task=task, out=tmp_path / "kept")
    monkeypatch.setattr(mapped, "KEPT", 6 * 8 * 6 * 3 * 4 - 1)
    lazy = task.build()
    assert not isinstance(lazy.server_data("train"), Samples)
    fedstrata.run(recipe, task=task, out=tmp_path / "read")
    fedstrata.run(recipe, task=task, settings={"engine.workers": 2}, out=tmp_path / "two")
    same_run(tmp_path / "kept", tmp_path / "read")
    same_run(tmp_path / "kept", tmp_path / "two", recipe=False)
    monkeypatch.setattr(mapped, "KEPT", 6 * 8 * 6 * 3 * 4)
    assert isinstance(task.build().evaluation["train"], Samples)


class Shaky:
    """A data set that augments on its own, as those with random transforms do."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((4,), float(index)) + torch.rand(4), index % 2


def test_samples_that_are_drawn_when_they_are_read_are_not_kept() -> None:
    data = tasks.from_dataset(Shaky(), partition_by=[0] * 8, model="logreg").build().client(0)
    one, other = (data.batch(np.arange(8))[0] for _ in range(2))
    assert not torch.equal(one, other)
    assert torch.equal(one.floor(), other.floor())


def test_a_form_that_its_owner_has_chosen_stays() -> None:
    """As `with_transform` of Hugging Face makes it: columns that are not listed."""
    rows = [{"pixels": torch.full((2,), float(at)), "label": at % 2} for at in range(4)]

    class Transformed(Hub):
        def __getitem__(self, at: Any) -> dict[str, Any]:
            return {key: [rows[row][key] for row in at] for key in rows[0]}

    dataset = Transformed({"image": [0] * 4, "label": [0, 1, 0, 1]}, chosen="custom")
    task = tasks.from_dataset(dataset, inputs="pixels", targets="label", partition_by=[0, 0, 1, 1], model="logreg")
    assert task.build().client(1).batch(np.arange(2))[0].tolist() == [[2, 2], [3, 3]]


def test_a_loss_and_a_metric_of_ones_own_for_targets_that_are_numbers(tmp_path: Path) -> None:
    samples = [(torch.tensor([float(at)]), 2.0 * at) for at in range(8)]
    error = Metric("error", lambda outputs, targets: (outputs[:, 0] - targets).abs().mean(), "min")
    task = tasks.from_dataset(
        samples,
        partition=partitions.iid(2),
        model=lambda: nn.Linear(1, 1),
        loss=lambda outputs, targets: nn.functional.mse_loss(outputs[:, 0], targets),
        metric=error,
    )
    rounds = list(fedstrata.simulate(task, rounds=2, lr=0.001, workers=1))
    assert {"error", "loss"} <= set(rounds[-1][1].metrics["clients"])


def test_without_a_test_set_a_run_is_evaluated_on_clients(tmp_path: Path) -> None:
    task = tasks.from_dataset(hub(), inputs="image", targets="label", partition_by="hospital", model="logreg")
    settings: dict[str, Any] = {"rounds": 1, "workers": 1, "held_out": 0.5}
    ways: list[tuple[Any, dict[str, Any]]] = [(task, {}), ({"name": "mine"}, {"task": task})]
    for what, more in ways:
        run = fedstrata.run(what, out=tmp_path / str(len(more)), **more, **settings)
        assert run.history()[0]["metrics"]["clients"]["clients"] == 2, "north has one sample, which is trained on"
    assert len(repr(task)) < 1000, "not the samples"


@pytest.mark.parametrize(
    ("dataset", "options", "problem"),
    [
        (hub(), {"inputs": "img"}, r"inputs is no column of dataset; there are: image, label, hospital, got 'img'"),
        (hub(), {"targets": "ill"}, r"targets is no column of dataset; .*, got 'ill'"),
        (hub(), {"partition": partitions.iid(2)}, "partition.*two answers"),
        (hub(), {"partition_by": None}, "partition.*must say who holds which samples"),
        ({"train": hub(), "test": hub()}, {}, r"dataset is several data sets; .*, got \['train', 'test'\]"),
        (iter([1]), {}, "dataset must have a length and give samples by number, got 'list_iterator'"),
        (hub(), {"partition_by": [1, 2]}, r"partition_by has shape \[2\], expected one value for each of the 6"),
        ([], {}, "dataset: has no samples"),
        ([{"image": [1.0]}], {}, "dataset: sample 0 has no 'label'; it has: image"),
        ([([1.0], 0)], {}, "dataset: sample 0 has no 'label'; it has: a tuple"),
        (hub(label=[0, 1, 2, None, 0, 1]), {}, r"dataset: 'label' of sample 3 is missing \(None\)"),
        (hub(label=[0, 1, 2, -1, 0, 1]), {}, "dataset: 'label' goes from -1 to 2, expected 0 to 2"),
        (hub(hospital=["a", "b", None, "a", "b", "a"]), {}, "dataset: 'hospital' of sample 2 is missing"),
        (hub(image=["a"] * 6), {}, "inputs must be numbers or images, and 'a' is none; convert it before"),
        (
            hub(image=[*pictures(5), np.zeros((8, 7, 3), np.uint8)]),
            {},
            r"'image' of sample 5 has shape \[8, 7, 3\], and of sample 0 it has \[8, 6, 3\]; bring them to one shape",
        ),
        (
            hub(label=list("abcabc")),
            {"test": hub(label=list("abcabd"))},
            "test: 'label' = 'd' of sample 5 is no class; there are: a, b, c",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_said_in_one_line(dataset: Any, options: dict[str, Any], problem: str) -> None:
    given = {"inputs": "image", "targets": "label", "partition_by": "hospital"} | options
    if isinstance(dataset, list):
        given["partition_by"] = [0] * len(dataset)
    with pytest.raises((BadValue, DataError, RecipeError), match=problem) as caught:
        tasks.from_dataset(dataset, model="logreg", **given).build()
    assert "\n" not in str(caught.value)
