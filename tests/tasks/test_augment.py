"""Augmentation: what the operations do, when they draw, and that nobody's bits depend on who trains a client."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fedstrata
from fedstrata.core import rng
from fedstrata.core.errors import DataError, RecipeError
from fedstrata.recipes.experiment import build_experiment
from fedstrata.recipes.schema import load
from fedstrata.runs.runner import create_run, run_rounds
from fedstrata.tasks.augment import AUGMENTATIONS, crop, flip
from fedstrata.tasks.builtin import build_task
from fedstrata.tasks.config import TaskConfig

BOTH: dict[str, Any] = {"task.augment": ["crop", "flip"]}


def numbered(count: int, channels: int, height: int, width: int) -> Tensor:
    """Images of which no two pixels are alike, and none is zero."""
    return (torch.arange(count * channels * height * width) + 1.0).view(count, channels, height, width)


def shifts(image: Tensor, changed: Tensor) -> list[tuple[int, int]]:
    """By how much an image was moved, found by trying every shift there is; what comes in is zero."""
    _, height, width = image.shape
    found = []
    for down in range(-height + 1, height):
        for right in range(-width + 1, width):
            moved = torch.zeros_like(image)
            for y in range(height):
                for x in range(width):
                    if 0 <= y - down < height and 0 <= x - right < width:
                        moved[:, y, x] = image[:, y - down, x - right]
            if torch.equal(moved, changed):
                found.append((down, right))
    return found


@given(st.integers(0, 2**31), st.sampled_from([(1, 3, 5), (2, 8, 4), (1, 4, 17)]))
def test_a_crop_moves_each_image_by_at_most_an_eighth_of_its_side(seed: int, shape: tuple[int, int, int]) -> None:
    images = numbered(2, *shape)
    torch.manual_seed(seed)
    for image, changed in zip(images, crop(images), strict=True):
        ((down, right),) = shifts(image, changed)
        assert abs(down) <= max(1, shape[1] // 8)
        assert abs(right) <= max(1, shape[2] // 8)


def test_every_shift_is_as_likely_as_any_other() -> None:
    """An 8×8 image moves by −1, 0 or 1 both ways. Each of 9 shifts in 1,800: 200 ± 13.3, so within 5 of these."""
    torch.manual_seed(0)
    image = numbered(1, 1, 8, 8)
    counts: dict[tuple[int, int], int] = {}
    for changed in crop(image.expand(1800, -1, -1, -1)):
        inner = changed[0, 3:5, 3:5]
        at = int((image[0, 0] == inner[0, 0]).nonzero()[0, 0]), int((image[0, 0] == inner[0, 0]).nonzero()[0, 1])
        counts[3 - at[0], 3 - at[1]] = counts.get((3 - at[0], 3 - at[1]), 0) + 1
    assert set(counts) == {(down, right) for down in (-1, 0, 1) for right in (-1, 0, 1)}
    assert all(abs(count - 200) < 67 for count in counts.values())


def test_a_flip_is_a_coin_for_each_image() -> None:
    """Of 1,000 images 500 ± 15.8 are mirrored, and each is as it was or read from right to left."""
    torch.manual_seed(0)
    images = numbered(1000, 2, 2, 3)
    changed = flip(images)
    stays = (changed == images).flatten(1).all(1)
    mirrored = (changed == images[:, :, :, [2, 1, 0]]).flatten(1).all(1)
    assert (stays ^ mirrored).all()
    assert 421 < int(mirrored.sum()) < 579


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_an_operation_leaves_the_batch_that_it_was_given(name: str) -> None:
    images = numbered(5, 1, 8, 8).double()
    before = images.clone()
    changed = AUGMENTATIONS[name](images)
    assert torch.equal(images, before)
    assert (changed.dtype, changed.shape) == (images.dtype, images.shape)


# --- in a task -------------------------------------------------------------------------------------------------------


def test_what_is_drawn_depends_on_seed_round_attempt_and_client(tiny: Callable[..., dict[str, Any]]) -> None:
    config = TaskConfig(**tiny(BOTH)["task"])
    own = build_task(config, seed=0).client(1)

    def batch(seed: int = 0, **where: int) -> bytes:
        with rng.global_scope(seed, "train", **where):
            return own.batch(np.arange(12))[0].numpy().tobytes()

    places = [{"round": 1, "client": 1}, {"round": 2, "client": 1}, {"round": 1, "attempt": 1, "client": 1}]
    drawn = [batch(**where) for where in (*places, {"round": 1, "client": 2})]
    drawn.append(batch(seed=1, **places[0]))
    assert len(set(drawn)) == 5
    assert drawn[0] == batch(**places[0])


def test_a_batch_is_what_the_operations_make_of_it_one_after_the_other(tiny: Callable[..., dict[str, Any]]) -> None:
    plain, changed = (build_task(TaskConfig(**tiny(some)["task"]), seed=0).client(2) for some in ({}, BOTH))
    indices = np.array([3, 0, 3])
    inputs, targets = plain.batch(indices)
    torch.manual_seed(5)
    expected = flip(crop(inputs))
    torch.manual_seed(5)
    found, labels = changed.batch(indices)
    assert torch.equal(found, expected)
    assert not torch.equal(found, inputs)
    assert torch.equal(labels, targets)


def test_evaluation_sees_the_images_as_they_are(tiny: Callable[..., dict[str, Any]]) -> None:
    plain, changed = (build_task(TaskConfig(**tiny(some)["task"]), 0, held_out=0.25) for some in ({}, BOTH))
    pairs = [
        (task.client_held_out(1), task.server_data("train"), task.server_data("test")) for task in (plain, changed)
    ]
    for one, other in zip(*pairs, strict=True):
        rows = np.arange(min(len(one), 3))
        assert torch.equal(one.batch(rows)[0], other.batch(rows)[0])


MODELS: list[dict[str, Any]] = [
    {"task.model": {"name": "mlp", "hidden": 4}},
    {"task.model": {"name": "vgg9", "width": 1}, "algorithm": {"name": "fedldf", "n": 2}, "training.stragglers": 0.5},
]


@pytest.mark.parametrize("settings", MODELS, ids=lambda settings: settings["task.model"]["name"])
def test_the_same_bits_with_two_workers_after_a_stop_and_on_flower(
    settings: dict[str, Any], tiny: Any, tmp_path: Path, same_run: Callable[..., None]
) -> None:
    pytest.importorskip("flwr")
    from fedstrata.deployment.server import serve
    from tests.support.fake_grid import FakeGrid

    table = tiny({**BOTH, **settings, "evaluation.on": ["clients"], "training.epochs": 2})
    one = fedstrata.run(table, out=tmp_path / "one")
    fedstrata.run(table, settings={"engine.workers": 2}, out=tmp_path / "two")
    run, experiment = create_run(load(table), tmp_path / "resumed")
    rounds = run_rounds(run, experiment)
    next(rounds)
    rounds.close()
    fedstrata.resume(tmp_path / "resumed")
    path = tmp_path / "recipe.toml"
    path.write_text(tomli_w.dumps(table))
    for _ in serve(FakeGrid(path, 4), {"recipe": str(path), "out": str(tmp_path / "flower"), "wait": 10}):
        pass
    same_run(tmp_path / "one", tmp_path / "resumed")
    for other in ("two", "flower"):
        same_run(tmp_path / "one", tmp_path / other, recipe=False)
    plain = fedstrata.run({**table, "task": {**table["task"], "augment": []}}, out=tmp_path / "plain")
    assert plain.summary()["weights_sha256"] != one.summary()["weights_sha256"]


def test_a_client_and_its_server_agree_on_it(tiny: Any) -> None:
    """A node that does not augment is another client; recipes of before have the digests that they had."""
    first, second = (build_experiment(load(tiny(some))).agreement for some in ({}, BOTH))
    assert first != second
    assert build_experiment(load(tiny({"task.augment": []}))).agreement == first
    assert "augment" not in load(tiny()).to_table()["task"]


def test_nodes_augment_what_they_train_on(tmp_path: Path, user_module: Callable[[str, str], str]) -> None:
    from fedstrata.tasks.config import NodesConfig
    from fedstrata.tasks.nodes import own_task
    from fedstrata.tasks.task import Task

    user_module("hospital", "import torch\ndef data():\n    return torch.rand(9, 1, 8, 8), torch.arange(9) % 2\n")
    config = NodesConfig(clients=1, shape=[1, 8, 8], classes=2)
    task = Task(model=torch.nn.Identity, clients=[None])
    plain, changed = (own_task(task, config, "hospital:data", 0, 0.3, 0, names) for names in (None, ["crop"]))
    rows = np.arange(3)
    torch.manual_seed(1)
    expected = crop(plain.client(0).batch(rows)[0])
    torch.manual_seed(1)
    assert torch.equal(changed.client(0).batch(rows)[0], expected)
    assert torch.equal(changed.client_held_out(0).batch(rows)[0], plain.client_held_out(0).batch(rows)[0])


def test_an_operation_of_ones_own(tiny: Any, user_module: Callable[[str, str], str], tmp_path: Path) -> None:
    user_module("mine", "def brighter(inputs):\n    return inputs + 1\n")
    config = TaskConfig(**tiny({"task.augment": ["mine:brighter"]})["task"])
    plain, changed = (build_task(c, seed=0).client(0) for c in (config.model_copy(update={"augment": None}), config))
    assert torch.equal(changed.batch(np.arange(4))[0], plain.batch(np.arange(4))[0] + 1)
    assert ("task.augment.0", "mine:brighter") in load(tiny({"task.augment": ["mine:brighter"]})).named_code()


def test_what_cannot_be_augmented_is_said_in_one_line(tiny: Any, user_module: Callable[[str, str], str]) -> None:
    with pytest.raises(RecipeError, match=r"^task\.augment = 'crp': is none of crop, flip$"):
        load(tiny({"task.augment": ["crop", "crp"]}))
    with pytest.raises(RecipeError, match=r"^task\.augment = 'crop': .*list"):
        load(tiny({"task.augment": "crop"}))
    rows = "torch.rand(40, 5), torch.arange(40) % 2"
    user_module("flat", f"import torch\ndef data():\n    return ({rows}), ({rows})\n")
    with pytest.raises(DataError, match=r"^task\.augment = \['flip'\]: is for images, and inputs have shape \[5\]$"):
        build_experiment(
            load(tiny({"task.dataset": "flat:data", "task.augment": ["flip"], "task.partition.samples": 5}))
        )
