"""`dora-rl audit`: checks from its ledger alone whether a run has kept its promises."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from dora_rl.apps.run_reader import is_running
from dora_rl.core.config import build
from dora_rl.core.errors import IntegrityError
from dora_rl.core.file_digests import bytes_digest
from dora_rl.ledger.audit import Audit, Named
from dora_rl.ledger.audit import audit as read
from dora_rl.ledger.auditor import Terms
from dora_rl.ledger.ledger import LedgerError, SchemaError, connect, read_records
from dora_rl.ledger.run_records import CheckpointSaved, Configured, RecordedAt, SettingChanged
from dora_rl.ledger.writer import LoggedEvent
from dora_rl.orchestrator.config import ControlConfig
from dora_rl.orchestrator.orchestrator import Orchestrator
from dora_rl.runtime.checkpoint_manifest import checkpoint_problems, policy
from dora_rl.runtime.provenance import config_problems, files_changed
from dora_rl.runtime.supervisor.replay import replay

if TYPE_CHECKING:
    from dora_rl.runtime.run_dir import RunDir


def audit(run: Annotated[Path, typer.Argument(help="Folder of a run.")]) -> None:
    """Check from its ledger that a run lost no group, trained none twice, kept the bound and mixed no versions."""
    from dora_rl.runtime.run_dir import RunDir

    found = audited(RunDir.open(run))
    console = Console()
    table = Table(box=None, show_header=False)
    for figure in found.figures:
        table.add_row(figure.name, figure.value)
    console.print(table)
    for problem in found.problems:
        console.print(f"- {problem}", highlight=False, markup=False, soft_wrap=True)
    console.print(conclusion(found), highlight=False)
    if found.problems:
        sys.exit(1)


def audited(folder: RunDir) -> Audit:
    """Audit a run: its ledger, its decisions, its config and its checkpoints."""
    control = _initial_control(folder)
    found = read(folder.ledger, terms(control))
    problem = _replay_problem(control, found.log)
    found.problems += [problem] if problem else []
    found.figures.append(Named("replayed with the same decisions", "no" if problem else "yes"))
    records = [recorded.record for recorded in found.records]
    found.problems += config_problems(records, str(folder.base()), folder.settings())
    found.problems += checkpoint_problems(records, folder.checkpoints, found.steps, running=is_running(folder))
    found.figures += _record_figures(found.records)
    return found


def _initial_control(folder: RunDir) -> ControlConfig:
    """The control settings that the run began with: from its ledger, or from `config.json` if that can't be read."""
    try:
        connection = connect(folder.ledger)
        try:
            begun = next((one.record for one in read_records(connection) if isinstance(one.record, Configured)), None)
        finally:
            connection.close()
    except SchemaError:
        raise
    except (LedgerError, IntegrityError):
        begun = None
    settings = folder.settings() if begun is None else begun.config
    return build(ControlConfig, settings.get("control", {}), str(folder.config if begun is None else folder.ledger))


def _record_figures(records: list[RecordedAt]) -> Iterator[Named]:
    """Figures of the run records."""
    for one in records:
        if isinstance(one.record, Configured):
            yield Named("configuration, digest", one.record.digest[:16])
    for one in records:
        if isinstance(one.record, SettingChanged):
            change = f"{json.dumps(one.record.before)} -> {json.dumps(one.record.after)}, {one.record.utc}"
            yield Named(f"  {one.record.key} changed", change)
    for text in files_changed(records):
        yield Named("  a file that the run reads changed", text)
    saved = [one.record for one in records if isinstance(one.record, CheckpointSaved)]
    yield Named("checkpoints saved", f"{len(saved):,}")
    if saved:
        digest = bytes_digest(
            "".join(f"{name} {one.digest}\n" for name, one in sorted(policy(saved[-1]).items())).encode()
        )
        yield Named("policy of the last checkpoint, digest", digest[:16])


def conclusion(found: Audit) -> str:
    """The result of an audit in one line."""
    if found.problems:
        return f"broken: {len(found.problems)} of the run's promises, see above"
    state = "finished" if found.finished else "not finished"
    return f"kept: all promises, in {found.steps} steps of a run that is {state}"


def terms(control: ControlConfig) -> Terms:
    """The promises of a configuration."""
    return Terms(
        groups_per_step=control.groups_per_step,
        group_size=control.group_size,
        max_staleness=control.staleness,
        mixes_versions=control.mode_spec.mixes_versions,
        steps=control.steps,
        dynamic_sampling=control.dynamic_sampling,
    )


def _replay_problem(control: ControlConfig, log: list[LoggedEvent]) -> str:
    """Where a fresh orchestrator gives other commands than the log has; empty if nowhere."""
    try:
        deque(replay(Orchestrator(control), log), maxlen=0)
    except Exception as error:  # a log that was tampered with can bring the orchestrator into any state
        return str(error) or f"the log can't be replayed: {type(error).__name__}"
    return ""
