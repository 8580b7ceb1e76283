"""What is refused, and what everything weighs."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import nn

from fedstrata.core.aggregation import aggregate
from fedstrata.core.axes import Algorithm
from fedstrata.core.cohort import Cohort
from fedstrata.core.determinism import steady
from fedstrata.core.errors import ReplyError
from fedstrata.core.layers import Layers
from fedstrata.core.messages import MOST_SAMPLES, Order, Reply, check_reply, is_finite, judge, layers_with_units
from fedstrata.core.status import Status, StatusKind
from fedstrata.objectives import AdaptiveMu, Plain
from fedstrata.recipes.schema import Training
from fedstrata.selections import FedLDF, NeuronPruning, RandomClients, RandomLayers
from fedstrata.weightings import SampleSize
from tests.support.math import FEDAVG, Tiny, cohort, image_task, run, vectors

LAYERS = Layers.of(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)))  # 9 and 8 numbers, 3 and 2 units
BOTH = torch.tensor([True, True])
FIRST = torch.tensor([True, False])
ORDER = Order("train", 4, 1, 7, model=torch.zeros(17), mask=BOTH)
REPLY = Reply(size=10, sent=BOTH, update=torch.ones(17))


def with_number(value: float, at: int = 3) -> torch.Tensor:
    update = torch.ones(17)
    update[at] = value
    return update


# --- check_reply -------------------------------------------------------------------------------------------------


def test_a_good_reply_is_accepted() -> None:
    check_reply(REPLY, ORDER, LAYERS, 10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": None}, "size = None"),
        ({"size": 0}, "size = 0"),
        ({"size": -5}, "size = -5"),
        ({"size": 2.5}, r"size = 2\.5"),
        ({"size": float("nan")}, "size = nan"),
        ({"size": float("inf")}, "size = inf"),
        ({"size": 10**18}, "size = 1000000000000000000, at the beginning it was 10"),
        ({"stiffness": torch.ones(3, dtype=torch.float64)}, r"stiffness has shape \[3\], expected \[2\]"),
        ({"update": None}, "update is missing"),
        ({"update": torch.ones(16)}, r"update has shape \[16\], expected \[17\]"),
        ({"update": torch.ones(1, 17)}, r"update has shape \[1, 17\]"),
        ({"update": torch.ones(17).double()}, r"update has dtype torch\.float64, expected torch\.float32"),
        ({"update": torch.ones(17, dtype=torch.int32)}, r"update has dtype torch\.int32"),
        ({"update": with_number(math.nan)}, "update is not finite"),
        ({"update": with_number(math.inf)}, "update is not finite"),
        ({"update": with_number(-math.inf, 16)}, "update is not finite"),
        ({"sent": None}, "sent is missing"),
        ({"sent": torch.tensor([True])}, r"sent has shape \[1\]"),
        ({"sent": torch.tensor([1, 1])}, r"sent has dtype torch\.int64"),
        ({"sent": FIRST}, "layers 1: .*asked for and not sent"),
        ({"units": torch.ones(5, dtype=torch.bool)}, "units were sent instead of whole layers"),
        ({"scores": torch.ones(2)}, "scores were sent instead of an update"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_bad_reply_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ReplyError, match=message):
        check_reply(replace(REPLY, **change), ORDER, LAYERS, 10)


def test_layers_that_were_not_asked_for_are_refused() -> None:
    with pytest.raises(ReplyError, match="layers 1: sent without being asked for"):
        check_reply(REPLY, replace(ORDER, mask=FIRST), LAYERS, 10)
    check_reply(replace(REPLY, sent=FIRST), replace(ORDER, mask=FIRST), LAYERS, 10)


def test_an_update_whose_squared_length_no_float64_can_hold_is_refused() -> None:
    """Angles and divergences of it would be no numbers, and the weighting would be blamed."""
    layers = Layers.of(nn.Linear(3, 2).double(), "module")
    order, sent = Order("train", 1, 0, 0, mask=torch.ones(1, dtype=torch.bool)), torch.ones(1, dtype=torch.bool)
    reply = Reply(size=1, sent=sent, update=torch.full((8,), 1e153, dtype=torch.float64))
    check_reply(reply, order, layers, 1)  # the square of its norm is 8e306
    assert reply.update is not None
    with pytest.raises(ReplyError, match="the squared norm of the update is not finite"):
        check_reply(replace(reply, update=reply.update * 10), order, layers, 1)


def test_an_upload_is_checked_like_a_training() -> None:
    order = Order("upload", 4, 1, 7, mask=FIRST)
    reply = Reply(size=10, sent=FIRST, update=torch.ones(17))
    check_reply(reply, order, LAYERS, 10)
    check_reply(replace(reply, size=None), order, LAYERS, 10)  # the training before it has said how many
    with pytest.raises(ReplyError, match="size = 11, at the beginning it was 10"):
        check_reply(replace(reply, size=11), order, LAYERS, 10)
    with pytest.raises(ReplyError, match="layers 0, 1"):
        check_reply(replace(reply, sent=~FIRST), order, LAYERS, 10)
    with pytest.raises(ReplyError, match="not finite"):
        check_reply(replace(reply, update=with_number(math.nan)), order, LAYERS, 10)


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (None, "scores is missing"),
        (torch.ones(3), r"scores has shape \[3\], expected \[2\]"),
        (torch.ones(2).double(), r"scores has dtype torch\.float64"),
        (torch.tensor([1.0, math.nan]), "scores is not finite"),
        (torch.tensor([math.inf, 1.0]), "scores is not finite"),
    ],
)
def test_bad_scores_are_refused(scores: torch.Tensor | None, message: str) -> None:
    order = replace(ORDER, answer="scores", mask=None)
    with pytest.raises(ReplyError, match=message):
        check_reply(Reply(size=10, scores=scores), order, LAYERS, 10)
    check_reply(Reply(size=10, scores=torch.ones(2)), order, LAYERS, 10)
    with pytest.raises(ReplyError, match="size = 0"):
        check_reply(Reply(size=0, scores=torch.ones(2)), order, LAYERS, 10)
    with pytest.raises(ReplyError, match="layers were sent along with the scores"):
        check_reply(replace(REPLY, scores=torch.ones(2)), order, LAYERS, 10)


def test_units_are_checked() -> None:
    order = replace(ORDER, answer="units", mask=None)
    units = torch.tensor([True, False, False, False, True])
    good = replace(REPLY, units=units, update=torch.zeros(17))
    check_reply(good, order, LAYERS, 10)
    for change, message in (
        ({"units": None}, "units is missing"),
        ({"units": units[:4]}, r"units has shape \[4\], expected \[5\]"),
        ({"units": units.int()}, r"units has dtype torch\.int32"),
        ({"sent": FIRST}, "layers 1"),
        ({"update": torch.full((17,), math.nan)}, "units that were not sent"),
        ({"update": torch.ones(17)}, "units that were not sent"),
        ({"units": torch.ones(5, dtype=torch.bool), "update": torch.full((17,), math.nan)}, "not finite"),
    ):
        with pytest.raises(ReplyError, match=message):
            check_reply(replace(good, **change), order, LAYERS, 10)


def test_sizes_that_only_the_reply_tells() -> None:
    """Where nobody has said before how many there are, any number of samples will do that counts them."""
    for size in (1, 10, 2.5, MOST_SAMPLES):
        check_reply(replace(REPLY, size=size), ORDER, LAYERS, None)
    wrong: list[Any] = [None, 0, -1, math.nan, "10"]
    for size in wrong:
        with pytest.raises(ReplyError, match=re.escape(f"size = {size!r}, must be a positive number of samples")):
            check_reply(replace(REPLY, size=size), ORDER, LAYERS, None)
    for size in (math.inf, MOST_SAMPLES * 2):
        with pytest.raises(ReplyError, match=f"size = {size}, must be at most {MOST_SAMPLES}"):
            check_reply(replace(REPLY, size=size), ORDER, LAYERS, None)


def test_what_becomes_of_an_answer() -> None:
    """A status stands as it is; of a reply its numbers are judged apart from everything else."""

    def check(reply: Reply) -> None:
        check_reply(reply, ORDER, LAYERS, 10)

    assert judge(REPLY, check) == (Status("ok"), REPLY)
    assert judge(Status("failed", "update is not finite"), check) == (Status("failed", "update is not finite"), None)
    assert judge(replace(REPLY, update=with_number(math.nan)), check) == (Status("not finite", "update"), None)
    status, reply = judge(replace(REPLY, update=None), check)
    assert (str(status), reply) == ("refused: update is missing", None)


def test_a_status_in_words() -> None:
    """A reason may be somebody else's: it is shown as it is, and steers no terminal."""
    assert str(Status("straggler dropped")) == "straggler dropped"
    assert str(Status("failed", "out of\n  memory \x1b[31m")) == "failed: out of memory \\x1b[31m"
    kinds = get_args(StatusKind)
    assert [kind for kind in kinds if Status(kind).counts] == ["ok", "nothing chosen"]
    assert [kind for kind in kinds if not Status(kind).is_lost] == ["ok", "nothing chosen", "not selected"]


def test_is_finite_is_not_fooled_by_sums() -> None:
    """The sum of finite numbers may overflow, that of ∞ and −∞ is NaN."""
    huge = torch.full((4,), 3e38)
    assert is_finite(huge)
    assert is_finite(torch.zeros(0))
    assert not is_finite(torch.tensor([math.inf, -math.inf]))
    assert not is_finite(torch.tensor([1.0, math.nan]))
    assert not is_finite(torch.tensor([3e38, 3e38, math.nan]))


def test_layers_with_units() -> None:
    assert layers_with_units(torch.tensor([False, True, False, False, False]), LAYERS).tolist() == [True, False]
    assert layers_with_units(torch.tensor([False, False, False, False, True]), LAYERS).tolist() == [False, True]


# --- bytes by hand -----------------------------------------------------------------------------------------------


def test_order_bytes() -> None:
    """A state of three doubles is 24 bytes; a mask is a bit per layer: 1 byte for 8 layers, 2 for 9."""
    state = {"mu": torch.zeros(3, dtype=torch.float64)}
    assert Order("train", 1, 0, 0, model=torch.zeros(99)).control_bytes() == 0
    assert Order("train", 1, 0, 0, objective_state=state).control_bytes() == 24
    assert Order("upload", 1, 0, 0, mask=torch.ones(8, dtype=torch.bool)).control_bytes() == 1
    assert Order("train", 1, 0, 0, objective_state=state, mask=torch.ones(9, dtype=torch.bool)).control_bytes() == 26


def test_reply_bytes_of_layers() -> None:
    """9 and 8 numbers of four bytes, and nothing for what is not sent."""
    whole = LAYERS.bytes_per_layer()
    assert REPLY.upload_bytes(LAYERS, whole).tolist() == [36, 32]
    assert replace(REPLY, sent=~FIRST).upload_bytes(LAYERS, whole).tolist() == [0, 32]
    assert replace(REPLY, sent=~FIRST).upload_bytes(LAYERS, whole // 2).tolist() == [
        0,
        16,
    ]  # half precision on the wire
    assert replace(REPLY, update=None).upload_bytes(LAYERS, whole).tolist() == [0, 0]
    assert REPLY.feedback_numbers() == 0
    assert Reply(scores=torch.zeros(2)).feedback_numbers() == 2


def test_reply_bytes_of_units() -> None:
    """Unit 0 and 2 of Linear(2, 3): 2·(2 weights + 1 bias) numbers and 2 indices; unit 1 of Linear(3, 2): 4 and 1.

    In bytes: 6·4 + 2·4 = 32, and 4·4 + 1·4 = 20.
    """
    units = torch.tensor([True, False, True, False, True])
    assert replace(REPLY, units=units).upload_bytes(LAYERS, LAYERS.bytes_per_layer()).tolist() == [32, 20]


def test_unit_bytes_with_batch_norm() -> None:
    """A channel of Tiny's block: 9 weights, bias, BatchNorm's two and its two statistics = 14 doubles and an index.

    An output of the linear layer: 12 weights and a bias.
    """
    layers = Layers.of(Tiny().double(), "block")
    units = torch.tensor([False, True, False, True, True, False])
    reply = Reply(5, sent=BOTH, units=units, update=torch.zeros(layers.numel))
    assert reply.upload_bytes(layers, layers.bytes_per_layer()).tolist() == [14 * 8 + 4, 2 * (13 * 8 + 4)]


# --- a round's ledger --------------------------------------------------------------------------------------------

ONE_ROUND = Training(rounds=1, batch_size=4, lr=0.05)
TWENTY = image_task([4, 5] * 10)
LAYER_BYTES = np.array([30 + 12, 39]) * 4  # Tiny in blocks, single precision


def ledger(selection: object, objective: object = None, training: Training = ONE_ROUND):
    algorithm = replace(FEDAVG, selection=selection) if selection is not None else FEDAVG  # type: ignore[arg-type]
    if objective is not None:
        algorithm = replace(algorithm, objective=objective)  # type: ignore[arg-type]
    _, (record,) = run(TWENTY, algorithm, training, grouping="block", dtype=torch.float32)
    return record.ledger


def test_fedavg_ledger() -> None:
    """20 clients: the whole model up and down, a byte of mask each, no feedback."""
    book = ledger(None)
    np.testing.assert_array_equal(book.up, 20 * LAYER_BYTES)
    np.testing.assert_array_equal(book.down, 20 * LAYER_BYTES)
    assert (book.feedback, book.control) == (0, 20)
    assert book.upload == 20 * LAYER_BYTES.sum()
    assert book.download == 20 * LAYER_BYTES.sum() + 20


def test_fedldf_uploads_a_fifth_plus_feedback() -> None:
    """K = 20, n = 4: exactly 4/20 of FedAvg's layers, plus K·L = 40 numbers of 4 bytes."""
    book, full = ledger(FedLDF(n=4)), ledger(None)
    np.testing.assert_array_equal(book.up * 5, full.up)
    assert book.feedback_numbers == 40
    assert book.feedback == 160
    assert book.upload == full.upload // 5 + 160
    np.testing.assert_array_equal(book.down, full.down)
    assert 4 <= book.control <= 8, "a byte of mask for each client that is asked for something"


@pytest.mark.parametrize("selection", [RandomLayers(n=4), RandomClients(n=4)], ids=lambda rule: type(rule).__name__)
def test_random_selections_upload_a_fifth(selection: RandomLayers | RandomClients) -> None:
    book, full = ledger(selection), ledger(None)
    np.testing.assert_array_equal(book.up * 5, full.up)
    assert book.feedback == 0
    if isinstance(selection, RandomClients):
        np.testing.assert_array_equal(book.down * 5, full.down)


def test_neuron_pruning_ledger() -> None:
    """A share of 0.4 of three units is one: (9 + 1 + 4) numbers and an index, (12 + 1) and an index, from all 20."""
    book = ledger(NeuronPruning(share=0.4))
    np.testing.assert_array_equal(book.up, [20 * (14 * 4 + 4), 20 * (13 * 4 + 4)])
    assert book.control == 0


def test_adaptive_mu_goes_down_with_the_model() -> None:
    """A double per layer, and the mask: 2·8 + 1 bytes for each of 20 clients."""
    assert ledger(None, AdaptiveMu()).control == 20 * 17


def test_single_precision_scores_are_what_is_sent() -> None:
    algorithm = Algorithm(Plain(), FedLDF(n=1), SampleSize())
    _, (record,) = run(image_task([5, 6]), algorithm, ONE_ROUND)
    scores = record.layers["divergence"]
    np.testing.assert_array_equal(scores, scores.astype(np.float32).astype(np.float64))


# --- the cohort --------------------------------------------------------------------------------------------------


def test_cohort_figures_by_hand() -> None:
    """Layer A: Δ = (1, 0), (0, 2), n = 1, 3: G = (¼, 1½). Layer B: only client 1, Δ = 3.

    ⟨Δ, G⟩ = ¼ and 3 in A, 9 in B; ‖G_A‖² = 1/16 + 9/4, ‖G_B‖² = 9. The model is (3, 4 | 1): ‖w + Δ‖.
    """
    crowd = cohort(
        vectors(2, 1),
        [[1, 0, 0], [0, 2, 3]],
        [1, 3],
        sent=[[True, False], [True, True]],
        model=torch.tensor([3, 4, 1], dtype=torch.float64),
    )
    assert crowd.gram.tolist() == [[[1, 0], [0, 4]], [[0, 0], [0, 9]]]
    assert crowd.shares.tolist() == [[0.25, 0], [0.75, 1]]
    assert crowd.inner_with_mean.tolist() == [[0.25, 0], [3, 9]]
    assert crowd.mean_squared.tolist() == [1 / 16 + 9 / 4, 9]
    assert crowd.update_squared.tolist() == [[1, 0], [4, 9]]
    torch.testing.assert_close(crowd.local_norms[1], torch.tensor([math.sqrt(45), 4], dtype=torch.float64))
    assert len(crowd) == 2


def test_cohort_sums_over_blocks() -> None:
    """Layers much longer than a block of columns, of which the server sees a part at a time: the sums are the whole."""
    length, generator = 300_000, torch.Generator().manual_seed(0)
    updates = torch.randn(3, 2 * length, generator=generator, dtype=torch.float64)
    model = torch.randn(2 * length, generator=generator, dtype=torch.float64)
    crowd = cohort(vectors(length, length), updates.tolist(), [1, 1, 2], model=model)
    assert len(crowd.pieces()) > 4
    share = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)
    for at, columns in enumerate((slice(0, length), slice(length, 2 * length))):
        layer = updates[:, columns]
        mean = share @ layer
        close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-9)
        close(crowd.gram[at], layer @ layer.T)
        close(crowd.inner_with_mean[:, at], layer @ mean)
        close(crowd.mean_squared[at], mean @ mean)
        close(crowd.update_squared[:, at], layer.square().sum(1))
        close(crowd.local_norms[:, at], (layer + model[columns]).norm(dim=1))


@pytest.mark.parametrize("by_unit", [False, True])
def test_no_number_of_threads_changes_a_bit(by_unit: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does where in memory an update happens to lie."""
    layers = Layers.of(nn.Sequential(nn.Linear(700, 900), nn.Linear(900, 5)))
    count, generator = 7, torch.Generator().manual_seed(0)
    updates = torch.randn(count, layers.numel, generator=generator)
    shifted = [torch.empty(layers.numel + 1 + k)[1 + k :].copy_(update) for k, update in enumerate(updates)]
    weights = torch.rand(count, len(layers), generator=generator, dtype=torch.float64)
    units = torch.rand(count, layers.units, generator=generator) < 0.5
    crowd = Cohort(
        round=1,
        clients=torch.arange(count),
        sizes=torch.arange(1, count + 1, dtype=torch.float64),
        layers=layers,
        updates=tuple(updates),
        sent=torch.ones(count, len(layers), dtype=torch.bool),
        model=torch.randn(layers.numel, generator=generator),
        units=units if by_unit else None,
    )
    assert len(crowd.pieces()) > 5  # as many threads have something to do
    monkeypatch.setattr("fedstrata.core.determinism.WORTH_IT", 1)
    found = []
    for threads, same in ((1, crowd), (2, replace(crowd)), (5, replace(crowd, updates=tuple(shifted)))):
        monkeypatch.setattr("fedstrata.core.determinism.cores", lambda threads=threads: threads)
        with steady():
            found.append([aggregate(same.model, same, weights), same.layer_angles, same.local_norms])
    for others in found[1:]:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found[0], others, strict=True))
