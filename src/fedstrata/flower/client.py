"""The client's half of algorithms that the server cannot carry out alone.

`Local` adds the proximal term to a PyTorch training loop (FedProx, adaptive μ, FedLap).
`selection_mod` sends only the layers that the server asked for (FedLDF, random layers), for any framework. Neither
does anything if the server asks for nothing, so a client that has them also serves FedAvg.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.clientapp.typing import ClientAppCallable
from torch import nn

from fedstrata.clients import local
from fedstrata.clients.local import ProximalTerm, draw_schedule
from fedstrata.core.axes import Plain, SelectsAfterScores
from fedstrata.core.errors import RecipeError
from fedstrata.core.layers import Layers
from fedstrata.core.messages import SCORE_DTYPE, Order
from fedstrata.core.training import LocalTraining
from fedstrata.flower.callers import mods_around
from fedstrata.flower.wire import (
    FIRST_MOD,
    RECEIPT,
    SCORES,
    Ask,
    Decoded,
    names,
    objective_state,
    round_of,
    rule_from_json,
)
from fedstrata.tasks.nests import moved
from fedstrata.tasks.task import as_data


class Local(local.Local):
    """The `Local` of a Flower app's own training loop, from the message that it answers.

    local = Local(message, model)
    for _ in range(epochs):
        local.epoch()
        for images, labels in loader:
            optimizer.zero_grad()
            criterion(model(images), labels).backward()
            local.pull()
            optimizer.step()
    …
    local.acknowledge(content)  # without it, the server refuses the reply where a rule has a proximal term

    With `data`, in any form that a `Task` takes, there is `local.batches()`, so that a function `train(model, data,
    local)` is the same here and in a simulation. `seed` is for its batches, and `training` for the rest that such a
    function asks for: `lr=0.1, epochs=2, batch_size=16`.

    `names` gives the name under which a parameter of the model travels, if it is another one. PEFT's adapters travel
    without their name: `names=lambda name: name.replace(".default.", ".")`.
    """

    def __init__(
        self,
        message: Message,
        model: nn.Module,
        data: Any = None,
        *,
        names: Callable[[str], str] = str,
        seed: int = 0,
        **training: Any,
    ) -> None:
        plan, own, first = LocalTraining(**training), None, next(model.parameters(), torch.empty(0))
        self._ask = Ask.of(message.content)
        order = Order("train", round_of(message.content), attempt=0, client=0, work=plan.full_work)
        if data is not None:
            own = as_data(data, "data")
        super().__init__(
            order,
            plan,
            _term(self._ask, message.content, model, names),
            seed=seed,
            device=first.device,
            data=own,
            schedule=None if own is None else draw_schedule(len(own), order, plan, seed),
            place=lambda batch: (
                moved(batch[0], first.device, first.dtype),
                moved(batch[1], first.device, first.dtype),
            ),
        )

    def acknowledge(self, content: RecordDict) -> RecordDict:
        """Note in a reply's content that the proximal term was there, and how stiff it was in the end."""
        if self._ask is not None and self._ask.objective:
            content[RECEIPT] = ConfigRecord(
                {
                    "round": self._ask.round,
                    "objective": self._ask.objective,
                    "pulls": self.pulls,
                    "stiffness": self.stiffness().tolist(),
                }
            )
        return content


def _term(ask: Ask | None, content: RecordDict, model: nn.Module, rename: Callable[[str], str]) -> ProximalTerm:
    """Between the weights of a model and those that came; where no rule has a proximal term, of none."""
    if ask is None or not ask.objective:
        return ProximalTerm(Plain(), {}, Layers((), torch.float32), {}, {})
    received = content.array_records[ask.model]
    packing = ask.packing(received)
    anchor = packing.layers.views(packing.flatten(Decoded(received)), trainable_only=True)
    named = [(rename(name), w) for name, w in model.state_dict(keep_vars=True).items()]
    weights = {name: w for name, w in named if name in anchor}
    missing = [name for name in anchor if name not in weights]
    if missing:
        raise RecipeError("model", names(missing), "received, but the model has no such parameter")
    first_name = {id(w): name for name, w in reversed(weights.items())}
    # Frozen weights are not pulled, and one that goes by two names is pulled once.
    free = {name for name, w in weights.items() if not w.requires_grad or first_name[id(w)] != name}
    rule, state = rule_from_json("objective", ask.objective), objective_state(content)
    return ProximalTerm(rule, state, packing.layers, weights, anchor, free)


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
