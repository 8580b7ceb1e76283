"""What a probe has found, in memory and in its file: probe/NNNNNN.safetensors, beside the run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from fedstrata.core.errors import RunDirectoryError
from fedstrata.formatting import number
from fedstrata.runs.directory import RunDirectory, digest, round_file
from fedstrata.runs.formats import damaged

PROBE_FORMAT = 1
"""Version of the file's format."""

FOLDER = "probe"


@dataclass(frozen=True)
class Sizes:
    """One quantity of the models without something."""

    whole: float
    """Of the model that came of the round."""
    before: float
    """Of the model that the round began with."""
    client: np.ndarray
    """[K]: had the client's reply not come."""
    layer: np.ndarray
    """[L]: had nobody's update of the layer come."""
    both: np.ndarray
    """[K, L]: had the client's update of the layer not come."""

    def put(self, place: tuple[int | None, int | None], value: float) -> None:
        """Note what the model without this client, layer or both has."""
        client, layer = place
        if client is None:
            self.layer[layer] = value
        elif layer is None:
            self.client[client] = value
        else:
            self.both[client, layer] = value


@dataclass(frozen=True)
class Probe:
    """What the model would be without each client, each layer, and each layer of each client."""

    round: int
    on: str
    """The evaluation set."""
    metric: str
    clients: np.ndarray
    """int64 [K], who was sampled; leaving out one whose reply was lost changes nothing."""
    layers: list[str]
    checked: str
    """What the round that was computed again was compared with …"""
    matches: bool
    """… and whether it has the same bits."""
    loss: Sizes
    score: Sizes
    """The metric."""
    names: Sequence[str] = ()
    """What clients are called, where they are more than numbers."""

    @property
    def harm(self) -> np.ndarray:
        """[K]: how much lower the loss would be without the client; below 0, it helps."""
        return self.loss.whole - self.loss.client

    @property
    def layer_harm(self) -> np.ndarray:
        """[L]: how much lower the loss would be if the layer had stayed as it was."""
        return self.loss.whole - self.loss.layer

    @property
    def cell_harm(self) -> np.ndarray:
        """[K, L]: how much lower the loss would be without the client's update of the layer."""
        return self.loss.whole - self.loss.both

    def called(self, at: int) -> str:
        """The client at a position."""
        client = int(self.clients[at])
        return f"client {client} ({self.names[client]})" if client < len(self.names) else f"client {client}"

    def ranking(self) -> list[int]:
        """The clients, who harms most first."""
        harm = np.where(np.isfinite(self.harm), self.harm, -math.inf)
        return [int(self.clients[at]) for at in np.argsort(-harm, kind="stable")]

    def sentences(self) -> list[str]:
        """Who and what harms most, for people."""
        said = []
        if not self.matches:
            said.append(f"Round {self.round} computed again differs from {self.checked}: these numbers are of another.")
        for at in np.argsort(-np.where(np.isfinite(self.harm), self.harm, -math.inf), kind="stable")[:1].tolist():
            if self.harm[at] > 0:
                layer = self.layers[int(np.argmax(self.cell_harm[at]))]
                said.append(
                    f"Without {self.called(at)} the loss on {self.on} after round {self.round} would be "
                    f"{number(self.loss.client[at])} instead of {number(self.loss.whole)}, and {self.metric} "
                    f"{number(self.score.client[at])} instead of {number(self.score.whole)}; "
                    f"its layer {layer} harms most."
                )
            else:
                said.append(f"Without any one of the clients, the loss on {self.on} would be higher.")
        harmful = [name for name, harm in zip(self.layers, self.layer_harm, strict=True) if harm > 0]
        if harmful:
            worst = int(np.argmax(self.layer_harm))
            said.append(
                f"Had layer {self.layers[worst]} stayed as it was, the loss on {self.on} would be "
                f"{number(self.loss.layer[worst])} instead of {number(self.loss.whole)}."
            )
        return said


# --- the file --------------------------------------------------------------------------------------------------------

_TABLES = ("whole", "before", "client", "layer", "both")


def store_probe(directory: RunDirectory, probe: Probe) -> None:
    """Write it beside the run; one of the same round is replaced."""
    arrays = {"clients": probe.clients.astype(np.int64)}
    for name, sizes in (("loss", probe.loss), ("score", probe.score)):
        for part in _TABLES:
            arrays[f"{name}/{part}"] = np.array(getattr(sizes, part), dtype=np.float64)
    metadata = {
        "format": str(PROBE_FORMAT),
        "run": str(directory.id),
        "round": str(probe.round),
        "on": probe.on,
        "metric": probe.metric,
        "checked": probe.checked,
        "matches": "yes" if probe.matches else "no",
    }
    metadata["sha256"] = digest(arrays, metadata)
    directory.files.make_folder(FOLDER)
    directory.files.write(round_file(FOLDER, probe.round), save(dict(sorted(arrays.items())), metadata))


def stored_probes(directory: RunDirectory) -> list[int]:
    """The rounds that were probed."""
    return directory.rounds(FOLDER) if directory.files.has(FOLDER) else []


def read_probe(directory: RunDirectory, round: int) -> Probe:
    """The probe of a round, checked."""
    name = round_file(FOLDER, round)
    path = directory.path / name
    try:
        arrays, metadata = directory.files.read_arrays(name)
    except FileNotFoundError:
        raise RunDirectoryError(
            f"{directory.path} has no probe of round {round}; make it with: fedstrata probe {directory.path} "
            f"--round {round}"
        ) from None
    except OSError as error:
        raise damaged(path, str(error)) from None
    if metadata.get("format") != str(PROBE_FORMAT):
        raise damaged(path, f"format = {metadata.get('format')!r}, expected {str(PROBE_FORMAT)!r}")
    directory.require_ours(name, metadata, round)
    if metadata.get("sha256") != digest(arrays, metadata):
        raise damaged(path, "its digest does not match; delete it and probe the round again")
    return _checked(directory, round, arrays, metadata, path)


def _checked(
    directory: RunDirectory, round: int, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str], path: Path
) -> Probe:
    """Of the shapes and types that they are written with."""
    missing = [name for name in ("on", "metric", "checked", "matches") if name not in metadata]
    if missing:
        raise damaged(path, f"{missing[0]}: missing")
    if metadata["matches"] not in ("yes", "no"):
        raise damaged(path, f"matches = {metadata['matches']!r}, expected yes or no")
    clients = arrays.get("clients", np.empty(0))
    if clients.ndim != 1 or clients.dtype != np.int64 or not len(clients):
        raise damaged(path, f"clients is {clients.dtype} {list(clients.shape)}, expected int64 and at least one")
    if min(found := clients.tolist()) < 0 or max(found) >= directory.about.clients or found != sorted(set(found)):
        raise damaged(path, f"clients: not in order, or not from 0 to {directory.about.clients - 1}")
    count, layers = len(clients), len(directory.about.layers)
    shapes = {"whole": (), "before": (), "client": (count,), "layer": (layers,), "both": (count, layers)}

    def sizes(name: str) -> Sizes:
        parts = {}
        for part, shape in shapes.items():
            array = arrays.get(f"{name}/{part}")
            if array is None:
                raise damaged(path, f"{name}/{part}: missing")
            if array.shape != shape or array.dtype != np.float64:
                kind = f"{array.dtype} {list(array.shape)}"
                raise damaged(path, f"{name}/{part} is {kind}, expected float64 {list(shape)}")
            parts[part] = array
        whole, before = (float(parts.pop(part)) for part in ("whole", "before"))
        return Sizes(whole, before, **parts)

    return Probe(
        round,
        metadata["on"],
        metadata["metric"],
        clients,
        [layer.name for layer in directory.about.layers],
        metadata["checked"],
        metadata["matches"] == "yes",
        sizes("loss"),
        sizes("score"),
        directory.about.data.client_names,
    )
