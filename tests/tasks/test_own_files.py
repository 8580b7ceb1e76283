"""A file for each client: what is read, what clients are called, and what is wrong in which column of which file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch

import fedstrata
from fedstrata import tasks
from fedstrata.core import rng
from fedstrata.core.errors import BadValue, DataError, RecipeError, UserError
from fedstrata.recipes.schema import load
from tests.support import node_data

WEST = "age,ill,pressure\n30,no,1.5\n50,yes,2.5\n70,yes,0.5\n"
EAST = "age,ill,pressure\n40,no,-1\n60,no,4\n"
TEST = "age,ill,pressure\n20,yes,1\n"

TRAINING: dict[str, Any] = {"training": {"rounds": 2, "batch_size": 2, "lr": 0.1}, "engine": {"workers": 1}}


@pytest.fixture
def hospitals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two hospitals and a test set, in the current directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hospitals").mkdir()
    (tmp_path / "hospitals" / "west.csv").write_text(WEST)
    (tmp_path / "hospitals" / "east.csv").write_text(EAST)
    (tmp_path / "test.csv").write_text(TEST)
    return tmp_path


def test_every_file_is_a_client_by_its_name(hospitals: Path) -> None:
    task = tasks.from_files("hospitals/*.csv", target="ill", test="test.csv", inputs="unit").build()
    assert task.notes["client_names"] == ["east", "west"]
    assert task.notes["class_names"] == ["no", "yes"]
    assert task.notes["table"] == [[2, 0], [1, 2]]
    inputs, targets = task.client(1).batch(np.arange(3))
    assert inputs.tolist() == [[30, 1.5], [50, 2.5], [70, 0.5]]
    assert targets.tolist() == [0, 1, 1]
    assert [part.tolist() for part in task.server_data("test").batch(np.arange(1))] == [[[20, 1]], [1]]
    assert task.model()(inputs).shape == (3, 2)


def test_columns_are_scaled_over_all_clients(hospitals: Path) -> None:
    """Ages 30, 50, 70, 40, 60: mean 50, variance (400 + 0 + 400 + 100 + 100)/5 = 200, so 70 is at 20/√200 = √2."""
    task = tasks.from_files("hospitals/*.csv", target="ill", test="test.csv").build()
    ages = task.client(1).batch(np.arange(3))[0][:, 0]
    torch.testing.assert_close(ages, torch.tensor([-(2**0.5), 0, 2**0.5]))
    torch.testing.assert_close(task.server_data("test").batch(np.arange(1))[0][0, 0], torch.tensor(-30 / 200**0.5))
    everyone = torch.cat([task.client(k).batch(np.arange(int(size)))[0] for k, size in enumerate(task.sizes())])
    torch.testing.assert_close(everyone.mean(0), torch.zeros(2), atol=1e-6, rtol=0)
    torch.testing.assert_close(everyone.std(0, correction=0), torch.ones(2))


def test_a_column_that_never_changes_is_zero(hospitals: Path) -> None:
    for name in ("east", "west"):
        (hospitals / "hospitals" / f"{name}.csv").write_text("a,b,label\n7,1,0\n7,2,1\n")
    task = tasks.from_files("hospitals/*.csv").build()
    assert task.client(0).batch(np.arange(2))[0].tolist() == [[0, -1], [0, 1]]


def test_classes_that_are_numbers_are_in_their_order(hospitals: Path) -> None:
    (hospitals / "a.csv").write_text("x,label\n1,10\n1,9\n1,100\n")
    assert tasks.from_files("a.csv").build().notes["class_names"] == ["9", "10", "100"]
    task = tasks.from_files("a.csv", classes=["100", "10", "9", "8"]).build()
    assert task.client(0).batch(np.arange(3))[1].tolist() == [1, 2, 0]


def test_files_in_several_folders_are_called_by_their_paths(hospitals: Path) -> None:
    for folder in ("north", "south"):
        (hospitals / folder).mkdir()
        (hospitals / folder / "data.csv").write_text(WEST)
    names = tasks.from_files("*th/data.csv", target="ill").build().notes["client_names"]
    assert names == ["north/data.csv", "south/data.csv"]


def test_parquet_is_read_as_csv_is(hospitals: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"age": [40, 60], "ill": ["no", "no"], "pressure": [-1.0, 4.0]})
    parquet.write_table(table, hospitals / "hospitals" / "north.parquet")
    task = tasks.from_files("hospitals/*", target="ill", inputs="unit").build()
    assert task.notes["client_names"] == ["east", "north", "west"]
    ours, theirs = (task.client(client).batch(np.arange(2)) for client in (1, 0))
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_folders_are_read_as_nodes_read_theirs(tmp_path: Path) -> None:
    """The samples of a task of nodes, with the same digits in each of four layouts."""
    images, labels = node_data.digits(12)
    for kind, write in node_data.WRITERS.items():
        write(tmp_path / "nodes" / kind, *node_data.sorted_by_class(images, labels))
    pattern = str(tmp_path / "nodes" / "*")
    task = tasks.from_files(pattern, shape=[1, 28, 28], classes=list("0123456789"), inputs="unit").build()
    assert task.notes["client_names"] == sorted(node_data.WRITERS)
    batches = [task.client(k).batch(np.arange(12)) for k in range(4)]
    expected, _ = node_data.sorted_by_class(images, labels)
    for inputs, targets in batches:
        assert torch.equal(inputs, torch.from_numpy(expected).float() / 255)
        assert targets.tolist() == sorted(labels.tolist())
    with pytest.raises(RecipeError, match=r"^task\.files\.shape = None: must be given, as csv is a folder$"):
        tasks.from_files(pattern, classes=["0", "1"]).build()


# --- runs ------------------------------------------------------------------------------------------------------------


def recipe() -> dict[str, Any]:
    files = {"clients": "hospitals/*.csv", "target": "ill", "test": "test.csv"}
    return {"name": "hospitals", "task": {"dataset": "files", "files": files, "model": {"name": "logreg"}}, **TRAINING}


def test_a_recipe_python_and_flower_end_in_the_same_run(
    hospitals: Path, same_run: Callable[..., None], monkeypatch: pytest.MonkeyPatch, cli: Any
) -> None:
    """And a run goes on from another directory: the recipe that it keeps has the whole path."""
    pytest.importorskip("flwr")
    from fedstrata.deployment.server import serve
    from tests.support.fake_grid import FakeGrid

    path = hospitals / "recipe.toml"
    path.write_text(tomli_w.dumps(recipe()))
    run = fedstrata.run(path, out="recipe")
    task = tasks.from_files("hospitals/*.csv", target="ill", test="test.csv")
    fedstrata.run({"name": "hospitals", **TRAINING}, task=task, out="python")
    same_run("recipe", "python")
    for _ in serve(FakeGrid(path, 2), {"recipe": str(path), "out": str(hospitals / "flower"), "wait": 10}):
        pass
    same_run("recipe", "flower", recipe=False)
    assert run.about.data.client_names == ["east", "west"]
    assert json.loads((hospitals / "recipe" / "run.json").read_text())["data"]["client_names"] == ["east", "west"]
    for shown in (cli("show", "recipe"), cli("partition", path)):
        assert "0 east" in shown.out
        assert "1 west" in shown.out
    (hospitals / "elsewhere").mkdir()
    monkeypatch.chdir(hospitals / "elsewhere")
    fedstrata.resume(hospitals / "recipe", settings={"training.rounds": 3})
    assert len(fedstrata.Run(hospitals / "recipe").history()) == 3


def test_without_a_test_set_clients_are_evaluated_on_their_own(hospitals: Path) -> None:
    """As on nodes: a share of each file is kept from training."""
    task = tasks.from_files("hospitals/*.csv", target="ill")
    rounds = list(fedstrata.simulate(task, rounds=1, workers=1, held_out=0.5))
    assert rounds[0][1].metrics["clients"]["clients"] == 2
    held_out = rng.generator(0, "held-out", client=1).permutation(3)[:2]
    kept = task.build(0, held_out=0.5).client_held_out(1).batch(np.arange(2))[0]
    assert torch.equal(kept, task.build().client(1).batch(held_out)[0])


# --- what is wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("west", "age,ill,weight\n1,no,2\n", "west.csv: column 2 of the inputs is 'weight', and in east.csv it"),
        ("west", "age,ill\n1,no\n", "west.csv: 1 columns of inputs, and east.csv has 2: 'pressure' is not here"),
        ("west", "age,pressure,ill,x\n1,2,no,3\n", "west.csv: 3 columns of inputs, and east.csv has 2: 'x' is only"),
        ("west", "age,label,pressure\n1,no,2\n", "west.csv: 0 columns are called ill, expected 1; there are: age, l"),
        ("west", "age,ill,pressure\n1,no,high\n", "west.csv: pressure = 'high' in row 1 is no number"),
        ("west", "age,ill,pressure\n1,no,2\n,no,2\n", "west.csv: age = '' in row 2 is no number"),
        ("west", "age,ill,pressure\n1,no,inf\n", "west.csv: pressure = inf in row 1 is not finite"),
        ("west", "", "west.csv: is empty"),
        ("test", "age,ill,pressure\n1,no,x\n", "test.csv: pressure = 'x' in row 1 is no number"),
    ],
)  # fmt: skip
def test_a_file_that_does_not_fit_is_named_with_its_column(hospitals: Path, name: str, text: str, problem: str) -> None:
    (hospitals / ("test.csv" if name == "test" else f"hospitals/{name}.csv")).write_text(text)
    with pytest.raises(DataError) as caught:
        tasks.from_files("hospitals/*.csv", target="ill", test="test.csv").build()
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"clients": "clinics/*.csv"}, r"^task\.files\.clients = '/.*/clinics/\*\.csv': matches no file$"),
        ({"test": "tests.csv"}, r"/tests\.csv: not a regular file"),
        ({"classes": ["sick", "well"]}, r"east\.csv: ill = 'no' in row 1 is no class; there are: 0, 1, sick, well"),
        ({"clients": "*"}, r"hospitals: is a folder, and others are files"),
    ],
)
def test_what_is_not_there_is_said_in_one_line(hospitals: Path, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem) as caught:
        tasks.from_files(**{"clients": "hospitals/*.csv", "target": "ill", **options}).build()
    assert "\n" not in str(caught.value)


def test_what_a_recipe_cannot_mean(hospitals: Path) -> None:
    for changes, problem in (
        ({"dataset": "mnist-mini"}, r"task\.files = .*goes with dataset = 'files'"),
        ({"partition": {"name": "iid", "clients": 3}}, r"task\.partition = .*every file is a client"),
        ({"files": {"client": "x"}}, r"task\.files\.client = 'x': unknown key; did you mean clients"),
    ):
        with pytest.raises(RecipeError, match=problem):
            load({**recipe(), "task": recipe()["task"] | changes})
    with pytest.raises(BadValue, match="classes"):
        tasks.from_files("*.csv", classes=["one"])
