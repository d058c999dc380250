"""`train --page`: the page of a real run answers while the run lasts, and ends with it."""

from __future__ import annotations

import io
import re
import threading
from pathlib import Path

import httpx2 as httpx
import pytest
from rich.console import Console

from dora_rl.apps.train import run_to_end
from tests.runtime.making import lines, make_base, make_run, merged, settings
from tests.serve.conftest import PATIENCE


def test_the_page_answers_while_the_run_lasts(tmp_path: Path) -> None:
    base = make_base(tmp_path)
    waiting = {"reward": {"functions": ["task.py:waits_to_be_released"]}}
    folder = make_run(base, "live", merged(settings(base, steps=2), waiting))
    screen, printed, seen = io.StringIO(), threading.Event(), []

    class Screen(Console):
        def print(self, *objects: object, **options: object) -> None:
            super().print(*objects, **options)  # type: ignore[arg-type]
            printed.set()

    def visit() -> None:
        """Look at the run while its rewards wait, then release them."""
        try:
            assert printed.wait(PATIENCE)
            address = screen.getvalue().split()[1]
            with httpx.Client(timeout=PATIENCE, trust_env=False, follow_redirects=True) as http:
                http.get(address)
                seen.append((address.partition("?")[0], http.get(f"{address.partition('?')[0]}api/runs").json()))
        finally:
            (base / "released").touch()

    visitor = threading.Thread(target=visit)
    visitor.start()
    run_to_end(folder, Screen(file=screen, width=200), page=True)
    visitor.join(PATIENCE)
    ((url, answer),) = seen
    assert re.match(r"page http://127\.0\.0\.1:\d+/\?token=\S+\n", screen.getvalue())
    assert [run["id"] for run in answer["runs"]] == ["live"]
    assert answer["runs"][0]["state"] != "finished"
    assert len([line for line in lines(folder.metrics) if "step" in line]) == 2
    with pytest.raises(httpx.ConnectError), httpx.Client(trust_env=False) as http:
        http.get(url)
