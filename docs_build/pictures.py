"""Draws the timelines of the documentation from simulations of one workload: `python -m docs_build.pictures`.

The command that prints the figures of the same workload is `COMMAND`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from docs_build.drawing import Panel, picture
from docs_build.recording import Recording, record
from dora_rl.core.types import SECOND, Nanoseconds, Version
from dora_rl.orchestrator.modes import MODES
from dora_rl.sim.presets import preset

DOCS = Path(__file__).parent.parent / "docs"
SETTINGS = ("devices=6", "trainer_devices=2", "workload.sigma=1.3", "control.max_response_tokens=1024", "seed=28")
COMMAND = " ".join(["dora-rl sim laptop", *(f"--set {setting}" for setting in SETTINGS)])
_WARM = 6
"""Version with which the pictures begin: the pipeline is full."""
_STEPS = 20
"""Steps that are simulated; more than a picture shows."""
_SECONDS = 10.0
"""What a picture shows."""
_ABOUT = {
    "sync": "rollout and training take turns; both wait for the longest response",
    "one_step_off": "the next batch is generated while the last one trains",
    "partial": "new weights are loaded under running requests: responses mix versions",
    "dora": "old versions finish their responses while the newest serves new ones",
}


def recordings() -> dict[str, Recording]:
    """The workload of the pictures in each mode."""
    config = preset("laptop", [*SETTINGS, f"steps={_STEPS}", "warmup_steps=0"])
    return {mode: record(config, mode) for mode in MODES}


def draw(found: dict[str, Recording]) -> Iterator[tuple[str, str]]:
    """The path of each picture below `docs/`, and its content."""
    both = [_whole(found[mode]) for mode in ("sync", "dora")]
    yield "timeline.svg", picture(both, about="Timelines of sync and dora for the same workload")
    for mode, recording in found.items():
        yield f"pictures/{mode}.svg", picture([_whole(recording)], about=f"Timeline of mode {mode}")
    for number, panel in enumerate(_steps(found["dora"]), start=1):
        yield f"pictures/streaming-{number}.svg", picture([panel], about=f"{panel.title}: {panel.about}")


def _whole(recording: Recording) -> Panel:
    start = recording.published[_WARM]
    end = start + round(_SECONDS * SECOND)
    done = sum(start < when <= end for when in recording.published.values())
    return Panel(
        recording=recording,
        title=f"{recording.mode}: {done} steps in {_SECONDS:g} s",
        about=_ABOUT[recording.mode],
        start=start,
        seconds=_SECONDS,
    )


def _steps(recording: Recording) -> Iterator[Panel]:
    """The life of one version that has stragglers, in four moments."""
    old = version_with_stragglers(recording)
    start, published, ended = recording.published[old], recording.published[old + 1], recording.last_end(old)
    margin = (ended - start) // 30
    moments: list[tuple[str, Nanoseconds]] = [
        (f"version {old} is the newest: new groups get it", published - margin),
        (f"version {old + 1} is published: the last requests of version {old} move together", published + margin),
        (f"version {old} finishes its requests, newer versions serve all others", (published + ended) // 2),
        (f"version {old} has no requests left and is retired", ended + margin),
    ]
    seconds = (ended + 2 * margin - start) / SECOND
    for number, (about, until) in enumerate(moments, start=1):
        yield Panel(recording=recording, title=str(number), about=about, start=start, seconds=seconds, until=until)


def version_with_stragglers(recording: Recording) -> Version:
    """The first version, once the pipeline is full, whose requests move from several slots to one when the next version
    is published, and end there."""
    for version in range(_WARM, _STEPS - 3):
        published = recording.published[version + 1]
        moves = [(source, target) for when, source, target, _ in recording.moves if when == published]
        sources, targets = {source for source, _ in moves}, {target for _, target in moves}
        versions = {recording.version_before(source, published) for source in sources}
        if len(sources) > 1 and len(targets) == 1 and versions == {version}:
            return version
    raise AssertionError("no version has stragglers that move together: choose another workload")


def main() -> None:
    for name, content in draw(recordings()):
        path = DOCS / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content, encoding="utf-8")
        print(path.relative_to(DOCS.parent))


if __name__ == "__main__":
    main()
