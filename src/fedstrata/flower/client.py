"""The client's half of algorithms that the server cannot carry out alone.

`Spring` pulls the weights of a PyTorch training loop towards the global ones (FedProx, adaptive μ, FedLap).
`selection_mod` sends only the layers that the server asked for (FedLDF, random layers), for any framework. Neither
does anything if the server asks for nothing, so a client that has them also serves FedAvg.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.clientapp.typing import ClientAppCallable
from torch import Tensor, nn

from fedstrata.clients import training
from fedstrata.core.axes import SelectsAfterScores
from fedstrata.core.errors import RecipeError
from fedstrata.core.messages import SCORE_DTYPE
from fedstrata.flower.callers import mods_around
from fedstrata.flower.wire import FIRST_MOD, RECEIPT, SCORES, Ask, Decoded, names, objective_state, rule_from_json

Batch = TypeVar("Batch")


class Spring:
    """The spring of one client's round, between the weights of `model` and those that `message` brought.

    spring = Spring(message, model)
    for _ in range(epochs):
        for images, labels in spring.epoch(loader):
            optimizer.zero_grad()
            criterion(model(images), labels).backward()
            spring.pull()
            optimizer.step()
    …
    spring.acknowledge(content)  # the server refuses a reply without it
    """

    def __init__(self, message: Message, model: nn.Module) -> None:
        self._ask = Ask.of(message.content)
        self._spring: training.Spring | None = None
        self._pulls = self._epochs = 0
        self._epoch_begins = False
        if self._ask is None or not self._ask.objective:
            return
        received = message.content.array_records[self._ask.model]
        packing = self._ask.packing(received)
        anchor = packing.layers.views(packing.flatten(Decoded(received)), trainable_only=True)
        local = {name: w for name, w in model.state_dict(keep_vars=True).items() if name in anchor}
        missing = [name for name in anchor if name not in local]
        if missing:
            raise RecipeError("model", names(missing), "received, but the model has no such parameter")
        self._spring = training.Spring(
            rule_from_json("objective", self._ask.objective),
            objective_state(message.content),
            packing.layers,
            local,
            {name: anchor[name].to(w) for name, w in local.items()},
        )
        first_name = {id(w): name for name, w in reversed(local.items())}
        # Frozen weights need no spring, and one that goes by two names is pulled once.
        self._free = {name for name, w in local.items() if not w.requires_grad or first_name[id(w)] != name}

    def epoch(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of one local epoch. FedLap's spring stiffens when an epoch begins; others do not mind."""
        self._epoch_begins = True
        self._epochs += 1
        yield from batches

    def pull(self) -> None:
        """Add the spring's gradient: between `backward` and the optimiser's step, to gradients that are not scaled."""
        if self._spring is None:
            return
        objective = self._spring.objective
        if objective.refresh == "epoch" and self._epochs == 0:
            raise RuntimeError("this objective wants to know when an epoch begins: loop over spring.epoch(batches)")
        if training.is_due(objective, self._epoch_begins, first_of_round=self._pulls == 0):
            self._spring.refresh()
            self._spring.stiffness = {n: c for n, c in self._spring.stiffness.items() if n not in self._free}
        self._epoch_begins = False
        self._pulls += 1
        if not objective.differentiable:
            self._spring.pull()
        elif isinstance(energy := self._spring.energy(), Tensor):
            energy.backward()  # type: ignore[no-untyped-call]

    def acknowledge(self, content: RecordDict) -> RecordDict:
        """Note in a reply's content that the objective was applied, and how stiff the spring was in the end."""
        if self._ask is not None and self._spring is not None:
            stiffness = training.mean_per_layer(self._spring.stiffness, self._spring.layers)
            content[RECEIPT] = ConfigRecord(
                {
                    "round": self._ask.round,
                    "objective": self._ask.objective,
                    "pulls": self._pulls,
                    "stiffness": stiffness.tolist(),
                }
            )
        return content


def selection_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Reply with the chosen layers only: `ClientApp(mods=[selection_mod])`.

    It comes before mods that change the arrays, `mods=[selection_mod, LocalDpMod(…)]`, so that they see all of them.
    For a selection that wants scores first, what was trained is kept in `context.state` until the second message,
    which is of type `train` too and never reaches the app.
    """
    ask = Ask.of(message.content)
    if ask is None or ask.answer == "all":
        return call_next(message, context)
    _refuse_mods_that_want_all_arrays()
    if ask.answer == "kept":
        return Message(RecordDict({ask.model: _chosen(_take_kept(context, ask), ask)}), reply_to=message)
    reply = call_next(message, context)
    if reply.has_error():
        return reply
    if len(reply.content.array_records) != 1:
        raise RecipeError("array_records", list(reply.content.array_records), "a reply must have exactly one")
    ((key, trained),) = reply.content.array_records.items()
    del reply.content[key]
    if ask.answer == "arrays":
        reply.content[key] = _chosen(trained, ask)
        return reply
    context.state[_KEPT] = trained
    context.state[_KEPT_OF] = ConfigRecord({"round": ask.round})
    received = message.content.array_records[ask.model]
    packing = ask.packing(received)
    rule: SelectsAfterScores = rule_from_json("selection", ask.selection)
    scores = rule.score(packing.flatten(Decoded(trained)) - packing.flatten(Decoded(received)), packing.layers)
    reply.content[SCORES] = ArrayRecord({"scores": Array(scores.to(SCORE_DTYPE).numpy())})
    return reply


def _refuse_mods_that_want_all_arrays() -> None:
    """Flower's mods that clip or add noise fail on chosen layers, with an error reply that Flower loses on the way."""
    for mod in mods_around():
        if isinstance(mod, LocalDpMod) or mod in (fixedclipping_mod, adaptiveclipping_mod):
            name = getattr(mod, "__name__", type(mod).__name__)
            raise RecipeError("mods", name, f"must come after selection_mod: {FIRST_MOD}")


_KEPT, _KEPT_OF = "fedstrata-kept", "fedstrata-kept-of"


def _take_kept(context: Context, ask: Ask) -> ArrayRecord:
    """What was trained in this round; a message that was delayed may have put another round's there."""
    of = context.state.config_records.get(_KEPT_OF)
    if of is None or of["round"] != ask.round:
        raise LookupError(f"nothing kept for round {ask.round}")
    kept = context.state.array_records[_KEPT]
    del context.state[_KEPT], context.state[_KEPT_OF]
    return kept


def _chosen(trained: ArrayRecord, ask: Ask) -> ArrayRecord:
    missing = [name for name in ask.arrays if name not in trained]
    if missing:
        raise RecipeError("arrays", names(missing), "asked for, but not among those that the client trained")
    return ArrayRecord({name: trained[name] for name in ask.arrays})
