"""A study's pictures: what the papers show, with intervals over seeds, and every layer.

What is on a picture is worked out first, as plain numbers and words, and drawn afterwards. The digest of the former is
kept in the PNG file: it tells whether a picture is still that of the stored results. Only drawing needs matplotlib.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from fedstrata.runs.reader import Run
from reproductions.figures.content import pictures
from reproductions.figures.drawing import draw
from reproductions.figures.layers import draw_layers, layer_maps
from reproductions.figures.style import STYLE, library, styles
from reproductions.results import Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["digest_in", "draw", "draw_layers", "layer_maps", "pictures", "styles", "write_all"]

_DIGEST = "Source"


def write_all(results: Results, folder: Path, runs: Path, every_layer: bool = False) -> list[Path]:
    """Draw a study into `folder`: its plots, and those of layers whose run directories are below `runs`.

    `every_layer` draws the layers of all arms, not only of those that the study chose.
    """
    study, written = results.study, []
    for picture in pictures(results):
        if picture.compares:
            written.append(_write(draw(picture), folder / study.name / picture.name, picture.digest()))
    chosen = {(plot.layers.cell, plot.layers.arm): plot.name for plot in study.plots if plot.layers}
    for cell in study.cells:
        for arm in study.arms:
            stem = chosen.get((cell.name, arm)) or (f"layers-{cell.name}-{arm}" if every_layer else None)
            run = _recorded(runs / cell.name / arm) if stem else None
            if stem and run:
                where = f"{study.name} ({study.paper}, {study.shows}), {cell.title}"
                title = f"{arm}: every layer over rounds and clients\n{where}: seed {run.recipe.seed}"
                written.append(_write(draw_layers(layer_maps(run, title)), folder / study.name / stem))
    return written


def _recorded(folder: Path) -> Run | None:
    """The first seed's run whose figures per layer were kept from its first round to its last."""
    for path in sorted(folder.glob("seed-*"), key=lambda path: int(path.name.removeprefix("seed-"))):
        if (path / "run.json").exists() and (path / "layers" / "000001.safetensors").exists():
            return Run(path)
    return None


def _write(figure: Figure, path: Path, digest: str = "") -> Path:
    """As PNG, SVG and PDF; the PNG's path."""
    from PIL import Image, PngImagePlugin

    path.parent.mkdir(parents=True, exist_ok=True)
    with library().rc_context(STYLE):
        figure.savefig(f"{path}.svg", metadata={"Date": None})  # without a date, the same picture is the same file
        figure.savefig(f"{path}.pdf", metadata={"CreationDate": None})
        pixels = io.BytesIO()
        figure.savefig(pixels, format="png")
    told = PngImagePlugin.PngInfo()
    told.add_text(_DIGEST, digest)
    # A palette is a third of the size. Chosen by distance, not by how many pixels a colour has: lines are thin.
    shown = Image.open(pixels).convert("RGB").quantize(256, method=Image.Quantize.MAXCOVERAGE)
    shown.save(f"{path}.png", optimize=True, pnginfo=told)
    return path.with_name(f"{path.name}.png")


def digest_in(path: Path) -> str | None:
    """The digest of what a PNG file of ours shows; heat maps of layers have none."""
    from PIL import Image

    with Image.open(path) as image:
        return image.info.get(_DIGEST)
