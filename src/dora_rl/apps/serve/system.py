"""The data of System: instances and what they did, the configuration against its defaults, and the ends of the logs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dora_rl.apps.compare import flatten
from dora_rl.apps.config_options import default_of, section_of
from dora_rl.apps.run_reader import open_ledger
from dora_rl.apps.serve.live_run import LiveRun
from dora_rl.apps.serve.runs_folder import is_inside
from dora_rl.apps.summary import shares, worker_id
from dora_rl.core.errors import UserError
from dora_rl.core.time_accounting import occupancy
from dora_rl.core.types import SECOND
from dora_rl.runtime.config import RunConfig

if TYPE_CHECKING:
    from pydantic import BaseModel

_TAIL = 48_000
"""Bytes of a log that are shown."""
_MOST_NOTES = 200
_GENERATED = "SELECT instance, count(*), sum(tokens) FROM trajectories WHERE tokens IS NOT NULL GROUP BY 1"


def system(run: LiveRun) -> dict[str, Any]:
    """What System shows; hold the run's lock."""
    run.refresh()
    generated: dict[str, tuple[int, int]] = {}
    if run.folder.ledger.exists():
        with open_ledger(run.folder) as ledger:
            generated = {name: (count, tokens) for name, count, tokens in ledger.execute(_GENERATED)}
    instances = []
    for name, time in sorted(run.lanes.by_instance.items()):
        slots = sum(1 for lane in run.lanes.slots if lane.partition("/")[0] == worker_id(name))
        seconds = sum(time.values()) / SECOND / max(1, slots)
        count, tokens = generated.get(name, (0, 0))
        instances.append(
            {"name": name, "slots": slots, "seconds": seconds, "occupancy": occupancy(time), "responses": count,
             "tokens": tokens, "tokens_per_second": tokens / seconds if seconds else 0.0,
             "shares": list(shares(time).items())[:8]}
        )  # fmt: skip
    notes = [note for note in run.notes if note["note"] in ("lost", "left")][-_MOST_NOTES:]
    return {
        "instances": instances,
        "events": [[note["at"] / SECOND, note["note"], note["who"], note.get("reason", "")] for note in notes],
        "settings": settings(run),
        "logs": logs(run),
        "files": [[path.name, path.stat().st_size] for path in sorted(run.folder.path.iterdir()) if path.is_file()],
    }


def settings(run: LiveRun) -> list[dict[str, Any]]:
    """All settings with their defaults; a setting without a default, or with another value, differs."""
    known = dict(_defaults(RunConfig, None, ""))
    return [
        {"name": name, "value": value, "default": known.get(name), "differs": name not in known or value != known[name]}
        for name, value in flatten(run.folder.settings())
    ]


def _defaults(kind: type[BaseModel], value: BaseModel | None, path: str) -> Iterator[tuple[str, Any]]:
    for name, field in kind.model_fields.items():
        default = default_of(field, value, name)
        section = section_of(field)
        if section is not None:
            if default is None:
                yield f"{path}{name}", None  # a section that is off
            yield from _defaults(section, default, f"{path}{name}.")
        elif value is not None or not field.is_required():
            yield f"{path}{name}", list(default) if isinstance(default, tuple) else default


def logs(run: LiveRun) -> list[str]:
    """Names of the logs; links are left out."""
    if not run.folder.logs.is_dir():
        return []
    root = run.folder.path.resolve()
    return sorted(path.name for path in run.folder.logs.iterdir() if path.is_file() and is_inside(path, root))


def log_tail(run: LiveRun, name: str) -> dict[str, Any]:
    """The end of a log; the name is one of `logs`."""
    if name not in logs(run):
        raise UserError("there is no such log")
    descriptor = os.open(run.folder.logs / name, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL))
        text = file.read(_TAIL).decode("utf-8", "replace")
    return {"name": name, "size": size, "text": text if size <= _TAIL else text.partition("\n")[2]}
