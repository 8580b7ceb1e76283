"""Data on clients' own nodes: every layout gives the same samples, and nothing in a file is trusted."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedstrata.core.errors import DataError, RecipeError
from fedstrata.recipes.experiment import Experiment, build_experiment
from fedstrata.recipes.schema import load
from fedstrata.runs.runner import create_run
from fedstrata.tasks.config import NodesConfig
from fedstrata.tasks.nodes import own_task, read_own_folder
from fedstrata.tasks.partitions import split
from tests.support import node_data

CONFIG = NodesConfig(clients=3, shape=[1, 28, 28], classes=10)


def recipe_of_nodes(tiny: Callable[..., dict[str, Any]], **nodes: Any) -> dict[str, Any]:
    table = tiny({"evaluation.on": ["clients"], "engine.name": "flower"})
    shape = {"clients": 3, "shape": [1, 28, 28], "classes": 10, **nodes}
    table["task"] = {"dataset": "nodes", "inputs": "unit", "nodes": shape, "model": table["task"]["model"]}
    return table


# --- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", node_data.WRITERS)
def test_every_layout_gives_the_same_samples(kind: str, tmp_path: Path) -> None:
    images, labels = node_data.digits(30)
    if kind == "image":
        images, labels = node_data.sorted_by_class(images, labels)
    node_data.WRITERS[kind](tmp_path / "data", images, labels)
    samples = read_own_folder(tmp_path / "data", CONFIG)
    assert samples.inputs.dtype == torch.float32
    assert torch.equal(samples.inputs, torch.from_numpy(images).float() / 255)
    assert samples.targets.tolist() == labels.tolist()


def test_two_files_of_a_kind_are_read_one_after_the_other(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 1)):
        images, labels = node_data.digits(4, seed)
        (tmp_path / f"{name}-images.idx3-ubyte.gz").write_bytes(gzip.compress(node_data.idx(images[:, 0])))
        (tmp_path / f"{name}-labels.idx1-ubyte").write_bytes(node_data.idx(labels))
    expected = [label for seed in (0, 1) for label in node_data.digits(4, seed)[1].tolist()]
    assert read_own_folder(tmp_path, CONFIG).targets.tolist() == expected


def test_inputs_are_scaled_per_channel(tmp_path: Path) -> None:
    """(0.5 − 0.1)/0.2 = 2 and (1 − 0.4)/0.3 = 2; (0 − 0.1)/0.2 = −0.5 and (0.1 − 0.4)/0.3 = −1."""
    (tmp_path / "a.csv").write_text("x,label,y\n0.5,cat,1\n0,dog,0.1\n")
    config = NodesConfig(clients=1, shape=[2], classes=["dog", "cat"], mean=[0.1, 0.4], std=[0.2, 0.3])
    samples = read_own_folder(tmp_path, config)
    torch.testing.assert_close(samples.inputs, torch.tensor([[2.0, 2.0], [-0.5, -1.0]]))
    assert samples.targets.tolist() == [1, 0]


def test_the_numbers_of_an_image_are_bytes_or_from_0_to_1(tmp_path: Path) -> None:
    """A CSV file of bytes gives what an idx file of them gives; what can be neither is refused."""
    images, labels = node_data.digits(5)
    node_data.write_idx(tmp_path / "idx", images, labels)
    pairs = zip(images, labels.tolist(), strict=True)
    rows: list[list[Any]] = [[*image.flatten().tolist(), label] for image, label in pairs]
    header = [*(f"p{number}" for number in range(784)), "label"]

    def write(rows: list[list[Any]]) -> None:
        (tmp_path / "csv").mkdir(exist_ok=True)
        (tmp_path / "csv" / "a.csv").write_text("\n".join(",".join(map(str, row)) for row in [header, *rows]) + "\n")

    write(rows)
    expected, ours = (read_own_folder(tmp_path / kind, CONFIG) for kind in ("idx", "csv"))
    assert torch.equal(ours.inputs, expected.inputs)
    assert torch.equal(ours.targets, expected.targets)
    write([[256, *rows[0][1:]]])
    with pytest.raises(DataError, match=r"inputs from 0 to 256; those of images, as shape \[1, 28, 28\] says"):
        read_own_folder(tmp_path / "csv", CONFIG)


def test_a_parquet_file_of_numbers_is_a_table(tmp_path: Path) -> None:
    """The columns are inputs in their order, whatever their type; the classes go by name or number."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    def write(**columns: Any) -> None:
        parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")

    config = NodesConfig(clients=1, shape=[2], classes=["ok", "broken"])
    write(x=[300, 2], label=["broken", "0"], y=[0.5, -1.5])
    samples = read_own_folder(tmp_path, config)
    assert samples.inputs.tolist() == [[300, 0.5], [2, -1.5]]
    assert samples.targets.tolist() == [1, 0]
    for columns, problem in (
        ({"x": [1], "label": [0]}, "1 columns of inputs, expected 2"),
        ({"x": [1], "y": [None], "label": [0]}, "y = nan in row 1 is not finite"),
        ({"x": [1], "y": ["high"], "label": [0]}, "columns of images or numbers.*'high'"),
        ({"x": [1], "y": [1], "label": [None]}, "label = 'None' in row 1 is no class"),
        ({"x": [1], "y": [1], "z": [0]}, "0 columns are called label, expected 1; there are: x, y, z"),
    ):
        write(**columns)
        with pytest.raises(DataError, match=f"a.parquet: .*{problem}"):
            read_own_folder(tmp_path, config)


def test_numbers_of_every_type_are_rounded_as_numpy_rounds_them(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    generator = np.random.default_rng(0)
    whole = generator.integers(-(2**62), 2**62, 1000)
    columns = {
        "whole": whole,
        "large": whole.astype(np.uint64),
        "double": whole * 1e-20,
        "half": (whole * 1e-18).astype(np.float16),
        "decimal": [Decimal(int(number) >> 33).scaleb(-3) for number in whole],
        "truth": whole > 0,
    }
    expected = np.stack([np.array(column, np.float32) for column in columns.values()], axis=1)
    parquet.write_table(pyarrow.table(columns | {"label": whole % 10}), tmp_path / "a.parquet")
    samples = read_own_folder(tmp_path, NodesConfig(clients=1, shape=[6], classes=10))
    assert np.array_equal(samples.inputs.numpy(), expected)
    assert samples.targets.tolist() == (whole % 10).tolist()


def test_a_parquet_file_of_images_may_have_plain_bytes_and_names(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    images, _ = node_data.digits(2)
    table = pyarrow.table({"image": [node_data.png(image[0]) for image in images], "label": ["7", "2"]})
    parquet.write_table(table, tmp_path / "a.parquet")
    samples = read_own_folder(tmp_path, CONFIG)
    assert torch.equal(samples.inputs, torch.from_numpy(images).float() / 255)
    assert samples.targets.tolist() == [7, 2]


def test_what_a_camera_or_a_file_manager_leaves_behind(tmp_path: Path) -> None:
    """Names in capitals are names; hidden files are not samples."""
    images, _ = node_data.digits(1)
    for name in ("3/A.PNG", "3/._A.PNG", ".trash/b.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(node_data.png(images[0, 0]))
    (tmp_path / ".old.csv").write_text("")
    assert read_own_folder(tmp_path, CONFIG).targets.tolist() == [3]


POINTS = NodesConfig(clients=1, shape=[2], classes=2)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is empty"),
        ("\n", "0 columns are called label"),
        ("x,y,label,label\n", "2 columns are called label"),
        ("x,y,z,label\n", "3 columns of inputs, expected 2"),
        ("x,y,label\n1,2,2\n", "label = '2' in row 1 is no class; there are: 0, 1"),
        ("x,y,label\n1,2,nan\n", "label = 'nan' in row 1 is no class"),
        ("x,y,label\n1,two,0\n", "y = 'two' in row 1 is no number"),
        ("x,label,y\n1,0,2\n3,0,\n", "y = '' in row 2 is no number"),
        ("label,x,y\n1,2\n", "2 columns under a header of 3"),
        ("x,y,label\n1,2\n", "number of fields 2"),
        ("x,y,label\n1,2,0\n1,2\n", "number of columns changed from 3 to 2 at row 2"),
        ("x,y,label\n1,inf,0\n", "y = inf in row 1 is not finite"),
        ("x,y,label\n1,1e39,0\n", "y = inf in row 1 is not finite"),
        ("x,y,label\n\x00,2,0\n", "x = '\\x00' in row 1 is no number"),
    ],
)
def test_a_csv_file_that_makes_no_sense(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(DataError) as error:
        read_own_folder(tmp_path, POINTS)
    assert problem in str(error.value)
    assert "a.csv" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_csv_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"a\.csv"):
        read_own_folder(tmp_path, POINTS)


@pytest.mark.parametrize("kind", node_data.WRITERS)
def test_inputs_of_another_size(kind: str, tmp_path: Path) -> None:
    node_data.WRITERS[kind](tmp_path / "data", *node_data.digits(4))
    with pytest.raises(DataError, match=r"(28, 28\).*|784 columns of inputs), expected"):
        read_own_folder(tmp_path / "data", NodesConfig(clients=1, shape=[1, 28, 27], classes=10))


@pytest.mark.parametrize("kind", node_data.WRITERS)
def test_labels_that_are_no_class(kind: str, tmp_path: Path) -> None:
    images, labels = node_data.digits(3)
    labels[1] = 10
    node_data.WRITERS[kind](tmp_path / "data", images, labels)
    with pytest.raises(
        DataError, match=r"'?10'? (in row 2 is no class|is not one of|, expected 0 to 9)|to 10, expected 0 to 9"
    ):
        read_own_folder(tmp_path / "data", CONFIG)


def test_idx_without_its_labels_or_with_too_few(tmp_path: Path) -> None:
    images, labels = node_data.digits(3)
    (tmp_path / "my-images-idx3-ubyte").write_bytes(node_data.idx(images[:, 0]))
    with pytest.raises(DataError, match="my-labels-idx1-ubyte: is missing"):
        read_own_folder(tmp_path, CONFIG)
    (tmp_path / "my-labels-idx1-ubyte").write_bytes(node_data.idx(labels[:2]))
    with pytest.raises(DataError, match="3 images but 2 labels"):
        read_own_folder(tmp_path, CONFIG)


def test_a_folder_with_nothing_or_with_two_kinds(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"data = .*has no files"):
        read_own_folder(tmp_path, CONFIG)
    node_data.write_idx(tmp_path / "both", *node_data.digits(3))
    (tmp_path / "both" / "a.csv").write_text("label\n")
    with pytest.raises(RecipeError, match="several kinds: idx, csv"):
        read_own_folder(tmp_path / "both", CONFIG)


def test_images_need_a_shape_of_images(tmp_path: Path) -> None:
    node_data.write_idx(tmp_path / "data", *node_data.digits(3))
    for shape in ([784], [3, 28, 28]):
        with pytest.raises(RecipeError, match=r"task\.nodes\.shape"):
            read_own_folder(tmp_path / "data", NodesConfig(clients=1, shape=shape, classes=10))


# --- a node's task ---------------------------------------------------------------------------------------------------


@pytest.fixture
def experiment(tiny: Callable[..., dict[str, Any]]) -> Experiment:
    return build_experiment(load(recipe_of_nodes(tiny)))


def test_the_server_needs_no_data(experiment: Experiment) -> None:
    """The model is that of the shape and the classes: 784·4 + 4 + 4·10 + 10 parameters."""
    assert experiment.layers.numel == 784 * 4 + 4 + 4 * 10 + 10
    assert len(experiment.task.clients) == 3
    with pytest.raises(DataError, match="client 1's data is on its own node"):
        experiment.task.client(1)


def test_a_node_has_its_own_data_in_two_parts(experiment: Experiment, tmp_path: Path) -> None:
    """20 % of 11 samples, rounded, are 2; which ones depends on seed and client alone."""
    images, labels = node_data.digits(11)
    node_data.write_idx(tmp_path / "data", images, labels)
    task = own_task(experiment.task, CONFIG, str(tmp_path / "data"), 1, 0.2, seed=7)
    train, held_out = split(np.arange(11), 0.2, 7, 1)
    assert sorted([*train, *held_out]) == list(range(11))
    assert (len(train), len(held_out)) == (9, 2)
    assert task.client(1).batch(np.arange(9))[1].tolist() == labels[train].tolist()
    assert task.client_held_out(1).batch(np.arange(2))[1].tolist() == labels[held_out].tolist()
    assert task.sizes().tolist() == [1, 9, 1]
    with pytest.raises(DataError, match="client 0's data is on its own node"):
        task.client(0)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("return torch.zeros(5, 1, 28, 28, dtype=torch.uint8), torch.zeros(5).long()", "torch.uint8"),
        ("return torch.zeros(5, 28, 28), torch.zeros(5).long()", "(28, 28)"),
        ("return torch.full((5, 1, 28, 28), torch.nan), torch.zeros(5).long()", "not finite"),
        ("return torch.zeros(5, 1, 28, 28), torch.zeros(5)", "torch.float32"),
        ("return torch.zeros(5, 1, 28, 28), torch.tensor([0, 1, 2, 3, 10])", "from 0 to 10, expected 0 to 9"),
        ("return torch.zeros(5, 1, 28, 28), torch.zeros(4).long()", "inputs has 5 samples, but targets has 4"),
        ("return torch.zeros(1, 1, 28, 28), torch.zeros(1).long()", "has 1 samples"),
        ("raise KeyError('gone')", "KeyError"),
        ("return 3", "got int"),
    ],
)
def test_a_users_function_that_gives_nonsense(
    body: str, problem: str, experiment: Experiment, user_module: Callable[[str, str], str]
) -> None:
    user_module("hospital", f"import torch\ndef patients():\n    {body}\n")
    with pytest.raises((DataError, RecipeError)) as error:
        own_task(experiment.task, CONFIG, "hospital:patients", 0, 0.2, seed=0)
    assert problem in str(error.value)
    assert "hospital:patients" in str(error.value)


def test_a_users_dataset(experiment: Experiment, user_module: Callable[[str, str], str]) -> None:
    """A torch Dataset is fetched by index, and split like everything else."""
    text = """
import torch
class Patients(torch.utils.data.Dataset):
    def __len__(self): return 10
    def __getitem__(self, row): return torch.full((1, 28, 28), float(row)), row
"""
    user_module("hospital", text)
    task = own_task(experiment.task, CONFIG, "hospital:Patients", 2, 0.3, seed=0)
    train, held_out = split(np.arange(10), 0.3, 0, 2)
    inputs, targets = task.client(2).batch(np.arange(len(train)))
    assert targets.tolist() == train.tolist()
    assert inputs[:, 0, 0, 0].tolist() == train.tolist()
    assert task.client_held_out(2).batch(np.arange(3))[1].tolist() == held_out.tolist()


@pytest.mark.parametrize("data", [None, "", "/nowhere", "no_such_module:function", "/nowhere:function"])
def test_data_that_is_not_there(data: str | None, experiment: Experiment) -> None:
    with pytest.raises(RecipeError, match=r"^data = "):
        own_task(experiment.task, CONFIG, data, 0, 0.2, seed=0)


# --- recipes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "field"),
    [
        ({"clients": 0}, "task.nodes.clients"),
        ({"shape": [1, 0]}, "task.nodes.shape"),
        ({"shape": []}, "task.nodes.shape"),
        ({"classes": 1}, "task.nodes.classes"),
        ({"classes": ["a", "a"]}, "task.nodes.classes"),
        ({"mean": [0.1], "std": [0.1]}, "task.nodes.mean"),
        ({"mean": [0.1, 0.2]}, "task.nodes.mean"),
        ({"std": [0.0]}, "task.nodes.std"),
        ({"colour": 1}, "task.nodes.colour"),
    ],
)
def test_a_bad_table_names_its_field(nodes: dict[str, Any], field: str, tiny: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(RecipeError, match=f"^{field} = "):
        load(recipe_of_nodes(tiny, **nodes))


def test_normalised_inputs_need_mean_and_std(tiny: Callable[..., dict[str, Any]]) -> None:
    table = recipe_of_nodes(tiny)
    table["task"]["inputs"] = "normalised"
    with pytest.raises(RecipeError, match=r"^task\.nodes\.mean = None"):
        load(table)


def test_the_table_and_the_data_set_go_together(tiny: Callable[..., dict[str, Any]]) -> None:
    table = recipe_of_nodes(tiny)
    table["task"]["dataset"] = "mnist-mini"
    with pytest.raises(RecipeError, match=r"^task\.nodes = "):
        load(table)
    with pytest.raises(RecipeError, match=r"^task\.nodes = None"):
        load(tiny({"task.dataset": "nodes"}))


@pytest.mark.parametrize("engine", ["local", "flower"])
def test_it_cannot_be_run_where_the_data_is_not(
    engine: str, tiny: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    table = recipe_of_nodes(tiny) | {"engine": {"name": engine}}
    with pytest.raises(RecipeError, match=r"task\.dataset = 'nodes'.*flower init"):
        create_run(load(table), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_server_has_no_test_set(tiny: Callable[..., dict[str, Any]]) -> None:
    table = recipe_of_nodes(tiny)
    table["evaluation"] = {"on": ["test"]}
    with pytest.raises(RecipeError, match=r"^evaluation\.on"):
        build_experiment(load(table))


def test_nodes_agree_on_what_the_data_looks_like(tiny: Callable[..., dict[str, Any]]) -> None:
    """The same layers, but another order of the classes, is another recipe."""
    names = list("abcdefghij")
    one, other = (build_experiment(load(recipe_of_nodes(tiny, classes=order))) for order in (names, names[::-1]))
    assert one.agreement != other.agreement
