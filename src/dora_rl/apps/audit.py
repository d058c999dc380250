"""`dora-rl audit`: whether a run has kept its promises, from its ledger alone."""

from __future__ import annotations

import sys
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from dora_rl.control.config import ControlConfig
from dora_rl.control.modes import make_mode
from dora_rl.control.orchestrator import Orchestrator
from dora_rl.ledger.audit import Audit, Named
from dora_rl.ledger.audit import audit as read
from dora_rl.ledger.ledger import Logged
from dora_rl.ledger.witness import Terms
from dora_rl.runtime.replay import replay

if TYPE_CHECKING:
    from dora_rl.runtime.folder import RunFolder


def audit(run: Annotated[Path, typer.Argument(help="Folder of a run.")]) -> None:
    """Check a run: nothing lost, nothing trained twice, no bound broken, no trajectory of mixed weights."""
    from dora_rl.runtime.folder import RunFolder

    found = audited(RunFolder.open(run))
    console = Console()
    table = Table(box=None, show_header=False)
    for figure in found.figures:
        table.add_row(figure.name, figure.value)
    console.print(table)
    for problem in found.problems:
        console.print(f"- {problem}", highlight=False, markup=False, soft_wrap=True)
    console.print(verdict(found), highlight=False)
    if found.problems:
        sys.exit(1)


def audited(folder: RunFolder) -> Audit:
    """The audit of a run."""
    control = folder.read().control
    found = read(folder.ledger, terms(control))
    problem = _replayed(control, found.log)
    found.problems += [problem] if problem else []
    found.figures.append(Named("replayed with the same decisions", "no" if problem else "yes"))
    return found


def verdict(found: Audit) -> str:
    """One line."""
    if found.problems:
        return f"broken: {len(found.problems)} of the run's promises, see above"
    state = "finished" if found.finished else "not finished"
    return f"kept: all promises, in {found.steps} steps of a run that is {state}"


def terms(control: ControlConfig) -> Terms:
    """What a configuration promises."""
    mode = make_mode(control)
    return Terms(
        groups_per_step=control.groups_per_step,
        group_size=control.group_size,
        staleness=mode.staleness,
        mixes=mode.mixes_versions,
        steps=control.steps,
    )


def _replayed(control: ControlConfig, log: list[Logged]) -> str:
    """Where a fresh orchestrator decides otherwise; empty if nowhere."""
    try:
        deque(replay(Orchestrator(control), log), maxlen=0)
    except Exception as error:  # a log that was tampered with can bring it into any state
        return str(error) or f"the log can't be replayed: {type(error).__name__}"
    return ""
