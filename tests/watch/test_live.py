"""The live page in a browser, on a run that goes on: nothing is asked of any other machine, and nothing goes wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fedstrata
from fedstrata.runs.runner import create_run, reopen, run_rounds
from fedstrata.watch.server import Server
from tests.support.make_runs import make_run
from tests.support.views import until

EVIL = "</script><script>hacked = 1</script><img src=x onerror='hacked = 1'>"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "runs").mkdir()
    server = Server([tmp_path / "runs"])
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def visit(browser: Any, server: Server) -> Iterator[Callable[..., Any]]:
    contexts, wrong = [], []

    def visited(path: str = "", width: int = 1280, scheme: str = "light") -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))

        def asked(request: Any) -> None:
            if not request.url.startswith((server.address, "data:,", "blob:")):
                wrong.append(request.url)

        page.on("request", asked)
        page.goto(server.address + path)
        return page

    yield visited
    for context in contexts:
        context.close()
    assert wrong == []


def rounds_on(page: Any) -> list[str]:
    """What the first curve can be read at, with the keyboard."""
    box, found = page.locator('figure[data-part^="curves"] .chart').first, []
    box.focus()
    for key in ["ArrowLeft"] * 8 + ["ArrowRight"] * 8:
        box.press(key)
        text = page.locator('figure[data-part^="curves"] output').first.inner_text()
        found += [part.split(" ")[1] for part in text.split(", ") if part.startswith("round ")]
    return sorted(set(found))


def test_a_round_appears_and_a_run_that_is_resumed_goes_on(
    visit: Any, server: Server, tmp_path: Path, tiny: Any
) -> None:
    recipe = fedstrata.load(tiny({"training.rounds": 5}), algorithm="fedlayerwise")
    run, experiment = create_run(recipe, tmp_path / "runs" / "going")
    rounds = run_rounds(run, experiment)
    next(rounds)
    listing = visit()
    listing.wait_for_selector("text=running")
    page = visit("view?of=0/going")
    facts = "() => document.querySelector('header .quiet').textContent"
    until(page, f"() => ({facts})().includes('running, round 1 of 5')")
    for round in (2, 3):
        next(rounds)
        until(page, f"() => ({facts})().includes('running, round {round} of 5')")
        until(listing, f"() => document.querySelector('tbody').textContent.includes('{round}/5')")
    page.wait_for_timeout(800)
    assert rounds_on(page) == ["1", "2", "3"]
    rounds.close()  # stopped, and gone on with by another process
    until(page, f"() => ({facts})().includes('stopped, round 3 of 5')")
    for _ in run_rounds(reopen(run.path), experiment):
        pass
    until(page, f"() => ({facts})().includes('finished, round 5 of 5')")
    page.wait_for_timeout(800)
    assert rounds_on(page) == ["1", "2", "3", "4", "5"]
    until(listing, "() => document.querySelector('tbody').textContent.includes('finished')")
    picture = page.locator('figure[data-part="layers/0/angle"]')
    picture.scroll_into_view_if_needed()
    until(page, "(one) => Boolean(one.dataset.drawn)", picture.element_handle())
    page.wait_for_timeout(500)
    box = picture.locator(".chart")
    box.focus()
    for _ in range(6):
        box.press("ArrowRight")
    assert "round 5" in picture.locator("output").inner_text()


def test_a_choice_and_a_zoom_outlast_a_new_round(visit: Any, tmp_path: Path, tiny: Any, server: Server) -> None:
    recipe = fedstrata.load(tiny({"training.rounds": 6}), algorithm="fedlayerwise")
    run, experiment = create_run(recipe, tmp_path / "runs" / "going")
    rounds = run_rounds(run, experiment)
    for _ in range(4):
        next(rounds)
    page = visit("view?of=0/going")
    select = page.locator("#overview label.choice", has_text="curve").locator("select")
    select.select_option(label="training loss")
    picture = page.locator('figure[data-block="curves/{label}/round/{ends}"]')
    until(
        page, "(one) => one.dataset.part.startsWith('curves/2') && Boolean(one.dataset.drawn)", picture.element_handle()
    )
    page.wait_for_timeout(300)
    box, ticks = picture.locator(".chart"), picture.locator("svg .role-axis-label text")
    box.focus()
    for _ in range(3):
        box.press("+")
    page.wait_for_timeout(200)
    zoomed = set(ticks.all_text_contents())
    next(rounds)
    until(page, "() => document.querySelector('header .quiet').textContent.includes('round 5 of 6')")
    page.wait_for_timeout(800)
    assert select.input_value() == "2"
    assert set(ticks.all_text_contents()) == zoomed
    rounds.close()


def test_names_are_only_text(visit: Any, server: Server, tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "<img src=x onerror=hacked=1>", layers=(EVIL, "b"), name="x")
    make_run(tmp_path / "runs" / "b", done=1, data={"table": [[1]] * 4, "class_names": [EVIL], "source": EVIL})
    page = visit()
    page.wait_for_selector("text=onerror")
    page.locator("tbody a").first.click()
    page.wait_for_selector("figure[data-drawn]")
    for name in ("layers", "clients"):
        page.locator(f"#{name}").scroll_into_view_if_needed()
        page.wait_for_timeout(300)
    assert page.evaluate("typeof hacked") == "undefined"
    assert page.locator("img").count() == 0


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light")])
def test_the_list_fits(visit: Any, server: Server, tmp_path: Path, width: int, scheme: str) -> None:
    make_run(tmp_path / "runs" / ("long-" * 20 + "name"), done=2)
    make_run(tmp_path / "runs" / "b")
    (tmp_path / "runs" / "b" / "recipe.toml").write_text("edited = 1")
    page = visit(width=width, scheme=scheme)
    page.wait_for_selector("text=damaged")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("tbody tr").count() == 2
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(18, 22, 28)") == (scheme == "dark")
