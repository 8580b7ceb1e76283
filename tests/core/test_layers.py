"""What a layer is, on all kinds of models."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedstrata.core.errors import RecipeError
from fedstrata.core.grouping import GROUPINGS
from fedstrata.core.layers import Layers
from tests.support.math import Tiny


def names(model: nn.Module, grouping: object = "module") -> dict[str, list[str]]:
    """Layer → tensors, parameters before what rides along."""
    layers = Layers.of(model, grouping)  # type: ignore[arg-type]
    check_layout(layers)
    return {layer.name: [entry.name for entry in layer.entries] for layer in layers.layers}


def check_layout(layers: Layers) -> None:
    """What holds for every layout: no gaps, parameters first, every number in one layer, units in range."""
    at = unit = 0
    for layer in layers.layers:
        assert (layer.start, layer.first_unit) == (at, unit)
        assert layer.start < layer.trainable_stop <= layer.stop
        covered = set()
        for entry in layer.entries:
            assert entry.start == at
            assert entry.trainable == (entry.start < layer.trainable_stop)
            assert entry.units == (entry.shape[0] if entry.shape else 1)
            assert layer.first_unit <= entry.first_unit <= entry.first_unit + entry.units <= layer.last_unit
            covered |= set(range(entry.first_unit, entry.first_unit + entry.units))
            at = entry.stop
        assert covered == set(range(layer.first_unit, layer.last_unit)), "every unit has a tensor"
        assert layer.stop == at
        assert layer.numel == layer.stop - layer.start
        unit = layer.last_unit
    assert (layers.numel, layers.units) == (at, unit)
    assert len(layers) == len(layers.names) == len(layers.layers)


def cnn() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))


# --- groupings ---------------------------------------------------------------------------------------------------


def test_plain_cnn() -> None:
    """Without BatchNorm, module and block are the same."""
    expected = {"0": ["0.weight", "0.bias"], "3": ["3.weight", "3.bias"]}
    assert names(cnn()) == names(cnn(), "block") == expected
    assert names(cnn(), "tensor") == {n: [n] for n in ("0.weight", "0.bias", "3.weight", "3.bias")}


def test_batch_norm_model() -> None:
    """`block` joins BatchNorm to the module before it; its statistics ride behind the parameters of the layer.

    `num_batches_tracked` is an integer and stays at home.
    """
    statistics = ["bn.running_mean", "bn.running_var"]
    assert names(Tiny()) == {
        "conv": ["conv.weight", "conv.bias"],
        "bn": ["bn.weight", "bn.bias", *statistics],
        "fc": ["fc.weight", "fc.bias"],
    }
    assert names(Tiny(), "block") == {
        "conv": ["conv.weight", "conv.bias", "bn.weight", "bn.bias", *statistics],
        "fc": ["fc.weight", "fc.bias"],
    }
    assert names(Tiny(), "tensor") == {
        "conv.weight": ["conv.weight"],
        "conv.bias": ["conv.bias"],
        "bn.weight": ["bn.weight"],
        "bn.bias": ["bn.bias", *statistics],
        "fc.weight": ["fc.weight"],
        "fc.bias": ["fc.bias"],
    }


NORMS: list[Callable[[int], nn.Module]] = [
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    lambda width: nn.InstanceNorm1d(width, affine=True),
    lambda width: nn.InstanceNorm2d(width, affine=True, track_running_stats=True),
    lambda width: nn.InstanceNorm3d(width, affine=True),
    lambda width: nn.GroupNorm(1, width),
    nn.LayerNorm,
    lambda width: nn.LayerNorm([width, 3, 3]),
    lambda width: nn.LayerNorm(width, bias=False),
    nn.RMSNorm,
]


@pytest.mark.parametrize("norm", NORMS)
def test_block_joins_every_norm_to_the_layer_before(norm: Callable[[int], nn.Module]) -> None:
    """Its entries belong to the units of the weight before it, which is the only one of the three that is 2 wide."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), norm(2), nn.Linear(2, 4))
    assert list(names(model, "block")) == ["0", "1", "3"]
    assert list(names(model)) == ["0", "1", "2", "3"]
    spans = {name: span for name, span in units(model, "block").items() if name[0] in "12"}
    assert len(spans) >= 3
    assert set(spans.values()) == {(4, 2)}


def test_block_does_not_join_an_activation() -> None:
    assert list(names(nn.Sequential(nn.Linear(3, 2), nn.PReLU(2)), "block")) == ["0", "1"]


def test_block_with_batch_norm_first_keeps_its_name() -> None:
    """There is no module before it to join, so it is a layer of its own, and "0" is what the user knows it as."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2), nn.BatchNorm1d(2))
    assert list(names(model, "block")) == ["0", "1"]


def test_mapping() -> None:
    """Patterns, exact names and module prefixes; buffers ride with the last parameter of their module."""
    mapping = {"body": ["conv", "bn.*"], "head": ["fc.weight", "fc.b?as"]}
    assert names(Tiny(), mapping) == {
        "body": ["conv.weight", "conv.bias", "bn.weight", "bn.bias", "bn.running_mean", "bn.running_var"],
        "head": ["fc.weight", "fc.bias"],
    }
    assert list(names(Tiny(), {"all": ["*"]})) == ["all"]


@pytest.mark.parametrize(
    ("mapping", "home"),
    [
        ({"scale": ["bn.weight"], "rest": ["bn.bias", "conv", "fc"]}, "rest"),
        ({"shift": ["bn.bias"], "rest": ["bn.weight", "conv", "fc"]}, "shift"),
    ],
)
def test_statistics_ride_with_the_last_parameter_of_their_module(mapping: dict[str, list[str]], home: str) -> None:
    """A BatchNorm split over two layers: its statistics go where its bias goes, whichever layer began first."""
    assert {"bn.running_mean", "bn.running_var"} <= set(names(Tiny(), mapping)[home])


def test_a_prefix_is_a_module_not_the_beginning_of_a_name() -> None:
    model = nn.ModuleDict({"fc": nn.Linear(1, 1), "fc2": nn.Linear(1, 1)})
    assert names(model, {"a": ["fc"], "b": ["fc2"]}) == {
        "a": ["fc.weight", "fc.bias"],
        "b": ["fc2.weight", "fc2.bias"],
    }


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"conv": ["conv.*"], "fc": ["fc.*"]}, r"bn\.weight.*belongs to no layer"),
        ({"all": ["*"], "fc": ["fc.*"]}, r"fc\.weight.*belongs to several layers: all, fc"),
        ({"all": ["*"], "more": ["conv9.*"]}, r"more.*conv9.*matches no trainable parameter"),
        ({"all": ["*"], "statistics": ["bn.running_mean"]}, r"statistics.*matches no trainable parameter"),
        ({}, r"belongs to no layer"),
        ("neuron", r"neuron.*is none of module, tensor, block"),
    ],
)
def test_bad_groupings_are_refused(mapping: object, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Layers.of(Tiny(), mapping)  # type: ignore[arg-type]


# --- what travels ------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """An embedding whose weight is the output layer's too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.out = nn.Linear(3, 5)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.embed(x))


@pytest.mark.parametrize("grouping", ["module", "tensor", "block"])
def test_a_tied_weight_is_kept_once_and_stays_tied(grouping: str) -> None:
    model = Tied()
    layers = Layers.of(model, grouping)
    assert layers.numel == 15 + 5
    layers.load(model, torch.full((20,), 0.5))
    assert model.out.weight is model.embed.weight
    assert (model.out.weight == 0.5).all()
    assert names(model) == {"embed": ["embed.weight"], "out": ["out.bias"]}


def test_a_buffer_of_two_modules_is_kept_once_and_stays_one() -> None:
    """What the flat vector says of it holds for both modules."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    shared = torch.ones(2)
    model[0].register_buffer("scale", shared)
    model[1].register_buffer("scale", shared)
    layers = Layers.of(model)
    assert layers.numel == 6 + 2 + 6
    layers.load(model, torch.full((14,), 3.0))
    assert model[0].scale.tolist() == model[1].scale.tolist() == [3.0, 3.0]


def test_frozen_parameters_neither_travel_nor_count() -> None:
    model = cnn()
    model[0].weight.requires_grad_(False)
    assert names(model) == {"0": ["0.bias"], "3": ["3.weight", "3.bias"]}
    model[0].bias.requires_grad_(False)
    assert names(model) == {"3": ["3.weight", "3.bias"]}
    frozen = model[0].weight.clone()
    layers = Layers.of(model)
    layers.load(model, torch.zeros(layers.numel))
    assert torch.equal(model.get_parameter("0.weight"), frozen)
    assert (model[3].weight == 0).all()


def test_a_frozen_batch_norm_still_sends_its_statistics() -> None:
    model = Tiny()
    for parameter in model.bn.parameters():
        parameter.requires_grad_(False)
    assert names(model)["conv"] == ["conv.weight", "conv.bias", "bn.running_mean", "bn.running_var"]


@pytest.mark.parametrize("grouping", ["module", "block"])
def test_a_module_with_buffers_only_follows_the_layer_before_it(grouping: str) -> None:
    """BatchNorm(affine=False); where it comes first it goes with the first layer there is."""
    model = nn.Sequential(
        nn.BatchNorm1d(3, affine=False), nn.Linear(3, 2), nn.BatchNorm1d(2, affine=False), nn.Linear(2, 2)
    )
    assert names(model, grouping) == {
        "1": ["1.weight", "1.bias", "0.running_mean", "0.running_var", "2.running_mean", "2.running_var"],
        "3": ["3.weight", "3.bias"],
    }


def test_buffers_only_with_a_layer_for_each_tensor() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.Linear(3, 2), nn.BatchNorm1d(2, affine=False))
    assert names(model, "tensor") == {
        "1.weight": ["1.weight", "0.running_mean", "0.running_var"],
        "1.bias": ["1.bias", "2.running_mean", "2.running_var"],
    }


def test_root_level_parameters_have_a_layer() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 1)
            self.scale = nn.Parameter(torch.ones(()))

    assert names(Scaled()) == {"(root)": ["scale"], "fc": ["fc.weight", "fc.bias"]}
    assert names(nn.Linear(2, 1)) == {"(root)": ["weight", "bias"]}
    layers = Layers.of(Scaled())
    assert layers.layers[0].units == 1, "a scalar is one unit"


def test_integer_and_non_persistent_buffers_stay_at_home() -> None:
    model = nn.Linear(2, 1)
    model.register_buffer("steps", torch.zeros(3, dtype=torch.int64))
    model.register_buffer("flags", torch.zeros(3, dtype=torch.bool))
    model.register_buffer("cache", torch.zeros(3), persistent=False)
    model.register_buffer("mean", torch.zeros(3))
    model.register_buffer("nothing", None)
    assert names(model) == {"(root)": ["weight", "bias", "mean"]}


def test_mixed_dtypes_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(RecipeError, match=r"'1\.weight': is torch\.float64: trainable parameters need one dtype"):
        Layers.of(model)


def test_a_model_without_trainable_parameters_is_refused() -> None:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    for model in (frozen, nn.ReLU(), nn.BatchNorm1d(2, affine=False)):
        with pytest.raises(RecipeError, match="has no trainable parameter"):
            Layers.of(model)


def test_a_lazy_model_is_refused() -> None:
    with pytest.raises(RecipeError, match="not initialised"):
        Layers.of(nn.LazyLinear(2))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bfloat16, torch.float16])
def test_complex_and_half_parameters_are_refused(dtype: torch.dtype) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(2, dtype=dtype))
    with pytest.raises(RecipeError, match=f"'weight': is {dtype}: .*single or double precision"):
        Layers.of(model)


# --- flat vectors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grouping", ["module", "tensor", "block", {"a": ["fc", "bn"], "b": ["conv"]}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_flatten_and_views_round_trip(grouping: object, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Tiny().to(dtype)
    model.bn.running_mean.normal_()
    layers = Layers.of(model, grouping)  # type: ignore[arg-type]
    flat = layers.flatten(model)
    assert flat.dtype == layers.dtype == dtype
    state = model.state_dict()
    views = layers.views(flat)
    assert set(views) == set(state) - {"bn.num_batches_tracked"}
    for name, view in views.items():
        assert torch.equal(view, state[name]), name
    assert set(layers.views(flat, trainable_only=True)) == {name for name, _ in model.named_parameters()}
    flat.zero_()
    assert all((view == 0).all() for view in views.values()), "views share the vector's memory"
    assert not (model.fc.weight == 0).any(), "flatten made a copy"


def test_what_is_loaded_is_a_copy_and_the_model_stays_as_torch_lays_it() -> None:
    model = Tiny()
    layers = Layers.of(model, "block")
    flat = torch.arange(layers.numel, dtype=torch.float32)
    layers.load(model, flat)
    assert torch.equal(layers.flatten(model), flat)
    assert all(tensor.is_contiguous() for tensor in model.state_dict().values())
    flat.zero_()
    assert model.conv.weight.any()


def test_norms_measure_the_trainable_part_of_each_layer() -> None:
    """bn: weight (3, 0, 0), bias (0, 4, 0), statistics 100; conv: zeros; fc: one 2."""
    layers = Layers.of(Tiny())
    flat = torch.zeros(layers.numel)
    view = layers.views(flat)
    view["bn.weight"][0], view["bn.bias"][1], view["fc.bias"][2] = 3, 4, -2
    view["bn.running_mean"].fill_(100)
    norms = layers.norms(flat)
    assert norms.dtype == torch.float64
    assert norms.tolist() == [0, 5, 2]


def test_norms_of_a_long_single_precision_vector_are_exact() -> None:
    """600,000 numbers of 0.1 in single precision: √600000 · 0.1f, summed in double."""
    layers = Layers.of(nn.Linear(600_000, 1, bias=False))
    flat = torch.full((600_000,), 0.1)
    expected = 600_000**0.5 * float(flat[0].double())
    assert float(layers.norms(flat)[0]) == pytest.approx(expected, rel=1e-12)


def test_bytes_per_layer() -> None:
    """Tiny, in single precision: conv (27 + 3)·4, bn (6 + 6 statistics)·4, fc (36 + 3)·4; twice that in double."""
    assert Layers.of(Tiny()).bytes_per_layer().tolist() == [120, 48, 156]
    assert Layers.of(Tiny().double()).bytes_per_layer().tolist() == [240, 96, 312]


# --- units -------------------------------------------------------------------------------------------------------


def units(model: nn.Module, grouping: object = "module") -> dict[str, tuple[int, int]]:
    layers = Layers.of(model, grouping)  # type: ignore[arg-type]
    check_layout(layers)
    return {e.name: (e.first_unit, e.units) for layer in layers.layers for e in layer.entries}


def test_units_of_a_convolution_and_its_batch_norm() -> None:
    """`block`: channel j is row j of weight, bias and BatchNorm's four vectors; `module`: BatchNorm has its own."""
    block = units(Tiny(), "block")
    assert {span for name, span in block.items() if not name.startswith("fc")} == {(0, 3)}
    assert block["fc.weight"] == block["fc.bias"] == (3, 3)
    module = units(Tiny())
    assert module["conv.weight"] == module["conv.bias"] == (0, 3)
    assert module["bn.weight"] == module["bn.running_var"] == (3, 3)
    assert module["fc.weight"] == (6, 3)


def test_units_of_two_blocks_of_the_same_width_stay_apart() -> None:
    """In one layer, each BatchNorm goes with the convolution before it."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
    found = units(model, {"all": ["*"]})
    assert {found[f"{m}.{t}"] for m in (0, 1) for t in ("weight", "bias")} == {(0, 4)}
    assert {found[f"{m}.{t}"] for m in (2, 3) for t in ("weight", "bias")} == {(4, 4)}
    assert found["1.running_mean"] == (0, 4)
    assert found["3.running_mean"] == (4, 4)


def test_units_of_a_layer_of_mixed_widths() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 5))
    assert units(model, {"all": ["*"]}) == {"0.weight": (0, 3), "0.bias": (0, 3), "1.weight": (3, 5), "1.bias": (3, 5)}


def test_lstm() -> None:
    """An LSTM's gates are rows: 4H units, shared by its weights and biases."""
    model = nn.ModuleDict({"lstm": nn.LSTM(3, 2), "fc": nn.Linear(2, 4)})
    tensors = ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"]
    assert names(model)["lstm"] == [f"lstm.{t}" for t in tensors]
    found = units(model)
    assert {found[f"lstm.{t}"] for t in tensors} == {(0, 8)}
    assert found["fc.weight"] == (8, 4)
    layers = Layers.of(model)
    layers.load(model, layers.flatten(model))
    model["lstm"](torch.randn(4, 1, 3))[0].sum().backward()
    assert model["lstm"].weight_hh_l0.grad is not None


# --- neurons -----------------------------------------------------------------------------------------------------


def sides(model: nn.Module) -> dict[str, tuple[int, int]]:
    """(dimension of the neurons that the weights leave, groups), for weights between neurons."""
    entries = Layers.of(model).entries
    return {name: (entry.inputs, entry.groups) for name, entry in entries.items() if entry.inputs is not None}


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Linear(2, 3), {"weight": (1, 1)}),
        (nn.Conv1d(4, 6, 3, groups=2), {"weight": (1, 2)}),
        (nn.Conv3d(4, 4, 1, groups=4), {"weight": (1, 4)}),
        (nn.ConvTranspose2d(4, 6, 3, groups=2), {"weight": (0, 2)}),
        (nn.Embedding(5, 2), {"weight": (0, 1)}),
        (nn.EmbeddingBag(5, 2), {"weight": (0, 1)}),
        (nn.GRUCell(2, 3), {"weight_ih": (1, 1), "weight_hh": (1, 1)}),
        (nn.LayerNorm([2, 3]), {}),
        (nn.RMSNorm([2, 3]), {}),
        (
            nn.MultiheadAttention(4, 2, add_bias_kv=True),
            {"in_proj_weight": (1, 1), "out_proj.weight": (1, 1)},
        ),
        (
            nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 6, 3, groups=2)),
            {"parametrizations.weight.original0": (1, 2), "parametrizations.weight.original1": (1, 2)},
        ),
        (
            nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Embedding(4, 6))),
            {"0.parametrizations.weight.original": (0, 1)},
        ),
    ],
    ids=lambda case: type(case).__name__ if isinstance(case, nn.Module) else "",
)
def test_which_dimension_is_which_neurons(module: nn.Module, expected: dict[str, tuple[int, int]]) -> None:
    assert sides(module) == expected


def test_a_tied_weight_is_what_its_first_module_says() -> None:
    assert sides(Tied()) == {"embed.weight": (0, 1)}


# --- from names and shapes alone ---------------------------------------------------------------------------------


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for name, t in model.state_dict().items() if t.is_floating_point()}


MODULES = st.lists(
    st.sampled_from(
        [
            lambda: nn.Linear(3, 2),
            lambda: nn.Linear(2, 2, bias=False),
            lambda: nn.Conv2d(2, 3, 3),
            lambda: nn.BatchNorm2d(3),
            lambda: nn.LayerNorm(4),
            lambda: nn.GroupNorm(1, 3),
            lambda: nn.InstanceNorm2d(2, affine=True),
            lambda: nn.PReLU(2),
            lambda: nn.MultiheadAttention(2, 1, add_bias_kv=True),
            lambda: nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.ReLU()),
            lambda: nn.LSTM(2, 3),
        ]
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(MODULES, st.sampled_from(GROUPINGS))
def test_a_state_dict_says_as_much_as_the_model(builders: list[Callable[[], nn.Module]], grouping: str) -> None:
    """Where everything is trained and nothing is tied, names and shapes give the layers of the model itself."""
    model = nn.Sequential(*(build() for build in builders))
    assert Layers.of_shapes(shapes(model), grouping) == Layers.of(model, grouping)


NAMES = st.text("ab.", min_size=1, max_size=5).filter(lambda name: all(name.split(".")))
SHAPES = st.lists(st.integers(1, 3), max_size=4).map(tuple)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(NAMES, SHAPES, min_size=1, max_size=8))
def test_arrays_are_grouped_by_prefix_or_singly(named: dict[str, tuple[int, ...]]) -> None:
    layers = Layers.of_shapes(named, buffers=[])
    check_layout(layers)
    home = {entry.name: layer.name for layer in layers.layers for entry in layer.entries}
    assert home == {name: name.rpartition(".")[0] or name for name in named}
    flat = torch.arange(layers.numel, dtype=torch.float32)
    assert {name: tuple(view.shape) for name, view in layers.views(flat).items()} == named
    singly = Layers.of_shapes(named, "tensor", buffers=[])
    assert {layer.name: [entry.name for entry in layer.entries] for layer in singly.layers} == {n: [n] for n in named}


def test_named_buffers_ride_along() -> None:
    """By PyTorch's names, or by patterns, which take their place; a layer of index names has nothing before it."""
    named = {"0": (4, 2), "1": (2,), "2": (2,), "bn.running_mean": (2,)}
    assert [(la.name, la.stop - la.trainable_stop) for la in Layers.of_shapes(named).layers] == [
        ("0", 0),
        ("1", 0),
        ("2", 2),
    ]
    found = Layers.of_shapes(named, buffers=["1", "2"]).layers
    assert [(layer.name, layer.stop - layer.trainable_stop) for layer in found] == [("0", 4), ("bn", 0)]
    with pytest.raises(RecipeError, match=r"buffers = '3': matches no array"):
        Layers.of_shapes(named, buffers=["3"])


def test_a_number_without_dimensions() -> None:
    layers = Layers.of_shapes({"scale": (), "shift": (2,)})
    check_layout(layers)
    views = layers.views(torch.tensor([1.0, 2.0, 3.0]))
    assert views["scale"].shape == ()
    assert (float(views["scale"]), views["shift"].tolist()) == (1.0, [2.0, 3.0])
