"""How a module is made clean for an order: put back in place where that is right, built anew where it is not."""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedstrata
from fedstrata.clients.modules import EXACT, LARGE, CleanModule, same_bits
from fedstrata.core.errors import ModelError, RecipeError, RunDirectoryError
from fedstrata.core.layers import Layers
from fedstrata.tasks.task import Task


class Counted:
    """A function that builds models, and how often it was called."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        self.build, self.calls = build, 0

    def __call__(self) -> nn.Module:
        self.calls += 1
        torch.manual_seed(0)
        return self.build()


def clean(build: Callable[[], nn.Module]) -> tuple[CleanModule, Counted, Tensor]:
    counted = Counted(build)
    layers = Layers.of(counted())
    return CleanModule(counted, layers), counted, layers.flatten(counted())


class Odd(nn.Module):
    """Changes all that a module can have."""

    seen: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.frozen = nn.Linear(3, 2), nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(3))
        self.calls, self.log, self.state = 0, [1], {"last": [0]}
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.log.append(self.calls)
        self.state["last"].append(self.calls)
        self.seen += 1
        self.mean = self.mean + x.mean(0)
        self.frozen.weight.data.mul_(2)
        self.fc.bias.data = self.fc.bias.data + 1
        self.fc.extra = torch.rand(2, generator=self.generator)
        self.added = nn.Linear(1, 1)
        self.fc.weight.requires_grad_(False)
        self.register_forward_hook(lambda module, inputs, output: output * 2)
        return self.fc(self.frozen(x)) + self.fc.extra


def content(model: nn.Module) -> dict[str, Any]:
    """Everything that can be compared with ==."""
    attributes = {
        f"{path}.{name}": copy.deepcopy(value)
        for path, module in model.named_modules()
        for name, value in module.__dict__.items()
        if not name.startswith("_") and name != "generator"
    }
    tensors = {name: (t.tolist(), t.requires_grad) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    hooks = {path: len(module._forward_hooks) for path, module in model.named_modules()}
    return attributes | tensors | {"hooks": hooks, "names": [name for name, _ in model.named_modules()]}


def test_everything_is_put_back_without_building_anew() -> None:
    module, build, flat = clean(Odd)
    before = content(module.fresh(flat))
    outputs = [module.fresh(flat)(torch.ones(1, 3)) for _ in range(3)]
    assert content(module.model) != before
    assert content(module.fresh(flat)) == before == content(Counted(Odd)())
    assert torch.equal(outputs[0], outputs[2])
    assert build.calls == 3


def test_what_travels_is_read_wherever_it_is() -> None:
    module, _, flat = clean(Odd)
    module.fresh(flat)(torch.tensor([[1.0, 2.0, 3.0]]))
    after = flat.clone()
    module.read(after)
    moved = {name: (after - flat)[entry.start : entry.stop] for name, entry in module.layers.entries.items()}
    assert moved["mean"].tolist() == [1, 2, 3]
    torch.testing.assert_close(moved["fc.bias"], torch.ones(2))
    assert not moved["fc.weight"].any()


def hooked() -> nn.Module:
    model, seen = nn.Sequential(nn.Linear(3, 2)), itertools.count(1)
    model.register_forward_hook(lambda module, inputs, output: output * next(seen))
    return model


def closure() -> nn.Module:
    model: Any = nn.Sequential(nn.Linear(3, 2))
    seen = [0]

    def louder(x: Tensor) -> Tensor:
        seen[0] += 1
        return x * seen[0]

    model.louder = louder
    return model


def bound() -> nn.Module:
    model: Any = nn.Sequential(nn.Linear(3, 2))
    model.seen = []
    model.see = model.seen.append
    return model


@pytest.mark.parametrize("build", [hooked, closure, bound])
def test_what_cannot_be_put_back_is_built_for_every_order(build: Callable[[], nn.Module]) -> None:
    module, counted, flat = clean(build)
    for _ in range(3):
        module.fresh(flat)
    assert counted.calls == 3 + 3
    assert torch.equal(module.fresh(flat * 2)[0].weight, 2 * counted()[0].weight)


class Based(nn.Module):
    """A large frozen base, which `change` may change."""

    def __init__(self, base: nn.Linear | None = None) -> None:
        super().__init__()
        self.base = (base or nn.Linear(1, LARGE // 4 + 1, bias=False)).requires_grad_(False)
        self.fc = nn.Linear(1, 1)


def by_data(model: Based) -> None:
    model.base.weight.data[7] += 1


def in_place(model: Based) -> None:
    model.base.weight.copy_(model.base.weight.flip(0))  # the same numbers in another order


def by_assignment(model: Based) -> None:
    model.base.weight.data = model.base.weight.data.clone()


@pytest.mark.parametrize("change", [by_data, in_place, by_assignment])
def test_a_large_frozen_part_is_watched_and_not_copied(change: Callable[[Based], None]) -> None:
    module, build, flat = clean(Based)
    place = module.fresh(flat).base.weight.data_ptr()
    for _ in range(3):
        assert module.fresh(flat).base.weight.data_ptr() == place
    assert build.calls == 3
    change(module.model)  # type: ignore[arg-type]
    fresh = module.fresh(flat)
    assert build.calls == 4
    assert same_bits(fresh.base.weight, Counted(Based)().base.weight)  # type: ignore[arg-type]


def test_numbers_that_change_places_are_seen_at_once_and_others_always() -> None:
    """By `data`, which leaves no trace but the numbers: pairs of them change places, or one grows a little."""
    for orders, swap, is_seen in [(1, True, True), (1, False, True), (EXACT, True, False), (EXACT, False, True)]:
        module, build, flat = clean(Based)
        for _ in range(orders):
            weight: Any = module.fresh(flat).base.weight
        first, second = weight.data[:2].clone(), weight.data[2:4].clone()
        weight.data[:4] = torch.cat((second, first) if swap else (first * 1.0001, second))
        calls = build.calls
        module.fresh(flat)
        assert (build.calls > calls) is is_seen


def test_a_shared_base_that_training_changes_is_refused_by_name() -> None:
    """Building the model anew finds it changed."""
    base = nn.Linear(1, LARGE // 4 + 1, bias=False)
    module, _, flat = clean(lambda: Based(base))
    by_data(module.fresh(flat))  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"base\.weight is frozen, is changed by training"):
        module.fresh(flat)


def test_a_shape_that_training_changes_is_refused_by_name() -> None:
    module, _, flat = clean(Odd)
    module.fresh(flat).mean = torch.zeros(4)
    with pytest.raises(ModelError, match=r"mean is torch\.float32 \[4\] after training, it was torch\.float32 \[3\]"):
        module.read(flat)


# --- the function that builds -----------------------------------------------------------------------------------------


def run_with(build: Callable[[], nn.Module], tmp_path: Any) -> None:
    data = (torch.randn(8, 3), torch.arange(8) % 2)
    task = Task(model=build, clients=[data, data], evaluation={"test": data})
    fedstrata.run({"training": {"rounds": 1}}, task=task, out=tmp_path / "run")


def test_the_same_module_each_time_is_refused(tmp_path: Any) -> None:
    net = nn.Linear(3, 2)
    before = net.weight.detach().clone()
    with pytest.raises(RecipeError, match=r"task\.model = 'weight'.*same tensor each time"):
        run_with(lambda: net, tmp_path)
    assert torch.equal(net.weight, before)
    assert not (tmp_path / "run").exists()


def test_other_numbers_each_time_are_refused(tmp_path: Any) -> None:
    generator = torch.Generator()

    def build() -> nn.Module:
        model = nn.Linear(3, 2)
        nn.init.uniform_(model.bias, generator=generator)
        return model

    with pytest.raises(RecipeError, match=r"task\.model = 'bias'.*other numbers the second time"):
        run_with(build, tmp_path)


def test_a_frozen_part_may_be_shared(tmp_path: Any) -> None:
    base = nn.Linear(3, 3)

    def build() -> nn.Module:
        return nn.Sequential(base.requires_grad_(False), nn.ReLU(), nn.Linear(3, 2))

    run_with(build, tmp_path)
    assert (tmp_path / "run").exists()


class CountingLoss(nn.Module):
    """A loss that changes with its tenth batch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return nn.functional.cross_entropy(outputs, targets) * (1 if self.calls < 10 else 0.2)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_loss_with_a_state_is_new_for_every_order(tmp_path: Any, workers: int) -> None:
    """Two batches a client: it never comes to its tenth, whoever has trained before."""
    clients = [(torch.randn(8, 3, generator=torch.Generator().manual_seed(k)), torch.arange(8) % 2) for k in range(6)]
    digests: list[str] = []
    for loss in (CountingLoss(), lambda outputs, targets: nn.functional.cross_entropy(outputs, targets)):
        task = Task(model=lambda: nn.Linear(3, 2), clients=clients, evaluation={"test": clients[0]}, loss=loss)
        table = {"training": {"rounds": 2, "batch_size": 4}, "engine": {"workers": workers}}
        run = fedstrata.run(table, task=task, out=tmp_path / f"run{len(digests)}")
        digests.append(run.summary()["weights_sha256"])
    assert digests[0] == digests[1]


def test_a_model_with_its_layers_in_another_order_is_not_given_the_weights(tmp_path: Any) -> None:
    def two(*names: str) -> nn.Module:
        return nn.Sequential(OrderedDict((name, nn.Linear(3, 3)) for name in names))

    data = (torch.randn(8, 3), torch.arange(8) % 3)
    task = Task(model=lambda: two("a", "b"), clients=[data, data], evaluation={"test": data})
    run = fedstrata.run({"training": {"rounds": 1}}, task=task, out=tmp_path / "run")
    run.model(task=task)
    with pytest.raises(RunDirectoryError, match=r"has b\.weight where the run had a\.weight"):
        run.model(task=replace(task, model=lambda: two("b", "a")))
