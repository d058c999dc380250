"""Which runs are served, and that no file outside their folder is read.

Invariants:
- a run is found by the name of its folder among those that are there; no path is made from a request;
- a folder that is a link, and a run one of whose files is a link or lies elsewhere, is not served.
"""

from __future__ import annotations

import threading
from pathlib import Path

from dora_rl.apps.run_reader import is_run
from dora_rl.apps.runs import find
from dora_rl.apps.serve.live_run import LiveRun
from dora_rl.core.errors import UserError
from dora_rl.runtime.run_dir import RunDir


class RunsFolder:
    """A folder of runs, or the folder of one run."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise UserError(f"there is no folder '{path}': name a run, or the folder that holds your runs")
        self.root = path.resolve()
        self._single = is_run(self.root)
        self._known: dict[str, LiveRun] = {}
        self._lock = threading.Lock()

    def runs(self) -> list[LiveRun]:
        """The runs that are there now, newest first."""
        found = [RunDir(self.root)] if self._single else find(self.root)
        with self._lock:
            allowed = [folder for folder in found if self._contained(folder)]
            return [self._run(folder) for folder in allowed]

    def get(self, name: str) -> LiveRun | None:
        """The run of this name."""
        return next((run for run in self.runs() if run.name == name), None)

    def _run(self, folder: RunDir) -> LiveRun:
        name = folder.path.name
        if name not in self._known:
            self._known[name] = LiveRun(folder)
        return self._known[name]

    def _contained(self, folder: RunDir) -> bool:
        log = folder.ledger
        files = [folder.config, folder.metrics, folder.samples, folder.activity, folder.lock, folder.logs]
        files += [log, log.with_name(f"{log.name}-wal"), log.with_name(f"{log.name}-shm"), folder.checkpoints]
        return all(is_inside(path, self.root) for path in (folder.path, *files))


def is_inside(path: Path, root: Path) -> bool:
    """Whether the path is no link and lies in the folder `root`; one that does not exist is fine."""
    return not path.is_symlink() and path.resolve().is_relative_to(root)
