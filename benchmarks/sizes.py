"""How the gain of `dora` on the job `agents` depends on the size of a step: `sync` and `dora`, one run of each size.

    python -m benchmarks.sizes [--groups 16,32,48,96] [--steps 12]

With few groups there is little to compute while requests wait for tools: the gain is large, but instances still idle.
With many groups computing takes as long as the tools: instances are busy, and there is less waiting to remove.
`benchmarks.run` measures one of these sizes three times in all modes.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.decode import peak_rate
from benchmarks.report import publish
from benchmarks.run import JOBS, MODES, bound
from benchmarks.running import Figures, run
from dora_rl.apps.train import read_config

JOB = JOBS / "agents.toml"
_COLUMNS = ("groups a step", "sync tokens/s", "dora tokens/s", "of sync", "occupancy", "spare", "step s", "over bound")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", default="16,32,48,96")
    parser.add_argument("--steps", type=int, default=12)
    given = parser.parse_args()
    sizes = [int(groups) for groups in given.groups.split(",")]
    found = {groups: {mode: _run(groups, mode, given.steps) for mode in ("sync", "dora")} for groups in sizes}
    peak = peak_rate(read_config(JOB, []), found[sizes[0]]["sync"].context)
    table = Table(title=f"agents over groups a step, one run of {given.steps} steps each")
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for groups, both in found.items():
        table.add_row(str(groups), *_row(both["sync"], both["dora"], peak))
    Console(width=120).print(table)
    figures: dict[str, Any] = {str(groups): {m: asdict(f) for m, f in both.items()} for groups, both in found.items()}
    publish("sizes", [], {"steps": given.steps, "peak tokens/s of a core": peak, "groups a step": figures})


def _run(groups: int, mode: str, steps: int) -> Figures:
    return run(JOB, **MODES[mode] | {"control.groups_per_step": groups, "control.steps": steps})


def _row(sync: Figures, dora: Figures, peak: float) -> list[str]:
    return [
        f"{sync.tokens_per_second:,.0f}",
        f"{dora.tokens_per_second:,.0f}",
        f"{dora.tokens_per_second / sync.tokens_per_second:.2f}",
        f"{dora.occupancy:.0%}",
        f"{dora.idle.get('spare slot', 0.0):.0%}",
        f"{dora.step_seconds:.2f}",
        f"{dora.step_seconds / bound(sync, peak):.2f}",
    ]


if __name__ == "__main__":
    main()
