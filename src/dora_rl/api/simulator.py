"""`dora_rl.Simulator`: the simulator of `dora-rl sim` as an object, with the same settings and results."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console

from dora_rl.apps.output_file import check_writable
from dora_rl.apps.simulate import figures, print_results, settings_of
from dora_rl.apps.timeline import write_timeline
from dora_rl.core.config import build, merge
from dora_rl.core.errors import UserError
from dora_rl.orchestrator.modes import MODES
from dora_rl.sim.config import SimConfig
from dora_rl.sim.run import Result, parse_variant, simulate

SimulationResult: TypeAlias = Result
"""The measurements of one mode."""

_WIDTH = 100
"""Columns of the tables as text."""


class Comparison(Mapping[str, SimulationResult]):
    """The results of several modes, by their names; as text, the tables that `dora-rl sim` prints."""

    def __init__(self, name: str, config: SimConfig, results: Mapping[str, SimulationResult]) -> None:
        self._name = name
        self._config = config
        self._results = dict(results)

    def __getitem__(self, mode: str) -> SimulationResult:
        return self._results[mode]

    def __iter__(self) -> Iterator[str]:
        return iter(self._results)

    def __len__(self) -> int:
        return len(self._results)

    def figures(self) -> dict[str, Any]:
        """The figures of all modes as plain data, as `dora-rl sim --json` writes them."""
        return figures(self._name, self._config, self._results)

    def text(self, width: int = _WIDTH) -> str:
        """The tables in so many columns."""
        out = io.StringIO()
        print_results(Console(file=out, width=width), self._name, self._config, self._results)
        return out.getvalue()

    def write_html(self, path: str | Path) -> Path:
        """Write a page with the timeline of each mode, as `dora-rl sim --html` does."""
        if any(result.timeline is None for result in self._results.values()):
            raise UserError("the timelines were not kept: call compare with timeline=True")
        file = Path(path)
        check_writable(file)
        write_timeline(file, self._name, self.figures(), self._results)
        return file

    def __str__(self) -> str:
        return self.text()


class Simulator:
    """A cluster and a workload, on which modes are simulated with the orchestrator that real runs use.

    `preset` is one of the presets of `dora-rl sim` or a TOML file of settings. `settings` take the place of its own: a
    section is a mapping, which keeps the other keys, and a dotted name sets one key:
    `Simulator("laptop", steps=5, control={"max_staleness": 2})`.
    """

    def __init__(self, preset: str | Path = "laptop", **settings: Any) -> None:
        self._name = str(preset)
        self._config = build(SimConfig, merge(settings_of(self._name), settings), self._name)

    def run(
        self, mode: str = "dora", *, timeline: bool = False, progress: Callable[[int], None] | None = None
    ) -> SimulationResult:
        """Simulate one mode, or a variant of it such as `dora:k1`, `dora:proportional` or `dora:elastic`.

        With `timeline` the result has the activity of each slot and of the trainer. `progress` is called with the
        newest version whenever one is published.
        """
        return simulate(self._config, parse_variant(mode), timeline=timeline, progress=progress)

    def compare(self, *modes: str, timeline: bool = False) -> Comparison:
        """Simulate several modes, without arguments all of them, on the same workload."""
        variants = [parse_variant(mode) for mode in modes or MODES]
        results = {one.name: simulate(self._config, one, timeline=timeline) for one in variants}
        return Comparison(self._name, self._config, results)

    def __repr__(self) -> str:
        return f"Simulator({self._name!r}, devices={self._config.devices})"
