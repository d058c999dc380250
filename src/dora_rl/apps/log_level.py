"""The option `--log-level` of commands that run something."""

from __future__ import annotations

from typing import Annotated

import typer

from dora_rl.core.errors import UserError

LEVELS = ("debug", "info", "warning", "error")
_DEFAULT = "warning"


def _check(level: str | None) -> str | None:
    if level is not None and level.lower() not in LEVELS:
        raise UserError(f"'--log-level' must be one of {', '.join(LEVELS)}, not '{level}'")
    return None if level is None else level.lower()


LogLevel = Annotated[
    str | None,
    typer.Option(
        metavar="LEVEL", callback=_check, help=f"Least severe log messages: {', '.join(LEVELS)}; default: {_DEFAULT}."
    ),
]


def log_to_stderr(level: str | None) -> None:
    """Log messages of at least this level to standard error."""
    from dora_rl.runtime import logs

    logs.configure(level or _DEFAULT)
