"""What the page has where: sections, the choices in them, and the parts that they show.

In the name of a part, {x} is what is chosen as x, and {run:x} the run of the arm x with the chosen seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fedstrata.plots.arms import Arm
from fedstrata.plots.quantities import LAYERED, OF_CLIENTS

Section = dict[str, Any]


def sections(arms: Sequence[Arm], labels: Sequence[str], quantities: Sequence[str], probed: bool) -> list[Section]:
    """Every section, from what matters first to what is looked up."""
    found = [_stands_out(arms), _overview(arms, labels)]
    if quantities:
        found += [_layers(arms, quantities), _clients(arms, quantities), _compare(arms)]
        found += [_probe()] if probed else []
    else:
        nothing = "Nothing is known per layer: record.layers was off, or no round is done yet."
        found.append(_section("layers", "Layers", nothing, []))
    return [*found, _bytes(arms), _data(arms), _settings(arms)]


def _section(name: str, title: str, about: str, blocks: Sequence[Any], choices: Sequence[Any] = ()) -> Section:
    return {"id": name, "title": title, "about": about, "choices": list(choices), "blocks": list(blocks)}


def _block(kind: str, part: str, title: str = "", **more: Any) -> dict[str, Any]:
    return {"kind": kind, "part": part, "title": title, **more}


def _choice(name: str, label: str, options: Iterable[tuple[str, str]]) -> dict[str, Any]:
    return {"name": name, "label": label, "options": [list(one) for one in options]}


def _each(arms: Sequence[Arm], kind: str, part: str, title: str = "", **more: Any) -> list[dict[str, Any]]:
    """A block for each arm, beside each other; {run} is the arm's."""
    return [
        _block(kind, part.replace("{run}", f"{{run:{at}}}"), f"{title} {{arm:{at}}}".strip(), arm=at, **more)
        for at in range(len(arms))
    ]


def _arm(arms: Sequence[Arm], name: str = "arm", label: str = "run") -> list[dict[str, Any]]:
    """Which arm is looked at, if there are several."""
    options = [(str(at), arm.name) for at, arm in enumerate(arms)]
    return [_choice(name, label, options)] if len(arms) > 1 else []


def _stands_out(arms: Sequence[Arm]) -> Section:
    blocks = [_block("lines", "notices")]
    blocks += _each(arms, "findings", "findings/{run}") if len(arms) > 1 else [_block("findings", "findings/{run:0}")]
    return _section("findings", "What stands out", "", blocks)


def _overview(arms: Sequence[Arm], labels: Sequence[str]) -> Section:
    blocks = [_block("table", "outcome", title="Outcome", words=True)]
    if not labels:
        return _section("overview", "Overview", "No round is done yet.", blocks)
    choices = [
        _choice("label", "curve", [(str(at), label) for at, label in enumerate(labels)]),
        _choice("ends", "y axis", [("ends", "where lines end"), ("all", "all values")]),
    ]
    about = (
        "Lines are medians over seeds, bands their 95 % bootstrap intervals (from five seeds on), thin lines single "
        "seeds. Click a name in a legend to take it away or bring it back. Drag to move, Ctrl and wheel (or + and −) "
        "to zoom, double click (or 0) to set back; arrow keys read a picture."
    )
    blocks += [
        _block("picture", "curves/{label}/round/{ends}", "Over rounds"),
        _block("picture", "curves/{label}/upload/{ends}", "Against upload"),
    ]
    if len(arms) > 1:
        blocks.append(_block("picture", "differences/{label}", "Differences, paired by seed"))
    blocks.append(_block("picture", "curves/{label}/time/{ends}", "Against time"))
    return _section("overview", "Overview", about, blocks, choices)


def _layers(arms: Sequence[Arm], quantities: Sequence[str]) -> Section:
    choices = [
        _choice("quantity", "quantity", [(name, LAYERED[name].title) for name in quantities]),
        _choice("layers", "as", [("layers", "heat map"), ("layer-lines", "lines")]),
    ]
    about = (
        "One number for all clients of a round: their median; of weights the largest, of what was sent the mean. "
        "Click a layer to see its clients below."
    )
    blocks = [_block("about", "", texts={name: f"{LAYERED[name].title}: {LAYERED[name].about}" for name in quantities})]
    blocks += _each(arms, "picture", "{layers}/{run}/{quantity}", "Layers over rounds:", pick=["layer"])
    blocks += _each(arms, "picture", "model/{run}/{quantity}", "The model in the last round:", pick=["layer"])
    blocks += _each(arms, "table", "numbers/{run}", "Layers in numbers:", folded=True)
    return _section("layers", "Layers", about, blocks, choices)


def _clients(arms: Sequence[Arm], quantities: Sequence[str]) -> Section:
    choices = [
        *_arm(arms),
        _choice("person", "of each client", [(name, one.title) for name, one in OF_CLIENTS.items()]),
        _choice("clients", "as", [("clients", "heat map"), ("client-lines", "lines")]),
        _choice("layer", "layer", [(str(at), name) for at, name in enumerate(arms[0].first.layers)]),
        _choice("cell", "its clients as", [("cell", "heat map"), ("cell-lines", "lines")]),
    ]
    run = "{run:arm}"
    blocks = [
        _block("picture", f"{{clients}}/{run}/{{person}}", "{person}"),
        _block("picture", f"participation/{run}", "Who did what"),
        _block("picture", f"{{cell}}/{run}/{{quantity}}", "{quantity} in {layer}", fix="layer"),
        _block("table", f"people/{run}", "One line per client"),
        _block("table", f"replies/{run}", "Lost replies"),
    ]
    return _section(
        "clients", "Clients", "Cells without a colour have no value: the client was not asked.", blocks, choices
    )


def _compare(arms: Sequence[Arm]) -> Section:
    choices = []
    for side in ("left", "right"):
        choices += _arm(arms, side, side)
        choices.append({**_choice(f"{side}-round", f"{side} round", []), "rounds": side})
    blocks = [
        _block("picture", "round/{run:left}/{quantity}", "{left}round {left-round}", fix="left-round"),
        _block("picture", "round/{run:right}/{quantity}", "{right}round {right-round}", fix="right-round"),
    ]
    about = (
        "Clients × layers in two rounds, of one run or of two, on one scale. The quantity is the one chosen for layers."
    )
    return _section("compare", "Compare two", about, blocks, choices)


def _probe() -> Section:
    about = (
        "A round computed again without each client, each layer, and each layer of each client: how much lower the "
        "loss would be. Red harms, blue helps."
    )
    blocks = [
        _block("findings", "probed/{run:arm}"),
        _block("picture", "probe/{run:arm}", "Harm to the loss", wide=True),
    ]
    return _section("probe", "Who harms", about, blocks)


def _bytes(arms: Sequence[Arm]) -> Section:
    choices = [
        _choice("way", "direction", [("up", "upload"), ("down", "download")]),
        _choice("bytes", "count", [("bytes", "in each round"), ("bytes-so-far", "so far")]),
    ]
    about = "What travelled between server and clients, layer by layer, summed over clients."
    blocks = _each(arms, "picture", "{bytes}/{run}/{way}")
    return _section("bytes", "Bytes", about, blocks, choices)


def _data(arms: Sequence[Arm]) -> Section:
    return _section("data", "Data", "", [_block("table", "partition/{run:arm}", "Samples by client and class")])


def _settings(arms: Sequence[Arm]) -> Section:
    blocks = [_block("table", "settings", "Settings that differ")] if len(arms) > 1 else []
    blocks.append(
        _block("table", "shared", "Settings that all runs share" if len(arms) > 1 else "All settings", folded=True)
    )
    blocks.append(_block("table", "directories", "Where the runs are", folded=True))
    return _section("settings", "Settings", "", blocks)
