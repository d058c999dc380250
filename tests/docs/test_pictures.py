"""The pictures are drawn from simulations, and are those that are stored."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from docs_build.pictures import COMMAND, SETTINGS, draw, recordings, version_with_stragglers

from dora_rl.orchestrator.modes import MODES
from dora_rl.sim.presets import preset
from dora_rl.sim.run import parse_variant, simulate
from tests.docs.pages import DOCS, ROOT, blocks, commands

if TYPE_CHECKING:
    from docs_build.recording import Recording

NUMBER = re.compile(r"\d+(?:\.\d+)?")


def numbers(content: str) -> list[float]:
    return [float(number) for number in NUMBER.findall(content)]


@pytest.fixture(scope="module")
def found() -> dict[str, Recording]:
    return recordings()


def test_the_stored_pictures_are_the_drawn_ones(found: dict[str, Recording]) -> None:
    """After a deliberate change of scheduling: `python -m docs_build.pictures` draws them again."""
    for name, content in draw(found):
        stored = (DOCS / name).read_text()
        assert NUMBER.sub("#", stored) == NUMBER.sub("#", content), name
        # Lengths are drawn with exp, whose last digit depends on the processor.
        assert numbers(stored) == pytest.approx(numbers(content), abs=0.3), name


def test_pictures_are_well_formed_and_fit(found: dict[str, Recording]) -> None:
    for name, content in draw(found):
        root = ET.fromstring(content)
        _, _, width, height = map(float, root.attrib["viewBox"].split())
        space = "{http://www.w3.org/2000/svg}"
        assert root.find(f"{space}title") is not None
        for rect in root.iter(f"{space}rect"):
            right = float(rect.get("x", "0")) + float(rect.attrib["width"])
            assert right <= width + 0.1, name
        assert height > 100


def test_in_dora_a_batch_has_one_version_and_in_partial_it_changes(found: dict[str, Recording]) -> None:
    """What the page on streaming says of its pictures."""

    def changes(recording: Recording) -> int:
        """How often a slot goes from one version to another with requests in its batch."""
        return sum(
            before.version != after.version
            for moments in recording.slots.values()
            for before, after in pairwise(moments)
            if before.requests and after.requests and before.end == after.start
        )

    assert changes(found["dora"]) == changes(found["sync"]) == 0
    assert changes(found["partial"]) > 10


def test_several_versions_are_live_in_dora_only(found: dict[str, Recording]) -> None:
    def most_live(recording: Recording) -> int:
        times = sorted({moment.start for moments in recording.slots.values() for moment in moments})
        return max(
            len(
                {
                    moment.version
                    for moments in recording.slots.values()
                    for moment in moments
                    if moment.requests and moment.start <= time < moment.end
                }
            )
            for time in times
        )

    assert most_live(found["dora"]) >= 3
    assert most_live(found["sync"]) == most_live(found["one_step_off"]) == 1


def test_dora_trains_twice_the_steps(found: dict[str, Recording]) -> None:
    """What README.md and docs/index.md say of the picture."""
    sync, dora = re.findall(r"(?:sync|dora): (\d+) steps", dict(draw(found))["timeline.svg"])
    assert int(dora) == 2 * int(sync) > 0
    assert f"sync trains {sync} steps and dora {dora}]" in (ROOT / "README.md").read_text()


def test_the_version_of_the_steps_has_moves(found: dict[str, Recording]) -> None:
    version = version_with_stragglers(found["dora"])
    third = dict(draw(found))["pictures/streaming-3.svg"]
    assert "moved with KV" in third
    assert f"version {version}" in third


def test_the_page_has_the_command_of_the_workload_and_its_figures() -> None:
    path = DOCS / "concepts" / "streaming.md"
    page = path.read_text()
    assert COMMAND in [command for block in blocks(path) for command in commands(block)]
    config = preset("laptop", list(SETTINGS))
    for mode in MODES:
        result = simulate(config, parse_variant(mode))
        row = f"| `{mode}` | {result.step_seconds:.2f} s | {result.occupancy:.0%} | {result.mean_staleness:.2f} |"
        assert row in page
