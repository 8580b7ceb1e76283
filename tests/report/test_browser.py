"""The report in a real browser: a Chromium that is installed, driven by Playwright.

Without one the tests are skipped, except where CI is set: there it is an error.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedstrata.plots import tables
from fedstrata.report import write
from tests.support.make_runs import make_run
from tests.support.views import until

if "CI" not in os.environ:
    pytest.importorskip("playwright")

LONG = "a_very_long_name_without_any_space_in_it." * 6
EVIL = "</script><script>hacked = 1</script><img src=x onerror='hacked = 1'>"


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


def drawn(page: Any) -> None:
    """Wait for every picture that is in sight."""
    until(
        page,
        "() => [...document.querySelectorAll('figure')].every((one) => one.hidden || one.dataset.drawn || "
        "one.querySelector('.chart p') || one.getBoundingClientRect().top > innerHeight + 400 || "
        "one.getBoundingClientRect().bottom < -400)",
    )


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
        drawn(page)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert wrong == []


def choose(page: Any, section: str, label: str, option: str) -> None:
    select = page.locator(f"#{section} label.choice", has_text=re.compile(f"^{label}")).locator("select")
    select.select_option(label=option)


def figure(page: Any, part: str) -> Any:
    """The picture of a part, drawn."""
    found = page.locator(f'figure[data-part="{part}"]')
    found.scroll_into_view_if_needed()
    until(page, "(one) => Boolean(one.dataset.drawn)", found.element_handle())
    return found


def read_all(picture: Any) -> list[dict[str, str]]:
    """Every item of a picture that can be pointed at, read with the arrow keys: row by row."""
    box, found = picture.locator(".chart"), []
    box.focus()
    box.press("ArrowRight")

    def said() -> dict[str, str]:
        parts = picture.locator("output").inner_text().split(", ")
        return dict(part.rsplit(" ", 1) for part in parts)

    for row in range(40):
        found.append(said())
        for _ in range(40):
            before = picture.locator("output").inner_text()
            box.press("ArrowLeft" if row % 2 else "ArrowRight")
            if picture.locator("output").inner_text() == before:
                break
            found.append(said())
        before = picture.locator("output").inner_text()
        box.press("ArrowDown")
        if picture.locator("output").inner_text() == before:
            break
    return found


# --- a pointed cell --------------------------------------------------------------------------------------------------

SHOWN = {"angle": ("angle (°)", 180 / math.pi), "weight": ("weight", 1.0), "divergence": ("divergence", 1.0)}


@pytest.mark.parametrize("quantity", SHOWN)
def test_every_cell_shows_the_records_value(show: Any, folder: Path, quantity: str) -> None:
    """Read with the keyboard, which goes from cell to cell; cells of clients that were not asked are not there."""
    page, (title, factor) = show("one"), SHOWN[quantity]
    choose(page, "layers", "quantity", title.split(" ")[0])
    choose(page, "clients", "layer", "second")
    page.wait_for_timeout(100)
    found = {(one["client"], one["round"]): float(one[title]) for one in read_all(figure(page, f"cell/0/{quantity}"))}
    expected = {}
    for round in range(1, 6):
        stored = load_file(folder / "one" / "layers" / f"{round:06d}.safetensors")
        for client, value in zip(stored["clients"].tolist(), stored[quantity][:, 1].tolist(), strict=True):
            if not math.isnan(value):
                expected[str(client), str(round)] = float(f"{value * factor:.5g}")
    assert set(found) <= set(expected)
    assert len(found) > 0.6 * len(expected)  # an arrow may jump over a cell that has none beside it
    for cell, value in found.items():
        assert value == pytest.approx(expected[cell], rel=2e-5)


def test_a_pointed_cell_shows_its_value(show: Any, folder: Path) -> None:
    page = show("one")
    choose(page, "layers", "quantity", "divergence")
    page.wait_for_timeout(100)
    picture = figure(page, "layers/0/divergence")
    surface = picture.locator("canvas, svg.marks").first
    box = surface.bounding_box()
    said = {}
    for x in range(60, int(box["width"]), 25):  # across the row of the second layer
        surface.hover(position={"x": x, "y": box["height"] - 60})
        if page.locator(".tip").is_visible():
            words = page.locator(".tip div").all_inner_texts()
            told = dict(re.split(r"\n+", word) for word in words)
            said[told["layer"], told["round"]] = float(told["divergence"])
    assert len(said) >= 4
    for (layer, round), value in said.items():
        record = load_file(folder / "one" / "layers" / f"{int(round):06d}.safetensors")["divergence"]
        median = np.nanmedian(record[:, ("first", "second").index(layer)])
        assert value == pytest.approx(median, rel=2e-5)


def test_a_clicked_layer_is_the_one_of_the_clients(show: Any) -> None:
    page = show("one")
    picture = figure(page, "layers/0/angle")
    box = picture.locator(".chart")
    box.focus()
    box.press("ArrowDown")
    box.press("ArrowDown")
    assert "layer second" in picture.locator("output").inner_text()
    box.press("Enter")
    assert figure(page, "cell/0/angle").locator("figcaption").inner_text().startswith("angle in second")


def test_a_summary_says_so_and_shows_quantiles(show: Any, folder: Path) -> None:
    page = show("wide")
    assert "clients are summarised" in page.locator(".notice").inner_text()
    choose(page, "layers", "quantity", "divergence")
    choose(page, "compare", "right round", "11")
    page.wait_for_timeout(200)
    right = page.locator('figure[data-part="round/0/divergence"]').last
    right.scroll_into_view_if_needed()
    page.wait_for_timeout(500)
    box = right.locator(".chart")
    box.focus()
    values = load_file(folder / "wide" / "layers" / "000011.safetensors")["divergence"]
    for key, row in (("ArrowRight", 0), ("ArrowDown", 1), ("ArrowDown", 2)):
        box.press(key)
        said = right.locator("output").inner_text()
        assert f"client {tables.SUMMARY[row]}, layer layer0" in said
        expected = np.nanquantile(values[:, 0], (1, 0.75, 0.5)[row])
        assert float(said.rsplit(" ", 1)[1]) == pytest.approx(expected, rel=2e-5)


# --- pictures --------------------------------------------------------------------------------------------------------


def test_curves_say_what_the_history_says(show: Any) -> None:
    page = show("one")
    choose(page, "overview", "y axis", "all values")
    page.wait_for_timeout(200)
    found = read_all(figure(page, "curves/0/round/all"))
    values = {one["round"]: one["accuracy on test"] for one in found}
    assert values == {str(round): f"{round / 6:.5g}" for round in range(1, 6)}
    choose(page, "overview", "curve", "loss on test")
    page.wait_for_timeout(200)
    found = read_all(figure(page, "curves/1/round/all"))
    assert {one["round"]: float(one["loss on test"]) for one in found} == {str(t): 2 / t for t in range(1, 6)} | {
        "3": 0.66667
    }


def test_a_click_in_the_legend_filters_and_so_do_the_boxes(show: Any) -> None:
    page = show("several")
    picture = figure(page, "curves/0/round/ends")
    lines = picture.locator("svg .mark-line path[stroke-width='2.2']")
    assert lines.count() == 3
    shown = lambda: lines.evaluate_all("(all) => all.filter((one) => one.getAttribute('d')).length")  # noqa: E731
    assert shown() == 3
    picture.locator("svg .role-legend-label text", has_text="fedprox").click()
    page.wait_for_timeout(200)
    assert shown() == 1  # a first click leaves that arm alone
    picture.locator("svg .role-legend-label text", has_text="fedprox").click()
    page.wait_for_timeout(200)
    assert shown() == 3
    page.get_by_label("fedavg", exact=True).uncheck()
    page.wait_for_timeout(200)
    assert shown() == 2
    assert page.locator('figure[data-block="{layers}/{run:0}/{quantity}"]').is_hidden()
    page.get_by_label("fedavg", exact=True).check()
    page.wait_for_timeout(200)
    assert shown() == 3


def test_zoom_with_keys_and_back(show: Any) -> None:
    page = show("several")
    picture = figure(page, "curves/0/round/ends")
    ticks = lambda: picture.locator("svg .role-axis-label text").all_text_contents()  # noqa: E731
    before = ticks()
    box = picture.locator(".chart")
    box.focus()
    for _ in range(3):
        box.press("+")
    page.wait_for_timeout(200)
    assert set(ticks()) != set(before)
    box.press("0")
    page.wait_for_timeout(200)
    assert set(ticks()) == set(before)


def test_seeds_and_arms_beside_each_other(show: Any) -> None:
    page = show("several")
    assert page.locator("#overview table tbody tr").count() == 3
    assert page.locator('#layers figure[data-block^="{layers}"]').count() == 3
    assert page.locator("#bytes figure").count() == 3
    captions = page.locator("#layers figure figcaption")
    assert any("fedavg, seed 0" in text for text in captions.all_inner_texts())
    page.locator("header label.choice select").select_option(label="4")
    page.locator("#layers").scroll_into_view_if_needed()
    page.wait_for_timeout(500)
    texts = captions.all_inner_texts()
    assert any("fedavg, seed 4" in text for text in texts)
    assert any("fedprox, seed 0" in text for text in texts)  # which has no seed 4


@pytest.mark.parametrize(("form", "begins"), [("SVG", b"<svg"), ("PNG", b"\x89PNG"), ("CSV", b"layer,depth,round")])
def test_a_picture_is_saved(show: Any, tmp_path: Path, form: str, begins: bytes) -> None:
    page = show("one")
    picture = figure(page, "layers/0/angle")
    with page.expect_download() as started:
        picture.get_by_label(f"save as {form}").click()
    saved = tmp_path / "saved"
    started.value.save_as(saved)
    assert started.value.suggested_filename.endswith(f".{form.lower()}")
    assert saved.read_bytes().startswith(begins)


def test_a_table_is_saved_with_its_numbers(show: Any, tmp_path: Path) -> None:
    page = show("one")
    with page.expect_download() as started:
        page.locator('#clients [data-block^="people"]').get_by_label("save as CSV").click()
    started.value.save_as(tmp_path / "saved.csv")
    head, *rows = (line.split(",") for line in (tmp_path / "saved.csv").read_text().splitlines())
    assert head[:3] == ["client", "samples", "rounds asked"]
    assert len(rows) == 4
    assert all(row[1] == "10" for row in rows)


def test_bytes_and_classes_and_losses(show: Any) -> None:
    page = show("one")
    found = read_all(figure(page, "bytes/0/up"))
    # 100 t and 100 t + 1 bytes in round t, and 8 of feedback
    sent = {
        (one["layer"], one["round"]): float(one["bytes per round"])
        for one in found
        if "k" not in one["bytes per round"]
    }
    assert sent["first", "5"] == 500
    assert sent["second", "5"] == 501
    rows = page.locator("#data tbody tr")
    assert rows.first.inner_text().split() == ["0", "5", "·", "7", "12"]
    assert page.locator("#data thead").inner_text().split() == ["client", "cat", "dog", "owl", "all"]
    assert "2 of 15 requests" in page.locator("#clients").inner_text()
    replies = page.locator('#clients [data-block^="replies"] tbody').inner_text()
    assert "failed: ValueError: no sense (mine.py:3)" in replies


def test_names_are_only_text(show: Any) -> None:
    page = show("evil")
    for section in ("layers", "clients", "compare", "bytes"):
        page.locator(f"#{section}").scroll_into_view_if_needed()
        page.wait_for_timeout(200)
    read_all(figure(page, "layers/0/angle"))
    assert page.evaluate("typeof hacked") == "undefined"
    assert EVIL in page.locator("#clients option").all_text_contents()
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 3


def test_an_unfinished_run_says_so(show: Any) -> None:
    assert "has 2 of 3 rounds" in show("long").locator(".notice").inner_text()
    fresh = show("fresh")
    assert "has 0 of 3 rounds" in fresh.locator(".notice").inner_text()
    assert "No round is done yet" in fresh.locator("#overview").inner_text()


# --- fit and contrast ------------------------------------------------------------------------------------------------

OVERFLOW = """() => {
  const edge = document.documentElement.clientWidth, found = [];
  if (document.documentElement.scrollWidth > edge) found.push(`page ${document.documentElement.scrollWidth} > ${edge}`);
  for (const element of document.querySelectorAll("main *")) {
    if (element.closest("svg") && element.tagName !== "svg") continue;  // clipped by it
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
    for section in page.locator("section").all():
        section.scroll_into_view_if_needed()
        drawn(page)
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
    if (element instanceof SVGElement && style.opacity === "0") continue;  // a label for which there is no room
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
    assert measured["count"] > 60
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", paper))) < 200) == (scheme == "dark")
