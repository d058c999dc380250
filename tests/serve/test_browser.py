"""The page in a real browser: every view, zoom, hostile text, a live update, and a connection that is lost and returns.

It needs playwright and Debian's Chromium (`apt-get install chromium`), and is skipped without them.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import TOKEN, Server, start_server

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
PATIENCE_MS = 120_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


@pytest.fixture
def page(browser: Any, server: Server) -> Iterator[Any]:
    """The page with the token; any script error or breach of the content security policy fails the test."""
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.set_default_timeout(PATIENCE_MS)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if "Security" in message.text else None)

    def dismiss(dialog: Any) -> None:
        problems.append(f"dialog {dialog.message}")
        dialog.dismiss()

    page.on("dialog", dismiss)
    page.goto(f"{server.url}/?token={TOKEN}")
    page.wait_for_selector("nav a")  # from now on it listens to keys
    yield page
    page.close()
    assert problems == []


def test_every_view_is_drawn_from_the_run(page: Any) -> None:
    page.wait_for_selector("text=Is it learning?")
    assert "token" not in page.url
    page.keyboard.press("2")
    page.wait_for_selector("text=idle:")
    whole = page.text_content("output")
    page.keyboard.press("+")
    page.wait_for_function("before => document.querySelector('output').textContent !== before", arg=whole)
    page.keyboard.press("0")
    page.wait_for_function("before => document.querySelector('output').textContent === before", arg=whole)
    for key, text in (("3", "Nothing is lost"), ("4", "reward/mean"), ("5", "trajectories"), ("6", "Instances")):
        page.keyboard.press(key)
        page.wait_for_selector(f"main >> text={text}")
    for scheme in ("dark", "light"):
        page.emulate_media(color_scheme=scheme)
        for width in (700, 1400, 2400):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing is wider than the window"


def test_hostile_text_is_shown_and_does_nothing(page: Any, runs: Path) -> None:
    samples = runs / "small" / "samples.jsonl"
    hostile = "<img src=x onerror=alert(1)></pre><script>alert(2)</script>"
    records = [json.loads(line) | {"prompt": hostile} for line in samples.read_text().splitlines()]
    samples.write_text("".join(json.dumps(record) + "\n" for record in records))
    page.keyboard.press("5")
    page.click("table .link")
    page.wait_for_selector(".siblings")
    assert page.text_content("pre.observed") == hostile
    assert page.locator("main img, main script").count() == 0


def test_new_steps_appear_without_a_reload(page: Any, runs: Path) -> None:
    page.wait_for_selector("text=Is it learning?")
    metrics = runs / "small" / "metrics.jsonl"
    last = json.loads(next(line for line in reversed(metrics.read_text().splitlines()) if '"step"' in line))
    with metrics.open("a") as file:
        for step in range(5, 40):
            file.write(json.dumps(last | {"step": step, "version": step + 1, "reward/mean": 50.0}) + "\n")
    page.wait_for_selector("main >> text=50.000 in the last")


def test_the_page_says_when_the_connection_is_lost_and_catches_up(page: Any, server: Server, runs: Path) -> None:
    page.wait_for_selector("#link >> text=connected")
    server.stop()
    page.wait_for_selector("#lost:not([hidden])")
    assert "may be old" in page.text_content("#lost")
    with (runs / "small" / "activity.jsonl").open("a") as file:
        file.write('{"note": "lost", "at": 1, "who": "i0.1", "reason": "meanwhile"}\n')
    again = start_server(runs, port=int(re.sub(r".*:", "", server.url)))
    page.wait_for_selector("#lost[hidden]", state="attached")
    page.wait_for_selector("main >> text=processes restarted")
    again.stop()
