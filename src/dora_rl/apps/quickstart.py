"""`dora-rl quickstart`: trains the small job that comes with the package, so that a first run needs no other file.

Its config, task and warm model are data of the package, in the folder `quickstart`. A run that has started is like any
other: its config names that folder, and `dora-rl train --resume` continues it from anywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dora_rl import __file__ as package
from dora_rl.apps.log_level import LogLevel, log_to_stderr
from dora_rl.apps.train import (
    DryRun,
    NoTrial,
    Page,
    RayAddress,
    RunName,
    RuntimeName,
    given_settings,
    need_page,
    read_config,
    start_run,
)
from dora_rl.core.errors import UserError

CONFIG = Path(package).parent / "quickstart" / "quickstart.toml"


def quickstart(
    context: typer.Context,
    name: RunName = None,
    runtime: RuntimeName = None,
    address: RayAddress = None,
    dry_run: DryRun = False,
    no_trial: NoTrial = False,
    page: Page = False,
    log_level: LogLevel = None,
    resume: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Train the small model that comes with the package, in a few minutes. Any setting can be an option."""
    if resume is not None:
        raise UserError(f"a run of the quickstart is resumed like any other: dora-rl train --resume {resume}")
    log_to_stderr(log_level)
    if page:
        need_page()
    resolved = read_config(CONFIG, given_settings(context, runtime, address, log_level))
    start_run(resolved, CONFIG.resolve().parent, name, dry_run=dry_run, trial=not no_trial, page=page)
