"""The report in a real browser: a Chromium that is installed, driven by Playwright.

Without one the tests are skipped, except where CI is set: there it is an error.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedstrata.report import content, write
from tests.support.make_runs import make_run

if "CI" not in os.environ:
    pytest.importorskip("playwright")

LONG = "a_very_long_name_without_any_space_in_it." * 6
EVIL = "</script><script>hacked = 1</script><img src=x onerror='hacked = 1'>"


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        problem = "no chromium on the PATH (Debian: apt-get install chromium)"
        pytest.fail(problem) if "CI" in os.environ else pytest.skip(problem)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs and their reports: one alone, several beside each other, names that are too long or evil, and a summary."""
    folder = tmp_path_factory.mktemp("reports")
    table = {"table": [[5, 0, 7]] * 4, "class_names": ["cat", "dog", "owl"], "dataset": "zoo", "source": "made"}
    lost = {1: [(2, "dropped out")], 2: [(2, "failed: ValueError: no sense (mine.py:3)")]}
    make_run(folder / "one", sampled=3, rounds=5, lost=lost, data=table)
    for algorithm in ("fedavg", "fedprox", "fedlayerwise"):
        for seed in range(5 if algorithm == "fedavg" else 2):
            make_run(folder / f"{algorithm}-{seed}", algorithm=algorithm, seed=seed, data=table)
    make_run(
        folder / "long", layers=(LONG, "b"), data={**table, "class_names": [LONG, EVIL, "c"]}, name="x" * 90, done=2
    )
    make_run(folder / "evil", layers=(EVIL, "b"), lost={1: [(1, f"failed: {EVIL}")]}, data={**table, "source": EVIL})
    make_run(folder / "wide", clients=60, layers=[f"layer{at}" for at in range(30)], rounds=120)
    make_run(folder / "fresh", done=0)
    for size in (16, 32):  # alike but for two settings, so that these are in their names
        words = f"One of two runs, described in a sentence that no column of a phone has room for: {size}"
        settings = {"training.batch_size": size, "training.epochs": 96 // size, "description": words}
        make_run(folder / "alike" / f"b{size}", settings=settings)
    write([folder / "one"], folder / "one.html")
    several = sorted(folder.glob("fed*-*"))
    write(several, folder / "several.html")
    for name in ("long", "evil", "wide", "fresh", "alike"):
        write([folder / name], folder / f"{name}.html")
    return folder


PAGES = ("one", "several", "long", "evil", "wide", "fresh", "alike")


@pytest.fixture
def show(browser: Any, folder: Path) -> Iterator[Callable[..., Any]]:
    """Open a report; whatever it asks of a network, and whatever goes wrong in it, fails the test."""
    contexts, wrong = [], []

    def opened(name: str, width: int = 1280, scheme: str = "light") -> Any:
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme, offline=True)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        address = (folder / f"{name}.html").as_uri()
        page.on("request", lambda request: None if request.url in (address, "data:,") else wrong.append(request.url))
        page.goto(address)
        page.wait_for_selector("#settings")
        page.wait_for_function("[...document.querySelectorAll('.chart')].every((box) => box.firstChild)")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert wrong == []


def choose(page: Any, section: str, label: str, option: str) -> None:
    page.locator(f"#{section} label.choice", has_text=re.compile(f"^{label}")).locator("select").select_option(
        label=option
    )


def click(page: Any, heat: Any, row: int, column: int, rows: int, columns: int) -> str:
    """Click the middle of a cell, and what is said then."""
    box = heat.locator("canvas").bounding_box()
    place = {"x": box["width"] * (column + 0.5) / columns, "y": box["height"] * (row + 0.5) / rows}
    heat.locator("canvas").click(position=place)
    return str(heat.locator("output").inner_text())


def number(text: str) -> float:
    return math.nan if text.startswith("no value") else float(re.match(r"[-\d.e+]+", text)[0])


# --- a clicked cell --------------------------------------------------------------------------------------------------

SHOWN: dict[str, tuple[str, Callable[[str], float]]] = {
    "angle": ("angle", lambda text: number(text.split("(")[-1])),  # 79.12° (1.3809 rad)
    "weight": ("weight", number),
    "divergence": ("divergence", number),
    "mu": ("μ", number),
    "norm": ("norm", number),
}


@pytest.mark.parametrize("quantity", SHOWN)
def test_a_clicked_cell_shows_the_records_value(show: Any, folder: Path, quantity: str) -> None:
    page = show("one")
    title, read = SHOWN[quantity]
    choose(page, "layers", "quantity", title)
    known = missing = 0
    for layer, name in enumerate(("first", "second")):
        choose(page, "layers", "layer", name)
        heat = page.locator("#layers .heat").last
        for round in range(1, 6):
            stored = load_file(folder / "one" / "layers" / f"{round:06d}.safetensors")
            values = dict(zip(stored["clients"].tolist(), stored[quantity][:, layer].tolist(), strict=True))
            for client in range(4):
                said = click(page, heat, client, round - 1, 4, 5)
                assert f"client {client}, round {round}, {name}" in said
                value = values.get(client, math.nan)  # one client of four is not asked
                if math.isnan(value):
                    assert said.startswith("no value")
                    missing += 1
                else:
                    assert read(said) == float(f"{value:.5g}")
                    known += 1
    assert known > 10
    assert missing > 5


def test_the_overview_has_medians_and_leads_to_the_layer(show: Any, folder: Path) -> None:
    page = show("one")
    choose(page, "layers", "quantity", "divergence")
    said = click(page, page.locator("#layers .heat").first, 1, 2, 2, 5)
    values = load_file(folder / "one" / "layers" / "000003.safetensors")["divergence"][:, 1]
    assert number(said) == pytest.approx(np.nanmedian(values), rel=1e-4)
    assert page.locator("#layers .heat").last.locator("figcaption").inner_text().startswith("divergence in second")


def test_cells_can_be_reached_with_the_keyboard(show: Any, folder: Path) -> None:
    page = show("one")
    choose(page, "layers", "quantity", "weight")
    heat = page.locator("#layers .heat").last
    heat.locator("canvas").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowRight", "ArrowLeft"):
        page.keyboard.press(key)
    assert "client 1, round 3, first" in heat.locator("output").inner_text()
    page.locator("#layers .heat").first.locator("canvas").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert "second" in page.locator("#layers .heat").last.locator("figcaption").inner_text()


def test_a_summary_says_so_and_shows_quantiles(show: Any, folder: Path) -> None:
    page = show("wide")
    assert "clients are summarised" in page.locator(".notice").inner_text()
    choose(page, "layers", "quantity", "divergence")
    heat = page.locator("#layers .heat").last
    for row, label in enumerate(content.SUMMARY):
        values = load_file(folder / "wide" / "layers" / "000011.safetensors")["divergence"][:, 0]
        quantile = {"max": 1, "75 %": 0.75, "median": 0.5, "25 %": 0.25, "min": 0}.get(label)
        expected = np.nanmean(values) if quantile is None else np.nanquantile(values, quantile)
        said = click(page, heat, row, 10, 6, 120)
        assert f" {label}, round 11, layer0" in said
        assert number(said) == float(f"{expected:.5g}")


# --- the rest of the page --------------------------------------------------------------------------------------------


def test_curves_say_what_the_history_says(show: Any) -> None:
    page = show("one")
    picture = page.locator("#curves svg").first
    picture.focus()
    for _ in range(2):
        page.keyboard.press("ArrowLeft")  # from the last round, 5, to 3
    assert "round 3, " in page.locator("#curves .legend").inner_text()
    assert "0.5000" in page.locator("#curves .legend").inner_text()  # 3 / 6
    choose(page, "curves", "curve", "loss on test")
    assert "0.4000" in page.locator("#curves .legend").inner_text()  # 2 / 5 in the last round


def test_several_runs_side_by_side(show: Any) -> None:
    page = show("several")
    assert page.locator("#outcome tbody tr").count() == 3
    assert page.locator("#curves .curve").count() == 2 * 3
    assert page.locator("#curves .band").count() == 2  # five seeds have an interval,
    assert page.locator("#curves .thin").count() == 2 * 2 * 2  # two seeds are shown one by one
    assert page.locator("#layers .multiples .heat").count() == 3
    assert page.locator("#bytes .multiples figure").count() == 3
    captions = page.locator("#layers .multiples figcaption")
    assert "fedavg, seed 0" in captions.all_inner_texts()
    page.locator(".seed select").select_option(label="4")
    assert "fedavg, seed 4" in captions.all_inner_texts()
    assert "fedprox, seed 0" in captions.all_inner_texts()  # which has no seed 4


def test_bytes_and_classes_and_losses(show: Any) -> None:
    page = show("one")
    key = page.locator("#bytes .key").inner_text()
    # five rounds of 100 t and 100 t + 1 bytes, and 8 of feedback
    assert "first 1.5 kB" in key
    assert "feedback 40 B" in key
    picture = page.locator("#bytes svg")
    picture.hover(position={"x": picture.bounding_box()["width"] - 20, "y": 100})
    assert "round 5: 1.01 kB first 500 B, second 501 B, feedback 8 B" in page.locator("#bytes output").inner_text()
    rows = page.locator("#data tbody tr")
    assert rows.first.inner_text().split() == ["0", "5", "·", "7", "12"]
    assert page.locator("#data thead").inner_text().split() == ["client", "cat", "dog", "owl", "all"]
    assert "2 of 15 requests" in page.locator("#replies").inner_text()
    assert "round 2: failed: ValueError: no sense (mine.py:3)" in page.locator("#replies tbody").inner_text()


def test_names_are_only_text(show: Any) -> None:
    page = show("evil")
    assert page.evaluate("typeof hacked") == "undefined"
    assert EVIL in page.locator("#layers option").all_text_contents()
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 2


def test_an_unfinished_run_says_so(show: Any) -> None:
    assert "has 2 of 3 rounds" in show("long").locator(".notice").inner_text()
    fresh = show("fresh")
    assert "has 0 of 3 rounds" in fresh.locator(".notice").inner_text()
    assert "No round is done yet" in fresh.locator("#curves").inner_text()


# --- fit and contrast ------------------------------------------------------------------------------------------------

OVERFLOW = """() => {
  const edge = document.documentElement.clientWidth, found = [];
  if (document.documentElement.scrollWidth > edge) found.push(`page ${document.documentElement.scrollWidth} > ${edge}`);
  for (const element of document.querySelectorAll("main *")) {
    if (element.closest(".scroll") && !element.classList.contains("scroll")) continue;  // scrolls in itself
    const box = element.getBoundingClientRect();
    if (box.width && getComputedStyle(element).visibility === "visible" && (box.right > edge + 0.5 || box.left < -0.5))
      found.push(`${element.tagName}.${element.getAttribute("class")} ${box.left} ${box.right}`);
  }
  return found;
}"""


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", PAGES)
def test_nothing_overflows(show: Any, name: str, width: int) -> None:
    page = show(name, width)
    for details in page.locator("summary").all():
        details.click()
    assert page.evaluate(OVERFLOW) == []


def test_on_a_phone_tables_do_not_even_scroll(show: Any) -> None:
    page = show("several", 390)
    scrolling = "[...document.querySelectorAll('.scroll')].filter((box) => box.scrollWidth > box.clientWidth).length"
    assert page.evaluate(scrolling) == 0


def test_on_a_phone_a_long_label_leaves_room_for_its_value(show: Any) -> None:
    page = show("alike", 390)
    heights = page.evaluate("[...document.querySelectorAll('#settings td')].map((cell) => cell.offsetHeight)")
    assert len(heights) > 2
    assert max(heights) < 200


CONTRAST = """() => {
  const pen = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgba = (text) => {  // whatever way CSS has of writing a colour
    pen.clearRect(0, 0, 1, 1); pen.fillStyle = text; pen.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, below) => [0, 1, 2].map((k) => top[k] * top[3] + below[k] * (1 - top[3]));
  const behind = (element) => {
    const colour = rgba(getComputedStyle(element).backgroundColor);
    if (colour[3] === 1) return colour.slice(0, 3);
    return over(colour, element.parentElement ? behind(element.parentElement) : [255, 255, 255]);
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const words = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT), found = [];
  let count = 0;
  while (words.nextNode()) {
    const element = words.currentNode.parentElement, style = getComputedStyle(element);
    if (!words.currentNode.data.trim() || style.visibility !== "visible" || style.display === "none") continue;
    for (let up = element; up; up = up.parentElement)
      if (getComputedStyle(up).opacity !== "1") found.push(`opacity ${element.textContent}`);
    const back = behind(element), ink = over(rgba(element instanceof SVGElement ? style.fill : style.color), back);
    const [a, b] = [light(back), light(ink)], ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    count++;
    const who = `${element.tagName}.${element.getAttribute("class")} ${element.textContent.slice(0, 40)}`;
    if (ratio < 4.5) found.push(`${ratio.toFixed(2)} ${who}`);
  }
  return { found, count };
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["one", "several", "long", "wide"])
def test_text_stands_out(show: Any, name: str, scheme: str) -> None:
    page = show(name, scheme=scheme)
    for details in page.locator("summary").all():
        details.click()
    measured = page.evaluate(CONTRAST)
    assert measured["found"] == []
    assert measured["count"] > 100
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", paper))) < 200) == (scheme == "dark")
