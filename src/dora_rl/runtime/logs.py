"""Logging of the runtime: the standard `logging`, with one logger per module below `dora_rl`.

Worker processes log to their stderr, which is their log file; the supervisor logs to `logs/supervisor.log` of the run
directory. The level is `logging.level` of the config. Commands without a run directory log to stderr, at the level of
their option `--log-level`.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TextIO

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_HANDLER = "dora_rl.runtime"
_ROOT = logging.getLogger("dora_rl")


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the current `sys.stderr`: a progress bar, or a test, replaces it for a while."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)  # the stream is looked up for each message

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def configure(level: str, file: Path | None = None) -> None:
    """Log messages of at least this level to a file, or to stderr; a second call replaces the handler of the first."""
    close()
    handler = _StderrHandler() if file is None else logging.FileHandler(file, encoding="utf-8")
    handler.set_name(_HANDLER)
    handler.setFormatter(logging.Formatter(_FORMAT))
    _ROOT.addHandler(handler)
    _ROOT.setLevel(level.upper())
    _ROOT.propagate = False  # libraries may add a handler to the root logger, which would log each message twice


def close() -> None:
    """Undo `configure`: remove its handler and close its file."""
    for handler in [one for one in _ROOT.handlers if one.get_name() == _HANDLER]:
        _ROOT.removeHandler(handler)
        handler.close()
    _ROOT.setLevel(logging.NOTSET)
    _ROOT.propagate = True
